"""Uniform noise on what a drafter reads, keyed by example and position: on the target's features (EAGLE-1, Li et al. 2024,
https://arxiv.org/abs/2401.15077, and its authors' code), or on the embeddings of tokens (NEFTune, Jain et al. 2023, https://arxiv.org/abs/2310.05914).

Letters: B rows · S positions of a row · n positions of a rank · H hidden size.
"""

import torch
from torch import Tensor

from draftsmith.inference.sampler import uniform
from draftsmith.train.objective import Batch

__all__ = ["document_lengths", "embedding_noise", "feature_noise"]


def feature_noise(batch: Batch, feature: Tensor, width: float, seed: int, positions: slice = slice(None)) -> Tensor:
    """Noise of width `width` · 512 / length of the document, for feature [B,n,H] at `positions` of the batch."""
    return _noise(batch, width * 512 / document_lengths(batch["document"]), feature.shape[2], seed, positions).to(feature.dtype)


def embedding_noise(batch: Batch, size: int, alpha: float, seed: int) -> Tensor:
    """Noise in ± alpha / √(length of the document · H), [B,S,H] in fp32 for the embeddings of the tokens; `size` is H."""
    return _noise(batch, 2 * alpha / (document_lengths(batch["document"]) * size).sqrt(), size, seed)


def _noise(batch: Batch, width: Tensor, size: int, seed: int, positions: slice = slice(None)) -> Tensor:
    """Noise of width [B,S], [B,n,size] in fp32, its mean 0."""
    key, position = (batch[name][:, positions, None].clamp(min=0).expand(-1, -1, size) for name in ("sample_id", "position_ids"))
    number = torch.arange(size, device=key.device).expand_as(key)
    return (uniform(seed, key, position, number) - 0.5) * width[:, positions, None]


def document_lengths(document: Tensor) -> Tensor:
    """document [B,S], each position's document by number, −1 for padding -> the positions of its document in the sequence, [B,S]."""
    number = document + 1
    counts = torch.zeros(len(number), number.shape[1] + 1, dtype=torch.int64, device=number.device)
    return counts.scatter_add_(1, number, torch.ones_like(number)).gather(1, number)
