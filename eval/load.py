"""The load model: predicted speedup and latency by batch and context, from probes (eval/probe.py) and τ.

speedup = τ · plain round / (drafting + verifying + rest of the round). All is counted in the verifying of a plain round of the same batch and
context, since both were timed in turn: another machine's absolute times, or a busier one's, cancel.

Letters: B slots · C context length · N nodes with the root · K draft depth.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from draftsmith.eval.cost import RoundCost
from draftsmith.eval.trees import Rounds

Tree = list[list[int]] | dict[str, int]


class _Drafting(NamedTuple):
    """Drafting a tree and the rest of its round, and the rest of a plain round; in plain rounds' verifying."""

    batch: int
    depth: int
    nodes: float
    tree: Tree
    draft: float
    rest: float
    plain_rest: float


class CostModel:
    """What rounds cost by batch, context, nodes and depth.

    Args:
        record: of kind "load", see `probe.measure`.

    Attributes:
        batches: that were measured at the shortest context.
        contexts: that were measured with all of these batches.
        max_nodes: N at most.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self._times: dict[tuple[int, int], dict[int, list[float]]] = {}
        for entry in record["verify"]:
            self._times.setdefault((entry["batch"], entry["context"]), {})[entry["nodes"]] = entry["seconds"]
        self._curves = {cell: _curve(times) for cell, times in self._times.items()}
        shortest = min(context for _, context in self._times)
        self.batches = sorted(batch for batch, context in self._times if context == shortest)
        self.contexts = sorted({context for _, context in self._times if all((batch, context) in self._times for batch in self.batches)})
        self.max_nodes = min(max(times) for times in self._times.values())
        # Under pressure of time the largest batches of verifying are left out, and drafting at them says nothing then.
        timed = (entry for entry in record["rounds"] if entry["draft"] and entry["plain"] and entry["batch"] in self.batches)
        self._drafting = [_drafting(entry) for entry in timed]

    def nearest(self, batch: int) -> int:
        """The batch, or the end of those that were measured."""
        return min(max(batch, self.batches[0]), self.batches[-1])

    def plain_seconds(self, batch: float, context: float) -> float:
        """Seconds of a plain round.

        Raises:
            ValueError: a batch or context that is not between measured ones, and elsewhere too many nodes.
        """
        return self._verifying_one(batch, context) * (1 + self._rest(batch)[0])

    def verifying(self, batch: float, nodes: float, context: float) -> float:
        """Verifying N nodes a slot over verifying one."""
        if nodes > self.max_nodes:
            raise ValueError(f"got {nodes:g} nodes; expected at most {self.max_nodes}, which were measured")
        return self._between(batch, context, lambda cell: _at(self._curves[cell], nodes))

    def round(self, batch: float, nodes: float, depth: int, context: float, tree: Tree | None = None) -> float:
        """The relative cost of a round: that of drafting, verifying and the rest over a plain round's.

        Drafting a tree that was itself timed costs what it took; for others it is linear in depth and nodes.
        """
        plain_rest, rest = self._rest(batch)
        drafting = self.drafting(batch, depth, nodes, context, tree) if depth else 0.0
        return (self.verifying(batch, nodes, context) + drafting + (rest if depth else plain_rest)) / (1 + plain_rest)

    def drafting(self, batch: float, depth: int, nodes: float, context: float, tree: Tree | None = None) -> float:
        """Drafting over verifying a plain round of this batch and context. It was timed at the shortest context, and is taken to cost the
        same seconds at all."""
        ends = sorted({each.batch for each in self._drafting})
        values = [(end, _drafting_of([each for each in self._drafting if each.batch == end], depth, nodes, tree)) for end in ends]
        seconds = [(end, value * self._verifying_one(end, self.contexts[0])) for end, value in values]
        return _at(seconds, batch) / self._verifying_one(batch, context)

    def relative(self, batch: float, context: float) -> RoundCost:
        """The relative cost of a round by nodes and depth at one load, to choose trees by."""
        return lambda nodes, depth: self.round(batch, nodes, depth, context)

    def of_rounds(self, rounds: Rounds, batch: int, context: float, tree: Tree | None = None) -> float:
        """The mean relative cost of these rounds. Where they differ in size, a batch verifies as many nodes as its largest tree."""
        total, before, cost = sum(rounds.sizes.values()), 0.0, 0.0
        cumulated = 0
        for nodes in sorted(rounds.sizes):
            cumulated += rounds.sizes[nodes]
            below = (cumulated / total) ** batch  # P(no slot of the batch has a larger tree)
            cost += (below - before) * self.round(batch, nodes, rounds.depth, context, tree)
            before = below
        return cost

    def spread(self, batch: float, nodes: float, context: float) -> float:
        """Half the 95 % interval of the logarithm of verifying's relative cost, at the nearest cell that was measured."""
        cell = min(self._times, key=lambda cell: (abs(cell[0] - batch), abs(cell[1] - context)))
        times = self._times[cell]
        size = min(times, key=lambda size: (abs(size - nodes), size))
        return 0.0 if size == 1 else _median_error([math.log(ratio) for ratio in _ratios(times, size)])

    def _verifying_one(self, batch: float, context: float) -> float:
        """Seconds of verifying one node a slot."""
        return self._between(batch, context, lambda cell: statistics.median(self._times[cell][1]))

    def _rest(self, batch: float) -> tuple[float, float]:
        """The rest of a plain round and of one with drafting."""
        if not self._drafting:
            return 0.0, 0.0
        nearest = min(self._drafting, key=lambda each: abs(each.batch - batch)).batch
        rows = [each for each in self._drafting if each.batch == nearest]
        return statistics.median(each.plain_rest for each in rows), statistics.median(each.rest for each in rows)

    def _between(self, batch: float, context: float, value: Callable[[tuple[int, int]], float]) -> float:
        """Interpolate a cell's value linearly between measured batches and contexts."""
        if not self.batches[0] <= batch <= self.batches[-1]:
            raise ValueError(f"got batch {batch:g}; expected {self.batches[0]} to {self.batches[-1]}, which were measured")
        if context > self.contexts[-1]:
            raise ValueError(f"got context {context:g}; expected at most {self.contexts[-1]}, which was measured")
        context = max(context, self.contexts[0])
        return _at([(b, _at([(c, value((b, c))) for c in self.contexts], context)) for b in self.batches], batch)


class Prediction(NamedTuple):
    """Predicted at one load: speedup [low, high] and milliseconds per token of one request. low and high are None with too few prompts."""

    batch: int
    context: int
    tau: float
    relative_cost: float
    speedup: float
    low: float | None
    high: float | None
    ms_per_token: float


def predict(model: CostModel, rounds: Rounds, batch: int, context: int, tree: Tree | None = None) -> Prediction:
    """The predicted speedup of steady decoding with `batch` slots in use. Its interval is that of τ and that of the probe, independent.

    Args:
        model: what rounds cost.
        rounds: what rounds accept, and their sizes.
        batch: slots, between measured numbers of them.
        context: C, likewise.
        tree: the draft tree, as a config has it; the drafting of a tree that was itself timed need not be interpolated.
    """
    cost, plain = model.of_rounds(rounds, batch, context, tree), 1e3 * model.plain_seconds(batch, context)
    tau = rounds.interval
    speedup, low, high = tau.estimate / cost, None, None
    if tau.low is not None and tau.high is not None:
        probe = model.spread(batch, max(rounds.sizes), context)
        low = speedup * math.exp(-math.hypot(math.log(tau.estimate / tau.low), probe))
        high = speedup * math.exp(math.hypot(math.log(tau.high / tau.estimate), probe))
    return Prediction(batch, context, tau.estimate, cost, speedup, low, high, plain / speedup)


def by_batch(model: CostModel, rounds: Rounds, context: int, tree: Tree | None = None) -> dict[str, Any]:
    """Speedup against batch, for a figure: batches, speedup, low, high, and break_even (see `break_even`)."""
    rows = [predict(model, rounds, batch, context, tree) for batch in model.batches]
    columns = {name: [getattr(row, name) for row in rows] for name in ("speedup", "low", "high")}
    return {"batches": list(model.batches), **columns, "break_even": break_even(model, rounds, context, tree)}


def break_even(model: CostModel, rounds: Rounds, context: int, tree: Tree | None = None) -> int | None:
    """The least batch from which on plain decoding is predicted to be as fast, up to the largest that was measured; None where there is none."""
    least = None
    for batch in range(model.batches[-1], model.batches[0] - 1, -1):
        if predict_speedup(model, rounds, batch, context, tree) > 1.0:
            break
        least = batch
    return least


def predict_speedup(model: CostModel, rounds: Rounds, batch: int, context: int, tree: Tree | None = None) -> float:
    """The estimate of `predict` alone, which is quick."""
    return rounds.tau / model.of_rounds(rounds, batch, context, tree)


def _curve(times: dict[int, list[float]]) -> list[tuple[float, float]]:
    """(N, verifying N nodes over verifying one), never less for more nodes: measured steps are real, dips are noise."""
    curve, least = [], 1.0
    for size in sorted(times):
        least = max(least, statistics.median(_ratios(times, size)))
        curve.append((float(size), least))
    return curve


def _ratios(times: dict[int, list[float]], size: int) -> list[float]:
    """Of rounds that were timed in turn: whatever slowed both cancels."""
    return [took / plain for took, plain in zip(times[size], times[1], strict=True)]


def _drafting(entry: dict[str, Any]) -> _Drafting:
    """Rounds of look-ups differ, so that only means add up; disturbances are left out with the slowest tenth."""
    plain = _trimmed(entry["plain"])
    values = (_trimmed(entry[name]) / plain for name in ("draft", "other", "plain_other"))
    return _Drafting(entry["batch"], entry["depth"], entry["nodes"], entry["tree"], *values)


def _trimmed(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return statistics.fmean(ordered[: max(1, math.ceil(0.9 * len(ordered)))])


def _drafting_of(rows: list[_Drafting], depth: int, nodes: float, tree: Tree | None) -> float:
    """Drafting at one batch: as timed for this tree, else a + b·(K − 1) + c·(N − 1 − K) through two chains and a tree, or what there is."""
    for row in rows:
        if tree is not None and row.tree == tree:
            return row.draft
    chains = sorted((row for row in rows if row.nodes == row.depth + 1), key=lambda row: row.depth)
    if not chains:
        return rows[0].draft
    low, high = chains[0], chains[-1]
    level = max(0.0, high.draft - low.draft) / (high.depth - low.depth) if high.depth > low.depth else 0.0
    widest = max(rows, key=lambda row: row.nodes - row.depth)
    extra = widest.nodes - 1 - widest.depth
    node = max(0.0, widest.draft - low.draft - level * (widest.depth - low.depth)) / extra if extra > 0 else 0.0
    return low.draft + level * (depth - low.depth) + node * max(0.0, nodes - 1 - depth)


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points (x, y) in ascending order, and constant before and after them."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1]


def _median_error(values: Sequence[float]) -> float:
    """Half the 95 % interval of a median by order statistics (binomial ranks); of fewer than six values, half their range."""
    ordered, count, middle = sorted(values), len(values), statistics.median(values)
    tail, rank = 0.0, 0
    while (tail := tail + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    rank = max(rank, 1)
    return max(ordered[count - rank] - middle, middle - ordered[rank - 1])
