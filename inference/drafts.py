"""Draft trees made on the host: the trie of some continuations, the tree of a table of successors, and the drafters that propose such trees.

Letters: B rows · N tree nodes with the root · K draft depth. A continuation is a run of tokens that may follow the last committed token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import torch

from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import NodeOutput, RoundContext, Target
from draftsmith.inference.expand import TreeSpec
from draftsmith.inference.tree import DraftTree, Path, StaticTree
from draftsmith.inference.verify import Verdict

__all__ = ["Draft", "HostDrafter", "merge_continuations", "tree_of_successors"]


@dataclass(slots=True)
class Draft:
    """The nodes of one slot's tree after the root, the leftmost chain first.

    Attributes:
        tokens: of each node.
        parents: node index of each node's parent; 0 is the root.
        score: sum of the nodes' probabilities, the expected number of accepted nodes.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0

    def accepted(self, text: Sequence[int]) -> int:
        """How many nodes are accepted where the target continues with `text`."""
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True), 1)}
        node = depth = 0
        while depth < len(text) and (node := children.get((node, text[depth]), -1)) > 0:
            depth += 1
        return depth


def merge_continuations(
    continuations: list[list[int]], tree_spec: TreeSpec, paths: frozenset[Path] | None, budget: int, min_probability: float = 0.0
) -> Draft:
    """The trie of the continuations, cut to the tree spec and to a number of nodes.

    A node's probability is the share of continuations that pass through it. The likeliest nodes are kept, of equals those met first.
    Siblings are ranked by count, of equals the more recent first.

    Args:
        continuations: the most recent first.
        tree_spec: limits the ranks.
        paths: the rank paths of a static tree; None for a dynamic tree.
        budget: most nodes after the root.
        min_probability: a less likely node is left out.
    """
    total, score, serial = len(continuations), 0, 0
    heap: list[tuple[int, int, int, Path, int, list[list[int]]]] = []
    nodes: list[tuple[int, int, bool]] = []  # token, parent, whether off the leftmost chain
    path: Path = ()
    while True:
        level, node = len(path), len(nodes)
        groups: dict[int, list[list[int]]] = {}
        for continuation in continuations:
            if level < len(continuation):
                groups.setdefault(continuation[level], []).append(continuation)
        by_count = sorted(groups.items(), key=lambda item: -len(item[1]))
        for rank, (token, group) in enumerate(by_count[: tree_spec.width]):
            child = (*path, rank)
            if len(group) / total >= min_probability and (paths is None or child in paths):
                heappush(heap, (-len(group), serial, node, child, token, group))
                serial += 1
        if not heap or len(nodes) == budget:
            break
        _, _, parent, path, token, continuations = heappop(heap)
        nodes.append((token, parent, any(path)))
        score += len(continuations)
    return _in_order(nodes, score / total)


def tree_of_successors(
    token: int,
    successors: Callable[[int], Sequence[tuple[int, float]]],
    tree_spec: TreeSpec,
    paths: frozenset[Path] | None,
    budget: int,
    depth: int,
) -> Draft:
    """The tree after `token` where each node's children are the successors of its token, cut to the tree spec and to a number of nodes.

    A node's probability is that of its path. The likeliest nodes are kept, of equals those met first.

    Args:
        token: of the root.
        successors: of a token: (token, probability), distinct, the likeliest first.
        tree_spec, paths, budget: as for `merge_continuations`.
        depth: deepest level.
    """
    score, serial = 0.0, 0
    heap: list[tuple[float, int, int, Path, int]] = []
    nodes: list[tuple[int, int, bool]] = []  # as in `merge_continuations`
    path: Path = ()
    probability = 1.0
    while True:
        for rank, (child, share) in enumerate(successors(token)[: tree_spec.width] if len(path) < depth else ()):
            if paths is None or (*path, rank) in paths:
                heappush(heap, (-probability * share, serial, len(nodes), (*path, rank), child))
                serial += 1
        if not heap or len(nodes) == budget:
            return _in_order(nodes, score)
        negative, _, parent, path, token = heappop(heap)
        probability = -negative
        nodes.append((token, parent, any(path)))
        score += probability


def _in_order(nodes: list[tuple[int, int, bool]], score: float) -> Draft:
    """(token, parent, whether off the leftmost chain) of each node -> the draft with the leftmost chain first."""
    order = sorted(range(1, len(nodes) + 1), key=lambda node: nodes[node - 1][2])
    new_index = {0: 0} | {node: new for new, node in enumerate(order, 1)}
    return Draft([nodes[node - 1][0] for node in order], [new_index[nodes[node - 1][1]] for node in order], score)


def forget(drafter: Any) -> None:
    """Have a drafter that remembers requests forget those since it was opened, so that what is measured next is not its memory of it."""
    if getattr(drafter, "remembers", False):
        drafter.forget()


class HostDrafter:
    """The common part of drafters that work on the host, so that `propose` cannot be captured in a graph: the text of each slot so far, and
    the tree of the slots' drafts. A subclass says what the draft of a slot is.

    Attributes:
        tree_spec: of the trees; another one counts from the next `bind` on.
        depth_limit: greatest depth of a tree spec for this drafter.
        remembers: whether its drafts depend on earlier requests.
    """

    method = ""
    depth_limit = 64
    capturable = False
    taps: tuple[int, ...] = ()
    remembers = False

    def __init__(self, tree_spec: TreeSpec) -> None:
        self.tree_spec = tree_spec
        self._texts: dict[int, list[int]] = {}  # by slot
        self._paths: frozenset[Path] | None = None

    @property
    def max_nodes(self) -> int:
        return self.tree_spec.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree_spec.max_depth

    def bind(self, target: Target, slots: int, context: int) -> None:
        self._texts = {}
        self._paths = frozenset(self.tree_spec.paths) if isinstance(self.tree_spec, StaticTree) else None

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        for slot, prompt in zip(slots, prompts, strict=True):
            self._texts[slot] = list(prompt)

    def propose(self, round: RoundContext) -> DraftTree:
        return self.tree_of(round, [self.draft(slot, round.depth) for slot in round.slots])

    def draft(self, slot: int, depth: int) -> Draft:
        """What `propose` drafts for a slot, at most `depth` levels."""
        return self._draft(slot, min(depth, self.max_depth))

    def tree_of(self, round: RoundContext, drafts: list[Draft]) -> DraftTree:
        """The tree of the drafts of a round's slots. N is the size of the largest: 1 where no slot has a draft."""
        texts = [self._texts[slot] for slot in round.slots]
        sizes = [1 + len(draft.tokens) for draft in drafts]
        nodes = max(sizes)
        if nodes == 1:
            return DraftTree.root(round.last_tokens)
        if len(drafts) == 1:
            return DraftTree.from_lists([texts[0][-1], *drafts[0].tokens], (-1, *drafts[0].parents), round.last_tokens.device)
        tokens: list[int] = []
        parents: list[int] = []
        for text, draft, size in zip(texts, drafts, sizes, strict=True):
            padding = [0] * (nodes - size)
            tokens += [text[-1], *draft.tokens, *padding]
            parents += [-1, *draft.parents, *padding]
        # One transfer to the device for all three.
        packed, cells = torch.tensor(tokens + parents + sizes, device=round.last_tokens.device), len(tokens)
        return DraftTree.build(packed[:cells].view(-1, nodes), packed[cells : 2 * cells].view(-1, nodes), packed[2 * cells :])

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            self._texts[slot] += result.tokens

    def drop(self, slots: list[int]) -> None:
        for slot in slots:
            self._texts.pop(slot, None)

    def forget(self) -> None:
        """Forget what requests taught it since it was opened."""

    def resumable(self, slot: int, count: int) -> int:
        return count

    def keep(self, slots: list[int]) -> TreeCache | None:
        """A text is soon read again."""
        self.drop(slots)

    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        self.start(slots, prompts, out)

    def _draft(self, slot: int, depth: int) -> Draft:
        """The draft after the text of `slot`, no deeper than `depth`."""
        raise NotImplementedError
