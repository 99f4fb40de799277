"""What keeps a run from losing work or time without a word: signals, a clock, numbers that are not finite, ranks that disagree, memory."""

import faulthandler
import hashlib
import json
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

from draftsmith.inference import durable

STALLED = 75  # exit status of a run that made no progress: EX_TEMPFAIL, "try again"


class Signals:
    """Within it the first SIGINT, SIGTERM or SIGUSR1 is noted, for the loop to stop after its step; a SIGINT after it acts as ever.

    Others after it change nothing: a scheduler signals all processes of a job, and then the launcher passes on to its ranks what it got, or
    dies of it, which they are told by a signal too (train/engine/processes.py). SIGUSR1 is what schedulers send before the time is up
    (`#SBATCH --signal=USR1@120`).
    """

    def __enter__(self) -> "Signals":
        self.caught = 0
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        self.caught = self.caught or number
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def pending(self) -> bool:
        """Whether this rank has caught one."""
        return bool(self.caught)

    def agreed(self, accelerator: Accelerator) -> int:
        """The signal that any rank has caught, 0 if none: all ranks must stop at the same step."""
        if accelerator.num_processes == 1:
            return self.caught
        return int(cast(Tensor, accelerator.gather(torch.tensor([self.caught], device=accelerator.device))).max())


class Watchdog:
    """Within it a process that says nothing through `at` for `minutes` ends with status 75, having said where it stood. 0: it never does.

    A thread that hangs in a read or a collective can be ended by nothing less.
    """

    def __init__(self, minutes: float, resume: str) -> None:
        self.limit, self.resume, self.doing, self.since = 60 * minutes, resume, "starting", time.monotonic()
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self.limit:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def at(self, doing: str) -> None:
        """Progress: what comes next."""
        self.doing, self.since = doing, time.monotonic()

    def _watch(self) -> None:
        while not self.ended.wait(min(5.0, self.limit / 4)):
            if time.monotonic() - self.since > self.limit:
                rank = os.environ.get("RANK", "0")
                print(
                    f"error: rank {rank} made no progress for {self.limit / 60:g} minutes while {self.doing}; {self.resume} "
                    "(train.watchdog_minutes sets the limit); where its threads stand:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(STALLED)


class NonFiniteCounter:
    """Counts steps left out because a loss or a gradient was not finite, and stops a run where they do not end."""

    def __init__(self, folder: Path, limit: int, left_out: int, rank: int) -> None:
        self.folder, self.limit, self.left_out, self.on_end, self.rank = folder, limit, left_out, 0, rank

    def after(self, step: int, applied: bool, batches: Sequence[dict[str, Tensor]]) -> None:
        """A step was done, or left out. Raises FloatingPointError after `limit` on end, its batch of this rank saved for a look."""
        self.on_end = 0 if applied else self.on_end + 1
        self.left_out += not applied
        if self.on_end < self.limit:
            return
        file = self.folder / f"not-finite-step-{step:08d}-rank{self.rank}.safetensors"
        tensors = {f"{place}.{name}": tensor.cpu().contiguous() for place, batch in enumerate(batches) for name, tensor in batch.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # another machine than the first rank's may not have it
            durable.replace(file, lambda part: save_file(tensors, part))
            kept = f"its batch is kept in {file}"
        except (OSError, SafetensorError) as error:
            kept = f"its batch could not be kept ({error})"
        raise FloatingPointError(
            f"the loss or its gradient was not finite in {self.on_end} steps on end, the last of them step {step}; {kept}; "
            "lower train.lr or train.clip, or take train.precision=fp32, with another train.output"
        )


def agree_on_data(accelerator: Accelerator, facts: dict[str, Any], length: int, batch: dict[str, Tensor]) -> None:
    """Whether all ranks have the same facts, as many rows, and the same first batch. Raises ValueError, on all, naming those that differ."""
    if accelerator.num_processes == 1:
        return
    found = hashlib.sha256(json.dumps([facts, length], sort_keys=True, default=str).encode())
    for name in sorted(batch):
        found.update(name.encode() + batch[name].contiguous().view(torch.uint8).numpy().tobytes())
    digests = gather_object([found.hexdigest()])
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ValueError(
            f"rank(s) {', '.join(map(str, odd))} read other data, another target or another recipe than rank 0; "
            "see that all machines have the same files, and empty data.cache where they do not"
        )


@contextmanager
def translate_errors(section: Any, resume: str) -> Iterator[None]:
    """Within it an exhausted GPU and a rank that is gone become one line that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        raise MemoryError(f"{_memory(section)} ({str(error).splitlines()[0][:160]})") from None
    except RuntimeError as error:
        text = str(error)
        if not any(
            word in text for word in ("closed by peer", "Connection reset", "Broken pipe", "RemoteError", "SystemError", "Timed out")
        ):
            raise
        raise ConnectionError(f"another process of this run is gone ({' '.join(text.split())[:160]}); {resume}") from error


def _memory(section: Any) -> str:
    """The keys that help a GPU that is full, and by how much: what it held at the most, less what it holds between steps, is activations."""
    groups = max(1, int(os.environ.get("WORLD_SIZE", "1")) // section.context_parallel)
    micro = section.micro_batch_size or max(1, section.batch_size // groups)
    held = torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    moving = max(0.0, peak - held)
    return (
        f"out of GPU memory: {peak:.1f} GB at the most, of which {moving:.1f} GB grow with the batch; "
        f"train.micro_batch_size={max(1, micro // 2)} (now {micro}) frees about {moving / 2:.1f} GB, data.seq_len at half as much, "
        "eagle.checkpointing=true or student.checkpointing=true most of the drafter's part; `draftsmith plan` says how much before a run"
    )
