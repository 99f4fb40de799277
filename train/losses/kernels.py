"""The losses of a chunk from its logits in two launches: the target distribution, shared by all steps, then each step's loss and gradient.

A program walks one row of logits three times: for its maximum and mass, for the sums of the losses, for the gradient, which overwrites the
logits. No tensor of [m,V] is allocated, and logits are read in the dtype that the head gave; arithmetic is in float32. The reference
implementation is the plain steps of `chunked` and `draft`, where the losses are defined. The mix of a run is compiled in.

With c = p̃, all losses against it are Σ c·F + Σ q·G with F and G functions of log c and log q alone. The q part of each is a
Kullback-Leibler divergence, so its gradient by the logits is q·(G − Σ q·G). α is summed in logarithms, since it may underflow.

Letters: K steps, m rows of a chunk, V target vocabulary, D draft vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.train.losses.mixture import ETA, FLOOR, beta_of

__all__ = ["StepLosses", "TargetDistribution", "target_distribution", "with_gradients"]

_NEVER = tl.constexpr(float("-inf"))
_FLOOR = tl.constexpr(FLOOR)
_ETA = tl.constexpr(ETA)
_BLOCK = 8192  # tokens of a row in one step: a chunk has few rows, so each program must have many loads under way
_KINDS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _join(peak, mass, part, x, block_peak, scale):
    """Add x [BLOCK], whose maximum is `block_peak`, to mass = Σ exp(scale · (x − peak)); rescale `part` likewise. Also returns the base.

    −inf adds nothing, and a row of −inf alone gives no NaN.
    """
    top = tl.maximum(peak, block_peak)
    base = tl.where(top == _NEVER, 0.0, top)
    rescale = tl.exp((peak - base) * scale)
    return top, mass * rescale + tl.sum(tl.exp((x - base) * scale), 0), part * rescale, base


@triton.jit
def _row(logits, size, least, scale, BLOCK: tl.constexpr):
    """The best id of a row, the lowest among ties, and log Σ exp(scale · logits), over the logits not below `least`."""
    peak, mass, best = _NEVER, 0.0, 0
    for first in range(0, size, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(logits + index, mask=index < size, other=_NEVER).to(tl.float32)
        if least is not None:
            x = tl.where(x < tl.load(least).to(tl.float32), _NEVER, x)
        block_peak, at = tl.max(x, 0, return_indices=True)  # pyright: ignore[reportGeneralTypeIssues]
        best = tl.where(block_peak > peak, first + at, best)
        peak, mass, _, _ = _join(peak, mass, 0.0, x, block_peak, scale)
    return best, peak * scale + tl.log(mass)


@triton.jit
def _log_p(target, target_ids, index, size, least, mass, scale):
    """log p [BLOCK] at these draft ids, not renormalised; −inf past the last id."""
    inside = index < size
    if target_ids is not None:
        index = tl.load(target_ids + index, mask=inside, other=0)
    y = tl.load(target + index, mask=inside, other=_NEVER).to(tl.float32)
    if least is not None:
        y = tl.where(y < tl.load(least).to(tl.float32), _NEVER, y)
    return tl.where(inside, tl.maximum(y * scale - mass, _FLOOR, propagate_nan=tl.PropagateNan.ALL), _NEVER)


@triton.jit
def _log_q(logits, index, size, mass, scale):
    """log q [BLOCK] at these draft ids, of masked tokens FLOOR, as in the reference; −inf past the last id."""
    inside = index < size
    x = tl.load(logits + index, mask=inside, other=_NEVER).to(tl.float32)
    return tl.where(inside, tl.maximum(x * scale - mass, _FLOOR, propagate_nan=tl.PropagateNan.ALL), _NEVER)


@triton.jit(do_not_specialize=["steps", "rows"])
def _target_distribution_kernel(
    target, stride, vocab, target_ids, ids, size, weight, steps, rows, least, scale, best, total, covered,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draft id of the target's best token, log Σ exp of its row, and log Σ p over the draft vocabulary, for rows of positive weight."""
    row, step = tl.program_id(0).to(tl.int64), tl.arange(0, STEPS)
    target += row * stride
    if least is not None:
        least += row
    if tl.max(tl.load(weight + step * rows + row, mask=step < steps, other=0.0), 0) > 0:
        token, mass = _row(target, vocab, least, scale, BLOCK)
        tl.store(total + row, mass)
        if target_ids is None:
            tl.store(best + row, token)
        else:
            tl.store(best + row, tl.load(ids + token))
            peak, inside = _NEVER, 0.0
            for first in range(0, size, BLOCK):
                log_p = _log_p(target, target_ids, first + tl.arange(0, BLOCK), size, least, mass, scale)
                peak, inside, _, _ = _join(peak, inside, 0.0, log_p, tl.max(log_p, 0), 1.0)
            tl.store(covered + row, peak + tl.log(inside))


@triton.jit
def _log_m(log_c, log_q, log_beta: tl.constexpr, log_rest: tl.constexpr):
    a, b = log_c + log_beta, log_q + log_rest
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _of_p(log_c, log_q, CE: tl.constexpr, KL: tl.constexpr, JSD: tl.constexpr):
    """Σ c·F of a block, with 0 · inf = 0."""
    f = tl.zeros_like(log_q)
    if CE != 0:
        f -= CE * log_q
    if KL != 0:
        f += KL * (log_c - log_q)
    for i in tl.static_range(len(JSD)):  # pyright: ignore
        f += JSD[i][0] * JSD[i][1] * (log_c - _log_m(log_c, log_q, JSD[i][2], JSD[i][3]))
    c = tl.exp(log_c)
    return tl.sum(tl.where(c == 0.0, 0.0, c * f), 0)


@triton.jit
def _of_q(log_c, log_q, less, REVERSE_KL: tl.constexpr, JSD: tl.constexpr):
    """q · (G − less) [BLOCK], with 0 · inf = 0."""
    g = tl.zeros_like(log_q)
    if REVERSE_KL != 0:
        g += REVERSE_KL * (log_q - log_c)
    for i in tl.static_range(len(JSD)):  # pyright: ignore
        g += JSD[i][0] * (1.0 - JSD[i][1]) * (log_q - _log_m(log_c, log_q, JSD[i][2], JSD[i][3]))
    q = tl.exp(log_q)
    return tl.where(q == 0.0, 0.0, q * (g - less))


@triton.jit(do_not_specialize=["steps", "rows"])
def _losses_kernel(
    logits, size, steps, rows, target, stride, target_ids, least, total, covered, best, text, weight, gradient_scale, scale, values, overlap, hits,
    CE: tl.constexpr, KL: tl.constexpr, NLL: tl.constexpr, REVERSE_KL: tl.constexpr, TV: tl.constexpr, LK: tl.constexpr,
    LK_HYBRID: tl.constexpr, JSD: tl.constexpr, OF_P: tl.constexpr, OF_Q: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss of a step at a row, α, and whether its best token is the target's; then gradient_scale · the gradient, over the logits."""
    row, step = tl.program_id(0).to(tl.int64) // steps, tl.program_id(0) % steps  # the steps of a row are neighbours, for the cache
    position = step * rows + row
    logits += position * size
    if target is not None:
        target += row * stride
    if least is not None:
        least += row
    if tl.load(weight + position) > 0:
        known, right, value, likely = tl.load(best + row) >= 0, -1, 0.0, 0.0
        if NLL != 0:  # read before the first reduction, hence before any thread writes
            right = tl.load(text + row).to(tl.int32)
            likely = tl.load(logits + tl.maximum(right, 0), mask=right < size, other=float("nan")).to(tl.float32) * scale
        own, mass = _row(logits, size, None, scale, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(hits + position, own == tl.load(best + row))
        if NLL != 0:
            value -= tl.where(right >= 0, NLL * tl.maximum(likely - mass, _FLOOR, propagate_nan=tl.PropagateNan.ALL), 0.0)

        if target is not None:
            mass_p, inside = tl.load(total + row), 0.0
            if target_ids is not None:
                inside = tl.load(covered + row)
            peak, shared, below, of_p, of_kl, of_q = _NEVER, 0.0, 0.0, 0.0, 0.0, 0.0
            for first in range(0, size, BLOCK):
                index = first + tl.arange(0, BLOCK)
                log_q = _log_q(logits, index, size, mass, scale)
                log_p = _log_p(target, target_ids, index, size, least, mass_p, scale)
                low = tl.minimum(log_p, log_q, propagate_nan=tl.PropagateNan.ALL)
                peak, shared, below, base = _join(peak, shared, below, low, tl.max(low, 0), 1.0)
                below += tl.sum(tl.where(log_q < log_p, tl.exp(low - base), 0.0), 0)
                if OF_P:
                    of_p += _of_p(log_p - inside, log_q, CE, KL, JSD)
                if OF_Q:
                    of_q += tl.sum(_of_q(log_p - inside, log_q, 0.0, REVERSE_KL, JSD), 0)
                if LK_HYBRID != 0:
                    of_kl += _of_p(log_p - inside, log_q, 0.0, 1.0, ())
            alpha, log_alpha = shared * tl.exp(peak), peak + tl.log(shared)
            share = LK_HYBRID * tl.exp(-_ETA * alpha)  # of kl
            varied = TV + (LK_HYBRID - share)
            tl.store(overlap + position, alpha)
            value += tl.where(known, of_p + of_q + share * of_kl, 0.0) + varied * (1.0 - alpha)
            if LK != 0:
                value += LK * tl.where(log_alpha < _FLOOR / 2, 0.0, -log_alpha)
        tl.store(values + position, value)

        if GRADIENT:
            by = tl.load(gradient_scale + position)
            for first in range(0, size, BLOCK):
                index = first + tl.arange(0, BLOCK)
                log_q = _log_q(logits, index, size, mass, scale)
                q, d = tl.exp(log_q), tl.zeros([BLOCK], tl.float32)
                if NLL != 0:
                    d += tl.where(right >= 0, NLL * (q - (index == right).to(tl.float32)), 0.0)
                if target is not None:
                    log_p = _log_p(target, target_ids, index, size, least, mass_p, scale)
                    if CE + KL + LK_HYBRID != 0:
                        d += tl.where(known, (CE + KL + share) * (q - tl.exp(log_p - inside)), 0.0)
                    if OF_Q:
                        d += tl.where(known, _of_q(log_p - inside, log_q, of_q, REVERSE_KL, JSD), 0.0)
                    if TV + LK_HYBRID != 0:
                        d += varied * (q * (below * tl.exp(peak)) - tl.where(log_q < log_p, q, 0.0))
                    if LK != 0:
                        d += LK * (q * (below / shared) - tl.where(log_q < log_p, tl.exp(log_q - log_alpha), 0.0))
                tl.store(logits + index, d * by, mask=index < size)
    elif GRADIENT:
        for first in range(0, size, BLOCK):
            index = first + tl.arange(0, BLOCK)
            tl.store(logits + index, tl.zeros([BLOCK], tl.float32), mask=index < size)


class TargetDistribution(NamedTuple):
    """The target distribution of a chunk.

    Attributes:
        logits: [m,V].
        target_ids: [D], None where D = V.
        scale: 1/T.
        least: [m], the least logit that a top-k cut keeps; None without a cut.
        best: [m], the draft id of the target's best token, −1 where it has none.
        total: [m], log Σ exp(logits / T).
        covered: [m], log Σ p over D; None where D = V.
    """

    logits: Tensor
    target_ids: Tensor | None
    scale: float
    least: Tensor | None
    best: Tensor
    total: Tensor
    covered: Tensor | None


class StepLosses(NamedTuple):
    """Losses of K steps, all 0 where the weight is 0.

    Attributes:
        loss: [K,m] float32, unweighted.
        overlap: [K,m] float32, α; 0 without a target distribution.
        hits: [K,m] bool.
    """

    loss: Tensor
    overlap: Tensor
    hits: Tensor


def target_distribution(
    logits: Tensor,
    weight: Tensor,
    target_ids: Tensor | None = None,
    ids: Tensor | None = None,
    temperature: float = 1.0,
    least: Tensor | None = None,
) -> TargetDistribution:
    """What `with_gradients` needs of the target's logits. Rows that have no weight in any step are not read.

    Args:
        logits: [m,V] of the target.
        weight: [K,m] float32 of the steps that are compared with these rows.
        target_ids: [D] int64, with `ids`; None where D = V.
        ids: [V] int64, the inverse of target_ids, −1 where a token has no draft id.
        temperature: T.
        least: [m], logits below it are cut.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    logits = logits.contiguous()
    (rows, vocab), steps = logits.shape, len(weight)
    _check("target's logits", logits, [rows, vocab], logits.is_floating_point(), weight)
    _check("weight", weight, [steps, rows], weight.dtype == torch.float32, weight)
    if (target_ids is None) != (ids is None):
        raise ValueError("got target_ids or ids alone; expected both, or none where D = V; give both")
    for name, x, expected in (("target_ids", target_ids, [-1]), ("ids", ids, [vocab])):
        if x is not None:
            _check(name, x, expected, x.dtype == torch.int64, weight)
    if least is not None:
        _check("least", least, [rows], least.is_floating_point(), weight)
    how: dict[str, Any] = {"dtype": torch.float32, "device": logits.device}
    best, total = torch.empty(rows, dtype=torch.int64, device=logits.device), torch.empty(rows, **how)
    covered = None if target_ids is None else torch.empty(rows, **how)
    size, scale = vocab if target_ids is None else len(target_ids), 1.0 / temperature
    flags = {"STEPS": triton.next_power_of_2(steps), **_launch(vocab)}
    arguments = [
        logits,
        logits.stride(0),
        vocab,
        target_ids,
        ids,
        size,
        weight.contiguous(),
        steps,
        rows,
        least,
        scale,
        best,
        total,
        covered,
    ]
    with torch.cuda.device_of(logits):
        _target_distribution_kernel[(rows,)](*arguments, **flags)
    return TargetDistribution(logits, target_ids, scale, least, best, total, covered)


def with_gradients(
    logits: Tensor,
    target: TargetDistribution | None,
    text: Tensor | None,
    weight: Tensor,
    gradient_scale: Tensor,
    shares: Mapping[str, float],
    needs_grad: bool = True,
) -> StepLosses:
    """Σ share · loss of `draft` at each row; the drafter's logits become gradient_scale · its gradient by logits / T.

    A row of weight 0 is not read, whatever it contains; its gradient is 0. Hits of rows with a NaN are undefined.

    Args:
        logits: [K,m,D] of the drafter, float32, bfloat16 or float16, contiguous; overwritten if needs_grad.
        target: None for nll alone; a hit is then agreement with the text.
        text: [m] int64, draft ids of the text for nll, −1 where a token has none.
        weight: [K,m] float32.
        gradient_scale: [K,m] float32, with the 1/T.
        shares: the share of each loss by name.
        needs_grad: without it the logits stay as they are.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    steps, rows, size = logits.shape
    _check("logits", logits, [steps, rows, size], logits.is_contiguous() and logits.dtype in _KINDS, weight)
    for name, x in (("weight", weight), ("gradient_scale", gradient_scale)):
        _check(name, x, [steps, rows], x.dtype == torch.float32, weight)
    if text is not None:
        _check("text", text, [rows], text.dtype == torch.int64, weight)
    if (text is None and "nll" in shares) or (target is None and set(shares) != {"nll"}):
        raise ValueError(
            f"got {', '.join(shares)} without what it is compared with; expected text for nll, a target distribution for others; give it"
        )
    if target is not None and (len(target.logits), _size(target)) != (rows, size):
        raise ValueError(
            f"got a target distribution of {len(target.logits)} rows and {_size(target)} tokens; expected {rows} and {size}; match them"
        )
    kinds: dict[str, Any] = {name.upper(): 0.0 for name in ("ce", "kl", "nll", "reverse_kl", "tv", "lk", "lk_hybrid")}
    betas: list[tuple[float, ...]] = []
    for name, share in shares.items():
        if (beta := beta_of(name)) is None:
            kinds[name.upper()] = share
        else:
            betas.append((share, beta, math.log(beta), math.log1p(-beta)))
    kinds |= {"JSD": tuple(betas), "OF_P": bool(betas) or kinds["CE"] + kinds["KL"] > 0, "OF_Q": bool(betas) or kinds["REVERSE_KL"] > 0}
    kinds |= {"GRADIENT": needs_grad, **_launch(size)}
    loss = torch.zeros(steps, rows, dtype=torch.float32, device=logits.device)
    overlap, hits = torch.zeros_like(loss), torch.zeros_like(loss, dtype=torch.bool)
    arguments: list[Any] = [None, 0, None, None, None, None, text]
    if target is not None:
        arguments = [target.logits, target.logits.stride(0), target.target_ids, target.least, target.total, target.covered, target.best]
    scale = 1.0 if target is None else target.scale
    arguments = [logits, size, steps, rows, *arguments, text, weight.contiguous(), gradient_scale.contiguous(), scale, loss, overlap, hits]
    with torch.cuda.device_of(logits):
        _losses_kernel[(steps * rows,)](*arguments, **kinds)
    return StepLosses(loss, overlap, hits)


def _size(target: TargetDistribution) -> int:
    return target.logits.shape[1] if target.target_ids is None else len(target.target_ids)


def _launch(size: int) -> dict[str, Any]:
    block = min(_BLOCK, max(16, triton.next_power_of_2(size)))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def _check(name: str, x: Tensor, shape: list[int], fits: bool, weight: Tensor) -> None:
    """−1 in a shape stands for any length."""
    same = x.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, x.shape, strict=True))
    if not (same and fits and x.device == weight.device):
        raise ValueError(
            f"got {name} {list(x.shape)} {x.dtype} on {x.device}; expected {shape} on {weight.device}, of the documented type; convert it"
        )
