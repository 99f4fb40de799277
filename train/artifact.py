"""What every method does before and after its loop: the target, a fresh drafter and the data; then the folder to publish."""

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from draftsmith.data import corpus
from draftsmith.data.corpus import Corpus
from draftsmith.eval import card
from draftsmith.eval.session import command, dtype_of, shape
from draftsmith.inference import machine
from draftsmith.models.drafter import DrafterModel, load_config, new_drafter
from draftsmith.models.target import Target
from draftsmith.train.recipe import Recipe, save


def begin(recipe: Recipe, method: str, **architecture: Any) -> tuple[Target, DrafterModel, Corpus, Corpus]:
    """Load the target, make a drafter for it, tokenise the data (rank 0 first, the others read what it wrote)."""
    machine.threads()
    state = PartialState(cpu=not torch.cuda.is_available())
    section, data = recipe.target, recipe.data
    target = Target.load(
        section.path,
        dtype=dtype_of(section.dtype),
        device=str(state.device),
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
    )
    if target.tokenizer is None:
        raise ValueError(f"target {section.path!r} has no tokenizer beside its weights; copy tokenizer.json there")
    if len(target.tokenizer) > target.vocab_size:
        raise ValueError(
            f"the tokenizer of {section.path!r} has {len(target.tokenizer)} entries, its model only {target.vocab_size} logits; "
            "they do not belong together: copy the model's own tokenizer there"
        )
    if data.seq_len > target.max_positions:
        raise ValueError(f"data.seq_len={data.seq_len} is longer than the target's context of {target.max_positions}; lower it")
    with state.main_process_first():
        train, valid = (
            corpus.load(data.train, data.valid, part, target.tokenizer, data.seq_len, data.cache) for part in ("train", "valid")
        )
    torch.manual_seed(recipe.train.seed)
    drafter = new_drafter(method, target, training={"positions": data.seq_len}, **architecture)
    tree = recipe.tree
    if tree.depth or tree.width or tree.nodes:
        chain = tree.width == 1
        drafter.shape = shape("chain" if chain else "dynamic", drafter, tree.depth, None if chain else tree.width, tree.nodes)
    return target, drafter, train, valid


def facts(target: Target, train: Corpus) -> dict[str, str]:
    """What a run must find again to be continued: its data and its target."""
    identity = target.identity
    return {"data": train.key, "target's config": identity.config_hash, "target's tokenizer": identity.tokenizer_hash}


def finish(recipe: Recipe, drafter: DrafterModel, target: Target) -> Path:
    """Write `<output>/artifact`: safetensors, config, tokenizer, recipe and a model card without a table yet.

    An artifact of the same steps is left as it is, its measurements with it.
    """
    folder = Path(recipe.train.output) / "artifact"
    advice = f"measure it with\n    {command()} eval {folder}"
    if _steps(folder) == recipe.train.steps:
        print(f"{folder}: there already; {advice}", flush=True)
        return folder
    for name in ("acceptance.json", "rounds.jsonl", "positions.jsonl", "survival.png"):  # of other weights
        (folder / name).unlink(missing_ok=True)
    drafter.config.training = {
        "positions": recipe.data.seq_len,
        "steps": recipe.train.steps,
        "tokens": recipe.train.steps * recipe.train.batch_size * recipe.data.seq_len,
    }
    drafter.save_pretrained(folder)
    assert target.tokenizer is not None, "begin refuses a target without one"
    target.tokenizer.save_pretrained(folder)
    save(recipe, folder)
    card.write(folder, drafter.config, None)
    print(f"{folder}: trained for {recipe.train.steps} steps; {advice}", flush=True)
    return folder


def _steps(folder: Path) -> int | None:
    if not (folder / "README.md").is_file():  # written last
        return None
    return (load_config(folder).training or {}).get("steps")
