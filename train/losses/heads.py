"""What K heads that look further and further ahead are supervised on, and how much each position counts.

Letters: B rows · S positions · M = B·S, flattened · K heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.train.objective import Batch

__all__ = ["head_weights", "shifted"]


def head_weights(batch: Batch, heads: int) -> tuple[Tensor, Tensor]:
    """Where each head predicts a supervised token of the same document, and what that counts.

    Head k, from 0, at position t predicts token t+2+k. Its weight there is n_d, the supervised tokens of document d, over the number of
    those that the head predicts: each head's loss is a mean of its own in each document, times n_d, so that no head counts less for
    predicting fewer. A document is never cut: the loss is the same however packing, micro-batches and ranks share the documents out.

    Args:
        batch: loss_mask and document [B,S].
        heads: K.

    Returns:
        counted [K,M] bool, weights [K,M] float64.
    """
    document, mask = batch["document"], batch["loss_mask"]
    rows, length = document.shape
    counted = torch.stack([shifted(mask, k + 2) & (shifted(document, k + 2) == document.flatten()) for k in range(heads)])
    first = torch.arange(rows, device=document.device)[:, None] * (length + 1)
    number = (document + 1 + first).flatten()  # of padding 0, 1 … of documents; distinct in all rows
    counts = torch.zeros(heads + 1, rows * (length + 1), dtype=torch.float64, device=document.device)
    counts.index_add_(1, number, torch.cat((mask.flatten()[None], counted)).double())
    return counted, counted * (counts[0] / counts[1:].clamp(min=1))[:, number]


def shifted(values: Tensor, count: int) -> Tensor:
    """values [B,S] moved `count` positions to the left with zeros behind, flattened to [M]."""
    return F.pad(values[:, count:], (0, count)).flatten()
