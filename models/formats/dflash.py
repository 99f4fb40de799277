"""DFlash and DSpark drafters in the folders of z-lab and DeepSpec, which vLLM and SGLang read: model.safetensors and config.json.

Our names of the tensors are theirs. Taps are numbered by the outputs of layers, as here, in `target_layer_ids`. Embedding and head are the
target's. A mask embedding of its own stands under `mask_embedding`, which vLLM alone reads.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.inference import durable
from draftsmith.inference.reading import field
from draftsmith.models.dflash import DflashConfig, DflashModel
from draftsmith.models.drafter import CONFIG, architecture
from draftsmith.models.dspark import DsparkConfig
from draftsmith.models.formats.eagle import rope_base
from draftsmith.models.formats.layouts import EMBEDDING
from draftsmith.models.model_files import check_config
from draftsmith.models.target import Target
from draftsmith.models.weights import WEIGHTS, assign

__all__ = ["ARCHITECTURES", "CONFIDENCE", "INNER", "read_dflash", "write_dflash"]

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
INNER, HEAD = "dflash_config", "lm_head.weight"
# Keys of config.json -> fields of our config.
SIZES = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"}
SIZES |= {key: key for key in ("hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "vocab_size", "block_size")}
# What DSpark's config says of its confidence, which has one form here, and its names of Markov heads.
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
MARKOV = {"low-rank": "vanilla", "gated": "gated", "rnn": "rnn"}
FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "tie_word_embeddings": False}


def write_dflash(drafter: DflashModel, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and the weights.

    Args:
        drafter: attached to its target; DSpark too.
        folder: empty.
        dtype: of the weights.

    Raises:
        OSError: the disk.
    """
    config, target = drafter.config, drafter.target
    inner: dict[str, Any] = {"target_layer_ids": list(drafter.taps), "mask_token_id": _mask_token(config, target), "causal": config.causal}
    raw: dict[str, Any] = {"architectures": [ARCHITECTURES[drafter.method]], "model_type": "qwen3", **FIXED}
    raw |= {key: getattr(config, name) for key, name in SIZES.items()}
    raw |= {"rope_theta": config.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
    raw |= {"layer_types": ["full_attention"] * config.num_layers, "num_target_layers": target.num_layers}
    raw |= {"max_position_embeddings": target.max_positions, "torch_dtype": str(dtype).removeprefix("torch."), INNER: inner}
    raw |= {key: getattr(target.config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if isinstance(config, DsparkConfig):
        raw |= inner  # DeepSpec has the inner keys at the top level
        raw |= {"markov_rank": config.markov_rank, "markov_head_type": MARKOV[config.markov], **CONFIDENCE}
    tensors = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    durable.write_text(folder / CONFIG, json.dumps(raw, indent=2) + "\n")


def _mask_token(config: DflashConfig, target: Target) -> int:
    """The token that stands for masks: the drafter's; beside an embedding of its own one that is no text: padding, or the last of all."""
    if config.mask_token_id is not None:
        return config.mask_token_id
    pad = getattr(target.config, "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < target.vocab_size else target.vocab_size - 1


def read_dflash(folder: Path, tensors: dict[str, Tensor], target: Target) -> DflashModel:
    """The drafter of a published folder, attached to `target`, in the file's dtype, in eval mode.

    Args:
        folder: for its config.json, and for errors.
        tensors: of its safetensors, by their names there.
        target: what it drafts for.

    Raises:
        ValueError: another target's sizes, keys that need what is not computed here (DFlash2, sliding windows, a draft vocabulary, other
            Markov heads), tensors that are missing, unexpected or misshapen, or an embedding or head that is not the target's.
    """
    source = str(folder / CONFIG)
    raw = check_config(str(folder))
    inner = (raw.get(INNER) or {}) | {key: raw[key] for key in ("target_layer_ids", "mask_token_id") if key in raw}
    dspark = "markov_rank" in raw
    _check_keys(raw, inner, source, dspark)
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if field(raw, key, int, source) != size:
            raise ValueError(f"{source}: `{key}` is {raw[key]}, target {target.name!r} has {size}; load the target that it was made for")
    own_mask = "mask_embedding" in tensors
    settings = {name: field(raw, key, int, source) for key, name in SIZES.items() if key in raw and key != "rms_norm_eps"}
    settings |= {
        "taps": field(inner, "target_layer_ids", list, source),
        "mask_token_id": None if own_mask else field(inner, "mask_token_id", int, source),
        "causal": field({"causal": raw.get("is_causal", False)} | inner, "causal", bool, source),
        "block_size": field({"block_size": inner.get("block_size", 16)} | raw, "block_size", int, source),
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope_theta": rope_base(raw, 1e6),
        "target": target.identity.to_dict(),
    }
    if dspark:
        kinds, kind = {theirs: ours for ours, theirs in MARKOV.items()}, raw.get("markov_head_type", "vanilla")
        if kind not in kinds:
            raise ValueError(f"{source}: `markov_head_type` is {kind!r}; only {', '.join(kinds)} are computed here")
        settings |= {"markov_rank": field(raw, "markov_rank", int, source), "markov": kinds[kind]}
    module = architecture("dspark" if dspark else "dflash")
    try:
        config = module.Config(**settings)
        with torch.device("meta"):
            drafter: DflashModel = module.Model(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    ends = {EMBEDDING: target.model.get_input_embeddings().get_parameter("weight"), HEAD: target.head_weight}
    for name, theirs in ends.items():
        own = tensors.get(name)
        if own is not None and (own.shape != theirs.shape or not _close(own, theirs.detach())):
            raise ValueError(f"{source}: {name} is not that of target {target.name!r}, which this drafter shares here; load its own target")
    assign(str(folder), drafter, {name: tensor for name, tensor in tensors.items() if name not in ends}, target.device)
    config.dtype = next(iter(tensors.values())).dtype
    return drafter.attach(target).eval()


def _close(left: Tensor, right: Tensor) -> bool:
    """Whether two tables of tokens are equal up to rounding to bf16 or fp16; 8,192 rows are in float32 at a time."""
    pairs = zip(left.split(8192), right.split(8192), strict=True)
    return all(torch.allclose(ours.float().cpu(), theirs.float().cpu(), rtol=2**-7, atol=1e-6) for ours, theirs in pairs)


def _check_keys(raw: dict[str, Any], inner: dict[str, Any], source: str, dspark: bool) -> None:
    """Raise ValueError for a key with another value than the one that is computed here."""
    fixed: dict[str, Any] = FIXED | (CONFIDENCE if dspark else {})
    for key, value in fixed.items():
        if raw.get(key, value) != value and key != "tie_word_embeddings":
            raise ValueError(f"{source}: `{key}` is {raw[key]!r}; only {value!r} is computed here")
    if set(raw.get("layer_types") or ()) - {"full_attention"} or inner.get("use_swa"):
        raise ValueError(f"{source}: layers have sliding windows; only full attention is computed here")
    if raw.get("draft_vocab_size") not in (None, raw.get("vocab_size")):
        raise ValueError(f"{source}: `draft_vocab_size` is {raw['draft_vocab_size']}; only the target's vocabulary is read here")
    for key in ("conv_kernel_size", "selector_rank"):
        if key in inner or key in raw:
            raise ValueError(f"{source}: `{key}` is there: this is DFlash2, for which there is no architecture here")
