"""Drafting with one distribution for each level of the tree.

Each head reads the tokens drafted before it (Hydra, MLP speculators, DSpark): `draft_levels`. Or none of them: the distributions of all
levels are there at once, and a node's children are the same whatever its path is (Medusa, DFlash): `draft_marginals`.

Letters: B rows · V vocabulary · K heads · F nodes of the current level.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import CurrentLevel, DynamicExpansion, TreeSpec, choose, expand
from draftsmith.inference.stopping import Draft, Stopping
from draftsmith.inference.tree import DraftTree

__all__ = ["draft_levels", "draft_marginals"]


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
    expansion, index, level, draft = expand(tree_spec, round), round.positions[:, None] + 1, None, Draft(stop, round)
    for k in range(heads):
        logits = logits_of(k, level)
        if draft.ends(logits):
            break
        nodes = (index + k * draft.stride).expand(-1, logits.shape[1])
        level = expansion.add_level(*choose(logits, expansion.count, round, nodes, expansion.scored))
        if level is None:
            break
    return expansion.finish()[0]


def draft_marginals(tree_spec: TreeSpec, logits: Tensor, round: RoundContext) -> DraftTree:
    """A round's trees, whose level k + 1 is drawn or ranked from logits [B,K,V] at k. All paths have the same candidates.

    Args:
        tree_spec: at least one level deep.
        logits: of as many levels as the round drafts.
        round: the round that is drafted for.
    """
    expansion, depth = expand(tree_spec, round), logits.shape[1]
    index = round.positions[:, None] + 1 + torch.arange(depth, device=logits.device)
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
