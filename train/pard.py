"""Train a causal LM to draft K tokens in one forward: PARD (An et al. 2025, https://arxiv.org/abs/2504.18583, version 4).

draftsmith train pard pard-tiny
accelerate launch train/pard.py recipes/pard-tiny.yaml pard.start=Qwen/Qwen3-0.6B target.path=Qwen/Qwen3-8B data.train=answers.jsonl
"""

import sys

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Recipe, Section, load


class PardSection(Section):
    """the draft model, and how many masks it is trained on"""

    start: str = Field(default="tiny-draft", description="folder or Hub id of the causal LM to train, with the target's tokenizer")
    revision: str | None = Field(default=None, description="branch, tag or commit of it on the Hub; unset: the default branch")
    steps: int = Field(default=8, ge=2, le=64, description="K, tokens of one forward (the authors: 8)")
    mask_token: int | None = Field(
        default=None, ge=0, description="token that a mask reads, one that texts do not have; unset: the first id that the tokenizer lacks"
    )
    retention: float = Field(
        default=0.7, gt=0, le=1, description="r: masks at level i are trained behind a share r^i of the positions (the authors: 0.7)"
    )
    least_retention: float = Field(default=0.2, ge=0, le=1, description="that share is at least this (the authors: 0.2)")


class PardRecipe(Recipe):
    pard: PardSection = PardSection()

    @property
    def needs_target_layers(self) -> bool:
        return self.train.tau_prompts > 0  # the loss does not read the target


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(PardRecipe, __doc__)

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.expand import tree_config
from draftsmith.inference.tree import StaticTree
from draftsmith.models import student as students
from draftsmith.models.artifact import MASK_TOKEN
from draftsmith.models.mask_rows import check_attention, hidden_with_masks, mask_rows
from draftsmith.models.pard import ParallelDraftModel
from draftsmith.models.saving import save_student
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import output
from draftsmith.train.losses.anchors import chain_rows, check_blocks, draw_chains, per_sequence, retained, tokens_behind
from draftsmith.train.losses.chunked import chunked_cross_entropy
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def objective(model: PreTrainedModel, batch: Batch, *, vocab_size: int, section: PardSection, mask_token: int, seed: int = 0) -> Loss:
    """Σ_b n_b · [Σ_t CE(q_t, x_{t+1}) + Σ_{a,i} CE(q_{a,i}, x_{a+1+i})] / (number of t and of a, i), with the text's own tokens x.

    q_t [D] is the model's distribution after position t; t + 1 is supervised and of the same document. q_{a,i} is that of mask i behind
    position a. COD: the masks at level i follow a random share max(r^i, least_retention) of the positions whose next two
    tokens are supervised, among those that have masks up to level i − 1. A mask counts while all tokens from a + 1 on are supervised. n_b are the supervised tokens of
    sequence b, by whose sum the loop divides. All terms weigh the same, as in the authors' code. A token that the model lacks has no term.
    """
    ids, document, size = batch["input_ids"], batch["document"], section.steps
    shares = retained(section.retention, section.least_retention, size - 1)
    anchors, depths, drawn = draw_chains(batch, shares, seed)
    _, tokens, supervised = tokens_behind(batch, anchors, drawn, size)  # [B,A,K]
    rows = mask_rows(document, anchors, depths, chain_rows(shares, ids.shape[1]), size - 1)
    states = hidden_with_masks(model, ids, batch["position_ids"], rows, mask_token)
    entry = rows.anchor_index * size + rows.level
    labels = torch.cat((shift_left(ids, 1, document), tokens.flatten(1).gather(1, entry)), 1)
    counted = torch.cat((shift_left(batch["loss_mask"], 1, document).bool(), supervised.flatten(1).gather(1, entry)), 1)
    known = labels < students.head_size(model, vocab_size)  # a draft model may lack tokens that were added to the target: misses
    labels, counted = torch.where(known, labels, 0), counted & known
    weights = per_sequence(counted[:, None].float(), batch)
    losses = chunked_cross_entropy(states.flatten(0, 1), students.head(model, vocab_size), labels.flatten(), weights.flatten())
    hits = losses.hits.view(labels.shape)
    along = torch.zeros_like(tokens, dtype=torch.bool).flatten(1).scatter(1, entry, hits[:, ids.shape[1] :]).view(tokens.shape)
    along[..., 0] = hits.gather(1, anchors)
    chains = supervised & (torch.arange(size, device=ids.device) <= depths[..., None])
    weight = supervised_tokens(batch)
    return Loss(losses.sum, weight, survival_metrics(along.flatten(0, 1).T, chains.flatten(0, 1).T))


def check(recipe: PardRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    check_blocks(recipe, "nll", "pard", "steps", recipe.pard.steps + 1)
    recipe.train.refuse_unread("train", ["compile"], "PARD, which runs no target")
    if recipe.features.mode != "online":
        raise ValueError(f"features.mode={recipe.features.mode}: PARD trains on the text alone and reads no features; leave it out")


def mask_token_of(section: PardSection, model: PreTrainedModel, target: Target) -> int:
    """The mask token: the recipe's, the model's own if it has one, or an id that no text has. Raises ValueError where there is none."""
    size = len(model.get_input_embeddings().get_parameter("weight"))
    token = section.mask_token if section.mask_token is not None else getattr(model.config, MASK_TOKEN, None)
    if token is None:
        token = max(target.tokenizer.get_vocab().values(), default=-1) + 1 if target.tokenizer else 0
        if token >= size:
            raise ValueError(f"pard.mask_token: the tokenizer has all {size} ids of {section.start!r}; name a token that texts do not have")
    if not 0 <= token < size:
        raise ValueError(f"pard.mask_token={token}: {section.start!r} has the tokens 0 to {size - 1}; name one of them")
    return token


def checked(recipe: PardRecipe, model: PreTrainedModel) -> PreTrainedModel:
    """The model. Raises ValueError where masks cannot be trained in it, or its context is too short."""
    check_attention(model, f"pard.start={recipe.pard.start}")
    context = model.config.get_text_config().max_position_embeddings
    if context < recipe.data.seq_len:
        raise ValueError(f"data.seq_len={recipe.data.seq_len} is longer than the context of pard.start, {context}; lower it")
    return model


def writer(
    recipe: PardRecipe, target: Target, model: PreTrainedModel, drafter: ParallelDraftModel
) -> Callable[[Path, dict[str, Any]], None]:
    """A function that writes an ordinary bf16 checkpoint with the mask token in its config; the key `draftsmith` has K beside what a student's has."""

    def write(folder: Path, training: dict[str, Any]) -> None:
        entry = {"target": target.identity.to_dict(), "tree": tree_config(drafter.tree_spec), "confidence": 0.0, "training": training}
        setattr(model.config, MASK_TOKEN, drafter.mask_token)
        save_student(model, folder, entry | {"parallel": recipe.pard.steps}, drafter.max_depth)

    return write


def build_untrained(recipe: PardRecipe, target: Target) -> tuple[PreTrainedModel, Objective]:
    """The model, of which only the config is read, and its objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    section = recipe.pard
    model = students.unread(section.start, "pard.start", revision=section.revision, trust_remote_code=recipe.target.trust_remote_code)
    model = checked(recipe, model)
    shared = {"vocab_size": target.vocab_size, "section": section, "seed": recipe.train.seed}
    return model, partial(objective, mask_token=section.mask_token or 0, **shared)


def main(arguments: list[str]) -> None:
    recipe = load(PardRecipe, arguments[0], arguments[1:])
    section = recipe.pard
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        train, valid = (setup.packed_dataset(recipe, target, corpora[part]) for part in ("train", "valid"))
        options = {"revision": section.revision, "trust_remote_code": recipe.target.trust_remote_code}
        model = checked(recipe, students.existing(section.start, target, **options))
        student, mask_token = students.frozen(model, target.tokenizer), mask_token_of(section, model, target)
        drafter = ParallelDraftModel(student, StaticTree.chain(min(4, section.steps)), mask_token, section.steps)
        setup.set_tree(drafter, recipe.tree, "chain")
        fingerprint = setup.fingerprint(recipe, target, train) | {"mask token": mask_token}
        measure = partial(objective, vocab_size=target.vocab_size, section=section, mask_token=mask_token, seed=recipe.train.seed)
        monitors = setup.monitors(recipe, target, drafter, positions=student.max_positions)
        monitors["target_forward"] = None  # training runs no target
        accelerator, steps = loop.fit(recipe, model, measure, train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            write = writer(recipe, target, model, drafter)
            publish.publish(recipe, target, steps, ParallelDraftModel.method, target.identity.to_dict(), write)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
