"""Acceptance in slices: by context length, position in the output, the target's entropy and language; which ranks are accepted at each depth;
and how far the drafter's confidence can be trusted.

Letters: S positions · K draft depth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.intervals import Interval, conversations, of_difference, of_ratio
from draftsmith.eval.records import PositionRecord, Records
from draftsmith.eval.round_rows import RoundRow, round_rows
from draftsmith.eval.settings import greedy, rule_of
from draftsmith.inference.rule_names import USUAL_RULE

FIRST_CONTEXT, FIRST_OUTPUT = 64, 16  # tokens of the first slice; each later one is twice as long
TIERS = ("lowest quarter", "second quarter", "third quarter", "highest quarter")
COLUMNS = 8  # ranks with a column of their own
BINS = 10  # of equally many positions


@dataclass(frozen=True, slots=True)
class Slice:
    """Acceptance over the rounds of a slice.

    Attributes:
        name: of the slice.
        prompts: with such a round.
        rounds: how many.
        committed: tokens.
        drafted: tree nodes without the root.
        accepted: drafted tokens that were committed.
        tau: committed / rounds.
        low: end of the 95 % interval of τ; None with too few prompts, as is `high`.
        high: the end above.
        accepted_per_drafted: accepted / drafted; None where nothing was drafted.
    """

    name: str
    prompts: int
    rounds: int
    committed: int
    drafted: int
    accepted: int
    tau: float
    low: float | None
    high: float | None
    accepted_per_drafted: float | None


def slices(records: Records, setting: str) -> dict[str, list[Slice]]:
    """By "context" (tokens up to the round's root), "output" (tokens of the answer before it), "entropy" (of the target's distribution of the
    round's first token) and "language". A slicing that the records do not allow has no entries.

    The tiers of entropy are quarters of all positions of the target's own texts, so that they do not depend on the drafter.
    """
    rows = list(round_rows(records, setting))
    edges = _entropy_edges(records, setting)

    def tier(row: RoundRow) -> tuple[int, str] | None:
        if row.record is None or edges is None:
            return None
        index = int(torch.bucketize(row.record.entropy[row.row], edges, right=True))
        return index, TIERS[index]

    def language(row: RoundRow) -> tuple[int, str] | None:
        return (0, row.request.language) if row.request.language else None

    return {
        "context": _cells(rows, lambda row: _doubling(row.round.position, FIRST_CONTEXT)),
        "output": _cells(rows, lambda row: _doubling(row.start, FIRST_OUTPUT)),
        "entropy": _cells(rows, tier),
        "language": _cells(rows, language),
    }


def entropy_edges(records: Records, setting: str) -> list[float]:
    """The three entropies, in nats, between the tiers of `slices`; none without position records."""
    edges = _entropy_edges(records, setting)
    return [] if edges is None else edges.tolist()


def _entropy_edges(records: Records, setting: str) -> Tensor | None:
    entropies = [record.entropy for record in records.positions_at(setting)]
    if not sum(map(len, entropies)):
        return None
    ordered = torch.cat(entropies).sort().values
    return ordered[torch.tensor([len(ordered) * quarter // 4 for quarter in (1, 2, 3)])]


def _doubling(value: int, first: int) -> tuple[int, str]:
    """The slice of a number of tokens: 0 – 63, 64 – 127, 128 – 255, …"""
    low, below = 0, first
    while value >= below:
        low, below = below, 2 * below
    return low, f"{low} – {below - 1}"


def _cells(rows: Sequence[RoundRow], key: Callable[[RoundRow], tuple[int, str] | None]) -> list[Slice]:
    conversation = conversations(row.request.prompt for row in rows)
    groups: dict[tuple[int, str], dict[str, list[int]]] = {}
    for row in rows:
        if (name := key(row)) is not None:
            sums = groups.setdefault(name, {}).setdefault(conversation[row.request.prompt], [0, 0, 0, 0])
            for i, value in enumerate((row.round.committed, 1, row.round.nodes - 1, row.round.accepted)):
                sums[i] += value
    cells = []
    for (_, name), prompts in sorted(groups.items()):
        sums = torch.tensor(list(prompts.values()))  # [P,4]
        committed, rounds, drafted, accepted = sums.sum(0).tolist()
        tau = of_ratio(sums[:, 0], sums[:, 1])
        share = accepted / drafted if drafted else None
        cells.append(Slice(name, len(prompts), rounds, committed, drafted, accepted, tau.estimate, tau.low, tau.high, share))
    return cells


@dataclass(frozen=True, slots=True)
class RankMatrix:
    """Depth × rank.

    Attributes:
        columns: names; the first are ranks, from 0.
        count: of each depth, the positions or rounds that were counted.
        share: of each depth and column, the part of them; a row sums to 1.
    """

    columns: list[str]
    count: list[int]
    share: list[list[float]]


def ranks_formed(records: Records, setting: str) -> RankMatrix | None:
    """How often the target's token at depth k has rank r among the drafter's candidates, given the target's tokens before it.

    At every position of the target's texts, of the prompts that did not choose the tree; None without position records.
    """
    chosen = _reported(records, setting)
    if not chosen:
        return None
    counts = torch.zeros(chosen[0].ranks.shape[1], COLUMNS + 3, dtype=torch.int64)
    for record in chosen:
        for k in range(len(counts)):
            rows = max(0, len(record.ranks) - k)  # whose token at this depth is still in the text
            ranks, unknown = record.ranks[:rows, k], record.log_probs[:rows, k] == -torch.inf
            columns = torch.where(unknown, COLUMNS + 2, torch.where(ranks < 0, COLUMNS + 1, ranks.clamp(max=COLUMNS)))
            counts[k] += columns.bincount(minlength=COLUMNS + 3)
    names = [*map(str, range(COLUMNS)), f"{COLUMNS} or later", "not recorded", "OOV"]
    return _matrix(names, counts)


@dataclass(frozen=True, slots=True)
class DrawnRanks:
    """Which children of the deployed tree real rounds accepted.

    Attributes:
        matrix: by depth, of the rounds that accepted all tokens before it: the rank of the child that they accepted, "not drafted" where the
            target's token was none of the children, "no children" where the tree ends.
        accepted: of each node of the tree, in its order, the share of rounds that accepted it.
        rounds: that were counted.
        unknown: rounds of another tree, or of which no position record tells the ranks.
    """

    matrix: RankMatrix
    accepted: list[float]
    rounds: int
    unknown: int


def ranks_drawn(records: Records, setting: str) -> DrawnRanks | None:
    """What the rounds of a static tree accepted; None for dynamic trees, and where the children were not the likeliest tokens."""
    tree = records.tree["tree"]
    keyed_by_rank = greedy(setting) or rule_of(setting) == USUAL_RULE
    if isinstance(tree, dict) or not tree or not keyed_by_rank:
        return None
    nodes = {tuple(path): 0 for path in tree}
    inner = {path[:-1] for path in nodes}
    counts = torch.zeros(records.tree["depth"], COLUMNS + 3, dtype=torch.int64)
    known = unknown = 0
    for row in round_rows(records, setting):
        ranks = row.record.ranks[row.row].tolist() if row.record is not None else []
        path = tuple(ranks[: row.round.accepted])
        if row.record is None or row.round.nodes != len(nodes) + 1 or (path and path not in nodes):
            unknown += 1
            continue
        known += 1
        for k in range(len(path)):
            nodes[path[: k + 1]] += 1
            counts[k, min(path[k], COLUMNS)] += 1
        if len(path) < len(counts):
            if path not in inner:
                counts[len(path), COLUMNS + 2] += 1
            elif tuple(ranks[: len(path) + 1]) not in nodes:  # else the end of the text cut the round short
                counts[len(path), COLUMNS + 1] += 1
    if not known:
        return None
    names = [*map(str, range(COLUMNS)), f"{COLUMNS} or later", "not drafted", "no children"]
    return DrawnRanks(_matrix(names, counts), [count / known for count in nodes.values()], known, unknown)


def _matrix(names: list[str], counts: Tensor) -> RankMatrix:
    total = counts.sum(-1, keepdim=True)
    return RankMatrix(names, total[:, 0].tolist(), (counts.double() / total.clamp(min=1)).tolist())


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Positions of similar confidence: their mean confidence, the share of them where the drafter was right, and how many."""

    confidence: float
    right: float
    positions: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """The drafter's confidence in its likeliest token at one depth, against how often that is the target's token.

    Attributes:
        depth: from 1.
        positions: how many.
        confidence: mean.
        right: share of positions where the likeliest token is the target's.
        excess: confidence − right: above 0 the drafter is overconfident.
        low: end of its 95 % interval over prompts; None with too few prompts, as is `high`.
        high: the end above.
        error: expected calibration error (Naeini et al. 2015) over bins of equally many positions.
        bins: from the least confident to the most.
    """

    depth: int
    positions: int
    confidence: float
    right: float
    excess: float
    low: float | None
    high: float | None
    error: float
    bins: list[ReliabilityBin]


def calibration(records: Records, setting: str) -> list[Calibration]:
    """By depth, at every position of the texts of the prompts that did not choose the tree; none without position records."""
    chosen = [record for record in _reported(records, setting) if record.drafted.numel()]
    depths = chosen[0].drafted.shape[1] if chosen else 0
    conversation = conversations(record.prompt for record in chosen)
    entries = []
    for k in range(depths):
        pairs: dict[str, list[Tensor]] = {}
        for record in chosen:
            rows = max(0, len(record.tokens) - k)  # whose token at this depth is still in the text
            if rows:
                right = (record.drafted[:rows, k] == record.tokens[k : k + rows]).double()
                pair = torch.stack((record.drafted_log_probs[:rows, k].double().exp(), right))
                pairs.setdefault(conversation[record.prompt], []).append(pair)
        if pairs:
            entries.append(_calibration(k + 1, [torch.cat(parts, 1) for parts in pairs.values()]))
    return entries


def _calibration(depth: int, pairs: list[Tensor]) -> Calibration:
    """pairs: confidence and whether it was right [2,S], of every conversation."""
    sums = torch.tensor([[right.sum(), confidence.sum(), len(right)] for confidence, right in pairs], dtype=torch.float64).T  # [3,P]
    excess: Interval = of_difference(sums[:2], sums[2].expand(2, -1))
    confidence, right = torch.cat(pairs, 1)
    order = confidence.argsort(stable=True)
    bins = [
        ReliabilityBin(float(confidence[part].mean()), float(right[part].mean()), len(part))
        for part in order.tensor_split(min(BINS, len(order)))
    ]
    error = sum(each.positions * abs(each.confidence - each.right) for each in bins) / len(order)
    return Calibration(depth, len(order), float(confidence.mean()), float(right.mean()), *excess, error, bins)


def _reported(records: Records, setting: str) -> list[PositionRecord]:
    """The position records of the prompts that did not choose the tree."""
    return [record for record in records.positions_at(setting, choosing=False) if len(record.tokens)]
