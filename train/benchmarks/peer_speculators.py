"""speculators' own EAGLE-3 training on samples that train/benchmarks/peers.py wrote: `python -P peer_speculators.py job.json`.

It runs in an environment of speculators 0.9 and imports nothing of Draftsmith. Its command, `speculators train`, does all but this:

- The sampler: each step has the samples that job.json lists for it, those of our run with the same seed. Reading, shifting and collating
  them is speculators' work.
- The checkpoint: the model is saved at the end, in the precision that it was trained in, without the optimizer's state.
- Without a GPU the devices are the CPU, which the trainer does not name by itself.

job.json: `flags` [text], of `speculators train`; `batches` [steps][samples], indices of the data set; `output`, a folder for the drafter;
`report`, a file for the CPU seconds of each step.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader


def loaders(batches: list[list[int]]) -> Callable[..., tuple[DataLoader, None]]:
    """In place of speculators' `create_train_val_loaders`: these batches in this order, and none held out."""
    from speculators.train.data import ArrowDataset, CollateFn  # pyright: ignore[reportMissingImports] (late: this file is in our package too)

    def create(
        *,
        data_path: str,
        total_seq_len: int,
        hidden_states_dtype: torch.dtype,
        transfer: Any,
        hidden_size: int,
        num_target_layers: int,
        preprocess: Any,
        **_: Any,
    ) -> tuple[DataLoader, None]:
        dataset = ArrowDataset(total_seq_len, data_path, transfer, on_missing="raise", hidden_states_dtype=hidden_states_dtype)
        collate = CollateFn(total_seq_len, hidden_size, num_target_layers, hidden_states_dtype, preprocess)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=collate), None

    return create


def timed(base: Any, output: str, seconds: list[float]) -> type:
    """speculators' trainer `base`, which enters the CPU seconds of each step but the first, and saves the model alone."""

    class Trainer(base):
        def setup_trainer(self) -> None:
            super().setup_trainer()
            if not torch.accelerator.is_available():
                self.device_type = "cpu"  # for autocast

        def _schedulers_step(self) -> None:
            super()._schedulers_step()
            now = time.process_time()
            if hasattr(self, "before"):
                seconds.append(now - self.before)
            self.before = now

        def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
            if epoch != "interrupted":
                self.model.save_pretrained(output)

    return Trainer


def main(job_file: str) -> None:
    from speculators.train import cli, trainer  # pyright: ignore[reportMissingImports]
    from speculators.train.config import TrainConfig  # pyright: ignore[reportMissingImports]

    job = json.loads(Path(job_file).read_text())
    seconds: list[float] = []
    cli.create_train_val_loaders = loaders(job["batches"])
    cli.Trainer = timed(trainer.Trainer, job["output"], seconds)
    if not torch.accelerator.is_available():
        trainer.get_local_rank = lambda: "cpu"
        torch.accelerator.synchronize = lambda *_: None
    cli.main(TrainConfig.resolve(job["flags"]))
    if len(seconds) + 1 < len(job["batches"]):  # the trainer returns after a signal too
        raise SystemExit(1)
    Path(job["report"]).write_text(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1])
