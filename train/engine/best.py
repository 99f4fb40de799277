"""The weights with the best τ of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.train.engine import checkpoint, processes
from draftsmith.train.engine.sharded import ShardedModel

MeasureTau = Callable[[Callable[[], None]], float]  # a function to call after each round of decoding -> τ


class BestWeights:
    """The weights with the best τ so far, saved beside the checkpoints.

    Attributes:
        tau: the best τ, 0 before the first measurement.
        step: the step that it was measured after, 0 before the first measurement.
        since: evaluations since then.
        sha256: of their file, "" before the first measurement, and from checkpoints of earlier versions.
    """

    def __init__(
        self,
        folder: Path,
        sharded: ShardedModel,
        state: dict[str, Any] | None,
        measure_tau: MeasureTau | None,
        collective: bool,
        keep: bool = True,
    ) -> None:
        """Begin with the best τ of the checkpoint, if there is one.

        Args:
            folder: of the checkpoints.
            sharded: the model.
            state: what `state` returned at the checkpoint; None for a new run.
            measure_tau, collective: as for `loop.fit`.
            keep: `keep_best` of `loop.fit`.
        """
        self.folder, self.sharded, self.measure_tau, self.collective, self.keep = folder, sharded, measure_tau, collective, keep
        state = state or {"tau": 0.0, "step": 0, "since": 0}
        self.tau, self.step, self.since, self.sha256 = state["tau"], state["step"], state["since"], state.get("sha256", "")

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"tau": self.tau, "step": self.step, "since": self.since} | ({"sha256": self.sha256} if self.sha256 else {})

    @property
    def waits(self) -> bool:
        """Whether this rank waits while the main process measures τ."""
        return self.measure_tau is not None and not self.collective and not self.sharded.accelerator.is_main_process

    def measure(self, step: int, report: Callable[[], None]) -> dict[str, float]:
        """Measure τ after `step` steps, and save the weights if it is the best -> {"tau": τ}, equal on all ranks; {} without `measure_tau`.

        `report` is called after each round of decoding.
        """
        if self.measure_tau is None:
            return {}
        accelerator, model = self.sharded.accelerator, self.sharded.model
        with self.sharded.gathered():
            model.eval()
            own = 0.0 if self.waits else self.measure_tau(report)
            main = torch.tensor(own if accelerator.is_main_process else 0.0, device=accelerator.device)
            tau = cast(Tensor, accelerator.reduce(main, "sum")).item()
            self.since += self.keep
            if self.keep and tau > self.tau:
                self.tau, self.step, self.since = tau, step, 0
                self.sha256 = processes.on_main(lambda: checkpoint.save_weights(checkpoint.best_file(self.folder, step), model))
        return {"tau": tau}

    def is_stale(self, patience: int) -> bool:
        """Whether the last `patience` evaluations brought no better τ; never with patience 0."""
        return patience > 0 and self.since >= patience

    def restore(self) -> None:
        """Load the best weights into the model, on the main process."""
        if self.sharded.accelerator.is_main_process:
            checkpoint.load_weights(checkpoint.best_file(self.folder, self.step), self.sharded.model)
