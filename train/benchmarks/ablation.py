"""Does a change of a recipe help? Trainings with and without it, several seeds each, and differences of τ paired by prompt and seed.

python -m draftsmith.train.benchmarks.ablation runs/ablation eagle eagle3-tiny --change eagle.loss=kl --change "eagle.steps=5 eagle.rise=0"
python -m draftsmith.train.benchmarks.ablation runs/heads medusa medusa-tiny medusa.heads=3 --tokens 240000 --change medusa.top_k=16

Every run is a `draftsmith train` with its complete learning-rate schedule, and the warm-up in proportion. Its drafter decodes the prompts that
ship for the target as a chain of 4. key=value holds for every run, the keys of one --change for its runs alone. The table is written to
FOLDER/ablation.md. The same command goes on where an earlier one stopped, and changes and seeds may be added.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.eval import loading
from draftsmith.eval.intervals import shown
from draftsmith.inference import durable
from draftsmith.inference.claim import claim
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.reading import read_json, require_same
from draftsmith.train import recipe as recipes
from draftsmith.train.benchmarks import paired
from draftsmith.train.engine import recipe_file
from draftsmith.train.plan.report import schema_of
from draftsmith.train.sweep import trial
from draftsmith.train.sweep.plan import (
    as_words,
    check_jobs,
    contents_of,
    integers,
    module_of,
    of_length,
    refuse_common,
    sections_of_data,
    step_tokens,
)
from draftsmith.train.sweep.trial import Result, Run

RESULTS, TABLE = "results.json", "ablation.md"
MEASURES = ("chain of 4, T = 0", "chain of 4, T = 1")
SHORT = ("train.eval_batches=1", "train.tau_prompts=1", "train.tau_tokens=16")  # a training's own evaluation: τ is measured after it
RECIPE = "the recipe"


@dataclass(frozen=True, slots=True)
class Trained:
    """A run of the ablation.

    Attributes:
        change: its keys, as on the command line; RECIPE where nothing is changed.
        seed: of the weights and of the order of samples.
        run: the training.
        contents: what its data hold.
    """

    change: str
    seed: int
    run: Run
    contents: dict[str, str]


def runs_of(options: argparse.Namespace) -> tuple[dict[str, Any], list[Trained]]:
    """What all runs of a folder must have in common, and the runs, those of a seed together.

    Raises:
        ValueError: a key that the recipe or `refuse_common` refuses, two changes of one name, a change of what every run must share, or data
            that do not exist.
    """
    module = module_of(options.method)
    schema = schema_of(module)
    base = recipes.load(schema, options.recipe, [*SHORT, *options.words])
    tokens = options.tokens or base.train.steps * step_tokens(base)
    trained, stems = [], set()
    refuse_common(options.words)
    next_key = r"\s+(?=\w+\.\w+=)"  # other spaces are of a mix of losses
    words_of = {" ".join(text.split()): re.split(next_key, text.strip()) for text in options.change}
    refuse_common(itertools.chain(*words_of.values()), "train.steps")
    changes = {RECIPE: []} | words_of
    for change, keys in changes.items():
        changed = recipes.load(schema, options.recipe, [*SHORT, *options.words, *keys])
        module.check(changed)
        if changed.target != base.target or changed.data.valid != base.data.valid:
            raise ValueError(
                f"--change {change!r}: the target and the held-out data are those of every run; give another folder for others"
            )
        stem = re.sub(r"[^\w.,+=-]+", "-", change)[:100]
        if stem in stems:
            raise ValueError(
                f"--change {change!r}: its runs would be called {stem}, as those of another change; give one of them in another folder"
            )
        stems.add(stem)
        contents, steps = contents_of([changed]), max(1, tokens // step_tokens(changed))
        for seed in integers("--seeds", options.seeds):
            name = f"{stem}-{seed}"
            folder = options.folder / "runs" / stem / name
            own = (*as_words(of_length(changed, steps)), f"train.eval_every={steps}", f"train.seed={seed}", f"train.output={folder}")
            words = as_words(dict(word.split("=", 1) for word in (*SHORT, *options.words, *keys, *own)))
            run = Run(
                name, folder, (options.method, options.recipe, *words), steps, steps * step_tokens(changed), True, sections_of_data(changed)
            )
            trained.append(Trained(change, seed, run, contents))
    common = {"method": options.method, "--tokens": tokens, "--limit": options.limit}
    return common | recipes.by_key(base), sorted(trained, key=lambda each: each.seed)


def measure(run: Run, limit: int | None) -> dict[str, Any]:
    """Decode the prompts with a finished run's drafter -> what `paired.decode` gives. A run of LayerSkip leaves a target, whose first exit drafts."""
    artifact = run.folder / "artifact"
    if run.words[:1] == ("layerskip",):
        exits = recipe_file.read(artifact / "recipe.yaml")["layerskip.exits"]
        target, (drafter,) = loading.open_models(str(artifact), [f"early-exit:{exits[0]}"], "auto")
    else:
        target, (drafter,) = loading.open_models(None, [str(artifact)], "auto")
    return paired.decode(run.name, target, drafter, paired.encoded_prompts(target, limit), MEASURES)


def train_all(folder: Path, common: dict[str, Any], trained: Sequence[Trained], jobs: int | None, limit: int | None) -> dict[str, Any]:
    """Train and measure what has no result yet -> by run, its `seconds`, its `counts` and the `contents` of its data.

    Raises:
        ValueError: a run failed, or the folder has results of other settings or other data.
    """
    file = folder / RESULTS
    before = read_json(file) if file.is_file() else {"settings": common, "runs": {}}
    defaults = recipes.defaults(schema_of(module_of(common["method"])))
    require_same(before["settings"], common, f"{file} was begun", "give the same, or another folder", defaults)
    results: dict[str, Any] = before["runs"]
    contents = {each.run.name: each.contents for each in trained}
    for name in results.keys() & contents.keys():
        require_same(results[name]["contents"], contents[name], f"{file} has a run {name}", "give another folder")

    def record(run: Run, result: Result) -> str:
        results[run.name] = {"seconds": result.seconds, "counts": measure(run, limit), "contents": contents[run.name]}
        durable.write_text(file, json.dumps({"settings": common, "runs": results}) + "\n")
        return run.name

    trial.run_missing("ablation", [each.run for each in trained], results, jobs, record)
    return results


def table(trained: Sequence[Trained], results: dict[str, Any]) -> str:
    """τ of the recipe and of each change, and the differences to the recipe, as Markdown."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in trained:
        groups.setdefault(each.change, []).append(results[each.run.name])
    lines = [f"| | {' | '.join(f'{name} | Δ' for name in MEASURES)} | s of training |", "|---" * (2 * len(MEASURES) + 2) + "|"]
    for change, runs in groups.items():
        cells = [change if change == RECIPE else f"`{change}`"]
        for name in MEASURES:
            base, own = (paired.counts(name, [run["counts"] for run in each]) for each in (groups[RECIPE], runs))
            delta, low, high = paired.difference(base, own)
            cells += [f"{paired.mean_tau(own):.3f}", "" if change == RECIPE else f"{delta:+.3f} ({shown(low, high, '+.3f')})"]
        cells.append(f"{statistics.fmean(run['seconds'] for run in runs):,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    seeds = len(groups[RECIPE])
    prompts = len(groups[RECIPE][0]["counts"][MEASURES[0]][0])
    over = "prompts and seeds" if seeds > 1 else "prompts alone: one seed says nothing of how runs of one recipe differ"
    return "\n".join((*lines, "", f"τ is the mean of {seeds} seed(s) over {prompts} prompts; 95 % intervals are over {over}.", ""))


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("folder", type=Path, help="for all that is written")
    described.add_argument("method", help="a method of `draftsmith train` that trains a drafter")
    described.add_argument("recipe", help="YAML file, or the name of one that is shipped")
    described.add_argument("words", nargs="*", metavar="key=value", help="recipe keys of every run")
    described.add_argument(
        "--change", action="append", required=True, metavar='"key=value …"', help="keys of a change; once for each change"
    )
    described.add_argument("--tokens", type=int, help="training tokens of each run (default: the recipe's)")
    described.add_argument("--seeds", default="0,1,2", help="train everything with each of these (default 0,1,2)")
    described.add_argument("--limit", type=int, help="prompts of each domain (default: all)")
    described.add_argument("--jobs", type=int, help="runs at a time (default: one for each GPU, without GPUs one for each core)")
    return described


def main(arguments: list[str]) -> None:
    options = parser().parse_intermixed_args(arguments)
    check_jobs(options.jobs)
    common, trained = runs_of(options)
    with claim(options.folder, "ablation", (RESULTS, TABLE, "runs"), "folder"):
        text = table(trained, train_all(options.folder, common, trained, options.jobs, options.limit))
        durable.write_text(options.folder / TABLE, text)
    print(text, end="")


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
