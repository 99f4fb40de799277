"""Fit a drafter's confidence on held-out sequences, after training: `inference/confidence.py` says what it is.

Letters: n chains · S positions of a document · R roots · K draft depth · V target vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from draftsmith.inference.confidence import FEATURES, features
from draftsmith.inference.drafter import TargetOutput
from draftsmith.models.drafter import DrafterModel
from draftsmith.models.target import Target
from draftsmith.train.engine.say import say
from draftsmith.train.losses.calibration import fit_confidence, survival_errors
from draftsmith.train.objective import Batch, SequenceDataset

__all__ = ["fit"]

CHAINS = 2048  # from which six numbers for each depth are fitted, and as many to say the errors on
AT_ONCE = 32  # chains whose logits [32,K,V] exist at a time


@torch.no_grad()
def fit(drafter: DrafterModel, target: Target, valid: SequenceDataset) -> None:
    """Fit the drafter's `confidence_weights` on half of the documents, and say the errors of the survival that they predict on the rest.

    Where all processes would have to run the target at once, nothing is fitted.
    """
    if target.collective:
        return
    torch.nn.Module.to(drafter.eval(), target.device)  # FSDP2 and DeepSpeed leave it on the CPU
    halves: tuple[list[Tensor], list[Tensor]] = ([], [])
    sizes = [0, 0]
    for number in range(len(valid)):
        batch = {name: tensor.to(target.device) for name, tensor in valid.batch(torch.tensor([number])).items()}
        for chains in _documents(drafter, target, batch):
            half = sizes.index(min(sizes))
            halves[half].append(chains)
            sizes[half] += len(chains)
        if min(sizes) >= CHAINS:
            break
    if not min(sizes):
        return
    fitting, held_out = (torch.cat(half).split((FEATURES, 1, 1, 1), -1) for half in halves)
    weights, errors = {}, []
    for name, column in (("greedy", 2), ("sampled", 1)):
        w = fit_confidence(fitting[0], fitting[column].squeeze(-1), fitting[3].squeeze(-1) > 0)
        weights[name] = w.tolist()
        odds = (held_out[0] * w).sum(-1)
        each = survival_errors(odds, held_out[column].squeeze(-1), held_out[3].squeeze(-1) > 0, [1.0] * len(w))
        errors.append(f"{name} " + ", ".join(f"{error:.3f}" for error in each))
    drafter.config.confidence_weights = weights
    say(f"confidence: expected calibration error of survival at depth 1 … {drafter.depth_limit}: {'; '.join(errors)}")


def _documents(drafter: DrafterModel, target: Target, batch: Batch) -> Iterator[Tensor]:
    """The chains of each document of a batch [n,K,6]: features of q, α, whether p and q have the same best token, whether all tokens down
    to this depth are supervised; float64."""
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
                overlap = torch.minimum(logits.softmax(-1), actual.softmax(-1)).sum(-1)
                agree = logits.argmax(-1) == actual.argmax(-1)
                columns = (overlap[..., None], agree[..., None], counted[..., None])
                parts.append(torch.cat([column.double() for column in (features(logits), *columns)], -1))
            if parts:
                yield torch.cat(parts)
