"""What a run tells while it trains: metrics.jsonl, trackers, curves.png, and how much of the machine it uses.

metrics.jsonl has a row {"step", "lr", "tokens_per_s", …} every `train.log_every` steps and {"step", "valid_…"} for each evaluation. Beside
the means of the loss and of the objective's metrics, which are sums over all ranks divided by the weight of all ranks, rows of training have

  seconds       wall time of a step, the mean since the row before, without what `Log.paused` encloses
  tokens_per_s  loss-bearing tokens of all ranks, by the same clock
  mfu           FLOPs of a step / seconds / the measured rate of matrix products of this device in the run's precision (not a data sheet's:
                nothing reaches that); of the first rank
  target_ratio  seconds / time of the frozen target's forward alone on the same rows: 1 is the least that training online can cost
  peak_gb       most memory allocated on any GPU since the row before; without a GPU the largest resident set of a process so far
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
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.inference import durable, machine
from draftsmith.train.engine import processes
from draftsmith.train.engine.flops import FORMULAS
from draftsmith.train.engine.trackers import start, trackers
from draftsmith.train.recipe import Recipe

if TYPE_CHECKING:
    from draftsmith.train.objective import Batch, Loss

__all__ = ["Flops", "Log", "means", "trackers"]


class Flops(TorchDispatchMode):
    """Within it `count` grows by the FLOPs of matrix products and attention, those of backward and of compiled code included.

    Nothing runs otherwise than without it. (torch's FlopCounterMode, whose formulas these are, stops compiled FlexAttention with an error,
    and knows neither addmm_, which train/losses/chunked.py makes gradients with, nor attention on a CPU.) Attention counts in full, causal or
    not, and what checkpointing computes twice counts twice; kernels that torch does not dispatch (compiled FlexAttention, 8-bit layers)
    are not seen.
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
    """What a run says. All ranks make one and call it alike: means are over all of them, and the first writes.

    accelerator: made with `trackers(recipe.train)` · done: steps of the checkpoint that the run goes on from; rows after it are dropped, as
    those steps are taken again, and trackers are not told of them twice · reference: the frozen target's forward on a batch, for target_ratio.
    """

    def __init__(self, recipe: Recipe, accelerator: Accelerator, done: int, reference: Callable[["Batch"], object] | None = None) -> None:
        self.accelerator, self.reference, self.main = accelerator, reference, accelerator.is_main_process
        self.folder = Path(recipe.train.output)
        self.file = self.folder / "metrics.jsonl"
        self.sums: dict[str, Tensor] = {}
        self.held, self.watched, self.flops, self.floor = "", False, 0, 0.0
        self.told, self.rate = processes.on_first(lambda: self._begin(recipe, done))
        self._memory()
        self.step, self.since = done, time.perf_counter()

    def _begin(self, recipe: Recipe, done: int) -> tuple[int, float]:
        """On the first rank: the last step that trackers know, and the rate of matrix products."""
        last = _cut(self.file, done)
        told = start(recipe, self.accelerator, done, last) if self.accelerator.log_with else 0
        dtype = torch.bfloat16 if processes.in_bf16(self.accelerator) else torch.float32
        return told, machine.matmul_rate(self.accelerator.device, dtype)

    @contextmanager
    def watching(self, batch: "Batch") -> Iterator[None]:
        """Around the forward and backward of a micro-batch: the run's first is counted, and `reference` timed on it; later ones just run."""
        if self.watched:
            yield
            return
        self.watched = True
        if self.reference:
            half = torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=processes.in_bf16(self.accelerator))
            with self.paused(), torch.no_grad(), half:
                self.floor = self._seconds(self.reference, batch)
        with Flops() as flops:
            yield
        self.flops = flops.count
        parts = self.accelerator.gradient_accumulation_steps
        alone = f"; the target's forward alone takes {self.floor * parts:.3g} s of it" if self.floor else ""
        rates = f"{self.flops * parts / 1e12:.3g} TFLOP a rank, and this device does {self.rate / 1e12:.3g} TFLOP/s (measured)"
        self.say(f"a step is {rates}{alone}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs within it (evaluating, saving) is no part of a step's seconds."""
        self._wait()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self.since += time.perf_counter() - began

    def add(self, loss: "Loss") -> None:
        """Count a micro-batch; no host waits for the device."""
        for name, value in {"loss": loss.sum, "weight": loss.weight, **loss.metrics}.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach().float()

    def training(self, step: int, lr: float, **more: float) -> str:
        """Write the row of the steps since the last one, `step` being their last and `more` what else it has -> text for the progress bar."""
        total = _summed(self.sums, self.accelerator)
        found, seconds = _divided(total), time.perf_counter() - self.since
        each, parts, speed = seconds / (step - self.step), self.accelerator.gradient_accumulation_steps, total["weight"] / seconds
        row: dict[str, Any] = {"step": step, "lr": lr, "tokens_per_s": round(speed, 1), "seconds": float(f"{each:.4g}")}
        if self.flops and self.rate:
            row["mfu"] = round(self.flops * parts / each / self.rate, 4)
        if self.floor:
            row["target_ratio"] = round(each / (self.floor * parts), 3)
        self._write(row | {"peak_gb": self._memory()} | found | more)
        self.sums, self.step, self.since = {}, step, time.perf_counter()
        return _text(found) + f"  {speed:,.0f} tok/s{self.held}"

    def held_out(self, step: int, found: dict[str, float]) -> None:
        """Write and print the means of an evaluation."""
        self.held = f"  held out: {_text(found)}"
        self._write({"step": step} | {f"valid_{name}": value for name, value in found.items()})
        self.say(f"step {step}{self.held}")

    def say(self, text: str) -> None:
        if self.main:
            print(text, flush=True)

    def close(self) -> None:
        """End the trackers and draw curves.png. (Not by `accelerator.end_training`, which ends the process group too.)"""
        if not self.main:
            return
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.trackers.clear()
        if self.file.is_file():
            from draftsmith.train.engine import curves

            try:
                curves.draw(self.file, self.folder / "curves.png")
            except OSError as error:  # the run is what counts
                self.say(f"curves.png could not be written ({error})")

    def _write(self, row: dict[str, Any]) -> None:
        # JSON has no word for what is not finite; `left_out` counts it.
        row = {name: value for name, value in row.items() if math.isfinite(value)}
        if self.main:
            try:
                with self.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise OSError(f"{self.file} could not be written ({error}); make room there and run the same command again") from None
            if self.accelerator.trackers and row["step"] > self.told:
                self.accelerator.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def _seconds(self, work: Callable[["Batch"], object], batch: "Batch") -> float:
        times = []
        for _ in range(4):  # the first warms up
            began = time.perf_counter()
            work(batch)
            self._wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def _wait(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    def _memory(self) -> float:
        """peak_gb, and the device's peaks begin anew."""
        if self.accelerator.device.type == "cuda":
            devices = range(torch.cuda.device_count())  # a target may be spread over all
            peak = max(torch.cuda.max_memory_allocated(device) for device in devices)
            for device in devices:
                torch.cuda.reset_peak_memory_stats(device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        own = torch.tensor([peak / 1e9], device=self.accelerator.device)
        return round(float(cast(Tensor, self.accelerator.gather(own)).max()), 3)


def means(sums: dict[str, Tensor], accelerator: Accelerator) -> dict[str, float]:
    """Sums of each rank by name, scalars on its device, "weight" among them -> all ranks' sums, divided by the weight of all."""
    return _divided(_summed(sums, accelerator))


def _summed(sums: dict[str, Tensor], accelerator: Accelerator) -> dict[str, float]:
    stacked = cast(Tensor, accelerator.reduce(torch.stack(list(sums.values())), "sum"))
    return dict(zip(sums, stacked.tolist(), strict=True))


def _divided(total: dict[str, float]) -> dict[str, float]:
    weight = max(total["weight"], 1.0)
    return {name: value / weight for name, value in total.items() if name != "weight"}


def _cut(file: Path, done: int) -> int:
    """Drop the rows of steps after `done`, which are taken again, and what a power cut left of others -> the step of the last row there was."""
    if not file.is_file():
        return 0
    lines = file.read_bytes().splitlines(keepends=True)
    steps = [_step_of(line) for line in lines]
    kept = [line for line, step in zip(lines, steps, strict=True) if 0 <= step <= done]
    if kept != lines:
        durable.replace(file, lambda part: part.write_bytes(b"".join(kept)))
    return max([0, *steps])


def _step_of(line: bytes) -> int:
    """The step of a row of metrics.jsonl, −1 where it is none."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else -1
    except (ValueError, TypeError, KeyError):
        return -1


def _text(found: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in found.items())
