"""Fits after training: weights of a drafter's confidence, and DSpark's temperatures (DeepSpec's sequential temperature scaling).

α_i is the probability that draft i is accepted if those before it are; z_i are the log-odds that the drafter gives it. A chain survives to
depth k with the probability Π_{i≤k} α_i, which Π_{i≤k} σ(z_i / T_i) estimates. The temperatures are fitted in the order of the depths: with
T_1 … T_(k−1) fixed, T_k minimises the expected calibration error of the product of the first k.

Letters: n chains · K draft depth.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["fit_confidence", "fit_temperatures", "survival_errors"]

RIDGE = 1e-6  # times the squared weights, so that they stay finite where all drafts are accepted, or none

BINS = 15
CANDIDATES = torch.logspace(-2, 2, 161, base=2, dtype=torch.float64)  # 1/4 to 4


def fit_confidence(features: Tensor, accepted: Tensor, counted: Tensor) -> Tensor:
    """The weights [K,3] of logistic regressions, one for each depth, from the features of q to the probability of acceptance.

    Args:
        features: of `inference/confidence.py`, [n,K,3].
        accepted: [n,K], a probability.
        counted: [n,K] bool. A depth that no chain reaches gets zeros, so that its confidence is 1/2.
    """
    weights = torch.zeros(features.shape[1:], dtype=torch.float64, device=features.device)
    for k, used in enumerate(counted.T.unbind()):
        x, y, w = features[used, k].double(), accepted[used, k].double(), weights[k].requires_grad_()
        if not len(x):
            continue
        optimizer = torch.optim.LBFGS([w], max_iter=100, line_search_fn="strong_wolfe")

        def loss(x: Tensor = x, y: Tensor = y, w: Tensor = w) -> Tensor:
            with torch.enable_grad():
                total = F.binary_cross_entropy_with_logits(x @ w, y) + RIDGE * w.square().sum()
                w.grad = torch.autograd.grad(total, w)[0]
            return total

        optimizer.step(loss)
    return weights.detach()


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
