"""What keeps a run from silently losing work or time.

Signals save before they end the run; a watchdog ends a run without progress; steps that are not finite are left out and counted; ranks that
read different data are refused; exhausted memory and a lost rank end in one line that says what to do.
"""

import faulthandler
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.file_baton import FileBaton

from draftsmith.inference import durable
from draftsmith.train.recipe import Recipe, keys

EXIT_NO_PROGRESS = 75  # exit status of a run that made no progress: EX_TEMPFAIL, "try again"
# What gloo, NCCL and the TCP store write when another process is gone.
LOST_PEER = ("closed by peer", "Connection reset", "Broken pipe", "RemoteError", "SystemError", "Timed out")


class Signals:
    """Within it the first SIGINT, SIGTERM or SIGUSR1 is noted, for the loop to stop after its step; a second SIGINT acts as usual.

    Other signals after the first change nothing. A scheduler signals all processes of a job, and the launcher then passes on to its ranks what
    it got, or dies of it, which reaches the ranks as a signal too (train/engine/processes.py). Schedulers send SIGUSR1 before the time is up
    (`#SBATCH --signal=USR1@120`).
    """

    def __enter__(self) -> "Signals":
        self.caught = 0
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        self.caught = self.caught or number
        signal.signal(signal.SIGINT, self.previous[signal.SIGINT])

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def pending(self) -> bool:
        """Whether this rank has caught a signal."""
        return bool(self.caught)

    def agreed(self, accelerator: Accelerator) -> int:
        """The signal that any rank has caught, 0 if none: all ranks must stop at the same step. All ranks call it."""
        if accelerator.num_processes == 1:
            return self.caught
        return int(cast(Tensor, accelerator.gather(torch.tensor([self.caught], device=accelerator.device))).max())


class Watchdog:
    """Within it a process that does not call `report` for `minutes` ends with status 75 and says where its threads stand.

    Only the end of the process frees a thread that hangs in a read or in a collective. `minutes` 0 turns the watchdog off. `advice` says how to
    continue.
    """

    def __init__(self, minutes: float, advice: str) -> None:
        self.limit, self.advice = 60 * minutes, advice
        self.activity, self.since = "starting", time.monotonic()
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self.limit:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def report(self, activity: str) -> None:
        """There was progress; `activity` is what the process does next."""
        self.activity, self.since = activity, time.monotonic()

    def wait(self, activity: str) -> None:
        """Pause until the next report: this process waits for another, whose own watchdog ends the run if that one hangs."""
        self.activity, self.since = activity, math.inf

    def _watch(self) -> None:
        while not self.ended.wait(min(5.0, self.limit / 4)):
            if time.monotonic() - self.since > self.limit:
                rank = os.environ.get("RANK", "0")
                message = (
                    f"error: rank {rank} made no progress for {self.limit / 60:g} minutes while {self.activity}; {self.advice} "
                    "(train.watchdog_minutes sets the limit); where its threads stand:"
                )
                try:
                    print(message, file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(file=sys.stderr)
                finally:  # stderr may be closed
                    os._exit(EXIT_NO_PROGRESS)


@contextmanager
def locks_reported(seconds: float = 60.0) -> Iterator[None]:
    """Within it a wait for another process that compiles a torch extension (DeepSpeed's, say) is reported after `seconds`, with its file.

    torch waits while the file `lock` is there, and a process that was killed while it compiled leaves it for ever.
    """
    plain = FileBaton.wait

    def wait(self: FileBaton) -> None:
        def report() -> None:
            print(
                f"waiting for {self.lock_file_path}, which another process holds while it compiles an extension of torch; if none does (one was "
                "killed), delete that file: this run then goes on by itself",
                file=sys.stderr,
                flush=True,
            )

        timer = threading.Timer(seconds, report)
        timer.daemon = True
        timer.start()
        try:
            plain(self)
        finally:
            timer.cancel()

    FileBaton.wait = wait
    try:
        yield
    finally:
        FileBaton.wait = plain


class NonFiniteCounter:
    """Counts the steps that were left out because a loss or a gradient was not finite, and stops a run after too many in a row.

    Attributes:
        folder: where the batch of the last such step is saved.
        limit: steps in a row after which the run stops (`train.max_nonfinite_steps`).
        left_out: steps left out so far, those before the checkpoint included.
        rank: this process.
        in_a_row: steps left out since the last one that was taken.
    """

    def __init__(self, folder: Path, limit: int, left_out: int, rank: int) -> None:
        self.folder, self.limit, self.left_out, self.rank = folder, limit, left_out, rank
        self.in_a_row = 0

    def after(self, step: int, applied: bool, batches: Sequence[dict[str, Tensor]]) -> None:
        """Count step `step`, which was applied or left out.

        Args:
            step: number of the step, from 1.
            applied: whether the optimizer stepped.
            batches: the step's micro-batches of this rank.

        Raises:
            FloatingPointError: `limit` steps in a row were left out. The batches are saved for a look, if the disk allows it.
        """
        self.in_a_row = 0 if applied else self.in_a_row + 1
        self.left_out += not applied
        if self.in_a_row < self.limit:
            return
        file = self.folder / f"not-finite-step-{step:08d}-rank{self.rank}.safetensors"
        tensors = {f"{number}.{name}": tensor.cpu().contiguous() for number, batch in enumerate(batches) for name, tensor in batch.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # another machine than the main process's may not have it
            durable.replace(file, lambda part: save_file(tensors, part))
            saved = f"its batch is kept in {file}"
        except (OSError, SafetensorError) as error:
            saved = f"its batch could not be kept ({error})"
        raise FloatingPointError(
            f"the loss or its gradient was not finite in {self.in_a_row} steps in a row, the last of them step {step}; {saved}; "
            "lower train.lr or train.clip, or take train.precision=fp32, with another train.output"
        )


def agree_on_data(accelerator: Accelerator, fingerprint: dict[str, Any], length: int, batch: dict[str, Tensor]) -> None:
    """Check that all ranks train on the same data. All ranks call it.

    Args:
        accelerator: of the run.
        fingerprint: what must be equal on all ranks, as JSON.
        length: sequences of the data set.
        batch: a first batch, on the CPU.

    Raises:
        ValueError: on all ranks; it names the ranks that differ from the first.
    """
    if accelerator.num_processes == 1:
        return
    digest = hashlib.sha256(json.dumps([fingerprint, length], sort_keys=True, default=str).encode())
    for name in sorted(batch):
        digest.update(name.encode() + batch[name].contiguous().view(torch.uint8).numpy().tobytes())
    digests = gather_object([digest.hexdigest()])
    different = [str(rank) for rank, value in enumerate(digests) if value != digests[0]]
    if different:
        raise ValueError(
            f"rank(s) {', '.join(different)} read other data, another target or another recipe than rank 0; "
            "see that all machines have the same files, and empty data.cache where they do not"
        )


@contextmanager
def translate_errors(recipe: Recipe, advice: str) -> Iterator[None]:
    """Within it exhausted memory of the GPU or the host (as MemoryError) and a lost rank (as ConnectionError) become one line that says what to do.

    Args:
        recipe: whose keys may free memory.
        advice: how to continue after a rank was lost.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # the frames hold the step's tensors
        raise MemoryError(f"{_memory_advice(recipe)} ({str(error).splitlines()[0][:160]})") from None
    except RuntimeError as error:
        text = str(error)
        if "DefaultCPUAllocator" in text:
            traceback.clear_frames(error.__traceback__)
            raise MemoryError(
                f"out of memory: {' '.join(text.split())[-100:]}; lower train.micro_batch_size (train.batch_size where it is unset) or data.seq_len"
            ) from None
        if not any(words in text for words in LOST_PEER):
            raise
        raise ConnectionError(f"another process of this run is gone ({' '.join(text.split())[:160]}); {advice}") from error


def _memory_advice(recipe: Recipe) -> str:
    """Which keys help a GPU that is full, and by how much.

    Activations are what the GPU held at its peak less what it holds between steps.
    """
    section = recipe.train
    groups = max(1, int(os.environ.get("WORLD_SIZE", "1")) // section.context_parallel)
    micro_batch = section.micro_batch_size or max(1, section.batch_size // groups)
    between_steps = torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    activations = max(0.0, peak - between_steps)
    advice = [
        f"out of GPU memory: peak {peak:.1f} GB, of which {activations:.1f} GB scale with the batch; "
        f"train.micro_batch_size={max(1, micro_batch // 2)} (now {micro_batch}) frees about {activations / 2:.1f} GB",
        "data.seq_len at half as much",
    ]
    advice += [f"{key}=true most of the drafter's part" for key in keys(type(recipe)) if key.endswith(".checkpointing")]
    return ", ".join(advice) + "; `draftsmith plan` says how much before a run"
