"""The loss kernels against the plain losses, under Triton's interpreter; natively where there is a GPU."""

from types import SimpleNamespace

import pytest
import torch
from hopper import compiled
from interpreted import INTERPRETED
from watching import Largest

pytest.importorskip("triton")
from kernel_fixtures import _one_way, _patched_once, _poisoned  # noqa: F401
from loss_cases import EVERYTHING, FINITE, MIX
from training_cases import Numbers as Rows
from training_cases import new_model, new_recipe, objective

from draftsmith.inference.kernels import active, missing, use
from draftsmith.train import loop, setup
from draftsmith.train.losses import chunked as chunked_module
from draftsmith.train.losses import draft as draft_losses
from draftsmith.train.losses import kernels as loss_kernels
from draftsmith.train.losses.chunked import chunked_cross_entropy, chunked_kl, chunked_kl_heads
from draftsmith.train.losses.draft import LOSSES, chunked_draft_loss
from draftsmith.train.losses.kernels import target_distribution, with_gradients

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of −inf less −inf and of NaN
SIZES = [(1, 1), (2, 2), (31, 31), (33, 20), (33, 1), (1000, 1000), (1000, 130)]  # V, D
KINDS = ("wide", "ties", "holes")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(loss_kernels, "_BLOCK", 16)


def chunk(vocab, size, steps=3, rows=5, kind="wide", dtype=torch.float32, seed=0):
    """What a chunk's losses take: target's logits [m,V], drafter's [K,m,D] that resemble them, draft ids of the text, weight and pull.

    ties: few values · holes: the target masks half of its tokens. Of the rows that count, some have their best token outside the draft
    vocabulary, as has the text; the last row counts in no step.
    """
    gen = torch.Generator().manual_seed(seed)
    raw = 3 * torch.randn(rows, vocab, generator=gen)
    targets = None if size == vocab else torch.randperm(vocab, generator=gen)[:size].sort().values
    ids = draft_losses._draft_ids(targets, vocab, torch.device("cpu"))
    logits = (raw if targets is None else raw[:, targets]) + torch.randn(steps, rows, size, generator=gen)
    if kind == "ties":
        raw, logits = raw.clamp(-1, 1).round(), logits.clamp(-1, 1).round()
    if kind == "holes":
        raw[torch.rand(raw.shape, generator=gen) < 0.5] = -torch.inf
        raw[:, vocab // 2] = 2.0
    if targets is not None:
        raw[0, targets[0]] = raw[0].amax() + 1
        raw[1, (ids < 0).nonzero()[0]] = raw[1].amax() + 1
    weight = torch.rand(steps, rows, generator=gen) + 0.1
    weight[torch.rand(steps, rows, generator=gen) < 0.3] = 0
    weight[0, :2], weight[:, -1] = 1, 0
    text = torch.randint(-1, size, (rows,), generator=gen)
    pull = weight * torch.rand(steps, 1, generator=gen)
    tensors = {"raw": raw.to(dtype), "logits": logits.to(dtype), "text": text, "weight": weight, "pull": pull, "ids": ids}
    one = SimpleNamespace(**{name: tensor.to(DEVICE) for name, tensor in tensors.items()})
    one.targets = None if targets is None else targets.to(DEVICE)
    return one


def plainly(one, loss, temperature=1.0, top_k=0):
    """loss, α, hits and pull · gradient, by the plain path in float64."""
    shares, terms = draft_losses._terms(loss)
    steps_of_chunk = draft_losses._Chunk(one.targets, one.ids, temperature, top_k, shares, terms, True)
    return steps_of_chunk.plain(one.raw.double(), one.logits.double(), one.text, one.weight.double(), one.pull.double())


def fused(one, loss, temperature=1.0, top_k=0, wanted=True):
    """The same by the kernels; what nobody weighs is NaN."""
    shares, terms = draft_losses._terms(loss)
    steps_of_chunk = draft_losses._Chunk(one.targets, one.ids, temperature, top_k, shares, terms, wanted)
    raw, logits = one.raw.clone(), one.logits.clone()
    raw[(one.weight == 0).all(0)], logits[one.weight == 0] = torch.nan, torch.nan
    return steps_of_chunk.fused(raw, logits, one.text, one.weight, one.pull)


def near(got, want, dtype=torch.float32, absolute=5e-7):
    """Equal for float32, whose sums lose `absolute` where distributions agree; what was rounded to a shorter type, to one place of it."""
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    return bool(((got.double() - want).abs() <= 1e-5 * want.abs().amax() + absolute + rounding * want.abs()).all())


def check(one, loss, **how):
    """And the plain path's results."""
    got, want = fused(one, loss, **how), plainly(one, loss, **how)
    live, small = one.weight > 0, one.raw.shape[-1] <= 1000
    for a, b, absolute in zip(got[:2], want[:2], (5e-7 if small else 2e-6, 5e-7), strict=True):  # a loss is a sum over the vocabulary
        assert near(a[live], b[live], absolute=absolute) and not a[~live].any()
    assert torch.equal(got[2], want[2] & live)
    assert near(got[3][live], want[3][live], one.logits.dtype) and not got[3][~live].any()
    return want


def differ(one, loss, **how):
    """Whether `check` sees a difference."""
    try:
        check(one, loss, **how)
    except AssertionError:
        return True
    return False


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", [*LOSSES, "jsd(0.1)", MIX, EVERYTHING], ids=str)
@pytest.mark.parametrize(("vocab", "size"), SIZES)
def test_equals_the_plain_losses(monkeypatch, vocab, size, loss):
    if vocab == 1000:
        monkeypatch.setattr(loss_kernels, "_BLOCK", 256)
    place = SIZES.index((vocab, size)) + len(str(loss))
    one = chunk(vocab, size, (1, 3)[place % 2], 3 if vocab == 1000 else 5, KINDS[place % 3], TYPES[place // 2 % 3], seed=place)
    want = check(one, loss, temperature=(1.0, 0.7, 1.6)[place // 3 % 3])
    assert (want[3][one.weight > 0] != 0).any() or size == 1


def test_what_is_compared_occurs():
    """Hits and misses, best tokens and texts without a draft id, ties of the best, rows that some steps weigh and others do not."""
    one = chunk(33, 20, kind="ties")
    live, top = one.weight > 0, (one.raw == one.raw.amax(-1, keepdim=True))
    assert (live.any(0) & ~live.all(0)).any() and (top.sum(-1) > 1).any() and one.text[live.any(0)].amin() == -1
    one = chunk(33, 20)
    hits = plainly(one, "kl")[2][:, :-1]
    known = one.ids[one.raw.argmax(-1)[:-1]] >= 0
    assert hits.any() and not hits.all() and known.any() and not known.all()


@pytest.mark.parametrize("loss", ["tv", FINITE], ids=str)
@pytest.mark.parametrize(("top_k", "kind"), [(1, "wide"), (7, "ties"), (7, "holes"), (99, "wide")])
def test_a_cut_distribution(top_k, kind, loss):
    check(chunk(33, 20, kind=kind, dtype=TYPES[top_k % 3]), loss, top_k=top_k, temperature=0.8)


def test_the_best_of_equals_is_the_first_also_between_blocks():
    one = chunk(33, 33, 1, 4)
    one.weight[:] = 1
    one.raw[:], one.logits[:] = 0, 0
    one.raw[0, [5, 20]] = one.logits[0, 0, [5, 30]] = 2
    one.raw[1, [15, 16]] = one.logits[0, 1, [16, 17]] = 2
    one.logits[0, 3, 0], one.raw[3, 32] = -0.0, -0.0
    assert check(one, "kl")[2].tolist() == [[True, False, True, True]]


@pytest.mark.parametrize("loss", [*LOSSES, EVERYTHING], ids=str)
@pytest.mark.parametrize(("vocab", "size"), [(33, 33), (33, 20)])
def test_tokens_outside_both_distributions_change_nothing(vocab, size, loss):
    """Logits of −inf on both sides: the losses are those of the vocabulary without them, which no 0 · inf spoils."""
    one = chunk(vocab, size, dtype=torch.float32)
    few = chunk(vocab, size, dtype=torch.float32)
    gone = torch.arange(size) % 3 == 2
    gone[0] = False  # complete blocks, too
    gone[16:] |= size == 33
    tokens = torch.arange(vocab) if one.targets is None else one.targets
    one.raw[:, tokens[gone]], one.logits[..., gone] = -torch.inf, -torch.inf
    kept = torch.ones(vocab, dtype=torch.bool).index_fill(0, tokens[gone], False)
    few.raw, few.logits = one.raw[:, kept], one.logits[..., ~gone]
    few.text = torch.where(gone[one.text.clamp(min=0)], -1, ((~gone).cumsum(0) - 1)[one.text.clamp(min=0)]).where(one.text >= 0, -1)
    one.text = torch.where(few.text < 0, -1, one.text)
    if one.targets is not None:
        few.targets = (kept.cumsum(0) - 1)[one.targets[~gone]]
    few.ids = draft_losses._draft_ids(few.targets, int(kept.sum()), torch.device("cpu"))
    got, want = fused(one, loss), plainly(few, loss)
    live = one.weight > 0
    assert near(got[0][live], want[0][live]) and near(got[1][live], want[1][live]) and torch.equal(got[2], want[2] & live)
    assert not got[3][..., gone].any() and near(got[3][..., ~gone][live], want[3][live])


@pytest.mark.parametrize("loss", [*LOSSES, EVERYTHING], ids=str)
@pytest.mark.parametrize("size", [33, 20])
def test_tokens_that_the_drafter_alone_rules_out(size, loss):
    """They count as log q = FLOOR, so that losses stay finite; the text's own token is among them in every other row."""
    one = chunk(33, size)
    one.logits[..., 3::4] = -torch.inf
    one.text[::2], one.text[1::2] = 2, 3
    assert check(one, loss)[0].isfinite().all()


def nan_is_seen(where, loss):
    """NaN in a row that counts makes its loss NaN, and its gradient; no other row's."""
    one = chunk(33, 33, 1)
    one.weight[:, :-1] = one.pull[:, :-1] = 1
    one.text[:] = 1
    clean = fused(one, loss)
    getattr(one, where)[..., 2, 20] = torch.nan
    got = fused(one, loss)
    if (where, loss) != ("raw", "nll"):
        assert got[0][0, 2].isnan()
        assert got[3][0, 2].isnan().any() or where == "raw" and loss in ("tv", "lk")  # which entries of q lie below p is all they need
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[:, [0, 1, 3, 4]], b[:, [0, 1, 3, 4]])


@pytest.mark.parametrize("loss", [*LOSSES, EVERYTHING], ids=str)
@pytest.mark.parametrize("where", ["raw", "logits"])
def test_nan_where_it_counts_is_not_hidden(where, loss):
    nan_is_seen(where, loss)


def test_a_tiny_overlap_still_has_a_gradient():
    one = chunk(33, 33, 1, 2)
    one.weight[:] = one.pull[:] = 1
    one.raw[:], one.logits[:] = -50, 0
    one.raw[:, 2], one.logits[..., 20] = 300, 300
    want = check(one, "lk")
    assert want[0][0, 0] > 250 and want[3][0, 0].abs().max() > 0.99 and not fused(one, "lk")[1].any()


@pytest.mark.parametrize("loss", ["kl", "nll"])
def test_without_a_gradient_the_logits_stay(loss):
    one = chunk(33, 20)
    got, want = fused(one, loss, wanted=False), plainly(one, loss)
    live = one.weight > 0
    assert torch.equal(got[3][live], one.logits[live]) and near(got[0][live], want[0][live])


FAULTS = {
    "the target's best is another": lambda shared: shared._replace(best=shared.best + 1),
    "no best is known": lambda shared: shared._replace(best=torch.full_like(shared.best, -1)),
    "p is of another mass": lambda shared: shared._replace(total=shared.total + 1e-3),
    "p̃ is p": lambda shared: shared._replace(covered=torch.zeros_like(shared.covered)),
    "another temperature": lambda shared: shared._replace(scale=shared.scale * 1.001),
    "d2t is off by one": lambda shared: shared._replace(target_ids=(shared.target_ids + 1) % 33),
    "rows are off by one": lambda shared: shared._replace(logits=shared.logits.roll(1, 0)),
}


def test_every_fault_is_seen(monkeypatch):
    one, made = chunk(33, 20), target_distribution
    assert not differ(one, "kl")
    for name, fault in FAULTS.items():
        monkeypatch.setattr(loss_kernels, "target_distribution", lambda *given, fault=fault: fault(made(*given)))
        assert differ(one, "kl"), name
    assert len(FAULTS) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(1, 4, 20, dtype=torch.float64)}, "got logits .* torch.float64"),
        ({"logits": torch.zeros(20, 4, 1).transpose(0, 2)}, "got logits"),
        ({"logits": torch.zeros(1, 4, 19)}, "a target distribution of 4 rows and 20 tokens; expected 4 and 19"),
        ({"text": None}, "got kl, nll without"),
        ({"target": None}, "a target distribution for others"),
        ({"text": torch.zeros(4)}, "got text"),
        ({"gradient_scale": torch.ones(2, 4)}, r"got gradient_scale .2, 4. .*expected .1, 4."),
        ({"weight": torch.ones(1, 4, dtype=torch.bool)}, "got weight .* torch.bool"),
    ],
)
def test_refusals(change, message):
    one = chunk(33, 20, 1, 4)
    target = target_distribution(one.raw, one.weight, one.targets, one.ids)
    given = {"logits": one.logits, "target": target, "text": one.text, "weight": one.weight, "gradient_scale": one.pull}
    given["shares"] = {"kl": 1.0, "nll": 1.0}
    with_gradients(**given | {"logits": one.logits.clone()})
    with pytest.raises(ValueError, match=message):
        with_gradients(**given | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(1, 3)}, "got weight"),
        ({"ids": None}, "target_ids or ids alone"),
        ({"ids": torch.zeros(32, dtype=torch.int64)}, r"got ids .32.*expected .33."),
        ({"target_ids": torch.zeros(20)}, "got target_ids"),
        ({"least": torch.zeros(4, 1)}, "got least"),
    ],
)
def test_refusals_of_a_target(change, message):
    one = chunk(33, 20, 1, 4)
    given = {"logits": one.raw, "weight": one.weight, "target_ids": one.targets, "ids": one.ids}
    target_distribution(**given)
    with pytest.raises(ValueError, match=message):
        target_distribution(**given | change)


def problem(dtype=torch.float32, positions=17, vocab=70, size=40, width=5, steps=2):
    """Hidden states, heads and what they are held against, with rows that nobody weighs and that hold NaN."""
    gen = torch.Generator().manual_seed(0)
    one = SimpleNamespace(target=torch.randn(positions, width, generator=gen), target_w=2 * torch.randn(vocab, width, generator=gen))
    one.targets = torch.randperm(vocab, generator=gen)[:size].sort().values
    one.tokens = torch.randint(vocab, (positions,), generator=gen)
    one.x, one.full, one.w = one.target + torch.zeros(steps, 1, 1), one.target_w.clone(), one.target_w[one.targets]
    for tensor in (one.x, one.full, one.w):
        tensor += 0.5 * torch.randn(tensor.shape, generator=gen)
    one.weights = torch.rand(steps, positions, generator=gen)
    one.weights[:, ::4], one.weights[0, 5:9] = 0, 0
    one.x[one.weights == 0] = torch.nan
    one.__dict__.update({name: tensor.to(DEVICE) for name, tensor in vars(one).items()})
    for name in ("x", "full", "w", "target", "target_w"):
        setattr(one, name, getattr(one, name).to(dtype).requires_grad_(not name.startswith("target")))
    return one


def cross_entropy(one):
    result = chunked_cross_entropy(one.x[0], one.full, one.tokens, one.weights[0], budget=5 * 70)
    return result.sum, [result.hits]


def kl(one):
    result = chunked_kl(one.x[0], one.full, one.target, one.target_w, one.weights[0], budget=5 * 70)
    return result.sum, [result.hits]


def kl_heads(one):
    given = list(one.x), [one.full, one.full], one.target, lambda x: x @ one.target_w.T, list(one.weights), [1, 3]
    result = chunked_kl_heads(*given, budget=5 * 70)
    return result[0].sum + 0.5 * result[1].sum, [loss.hits for loss in result]


def kl_of_the_likeliest(one):
    given = list(one.x), [one.full, one.full], one.target, lambda x: x @ one.target_w.T, list(one.weights), [1, 3]
    result = chunked_kl_heads(*given, top_k=9, budget=5 * 70)
    return result[0].sum + 0.5 * result[1].sum, [loss.hits for loss in result]


def kl_one_head(one):
    given = list(one.x), [one.full], one.target, lambda x: x @ one.target_w.T, list(one.weights), [1, 3]
    (result,) = chunked_kl_heads(*given, budget=5 * 70)
    return result.sum, [result.hits]


def draft(one, loss=FINITE, head=None, **how):
    given = one.x, one.w if head is None else head, one.target, one.target_w, one.weights, [1, 2], one.targets, loss, [1.0, 0.6]
    result = chunked_draft_loss(*given, tokens=one.tokens, budget=5 * 80, **how)
    return result.sum, [result.hits, result.overlap, result.sums]


def distilled(one):
    given = one.x, one.full, one.target, one.target_w, one.weights, [0, 0], None, "0.9 tv + 0.1 ce"
    result = chunked_draft_loss(*given, budget=5 * 140)
    return result.sum, [result.hits, result.overlap, result.sums]


def capped(one):
    """A callable head whose backward needs its logits."""
    return draft(one, head=lambda x: 3 * torch.tanh(x @ one.w.T))


def sliced(one):
    """A callable head that pads its vocabulary."""
    wide = torch.cat((one.w, one.w[:3]))
    return draft(one, head=lambda x: (x @ wide.T)[..., : len(one.w)])


def cut(one):
    return draft(one, temperature=0.7, top_k=9)


CHUNKED = (cross_entropy, kl, kl_heads, kl_of_the_likeliest, kl_one_head, draft, distilled, capped, sliced, cut)


def outcome(one, function, on):
    with use(on):
        total, noted = function(one)
        gradients = torch.autograd.grad(total * 0.7, [one.x, one.full, one.w], allow_unused=True)
    return total, noted, [gradient for gradient in gradients if gradient is not None]


def taken(monkeypatch):
    """How often the kernels of a step are launched."""
    calls, made = [], with_gradients
    monkeypatch.setattr(loss_kernels, "with_gradients", lambda *given: calls.append(1) or made(*given))
    return calls


@pytest.mark.parametrize(("function", "everywhere"), [*((function, False) for function in CHUNKED), (kl_heads, True), (draft, True)])
def test_on_equals_off(monkeypatch, everywhere, function):
    """Values, what is noted, and gradients of hidden states and heads, on a CPU as on a device where every row is visited."""
    monkeypatch.setattr(loss_kernels, "_BLOCK", 32)
    one = problem()
    if everywhere:
        for module in (chunked_module, draft_losses):
            monkeypatch.setattr(module, "rows_to_visit", lambda counts: torch.arange(len(counts), device=counts.device))
    calls = taken(monkeypatch)
    want = outcome(one, function, False)
    assert not calls
    got = outcome(one, function, True)
    assert len(calls) > 3 and len(got[2]) == len(want[2]) == 2
    for a, b in zip((got[0], *got[1], *got[2]), (want[0], *want[1], *want[2]), strict=True):
        assert torch.equal(a, b) if a.dtype == torch.bool else near(a, b.double())


@pytest.mark.parametrize("function", [cross_entropy, kl_heads, draft])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_half_precision(monkeypatch, autocast, function):
    """The same logits: what is left is the order of sums, and that the interpreter cuts bfloat16 off where a GPU rounds."""
    monkeypatch.setattr(loss_kernels, "_BLOCK", 64)
    one = problem(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        want, got = outcome(one, function, False), outcome(one, function, True)
    assert near(got[0], want[0].double()) and torch.equal(got[1][0], want[1][0])
    for a, b in zip(got[2], want[2], strict=True):
        assert a.dtype == b.dtype and (a.float() - b.float()).norm() < 8e-3 * b.float().norm()


def test_what_keeps_to_the_plain_path(monkeypatch):
    """float64; and no gradient where none is asked for."""
    calls, one = taken(monkeypatch), problem()
    outcome(problem(torch.float64), draft, True)
    assert not calls
    for function in (draft, sliced):
        want = outcome(one, function, False)[0].double()
        calls.clear()
        with torch.no_grad(), use(True):
            assert near(function(one)[0], want) and calls


def test_nothing_of_the_drafters_logits_is_made_in_float32(monkeypatch):
    """Of a chunk [m,D] in bfloat16; the target's rows stay as they are, too."""
    one = problem(torch.bfloat16, positions=256, vocab=1500, size=1500, width=3, steps=1)
    one.weights[:, 20:] = 0
    rows = int((one.weights > 0).sum())
    monkeypatch.setattr(loss_kernels, "_BLOCK", 1024)

    class Wide(Largest):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                self.elements, self.seen = max(self.elements, out.numel()), self.seen + 1
            return out

    largest = {}
    for on in (False, True):
        with Wide() as seen, use(on):
            chunked_draft_loss(one.x, one.full, one.target, one.target_w, one.weights, [0], None, "ce", budget=16 * 1500).sum.backward()
        assert seen.seen > 20
        largest[on] = seen.elements
    # The head's gradient [D,3] is summed in float32.
    assert largest[False] == rows * 1500 > 3 * 1500 == largest[True]


def test_a_run_takes_them_when_asked(tmp_path, monkeypatch):
    seen = []

    def noting(model, batch):
        seen.append(active())
        return objective(model, batch)

    def fit(output, kernels, steps=2):
        seen.clear()
        rows = Rows(), Rows(), {"data": "numbers"}
        loop.fit(new_recipe(tmp_path / output, steps=steps, kernels=kernels), new_model(), noting, *rows)
        return set(seen)

    assert fit("on", True) == {True} and fit("off", False) == {False} and not active()
    assert fit("on", False, 4) == {False}  # a run may go on without
    monkeypatch.setattr(setup, "missing", lambda device: "Triton is not installed: pip install it")
    with pytest.raises(ValueError, match="^train.kernels=true: Triton is not installed: pip install it; leave it out$"):
        setup.load_target_and_data(new_recipe(tmp_path / "none", kernels=True))  # before there is a target
    assert missing(torch.device(DEVICE)) == ""


CALLS = """
def run(vocab, size, steps, rows, shares, least=False):
    raw, weight, text = torch.empty(rows, vocab, dtype=torch.bfloat16), torch.ones(steps, rows), torch.zeros(rows, dtype=torch.int64)
    part = (None, None) if size == vocab else (torch.arange(size), torch.zeros(vocab, dtype=torch.int64))
    target = None if set(shares) == {"nll"} else kernels.target_distribution(raw, weight, *part, 0.7, text.float() if least else None)
    kernels.with_gradients(torch.empty(steps, rows, size, dtype=torch.bfloat16), target, text, weight, weight, shares)

for rows in (1, 37, 64):
    run(128_256, 32_000, 7, rows, {"ce": 1.0})
run(151_936, 151_936, 1, 55, {"nll": 1.0})
run(2000, 2000, 1, 55, {name: 0.1 for name in ("ce", "kl", "nll", "reverse_kl", "jsd", "jsd(0.1)", "tv", "lk", "lk_hybrid")}, least=True)
run(1, 1, 1, 1, {"kl": 1.0})
"""


def test_compiles_for_hopper(tmp_path):
    """One kernel for chunks of any length."""
    names = compiled("draftsmith.train.losses.kernels", ("_target_distribution_kernel", "_losses_kernel"), CALLS, tmp_path)
    assert names == 4 * ["_losses_kernel"] + 3 * ["_target_distribution_kernel"]


class TestNatively:
    pytestmark = pytest.mark.gpu

    @pytest.fixture(autouse=True)
    def _full_precision(self, monkeypatch):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)

    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("loss", [*LOSSES, "jsd(0.1)", MIX, EVERYTHING], ids=str)
    @pytest.mark.parametrize(("vocab", "size"), [*SIZES, (50_257, 50_257), (151_936, 32_000), (262_144, 262_144)])
    def test_equals_the_plain_losses(self, vocab, size, loss, dtype):
        for steps, kind in ((1, "wide"), (3, "ties"), (3, "holes")):
            if vocab == 2 and kind == "ties":
                continue  # q = p there, where the total variation has no derivative
            check(chunk(vocab, size, steps, 40 if vocab <= 1000 else 5, kind, dtype), loss, temperature=0.9)

    @pytest.mark.parametrize("function", CHUNKED)
    def test_on_equals_off(self, function):
        one = problem()
        want, got = outcome(one, function, False), outcome(one, function, True)
        for a, b in zip((got[0], *got[1], *got[2]), (want[0], *want[1], *want[2]), strict=True):
            assert torch.equal(a, b) if a.dtype == torch.bool else near(a, b.double())

    @pytest.mark.parametrize("loss", [*LOSSES, EVERYTHING], ids=str)
    @pytest.mark.parametrize("where", ["raw", "logits"])
    def test_nan_where_it_counts_is_not_hidden(self, where, loss):
        """Not so under the interpreter: a GPU's minimum of NaN and a number is the number, by default."""
        nan_is_seen(where, loss)
