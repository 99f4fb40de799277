"""The base of heads that read one hidden state of the target: Medusa, MLP speculators.

It keeps that state for every slot of the decoder. A subclass adds its modules and `propose`, which reads `hidden_states` and ends with
`tree.only(has_state)`.

Letters: B rows of a round · R starting slots · S positions · N tree nodes · H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache import TreeCache, index_tensor
from draftsmith.inference.drafter import NodeOutput, RoundContext, tensor_addresses
from draftsmith.inference.expand import TreeSpec
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.drafter import DrafterModel, same_layout
from draftsmith.models.target import Target


@dataclass(slots=True, eq=False)
class HiddenStates:
    """What the drafter keeps between rounds.

    Attributes:
        hidden: the target's hidden state at the last position in the cache, [slots,H].
        ready: whether a slot has one, [slots] bool.
        tree_spec: the drafter's tree, its tensors on the target's device.
        bound_spec: the object that `tree_spec` was made from; another one needs another bind.
    """

    hidden: Tensor
    ready: Tensor
    tree_spec: TreeSpec
    bound_spec: TreeSpec


class HiddenStateDrafter(DrafterModel):
    """Everything of the Drafter protocol but `propose`."""

    def bind(self, target: Target, slots: int, context: int) -> Any:
        """Attach the target and allocate a hidden state for each slot, unless an earlier bind's fit. `context` plays no part."""
        self.attach(target)
        hidden = torch.zeros(slots, self.config.hidden_size, dtype=target.dtype, device=target.device)
        state = self._state
        if state and state.bound_spec is self.tree_spec and same_layout(state.hidden, hidden):
            self.drop(list(range(slots)))
        else:
            ready = hidden.new_zeros(slots, dtype=torch.bool)
            self._state = HiddenStates(hidden, ready, self.tree_spec.to(target.device), self.tree_spec)
        return self._state, tensor_addresses(self)

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """Keep out.hidden [R,S−1,H] at prompt[-2]; a prompt of one token has no hidden state."""
        device = self._state.hidden.device
        last = torch.tensor([len(prompt) - 2 for prompt in prompts], device=device)
        self._state.ready[slots] = last >= 0
        if out.hidden.shape[1]:
            self._state.hidden[slots] = out.hidden[torch.arange(len(prompts), device=device), last.clamp(min=0)]

    def resumable(self, slot: int, count: int) -> int:
        return count

    def keep(self, slots: list[int]) -> TreeCache | None:
        self.drop(slots)

    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        """As `start`: the hidden state at prompt[-2] is among those of `out`."""
        self.start(slots, [prompt[count:] for prompt, count in zip(prompts, reused, strict=True)], out)

    def hidden_states(self, round: RoundContext) -> tuple[Tensor, Tensor]:
        """The hidden states [B,H] of a round's slots, and has_state [B] bool: False where there is none, and only the root is proposed."""
        return self._state.hidden[round.slot_index], self._state.ready[round.slot_index]

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        """Keep out.hidden [B,N,H] at the last accepted node of each row; idle rows (length 0) keep what they have."""
        state, fresh = self._state, out.hidden[:, 0]
        if tree.tokens.shape[1] > 1:
            node = verdict.path.amax(1).clamp(min=0)  # parents come first, so the deepest accepted node has the largest index
            fresh = out.hidden[torch.arange(len(node), device=node.device), node]
        moved = verdict.length > 0
        state.hidden.index_copy_(0, round.slot_index, torch.where(moved[:, None], fresh, state.hidden.index_select(0, round.slot_index)))
        state.ready.index_copy_(0, round.slot_index, state.ready.index_select(0, round.slot_index) | moved)

    def drop(self, slots: list[int]) -> None:
        """Forget these slots."""
        self._state.ready.index_fill_(0, index_tensor(slots, self._state.ready.device), False)
