"""Kangaroo: the target's first E layers, an adapter and the target's head draft (Liu et al. 2024, https://arxiv.org/abs/2404.18911).

The adapter is a norm, an attention and a norm, without an MLP: h_E + attention(norm(h_E)), then a norm, after which the target's frozen head
reads. h_E, the output of layer E, is the same of a drafted and of a committed token, so a chain drafts just as it was trained. The second
early exit is of the draft: with a confidence η it ends where the likeliest next token has a smaller probability.

It decodes as a draft model does (inference/draft_model.py), whose cache holds the KV of the E layers and of the adapter; that of accepted
tokens stays. The E layers' KV is in the target's cache too, and a prompt goes through them twice: E of L layers' time and memory. So it
drafts without the target's cache, trees included, and an accepted token is encoded once.

Letters: B rows · S positions · n positions of a forward · R positions that are drafted from · K draft depth · V target vocabulary · H hidden
size · L target layers · E layers that draft.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.inference.attention import TreeAttention, tree_attention_forward
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.draft_model import DraftModel, logits_along
from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput, tensor_addresses
from draftsmith.inference.expand import tree_config
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.decoder_layer import Attention, rotary
from draftsmith.models.drafter import DrafterConfig, DrafterModel
from draftsmith.models.feature_drafter import Attend
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import attend, blocks

CHAIN = 6  # tokens of the default chain, the paper's γ


class KangarooConfig(DrafterConfig):
    """Sizes of the drafter. Where a size is 0, `__post_init__` takes it from the others.

    Attributes:
        exit_layer: E, how many of the target's decoder layers draft.
        num_heads, num_kv_heads, head_dim, rope_theta, rms_norm_eps: of the adapter, as in Llama.
        confidence: η, the least probability of the likeliest next token with which a draft goes on; 0 drafts always.
    """

    model_type = "kangaroo"
    exit_layer: int = 2
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    confidence: float = 0.0

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if min(self.exit_layer, self.num_heads, self.num_kv_heads) < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"got exit_layer {self.exit_layer}, num_heads {self.num_heads}, num_kv_heads {self.num_kv_heads}; expected at least 1 of each, "
                "and a multiple of num_kv_heads as num_heads"
            )
        self.head_dim = self.head_dim or self.hidden_size // self.num_heads
        if self.head_dim % 2:
            raise ValueError(f"got heads of {self.head_dim} entries; RoPE turns pairs of them: expected an even number")
        if not 0 <= self.confidence < 1:
            raise ValueError(f"got confidence {self.confidence}; expected a probability below 1; 0 drafts always")
        if self.tree is None:
            self.tree = tree_config(StaticTree.chain(CHAIN))

    @property
    def least_tensors(self) -> int:
        return 6

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        # Wide, since a small untrained adapter drafts what the bare early exit drafts.
        return {"default": {"exit_layer": 1, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}}


class SelfDraft(DraftModel):
    """The target's first E layers with the adapter, as a draft model."""

    def __init__(self, drafter: "KangarooModel", target: Target) -> None:
        super().__init__(target, drafter.tree_spec, stop=drafter.stop)
        self.target, self.adapter, self.given = target, drafter, drafter.tree_spec

    def _forward(self, ids: Tensor, attention: TreeAttention) -> Tensor:
        """ids [B,n] after the cached tokens -> hidden [B,n,H], which the target's head reads."""
        exit_layer, cache = self.adapter.config.exit_layer, self._state.cache
        positions = attention.positions().clamp(max=self.target.max_positions - 1)
        with self.target.without(range(exit_layer, self.target.num_layers)):
            out = self.target.forward(ids, position_ids=positions, cache=cache, tree=attention, taps=self.adapter.taps)

        def attend_cached(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, exit_layer)  # the cache's layers 0 … E−1 are the target's
            attended, _ = tree_attention_forward(self.adapter, query, keys, values, None, sliding_window=None, tree_attention=attention)
            return attended.transpose(1, 2)

        return self.adapter.step(self.adapter.feature_of(out), positions, attend_cached)

    def propose(self, round: RoundContext) -> DraftTree:
        """As DraftModel; the root alone after a prompt of one token, as of all drafters that read features."""
        tree = super().propose(round)
        cached = self._state.cache.length_bounds()
        if not round.static_shape and min(cached[slot] for slot in round.slots) > 1:
            return tree
        return tree.only(round.positions > 0)


class KangarooModel(DrafterModel):
    """The adapter. What it drafts with is made by `bind`."""

    config_class = KangarooConfig
    config: KangarooConfig
    can_stop = recurrent = True

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.input_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.self_attn = Attention(size, size, config.num_heads, config.num_kv_heads, config.head_dim)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.stop = Stopping("confidence", config.confidence) if config.confidence else None
        self.post_init()

    @property
    def taps(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.config.exit_layer - 1,)

    @property
    def depth_limit(self) -> int:
        return SelfDraft.depth_limit

    def attach(self, target: Target) -> "KangarooModel":
        """As the base class; also raises ValueError where the target has no layers after the first E."""
        if self.config.exit_layer >= target.num_layers:
            raise ValueError(
                f"this Kangaroo drafter runs {self.config.exit_layer} layers; expected fewer than the {target.num_layers} of target "
                f"{target.identity.name!r}; lower exit_layer"
            )
        return super().attach(target)

    # The adapter

    def feature_of(self, out: TargetOutput | NodeOutput) -> Tensor:
        """The target's output at n positions -> h_E [B,n,H]."""
        assert out.taps is not None, "the decoder and the objective ask for `taps`"
        return out.taps[:, :, 0].to(self.norm.weight.dtype)

    def step(self, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """h_E [B,n,H] at positions [B,n] -> what the target's head reads [B,n,H]; the row at a position predicts the token after it."""
        rope = rotary(positions, self.config.head_dim, self.config.rope_theta, feature.dtype)
        output = feature + self.self_attn(self.input_layernorm(feature), rope, 0, attend)
        return self.norm(output).to(self.target.dtype)

    def states_along(self, feature: Tensor, positions: Tensor, document: Tensor) -> Tensor:
        """The adapter along a text, from all positions at once: what drafting makes of the same tokens.

        Args:
            feature: h_E [B,S,H].
            positions, document: [B,S], the numbers of documents in runs.

        Returns:
            What the target's head reads, [B,S,H].
        """
        mask = blocks(document, len(document), document.shape[1], document.device)
        return self.step(feature, positions, lambda _, query, key, value: attend(query, [key], [value], document, mask=mask))

    def forward(self, feature: Tensor, positions: Tensor, document: Tensor) -> Tensor:
        """As `states_along`."""
        return self.states_along(feature, positions, document)

    # The Drafter protocol

    def bind(self, target: Target, slots: int, context: int) -> Any:
        self.attach(target)
        draft: SelfDraft | None = self._state
        if draft is None or draft.target is not target or draft.given is not self.tree_spec:
            draft = self._state = SelfDraft(self, target)
        draft.stop = self.stop
        return draft.bind(target, slots, context), tensor_addresses(self)

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        self._state.start(slots, prompts, out)

    def propose(self, round: RoundContext) -> DraftTree:
        return self._state.propose(round)

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        self._state.accept(round, tree, verdict, out)

    def resumable(self, slot: int, count: int) -> int:
        return self._state.resumable(slot, count)

    def keep(self, slots: list[int]) -> TreeCache | None:
        return self._state.keep(slots)

    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        self._state.resume(slots, prompts, reused, out)

    def drop(self, slots: list[int]) -> None:
        self._state.drop(slots)

    # Position records

    @torch.inference_mode()
    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] and the target's output along them [1,S,·] -> what the target's head reads, [S,H]."""
        positions = torch.arange(len(ids), device=ids.device)[None]
        return self.states_along(self.feature_of(out), positions, torch.zeros_like(positions))[0]

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,H], consecutive positions roots [R] -> [R,K,V]: entry (r,k) ranks token roots[r]+k+1, given all tokens before it."""
        return logits_along(self.target.logits, features, roots, self.depth_limit)


Config = KangarooConfig
Model = KangarooModel
