"""Losses between a drafter's law over its draft vocabulary and the target's, over K draft steps with one head and one teacher pass.

As in `losses`, positions go through the heads in chunks, no [M,V] ever exists, and gradients are made in the forward. The gradient of the
shared head is one buffer [D,H] for all K steps, hence their decay is an argument here and not the caller's business afterwards.

p is the target's law over V, q the drafter's over D, p̃ = p over D, renormalised, x the text's own token, and α = Σ_{v∈D} min(p, q), OOV
being a miss:

  kl          Σ p̃ log(p̃ / q)                 ce less the entropy of p̃
  ce          −Σ p̃ log q                     EAGLE-3 (Li et al. 2025, https://arxiv.org/abs/2503.01840)
  nll         −log q(x)                      the text, whatever the target says; 0 where x is OOV
  reverse_kl  Σ q log(q / p̃)                 GKD (Agarwal et al. 2023, https://arxiv.org/abs/2306.13649), β = 1
  jsd(β)      β KL(p̃‖m) + (1−β) KL(q‖m)      the same, 0 < β < 1, m = β p̃ + (1−β) q; jsd is jsd(0.5)
  tv          1 − α                          DistillSpec (Zhou et al. 2023, https://arxiv.org/abs/2310.08461)
  lk          −log α                         Samarin et al. 2026, https://arxiv.org/abs/2602.23881; of each position, not of the mean α
  lk_hybrid   w · kl + (1 − w) · tv          the same; w = exp(−ηα), η = 3, is a constant to the gradient

Those against p̃ are 0 where the target's best token is OOV (EAGLE-3's position mask), so is the kl in lk_hybrid; tv and lk are not.
Where α = 0, since a cut p may have no token in D, lk is infinite and without a gradient: it counts as 0.

A temperature T softens p and q in all of them, nll and α included; the gradient has the chain rule's 1/T, and no T² makes up for it as in
`losses.chunked_kl`. top_k cuts p to its k likeliest tokens of V, all that tie with the k-th included, and renormalises it.

Letters: K draft steps · M positions (rows and sequence flattened) · m of them in a chunk · V target vocabulary · D draft vocabulary · H hidden.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.inference.expand import ranked
from draftsmith.train.losses.chunked import (
    BUDGET,
    ChunkedHead,
    Head,
    aligned,
    by_row,
    chunk_rows,
    rows_to_visit,
    softened,
    summed_in_chunks,
)

ETA = 3.0  # how fast lk_hybrid goes over from KL to acceptance (Samarin et al. 2026)
FLOOR = -1e4  # least log-probability of the target: a token that is masked or cut has −inf, and 0 · inf is not a number


class DraftLosses(NamedTuple):
    """sum: Σ_k decay[k] · sums[k], a scalar to call backward on (once) · sums [K]: Σ weight · loss of each step, without a graph ·
    hits [K,M] bool: the drafter's best token is the target's best · overlap [K,M]: α, without a graph. Both are by row of hidden, and 0
    where weight is 0 or the teacher has no row."""

    sum: Tensor
    sums: Tensor
    hits: Tensor
    overlap: Tensor


def chunked_draft_loss(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    weights: Tensor,
    shifts: Sequence[int],
    targets: Tensor | None,
    loss: str | Mapping[str, float],
    decay: Sequence[float] | None = None,
    *,
    tokens: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    budget: int = BUDGET,
) -> DraftLosses:
    """Σ_k decay[k] · Σ_t weights[k,t] · loss(p_{t + shifts[k]}, q_{k,t}); loss is what `mix` reads, or what it returns.

    hidden [K,M,H] with head: weight [D,H] or callable -> logits [m,D] · teacher_hidden [M,·] with teacher_head -> logits [m,V] · weights
    [K,M] >= 0; a pair past the last row is dropped, and one that crosses from one document into another must have weight 0 · targets [D]
    int64: target ids in the order of the draft ids; None where D = V · decay: K factors, 1 by default · tokens [M] int64, for nll: the
    target's id of the token after each teacher row, any value where no weight asks for it · temperature, top_k (0: off): see above.
    Gradients go to hidden and to the head's weight, or to whatever leaves a callable head uses. Softmax and sums are in fp32 (fp64 for
    fp64 inputs).

    Raises:
        ValueError: shapes, lengths or vocabularies that do not fit, a negative shift, an unknown loss or a share that is not above 0, nll
            without tokens, a temperature that is not above 0, a negative top_k, or reverse_kl with top_k, which is infinite.
    """
    shares, terms = _terms(loss)
    decay = [1.0] * len(hidden) if decay is None else decay
    part = ChunkedHead(hidden.flatten(0, 1), head)
    with torch.no_grad():
        teacher = ChunkedHead(teacher_hidden, teacher_head)
    _check(hidden, teacher_hidden, weights, shifts, decay, targets, part.vocab_size, teacher.vocab_size)
    _check_laws([one for one, _ in terms], weights, tokens, temperature, top_k)
    rows, weight = aligned(weights.to(part.sum_dtype), shifts)
    rows = rows + weights.shape[1] * torch.arange(len(rows), device=rows.device)[:, None]
    counts = weight > 0
    factor = torch.tensor(decay, dtype=weight.dtype, device=weight.device)
    draft_ids = _draft_ids(targets, teacher.vocab_size, weight.device)
    text = None if tokens is None else draft_ids.index_select(0, torch.where(counts.any(0), tokens, 0))
    chunk = _Chunk(targets, draft_ids, temperature, top_k, shares, terms, part.wanted)
    losses_of = chunk.fused if part.fused else chunk.plain
    pull = weight * factor[:, None] / temperature
    hits, overlap = torch.zeros_like(counts), torch.zeros_like(weight)
    sums = torch.zeros_like(factor)

    def step(index: Tensor) -> Tensor:
        at, scale, used = rows[:, index], weight[:, index], counts[:, index]
        with torch.no_grad():
            raw = teacher.raw(index, used.any(0))
        logits = part.raw(at.flatten(), used.flatten()).unflatten(0, at.shape)
        values, alpha, hit, gradient = losses_of(raw, logits, None if text is None else text[index], scale, pull[:, index])
        hits[:, index], overlap[:, index] = hit & used, alpha * used
        found = (values * scale).sum(1)
        sums.add_(found)
        if part.wanted:
            part.backward(at.flatten(), gradient.flatten(0, 1))
        return (found * factor).sum()[None]

    # A chunk holds [m,V] of the teacher and [K,m,D] of the drafter.
    wide = max(teacher.vocab_size, len(hidden) * part.vocab_size)
    size = chunk_rows(weight.shape[1] * teacher.vocab_size // wide, wide, budget)
    total = summed_in_chunks([part], rows_to_visit(counts.any(0)), size, step)
    return DraftLosses(total[0], sums, by_row(hits, shifts), by_row(overlap, shifts))


def mix(text: str, key: str = "loss") -> dict[str, float]:
    """`kl`, `0.9 tv + 0.1 ce`, `0.5 jsd(0.1) + 0.5 tv` -> the share of each loss. Raises ValueError, naming the key, for anything else."""
    shares: dict[str, float] = {}
    for term in text.split("+"):
        found = re.fullmatch(r"\s*(?:(\d*\.?\d+)\s+)?(\S+)\s*", term)
        if not found or not _named(found[2]) or found[2] in shares or not float(found[1] or 1):
            raise ValueError(f"{key}={text!r}: expected {EXPECTED}")
        shares[found[2]] = float(found[1] or 1)
    return shares


def feature_loss(predicted: Tensor, actual: Tensor, weight: Tensor) -> Tensor:
    """Σ weight · mean over H of SmoothL1(predicted − actual), β = 1 (EAGLE-1, Li et al. 2024, https://arxiv.org/abs/2401.15077).

    predicted [M,H], actual [M,H] (no gradient), weight [M]. In fp32 (fp64 for fp64 inputs).
    """
    dtype = torch.float64 if predicted.dtype == torch.float64 else torch.float32
    gap = F.smooth_l1_loss(predicted.to(dtype), actual.detach().to(dtype), reduction="none")
    return (gap.mean(-1) * weight).sum()


@dataclass(eq=False)
class _Chunk:
    """What the chunks of one call have in common. Its methods take the teacher's logits [m,V], the drafter's [K,m,D], the draft ids of the
    text [m], weight and pull [K,m] -> the loss of each position, not weighted, α, hits, and pull · the gradient by logits / T [K,m,D]."""

    targets: Tensor | None
    draft_ids: Tensor
    temperature: float
    top_k: int
    shares: Mapping[str, float]
    terms: Sequence[tuple["Divergence", float]]
    wanted: bool

    def plain(self, raw: Tensor, logits: Tensor, text: Tensor | None, weight: Tensor, pull: Tensor) -> tuple[Tensor, ...]:
        raw, logits = raw.to(weight.dtype), logits.to(weight.dtype)
        best = self.draft_ids[ranked(raw, 1).squeeze(1)]
        hits = ranked(logits, 1).squeeze(2) == best
        log_p = _target_law(raw, self.targets, self.temperature, self.top_k)
        laws = _Laws(log_p, softened(logits, self.temperature), best >= 0, text)
        values, gradient = _mixed(laws, pull, self.terms)
        return values, laws.overlap, hits, gradient

    def fused(self, raw: Tensor, logits: Tensor, text: Tensor | None, weight: Tensor, pull: Tensor) -> tuple[Tensor, ...]:
        """In two launches; the gradient takes the place of the drafter's logits."""
        from draftsmith.train.losses.kernels import law, with_gradients

        least = _least(raw, self.top_k).squeeze(1) if self.top_k else None
        ids = None if self.targets is None else self.draft_ids
        teacher = law(raw, weight, self.targets, ids, self.temperature, least)
        return *with_gradients(logits, teacher, text, weight, pull, self.shares, self.wanted), logits


@dataclass(eq=False)
class _Laws:
    """The two laws of a chunk over the draft vocabulary: log p [m,D], not renormalised · log q [K,m,D] · whether the target's best token
    is of that vocabulary [m] · the draft id of the text's token [m], −1 where it has none."""

    log_p: Tensor
    log_q: Tensor
    known: Tensor
    text: Tensor | None

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def log_covered(self) -> Tensor:
        """log p̃ [m,D]."""
        return self.log_p.log_softmax(-1)

    @cached_property
    def covered(self) -> Tensor:
        """p̃ [m,D]."""
        return self.log_covered.exp()

    @cached_property
    def overlap(self) -> Tensor:
        """α [K,m]."""
        return torch.minimum(self.p, self.q).sum(-1)


# Laws and scale [K,m] -> the loss of each position [K,m], and scale · its gradient with respect to the drafter's logits [K,m,D].
Divergence = Callable[[_Laws, Tensor], tuple[Tensor, Tensor]]


def _cross_entropy(laws: _Laws, scale: Tensor) -> tuple[Tensor, Tensor]:
    # A product and a sum: autocast would take an einsum to half precision.
    values = -(laws.covered * laws.log_q).sum(-1)
    return values * laws.known, (laws.q - laws.covered).mul_((scale * laws.known)[..., None])


def _kl(laws: _Laws, scale: Tensor) -> tuple[Tensor, Tensor]:
    values, gradient = _cross_entropy(laws, scale)
    return values + (laws.covered * laws.log_covered).sum(-1) * laws.known, gradient


def _nll(laws: _Laws, scale: Tensor) -> tuple[Tensor, Tensor]:
    assert laws.text is not None
    known, right = laws.text >= 0, laws.text.clamp(min=0).expand(scale.shape)[..., None]
    scale = (scale * known)[..., None]
    return -laws.log_q.gather(-1, right).squeeze(-1) * known, (laws.q * scale).scatter_add_(-1, right, -scale)


def _reverse_kl(laws: _Laws, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _kl_of_q(laws, laws.log_covered, scale)


def _jensen_shannon(laws: _Laws, scale: Tensor, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    log_m = torch.logaddexp(laws.log_covered + math.log(beta), laws.log_q + math.log1p(-beta))
    of_p = (laws.covered * (laws.log_covered - log_m)).sum(-1) * laws.known
    # That m moves with q cancels between the two.
    of_q, gradient = _kl_of_q(laws, log_m, scale * (1 - beta))
    return beta * of_p + (1 - beta) * of_q, gradient


def _total_variation(laws: _Laws, scale: Tensor) -> tuple[Tensor, Tensor]:
    # Only entries below p move α.
    moved = torch.where(laws.log_q < laws.log_p, laws.q, 0)
    return 1 - laws.overlap, _through_softmax(laws.q, moved).mul_(scale[..., None])


def _lk(laws: _Laws, scale: Tensor) -> tuple[Tensor, Tensor]:
    # By logarithms: α may be below the least float, and the gradient, tv's divided by α, is between −1 and 1 all the same.
    overlap = torch.minimum(laws.log_p, laws.log_q).logsumexp(-1, keepdim=True)
    moved = torch.where(laws.log_q < laws.log_p, (laws.log_q - overlap).exp_(), 0)
    values = torch.where(overlap > FLOOR / 2, -overlap, 0).squeeze(-1)
    return values, _through_softmax(laws.q, moved).mul_(scale[..., None])


def _lk_hybrid(laws: _Laws, scale: Tensor) -> tuple[Tensor, Tensor]:
    share = (-ETA * laws.overlap).exp()
    return _mixed(laws, scale, [(_kl, share), (_total_variation, 1 - share)])


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
EXPECTED = f"one of {', '.join(LOSSES)}, jsd(β) with 0 < β < 1, or a mix such as `0.9 tv + 0.1 ce`"


def _named(name: str) -> Divergence | None:
    """The loss of that name, the parameter of `jsd(0.1)` included."""
    beta = beta_of(name)
    return LOSSES.get(name) if beta is None else partial(_jensen_shannon, beta=beta)


def beta_of(name: str) -> float | None:
    """β of `jsd` and `jsd(0.1)`; None for what is not one of these."""
    found = re.fullmatch(r"jsd\((\d*\.?\d+)\)", "jsd(0.5)" if name == "jsd" else name)
    return float(found[1]) if found and 0 < float(found[1]) < 1 else None


def _mixed(laws: _Laws, scale: Tensor, terms: Sequence[tuple[Divergence, Tensor | float]]) -> tuple[Tensor, Tensor]:
    """Σ share · loss, itself a Divergence of the laws and the scale; a share is a number or [K,m], a constant to the gradient."""
    (first, share), *rest = terms
    values, gradient = first(laws, scale * share)
    values = values * share
    for one, share in rest:
        more, its_gradient = one(laws, scale * share)
        values += more * share
        gradient += its_gradient
    return values, gradient


def _kl_of_q(laws: _Laws, log_other: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q ‖ other) as a Divergence has it, masked like those against p̃; other [K,m,D] is a constant to the gradient."""
    gap = laws.log_q - log_other
    values = (laws.q * gap).sum(-1)
    gradient = gap.sub_(values[..., None]).mul_(laws.q).mul_((scale * laws.known)[..., None])
    return values * laws.known, gradient


def _through_softmax(q: Tensor, moved: Tensor) -> Tensor:
    """−d/dlogits of Σ c·q, for moved = c·q with c constant: q · Σ moved − moved."""
    return (q * moved.sum(-1, keepdim=True)).sub_(moved)


def _target_law(raw: Tensor, targets: Tensor | None, temperature: float, top_k: int) -> Tensor:
    """The teacher's logits [m,V] -> its softened and cut log-probabilities at the draft vocabulary [m,D], not renormalised there."""
    if top_k:
        raw = raw.masked_fill(raw < _least(raw, top_k), -torch.inf)
    raw = raw if temperature == 1 else raw / temperature
    kept = raw if targets is None else raw.index_select(1, targets)
    return (kept - raw.logsumexp(-1, keepdim=True)).clamp_(min=FLOOR)


def _least(raw: Tensor, top_k: int) -> Tensor:
    """[m,1]: the k-th best logit of each row, the least that a cut keeps."""
    return raw.gather(1, ranked(raw, min(top_k, raw.shape[1]))[:, -1:])


def _draft_ids(targets: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """[V]: the draft id of each token, −1 where it has none."""
    ids = torch.arange(vocab_size, device=device)
    return ids if targets is None else torch.full_like(ids, -1).index_copy_(0, targets, ids[: len(targets)])


def _terms(loss: str | Mapping[str, float]) -> tuple[Mapping[str, float], list[tuple[Divergence, float]]]:
    """The share of each loss, by name and by function."""
    shares = mix(loss) if isinstance(loss, str) else loss
    terms = [(one, share) for name, share in shares.items() if share > 0 and (one := _named(name))]
    if not terms or len(terms) < len(shares):
        raise ValueError(f"got the loss {loss!r}; expected {EXPECTED}, with shares above 0")
    return shares, terms


def _check(
    hidden: Tensor,
    teacher_hidden: Tensor,
    weights: Tensor,
    shifts: Sequence[int],
    decay: Sequence[float],
    targets: Tensor | None,
    draft_size: int,
    vocab_size: int,
) -> None:
    if not len(hidden) == len(shifts) == len(decay) or weights.shape != hidden.shape[:2] or min(shifts, default=-1) < 0:
        raise ValueError(
            f"got hidden {list(hidden.shape)}, weights {list(weights.shape)}, shifts {list(shifts)} and decay {list(decay)}; "
            "expected [K,M,H], [K,M], and K of each with shifts >= 0"
        )
    if len(teacher_hidden) != hidden.shape[1] or draft_size != (vocab_size if targets is None else len(targets)):
        raise ValueError(
            f"got {hidden.shape[1]} positions and {len(teacher_hidden)} of the teacher, a head of {draft_size} tokens, "
            f"{'no' if targets is None else len(targets)} target ids and V = {vocab_size}; expected as many positions, and a target id "
            "for each token of the head (none where D = V)"
        )


def _check_laws(divergences: Sequence[Divergence], weights: Tensor, tokens: Tensor | None, temperature: float, top_k: int) -> None:
    if temperature <= 0 or top_k < 0:
        raise ValueError(f"got temperature {temperature} and top_k {top_k}; expected one above 0, and 0 (off) or more")
    if top_k and _reverse_kl in divergences:
        raise ValueError(f"got reverse_kl with top_k {top_k}; it is infinite where p is cut and q is not: take jsd, or top_k 0")
    if tokens is None and _nll in divergences:
        raise ValueError("got nll without tokens; expected [M], the token that follows each teacher row")
    if tokens is not None and tokens.shape != weights.shape[1:]:
        raise ValueError(f"got tokens {list(tokens.shape)} for weights {list(weights.shape)}; expected one for each position")
