"""Draft losses: exact against plain ones on full [M,V] tensors in float64, hits and chains against loops, and no tensor near S·V."""

import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from loss_cases import EVERYTHING, FINITE, MIX
from torch.utils._python_dispatch import TorchDispatchMode
from watching import Largest

from draftsmith.train.losses import chunked as chunked_losses
from draftsmith.train.losses import draft as draft_losses
from draftsmith.train.losses.draft import LOSSES, chunked_draft_loss, feature_loss, mix
from draftsmith.train.losses.survival import chain

M, V, D, H = 41, 29, 13, 7
CAP = 3.0


def problem(steps=3, full=False, dtype=torch.float64, seed=0, shifts=None):
    """A drafter that resembles its target, so that some tokens are hit."""
    gen = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=gen, dtype=torch.float64)
    shifts = list(shifts or range(1, steps + 1))
    targets = torch.randperm(V, generator=gen)[:D].sort().values
    target_hidden, target_w = draw(M, H + 2), draw(V, H + 2)
    hidden = torch.stack([target_hidden[:, :H].roll(-shift, 0) for shift in shifts]) + 0.5 * draw(steps, M, H)
    w = (target_w[:, :H] if full else target_w[targets, :H]) + 0.5 * draw(V if full else D, H)
    weights = torch.rand(steps, M, generator=gen, dtype=torch.float64)
    weights[:, 4::5] = 0  # rows that no step supervises
    weights[:, 1:-6][torch.rand(steps, M - 7, generator=gen) < 0.2] = 0  # the ends are supervised: what is dropped there would count
    made = SimpleNamespace(
        hidden=hidden.to(dtype).requires_grad_(),
        w=w.to(dtype).requires_grad_(),
        target_hidden=target_hidden.to(dtype),
        target_w=target_w.to(dtype),
        weights=weights.to(dtype),
        shifts=shifts,
        targets=None if full else targets,
        decay=[0.8**k for k in range(steps)],
    )
    at = torch.randint(V, (M,), generator=gen)
    made.tokens = torch.where(read(made), at, torch.where(at % 2 == 0, -1, V))
    made.target_head = lambda x: x @ made.target_w.T
    return made


def read(one):
    """The target's rows [M] that some step is held against."""
    return torch.stack([F.pad(one.weights[k] > 0, (shift, 0))[:M] for k, shift in enumerate(one.shifts)]).any(0)


def capped(w):
    return lambda x: CAP * torch.tanh(x @ w.T / CAP)


def chunked(one, loss, head=None, **more):
    return draft_losses.chunked_draft_loss(
        one.hidden,
        one.w if head is None else head,
        one.target_hidden,
        one.target_head,
        one.weights,
        one.shifts,
        one.targets,
        loss,
        one.decay,
        tokens=one.tokens,
        **more,
    )


def plain_position(p, q, targets, tokens, loss):
    """The loss at positions [n] and α, for p [n,V] of the target and q [n,V] of the drafter, which is 0 at OOV tokens."""
    inside = torch.zeros(V, dtype=torch.bool)
    inside[targets] = True
    known = inside[p.argmax(-1)]
    q_all, p_all, q = q, p, q[:, inside]
    p = torch.where(known[:, None], p[:, inside], 1)  # any distribution: where the best token is OOV it is not used
    p = p / p.sum(-1, keepdim=True)
    alpha = torch.minimum(p_all, q_all).sum(-1)

    def kl(a, b):
        return (torch.where(a > 0, a.log(), 0) * a - torch.where(a > 0, b.log(), 0) * a).sum(-1)

    def jsd(beta):
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)

    value = {"ce": -(p * q.log()).sum(-1), "kl": kl(p, q), "jsd": jsd(0.5)}
    value |= {f"jsd({beta})": jsd(beta) for beta in (0.1, 0.5, 0.9)}
    if (p > 0).all():
        value["reverse_kl"] = kl(q, p)
    value = {name: torch.where(known, one, 0) for name, one in value.items()}
    right = q_all.gather(1, tokens.clamp(0, V - 1)[:, None]).squeeze(1)
    value["nll"] = -torch.where(right > 0, right, 1).log()
    value["tv"] = 1 - alpha
    value["lk"] = -torch.where(alpha > 0, alpha, 1).log()
    share = torch.exp(-3 * alpha.detach())
    value["lk_hybrid"] = share * value["kl"] + (1 - share) * value["tv"]
    return sum(part * value[name] for name, part in ({loss: 1.0} if isinstance(loss, str) else loss).items()), alpha


def plain(one, loss, function=None, temperature=1.0, top_k=0):
    """The same DraftLosses from full tensors in float64, with a graph; gradients of sum with respect to hidden and w."""
    hidden, w = (tensor.detach().double().requires_grad_() for tensor in (one.hidden, one.w))
    logits = (function or (lambda w: lambda x: x @ w.T))(w)(hidden)
    targets = torch.arange(V) if one.targets is None else one.targets
    q = torch.zeros(*logits.shape[:2], V, dtype=torch.float64).index_copy(2, targets, (logits / temperature).softmax(-1))
    raw = one.target_hidden.double() @ one.target_w.double().T
    p = (raw / temperature).softmax(-1)
    if top_k:
        p = torch.where(p >= p.sort(descending=True).values[:, top_k - 1 : top_k], p, 0)
        p = p / p.sum(-1, keepdim=True)
    sums, overlap, hits = [], torch.zeros(one.weights.shape, dtype=torch.float64), torch.zeros(one.weights.shape, dtype=torch.bool)
    for k, shift in enumerate(one.shifts):
        n = max(M - shift, 0)
        weight = one.weights[k, :n].double()
        value, alpha = plain_position(p[shift:], q[k, :n], targets, one.tokens[shift:], loss)
        sums.append((value * weight).sum())
        overlap[k, :n] = torch.where(weight > 0, alpha.detach(), 0)
        for t in range(n):
            hits[k, t] = weight[t] > 0 and targets[logits[k, t].argmax()] == raw[t + shift].argmax()
    total = sum(factor * part for factor, part in zip(one.decay, sums, strict=True))
    gradients = torch.autograd.grad(total * 0.7, [hidden, w])
    return SimpleNamespace(sum=total.detach(), sums=torch.stack(sums).detach(), hits=hits, overlap=overlap, gradients=gradients)


def gap(a, b):
    return float(((a - b).abs().max() / b.abs().max().clamp(min=1)).detach())


def differences(one, loss, want, head=None, **more):
    """What of a chunked loss is off: its values, hits, α, or the gradient of hidden or of the head."""
    got = chunked(one, loss, head, **more)
    gradients = torch.autograd.grad(got.sum * 0.7, [one.hidden, one.w])
    limit = 1e-10 if one.hidden.dtype == torch.float64 else 1e-5
    pairs = {"sum": (got.sum, want.sum), "sums": (got.sums, want.sums), "overlap": (got.overlap, want.overlap)}
    pairs |= {"hidden": (gradients[0], want.gradients[0]), "head": (gradients[1], want.gradients[1])}
    off = {name for name, (a, b) in pairs.items() if not gap(a, b) < limit}
    return off if torch.equal(got.hits, want.hits) else off | {"hits"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("loss", [*LOSSES, MIX, EVERYTHING], ids=str)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_equals_the_plain_form(steps, full, loss):
    one = problem(steps, full, seed=steps)
    for head, function in ((None, None), (capped(one.w), capped)):
        want = plain(one, loss, function)
        assert want.hits.any() and (want.overlap[want.hits] > 0).all()
        for budget in (1, 4 * V, 1 << 23):
            assert differences(one, loss, want, head, budget=budget) == set()


@pytest.mark.parametrize("loss", [*LOSSES, "jsd(0.1)", "jsd(0.5)", "jsd(0.9)", MIX, FINITE], ids=str)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("temperature,top_k", [(0.7, 0), (1.0, 5), (0.7, 5), (1.6, 2 * V)])
def test_softened_and_cut(monkeypatch, temperature, top_k, full, loss):
    one = problem(2, full, seed=5)
    more = {"temperature": temperature, "top_k": top_k}
    if loss == "reverse_kl" and top_k:
        with pytest.raises(ValueError, match="infinite"):
            chunked(one, loss, **more)
        return
    want = plain(one, loss, None, temperature, min(top_k, V))
    assert (want.overlap[one.weights > 0] == 0).any() == (not full and top_k == 5 or (one.weights[:, -1] > 0).any())
    assert differences(one, loss, want, **more) == set()
    small = chunked(one, loss, budget=1, **more)
    monkeypatch.setattr(draft_losses, "chunk_rows", lambda *_: M)
    undivided = chunked(one, loss, **more)
    of = [torch.autograd.grad(got.sum, [one.hidden, one.w]) for got in (small, undivided)]
    for a, b in zip((small.sums, small.overlap, *of[0]), (undivided.sums, undivided.overlap, *of[1]), strict=True):
        assert gap(a, b) < 1e-12


def test_top_k_keeps_all_that_tie_with_the_last():
    p = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]], dtype=torch.float64)
    q = torch.tensor([[[0.1, 0.1, 0.5, 0.1, 0.2]]], dtype=torch.float64)
    for top_k, alpha in ((1, 0.1), (2, 0.1 + 0.1 + 0.25), (3, 0.1 + 0.1 + 0.25), (4, 0.6), (9, 0.6), (0, 0.6)):
        got = chunked_draft_loss(
            q.log(), torch.eye(5).double(), p.log(), torch.eye(5).double(), torch.ones(1, 1), [0], None, "tv", top_k=top_k
        )
        assert abs(got.overlap - alpha) < 1e-12 and abs(got.sum - (1 - alpha)) < 1e-12


@pytest.mark.parametrize("full", [False, True])
def test_jsd_is_between_the_two_divergences(full):
    one = problem(full=full)
    for near, limit in (({"jsd(0.000000001)": 1e9}, "kl"), ({"jsd(0.999999999)": 1e9}, "reverse_kl")):
        got, want = chunked(one, near), chunked(one, limit)
        assert gap(got.sums, want.sums) < 1e-5
        for a, b in zip(*(torch.autograd.grad(loss.sum, [one.hidden, one.w]) for loss in (got, want)), strict=True):
            assert gap(a, b) < 1e-4


def test_jsd_of_distributions_without_common_tokens():
    hidden, target = torch.zeros(1, 1, V), torch.zeros(1, V)
    hidden[..., 2], target[:, 5] = 3e3, 3e3
    got = chunked_draft_loss(hidden.requires_grad_(), torch.eye(V), target, torch.eye(V), torch.ones(1, 1), [0], None, "jsd(0.1)")
    got.sum.backward()
    assert abs(got.sum - (-0.1 * math.log(0.1) - 0.9 * math.log(0.9))) < 1e-6 and hidden.grad.isfinite().all()


def test_nll_is_the_cross_entropy_of_the_text():
    one = problem(full=True)
    want = [
        chunked_losses.chunked_cross_entropy(
            one.hidden[k], one.w, F.pad(one.tokens[shift:], (0, shift)), F.pad(one.weights[k, : M - shift], (0, shift))
        )
        for k, shift in enumerate(one.shifts)
    ]
    assert gap(chunked(one, "nll").sums, torch.stack([loss.sum for loss in want])) < 1e-10


@pytest.mark.parametrize("loss", [*LOSSES, MIX], ids=str)
def test_float32(loss):
    one = problem(dtype=torch.float32)
    assert differences(one, loss, plain(one, loss)) == set()
    assert chunked(one, loss).sum.dtype == torch.float32


@pytest.mark.parametrize("shifts", [[0, 0, 0], [3, 1, 0], [1, M - 1, M], [2, M + 3, 1]])
def test_pairs_past_the_last_row_are_dropped(shifts):
    one = problem(shifts=shifts)
    assert differences(one, MIX, plain(one, MIX)) == set()


@pytest.mark.parametrize("kind", ["weight", "callable"])
@pytest.mark.parametrize("bad", [0.0, torch.inf, torch.nan])
def test_on_a_device_every_position_is_visited(monkeypatch, bad, kind):
    """And what rows without weight hold does not matter: padding may be anything."""
    one = problem()
    one.weights[:, 10:20] = 0
    want = plain(one, EVERYTHING, capped if kind == "callable" else None)
    assert (~read(one)).sum() > 3
    with torch.no_grad():
        one.hidden[one.weights == 0] = bad
        one.target_hidden[~read(one)] = bad
    monkeypatch.setattr(draft_losses, "rows_to_visit", lambda counts: torch.arange(len(counts)))
    assert differences(one, EVERYTHING, want, capped(one.w) if kind == "callable" else None, budget=4 * V) == set()


def test_a_target_of_lower_precision():
    one = problem()
    want_of = problem()
    one.target_hidden = (one.target_hidden @ one.target_w.T).float()
    want_of.target_hidden, want_of.target_w, one.target_head = one.target_hidden, torch.eye(V), lambda x: x
    assert differences(one, EVERYTHING, plain(want_of, EVERYTHING)) == set()


def test_a_frozen_head_and_bool_weights():
    one = problem()
    one.weights = one.weights > 0
    want = plain(one, "ce")
    got = chunked(one, "ce", one.w.detach())
    assert gap(torch.autograd.grad(got.sum * 0.7, one.hidden)[0], want.gradients[0]) < 1e-10


def test_an_oov_token_is_a_miss_for_tv_and_masked_for_kl():
    """One row: the target's best token, of probability 0.6, is OOV; the drafter gives the rest in the target's own proportions."""
    p = torch.full((V,), 0.3 / (V - 2), dtype=torch.float64)
    p[4], p[9] = 0.6, 0.1
    targets = torch.tensor([t for t in range(V) if t != 4])
    rest = (p[targets] / 0.4).log()
    for name, value, hit in (
        ("kl", 0, False),
        ("ce", 0, False),
        ("reverse_kl", 0, False),
        ("tv", 0.6, False),
        ("lk", -torch.tensor(0.4).log(), False),
    ):
        hidden = rest[None, None].clone().requires_grad_()
        got = chunked_draft_loss(
            hidden, torch.eye(V - 1).double(), p.log()[None], torch.eye(V).double(), torch.ones(1, 1), [0], targets, name
        )
        got.sum.backward()
        assert abs(got.sum - value) < 1e-7 and bool(got.hits) == hit and abs(got.overlap - 0.4) < 1e-12
        assert name in ("tv", "lk") or not hidden.grad.any()


def test_identities():
    one = problem(full=True, shifts=[0, 0, 0])
    one.hidden = one.target_hidden.expand(3, M, H + 2).clone().requires_grad_()
    one.w = one.target_w.clone().requires_grad_()
    for name in set(LOSSES) - {"ce", "nll"}:  # q = p
        got = chunked(one, name)
        got.sum.backward()
        assert abs(got.sum) < 1e-10 and got.hits[one.weights > 0].all()
        # The others have a kink there.
        assert name not in ("kl", "reverse_kl", "jsd") or one.hidden.grad.abs().max() < 1e-12
        one.hidden.grad = None
        assert gap(got.overlap, (one.weights > 0).double()) < 1e-12
    one = problem()
    p = (one.target_hidden @ one.target_w.T)[:, one.targets].softmax(-1)
    known = torch.isin((one.target_hidden @ one.target_w.T).argmax(-1), one.targets)
    assert 0 < known.sum() < M
    entropy = -(p * p.log()).sum(-1) * known
    lost = torch.stack([(one.weights[k, : M - k - 1] * entropy[k + 1 :]).sum() for k in range(3)])
    assert gap(chunked(one, "ce").sums - chunked(one, "kl").sums, lost) < 1e-10
    got = chunked(one, "tv")
    lost = torch.stack([(one.weights[k] * (1 - got.overlap[k]))[: M - k - 1].sum() for k in range(3)])
    assert gap(got.sums, lost) < 1e-10


def test_a_tiny_overlap_still_has_a_gradient():
    p, q = torch.full((3, V), -50.0), torch.zeros(3, V)
    p[:, 2], q[:, 5] = 300.0, 300.0
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        hidden = q[:, None].to(dtype).requires_grad_()
        eye = torch.eye(V, dtype=dtype)
        got = chunked_draft_loss(hidden, eye, p[:1].to(dtype), eye, torch.ones(3, 1), [0, 0, 0], None, "lk")
        got.sum.backward()
        gradients[dtype] = hidden.grad[0, 0].double()
        assert (got.overlap == 0).all() or dtype == torch.float64  # below the least float32
        assert gap(got.sums.double(), torch.full((3,), 300.0, dtype=torch.float64)) < 1e-5
    logits = q[0].double().requires_grad_()
    want = torch.autograd.grad(-torch.minimum(p[0].double().softmax(-1), logits.softmax(-1)).sum().log(), logits)[0]
    for gradient in gradients.values():
        assert 0.99 < gradient.abs().max() <= 1 and gap(gradient, want) < 1e-5


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_target_that_masks_tokens(name, shared):
    """Shared: the drafter's logits come from a head that masks the same tokens."""
    one = problem()
    raw = one.target_hidden @ one.target_w.T
    raw[:, one.targets[::3]] = -torch.inf
    raw[7, one.targets] = -torch.inf
    one.target_head = lambda x: raw[: len(x)]
    weight = one.w
    if shared:
        mask = torch.zeros(len(weight)).index_fill(0, torch.arange(0, len(weight), 3), -torch.inf)
        one.w = lambda x: x @ weight.T + mask
    got = chunked(one, name)
    got.sum.backward()
    assert got.sum.isfinite() and one.hidden.grad.isfinite().all() and (shared or weight.grad.isfinite().all())


@pytest.mark.parametrize("kind", ["weight", "callable"])
def test_no_tensor_near_the_logits_of_all_positions(kind):
    steps, positions, vocab, draft, size = 3, 512, 4096, 1024, 32
    torch.manual_seed(0)
    hidden = torch.randn(steps, positions, size, requires_grad=True)
    w = torch.randn(draft, size, requires_grad=True)
    target_hidden, target_w = torch.randn(positions, size), torch.randn(vocab, size)
    targets = torch.randperm(vocab)[:draft].sort().values
    with Largest() as full:
        (hidden @ w.T).log_softmax(-1).sum().backward()
    assert full.elements >= steps * positions * draft  # the watch sees what it should
    arguments = (target_hidden, lambda x: x @ target_w.T, torch.ones(steps, positions), [1, 2, 3], targets)
    head, tokens = w if kind == "weight" else capped(w), torch.randint(vocab, (positions,))
    for loss, more in [(loss, {}) for loss in (*LOSSES, EVERYTHING)] + [(FINITE, {"temperature": 0.7, "top_k": 50})]:
        with Largest() as seen:
            chunked_draft_loss(hidden, head, *arguments, loss, tokens=tokens, **more).sum.backward()
        assert seen.seen > 100
        assert seen.elements < positions * vocab // 8


def test_many_steps_and_no_draft_vocabulary_stay_small():
    hidden, w = torch.randn(7, 256, 4, requires_grad=True), torch.randn(1024, 4)
    with Largest() as seen:
        chunked_draft_loss(hidden, w, torch.randn(256, 4), torch.randn(1024, 4), torch.ones(7, 256), range(7), None, "kl").sum.backward()
    assert seen.elements < 256 * 1024 // 8


@pytest.mark.parametrize("loss", [*LOSSES, MIX], ids=str)
def test_autocast_is_obeyed_and_sums_stay_in_float32(loss):
    one = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = chunked(one, loss)
        logits, raw = (one.hidden @ one.w.T).float(), one.target_head(one.target_hidden).float()
    same = problem(dtype=torch.float32)
    same.hidden, same.w = logits.detach(), torch.eye(D)
    same.target_hidden, same.target_w = raw, torch.eye(V)
    want, exact = plain(same, loss), plain(one, loss)
    assert gap(got.sums, want.sums) < 1e-5 and gap(got.overlap, want.overlap) < 1e-5 and torch.equal(got.hits, want.hits)
    (got.sum * 0.7).backward()
    assert one.hidden.grad.dtype == one.w.grad.dtype == torch.float32
    for gradient, exactly in zip((one.hidden.grad, one.w.grad), exact.gradients, strict=True):
        assert (gradient - exactly).norm() < 0.05 * exactly.norm()


@pytest.mark.parametrize("everywhere", [False, True])
def test_all_weights_zero(monkeypatch, everywhere):
    one = problem(shifts=[1, 2, M + 200])
    if everywhere:
        monkeypatch.setattr(draft_losses, "rows_to_visit", lambda counts: torch.arange(len(counts)))
    with torch.no_grad():
        one.hidden[:, [0, 3]] = torch.inf
    one.weights.zero_()
    one.tokens.fill_(-1)
    got = chunked(one, EVERYTHING)
    assert got.sum == 0 and not got.sums.any() and not got.hits.any() and not got.overlap.any()
    for gradient in torch.autograd.grad(got.sum, [one.hidden, one.w]):
        assert (gradient == 0).all()


def test_nothing_waits_for_a_device(monkeypatch):
    class Called(TorchDispatchMode):
        names = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func.__name__)
            return func(*args, **(kwargs or {}))

    one = problem()
    monkeypatch.setattr(draft_losses, "rows_to_visit", lambda counts: torch.arange(len(counts)))
    with Called() as seen:
        chunked(one, EVERYTHING).sum.backward()
        got = chunked(one, FINITE, temperature=0.7, top_k=5)
        got.sum.backward()
        chain(got.hits, one.weights)
    waits = {"_local_scalar_dense.default", "nonzero.default", "masked_select.default"}
    assert len(seen.names) > 20 and not seen.names & waits


def test_no_grad_and_a_second_backward():
    one = problem()
    with torch.no_grad():
        assert not chunked(one, MIX).sum.requires_grad
    got = chunked(one, MIX)
    assert not got.sums.requires_grad and not got.overlap.requires_grad
    got.sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        got.sum.backward()


@pytest.mark.parametrize(
    "change,words",
    [
        ({"loss": "kld"}, "loss='kld': expected one of kl, ce"),
        ({"loss": "jsd(1)"}, "jsd.* with 0 < β < 1"),
        ({"loss": {"jsd(0.0)": 1.0}}, "jsd.* with 0 < β < 1"),
        ({"loss": "nll", "tokens": None}, "nll without tokens"),
        ({"loss": "nll", "tokens": torch.zeros(M + 1).long()}, "one for each position"),
        ({"temperature": 0.0}, "above 0"),
        ({"top_k": -1}, "0 .off. or more"),
        ({"loss": "0.5 tv + 0.5 reverse_kl", "top_k": 5}, "it is infinite"),
        ({"loss": {}}, "got the loss {}"),
        ({"loss": {"kl": 0.5, "tv": 0.0}}, "shares above 0"),
        ({"shifts": [1, 2]}, "K of each"),
        ({"shifts": [1, -2, 3]}, "shifts >= 0"),
        ({"decay": [1.0]}, "K of each"),
        ({"weights": torch.ones(M)}, r"expected \[K,M,H\]"),
        ({"targets": None}, "none where D = V"),
        ({"targets": torch.arange(D - 1)}, "a target id for each token"),
        ({"target_hidden": torch.ones(M - 1, H + 2).double()}, "as many positions"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    one = problem()
    change = {"loss": "kl"} | change
    more = {name: change.pop(name) for name in ("loss", "temperature", "top_k") if name in change}
    one.__dict__.update(change)
    with pytest.raises(ValueError, match=words):
        chunked(one, **more)


def test_a_mix_as_text():
    assert mix("0.5 jsd(0.1) + .5 tv") == {"jsd(0.1)": 0.5, "tv": 0.5} and mix("jsd") == {"jsd": 1.0}
    one = problem()
    assert torch.equal(chunked(one, "0.3 kl + 0.2 tv + 0.5 lk").sums, chunked(one, MIX).sums)
    for text in ("", "jsd()", "jsd(1.0)", "kl(0.5)", "jsd(0.1) + jsd(0.1)", "0.5jsd", "0 nll"):
        with pytest.raises(ValueError, match=f"^distill.loss='{re.escape(text)}': expected one of kl"):
            mix(text, "distill.loss")


def test_feature_loss():
    torch.manual_seed(0)
    predicted, weight = torch.randn(6, 5).requires_grad_(), torch.rand(6)
    actual = (2 * torch.randn(6, 5)).requires_grad_()
    weight[2] = 0
    got = feature_loss(predicted, actual, weight)
    value, gradient = 0.0, torch.zeros(6, 5)
    for i in range(6):
        for j in range(5):
            x = float((predicted[i, j] - actual[i, j]).detach())
            value += float(weight[i]) * (0.5 * x * x if abs(x) < 1 else abs(x) - 0.5) / 5
            gradient[i, j] = weight[i] * max(-1.0, min(1.0, x)) / 5
    got.backward()
    assert abs(got - value) < 1e-5 and gap(predicted.grad, gradient) < 1e-6 and actual.grad is None
    assert feature_loss(predicted.bfloat16(), actual.bfloat16(), weight > 0).dtype == torch.float32


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_chain_equals_a_loop(steps):
    gen = torch.Generator().manual_seed(steps)
    hits, weights = torch.rand(steps, 60, generator=gen) < 0.7, (torch.rand(steps, 60, generator=gen) - 0.1).clamp(min=0)
    accepted, anchors = [0] * steps, 0
    for t in range(60):
        if all(weights[k, t] > 0 for k in range(steps)):
            anchors += 1
            for k in range(steps):
                if not hits[k, t]:
                    break
                accepted[k] += 1
    got = chain(hits, weights)
    assert got.accepted.tolist() == accepted and int(got.anchors) == anchors and 0 < anchors < 60


def test_chain_of_nothing():
    accepted, anchors = chain(torch.ones(2, 4, dtype=torch.bool), torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]]))
    assert accepted.tolist() == [0, 0] and anchors == 0


FAULTY = problem()
FAULTY.tokens.clamp_(0, V - 1)  # a fault may read rows that are not to be read
plain_log_probs, plain_ids, plain_named = draft_losses._target_log_probs, draft_losses._draft_ids, draft_losses._named
plain_aligned, plain_by_row = chunked_losses.aligned, chunked_losses.by_row
plain_best, plain_backward, plain_loss = draft_losses.best_token, chunked_losses.ChunkedHead.backward, chunked_draft_loss


def best_of_the_known(logits):
    if logits.shape[-1] == V:
        logits = torch.full_like(logits, -torch.inf).index_copy(-1, FAULTY.targets, logits[..., FAULTY.targets])
    return plain_best(logits)


def targets_off_by_one(hidden, head, target_hidden, target_head, weights, shifts, targets, *rest, **more):
    return plain_loss(hidden, head, target_hidden, target_head, weights, shifts, (targets + 1) % V, *rest, **more)


def head_gradient_of_every_step(self, index, dlogits):
    before = self.grads[1].clone()
    plain_backward(self, index, dlogits)
    self.grads[1] += 2 * (self.grads[1] - before)


def swapped(name):
    return functools.partial(draft_losses._jensen_shannon, beta=1 - float(name[4:-1])) if name.startswith("jsd(") else plain_named(name)


def one_further(function):
    return lambda what, shifts: function(what, [shift + 1 for shift in shifts])


def what_is_dropped_counts(weights, shifts):
    return plain_aligned(weights, shifts)[0], torch.stack([weights[k].roll(shift) for k, shift in enumerate(shifts)])


FAULTS = {
    "p is renormalised in tv": (draft_losses._Distributions, "p", property(lambda self: self.covered), "tv", "sum"),
    "p is renormalised in lk": (draft_losses, "_target_log_probs", lambda *a: plain_log_probs(*a).log_softmax(-1), "lk", "sum"),
    "p is not renormalised in kl": (draft_losses._Distributions, "log_covered", property(lambda self: self.log_p), "kl", "hidden"),
    "an OOV token counts as a hit": (draft_losses, "best_token", best_of_the_known, "tv", "hits"),
    "OOV positions are not masked": (draft_losses, "_draft_ids", lambda *a: plain_ids(*a).clamp(min=0), "kl", "sum"),
    "d2t is off by one: the distribution": (draft_losses, "chunked_draft_loss", targets_off_by_one, "kl", "sum"),
    "d2t is off by one: the hits": (draft_losses, "chunked_draft_loss", targets_off_by_one, "kl", "hits"),
    "the shift is off by one": (draft_losses, "aligned", one_further(plain_aligned), "kl", "sum"),
    "pairs past the last row count": (draft_losses, "aligned", what_is_dropped_counts, "kl", "sum"),
    "the hits' shift is off by one": (draft_losses, "by_row", one_further(plain_by_row), "kl", "hits"),
    "the overlaps' shift is off by one": (draft_losses, "by_row", one_further(plain_by_row), "kl", "overlap"),
    "the head's gradient is counted K times": (chunked_losses.ChunkedHead, "backward", head_gradient_of_every_step, "kl", "head"),
    "β is the other's": (draft_losses, "_named", swapped, "jsd(0.1)", "sum"),
    "another η": (draft_losses, "ETA", 2.0, "lk_hybrid", "sum"),
}


def test_every_fault_is_seen(monkeypatch):
    wants = {loss: plain(FAULTY, loss) for loss in ("kl", "tv", "lk", "lk_hybrid", "jsd(0.1)")}
    for loss, want in wants.items():
        assert differences(FAULTY, loss, want) == set(), "red before a fault was planted"
    missed = []
    for name, (owner, attribute, fault, loss, red) in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fault)
            if red not in differences(FAULTY, loss, wants[loss]):
                missed.append(name)
    assert missed == [] and len(FAULTS) == 14
    for loss, want in wants.items():
        assert differences(FAULTY, loss, want) == set(), "every fault was taken out again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 1000])
def test_pieces_change_no_bit(dtype, piece, monkeypatch):
    """Rows go through the losses, and tokens through the head's gradient, a few at a time on a CPU."""
    results = []
    for size in (1 << 40, piece):
        monkeypatch.setattr(chunked_losses, "PIECE", size)
        torch.manual_seed(0)
        hidden, target_hidden = torch.randn(2, 40, 16).to(dtype).requires_grad_(), torch.randn(40, 16).to(dtype)
        head, target_head = torch.randn(50, 16).to(dtype).requires_grad_(), torch.randn(90, 16).to(dtype)
        weights, ids, text = (torch.rand(2, 40) > 0.3).float(), torch.randperm(90)[:50], torch.randint(90, (40,))
        drafted = chunked_draft_loss(hidden, head, target_hidden, target_head, weights, [1, 2], ids, "0.5 kl + 0.5 nll", tokens=text)
        plain = chunked_losses.chunked_cross_entropy(hidden[0], head, text % 50, weights[0])
        (drafted.sum + plain.sum).backward()
        results.append((drafted.sum, drafted.sums, drafted.hits, drafted.overlap, plain.sum, plain.hits, hidden.grad, head.grad))
    for other, complete in zip(*reversed(results), strict=True):
        assert torch.equal(other, complete) and complete.any()
