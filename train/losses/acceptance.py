"""End-to-end acceptance: how many tokens of a chain of K drafts are accepted on average, as a loss; and D-PACE's weights, which come from it.

At position t step k is accepted with probability α_k(t) = Σ_v min(p_{t+1+k}(v), q_k(t)(v)) if all steps before it are, so that the expected
accepted length is E(t) = Σ_m Π_{k≤m} α_k(t). Its gradient is Σ_k w_k(t) · ∇ log α_k(t) with w_k = Σ_{m≥k} Π_{i≤m} α_i: a step counts as much
as is lost where it is missed. The gradient of 1 − E/K is therefore that of the loss `lk`, −log α, with the weights w / K held constant.

Letters: B sequences · A anchors · K draft steps · M positions (batch and sequence flattened) · V target vocabulary · D draft vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.train.losses.chunked import Head
from draftsmith.train.losses.draft import chunked_draft_loss

__all__ = ["acceptance_loss", "paced"]


def acceptance_loss(
    hidden: Tensor,
    head: Head,
    target_hidden: Tensor,
    target_head: Head,
    counted: Tensor,
    scale: Tensor,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_t scale(t) · (n(t) − E(t)) / K, where n(t) of the chain's steps count. It takes two passes through the head: one for α, one for gradients.

    Args:
        hidden: [K,M,·], what the head reads; row t of step k is compared with the target's row t + 1 + k.
        head, target_hidden, target_head, target_ids: as in `chunked_draft_loss`.
        counted: [K,M] bool; a step counts while all before it count.
        scale: [M] ≥ 0.

    Returns:
        The sum, a scalar to call backward on, once. Hits [K,M] bool: the drafter's best token is the target's best.
    """
    counted, steps = counted.cumprod(0), len(hidden)
    pair = (hidden, head, target_hidden, target_head)
    with torch.no_grad():
        first = chunked_draft_loss(*pair, counted * (scale > 0).to(target_hidden.dtype), range(1, steps + 1), target_ids, "tv")
        weights = paced(first.overlap.T, counted.T, 0.0).T * (scale / steps)
        lost = (scale * (counted - (first.overlap * counted).cumprod(0)).sum(0)).sum() / steps
    total = chunked_draft_loss(*pair, weights, range(1, steps + 1), target_ids, "lk").sum
    return total + (lost - total).detach(), first.hits


def paced(accepted: Tensor, supervised: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights [...,K]: Σ_{m≥j} Π_{i≤m} s_i, with s = (1 − smoothing) · accepted + smoothing.

    It is what the expected accepted length loses where token j is missed, but for the smoothing. `accepted` [...,K] is the probability that
    token j is accepted if those before it are, without a graph; `supervised` [...,K] is 0 from the first token on that does not count.
    """
    survival = (((1 - smoothing) * accepted + smoothing) * supervised).cumprod(-1)
    return survival.flip(-1).cumsum(-1).flip(-1) * supervised
