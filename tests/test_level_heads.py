"""Trees from one distribution for each level: the likeliest nodes of all, against a heap over rank paths."""

import heapq
import random

import pytest
import torch

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.level_heads import draft_marginals
from draftsmith.inference.sampler import Sampling


def by_heap(probabilities: list[list[float]], nodes: int) -> list[float]:
    """The survival of the likeliest nodes below the root, best first: a node is followed by its best child and its next sibling."""
    ranked = [sorted(level, reverse=True) for level in probabilities]
    heap, out = [(-ranked[0][0], (0,))], []
    while heap and len(out) < nodes:
        chance, path = heapq.heappop(heap)
        out.append(-chance)
        depth, rank = len(path), path[-1]
        if depth < len(ranked):
            heapq.heappush(heap, (chance * ranked[depth][0], (*path, 0)))
        if rank + 1 < len(ranked[depth - 1]):
            heapq.heappush(heap, (chance / ranked[depth - 1][rank] * ranked[depth - 1][rank + 1], (*path[:-1], rank + 1)))
    return out


@pytest.mark.parametrize(("nodes", "depth", "vocab"), [(2, 3, 9), (8, 3, 40), (16, 4, 40), (12, 4, 3), (64, 5, 97), (5, 1, 4)])
def test_a_dynamic_tree_has_the_likeliest_nodes_of_all(nodes, depth, vocab):
    seed, widest = random.Random(nodes), 0
    for _ in range(20):
        scale = torch.tensor([seed.uniform(0.2, 4.0) for _ in range(2 * depth)]).view(2, depth, 1)
        logits = torch.randn(2, depth, vocab, generator=torch.Generator().manual_seed(seed.randrange(1000))) * scale
        at = torch.arange(2)
        tree = draft_marginals(DynamicTree(depth, 8, nodes), logits, RoundContext([0, 1], at, at, at, at, Sampling(), depth))
        tree.validate()
        probabilities = logits.double().softmax(-1)
        for row in range(2):
            best = by_heap(probabilities[row].tolist(), nodes - 1)
            size = len(best) + 1
            assert tree.tokens.shape[1] == size == int(tree.size[row])
            assert sorted(tree.survival[row, 1:].tolist(), reverse=True) == pytest.approx(best, rel=1e-4)
            for node in range(1, size):  # the token of a node is what its survival says
                parent, level = int(tree.parents[row, node]), int(tree.depth[row, node]) - 1
                chance = tree.survival[row, parent] * probabilities[row, level, tree.tokens[row, node]]
                assert float(tree.survival[row, node]) == pytest.approx(float(chance), rel=1e-4)
            k = 1  # the leftmost chain comes first
            while k < min(size, depth + 1) and int(tree.parents[row, k]) == k - 1:
                assert int(tree.tokens[row, k]) == int(probabilities[row, k - 1].argmax())
                k += 1
            assert k > 1
            order = sorted(range(1, size), key=lambda node: int(tree.order[row, node]))
            assert all(tree.survival[row, a] >= tree.survival[row, b] for a, b in zip(order, order[1:], strict=False))
            widest = max(widest, int(tree.depth[row].bincount().max()))
    assert widest > 8 or nodes <= 16 and widest > 1 or nodes == 2


def test_trees_of_noisy_candidates_are_trees():
    """With shared noise the candidates are not in the order of their probabilities."""
    at, sizes = torch.arange(2), set()
    for seed in range(10):
        logits = torch.randn(2, 3, 30, generator=torch.Generator().manual_seed(seed)) * 3
        sampling = Sampling(0.9, seed=seed, rule="shared-noise")
        tree = draft_marginals(DynamicTree(3, 3, 12), logits, RoundContext([0, 1], at, at, at, at, sampling, 3))
        tree.validate()
        sizes |= set(tree.depth.flatten().tolist())
    assert sizes == {0, 1, 2, 3}
