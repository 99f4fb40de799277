"""Train an MTP layer on a frozen target (FastMTP, Cai et al. 2025, https://arxiv.org/abs/2509.18362): the one that its checkpoint ships, or a new one.

draftsmith train mtp mtp-tiny
accelerate launch train/mtp.py recipes/mtp-mimo-7b.yaml data.train=answers.jsonl
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Changeable, Recipe, Section, check_complete_sequences, load


class MtpSection(Section):
    """the layer and its loss"""

    steps: int = Field(default=3, ge=1, le=64, description="K, draft steps that the layer is trained for (the paper: 3)")
    beta: float = Field(default=0.6, gt=0, le=1, description="step k has weight beta^k in the loss, over the sum of these (the paper: 0.6)")
    loss: str = Field(
        default="nll",
        description="of the text's tokens: nll (the paper, whose texts are the target's answers), or against the target's distribution: kl, "
        "ce, tv, jsd, jsd(0.1), lk, lk_hybrid, reverse_kl, or a mix such as `0.9 tv + 0.1 nll`",
    )
    checkpointing: Changeable[bool] = Field(default=False, description="recompute each step in the backward pass: less memory, more time")
    start: str | None = Field(
        default=None,
        description="`target`: the layer that the target's checkpoint ships; folder or Hub id of a trained MTP drafter whose weights to start from; "
        "unset: fresh weights",
    )


class MtpRecipe(Recipe):
    mtp: MtpSection = MtpSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(MtpRecipe, __doc__)

from functools import partial
from typing import Any, cast

import torch

from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import new_drafter
from draftsmith.models.formats.mtp import shipped_mtp
from draftsmith.models.mtp import KINDS, MtpModel, layer_of
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import confidence, output
from draftsmith.train.losses.draft import chunked_draft_loss, mix
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(drafter: MtpModel, batch: Batch, *, target: Target, section: MtpSection) -> Loss:
    """Σ_k β^k · loss(p_{t+1+k}, q_k(t), x_{t+2+k}) / Σ_k β^k, k = 0 … K − 1; by default −log q_k(t)[x_{t+2+k}] (section 3.2).

    q_k(t) [V] is the layer's distribution of token t + 2 + k in step k at position t, which reads token t + 1 + k and its own output of the
    step before (training-time test: as when drafting). p_s [V] is the target's distribution of the token after position s, x_s the text's
    token. A step counts where that token is supervised and of t's document. The loop divides by the number of supervised tokens.
    """
    ids, document = batch["input_ids"], batch["document"]
    out = target.features(batch)
    feature = drafter.feature_of(out)
    outputs = drafter.training_time_test(feature, ids, batch["position_ids"], document, section.steps, section.checkpointing)
    states = torch.stack([drafter.before_head(output).flatten(0, 1) for output in outputs])  # [K,M,H]
    weights = torch.stack([shift_left(batch["loss_mask"], k + 2, document).flatten() for k in range(section.steps)])  # [K,M]
    actual, weight = out.hidden.flatten(0, 1), supervised_tokens(batch)
    shares = torch.tensor([section.beta**k for k in range(section.steps)])
    losses = chunked_draft_loss(
        states,
        target.logits,
        actual,
        target.logits,
        weights.float(),
        range(1, section.steps + 1),
        None,
        section.loss,
        (shares / shares.sum()).tolist(),
        tokens=shift_left(ids, 1, document).flatten(),
    )
    return Loss(losses.sum, weight, survival_metrics(losses.hits, weights))


def check(recipe: MtpRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    mix(recipe.mtp.loss, "mtp.loss")
    check_complete_sequences(recipe)


def architecture(section: MtpSection, target: Target) -> dict[str, Any]:
    """A decoder layer of the target. Raises ValueError for one that was not tried, naming its architecture."""
    layer = layer_of(target.config)
    return {"layer": layer, "layout": KINDS[layer["model_type"]], "steps": section.steps}


def build_untrained(recipe: MtpRecipe, target: Target) -> tuple[MtpModel, Objective]:
    """An untrained layer and its objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    drafter = cast(MtpModel, new_drafter("mtp", target, **architecture(recipe.mtp, target)))
    return drafter, partial(objective, target=target, section=recipe.mtp)


def begin_with_target(drafter: MtpModel, target: Target) -> None:
    """Start as the layer that the target's checkpoint ships. Raises as `shipped_mtp`."""
    try:
        shipped = shipped_mtp(target, drafter.config.steps)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"mtp.start=target: {error}") from None
    drafter.config.layout = shipped.config.layout
    drafter.load_state_dict(shipped.state_dict())


def main(arguments: list[str]) -> None:
    recipe = load(MtpRecipe, arguments[0], arguments[1:])
    section = recipe.mtp
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        drafter, train, valid = setup.new_drafter_and_data(recipe, "mtp", target, corpora, **architecture(section, target))
        assert isinstance(drafter, MtpModel)
        if section.start == "target":
            begin_with_target(drafter, target)
        elif section.start:
            setup.start_from(drafter, section.start, target, "mtp.start")
        fingerprint = setup.fingerprint(recipe, target, train)
        monitors = setup.monitors(recipe, target, drafter)
        measure = partial(objective, target=target, section=section)
        accelerator, steps = loop.fit(recipe, drafter, measure, train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            confidence.fit(drafter, target, valid)
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
