"""How τ rises with training: curves between a start and a ceiling, fitted to measured runs, and what they predict for a recipe.

τ − 1 = B + (A − B) / (1 + (h / n)ᵝ) rises from B, what a drafter has almost without training, to the ceiling A, and is half-way at n = h. No one
curve is chosen: curves are drawn by their probability given the runs. (β, h) come from a grid, and (B, A) and the spread from their
distributions in a Bayesian linear regression of τ − 1 for this (β, h) (Gelman et al. 2013, §14.2). Priors are flat in τ at the shortest and at
the longest run, within 0 ≤ B ≤ A ≤ K. The errors' variance is in proportion to τ − 1, as for a count. A prediction's interval contains 95 % of
the drawn curves with an error added. scaling.json has the runs that ship (train/benchmarks/scaling.py writes such a file).

Letters: n training tokens, m runs, G cells of the grid, D drawn curves, K draft depth.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.eval.intervals import Interval
from draftsmith.train.recipe import Recipe, by_key

SHIPPED = Path(__file__).with_name("scaling.json")
DEPTH = 4  # K of the runs
FURTHEST = 30  # times above the longest or below the shortest run: no prediction there, and no h
EXPONENTS = torch.linspace(0.2, 2.5, 40, dtype=torch.float64)  # β of the grid
MIDDLES = 150  # h of the grid
DRAWS, ENOUGH, ROUNDS = 20_000, 4000, 100  # curves are drawn until so many have possible B and A: with few runs most have not
CLEAR = 0.8  # share of the drawn curves that must say that one method is ahead of another
LEAST_ERROR = 0.02  # of a run, in √(τ − 1): τ of a few prompts is not more exact
LEAST_VARIED = 0.05  # τ − 1 below which the errors' variance falls no further


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
class Curves:
    """Drawn curves.

    Attributes:
        ends: B and A, [D,2].
        exponent: β, [D].
        middle: ln h, [D].
        error: of a further run, in √(τ − 1), [D].
        least, most: n of the shortest and the longest run.
    """

    ends: Tensor
    exponent: Tensor
    middle: Tensor
    error: Tensor
    least: float
    most: float

    def at(self, amount: float) -> Tensor:
        """τ − 1 at n, [D]."""
        return (self.ends * _shares(self.exponent, self.middle, amount)).sum(-1)


def method_name(script: str, recipe: Recipe) -> str:
    """The script's name, with what gives it another curve: `eagle-3`, `medusa-2`, `distill-pruned`. A student that starts from a trained model is
    `distill`."""
    values = by_key(recipe)
    if values.get("joint.rank"):
        return f"{script}-2"
    kind = values.get(f"{script}.version") or values.get("student.start")
    return f"{script}-{kind}" if kind in (1, 3, "pruned", "random") else script


def fit(amounts: Sequence[float], taus: Sequence[float]) -> Curves:
    """Curves through m runs.

    Args:
        amounts: n of each run, or its seconds.
        taus: τ of each.

    Raises:
        ValueError: fewer than three different amounts, or runs that no curve rises through, as where τ falls.
    """
    if len(set(amounts)) < 3:
        raise ValueError(f"curves need runs of three lengths at least; got {len(set(amounts))}")
    least, most, freedom = min(amounts), max(amounts), len(amounts) - 2
    middles = torch.linspace(math.log(least / FURTHEST), math.log(most * FURTHEST), MIDDLES, dtype=torch.float64)
    exponent, middle = (each.flatten() for each in torch.meshgrid(EXPONENTS, middles, indexing="ij"))  # [G]
    rise = torch.tensor(taus, dtype=torch.float64) - 1
    scale = rise.clamp_min(LEAST_VARIED).rsqrt()  # errors of one variance
    shares = torch.stack([_shares(exponent, middle, amount) for amount in amounts], 1) * scale[:, None]  # [G,m,2]
    factor = torch.linalg.cholesky(shares.mT @ shares + 1e-9 * torch.eye(2, dtype=torch.float64))  # [G,2,2]
    ends = torch.cholesky_solve(shares.mT @ (rise * scale)[:, None], factor)  # least squares, [G,2,1]
    squares = (rise * scale - (shares @ ends).squeeze(-1)).square().sum(-1) + len(amounts) * LEAST_ERROR**2
    # The probability of the runs for (β, h), with τ at both ends of them and the spread integrated out: dB dA is d(τ − 1) d(τ − 1) / varied.
    varied = _shares(exponent, middle, most)[:, 1] - _shares(exponent, middle, least)[:, 1]
    logarithm = varied.log() - freedom / 2 * squares.log() - factor.diagonal(dim1=1, dim2=2).log().sum(-1)
    weight, generator = (logarithm - logarithm.max()).exp(), torch.Generator().manual_seed(0)
    drawn: list[list[Tensor]] = []
    while sum(len(each[0]) for each in drawn) < ENOUGH:
        if len(drawn) == ROUNDS:
            first, *_, last = (tau for _, tau in sorted(zip(amounts, taus, strict=True)))
            raise ValueError(
                f"no curve between τ = 1 and {1 + DEPTH} rises through runs from τ {first:.3g} to {last:.3g}; add runs of other lengths"
            )
        cell = torch.multinomial(weight, DRAWS, replacement=True, generator=generator)
        normal = torch.randn(freedom + 3, DRAWS, dtype=torch.float64, generator=generator)
        spread = (squares[cell] / normal[3:].square().sum(0)).sqrt()  # [D]
        away = torch.linalg.solve_triangular(factor[cell].mT, normal[:2].T[..., None], upper=True)  # of covariance (sharesᵀ shares)⁻¹
        of_cell = (ends[cell] + spread[:, None, None] * away).squeeze(-1)
        possible = (0 <= of_cell[:, 0]) & (of_cell[:, 0] <= of_cell[:, 1]) & (of_cell[:, 1] <= DEPTH)
        drawn.append([each[possible] for each in (of_cell, exponent[cell], middle[cell], spread * normal[2])])
    return Curves(*(torch.cat(parts) for parts in zip(*drawn, strict=True)), least, most)


def _shares(exponent: Tensor, middle: Tensor, amount: float) -> Tensor:
    """What B and A each count at n, [...,2]."""
    share = torch.sigmoid(exponent * (math.log(amount) - middle))
    return torch.stack((1 - share, share), -1)


def middle_tau(curves: Curves, amount: float) -> float:
    """The median of the curves' τ at n."""
    return 1 + float(curves.at(amount).median())


def predict(curves: Curves, amount: float) -> Interval:
    """τ of a further run of this length, with its 95 % interval."""
    rise = curves.at(amount)
    return Interval(middle_tau(curves, amount), *_middle_95(rise + curves.error * rise.clamp_min(LEAST_VARIED).sqrt()))


def ceiling(curves: Curves) -> Interval:
    """1 + A, τ of an endless training, with its 95 % interval."""
    return Interval(1 + float(curves.ends[:, 1].median()), *_middle_95(curves.ends[:, 1]))


def _middle_95(rise: Tensor) -> tuple[float, float]:
    """1 + the ends of the middle 95 % of τ − 1 [D], within 0 and K."""
    low, high = torch.quantile(rise.clamp(0, DEPTH), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return 1 + low, 1 + high


def overtaken(first: Curves, second: Curves) -> float | None:
    """From where on `second` is ahead by the medians, which was behind before; None without such a length up to FURTHEST times the shorter of
    the two longest runs, or where at no such length CLEAR of the drawn curves say so."""
    least, most = max(first.least, second.least), FURTHEST * min(first.most, second.most)
    count = min(len(first.middle), len(second.middle))
    amounts = torch.logspace(math.log10(least), math.log10(most), 100).tolist()
    behind = [number for number, amount in enumerate(amounts) if middle_tau(second, amount) <= middle_tau(first, amount)]
    beyond = amounts[behind[-1] + 1 :] if behind else []
    clear = any((second.at(amount)[:count] > first.at(amount)[:count]).double().mean() >= CLEAR for amount in beyond)
    return beyond[0] if clear else None


def read(file: Path) -> list[Point]:
    """The runs of a file."""
    return [Point(**entry) for entry in json.loads(file.read_text("utf-8"))]


def expected(script: str, recipe: Recipe, tokens: int) -> dict[str, Interval]:
    """τ that the shipped runs predict for a recipe, by the target that they were made with; none further than FURTHEST from the measured."""
    own = [point for point in read(SHIPPED) if point.method == method_name(script, recipe)]
    result = {}
    for target in dict.fromkeys(point.target for point in own):
        points = [point for point in own if point.target == target]
        curves = fit([point.tokens for point in points], [point.tau for point in points])
        if curves.least / FURTHEST <= tokens <= curves.most * FURTHEST:
            result[target] = predict(curves, tokens)
    return result
