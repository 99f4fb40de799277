"""Static trees from position records: the exact τ of any tree, and the best tree of each size.

Decoding follows the target's own text. So the ranks that a drafter gives this text, at every position, say what any tree of top-ranked
children would have accepted there; nothing is decoded again.
"""

from collections import Counter
from collections.abc import Sequence

from draftsmith.eval.cost import RoundCost
from draftsmith.eval.records import PositionRecord

Path = tuple[int, ...]


def tau(records: Sequence[PositionRecord], paths: Sequence[Path]) -> float:
    """Exact τ of the tree with these rank paths: it counts the rounds that real decoding would take along each text."""
    tree = frozenset(tuple(path) for path in paths)
    tokens = rounds = 0
    for record in records:
        ranks = record.ranks.tolist()
        position = 0
        while position < len(ranks):
            step = 1 + _accepted(ranks[position], tree)
            tokens += min(step, len(ranks) - position)
            rounds += 1
            position += step
    return tokens / rounds


def best_first_paths(records: Sequence[PositionRecord], max_paths: int, max_depth: int | None = None) -> list[Path]:
    """Rank paths, the most frequently accepted first, at most `max_paths` of them and none deeper than `max_depth`.

    Every prefix of the list is a tree, and the optimal one of its size: τ is the sum over nodes of the probability that the node is on the
    accepted path, and no child is likelier than its parent. Dynamic programming over subtrees finds the same trees. (Cai et al. 2024,
    §2.3.3, assume independent heads, and Chen et al. 2024, Sequoia, independent ranks; these are joint counts.)
    """
    counts: Counter[Path] = Counter()
    for record in records:
        for ranks in record.ranks.tolist():
            deepest = next((k for k, rank in enumerate(ranks) if rank < 0), len(ranks))
            counts.update(tuple(ranks[: k + 1]) for k in range(min(deepest, max_depth or deepest)))
    # Sorting by count keeps parents first; length and rank break ties.
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:max_paths]


def best_tree(records: Sequence[PositionRecord], cost: RoundCost, max_nodes: int) -> list[Path]:
    """The tree of at most `max_nodes` nodes, the root included, with the highest τ over the relative cost of its round.

    It is empty, that is nothing is drafted, where no tree pays.
    """
    best = best_tree_by_nodes(records, cost, max_nodes, candidate_sizes(max_nodes))
    return max([[], *best.values()], key=lambda paths: tau_over_cost(records, paths, cost))


def best_tree_by_nodes(
    records: Sequence[PositionRecord], cost: RoundCost, max_nodes: int, sizes: Sequence[int] = (2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
) -> dict[int, list[Path]]:
    """For each size up to `max_nodes` (nodes with the root) that the records allow: the tree of the depth with the highest τ over cost."""
    deepest = max((record.ranks.shape[1] for record in records), default=0)
    best: dict[int, list[Path]] = {}
    for depth in range(1, deepest + 1):
        order = best_first_paths(records, max_nodes - 1, depth)
        for size in sizes:
            if 1 < size <= min(max_nodes, len(order) + 1):
                paths = order[: size - 1]
                if size not in best or tau_over_cost(records, paths, cost) > tau_over_cost(records, best[size], cost):
                    best[size] = paths
    return best


def tau_over_cost(records: Sequence[PositionRecord], paths: Sequence[Path], cost: RoundCost) -> float:
    """Predicted speedup of a tree: τ over the relative cost of its round."""
    return tau(records, paths) / cost(len(paths) + 1, max(map(len, paths), default=0))


def candidate_sizes(max_nodes: int) -> list[int]:
    """Tree sizes to try up to `max_nodes`, the root included: all up to 8, then in steps of about a sixth."""
    sizes = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    return [size for size in sizes if size < max_nodes] + [max_nodes]


def _accepted(ranks: list[int], tree: frozenset[Path]) -> int:
    for depth in range(len(ranks), 0, -1):
        if tuple(ranks[:depth]) in tree:
            return depth
    return 0
