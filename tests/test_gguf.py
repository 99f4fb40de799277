"""GGUF targets: a file gives the model that its weights say, once, and every command takes it."""

import errno
import fcntl
import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import failing, short
from conftest import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.eval import generate
from draftsmith.inference import durable
from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import load_config
from draftsmith.models.target import Target
from draftsmith.train import medusa

gguf = pytest.importorskip("gguf")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def random_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=258, max_position_embeddings=128, **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return model


def write(path, model: LlamaForCausalLM, kind="F32", architecture="llama", without="", parts=1):
    """Write the model as llama.cpp's converter does, and set its matrices to what the file's numbers stand for. `without` is a tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    config, kind = model.config, gguf.GGMLQuantizationType[kind]
    writer.add_file_type({"F32": 0, "F16": 1, "Q8_0": 7}[kind.name])
    if parts > 1:
        writer.add_uint16("split.count", parts)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = sorted(byte_tokenizer().get_vocab().items(), key=lambda entry: entry[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(token for token, _ in tokens), "he"])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    for name, tensor in state.items():
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        stored = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        label = stored.get(name) or f"blk.{layer}.{NAMES[part.removesuffix('.weight')]}.weight"
        if label == without:
            continue
        values = tensor.numpy()
        if tensor.ndim < 2:
            writer.add_tensor(label, values)
            continue
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(label.split(".")[-2])
        if heads:  # the halves of RoPE lie interleaved in GGUF
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        quantised = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(label, quantised, raw_dtype=kind)
        values = gguf.quants.dequantize(quantised, kind).reshape(values.shape)
        if heads:
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        tensor.copy_(torch.from_numpy(values.copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind, dtype", [("F32", torch.float32), ("F16", torch.float16), ("Q8_0", torch.bfloat16)])
def test_the_weights_are_what_the_file_says(tmp_path, cache, kind, dtype):
    model = random_llama()
    write(tmp_path / "model.gguf", model, kind)
    target = Target.load(str(tmp_path / "model.gguf"))
    assert target.dtype == dtype and target.name == str(tmp_path / "model.gguf")
    expected, actual = model.state_dict(), target.model.state_dict()
    assert expected.keys() == actual.keys() and len(expected) == 21
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.to(dtype)), name
    ids = torch.arange(24)[None]
    exact = Target.load(str(tmp_path / "model.gguf"), dtype=torch.float32)
    if kind == "F32":
        with torch.no_grad():
            torch.testing.assert_close(exact.logits(exact.forward(ids).hidden), model(ids).logits)
    bytes_of = byte_tokenizer()("ë he")["input_ids"]
    assert target.tokenizer("ë he")["input_ids"] == [*bytes_of[:-2], 257]
    assert target.tokenizer.chat_template == TEMPLATE and target.stop_ids == {256}
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    assert target.identity.weights_hash == json.loads((folder / "gguf.json").read_text())["hash"]


def test_a_file_without_all_tensors_is_refused(tmp_path, cache):
    """transformers would give them random values."""
    write(tmp_path / "model.gguf", random_llama(), without="blk.1.ffn_up.weight")
    with pytest.raises(
        ValueError, match=r"has 1 missing tensors \(model.layers.1.mlp.up_proj.weight\); download it again, or give safetensors"
    ):
        Target.load(str(tmp_path / "model.gguf"))
    write(tmp_path / "part.gguf", random_llama(), without="blk.1.ffn_up.weight", parts=2)
    with pytest.raises(ValueError, match="; it is one of 2 files: join them with llama-gguf-split --merge, or give safetensors"):
        Target.load(str(tmp_path / "part.gguf"))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_file_is_dequantised_once_and_another_is_another(tmp_path, cache, capsys):
    model = random_llama()
    write(tmp_path / "model.gguf", model)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "other.gguf").symlink_to(tmp_path / "model.gguf")
    first = Target.load(str(tmp_path / "model.gguf")).identity
    assert "once" in capsys.readouterr().err
    again = Target.load(str(tmp_path / "link" / "other.gguf")).identity
    assert "once" not in capsys.readouterr().err and again.weights_hash == first.weights_hash
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    write(tmp_path / "tuned.gguf", model)
    assert Target.load(str(tmp_path / "tuned.gguf")).identity.weights_hash != first.weights_hash
    assert sum(path.is_dir() for path in cache.iterdir()) == 2


def test_an_entry_that_is_edited_in_place_is_seen(tmp_path, cache, capsys, monkeypatch):
    """The header of a large file is megabytes, and samples see little of it. The weights are the same."""
    monkeypatch.setattr(durable, "SAMPLE", 4)
    write(tmp_path / "model.gguf", random_llama())
    first = Target.load(str(tmp_path / "model.gguf"))
    content = (tmp_path / "model.gguf").read_bytes()
    assert content.count(b"eos_token_id") == 1
    at = content.index(b"eos_token_id") + len(b"eos_token_id") + 4  # behind the kind of the value
    assert int.from_bytes(content[at : at + 4], "little") == 256
    (tmp_path / "model.gguf").write_bytes(content[:at] + (7).to_bytes(4, "little") + content[at + 4 :])
    capsys.readouterr()
    second = Target.load(str(tmp_path / "model.gguf"))
    assert "once" in capsys.readouterr().err and 7 not in first.stop_ids and 7 in second.stop_ids
    assert first.identity.weights_hash == second.identity.weights_hash


def test_a_cache_on_a_file_system_without_locks(tmp_path, cache, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    write(tmp_path / "model.gguf", random_llama())
    hashed = Target.load(str(tmp_path / "model.gguf")).identity.weights_hash
    assert [json.loads((path / "gguf.json").read_text())["hash"] for path in cache.iterdir() if path.is_dir()] == [hashed]


def test_commands_take_a_file(tmp_path, capsys):
    write(tmp_path / "model.gguf", random_llama())
    target = tmp_path / "model.gguf"
    medusa.main(short(target, tmp_path, tmp_path / "run"))
    artifact = tmp_path / "run" / "artifact"
    assert load_config(str(artifact)).target["name"] == str(target)
    exit_on_error(generate.main, ["--drafter", str(artifact), "--max-new-tokens", "8", "def f"])  # the target is the artifact's
    exit_on_error(generate.main, ["--target", str(target), "--max-new-tokens", "8", "--chat", "def f"])
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda file: file.unlink(), "no file .*model.gguf"),
        (lambda file: file.write_bytes(b"PK\3\4" + file.read_bytes()[4:]), "is no GGUF file"),
        (lambda file: file.write_bytes(file.read_bytes()[:4]), "cannot be dequantised"),
        (lambda file: file.write_bytes(file.read_bytes()[:5000]), "cannot be dequantised"),
        (lambda file: file.write_bytes(file.read_bytes()[:-5000]), "cannot be dequantised"),
        (lambda file: write(file, random_llama(), architecture="llama17"), "cannot be dequantised.*llama17"),
        (lambda file: write(file, random_llama(), architecture="mamba"), "cannot be dequantised|linear|recurrent"),
    ],
    ids=["missing", "another magic", "magic alone", "cut in the header", "cut in the weights", "unknown", "recurrent"],
)
def test_what_cannot_be_read_is_one_line_and_leaves_nothing(tmp_path, cache, capsys, damage, reason):
    file = tmp_path / "model.gguf"
    write(file, random_llama())
    damage(file)
    line = failing(capsys, generate.main, ["--target", file, "x"])
    assert str(file) in line or "architecture 'mamba'" in line
    assert re.search(reason, line), line
    assert not cache.exists() or [path.suffix for path in cache.iterdir()] in ([], [".lock"])


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path, cache, monkeypatch):
    write(tmp_path / "model.gguf", random_llama())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 10))
    with pytest.raises(ValueError, match="needs about .* set DRAFTSMITH_CACHE"):
        Target.load(str(tmp_path / "model.gguf"))


def test_without_the_package(tmp_path, monkeypatch):
    write(tmp_path / "model.gguf", random_llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"draftsmith\[gguf\]"):
        Target.load(str(tmp_path / "model.gguf"))
