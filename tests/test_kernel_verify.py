"""The verification kernels against their reference implementation, under Triton's interpreter; natively where there is a GPU."""

import importlib
import random
import sys
from dataclasses import replace

import pytest
import torch
from hopper import compiled
from interpreted import INTERPRETED
from kernel_fixtures import _one_way, _patched_once, _poisoned  # noqa: F401
from taped import as_on_a_gpu
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import JITFunction

from draftsmith.inference import rules, sampler
from draftsmith.inference.kernels import verify as kernels
from draftsmith.inference.kernels.verify import _keep_mask, _noise, _scores, reciprocal, refusal, verify
from draftsmith.inference.sampler import RULES, Sampling
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict
from draftsmith.inference.verify import verify as plain

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, where -inf is taken from -inf
for name in ("standard", "random"):
    module = sys.modules[f"triton.language.{name}"]
    if INTERPRETED and any(isinstance(value, JITFunction) for value in vars(module).values()):
        # transformers imported Triton before the variable was set: Triton's own functions are decorated anew.
        importlib.reload(module)
        importlib.reload(tl)

K = 3
NODES = (1, 2, 31, 33, 64, 65)
BLOCKS = {3: 4, 17: 16, 64: 32, 257: 128, 1000: 256}
PLAIN = [Sampling(0.3, seed=1), Sampling(1.0, seed=2**63 + 5, rule="target-sample"), Sampling(1.7, seed=2**32)]
FILTERED = [
    Sampling(0.8, top_k=5, seed=3),
    Sampling(1.3, top_p=0.83, seed=4),
    Sampling(0.9, min_p=0.07, seed=5),
    Sampling(1.5, top_k=12, top_p=0.71, min_p=0.11, seed=6),
]
KINDS = ("wide", "ties", "holes", "one")


def draws(rows: int, nodes: int, vocab: int, kind: str, dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """Logits [B,N,V], nodes before rows, NaN between them. ties: of few values, both zeros among them; holes: most are -inf; one: all but one."""
    where = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    space = torch.full((nodes, rows, vocab + 5), torch.nan, dtype=dtype, device=device)
    fresh = torch.randn(rows, nodes, vocab, **where) * 3
    chance = torch.rand(fresh.shape, **where)
    if kind == "ties":
        fresh = fresh.clamp(-1, 1).round()
    if kind == "holes":
        fresh[chance < 0.7] = -torch.inf
    if kind == "one":
        fresh[chance < chance.amax(-1, keepdim=True)] = -torch.inf
    return space.transpose(0, 1)[:, :, :vocab].copy_(fresh)


def planted(nodes: int, y: torch.Tensor, parents: list[list[int]], rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Tokens and sizes with which row b accepts b − 1 nodes, as far as there are: others carry what some other node drew, and what
    comes after the accepted child may carry the same; so may padding."""
    tokens, sizes = [], []
    for b, up in enumerate(parents):
        depth = [0] * nodes
        for i in range(1, nodes):
            depth[i] = depth[up[i]] + 1
        drawn, line = y[b].tolist(), set()
        end = rng.choice([i for i in range(nodes) if depth[i] == min(max(b - 1, 0), max(depth))])
        size = rng.randint(end + 1, nodes) if b else 0
        while end > 0:
            line.add(end)
            end = up[end]
        row = [0]
        for i in range(1, nodes):
            mine, taken = drawn[up[i]], any(j < i and up[j] == up[i] for j in line)
            others = [token for token in drawn + [mine + 1, 0, 1] if token != mine] or [0]
            row.append(mine if i in line or i >= size or (taken and rng.random() < 0.5) else rng.choice(others))
        tokens.append(row)
        sizes.append(size)
    return tokens, sizes


def case(
    nodes: int, vocab: int, how: Sampling, kind: str = "wide", dtype: torch.dtype = torch.float32, device: str = "cpu", rows: int = K + 2
):
    """Everything that verify takes: K+2 rows that accept −1 (idle), 0, 1, … nodes."""
    rng = random.Random(nodes * vocab)
    logits = draws(rows, nodes, vocab, kind, dtype, nodes + vocab, device)
    parents = []
    for _ in range(rows):
        up, depth = [-1], [0]
        for i in range(1, nodes):
            up.append(i - 1 if i <= K else rng.choice([j for j in range(i) if depth[j] < K]))
            depth.append(depth[up[i]] + 1)
        parents.append(up)
    request, position = torch.arange(rows) * 7, 2**32 - 40 - torch.arange(rows) * 3
    request[-1] = 2**32 - 1
    zero = torch.zeros(rows, nodes, dtype=torch.int64)
    tree = DraftTree.build(zero, torch.tensor(parents), torch.full((rows,), nodes)).to(device)
    request, position = request.to(device), position.to(device)
    y = rules.draw(logits, tree.depth, how, request, position, K)
    tokens, sizes = planted(nodes, y, parents, rng)
    parents = [[parent if i < size else -(i % 2) for i, parent in enumerate(up)] for up, size in zip(parents, sizes, strict=True)]
    tree = DraftTree.build(torch.tensor(tokens), torch.tensor(parents), torch.tensor(sizes)).to(device)
    return tree, logits, how, request, position, K


def check(arguments: tuple, **options) -> Verdict:
    got, expected = verify(*arguments, **options), plain(*arguments)
    tree, how = arguments[0], arguments[2]
    live = tree.size > 0
    for name in ("path", "length"):
        assert getattr(got, name).dtype == torch.int64 and torch.equal(getattr(got, name), getattr(expected, name)), (name, how)
    assert torch.equal(got.next_token[live], expected.next_token[live]) and not got.next_token[~live].any(), how
    return got


@pytest.mark.one_in(3)
@pytest.mark.parametrize("vocab", BLOCKS)
@pytest.mark.parametrize("nodes", NODES)
def test_equals_the_reference(nodes, vocab):
    place = NODES.index(nodes) * 5 + list(BLOCKS).index(vocab)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[place % 3]
    cases = [(Sampling(), KINDS[place % 4]), (PLAIN[place % 3], KINDS[place // 2 % 4])]
    if place % 7 == 3:
        cases.append((FILTERED[place % 4], KINDS[place // 5 % 4]))
    for how, kind in cases:
        verdict = check(case(nodes, vocab, how, kind, dtype), block=BLOCKS[vocab])
        assert verdict.length.tolist() == [min(b, nodes) for b in range(K + 2)], "every length occurs"


@pytest.mark.parametrize(("filters", "kind"), [*((3, kind) for kind in KINDS), (0, "ties"), (1, "ties"), (2, "wide")])
def test_filters(filters, kind):
    how = FILTERED[filters]
    verdict = check(case(7, 30, how, kind, rows=4), block=16)
    assert verdict.length.tolist() == [0, 1, 2, 3]


def alone(logits: torch.Tensor, how: Sampling) -> tuple:
    """Rows [B,V] as the logits of roots without children."""
    rows = torch.arange(len(logits))
    return DraftTree.root(torch.zeros_like(rows)), logits[:, None], how, rows + 2**31, rows * 3, 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_argmax_says_of_odd_rows(dtype):
    """The lowest of equals, also between blocks; NaN wins, the first of them; nothing but -inf gives 0."""
    logits = torch.full((7, 50), -1.0)
    logits[0, [15, 16, 49]] = 2.0
    logits[1, [47, 48]] = 3.0
    logits[2, [20, 40]] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, [9, 33]] = torch.inf
    logits[5, 30], logits[5, 31] = -0.0, 0.0
    logits[6] = torch.finfo(dtype).min
    assert verify(*alone(logits.to(dtype), Sampling()), block=16).next_token.tolist() == [15, 47, 20, 0, 9, 30, 0]
    check(alone(logits.to(dtype), Sampling()), block=16)
    check(alone(logits.to(dtype), Sampling(0.5, seed=1)), block=16)
    for how in (Sampling(0.5, top_k=3), Sampling(0.5, min_p=1.0), Sampling(2.0, top_k=49, top_p=0.57, min_p=0.01)):
        check(alone(logits[[0, 3, 5, 6]].to(dtype), how), block=32)


@triton.jit
def _fill(noise, seed, request, position, vocab, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise + index, _noise(seed, tl.load(request), tl.load(position), tl.program_id(0), BLOCK), mask=index < vocab)


KEYS = [(0, 0, 0), (7, 1, 2**31), (2**32, 2**32 - 1, 2**32 - 1), (2**63 + 2**32 + 3, 2**32 - 2, 5), (2**64 - 1, 12345, 2**31 - 1)]


def noise(seed: int, request: int, position: int, vocab: int, block: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor([request], device=device), torch.tensor([position], device=device)
    got = torch.zeros(vocab, device=device)
    _fill[(triton.cdiv(vocab, block),)](got, (seed + 2**63) % 2**64 - 2**63, *keys, vocab, BLOCK=block)
    return got, sampler.gumbel(seed, *keys, vocab)[0]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_noise_is_the_samplers(key):
    got, expected = noise(*key, 5003, 1024)
    assert torch.equal(got, expected) and got.std() > 1


@triton.jit
def _scale(scores, logits, vocab, scale, MULTIPLY: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(scores + index, _scores(logits, 0, index, vocab, scale, True, MULTIPLY), mask=index < vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scores_are_warps(dtype):
    logits, got = draws(1, 1, 1000, "wide", dtype, 0)[0, 0], torch.zeros(1000)
    for temperature in (0.3, 0.7, 1.7):
        _scale[(1,)](got, logits, 1000, temperature, MULTIPLY=False, BLOCK=1024)
        assert torch.equal(got, sampler.warp(logits, Sampling(temperature)))


@triton.jit
def _record(
    kept, logits, row_stride, vocab, scale, best, state, bins, top_k, rest, min_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, MULTIPLY: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, row, splits = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    x = _scores(logits, row * row_stride, index, vocab, scale, True, MULTIPLY)
    keep = _keep_mask(x, row, block, splits, best, state, bins, top_k, rest, min_p, TOP_K, TOP_P, MIN_P, SPLITS)
    tl.store(kept + row * vocab + index, keep.to(tl.int8), mask=index < vocab)


def keeping(monkeypatch, logits: torch.Tensor, how: Sampling, block: int) -> torch.Tensor:
    """Rows [B,V] -> bool [B,V]: what the kernels keep, asked where they are about to draw."""
    kept, draw = torch.zeros(logits.shape, dtype=torch.int8, device=logits.device), kernels._draw

    class Recorder:
        def __getitem__(self, grid):
            def launch(*given, **flags):
                scores, filters = (*given[:2], *given[3:5]), (*given[14:17], *given[20:23])
                wanted = ("TOP_K", "TOP_P", "MIN_P", "MULTIPLY", "SPLITS", "BLOCK")
                _record[grid](kept, *scores, *filters, **{name: flags[name] for name in wanted}, enable_fp_fusion=False)
                draw[grid](*given, **flags)

            return launch

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_draw", Recorder())
        check(tuple(x.to(logits.device) if isinstance(x, torch.Tensor | DraftTree) else x for x in alone(logits, how)), block=block)
    return kept.bool()


def near(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """bool [B,V]: within 1e-6 of the limit of top_p or of min_p, by float64."""
    scores = sampler.warp(logits, replace(how, top_p=1.0, min_p=0.0)).double()
    ordered, index = scores.sort(stable=True)
    close = (ordered.softmax(-1).cumsum(-1) - (1 - how.top_p)).abs() < 1e-6
    p = scores.softmax(-1)
    return torch.zeros_like(close).scatter_(-1, index, close) | ((p / p.amax(-1, keepdim=True) - how.min_p).abs() < 1e-6)


FILTERS = [
    dict(top_k=9), dict(top_k=1), dict(top_p=0.9), dict(top_p=0.37), dict(top_p=1e-9), dict(min_p=0.05), dict(min_p=1.0),
    dict(top_k=30, top_p=0.8, min_p=0.02),
]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_kept_sets(filters, monkeypatch):
    """Also flat rows, where half of the limits fall upon a token; one row of a single token; V of one more than two blocks."""
    logits = torch.cat([draws(1, 1, 65, kind, torch.float32, i)[0] for i, kind in enumerate((*KINDS, "wide"))] + [torch.zeros(1, 65)])
    how = Sampling(0.7, seed=1, **filters)
    got, expected = keeping(monkeypatch, logits, how, 32), sampler.warp(logits, how) > -torch.inf
    got &= logits > -torch.inf
    wrong = got != expected
    assert not (wrong & ~near(logits, how)).any() and wrong.sum() <= 1 and expected.any(-1).all()
    assert not wrong[:-1].any(), "only the flat row has a token at the limit"


class Watch(TorchDispatchMode):
    """What reads the device, and the bytes of the largest tensor that is made, views of `logits` apart."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.syncs, self.largest, self.calls = logits.untyped_storage().data_ptr(), [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func._schema.name, func(*args, **(kwargs or {}))
        self.calls += 1
        if name.startswith(("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")):
            self.syncs.append(name)
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.logits:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


def test_no_sync_and_nothing_of_the_logits_size(monkeypatch):
    as_on_a_gpu(monkeypatch)
    arguments = case(2, 1000, FILTERED[3], rows=3)
    with Watch(arguments[1]) as watch:
        verify(*arguments, block=256)
    assert watch.syncs == [] and watch.calls > 5 and 0 < watch.largest < 2 * 1000 * 4
    with Watch(arguments[1]) as watch:
        plain(*arguments)
        torch.ones(1).item()
    assert watch.largest >= 3 * 2 * 1000 * 4 and watch.syncs == ["aten::_local_scalar_dense"], "the watch sees what it looks for"


def test_launches_follow_from_the_depth(monkeypatch):
    counts = dict.fromkeys(("_best", "_search", "_draw", "_finish"), 0)

    class Counter:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(kernels, name)

        def __getitem__(self, grid):
            counts[self.name] += 1
            return self.kernel[grid]

    for name in counts:
        monkeypatch.setattr(kernels, name, Counter(name))
    for how, expected in ((Sampling(), [0, 0, 3, 1]), (PLAIN[0], [0, 0, 3, 1]), (FILTERED[2], [3, 0, 3, 1]), (FILTERED[3], [3, 48, 3, 1])):
        counts.update(dict.fromkeys(counts, 0))
        tree, *rest, _ = case(3, 15, how, rows=2)
        verify(tree, *rest, 2)
        assert list(counts.values()) == expected


@pytest.mark.parametrize("depth", [None, 2, 3, 9])
def test_static_trees_and_bounds_of_depth(depth):
    """Trees whose rows share one tensor; keys that lie in columns."""
    top, generator = StaticTree.cartesian([2, 2]), torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 6, generator=generator)
    tree = top.fill(torch.randint(3, (7, 3), generator=generator).T)
    keys = torch.tensor([[5, 1], [2, 7], [3, 3]])
    for how in (Sampling(), PLAIN[1]):
        verdict = check((tree, logits, how, keys[:, 0], keys[:, 1], depth), block=4)
        assert verdict.path.shape == (3, min(depth or 6, 6) + 1)
        check((tree, logits[:1].expand(3, -1, -1), how, keys[:, 0], keys[:, 1], depth), block=8)


def test_refusal():
    assert not refusal(Sampling()) and not refusal(Sampling(rule="typical")) and not refusal(FILTERED[3])
    assert {rule for rule in RULES if not refusal(Sampling(1.0, top_k=2, rule=rule))} == {"target-sample", "shared-noise"}
    assert refusal(Sampling(1.0, rule="rejection")).startswith("rule rejection")
    assert refusal(Sampling(repetition_penalty=1.1)).startswith("repetition_penalty 1.1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": Sampling(1.0, rule="rejection")}, "got rule rejection"),
        ({"logits": torch.zeros(2, 3, 5, dtype=torch.float64)}, "float64"),
        ({"logits": torch.zeros(2, 5)}, "expected .B,N,V"),
        ({"logits": torch.zeros(2, 3, 0)}, "none empty"),
        ({"logits": torch.zeros(2, 3, 10)[:, :, ::2]}, "last stride 2"),
        ({"logits": torch.zeros(2, 3, 1).expand(2, 3, 2**19 + 1)}, "524289"),
        ({"logits": torch.zeros(1, 1, 5).expand(2, 257, 5)}, "N <= 256"),
        ({"logits": torch.zeros(2, 4, 5)}, "got tokens .2, 3."),
        ({"noise_keys": torch.zeros(2, dtype=torch.int32)}, "got noise_keys .2. torch.int32"),
        ({"positions": torch.zeros(2, dtype=torch.int64, device="meta")}, "got positions .* on meta"),
        ({"max_depth": -1}, "max_depth -1"),
        ({"block": 48}, "block 48"),
        ({"block": 2}, "block 2"),
    ],
    ids=str,
)
def test_refusals(change, message):
    tree = DraftTree.build(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[-1, 0, 0]] * 2), torch.tensor([3, 3]))
    zero = torch.zeros(2, dtype=torch.int64)
    given = {"tree": tree, "logits": torch.zeros(2, 3, 5), "sampling": Sampling(), "noise_keys": zero, "positions": zero}
    verify(**given)
    with pytest.raises(ValueError, match=message):
        verify(**given | change)


CALLS = """
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree

def natively(name, flags):
    return flags if name == "_finish" else flags | {"MULTIPLY": True}

zero = torch.zeros(2, dtype=torch.int64)
tree = StaticTree.chain(2).fill(torch.zeros(2, 3, dtype=torch.int64))
logits = torch.zeros(2, 3, 151_936, dtype=torch.bfloat16)
for how in (Sampling(), Sampling(0.7, top_k=9, top_p=0.8, min_p=0.1, seed=2**64 - 1), Sampling(0.7, seed=1)):
    kernels.verify(tree, logits, how, zero, zero, 2)
"""


def test_compiles_for_hopper(tmp_path):
    """One kernel for all levels, digits and seeds."""
    names = compiled("draftsmith.inference.kernels.verify", ("_best", "_search", "_draw", "_finish"), CALLS, tmp_path)
    assert names == ["_best", "_draw", "_draw", "_draw", "_finish", "_search", "_search", "_search", "_search"]


class TestNatively:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        ("nodes", "vocab"),
        [*((nodes, vocab) for nodes in NODES for vocab in (3, 257, 5003)), (1, 151_936), (33, 151_936), (6, 262_144), (256, 2048)],
    )
    def test_equals_the_reference(self, nodes, vocab, dtype):
        for how in (Sampling(), *PLAIN, *FILTERED):
            for kind in KINDS:
                verdict = check(case(nodes, vocab, how, kind, dtype, "cuda"))
                assert verdict.length.tolist() == [min(b, nodes) for b in range(K + 2)]

    @pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.3, 1.7])
    def test_the_scores_are_warps(self, temperature):
        """torch multiplies by the reciprocal on a GPU; should it divide one day, rare draws are different until the launcher does."""
        logits, got = draws(1, 1, 4096, "wide", torch.float32, 0, "cuda")[0, 0], torch.zeros(4096, device="cuda")
        _scale[(1,)](got, logits, 4096, reciprocal(temperature), MULTIPLY=True, BLOCK=4096)
        assert torch.equal(got, sampler.warp(logits, Sampling(temperature)))

    @pytest.mark.parametrize("key", KEYS, ids=str)
    def test_the_noise_is_the_samplers(self, key):
        """float64 logarithms may differ in their last bit, which float32 shows once in 2^28 times or so."""
        got, expected = noise(*key, 262_144, 2048, "cuda")
        assert (got != expected).sum() <= 1

    @pytest.mark.parametrize("filters", FILTERS, ids=str)
    def test_kept_sets(self, filters, monkeypatch):
        logits, how = draws(8, 1, 151_936, "wide", torch.float32, 0, "cuda")[:, 0], Sampling(0.7, seed=1, **filters)
        wrong = keeping(monkeypatch, logits, how, 2048) != (sampler.warp(logits, how) > -torch.inf)
        assert not (wrong & ~near(logits, how)).any()

    @pytest.mark.parametrize("how", [Sampling(), PLAIN[1], FILTERED[3]], ids=["greedy", "plain", "filtered"])
    def test_in_a_graph(self, how):
        """GraphRunner once, it serves other logits and other trees of the shape."""
        tree, logits, _, request, position, _ = case(20, 5000, how, device="cuda")
        verify(tree, logits, how, request, position, K)  # compiled before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            verdict = verify(tree, logits, how, request, position, K)
        for seed in range(3):
            logits.copy_(draws(K + 2, 20, 5000, "wide", torch.float32, seed, "cuda"))
            tree.tokens.copy_(rules.draw(logits, tree.depth, how, request, position, K).gather(1, tree.parents.clamp(min=0)).roll(seed, 0))
            graph.replay()
            expected = plain(tree, logits, how, request, position, K)
            assert torch.equal(verdict.path, expected.path) and torch.equal(verdict.length, expected.length)
