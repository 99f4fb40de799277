"""Verification from logits without a softmax or a sort over them: one draw at each visited node, all on the device.

For greedy decoding and the rules of one draw. The plain twin is `draftsmith.inference.verify.verify`.

Rows walk in step, a depth at a time, so that K+1 of N nodes are read. A node's vocabulary is split over programs. Each leaves what it
found of its part; every program of the next launch merges these for itself, which costs less than a launch for the merge. With filters a
depth takes 1 + 8 · [top_k] + 8 · [top_p] launches more, of reads that the L2 cache serves: the least score kept is found from its bits,
four at a time, by counting or weighing what begins with those found so far.

Letters: B rows · N tree nodes with the root · V vocabulary · K draft depth · P = min(K+1, N) path entries · S = ⌈V / block⌉ splits.
"""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.inference.sampler import PURPOSE_TOKEN, Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict

__all__ = ["supported", "verify"]

_PURPOSE = tl.constexpr(PURPOSE_TOKEN)
_NEVER = tl.constexpr(float("-inf"))
_UNIT = tl.constexpr(2.0**43)  # of mass: 2^19 tokens of mass 1 fit into an int64
_MAX_NODES, _MAX_VOCAB = 256, 2**19


@triton.jit
def _scores(logits, start, index, vocab, scale, SAMPLED: tl.constexpr, MULTIPLY: tl.constexpr):
    """float32 [BLOCK] with temperature, rounded as torch rounds `logits.float() / temperature`.

    What lies past the vocabulary is −inf: no mass, no draw that a lower id does not win, no count that changes the k-th best.
    """
    x = tl.load(logits + start + index, mask=index < vocab, other=_NEVER).to(tl.float32)
    if SAMPLED:
        if MULTIPLY:
            x = x * scale
        else:
            x = tl.div_rn(x, scale)
    return x


@triton.jit
def _order(x):
    """float32 -> int64 in [0, 2^32) in torch's order: −0 equals +0, NaN is above everything."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, bits, 0x7FFFFFFF).to(tl.int64) + 0x80000000


@triton.jit
def _noise(seed, request, position, block, BLOCK: tl.constexpr):
    """float32 [BLOCK]: `sampler.gumbel` of the tokens of this block; float64 until the end, as there."""
    counter = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, position.to(tl.uint32), request.to(tl.uint32), _PURPOSE)  # pyright: ignore[reportGeneralTypeIssues]
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # a b c d of the first counter, then of the second, …
    return (-tl.log(-tl.log((words.to(tl.float64) + 0.5) * 2.0**-32))).to(tl.float32)


@triton.jit
def _mass(x, best):
    """exp(x − best) as an integer: sums of these are exact, hence the same in any order and for any split."""
    return (tl.where(x > _NEVER, tl.exp(x - best), 0.0) * _UNIT).to(tl.int64)


@triton.jit
def _peak(best, row, splits, SPLITS: tl.constexpr):
    index = tl.arange(0, SPLITS)
    return tl.max(tl.load(best + row * splits + index, mask=index < splits, other=_NEVER), 0)


@triton.jit
def _token(draws, slot, live, splits, SPLITS: tl.constexpr):
    """What was drawn at a slot: row · P + depth. A token that no vocabulary has where it is not live."""
    index = tl.arange(0, SPLITS)
    found = tl.load(draws + slot * splits + index, mask=live & (index < splits), other=0)
    return 0x7FFFFFFF - (tl.max(found, 0) & 0x7FFFFFFF)


@triton.jit
def _enter(
    tokens, token_stride, parents, parent_stride, size, nodes, path, width, draws, row, block, level, splits,
    NODES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The node of this row at this depth: the first child that carries what its parent drew; −1 where there is none."""
    slot = row * width + level
    parent = tl.load(path + slot - 1, mask=level > 0, other=-1)
    y = _token(draws, slot - 1, parent >= 0, splits, SPLITS)
    count = tl.load(size + row)
    index = tl.arange(0, NODES)
    inside = (index > 0) & (index < nodes) & (index < count)
    above = tl.load(parents + row * parent_stride + index, mask=inside, other=-1)
    token = tl.load(tokens + row * token_stride + index, mask=inside, other=-1)
    child = tl.min(tl.where(inside & (parent >= 0) & (above == parent) & (token == y), index, NODES), 0)
    node = tl.where(child < NODES, child, -1)
    node = tl.where((level == 0) & (count > 0), 0, node).to(tl.int64)
    if block == 0:
        tl.store(path + slot, node)
    return node


@triton.jit
def _bins(bins, row, splits, SPLITS: tl.constexpr):
    """int64 [SPLITS,16]: what each split found under each next digit."""
    split = tl.arange(0, SPLITS)[:, None]
    return tl.load(bins + (row * splits + split) * 16 + tl.arange(0, 16)[None, :], mask=split < splits, other=0)


@triton.jit
def _limit(total, rest):
    """The mass up to which top-p drops, of all that there is; the likeliest token always stays."""
    return tl.minimum((total.to(tl.float64) * rest).to(tl.int64), total - 1)


@triton.jit
def _narrow(found, state, row, top_k, rest, MASS: tl.constexpr):
    """One hexadecimal digit further towards the greatest t with at least `need` of count or mass in {order >= t}.

    -> the digits of t so far, what lies above all that begins with them, and the total.
    """
    prefix, above, total = tl.load(state + row * 4), tl.load(state + row * 4 + 1), tl.load(state + row * 4 + 2)
    here = tl.sum(found, 0)
    inside = tl.sum(here, 0)
    total = tl.where(total > 0, total, inside)  # known after the first digit
    if MASS:
        need = total - _limit(total, rest)
    else:
        need = top_k
    reached = above + inside - tl.cumsum(here, 0) + here  # [16], falling
    digit = tl.maximum(tl.sum((reached >= need).to(tl.int64), 0) - 1, 0)
    above += tl.sum(tl.where(tl.arange(0, 16) > digit, here, 0), 0)
    return prefix * 16 + digit, above, total


@triton.jit(do_not_specialize=["level"])
def _best(
    logits, row_stride, node_stride, vocab, scale, tokens, token_stride, parents, parent_stride, size, nodes, path, width, draws, best, level,
    MULTIPLY: tl.constexpr, NODES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Enter a depth, and find the greatest score of its node."""
    block, row, splits = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    node = _enter(tokens, token_stride, parents, parent_stride, size, nodes, path, width, draws, row, block, level, splits, NODES, SPLITS)
    if node >= 0:
        index = block * BLOCK + tl.arange(0, BLOCK)
        x = _scores(logits, row * row_stride + node * node_stride, index, vocab, scale, True, MULTIPLY)
        tl.store(best + row * splits + block, tl.max(x, 0))


@triton.jit(do_not_specialize=["level", "shift", "top_k"])
def _search(
    logits, row_stride, node_stride, vocab, scale, path, width, best, state, bins, next_state, next_bins, top_k, rest, level, shift,
    MULTIPLY: tl.constexpr, PAST: tl.constexpr, MASS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count, or weigh, what has the digits found so far, by its next digit. PAST: what the launch before found; 0 nothing, 1 counts, 2 mass."""
    block, row, splits = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    node = tl.load(path + row * width + level)
    if node >= 0:
        prefix, above, total, floor = 0, 0, 0, 0
        if PAST:
            found = _bins(bins, row, splits, SPLITS)
            prefix, above, total = _narrow(found, state, row, top_k, rest, PAST == 2)  # pyright: ignore[reportGeneralTypeIssues]
            if PAST == 1 + MASS:
                floor = tl.load(state + row * 4 + 3)
            else:
                prefix, above, total, floor = 0, 0, 0, prefix  # top-p begins: among what top-k left
        if block == 0:
            tl.store(next_state + row * 4, prefix)
            tl.store(next_state + row * 4 + 1, above)
            tl.store(next_state + row * 4 + 2, total)
            tl.store(next_state + row * 4 + 3, floor)
        index = block * BLOCK + tl.arange(0, BLOCK)
        x = _scores(logits, row * row_stride + node * node_stride, index, vocab, scale, True, MULTIPLY)
        order = _order(x)
        inside = (order >> (shift + 4)) == prefix
        if MASS:
            weight = tl.where(inside & (order >= floor), _mass(x, _peak(best, row, splits, SPLITS)), 0)
        else:
            weight = inside.to(tl.int64)
        digit, each = ((order >> shift) & 15).to(tl.int32), tl.arange(0, 16)
        sums = tl.sum(tl.where(each[:, None] == digit[None, :], weight[None, :], 0), 1)
        tl.store(next_bins + (row * splits + block) * 16 + each, sums)


@triton.jit
def _kept(
    x, row, block, splits, best, state, bins, top_k, rest, min_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """bool [BLOCK]: what `sampler.warp` keeps of this block."""
    keep = x == x
    if TOP_K or TOP_P:
        order, found = _order(x), _bins(bins, row, splits, SPLITS)
        least, above, total = _narrow(found, state, row, top_k, rest, TOP_P)
        keep = order >= least
        if TOP_P:  # Of those that equal the least kept the lowest ids go, as many as the limit allows.
            equal = order == least
            each = tl.sum(tl.where(tl.arange(0, 16)[None, :] == (least & 15), found, 0), 1)  # [SPLITS], their mass in each split
            one = tl.maximum(tl.max(tl.where(equal, _mass(x, _peak(best, row, splits, SPLITS)), 0), 0), 1)
            gone = (_limit(total, rest) - (total - above - tl.sum(each, 0))) // one
            before = tl.sum(tl.where(tl.arange(0, SPLITS) < block, each, 0), 0) // one
            keep = keep & ((order > least) | (before + tl.cumsum(equal.to(tl.int32), 0) > gone))
    if MIN_P:
        keep = keep & (tl.exp(x - _peak(best, row, splits, SPLITS)) >= min_p)
    return keep


@triton.jit(do_not_specialize=["level", "seed", "top_k"])
def _draw(
    logits, row_stride, node_stride, vocab, scale, tokens, token_stride, parents, parent_stride, size, nodes, path, width, draws,
    best, state, bins, request, position, seed, top_k, rest, min_p, level,
    SAMPLED: tl.constexpr, MULTIPLY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    NODES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of each split: score and id in one integer, the lower id the greater."""
    block, row, splits = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    if TOP_K or TOP_P or MIN_P:
        node = tl.load(path + row * width + level)
    else:
        node = _enter(
            tokens, token_stride, parents, parent_stride, size, nodes, path, width, draws, row, block, level, splits, NODES, SPLITS
        )
    if node >= 0:
        index = block * BLOCK + tl.arange(0, BLOCK)
        x = _scores(logits, row * row_stride + node * node_stride, index, vocab, scale, SAMPLED, MULTIPLY)
        if TOP_K or TOP_P or MIN_P:
            x = tl.where(_kept(x, row, block, splits, best, state, bins, top_k, rest, min_p, TOP_K, TOP_P, MIN_P, SPLITS), x, _NEVER)
        if SAMPLED:
            x += _noise(seed, tl.load(request + row), tl.load(position + row) + level + 1, block, BLOCK)
        ranked = (_order(x) << 31) | (0x7FFFFFFF - index)
        tl.store(draws + (row * width + level) * splits + block, tl.max(ranked, 0))


@triton.jit
def _finish(path, width, draws, length, next_token, splits, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """length [B], and what was drawn where the walk ended; token 0 for an idle row."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    count = tl.sum((tl.load(path + row * width + index, mask=index < width, other=-1) >= 0).to(tl.int64), 0)
    y = _token(draws, row * width + count - 1, count > 0, splits, SPLITS)
    tl.store(length + row, count)
    tl.store(next_token + row, tl.where(count > 0, y, 0))


def reciprocal(temperature: float) -> float:
    return 1.0 / ctypes.c_float(temperature).value


def supported(sampling: Sampling) -> str:
    """Why these kernels cannot take a Sampling, in one line; "" where they can."""
    if sampling.repetition_penalty != 1.0:
        return f"repetition_penalty {sampling.repetition_penalty}: it needs the tokens before each node"
    if not sampling.greedy and sampling.rule not in ("target-sample", "shared-noise"):
        return f"rule {sampling.rule}: it needs more than one draw at a node"
    return ""


def verify(
    tree: DraftTree,
    logits: Tensor,
    sampling: Sampling,
    request: Tensor,
    position: Tensor,
    max_depth: int | None = None,
    *,
    block: int = 2048,
) -> Verdict:
    """logits [B,N,V] of the tree's nodes, request [B] and position [B] (absolute index of the root) int64 -> Verdict.

    The twin's path, length and next_token (0 for an idle row). Nothing is read by the host, and the launches follow from the arguments'
    shapes, sampling and max_depth alone, so that a CUDA graph can hold them. A score whose mass ends within 1e-6 of top_p's limit, or
    whose probability is that near to min_p's, may be kept by one and not by the other. Undefined under filters: NaN and +inf among logits.

    logits: float32, bfloat16 or float16, last stride 1, N <= 256, V <= 2^19. max_depth: K, an upper bound on the depth of the trees;
    N − 1 where it is not known. block: tokens of one program, a power of two.

    Raises:
        ValueError: a Sampling that is not `supported`, or tensors or numbers out of these bounds.
    """
    _check(tree, logits, sampling, request, position, max_depth, block)
    (rows, nodes, vocab), device, multiply = logits.shape, logits.device, logits.is_cuda
    width, splits = nodes if max_depth is None else min(max_depth + 1, nodes), -(-vocab // block)
    sampled = not sampling.greedy
    top_k, top_p, min_p = sampled and 0 < sampling.top_k < vocab, sampled and sampling.top_p < 1.0, sampled and sampling.min_p > 0.0

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    path, length, next_token, draws = empty(rows, width), empty(rows), empty(rows), empty(rows, width, splits)
    best = empty(rows, splits, dtype=torch.float32)
    state, bins = empty(2, rows, 4).unbind(), empty(2, rows, splits, 16).unbind()  # each pass reads one and writes the other

    # torch divides by a number on a CPU, but on a GPU multiplies by its reciprocal: that of the float32.
    scale = 1.0 if not sampled else reciprocal(sampling.temperature) if multiply else sampling.temperature
    node = (logits, logits.stride(0), logits.stride(1), vocab, scale)
    tokens, parents = (x if x.stride(1) == 1 else x.contiguous() for x in (tree.tokens, tree.parents))
    edges = (tokens, tokens.stride(0), parents, parents.stride(0), tree.size.contiguous(), nodes, path, width, draws)
    keys = (request.contiguous(), position.contiguous(), (sampling.seed + 2**63) % 2**64 - 2**63)  # the seed as an int64
    cut, rest = sampling.top_k if top_k else 0, 1.0 - sampling.top_p
    flags = {"MULTIPLY": multiply, "SPLITS": triton.next_power_of_2(splits), "BLOCK": block, "num_warps": min(8, max(1, block // 128))}
    flags["enable_fp_fusion"] = False  # torch rounds score · 1/T before it adds the noise
    whole = {**flags, "NODES": triton.next_power_of_2(nodes)}
    kinds = {"SAMPLED": sampled, "TOP_K": top_k, "TOP_P": top_p, "MIN_P": min_p, **whole}
    grid = (splits, rows)
    with torch.cuda.device_of(logits):
        for level in range(width):
            turn = past = 0
            if top_k or top_p or min_p:
                _best[grid](*node, *edges, best, level, **whole)
            for mass in [False] * top_k + [True] * top_p:
                for shift in range(28, -1, -4):
                    arrays = (best, state[turn], bins[turn], state[1 - turn], bins[1 - turn])
                    _search[grid](*node, path, width, *arrays, cut, rest, level, shift, **{"PAST": past, "MASS": mass, **flags})
                    turn, past = 1 - turn, 1 + mass
            _draw[grid](*node, *edges, best, state[turn], bins[turn], *keys, cut, rest, sampling.min_p, level, **kinds)
        ends = {"WIDTH": triton.next_power_of_2(width), "SPLITS": flags["SPLITS"]}
        _finish[(rows,)](path, width, draws, length, next_token, splits, **ends)
    return Verdict(path, length, next_token)


def _check(
    tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int | None, block: int
) -> None:
    if reason := supported(sampling):
        raise ValueError(f"got {reason}; use draftsmith.inference.verify")
    if logits.ndim != 3 or not logits.numel() or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"got logits {list(logits.shape)} {logits.dtype}; expected [B,N,V], none empty, of 16 or 32 bits; convert them")
    rows, nodes, vocab = logits.shape
    if nodes > _MAX_NODES or vocab > _MAX_VOCAB or (vocab > 1 and logits.stride(2) != 1):
        raise ValueError(
            f"got logits {list(logits.shape)} of last stride {logits.stride(2)}; expected N <= {_MAX_NODES}, V <= {_MAX_VOCAB} and stride 1; "
            "use draftsmith.inference.verify"
        )
    wide = {"tokens": tree.tokens, "parents": tree.parents}
    for name, x in {**wide, "size": tree.size, "request": request, "position": position}.items():
        expected = [rows, nodes] if name in wide else [rows]
        if list(x.shape) != expected or x.dtype != torch.int64 or x.device != logits.device:
            raise ValueError(
                f"got {name} {list(x.shape)} {x.dtype} on {x.device}; expected {expected} torch.int64 on {logits.device}; match them"
            )
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"got max_depth {max_depth}; expected at least 0; correct it")
    if block < 4 or block & (block - 1) or vocab > 1024 * block:
        raise ValueError(f"got block {block}; expected a power of two, from 4 on, of at most 1024 splits of {vocab} tokens; correct it")
