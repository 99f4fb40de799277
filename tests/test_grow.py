"""Trees grown level by level, against slow forms that look at every path."""

import heapq
from itertools import product

import pytest
import torch
from planting import round_context

from draftsmith.inference.expand import DynamicExpansion, DynamicTree, StaticExpansion, choose, grow, parse_tree_spec, tree_config
from draftsmith.inference.sampler import PURPOSE_DRAFT, PURPOSE_TOKEN, Sampling, gumbel, warp
from draftsmith.inference.tree import DraftTree, StaticTree

VOCAB = 11


def law(prefix: tuple[int, ...], seed: int) -> torch.Tensor:
    """A drafter's logits after `prefix`: any function of it will do."""
    generator = torch.Generator().manual_seed(hash((prefix, seed)) % 2**31)
    return 2 * torch.randn(VOCAB, generator=generator)


def run(
    growth,
    roots: list[int],
    how: Sampling = Sampling(),  # noqa: B008
    levels: int = 99,
) -> tuple[DraftTree, torch.Tensor, list[list[tuple[int, ...]]]]:
    """Grow with `law`, reading each frontier through its `visible` alone, and stop before what comes after `levels` -> the tree, its
    slots, and the encoded prefixes by row."""
    asked = round_context(list(range(len(roots))), roots, sampling=how)
    encoded: list[list[tuple[int, ...]]] = [[] for _ in roots]
    prefixes = [[(root,)] for root in roots]
    depth = 0
    while depth < levels:
        logits = torch.stack([torch.stack([law(prefix, b) for prefix in row]) for b, row in enumerate(prefixes)])
        index = (asked.positions[:, None] + 1 + depth).expand(-1, logits.shape[1])
        frontier = growth.extend(*choose(logits, growth.count, asked, index, growth.scored))
        if frontier is None:
            break
        depth = frontier.depth
        assert frontier.visible.shape[2] == len(encoded[0]) + frontier.tokens.shape[1] == len(frontier.key_depth)
        for b, root in enumerate(roots):
            fresh = []
            for f, token in enumerate(frontier.tokens[b].tolist()):
                seen = frontier.visible[b, f].nonzero()[:, 0].tolist()
                assert seen[-1] == len(encoded[b]) + f, "a node sees itself"
                parent = encoded[b][seen[-2]] if len(seen) > 1 else (root,)
                assert len(seen) == depth == len(parent), "one ancestor of each depth"
                assert [len(encoded[b][e]) - 1 for e in seen[:-1]] == frontier.key_depth[seen[:-1]].tolist()
                fresh.append((*parent, token))
            prefixes[b] = fresh
            encoded[b] += fresh
        assert bool(frontier.visible.all()) or not frontier.open
    return *growth.finish(), encoded


def paths_of(tree: DraftTree, b: int) -> list[tuple[int, ...]]:
    tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
    paths: list[tuple[int, ...]] = []
    for i, token in enumerate(tokens):
        paths.append((*(paths[parents[i]] if i else ()), token))
    return paths


def best_first(beam: DynamicTree, root: int, seed: int) -> list[tuple[int, ...]]:
    """EAGLE-2's tree in words: grow every level's best nodes, then keep the best of all."""
    stored: list[tuple[float, int, tuple[int, ...]]] = []
    level = [(0.0, (root,))]
    for _ in range(beam.depth):
        found = []
        for score, prefix in level:
            chance = law(prefix, seed).log_softmax(0)
            found += [(score + float(chance[t]), (*prefix, t)) for t in chance.argsort(descending=True)[: beam.width].tolist()]
        stored += [(-score, len(stored) + i, prefix) for i, (score, prefix) in enumerate(found)]
        level = heapq.nlargest(beam.width, found)
    return [prefix for _, _, prefix in sorted(stored)[: beam.nodes - 1]]


@pytest.mark.parametrize(
    "beam", [DynamicTree(1, 3, 9), DynamicTree(3, 1, 4), DynamicTree(4, 3, 12), DynamicTree(3, 4, 40), DynamicTree(5, 2, 3)]
)
def test_a_dynamic_tree_is_the_best_of_all_nodes(beam):
    roots = [3, 7, 0]
    tree, slots, encoded = run(DynamicExpansion(beam, round_context([0, 1, 2], roots)), roots)
    tree.validate()
    assert tree.tokens.shape[1] == beam.num_nodes == min(beam.nodes, 1 + beam.width + (beam.depth - 1) * beam.width**2)
    for b, root in enumerate(roots):
        paths = paths_of(tree, b)
        assert set(paths[1:]) == set(best_first(beam, root, b)) and len(set(paths)) == len(paths)
        chain = [(root,)]
        while len(chain[-1]) <= beam.depth:
            chain.append((*chain[-1], int(law(chain[-1], b).argmax())))
        leftmost = [path for path in chain if path in set(paths)]
        assert paths[: len(leftmost)] == leftmost, "the leftmost chain comes first"
        for i, slot in enumerate(slots[b].tolist()):
            assert (encoded[b][slot] == paths[i]) if slot >= 0 else paths[i] not in encoded[b]
    assert (slots >= 0).any() == (beam.depth > 1)


@pytest.mark.parametrize(
    "paths", [[(0,)], [(0,), (0, 0), (0, 0, 0)], [(0,), (2,), (2, 1), (0, 1), (2, 1, 0)], list(product(range(2), repeat=1))]
)
def test_a_static_tree_asks_each_node_for_its_children(paths):
    topology, roots = StaticTree.from_paths(paths), [4, 9]
    tree, slots, encoded = run(StaticExpansion(topology, round_context([0, 1], roots)), roots)
    tree.validate()
    for b, root in enumerate(roots):
        found = paths_of(tree, b)
        for i, path in enumerate(topology.paths, 1):
            prefix = (root,)
            for rank in path:
                prefix = (*prefix, int(law(prefix, b).argsort(descending=True)[rank]))
            assert found[i] == prefix
            inner = any(other[:-1] == path for other in topology.paths)
            assert (slots[b, i] >= 0) == inner and (not inner or encoded[b][slots[b, i]] == prefix)
        assert slots[b, 0] == -1
    assert tree.width == topology.fanout


def test_depth_asked_for_is_heeded():
    roots = [1, 2]
    for shape in (StaticTree.cartesian([2, 2, 1]), DynamicTree(3, 2, 9)):
        for depth in (1, 2):
            asked = round_context([0, 1], roots, depth)
            tree, _, _ = run(grow(shape, asked), roots)
            assert int(tree.depth.max()) == depth
            tree.validate()


GAPS = StaticTree.from_paths([(0,), (2,), (2, 1), (0, 1), (0, 0), (2, 1, 0), (0, 0, 0), (0, 0, 1)])


@pytest.mark.parametrize("rule", ["shared-noise", "rejection", "rejection-replacement"])
@pytest.mark.parametrize("shape", [StaticTree.chain(3), GAPS, StaticTree.cartesian([2, 2, 2]), DynamicTree(3, 2, 9)])
def test_a_tree_may_be_finished_early(shape, rule):
    """It is the tree that was asked for no deeper, but that the deepest nodes were encoded where they have children in the whole one."""
    if isinstance(shape, DynamicTree) and rule != "shared-noise":
        pytest.skip("refused: see test_refusals")
    roots, how = [4, 9], Sampling(1.0, seed=1, rule=rule)
    for levels in (1, 2, 3):
        tree, slots, encoded = run(grow(shape, round_context([0, 1], roots, sampling=how)), roots, how, levels)
        wanted, _, before = run(grow(shape, round_context([0, 1], roots, levels, how)), roots, how)
        tree.validate()
        assert torch.equal(tree.tokens, wanted.tokens) and torch.equal(tree.parents, wanted.parents) and torch.equal(tree.size, wanted.size)
        assert (tree.width, tree.full, tree.replacement) == (wanted.width, wanted.full, wanted.replacement)
        assert int(tree.deepest().max()) == levels
        assert (tree.q_logits is None) == (wanted.q_logits is None) == (rule == "shared-noise")
        assert tree.q_logits is None or torch.equal(tree.q_logits, wanted.q_logits)
        for b in range(2):
            paths = paths_of(tree, b)
            assert encoded[b][: len(before[b])] == before[b] and (len(encoded[b]) > len(before[b])) == (levels < 3)
            for i, slot in enumerate(slots[b].tolist()):
                assert (encoded[b][slot] == paths[i]) if slot >= 0 else paths[i] not in encoded[b]
            assert levels == 3 or (slots[b, tree.depth[b] == levels] >= 0).any()


@pytest.mark.parametrize("kind", ["target-sample", "shared-noise", "rejection", "rejection-replacement"])
def test_children_are_chosen_as_asked(kind):
    how = Sampling(0.7, top_k=8, seed=5, rule=kind)
    asked = round_context([0, 1], [0, 0], sampling=how)
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[8, 9, 9], [3, 4, 5]])
    ids, scores, q = choose(logits, 3, asked, index, True)
    warped = warp(logits, how)
    for b, f in product(range(2), range(3)):
        place = index[b, f]
        noise = [
            gumbel(5, asked.noise_keys[b], place, VOCAB, PURPOSE_TOKEN if kind == "shared-noise" else PURPOSE_DRAFT, copy)
            for copy in range(3)
        ]
        if kind == "target-sample":
            expected, law = logits[b, f].argsort(descending=True)[:3].tolist(), logits[b, f]
        elif kind == "rejection-replacement":
            expected, law = [int((warped[b, f] + noise[copy]).argmax()) for copy in range(3)], warped[b, f]
        else:
            expected, law = (warped[b, f] + noise[0]).argsort(descending=True)[:3].tolist(), warped[b, f]
        assert ids[b, f].tolist() == expected
        torch.testing.assert_close(scores[b, f], law.log_softmax(0)[expected])
    assert (q is None) == (kind in ("target-sample", "shared-noise")) and (q is None or torch.equal(q, warped))
    # Without noise there is only the best, whatever the rule.
    assert torch.equal(
        choose(logits, 3, round_context([0, 1], [0, 0], sampling=Sampling(rule=kind)), index, False)[0], logits.topk(3).indices
    )


def test_drawn_laws_reach_their_nodes():
    how, roots = Sampling(1.0, rule="rejection"), [4, 9]
    topology = StaticTree.cartesian([2, 3])
    tree, _, _ = run(StaticExpansion(topology, round_context([0, 1], roots, sampling=how)), roots, how)
    assert tree.q_logits is not None and tree.width == 3 and not tree.replacement
    for b in range(2):
        for i, path in enumerate(paths_of(tree, b)):
            if len(path) <= 2:
                assert torch.equal(tree.q_logits[b, i], law(path, b))


def test_refusals():
    drawn = round_context([0], [0], sampling=Sampling(1.0, rule="rejection"))
    with pytest.raises(ValueError, match="rule rejection with a dynamic tree"):
        DynamicExpansion(DynamicTree(2, 2, 4), drawn)
    gaps = StaticTree.from_paths([(1,), (3,), (3, 2), (3, 2, 0), (3, 0)])
    closed = StaticTree.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 1, 0)])
    assert StaticExpansion(gaps, drawn).topology.paths == closed.paths == closed.closed().paths and closed.closed() is closed
    assert StaticExpansion(gaps, round_context([0], [0])).topology is gaps
    with pytest.raises(ValueError, match="depth 0"):
        DynamicTree(0, 1, 2)
    with pytest.raises(ValueError, match=r"expected depth, width and nodes"):
        parse_tree_spec({"depth": 2, "width": 2})
    for shape in ([[0], [0, 0]], {"depth": 2, "width": 3, "nodes": 8}, []):
        assert tree_config(parse_tree_spec(shape)) == shape
