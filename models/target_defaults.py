"""What drafters take over from a target where nobody says otherwise."""

from typing import Any

from draftsmith.models.target import Target


def usual_taps(num_layers: int) -> tuple[int, int, int]:
    """1, L/2−1 and L−4 (EAGLE-3, by the layers' outputs): the taps that engines take where none are named. L < 7 has none."""
    return 1, num_layers // 2 - 1, num_layers - 4


def default_taps(target: Target) -> tuple[int, int, int]:
    """`usual_taps` of the target. Raises ValueError where they are not three layers in order."""
    taps = usual_taps(target.num_layers)
    if not 1 < taps[1] < taps[2]:
        raise ValueError(
            f"target {target.name!r} has {target.num_layers} layers, too few for the usual taps {taps}; give the method's key taps: "
            f"{[*range(min(2, target.num_layers))]}, for example"
        )
    return taps


def rope_theta(config: Any) -> float:
    """The RoPE base of a transformers config, of its full-attention layers where layers differ (Gemma-3); 10,000 where it names none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta", 10_000.0))


def layer_sizes(section: Any, target: Target) -> dict[str, Any]:
    """Taps and sizes of the layers of a drafter that is as wide as the target: the recipe's, else the target's.

    Args:
        section: of a recipe, with taps, layers, heads, kv_heads and intermediate_size, which are None where nobody says.
        target: whose sizes are taken over.
    """
    return {
        "taps": list(section.taps or default_taps(target)),
        "num_layers": section.layers,
        "intermediate_size": section.intermediate_size or getattr(target.config, "intermediate_size", None) or 0,
        **head_sizes(section, target),
    }


def head_sizes(section: Any, target: Target) -> dict[str, Any]:
    """Heads, RoPE base and epsilon of an attention layer as wide as the target: the recipe's heads and kv_heads, else the target's."""
    config = target.config
    heads = section.heads or config.num_attention_heads
    return {
        "num_heads": heads,
        "num_kv_heads": section.kv_heads or (not section.heads and getattr(config, "num_key_value_heads", None)) or heads,
        "head_dim": (not section.heads and getattr(config, "head_dim", None)) or 0,
        "rope_theta": rope_theta(config),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
    }


def attention_sizes(target: Target) -> dict[str, Any]:
    """The sizes of a decoder layer like the target's own, by the names of Hydra's config."""
    config = target.config
    return {
        "attention_heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or 0,
        "intermediate_size": getattr(config, "intermediate_size", None) or 0,
        "rope_theta": rope_theta(config),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
    }
