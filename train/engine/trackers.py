"""Trackers beside metrics.jsonl: TensorBoard, Weights & Biases and Trackio, through Accelerate.

Nothing leaves this machine unless you ask for it: wandb without a key runs offline and asks for none, trackio writes locally.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import constants

from draftsmith.inference import durable
from draftsmith.inference.reading import field, read_json
from draftsmith.train.engine.say import say
from draftsmith.train.recipe import Recipe, TrainSection, by_key


def options(section: TrainSection) -> dict[str, Any]:
    """The Accelerator's options for `train.trackers`. Raises ValueError for a tracker that is not installed."""
    for name in section.trackers:
        try:
            version(name)
        except PackageNotFoundError:
            raise ValueError(f"train.trackers has {name}, which is not installed; pip install 'draftsmith[{name}]'") from None
    return {"log_with": list(section.trackers), "project_dir": str(Path(section.output) / "tensorboard")} if section.trackers else {}


@dataclass(frozen=True, slots=True)
class LastRows:
    """The last step that has a row of metrics.jsonl, and the last that has one of an evaluation; 0 without any."""

    step: int
    evaluated: int


def start(recipe: Recipe, accelerator: Accelerator, done: int, last: LastRows) -> LastRows:
    """On the main process: start the trackers' runs, or continue the run of <output>/trackers.json.

    Args:
        recipe: of the run; trackers get every key of it.
        accelerator: made with `options`.
        done: steps taken so far; with 0 the trackers start a new run too.
        last: of metrics.jsonl, before it was cut to `done`.

    Returns:
        What the trackers have.

    Raises:
        ValueError: wandb refuses its key or does not reach its server; the message says what wandb says.
    """
    folder = Path(recipe.train.output)
    file = folder / "trackers.json"
    previous = read_json(file) if done and file.is_file() else None
    if previous:
        previous = {"evaluated": 0} | previous  # earlier versions did not record it
        run = {"id": field(previous, "id", str, file)}
        run |= {name: max(field(previous, name, int, file), getattr(last, name)) for name in ("step", "evaluated")}
    else:
        run = {"id": secrets.token_hex(4), "step": 0, "evaluated": 0}
    durable.write_text(file, json.dumps(run) + "\n")
    name = f"{folder.name}-{run['id']}"
    settings: dict[str, Any] = {
        "tensorboard": {"purge_step": run["step"] + 1},
        "wandb": {"id": run["id"], "name": name, "resume": "allow", "dir": str(folder)},
        "trackio": {"name": name, "resume": "allow", "embed": False},
    }
    with _wandb(settings["wandb"]) if "wandb" in recipe.train.trackers else _offline_hub():
        accelerator.init_trackers("draftsmith", None if previous else flat(recipe), settings)
    return LastRows(run["step"], run["evaluated"])


def flat(recipe: Recipe) -> dict[str, bool | int | float | str]:
    """Every key of a recipe in the types that trackers take: lists and null as JSON text, secrets masked."""
    return {key: value if isinstance(value, bool | int | float | str) else json.dumps(value) for key, value in by_key(recipe).items()}


@contextmanager
def _wandb(settings: dict[str, Any]) -> Iterator[None]:
    """Within it wandb starts with these settings, to which the mode is added, and asks for nothing: without a key it is offline."""
    import wandb

    # By default it waits 90 seconds for a server at the start, and without limit at the end.
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "120")
    try:
        settings["mode"] = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        if settings["mode"] != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # otherwise it looks for its server, to report to, even offline
        with _offline_hub():
            yield
    except wandb.Error as error:
        text = " ".join(str(error).split())
        raise ValueError(f"wandb: {text}; set WANDB_MODE=offline to keep the run here, or leave wandb out of train.trackers") from None
    if settings["mode"] == "offline" and wandb.run is not None:
        reason = "WANDB_MODE says so" if "WANDB_MODE" in os.environ else "it has no key"
        folder = Path(wandb.run.dir).parent
        say(f"wandb is offline, since {reason}: the run stays in {folder}; `wandb sync {folder}` sends it")


def _has_key() -> bool:
    import wandb

    try:
        return wandb.login(prompt=False, verify=False)
    except TypeError:  # older ones have no `prompt`
        return bool(wandb.api.api_key)


@contextmanager
def _offline_hub() -> Iterator[None]:
    """Within it trackio does not ask the Hub whose token this is, unless the environment sends it to the Hub or to a server."""
    previous = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = previous or not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = previous
