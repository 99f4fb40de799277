"""How τ rises with training: a power of the training tokens, fitted to measured runs, and what it predicts for a recipe.

s = (τ − 1) / K is the share of a chain of K that is accepted. s / (1 − s) = C nᵝ is a line in logarithms, fitted by least squares: far below the
ceiling τ = 1 + K the rise of τ − 1 is a power, and τ never passes the ceiling. A prediction's interval is Student's, with the spread of the runs
about the line. scaling.json holds the runs that ship (train/benchmarks/scaling.py writes such a file).

Letters: n training tokens, m runs, K draft depth.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.eval.intervals import Interval, t_quantile
from draftsmith.train.recipe import Recipe

SHIPPED = Path(__file__).with_name("scaling.json")
DEPTH = 4  # K of the runs
LEAST = 1e-3  # of s and of 1 − s: a run whose drafts are all rejected, or all accepted, has no logarithm
FURTHEST = 30  # times above the longest or below the shortest run: no prediction there


@dataclass(frozen=True, slots=True)
class Point:
    """A finished training run.

    Attributes:
        method: as `method_name` has it.
        target: its name.
        tokens: n.
        seconds: of its training steps.
        tau: τ of a greedy chain of 4 on held-out prompts.
    """

    method: str
    target: str
    tokens: int
    seconds: float
    tau: float


@dataclass(frozen=True, slots=True)
class Line:
    """ln(s / (1 − s)) = level + exponent · (ln n − center).

    Attributes:
        spread: standard deviation of the runs about the line; None with two runs.
        width: Σ (ln n − center)².
        runs: m.
        least, most: n of the shortest and the longest run.
    """

    level: float
    exponent: float
    center: float
    width: float
    spread: float | None
    runs: int
    least: float
    most: float


def method_name(script: str, recipe: Recipe) -> str:
    """The script's name, and the version for EAGLE: `eagle-3`."""
    version = getattr(getattr(recipe, script, None), "version", None)
    return script if version is None else f"{script}-{version}"


def fit(amounts: Sequence[float], taus: Sequence[float]) -> Line:
    """The line through m runs.

    Args:
        amounts: n of each run, or its seconds.
        taus: τ of each.

    Raises:
        ValueError: fewer than two different amounts.
    """
    if len(set(amounts)) < 2:
        raise ValueError(f"a line needs runs of two lengths at least; got {len(set(amounts))}")
    shares = [min(max((tau - 1) / DEPTH, LEAST), 1 - LEAST) for tau in taus]
    x, y = [math.log(n) for n in amounts], [math.log(share / (1 - share)) for share in shares]
    center, level = statistics.fmean(x), statistics.fmean(y)
    width = sum((a - center) ** 2 for a in x)
    exponent = sum((a - center) * (b - level) for a, b in zip(x, y, strict=True)) / width
    left = sum((b - level - exponent * (a - center)) ** 2 for a, b in zip(x, y, strict=True))
    spread = math.sqrt(left / (len(x) - 2)) if len(x) > 2 else None
    return Line(level, exponent, center, width, spread, len(x), min(amounts), max(amounts))


def predict(line: Line, amount: float) -> Interval:
    """τ of a further run of this length, with its 95 % interval; the ends are None where only two runs were measured."""
    away = math.log(amount) - line.center
    middle = line.level + line.exponent * away
    if line.spread is None:
        return Interval(_tau(middle), None, None)
    half = t_quantile(line.runs - 2) * line.spread * math.sqrt(1 + 1 / line.runs + away * away / line.width)
    return Interval(*map(_tau, (middle, middle - half, middle + half)))


def _tau(log_odds: float) -> float:
    return 1 + DEPTH / (1 + math.exp(-log_odds))


def crossing(first: Line, second: Line) -> float | None:
    """Where both lines predict the same τ; None where that is more than FURTHEST times beyond what was measured, or nowhere."""
    if first.exponent == second.exponent:
        return None
    at = (second.level - second.exponent * second.center - first.level + first.exponent * first.center) / (first.exponent - second.exponent)
    least, most = math.log(min(first.least, second.least) / FURTHEST), math.log(max(first.most, second.most) * FURTHEST)
    return math.exp(at) if least <= at <= most else None


def read(file: Path) -> list[Point]:
    """The runs of a file."""
    return [Point(**entry) for entry in json.loads(file.read_text("utf-8"))]


def expected(script: str, recipe: Recipe, tokens: int) -> dict[str, Interval]:
    """τ that the shipped runs predict for a recipe, by the target that they were made with; none further than FURTHEST from the measured."""
    own = [point for point in read(SHIPPED) if point.method == method_name(script, recipe)]
    result = {}
    for target in dict.fromkeys(point.target for point in own):
        points = [point for point in own if point.target == target]
        line = fit([point.tokens for point in points], [point.tau for point in points])
        if line.least / FURTHEST <= tokens <= line.most * FURTHEST:
            result[target] = predict(line, tokens)
    return result
