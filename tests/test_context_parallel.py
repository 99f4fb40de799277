"""Context parallelism: attention of a part of a row, and training that gives the same whichever rank has which positions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_cases import LAYOUTS, assert_close, case, causal_spans, documents, halves, with_grads
from context_ranks import FAULTS, JOBS, LONG
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex

from draftsmith.models import span_attention
from draftsmith.models.context_parallel import SINGLE_RANK, ContextParallel
from draftsmith.models.training_time_test import _merge, attend, blocks
from draftsmith.train import distill, eagle, medusa
from draftsmith.train.engine import processes

ROOT = Path(__file__).resolve().parents[1]


# Attention


def parts(leaves, document, cuts, path=attend):
    """Attention of the queries between each two of `cuts`, with the keys up to the last of them, concatenated."""
    query, keys, values = halves(leaves)
    outputs = []
    for first, last in zip([0, *cuts], [*cuts, query.shape[2]], strict=True):
        sides = [[side[0][:, :, :last], *(one[:, :, first:last] for one in side[1:])] for side in (keys, values)]
        outputs.append(path(query[:, :, first:last], *sides, None if document is None else document[:, :last]))
    return torch.cat(outputs, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("positions, cuts", [(7, [1, 6]), (34, [17]), (33, [11, 22]), (150, [3, 5, 140]), (300, [151])])
def test_parts_are_the_row(layout, positions, cuts):
    document = documents(layout, positions)
    if document is not None:
        assert any((document[:, cut - 1] == document[:, cut]).any() for cut in cuts)  # documents cross from part to part
    for kv, k, budget in ((4, 0, span_attention.BUDGET), (2, 3, span_attention.BUDGET), (1, 2, 600)):
        leaves, weight = case(positions, kv, k)
        want = with_grads(lambda leaves: attend(*halves(leaves), document), leaves, weight)
        got = with_grads(
            lambda leaves, budget=budget: parts(leaves, document, cuts, lambda *given: attend(*given, budget=budget)), leaves, weight
        )
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize("before, queries", [(128, 128), (1, 127), (127, 129), (300, 5), (256, 300), (513, 40)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_block_mask_of_a_part_is_the_documents(before, queries, layout):
    positions, rows = before + queries, queries + -queries % 128
    columns = positions + -positions % 128
    document = documents(layout, positions)
    if document is not None and positions > 300:
        document = torch.where(document < 0, document, document // 40)  # long enough for full blocks
    full = torch.zeros(2, columns, dtype=torch.int64) if document is None else F.pad(document, (0, columns - positions))

    def seen(b, h, q, k):  # queries behind the last see the last key
        at = (q + before).clamp(max=columns - 1)
        return torch.where(q < queries, (k <= at) & (full[b, at] == full[b, k]), k == columns - 1)

    want = flex.create_block_mask(seen, 2, None, rows, columns, device="cpu")
    got = span_attention.block_mask(*causal_spans(document, positions, before), positions)
    assert got.seq_lengths == (rows, columns) and torch.equal(got.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    query, key = torch.arange(rows)[:, None], torch.arange(columns)
    for b in range(2):
        assert torch.equal(got.mask_mod(torch.tensor(b), 0, query, key)[:queries], seen(b, 0, query, key)[:queries])
    assert blocks(document, 2, positions, "cpu", before) is None


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("positions, cuts, layout, kv", [(130, [65], "packed", 2), (300, [7, 260], "one", 1), (256, [128], "padded", 4)])
def test_flex_attention_of_parts_is_that_of_the_row(monkeypatch, positions, cuts, layout, kv):
    """The GPU's path but for the compiled kernel, as in test_training_time_test.py."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    document = documents(layout, positions)
    leaves, weight = case(positions, kv, 3, torch.float32, dim=16)

    def path(query, keys, values, document):
        before = keys[0].shape[2] - query.shape[2]
        mask = span_attention.block_mask(*causal_spans(document, keys[0].shape[2], before), keys[0].shape[2])
        out, lse = span_attention.flex(query, keys[0], values[0], mask, 0.25, flex.flex_attention)
        return _merge(query, out, lse, keys[1:], values[1:], 0.25)

    want = with_grads(lambda leaves: attend(*halves(leaves), document), leaves, weight)
    assert_close(with_grads(lambda leaves: parts(leaves, document, cuts, path), leaves, weight), want, 1e-5)


def test_new_documents_in_a_part_do_not_compile_again():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend=counter)
    for seed in range(3):
        document = documents("packed", 400, seed=seed)
        spans = causal_spans(document, 400, 200)
        query, (key,), (value,) = halves([leaf.detach() for leaf in case(400, 2, 0, torch.float32, dim=16, seed=seed)[0]])
        got = span_attention.flex(query[:, :, 200:], key, value, span_attention.block_mask(*spans, 400), 0.25, compiled)
        assert_close(got, span_attention.Spans.apply(query[:, :, 200:], key, value, *spans, 0.25, span_attention.BUDGET), 1e-5)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_parts_equal_the_row_on_a_cpu(layout):
    torch.backends.cuda.matmul.allow_tf32 = False
    for positions, cuts in ((300, [150]), (512, [128, 384]), (77, [33])):
        document = documents(layout, positions)
        leaves, weight = case(positions, 2, 3, torch.float32, dim=64)
        moved = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
        on_gpu = None if document is None else document.cuda()
        got = with_grads(lambda leaves, cuts=cuts, on_gpu=on_gpu: parts(leaves, on_gpu, cuts), moved, weight.cuda())
        want = with_grads(lambda leaves, document=document: attend(*halves(leaves), document), leaves, weight)
        assert_close([tensor.cpu() for tensor in got], want, 1e-4)


# Training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the jobs of context_ranks.py left, once all have run."""
    output = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "context_ranks.py"), str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    """Rows of metrics.jsonl, without what depends on the machine."""
    ended = json.loads((folder / f"{name}.json").read_text())
    assert not any(ended["codes"]), ended["err"]
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    chosen = ("step", "loss", "sim_tau", "survival", "valid", "left_out")
    return [{key: value for key, value in row.items() if key.startswith(chosen)} for row in rows]


def apart(folder: Path, name: str, other: str) -> tuple[float, float]:
    """How far two jobs are apart: in weights, and in losses and metrics."""
    ours, theirs = (load_file(folder / one / "weights.safetensors") for one in (name, other))
    assert ours.keys() == theirs.keys()
    rows = list(zip(metrics(folder, name), metrics(folder, other), strict=True))
    assert all(one.keys() == two.keys() for one, two in rows) and rows[-1][0]["step"] == 4 and all(one["loss"] > 0.5 for one, _ in rows[:2])
    numbers = max(abs(one[key] - two[key]) for one, two in rows for key in one)
    return max(float((ours[key] - theirs[key]).abs().max()) for key in ours), numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, reference",
    [
        ("two", "one"),
        ("recomputed", "one"),
        ("sharded", "one"),
        ("half by two", "one"),
        ("half by one", "one"),
        ("four", "apart"),  # two groups of two ranks are two ranks with rows of their own
        ("narrow", "narrow, one"),  # fewer positions a rank than steps
        ("first", "first, one"),
        ("more", "more, one"),  # the regression and the prompts
    ],
)
def test_rows_that_are_shared_train_the_same(folder, name, reference):
    weights, numbers = apart(folder, name, reference)
    assert weights < 1e-5 and numbers < 1e-6


@pytest.mark.slow
def test_two_groups_train_what_one_rank_does(folder):
    ours, theirs = (load_file(folder / one / "weights.safetensors") for one in ("four", "one"))
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 1e-5
    losses = [[row["loss"] for row in metrics(folder, one) if "loss" in row] for one in ("four", "one")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and len(losses[0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, length, size",
    [("one", 32, 1), ("two", 32, 2), ("recomputed", 32, 2), ("sharded", 32, 2), ("four", 32, 2), ("narrow", 8, 4), ("first", 32, 2)],
)
def test_each_rank_holds_its_part_alone(folder, name, length, size):
    metrics(folder, name)
    for rank in range(JOBS[name][0]):
        seen = json.loads((folder / name / f"seen-{rank}.json").read_text())
        assert len(seen) >= 24 and {tuple(one) for one in seen} == {(length // size, length // size * (rank % size + 1))}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_seen(folder, name):
    weights, numbers = apart(folder, name, "one")
    assert max(weights, numbers) > 1e-3


@pytest.mark.slow
def test_two_ranks_hold_half_each(folder):
    for name in ("long", "long, one"):
        assert json.loads((folder / f"{name}.json").read_text())["codes"] == [0] * JOBS[name][0]
    alone = json.loads((folder / "long, one" / "peak-0.json").read_text())
    shared = [json.loads((folder / "long" / f"peak-{rank}.json").read_text()) for rank in (0, 1)]
    assert alone > LONG * 1000 and all(0.4 * alone < one < 0.6 * alone for one in shared)


# Refusals


@pytest.mark.slow
def test_ranks_that_are_no_multiple_are_refused(folder):
    ended = json.loads((folder / "odd.json").read_text())
    assert ended["codes"] == [2, 2, 2]
    for err in ended["err"]:
        assert "error: train.context_parallel=2 does not divide 3 process(es)" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "method, recipe, keys, match",
    [
        (eagle, "eagle3-tiny.yaml", ["data.seq_len=129"], "data.seq_len=129 cannot be shared out over train.context_parallel=2 ranks"),
        (eagle, "eagle1-tiny.yaml", ["data.seq_len=129"], "data.seq_len=129 cannot be shared out over train.context_parallel=2 ranks"),
        (eagle, "eagle3-tiny.yaml", [], r"train.context_parallel=2 does not divide 1 process\(es\)"),
        (medusa, "medusa-tiny.yaml", [], "train.context_parallel=2 is for EAGLE"),
        (distill, "distill-tiny.yaml", [], "train.context_parallel=2 is for EAGLE; a student's attention"),
    ],
)
def test_what_cannot_be_shared_is_refused(method, recipe, keys, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        method.main([str(ROOT / "recipes" / recipe), f"train.output={tmp_path}", "train.context_parallel=2", *keys])
    assert not list(tmp_path.iterdir())


def test_one_rank_is_alone():
    assert processes.context_group(1) is SINGLE_RANK and processes.data_parallel(1) == (1, 0)
    rows = torch.randn(2, 4, 6, 3)
    assert SINGLE_RANK.upto(rows) is rows
    assert SINGLE_RANK.part(7) == SINGLE_RANK.part(7, 3) == slice(0, 7)
    slices = [(one.part(12), one.part(12, 5)) for one in (ContextParallel(rank, 3) for rank in range(3))]
    assert slices == [(slice(0, 4), slice(0, 9)), (slice(4, 8), slice(4, 12)), (slice(8, 12), slice(8, 12))]
    with pytest.raises(ValueError, match="rows of 7 positions for 2 ranks"):
        ContextParallel(0, 2).part(7)
