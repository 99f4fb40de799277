"""Drafting with one head for each level of the tree, each of which reads the tokens drafted before it (Hydra, MLP speculators).

Letters: B rows · V vocabulary · K heads · F nodes of the current level.
"""

from collections.abc import Callable

from torch import Tensor

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import CurrentLevel, TreeSpec, choose, expand
from draftsmith.inference.tree import DraftTree

__all__ = ["draft_levels"]


def draft_levels(
    tree_spec: TreeSpec, heads: int, round: RoundContext, logits_of: Callable[[int, CurrentLevel | None], Tensor]
) -> DraftTree:
    """A round's trees, whose level k + 1 head k fills.

    Args:
        tree_spec: at most `heads` deep.
        heads: K.
        round: the round that is drafted for.
        logits_of: k and the nodes that get children, None for the root -> head k's logits after each of them [B,F,V].
    """
    if tree_spec.max_depth == 0:
        return DraftTree.root(round.last_tokens)
    expansion, index, level = expand(tree_spec, round), round.positions[:, None] + 1, None
    for k in range(heads):
        logits = logits_of(k, level)
        nodes = (index + k).expand(-1, logits.shape[1])
        level = expansion.add_level(*choose(logits, expansion.count, round, nodes, expansion.scored))
        if level is None:
            break
    return expansion.finish()[0]
