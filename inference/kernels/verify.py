"""Verification from logits without a softmax or a sort over them: one draw at each visited node, all on the device.

For greedy decoding and target-sample matching. The reference implementation is `draftsmith.inference.verify.verify`.

All rows of the batch descend together, one depth at a time, so K+1 of N nodes are read. The vocabulary of a node is split over programs; each
writes the partial result of its split, and every program of the next launch merges these itself, which costs less than a launch for the
merge. With filters a depth takes 1 + 8 · [top_k] + 8 · [top_p] more launches, whose reads the L2 cache serves: the least score that is kept
is determined four bits at a time, by counting or weighing the scores that begin with the bits so far.

Letters: B rows of a batch, N tree nodes with the root, V vocabulary, K draft depth, P = min(K+1, N) path entries. A vocabulary has
⌈V / block⌉ splits.
"""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.inference.sampler import PURPOSE_TOKEN, Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict

__all__ = ["refusal", "verify"]

_PURPOSE = tl.constexpr(PURPOSE_TOKEN)
_NEVER = tl.constexpr(float("-inf"))
_UNIT = tl.constexpr(2.0**43)  # unit of mass: 2^19 tokens of mass 1 fit into an int64
_MAX_NODES, _MAX_VOCAB = 256, 2**19


@triton.jit
def _scores(logits, start, index, vocab, scale, SAMPLED: tl.constexpr, MULTIPLY: tl.constexpr):
    """float32 [BLOCK] with temperature, rounded as torch rounds `logits.float() / temperature`.

    Entries past the vocabulary are −inf: they have no mass, lose every draw to a lower id, and do not change the k-th best.
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
    """`sampler.gumbel` of the tokens of this block, float32 [BLOCK]; computed in float64, as there."""
    counter = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, position.to(tl.uint32), request.to(tl.uint32), _PURPOSE)  # pyright: ignore[reportGeneralTypeIssues]
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # a b c d of the first counter, then of the second, …
    return (-tl.log(-tl.log((words.to(tl.float64) + 0.5) * 2.0**-32))).to(tl.float32)


@triton.jit
def _mass(x, best):
    """exp(x − best) as an integer. Integer sums are exact, so they do not depend on order or split."""
    return (tl.where(x > _NEVER, tl.exp(x - best), 0.0) * _UNIT).to(tl.int64)


@triton.jit
def _peak(best, row, splits, SPLITS: tl.constexpr):
    index = tl.arange(0, SPLITS)
    return tl.max(tl.load(best + row * splits + index, mask=index < splits, other=_NEVER), 0)


@triton.jit
def _token(draws, entry, active, splits, SPLITS: tl.constexpr):
    """The token drawn at entry row · P + depth; a token outside every vocabulary where the mask is False."""
    index = tl.arange(0, SPLITS)
    ranked = tl.load(draws + entry * splits + index, mask=active & (index < splits), other=0)
    return 0x7FFFFFFF - (tl.max(ranked, 0) & 0x7FFFFFFF)


@triton.jit
def _enter(
    tokens, token_stride, parents, parent_stride, size, nodes, path, width, draws, row, block, level, splits,
    NODES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The node of this row at this depth: the first child with the token that its parent drew; −1 where there is none."""
    entry = row * width + level
    parent = tl.load(path + entry - 1, mask=level > 0, other=-1)
    y = _token(draws, entry - 1, parent >= 0, splits, SPLITS)
    count = tl.load(size + row)
    index = tl.arange(0, NODES)
    inside = (index > 0) & (index < nodes) & (index < count)
    above = tl.load(parents + row * parent_stride + index, mask=inside, other=-1)
    token = tl.load(tokens + row * token_stride + index, mask=inside, other=-1)
    child = tl.min(tl.where(inside & (parent >= 0) & (above == parent) & (token == y), index, NODES), 0)
    node = tl.where(child < NODES, child, -1)
    node = tl.where((level == 0) & (count > 0), 0, node).to(tl.int64)
    if block == 0:
        tl.store(path + entry, node)
    return node


@triton.jit
def _bins(bins, row, splits, SPLITS: tl.constexpr):
    """Count or mass of each split under each next digit, int64 [SPLITS,16]."""
    split = tl.arange(0, SPLITS)[:, None]
    return tl.load(bins + (row * splits + split) * 16 + tl.arange(0, 16)[None, :], mask=split < splits, other=0)


@triton.jit
def _limit(total, rest):
    """The mass that top-p drops, of the total; the likeliest token always stays."""
    return tl.minimum((total.to(tl.float64) * rest).to(tl.int64), total - 1)


@triton.jit
def _narrow(counts, state, row, top_k, rest, MASS: tl.constexpr):
    """One more hexadecimal digit of the greatest t with a count or mass of at least `need` in {order >= t}.

    Returns the digits of t so far, the count or mass above everything that begins with them, and the total.
    """
    prefix, above, total = tl.load(state + row * 4), tl.load(state + row * 4 + 1), tl.load(state + row * 4 + 2)
    by_digit = tl.sum(counts, 0)
    inside = tl.sum(by_digit, 0)
    total = tl.where(total > 0, total, inside)  # known after the first digit
    if MASS:
        need = total - _limit(total, rest)
    else:
        need = top_k
    reached = above + inside - tl.cumsum(by_digit, 0) + by_digit  # [16], falling
    digit = tl.maximum(tl.sum((reached >= need).to(tl.int64), 0) - 1, 0)
    above += tl.sum(tl.where(tl.arange(0, 16) > digit, by_digit, 0), 0)
    return prefix * 16 + digit, above, total


@triton.jit(do_not_specialize=["level"])
def _best(
    logits, row_stride, node_stride, vocab, scale, tokens, token_stride, parents, parent_stride, size, nodes, path, width, draws, best, level,
    MULTIPLY: tl.constexpr, NODES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Enter a depth and compute the greatest score of its node."""
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
    """Count, or weigh, by its next digit, every score that begins with the digits so far.

    PAST says what the launch before computed: 0 nothing, 1 counts, 2 mass.
    """
    block, row, splits = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    node = tl.load(path + row * width + level)
    if node >= 0:
        prefix, above, total, floor = 0, 0, 0, 0
        if PAST:
            counts = _bins(bins, row, splits, SPLITS)
            prefix, above, total = _narrow(counts, state, row, top_k, rest, PAST == 2)  # pyright: ignore[reportGeneralTypeIssues]
            if PAST == 1 + MASS:
                floor = tl.load(state + row * 4 + 3)
            else:
                prefix, above, total, floor = 0, 0, 0, prefix  # top-p begins, among the tokens that top-k left
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
def _keep_mask(
    x, row, block, splits, best, state, bins, top_k, rest, min_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The tokens of this block that `sampler.warp` keeps, bool [BLOCK]."""
    keep = x == x
    if TOP_K or TOP_P:
        order, counts = _order(x), _bins(bins, row, splits, SPLITS)
        least, above, total = _narrow(counts, state, row, top_k, rest, TOP_P)
        keep = order >= least
        if TOP_P:  # Among the scores that tie at the least kept one, the lowest ids go first, as many as the limit allows.
            equal = order == least
            each = tl.sum(tl.where(tl.arange(0, 16)[None, :] == (least & 15), counts, 0), 1)  # [SPLITS], their mass in each split
            mass = tl.maximum(tl.max(tl.where(equal, _mass(x, _peak(best, row, splits, SPLITS)), 0), 0), 1)
            gone = (_limit(total, rest) - (total - above - tl.sum(each, 0))) // mass
            before = tl.sum(tl.where(tl.arange(0, SPLITS) < block, each, 0), 0) // mass
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
    """The best token of each split: score and id in one integer, in which the lower id of a tie is greater."""
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
            x = tl.where(_keep_mask(x, row, block, splits, best, state, bins, top_k, rest, min_p, TOP_K, TOP_P, MIN_P, SPLITS), x, _NEVER)
        if SAMPLED:
            x += _noise(seed, tl.load(request + row), tl.load(position + row) + level + 1, block, BLOCK)
        ranked = (_order(x) << 31) | (0x7FFFFFFF - index)
        tl.store(draws + (row * width + level) * splits + block, tl.max(ranked, 0))


@triton.jit
def _finish(path, width, draws, length, next_token, splits, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """length [B], and the token drawn where the walk ended; 0 for an idle row."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    count = tl.sum((tl.load(path + row * width + index, mask=index < width, other=-1) >= 0).to(tl.int64), 0)
    y = _token(draws, row * width + count - 1, count > 0, splits, SPLITS)
    tl.store(length + row, count)
    tl.store(next_token + row, tl.where(count > 0, y, 0))


def reciprocal(temperature: float) -> float:
    return 1.0 / ctypes.c_float(temperature).value


def refusal(sampling: Sampling) -> str:
    """One line that says why these kernels do not support a Sampling; "" if they do."""
    if sampling.repetition_penalty != 1.0:
        return f"repetition_penalty {sampling.repetition_penalty}: it needs the tokens before each node"
    if not sampling.greedy and sampling.rule not in ("target-sample", "shared-noise"):
        return f"rule {sampling.rule}: it needs more than one draw at a node"
    return ""


def verify(
    tree: DraftTree,
    logits: Tensor,
    sampling: Sampling,
    noise_keys: Tensor,
    positions: Tensor,
    max_depth: int | None = None,
    *,
    block: int = 2048,
) -> Verdict:
    """Path, length and next_token of the reference implementation (next_token is 0 for an idle row).

    The host reads nothing, and the launches depend on shapes, sampling and max_depth alone, so that a CUDA graph can hold them. A score
    whose mass ends within 1e-6 of top_p's limit, or whose probability is that near to min_p's, may be kept here and dropped by the
    reference, or the reverse. With filters, the result is undefined for NaN and +inf logits.

    Args:
        tree: the draft trees.
        logits: [B,N,V] of the nodes, float32, bfloat16 or float16, last stride 1, N ≤ 256, V ≤ 2^19.
        sampling: greedy, or rule target-sample or shared-noise.
        noise_keys: [B] int64.
        positions: [B] int64, absolute position of node 0.
        max_depth: K, an upper bound on the depth of the trees; None means N − 1.
        block: tokens of one program, a power of two.

    Raises:
        ValueError: a Sampling of which `refusal` gives a reason, or tensors or numbers out of these bounds.
    """
    _check(tree, logits, sampling, noise_keys, positions, max_depth, block)
    (rows, nodes, vocab), device, multiply = logits.shape, logits.device, logits.is_cuda
    width, splits = nodes if max_depth is None else min(max_depth + 1, nodes), -(-vocab // block)
    sampled = not sampling.greedy
    top_k, top_p, min_p = sampled and 0 < sampling.top_k < vocab, sampled and sampling.top_p < 1.0, sampled and sampling.min_p > 0.0

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    path, length, next_token, draws = empty(rows, width), empty(rows), empty(rows), empty(rows, width, splits)
    best = empty(rows, splits, dtype=torch.float32)
    state, bins = empty(2, rows, 4).unbind(), empty(2, rows, splits, 16).unbind()  # each pass reads one buffer and writes its partner

    # torch divides by a number on a CPU; on a GPU it multiplies by the reciprocal of the float32.
    scale = 1.0 if not sampled else reciprocal(sampling.temperature) if multiply else sampling.temperature
    node = (logits, logits.stride(0), logits.stride(1), vocab, scale)
    tokens, parents = (x if x.stride(1) == 1 else x.contiguous() for x in (tree.tokens, tree.parents))
    edges = (tokens, tokens.stride(0), parents, parents.stride(0), tree.size.contiguous(), nodes, path, width, draws)
    keys = (noise_keys.contiguous(), positions.contiguous(), (sampling.seed + 2**63) % 2**64 - 2**63)  # the seed as an int64
    cut, rest = sampling.top_k if top_k else 0, 1.0 - sampling.top_p
    flags = {"MULTIPLY": multiply, "SPLITS": triton.next_power_of_2(splits), "BLOCK": block, "num_warps": min(8, max(1, block // 128))}
    flags["enable_fp_fusion"] = False  # torch rounds score · 1/T before it adds the noise
    tree_flags = {**flags, "NODES": triton.next_power_of_2(nodes)}
    kinds = {"SAMPLED": sampled, "TOP_K": top_k, "TOP_P": top_p, "MIN_P": min_p, **tree_flags}
    grid = (splits, rows)
    with torch.cuda.device_of(logits):
        for level in range(width):
            current = past = 0
            if top_k or top_p or min_p:
                _best[grid](*node, *edges, best, level, **tree_flags)
            for mass in [False] * top_k + [True] * top_p:
                for shift in range(28, -1, -4):
                    arrays = (best, state[current], bins[current], state[1 - current], bins[1 - current])
                    _search[grid](*node, path, width, *arrays, cut, rest, level, shift, **{"PAST": past, "MASS": mass, **flags})
                    current, past = 1 - current, 1 + mass
            _draw[grid](*node, *edges, best, state[current], bins[current], *keys, cut, rest, sampling.min_p, level, **kinds)
        ends = {"WIDTH": triton.next_power_of_2(width), "SPLITS": flags["SPLITS"]}
        _finish[(rows,)](path, width, draws, length, next_token, splits, **ends)
    return Verdict(path, length, next_token)


def _check(
    tree: DraftTree, logits: Tensor, sampling: Sampling, noise_keys: Tensor, positions: Tensor, max_depth: int | None, block: int
) -> None:
    if reason := refusal(sampling):
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
    for name, x in {**wide, "size": tree.size, "noise_keys": noise_keys, "positions": positions}.items():
        expected = [rows, nodes] if name in wide else [rows]
        if list(x.shape) != expected or x.dtype != torch.int64 or x.device != logits.device:
            raise ValueError(
                f"got {name} {list(x.shape)} {x.dtype} on {x.device}; expected {expected} torch.int64 on {logits.device}; match them"
            )
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"got max_depth {max_depth}; expected at least 0; correct it")
    if block < 4 or block & (block - 1) or vocab > 1024 * block:
        raise ValueError(f"got block {block}; expected a power of two, from 4 on, of at most 1024 splits of {vocab} tokens; correct it")
