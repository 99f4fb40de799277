"""DFlash: one forward drafts a block (Chen et al. 2026, https://arxiv.org/abs/2602.06036; tensors and sizes as in z-lab's checkpoints).

A block has n rows: the last committed token, the *anchor*, at position a, and n − 1 masks behind it, all embedded by the target. Row j, from 1,
predicts token a + j, through the target's own head. The layers are Qwen3's. In each of them the rows attend to one another, and to the
context: keys and values that the layer makes of C = hidden_norm(fc(taps)), the target's features at the positions before a. Context rows
pass through no layer, so that an accepted token costs the keys and values of all layers and nothing else.

`causal` lets a row see the rows of its block up to itself (JetSpec and other variants) instead of all. The mask's embedding is a parameter of its
own, or with `mask_token_id` that of a token of the target.

Letters: B rows of a round · S positions · A anchors · n rows of a block · K = n − 1 draft depth · V vocabulary · H hidden size.
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput
from draftsmith.inference.expand import TreeSpec
from draftsmith.inference.level_heads import draft_marginals
from draftsmith.inference.tree import DraftTree
from draftsmith.models.artifact import DEEPEST
from draftsmith.models.block_attention import attend_blocks, blocks_at
from draftsmith.models.decoder_layer import DecoderLayer, rotary
from draftsmith.models.drafter import DrafterConfig, fill_tree
from draftsmith.models.feature_drafter import Attend, PairDrafter
from draftsmith.models.target import Target


class DflashConfig(DrafterConfig):
    """Sizes of the drafter. Where a size is 0, `__post_init__` takes it from the others.

    Attributes:
        taps: decoder layers of the target whose outputs are read, counted from 0.
        block_size: n.
        causal: a row sees no later row of its block.
        mask_token_id: the token of the target that stands for a mask; None for an embedding of its own.
        intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, rope_theta, rms_norm_eps: of the layers, as in Qwen3.
    """

    model_type = "dflash"
    taps: list | None = None
    block_size: int = 8
    causal: bool = False
    mask_token_id: int | None = None
    intermediate_size: int = 0
    num_layers: int = 3
    num_heads: int = 1
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        self.num_kv_heads = self.num_kv_heads or self.num_heads
        if not 1 <= self.depth <= DEEPEST or min(self.num_layers, self.num_heads, self.num_kv_heads) < 1:
            raise ValueError(
                f"got block_size {self.block_size}, num_layers {self.num_layers}, num_heads {self.num_heads}, num_kv_heads "
                f"{self.num_kv_heads}; expected at least one of each, and blocks that draft 1 to {DEEPEST} tokens"
            )
        self.head_dim = self.head_dim or self.hidden_size // self.num_heads
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        if not self.taps or sorted(set(self.taps)) != list(self.taps):
            raise ValueError(f"got taps {self.taps}; expected layers of the target in ascending order, each once, such as [1,15,28]")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"got {self.num_heads} heads of {self.head_dim} entries for {self.num_kv_heads} KV heads; expected a multiple of the KV heads, "
                "and an even number of entries, since RoPE turns pairs of them"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"got mask_token_id {self.mask_token_id}; expected a token of the target, 0 to {self.vocab_size - 1}")
        fill_tree(self, self.depth)

    @property
    def depth(self) -> int:
        """K."""
        return self.block_size - 1

    @property
    def draft_size(self) -> int:
        """W of models/feature_drafter.py."""
        return self.hidden_size

    @property
    def least_tensors(self) -> int:
        return 11 * self.num_layers + 3

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        sizes = {"taps": [0, 1], "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "block_size": 5}
        return {
            "default": sizes,
            "causal": sizes | {"causal": True, "taps": [1], "block_size": 4},
            "a token for the mask": sizes | {"mask_token_id": 3, "num_layers": 1},
        }


class DflashModel(PairDrafter):
    """Layers over blocks and context; embedding and head are the target's."""

    config_class = DflashConfig
    config: DflashConfig

    def __init__(self, config: DflashConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(len(config.taps or ()) * size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        sizes = (size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim)
        self.layers = nn.ModuleList(DecoderLayer(*sizes, config.rms_norm_eps, head_norms=True) for _ in range(config.num_layers))
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.zeros(size))
        self.post_init()

    @property
    def taps(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self.config.taps or ())

    @property
    def depth_limit(self) -> int:
        return self.config.depth

    @torch.no_grad()
    def init_from_target(self, target: Target) -> None:
        """Start the mask's embedding as the mean of the target's."""
        if self.config.mask_token_id is None:
            every = torch.arange(target.vocab_size, device=target.device)
            self.mask_embedding.copy_(target.embed(every).float().mean(0))

    # The network

    def feature_of(self, out: TargetOutput | NodeOutput) -> Tensor:
        """The target's taps at n positions -> C [B,n,H]."""
        assert out.taps is not None, "the decoder and the objective ask for `taps`"
        return self.hidden_norm(self.fc(out.taps.to(self.fc.weight.dtype).flatten(2)))

    def rows_of(self, anchors: Tensor) -> Tensor:
        """Anchor tokens [...] -> the embedded rows of their blocks [...,n,H]."""
        masks = torch.full_like(anchors, self.config.mask_token_id or 0)[..., None].expand(*anchors.shape, self.config.block_size - 1)
        rows = self.target.embed(torch.cat((anchors[..., None], masks), -1)).to(self.fc.weight.dtype)
        if self.config.mask_token_id is None:
            rows = torch.cat((rows[..., :1, :], self.mask_embedding.expand_as(rows[..., 1:, :])), -2)
        return rows

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def states_along(self, feature: Tensor, ids: Tensor, positions: Tensor, document: Tensor, anchors: Tensor) -> Tensor:
        """Draft along a text, from many anchors at once.

        Args:
            feature: C [B,S,H].
            ids, positions, document: [B,S], the numbers of documents in runs.
            anchors: [B,A] positions in the sequence, in order; what the first token of a document drafts is meaningless.

        Returns:
            States [B,A,K,H]; entry k predicts token a + 1 + k.
        """
        size = self.config.block_size
        blocks = blocks_at(anchors, size, document)
        x = self.rows_of(ids.gather(1, anchors)).flatten(1, 2)  # [B,A·n,H]
        at = positions.gather(1, anchors)[..., None] + torch.arange(size, device=anchors.device)
        rope, context_rope = self.rope(at.flatten(1), x.dtype), self.rope(positions, x.dtype)
        for layer in map(self._layer, range(self.config.num_layers)):
            context = layer.self_attn.key_value(feature, context_rope)

            def attend(_: int, query: Tensor, key: Tensor, value: Tensor, context: tuple[Tensor, Tensor] = context) -> Tensor:
                return attend_blocks(query, context, (key, value), blocks, self.config.causal)

            x = layer(x, rope, attend)
        return self.read(x.unflatten(1, (-1, size)))

    def read(self, x: Tensor) -> Tensor:
        """The last layer's output [...,n,H] -> states [...,K,H]."""
        return self.norm(x[..., -self.config.depth :, :])

    def before_head(self, states: Tensor, previous: Tensor) -> Tensor:
        """States [...,H] and the tokens before those that they predict [...] -> what the head reads [...,·]. DFlash reads no token."""
        return states

    def _layer(self, number: int) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[number])

    def head_logits(self, states: Tensor) -> Tensor:
        """What the head reads [...,H] -> logits [...,V], by the target's own head."""
        return self.target.logits(states.to(self.target.dtype))

    # Drafting

    def drafted_positions(self, tree_spec: TreeSpec) -> int:
        return self.config.block_size

    def encode(self, feature: Tensor, tokens: Tensor, attention: TreeAttention) -> Tensor:
        """Write the keys and values that each layer makes of C [B,n,H]; tokens play no part."""
        rope = self.rope(attention.positions(), feature.dtype)
        for number in range(self.config.num_layers):
            self._state.cache.update(*self._layer(number).self_attn.key_value(feature, rope), number)
        return feature

    def draft_states(self, round: RoundContext) -> Tensor:
        """One forward over the blocks of a round's slots -> states [B,K,H]."""
        cache = self._state.cache
        cache.static_shape = round.static_shape
        cache.select(round.slots)
        depth = torch.arange(self.config.block_size, device=round.last_tokens.device).expand(len(round.last_tokens), -1)
        visible = (
            depth[:, None] <= depth[:, :, None]
            if self.config.causal
            else torch.ones_like(depth[:, None] + depth[:, :, None], dtype=torch.bool)
        )
        attention = TreeAttention(cache, depth, visible, all_visible=not self.config.causal)
        attend: Attend = self._cached(attention)
        x = self.rows_of(round.last_tokens)
        rope = self.rope(attention.positions(), x.dtype)
        for number in range(self.config.num_layers):
            x = self._layer(number)(x, rope, attend, number)
        return self.read(x)

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """All levels of the tree from one forward; the root alone where a slot has no context yet."""
        tree_spec = self._state.tree_spec
        if tree_spec.max_depth == 0:
            return DraftTree.root(round.last_tokens)
        logits = self.head_logits(self.draft_states(round)[:, : min(round.depth, tree_spec.max_depth)])
        return self._ready(draft_marginals(tree_spec, logits, round), round)

    # Position records

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] and the target's output along them [1,S,·] -> what the head reads of the blocks that start at each position [S,K,·]."""
        with torch.inference_mode():
            every = torch.arange(len(ids), device=ids.device)[None]
            states = self.states_along(self.feature_of(out), ids[None], every, torch.zeros_like(every), every)[0]
            previous = every[0][:, None] + torch.arange(self.config.depth, device=ids.device)
            return self.before_head(states, ids[previous.clamp(max=len(ids) - 1)])

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,K,·], roots [R] -> [R,K,V]: the block whose anchor is the root."""
        with torch.inference_mode():
            return self.head_logits(features[roots])

    forward = states_along


Config = DflashConfig
Model = DflashModel
