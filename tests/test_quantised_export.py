"""Exports with linear layers of 8 bits: what is stored, what is read back, and who does not take it."""

import json
import shutil

import pytest
import torch
from commands import failing
from export_cases import H, save_drafter, save_target
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.models.drafter import load_drafter
from draftsmith.models.formats import plain, quantise, verify
from draftsmith.models.formats.published import read_published
from draftsmith.models.target import Target
from draftsmith.train.exchange import export as command

SIZES = {"intermediate_size": 64}  # Q8_0 takes inputs by 32
ODD = {"intermediate_size": 45}  # int8 is packed by four
WRITTEN = [
    *((name, "vllm", kind) for name in ("eagle1", "eagle3", "peagle", "odd", "two layers", "student") for kind in quantise.KINDS),
    *((name, "gguf", "int8") for name in ("eagle3", "student")),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    pytest.importorskip("gguf")
    root = tmp_path_factory.mktemp("workshop")
    target = Target.load(str(save_target(root / "target")))
    forms = {"eagle1": ("eagle1", SIZES), "eagle3": ("eagle3", SIZES), "peagle": ("peagle", SIZES), "odd": ("eagle3", ODD)}
    forms |= {"two layers": ("eagle3 of two layers", SIZES), "medusa": ("medusa", {}), "student": ("student", SIZES | {"hidden_size": H})}
    for name, (base, changes) in forms.items():
        save_drafter(base, target, root / name, **changes)
    return root


@pytest.fixture(scope="module")
def target(workshop):
    return Target.load(str(workshop / "target"), dtype=torch.float32)


def words(workshop, name, engine, output, *more):
    return [str(workshop / name), "--to", engine, "--output", str(output), "--target", str(workshop / "target"), *more]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, engine, kind", WRITTEN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_eight_bits_are_written_and_checked(workshop, target, name, engine, kind, dtype, tmp_path, capsys):
    folders = [tmp_path / "plain", tmp_path / "quantised"]
    command.main(words(workshop, name, engine, folders[0], "--dtype", dtype))
    command.main(words(workshop, name, engine, folders[1], "--dtype", dtype, "--quantise", kind))
    assert capsys.readouterr().out.count("and checked") == 2 and verify.faults(folders[1], target) == []
    if engine == "gguf":
        tensors, rounded = (plain.gguf_content(folder / "model.gguf")[1] for folder in folders)
    else:
        tensors, rounded = (plain.read_folder(folder)[1] for folder in folders)
    assert tensors.keys() == rounded.keys()
    linear = {name for name in tensors if quantise.LINEAR.fullmatch(name)}
    assert len(linear) == 7 * (2 if name in ("two layers", "student") else 1)
    for key, tensor in tensors.items():
        if key not in linear:
            assert torch.equal(rounded[key], tensor)
        else:  # half a step of 254, or of 3 bits' mantissa; the scale itself is rounded to 8 bits in bfloat16
            gap, largest = (rounded[key] - tensor).abs(), tensor.abs().amax(-1, keepdim=True)
            bound = largest / 250 + tensor.abs() * 2**-8 if kind == "int8" else tensor.abs() * 2**-4 + largest * 2**-17
            assert bool((gap <= bound).all()) and bool(gap.any())


def test_what_is_stored_is_compressed_tensors_form(workshop, tmp_path):
    command.main(words(workshop, "odd", "vllm", tmp_path / "out", "--quantise", "int8", "--dtype", "bfloat16"))
    tensors, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(workshop / "odd" / "model.safetensors")
    packed, scale = tensors["midlayer.mlp.down_proj.weight_packed"], tensors["midlayer.mlp.down_proj.weight_scale"]
    weight = original["layers.0.mlp.down_proj.weight"].bfloat16().float()
    assert packed.shape == (H, 12) and scale.shape == (H, 1) and scale.dtype == torch.bfloat16  # 45 steps by four
    assert tensors["midlayer.mlp.down_proj.weight_shape"].tolist() == [H, 45]
    for row in range(H):
        step = float((weight[row].abs().max() / 127).bfloat16())
        for column in range(45):
            byte = (int(packed[row, column // 4]) & 0xFFFFFFFF) >> 8 * (column % 4) & 255
            assert byte - 128 == max(-128, min(127, round(float(weight[row, column]) / step)))
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "pack-quantized" and settings["config_groups"]["group_0"]["input_activations"] is None


@pytest.mark.parametrize("kind", quantise.KINDS)
def test_a_quantised_folder_is_a_drafter_here_too(workshop, target, kind, tmp_path):
    command.main(words(workshop, "eagle3", "vllm", tmp_path / "out", "--quantise", kind, "--dtype", "float32"))
    drafter, original = read_published(str(tmp_path / "out"), target), load_drafter(str(workshop / "eagle3"), target, dtype="float32")
    state, before = drafter.state_dict(), original.state_dict()
    assert torch.equal(state["fc.weight"], before["fc.weight"])
    ratio = (state["layers.0.self_attn.q_proj.weight"] - before["layers.0.self_attn.q_proj.weight"]).norm() / before[
        "layers.0.self_attn.q_proj.weight"
    ].norm()
    assert 1e-4 < ratio < (0.01 if kind == "int8" else 0.05)


def test_what_was_measured_is_not_of_the_rounded_weights(workshop, tmp_path):
    artifact = shutil.copytree(workshop / "eagle3", tmp_path / "eagle3")
    for name in ("acceptance.json", "recipe.yaml"):
        (artifact / name).write_text("")
    given = [str(artifact), "--to", "vllm", "--target", str(workshop / "target")]
    for folder, more in ((tmp_path / "plain", []), (tmp_path / "rounded", ["--quantise", "int8"])):
        command.main([*given, "--output", str(folder), *more])
        assert (folder / "recipe.yaml").is_file() and (folder / "acceptance.json").is_file() == (not more)
        assert ("The linear layers here are in int8" in (folder / "README.md").read_text()) == bool(more)


REFUSED = [
    ("medusa", "vllm", "int8", "--quantise int8: not written of this drafter for vllm; nearest: none for this drafter"),
    ("eagle3", "sglang", "int8", "nearest: --to vllm, or int8 with --to gguf"),
    ("eagle3", "gguf", "fp8", "llama.cpp has no fp8; nearest: --quantise int8"),
    ("odd", "gguf", "int8", "layers.0.mlp.down_proj.weight has 45 inputs; llama.cpp's Q8_0 needs a multiple of 32"),
]


@pytest.mark.parametrize("name, engine, kind, line", REFUSED)
def test_what_nobody_reads_is_refused(workshop, name, engine, kind, line, tmp_path, capsys):
    assert line in failing(capsys, command.main, words(workshop, name, engine, tmp_path / "out", "--quantise", kind))
    assert not (tmp_path / "out").exists()


def test_other_peoples_quantisation_is_refused_and_a_lost_tensor_named(workshop, target, tmp_path):
    folder = tmp_path / "out"
    command.main(words(workshop, "eagle3", "vllm", folder, "--quantise", "int8"))
    (folder / "draftsmith.json").unlink()
    raw = json.loads((folder / "config.json").read_text())
    other = raw | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="quantization_config other than"):
        read_published(str(folder), target)
    (folder / "config.json").write_text(json.dumps(raw))
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != "midlayer.mlp.up_proj.weight_packed"}  # noqa: SIM118
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="midlayer.mlp.up_proj.weight is missing beside"):
        read_published(str(folder), target)
