"""What a run does when something goes wrong: numbers that are not finite, no progress, ranks that disagree, a damaged checkpoint."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_cases import Numbers, crashing, new_model, new_recipe, objective, run

from draftsmith.train import loop
from draftsmith.train.distill import DistillRecipe
from draftsmith.train.eagle import EagleRecipe
from draftsmith.train.engine import checkpoint, order, watchdog
from draftsmith.train.engine.best import BestWeights
from draftsmith.train.engine.watchdog import NonFiniteCounter, Watchdog
from draftsmith.train.recipe import changeable_keys

ROOT = Path(__file__).resolve().parents[1]


def poisoned(*steps):
    """The objective, not finite in these steps (from 1, one micro-batch each)."""
    calls = 0

    def wrong(model, batch):
        nonlocal calls
        loss = objective(model, batch)
        calls += model.training
        if model.training and calls in steps:
            loss.sum = loss.sum * float("nan")
        return loss

    return wrong


def test_a_step_that_is_not_finite_is_left_out_and_counted(tmp_path):
    model = new_model()
    recipe = new_recipe(tmp_path, schedule="constant", warmup_steps=0)
    loop.fit(recipe, model, poisoned(3, 5), Numbers(), Numbers(), {})
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(weights, by_hand_without(3, 5), rtol=0, atol=1e-12)
    assert not torch.allclose(weights, by_hand_without(3), atol=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["left_out"] for row in rows if "lr" in row] == [0, 0, 1, 1, 2, 2, 2]
    assert [row["step"] for row in rows if "lr" in row and "loss" not in row] == [3, 5], "JSON has no NaN"
    state = checkpoint.newest(tmp_path / "checkpoints")[1]
    assert state["left_out"] == 2


def by_hand_without(*left_out):
    """Seven steps of AdamW, some left out, written out with nothing but torch."""
    model, data = new_model(), Numbers()
    section = new_recipe("x").train
    optimizer = torch.optim.AdamW(model.parameters(), lr=section.lr, weight_decay=0.0, betas=section.betas)
    for step in range(7):
        loss = objective(model, data.batch(order.sample_rows(len(data), 0, step * 8, 8)))
        (loss.sum / loss.weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step + 1 not in left_out:
            optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_run_that_stays_not_finite_stops_and_saves_its_batch(tmp_path):
    with pytest.raises(
        FloatingPointError, match="not finite in 3 steps in a row, the last of them step 5; its batch is kept in .*step-00000005-rank0"
    ):
        run(tmp_path, poisoned(3, 4, 5), max_nonfinite_steps=3, save_every=1)
    batch = load_file(tmp_path / "not-finite-step-00000005-rank0.safetensors")
    rows = order.sample_rows(22, 0, 4 * 8, 8)
    assert torch.equal(batch["0.x"], Numbers().batch(rows)["x"])
    assert checkpoint.newest(tmp_path / "checkpoints")[0].name == "step-00000004"


def test_only_steps_left_out_in_a_row_stop_a_run(tmp_path):
    counter = NonFiniteCounter(tmp_path, 2, 0, 0)
    for step, applied in enumerate([False, True, False, True], 1):
        counter.after(step, applied, [])
    assert counter.left_out == 2 and not list(tmp_path.iterdir())


def test_a_run_without_progress_ends_and_says_where(tmp_path):
    program = """
import time
from draftsmith.train.engine.watchdog import Watchdog
with Watchdog(0.02, "the same command goes on") as watchdog:
    watchdog.report("waiting for the data of step 3")
    for _ in range(3):
        time.sleep(0.5)
        watchdog.report("waiting for the data of step 4")
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == watchdog.EXIT_NO_PROGRESS == 75
    assert "rank 0 made no progress for 0.02 minutes while waiting for the data of step 4; the same command goes on" in done.stderr
    assert "time.sleep" in done.stderr or "line 9" in done.stderr


def test_decoding_for_tau_reports_each_round_and_others_wait_for_it(tmp_path, monkeypatch):
    """τ of the main process may take longer than watchdog_minutes; what its ranks wait for is its own watchdog's."""
    seen, reports = [], []
    monkeypatch.setattr(Watchdog, "report", lambda watchdog, activity: reports.append(activity))
    monkeypatch.setattr(Watchdog, "wait", lambda watchdog, activity: seen.append(activity))

    def tau(report):
        before = len(reports)
        report()
        assert reports[before:] == ["evaluating step 7"]
        return 1.5

    loop.fit(new_recipe(tmp_path), new_model(), objective, Numbers(), Numbers(), {}, measure_tau=tau)
    assert seen == []
    monkeypatch.setattr(BestWeights, "waits", True)
    loop.fit(new_recipe(tmp_path / "b"), new_model(), objective, Numbers(), Numbers(), {}, measure_tau=tau)
    assert seen == ["waiting for the main process to measure τ"] and reports[-2:] == ["evaluating step 7", "saving step 7"]


def test_a_process_that_waits_for_another_is_not_ended():
    program = """
import time
from draftsmith.train.engine.watchdog import Watchdog
with Watchdog(0.005, "") as watchdog:
    watchdog.wait("waiting for the main process")
    time.sleep(1)
    watchdog.report("going on")
print("here")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr


def test_a_watchdog_ends_with_its_run():
    before = threading.active_count()
    with Watchdog(10, ""):
        assert threading.active_count() == before + 1
    for _ in range(100):
        if threading.active_count() == before:
            return
        threading.Event().wait(0.05)
    raise AssertionError("its thread is still alive")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("fault", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, file, fault, capsys):
    expected = run(tmp_path / "uninterrupted")
    with pytest.raises(RuntimeError):
        run(tmp_path / "cut", crashing(5), save_every=2)
    newest = tmp_path / "cut" / "checkpoints" / "step-00000004" / file
    content = newest.read_bytes()
    newest.unlink()
    if fault == "cut":
        newest.write_bytes(content[: len(content) // 2])
    if fault == "flipped":
        newest.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    assert torch.equal(run(tmp_path / "cut", save_every=2), expected)
    output = capsys.readouterr().out
    assert all(text in output for text in ("step-00000004 cannot be read", "going on from", "step-00000002, the one before"))


def test_deleted_checkpoints_are_noticed(tmp_path):
    run(tmp_path)
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    with pytest.raises(
        ValueError, match="latest speaks of a checkpoint, and there is none; delete .*checkpoints to start again, or restore it"
    ):
        run(tmp_path)


def test_as_many_checkpoints_are_kept_as_the_recipe_says(tmp_path):
    run(tmp_path, save_every=1, keep=3)
    assert [folder.name[-1] for folder in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["5", "6", "7"]


def test_a_folder_with_checkpoints_can_be_refused(tmp_path):
    run(tmp_path, resume="never")
    with pytest.raises(ValueError, match="holds checkpoints and train.resume=never; give another train.output"):
        run(tmp_path, resume="never")


def test_best_weights_belong_to_the_checkpoint_that_refers_to_them(tmp_path):
    """A run that falls back to an older checkpoint has that one's best weights."""
    taus = iter([1.1, 1.5, 1.2, 1.9, 1.3, 1.3, 1.3])
    recipe = new_recipe(tmp_path, eval_every=1, save_every=1, keep=3)
    loop.fit(recipe, new_model(), objective, Numbers(), Numbers(), {}, measure_tau=lambda _: next(taus))
    folder = tmp_path / "checkpoints"
    assert {int(file.stem[5:]) for file in folder.glob("best-*")} == {4}
    taus = iter([1.1, 1.5, 1.2, 1.9])
    recipe = new_recipe(tmp_path / "b", eval_every=1, save_every=1, keep=3, steps=4, schedule="constant")
    loop.fit(recipe, new_model(), objective, Numbers(), Numbers(), {}, measure_tau=lambda _: next(taus))
    folder = tmp_path / "b" / "checkpoints"
    assert {int(file.stem[5:]) for file in folder.glob("best-*")} == {2, 4}
    second = load_file(folder / "best-00000002.safetensors")
    (folder / "step-00000004" / "model.safetensors").write_bytes(b"")
    model, taus = new_model(), iter([1.2])
    _, step = loop.fit(recipe, model, objective, Numbers(), Numbers(), {}, measure_tau=lambda _: next(taus))
    assert step == 2 and all(torch.equal(parameter, second[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("spoil", [lambda content: content[:-100], lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]])
def test_best_weights_that_are_damaged_are_said_before_the_first_step(tmp_path, spoil):
    recipe = new_recipe(tmp_path, eval_every=1, save_every=1, steps=2, schedule="constant")
    loop.fit(recipe, new_model(), objective, Numbers(), Numbers(), {}, measure_tau=lambda _: 1.5)
    file = checkpoint.best_file(tmp_path / "checkpoints", 1)
    file.write_bytes(spoil(file.read_bytes()))
    recipe = new_recipe(tmp_path, eval_every=1, save_every=1, steps=3, schedule="constant")
    with pytest.raises(ValueError, match="best-00000001.safetensors is damaged: it is not what was saved with τ 1.500; restore it"):
        loop.fit(recipe, new_model(), crashing(1), Numbers(), Numbers(), {}, measure_tau=lambda _: 1.4)


def test_an_exhausted_gpu_names_keys_that_help(tmp_path):
    def full(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")

    keys = "train.micro_batch_size=4 .now 8. .*data.seq_len.*eagle.checkpointing=true.*Tried to allocate 2.00 GiB"
    recipe = EagleRecipe(train=new_recipe(tmp_path).train)
    with pytest.raises(MemoryError, match=keys) as caught:
        loop.fit(recipe, new_model(), full, Numbers(), Numbers(), {})
    assert "\n" not in str(caught.value)


def test_a_lost_rank_is_reported(tmp_path):
    def lost(model, batch):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")

    with pytest.raises(
        ConnectionError, match="another process of this run is gone .*the same command goes on from the newest checkpoint in"
    ):
        run(tmp_path, lost)


def test_the_loop_names_no_key_of_a_method():
    """Methods mark their own keys as `Changeable`; the loop and its engine read the mark. (replay.py belongs to distillation.)"""
    files = [ROOT / "train" / "loop.py", *(file for file in (ROOT / "train" / "engine").glob("*.py") if file.name != "replay.py")]
    assert len(files) > 10
    assert not [file.name for file in files if re.search(r"\b(medusa|eagle|student|distill)\.[a-z]", file.read_text(encoding="utf-8"))]
    assert "eagle.checkpointing" in changeable_keys(EagleRecipe) and "eagle.steps" not in changeable_keys(EagleRecipe)
    assert "student.checkpointing" in changeable_keys(DistillRecipe) and "train.lr" not in changeable_keys(DistillRecipe)
