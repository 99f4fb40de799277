"""The contracts between the decoder, a drafter and the target. The decoder knows no method, only these.

Taps are auxiliary hidden states: tap i is the output of decoder layer i, counted from 0.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from draftsmith.inference.kernels import active
from draftsmith.inference.kernels.reference import take_reference
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree

if TYPE_CHECKING:
    from draftsmith.inference.cache import TreeCache
    from draftsmith.inference.verify import Verdict

__all__ = ["RoundContext", "Drafter", "NodeOutput", "Plain", "ResumableDrafter", "Target", "TargetOutput", "tensor_addresses"]


@dataclass(slots=True)
class TargetOutput:
    """One forward of the target: hidden [B,S,H] after the final norm, taps [B,S,T,H] or None."""

    hidden: Tensor
    taps: Tensor | None = None


@dataclass(slots=True)
class NodeOutput:
    """The target's features of tree nodes, for a drafter: hidden [B,N,H] after the final norm, taps [B,N,T,H] or None."""

    hidden: Tensor
    taps: Tensor | None = None

    def along(self, path: Tensor) -> "NodeOutput":
        """The features of the nodes of path [B,P], 0 where it is −1: hidden [B,P,H], taps [B,P,T,H]."""
        take = _take()
        return NodeOutput(take(self.hidden, path), None if self.taps is None else take(self.taps, path))


def _take() -> Callable[[Tensor, Tensor], Tensor]:
    if not active():
        return take_reference
    from draftsmith.inference.kernels import commit

    return commit.take


@dataclass(slots=True)
class RoundContext:
    """What a drafter knows of the round that it drafts for.

    Attributes:
        slots: the B slots of this round, on the host.
        slot_index: the same [B], on the device.
        last_tokens: the last committed token of each slot [B], node 0 of its tree.
        positions: absolute position of `last_tokens` [B].
        noise_keys: noise key of each slot's request [B].
        sampling: how tokens are drawn; it says how children are chosen.
        depth: draft no deeper than this (at least 1).
        active: mask [B] of active slots in a static-shape (CUDA-graph) round: shapes must then not depend on what was accepted, and no
            host synchronisation is allowed. None outside graphs.
        cache: the target's KV cache, the slots of the round selected, for a drafter that reads the target's own KV. It may write after the
            committed positions, as many as its `max_nodes`: verification overwrites them. None where no target follows.
        scored: the trees are to say how likely their nodes are to survive (`DraftTree.survival`).
    """

    slots: list[int]
    slot_index: Tensor
    last_tokens: Tensor
    positions: Tensor
    noise_keys: Tensor
    sampling: Sampling
    depth: int
    active: Tensor | None = None
    cache: "TreeCache | None" = None
    scored: bool = False

    @property
    def static_shape(self) -> bool:
        """Whether shapes must not depend on what was accepted."""
        return self.active is not None


def tensor_addresses(model: nn.Module) -> tuple[int, ...]:
    """The addresses of a model's weights and buffers: a CUDA graph reads them there, whatever becomes of the model."""
    return tuple(tensor.data_ptr() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


class Target(Protocol):
    """What the decoder needs of the target; `draftsmith.models.target.Target` is one."""

    model: Any
    config: Any
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    stop_ids: frozenset[int]

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor | None = None, cache: Any = None, tree: Any = None, taps: tuple[int, ...] = ()
    ) -> TargetOutput:
        """input_ids, position_ids [B,S] -> hidden and taps of the base decoder. cache, tree: for tree attention."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> [...,V], the model's own logits."""
        ...

    def without(self, layers: Iterable[int]) -> AbstractContextManager[None]:
        """Context in which these decoder layers return their input unchanged."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes a tree per round. `bind` allocates its state, indexed by slot; the requests in slots come and go.

    Attributes:
        capturable: `propose` runs on the device alone, so that a CUDA graph can hold it.
        taps: the target's layers whose outputs it reads.
        max_nodes: N at most, the root included.
        max_depth: K at most.
    """

    @property
    def capturable(self) -> bool: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def max_nodes(self) -> int: ...
    @property
    def max_depth(self) -> int: ...

    def bind(self, target: Any, slots: int, context: int) -> Any:
        """Keep a reference to the target, and allocate state for `slots` slots of `context` positions, or reuse an earlier bind's if it fits.

        Returns:
            What a CUDA graph of its rounds reads. It equals an earlier bind's value if and only if no tensor has moved.
        """
        ...

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """New requests begin in these slots. The cache holds prompt[:-1]; node 0 of the first tree is prompt[-1].

        Args:
            slots: B slots.
            prompts: their prompts, S the length of the longest.
            out: the target's features [B,S−1,·]; row b is valid for len(prompts[b]) − 1 positions. A prompt of one token has none, and
                feature drafters then propose the root alone.
        """
        ...

    def propose(self, round: RoundContext) -> DraftTree:
        """The trees of this round's slots; node 0 is the root, which holds the last committed token."""
        ...

    def accept(self, round: RoundContext, tree: DraftTree, verdict: "Verdict", out: NodeOutput) -> None:
        """Learn what was accepted.

        Args:
            round: the context of the round.
            tree: the proposed tree; if the decoder did not call `propose`, the root alone.
            verdict: what was accepted of it. In eager rounds `verdict.on_host(tree)` costs no further transfer.
            out: the target's features of all N nodes.
        """
        ...

    def drop(self, slots: list[int]) -> None:
        """The requests in these slots have ended, and their state is free."""
        ...


@runtime_checkable
class ResumableDrafter(Protocol):
    """A drafter that can go on in a slot whose last request has ended: the next turn of a conversation."""

    def resumable(self, slot: int, count: int) -> int:
        """How many of the first `count` positions of the slot's last text it can go on from: `count`, or 0 where it cannot."""
        ...

    def keep(self, slots: list[int]) -> "TreeCache | None":
        """The requests in these slots have ended, and may be resumed: in place of `drop`. `bind` leaves such slots as they are.

        Returns:
            The cache that has their KV by slot; None if it has none. The KV may be moved to another slot, which is then kept too.
        """
        ...

    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        """As `start`, in slots that were kept.

        Args:
            slots: B slots.
            prompts: their prompts. prompts[b] begins with reused[b] + 1 tokens of the slot's last text, and has more.
            reused: positions that `resumable` allowed.
            out: the target's features of positions reused[b] … len(prompts[b]) − 2.
        """
        ...


class Plain:
    """Proposes the root alone: plain decoding."""

    capturable = True
    taps: tuple[int, ...] = ()
    max_nodes = 1
    max_depth = 0

    def bind(self, target: Target, slots: int, context: int) -> Any:
        pass

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        pass

    def propose(self, round: RoundContext) -> DraftTree:
        return DraftTree.root(round.last_tokens)

    def accept(self, round: RoundContext, tree: DraftTree, verdict: "Verdict", out: NodeOutput) -> None:
        pass

    def drop(self, slots: list[int]) -> None:
        pass

    def resumable(self, slot: int, count: int) -> int:
        return count

    def keep(self, slots: list[int]) -> "TreeCache | None":
        pass

    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        pass
