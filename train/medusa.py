"""Train Medusa heads (Cai et al. 2024, https://arxiv.org/abs/2401.10774) on a frozen target.

draftsmith train medusa medusa-tiny
accelerate launch train/medusa.py recipes/medusa-tiny.yaml target.path=Qwen/Qwen3-0.6B data.train=chats.jsonl
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, load


class MedusaSection(Section):
    """the heads and their loss"""

    heads: int = Field(default=4, ge=1, le=64, description="K, number of heads; head k = 0 … K−1 at position t predicts token t+2+k")
    layers: int = Field(default=1, ge=1, le=64, description="residual blocks of each head")
    share_head: bool = Field(default=False, description="use the target's output layer instead of one for each head")
    decay: float = Field(default=0.8, gt=0, le=1, description="weight of head k in the loss is decay^k")
    distill: float = Field(
        default=0.0, ge=0, le=1, description="share of the loss that is KL to the target's distribution; the rest is cross-entropy"
    )


class MedusaRecipe(Recipe):
    medusa: MedusaSection = MedusaSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(MedusaRecipe, __doc__)

from functools import partial
from typing import Any, cast

import torch

from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import new_drafter
from draftsmith.models.medusa import MedusaModel
from draftsmith.models.target import Target
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import output
from draftsmith.train.losses.chunked import chunked_cross_entropy, chunked_kl_heads
from draftsmith.train.losses.heads import head_weights, shifted
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(drafter: MedusaModel, batch: Batch, *, target: Target, section: MedusaSection) -> Loss:
    """Σ_d n_d · Σ_k decay^k · mean_t [(1 − distill) · CE(head_k(h_t), x_{t+2+k}) + distill · KL(p_{t+1+k} ‖ head_k(h_t))].

    h [B,S,H] is the target's hidden state after its final norm. p_s [V] is its distribution of the token after position s. The mean of head
    k in document d is over the supervised tokens that the head predicts there, so that no head counts less for predicting fewer (in the
    authors' code too each head has its own mean); n_d are all supervised tokens of d, and the loop divides by Σ_d n_d. A document is never
    cut: the loss is the same however packing, micro-batches and ranks share the documents out.
    """
    heads = range(section.heads)
    hidden = target.features(batch).hidden.flatten(0, 1)  # [B·S,H]
    states = [drafter.hidden_of(k, hidden) for k in heads]
    outputs = [drafter.output(k) for k in heads]
    tokens = [shifted(batch["input_ids"], k + 2) for k in heads]
    counted, weights = head_weights(batch, section.heads)
    parts = []
    if section.distill > 0:
        shifts = [k + 1 for k in heads]
        parts.append((section.distill, chunked_kl_heads(states, outputs, hidden, target.logits, list(weights), shifts)))
    if section.distill < 1:
        parts.append((1 - section.distill, [chunked_cross_entropy(states[k], outputs[k], tokens[k], weights[k]) for k in heads]))
    total = torch.stack([share * section.decay**k * loss.sum for share, losses in parts for k, loss in enumerate(losses)]).sum()
    weight = supervised_tokens(batch)
    # The loop divides metrics by `weight`. Head k predicts fewer tokens than that, the first k + 1 of a document not: scale its hits up.
    hits = {f"top1_head{k + 1}": loss.hits.sum() * weight / counted[k].sum().clamp(min=1) for k, loss in enumerate(parts[-1][1])}
    chains = survival_metrics(torch.stack([loss.hits for loss in parts[0][1]]), counted.float(), weight)
    return Loss(total, weight, chains | hits)


def check(recipe: MedusaRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    if recipe.train.context_parallel > 1:
        raise ValueError(
            f"train.context_parallel={recipe.train.context_parallel} is for EAGLE; Medusa's heads look at single positions and need little "
            "memory for a long sequence: leave it out, and lower train.micro_batch_size or data.seq_len instead"
        )
    if recipe.medusa.heads + 2 > recipe.data.seq_len:
        raise ValueError(f"medusa.heads={recipe.medusa.heads} look further ahead than data.seq_len={recipe.data.seq_len}; lower it")


def architecture(section: MedusaSection) -> dict[str, Any]:
    """The sizes of the heads."""
    return {"num_heads": section.heads, "num_layers": section.layers, "share_head": section.share_head}


def build_untrained(recipe: MedusaRecipe, target: Target) -> tuple[MedusaModel, Objective]:
    """Untrained heads and their objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    heads = new_drafter("medusa", target, **architecture(recipe.medusa))
    return cast(MedusaModel, heads), partial(objective, target=target, section=recipe.medusa)


def main(arguments: list[str]) -> None:
    recipe = load(MedusaRecipe, arguments[0], arguments[1:])
    section = recipe.medusa
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        drafter, train, valid = setup.new_drafter_and_data(recipe, "medusa", target, corpora, **architecture(section))
        fingerprint = setup.fingerprint(target, train)
        monitors = setup.monitors(recipe, target, drafter)
        measure = partial(objective, target=target, section=section)
        accelerator, steps = loop.fit(recipe, drafter, measure, train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
