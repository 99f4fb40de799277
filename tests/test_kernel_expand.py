"""The kernels that grow a dynamic tree, against DynamicExpansion and plain torch: under Triton's interpreter, natively where there is a GPU."""

from dataclasses import replace

import pytest
import torch
from hopper import compiled
from interpreted import INTERPRETED
from planting import round_context

pytest.importorskip("triton")

from draftsmith.inference.expand import CurrentLevel, DynamicExpansion, DynamicTree
from draftsmith.inference.kernels import expand as module
from draftsmith.inference.kernels.expand import FusedExpansion, Store, best, best_reference, frontier, rerank

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")]),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What empty and new_empty give is NaN, the least integer, true."""

    def poisoning(make):
        def made(*shape, **how):
            tensor = make(*shape, **how)
            least = True if tensor.dtype == torch.bool else float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
            return tensor.fill_(least)

        return made

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


@pytest.fixture
def stable(monkeypatch):
    """torch.topk leaves the order of equals open; here the earlier comes first."""

    def topk(self, count, dim=-1):
        values, indices = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, count), indices.narrow(dim, 0, count)))

    monkeypatch.setattr(torch.Tensor, "topk", topk)


def masked(*shape: int) -> torch.Tensor:
    """Few are possible, but one at least."""
    gone = (torch.rand(shape) < 0.97).scatter_(-1, torch.randint(shape[-1], (*shape[:-1], 1)), False)
    return torch.randn(shape).masked_fill(gone, -torch.inf)


LOGITS = {
    "any": lambda *shape: 3 * torch.randn(shape),
    "ties": lambda *shape: torch.randint(-2, 2, shape) / 2 * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0),  # of both zeros, too
    "masked": masked,
    "one-hot": lambda *shape: torch.full(shape, -torch.inf).scatter_(-1, torch.randint(shape[-1], (*shape[:-1], 1)), 5.0),
    "nothing": lambda *shape: torch.full(shape, -torch.inf),
}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the law that has none
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 64, 257, 1000])
def test_best_equals_sorting(vocab, dtype, device, monkeypatch):
    torch.manual_seed(vocab)
    for number, (kind, make) in enumerate(LOGITS.items()):
        group, groups, count = [(8, 8, 5), (4, 8, 3), (128, 32, 1), (16, 2, min(vocab, 16)), (2, 64, 4)][number]
        monkeypatch.setattr(module, "_GROUP", group)
        monkeypatch.setattr(module, "_GROUPS", groups)
        whole = torch.full((2, 4, vocab + 3), torch.inf, dtype=dtype)  # beyond the vocabulary, and between the nodes
        whole[:, ::2, :vocab] = make(2, 2, vocab)
        logits = whole.to(device)[:, ::2, :vocab]
        ids, scores = best(logits, count)
        expected, laws = best_reference(logits, count)
        assert ids.shape == (2, 2, count) and torch.equal(ids, expected), kind
        torch.testing.assert_close(scores, laws, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert scores.isnan().any() == (kind == "nothing")


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_best_of_nan_is_a_token(device):
    logits = torch.randn(1, 3, 300, device=device)
    logits[0, 0] = float("nan")
    logits[0, 1, 7] = -float("nan")
    logits[0, 2] = torch.inf
    ids, _ = best(logits, 6)  # so that nothing is read out of bounds, whatever went wrong before
    assert ((ids >= 0) & (ids < 300)).all() and all(len(set(row)) == 6 for row in ids[0].tolist())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
@pytest.mark.parametrize("vocab", [32000, 151936, 50257, 262208, 1 << 19])
def test_best_of_a_real_vocabulary(vocab):
    for dtype in (torch.bfloat16, torch.float32):
        logits = (4 * torch.randn(3, 10, vocab, device="cuda")).to(dtype)  # in bfloat16 with many ties
        ids, scores = best(logits, 10)
        expected, laws = best_reference(logits, 10)
        assert torch.equal(ids, expected)
        torch.testing.assert_close(scores, laws, rtol=1e-5, atol=1e-5)


CLOSE = torch.tensor([1e-7, 0.0, -0.0, -0.5, -0.50000006])  # above 0 as rounding may give it, and neighbours


def law(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of candidates."""
    if kind == "close":
        return CLOSE[torch.randint(len(CLOSE), shape)]
    return best_reference(LOGITS[kind](*shape[:2], 20), shape[2])[1]


def same(one: CurrentLevel | None, other: CurrentLevel | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    for name in ("tokens", "above", "visible", "key_depth"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.visible.dtype == torch.bool and (one.depth, one.open) == (other.depth, other.open)


def grown(beam: DynamicTree, rows: int, kind: str, device: str, levels: int = 99) -> None:
    """Grow both on the same candidates, at most so many levels, and compare all that they say."""
    roots = torch.randint(100, (rows,)).tolist()
    asked = replace(asked := round_context(list(range(rows)), roots), last_tokens=asked.last_tokens.to(device))
    plain, fused = DynamicExpansion(beam, asked), FusedExpansion(beam, asked)
    shape = (rows, 1, beam.width)
    for _ in range(min(levels, beam.depth)):
        ids, scores = torch.randint(1000, shape).to(device), law(kind, shape).to(device)
        given = plain.extend(ids, scores)
        same(fused.extend(ids, scores), given)
        if given is not None:
            shape = (rows, given.tokens.shape[1], beam.width)
    (tree, slots), (expected, places) = fused.finish(), plain.finish()
    for name in ("tokens", "parents", "size", "depth", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    assert torch.equal(slots, places) and torch.equal(tree.visible(), expected.visible())
    assert (tree.width, tree.full, tree.q_logits, tree.replacement) == (expected.width, expected.full, None, expected.replacement)
    tree.validate()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["any", "ties", "close", "masked", "one-hot"])
def test_trees_equal_plain_growth(kind, device, stable):
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    for depth in range(1, 6):
        for _ in range(2):
            width, nodes, rows = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 9), (2, 65), (1, 4)))
            grown(DynamicTree(depth, width, nodes), rows, kind, device)
    grown(DynamicTree(3, 4, 9), 2, kind, device, levels=2)  # stopped before it is as deep as it may be
    grown(DynamicTree(2, 16, 256), 1, kind, device)  # ancestors of four words
    grown(DynamicTree(3, 8, 65), 2, kind, device)


@pytest.mark.parametrize("device", DEVICES)
def test_trees_of_nan_are_trees(device):
    """So that what follows stays within bounds."""
    torch.manual_seed(8)
    asked = replace(asked := round_context([0, 1], [4, 5]), last_tokens=asked.last_tokens.to(device))
    for _ in range(5):
        fused, shape = FusedExpansion(DynamicTree(3, 4, 6), asked), (2, 1, 4)
        for wrong in (0.0, 0.5, 0.5):  # better than parents that are numbers
            logp = law("any", shape).masked_fill(torch.rand(shape) < wrong, torch.nan).to(device)
            fused.extend(torch.randint(1000, shape).to(device), logp)
            shape = (2, 4, 4)
        tree, slots = fused.finish()
        assert ((tree.parents[:, 1:] >= 0) & (tree.parents < torch.arange(6, device=device))[:, 1:]).all()
        assert ((tree.tokens >= 0) & (tree.tokens < 1000) & (tree.depth <= 3) & (slots >= -1) & (slots < 8)).all()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
@pytest.mark.parametrize("beam", [DynamicTree(6, 10, 60), DynamicTree(16, 16, 64), DynamicTree(16, 16, 256)])
def test_trees_of_real_sizes(beam, stable):
    torch.manual_seed(7)
    for kind in ("any", "ties"):
        grown(beam, 8, kind, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
def test_nothing_waits_for_the_device():
    logits, store = torch.randn(2, 3, 999, device="cuda"), Store.rooted(torch.tensor([4, 5], device="cuda"), 19)
    at, seen = torch.zeros(2, 1, dtype=torch.int64, device="cuda"), torch.zeros(2, 1, 0, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        at, seen, _, _ = frontier(store, at, seen, *best(logits[:, :1], 3), 1, 3)
        frontier(store, at, seen, *best(logits, 3), 4, 0)
        rerank(store.upto(13), 9, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


CALLS = """
for dtype in (torch.float32, torch.bfloat16):
    kernels.best(torch.zeros(2, 3, 128_256, dtype=dtype), 8)
root = torch.zeros(2, dtype=torch.int64)
store = kernels.Store.rooted(root, 1 + 10 + 7 * 100)
at, seen, stored = root[:, None], torch.zeros(2, 1, 0, dtype=torch.bool), 1
for nodes, width in ((1, 10), (10, 10), (10, 0)):
    ids = torch.zeros(2, nodes, 10, dtype=torch.int64)
    at, seen, *_ = kernels.frontier(store, at, seen, ids, ids.float(), stored, width)
    stored += 10 * nodes
kernels.rerank(store.upto(stored), 60, 3)
"""


def test_compiles_for_hopper(tmp_path):
    found = compiled("draftsmith.inference.kernels.expand", ("_maxima", "_best", "_frontier", "_rerank"), CALLS, tmp_path)
    assert found == ["_best"] * 2 + ["_frontier"] * 3 + ["_maxima"] * 2 + ["_rerank"]


def test_refusals():
    logits = torch.zeros(1, 2, 10)
    for wrong in (logits.double(), logits.transpose(1, 2)):
        with pytest.raises(ValueError, match="use best_reference"):
            best(wrong, 1)
    for count, vocab in ((0, 10), (11, 10), (17, 20), (1, (1 << 19) + 1)):
        with pytest.raises(ValueError, match=f"got {count} of {vocab} tokens"):
            best(torch.zeros(1, 1, vocab), count)
    store = Store.rooted(torch.tensor([3]), 12)
    at, seen = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 0, dtype=torch.bool)
    ids, logp = torch.zeros(1, 1, 4, dtype=torch.int64), torch.zeros(1, 1, 4)
    for stored, width in ((9, 2), (1, 5)):
        with pytest.raises(ValueError, match="draft a narrower or shallower tree"):
            frontier(store, at, seen, ids, logp, stored, width)
    with pytest.raises(ValueError, match="got logp"):
        frontier(store, at, seen, ids, logp.double(), 1, 2)
    with pytest.raises(ValueError, match="got at"):
        frontier(store, at[:, :0], seen, ids, logp, 1, 2)
    with pytest.raises(ValueError, match=r"got scores .* take Store.rooted"):
        rerank(store._replace(scores=store.scores[:, :3]), 4, 1)
    with pytest.raises(ValueError, match="got 257 of 600 candidates"):
        rerank(Store.rooted(torch.tensor([3]), 600), 257, 1)
    with pytest.raises(ValueError, match="got 4 of 5000 candidates"):
        rerank(Store.rooted(torch.tensor([3]), 5000), 4, 1)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")
def test_a_root_alone():
    tree, slots = rerank(Store.rooted(torch.tensor([3]), 12).upto(1), 4, 0)
    assert tree.tokens.tolist() == [[3]] and slots.tolist() == tree.parents.tolist() == [[-1]] and tree.size.tolist() == [1]
    assert tree.ancestors.tolist() == [[[1]]] and tree.depth.tolist() == [[0]]
