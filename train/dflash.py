"""Train a DFlash drafter (Chen et al. 2026, https://arxiv.org/abs/2602.06036) on a frozen target: one forward drafts a block.

draftsmith train dflash dflash-tiny
accelerate launch train/dflash.py recipes/dflash-tiny.yaml dflash.causal=true
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, load


class DflashSection(Section):
    """the drafter and its loss"""

    taps: tuple[int, ...] | None = Field(
        default=None,
        description="decoder layers of the target, counted from 0, whose outputs are read; unset: 1, L/2−1, L−4 of its L layers (the paper: five)",
    )
    block_size: int = Field(default=8, ge=2, le=65, description="n, rows of a block; one forward drafts n − 1 tokens")
    causal: bool = Field(default=False, description="a row of a block sees no later row of it")
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="token of the target whose embedding stands for a mask, as SGLang needs it; unset: one that is trained",
    )
    layers: int = Field(default=3, ge=1, le=64, description="decoder layers of the drafter (the paper: 5)")
    heads: int | None = Field(default=None, ge=1, le=2**12, description="attention heads; unset: the target's")
    kv_heads: int | None = Field(default=None, ge=1, le=2**12, description="key and value heads; unset: the target's, or as many as heads")
    intermediate_size: int | None = Field(default=None, ge=1, le=2**20, description="inner size of the MLP; unset: the target's")
    anchors: int = Field(default=128, ge=1, le=2**16, description="A, blocks of each sequence; their anchors are drawn anew in every epoch")
    loss: str = Field(
        default="kl",
        description="kl, ce, nll (the paper), tv, jsd, jsd(0.1), lk, lk_hybrid, reverse_kl, or a mix such as `0.9 tv + 0.1 nll`",
    )
    weights: str = Field(
        default="decay",
        pattern="^(decay|pace)$",
        description="of the tokens of a block: decay, exp(−(k−1)/gamma); pace, by what a miss would cost (D-PACE)",
    )
    gamma: float = Field(default=4.0, gt=0, le=1000, description="of `decay`; the paper has 4, 5 and 7 for blocks of 8, 10 and 16")
    smoothing: float = Field(default=0.5, ge=0, le=1, description="of `pace`: 1 would weigh a token by the tokens behind it")
    start: str | None = Field(
        default=None,
        description="folder or Hub id of a trained DFlash drafter of the same sizes whose weights to start from; unset: fresh weights",
    )


class DflashRecipe(Recipe):
    dflash: DflashSection = DflashSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(DflashRecipe, __doc__)

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.inference.errors import exit_on_error
from draftsmith.models.dflash import DflashModel
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import layer_sizes
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import output
from draftsmith.train.losses.acceptance import paced
from draftsmith.train.losses.anchors import check_blocks, draw_anchors, per_sequence, states_before, tokens_behind
from draftsmith.train.losses.draft import chunked_draft_loss
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(drafter: DflashModel, batch: Batch, *, target: Target, section: DflashSection, seed: int = 0) -> Loss:
    """Σ_b n_b · Σ_{a,k} w_k · loss(p_{a+k−1}, q_{a,k}) / Σ_{a,k} w_k, over drawn anchors a of each sequence b and k = 1 … K.

    q_{a,k} [V] is the drafter's distribution of token a + k in the block at a, p_s [V] the target's of the token after position s. A token
    counts while all of the block up to it are supervised and of the anchor's document. n_b are the supervised tokens of the sequence; the
    loop divides by Σ_b n_b.
    """
    ids, document = batch["input_ids"], batch["document"]
    anchors, drawn = draw_anchors(batch, section.anchors, seed)
    at, tokens, supervised = tokens_behind(batch, anchors, drawn, drafter.config.depth)
    out = target.features(batch, drafter.taps)
    states = drafter.states_along(drafter.feature_of(out), ids, batch["position_ids"], document, anchors).flatten(0, 2)  # [B·A·K,H]
    hidden = states_before(out.hidden, at)

    def loss_of(kind: str, weights: Tensor) -> Any:
        return chunked_draft_loss(
            states[None], drafter.head_logits, hidden, target.logits, weights.flatten()[None], [0], None, kind, tokens=tokens.flatten()
        )

    if section.weights == "pace":
        with torch.no_grad():
            accepted = loss_of("nll", supervised.float()).losses.neg().exp().view(supervised.shape)
        weights = paced(accepted, supervised, section.smoothing)
    else:
        weights = supervised * torch.arange(supervised.shape[2], device=ids.device).div(-section.gamma).exp()
    losses = loss_of(section.loss, per_sequence(weights, batch))
    hits, counted = (values.view(supervised.shape).flatten(0, 1).T for values in (losses.hits, supervised))
    weight = supervised_tokens(batch)
    return Loss(losses.sum, weight, survival_metrics(hits, counted))


def architecture(section: DflashSection, target: Target) -> dict[str, Any]:
    """The drafter's sizes: those of the recipe, else the target's."""
    own = {"block_size": section.block_size, "causal": section.causal, "mask_token_id": section.mask_token}
    return layer_sizes(section, target) | own


def choose_objective(recipe: DflashRecipe, target: Target) -> Objective:
    return partial(objective, target=target, section=recipe.dflash, seed=recipe.train.seed)


def check(recipe: DflashRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    check_blocks(recipe, recipe.dflash.loss, "dflash", "block_size", recipe.dflash.block_size)
    weights = recipe.dflash.weights
    recipe.dflash.refuse_unread("dflash", ["gamma" if weights == "pace" else "smoothing"], f"dflash.weights={weights}")


def build_untrained(recipe: DflashRecipe, target: Target) -> tuple[DflashModel, Objective]:
    """An untrained drafter and its objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    drafter = new_drafter("dflash", target, **architecture(recipe.dflash, target))
    return cast(DflashModel, drafter), choose_objective(recipe, target)


def main(arguments: list[str]) -> None:
    recipe = load(DflashRecipe, arguments[0], arguments[1:])
    section = recipe.dflash
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        drafter, train, valid = setup.new_drafter_and_data(recipe, "dflash", target, corpora, **architecture(section, target))
        if section.start:
            setup.start_from(drafter, section.start, target, "dflash.start")
        fingerprint = setup.fingerprint(recipe, target, train)
        monitors = setup.monitors(recipe, target, drafter)
        accelerator, steps = loop.fit(recipe, drafter, choose_objective(recipe, target), train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
