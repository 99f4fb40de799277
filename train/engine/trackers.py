"""Trackers beside metrics.jsonl: TensorBoard, Weights & Biases and Trackio, through Accelerate.

Nothing leaves this machine that was not asked for: wandb without a key runs offline and asks for none, trackio writes here.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import constants

from draftsmith.inference import durable
from draftsmith.train.recipe import Recipe, TrainSection


def trackers(section: TrainSection) -> dict[str, Any]:
    """What the Accelerator is made with for `train.trackers`. Raises ValueError for one that is not installed."""
    for name in section.trackers:
        try:
            version(name)
        except PackageNotFoundError:
            raise ValueError(f"train.trackers has {name}, which is not installed; pip install 'draftsmith[{name}]'") from None
    return {"log_with": list(section.trackers), "project_dir": str(Path(section.output) / "tensorboard")} if section.trackers else {}


def start(recipe: Recipe, accelerator: Accelerator, done: int, last: int) -> int:
    """On the first rank: begin the trackers' runs, or go on with the run of <output>/trackers.json -> the last step that they know.

    done: steps taken so far; none: another run, also to them · last: step of the last row of metrics.jsonl, before it was cut to `done`.

    Raises:
        ValueError: what wandb says of its key or of its server.
    """
    folder = Path(recipe.train.output)
    file = folder / "trackers.json"
    before = json.loads(file.read_text()) if done and file.is_file() else None
    run = {"id": before["id"], "step": max(before["step"], last)} if before else {"id": secrets.token_hex(4), "step": 0}
    durable.replace(file, lambda part: part.write_text(json.dumps(run) + "\n"))
    name = f"{folder.name}-{run['id']}"
    settings: dict[str, Any] = {
        "tensorboard": {"purge_step": run["step"] + 1},
        "wandb": {"id": run["id"], "name": name, "resume": "allow", "dir": str(folder)},
        "trackio": {"name": name, "resume": "allow", "embed": False},
    }
    with _wandb(settings["wandb"]) if "wandb" in recipe.train.trackers else _local():
        accelerator.init_trackers("draftsmith", None if before else flat(recipe), settings)
    return run["step"]


def flat(recipe: Recipe) -> dict[str, bool | int | float | str]:
    """Every key of a recipe as trackers take them, lists and nothing as JSON; of a URL what stands before its @ is left out."""
    return {
        f"{section}.{key}": value if isinstance(value, bool | int | float) else _shown(value)
        for section, values in recipe.model_dump(mode="json").items()
        for key, value in values.items()
    }


def _shown(value: Any) -> str:
    return re.sub(r"//[^/@\s]+@", "//", value if isinstance(value, str) else json.dumps(value))


@contextmanager
def _wandb(settings: dict[str, Any]) -> Iterator[None]:
    """Within it wandb starts with these settings, which get the mode, and asks for nothing: without a key it is offline."""
    import wandb

    # By itself it waits 90 seconds for a server at the start, and without end at the end.
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "120")
    try:
        settings["mode"] = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        if settings["mode"] != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # offline too, it would look for its server to report to
        with _local():
            yield
    except wandb.Error as error:
        said = " ".join(str(error).split())
        raise ValueError(f"wandb: {said}; set WANDB_MODE=offline to keep the run here, or leave wandb out of train.trackers") from None
    if settings["mode"] == "offline" and wandb.run is not None:
        why = "was told so" if "WANDB_MODE" in os.environ else "has no key"
        place = Path(wandb.run.dir).parent
        print(f"wandb is offline, since it {why}: the run stays in {place}; `wandb sync {place}` sends it", flush=True)


def _has_key() -> bool:
    import wandb

    try:
        return wandb.login(prompt=False, verify=False)
    except TypeError:  # older ones have no `prompt`
        return bool(wandb.api.api_key)


@contextmanager
def _local() -> Iterator[None]:
    """Within it trackio does not ask the Hub whose token this is, unless it was told to write to the Hub or to a server."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
