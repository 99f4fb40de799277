"""What a training run survives: folders that a fault left in disorder. (`make test-faults` makes the faults.)"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from training_cases import Numbers, crashing, new_model, new_recipe, objective, run

from draftsmith.train import loop
from draftsmith.train.engine import checkpoint
from draftsmith.train.engine.watchdog import NonFiniteCounter


def crashed(folder: Path, at: int, **train) -> Path:
    """A run that saves after every second step and crashes -> its checkpoints."""
    with pytest.raises(RuntimeError, match="power cut"):
        run(folder, crashing(at), save_every=2, **train)
    return folder / "checkpoints"


@pytest.mark.parametrize("fault", [b"", b"{}", None])
def test_a_newer_checkpoint_that_is_damaged_does_not_outlive_the_next_save(tmp_path, fault):
    """The run continues from step 4, past a damaged step 6, and saves step 5 with keep=1: step 5 stays."""
    expected = run(tmp_path / "uninterrupted")
    folder = crashed(tmp_path / "cut", 7, keep=2)
    state = folder / "step-00000006" / "state.json"
    state.unlink()
    if fault is not None:
        state.write_bytes(fault)
    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "cut", crashing(2), save_every=1, keep=1)
    assert [path.name for path in folder.glob("step-*")] == ["step-00000005"]
    assert torch.equal(run(tmp_path / "cut", save_every=1, keep=1), expected)


def test_an_older_checkpoint_that_is_damaged_stops_no_save(tmp_path):
    folder = crashed(tmp_path, 5)
    (folder / "step-00000002" / "state.json").write_bytes(b"\0" * 40)
    run(tmp_path, save_every=2, keep=4)
    assert checkpoint.newest(folder)[1]["step"] == 7


def test_what_a_kill_left_is_deleted_when_the_run_continues(tmp_path):
    folder = crashed(tmp_path, 5)
    (folder / ".step-00000005.part").mkdir()
    (folder / ".step-00000005.part" / "model.safetensors").write_bytes(b"half")
    (folder / ".tmpAbCdEf").write_bytes(b"half")
    (folder / ".latest.4711.part").write_bytes(b"step")
    foreign = {folder / ".gitignore", folder / "step-00000002 as it was"}
    for path in foreign:
        path.mkdir()
    run(tmp_path, save_every=2)
    assert set(folder.glob(".*")) | set(folder.glob("step-* *")) == foreign, "what is not ours stays"


def test_any_changed_bit_of_a_checkpoint_is_noticed(tmp_path):
    """Each byte of state.json; of the tensor files the first bytes, which say what is in them, and the last one."""
    folder = crashed(tmp_path, 5)
    newest = folder / "step-00000004"
    changed = 0
    for name in ("state.json", *checkpoint.FILES):
        content = (newest / name).read_bytes()
        for index in range(len(content)) if name == "state.json" else (0, 8, 9, len(content) - 1):
            bit = 1 << index % 8
            (newest / name).write_bytes(content[:index] + bytes([content[index] ^ bit]) + content[index + 1 :])
            assert checkpoint.newest(folder)[1]["step"] == 2, (name, index)
            changed += 1
        (newest / name).write_bytes(content)
    assert changed > 400 and checkpoint.newest(folder)[1]["step"] == 4


def test_best_weights_that_could_not_be_written_are_reported(tmp_path, monkeypatch):
    plain = checkpoint.save_file

    def full(tensors, path, *metadata):
        if "best" in path.name:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        plain(tensors, path, *metadata)

    run(tmp_path, steps=2, schedule="constant")
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        OSError, match="best-00000003.safetensors could not be written .*No space left.*step-00000003, is complete; free disk space there"
    ):
        recipe = new_recipe(tmp_path, steps=3, schedule="constant")
        loop.fit(recipe, new_model(), objective, Numbers(), Numbers(), {"data": "numbers"}, measure_tau=lambda _: 1.5)


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").write_text("a file in its place")
    with pytest.raises(OSError, match=r"checkpoints cannot be made \(File exists\); give another train.output"):
        run(tmp_path)
    monkeypatch.setattr(checkpoint.os, "access", lambda *_: False)
    with pytest.raises(OSError, match="checkpoints may not be written; see to its permissions, or give another train.output"):
        run(tmp_path / "other")


def test_a_batch_that_is_not_finite_is_saved_on_any_machine(tmp_path):
    """Another machine than the main process's has no folder yet; one whose disk is full still says why the run stopped."""
    batch = {"x": torch.ones(2)}
    with pytest.raises(FloatingPointError, match="its batch is kept in"):
        NonFiniteCounter(tmp_path / "other" / "machine", 1, 0, 1).after(3, False, [batch])
    assert len(list((tmp_path / "other" / "machine").iterdir())) == 1
    (tmp_path / "file").write_text(json.dumps("no folder"))
    with pytest.raises(
        FloatingPointError, match=r"not finite in 1 steps in a row, the last of them step 3; its batch could not be kept \("
    ):
        NonFiniteCounter(tmp_path / "file", 1, 0, 1).after(3, False, [batch])
