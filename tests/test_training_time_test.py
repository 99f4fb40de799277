"""The training-time test's attention: against a loop over positions in float64, by counting tensors, and with planted faults."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import HEADS, LAYOUTS, assert_close, case, causal_spans, documents, halves, with_grads
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex
from watching import Largest

from draftsmith.models import span_attention, training_time_test
from draftsmith.models.training_time_test import attend, blocks, shift_left


def loop(leaves, document):
    """Position by position: gather the keys, softmax, weighted sum."""
    query, keys, values = halves([leaf.double() for leaf in leaves])
    rows, heads, positions, dim = query.shape
    group = heads // keys[0].shape[1]
    out = []
    for b in range(rows):
        for h in range(heads):
            for p in range(positions):
                seen = [r for r in range(p + 1) if document is None or document[b, r] == document[b, p]]
                own = [[step[b, h // group, p] for step in side[1:]] for side in (keys, values)]
                ks = torch.stack([*keys[0][b, h // group, seen], *own[0]])
                vs = torch.stack([*values[0][b, h // group, seen], *own[1]])
                out.append((ks @ query[b, h, p] * dim**-0.5).softmax(0) @ vs)
    return torch.stack(out).view(query.shape)


def dense(leaves, document):
    """One table of scores, as naive trainers make it."""
    query, keys, values = halves(leaves)
    positions, group = query.shape[2], query.shape[1] // keys[0].shape[1]
    causal = torch.ones(positions, positions, dtype=torch.bool).tril()
    if document is not None:
        causal = causal & (document[:, None, :, None] == document[:, None, None])
    own = torch.eye(positions, dtype=torch.bool).expand_as(causal)
    mask = torch.cat([causal] + [own] * (len(keys) - 1), -1)
    k, v = (torch.cat(list(side), 2).repeat_interleave(group, 1) for side in (keys, values))
    return F.scaled_dot_product_attention(query, k, v, attn_mask=mask)


def ours(document, budget=span_attention.BUDGET):
    return lambda leaves: attend(*halves(leaves), document, budget=budget)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("positions", [1, 2, 7, 33])
@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_loop(positions, kv, layout):
    document = documents(layout, positions)
    for k in range(7) if positions < 33 else [positions % 7, kv]:
        leaves, weight = case(positions, kv, k, seed=k)
        want = with_grads(lambda leaves: loop(leaves, document), leaves, weight)
        for budget in (1, 150, span_attention.BUDGET):
            assert_close(with_grads(ours(document, budget), leaves, weight), want, 1e-10)
            single = [leaf.detach().float().requires_grad_() for leaf in leaves]
            assert_close(with_grads(ours(document, budget), single, weight), want, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("positions", [127, 129, 300])
def test_equals_the_table_over_several_blocks(layout, positions):
    document = documents(layout, positions)
    leaves, weight = case(positions, 2, 3)
    want = with_grads(lambda leaves: dense(leaves, document), leaves, weight)
    for budget in (3000, span_attention.BUDGET):
        assert_close(with_grads(ours(document, budget), leaves, weight), want, 1e-10)


def test_gradcheck():
    document = torch.tensor([[0, 0, 0, 1, 1], [3, 3, -1, -1, -1]])
    for k in (0, 2):
        leaves, _ = case(5, 2, k)
        assert torch.autograd.gradcheck(lambda *leaves: ours(document, 24)(leaves), leaves)


def test_scale_and_transposed_inputs():
    leaves, weight = case(9, 2, 2)
    want = with_grads(lambda leaves: loop([leaves[0] * 0.7 * 3**0.5, *leaves[1:]], None), leaves, weight)
    turned = [leaf.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for leaf in leaves]
    assert_close(with_grads(lambda leaves: attend(*halves(leaves), None, scale=0.7), turned, weight), want, 1e-10)


@pytest.mark.parametrize("budget", [1, 600, span_attention.BUDGET])
def test_documents_do_not_see_each_other(budget):
    document = torch.tensor([[0] * 10 + [1] * 12 + [2] * 11]).expand(2, -1)
    leaves, weight = case(33, 2, 3, torch.float32)
    before = attend(*halves(leaves), document, budget=budget)
    changed = [leaf.detach().clone() for leaf in leaves]
    for leaf in changed:
        leaf[:, :, 10:22] = torch.randn_like(leaf[:, :, 10:22]) * 9
    after = attend(*halves(changed), document, budget=budget)
    apart = torch.ones(33, dtype=torch.bool)
    apart[10:22] = False
    assert torch.equal(before[:, :, apart], after[:, :, apart])
    assert not torch.equal(before[:, :, ~apart], after[:, :, ~apart])
    for grad in torch.autograd.grad((before * weight)[:, :, apart].sum(), leaves):
        assert not grad[:, :, ~apart].any() and grad[:, :, apart].any()


def test_a_number_that_comes_back_is_another_document():
    leaves, weight = case(6, 4, 1)
    again, fresh = torch.tensor([[5, 5, 8, 8, 5, 5]]).expand(2, -1), torch.tensor([[0, 0, 1, 1, 2, 2]]).expand(2, -1)
    assert torch.equal(attend(*halves(leaves), again), attend(*halves(leaves), fresh))
    assert torch.equal(shift_left(leaves[0][:, 0], 3, again), shift_left(leaves[0][:, 0], 3, fresh))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tensor_is_a_table_of_scores(layout):
    positions, dim, budget = 512, 16, 1 << 14
    document = documents(layout, positions, rows=1)
    leaves, weight = case(positions, 2, 6, torch.float32, rows=1, dim=dim)
    with Largest() as largest:
        with_grads(ours(document, budget), leaves, weight)
    assert largest.seen > 100
    assert largest.elements <= max(budget, HEADS * positions * dim) < positions * positions
    with Largest() as largest:
        with_grads(lambda leaves: dense(leaves, document), leaves, weight)
    assert largest.elements >= positions * positions


def test_bf16_sums_in_fp32():
    document = documents("packed", 33)
    leaves, weight = case(33, 2, 3, torch.bfloat16)
    single = [leaf.detach().float().requires_grad_() for leaf in leaves]
    weight = weight.bfloat16()
    got, want = with_grads(ours(document), leaves, weight), with_grads(ours(document), single, weight)
    assert all(tensor.dtype == torch.bfloat16 for tensor in got)
    assert torch.equal(got[0], want[0].bfloat16())
    assert_close(got, want, 2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = ours(document)(single)
    grads = torch.autograd.grad(inside, single, weight.float())
    assert all(torch.equal(a, b) for a, b in zip([inside, *grads], want, strict=True))


def faulty_merge(change):
    right = training_time_test._merge

    def merge(query, out, lse, keys, values, scale):
        return change(right, query, out, lse, keys, values, scale)

    return training_time_test, "_merge", merge


def without_the_peak(_, query, out, lse, keys, values, scale):
    scores = [(query * key.repeat_interleave(2, 1)).sum(-1, keepdim=True) * scale for key in keys]
    sums = sum(score.exp() * value.repeat_interleave(2, 1) for score, value in zip(scores, values, strict=True))
    return (lse[..., None].exp() * out + sums) / (lse[..., None].exp() + sum(score.exp() for score in scores))


FAULTS = {
    "the step's own diagonal forgotten": faulty_merge(lambda f, q, o, lse, ks, vs, scale: f(q, o, lse, ks[:-1], vs[:-1], scale)),
    "diagonals of the next row": faulty_merge(
        lambda f, q, o, lse, ks, vs, scale: f(q, o, lse, [k.roll(1, 2) for k in ks], [v.roll(1, 2) for v in vs], scale)
    ),
    "a merge without the peak": faulty_merge(without_the_peak),
    "no gradient through the log-sum-exp": faulty_merge(lambda f, q, o, lse, ks, vs, scale: f(q, o, lse.detach(), ks, vs, scale)),
    "not causal": (span_attention, "_hidden", lambda start, end, key_at: (key_at < start) & (end >= 0)),
    "strictly causal": (span_attention, "_hidden", lambda start, end, key_at: (key_at >= (end - 1).clamp(min=1)) | (key_at < start)),
    "documents mixed": (
        training_time_test,
        "document_starts",
        lambda document, rows, positions, device: torch.zeros(rows, positions, dtype=torch.int64),
    ),
    "a gradient without D": (span_attention, "_row_terms", lambda d_out, out: torch.zeros_like(out[..., 0])),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("dtype,wide,tolerance", [(torch.float64, 1, 1e-10), (torch.float32, 60, 1e-4)])
def test_planted_faults_are_seen(monkeypatch, fault, dtype, wide, tolerance):
    document = torch.tensor([[0] * 7 + [1] * 13]).expand(2, -1)
    leaves, weight = case(20, 2, 3, dtype, wide=wide)
    want = with_grads(lambda leaves: loop(leaves, document), leaves, weight)
    if fault:
        monkeypatch.setattr(*FAULTS[fault])
    got = with_grads(ours(document, 400), leaves, weight)
    # In float64 this merge is the right one, as long as nothing overflows.
    if not fault or (fault == "a merge without the peak" and dtype == torch.float64):
        assert_close(got, want, tolerance)
    else:
        with pytest.raises(AssertionError):
            assert_close(got, want, tolerance)


@pytest.mark.parametrize("positions", [1, 128, 300, 513])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_block_mask_is_the_documents(positions, layout):
    document = documents(layout, positions)
    if document is not None and positions > 300:
        document = torch.where(document < 0, document, document // 40)  # long enough for full blocks
    padded = positions + -positions % 128
    full = torch.zeros(2, padded, dtype=torch.int64) if document is None else F.pad(document, (0, padded - positions))
    want = flex.create_block_mask(
        lambda b, h, q, k: torch.where(q < positions, (k <= q) & (full[b, q] == full[b, k]), k == padded - 1),
        2,
        None,
        padded,
        padded,
        device="cpu",
    )
    got = span_attention.block_mask(*causal_spans(document, positions), positions)
    assert got.shape == want.shape and torch.equal(got.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert blocks(document, 2, positions, "cpu") is None


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("positions,layout,kv", [(5, "one", 4), (130, "packed", 2), (128, "padded", 1)])
def test_flex_attention_gives_the_same(monkeypatch, positions, layout, kv):
    """The GPU's path but for the compiled kernel: FlexAttention's own reference, whose backward pass is merely not offered on a CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    document = documents(layout, positions)
    mask = span_attention.block_mask(*causal_spans(document, positions), positions)
    leaves, weight = case(positions, kv, 3, torch.float32, dim=16)

    def path(leaves):
        query, keys, values = halves(leaves)
        out, lse = span_attention.flex(query, keys[0], values[0], mask, 0.25, flex.flex_attention)
        return training_time_test._merge(query, out, lse, keys[1:], values[1:], 0.25)

    assert_close(with_grads(path, leaves, weight), with_grads(ours(document), leaves, weight), 1e-5)


def test_new_documents_and_lengths_do_not_compile_again():
    """Past its limit of recompilations dynamo would give up: one for the first length, one for all others."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend=counter)
    for seed, positions in enumerate((256, 256, 300, 513, 130, 700)):
        document = documents("packed", positions, seed=seed)
        spans = causal_spans(document, positions)
        query, (key,), (value,) = halves([leaf.detach() for leaf in case(positions, 2, 0, torch.float32, dim=16)[0]])
        got = span_attention.flex(query, key, value, span_attention.block_mask(*spans, positions), 0.25, compiled)
        assert_close(got, span_attention.Spans.apply(query, key, value, *spans, 0.25, span_attention.BUDGET), 1e-5)
    assert counter.frame_count == 2


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_gpu_equals_cpu(layout, dtype, tolerance):
    torch.backends.cuda.matmul.allow_tf32 = False
    for positions, k in ((300, 0), (300, 4), (512, 6), (77, 2)):
        document = documents(layout, positions)
        leaves, weight = case(positions, 2, k, dtype, dim=64)
        moved = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
        on_gpu = None if document is None else document.cuda()
        mask = blocks(on_gpu, 2, positions, "cuda")
        got = with_grads(lambda leaves, on_gpu=on_gpu, mask=mask: attend(*halves(leaves), on_gpu, mask=mask), moved, weight.cuda())
        assert_close([tensor.cpu() for tensor in got], with_grads(ours(document), leaves, weight), tolerance)
        assert torch.equal(attend(*halves(moved), on_gpu), got[0])


@pytest.mark.gpu
def test_gpu_holds_no_table():
    positions = 32768
    document = torch.arange(positions, device="cuda")[None] // 5000
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in case(positions, 2, 2, torch.bfloat16, rows=1, dim=64)[0]]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend(*halves(leaves), document).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < positions * positions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tail", [(), (3,), (2, 2)])
def test_shift_left_equals_a_loop(layout, tail):
    document = documents(layout, 9)
    for rows in (torch.randn(2, 9, *tail), 1 + torch.randint(5, (2, 9, *tail)), torch.rand(2, 9, *tail) < 0.5):
        for count in (0, 1, 2, 5, 9, 12):
            want = torch.zeros_like(rows)
            for b in range(2):
                for p in range(9 - count):
                    if document is None or document[b, p] == document[b, p + count]:
                        want[b, p] = rows[b, p + count]
            got = shift_left(rows, count, document)
            assert got.dtype == rows.dtype and torch.equal(got, want)


def test_refusals():
    (query, key, value), _ = case(7, 2, 0)
    for keys, values, document, words in [
        ([], [], None, "0 keys and 0 values"),
        ([key, key], [value], None, "2 keys and 1 values"),
        ([key[:, :, :5]], [value], None, r"keys of \[2, 2, 5, 3\]"),
        ([key], [value[..., :2]], None, r"values of \[2, 2, 7, 2\]"),
        ([key.repeat(1, 3, 1, 1)[:, :3]], [value], None, r"keys of \[2, 3, 7, 3\]"),
        ([key], [value], torch.zeros(2, 6), r"document of \[2, 6\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            attend(query, keys, values, document)
    with pytest.raises(ValueError, match="count -1"):
        shift_left(key, -1)


def test_flex_attention_may_compile_for_more_shapes_than_dynamos_default(monkeypatch):
    default = torch._dynamo.config.recompile_limit
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: lambda: torch._dynamo.config.recompile_limit)
    assert span_attention.compiled.__wrapped__()() == span_attention.SHAPES > default == torch._dynamo.config.recompile_limit
