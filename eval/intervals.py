"""95 % intervals over prompts, of τ, of speedups and of differences: a symmetric bootstrap-t.

τ is a ratio of sums over prompts, and the rounds of one prompt are correlated, as are the turns of a conversation: prompts are what is drawn,
a conversation as one of them. For each sample the distance to the
estimate is divided by the sample's own standard error (the jackknife's, Tukey 1958), and the 95 % quantile of these distances times the
estimate's standard error is half the interval (Efron and Tibshirani 1993, §12.5). Ratios are taken as logarithms.

`python -m draftsmith.eval.benchmarks.coverage` simulates how often such intervals contain the true value. No method sees a kind of prompt of
which the sample has none: where 3 % of the prompts are far better than the rest, none covers 95 % with 95 prompts.

Letters: P prompts, C columns of sums.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SAMPLES = 2000
MOST_DRAWN = 1 << 19  # prompts of the samples in memory at a time
FEWEST = 8  # prompts for an interval: with fewer, acceptances of two kinds are covered too seldom
LEAST_ERROR = 0.3  # of a sample, in errors of the estimate; with 0.1 the coverage of simulated prompts is the same (benchmarks/coverage.py)
TOO_FEW = "too few prompts"
T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # 97.5 % of Student's t with 1, 2, … degrees of freedom


class Interval(NamedTuple):
    """An estimate and the ends of its interval, None with fewer than FEWEST prompts."""

    estimate: float
    low: float | None
    high: float | None


def conversations(prompts: Iterable[str]) -> dict[str, str]:
    """The conversation of each prompt id, which is that of its first turn: later turns are called `id#2`, `id#3`, … (data/prompts.py)."""
    names = dict.fromkeys(prompts)
    return {name: match[1] if (match := re.fullmatch(r"(.+)#\d+", name)) and match[1] in names else name for name in names}


def of_ratio(tokens: Tensor, rounds: Tensor) -> Interval:
    """Σ tokens / Σ rounds, of [P] each; with seconds for rounds, the tokens per second."""
    return _exp(_interval(torch.stack((tokens, rounds)), lambda sums: (sums[0] / sums[1]).log()))


def of_ratio_of_ratios(tokens: Tensor, seconds: Tensor) -> Interval:
    """(Σ tokens_0 / Σ seconds_0) / (Σ tokens_1 / Σ seconds_1), a speedup, of [2,P] each; paired by prompt."""
    return _exp(_interval(torch.cat((tokens, seconds)), lambda sums: (sums[0] / sums[2]).log() - (sums[1] / sums[3]).log()))


def of_difference(tokens: Tensor, rounds: Tensor) -> Interval:
    """Σ tokens_1 / Σ rounds_1 − Σ tokens_0 / Σ rounds_0, of [2,P] each; paired by prompt, so that what the drafters have in common cancels."""
    return _interval(torch.cat((tokens, rounds)), lambda sums: sums[1] / sums[3] - sums[0] / sums[2])


def of_share(hits: Tensor, count: Tensor) -> Interval:
    """Σ hits / Σ count, of [P] each, on its own scale, and within 0 and 1.

    Where no prompt has a hit, or all are hits, samples do not differ. The bound is then by probability, for prompts of equal count: under a true
    share μ no prompt has a hit with probability (1 − μ)^P at most, since the share of a prompt is not above 1.
    """
    interval = _interval(torch.stack((hits, count)), lambda sums: sums[0] / sums[1])
    if interval.low is not None and interval.estimate in (0.0, 1.0):
        most = 1 - 0.05 ** (1 / len(hits))
        return Interval(0.0, 0.0, most) if interval.estimate == 0 else Interval(1.0, 1 - most, 1.0)
    return Interval(*(None if value is None else min(1.0, max(0.0, value)) for value in interval))  # pyright: ignore[reportArgumentType]


def shown(low: float | None, high: float | None, form: str = ".2f") -> str:
    """The interval for people."""
    return TOO_FEW if low is None or high is None else f"{low:{form}} – {high:{form}}"


def prompts_for(interval: Interval, prompts: int, share: float = 0.03) -> int | None:
    """How many prompts of the same kinds an interval of ± `share` of the estimate takes; None where there are too few to say."""
    if interval.low is None or interval.high is None:
        return None
    half = (interval.high - interval.low) / 2 / abs(interval.estimate)
    return max(FEWEST, math.ceil(prompts * (half / share) ** 2))


def t_quantile(freedom: int) -> float:
    """97.5 % of Student's t with so many degrees of freedom; to 0.03 beyond the table, where it is nearly 1.96 + 2.4 / freedom."""
    return T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.4 / freedom


def _interval(columns: Tensor, statistic: Callable[[Tensor], Tensor]) -> Interval:
    """The interval of a statistic [...] of sums over prompts [C,...]; columns [C,P]."""
    columns = columns.double()
    # Prompts are drawn by number: in an order of their own, the interval does not depend on that of the file.
    columns = columns[:, sorted(range(columns.shape[1]), key=columns.T.tolist().__getitem__)]
    estimate, count = statistic(columns.sum(-1)), columns.shape[1]
    if count < FEWEST:
        return Interval(float(estimate), None, None)
    error = _standard_error(columns, statistic)
    if not error.isfinite():  # one prompt has all rounds: without it the statistic divides by 0
        return Interval(float(estimate), None, None)
    parts = []
    for block in drawn(count, SAMPLES, count):
        samples = columns[:, block]  # [C,n,P]
        parts.append(torch.stack((statistic(samples.sum(-1)), _standard_error(samples, statistic))))
    values, errors = torch.cat(parts, -1)
    # A sample of equal prompts has no error of its own, and one of nearly equal prompts next to none: distances would have no bound.
    distances = ((values - estimate).abs() / errors.clamp(min=LEAST_ERROR * error))[errors > 1e-6 * error]
    half = float(torch.quantile(distances, 0.95) * error) if len(distances) else 0.0
    return Interval(float(estimate), float(estimate) - half, float(estimate) + half)


def drawn(high: int, samples: int, count: int) -> Iterator[Tensor]:
    """Integers below `high` with a fixed seed, [samples,count] in blocks of rows, of which one is in memory at a time."""
    generator, rows = torch.Generator().manual_seed(0), max(1, MOST_DRAWN // count)
    for start in range(0, samples, rows):
        yield torch.randint(high, (min(rows, samples - start), count), generator=generator)


def _standard_error(columns: Tensor, statistic: Callable[[Tensor], Tensor]) -> Tensor:
    """The jackknife's standard error [...] of a statistic of sums over P; columns [C,...,P]."""
    count = columns.shape[-1]
    without = statistic(columns.sum(-1, keepdim=True) - columns)  # [...,P]
    return ((count - 1) * without.var(-1, correction=0)).sqrt()


def _exp(interval: Interval) -> Interval:
    return Interval(*(None if value is None else math.exp(value) for value in interval))  # pyright: ignore[reportArgumentType]
