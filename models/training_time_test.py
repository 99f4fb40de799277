"""The attention of EAGLE-3's training-time test: causal over the first step's keys, and one key of each later step.

Step k's query at position p sees the keys of step 0 at positions r <= p of its document, and of each step 1..k only the key at position p.
Both parts go through one softmax, without a table of scores. Causal attention gives its output and log-sum-exp: on the CPU in blocks with a
written-out gradient, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691), on a GPU by FlexAttention. The keys of later steps, the
diagonals, are merged into it by that log-sum-exp.

With context parallelism (models/context_parallel.py) the queries are the last n of the C positions up to theirs; elsewhere n = C = S.

Letters: B rows of a batch · S positions · n queries · C positions of step 0's keys.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

# Scores of one block: 16 MiB in fp32. More than 128 queries at once only add wasted work above the diagonal.
BUDGET = 1 << 22
QUERIES = 128
FLEX_BLOCK = 128


def attend(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    document: Tensor | None,
    *,
    scale: float | None = None,
    mask: BlockMask | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Step k's attention. Softmax and sums are in fp32, in fp64 for an fp64 query. Differentiable once, in query, keys and values.

    Args:
        query: [B,heads,n,dim].
        keys, values: k+1 each, step 0 first: [B,kv heads,C,dim], then [B,kv heads,n,dim]. heads is a multiple of kv heads.
        document: [B,C], the number of each position's document, a run of equal numbers (padding too). None: one document per row.
        scale: None for 1/√dim.
        mask: what `blocks` returns, to make it only once for all steps and layers.
        budget: scores in memory at a time, on the CPU.

    Returns:
        [B,heads,n,dim] in the query's dtype.

    Raises:
        ValueError: no keys, not as many values, or shapes that do not fit.
    """
    _check(query, keys, values, document)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    rows, _, queries, _ = query.shape
    before = keys[0].shape[2] - queries
    start = _starts(document, rows, before + queries, query.device)[:, before:]
    # Autocast would compute the scores in bf16.
    with torch.autocast(query.device.type, enabled=False):
        if query.is_cuda:
            out, lse = _flex(query, keys[0], values[0], _block_mask(start, before) if mask is None else mask, factor, _compiled())
        else:
            out, lse = _Causal.apply(query, keys[0], values[0], start, factor, budget)
        if len(keys) == 1:
            return out.to(query.dtype)
        # Recomputed in the backward pass, so that only the steps' own tensors stay in memory.
        merge: Any = checkpoint(_merge, query, out, lse, keys[1:], values[1:], factor, use_reentrant=False, preserve_rng_state=False)
        return merge.to(query.dtype)


def blocks(document: Tensor | None, rows: int, positions: int, device: torch.device | str, before: int = 0) -> BlockMask | None:
    """The `mask` of `attend` on `device`: a table of 128-position blocks on a GPU, None elsewhere.

    Args:
        document: as in `attend`.
        rows, positions: B and C.
        before: the first positions, which have no query.
    """
    return _block_mask(_starts(document, rows, positions, device)[:, before:], before) if torch.device(device).type == "cuda" else None


def shift_left(rows: Tensor, count: int, document: Tensor | None = None, fill: float = 0) -> Tensor:
    """rows [B,S,...] moved `count` positions to the left: position p gets the value of position p + count.

    It gets `fill` where p + count is past the end or in another document (document [B,S] as in `attend`).

    Raises:
        ValueError: a negative count.
    """
    if count < 0:
        raise ValueError(f"got count {count}; expected 0 or more positions")
    count = min(count, rows.shape[1])
    behind = rows.new_full((rows.shape[0], count, *rows.shape[2:]), fill)
    moved = torch.cat([rows[:, count:], behind], 1)
    if document is None or count == 0:
        return moved
    start = _starts(document, rows.shape[0], rows.shape[1], rows.device)
    same = start[:, count:] <= torch.arange(rows.shape[1] - count, device=rows.device)
    crosses = F.pad(~same, (0, count))
    return moved.masked_fill(crosses.reshape(*crosses.shape, *[1] * (rows.ndim - 2)), fill)


def _check(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], document: Tensor | None) -> None:
    batch, heads, queries, dim = query.shape
    if not keys or len(keys) != len(values):
        raise ValueError(f"got {len(keys)} keys and {len(values)} values; expected one of each per step, step 0 first")
    for name, side in (("keys", keys), ("values", values)):
        for step, tensor in enumerate(side):
            count = queries if step else max(keys[0].shape[2], queries)
            if tensor.shape != (batch, keys[0].shape[1], count, dim) or heads % tensor.shape[1]:
                raise ValueError(
                    f"got {name} of {list(tensor.shape)} for queries of {list(query.shape)}; expected [B,kv heads,n,dim], step 0's "
                    "[B,kv heads,C,dim] with C >= n, and heads a multiple of kv heads"
                )
    if document is not None and document.shape != (batch, keys[0].shape[2]):
        raise ValueError(f"got document of {list(document.shape)}; expected [{batch},{keys[0].shape[2]}], a number for each position")


def _starts(document: Tensor | None, rows: int, positions: int, device: torch.device | str) -> Tensor:
    """The first position of each position's document: [B,S] int64."""
    if document is None:
        return torch.zeros(rows, positions, dtype=torch.int64, device=device)
    at = torch.arange(positions, device=document.device)
    new = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    return torch.where(new, at, 0).cummax(1).values


def _merge(query: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
    """Merge into causal attention's out [B,heads,n,dim], with its lse [B,heads,n], one key and value per position of each later step."""
    scaled = (query.to(lse.dtype) * scale).unflatten(1, (keys[0].shape[1], -1))  # [B,kv heads,group,n,dim]
    scores = [(scaled * key.to(lse.dtype)[:, :, None]).sum(-1).flatten(1, 2) for key in keys]
    first, *weights = torch.stack([lse, *scores]).softmax(0)[..., None].unbind()
    merged = out * first
    for weight, value in zip(weights, values, strict=True):
        merged = merged + (weight.unflatten(1, scaled.shape[1:3]) * value.to(lse.dtype)[:, :, None]).flatten(1, 2)
    return merged


class _Tile(NamedTuple):
    """Queries first..last−1 of one row of the batch, and the keys low..high−1 that any of them may see; the last query is at high − 1."""

    row: int
    low: int
    high: int
    first: int
    last: int


def _tiles(start: Tensor, before: int, heads: int, budget: int) -> Iterator[_Tile]:
    """Tiles that cover all queries, each of at most `budget` scores where a single query allows it."""
    queries = start.shape[1]
    for row, begins in enumerate(start.tolist()):
        first = 0
        while first < queries:
            low = begins[first]
            fitting = budget // (heads * (before + min(first + QUERIES, queries) - low))
            last = min(first + max(1, min(QUERIES, fitting)), queries)
            yield _Tile(row, low, before + last, first, last)
            first = last


class _Causal(torch.autograd.Function):
    """Causal attention; start [B,n] is where each query's document begins -> out [B,heads,n,dim], lse [B,heads,n], in the sums' dtype."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, start: Tensor, scale: float, budget: int) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = query.to(wide), key.to(wide), value.to(wide)
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:-1])
        for tile in _tiles(start, k.shape[2] - q.shape[2], q.shape[1], budget):
            row, low, high, first, last = tile
            scores = _scores(_grouped(q, k, tile) * scale, k, start, tile)
            peak = scores.amax(-1, keepdim=True)
            weights = scores.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True)
            out[row, :, first:last] = (weights @ v[row, :, low:high]).div_(total).view(q.shape[1], last - first, -1)
            lse[row, :, first:last] = (peak + total.log()).view(q.shape[1], -1)
        ctx.save_for_backward(query, key, value, start, out, lse)
        ctx.scale, ctx.budget = scale, budget
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_out, d_lse = grads
        query, key, value, start, out, lse = ctx.saved_tensors
        q, k, v = query.to(out.dtype), key.to(out.dtype), value.to(out.dtype)
        # A score s moves its own weight P by dP, all weights by the softmax's normaliser, and the log-sum-exp by P.
        shift = _row_terms(d_out, out).sub_(d_lse)
        d_query = torch.empty_like(q)
        d_key, d_value = torch.zeros_like(k), torch.zeros_like(v)
        for tile in _tiles(start, k.shape[2] - q.shape[2], q.shape[1], ctx.budget):
            row, low, high, first, last = tile
            seen = (row, slice(None), slice(low, high))
            scaled, flow = _grouped(q, k, tile) * ctx.scale, _grouped(d_out, k, tile)
            weights = _scores(scaled, k, start, tile).sub_(_grouped(lse[..., None], k, tile)).exp_()
            d_value[seen] += weights.mT @ flow
            d_scores = (flow @ v[seen].mT).sub_(_grouped(shift[..., None], k, tile)).mul_(weights)
            d_query[row, :, first:last] = (d_scores @ k[seen]).mul_(ctx.scale).view(q.shape[1], last - first, -1)
            d_key[seen] += d_scores.mT @ scaled
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None


def _row_terms(d_out: Tensor, out: Tensor) -> Tensor:
    """FlashAttention's row sums of d_out · out: [B,heads,S]."""
    return (d_out * out).sum(-1)


def _grouped(rows: Tensor, key: Tensor, tile: _Tile) -> Tensor:
    """A tile's queries of rows [B,heads,S,·], with those of one kv head concatenated: [kv heads, group · queries, ·]."""
    part = rows[tile.row, :, tile.first : tile.last]
    return part.reshape(key.shape[1], -1, part.shape[-1])


def _scores(scaled: Tensor, key: Tensor, start: Tensor, tile: _Tile) -> Tensor:
    """Scores [kv heads, group · queries, keys] of scaled queries; −inf where a query does not see a key."""
    row, low, high, first, last = tile
    scores = scaled @ key[row, :, low:high].mT
    hidden = _hidden(start[row, first:last, None], torch.arange(high - last + first, high)[:, None], torch.arange(low, high))
    scores.view(key.shape[1], -1, last - first, high - low).masked_fill_(hidden, -torch.inf)
    return scores


def _hidden(start: Tensor, at: Tensor, key_at: Tensor) -> Tensor:
    return (key_at > at) | (key_at < start)


def _block_mask(start: Tensor, before: int = 0) -> BlockMask:
    """FlexAttention's mask from start [B,n], block by block: `create_block_mask` would allocate [B,n,C] first."""
    queries = start.shape[1] + -start.shape[1] % FLEX_BLOCK
    keys = before + queries + -(before + queries) % FLEX_BLOCK
    # Each padding position is a document of its own, so that its log-sum-exp is finite.
    tail = torch.arange(before + start.shape[1], before + queries, device=start.device).expand(len(start), -1)
    start = torch.cat([start, tail], 1)
    first = before + torch.arange(0, queries, FLEX_BLOCK, device=start.device)[:, None]  # position of each block's first query
    at = torch.arange(0, keys, FLEX_BLOCK, device=start.device)  # and first key
    full = (at + FLEX_BLOCK - 1 <= first) & (at >= start[:, FLEX_BLOCK - 1 :: FLEX_BLOCK, None])
    partly = (at < first + FLEX_BLOCK) & (at + FLEX_BLOCK > start[:, ::FLEX_BLOCK, None]) & ~full

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + before) & (key >= start[row, query])

    lists = [table[:, None].to(torch.int32) for table in (partly, full)]
    ordered = [(table.sum(-1, dtype=torch.int32), table.argsort(dim=-1, descending=True, stable=True).to(torch.int32)) for table in lists]
    return BlockMask.from_kv_blocks(*ordered[0], *ordered[1], FLEX_BLOCK, seen, (queries, keys))


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, flex: Any) -> tuple[Tensor, Tensor]:
    """`_Causal` by FlexAttention. Inputs are padded to full blocks, since it had faults at odd ends and in its kernel for few queries."""
    queries, (rows, columns) = query.shape[2], mask.seq_lengths
    query, key, value = _padded(query, rows, query), _padded(key, columns, query), _padded(value, columns, query)
    grouped = query.shape[1] != key.shape[1]
    out, aux = flex(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    return out[:, :, :queries], aux.lse[:, :, :queries]


def _padded(rows: Tensor, size: int, like: Tensor) -> Tensor:
    """rows [B,heads,n,dim] -> [B,heads,size,dim] in the dtype of `like`, zeros behind."""
    rows = rows.to(like.dtype)
    return F.pad(rows, (0, 0, 0, size - rows.shape[2])) if size > rows.shape[2] else rows


@cache
def _compiled() -> Any:
    def attention(*tensors: Any, **options: Any) -> Any:
        """A function of this module: dynamo limits recompilations by function, and the target compiles flex_attention too."""
        return flex_attention(*tensors, **options)

    # fullgraph: past that limit it raises instead of falling back to a table of scores.
    return torch.compile(attention, fullgraph=True)
