"""One walk for every rule: from the root, into the first child that the rule accepts, until there is none.

A rule (`draftsmith.inference.rules`) says of every node whether it is accepted if its parent is, and which token is emitted
where the walk ends. Letters: B rows · N tree nodes with the root · V vocabulary · K draft depth · P = min(K+1, N) path entries.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.inference.rules import decide
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, indices

__all__ = ["HostResult", "Verdict", "judge", "pack_results", "unpack_results", "verify", "walk"]


@dataclass(slots=True)
class HostResult:
    """What the host learns of one row: verdict length, size and depth of its tree, whether the path is 0, 1, 2, …, the tokens emitted."""

    length: int
    size: int
    depth: int
    in_place: bool
    tokens: list[int]


@dataclass(slots=True)
class Verdict:
    """What was kept: path [B,P] int64 (path[0] = 0, −1 padded) · length [B] = 1 + accepted nodes = tokens emitted = KV rows
    kept, 0 for an idle row · next_token [B], the last token emitted: correction or bonus, the next round's root."""

    path: Tensor
    length: Tensor
    next_token: Tensor
    _told: list[HostResult] | None = field(default=None, repr=False)

    def on_host(self, tree: DraftTree) -> list[HostResult]:
        """The same for the host, one entry per row: the round's one transfer, made when first asked for and kept."""
        if self._told is None:
            self._told = _transfer(tree, self)
        return self._told


def _transfer(tree: DraftTree, verdict: Verdict) -> list[HostResult]:
    return unpack_results(pack_results(tree, verdict).tolist())


def pack_results(tree: DraftTree, verdict: Verdict) -> Tensor:
    """All that the host is told of a round, [B,3] for trees of a root alone, else [B,4+2P]: one tensor, so that one transfer takes it."""
    heads = (verdict.length[:, None], tree.size[:, None], verdict.next_token[:, None])
    if verdict.path.shape[1] == 1:
        return torch.cat(heads, 1)
    kept = tree.tokens.gather(1, verdict.path.clamp(min=0))
    return torch.cat((*heads, tree.deepest(), verdict.path, kept), 1)


def unpack_results(rows: list[list[int]]) -> list[HostResult]:
    """The inverse of `packed`, on the host."""
    told = []
    for length, size, token, *rest in rows:
        if not rest:
            told.append(HostResult(length, size, 0, True, [token]))
            continue
        depth, width = rest[0], len(rest) // 2
        path, kept = rest[1 : width + 1], rest[width + 1 :]
        told.append(HostResult(length, size, depth, path[:length] == list(range(length)), kept[1:length] + [token]))
    return told


def walk(tree: DraftTree, accepted: Tensor, max_depth: int | None = None) -> tuple[Tensor, Tensor]:
    """Descend from the root into the first accepted child, accepted [B,N] bool: (path [B,P], length [B]). No loop, no host sync.

    max_depth: K, an upper bound on the depth of the trees; N − 1 where it is not known.
    """
    rows, nodes = accepted.shape
    if nodes == 1:
        length = tree.size.clamp(max=1)
        return (length - 1)[:, None], length
    width = nodes if max_depth is None else min(max_depth + 1, nodes)
    index = indices(nodes, accepted.device)
    # One product instead of a descent: on the walk is who is accepted, as all its ancestors are, and has no accepted sibling
    # before it nor before any of them.
    reached = (tree.route() @ accepted.float()[:, :, None])[:, :, 0] == tree.depth
    kept = reached if tree.full else reached & (index < tree.size[:, None])
    # Kept nodes form one path, one per depth; the others are written to a column past the end.
    slot = torch.where(kept, tree.depth, width)
    path = index.new_full((rows, width + 1), -1).scatter_(1, slot, index.expand(rows, -1))[:, :width]
    return path, kept.sum(-1)


def judge(tree: DraftTree, accepted: Tensor, token: Tensor, max_depth: int | None = None) -> Verdict:
    """The verdict from a rule's decisions accepted [B,N] and token [B,N]: the walk, and the token of the last kept node."""
    path, length = walk(tree, accepted, max_depth)
    if token.shape[1] == 1:
        return Verdict(path, length, token[:, 0])
    last = path.amax(1, keepdim=True).clamp_(min=0)  # parents come first, so the deepest kept node has the largest index
    return Verdict(path, length, token.gather(1, last)[:, 0])


def verify(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int | None = None) -> Verdict:
    """logits [B,N,V] of the tree's nodes, request [B] and position [B] (absolute index of the root) int64 -> Verdict, by
    `sampling.rule`. No host sync."""
    depth = tree.tokens.shape[1] - 1 if max_depth is None else max_depth
    return judge(tree, *decide(tree, logits, sampling, request, position, depth), depth)
