"""draftsmith.json, the file beside an exported drafter: what no engine's format has, for whoever loads the folder here again.

That is the target's identity, the draft tree, the depth, the notes on training, hashes of the files, and licences.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from draftsmith.inference import durable
from draftsmith.inference.reading import field, read_json
from draftsmith.models.artifact import DEEPEST, check_confidence, check_notes, check_tree

__all__ = ["NOTE", "licence_of", "read_note", "without_serve", "write_note"]

NOTE = "draftsmith.json"


def write_note(folder: Path, engine: str, family: str, drafter: dict[str, Any], source: Path | None, licences: dict[str, str]) -> None:
    """Write the note, last of all files.

    Args:
        folder: its other files are hashed.
        engine, family: of `engines.ROWS`.
        drafter: target (a `TargetIdentity` as a dict), tree, training; depth and confidence_weights, or confidence for a draft model; what DSpark stops by.
        source: the artifact's folder, whose weights are hashed; None on the Hub.
        licences: of target and drafter, as their cards name them.
    """
    files = {str(file.relative_to(folder)): _sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    weights = sorted(source.glob("*.safetensors")) if source else []
    note = {
        "engine": engine,
        "family": family,
        **drafter,
        "licences": licences,
        "source": durable.sampled_hash(weights) if weights else "",
        "files": files,
    }
    durable.write_text(folder / NOTE, json.dumps(note, indent=2) + "\n")


def read_note(folder: Path) -> dict[str, Any]:
    """The note of a folder, {} where it has none.

    Raises:
        ValueError: values that it cannot have, naming the file and the key.
    """
    file = folder / NOTE
    if not file.is_file():
        return {}
    note, source = read_json(file), str(file)
    for key, kinds in (("engine", str), ("family", str), ("files", dict)):
        field(note, key, kinds, source)
    check_tree(field(note, "tree", (list, dict, type(None)), source), f"{source}: `tree`")
    depth = field(note, "depth", (int, type(None)), source)
    if depth is not None and not 1 <= depth <= DEEPEST:
        raise ValueError(f"{source}: `depth` is {depth}; expected 1 to {DEEPEST}: correct it or restore the file")
    check_notes(note, source)
    check_confidence(note, source)
    return note


def changed_files(folder: Path, note: dict[str, Any]) -> list[str]:
    """Files that the note lists and that are missing or have other content."""
    return [name for name, digest in note.get("files", {}).items() if not _within(folder, name) or _sha256(folder / name) != digest]


def licence_of(folder: Path) -> str:
    """What the front matter of a model card says of the licence; "" where it says nothing."""
    card = folder / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()[:200] if card.is_file() else []
    front = lines[1 : lines[1:].index("---") + 1] if lines[:1] == ["---"] and "---" in lines[1:] else []
    return next((line.partition(":")[2].strip() for line in front if line.startswith("license:")), "")


def without_serve(card: str) -> str:
    """The card without its section on serving, which describes one export."""
    return re.sub(r"\n## Serve\n.*?(?=\n## |\Z)", "", card, flags=re.S)


def _within(folder: Path, name: str) -> bool:
    file = (folder / name).resolve()
    return file.is_relative_to(folder.resolve()) and file.is_file()


def _sha256(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
