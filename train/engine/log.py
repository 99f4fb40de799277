"""What a run reports while it trains: metrics.jsonl, trackers, curves.png, and how much of the machine it uses.

metrics.jsonl has a row {"step", "lr", "tokens_per_s", …} every `train.log_every` steps and a row {"step", "valid_…"} for each evaluation.
A training row has the means of the loss and of the objective's metrics (sums over all ranks, divided by the weight of all ranks) and

  seconds       wall time of a step, the mean since the previous row, without what `Log.paused` encloses
  tokens_per_s  supervised tokens of all ranks, by the same clock
  mfu           FLOPs of a step / seconds / matmul rate; of the main process. The rate is measured on this device in the run's precision (no
                program reaches the rate of a data sheet)
  target_ratio  seconds / time of the frozen target's forward alone on the same sequences: 1 is the least that training online can cost
  peak_gb       peak memory allocated on any GPU since the previous row; without a GPU the largest resident set of a process so far
"""

import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.inference import durable, machine
from draftsmith.train.engine import curves, processes, trackers
from draftsmith.train.engine.flops import FORMULAS
from draftsmith.train.engine.say import say
from draftsmith.train.engine.trackers import LastRows
from draftsmith.train.objective import Batch, Loss, Progress
from draftsmith.train.recipe import Recipe


class Flops(TorchDispatchMode):
    """Within it `count` grows by the FLOPs of matmuls and attention, in backward and in compiled code too.

    Nothing runs differently within it. (torch's FlopCounterMode, whose formulas these are, stops compiled FlexAttention with an error, and
    knows neither addmm_, which train/losses/chunked.py makes gradients with, nor attention on a CPU.) Attention counts in full even if it is
    causal, and what checkpointing computes twice counts twice. Kernels that torch does not dispatch (compiled FlexAttention, 8-bit layers) are
    not counted.
    """

    supports_higher_order_operators = True
    count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(getattr(func, "_overloadpacket", func))
        self.count += formula(*args, **(kwargs or {}), out_val=out) if formula else 0
        return out


class Log:
    """The report of a run. All ranks make one and call the same methods: means are over all ranks, and the main process writes."""

    def __init__(
        self,
        recipe: Recipe,
        accelerator: Accelerator,
        done: int,
        evaluated: int,
        target_forward: Callable[[Batch], object] | None = None,
    ) -> None:
        """Start the trackers, and measure the matmul rate.

        Args:
            recipe: of the run.
            accelerator: made with `trackers.options(recipe.train)`.
            done: steps of the checkpoint that the run continues. Rows after it are deleted, since those steps are taken again; trackers do not
                get them twice.
            evaluated: step of the last evaluation in that checkpoint. Those after it are made again.
            target_forward: the frozen target's forward on a batch, for target_ratio.
        """
        self.accelerator, self.target_forward, self.main = accelerator, target_forward, accelerator.is_main_process
        self.folder = Path(recipe.train.output)
        self.file = self.folder / "metrics.jsonl"
        self.sums: dict[str, Tensor] = {}
        self.last_evaluation = ""
        self.measured_stage: int | None = None
        self.micro_batch_flops, self.target_seconds = 0, 0.0
        self.tracked, self.matmul_rate = processes.on_main(lambda: self._start(recipe, done, evaluated))
        self._peak_memory()
        self.step, self.since = done, time.perf_counter()

    def _start(self, recipe: Recipe, done: int, evaluated: int) -> tuple[LastRows, float]:
        """On the main process: (the last steps that the trackers have, matmul rate of the device in FLOP/s)."""
        last = _cut(self.file, LastRows(done, evaluated))
        tracked = trackers.start(recipe, self.accelerator, done, last) if self.accelerator.log_with else last
        dtype = torch.bfloat16 if processes.in_bf16(self.accelerator) else torch.float32
        return tracked, machine.matmul_rate(self.accelerator.device, dtype)

    @contextmanager
    def measuring(self, batch: Batch, progress: Progress) -> Iterator[None]:
        """Around the forward and backward of each micro-batch.

        One micro-batch is counted in FLOPs in each stage of the objective (`progress.stage`), and the target is timed on the run's first.
        """
        if self.measured_stage == progress.stage:
            yield
            return
        if self.target_forward and self.measured_stage is None:
            autocast = torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=processes.in_bf16(self.accelerator))
            with self.paused(), torch.no_grad(), autocast:
                self.target_seconds = self._median_seconds(self.target_forward, batch)
        with Flops() as flops:
            yield
        self.measured_stage, self.micro_batch_flops = progress.stage, flops.count
        accumulation = self.accelerator.gradient_accumulation_steps
        target = f"; the target's forward alone takes {self.target_seconds * accumulation:.3g} s of it" if self.target_seconds else ""
        step = f"a step is {self.micro_batch_flops * accumulation / 1e12:.3g} TFLOP a rank"
        self.print(f"{step}, and this device does {self.matmul_rate / 1e12:.3g} TFLOP/s (measured){target}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs within it (evaluating, saving) does not count in a step's seconds."""
        self._synchronise()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._synchronise()
            self.since += time.perf_counter() - began

    def add(self, loss: Loss) -> None:
        """Add a micro-batch to the sums; the host does not wait for the device."""
        for name, value in sums_of(loss).items():
            self.sums[name] = self.sums.get(name, 0) + value

    def write_training(self, step: int, lr: float, **more: float) -> str:
        """Write the row of the steps since the previous row.

        Args:
            step: the last of these steps.
            lr: its learning rate.
            more: other columns of the row.

        Returns:
            The means and the speed as text for the progress bar.
        """
        total = _summed(self.sums, self.accelerator)
        averages, seconds = _divided(total), time.perf_counter() - self.since
        step_seconds, speed = seconds / (step - self.step), total["loss"][1] / seconds
        accumulation = self.accelerator.gradient_accumulation_steps
        row: dict[str, Any] = {"step": step, "lr": lr, "tokens_per_s": round(speed, 1), "seconds": float(f"{step_seconds:.4g}")}
        if self.micro_batch_flops and self.matmul_rate:
            row["mfu"] = round(self.micro_batch_flops * accumulation / step_seconds / self.matmul_rate, 4)
        if self.target_seconds:
            row["target_ratio"] = round(step_seconds / (self.target_seconds * accumulation), 3)
        self._write(row | {"peak_gb": self._peak_memory()} | averages | more)
        self.sums, self.step, self.since = {}, step, time.perf_counter()
        return _text(averages) + f"  {speed:,.0f} tok/s{self.last_evaluation}"

    def write_evaluation(self, step: int, means: dict[str, float]) -> None:
        """Write and print the means of an evaluation after `step` steps."""
        self.last_evaluation = f"  held out: {_text(means)}"
        self._write({"step": step} | {f"valid_{name}": value for name, value in means.items()})
        self.print(f"step {step}{self.last_evaluation}")

    def print(self, text: str) -> None:
        """Print on the main process."""
        if self.main:
            say(text)

    def close(self) -> None:
        """Finish the trackers and draw curves.png. (`accelerator.end_training` would end the process group too.)"""
        if not self.main:
            return
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.trackers.clear()
        if self.file.is_file():
            try:
                curves.draw(self.file, self.folder / "curves.png")
            except (OSError, ValueError) as error:  # a picture is no reason to end the run in error
                self.print(f"curves.png could not be written ({error})")

    def _write(self, row: dict[str, Any]) -> None:
        # JSON has no word for a number that is not finite; the column `left_out` counts those steps.
        row = {name: value for name, value in row.items() if math.isfinite(value)}
        if self.main:
            try:
                with self.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise OSError(f"{self.file} could not be written ({error}); free disk space there and run the same command again") from None
            if self.accelerator.trackers and row["step"] > (self.tracked.evaluated if is_evaluation(row) else self.tracked.step):
                self.accelerator.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def _median_seconds(self, work: Callable[[Batch], object], batch: Batch) -> float:
        times = []
        for _ in range(4):  # the first warms up
            began = time.perf_counter()
            work(batch)
            self._synchronise()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def _synchronise(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak_memory(self) -> float:
        """The column peak_gb; the devices' peaks are reset."""
        if self.accelerator.device.type == "cuda":
            devices = range(torch.cuda.device_count())  # a target may be spread over all
            peak = max(torch.cuda.max_memory_allocated(device) for device in devices)
            for device in devices:
                torch.cuda.reset_peak_memory_stats(device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kB on Linux
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        own = torch.tensor([peak / 1e9], device=self.accelerator.device)
        return round(float(cast(Tensor, self.accelerator.gather(own)).max()), 3)


def means(sums: dict[str, Tensor], accelerator: Accelerator) -> dict[str, float]:
    """The means over all ranks. A metric that nothing was counted for is left out; the loss is 0 then. All ranks call it.

    Args:
        sums: this rank's, as `sums_of`.
        accelerator: of the run.
    """
    return _divided(_summed(sums, accelerator))


def sums_of(loss: Loss) -> dict[str, Tensor]:
    """What is added up over micro-batches: of "loss" and of each metric the sum and what it is divided by, [2] float32."""
    weight, sums = loss.weight.float(), {"loss": loss.sum, **loss.metrics}
    pairs = {name: value.detach().float() for name, value in sums.items()}
    return {name: value if value.dim() else torch.stack((value, weight)) for name, value in pairs.items()}


def _summed(sums: dict[str, Tensor], accelerator: Accelerator) -> dict[str, tuple[float, float]]:
    """As `sums_of`, on this rank's device -> the same over all ranks."""
    stacked = cast(Tensor, accelerator.reduce(torch.stack(list(sums.values())), "sum"))
    return {name: (total, count) for name, (total, count) in zip(sums, stacked.tolist(), strict=True)}


def _divided(total: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: value / max(count, 1.0) for name, (value, count) in total.items() if count or name == "loss"}


def _cut(file: Path, done: LastRows) -> LastRows:
    """Delete the rows of training and of evaluations after `done`, and damaged rows that a power cut left -> the last that were there."""
    if not file.is_file():
        return LastRows(0, 0)
    lines = file.read_bytes().splitlines(keepends=True)
    rows = [_row_of(line) for line in lines]
    remaining = [
        line for line, row in zip(lines, rows, strict=True) if row and row["step"] <= (done.evaluated if is_evaluation(row) else done.step)
    ]
    if remaining != lines:
        durable.replace(file, lambda part: part.write_bytes(b"".join(remaining)))
    steps = [(row["step"], is_evaluation(row)) for row in rows if row]
    return LastRows(max([0, *(step for step, _ in steps)]), max([0, *(step for step, evaluation in steps if evaluation)]))


def is_evaluation(row: dict[str, Any]) -> bool:
    """Whether a row of metrics.jsonl is that of an evaluation."""
    return any(name.startswith("valid_") for name in row)


def _row_of(line: bytes) -> dict[str, Any] | None:
    """A row of metrics.jsonl; None where it is damaged."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
        return row | {"step": int(row["step"])} if row and int(row["step"]) >= 0 else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _text(means: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in means.items())
