"""Drafters as GGUF files for llama.cpp: draft models that are Llamas, and EAGLE-3 of one layer.

Only what llama.cpp is known to read as here is written: byte-level BPE tokenizers that split text as GPT-2's, unscaled RoPE, no biases. The rest is
refused by name. The package gguf writes the file.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.eagle import EagleModel
from draftsmith.models.formats.eagle import stored_tensors
from draftsmith.models.formats.layouts import GGUF_EAGLE3, GGUF_LLAMA

__all__ = ["FILE", "check_student", "check_tokenizer", "write_eagle3", "write_llama"]

FILE = "model.gguf"
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
# How text is split before BPE, as tokenizer.json says -> llama.cpp's name of it.
_GPT2 = {"type": "ByteLevel", "use_regex": True}
_SPLITS = (([_GPT2], "gpt-2"), ([{"type": "Digits", "individual_digits": True}, _GPT2], "smollm"))
_OTHER_WAY = "convert the model with llama.cpp's convert_hf_to_gguf.py, or export --to transformers"


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """The content of a byte-level BPE tokenizer.json, with llama.cpp's name of its splitting under "pre".

    Raises:
        ValueError: another kind of tokenizer, or one that splits text in a way whose name in llama.cpp is not known here.
    """
    if tokenizer is None or not tokenizer.is_fast:
        raise ValueError(f"--to gguf: a fast tokenizer is needed, whose rules can be read; {_OTHER_WAY}")
    backend: Any = tokenizer.backend_tokenizer
    raw = json.loads(backend.to_str())
    splitting = raw.get("pre_tokenizer") or {}
    steps = splitting.get("pretokenizers", [splitting])
    for expected, name in _SPLITS:
        same = len(steps) == len(expected) and all(want.items() <= step.items() for want, step in zip(expected, steps, strict=True))
        if same and raw["model"]["type"] == "BPE" and not raw.get("normalizer") and not steps[-1].get("add_prefix_space"):
            return raw | {"pre": name}
    kinds = " + ".join(str(step.get("type")) for step in steps)
    raise ValueError(
        f"--to gguf: the tokenizer is {raw['model']['type']} after {kinds}; only byte-level BPE split as GPT-2's or SmolLM's is written here; "
        f"{_OTHER_WAY}"
    )


def check_student(model: PreTrainedModel, option: str = "--to gguf", other_way: str = _OTHER_WAY) -> None:
    """Raises ValueError for a draft model that is no plain Llama: its file would be a guess.

    Args:
        model: the draft model.
        option: what the error names.
        other_way: what the error advises.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    odd = [f"model_type {config.model_type}"] if config.model_type != "llama" else []
    odd += [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    odd += [f"RoPE of type {rope['rope_type']}"] if rope.get("rope_type", "default") != "default" else []
    odd += [f"hidden_act {config.hidden_act}"] if getattr(config, "hidden_act", "silu") != "silu" else []
    if odd:
        raise ValueError(f"{option}: only plain Llamas are written here, not {', '.join(odd)}; {other_way}")


def write_llama(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, eight_bits: bool = False
) -> None:
    """Write a draft model with the target's number of rows; eight_bits: linear layers as Q8_0. Raises ValueError as `check_student` and `check_tokenizer`."""
    check_student(model)
    config: Any = model.config
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)  # llama.cpp reads the embeddings there
    tensors = {stored: state[name].to(dtype) for stored, name in GGUF_LLAMA.table(state).items()}
    assert len(tensors) == len(state), "a Llama has no other tensors"
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    numbers = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"]}
    _write(folder / FILE, "llama", sizes, numbers, {}, tensors, tokenizer, config, dtype, eight_bits)


def write_eagle3(drafter: EagleModel, folder: Path, dtype: torch.dtype, eight_bits: bool = False) -> None:
    """Write an EAGLE-3 of one layer and three taps, with the target's tokenizer and embedding; eight_bits: linear layers as Q8_0. Raises ValueError as `check_tokenizer`."""
    config, target = drafter.config, drafter.target
    tensors = stored_tensors(drafter, GGUF_EAGLE3, dtype)
    if "d2t" in tensors:  # target ids in place of offsets
        tensors["d2t"] = drafter.vocabulary.targets.cpu()
    sizes = {
        "block_count": 1,
        "context_length": target.max_positions,
        "embedding_length": config.draft_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
    }
    numbers = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_theta}
    more = {"target_layers": [tap + 1 for tap in drafter.taps], "norm_before_residual": config.norm_before_residual}
    _write(folder / FILE, "eagle3", sizes, numbers, more, tensors, target.require_tokenizer(), target.config, dtype, eight_bits)


def rotated(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k [heads·dim, ...] in llama.cpp's order: the two halves that RoPE turns against each other are interleaved there."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def _write(
    path: Path,
    architecture: str,
    sizes: dict[str, int],
    numbers: dict[str, float],
    more: dict[str, Any],
    tensors: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    dtype: torch.dtype,
    eight_bits: bool,
) -> None:
    try:
        import gguf
    except ImportError:
        raise ValueError("--to gguf: the package gguf is needed; pip install 'draftsmith[gguf]'") from None
    writer = gguf.GGUFWriter(path, architecture)
    q8 = gguf.GGMLQuantizationType.Q8_0
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if eight_bits else _FILE_TYPES[dtype])
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in (("attention.value_length", sizes["attention.key_length"]), ("rope.dimension_count", sizes["attention.key_length"])):
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in numbers.items():
        writer.add_float32(f"{architecture}.{key}", value)
    for key, value in more.items():
        add: Any = writer.add_bool if isinstance(value, bool) else writer.add_array
        add(f"{architecture}.{key}", value)
    _add_tokenizer(writer, tokenizer, sizes["vocab_size"], config)
    heads = {"attn_q": sizes["attention.head_count"], "attn_k": sizes["attention.head_count_kv"]}
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else ""
        tensor = rotated(tensor, heads[part]) if part in heads else tensor
        if not tensor.is_floating_point():
            writer.add_tensor(name, tensor.numpy())
        elif tensor.ndim == 1:  # llama.cpp computes norms in float32
            writer.add_tensor(name, tensor.float().numpy())
        elif eight_bits and name.startswith("blk."):
            writer.add_tensor(name, gguf.quants.quantize(tensor.float().contiguous().numpy(), q8), raw_dtype=q8)
        elif dtype == torch.bfloat16:
            values = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, vocab_size: int, config: Any) -> None:
    """The tokenizer's entries. Rows without a token are named [PAD…], and never used."""
    raw = check_tokenizer(tokenizer)
    texts = {index: token for token, index in tokenizer.get_vocab().items()}
    special = {each["id"] for each in raw["added_tokens"] if each["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(raw["pre"])
    writer.add_token_list([texts.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    kinds = [_UNUSED if index not in texts else _CONTROL if index in special else _NORMAL for index in range(vocab_size)]
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]])
    first = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id if tokenizer.eos_token_id is not None else first}
    for name, index in (ids | {"padding": tokenizer.pad_token_id}).items():
        if index is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None
    writer.add_add_bos_token(begins)  # llama.cpp drafts only where target and drafter agree on it
    if tokenizer.chat_template and isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
