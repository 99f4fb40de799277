"""The contracts between the decoder, a drafter and the target. The decoder knows no method, only these.

Letters: B rows of a round · R rows that start · S positions · N tree nodes · H hidden size · T taps · V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from draftsmith.inference.kernels import active
from draftsmith.inference.kernels.reference import take_reference
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree

if TYPE_CHECKING:
    from draftsmith.inference.verify import Verdict

__all__ = ["RoundContext", "Drafter", "NodeOutput", "Plain", "Target", "TargetOutput", "tensor_addresses"]


@dataclass(slots=True)
class TargetOutput:
    """One forward of the target: hidden [B,S,H] after the final norm, taps [B,S,T,H] or None."""

    hidden: Tensor
    taps: Tensor | None = None


@dataclass(slots=True)
class NodeOutput:
    """What a drafter sees of a forward: hidden [B,N,H], taps [B,N,T,H] or None."""

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
    """

    slots: list[int]
    slot_index: Tensor
    last_tokens: Tensor
    positions: Tensor
    noise_keys: Tensor
    sampling: Sampling
    depth: int
    active: Tensor | None = None

    @property
    def static_shape(self) -> bool:
        """Whether shapes must not depend on what was accepted."""
        return self.active is not None


def tensor_addresses(model: nn.Module) -> tuple[int, ...]:
    """Where a model's weights and buffers lie: a graph reads them there, whatever becomes of the model."""
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
        """input_ids, position_ids [B,S] -> hidden and taps of the base decoder."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> [...,V], the model's own logits."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes a tree per round. State is preallocated by `bind` and indexed by row; rows come and go.

    capturable: `propose` runs on the device alone, so that it may be part of a graph · taps: the decoder layers that it reads ·
    max_nodes: N at most, root included · max_depth: K at most.
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
        """Take the target by reference and have state for `rows` rows of `context` positions: that of an earlier bind, if it fits.

        -> what a graph of its rounds reads: equal to that of an earlier bind only if all of it lies where it lay."""
        ...

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """These R rows begin. The cache holds prompt[:-1]; node 0 of the first tree is prompt[-1].

        `out` is [R,S−1,·], S the longest of these prompts, and row r is valid for len(prompts[r]) − 1 positions: none for a
        prompt of one token, for which feature drafters propose the root only.
        """
        ...

    def propose(self, round: RoundContext) -> DraftTree:
        """The trees of this round for the rows asked for; node 0 is the root."""
        ...

    def accept(self, round: RoundContext, tree: DraftTree, verdict: "Verdict", out: NodeOutput) -> None:
        """Learn what was kept of `tree`, the one proposed or, where the decoder did not ask, the root alone. `out` holds all N
        nodes; `verdict.on_host(tree)` is on the host already."""
        ...

    def drop(self, slots: list[int]) -> None:
        """These rows ended; their state is free."""
        ...


class Plain:
    """Proposes the root only: plain decoding, through the same loop."""

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
