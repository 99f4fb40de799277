"""How likely a draft is to be accepted, judged by the distribution q that it is drawn from, before it is drawn.

At depth k, from 1, the confidence is c_k = σ(a_k · log-odds(max q) + b_k · H(q) + d_k), H(q) the entropy in nats. Training ends with a fit of
the three numbers of each depth on held-out text at temperature 1 (`train/engine/confidence.py`), to the probability that a draft is accepted.
That depends on how drafts are chosen and verified:

| | a draft is | accepted with probability |
|---|---|---|
| greedy | the best token of q | 1 where it is p's best token too, else 0 |
| top | the best token of q | p of it |
| shared-noise | q's best token under the noise that p's token is drawn with | 1 where both are one token, else 0 |
| drawn | a draw from q | 1 − ½ ‖p − q‖₁, for rejection |

Letters: K draft depth · D draft vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["CHILDREN", "FEATURES", "Confidence", "features"]

CHILDREN = ("greedy", "top", "shared-noise", "drawn")
FEATURES = 3  # of q: log-odds of its largest probability, entropy, 1
CERTAIN = -1e-6  # the largest log-probability of q that is not taken for 1


def features(logits: Tensor) -> Tensor:
    """logits [...,D] of q -> [...,3]."""
    log_q = logits.float().log_softmax(-1)
    most = log_q.amax(-1).clamp(max=CERTAIN)
    return torch.stack((most - torch.log(-torch.expm1(most)), entropy(log_q), torch.ones_like(most)), -1)


def entropy(log_q: Tensor) -> Tensor:
    """log q [...,D] -> [...], in nats; a token of probability 0 adds nothing."""
    return -torch.where(log_q > -torch.inf, log_q.exp() * log_q, 0.0).sum(-1)


@dataclass(frozen=True, slots=True)
class Confidence:
    """A drafter's fitted numbers.

    Attributes:
        rows: for each of CHILDREN, K rows (a_k, b_k, d_k). Beyond K the last row counts.
    """

    rows: dict[str, list[list[float]]]

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Self:
        """What `confidence_weights` of a config says. Raises ValueError for anything but lists of three finite numbers for each depth."""
        sizes = {len(rows) if isinstance(rows, list) else 0 for rows in raw.values()}
        if (
            raw.keys() != set(CHILDREN)
            or len(sizes) > 1
            or not sizes.pop()
            or not all(_numbers(row) for rows in raw.values() for row in rows)
        ):
            raise ValueError(f"got {str(raw)[:60]}; expected {', '.join(CHILDREN)}, each with three finite numbers for each depth")
        return cls(raw)

    def chance(self, depth: int, logits: Tensor, children: str) -> Tensor:
        """The confidence [...] in drafts of depth `depth`, from 1, by the logits [...,D] that they come from; `children` is one of CHILDREN."""
        rows = self.rows[children]
        return (features(logits) @ torch.tensor(rows[min(depth, len(rows)) - 1], device=logits.device)).sigmoid()


def _numbers(row: Any) -> bool:
    return isinstance(row, list) and len(row) == FEATURES and all(type(x) in (int, float) and math.isfinite(x) for x in row)
