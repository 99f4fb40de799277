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
    steps: int = Field(default=6, ge=1, le=64, description="K, tokens of one forward")
    anchors: int = Field(
        default=128, ge=1, le=2**16, description="A, pairs of each sequence that K − 1 masks follow; they are drawn anew in every epoch"
    )
    decay: float = Field(default=0.8, gt=0, le=1, description="weight of step j in the loss is decay^j")
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
from draftsmith.models.peagle import PeagleModel
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import layer_sizes
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.eagle import begin_with
from draftsmith.train.engine import output
from draftsmith.train.losses.anchors import check_blocks, draw_anchors, per_sequence, tokens_behind
from draftsmith.train.losses.draft import chunked_draft_loss
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(drafter: PeagleModel, batch: Batch, *, target: Target, section: PeagleSection, seed: int = 0) -> Loss:
    """Σ_t loss(p_{t+1}, q_0(t)) + Σ_b n_b · Σ_{a,j≥1} decay^j · loss(p_{a+j}, q_{a,j}) / (number of a, j).

    q_0(t) [D] is the pair's distribution of token t + 2, at all positions whose token is supervised and of the same document. q_{a,j} is that
    of mask j behind the pair before a drawn position a of sequence b, of token a + 1 + j; it counts while all tokens from a + 1 on are supervised
    and of a's document. p_s [V] is the target's distribution of the token after position s. n_b are the supervised tokens of the sequence. The loop
    divides by Σ_b n_b.
    """
    ids, document = batch["input_ids"], batch["document"]
    anchors, drawn = draw_anchors(batch, section.anchors, seed)
    at, tokens, supervised = tokens_behind(batch, anchors, drawn, section.steps)
    out = target.features(batch, drafter.taps)
    pairs = (anchors - 1).clamp(min=0)  # the pair before a has token a
    first, later = drafter.states_along(drafter.feature_of(out), ids, batch["position_ids"], document, pairs)
    targets = drafter.vocabulary.targets if drafter.vocabulary.size < drafter.vocabulary.vocab_size else None
    weights = shift_left(batch["loss_mask"], 2, document).flatten()[None].float()
    shared = (target.logits, weights, [1], targets, section.loss)
    of_pairs = chunked_draft_loss(
        drafter.before_head(first).flatten(0, 1)[None],
        drafter.head(),
        out.hidden.flatten(0, 1),
        *shared,
        tokens=shift_left(ids, 1, document).flatten(),
    )
    masked = supervised[..., 1:]
    decay = section.decay ** torch.arange(1, section.steps, device=ids.device)
    rows = (at[..., 1:] - 1).flatten(1)[..., None].expand(-1, -1, out.hidden.shape[2])
    of_masks = chunked_draft_loss(
        drafter.before_head(later).flatten(0, 2)[None],
        drafter.head(),
        out.hidden.gather(1, rows).flatten(0, 1),
        target.logits,
        (per_sequence(masked.float(), batch) * decay).flatten()[None],
        [0],
        targets,
        section.loss,
        tokens=tokens[..., 1:].flatten(),
    )
    at_anchors = of_pairs.hits.view(ids.shape).gather(1, pairs)[..., None]
    hits = torch.cat((at_anchors, of_masks.hits.view(masked.shape)), -1).flatten(0, 1).T
    weight = supervised_tokens(batch)
    return Loss(of_pairs.sum + of_masks.sum, weight, survival_metrics(hits, supervised.flatten(0, 1).T, weight))


def architecture(section: PeagleSection, target: Target) -> dict[str, Any]:
    """The drafter's sizes: those of the recipe, else the target's."""
    own = {"draft_vocab_size": section.vocab_size or target.vocab_size, "fc_norm": section.fc_norm, "steps": section.steps}
    return layer_sizes(section, target) | own | {"mask_token_id": section.mask_token}


def choose_objective(recipe: PeagleRecipe, target: Target) -> Objective:
    return partial(objective, target=target, section=recipe.peagle, seed=recipe.train.seed)


def build_untrained(recipe: PeagleRecipe, target: Target) -> tuple[PeagleModel, Objective]:
    """An untrained drafter and its objective. `draftsmith plan` calls it with a target on the meta device."""
    check_blocks(recipe, recipe.peagle.loss, "peagle", recipe.peagle.steps + 1)
    drafter = cast(PeagleModel, new_drafter("peagle", target, **architecture(recipe.peagle, target)))
    size = drafter.config.draft_vocab_size
    if size < target.vocab_size:  # which tokens it has does not matter here: take the first ones
        drafter.take(vocab.DraftVocabulary(torch.zeros(size, dtype=torch.int64), torch.arange(target.vocab_size) < size))
    return drafter, choose_objective(recipe, target)


def main(arguments: list[str]) -> None:
    recipe = load(PeagleRecipe, arguments[0], arguments[1:])
    section = recipe.peagle
    check_blocks(recipe, section.loss, "peagle", section.steps + 1)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        sizes = architecture(section, target)
        drafter, train, valid = setup.new_drafter_and_data(recipe, "peagle", target, corpora, **sizes)
        assert isinstance(drafter, PeagleModel)
        if sizes["draft_vocab_size"] < target.vocab_size:
            drafter.take(setup.frequent_tokens(train, target, sizes["draft_vocab_size"]))
        if section.start:
            begin_with(drafter, section.start, target, "peagle.start")
        fingerprint = setup.fingerprint(target, train) | {"draft vocabulary": drafter.vocabulary.digest()}
        monitors = setup.monitors(recipe, target, drafter, drafter.taps)
        accelerator, steps = loop.fit(recipe, drafter, choose_objective(recipe, target), train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
