"""Our EAGLE-3 recipe beside speculators 0.9 and the Medusa authors' objective: the same samples in the same steps, and the same evaluator.

python -m draftsmith.train.benchmarks.peers tiny runs/peers --python ~/speculators/bin/python
python -m draftsmith.train.benchmarks.peers FOLDER runs/peers-smollm2 --data answers.jsonl --tokens 1000000 --python ~/speculators/bin/python

The target is `tiny` or the folder of a model. Its features of about --tokens tokens are captured once, and every method trains on them: ours, the
Medusa authors', and in the environment of --python speculators' own trainer, with its own default for whatever is not named here. With the same
seed all methods see the same samples in the same steps. Every drafter then decodes the same prompts as a chain and as a tree. The table is
written to FOLDER/peers.md. A stopped run continues with the stage that it was in; seeds, rates and steps may be added to a finished one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from draftsmith.inference import durable, machine
from draftsmith.inference.claim import claim
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.reading import read_json, require_same
from draftsmith.models.target import resolve_path
from draftsmith.train import eagle, recipe, setup
from draftsmith.train.benchmarks import peers_medusa, peers_samples, peers_table
from draftsmith.train.eagle import EagleRecipe

DONE, TABLE = "stages.json", "peers.md"
DRIVER = Path(__file__).with_name("peer_speculators.py")
FEATURES, COPY = "samples and their features", "copy of the samples for speculators"
OURS, PEER, MEDUSA = "EAGLE-3 of Draftsmith", "EAGLE-3 of speculators 0.9", "Medusa, authors' objective"

Results = dict[str, Any]  # what each finished stage returned, by its name
Work = Callable[[Results], dict[str, Any]]  # the results so far -> those of a stage


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared.

    Attributes:
        folder: of all that is written.
        target: `tiny` or a folder.
        recipe: ours.
        data: training data; None: the recipe's.
        tokens: about so many are trained on; None: as many as the recipe's steps have.
        limit: most prompts of each domain; None: all.
        python: the interpreter that has speculators; None: speculators is left out.
        seeds: each training is run with each of them.
        rates: learning rates of speculators.
        steps: steps of speculators' training-time test.
    """

    folder: Path
    target: str
    recipe: str
    data: str | None
    tokens: int | None
    limit: int | None
    python: str | None
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    steps: tuple[int, ...]

    @property
    def keys(self) -> list[str]:
        """Keys of every recipe of the run."""
        keys = [f"target.path={self.target}", f"data.cache={self.folder / 'cache'}", f"features.store={self.folder / 'features'}"]
        keys += ["features.mode=offline", "features.allow_missing=true"]  # samples that were not chosen have none
        keys += ["train.eval_every=0", "train.eval_batches=1", f"train.output={self.folder / 'ours'}"]
        keys += [f"data.train={self.data}"] if self.data else []
        return keys if self.target == "tiny" else [*keys, "data.exclude=[chat]"]

    def load(self) -> EagleRecipe:
        return recipe.load(EagleRecipe, self.recipe, self.keys)

    @property
    def fixed(self) -> dict[str, Any]:
        """What a run that continues must have as it began."""
        own = {name: getattr(self, name) for name in ("target", "recipe", "data", "tokens", "limit")}
        folders = ("data.cache", "features.store", "train.output")
        return own | {key: value for key, value in recipe.by_key(self.load()).items() if key not in folders}


@dataclass(frozen=True, slots=True)
class Training:
    """A drafter of the comparison.

    Attributes:
        method, setting: for the table.
        seed: of the initial weights and of the order of samples.
        drafter: the folder where `work` leaves it.
        work: trains it, and returns the CPU `seconds` of a step.
    """

    method: str
    setting: str
    seed: int
    drafter: Path
    work: Work

    @property
    def name(self) -> str:
        return f"{self.method}, {self.setting}, seed {self.seed}"


def trainings(plan: Plan) -> list[Training]:
    """All drafters, ours first."""
    runs, folder = [], plan.folder
    for seed in plan.seeds:
        run = folder / f"ours-{seed}"
        runs.append(Training(OURS, Path(plan.recipe).stem, seed, run / "artifact", partial(train_ours, plan, run, seed)))
    for rate, steps in [(rate, steps) for rate in plan.rates for steps in plan.steps] if plan.python else []:
        for seed in plan.seeds:
            run = folder / f"speculators-{rate:g}-{steps}-{seed}"
            work = partial(train_speculators, plan, run, seed, rate, steps)
            runs.append(Training(PEER, f"lr {rate:g}, {steps} steps", seed, run / "drafter", work))
    for seed in plan.seeds:
        run = folder / f"medusa-{seed}"
        runs.append(Training(MEDUSA, f"{peers_medusa.HEADS} heads", seed, run / "artifact", partial(train_medusa, plan, run, seed)))
    return runs


def stages(plan: Plan) -> dict[str, Work]:
    """All stages in order, by name."""
    work: dict[str, Work] = {FEATURES: partial(capture, plan)}
    if plan.python:
        work[COPY] = partial(copy, plan)
    for run in trainings(plan):
        work[run.name] = run.work
        work[f"τ of {run.name}"] = partial(measure, plan, run)
    return work


def capture(plan: Plan, _: Results) -> dict[str, Any]:
    chosen = plan.load()
    size = chosen.train.batch_size * chosen.data.seq_len
    tokens = plan.tokens or chosen.train.steps * size
    taps, last, seconds = peers_samples.capture_features(chosen, tokens)
    precision = machine.precision() if chosen.train.precision == "auto" else chosen.train.precision  # of all trainings
    facts = {"taps": taps, "last": last, "precision": precision}
    return facts | {"steps": max(1, tokens // size), "step_tokens": size, "seconds": seconds}


def copy(plan: Plan, results: Results) -> dict[str, Any]:
    """Write the samples as speculators' trainer reads them, and the draft vocabulary of our recipe."""
    target, data = peers_samples.open_samples(plan.load(), (*results[FEATURES]["taps"], results[FEATURES]["last"]))
    size = plan.load().eagle.vocab_size or target.vocab_size

    def write(part: Path) -> None:
        peers_samples.convert(data, part)
        if size < target.vocab_size:
            for name, values in setup.frequent_tokens(data, target, size).tensors().items():
                np.save(part / f"{name}.npy", values.numpy())

    began = time.process_time()
    durable.replace_folder(plan.folder / "samples", write)
    return {"seconds": time.process_time() - began, "vocab_size": size if size < target.vocab_size else None}


@contextmanager
def step_times() -> Iterator[list[float]]:
    """Within it, the list that it gives gets this process's CPU time at the end of each training step."""
    times: list[float] = []
    nested = [0]  # an optimizer's step may call that of its base class

    def enter(*_: Any) -> None:
        nested[0] += 1

    def leave(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nested[0] -= 1
        if not nested[0] and not isinstance(optimizer, torch.optim.LBFGS):  # which fits the drafter's confidence afterwards
            times.append(time.process_time())

    hooks = register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)
    try:
        yield times
    finally:
        for hook in hooks:
            hook.remove()


def mean_step(times: list[float]) -> dict[str, Any]:
    """The result of a training, from the CPU times at the ends of its steps: the mean, since steps may become more work on the way.

    A run that was stopped after its last step has none.
    """
    return {"seconds": (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None}


def train_ours(plan: Plan, run: Path, seed: int, results: Results) -> dict[str, Any]:
    settings = {"output": run, "seed": seed, **{key: results[FEATURES][key] for key in ("steps", "precision")}}
    with step_times() as times:
        eagle.main([plan.recipe, *plan.keys, *(f"train.{key}={value}" for key, value in settings.items())])
    return mean_step(times)


def speculators_flags(plan: Plan, run: Path, seed: int, rate: float, steps: int, results: Results) -> list[str]:
    """The words after `speculators train`."""
    chosen, samples = plan.load(), (plan.folder / "samples").resolve()
    flags: dict[str, Any] = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": Path(resolve_path(plan.target)).resolve(),
        "data-path": samples,
        "save-path": (run / "run").resolve(),
        "log-dir": (run / "logs").resolve(),
        "lr": rate,
        "ttt-steps": steps,
        "seed": seed,
        "num-layers": chosen.eagle.layers,
        "target-layer-ids": [tap + 1 for tap in results[FEATURES]["taps"]],  # inputs of layers
        "full-attention-indices": list(range(chosen.eagle.layers)),  # its window is of 2,048 tokens, more than our sequences have
        "total-seq-len": results[FEATURES]["step_tokens"],
        "hidden-states-dtype": "bfloat16" if results[FEATURES]["precision"] == "bf16" else "float32",
        "epochs": 1,
        "num-workers": 0,
        "log-freq": 50,
    }
    if not torch.cuda.is_available():  # the defaults are kernels for GPUs
        flags |= {"draft-attn-impl": "sdpa", "loss-implementation": "eager"}
    if size := results[COPY]["vocab_size"]:
        flags |= {"draft-vocab-size": size, "d2t-path": samples / "d2t.npy", "t2d-path": samples / "t2d.npy"}
    words = ["--no-resume-from-checkpoint"]
    for name, value in flags.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def train_speculators(plan: Plan, run: Path, seed: int, rate: float, steps: int, results: Results) -> dict[str, Any]:
    """Run speculators' trainer on the samples of our run with this seed. Raises ValueError where it fails."""
    chosen = plan.load()
    _, data = peers_samples.open_samples(chosen, ())
    order = peers_samples.order(data.corpus, chosen.data.seq_len, chosen.train.batch_size, seed, results[FEATURES]["steps"])
    run.mkdir(exist_ok=True)
    job, report, log = run / "job.json", run / "report.json", run / "log.txt"
    report.unlink(missing_ok=True)
    flags = speculators_flags(plan, run, seed, rate, steps, results)
    written = {"output": str((run / "drafter").resolve()), "report": str(report.resolve())}
    durable.write_text(job, json.dumps({"flags": flags, "batches": order, **written}))
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as file:
        command = [str(plan.python), "-P", str(DRIVER), str(job)]
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=own, check=False).returncode
    if status or not report.is_file():
        raise ValueError(f"speculators ended with status {status}; the end of {log} says why; the same command runs it again")
    seconds = read_json(report)["seconds"]
    return {"seconds": statistics.fmean(seconds) if seconds else None}


def train_medusa(plan: Plan, run: Path, seed: int, results: Results) -> dict[str, Any]:
    with step_times() as times:
        peers_medusa.train(plan.load(), run, seed, results[FEATURES]["steps"], results[FEATURES]["precision"])
    return mean_step(times)


def measure(plan: Plan, run: Training, _: Results) -> dict[str, Any]:
    return peers_table.measure(run.name, run.drafter, run.method == PEER, plan.target, plan.limit)


def work_through(plan: Plan) -> Results:
    """Do the stages that are not done -> all results. Raises ValueError where the folder has results of other settings."""
    file, todo = plan.folder / DONE, stages(plan)
    results = read_json(file) if file.is_file() else {"settings": plan.fixed}
    require_same(
        results["settings"], plan.fixed, f"{plan.folder} was begun", "give the same, or another folder", recipe.defaults(EagleRecipe)
    )
    for number, (name, work) in enumerate(todo.items(), 1):
        if name not in results:
            print(f"[{number}/{len(todo)}] {name}", file=sys.stderr, flush=True)
            results[name] = work(results)
            durable.write_text(file, json.dumps(results) + "\n")
    return results


def report(plan: Plan, results: Results) -> str:
    """The table of all drafters."""
    measured = [
        peers_table.Measured(run.method, run.setting, run.seed, results[run.name]["seconds"], results[f"τ of {run.name}"])
        for run in trainings(plan)
    ]
    steps = results[FEATURES]["steps"]
    features = {method: results[FEATURES]["seconds"] / steps for method in (OURS, PEER, MEDUSA)}
    features[PEER] += results.get(COPY, {"seconds": 0})["seconds"] / steps
    return peers_table.table(measured, features, steps * results[FEATURES]["step_tokens"])


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("target", help="`tiny`, or the folder of a model")
    described.add_argument("folder", type=Path, help="for all that is written")
    described.add_argument("--data", help="training data (default: the recipe's)")
    described.add_argument("--python", help="interpreter of an environment with speculators 0.9 (default: leave speculators out)")
    described.add_argument("--tokens", type=int, help="tokens to train on (default: as many as the recipe's steps have)")
    described.add_argument("--limit", type=int, help="most prompts of each domain (default: all)")
    described.add_argument("--recipe", help="ours (default: eagle3-tiny for `tiny`, else eagle3-smollm2-135m)")
    described.add_argument("--seeds", default="0,1,2", help="train every method with each of these (default 0,1,2)")
    described.add_argument("--lr", default="3e-4,1e-3,3e-3", help="learning rates of speculators; its default is 1e-3")
    described.add_argument("--steps", default="3,5", help="steps of speculators' training-time test; its default is 3")
    return described


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    if chosen.target != "tiny" and not (Path(chosen.target) / "config.json").is_file():
        raise ValueError(
            f"target {chosen.target!r} has no config.json; give `tiny` or the folder of a model, which speculators can read too"
        )
    own = chosen.recipe or ("eagle3-tiny" if chosen.target == "tiny" else "eagle3-smollm2-135m")
    seeds, steps = (tuple(int(part) for part in text.split(",")) for text in (chosen.seeds, chosen.steps))
    rates = tuple(float(part) for part in chosen.lr.split(","))
    inputs = (chosen.data, chosen.tokens, chosen.limit, chosen.python)
    plan = Plan(chosen.folder, chosen.target, own, *inputs, seeds, rates, steps)
    with claim(plan.folder, "comparison of trainers", (DONE, TABLE, "samples"), "folder"):
        text = report(plan, work_through(plan))
        durable.write_text(plan.folder / TABLE, text)
    print(text, end="")


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
