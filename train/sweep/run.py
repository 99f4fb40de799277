"""Runs a sweep rung by rung, and remembers each result, so that the same command goes on."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from draftsmith.eval.loading import command
from draftsmith.inference import durable, machine
from draftsmith.inference.claim import claim
from draftsmith.inference.progress import Bar
from draftsmith.inference.reading import field, read_json, require_same
from draftsmith.train.engine.say import say
from draftsmith.train.recipe import defaults
from draftsmith.train.sweep import report, search, trial
from draftsmith.train.sweep.plan import Plan
from draftsmith.train.sweep.report import Point, Standing
from draftsmith.train.sweep.trial import Result, Run

KIND, FILES = "sweep", ("trials", "sweep.json", "table.md", "sweep.png")


def run_sweep(plan: Plan, jobs: int | None) -> None:
    """Run what is left of a sweep; write sweep.json, table.md and sweep.png; print the table and the command that trains with the best values.

    Args:
        plan: what to run.
        jobs: runs at a time; None: one for each GPU, without GPUs one for each core.

    Raises:
        ValueError: the folder is of another sweep, in use or somebody else's, or all trials of a rung failed.
        SystemExit: 128 + signal; see `trial.run_all`.
    """
    devices = trial.gpus()
    jobs = jobs or len(devices) or machine.cores()
    if jobs > 1 and any(recipe.features.mode == "cache" for recipe in plan.recipes):
        raise ValueError("features.mode=cache has one writer; fill the store with `draftsmith data capture` and take offline, or --jobs 1")
    for path in (plan.folder / name for name in FILES):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and a sweep writes through none; move it away, or give another --output")
    with claim(plan.folder, KIND, FILES, "--output"):
        results = _read(plan)
        _write(plan, results)  # from now on the folder is this sweep's
        _check_depths(results)
        standings = [Standing(number, values) for number, values in enumerate(plan.trials)]
        _run_rungs(plan, results, standings, devices, jobs)
        _publish(plan, standings)


def _run_rungs(plan: Plan, results: dict[str, Result], standings: list[Standing], devices: list[str], jobs: int) -> None:
    """Run the rungs that `results` lacks, and give `standings` their points. It ends after a rung in which all trials failed."""
    sizes = search.rung_sizes(len(plan.trials), len(plan.rungs), plan.eta)
    budgets = [size * steps * len(plan.seeds) for size, steps in zip(sizes, plan.rungs, strict=True)]  # in steps, for the progress bar
    trials = list(range(len(plan.trials)))
    recorded = sum(plan.rungs[rung] for rung in range(len(sizes)) for t in trials for run in plan.runs(t, rung) if run.name in results)
    with Bar("sweep", sum(budgets), min(recorded, sum(budgets))) as bar:
        for rung, steps in enumerate(plan.rungs):
            runs = [run for number in trials for run in plan.runs(number, rung)]

            def record(run: Run, result: Result, last: bool = rung == len(plan.rungs) - 1) -> None:
                results[run.name] = result
                _write(plan, results)
                _check_depths(results)
                if result.measure is not None and not last:
                    trial.remove_weights(run)

            def progress(share: float, rung: int = rung, runs: list[Run] = runs, steps: int = steps) -> None:
                measures = [results[run.name].measure for run in runs if run.name in results]
                best = max((measure for measure in measures if measure is not None), default=None)
                text = f"rung {rung + 1} of {len(sizes)}, run {len(measures)} of {len(runs)}" + (f", best {best:.3f}" if best else "")
                done = sum(budgets[:rung]) + int(steps * (len(measures) + share))
                bar.update(min(done, sum(budgets) - 1), text)

            trial.run_all([run for run in runs if run.name not in results], devices, jobs, record, progress)
            for number in trials:
                standings[number].points.append(_point(plan.runs(number, rung), results))
            trials = search.survivors({number: standings[number].points[-1].mean for number in trials}, plan.eta)
            if not trials:
                return
        bar.update(sum(budgets))


def _check_depths(results: dict[str, Result]) -> None:
    """Raises ValueError for simulated τ of chains of several depths: a deeper chain of an equally good drafter has the larger one."""
    depths = sorted({result.depth for result in results.values() if result.depth})
    if len(depths) > 1:
        raise ValueError(
            f"trials differ in the depth of their simulated chains: {', '.join(map(str, depths))}; measure τ itself: train.tau_prompts=4 "
            "(prompts of each domain), and give tree.depth"
        )


def _point(runs: list[Run], results: dict[str, Result]) -> Point:
    """A trial in a rung, of its runs with each seed."""
    own = [results[run.name] for run in runs]
    errors = [result.error for result in own if result.measure is None]
    measures = [] if errors else [result.measure for result in own if result.measure is not None]
    return Point(runs[0].steps, runs[0].tokens, measures, sum(result.seconds for result in own) / len(own), "; ".join(errors[:1]))


def _publish(plan: Plan, standings: list[Standing]) -> None:
    """Write and print what came out, and delete the weights of all runs but the winner's; while trials have failed, those of the last rung stay.

    Raises:
        ValueError: all trials of the last rung that ran failed.
    """
    rungs = max(len(standing.points) for standing in standings)
    order = sorted(standings, key=lambda s: (s.points[-1].mean is None, -len(s.points), -(s.points[-1].mean or 0.0), s.number))
    best = order[0]
    last = [standing for standing in standings if len(standing.points) == rungs]  # of the trials, those of the last rung
    if len(best.points) < rungs or best.points[-1].mean is None:
        raise ValueError(
            f"all {len(last)} trials of rung {rungs} of the sweep failed, the first with: {last[0].points[-1].error} "
            f"(logs: {plan.folder / 'trials'}); the same command runs them again"
        )
    # A trial that failed may still push another out of the last rung, and so make another the best.
    failures = any(point.mean is None for each in standings for point in each.points)
    with_weights = [each.number for each in last] if failures else [best.number]
    for number in range(len(plan.trials)):
        for rung in range(rungs):
            if number not in with_weights or rung < rungs - 1:
                for run in plan.runs(number, rung):
                    trial.remove_weights(run)
    measure = "τ" if plan.base.train.tau_prompts else "simulated τ"
    text = report.table(order, measure)
    changed = plan.steps(best.number, rungs - 1) != plan.base.train.steps
    words = [word for word in plan.words(best.number, rungs - 1) if changed or word.partition("=")[0] in {*plan.grid}]
    train = f"{command()} train {shlex.join([plan.method, plan.recipe, *words])}"
    title = f"{plan.method}, {Path(plan.recipe).stem}: {len(plan.trials)} trials, {len(plan.rungs)} rungs"
    durable.write_text(plan.folder / "table.md", f"# Sweep of {title}\n\n{text}\n\nThe best values: `{train}`\n")
    report.draw(order, measure, f"{title}; the best: {', '.join(f'{k}={v}' for k, v in best.values.items())}", plan.folder / "sweep.png")
    say(f"{text}\n\n{plan.folder}: table.md, sweep.png; the best run is {plan.runs(best.number, rungs - 1)[0].folder}")
    say(f"the best values: {train}")


def _read(plan: Plan) -> dict[str, Result]:
    """The results of an earlier start of this sweep, without failures, which run again.

    Raises:
        ValueError: sweep.json is damaged or of another sweep.
    """
    file = plan.folder / "sweep.json"
    if not file.is_file():
        return {}
    content = read_json(file)
    before = field(content, "settings", dict, file)
    require_same(before, plan.settings(), f"{file} is of a sweep", "give another --output", defaults(type(plan.base)))
    kinds = {"measure": (float, type(None)), "seconds": float, "error": str, "depth": (int, type(None))}
    try:
        entries = field(content, "results", dict, file)
        results = {name: Result(**{key: field(entries[name], key, kind, file) for key, kind in kinds.items()}) for name in entries}
    except (TypeError, AttributeError):
        raise ValueError(f"{file} is damaged; restore it, or delete it to run everything again") from None
    return {name: result for name, result in results.items() if result.measure is not None}


def _write(plan: Plan, results: dict[str, Result]) -> None:
    content = {"settings": plan.settings(), "results": {name: asdict(result) for name, result in results.items()}}
    durable.write_text(plan.folder / "sweep.json", json.dumps(content, indent=1) + "\n")
