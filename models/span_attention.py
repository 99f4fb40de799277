"""Attention in which each query sees one span of consecutive keys: causal within documents, or a context that ends at an anchor.

Neither form keeps a table of scores. On the CPU it runs in tiles with a written-out gradient, as in FlashAttention-2
(https://arxiv.org/abs/2307.08691), on a GPU by FlexAttention. Both return the log-sum-exp of the scores beside the output, so that keys of
another kind can be merged into it.

Spans are in order: neither their starts nor their ends fall from one query to the next, and no span is empty.

Letters: B rows of a batch · n queries · C keys.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

__all__ = ["BUDGET", "block_mask", "on_spans"]

# Scores of one tile: 4 MiB in fp32; larger ones were no faster. More than 128 queries at once only add wasted work beside the spans.
BUDGET = 1 << 20
QUERIES = 128
FLEX_BLOCK = 128
SHAPES = 64  # compilations of FlexAttention in a process: two for each shape of heads


def on_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    mask: BlockMask | None = None,
    budget: int = BUDGET,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over the keys start … end − 1. Softmax and sums are in fp32, in fp64 for an fp64 query.

    Args:
        query: [B,heads,n,dim].
        key, value: [B,kv heads,C,dim]; heads is a multiple of kv heads.
        start, end: [B,n] int64, in order.
        scale: factor of the scores.
        mask: on a GPU what `block_mask` returns, to make it only once for all layers.
        budget: scores in memory at a time, on the CPU.

    Returns:
        out [B,heads,n,dim] and the log-sum-exp of the scores [B,heads,n], in the dtype of the sums.
    """
    if query.is_cuda:
        return flex(query, key, value, block_mask(start, end, key.shape[2]) if mask is None else mask, scale, compiled())
    return Spans.apply(query, key, value, start, end, scale, budget)


class _Tile(NamedTuple):
    """Queries first..last−1 of one row of the batch, and the keys low..high−1 that any of them may see."""

    row: int
    low: int
    high: int
    first: int
    last: int


def _numbers(start: Tensor, end: Tensor, keys: int) -> list[tuple[list[int], list[int]]]:
    """Starts and ends of each row of the batch, on the host."""
    return list(zip(start.tolist(), end.tolist(), strict=True))


def _tiles(start: Tensor, end: Tensor, keys: int, heads: int, budget: int) -> Iterator[_Tile]:
    """Tiles that cover all queries, each of at most `budget` scores where a single query allows it."""
    queries = start.shape[1]
    for row, (begins, ends) in enumerate(_numbers(start, end, keys)):
        first = 0
        while first < queries:
            low = begins[first]
            fitting = budget // (heads * (ends[min(first + QUERIES, queries) - 1] - low))
            last = min(first + max(1, min(QUERIES, fitting)), queries)
            yield _Tile(row, low, ends[last - 1], first, last)
            first = last


class Spans(torch.autograd.Function):
    """`on_spans` on the CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, start: Tensor, end: Tensor, scale: float, budget: int) -> Any:
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = query.to(wide), key.to(wide), value.to(wide)
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:-1])
        for tile in _tiles(start, end, k.shape[2], q.shape[1], budget):
            row, low, high, first, last = tile
            scores = _scores(_grouped(q, k, tile) * scale, k, start, end, tile)
            peak = scores.amax(-1, keepdim=True)
            weights = scores.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True)
            out[row, :, first:last] = (weights @ v[row, :, low:high]).div_(total).view(q.shape[1], last - first, -1)
            lse[row, :, first:last] = (peak + total.log()).view(q.shape[1], -1)
        ctx.save_for_backward(query, key, value, start, end, out, lse)
        ctx.scale, ctx.budget = scale, budget
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_out, d_lse = grads
        query, key, value, start, end, out, lse = ctx.saved_tensors
        q, k, v = query.to(out.dtype), key.to(out.dtype), value.to(out.dtype)
        # A score s moves its own weight P by dP, all weights by the softmax's normaliser, and the log-sum-exp by P.
        shift = _row_terms(d_out, out).sub_(d_lse)
        d_query = torch.empty_like(q)
        d_key, d_value = torch.zeros_like(k), torch.zeros_like(v)
        for tile in _tiles(start, end, k.shape[2], q.shape[1], ctx.budget):
            row, low, high, first, last = tile
            seen = (row, slice(None), slice(low, high))
            scaled, flow = _grouped(q, k, tile) * ctx.scale, _grouped(d_out, k, tile)
            weights = _scores(scaled, k, start, end, tile).sub_(_grouped(lse[..., None], k, tile)).exp_()
            d_value[seen] += weights.mT @ flow
            d_scores = (flow @ v[seen].mT).sub_(_grouped(shift[..., None], k, tile)).mul_(weights)
            d_query[row, :, first:last] = (d_scores @ k[seen]).mul_(ctx.scale).view(q.shape[1], last - first, -1)
            d_key[seen] += d_scores.mT @ scaled
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None, None


def _row_terms(d_out: Tensor, out: Tensor) -> Tensor:
    """FlashAttention's row sums of d_out · out: [B,heads,n]."""
    return (d_out * out).sum(-1)


def _grouped(rows: Tensor, key: Tensor, tile: _Tile) -> Tensor:
    """A tile's queries of rows [B,heads,n,·], with those of one kv head concatenated: [kv heads, group · queries, ·]."""
    part = rows[tile.row, :, tile.first : tile.last]
    return part.reshape(key.shape[1], -1, part.shape[-1])


def _scores(scaled: Tensor, key: Tensor, start: Tensor, end: Tensor, tile: _Tile) -> Tensor:
    """Scores [kv heads, group · queries, keys] of scaled queries; −inf where a query does not see a key."""
    row, low, high, first, last = tile
    scores = scaled @ key[row, :, low:high].mT
    hidden = _hidden(start[row, first:last, None], end[row, first:last, None], torch.arange(low, high))
    scores.view(key.shape[1], -1, last - first, high - low).masked_fill_(hidden, -torch.inf)
    return scores


def _hidden(start: Tensor, end: Tensor, key_at: Tensor) -> Tensor:
    return (key_at >= end) | (key_at < start)


def block_mask(start: Tensor, end: Tensor, keys: int) -> BlockMask:
    """FlexAttention's mask for spans [B,n], block by block: `create_block_mask` would allocate [B,n,C] first.

    Queries that pad the last block see the last key, so that their log-sum-exp is finite.

    Args:
        start, end: [B,n].
        keys: C.
    """
    columns, padding = keys + -keys % FLEX_BLOCK, -start.shape[1] % FLEX_BLOCK
    start, end = F.pad(start, (0, padding), value=columns - 1), F.pad(end, (0, padding), value=columns)
    at = torch.arange(0, columns, FLEX_BLOCK, device=start.device)  # first key of each block
    first_start, last_start = start[:, ::FLEX_BLOCK, None], start[:, FLEX_BLOCK - 1 :: FLEX_BLOCK, None]
    first_end, last_end = end[:, ::FLEX_BLOCK, None], end[:, FLEX_BLOCK - 1 :: FLEX_BLOCK, None]
    full = (at + FLEX_BLOCK <= first_end) & (at >= last_start)
    partly = (at < last_end) & (at + FLEX_BLOCK > first_start) & ~full

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < end[row, query]) & (key >= start[row, query])

    lists = [table[:, None].to(torch.int32) for table in (partly, full)]
    ordered = [(table.sum(-1, dtype=torch.int32), table.argsort(dim=-1, descending=True, stable=True).to(torch.int32)) for table in lists]
    return BlockMask.from_kv_blocks(*ordered[0], *ordered[1], FLEX_BLOCK, seen, (start.shape[1], columns))


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, attention: Any) -> tuple[Tensor, Tensor]:
    """`on_spans` by FlexAttention. Inputs are padded to full blocks, since it had faults at odd ends and in its kernel for few queries."""
    queries, (rows, columns) = query.shape[2], mask.seq_lengths
    query, key, value = _padded(query, rows, query), _padded(key, columns, query), _padded(value, columns, query)
    grouped = query.shape[1] != key.shape[1]
    out, aux = attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    return out[:, :, :queries], aux.lse[:, :, :queries]


def _padded(rows: Tensor, size: int, like: Tensor) -> Tensor:
    """rows [B,heads,n,dim] -> [B,heads,size,dim] in the dtype of `like`, zeros behind."""
    rows = rows.to(like.dtype)
    return F.pad(rows, (0, 0, 0, size - rows.shape[2])) if size > rows.shape[2] else rows


@cache
def compiled() -> Any:
    def attention(*tensors: Any, **options: Any) -> Any:
        """A function of this module: dynamo limits recompilations by function, and the target compiles flex_attention too."""
        return flex_attention(*tensors, **options)

    # fullgraph: past that limit it raises instead of falling back to a table of scores. Every shape of heads compiles twice.
    return torch._dynamo.config.patch(recompile_limit=SHAPES)(torch.compile(attention, fullgraph=True))
