"""Losses between the draft distribution and the target distribution, over K draft steps that share one head and one target pass.

As in `chunked`, positions go through the heads in chunks, no [M,V] ever exists, and gradients are computed in the forward. The gradient of
the shared head is one buffer [D,H] for all K steps; their decay is therefore an argument here.

p is the target distribution over V, q the draft distribution over D, p̃ = p over D, renormalised, x the text's own token, and
α = Σ_{v∈D} min(p, q), an OOV token being a miss:

  kl          Σ p̃ log(p̃ / q)                 ce less the entropy of p̃
  ce          −Σ p̃ log q                     EAGLE-3 (Li et al. 2025, https://arxiv.org/abs/2503.01840)
  nll         −log q(x)                      the text, whatever the target says; 0 where x is OOV
  reverse_kl  Σ q log(q / p̃)                 GKD (Agarwal et al. 2023, https://arxiv.org/abs/2306.13649), β = 1
  jsd(β)      β KL(p̃‖m) + (1−β) KL(q‖m)      the same, 0 < β < 1, m = β p̃ + (1−β) q; jsd is jsd(0.5)
  tv          1 − α                          DistillSpec (Zhou et al. 2023, https://arxiv.org/abs/2310.08461)
  lk          −log α                         Samarin et al. 2026, https://arxiv.org/abs/2602.23881; of each position, not of the mean α
  lk_hybrid   w · kl + (1 − w) · tv          the same; w = exp(−ηα), η = 3, is a constant to the gradient

The losses against p̃, and the kl in lk_hybrid, are 0 where the target's best token is OOV (EAGLE-3's position mask); tv and lk are not.
Where α = 0, since a top-k cut may leave p no token in D, lk is infinite and has no gradient: it counts as 0.

A temperature T softens p and q in all losses, nll and α included. The gradient has the chain rule's 1/T; no T² makes up
for it. top_k cuts p to its k likeliest tokens of V, with all that tie with the k-th, and renormalises it.

Letters: K draft steps, M positions (batch and sequence flattened), m of them in a chunk, V target vocabulary, D draft vocabulary, H hidden.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.inference.sampler import best_token, on_host
from draftsmith.train.losses.chunked import (
    ChunkedHead,
    Head,
    aligned,
    by_row,
    chunk_rows,
    cut,
    least_of,
    pieces,
    rows_to_visit,
    summed_in_chunks,
)
from draftsmith.train.losses.mixture import ETA, EXPECTED, FLOOR, beta_of, mix

__all__ = ["LOSSES", "DraftLosses", "chunked_draft_loss", "feature_loss", "mix"]


class DraftLosses(NamedTuple):
    """The loss of K steps, and how well each position did; `hits`, `overlap` and `losses` are 0 where the weight is 0 or there is no row.

    Attributes:
        sum: Σ_k decay[k] · sums[k], a scalar to call backward on, once.
        sums: [K], Σ weight · loss of each step, without a graph.
        hits: [K,M] bool by row of hidden: the drafter's best token is the target's best.
        overlap: [K,M] by row of hidden: α, without a graph.
        losses: [K,M] by row of hidden: the loss of each position, without weight and without a graph.
    """

    sum: Tensor
    sums: Tensor
    hits: Tensor
    overlap: Tensor
    losses: Tensor


def chunked_draft_loss(
    hidden: Tensor,
    head: Head,
    target_hidden: Tensor,
    target_head: Head,
    weights: Tensor,
    shifts: Sequence[int],
    target_ids: Tensor | None,
    loss: str | Mapping[str, float],
    decay: Sequence[float] | None = None,
    *,
    tokens: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    budget: int | None = None,
) -> DraftLosses:
    """Σ_k decay[k] · Σ_t weights[k,t] · loss(p_{t + shifts[k]}, q_{k,t}).

    Gradients go to `hidden` and to the head, as in `chunked_cross_entropy`. Softmax and sums are in fp32 (fp64 for fp64 inputs).

    Args:
        hidden, target_hidden: [K,M,H] and [M,·], with `head` (weight [D,H], or a callable to logits [m,D]) and `target_head`.
        weights: [K,M] ≥ 0. A pair past the last row is dropped; a pair that crosses into another document must have weight 0.
        shifts: K numbers ≥ 0. Row t of step k is compared with the target's row t + shifts[k].
        target_ids: [D] int64, target ids in the order of the draft ids; None where D = V.
        loss, decay: what `mix` reads or returns; K factors, 1 by default.
        tokens: [M] int64, for nll: the token after each row of the target.
        temperature, top_k, budget: see above; top_k 0 is off; logits in one chunk, at most.

    Raises:
        ValueError: shapes that do not fit, a loss, share, shift, temperature or top_k out of range, nll without tokens, or reverse_kl
            with top_k, which is infinite.
    """
    shares, terms = _terms(loss)
    decay = [1.0] * len(hidden) if decay is None else decay
    part = ChunkedHead(hidden.flatten(0, 1), head)
    with torch.no_grad():
        target = ChunkedHead(target_hidden, target_head)
    _check(hidden, target_hidden, weights, shifts, decay, target_ids, part.vocab_size, target.vocab_size)
    _check_options([divergence for divergence, _ in terms], weights, tokens, temperature, top_k)
    rows, weight = aligned(weights.to(part.sum_dtype), shifts)
    rows = rows + weights.shape[1] * torch.arange(len(rows), device=rows.device)[:, None]
    used = weight > 0
    factor = torch.tensor(decay, dtype=weight.dtype, device=weight.device)
    draft_ids = _draft_ids(target_ids, target.vocab_size, weight.device)
    text = None if tokens is None else draft_ids.index_select(0, torch.where(used.any(0), tokens, 0))
    chunk = _Chunk(target_ids, draft_ids, temperature, top_k, shares, terms, part.needs_grad)
    losses_of = chunk.fused if part.fused else chunk.plain
    gradient_scale = weight * factor[:, None] / temperature
    hits, overlap, each = torch.zeros_like(used), torch.zeros_like(weight), torch.zeros_like(weight)
    sums = torch.zeros_like(factor)

    def step(index: Tensor) -> Tensor:
        row, scale, supervised = rows[:, index], weight[:, index], used[:, index]
        with torch.no_grad():
            raw = target.raw(index, supervised.any(0))
        logits = part.raw(row.flatten(), supervised.flatten()).unflatten(0, row.shape)
        values, alpha, hit, gradient = losses_of(raw, logits, None if text is None else text[index], scale, gradient_scale[:, index])
        hits[:, index], overlap[:, index], each[:, index] = hit & supervised, alpha * supervised, values * supervised
        step_sums = (values * scale).sum(1)
        sums.add_(step_sums)
        if part.needs_grad:
            part.backward(row.flatten(), gradient.flatten(0, 1))
        return (step_sums * factor).sum()[None]

    # A chunk holds [m,V] of the target and [K,m,D] of the drafter.
    wide = max(target.vocab_size, len(hidden) * part.vocab_size)
    size = chunk_rows(weight.shape[1] * target.vocab_size // wide, wide, on_host(weight), budget)
    total = summed_in_chunks([part], rows_to_visit(used.any(0)), size, step)
    return DraftLosses(total[0], sums, *(by_row(of_row, shifts) for of_row in (hits, overlap, each)))


def feature_loss(predicted: Tensor, actual: Tensor, weight: Tensor) -> Tensor:
    """Σ weight · mean over H of SmoothL1(predicted − actual), β = 1 (EAGLE-1, Li et al. 2024, https://arxiv.org/abs/2401.15077).

    predicted [M,H], actual [M,H] (no gradient), weight [M]. In fp32 (fp64 for fp64 inputs).
    """
    dtype = torch.float64 if predicted.dtype == torch.float64 else torch.float32
    gap = F.smooth_l1_loss(predicted.to(dtype), actual.detach().to(dtype), reduction="none")
    return (gap.mean(-1) * weight).sum()


@dataclass(eq=False)
class _Chunk:
    """What the chunks of one call have in common.

    Both methods take the target's logits [m,V], the drafter's logits [K,m,D], the draft ids of the text [m], weight and gradient_scale
    [K,m]. They return the unweighted loss [K,m], α [K,m], hits [K,m], and gradient_scale · the gradient by logits / T [K,m,D].
    """

    target_ids: Tensor | None
    draft_ids: Tensor
    temperature: float
    top_k: int
    shares: Mapping[str, float]
    terms: Sequence[tuple["Divergence", float]]
    needs_grad: bool

    def plain(self, raw: Tensor, logits: Tensor, text: Tensor | None, weight: Tensor, gradient_scale: Tensor) -> tuple[Tensor, ...]:
        results = values, overlap, hits = torch.empty_like(weight), torch.empty_like(weight), torch.empty_like(weight, dtype=torch.bool)
        gradient = torch.empty_like(logits)
        for rows in pieces(raw):
            own_text = None if text is None else text[rows]
            piece = self._piece(raw[rows], logits[:, rows], own_text, weight.dtype, gradient_scale[:, rows])
            for result, part in zip((*results, gradient), piece, strict=True):
                result[:, rows] = part
        return values, overlap, hits, gradient

    def _piece(self, raw: Tensor, logits: Tensor, text: Tensor | None, dtype: torch.dtype, gradient_scale: Tensor) -> tuple[Tensor, ...]:
        raw, logits = raw.to(dtype), logits.to(dtype)
        best = self.draft_ids[best_token(raw)]
        hits = best_token(logits) == best
        log_p = _target_log_probs(raw, self.target_ids, self.temperature, self.top_k)
        complete = self.target_ids is None and not self.top_k
        pair = _Distributions(log_p, _softened(logits, self.temperature), best >= 0, text, complete)
        values, gradient = _mixed(pair, gradient_scale, self.terms)
        return values, pair.overlap, hits, gradient

    def fused(self, raw: Tensor, logits: Tensor, text: Tensor | None, weight: Tensor, gradient_scale: Tensor) -> tuple[Tensor, ...]:
        """The same in two kernel launches; the gradient overwrites the drafter's logits."""
        from draftsmith.train.losses.kernels import target_distribution, with_gradients

        least = least_of(raw, self.top_k).squeeze(1) if self.top_k else None
        ids = None if self.target_ids is None else self.draft_ids
        target = target_distribution(raw, weight, self.target_ids, ids, self.temperature, least)
        return *with_gradients(logits, target, text, weight, gradient_scale, self.shares, self.needs_grad), logits


@dataclass(eq=False)
class _Distributions:
    """The two distributions of a chunk over the draft vocabulary.

    Attributes:
        log_p: [m,D], not renormalised.
        log_q: [K,m,D].
        known: [m] bool, whether the target's best token is in the draft vocabulary.
        text: [m], the draft id of the text's token, −1 where it has none.
        complete: p has all tokens of the target, so that p̃ = p.
    """

    log_p: Tensor
    log_q: Tensor
    known: Tensor
    text: Tensor | None
    complete: bool

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def log_covered(self) -> Tensor:
        """log p̃ [m,D]."""
        return self.log_p if self.complete else self.log_p.log_softmax(-1)

    @cached_property
    def covered(self) -> Tensor:
        """p̃ [m,D]."""
        return self.p if self.complete else self.log_covered.exp()

    @cached_property
    def overlap(self) -> Tensor:
        """α [K,m]."""
        return torch.minimum(self.p, self.q).sum(-1)


# (distributions, scale [K,m]) -> the loss of each position [K,m], and scale · its gradient by the drafter's logits [K,m,D].
Divergence = Callable[[_Distributions, Tensor], tuple[Tensor, Tensor]]


def _cross_entropy(pair: _Distributions, scale: Tensor) -> tuple[Tensor, Tensor]:
    # Multiply and sum: autocast would run an einsum in half precision.
    values = -(pair.covered * pair.log_q).sum(-1)
    return values * pair.known, (pair.q - pair.covered).mul_((scale * pair.known)[..., None])


def _kl(pair: _Distributions, scale: Tensor) -> tuple[Tensor, Tensor]:
    values, gradient = _cross_entropy(pair, scale)
    return values + (pair.covered * pair.log_covered).sum(-1) * pair.known, gradient


def _nll(pair: _Distributions, scale: Tensor) -> tuple[Tensor, Tensor]:
    assert pair.text is not None
    known, right = pair.text >= 0, pair.text.clamp(min=0).expand(scale.shape)[..., None]
    scale = (scale * known)[..., None]
    return -pair.log_q.gather(-1, right).squeeze(-1) * known, (pair.q * scale).scatter_add_(-1, right, -scale)


def _reverse_kl(pair: _Distributions, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _kl_of_q(pair, pair.log_covered, scale)


def _jensen_shannon(pair: _Distributions, scale: Tensor, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    log_m = torch.logaddexp(pair.log_covered + math.log(beta), pair.log_q + math.log1p(-beta))
    of_p = (pair.covered * (pair.log_covered - log_m)).sum(-1) * pair.known
    # The derivative of m by q cancels between the two terms.
    of_q, gradient = _kl_of_q(pair, log_m, scale * (1 - beta))
    return beta * of_p + (1 - beta) * of_q, gradient


def _total_variation(pair: _Distributions, scale: Tensor) -> tuple[Tensor, Tensor]:
    below = _is_below(pair).mul_(pair.q)
    return 1 - pair.overlap, _through_softmax(pair.q, below).mul_(scale[..., None])


def _lk(pair: _Distributions, scale: Tensor) -> tuple[Tensor, Tensor]:
    # In logarithms: α may underflow, while the gradient (tv's divided by α) stays between −1 and 1.
    overlap = torch.minimum(pair.log_p, pair.log_q).logsumexp(-1, keepdim=True)
    below = _is_below(pair).mul_((pair.log_q - overlap).clamp_(max=0).exp_())
    values = torch.where(overlap > FLOOR / 2, -overlap, 0).squeeze(-1)
    return values, _through_softmax(pair.q, below).mul_(scale[..., None])


def _lk_hybrid(pair: _Distributions, scale: Tensor) -> tuple[Tensor, Tensor]:
    share = (-ETA * pair.overlap).exp()
    return _mixed(pair, scale, [(_kl, share), (_total_variation, 1 - share)])


LOSSES: dict[str, Divergence] = {
    "kl": _kl,
    "ce": _cross_entropy,
    "nll": _nll,
    "reverse_kl": _reverse_kl,
    "jsd": _jensen_shannon,
    "tv": _total_variation,
    "lk": _lk,
    "lk_hybrid": _lk_hybrid,
}


def _named(name: str) -> Divergence | None:
    """The loss of that name, with the parameter of `jsd(0.1)` applied."""
    beta = beta_of(name)
    return LOSSES.get(name) if beta is None else partial(_jensen_shannon, beta=beta)


def _mixed(pair: _Distributions, scale: Tensor, terms: Sequence[tuple[Divergence, Tensor | float]]) -> tuple[Tensor, Tensor]:
    """Σ share · loss, itself a Divergence; a share is a number or [K,m], and a constant to the gradient."""
    (first, share), *rest = terms
    values, gradient = first(pair, scale * share)
    values = values * share
    for divergence, share in rest:
        more, its_gradient = divergence(pair, scale * share)
        values += more * share
        gradient += its_gradient
    return values, gradient


def _kl_of_q(pair: _Distributions, log_reference: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q ‖ reference) as a Divergence, masked like those against p̃; the reference [K,m,D] is a constant to the gradient."""
    gap = pair.log_q - log_reference
    values = (pair.q * gap).sum(-1)
    gradient = gap.sub_(values[..., None]).mul_(pair.q).mul_((scale * pair.known)[..., None])
    return values * pair.known, gradient


def _is_below(pair: _Distributions) -> Tensor:
    """1 where q < p, the entries that α depends on, else 0 [K,m,D]. By arithmetic: an irregular mask takes a CPU ten times as long."""
    return (pair.log_p - pair.log_q).sign_().clamp_(min=0)


def _through_softmax(q: Tensor, below: Tensor) -> Tensor:
    """−d/dlogits of Σ c·q, for below = c·q with c constant: q · Σ below − below."""
    return (q * below.sum(-1, keepdim=True)).sub_(below)


def _softened(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), of masked tokens FLOOR."""
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1).clamp_(min=FLOOR)


def _target_log_probs(raw: Tensor, target_ids: Tensor | None, temperature: float, top_k: int) -> Tensor:
    """Softened and cut log-probabilities of the target at the draft vocabulary [m,D], not renormalised, from its logits [m,V]."""
    raw = cut(raw, top_k)
    raw = raw if temperature == 1 else raw / temperature
    drafted = raw if target_ids is None else raw.index_select(1, target_ids)
    return (drafted - raw.logsumexp(-1, keepdim=True)).clamp_(min=FLOOR)


def _draft_ids(target_ids: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """Draft id of each target token [V], −1 where it has none."""
    ids = torch.arange(vocab_size, device=device)
    return ids if target_ids is None else torch.full_like(ids, -1).index_copy_(0, target_ids, ids[: len(target_ids)])


def _terms(loss: str | Mapping[str, float]) -> tuple[Mapping[str, float], list[tuple[Divergence, float]]]:
    """The share of each loss, by name and by function. Raises ValueError for an unknown loss or a share that is not positive."""
    shares = mix(loss) if isinstance(loss, str) else loss
    terms = [(divergence, share) for name, share in shares.items() if share > 0 and (divergence := _named(name))]
    if not terms or len(terms) < len(shares):
        raise ValueError(f"got the loss {loss!r}; expected {EXPECTED}, with shares above 0")
    return shares, terms


def _check(
    hidden: Tensor,
    target_hidden: Tensor,
    weights: Tensor,
    shifts: Sequence[int],
    decay: Sequence[float],
    target_ids: Tensor | None,
    draft_size: int,
    vocab_size: int,
) -> None:
    if not len(hidden) == len(shifts) == len(decay) or weights.shape != hidden.shape[:2] or min(shifts, default=-1) < 0:
        raise ValueError(
            f"got hidden {list(hidden.shape)}, weights {list(weights.shape)}, shifts {list(shifts)} and decay {list(decay)}; "
            "expected [K,M,H], [K,M], and K of each with shifts >= 0"
        )
    if len(target_hidden) != hidden.shape[1] or draft_size != (vocab_size if target_ids is None else len(target_ids)):
        raise ValueError(
            f"got {hidden.shape[1]} positions and {len(target_hidden)} of the target, a head of {draft_size} tokens, "
            f"{'no' if target_ids is None else len(target_ids)} target ids and V = {vocab_size}; expected as many positions, and a target id "
            "for each token of the head (none where D = V)"
        )


def _check_options(divergences: Sequence[Divergence], weights: Tensor, tokens: Tensor | None, temperature: float, top_k: int) -> None:
    if temperature <= 0 or top_k < 0:
        raise ValueError(f"got temperature {temperature} and top_k {top_k}; expected one above 0, and 0 (off) or more")
    if top_k and _reverse_kl in divergences:
        raise ValueError(f"got reverse_kl with top_k {top_k}; it is infinite where p is cut and q is not: take jsd, or top_k 0")
    if tokens is None and _nll in divergences:
        raise ValueError("got nll without tokens; expected [M], the token that follows each target row")
    if tokens is not None and tokens.shape != weights.shape[1:]:
        raise ValueError(f"got tokens {list(tokens.shape)} for weights {list(weights.shape)}; expected one for each position")
