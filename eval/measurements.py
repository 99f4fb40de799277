"""The files that `draftsmith eval` writes, into an artifact or a folder of its own: what may be overwritten there, and what is said of it.

Only files that an evaluation wrote are overwritten, by their content; nothing is written through a link.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.eval import card, page, plot
from draftsmith.eval.record_store import BEGINNING, RECORDS, UNFINISHED
from draftsmith.eval.report import Report
from draftsmith.inference import durable
from draftsmith.inference.policy import KIND
from draftsmith.inference.reading import field, read_json

REPORT, PAGE, PICTURE, POLICY = "acceptance.json", "report.html", "survival.png", "policy.json"
NAMES = (RECORDS, REPORT, PAGE, PICTURE)
CHECKED = (*NAMES, POLICY, UNFINISHED)
KEYS = {"target", "method", "settings", "tree", "overall"}  # of a report


def obstacle(folder: Path, names: tuple[str, ...]) -> str:
    """Why an evaluation must not write files of these names into a folder that exists; "" where it may."""
    if folder.is_symlink():
        return f"{folder} is a link"
    if any(part.startswith("models--") for part in folder.resolve().parts):
        return f"{folder} is in the Hub's cache"
    for name in names:
        file = folder / name
        if file.is_symlink():
            return f"{name} is a link"
        if file.exists() and not file.is_file():
            return f"{name} is no regular file"
        if name in CHECKED and file.is_file() and not _own(file):
            return f"{name} is there already, and not of an evaluation"
    return "" if os.access(folder, os.W_OK) else f"{folder} is read-only"


def _own(file: Path) -> bool:
    """Whether an evaluation wrote the file; an empty one has nothing to lose."""
    with file.open("rb") as stream:
        if not stream.peek(1):
            return True
        if file.name == PICTURE:
            return plot.MARK in stream.read(4096)
        if file.name == PAGE:
            return page.MARK in stream.read(4096)
        if file.name in (RECORDS, UNFINISHED):
            beginning = stream.read(len(BEGINNING))
            return BEGINNING.startswith(beginning)  # a kill may leave less
    try:
        content = read_json(file)
        return content.get("kind") == KIND if file.name == POLICY else KEYS <= content.keys()
    except ValueError:
        return False


def check_folder(folder: Path) -> None:
    """Check before measuring that the files can be written into the folder of --out; create it.

    Raises:
        ValueError: a file, a link, or a folder with somebody else's files of these names.
        OSError: it cannot be created.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; give a folder")
    if not folder.is_symlink():
        folder.mkdir(parents=True, exist_ok=True)
    reason = obstacle(folder, CHECKED)
    if reason:
        raise ValueError(f"--out {folder}: {reason}; give another folder")


def write(folder: Path, report: Report, content: dict[str, Any], artifact: bool) -> list[str]:
    """Write what is made from the records, which are there already. A file that cannot be written does not keep the others from it.

    Args:
        folder: an artifact or the folder of --out, which has been checked.
        report: its tree and its picture are stored.
        content: of the same report, see `page.page_content`; is stored as JSON, as a page, and in the model card.
        artifact: store the chosen tree in the folder's config, and the table in its model card.

    Returns:
        What could not be written, and why.
    """
    files: dict[str, Callable[[Path], object]] = {
        REPORT: lambda path: durable.write_text(path, page.content_json(content)),
        PAGE: lambda path: durable.write_text(path, page.html(content)),
    }
    if report.load.get("policy"):
        files[POLICY] = lambda path: durable.write_text(path, json.dumps(report.load["policy"], indent=2) + "\n")
    else:
        (folder / POLICY).unlink(missing_ok=True)  # of an evaluation before
    if artifact:
        files["config.json"] = lambda path: _write_tree(path, report)
        files["README.md"] = lambda _: _write_card(folder, report, content)
    files[PICTURE] = lambda path: durable.replace(path, lambda part: plot.survival(report, part))
    failures = []
    for name, write_file in files.items():
        try:
            write_file(folder / name)
        except (OSError, ValueError) as error:
            failures.append(f"{name} ({getattr(error, 'strerror', None) or error})")
    return failures


def _write_card(folder: Path, report: Report, content: dict[str, Any]) -> None:
    card.write_acceptance(folder, report.method, card.measured(report, page.markdown(content)), card.results(content))


def _write_tree(path: Path, report: Report) -> None:
    """Enter the chosen tree into a config. The rest of it stays as it is."""
    config = read_json(path)
    # A distilled draft model has an entry in the config of its architecture.
    entry = field(config, "draftsmith", dict, path) if "draftsmith" in config else config
    entry["tree"] = report.tree
    durable.write_text(path, json.dumps(config, indent=2, sort_keys=True) + "\n")
