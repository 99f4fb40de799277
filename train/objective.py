"""What the author of a method needs to know: a batch, a loss as sum and weight, a data set, an objective."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(slots=True)
class Loss:
    """A loss as sum and weight, so that micro-batches and ranks add up exactly.

    Attributes:
        sum: the loss summed over the supervised tokens of the batch, a scalar with a gradient.
        weight: the supervised tokens, a scalar, which metrics and the held-out loss are divided by; the loop adds it up over accumulation steps
            and ranks. The training loss is divided by the data set's weight, the same number unless train.normalise is all.
        metrics: further means by name: a sum that is divided by the same weight, a scalar, or a sum and what it is divided by, [2].
    """

    sum: Tensor
    weight: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Tensor]:
        """As a dictionary: DDP and DeepSpeed look for tensors in dictionaries, not in classes that they do not know."""
        return {"sum": self.sum, "weight": self.weight, **self.metrics}

    @classmethod
    def from_dict(cls, outputs: dict[str, Tensor]) -> "Loss":
        """The inverse of `to_dict`."""
        metrics = {name: value for name, value in outputs.items() if name not in ("sum", "weight")}
        return cls(outputs["sum"], outputs["weight"], metrics)


class SequenceDataset(Protocol):
    """A data set of training sequences, which are read by number.

    Number r stands for sequence r mod length in epoch r div length (`engine/order.py`).
    """

    def __len__(self) -> int:
        """Sequences of one epoch."""
        ...

    def batch(self, rows: Tensor) -> Batch:
        """The sequences of these numbers, as one batch."""
        ...

    def weight(self, rows: Tensor) -> float:
        """What the training loss of a batch of these sequences is divided by: their supervised tokens, or with train.normalise=all their positions."""
        ...

    def close(self) -> None:
        """Write what has not been written yet; the loop calls it once, at the end."""
        ...


@dataclass(slots=True)
class Progress:
    """How far a run is, for an objective that changes on the way; the loop writes it.

    Attributes:
        steps: steps taken.
        total: steps of the run.
        stage: a number that the objective changes when its steps become more or less work.
    """

    steps: int = 0
    total: int = 1
    stage: int = 0


Objective = Callable[[Any, Batch], Loss]  # (the model that is trained, a batch) -> its loss


def supervised_tokens(batch: Batch, positions: slice = slice(None)) -> Tensor:
    """The weight of a batch [B,S]: its supervised tokens at `positions`. It needs no forward. Masks of corpora never count a document's first token."""
    return batch["loss_mask"][:, positions].sum().double()
