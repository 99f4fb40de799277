"""One walk for every verification rule: from the root into the first child that the rule accepts, until there is none.

A rule (`draftsmith.inference.rules`) says of every node whether it is accepted if its parent is, and which token is emitted if the walk ends
there. P = min(K+1, N) is the number of path entries.
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
    """The result of one slot's round, on the host.

    Attributes:
        length: the verdict's length, 1 + accepted nodes.
        size: the size of the tree.
        depth: the depth of the tree.
        in_place: whether the path is 0, 1, 2, …, so that no K/V has to move.
        tokens: the tokens emitted.
    """

    length: int
    size: int
    depth: int
    in_place: bool
    tokens: list[int]


@dataclass(slots=True)
class Verdict:
    """What was accepted of the trees of a round.

    Attributes:
        path: int64 [B,P], the accepted nodes; path[0] = 0, padded with −1.
        length: int64 [B], 1 + accepted nodes = tokens emitted = K/V rows kept; 0 for an idle row.
        next_token: int64 [B], the last token emitted (correction or bonus), which is the next round's root.
    """

    path: Tensor
    length: Tensor
    next_token: Tensor
    _host_results: list[HostResult] | None = field(default=None, repr=False)

    def on_host(self, tree: DraftTree) -> list[HostResult]:
        """The result of each row, on the host. The first call makes the round's one transfer; later calls return the same list."""
        if self._host_results is None:
            self._host_results = _transfer(tree, self)
        return self._host_results


def _transfer(tree: DraftTree, verdict: Verdict) -> list[HostResult]:
    return unpack_results(pack_results(tree, verdict).tolist())


def pack_results(tree: DraftTree, verdict: Verdict) -> Tensor:
    """All that the host learns of a round in one tensor, for one transfer: [B,3] for trees of a root alone, else [B,4+2P]."""
    columns = (verdict.length[:, None], tree.size[:, None], verdict.next_token[:, None])
    if verdict.path.shape[1] == 1:
        return torch.cat(columns, 1)
    path_tokens = tree.tokens.gather(1, verdict.path.clamp(min=0))
    return torch.cat((*columns, tree.deepest(), verdict.path, path_tokens), 1)


def unpack_results(rows: list[list[int]]) -> list[HostResult]:
    """The inverse of `pack_results`, on the host."""
    results = []
    for length, size, next_token, *rest in rows:
        if not rest:
            results.append(HostResult(length, size, 0, True, [next_token]))
            continue
        depth, width = rest[0], len(rest) // 2
        path, path_tokens = rest[1 : width + 1], rest[width + 1 :]
        in_place = path[:length] == list(range(length))
        results.append(HostResult(length, size, depth, in_place, path_tokens[1:length] + [next_token]))
    return results


def walk(tree: DraftTree, accepted: Tensor, max_depth: int | None = None) -> tuple[Tensor, Tensor]:
    """Descend from the root into the first accepted child. No loop, no host sync.

    Args:
        tree: the trees.
        accepted: bool [B,N], whether each node is accepted if its parent is.
        max_depth: K, an upper bound of the trees' depth; N − 1 if it is not known.

    Returns:
        (path [B,P], length [B]), as in `Verdict`.
    """
    rows, nodes = accepted.shape
    if nodes == 1:
        length = tree.size.clamp(max=1)
        return (length - 1)[:, None], length
    width = nodes if max_depth is None else min(max_depth + 1, nodes)
    index = indices(nodes, accepted.device)
    # One matrix product in place of a descent: a node is on the walk if it and all its ancestors are accepted, and none of these has an
    # accepted sibling before it.
    reached = (tree.walk_matrix() @ accepted.float()[:, :, None])[:, :, 0] == tree.depth
    on_path = reached if tree.full else reached & (index < tree.size[:, None])
    # Nodes on the walk form one path, one per depth; all others are written to a column past the end.
    column = torch.where(on_path, tree.depth, width)
    path = index.new_full((rows, width + 1), -1).scatter_(1, column, index.expand(rows, -1))[:, :width]
    return path, on_path.sum(-1)


def judge(tree: DraftTree, accepted: Tensor, token: Tensor, max_depth: int | None = None) -> Verdict:
    """The verdict from a rule's decisions, accepted [B,N] and token [B,N]: the walk, and the token of its last node."""
    path, length = walk(tree, accepted, max_depth)
    if token.shape[1] == 1:
        return Verdict(path, length, token[:, 0])
    last = path.amax(1, keepdim=True).clamp_(min=0)  # parents come first, so the deepest node of the path has the largest index
    return Verdict(path, length, token.gather(1, last)[:, 0])


def verify(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int | None = None) -> Verdict:
    """Verify trees by `sampling.rule`. No host sync.

    Args:
        tree: the trees.
        logits: [B,N,V], the target's at each node.
        sampling: the rule, temperature, filters and seed.
        request: int64 [B], the noise key of each row.
        position: int64 [B], the absolute position of each row's last committed token.
        max_depth: K, an upper bound of the trees' depth; N − 1 if it is not known.
    """
    depth = tree.tokens.shape[1] - 1 if max_depth is None else max_depth
    return judge(tree, *decide(tree, logits, sampling, request, position, depth), depth)
