"""Chunked losses: exact against the plain form in float64, and no tensor near S·V in either direction."""

import pytest
import torch
import torch.nn.functional as F
from watching import Largest

from draftsmith.train.losses import chunked
from draftsmith.train.losses.chunked import chunk_rows, chunked_cross_entropy, chunked_kl, chunked_kl_heads

CAP = 3.0


def problem(positions, vocab, hidden=7, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(positions, hidden, generator=gen, dtype=dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=gen, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, (positions,), generator=gen)
    weight = torch.rand(positions, generator=gen, dtype=dtype)
    weight[::3] = 0
    return x, w, targets, weight


def plain_ce(logits, targets, weight):
    return (F.cross_entropy(logits, targets, reduction="none") * weight).sum()


def plain_kl(draft, target, weight):
    terms = F.kl_div(draft.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True)
    return (terms.sum(-1) * weight).sum()


def heads(kind, w):
    """The head as the losses take it, and the same as a plain function."""
    if kind == "weight":
        return w, lambda x: x @ w.T
    capped = lambda x: CAP * torch.tanh(x @ w.T / CAP)  # noqa: E731
    return capped, capped


@pytest.mark.parametrize("kind", ["weight", "callable"])
@pytest.mark.parametrize("positions,vocab,budget", [(1, 5, 1), (37, 301, 900), (64, 1000, 1 << 23)])
def test_cross_entropy_equals_the_plain_form(kind, positions, vocab, budget):
    x, w, targets, weight = problem(positions, vocab)
    head, function = heads(kind, w)
    loss = chunked_cross_entropy(x, head, torch.where(weight > 0, targets, -100), weight, budget=budget)
    got = torch.autograd.grad(loss.sum * 0.7, [x, w])
    plain = plain_ce(function(x), targets, weight)
    want = torch.autograd.grad(plain * 0.7, [x, w])
    assert abs(loss.sum - plain) < 1e-10
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-10
    assert torch.equal(loss.hits, (function(x).argmax(-1) == targets) & (weight > 0))


def test_on_a_device_every_position_is_visited(monkeypatch):
    x, w, targets, weight = problem(37, 301)
    monkeypatch.setattr(chunked, "rows_to_visit", lambda mask: torch.arange(len(mask)))
    loss = chunked_cross_entropy(x, w, torch.where(weight > 0, targets, -100), weight)
    got = torch.autograd.grad(loss.sum, [x, w])
    want = torch.autograd.grad(plain_ce(x @ w.T, targets, weight), [x, w])
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-10
    assert torch.equal(loss.hits, ((x @ w.T).argmax(-1) == targets) & (weight > 0))


@pytest.mark.parametrize("kind", ["weight", "callable"])
def test_kl_equals_the_plain_form(kind):
    x, w, _, weight = problem(45, 203)
    target_x, target_w, _, _ = problem(45, 203, hidden=9, seed=1)
    head, function = heads(kind, w)
    target_head, target_function = heads(kind, target_w)
    loss = chunked_kl(x, head, target_x, target_head, weight, budget=500)
    got = torch.autograd.grad(loss.sum, [x, w])
    plain = plain_kl(function(x), target_function(target_x).detach(), weight)
    want = torch.autograd.grad(plain, [x, w])
    assert abs(loss.sum - plain) < 1e-10
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-10
    assert torch.equal(loss.hits, (function(x).argmax(-1) == target_function(target_x).argmax(-1)) & (weight > 0))


@pytest.mark.parametrize("top_k", [0, 1, 5, 200])
def test_kl_heads_share_the_target_rows_that_they_predict(top_k):
    target_x, target_w, _, _ = problem(41, 97, hidden=5, seed=9)
    parts = [problem(41, 97, seed=k) for k in range(3)]
    shifts = [1, 2, 3]
    given = [p[0] for p in parts], [p[1] for p in parts], target_x, target_w, [p[3] for p in parts], shifts
    shared = chunked_kl_heads(*given, top_k=top_k, budget=300)
    inputs = [t for p in parts for t in p[:2]]
    got = torch.autograd.grad(sum(0.8**k * loss.sum for k, loss in enumerate(shared)), inputs)
    target = (target_x @ target_w.T).detach()
    if 0 < top_k < 97:  # no two logits of a row are equal
        target = torch.full_like(target, -1e9).scatter(1, target.topk(top_k).indices, target.topk(top_k).values)
    plain, hits = [], []
    for (x, w, _, weight), shift in zip(parts, shifts, strict=True):
        logits = (x @ w.T)[:-shift]
        plain.append(plain_kl(logits, target[shift:], weight[:-shift]))
        hits.append(F.pad((logits.argmax(-1) == target[shift:].argmax(-1)) & (weight[:-shift] > 0), (0, shift)))
    want = torch.autograd.grad(sum(0.8**k * loss for k, loss in enumerate(plain)), inputs)
    for loss, value, hit in zip(shared, plain, hits, strict=True):
        assert abs(loss.sum - value) < 1e-10
        assert torch.equal(loss.hits, hit)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["weight", "callable"])
def test_one_head_that_serves_all_has_one_gradient(kind):
    """The sum of the K losses of copies of it, with their hits one after the other, and one buffer for its gradient instead of K."""
    target_x, target_w, _, _ = problem(41, 7, hidden=5, seed=9)
    xs, ws, _, weights = zip(*(problem(41, 7, seed=k) for k in range(3)), strict=True)
    head, _ = heads(kind, ws[0])
    given = target_x, target_w, weights, [1, 2, 60]
    each = chunked_kl_heads(xs, [head] * 3, *given, budget=300)
    want = torch.autograd.grad(sum(loss.sum for loss in each), [*xs, ws[0]])
    (shared,) = chunked_kl_heads(xs, [head], *given, budget=300)
    got = torch.autograd.grad(shared.sum, [*xs, ws[0]])
    assert abs(shared.sum - sum(loss.sum for loss in each)) < 1e-10 and torch.equal(shared.hits, torch.cat([loss.hits for loss in each]))
    assert shared.hits.any()
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-10
    with pytest.raises(ValueError, match="one of each per head"):
        chunked_kl_heads(xs, [head] * 2, *given)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("kind", ["weight", "callable"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_rows_without_weight_hold_does_not_matter(monkeypatch, bad, kind, everywhere):
    """Also where another head supervises the target's row, or a head has no row left; on a device all rows are visited."""
    target_x, target_w, _, _ = problem(41, 97, seed=9)
    shifts = [0, 2, 41, 60]
    xs, ws, targets, weights = zip(*(problem(41, 97, seed=k) for k in range(4)), strict=True)
    weights[0][::2] = 0
    outputs = [heads(kind, w) for w in ws]
    plain = [plain_ce(outputs[0][1](xs[0]), targets[0], weights[0])]
    target = (target_x @ target_w.T).detach()
    for x, (_, function), weight, shift in zip(xs, outputs, weights, shifts, strict=True):
        n = max(41 - shift, 0)
        plain.append(plain_kl(function(x[:n]), target[41 - n :], weight[:n]))
    want = torch.autograd.grad(sum(plain), [*xs, *ws])
    if everywhere:
        monkeypatch.setattr(chunked, "rows_to_visit", lambda counts: torch.arange(len(counts)))
    used = torch.zeros(41, dtype=torch.bool)
    with torch.no_grad():
        for x, weight, shift in zip(xs, weights, shifts, strict=True):
            used |= F.pad(weight > 0, (shift, 0))[:41]
            x[weight == 0] = bad
        target_x[~used] = bad
    assert 0 < used.sum() < 41
    head, *_ = zip(*outputs, strict=True)
    shared = chunked_kl_heads(xs, head, target_x, target_w, weights, shifts, budget=300)
    losses = [chunked_cross_entropy(xs[0], head[0], targets[0], weights[0]), *shared]
    got = torch.autograd.grad(sum(loss.sum for loss in losses), [*xs, *ws])
    for loss, value in zip(losses, plain, strict=True):
        assert abs(loss.sum - value) < 1e-10
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-10
    assert [loss.hits.shape for loss in shared] == 4 * [(41,)] and not torch.stack([loss.hits for loss in shared[2:]]).any()


@pytest.mark.parametrize("kind", ["weight", "callable"])
def test_no_tensor_near_the_logits_of_all_positions(kind):
    positions, vocab = 256, 2048
    x, w, targets, weight = problem(positions, vocab, dtype=torch.float32)
    weight += 1
    head, function = heads(kind, w)
    with Largest() as full:
        plain_ce(function(x), targets, weight).backward()
    assert full.elements >= positions * vocab  # the watch sees what it should
    with Largest() as seen:
        chunked_cross_entropy(x, head, targets, weight).sum.backward()
        chunked_kl(x, head, x.detach().flip(0), head, weight).sum.backward()
    assert seen.seen > 100
    assert seen.elements < positions * vocab // 8


@pytest.mark.parametrize("kind", ["weight", "callable"])
def test_all_weights_zero(kind):
    x, w, targets, weight = problem(20, 50)
    with torch.no_grad():
        x[3] = torch.inf
    head, _ = heads(kind, w)
    for loss in (chunked_cross_entropy(x, head, targets, weight * 0), chunked_kl(x, head, x.detach(), head, weight * 0)):
        assert loss.sum == 0 and not loss.hits.any()
        for grad in torch.autograd.grad(loss.sum, [x, w]):
            assert (grad == 0).all()


def test_bfloat16_sums_in_float32():
    x, w, targets, weight = problem(64, 500, dtype=torch.float32)
    low_x, low_w = x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()
    loss = chunked_cross_entropy(low_x, low_w, targets, weight)
    loss.sum.backward()
    assert loss.sum.dtype == torch.float32 and low_w.grad.dtype == torch.bfloat16
    plain = plain_ce((low_x @ low_w.T).float(), targets, weight)
    assert abs(loss.sum - plain) < 1e-5 * plain.abs()
    want = torch.autograd.grad(plain_ce(x @ w.T, targets, weight), [w])[0]
    assert (low_w.grad - want).norm() < 0.02 * want.norm()


def test_autocast_is_obeyed():
    x, w, targets, weight = problem(64, 500, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(x, w, targets, weight).sum
        plain = plain_ce((x @ w.T).float(), targets, weight)
    assert abs(loss - plain) < 1e-5 * plain.abs()
    loss.backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_no_grad_and_a_second_backward():
    x, w, targets, weight = problem(20, 50)
    with torch.no_grad():
        assert not chunked_cross_entropy(x, w, targets, weight).sum.requires_grad
    loss = chunked_cross_entropy(x, w, targets, weight).sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


def test_chunk_rows(monkeypatch):
    assert chunk_rows(4096, 128_000, True) * 128_000 <= 1 << 23 < chunk_rows(4096, 128_000, False) * 128_000 <= 1 << 25
    assert chunk_rows(5, 10, True, 10) == 1
    monkeypatch.setattr(chunked, "ROWS", 256)
    assert [chunk_rows(rows, 8192, True) for rows in (128, 8192, 1 << 20)] == [256, 512, 1024]
    assert [chunk_rows(rows, 8192, False) for rows in (128, 1 << 20)] == [1024, 4096]
    assert [chunk_rows(128, vocab, True) for vocab in (49_152, 128_000)] == [170, 65]
