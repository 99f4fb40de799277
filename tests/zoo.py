"""Tiny random models of the architectures that tree attention must get right, initialised wide (narrow ones loop and hide errors)."""

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCAB = 48
WINDOW = 7  # far shorter than the sequences, so that it cuts prompts, trees and answers

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 8}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=16),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_COMMON, **_MIXED, tie_word_embeddings=False, query_pre_attn_scalar=8, attn_logit_softcapping=4.0, final_logit_softcapping=9.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**_COMMON, **_MIXED, tie_word_embeddings=False, query_pre_attn_scalar=8),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON,
        **_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **_COMMON | {"num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
    ),
}


DEVICE = "cpu"  # another for `--kernels` on a GPU


def tiny(name: str, seed: int = 0, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """A model of CONFIGS[name] in float32, or of another config; every matrix, sink and router is drawn from normal(0, 0.15)."""
    model = AutoModelForCausalLM.from_config(config or CONFIGS[name](), attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1 or path.endswith("sinks"):
                parameter.normal_(0.0, 2.0 if path.endswith("sinks") else 0.15, generator=generator)
    return model.to(DEVICE)  # type: ignore[arg-type]


def with_heads_of_16(name: str) -> PreTrainedConfig:
    """CONFIGS[name] with the least head dim that compiled FlexAttention takes on a GPU."""
    config = CONFIGS[name]()
    if name == "deepseek_v3":
        config.qk_nope_head_dim, config.qk_head_dim, config.v_head_dim = 12, 16, 16
    else:
        config.head_dim = 16
    return config


def reference(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy answer to one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()
