"""The drafter artifact: strict loading, bitwise round trip, and nothing of the target in it."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from random_targets import random_model, randomise, small_tokenizer
from safetensors.torch import load_file, save_file

from draftsmith.inference.expand import ranked
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import DrafterModel, default_paths, load_drafter, methods, new_drafter
from draftsmith.models.medusa import MedusaModel
from draftsmith.models.target import Target


@pytest.fixture(scope="module")
def target():
    return Target.wrap(random_model("llama"), small_tokenizer(), name="small-llama")


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter")
    randomise(new_drafter("medusa", target, num_heads=3, num_layers=2, training={"positions": 12})).save_pretrained(folder)
    return folder


@pytest.fixture
def artifact(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "drafter")


@pytest.mark.parametrize("name", ["llama", "cohere", "granite", "gemma2"])
@pytest.mark.parametrize("share", [False, True])
def test_fresh_heads_say_what_the_target_says(name, share):
    given = Target.wrap(random_model(name))
    drafter = new_drafter("medusa", given, num_heads=2, num_layers=2, share_head=share)
    hidden = torch.randn(4, 32)
    logits = drafter.head_logits(hidden)
    assert logits.shape == (4, 2, 67)
    want = given.logits(hidden)
    if not share:  # own heads: the scale is in the weights, soft-capping is left out
        want = hidden @ given.head_weight.T * given.head_scale
    for k in range(2):
        assert torch.equal(logits[:, k], want) if name in ("llama", "gemma2") or share else torch.allclose(logits[:, k], want, atol=1e-5)
    assert torch.equal(logits[:, 0].argmax(-1), given.logits(hidden).argmax(-1))


def test_blocks_and_outputs_are_not_shared(target):
    drafter = new_drafter("medusa", target, num_heads=3, num_layers=2)
    parameters = list(drafter.parameters())
    assert len(parameters) == 3 * (2 * 2 + 1)
    assert len({p.data_ptr() for p in parameters}) == len(parameters)
    assert target.head_weight.data_ptr() not in {p.data_ptr() for p in parameters}


def test_round_trip_is_bitwise(target, saved):
    first = randomise(new_drafter("medusa", target, num_heads=3, num_layers=2))
    again = load_drafter(saved, target)
    assert list(again.state_dict()) == list(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert again.config.training == {"positions": 12} and again.config.target["name"] == "small-llama"
    assert again.config.tree == first.config.tree
    assert isinstance(MedusaModel.from_pretrained(saved), MedusaModel)
    names = set(load_file(saved / "model.safetensors"))
    assert names == {f"{i}.{j}.linear.{p}" for i in range(3) for j in range(2) for p in ("weight", "bias")} | {
        f"{i}.2.weight" for i in range(3)
    }
    assert load_drafter(saved, dtype="bfloat16").dtype == torch.bfloat16


def test_the_target_stays_out_of_the_artifact(target, tmp_path):
    drafter = new_drafter("medusa", target, num_heads=2, share_head=True)
    drafter.bind(target, 2, 64)
    assert drafter.target is target
    assert not any("lm_head" in name or name.startswith("model") for name, _ in [*drafter.named_modules(), *drafter.named_buffers()])
    drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {f"{i}.0.linear.{p}" for i in range(2) for p in ("weight", "bias")}
    copied = copy.deepcopy(drafter)
    with pytest.raises(RuntimeError, match="no target yet"):
        _ = copied.target
    assert drafter.target is target


def test_missing_unexpected_and_misshapen_tensors_are_named(artifact):
    tensors = load_file(artifact / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "1.0.linear.bias"}, artifact / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing tensors: 1\.0\.linear\.bias"):
        load_drafter(artifact)
    save_file(tensors | {"9.weight": torch.zeros(2)}, artifact / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 unexpected tensors: 9\.weight"):
        load_drafter(artifact)
    save_file(tensors | {"0.2.weight": torch.zeros(66, 32)}, artifact / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 misshapen tensors: 0\.2\.weight \[66, 32\]"):
        MedusaModel.from_pretrained(artifact)


def test_half_written_artifacts(artifact):
    weights = artifact / "model.safetensors"
    complete = weights.read_bytes()
    for cut in (4, len(complete) // 2, len(complete) - 1):
        weights.write_bytes(complete[:cut])
        with pytest.raises(ValueError, match="model.safetensors.*cut off"):
            load_drafter(artifact)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_drafter(artifact)
    torch.save({}, artifact / "pytorch_model.bin")
    for load in (load_drafter, MedusaModel.from_pretrained):
        with pytest.raises(ValueError, match="only pickled weights"):
            load(artifact)
    (artifact / "config.json").write_text('{"model_type": "med')
    with pytest.raises(ValueError, match="config.json.*not JSON"):
        load_drafter(artifact)
    (artifact / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_drafter(artifact)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_drafter(artifact / "none")


def test_another_target_is_refused(target, saved):
    with pytest.raises(ValueError, match="tokenizer.*'small-llama'.*'swapped'"):
        load_drafter(saved, Target.wrap(target.model, small_tokenizer("acb"), name="swapped"))
    with pytest.raises(ValueError, match="config.*'small-llama'.*'other'"):
        load_drafter(saved, Target.wrap(random_model("qwen3"), small_tokenizer(), name="other"))
    half = Target.wrap(random_model("llama").bfloat16(), small_tokenizer(), name="half")
    with pytest.warns(UserWarning, match="bfloat16.*float32"):
        load_drafter(saved, half)


def test_architectures_are_found_by_file_name(target, artifact):
    assert "medusa" in methods() and not {"target", "drafter", "identity"} & set(methods())
    with pytest.raises(ValueError, match="no drafter architecture 'nope'.*medusa"):
        new_drafter("nope", target)
    with pytest.raises(ValueError, match="no setting 'num_head'.*num_heads"):
        new_drafter("medusa", target, num_head=3)
    config = json.loads((artifact / "config.json").read_text())
    (artifact / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type 'llama', expected one of .*medusa"):
        load_drafter(artifact)


def test_what_push_to_hub_uploads_is_the_artifact(target, tmp_path, monkeypatch):
    uploaded = {}

    def upload(self, working_dir, repo_id, *_args, **_options):
        uploaded[repo_id] = {file.name: file.read_bytes() for file in Path(working_dir).iterdir()}

    class Hub:
        repo_id = "someone/drafter"
        save = create_repo = lambda self, *_args, **_options: self

    monkeypatch.setattr(DrafterModel, "_upload_modified_files", upload)
    for name in ("hf_api", "create_repo", "create_and_tag_model_card"):  # the first by transformers 5.23, the second by 5.17
        monkeypatch.setattr(f"transformers.utils.hub.{name}", lambda *_args, **_options: Hub(), raising=False)
    drafter = new_drafter("medusa", target, num_heads=2)
    drafter.push_to_hub("someone/drafter")
    assert set(uploaded["someone/drafter"]) == {"config.json", "model.safetensors"}
    drafter.save_pretrained(tmp_path)
    assert uploaded["someone/drafter"]["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("depth", [1, 4, 5, 20])
def test_default_paths(depth):
    tree = StaticTree.from_paths(default_paths(depth))
    assert tree.max_depth == depth and tree.num_nodes <= max(16, depth + 1)
    assert tree.paths[:depth] == tuple((0,) * k for k in range(1, depth + 1))


@pytest.mark.parametrize("vocab", [5, 67, 64 * 40, 64 * 40 + 1, 5000])
@pytest.mark.parametrize("count", [1, 3])
def test_ranked_is_topk(vocab, count):
    logits = torch.randn(7, 2, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[3, :, -1], logits[4, :, -2:] = 9.0, torch.tensor([8.0, 9.0])
    assert torch.equal(ranked(logits, count), logits.topk(count, dim=-1).indices)
