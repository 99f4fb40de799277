"""Where a run begins: with new optimizer state, or exactly where its newest complete checkpoint ended."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from draftsmith.inference import machine
from draftsmith.inference.reading import field, read_json
from draftsmith.inference.terminal import printable
from draftsmith.train import recipe as recipes
from draftsmith.train.engine import checkpoint, optimizer, order, processes, trackers
from draftsmith.train.engine.redact import redacted
from draftsmith.train.engine.say import say
from draftsmith.train.engine.section import checked_text
from draftsmith.train.engine.sharded import ShardedModel
from draftsmith.train.engine.watchdog import agree_on_data, locks_reported
from draftsmith.train.objective import SequenceDataset
from draftsmith.train.recipe import Recipe, TrainSection, changeable_keys

FORMAT = 2  # of state.json in a checkpoint
TARGET_FILES = "target's files"  # in a fingerprint: their hash, or the commit on the Hub
TARGET_DTYPE = "target's dtype"
TAU_PROMPTS = "prompts for τ"  # a hash of them: a τ of other prompts is none to compare with
MOST_THREADS = 4096  # that a checkpoint may ask for


def start_or_resume(
    recipe: Recipe,
    model: nn.Module,
    train: SequenceDataset,
    fingerprint: dict[str, Any],
    make_step: Callable[[nn.Module], nn.Module],
) -> tuple[ShardedModel, dict[str, Any]]:
    """Wrap the model for training, with the weights and the optimizer state of the newest checkpoint if there is one.

    Args:
        recipe: of the run; its folder train.output may hold checkpoints.
        model: the model to train; it gets the checkpoint's weights.
        train: the training data, which must be equal on all ranks.
        fingerprint: what else must be as it was when the checkpoint was made, such as hashes of the data and of the target.
        make_step: see `ShardedModel`.

    Returns:
        The wrapped model, and the loop's state: "step" (steps taken), "best", "left_out", "evaluated", and what must not change ("recipe", "fingerprint",
        "threads", "precision", "format").

    Raises:
        ValueError: the checkpoint is of another recipe, other data or another target, ranks disagree, or train.weights=bfloat16 is launched
            with FSDP or DeepSpeed.
    """
    section = recipe.train
    processes.check_weights(section)
    folder = Path(section.output) / "checkpoints"
    # The main process reads for all: another machine may not see its disk.
    newest, before = processes.on_main(lambda: checkpoint.newest(folder) or (None, {}))
    if newest and section.resume == "never":
        raise ValueError(f"{newest.parent} holds checkpoints and train.resume=never; give another train.output, or delete that folder")
    # What was once measured on a busy machine stays decided: other threads or another precision would round differently.
    if newest:
        _check_kinds(newest, before)
        processes.on_main(lambda: _check_best(newest, before.get("best")))
    torch.set_num_threads(_threads(before))
    precision = before.get("precision") or _precision(section)
    micro_batch, accumulation = processes.split_batch(section, processes.join().num_processes)
    accelerator = processes.accelerator(precision, micro_batch, accumulation, section.clip, **trackers.options(section))
    state = {
        "recipe": recipes.by_key(recipe),
        "fingerprint": fingerprint,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "format": FORMAT,
    }
    if section.weights == "bfloat16":
        optimizer.cast_trained(model, torch.bfloat16)
    optimizer_state, state_keys = {}, optimizer.state_keys(model, section)
    if newest:
        _check_same_run(newest, before, state, recipe)
        weights, optimizer_state = processes.on_main(lambda: checkpoint.read(newest))
        checkpoint.copy_weights(model, weights, newest)
        checkpoint.check_optimizer_state(optimizer_state, model, state_keys, newest)
    steps = before.get("step", 0)
    progress = {name: before.get(name, default) for name, default in (("step", 0), ("best", None), ("left_out", 0), ("evaluated", steps))}
    next_rows = order.sample_rows(len(train), section.seed, progress["step"] * section.batch_size, 1)
    agree_on_data(accelerator, state | {"threads": None}, len(train), train.batch(next_rows))
    if progress["step"] < section.steps:
        state_bytes = optimizer.state_bytes(model, section)
        processes.on_main(lambda: checkpoint.check_disk_space(folder, model, state_bytes, section.keep))
    processes.on_main(lambda: recipes.save(recipe, folder.parent))
    if accelerator.is_main_process:
        _announce(newest, state, accelerator)
    with locks_reported():
        sharded = ShardedModel(accelerator, model, make_step, lambda trained: optimizer.new_optimizer(trained, section), state_keys)
    if newest:
        sharded.load_optimizer_state(optimizer_state)
    return sharded, state | progress


def target_dtype_of(output: str) -> str | None:
    """The target's dtype in the newest checkpoint below a run's folder; None where there is none. `start_or_resume` refuses a damaged one."""
    newest = checkpoint.latest(Path(output) / "checkpoints")
    try:
        return read_json(newest / "state.json")["fingerprint"][TARGET_DTYPE] if newest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _threads(before: dict[str, Any]) -> int:
    """Those of the checkpoint, if this machine has as many cores for each of its processes; without a checkpoint those that were measured."""
    own = max(1, machine.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    threads = before.get("threads", torch.get_num_threads())
    if before and threads > own:
        say(
            f"{own} threads instead of the checkpoint's {threads}: this machine has no more cores for a process, so sums may differ in the last digit"
        )
        return own
    return threads


def _precision(section: TrainSection) -> str:
    """The precision of a new run's forward passes, "fp32" or "bf16": the recipe's, that of bf16 weights, or the faster one by measurement."""
    if section.precision != "auto":
        return section.precision
    return "bf16" if section.weights == "bfloat16" else processes.on_main(lambda: str(machine.precision()))


def _announce(newest: Path | None, state: dict[str, Any], accelerator: Accelerator) -> None:
    distributed = accelerator.distributed_type.value.lower()
    setting = f"{state['threads']} threads, {state['precision']}, {accelerator.num_processes} process(es), {distributed}"
    say(f"resuming from {newest}; {setting}" if newest else setting)


def _check_same_run(newest: Path, before: dict[str, Any], state: dict[str, Any], recipe: Recipe) -> None:
    """Raise ValueError where a checkpoint is of another recipe, other data or another target; the message names the first difference."""
    not_recorded = {
        key: value for key, value in state["fingerprint"].items() if key in (TARGET_FILES, TARGET_DTYPE, TAU_PROMPTS)
    }  # by earlier versions
    for name, missing in (("recipe", recipes.defaults(type(recipe))), ("fingerprint", not_recorded)):
        then, now = missing | redacted(checked_text(before[name])), state[name]
        for key in sorted((now.keys() | then.keys()) - changeable_keys(type(recipe))):
            gone = name == "recipe" and key not in now
            if gone and then[key]:
                raise ValueError(
                    f"{newest} was made with {printable(key, '')}={printable(str(then[key]), '')}, a key that this version does not have; give "
                    "another train.output, or delete that folder"
                )
            if not gone and now.get(key) != then.get(key):
                was = printable(str(then.get(key)), "")
                same = f"take target.dtype={was}, " if key == TARGET_DTYPE else ""
                raise ValueError(
                    f"{newest} was made with {printable(key, '')}={was}, this run has {now.get(key)}; "
                    f"{same}give another train.output, or delete that folder"
                )
    steps = recipe.train.steps
    if before["step"] > steps:
        raise ValueError(f"{newest} is at step {before['step']}, past train.steps={steps}; raise it or give another train.output")


def _check_best(newest: Path, best: dict[str, Any] | None) -> None:
    """Raise ValueError where the best weights, which the end of the run restores, are not there, or not what was written."""
    if not best or not best["step"]:
        return
    file = checkpoint.best_file(newest.parent, best["step"])
    if not file.is_file():
        raise ValueError(f"{newest} speaks of best weights in {file}, which is not there; restore it, or give another train.output")
    recorded = best.get("sha256")  # earlier versions kept none
    if recorded is not None and recorded != checkpoint.sha256_of_file(file):
        raise ValueError(f"{file} is damaged: it is not what was saved with τ {best['tau']:.3f}; restore it, or give another train.output")


def _check_kinds(newest: Path, before: dict[str, Any]) -> None:
    """Raise ValueError, naming file and key, where a state is of another format, or an entry has another kind than `_Run` gives it."""
    if before.get("format") != FORMAT:
        raise ValueError(
            f"{newest} is of another version of draftsmith (format {printable(str(before.get('format', 1)), '')[:20]}, this version reads "
            f"{FORMAT}); give another train.output, or delete that folder"
        )
    source = newest / "state.json"
    before = {"left_out": 0, "best": None, "threads": 1, "precision": "fp32"} | before
    for key in ("recipe", "fingerprint"):
        field(before, key, dict, source)
    step = field(before, "step", int, source)
    before = {"evaluated": step} | before  # earlier versions evaluated before they saved
    best = field(before, "best", (dict, type(None)), source) or {"best.tau": 0.0, "best.step": 0, "best.since": 0}
    best = {f"best.{key.removeprefix('best.')}": value for key, value in best.items()}
    tau = field(best, "best.tau", float, source)
    # What a number may be at most.
    limits = {"step": step, "left_out": step, "evaluated": step, "threads": MOST_THREADS, "best.step": step, "best.since": step}
    for key, limit in limits.items():
        value = field(best if key in best else before, key, int, source)
        if not 0 <= value <= limit:
            raise ValueError(f"{source}: `{key}` is {value}, expected 0 to {limit}; restore it, or give another train.output")
    if newest.name != f"step-{step:08d}":
        raise ValueError(f"{source}: `step` is {step}, in the folder {newest.name}; restore it, or give another train.output")
    if not 0 <= tau < float("inf"):
        raise ValueError(f"{source}: `best.tau` is {tau}, expected a number from 0; restore it, or give another train.output")
    if field(before, "precision", str, source) not in ("fp32", "bf16"):
        raise ValueError(
            f"{source}: `precision` is {before['precision']!r}, expected fp32 or bf16; restore it, or give another train.output"
        )
