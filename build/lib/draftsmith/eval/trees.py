"""Static trees from position records: the exact τ of any tree, and the best tree of every size.

Verification follows the target's own text, so one pass that ranks it at every position tells what any tree of top-ranked
children would have accepted there; nothing is decoded again.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from draftsmith.eval.records import PositionRecord

Path = tuple[int, ...]
Price = Callable[[int, int], float]  # nodes with the root, depth -> what a round takes over a plain one


def tau(records: Sequence[PositionRecord], paths: Sequence[Path]) -> float:
    """Exact τ of the tree of rank paths `paths`: the rounds that real decoding would take along each text, counted."""
    tree = frozenset(tuple(path) for path in paths)
    tokens = rounds = 0
    for record in records:
        ranks = record.ranks.tolist()
        at = 0
        while at < len(ranks):
            step = 1 + _accepted(ranks[at], tree)
            tokens += min(step, len(ranks) - at)
            rounds += 1
            at += step
    return tokens / rounds


def grow(records: Sequence[PositionRecord], most: int, depth: int | None = None) -> list[Path]:
    """Rank paths in the order in which best-first growth adds them, `most` at the most, none deeper than `depth`; every prefix of the
    list is a tree.

    τ is a sum over nodes of the chance that the node is on the accepted path, and a child is never likelier than its parent; so
    the likeliest nodes are the optimal tree of each size, what dynamic programming over subtrees finds too. (Cai et al. 2024, §2.3.3,
    assume independent heads, Chen et al. 2024, Sequoia, independent ranks; these are joint counts.)
    """
    counts: Counter[Path] = Counter()
    for record in records:
        for ranks in record.ranks.tolist():
            deepest = next((k for k, rank in enumerate(ranks) if rank < 0), len(ranks))
            counts.update(tuple(ranks[: k + 1]) for k in range(min(deepest, depth or deepest)))
    # Sorting by count keeps parents first; length and rank break ties.
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:most]


def choose(records: Sequence[PositionRecord], price: Price, most: int) -> list[Path]:
    """The tree, of at most `most` nodes with the root, that maximises τ over the price of its round on `records`.

    An empty tree (no drafting) is an answer too.
    """
    best = best_by_nodes(records, price, most, sizes(most))
    return max([[], *best.values()], key=lambda paths: value(records, paths, price))


def best_by_nodes(
    records: Sequence[PositionRecord], price: Price, most: int, wanted: Sequence[int] = (2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
) -> dict[int, list[Path]]:
    """For each of the wanted sizes up to `most` (root included, where there are as many nodes) the tree of the best depth."""
    deepest = max((record.ranks.shape[1] for record in records), default=0)
    found: dict[int, list[Path]] = {}
    for depth in range(1, deepest + 1):
        order = grow(records, most - 1, depth)
        for size in wanted:
            if 1 < size <= min(most, len(order) + 1):
                paths = order[: size - 1]
                if size not in found or value(records, paths, price) > value(records, found[size], price):
                    found[size] = paths
    return found


def value(records: Sequence[PositionRecord], paths: Sequence[Path], price: Price) -> float:
    """τ over the price of a round: tokens per plain round's time."""
    return tau(records, paths) / price(len(paths) + 1, max(map(len, paths), default=0))


def sizes(most: int) -> list[int]:
    """Tree sizes worth trying up to `most`, the root included: every one at first, then in steps of about a sixth."""
    tried = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    return [size for size in tried if size < most] + [most]


def _accepted(ranks: list[int], tree: frozenset[Path]) -> int:
    for depth in range(len(ranks), 0, -1):
        if tuple(ranks[:depth]) in tree:
            return depth
    return 0
