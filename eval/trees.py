"""Static trees from position records: the exact τ of any tree, and the best tree of every size.

Verification follows the target's own text, so one pass that ranks it at every position tells what any tree of top-ranked
children would have accepted there; nothing is decoded again.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from draftsmith.eval.records import PositionRecord

Path = tuple[int, ...]


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


def grow(records: Sequence[PositionRecord], most: int) -> list[Path]:
    """Rank paths in the order in which best-first growth adds them, `most` at the most; every prefix of the list is a tree.

    τ is a sum over nodes of the chance that the node is on the accepted path, so adding the likeliest node whose parent is
    there is optimal for each size (reference: Cai et al. 2024, §2.3.3, who assume independent heads; these are joint counts).
    """
    counts: Counter[Path] = Counter()
    for record in records:
        for ranks in record.ranks.tolist():
            depth = next((k for k, rank in enumerate(ranks) if rank < 0), len(ranks))
            counts.update(tuple(ranks[: k + 1]) for k in range(depth))
    # A child is never likelier than its parent, so sorting by count keeps parents first; length and rank break ties.
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:most]


def choose(records: Sequence[PositionRecord], cost: Callable[[int], float], most: int) -> list[Path]:
    """The tree, of at most `most` nodes with the root, that maximises τ/c(N) on `records`.

    `cost(N)` is c(N), what a round of N nodes takes over one of a single node. An empty tree (no drafting) is an answer too.
    """
    order = grow(records, most - 1)
    best = max(sizes(len(order) + 1), key=lambda size: tau(records, order[: size - 1]) / cost(size))
    return order[: best - 1]


def sizes(most: int) -> list[int]:
    """Tree sizes worth trying up to `most`, the root included: every one at first, then in steps of about a sixth."""
    tried = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    return [size for size in tried if size < most] + [most]


def _accepted(ranks: list[int], tree: frozenset[Path]) -> int:
    for depth in range(len(ranks), 0, -1):
        if tuple(ranks[:depth]) in tree:
            return depth
    return 0
