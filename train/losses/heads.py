"""What K heads that look further and further ahead are supervised on, how much each position counts, their losses and metrics.

Letters: B rows · S positions · M positions (B·S of them, flattened, or a block) · H hidden size · V vocabulary · K heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.train.losses.chunked import Head, chunked_cross_entropy, chunked_kl_heads
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch

__all__ = ["check_top_k", "head_losses", "head_metrics", "head_weights", "shifted"]


def check_top_k(section: Any, name: str) -> None:
    """Raises ValueError where `top_k` does nothing in a recipe's section `name` of heads, because its loss has no KL term."""
    if not section.distill:
        section.refuse_unread(name, ["top_k"], f"{name}.distill={section.distill}")


def head_weights(batch: Batch, heads: int, decay: float = 1.0) -> tuple[Tensor, Tensor]:
    """Where each head predicts a supervised token of the same document, and what that counts.

    Head k, from 0, at position t predicts token t+2+k. Its weight there is n_d, the supervised tokens of document d, over the number of
    those that the head predicts: each head's loss is a mean of its own in each document, times n_d, so that no head counts less for
    predicting fewer; all times decay^k. A document is never cut: the loss is the same however packing, micro-batches and ranks share the documents out.

    Args:
        batch: loss_mask and document [B,S].
        heads: K.
        decay: of the weights from one head to the next.

    Returns:
        counted [K,M] bool, weights [K,M] float64.
    """
    document, mask = batch["document"], batch["loss_mask"]
    rows, length = document.shape
    counted = torch.stack([shifted(mask, k + 2) & (shifted(document, k + 2) == document.flatten()) for k in range(heads)])
    first = torch.arange(rows, device=document.device)[:, None] * (length + 1)
    number = (document + 1 + first).flatten()  # of padding 0, 1 … of documents; distinct in all rows
    counts = torch.zeros(heads + 1, rows * (length + 1), dtype=torch.float64, device=document.device)
    counts.index_add_(1, number, torch.cat((mask.flatten()[None], counted)).double())
    decayed = decay ** torch.arange(heads, dtype=torch.float64, device=counts.device)[:, None]
    return counted, counted * (decayed * counts[0] / counts[1:].clamp(min=1))[:, number]


def shifted(values: Tensor, count: int) -> Tensor:
    """values [B,S] moved `count` positions to the left with zeros behind, flattened to [M]."""
    return F.pad(values[:, count:], (0, count)).flatten()


def head_losses(
    states: Sequence[Tensor],
    outputs: Sequence[Head],
    labels: Tensor,
    hidden: Tensor,
    target_head: Head,
    weights: Tensor,
    distill: float,
    top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """Σ_k Σ_t weights[k,t] · [distill · KL(p_(t+1+k) ‖ q_k(t)) + (1 − distill) · CE(q_k(t), labels[k,t])], chunked over positions and heads.

    Args:
        states: K tensors [M,·], what the output layers read.
        outputs: K output layers, or one that serves all heads: it then has one gradient, whatever K is.
        labels: [K,M], the text's tokens.
        hidden: [M,H], the target's; p_s [V] is what `target_head` makes of row s.
        target_head: the target's.
        weights: [K,M]; 0 also where row t + 1 + k is another document's.
        distill: share of the KL.
        top_k: p cut to its k likeliest tokens in the KL; 0: all.

    Returns:
        The sum, a scalar to call backward on, once. Hits [2,K,M] bool of the heads' best tokens: on the target's, and on the text's. With
        distill 1 both are on the target's; with distill 0 both are on the text's, but on the target's too without gradients, so that held-out
        figures of all losses mean the same.
    """
    heads, losses = len(states), []
    if distill > 0 or not torch.is_grad_enabled():
        shifts = [k + 1 for k in range(heads)]
        losses.append((distill, chunked_kl_heads(states, outputs, hidden, target_head, list(weights), shifts, top_k=top_k)))
    if distill < 1 and len(outputs) == 1:
        every = chunked_cross_entropy(torch.cat(tuple(states)), outputs[0], labels.flatten(), weights.flatten())
        losses.append((1 - distill, [every]))
    elif distill < 1:
        each = zip(states, outputs, labels, weights, strict=True)
        losses.append((1 - distill, [chunked_cross_entropy(state, output, label, weight) for state, output, label, weight in each]))
    total = torch.stack([share * loss.sum for share, parts in losses if share for loss in parts]).sum()
    hits = [torch.cat([loss.hits for loss in parts]).view(heads, -1) for _, parts in (losses[0], losses[-1])]
    return total, torch.stack(hits)


def head_metrics(hits: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """What is logged of K heads, as metrics of a `Loss`. Head k predicts fewer tokens than the batch supervises: its hits have their own count.

    Args:
        hits: [2,K,M], as `head_losses`.
        counted: [K,M] bool, as `head_weights`.
    """
    chains, right = hits
    rates = torch.stack((right.sum(1), counted.sum(1)), 1)
    return survival_metrics(chains, counted.float()) | {f"top1_head{k}": rate for k, rate in enumerate(rates.unbind(), 1)}
