"""Feature rows as stored: float32, bfloat16, or fp8 and int8 with an fp32 scale for each row; and the error that this causes at the head.

Letters: M rows (all leading dimensions), H hidden size, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# The largest value of each scaled format; a row's largest magnitude is scaled to it.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Values per block: on a CPU intermediate values stay in the cache, on a GPU a launch has enough work.
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}
# Elements of one chunk of logits in the error report: 32 MiB in fp32.
BUDGET = 1 << 23


class EncodedRows(NamedTuple):
    """values [..., H] in the stored format; scale [...] float32, None if the format has none."""

    values: Tensor
    scale: Tensor | None


def pack(rows: Tensor, name: str) -> EncodedRows:
    """Encode rows [..., H] of any floating type in the format `name` of FORMATS, on the same device.

    A row's scale is its largest magnitude / 448 (fp8) or / 127 (int8). Errors are at most scale/2 in int8, and in fp8 2^-4 of the
    value or 2^-10 of the scale, whichever is more. A row of zeros is exact.

    Raises:
        ValueError: an unknown format; rows that are not floating or have no values; an inf or a NaN, with the first such row.
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
            raise ValueError(
                f"row {_index_of(row, rows.shape)} of {list(rows.shape)} has an inf or a NaN; look for the layer that computed it"
            )
        if scale is None:
            to[block] = part
            continue
        divisor = _scale(highest, LARGEST[kind])
        scale.view(-1)[block] = divisor
        scaled = part.float() / divisor[:, None]
        to[block] = scaled.round_() if kind == torch.int8 else scaled
    return EncodedRows(values, scale)


def unpack(values: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """Decode what `pack` returned to rows [..., H]; `values` and `scale` may be memory-mapped.

    Args:
        values: [..., H] in a stored format.
        scale: [...] float32, None if the format has none.
        dtype: of the result.
        out: [..., H], contiguous; written to and returned, in its own dtype. It saves most of the time of large batches on a CPU, which
            otherwise goes into allocating memory.

    Raises:
        ValueError: values of an unknown format; a scale that is missing, superfluous or of another shape; an `out` that does not fit.
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
        # Copying, then scaling in place is several times faster on a CPU than multiplying mixed types.
        wide = target if target.dtype == torch.float32 else torch.empty(part.shape, dtype=torch.float32, device=part.device)
        if values.dtype == torch.int8:
            wide.copy_(part).mul_(factor[block])
        else:
            wide.copy_(_as_half(part)).mul_(factor[block] * 256)
        if wide is not target:
            target.copy_(wide)
    return out


def bytes_per_row(hidden_size: int, name: str) -> int:
    """Bytes of one row of H values in the store, with its scale. Raises ValueError for an unknown format."""
    _check_name(name)
    return hidden_size * FORMATS[name].itemsize + (4 if FORMATS[name] in LARGEST else 0)


def _as_half(values: Tensor) -> Tensor:
    """fp8 values / 256 in float16, exactly, subnormals too, by shifting sign, exponent and mantissa.

    torch's own conversion takes nine times as long on a CPU. The NaN code, which `pack` never writes, becomes a number.
    """
    bits = values.view(torch.int8).to(torch.int16)  # sign-extended: bits 7 to 15 are the sign
    return bits.bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16)


def _scale(highest: Tensor, largest: float) -> Tensor:
    """Scale [M] from the largest magnitudes [M]: never 0, and never so large that scale · largest overflows by rounding."""
    limits = torch.finfo(torch.float32)
    return (highest / largest).clamp(limits.tiny, limits.max / largest * (1 - limits.eps))


def _blocks(rows: Tensor) -> list[slice]:
    step = max(1, BLOCK.get(rows.device.type, BLOCK["cpu"]) // rows.shape[-1])
    return [slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]


def _index_of(row: int, shape: torch.Size) -> int | tuple[int, ...]:
    """Index of flat row number `row` in rows of `shape` [..., H]."""
    position = []
    for size in reversed(shape[:-1]):
        row, index = divmod(row, size)
        position.append(index)
    return position[0] if len(position) == 1 else tuple(reversed(position))


def _check_name(name: str) -> None:
    if name not in FORMATS:
        raise ValueError(f"got feature format {name!r}; expected one of {', '.join(FORMATS)}")


@dataclass
class Error:
    """Error of stored rows, summed over batches and ranks (plain numbers, ready to be gathered).

    Two zero rows have cosine 1; a zero and a non-zero row have cosine 0. KL is KL(softmax(logits(row)) ‖ softmax(logits(stored row))).
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
        """Add rows [..., H] and their round trip [..., H]; `logits`, from hidden [m,H] to [m,V], is called for few rows at a time.

        Raises:
            ValueError: the shapes differ, or rows, round trips or logits have an inf or a NaN.
        """
        if rows.shape != restored.shape:
            raise ValueError(f"got rows {list(rows.shape)} and round trips {list(restored.shape)}; expected equal shapes")
        rows, restored = rows.reshape(-1, rows.shape[-1]), restored.reshape(-1, rows.shape[-1])
        batch = Error()
        for block in _blocks(rows):
            batch._add_distance(rows[block].double(), restored[block].double())
        if logits is not None and len(rows):
            vocab_size = logits(rows[:1]).shape[-1]
            for exact, stored in zip(*(x.split(max(1, BUDGET // vocab_size)) for x in (rows, restored)), strict=True):
                batch._add_kl(logits(exact), logits(stored.to(exact.dtype)))
        # Checked before the merge: min and max ignore a NaN.
        if math.isnan(batch.cosine_sum + batch.squared_error + batch.kl_sum):
            raise ValueError("the rows, their round trip or the logits have an inf or a NaN; pack the rows first, which names the row")
        self.__dict__.update(asdict(self.merge(batch)))

    def merge(self, *others: "Error") -> "Error":
        """One report of all batches: `Error().merge(*gathered)`."""
        reports = [asdict(report) for report in (self, *others)]
        combine = {"cosine_min": min, "kl_max": max}
        return Error(**{name: combine.get(name, sum)([report[name] for report in reports]) for name in reports[0]})

    def summary(self) -> dict[str, float]:
        """rows, cosine_mean, cosine_min, relative_rms (√(Σ error² / Σ value²)) and, if logits were given, kl_mean and kl_max.

        Raises:
            ValueError: no row was added.
        """
        if self.rows == 0:
            raise ValueError("the error report is empty; add rows before asking for a summary")
        summary = {
            "rows": self.rows,
            "cosine_mean": self.cosine_sum / self.rows,
            "cosine_min": self.cosine_min,
            "relative_rms": math.sqrt(self.squared_error / self.squared) if self.squared else math.inf if self.squared_error else 0.0,
        }
        if self.kl_rows:
            summary |= {"kl_mean": self.kl_sum / self.kl_rows, "kl_max": self.kl_max}
        return summary

    def _add_distance(self, rows: Tensor, restored: Tensor) -> None:
        norm, restored_norm = rows.norm(dim=-1), restored.norm(dim=-1)
        cosine = (rows * restored).sum(-1) / torch.where((norm == 0) | (restored_norm == 0), 1, norm * restored_norm)
        cosine = torch.where((norm == 0) & (restored_norm == 0), 1, cosine)
        self.rows += len(rows)
        self.cosine_sum += cosine.sum().item()
        self.cosine_min = min(self.cosine_min, cosine.min().item())
        self.squared_error += (rows - restored).square().sum().item()
        self.squared += rows.square().sum().item()

    def _add_kl(self, logits: Tensor, stored_logits: Tensor) -> None:
        wide = torch.promote_types(logits.dtype, torch.float32)
        logp, logq = (F.log_softmax(x.to(wide), -1) for x in (logits, stored_logits))
        # where: a token at -inf in both does not count. clamp: rounding can give equal rows a KL just below 0.
        kl = torch.where(logp.isneginf(), 0, logp.exp() * (logp - logq)).sum(-1).clamp(min=0)
        self.kl_rows += len(kl)
        self.kl_sum += kl.double().sum().item()
        self.kl_max = max(self.kl_max, kl.max().item())
