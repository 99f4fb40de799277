"""Static trees from position records: the exact τ of any tree, and the best tree of each size.

Decoding follows the target's own text. So the ranks that a drafter gives this text, at every position, say what any tree of top-ranked
children would have accepted there; nothing is decoded again.

Letters: S positions · K draft depth. P is the number of prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.eval import intervals
from draftsmith.eval.cost import RoundCost
from draftsmith.eval.intervals import Interval
from draftsmith.eval.records import PositionRecord

Path = tuple[int, ...]
SHOWN = (2, 4, 8, 12, 16, 24, 32, 48, 64, 128)  # sizes of trees in a report


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds that some draft takes along the target's texts.

    Attributes:
        tokens: [P] of each prompt's texts.
        rounds: [P].
        sizes: how many rounds verified so many nodes, the root included.
        depth: levels that are drafted, K; 0 is plain decoding.
    """

    tokens: Tensor
    rounds: Tensor
    sizes: dict[int, int]
    depth: int

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return float(self.tokens.sum() / self.rounds.sum())

    @property
    def interval(self) -> Interval:
        """τ with its 95 % interval over prompts."""
        return intervals.of_ratio(self.tokens, self.rounds)


class Positions:
    """Position records as tensors, for many trees.

    Args:
        records: at least one, of one setting.
    """

    def __init__(self, records: Sequence[PositionRecord]) -> None:
        conversation = intervals.conversations(record.prompt for record in records)
        prompts = list(dict.fromkeys(conversation.values()))
        self.depth = max(record.ranks.shape[1] for record in records)
        self.prompts = len(prompts)
        self._lengths = torch.tensor([len(record.ranks) for record in records])
        self._prompt = torch.tensor([prompts.index(conversation[record.prompt]) for record in records])
        self._ranks = torch.full((len(records), max(1, int(self._lengths.max())), self.depth), -1)  # [records,S,K]
        for row, record in zip(self._ranks, records, strict=True):
            row[: record.ranks.shape[0], : record.ranks.shape[1]] = record.ranks

    def rounds(self, paths: Sequence[Path]) -> Rounds:
        """The rounds that real decoding would take with the tree of these rank paths, which must contain every prefix."""
        accepted = self.accepted(paths)
        taken, at = torch.zeros_like(self._lengths), torch.zeros_like(self._lengths)
        while (running := at < self._lengths).any():
            taken += running
            step = 1 + accepted.gather(1, at.clamp(max=accepted.shape[1] - 1)[:, None])[:, 0]
            at = torch.where(running, at + step, at)
        zeros = torch.zeros(self.prompts, dtype=torch.float64)
        tokens, count = (zeros.index_add(0, self._prompt, values.double()) for values in (self._lengths, taken))
        return Rounds(tokens, count, {len(paths) + 1: int(count.sum())}, max(map(len, paths), default=0))

    def accepted(self, paths: Sequence[Path]) -> Tensor:
        """[records,S]: how many tokens of the tree a round that starts there accepts."""
        node = {(): 0} | {tuple(path): number for number, path in enumerate(paths, 1)}
        width = 1 + max((path[-1] for path in paths), default=0)
        child = torch.full((len(node), width + 1), -1)  # column `width`: ranks that no node has
        for path, number in node.items():
            if path:
                child[node[path[:-1]], path[-1]] = number
        at = torch.zeros(self._ranks.shape[:2], dtype=torch.int64)
        depth = torch.zeros_like(at)
        for k in range(self.depth):
            rank = self._ranks[:, :, k]
            rank = torch.where((rank < 0) | (rank >= width), width, rank)
            at = torch.where(at >= 0, child[at.clamp(min=0), rank], -1)
            if not (at >= 0).any():
                break
            depth += at >= 0
        return depth

    def order(self, max_paths: int, max_depth: int | None = None) -> list[Path]:
        """`best_first_paths` of these records, none deeper than `max_depth`."""
        ranks = self._ranks[:, :, : max_depth or self.depth].flatten(0, 1)
        counts: dict[Path, int] = {}
        for k in range(ranks.shape[1]):
            ranks = ranks[ranks[:, k] >= 0]
            prefixes, times = ranks[:, : k + 1].unique(dim=0, return_counts=True)
            counts |= zip(map(tuple, prefixes.tolist()), times.tolist(), strict=True)
        # Sorting by count keeps parents first; length and rank break ties.
        return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:max_paths]


def tau(records: Sequence[PositionRecord], paths: Sequence[Path]) -> float:
    """Exact τ of the tree with these rank paths: it counts the rounds that real decoding would take along each text."""
    return Positions(records).rounds(paths).tau


def best_first_paths(records: Sequence[PositionRecord], max_paths: int) -> list[Path]:
    """Rank paths, the most frequently accepted first, at most `max_paths` of them.

    Every prefix of the list is a tree, and the optimal one of its size: τ is the sum over nodes of the probability that the node is on the
    accepted path, and no child is likelier than its parent. Dynamic programming over subtrees finds the same trees. (Cai et al. 2024,
    §2.3.3, assume independent heads, and Chen et al. 2024, Sequoia, independent ranks; these are joint counts.)
    """
    return Positions(records).order(max_paths) if records else []


class Candidates:
    """The trees to choose from, with the rounds that each takes along the choosing records, whatever a round costs: of each depth the best
    tree of each size and the chain, and no tree at all.

    Args:
        records: those that choose, of one setting.
        max_nodes: most nodes of a tree, the root included.
        sizes: nodes of the trees to try; `candidate_sizes` by default.
    """

    def __init__(self, records: Sequence[PositionRecord], max_nodes: int, sizes: Sequence[int] | None = None) -> None:
        self.positions = Positions(records)
        self.rounds: dict[tuple[Path, ...], Rounds] = {(): self.positions.rounds(())}
        for depth in range(1, self.positions.depth + 1):
            order = self.positions.order(max_nodes - 1, depth)
            for size in sizes or candidate_sizes(max_nodes):
                if 1 < size <= min(max_nodes, len(order) + 1):
                    self._add(order[: size - 1])
            if depth < max_nodes:
                self._add(chain(depth))

    def _add(self, paths: list[Path]) -> None:
        if tuple(paths) not in self.rounds:
            self.rounds[tuple(paths)] = self.positions.rounds(paths)

    def best(self, cost: RoundCost) -> list[Path]:
        """The tree with the highest predicted speedup, τ over the relative cost of its round. It is empty where none pays."""
        return list(max(self.rounds, key=lambda paths: (predicted(self.rounds[paths], cost), -len(paths))))

    def best_chain(self, cost: RoundCost) -> int:
        """The chain length K with the highest predicted speedup: what engines call `num_speculative_tokens`. 0 where no chain pays."""
        chains = [paths for paths in self.rounds if paths == tuple(chain(len(paths)))]
        return len(max(chains, key=lambda paths: predicted(self.rounds[paths], cost)))

    def by_nodes(self, cost: RoundCost) -> dict[int, list[Path]]:
        """For each size, the tree with the highest predicted speedup."""
        best: dict[int, tuple[Path, ...]] = {}
        for paths, rounds in self.rounds.items():
            size = len(paths) + 1
            if paths and (size not in best or predicted(rounds, cost) > predicted(self.rounds[best[size]], cost)):
                best[size] = paths
        return {size: list(best[size]) for size in sorted(best)}


def chain(depth: int) -> list[Path]:
    """The paths of a chain of K = `depth`."""
    return [(0,) * k for k in range(1, depth + 1)]


def predicted(rounds: Rounds, cost: RoundCost) -> float:
    """Predicted speedup of a static tree: τ over the relative cost of its round."""
    return rounds.tau / cost(max(rounds.sizes), rounds.depth)


def best_tree(records: Sequence[PositionRecord], cost: RoundCost, max_nodes: int) -> list[Path]:
    """The tree of at most `max_nodes` nodes, the root included, with the highest τ over the relative cost of its round.

    It is empty, that is nothing is drafted, where no tree pays.
    """
    return Candidates(records, max_nodes).best(cost)


def best_tree_by_nodes(records: Sequence[PositionRecord], cost: RoundCost, max_nodes: int) -> dict[int, list[Path]]:
    """For each of SHOWN up to `max_nodes` (nodes with the root) that the records allow: the tree of the depth with the highest τ over cost."""
    return {size: paths for size, paths in Candidates(records, max_nodes, SHOWN).by_nodes(cost).items() if size in SHOWN}


def candidate_sizes(max_nodes: int) -> list[int]:
    """Tree sizes to try up to `max_nodes`, the root included: all up to 8, then in steps of about a sixth."""
    sizes = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    return [size for size in sizes if size < max_nodes] + [max_nodes]


class Gap(NamedTuple):
    """What choosing a tree on some prompts promises, and what it gives on others.

    `optimism` is the τ of one tree on the prompts that chose it less its τ on the others. The halves differ by chance too, which `crossed`
    cancels: the mean of that difference with the halves as they are and with them exchanged.
    """

    chosen_on: float
    reported_on: float
    optimism: float
    crossed: float


def gap(choosing: Sequence[PositionRecord], reported: Sequence[PositionRecord], cost: RoundCost, max_nodes: int) -> Gap:
    """The optimism of the best tree's τ; each half has at least one record."""
    halves = [Candidates(half, max_nodes) for half in (choosing, reported)]
    differences = []
    for first, second in (halves, halves[::-1]):
        paths = first.best(cost)
        differences.append((first.rounds[tuple(paths)].tau, second.positions.rounds(paths).tau))
    (chosen_on, reported_on), (crossed_on, crossed_reported) = differences
    optimism = chosen_on - reported_on
    return Gap(chosen_on, reported_on, optimism, (optimism + crossed_on - crossed_reported) / 2)
