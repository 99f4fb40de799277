"""Evaluation prompts: read from a JSONL file; the shipped ones were cut from held-out modules of the standard library.

python -m draftsmith.data.prompts data/prompts-tiny.jsonl     # cuts them again (Python 3.11)
"""

import ast
import hashlib
import io
import json
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data import stdlib
from draftsmith.data.text_files import check_regular, lines, parse, short

TINY = Path(__file__).resolve().parent / "prompts-tiny.jsonl"
PER_DOMAIN = 24
PER_MODULE = 4
MAX_CHARACTERS = 400
DOMAINS = ("functions", "docstrings", "comments", "tables")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to evaluate on.

    Attributes:
        id: unique within its file.
        domain: by which results are reported.
        text: the prompt itself, or the last turn of a conversation.
        messages: the conversation, for the target's chat template; empty where the prompt is a text.
    """

    id: str
    domain: str
    text: str
    messages: tuple[dict, ...] = ()


def load(path: str | Path | None, limit: int | None = None) -> list[Prompt]:
    """Prompts of a file, in its order.

    Each line is an object with `prompt`, `turns` or `messages`, perhaps `domain` or `category`, and `id`. Of several `turns` the first is asked.

    Args:
        path: a .jsonl file, also .gz; None for the shipped prompts.
        limit: most prompts of each domain.

    Raises:
        ValueError: a missing or empty file, or a line that is no prompt.
    """
    file = TINY if path is None else Path(path).expanduser()
    check_regular(file, "prompt file")
    if not file.is_file():
        raise ValueError(f"prompt file {str(file)!r} not found; give a .jsonl file with `prompt` and `domain` on each line")
    prompts, counts = [], dict[str, int]()
    for number, line in lines(file):
        if not line.strip():
            continue
        prompt = _prompt(line, f"{file}:{number}", number)
        counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
        if limit is None or counts[prompt.domain] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{file}: no prompts in it; expected an object with `prompt` and `domain` on each line")
    return prompts


def _prompt(line: str, where: str, number: int) -> Prompt:
    row = parse(line, where)
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: expected an object with `prompt`, `turns` or `messages`, got {short(row)}; mend the line or leave it out"
        )
    name, domain = str(row.get("id", number)), str(row.get("domain") or row.get("category") or "all")
    if isinstance(row.get("prompt"), str) and row["prompt"]:
        return Prompt(name, domain, row["prompt"])
    if isinstance(row.get("turns"), list) and row["turns"] and isinstance(row["turns"][0], str):
        return Prompt(name, domain, row["turns"][0], ({"role": "user", "content": row["turns"][0]},))
    turns = row.get("messages")
    if isinstance(turns, list) and turns and all(map(_is_message, turns)):
        return Prompt(name, domain, turns[-1]["content"], tuple(turns))
    raise ValueError(f"{where}: expected `prompt`, `turns` or `messages` with text, got {short(row)}; correct it or leave the line out")


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("content"), str) and isinstance(turn.get("role"), str)


def cut() -> Iterator[Prompt]:
    """PER_DOMAIN prompts of each domain from the held-out modules, at most PER_MODULE of a domain from each module."""
    prompts: dict[str, list[Prompt]] = {domain: [] for domain in DOMAINS}
    for module, source in stdlib.modules("valid"):
        for domain, numbers in _cut_lines(source).items():
            for line in sorted(numbers, key=lambda line: _hash(f"{module}:{line}"))[:PER_MODULE]:
                text = "\n".join(source.splitlines()[:line])[-MAX_CHARACTERS:]
                text = text[text.find("\n") + 1 :] if len(text) == MAX_CHARACTERS else text
                if len(text) > 80:
                    prompts[domain].append(Prompt(f"{module}:{line}", domain, text + "\n"))
    for domain in DOMAINS:
        yield from sorted(prompts[domain], key=lambda prompt: _hash(prompt.id))[:PER_DOMAIN]


def _cut_lines(source: str) -> dict[str, list[int]]:
    """Line numbers to cut after, by domain: a third of the way into each construct that is long enough."""
    lines: dict[str, list[int]] = {domain: [] for domain in DOMAINS}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and (last := body[-1].end_lineno or 0) - body[0].lineno >= 9:
                lines["functions"].append(body[0].lineno + (last - body[0].lineno) // 3)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            if last - first >= 8:
                lines["docstrings"].append(first + (last - first) // 3)
        if isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set) and (node.end_lineno or 0) - node.lineno >= 6:
            lines["tables"].append(node.lineno + ((node.end_lineno or 0) - node.lineno) // 3)
    comments = [
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    ]
    for run in _runs(comments):
        if len(run) >= 6:
            lines["comments"].append(run[len(run) // 3])
    return lines


def _runs(numbers: list[int]) -> Iterator[list[int]]:
    """The runs of consecutive numbers."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        for prompt in cut():
            file.write(json.dumps({"id": prompt.id, "domain": prompt.domain, "prompt": prompt.text}, ensure_ascii=False) + "\n")
