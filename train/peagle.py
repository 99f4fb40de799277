"""Train a P-EAGLE drafter (AWS 2026) on a frozen target: EAGLE-3 that drafts all tokens in one forward.

draftsmith train peagle peagle-tiny
accelerate launch train/peagle.py recipes/peagle-tiny.yaml peagle.layers=4
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, load


class PeagleSection(Section):
    """the drafter and its loss"""

    taps: tuple[int, ...] | None = Field(
        default=None,
        description="decoder layers of the target, counted from 0, whose outputs are read; unset: 1, L/2−1, L−4 of its L layers",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        le=2**24,
        description="D, size of the draft vocabulary: the most frequent supervised tokens; unset: the target's V",
    )
    layers: int = Field(default=2, ge=1, le=64, description="decoder layers of the drafter (the paper: 4)")
    heads: int | None = Field(default=None, ge=1, le=2**12, description="attention heads; unset: the target's")
    kv_heads: int | None = Field(default=None, ge=1, le=2**12, description="key and value heads; unset: the target's, or as many as heads")
    intermediate_size: int | None = Field(default=None, ge=1, le=2**20, description="inner size of the MLP; unset: the target's")
    fc_norm: bool = Field(default=True, description="normalise each tap before fc, as EAGLE-3.1 does")
    mask_token: int = Field(default=0, ge=0, description="token of the target that stands for one that is not there yet")
    steps: int = Field(default=6, ge=2, le=64, description="K, tokens of one forward")
    retention: float = Field(
        default=0.8, gt=0, le=1, description="r: masks at level i are trained behind a share r^i of the positions (the paper: 0.8)"
    )
    least_retention: float = Field(default=0.2, ge=0, le=1, description="that share is at least this (the paper: 0.2)")
    decay: float = Field(
        default=0.5, gt=0, le=1, description="weight of step j in the loss is decay^j, beside the share of positions that it has"
    )
    loss: str = Field(
        default="kl", description="kl, ce, nll, tv, jsd, jsd(0.1), lk, lk_hybrid, reverse_kl, or a mix such as `0.9 tv + 0.1 ce`"
    )
    start: str | None = Field(
        default=None,
        description="folder or Hub id of a P-EAGLE or EAGLE drafter of the same sizes whose weights to start from; unset: fresh weights",
    )


class PeagleRecipe(Recipe):
    peagle: PeagleSection = PeagleSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(PeagleRecipe, __doc__)

from functools import partial
from typing import Any, cast

import torch

from draftsmith.inference.errors import exit_on_error
from draftsmith.models import vocab
from draftsmith.models.drafter import new_drafter
from draftsmith.models.mask_rows import mask_rows
from draftsmith.models.peagle import PeagleModel
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import layer_sizes
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.eagle import begin_with
from draftsmith.train.engine import output
from draftsmith.train.losses.anchors import chain_rows, check_blocks, draw_chains, retained, states_before, tokens_behind
from draftsmith.train.losses.draft import chunked_draft_loss
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(drafter: PeagleModel, batch: Batch, *, target: Target, section: PeagleSection, seed: int = 0) -> Loss:
    """Σ_t loss(p_{t+1}, q_0(t)) + Σ_{a,i} decay^i · loss(p_{a+1+i}, q_{a,i}).

    q_0(t) [D] is the pair's distribution of token t + 2, at all positions whose token is supervised and of the same document. q_{a,i} is that
    of mask i behind the pair at a drawn position a, of token a + 2 + i; it counts while all tokens from a + 2 on are supervised and of a's
    document. Which positions have a mask at level i, COD draws: a share max(r^i, least_retention) of those that can, among those
    that have masks up to level i − 1. p_s [V] is the target's distribution of the token after position s. The loop divides by the supervised
    tokens.
    """
    ids, document, size = batch["input_ids"], batch["document"], section.steps
    shares = retained(section.retention, section.least_retention, size - 1)
    pairs, depths, drawn = draw_chains(batch, shares, seed, ahead=2)
    at, tokens, supervised = tokens_behind(batch, pairs + 1, drawn, size)  # [B,A,K]; the pair at a reads token a + 1
    rows = mask_rows(document, pairs, depths, chain_rows(shares, ids.shape[1]), size - 1)
    out = target.features(batch, drafter.taps)
    first, later = drafter.states_along(drafter.feature_of(out), ids, batch["position_ids"], document, rows)
    targets = drafter.vocabulary.targets if drafter.vocabulary.size < drafter.vocabulary.vocab_size else None
    weights = shift_left(batch["loss_mask"], 2, document).flatten()[None].float()
    of_pairs = chunked_draft_loss(
        drafter.before_head(first).flatten(0, 1)[None],
        drafter.head(),
        out.hidden.flatten(0, 1),
        target.logits,
        weights,
        [1],
        targets,
        section.loss,
        tokens=shift_left(ids, 1, document).flatten(),
    )
    entry = rows.anchor_index * size + rows.level
    counted = supervised.flatten(1).gather(1, entry)
    of_masks = chunked_draft_loss(
        drafter.before_head(later).flatten(0, 1)[None],
        drafter.head(),
        states_before(out.hidden, at.flatten(1).gather(1, entry)),
        target.logits,
        (counted * section.decay**rows.level).flatten()[None],
        [0],
        targets,
        section.loss,
        tokens=tokens.flatten(1).gather(1, entry).flatten(),
    )
    hits = torch.zeros_like(supervised).flatten(1).scatter(1, entry, of_masks.hits.view(entry.shape)).view(supervised.shape)
    hits[..., 0] = of_pairs.hits.view(ids.shape).gather(1, pairs)
    chains = supervised & (torch.arange(size, device=ids.device) <= depths[..., None])
    weight = supervised_tokens(batch)
    return Loss(of_pairs.sum + of_masks.sum, weight, survival_metrics(hits.flatten(0, 1).T, chains.flatten(0, 1).T))


def architecture(section: PeagleSection, target: Target) -> dict[str, Any]:
    """The drafter's sizes: those of the recipe, else the target's."""
    own = {"draft_vocab_size": section.vocab_size or target.vocab_size, "fc_norm": section.fc_norm, "steps": section.steps}
    return layer_sizes(section, target) | own | {"mask_token_id": section.mask_token}


def choose_objective(recipe: PeagleRecipe, target: Target) -> Objective:
    return partial(objective, target=target, section=recipe.peagle, seed=recipe.train.seed)


def check(recipe: PeagleRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    check_blocks(recipe, recipe.peagle.loss, "peagle", "steps", recipe.peagle.steps + 1)


def build_untrained(recipe: PeagleRecipe, target: Target) -> tuple[PeagleModel, Objective]:
    """An untrained drafter and its objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    drafter = cast(PeagleModel, new_drafter("peagle", target, **architecture(recipe.peagle, target)))
    size = drafter.config.draft_vocab_size
    if size < target.vocab_size:  # which tokens it has does not matter here
        drafter.take(vocab.first(size, target.vocab_size))
    return drafter, choose_objective(recipe, target)


def main(arguments: list[str]) -> None:
    recipe = load(PeagleRecipe, arguments[0], arguments[1:])
    section = recipe.peagle
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        sizes = architecture(section, target)
        drafter, train, valid = setup.new_drafter_and_data(recipe, "peagle", target, corpora, **sizes)
        assert isinstance(drafter, PeagleModel)
        if sizes["draft_vocab_size"] < target.vocab_size:
            drafter.take(setup.frequent_tokens(train, target, sizes["draft_vocab_size"]))
        if section.start:
            begin_with(drafter, section.start, target, "peagle.start")
        fingerprint = setup.fingerprint(recipe, target, train) | {"draft vocabulary": drafter.vocabulary.digest()}
        monitors = setup.monitors(recipe, target, drafter)
        accelerator, steps = loop.fit(recipe, drafter, choose_objective(recipe, target), train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
