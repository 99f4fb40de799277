"""How τ rises with training tokens and time: runs of several lengths of each recipe, curves through them, and where one overtakes another.

python -m draftsmith.train.benchmarks.scaling runs/scaling medusa:medusa-tiny eagle:eagle1-tiny eagle:eagle3-tiny distill:distill-tiny
python -m draftsmith.train.benchmarks.scaling runs/scaling-smollm2 eagle:eagle3-smollm2-135m target.path=FOLDER data.train=answers.jsonl

Every run is a `draftsmith train` with its complete learning-rate schedule, and the warm-up in proportion. Its last evaluation decodes the shipped
prompts greedily with a chain of 4. FOLDER gets scaling.md, scaling.png and scaling.json, which `draftsmith plan` reads as train/plan/scaling.json.
The same command goes on where an earlier one stopped, and lengths, seeds and recipes may be added. Keys for every recipe follow as key=value.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.eval.intervals import shown
from draftsmith.inference import durable
from draftsmith.inference.claim import claim
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.reading import read_json, require_same
from draftsmith.train import recipe as recipes
from draftsmith.train.plan.report import schema_of
from draftsmith.train.plan.scaling import Curves, Point, ceiling, fit, method_name, middle_tau, overtaken, predict
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

RESULTS, TABLE, PICTURE, POINTS = "results.json", "scaling.md", "scaling.png", "scaling.json"
MEASURE = (
    "tree.width=1",
    "tree.depth=4",
    "tree.nodes=null",
    "train.tau_prompts=4",
    "train.tau_tokens=64",
)  # keys that are given come after these
CLOSE = 1.05  # a factor between lengths
AXES = {"tokens": "training tokens", "seconds": "seconds of training"}


@dataclass(frozen=True, slots=True)
class Trained:
    """A run, with what the table says of it.

    Attributes:
        run: the run.
        method: followed by the recipe's name where several recipes have the method.
        target: its name.
        recipe: its recipe's name.
        settings: the keys of its recipe, before the length and the seed, and what its data hold.
    """

    run: Run
    method: str
    target: str
    recipe: str
    settings: dict[str, Any]


def runs_of(folder: Path, names: Sequence[str], keys: Sequence[str], budgets: Iterable[int], seeds: Sequence[int]) -> list[Trained]:
    """All runs, the shortest first.

    Args:
        folder: of all that is written.
        names: `script:recipe` each.
        keys: recipe keys of every run, as key=value.
        budgets: training tokens.
        seeds: of the weights and of the order of samples.

    Raises:
        ValueError: a key that the recipe or `refuse_common` refuses, a word that is not `script:recipe`, recipes of one name, or lengths within
            5 % of each other.
    """
    runs, stems = [], [Path(name.partition(":")[2]).stem for name in names]
    refuse_common(keys, "train.steps")
    if len(set(stems)) < len(stems):
        raise ValueError(f"recipes {', '.join(stems)}: the runs of two would share a name; rename one")
    for name, stem in zip(names, stems, strict=True):
        script, colon, recipe = name.partition(":")
        if not colon:
            raise ValueError(f"{name!r} is not of the form script:recipe, for example eagle:eagle3-tiny")
        schema = schema_of(module_of(script))
        base = recipes.load(schema, recipe, [*MEASURE, *keys])
        settings = recipes.by_key(base) | contents_of([base])
        size = step_tokens(base)
        lengths = sorted(max(1, tokens // size) for tokens in budgets)  # in steps
        for shorter, longer in itertools.pairwise(lengths):
            if longer <= CLOSE * shorter:
                raise ValueError(
                    f"{recipe}: lengths of {shorter * size:,} and {longer * size:,} tokens in steps of {size:,} are too close for a curve; "
                    "give lengths more than 5 % apart"
                )
        for steps in lengths:
            own = [*as_words(of_length(base, steps)), f"train.eval_every={steps}"]
            for seed in seeds:
                output = folder / "runs" / stem / f"{stem}-{steps * size}-{seed}"
                every = (*MEASURE, *keys, *own, f"train.seed={seed}", f"train.output={output}")
                words = as_words(dict(word.split("=", 1) for word in every))
                run = Run(output.name, output, (script, recipe, *words), steps, steps * size, True, sections_of_data(base))
                runs.append(Trained(run, method_name(script, base), Path(base.target.path).name, stem, settings))
    several = {method for method in {each.method for each in runs} if len({each.recipe for each in runs if each.method == method}) > 1}
    named = [replace(each, method=f"{each.method}, {each.recipe}") if each.method in several else each for each in runs]
    return sorted(named, key=lambda trained: trained.run.tokens)


def train_all(folder: Path, trained: Sequence[Trained], jobs: int | None) -> list[Point]:
    """Train what has no result yet -> all points. Raises ValueError where a run failed, or the results are of a recipe with other values."""
    file = folder / RESULTS
    before = read_json(file) if file.is_file() else {"settings": {}, "results": {}}
    results: dict[str, Result] = {name: Result(**entry) for name, entry in before["results"].items()}
    settings: dict[str, dict[str, Any]] = {each.recipe: each.settings for each in trained}
    defaults = {each.recipe: recipes.defaults(schema_of(module_of(each.run.words[0]))) for each in trained}
    for name in settings.keys() & before["settings"].keys():
        require_same(
            before["settings"][name], settings[name], f"{file} has runs of {name}", "give the same, or another folder", defaults[name]
        )

    def record(run: Run, result: Result) -> str:
        results[run.name] = result
        content = {"settings": before["settings"] | settings, "results": {name: asdict(each) for name, each in results.items()}}
        durable.write_text(file, json.dumps(content, indent=1) + "\n")
        return f"{run.name}: τ {result.measure:.3f}"

    trial.run_missing("scaling", [each.run for each in trained], results, jobs, record)
    return [
        Point(each.method, each.target, each.run.tokens, results[each.run.name].seconds, results[each.run.name].measure or 0.0)
        for each in trained
    ]


def fitted(points: Sequence[Point], axis: str) -> tuple[dict[str, Curves], list[str]]:
    """The curves of each method over `tokens` or `seconds`, and why a method has none."""
    curves, reasons = {}, []
    for method in dict.fromkeys(point.method for point in points):
        own = [point for point in points if point.method == method]
        try:
            curves[method] = fit([getattr(point, axis) for point in own], [point.tau for point in own])
        except ValueError as error:
            reasons.append(f"{method}, by {AXES[axis]}: {error}")
    return curves, reasons


def table(points: Sequence[Point]) -> str:
    """The runs, what their curves predict, and where one overtakes another, as Markdown."""
    methods = list(dict.fromkeys(point.method for point in points))
    budgets: list[int] = []  # lengths up to 5 % apart share a row: recipes differ in the tokens of a step
    for tokens in sorted(point.tokens for point in points):
        budgets += [tokens] if not budgets or tokens > CLOSE * budgets[-1] else []
    text = [f"| τ after | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for tokens in budgets:
        cells = []
        for method in methods:
            own = [point for point in points if point.method == method and tokens <= point.tokens <= CLOSE * tokens]
            cells.append(
                ", ".join(f"{point.tau:.2f}" for point in own)
                + (f" ({statistics.fmean(point.seconds for point in own):,.0f} s)" if own else "–")
            )
        text.append(f"| {tokens:,} tokens | {' | '.join(cells)} |")
    by_tokens, _ = fitted(points, "tokens")
    for title, predicted in (
        (f"predicted, {10 * budgets[-1]:,} tokens", lambda curves: predict(curves, 10 * budgets[-1])),
        ("ceiling", ceiling),
    ):
        taus = [predicted(by_tokens[method]) if method in by_tokens else None for method in methods]
        text.append(f"| {title} | {' | '.join(f'{tau.estimate:.2f} ({shown(tau.low, tau.high)})' if tau else '–' for tau in taus)} |")
    text.append("")
    for axis, title in AXES.items():
        curves, reasons = fitted(points, axis)
        text += [f"- {reason}." for reason in reasons]
        for first, second in itertools.permutations(curves, 2):
            at = overtaken(curves[first], curves[second])
            if at:
                text.append(f"- By {title}, {second} overtakes {first} at about {at:,.0f}.")
    return "\n".join(text) + "\n"


def draw(points: Sequence[Point], picture: Path) -> None:
    """τ − 1 over tokens and over time, both in logarithms: dots are runs, lines are the curves' medians."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), dpi=130, layout="constrained")
    for number, (axis, title) in enumerate(AXES.items(), 1):
        axes = figure.add_subplot(1, 2, number)
        curves, _ = fitted(points, axis)
        for color, method in zip(itertools.cycle(colormaps["tab20"].colors), dict.fromkeys(point.method for point in points), strict=False):  # pyright: ignore[reportAttributeAccessIssue]
            own = [point for point in points if point.method == method]
            axes.plot([getattr(point, axis) for point in own], [point.tau - 1 for point in own], "o", ms=4, color=color, label=method)
            if method in curves:
                least, most = curves[method].least, curves[method].most
                along = [least * (most / least) ** (part / 32) for part in range(33)]
                axes.plot(along, [middle_tau(curves[method], amount) - 1 for amount in along], lw=1.2, color=color)
        axes.set(xscale="log", yscale="log", xlabel=title)
        axes.set_title("τ − 1, greedy chain of 4" if number == 1 else "", loc="left", fontsize=10, fontweight="bold")
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    durable.replace(picture, lambda part: figure.savefig(part, format="png"))


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("folder", type=Path, help="for all that is written")
    described.add_argument("words", nargs="+", metavar="script:recipe", help="recipes, and key=value for all of them")
    described.add_argument("--tokens", default="90000,180000,360000,720000", help="training tokens of the runs")
    described.add_argument("--seeds", default="0", help="train every length with each of these (default 0)")
    described.add_argument("--jobs", type=int, help="runs at a time (default: one for each GPU, without GPUs one for each core)")
    return described


def main(arguments: list[str]) -> None:
    chosen = parser().parse_intermixed_args(arguments)
    check_jobs(chosen.jobs)
    words, keys = [word for word in chosen.words if "=" not in word], [word for word in chosen.words if "=" in word]
    budgets, seeds = integers("--tokens", chosen.tokens), integers("--seeds", chosen.seeds)
    if len(budgets) < 3:
        raise ValueError(f"--tokens {chosen.tokens}: expected three lengths at least, for a curve")
    trained = runs_of(chosen.folder, words, keys, budgets, seeds)
    with claim(chosen.folder, "scaling of τ", (RESULTS, TABLE, PICTURE, POINTS, "runs"), "folder"):
        points = train_all(chosen.folder, trained, chosen.jobs)
        durable.write_text(chosen.folder / POINTS, json.dumps([asdict(point) for point in points], indent=1) + "\n")
        text = table(points)
        durable.write_text(chosen.folder / TABLE, text)
        draw(points, chosen.folder / PICTURE)
    print(text, end="")


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
