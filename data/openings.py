"""Openings: system prompts and beginnings of questions that steer the topics of synthetic conversations."""

import os
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.text_files import check_regular, lines, parse, short

TASKS = Path(__file__).resolve().parent / "openings.jsonl"
KEYS = ("opening", "system", "domain")
LONGEST = 1 << 16  # characters of an opening or a system prompt


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins.

    Attributes:
        text: the beginning of the question, "" for none.
        system: the system prompt, "" for the template's own or none.
        domain: goes into the rows.
    """

    text: str = ""
    system: str = ""
    domain: str = "all"


def load(name: str) -> list[Opening]:
    """The openings of a file, in its order.

    Args:
        name: "none", a single empty opening; "tasks", those that ship here, for the seven tasks of Spec-Bench; or a file. In a .jsonl file
            (also .gz) a line is an opening as a JSON string, or an object with `opening`, `system`, `domain`; in others it is an opening as it stands.

    Raises:
        ValueError: a file that is missing or empty, or a line that is no opening.
    """
    if name == "none":
        return [Opening()]
    path = TASKS if name == "tasks" else Path(os.path.expanduser(name))
    check_regular(path, "openings")
    if not path.is_file():
        raise ValueError(f"openings {name!r} not found; expected a file, or tasks or none; correct the name")
    json = path.suffix == ".jsonl" or path.suffixes[-2:] == [".jsonl", ".gz"]
    openings = [_opening(line, f"{path}:{number}", json) for number, line in lines(path) if line.strip()]
    if not openings:
        raise ValueError(f"{path}: no openings in it; expected one on each line, such as: Write a Python function that")
    return openings


def _opening(line: str, where: str, json: bool) -> Opening:
    row = parse(line, where) if json else line
    if isinstance(row, str):
        row = {"opening": row}
    if not isinstance(row, dict) or not row or any(key not in KEYS or not isinstance(value, str) for key, value in row.items()):
        raise ValueError(f"{where}: expected a text, or an object with texts for {', '.join(KEYS)}, got {short(row)}; correct the line")
    text, system, domain = (row.get(key, "").strip() for key in KEYS)
    if not (text or system):
        raise ValueError(f"{where}: neither an opening nor a system prompt, got {short(row)}; correct the line, or leave it out")
    if max(len(text), len(system), len(domain)) > LONGEST:
        raise ValueError(f"{where}: more than {LONGEST:,} characters; expected a beginning of a question, shorten it")
    return Opening(text, system, domain or "all")
