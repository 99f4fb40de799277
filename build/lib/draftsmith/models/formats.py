"""EAGLE drafters in the folders that serving engines load: model.safetensors and config.json, written and read by the same tables.

EAGLE-3 and 3.1 (SafeAILab's names, which vLLM, SGLang and TensorRT-LLM load too) and EAGLE-1. Engines number taps differently: ours are
outputs of layers; `eagle_aux_hidden_state_layer_ids` at the top level are inputs, one more, and in `eagle_config` outputs.
The length K and the default tree are not in these layouts.
"""

import json
import os
import re
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models.drafter import methods
from draftsmith.models.eagle import EagleConfig, EagleModel
from draftsmith.models.target import Target, check_folder, check_loaded

ENGINES = ("vLLM", "SGLang", "TensorRT-LLM", "SafeAILab", "llama.cpp")

# Tensors. Names are ours but for the first layer of a one-layer EAGLE-3; in its further layers, which have one norm before attention,
# vLLM reads it as input_layernorm, SGLang and TensorRT-LLM as hidden_norm. `layers.0.` for all where there are more: only so are they found.
FILES = ("model.safetensors", "config.json")
OURS, MIDLAYER = "layers.0.", "midlayer."
NORM, TWIN = ".input_layernorm.weight", ".hidden_norm.weight"
EMBEDDING, BIAS = "embed_tokens.weight", "fc.bias"
EXTRA = {1: (EMBEDDING, BIAS), 3: (EMBEDDING,)}  # in the file and not in our model

# Keys of config.json -> fields of EagleConfig.
SIZES = {"hidden_size": "draft_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
SIZES |= {"num_key_value_heads": "num_kv_heads"} | {key: key for key in ("intermediate_size", "head_dim", "rms_norm_eps", "vocab_size")}
SIZES3 = SIZES | {key: key for key in ("draft_vocab_size", "fc_norm", "norm_output")}
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Keys with the one value that we can compute; written, and checked where present.
FIXED = {"model_type": "llama", "hidden_act": "silu"} | dict.fromkeys(("bias", "attention_bias", "mlp_bias", "tie_word_embeddings"), False)
FIXED3 = FIXED | {"norm_before_residual": False, "norm_before_fc": False}
CHECKED = {"speculators_model_type": "eagle3", "use_sliding_window": False}  # never written
OTHER = ("rope_theta", "rope_scaling", "rope_parameters", "target_hidden_size")
TAPS, INNER, COUNT = "eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"
IGNORED = frozenset(  # they do not change what is proposed
    "architectures torch_dtype dtype transformers_version max_position_embeddings bos_token_id eos_token_id pad_token_id use_cache "
    "initializer_range pretraining_tp attention_dropout max_window_layers _name_or_path speculators_version speculators_config "
    "embed_requires_grad chunk_size_feed_forward id2label label2id is_encoder_decoder output_attentions output_hidden_states problem_type "
    "return_dict".split()
)
# vLLM refuses ["LlamaForCausalLMEagle"] alone. 0: either version.
ARCHITECTURES = {1: ["LlamaForCausalLMEagle", "LlamaForCausalLM"], 3: ["LlamaForCausalLMEagle3"]}
VERSIONS = {"LlamaForCausalLMEagle3": 3, "Eagle3LlamaForCausalLM": 3, "Eagle3DraftModel": 3, "LlamaForCausalLMEagle": 1}
VERSIONS |= {"EagleLlamaForCausalLM": 1, "LlamaForCausalLM": 0}
NOT_TAPPED = ("gemma3", "gemma3_text", "glm4_moe", "qwen2_moe")  # targets that vLLM captures no taps of


def write_eagle(drafter: EagleModel, folder: Path, dtype: torch.dtype | None = None) -> list[str]:
    """Write the folder that engines load, the target's embedding included, in `dtype` (None: the drafter's own). The drafter is attached.

    Returns:
        One line for each engine that falls away, or serves it only by a setting or a little differently: "engine: why".

    Raises:
        ValueError: taps that do not ascend, a draft vocabulary never chosen, or a folder that holds a drafter of our own format.
        OSError: the disk; then what the folder held before is still there.
    """
    config, target, folder = drafter.config, drafter.target, Path(folder)
    if list(drafter.taps) != sorted(set(drafter.taps)):
        raise ValueError(f"got taps {list(drafter.taps)}: engines read them in ascending order, each once; train with ascending taps")
    _ = drafter.vocabulary  # raises where d2t is no map
    if (folder / FILES[1]).exists() and re.search(rf'"model_type": "({"|".join(methods())})"', (folder / FILES[1]).read_text()):
        raise ValueError(f"{folder} holds a drafter in another format; export to another folder")
    dtype = dtype or drafter.fc.weight.dtype
    state = drafter.state_dict()
    found = {file: state[ours] for file, ours in _names(state, config, MIDLAYER if config.num_layers == 1 else OURS).items()}
    found[EMBEDDING] = _embedding(target, 0, target.vocab_size)
    if config.version == 1:  # without it SGLang's and SafeAILab's own bias is random
        found[BIAS] = torch.zeros(config.draft_size)
    tensors = {name: one.to("cpu", dtype if one.is_floating_point() else one.dtype, copy=True).contiguous() for name, one in found.items()}
    _put(folder, tensors, json.dumps(_config(config, target, dtype), indent=2) + "\n")
    return _fallen(config, target)


def read_eagle(folder: Path, target: Target) -> EagleModel:
    """The drafter in a folder of that layout, attached to `target`, in the file's dtype, in eval mode.

    Names of SafeAILab (`midlayer.`) and of speculators (`layers.0.`), its config included, are read; `steps` and `tree` are the defaults.

    Raises:
        FileNotFoundError: no config.json or no weights.
        ValueError: pickled or sharded weights; tensors missing, unexpected, misshapen; keys unknown, contradictory or not computed
            here; a draft vocabulary or embedding that is not of this target.
    """
    folder = Path(folder)
    check_folder(str(folder))
    if not (folder / FILES[0]).exists():
        raise ValueError(f"{folder}: expected the weights in one file, {FILES[0]}; merge them")
    tensors = load_file(folder / FILES[0])
    try:
        flat = _flat(json.loads((folder / FILES[1]).read_text(encoding="utf-8")))
        config = _read_config(flat, tensors, target)
        config.dtype = reduce(torch.promote_types, [one.dtype for one in tensors.values() if one.is_floating_point()] or [torch.float32])
        drafter = EagleModel(config)
        # Assigned, not copied: casting the module would round the frequencies of its RoPE too.
        drafter.load_state_dict(_read_tensors(str(folder), tensors, drafter, target), strict=True, assign=True)
        torch.nn.Module.to(drafter, target.device)
        _ = drafter.attach(target).vocabulary  # raises where d2t is no map
    except ValueError as error:
        raise ValueError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: config.json has a value of another kind than expected ({error})") from error
    return drafter.eval()


def _names(ours: Iterable[str], config: EagleConfig, first: str) -> dict[str, str]:
    """Names in the file -> ours; `first` is the prefix of the first layer there. A norm may stand under two names."""
    if config.version == 1:
        return {name: name for name in ours}
    names = {first + name.removeprefix(OURS) if name.startswith(OURS) else name: name for name in ours}
    return names | {name.removesuffix(NORM) + TWIN: name for name in ours if name.endswith(NORM) and not name.startswith(OURS)}


def _read_tensors(folder: str, tensors: dict[str, Tensor], drafter: EagleModel, target: Target) -> dict[str, Tensor]:
    """What load_state_dict takes; everything in the file is accounted for."""
    config, wanted = drafter.config, drafter.state_dict()
    names = _names(wanted, config, MIDLAYER if any(name.startswith(MIDLAYER) for name in tensors) else OURS)
    here = {names[name] for name in tensors if name in names}
    shapes = {name: wanted[ours].shape for name, ours in names.items()}
    shapes |= {EMBEDDING: torch.Size((target.vocab_size, target.hidden_size)), BIAS: torch.Size((config.draft_size,))}
    missing = [name for name, ours in names.items() if ours not in here and name.endswith(TWIN) == ours.endswith(TWIN)]
    left = set(tensors) - set(names) - set(EXTRA[config.version])
    misshapen = [(name, tensors[name].shape, shapes[name]) for name in set(tensors) - left if tensors[name].shape != shapes[name]]
    check_loaded(folder, {"missing_keys": missing, "unexpected_keys": left, "mismatched_keys": misshapen})
    if BIAS in tensors and bool(tensors[BIAS].any()):
        raise ValueError("fc.bias is not zero: engines drop it, and our fc has none; train without one")
    if EMBEDDING in tensors:
        _check_embedding(tensors[EMBEDDING], target)
    elif _scales(target):
        raise ValueError(f"{EMBEDDING} is missing, and target {target.name!r} scales its own: which one was trained with is unknown")
    state: dict[str, Tensor] = {}
    for name, ours in names.items():
        if name in tensors and not torch.equal(state.setdefault(ours, tensors[name]), tensors[name]):
            raise ValueError(f"{name} and {ours} differ: engines read one or the other, so both must be the same norm")
    return {name: one.to(config.dtype) if one.is_floating_point() else one for name, one in state.items()}


@torch.no_grad()
def _embedding(target: Target, start: int, stop: int) -> Tensor:
    """Of tokens start..stop−1 as our drafters read it: what the module scales (Gemma) is scaled."""
    device = target.model.get_input_embeddings().get_parameter("weight").device
    return target.embed(torch.arange(start, min(stop, target.vocab_size), device=device))


def _scales(target: Target) -> bool:
    return not torch.equal(_embedding(target, 0, 64), target.model.get_input_embeddings().get_parameter("weight")[:64])


def _check_embedding(stored: Tensor, target: Target) -> None:
    """Our drafters read the target's own embedding, so the file's must be that, but for rounding to bf16 or fp16."""
    for start in range(0, target.vocab_size, 8192):
        theirs = _embedding(target, start, start + 8192).float().cpu()
        if not torch.allclose(stored[start : start + 8192].float(), theirs, rtol=2**-7, atol=1e-6):
            raise ValueError(f"{EMBEDDING} is not the embedding of target {target.name!r}: it is of another model, or was trained")


def _config(config: EagleConfig, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    three, taps = config.version == 3, list(config.taps or ())
    found: dict[str, Any] = {"architectures": ARCHITECTURES[config.version], **(FIXED3 if three else FIXED)}
    found |= {key: getattr(config, field) for key, field in (SIZES3 if three else SIZES).items()}
    rope = {"rope_theta": config.rope_theta}
    found |= {"max_position_embeddings": target.max_positions, "torch_dtype": str(dtype).removeprefix("torch.")}
    found |= rope | {"rope_scaling": None, "rope_parameters": {"rope_type": "default"} | rope}
    found |= {key: getattr(target.config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    found["pad_token_id"] = found["pad_token_id"] or 0
    if three:
        found |= {TAPS: [tap + 1 for tap in taps], INNER: {"use_aux_hidden_state": True, TAPS: taps}}
        found |= {COUNT: len(taps)} if len(taps) != 3 else {}
        found |= {"target_hidden_size": target.hidden_size} if config.draft_size != target.hidden_size else {}
    return found


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys that say something, those of speculators' `transformer_layer_config` beside the others."""
    flat = {key: value for key, value in raw.items() if value is not None and key != "transformer_layer_config"}
    for key, value in (raw.get("transformer_layer_config") or {}).items():
        if value is not None and flat.setdefault(key, value) != value and key not in IGNORED:
            raise ValueError(f"config.json has {key} = {flat[key]!r} and, in transformer_layer_config, {value!r}; expected one value")
    return flat


def _read_config(flat: dict[str, Any], tensors: Iterable[str], target: Target) -> EagleConfig:
    version = _version(flat, tensors)
    sizes, fixed, more = (SIZES3, FIXED3 | CHECKED, (*OTHER, TAPS, INNER, COUNT)) if version == 3 else (SIZES, FIXED | CHECKED, OTHER)
    if unknown := sorted(set(flat) - IGNORED - {*sizes, *fixed, *more}):
        raise ValueError(f"config.json has keys unknown to EAGLE-{version} here: {', '.join(unknown)}")
    if missing := [key for key in REQUIRED if key not in flat]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    if "speculators_model_type" in flat and "norm_before_residual" not in flat:
        raise ValueError("config.json lacks norm_before_residual: without it vLLM takes true and speculators false; write which one it is")
    for key, value in fixed.items():
        if flat.get(key, value) != value:
            raise ValueError(f"config.json has {key} = {flat[key]!r}; expected {value!r}: nothing else is computed here")
    fields: dict[str, Any] = {"version": version, "num_kv_heads": flat["num_attention_heads"]}
    for key, field in sizes.items():
        if key in flat:
            value, kind = flat[key], type(getattr(EagleConfig, field))
            if type(value) not in ((int, float) if kind is float else (kind,)) or (kind is not bool and value <= 0):
                raise ValueError(f"config.json has {key} = {value!r}; expected {'true or false' if kind is bool else 'a positive number'}")
            fields[field] = value
    read = flat.get("target_hidden_size", fields["draft_size"]), fields["vocab_size"]
    if read != (own := (target.hidden_size, target.vocab_size)):
        raise ValueError(f"made for a target of hidden size and vocabulary {read}; {target.name!r} has {own}: load that target")
    if version == 3:
        fields["taps"] = _taps(flat, target)
    return EagleConfig(hidden_size=target.hidden_size, target=target.identity.to_dict(), rope_theta=_rope_theta(flat), **fields)


def _version(flat: dict[str, Any], tensors: Iterable[str]) -> int:
    """1 or 3, by the architectures, and by the tensors where those say neither."""
    names = flat.get("architectures", [])
    said = {VERSIONS.get(name, -1) for name in names} - {0}
    if -1 in said or len(said) > 1:
        raise ValueError(f"config.json has architectures {names}; expected those of one version of EAGLE: {', '.join(VERSIONS)}")
    return said.pop() if said else 3 if {"norm.weight", "lm_head.weight"} & set(tensors) else 1


def _taps(flat: dict[str, Any], target: Target) -> list[int]:
    """Our taps, outputs of layers: the top level's less one, those of eagle_config, or EAGLE-3's own."""
    inner: dict[str, Any] = flat.get(INNER, {})
    if unknown := sorted(set(inner) - {"use_aux_hidden_state", TAPS}) or [key for key in inner if key != TAPS and inner[key] is not True]:
        raise ValueError(f"config.json has {INNER}.{unknown[0]} = {inner[unknown[0]]!r}; nothing of that kind is computed here")
    inputs, outputs = flat.get(TAPS), inner.get(TAPS)
    if inputs and outputs and [tap - 1 for tap in inputs] != outputs:
        raise ValueError(f"config.json has {TAPS} {inputs} (inputs) and, in {INNER}, {outputs} (outputs); expected these one less")
    taps = [tap - 1 for tap in inputs] if inputs else outputs or _usual(target)
    if taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < target.num_layers:
        raise ValueError(f"config.json taps outputs {taps} of layers; expected ascending ones of 0..{target.num_layers - 1}")
    if flat.get(COUNT, len(taps)) != len(taps):
        raise ValueError(f"config.json has {COUNT} = {flat[COUNT]} and {len(taps)} taps; expected as many")
    return taps


def _usual(target: Target) -> list[int]:
    """The taps that engines take where none are named."""
    return [1, target.num_layers // 2 - 1, target.num_layers - 4]


def _rope_theta(flat: dict[str, Any]) -> float:
    tables = flat.get("rope_parameters", {}), flat.get("rope_scaling", {})
    for scaling in tables:
        if scaling.get("rope_type", scaling.get("type", "default")) != "default" or set(scaling) - {"rope_type", "type", "rope_theta"}:
            raise ValueError(f"config.json scales its RoPE by {scaling}; expected none: it is not computed here")
    thetas = {float(table["rope_theta"]) for table in (flat, *tables) if "rope_theta" in table}
    if len(thetas) > 1:
        raise ValueError(f"config.json has {len(thetas)} values of rope_theta, {sorted(thetas)}; expected one")
    return thetas.pop() if thetas else 10000.0


def _fallen(config: EagleConfig, target: Target) -> list[str]:
    """One line for each engine that does not serve this drafter as it is."""
    three, taps, usual = config.version == 3, list(config.taps or ()), _usual(target)
    kind, all_of_them = getattr(target.config, "model_type", ""), " ".join(ENGINES)
    cap = "its soft-capping" if target.head_scale == 1 else f"its scale {target.head_scale:.4g}"
    probe = torch.full((1, 2, target.hidden_size), 100.0, device=target.head_weight.device, dtype=target.dtype)
    bare = three or torch.allclose(target.logits(probe), target.head(probe), rtol=0.01)
    rules = (
        (not three, "TensorRT-LLM llama.cpp", "loads no EAGLE-1"),
        (not bare, "vLLM SGLang SafeAILab", f"applies the target's head without {cap}: equal first choices, other probabilities"),
        (config.draft_size != target.hidden_size, all_of_them, "reads an embedding as wide as the drafter, ours is the target's"),
        (three and config.num_layers > 1, "SafeAILab llama.cpp", f"has one layer, not {config.num_layers}"),
        (config.head_dim != config.draft_size / config.num_heads, "SafeAILab", f"has no head_dim, here {config.head_dim}"),
        (three and taps != usual, "SafeAILab", f"reads the outputs of layers {usual}, not {taps}"),
        (three and taps != usual, "TensorRT-LLM", f"needs eagle3_layers_to_capture: {taps} in its YAML"),
        (three and len(taps) == 1, "SGLang TensorRT-LLM", "leaves fc out with one tap"),
        (three and len(taps) != 3, "llama.cpp", f"reads three taps, not {len(taps)}"),
        (config.fc_norm or config.norm_output, "SafeAILab llama.cpp", "has neither fc_norm nor norm_output"),
        (three and kind in NOT_TAPPED, "vLLM", f"captures no taps of {kind} targets"),
        (_scales(target), "SGLang TensorRT-LLM", "shares the target's embedding without its scaling"),
    )
    reasons = {engine: [why for holds, engines, why in rules if holds and engine in engines.split()] for engine in ENGINES}
    return [f"{engine}: {'; '.join(why)}" for engine, why in reasons.items() if why]


def _put(folder: Path, tensors: dict[str, Tensor], text: str) -> None:
    """Write both files beside those that are there, then rename them over."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = [folder / f".{name}.tmp" for name in FILES]
    try:
        save_file(tensors, beside[0], {"format": "pt"})
        beside[1].write_text(text, encoding="utf-8")
        for path in beside:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        for path, name in zip(beside, FILES, strict=True):
            os.replace(path, folder / name)
    finally:
        for path in beside:
            path.unlink(missing_ok=True)
