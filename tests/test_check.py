"""Each trap that the rules of engines name: our export does not fall into it, and check says so of a folder that does."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from commands import failing
from export_cases import IDS, D, H, L, V, edited, save_drafter, save_target
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models.drafter import load_drafter
from draftsmith.models.formats import published, verify
from draftsmith.models.formats.engines import ENGINES, ROWS
from draftsmith.models.target import Target
from draftsmith.train.exchange import check as command
from draftsmith.train.exchange import export

BASES = {
    "medusa": ("medusa", "vllm"),
    "medusa for tgi": ("medusa", "tgi"),
    "shared": ("medusa that shares the head", "vllm"),
    "peagle": ("peagle", "vllm"),
    "mlp": ("mlp", "vllm"),
    "mlp for tgi": ("mlp", "tgi"),
    "eagle1": ("eagle1", "vllm"),
    "eagle3": ("eagle3", "vllm"),
    "all tokens": ("eagle3 of all tokens", "vllm"),
    "other taps": ("eagle3 with other taps", "vllm"),
    "two taps": ("eagle3 with two taps", "vllm"),
    "two layers": ("eagle3 of two layers", "vllm"),
    "3.1": ("eagle3.1", "vllm"),
    "speculators": ("eagle3", "speculators"),
    "dflash": ("dflash", "vllm"),
    "dflash for sglang": ("dflash", "sglang"),
    "own mask": ("dflash with its own mask", "vllm"),
    "dspark": ("dspark", "vllm"),
    "student": ("student", "transformers"),
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    root = tmp_path_factory.mktemp("workshop")
    target = Target.load(str(save_target(root / "target")), dtype=torch.float32)
    for base, (name, engine) in BASES.items():
        if not (root / name).exists():
            save_drafter(name, target, root / name)
        given = [str(root / name), "--to", engine, "--output", str(root / "out" / base), "--target", str(root / "target")]
        export.main(given)
    return root


@pytest.fixture(scope="module")
def target(workshop):
    return Target.load(str(workshop / "target"), dtype=torch.float32, layers=False)


def having(**changes):
    return lambda config, tensors: config.update(changes)


def lacking(*names):
    return lambda config, tensors: [(config if name in config else tensors).pop(name) for name in names]


def renamed(start, to):
    def change(config, tensors):
        for name in [name for name in tensors if name.startswith(start)]:
            tensors[to + name.removeprefix(start)] = tensors.pop(name)

    return change


def put(name, made):
    return lambda config, tensors: tensors.update({name: made(tensors)})


def nested(**changes):
    return lambda config, tensors: config["eagle_config"].update(changes)


def both(*changes):
    return lambda config, tensors: [change(config, tensors) for change in changes]


# By name: the export, the engine, what is spoilt, and what is said of it.
TRAPS = {
    # Medusa
    "hidden size left out": ("medusa", "vllm", lacking("hidden_size"), "hidden_size missing, which is 4096"),
    "vocabulary left out": ("medusa", "vllm", lacking("vocab_size"), "vocab_size missing, which is 32001"),
    "biases dropped": ("medusa", "vllm", lacking("medusa_fc_bias"), "dropped without a word"),
    "biases said, none there": (
        "medusa",
        "vllm",
        lambda c, t: [t.pop(name) for name in list(t) if name.endswith("bias")],
        "biases of the blocks are missing",
    ),
    "heads without output layers": ("medusa", "vllm", lacking(*(f"{k}.1.weight" for k in range(3))), "accepts nothing"),
    "shared head not said": ("shared", "vllm", lacking("original_lm_head"), "output layers of 3 heads are missing"),
    "shared head not there": ("shared", "vllm", lacking("lm_head.weight"), "the target's head is not used"),
    "two counts of heads": ("medusa", "vllm", having(num_heads=2), "counts heads twice"),
    "fewer heads than said": ("medusa", "vllm", having(medusa_num_heads=4), "tensors are missing: 3.0.linear"),
    "smaller vocabulary": ("medusa", "vllm", having(truncated_vocab_size=40), "truncated_vocab_size, which vLLM 0.32 cannot read"),
    "token map": ("medusa", "vllm", having(token_map="x.pt"), "token_map"),
    "unknown architecture": ("medusa", "vllm", having(architectures=["Medusa"]), "vLLM knows MedusaModel alone"),
    "architectures for TGI": ("medusa for tgi", "tgi", having(architectures=["MedusaModel"]), "leave it out"),
    "TGI without layers": ("medusa for tgi", "tgi", lacking("medusa_num_layers"), "lacks medusa_num_layers"),
    "TGI without a target": ("medusa for tgi", "tgi", lacking("base_model_name_or_path"), "lacks base_model_name_or_path"),
    "TensorRT-LLM's count": ("medusa", "tensorrt-llm", having(), "lacks num_medusa_heads"),
    "TensorRT-LLM's heads": ("shared", "tensorrt-llm", having(num_medusa_heads=3), "an output layer of its own"),
    "tensors nobody reads": ("medusa", "vllm", put("9.extra", lambda t: torch.ones(1)), "read by nothing: 9.extra"),
    # P-EAGLE
    "no token for masks": ("peagle", "vllm", lacking("mask_token_id"), "lacks mask_token_id"),
    "no features for masks": ("peagle", "vllm", lacking("mask_hidden"), "parallel_drafting is true and mask_hidden is missing"),
    "another mask": ("peagle", "vllm", having(mask_token_id=V), "expected a token of the target"),
    # MLP speculators
    "a class of nobody": ("dflash", "vllm", having(architectures=["DFlash"]), "expected \\['DFlashDraftModel'\\]"),
    "a block of another target": ("dflash", "vllm", having(hidden_size=64), "hidden_size 64, target"),
    "no taps named": ("dflash", "vllm", lambda c, t: c["dflash_config"].pop("target_layer_ids"), "names no target_layer_ids"),
    "taps that are inputs": (
        "dflash",
        "vllm",
        lambda c, t: c["dflash_config"].update(target_layer_ids=[1, 4, L]),
        "are not the outputs of",
    ),
    "no mask token": ("dflash", "vllm", lambda c, t: c["dflash_config"].update(mask_token_id=V), "masks need a token of the target"),
    "no block size": ("dflash", "vllm", lacking("block_size"), "lacks block_size: 16 is taken"),
    "scaled RoPE": ("dflash", "vllm", having(rope_scaling={"type": "linear", "factor": 2.0}), "scales its RoPE by .*'linear'"),
    "no base of RoPE": ("dflash", "vllm", lacking("rope_theta", "rope_parameters"), "names no rope_theta: 1000000"),
    "norms of heads left out": (
        "dflash",
        "vllm",
        lacking("layers.1.self_attn.k_norm.weight"),
        "tensors are missing: layers.1.self_attn.k_norm",
    ),
    "an own mask for SGLang": (
        "dflash for sglang",
        "sglang",
        put("mask_embedding", lambda t: torch.ones(H)),
        "mask_embedding is read by nothing",
    ),
    "the confidence left out": ("dspark", "vllm", lacking("confidence_head_with_markov"), "the confidence is dropped, or read"),
    "another class": (
        "mlp",
        "vllm",
        having(architectures=["ArcticMLPSpeculatorPreTrainedModel"]),
        "vLLM knows MLPSpeculatorPreTrainedModel",
    ),
    "candidates of other heads": ("mlp", "vllm", having(top_k_tokens_per_head=[1, 1]), "2 numbers for 3 heads: refused"),
    "scaling left out": ("mlp", "vllm", lacking("scale_input"), "lacks scale_input: false is taken"),
    "ties left out": ("mlp", "vllm", lacking("tie_weights"), "lacks tie_weights: false is taken"),
    "another target's size": ("mlp", "vllm", having(emb_dim=64), "emb_dim 64, target"),
    "no inner size": ("mlp for tgi", "tgi", having(inner_dim=0), "by which tokens are weighed"),
    "tied ones once, for vLLM": ("mlp", "vllm", lacking("speculator.proj.1.weight"), "are left random: proj.1.weight"),
    "tied ones once, for TGI": ("mlp for tgi", "tgi", lacking("speculator.emb.2.weight"), "emb.2.weight; tied ones too are read"),
    "tied ones that differ": (
        "mlp",
        "vllm",
        put("speculator.ln.1.bias", lambda t: torch.ones(20)),
        "ln.1.bias is not speculator.ln.0.bias",
    ),
    "no prefix": ("mlp for tgi", "tgi", renamed("speculator.", ""), "do not begin with speculator."),
    "a norm too many": ("mlp", "vllm", put("speculator.ln0.weight", lambda t: torch.ones(H)), "read by nothing: ln0.weight"),
    "heads that say they are not tied": ("mlp for tgi", "tgi", having(tie_weights=False), "reads heads wrongly"),
    "a speculator of no target": ("mlp for tgi", "tgi", lacking("base_model_name_or_path"), "lacks base_model_name_or_path"),
    # EAGLE-1
    "bias left out": ("eagle1", "eagle", lacking("bias"), "lacks bias, so that fc gets a random one"),
    "bias true": ("eagle1", "vllm", having(bias=True), "q, k and v biases that it leaves uninitialised"),
    "a bias that is dropped": ("eagle1", "vllm", put("fc.bias", lambda t: torch.ones(H)), "fc.bias is not zero, and is dropped"),
    "no bias in the file": ("eagle1", "sglang", lacking("fc.bias"), "left random; write zeros"),
    "one architecture": ("eagle1", "vllm", having(architectures=["LlamaForCausalLMEagle"]), "are refused; write"),
    "an input norm": ("eagle1", "vllm", put("layers.0.input_layernorm.weight", lambda t: torch.ones(H)), "EAGLE-1's first layer has none"),
    # EAGLE-3
    "no map": ("eagle3", "vllm", lacking("d2t", "t2d"), f"draft_vocab_size is {D} of {V} and d2t is missing: it loads and accepts nothing"),
    "absolute map": ("eagle3", "vllm", put("d2t", lambda t: t["d2t"] + torch.arange(D)), "d2t holds target ids"),
    "map out of range": ("eagle3", "vllm", both(put("d2t", lambda t: t["d2t"] + V), lacking("t2d")), "expected different ids in 0"),
    "map of another run": ("eagle3", "vllm", put("t2d", lambda t: t["t2d"].roll(1)), "d2t and t2d disagree"),
    "map not ascending": (
        "eagle3",
        "vllm",
        put("d2t", lambda t: (t["d2t"] + torch.arange(D)).flip(0) - torch.arange(D)),
        "not in ascending order",
    ),
    "a map of all tokens": ("all tokens", "vllm", put("d2t", lambda t: torch.zeros(V, dtype=torch.int64)), "although the draft vocabulary"),
    "target_hidden_size null": ("eagle3", "vllm", having(target_hidden_size=None), "target_hidden_size is null"),
    "no embedding": (
        "eagle3",
        "eagle",
        both(having(target_hidden_size=H), lacking("embed_tokens.weight")),
        "the target's embedding is not loaded",
    ),
    "random embedding": ("eagle3", "vllm", put("embed_tokens.weight", lambda t: torch.randn(V, H)), "random numbers?"),
    "no head": ("eagle3", "sglang", lacking("lm_head.weight"), "lm_head.weight is missing, and is left random"),
    "no fc": ("eagle3", "vllm", lacking("fc.weight"), "fc.weight is missing: vLLM does not notice"),
    "a prefix": ("eagle3", "vllm", renamed("midlayer.", "model.midlayer."), "names begin with model."),
    "other names of the layer": ("eagle3", "eagle", renamed("midlayer.", "layers.0."), "is not read; name it midlayer."),
    "midlayer in speculators": ("speculators", "speculators", renamed("layers.0.", "midlayer."), "makes a fresh one without a word"),
    "residual unsaid": ("speculators", "speculators", lacking("norm_before_residual"), "vLLM takes true, speculators false"),
    "rope nowhere": ("eagle3", "vllm", lacking("rope_theta", "rope_parameters"), "names no rope_theta: 10000 is taken"),
    "rope once": ("eagle3", "vllm", lacking("rope_theta"), "at the top level and in rope_parameters"),
    "short context": ("eagle3", "sglang", having(max_position_embeddings=64), "less than the target's context 96"),
    "taps of outputs at the top": ("eagle3", "vllm", having(**{IDS: [1, 3, 4]}), "expected these one less"),
    "no taps at the top": ("other taps", "vllm", lacking(IDS), re.escape("write [1, 4, 7]")),
    "no nested taps": ("other taps", "sglang", lacking("eagle_config"), re.escape("layers [2, 4, 5] are read; write [0, 3, 6]")),
    "nested inputs": ("other taps", "sglang", nested(**{IDS: [1, 4, 7]}), "expected these one less"),
    "taps not ascending": ("other taps", "vllm", both(having(**{IDS: [7, 4, 1]}), lacking("eagle_config")), "they are sorted"),
    "a tap twice": ("two taps", "vllm", both(having(**{IDS: [1, 1]}), lacking("eagle_config")), "none may be given twice"),
    "no such tap": ("other taps", "vllm", both(having(**{IDS: [1, 4, L + 1]}), lacking("eagle_config")), f"layers of 0..{L}"),
    "two taps uncounted": ("two taps", "vllm", lacking("eagle_config", "num_aux_hidden_states"), "num_aux_hidden_states should be 2"),
    "fc of other taps": ("eagle3", "vllm", both(having(**{IDS: [2, 4]}), lacking("eagle_config")), "fc.weight reads 96 numbers"),
    "another architecture": ("eagle3", "vllm", having(architectures=["LlamaForCausalLMEagle3B"]), "architectures .* are refused"),
    "a norm of one name": ("two layers", "sglang", lacking("layers.1.hidden_norm.weight"), "hidden_norm.weight is missing, and is left"),
    "a norm of the other name": ("two layers", "vllm", lacking("layers.1.input_layernorm.weight"), "input_layernorm.weight is missing"),
    "3.1 unsaid": ("3.1", "vllm", having(fc_norm=False), "fc_norm is False and fc_norm.0.weight is there"),
    "3.1 without its norm": ("3.1", "vllm", lacking("fc_norm.0.weight"), "fc_norm.0.weight is missing"),
    "3.1 in SafeAILab's code": ("3.1", "eagle", having(), "it has neither fc_norm nor norm_output"),
    # Draft models
    "another vocabulary": ("student", "vllm", having(vocab_size=V - 1), f"vocab_size is {V - 1}, the target's {V}"),
    "θ in one place": ("student", "transformers", lacking("rope_theta"), "transformers 4 takes 10000"),
    "dtype in one place": ("student", "transformers", lacking("torch_dtype"), "transformers 4 loads float32"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_seen_and_ours_is_not_in_it(workshop, target, trap, tmp_path):
    base, engine, change, words = TRAPS[trap]
    copy = edited(workshop / "out" / base, tmp_path / "copy", change)
    lines = verify.faults(copy, target, [engine])
    assert any(re.search(words, line) for line in lines), lines
    assert all(line.startswith(("all: ", ENGINES[engine])) or ENGINES[engine] in line.split(":")[0] for line in lines)
    name, written_for = BASES[base]
    untouched = verify.faults(workshop / "out" / base, target)  # for the engine that it was written for
    assert untouched == []
    if (name.split(" ")[0].split(".")[0], engine) in ROWS and engine == written_for:
        assert not any(re.search(words, line) for line in verify.faults(workshop / "out" / base, target, [engine]))


def test_many_traps_are_tried():
    assert len(TRAPS) > 70 and {engine for _, engine, _, _ in TRAPS.values()} >= {
        "vllm",
        "sglang",
        "tgi",
        "tensorrt-llm",
        "speculators",
        "eagle",
    }


def test_the_settings_of_a_student_that_draft_otherwise(workshop, target, tmp_path):
    for name, key, words in (
        ("generation_config.json", "assistant_confidence_threshold", "a threshold of 0.4 is taken"),
        ("generation_config.json", "num_assistant_tokens", "20 tokens is taken"),
    ):
        copy = edited(workshop / "out" / "student", tmp_path / "copy", having())
        content = json.loads((copy / name).read_text())
        del content[key]
        (copy / name).write_text(json.dumps(content))
        assert any(words in line for line in verify.faults(copy, target, ["transformers"]))
    copy = edited(workshop / "out" / "student", tmp_path / "copy", having())
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "TokenizersBackend"}))
    assert any("transformers 4 refuses" in line for line in verify.faults(copy, target, ["transformers"]))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert any("no tokenizer beside" in line for line in verify.faults(copy, target, ["vllm"]))


def test_files_with_other_names_and_pickles(workshop, target, tmp_path):
    copy = edited(workshop / "out" / "medusa for tgi", tmp_path / "copy", having())
    (copy / "medusa_lm_head.safetensors").rename(copy / "model.safetensors")
    assert any("the only file that is read" in line for line in verify.faults(copy, target, ["tgi"]))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert any("no tokenizer beside the heads" in line for line in verify.faults(copy, target, ["tgi"]))
    torch.save(load_file(copy / "model.safetensors"), copy / "medusa_lm_head.pt")
    (copy / "model.safetensors").unlink()
    (line,) = verify.faults(copy, target, ["vllm"])
    assert "only pickled weights" in line and "weights_only=True" in line and "medusa_lm_head.safetensors" in line


def test_the_command_that_converts_a_pickle_works(workshop, tmp_path):
    import shlex
    import subprocess
    import sys

    copy = edited(workshop / "out" / "eagle1", tmp_path / "copy", having())
    tensors = load_file(copy / "model.safetensors")
    torch.save(tensors, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    (line,) = verify.faults(copy, Target.load(str(workshop / "target"), layers=False), ["vllm"])
    words = shlex.split(line[line.index("python -c") :])
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
    again = load_file(copy / "model.safetensors")
    assert tensors.keys() == again.keys() and all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_a_path_that_vllm_misreads(workshop, target, tmp_path):
    for base in ("medusa", "student"):
        copy = edited(workshop / "out" / base, tmp_path / "an-eagle3-folder" / base, having())
        assert any("takes another method" in line for line in verify.faults(copy, target, ["vllm"]))


def test_few_layers_have_no_usual_taps(tmp_path):
    sizes = {"hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    short = Target.wrap(LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=96, **sizes)))
    from draftsmith.models.formats.rules import eagle_faults

    lines = [what for _, what in eagle_faults("eagle3", {"architectures": ["LlamaForCausalLMEagle3"]}, {}, short, tmp_path)]
    assert any("not three of a target of 6" in line for line in lines)


def spoilt(gguf_folder, place, entries, tensors=()):
    """A copy of a GGUF file with other entries, and with other numbers in some tensors, or without them."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(gguf_folder / "model.gguf")
    kind = reader.fields["general.architecture"].contents()
    place.mkdir()
    writer = gguf.GGUFWriter(place / "model.gguf", entries.get("general.architecture", kind))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = entries.get(name, field.contents())
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], sub)
    for tensor in reader.tensors:
        if change := dict(tensors).get(tensor.name, lambda data: data):
            writer.add_tensor(tensor.name, change(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place


def test_traps_of_gguf(workshop, target, tmp_path):
    pytest.importorskip("gguf")
    for name in ("eagle3", "student"):
        given = [str(workshop / name), "--to", "gguf", "--output", str(tmp_path / name), "--target", str(workshop / "target")]
        export.main(given)
        assert verify.faults(tmp_path / name, target) == []
        assert verify.faults(spoilt(tmp_path / name, tmp_path / f"{name}-same", {}), target) == []
        for part in ("blk.0.ffn_down.weight", "output_norm.weight", "token_embd.weight" if name == "student" else "fc.weight"):
            (line,) = verify.faults(spoilt(tmp_path / name, tmp_path / f"{name}-{part}", {}, [(part, lambda data: data * np.nan)]), target)
            assert line.startswith("all: NaN or infinite weights in ")
            (line,) = verify.faults(spoilt(tmp_path / name, tmp_path / f"{name}-no-{part}", {}, [(part, None)]), target)
            assert line.startswith("all: a tensor or an entry is missing")
    tokens = [f"t{i}" for i in range(V)]
    cases = [
        ("student", {"tokenizer.ggml.tokens": tokens}, (), "token 5 is 't5', the target's .*: it serves without drafts"),
        ("student", {"tokenizer.ggml.tokens": tokens + ["x"]}, (), "llama.cpp accepts that, and then aborts"),
        ("student", {"tokenizer.ggml.tokens": tokens[: V - 129]}, (), "more than 128 fewer"),
        ("student", {"general.architecture": "gpt2"}, (), "'gpt2'; expected llama or eagle3"),
        ("student", {"general.architecture": "qwen3"}, (), "'qwen3'; expected llama or eagle3"),
        ("eagle3", {"eagle3.target_layers": [1, 2]}, (), "expected three layers"),
        ("eagle3", {"eagle3.target_layers": [1, 2, L + 1]}, (), "expected three layers"),
        ("eagle3", {"eagle3.target_hidden_size": 64}, (), "target_hidden_size is 64"),
        ("eagle3", {}, [("d2t", lambda data: data - list(range(D)))], "here it holds target ids, no offsets"),
    ]
    for number, (name, entries, tensors, words) in enumerate(cases):
        lines = verify.faults(spoilt(tmp_path / name, tmp_path / f"case-{number}", entries, tensors), target)
        assert any(re.search(words, line) for line in lines), (words, lines)


def test_a_gguf_file_of_a_model_that_is_no_drafter_or_of_no_model_is_said_in_one_line(target, tmp_path):
    gguf = pytest.importorskip("gguf")
    (tmp_path / "other").mkdir()
    writer = gguf.GGUFWriter(tmp_path / "other" / "model.gguf", "qwen3")
    for name in ("blk.0.attn_q_norm.weight", "blk.0.attn_q.bias", "odd"):
        writer.add_tensor(name, np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert verify.faults(tmp_path / "other", target) == ["llama.cpp: general.architecture is 'qwen3'; expected llama or eagle3"]
    written = (tmp_path / "other" / "model.gguf").read_bytes()
    for size in (0, 3, 20, 60, len(written) - 9):
        (tmp_path / "other" / "model.gguf").write_bytes(written[:size])
        with pytest.raises(ValueError, match="model.gguf is damaged or no GGUF file"):
            verify.faults(tmp_path / "other", target)


def test_a_folder_that_is_no_longer_what_was_exported(workshop, target, tmp_path):
    copy = shutil.copytree(workshop / "out" / "eagle3", tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors["norm.weight"] *= 2
    save_file(tensors, copy / "model.safetensors")
    assert verify.faults(copy, target) == ["all: model.safetensors is not what was exported: another file, or a copy cut off"]
    (copy / "model.safetensors").unlink()
    assert verify.faults(copy, target)[0].startswith("all: model.safetensors is not what")


@pytest.mark.parametrize("base", ["medusa", "mlp", "dflash", "eagle3", "student"])
def test_two_files_with_other_values_of_a_tensor(workshop, target, base, tmp_path):
    """Engines differ in which of them they read."""
    engine = [BASES[base][1]]
    copy = edited(workshop / "out" / base, tmp_path / "copy", having())
    file = next(copy.glob("*.safetensors"))
    shutil.copyfile(file, copy / "z.safetensors")
    assert verify.faults(copy, target, engine) == []
    tensors = load_file(file)
    name = min(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.any())
    save_file(tensors | {name: 0 * tensors[name]}, copy / "z.safetensors")
    expected = f"{copy}: {name} in z.safetensors is not that in {file.name}; delete the file that is not meant"
    assert verify.faults(copy, target, engine) == [f"all: {expected}"]
    if base != "student":
        with pytest.raises(ValueError, match=re.escape(expected)):
            published.read_published(str(copy), target)


def made_nan(config, tensors):
    tensors.update({name: tensor * torch.nan if tensor.is_floating_point() else tensor for name, tensor in tensors.items()})


STUDENT_FAULTS = {
    "a layer is missing": (lambda c, t: [t.pop(name) for name in list(t) if ".layers.0." in name], "missing tensors: model.layers.0."),
    "no number": (made_nan, "has NaN or infinite weights"),
    "another size": (having(intermediate_size=3), "misshapen tensors"),
    "no weights": (lambda c, t: t.clear(), "missing tensors"),
}


@pytest.mark.parametrize("fault", STUDENT_FAULTS)
def test_a_draft_model_that_cannot_be_loaded(workshop, target, fault, tmp_path):
    change, says = STUDENT_FAULTS[fault]
    (line,) = verify.faults(edited(workshop / "out" / "student", tmp_path / "copy", change), target)
    assert line.startswith("all: ") and re.search(says, line)


def test_a_draft_model_without_a_shard(workshop, target, tmp_path):
    copy = edited(workshop / "out" / "student", tmp_path / "copy", having())
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    places = {name: shards[at % 2] for at, name in enumerate(sorted(tensors))}
    for shard in shards:
        save_file({name: tensors[name] for name, place in places.items() if place == shard}, copy / shard, metadata={"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert verify.faults(copy, target) == []
    (copy / shards[1]).unlink()
    assert [line for line in verify.faults(copy, target) if line.startswith("all: ")]


def test_a_fault_for_one_engine_hides_none_for_all(workshop, target, tmp_path):
    """TensorRT-LLM wants a key that vLLM does without; SGLang and SafeAILab's code another name."""
    lines = verify.faults(edited(workshop / "out" / "medusa", tmp_path / "nan", made_nan), target)
    assert any(line.startswith("TensorRT-LLM: ") for line in lines) and "NaN" in lines[-1] and lines[-1].startswith("all: ")
    lines = verify.faults(edited(workshop / "out" / "eagle3", tmp_path / "cut", lacking("midlayer.mlp.down_proj.weight")), target)
    assert any(line.startswith("speculators: ") for line in lines) and "1 missing tensors: midlayer.mlp.down_proj" in lines[-1]


@pytest.mark.parametrize("base", ["medusa", "dflash", "dspark"])
def test_integers_in_place_of_weights_are_one_line(workshop, target, base, tmp_path):
    copy = edited(workshop / "out" / base, tmp_path / "copy", having())
    file = next(copy.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2 and not re.search(r"emb|lm_head", name))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(ValueError, match="has .* in torch.int8; expected torch.float32 or the like; convert it again"):
        published.read_published(str(copy), target)


def test_a_target_of_another_size_is_said(workshop, tmp_path):
    sizes = {"intermediate_size": 8, "num_hidden_layers": L, "num_attention_heads": 4}
    other = Target.wrap(LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=2 * H, **sizes)), name="other")
    assert "made for a target of hidden size" in verify.faults(edited(workshop / "out" / "eagle3", tmp_path / "copy", having()), other)[-1]


def test_weights_that_float16_does_not_hold(workshop, target, tmp_path, capsys):
    drafter = load_drafter(workshop / "medusa", target)
    with torch.no_grad():
        next(drafter.parameters()).flatten()[0] = 1e6
    drafter.save_pretrained(tmp_path / "large")
    given = [tmp_path / "large", "--to", "vllm", "--output", tmp_path / "out", "--target", workshop / "target", "--dtype"]
    assert re.search(
        r"--dtype float16 holds numbers up to 65,504, .* has 1e\+06; give bfloat16 or float32",
        failing(capsys, export.main, [*given, "float16"]),
    )
    assert not (tmp_path / "out").exists()
    export.main([str(word) for word in (*given, "bfloat16")])


def test_an_engine_that_nobody_knows_and_numbers_without_end(workshop, target, tmp_path):
    copy = shutil.copytree(workshop / "out" / "eagle3", tmp_path / "copy")
    note = json.loads((copy / "draftsmith.json").read_text())
    (copy / "draftsmith.json").write_text(json.dumps(note | {"engine": "nope"}))
    with pytest.raises(ValueError, match=r"draftsmith\.json: `engine` is 'nope'; expected one of vllm, "):
        verify.faults(copy, target)
    copy = edited(workshop / "out" / "eagle3", copy, having(rms_norm_eps=10**400))
    assert any(line.startswith("all: config.json has a value of another kind") for line in verify.faults(copy, target))
    assert verify.faults(edited(workshop / "out" / "eagle3", copy, having(architectures=[[1]])), target)


def test_words_in_place_of_a_flag(workshop, target, tmp_path):
    copy = edited(workshop / "out" / "dflash", tmp_path / "copy", lambda config, _: config["dflash_config"].update(causal="false"))
    assert any("`causal`" in line for line in verify.faults(copy, target))


def test_a_file_that_is_cut_off_is_named(workshop, target, tmp_path):
    copy = shutil.copytree(workshop / "out" / "medusa", tmp_path / "copy")
    weights = copy / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    lines = verify.faults(copy, target)
    assert len(lines) == 2 and "is not what was exported" in lines[0] and f"{weights} is damaged or cut off" in lines[1]
    with pytest.raises(ValueError, match="medusa_lm_head.safetensors is damaged or cut off"):
        published.read_published(str(copy), target)


@pytest.mark.parametrize(
    "base, engine", [("medusa", "sglang"), ("medusa", "gguf"), ("eagle3", "gguf"), ("eagle3", "transformers"), ("student", "tgi")]
)
def test_an_engine_that_serves_no_such_drafter_is_said(workshop, target, base, engine):
    (line,) = verify.faults(workshop / "out" / base, target, [engine])
    assert line.startswith(f"{ENGINES[engine]}: it does not serve ") and line.endswith(" in safetensors")
    _, served = BASES[base]
    assert verify.faults(workshop / "out" / base, target, [served, engine]) == [line]


def test_engines_but_llama_cpp_serve_no_gguf_file(workshop, target, tmp_path, capsys):
    pytest.importorskip("gguf")
    export.main([str(workshop / "eagle3"), "--to", "gguf", "--output", str(tmp_path / "out"), "--target", str(workshop / "target")])
    assert verify.faults(tmp_path / "out", target, ["vllm", "gguf"]) == ["vLLM: it does not serve a GGUF file"]
    assert verify.faults(tmp_path / "out", target, ["gguf"]) == []
    for file in (tmp_path / "out").iterdir():  # as somebody else has it
        if file.name != "model.gguf":
            file.unlink()
    command.main([str(tmp_path / "out"), "--target", str(workshop / "target")])
    assert "nothing wrong was seen" in capsys.readouterr().out
    with pytest.raises(ValueError, match="vLLM serves no GGUF drafter of a folder"):
        command.main([str(tmp_path / "out"), "--target", str(workshop / "target"), "--serve", "vllm"])


def test_a_folder_of_somebody_else_is_held_to_the_engines_that_read_it(workshop, target, tmp_path):
    """Without draftsmith.json, which names the engine."""
    copy = shutil.copytree(workshop / "out" / "eagle3", tmp_path / "copy", ignore=shutil.ignore_patterns("draftsmith.json"))
    assert all("llama.cpp" not in line for line in verify.faults(copy, target))


def test_the_logits_of_another_drafter_are_seen(workshop, target):
    """`differences` is what stands between an export and a wrong name, tap, order or map: each must move the logits."""
    from draftsmith.models.formats.published import read_published

    for base, (name, engine) in BASES.items():
        if base in ("student", "shared"):
            continue
        folder = workshop / "out" / base
        ours = read_published(str(folder), target)
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.mul_(1.01)
        family = "medusa" if name.startswith("medusa") else name[:6]
        assert verify.differences(folder, engine, family, ours, target, verify.EXACT), base


def test_the_command(workshop, tmp_path, capsys):
    given = [str(workshop / "out" / "eagle3"), "--target", str(workshop / "target")]
    capsys.readouterr()
    command.main(given)
    assert "nothing wrong was seen" in capsys.readouterr().out
    copy = edited(workshop / "out" / "eagle3", tmp_path / "copy", both(lacking("d2t", "t2d"), having(target_hidden_size=None)))
    with pytest.raises(SystemExit) as exit:
        command.main([str(copy), "--target", str(workshop / "target"), "--engine", "vllm"])
    lines = capsys.readouterr().out.splitlines()
    assert exit.value.code == 1 and [line.split(" ")[0] for line in lines] == ["vLLM:", "vLLM:", "all:"]
    export.main([str(workshop / "eagle3"), "--to", "gguf", "--output", str(tmp_path / "gguf"), "--target", str(workshop / "target")])
    capsys.readouterr()
    command.main([str(tmp_path / "gguf"), "--target", str(workshop / "target")])
    assert "nothing wrong was seen" in capsys.readouterr().out
    for option in ("--python", "--depth", "--limit", "--max-new-tokens"):
        line = failing(capsys, command.main, [copy, "--target", workshop / "target", option, "3"])
        assert f"{option} is of a run in an engine; give --serve vllm too" in line
    ours = failing(capsys, command.main, [workshop / "eagle3", "--target", workshop / "target"])
    assert "artifact of Draftsmith's own" in ours
