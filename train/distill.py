"""Distil a small language model that drafts for a frozen target (DistillSpec, Zhou et al. 2023, https://arxiv.org/abs/2310.08461).

accelerate launch train/distill.py recipes/distill-tiny.yaml
accelerate launch train/distill.py recipes/distill-tiny.yaml student.start=Qwen/Qwen3-0.6B target.path=Qwen/Qwen3-8B data.train=answers.jsonl
"""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from pydantic import Field
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.data.packing import PackedDataset
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.expand import DynamicTree, TreeSpec, tree_config
from draftsmith.inference.tree import StaticTree
from draftsmith.models import student as students
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import checkpoint, order, replay
from draftsmith.train.engine.replay import Replay
from draftsmith.train.losses.draft import chunked_draft_loss, mix
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens
from draftsmith.train.recipe import Recipe, Section, TreeSection, load, usage


class StudentSection(Section):
    start: str = Field(
        default="pruned", description="`pruned`: layers of the target; `random`; or folder or Hub id of a model with the target's tokens"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of such a model")
    layers: int | tuple[int, ...] | None = Field(
        default=None, description="of pruned and random ones: how many (pruned: those that acceptance needs most), or which, from 0"
    )
    hidden_size: int | None = Field(default=None, ge=1, description="W; unset: the target's")
    intermediate_size: int | None = Field(default=None, ge=1, description="unset: the target's, of a random one 8/3 of W")
    heads: int | None = Field(default=None, ge=1, description="query heads; a pruned student keeps whole KV groups")
    kv_heads: int | None = Field(default=None, ge=1, description="of a random one; unset: as many as heads")
    lora: int = Field(default=0, ge=0, description="rank of LoRA adapters, which alone are trained; 0: all weights are")
    checkpointing: bool = Field(default=False, description="recompute its layers in the backward pass: less memory, more time")


class DistillSection(Section):
    loss: str = Field(
        default="jsd(0.5)",
        description="kl, ce, reverse_kl, jsd(β), tv, lk, lk_hybrid, nll (of the text's tokens), or a mix: `0.9 tv + 0.1 kl`",
    )
    temperature: float = Field(default=1.0, gt=0, description="of both laws; that at which the drafts are to be accepted")
    top_k: int = Field(default=0, ge=0, description="likeliest tokens of the target's law, to which it is cut; 0: all")
    on_policy: float = Field(default=0.0, ge=0, le=1, description="λ: share of the rows that are the student's own samples")
    rejections: float = Field(default=0.0, ge=0, le=1, description="share of the rows that are tokens where the target rejected its drafts")
    every: int = Field(default=50, ge=4, description="steps between two generations of such rows")
    keep: int = Field(default=4, ge=1, description="generations that rows are drawn from")
    prompts: int = Field(default=64, ge=1, description="beginnings of the data's samples that a generation continues")
    new_tokens: int = Field(default=128, ge=1, description="by so many tokens at most")
    sample_temperature: float = Field(default=1.0, ge=0)
    confidence: float = Field(
        default=0.0, ge=0, lt=1, description="the artifact drafts no deeper where its best token is less likely than this"
    )


class DistillRecipe(Recipe):
    student: StudentSection = StudentSection()
    distill: DistillSection = DistillSection()


def check(recipe: DistillRecipe) -> None:
    """Whether the keys go together, before anything is loaded. Raises ValueError, naming the keys."""
    student, section, tree = recipe.student, recipe.distill, recipe.tree
    unread = {"pruned": ("kv_heads", "revision"), "random": ("revision",)}
    sizes = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads")
    given = [name for name in unread.get(student.start, sizes) if getattr(student, name) is not None]
    if given:
        raise ValueError(f"student.{given[0]}={getattr(student, given[0])} says nothing about student.start={student.start}; leave it out")
    if student.start in ("pruned", "random") and student.layers in (None, 0, ()):
        raise ValueError(f"student.start={student.start} needs student.layers: how many, or which of the target's")
    if tree.nodes and tree.width in (None, 1):
        raise ValueError(f"tree.nodes={tree.nodes} is for a dynamic tree; give tree.width too, or leave it out")
    if (tree.depth or 0) > DraftModel.depth_limit:
        raise ValueError(f"tree.depth={tree.depth}: a draft model looks {DraftModel.depth_limit} ahead at most; lower it")
    if recipe.train.context_parallel > 1:
        raise ValueError(
            f"train.context_parallel={recipe.train.context_parallel} is for EAGLE; a student's attention is transformers', which does not "
            "share rows out: leave it out, and take student.checkpointing=true"
        )
    if "reverse_kl" in mix(section.loss, "distill.loss") and section.top_k:
        raise ValueError(f"distill.loss={section.loss} is infinite where distill.top_k={section.top_k} cuts the target's law; drop one")
    if not (section.on_policy or section.rejections):
        return
    if section.on_policy + section.rejections > 1:
        raise ValueError(
            f"distill.on_policy={section.on_policy} and distill.rejections={section.rejections} make more than all rows; lower one"
        )
    if recipe.features.mode != "online":
        raise ValueError("distill.on_policy and distill.rejections need features.mode=online: the target has to read new text")
    if section.new_tokens > recipe.data.seq_len // 2:
        raise ValueError(
            f"distill.new_tokens={section.new_tokens} leaves little room for prompts in data.seq_len={recipe.data.seq_len}; "
            "make it half of that at most"
        )


def objective(model: PreTrainedModel, batch: Batch, *, target: Target, section: DistillSection, depth: int) -> Loss:
    """Σ_t loss(p_t, q_t): p_t and q_t [V] are the target's and the student's laws of token t+1, which bears loss.

    A draft is accepted with probability α_t = Σ min(p_t, q_t) = 1 − TV (Leviathan et al. 2023).
    """
    ids, mask, document = batch["input_ids"], batch["loss_mask"], batch["document"]
    own = students.hidden(model, batch).flatten(0, 1)  # [M,W]
    theirs = target.features(batch).hidden.flatten(0, 1)  # [M,H]
    weight = shift_left(mask, 1, document).flatten()
    rows = model.config.get_text_config().vocab_size
    found = chunked_draft_loss(
        own[None],
        students.head(model, target.vocab_size),
        theirs,
        target.logits,
        weight[None].float(),
        [0],
        torch.arange(rows, device=ids.device) if rows < target.vocab_size else None,  # padding that the student lacks
        mix(section.loss, "distill.loss"),
        tokens=shift_left(ids, 1, document).flatten(),
        temperature=section.temperature,
        top_k=section.top_k,
    )
    tokens = supervised_tokens(batch)
    metrics = {"acceptance": found.overlap.sum(), "top1": found.hits.sum()}
    return Loss(found.sum, tokens, metrics | {"sim_tau": tokens * (1 + survival(found.overlap[0], weight, document, depth).sum())})


def survival(overlap: Tensor, weight: Tensor, document: Tensor, depth: int) -> Tensor:
    """α [M] of rows, weight [M] and document [B,S] -> S_k [K]: Π α over k rows on end, mean over the places where K rows in a document count.

    What a chain of drafts would have along the text; decoding tells what it has.
    """
    rows = overlap.view(document.shape)
    steps = torch.stack([shift_left(rows, k, document) for k in range(depth)])  # [K,B,S]
    whole = torch.stack([shift_left(weight.view(document.shape), k, document) for k in range(depth)]).all(0)
    return (steps.cumprod(0) * whole).sum((1, 2)) / whole.sum().clamp(min=1)


def shape_of(tree: TreeSection) -> TreeSpec:
    """What the recipe says; a chain of four where it says nothing."""
    if tree.width in (None, 1):
        return StaticTree.chain(tree.depth or 4)
    return DynamicTree(tree.depth or 4, tree.width, tree.nodes or 16)


def begin(recipe: DistillRecipe, target: Target, rows: PackedDataset) -> PreTrainedModel:
    """The student as it begins. What rank 0 made is kept in `<output>/start`, for the other ranks and for when the run goes on.

    Raises:
        ValueError: checkpoints there of a run that began with another student, or a context shorter than data.seq_len.
    """
    section, made = recipe.student, Path(recipe.train.output) / "start"
    state = PartialState()
    if section.start not in ("pruned", "random"):
        model = students.existing(section.start, target, revision=section.revision, trust_remote_code=recipe.target.trust_remote_code)
    else:
        if state.is_main_process:
            facts = section.model_dump(mode="json") | {"seed": recipe.train.seed, "target": target.identity.to_dict(), "data": rows.key}
            _keep_start(made, facts, lambda: _make(section, target, rows, recipe.train.seed))
        state.wait_for_everyone()
        model = cast(Any, AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)).to(target.device)
    if model.config.max_position_embeddings < recipe.data.seq_len:
        raise ValueError(
            f"data.seq_len={recipe.data.seq_len} is longer than the student's context of {model.config.max_position_embeddings}; lower it"
        )
    return _ready(section, model, recipe.train.seed)


def _ready(section: StudentSection, model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The student as the recipe wants it trained."""
    if section.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return cast(Any, students.with_lora(model, section.lora, seed=seed)) if section.lora else model


def _keep_start(made: Path, facts: dict[str, Any], make: Callable[[], PreTrainedModel]) -> None:
    """See to it that the folder `made` holds what `make` makes, and nothing that other `facts` made."""
    file = made / "made.json"
    if file.is_file() and json.loads(file.read_text()) == facts:
        return
    if made.is_dir() and checkpoint.latest(made.with_name("checkpoints")):
        raise ValueError(
            f"{made} holds the start of another student than this recipe's; give another train.output, or delete {made.parent}"
        )
    part = made.with_name("start.part")
    for folder in (made, part):
        shutil.rmtree(folder, ignore_errors=True)
    make().save_pretrained(part)
    (part / file.name).write_text(json.dumps(facts))
    part.rename(made)


def _make(section: StudentSection, target: Target, rows: PackedDataset, seed: int) -> PreTrainedModel:
    assert section.layers is not None, "check refuses it"
    if section.start == "pruned":
        some = order.sample_rows(len(rows), seed, 0, min(8, len(rows)))
        batch = {name: tensor.to(target.device) for name, tensor in rows.batch(some).items()}
        sizes = {"hidden_size": section.hidden_size, "heads": section.heads, "intermediate_size": section.intermediate_size}
        return students.pruned(target, layers=section.layers, **sizes, rows=batch)
    return _fresh(section, target, seed)


def _fresh(section: StudentSection, target: Target, seed: int) -> PreTrainedModel:
    if not isinstance(section.layers, int):
        raise ValueError(f"student.layers={list(section.layers or ())}: a random student has a number of layers; expected one")
    return students.fresh(
        target,
        layers=section.layers,
        hidden_size=section.hidden_size or target.hidden_size,
        heads=section.heads or target.config.num_attention_heads,
        kv_heads=section.kv_heads,
        intermediate_size=section.intermediate_size,
        seed=seed,
    )


def with_replay(recipe: DistillRecipe, target: Target, student: Target, model: torch.nn.Module, rows: PackedDataset) -> Replay:
    """The rows, with a share of the student's own among them; `student` is `model` as it decodes."""
    section = recipe.distill
    makers = {
        "samples": replay.samples(student, section.sample_temperature, section.new_tokens),
        "rejections": replay.rejections(
            target,
            DraftModel(student, StaticTree.chain(recipe.tree.depth or 4)),
            section.sample_temperature,
            section.new_tokens,
        ),
    }
    shares = {"samples": section.on_policy, "rejections": section.rejections}
    shares = {kind: share for kind, share in shares.items() if share}
    plan = replay.Plan(shares, section.every, section.keep, section.prompts, section.new_tokens, recipe.train.batch_size)
    return Replay(rows, Path(recipe.train.output) / "replay", plan, makers, model, target.vocab_size)


def writer(recipe: DistillRecipe, target: Target, model: PreTrainedModel, drafter: DraftModel) -> Callable[[Path, dict[str, Any]], None]:
    """Writes an ordinary checkpoint in bf16, LoRA adapters merged and beside it; its config carries, under `draftsmith`, what it is for."""

    def write(folder: Path, training: dict[str, Any]) -> None:
        if recipe.student.lora:
            model.save_pretrained(folder / "adapter")
        whole: Any = students.merged(model)
        whole.config.draftsmith = {
            "target": target.identity.to_dict(),
            "tree": tree_config(drafter.tree_spec),
            "confidence": recipe.distill.confidence,
            "training": training,
        }
        whole.generation_config.num_assistant_tokens = drafter.max_depth
        whole.generation_config.num_assistant_tokens_schedule = "constant"
        whole.to(torch.bfloat16).save_pretrained(folder)

    return write


def sketch(recipe: DistillRecipe, target: Target) -> tuple[PreTrainedModel, Objective]:
    """An untrained student and its objective, also for a target without values (`draftsmith plan`); of a checkpoint only the config is read."""
    check(recipe)
    section = recipe.student
    if section.start == "random":
        model = _fresh(section, target, recipe.train.seed)
    elif section.start == "pruned":
        assert section.layers is not None, "check refuses it"
        sizes = {"hidden_size": section.hidden_size, "heads": section.heads, "intermediate_size": section.intermediate_size}
        model = students.outline(target, layers=section.layers, **sizes)
    else:
        model = students.unread(section.start, revision=section.revision, trust_remote_code=recipe.target.trust_remote_code)
    measure = partial(objective, target=target, section=recipe.distill, depth=shape_of(recipe.tree).max_depth)
    return _ready(section, model, recipe.train.seed), measure


def main(arguments: list[str]) -> None:
    recipe = load(DistillRecipe, arguments[0], arguments[1:])
    section = recipe.distill
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    train, valid = setup.datasets(recipe, target, corpora)
    packed = train if isinstance(train, PackedDataset) else train.packed
    model = begin(recipe, target, packed)
    student = students.frozen(model, target.tokenizer)
    drafter = DraftModel(student, shape_of(recipe.tree), confidence=section.confidence)
    facts, between = setup.fingerprint(target, train), None
    if section.on_policy or section.rejections:
        train = with_replay(recipe, target, student, model, packed)
        between = train.renew
    if recipe.student.lora:  # the checkpoints hold the adapters alone
        facts["student's weights"] = replay.digest(model, trained=False)
    measure = partial(objective, target=target, section=section, depth=drafter.max_depth)
    watched = setup.monitors(recipe, target, drafter, positions=student.max_positions)
    accelerator, steps = loop.fit(recipe, model, measure, train, valid, facts, between=between, **watched)
    if accelerator.is_main_process:
        write = writer(recipe, target, model, drafter)
        publish.publish(recipe, target, steps, DraftModel.method, target.identity.to_dict(), write)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:], usage(DistillRecipe, __doc__))
