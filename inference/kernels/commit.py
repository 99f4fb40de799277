"""Move the accepted path of each tree to where the next round reads it: K/V of all layers in one launch, and node features, in Triton.

`reference` has the same functions in plain torch. P is the number of path entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.inference.kernels.reference import commit_reference, take_reference

__all__ = ["Group", "commit", "commit_reference", "table", "take", "take_reference"]

_BLOCK = 1024  # elements that a program moves at once


@dataclass(frozen=True, slots=True)
class Group:
    """Buffers of one shape, layout, dtype and device.

    Attributes:
        buffers: [rows,heads,C,dim] each.
        pointers: int64, the address of each buffer, on that device.
    """

    buffers: tuple[Tensor, ...]
    pointers: Tensor


def table(buffers: Sequence[Tensor]) -> tuple[Group, ...]:
    """Group the K and V buffers [rows,heads,C,dim] of all layers for `commit`, which launches once per group.

    Make it once and keep it, outside graphs: it copies addresses to the device, and they stay right as long as the buffers exist.

    Raises:
        ValueError: a buffer that is not 4-dimensional, has gaps in its last dimension, or does not begin at a multiple of 16 bytes.
    """
    groups: dict[tuple, list[Tensor]] = {}
    for buffer in buffers:
        if buffer.ndim != 4 or buffer.stride(3) != 1 or buffer.data_ptr() % 16:
            raise ValueError(
                f"got a buffer {list(buffer.shape)} of strides {list(buffer.stride())} at byte {buffer.data_ptr() % 16} of 16; expected "
                "[rows,heads,C,dim], last stride 1, at byte 0; pass the cache's complete buffers"
            )
        groups.setdefault((buffer.shape, buffer.stride(), buffer.dtype, buffer.device), []).append(buffer)
    return tuple(
        Group(tuple(group), torch.tensor([buffer.data_ptr() for buffer in group], dtype=torch.int64, device=group[0].device))
        for group in groups.values()
    )


def commit(groups: Sequence[Group], rows: Tensor, start: Tensor, offsets: Tensor, first: int) -> None:
    """In every buffer of `table`, move position start[b] + offsets[b,j] of row rows[b] to position start[b] + first + j, for j = 0 … P−1.

    Nothing else is written, and entries that are in place already are not read. The numbers on the device are not checked:
    rows < number of rows, start + offsets < C.

    Args:
        groups: what `table` returned.
        rows: [B] int64, rows of the buffers, each at most once.
        start: [B] int64, the committed length of each row.
        offsets: [B,P] int64, what to keep, relative to start: offsets[b,j] ≥ first + j, or −1, which moves nothing.
        first: where the first entry goes, relative to start.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    integers = {"rows": rows, "start": start, "offsets": offsets}
    kinds = {str(tensor.dtype) for tensor in integers.values()}
    fits = rows.ndim == 1 and start.shape == rows.shape and offsets.ndim == 2 and len(offsets) == len(rows)
    if kinds != {"torch.int64"} or not fits or not rows.is_contiguous() or not start.is_contiguous():
        raise ValueError(
            f"got rows {list(rows.shape)}, start {list(start.shape)}, offsets {list(offsets.shape)} in {sorted(kinds)}; expected [B], [B] without "
            "gaps and [B,P], all int64; pass the cache's selected rows, their lengths and the verdict's path"
        )
    for group in groups:
        like = group.buffers[0]
        _, heads, capacity, dim = like.shape
        if first < 0 or first + offsets.shape[1] > capacity:
            raise ValueError(f"got positions {first} … {first + offsets.shape[1] - 1} to fill of {capacity}; give a larger context")
        near = [tensor.to(like.device) for tensor in integers.values()]
        if offsets.numel():
            launch: Any = _move[-(-heads * dim // _BLOCK), len(rows), len(group.buffers)]
            with torch.cuda.device_of(like):
                launch(
                    group.pointers, like, *near, *near[2].stride(), *like.stride()[:3],
                    first, offsets.shape[1], heads * dim, dim, _BLOCK,
                )  # fmt: skip


@triton.jit(do_not_specialize=["first", "count"])
def _move(
    pointers, like, rows, starts, offsets, path_batch, path_entry, row_stride, head_stride, position_stride, first, count,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of heads · dim, B, buffers of the group). `like` is any buffer of the group, for its type.

    Nothing is read after it was overwritten: entry j reads offsets[j] ≥ first + j, and the entries before it wrote only first … first + j − 1.
    Nothing is overwritten that is still to be read: each element of the tile is stored by the same thread every time, and before that thread
    stores entry j + 1 it has stored entry j, and so has waited until that was read.
    """
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = tl.load(pointers + tl.program_id(2)).to(tl.pointer_type(like.dtype.element_ty))
    base = tl.multiple_of(base, 16)  # `table` checked it; the compiler knows nothing of a loaded address, and would move single elements
    element = tile * BLOCK + tl.arange(0, BLOCK)
    inside = element < SIZE
    base += tl.load(rows + batch) * row_stride + (element // DIM).to(tl.int64) * head_stride + element % DIM
    start = tl.load(starts + batch)
    for j in range(count):
        offset = tl.load(offsets + batch * path_batch + j * path_entry)
        if offset > first + j:
            moved = tl.load(base + (start + offset) * position_stride, mask=inside)
            tl.store(base + (start + first + j) * position_stride, moved, mask=inside)


def take(features: Tensor, path: Tensor) -> Tensor:
    """features [B,N,…] of tree nodes (hidden, taps), path [B,P] int64 -> [B,P,…]: the features of the path's nodes, 0 where it is −1.

    The numbers on the device are not checked: path < N.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    if features.ndim < 3 or path.ndim != 2 or len(path) != len(features) or path.dtype != torch.int64 or path.device != features.device:
        raise ValueError(
            f"got features {list(features.shape)} on {features.device}, path {list(path.shape)} in {path.dtype} on {path.device}; expected "
            "[B,N,…] and [B,P] in int64 on one device; pass the target's output and the verdict's path"
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


@triton.jit
def _take(features, path, out, batch_stride, node_stride, path_batch, path_entry, size, BLOCK: tl.constexpr):
    """Grid (tiles of a node's features, P, B)."""
    entry, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(path + batch * path_batch + entry * path_entry)
    taken = tl.load(features + batch * batch_stride + node * node_stride + element, (element < size) & (node >= 0), 0.0)
    tl.store(out + (batch * tl.num_programs(1) + entry) * size + element, taken, mask=element < size)
