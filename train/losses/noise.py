"""Uniform noise on the target's features (EAGLE-1, Li et al. 2024, https://arxiv.org/abs/2401.15077, and its authors' code)."""

import torch
from torch import Tensor

from draftsmith.inference.sampler import uniform
from draftsmith.train.objective import Batch

__all__ = ["document_lengths", "feature_noise"]


def feature_noise(batch: Batch, feature: Tensor, width: float, seed: int, positions: slice = slice(None)) -> Tensor:
    """Noise of width `width` · 512 / length of the document, keyed by example and position, for feature [B,n,H] at `positions` of the batch."""
    scale = (width * 512 / document_lengths(batch["document"])[:, positions, None]).to(feature.dtype)
    key, position = (batch[name][:, positions, None].clamp(min=0).expand_as(feature) for name in ("sample_id", "position_ids"))
    number = torch.arange(feature.shape[2], device=feature.device).expand_as(feature)
    return (uniform(seed, key, position, number) - 0.5).to(feature.dtype) * scale


def document_lengths(document: Tensor) -> Tensor:
    """document [B,S], each position's document by number, −1 for padding -> the positions of its document in the sequence, [B,S]."""
    number = document + 1
    counts = torch.zeros(len(number), number.shape[1] + 1, dtype=torch.int64, device=number.device)
    return counts.scatter_add_(1, number, torch.ones_like(number)).gather(1, number)
