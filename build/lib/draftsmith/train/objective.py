"""What the author of a method needs to know: a batch, a loss as sum and weight, a data set, an objective."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(slots=True)
class Loss:
    """A loss as sum and weight, so that micro-batches and ranks add up exactly. `metrics` are sums over the same weight."""

    sum: Tensor
    weight: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, forward: dict[str, Tensor]) -> "Loss":
        """From what a step's forward gave: wrappers look for tensors in dictionaries, not in classes they do not know."""
        metrics = dict(forward)
        return cls(metrics.pop("sum"), metrics.pop("weight"), metrics)


class SequenceDataset(Protocol):
    """A data set: a length, batches by row number, and the loss-bearing tokens of rows; `close` lets it write what it holds back.

    Number r is row r mod length in epoch r div length.
    """

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor) -> Batch: ...

    def weight(self, rows: Tensor) -> float: ...

    def close(self) -> None: ...


Objective = Callable[[Any, Batch], Loss]


def supervised_tokens(batch: Batch, here: slice = slice(None)) -> Tensor:
    """Tokens to predict in a batch [B,S] at `here`: its weight, known before any forward. A document's first token is never one."""
    return batch["loss_mask"][:, here].sum().double()
