"""EAGLE drafters in the folders that serving engines load: model.safetensors and config.json, written and read by the same tables.

EAGLE-3 and 3.1 have SafeAILab's names, which vLLM, SGLang and TensorRT-LLM load too; EAGLE-1 has its own. Taps are numbered in two ways:
as here, by the outputs of layers, in `eagle_config`; by the inputs of layers, which is one more, in `eagle_aux_hidden_state_layer_ids` at
the top level. The draft depth K and the default tree are not in these layouts.

Letters: V target vocabulary · D draft vocabulary · L target layers.
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

from draftsmith.inference import durable
from draftsmith.models.drafter import CONFIG, WEIGHTS, methods
from draftsmith.models.eagle import NORMS, EagleConfig, EagleModel
from draftsmith.models.formats import quantise
from draftsmith.models.formats.engines import eagle_limits, scales_embedding, served_depth
from draftsmith.models.formats.layouts import EAGLE1, EMBEDDING, MIDLAYER, NUMBERED, Layout
from draftsmith.models.model_files import check_config
from draftsmith.models.peagle import PeagleConfig, PeagleModel
from draftsmith.models.target import Target, check_folder, check_loaded
from draftsmith.models.target_defaults import usual_taps
from draftsmith.models.weights import check_finite

BIAS = "fc.bias"

# Keys of config.json -> fields of EagleConfig.
SIZES = {"hidden_size": "draft_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
SIZES |= {"num_key_value_heads": "num_kv_heads"} | {key: key for key in ("intermediate_size", "head_dim", "rms_norm_eps", "vocab_size")}
SIZES3 = SIZES | {key: key for key in ("draft_vocab_size", *NORMS)}
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Keys with the only value that EagleModel computes; they are written, and checked where present.
FIXED = {"model_type": "llama", "hidden_act": "silu"} | dict.fromkeys(("bias", "attention_bias", "mlp_bias", "tie_word_embeddings"), False)
CHECKED = {"speculators_model_type": "eagle3", "use_sliding_window": False}  # never written
OTHER = ("rope_theta", "rope_scaling", "rope_parameters", "target_hidden_size", "layer_types", "sliding_window")
# Of P-EAGLE: the tensor that stands for features, the token that stands for tokens, and that all tokens are drafted at once.
MASK, MASK_TOKEN, PARALLEL = "mask_hidden", "mask_token_id", "parallel_drafting"
TAPS, INNER, COUNT = "eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"
IGNORED = frozenset(  # they do not change what is proposed
    "architectures torch_dtype dtype transformers_version max_position_embeddings bos_token_id eos_token_id pad_token_id use_cache "
    "initializer_range pretraining_tp attention_dropout max_window_layers _name_or_path speculators_version speculators_config "
    "embed_requires_grad chunk_size_feed_forward id2label label2id is_encoder_decoder output_attentions output_hidden_states problem_type "
    "return_dict auto_map quantization_config has_no_defaults_at_init".split()
)
# vLLM refuses ["LlamaForCausalLMEagle"] alone. 0: either version.
ARCHITECTURES = {1: ["LlamaForCausalLMEagle", "LlamaForCausalLM"], 3: ["LlamaForCausalLMEagle3"]}
VERSIONS = {"LlamaForCausalLMEagle3": 3, "Eagle3LlamaForCausalLM": 3, "Eagle3DraftModel": 3, "LlamaForCausalLMEagle": 1}
VERSIONS |= {"Eagle3Speculator": 3, "EagleLlamaForCausalLM": 1, "LlamaForCausalLM": 0}  # the first: speculators before 0.3


def write_eagle(drafter: EagleModel, folder: Path, dtype: torch.dtype | None = None, library: bool = False) -> list[str]:
    """Write the folder that engines load, with the target's embedding.

    Args:
        drafter: attached to its target.
        folder: created, or its two files replaced.
        dtype: of the weights; None keeps the drafter's.
        library: write the names and the config of the speculators library, which vLLM serves without further arguments.

    Returns:
        One line for each engine that does not serve the drafter, serves it only with a setting, or differs a little: "engine: why".

    Raises:
        ValueError: taps that do not ascend, a draft vocabulary that was never chosen, or a folder with an artifact of Draftsmith's own.
        OSError: the disk; the folder's old files are then still there.
    """
    config, target, folder = drafter.config, drafter.target, Path(folder)
    if list(drafter.taps) != sorted(set(drafter.taps)):
        raise ValueError(f"got taps {list(drafter.taps)}: engines read them in ascending order, each once; train with ascending taps")
    _ = drafter.vocabulary  # raises where d2t is no map
    if (folder / CONFIG).exists() and re.search(rf'"model_type": "({"|".join(methods())})"', (folder / CONFIG).read_text()):
        raise ValueError(f"{folder} holds a drafter in another format; export to another folder")
    dtype = dtype or drafter.fc.weight.dtype
    layout = layout_of(config, config.num_layers == 1 and not library)
    tensors = stored_tensors(drafter, layout, dtype)
    raw = _speculators(_config(config, target, dtype), target, served_depth(config)) if library else _config(config, target, dtype)
    _write(folder, tensors, json.dumps(raw, indent=2) + "\n")
    by_engine: dict[str, list[str]] = {}
    for limit in eagle_limits(config, target):
        by_engine.setdefault(limit.engine, []).append(limit.why)
    return [f"{engine}: {'; '.join(why)}" for engine, why in by_engine.items()]


def stored_tensors(drafter: EagleModel, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a file by its own names, with the target's embedding, on the CPU."""
    config, state = drafter.config, drafter.state_dict()
    state[EMBEDDING] = _embedding(drafter.target, 0, config.vocab_size)
    if config.version == 1:  # without it the bias is random in SGLang and SafeAILab's code
        state[BIAS] = torch.zeros(config.draft_size)
    kinds = {name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in state.items()}
    return {stored: state[name].to("cpu", kinds[name], copy=True).contiguous() for stored, name in layout.table(state).items()}


def read_eagle(folder: Path, target: Target) -> EagleModel:
    """The drafter of a folder in that layout, attached to `target`, in the file's dtype, in eval mode.

    The names of SafeAILab (`midlayer.`) and of speculators (`layers.0.`, with its config) are read. `steps` and `tree` are the defaults.

    Raises:
        FileNotFoundError: no config.json or no weights.
        ValueError: pickled or sharded weights; tensors that are missing, unexpected or misshapen; keys that are unknown, contradictory
            or need what EagleModel does not compute; a draft vocabulary or embedding of another target.
    """
    folder = Path(os.path.expanduser(folder))
    if not (folder / WEIGHTS).exists() and any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: expected the weights in one file, {WEIGHTS}; merge them")
    check_folder(str(folder))
    try:
        raw = check_config(str(folder))
        tensors = quantise.unpacked(raw, load_file(folder / WEIGHTS))
        config = _read_config(_flat(raw), tensors, target)
        if config.least_tensors > len(tensors):
            raise ValueError(f"config.json describes {config.least_tensors:,} tensors or more, {WEIGHTS} has {len(tensors):,}")
        dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
        config.dtype = reduce(torch.promote_types, dtypes or [torch.float32])
        with torch.device("meta"):
            drafter = PeagleModel(config) if isinstance(config, PeagleConfig) else EagleModel(config)
        # Assigned, not copied: casting the module would round the frequencies of its RoPE too.
        drafter.load_state_dict(_read_tensors(str(folder), tensors, drafter, target), strict=True, assign=True)
        torch.nn.Module.to(drafter, target.device)
        check_finite(str(folder), drafter)
        drafter.attach(target).check_content()
    except ValueError as error:
        raise ValueError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: config.json has a value of another kind than expected ({error})") from error
    return drafter.eval()


def layout_of(config: EagleConfig, midlayer: bool) -> Layout:
    """How the file names the tensors. `midlayer`: whether the first layer of EAGLE-3 has this name."""
    return EAGLE1 if config.version == 1 else MIDLAYER if midlayer else NUMBERED


def _read_tensors(folder: str, tensors: dict[str, Tensor], drafter: EagleModel, target: Target) -> dict[str, Tensor]:
    """The state dict of EagleModel. Raises ValueError for tensors that are missing, unexpected, misshapen or contradictory."""
    config, expected = drafter.config, drafter.state_dict()
    layout = layout_of(config, any(name.startswith("midlayer.") for name in tensors))
    names = layout.table(expected)
    present = {names[name] for name in tensors if name in names}
    shapes = {name: expected[ours].shape for name, ours in names.items()}
    shapes |= {EMBEDDING: torch.Size((target.vocab_size, target.hidden_size)), BIAS: torch.Size((config.draft_size,))}
    missing = [layout.theirs(name)[0] for name in expected if name not in present]  # a norm with two names is missing only once
    unexpected = set(tensors) - set(names) - set(layout.optional)
    misshapen = [(name, tensors[name].shape, shapes[name]) for name in set(tensors) - unexpected if tensors[name].shape != shapes[name]]
    check_loaded(folder, {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": misshapen})
    if BIAS in tensors and bool(tensors[BIAS].any()):
        raise ValueError("fc.bias is not zero: engines drop it, and our fc has none; train without one")
    if EMBEDDING in tensors:
        _check_embedding(tensors[EMBEDDING], target)
    elif scales_embedding(target):
        raise ValueError(f"{EMBEDDING} is missing, and target {target.name!r} scales its own: which one was trained with is unknown")
    state: dict[str, Tensor] = {}
    for name, ours in names.items():
        if name in tensors and not torch.equal(state.setdefault(ours, tensors[name]), tensors[name]):
            raise ValueError(f"{name} and {ours} differ: engines read one or the other, so both must be the same norm")
    return {name: tensor.to(config.dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


@torch.no_grad()
def _embedding(target: Target, start: int, stop: int) -> Tensor:
    """The embeddings of tokens start..stop−1 as drafters read them: scaled where the target's module scales them (Gemma)."""
    device = target.model.get_input_embeddings().get_parameter("weight").device
    return target.embed(torch.arange(start, min(stop, target.vocab_size), device=device))


def _check_embedding(stored: Tensor, target: Target) -> None:
    """Raise ValueError unless the file's embedding is the target's, up to rounding to bf16 or fp16: drafters read the target's."""
    for start in range(0, target.vocab_size, 8192):
        theirs = _embedding(target, start, start + 8192).float().cpu()
        if not torch.allclose(stored[start : start + 8192].float(), theirs, rtol=2**-7, atol=1e-6):
            raise ValueError(f"{EMBEDDING} is not the embedding of target {target.name!r}: it is of another model, or was trained")


def _config(config: EagleConfig, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the folder."""
    three, taps = config.version == 3, list(config.taps or ())
    raw: dict[str, Any] = {"architectures": ARCHITECTURES[config.version], **FIXED}
    for key, field in (SIZES3 if three else SIZES).items():
        raw[key] = getattr(config, field)
    raw["max_position_embeddings"] = target.max_positions
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    raw["rope_theta"] = config.rope_theta
    raw["rope_scaling"] = None
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        raw[key] = getattr(target.config, key, None)
    raw["pad_token_id"] = raw["pad_token_id"] or 0
    if three:
        raw[TAPS] = [tap + 1 for tap in taps]
        raw[INNER] = {"use_aux_hidden_state": True, TAPS: taps}
        if len(taps) != 3:
            raw[COUNT] = len(taps)
        if config.draft_size != target.hidden_size:
            raw["target_hidden_size"] = target.hidden_size
    if isinstance(config, PeagleConfig):
        raw |= {PARALLEL: True, MASK_TOKEN: config.mask_token_id}
    return raw


def _speculators(raw: dict[str, Any], target: Target, depth: int) -> dict[str, Any]:
    """The config.json that speculators 0.9 writes, from that of the other engines."""
    inner = ("model_type", "hidden_act", "attention_bias", "mlp_bias", "max_position_embeddings", "vocab_size", "rope_parameters")
    inner += (*(key for key in SIZES if key not in ("vocab_size",)), "bos_token_id", "eos_token_id", "pad_token_id")
    own = ("draft_vocab_size", TAPS, COUNT, *NORMS, "tie_word_embeddings", "torch_dtype", "target_hidden_size")
    proposal = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": target.name, "architectures": list(target.model.config.architectures or [])}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **{key: raw[key] for key in own if key in raw},
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": {key: raw[key] for key in inner},
    }


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys that are not null, those of speculators' `transformer_layer_config` lifted to the top level."""
    flat = {key: value for key, value in raw.items() if value is not None and key != "transformer_layer_config"}
    for key, value in (raw.get("transformer_layer_config") or {}).items():
        if value is not None and flat.setdefault(key, value) != value and key not in IGNORED:
            raise ValueError(f"config.json has {key} = {flat[key]!r} and, in transformer_layer_config, {value!r}; expected one value")
    return flat


def _read_config(flat: dict[str, Any], tensors: Iterable[str], target: Target) -> EagleConfig:
    """The config of EagleModel, or PeagleModel. Raises ValueError for keys that are missing, unknown, contradictory, or have values that it does not compute."""
    version = _version(flat, tensors)
    parallel = MASK in tensors
    sizes, more = (SIZES3, (*OTHER, TAPS, INNER, COUNT, *((PARALLEL, MASK_TOKEN) if parallel else ()))) if version == 3 else (SIZES, OTHER)
    if unknown := sorted(set(flat) - IGNORED - {*sizes, *FIXED, *CHECKED, *more}):
        raise ValueError(f"config.json has keys unknown to EAGLE-{version} here: {', '.join(unknown)}")
    if missing := [key for key in REQUIRED if key not in flat]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    if "speculators_model_type" in flat and "norm_before_residual" not in flat:
        raise ValueError("config.json lacks norm_before_residual: without it vLLM takes true and speculators false; write which one it is")
    for key, value in (FIXED | CHECKED).items():
        if flat.get(key, value) != value:
            raise ValueError(f"config.json has {key} = {flat[key]!r}; expected {value!r}: nothing else is computed here")
    fields: dict[str, Any] = {"version": version, "num_kv_heads": flat["num_attention_heads"]}
    for key, field in sizes.items():
        if key in flat:
            value, kind = flat[key], type(getattr(EagleConfig, field))
            if type(value) not in ((int, float) if kind is float else (kind,)) or (kind is not bool and value <= 0):
                raise ValueError(f"config.json has {key} = {value!r}; expected {'true or false' if kind is bool else 'a positive number'}")
            fields[field] = value
    _check_attention(flat)
    sizes_read = flat.get("target_hidden_size", fields["draft_size"]), fields["vocab_size"]
    target_sizes = target.hidden_size, target.vocab_size
    if sizes_read != target_sizes:
        raise ValueError(
            f"made for a target of hidden size and vocabulary {sizes_read}; {target.name!r} has {target_sizes}: load that target"
        )
    if version == 3:
        fields["taps"] = _taps(flat, target)
    fields |= {"hidden_size": target.hidden_size, "target": target.identity.to_dict(), "rope_theta": rope_base(flat, 10000.0)}
    if not parallel:
        return EagleConfig(**fields)
    if not isinstance(flat.get(MASK_TOKEN), int) or not 0 <= flat[MASK_TOKEN] < target.vocab_size:
        raise ValueError(f"config.json has {MASK_TOKEN} = {flat.get(MASK_TOKEN)!r}; expected a token of the target, since it has {MASK}")
    return PeagleConfig(mask_token_id=flat[MASK_TOKEN], **fields)


def _check_attention(flat: dict[str, Any]) -> None:
    """Raise ValueError where a layer attends within a sliding window. speculators 0.9 writes the window's size also where none does."""
    kinds, layers = flat.get("layer_types"), flat["num_hidden_layers"]
    if kinds is not None and (set(kinds) != {"full_attention"} or len(kinds) != layers):
        raise ValueError(
            f"config.json has layer_types = {kinds!r}; expected full_attention for each of {layers}: nothing else is computed here"
        )
    if flat.get("sliding_window") and kinds is None and "use_sliding_window" not in flat:
        raise ValueError(
            f"config.json has sliding_window = {flat['sliding_window']!r}; expected none, or layer_types or use_sliding_window to say that no "
            "layer attends within it: nothing else is computed here"
        )


def _version(flat: dict[str, Any], tensors: Iterable[str]) -> int:
    """1 or 3, by the architectures, or by the tensors where the architectures allow both."""
    names = flat.get("architectures", [])
    versions = {VERSIONS.get(name, -1) for name in names} - {0}
    if -1 in versions or len(versions) > 1:
        raise ValueError(
            f"config.json has model_type {flat.get('model_type')!r} and architectures {names}; expected architectures of one version of EAGLE: "
            f"{', '.join(VERSIONS)}"
        )
    if versions:
        return versions.pop()
    return 3 if {"norm.weight", "lm_head.weight"} & set(tensors) else 1


def _taps(flat: dict[str, Any], target: Target) -> list[int]:
    """Taps by the outputs of layers: those of the top level less one, those of eagle_config, or EAGLE-3's usual ones."""
    inner: dict[str, Any] = flat.get(INNER, {})
    if unknown := sorted(set(inner) - {"use_aux_hidden_state", TAPS}) or [key for key in inner if key != TAPS and inner[key] is not True]:
        raise ValueError(f"config.json has {INNER}.{unknown[0]} = {inner[unknown[0]]!r}; nothing of that kind is computed here")
    inputs, outputs = flat.get(TAPS), inner.get(TAPS)
    if inputs and outputs and [tap - 1 for tap in inputs] != outputs:
        raise ValueError(f"config.json has {TAPS} {inputs} (inputs) and, in {INNER}, {outputs} (outputs); expected these one less")
    taps = [tap - 1 for tap in inputs] if inputs else outputs or list(usual_taps(target.num_layers))
    if taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < target.num_layers:
        raise ValueError(f"config.json taps outputs {taps} of layers; expected ascending ones of 0..{target.num_layers - 1}")
    if flat.get(COUNT, len(taps)) != len(taps):
        raise ValueError(f"config.json has {COUNT} = {flat[COUNT]} and {len(taps)} taps; expected as many")
    return taps


def rope_base(raw: dict[str, Any], default: float) -> float:
    """The base of RoPE that a config.json names. Raises ValueError where it scales RoPE, or names two bases."""
    tables = [raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    for table in tables:
        kind = table.get("rope_type", table.get("type", "default")) if isinstance(table, dict) else table
        if kind != "default" or set(table) - {"rope_type", "type", "rope_theta"}:
            raise ValueError(f"config.json scales its RoPE by {table}; expected none: it is not computed here")
    bases = {float(table["rope_theta"]) for table in (raw, *tables) if table.get("rope_theta") is not None}
    if len(bases) > 1:
        raise ValueError(f"config.json has {len(bases)} values of rope_theta, {sorted(bases)}; expected one")
    return bases.pop() if bases else default


def _write(folder: Path, tensors: dict[str, Tensor], config: str) -> None:
    """Replace both files; neither is replaced before both are written."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(part: Path) -> None:
        save_file(tensors, part, {"format": "pt"})
        durable.sync(part)
        durable.write_text(folder / CONFIG, config)

    durable.replace(folder / WEIGHTS, write)
