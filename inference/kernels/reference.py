"""The plain-torch form of the kernels in `commit`: the path without Triton, and what the kernels are tested against."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["commit_reference", "take_reference"]


def commit_reference(buffers: Sequence[Tensor], rows: Tensor, start: Tensor, offsets: Tensor, first: int) -> None:
    """`commit.commit` on contiguous buffers [·,heads,C,dim].

    Each row's gather is complete before its scatter begins: a cache position may be both source and destination.
    """
    step = torch.arange(first, first + offsets.shape[1], device=offsets.device)
    # Where the path has ended a position is copied onto itself.
    source, destination = start[:, None] + torch.where(offsets < 0, step, offsets), start[:, None] + step
    indices: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
    for buffer in buffers:
        _, heads, capacity, dim = buffer.shape
        key = heads, capacity, buffer.device
        if key not in indices:
            head = torch.arange(heads, device=offsets.device)[None, :, None]
            line = (rows[:, None, None] * heads + head) * capacity  # into a buffer seen as [·,dim]
            gather, scatter = ((line + position[:, None, :]).flatten() for position in (source, destination))
            indices[key] = gather.to(buffer.device), scatter.to(buffer.device)
        gather, scatter = indices[key]
        flat = buffer.view(-1, dim)
        flat.index_copy_(0, scatter, flat.index_select(0, gather))


def take_reference(features: Tensor, path: Tensor) -> Tensor:
    """`commit.take`: features [B,N,…], path [B,P] -> [B,P,…], 0 where the path is −1."""
    node = path.view(*path.shape, *(1 for _ in features.shape[2:]))
    taken = features.gather(1, node.clamp(min=0).expand(*path.shape, *features.shape[2:]))
    return taken.masked_fill_(node < 0, 0)
