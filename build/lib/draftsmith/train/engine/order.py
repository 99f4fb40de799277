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
    """Rows number `first` … `first + count − 1` of the endless order that (seed, epoch) fix, [count] int64: epoch · length + row."""
    parts = []
    while count:
        epoch, offset = divmod(first, length)
        take = min(count, length - offset)
        parts.append(epoch * length + _order(length, seed, epoch)[offset : offset + take])
        first, count = first + take, count - take
    return torch.cat(parts)


def places_of(rows: Tensor, length: int, seed: int) -> Tensor:
    """Where in that order row numbers [n] stand, [n] int64: the inverse of `sample_rows`."""
    places = torch.empty_like(rows)
    for epoch in rows.div(length, rounding_mode="floor").unique().tolist():
        here = rows // length == epoch
        places[here] = epoch * length + _order(length, seed, epoch).argsort()[rows[here] % length]
    return places


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def prefetched(fetch: Callable[[Tensor], Batch], wanted: Iterable[Tensor]) -> Generator[Batch]:
    """fetch(rows) for each of `wanted`, in order; a thread works two ahead."""
    ahead: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for rows in wanted:
            ahead.append(pool.submit(fetch, rows))
            if len(ahead) > 2:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
