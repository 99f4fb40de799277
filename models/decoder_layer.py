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
    """Projections of a Llama attention whose input, `width`, may be wider than its output, `size`.

    With `eps` the queries and keys of each head are normed, as in Qwen3.
    """

    def __init__(self, width: int, size: int, heads: int, kv_heads: int, dim: int, eps: float | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.q_proj = nn.Linear(width, heads * dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, size, bias=False)
        if eps is not None:
            self.q_norm, self.k_norm = LlamaRMSNorm(dim, eps), LlamaRMSNorm(dim, eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """x [B,n,width] -> [B,n,size]."""
        query, (key, value) = self._heads(x, "q", rope), self.key_value(x, rope)
        return self.o_proj(attend(layer, query, key, value).transpose(1, 2).flatten(2))

    def key_value(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [B,n,width] -> its key and value [B,kv heads,n,dim]."""
        return self._heads(x, "k", rope), self._heads(x, "v")

    def _heads(self, x: Tensor, name: str, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """x [B,n,width] through a projection, normed where there is a norm, turned by RoPE: [B,heads,n,dim]."""
        heads = self.get_submodule(f"{name}_proj")(x).unflatten(-1, (-1, self.dim))
        if f"{name}_norm" in self._modules:
            heads = self.get_submodule(f"{name}_norm")(heads)
        heads = heads.transpose(1, 2)
        return heads if rope is None else apply_rotary_pos_emb(heads, heads, *rope)[0]


class DecoderLayer(nn.Module):
    """A layer of a Llama; with `head_norms` of a Qwen3. It is the identity while o_proj and down_proj are zero."""

    def __init__(
        self, size: int, intermediate_size: int, heads: int, kv_heads: int, dim: int, eps: float, head_norms: bool = False
    ) -> None:
        super().__init__()
        self.self_attn = Attention(size, size, heads, kv_heads, dim, eps if head_norms else None)
        self.mlp = mlp(size, intermediate_size)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, layer: int = 0) -> Tensor:
        """x [B,n,W] -> [B,n,W]; `layer` is its number in the drafter."""
        x = x + self.self_attn(self.input_layernorm(x), rope, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
