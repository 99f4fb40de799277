"""Train a target so that its first layers draft for it (LayerSkip, Elhoushi et al. 2024, https://arxiv.org/abs/2404.16710).

draftsmith train layerskip layerskip-tiny
accelerate launch train/layerskip.py recipes/layerskip-tiny.yaml layerskip.exits=[8] target.path=Qwen/Qwen3-8B data.train=answers.jsonl

The result is another target: it drafts by `--drafter early-exit:E`, and its answers are its own, no longer those of the target that it was.
"""

import sys
from typing import Annotated

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, check_complete_sequences, load

FirstLayers = Annotated[int, Field(ge=1, le=1000)]


class LayerskipSection(Section):
    """exits, their loss, and layer dropout"""

    exits: tuple[FirstLayers, ...] = Field(description="numbers of first layers that learn to predict the next token, such as [2] or [4,8]")
    weight: float = Field(
        default=0.5, gt=0, lt=1, description="share of the exits, together, in the loss; the rest is the complete model's"
    )
    loss: str = Field(
        default="nll",
        description="of an exit: nll (of the text's tokens, as in the paper), or against the complete model's distribution: kl, ce, reverse_kl, "
        "jsd(β), tv, lk, lk_hybrid, or a mix: `0.5 nll + 0.5 kl`",
    )
    dropout: float = Field(
        default=0.1, ge=0, lt=1, description="probability with which a document skips the last layer; less for earlier ones"
    )
    lora: int = Field(default=0, ge=0, le=2**14, description="rank of LoRA adapters, which alone are trained; 0: all weights are trained")


class LayerskipRecipe(Recipe):
    layerskip: LayerskipSection

    @property
    def needs_target_layers(self) -> bool:
        return False  # the model that is trained is a copy of its own


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(LayerskipRecipe, __doc__)

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.eval.loading import command
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.sampler import uniform
from draftsmith.inference.self_speculation import early_exit
from draftsmith.inference.tree import StaticTree
from draftsmith.models import adapter
from draftsmith.models import student as students
from draftsmith.models.early_exits import check_exits, dropout_probabilities, exit_states
from draftsmith.models.saving import save_model
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import output, replay
from draftsmith.train.engine.say import say
from draftsmith.train.losses.chunked import chunked_cross_entropy
from draftsmith.train.losses.draft import chunked_draft_loss, mix
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def check(recipe: LayerskipRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    target = recipe.target
    mix(recipe.layerskip.loss, "layerskip.loss")
    recipe.train.refuse_unread("train", ["patience"], "LayerSkip, where no weights but the last are saved")
    recipe.train.refuse_unread("train", ["compile"], "LayerSkip, which trains the target's layers")
    target.refuse_unread("target", ["dtype"], "LayerSkip, which trains in float32")
    if recipe.features.mode != "online":
        raise ValueError(f"features.mode={recipe.features.mode}: LayerSkip trains the target itself, no stored feature stays; leave it out")
    if target.parallel != "none" or target.quantise:
        got = f"target.parallel={target.parallel}" if target.parallel != "none" else f"target.quantise={target.quantise}"
        raise ValueError(
            f"{got} is for a frozen target, LayerSkip trains it; leave it out, and take layerskip.lora or a launcher for memory"
        )
    check_complete_sequences(recipe)


def objective(model: PreTrainedModel, batch: Batch, *, section: LayerskipSection, seed: int) -> Loss:
    """(1 − w) Σ_t CE(x_{t+1} | all layers) + w / E · Σ_exits Σ_t loss(first layers, x_{t+1} or all layers' distribution).

    A document skips layer l with probability D(l) · dropout, D from 0 to 1 (section 4.1), drawn by its sample id. The paper weights all
    L exits by e(l) ~ l², which gives an early one a hundredth; here those that will draft share w.
    """
    document = batch["document"]
    weight = shift_left(batch["loss_mask"], 1, document).flatten().float()
    tokens = shift_left(batch["input_ids"], 1, document).flatten()
    states, exits = exit_states(model, batch, section.exits, dropped_layers(model, batch, section.dropout, seed))
    head = students.head(model, model.config.get_text_config().vocab_size)
    last = chunked_cross_entropy(states.flatten(0, 1), head, tokens, weight)
    drafts = chunked_draft_loss(
        exits.flatten(1, 2),
        head,
        states.flatten(0, 1).detach(),
        head,
        weight.expand(len(exits), -1),
        [0] * len(exits),
        None,
        mix(section.loss, "layerskip.loss"),
        [section.weight / len(exits)] * len(exits),
        tokens=tokens,
    )
    metrics = {"nll": last.sum.detach(), "top1": last.hits.sum()}
    metrics |= {f"acceptance_{count}": overlap.sum() for count, overlap in zip(section.exits, drafts.overlap, strict=True)}
    return Loss((1 - section.weight) * last.sum + drafts.sum, supervised_tokens(batch), metrics)


def dropped_layers(model: PreTrainedModel, batch: Batch, most: float, seed: int) -> Tensor | None:
    """bool [L,B,S]: which layers each document skips; None outside training, or where none is dropped."""
    if not model.training or not most:
        return None
    probabilities = torch.tensor(
        dropout_probabilities(model.config.get_text_config().num_hidden_layers, most), device=batch["document"].device
    )
    sample = batch["sample_id"].clamp(min=0).expand(len(probabilities), -1, -1)
    layer = torch.arange(len(probabilities), device=sample.device)[:, None, None].expand_as(sample)
    return uniform(seed, sample, torch.zeros_like(sample), layer) < probabilities[:, None, None]


def build_untrained(recipe: LayerskipRecipe, target: Target) -> tuple[PreTrainedModel, Objective]:
    """The model and its objective. `draftsmith plan` calls it with a target on the meta device; only the config is read."""
    check(recipe)
    section = recipe.target
    model = students.unread(section.path, "target.path", revision=section.revision, trust_remote_code=section.trust_remote_code)
    return _ready(recipe, model), partial(objective, section=recipe.layerskip, seed=recipe.train.seed)


def _ready(recipe: LayerskipRecipe, model: PreTrainedModel) -> PreTrainedModel:
    section = recipe.layerskip
    check_exits(model, section.exits)
    return adapter.with_lora(model, section.lora, seed=recipe.train.seed) if section.lora else model  # type: ignore[return-value]


def write_card(folder: Path, recipe: LayerskipRecipe, steps: int) -> None:
    """Write README.md beside the weights: what the model is now, and how it drafts."""
    exits = recipe.layerskip.exits
    lines = [
        "---",
        "library_name: transformers",
        "---",
        "",
        f"# {Path(recipe.train.output).name}",
        "",
        f"{recipe.target.path}, trained further by LayerSkip (arXiv 2404.16710) so that its first {' or '.join(map(str, exits))} layers draft "
        "for it. It is another model: its answers are not those of the one that it was.",
        "",
        f"- Training: {steps:,} steps, {steps * recipe.train.batch_size * recipe.data.seq_len:,} tokens, as recipe.yaml says.",
        *(f"- Drafting: `draftsmith generate --target FOLDER --drafter early-exit:{count}`" for count in exits),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    recipe = load(LayerskipRecipe, arguments[0], arguments[1:])
    check(recipe)
    section, source = recipe.layerskip, recipe.target
    ends, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        model = students.existing(source.path, ends, revision=source.revision, trust_remote_code=source.trust_remote_code)
        model = _ready(recipe, model)
        trained = students.frozen(model, ends.tokenizer)
        trained.mask_blocks()
        train, valid = (setup.packed_dataset(recipe, trained, corpora[part]) for part in ("train", "valid"))
        drafter = early_exit(trained, section.exits[0])
        drafter.tree_spec = StaticTree.chain(4)
        setup.set_tree(drafter, recipe.tree, "chain")
        fingerprint = setup.fingerprint(recipe, ends, train)
        if section.lora:  # the checkpoints hold the adapters alone
            fingerprint["target's weights"] = replay.digest(model, trained=False)
        measure = partial(objective, section=section, seed=recipe.train.seed)
        tau = setup.tau_probe(recipe, trained, drafter)
        accelerator, steps = loop.fit(recipe, model, measure, train, valid, fingerprint, measure_tau=tau, keep_best=False)
        if not accelerator.is_main_process:
            return

        def write(folder: Path) -> None:
            if section.lora:
                save_model(model, folder / "adapter")
            save_model(adapter.merged(model).cpu().to(torch.bfloat16), folder)  # pyright: ignore[reportArgumentType, reportCallIssue]
            ends.require_tokenizer().save_pretrained(folder)
            write_card(folder, recipe, steps)

        folder, _ = publish.replace_artifact(recipe, write)
        say(
            f"{folder}: trained for {steps} steps; measure it with\n    {command()} eval --target {folder} --drafter early-exit:{section.exits[0]}"
        )


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
