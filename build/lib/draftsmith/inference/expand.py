"""From a drafter's laws to a tree, level by level, on the device: static trees, and dynamic ones with the N best nodes kept.

Letters: B rows · N tree nodes with the root · K draft depth · F inner nodes of a level · R candidates of each · V draft vocabulary ·
M stored nodes · E nodes encoded before a level.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.kernels import active
from draftsmith.inference.sampler import PURPOSE_DRAFT, PURPOSE_TOKEN, gumbel, warp
from draftsmith.inference.tree import DraftTree, StaticTree

__all__ = [
    "DynamicTree",
    "DynamicExpansion",
    "CurrentLevel",
    "Growth",
    "TreeSpec",
    "StaticExpansion",
    "check_rule",
    "choose",
    "grow",
    "ranked",
    "parse_tree_spec",
    "tree_config",
]


MOST_RANKED = 16  # candidates of a node that the kernel ranks


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """A dynamic tree (Li et al. 2024, EAGLE-2, §4): of each of K levels the `width` likeliest nodes get `width` children, and of all
    these the likeliest are kept, `nodes` with the root. Likelihood is the drafter's, of the whole path."""

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
        return min(self.nodes, 1 + self.width + (self.depth - 1) * self.width**2)

    def cut(self, depth: int) -> "DynamicTree":
        return self if depth >= self.depth else replace(self, depth=depth)

    def to(self, device: torch.device | str) -> "DynamicTree":
        return self


TreeSpec = StaticTree | DynamicTree


def parse_tree_spec(tree: Sequence[Sequence[int]] | Mapping[str, int] | None) -> TreeSpec:
    """What a config or a recipe says -> the shape: rank paths are a static tree, {depth, width, nodes} a dynamic one.

    Raises:
        ValueError: neither.
    """
    if isinstance(tree, Mapping):
        if set(tree) != {"depth", "width", "nodes"}:
            raise ValueError(f"got a dynamic tree with {sorted(tree)}; expected depth, width and nodes")
        return DynamicTree(**tree)
    return StaticTree.from_paths(tree or [])


def tree_config(shape: TreeSpec) -> list[list[int]] | dict[str, int]:
    """The inverse of `shape_of`, as JSON has it."""
    return asdict(shape) if isinstance(shape, DynamicTree) else [list(path) for path in shape.paths]


@dataclass(slots=True)
class CurrentLevel:
    """The nodes to encode next: tokens [B,F], all of one depth · above [B,F]: the places of their parents among the nodes that
    `extend` was given candidates of · visible [B,F,E+F]: which of the nodes encoded so far, themselves included, they see ·
    key_depth [E+F]: the depths of those · open: all are seen."""

    tokens: Tensor
    above: Tensor
    depth: int
    visible: Tensor
    key_depth: Tensor
    open: bool


class StaticExpansion:
    """Fills a topology. `count` is how many candidates of each inner node the next `extend` wants."""

    scored = False

    def __init__(self, topology: StaticTree, round: RoundContext) -> None:
        topology = topology.closed() if round.sampling.children in ("drawn", "replaced") else topology
        self.topology = topology
        self.levels = topology.levels()
        self.replacement = round.sampling.children == "replaced"
        self.level = 0
        self.tokens = round.last_tokens.new_zeros(round.last_tokens.shape[0], topology.num_nodes)
        self.tokens[:, 0] = round.last_tokens
        self.q_logits: Tensor | None = None
        self.slots = torch.full((topology.num_nodes,), -1, device=round.last_tokens.device)

    @property
    def count(self) -> int:
        return self.levels[self.level].count

    def extend(self, ids: Tensor, scores: Tensor | None = None, q_logits: Tensor | None = None) -> CurrentLevel | None:
        """ids [B,F,R] are the candidates of this level's inner nodes, best (or drawn) first, q_logits [B,F,V] their law where they
        were drawn -> the next level's inner nodes, or None where there are none."""
        level = self.levels[self.level]
        self.tokens[:, level.children] = ids.flatten(1)[:, level.index]
        if q_logits is not None:
            if self.q_logits is None:
                self.q_logits = q_logits.new_zeros(*self.tokens.shape, q_logits.shape[-1])
            self.q_logits[:, level.inner] = q_logits
        self.level += 1
        if self.level == len(self.levels):
            return None
        level, rows = self.levels[self.level], len(self.tokens)
        span = level.visible.shape[1]
        self.slots[level.inner] = torch.arange(span - level.nodes, span, device=self.slots.device)
        inner = torch.cat([level.inner for level in self.levels[1 : self.level + 1]])
        return CurrentLevel(
            self.tokens[:, level.inner],
            level.above.expand(rows, -1),
            self.level,
            level.visible.expand(rows, -1, -1),
            self.topology.depth[inner],
            level.alone,
        )

    def finish(self) -> tuple[DraftTree, Tensor]:
        """The tree of the levels that were filled, and of each node [B,N] the place where it was encoded, −1 where it was not."""
        topology, tokens, q_logits, slots = self.topology.cut(self.level), self.tokens, self.q_logits, self.slots
        if topology is not self.topology:  # which keeps the order of the nodes that stay
            kept = (self.topology.depth <= self.level).nonzero()[:, 0]
            tokens, slots = tokens[:, kept], slots[kept]
            q_logits = None if q_logits is None else q_logits[:, kept]
        return topology.place(tokens, q_logits, replacement=self.replacement), slots.expand(len(tokens), -1)


class DynamicExpansion:
    """Grows a dynamic tree. A child is never likelier than its parent and stored after it, so the N best are a tree."""

    scored = True

    def __init__(self, beam: DynamicTree, round: RoundContext) -> None:
        check_rule(round.sampling.rule if not round.sampling.greedy else "", beam)
        self.beam, self.count, self.level, self.encoded = beam, beam.width, 0, 0
        root = round.last_tokens[:, None]
        self.tokens, self.parents, self.slots = [root], [torch.full_like(root, -1)], [torch.full_like(root, -1)]
        self.scores, self.chain = [torch.zeros_like(root, dtype=torch.float32)], [torch.ones_like(root, dtype=torch.bool)]
        # Of the frontier: place in the store, score, whether on the leftmost chain, ancestors among the encoded.
        self.at, self.score, self.left = torch.zeros_like(root), self.scores[0], self.chain[0]
        self.seen = torch.zeros(*root.shape, 0, dtype=torch.bool, device=root.device)
        self.key_depth = root.new_zeros(0)

    def extend(self, ids: Tensor, scores: Tensor | None = None, q_logits: Tensor | None = None) -> CurrentLevel | None:
        """ids [B,F,R] are the candidates of the frontier's nodes, best first, scores [B,F,R] their log-probabilities -> the next
        frontier, or None where the tree is as deep as it may be."""
        assert scores is not None
        stored = sum(tokens.shape[1] for tokens in self.tokens)
        rows, inner, count = ids.shape
        # Rounding may give a log-probability above 0, and a child above its parent.
        total = (self.score[:, :, None] + scores.float().clamp(max=0.0)).flatten(1)
        first = torch.arange(count, device=ids.device) == 0
        left = (self.left[:, :, None] & first).flatten(1)
        slots = torch.full_like(total, -1, dtype=torch.int64)
        self.tokens.append(ids.flatten(1))
        self.parents.append(self.at.repeat_interleave(count, 1))
        self.scores.append(total)
        self.chain.append(left)
        self.slots.append(slots)
        self.level += 1
        if self.level == self.beam.depth:
            return None
        width = min(self.beam.width, inner * count)
        best = total.topk(width, 1).indices  # [B,W]
        slots.scatter_(1, best, torch.arange(self.encoded, self.encoded + width, device=ids.device).expand(rows, -1))
        self.at, self.score, self.left = best + stored, total.gather(1, best), left.gather(1, best)
        above = self.seen.gather(1, (best // count)[:, :, None].expand(-1, -1, self.encoded))
        own = torch.eye(width, dtype=torch.bool, device=ids.device).expand(rows, -1, -1)
        self.seen = torch.cat((above, own), 2)
        self.key_depth = torch.cat((self.key_depth, torch.full((width,), self.level, device=ids.device)))
        self.encoded += width
        return CurrentLevel(self.tokens[-1].gather(1, best), best // count, self.level, self.seen, self.key_depth, self.beam.width == 1)

    def finish(self) -> tuple[DraftTree, Tensor]:
        """The tree of the N best, and of each node [B,N] the place where it was encoded, −1 where it was not."""
        tokens, parents, scores, chain, slots = (
            torch.cat(parts, 1) for parts in (self.tokens, self.parents, self.scores, self.chain, self.slots)
        )
        stored = tokens.shape[1]
        nodes = min(self.beam.nodes, stored)
        # Of equals the earlier, which is the parent.
        kept = scores[:, 1:].sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1] + 1
        # The leftmost chain first, then as stored, level by level.
        order = (kept + stored * (~chain.gather(1, kept))).argsort(1)
        kept = torch.cat((torch.zeros_like(kept[:, :1]), kept.gather(1, order)), 1)
        place = torch.zeros_like(tokens).scatter_(1, kept, torch.arange(nodes, device=kept.device).expand_as(kept))
        parent = parents.gather(1, kept)
        parent = torch.where(parent < 0, -1, place.gather(1, parent.clamp(min=0)))
        size = torch.full_like(kept[:, 0], nodes)
        return DraftTree.build(tokens.gather(1, kept), parent, size), slots.gather(1, kept)


Growth = StaticExpansion | DynamicExpansion


def check_rule(rule: str, shape: TreeSpec) -> None:
    """Whether the rule can verify such trees.

    Raises:
        ValueError: drawn children in a dynamic tree.
    """
    if rule.startswith("rejection") and isinstance(shape, DynamicTree):
        raise ValueError(f"got rule {rule} with a dynamic tree, where what is kept depends on what was drawn; give a static tree")


def grow(shape: TreeSpec, round: RoundContext) -> Growth:
    """The growth of a tree of this shape, no deeper than asked for."""
    shape = shape.cut(round.depth)
    if not isinstance(shape, DynamicTree):
        return StaticExpansion(shape, round)
    if active():
        from draftsmith.inference.kernels.expand import FusedExpansion

        fused: Any = FusedExpansion  # it is a DynamicExpansion, from a module that imports this one
        return fused(shape, round)
    return DynamicExpansion(shape, round)


def choose(logits: Tensor, count: int, round: RoundContext, index: Tensor, scored: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """logits [B,F,V] for the tokens of absolute index [B,F] -> ids [B,F,R], log-probabilities [B,F,R] if `scored`, and the law
    that ids were drawn from as logits [B,F,V], or None where they were not. As `ask.sampling.children` says."""
    how, kind, count = round.sampling, round.sampling.children, min(count, logits.shape[-1])
    if kind == "top" and active() and count <= MOST_RANKED:
        from draftsmith.inference.kernels.expand import best

        return *best(logits, count), None
    if kind == "top":
        ids = ranked(logits, count)
    else:
        logits = warp(logits, how)
        request = round.noise_keys[:, None].expand_as(index)
        purpose = PURPOSE_TOKEN if kind == "shared-noise" else PURPOSE_DRAFT
        if kind == "replaced":
            noise = (gumbel(how.seed, request, index, logits.shape[-1], purpose, copy) for copy in range(count))
            ids = torch.stack([(logits + one).argmax(-1) for one in noise], -1)
        else:  # the first of Gumbel-perturbed log-laws are draws without replacement, in order (Kool et al. 2019)
            ids = (logits + gumbel(how.seed, request, index, logits.shape[-1], purpose)).topk(count, -1).indices
    scores = logits.float().log_softmax(-1).gather(-1, ids) if scored else None
    return ids, scores, logits if kind in ("drawn", "replaced") else None


def ranked(logits: Tensor, count: int) -> Tensor:
    """The `count` best of logits [...,V], best first -> int64 [...,count].

    On the CPU torch.topk reads V far slower than a maximum does, so groups are ranked by their maxima first: the best
    `count` entries lie in the best `count` groups. (V = 128k, count 4: 0.5 ms against 3.4.)
    """
    if count == 1:
        return logits.argmax(-1, keepdim=True)
    group, vocab = 64, logits.shape[-1]
    groups = vocab // group
    if logits.device.type != "cpu" or groups < 4 * count:
        return logits.topk(count, dim=-1).indices
    whole = logits[..., : groups * group].unflatten(-1, (groups, group))
    best = whole.amax(-1).topk(count, dim=-1).indices  # [...,count]
    inside = whole.gather(-2, best[..., None].expand(*best.shape, group)).flatten(-2)  # [...,count*group]
    found = torch.cat((inside, logits[..., groups * group :]), dim=-1).topk(count, dim=-1).indices
    within = best.gather(-1, (found // group).clamp(max=count - 1)) * group + found % group
    return torch.where(found < count * group, within, found - count * group + groups * group)
