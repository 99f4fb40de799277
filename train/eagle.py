"""Train an EAGLE drafter (EAGLE-1, EAGLE-3 or 3.1; Li et al. 2024, 2025) on a frozen target.

accelerate launch train/eagle.py recipes/eagle3-tiny.yaml
accelerate launch train/eagle.py recipes/eagle3-qwen3-8b.yaml data.train=answers.jsonl
"""

import sys
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.packing import PackedDataset
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.sampler import uniform
from draftsmith.models import vocab
from draftsmith.models.context_parallel import SINGLE_RANK, ContextParallel
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.eagle import EagleModel
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import default_taps, rope_theta
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import processes
from draftsmith.train.losses.draft import chain, chunked_draft_loss, feature_loss, mix
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens
from draftsmith.train.recipe import Changeable, Recipe, Section, load, usage


class EagleSection(Section):
    version: int = Field(default=3, description="3 for EAGLE-3 and 3.1; 1 for EAGLE-1 and EAGLE-2, which have the same weights")
    taps: tuple[int, ...] | None = Field(
        default=None, description="decoder layers read, by their outputs, from 0; unset: 1, L/2−1, L−4 of the target's L"
    )
    vocab_size: int | None = Field(default=None, ge=1, description="D: most frequent loss-bearing tokens; unset: the target's V")
    size: int | None = Field(default=None, ge=1, description="W, hidden size of the drafter; unset, like the four below: the target's")
    intermediate_size: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    layers: int = Field(default=1, ge=1)
    fc_norm: bool = Field(default=False, description="EAGLE-3.1: a norm of each tap before fc")
    norm_output: bool = Field(default=False, description="EAGLE-3.1: the normed output recurs")
    steps: int = Field(default=7, ge=1, description="K: steps of training-time test (version 1: how deep it may draft)")
    decay: float = Field(default=0.8, gt=0, le=1, description="weight of step j in the loss is decay^j")
    loss: str = Field(
        default="kl", description="kl, ce, nll, tv, jsd, jsd(0.1), lk, lk_hybrid, reverse_kl, or a mix such as `0.9 tv + 0.1 ce`"
    )
    noise: float = Field(default=0.2, ge=0, description="version 1: width of the uniform noise on features, at 512 positions")
    classification: float = Field(default=0.1, ge=0, description="version 1: weight of the soft cross-entropy beside SmoothL1")
    checkpointing: Changeable[bool] = Field(default=False, description="recompute each step in the backward pass: less memory, more time")
    start: str | None = Field(default=None, description="folder or Hub id of an EAGLE drafter to begin with; its head is re-indexed")


class EagleRecipe(Recipe):
    eagle: EagleSection = EagleSection()


def objective3(drafter: EagleModel, batch: Batch, *, target: Target, section: EagleSection, context: ContextParallel = SINGLE_RANK) -> Loss:
    """Σ_j decay^j · loss(p_{t+1+j}, q_j(t)): training-time test, each step reading its own output of the one before.

    q_j(t) [D] is step j's law at row t, of token t+2+j; p_s [V] the target's law of the token after s. A step is supervised where that token
    bears loss and is of the same document, so that the first token of every answer is. Of rows that are shared out, t are `context`'s.
    """
    ids, mask, document, length = batch["input_ids"], batch["loss_mask"], batch["document"], batch["input_ids"].shape[1]
    here, seen = context.part(length), context.part(length, section.steps)  # the target's laws are those of later rows
    out = target.features(batch, drafter.taps)
    feature = drafter.feature_of(_at(out, here))
    outputs = drafter.training_time_test(feature, ids, batch["position_ids"], document, section.steps, section.checkpointing, context)
    more = seen.stop - here.stop
    states = torch.stack([_and_zeros(drafter.before_head(output), more) for output in outputs])  # [K,M,W]
    weights = torch.stack([_and_zeros(shift_left(mask, j + 2, document)[:, here], more) for j in range(section.steps)])  # [K,M]
    vocabulary = drafter.vocabulary
    found = chunked_draft_loss(
        states,
        drafter.head(),
        out.hidden[:, seen].flatten(0, 1),
        target.logits,
        weights.float(),
        range(1, section.steps + 1),
        vocabulary.targets if vocabulary.size < vocabulary.vocab_size else None,
        section.loss,
        [section.decay**j for j in range(section.steps)],
        tokens=shift_left(ids, 1, document)[:, seen].flatten(),
    )
    tokens = supervised_tokens(batch, here)
    return Loss(found.sum, tokens, _serving(found.hits, weights, tokens, context))


def objective1(
    drafter: EagleModel, batch: Batch, *, target: Target, section: EagleSection, seed: int = 0, context: ContextParallel = SINGLE_RANK
) -> Loss:
    """SmoothL1(f̂_{t+1}, f_{t+1}) + classification · CE(p_{t+1}, q(t)): the next feature, and what the target's head makes of it.

    The features that it reads carry uniform noise of width noise · 512 / S (EAGLE's code), drawn by sample and position.
    """
    ids, mask, document, length = batch["input_ids"], batch["loss_mask"], batch["document"], batch["input_ids"].shape[1]
    here, seen = context.part(length), context.part(length, 1)
    out = target.features(batch)
    feature = drafter.feature_of(_at(out, here))
    if drafter.training and section.noise:
        width = section.noise * 512 / length
        key, place = (batch[name][:, here, None].clamp(min=0).expand_as(feature) for name in ("sample_id", "position_ids"))
        number = torch.arange(feature.shape[2], device=ids.device).expand_as(feature)
        feature = feature + (uniform(seed, key, place, number) - 0.5).to(feature.dtype) * width
    output = drafter.training_time_test(feature, ids, batch["position_ids"], document, 1, False, context)[0]
    weight, more = shift_left(mask, 2, document)[:, here].float(), seen.stop - here.stop
    actual = shift_left(out.hidden[:, seen], 1, document[:, seen])[:, : output.shape[1]]
    regression = feature_loss(output.flatten(0, 1), actual.flatten(0, 1).to(output.dtype), weight.flatten())
    found = chunked_draft_loss(
        _and_zeros(drafter.before_head(output), more)[None],
        drafter.head(),
        out.hidden[:, seen].flatten(0, 1),
        target.logits,
        _and_zeros(weight, more)[None],
        [1],
        None,
        "ce",
    )
    total = regression + section.classification * found.sum
    tokens = supervised_tokens(batch, here)
    return Loss(total, tokens, _serving(found.hits, _and_zeros(weight, more)[None], tokens, context))


def _at(out: TargetOutput, here: slice) -> TargetOutput:
    """The target's output at some positions."""
    return TargetOutput(out.hidden[:, here], None if out.taps is None else out.taps[:, here])


def _and_zeros(rows: Tensor, count: int) -> Tensor:
    """rows [B,n,...] with `count` zeros behind each -> [B·(n + count),...]."""
    return (F.pad(rows, (0, 0) * (rows.ndim - 2) + (0, count)) if count else rows).flatten(0, 1)


def _serving(hits: Tensor, weights: Tensor, tokens: Tensor, context: ContextParallel) -> dict[str, Tensor]:
    """Greedy acceptance that a chain would have, from rows whose every step is supervised; out of vocabulary is a miss.

    survival_k: accepted to depth k; tau: 1 + Σ survival_k. Times `tokens`, the batch's weight, by which the loop divides.
    """
    accepted, anchors = chain(hits, weights)
    *accepted, anchors = context.total(torch.stack([*accepted, anchors])).unbind()
    survival = torch.stack(accepted) / anchors.clamp(min=1) * tokens
    return {"sim_tau": tokens + survival.sum()} | {f"survival_{k}": one for k, one in enumerate(survival.unbind(), 1)}


def architecture(section: EagleSection, target: Target) -> dict[str, Any]:
    """The drafter's sizes: what the recipe says, else the target's."""
    config = target.config
    size = section.size or target.hidden_size
    same = size == target.hidden_size
    heads = section.heads or (config.num_attention_heads if same else max(1, size // 64))
    found = {
        "version": section.version,
        "draft_size": size,
        "intermediate_size": section.intermediate_size or (same and getattr(config, "intermediate_size", None)) or 4 * size,
        "num_layers": section.layers,
        "num_heads": heads,
        "num_kv_heads": section.kv_heads or (same and not section.heads and getattr(config, "num_key_value_heads", None)) or heads,
        "head_dim": size // heads,
        "rope_theta": rope_theta(config),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "fc_norm": section.fc_norm,
        "norm_output": section.norm_output,
        "steps": section.steps,
    }
    if section.version == 1 and (section.taps or section.vocab_size not in (None, target.vocab_size)):
        raise ValueError("EAGLE-1 reads no taps and has the target's vocabulary; leave out eagle.taps and eagle.vocab_size")
    if section.version == 3:
        found |= {"taps": list(section.taps or default_taps(target)), "draft_vocab_size": section.vocab_size or target.vocab_size}
    return found


def frequent(rows: PackedDataset | FeatureDataset, target: Target, size: int) -> vocab.DraftVocabulary:
    """The draft vocabulary: the most frequent loss-bearing tokens of the training data, and the tokens that stop."""
    corpus = rows.corpus
    pieces = corpus.tokens_by_domain().values()
    counts = torch.stack([vocab.count(ids, mask, target.vocab_size) for ids, mask in pieces]).sum(0)
    chosen = vocab.choose(counts, size, target.stop_ids)
    print(f"draft vocabulary: {size:,} of {target.vocab_size:,} tokens, {vocab.coverage(counts, chosen).overall:.2%} of what bears loss")
    return chosen


def begin_with(drafter: EagleModel, path: str, target: Target) -> None:
    """Take over the weights of another EAGLE drafter of this target, its head re-indexed to this one's draft vocabulary.

    Raises ValueError where it is another architecture, or reads other taps.
    """
    old = load_drafter(path, target)
    differing = [
        name
        for name in ("version", "taps", "draft_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "fc_norm")
        if getattr(old.config, name, None) != getattr(drafter.config, name)
    ]
    if not isinstance(old, EagleModel) or differing:
        raise ValueError(f"eagle.start={path}: {old.method} differs in {', '.join(differing)}; give a drafter of the same architecture")
    weights = {name: tensor for name, tensor in old.state_dict().items() if name not in ("d2t", "t2d")}
    if "lm_head.weight" in weights:
        moved, found = drafter.vocabulary.re_index(weights["lm_head.weight"], old.vocabulary)
        weights["lm_head.weight"] = torch.where(found[:, None], moved, drafter.lm_head.weight.detach())
        print(f"eagle.start: {int(found.sum()):,} of {len(found):,} rows of the head taken over, the rest as in a fresh one")
    drafter.load_state_dict(weights, strict=False)


def check(recipe: EagleRecipe) -> None:
    """Whether the keys go together, before anything is loaded. Raises ValueError, naming the keys."""
    mix(recipe.eagle.loss, "eagle.loss")
    length, ranks = recipe.data.seq_len, recipe.train.context_parallel
    if length % ranks:
        raise ValueError(f"data.seq_len={length} cannot be shared out over train.context_parallel={ranks} ranks; make it a multiple")


def measure(recipe: EagleRecipe, target: Target, context: ContextParallel = SINGLE_RANK) -> Objective:
    """The objective of the version."""
    if recipe.eagle.version == 1:
        return partial(objective1, target=target, section=recipe.eagle, seed=recipe.train.seed, context=context)
    return partial(objective3, target=target, section=recipe.eagle, context=context)


def build_untrained(recipe: EagleRecipe, target: Target) -> tuple[EagleModel, Objective]:
    """An untrained drafter and its objective, also for a target without values (`draftsmith plan`)."""
    check(recipe)
    shape = architecture(recipe.eagle, target)
    drafter = cast(EagleModel, new_drafter("eagle", target, **shape))
    size, whole = drafter.config.draft_vocab_size, target.vocab_size
    if size < whole:  # the first ones stand for the most frequent
        drafter.take(vocab.DraftVocabulary(torch.zeros(size, dtype=torch.int64), torch.arange(whole) < size))
    ranks = recipe.train.context_parallel
    return drafter, measure(recipe, target, ContextParallel(ranks - 1, ranks))  # the last one sees the most keys


def main(arguments: list[str]) -> None:
    recipe = load(EagleRecipe, arguments[0], arguments[1:])
    section = recipe.eagle
    check(recipe)
    context = processes.context_group(recipe.train.context_parallel)
    target, corpora = setup.load_target_and_data(recipe)
    shape = architecture(section, target)
    drafter, train, valid = setup.new_drafter_and_data(recipe, "eagle", target, corpora, reads=tuple(shape.get("taps", ())), **shape)
    assert isinstance(drafter, EagleModel)
    if shape.get("draft_vocab_size", target.vocab_size) < target.vocab_size:
        drafter.take(frequent(train, target, shape["draft_vocab_size"]))
    if section.start:
        begin_with(drafter, section.start, target)
    facts = setup.fingerprint(target, train) | {"draft vocabulary": drafter.vocabulary.digest()}
    watched = setup.monitors(recipe, target, drafter, drafter.taps)
    accelerator, steps = loop.fit(recipe, drafter, measure(recipe, target, context), train, valid, facts, **watched)
    if accelerator.is_main_process:
        publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:], usage(EagleRecipe, __doc__))
