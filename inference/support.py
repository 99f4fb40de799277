"""Which architectures can be tree-verified. All others are refused by name before anything is loaded."""

import inspect
import sys
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

__all__ = ["check_supported", "has_experts"]

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of their number in configs
_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
# Their frequencies follow the longest row of the batch, speculative nodes included.
_ROPE = ("longrope", "dynamic")


def check_supported(config: PretrainedConfig, model: PreTrainedModel | None = None) -> None:
    """Refuse an architecture that tree verification would get wrong. Reads the config and the source of its class; loads nothing.

    Raises:
        ValueError: an architecture that is not supported; the message names it and the reason.
    """
    text = config.get_text_config()
    name = f"{getattr(config, 'model_type', type(config).__name__)!r}"
    reason = _config_reason(config, text) or _class_reason(text, model)
    if reason:
        raise ValueError(f"architecture {name} {reason}; expected a decoder of full or sliding-window attention; choose another model")


def _config_reason(config: PretrainedConfig, text: PretrainedConfig) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder"
    for layers in ("layer_types", "layers_block_type", "block_types"):
        odd = sorted({str(kind) for kind in getattr(text, layers, None) or ()} - _LAYERS)
        if odd:
            return f"has {', '.join(odd)} layers"
    if getattr(text, "attention_chunk_size", None) and text.model_type.startswith("llama4"):
        return "has chunked_attention layers"
    rope = sorted(_rope_types(text) & set(_ROPE))
    if rope:
        return f"uses {rope[0]!r} RoPE, whose frequencies follow the longest row, speculative nodes included"
    if getattr(text, "use_bidirectional_attention", None):
        return "has bidirectional attention"
    return ""


def has_experts(config: Any) -> bool:
    """Whether a target with this config routes tokens to experts. A config gives their number, or one for each layer."""
    counts = (getattr(config.get_text_config(), name, None) or 0 for name in EXPERTS)
    return any(any(count) if isinstance(count, list | tuple) else count for count in counts)


def _rope_types(text: PretrainedConfig) -> set[str]:
    """RoPE types of all layers; the parameters are one dictionary or one per layer type."""
    types: set[str] = set()
    for attribute in ("rope_parameters", "rope_scaling"):
        parameters: Any = getattr(text, attribute, None) or {}
        for entry in (parameters, *parameters.values()):
            if isinstance(entry, dict):
                types.add(str(entry.get("rope_type", entry.get("type", "default"))))
    return types


def _class_reason(text: PretrainedConfig, model: PreTrainedModel | None) -> str:
    if model is not None:
        kind: Any = type(model)
    elif type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    else:
        return ""  # remote code: checked when its attention is set
    if kind._is_stateful:
        return "keeps a recurrent state (linear attention or a state-space layer)"
    # A subclass of another model may leave the attention to that model's module.
    modules = {base.__module__ for base in kind.__mro__[: kind.__mro__.index(PreTrainedModel)]}
    try:
        source = "".join(inspect.getsource(sys.modules[module]) for module in sorted(modules))
    except (OSError, TypeError):
        return ""
    if "ALL_ATTENTION_FUNCTIONS" not in source:
        return "does not use transformers' attention interface, so tree attention cannot reach it"
    return ""
