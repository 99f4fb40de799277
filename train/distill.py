"""Distil a small language model that drafts for a frozen target (DistillSpec, Zhou et al. 2023, https://arxiv.org/abs/2310.08461).

draftsmith train distill distill-tiny
accelerate launch train/distill.py recipes/distill-tiny.yaml student.start=Qwen/Qwen3-0.6B target.path=Qwen/Qwen3-8B data.train=answers.jsonl
"""

import sys
from typing import Annotated

from pydantic import Field

from draftsmith.train.cli import prepare_script
from draftsmith.train.recipe import Changeable, Recipe, Section, TrainSection, TreeSection, load

MEASURED = 4096  # tokens by which the parts of a pruned student are chosen

Layers = Annotated[int, Field(ge=0, le=1000)]
LayerNumber = Annotated[int, Field(ge=0, le=10**4)]


class StudentSection(Section):
    """the small model that is trained"""

    start: str = Field(
        default="pruned",
        description="`pruned`: layers of the target; `random`: fresh weights; else folder or Hub id of a model with the target's tokenizer",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of such a model; unset: the default branch")
    layers: Layers | tuple[LayerNumber, ...] | None = Field(
        default=None,
        description="a number of layers, or (pruned) which of the target's, counted from 0; by number, the layers that acceptance needs "
        "most are taken; unset: only with a model as start",
    )
    hidden_size: int | None = Field(default=None, ge=1, le=2**17, description="W, hidden size of the student; unset: the target's")
    intermediate_size: int | None = Field(
        default=None, ge=1, le=2**20, description="inner size of the MLP; unset: the target's (random: 8/3 of W)"
    )
    heads: int | None = Field(
        default=None, ge=1, le=2**12, description="query heads; a pruned student keeps complete KV groups; unset: the target's"
    )
    kv_heads: int | None = Field(
        default=None, ge=1, le=2**12, description="key and value heads of a random student; unset: as many as heads"
    )
    lora: int = Field(default=0, ge=0, le=2**14, description="rank of LoRA adapters, which alone are trained; 0: all weights are trained")
    checkpointing: Changeable[bool] = Field(
        default=False, description="recompute the student's layers in the backward pass: less memory, more time"
    )


class DistillSection(Section):
    """the loss, and sequences that are sampled while the student is trained"""

    loss: str = Field(
        default="jsd(0.5)",
        description="kl, ce, reverse_kl, jsd(β), tv, lk, lk_hybrid, nll (of the text's tokens), or a mix: `0.9 tv + 0.1 kl`",
    )
    temperature: float = Field(
        default=1.0, gt=0, le=100, description="temperature of both distributions in the loss; the one at which drafts will be accepted"
    )
    top_k: int = Field(default=0, ge=0, le=2**24, description="reduce the target's distribution to this many likeliest tokens; 0: all")
    on_policy: float = Field(default=0.0, ge=0, le=1, description="λ, share of the training sequences that the student has sampled itself")
    rejections: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the training sequences that the target writes with the help of the student as it is by then; supervised are only "
        "the tokens with which the target replaced a rejected draft",
    )
    refresh_every: int = Field(default=50, ge=4, le=10**9, description="steps between two generations of sampled sequences")
    keep_generations: int = Field(default=4, ge=1, le=10**6, description="newest generations that training sequences are drawn from")
    prompts: int = Field(default=64, ge=1, le=10**6, description="prompts of a generation, cut from the training examples")
    new_tokens: int = Field(default=128, ge=1, le=2**24, description="tokens sampled for each prompt, at most")
    sample_temperature: float = Field(default=1.0, ge=0, le=100, description="temperature at which they are sampled")
    confidence: float = Field(
        default=0.0, ge=0, lt=1, description="the trained drafter stops a draft where its best token is less likely than this"
    )


class DistillRecipe(Recipe):
    student: StudentSection = StudentSection()
    distill: DistillSection = DistillSection()

    @property
    def needs_target_layers(self) -> bool:
        return super().needs_target_layers or self.student.start == "pruned"


if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    prepare_script(DistillRecipe, __doc__)

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.data.packing import PackedDataset
from draftsmith.inference import durable
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.expand import DynamicTree, TreeSpec, tree_config
from draftsmith.inference.reading import field, read_json
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.terminal import printable
from draftsmith.inference.tree import StaticTree
from draftsmith.models import adapter
from draftsmith.models import student as students
from draftsmith.models.parallel import COLLECTIVE
from draftsmith.models.saving import save_model, save_student
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import shift_left
from draftsmith.train import loop, publish, setup
from draftsmith.train.engine import checkpoint, order, output, processes, replay
from draftsmith.train.engine.replay import Replay
from draftsmith.train.engine.say import say
from draftsmith.train.losses.draft import chunked_draft_loss, mix
from draftsmith.train.losses.survival import along_chains, survival_metrics
from draftsmith.train.objective import Batch, Loss, Objective, supervised_tokens


def check(recipe: DistillRecipe) -> None:
    """Check, before anything is loaded, that the keys fit together. Raises ValueError, naming the keys."""
    student, section, tree = recipe.student, recipe.distill, recipe.tree
    sizes = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads")
    unread = {"pruned": ("kv_heads", "revision"), "random": ("revision",)}.get(student.start, sizes)
    given = [name for name in unread if getattr(student, name) is not None]
    if given:
        raise ValueError(f"student.{given[0]}={getattr(student, given[0])} says nothing about student.start={student.start}; leave it out")
    if student.start in ("pruned", "random") and student.layers in (None, 0, ()):
        raise ValueError(f"student.start={student.start} needs student.layers: how many, or which of the target's")
    if tree.nodes and tree.width is None:
        raise ValueError(f"tree.nodes={tree.nodes} is for a dynamic tree; give tree.width too, or leave it out")
    if (tree.depth or 0) > DraftModel.depth_limit:
        raise ValueError(f"tree.depth={tree.depth}: a draft model looks {DraftModel.depth_limit} ahead at most; lower it")
    if recipe.train.context_parallel > 1:
        raise ValueError(
            f"train.context_parallel={recipe.train.context_parallel} is for EAGLE; a student's attention is transformers', which does not "
            "share sequences out: leave it out, and take student.checkpointing=true"
        )
    if "reverse_kl" in mix(section.loss, "distill.loss") and section.top_k:
        raise ValueError(f"distill.loss={section.loss} is infinite where distill.top_k={section.top_k} cuts the target's tokens; drop one")
    replay.check(recipe, "distill", "on_policy", "rejections")
    _check_layout(recipe)


def _check_layout(recipe: DistillRecipe) -> None:
    """Check that no rank copies layers that are partitioned or quantised."""
    target = recipe.target
    collective = f"target.parallel={target.parallel}" if target.parallel in COLLECTIVE else ""
    changed = collective or (f"target.quantise={target.quantise}" if target.quantise else "")
    if changed and recipe.student.start == "pruned":
        raise ValueError(
            f"student.start=pruned copies complete layers of the target, under {changed} there are none; "
            "give a student as student.start, such as the `start` folder of a run without it"
        )


def objective(model: PreTrainedModel, batch: Batch, *, target: Target, section: DistillSection, depth: int) -> Loss:
    """Σ_t loss(p_t, q_t), where p_t and q_t [V] are the target's and the student's distributions of the supervised token t+1.

    A draft is accepted with probability α_t = Σ min(p_t, q_t) = 1 − TV (Leviathan et al. 2023). `depth` is that of the chain of `sim_tau`.
    """
    ids, mask, document = batch["input_ids"], batch["loss_mask"], batch["document"]
    student_states = students.hidden(model, batch).flatten(0, 1)  # [M,W]
    target_states = target.features(batch).hidden.flatten(0, 1)  # [M,H]
    weight = shift_left(mask, 1, document).flatten()
    outputs = model.config.get_text_config().vocab_size
    losses = chunked_draft_loss(
        student_states[None],
        students.head(model, target.vocab_size),
        target_states,
        target.logits,
        weight[None].float(),
        [0],
        torch.arange(outputs, device=ids.device) if outputs < target.vocab_size else None,  # padding that the student lacks
        mix(section.loss, "distill.loss"),
        tokens=shift_left(ids, 1, document).flatten(),
        temperature=section.temperature,
        top_k=section.top_k,
    )
    tokens = supervised_tokens(batch)
    metrics = {"acceptance": losses.overlap.sum(), "top1": losses.hits.sum()}
    chains = survival_metrics(along_chains(losses.overlap[0], document, depth), along_chains(weight, document, depth))
    return Loss(losses.sum, tokens, metrics | chains)


def tree_spec_of(tree: TreeSection) -> TreeSpec:
    """The draft tree of the recipe; a chain of four where it names none."""
    if tree.width in (None, 1):
        return StaticTree.chain(tree.depth or 4)
    return DynamicTree(tree.depth or 4, tree.width, tree.nodes or 16)


def initial_student(recipe: DistillRecipe, target: Target, train: PackedDataset) -> PreTrainedModel:
    """The student before training. Rank 0 stores what it builds in `<output>/start`, for the other ranks and for continued runs.

    Raises:
        ValueError: the checkpoints there belong to a run with another start, or the student's context is shorter than data.seq_len.
    """
    section, folder = recipe.student, Path(recipe.train.output) / "start"
    if section.start not in ("pruned", "random"):
        model = students.existing(section.start, target, revision=section.revision, trust_remote_code=recipe.target.trust_remote_code)
    else:
        origin = section.model_dump(mode="json", exclude={"checkpointing"})
        origin |= {"seed": recipe.train.seed, "target": target.identity.to_dict(), "data": train.key}
        processes.on_main(lambda: _store_start(folder, origin, lambda: _build(recipe, target, train)))
        model = _read_start(folder, recipe.target.trust_remote_code).to(target.device)
    if model.config.max_position_embeddings < recipe.data.seq_len:
        raise ValueError(
            f"data.seq_len={recipe.data.seq_len} is longer than the student's context of {model.config.max_position_embeddings}; lower it"
        )
    return _ready(section, model, recipe.train.seed)


def _ready(section: StudentSection, model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model with gradient checkpointing and LoRA adapters, where the recipe wants them."""
    if section.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return cast(Any, adapter.with_lora(model, section.lora, seed=seed)) if section.lora else model


def _read_start(folder: Path, trust_remote_code: bool) -> Any:
    """The model that `_store_start` stored. Raises ValueError, naming the folder, where it cannot be read."""
    loader: Any = AutoModelForCausalLM
    try:
        model, loading = loader.from_pretrained(
            folder,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = printable(" ".join(str(error).split())[:200], "")
        raise ValueError(
            f"{folder}, the student before training, cannot be read ({reason}); restore it, or give another train.output"
        ) from None
    wrong = sorted(name for kind in ("missing_keys", "unexpected_keys") for name in loading[kind])
    if wrong:
        raise ValueError(
            f"{folder}, the student before training, has missing or unknown tensors ({wrong[0]}); restore it, or give another train.output"
        )
    return model


def _store_start(folder: Path, origin: dict[str, Any], build: Callable[[], PreTrainedModel]) -> None:
    """Store the model that `build` returns in `folder`, unless it holds the model of the same `origin` already."""
    record = folder / "made.json"
    if folder.exists() and not record.is_file():
        raise ValueError(f"{folder} is no start of Draftsmith (made.json is missing); move it away, or give another train.output")
    before = read_json(record) if record.is_file() else {}
    before.pop("checkpointing", None)  # earlier versions recorded it
    if before == origin:
        return
    if folder.is_dir() and checkpoint.latest(folder.with_name("checkpoints")):
        raise ValueError(
            f"{folder} holds the start of another student than this recipe's; give another train.output, or delete {folder.parent}"
        )

    def write(part: Path) -> None:
        build().save_pretrained(part)
        (part / record.name).write_text(json.dumps(origin))

    durable.replace_folder(folder, write)


def _build(recipe: DistillRecipe, target: Target, train: PackedDataset) -> PreTrainedModel:
    """A pruned student, by up to MEASURED tokens of the training data, or a random one."""
    section, seed = recipe.student, recipe.train.seed
    try:
        if section.start != "pruned":
            return _random(section, target, recipe.train)
        assert section.layers is not None, "check refuses it"
        count = min(8, max(1, MEASURED // train.seq_len), len(train))
        batch = {name: tensor.to(target.device) for name, tensor in train.batch(order.sample_rows(len(train), seed, 0, count)).items()}
        choose = partial(_most_needed, cache=Path(recipe.data.cache))
        return students.pruned(target, layers=section.layers, **_pruned_sizes(section), rows=batch, choose=choose)
    except ValueError as error:
        raise ValueError(str(error) if "student." in str(error) else f"student.layers and sizes: {error}") from None


def _most_needed(target: Target, batch: Batch, count: int, cache: Path) -> list[int]:
    """`students.most_needed`, or what an earlier run chose for the same target and text: the search may take longer than a trial of a sweep."""
    identity = target.identity
    if not identity.weights_hash and not identity.revision:  # a target in memory has no name for its weights
        return students.most_needed(target, batch, count)
    facts = json.dumps(
        [identity.to_dict() | {"name": ""}, count, *(batch[name].tolist() for name in ("input_ids", "loss_mask", "document"))]
    )
    file = cache.expanduser() / f"layers-{hashlib.sha256(facts.encode()).hexdigest()[:20]}.json"
    if file.is_file():
        layers: list[int] = field(read_json(file), "layers", list, file)
        if len(layers) != count or any(type(layer) is not int for layer in layers):
            raise ValueError(f"{file}: got layers {layers}; expected {count} numbers; delete the file")
        say(f"layers {', '.join(map(str, layers))} stay, as {file} has it")
        return layers
    layers = students.most_needed(target, batch, count)
    durable.write_text(file, json.dumps({"layers": layers}))
    return layers


def _pruned_sizes(section: StudentSection) -> dict[str, int | None]:
    return {"hidden_size": section.hidden_size, "heads": section.heads, "intermediate_size": section.intermediate_size}


def _random(section: StudentSection, target: Target, settings: TrainSection) -> PreTrainedModel:
    if not isinstance(section.layers, int):
        raise ValueError(f"student.layers={list(section.layers or ())}: a random student has a number of layers; expected one")
    size = section.hidden_size or target.hidden_size
    inner = section.intermediate_size or 8 * size // 3
    count = section.layers * size * (2 * size + 3 * inner) + target.vocab_size * size
    setup.check_parameters(count, "student.*", target.device, settings)
    return students.fresh(
        target,
        layers=section.layers,
        hidden_size=size,
        heads=section.heads or target.config.num_attention_heads,
        kv_heads=section.kv_heads,
        intermediate_size=section.intermediate_size,
        seed=settings.seed,
    )


def with_replay(recipe: DistillRecipe, target: Target, student: Target, model: torch.nn.Module, train: PackedDataset) -> Replay:
    """The training data with a share of sampled sequences among it. `student` decodes with the weights of `model`."""
    section = recipe.distill
    drafter = DraftModel(student, tree_spec_of(recipe.tree))
    samplers = {
        "samples": (section.on_policy, replay.samples(student, section.sample_temperature, section.new_tokens)),
        "rejections": (section.rejections, replay.rejections(target, drafter, section.sample_temperature, section.new_tokens)),
    }
    return replay.mixed_in(recipe, section, train, samplers, model, target)


def writer(recipe: DistillRecipe, target: Target, model: PreTrainedModel, drafter: DraftModel) -> Callable[[Path, dict[str, Any]], None]:
    """A function that writes an ordinary bf16 checkpoint into a folder, with LoRA adapters merged and also beside it.

    The key `draftsmith` of its config holds the target that it drafts for, the tree, the confidence threshold and the training.
    """

    def write(folder: Path, training: dict[str, Any]) -> None:
        if recipe.student.lora:
            save_model(model, folder / "adapter")
        entry = {
            "target": target.identity.to_dict(),
            "tree": tree_config(drafter.tree_spec),
            "confidence": recipe.distill.confidence,
            "training": training,
        }
        save_student(adapter.merged(model), folder, entry, drafter.max_depth)

    return write


def build_untrained(recipe: DistillRecipe, target: Target) -> tuple[PreTrainedModel, Objective]:
    """An untrained student and its objective. `draftsmith plan` calls it with a target on the meta device; of a checkpoint as
    student.start only the config is read."""
    check(recipe)
    section = recipe.student
    if section.start == "random":
        model = _random(section, target, recipe.train)
    elif section.start == "pruned":
        assert section.layers is not None, "check refuses it"
        model = students.outline(target, layers=section.layers, **_pruned_sizes(section))
    else:
        model = students.unread(
            section.start, "student.start", revision=section.revision, trust_remote_code=recipe.target.trust_remote_code
        )
    depth = tree_spec_of(recipe.tree).max_depth
    return _ready(section, model, recipe.train.seed), partial(objective, target=target, section=recipe.distill, depth=depth)


def main(arguments: list[str]) -> None:
    recipe = load(DistillRecipe, arguments[0], arguments[1:])
    section = recipe.distill
    check(recipe)
    target, corpora = setup.load_target_and_data(recipe)
    with output.claimed(recipe):
        train, valid = setup.datasets(recipe, target, corpora)
        packed = train if isinstance(train, PackedDataset) else train.packed
        model = initial_student(recipe, target, packed)
        student = students.frozen(model, target.tokenizer)
        drafter = DraftModel(
            student, tree_spec_of(recipe.tree), stop=Stopping("confidence", section.confidence) if section.confidence else None
        )
        fingerprint, refresh = setup.fingerprint(recipe, target, train), None
        if section.on_policy or section.rejections:
            train = with_replay(recipe, target, student, model, packed)
            refresh = train.refresh
        if recipe.student.lora:  # the checkpoints hold the adapters alone
            fingerprint["student's weights"] = replay.digest(model, trained=False)
        measure = partial(objective, target=target, section=section, depth=drafter.max_depth)
        monitors = setup.monitors(recipe, target, drafter, positions=student.max_positions)
        accelerator, steps = loop.fit(recipe, model, measure, train, valid, fingerprint, refresh=refresh, **monitors)
        if accelerator.is_main_process:
            write = writer(recipe, target, model, drafter)
            publish.publish(recipe, target, steps, DraftModel.method, target.identity.to_dict(), write)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
