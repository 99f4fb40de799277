"""The accepted path of a tree moves to where the next round looks for it: K/V of all layers in one launch, and features. Triton, and twins.

Letters: B rows of a round · R rows of the buffers · C context slots · P path entries · N tree nodes · L buffers of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Group", "commit", "commit_reference", "table", "take", "take_reference"]

_BLOCK = 1024  # elements that a program moves at once


@dataclass(frozen=True, slots=True)
class Group:
    """Buffers [R,heads,C,dim] of one shape, layout, dtype and device · pointers [L] int64: where each begins, on that device."""

    buffers: tuple[Tensor, ...]
    pointers: Tensor


def table(buffers: Sequence[Tensor]) -> tuple[Group, ...]:
    """The K and V buffers of all layers, [R,heads,C,dim] each, grouped for `commit`: a launch per group.

    To be made once and kept, outside of graphs: it copies addresses to the device, which stay right as long as the buffers are these.

    Raises:
        ValueError: a buffer that is not 4-dimensional, has gaps in its last dimension, or begins off 16 bytes.
    """
    groups: dict[tuple, list[Tensor]] = {}
    for buffer in buffers:
        if buffer.ndim != 4 or buffer.stride(3) != 1 or buffer.data_ptr() % 16:
            raise ValueError(
                f"got a buffer {list(buffer.shape)} of strides {list(buffer.stride())} at byte {buffer.data_ptr() % 16} of 16; expected "
                "[R,heads,C,dim], last stride 1, at byte 0; pass the cache's whole buffers"
            )
        groups.setdefault((buffer.shape, buffer.stride(), buffer.dtype, buffer.device), []).append(buffer)
    return tuple(
        Group(tuple(group), torch.tensor([buffer.data_ptr() for buffer in group], dtype=torch.int64, device=group[0].device))
        for group in groups.values()
    )


def commit(groups: Sequence[Group], rows: Tensor, start: Tensor, slots: Tensor, first: int) -> None:
    """In every buffer of `table`, slot start[b] + slots[b,j] of row rows[b] moves to slot start[b] + first + j, j = 0 … P−1; −1 stays.

    rows [B] int64, each once · start [B] int64 · slots [B,P] int64, slots[b,j] ≥ first + j or −1. Nothing else is written, and of
    what is in place already nothing is read. The device's numbers are not checked: rows < R, start + slots < C.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    integers = {"rows": rows, "start": start, "slots": slots}
    kinds = {str(tensor.dtype) for tensor in integers.values()}
    fits = rows.ndim == 1 and start.shape == rows.shape and slots.ndim == 2 and len(slots) == len(rows)
    if kinds != {"torch.int64"} or not fits or not rows.is_contiguous() or not start.is_contiguous():
        raise ValueError(
            f"got rows {list(rows.shape)}, start {list(start.shape)}, slots {list(slots.shape)} in {sorted(kinds)}; expected [B], [B] without "
            "gaps and [B,P], all int64; pass the cache's selected rows, their lengths and the verdict's path"
        )
    for group in groups:
        like = group.buffers[0]
        _, heads, capacity, dim = like.shape
        if first < 0 or first + slots.shape[1] > capacity:
            raise ValueError(f"got slots {first} … {first + slots.shape[1] - 1} to fill of {capacity}; give a larger context")
        near = [tensor.to(like.device) for tensor in integers.values()]
        if slots.numel():
            launch: Any = _move[-(-heads * dim // _BLOCK), len(rows), len(group.buffers)]
            with torch.cuda.device_of(like):
                launch(
                    group.pointers, like, *near, *near[2].stride(), *like.stride()[:3],
                    first, slots.shape[1], heads * dim, dim, _BLOCK,
                )  # fmt: skip


def commit_reference(buffers: Sequence[Tensor], rows: Tensor, start: Tensor, slots: Tensor, first: int) -> None:
    """`commit` in plain torch, on buffers [R,heads,C,dim]."""
    step = torch.arange(first, first + slots.shape[1], device=slots.device)
    source, target = start[:, None] + torch.where(slots < 0, step, slots), start[:, None] + step
    for buffer in buffers:
        row, read, write = (tensor.to(buffer.device) for tensor in (rows[:, None], source, target))
        buffer[row, :, write] = buffer[row, :, read]  # the gather is whole before the scatter begins


@triton.jit(do_not_specialize=["first", "count"])
def _move(
    pointers, like, rows, starts, slots, path_batch, path_entry, row_stride, head_stride, slot_stride, first, count,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of heads · dim, B, L). `like` is any buffer of the group, for its type.

    In the order of the path nothing is read that has been overwritten: what j reads, slots[j] ≥ first + j, lies after what those before
    it wrote, first … first + j − 1. Nor is anything overwritten that is still to be stored: an element of the tile is always stored by
    the same thread, which before it stores entry j + 1 has stored entry j, and so waited until that was read.
    """
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = tl.load(pointers + tl.program_id(2)).to(tl.pointer_type(like.dtype.element_ty))
    base = tl.multiple_of(base, 16)  # `table` has seen to it; a loaded address tells the compiler nothing, and it would go by elements
    element = tile * BLOCK + tl.arange(0, BLOCK)
    held = element < SIZE
    base += tl.load(rows + batch) * row_stride + (element // DIM).to(tl.int64) * head_stride + element % DIM
    start = tl.load(starts + batch)
    for j in range(count):
        slot = tl.load(slots + batch * path_batch + j * path_entry)
        if slot > first + j:
            moved = tl.load(base + (start + slot) * slot_stride, mask=held)
            tl.store(base + (start + first + j) * slot_stride, moved, mask=held)


def take(features: Tensor, path: Tensor) -> Tensor:
    """features [B,N,F…] of a tree's nodes (hidden, taps), path [B,P] int64 -> [B,P,F…]: those of the path, 0 where it is −1.

    The device's numbers are not checked: path < N.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    if features.ndim < 3 or path.ndim != 2 or len(path) != len(features) or path.dtype != torch.int64 or path.device != features.device:
        raise ValueError(
            f"got features {list(features.shape)} on {features.device}, path {list(path.shape)} in {path.dtype} on {path.device}; expected "
            "[B,N,F…] and [B,P] in int64 on one device; pass the target's output and the verdict's path"
        )
    rows, size = len(path), features.shape[2:].numel()
    if features.numel() and not features[0, 0].is_contiguous():
        raise ValueError(f"got features of strides {list(features.stride())}; expected no gaps within a node's; call .contiguous() on them")
    out = features.new_empty(*path.shape, *features.shape[2:])
    if out.numel():
        launch: Any = _take[-(-size // _BLOCK), path.shape[1], rows]
        with torch.cuda.device_of(features):
            launch(features, path, out, *features.stride()[:2], *path.stride(), size, _BLOCK)
    return out


def take_reference(features: Tensor, path: Tensor) -> Tensor:
    """`take` in plain torch."""
    row = torch.arange(len(path), device=path.device)[:, None]
    absent = (path < 0).view(*path.shape, *(1 for _ in features.shape[2:]))
    return features[row, path.clamp(min=0)].masked_fill(absent, 0)


@triton.jit
def _take(features, path, out, batch_stride, node_stride, path_batch, path_entry, size, BLOCK: tl.constexpr):
    """Grid (tiles of F, P, B)."""
    entry, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(path + batch * path_batch + entry * path_entry)
    taken = tl.load(features + batch * batch_stride + node * node_stride + element, mask=(element < size) & (node >= 0), other=0.0)
    tl.store(out + (batch * tl.num_programs(1) + entry) * size + element, taken, mask=element < size)
