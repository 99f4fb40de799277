"""The attention of block drafters in training: the rows of a block see the context before its anchor, and one another.

A block is n rows at the positions from its anchor a on. They see the keys of the context at positions r < a of the anchor's document, and
either all rows of their block or those up to their own. Blocks never see each other. Both parts go through one softmax: attention over the
context gives its output and log-sum-exp (models/span_attention.py), into which the block's own keys are merged. Memory is linear in
positions and in blocks: there is no table of all rows by all positions.

Letters: B sequences · S positions · A anchors of a sequence · n rows of a block.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from draftsmith.models.span_attention import BUDGET, block_mask, on_spans
from draftsmith.models.training_time_test import document_starts

__all__ = ["Blocks", "attend_blocks", "blocks_at"]


class Blocks(NamedTuple):
    """Where the blocks of a batch stand.

    Attributes:
        anchor: [B,A] int64, positions in order; none is the first of its document.
        start, end: [B,A·n] int64, the keys of the context that each row sees.
        mask: for FlexAttention on a GPU; None on a CPU.
    """

    anchor: Tensor
    start: Tensor
    end: Tensor
    mask: BlockMask | None


def blocks_at(anchor: Tensor, rows: int, document: Tensor) -> Blocks:
    """Blocks of `rows` rows at anchor [B,A] of packed documents [B,S], numbered in runs."""
    sequences, positions = document.shape
    start = document_starts(document, sequences, positions, document.device).gather(1, anchor)
    end = torch.maximum(anchor, start + 1)  # a document's first position sees itself rather than nothing
    start, end = (side.repeat_interleave(rows, 1) for side in (start, end))
    return Blocks(anchor, start, end, block_mask(start, end, positions) if document.is_cuda else None)


def attend_blocks(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], blocks: Blocks, causal: bool, budget: int = BUDGET
) -> Tensor:
    """Attention of the blocks' rows. Softmax and sums are in fp32, in fp64 for an fp64 query. Differentiable once in all tensors.

    Args:
        query: [B,heads,A·n,dim].
        context: key and value [B,kv heads,S,dim]; heads is a multiple of kv heads.
        own: key and value [B,kv heads,A·n,dim] of the rows themselves.
        blocks: what `blocks_at` returns.
        causal: a row sees the rows of its block up to itself, not all.
        budget: scores of the context in memory at a time, on the CPU.

    Returns:
        [B,heads,A·n,dim] in the query's dtype.
    """
    scale, anchors = query.shape[-1] ** -0.5, blocks.anchor.shape[1]
    with torch.autocast(query.device.type, enabled=False):  # it would compute the scores in bf16
        out, lse = on_spans(query, *context, blocks.start, blocks.end, scale, blocks.mask, budget)
        # Recomputed in the backward pass, so that the scores are not kept.
        merge: Any = checkpoint(_merge, query, out, lse, *own, anchors, scale, causal, use_reentrant=False, preserve_rng_state=False)
        return merge.to(query.dtype)


def _merge(query: Tensor, out: Tensor, lse: Tensor, key: Tensor, value: Tensor, anchors: int, scale: float, causal: bool) -> Tensor:
    """Merge the blocks' own keys into the context's out [B,heads,A·n,dim], with its lse [B,heads,A·n]."""

    def by_block(rows: Tensor) -> Tensor:
        """[B,heads,A·n,·] -> [B,kv heads,group or 1,A,n,·]."""
        return rows.to(lse.dtype).unflatten(2, (anchors, -1)).unflatten(1, (key.shape[1], -1))

    scores = by_block(query) * scale @ by_block(key).mT  # [B,kv heads,group,A,n,n]
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    weights = torch.cat((by_block(lse[..., None]), scores), -1).softmax(-1)
    return (by_block(out) * weights[..., :1] + weights[..., 1:] @ by_block(value)).flatten(1, 2).flatten(2, 3)
