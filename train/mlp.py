"""Train an MLP or LSTM speculator (Wertheimer et al. 2024, https://arxiv.org/abs/2404.19124; Arctic's LSTM) on a frozen target.

draftsmith train mlp mlp-tiny
draftsmith train mlp mlp-tiny mlp.cell=lstm

The authors train in two stages; both are this script. The first is on any text. For the second let the target answer (`draftsmith data
regenerate`), and go on: data.train=answers.jsonl mlp.start=<artifact of the first stage>.
"""

import sys
from typing import Literal

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, check_complete_sequences, load


class MlpSection(Section):
    """the heads and their loss"""

    heads: int = Field(default=4, ge=1, le=64, description="K, number of heads; head k = 0 … K−1 at position t predicts token t+2+k")
    cell: Literal["mlp", "lstm"] = Field(default="mlp", description="what makes a head's state of the one before it and a token")
    inner_size: int | None = Field(default=None, ge=1, description="size of the state; unset: the target's hidden size")
    tie_weights: bool = Field(default=True, description="one set of weights for all heads; an LSTM has no other way")
    scale_input: bool = Field(default=True, description="norm the target's hidden state first")
    decay: float = Field(default=0.8, gt=0, le=1, description="weight of head k in the loss is decay^k; the paper has 1")
    distill: float = Field(
        default=0.0, ge=0, le=1, description="share of the loss that is KL to the target's distribution; the rest is cross-entropy"
    )
    start: str | None = Field(
        default=None,
        description="folder or Hub id of a trained speculator of the same sizes whose weights to start from; unset: fresh weights",
    )


class MlpRecipe(Recipe):
    mlp: MlpSection = MlpSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(MlpRecipe, __doc__)

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import new_drafter
from draftsmith.models.mlp import MlpModel
from draftsmith.models.target import Target
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import confidence, output
from draftsmith.train.losses import blocks
from draftsmith.train.losses.heads import head_losses, head_metrics, head_weights, shifted
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(drafter: MlpModel, batch: Batch, *, target: Target, section: MlpSection) -> Loss:
    """Σ_d n_d · Σ_k decay^k · mean_t [distill · KL(p_{t+1+k} ‖ q_k(t)) + (1 − distill) · CE(q_k(t), x_{t+2+k})].

    q_k(t) [V] is head k's distribution of token t+2+k, which it reads in the state s_k(t) = cell(s_{k−1}(t), x_{t+1+k}) of the text's own
    tokens; s_{−1}(t) is the target's hidden state h_t. p_s [V] is the target's distribution of the token after position s. The mean of head
    k in document d is over the supervised tokens that the head predicts there, n_d are all supervised tokens of d (`head_weights`), and the
    loop divides by Σ_d n_d.
    """
    hidden = target.features(batch).hidden.flatten(0, 1)  # [B·S,H]
    counted, weights = head_weights(batch, section.heads, section.decay)
    tokens = torch.stack([shifted(batch["input_ids"], k + 1) for k in range(section.heads + 1)])  # [K+1,B·S]

    def block_loss(hidden: Tensor, given: dict[str, Tensor], read: slice, own: slice) -> tuple[Tensor, Tensor]:
        states = drafter.states_along(hidden, tokens[:-1, read].T, given)
        weight = F.pad(weights[:, own], (0, read.stop - own.stop))
        return head_losses(
            states,
            drafter.outputs(given),
            tokens[1:, read],
            hidden,
            target.logits,
            weight,
            section.distill,
        )

    rows = max(1, blocks.BUDGET // drafter.activations)
    total, hits = blocks.in_blocks(block_loss, hidden, drafter.head_parameters(), rows, section.heads)
    weight = supervised_tokens(batch)
    return Loss(total, weight, head_metrics(hits, counted))


def check(recipe: MlpRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    check_complete_sequences(recipe)
    if recipe.mlp.cell == "lstm" and not recipe.mlp.tie_weights:
        raise ValueError("mlp.tie_weights=false with mlp.cell=lstm: its heads share their weights; leave it out")
    if recipe.mlp.heads + 2 > recipe.data.seq_len:
        raise ValueError(f"mlp.heads={recipe.mlp.heads} look further ahead than data.seq_len={recipe.data.seq_len}; lower it")


def architecture(section: MlpSection) -> dict[str, Any]:
    """The sizes of the heads."""
    sizes = {"num_heads": section.heads, "cell": section.cell, "inner_size": section.inner_size or 0}
    return sizes | {"tie_weights": section.tie_weights, "scale_input": section.scale_input}


def build_untrained(recipe: MlpRecipe, target: Target) -> tuple[MlpModel, Objective]:
    """Untrained heads and their objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    heads = new_drafter("mlp", target, **architecture(recipe.mlp))
    return cast(MlpModel, heads), partial(objective, target=target, section=recipe.mlp)


def main(arguments: list[str]) -> None:
    recipe = load(MlpRecipe, arguments[0], arguments[1:])
    section = recipe.mlp
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        drafter, train, valid = setup.new_drafter_and_data(recipe, "mlp", target, corpora, **architecture(section))
        if section.start:
            setup.start_from(drafter, section.start, target, "mlp.start")
        fingerprint = setup.fingerprint(recipe, target, train)
        monitors = setup.monitors(recipe, target, drafter)
        measure = partial(objective, target=target, section=section)
        accelerator, steps = loop.fit(recipe, drafter, measure, train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            confidence.fit(drafter, target, valid)
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
