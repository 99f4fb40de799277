"""Every launcher trains the same weights, wraps as it says, and continues what any other saved."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from launched import HALF, METHODS, OPTIMIZERS, methods_of, train_numbers, words
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "ddp": ("cpu-2", "MULTI_CPU", "DistributedDataParallel", False, False, "AdamW"),
    "fsdp2": ("cpu-2", "FSDP", "FSDP_Step", True, False, "AdamW"),
    "zero2": ("zero2-cpu", "DEEPSPEED", "DeepSpeedEngine", False, False, "DeepSpeedZeroOptimizer"),
    "zero3": ("zero3-cpu", "DEEPSPEED", "DeepSpeedEngine", False, True, "DeepSpeedZeroOptimizer_Stage3"),
}


@functools.cache
def deepspeed_missing() -> str:
    """Why DeepSpeed cannot run here; it compiles a small library of its own for CPUs."""
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        return "deepspeed is not installed"
    missing = [tool for tool in ("g++", "ninja") if not shutil.which(tool, path=tools())]
    return f"deepspeed compiles with {missing[0]}, which is not installed" if missing else ""


def tools():
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def launch(launcher, *words, script="launched.py", **environment):
    """`accelerate launch` of a script in this folder -> the finished process."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / f"accelerate-{launcher}.yaml")]
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*command, str(ROOT / "tests" / script), *map(str, words)],
        # DeepSpeed's compiler looks for ninja in the path, where it is only in an environment that is activated.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PATH": tools(), **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def weights(folder):
    return load_file(folder / "weights.safetensors")


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def same(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "ddp") + [pytest.mark.deepspeed] * kind.startswith("zero")) for kind in KINDS],
)
def test_two_ranks_train_what_one_does_and_continue_each_others_runs(kind, tmp_path, target_folder):
    """Two ranks × two micro-batches of two sequences equal one of eight; two ranks end what one began, and vice versa; for the methods of `methods_of`."""
    if kind.startswith("zero") and (reason := deepspeed_missing()):
        pytest.skip(reason)
    launcher, *wrapped = KINDS[kind]
    (tmp_path / "target").symlink_to(target_folder)
    (tmp_path / "text.txt").write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    (tmp_path / "asked.jsonl").write_text('{"id": "a", "domain": "code", "prompt": "for line"}\n')
    for optimizer in OPTIMIZERS:
        train_numbers(tmp_path / optimizer / "one", micro_batch_size=8, optimizer=optimizer)
        train_numbers(tmp_path / optimizer / "from_one", steps=4, optimizer=optimizer)
    done = launch(launcher, kind, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("type", "module", "dtensors", "partitioned", "optimizer")
    seen = json.loads((tmp_path / "seen.json").read_text())
    expected = {"world": 2} | dict(zip(names, wrapped, strict=True))
    by_muon = expected | ({"optimizer": "Muon"} if expected["optimizer"] == "AdamW" else {})
    wrapped_again = 2 * len(methods_of(kind)) + kind.startswith("zero")
    assert seen == [expected] * 3 + [by_muon] * 3 + [expected] * wrapped_again
    for optimizer in OPTIMIZERS:
        folder = tmp_path / optimizer
        train_numbers(folder / "to_one", optimizer=optimizer)
        for name in ("uninterrupted", "from_one", "to_one"):
            same(weights(folder / name), weights(folder / "one"))
            assert losses(folder / name) == pytest.approx(losses(folder / "one"), rel=1e-5) and len(losses(folder / name)) == 7
    assert any(
        (weights(tmp_path / "adamw" / "one")[name] - tensor).abs().max() > 1e-3
        for name, tensor in weights(tmp_path / "muon" / "one").items()
    )
    if kind.startswith("zero"):
        gaps = [abs(half - full) for half, full in zip(losses(tmp_path / "bf16"), losses(tmp_path / "adamw" / "one"), strict=True)]
        assert 0 < max(gaps) < 2e-2, "reduced precision is on, and does not change what is learned"
    for method in methods_of(kind):
        METHODS[method][0](words(method, tmp_path, tmp_path / "alone"))
        actual, expected = (load_file(tmp_path / ranks / method / "artifact" / "model.safetensors") for ranks in ("two", "alone"))
        same(actual, expected, 1e-5 if method != "distill" else 2e-2)  # a student is stored as bf16
        assert losses(tmp_path / "two" / method) == pytest.approx(losses(tmp_path / "alone" / method), rel=1e-5)
        assert len(losses(tmp_path / "two" / method)) == 4
        assert f"{tmp_path / 'two' / method / 'checkpoints' / 'step-00000002'}" in done.stdout, "the second run went on from the first"


@pytest.mark.slow
@pytest.mark.usefixtures("own_precision")
def test_two_ranks_train_bf16_weights_as_one_does(tmp_path):
    for optimizer in OPTIMIZERS:
        train_numbers(tmp_path / optimizer / "one", optimizer=optimizer, **HALF)
        train_numbers(tmp_path / optimizer / "from_one", steps=4, optimizer=optimizer, **HALF)
    done = launch("cpu-2", "half", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [(run["world"], run["module"], run["optimizer"]) for run in seen] == [(2, "DistributedDataParallel", "Kahan")] * 6
    for optimizer in OPTIMIZERS:
        folder = tmp_path / optimizer
        train_numbers(folder / "to_one", optimizer=optimizer, **HALF)
        for name in ("uninterrupted", "from_one", "to_one"):  # ranks add their gradients in bf16
            same(weights(folder / name), weights(folder / "one"), 1e-2)
            assert losses(folder / name) == pytest.approx(losses(folder / "one"), rel=2e-2) and len(losses(folder / name)) == 7


def test_launcher_files_start_what_they_name():
    """Files that Accelerate would read as something else: MULTI_CPU starts one process, use_cpu with FSDP runs DDP."""
    files = sorted((ROOT / "recipes").glob("accelerate-*.yaml"))
    assert len(files) == 11
    kinds = {"one": "NO", "cpu": "MULTI_GPU", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "multi": "MULTI_GPU"}
    for file in files:
        settings, name = yaml.safe_load(file.read_text()), file.stem.removeprefix("accelerate-")
        assert settings["distributed_type"] == kinds.get(name.split("-")[0], "DEEPSPEED")
        assert settings["use_cpu"] == (name == "cpu-2"), "DeepSpeed and FSDP are not started where use_cpu is set"
        assert settings["mixed_precision"] == "no", "train.precision decides"
        assert name == "multi-node" or settings["num_machines"] == 1
        if settings["num_machines"] == 1 and settings["num_processes"] > 1:
            assert settings["main_process_port"] == 0, "a free port: two runs on a machine do not meet"
        if "deepspeed_config" in settings:
            assert str(settings["deepspeed_config"]["zero_stage"]) in name
            assert ("offload" in name) == ("offload_optimizer_device" in settings["deepspeed_config"])
            if "cpu" not in name:  # by default Accelerate has DeepSpeed's own launcher reach the machines, from each of them
                assert settings["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
        if "fsdp_config" in settings:
            assert settings["fsdp_config"]["fsdp_version"] == 2 and not settings["fsdp_config"]["fsdp_cpu_ram_efficient_loading"]
