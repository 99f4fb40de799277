"""The target's KV cache: preallocated, ragged, and able to keep the accepted nodes of a tree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.inference.kernels import active
from draftsmith.inference.kernels.reference import commit_reference

if TYPE_CHECKING:
    from draftsmith.inference.verify import Verdict

__all__ = ["SavedRow", "TreeCache", "index_tensor"]

# A CPU's buffers from LARGE bytes on are parts of blocks of BLOCK bytes. glibc returns what has 32 MB and more to the system; smaller buffers stay
# on the heap, where those of a cache with another capacity do not fit: after 17 minutes of caches of several sizes the heap had 3.2 GB.
LARGE, BLOCK = 1 << 20, 64 << 20


def index_tensor(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 on the device, copied there without waiting for the work in progress."""
    return torch.tensor(list(numbers), dtype=torch.int64).to(device, non_blocking=True)


@dataclass(slots=True)
class _Store:
    """One layer: keys [rows,heads,C,dim] and values [rows,heads,C,dim'], zeroed because a masked position must not hold NaN."""

    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class SavedRow:
    """A row in host memory: its length, keys and values [heads,length,dim] by layer, and what a window has dropped of it."""

    length: int
    layers: dict[int, tuple[Tensor, ...]]
    dropped: int = 0


class TreeCache(Cache):
    """K/V per layer [rows,heads,C,dim], allocated at a layer's first update, on that layer's device.

    Positions from a row's length on are scratch. A forward covers the B rows of the last `select` (at first all rows), and writes query j of
    a row at position length + j. A draft model writes its tree level by level: `drafted` positions after each length hold earlier levels.

    The host keeps an upper bound of each row's length, so that attention reads only the first max_length + N positions. The bounds are exact
    as long as the host is given the counts of every commit.

    Attributes:
        length: int64 [rows], the committed positions of each row.
        capacity: C.
        selected: the selected rows; `index` [B] holds them on the device.
        selected_length: int64 [B], the lengths of the selected rows.
        max_length: the host's upper bound of selected_length.
        equal_lengths: whether the host knows that all selected rows are max_length long.
        drafted: positions after each length that hold earlier levels of a draft.
        static_shape: no shape may follow from the host's bounds: the round is, or will be, part of a CUDA graph.
        full_buffers: `update` returns complete buffers; set for each forward by its attention.
        window, sinks, selected_dropped: of a `WindowCache` (`inference/draft_window.py`); None, 0 and None elsewhere.
    """

    window: int | None = None
    sinks = 0
    selected_dropped: Tensor | None = None

    def __init__(self, rows: int, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stores: dict[int, _Store] = {}
        self._block: Tensor | None = None  # what is left of the last block
        self._table: tuple[int, Any] = (0, ())  # for the kernel: a number of layers, and the addresses of their buffers
        self._bounds = [0] * rows
        self._exact = [True] * rows  # whether the bound is the length
        self._all_rows = torch.arange(rows, device=device)
        self.selected: list[int] = []
        self.static_shape = False
        self.full_buffers = False
        self.select(range(rows))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one row, over the layers that are allocated."""
        buffers = (buffer for store in self._stores.values() for buffer in (store.keys, store.values))
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.itemsize for buffer in buffers)

    def __bool__(self) -> bool:
        return True  # len() counts transformers' own layers, of which there are none

    def select(self, rows: Sequence[int]) -> None:
        """The next forwards cover these rows, in this order."""
        if list(rows) == self.selected:
            self._lengths_changed()
            return
        self.selected = list(rows)
        first, count = self.selected[0], len(self.selected)
        self._range = (first, count) if self.selected == list(range(first, first + count)) else None
        self._leading = self._range == (0, count)
        # The index of the first rows is a view: it stays where it is, and a graph may read it there.
        self.index = self._all_rows[:count] if self._leading else index_tensor(self.selected, self.length.device)
        self._lengths_changed()

    def _lengths_changed(self) -> None:
        self.selected_length = self.length[: len(self.selected)] if self._leading else self.length.index_select(0, self.index)
        bounds = [self._bounds[row] for row in self.selected]
        self.max_length = max(bounds)
        self.equal_lengths = min(bounds) == self.max_length and all(self._exact[row] for row in self.selected)
        self.drafted = 0
        self._positions: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest selected row; rows are ragged, so models must be given position_ids."""
        return self.max_length

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        raise ValueError("a mask was asked of TreeCache; it works with tree attention only; run inside `with tree_attention(model)`")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the queries' K/V of one layer.

        Args:
            key_states: [B,heads,N,dim].
            value_states: [B,heads,N,dim'].
            layer_idx: the layer.

        Returns:
            Keys and values of the selected rows' first max_length + drafted + N positions, or the complete buffers if `full_buffers`.

        Raises:
            ValueError: the context is full, or the batch is not the selected rows.
        """
        count, nodes = key_states.shape[0], key_states.shape[2]
        if count != len(self.selected):
            raise ValueError(f"got a batch of {count} rows; expected the {len(self.selected)} selected ones; call select first")
        start = self.max_length + self.drafted
        if not self.static_shape and start + nodes > self.capacity:
            raise ValueError(
                f"the context is full: got {nodes} tokens after {start} cached ones, expected at most {self.capacity} positions; "
                "give a larger context"
            )
        store = self._stores.get(layer_idx)
        if store is None:
            store = self._stores[layer_idx] = _Store(self._allocate(key_states), self._allocate(value_states))
        self._write(store.keys, key_states)
        self._write(store.values, value_states)
        if self.full_buffers:
            return store.keys, store.values
        return self._read(store.keys, nodes), self._read(store.values, nodes)

    def _allocate(self, states: Tensor) -> Tensor:
        shape = self.rows, states.shape[1], self.capacity, states.shape[3]
        size = math.prod(shape)
        if states.device.type != "cpu" or size * states.itemsize < LARGE:
            return states.new_zeros(shape)
        if self._block is None or self._block.dtype != states.dtype or len(self._block) < size:
            self._block = states.new_zeros(max(size, BLOCK // states.itemsize))
        buffer, self._block = self._block[:size].view(shape), self._block[-(-size // 64) * 64 :]
        return buffer

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        heads, nodes = states.shape[1:3]
        if self.equal_lengths and self._range is not None and not self.static_shape:
            (first, count), start = self._range, self.max_length + self.drafted
            buffer[first : first + count, :, start : start + nodes] = states
            return
        key = (nodes, heads, self.drafted, states.device)
        if key not in self._positions:
            offsets = torch.arange(self.drafted, self.drafted + nodes, device=self.length.device)
            head = torch.arange(heads, device=self.length.device)[None, :, None]
            line = (self.index[:, None, None] * heads + head) * self.capacity  # into a buffer seen as [rows·heads·C,dim]
            self._positions[key] = (line + (self.selected_length[:, None] + offsets)[:, None, :]).flatten().to(states.device)
        buffer.view(-1, buffer.shape[3]).index_copy_(0, self._positions[key], states.reshape(-1, states.shape[3]))

    def _read(self, buffer: Tensor, nodes: int) -> Tensor:
        end = self.max_length + self.drafted + nodes
        if self._range is not None:
            first, count = self._range
            return buffer[first : first + count, :, :end]
        return buffer[:, :, :end].index_select(0, self.index.to(buffer.device))

    def advance(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] positions just written for each selected row: a chunk of a prompt."""
        self.length.index_add_(0, self.index, index_tensor(counts, self.length.device))
        for row, count in zip(self.selected, counts, strict=True):
            self._bounds[row] += count
        self._lengths_changed()

    def crop(self, lengths: Sequence[int]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Forget the positions of each selected row from lengths[b] on. The host knows all lengths, and none increases."""
        earlier = [self._bounds[row] for row in self.selected]
        assert all(self._exact[row] for row in self.selected) and all(new <= old for new, old in zip(lengths, earlier, strict=True))
        self.advance([new - old for new, old in zip(lengths, earlier, strict=True)])

    def draft(self, count: int) -> None:
        """Leave the `count` positions just written where they are, so that the next forward writes after them, until a length changes."""
        self.drafted += count

    def commit(self, verdict: "Verdict", host_counts: Sequence[int] | None = None, in_place: bool = False) -> None:
        """Keep the accepted path: its K/V move to the first positions after each row's length, which increases by verdict.length.

        Args:
            verdict: of the selected rows.
            host_counts: verdict.length if the host knows it; the length bounds stay exact then. Otherwise they increase by the path's width.
            in_place: the host knows that every path is 0, 1, 2, …, so that nothing has to move.
        """
        # Node 0 stays where it is.
        self.keep(verdict.path[:, 1:], verdict.length, host_counts, in_place or verdict.path.shape[1] == 1, first=1)

    def keep(
        self, offsets: Tensor, count: Tensor, host_counts: Sequence[int] | None = None, in_place: bool = False, first: int = 0
    ) -> None:
        """Move position length + offsets[b,j] of each selected row to position length + first + j, and increase the length by count[b].

        Args:
            offsets: int64 [B,P], offsets[b,j] ≥ first + j, or −1, which moves nothing.
            count: int64 [B].
            host_counts: `count` if the host knows it.
            in_place: the host knows that nothing has to move.
            first: the positions after each length that stay where they are.
        """
        if not in_place:
            self._move(offsets, first)
        if self._leading:
            self.length[: len(count)] += count
        else:
            self.length.index_add_(0, self.index, count)
        for i, row in enumerate(self.selected):
            self._bounds[row] += first + offsets.shape[1] if host_counts is None else host_counts[i]
            self._exact[row] = self._exact[row] and host_counts is not None
        self._lengths_changed()

    def _move(self, offsets: Tensor, first: int) -> None:
        buffers = [buffer for store in self._stores.values() for buffer in (store.keys, store.values)]
        if not active():
            commit_reference(buffers, self.index, self.selected_length, offsets, first)
            return
        from draftsmith.inference.kernels.commit import commit, table

        if self._table[0] != len(self._stores):  # layers were allocated since
            self._table = len(self._stores), table(buffers)
        commit(self._table[1], self.index, self.selected_length.contiguous(), offsets, first)

    def length_bounds(self) -> list[int]:
        """The host's upper bounds of all rows' lengths."""
        return list(self._bounds)

    def set_length_bounds(self, bounds: Sequence[int], exact: Sequence[int] = ()) -> None:
        """Set the upper bounds of all rows' lengths, as `length_bounds` returned them; those of the rows `exact` are their lengths."""
        self._bounds = list(bounds)
        for row in exact:
            self._exact[row] = True

    def cut(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep only the first lengths[i] positions of rows[i]."""
        self.length.index_copy_(0, index_tensor(rows, self.length.device), index_tensor(lengths, self.length.device))
        for row, length in zip(rows, lengths, strict=True):
            self._bounds[row], self._exact[row] = length, True
        self._lengths_changed()

    def save(self, row: int) -> SavedRow:
        """A copy of a row in host memory."""
        assert self._exact[row]
        end = self._bounds[row]
        layers = {
            layer: tuple(buffer[row, :, :end].to("cpu", copy=True) for buffer in (store.keys, store.values))
            for layer, store in self._stores.items()
        }
        return SavedRow(end, layers)

    def restore(self, row: int, saved: SavedRow) -> None:
        """Make a row, of this cache, what it was when it was saved."""
        for layer, (keys, values) in saved.layers.items():
            self._stores[layer].keys[row, :, : saved.length].copy_(keys)
            self._stores[layer].values[row, :, : saved.length].copy_(values)
        self.reset([row])
        self.cut([row], [saved.length])

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Forget these rows (all by default): their length is 0."""
        forgotten = list(range(self.rows) if rows is None else rows)
        self.length.index_fill_(0, index_tensor(forgotten, self.length.device), 0)
        for row in forgotten:
            self._bounds[row], self._exact[row] = 0, True
        self._lengths_changed()
