"""The feature store: the frozen target's hidden states and taps on disk, so that a drafter trains without running the target.

A store is a folder. `index.json` names the target, the taps and the precision. A shard is a safetensors file with the features of some
samples, and a `.json` file with its checksum, which is written last: a shard without it does not exist. Samples are identified by a hash
of their token ids, so another mask, packing or draft vocabulary, or more data, needs no new capture. Logits are not stored; the target's head
recomputes them.

Letters: n tokens of a sample, T taps, H hidden size.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from draftsmith.data import feature_codec
from draftsmith.inference import durable
from draftsmith.inference.progress import Bar
from draftsmith.models.identity import TargetIdentity, check_same
from draftsmith.models.target import Target

SHARD_BYTES = 1 << 26
MEASURED = 256  # rows of each shard whose error is measured


@dataclass(frozen=True, slots=True)
class Index:
    """What a store contains: features of which target, of which layers (taps), at which precision."""

    target: TargetIdentity
    taps: tuple[int, ...]
    hidden_size: int
    precision: str

    @classmethod
    def of(cls, target: Target, taps: tuple[int, ...], precision: str) -> "Index":
        return cls(target.identity, taps, target.hidden_size, precision)

    @classmethod
    def read(cls, folder: Path) -> "Index | None":
        """The index of a store, None if the folder has none. Raises ValueError for a broken index."""
        file = folder / "index.json"
        if not file.is_file():
            return None
        try:
            index = json.loads(file.read_text())
            return cls(TargetIdentity.from_dict(index["target"]), tuple(index["taps"]), index["hidden_size"], index["precision"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is broken ({error}); delete the folder and capture again") from None

    @property
    def bytes_per_token(self) -> int:
        return (1 + len(self.taps)) * feature_codec.bytes_per_row(self.hidden_size, self.precision) + 4

    def check(self, folder: Path, target: Target, taps: Iterable[int]) -> None:
        """Raise ValueError if the features are another target's or lack a tap; print a note if the target's precision differs."""
        try:
            warning = check_same(self.target, target.identity)
        except ValueError as error:
            raise ValueError(f"feature store {folder}: {error}") from None
        lacking = sorted(set(taps) - set(self.taps))
        if lacking:
            raise ValueError(
                f"feature store {folder}: captured with taps {list(self.taps)}, without {lacking}; capture with features.taps={sorted(taps)} "
                "into another folder"
            )
        if warning:
            print(f"note: feature store {folder}: {warning}", file=sys.stderr)


def sample_key(ids: Tensor) -> str:
    """The key of a sample [n] int32: a hash of its token ids."""
    return hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).hexdigest()


def write_shard(
    path: Path, rows: list[tuple[str, Tensor, Tensor, Tensor | None]], index: Index, logits: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Write the features of some samples to `path`, then the checksum beside it.

    Args:
        path: the shard, without its ending.
        rows: (key, ids [n], hidden [n,H], taps [n,T,H] or None) of each sample.
        index: the store's.
        logits: the target's head; with it, the error of the precision is measured and stored.

    Raises:
        OSError: the shard cannot be written. The message counts the complete shards.
    """
    packed = {"hidden": torch.cat([hidden for _, _, hidden, _ in rows])}
    if index.taps:
        packed["taps"] = torch.cat([taps for _, _, _, taps in rows if taps is not None])
    tensors, error = {"ids": torch.cat([ids for _, ids, _, _ in rows])}, feature_codec.Error()
    for name, values in packed.items():
        stored = feature_codec.pack(values, index.precision)
        tensors[name] = stored.values
        if stored.scale is not None:
            tensors[f"{name}_scale"] = stored.scale
        if name == "hidden" and logits is not None:
            back = feature_codec.unpack(stored.values[:MEASURED], None if stored.scale is None else stored.scale[:MEASURED], values.dtype)
            error.add(values[:MEASURED], back, logits)
    content = save(tensors)
    facts = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "keys": [key for key, *_ in rows],
        "lengths": [len(ids) for _, ids, _, _ in rows],
        "error": asdict(error) if logits is not None else None,
    }
    text = json.dumps(facts) + "\n"
    try:
        durable.replace(path.with_suffix(".safetensors"), lambda part: part.write_bytes(content))
        durable.replace(path.with_suffix(".json"), lambda part: part.write_text(text))
    except OSError as failure:
        complete = len(list(path.parent.glob("*.json"))) - 1
        raise OSError(
            f"feature store {path.parent}: shard {path.name} could not be written ({failure.strerror or failure}); the {complete} shards before it "
            "are complete; make room and run the same command again"
        ) from None


def sidecars(folder: Path) -> dict[str, dict[str, Any]]:
    """The checksum file of each finished shard, by name. Raises ValueError for a broken one."""
    facts = {}
    for file in sorted(folder.glob("*.json")):
        if file.name not in ("index.json", "verified.json"):
            try:
                facts[file.stem] = json.loads(file.read_text())
            except json.JSONDecodeError:
                raise ValueError(
                    f"feature store {folder}: {file.name} is broken; delete it and run `draftsmith data capture` again"
                ) from None
    return facts


class FeatureStore:
    """A store open for reading: checked once, then memory-mapped.

    Attributes:
        locations: for each sample key, its shard and the first and last row there.

    Raises:
        ValueError: the folder is no store, or another target's; a shard is missing, cut off or damaged, unless `allow_missing`.
    """

    def __init__(
        self, folder: str | Path, target: Target, taps: tuple[int, ...] = (), allow_missing: bool = False, show: bool = True
    ) -> None:
        self.folder, self.target, self.allow_missing, self.show = Path(folder), target, allow_missing, show
        index = Index.read(self.folder)
        if index is None:
            raise ValueError(f"no feature store in {str(folder)!r} (no index.json); make one with `draftsmith data capture`")
        index.check(self.folder, target, taps)
        self.index, self.taps = index, [index.taps.index(tap) for tap in taps]
        self.locations: dict[str, tuple[str, int, int]] = {}
        self.known: set[str] = set()
        self.slices: dict[str, dict[str, Any]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the shards that were added since the last call."""
        new = {name: facts for name, facts in sidecars(self.folder).items() if name not in self.known}
        wrong = damaged(self.folder, new, self.show)
        for name, problem in wrong.items():
            problem = f"feature store {self.folder}: shard {name}.safetensors ({len(new[name]['keys'])} samples) {problem}"
            if not self.allow_missing:
                raise ValueError(f"{problem}; run `draftsmith data capture` again, or continue without it: features.allow_missing=true")
            print(f"note: {problem}; its samples are left out", file=sys.stderr)
        for name in new.keys() - wrong.keys():
            facts = new[name]
            for key, (start, end) in zip(facts["keys"], pairwise([0, *accumulate(facts["lengths"])]), strict=True):
                self.locations[key] = name, start, end
        self.known |= new.keys()

    def __contains__(self, key: str) -> bool:
        return key in self.locations

    def stored(self, key: str) -> dict[str, Tensor]:
        """The encoded features of a sample: hidden [n,H], taps [n,T,H] with all taps of the store, and their scales."""
        name, start, end = self.locations[key]
        if name not in self.slices:
            file = safe_open(self.folder / f"{name}.safetensors", "pt")
            self.slices[name] = {tensor: file.get_slice(tensor) for tensor in file.keys() if tensor != "ids"}  # noqa: SIM118
        return {tensor: rows[start:end] for tensor, rows in self.slices[name].items()}


def damaged(folder: Path, shards: dict[str, dict[str, Any]], show: bool = False) -> dict[str, str]:
    """What is wrong with each of `shards` whose file does not have the recorded length and checksum, by name.

    A file that passed once and has not changed since is not read again (`verified.json`, if the folder is writable).
    """
    notes = folder / "verified.json"
    before: dict[str, list[int]] = {}
    if notes.is_file():
        try:
            before = json.loads(notes.read_text())
        except json.JSONDecodeError:
            print(f"note: {notes} is broken; every shard is checked again", file=sys.stderr)
    stamps = {name: _stamp(folder / f"{name}.safetensors") for name in shards}
    unread = [name for name in shards if not stamps[name] or before.get(name) != stamps[name]]
    wrong: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool, Bar("checking features", len(unread), show=show and len(unread) > 8) as bar:
        checks = pool.map(lambda name: _wrong(folder / f"{name}.safetensors", shards[name], stamps[name]), unread)
        for number, (name, problem) in enumerate(zip(unread, checks, strict=True), 1):
            if problem:
                wrong[name] = problem
            bar.update(number, "shards")
    right = {name: stamps[name] for name in unread if name not in wrong}
    if right and os.access(folder, os.W_OK):
        text = json.dumps(before | right)
        durable.replace(notes, lambda part: part.write_text(text))
    return wrong


def _stamp(file: Path) -> list[int]:
    if not file.is_file():
        return []
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _wrong(file: Path, facts: dict[str, Any], stamp: list[int]) -> str:
    """What is wrong with a shard's file; '' if nothing is."""
    if not stamp:
        return "is missing"
    if stamp[0] != facts["bytes"]:
        return f"has {stamp[0]:,} bytes where {facts['bytes']:,} were written"
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return "" if digest == facts["sha256"] else "is damaged (its checksum is not the recorded one)"
