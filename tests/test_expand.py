"""Trees built level by level, against slow references that consider every path."""

import heapq
from dataclasses import replace
from itertools import product

import pytest
import torch
from planting import round_context

from draftsmith.inference import expand as expand_module
from draftsmith.inference.expand import (
    DynamicExpansion,
    DynamicTree,
    FusedExpansion,
    StaticExpansion,
    choose,
    expand,
    parse_tree_spec,
    tree_config,
)
from draftsmith.inference.sampler import PURPOSE_DRAFT, PURPOSE_TOKEN, Sampling, gumbel, warp
from draftsmith.inference.tree import DraftTree, StaticTree

VOCAB = 11


def drafter_logits(prefix: tuple[int, ...], seed: int) -> torch.Tensor:
    """A drafter's logits after `prefix`: any function of it will do."""
    generator = torch.Generator().manual_seed(hash((prefix, seed)) % 2**31)
    return 2 * torch.randn(VOCAB, generator=generator)


def run(
    expansion,
    roots: list[int],
    how: Sampling = Sampling(),  # noqa: B008
    levels: int = 99,
) -> tuple[DraftTree, torch.Tensor, list[list[tuple[int, ...]]]]:
    """Expand with `drafter_logits`, reading the parents of each level from its `visible` alone, and stop after `levels` levels.

    Returns the tree, each node's index among the encoded nodes, and the encoded prefixes by row.
    """
    round = round_context(list(range(len(roots))), roots, sampling=how)
    encoded: list[list[tuple[int, ...]]] = [[] for _ in roots]
    prefixes = [[(root,)] for root in roots]
    depth = 0
    while depth < levels:
        logits = torch.stack([torch.stack([drafter_logits(prefix, b) for prefix in row]) for b, row in enumerate(prefixes)])
        index = (round.positions[:, None] + 1 + depth).expand(-1, logits.shape[1])
        level = expansion.add_level(*choose(logits, expansion.count, round, index, expansion.scored))
        if level is None:
            break
        depth = level.depth
        assert level.visible.shape[2] == len(encoded[0]) + level.tokens.shape[1] == len(level.key_depth)
        for b, root in enumerate(roots):
            fresh = []
            for f, token in enumerate(level.tokens[b].tolist()):
                seen = level.visible[b, f].nonzero()[:, 0].tolist()
                assert seen[-1] == len(encoded[b]) + f, "a node sees itself"
                parent = encoded[b][seen[-2]] if len(seen) > 1 else (root,)
                assert len(seen) == depth == len(parent), "one ancestor of each depth"
                assert [len(encoded[b][e]) - 1 for e in seen[:-1]] == level.key_depth[seen[:-1]].tolist()
                fresh.append((*parent, token))
            prefixes[b] = fresh
            encoded[b] += fresh
        assert bool(level.visible.all()) or not level.all_visible
    return *expansion.finish(), encoded


def paths_of(tree: DraftTree, b: int) -> list[tuple[int, ...]]:
    tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
    paths: list[tuple[int, ...]] = []
    for i, token in enumerate(tokens):
        paths.append((*(paths[parents[i]] if i else ()), token))
    return paths


def best_first(spec: DynamicTree, root: int, seed: int) -> list[tuple[int, ...]]:
    """EAGLE-2's tree: expand the best nodes of every level, then keep the best of all nodes."""
    stored: list[tuple[float, int, tuple[int, ...]]] = []
    level = [(0.0, (root,))]
    for _ in range(spec.depth):
        children = []
        for score, prefix in level:
            log_p = drafter_logits(prefix, seed).log_softmax(0)
            children += [(score + float(log_p[t]), (*prefix, t)) for t in log_p.argsort(descending=True)[: spec.width].tolist()]
        stored += [(-score, len(stored) + i, prefix) for i, (score, prefix) in enumerate(children)]
        level = heapq.nlargest(spec.width, children)
    return [prefix for _, _, prefix in sorted(stored)[: spec.nodes - 1]]


@pytest.mark.parametrize(
    "spec", [DynamicTree(1, 3, 9), DynamicTree(3, 1, 4), DynamicTree(4, 3, 12), DynamicTree(3, 4, 40), DynamicTree(5, 2, 3)]
)
def test_a_dynamic_tree_is_the_best_of_all_nodes(spec):
    roots = [3, 7, 0]
    tree, encoded_index, encoded = run(DynamicExpansion(spec, round_context([0, 1, 2], roots)), roots)
    tree.validate()
    assert tree.tokens.shape[1] == spec.num_nodes == min(spec.nodes, 1 + spec.width + (spec.depth - 1) * spec.width**2)
    for b, root in enumerate(roots):
        paths = paths_of(tree, b)
        assert set(paths[1:]) == set(best_first(spec, root, b)) and len(set(paths)) == len(paths)
        chain = [(root,)]
        while len(chain[-1]) <= spec.depth:
            chain.append((*chain[-1], int(drafter_logits(chain[-1], b).argmax())))
        leftmost = [path for path in chain if path in set(paths)]
        assert paths[: len(leftmost)] == leftmost, "the leftmost chain comes first"
        for i, e in enumerate(encoded_index[b].tolist()):
            assert (encoded[b][e] == paths[i]) if e >= 0 else paths[i] not in encoded[b]
    assert (encoded_index >= 0).any() == (spec.depth > 1)


@pytest.mark.parametrize(
    "paths", [[(0,)], [(0,), (0, 0), (0, 0, 0)], [(0,), (2,), (2, 1), (0, 1), (2, 1, 0)], list(product(range(2), repeat=1))]
)
def test_a_static_tree_takes_the_candidates_of_its_ranks(paths):
    static_tree, roots = StaticTree.from_paths(paths), [4, 9]
    tree, encoded_index, encoded = run(StaticExpansion(static_tree, round_context([0, 1], roots)), roots)
    tree.validate()
    for b, root in enumerate(roots):
        tokens = paths_of(tree, b)
        for i, path in enumerate(static_tree.paths, 1):
            prefix = (root,)
            for rank in path:
                prefix = (*prefix, int(drafter_logits(prefix, b).argsort(descending=True)[rank]))
            assert tokens[i] == prefix
            inner = any(child[:-1] == path for child in static_tree.paths)
            assert (encoded_index[b, i] >= 0) == inner and (not inner or encoded[b][encoded_index[b, i]] == prefix)
        assert encoded_index[b, 0] == -1
    assert tree.width == static_tree.fanout


def test_trees_are_no_deeper_than_the_round():
    roots = [1, 2]
    for shape in (StaticTree.cartesian([2, 2, 1]), DynamicTree(3, 2, 9)):
        for depth in (1, 2):
            tree, _, _ = run(expand(shape, round_context([0, 1], roots, depth)), roots)
            assert int(tree.depth.max()) == depth
            tree.validate()


GAPS = StaticTree.from_paths([(0,), (2,), (2, 1), (0, 1), (0, 0), (2, 1, 0), (0, 0, 0), (0, 0, 1)])


@pytest.mark.parametrize("rule", ["shared-noise", "rejection", "rejection-replacement"])
@pytest.mark.parametrize("shape", [StaticTree.chain(3), GAPS, StaticTree.cartesian([2, 2, 2]), DynamicTree(3, 2, 9)])
def test_a_tree_may_be_finished_early(shape, rule):
    """It equals the tree of a round of that depth, except that its deepest nodes were encoded where they have children in the complete tree."""
    if isinstance(shape, DynamicTree) and rule != "shared-noise":
        pytest.skip("refused: see test_refusals")
    roots, how = [4, 9], Sampling(1.0, seed=1, rule=rule)
    for levels in (1, 2, 3):
        tree, encoded_index, encoded = run(expand(shape, round_context([0, 1], roots, sampling=how)), roots, how, levels)
        wanted, _, before = run(expand(shape, round_context([0, 1], roots, levels, how)), roots, how)
        tree.validate()
        assert torch.equal(tree.tokens, wanted.tokens) and torch.equal(tree.parents, wanted.parents) and torch.equal(tree.size, wanted.size)
        assert (tree.width, tree.full, tree.replacement) == (wanted.width, wanted.full, wanted.replacement)
        assert int(tree.deepest().max()) == levels
        assert (tree.q_logits is None) == (wanted.q_logits is None) == (rule == "shared-noise")
        assert tree.q_logits is None or torch.equal(tree.q_logits, wanted.q_logits)
        for b in range(2):
            paths = paths_of(tree, b)
            assert encoded[b][: len(before[b])] == before[b] and (len(encoded[b]) > len(before[b])) == (levels < 3)
            for i, e in enumerate(encoded_index[b].tolist()):
                assert (encoded[b][e] == paths[i]) if e >= 0 else paths[i] not in encoded[b]
            assert levels == 3 or (encoded_index[b, tree.depth[b] == levels] >= 0).any()


@pytest.mark.parametrize("kind", ["target-sample", "shared-noise", "rejection", "rejection-replacement"])
def test_candidates_are_chosen_by_the_rule(kind):
    how = Sampling(0.7, top_k=8, seed=5, rule=kind)
    round = round_context([0, 1], [0, 0], sampling=how)
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[8, 9, 9], [3, 4, 5]])
    ids, scores, q = choose(logits, 3, round, index, True)
    warped = warp(logits, how)
    for b, f in product(range(2), range(3)):
        position = index[b, f]
        noise = [
            gumbel(5, round.noise_keys[b], position, VOCAB, PURPOSE_TOKEN if kind == "shared-noise" else PURPOSE_DRAFT, copy)
            for copy in range(3)
        ]
        if kind == "target-sample":
            expected, q_logits = logits[b, f].argsort(descending=True)[:3].tolist(), logits[b, f]
        elif kind == "rejection-replacement":
            expected, q_logits = [int((warped[b, f] + noise[copy]).argmax()) for copy in range(3)], warped[b, f]
        else:
            expected, q_logits = (warped[b, f] + noise[0]).argsort(descending=True)[:3].tolist(), warped[b, f]
        assert ids[b, f].tolist() == expected
        torch.testing.assert_close(scores[b, f], q_logits.log_softmax(0)[expected])
    assert (q is None) == (kind in ("target-sample", "shared-noise")) and (q is None or torch.equal(q, warped))
    # Greedy: the best tokens, whatever the rule.
    assert torch.equal(
        choose(logits, 3, round_context([0, 1], [0, 0], sampling=Sampling(rule=kind)), index, False)[0], logits.topk(3).indices
    )


def test_drafter_logits_are_stored_at_their_nodes():
    how, roots = Sampling(1.0, rule="rejection"), [4, 9]
    static_tree = StaticTree.cartesian([2, 3])
    tree, _, _ = run(StaticExpansion(static_tree, round_context([0, 1], roots, sampling=how)), roots, how)
    assert tree.q_logits is not None and tree.width == 3 and not tree.replacement
    for b in range(2):
        for i, path in enumerate(paths_of(tree, b)):
            if len(path) <= 2:
                assert torch.equal(tree.q_logits[b, i], drafter_logits(path, b))


def test_refusals():
    drawn = round_context([0], [0], sampling=Sampling(1.0, rule="rejection"))
    with pytest.raises(ValueError, match="rule rejection with a dynamic tree"):
        DynamicExpansion(DynamicTree(2, 2, 4), drawn)
    gaps = StaticTree.from_paths([(1,), (3,), (3, 2), (3, 2, 0), (3, 0)])
    without_gaps = StaticTree.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 1, 0)])
    assert (
        StaticExpansion(gaps, drawn).tree_spec.paths == without_gaps.paths == without_gaps.without_gaps().paths
        and without_gaps.without_gaps() is without_gaps
    )
    assert StaticExpansion(gaps, round_context([0], [0])).tree_spec is gaps
    narrow = StaticExpansion(gaps, round_context([0], [0]))
    with pytest.raises(ValueError, match=r"rank 3 at depth 1, where a node has 3 candidates"):
        narrow.add_level(torch.zeros(1, 1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="depth 0"):
        DynamicTree(0, 1, 2)
    with pytest.raises(ValueError, match=r"expected depth, width and nodes"):
        parse_tree_spec({"depth": 2, "width": 2})
    for shape in ([[0], [0, 0]], {"depth": 2, "width": 3, "nodes": 8}, []):
        assert tree_config(parse_tree_spec(shape)) == shape


@pytest.mark.parametrize("shape, fused", [((2, 16, 20), True), ((2, 17, 20), False), ((16, 16, 20), True), ((17, 16, 20), False)])
def test_trees_that_the_kernels_cannot_hold_are_expanded_without(monkeypatch, shape, fused):
    pytest.importorskip("triton")
    monkeypatch.setattr(expand_module, "active", lambda: True)
    context = round_context([0], [0])
    assert isinstance(expand(DynamicTree(*shape), replace(context, depth=64)), FusedExpansion) == fused


@pytest.mark.parametrize("vocab", [5, 256, 1000])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_cpu_path_and_the_independent_reference_of_the_kernel_agree(vocab, count):
    """Where logits are equal, the CPU path may choose other ids; their logits are the same."""
    pytest.importorskip("triton")
    from draftsmith.inference.kernels.expand import best_reference

    generator = torch.Generator().manual_seed(vocab)
    distinct, ties = torch.randn(2, 3, vocab, generator=generator), torch.randint(-2, 2, (2, 3, vocab), generator=generator) / 2
    for logits in (distinct, ties):
        ids, scores, _ = choose(logits, count, round_context([0, 1], [0, 0]), torch.zeros(2, 3, dtype=torch.int64), True)
        expected, log_p = best_reference(logits, count)
        assert torch.equal(logits.gather(2, ids), logits.gather(2, expected))
        assert logits is ties or torch.equal(ids, expected)
        assert all(len(set(row)) == count for row in ids.flatten(0, 1).tolist())
        torch.testing.assert_close(scores, log_p)
