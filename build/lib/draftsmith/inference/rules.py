"""The verification rules. Each says of all nodes at once: accepted, given that the parent is (and that no sibling before it was), and
the token emitted if the walk ends there.

Lossless: one draw (with any children), rejection. Lossy, and labelled so wherever their numbers appear: typical, membership.
Letters: B rows · N tree nodes with the root · V vocabulary · D draft vocabulary · K draft depth.
"""

import torch
from torch import Tensor

from draftsmith.inference.sampler import PURPOSE_TOKEN, Sampling, gumbel, uniform, warp
from draftsmith.inference.tree import DraftTree

__all__ = ["decide", "draw", "match", "membership", "odds", "rejection", "typical"]

Decision = tuple[Tensor, Tensor]  # accepted [B,N] bool, token [B,N] int64


def decide(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Decision:
    """logits [B,N,V], request [B], position [B] (of the root) -> the decision of `sampling.rule`.

    Where nothing was sampled, rejection is the target-sample rule: for a fixed set of children both accept with Σ p over the set,
    which is the most that any lossless rule can.
    """
    if not sampling.greedy:
        if sampling.rule.startswith("rejection") and tree.q_logits is not None:
            return rejection(tree, logits, sampling, request, position, max_depth)
        if sampling.rule == "typical":
            return typical(tree, logits, sampling, request, position, max_depth)
        if sampling.rule == "membership":
            return membership(tree, logits, sampling, request, position, max_depth)
    y = draw(logits, tree.depth, sampling, request, position, max_depth)
    return match(tree, y), y


def match(tree: DraftTree, y: Tensor) -> Tensor:
    """One draw: y [B,N] ~ p at every node; accepted is who carries y of its parent. y where the walk ends is the correction."""
    return y.gather(1, tree.parents.clamp(min=0)) == tree.tokens


def draw(logits: Tensor, depth: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Tensor:
    """logits [B,N,V], depth [B,N], request [B], position [B] (of the root) -> y [B,N], the target's token at every node.

    A node of depth d draws the token of absolute index position + d + 1.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    return (warp(logits, sampling) + _noise(logits, depth, sampling, request, position, max_depth)).argmax(-1)


def _noise(logits: Tensor, depth: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Tensor:
    """[B,N,V], made once per depth ([B,K+1,V]) since siblings share it."""
    levels = torch.arange(max_depth + 1, device=logits.device)
    index = position[:, None] + 1 + levels
    noise = gumbel(sampling.seed, request[:, None].expand_as(index), index, logits.shape[-1], PURPOSE_TOKEN)
    if logits.shape[1] == 1:
        return noise[:, :1]
    first = torch.arange(0, index.numel(), index.shape[1], device=logits.device)[:, None]
    return noise.flatten(0, 1).index_select(0, (depth + first).flatten()).view_as(logits)  # whole rows: a gather is slower


def rejection(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Decision:
    """Recursive rejection sampling of children drawn from q (Miao et al. 2023, §4.3); with one child each, speculative sampling
    (Leviathan et al. 2023; Chen et al. 2023). The coin of a child is keyed by its position and its place among its siblings.
    """
    assert tree.q_logits is not None, "decide asks"
    missing = logits.shape[-1] - tree.q_logits.shape[-1]
    q = torch.nn.functional.pad(tree.q_logits.float().softmax(-1), (0, missing))
    chance, rest = odds(tree, warp(logits, sampling).softmax(-1), q)
    index = position[:, None] + tree.depth
    coin = uniform(sampling.seed, request[:, None].expand_as(index), index, tree.sibling())
    noise = _noise(logits, tree.depth, sampling, request, position, max_depth)
    return coin < chance, (rest.log() + noise).argmax(-1)


def odds(tree: DraftTree, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """p, q [B,N,V], laws of the target and of the drafter at each node -> (chance [B,N], rest [B,N,V]).

    chance: of accepting a node, given that its parent was and that its siblings before it were not: min(1, p(x)/q(x)), where each
    sibling rejected before replaced p by norm(max(p − q, 0)) and, drawn without replacement, left q. rest: p after all children.
    """
    nodes, last = tree.tokens.shape[1], tree.tokens.shape[1]
    index = torch.arange(nodes, device=p.device)
    real = (index > 0) & (index < tree.size[:, None])
    order, parents = tree.sibling(), tree.parents.clamp(min=0)
    chance = torch.zeros_like(p[:, :, 0])
    for number in range(tree.width):
        here = real & (order == number)
        slot = torch.where(here, parents, last)  # one child with this number at each node; the others go past the end
        x = torch.zeros_like(slot[:, :1]).expand(-1, nodes + 1).scatter(1, slot, tree.tokens)[:, :nodes, None]  # [B,N,1]
        has = torch.zeros_like(here[:, :1]).expand(-1, nodes + 1).scatter(1, slot, here)[:, :nodes, None]
        p_x, q_x = p.gather(2, x), q.gather(2, x)
        has = has & (q_x > 0)  # q cannot have drawn the others: there were fewer tokens than children
        ratio = torch.where(has, p_x / q_x, 0.0).clamp(max=1.0)[:, :, 0]
        chance = torch.where(here, ratio.gather(1, parents), chance)
        rest = (p - q).clamp(min=0.0)
        total = rest.sum(-1, keepdim=True)
        p = torch.where(has & (total > 0), rest / total, p)
        if not tree.replacement:
            left = q.scatter(2, x, 0.0)
            total = left.sum(-1, keepdim=True)
            q = torch.where(has, torch.where(total > 0, left / total, 0.0), q)
    return chance, p


def typical(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Decision:
    """Lossy. Accepted is who has p(x) > min(ε, δ·exp(−H(p))), p with temperature (Cai et al. 2024, §2.3.1); the longest path."""
    log_p = (logits.float() / sampling.temperature).log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    least = (sampling.delta * (-entropy).exp()).clamp(max=sampling.epsilon)  # [B,N]
    accepted = _of_parent(tree, p) > least.gather(1, tree.parents.clamp(min=0))
    return _longest(tree, accepted), draw(logits, tree.depth, sampling, request, position, max_depth)


def membership(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Decision:
    """Lossy. Accepted is every token that the target's top-k, top-p and min-p keep; the longest path."""
    kept = warp(logits, sampling) > -torch.inf
    return _longest(tree, _of_parent(tree, kept)), draw(logits, tree.depth, sampling, request, position, max_depth)


def _of_parent(tree: DraftTree, values: Tensor) -> Tensor:
    """values [B,N,V] -> [B,N]: what each node's parent says of the node's token."""
    rows = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[rows, tree.parents.clamp(min=0), tree.tokens]


def _longest(tree: DraftTree, accepted: Tensor) -> Tensor:
    """Of several accepted paths keep the longest alone, the first of equals."""
    index = torch.arange(accepted.shape[1], device=accepted.device)
    barred = ((~accepted) | (index >= tree.size[:, None])) & (index > 0)
    alive = (tree.visible().float() @ barred.float()[:, :, None])[:, :, 0] == 0
    best = torch.where(alive, tree.depth, -1).argmax(1)
    return tree.visible()[torch.arange(len(best), device=best.device), best]
