"""Synthetic acceptance: verdicts drawn on the device from an acceptance profile, for models with random weights.

A profile is the probability that a node's first, second, … child is accepted, given that the node is. All figures that rest on it carry the
word SYNTHETIC.

Letters: B rows of a batch · N tree nodes with the root · K draft depth. R is the number of ranks of a profile.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.sampler import uniform
from draftsmith.inference.tree import DraftTree, indices
from draftsmith.inference.verify import Verdict, judge

WATERMARK = "SYNTHETIC"
PROFILE = (0.6, 0.12, 0.05, 0.03)  # so four children are all rejected once in five times

Verify = Callable[[DraftTree, Tensor, RoundContext], Verdict]


def expected_tau(parents: Sequence[int], profile: Sequence[float]) -> float:
    """The exact τ of a profile on a tree: 1 + the sum of its nodes' probabilities, each its rank's times its parent's.

    Args:
        parents: [N], −1 for the root; a parent comes before its children.
        profile: [R].
    """
    probabilities, children = [1.0], [0] * len(parents)
    for parent in parents[1:]:
        rank = children[parent]
        children[parent] += 1
        probabilities.append(probabilities[parent] * (profile[rank] if rank < len(profile) else 0.0))
    return sum(probabilities)


def accepted_mask(tree: DraftTree, draws: Tensor, edges: Tensor) -> Tensor:
    """Which nodes are accepted, given that their parent is. The r-th child is where edges[r] <= draw < edges[r + 1]: one child at most.

    Args:
        tree: B trees of N nodes.
        draws: [B,K] in [0, 1), one for each depth.
        edges: [R+1], the cumulative sums of the profile, from 0.

    Returns:
        [B,N] bool.
    """
    rank, last = tree.sibling(), len(edges) - 1
    draw = draws.gather(1, (tree.depth - 1).clamp(0, draws.shape[1] - 1))
    return (edges[rank.clamp(max=last)] <= draw) & (draw < edges[(rank + 1).clamp(max=last)])


def synthetic(verify: Verify, profile: Sequence[float], device: torch.device) -> Verify:
    """A verification that does all the work of `verify`, then replaces the path by one drawn from the profile; the token stays.

    The draw for a token depends on its request and position alone, so that a run can be repeated. A round uses the draws of the tokens that
    it commits, so that no two rounds share one.
    """
    edges = torch.tensor([0.0, *accumulate(profile)], dtype=torch.float64, device=device)

    def replaced(tree: DraftTree, logits: Tensor, round: RoundContext) -> Verdict:
        verdict = verify(tree, logits, round)
        position = round.positions[:, None] + 1 + indices(round.depth, device)
        draws = uniform(0, round.noise_keys[:, None].expand_as(position), position, torch.zeros_like(position))
        return judge(tree, accepted_mask(tree, draws, edges), verdict.next_token[:, None].expand_as(tree.tokens), round.depth)

    return replaced
