"""Temperatures for confidences, so that they multiply to the chance that a chain survives (DeepSpec's sequential temperature scaling).

A chain drafted k deep survives with the probability Π_{i≤k} α_i, which Π_{i≤k} σ(z_i) estimates. One temperature for each depth is fitted,
in order: T_k makes the error of the first k multiplied least, given T_1 … T_(k−1).

Letters: n chains · K draft depth.
"""

import torch
from torch import Tensor

__all__ = ["fit_temperatures", "survival_errors"]

BINS = 15
CANDIDATES = torch.logspace(-2, 2, 161, base=2, dtype=torch.float64)  # 1/4 to 4


def fit_temperatures(odds: Tensor, accepted: Tensor, counted: Tensor) -> list[float]:
    """T_1 … T_K.

    Args:
        odds: log-odds z [n,K].
        accepted: α [n,K].
        counted: [n,K] bool, true up to some depth of each chain. A depth that no chain reaches keeps 1.
    """
    predicted, actual = torch.ones(2, len(odds), dtype=torch.float64, device=odds.device)
    chosen: list[float] = []
    for z, alpha, used in zip(odds.double().T, accepted.double().T, counted.T, strict=True):
        actual = actual * alpha
        errors = [_error(predicted[used] * (z[used] / float(t)).sigmoid(), actual[used]) for t in CANDIDATES]
        best = min(range(len(errors)), key=lambda i: (errors[i], abs(float(CANDIDATES[i].log())))) if bool(used.any()) else None
        chosen.append(1.0 if best is None else float(CANDIDATES[best]))
        predicted = predicted * (z / chosen[-1]).sigmoid()
    return chosen


def survival_errors(odds: Tensor, accepted: Tensor, counted: Tensor, temperatures: list[float]) -> list[float]:
    """The expected calibration error of the survival at each depth [K], from 15 bins of equal width: Σ_bin share · |mean predicted − mean actual|.

    Args:
        odds, accepted, counted: as `fit_temperatures`.
        temperatures: T_1 … T_K.
    """
    scaled = odds.double() / torch.tensor(temperatures, dtype=torch.float64, device=odds.device)
    predicted, actual = scaled.sigmoid().cumprod(1), accepted.double().cumprod(1)
    return [_error(predicted[used, k], actual[used, k]) for k, used in enumerate(counted.T.unbind())]


def _error(predicted: Tensor, actual: Tensor) -> float:
    if not len(predicted):
        return 0.0
    bins = (predicted * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64, device=bins.device).index_add(0, bins, predicted - actual)
    return float(gaps.abs().sum() / len(predicted))
