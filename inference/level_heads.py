"""Drafting with one distribution for each level of the tree.

Each head reads the tokens drafted before it (Hydra, MLP speculators, DSpark): `draft_levels`. Or none of them: the distributions of all
levels are there at once, and a node's children are the same whatever its path is (Medusa, DFlash): `draft_marginals`.

Letters: B rows · V vocabulary · K heads · F nodes of the current level.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import CurrentLevel, DynamicExpansion, TreeSpec, choose, expand, likeliest
from draftsmith.inference.stopping import StopCheck, Stopping
from draftsmith.inference.tree import DraftTree

__all__ = ["best_first", "draft_levels", "draft_marginals"]


def draft_levels(
    tree_spec: TreeSpec,
    heads: int,
    round: RoundContext,
    logits_of: Callable[[int, CurrentLevel | None], Tensor],
    stop: Stopping | None = None,
) -> DraftTree:
    """A round's trees, whose level k + 1 head k fills.

    Args:
        tree_spec: at most `heads` deep.
        heads: K.
        round: the round that is drafted for.
        logits_of: k and the nodes that get children, None for the root -> head k's logits after each of them [B,F,V].
        stop: ends drafts early; None drafts all levels.
    """
    if tree_spec.max_depth == 0:
        return DraftTree.root(round.last_tokens)
    expansion, index, level, check = expand(tree_spec, round), round.positions[:, None] + 1, None, StopCheck(stop, round)
    for k in range(heads):
        logits = logits_of(k, level)
        if check.ends(logits):
            break
        nodes = (index + k * check.stride).expand(-1, logits.shape[1])
        level = expansion.add_level(*choose(logits, expansion.count, round, nodes, expansion.scored))
        if level is None:
            break
    return expansion.finish()[0]


def draft_marginals(tree_spec: TreeSpec, logits: Tensor, round: RoundContext) -> DraftTree:
    """A round's trees, whose level k + 1 is drawn or ranked from logits [B,K,V] at k. All paths have the same candidates.

    A dynamic tree has the likeliest nodes of all, however wide that makes a level: they cost the drafter nothing. With shared noise q does not
    say how likely a candidate is, and the best under the noise, as many as the tree's width, are expanded.

    Args:
        tree_spec: at least one level deep.
        logits: of as many levels as the round drafts.
        round: the round that is drafted for.
    """
    expansion, depth = expand(tree_spec, round), logits.shape[1]
    index = round.positions[:, None] + 1 + torch.arange(depth, device=logits.device)
    if isinstance(expansion, DynamicExpansion) and round.sampling.children == "top":
        nodes = expansion.tree_spec.num_nodes
        ids, scores, _ = choose(logits, nodes - 1, round, index, True)
        assert scores is not None
        return best_first(round.last_tokens, ids, scores, nodes)
    width = expansion.count if isinstance(expansion, DynamicExpansion) else expansion.tree_spec.width
    ids, scores, q_logits = choose(logits, width, round, index, expansion.scored)
    if isinstance(expansion, DynamicExpansion):
        assert scores is not None
        nodes = 1
        for k in range(depth):
            shape = (-1, nodes, -1)
            level = expansion.add_level(ids[:, k : k + 1].expand(shape), scores[:, k : k + 1].expand(shape))
            nodes = level.tokens.shape[1] if level else 0
        return expansion.finish()[0]
    tree = expansion.tree_spec.tree(round.last_tokens, ids)
    if q_logits is not None:  # leaves have no children, so that any distribution will do for them
        tree.q_logits, tree.replacement = q_logits[:, expansion.tree_spec.depth.clamp(max=depth - 1)], expansion.replacement
    if scores is not None and round.scored:
        level, rank = expansion.tree_spec.depth - 1, expansion.tree_spec.rank.clamp(min=0)
        tree.survive(scores[:, level.clamp(min=0), rank])
    return tree


def best_first(last_tokens: Tensor, ids: Tensor, scores: Tensor, nodes: int) -> DraftTree:
    """The trees of the likeliest nodes, where a path is as likely as the product of its tokens' probabilities (CAST, Theorem 1).

    A node of its parent's rank a on its level and of rank r among its siblings, from 1, has a · r − 1 others before it on its level. So the
    likeliest nodes are among those of a · r ≤ N − 1.

    Args:
        last_tokens: [B], the roots.
        ids, scores: [B,K,R], the likeliest tokens of each level, the likeliest first, and their log-probabilities.
        nodes: N, the root included; R is N − 1 at least, or the vocabulary.
    """
    root = last_tokens[:, None]
    level_index, level_score = torch.zeros_like(root), torch.zeros_like(root, dtype=torch.float32)
    tokens, parents, totals, on_chain = [root], [root.new_full(root.shape, -1)], [level_score], [torch.ones_like(root, dtype=torch.bool)]
    stored = 1
    for k in range(ids.shape[1]):
        parent, rank = _pairs(min(level_index.shape[1], nodes - 1), ids.shape[2], nodes - 1, root.device)
        total = level_score[:, parent] + scores[:, k, rank].float().clamp(max=0.0)
        tokens.append(ids[:, k, rank])
        parents.append(level_index[:, parent])
        totals.append(total)
        on_chain.append((parent + rank == 0).expand_as(total))
        best = total.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]
        level_index, level_score = best + stored, total.gather(1, best)
        stored += len(parent)
    return likeliest(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(totals, 1), torch.cat(on_chain, 1), nodes)[0]


@lru_cache(maxsize=64)
def _pairs(parents: int, ranks: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ranks, from 0, of parents and of children among their siblings, whose product from 1 is at most `most`."""
    pairs = [(a, r) for a in range(parents) for r in range(min(ranks, most // (a + 1)))]
    parent, rank = torch.tensor(pairs, device=device).T.contiguous().unbind()
    return parent, rank
