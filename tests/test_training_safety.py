"""What training must not do: lose files, publish what is not finite, store secrets, wait or end without a word."""

import errno
import fcntl
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
import zoo
from conftest import byte_tokenizer
from safetensors.torch import load_file, save_file
from torch.utils.file_baton import FileBaton
from training_cases import Numbers, new_model, new_recipe, objective, run

from draftsmith.data import prompts
from draftsmith.inference.claim import MARK, claim, is_claimed
from draftsmith.models.target import Target
from draftsmith.train import cli, loop, publish, recipe, setup
from draftsmith.train.engine import checkpoint, output, say, trackers
from draftsmith.train.engine.redact import redacted
from draftsmith.train.engine.watchdog import locks_reported

SECRETS = {
    "https://user:hunter2@host/data.jsonl": "hunter2",
    "https://host/data.jsonl?token=abcdef123&x=1": "abcdef123",
    "https://host/d?X-Amz-Signature=0a1b2c3d": "0a1b2c3d",
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz": "AbCdEf",
    "sk-proj-AbCdEfGhIjKlMnOp": "AbCdEf",
    "ghp_AbCdEfGhIjKlMnOp": "AbCdEf",
    "password=swordfish": "swordfish",
    "api_key=swordfish": "swordfish",
    "Bearer AbCdEfGhIjKl": "AbCdEf",
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2ln": "eyJzdWIi",
}


@pytest.mark.parametrize("text", SECRETS)
def test_no_secret_is_stored(tmp_path, monkeypatch, text):
    secret = SECRETS[text]
    chosen = new_recipe(tmp_path, tau_file=text)
    monkeypatch.setattr(sys, "argv", ["medusa", "x.yaml", f"train.tau_file={text}"])
    recipe.save(chosen, tmp_path)
    stored = (tmp_path / "recipe.yaml").read_text() + (tmp_path / "run.json").read_text() + json.dumps(trackers.flat(chosen))
    assert secret not in stored and yaml.safe_load((tmp_path / "recipe.yaml").read_text())["train.output"] == str(tmp_path)
    run(tmp_path / "run", steps=1, tau_file=text)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 5 and not [file for file in files if secret.encode() in file.read_bytes()]
    run(tmp_path / "run", steps=2, tau_file=text)  # goes on: what is compared is masked too


def test_what_is_no_secret_stays():
    plain = ["train.lr=1e-3", "/data/hf_checkpoint1", "runs/sk-learn-data", "data.train=[{path: a.jsonl}]", "Qwen/Qwen3-8B", 3, None]
    assert redacted(plain) == plain


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    weights, broken = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, float("nan")])}
    for arguments in ((broken, {}), (weights, {"exp_avg.w": broken["w"]})):
        with pytest.raises(FloatingPointError, match="step-00000003 is not written.*not finite"):
            checkpoint.save(tmp_path, 3, *arguments, {})
    model = new_model()
    next(model.parameters()).data[0] = float("inf")
    with pytest.raises(FloatingPointError, match="best-00000001.safetensors is not written"):
        checkpoint.save_weights(checkpoint.best_file(tmp_path, 1), model)
    assert not list(tmp_path.iterdir())


def writing(value: float):
    """Writes an artifact whose only weight is `value`."""

    def write(part: Path) -> None:
        save_file({"w": torch.tensor([value])}, part / "model.safetensors")
        (part / "config.json").write_text(json.dumps({"training": {"steps": 3}, "confidence_weights": [[0.5]]}))
        (part / "README.md").write_text("card")

    return write


def test_an_artifact_stays_only_with_its_weights_and_its_recipe(tmp_path):
    chosen = new_recipe(tmp_path)
    folder, new = publish.replace_artifact(chosen, writing(1.0))
    assert new
    for name in ("acceptance.json", "notes.txt"):
        (folder / name).write_text("mine")
    (folder / "config.json").write_text(json.dumps({"training": {"steps": 3}, "tree": "measured", "confidence_weights": [[1.0]]}))
    assert not publish.replace_artifact(chosen, writing(1.0))[1] and "measured" in (folder / "config.json").read_text()
    assert not publish.replace_artifact(new_recipe(tmp_path, log_every=7), writing(1.0))[1], "a changeable key"
    with pytest.raises(FloatingPointError, match="artifact is not written: `w` of model.safetensors is not finite"):
        publish.replace_artifact(chosen, writing(float("nan")))
    assert (folder / "acceptance.json").is_file() and load_file(folder / "model.safetensors")["w"] == 1.0
    unfitted = {"training": {"steps": 3}, "tree": "measured"}
    before = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(unfitted))
    assert publish.replace_artifact(chosen, writing(1.0))[1], "confidences that were not fitted before"
    (folder / "config.json").write_text(before)
    (folder / "acceptance.json").write_text("mine")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    assert publish.replace_artifact(chosen, writing(2.0))[1]
    assert not (folder / "acceptance.json").exists() and not (folder / "adapter" / "adapter_config.json").exists()
    assert (folder / "notes.txt").read_text() == "mine"
    assert load_file(folder / "model.safetensors")["w"] == 2.0 and "measured" not in (folder / "config.json").read_text()
    (folder / "acceptance.json").write_text("measured")
    assert publish.replace_artifact(new_recipe(tmp_path, seed=5), writing(2.0))[1] and not (folder / "acceptance.json").exists()
    assert not (tmp_path / ".artifact.part").exists()


def test_a_run_is_alone_in_its_folder(tmp_path):
    chosen = new_recipe(tmp_path / "run")
    with output.claimed(chosen):
        with pytest.raises(ValueError, match=rf"train.output=.*run: process {os.getpid()} on .* is writing there"):
            with output.claimed(chosen):
                raise AssertionError("never entered")
    with output.claimed(chosen):
        assert json.loads((tmp_path / "run" / MARK).read_text())["kind"] == output.KIND
    with claim(tmp_path / "store", "feature store", (), "x"), pytest.raises(ValueError, match="holds a feature store"):
        output.check(new_recipe(tmp_path / "store"))


@pytest.mark.parametrize("at", ["open", "flock", "pwrite", "fsync"])
def test_a_kill_while_a_folder_is_claimed_leaves_it_claimable(tmp_path, monkeypatch, at):
    """Of a new folder, and of one that an earlier process of a longer name held."""

    class Killed(BaseException):
        pass

    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            monkeypatch.setattr("sys.argv", ["a" * 100])
            with claim(folder, "feature store", ("index.json",), "x"):
                (folder / "index.json").write_text("{}")
            monkeypatch.undo()
        owner = fcntl if at == "flock" else os
        real = getattr(owner, at)

        def kill(*words, real=real):
            real(*words)
            raise Killed

        monkeypatch.setattr(owner, at, kill)
        with pytest.raises(Killed), claim(folder, "feature store", ("index.json",), "x"):
            raise AssertionError("never entered")
        monkeypatch.undo()
        with claim(folder, "feature store", ("index.json",), "x"):
            assert json.loads((folder / MARK).read_text())["kind"] == "feature store"


def test_saving_deletes_what_has_its_mark_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    run(tmp_path, steps=3, save_every=1, keep=3)
    foreign = ["step-00000000/notes.txt", "step-00000009", "best-00000001.safetensors", ".tmp_notes", ".step-x.part/notes.txt"]
    for name in foreign:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("precious")
    assert [path.name for path in checkpoint.foreign(folder)] == ["step-00000000", "step-00000009"]
    run(tmp_path, steps=6, save_every=1, keep=1)
    assert all((folder / name).read_text() == "precious" for name in foreign)
    own = [path.name for path in folder.glob("step-*") if (path / MARK).is_file()]
    assert own == ["step-00000006"]


def test_keys_of_methods_are_read_off_their_scripts():
    known = set()
    for name in cli.methods():
        module = importlib.import_module(f"draftsmith.train.{name}")
        kind = next(value for value in vars(module).values() if isinstance(value, type) and recipe.Recipe in value.__bases__)
        known |= recipe.keys(kind).keys() - recipe.keys(recipe.Recipe).keys()
    assert recipe.keys_of_methods() == known and {"medusa.heads", "eagle.taps", "student.start", "architecture.compile"} <= known


@pytest.mark.parametrize(
    "words", [["draftsmith.train.medusa"], ["draftsmith.train.cli", "train", "medusa"], ["draftsmith.train.cli", "eval"]]
)
def test_ctrl_c_during_imports_is_no_traceback(tmp_path, words):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-m", *words, "medusa-tiny"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_lock_of_a_build_is_named(tmp_path, monkeypatch):
    """The file is deleted when it has been named, which ends the wait."""
    lock, said = tmp_path / "lock", []
    lock.write_text("")

    class Terminal:
        def write(self, text):
            said.append(text)
            lock.unlink(missing_ok=True)

        def flush(self):
            pass

    plain = FileBaton.wait
    monkeypatch.setattr(sys, "stderr", Terminal())
    with locks_reported(0.0):
        FileBaton(str(lock), wait_seconds=0.001).wait()
    assert f"waiting for {lock}, which another process holds" in said[0] and FileBaton.wait is plain


THREADS = """import os, subprocess, sys
child = "from draftsmith.inference import machine; print(machine._set_by_launcher())"
environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}
subprocess.run([sys.executable, "-c", child], env=environment, check=True)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="the system shows no environment of the launcher")
@pytest.mark.parametrize(("setting", "by_launcher"), [({}, "True"), ({"OMP_NUM_THREADS": "1"}, "False")])
def test_threads_of_a_person_are_obeyed_under_a_launcher(setting, by_launcher):
    """The parent stands for `accelerate launch`, which gives its worker OMP_NUM_THREADS=1 in either case."""
    plain = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=plain | setting, check=True)
    assert done.stdout.strip() == by_launcher


def test_a_reader_that_is_gone_ends_no_run(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", open(write, "w"))
    say.say("one")
    say.say("another")
    assert sys.stdout.name == os.devnull


def test_a_tau_of_other_prompts_is_none_to_compare_with(tmp_path, target_folder):
    target = Target.load(str(target_folder))

    def train(steps):
        recipe = new_recipe(tmp_path / "run", steps=steps, tau_file=str(prompt_file), tau_prompts=1)
        fingerprint = setup.fingerprint(recipe, target, SimpleNamespace(key="numbers"))
        loop.fit(recipe, new_model(), objective, Numbers(), Numbers(), fingerprint)

    prompt_file = tmp_path / "prompts.jsonl"
    prompt_file.write_text('{"prompt": "What is this?"}\n')
    train(1)
    prompt_file.write_text('{"prompt": "What is that?"}\n')
    with pytest.raises(ValueError, match="was made with prompts for τ=.*this run has .*give another train.output"):
        train(2)
    prompt_file.write_text('{"prompt": "What is this?"}\n{"prompt": "Not decoded?"}\n')
    train(2)


def test_tau_is_measured_on_prompts_that_suit_the_target(tmp_path):
    target = Target.wrap(zoo.tiny("llama"), byte_tokenizer())

    def kinds(**named):
        recipe = new_recipe(tmp_path / "run", tau_prompts=1, **named)
        return {prompt.domain for prompt in setup._tau_prompts(recipe.train, target)}

    by_task = {prompt.domain for prompt in prompts.load("chat")}
    source = {prompt.domain for prompt in prompts.load(prompts.TINY)}
    assert kinds() == source != by_task and kinds(tau_file="chat") == by_task
    target.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert kinds() == by_task and kinds(tau_file=str(prompts.TINY)) == source


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"), claim(tmp_path / "out", "training run", (), "train.output"):
            pass
        return
    with claim(tmp_path / "out", "training run", (), "train.output"):
        assert (tmp_path / "out" / MARK).is_file() and not is_claimed(tmp_path / "out")
