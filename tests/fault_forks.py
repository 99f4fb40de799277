"""Training runs in forked processes, one for each rank, so that a trial of a fault costs a fraction of a second.

The process that is forked has imported everything and computed nothing, so that torch has no threads yet, which a fork would lose.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_cases import Numbers, new_model, new_recipe, objective

from draftsmith.inference import machine
from draftsmith.inference.errors import exit_on_error
from draftsmith.train import loop
from draftsmith.train.engine import checkpoint, curves
from draftsmith.train.objective import Loss

STEPS = 7
LIMIT = 60.0  # seconds in which every process of a run that lost one must have ended
Objective = Callable[[Any, Any], Loss]


@dataclass(slots=True)
class Ended:
    """How the ranks of a run ended.

    Attributes:
        codes: exit status of each rank; −n: by signal n.
        out, err: what each rank wrote.
        seconds: until the last rank had ended.
    """

    codes: list[int]
    out: list[str]
    err: list[str]
    seconds: float

    def said(self, *words: str, rank: int = 0) -> bool:
        """Whether this rank wrote a single line of error, with these words, and no traceback."""
        lines = [line for line in self.err[rank].splitlines() if line.startswith("error: ")]
        return "Traceback" not in self.err[rank] and len(lines) == 1 and all(word in lines[0] for word in words)


@dataclass(slots=True)
class Row:
    """A line of the table: a fault, the number of trials, and the trials that did not survive it."""

    fault: str
    trials: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: str = ""

    def trial(self, where: object, **checks: bool) -> None:
        """Count one more trial, in which all `checks` should be true."""
        self.trials += 1
        if wrong := [name.replace("_", " ") for name, right in checks.items() if not right]:
            self.failures.append(f"{where}: not {', not '.join(wrong)}")


class Run:
    """A run that is under way: its processes by rank."""

    def __init__(self, work: Callable[[int], object], folder: Path, ranks: int = 1) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.said = tempfile.TemporaryDirectory()  # not in the folder, which a fault may fill, empty or take away
        self.logs = [(Path(self.said.name) / f"out-{rank}", Path(self.said.name) / f"err-{rank}") for rank in range(ranks)]
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        self.began = time.monotonic()
        fork = multiprocessing.get_context("fork").Process
        self.ranks = [fork(target=self._child, args=(work, rank), daemon=True) for rank in range(ranks)]
        for process in self.ranks:
            process.start()

    def _child(self, work: Callable[[int], object], rank: int) -> None:
        for descriptor, log in enumerate(self.logs[rank], 1):
            opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
        faulthandler.register(signal.SIGUSR2)  # prints where a process stands that does not end
        if self.store:  # as a worker of torchrun, whose agent holds the store
            world = {"WORLD_SIZE": str(len(self.ranks)), "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}
            os.environ |= world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        # Neither is tested here, and they take most of the time of so short a run.
        machine.matmul_rate = lambda *_: 1.0
        curves.draw = lambda *_: None
        exit_on_error(lambda _: work(rank), [])

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[rank].pid, number)

    def end(self, limit: float = LIMIT, agent: bool = False) -> Ended:
        """Wait until all ranks have ended.

        Args:
            limit: seconds to wait.
            agent: act as torchrun's agent, which ends the other ranks when one is lost, though later than it does. A rank that still waits for
                the others to start cannot notice the loss, and gloo leaves one in a few hundred waiting that sends just when its peer dies.

        Raises:
            TimeoutError: some ranks outlived `limit`; they have been killed.
        """
        until = time.monotonic() + limit
        lost = None
        while any(process.is_alive() for process in self.ranks) and time.monotonic() < until:
            time.sleep(0.002)
            lost = lost or (time.monotonic() if any(process.exitcode for process in self.ranks) else None)
            if agent and lost and time.monotonic() > lost + 10:
                for rank in range(len(self.ranks)):
                    self.kill(rank, signal.SIGTERM if time.monotonic() < lost + 15 else signal.SIGKILL)
        left = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
        for rank in left:
            self.kill(rank, signal.SIGUSR2)
            self.ranks[rank].join(1)
            self.kill(rank)
            self.ranks[rank].join()
        out, err = ([file.read_text() if file.is_file() else "" for file in files] for files in zip(*self.logs, strict=True))
        if left:
            raise TimeoutError(f"ranks {left} did not end in {limit:g} s\n" + "\n".join(out + err))
        return Ended([process.exitcode or 0 for process in self.ranks], out, err, time.monotonic() - self.began)


def tau_of(model: torch.nn.Module) -> float:
    """Stands in for a measured τ: it goes up and down, and depends on the weights alone."""
    return 1.0 + float(sum(parameter.detach().abs().sum() for parameter in model.parameters())) * 23 % 1


def training(
    output: Path, rank: int, objective: Objective = objective, rows=Numbers, fingerprint=None, probe: bool = False, **settings
) -> None:
    """Train the numbers of test_loop.py, and leave the weights of the main process in `output`. probe: measure τ."""
    model = new_model()
    measured = (lambda _: tau_of(model)) if probe else None
    loop.fit(new_recipe(output, **settings), model, objective, rows(), rows(), fingerprint or {}, measure_tau=measured)
    if rank == 0:
        save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, output / "weights.safetensors")


def run(output: Path, ranks: int = 1, limit: float = LIMIT, **options) -> Ended:
    """Run `training` from its beginning or from its checkpoint, and wait for its end."""
    return Run(partial(training, output, **options), output, ranks).end(limit)


def at_step(step: int, rank: int, act: Callable[[], object], slow: float = 0.0) -> Objective:
    """The objective of test_loop.py; `rank` calls `act` in the `step`-th step that it takes, from 1. slow: seconds added to each step."""
    calls = 0

    def wrapped(model, batch):
        nonlocal calls
        if model.training:
            calls += 1
            time.sleep(slow)
            if calls == step and int(os.environ.get("RANK", "0")) == rank:
                act()
        return objective(model, batch)

    return wrapped


def weights(output: Path) -> dict[str, Tensor]:
    """Tensors that a finished run ended with: its best weights (or the last), the last weights, and their optimizer state."""
    last = checkpoint.latest(output / "checkpoints")
    assert last is not None, "a run that finished has saved"
    return load_file(output / "weights.safetensors") | {
        f"last.{name}": tensor for part in checkpoint.read(last) for name, tensor in part.items()
    }


def same(output: Path, expected: dict[str, Tensor], tolerance: float = 0.0) -> bool:
    """Whether a run ended with these tensors, to the last bit or to `tolerance`."""
    if not (output / "weights.safetensors").is_file():
        return False
    actual = weights(output)
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], tensor) if not tolerance else bool((actual[name] - tensor).abs().max() <= tolerance)
        for name, tensor in expected.items()
    )


def saved(output: Path) -> int:
    """The step of the newest complete checkpoint, 0 where none was ever written, −1 where there are some and none can be read."""
    try:
        with contextlib.redirect_stdout(None):
            newest = checkpoint.newest(output / "checkpoints")
    except ValueError:
        return -1
    return newest[1]["step"] if newest else 0


def steps_logged(output: Path) -> list[int]:
    """Steps of the training rows in metrics.jsonl."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "lr" in row]
