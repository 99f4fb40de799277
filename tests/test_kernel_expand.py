"""The kernels that expand a dynamic tree, against DynamicExpansion and plain torch: under Triton's interpreter, compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch
from hopper import compiled
from interpreted import INTERPRETED
from planting import round_context

pytest.importorskip("triton")

from draftsmith.inference.expand import CurrentLevel, DynamicExpansion, DynamicTree, FusedExpansion
from draftsmith.inference.kernels import expand as module
from draftsmith.inference.kernels.expand import CandidateStore, add_level, best, best_reference, rerank

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")]),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """torch.empty and new_empty return NaN, the least integer, true."""

    def poisoning(empty):
        def poisoned(*shape, **options):
            tensor = empty(*shape, **options)
            if tensor.dtype == torch.bool:
                return tensor.fill_(True)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

        return poisoned

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


@pytest.fixture
def stable(monkeypatch):
    """torch.topk leaves the order of equal values open; this one puts the earlier first."""

    def topk(self, count, dim=-1):
        values, indices = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, count), indices.narrow(dim, 0, count)))

    monkeypatch.setattr(torch.Tensor, "topk", topk)


def masked(*shape: int) -> torch.Tensor:
    """Few tokens are possible, but at least one."""
    impossible = (torch.rand(shape) < 0.97).scatter_(-1, torch.randint(shape[-1], (*shape[:-1], 1)), False)
    return torch.randn(shape).masked_fill(impossible, -torch.inf)


LOGITS = {
    "any": lambda *shape: 3 * torch.randn(shape),
    "ties": lambda *shape: torch.randint(-2, 2, shape) / 2 * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0),  # of both zeros, too
    "masked": masked,
    "one-hot": lambda *shape: torch.full(shape, -torch.inf).scatter_(-1, torch.randint(shape[-1], (*shape[:-1], 1)), 5.0),
    "nothing": lambda *shape: torch.full(shape, -torch.inf),
}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of a softmax without any possible token
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 64, 257, 1000])
def test_best_equals_sorting(vocab, dtype, device, monkeypatch):
    torch.manual_seed(vocab)
    for number, (kind, make) in enumerate(LOGITS.items()):
        group, groups, count = [(8, 8, 5), (4, 8, 3), (128, 32, 1), (16, 2, min(vocab, 16)), (2, 64, 4)][number]
        monkeypatch.setattr(module, "_GROUP", group)
        monkeypatch.setattr(module, "_GROUPS", groups)
        padded = torch.full((2, 4, vocab + 3), torch.inf, dtype=dtype)  # beyond the vocabulary, and between the nodes
        padded[:, ::2, :vocab] = make(2, 2, vocab)
        logits = padded.to(device)[:, ::2, :vocab]
        ids, scores = best(logits, count)
        expected, log_p = best_reference(logits, count)
        assert ids.shape == (2, 2, count) and torch.equal(ids, expected), kind
        torch.testing.assert_close(scores, log_p, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert scores.isnan().any() == (kind == "nothing")


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_best_of_nan_is_a_token(device):
    logits = torch.randn(1, 3, 300, device=device)
    logits[0, 0] = float("nan")
    logits[0, 1, 7] = -float("nan")
    logits[0, 2] = torch.inf
    ids, _ = best(logits, 6)  # so that a NaN never makes later code read out of bounds
    assert ((ids >= 0) & (ids < 300)).all() and all(len(set(row)) == 6 for row in ids[0].tolist())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
@pytest.mark.parametrize("vocab", [32000, 151936, 50257, 262208, 1 << 19])
def test_best_of_a_real_vocabulary(vocab):
    for dtype in (torch.bfloat16, torch.float32):
        logits = (4 * torch.randn(3, 10, vocab, device="cuda")).to(dtype)  # in bfloat16 with many ties
        ids, scores = best(logits, 10)
        expected, log_p = best_reference(logits, 10)
        assert torch.equal(ids, expected)
        torch.testing.assert_close(scores, log_p, rtol=1e-5, atol=1e-5)


CLOSE = torch.tensor([1e-7, 0.0, -0.0, -0.5, -0.50000006])  # above 0 as rounding may give it, and neighbours


def log_probabilities(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of candidates."""
    if kind == "close":
        return CLOSE[torch.randint(len(CLOSE), shape)]
    return best_reference(LOGITS[kind](*shape[:2], 20), shape[2])[1]


def check_levels_equal(got: CurrentLevel | None, expected: CurrentLevel | None) -> None:
    if got is None or expected is None:
        assert got is expected
        return
    for name in ("tokens", "parent_index", "visible", "key_depth"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.visible.dtype == torch.bool and (got.depth, got.all_visible) == (expected.depth, expected.all_visible)


def check_expansion(spec: DynamicTree, rows: int, kind: str, device: str, levels: int = 99) -> None:
    """Expand both on the same candidates, at most `levels` levels, and compare all results."""
    roots = torch.randint(100, (rows,)).tolist()
    round = round_context(list(range(rows)), roots)
    round = replace(round, last_tokens=round.last_tokens.to(device))
    plain, fused = DynamicExpansion(spec, round), FusedExpansion(spec, round)
    shape = (rows, 1, spec.width)
    for _ in range(min(levels, spec.depth)):
        ids, scores = torch.randint(1000, shape).to(device), log_probabilities(kind, shape).to(device)
        level = plain.add_level(ids, scores)
        check_levels_equal(fused.add_level(ids, scores), level)
        if level is not None:
            shape = (rows, level.tokens.shape[1], spec.width)
    (tree, encoded_index), (expected, expected_index) = fused.finish(), plain.finish()
    for name in ("tokens", "parents", "size", "depth", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    assert torch.equal(encoded_index, expected_index) and torch.equal(tree.visible(), expected.visible())
    assert (tree.width, tree.full, tree.q_logits, tree.replacement) == (expected.width, expected.full, None, expected.replacement)
    tree.validate()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["any", "ties", "close", "masked", "one-hot"])
def test_trees_equal_the_references(kind, device, stable):
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    for depth in range(1, 6):
        for _ in range(2):
            width, nodes, rows = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 9), (2, 65), (1, 4)))
            check_expansion(DynamicTree(depth, width, nodes), rows, kind, device)
    check_expansion(DynamicTree(3, 4, 9), 2, kind, device, levels=2)  # stopped before its full depth
    check_expansion(DynamicTree(2, 16, 256), 1, kind, device)  # ancestors of four words
    check_expansion(DynamicTree(3, 8, 65), 2, kind, device)


@pytest.mark.parametrize("device", DEVICES)
def test_trees_of_nan_are_trees(device):
    """So that later code stays within bounds."""
    torch.manual_seed(8)
    round = round_context([0, 1], [4, 5])
    round = replace(round, last_tokens=round.last_tokens.to(device))
    for _ in range(5):
        fused, shape = FusedExpansion(DynamicTree(3, 4, 6), round), (2, 1, 4)
        for wrong in (0.0, 0.5, 0.5):  # NaN children of parents that are numbers
            logp = log_probabilities("any", shape).masked_fill(torch.rand(shape) < wrong, torch.nan).to(device)
            fused.add_level(torch.randint(1000, shape).to(device), logp)
            shape = (2, 4, 4)
        tree, encoded_index = fused.finish()
        assert ((tree.parents[:, 1:] >= 0) & (tree.parents < torch.arange(6, device=device))[:, 1:]).all()
        assert ((tree.tokens >= 0) & (tree.tokens < 1000) & (tree.depth <= 3) & (encoded_index >= -1) & (encoded_index < 8)).all()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
@pytest.mark.parametrize("spec", [DynamicTree(6, 10, 60), DynamicTree(16, 16, 64), DynamicTree(16, 16, 256)])
def test_trees_of_real_sizes(spec, stable):
    torch.manual_seed(7)
    for kind in ("any", "ties"):
        check_expansion(spec, 8, kind, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter is on")
def test_nothing_waits_for_the_device():
    logits, store = torch.randn(2, 3, 999, device="cuda"), CandidateStore.rooted(torch.tensor([4, 5], device="cuda"), 19)
    index, visible = torch.zeros(2, 1, dtype=torch.int64, device="cuda"), torch.zeros(2, 1, 0, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        index, visible, _, _ = add_level(store, index, visible, *best(logits[:, :1], 3), 1, 3)
        add_level(store, index, visible, *best(logits, 3), 4, 0)
        rerank(store.upto(13), 9, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


CALLS = """
for dtype in (torch.float32, torch.bfloat16):
    kernels.best(torch.zeros(2, 3, 128_256, dtype=dtype), 8)
root = torch.zeros(2, dtype=torch.int64)
store = kernels.CandidateStore.rooted(root, 1 + 10 + 7 * 100)
index, visible, stored = root[:, None], torch.zeros(2, 1, 0, dtype=torch.bool), 1
for nodes, width in ((1, 10), (10, 10), (10, 0)):
    ids = torch.zeros(2, nodes, 10, dtype=torch.int64)
    index, visible, *_ = kernels.add_level(store, index, visible, ids, ids.float(), stored, width)
    stored += 10 * nodes
kernels.rerank(store.upto(stored), 60, 3)
"""


def test_compiles_for_hopper(tmp_path):
    names = compiled("draftsmith.inference.kernels.expand", ("_maxima", "_best", "_add_level", "_rerank"), CALLS, tmp_path)
    assert names == ["_add_level"] * 3 + ["_best"] * 2 + ["_maxima"] * 2 + ["_rerank"]


def test_refusals():
    logits = torch.zeros(1, 2, 10)
    for wrong in (logits.double(), logits.transpose(1, 2)):
        with pytest.raises(ValueError, match="use best_reference"):
            best(wrong, 1)
    for count, vocab in ((0, 10), (11, 10), (17, 20), (1, (1 << 19) + 1)):
        with pytest.raises(ValueError, match=f"got {count} of {vocab} tokens"):
            best(torch.zeros(1, 1, vocab), count)
    store = CandidateStore.rooted(torch.tensor([3]), 12)
    index, visible = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 0, dtype=torch.bool)
    ids, logp = torch.zeros(1, 1, 4, dtype=torch.int64), torch.zeros(1, 1, 4)
    for stored, width in ((9, 2), (1, 5)):
        with pytest.raises(ValueError, match="draft a narrower or shallower tree"):
            add_level(store, index, visible, ids, logp, stored, width)
    with pytest.raises(ValueError, match="got logp"):
        add_level(store, index, visible, ids, logp.double(), 1, 2)
    with pytest.raises(ValueError, match="got level_index"):
        add_level(store, index[:, :0], visible, ids, logp, 1, 2)
    with pytest.raises(ValueError, match=r"got scores .* take CandidateStore.rooted"):
        rerank(store._replace(scores=store.scores[:, :3]), 4, 1)
    with pytest.raises(ValueError, match="got 257 of 600 candidates"):
        rerank(CandidateStore.rooted(torch.tensor([3]), 600), 257, 1)
    with pytest.raises(ValueError, match="got 4 of 5000 candidates"):
        rerank(CandidateStore.rooted(torch.tensor([3]), 5000), 4, 1)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")
def test_a_root_alone():
    tree, encoded_index = rerank(CandidateStore.rooted(torch.tensor([3]), 12).upto(1), 4, 0)
    assert tree.tokens.tolist() == [[3]] and encoded_index.tolist() == tree.parents.tolist() == [[-1]] and tree.size.tolist() == [1]
    assert tree.ancestors.tolist() == [[[1]]] and tree.depth.tolist() == [[0]]
