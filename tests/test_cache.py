"""The tree cache against lists: ragged writes, moves of accepted rows, selections, bounds."""

import itertools
import random

import pytest
import torch

from draftsmith.inference import cache as cache_module
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.verify import Verdict

SHAPES = {0: (2, 3, 2, 3), 1: (1, 5, 1, 2), 4: (3, 4, 3, 4)}  # layer -> key heads, key dim, value heads, value dim


class Model:
    """The same with lists: per row a list of committed numbers; layer, head and dim are derived from the number."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.next = 1

    def numbers(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))


def states(numbers: list[list[int]], heads: int, dim: int, salt: int) -> torch.Tensor:
    base = torch.tensor(numbers, dtype=torch.float64)[:, None, :, None] * 1000
    head = torch.arange(heads, dtype=torch.float64)[None, :, None, None] * 10
    return base + head + torch.arange(dim, dtype=torch.float64) + salt * 100


def write(cache: TreeCache, numbers: list[list[int]]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    views = {}
    for layer, (kh, kd, vh, vd) in SHAPES.items():
        # As models pass them: a transposed view.
        keys = states(numbers, kh, kd, layer).transpose(1, 2).contiguous().transpose(1, 2)
        views[layer] = cache.update(keys, states(numbers, vh, vd, layer + 5), layer)
    return views


def check(cache: TreeCache, model: Model, views: dict, written: list[list[int]]) -> None:
    for layer, (kh, kd, vh, vd) in SHAPES.items():
        keys, values = views[layer]
        assert keys.shape == (len(cache.selected), kh, cache.max_length + len(written[0]), kd)
        for place, row in enumerate(cache.selected):
            all_numbers = [model.rows[row] + written[place]]
            end = len(all_numbers[0])
            assert torch.equal(keys[place : place + 1, :, :end], states(all_numbers, kh, kd, layer))
            assert torch.equal(values[place : place + 1, :, :end], states(all_numbers, vh, vd, layer + 5))


def random_path(rng: random.Random, nodes: int, width: int) -> tuple[list[int], int]:
    length = rng.randint(1, min(nodes, width))
    path = [0] + sorted(rng.sample(range(1, nodes), length - 1))
    return path + [-1] * (width - length), length


@pytest.mark.parametrize("large", [False, True], ids=["buffers of their own", "in blocks"])
@pytest.mark.parametrize("known", [True, False], ids=["host knows", "host guesses"])
def test_commits_equal_lists(known, large, monkeypatch):
    if large:  # blocks with place for several layers, and layers beyond a block
        monkeypatch.setattr(cache_module, "LARGE", 0)
        monkeypatch.setattr(cache_module, "BLOCK", 30_000)
    rng = random.Random(4)
    cache, model = TreeCache(4, 80), Model(4)
    assert cache and len(cache) == 0
    moved = ragged = contiguous = scattered = exact = 0
    for turn in range(40):
        rows = rng.choice(([0, 1, 2, 3], [0, 1, 2, 3], [1, 2], [0, 2], [3], [0, 1, 3]))
        if turn % 9 == 8:
            cache.reset([rows[0]])
            model.rows[rows[0]] = []
        if max(len(model.rows[row]) for row in rows) + 8 * 3 > 80 or cache.max_length > 60:
            cache.reset()
            model.rows = [[] for _ in range(4)]
        cache.select(rows)
        contiguous += rows == list(range(rows[0], rows[0] + len(rows)))
        scattered += rows in ([0, 2], [0, 1, 3])
        nodes = rng.randint(1, 6)
        written = [model.numbers(nodes) for _ in rows]
        assert cache.selected_length.tolist() == [len(model.rows[row]) for row in rows]
        exact += cache.equal_lengths
        check(cache, model, write(cache, written), written)
        if turn % 4 == 3:  # a chunk of prompts
            counts = [rng.randint(0, nodes) for _ in rows]
            cache.advance(counts)
            paths, lengths = [list(range(nodes)) for _ in rows], counts
        else:
            drawn = [random_path(rng, nodes, min(nodes, 4)) for _ in rows]
            paths, lengths = [path for path, _ in drawn], [length for _, length in drawn]
            in_place = all(path[:length] == list(range(length)) for path, length in drawn)
            verdict = Verdict(torch.tensor(paths), torch.tensor(lengths), torch.zeros(len(rows), dtype=torch.int64))
            cache.commit(verdict, lengths if known else None, in_place and known)
            moved += not in_place
        ragged += len(set(lengths)) > 1
        for place, row in enumerate(rows):
            model.rows[row] += [written[place][node] for node in paths[place][: lengths[place]]]
        assert cache.length.tolist() == [len(numbers) for numbers in model.rows]
        longest = max(len(model.rows[row]) for row in rows)
        assert cache.max_length == longest if known else cache.max_length >= longest
        # One more write without commit reads back what was kept.
        cache.select(rows)
        written = [model.numbers(1) for _ in rows]
        check(cache, model, write(cache, written), written)
    assert moved >= 10 and ragged >= 10 and contiguous >= 10 and scattered >= 5 and exact >= (5 if known else 1)


def test_large_buffers_share_blocks_without_overlap_and_are_aligned(monkeypatch):
    monkeypatch.setattr(cache_module, "LARGE", 4 * 7 * 2 * 3 * 8)  # below it: the buffers of layer 1
    monkeypatch.setattr(cache_module, "BLOCK", 4096)
    cache = TreeCache(4, 7)
    write(cache, [[n] for n in range(4)])
    buffers = {(layer, part): getattr(store, part) for layer, store in cache._stores.items() for part in ("keys", "values")}
    spans = sorted((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in buffers.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(buffer.is_contiguous() and buffer.data_ptr() % 64 == 0 for buffer in buffers.values())
    blocks = {name: buffer.untyped_storage() for name, buffer in buffers.items()}
    assert blocks[0, "keys"].data_ptr() == blocks[0, "values"].data_ptr() != blocks[4, "keys"].data_ptr()
    assert [blocks[name].nbytes() for name in ((0, "keys"), (4, "keys"), (4, "values"))] == [4096] * 3
    assert all(blocks[1, part].nbytes() == buffers[1, part].nbytes for part in ("keys", "values"))


def test_idle_row_keeps_nothing():
    cache = TreeCache(2, 10)
    write(cache, [[1, 2], [3, 4]])
    cache.commit(Verdict(torch.tensor([[0, 1], [-1, -1]]), torch.tensor([2, 0]), torch.tensor([5, 5])), [2, 0])
    assert cache.length.tolist() == [2, 0]


def test_refusals():
    cache = TreeCache(2, 5)
    write(cache, [[1, 2, 3], [4, 5, 6]])
    cache.advance([3, 1])
    with pytest.raises(ValueError, match="the context is full: got 3 tokens after 3"):
        write(cache, [[7, 8, 9], [7, 8, 9]])
    write(cache, [[7, 8], [7, 8]])
    with pytest.raises(ValueError, match="batch of 1 rows"):
        write(cache, [[7, 8]])
    with pytest.raises(ValueError, match="tree attention only"):
        cache.get_mask_sizes(3, 0)
    cache.reset()
    assert cache.length.tolist() == [0, 0] and cache.max_length == 0 and cache.equal_lengths
