"""Which files of a folder are an artifact's, and go to the Hub; which stay, and why.

Files are sent by name, never because they are there. What holds texts of prompts and answers stays unless it is asked for: records.jsonl and
report.html, and in acceptance.json the answer that is shown and the contexts of failures. Names of domains, ids of prompts and the names of
files in recipe.yaml and run.json are sent.
"""

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.inference.reading import read_json
from draftsmith.models.artifact_files import FILES, TERMS, TEXTS
from draftsmith.train.exchange.export import ENGINES

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".h5", ".msgpack")
UNFINISHED = (".part", ".lock", ".tmp", ".incomplete")


class Contents(NamedTuple):
    """Paths of a folder that are sent, and (path, why) of those that stay."""

    files: list[str]
    left: list[tuple[str, str]]


def contents_of(folder: Path, texts: bool) -> Contents:
    """What of an artifact's folder is published.

    Args:
        folder: of the artifact. Links are followed to files within it only.
        texts: files with texts of prompts and answers too.
    """
    files: list[str] = []
    left: list[tuple[str, str]] = []
    for where, folders, names in os.walk(folder):
        inside = Path(where).relative_to(folder)
        for name in sorted(folders):
            path = (inside / name).as_posix()
            if why := _why_not(folder, path, texts, is_folder=True):
                left.append((f"{path}/", why))
                folders.remove(name)
        for name in names:
            path = (inside / name).as_posix()
            why = _why_not(folder, path, texts)
            left.append((path, why)) if why else files.append(path)
    return Contents(sorted(files), sorted(left))


def _why_not(folder: Path, path: str, texts: bool, is_folder: bool = False) -> str:
    """Why a file or folder stays; "" where it is sent."""
    full, name = folder / path, path.rpartition("/")[2]
    if name.startswith("."):
        return "hidden"
    if full.is_symlink() and (is_folder or not full.resolve().is_relative_to(folder.resolve())):
        return "a link to a folder" if is_folder else "a link out of the folder"
    if is_folder:
        return "" if any(pattern.startswith(f"{path}/") for pattern in FILES) else "no part of an artifact"
    if not full.is_file():
        return "no regular file"
    if name.endswith(UNFINISHED):
        return "unfinished, or a lock"
    if path in TEXTS:
        return "" if texts else "texts of prompts and answers; --records sends it"
    if name.endswith(PICKLES):
        return "no safetensors: such a file can run code where it is loaded"
    return "" if any(fnmatchcase(path, pattern) for pattern in FILES) else "no part of an artifact"


def is_ours(path: str) -> bool:
    """Whether `draftsmith publish` sends a file of this path, and the file does not fit other weights."""
    engine = re.match(r"engines/([^/]+)/", path)
    stale = path in TEXTS or (engine is not None and engine[1] in ENGINES) or any(fnmatchcase(path, pattern) for pattern in FILES)
    return stale and not any(fnmatchcase(path, pattern) for pattern in TERMS)


def local_names(folder: Path, artifact: Path) -> list[str]:
    """Files of text that name folders of this machine: the user's home, or the artifact's parent."""
    names = [str(name).encode() for name in (Path.home(), artifact.resolve().parent) if len(name.parts) > 1]
    texts = [file for file in folder.rglob("*") if file.suffix in (".json", ".yaml", ".md", ".html", ".jsonl")]
    return sorted(file.relative_to(folder).as_posix() for file in texts if any(name in file.read_bytes() for name in names))


def renamed(file: Path, repo: str) -> dict[str, Any]:
    """The content of acceptance.json or policy.json, in which the drafter has the name of its repository, not of a folder of this machine."""
    content = read_json(file)
    for entry in (content, (content.get("load") or {}).get("policy") or {}):
        if isinstance(entry.get("drafter"), dict):
            entry["drafter"] = entry["drafter"] | {"name": repo}
    return content
