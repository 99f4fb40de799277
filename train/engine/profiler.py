"""A profile of some steps of a run, by torch.profiler."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.profiler import ProfilerAction, ProfilerActivity

from draftsmith.train.engine.say import say
from draftsmith.train.engine.section import TrainSection


class Profile:
    """torch.profiler over the steps that train.profile names, `first:last`, both included, as metrics.jsonl numbers them.

    Enter it around the loop and call `step` after each optimizer step. It writes <output>/trace-rank<r>-steps<first>-<last>.json.gz, for
    chrome://tracing or ui.perfetto.dev, and prints the ten operations that took longest on the main process. A run that ends within these
    steps writes those that it took.
    """

    def __init__(
        self, section: TrainSection, accelerator: Accelerator, done: int, paused: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Args:
        section, accelerator: of the run.
        done: steps that were taken before.
        paused: `Log.paused`, for work that is no part of a step.
        """
        self.folder, self.accelerator, self.done, self.paused = Path(section.output), accelerator, done, paused
        self.profiler: torch.profiler.profile | None = None
        self.first, self.last = map(int, section.profile.split(":")) if section.profile else (0, 0)

    def __enter__(self) -> "Profile":
        if self.done < self.last:
            self.first = max(self.first, self.done + 1)
            activities = [ProfilerActivity.CPU]
            if self.accelerator.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(
                activities=activities, schedule=self._action, on_trace_ready=self._write, record_shapes=True, acc_events=True
            )
            self.profiler.step_num = self.done  # so that the trace has the run's own numbers
            self.profiler.start()
            self.profiler.step()
        return self

    def __exit__(self, *_: object) -> None:
        if self.profiler:
            self.profiler.stop()

    def step(self) -> None:
        """An optimizer step was taken."""
        if self.profiler:
            # To prepare, start and write a trace takes seconds, which do not belong to a step.
            changes = self.profiler.step_num in (self.first - 2, self.first - 1, self.last)
            with self.paused() if changes else nullcontext():
                self.profiler.step()

    def _action(self, step: int) -> ProfilerAction:
        if step < self.first or step > self.last:
            return ProfilerAction.WARMUP if step == self.first - 1 else ProfilerAction.NONE
        return ProfilerAction.RECORD if step < self.last else ProfilerAction.RECORD_AND_SAVE

    def _write(self, profiler: torch.profiler.profile) -> None:
        last = min(self.last, profiler.step_num - 1)
        if last < self.first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)  # another machine than the main process's may not have it
        file = self.folder / f"trace-rank{self.accelerator.process_index}-steps{self.first}-{last}.json.gz"
        profiler.export_chrome_trace(str(file))
        if self.accelerator.is_main_process:
            say(f"{_longest(profiler, self.accelerator.device.type)}\ntrace of steps {self.first} to {last}: {file}")


def _longest(profiler: torch.profiler.profile, device: str) -> str:
    """Ten lines: the operations that took longest on the device by themselves, each with its share of the total, time and number of calls."""
    events = [event for event in profiler.key_averages() if event.device_type.name == "CPU" and not event.key.startswith("ProfilerStep")]
    times = {event.key: event.self_device_time_total if device == "cuda" else event.self_cpu_time_total for event in events}
    calls, total = {event.key: event.count for event in events}, max(sum(times.values()), 1e-9)
    longest = sorted(times, key=lambda key: -times[key])[:10]
    return "\n".join(f"{times[key] / total:7.1%} {times[key] / 1e3:10.1f} ms {calls[key]:8,} × {key}" for key in longest)
