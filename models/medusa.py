"""Medusa heads (Cai et al. 2024, https://arxiv.org/abs/2401.10774): K heads that read the target's last hidden state.

Head k, from 0, at position t predicts token t+2+k. It has `num_layers` blocks x + SiLU(W x + b) of its own, then an output layer, which is
its own [V,H] or the target's. Tensors have the names that serving engines read: `{k}.{j}.linear.weight` [H,H] and `.bias` [H] for
block j, and `{k}.{num_layers}.weight` [V,H] for the output layer (absent with share_head).

Letters: B rows · S positions · V vocabulary · H hidden size · K heads.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import CurrentLevel
from draftsmith.inference.level_heads import draft_levels, draft_marginals
from draftsmith.inference.tree import DraftTree
from draftsmith.models.artifact import DEEPEST
from draftsmith.models.drafter import DrafterConfig, Output, fill_tree
from draftsmith.models.hidden_state_drafter import HiddenStateDrafter
from draftsmith.models.target import Target


class MedusaConfig(DrafterConfig):
    """Sizes of the heads.

    Attributes:
        num_heads: K.
        num_layers: blocks of each head.
        share_head: read the target's output layer instead of one for each head.
        medusa_fc_bias: always true; vLLM drops the blocks' biases where it is missing.
    """

    model_type = "medusa"
    num_heads: int = 4
    num_layers: int = 1
    share_head: bool = False
    medusa_fc_bias: bool = True

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if not 1 <= self.num_heads <= DEEPEST or self.num_layers < 1:
            raise ValueError(
                f"got num_heads {self.num_heads}, num_layers {self.num_layers}; expected 1 to {DEEPEST} heads of at least one block"
            )
        if not self.medusa_fc_bias:
            raise ValueError("got medusa_fc_bias false; these heads have biases: leave it out")
        fill_tree(self, self.num_heads)

    @property
    def least_tensors(self) -> int:
        return 2 * self.num_heads * self.num_layers

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        return {"own head": {"num_heads": 3}, "shared head": {"num_heads": 3, "num_layers": 2, "share_head": True}}


class ResBlock(nn.Module):
    """x + SiLU(W x + b); the identity while W and b are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaModel(HiddenStateDrafter):
    """K independent heads, which all run at once, or with a rule that stops drafts one after the other.

    Own output layers leave out a soft-capping of the target: it never changes a ranking.
    """

    can_stop = True
    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        for k in range(config.num_heads):
            blocks: list[nn.Module] = [ResBlock(config.hidden_size) for _ in range(config.num_layers)]
            output = [] if config.share_head else [Output(config.hidden_size, config.vocab_size, bias=False)]
            self.add_module(str(k), nn.ModuleList(blocks + output))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.zeros_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)

    @torch.no_grad()
    def init_from_target(self, target: Target) -> None:
        """Start each own output layer as the target's head, times the scale that the target applies after it."""
        if not self.config.share_head:
            for k in range(self.config.num_heads):
                self.output_weight(k).copy_(target.head_weight).mul_(target.head_scale)

    def output_weight(self, k: int) -> Tensor:
        """Head k's output layer [V,H]; with share_head the target's."""
        if self.config.share_head:
            return self.target.head_weight
        return self._head(k)[self.config.num_layers].get_parameter("weight")

    def output(self, k: int) -> Tensor | Callable[[Tensor], Tensor]:
        """Head k's output for the chunked losses: its own weight [V,H], or with share_head the target's `logits` as a callable."""
        return self._target_logits if self.config.share_head else self.output_weight(k)

    def _target_logits(self, x: Tensor) -> Tensor:
        return self.target.logits(x.to(self.target.dtype))

    def hidden_of(self, k: int, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> [...,H] after the blocks of head k, in the drafter's dtype."""
        blocks = [cast(ResBlock, self._head(k)[j]) for j in range(self.config.num_layers)]
        x = hidden.to(blocks[0].linear.weight.dtype)
        for block in blocks:
            x = block(x)
        return x

    def _head(self, k: int) -> nn.ModuleList:
        return cast(nn.ModuleList, self._modules[str(k)])

    def logits_of(self, k: int, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> head k's logits [...,V]."""
        x = self.hidden_of(k, hidden)
        if self.config.share_head:
            return self._target_logits(x)
        return self._head(k)[self.config.num_layers](x)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> [...,K,V]. For few positions; training goes through the chunked losses."""
        return torch.stack([self.logits_of(k, hidden) for k in range(self.config.num_heads)], dim=-2)

    @property
    def depth_limit(self) -> int:
        return self.config.num_heads

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,H] are the target's hidden states; a round whose root is at i reads the one at i − 1."""
        return self.head_logits(features[roots - 1])

    forward = head_logits

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """The config's tree filled with the heads' tokens; the root alone where a slot has no hidden state."""
        tree_spec = self._state.tree_spec
        if tree_spec.max_depth == 0:
            return DraftTree.root(round.last_tokens)
        hidden, has_state = self.hidden_states(round)
        if self.stop is None:
            depth = min(round.depth, tree_spec.max_depth)
            tree = draft_marginals(tree_spec, torch.stack([self.logits_of(k, hidden) for k in range(depth)], 1), round)
        else:

            def logits_of(k: int, level: CurrentLevel | None) -> Tensor:
                return self.logits_of(k, hidden)[:, None].expand(-1, level.tokens.shape[1] if level else 1, -1)

            tree = draft_levels(tree_spec, self.config.num_heads, round, logits_of, self.stop)
        return tree.only(has_state)


Config = MedusaConfig
Model = MedusaModel
