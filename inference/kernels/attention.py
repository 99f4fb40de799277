"""Attention of tree nodes over the complete buffers of a TreeCache, in Triton, without a mask and without gathering rows.

Flash-decoding with the tree as its last tiles: each program walks a share of one row's keys with an online softmax, and a second
kernel merges the shares. The nodes of all heads that share a KV head are the rows of one matrix, so that K and V are read once for
them. Here M is the number of cache positions after the committed ones, and G the number of query heads per KV head.

`tree_attention_reference` is independent of the path without kernels (SDPA in `inference.attention`); a test holds all three to each other.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.inference.tree import unpack

__all__ = ["tree_attention", "tree_attention_reference"]

_LOG2E = 1.4426950408889634
_MAX_NODES = 256  # of a tree, on either side of the scores
_MAX_DIM = 256
_MERGED = 16  # shares that the merge takes at once


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    length: Tensor,
    depth: Tensor,
    words: Tensor,
    key_depth: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Each node attends to its row's committed positions, and to those of the M positions after them that its words name.

    A node that sees nothing gets 0. Positions from length + M on are not read; those before must be finite. The numbers on the device are
    not checked: rows < number of rows, length + M ≤ C.

    Args:
        query: [B,heads,N,dim].
        keys, values: [rows,KV heads,C,dim] and [rows,KV heads,C,dim'], complete buffers.
        rows: int64 [B], the buffers' row of each batch row.
        length: int64 [B], the committed positions, which every node sees; the M positions after them hold draft nodes.
        depth, key_depth: int64 [B,N] and [B,M], position_ids less length, of the queries and of the M positions.
        words: int64 [B,N,⌈M/64⌉], bit j % 64 of word j // 64 says whether the node sees position length + j.
        scale: factor of the scores.
        window: query and key are less than `window` positions apart.
        softcap: scores become softcap · tanh(scores / softcap).
        sinks: [heads], a logit per head that has no value.
        max_length: the host's upper bound of the lengths, C − M by default. It decides how many programs share a row, never the result.

    Returns:
        [B,N,heads,dim'] in the query's dtype.

    Raises:
        ValueError: a dtype, device, layout or size that the kernel does not take.
    """
    _check(query, keys, values, sinks, rows=rows, length=length, depth=depth, words=words, key_depth=key_depth)
    (batch, heads, nodes, dim), (_, kv_heads, capacity, value_dim), span = query.shape, values.shape, key_depth.shape[1]
    groups = heads // kv_heads
    wide = _power(dim), _power(value_dim)
    block_m, block_n, warps, stages = _blocks(nodes * groups, max(wide), query.dtype)
    tiles = -(-nodes * groups // block_m)
    max_length = capacity - span if max_length is None else max_length
    steps = -(-(max_length if window is None else min(max_length, window)) // block_n) + -(-span // block_n)
    splits = _choose_splits(batch * kv_heads * tiles, steps, query.device)
    out = torch.empty(batch, nodes, heads, value_dim, dtype=query.dtype, device=query.device)
    # One share is the result; several are left unnormalised, with the maximum and the sum of their softmax.
    parts, stats = out, None
    if splits > 1:
        parts = torch.empty(batch * nodes * heads, splits, value_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(batch * nodes * heads, splits, 2, dtype=torch.float32, device=query.device)
    # The kernel's exponentials are powers of two; tanh needs that of twice its argument.
    factor = scale * _LOG2E if softcap is None else 2 * scale * _LOG2E / softcap
    attend: Any = _attend[splits * tiles, kv_heads, batch]
    merge: Any = _merge[(batch * nodes * heads,)]
    with torch.cuda.device_of(query):
        attend(
            query, keys, values, rows, length, depth, words, key_depth, None if sinks is None else sinks.contiguous(), parts, stats,
            *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *depth.stride(), *words.stride(), *key_depth.stride(),
            nodes, span, splits, factor, None if softcap is None else softcap * _LOG2E, window,
            groups, dim, value_dim, *wide, block_m, block_n,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if stats is not None:
            merge(parts, stats, out, splits, value_dim, wide[1], _MERGED)
    return out


def tree_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    length: Tensor,
    depth: Tensor,
    words: Tensor,
    key_depth: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """`tree_attention` in plain torch, with a dense mask; the softmax is in float32, or in float64 if the query is."""
    nodes, span, groups = query.shape[2], key_depth.shape[1], query.shape[1] // keys.shape[1]
    relative = torch.arange(keys.shape[2], device=keys.device) - length[:, None]  # [B,C]; draft position j is at j
    node_index = relative.clamp(0, span - 1)
    seen = unpack(words, span).gather(2, node_index[:, None].expand(-1, nodes, -1)) & (relative < span)[:, None]
    seen = seen | (relative < 0)[:, None]  # [B,N,C]
    if window is not None:
        position = torch.where(relative < 0, relative, key_depth.gather(1, node_index))
        seen = seen & (depth[:, :, None] - position[:, None] < window)
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(kind).unflatten(1, (-1, groups))  # [B,kv heads,G,N,dim]
    scores = torch.einsum("bkgnd,bkcd->bkgnc", grouped, keys[rows].to(kind)) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.to(kind).view(1, -1, groups, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).masked_fill(~seen[:, None, None], 0.0)  # a node that sees nothing
    read = values[rows].to(kind).masked_fill(~seen.any(1)[:, None, :, None], 0.0)  # 0 · NaN is NaN
    return torch.einsum("bkgnc,bkcd->bnkgd", weights, read).flatten(2, 3).to(query.dtype)


def _check(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, **integers: Tensor) -> None:
    batch, heads, nodes, dim = query.shape
    kv_heads, capacity, value_dim = values.shape[1:]
    span = integers["key_depth"].shape[-1]
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or keys.dtype != query.dtype or values.dtype != query.dtype:
        raise ValueError(
            f"got query, keys and values in {query.dtype}, {keys.dtype}, {values.dtype}; expected one of float32, bfloat16 and float16 "
            "for all; use tree_attention_reference"
        )
    if not (
        0 < nodes <= _MAX_NODES and 0 < span <= min(_MAX_NODES, capacity) and max(dim, value_dim) <= _MAX_DIM and heads % kv_heads == 0
    ):
        raise ValueError(
            f"got {nodes} queries on {span} of {capacity} positions, dims {dim} and {value_dim}, {heads} heads on {kv_heads} KV heads; expected 1 to "
            f"{_MAX_NODES} of either, dims up to {_MAX_DIM}, heads a multiple of KV heads; use tree_attention_reference"
        )
    shapes = {
        "keys": (values.shape[0], kv_heads, capacity, dim),
        "rows": (batch,),
        "length": (batch,),
        "depth": (batch, nodes),
        "words": (batch, nodes, (span + 63) // 64),
        "key_depth": (batch, span),
        "sinks": (heads,),
    }
    for name, tensor in {"keys": keys, "values": values, "sinks": sinks, **integers}.items():
        if tensor is None:
            continue
        if tensor.device != query.device or tuple(tensor.shape) != shapes.get(name, tensor.shape):
            raise ValueError(
                f"got {name} {list(tensor.shape)} on {tensor.device}; expected {list(shapes.get(name, tensor.shape))} on {query.device}; "
                "pass the cache's complete buffers and the tree of the same batch"
            )
        if name in integers and tensor.dtype != torch.int64:
            raise ValueError(f"got {name} in {tensor.dtype}; expected int64; convert it once, where the tree is made")
    for name, tensor in {"query": query, "keys": keys, "values": values, "rows": integers["rows"], "length": integers["length"]}.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"got {name} with stride {tensor.stride(-1)} in its last dimension; expected 1; call contiguous() on it")


def _power(size: int) -> int:
    """The least power of two that a matrix product takes."""
    return max(1 << (size - 1).bit_length(), 16)


def _blocks(rows: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows of a query tile, positions of a key tile (at most 64: one word), warps, pipeline stages; ptxas hardly spills with them on Hopper."""
    if dtype == torch.float32:  # without tensor cores every thread has complete operands
        most, block_n, stages = 32, 16, 2
    else:
        most, block_n, stages = (128, 64, 3) if dim <= 128 else (64, 64, 2)
    block_m = min(most, _power(rows))
    return block_m, block_n, 8 if block_m == most or dtype == torch.float32 else 4, stages


def _choose_splits(programs: int, steps: int, device: torch.device) -> int:
    """How many programs share one row's `steps` key tiles: two per multiprocessor in all, none with less than two tiles."""
    if device.type != "cuda":
        return min(3, steps)
    return max(1, min(2 * _multiprocessors(device) // programs, steps // 2))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _step(q, k, v, seen, best, total, acc, factor, softcap):
    """One key tile of the online softmax. q [m,d], k [n,d], v [n,e], seen [m|1,n]; best, total [m] and acc [m,e] float32."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    if softcap is not None:
        scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores))
    scores = tl.where(seen, scores, -float("inf"))
    new = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(new == -float("inf"), 0.0, new)  # −inf less −inf is NaN
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(best - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit(do_not_specialize=["nodes", "span", "splits"])
def _attend(
    query, keys, values, rows, lengths, depths, words, key_depths, sinks, out, stats,
    query_batch, query_head, query_node, key_row, key_head, key_position, value_row, value_head, value_position,
    depth_batch, depth_node, word_batch, word_node, word_word, key_depth_batch, key_depth_position,
    nodes, span, splits, factor, softcap, window,
    GROUPS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (splits · query tiles, kv heads, B). out [B·N·heads,splits,dim']; stats [B·N·heads,splits,2], or None if splits is 1."""
    tiles = tl.cdiv(nodes * GROUPS, BLOCK_M)
    split = tl.program_id(0) // tiles  # tiles of one share are neighbours, so that its keys are in the L2 cache
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    packed = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    real = packed < nodes * GROUPS
    node = (packed // GROUPS).to(tl.int64)
    head = kv_head * GROUPS + packed % GROUPS
    column = tl.arange(0, BLOCK_N).to(tl.int64)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    query += batch * query_batch + head[:, None] * query_head + node[:, None] * query_node + d[None, :]
    q = tl.load(query, real[:, None] & (d[None, :] < DIM), 0.0)
    row, length = tl.load(rows + batch), tl.load(lengths + batch)
    keys += row * key_row + kv_head * key_head + d[None, :]
    values += row * value_row + kv_head * value_head + e[None, :]

    # Key tiles: those of the prefix from `first`, then those of the tree, which begin again at position `length`.
    prefix = tl.cdiv(length, BLOCK_N).to(tl.int32)
    first = 0
    if window is not None:
        depth = tl.load(depths + batch * depth_batch + node * depth_node, real, 0)
        oldest = length + tl.where(real, depth, 1 << 30) - window + 1  # [m], the first position of the prefix within the window
        first = tl.minimum(tl.maximum(tl.min(oldest, 0), 0) // BLOCK_N, prefix).to(tl.int32)
    last = prefix + tl.cdiv(span, BLOCK_N)
    share = tl.cdiv(last - first, splits)
    begin = first + split * share
    end = tl.minimum(begin + share, last)

    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if sinks is not None:  # the first share begins with it
        best = tl.load(sinks + head, real & (split == 0), -float("inf")).to(tl.float32) * 1.4426950408889634  # log2 e
    total = tl.where(best > -float("inf"), 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for tile in range(begin, tl.minimum(end, prefix)):
        position = tile * BLOCK_N + column
        inside = position < length
        k = tl.load(keys + position[:, None] * key_position, inside[:, None] & (d[None, :] < DIM), 0.0)
        v = tl.load(values + position[:, None] * value_position, inside[:, None] & (e[None, :] < VALUE_DIM), 0.0)
        seen = inside[None, :]
        if window is not None:
            seen = seen & (position[None, :] >= oldest[:, None])
        best, total, acc = _step(q, k, v, seen, best, total, acc, factor, softcap)
    for tile in range(tl.maximum(begin, prefix), end):
        draft = (tile - prefix) * BLOCK_N + column
        inside = draft < span
        position = length + draft
        k = tl.load(keys + position[:, None] * key_position, inside[:, None] & (d[None, :] < DIM), 0.0)
        v = tl.load(values + position[:, None] * value_position, inside[:, None] & (e[None, :] < VALUE_DIM), 0.0)
        word = (tile - prefix) * BLOCK_N // 64
        bits = tl.load(words + batch * word_batch + node * word_node + word * word_word, real, 0)
        seen = inside[None, :] & ((bits[:, None] >> (draft % 64)[None, :]) & 1 != 0)
        if window is not None:
            key_depth = tl.load(key_depths + batch * key_depth_batch + draft * key_depth_position, inside, 0)
            seen = seen & (depth[:, None] - key_depth[None, :] < window)
        best, total, acc = _step(q, k, v, seen, best, total, acc, factor, softcap)

    line = ((batch * nodes + node) * tl.num_programs(1) * GROUPS + head) * splits + split
    if stats is None:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    else:
        tl.store(stats + line * 2, best, mask=real)
        tl.store(stats + line * 2 + 1, total, mask=real)
    out += line[:, None] * VALUE_DIM + e[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=real[:, None] & (e[None, :] < VALUE_DIM))


@triton.jit(do_not_specialize=["splits"])
def _merge(parts, stats, out, splits, VALUE_DIM: tl.constexpr, BLOCK_E: tl.constexpr, MERGED: tl.constexpr):
    """Grid (B·N·heads,): merge the shares of one line, `MERGED` at a time, by their log-sum-exp."""
    line = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    best, total = tl.full([1], -float("inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_E], tl.float32)
    for begin in range(0, splits, MERGED):
        split = begin + tl.arange(0, MERGED)
        share, inside = line * splits + split, split < splits
        high = tl.load(stats + share * 2, inside, -float("inf"))
        new = tl.maximum(best, tl.max(high, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)
        weights, decay = tl.exp2(high - shift), tl.exp2(best - shift)
        total = total * decay + tl.sum(weights * tl.load(stats + share * 2 + 1, inside, 0.0), 0)
        part = tl.load(parts + share[:, None] * VALUE_DIM + e[None, :], inside[:, None] & (e[None, :] < VALUE_DIM), 0.0)
        acc = acc * decay + tl.sum(part * weights[:, None], 0)
        best = new
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + line * VALUE_DIM + e, acc.to(out.dtype.element_ty), mask=e < VALUE_DIM)
