"""Checkpoints: every tensor in safetensors, everything else in JSON, written whole or not at all, and checked when they are read.

A checkpoint is a folder `step-00001234`; it is written under a temporary name, synced and renamed, and only then does the
`latest` pointer move to it. What a kill leaves behind has a name that begins with a dot, is never read, and goes with the next save; a
checkpoint that a disk spoilt is passed over for the one before it.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.inference import durable
from draftsmith.inference.durable import sync as _sync

FILES = ("model.safetensors", "optimizer.safetensors")


def save(folder: Path, step: int, weights: dict[str, Tensor], moments: dict[str, Tensor], state: dict[str, Any], keep: int = 2) -> None:
    """Write weights, the optimizer's moments and the loop's state (and the step) as checkpoint `step` below `folder`; keep the newest `keep`.

    Those past `step` go: they could not be read, or the run would have gone on from them. Raises OSError, naming what is left, where it could
    not be written.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.part"
    try:
        _tidy(folder)
        temporary.mkdir(parents=True)
        sums = {}
        for file, tensors in zip(FILES, (weights, moments), strict=True):
            save_file(tensors, temporary / file)
            sums[file] = _digest(temporary / file)
        state = state | {"step": step}
        (temporary / "state.json").write_text(json.dumps(state | {"sha256": sums | {"state": _digest_of(state)}}))
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        _discard(final)
        temporary.rename(final)
        durable.replace(folder / "latest", lambda part: part.write_text(final.name))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _unwritten(final, error) from None
    _prune(folder, final, keep)


def _unwritten(path: Path, error: Exception) -> OSError:
    """What to say of a checkpoint, or a part of one, that could not be written."""
    others = (there for there in _newest_first(path.parent) if there != path and _fault(there) is None)
    before = next(others, None)
    kept = f"the checkpoint before it, {before}, is whole" if before else "there was none before it"
    return OSError(
        f"checkpoint {path} could not be written ({error}); {kept}; "
        "make room there, or see that the folder may be written, and run the same command again"
    )


def _prune(folder: Path, last: Path, keep: int) -> None:
    """Delete all checkpoints but `last` and the newest before it, `keep` in all, and best weights that none of them speaks of."""
    there = _newest_first(folder)
    kept = [one for one in there if one <= last][:keep]
    for old in set(there) - set(kept):
        _discard(old)
    spoken_of = {best_file(folder, _best_step(one)) for one in kept}
    for old in set(folder.glob("best-*.safetensors")) - spoken_of:
        with suppress(OSError):
            old.unlink()


def _discard(checkpoint: Path) -> None:
    """Delete a checkpoint that may be there, under another name: half of one is not to be seen. What cannot be deleted stays."""
    gone = checkpoint.with_name(f".{checkpoint.name}.old")
    with suppress(OSError):
        if checkpoint.exists():
            shutil.rmtree(checkpoint.rename(gone))


def _tidy(folder: Path) -> None:
    """Delete what kills left behind: files and folders half made, safetensors' own and best weights' among them."""
    for left in (left for name in (".step-*", ".best-*", ".latest.*", ".tmp*") for left in folder.glob(name)):
        with suppress(OSError):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _best_step(checkpoint: Path) -> int:
    """The step of the best weights that a checkpoint speaks of, 0 where it does not or cannot be read."""
    try:
        return (json.loads((checkpoint / "state.json").read_text()).get("best") or {}).get("step", 0)
    except (OSError, ValueError):
        return 0


def best_file(folder: Path, step: int) -> Path:
    """Where the weights of step `step` are kept while they are the best."""
    return folder / f"best-{step:08d}.safetensors"


def check_room(folder: Path, module: torch.nn.Module, keep: int = 2) -> None:
    """Refuse a run whose checkpoints (weights and two moments, `keep` + 1 at a time) would not fit on the disk of `folder`.

    Raises OSError with both sizes, or where `folder` cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{folder} cannot be made ({error.strerror}); give another train.output") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{folder} may not be written; see to its permissions, or give another train.output")
    _tidy(folder)
    there = len(_newest_first(folder))
    needed = 3 * max(1, keep + 1 - there) * sum(tensor.nbytes for tensor in trained(module).values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder}: {free / 1e9:.2f} GB free, the checkpoints of this run need {needed / 1e9:.2f}; make room or give another train.output"
        )


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint below `folder` that is whole, and the loop's state in it; None where there never was one.

    Says which ones it passes over. Raises ValueError, naming the folder and the remedy, where none of those there can be read.
    """
    broken = []
    for checkpoint in _newest_first(folder):
        fault = _fault(checkpoint)
        if fault is None:
            if broken:
                print(f"{'; '.join(broken)}; going on from {checkpoint}, the one before", flush=True)
            return checkpoint, json.loads((checkpoint / "state.json").read_text())
        broken.append(f"checkpoint {checkpoint} cannot be read ({fault})")
    if not broken and (folder / "latest").is_file():
        broken = [f"{folder / 'latest'} speaks of a checkpoint, and there is none"]
    if broken:
        raise ValueError(f"{'; '.join(broken)}; delete {folder} to start again, or restore it")
    return None


def latest(folder: Path) -> Path | None:
    """The newest checkpoint below `folder`, unread, or None."""
    return next(iter(_newest_first(folder)), None)


def read(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and moments of a checkpoint that `newest` gave."""
    weights, moments = (load_file(checkpoint / file) for file in FILES)
    return weights, moments


def fill(module: torch.nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Give what of `module` is trained the weights that `source` held. Raises ValueError, naming it, if they are of another model."""
    own = trained(module)
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in weights.items()}:
        odd = sorted(set(own) ^ set(weights)) or [name for name in own if own[name].shape != weights[name].shape]
        raise ValueError(f"checkpoint {source} is of another model (first difference: {odd[0]}); give another train.output")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def save_weights(file: Path, module: torch.nn.Module) -> None:
    """Write what of `module` is trained to `file`, whole or not at all. Raises OSError, naming it, where it could not be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(file, lambda part: save_file(trained(module), part))
    except (OSError, SafetensorError) as error:
        raise _unwritten(file, error) from None


def load_weights(file: Path, module: torch.nn.Module) -> None:
    """Restore what `save_weights` wrote. Raises ValueError, naming the file, where it cannot be read."""
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        remedy = "delete the folder to start again, or restore it"
        raise ValueError(f"checkpoint {file} cannot be read ({' '.join(str(error).split())}); {remedy}") from None
    fill(module, weights, file)


def trained(module: torch.nn.Module) -> dict[str, Tensor]:
    """What of `module` is trained, by name."""
    return {name: parameter.detach().contiguous() for name, parameter in module.named_parameters() if parameter.requires_grad}


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-" + 8 * "[0-9]"), reverse=True)


def _fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, None where nothing is: its files are those that were written, to the last bit."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        sums = state.pop("sha256")
        if _digest_of(state) != sums["state"]:
            return "state.json is damaged"
        for file in FILES:
            if _digest(checkpoint / file) != sums[file]:
                return f"{file} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()
