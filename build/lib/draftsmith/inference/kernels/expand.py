"""Growing a dynamic tree (EAGLE-2's) on the device: three small kernels per level and one at the end. Triton; the twins of `frontier`
and `rerank` are `DynamicExpansion.extend` and `DynamicExpansion.finish`, to the bit, of equals the earlier being the better.

Letters: B rows · F nodes of a frontier · R candidates of each · W nodes of the next frontier · D draft vocabulary · G groups of it ·
M stored candidates, the root with them · E nodes encoded so far · N tree nodes with the root.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import CurrentLevel, DynamicExpansion, DynamicTree
from draftsmith.inference.tree import DraftTree

__all__ = ["Store", "best", "best_reference", "frontier", "rerank"]

_GROUP = 128  # neighbouring entries of the vocabulary that are looked at together
_GROUPS = 32  # groups that a program reads
_MAX_COUNT = 16
_MAX_VOCAB = 1 << 19
_MAX_STORED = 4096  # 16 levels of 16 times 16
_MAX_NODES = 256


class Store(NamedTuple):
    """What dynamic trees were grown from, the root first, then level after level, [B,M] each: tokens int64 · parents int64, places in
    the store, −1 for the root · scores float32, log-probabilities of the whole path · chain bool, whether on the leftmost chain · slots
    int64: the place where it was encoded, −1 where it was not."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    chain: Tensor
    slots: Tensor

    @classmethod
    def rooted(cls, root: Tensor, size: int) -> "Store":
        """root [B] int64, room for `size` candidates -> the store of the roots alone. `tokens[:, 0]` may be set anew for another round."""
        none = root.new_full((len(root), size), -1)
        store = cls(none.clone(), none.clone(), none.float().zero_(), torch.ones_like(none, dtype=torch.bool), none)
        store.tokens[:, 0] = root
        return store

    def upto(self, stored: int) -> "Store":
        """Views of the first `stored` candidates."""
        return Store(*(tensor[:, :stored] for tensor in self))


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [B,F,D] -> the `count` best ids [B,F,R] int64, best first and of equals the lowest, and their log-probabilities [B,F,R] float32.

    The logits are read once, and `count` of their groups again, where the maxima say that the best must be: as in `ranked`.

    Raises:
        ValueError: a dtype, layout or size that the kernels do not take.
    """
    rows, nodes, vocab = logits.shape
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16) or logits.stride(2) != 1:
        raise ValueError(
            f"got logits in {logits.dtype} of strides {list(logits.stride())}; expected float32, bfloat16 or float16 and last stride 1; "
            "use best_reference"
        )
    if not 1 <= count <= min(_MAX_COUNT, vocab) or vocab > _MAX_VOCAB:
        raise ValueError(
            f"got {count} of {vocab} tokens; expected 1..{_MAX_COUNT}, no more than there are, of {_MAX_VOCAB} at most; use best_reference"
        )
    groups = -(-vocab // _GROUP)
    maxima = torch.empty(2, rows, nodes, groups, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, nodes, count, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, nodes, count, dtype=torch.float32, device=logits.device)
    if ids.numel():
        survey: Any = _maxima[-(-groups // _GROUPS), nodes, rows]
        merge: Any = _best[nodes, rows]
        with torch.cuda.device_of(logits):
            survey(logits, *maxima, *logits.stride()[:2], vocab, groups, _GROUP, _GROUPS, num_warps=4)
            merge(
                logits, *maxima, ids, scores, *logits.stride()[:2], vocab, groups,
                count, _power(count), _GROUP, _power(groups), num_warps=4,
            )  # fmt: skip
    return ids, scores


def best_reference(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`best` in plain torch."""
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return ids, logits.float().log_softmax(-1).gather(-1, ids)


def frontier(
    store: Store, at: Tensor, seen: Tensor, ids: Tensor, logp: Tensor, stored: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Store a level's candidates and find the `width` best of them, the next to encode; 0 after the last level.

    at [B,F] int64: the frontier's places in the store · seen [B,F,E] bool: which of the encoded nodes each sees, itself included; none
    before the first level · ids [B,F,R] int64 and logp [B,F,R] float32: their candidates, best first · stored: columns of the store in use;
    F·R more are written. -> at [B,W] and seen [B,W,E+W] of the next frontier, best first, its tokens [B,W], and above [B,W], the places of
    its parents among the F.

    Raises:
        ValueError: shapes, dtypes, layouts or sizes that do not fit.
    """
    (rows, nodes, count), encoded, size = ids.shape, seen.shape[2], store.tokens.shape[1]
    _check(store, at=(at, (rows, nodes), torch.int64), seen=(seen, (rows, nodes, encoded), torch.bool),
           ids=(ids, (rows, nodes, count), torch.int64), logp=(logp, (rows, nodes, count), torch.float32))  # fmt: skip
    candidates = nodes * count
    fits = 1 <= nodes <= _MAX_COUNT and 1 <= count <= _MAX_COUNT and 0 <= width <= min(candidates, _MAX_COUNT)
    if not fits or stored + candidates > size or size > _MAX_STORED:
        raise ValueError(
            f"got {width} of {nodes} times {count} candidates after {stored} of {size}; expected 1..{_MAX_COUNT} of each, and room for them "
            f"among at most {_MAX_STORED}; draft a narrower or shallower tree"
        )
    chosen, above, tokens = (torch.empty(rows, width, dtype=torch.int64, device=ids.device) for _ in range(3))
    visible = torch.empty(rows, width, encoded + width, dtype=torch.bool, device=ids.device)
    if rows:
        launch: Any = _frontier[(rows,)]
        with torch.cuda.device_of(ids):
            launch(
                *store, at, seen, ids, logp, chosen, above, tokens, visible, store.tokens.stride(0), stored, encoded, nodes, width,
                count, _power(candidates), _power(width), _power(encoded + width), num_warps=4,
            )  # fmt: skip
    return chosen, visible, tokens, above


def rerank(store: Store, nodes: int, levels: int) -> tuple[DraftTree, Tensor]:
    """The trees of the `nodes` best candidates, the root with them, and of each node [B,N] its slot: `DynamicExpansion.finish`.

    levels: no candidate is deeper. Closed under ancestors, as no score is above its parent's, which comes before it.

    Raises:
        ValueError: shapes, dtypes, layouts or sizes that do not fit.
    """
    rows, stored = store.tokens.shape
    _check(store)
    nodes = min(nodes, stored)
    if stored > _MAX_STORED or not 1 <= nodes <= _MAX_NODES or levels < 0:
        raise ValueError(
            f"got {nodes} of {stored} candidates, {levels} levels; expected 1..{_MAX_NODES} of {_MAX_STORED} at most; draft a smaller tree"
        )
    words = (nodes + 63) // 64
    tokens, parents, depth, slots = (store.tokens.new_empty(rows, nodes) for _ in range(4))
    ancestors, size = store.tokens.new_empty(rows, nodes, words), store.tokens.new_empty(rows)
    if rows:
        launch: Any = _rerank[(rows,)]
        with torch.cuda.device_of(tokens):
            launch(
                *store, tokens, parents, depth, slots, ancestors, size, store.tokens.stride(0), stored, nodes, levels,
                words, _power(words), _power(stored), num_warps=max(4, _power(stored) // 256),
            )  # fmt: skip
    return DraftTree(tokens, parents, size, depth, ancestors), slots


class FusedExpansion(DynamicExpansion):
    """DynamicExpansion by these kernels: a launch for each level, and one for the tree."""

    def __init__(self, beam: DynamicTree, round: RoundContext) -> None:
        super().__init__(beam, round)
        self.store, self.stored = Store.rooted(round.last_tokens, 1 + beam.width + (beam.depth - 1) * beam.width**2), 1

    def extend(self, ids: Tensor, scores: Tensor | None = None, q_logits: Tensor | None = None) -> CurrentLevel | None:
        """As DynamicExpansion's."""
        assert scores is not None
        self.level += 1
        width = 0 if self.level == self.beam.depth else min(self.beam.width, ids.shape[1] * ids.shape[2])
        self.at, self.seen, tokens, above = frontier(
            self.store, self.at, self.seen, ids.contiguous(), scores.contiguous(), self.stored, width
        )
        self.stored += ids.shape[1] * ids.shape[2]
        if not width:
            return None
        self.key_depth = torch.cat((self.key_depth, self.key_depth.new_full((width,), self.level)))
        return CurrentLevel(tokens, above, self.level, self.seen, self.key_depth, self.beam.width == 1)

    def finish(self) -> tuple[DraftTree, Tensor]:
        """As DynamicExpansion's."""
        return rerank(self.store.upto(self.stored), self.beam.nodes, self.level)


def _check(store: Store, **given: tuple[Tensor, tuple[int, ...], torch.dtype]) -> None:
    tokens = store.tokens
    kinds = (torch.int64, torch.int64, torch.float32, torch.bool, torch.int64)
    for name, tensor, kind in zip(Store._fields, store, kinds, strict=True):
        if (
            tensor.shape != tokens.shape
            or tensor.dtype != kind
            or tensor.stride() != (tokens.stride(0), 1)
            or tensor.device != tokens.device
        ):
            raise ValueError(
                f"got {name} {list(tensor.shape)} in {tensor.dtype} of strides {list(tensor.stride())} on {tensor.device}; expected "
                f"{list(tokens.shape)} in {kind} of strides {[tokens.stride(0), 1]} on {tokens.device}; take Store.rooted"
            )
    for name, (tensor, shape, kind) in given.items():
        if tensor.shape != shape or tensor.dtype != kind or not tensor.is_contiguous() or tensor.device != tokens.device:
            raise ValueError(
                f"got {name} {list(tensor.shape)} in {tensor.dtype} on {tensor.device}; expected {list(shape)} in {kind} on "
                f"{tokens.device}, without gaps; pass what the last frontier and the drafter gave"
            )


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@triton.jit
def _ordered(value):
    """float32 -> int32 of the same order, both zeros at 0; never the least int32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _key(value, index, held):
    """float32 value, index ≥ 0 below 2^31 -> int64, the greater the better: greater value, then lower index. The least int64 if not held."""
    key = (_ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return tl.where(held, key, -0x8000000000000000)


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
    """The `count` greatest of int64 keys, of whatever shape, in [WIDTH], descending. One that is held occurs once."""
    lane = tl.arange(0, WIDTH)
    found = tl.full([WIDTH], -0x8000000000000000, tl.int64)
    for rank in range(count):
        top = tl.max(key)
        found = tl.where(lane == rank, top, found)
        key = tl.where(key == top, -0x8000000000000000, key)
    return found


@triton.jit
def _maxima(logits, maxima, sums, batch_stride, node_stride, vocab, groups, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Grid (tiles of D, F, B) -> of each group the maximum and the sum of exponentials less it, [B,F,G] float32 both."""
    node, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    entry = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits += batch * batch_stride + node * node_stride
    x = tl.load(logits + entry, mask=entry < vocab, other=-float("inf")).to(tl.float32)
    high = tl.max(x, 1)
    shift = tl.where(high == -float("inf"), 0.0, high)  # −inf less −inf is NaN
    total = tl.sum(tl.exp2((x - shift[:, None]) * 1.4426950408889634), 1)
    place = (batch * tl.num_programs(1) + node) * groups + group
    tl.store(maxima + place, high, mask=group < groups)
    tl.store(sums + place, total, mask=group < groups)


@triton.jit
def _best(
    logits, maxima, sums, ids, scores, batch_stride, node_stride, vocab, groups,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Grid (F, B). The `COUNT` best entries lie in the `COUNT` groups of greatest maximum, of equals the first."""
    node, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = batch * tl.num_programs(0) + node
    group, rank = tl.arange(0, BLOCK_G), tl.arange(0, WIDTH)
    high = tl.load(maxima + line * groups + group, mask=group < groups, other=-float("inf"))
    total = tl.load(sums + line * groups + group, mask=group < groups, other=0.0)
    top = tl.max(high)
    shift = tl.where(top == -float("inf"), 0.0, top)
    norm = top + tl.log(tl.sum(total * tl.exp2((high - shift) * 1.4426950408889634)))
    # Where there are fewer groups the rest of `inside` is past the vocabulary.
    inside = _index(_greatest(_key(high, group, group < groups), COUNT, WIDTH))
    entry = inside[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    held = entry < vocab
    logits += batch * batch_stride + node * node_stride
    x = tl.load(logits + entry, mask=held, other=-float("inf")).to(tl.float32)
    found = _greatest(_key(x, entry, held), COUNT, WIDTH)
    tl.store(ids + line * COUNT + rank, _index(found), mask=rank < COUNT)
    tl.store(scores + line * COUNT + rank, _value(found) - norm, mask=rank < COUNT)


@triton.jit(do_not_specialize=["stored", "encoded", "nodes", "width"])
def _frontier(
    tokens, parents, scores, chain, slots, at, seen, ids, logp, next_at, above, next_tokens, visible, stride, stored, encoded, nodes, width,
    COUNT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_C)
    node = candidate // COUNT
    held = node < nodes
    from_row, to_row = row * nodes * COUNT + candidate, row * stride + stored + candidate
    parent = tl.load(at + row * nodes + node, mask=held, other=0)
    gain = tl.load(logp + from_row, mask=held, other=0.0)
    # Rounding may give a log-probability above 0, and a child above its parent.
    score = tl.load(scores + row * stride + parent, mask=held, other=0.0) + tl.where(gain > 0.0, 0.0, gain)
    left = tl.load(chain + row * stride + parent, mask=held, other=0) & (candidate % COUNT == 0)
    chosen = _index(_greatest(_key(score, candidate, held), width, BLOCK_W))  # [W]
    rank = tl.arange(0, BLOCK_W)
    slot = tl.max(tl.where((chosen[None, :] == candidate[:, None]) & (rank < width)[None, :], encoded + rank[None, :], -1), 1)
    tl.store(tokens + to_row, tl.load(ids + from_row, mask=held, other=0), mask=held)
    tl.store(parents + to_row, parent, mask=held)
    tl.store(scores + to_row, score, mask=held)
    tl.store(chain + to_row, left, mask=held)
    tl.store(slots + to_row, slot.to(tl.int64), mask=held)

    real = rank < width
    inner = chosen // COUNT
    place = row * width + rank
    tl.store(next_at + place, stored + chosen, mask=real)
    tl.store(above + place, inner, mask=real)
    tl.store(next_tokens + place, tl.load(ids + row * nodes * COUNT + chosen, mask=real, other=0), mask=real)
    other = tl.arange(0, BLOCK_E)[None, :]
    sees = tl.load(
        seen + (row * nodes + inner)[:, None] * encoded + other, mask=real[:, None] & (other < encoded), other=0
    ) | (other == encoded + rank[:, None])  # fmt: skip
    tl.store(visible + place[:, None] * (encoded + width) + other, sees, mask=real[:, None] & (other < encoded + width))


@triton.jit(do_not_specialize=["stored", "nodes", "levels"])
def _rerank(
    tokens, parents, scores, chain, slots, to_tokens, to_parents, to_depth, to_slots, to_words, to_size, stride, stored, nodes, levels,
    WORDS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_M)
    held = lane < stored
    root, child = lane == 0, held & (lane > 0)
    # The score of the last to be kept, as an integer, from its greatest bit on: the greatest that as many reach as are wanted.
    score = tl.where(child, _ordered(tl.load(scores + row * stride + lane, mask=held, other=0.0)), -0x80000000)
    least = tl.full([], -0x80000000, tl.int32)
    for step in range(32):
        trial = least ^ (tl.full([], 1, tl.int32) << (31 - step))
        least = tl.where(tl.sum((score >= trial).to(tl.int32)) >= nodes - 1, trial, least)
    above, equal = score > least, child & (score == least)
    kept = root | above | (equal & (tl.cumsum(equal.to(tl.int32), 0) + tl.sum(above.to(tl.int32)) < nodes))
    # The leftmost chain first, then as stored.
    first = kept & (root | tl.load(chain + row * stride + lane, mask=held, other=0))
    rest = (kept & ~first).to(tl.int32)
    place = tl.where(first, tl.cumsum(first.to(tl.int32), 0), tl.sum(first.to(tl.int32)) + tl.cumsum(rest, 0)) - 1
    place = tl.where(kept, place, 0)

    pointer = tl.maximum(tl.load(parents + row * stride + lane, mask=child, other=0), 0).to(tl.int32)  # the root points to itself
    word = tl.arange(0, BLOCK_W)[None, :]
    one = tl.full([BLOCK_M, BLOCK_W], 1, tl.int64)
    depth = tl.zeros([BLOCK_M], tl.int32)
    line = tl.where(place[:, None] // 64 == word, one << (place[:, None] % 64).to(tl.int64), 0)
    node = lane
    for _ in range(levels):
        depth += (node > 0).to(tl.int32)
        node = tl.gather(pointer, node, 0)
        up = tl.gather(place, node, 0)[:, None]
        line |= tl.where(up // 64 == word, one << (up % 64).to(tl.int64), 0)

    to = row * nodes + place
    tl.store(to_tokens + to, tl.load(tokens + row * stride + lane, mask=held, other=0), mask=kept)
    tl.store(to_parents + to, tl.where(root, -1, tl.gather(place, pointer, 0)).to(tl.int64), mask=kept)
    tl.store(to_depth + to, depth.to(tl.int64), mask=kept)
    tl.store(to_slots + to, tl.load(slots + row * stride + lane, mask=held, other=0), mask=kept)
    tl.store(to_words + to[:, None] * WORDS + word, line, mask=kept[:, None] & (word < WORDS))
    tl.store(to_size + row, nodes.to(tl.int64))
