"""How far a chain of drafts would survive along the text: a measure of training that needs no decoding.

S_k is the probability that the first k drafts of a chain are accepted, and the simulated τ = 1 + Σ_k S_k. Decoding tells the true τ.

Letters: B rows · S positions · K draft steps · M positions (batch and sequence flattened).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.models.training_time_test import shift_left


class Chain(NamedTuple):
    """The chains of a batch.

    Attributes:
        accepted: [K], Σ over anchors of the probability that steps 0 … k are all accepted; int64 where acceptance is bool.
        anchors: scalar int64, the number of chains.
    """

    accepted: Tensor
    anchors: Tensor


def chain(acceptance: Tensor, weights: Tensor) -> Chain:
    """Count how far chains survive. Entry t of every step belongs to the chain that starts at position t.

    Args:
        acceptance: [K,M], bool or a probability: whether a step's draft is accepted. A token out of vocabulary is a miss.
        weights: [K,M]. A position is an anchor where all K steps have weight > 0, so pairs past the last position must have 0.
    """
    anchors = (weights > 0).all(0)
    return Chain((acceptance.cumprod(0) * anchors).sum(1), anchors.sum())


def along_chains(values: Tensor, document: Tensor, depth: int) -> Tensor:
    """values [M] by position, document [B,S] -> [K,M]: entry (k, t) is the value at position t + k, and 0 where the document has ended."""
    values = values.view(document.shape)
    return torch.stack([shift_left(values, k, document).flatten() for k in range(depth)])


def survival_metrics(acceptance: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Simulated τ and survival of a batch, as metrics of a `Loss`: [2], a sum over chains and the number of chains.

    Args:
        acceptance, weights: [K,M], as in `chain`; of this rank's positions under context parallelism.

    Returns:
        `sim_tau` and `survival_1` … `survival_K`.
    """
    accepted, anchors = chain(acceptance, weights)
    metrics = {f"survival_{k}": torch.stack((share, anchors)) for k, share in enumerate(accepted, 1)}
    return {"sim_tau": torch.stack((anchors + accepted.sum(), anchors)), **metrics}
