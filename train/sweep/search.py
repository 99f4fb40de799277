"""The grid of a sweep, and successive halving over it (Jamieson and Talwalkar, arXiv 1502.07943). Nothing here runs or reads anything.

Letters: n trials, S steps of the recipe, η (`eta`) the factor between rungs.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product

MOST_TRIALS = 512
MOST_RUNGS = 4  # the first rung has S / 27 steps at least with η = 3: shorter runs are mostly warm-up


def read_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key, as texts for a recipe, of words such as `train.lr=1e-3,2e-3` and `eagle.taps=[1,3],[2,4]`.

    Commas within brackets, braces and quotes separate no values. Quotes around a value are taken off.

    Raises:
        ValueError: a word without `=`, a key or a value that is given twice, an empty value between commas, or too many trials.
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not of the form key=value or key=value,value, for example train.lr=1e-3,2e-3")
        values = split_values(text)
        if key in grid:
            raise ValueError(f"recipe key {key!r} is given twice; give all its values at once, {key}=a,b")
        if len(values) > 1 and not all(values):
            raise ValueError(f"recipe key {key!r}: {text!r} has an empty value between its commas; leave it out, or write null")
        if len(set(values)) < len(values):
            raise ValueError(f"recipe key {key!r}: {text!r} has a value twice; leave one out")
        grid[key] = values
    count = math.prod(map(len, grid.values()))
    if count > MOST_TRIALS:
        raise ValueError(
            f"the grid has {count:,} trials; expected at most {MOST_TRIALS}: give fewer values, or sweep one key after another"
        )
    return grid


def split_values(text: str) -> list[str]:
    """The values of a text, split at the commas outside brackets, braces and quotes."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and values[-1][-1:] in tuple(" [{,:") + ("",):
            quote = character  # an apostrophe within a word opens nothing
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [value[1:-1] if re.fullmatch(r"""'[^']*'|"[^"]*\"""", value) else value for value in values]


def trials_of(grid: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Every combination of the values, by key; the last key varies fastest."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def rung_steps(steps: int, trials: int, eta: int) -> list[int]:
    """Steps of each rung, ascending: … S/η², S/η, S. There are as many rungs as leave 2 to η trials for the last, MOST_RUNGS at most.

    Args:
        steps: S, of the recipe.
        trials: n.
        eta: η, from 2.
    """
    count = 1
    while count < MOST_RUNGS and trials > eta**count and steps >= eta**count:
        count += 1
    return [max(1, round(steps / eta**below)) for below in reversed(range(count))]


def rung_sizes(trials: int, rungs: int, eta: int) -> list[int]:
    """How many trials run in each rung, if enough of them give a measure."""
    sizes = [trials]
    while len(sizes) < rungs:
        sizes.append(-(-sizes[-1] // eta))
    return sizes


def ranked(measures: Mapping[int, float | None]) -> list[int]:
    """Trials by measure, the best first. Equal ones stay in their order; those without a finite measure come last."""

    return sorted(measures, key=lambda trial: -_finite(measures[trial]))


def survivors(measures: Mapping[int, float | None], eta: int) -> list[int]:
    """The best 1/η of the trials, rounded up, in the order of their numbers; never one without a finite measure."""
    best = ranked(measures)[: -(-len(measures) // eta)]
    return sorted(trial for trial in best if _finite(measures[trial]) > -math.inf)


def _finite(measure: float | None) -> float:
    return measure if measure is not None and math.isfinite(measure) else -math.inf
