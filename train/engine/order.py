"""The order of samples: a function of (seed, epoch) alone, counted in samples, so that a run resumes exactly at any world size."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

Batch = TypeVar("Batch")


def sample_rows(length: int, seed: int, first: int, count: int) -> Tensor:
    """Sequence numbers at positions `first` … `first + count − 1` of the endless sample order.

    Args:
        length: sequences of an epoch.
        seed: of the order; each epoch is a permutation drawn from (seed, epoch).
        first: the first position, counted in samples from 0.
        count: how many.

    Returns:
        [count] int64: epoch · length + sequence.
    """
    parts = []
    while count:
        epoch, offset = divmod(first, length)
        size = min(count, length - offset)
        parts.append(epoch * length + _permutation(length, seed, epoch)[offset : offset + size])
        first, count = first + size, count - size
    return torch.cat(parts)


def drawn_rows(length: int) -> Tensor:
    """All sequence numbers of held-out data in a fixed random order, [length] int64, since packing puts the longest samples first."""
    return _permutation(length, 0, 0)


def order_positions(rows: Tensor, length: int, seed: int) -> Tensor:
    """Positions in that order of sequence numbers [n], [n] int64: the inverse of `sample_rows`."""
    positions = torch.empty_like(rows)
    for epoch in rows.div(length, rounding_mode="floor").unique().tolist():
        in_epoch = rows // length == epoch
        positions[in_epoch] = epoch * length + _permutation(length, seed, epoch).argsort()[rows[in_epoch] % length]
    return positions


@lru_cache(maxsize=4)
def _permutation(length: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def prefetched(fetch: Callable[[Tensor], Batch], rows: Iterable[Tensor]) -> Generator[Batch]:
    """Give fetch(numbers) for each item of `rows`, in order; a thread works two ahead."""
    pending: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for numbers in rows:
            pending.append(pool.submit(fetch, numbers))
            if len(pending) > 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
