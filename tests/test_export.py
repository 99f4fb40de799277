"""Exports: each drafter into each engine's folder, checked by a second reading, or refused with the engines that take it."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from commands import failing
from conftest import byte_tokenizer
from export_cases import DRAFTERS, IDS, K, L, V, family, save_drafter, save_target
from random_targets import random_model, randomise, small_tokenizer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models import model_files
from draftsmith.models.drafter import new_drafter
from draftsmith.models.formats import engines, export, layouts, plain, verify
from draftsmith.models.formats.engines import ENGINES, ROWS
from draftsmith.models.formats.published import read_published
from draftsmith.models.saving import save_student
from draftsmith.models.target import Target
from draftsmith.models.weights import Header
from draftsmith.train.exchange import export as command

pytest.importorskip("gguf")
# (drafter, engine) that the table has, and that these settings take away.
LEFT_OUT = {
    ("eagle1 of two layers", "nothing"),
    *((name, "eagle") for name in DRAFTERS if name not in ("eagle1", "eagle1 of two layers", "eagle3", "eagle3 of all tokens")),
    *((name, "tgi") for name in ("mlp of own weights", "mlp of one head")),
    ("dflash with its own mask", "sglang"),
    ("dspark with its own mask", "vllm"),
    *(("mlp with an LSTM", engine) for engine in ("vllm", "tgi")),
    *((name, "gguf") for name in ("eagle3 with two taps", "eagle3 of two layers", "eagle3.1", "eagle3 of speculators")),
    *(("eagle3 of speculators", engine) for engine in ("sglang", "tensorrt-llm")),
}
GOOD = [(name, engine) for name in DRAFTERS for engine in ENGINES if (family(name), engine) in ROWS and (name, engine) not in LEFT_OUT]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder with the target and all artifacts."""
    root = tmp_path_factory.mktemp("workshop")
    target = Target.load(str(save_target(root / "target")))
    for name in DRAFTERS:
        save_drafter(name, target, root / name)
    return root


def run(workshop, name, engine, output, *more):
    command.main([str(workshop / name), "--to", engine, "--output", str(output), "--target", str(workshop / "target"), *more])
    return output


@pytest.mark.parametrize("name, engine", GOOD)
def test_each_drafter_is_exported_to_each_engine(workshop, name, engine, tmp_path, capsys):
    folder = run(workshop, name, engine, tmp_path / "out")
    said = capsys.readouterr().out
    assert "checked" in said and f"serve: {ROWS[family(name), engine].serve.split('{')[0].split()[0]}" in said
    note = json.loads((folder / "draftsmith.json").read_text())
    assert note["engine"] == engine and note["family"] == family(name) and note["licences"] == {"target": "mit", "drafter": "apache-2.0"}
    assert len(note["source"]) == 64 and note["files"].keys() == {
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.name != "draftsmith.json"
    }
    assert (folder / "target-LICENSE").read_text() == "Do as you like.\n"
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0") and "## Serve" in card


def test_an_engine_drafts_a_token_where_the_best_tree_has_none(workshop, tmp_path):
    """Which eval chooses where drafting does not pay: engines refuse a draft length of 0, and transformers then drafts nothing."""
    target = Target.load(str(workshop / "target"))
    save_drafter("eagle3", target, tmp_path / "eagle3", tree=[])
    save_drafter("eagle3 of speculators", target, tmp_path / "library", tree=[])
    config = json.loads((save_drafter("student", target, tmp_path / "student") / "config.json").read_text())
    config["draftsmith"]["tree"] = []
    (tmp_path / "student" / "config.json").write_text(json.dumps(config))

    def export_to(name, engine):
        words = [str(tmp_path / name), "--to", engine, "--output", str(tmp_path / f"{name}-{engine}"), "--target", str(workshop / "target")]
        command.main(words)
        return tmp_path / f"{name}-{engine}"

    assert '"num_speculative_tokens":1' in (export_to("eagle3", "vllm") / "README.md").read_text()
    for name in ("eagle3", "student"):
        settings = yaml.safe_load((export_to(name, "tensorrt-llm") / "tensorrt-llm.yaml").read_text())
        assert settings["speculative_config"]["max_draft_len"] == 1
    library = json.loads((export_to("library", "speculators") / "config.json").read_text())
    assert library["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 1
    assert json.loads((export_to("student", "transformers") / "generation_config.json").read_text())["num_assistant_tokens"] == 1


@pytest.mark.parametrize(
    ("name", "more", "tokens"),
    [
        ("dflash", {"block_size": 8}, 7),
        ("dspark", {"block_size": 8}, 8),
        ("dflash with its own mask", {"block_size": 8}, 2),  # causal
        ("eagle3", {}, 2),
    ],
)
def test_a_block_whose_rows_see_each_other_is_served_complete(workshop, name, more, tokens, tmp_path, capsys):
    """Whatever the tree: vLLM makes as many rows as it drafts tokens, and another number of them would change each."""
    target = Target.load(str(workshop / "target"))
    save_drafter(name, target, tmp_path / "short", tree=[[0], [0, 0]], **more)
    command.main([str(tmp_path / "short"), "--to", "vllm", "--output", str(tmp_path / "out"), "--target", str(workshop / "target")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f'"num_speculative_tokens":{tokens}}}' in text for text in (capsys.readouterr().out, card))


def test_every_row_of_the_table_is_tried_and_every_gap_is_refused():
    assert {(family(name), engine) for name, engine in GOOD} == set(ROWS) and len(GOOD) > 40


REFUSED = [
    ("medusa", "sglang", "SGLang does not serve Medusa.*nearest: --to vllm, tgi, tensorrt-llm"),
    ("medusa", "gguf", "llama.cpp does not serve Medusa"),
    ("medusa", "transformers", "its assistant is a causal LM"),
    ("mlp", "sglang", "SGLang does not serve an MLP speculator.*nearest: --to vllm, tgi"),
    ("mlp of own weights", "tgi", "reads heads wrongly that do not share their weights; nearest: --to vllm"),
    ("mlp with an LSTM", "vllm", "has no LSTM: .*; no engine does; it runs here alone"),
    ("dflash with its own mask", "sglang", "lets the rows of a block see all of it; nearest: --to vllm"),
    ("dspark with its own mask", "vllm", "reads no mask embedding of its own: train with dspark.mask_token; no engine does"),
    ("kangaroo", "vllm", r"vLLM does not serve Kangaroo \(it has no such drafter\); no engine does; it runs here alone"),
    ("kangaroo", "gguf", "llama.cpp does not serve Kangaroo"),
    ("mtp", "sglang", r"SGLang does not serve an MTP layer \(it reads one in the target's checkpoint\); nearest: --to checkpoint"),
    (
        "kangaroo",
        "checkpoint",
        "--to checkpoint is for an MTP layer; got Kangaroo; name an engine",
    ),
    ("dflash", "gguf", "llama.cpp does not serve DFlash"),
    ("eagle1", "tensorrt-llm", "refuses EAGLE-1 checkpoints.*nearest: --to vllm, sglang, eagle"),
    ("eagle1", "tgi", "TGI does not serve EAGLE-1"),
    ("eagle3.1", "gguf", "llama.cpp would not draft as this drafter does: it has neither fc_norm.*nearest: --to vllm, sglang"),
    ("eagle3 with two taps", "gguf", "reads three taps, not 2"),
    ("eagle3 with other taps", "eagle", r"reads the outputs of layers \[1, 3, 4\], not \[0, 3, 6\]"),
    ("eagle3 of speculators", "sglang", "has no norm_before_fc; has no norm_before_residual; nearest: --to vllm, speculators"),
    ("peagle", "sglang", "SGLang does not serve P-EAGLE.*nearest: --to vllm"),
    ("hydra", "vllm", "vLLM does not serve Hydra.*nearest: --to hydra"),
    ("student", "speculators", "nearest: --to vllm, sglang"),
    ("student", "tgi", "TGI does not serve a draft model"),
]


@pytest.mark.parametrize("name, engine, words", REFUSED)
def test_what_an_engine_does_not_serve_is_refused_with_what_does(workshop, name, engine, words, tmp_path, capsys):
    words_given = [workshop / name, "--to", engine, "--output", tmp_path / "out", "--target", workshop / "target"]
    line = failing(capsys, command.main, words_given)
    import re

    assert re.search(words, line) and os.listdir(tmp_path) == []


def test_the_shared_head_of_medusa_goes_where_each_engine_looks(workshop, tmp_path):
    head = load_file(workshop / "target" / "model.safetensors")["lm_head.weight"]
    for engine, names in (("vllm", ["lm_head.weight"]), ("tgi", []), ("tensorrt-llm", [f"{k}.1.weight" for k in range(3)])):
        folder = run(workshop, "medusa that shares the head", engine, tmp_path / engine)
        tensors = load_file(folder / "medusa_lm_head.safetensors")
        assert sorted(name for name in tensors if "linear" not in name) == names
        assert all(torch.equal(tensors[name], head) for name in names)
        config = json.loads((folder / "config.json").read_text())
        assert config.get("original_lm_head", False) == (engine == "vllm") and config["medusa_fc_bias"] and "architectures" not in config
        assert ("num_medusa_heads" in config) == (engine == "tensorrt-llm") and config["hidden_size"] == 32
    folder = run(workshop, "medusa that shares, two blocks", "tgi", tmp_path / "two")
    assert "1.2.weight" in load_file(folder / "medusa_lm_head.safetensors")


def test_taps_are_translated_for_each_engine(workshop, tmp_path):
    outputs = [0, 3, 6]
    for engine in ("vllm", "sglang", "tensorrt-llm", "speculators", "gguf"):
        folder = run(workshop, "eagle3 with other taps", engine, tmp_path / engine)
        if engine == "gguf":
            config, _ = plain.gguf_content(folder / "model.gguf")
            assert config["eagle3.target_layers"] == [1, 4, 7]
        else:
            config = json.loads((folder / "config.json").read_text())
            assert config[IDS] == [1, 4, 7]
            assert engine == "speculators" or config["eagle_config"][IDS] == outputs
        assert plain.tapped(engine, config, folder, L) == [1, 4, 7]
    settings = yaml.safe_load((tmp_path / "tensorrt-llm" / "tensorrt-llm.yaml").read_text())["speculative_config"]
    assert settings == {
        "decoding_type": "Eagle3",
        "max_draft_len": K,
        "speculative_model": str(tmp_path / "tensorrt-llm"),
        "eagle3_layers_to_capture": outputs,
    }


def test_the_speculators_folder_is_what_the_library_writes(workshop, tmp_path):
    folder = run(workshop, "eagle3", "speculators", tmp_path / "out")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert not any(name.startswith("midlayer.") for name in tensors) and "layers.0.hidden_norm.weight" in tensors
    assert config["architectures"] == ["Eagle3DraftModel"] and config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False and "model_type" not in config
    assert config["speculators_config"]["verifier"] == {"name_or_path": str(workshop / "target"), "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
    assert config["transformer_layer_config"]["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_folders_of_earlier_versions_of_speculators_are_read(workshop, tmp_path):
    folder = run(workshop, "eagle3", "speculators", tmp_path / "out")
    (folder / "draftsmith.json").unlink()
    before = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(before | {"architectures": ["Eagle3Speculator"], "has_no_defaults_at_init": False}))
    target = Target.load(str(workshop / "target"))
    drafter, ours = read_published(str(folder), target), load_file(workshop / "eagle3" / "model.safetensors")
    assert ours and all(torch.equal(tensor, ours[name]) for name, tensor in drafter.state_dict().items() if name in ours)


def test_a_student_of_a_half_precision_target(tmp_path):
    """RoPE's frequencies are no weights: those of a wide head differ by more in bf16 than a check lets pass."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "intermediate_size": 96, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 256}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}
    models = [
        randomise(LlamaForCausalLM(LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_hidden_layers=2, **sizes)), 0.1)
        for heads in (1, 2)
    ]
    models[0].to(torch.bfloat16).save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"))
    entry = {"target": target.identity.to_dict(), "tree": [[0], [0, 0]], "confidence": 0.0, "training": None}
    save_student(models[1], tmp_path / "student", entry, 2)
    byte_tokenizer().save_pretrained(tmp_path / "student")
    for engine in ("vllm", "transformers", "gguf"):
        run(tmp_path, "student", engine, tmp_path / engine)
    assert {tensor.dtype for tensor in load_file(tmp_path / "vllm" / "model.safetensors").values()} == {torch.bfloat16}


def test_an_engine_is_started_with_a_folder_of_the_target_that_ships():
    assert engines.serving(ROWS["medusa", "vllm"], "tiny", "heads", 3).startswith("vllm serve models/tiny ")


@pytest.mark.parametrize("cached", [True, False])
def test_the_terms_of_a_target_of_the_hub_go_along(cached, tmp_path, monkeypatch):
    """Those that are in the Hub's cache: nothing is asked of the network."""
    monkeypatch.setattr(
        model_files, "try_to_load_from_cache", lambda name, file: str(tmp_path / file) if cached and name == "org/model" else None
    )
    assert model_files.folder_at_hand("org/model") == (tmp_path if cached else None)
    assert model_files.folder_at_hand("a model that nobody has / ") is None and model_files.folder_at_hand("tiny").name == "tiny"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_files.folder_at_hand("~") == tmp_path


def test_a_student_has_what_older_readers_need(workshop, tmp_path):
    folder = run(workshop, "student with more rows", "transformers", tmp_path / "out")
    config, generation = (json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] is None and config["torch_dtype"] == "float32"
    assert generation["num_assistant_tokens"] == K and generation["assistant_confidence_threshold"] == 0.0
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["vocab_size"] == V and all(
        len(t) == V for n, t in load_file(folder / "model.safetensors").items() if "embed" in n or "head" in n
    )


def test_a_student_that_lacks_tokens_reads_and_proposes_as_here():
    from draftsmith.models.formats.student import fitted

    for tied in (False, True):
        torch.manual_seed(2)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": tied}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)).eval()
        padded = fitted(model, 23)
        ids = torch.tensor([[3, 22, 5, 19, 20, 1]])
        with torch.no_grad():
            ours, theirs = model(ids.clamp(max=19)).logits, padded(ids).logits
        torch.testing.assert_close(theirs[..., :20], ours, rtol=0, atol=1e-6)  # a CPU may sum the last columns in another order
        torch.testing.assert_close(theirs[..., 20:], theirs[..., 19:20].expand(-1, -1, 3), rtol=0, atol=1e-6)
        assert model.config.vocab_size == 20 and padded.config.vocab_size == 23


def test_the_dtype_is_the_targets_unless_another_is_named(workshop, tmp_path):
    assert load_file(run(workshop, "medusa", "vllm", tmp_path / "a") / "medusa_lm_head.safetensors")["0.1.weight"].dtype == torch.float32
    half = run(workshop, "medusa", "vllm", tmp_path / "b", "--dtype", "bfloat16")
    assert load_file(half / "medusa_lm_head.safetensors")["0.1.weight"].dtype == torch.bfloat16
    for name in ("eagle3", "eagle1", "student"):  # what is rounded is compared with our own, rounded
        run(workshop, name, "vllm", tmp_path / name, "--dtype", "bfloat16")
    run(workshop, "eagle3", "gguf", tmp_path / "g", "--dtype", "bfloat16")


def test_the_dtype_of_a_target_is_that_of_most_weights_and_on_the_hub_what_its_config_says(workshop, tmp_path, monkeypatch):
    copy = shutil.copytree(workshop / "target", tmp_path / "target")
    tensors = load_file(copy / "model.safetensors")
    mixed = {name: tensor.bfloat16() if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    save_file(mixed, copy / "model.safetensors", {"format": "pt"})
    assert command.open_target(str(copy))[1] == torch.bfloat16
    config = json.loads((copy / "config.json").read_text())
    real = Target.load
    monkeypatch.setattr(Target, "load", lambda name, dtype, **options: real(str(copy), dtype=torch.float32, layers=False))
    for key, said, dtype in (
        ("dtype", "bfloat16", torch.bfloat16),
        ("torch_dtype", "float16", torch.float16),
        ("dtype", None, torch.float32),
    ):
        (copy / "config.json").write_text(json.dumps({name: value for name, value in config.items() if "dtype" not in name} | {key: said}))
        assert command.open_target(str(copy))[1] == dtype


def test_the_dtype_of_a_quantised_target_is_that_of_what_is_not_quantised(monkeypatch):
    headers = {"layer": Header("a", "F8_E4M3", (64, 64)), "scale": Header("a", "F32", (4,)), "norm": Header("a", "BF16", (64,))}
    monkeypatch.setattr(Target, "load", lambda name, dtype, **options: dtype(headers))
    assert command.open_target("quantised")[1] == torch.bfloat16


def test_an_export_changes_nothing_that_is_exported_again(workshop, tmp_path):
    source, _ = command.open_source(str(workshop / "eagle3"), str(workshop / "target"))
    before = {name: tensor.clone() for name, tensor in source.drafter.state_dict().items()}
    export.export(source, "vllm", tmp_path / "half", torch.bfloat16)
    after = source.drafter.state_dict()
    assert all(tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_an_export_of_an_export_says_once_how_to_serve_it_and_keeps_the_confidences(workshop, tmp_path):
    copy = shutil.copytree(workshop / "medusa", tmp_path / "artifact")
    config = json.loads((copy / "config.json").read_text())
    weights = {name: [[0.1, 0.2, 0.3]] * 3 for name in ("greedy", "top", "shared-noise", "drawn")}
    (copy / "config.json").write_text(json.dumps(config | {"confidence_weights": weights}))
    folder = copy
    for engine in ("vllm", "tgi", "tensorrt-llm"):
        given = ["--to", engine, "--output", str(tmp_path / engine), "--target", str(workshop / "target")]
        command.main([str(folder), *given])
        folder = tmp_path / engine
        text = (folder / "README.md").read_text()
        assert text.count("## Serve") == 1 and f"Written for {ENGINES[engine]}," in text
    assert read_published(str(folder), Target.load(str(workshop / "target"))).config.confidence_weights == weights


def test_an_exported_dspark_stops_where_the_artifact_does(workshop, tmp_path):
    target = Target.load(str(workshop / "target"))
    stops = {"confidence": 0.25, "temperatures": [1.5] * 8}
    save_drafter("dspark", target, tmp_path / "artifact", block_size=8, **stops)
    folder = tmp_path / "out"
    command.main([str(tmp_path / "artifact"), "--to", "vllm", "--output", str(folder), "--target", str(workshop / "target")])
    config = read_published(str(folder), target).config
    assert {"confidence": config.confidence, "temperatures": config.temperatures} == stops
    note = json.loads((folder / "draftsmith.json").read_text())
    for name, value in (("confidence", "high"), ("temperatures", 3), ("temperatures", [1.0])):
        (folder / "draftsmith.json").write_text(json.dumps(note | {name: value}))
        with pytest.raises(ValueError, match=f"got {name} "):
            read_published(str(folder), target)


def test_heads_that_share_a_head_with_soft_capping(tmp_path):
    random_model("gemma2").save_pretrained(tmp_path / "target")
    small_tokenizer().save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"))
    drafter = new_drafter("medusa", target, num_heads=2, share_head=True)
    randomise(drafter, 0.2).save_pretrained(tmp_path / "artifact")
    source, _ = command.open_source(str(tmp_path / "artifact"), str(tmp_path / "target"))
    exported = export.export(source, "vllm", tmp_path / "out", torch.float32)
    assert any("without its soft-capping: equal first choices" in note for note in exported.notes)


def test_nothing_is_written_over_other_content_or_through_links(workshop, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    (tmp_path / "link").symlink_to(mine)
    for output, words in ((mine, "no export wrote"), (tmp_path / "link", "is a link"), (mine / "letter.txt", "is a file")):
        given = [workshop / "medusa", "--to", "vllm", "--output", output, "--target", workshop / "target"]
        assert words in failing(capsys, command.main, given)
    assert os.listdir(mine) == ["letter.txt"]
    folder = run(workshop, "medusa", "vllm", tmp_path / "out")
    (folder / "left.txt").write_text("")
    run(workshop, "eagle3", "vllm", folder)  # an earlier export is replaced
    assert (folder / "model.safetensors").is_file() and not (folder / "left.txt").exists()


def test_a_failed_write_leaves_the_earlier_export(workshop, tmp_path, monkeypatch):
    folder = run(workshop, "medusa", "vllm", tmp_path / "out")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full(*_):
        raise OSError("no space left on device")

    for broken in ("models.formats.eagle.save_file", "inference.durable.os.fsync"):
        monkeypatch.setattr(f"draftsmith.{broken}", full)
        with pytest.raises(OSError):
            run(workshop, "eagle3", "vllm", folder)
        monkeypatch.undo()
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("word", ["eagle3", "eagle-", "DFlash", "dspark"])
def test_a_path_that_vllm_misreads_is_refused(workshop, word, tmp_path, capsys):
    output = tmp_path / f"my-{word}x"
    given = [workshop / "medusa", "--to", "vllm", "--output", output, "--target", workshop / "target"]
    assert "takes another method" in failing(capsys, command.main, given) and not output.exists()
    run(workshop, "eagle3", "vllm", output)  # the method of EAGLE is not overridden


def test_an_export_that_fails_its_own_check_is_not_there(workshop, tmp_path, capsys, monkeypatch):
    wrong = layouts.Layout((("0.0.linear.{rest}", ("1.0.linear.{rest}",)), ("1.0.linear.{rest}", ("0.0.linear.{rest}",)), layouts._SAME))
    monkeypatch.setattr("draftsmith.models.formats.medusa.MEDUSA", wrong)
    given = [workshop / "medusa", "--to", "vllm", "--output", tmp_path / "out", "--target", workshop / "target"]
    line = failing(capsys, command.main, given)
    assert "failed its own check" in line and "logits differ" in line and os.listdir(tmp_path) == []


def test_a_gguf_whose_rope_is_not_interleaved_is_seen(workshop, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("draftsmith.models.formats.gguf_file.rotated", lambda rows, heads: rows)
    for name in ("student", "eagle3"):
        given = [workshop / name, "--to", "gguf", "--output", tmp_path / "out", "--target", workshop / "target"]
        assert "logits differ" in failing(capsys, command.main, given)


def test_tokenizers_that_llama_cpp_may_split_otherwise_are_refused(workshop, tmp_path, capsys):
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    from draftsmith.models.formats.gguf_file import check_student, check_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(workshop / "target")
    assert check_tokenizer(tokenizer)["pre"] == "gpt-2"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    assert check_tokenizer(tokenizer)["pre"] == "smollm"
    for other in (pre_tokenizers.Whitespace(), pre_tokenizers.Sequence([pre_tokenizers.Split("x", "isolated"), byte_level])):
        tokenizer.backend_tokenizer.pre_tokenizer = other
        with pytest.raises(ValueError, match="only byte-level BPE split as"):
            check_tokenizer(tokenizer)
    with pytest.raises(ValueError, match="fast tokenizer"):
        check_tokenizer(None)
    from random_targets import random_model

    with pytest.raises(ValueError, match="only plain Llamas .* model_type qwen3"):
        check_student(random_model("qwen3"))


def test_layouts_are_read_both_ways():
    cases = {
        layouts.MIDLAYER: {"layers.0.mlp.up_proj.weight": "midlayer.mlp.up_proj.weight", "fc.weight": "fc.weight"},
        layouts.medusa_blocks(2): {"1.0.linear.bias": "blocks.1.layers.0.bias", "3.2.weight": "lm_heads.3.weight"},
        layouts.GGUF_LLAMA: {"model.layers.11.self_attn.q_proj.weight": "blk.11.attn_q.weight", "model.norm.weight": "output_norm.weight"},
        layouts.GGUF_EAGLE3: {"layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight", "d2t": "d2t", "norm.weight": "output_norm.weight"},
    }
    for layout, names in cases.items():
        for ours, theirs in names.items():
            assert layout.theirs(ours) == (theirs,) and layout.ours(theirs) == ours
    assert layouts.MIDLAYER.ours("layers.0.mlp.up_proj.weight") is None
    two = layouts.NUMBERED.theirs("layers.1.input_layernorm.weight")
    assert two == ("layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight")
    assert {layouts.NUMBERED.ours(name) for name in two} == {"layers.1.input_layernorm.weight"}
    assert layouts.NUMBERED.theirs("layers.0.input_layernorm.weight") == ("layers.0.input_layernorm.weight",)


def test_the_second_reading_shares_nothing_with_what_it_judges():
    text = Path(plain.__file__).read_text()
    assert "draftsmith." not in text.split('"""', 2)[2]
    assert engines.serving(ROWS["eagle3", "vllm"], "t", "f", 4).endswith(
        """--speculative-config '{"method":"eagle3","model":"f","num_speculative_tokens":4}'"""
    )
    assert verify.EXACT < 1e-3


def test_folders_of_this_machine_are_no_part_of_the_path_that_an_engine_reads(workshop, tmp_path):
    """`publish` writes into a temporary folder; vLLM takes a path with these words for a method's name."""
    source, _ = command.open_source(str(workshop / "medusa"), str(workshop / "target"))
    folder = tmp_path / "eagle3-and-medusa" / "heads"
    with pytest.raises(ValueError, match="the path has 'eagle3' in it"):
        export.export(source, "vllm", folder, torch.float32)
    export.export(source, "vllm", folder, torch.float32, called="someone/heads")
    assert (folder / "config.json").is_file()
