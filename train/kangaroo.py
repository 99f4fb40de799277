"""Train Kangaroo's adapter (Liu et al. 2024, https://arxiv.org/abs/2404.18911): the target's first layers draft, with it and the target's head.

draftsmith train kangaroo kangaroo-tiny
accelerate launch train/kangaroo.py recipes/kangaroo-tiny.yaml kangaroo.exit_layer=1
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, check_complete_sequences, load


class KangarooSection(Section):
    """the adapter and its loss"""

    exit_layer: int = Field(
        default=2, ge=1, le=1000, description="E, how many of the target's decoder layers draft (the paper: 2 of 32, 3 of 40)"
    )
    heads: int | None = Field(default=None, ge=1, le=2**12, description="attention heads of the adapter; unset: the target's")
    kv_heads: int | None = Field(default=None, ge=1, le=2**12, description="key and value heads; unset: the target's, or as many as heads")
    confidence: float = Field(
        default=0.6, ge=0, lt=1, description="drafting: end a draft where the likeliest next token is less likely than this; 0: never"
    )
    loss: str = Field(
        default="ce",
        description="against the target's distribution: ce (the paper), kl, tv, jsd, jsd(0.1), lk, lk_hybrid, reverse_kl, or of the text's "
        "tokens: nll, or a mix such as `0.9 tv + 0.1 ce`",
    )
    start: str | None = Field(
        default=None,
        description="folder or Hub id of a trained Kangaroo drafter of the same sizes whose weights to start from; unset: fresh weights",
    )


class KangarooRecipe(Recipe):
    kangaroo: KangarooSection = KangarooSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(KangarooRecipe, __doc__)

from functools import partial
from typing import Any, cast

from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import new_drafter
from draftsmith.models.kangaroo import CHAIN, KangarooModel
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import head_sizes
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import confidence, output
from draftsmith.train.losses.draft import chunked_draft_loss, mix
from draftsmith.train.losses.survival import along_chains, survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(drafter: KangarooModel, batch: Batch, *, target: Target, section: KangarooSection) -> Loss:
    """Σ_t loss(p_t, q_t), over positions t whose next token is supervised and of the same document; by default CE (section 3.2).

    q_t [V] is what the target's head makes of the adapter's output at position t, which read h_E up to t. p_t [V] is the target's own
    distribution of the token after position t. The loop divides by the number of supervised tokens.
    """
    document = batch["document"]
    out = target.features(batch, drafter.taps)
    states = drafter.states_along(drafter.feature_of(out), batch["position_ids"], document)
    weights = shift_left(batch["loss_mask"], 1, document)
    losses = chunked_draft_loss(
        states.flatten(0, 1)[None],
        target.logits,
        out.hidden.flatten(0, 1),
        target.logits,
        weights.flatten()[None].float(),
        [0],
        None,
        section.loss,
        tokens=shift_left(batch["input_ids"], 1, document).flatten(),
    )
    # A chain along the text drafts at each position what is drafted there after any other root.
    chains, counted = along_chains(losses.hits, document, CHAIN), along_chains(weights, document, CHAIN)
    weight = supervised_tokens(batch)
    return Loss(losses.sum, weight, survival_metrics(chains, counted))


def check(recipe: KangarooRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    mix(recipe.kangaroo.loss, "kangaroo.loss")
    check_complete_sequences(recipe)


def architecture(section: KangarooSection, target: Target) -> dict[str, Any]:
    """The adapter's sizes: those of the recipe, else the target's. Raises ValueError where the target has no layers after the first E."""
    if section.exit_layer >= target.num_layers:
        raise ValueError(f"kangaroo.exit_layer={section.exit_layer}: expected fewer than the target's {target.num_layers} layers; lower it")
    return {"exit_layer": section.exit_layer, "confidence": section.confidence} | head_sizes(section, target)


def build_untrained(recipe: KangarooRecipe, target: Target) -> tuple[KangarooModel, Objective]:
    """An untrained adapter and its objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    drafter = cast(KangarooModel, new_drafter("kangaroo", target, **architecture(recipe.kangaroo, target)))
    return drafter, partial(objective, target=target, section=recipe.kangaroo)


def main(arguments: list[str]) -> None:
    recipe = load(KangarooRecipe, arguments[0], arguments[1:])
    section = recipe.kangaroo
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        drafter, train, valid = setup.new_drafter_and_data(recipe, "kangaroo", target, corpora, **architecture(section, target))
        if section.start:
            setup.start_from(drafter, section.start, target, "kangaroo.start")
        fingerprint = setup.fingerprint(recipe, target, train)
        monitors = setup.monitors(recipe, target, drafter)
        measure = partial(objective, target=target, section=section)
        accelerator, steps = loop.fit(recipe, drafter, measure, train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            confidence.fit(drafter, target, valid)
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
