"""Is one drafter better than another? A sign-flip test of the difference of τ, and prompts that each of them wins. P is the number of prompts."""

import itertools

import torch
from torch import Tensor

from draftsmith.eval.intervals import drawn

EXACT = 14  # prompts on which two drafters differ, up to which all 2^P exchanges are enumerated
ROUNDING = 1e-6  # relative, of sums of float32 probabilities
SAMPLES = 9_999  # exchanges that are drawn where there are more


def sign_flip(tokens: Tensor, rounds: Tensor) -> float:
    """Two-sided p-value of τ_1 − τ_0 under the hypothesis that the drafters are exchangeable on each prompt (Fisher 1935).

    Each prompt's tokens and rounds go to one drafter or to the other; p is the share of these assignments whose difference of τ is at least
    as large as the measured one. It is exact for up to EXACT prompts on which the drafters differ, else drawn with a fixed seed, the measured
    assignment included, so that p is never 0. No number of prompts is too small for it.

    Args:
        tokens: [2,P].
        rounds: [2,P].
    """
    differ = (_differ(tokens) | _differ(rounds)).nonzero().flatten()
    half = torch.stack((tokens[1] - tokens[0], rounds[1] - rounds[0])).double()[:, differ] / 2  # [2,P]
    centre = torch.stack((tokens.sum(), rounds.sum())).double() / 2
    if not len(differ):
        return 1.0
    count = len(differ)
    if count <= EXACT:
        exchanges = [torch.arange(1 << count)[:, None] >> torch.arange(count) & 1]
    else:
        exchanges = itertools.chain([torch.zeros(1, count, dtype=torch.int64)], drawn(2, SAMPLES, count))
    moved = torch.cat([(1 - 2 * block.double()) @ half.T for block in exchanges])  # [·,2]; the first exchange is none
    first, second = centre - moved, centre + moved
    differences = (second[:, 0] / second[:, 1] - first[:, 0] / first[:, 1]).abs()
    return float((differences >= differences[0] * (1 - 1e-9)).double().mean())


def wins(tokens: Tensor, rounds: Tensor) -> tuple[int, int, int]:
    """Prompts on which drafter 1 has the higher τ, on which both have the same, and on which it has the lower one; arguments as above."""
    crossed = torch.stack((tokens[0] * rounds[1], tokens[1] * rounds[0]))
    higher, differ = crossed[1] > crossed[0], _differ(crossed)
    return int((differ & higher).sum()), int((~differ).sum()), int((differ & ~higher).sum())


def _differ(pairs: Tensor) -> Tensor:
    """Whether the two values of pairs [2,P] differ by more than rounding, of which expected rounds have some -> [P]."""
    return (pairs[0] - pairs[1]).abs() > ROUNDING * pairs.abs().amax(0)
