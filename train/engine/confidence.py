"""Fit a drafter's confidence on held-out sequences, after training: `inference/confidence.py` says what it is.

Letters: n chains · S positions of a document · R roots · K draft depth · V target vocabulary · C ways to choose drafts (CHILDREN).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.confidence import CHILDREN, features
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.sampler import best_token, gumbel
from draftsmith.models.drafter import DrafterModel
from draftsmith.models.target import Target
from draftsmith.train.engine.order import drawn_rows
from draftsmith.train.engine.say import say
from draftsmith.train.losses.calibration import fit_confidence, survival_errors
from draftsmith.train.objective import Batch, SequenceDataset

__all__ = ["fit"]

CHAINS = 2048  # to fit on, three numbers for each depth and each of CHILDREN, and as many to measure the errors on
AT_ONCE = 32  # chains whose logits [32,K,V] exist at a time


@dataclass(frozen=True, slots=True)
class Chains:
    """Positions to draft from, along held-out text.

    Attributes:
        features: of q, [n,K,3] float64.
        accepted: [n,K,C] float64, the probability that the draft is accepted, for each of CHILDREN; for "greedy" and "shared-noise" it is 0 or 1.
        counted: whether all tokens down to this depth are supervised, [n,K] bool.
    """

    features: Tensor
    accepted: Tensor
    counted: Tensor

    def __len__(self) -> int:
        return len(self.features)


@torch.no_grad()
def fit(drafter: DrafterModel, target: Target, valid: SequenceDataset) -> None:
    """Fit the drafter's `confidence_weights` on half of the documents, and say the errors of the survival that they predict on the rest.

    Where all processes would have to run the target at once, nothing is fitted.
    """
    if target.collective:
        return
    torch.nn.Module.to(drafter.eval(), target.device)  # FSDP2 and DeepSpeed leave it on the CPU
    halves: tuple[list[Chains], list[Chains]] = ([], [])
    sizes = [0, 0]
    for row in drawn_rows(len(valid)).split(1):
        batch = {name: tensor.to(target.device) for name, tensor in valid.batch(row).items()}
        for chains in _chains(drafter, target, batch):
            half = sizes.index(min(sizes))
            halves[half].append(chains)
            sizes[half] += len(chains)
        if min(sizes) >= CHAINS:
            break
    if not min(sizes):
        return
    fitting, held_out = _join(halves[0]), _join(halves[1])
    weights, errors = {}, []
    for i, name in enumerate(CHILDREN):
        w = fit_confidence(fitting.features, fitting.accepted[..., i], fitting.counted)
        weights[name] = w.tolist()
        each = survival_errors((held_out.features * w).sum(-1), held_out.accepted[..., i], held_out.counted, [1.0] * len(w))
        errors.append(f"{name} " + ", ".join(f"{error:.3f}" for error in each))
    drafter.config.confidence_weights = weights
    say(f"confidence: expected calibration error of survival at depth 1 … {drafter.depth_limit}: {'; '.join(errors)}")


def _join(parts: list[Chains]) -> Chains:
    return Chains(*(torch.cat([getattr(part, name) for part in parts]) for name in ("features", "accepted", "counted")))


def _chains(drafter: DrafterModel, target: Target, batch: Batch) -> Iterator[Chains]:
    """The chains of each document of a batch that has any."""
    out, ahead = target.features(batch, drafter.taps), torch.arange(drafter.depth_limit, device=target.device)
    for row, documents in enumerate(batch["document"]):
        for number in documents.unique().tolist():
            at = (documents == number).nonzero().squeeze(1)
            if number < 0 or len(at) < drafter.depth_limit + 2:
                continue
            along = TargetOutput(out.hidden[row, at][None], None if out.taps is None else out.taps[row, at][None])
            own, mask = drafter.position_features(batch["input_ids"][row, at], along), batch["loss_mask"][row, at]
            parts = []
            for roots in torch.arange(1, len(at) - drafter.depth_limit, device=at.device).split(AT_ONCE):
                drafted = roots[:, None] + ahead  # [R,K], the positions before the drafted tokens
                counted = (mask[drafted + 1] > 0).long().cumprod(1)
                if not counted.any():
                    continue
                logits, actual = drafter.position_logits(own, roots).float(), target.logits(along.hidden[0, drafted]).float()
                parts.append(Chains(features(logits).double(), accepted(actual, logits, drafted), counted > 0))
            if parts:
                yield _join(parts)


def accepted(p: Tensor, q: Tensor, index: Tensor) -> Tensor:
    """The probability that a draft is accepted, by logits p and q [...,V]; the noise is that of `index` [...] -> [...,C] float64, by CHILDREN."""
    best, noise = best_token(q), gumbel(0, torch.zeros_like(index), index, q.shape[-1])
    p_probs, q_probs = p.softmax(-1), q.softmax(-1)
    chances = (
        best == best_token(p),
        p_probs.gather(-1, best[..., None])[..., 0],
        best_token(p + noise) == best_token(q + noise),
        torch.minimum(p_probs, q_probs).sum(-1),
    )
    return torch.stack([chance.double() for chance in chances], -1)
