"""Triton kernels that expand a dynamic tree (EAGLE-2's): two for the candidates of a level, one that adds the level, one for the finished tree.

The reference of `add_level` and `rerank` is `inference.expand.DynamicExpansion`, the CPU path: they are equal to the bit, where of equal scores
the earlier node is the better. `best` has an independent reference, since the CPU path leaves the order of equal logits open.

Letters: B rows · F nodes of the current level · R candidates of each · W nodes of the next level · D draft vocabulary · G groups of it ·
M stored candidates, the root included · E nodes encoded so far · N tree nodes with the root.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.inference.tree import DraftTree
from draftsmith.inference.tree_limits import MOST_RANKED, MOST_STORED

__all__ = ["CandidateStore", "add_level", "best", "best_reference", "rerank"]

_GROUP = 128  # neighbouring entries of the vocabulary that share a maximum
_GROUPS = 32  # groups that a program reads
_MAX_VOCAB = 1 << 19
_MAX_NODES = 256


class CandidateStore(NamedTuple):
    """All candidates of a round's dynamic trees: the root first, then level after level.

    Attributes:
        tokens: [B,M] int64.
        parents: [B,M] int64, indices into the store, −1 for the root.
        scores: [B,M] float32, log-probabilities of the path from the root.
        on_chain: [B,M] bool, whether the candidate is on the leftmost chain.
        encoded_index: [B,M] int64, its index among the encoded nodes, −1 where it was not encoded.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    on_chain: Tensor
    encoded_index: Tensor

    @classmethod
    def rooted(cls, root: Tensor, size: int) -> "CandidateStore":
        """root [B] int64, space for `size` candidates -> the store of the roots alone. `tokens[:, 0]` may be set anew for another round."""
        none = root.new_full((len(root), size), -1)
        store = cls(none.clone(), none.clone(), none.float().zero_(), torch.ones_like(none, dtype=torch.bool), none)
        store.tokens[:, 0] = root
        return store

    def upto(self, stored: int) -> "CandidateStore":
        """Views of the first `stored` candidates."""
        return CandidateStore(*(tensor[:, :stored] for tensor in self))


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each node. Of equal logits the lowest id is the better.

    The logits are read once. Then `count` of their groups, those of the greatest maxima, are read again, as in `ranked`.

    Args:
        logits: [B,F,D].
        count: R.

    Returns:
        Ids [B,F,R] int64, best first, and their log-probabilities [B,F,R] float32.

    Raises:
        ValueError: a dtype, layout or size that the kernels do not take.
    """
    rows, nodes, vocab = logits.shape
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16) or logits.stride(2) != 1:
        raise ValueError(
            f"got logits in {logits.dtype} of strides {list(logits.stride())}; expected float32, bfloat16 or float16 and last stride 1; "
            "use best_reference"
        )
    if not 1 <= count <= min(MOST_RANKED, vocab) or vocab > _MAX_VOCAB:
        raise ValueError(
            f"got {count} of {vocab} tokens; expected 1..{MOST_RANKED}, no more than there are, of {_MAX_VOCAB} at most; use best_reference"
        )
    groups = -(-vocab // _GROUP)
    maxima = torch.empty(2, rows, nodes, groups, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, nodes, count, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, nodes, count, dtype=torch.float32, device=logits.device)
    if ids.numel():
        launch_maxima: Any = _maxima[-(-groups // _GROUPS), nodes, rows]
        launch_best: Any = _best[nodes, rows]
        with torch.cuda.device_of(logits):
            launch_maxima(logits, *maxima, *logits.stride()[:2], vocab, groups, _GROUP, _GROUPS, num_warps=4)
            launch_best(
                logits, *maxima, ids, scores, *logits.stride()[:2], vocab, groups,
                count, _power(count), _GROUP, _power(groups), num_warps=4,
            )  # fmt: skip
    return ids, scores


def best_reference(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Independent reference of `best` in plain torch. It sorts the vocabulary, which is too slow for the CPU path."""
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return ids, logits.float().log_softmax(-1).gather(-1, ids)


def add_level(
    store: CandidateStore, level_index: Tensor, visible: Tensor, ids: Tensor, logp: Tensor, stored: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Store the candidates of a level and select the `width` best of them, which form the next level.

    Args:
        store: the candidates so far; F·R columns are written.
        level_index: [B,F] int64, the indices of the level's nodes in the store.
        visible: [B,F,E] bool, which encoded nodes each node attends to, itself included; E = 0 for the root's level.
        ids: [B,F,R] int64, the candidates of each node, best first.
        logp: [B,F,R] float32, their log-probabilities.
        stored: columns of the store in use.
        width: W; 0 after the last level.

    Returns:
        Of the next level, best node first: indices in the store [B,W], visible [B,W,E+W], tokens [B,W], and the index of each node's parent
        [B,W] among the F nodes.

    Raises:
        ValueError: shapes, dtypes, layouts or sizes that do not fit.
    """
    (rows, nodes, count), encoded, size = ids.shape, visible.shape[2], store.tokens.shape[1]
    _check(store, level_index=(level_index, (rows, nodes), torch.int64), visible=(visible, (rows, nodes, encoded), torch.bool),
           ids=(ids, (rows, nodes, count), torch.int64), logp=(logp, (rows, nodes, count), torch.float32))  # fmt: skip
    candidates = nodes * count
    fits = 1 <= nodes <= MOST_RANKED and 1 <= count <= MOST_RANKED and 0 <= width <= min(candidates, MOST_RANKED)
    if not fits or stored + candidates > size or size > MOST_STORED:
        raise ValueError(
            f"got {width} of {nodes} times {count} candidates after {stored} of {size}; expected 1..{MOST_RANKED} of each, and space for them "
            f"among at most {MOST_STORED}; draft a narrower or shallower tree"
        )
    next_index, parent_index, tokens = (torch.empty(rows, width, dtype=torch.int64, device=ids.device) for _ in range(3))
    next_visible = torch.empty(rows, width, encoded + width, dtype=torch.bool, device=ids.device)
    if rows:
        launch: Any = _add_level[(rows,)]
        with torch.cuda.device_of(ids):
            launch(
                *store, level_index, visible, ids, logp, next_index, parent_index, tokens, next_visible, store.tokens.stride(0), stored,
                encoded, nodes, width, count, _power(candidates), _power(width), _power(encoded + width), num_warps=4,
            )  # fmt: skip
    return next_index, next_visible, tokens, parent_index


def rerank(store: CandidateStore, nodes: int, levels: int) -> tuple[DraftTree, Tensor]:
    """The trees of the `nodes` best candidates, the root included: `DynamicExpansion.finish`.

    A set of best candidates is closed under ancestors, as no score is above its parent's, which comes before it.

    Args:
        store: the candidates.
        nodes: N; all stored candidates where there are fewer.
        levels: no candidate is deeper.

    Returns:
        The trees, and each node's index [B,N] among the encoded nodes, −1 where it was not encoded.

    Raises:
        ValueError: shapes, dtypes, layouts or sizes that do not fit.
    """
    rows, stored = store.tokens.shape
    _check(store)
    nodes = min(nodes, stored)
    if stored > MOST_STORED or not 1 <= nodes <= _MAX_NODES or levels < 0:
        raise ValueError(
            f"got {nodes} of {stored} candidates, {levels} levels; expected 1..{_MAX_NODES} of {MOST_STORED} at most; draft a smaller tree"
        )
    words = (nodes + 63) // 64
    tokens, parents, depth, encoded_index = (store.tokens.new_empty(rows, nodes) for _ in range(4))
    ancestors, size = store.tokens.new_empty(rows, nodes, words), store.tokens.new_empty(rows)
    if rows:
        launch: Any = _rerank[(rows,)]
        with torch.cuda.device_of(tokens):
            launch(
                *store, tokens, parents, depth, encoded_index, ancestors, size, store.tokens.stride(0), stored, nodes, levels,
                words, _power(words), _power(stored), num_warps=max(4, _power(stored) // 256),
            )  # fmt: skip
    return DraftTree(tokens, parents, size, depth, ancestors), encoded_index


def _check(store: CandidateStore, **given: tuple[Tensor, tuple[int, ...], torch.dtype]) -> None:
    tokens = store.tokens
    dtypes = (torch.int64, torch.int64, torch.float32, torch.bool, torch.int64)
    for name, tensor, dtype in zip(CandidateStore._fields, store, dtypes, strict=True):
        if (
            tensor.shape != tokens.shape
            or tensor.dtype != dtype
            or tensor.stride() != (tokens.stride(0), 1)
            or tensor.device != tokens.device
        ):
            raise ValueError(
                f"got {name} {list(tensor.shape)} in {tensor.dtype} of strides {list(tensor.stride())} on {tensor.device}; expected "
                f"{list(tokens.shape)} in {dtype} of strides {[tokens.stride(0), 1]} on {tokens.device}; take CandidateStore.rooted"
            )
    for name, (tensor, shape, dtype) in given.items():
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != tokens.device:
            raise ValueError(
                f"got {name} {list(tensor.shape)} in {tensor.dtype} on {tensor.device}; expected {list(shape)} in {dtype} on "
                f"{tokens.device}, contiguous; pass what the last level and the drafter gave"
            )


def _power(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


@triton.jit
def _ordered(value):
    """float32 -> int32 of the same order, both zeros at 0; never the least int32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _key(value, index, valid):
    """float32 value, index ≥ 0 below 2^31 -> int64 sort key: greater value first, then lower index. The least int64 where not valid."""
    key = (_ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return tl.where(valid, key, -0x8000000000000000)


@triton.jit
def _index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    size = tl.abs(ordered).to(tl.float32, bitcast=True)
    return tl.where(ordered < 0, -size, size)


@triton.jit
def _greatest(key, count, WIDTH: tl.constexpr):
    """The `count` greatest of distinct int64 keys of any shape, in [WIDTH], descending."""
    lane = tl.arange(0, WIDTH)
    greatest = tl.full([WIDTH], -0x8000000000000000, tl.int64)
    for rank in range(count):
        top = tl.max(key)
        greatest = tl.where(lane == rank, top, greatest)
        key = tl.where(key == top, -0x8000000000000000, key)
    return greatest


@triton.jit
def _maxima(logits, maxima, sums, batch_stride, node_stride, vocab, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Grid (tiles of D, F, B). Of each group the maximum, and the sum of the exponentials after subtracting it; [B,F,G] float32 both."""
    node, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    entry = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits += batch * batch_stride + node * node_stride
    x = tl.load(logits + entry, entry < vocab, -float("inf")).to(tl.float32)
    high = tl.max(x, 1)
    shift = tl.where(high == -float("inf"), 0.0, high)  # −inf less −inf is NaN
    total = tl.sum(tl.exp2((x - shift[:, None]) * 1.4426950408889634), 1)
    to = (batch * tl.num_programs(1) + node) * groups + group
    tl.store(maxima + to, high, mask=group < groups)
    tl.store(sums + to, total, mask=group < groups)


@triton.jit
def _best(
    logits, maxima, sums, ids, scores, batch_stride, node_stride, vocab, groups,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Grid (F, B). The `COUNT` best entries are in the `COUNT` groups of greatest maximum, the first among equals."""
    node, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = batch * tl.num_programs(0) + node
    group, rank = tl.arange(0, BLOCK_G), tl.arange(0, WIDTH)
    high = tl.load(maxima + line * groups + group, group < groups, -float("inf"))
    total = tl.load(sums + line * groups + group, group < groups, 0.0)
    top = tl.max(high)
    shift = tl.where(top == -float("inf"), 0.0, top)
    norm = top + tl.log(tl.sum(total * tl.exp2((high - shift) * 1.4426950408889634)))
    # Where there are fewer than `COUNT` groups the rest of `inside` is past the vocabulary.
    inside = _index(_greatest(_key(high, group, group < groups), COUNT, WIDTH))
    entry = inside[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = entry < vocab
    logits += batch * batch_stride + node * node_stride
    x = tl.load(logits + entry, valid, -float("inf")).to(tl.float32)
    winners = _greatest(_key(x, entry, valid), COUNT, WIDTH)
    tl.store(ids + line * COUNT + rank, _index(winners), mask=rank < COUNT)
    tl.store(scores + line * COUNT + rank, _value(winners) - norm, mask=rank < COUNT)


@triton.jit(do_not_specialize=["stored", "encoded", "nodes", "width"])
def _add_level(
    tokens, parents, scores, on_chain, encoded_index, level_index, visible, ids, logp, next_index, parent_index, next_tokens, next_visible,
    stride, stored, encoded, nodes, width,
    COUNT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_C)
    node = candidate // COUNT
    valid = node < nodes
    from_row, to_row = row * nodes * COUNT + candidate, row * stride + stored + candidate
    parent = tl.load(level_index + row * nodes + node, valid, 0)
    gain = tl.load(logp + from_row, valid, 0.0)
    # Rounding may give a log-probability above 0, and so a child a better score than its parent.
    score = tl.load(scores + row * stride + parent, valid, 0.0) + tl.where(gain > 0.0, 0.0, gain)
    leftmost = tl.load(on_chain + row * stride + parent, valid, 0) & (candidate % COUNT == 0)
    chosen = _index(_greatest(_key(score, candidate, valid), width, BLOCK_W))  # [W]
    rank = tl.arange(0, BLOCK_W)
    is_chosen = (chosen[None, :] == candidate[:, None]) & (rank < width)[None, :]
    position = tl.max(tl.where(is_chosen, encoded + rank[None, :], -1), 1)
    tl.store(tokens + to_row, tl.load(ids + from_row, valid, 0), mask=valid)
    tl.store(parents + to_row, parent, mask=valid)
    tl.store(scores + to_row, score, mask=valid)
    tl.store(on_chain + to_row, leftmost, mask=valid)
    tl.store(encoded_index + to_row, position.to(tl.int64), mask=valid)

    real = rank < width
    inner = chosen // COUNT
    to = row * width + rank
    tl.store(next_index + to, stored + chosen, mask=real)
    tl.store(parent_index + to, inner, mask=real)
    tl.store(next_tokens + to, tl.load(ids + row * nodes * COUNT + chosen, real, 0), mask=real)
    column = tl.arange(0, BLOCK_E)[None, :]
    sees = tl.load(
        visible + (row * nodes + inner)[:, None] * encoded + column, real[:, None] & (column < encoded), 0
    ) | (column == encoded + rank[:, None])  # fmt: skip
    tl.store(next_visible + to[:, None] * (encoded + width) + column, sees, mask=real[:, None] & (column < encoded + width))


@triton.jit(do_not_specialize=["stored", "nodes", "levels"])
def _rerank(
    tokens, parents, scores, on_chain, encoded_index, to_tokens, to_parents, to_depth, to_encoded_index, to_words, to_size,
    stride, stored, nodes, levels,
    WORDS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_M)
    valid = lane < stored
    root, child = lane == 0, valid & (lane > 0)
    # The score of the last node to keep, built as an integer from its highest bit on: the greatest value that enough scores reach.
    score = tl.where(child, _ordered(tl.load(scores + row * stride + lane, valid, 0.0)), -0x80000000)
    least = tl.full([], -0x80000000, tl.int32)
    for step in range(32):
        trial = least ^ (tl.full([], 1, tl.int32) << (31 - step))
        least = tl.where(tl.sum((score >= trial).to(tl.int32)) >= nodes - 1, trial, least)
    above, equal = score > least, child & (score == least)
    chosen = root | above | (equal & (tl.cumsum(equal.to(tl.int32), 0) + tl.sum(above.to(tl.int32)) < nodes))
    # The leftmost chain comes first, then the rest in stored order.
    first = chosen & (root | tl.load(on_chain + row * stride + lane, valid, 0))
    rest = (chosen & ~first).to(tl.int32)
    index = tl.where(first, tl.cumsum(first.to(tl.int32), 0), tl.sum(first.to(tl.int32)) + tl.cumsum(rest, 0)) - 1
    index = tl.where(chosen, index, 0)

    pointer = tl.maximum(tl.load(parents + row * stride + lane, child, 0), 0).to(tl.int32)  # the root points to itself
    word = tl.arange(0, BLOCK_W)[None, :]
    bit = tl.full([BLOCK_M, BLOCK_W], 1, tl.int64)
    depth = tl.zeros([BLOCK_M], tl.int32)
    line = tl.where(index[:, None] // 64 == word, bit << (index[:, None] % 64).to(tl.int64), 0)
    node = lane
    for _ in range(levels):
        depth += (node > 0).to(tl.int32)
        node = tl.gather(pointer, node, 0)
        ancestor = tl.gather(index, node, 0)[:, None]
        line |= tl.where(ancestor // 64 == word, bit << (ancestor % 64).to(tl.int64), 0)

    to = row * nodes + index
    tl.store(to_tokens + to, tl.load(tokens + row * stride + lane, valid, 0), mask=chosen)
    tl.store(to_parents + to, tl.where(root, -1, tl.gather(index, pointer, 0)).to(tl.int64), mask=chosen)
    tl.store(to_depth + to, depth.to(tl.int64), mask=chosen)
    tl.store(to_encoded_index + to, tl.load(encoded_index + row * stride + lane, valid, 0), mask=chosen)
    tl.store(to_words + to[:, None] * WORDS + word, line, mask=chosen[:, None] & (word < WORDS))
    tl.store(to_size + row, nodes.to(tl.int64))
