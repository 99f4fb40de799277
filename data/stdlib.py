"""The built-in corpus: the source of Python's own standard library, present wherever Python is.

Complete modules are held out by a fixed rule, the hash of the module's path. So a module is in the same part on every machine,
whatever else the installation carries.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "__pycache__", "ensurepip", "turtledemo"}
HELD_OUT_IN = 12  # one module in twelve


def held_out(module: str) -> bool:
    """Whether `module` (a path below the library's root, with `/`) belongs to the held-out part."""
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:4]) % HELD_OUT_IN == 0


def modules(split: str) -> Iterator[tuple[str, str]]:
    """(path, source) of each module of `split`, "train" or "valid", in the order of the paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_files(root)):
        relative = path.relative_to(root)
        if held_out(relative.as_posix()) != (split == "valid"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            yield relative.as_posix(), text


def _files(root: Path) -> Iterator[Path]:
    """The Python files below `root`. Folders of SKIPPED are not entered: site-packages may have far more files than the library."""
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - SKIPPED
        yield from (Path(folder, file) for file in files if file.endswith(".py"))
