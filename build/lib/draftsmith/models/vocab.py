"""The draft vocabulary: the D most frequent loss-bearing tokens of the target's V, and what it costs in acceptance.

Letters: D draft vocabulary · V target vocabulary · H hidden size · S positions · K draft depth.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

CHUNK = 1 << 18  # tokens looked at at once: memory-mapped ids are never copied whole, and what is made of them stays in the cache


def count(ids: Tensor, mask: Tensor, vocab_size: int) -> Tensor:
    """How often each token bears loss: counts [V] int64 of ids [...] (any integer type) where mask [...] is not 0.

    Raises:
        ValueError: shapes that differ, or an id outside 0..V-1, whether or not it bears loss.
    """
    if ids.shape != mask.shape or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"got ids {list(ids.shape)} of {ids.dtype} and mask {list(mask.shape)}; expected integers and equal shapes")
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=ids.device)
    for part, bears_loss in zip(ids.reshape(-1).split(CHUNK), mask.reshape(-1).split(CHUNK), strict=True):
        part = part.long()
        _check_ids(part, vocab_size)
        counts += torch.bincount(part[bears_loss != 0], minlength=vocab_size)
    return counts


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Draft id i stands for target id i + d2t[i]. Made by `choose`, `full` or `from_tensors`, which check what they are given.

    d2t [D] int64, offsets; t2d [V] bool, True where a target token is in the draft vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    @property
    def size(self) -> int:
        """D."""
        return len(self.d2t)

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.t2d)

    @cached_property
    def targets(self) -> Tensor:
        """Target ids [D] int64, in the order of the draft ids."""
        return torch.arange(self.size, device=self.d2t.device) + self.d2t

    @property
    def ascending(self) -> bool:
        """Whether draft ids follow the order of target ids. Engines that slice logits with t2d need it; `choose` sees to it."""
        return bool((self.targets.diff() > 0).all())

    @cached_property
    def _drafts(self) -> Tensor:
        """Draft ids [V] int64, -1 where OOV."""
        drafts = torch.full((self.vocab_size,), -1, device=self.d2t.device)
        drafts[self.targets] = torch.arange(self.size, device=self.d2t.device)
        return drafts

    def to(self, device: torch.device | str) -> "DraftVocabulary":
        return DraftVocabulary(self.d2t.to(device), self.t2d.to(device))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids [...] -> target ids [...] int64; a negative id (none, padding) becomes -1."""
        return torch.where(draft_ids < 0, -1, self.targets[draft_ids.clamp(min=0)])

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Target ids [...] -> draft ids [...] int64, -1 where OOV; ids outside 0..V-1 (padding, a padded head's rows) are OOV too."""
        known = (target_ids >= 0) & (target_ids < self.vocab_size)
        return torch.where(known, self._drafts[target_ids.clamp(0, self.vocab_size - 1)], -1)

    def restrict(self, logits: Tensor) -> Tensor:
        """The target's logits [..., V] -> [..., D], in the order of the draft ids; not renormalised."""
        _check_last(logits, self.vocab_size, "V")
        return logits.index_select(-1, self.targets)

    def spread(self, logits: Tensor, fill: float = -math.inf) -> Tensor:
        """The drafter's logits [..., D] -> [..., V], with `fill` at the OOV tokens."""
        _check_last(logits, self.size, "D")
        return logits.new_full((*logits.shape[:-1], self.vocab_size), fill).index_copy(-1, self.targets, logits)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: d2t and t2d; nothing where D = V, since engines refuse a map there."""
        return {} if self.size == self.vocab_size else {"d2t": self.d2t, "t2d": self.t2d}

    def digest(self) -> str:
        """SHA-256 of V and of the target ids in the order of the draft ids."""
        ids = ",".join(map(str, self.targets.tolist()))
        return hashlib.sha256(f"{self.vocab_size}:{ids}".encode()).hexdigest()

    def re_index(self, rows: Tensor, old: "DraftVocabulary") -> tuple[Tensor, Tensor]:
        """An output head's rows [D_old, H] (or bias [D_old]) under the vocabulary `old` -> rows [D, H] and found [D] bool under this one.

        Rows that are not found are 0: fill them from the target's head, at `targets[~found]`.

        Raises:
            ValueError: rows that do not fit `old`, or another target vocabulary.
        """
        if len(rows) != old.size or old.vocab_size != self.vocab_size:
            raise ValueError(
                f"got {len(rows)} rows for a draft vocabulary of {old.size} of {old.vocab_size} tokens, to re-index to {self.size} of "
                f"{self.vocab_size}; expected as many rows as its tokens and the same target vocabulary"
            )
        at = old.to_draft(self.targets).to(rows.device)
        found = at >= 0
        moved = rows[at.clamp(min=0)]
        moved[~found] = 0
        return moved, found


def choose(counts: Tensor, size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """The `size` most frequent tokens by counts [V], ties to the lower id, in ascending order; those of `always` (stop ids) in any case.

    Raises:
        ValueError: a size below 1, above V or too small for `always`, or an id of `always` outside 0..V-1.
    """
    vocab_size, forced = len(counts), sorted(set(always))
    if not max(1, len(forced)) <= size <= vocab_size:
        raise ValueError(
            f"got a draft vocabulary of {size}; expected {max(1, len(forced))}..{vocab_size} (at least the {len(forced)} tokens that are "
            "always in, at most the target's vocabulary)"
        )
    first = torch.tensor(forced, dtype=torch.int64, device=counts.device)
    _check_ids(first, vocab_size)
    order = counts.argsort(descending=True, stable=True)
    kept = torch.cat([first, order[~torch.isin(order, first)]])[:size]
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=counts.device).index_fill_(0, kept, True)
    targets = t2d.nonzero().squeeze(1)
    return DraftVocabulary(targets - torch.arange(size, device=counts.device), t2d)


def full(vocab_size: int) -> DraftVocabulary:
    """Every token of the target: the identity."""
    return DraftVocabulary(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool))


def from_tensors(d2t: Tensor | None, t2d: Tensor | None, vocab_size: int, size: int | None = None) -> DraftVocabulary:
    """The vocabulary of a checkpoint: d2t [D] integer, offsets; t2d [V] bool, or None; `size`: how many rows the draft head has.

    Neither map means D = V. Target ids in place of offsets are recognised by t2d, by ids past V, or, where D² > 16·V, because no
    two neighbouring tokens would be in. Offsets that are all wrong by one are recognised by t2d or by ids outside 0..V-1 only.

    Raises:
        ValueError: naming what is wrong with the map.
    """
    if d2t is None:
        if t2d is not None or size not in (None, vocab_size):
            raise ValueError(f"the checkpoint has no d2t, yet a draft head of {size} rows or a t2d; without d2t expected {vocab_size} rows")
        return full(vocab_size)
    if d2t.ndim != 1 or d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool or not 1 <= len(d2t) <= vocab_size:
        raise ValueError(f"got d2t {list(d2t.shape)} of {d2t.dtype}; expected [D] int64 with D in 1..{vocab_size}")
    if size is not None and len(d2t) != size:
        raise ValueError(f"got d2t of {len(d2t)} tokens for a draft head of {size} rows; they come from different runs")
    if t2d is not None and (t2d.shape != (vocab_size,) or t2d.dtype != torch.bool):
        raise ValueError(f"got t2d {list(t2d.shape)} of {t2d.dtype}; expected [{vocab_size}] bool, the target's vocabulary")
    d2t = d2t.long()
    targets = torch.arange(len(d2t), device=d2t.device) + d2t
    marked, as_ids = _marks(targets, vocab_size), _marks(d2t, vocab_size)
    if t2d is None:
        swapped = marked is None or bool((d2t.diff() > 0).all() and len(d2t) ** 2 > 16 * vocab_size)
    else:
        t2d = t2d.to(d2t.device)
        swapped = as_ids is not None and torch.equal(as_ids, t2d) and not (marked is not None and torch.equal(marked, t2d))
    if as_ids is not None and swapped:
        raise ValueError("d2t holds target ids, expected offsets (target id = i + d2t[i]); subtract 0, 1, 2, ... from it")
    if marked is None:
        raise ValueError(
            f"d2t gives target ids {int(targets.min())}..{int(targets.max())}, {len(targets.unique())} different ones of {len(targets)}; "
            f"expected different ids in 0..{vocab_size - 1}: the map is of another model, or broken"
        )
    if t2d is not None and not torch.equal(marked, t2d):
        raise ValueError(f"d2t and t2d disagree on {int((marked != t2d).sum())} tokens; one is of another run: take both from one")
    return DraftVocabulary(d2t, marked)


@dataclass(frozen=True)
class Coverage:
    """Share of the loss-bearing tokens inside a draft vocabulary of `size`, over all of them and by domain (NaN where a domain has none)."""

    size: int
    overall: float
    domains: dict[str, float] = field(default_factory=dict)

    def predicted_tau(self, depth: int) -> float:
        """Σ c^k for k = 0..K: τ of a drafter that is never wrong inside the vocabulary, if OOV tokens fell independently of each other.

        They cluster, and then the true τ is lower (evenly spread, it is higher): `ceiling` counts it. Always τ <= min(K+1, 1/(1-c)),
        since each OOV token ends a round.
        """
        return sum(self.overall**k for k in range(depth + 1))


def coverage(counts: Tensor | Mapping[str, Tensor], vocabulary: DraftVocabulary) -> Coverage:
    """Share of the tokens counted in counts [V], or in {domain: counts [V]}, that the draft vocabulary holds.

    Over all positions, no drafter's acceptance at the first depth is above it: an OOV token is never accepted.

    Raises:
        ValueError: counts of another vocabulary, or no token counted.
    """
    by_domain = dict(counts) if isinstance(counts, Mapping) else {"": counts}
    for one in by_domain.values():
        _check_last(one, vocabulary.vocab_size, "V")
    inside = {name: int(one[vocabulary.t2d].sum()) for name, one in by_domain.items()}
    total = {name: int(one.sum()) for name, one in by_domain.items()}
    if sum(total.values()) == 0:
        raise ValueError("no loss-bearing token was counted; check the loss mask")
    shares = {name: inside[name] / total[name] if total[name] else math.nan for name in by_domain if isinstance(counts, Mapping)}
    return Coverage(vocabulary.size, sum(inside.values()) / sum(total.values()), shares)


def sweep(counts: Mapping[str, Tensor], sizes: Sequence[int], always: Iterable[int] = ()) -> list[Coverage]:
    """The coverage at each size D, of the tokens most frequent in all domains together: a row of a table each."""
    pooled, always = torch.stack(list(counts.values())).sum(0), list(always)
    return [coverage(counts, choose(pooled, size, always)) for size in sizes]


@dataclass(frozen=True)
class Ceiling:
    """tau: tokens / rounds along the texts, which no drafter of that depth and vocabulary exceeds on them.

    positions: the mean tokens of one round over all positions to start it at. Not τ: rounds start where others ended, so it is
    larger where OOV tokens cluster, and smaller on short texts.
    """

    tau: float
    positions: float


def ceiling(ids: Tensor, mask: Tensor, vocabulary: DraftVocabulary, depth: int, documents: Tensor | None = None) -> Ceiling:
    """τ of a drafter that always guesses right, `depth` deep, but cannot say OOV tokens; no independence is assumed.

    ids, mask [..., S]: a round emits the following in-vocabulary tokens, up to `depth`, and the target's own next one. It ends
    with a span of loss-bearing tokens, the row, or the document (`documents` [..., S]: a number each; without it, neighbouring
    documents read as one): tokens past the end are not counted. Memory follows S, not the number of rows.

    Raises:
        ValueError: shapes that differ, a negative depth, or no loss-bearing token.
    """
    if ids.shape != mask.shape or (documents is not None and documents.shape != ids.shape) or ids.ndim == 0 or depth < 0:
        shapes = [list(x.shape) for x in (ids, mask, documents) if x is not None]
        raise ValueError(f"got ids, mask (and documents) {shapes} and depth {depth}; expected equal shapes [..., S] and depth >= 0")
    length = ids.shape[-1]
    ids, mask = ids.reshape(-1, length), mask.reshape(-1, length)
    documents = torch.zeros_like(ids) if documents is None else documents.reshape(-1, length)
    tokens = rounds = emitted = 0
    for row in range(0, len(ids), step := max(1, CHUNK // max(1, length))):
        part = slice(row, row + step)
        found = _rounds(ids[part].long(), mask[part] != 0, documents[part], vocabulary, depth)
        tokens, rounds, emitted = tokens + found[0], rounds + found[1], emitted + found[2]
    if tokens == 0:
        raise ValueError("no loss-bearing token was found; check the loss mask")
    return Ceiling(tokens / rounds, emitted / tokens)


def _rounds(ids: Tensor, mask: Tensor, documents: Tensor, vocabulary: DraftVocabulary, depth: int) -> tuple[int, int, int]:
    """Of [rows, S]: loss-bearing tokens, rounds to say them all, and tokens of the rounds that start at each of them, summed."""
    start = mask.clone()  # the first token of each span
    start[:, 1:] &= ~mask[:, :-1] | (documents[:, 1:] != documents[:, :-1])
    start, mask, inside = start.flatten(), mask.flatten(), (mask & (vocabulary.to_draft(ids) >= 0)).flatten()
    here = torch.arange(len(mask), device=mask.device)
    end = _next(start | ~mask)
    run = torch.where(inside, torch.minimum(_next(start | ~inside) - here, torch.tensor(depth)), 0)
    emits = torch.where(mask, torch.minimum(run + 1, end - here), 0)
    # Pointer doubling: after n turns `left` counts the rounds of the next 2^n jumps; the last place is the end of every span.
    done = len(mask)
    jump = torch.cat([torch.where(mask & (here + emits < end), here + emits, done), torch.tensor([done], device=mask.device)])
    left = torch.cat([mask.long(), torch.zeros(1, dtype=torch.int64, device=mask.device)])
    while bool((jump < done).any()):
        left, jump = left + left[jump], jump[jump]
    return int(mask.sum()), int(left[:-1][start].sum()), int(emits.sum())


def _next(stops: Tensor) -> Tensor:
    """For each place of stops [n] bool, the first stop after it, or n."""
    places = torch.where(stops, torch.arange(len(stops), device=stops.device), len(stops))
    after = torch.cat([places[1:], places.new_tensor([len(stops)])])
    return after.flip(0).cummin(0).values.flip(0)


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(
            f"got token id {int(wrong[0])}, expected 0..{vocab_size - 1} (V = {vocab_size}); "
            "the data were tokenised by another tokenizer: tokenise them with the target's"
        )


def _check_last(x: Tensor, expected: int, letter: str) -> None:
    if x.shape[-1] != expected:
        raise ValueError(f"got {list(x.shape)}, expected {letter} = {expected} at the end; is the target another one, or its head padded?")


def _marks(ids: Tensor, vocab_size: int) -> Tensor | None:
    """marks [V] bool of ids [D], or None where they are no D different ids in 0..V-1."""
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        return None
    marks = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return marks if int(marks.sum()) == len(ids) else None
