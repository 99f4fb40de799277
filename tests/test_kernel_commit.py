"""The kernels that move the accepted path, against TreeCache and plain torch: under Triton's interpreter, natively where there is a GPU."""

import random
from collections import Counter

import pytest
import torch
from hopper import compiled
from interpreted import INTERPRETED

pytest.importorskip("triton")
from triton.runtime import interpreter

from draftsmith.inference import kernels
from draftsmith.inference.cache import TreeCache, _Store
from draftsmith.inference.drafter import NodeOutput
from draftsmith.inference.kernels import commit as module
from draftsmith.inference.kernels.commit import commit, commit_reference, table, take, take_reference

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")]),
]
SHAPES = [  # key heads, key dim, value heads, value dim, by layer
    [(2, 8, 2, 8)],
    [(1, 24, 1, 16)] * 2,
    [(3, 5, 3, 5), (2, 8, 2, 4), (3, 5, 3, 5)],
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What new_empty gives is NaN. Programs move few elements at once."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *shape, **how):
        made = new_empty(self, *shape, **how)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(module, "_BLOCK", 16)


@pytest.fixture
def no_synchronisation():
    """On a GPU, what waits for the device fails."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Any bits, those of NaN among them."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(integer)
    return torch.randint(limits.min, limits.max, shape, dtype=integer).view(dtype).to(device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def filled(rows: int, capacity: int, shapes: list[tuple[int, int, int, int]], dtypes: list[torch.dtype], device: str) -> TreeCache:
    """A cache whose every slot, used or not, holds noise."""
    cache = TreeCache(rows, capacity, device)
    for layer, (kh, kd, vh, vd) in enumerate(shapes):
        dtype = dtypes[layer % len(dtypes)]
        keys, values = noise((rows, kh, capacity, kd), dtype, device), noise((rows, vh, capacity, vd), dtype, device)
        cache._stores[layer] = _Store(keys, values)
    return cache


def buffers_of(cache: TreeCache) -> list[torch.Tensor]:
    return [buffer for store in cache._stores.values() for buffer in (store.keys, store.values)]


def path_of(rng: random.Random, entries: int, first: int, nodes: int, kind: str) -> list[int]:
    """Slots that first … first + entries − 1 are filled from."""
    length = 0 if kind == "empty" else rng.randint(1, entries)
    if kind == "in place":
        kept = list(range(first, first + length))
    elif kind == "any":  # all that is promised: not before where it goes
        kept = [rng.randrange(first + j, nodes) for j in range(length)]
    else:
        kept = sorted(rng.sample(range(first, nodes), length))
    return kept + [-1] * (entries - length)


def moved_by_hand(buffer: torch.Tensor, cache: TreeCache, paths: list[list[int]], first: int) -> torch.Tensor:
    """A copy of the buffer in which the nodes of each path, its root apart, are moved one by one."""
    out = buffer.clone()
    for row, path in zip(cache.selected, paths, strict=True):
        start = int(cache.length[row])
        for j, node in enumerate(path[1:]):
            if node >= 0:
                out[row, :, start + first + j] = buffer[row, :, start + node]
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16], [torch.float32, torch.float16]], ids=["fp32", "bf16", "mixed"])
@pytest.mark.parametrize("shapes", SHAPES, ids=len)
def test_commit_moves_what_the_cache_does(shapes, dtypes, device):
    rng, seen = random.Random(3), Counter()
    torch.manual_seed(0)
    for entries in range(1, 10):
        first, nodes, capacity = rng.choice((0, 1, 1, 2)), 14, 40
        cache = filled(5, capacity, shapes, dtypes, device)
        cache.length += torch.tensor([rng.randrange(capacity - nodes + 1) for _ in range(5)], device=device)
        cache.length[rng.randrange(5)] = capacity - nodes  # up to the very end
        cache.select(rng.sample(range(5), rng.choice((1, 3, 5))))
        kinds = [rng.choice(("path", "path", "any", "in place", "empty")) for _ in cache.selected]
        # A view, as the verdict's path without the root is.
        paths = [[0, *path_of(rng, entries, first, nodes, kind)] for kind in kinds]
        slots = torch.tensor(paths, device=device)[:, 1:]
        seen.update(kinds)
        seen["overlap"] += sum(
            slot < first + entries and slot != first + j for path in paths for j, slot in enumerate(path[1:]) if slot >= 0
        )
        moved, referred = ([buffer.clone() for buffer in buffers_of(cache)] for _ in range(2))
        expected = [moved_by_hand(buffer, cache, paths, first) for buffer in buffers_of(cache)]
        groups = table(moved)
        assert len(groups) == len({(buffer.shape, buffer.dtype) for buffer in moved})
        cache._move(slots, first)
        commit_reference(referred, cache.index, cache.selected_length, slots, first)
        commit(groups, cache.index, cache.selected_length, slots, first)
        for buffers in (moved, referred, buffers_of(cache)):
            assert all(torch.equal(bits(buffer), bits(right)) for buffer, right in zip(buffers, expected, strict=True))
    assert seen["overlap"] > 5 and min(seen[kind] for kind in ("path", "any", "in place", "empty")) > 1


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts")
def test_a_path_in_place_is_not_touched(monkeypatch):
    counts, inner = Counter(), interpreter._interpreter

    class Counting:
        def __getattr__(self, name):
            counts[name] += 1
            return getattr(inner, name)

    buffers = [noise((2, 2, 9, 4), torch.float32, "cpu") for _ in range(2)]
    groups, rows, start = table(buffers), torch.tensor([1, 0]), torch.tensor([0, 2])
    monkeypatch.setattr(interpreter, "_interpreter", Counting())
    commit(groups, rows, start, torch.tensor([[1, 2, 3], [1, 2, -1]]), 1)
    programs = 2 * 2
    assert counts["store"] == 0 and counts["load"] == programs * (3 + 3)  # a pointer, a row, a start; the path
    commit(groups, rows, start, torch.tensor([[1, 2, 4], [1, 2, -1]]), 1)
    assert counts["store"] == 2 and counts["load"] == 2 * programs * (3 + 3) + 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_take_gathers_features_of_the_path(dtype, device):
    rng = random.Random(1)
    torch.manual_seed(1)
    for rows, nodes, inner, entries in ((1, 1, (5,), 1), (3, 7, (33,), 4), (2, 9, (3, 12), 5), (4, 6, (2, 2, 4), 9)):
        padded = torch.randn(rows, nodes + 2, *inner).to(dtype).to(device)
        features = padded[:, 1:-1]  # a view: rows of it are apart
        paths = [path_of(rng, entries, 0, max(nodes, entries), "path") for _ in range(rows - 1)] + [[-1] * entries]
        paths = [[min(node, nodes - 1) for node in path] for path in paths]
        path = torch.tensor([[0, *path] for path in paths], device=device)[:, 1:]
        padded[-1] = float("nan")  # the row that takes nothing
        taken = take(features, path)
        assert taken.dtype == dtype and torch.equal(taken, take_reference(features, path))
        for b, entry in ((b, j) for b in range(rows) for j in range(entries)):
            node = paths[b][entry]
            assert torch.equal(taken[b, entry], features[b, node] if node >= 0 else torch.zeros(inner, dtype=dtype, device=device))


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")
def test_drafters_get_zeros_past_the_end_of_a_path():
    """With kernels and without, whatever is in node 0 or in the last one."""
    hidden, taps = torch.full((2, 3, 4), float("nan")), torch.full((2, 3, 2, 4), float("nan"))
    hidden[:, 1], taps[:, 1] = 1.0, 2.0
    path = torch.tensor([[1, -1, -1], [-1, -1, 1]])
    for on in (False, True):
        with kernels.use(on):
            out = NodeOutput(hidden, taps).along(path)
        expected = (path > 0).float()
        assert out.taps is not None and torch.equal(out.hidden, expected[..., None].expand(-1, -1, 4))
        assert torch.equal(out.taps, 2 * expected[..., None, None].expand(-1, -1, 2, 4))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
def test_nothing_waits_for_the_device(request, monkeypatch):
    """Sizes of a real model, and none of the interpreter's small blocks."""
    monkeypatch.setattr(module, "_BLOCK", 1024)
    cache = filled(4, 300, [(8, 128, 8, 128)] * 4 + [(1, 576, 1, 512)], [torch.bfloat16], "cuda")
    cache.length += torch.tensor([0, 100, 236, 77], device="cuda")
    cache.select([2, 0, 3])
    slots = torch.tensor([[1, 3, 9, 60], [1, 2, -1, -1], [5, 6, 7, -1]], device="cuda")
    features, path = torch.randn(3, 64, 3, 4096, device="cuda"), torch.tensor([[0, 9], [0, -1], [-1, -1]], device="cuda")
    moved = [buffer.clone() for buffer in buffers_of(cache)]
    groups = table(moved)
    torch.cuda.synchronize()
    request.getfixturevalue("no_synchronisation")
    commit(groups, cache.index, cache.selected_length, slots, 1)
    taken = take(features, path)
    torch.cuda.set_sync_debug_mode("default")
    cache._move(slots, 1)
    assert all(torch.equal(bits(one), bits(expected)) for one, expected in zip(moved, buffers_of(cache), strict=True))
    assert torch.equal(taken, take_reference(features, path))


def test_refusals():
    buffers = [torch.zeros(2, 1, 6, 4) for _ in range(2)]
    rows, start, slots = torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([[1, 2], [2, 3]])
    with pytest.raises(ValueError, match="last stride 1, at byte 0"):
        table([buffers[0].transpose(2, 3)])
    with pytest.raises(ValueError, match="at byte 4 of 16"):
        table([torch.zeros(49)[1:].view(2, 1, 6, 4)])
    groups = table(buffers)
    for wrong in ((rows.int(), start, slots), (rows[:1], start, slots), (rows, start, slots[0]), (rows, torch.zeros(4).long()[::2], slots)):
        with pytest.raises(ValueError, match="all int64"):
            commit(groups, *wrong, 1)
    with pytest.raises(ValueError, match="positions 5 … 6 to fill of 6; give a larger context"):
        commit(groups, rows, start, slots, 5)
    features = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="the target's output and the verdict's path"):
        take(features, slots.int())
    with pytest.raises(ValueError, match=r"call \.contiguous\(\)"):
        take(features.transpose(1, 2), slots)
    commit(groups, rows, start, slots[:, :0], 0)
    assert take(features, slots[:, :0]).shape == (2, 0, 4)


CALLS = """
buffers = [torch.zeros(3, 8, 300, 128, dtype=torch.bfloat16) for _ in range(4)] + [torch.zeros(3, 2, 300, 80)]
zero = torch.zeros(2, dtype=torch.int64)
kernels.commit(kernels.table(buffers), zero, zero, torch.zeros(2, 5, dtype=torch.int64), 1)
for shape in ((2, 64, 4096), (2, 64, 3, 4096)):
    kernels.take(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.int64))
"""


def test_compiles_for_hopper(tmp_path):
    """Features with taps and without share a kernel."""
    assert compiled("draftsmith.inference.kernels.commit", ("_move", "_take"), CALLS, tmp_path) == ["_move", "_move", "_take"]
