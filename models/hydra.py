"""Hydra heads (Ankner et al. 2024, https://arxiv.org/abs/2402.05109): K heads, each of which reads the tokens drafted before it.

Head k, from 0, at position t predicts token t+2+k. It reads the target's hidden state at t and the embeddings of tokens t+1 … t+1+k; in a
round token t+1 is the root, the later ones are drafted. Its first block is R y + SiLU(W y + b) of all of these, y; its others are
x + SiLU(W x + b), each with weights of its own (the authors' code repeats one block). Then comes an output layer, which is its own [V,H] or
the target's. Hydra++ has more blocks, and `prefix`: a decoder layer over the target's hidden states, whose output takes their place.

Tensors have the authors' names: `hydra_mlp.{k}.{j}.linear`, `hydra_mlp.{k}.0.res_connection`, `hydra_lm_head.{k}`,
`prefix_embeding_layer.layers.0.*` and `prefix_embeding_layer.norm`.

Letters: B rows · S positions · V vocabulary · H hidden size · K heads · F nodes of the current level.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput
from draftsmith.inference.expand import CurrentLevel
from draftsmith.inference.level_heads import draft_levels
from draftsmith.inference.tree import DraftTree
from draftsmith.models.artifact import DEEPEST
from draftsmith.models.decoder_layer import DecoderLayer, rotary
from draftsmith.models.drafter import DrafterConfig, Output, fill_tree
from draftsmith.models.feature_drafter import Attend, PairDrafter
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import attend, blocks


class HydraConfig(DrafterConfig):
    """Sizes of the heads. Where a size of the prefix layer is 0, `__post_init__` takes it from the others.

    Attributes:
        num_heads: K.
        num_layers: blocks of each head.
        share_head: read the target's output layer instead of one for each head.
        head_bias: own output layers have a bias, as in the authors' folders.
        prefix: a decoder layer runs over the target's hidden states first.
        attention_heads, kv_heads, head_dim, intermediate_size, rope_theta, rms_norm_eps: of that layer, as in Llama.
    """

    model_type = "hydra"
    num_heads: int = 4
    num_layers: int = 1
    share_head: bool = False
    head_bias: bool = False
    prefix: bool = False
    attention_heads: int = 1
    kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if not 1 <= self.num_heads <= DEEPEST or self.num_layers < 1:
            raise ValueError(
                f"got num_heads {self.num_heads}, num_layers {self.num_layers}; expected 1 to {DEEPEST} heads of at least one block"
            )
        if self.share_head and self.head_bias:
            raise ValueError("got share_head and head_bias; the target's output layer is taken as it is: leave out one of them")
        if self.attention_heads < 1:
            raise ValueError(f"got attention_heads {self.attention_heads}; expected at least 1")
        self.kv_heads = self.kv_heads or self.attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.attention_heads
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        if self.attention_heads % self.kv_heads or self.prefix and self.head_dim % 2:
            raise ValueError(
                f"got {self.attention_heads} attention heads of {self.head_dim} entries for {self.kv_heads} KV heads; expected a multiple of "
                "the KV heads, and an even number of entries, since RoPE turns pairs of them"
            )
        fill_tree(self, self.num_heads)

    @property
    def draft_size(self) -> int:
        """W of models/feature_drafter.py."""
        return self.hidden_size

    @property
    def least_tensors(self) -> int:
        return 2 * self.num_heads * self.num_layers

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        return {
            "own head": {"num_heads": 4},
            "shared head": {"num_heads": 3, "num_layers": 2, "share_head": True},
            "++": {"num_heads": 3, "num_layers": 2, "head_bias": True, "prefix": True, "attention_heads": 4, "kv_heads": 2},
        }


class ResBlock(nn.Module):
    """residual(x) + SiLU(W x + b) of `inputs` vectors of H entries. The residual is x itself, or of several vectors a linear layer."""

    def __init__(self, hidden_size: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * hidden_size, hidden_size)
        self.res_connection = nn.Linear(inputs * hidden_size, hidden_size) if inputs > 1 else nn.Identity()

    def forward(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """x [...,inputs·H] -> [...,H]. weights, in the order of `parameters()`, take the place of its own."""
        if weights is None:
            return self.res_connection(x) + F.silu(self.linear(x))
        weight, bias, *residual = weights
        return (F.linear(x, *residual) if residual else x) + F.silu(F.linear(x, weight, bias))


class Prefix(nn.Module):
    """A decoder layer over the target's hidden states, and the norm after it."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.dim, self.theta = config.head_dim, config.rope_theta
        sizes = (config.hidden_size, config.intermediate_size, config.attention_heads, config.kv_heads, config.head_dim)
        self.layers = nn.ModuleList([DecoderLayer(*sizes, config.rms_norm_eps)])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """hidden [B,n,H] at positions [B,n] -> [B,n,H]."""
        return self.norm(self.layers[0](hidden, rotary(positions, self.dim, self.theta, hidden.dtype), attend))


class HydraModel(PairDrafter):
    """K heads, drafted with level by level. Own output layers leave out a soft-capping of the target: it never changes a ranking."""

    can_stop = True
    config_class = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size, heads = config.hidden_size, range(config.num_heads)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(ResBlock(size, k + 2), *(ResBlock(size) for _ in range(config.num_layers - 1))) for k in heads
        )
        if not config.share_head:
            self.hydra_lm_head = nn.ModuleList(Output(size, config.vocab_size, bias=config.head_bias) for _ in heads)
        if config.prefix:
            self.prefix_embeding_layer = Prefix(config)
        self.post_init()

    @torch.no_grad()
    def init_from_target(self, target: Target) -> None:
        """Heads pass the hidden state on to the target's output layer, and the prefix layer norms it, until they are trained."""
        for module in self.modules():
            if isinstance(module, ResBlock):
                module.linear.weight.zero_()
                if isinstance(module.res_connection, nn.Linear):
                    nn.init.eye_(module.res_connection.weight)
            elif isinstance(module, DecoderLayer):
                module.self_attn.o_proj.weight.zero_()
                module.mlp.down_proj.get_parameter("weight").zero_()
        if not self.config.share_head:  # times the scale that the target applies after its head
            for output in self.hydra_lm_head:
                output.get_parameter("weight").copy_(target.head_weight).mul_(target.head_scale)

    # The network

    def feature_of(self, out: TargetOutput | NodeOutput) -> Tensor:
        """The target's hidden states [B,n,H], in the drafter's dtype."""
        return out.hidden.to(self.hydra_mlp[0].get_submodule("0.linear").get_parameter("weight").dtype)

    def step(self, feature: Tensor, tokens: Tensor | None, positions: Tensor, attend: Attend) -> Tensor:
        """The root states [B,n,H] of feature [B,n,H] at positions [B,n]: what the heads read for the hidden state. Tokens play no part."""
        return self.prefix_embeding_layer(feature, positions, attend) if self.config.prefix else feature

    @property
    def reads_context(self) -> bool:
        return self.config.prefix

    def root_states(self, feature: Tensor, positions: Tensor, document: Tensor) -> Tensor:
        """`step` at all positions of packed sequences: feature [B,S,H], positions and document numbers [B,S] -> [B,S,H]."""
        mask = blocks(document, len(document), document.shape[1], document.device) if self.config.prefix else None

        def causal(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, [key], [value], document, mask=mask)

        return self.step(feature, None, positions, causal)

    def hidden_of(self, k: int, root: Tensor, embeddings: Tensor, given: Mapping[str, Tensor] | None = None) -> Tensor:
        """Head k's hidden state [...,H] from the root state [...,H] and the embeddings [...,k+1,H] of the root and of the k tokens after it.

        given: weights in the place of its own, by the names of `head_parameters`.
        """
        x = torch.cat((root, embeddings.flatten(-2).to(root.dtype)), -1)
        for j, block in enumerate(cast(nn.Sequential, self.hydra_mlp[k])):
            x = block(x, given and [given[f"hydra_mlp.{k}.{j}.{name}"] for name, _ in block.named_parameters()])
        return x

    def hidden_along(self, root: Tensor, embeddings: Tensor, given: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """`hidden_of` of all K heads on the same tokens: root [m,H], embeddings [m,K,H] -> K times [m,H]."""
        return [self.hidden_of(k, root, embeddings[:, : k + 1], given) for k in range(self.config.num_heads)]

    def output(self, k: int, given: Mapping[str, Tensor]) -> Tensor | Callable[[Tensor], Tensor]:
        """Head k's output for the chunked losses: its weight [V,H] of `given`, or a callable to logits."""
        if self.config.share_head:
            return self._target_logits
        weight = given[f"hydra_lm_head.{k}.weight"]
        return partial(F.linear, weight=weight, bias=given[f"hydra_lm_head.{k}.bias"]) if self.config.head_bias else weight

    def _target_logits(self, x: Tensor) -> Tensor:
        return self.target.logits(x.to(self.target.dtype))

    def logits_of(self, k: int, root: Tensor, embeddings: Tensor) -> Tensor:
        """As `hidden_of` -> head k's logits [...,V]."""
        x = self.hidden_of(k, root, embeddings)
        return self._target_logits(x) if self.config.share_head else self.hydra_lm_head[k](x)

    def head_parameters(self) -> dict[str, Tensor]:
        """The parameters of the heads by name, without those of the prefix layer. ZeRO-3 gathers what is read by name, as here."""
        return {name: self.get_parameter(name) for name, _ in self.named_parameters() if not name.startswith("prefix")}

    @property
    def activations(self) -> int:
        """About how many numbers training keeps of a position until its backward pass.

        Head k reads k + 2 vectors of H; each of its blocks has one inside SiLU and gives one; the last has a gradient; and K embeddings are
        read.
        """
        heads = self.config.num_heads
        return self.config.hidden_size * (heads * (heads + 3) // 2 + 2 * heads * self.config.num_layers + 2 * heads)

    # Drafting

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """One head per level of the tree, on the tokens of each node's path; the root alone where a slot has no hidden state."""
        root = self._state.last_output[round.slot_index]
        path = self.target.embed(round.last_tokens)[:, None, None]  # [B,F,k+1,H], the embeddings from the root to each node

        def logits_of(k: int, level: CurrentLevel | None) -> Tensor:
            nonlocal path
            if level is not None:
                parent = level.parent_index[:, :, None, None].expand(-1, -1, *path.shape[2:])
                path = torch.cat((path.gather(1, parent), self.target.embed(level.tokens)[:, :, None]), 2)
            return self.logits_of(k, root.expand(-1, path.shape[1], -1), path)

        tree = draft_levels(self._state.tree_spec, self.config.num_heads, round, logits_of, self.stop)
        return self._ready(tree, round)

    # Position records

    @property
    def depth_limit(self) -> int:
        return self.config.num_heads

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] and the target's output along them [1,S,H] -> [S,2·H]: root states beside the embeddings of the tokens."""
        with torch.inference_mode():
            root = self.root_states(self.feature_of(out), torch.arange(len(ids), device=ids.device)[None], torch.zeros_like(ids)[None])
            return torch.cat((root[0], self.target.embed(ids).to(root.dtype)), -1)

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,2·H], roots [R] -> [R,K,V]: a round whose root is at i reads the root state at i − 1 and the tokens from i on."""
        with torch.inference_mode():
            states, embeddings = features.chunk(2, -1)
            read = (roots[:, None] + torch.arange(self.config.num_heads, device=roots.device)).clamp(max=len(features) - 1)
            path = embeddings[read]  # [R,K,H]
            return torch.stack([self.logits_of(k, states[roots - 1], path[:, : k + 1]) for k in range(self.config.num_heads)], 1)

    def forward(self, feature: Tensor, positions: Tensor, document: Tensor) -> Tensor:
        """As `root_states`."""
        return self.root_states(feature, positions, document)


Config = HydraConfig
Model = HydraModel
