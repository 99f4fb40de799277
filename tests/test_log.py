"""Rows of metrics.jsonl are exact under a clock moved by hand; FLOPs are those counted by hand; faults leave the rows."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from logged import accelerator_of, loss_of, recipe_of, rows_of
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import VOCAB, tiny

from draftsmith.inference import machine
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train import medusa
from draftsmith.train.engine import log
from draftsmith.train.engine.log import Flops, Log
from draftsmith.train.engine.trackers import LastRows
from draftsmith.train.medusa import MedusaSection
from draftsmith.train.objective import Progress


class Clock:
    """A perf_counter that advances only by hand."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    manual = Clock()
    monkeypatch.setattr(log, "time", manual)
    return manual


@pytest.fixture(autouse=True)
def _matmul_rate(monkeypatch):
    monkeypatch.setattr(machine, "matmul_rate", lambda device, dtype: 1000.0)


def test_a_row_is_what_a_hand_computes(tmp_path, clock, monkeypatch, capsys):
    monkeypatch.setattr(log.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2_500_000))
    monkeypatch.setattr(sys, "platform", "linux")
    took = iter([9.0, 1.0, 3.0, 2.0])

    def target_forward(batch):
        assert batch == "batch" and not torch.is_grad_enabled()
        clock.now += next(took)

    recipe = recipe_of(tmp_path)
    report = Log(recipe, accelerator_of(recipe, accumulation=2), 0, 0, target_forward)
    left, right = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    for number in range(4):  # two steps of two micro-batches
        with report.measuring("batch", Progress()):
            (left @ right).sum().backward()  # 2 · (2·3·4) FLOPs forward, as many for the gradient of the right one
            clock.now += 0.5
        report.add(loss_of(6, 4, hits=1) if number % 2 else loss_of(1, 12, hits=7))
    with report.paused():
        clock.now += 1000
    text = report.write_training(2, 0.25, left_out=0)
    assert rows_of(tmp_path) == [
        {
            "step": 2,
            "lr": 0.25,
            "tokens_per_s": 16.0,  # 32 in 2 s
            "seconds": 1.0,
            "mfu": 0.192,  # 2 · 96 FLOPs in 1 s, of 1000
            "target_ratio": 0.25,  # 1 s, 2 · median(1, 3, 2) s
            "peak_gb": 2.56,
            "loss": 14 / 32,  # not (6/4 + 1/12) / 2
            "hits": 16 / 32,
            "left_out": 0,
        }
    ]
    assert text == "loss 0.438  hits 0.500  16 tok/s"
    assert "a step is 1.92e-10 TFLOP a rank, and this device does 1e-09 TFLOP/s (measured); the target's forward alone takes 4 s of it" in (
        capsys.readouterr().out
    )
    report.write_evaluation(2, {"loss": 0.5})
    clock.now += 3
    report.add(loss_of(2, 2, hits=1))
    assert report.write_training(5, 0.25) == "loss 1.000  hits 0.500  1 tok/s  held out: loss 0.500"
    assert rows_of(tmp_path)[1] == {"step": 2, "valid_loss": 0.5}
    assert {"seconds": 1.0, "tokens_per_s": 0.7, "mfu": 0.192, "loss": 1.0}.items() <= rows_of(tmp_path)[2].items()


def test_without_a_target_forward_there_is_no_ratio_and_without_weight_no_division_by_zero(tmp_path, clock):
    recipe = recipe_of(tmp_path)
    report = Log(recipe, accelerator_of(recipe), 0, 0)
    report.add(loss_of(0, 0))
    clock.now += 1
    report.write_training(1, 0.1)
    assert (
        rows_of(tmp_path)[0].keys() == {"step", "lr", "tokens_per_s", "seconds", "peak_gb", "loss"} and rows_of(tmp_path)[0]["loss"] == 0.0
    )


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_flops_are_counted_in_each_stage_of_an_objective(tmp_path, clock):
    recipe, progress, timed = recipe_of(tmp_path), Progress(), []
    report, weight = Log(recipe, accelerator_of(recipe), 0, 0, timed.append), torch.ones(3, 4)
    for number, (stage, rows) in enumerate(((1, 2), (1, 5), (2, 5), (2, 5), (2, 7)), 1):
        with report.measuring({}, progress):
            progress.stage = stage  # as an objective does, in its forward
            _ = torch.ones(rows, 3) @ weight  # 24 FLOPs a row in 1 s, of 1000
        clock.now += 1
        report.add(loss_of(1, 2, hits=1))
        report.write_training(number, 0.1)
        if number == 1:
            times = len(timed)
    assert [row["mfu"] for row in rows_of(tmp_path)] == [0.048, 0.048, 0.048, 0.12, 0.12]
    assert times == len(timed) > 0, "the target is timed once"


def test_adding_waits_for_no_device(tmp_path):
    recipe = recipe_of(tmp_path)
    report = Log(recipe, accelerator_of(recipe), 0, 0)
    with Waits() as waits:
        with report.measuring({}, Progress()):
            report.add(loss_of(1, 2, hits=1))
        assert waits.count == 0
        assert report.sums["loss"][0].item() == 1 and waits.count == 1
    report.write_training(1, 0.1)
    assert rows_of(tmp_path)[0]["loss"] == 0.5


@pytest.mark.parametrize("tail", ['{"step": 4', '{"step": 4}'])
def test_rows_after_the_checkpoint_and_a_row_cut_off_are_dropped(tmp_path, tail):
    lines = [f'{{"step": {step}, "loss": {step}}}\n' for step in (10, 20, 20, 30)] + [tail]
    file, recipe = tmp_path / "metrics.jsonl", recipe_of(tmp_path)
    for done, remaining in ((30, 4), (25, 3), (20, 3), (19, 1), (0, 0)):
        file.write_text("".join(lines))
        report = Log(recipe, accelerator_of(recipe), done, done)
        assert file.read_text() == "".join(lines[:remaining])
        report.add(loss_of(1, 1))
        report.write_training(done + 1, 0.1)
        assert [row["step"] for row in rows_of(tmp_path)][remaining:] == [done + 1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_leaves_the_rows(tmp_path, monkeypatch):
    file, recipe = tmp_path / "metrics.jsonl", recipe_of(tmp_path)
    file.write_text('{"step": 1}\n{"step": 2}\n')
    write_bytes = Path.write_bytes

    def full(path, content):
        write_bytes(path, content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        Log(recipe, accelerator_of(recipe), 1, 1)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n' and len(list(tmp_path.iterdir())) == 1


def packed(rows=2, length=21):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.6) & (torch.arange(length) > 0)
    positions = torch.arange(length).expand(rows, length)
    return {"input_ids": ids, "loss_mask": mask, "position_ids": positions, "document": torch.zeros_like(ids)}


def test_flops_of_a_training_step_are_those_counted_by_hand():
    heads, data, target = 3, packed(), Target.wrap(tiny("llama"))
    drafter, section = new_drafter("medusa", target, num_heads=heads), MedusaSection(heads=heads)
    with Flops() as flops:
        medusa.objective(drafter, data, target=target, section=section).sum.backward()
    tokens, hidden, layers, query_heads, key_heads, dim, inner, length = 42, 32, 2, 4, 2, 8, 48, 21
    linear = 2 * tokens * (2 * hidden * query_heads * dim + 2 * hidden * key_heads * dim + 3 * hidden * inner)
    attention = 2 * (2 * 2 * query_heads * length * length * dim)  # two rows; scores, and values weighted by them
    forward = layers * (linear + attention)
    # The target's features need no gradient: of a head's block there is forward and the weight's gradient, of its output layer also the input's.
    blocks = heads * 2 * (2 * tokens * hidden * hidden)
    counted = sum(int(data["loss_mask"][:, k + 2 :].sum()) for k in range(heads))
    outputs = 3 * (2 * counted * hidden * VOCAB)
    assert flops.count == forward + blocks + outputs and min(forward, blocks, outputs) > 0


def test_counting_changes_no_bit_and_leaves_compiled_code_compiled():
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(5, 8)
    step = torch.compile(lambda: layers(x).square().sum(), backend="aot_eager")
    hand = 2 * 5 * (2 * 8 * 16 + 3 * 16 * 4)

    def gradients(work, mode):
        layers.zero_grad()
        with mode:
            work().backward()
        return torch.cat([parameter.grad.flatten() for parameter in layers.parameters()])

    counters.clear()
    compiled, eager = Flops(), Flops()
    gradient = [gradients(step, compiled), gradients(step, torch.enable_grad()), gradients(lambda: layers(x).square().sum(), eager)]
    assert compiled.count == eager.count == hand
    assert counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(gradient[0], again) for again in gradient[1:])


def test_flops_of_matmuls_in_place_and_of_attention():
    with Flops() as flops:
        torch.zeros(3, 5).addmm_(torch.ones(3, 2), torch.ones(2, 5))
    assert flops.count == 2 * 3 * 2 * 5
    query, key, value = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    matmul = 2 * (2 * 4 * 6 * 6 * 8)
    with Flops() as flops:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert flops.count == 2 * matmul  # in full, though half would do
    with Flops() as flops:
        out.sum().backward()
    assert flops.count == 5 * matmul  # the scores once more, and the gradients of them, the queries, the keys and the values


def test_the_matmul_rate_is_the_best_of_several(monkeypatch):
    monkeypatch.undo()
    spent = iter([5.0, 0.04, 0.01, 0.06])
    now = [0.0]

    def matmul(left, right):
        now[0] += next(spent)
        assert (left.shape, right.shape, left.dtype) == ((256, 1024), (1024, 1024), torch.bfloat16)

    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch, "matmul", matmul)
    # 5 s to warm up are past the budget already: two more all the same.
    assert machine.matmul_rate(torch.device("cpu"), torch.bfloat16) == pytest.approx(2 * 256 * 1024**2 / 0.01)


def test_what_a_power_cut_left_of_rows_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    row = b'{"step": %d, "loss": 1.0}\n'
    file.write_bytes(row % 1 + b"\0" * 40 + b"\n" + b'{"step": "\xff\n' + row % 2 + b"[1]\n" + row % 3 + b'{"step": 4')
    assert log._cut(file, LastRows(2, 2)) == LastRows(3, 0)
    assert file.read_bytes() == row % 1 + row % 2
    evaluation = b'{"step": %d, "valid_loss": 1.0}\n'
    file.write_bytes(row % 2 + evaluation % 2 + row % 4 + evaluation % 4 + row % 5)
    assert log._cut(file, LastRows(4, 2)) == LastRows(5, 4)  # the evaluation of step 4 is made again
    assert file.read_bytes() == row % 2 + evaluation % 2 + row % 4


def test_a_full_disk_under_the_metrics_names_the_file(tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    report = SimpleNamespace(file=tmp_path / "metrics.jsonl", main=True)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="metrics.jsonl could not be written .*No space left.*free disk space there"):
        log.Log._write(report, {"step": 1})
