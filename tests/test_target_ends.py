"""A target without its decoder layers: embeddings and output head are read by name, and offline training gives what it gives with all layers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import metrics
from conftest import byte_tokenizer
from random_targets import CONFIGS, random_model, small_tokenizer
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, Gemma2Config, LlamaConfig, Qwen3Config

from draftsmith.models import head, model_files, parallel, weights
from draftsmith.models.target import Target
from draftsmith.train import data_cli, distill, eagle, medusa, setup
from draftsmith.train.recipe import Recipe, load

ROOT = Path(__file__).resolve().parents[1]


def in_memory(target):
    """Names of the target's parameters and buffers that have memory."""
    return {name for name, tensor in (*target.model.named_parameters(), *target.model.named_buffers()) if not tensor.is_meta}


def ends_of(target):
    """Names of the parameters and buffers of its input embeddings and output head."""
    modules = {target.model.get_input_embeddings(), target.head}
    names = {name for name, _ in (*target.model.named_parameters(remove_duplicate=False), *target.model.named_buffers())}
    return {name for name in names if target.model.get_submodule(name.rpartition(".")[0]) in modules}


def bytes_in_memory(target):
    storages = {}
    for tensor in (*target.model.parameters(), *target.model.buffers()):
        if not tensor.is_meta:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_and_head_are_those_of_the_complete_target(name, shard_size, tmp_path, monkeypatch):
    random_model(name).save_pretrained(tmp_path, max_shard_size=shard_size)
    small_tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "8KB")
    read = []

    def counted(source, revision, files, device):
        read.extend(files)
        return weights.read_tensors(source, revision, files, device)

    monkeypatch.setattr(head, "read_tensors", counted)
    for dtype in (None, torch.bfloat16):
        complete, target = Target.load(str(tmp_path), dtype=dtype), Target.load(str(tmp_path), dtype=dtype, layers=False)
        assert complete.has_layers and not target.has_layers
        ids = torch.arange(67)
        hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).to(target.dtype)
        assert torch.equal(target.logits(hidden), complete.logits(hidden)) and torch.equal(target.embed(ids), complete.embed(ids))
        assert torch.equal(target.head_weight, complete.head_weight) and target.head_scale == complete.head_scale
        tied = complete.head_weight is complete.model.get_input_embeddings().weight
        assert (target.head_weight is target.model.get_input_embeddings().weight) == tied
        for word in ("identity", "stop_ids", "dtype", "device", "vocab_size", "hidden_size", "num_layers", "max_positions"):
            assert getattr(target, word) == getattr(complete, word), word
        assert target.model.generation_config.to_dict() == complete.model.generation_config.to_dict()
        assert in_memory(target) <= ends_of(target) and all(part.is_meta for part in target.layers.parameters())
        size = bytes_in_memory(target)
        scale = sum(buffer.nbytes for buffer in target.model.get_input_embeddings().buffers())
        assert size == (1 if tied else 2) * 67 * 32 * target.dtype.itemsize + scale
        assert size < 0.5 * bytes_in_memory(complete)
    assert len(read) == 2 * (1 if tied else 2)  # and no other tensor of the files was read


def test_a_target_without_layers_says_why_it_cannot_run(target_folder):
    target = Target.load(str(target_folder), layers=False)
    ids = torch.arange(4)[None]
    for run in (
        lambda: target.forward(ids),
        lambda: target(ids, taps=(0,)),
        lambda: target.features({"input_ids": ids, "position_ids": ids}),
    ):
        with pytest.raises(
            ValueError, match=r"loaded without its decoder layers.*cannot run; load it with layers=True, or take features.mode"
        ):
            run()
    stored = torch.randn(1, 4, 32)
    assert target.features({"input_ids": ids, "position_ids": ids, "hidden": stored}).hidden is stored


def test_checkpoints_with_other_names_and_untied_heads_are_read_as_transformers_reads_them(tmp_path):
    """GPT-2's published checkpoint has no prefix; a tied config does not tie weights that differ."""
    random_model("gpt2").save_pretrained(tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    assert "wte.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    random_model("qwen3").save_pretrained(tmp_path / "qwen3")
    file = tmp_path / "qwen3" / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.randn(67, 32)}, file, metadata={"format": "pt"})
    for name in ("gpt2", "qwen3"):
        complete, target = (Target.load(str(tmp_path / name), layers=layers) for layers in (True, False))
        assert torch.equal(target.head_weight, complete.head_weight) and torch.equal(
            target.embed(torch.arange(9)), complete.embed(torch.arange(9))
        )
        assert (target.head_weight is target.model.get_input_embeddings().weight) == (name == "gpt2")


@pytest.mark.parametrize(("change", "word"), [("lm_head.weight", "missing"), ("model.embed_tokens.weight", "misshapen")])
def test_ends_that_are_not_there_or_do_not_fit_are_named(change, word, tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: tensor for name, tensor in tensors.items() if name != change}
    if word == "misshapen":
        tensors[change] = torch.zeros(66, 32)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"1 {word} tensors: {change}"):
        Target.load(str(tmp_path), layers=False)


def test_an_index_that_names_a_missing_file_is_said(tmp_path):
    random_model("llama").save_pretrained(tmp_path, max_shard_size="8KB")
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / names["lm_head.weight"]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"no {names['lm_head.weight']} in .*; copy the complete model folder"):
        Target.load(str(tmp_path), layers=False)


def test_what_may_change_the_head_is_loaded_completely(target_folder, tmp_path):
    shutil.copytree(target_folder, tmp_path / "adapted")
    (tmp_path / "adapted" / "adapter_config.json").write_text("{}")
    assert model_files.model_file(str(tmp_path / "adapted"), "adapter_config.json", "") is not None
    with pytest.raises(Exception):  # noqa: B017  transformers reads the adapter, and this one is empty
        Target.load(str(tmp_path / "adapted"), layers=False)


def test_layouts_do_not_matter_to_a_target_without_layers(target_folder, monkeypatch):
    """Head and embeddings are complete on each rank under each layout; what the run cannot do stays refused."""
    with pytest.raises(ValueError, match="target.parallel=shard lays the target out over the processes of a run, this one has one"):
        Target.load(str(target_folder), parallel="shard", layers=False)
    monkeypatch.setattr(parallel, "PartialState", lambda: type("State", (), {"num_processes": 2})())
    expected = Target.load(str(target_folder))
    for layout in ("shard", "tensor"):
        target = Target.load(str(target_folder), parallel=layout, layers=False)
        assert not target.collective and torch.equal(target.head_weight, expected.head_weight) and in_memory(target) == ends_of(target)


@pytest.mark.parametrize("kind", ["bnb-nf4", "ao-int8"])
def test_a_quantised_target_without_layers_has_its_identity(kind, target_folder):
    pytest.importorskip("bitsandbytes" if kind.startswith("bnb") else "torchao")
    complete, target = (Target.load("tiny", dtype=torch.float32, quantise=kind, layers=layers) for layers in (True, False))
    assert target.identity == complete.identity and target.identity.dtype == f"float32+{kind}"
    assert not target.has_layers and torch.equal(target.head_weight, complete.head_weight)


def test_which_recipes_need_the_layers():
    offline = ["features.mode=offline", "features.store=none", "train.tau_prompts=0"]
    assert load(Recipe, "medusa-tiny.yaml", [], shared=True).needs_target_layers
    assert not load(Recipe, "medusa-tiny.yaml", offline, shared=True).needs_target_layers
    assert load(Recipe, "medusa-tiny.yaml", [*offline, "train.tau_prompts=1"], shared=True).needs_target_layers
    assert load(
        Recipe, "medusa-tiny.yaml", ["features.mode=cache", "features.store=none", "train.tau_prompts=0"], shared=True
    ).needs_target_layers
    for start, needed in (("pruned", True), ("random", False)):
        assert load(distill.DistillRecipe, "distill-tiny.yaml", [*offline, f"student.start={start}"]).needs_target_layers is needed


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 257, "max_position_embeddings": 128, "eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}
TARGETS = {
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=2.0, **SIZES),
    "cohere": CohereConfig(logit_scale=0.25, **SIZES),
    "qwen3": Qwen3Config(head_dim=8, tie_word_embeddings=True, **SIZES),
}
METHODS = {
    "medusa": (medusa, "medusa-tiny", ["medusa.distill=0.5"]),
    "medusa, shared head": (medusa, "medusa-tiny", ["medusa.share_head=true"]),
    "eagle3": (eagle, "eagle3-tiny", ["eagle.taps=[0,1]", "eagle.steps=4", "eagle.vocab_size=200"]),
    "eagle1": (eagle, "eagle1-tiny", []),
    "distill": (distill, "distill-tiny", ["student.start=random", "student.layers=1", "student.hidden_size=32", "student.heads=4"]),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """For each target: the keys that name it, its data and its captured features."""
    folder = tmp_path_factory.mktemp("stores")
    (folder / "text.txt").write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    keys = {}
    for name, config in TARGETS.items():
        torch.manual_seed(0)
        model = type(random_model(name))(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
        keys[name] = [
            f"target.path={folder / name}",
            "target.dtype=float32",
            f"data.train={folder / 'text.txt'}",
            f"data.cache={folder}",
            "data.near_duplicate=1.0",
            "data.seq_len=32",
            "features.mode=offline",
            f"features.store={folder / name}-store",
            "features.precision=float32",
        ]
        data_cli.run_capture([str(ROOT / "recipes" / "medusa-tiny.yaml"), *keys[name], "features.taps=[0,1]"])
    return keys


# Each method with one target; with all of them those that draft by the target's own head and embeddings.
@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name in TARGETS for method in METHODS if name == "llama" or method in ("medusa, shared head", "eagle1")],
)
def test_offline_training_holds_no_layers_and_gives_the_same_weights(name, method, stores, tmp_path, monkeypatch):
    script, recipe, keys = METHODS[method]
    loaded, read = [], Target.load

    def noted(path, **options):
        target = read(path, **options)
        for parameter in target.model.parameters():
            if not parameter.is_meta:
                # transformers' weights are views of the mapped file, at odd addresses; the last bit of a CPU's matmul depends on them.
                parameter.data = parameter.data.clone()
        loaded.append((options.get("layers", True), target))
        return target

    monkeypatch.setattr(setup.Target, "load", noted)
    steps = [
        "train.steps=3",
        "train.batch_size=4",
        "train.eval_batches=2",
        "train.log_every=1",
        "train.precision=fp32",
        "train.warmup_steps=1",
    ]
    arguments = [str(ROOT / "recipes" / f"{recipe}.yaml"), *stores[name], *keys, *steps, "train.tau_prompts=0"]
    script.main([*arguments, f"train.output={tmp_path / 'ends'}"])
    monkeypatch.setattr(Recipe, "needs_target_layers", True)
    monkeypatch.setattr(distill.DistillRecipe, "needs_target_layers", True)
    script.main([*arguments, f"train.output={tmp_path / 'complete'}"])
    (without, target), (with_layers, complete) = loaded
    assert (without, with_layers) == (False, True) and complete.has_layers
    assert in_memory(target) == ends_of(target) - ({"lm_head.weight"} if name in ("gemma2", "cohere", "qwen3") else set())
    ends, all_layers = metrics(tmp_path / "ends"), metrics(tmp_path / "complete")
    losses = [
        [{key: value for key, value in row.items() if "loss" in key or "valid" in key} for row in rows] for rows in (ends, all_layers)
    ]
    assert losses[0] == losses[1] and sum("loss" in row for row in losses[0]) == 3
    weights = [load_file(tmp_path / run / "artifact" / "model.safetensors") for run in ("ends", "complete")]
    assert weights[0].keys() == weights[1].keys() and all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
