"""Train Hydra or Hydra++ heads (Ankner et al. 2024, https://arxiv.org/abs/2402.05109) on a frozen target.

draftsmith train hydra hydra-tiny
draftsmith train hydra hydra-tiny hydra.prefix=true hydra.layers=4
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, check_complete_sequences, load


class HydraSection(Section):
    """the heads and their loss"""

    heads: int = Field(default=4, ge=1, le=64, description="K, number of heads; head k = 0 … K−1 at position t predicts token t+2+k")
    layers: int = Field(default=1, ge=1, le=64, description="residual blocks of each head; Hydra++ has 4")
    share_head: bool = Field(default=False, description="use the target's output layer instead of one for each head")
    prefix: bool = Field(
        default=False, description="Hydra++: a decoder layer of the target's sizes over its hidden states, which the heads read instead"
    )
    decay: float = Field(default=0.8, gt=0, le=1, description="weight of head k in the loss is decay^k; the paper has 1")
    distill: float = Field(
        default=1.0, ge=0, le=1, description="share of the loss that is KL to the target's distribution; the rest is cross-entropy"
    )
    top_k: int = Field(default=0, ge=0, le=2**24, description="reduce the target's distribution to this many likeliest tokens; 0: all")
    start: str | None = Field(
        default=None,
        description="folder or Hub id of trained Hydra heads of the same sizes whose weights to start from; unset: fresh weights",
    )


class HydraRecipe(Recipe):
    hydra: HydraSection = HydraSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(HydraRecipe, __doc__)

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import new_drafter
from draftsmith.models.hydra import HydraModel
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import attention_sizes
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import confidence, output
from draftsmith.train.losses import blocks
from draftsmith.train.losses.heads import check_top_k, head_losses, head_metrics, head_weights, shifted
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(drafter: HydraModel, batch: Batch, *, target: Target, section: HydraSection) -> Loss:
    """Σ_d n_d · Σ_k decay^k · mean_t [distill · KL(p_{t+1+k} ‖ q_k(t)) + (1 − distill) · CE(q_k(t), x_{t+2+k})].

    q_k(t) [V] is head k's distribution of token t+2+k. It reads the root state r_t and the text's own tokens x_{t+1} … x_{t+1+k}. r_t [H] is
    the target's hidden state h_t, or with `prefix` what a decoder layer makes of h_s, s ≤ t, of the same document. p_s [V] is the target's
    distribution of the token after position s. The mean of head k in document d is over the supervised tokens that the head predicts there,
    n_d are all supervised tokens of d (`head_weights`), and the loop divides by Σ_d n_d.
    """
    hidden, ids = target.features(batch).hidden, batch["input_ids"]
    root = drafter.root_states(drafter.feature_of(TargetOutput(hidden)), batch["position_ids"], batch["document"]).flatten(0, 1)  # [B·S,H]
    counted, weights = head_weights(batch, section.heads, section.decay)
    actual, tokens = hidden.flatten(0, 1), torch.stack([shifted(ids, k + 1) for k in range(section.heads + 1)])  # [K+1,B·S]

    def block_loss(root: Tensor, given: dict[str, Tensor], read: slice, own: slice) -> tuple[Tensor, Tensor]:
        embedding = target.embed(tokens[:-1, read].T)  # [m,K,H], of tokens t + 1 … t + K
        states = drafter.hidden_along(root, embedding, given)
        outputs = [drafter.output(k, given) for k in range(section.heads)]
        weight = F.pad(weights[:, own], (0, read.stop - own.stop))
        return head_losses(states, outputs, tokens[1:, read], actual[read], target.logits, weight, section.distill, section.top_k)

    rows = max(1, blocks.BUDGET // drafter.activations)
    total, hits = blocks.in_blocks(block_loss, root, drafter.head_parameters(), rows, section.heads)
    weight = supervised_tokens(batch)
    return Loss(total, weight, head_metrics(hits, counted))


def check(recipe: HydraRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    check_complete_sequences(recipe)
    if recipe.hydra.heads + 2 > recipe.data.seq_len:
        raise ValueError(f"hydra.heads={recipe.hydra.heads} look further ahead than data.seq_len={recipe.data.seq_len}; lower it")
    check_top_k(recipe.hydra, "hydra")


def architecture(section: HydraSection, target: Target) -> dict[str, Any]:
    """The sizes of the heads; those of the prefix layer are the target's."""
    sizes = {"num_heads": section.heads, "num_layers": section.layers, "share_head": section.share_head}
    return sizes | ({"prefix": True, **attention_sizes(target)} if section.prefix else {})


def choose_objective(recipe: HydraRecipe, target: Target) -> Objective:
    return partial(objective, target=target, section=recipe.hydra)


def build_untrained(recipe: HydraRecipe, target: Target) -> tuple[HydraModel, Objective]:
    """Untrained heads and their objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    heads = new_drafter("hydra", target, **architecture(recipe.hydra, target))
    return cast(HydraModel, heads), choose_objective(recipe, target)


def main(arguments: list[str]) -> None:
    recipe = load(HydraRecipe, arguments[0], arguments[1:])
    section = recipe.hydra
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        drafter, train, valid = setup.new_drafter_and_data(recipe, "hydra", target, corpora, **architecture(section, target))
        if section.start:
            setup.start_from(drafter, section.start, target, "hydra.start")
        fingerprint = setup.fingerprint(recipe, target, train)
        monitors = setup.monitors(recipe, target, drafter)
        accelerator, steps = loop.fit(recipe, drafter, choose_objective(recipe, target), train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            confidence.fit(drafter, target, valid)
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
