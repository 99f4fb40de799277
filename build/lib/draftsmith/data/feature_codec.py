"""Feature rows in a quarter of fp32's bytes (fp8 or int8, one fp32 scale a row), and what that does to the head's output.

Letters: M rows (all leading dimensions) · H hidden size · V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# The largest value of each scaled format: a row's largest magnitude becomes this.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Values worked on at once: on a CPU what is between input and output stays in the cache, on a GPU one launch does much.
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}
# Elements of one chunk of logits in the error report: 32 MiB in fp32.
BUDGET = 1 << 23


class EncodedRows(NamedTuple):
    """values [..., H] in the stored format · scale [...] float32, None where the format has none."""

    values: Tensor
    scale: Tensor | None


def pack(rows: Tensor, name: str) -> EncodedRows:
    """Rows [..., H] of any floating type -> the format `name` of FORMATS, on the same device.

    A row's scale is its largest magnitude / 448 (fp8) or / 127 (int8). Errors are at most scale/2 in int8, and in fp8 2^-4 of the
    value or 2^-10 of the scale, whichever is more; a row of zeros stays one.

    Raises:
        ValueError: an unknown format, rows that are not floating or have no values, and the first row that holds an inf or a NaN.
    """
    _check_name(name)
    if not rows.is_floating_point() or rows.ndim == 0 or rows.shape[-1] == 0:
        raise ValueError(f"got rows {list(rows.shape)} of {rows.dtype}; expected [..., H] of a floating type with H >= 1")
    kind = FORMATS[name]
    values = torch.empty(rows.shape, dtype=kind, device=rows.device)
    scale = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device) if kind in LARGEST else None
    source, to = rows.reshape(-1, rows.shape[-1]), values.view(-1, rows.shape[-1])
    for block in _blocks(source):
        part = source[block]
        highest = part.abs().amax(-1).float()
        if not highest.isfinite().all():
            row = block.start + int(highest.isfinite().logical_not().nonzero()[0])
            raise ValueError(f"row {_place(row, rows.shape)} of {list(rows.shape)} holds an inf or a NaN; find out which layer made it")
        if scale is None:
            to[block] = part
            continue
        divisor = _scale(highest, LARGEST[kind])
        scale.view(-1)[block] = divisor
        scaled = part.float() / divisor[:, None]
        to[block] = scaled.round_() if kind == torch.int8 else scaled
    return EncodedRows(values, scale)


def unpack(values: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """What `pack` made, as rows [..., H] of `dtype`; `values` and `scale` may be memory-mapped.

    `out` [..., H] (contiguous, any floating type, which then counts instead of `dtype`) is written to and returned. For large
    batches it pays: on a CPU most of the time otherwise goes into the system's giving out fresh memory.

    Raises:
        ValueError: values of no known format, a scale that is missing, superfluous or of another shape, an `out` that does not fit.
    """
    scaled = values.dtype in LARGEST
    if values.dtype not in FORMATS.values() or (scale is not None) != scaled or (scale is not None and scale.shape != values.shape[:-1]):
        shape = None if scale is None else list(scale.shape)
        raise ValueError(f"got values {list(values.shape)} of {values.dtype} with scale {shape}; give both as `pack` returned them")
    out = torch.empty(values.shape, dtype=dtype, device=values.device) if out is None else out
    if out.shape != values.shape or not out.is_contiguous():
        raise ValueError(f"got out {list(out.shape)}, contiguous {out.is_contiguous()}; expected a contiguous {list(values.shape)}")
    if scale is None:
        return out.copy_(values)
    source, to, factor = values.reshape(-1, values.shape[-1]), out.view(-1, values.shape[-1]), scale.reshape(-1, 1)
    for block in _blocks(source):
        part, target = source[block], to[block]
        # Copying, then scaling in place is several times faster on a CPU than a product of mixed types.
        wide = target if target.dtype == torch.float32 else torch.empty(part.shape, dtype=torch.float32, device=part.device)
        if values.dtype == torch.int8:
            wide.copy_(part).mul_(factor[block])
        else:
            wide.copy_(_as_half(part)).mul_(factor[block] * 256)
        if wide is not target:
            target.copy_(wide)
    return out


def bytes_per_row(hidden_size: int, name: str) -> int:
    """Bytes that one row of H values takes in the store, its scale included. Raises ValueError for an unknown format."""
    _check_name(name)
    return hidden_size * FORMATS[name].itemsize + (4 if FORMATS[name] in LARGEST else 0)


def _as_half(values: Tensor) -> Tensor:
    """fp8 values / 256 in float16, exactly, subnormals too: sign, exponent and mantissa only move to their places there.

    torch's own conversion takes nine times as long on a CPU. The NaN code, which `pack` never writes, comes out as a number.
    """
    bits = values.view(torch.int8).to(torch.int16)  # sign-extended: bits 7 to 15 are the sign
    return bits.bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16)


def _scale(highest: Tensor, largest: float) -> Tensor:
    """Largest magnitude [M] -> scale [M]: never 0, and never so large that scale · largest overflows by rounding."""
    limits = torch.finfo(torch.float32)
    return (highest / largest).clamp(limits.tiny, limits.max / largest * (1 - limits.eps))


def _blocks(rows: Tensor) -> list[slice]:
    step = max(1, BLOCK.get(rows.device.type, BLOCK["cpu"]) // rows.shape[-1])
    return [slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]


def _place(row: int, shape: torch.Size) -> int | tuple[int, ...]:
    """The index of flat row number `row` in rows of `shape` [..., H]."""
    place = []
    for size in reversed(shape[:-1]):
        row, index = divmod(row, size)
        place.append(index)
    return place[0] if len(place) == 1 else tuple(reversed(place))


def _check_name(name: str) -> None:
    if name not in FORMATS:
        raise ValueError(f"got feature format {name!r}; expected one of {', '.join(FORMATS)}")


@dataclass
class Error:
    """How far stored rows are from the rows, summed up over batches (and ranks: plain numbers, ready to be gathered).

    A pair of zero rows has cosine 1, a zero row beside another one 0. KL is KL(softmax(logits(row)) ‖ softmax(logits(stored row))).
    """

    rows: int = 0
    cosine_sum: float = 0.0
    cosine_min: float = math.inf
    squared_error: float = 0.0
    squared: float = 0.0
    kl_rows: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0

    @torch.no_grad()
    def add(self, rows: Tensor, restored: Tensor, logits: Callable[[Tensor], Tensor] | None = None) -> None:
        """Rows [..., H] and their round trip [..., H]; `logits`, hidden [m,H] -> [m,V], is asked for few rows at a time.

        Raises:
            ValueError: shapes that differ, and rows, round trips or logits from which no number can be made (NaN).
        """
        if rows.shape != restored.shape:
            raise ValueError(f"got rows {list(rows.shape)} and round trips {list(restored.shape)}; expected equal shapes")
        rows, restored = rows.reshape(-1, rows.shape[-1]), restored.reshape(-1, rows.shape[-1])
        found = Error()
        for block in _blocks(rows):
            found._add_distance(rows[block].double(), restored[block].double())
        if logits is not None and len(rows):
            vocab_size = logits(rows[:1]).shape[-1]
            for part, other in zip(*(x.split(max(1, BUDGET // vocab_size)) for x in (rows, restored)), strict=True):
                found._add_kl(logits(part), logits(other.to(part.dtype)))
        # Checked before anything is kept: min and max pass over a NaN without a word.
        if math.isnan(found.cosine_sum + found.squared_error + found.kl_sum):
            raise ValueError("the rows, their round trip or the logits hold an inf or a NaN; pack the rows first, which names the row")
        merged = self.merge(found)
        for field in fields(self):
            setattr(self, field.name, getattr(merged, field.name))

    def merge(self, *others: "Error") -> "Error":
        """One report for all, as though each batch had been added to it: `Error().merge(*gathered)`."""
        all_of, merged = (self, *others), Error()
        for field in fields(Error):
            combine = {"cosine_min": min, "kl_max": max}.get(field.name, sum)
            setattr(merged, field.name, combine([getattr(one, field.name) for one in all_of]))
        return merged

    def summary(self) -> dict[str, float]:
        """rows, cosine_mean, cosine_min, relative_rms (√(Σ error² / Σ value²)), and, where logits were given, kl_mean and kl_max.

        Raises ValueError where no row was added.
        """
        if self.rows == 0:
            raise ValueError("the error report is empty; add rows before asking for a summary")
        found = {
            "rows": self.rows,
            "cosine_mean": self.cosine_sum / self.rows,
            "cosine_min": self.cosine_min,
            "relative_rms": math.sqrt(self.squared_error / self.squared) if self.squared else math.inf if self.squared_error else 0.0,
        }
        return found | ({"kl_mean": self.kl_sum / self.kl_rows, "kl_max": self.kl_max} if self.kl_rows else {})

    def _add_distance(self, rows: Tensor, restored: Tensor) -> None:
        long, other = rows.norm(dim=-1), restored.norm(dim=-1)
        cosine = (rows * restored).sum(-1) / torch.where((long == 0) | (other == 0), 1, long * other)
        cosine = torch.where((long == 0) & (other == 0), 1, cosine)
        self.rows += len(rows)
        self.cosine_sum += cosine.sum().item()
        self.cosine_min = min(self.cosine_min, cosine.min().item())
        self.squared_error += (rows - restored).square().sum().item()
        self.squared += rows.square().sum().item()

    def _add_kl(self, logits: Tensor, other: Tensor) -> None:
        wide = torch.promote_types(logits.dtype, torch.float32)
        logp, logq = (F.log_softmax(x.to(wide), -1) for x in (logits, other))
        # where: a token at -inf in both takes no part. clamp: rounding can put equal rows a hair below 0.
        kl = torch.where(logp.isneginf(), 0, logp.exp() * (logp - logq)).sum(-1).clamp(min=0)
        self.kl_rows += len(kl)
        self.kl_sum += kl.double().sum().item()
        self.kl_max = max(self.kl_max, kl.max().item())
