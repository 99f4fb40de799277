"""Token trees: what a drafter proposes and the target verifies in one forward.

Letters: B rows · N tree nodes with the root · K draft depth · D draft vocabulary · R candidates per depth.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

__all__ = ["DraftTree", "StaticTree", "pack", "unpack"]

Path = tuple[int, ...]


def pack(visible: Tensor) -> Tensor:
    """bool [...,N] -> int64 words [...,⌈N/64⌉]; bit j % 64 of word j // 64 is entry j."""
    size = visible.shape[-1]
    words = (size + 63) // 64
    bits = visible.to(torch.int64)
    if words * 64 != size:
        bits = torch.nn.functional.pad(bits, (0, words * 64 - size))
    # Distinct powers of two: their sum is their OR, bit 63 included (it wraps to the sign).
    return (bits.unflatten(-1, (words, 64)) << torch.arange(64, device=visible.device)).sum(-1)


def unpack(words: Tensor, size: int) -> Tensor:
    """int64 words [...,N,⌈N/64⌉] -> bool [...,N,size], the inverse of `pack`; for a tree size is N.

    Raises:
        ValueError: fewer words than `size` bits need.
    """
    if words.shape[-1] * 64 < size:
        raise ValueError(f"got {words.shape[-1]} words for {size} nodes; expected at least {(size + 63) // 64}; build the tree anew")
    index = torch.arange(size, device=words.device)
    if words.shape[-1] == 1:
        return ((words >> index) & 1).bool()
    return ((words[..., index // 64] >> (index % 64)) & 1).bool()


@lru_cache(512)
def indices(count: int, device: torch.device) -> Tensor:
    """torch.arange(count), made once: in a small model's round such tensors cost more than the arithmetic. Do not write to it."""
    return torch.arange(count, device=device)


@dataclass(slots=True)
class DraftTree:
    """One round's proposal; all tensors are on one device. A padding node counts as a childless child of the root.

    Attributes:
        tokens: [B,N] int64; node 0 is the root, the last committed token, whose KV is not cached yet.
        parents: [B,N] int64, −1 for the root; a parent comes before its children.
        size: [B] int64, nodes of each tree; later nodes are padding. 1 is plain decoding, 0 an idle row.
        depth: [B,N] int64.
        ancestors: [B,N,⌈N/64⌉] int64 words; the bits of a node's ancestors, its own and the root's included.
        q_logits: [B,N,D], the distribution that each node's children were drawn from, siblings in draw order; None where they were not drawn.
        replacement: the children were drawn with replacement.
        width: an upper bound, known to the host, of the children of a node.
        full: the host knows that no row has padding.
        order: [B,N] int64, each node's place by likelihood, 0 of the root; of dynamic trees that plain torch made, else None.
        survival: [B,N], the drafter's probability that a node is accepted, 1 of the root and never above its parent's, known before the node's
            token was drawn; None where the round did not ask for it, or the drafter cannot say.
    """

    tokens: Tensor
    parents: Tensor
    size: Tensor
    depth: Tensor
    ancestors: Tensor
    q_logits: Tensor | None = None
    _visible: Tensor | None = field(default=None, repr=False)
    _walk_matrix: Tensor | None = field(default=None, repr=False)
    _deepest: Tensor | None = field(default=None, repr=False)
    replacement: bool = False
    width: int = -1
    full: bool = False
    order: Tensor | None = None
    survival: Tensor | None = None

    def __post_init__(self) -> None:
        if self.width < 0:
            self.width = self.tokens.shape[1] - 1

    @classmethod
    def build(cls, tokens: Tensor, parents: Tensor, size: Tensor, q_logits: Tensor | None = None) -> "DraftTree":
        """Derive depth and ancestors from parents by pointer doubling, ⌈log2 N⌉ steps, without a host sync.

        Args:
            tokens: [B,N] int64.
            parents: [B,N] int64.
            size: [B] int64.
            q_logits: [B,N,D] or None.

        Raises:
            ValueError: shapes that do not fit.
        """
        if tokens.shape != parents.shape or size.shape != tokens.shape[:1]:
            raise ValueError(
                f"got tokens {list(tokens.shape)}, parents {list(parents.shape)}, size {list(size.shape)}; "
                "expected [B,N], [B,N], [B]; pad the shorter trees"
            )
        nodes = tokens.shape[1]
        index = indices(nodes, tokens.device)
        # Padding hangs on the root, so that its position stays near and its row of the mask is never empty.
        pointer = torch.where(index < size[:, None], parents, 0).clamp_(min=0)  # [B,N]; the root points to itself
        visible = torch.eye(nodes, dtype=torch.bool, device=tokens.device).expand(tokens.shape[0], nodes, nodes)
        for _ in range((nodes - 1).bit_length()):
            visible = visible | visible.gather(1, pointer[:, :, None].expand(-1, -1, nodes))
            pointer = pointer.gather(1, pointer)
        return cls(tokens, parents, size, visible.sum(-1) - 1, pack(visible), q_logits, visible)

    @classmethod
    def from_lists(cls, tokens: list[int], parents: tuple[int, ...], device: torch.device) -> "DraftTree":
        """A tree of one row from the tokens and parents of its N nodes. Trees with equal parents share all other tensors."""
        return replace(_tree_of_parents(parents, device), tokens=torch.tensor([tokens], device=device))

    @classmethod
    def root(cls, tokens: Tensor) -> "DraftTree":
        """tokens [B] -> trees of size 1: plain decoding."""
        rows = tokens.shape[0]
        zeros, ones = tokens.new_zeros(rows, 1), tokens.new_ones(rows, 1)
        visible = torch.ones(rows, 1, 1, dtype=torch.bool, device=tokens.device)
        return cls(tokens[:, None], zeros - 1, ones[:, 0], zeros, ones[:, :, None], None, visible, full=True)

    def visible(self) -> Tensor:
        """Ancestors as bool [B,N,N]: node i attends to node j. Computed once."""
        if self._visible is None:
            self._visible = unpack(self.ancestors, self.tokens.shape[1])
        return self._visible

    def walk_matrix(self) -> Tensor:
        """float32 [B,N,N] for `verify.walk`, computed once.

        Entry (i,j) is +1 where j is node i or an ancestor of it (the root apart), and −1 where j is an earlier sibling of such a node. With
        m = 1 at the accepted nodes, node i is on the walk if and only if (walk_matrix · m)[i] = depth[i].
        """
        if self._walk_matrix is None:
            line = self.visible().float()
            self._walk_matrix = line - line @ self._earlier().float()
            self._walk_matrix[:, :, 0].zero_()
        return self._walk_matrix

    def deepest(self) -> Tensor:
        """int64 [B,1]: the depth of each tree without its padding. Computed once."""
        if self._deepest is None:
            self._deepest = (self.depth * (indices(self.tokens.shape[1], self.depth.device) < self.size[:, None])).amax(1, keepdim=True)
        return self._deepest

    def sibling(self) -> Tensor:
        """int64 [B,N]: how many siblings come before each node."""
        return self._earlier().sum(-1)

    def _earlier(self) -> Tensor:
        """bool [B,N,N]: j is a sibling before i."""
        index = indices(self.tokens.shape[1], self.tokens.device)
        return (self.parents[:, :, None] == self.parents[:, None, :]) & (index[:, None] > index)

    def survive(self, scores: Tensor) -> None:
        """Set `survival` by scores [B,N], the log-probability of each node if its parent is accepted; that of the root is not read."""
        scores = scores.float().clamp(min=-1e3, max=0.0)
        scores[:, 0] = 0.0
        total, parents = scores, self.parents.expand_as(self.tokens).clamp(min=0)
        for depth in range(2, int(self.deepest().max()) + 1):  # level by level, so that rounding lifts no child above its parent
            total = torch.where(self.depth == depth, scores + total.gather(1, parents), total)
        self.survival = total.exp()

    def only(self, mask: Tensor) -> "DraftTree":
        """This tree where mask [B] bool is set, elsewhere the root alone; all tensors keep their shapes."""
        return replace(self, size=torch.where(mask, self.size, 1), full=False, _deepest=None)

    def to(self, device: torch.device) -> "DraftTree":
        """The same tree on `device`."""
        if self.tokens.device == device:
            return self
        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})

    def validate(self) -> None:
        """Check every promise of the class. Waits for the device: for tests and for trees from outside.

        Raises:
            ValueError: a broken promise; the message names the first row and node.
        """
        rows, nodes = self.tokens.shape
        size, parents = self.size.tolist(), self.parents.tolist()
        for b in range(rows):
            if not 0 <= size[b] <= nodes:
                raise ValueError(f"row {b}: got size {size[b]}, expected 0..{nodes}; fix the drafter's size")
            if size[b] and parents[b][0] != -1:
                raise ValueError(f"row {b}: got parent {parents[b][0]} for node 0, expected -1; node 0 is the root")
            for i in range(1, size[b]):
                if not 0 <= parents[b][i] < i:
                    raise ValueError(f"row {b}, node {i}: got parent {parents[b][i]}, expected 0..{i - 1}; put parents before children")
        fresh = DraftTree.build(self.tokens, self.parents, self.size)
        real = torch.arange(nodes, device=self.tokens.device) < self.size[:, None]
        for name in ("depth", "ancestors"):
            wrong = (getattr(self, name) != getattr(fresh, name)).view(rows, nodes, -1).any(-1) & real
            if wrong.any():
                b, i = wrong.nonzero()[0].tolist()
                raise ValueError(f"row {b}, node {i}: got {name} that its parents do not give; make the tree with DraftTree.build")


@lru_cache(1024)
def _tree_of_parents(parents: tuple[int, ...], device: torch.device) -> DraftTree:
    rows = torch.tensor([parents], device=device)
    tree = DraftTree.build(torch.zeros_like(rows), rows, torch.full_like(rows[:, 0], len(parents)))
    tree.walk_matrix()
    tree.deepest()
    tree.full = True
    return tree


@dataclass(frozen=True, slots=True)
class StaticLevel:
    """The inner nodes (nodes with children) of one depth of a static tree, and where their children are.

    Attributes:
        nodes: how many inner nodes there are.
        inner: [nodes] int64, their node indices.
        count: candidates needed of each.
        children: [·] int64, the node indices of all their children.
        candidates: [·] int64, for each of the children its index into the candidates [nodes·count].
        visible: [nodes,E+nodes] bool; which inner nodes so far (E of the levels before, without the root, and these) are ancestors or self.
        all_visible: every entry of `visible` is true.
        parent_index: [nodes] int64, the indices of their parents among the inner nodes of the level before; 0 for the root.
    """

    nodes: int
    inner: Tensor
    count: int
    children: Tensor
    candidates: Tensor
    visible: Tensor
    all_visible: bool
    parent_index: Tensor


class StaticTree:
    """A static tree: the nodes are known beforehand, only the tokens change from round to round.

    The leftmost chain (0), (0,0), … comes first, then the rest by depth, so that parents precede children and the commonest accepted path
    needs no KV move.

    Attributes:
        parents: [N] int64, −1 for the root.
        depth: [N] int64.
        rank: [N] int64, rank among the candidates of the parent, −1 for the root.
        ancestors: [N,⌈N/64⌉] int64 words.
        num_nodes: N, the root included.
        max_depth: K.
        paths: the rank paths of nodes 1..N−1, in node order.
        width: candidates needed per depth.
        fanout: most children of a node.
    """

    def __init__(self, paths: tuple[Path, ...]) -> None:
        node = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
        self.paths = paths
        self.num_nodes = len(node)
        self.max_depth = max((len(path) for path in paths), default=0)
        self.parents = torch.tensor([-1] + [node[path[:-1]] for path in paths])
        self.depth = torch.tensor([0] + [len(path) for path in paths])
        self.rank = torch.tensor([-1] + [path[-1] for path in paths])
        self.width = max((path[-1] + 1 for path in paths), default=0)
        self.fanout = max(Counter(path[:-1] for path in paths).values(), default=0)
        built = DraftTree.build(torch.zeros_like(self.parents)[None], self.parents[None], torch.tensor([self.num_nodes]))
        self.ancestors = built.ancestors[0]
        self._visible = built.visible()[0]
        self._walk_matrix = built.walk_matrix()[0]
        self._deepest = torch.tensor([self.max_depth])
        self._expanded: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._cut: dict[int, StaticTree] = {}
        self._levels: list[StaticLevel] | None = None
        self._without_gaps: StaticTree | None = None

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> "StaticTree":
        """The tree of these rank paths. (0,1) is rank 0 at depth 1, then rank 1 at depth 2; the root is not listed.

        Raises:
            ValueError: a path that is empty, negative, listed twice, or whose prefix is missing.
        """
        given = [tuple(int(rank) for rank in path) for path in paths]
        seen: set[Path] = set()
        for path in given:
            if not path or min(path) < 0 or path in seen:
                raise ValueError(f"got path {path}; expected distinct, non-empty paths of ranks >= 0; remove or correct it")
            seen.add(path)
        for path in given:
            if len(path) > 1 and path[:-1] not in seen:
                raise ValueError(f"got path {path} without its prefix {path[:-1]}; expected every prefix listed; add {path[:-1]}")
        return cls(tuple(sorted(given, key=lambda path: (any(path), len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> "StaticTree":
        """A chain of `depth` nodes under the root."""
        return cls.from_paths([(0,) * k for k in range(1, depth + 1)])

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> "StaticTree":
        """Every path of ranks below widths[k] at depth k+1."""
        return cls.from_paths([path for k in range(1, len(widths) + 1) for path in product(*(range(width) for width in widths[:k]))])

    def levels(self) -> list[StaticLevel]:
        """The levels of depths 0 … K−1, for drafters that need a node's token before they can give its children. Computed once."""
        if self._levels is None:
            node = {(): 0} | {path: i for i, path in enumerate(self.paths, 1)}
            device = self.parents.device
            self._levels, encoded, before = [], list[Path](), list[Path]()
            for depth in range(self.max_depth):
                children = [path for path in self.paths if len(path) == depth + 1]
                inner = sorted({path[:-1] for path in children}, key=node.__getitem__)
                count = max(path[-1] for path in children) + 1
                encoded += inner if depth else []
                is_ancestor = [[path[: len(ancestor)] == ancestor for ancestor in encoded] for path in inner]
                visible = torch.tensor(is_ancestor, device=device).view(len(inner), len(encoded)).bool()
                level = StaticLevel(
                    nodes=len(inner),
                    inner=torch.tensor([node[path] for path in inner], device=device),
                    count=count,
                    children=torch.tensor([node[path] for path in children], device=device),
                    candidates=torch.tensor([inner.index(path[:-1]) * count + path[-1] for path in children], device=device),
                    visible=visible,
                    all_visible=bool(visible.all()),
                    parent_index=torch.tensor([before.index(path[:-1]) for path in inner if path], device=device, dtype=torch.int64),
                )
                self._levels.append(level)
                before = inner
        return self._levels

    def cut(self, depth: int) -> "StaticTree":
        """The tree without its nodes below `depth`. Computed once for each depth."""
        if depth >= self.max_depth:
            return self
        if depth not in self._cut:
            self._cut[depth] = StaticTree(tuple(path for path in self.paths if len(path) <= depth)).to(self.parents.device)
        return self._cut[depth]

    def to(self, device: torch.device | str) -> "StaticTree":
        """The same tree with its tensors on `device`."""
        if self.parents.device == torch.device(device):
            return self
        moved = StaticTree(self.paths)
        moved.parents, moved.depth, moved.rank = self.parents.to(device), self.depth.to(device), self.rank.to(device)
        moved.ancestors, moved._visible = self.ancestors.to(device), self._visible.to(device)
        moved._walk_matrix, moved._deepest = self._walk_matrix.to(device), self._deepest.to(device)
        return moved

    def without_gaps(self) -> "StaticTree":
        """The same tree with siblings ranked 0, 1, 2, … Where children are drawn, a rank is the order of the draw. Computed once."""
        if self._without_gaps is None:
            new: dict[Path, Path] = {(): ()}
            children: Counter[Path] = Counter()
            for path in sorted(self.paths, key=lambda path: (len(path), path)):
                new[path] = (*new[path[:-1]], children[path[:-1]])
                children[path[:-1]] += 1
            unchanged = set(new.values()) - {()} == set(self.paths)
            self._without_gaps = self if unchanged else StaticTree.from_paths([new[path] for path in self.paths]).to(self.parents.device)
        return self._without_gaps

    def tree(self, last_tokens: Tensor, children: Tensor) -> DraftTree:
        """The draft tree whose node of rank r at depth k+1 has the token children[b,k,r], whatever its parent.

        Args:
            last_tokens: [B] int64, the tokens of the roots.
            children: [B,K,R] int64.

        Raises:
            ValueError: fewer depths or ranks in `children` than the tree uses.
        """
        if children.shape[1] < self.max_depth or children.shape[2] < self.width:
            raise ValueError(
                f"got children for {children.shape[1]} depths and {children.shape[2]} ranks; expected at least "
                f"{self.max_depth} and {self.width}; ask the drafter for more candidates or use a smaller tree"
            )
        index = self._expand(last_tokens.shape[0], children.shape[2])[0]
        return self.fill(torch.cat((last_tokens[:, None], children.flatten(1).index_select(1, index)), 1), ranks=children.shape[2])

    def fill(self, tokens: Tensor, q_logits: Tensor | None = None, *, ranks: int = 1, replacement: bool = False) -> DraftTree:
        """The draft tree with these tokens [B,N] in node order, the root's included; for candidates that depend on the parent."""
        _, parents, size, *derived = self._expand(tokens.shape[0], ranks)
        depth, ancestors, visible, walk_matrix, deepest = derived
        return DraftTree(tokens, parents, size, depth, ancestors, q_logits, visible, walk_matrix, deepest, replacement, self.fanout, True)

    def _expand(self, rows: int, ranks: int) -> tuple[Tensor, ...]:
        """The tree's tensors for `rows` rows, computed once; before them the index [N−1] into children.flatten(1) with `ranks` ranks."""
        if (rows, ranks) not in self._expanded:
            index = (self.depth[1:] - 1) * ranks + self.rank[1:]
            size = torch.full((rows,), self.num_nodes, dtype=torch.int64, device=self.parents.device)
            shared = (self.depth, self.ancestors, self._visible, self._walk_matrix, self._deepest)
            expanded = (tensor.expand(rows, *tensor.shape) for tensor in shared)
            self._expanded[rows, ranks] = (index, self.parents.expand(rows, -1), size, *expanded)
        return self._expanded[rows, ranks]
