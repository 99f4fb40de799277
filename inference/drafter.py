"""The contracts between the decoder, a drafter and the target. The decoder knows no method, only these.

Letters: B rows of a round · R rows that start · S positions · N tree nodes · H hidden size · T taps · V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftsmith.inference.tree import DraftTree

if TYPE_CHECKING:
    from draftsmith.inference.verify import Verdict

__all__ = ["Drafter", "NodeOutput", "Plain", "Target", "TargetOutput"]


@dataclass(slots=True)
class TargetOutput:
    """One forward of the target: hidden [B,S,H] after the final norm, taps [B,S,T,H] or None."""

    hidden: Tensor
    taps: Tensor | None = None


@dataclass(slots=True)
class NodeOutput:
    """What a drafter sees of a forward: hidden [B,N,H], taps [B,N,T,H] or None, argmax [B,N] (greedy decoding only) or None."""

    hidden: Tensor
    taps: Tensor | None = None
    argmax: Tensor | None = None


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

    def bind(self, target: Any, rows: int, context: int) -> None:
        """Take the target by reference and allocate state for `rows` rows of `context` positions."""
        ...

    def start(self, rows: Tensor, prompts: list[list[int]], out: NodeOutput) -> None:
        """Rows [R] begin. The cache holds prompt[:-1]; node 0 of the first tree is prompt[-1].

        `out` is [R,S−1,·], S the longest of these prompts, and row r is valid for len(prompts[r]) − 1 positions: none for a
        prompt of one token, for which feature drafters propose the root only.
        """
        ...

    def propose(self, rows: Tensor, root: Tensor) -> DraftTree:
        """rows [B], root [B] (last committed tokens) -> the trees of this round; node 0 is the root."""
        ...

    def accept(self, tree: DraftTree, verdict: "Verdict", out: NodeOutput, rows: Tensor) -> None:
        """Learn what was kept of the tree proposed for rows [B]; `out` holds all N nodes."""
        ...

    def drop(self, rows: Tensor) -> None:
        """Rows [R] ended; their state is free."""
        ...


class Plain:
    """Proposes the root only: plain decoding, through the same loop."""

    capturable = True
    taps: tuple[int, ...] = ()
    max_nodes = 1
    max_depth = 0

    def bind(self, target: Target, rows: int, context: int) -> None:
        self._shape: DraftTree | None = None

    def start(self, rows: Tensor, prompts: list[list[int]], out: NodeOutput) -> None:
        pass

    def propose(self, rows: Tensor, root: Tensor) -> DraftTree:
        if self._shape is None or self._shape.tokens.shape[0] != root.shape[0]:
            self._shape = DraftTree.root(root)
        shape = self._shape
        return DraftTree(root[:, None], shape.parents, shape.size, shape.depth, shape.ancestors, None, shape.visible())

    def accept(self, tree: DraftTree, verdict: "Verdict", out: NodeOutput, rows: Tensor) -> None:
        pass

    def drop(self, rows: Tensor) -> None:
        pass
