"""Train an EAGLE drafter (EAGLE-1, EAGLE-3 or 3.1; Li et al. 2024, 2025) on a frozen target.

draftsmith train eagle eagle3-tiny
accelerate launch train/eagle.py recipes/eagle3-qwen3-8b.yaml data.train=answers.jsonl
"""

import sys
from typing import Literal

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Changeable, Recipe, Section, load


class EagleSection(Section):
    """the drafter and its loss"""

    version: Literal[1, 3] = Field(default=3, description="3: EAGLE-3 and 3.1; 1: EAGLE-1 and EAGLE-2, which have the same weights")
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
    hidden_size: int | None = Field(default=None, ge=1, le=2**17, description="W, hidden size of the drafter; unset: the target's")
    intermediate_size: int | None = Field(
        default=None, ge=1, le=2**20, description="inner size of the MLP; unset: the target's, or 4 W where hidden_size differs"
    )
    heads: int | None = Field(
        default=None, ge=1, le=2**12, description="attention heads; unset: the target's, or W / 64 where hidden_size differs"
    )
    kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=2**12,
        description="key and value heads; unset: the target's, or as many as heads where heads or hidden_size differ",
    )
    layers: int = Field(default=1, ge=1, le=64, description="decoder layers of the drafter")
    fc_norm: bool = Field(default=False, description="EAGLE-3.1: normalise each tap before fc")
    norm_output: bool = Field(default=False, description="EAGLE-3.1: feed the normalised output to the next step")
    norm_before_fc: bool = Field(default=False, description="as in speculators: normalise all taps together before fc")
    norm_before_residual: bool = Field(default=False, description="as in speculators: the first layer's residual is the normalised feature")
    train_head: bool = Field(
        default=True,
        description="version 3: train the head; false: it stays as it starts, as the target's rows or as eagle.start has it, and a step is cheaper",
    )
    regression: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="version 3: weight of the SmoothL1 of the output after its norm to the target's hidden state; it falls to 0 over the run, and is not part "
        "of the held-out loss",
    )
    prompts: bool = Field(
        default=False,
        description="version 3: train on the prompts' tokens too, which the target's distribution supervises as well as answers; held-out loss "
        "and simulated τ stay those of answers. It needs train.normalise=all",
    )
    steps: int = Field(
        default=7, ge=1, le=64, description="K, steps of the training-time test; in version 1 how deep the drafter may draft"
    )
    rise: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="version 3: share of the run over which the trained steps rise from 1 to K, in equal parts; it is cheaper; 0: K from the start. The simulated τ of "
        "training is that of the trained steps",
    )
    decay: float = Field(default=0.8, gt=0, le=1, description="weight of step j in the loss is decay^j")
    loss: str = Field(
        default="kl", description="version 3: kl, ce, nll, tv, jsd, jsd(0.1), lk, lk_hybrid, reverse_kl, or a mix such as `0.9 tv + 0.1 ce`"
    )
    end_to_end: bool = Field(
        default=False,
        description="version 3: train for the expected accepted length of the chain, in place of eagle.loss; eagle.decay weighs the regression alone",
    )
    noise: float = Field(default=0.2, ge=0, le=1000, description="version 1: width of the uniform noise on features, at 512 positions")
    classification: float = Field(
        default=0.1, ge=0, le=1000, description="version 1: weight of the soft cross-entropy, beside SmoothL1's 1"
    )
    checkpointing: Changeable[bool] = Field(
        default=False, description="version 3: recompute each step in the backward pass: less memory, more time"
    )
    start: str | None = Field(
        default=None,
        description="folder or Hub id of an EAGLE drafter whose weights to start from, its head re-indexed; unset: fresh weights",
    )


class EagleRecipe(Recipe):
    eagle: EagleSection = EagleSection()


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(EagleRecipe, __doc__)

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.errors import exit_on_error
from draftsmith.models import vocab
from draftsmith.models.context_parallel import SINGLE_RANK, ContextParallel
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.eagle import EagleModel
from draftsmith.models.formats.published import format_of, read_published
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import default_taps, rope_theta
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import confidence, output, processes, replay
from draftsmith.train.engine.say import say
from draftsmith.train.losses.acceptance import acceptance_loss
from draftsmith.train.losses.draft import chunked_draft_loss, feature_loss, mix
from draftsmith.train.losses.noise import feature_noise
from draftsmith.train.losses.survival import survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, Progress, supervised_tokens


def objective3(
    drafter: EagleModel,
    batch: Batch,
    *,
    target: Target,
    section: EagleSection,
    context: ContextParallel = SINGLE_RANK,
    progress: Progress | None = None,
) -> Loss:
    """Σ_j decay^j · [loss(p_{t+1+j}, q_j(t)) + (1 − n/N) · regression · SmoothL1(ĥ_j(t), h_{t+1+j})]: training-time test.

    Each step reads its own output of the step before. n of the run's N steps are done (`progress`; none: n = 0, and all K steps are trained).

    q_j(t) [D] is the drafter's distribution of token t+2+j in step j at position t. p_s [V] is the target's distribution of the token after
    position s. A step is supervised where that token is supervised and belongs to the same document; the first token of each answer is
    supervised too. With section.prompts all tokens are supervised while the drafter trains. The drafter's head reads ĥ_j(t) [W]; the target's
    head reads h_s [H] and makes p_s of it. Under context parallelism t ranges over this rank's positions. With end_to_end the sum over j is
    the part of a chain of K tokens that is not accepted (`acceptance_loss`), plus the regression.
    """
    ids, answers, document, length = batch["input_ids"], batch["loss_mask"], batch["document"], batch["input_ids"].shape[1]
    mask = document >= 0 if section.prompts and drafter.training else answers
    steps = section.steps
    if section.rise and progress is not None and drafter.training:
        steps = progress.stage = _trained_steps(section, progress)
    own, read = context.part(length), context.part(length, steps)  # later steps need the target at up to K more positions
    out = target.features(batch, drafter.taps)
    feature = drafter.feature_of(_at(out, own))
    outputs = drafter.training_time_test(feature, ids, batch["position_ids"], document, steps, section.checkpointing, context)
    extra = read.stop - own.stop
    states = torch.stack([_padded(drafter.before_head(output), extra) for output in outputs])  # [K,M,W]

    def at_each_step(mask: Tensor) -> Tensor:  # [B,S] -> [K,M]
        return torch.stack([_padded(shift_left(mask, j + 2, document)[:, own], extra) for j in range(steps)])

    weights = at_each_step(mask)
    vocabulary, actual = drafter.vocabulary, out.hidden[:, read].flatten(0, 1)
    target_ids = vocabulary.targets if vocabulary.size < vocabulary.vocab_size else None
    if section.end_to_end:
        total, hits = acceptance_loss(states, drafter.head(), actual, target.logits, weights, weights[0].float(), target_ids)
    else:
        shifts, decay = range(1, steps + 1), [section.decay**j for j in range(steps)]
        tokens = shift_left(ids, 1, document)[:, read].flatten()
        losses = chunked_draft_loss(
            states, drafter.head(), actual, target.logits, weights.float(), shifts, target_ids, section.loss, decay, tokens=tokens
        )
        total, hits = losses.sum, losses.hits
    if section.regression and drafter.training:  # against the hidden states of the very distributions that the steps are compared with
        regression = section.regression * (1 - progress.steps / progress.total if progress else 1)
        for j in range(steps):
            hidden = shift_left(out.hidden[:, read], j + 1, document[:, read]).flatten(0, 1)
            total = total + regression * section.decay**j * feature_loss(states[j], hidden, weights[j])
    tokens = supervised_tokens(batch | {"loss_mask": mask}, own)
    # Of answers alone, as the held-out figures are: the tokens that a chat template repeats in every conversation are easy.
    return Loss(total, tokens, survival_metrics(hits, at_each_step(answers)))


def _trained_steps(section: EagleSection, progress: Progress) -> int:
    """How many of the K steps are trained now: each number for rise / K of the run, K to its end."""
    return min(section.steps, 1 + int(section.steps * progress.steps / (section.rise * progress.total)))


def objective1(
    drafter: EagleModel, batch: Batch, *, target: Target, section: EagleSection, seed: int = 0, context: ContextParallel = SINGLE_RANK
) -> Loss:
    """SmoothL1(f̂_{t+1}, f_{t+1}) + classification · CE(p_{t+1}, q(t)): the next feature, and the distribution that the target's head makes of it.

    Uniform noise of width noise · 512 / length of the document (EAGLE's code), keyed by example and position, is added to the features that
    the drafter reads.
    """
    ids, mask, document, length = batch["input_ids"], batch["loss_mask"], batch["document"], batch["input_ids"].shape[1]
    own, read = context.part(length), context.part(length, 1)
    out = target.features(batch)
    feature = drafter.feature_of(_at(out, own))
    if drafter.training and section.noise:
        feature = feature + feature_noise(batch, feature, section.noise, seed, own)
    output = drafter.training_time_test(feature, ids, batch["position_ids"], document, 1, False, context)[0]
    weight, extra = shift_left(mask, 2, document)[:, own].float(), read.stop - own.stop
    actual = shift_left(out.hidden[:, read], 1, document[:, read])[:, : output.shape[1]]
    regression = feature_loss(output.flatten(0, 1), actual.flatten(0, 1).to(output.dtype), weight.flatten())
    weights = _padded(weight, extra)[None]  # [1,M]
    losses = chunked_draft_loss(
        _padded(drafter.before_head(output), extra)[None],
        drafter.head(),
        out.hidden[:, read].flatten(0, 1),
        target.logits,
        weights,
        [1],
        None,
        "ce",
    )
    total = regression + section.classification * losses.sum
    tokens = supervised_tokens(batch, own)
    return Loss(total, tokens, survival_metrics(losses.hits, weights))


def _at(out: TargetOutput, positions: slice) -> TargetOutput:
    """The target's output at these positions."""
    return TargetOutput(out.hidden[:, positions], None if out.taps is None else out.taps[:, positions])


def _padded(values: Tensor, count: int) -> Tensor:
    """values [B,n,...] with `count` positions of zeros appended, flattened to [B·(n + count),...]."""
    if count:
        values = F.pad(values, (0, 0) * (values.ndim - 2) + (0, count))
    return values.flatten(0, 1)


def architecture(section: EagleSection, target: Target) -> dict[str, Any]:
    """The drafter's sizes: those of the recipe, else the target's. Raises ValueError for keys that version 1 does not have."""
    config = target.config
    size = section.hidden_size or target.hidden_size
    same = size == target.hidden_size
    heads = section.heads or (config.num_attention_heads if same else max(1, size // 64))
    own_heads = same and not section.heads
    sizes = {
        "version": section.version,
        "draft_size": size,
        "intermediate_size": section.intermediate_size or (same and getattr(config, "intermediate_size", None)) or 4 * size,
        "num_layers": section.layers,
        "num_heads": heads,
        "num_kv_heads": section.kv_heads or (own_heads and getattr(config, "num_key_value_heads", None)) or heads,
        "head_dim": _head_dim(size, heads, own_heads and getattr(config, "head_dim", None)),
        "rope_theta": rope_theta(config),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "fc_norm": section.fc_norm,
        "norm_output": section.norm_output,
        "norm_before_fc": section.norm_before_fc,
        "norm_before_residual": section.norm_before_residual,
        "steps": section.steps,
    }
    if section.regression and section.version == 3 and size != target.hidden_size:
        raise ValueError(
            f"eagle.regression compares with the target's hidden states of {target.hidden_size} entries; got eagle.hidden_size={size}; "
            "leave out one of them"
        )
    if section.version == 1 and (section.taps or section.vocab_size not in (None, target.vocab_size)):
        raise ValueError("EAGLE-1 reads no taps and has the target's vocabulary; leave out eagle.taps and eagle.vocab_size")
    if section.version == 3:
        sizes |= {"taps": list(section.taps or default_taps(target)), "draft_vocab_size": section.vocab_size or target.vocab_size}
    return sizes


def _head_dim(size: int, heads: int, of_target: int | None) -> int:
    """The size of a head: an even share of the hidden size, or else that of the target's heads, where the drafter has as many (gpt-oss).

    Raises:
        ValueError: there is neither, naming the keys.
    """
    if size % (2 * heads) == 0:
        return size // heads
    if of_target and of_target % 2 == 0:
        return of_target
    fitting = next(count for count in range(min(heads, size // 2), 0, -1) if size % (2 * count) == 0) if size % 2 == 0 else 0
    raise ValueError(
        f"eagle.heads={heads} do not cut eagle.hidden_size={size} into even parts, which RoPE needs; "
        + (f"give eagle.heads={fitting}" if fitting else f"give eagle.hidden_size={size + 1}")
    )


def begin_with(drafter: EagleModel, path: str, target: Target, key: str) -> None:
    """Copy the weights of another EAGLE drafter of this target, ours or a published one, its head re-indexed to this drafter's vocabulary.

    Raises:
        ValueError: the other one has another architecture, or reads other taps. It names the recipe's `key`.
    """
    start = read_published(path, target) if format_of(path) else load_drafter(path, target)
    differing = [
        name
        for name in (
            "version",
            "taps",
            "draft_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "fc_norm",
            "norm_output",
            "norm_before_fc",
            "norm_before_residual",
            "rope_theta",
            *(["mask_token_id"] if type(start) is type(drafter) else []),  # EAGLE has none
        )
        if getattr(start.config, name, None) != getattr(drafter.config, name, None)
    ]
    if not isinstance(start, EagleModel) or differing:
        raise ValueError(f"{key}={path}: {start.method} differs in {', '.join(differing)}; give a drafter of the same architecture")
    weights = {name: tensor for name, tensor in start.state_dict().items() if name not in ("d2t", "t2d")}
    if "lm_head.weight" in weights:
        head, known = drafter.vocabulary.re_index(weights["lm_head.weight"], start.vocabulary)
        weights["lm_head.weight"] = torch.where(known[:, None], head, drafter.lm_head.weight.detach())
        say(f"{key}: {int(known.sum()):,} of {len(known):,} rows of the head taken over, the rest as in a fresh one")
    drafter.load_state_dict(weights, strict=False)


def freeze_head(drafter: EagleModel, section: EagleSection) -> None:
    """Leave the head as it is, if the recipe says so. Raises ValueError where it is not the target's."""
    if section.train_head or section.version == 1:
        return
    if drafter.config.draft_size != drafter.target.hidden_size:
        raise ValueError(
            f"eagle.train_head=false keeps the target's head, which reads {drafter.target.hidden_size} entries; got "
            f"eagle.hidden_size={drafter.config.draft_size}; leave out one of them"
        )
    drafter.lm_head.weight.requires_grad_(False)


# Keys that a version does not read.
UNREAD = {
    1: ("train_head", "regression", "prompts", "rise", "loss", "decay", "end_to_end", "checkpointing"),
    3: ("noise", "classification"),
}


def check(recipe: EagleRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    mix(recipe.eagle.loss, "eagle.loss")
    recipe.eagle.refuse_unread("eagle", UNREAD[recipe.eagle.version], f"eagle.version={recipe.eagle.version}")
    if recipe.eagle.prompts and recipe.train.normalise != "all":
        raise ValueError(
            "eagle.prompts=true trains on all tokens, and train.normalise=supervised would divide their loss by the answers' alone; add "
            "train.normalise=all"
        )
    length, ranks = recipe.data.seq_len, recipe.train.context_parallel
    if length % ranks:
        raise ValueError(f"data.seq_len={length} cannot be shared out over train.context_parallel={ranks} ranks; make it a multiple")


def choose_objective(
    recipe: EagleRecipe, target: Target, context: ContextParallel = SINGLE_RANK, progress: Progress | None = None
) -> Objective:
    """The objective of the recipe's version; `progress` is that of the run."""
    if recipe.eagle.version == 1:
        return partial(objective1, target=target, section=recipe.eagle, seed=recipe.train.seed, context=context)
    return partial(objective3, target=target, section=recipe.eagle, context=context, progress=progress)


def build_untrained(recipe: EagleRecipe, target: Target) -> tuple[EagleModel, Objective]:
    """An untrained drafter and its objective. `draftsmith plan` calls it with a target on the meta device."""
    check(recipe)
    drafter = cast(EagleModel, new_drafter("eagle", target, **architecture(recipe.eagle, target)))
    size = drafter.config.draft_vocab_size
    if size < target.vocab_size:  # which tokens it has does not matter here
        drafter.take(vocab.first(size, target.vocab_size))
    freeze_head(drafter, recipe.eagle)
    ranks = recipe.train.context_parallel
    return drafter, choose_objective(recipe, target, ContextParallel(ranks - 1, ranks))  # the last rank sees the most keys


def main(arguments: list[str]) -> None:
    recipe = load(EagleRecipe, arguments[0], arguments[1:])
    section = recipe.eagle
    check(recipe)
    context = processes.context_group(recipe.train.context_parallel)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        sizes = architecture(section, target)
        drafter, train, valid = setup.new_drafter_and_data(recipe, "eagle", target, corpora, **sizes)
        assert isinstance(drafter, EagleModel)
        if sizes.get("draft_vocab_size", target.vocab_size) < target.vocab_size:
            drafter.take(setup.frequent_tokens(train, target, sizes["draft_vocab_size"]))
        if section.start:
            begin_with(drafter, section.start, target, "eagle.start")
        freeze_head(drafter, section)
        fingerprint = setup.fingerprint(recipe, target, train) | {"draft vocabulary": drafter.vocabulary.digest()}
        if section.start and not section.train_head:  # checkpoints hold what is trained
            fingerprint["frozen weights"] = replay.digest(drafter, trained=False)
        monitors = setup.monitors(recipe, target, drafter)
        monitors["progress"] = progress = Progress()
        measure = choose_objective(recipe, target, context, progress)
        accelerator, steps = loop.fit(recipe, drafter, measure, train, valid, fingerprint, **monitors)
        if accelerator.is_main_process:
            confidence.fit(drafter, target, valid)
            publish.publish_drafter(recipe, drafter, target, steps)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
