"""What every method does after its loop: the folder to publish."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.eval import card
from draftsmith.eval.loading import command
from draftsmith.models.drafter import DrafterModel
from draftsmith.models.target import Target
from draftsmith.train.recipe import Recipe, save


def publish_drafter(recipe: Recipe, drafter: DrafterModel, target: Target, steps: int) -> Path:
    """`publish` for a drafter with an architecture of models/."""

    def write(folder: Path, training: dict[str, Any]) -> None:
        drafter.config.training = training
        drafter.save_pretrained(folder)

    return publish(recipe, target, steps, drafter.method, drafter.config.target, write)


def publish(
    recipe: Recipe,
    target: Target,
    steps: int,
    method: str,
    made_for: dict[str, Any],
    write: Callable[[Path, dict[str, Any]], None],
) -> Path:
    """Write `<output>/artifact`: safetensors, config, tokenizer, recipe and a model card, still without a table of acceptance.

    An artifact of the same number of steps stays as it is, its measurements with it.

    Args:
        recipe: the run's recipe.
        target: its tokenizer is copied.
        steps: optimizer steps of the training.
        method: what the model card calls the drafter.
        made_for: the target's identity as a dict.
        write: puts weights and config into the folder that it is given; the config carries the notes on training that it is given.

    Returns:
        The folder.
    """
    folder = Path(recipe.train.output) / "artifact"
    advice = f"measure it with\n    {command()} eval {folder}"
    if _steps(folder) == steps:
        print(f"{folder}: there already; {advice}", flush=True)
        return folder
    for name in ("README.md", "acceptance.json", "rounds.jsonl", "positions.jsonl", "survival.png"):  # of other weights
        (folder / name).unlink(missing_ok=True)
    tokens = steps * recipe.train.batch_size * recipe.data.seq_len
    training = {"positions": recipe.data.seq_len, "steps": steps, "tokens": tokens}
    write(folder, training)
    assert target.tokenizer is not None, "setup.load_target_and_data refuses a target without one"
    target.tokenizer.save_pretrained(folder)
    save(recipe, folder)
    card.write(folder, method, made_for, training, None)
    print(f"{folder}: trained for {steps} steps; {advice}", flush=True)
    return folder


def _steps(folder: Path) -> int | None:
    """The steps that a complete artifact was trained for; None where there is none."""
    if not (folder / "README.md").is_file():  # written last
        return None
    config = json.loads((folder / "config.json").read_text())
    return (config.get("draftsmith", config).get("training") or {}).get("steps")
