"""How deep to draft, if at all, from what was accepted lately and what rounds really cost.

Whatever it decides, plain decoding's tokens come out, where the rule draws with the noise of positions; under rejection other tokens of the
same law do, and which ones then depends on the clock.

Letters: B live rows · K draft depth.
"""

from collections import deque
from collections.abc import Sequence

from draftsmith.inference.verify import HostResult

__all__ = ["AdaptiveDepth"]

START, LONGEST = 8, 128  # rounds of rest before a probe: doubled by each one that fails
REFRESH = 128  # rounds after which the cost of a plain round is measured anew: contexts grow
SURE = 2  # rounds that it takes to believe a price: one may have been disturbed
AGE = 192  # rounds after which the cost of a depth is forgotten, so that it is tried again
FIRST = 0.6  # P(depth 1 is accepted) before anything was drafted
GUESS = 0.03  # what a level of drafting costs until it was measured, in plain rounds


class _Counts:
    """Acceptances by depth, older ones worth less; where little was seen they lean on a prior."""

    def __init__(self, depth: int, keep: float, weight: float) -> None:
        self.hits, self.tries = [0.0] * depth, [0.0] * depth
        self.keep, self.weight = keep, weight

    def add(self, accepted: int, drafted: int) -> None:
        """A round that drafted `drafted` levels: depths up to `accepted` passed, the next one failed, what is below was not tried."""
        for k in range(min(drafted, accepted + 1)):
            self.tries[k] = self.tries[k] * self.keep + 1
            self.hits[k] = self.hits[k] * self.keep + (k < accepted)

    def chances(self, prior: Sequence[float] | None = None) -> list[float]:
        """P(depth k+1 is accepted | depth k was), for each k. Without a prior each depth leans on the one before: drafts that went well
        so far go on so, more often than not."""
        found, before = [], FIRST
        for k, (hits, tries) in enumerate(zip(self.hits, self.tries, strict=True)):
            before = (hits + self.weight * (prior[k] if prior else before)) / (tries + self.weight)
            found.append(before)
        return found


class AdaptiveDepth:
    """Chooses the depth k in 0 … K that promises the most tokens per second: Σ over rows of 1 + Π α_j, over the median seconds of
    rounds of that depth; 0 is plain decoding. While it rests it probes, ever more rarely; a row's α lean on those of all rows.

    In a batch all rows share one forward, so that a row's drafts cost nothing more once another row drafts: the choice is one
    for the batch.
    """

    def __init__(self) -> None:
        self.max_depth = -1
        self.bind(0)

    def bind(self, max_depth: int) -> None:
        """For a drafter of K = max_depth. What was learnt stays while K does."""
        if max_depth != self.max_depth:
            self.max_depth = max_depth
            self._all = _Counts(max_depth, 0.98, 3.0)
            self._seconds: dict[int, dict[int, deque[tuple[int, float]]]] = {}  # by rows, by depth: (round, seconds)
            self._wait, self._rested, self._since, self._round, self._reach = START, 0, 0, 0, 1
            self._resting = self._probing = False
        self._rows: dict[int, _Counts] = {}

    def drop(self, rows: Sequence[int]) -> None:
        """These rows ended."""
        for row in rows:
            self._rows.pop(row, None)

    def depth(self, rows: Sequence[int]) -> int:
        """How deep to draft for these rows in this round; 0 for not at all."""
        if self._since >= REFRESH or not any(seconds.get(0) for seconds in self._seconds.values()):
            return 0  # there must be a plain round to compare with
        if self._resting and self._rested < self._wait:
            return 0  # nothing was learnt meanwhile
        chosen = self._best(rows)
        self._probing = self._resting and chosen == 0 and self.max_depth > 0
        self._resting = chosen == 0
        return 1 if self._probing else chosen

    def _best(self, rows: Sequence[int]) -> int:
        general = self._all.chances()
        tokens = [0.0] * (self.max_depth + 1)
        for row in rows:
            counts = self._rows.get(row)
            reached = 1.0
            tokens[0] += 1
            for k, chance in enumerate(counts.chances(general) if counts else general):
                reached *= chance
                tokens[k + 1] += reached
        total, best, chosen = 0.0, 0.0, 0
        prices = self._prices(len(rows))
        # No deeper than twice what was ever accepted: the first drafts of a useless drafter should be cheap.
        for k, more in enumerate(tokens[: 2 * self._reach + 1]):
            total += more
            if total / prices[k] > best:
                best, chosen = total / prices[k], k
        return chosen

    def _prices(self, rows: int) -> list[float]:
        """Of depths 0 … K, in plain rounds: measured with as many rows as these or nearly, between them by straight lines, deeper than was
        ever measured by GUESS, which is low, so that it is tried."""
        known = [count for count, seconds in self._seconds.items() if seconds.get(0)]
        seconds = self._seconds[min(known, key=lambda count: abs(count - rows))]
        # The least of the last few: what disturbs a clock only ever adds to it. If it did so each time, it is forgotten in the end.
        recent = {k: [took for at, took in times if k == 0 or self._round - at < AGE] for k, times in seconds.items()}
        plain = min(recent[0])
        points = sorted((k, min(times) / plain) for k, times in recent.items() if len(times) >= SURE or k == 0)
        prices, place = [], 0
        for k in range(self.max_depth + 1):
            while place + 1 < len(points) and points[place + 1][0] <= k:
                place += 1
            left, low = points[place]
            right, high = points[place + 1] if place + 1 < len(points) else (left + 1, low + GUESS)
            prices.append(low + (high - low) * (k - left) / (right - left))
        for k in reversed(range(self.max_depth)):  # deeper is never cheaper: one slow round must not bar a depth
            prices[k] = min(prices[k], prices[k + 1])
        return prices

    def learn(self, rows: Sequence[int], told: Sequence[HostResult], seconds: float) -> None:
        """What the round of these rows gave, and how long it took, drafting included."""
        deepest = max(row.depth for row in told)
        times = self._seconds.setdefault(len(rows), {})
        self._round += 1
        if deepest in times:
            times[deepest].append((self._round, seconds))
        else:
            times[deepest] = deque(maxlen=9)  # the first round of a shape sets things up: its time says nothing
        self._since = 0 if deepest == 0 else self._since + 1
        for row, one in zip(rows, told, strict=True):
            if one.depth:
                self._reach = max(self._reach, one.length - 1)
                self._all.add(one.length - 1, one.depth)
                self._rows.setdefault(row, _Counts(self.max_depth, 0.9, 6.0)).add(one.length - 1, one.depth)
        if deepest == 0:
            self._rested += 1
            return
        failed = self._probing and all(one.length == 1 for one in told)
        self._wait = min(2 * self._wait, LONGEST) if failed else START
        self._rested = 0
