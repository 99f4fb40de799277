"""Train Medusa heads (Cai et al. 2024, https://arxiv.org/abs/2401.10774) on a frozen target (Medusa-1), or together with it (Medusa-2).

Medusa-2 first trains the heads alone; then also LoRA adapters of the target, which hold to the target's own distribution or to the text. The output
is lossless with respect to the adapted target only; `draftsmith eval` measures how far that is from the target itself.

draftsmith train medusa medusa-tiny
draftsmith train medusa medusa2-tiny
accelerate launch train/medusa.py recipes/medusa-tiny.yaml target.path=Qwen/Qwen3-0.6B data.train=chats.jsonl
"""

import sys
from typing import Literal

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, check_complete_sequences, load


class MedusaSection(Section):
    """the heads and their loss"""

    heads: int = Field(default=4, ge=1, le=64, description="K, number of heads; head k = 0 … K−1 at position t predicts token t+2+k")
    layers: int = Field(default=1, ge=1, le=64, description="residual blocks of each head")
    share_head: bool = Field(default=False, description="use the target's output layer instead of one for each head")
    decay: float = Field(default=0.8, gt=0, le=1, description="weight of head k in the loss is decay^k")
    distill: float = Field(
        default=0.0, ge=0, le=1, description="share of the loss that is KL to the target's distribution; the rest is cross-entropy"
    )
    top_k: int = Field(default=0, ge=0, le=2**24, description="reduce the target's distribution to this many likeliest tokens; 0: all")
    start: str | None = Field(
        default=None,
        description="folder or Hub id of trained Medusa heads of the same sizes whose weights to start from; unset: the target's own token",
    )


class JointSection(Section):
    """Medusa-2: adapters of the target that are trained along with the heads"""

    rank: int = Field(
        default=0,
        ge=0,
        le=2**14,
        description="rank of LoRA adapters in all linear layers of the target but the head; 0: Medusa-1, without any",
    )
    alpha: int = Field(default=16, ge=1, le=2**20, description="an adapter's output is multiplied by alpha / rank")
    dropout: float = Field(default=0.05, ge=0, lt=1, description="share of an adapter's inputs that are left out in training")
    heads_steps: int = Field(default=0, ge=0, le=10**9, description="steps at the start that train the heads alone")
    lr: float = Field(default=5e-4, gt=0, le=1, description="learning rate of the adapters, on the same schedule as the heads' train.lr")
    base: Literal["kl", "ce"] = Field(
        default="kl", description="what the adapters keep: kl, the target's distribution without them (self-distillation); ce, the text"
    )
    weight: float = Field(default=0.01, gt=0, le=1000, description="λ, weight of the heads' loss in the adapters' loss")
    schedule: Literal["sine", "constant"] = Field(
        default="sine", description="of λ: sine raises it from 0 over the steps with adapters, as a quarter of a sine wave"
    )


class MedusaRecipe(Recipe):
    medusa: MedusaSection = MedusaSection()
    joint: JointSection = JointSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(MedusaRecipe, __doc__)

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from draftsmith.inference.errors import exit_on_error
from draftsmith.models import adapter, student
from draftsmith.models.drafter import new_drafter
from draftsmith.models.medusa import MedusaModel
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import confidence, output, processes, replay
from draftsmith.train.losses.chunked import chunked_cross_entropy, chunked_kl
from draftsmith.train.losses.heads import check_top_k, head_losses, head_metrics, head_weights, shifted
from draftsmith.train.objective import Batch, Loss, Objective, Progress, supervised_tokens

if TYPE_CHECKING:
    from peft import PeftModel


def objective(drafter: MedusaModel, batch: Batch, *, target: Target, section: MedusaSection) -> Loss:
    """Σ_d n_d · Σ_k decay^k · mean_t [(1 − distill) · CE(head_k(h_t), x_{t+2+k}) + distill · KL(p_{t+1+k} ‖ head_k(h_t))].

    h [B,S,H] is the target's hidden state after its final norm. p_s [V] is its distribution of the token after position s. The mean of head
    k in document d is over the supervised tokens that the head predicts there, so that no head counts less for predicting fewer (in the
    authors' code too each head has its own mean); n_d are all supervised tokens of d, and the loop divides by Σ_d n_d. A document is never
    cut: the loss is the same however packing, micro-batches and ranks share the documents out.
    """
    hidden, ids = target.features(batch).hidden.flatten(0, 1), batch["input_ids"]  # [B·S,H]
    states = [drafter.hidden_of(k, hidden) for k in range(section.heads)]
    outputs = [drafter.output(k) for k in range(section.heads)]
    tokens = torch.stack([shifted(ids, k + 2) for k in range(section.heads)])
    counted, weights = head_weights(batch, section.heads, section.decay)
    total, hits = head_losses(states, outputs, tokens, hidden, target.logits, weights, section.distill, section.top_k)
    weight = supervised_tokens(batch)
    return Loss(total, weight, head_metrics(hits, counted))


class JointModel(nn.Module):
    """The heads and the target with its adapters: what Medusa-2 trains.

    Attributes:
        heads: the drafter.
        adapted: the target's own model, with adapters, which alone require gradients.
        learning_rates: of its parts, by name; for the optimizer.
    """

    def __init__(self, heads: MedusaModel, adapted: "PeftModel", lr: float) -> None:
        super().__init__()
        self.heads, self.adapted, self.learning_rates = heads, adapted, {"adapted": lr}

    def train(self, mode: bool = True) -> "JointModel":
        """As nn.Module's, but of the target only the adapters' dropout is turned on: its own stays off, as in decoding."""
        super().train(mode)
        self.adapted.eval()
        for name, module in self.adapted.named_modules():
            if name.endswith("lora_dropout"):
                module.train(mode)
        return self

    def adapters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.adapted.parameters() if parameter.requires_grad]


def heads_weight(joint: JointSection, done: int, steps: int) -> float:
    """λ in the step after `done` of `steps`; 0 while the heads are trained alone."""
    if done < joint.heads_steps:
        return 0.0
    progress = (done - joint.heads_steps + 1) / max(1, steps - joint.heads_steps)
    return joint.weight * (math.sin(math.pi / 2 * progress) if joint.schedule == "sine" else 1.0)


def joint_objective(model: JointModel, batch: Batch, *, target: Target, recipe: MedusaRecipe, progress: Progress) -> Loss:
    """The heads' parameters minimise `objective` on the adapted target's hidden states, the adapters' parameters base + λ · objective, where

    base = Σ_t KL(p_t ‖ a_t), or with joint.base=ce Σ_t CE(a_t, x_{t+1}).

    p_t and a_t [V] are the target's distributions of the supervised token t+1 without and with adapters. In `objective` too the target's
    distribution is the adapted one, which verifies. The heads' gradient is not multiplied by λ: AdamW divides a constant factor
    out, and a changing one would only disturb its means. While the heads are trained alone, the adapters change nothing, and base is 0.
    """
    section, joint = recipe.medusa, recipe.joint
    weight = heads_weight(joint, progress.steps, recipe.train.steps)
    progress.stage = int(weight > 0)
    if not weight:
        loss = objective(model.heads, batch, target=target, section=section)
        idle = torch.stack([parameter.sum() for parameter in model.adapters()]).sum()  # all launchers want a gradient of each parameter
        return Loss(loss.sum + 0 * idle, loss.weight, loss.metrics | {"base": torch.zeros_like(loss.sum.detach())})
    ids, mask, document = batch["input_ids"], batch["loss_mask"], batch["document"]
    counted = shift_left(mask, 1, document).flatten()
    original = None
    if joint.base == "kl":
        with model.adapted.disable_adapter():
            original = target.features(batch).hidden.flatten(0, 1)  # [B·S,H]
    hidden = student.hidden(model.adapted, batch)  # [B,S,H]
    states, head = hidden.flatten(0, 1), student.head(model.adapted, target.vocab_size)
    if original is not None:
        base = chunked_kl(states, head, original, target.logits, counted)
    else:
        base = chunked_cross_entropy(states, head, shift_left(ids, 1, document).flatten(), counted)
    constant = hidden.detach()
    weighted = constant + weight * (hidden - constant)  # the value of `hidden`, λ times its gradient
    loss = objective(model.heads, batch | {"hidden": weighted}, target=target, section=section)
    return Loss(loss.sum + base.sum, loss.weight, loss.metrics | {"base": base.sum.detach()})


def check(recipe: MedusaRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    check_complete_sequences(recipe)
    if recipe.medusa.heads + 2 > recipe.data.seq_len:
        raise ValueError(f"medusa.heads={recipe.medusa.heads} look further ahead than data.seq_len={recipe.data.seq_len}; lower it")
    check_top_k(recipe.medusa, "medusa")
    if recipe.joint.rank:
        _check_joint(recipe)


def _check_joint(recipe: MedusaRecipe) -> None:
    joint, target = recipe.joint, recipe.target
    recipe.train.refuse_unread("train", ["patience"], f"joint.rank={joint.rank}, where no weights but the last are saved")
    if recipe.features.mode != "online":
        raise ValueError(
            f"features.mode={recipe.features.mode}: Medusa-2 needs gradients through the target, and a store has none; take features.mode=online, "
            "or joint.rank=0"
        )
    if joint.heads_steps >= recipe.train.steps:
        raise ValueError(
            f"joint.heads_steps={joint.heads_steps} leaves no step with adapters of train.steps={recipe.train.steps}; lower it"
        )
    changed = f"target.parallel={target.parallel}" if target.parallel != "none" else f"target.quantise={target.quantise}"
    if target.parallel != "none" or target.quantise:
        raise ValueError(
            f"{changed}: Medusa-2 trains adapters of a target that is complete and not quantised; leave it out, or take joint.rank=0"
        )
    if processes.sharded():
        raise ValueError(
            "FSDP and DeepSpeed cut what they train, and Medusa-2 trains the target itself; launch it with recipes/accelerate-ddp.yaml or on one GPU"
        )


def architecture(section: MedusaSection) -> dict[str, Any]:
    """The sizes of the heads."""
    return {"num_heads": section.heads, "num_layers": section.layers, "share_head": section.share_head}


def with_adapters(
    recipe: MedusaRecipe, heads: MedusaModel, target: Target, progress: Progress
) -> tuple[JointModel, Callable[[JointModel, Batch], Loss]]:
    """The heads together with the target, which gets adapters, and the objective of both."""
    joint = recipe.joint
    adapted = adapter.with_lora(target.model, joint.rank, joint.alpha, recipe.train.seed, joint.dropout)
    return JointModel(heads, adapted, joint.lr), partial(joint_objective, target=target, recipe=recipe, progress=progress)


def build_untrained(recipe: MedusaRecipe, target: Target) -> tuple[MedusaModel | JointModel, Objective]:
    """Untrained heads and their objective, for Medusa-2 that of the steps with adapters. `draftsmith plan` calls it with a target on the meta
    device."""
    check(recipe)
    heads = cast(MedusaModel, new_drafter("medusa", target, **architecture(recipe.medusa)))
    if recipe.joint.rank:
        return with_adapters(recipe, heads, target, Progress(recipe.joint.heads_steps))
    return heads, partial(objective, target=target, section=recipe.medusa)


def main(arguments: list[str]) -> None:
    recipe = load(MedusaRecipe, arguments[0], arguments[1:])
    section = recipe.medusa
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        drafter, train, valid = setup.new_drafter_and_data(recipe, "medusa", target, corpora, **architecture(section))
        if section.start:
            setup.start_from(drafter, section.start, target, "medusa.start")
        fingerprint = setup.fingerprint(recipe, target, train)
        monitors = setup.monitors(recipe, target, drafter)
        model, measure = drafter, partial(objective, target=target, section=section)
        if recipe.joint.rank:
            fingerprint["target's weights"] = replay.digest(target.model, trained=False)  # the checkpoints hold the adapters alone
            progress = Progress()
            model, measure = with_adapters(recipe, cast(MedusaModel, drafter), target, progress)
            monitors |= {"progress": progress, "keep_best": False}
        accelerator, steps = loop.fit(recipe, model, measure, train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            model.eval()  # the adapters' dropout, where no step was left to take
            confidence.fit(drafter, target, valid)
            publish.publish_drafter(recipe, drafter, target, steps, model.adapted if isinstance(model, JointModel) else None)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
