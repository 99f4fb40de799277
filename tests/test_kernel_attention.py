"""The attention kernel against its plain-torch reference, under Triton's interpreter; natively where there is a GPU."""

import pytest
import torch
from hopper import compiled
from torch import Tensor

pytest.importorskip("triton")
from kernel_fixtures import _one_way, _poisoned  # noqa: F401

from draftsmith.inference.attention import TreeAttention, tree_attention_forward
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.kernels import attention
from draftsmith.inference.kernels.attention import tree_attention, tree_attention_reference
from draftsmith.inference.tree import DraftTree

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def case(
    nodes: int,
    span: int | None = None,
    *,
    lengths: tuple[int, ...] = (0, 37, 90),
    kv_heads: int = 2,
    groups: int = 2,
    dim: int = 24,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spare: int = 5,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """The arguments up to key_depth: `nodes` of random trees of `span`, rows of the buffers in disorder, NaN wherever nobody may look."""
    generator = torch.Generator().manual_seed(1000 * nodes + seed)
    batch, span, value_dim = len(lengths), span or nodes, value_dim or dim
    index = torch.arange(span)
    back = 1 + (torch.rand(batch, span, generator=generator) * index.clamp(1, 6)).long()
    parents = (index - back).clamp(min=0).where(index > 0, -1)
    tree = DraftTree.build(torch.zeros_like(parents), parents, torch.full((batch,), span))
    pick = torch.randperm(span, generator=generator)[:nodes].sort().values
    words, depth = tree.ancestors[:, pick], tree.depth[:, pick]
    seen = tree.visible()[:, pick].any(1)  # [B,M]
    rows = torch.randperm(batch + 2, generator=generator)[:batch]
    buffers: list[Tensor] = []
    for width in (dim, value_dim):
        buffer = torch.full((batch + 2, kv_heads, max(lengths) + span + spare, width), torch.nan)
        for b, length in enumerate(lengths):
            fresh = torch.randn(kv_heads, length + span, width, generator=generator)
            fresh[:, length:][:, ~seen[b]] = 1e4
            buffer[rows[b], :, : length + span] = fresh
        buffers.append(buffer.to(device, dtype))
    query = torch.randn(batch, nodes, kv_heads * groups, dim, generator=generator).to(device, dtype).transpose(1, 2)
    return (query, *buffers, *(tensor.to(device) for tensor in (rows, torch.tensor(lengths), depth, words, tree.depth)))


def check(arguments: tuple[Tensor, ...], **options) -> Tensor:
    options = {"scale": arguments[0].shape[-1] ** -0.5} | options
    got, expected = tree_attention(*arguments, **options), tree_attention_reference(*arguments, **options)
    assert got.dtype == arguments[0].dtype and got.is_contiguous() and expected.isfinite().all()
    tolerance = TOLERANCE[got.dtype]
    if got.is_cuda and got.dtype == torch.float32 and options.get("softcap"):
        tolerance = {"rtol": 1e-5, "atol": 3e-5}  # cap − 2·cap/(1 + e) cancels, and a GPU's exponential has two bits less
    torch.testing.assert_close(got, expected, **tolerance)
    return got


def splits(monkeypatch, count: int) -> None:
    monkeypatch.setattr(attention, "_choose_splits", lambda *_: count)


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 63, 64, 65, 127])
def test_every_number_of_nodes(monkeypatch, nodes):
    splits(monkeypatch, 2 if nodes in (2, 33) else 1)
    check(case(nodes, lengths=(0, 21, 40), kv_heads=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("nodes", "count"), [(1, 3), (64, 1), (66, 1)])
def test_half_precision(monkeypatch, nodes, count, dtype):
    """Key tiles of 64 slots, a word of the tree each; the lengths are on both sides of a tile's end."""
    splits(monkeypatch, count)
    check(case(nodes, lengths=(64, 0, 130), kv_heads=1, dtype=dtype))


@pytest.mark.parametrize(
    ("groups", "dim", "value_dim", "dtype"),
    [
        (1, 64, 64, torch.float32),
        (4, 80, 80, torch.float32),
        (16, 128, 128, torch.bfloat16),
        (2, 192, 128, torch.float32),
        (4, 40, 96, torch.float16),
        (2, 256, 256, torch.float32),
    ],
)
def test_groups_and_dims(groups, dim, value_dim, dtype):
    check(case(3, lengths=(3, 70), kv_heads=2, groups=groups, dim=dim, value_dim=value_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [1, 3, 16, 17, 38, 64, 1000])
def test_windows_cut_the_tree_and_the_prefix(monkeypatch, window, dtype):
    splits(monkeypatch, 1)
    arguments = case(33, lengths=(0, 37, 140), kv_heads=1, groups=1, dtype=dtype)
    assert arguments[5].max() > 3
    check(arguments, window=window)


def test_tiles_before_the_window_are_not_read():
    arguments = case(9, lengths=(0, 95))
    query, keys, values, rows, *_ = arguments
    expected = check(arguments, window=20)  # from slot 76 on; tiles of 16
    keys[rows[1], :, :64] = values[rows[1], :, :64] = torch.nan
    torch.testing.assert_close(tree_attention(*arguments, scale=query.shape[-1] ** -0.5, window=20), expected, rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("softcap", "sink"), [(0.7, False), (50.0, False), (None, True), (1.5, True)])
def test_softcap_and_sinks(softcap, sink, window):
    arguments = case(6, lengths=(0, 21, 40))
    sinks = torch.tensor([[-3.0, 9.0], [0.0, 9.0], [2.0, 9.0], [9.0, 9.0]])[:, 0] if sink else None  # not one after the other in memory
    check(arguments, softcap=softcap, sinks=sinks, window=window, scale=0.6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("nodes", "span"), [(1, 2), (3, 64), (8, 65), (20, 200), (2, 256)])
def test_levels(nodes, span, dtype):
    """Queries that are only some of the nodes; up to four words."""
    arguments = case(nodes, span, lengths=(0, 50), kv_heads=1, dtype=dtype)
    assert arguments[6].shape[-1] == (span + 63) // 64
    check(arguments)
    check(arguments, window=5)


def test_shares_make_no_difference(monkeypatch):
    """Also more than there are tiles, and more than the merge takes at once."""
    monkeypatch.setattr(attention, "_MERGED", 2)
    arguments, sinks = case(3, 12, lengths=(0, 80)), torch.tensor([1.0, -1.0, 0.5, 2.0])
    assert attention._choose_splits(1, 9, torch.device("cpu")) > 1
    results = []
    for count in (1, 2, 5, 9):
        splits(monkeypatch, count)
        results.append(check(arguments))
        check(arguments, window=9, sinks=sinks)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sink", [False, True])
def test_nothing_to_see_is_nothing(monkeypatch, count, sink):
    splits(monkeypatch, count)
    query, keys, values, rows, length, depth, words, key_depth = case(5, lengths=(0, 0, 30))
    words[0] = words[1, 3:] = words[2] = 0
    options = {"sinks": torch.zeros(4) if sink else None}
    got = check((query, keys, values, rows, length, depth, words, key_depth), **options)
    assert not got[0].any() and not got[1, 3:].any() and got[1, :3].any() and got[2].all()
    got = check((query, keys, values, rows, length, depth + 1, words, key_depth), window=1, **options)
    assert not got[2].any()


@pytest.mark.parametrize("max_length", [None, 37, 0])
def test_buffers_without_a_slot_to_spare(max_length):
    check(case(7, lengths=(37, 12), spare=0), max_length=max_length)


def test_layouts():
    """Heads between the slots, as some caches lie; a tree that all rows share, expanded."""
    query, keys, values, rows, length, depth, words, key_depth = case(6, lengths=(9, 30))
    loose = torch.full((*keys.shape[:2], keys.shape[2], keys.shape[3] + 3), torch.nan).transpose(1, 2).contiguous().transpose(1, 2)
    loose[..., :-3] = keys
    shared = [tensor[:1].expand(2, *tensor.shape[1:]) for tensor in (depth, words, key_depth)]
    check((query.contiguous(), loose[..., :-3], values.transpose(1, 2).contiguous().transpose(1, 2), rows, length, *shared), window=12)


def test_against_attention_over_the_cache():
    """The reference, the kernel and attention without kernels (SDPA) are independent, and agree."""
    generator = torch.Generator().manual_seed(3)
    cache = TreeCache(4, 60)
    cache.select([3, 1])
    draw = {"generator": generator}
    cache.update(torch.randn(2, 2, 20, 16, **draw), torch.randn(2, 2, 20, 8, **draw), 0)
    cache.advance([20, 11])
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2, 4], [-1, 0, 1, 2, 3, 4, 5]])
    tree = DraftTree.build(torch.zeros_like(parents), parents, torch.tensor([7, 7]))
    plain = TreeAttention.tree(cache, tree)
    read = cache.update(torch.randn(2, 2, 7, 16, **draw), torch.randn(2, 2, 7, 8, **draw), 0)
    store = cache._stores[0]
    query, sinks = torch.randn(2, 4, 7, 16, **draw), torch.randn(4, **draw)
    rows = torch.tensor(cache.selected)
    for window, softcap, sink in ((None, None, None), (4, None, None), (15, 2.0, None), (4, None, sinks), (None, 1.5, sinks)):
        expected, _ = tree_attention_forward(
            torch.nn.Identity(), query, *read, None, 0.3, sliding_window=window, softcap=softcap, s_aux=sink, tree_attention=plain
        )
        for form in (tree_attention, tree_attention_reference):
            got = form(
                query, store.keys, store.values, rows, cache.selected_length, tree.depth, tree.ancestors, tree.depth,
                scale=0.3, window=window, softcap=softcap, sinks=sink, max_length=cache.max_length,
            )  # fmt: skip
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_the_reference_keeps_float64():
    arguments = case(4, lengths=(3, 8))
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in arguments]
    got = tree_attention_reference(*wide, scale=0.2)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.float(), tree_attention_reference(*arguments, scale=0.2))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda query: query.double(), "float64"),
        (1, lambda keys: keys.half(), "float16"),
        (0, lambda query: query[:, :3], "3 heads"),
        (1, lambda keys: keys[:, :, :-1], "got keys"),
        (2, lambda values: values.transpose(2, 3).contiguous().transpose(2, 3), "stride"),
        (3, lambda rows: rows[:1], "got rows"),
        (4, lambda length: length.int(), "int32"),
        (5, lambda depth: depth[:, :-1], "got depth"),
        (6, lambda words: words.repeat(1, 1, 2), "got words"),
        (6, lambda words: words.to("meta"), "meta"),
        (7, lambda key_depth: key_depth.repeat(1, 99), "on 396 of"),
    ],
)
def test_refusals(place, change, message):
    arguments = list(case(4, lengths=(3, 8)))
    arguments[place] = change(arguments[place])
    with pytest.raises(ValueError, match=message):
        tree_attention(*arguments, scale=1.0)


CALLS = """
for dtype, dim, groups, nodes, options in (
    (torch.bfloat16, 128, 4, 1, {}),
    (torch.bfloat16, 128, 4, 64, {"window": 100, "softcap": 30.0, "sinks": torch.zeros(8, dtype=torch.bfloat16)}),
    (torch.float16, 80, 1, 20, {"max_length": 0}),
    (torch.float32, 64, 1, 40, {"window": 100}),
):
    zero = torch.zeros(2, dtype=torch.int64)
    tree = zero[:, None].expand(2, nodes)
    buffer = torch.zeros(2, 2, 500, dim, dtype=dtype)
    kernels.tree_attention(
        buffer[:, :1, :nodes].expand(2, 2 * groups, nodes, dim), buffer, buffer, zero, zero, tree, tree[..., None], tree, scale=1.0, **options
    )
"""


def test_compiles_for_hopper(tmp_path):
    """One merge for all kinds of one size; the kind without a prefix needs none."""
    kernels = compiled("draftsmith.inference.kernels.attention", ("_attend", "_merge"), CALLS, tmp_path, 227 * 1024)
    assert kernels == 4 * ["_attend"] + kernels[4:] and set(kernels[4:]) == {"_merge"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_dims_natively(dim, dtype):
    sinks = torch.linspace(-1, 3, 8, device="cuda", dtype=dtype)
    for nodes, span in ((1, 1), (17, 17), (64, 64), (30, 200)):
        arguments = case(nodes, span, lengths=(0, 700, 3000), groups=4, dim=dim, dtype=dtype, device="cuda")
        check(arguments)
        check(arguments, window=50, softcap=20.0, sinks=sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 63, 64, 65, 127])
def test_nodes_natively(nodes):
    check(case(nodes, dtype=torch.float16, device="cuda"))
    check(case(nodes, groups=1, device="cuda"), window=7)


@pytest.mark.gpu
@pytest.mark.parametrize(("row_stride", "slot_stride"), [(2**30, 64), (64, 2**26)])
def test_offsets_beyond_32_bits(row_stride, slot_stride):
    """Thirteen gigabytes at most: the last row or slot of either buffer begins at 2³¹ elements or later."""
    arguments = list(case(5, lengths=(40,), kv_heads=1, dim=64, dtype=torch.float16, device="cuda"))
    row = int(arguments[3])
    for place in (1, 2):
        near = arguments[place][row]
        size = 2 * row_stride + (near.shape[1] - 1) * slot_stride + 64
        assert size > 2**31
        arguments[place] = torch.empty(size, dtype=torch.float16, device="cuda").as_strided(
            (3, *near.shape), (row_stride, 0, slot_stride, 1)
        )
        arguments[place][2] = near
    arguments[3] = torch.full_like(arguments[3], 2)
    check(tuple(arguments))
