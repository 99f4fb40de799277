"""Tiny random targets on disk whose checkpoints have an MTP layer, under names written here by hand."""

import json
from pathlib import Path

import torch
from conftest import byte_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, LlamaConfig, Qwen3NextConfig
from zoo import tiny

from draftsmith.models.mimo import MimoConfig

V, H, INNER, L = 257, 32, 48, 2
SIZES = {"vocab_size": V, "hidden_size": H, "intermediate_size": INNER, "num_hidden_layers": L, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4}

CONFIGS = {
    "mimo": lambda: MimoConfig(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES),
    "glm": lambda: Glm4MoeConfig(**SIZES, **EXPERTS, **GROUPS, head_dim=8, use_qk_norm=True),
    "deepseek": lambda: DeepseekV3Config(**SIZES | LATENT, **EXPERTS, **GROUPS),
    # Layers of linear attention are refused by the target's own check; one of full attention is what the MTP layer is made of.
    "qwen3-next": lambda: Qwen3NextConfig(
        **SIZES, **EXPERTS, head_dim=8, num_experts=4, shared_expert_intermediate_size=16, layer_types=["full_attention"] * L
    ),
}

_DENSE = {"mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H), "mlp.down_proj": (H, INNER)}
_NORMS = {"input_layernorm": (H,), "post_attention_layernorm": (H,)}
_EACH = {
    f"mlp.experts.{number}.{name}": shape
    for number in range(4)
    for name, shape in {"gate_proj": (16, H), "up_proj": (16, H), "down_proj": (H, 16)}.items()
}
_ATTENTION = {"self_attn.q_proj": (32, H), "self_attn.k_proj": (16, H), "self_attn.v_proj": (16, H), "self_attn.o_proj": (H, 32)}
_HEAD_NORMS = {"self_attn.q_norm": (8,), "self_attn.k_norm": (8,)}
_SHARED = {f"mlp.shared_experts.{name}": shape for name, shape in {"gate_proj": (16, H), "up_proj": (16, H), "down_proj": (H, 16)}.items()}
_MLA = {"self_attn.q_a_proj": (12, H), "self_attn.q_a_layernorm": (12,), "self_attn.q_b_proj": (48, 12), "self_attn.o_proj": (H, 24)}
_MLA |= {"self_attn.kv_a_proj_with_mqa": (14, H), "self_attn.kv_a_layernorm": (10,), "self_attn.kv_b_proj": (56, 10)}
_ROUTED = _NORMS | _EACH | {"mlp.gate": (4, H)}
_BIASES = {"self_attn.q_proj.bias": (32,), "self_attn.k_proj.bias": (16,), "self_attn.v_proj.bias": (16,)}
_MIMO = {"input_proj": (H, 2 * H), "token_layernorm": (H,), "hidden_layernorm": (H,), "final_layernorm": (H,)}
_DEEPSEEK = {"eh_proj": (H, 2 * H), "enorm": (H,), "hnorm": (H,), "shared_head.norm": (H,)}
_NEXT = {"fc": (H, 2 * H), "pre_fc_norm_embedding": (H,), "pre_fc_norm_hidden": (H,), "norm": (H,)}
_OF_NEXT = _ROUTED | _ATTENTION | _HEAD_NORMS | {"self_attn.q_proj": (64, H), "mlp.shared_expert_gate": (1, H)}
_OF_NEXT |= {name.replace("experts", "expert"): shape for name, shape in _SHARED.items()}


def _weights(prefix: str, *shapes: dict) -> dict:
    return {f"{prefix}{name}.weight": shape for each in shapes for name, shape in each.items()}


def _exactly(prefix: str, shapes: dict) -> dict:
    return {prefix + name: shape for name, shape in shapes.items()}


_CORRECTION = {"mlp.gate.e_score_correction_bias": (4,)}
# What the layer adds to the checkpoint, name -> shape.
SHAPES = {
    "mimo": _weights("model.mtp_layers.0.", _MIMO, _DENSE, _NORMS, _ATTENTION) | _exactly("model.mtp_layers.0.", _BIASES),
    "llama": _weights("model.mtp_layers.0.", _MIMO, _DENSE, _NORMS, _ATTENTION),
    "glm": _weights("model.layers.2.", _DEEPSEEK, _ROUTED, _SHARED, _ATTENTION, _HEAD_NORMS) | _exactly("model.layers.2.", _CORRECTION),
    "deepseek": _weights("model.layers.2.", _DEEPSEEK, _ROUTED, _SHARED, _MLA) | _exactly("model.layers.2.", _CORRECTION),
    "qwen3-next": _weights("mtp.", _NEXT) | _weights("mtp.layers.0.", _OF_NEXT),
}
COPIES = {"model.layers.2.embed_tokens.weight": "model.embed_tokens.weight", "model.layers.2.shared_head.head.weight": "lm_head.weight"}


def layer_tensors(name: str, model) -> dict[str, torch.Tensor]:
    """Random tensors of an MTP layer, and the copies of the target's ends that a checkpoint like DeepSeek's has."""
    generator = torch.Generator().manual_seed(7)
    tensors = {stored: torch.randn(shape, generator=generator) * 0.2 for stored, shape in SHAPES[name].items()}
    tensors |= {stored: 1 + tensor for stored, tensor in tensors.items() if tensor.ndim == 1 and "norm" in stored}
    if name in ("glm", "deepseek"):
        state = model.state_dict()
        tensors |= {stored: state[theirs].clone() for stored, theirs in COPIES.items()}
    return tensors


def save_checkpoint(name: str, folder: Path, shipped: bool = True) -> dict[str, torch.Tensor]:
    """Write the target, with its MTP layer unless shipped=False; the layer's tensors."""
    model = tiny(name, config=CONFIGS[name]())
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    layer = layer_tensors(name, model)
    if shipped:
        add(folder, layer)
    return layer


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors into a checkpoint of one file."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def edit(folder: Path, **changes) -> None:
    """Change config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def by_transformers(folder: Path):
    """transformers' own reading of the folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
