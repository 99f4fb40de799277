"""The draft vocabulary: the D most frequent supervised tokens of the target's V, and what it costs in acceptance.

Letters: D draft vocabulary · V target vocabulary · H hidden size · S positions · K draft depth.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

CHUNK = 1 << 18  # tokens processed at a time: memory-mapped ids are never copied in full, and intermediate results stay in the CPU's cache


def count(ids: Tensor, times: Tensor, vocab_size: int) -> Tensor:
    """How often each token is supervised: counts [V] int64 of ids [...] (any integer type). Each id counts as often as times [...] says, which may be
    a mask.

    Raises:
        ValueError: shapes that differ, or an id outside 0..V-1, supervised or not.
    """
    if ids.shape != times.shape or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"got ids {list(ids.shape)} of {ids.dtype} and times {list(times.shape)}; expected integers and equal shapes")
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=ids.device)
    for part, repeats in zip(ids.reshape(-1).split(CHUNK), times.reshape(-1).split(CHUNK), strict=True):
        part = part.long()
        _check_ids(part, vocab_size)
        counts += torch.bincount(part, repeats.double(), vocab_size).long()
    return counts


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Draft id i stands for target id i + d2t[i]. `choose`, `full` and `from_tensors` make one, and check their arguments.

    Attributes:
        d2t: offsets [D] int64.
        t2d: [V] bool, True where a target token is in the draft vocabulary.
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
        """Whether draft ids follow the order of target ids. Engines that slice logits with t2d need it; `choose` gives such ids."""
        return bool((self.targets.diff() > 0).all())

    @cached_property
    def _drafts(self) -> Tensor:
        """Draft ids [V] int64, -1 where OOV."""
        drafts = torch.full((self.vocab_size,), -1, device=self.d2t.device)
        drafts[self.targets] = torch.arange(self.size, device=self.d2t.device)
        return drafts

    def to(self, device: torch.device | str) -> "DraftVocabulary":
        return DraftVocabulary(self.d2t.to(device), self.t2d.to(device))

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Target ids [...] -> draft ids [...] int64, -1 where OOV; ids outside 0..V-1 (padding, a padded head's rows) are OOV too."""
        known = (target_ids >= 0) & (target_ids < self.vocab_size)
        return torch.where(known, self._drafts[target_ids.clamp(0, self.vocab_size - 1)], -1)

    def spread(self, logits: Tensor, fill: float = -math.inf) -> Tensor:
        """The drafter's logits [..., D] -> [..., V], with `fill` at the OOV tokens."""
        _check_last(logits, self.size, "D")
        return logits.new_full((*logits.shape[:-1], self.vocab_size), fill).index_copy(-1, self.targets, logits)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint: d2t and t2d; none where D = V, since engines refuse a map there."""
        return {} if self.size == self.vocab_size else {"d2t": self.d2t, "t2d": self.t2d}

    def digest(self) -> str:
        """SHA-256 of V and of the target ids in the order of the draft ids."""
        ids = ",".join(map(str, self.targets.tolist()))
        return hashlib.sha256(f"{self.vocab_size}:{ids}".encode()).hexdigest()

    def re_index(self, rows: Tensor, old: "DraftVocabulary") -> tuple[Tensor, Tensor]:
        """An output head's rows of the vocabulary `old` -> its rows of this one.

        Args:
            rows: a weight [D_old,H], or a bias [D_old].
            old: the vocabulary of `rows`.

        Returns:
            rows [D,H], zero for tokens that `old` lacks, and known [D] bool, False for those. Fill them from the target's head, at
            `targets[~known]`.

        Raises:
            ValueError: rows that do not fit `old`, or another target vocabulary.
        """
        if len(rows) != old.size or old.vocab_size != self.vocab_size:
            raise ValueError(
                f"got {len(rows)} rows for a draft vocabulary of {old.size} of {old.vocab_size} tokens, to re-index to {self.size} of "
                f"{self.vocab_size}; expected as many rows as its tokens and the same target vocabulary"
            )
        old_ids = old.to_draft(self.targets).to(rows.device)
        known = old_ids >= 0
        moved = rows[old_ids.clamp(min=0)]
        moved[~known] = 0
        return moved, known


def choose(counts: Tensor, size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """The `size` most frequent tokens by counts [V], in ascending order. Ties go to the lower id. Tokens of `always` (stop ids) are in.

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
    chosen = torch.cat([first, order[~torch.isin(order, first)]])[:size]
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=counts.device).index_fill_(0, chosen, True)
    targets = t2d.nonzero().squeeze(1)
    return DraftVocabulary(targets - torch.arange(size, device=counts.device), t2d)


def first(size: int, vocab_size: int) -> DraftVocabulary:
    """The target's first `size` tokens, for plans, where it does not matter which they are."""
    return DraftVocabulary(torch.zeros(size, dtype=torch.int64), torch.arange(vocab_size) < size)


def full(vocab_size: int) -> DraftVocabulary:
    """Every token of the target: the identity."""
    return DraftVocabulary(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool))


def from_tensors(d2t: Tensor | None, t2d: Tensor | None, vocab_size: int, size: int | None = None) -> DraftVocabulary:
    """The vocabulary of a checkpoint; without either map D = V.

    A d2t of target ids in place of offsets is recognised by t2d, by ids past V, or, where D² > 16·V, because no two neighbouring tokens
    would be in. Offsets that are all off by one are recognised only by t2d or by ids outside 0..V-1.

    Args:
        d2t: offsets [D] of an integer type, or None.
        t2d: [V] bool, or None.
        vocab_size: V.
        size: how many rows the draft head has.

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
    if t2d is None and len(d2t) < vocab_size and not d2t.any():
        raise ValueError(
            "d2t is zero everywhere, and there is no t2d: the map was never filled; save the drafter again with its vocabulary"
        )
    if t2d is not None and not torch.equal(marked, t2d):
        raise ValueError(f"d2t and t2d disagree on {int((marked != t2d).sum())} tokens; one is of another run: take both from one")
    return DraftVocabulary(d2t, marked)


@dataclass(frozen=True)
class Coverage:
    """The share of supervised tokens that are in a draft vocabulary of `size` tokens, overall and by domain (NaN for one without any)."""

    size: int
    overall: float
    domains: dict[str, float] = field(default_factory=dict)


def coverage(counts: Tensor | Mapping[str, Tensor], vocabulary: DraftVocabulary) -> Coverage:
    """The share of the tokens of counts [V], or of {domain: counts [V]}, that are in the draft vocabulary.

    No drafter's acceptance at the first depth, over all positions, is above it: an OOV token is never accepted.

    Raises:
        ValueError: counts of another vocabulary, or no token counted.
    """
    by_domain = dict(counts) if isinstance(counts, Mapping) else {"": counts}
    for tokens in by_domain.values():
        _check_last(tokens, vocabulary.vocab_size, "V")
    inside = {name: int(tokens[vocabulary.t2d].sum()) for name, tokens in by_domain.items()}
    total = {name: int(tokens.sum()) for name, tokens in by_domain.items()}
    if sum(total.values()) == 0:
        raise ValueError("no supervised token was counted; check the loss mask")
    shares = {name: inside[name] / total[name] if total[name] else math.nan for name in by_domain if isinstance(counts, Mapping)}
    return Coverage(vocabulary.size, sum(inside.values()) / sum(total.values()), shares)


def sweep(counts: Mapping[str, Tensor], sizes: Sequence[int]) -> list[Coverage]:
    """The coverage at each size D, of the D tokens that are most frequent over all domains."""
    pooled = torch.stack(list(counts.values())).sum(0)
    return [coverage(counts, choose(pooled, size)) for size in sizes]


@dataclass(frozen=True)
class Ceiling:
    """The best that a drafter of some depth and vocabulary can reach on given texts.

    Attributes:
        tau: tokens / rounds along the texts.
        positions: mean tokens of one round, over all positions where it could start. It is not τ, since rounds start where others end: it
            is larger where OOV tokens cluster, and smaller on short texts.
    """

    tau: float
    positions: float


def ceiling(ids: Tensor, mask: Tensor, vocabulary: DraftVocabulary, depth: int, documents: Tensor | None = None) -> Ceiling:
    """τ of a drafter that always guesses right, `depth` deep, but has no OOV tokens. No independence is assumed.

    A round emits the following tokens as long as they are in the vocabulary, up to `depth`, and the target's next one. It ends with a
    span of supervised tokens, with the row or with the document: tokens past the end are not counted. Memory grows with S, not with rounds.

    Args:
        ids, mask: [..., S].
        depth: K.
        documents: [..., S], a number for each document; None reads neighbouring documents as one.

    Raises:
        ValueError: shapes that differ, a negative depth, or no supervised token.
    """
    if ids.shape != mask.shape or (documents is not None and documents.shape != ids.shape) or ids.ndim == 0 or depth < 0:
        shapes = [list(x.shape) for x in (ids, mask, documents) if x is not None]
        raise ValueError(f"got ids, mask (and documents) {shapes} and depth {depth}; expected equal shapes [..., S] and depth >= 0")
    length = ids.shape[-1]
    ids, mask = ids.reshape(-1, length), mask.reshape(-1, length)
    documents = torch.zeros_like(ids) if documents is None else documents.reshape(-1, length)
    tokens = rounds = emitted = 0
    step = max(1, CHUNK // max(1, length))
    for row in range(0, len(ids), step):
        part = slice(row, row + step)
        sums = _rounds(ids[part].long(), mask[part] != 0, documents[part], vocabulary, depth)
        tokens, rounds, emitted = tokens + sums[0], rounds + sums[1], emitted + sums[2]
    if tokens == 0:
        raise ValueError("there is no supervised token; check the loss mask")
    return Ceiling(tokens / rounds, emitted / tokens)


def _rounds(ids: Tensor, mask: Tensor, documents: Tensor, vocabulary: DraftVocabulary, depth: int) -> tuple[int, int, int]:
    """Of [rows,S]: supervised tokens, rounds that emit them all, and tokens of the rounds that start at each of them, summed."""
    start = mask.clone()  # the first token of each span
    start[:, 1:] &= ~mask[:, :-1] | (documents[:, 1:] != documents[:, :-1])
    start, mask, inside = start.flatten(), mask.flatten(), (mask & (vocabulary.to_draft(ids) >= 0)).flatten()
    position = torch.arange(len(mask), device=mask.device)
    end = _next(start | ~mask)
    run = torch.where(inside, torch.minimum(_next(start | ~inside) - position, torch.tensor(depth)), 0)
    emits = torch.where(mask, torch.minimum(run + 1, end - position), 0)
    # Pointer doubling: after n iterations `left` counts the rounds of the next 2^n jumps. The last entry is the end of every span.
    done = len(mask)
    jump = torch.cat([torch.where(mask & (position + emits < end), position + emits, done), torch.tensor([done], device=mask.device)])
    left = torch.cat([mask.long(), torch.zeros(1, dtype=torch.int64, device=mask.device)])
    while bool((jump < done).any()):
        left, jump = left + left[jump], jump[jump]
    return int(mask.sum()), int(left[:-1][start].sum()), int(emits.sum())


def _next(stops: Tensor) -> Tensor:
    """For each entry of stops [n] bool, the index of the first stop after it, or n."""
    indices = torch.where(stops, torch.arange(len(stops), device=stops.device), len(stops))
    after = torch.cat([indices[1:], indices.new_tensor([len(stops)])])
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
    """marks [V] bool, True at ids [D]; None unless ids are D different ones in 0..V-1."""
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        return None
    marks = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return marks if int(marks.sum()) == len(ids) else None
