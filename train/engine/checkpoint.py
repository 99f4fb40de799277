"""Checkpoints: tensors in safetensors, everything else in JSON, written completely or not at all, and verified when they are read.

A checkpoint is a folder `step-00001234`. It is written under a temporary name, synced and renamed; only then is the `latest` pointer moved to
it. What a kill leaves behind has a name that begins with a dot: it is never read, and the next save deletes it. A checkpoint that the disk
damaged is passed over for the one before it. What has no mark of a checkpoint is never deleted.
"""

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.inference import durable
from draftsmith.inference.claim import MARK
from draftsmith.inference.durable import sync
from draftsmith.inference.reading import read_json
from draftsmith.train.engine.say import say

FILES = ("model.safetensors", "optimizer.safetensors")
STATE_KEYS = ("exp_avg", "exp_avg_sq")  # of AdamW's state, beside its step count; Muon has the first
COMPENSATION = "compensation"  # of bf16 weights: what their rounding took away, in units of fp32's last place, int16
BEST = {"draftsmith": "best weights"}  # the mark of such a file, in its header
LEFTOVERS = re.compile(r"\.(step-\d{8}\.(part|old)|best-\d{8}\.safetensors\.\d+\.part|latest\.\d+\.part|tmp[A-Za-z0-9]+)")


def save(
    folder: Path, step: int, weights: dict[str, Tensor], optimizer_state: dict[str, Tensor], state: dict[str, Any], keep: int = 2
) -> None:
    """Write checkpoint `step` below `folder`, and delete all but the newest `keep`.

    Checkpoints past `step` are deleted too: they are damaged, or the run would have continued from them.

    Args:
        folder: of the run's checkpoints.
        step: steps taken so far.
        weights: the trained parameters by name.
        optimizer_state: as `ShardedModel.optimizer_state` gives it.
        state: the loop's state, as JSON; the step is added to it.
        keep: checkpoints to keep, this one included.

    Raises:
        FloatingPointError: a number of the weights or of the optimizer state is not finite; nothing is written.
        OSError: it could not be written; the message names the checkpoint that is left.
    """
    for file, tensors in zip(FILES, (weights, optimizer_state), strict=True):
        if name := not_finite(tensors):
            raise FloatingPointError(_not_finite_advice(f"{folder / f'step-{step:08d}'} is not written: {file}", name))
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.part"
    try:
        _delete_leftovers(folder)
        temporary.mkdir(parents=True)
        (temporary / MARK).write_text(json.dumps({"kind": "checkpoint"}))
        sums = {}
        for file, tensors in zip(FILES, (weights, optimizer_state), strict=True):
            save_file(tensors, temporary / file)
            sums[file] = sha256_of_file(temporary / file)
        (temporary / "state.json").write_text(_state_text(step, state, sums))
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        _discard(final)
        if os.path.lexists(final):
            raise FileExistsError(f"{final} is there, and is no checkpoint of Draftsmith")
        temporary.rename(final)
        durable.replace(folder / "latest", lambda part: part.write_text(final.name))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _write_error(final, error) from None
    _prune(folder, final, keep)


def save_state(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> None:
    """Replace the loop's state in checkpoint `step`, whose tensors stay as they are, and delete what `save` would; arguments as there.

    Raises:
        OSError: it could not be written; the checkpoint has its state of before.
    """
    final = folder / f"step-{step:08d}"
    try:
        sums = read_json(final / "state.json")["sha256"]
        durable.write_text(final / "state.json", _state_text(step, state, sums))
    except OSError as error:
        raise _write_error(final, error) from None
    _prune(folder, final, keep)


def _state_text(step: int, state: dict[str, Any], sums: dict[str, str]) -> str:
    """The state as a file, with its own checksum beside those of the tensors."""
    state = state | {"step": step}
    return json.dumps(state | {"sha256": sums | {"state": _sha256_of_state(state)}})


def _write_error(path: Path, error: Exception) -> OSError:
    """The error for a checkpoint, or a part of one, that could not be written."""
    earlier = (checkpoint for checkpoint in _newest_first(path.parent) if checkpoint != path and _damage(checkpoint) is None)
    previous = next(earlier, None)
    rest = f"the checkpoint before it, {previous}, is complete" if previous else "there was none before it"
    return OSError(
        f"checkpoint {path} could not be written ({error}); {rest}; "
        "free disk space there, or see that the folder may be written, and run the same command again"
    )


def _prune(folder: Path, last: Path, keep: int) -> None:
    """Delete all checkpoints but `last` and the newest before it, `keep` in all, and best weights that none of these refers to."""
    present = _newest_first(folder)
    remaining = [checkpoint for checkpoint in present if checkpoint <= last][:keep]
    for old in set(present) - set(remaining):
        _discard(old)
    needed = {best_file(folder, _best_step(checkpoint)) for checkpoint in remaining}
    for old in set(folder.glob("best-*.safetensors")) - needed:
        with suppress(OSError):
            if _is_best(old):
                old.unlink()


def _is_best(file: Path) -> bool:
    """Whether `save_weights` wrote this file."""
    if file.is_symlink() or not file.is_file():
        return False
    try:
        with safe_open(file, "pt") as weights:
            return BEST.items() <= (weights.metadata() or {}).items()
    except (OSError, SafetensorError):
        return False


def _discard(checkpoint: Path) -> None:
    """Delete a checkpoint, if there is one, under another name, so that nobody reads half of it. What cannot be deleted stays."""
    renamed = checkpoint.with_name(f".{checkpoint.name}.old")
    with suppress(OSError):
        if _is_checkpoint(checkpoint):
            shutil.rmtree(checkpoint.rename(renamed))


def _delete_leftovers(folder: Path) -> None:
    """Delete what kills left behind: unfinished files and folders, those of safetensors and of best weights included."""
    for path in folder.glob(".*"):
        if LEFTOVERS.fullmatch(path.name) and not path.is_symlink():
            with suppress(OSError):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _best_step(checkpoint: Path) -> int:
    """The step of the best weights that a checkpoint refers to, 0 where there is none or the checkpoint cannot be read."""
    try:
        step = (read_json(checkpoint / "state.json").get("best") or {}).get("step", 0)
        return step if type(step) is int else 0
    except (OSError, ValueError, AttributeError):
        return 0


def best_file(folder: Path, step: int) -> Path:
    """The file with the weights of step `step`, while they are the best."""
    return folder / f"best-{step:08d}.safetensors"


def check_disk_space(folder: Path, module: torch.nn.Module, state_bytes: int, keep: int = 2) -> None:
    """Check that a run's checkpoints fit on the disk: weights and `state_bytes` of optimizer state, `keep` + 1 checkpoints at a time.

    Raises:
        OSError: they do not fit (the message gives both sizes), or `folder` cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be made ({error.strerror}); give another train.output") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{folder} may not be written; see to its permissions, or give another train.output")
    _delete_leftovers(folder)
    present = len(_newest_first(folder))
    needed = max(1, keep + 1 - present) * (state_bytes + sum(tensor.nbytes for tensor in trained_tensors(module).values()))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder}: {free / 1e9:.2f} GB free, the checkpoints of this run need {needed / 1e9:.2f}; free disk space or give another train.output"
        )


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint below `folder`, and the loop's state in it; None where there never was one.

    Prints which damaged checkpoints it passes over.

    Raises:
        ValueError: there are checkpoints, and none can be read; the message names the folder and the remedy.
    """
    damaged = []
    for checkpoint in _newest_first(folder):
        damage = _damage(checkpoint)
        if damage is None:
            if damaged:
                say(f"{'; '.join(damaged)}; going on from {checkpoint}, the one before")
            return checkpoint, read_json(checkpoint / "state.json")
        damaged.append(f"checkpoint {checkpoint} cannot be read ({damage})")
    if not damaged and (folder / "latest").is_file():
        damaged = [f"{folder / 'latest'} speaks of a checkpoint, and there is none"]
    if damaged:
        raise ValueError(f"{'; '.join(damaged)}; delete {folder} to start again, or restore it")
    return None


def latest(folder: Path) -> Path | None:
    """The newest checkpoint below `folder`, not verified, or None."""
    return next(iter(_newest_first(folder)), None)


def read(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimizer state of a checkpoint that `newest` gave."""
    weights, optimizer_state = (load_file(checkpoint / file) for file in FILES)
    return weights, optimizer_state


def copy_weights(module: torch.nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Copy the weights read from `source` into the trained parameters of `module`.

    Raises:
        ValueError: the weights are another model's; the message names `source` and the first difference.
    """
    own = trained_tensors(module)
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            kind = "not finite" if tensor.is_floating_point() else f"of {tensor.dtype}".replace("torch.", "")
            raise ValueError(f"checkpoint {source}: its weights are {kind} (`{name}`); restore it, or give another train.output")
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in weights.items()}:
        different = sorted(set(own) ^ set(weights)) or [name for name in own if own[name].shape != weights[name].shape]
        raise ValueError(f"checkpoint {source} is of another model (first difference: {different[0]}); give another train.output")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def check_optimizer_state(
    tensors: dict[str, Tensor], module: torch.nn.Module, state_keys: dict[str, tuple[str, ...]], checkpoint: Path
) -> None:
    """Check optimizer state that was read against the trained parameters of `module`, each of which has its `state_keys` or none at all.

    Raises:
        ValueError: tensors are missing, unknown, of another shape or dtype, or not finite. It names checkpoint and tensor.
    """
    shapes = {name: tensor.shape for name, tensor in trained_tensors(module).items()}
    source, remedy = checkpoint / FILES[1], "restore it, or give another train.output"
    for name, tensor in tensors.items():
        key, _, parameter = name.partition(".")
        if parameter not in shapes or key not in (keys := (*state_keys[parameter], "step")):
            raise ValueError(f"{source}: `{name}` belongs to no trained parameter; {remedy}")
        expected = torch.Size() if key == "step" else shapes[parameter]
        if tensor.shape != expected:
            raise ValueError(f"{source}: `{name}` has the shape {list(tensor.shape)}, expected {list(expected)}; {remedy}")
        if (tensor.dtype != torch.int16) if key == COMPENSATION else not tensor.is_floating_point():
            wanted = "int16" if key == COMPENSATION else "numbers with a fraction"
            raise ValueError(f"{source}: `{name}` is of {tensor.dtype}, expected {wanted}; {remedy}".replace("torch.", ""))
        if not bool(tensor.isfinite().all()) or (key in (STATE_KEYS[1], "step") and bool((tensor < 0).any())):
            raise ValueError(f"{source}: `{name}` holds numbers that are not finite, or negative; {remedy}")
        for wanted in keys:
            if f"{wanted}.{parameter}" not in tensors:
                raise ValueError(f"{source}: `{wanted}.{parameter}` is missing; {remedy}")


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of the first tensor with a number that is not finite; None where all are."""
    return next((name for name, tensor in tensors.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())), None)


def _not_finite_advice(what: str, name: str) -> str:
    return f"{what} holds numbers that are not finite (`{name}`); lower train.lr or train.weight_decay, with another train.output"


def save_weights(file: Path, module: torch.nn.Module) -> str:
    """Write the trained parameters of `module` to `file`, completely or not at all -> the SHA-256 of the file.

    Raises:
        FloatingPointError: a weight is not finite; nothing is written.
        OSError: it cannot be written; the message names it.
    """
    weights = trained_tensors(module)
    if name := not_finite(weights):
        raise FloatingPointError(_not_finite_advice(f"{file} is not written: the model", name))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(file, lambda part: save_file(weights, part, BEST))
        return sha256_of_file(file)
    except (OSError, SafetensorError) as error:
        raise _write_error(file, error) from None


def load_weights(file: Path, module: torch.nn.Module) -> None:
    """Load what `save_weights` wrote. Raises ValueError, naming the file, where it cannot be read."""
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        remedy = "delete the folder to start again, or restore it"
        raise ValueError(f"checkpoint {file} cannot be read ({' '.join(str(error).split())}); {remedy}") from None
    copy_weights(module, weights, file)


def trained_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """The trained parameters of `module` by name: those that require a gradient."""
    return {name: parameter.detach().contiguous() for name, parameter in module.named_parameters() if parameter.requires_grad}


def foreign(folder: Path) -> list[Path]:
    """What has the name of a checkpoint below `folder` and is none."""
    own = set(_newest_first(folder))
    return sorted(path for path in folder.glob("step-" + 8 * "[0-9]") if path not in own)


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-" + 8 * "[0-9]") if _is_checkpoint(path)), reverse=True)


def _is_checkpoint(path: Path) -> bool:
    """Whether `save` wrote this: a folder with its mark, or with checksums in its state, as before there were marks."""
    if path.is_symlink() or not path.is_dir():
        return False
    if (path / MARK).is_file():  # a power cut may have emptied it
        return True
    try:
        return "sha256" in read_json(path / "state.json")
    except (OSError, ValueError):
        return False


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if its files are, to the last bit, those that were written."""
    try:
        state = read_json(checkpoint / "state.json")
        sums = state.pop("sha256")
        if _sha256_of_state(state) != sums["state"]:
            return "state.json is damaged"
        for file in FILES:
            if sha256_of_file(checkpoint / file) != sums[file]:
                return f"{file} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())
    return None


def sha256_of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_of_state(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()
