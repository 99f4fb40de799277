"""What every method does after its loop: the folder to publish."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.data import conversations
from draftsmith.eval import card
from draftsmith.eval.loading import command
from draftsmith.inference import durable
from draftsmith.models import adapter
from draftsmith.models.drafter import DrafterModel
from draftsmith.models.target import Target
from draftsmith.train.engine import checkpoint
from draftsmith.train.engine.say import say
from draftsmith.train.recipe import Recipe, changeable_keys, save

if TYPE_CHECKING:
    from peft import PeftModel

EVALUATED = ("draftsmith", "tree", "training", "transformers_version")  # keys of a config that may differ in an artifact that is the same
FITTED = ("confidence_weights", "temperatures")  # fitted to its weights again, which rounds differently on another machine
# README.md, the sign of completeness, first.
MEASURED = ("README.md", "acceptance.json", "policy.json", "records.jsonl", "records.part.jsonl", "report.html", "survival.png")


def publish_drafter(recipe: Recipe, drafter: DrafterModel, target: Target, steps: int, adapted: "PeftModel | None" = None) -> Path:
    """`publish` for a drafter with an architecture of models/. adapted: the target's model with the adapters that the drafter belongs to."""

    def write(folder: Path, training: dict[str, Any]) -> None:
        if adapted is not None:
            drafter.config.target["adapter_hash"] = adapter.save(adapted, folder / adapter.FOLDER, drafter.config.target["name"])
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

    Args:
        recipe: the run's recipe.
        target: its tokenizer is copied.
        steps: optimizer steps of the training.
        method: what the model card calls the drafter.
        made_for: the target's identity as a dict.
        write: puts weights and config into the folder that it is given; the config carries the notes on training that it is given.

    Returns:
        The folder.

    Raises:
        FloatingPointError, OSError: as `replace_artifact`.
    """
    tokens = steps * recipe.train.batch_size * recipe.data.seq_len
    training = {"positions": recipe.data.seq_len, "steps": steps, "tokens": tokens, "data": _data(recipe)}

    def write_all(part: Path) -> None:
        write(part, training)
        target.require_tokenizer().save_pretrained(part)
        card.write(part, method, made_for, training)

    folder, new = replace_artifact(recipe, write_all)
    state = f"trained for {steps} steps" if new else "there already"
    say(f"{folder}: {state}; measure it with\n    {command()} eval {folder}")
    return folder


def _data(recipe: Recipe) -> list[dict[str, Any]]:
    """The training data for a model card: name, hash of the content, and licence where it is known. No network is asked.

    A local path is cut to its last part; `hub` is true of a data set of the Hub, which has a name instead of a hash.
    """
    sources = []
    for source in recipe.data.plan().train:
        local, shipped = Path(os.path.expanduser(source.path)), source.path == "stdlib"
        entry: dict[str, Any] = {"path": "standard library of Python" if shipped else local.name if local.exists() else source.path}
        if shipped or local.exists():
            with suppress(ValueError, OSError):  # the card is not worth the artifact
                entry["sha256"] = conversations.fingerprint(source)
        else:
            entry |= {"hub": True, "subset": source.subset, "split": source.split}
        if shipped:
            entry["licence"] = "PSF-2.0"
        sources.append(entry)
    return sources


def replace_artifact(recipe: Recipe, write: Callable[[Path], None]) -> tuple[Path, bool]:
    """Write `<output>/artifact`, of which README.md comes last, and what was measured with other weights is deleted.

    An artifact of the same weights, made by the same recipe, stays as it is, its measurements with it.

    Args:
        recipe: the run's recipe; it is saved too.
        write: puts everything else into the folder that it is given.

    Returns:
        The folder, and whether it is new.

    Raises:
        FloatingPointError: a weight is not finite; an artifact that is there stays.
        OSError: it cannot be written.
    """
    folder = Path(recipe.train.output) / "artifact"
    part = folder.with_name(".artifact.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        save(recipe, part)
        for file in part.rglob("*.safetensors"):
            if name := checkpoint.not_finite(load_file(file)):
                raise FloatingPointError(
                    f"{folder} is not written: `{name}` of {file.name} is not finite; lower train.lr or train.weight_decay, "
                    "with another train.output"
                )
        new = not _same(part, folder, changeable_keys(type(recipe)))
        if new:
            _move(part, folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{folder} could not be written ({error}); the checkpoints are complete: mend that and run the same command again"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder, new


def _same(part: Path, folder: Path, changeable: set[str]) -> bool:
    """Whether the complete artifact `folder` has the weights of `part`, to the last bit, and its recipe apart from changeable keys."""
    if not (folder / "README.md").is_file():  # written last
        return False
    if any((folder / file.relative_to(part)).is_file() != file.is_file() for file in part.rglob("*")):
        return False
    weights = [sorted(path.relative_to(where) for path in where.rglob("*.safetensors")) for where in (part, folder)]
    if weights[0] != weights[1] or any((part / file).read_bytes() != (folder / file).read_bytes() for file in weights[0]):
        return False
    try:
        texts = [(where / "recipe.yaml").read_text(encoding="utf-8") for where in (part, folder)]
        ours, theirs = ({key: value for key, value in yaml.safe_load(text).items() if key not in changeable} for text in texts)
        configs = [_config(where) for where in (part, folder)]
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return False
    return all(theirs.get(key, value) == value for key, value in ours.items()) and configs[0] == configs[1]


def _config(folder: Path) -> dict[str, Any]:
    """What training says in an artifact's config: all but what an evaluation changes, the values of what is fitted, and what it says of the data,
    which may be gone since."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    entry = config.get("draftsmith", config)
    training = {key: value for key, value in (entry.get("training") or {}).items() if key != "data"}
    entries = {key: value for key, value in (config | entry).items() if key not in EVALUATED}
    return entries | {key: entries.get(key) is not None for key in FITTED} | {"training": training}


def _move(part: Path, folder: Path) -> None:
    """Move the files of `part` into `folder`, in place of the weights and measurements that are there. Other files there stay."""
    folder.mkdir(exist_ok=True)
    for name in MEASURED:
        (folder / name).unlink(missing_ok=True)
    for file in (*folder.rglob("*.safetensors"), *folder.glob("*.safetensors.index.json"), *folder.rglob("adapter_config.json")):
        file.unlink()
    files = [path for path in part.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda file: (file.name == "README.md", file.name != "run.json")):  # run.json says whose folder it is
        durable.sync(file)
        (folder / file.relative_to(part)).parent.mkdir(exist_ok=True)
        file.replace(folder / file.relative_to(part))
    durable.sync(folder)
