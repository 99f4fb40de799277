"""A drafter's KV cache that keeps attention sinks and a window, as StreamingLLM does (Xiao et al. 2024, https://arxiv.org/abs/2309.17453).

A query at position p sees the first SINKS positions and the positions after p − window, itself included. Drafting then takes the same time and
memory after any text. Decoding stays lossless, since the target verifies every draft with its complete cache.

Keys keep the RoPE of their true positions. RoPE depends on distances alone, so that within the window this equals StreamingLLM's positions in
the cache; only the sinks are farther away than there. In return nothing is rotated again, and a key is the same whenever it was written.

Letters: B rows · P kept positions of a prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.inference.cache import SavedRow, TreeCache, index_tensor
from draftsmith.inference.tree_limits import LIMITS

__all__ = ["SINKS", "WindowCache", "drafter_cache", "fits", "kept_positions", "left_out"]

SINKS = 4  # StreamingLLM's number of initial tokens
SPARE = 256  # positions that are written between two evictions
DEEPEST = LIMITS["depth"][1]  # a look-up beside the drafter may be accepted deeper than the drafter drafts


class WindowCache(TreeCache):
    """TreeCache of SINKS + window + SPARE positions a row, and those of a round.

    Positions are stored in their order. A row that exceeds `limit` evicts what is between its sinks and its last `window` positions; until
    then a mask hides it (`TreeAttention`). So what a query sees does not depend on when rows are evicted. The host's bounds must be exact.

    Attributes:
        window, sinks: which positions a query sees.
        limit: committed positions of a row at most.
        dropped: int64 [rows], positions of each row that were evicted or skipped: they are before all stored ones but the sinks.
        selected_dropped: int64 [B], the same of the selected rows.
    """

    def __init__(self, rows: int, limit: int, scratch: int, window: int, device: torch.device | str = "cpu") -> None:
        self.dropped = torch.zeros(rows, dtype=torch.int64, device=device)
        self._dropped = [0] * rows  # the same on the host
        super().__init__(rows, limit + scratch, device)
        self.limit, self.window, self.sinks = limit, window, SINKS

    def _lengths_changed(self) -> None:
        super()._lengths_changed()
        self.selected_dropped = self.dropped.index_select(0, self.index)

    def advance(self, counts: Sequence[int]) -> None:
        super().advance(counts)
        self._evict()

    def keep(
        self, offsets: Tensor, count: Tensor, host_counts: Sequence[int] | None = None, in_place: bool = False, first: int = 0
    ) -> None:
        assert host_counts is not None, "eviction needs exact bounds"
        super().keep(offsets, count, host_counts, in_place, first)
        self._evict()

    def skip(self, counts: Sequence[int]) -> None:
        """The next counts[b] positions of each selected row, after its sinks, are not stored."""
        self.dropped.index_add_(0, self.index, index_tensor(counts, self.dropped.device))
        for row, count in zip(self.selected, counts, strict=True):
            self._dropped[row] += count
        self._lengths_changed()

    def reaches(self, row: int, length: int) -> bool:
        """Whether the row, cut to its text's first `length` positions, has all that the next position sees."""
        assert self.window is not None
        return not self._dropped[row] or length + 1 - self.window >= self._dropped[row] + self.sinks

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().cut(rows, [length - self._dropped[row] for row, length in zip(rows, lengths, strict=True)])

    def save(self, row: int) -> SavedRow:
        return replace(super().save(row), dropped=self._dropped[row])

    def restore(self, row: int, saved: SavedRow) -> None:
        super().restore(row, saved)
        self.dropped[row] = self._dropped[row] = saved.dropped
        self._lengths_changed()

    def reset(self, rows: Sequence[int] | None = None) -> None:
        forgotten = list(range(self.rows) if rows is None else rows)
        self.dropped.index_fill_(0, index_tensor(forgotten, self.dropped.device), 0)
        for row in forgotten:
            self._dropped[row] = 0
        super().reset(forgotten)

    def _evict(self) -> None:
        """Shorten the selected rows that exceed the limit to their sinks and their last `window` positions."""
        assert self.window is not None
        last = self.sinks + self.window
        rows = [row for row in self.selected if self._bounds[row] > max(self.limit, last)]
        if not rows:
            return
        for row in rows:
            end = self._bounds[row]
            for store in self._stores.values():
                for buffer in (store.keys, store.values):
                    buffer[row, :, self.sinks : last] = buffer[row, :, end - self.window : end].clone()
            self._bounds[row] = last
            self.length[row] = last
            self.dropped[row] += end - last
            self._dropped[row] += end - last
        self._lengths_changed()


def drafter_cache(rows: int, context: int, scratch: int, window: int | None, device: torch.device) -> TreeCache:
    """A cache for texts of `context` positions and `scratch` more of a round: all of them, or with a window as many as that needs."""
    if window is None:
        return TreeCache(rows, context + scratch, device)
    return WindowCache(rows, _limit(context, window), scratch + DEEPEST, window, device)


def fits(cache: TreeCache, context: int, scratch: int, window: int | None) -> bool:
    """Whether a cache of `drafter_cache` serves these sizes too."""
    if window is None or not isinstance(cache, WindowCache):
        return cache.window == window and cache.capacity >= context + scratch
    return cache.window == window and cache.limit >= _limit(context, window) and cache.capacity - cache.limit >= scratch + DEEPEST


def _limit(context: int, window: int) -> int:
    return min(context, SINKS + window + SPARE)


def left_out(cache: TreeCache, sizes: Sequence[int]) -> list[int]:
    """How many positions of prompts of these sizes need not be encoded, those between the sinks and the window; 0 without a window."""
    return [0 if cache.window is None else max(0, size - cache.sinks - cache.window) for size in sizes]


def kept_positions(sizes: Sequence[int], skipped: Sequence[int]) -> Tensor:
    """Prompts of these sizes without the `skipped` positions after their sinks -> the remaining positions [B,P], −1 behind."""
    index = torch.arange(max(size - count for size, count in zip(sizes, skipped, strict=True)))
    size, count = torch.tensor(sizes)[:, None], torch.tensor(skipped)[:, None]
    position = torch.where(index < SINKS, index, index + count)
    return torch.where(position < size, position, -1)
