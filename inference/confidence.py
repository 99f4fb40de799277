"""How likely a draft is to be accepted, judged by the distribution q that it is drawn from, before it is drawn.

At depth k, from 1, the confidence is c_k = σ(a_k · log-odds(max q) + b_k · H(q) + d_k), H(q) the entropy in nats. Training ends with a fit of
the three numbers of each depth on held-out text (`train/engine/confidence.py`): to 1 − ½ ‖p − q‖₁, the probability that rejection accepts
a draw from q, and for greedy decoding to whether p and q have the same best token.

Letters: K draft depth · D draft vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["FEATURES", "Confidence", "features"]

FEATURES = 3  # of q: log-odds of its largest probability, entropy, 1
CERTAIN = -1e-6  # the largest log-probability of q that is not taken for 1


def features(logits: Tensor) -> Tensor:
    """logits [...,D] of q -> [...,3]."""
    log_q = logits.float().log_softmax(-1)
    most = log_q.amax(-1).clamp(max=CERTAIN)
    entropy = -torch.where(log_q > -torch.inf, log_q.exp() * log_q, 0.0).sum(-1)
    return torch.stack((most - torch.log(-torch.expm1(most)), entropy, torch.ones_like(most)), -1)


@dataclass(frozen=True, slots=True)
class Confidence:
    """A drafter's fitted numbers, K rows of (a_k, b_k, d_k) each. Beyond K the last row counts.

    Attributes:
        greedy: for greedy decoding.
        sampled: for rejection.
    """

    greedy: list[list[float]]
    sampled: list[list[float]]

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Self:
        """What `confidence_weights` of a config says. Raises ValueError for anything but lists of three finite numbers for each depth."""
        rows = [raw.get(name) for name in ("greedy", "sampled")]
        sizes = {len(each) if isinstance(each, list) else 0 for each in rows}
        if (
            raw.keys() - {"greedy", "sampled"}
            or len(sizes) > 1
            or not sizes.pop()
            or not all(_numbers(row) for each in rows for row in each or ())
        ):
            raise ValueError(f"got {str(raw)[:60]}; expected `greedy` and `sampled`, three finite numbers for each depth")
        return cls(**raw)

    def chance(self, depth: int, logits: Tensor, greedy: bool) -> Tensor:
        """The confidence [...] in drafts of depth `depth`, from 1, by the logits [...,D] that they come from."""
        rows = self.greedy if greedy else self.sampled
        return (features(logits) @ torch.tensor(rows[min(depth, len(rows)) - 1], device=logits.device)).sigmoid()


def _numbers(row: Any) -> bool:
    return isinstance(row, list) and len(row) == FEATURES and all(type(x) in (int, float) and math.isfinite(x) for x in row)
