"""The verification rules. A rule decides for all nodes at once whether a node is accepted, given that its parent is and that no earlier
sibling was, and which token is emitted if the walk ends at the node.

Lossless: target-sample matching (for any children), rejection. Lossy, and labelled so wherever their numbers appear: typical, membership.

Letters: B rows · N tree nodes with the root · V vocabulary · K draft depth.
"""

import torch
from torch import Tensor

from draftsmith.inference.sampler import PURPOSE_TOKEN, Sampling, best_token, gumbel, on_host, sample_on_host, uniform, warp
from draftsmith.inference.tree import DraftTree

__all__ = ["acceptance_probability", "decide", "draw", "match", "membership", "rejection", "typical"]

Decision = tuple[Tensor, Tensor]  # accepted [B,N] bool, token [B,N] int64


def decide(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Decision:
    """The decision of `sampling.rule`.

    Children that were not drawn are verified by target-sample matching under the rejection rules too: for fixed children both accept with
    probability Σ p over the children, which is the most that any lossless rule can.

    Args:
        tree: the draft.
        logits: [B,N,V], the target's logits at each node.
        sampling: how tokens are drawn.
        request: [B] int64, noise keys.
        position: [B] int64, absolute index of the root.
        max_depth: K.

    Returns:
        accepted [B,N] bool, token [B,N] int64.
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
    """Target-sample matching: with one draw y [B,N] ~ p at every node, a node is accepted if its token is its parent's y.

    Where the walk ends, y is the correction.
    """
    return y.gather(1, tree.parents.clamp(min=0)) == tree.tokens


def draw(logits: Tensor, depth: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Tensor:
    """The target's token at every node: logits [B,N,V], depth [B,N], request [B], position [B] of the root -> y [B,N].

    A node of depth d draws the token of absolute index position + d + 1.
    """
    if sampling.greedy:
        return best_token(logits)
    scores = warp(logits, sampling)
    # In a tree without filters most tokens can be drawn. Noise for all of them is made once for each depth.
    if on_host(scores) and (sampling.filtered or logits.shape[1] == 1):
        return sample_on_host(scores, sampling.seed, request[:, None].expand_as(depth), position[:, None] + 1 + depth)
    return best_token(scores + _noise(logits, depth, sampling, request, position, max_depth))


def _noise(logits: Tensor, depth: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Tensor:
    """[B,N,V], computed once per depth ([B,K+1,V]) since all nodes of a depth share it."""
    levels = torch.arange(max_depth + 1, device=logits.device)
    index = position[:, None] + 1 + levels
    noise = gumbel(sampling.seed, request[:, None].expand_as(index), index, logits.shape[-1], PURPOSE_TOKEN)
    if logits.shape[1] == 1:
        return noise[:, :1]
    first = torch.arange(0, index.numel(), index.shape[1], device=logits.device)[:, None]
    return noise.flatten(0, 1).index_select(0, (depth + first).flatten()).view_as(logits)  # copies rows: a gather is slower


def rejection(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Decision:
    """Recursive rejection sampling of children drawn from q (Miao et al. 2023, §4.3).

    With one child each it is speculative sampling (Leviathan et al. 2023; Chen et al. 2023). The uniform draw of a child is keyed by its
    position and its rank among its siblings.
    """
    assert tree.q_logits is not None, "decide asks"
    missing = logits.shape[-1] - tree.q_logits.shape[-1]
    q = torch.nn.functional.pad(tree.q_logits.float().softmax(-1), (0, missing))
    probability, residual = acceptance_probability(tree, warp(logits, sampling).softmax(-1), q)
    index = position[:, None] + tree.depth
    draws = uniform(sampling.seed, request[:, None].expand_as(index), index, tree.sibling())
    noise = _noise(logits, tree.depth, sampling, request, position, max_depth)
    return draws < probability, best_token(residual.log() + noise)


def acceptance_probability(tree: DraftTree, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities of recursive rejection sampling.

    A node with token x is accepted with probability min(1, p(x)/q(x)). Each earlier sibling that was rejected has replaced p by
    norm(max(p − q, 0)) and, where children are drawn without replacement, has been removed from q.

    Args:
        tree: the draft.
        p: [B,N,V], the target's distribution at each node.
        q: [B,N,V], the drafter's.

    Returns:
        The probability [B,N] of accepting a node, given that its parent was accepted and that its earlier siblings were not, and the residual
        [B,N,V], which is p at each node after all its children were rejected.
    """
    nodes = tree.tokens.shape[1]
    index = torch.arange(nodes, device=p.device)
    real = (index > 0) & (index < tree.size[:, None])
    order, parents = tree.sibling(), tree.parents.clamp(min=0)
    probability = torch.zeros_like(p[:, :, 0])
    for number in range(tree.width):
        is_nth = real & (order == number)
        slot = torch.where(is_nth, parents, nodes)  # each node has one n-th child; all other nodes write past the end
        x = torch.zeros_like(slot[:, :1]).expand(-1, nodes + 1).scatter(1, slot, tree.tokens)[:, :nodes, None]  # [B,N,1]
        has_child = torch.zeros_like(is_nth[:, :1]).expand(-1, nodes + 1).scatter(1, slot, is_nth)[:, :nodes, None]
        p_x, q_x = p.gather(2, x), q.gather(2, x)
        has_child = has_child & (q_x > 0)  # q cannot have drawn a token of probability 0: there were fewer tokens than children
        ratio = torch.where(has_child, p_x / q_x, 0.0).clamp(max=1.0)[:, :, 0]
        probability = torch.where(is_nth, ratio.gather(1, parents), probability)
        residual = (p - q).clamp(min=0.0)
        total = residual.sum(-1, keepdim=True)
        p = torch.where(has_child & (total > 0), residual / total, p)
        if not tree.replacement:
            remaining = q.scatter(2, x, 0.0)
            total = remaining.sum(-1, keepdim=True)
            q = torch.where(has_child, torch.where(total > 0, remaining / total, 0.0), q)
    return probability, p


def typical(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Decision:
    """Lossy. Accepts a token x with p(x) > min(ε, δ·exp(−H(p))), p at the temperature (Cai et al. 2024, §2.3.1); the longest path."""
    log_p = (logits.float() / sampling.temperature).log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    least = (sampling.delta * (-entropy).exp()).clamp(max=sampling.epsilon)  # [B,N]
    accepted = _at_parent(tree, p) > least.gather(1, tree.parents.clamp(min=0))
    return _longest_path(tree, accepted), draw(logits, tree.depth, sampling, request, position, max_depth)


def membership(tree: DraftTree, logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor, max_depth: int) -> Decision:
    """Lossy. Accepts every token that the target's top-k, top-p and min-p keep; the longest path."""
    in_set = warp(logits, sampling) > -torch.inf
    return _longest_path(tree, _at_parent(tree, in_set)), draw(logits, tree.depth, sampling, request, position, max_depth)


def _at_parent(tree: DraftTree, values: Tensor) -> Tensor:
    """values [B,N,V] -> [B,N]: the value of each node's token at the node's parent."""
    rows = torch.arange(values.shape[0], device=values.device)[:, None]
    return values[rows, tree.parents.clamp(min=0), tree.tokens]


def _longest_path(tree: DraftTree, accepted: Tensor) -> Tensor:
    """accepted [B,N] -> the nodes [B,N] of the longest accepted path alone, of equally long ones the first."""
    index = torch.arange(accepted.shape[1], device=accepted.device)
    rejected = ((~accepted) | (index >= tree.size[:, None])) & (index > 0)
    reachable = (tree.visible().float() @ rejected.float()[:, :, None])[:, :, 0] == 0
    deepest = torch.where(reachable, tree.depth, -1).argmax(1)
    return tree.visible()[torch.arange(len(deepest), device=deepest.device), deepest]
