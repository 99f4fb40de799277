"""Uniform noise on the target's features that a drafter reads, keyed by example and position (EAGLE-1, Li et al. 2024,
https://arxiv.org/abs/2401.15077, and its authors' code).

Letters: B rows · S positions of a row · n positions of a rank · H hidden size.
"""

import torch
from torch import Tensor

from draftsmith.inference.sampler import uniform
from draftsmith.train.objective import Batch

__all__ = ["document_lengths", "feature_noise"]


def feature_noise(batch: Batch, feature: Tensor, width: float, seed: int, positions: slice = slice(None)) -> Tensor:
    """Noise of width `width` · 512 / length of the document and mean 0, for feature [B,n,H] at `positions` of the batch."""
    key, position = (batch[name][:, positions, None].clamp(min=0).expand_as(feature) for name in ("sample_id", "position_ids"))
    number = torch.arange(feature.shape[2], device=key.device).expand_as(key)
    widths = width * 512 / document_lengths(batch["document"])[:, positions, None]
    return ((uniform(seed, key, position, number) - 0.5) * widths).to(feature.dtype)


def document_lengths(document: Tensor) -> Tensor:
    """document [B,S], each position's document by number, −1 for padding -> the positions of its document in the sequence, [B,S]."""
    number = document + 1
    counts = torch.zeros(len(number), number.shape[1] + 1, dtype=torch.int64, device=number.device)
    return counts.scatter_add_(1, number, torch.ones_like(number)).gather(1, number)
