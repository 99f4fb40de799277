"""A Llama decoder layer whose keys and values its caller keeps: in the KV cache of a drafter, or beside those of earlier draft steps.

Letters: B rows · n positions of a step · W hidden size of the layer.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from draftsmith.models.feature_drafter import Attend

__all__ = ["Attention", "DecoderLayer", "mlp", "rotary"]


def rotary(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [B,n] -> RoPE's cos and sin [B,n,dim]. Computed each time in fp32, since a buffer would be rounded with the weights."""
    frequency = theta ** -(torch.arange(0, dim, 2, device=positions.device) / dim)
    angle = (positions[..., None] * frequency).repeat(1, 1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def mlp(size: int, intermediate_size: int) -> LlamaMLP:
    """Llama's MLP. (Heads are not named: LlamaConfig wants them to divide the size.)"""
    return LlamaMLP(LlamaConfig(hidden_size=size, intermediate_size=intermediate_size, num_attention_heads=1))


class Attention(nn.Module):
    """Projections of a Llama attention whose input, `width`, may be wider than its output, `size`."""

    def __init__(self, width: int, size: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.q_proj = nn.Linear(width, heads * dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """x [B,n,width] -> [B,n,size]."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rope)
        return self.o_proj(attend(layer, query, key, value).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """A layer of a Llama, as the first of its model. It is the identity while o_proj and down_proj are zero."""

    def __init__(self, size: int, intermediate_size: int, heads: int, kv_heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.self_attn = Attention(size, size, heads, kv_heads, dim)
        self.mlp = mlp(size, intermediate_size)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x [B,n,W] -> [B,n,W]."""
        x = x + self.self_attn(self.input_layernorm(x), rope, 0, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
