"""Weights on disk: which files may be read, their modes, what is looked at before and after they are read."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, GenerationConfig
from zoo import tiny

from draftsmith.inference import durable
from draftsmith.inference.reading import read_json
from draftsmith.models import weights
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.saving import save_student
from draftsmith.models.target import Target
from draftsmith.train.eagle import EagleSection, architecture


def test_an_index_that_names_nothing_is_refused(target_folder, tmp_path):
    shutil.copytree(target_folder, tmp_path / "target")
    (tmp_path / "target" / weights.WEIGHTS).unlink()
    (tmp_path / "target" / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {}}))
    with pytest.raises(ValueError, match=r"index\.json: its safetensors have 0 tensors, since `weight_map` is empty; restore the file"):
        Target.load(str(tmp_path / "target"))


def test_the_hub_caches_own_links_are_read(target_folder, tmp_path):
    repo = tmp_path / "models--a--b"
    snapshot = repo / "snapshots" / "0123"
    shutil.copytree(target_folder, snapshot)
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        shutil.move(file, repo / "blobs" / str(number))
        file.symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert Target.load(str(snapshot)).vocab_size == 257
    (repo / "blobs").rename(repo / "elsewhere")
    for file in snapshot.iterdir():
        name = os.path.basename(os.readlink(file))
        file.unlink()
        file.symlink_to(os.path.join("..", "..", "elsewhere", name))
    with pytest.raises(ValueError, match="outside the folder"):
        Target.load(str(snapshot))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_have_the_mode_of_the_umask(target, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        new_drafter("medusa", target, num_heads=1).save_pretrained(tmp_path / "drafter")
        student = tiny("llama")
        save_student(student, tmp_path / "student", {"confidence": 0.0}, 3)
        durable.replace(tmp_path / "file", lambda part: save_file({"a": torch.zeros(1)}, part))
        durable.replace_folder(tmp_path / "folder", lambda part: save_file({"a": torch.zeros(1)}, part / "file"))
    finally:
        os.umask(before)
    files = [tmp_path / name for name in ("drafter/model.safetensors", "student/model.safetensors", "file", "folder/file")]
    assert [file.stat().st_mode & 0o777 for file in files] == [mode] * 4
    assert os.umask(before) == before


@pytest.mark.parametrize("fails", ["write", "rename"])
def test_a_folder_stays_or_is_replaced(tmp_path, monkeypatch, fails):
    """Whatever is interrupted, the old folder is there; afterwards nothing else is."""
    folder, renamed = tmp_path / "folder", Path.rename
    durable.replace_folder(folder, lambda part: (part / "old").write_text("old"))

    def interrupted(path, *to):
        if fails == "write" or path.name.endswith(".part"):
            raise KeyboardInterrupt
        return renamed(path, *to)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        durable.replace_folder(folder, interrupted if fails == "write" else lambda part: (part / "new").write_text("new"))
    assert [file.name for file in tmp_path.iterdir()] == ["folder"] and [file.name for file in folder.iterdir()] == ["old"]
    durable.replace_folder(folder, lambda part: (part / "new").write_text("new"))
    assert [file.name for file in tmp_path.iterdir()] == ["folder"] and [file.name for file in folder.iterdir()] == ["new"]


def test_transformers_drafts_with_a_students_own_confidence(tmp_path):
    for confidence in (0.0, 0.25):
        save_student(tiny("llama"), tmp_path, {"confidence": confidence}, 3)
        generation = GenerationConfig.from_pretrained(tmp_path)
        assert generation.assistant_confidence_threshold == confidence
        assert (generation.num_assistant_tokens, generation.num_assistant_tokens_schedule) == (3, "constant")
        assert json.loads((tmp_path / "config.json").read_text())["draftsmith"]["confidence"] == confidence


def test_the_config_names_medusas_biases_for_engines(target, tmp_path):
    new_drafter("medusa", target, num_heads=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_fc_bias"] is True
    del config["medusa_fc_bias"]  # an artifact of before
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_drafter(tmp_path, target).config.medusa_fc_bias


@pytest.mark.parametrize(("heads", "dim"), [(3, 8), (5, 6), (7, 16)])
def test_an_eagle_drafter_whose_heads_do_not_divide_its_size(target, tmp_path, heads, dim):
    arch = {"taps": [0], "num_heads": heads, "num_kv_heads": 1, "head_dim": dim}
    drafter = new_drafter("eagle", target, **arch)
    assert target.hidden_size % heads and drafter.layers[0].self_attn.q_proj.weight.shape == (heads * dim, 2 * target.hidden_size)
    drafter.save_pretrained(tmp_path)
    for loaded in (load_drafter(tmp_path, target), AutoModel.from_pretrained(tmp_path)):
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_default_heads_of_a_target_whose_heads_do_not_divide_its_size():
    like_gpt_oss = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880}
    target = SimpleNamespace(hidden_size=2880, vocab_size=99, num_layers=24, name="oss", config=SimpleNamespace(**like_gpt_oss))

    def heads(**section):
        sizes = architecture(EagleSection(**section), target)
        return sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"]

    assert heads() == (64, 8, 64)
    assert heads(heads=45) == (45, 45, 64)
    assert heads(hidden_size=1024) == (16, 16, 64)
    with pytest.raises(ValueError, match=r"eagle.heads=64 do not cut eagle.hidden_size=2880 into even parts.*give eagle.heads=60"):
        heads(heads=64)
    with pytest.raises(ValueError, match="eagle.hidden_size=1001"):
        heads(hidden_size=1001)
    target.config.head_dim = 128  # a size that the heads do divide: as ever
    target.hidden_size = 4096
    assert heads() == (64, 8, 64)


def test_nan_is_seen_wherever_it_is(target):
    model = tiny("llama")
    weights.check_finite("here", model)
    for name, parameter in model.named_parameters():
        for value in (float("nan"), float("inf"), float("-inf")):
            flat = parameter.data.view(-1)
            for place in (0, len(flat) // 2, -1):
                before = flat[place].clone()
                flat[place] = value
                with pytest.raises(ValueError, match=f"'here' has NaN or infinite weights in {name};"):
                    weights.check_finite("here", model)
                flat[place] = before
    weights.check_finite("here", model.to(torch.bfloat16))


def test_headers_are_read_without_the_tensors(target_folder):
    stored = weights.headers(str(target_folder))
    tensors = load_file(target_folder / "model.safetensors")
    assert stored == {name: weights.Header("model.safetensors", "F32", tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_a_number_of_thousands_of_digits_names_its_file(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ' + "1" * 5000 + "}")
    with pytest.raises(ValueError, match="a.json"):
        read_json(tmp_path / "a.json")
