"""Builds draft trees from a drafter's candidates, level by level, on the device: static trees, and dynamic trees that keep the N best nodes.

The drafter gives candidates for the nodes of the current level; `add_level` stores them and returns the next level, which the drafter
encodes; `finish` returns the tree.

Letters: B rows · N tree nodes with the root · K draft depth · D draft vocabulary · F nodes of the current level · R candidates of each ·
E nodes encoded before the level.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.kernels import active
from draftsmith.inference.reading import describe
from draftsmith.inference.sampler import PURPOSE_DRAFT, PURPOSE_TOKEN, best_token, gumbel, warp
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.tree_limits import LIMITS, MOST_PATHS, MOST_RANK, MOST_RANKED, MOST_STORED

__all__ = [
    "DynamicTree",
    "DynamicExpansion",
    "CurrentLevel",
    "Expansion",
    "FusedExpansion",
    "TreeSpec",
    "StaticExpansion",
    "check_rule",
    "choose",
    "expand",
    "ranked",
    "parse_tree_spec",
    "tree_config",
]


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """The limits of a dynamic tree (Li et al. 2024, EAGLE-2, §4).

    On each level the `width` likeliest nodes get `width` children each; of all nodes the likeliest are kept. The likelihood of a node is the
    drafter's, of the path from the root. Where one forward gives all levels, `width` only bounds the nodes: see `level_heads.best_first`.

    Attributes:
        depth: number of levels, K.
        width: nodes that are expanded on a level, and children of each.
        nodes: most nodes of the finished tree, the root included.

    Raises:
        ValueError: a depth or width below 1, or fewer than 2 nodes.
    """

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        if self.depth < 1 or self.width < 1 or self.nodes < 2:
            raise ValueError(
                f"got a dynamic tree of depth {self.depth}, width {self.width}, {self.nodes} nodes; expected 1, 1 and 2 at least"
            )

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def num_nodes(self) -> int:
        return min(self.nodes, self.candidates)

    @property
    def candidates(self) -> int:
        """Nodes that are scored, the root included."""
        return 1 + self.width + (self.depth - 1) * self.width**2

    def cut(self, depth: int) -> "DynamicTree":
        return self if depth >= self.depth else replace(self, depth=depth)

    def to(self, device: torch.device | str) -> "DynamicTree":
        return self


TreeSpec = StaticTree | DynamicTree


def parse_tree_spec(tree: Sequence[Sequence[int]] | Mapping[str, int] | None) -> TreeSpec:
    """A tree as configs and recipes write it -> the tree spec: rank paths are a static tree, {depth, width, nodes} a dynamic tree.

    Raises:
        ValueError: neither of the two, or one larger than `tree_limits` allows.
    """
    if isinstance(tree, Mapping):
        if set(tree) != set(LIMITS):
            raise ValueError(f"tree: got a dynamic tree with {', '.join(map(repr, tree)) or 'nothing'}; expected depth, width and nodes")
        for name, (low, high) in LIMITS.items():
            if type(tree[name]) is not int or not low <= tree[name] <= high:
                raise ValueError(f"tree: {name} is {describe(tree[name])}; expected an integer, {low} to {high}")
        return DynamicTree(**tree)
    if not isinstance(tree, list | tuple | None):
        raise ValueError(f"tree: got {describe(tree)}; expected a list of rank paths, or depth, width and nodes")
    if len(tree or ()) > MOST_PATHS:
        raise ValueError(f"tree: got {len(tree or ()):,} nodes; expected at most {MOST_PATHS:,}")
    for path in tree or ():
        if not isinstance(path, list | tuple):
            raise ValueError(f"tree: a rank path is {describe(path)}; expected a list of integers")
        if len(path) > LIMITS["depth"][1]:
            raise ValueError(f"tree: got a path {len(path):,} deep; expected at most {LIMITS['depth'][1]}")
        for rank in path:
            if type(rank) is not int or rank > MOST_RANK:
                raise ValueError(f"tree: a rank is {describe(rank)}; expected an integer, 0 to {MOST_RANK}")
    try:
        return StaticTree.from_paths(tree or ())
    except ValueError as error:
        raise ValueError(f"tree: {error}") from None


def tree_config(tree_spec: TreeSpec) -> list[list[int]] | dict[str, int]:
    """The inverse of `parse_tree_spec`, ready for JSON."""
    return asdict(tree_spec) if isinstance(tree_spec, DynamicTree) else [list(path) for path in tree_spec.paths]


@dataclass(slots=True)
class CurrentLevel:
    """The nodes that the drafter encodes next; all have one depth.

    Attributes:
        tokens: [B,F] int64.
        parent_index: [B,F] int64, the index of each node's parent among the nodes of the level before.
        depth: depth of these nodes in the tree.
        visible: [B,F,E+F] bool, which encoded nodes each node attends to; its own entry is among the last F.
        key_depth: [E+F] int64, the depths of the encoded nodes and of these.
        all_visible: the host knows that every entry of `visible` is true.
    """

    tokens: Tensor
    parent_index: Tensor
    depth: int
    visible: Tensor
    key_depth: Tensor
    all_visible: bool


class StaticExpansion:
    """Fills a static tree with tokens.

    Attributes:
        scored: whether `add_level` needs the candidates' log-probabilities.
        count: candidates that the next `add_level` needs of each node.
    """

    def __init__(self, tree_spec: StaticTree, round: RoundContext) -> None:
        self.tree_spec = tree_spec.without_gaps() if round.sampling.children in ("drawn", "replaced") else tree_spec
        self.levels = self.tree_spec.levels()
        self.replacement = round.sampling.children == "replaced"
        self.depth = 0  # levels that have been added
        self.tokens = round.last_tokens.new_zeros(round.last_tokens.shape[0], self.tree_spec.num_nodes)
        self.tokens[:, 0] = round.last_tokens
        self.q_logits: Tensor | None = None
        self.scored = round.scored
        self.scores = torch.zeros_like(self.tokens, dtype=torch.float32) if self.scored else None  # of each node, if its parent is accepted
        self.encoded_index = torch.full((self.tree_spec.num_nodes,), -1, device=round.last_tokens.device)

    @property
    def count(self) -> int:
        return self.levels[self.depth].count

    def add_level(self, ids: Tensor, scores: Tensor | None = None, q_logits: Tensor | None = None) -> CurrentLevel | None:
        """Store the candidates of the current level's nodes.

        Args:
            ids: [B,F,R] int64, best first, or in the order in which they were drawn.
            scores: [B,F,R], their log-probabilities, where the round is scored.
            q_logits: [B,F,D], the distribution that the candidates were drawn from; None where they were not drawn.

        Returns:
            The next level, or None where no node has children.

        Raises:
            ValueError: fewer candidates than the tree has ranks on this level.
        """
        level = self.levels[self.depth]
        if ids.shape[-1] < level.count:
            raise ValueError(
                f"tree: got rank {level.count - 1} at depth {self.depth + 1}, where a node has {ids.shape[-1]} candidates, the draft "
                "vocabulary; expected lower ranks"
            )
        self.tokens[:, level.children] = ids.flatten(1)[:, level.candidates]
        if self.scores is not None and scores is not None:
            self.scores[:, level.children] = scores.float().flatten(1)[:, level.candidates]
        if q_logits is not None:
            if self.q_logits is None:
                self.q_logits = q_logits.new_zeros(*self.tokens.shape, q_logits.shape[-1])
            self.q_logits[:, level.inner] = q_logits
        self.depth += 1
        if self.depth == len(self.levels):
            return None
        level, rows = self.levels[self.depth], len(self.tokens)
        encoded = level.visible.shape[1]  # this level included
        self.encoded_index[level.inner] = torch.arange(encoded - level.nodes, encoded, device=self.encoded_index.device)
        inner = torch.cat([level.inner for level in self.levels[1 : self.depth + 1]])
        return CurrentLevel(
            self.tokens[:, level.inner],
            level.parent_index.expand(rows, -1),
            self.depth,
            level.visible.expand(rows, -1, -1),
            self.tree_spec.depth[inner],
            level.all_visible,
        )

    def finish(self) -> tuple[DraftTree, Tensor]:
        """The tree of the levels added so far, and each node's index [B,N] among the encoded nodes, −1 where it was not encoded."""
        tree_spec, tokens, q_logits, encoded_index = self.tree_spec.cut(self.depth), self.tokens, self.q_logits, self.encoded_index
        scores = self.scores
        if tree_spec is not self.tree_spec:  # the remaining nodes keep their order
            remaining = (self.tree_spec.depth <= self.depth).nonzero()[:, 0]
            tokens, encoded_index = tokens[:, remaining], encoded_index[remaining]
            q_logits = None if q_logits is None else q_logits[:, remaining]
            scores = None if scores is None else scores[:, remaining]
        tree = tree_spec.fill(tokens, q_logits, replacement=self.replacement)
        if scores is not None:
            tree.survive(scores)
        return tree, encoded_index.expand(len(tokens), -1)


def likeliest(tokens: Tensor, parents: Tensor, scores: Tensor, on_chain: Tensor, nodes: int) -> tuple[DraftTree, Tensor]:
    """The trees of the likeliest stored nodes.

    Args:
        tokens, parents: [B,M] int64 of the stored nodes, the root first, a parent before its children.
        scores: [B,M], the log-probabilities of their paths; none is above its parent's.
        on_chain: [B,M] bool, whether a node is on the leftmost chain.
        nodes: N, the root included; all stored nodes where there are fewer.

    Returns:
        The trees, and the indices [B,N] of their nodes among the stored ones.
    """
    stored = tokens.shape[1]
    nodes = min(nodes, stored)
    # Among equal scores the earlier node wins: a parent comes before its children.
    best = scores[:, 1:].sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1] + 1
    # The leftmost chain comes first, then the rest in stored order, level by level.
    order = (best + stored * (~on_chain.gather(1, best))).argsort(1)
    best = torch.cat((torch.zeros_like(best[:, :1]), best.gather(1, order)), 1)
    new_index = torch.zeros_like(tokens).scatter_(1, best, torch.arange(nodes, device=best.device).expand_as(best))
    parent = parents.gather(1, best)
    parent = torch.where(parent < 0, -1, new_index.gather(1, parent.clamp(min=0)))
    tree = DraftTree.build(tokens.gather(1, best), parent, torch.full_like(best[:, 0], nodes))
    tree.order = torch.cat((torch.zeros_like(order[:, :1]), order + 1), 1)
    tree.survival = scores.gather(1, best).exp()
    return tree, best


class DynamicExpansion:
    """Expands a dynamic tree in plain torch: the CPU path, and the reference of `FusedExpansion`.

    A child is never likelier than its parent and is stored after it, so the N best nodes form a tree.
    """

    scored = True

    def __init__(self, tree_spec: DynamicTree, round: RoundContext) -> None:
        check_rule(round.sampling.rule if not round.sampling.greedy else "", tree_spec)
        self.tree_spec, self.count, self.depth, self.encoded = tree_spec, tree_spec.width, 0, 0
        root = round.last_tokens[:, None]
        # All stored nodes, a tensor [B,·] per level. on_chain: whether a node is on the leftmost chain.
        self.tokens, self.parents, self.encoded_index = [root], [torch.full_like(root, -1)], [torch.full_like(root, -1)]
        self.scores, self.on_chain = [torch.zeros_like(root, dtype=torch.float32)], [torch.ones_like(root, dtype=torch.bool)]
        # The nodes of the current level: their indices among the stored nodes, their scores, and whether they are on the leftmost chain.
        self.level_index, self.level_score, self.level_on_chain = torch.zeros_like(root), self.scores[0], self.on_chain[0]
        self.visible = torch.zeros(*root.shape, 0, dtype=torch.bool, device=root.device)
        self.key_depth = root.new_zeros(0)

    def add_level(self, ids: Tensor, scores: Tensor | None = None, q_logits: Tensor | None = None) -> CurrentLevel | None:
        """Store the candidates of the current level's nodes, and select the `width` best of them.

        Args:
            ids: [B,F,R] int64, best first.
            scores: [B,F,R], their log-probabilities; required.
            q_logits: not used by a dynamic tree.

        Returns:
            The next level, best node first, or None where the tree has its full depth.
        """
        assert scores is not None
        stored = sum(tokens.shape[1] for tokens in self.tokens)
        rows, nodes, count = ids.shape
        # Rounding may give a log-probability above 0, and so a child a better score than its parent.
        total = (self.level_score[:, :, None] + scores.float().clamp(max=0.0)).flatten(1)
        first = torch.arange(count, device=ids.device) == 0
        on_chain = (self.level_on_chain[:, :, None] & first).flatten(1)
        encoded_index = torch.full_like(total, -1, dtype=torch.int64)
        self.tokens.append(ids.flatten(1))
        self.parents.append(self.level_index.repeat_interleave(count, 1))
        self.scores.append(total)
        self.on_chain.append(on_chain)
        self.encoded_index.append(encoded_index)
        self.depth += 1
        if self.depth == self.tree_spec.depth:
            return None
        width = min(self.tree_spec.width, nodes * count)
        best = total.topk(width, 1).indices  # [B,width]
        encoded_index.scatter_(1, best, torch.arange(self.encoded, self.encoded + width, device=ids.device).expand(rows, -1))
        self.level_index, self.level_score, self.level_on_chain = best + stored, total.gather(1, best), on_chain.gather(1, best)
        parent_index = best // count
        ancestors = self.visible.gather(1, parent_index[:, :, None].expand(-1, -1, self.encoded))
        itself = torch.eye(width, dtype=torch.bool, device=ids.device).expand(rows, -1, -1)
        self.visible = torch.cat((ancestors, itself), 2)
        self.key_depth = torch.cat((self.key_depth, torch.full((width,), self.depth, device=ids.device)))
        self.encoded += width
        tokens = self.tokens[-1].gather(1, best)
        return CurrentLevel(tokens, parent_index, self.depth, self.visible, self.key_depth, self.tree_spec.width == 1)

    def finish(self) -> tuple[DraftTree, Tensor]:
        """The tree of the N best nodes, and each node's index [B,N] among the encoded nodes, −1 where it was not encoded."""
        tokens, parents, scores, on_chain = (torch.cat(parts, 1) for parts in (self.tokens, self.parents, self.scores, self.on_chain))
        tree, best = likeliest(tokens, parents, scores, on_chain, self.tree_spec.nodes)
        return tree, torch.cat(self.encoded_index, 1).gather(1, best)


class FusedExpansion(DynamicExpansion):
    """DynamicExpansion by kernels: one launch per level and one for the tree; equal to DynamicExpansion to the bit."""

    def __init__(self, tree_spec: DynamicTree, round: RoundContext) -> None:
        from draftsmith.inference.kernels import expand as kernels

        super().__init__(tree_spec, round)
        self.kernels, self.store, self.stored = kernels, kernels.CandidateStore.rooted(round.last_tokens, tree_spec.candidates), 1

    def add_level(self, ids: Tensor, scores: Tensor | None = None, q_logits: Tensor | None = None) -> CurrentLevel | None:
        assert scores is not None
        self.depth += 1
        candidates = ids.shape[1] * ids.shape[2]
        width = 0 if self.depth == self.tree_spec.depth else min(self.tree_spec.width, candidates)
        self.level_index, self.visible, tokens, parent_index = self.kernels.add_level(
            self.store, self.level_index, self.visible, ids.contiguous(), scores.contiguous(), self.stored, width
        )
        self.stored += candidates
        if not width:
            return None
        self.key_depth = torch.cat((self.key_depth, self.key_depth.new_full((width,), self.depth)))
        return CurrentLevel(tokens, parent_index, self.depth, self.visible, self.key_depth, self.tree_spec.width == 1)

    def finish(self) -> tuple[DraftTree, Tensor]:
        return self.kernels.rerank(self.store.upto(self.stored), self.tree_spec.nodes, self.depth)


Expansion = StaticExpansion | DynamicExpansion


def check_rule(rule: str, tree_spec: TreeSpec) -> None:
    """Check that the rule can verify such trees.

    Raises:
        ValueError: a rejection rule, whose children are drawn, with a dynamic tree.
    """
    if rule.startswith("rejection") and isinstance(tree_spec, DynamicTree):
        raise ValueError(f"got rule {rule} with a dynamic tree, where what is kept depends on what was drawn; give a static tree")


def expand(tree_spec: TreeSpec, round: RoundContext) -> Expansion:
    """Begin a round's trees: the expansion of `tree_spec`, no deeper than `round.depth`; by kernels where they are active and hold such trees."""
    tree_spec = tree_spec.cut(round.depth)
    if isinstance(tree_spec, StaticTree):
        return StaticExpansion(tree_spec, round)
    fused = active() and tree_spec.width <= MOST_RANKED and tree_spec.candidates <= MOST_STORED
    return FusedExpansion(tree_spec, round) if fused else DynamicExpansion(tree_spec, round)


def choose(logits: Tensor, count: int, round: RoundContext, index: Tensor, scored: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Choose the candidates of nodes, as `round.sampling.children` says.

    Args:
        logits: [B,F,D], the drafter's logits after each node.
        count: candidates of a node, R; at most D are given.
        round: the round that is drafted for.
        index: [B,F] int64, absolute index in the sequence of the candidates.
        scored: whether log-probabilities are wanted. The kernel gives them always. Where the round is scored, drawn ids have those of the
            likeliest tokens instead, which say nothing of what was drawn.

    Returns:
        Ids [B,F,R], their log-probabilities [B,F,R] or None, and the logits [B,F,D] of the distribution that the ids were drawn from, or
        None where they were not drawn.
    """
    sampling, children, count = round.sampling, round.sampling.children, min(count, logits.shape[-1])
    if children == "top" and active() and count <= MOST_RANKED:
        from draftsmith.inference.kernels.expand import best

        return *best(logits, count), None
    if children == "top":
        ids = ranked(logits, count)
    else:
        logits = warp(logits, sampling)
        request = round.noise_keys[:, None].expand_as(index)
        purpose = PURPOSE_TOKEN if children == "shared-noise" else PURPOSE_DRAFT
        # Where survival decides what is verified, it must say nothing of draws elsewhere: then each node of a level has noise of its own.
        own_noise = round.scored and children != "shared-noise"
        node = torch.arange(index.shape[1], device=index.device).expand_as(index) if own_noise else torch.zeros_like(index)
        if children == "replaced":
            noises = (gumbel(sampling.seed, request, index, logits.shape[-1], purpose, node * count + copy) for copy in range(count))
            ids = torch.stack([best_token(logits + noise) for noise in noises], -1)
        else:  # the best of Gumbel-perturbed log-probabilities are draws without replacement, in order (Kool et al. 2019)
            ids = (logits + gumbel(sampling.seed, request, index, logits.shape[-1], purpose, node)).topk(count, -1).indices
    drawn, scores = children in ("drawn", "replaced"), None
    if scored:
        log_q = logits.float().log_softmax(-1)
        scores = log_q.topk(count, -1).values if drawn and round.scored else log_q.gather(-1, ids)
    return ids, scores, logits if drawn else None


def ranked(logits: Tensor, count: int) -> Tensor:
    """The `count` best entries of logits [...,D], best first -> int64 [...,count]. The order of equal logits is open.

    On the CPU torch.topk reads D far slower than a maximum does, so groups are ranked by their maxima first: the best
    `count` entries are in the best `count` groups. (D = 128k, count 4: 0.5 ms against 3.4.)
    """
    if count == 1:
        return best_token(logits)[..., None]
    group, vocab = 64, logits.shape[-1]
    groups = vocab // group
    if logits.device.type != "cpu" or groups < 4 * count:
        return logits.topk(count, dim=-1).indices
    grouped = logits[..., : groups * group].unflatten(-1, (groups, group))
    best_groups = grouped.amax(-1).topk(count, dim=-1).indices  # [...,count]
    inside = grouped.gather(-2, best_groups[..., None].expand(*best_groups.shape, group)).flatten(-2)  # [...,count*group]
    top = torch.cat((inside, logits[..., groups * group :]), dim=-1).topk(count, dim=-1).indices
    within = best_groups.gather(-1, (top // group).clamp(max=count - 1)) * group + top % group
    return torch.where(top < count * group, within, top - count * group + groups * group)
