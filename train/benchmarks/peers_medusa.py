"""Medusa-1 as its authors train it (Cai et al. 2024, https://arxiv.org/abs/2401.10774, and the settings of their repository), for peers.py.

Letters: B rows of a batch · S positions · V vocabulary · H hidden size · K heads.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftsmith.models.medusa import MedusaModel
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, medusa, publish, setup
from draftsmith.train.eagle import EagleRecipe
from draftsmith.train.engine import output
from draftsmith.train.losses.chunked import chunked_cross_entropy
from draftsmith.train.medusa import MedusaRecipe, MedusaSection
from draftsmith.train.objective import Batch, Loss, supervised_tokens

HEADS, DECAY = 4, 0.8


def train(base: EagleRecipe, run: Path, seed: int, steps: int, precision: str) -> None:
    """Train heads by the authors' objective in our loop, on the data and features of `base`."""
    chosen = recipe_like(base, {"output": str(run), "steps": steps, "seed": seed, "precision": precision})
    target, corpora = setup.load_target_and_data(chosen)
    with output.claimed(chosen):
        heads, sequences, valid = setup.new_drafter_and_data(chosen, "medusa", target, corpora, **medusa.architecture(chosen.medusa))
        fingerprint = setup.fingerprint(chosen, target, sequences)
        _, done = loop.fit(chosen, heads, partial(objective, target=target), sequences, valid, fingerprint)
        publish.publish_drafter(chosen, heads, target, done)


def recipe_like(base: EagleRecipe, run: dict[str, Any]) -> MedusaRecipe:
    """AdamW without weight decay, a learning rate of 1e-3 after a tenth of the steps, then cosine. Each head has one residual block, and an
    output layer that starts as the target's head.

    Args:
        base: its data, its features and the rest of its training are taken.
        run: keys of the training: output, steps, seed, precision.
    """
    settings = run | {"micro_batch_size": None, "normalise": "supervised"}  # `objective` counts supervised tokens
    settings |= {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    settings |= {"warmup_steps": run["steps"] // 10, "schedule": "cosine", "min_lr": 0.0}
    data = {"target": base.target, "data": base.data, "features": base.features}
    section = MedusaSection(heads=HEADS, decay=DECAY)
    return MedusaRecipe(**data, train=base.train.model_copy(update=settings), medusa=section)


def objective(drafter: MedusaModel, batch: Batch, *, target: Target) -> Loss:
    """Σ_k 0.8^k · mean_t CE(head_k(h_t), x_{t+2+k}).

    The mean of head k is over the tokens of the batch that it predicts: supervised ones, in the document of t. h [B,S,H] is the target's hidden
    state after its final norm.
    """
    ids, mask, document = batch["input_ids"], batch["loss_mask"], batch["document"]
    hidden, weight = target.features(batch).hidden.flatten(0, 1), supervised_tokens(batch)
    means = []
    for k in range(HEADS):
        counted, tokens = shift_left(mask, k + 2, document).flatten(), shift_left(ids, k + 2, document).flatten()
        loss = chunked_cross_entropy(drafter.hidden_of(k, hidden), drafter.output(k), tokens, counted.float())
        means.append(DECAY**k * loss.sum / counted.sum().clamp(min=1))
    return Loss(torch.stack(means).sum() * weight, weight)  # a step is one batch, and the loop divides by its weight
