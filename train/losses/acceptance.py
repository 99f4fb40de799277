"""End-to-end acceptance: how many tokens of a chain of K drafts are accepted on average, as a loss; and D-PACE's weights, which come from it.

At position t step k is accepted with probability α_k(t) = Σ_v min(p_{t+1+k}(v), q_k(t)(v)) if all steps before it are, so that the expected
accepted length is E(t) = Σ_m Π_{k≤m} α_k(t). Its gradient is Σ_k w_k(t) · ∇ log α_k(t) with w_k = Σ_{m≥k} Π_{i≤m} α_i: a step counts as much
as is lost where it is missed. The gradient of 1 − E/K is therefore that of the loss `lk`, −log α, with the weights w / K held constant.

Letters: B sequences · A anchors · K draft steps · M positions (batch and sequence flattened) · V target vocabulary · D draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.train.losses.chunked import Head
from draftsmith.train.losses.draft import DraftLosses, chunked_draft_loss

__all__ = ["acceptance_loss", "paced"]


def acceptance_loss(
    hidden: Sequence[Tensor],
    heads: Sequence[Head],
    target_hidden: Tensor,
    target_head: Head,
    counted: Tensor,
    scale: Tensor,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_t scale(t) · (n(t) − E(t)) / K, where n(t) of the chain's steps count. It takes two passes through the heads: one for α, one for gradients.

    Args:
        hidden: K tensors [M,·], what the heads read; row t of step k is compared with the target's row t + 1 + k.
        heads: K heads, or one that serves all steps.
        target_hidden, target_head, target_ids: as in `chunked_draft_loss`.
        counted: [K,M] bool; a step counts while all before it count.
        scale: [M] ≥ 0.

    Returns:
        The sum, a scalar to call backward on, once. Hits [K,M] bool: the drafter's best token is the target's best.
    """
    counted = counted.cumprod(0)

    def each(weights: Tensor, loss: str) -> list[DraftLosses]:
        if len(heads) == 1:
            parts = [(torch.stack(list(hidden)), heads[0], range(1, len(hidden) + 1), weights)]
        else:
            parts = [(hidden[k][None], heads[k], [k + 1], weights[k : k + 1]) for k in range(len(hidden))]
        return [chunked_draft_loss(x, head, target_hidden, target_head, w, shifts, target_ids, loss) for x, head, shifts, w in parts]

    with torch.no_grad():
        first = each(counted * (scale > 0).to(target_hidden.dtype), "tv")
        accepted = torch.cat([part.overlap for part in first])
        weights = paced(accepted.T, counted.T, 0.0).T * (scale / len(hidden))
        lost = (scale * (counted - (accepted * counted).cumprod(0)).sum(0)).sum() / len(hidden)
    total = torch.stack([part.sum for part in each(weights, "lk")]).sum()
    return total + (lost - total).detach(), torch.cat([part.hits for part in first])


def paced(accepted: Tensor, supervised: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights [...,K]: Σ_{m≥j} Π_{i≤m} s_i, with s = (1 − smoothing) · accepted + smoothing.

    It is what the expected accepted length loses where token j is missed, but for the smoothing. `accepted` [...,K] is the probability that
    token j is accepted if those before it are, without a graph; `supervised` [...,K] is 0 from the first token on that does not count.
    """
    survival = (((1 - smoothing) * accepted + smoothing) * supervised).cumprod(-1)
    return survival.flip(-1).cumsum(-1).flip(-1) * supervised
