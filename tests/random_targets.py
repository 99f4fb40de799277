"""Random targets of many architectures with small tokenizers, and drafters with random weights."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(head_dim=8, tie_word_embeddings=True, **SIZES),
    "gemma2": Gemma2Config(head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=2.0, **SIZES),
    "cohere": CohereConfig(logit_scale=0.0625, **SIZES),
    "granite": GraniteConfig(logits_scaling=6.0, **SIZES),
    "gpt_oss": GptOssConfig(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **SIZES),
    "gpt2": GPT2Config(vocab_size=67, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.15, bos_token_id=1, eos_token_id=2),
}  # fmt: skip


def random_model(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name])


def small_tokenizer(words="abc", turn_end="<|end|>"):
    backend = Tokenizer(
        models.WordLevel({"<s>": 0, "</s>": 1, turn_end: 2} | {w: 3 + i for i, w in enumerate([*words, "Answer", "Question"])}, "<s>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<s>", additional_special_tokens=[turn_end]
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '" + turn_end + "\n' }}{% endfor %}"
    return tokenizer


def randomise(drafter, std=0.15):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=std)
    return drafter
