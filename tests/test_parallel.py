"""Targets that are laid out over two ranks equal complete ones; what cannot be laid out is refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT, metrics, short
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from zoo import tiny

from draftsmith.models import parallel
from draftsmith.models.target import Target
from draftsmith.train import distill, medusa

NAMES = ("llama", "gemma3")
COMPARED = {"loss", "top1_head1", "valid_loss", "valid_tau"}


def launch(script: Path, *arguments: object, config: str = "accelerate-cpu-2") -> subprocess.CompletedProcess:
    """Run a script on two ranks of gloo; one that waits for a rank that never comes fails."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / f"{config}.yaml")]
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "tests"))))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, "--main_process_port", "0", str(script), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        tiny(name).save_pretrained(folder / name)
    return {name: folder / name for name in NAMES} | {"tiny": ROOT / "models" / "tiny"}  # the last has its embedding for a head


@pytest.fixture(scope="module", params=["shard", "tensor"])
def laid_out(request, folders, tmp_path_factory):
    """The layout, and what each of two ranks saw: model -> facts."""
    output = tmp_path_factory.mktemp(request.param)
    done = launch(ROOT / "tests" / "parallel_ranks.py", output, request.param, *folders.values())
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, [json.loads((output / f"{request.param}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_give_the_complete_target_s_features_and_logits(laid_out):
    kind, ranks = laid_out
    # Sharded weights are gathered before they multiply: the same matmuls. Tensor parallelism adds up parts of sums.
    most = 0.0 if kind == "shard" else 2e-5
    for seen in ranks:
        assert seen.keys() == {*NAMES, "tiny"}
        for name, facts in seen.items():
            assert facts["spread"] > 0.5, name
            assert max(facts["hidden"], facts["taps"], facts["logits"]) <= most, (kind, name, facts)
            assert facts["embed"] == 0 and facts["buffers"] and facts["same"] and facts["decoded"], (kind, name, facts)
    if kind == "tensor":
        assert all(facts["hidden"] > 0 for seen in ranks for facts in seen.values())  # it did not run the complete weights


@pytest.mark.slow
def test_each_rank_holds_half_of_the_layers_and_complete_ends(laid_out):
    kind, ranks = laid_out
    for number, seen in enumerate(ranks):
        for facts in seen.values():
            assert facts["world"] == 2 and facts["collective"] == [True, False]
            assert facts["cut"] == 2 * facts["local"] >= facts["layers_numel"] > 0
            assert facts["outside"] == [] and facts["ends"] == ["Tensor", "Tensor"] and facts["patched"] == []
            assert facts["tied"] == facts["ties"]
            sent = {"allgather_base": facts["layers"]}
            if kind == "tensor":  # both ranks' rows in turn; attention and MLP of each layer add up their parts
                sent = {"allgather": 1, "broadcast": 2, "allreduce": 2 * 2 * facts["layers"]}
            assert facts["sent"] == sent and facts["sent by logits"] == {}
            if kind == "shard":  # only the first rank reads weights, and no rank keeps views of complete tensors
                assert facts["bytes"] == 4 * facts["local"]
                assert facts["read"] == ({"meta": 1, "cpu": 1} if number == 0 else {"meta": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("shard", "accelerate-cpu-2"),
        ("tensor", "accelerate-cpu-2"),
        pytest.param("shard", "accelerate-zero3-cpu", marks=pytest.mark.deepspeed),
    ],
)
def test_training_on_two_ranks_equals_the_complete_target_s(target_folder, tmp_path, kind, config):
    """τ is measured too, which all ranks decode together; of three held-out batches the last is one rank's alone."""
    probed = ["train.tau_prompts=1", "train.tau_tokens=6", "train.eval_every=2", "train.micro_batch_size=2"]
    medusa.main(short(target_folder, tmp_path, tmp_path / "complete", *probed))
    arguments = short(target_folder, tmp_path, tmp_path / kind, *probed, f"target.parallel={kind}")
    if "zero" in config:
        pytest.importorskip("deepspeed")
    done = launch(ROOT / "train" / "medusa.py", *arguments, config=config)
    assert done.returncode == 0, done.stderr[-3000:]
    rows, expected = metrics(tmp_path / kind), metrics(tmp_path / "complete")
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [1, 2, 2, 3, 3]
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name in COMPARED & row.keys():
            assert row[name] == pytest.approx(wanted[name], rel=0, abs=1e-5)
    assert COMPARED <= {name for row in rows for name in row}
    dtype = json.loads((tmp_path / kind / "artifact" / "config.json").read_text())["target"]["dtype"]
    assert dtype == "float32"


def processes(monkeypatch, count: int) -> None:
    """As in a run of so many processes."""
    monkeypatch.setattr(parallel, "PartialState", lambda: SimpleNamespace(num_processes=count))


def test_processes_that_do_not_fit_the_layout_are_refused(target_folder, monkeypatch):
    for kind in ("shard", "tensor"):
        with pytest.raises(ValueError, match=f"target.parallel={kind} lays the target out over the processes of a run, this one has one"):
            Target.load(str(target_folder), parallel=kind)
    processes(monkeypatch, 2)
    with pytest.raises(ValueError, match="target.parallel=layers .* one process, this run has 2; take target.parallel=shard"):
        Target.load(str(target_folder), parallel="layers")
    for kind in ("shard", "tensor"):
        with pytest.raises(
            ValueError, match=rf"{kind} cuts weights that are not quantised, those of .* are ao-int8; take target.parallel=none"
        ):
            Target.load(str(target_folder), parallel=kind, quantise="ao-int8")


def test_layers_of_one_process_are_the_complete_target(target_folder):
    ids = torch.arange(12)[None]
    expected = Target.load(str(target_folder)).forward(ids)
    target = Target.load(str(target_folder), parallel="layers")
    assert not target.collective and torch.equal(target.forward(ids).hidden, expected.hidden)


def test_tensor_parallelism_that_does_not_divide_or_has_no_plan_is_refused(folders, tmp_path, monkeypatch):
    processes(monkeypatch, 4)
    with pytest.raises(ValueError, match="over 4 processes, architecture 'llama' has 4 here, 2 for keys and values; launch as many"):
        Target.load(str(folders["llama"]), parallel="tensor")
    tiny("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no plan for tensor parallelism of architecture 'gpt_oss'; take target.parallel=shard"):
        Target.load(str(tmp_path), parallel="tensor")


def test_a_drafter_trained_by_zero_3_leaves_the_target_complete(target_folder):
    pytest.importorskip("deepspeed")
    from transformers.integrations import HfDeepSpeedConfig

    ids = torch.arange(12)[None]
    expected = Target.load(str(target_folder)).forward(ids).hidden
    alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert is_deepspeed_zero3_enabled()
    target = Target.load(str(target_folder))
    assert not any(hasattr(parameter, "ds_id") for parameter in target.model.parameters())
    assert torch.equal(target.forward(ids).hidden, expected)
    assert is_deepspeed_zero3_enabled() and alive.is_zero3()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["target.parallel=shard", "features.mode=cache"], "features.mode=cache runs the target when .* under target.parallel=shard all"),
        (["target.parallel=tensor", "distill.rejections=0.5"], "distill.rejections=0.5 lets .* under target.parallel=tensor all"),
        (["target.parallel=shard", "student.start=pruned", "student.layers=1"], "under target.parallel=shard there are none"),
        (["target.quantise=ao-int8", "student.start=pruned", "student.layers=1"], "under target.quantise=ao-int8 there are none"),
    ],
)
def test_keys_that_do_not_go_with_a_layout_are_named_before_anything_is_loaded(monkeypatch, tmp_path, keys, says):
    def load(*arguments, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr(Target, "load", load)
    recipe, output = str(ROOT / "recipes" / "distill-tiny.yaml"), f"train.output={tmp_path}"
    with pytest.raises(ValueError, match=says):
        distill.main([recipe, *keys, output])
    with pytest.raises(AssertionError, match="loaded"):
        distill.main([recipe, "target.parallel=shard", "student.start=random", "student.layers=1", "distill.on_policy=0.5", output])
