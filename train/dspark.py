"""Train a DSpark drafter (DeepSeek 2026, DeepSpec) on a frozen target: DFlash's block, a Markov head and a confidence.

draftsmith train dspark dspark-tiny
accelerate launch train/dspark.py recipes/dspark-tiny.yaml dspark.confidence=0.3 tree.width=1
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, load


class DsparkSection(Section):
    """the drafter and its loss"""

    taps: tuple[int, ...] | None = Field(
        default=None,
        description="decoder layers of the target, counted from 0, whose outputs are read; unset: 1, L/2−1, L−4 of its L layers (the paper: five)",
    )
    block_size: int = Field(default=7, ge=1, le=64, description="K, rows of a block, each of which drafts a token")
    causal: bool = Field(default=False, description="a row of a block sees no later row of it")
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="token of the target whose embedding stands for a mask, as vLLM needs it; unset: one that is trained",
    )
    layers: int = Field(default=3, ge=1, le=64, description="decoder layers of the drafter (the paper: 5)")
    heads: int | None = Field(default=None, ge=1, le=2**12, description="attention heads; unset: the target's")
    kv_heads: int | None = Field(default=None, ge=1, le=2**12, description="key and value heads; unset: the target's, or as many as heads")
    intermediate_size: int | None = Field(default=None, ge=1, le=2**20, description="inner size of the MLP; unset: the target's")
    markov_rank: int = Field(default=64, ge=1, le=2**12, description="r, rank of the head that reads the token before (the paper: 256)")
    confidence: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="drafting: end a chain whose chance of acceptance, by the confidences, falls below this; 0: never",
    )
    anchors: int = Field(default=128, ge=1, le=2**16, description="A, blocks of each sequence; their anchors are drawn anew in every epoch")
    loss: str = Field(
        default="0.1 nll + 1.8 tv",
        description="kl, ce, nll, tv, jsd, jsd(0.1), lk, lk_hybrid, reverse_kl, or a mix as the default, which is DeepSpec's: its L1 distance is twice tv",
    )
    gamma: float = Field(default=4.0, gt=0, le=1000, description="the k-th token of a block weighs exp(−(k−1)/gamma)")
    confidence_loss: float = Field(default=1.0, ge=0, le=1000, description="weight of the cross-entropy of the confidence")
    start: str | None = Field(
        default=None,
        description="folder or Hub id of a trained DSpark drafter of the same sizes whose weights to start from; unset: fresh weights",
    )


class DsparkRecipe(Recipe):
    dspark: DsparkSection = DsparkSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(DsparkRecipe, __doc__)

from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import new_drafter
from draftsmith.models.dspark import DsparkModel
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import layer_sizes
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import output
from draftsmith.train.engine.order import drawn_rows
from draftsmith.train.engine.say import say
from draftsmith.train.losses.anchors import check_blocks, draw_anchors, per_sequence, states_before, tokens_behind
from draftsmith.train.losses.calibration import fit_temperatures, survival_errors
from draftsmith.train.losses.draft import DraftLosses, chunked_draft_loss
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, SequenceDataset, supervised_tokens


class Blocks(NamedTuple):
    """What the drafter says of the blocks of a batch, and the target.

    Attributes:
        losses: as `chunked_draft_loss`; overlap [1,B·A·K] is α.
        odds: [B·A·K], log-odds of the confidences.
        weights, supervised: [B,A,K].
    """

    losses: DraftLosses
    odds: Tensor
    weights: Tensor
    supervised: Tensor


def objective(drafter: DsparkModel, batch: Batch, *, target: Target, section: DsparkSection, seed: int = 0) -> Loss:
    """Σ_b n_b · Σ_{a,k} w_k · [loss(p_{a+k−1}, q_{a,k}) + confidence_loss · BCE(c_{a,k}, α_{a,k})] / Σ_{a,k} w_k, as in DFlash.

    q_{a,k} [V] reads the text's own token a + k − 1 beside the state of the block at a. c_{a,k} is the confidence, α_{a,k} = Σ min(p, q) the
    probability that a draft drawn from q is accepted, a constant to the gradient. w_k = exp(−(k−1)/gamma).
    """
    losses, odds, weights, supervised = draft(drafter, batch, target, section, seed)
    flat = weights.flatten().to(odds.dtype)
    doubt = F.binary_cross_entropy_with_logits(odds, losses.overlap[0].to(odds.dtype), flat, reduction="sum")
    hits, counted = (values.view(supervised.shape).flatten(0, 1).T for values in (losses.hits, supervised))
    weight = supervised_tokens(batch)
    return Loss(losses.sum + section.confidence_loss * doubt, weight, survival_metrics(hits, counted))


def draft(drafter: DsparkModel, batch: Batch, target: Target, section: DsparkSection, seed: int) -> Blocks:
    """Draft along a batch from drawn anchors, each token with the text's own before it."""
    ids = batch["input_ids"]
    anchors, drawn = draw_anchors(batch, section.anchors, seed)
    at, tokens, supervised = tokens_behind(batch, anchors, drawn, drafter.config.depth)
    out = target.features(batch, drafter.taps)
    states = drafter.states_along(drafter.feature_of(out), ids, batch["position_ids"], batch["document"], anchors)
    previous = ids.gather(1, (at - 1).flatten(1)).view(at.shape)
    read = drafter.before_head(states, previous).flatten(0, 2)  # [B·A·K,·]
    hidden = states_before(out.hidden, at)
    weights = per_sequence(supervised * torch.arange(at.shape[2], device=ids.device).div(-section.gamma).exp(), batch)
    losses = chunked_draft_loss(
        read[None], drafter.head_logits, hidden, target.logits, weights.flatten()[None], [0], None, section.loss, tokens=tokens.flatten()
    )
    return Blocks(losses, drafter.confidence_logits(read).float(), weights, supervised)


@torch.no_grad()
def calibrate(drafter: DsparkModel, valid: SequenceDataset, batches: int, target: Target, section: DsparkSection) -> None:
    """Fit the confidences' temperatures on every other of the held-out batches, and say the errors on the rest."""
    torch.nn.Module.to(drafter.eval(), target.device)  # FSDP2 and DeepSpeed leave it on the CPU
    size, chains = drafter.config.depth, []
    for row in drawn_rows(len(valid))[: 2 * batches].split(1):
        batch = {name: tensor.to(drafter.device) for name, tensor in valid.batch(row).items()}
        losses, odds, _, supervised = draft(drafter, batch, target, section, 0)
        chains.append(
            torch.stack((odds.view(-1, size).double(), losses.overlap[0].view(-1, size).double(), supervised.flatten(0, 1).double()))
        )
    if len(chains) < 2:
        return
    odds, accepted, counted = torch.cat(chains[::2], 1).unbind()
    drafter.config.temperatures = fit_temperatures(odds, accepted, counted > 0)
    odds, accepted, counted = torch.cat(chains[1::2], 1).unbind()
    before = survival_errors(odds, accepted, counted > 0, [1.0] * size)
    after = survival_errors(odds, accepted, counted > 0, drafter.config.temperatures)
    errors = ", ".join(f"{old:.3f} → {new:.3f}" for old, new in zip(before, after, strict=True))
    say(f"confidence: expected calibration error of survival at depth 1 … {size}, before → after temperatures: {errors}")


def architecture(section: DsparkSection, target: Target) -> dict[str, Any]:
    """The drafter's sizes: those of the recipe, else the target's."""
    return layer_sizes(section, target) | {
        "block_size": section.block_size,
        "causal": section.causal,
        "mask_token_id": section.mask_token,
        "markov_rank": section.markov_rank,
        "confidence": section.confidence,
    }


def choose_objective(recipe: DsparkRecipe, target: Target) -> Objective:
    return partial(objective, target=target, section=recipe.dspark, seed=recipe.train.seed)


def check(recipe: DsparkRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    check_blocks(recipe, recipe.dspark.loss, "dspark", "block_size", recipe.dspark.block_size + 1)
    if recipe.dspark.confidence and recipe.tree.width != 1:
        raise ValueError(
            f"dspark.confidence={recipe.dspark.confidence} ends chains, and the draft tree is none; add tree.width=1, or leave it out"
        )


def build_untrained(recipe: DsparkRecipe, target: Target) -> tuple[DsparkModel, Objective]:
    """An untrained drafter and its objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    drafter = new_drafter("dspark", target, **architecture(recipe.dspark, target))
    return cast(DsparkModel, drafter), choose_objective(recipe, target)


def main(arguments: list[str]) -> None:
    recipe = load(DsparkRecipe, arguments[0], arguments[1:])
    section = recipe.dspark
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        drafter, train, valid = setup.new_drafter_and_data(recipe, "dspark", target, corpora, **architecture(section, target))
        if section.start:
            setup.start_from(drafter, section.start, target, "dspark.start")
        fingerprint = setup.fingerprint(recipe, target, train)
        monitors = setup.monitors(recipe, target, drafter)
        accelerator, steps = loop.fit(recipe, drafter, choose_objective(recipe, target), train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            if not target.collective:  # else its forward needs all ranks
                calibrate(cast(DsparkModel, drafter), valid, recipe.train.eval_batches, target, section)
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
