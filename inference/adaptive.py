"""Adaptive draft depth: how deep to draft, if at all, from what was accepted lately and what rounds really cost.

Under rules whose draws depend on positions alone, the tokens are those of plain decoding whatever depth is chosen. Under rejection other
tokens of the same distribution come out, and which ones then depends on the clock.
"""

from collections import deque
from collections.abc import Sequence

from draftsmith.inference.verify import HostResult

__all__ = ["AdaptiveDepth"]

FIRST_WAIT, LONGEST_WAIT = 8, 128  # disabled rounds before a re-test: doubled by each re-test that fails
REFRESH = 128  # rounds after which a plain round is timed again: contexts get longer
MIN_TIMES = 2  # times of a depth before they are believed: one may have been disturbed
MAX_PLAIN_AGE = 4 * REFRESH  # rounds after which the time of a plain round is forgotten, but for the last one
MAX_AGE = 192  # rounds after which the time of a depth is forgotten, so that the depth is tried again
PRIOR = 0.6  # P(depth 1 is accepted) before anything was drafted
LEVEL_COST = 0.03  # assumed cost of one more level, in plain rounds, until it was measured: low, so that the level is tried


class _Acceptance:
    """Acceptances by depth. Older ones count less, and where there are few a prior counts."""

    def __init__(self, depth: int, decay: float, prior_weight: float) -> None:
        self.hits, self.tries = [0.0] * depth, [0.0] * depth
        self.decay, self.prior_weight = decay, prior_weight

    def add(self, accepted: int, drafted: int) -> None:
        """A round that drafted `drafted` levels: depths up to `accepted` passed, the next one failed, deeper ones were not tried."""
        for k in range(min(drafted, accepted + 1)):
            self.tries[k] = self.tries[k] * self.decay + 1
            self.hits[k] = self.hits[k] * self.decay + (k < accepted)

    def probabilities(self, prior: Sequence[float] | None = None) -> list[float]:
        """P(depth k+1 is accepted | depth k was), for each k.

        Without a prior, each depth takes the one before as its prior: drafts that went well so far usually continue well.
        """
        probabilities, before = [], PRIOR
        for k, (hits, tries) in enumerate(zip(self.hits, self.tries, strict=True)):
            before = (hits + self.prior_weight * (prior[k] if prior else before)) / (tries + self.prior_weight)
            probabilities.append(before)
        return probabilities


class AdaptiveDepth:
    """Chooses the draft depth k in 0 … K with the most expected tokens per second; 0 is plain decoding.

    The expected tokens of a round are Σ over slots of 1 + Σ_{i≤k} Π_{j≤i} α_j, where α_j is the conditional acceptance at depth j; its cost is
    the time of rounds of that depth. While drafting is disabled, re-tests follow at growing distances. A slot's α have those of all slots as
    their prior.

    All slots of a batch share one forward, so that a slot's drafts cost nothing more once another slot drafts: there is one depth for the
    batch.
    """

    def __init__(self) -> None:
        self.max_depth = -1
        self.bind(0)

    def bind(self, max_depth: int) -> None:
        """Serve a drafter of depth K = max_depth. What was learned is kept as long as K is the same."""
        if max_depth != self.max_depth:
            self.max_depth = max_depth
            self._all_slots = _Acceptance(max_depth, 0.98, 3.0)
            self._seconds: dict[int, dict[int, deque[tuple[int, float]]]] = {}  # by number of slots, by depth: (round, seconds)
            self._round = 0
            self._since_plain = 0  # rounds since the last plain one
            self._deepest_accepted = 1
            self._wait = FIRST_WAIT  # disabled rounds before the next re-test
            self._waited = 0
            self._disabled = self._retesting = False
        self._by_slot: dict[int, _Acceptance] = {}

    def drop(self, slots: Sequence[int]) -> None:
        """The requests in these slots have ended."""
        for slot in slots:
            self._by_slot.pop(slot, None)

    def depth(self, slots: Sequence[int]) -> int:
        """How deep to draft for these slots in the next round; 0 for plain decoding."""
        if self.needs_plain_round:
            return 0
        if self._disabled and self._waited < self._wait:
            return 0  # nothing was learned meanwhile
        chosen = self._best(slots)
        self._retesting = self._disabled and chosen == 0 and self.max_depth > 0
        self._disabled = chosen == 0
        return 1 if self._retesting else chosen

    @property
    def needs_plain_round(self) -> bool:
        """There must be a plain round to compare with."""
        return self._since_plain >= REFRESH or not any(seconds.get(0) for seconds in self._seconds.values())

    def _best(self, slots: Sequence[int]) -> int:
        """The depth with the most expected tokens per second."""
        general = self._all_slots.probabilities()
        tokens = [0.0] * (self.max_depth + 1)  # expected of each depth, over all slots
        for slot in slots:
            acceptance = self._by_slot.get(slot)
            survival = 1.0
            tokens[0] += 1
            for k, probability in enumerate(acceptance.probabilities(general) if acceptance else general):
                survival *= probability
                tokens[k + 1] += survival
        total, best, chosen = 0.0, 0.0, 0
        costs = self.costs(len(slots), self.max_depth)
        # No deeper than twice what was ever accepted: the first drafts of a useless drafter should be cheap.
        for k, expected in enumerate(tokens[: 2 * self._deepest_accepted + 1]):
            total += expected
            if total / costs[k] > best:
                best, chosen = total / costs[k], k
        return chosen

    def _nearest(self, slots: int) -> dict[int, deque[tuple[int, float]]]:
        """The times with this number of slots, or the nearest one that has plain rounds."""
        measured = [count for count, seconds in self._seconds.items() if seconds.get(0)]
        return self._seconds[min(measured, key=lambda count: abs(count - slots))]

    def plain_seconds(self, slots: int) -> float:
        """The seconds of a plain round: the least of the last few, since what disturbs a clock only ever adds to it."""
        times = self._nearest(slots)[0]
        return min([took for at, took in times if self._round - at < MAX_PLAIN_AGE] or [times[-1][1]])

    def costs(self, slots: int, most: int) -> list[float]:
        """The cost of depths 0 … `most`, in plain rounds, as measured with this number of slots or the nearest one.

        Depths between measured ones are interpolated; deeper ones cost LEVEL_COST more per level.
        """
        seconds, plain = self._nearest(slots), self.plain_seconds(slots)
        # If something disturbs the clock each time, the times are forgotten in the end.
        recent = {k: [took for at, took in times if self._round - at < MAX_AGE] for k, times in seconds.items() if k}
        points = [(0, 1.0), *sorted((k, min(times) / plain) for k, times in recent.items() if len(times) >= MIN_TIMES)]
        costs, i = [], 0
        for k in range(most + 1):
            while i + 1 < len(points) and points[i + 1][0] <= k:
                i += 1
            left, low = points[i]
            right, high = points[i + 1] if i + 1 < len(points) else (left + 1, low + LEVEL_COST)
            costs.append(low + (high - low) * (k - left) / (right - left))
        for k in reversed(range(most)):  # deeper is never cheaper: one slow round must not bar a depth
            costs[k] = min(costs[k], costs[k + 1])
        return costs

    def measure(self, slots: int, depth: int, seconds: float) -> None:
        """A round of so many slots and levels took these seconds."""
        times = self._seconds.setdefault(slots, {})
        self._round += 1
        if depth in times:
            times[depth].append((self._round, seconds))
        else:
            times[depth] = deque(maxlen=9)  # the first round of a shape sets things up: its time says nothing
        self._since_plain = 0 if depth == 0 else self._since_plain + 1

    def learn(self, slots: Sequence[int], results: Sequence[HostResult], seconds: float) -> None:
        """Learn the results of a round of these slots, and its time, drafting included."""
        deepest = max(result.depth for result in results)
        self.measure(len(slots), deepest, seconds)
        for slot, result in zip(slots, results, strict=True):
            if result.depth:
                accepted = result.length - 1
                self._deepest_accepted = max(self._deepest_accepted, accepted)
                self._all_slots.add(accepted, result.depth)
                self._by_slot.setdefault(slot, _Acceptance(self.max_depth, 0.9, 6.0)).add(accepted, result.depth)
        if deepest == 0:
            self._waited += 1
            return
        failed = self._retesting and all(result.length == 1 for result in results)
        self._wait = min(2 * self._wait, LONGEST_WAIT) if failed else FIRST_WAIT
        self._waited = 0
