"""The target's KV cache: preallocated, ragged, and able to keep the accepted nodes of a tree.

Letters: B rows selected for a forward · N queries · C context slots · P = K+1 path entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.inference.kernels import active

if TYPE_CHECKING:
    from draftsmith.inference.verify import Verdict

__all__ = ["TreeCache", "index_tensor"]


def index_tensor(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64, on the device without waiting for what is under way there."""
    return torch.tensor(list(numbers), dtype=torch.int64).to(device, non_blocking=True)


@dataclass(slots=True)
class _Store:
    """One layer: keys [rows,heads,C,dim] and values [rows,heads,C,dim'], zeroed because a masked slot must not hold NaN."""

    keys: Tensor
    values: Tensor


class TreeCache(Cache):
    """K/V per layer [rows,heads,C,dim], allocated at a layer's first update, on that layer's device.

    length [rows] int64 counts the committed slots of each row; slots past it are scratch. The host keeps an upper bound per
    row, so that attention reads `reach` + N slots and nothing more. A forward covers the rows of the last `select`, all of
    them at the start, and writes query j of a row at slot length + j.

    The bound is exact as long as every commit and advance is told the counts; `exact` says that and that the selected rows
    are equally long. A draft model writes its tree level by level: `drafted` slots after each row's length hold earlier levels.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stores: dict[int, _Store] = {}
        self._table: tuple[int, Any] = (0, ())  # for the kernel: the buffers' addresses, and of how many layers
        self._bound = [0] * rows
        self._known = [True] * rows
        self._every = torch.arange(rows, device=device)
        self.selected: list[int] = []
        self.static_shape = False  # lengths are the device's knowledge alone: nothing may follow the host's bounds
        self.full_buffers = False  # the next forward reads whole buffers: set by what attends
        self.select(range(rows))

    def __bool__(self) -> bool:
        return True  # len() counts transformers' own layers, of which there are none

    def select(self, rows: Sequence[int]) -> None:
        """The next forwards cover these rows, in this order."""
        if list(rows) == self.selected:
            self._changed()
            return
        self.selected = list(rows)
        first, count = self.selected[0], len(self.selected)
        self._range = (first, count) if self.selected == list(range(first, first + count)) else None
        self._leading = self._range == (0, count)
        # That of the first rows stays where it is: a graph may hold it.
        self.index = self._every[:count] if self._leading else index_tensor(self.selected, self.length.device)
        self._changed()

    def _changed(self) -> None:
        self.selected_length = self.length[: len(self.selected)] if self._leading else self.length.index_select(0, self.index)  # [B]
        bounds = [self._bound[row] for row in self.selected]
        self.max_length = max(bounds)
        self.equal_lengths = min(bounds) == self.max_length and all(self._known[row] for row in self.selected)
        self.drafted = 0
        self._slots: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest selected row; rows are ragged, so models must be given position_ids."""
        return self.max_length

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        raise ValueError("a mask was asked of TreeCache; it works with tree attention only; run inside `with tree_attention(model)`")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys [B,heads,N,dim] and values [B,heads,N,dim'], return views of the first reach + drafted + N slots; of all
        rows and slots, where `whole`.

        Raises:
            ValueError: the context is full, or the batch is not the selected rows.
        """
        count, nodes = key_states.shape[0], key_states.shape[2]
        if count != len(self.selected):
            raise ValueError(f"got a batch of {count} rows; expected the {len(self.selected)} selected ones; call select first")
        if not self.static_shape and self.max_length + self.drafted + nodes > self.capacity:
            raise ValueError(
                f"the context is full: got {nodes} tokens after {self.max_length + self.drafted} cached ones, expected at most {self.capacity} slots; "
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
        return states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        nodes = states.shape[2]
        if self.equal_lengths and self._range is not None and not self.static_shape:
            (first, count), start = self._range, self.max_length + self.drafted
            buffer[first : first + count, :, start : start + nodes] = states
            return
        heads = states.shape[1]
        key = (nodes, heads, self.drafted, states.device)
        if key not in self._slots:
            offsets = torch.arange(self.drafted, self.drafted + nodes, device=self.length.device)
            self._slots[key] = self._flat(self.selected_length[:, None] + offsets, heads).to(states.device)
        buffer.view(-1, buffer.shape[3]).index_copy_(0, self._slots[key], states.reshape(-1, states.shape[3]))

    def _flat(self, slots: Tensor, heads: int) -> Tensor:
        """Slots [B,N] of the selected rows -> indices [B·heads·N] into a buffer seen as [rows·heads·C,dim]."""
        head = torch.arange(heads, device=slots.device)[None, :, None]
        return ((self.index[:, None, None] * heads + head) * self.capacity + slots[:, None, :]).flatten()

    def _read(self, buffer: Tensor, nodes: int) -> Tensor:
        end = self.max_length + self.drafted + nodes
        if self._range is not None:
            first, count = self._range
            return buffer[first : first + count, :, :end]
        return buffer[:, :, :end].index_select(0, self.index.to(buffer.device))

    def advance(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] of the slots just written for each selected row: a chunk of a prompt."""
        self.length.index_add_(0, self.index, index_tensor(counts, self.length.device))
        for row, count in zip(self.selected, counts, strict=True):
            self._bound[row] += count
        self._changed()

    def draft(self, count: int) -> None:
        """Leave the slots just written where they are; the next forward writes after them. Until the rows' lengths change."""
        self.drafted += count

    def commit(self, verdict: "Verdict", kept: Sequence[int] | None = None, in_place: bool = False) -> None:
        """Keep the accepted path: its K/V move to the first slots after each row's length, which grows by verdict.length.

        kept: verdict.length where the host knows it, which keeps the bound exact; else the bound grows by P.
        in_place: the host knows that every path is 0, 1, 2, …, so that nothing has to move.
        """
        # The root stays where it is.
        self.keep(verdict.path[:, 1:], verdict.length, kept, in_place or verdict.path.shape[1] == 1, first=1)

    def keep(self, slots: Tensor, count: Tensor, kept: Sequence[int] | None = None, in_place: bool = False, first: int = 0) -> None:
        """Slot slots[b,j] after a row's length moves to slot first + j, −1 stays; the length grows by count [B]. slots[b,j] ≥ first + j."""
        if not in_place:
            self._move(slots, first)
        if self._leading:
            self.length[: len(count)] += count
        else:
            self.length.index_add_(0, self.index, count)
        for place, row in enumerate(self.selected):
            self._bound[row] += first + slots.shape[1] if kept is None else kept[place]
            self._known[row] = self._known[row] and kept is not None
        self._changed()

    def _move(self, slots: Tensor, first: int) -> None:
        if active():
            self._move_fused(slots, first)
            return
        step = torch.arange(first, first + slots.shape[1], device=slots.device)
        # Where the path has ended a slot is copied onto itself.
        source = self.selected_length[:, None] + torch.where(slots < 0, step, slots)
        target = self.selected_length[:, None] + step
        indices: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        for store in self._stores.values():
            for buffer in (store.keys, store.values):
                key = (buffer.shape[1], buffer.device)
                if key not in indices:
                    indices[key] = (self._flat(source, key[0]).to(buffer.device), self._flat(target, key[0]).to(buffer.device))
                gather, scatter = indices[key]
                flat = buffer.view(-1, buffer.shape[3])
                # The gather is whole before the scatter begins: a slot may be both source and target.
                flat.index_copy_(0, scatter, flat.index_select(0, gather))

    def _move_fused(self, slots: Tensor, first: int) -> None:
        from draftsmith.inference.kernels.commit import commit, table

        if self._table[0] != len(self._stores):  # layers were allocated since
            buffers = [buffer for store in self._stores.values() for buffer in (store.keys, store.values)]
            self._table = len(self._stores), table(buffers)
        commit(self._table[1], self.index, self.selected_length.contiguous(), slots, first)

    def length_bounds(self, given: list[int] | None = None) -> list[int]:
        """The host's bounds of all rows' lengths; set to `given` where there are any."""
        if given is not None:
            self._bound = list(given)
        return list(self._bound)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Forget these rows (all of them by default); their slots are free."""
        gone = list(range(self.rows) if rows is None else rows)
        self.length.index_fill_(0, index_tensor(gone, self.length.device), 0)
        for row in gone:
            self._bound[row], self._known[row] = 0, True
        self._changed()
