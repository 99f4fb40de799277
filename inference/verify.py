"""The rule that keeps decoding lossless: one draw y at each node; a child that equals y is accepted, else y is the correction.

Letters: B rows · N tree nodes with the root · V vocabulary · K draft depth · P = min(K+1, N) path entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.sampler import Sampling, gumbel, warp
from draftsmith.inference.tree import DraftTree

__all__ = ["Verdict", "draw", "verify", "walk"]


@dataclass(slots=True)
class Verdict:
    """What was kept: path [B,P] int64 (path[0] = 0, −1 padded) · length [B] = 1 + accepted nodes = tokens emitted = KV rows
    kept, 0 for an idle row · next_token [B], the last token emitted: correction or bonus, the next round's root."""

    path: Tensor
    length: Tensor
    next_token: Tensor


def draw(logits: Tensor, depth: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Tensor:
    """logits [B,N,V], depth [B,N], request [B], position [B] (of the root) -> y [B,N], the target's token at every node.

    A node of depth d draws the token of absolute index position + d + 1. Siblings share their noise, which is made once per
    depth: [B,K+1,V], not [B,N,V].
    """
    if sampling.greedy:
        return logits.argmax(-1)
    levels = torch.arange(max_depth + 1, device=logits.device)
    index = position[:, None] + 1 + levels
    noise = gumbel(sampling.seed, request[:, None].expand_as(index), index, logits.shape[-1])
    if logits.shape[1] > 1:
        first = torch.arange(0, index.numel(), index.shape[1], device=logits.device)[:, None]
        noise = noise.flatten(0, 1).index_select(0, (depth + first).flatten()).view_as(logits)  # whole rows: a gather is slower
    else:
        noise = noise[:, :1]
    return (warp(logits, sampling) + noise).argmax(-1)


def walk(tree: DraftTree, y: Tensor, max_depth: int | None = None) -> tuple[Tensor, Tensor]:
    """Follow y [B,N] from the root: (path [B,P], length [B]). Of equal siblings the first is taken. No loop, no host sync.

    max_depth: K, an upper bound on the depth of the trees; N − 1 where it is not known.
    """
    rows, nodes = y.shape
    if nodes == 1:
        length = tree.size.clamp(max=1)
        return (length - 1)[:, None], length
    width = nodes if max_depth is None else min(max_depth + 1, nodes)
    index = torch.arange(nodes, device=y.device)
    match = y.gather(1, tree.parents.clamp(min=0)) == tree.tokens
    # One product instead of a descent: on the walk is who matches, as all its ancestors do, and has no earlier twin among
    # their siblings (of two matching siblings, both carry y of the parent; the first counts).
    reached = (tree.route() @ match.float()[:, :, None])[:, :, 0] == tree.depth
    kept = reached & (index < tree.size[:, None])
    # Kept nodes form one path, one per depth; the others are written to a column past the end.
    slot = torch.where(kept, tree.depth, width)
    path = y.new_full((rows, width + 1), -1).scatter_(1, slot, index.expand(rows, -1))[:, :width]
    return path, kept.sum(-1)


def verify(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int | None = None) -> Verdict:
    """logits [B,N,V] of the tree's nodes, request [B] and position [B] (absolute index of the root) int64 -> Verdict.

    Lossless for every tree: y ~ p at each visited node, whatever its children are; the emitted tokens are the draws of plain
    sampling with the same key. No host sync.
    """
    depth = tree.tokens.shape[1] - 1 if max_depth is None else max_depth
    return judge(tree, draw(logits, tree.depth, sampling, request, position, depth), depth)


def judge(tree: DraftTree, y: Tensor, max_depth: int | None = None) -> Verdict:
    """The verdict from draws y [B,N]: the walk, and y at the last kept node."""
    path, length = walk(tree, y, max_depth)
    if y.shape[1] == 1:
        return Verdict(path, length, y[:, 0])
    last = path.amax(1, keepdim=True).clamp_(min=0)  # parents come first, so the deepest kept node has the largest index
    return Verdict(path, length, y.gather(1, last)[:, 0])
