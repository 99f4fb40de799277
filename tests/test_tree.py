"""Draft trees: depth and ancestors against plain loops, packed words, static trees."""

import random

import pytest
import torch

from draftsmith.inference.tree import DraftTree, StaticTree, pack, unpack


def loop_ancestors(parents: list[int], size: int) -> list[set[int]]:
    """By definition: a node, its parent, its parent's parent, …; padding nodes are children of the root."""
    ancestors: list[set[int]] = []
    for i, parent in enumerate(parents):
        real_parent = parent if i < size else 0
        ancestors.append({i} | (ancestors[real_parent] if i and real_parent >= 0 else set()))
    return ancestors


def random_trees(rng: random.Random, rows: int, nodes: int) -> tuple[list[list[int]], list[int]]:
    parents, sizes = [], []
    for row in range(rows):
        size = nodes if row == 0 else rng.randint(0, nodes)
        style = rng.choice(("any", "chain", "star"))
        pick = {"any": lambda i: rng.randrange(i), "chain": lambda i: i - 1, "star": lambda i: 0}[style]
        parents.append([-1] + [pick(i) if i < size else rng.choice((-1, 0, nodes - 1)) for i in range(1, nodes)])
        sizes.append(size)
    return parents, sizes


@pytest.mark.parametrize("nodes", [1, 2, 3, 31, 32, 33, 63, 64, 65, 127])
def test_build_equals_loops(nodes):
    parents, sizes = random_trees(random.Random(nodes), 5, nodes)
    tree = DraftTree.build(torch.zeros(5, nodes, dtype=torch.int64), torch.tensor(parents), torch.tensor(sizes))
    assert tree.ancestors.shape == (5, nodes, (nodes + 63) // 64)
    visible = unpack(tree.ancestors, nodes)
    assert torch.equal(visible, tree.visible())
    for b in range(5):
        for i, expected in enumerate(loop_ancestors(parents[b], sizes[b])):
            assert set(visible[b, i].nonzero().flatten().tolist()) == expected
            assert tree.depth[b, i] == len(expected) - 1
    tree.validate()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 130])
def test_pack_and_unpack(size):
    bits = torch.rand(3, size, generator=torch.Generator().manual_seed(size)) < 0.5
    bits[0, size - 1] = True
    words = pack(bits)
    assert words.shape == (3, (size + 63) // 64) and words.dtype == torch.int64
    for row in range(3):
        expected = [sum(int(bits[row, j]) << (j % 64) for j in range(w * 64, min(size, w * 64 + 64))) for w in range(words.shape[1])]
        assert [word % 2**64 for word in words[row].tolist()] == expected
    assert torch.equal(unpack(words[:, None], size)[:, 0], bits)
    with pytest.raises(ValueError, match="words for"):
        unpack(words, size + 64)


def test_root_is_plain_decoding():
    tree = DraftTree.root(torch.tensor([7, 9]))
    tree.validate()
    assert tree.tokens.tolist() == [[7], [9]] and tree.size.tolist() == [1, 1] and tree.parents.tolist() == [[-1], [-1]]
    assert unpack(tree.ancestors, 1).tolist() == [[[True]], [[True]]]


def test_validate_names_the_fault():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    good = torch.tensor([[-1, 0, 1], [-1, 0, 0]])
    size = torch.tensor([3, 2])
    DraftTree.build(tokens, good, size).validate()
    for row, node, parent, message in ((0, 0, 0, "expected -1"), (0, 1, 2, "parents before children"), (1, 1, -1, "row 1, node 1")):
        bad = good.clone()
        bad[row, node] = parent
        with pytest.raises(ValueError, match=message):
            DraftTree.build(tokens, bad, size).validate()
    with pytest.raises(ValueError, match="size 4"):
        DraftTree.build(tokens, good, torch.tensor([4, 2])).validate()
    for name, value in (("depth", torch.zeros_like(tokens)), ("ancestors", torch.ones(2, 3, 1, dtype=torch.int64))):
        tree = DraftTree.build(tokens, good, size)
        setattr(tree, name, value)
        with pytest.raises(ValueError, match=name):
            tree.validate()
    with pytest.raises(ValueError, match="pad the shorter"):
        DraftTree.build(tokens, good[:, :2], size)


def test_static_tree_from_paths():
    paths = [(1,), (0,), (0, 1), (1, 2), (0, 0), (0, 0, 0), (2,)]
    top = StaticTree.from_paths(paths)
    assert top.paths == ((0,), (0, 0), (0, 0, 0), (1,), (2,), (0, 1), (1, 2))  # the leftmost chain, then by depth
    assert (top.num_nodes, top.max_depth, top.width) == (8, 3, 3)
    assert top.parents.tolist() == [-1, 0, 1, 2, 0, 0, 1, 4]
    assert top.depth.tolist() == [0, 1, 2, 3, 1, 1, 2, 2]
    assert top.rank.tolist() == [-1, 0, 0, 0, 1, 2, 1, 2]
    assert StaticTree.from_paths(top.paths).paths == top.paths
    assert [len(StaticTree.from_paths(given).paths) for given in ([], [(5,)])] == [0, 1]
    for bad, name in (
        ([(0,), (1, 0)], r"\(1, 0\) without its prefix \(1,\)"),
        ([()], r"\(\)"),
        ([(0,), (0,)], r"\(0,\)"),
        ([(-1,)], r"-1"),
    ):
        with pytest.raises(ValueError, match=name):
            StaticTree.from_paths(bad)


def test_chains_and_cartesian_trees():
    chain = StaticTree.chain(4)
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3] and chain.max_depth == 4 and chain.width == 1
    grid = StaticTree.cartesian([3, 2])
    assert grid.num_nodes == 1 + 3 + 6 and grid.depth.tolist().count(2) == 6
    assert set(grid.paths) == {(a,) for a in range(3)} | {(a, b) for a in range(3) for b in range(2)}
    assert StaticTree.chain(0).num_nodes == 1
    assert StaticTree.cartesian([2]).to("cpu").ancestors.tolist() == StaticTree.cartesian([2]).ancestors.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_static_tree_filled_with_children(rows):
    top = StaticTree.from_paths([(0,), (1,), (0, 0), (0, 2), (1, 1), (1, 1, 0)])
    generator = torch.Generator().manual_seed(1)
    children = torch.randint(1000, (rows, 4, 5), generator=generator)
    last_tokens = torch.randint(1000, (rows,), generator=generator)
    for _ in range(2):  # the second uses the precomputed tensors
        tree = top.tree(last_tokens, children)
        tree.validate()
        assert tree.tokens[:, 0].tolist() == last_tokens.tolist() and tree.size.tolist() == [7] * rows
        for b in range(rows):
            for i, path in enumerate(top.paths, 1):
                assert tree.tokens[b, i] == children[b, len(path) - 1, path[-1]]
    fresh = DraftTree.build(tree.tokens, tree.parents, tree.size)
    for name in ("depth", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(fresh, name))
    assert torch.equal(tree.visible(), fresh.visible()) and torch.equal(tree.walk_matrix(), fresh.walk_matrix())
    assert tree.depth.data_ptr() == top.depth.data_ptr(), "expanded, not computed again"
    filled = top.fill(tree.tokens)
    assert torch.equal(filled.ancestors, tree.ancestors)
    for small in (children[:, :2], children[:, :, :2]):
        with pytest.raises(ValueError, match="at least 3 and 3"):
            top.tree(last_tokens, small)
