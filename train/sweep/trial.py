"""The runs of a sweep: each is a `draftsmith train` of its own, in a process of its own, several at a time."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.inference import machine
from draftsmith.inference.claim import is_claimed, is_own
from draftsmith.inference.progress import Bar
from draftsmith.inference.terminal import printable
from draftsmith.train.engine import output, processes
from draftsmith.train.engine.log import is_evaluation
from draftsmith.train.engine.say import say
from draftsmith.train.engine.watchdog import Signals

TRAIN = (sys.executable, "-m", "draftsmith.train.cli", "train")
POLL = 0.2  # seconds between looks at the processes
REPORT = 2.0  # seconds between calls of `progress`
LARGE = ("artifact", "checkpoints", "start", "replay")  # of a run's folder, what a beaten trial does not keep


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: of a trial, in a rung, with a seed.

    Attributes:
        name: within the sweep.
        folder: train.output.
        words: what follows `draftsmith train`.
        steps: train.steps.
        tokens: positions of all its sequences.
        measures_tau: whether its evaluations decode.
        data: what its data are made of; runs with the same share a cache.
    """

    name: str
    folder: Path
    words: tuple[str, ...]
    steps: int
    tokens: int
    measures_tau: bool
    data: str

    @property
    def log(self) -> Path:
        """The file beside its folder that has what its last process said."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True, slots=True)
class Result:
    """What a run gave.

    Attributes:
        measure: τ; None where the run failed.
        seconds: of its training steps, without start and evaluations.
        error: why it failed.
        depth: of the chain whose simulated τ `measure` is; 0 where it is a decoded one.
    """

    measure: float | None
    seconds: float = 0.0
    error: str = ""
    depth: int = 0


def run_all(
    runs: list[Run], devices: list[str], jobs: int, record: Callable[[Run, Result], None], progress: Callable[[float], None]
) -> None:
    """Run all of them, `jobs` at a time, and end only when every process has ended.

    Runs whose data nobody has prepared yet wait for the first of them to do that. So does a run whose folder another process writes: that of a
    sweep that was killed, which ends after its step.

    Args:
        runs: those that have no result yet. A run that was stopped goes on from its checkpoint.
        devices: GPUs, as CUDA_VISIBLE_DEVICES names them, to be shared out; without any, cores are.
        jobs: at most so many at a time.
        record: is called with each run that ended.
        progress: is called again and again with the sum over the running ones of the share of their steps that is done.

    Raises:
        ValueError: the method reports no measure.
        SystemExit: 128 + signal, after SIGINT, SIGTERM or SIGUSR1, when the runs have saved their checkpoints.
    """
    waiting, running, prepared, said = list(runs), {}, set(), 0.0
    jobs = max(1, min(jobs, len(runs)))  # of few runs each has several cores or GPUs
    with Signals() as signals, _ended(running):
        while waiting or running:
            prepared |= {run.data for run in runs if run.data not in prepared and any(run.folder.parent.glob("*/run.json"))}
            preparing = {run.data for run in running} - prepared
            for run in list(waiting):
                if len(running) < jobs and run.data not in preparing and not is_claimed(run.folder):
                    slot = min(set(range(jobs)) - {slot for _, slot in running.values()})
                    running[run] = _start(run, devices, slot, jobs), slot
                    waiting.remove(run)
                    preparing |= {run.data} - prepared
            time.sleep(POLL)
            if signals.pending():
                say(f"stopping {len(running)} run(s); each saves a checkpoint, and the same command goes on")
                break
            for run in [run for run, (process, _) in running.items() if process.poll() is not None]:
                process, _ = running.pop(run)
                record(run, result_of(run, process.returncode))
            if time.monotonic() - said > REPORT:
                progress(sum(rows[-1]["step"] / run.steps for run in running if (rows := _rows(run))))
                said = time.monotonic()
    if signals.caught:
        raise SystemExit(128 + signals.caught)


def run_missing(title: str, runs: list[Run], results: Container[str], jobs: int | None, record: Callable[[Run, Result], str]) -> None:
    """Run what has no result yet, under a progress bar in steps, and delete the weights of what is recorded.

    Args:
        title: of the bar.
        runs: all of them.
        results: names of the runs that have a result; `record` adds to it.
        jobs: as for `run_all`; None: one for each GPU, without GPUs one for each core.
        record: keeps the result of a run -> what the bar says of it.

    Raises:
        ValueError: a run failed.
        SystemExit: as `run_all`.
    """
    devices, total = gpus(), sum(run.steps for run in runs)

    def recorded() -> int:
        return sum(run.steps for run in runs if run.name in results)

    with Bar(title, total, recorded()) as bar:

        def ended(run: Run, result: Result) -> None:
            if result.measure is None:
                raise ValueError(f"{run.name} failed: {result.error}; its log is {run.log}")
            text = record(run, result)
            remove_weights(run)
            bar.update(recorded(), text)

        todo = [run for run in runs if run.name not in results]
        run_all(todo, devices, jobs or len(devices) or machine.cores(), ended, lambda share: None)
        bar.update(total)


@contextmanager
def _ended(running: dict[Run, tuple[subprocess.Popen[bytes], int]]) -> Iterator[None]:
    """At its end the processes are asked to stop, and waited for; at a second Ctrl-C they are killed."""
    try:
        yield
    finally:
        try:
            for process, _ in running.values():
                process.terminate()
            for process, _ in running.values():
                process.wait()
        finally:
            for process, _ in running.values():
                process.kill()


def _start(run: Run, devices: list[str], slot: int, jobs: int) -> "subprocess.Popen[bytes]":
    """Start a run in a session of its own, since Ctrl-C in a terminal is a signal to the group: it would get that and ours."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    threads, given = max(1, machine.cores() // jobs), os.environ.get("OMP_NUM_THREADS", "")
    shared = {"OMP_NUM_THREADS": str(min(threads, max(1, int(given))) if given.isdecimal() else threads)}
    if devices:  # with fewer runs at a time than GPUs each has several, which target.parallel=layers can use
        shared = {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot::jobs]) or devices[slot % len(devices)]}
    log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        return subprocess.Popen(
            [*TRAIN, *run.words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | shared,
            start_new_session=True,
            preexec_fn=processes.end_with_parent if sys.platform == "linux" else None,
        )
    finally:
        os.close(log)


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(number) for number in range(count)])[:count]


def result_of(run: Run, status: int) -> Result:
    """What a run that ended with this exit status gave.

    Its measure is the τ of its last evaluation where they decode, else the simulated τ. The best of several would favour a
    trial with more evaluations.

    Raises:
        ValueError: evaluations give neither.
    """
    rows = _rows(run)
    seconds, before = 0.0, 0
    for row in rows:
        if "seconds" in row:
            seconds += row["seconds"] * (row["step"] - before)
            before = row["step"]
    if status:
        return Result(None, seconds, _reason(run, status))
    evaluations = [row for row in rows if is_evaluation(row)]
    last, depth = evaluations[-1] if evaluations else {}, 0
    if run.measures_tau:
        measure = last.get("valid_tau")
    else:
        measure, depth = last.get("valid_sim_tau"), sum(name.startswith("valid_survival_") for name in last)
        if measure is None and "valid_loss" in last:
            raise ValueError(
                f"{run.words[0]} has no simulated τ on held-out data; measure τ itself: train.tau_prompts=4 (prompts of each domain)"
            )
    if measure is None or not math.isfinite(measure):
        return Result(None, seconds, "it has no last evaluation that is finite; see metrics.jsonl")
    return Result(measure, seconds, depth=depth)


def _reason(run: Run, status: int) -> str:
    """Why a run failed: its log's last error, or its last line."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = [line for line in run.log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return printable((errors or lines or [f"exit status {status}"])[-1].strip(), "")[:300]


def _rows(run: Run) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, up to one that a kill cut off."""
    file, rows = run.folder / "metrics.jsonl", []
    with suppress(ValueError):
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            rows.append(json.loads(line))
    return rows


def remove_weights(run: Run) -> None:
    """Delete the checkpoints and the artifact of a run; its metrics, recipe and log stay."""
    for name in LARGE:
        if is_own(run.folder, output.KIND) and not (run.folder / name).is_symlink():
            shutil.rmtree(run.folder / name, ignore_errors=True)
