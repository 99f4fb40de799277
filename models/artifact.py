"""What the config.json of a trained drafter or of a distilled student may say, checked before anything is made of it."""

import dataclasses
import math
import types
from pathlib import Path
from typing import Any, get_args

from transformers.configuration_utils import PretrainedConfig

from draftsmith.inference.confidence import Confidence
from draftsmith.inference.expand import parse_tree_spec
from draftsmith.inference.reading import field
from draftsmith.inference.tree_limits import LIMITS
from draftsmith.models.identity import TargetIdentity
from draftsmith.models.model_files import check_config, model_file, resolve_path

__all__ = [
    "DEEPEST",
    "MASK_TOKEN",
    "check_confidence",
    "check_notes",
    "check_settings",
    "check_tree",
    "mask_token",
    "raw_config",
    "student_entry",
]

DEEPEST = LIMITS["depth"][1]  # most heads or steps of a drafter
MASK_TOKEN = "pard_token"  # key of a parallel draft model's config, as AMD's have it
_LARGEST = 1 << 31  # of any size


def raw_config(source: str, revision: str = "") -> tuple[dict[str, Any], str]:
    """The content of a model's config.json, checked by `check_config`, and the file's path.

    Args:
        source: a folder, or a Hub id.
        revision: commit, tag or branch on the Hub.

    Raises:
        FileNotFoundError: there is none.
        ValueError: as `check_config`.
    """
    path = model_file(source, "config.json", revision or "main")
    if path is None:
        raise FileNotFoundError(f"no config.json in {source!r}; give the folder that save_pretrained wrote")
    return check_config(str(Path(path).parent)), path


def check_settings(raw: dict[str, Any], config_class: type[PretrainedConfig], source: str) -> None:
    """Check the kinds and the ranges of what an architecture's Config reads.

    Args:
        raw: the content of config.json.
        config_class: a `DrafterConfig`; its fields and their defaults say what is expected. A number whose default is 0 may be 0.
        source: the file, for errors.

    Raises:
        ValueError: naming the file and the key.
    """
    common = {own.name for own in dataclasses.fields(PretrainedConfig)}
    for own in dataclasses.fields(config_class):
        if own.name in common or own.name not in raw:
            continue
        kinds = get_args(own.type) if isinstance(own.type, types.UnionType) else (own.type,)
        value = field(raw, own.name, kinds, source)  # pyright: ignore[reportArgumentType]
        if type(value) is int and float not in kinds and not (1 if own.default else 0) <= value < _LARGEST:
            raise ValueError(f"{source}: `{own.name}` is {value}; expected a size: correct it or restore the file")
        if float in kinds and not (math.isfinite(value) and (value > 0 or value == own.default)):
            raise ValueError(f"{source}: `{own.name}` is {value}; expected a number above 0: correct it or restore the file")
    for size in ("hidden_size", "vocab_size"):
        if not field(raw, size, int, source):
            raise ValueError(f"{source}: `{size}` is 0; expected the target's: correct it or restore the file")
    taps = raw.get("taps") or []
    if any(type(tap) is not int or tap < 0 for tap in taps):
        raise ValueError(f"{source}: `taps` should be layer numbers, got {str(taps)[:60]}; correct it or restore the file")
    check_tree(raw.get("tree"), f"{source}: `tree`")
    check_confidence(raw, source)
    check_notes(raw, source)


def check_tree(tree: Any, name: str) -> None:
    """Check a draft tree of a config: its kinds, and that no tree comes of it that nobody can verify. None is no tree.

    Args:
        tree: rank paths, or {depth, width, nodes}.
        name: what it is called in errors.

    Raises:
        ValueError: anything else, or a tree larger than `inference/tree_limits.py` allows.
    """
    try:
        parse_tree_spec(tree)
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix('tree: ')}; correct it or restore the file") from None


def student_entry(path: str) -> dict[str, Any] | None:
    """The entry `draftsmith` in the config of a draft model that Draftsmith distilled; None for any other model.

    Its keys are target (a `TargetIdentity` as a dict), tree, confidence and training; `parallel` is K of a parallel draft model.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: an entry of another kind, naming the file and the key.
    """
    raw, source = raw_config(resolve_path(path))
    entry = field(raw, "draftsmith", (dict, type(None)), source)
    if entry is None:
        return None
    inner = f"{source}: `draftsmith`"
    check_tree(field(entry, "tree", (list, dict), inner), f"{inner}: `tree`")
    confidence = field(entry, "confidence", float, inner)
    if not 0 <= confidence < 1:
        raise ValueError(f"{inner}: `confidence` is {confidence}; expected a probability less than 1: correct it or restore the file")
    parallel = field(entry, "parallel", (int, type(None)), inner)
    if parallel is not None and not 1 <= parallel <= DEEPEST:
        raise ValueError(f"{inner}: `parallel` is {parallel}; expected 1 to {DEEPEST} tokens of a draft: correct it or restore the file")
    check_notes(entry, inner)
    return entry


def mask_token(path: str) -> int | None:
    """The mask token of a parallel draft model (models/pard.py); None for any other model.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: a mask token that is no number, naming the file.
    """
    raw, source = raw_config(resolve_path(path))
    return field(raw, MASK_TOKEN, (int, type(None)), source)


def check_confidence(raw: dict[str, Any], source: str) -> None:
    """Check the entry `confidence_weights`."""
    if (weights := field(raw, "confidence_weights", (dict, type(None)), source)) is not None:
        try:
            Confidence.parse(weights)
        except ValueError as error:
            raise ValueError(f"{source}: `confidence_weights`: {error}: correct it or restore the file") from None


def check_notes(raw: dict[str, Any], source: str) -> None:
    """Check the entries `target` and `training`, which drafters and students both have."""
    target = field(raw, "target", (dict, type(None)), source)
    for key in TargetIdentity.__dataclass_fields__ if target else ():
        field({"weights_hash": "", "adapter_hash": ""} | target, key, str, f"{source}: `target`")
    training = field(raw, "training", (dict, type(None)), source)
    for key in ("positions", "steps", "tokens"):
        field(training or {}, key, (int, type(None)), f"{source}: `training`")
