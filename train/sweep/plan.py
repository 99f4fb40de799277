"""What a sweep will run, checked before anything runs."""

import hashlib
import importlib
import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from draftsmith.data.prompts import shipped_or_given
from draftsmith.models.model_files import SHIPPED
from draftsmith.models.weights import sampled_hash, weights_hash
from draftsmith.train import cli
from draftsmith.train import recipe as recipes
from draftsmith.train.engine.redact import redacted
from draftsmith.train.plan.report import schema_of
from draftsmith.train.recipe import Recipe, by_key
from draftsmith.train.sweep.search import read_grid, rung_steps, trials_of
from draftsmith.train.sweep.trial import Run

# Keys that the sweep sets, and what to say instead.
OWN_KEYS = {"train.output": "the folder of the sweep is --output", "train.resume": "the same command goes on by itself"}
# Keys of the budget and of the measure.
EQUAL_KEYS = (
    "train.steps",
    "train.eval_batches",
    "train.tau_prompts",
    "train.tau_file",
    "train.tau_tokens",
    "train.tau_temperature",
    "data.valid",
)
# Keys with which simulated τ means another thing, some since they choose among the held-out data too.
MEASURE_KEYS = (
    "distill.temperature",
    "distill.top_k",
    "data.last_turn",
    "data.template",
    "data.exclude",
    "data.near_duplicate",
    "data.loops",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep.

    Attributes:
        method, recipe: as for `draftsmith train`.
        grid: every key that was given, with its values; a single value is an override.
        trials: the values of the keys with several, by trial.
        base: the recipe with the overrides alone.
        recipes: of the trials.
        rungs: steps of the base recipe in each rung.
        seeds: None stands for the recipe's own.
        contents: as `contents_of` has them, of all trials.
    """

    method: str
    recipe: str
    folder: Path
    grid: dict[str, list[str]]
    trials: list[dict[str, str]]
    base: Recipe
    recipes: list[Recipe]
    rungs: list[int]
    seeds: list[int | None]
    eta: int
    contents: dict[str, str]

    def settings(self) -> dict[str, Any]:
        """What must be the same when a sweep goes on."""
        own = {"method": self.method, "grid": redacted(self.grid), "--rungs": self.rungs, "--seeds": self.seeds, "--eta": self.eta}
        return own | self.contents | {key: value for key, value in by_key(self.base).items() if key not in OWN_KEYS}

    def words(self, trial: int, rung: int) -> list[str]:
        """The overrides of a trial, with the steps and evaluation batches that give it the tokens of the rung, and the warm-up in proportion."""
        values = {key: values[0] for key, values in self.grid.items()} | self.trials[trial]
        values |= of_length(self.recipes[trial], self.steps(trial, rung))
        own, base = _evaluated_tokens(self.recipes[trial]), _evaluated_tokens(self.base)
        if own != base:  # all trials are measured on as much text
            values["train.eval_batches"] = str(max(1, round(self.recipes[trial].train.eval_batches * base / own)))
        return as_words(values)

    def steps(self, trial: int, rung: int) -> int:
        """Steps in which a trial sees as many tokens as the base recipe in the rung."""
        return max(1, round(self.rungs[rung] * step_tokens(self.base) / step_tokens(self.recipes[trial])))

    def runs(self, trial: int, rung: int) -> list[Run]:
        """The runs of a trial in a rung, one for each seed."""
        recipe, steps = self.recipes[trial], self.steps(trial, rung)
        name = re.sub(r"[^\w.,+=-]+", "-", ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.trials[trial].items()))
        runs = []
        for seed in self.seeds:
            run_name = f"{trial:03d}-{name[:60]}/rung-{rung + 1}{'' if seed is None else f'-seed-{seed}'}"
            folder = self.folder / "trials" / run_name
            own = [f"train.output={folder}", "train.resume=auto", *([] if seed is None else [f"train.seed={seed}"])]
            words = (self.method, self.recipe, *self.words(trial, rung), *own)
            runs.append(
                Run(run_name, folder, words, steps, steps * step_tokens(recipe), recipe.train.tau_prompts > 0, sections_of_data(recipe))
            )
        return runs


def make_plan(options: Namespace) -> Plan:
    """The plan of a command line.

    Raises:
        ValueError: a method that trains no drafter, an unknown key or a value that the recipe refuses, a grid that is too large or has a single
            trial, an option that is out of range.
    """
    module = module_of(options.method)
    if not 2 <= options.eta <= 512:
        raise ValueError(f"--eta {options.eta}: expected 2 to 512")
    check_jobs(options.jobs)
    grid = read_grid(options.words)
    fixed, trials = _checked_grid(grid, options.seeds)
    schema = schema_of(module)

    def load(words: Iterable[str]) -> Recipe:
        recipe = recipes.load(schema, options.recipe, list(words))
        module.check(recipe)
        return recipe

    base = recipes.load(schema, options.recipe, as_words(fixed))  # not checked: it has the recipe's own values of the swept keys
    if len(grid.get("data.train", [])) > 1 and base.data.valid is None:
        raise ValueError("several data.train and no data.valid: each trial would be measured on a part of its own data; give data.valid")
    for key in MEASURE_KEYS:
        if len(grid.get(key, [])) > 1 and not base.train.tau_prompts:
            raise ValueError(
                f"{key} changes what simulated τ is measured with; measure τ itself: train.tau_prompts=4 (prompts of each domain)"
            )
    steps = base.train.steps
    rungs = integers("--rungs", options.rungs) if options.rungs else rung_steps(steps, len(trials), options.eta)
    if rungs != sorted(rungs) or rungs[0] < 1 or rungs[-1] != steps:
        raise ValueError(
            f"--rungs {options.rungs}: expected rising steps from 1 that end with the recipe's train.steps={steps}; change either"
        )
    seeds: list[int | None] = list(integers("--seeds", options.seeds)) if options.seeds else [None]
    folder = Path(options.output or f"runs/sweep-{Path(options.recipe).stem}")
    of_trials = [load(as_words(fixed | trial)) for trial in trials]
    plan = Plan(
        options.method, options.recipe, folder, grid, trials, base, of_trials, rungs, seeds, options.eta, contents_of([base, *of_trials])
    )
    for run in [run for trial in range(len(trials)) for run in plan.runs(trial, 0)]:
        try:
            load(run.words[2:])  # the seeds, and keys that do not go with few steps
        except ValueError as error:
            raise ValueError(f"{error} (a run of the first rung has {run.steps} steps; --rungs gives others)") from None
    return plan


def sections_of_data(recipe: Recipe) -> str:
    """The sections of a recipe that its prepared data depend on, for `Run.data`."""
    return f"{recipe.target.model_dump_json()} {recipe.data.model_dump_json()}"


def contents_of(recipes: Iterable[Recipe]) -> dict[str, str]:
    """Hashes of the data that recipes train on, of chat templates, of prompts for τ, and of local targets and weights to start from, as settings: a
    finished run counts only while they are as they were.

    Raises:
        ValueError: a source does not exist.
    """
    recipes = list(recipes)
    contents = {name: content for plan in {recipe.data.plan(): None for recipe in recipes} for name, content in plan.contents().items()}
    files = {each.data.template: Path(each.data.template).expanduser() for each in recipes if each.data.template}
    files |= {
        each.train.tau_file: shipped_or_given(each.train.tau_file) for each in recipes if each.train.tau_file and each.train.tau_prompts
    }
    contents |= {name: hashlib.sha256(file.read_bytes()).hexdigest()[:20] for name, file in files.items() if file.is_file()}
    models = {str(value) for each in recipes for key, value in by_key(each).items() if key == "target.path" or key.endswith(".start")}
    contents |= {name: model_hash for name in models if (model_hash := _model_hash(name))}
    return {f"contents of {name}": contents[name] for name in sorted(contents)}


def _model_hash(name: str) -> str:
    """A hash of the weights of a model or a drafter; "" for a name that is none here, such as `pruned` or a Hub id, whose commit is a key."""
    source = Path(SHIPPED.get(name, name)).expanduser()
    if source.is_file():
        return sampled_hash([str(source)])
    return weights_hash(str(source)) if (source / "config.json").is_file() else ""


def module_of(method: str) -> ModuleType:
    """The script of a method that trains a drafter. Raises ValueError for any other name."""
    methods = [name for name, source in cli.methods().items() if "\ndef build_untrained(" in source]
    if method not in methods:
        raise ValueError(f"no method {method!r} trains a drafter; expected one of {', '.join(methods)}")
    return importlib.import_module(f"draftsmith.train.{method}")


def check_jobs(jobs: int | None) -> None:
    """Raises ValueError for a number of processes that is out of range."""
    if jobs is not None and not 1 <= jobs <= 512:
        raise ValueError(f"--jobs {jobs}: expected 1 to 512")


def _checked_grid(grid: dict[str, list[str]], seeds: str | None) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The overrides and the trials of a grid. Raises ValueError for keys that are not for a sweep, and where there is a single trial."""
    for key, instead in OWN_KEYS.items():
        if key in grid:
            raise ValueError(f"the sweep sets {key}; {instead}")
    for key in EQUAL_KEYS:
        if len(grid.get(key, [])) > 1:
            raise ValueError(f"{key} must be equal for all trials, or they cannot be compared; give a single value")
    if seeds and "train.seed" in grid:
        raise ValueError("train.seed and --seeds: give one of them; with --seeds a trial is ranked by its mean")
    trials = trials_of({key: values for key, values in grid.items() if len(values) > 1})
    if len(trials) < 2:
        raise ValueError("nothing to sweep: give a key several values, for example train.lr=1e-3,3e-3")
    return {key: values[0] for key, values in grid.items() if len(values) == 1}, trials


def refuse_common(words: Iterable[str], *more: str) -> None:
    """Raise ValueError for a key=value that every run of a comparison has from elsewhere: of the draft tree, the seed, the evaluations, the
    folder, or one of `more`."""
    for word in words:
        if word.startswith("tree."):
            raise ValueError(f"{word}: every run is measured with a chain of 4; leave it out")
        if word.partition("=")[0] in ("train.seed", "train.eval_every", "train.output", *more):
            raise ValueError(f"{word}: every run has its own, by --tokens, --seeds and the folder; leave it out")


def as_words(values: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def of_length(recipe: Recipe, steps: int) -> dict[str, str]:
    """The keys that give a run of this recipe other steps, with the warm-up, and of Medusa-2 the steps of heads alone, in proportion."""
    warmup = -(-recipe.train.warmup_steps * steps // recipe.train.steps)
    keys = {"train.steps": str(steps), "train.warmup_steps": str(warmup)}
    heads = by_key(recipe).get("joint.heads_steps", 0)
    return keys | ({"joint.heads_steps": str(heads * steps // recipe.train.steps)} if heads else {})


def step_tokens(recipe: Recipe) -> int:
    """Positions of all sequences of a step."""
    return recipe.train.batch_size * recipe.data.seq_len


def _evaluated_tokens(recipe: Recipe) -> int:
    """Tokens that an evaluation on held-out data reads."""
    return recipe.train.held_out_sequences * recipe.data.seq_len


def integers(option: str, text: str) -> list[int]:
    """The numbers of an option such as `0,1,2`. Raises ValueError for anything else, and for a number that is given twice."""
    words = text.split(",")
    if not all(re.fullmatch(r"\d{1,10}", word) for word in words) or len(set(map(int, words))) < len(words):
        raise ValueError(f"{option} {text}: expected distinct integers, such as 0,1,2")
    return [int(word) for word in words]
