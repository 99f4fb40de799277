"""The training loop: accumulation is exact, order is a function of (seed, epoch), and a run resumes to the last bit."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training_cases import STEPS, Numbers, crashing, new_model, new_recipe, objective, run

from draftsmith.train import loop
from draftsmith.train.engine import checkpoint, order, resume, watchdog

ROOT = Path(__file__).resolve().parents[1]


def by_hand(steps=STEPS, batch=8):
    """The same training, written out with nothing but torch."""
    model, data = new_model(), Numbers()
    section = new_recipe("x").train
    decayed = [p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": list(group)} for group in decayed], weight_decay=0.0, betas=section.betas)
    for step in range(steps):
        rows = order.sample_rows(len(data), 0, step * batch, batch)
        loss = objective(model, data.batch(rows))
        (loss.sum / loss.weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = loop.learning_rate(section, step)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_accumulation_equals_one_big_batch_and_the_loop_by_hand(tmp_path):
    expected = by_hand()
    assert not torch.allclose(expected, by_hand(steps=STEPS - 1), atol=1e-6)
    for micro in (8, 4, 2, 1):
        torch.testing.assert_close(run(tmp_path / str(micro), micro_batch_size=micro), expected, rtol=0, atol=1e-12)


def test_a_batch_that_cannot_be_cut_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train.batch_size=8 cannot be cut into 1 rank"):
        run(tmp_path, micro_batch_size=3)


@pytest.mark.parametrize("stop, optimizer", [*((stop, "adamw") for stop in range(STEPS)), (0, "muon"), (3, "muon"), (STEPS - 1, "muon")])
def test_stopped_at_any_step_it_resumes_to_the_last_bit(tmp_path, stop, optimizer):
    expected = run(tmp_path / "uninterrupted", optimizer=optimizer)
    calls = 0

    def interrupted(model, batch):
        nonlocal calls
        calls += model.training
        if model.training and calls == stop + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return objective(model, batch)

    with pytest.raises(SystemExit) as exit:
        run(tmp_path / "cut", interrupted, optimizer=optimizer)
        raise AssertionError("the signal was not heeded")
    assert exit.value.code == 128 + signal.SIGTERM
    assert torch.equal(run(tmp_path / "cut", optimizer=optimizer), expected)
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and set(steps) == set(range(1, STEPS + 1))


def test_a_crash_between_checkpoints_resumes_to_the_last_bit(tmp_path):
    expected = run(tmp_path / "uninterrupted", save_every=2)

    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "cut", crashing(6), save_every=2)
    assert checkpoint.latest(tmp_path / "cut" / "checkpoints").name == "step-00000004"
    assert torch.equal(run(tmp_path / "cut", save_every=2), expected)


@pytest.mark.parametrize(
    "settings", [{}, {"save_every": 2, "eval_every": 2}, {"eval_every": 2}], ids=["at the end", "on the way", "without save_every"]
)
def test_an_evaluation_that_fails_loses_no_step(tmp_path, settings):
    measured = []

    def fit(folder, failing_at):
        def measure_tau(_):
            measured.append(folder.name)
            if len(measured) == failing_at:
                raise MemoryError("no room to decode")
            return float(len(measured))

        model = new_model()
        _, step = loop.fit(
            new_recipe(folder, **settings), model, objective, Numbers(), Numbers(), {"data": "numbers"}, measure_tau=measure_tau
        )
        return step, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    expected = fit(tmp_path / "uninterrupted", 0)
    evaluations = len(measured)
    del measured[:]
    with pytest.raises(MemoryError):
        fit(tmp_path / "cut", failing_at := max(1, evaluations - 2))
    assert checkpoint.latest(tmp_path / "cut" / "checkpoints").name == f"step-{STEPS if not settings else 2 * failing_at:08d}"
    step, weights = fit(tmp_path / "cut", 0)
    assert step == expected[0] and torch.equal(weights, expected[1]) and len(measured) == evaluations + 1
    assert fit(tmp_path / "cut", 0)[0] == step and len(measured) == evaluations + 1  # a finished run is not evaluated again
    rows = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "valid_tau" in row] == ([2, 4, 6, 7] if settings else [7])


def test_a_state_is_replaced_without_its_tensors(tmp_path, monkeypatch):
    run(tmp_path, save_every=3)
    folder = tmp_path / "checkpoints"
    newest, state = checkpoint.newest(folder)
    before = {file: file.stat().st_ino for file in newest.glob("*.safetensors")}
    state = {key: value for key, value in state.items() if key not in ("step", "sha256")}
    checkpoint.save_state(folder, STEPS, state | {"evaluated": 5}, keep=1)
    assert checkpoint.newest(folder)[0] == newest and checkpoint.newest(folder)[1]["evaluated"] == 5
    assert {file: file.stat().st_ino for file in newest.glob("*.safetensors")} == before and len(before) == 2
    assert [path.name for path in folder.glob("step-*")] == [newest.name]  # keep=1
    monkeypatch.setattr(checkpoint.durable, "write_text", crashing_write)
    with pytest.raises(OSError, match=r"step-00000007 could not be written .*no space"):
        checkpoint.save_state(folder, STEPS, state | {"evaluated": 6})
    assert checkpoint.newest(folder)[1]["evaluated"] == 5


def crashing_write(*_):
    raise OSError("no space")


def test_held_out_sequences_are_drawn_once(tmp_path):
    """As they are packed the longest come first."""

    class Watched(Numbers):
        asked: list[int] = []

        def batch(self, rows):
            self.asked.extend(rows.tolist())
            return super().batch(rows)

    valid = Watched()
    loop.fit(new_recipe(tmp_path, eval_batches=1, eval_every=4), new_model(), objective, Numbers(), valid, {"data": "numbers"})
    assert valid.asked[:8] == valid.asked[8:] == order.drawn_rows(22)[:8].tolist() != list(range(8))
    assert sorted(order.drawn_rows(22).tolist()) == list(range(22))


def test_a_finished_run_goes_on_with_more_steps(tmp_path):
    run(tmp_path, schedule="constant", steps=3)
    longer = run(tmp_path, schedule="constant", steps=6)
    assert torch.equal(longer, run(tmp_path / "at-once", schedule="constant", steps=6))
    with pytest.raises(ValueError, match="is at step 6, past train.steps=4"):
        run(tmp_path, schedule="constant", steps=4)


def test_another_recipe_does_not_continue_this_run(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="was made with train.lr=0.05, this run has 0.1; give another train.output"):
        run(tmp_path, lr=0.1)
    with pytest.raises(ValueError, match="was made with data=numbers, this run has letters"):
        loop.fit(new_recipe(tmp_path), new_model(), objective, Numbers(), Numbers(), {"data": "letters"})


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "FORMAT", 1)
    run(tmp_path)
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"is of another version of draftsmith \(format 1, this version reads 2\); give another train.output"
    ):
        run(tmp_path)


def test_keys_that_change_no_step_may_change(tmp_path):
    run(tmp_path, steps=3, schedule="constant")
    changed = {"micro_batch_size": 2, "eval_every": 2, "save_every": 3, "keep": 1, "max_nonfinite_steps": 1, "watchdog_minutes": 9.0}
    torch.testing.assert_close(run(tmp_path, schedule="constant", **changed), run(tmp_path / "at-once", schedule="constant"))


def test_what_was_measured_once_stays_decided(tmp_path):
    before = torch.get_num_threads()
    run(tmp_path, steps=2, schedule="constant")
    torch.set_num_threads(before + 1)
    try:
        run(tmp_path, steps=3, schedule="constant")
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_no_more_threads_than_a_process_has_cores(tmp_path, monkeypatch, capsys):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    try:
        run(tmp_path, steps=2, schedule="constant")
        monkeypatch.setattr(resume.machine, "cores", lambda: 2 * before + 5)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        run(tmp_path, steps=3, schedule="constant")
        assert torch.get_num_threads() == before + 2
        assert f"{before + 2} threads instead of the checkpoint's {before + 3}" in "".join(capsys.readouterr())
    finally:
        torch.set_num_threads(before)


def test_an_evaluation_that_ended_is_not_made_again(tmp_path):
    """After a power cut too, before the next checkpoint."""
    measured = []

    def fit(objective):
        settings = new_recipe(tmp_path, eval_every=2)
        measure = lambda _: measured.append(1) or float(len(measured))  # noqa: E731
        return loop.fit(settings, new_model(), objective, Numbers(), Numbers(), {"data": "numbers"}, measure_tau=measure)

    with pytest.raises(RuntimeError, match="power cut"):
        fit(crashing(6))
    assert len(measured) == 2
    fit(objective)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "valid_tau" in row] == [2, 4, 6, 7] and len(measured) == 4


def test_signal_handlers_are_restored_and_a_second_signal_acts(tmp_path):
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    before = signal.getsignal(signal.SIGTERM)
    run(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyboardInterrupt), watchdog.Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.caught == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, inherited)


def test_a_damaged_checkpoint_is_named_and_nothing_is_lost(tmp_path):
    run(tmp_path)
    newest = checkpoint.latest(tmp_path / "checkpoints")
    weights = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="step-00000007 cannot be read .*; delete .*checkpoints to start again, or restore it"):
        run(tmp_path)
    (newest / "model.safetensors").write_bytes(weights)
    run(tmp_path)


def test_a_damaged_checkpoint_past_a_new_one_gives_way(tmp_path):
    """Step 4 is damaged and step 3 is saved after it: then step 3 alone stays."""
    for step in (2, 4, 3):
        if step == 3:
            (tmp_path / "step-00000004" / "model.safetensors").write_bytes(b"damaged")
        checkpoint.save(tmp_path, step, {"w": torch.full((2,), float(step))}, {}, {}, keep=1 if step == 3 else 2)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]
    assert checkpoint.latest(tmp_path).name == (tmp_path / "latest").read_text() == "step-00000003"


@pytest.mark.parametrize("failing", ["save_file", "sync", "write_text"])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, failing):
    run(tmp_path, steps=2, schedule="constant")
    before = load_file(tmp_path / "checkpoints" / "step-00000002" / "model.safetensors")

    write_text = Path.write_text

    def full(*arguments, **_options):
        if failing == "write_text" and arguments[0].name != "state.json":
            return write_text(*arguments)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path if failing == "write_text" else checkpoint, failing, full)
        with pytest.raises(OSError, match="could not be written .*No space left.*step-00000002, is complete; free disk space"):
            run(tmp_path, steps=3, schedule="constant")
    assert checkpoint.latest(tmp_path / "checkpoints").name == "step-00000002"
    assert not list((tmp_path / "checkpoints").glob(".*"))
    again = load_file(tmp_path / "checkpoints" / "step-00000002" / "model.safetensors")
    assert all(torch.equal(before[name], again[name]) for name in before)
    run(tmp_path, steps=3, schedule="constant")


def test_a_full_disk_is_noticed_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with pytest.raises(OSError, match="0.00 GB free, the checkpoints of this run need"):
        run(tmp_path)
    assert not (tmp_path / "recipe.yaml").exists()


def test_order_covers_every_row_once_an_epoch_and_does_not_depend_on_the_cut():
    rows = order.sample_rows(11, 5, 0, 33)
    for epoch in range(3):
        assert sorted(rows[epoch * 11 : epoch * 11 + 11].tolist()) == list(range(epoch * 11, epoch * 11 + 11))
    assert rows[:11].tolist() != (rows[11:22] - 11).tolist()
    assert torch.equal(torch.cat([order.sample_rows(11, 5, first, 3) for first in range(0, 33, 3)]), rows)
    assert not torch.equal(order.sample_rows(11, 6, 0, 33), rows)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("cosine", [0.5, 1, 1, 0.868, 0.55, 0.232]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("wsd", [0.5, 1, 1, 1, 1, 1]),
    ],
)
def test_schedules(schedule, expected):
    section = new_recipe("x", steps=6, lr=1.0, schedule=schedule, min_lr=0.1 if schedule == "cosine" else 0.0).train
    assert [round(loop.learning_rate(section, step), 3) for step in range(6)] == expected
    long = new_recipe("x", steps=102, lr=1.0, schedule="wsd").train
    assert [round(loop.learning_rate(long, step), 2) for step in (76, 77, 89, 101)] == [1.0, 1.0, 0.52, 0.04]
