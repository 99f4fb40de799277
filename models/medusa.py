"""Medusa heads (Cai et al. 2024, https://arxiv.org/abs/2401.10774): K heads that read the target's last hidden state.

Head k, from 0, at position t predicts token t+2+k: L blocks x + SiLU(W x + b), each with weights of its own, then an output
layer, the head's own [V,H] or the target's. Tensors: `{k}.{j}.linear.weight` [H,H] and `.bias` [H] for block j < L,
`{k}.{L}.weight` [V,H] (absent with share_head), the names that serving engines read.

Letters: B rows · S positions · N tree nodes · V vocabulary · H hidden size · K heads · L blocks · R candidates per head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from draftsmith.inference.cache import placed
from draftsmith.inference.drafter import NodeOutput, RoundContext, tensor_addresses
from draftsmith.inference.expand import DynamicExpansion, TreeSpec, choose, grow, parse_tree_spec
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.drafter import DrafterConfig, DrafterModel, default_paths, same_layout
from draftsmith.models.target import Target


class MedusaConfig(DrafterConfig):
    """num_heads K, num_layers L (blocks per head), share_head: the target's head instead of one per Medusa head."""

    model_type = "medusa"
    num_heads: int = 4
    num_layers: int = 1
    share_head: bool = False

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if self.tree is None:
            self.tree = default_paths(self.num_heads)
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(f"got {self.num_heads} heads of {self.num_layers} blocks; expected at least one of each")
        deepest = parse_tree_spec(self.tree).max_depth
        if deepest > self.num_heads:
            raise ValueError(f"got a tree {deepest} deep for {self.num_heads} heads; expected at most one level per head; cut the tree")


class ResBlock(nn.Module):
    """x + SiLU(W x + b); the identity while W and b are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Output(nn.Module):
    """[V,H] without bias; zero until `init_from_target` copies the target's head, so that building it costs nothing."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab_size, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclass(slots=True, eq=False)
class Rows:
    """hidden [rows,H]: the target's hidden state at the last position in the cache · ready [rows]: whether there is one · shape: `given`,
    on the device."""

    hidden: Tensor
    ready: Tensor
    shape: TreeSpec
    given: TreeSpec


class MedusaModel(DrafterModel):
    """K independent heads. A soft-capping of the target is not applied to own output layers: it never changes a ranking."""

    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        for k in range(config.num_heads):
            blocks: list[nn.Module] = [ResBlock(config.hidden_size) for _ in range(config.num_layers)]
            output = [] if config.share_head else [Output(config.vocab_size, config.hidden_size)]
            self.add_module(str(k), nn.ModuleList(blocks + output))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.zeros_(module.weight)
            init.zeros_(module.bias)

    @torch.no_grad()
    def init_from_target(self, target: Target) -> None:
        """Own output layers start as the target's head, times the scale that the target applies after it."""
        if not self.config.share_head:
            for k in range(self.config.num_heads):
                self.output_weight(k).copy_(target.head_weight).mul_(target.head_scale)

    def output_weight(self, k: int) -> Tensor:
        """Head k's output layer [V,H]; with share_head the target's."""
        if self.config.share_head:
            return self.target.head_weight
        return self._head(k)[self.config.num_layers].get_parameter("weight")

    def output(self, k: int) -> Tensor | Callable[[Tensor], Tensor]:
        """Head k's output for the chunked losses: own weight [V,H], or with share_head the target's `logits` as a callable."""
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

    def hidden(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> [...,K,H], after the blocks and before the output."""
        return torch.stack([self.hidden_of(k, hidden) for k in range(self.config.num_heads)], dim=-2)

    def logits_of(self, k: int, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> head k's logits [...,V]."""
        x = self.hidden_of(k, hidden)
        if self.config.share_head:
            return self._target_logits(x)
        return F.linear(x, self.output_weight(k))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> [...,K,V]; for few positions, training goes through the chunked losses."""
        return torch.stack([self.logits_of(k, hidden) for k in range(self.config.num_heads)], dim=-2)

    @property
    def depth_limit(self) -> int:
        return self.config.num_heads

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,H] are the target's hidden states; a round whose root is at i reads the one at i − 1."""
        return self.head_logits(features[roots - 1])

    forward = head_logits

    # The Drafter protocol

    def bind(self, target: Target, rows: int, context: int) -> Any:
        """Attach the target and allocate one hidden state per row, where there is none that fits; `context` is of no concern to heads."""
        self.attach(target)
        hidden = torch.zeros(rows, self.config.hidden_size, dtype=target.dtype, device=target.device)
        held = self._state
        if held and held.given is self.tree_spec and same_layout(held.hidden, hidden):
            self.drop(list(range(rows)))
        else:
            self._state = Rows(hidden, hidden.new_zeros(rows, dtype=torch.bool), self.tree_spec.to(target.device), self.tree_spec)
        return self._state, tensor_addresses(self)

    def start(self, rows: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """out.hidden [R,S−1,H]: keep the state at prompt[-2]; a prompt of one token has none."""
        device = self._state.hidden.device
        last = torch.tensor([len(prompt) - 2 for prompt in prompts], device=device)
        self._state.ready[rows] = last >= 0
        if out.hidden.shape[1]:
            self._state.hidden[rows] = out.hidden[torch.arange(len(prompts), device=device), last.clamp(min=0)]

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """The config's tree filled with the heads' tokens; the root alone where a row has no state."""
        state = self._state
        if state.shape.max_depth == 0:
            return DraftTree.root(round.last_tokens)
        growth = grow(state.shape, round)
        hidden = state.hidden[round.slot_index]
        depth = min(round.depth, state.shape.max_depth)
        logits = torch.stack([self.logits_of(k, hidden) for k in range(depth)], dim=1)  # [B,K,V]
        index = round.positions[:, None] + 1 + torch.arange(depth, device=hidden.device)
        width = growth.count if isinstance(growth, DynamicExpansion) else growth.topology.width
        ids, scores, q = choose(logits, width, round, index, growth.scored)
        if isinstance(growth, DynamicExpansion):
            assert scores is not None
            inner = 1
            for k in range(depth):  # a head's candidates are the same whatever was drafted before
                shape = (-1, inner, -1)
                frontier = growth.extend(ids[:, k : k + 1].expand(shape), scores[:, k : k + 1].expand(shape))
                inner = frontier.tokens.shape[1] if frontier else 0
            tree, _ = growth.finish()
        else:
            tree = growth.topology.tree(round.last_tokens, ids)
            if q is not None:  # at the leaves, which have no children, any law will do
                tree.q_logits, tree.replacement = q[:, growth.topology.depth.clamp(max=depth - 1)], growth.replacement
        return replace(tree, size=torch.where(state.ready[round.slot_index], tree.size, 1), full=False, _deepest=None)

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        """Keep out.hidden [B,N,H] at the last accepted node of each row; idle rows (length 0) keep what they have."""
        state, fresh = self._state, out.hidden[:, 0]
        if tree.tokens.shape[1] > 1:
            node = verdict.path.amax(1).clamp(min=0)  # parents come first, so the deepest kept node has the largest index
            fresh = out.hidden[torch.arange(len(node), device=node.device), node]
        moved = verdict.length > 0
        state.hidden.index_copy_(0, round.slot_index, torch.where(moved[:, None], fresh, state.hidden.index_select(0, round.slot_index)))
        state.ready.index_copy_(0, round.slot_index, state.ready.index_select(0, round.slot_index) | moved)

    def drop(self, rows: list[int]) -> None:
        self._state.ready.index_fill_(0, placed(rows, self._state.ready.device), False)


Config = MedusaConfig
Model = MedusaModel
