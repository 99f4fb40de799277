"""The feature store: the frozen target's hidden states and taps on disk, so that a drafter trains without running the target.

A store is a folder. `index.json` names the target, the taps and the precision. A shard is a safetensors file with the features of some
samples, and a `.json` file with checksums of both, which is written last: a shard without it does not exist. Each run reads every shard
once to verify it, and again when it changes. Samples are identified by a hash of their token ids, so another mask, packing or draft
vocabulary, or more data, needs no new capture. Logits are not stored; the target's head recomputes them.

Letters: n tokens of a sample, T taps, H hidden size.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftsmith.data import feature_codec
from draftsmith.data.text_files import check_regular
from draftsmith.inference import durable
from draftsmith.inference.progress import Bar
from draftsmith.inference.reading import field, read_json
from draftsmith.inference.terminal import printable
from draftsmith.models.identity import TargetIdentity, check_same
from draftsmith.models.target import Target

SHARD_BYTES = 1 << 26
MEASURED = 256  # rows of each shard whose error is measured
FOREIGN = "belongs to another store (another target, other taps or another precision)"
SHARD = re.compile(r"[0-9a-f]{16}")  # a shard's name, without its ending


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
            index = read_json(file)
            identity = field(index, "target", dict, file)
            for name in TargetIdentity.__dataclass_fields__:
                field({"weights_hash": "", "adapter_hash": ""} | identity, name, str, file)
            taps, hidden_size = field(index, "taps", list, file), field(index, "hidden_size", int, file)
            precision = field(index, "precision", str, file)
            if not all(type(tap) is int for tap in taps) or hidden_size < 1 or precision not in feature_codec.FORMATS:
                raise ValueError(f"{file}: taps {taps}, hidden_size {hidden_size}, precision {precision!r} are of no store")
        except ValueError as error:
            raise ValueError(f"index.json is broken ({error}); give another folder, or delete this store and capture again") from None
        return cls(TargetIdentity.from_dict(identity), tuple(taps), hidden_size, precision)

    @property
    def hash(self) -> str:
        """Of all fields: shards carry it, so that one of another store is noticed."""
        return hashlib.sha256(json.dumps(asdict(self) | {"target": self.target.to_dict()}, sort_keys=True).encode()).hexdigest()

    @property
    def bytes_per_token(self) -> int:
        return (1 + len(self.taps)) * feature_codec.bytes_per_row(self.hidden_size, self.precision) + 4

    def check(self, folder: Path, target: Target, taps: Iterable[int]) -> None:
        """Raise ValueError if the features are another target's or lack a tap; print a note if the target's precision differs."""
        try:
            warning = check_same(self.target, target.identity, weights=True)
        except ValueError as error:
            raise ValueError(f"feature store {folder}: {error}") from None
        lacking = sorted(set(taps) - set(self.taps))
        if lacking:
            raise ValueError(
                f"feature store {folder}: captured with taps {list(self.taps)}, without {lacking}; capture with features.taps={sorted(taps)} "
                "into another folder"
            )
        if self.hidden_size != target.hidden_size:
            raise ValueError(
                f"feature store {folder}: index.json says hidden_size {self.hidden_size}, the target has {target.hidden_size}; restore it"
            )
        if warning:
            print(f"note: feature store {folder}: {printable(warning, '')}", file=sys.stderr)


def sample_key(ids: Tensor) -> str:
    """The key of a sample [n] int32: a hash of its token ids."""
    return hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).hexdigest()


def write_shard(
    path: Path, rows: list[tuple[str, Tensor, Tensor, Tensor | None]], index: Index, logits: Callable[[Tensor], Tensor]
) -> None:
    """Write the features of some samples to `path`, then the checksum beside it.

    Args:
        path: the shard, without its ending.
        rows: (key, ids [n], hidden [n,H], taps [n,T,H] or None) of each sample.
        index: the store's.
        logits: the target's head, by which the error of the precision is measured.

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
        if name == "hidden":
            back = feature_codec.unpack(stored.values[:MEASURED], None if stored.scale is None else stored.scale[:MEASURED], values.dtype)
            error.add(values[:MEASURED], back, logits)
    content = save(tensors)
    facts = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "keys": [key for key, *_ in rows],
        "lengths": [len(ids) for _, ids, _, _ in rows],
        "error": asdict(error),
        "store": index.hash,
    }
    text = json.dumps(facts | {"checksum": _checksum(facts)}) + "\n"
    try:
        durable.replace(path.with_suffix(".safetensors"), lambda part: part.write_bytes(content))
        durable.replace(path.with_suffix(".json"), lambda part: part.write_text(text))
    except OSError as failure:
        complete = sum(SHARD.fullmatch(file.stem) is not None for file in path.parent.glob("*.json"))
        raise OSError(
            f"feature store {path.parent}: shard {path.name} could not be written ({failure.strerror or failure}); the {complete} shards before it "
            "are complete; make room and run the same command again"
        ) from None


def sidecars(folder: Path) -> dict[str, dict[str, Any]]:
    """The checksum file of each finished shard, by name; files of other names are none of the store's.

    Raises:
        ValueError: a broken one; it names file and key.
    """
    facts = {}
    for file in sorted(folder.glob("*.json")):
        if SHARD.fullmatch(file.stem):
            try:
                facts[file.stem] = _facts(file)
            except ValueError as error:
                raise ValueError(
                    f"feature store {folder}: {file.name} is broken ({error}); delete it and run `draftsmith data capture` again"
                ) from None
    return facts


def _facts(file: Path) -> dict[str, Any]:
    """The content of a shard's checksum file. Those of earlier versions have no checksum of their own, and do not name their store."""
    check_regular(file, "checksum file")
    facts = read_json(file)
    for key, kinds in {"sha256": str, "bytes": int, "keys": list, "lengths": list, "error": (dict, type(None))}.items():
        field(facts, key, kinds, file.name)
    if not (all(type(key) is str for key in facts["keys"]) and all(type(length) is int for length in facts["lengths"])):
        raise ValueError("`keys` should be texts and `lengths` integers")
    if len(facts["keys"]) != len(facts["lengths"]) or min(facts["lengths"], default=0) < 1:
        raise ValueError("`lengths` should hold a number above 0 for each of `keys`")
    if facts["error"] is not None and not (
        facts["error"].keys() == feature_codec.Error.__dataclass_fields__.keys()
        and all(type(value) in (int, float) for value in facts["error"].values())
    ):
        raise ValueError(f"`error` should hold numbers for {', '.join(feature_codec.Error.__dataclass_fields__)}")
    if "checksum" in facts and facts["checksum"] != _checksum({key: facts[key] for key in facts if key != "checksum"}):
        raise ValueError("its content has not the recorded `checksum`")
    return facts


def _checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


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
        self.stamps: dict[str, list[int]] = {}
        self.verified: set[str] = set()
        self.slices: dict[str, dict[str, Any]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the shards that were added or changed since the last call."""
        shards = sidecars(self.folder)
        stamps = {name: _stamp(self.folder, name) for name in shards}
        new = {name: facts for name, facts in shards.items() if self.stamps.get(name) != stamps[name]}
        wrong = damaged(self.folder, new, self.index, self.show)
        for name, problem in wrong.items():
            problem = f"feature store {self.folder}: shard {name}.safetensors ({len(new[name]['keys'])} samples) {problem}"
            if not self.allow_missing or name in self.verified:
                raise ValueError(f"{problem}; run `draftsmith data capture` again, or continue without it: features.allow_missing=true")
            print(f"note: {problem}; it is not read", file=sys.stderr)
        for name in new.keys() - wrong.keys():
            self.slices.pop(name, None)
            facts = new[name]
            for key, (start, end) in zip(facts["keys"], pairwise([0, *accumulate(facts["lengths"])]), strict=True):
                self.locations[key] = name, start, end
        self.stamps |= {name: stamps[name] for name in new}
        self.verified |= new.keys() - wrong.keys()

    def __contains__(self, key: str) -> bool:
        return key in self.locations

    def stored(self, key: str) -> dict[str, Tensor]:
        """The encoded features of a sample: hidden [n,H], taps [n,T,H] with all taps of the store, and their scales."""
        name, start, end = self.locations[key]
        if name not in self.slices:
            if _stamp(self.folder, name) != self.stamps[name]:
                self.refresh()
            file = safe_open(self.folder / f"{name}.safetensors", "pt")
            self.slices[name] = {tensor: file.get_slice(tensor) for tensor in file.keys() if tensor != "ids"}  # noqa: SIM118
        return {tensor: rows[start:end] for tensor, rows in self.slices[name].items()}


def damaged(folder: Path, shards: dict[str, dict[str, Any]], index: Index, show: bool = False) -> dict[str, str]:
    """What is wrong with each of `shards` whose file is not what was written for this store, by name. Every byte is read."""
    wrong: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool, Bar("checking features", len(shards), show=show and len(shards) > 8) as bar:
        checks = pool.map(lambda name: _wrong(folder / f"{name}.safetensors", shards[name], index), shards)
        for number, (name, problem) in enumerate(zip(shards, checks, strict=True), 1):
            if problem:
                wrong[name] = problem
            bar.update(number, "shards")
    return wrong


def _stamp(folder: Path, name: str) -> list[int]:
    """Sizes and times of a shard's two files."""
    files = [folder / f"{name}{ending}" for ending in (".safetensors", ".json")]
    return [number for file in files if file.is_file() for number in (file.stat().st_size, file.stat().st_mtime_ns)]


def _wrong(file: Path, facts: dict[str, Any], index: Index) -> str:
    """What is wrong with a shard's file; '' if nothing is."""
    if not file.is_file():
        return "is missing"
    if (size := file.stat().st_size) != facts["bytes"]:
        return f"has {size:,} bytes where {facts['bytes']:,} were written"
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != facts["sha256"]:
        return "is damaged (its checksum is not the recorded one)"
    if facts.get("store", index.hash) != index.hash:
        return FOREIGN
    try:
        return _mismatch(file, facts, index)
    except SafetensorError as error:
        return f"is no safetensors file ({error})"


def _mismatch(file: Path, facts: dict[str, Any], index: Index) -> str:
    """Where a shard's tensors do not fit its keys, its lengths or the store; '' if they do."""
    n, kind = sum(facts["lengths"]), feature_codec.FORMATS[index.precision]
    expected = {"ids": ([n], torch.int32), "hidden": ([n, index.hidden_size], kind)}
    if index.taps:
        expected["taps"] = [n, len(index.taps), index.hidden_size], kind
    if kind in feature_codec.LARGEST:
        expected |= {f"{name}_scale": (shape[:-1], torch.float32) for name, (shape, _) in expected.items() if name != "ids"}
    with safe_open(file, "pt") as tensors:
        shapes = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        if {name: (part.get_shape(), part[:0].dtype) for name, part in shapes.items()} != expected:
            wanted = ", ".join(f"{name} {shape} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in expected.items())
            return f"has not the tensors of its {n:,} tokens in this store ({wanted})"
        ids = tensors.get_tensor("ids")
    keys = [sample_key(part) for part in ids.split(facts["lengths"])]
    return "" if keys == facts["keys"] else "has token ids of other samples than its checksum file says"
