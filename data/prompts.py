"""Evaluation prompts, read from a JSONL file. Two ship: Python cut from held-out modules of the standard library, and chat by task (DATA.md).

python -m draftsmith.data.prompts data/prompts-tiny.jsonl     # cuts them again (Python 3.11)
"""

import ast
import hashlib
import io
import json
import os
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.data import stdlib
from draftsmith.data.text_files import check_regular, lines, parse, short
from draftsmith.inference.reading import KINDS, describe, field

TINY = Path(__file__).resolve().parent / "prompts-tiny.jsonl"
CHAT = TINY.with_name("prompts-chat.jsonl")
PER_DOMAIN = 24
PER_MODULE = 4
MAX_CHARACTERS = 400
MOST_CHARACTERS = 1 << 23  # of a prompt that is read; a context of a million tokens has half as many
DOMAINS = ("functions", "docstrings", "comments", "tables")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to evaluate on.

    Attributes:
        id: unique within its file.
        domain: by which results are reported.
        text: the prompt itself, or the last turn of a conversation.
        messages: the conversation, for the target's chat template; empty where the prompt is a text.
        completion: what a target without a chat template continues instead of `text`; "" is `text`.
        later: the user's further turns, each to be asked after the target's answer to the turn before it.
        language: by which results may be reported; "" where the file does not say.
    """

    id: str
    domain: str
    text: str
    messages: tuple[dict, ...] = ()
    completion: str = ""
    later: tuple["Prompt", ...] = ()
    language: str = ""


def shipped_or_given(path: str | Path | None) -> Path:
    """The file of a name: None for the shipped Python prompts, "chat" for the shipped prompts by task, else a path."""
    return TINY if path is None else CHAT if path == "chat" else Path(os.path.expanduser(path))


def load(path: str | Path | None, limit: int | None = None, distinct: bool = False) -> list[Prompt]:
    """Prompts of a file, in its order.

    Each line is an object with `prompt`, `turns` or `messages`, perhaps `domain` or `category`, `id`, and `completion_prompt`. Turn 2 of a
    line has its id and "#2".

    Args:
        path: a .jsonl file, also .gz, or what `shipped_or_given` knows.
        limit: most lines of each domain.
        distinct: refuse two prompts of the same id.

    Raises:
        ValueError: a file that is missing, empty or too large, or a line that is no prompt.
    """
    file = shipped_or_given(path)
    if path != "":
        check_regular(file, "prompt file")
    if path == "" or not file.is_file():
        raise ValueError(f"prompt file {str(path)!r} not found; give a .jsonl file with `prompt` and `domain` on each line, or chat")
    prompts, counts, numbers = [], dict[str, int](), dict[str, int]()
    for number, line in lines(file):
        if not line.strip():
            continue
        prompt = _prompt(line, number, f"{file}:{number}")
        for turn in (prompt, *prompt.later):
            if distinct and turn.id in numbers:
                raise ValueError(f"{file}:{number}: `id` {turn.id!r} is that of line {numbers[turn.id]} too; give each prompt its own")
            numbers[turn.id] = number
        counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
        if limit is None or counts[prompt.domain] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{file}: no prompts in it; expected an object with `prompt` and `domain` on each line")
    return prompts


def _prompt(line: str, number: int, source: str) -> Prompt:
    row = parse(line, source, surrogates=True)  # `check_text` says in which key one is
    if type(row) is not dict:
        raise ValueError(
            f"{source}: expected an object with `prompt`, `turns` or `messages`, got {short(row)}; mend the line or leave it out"
        )
    name, domain = _name(row, "id", source) or str(number), _name(row, "domain", source) or _name(row, "category", source) or "all"
    present = [key for key in ("prompt", "turns", "messages") if key in row]
    if not present:
        raise ValueError(f"{source}: expected `prompt`, `turns` or `messages`, got keys {sorted(row)}; rename them")
    key = next((key for key in present if row[key]), present[0])
    items = field(row, key, str if key == "prompt" else list, source)
    if not items:
        raise ValueError(f"{source}: `{key}` is empty; fill it, or leave the line out")
    completion = check_text(field(row, "completion_prompt", (str, type(None)), source) or "", f"{source}: `completion_prompt`")
    if key == "prompt":
        return Prompt(name, domain, check_text(items, f"{source}: `prompt`"))
    if key == "turns":
        texts = [_inner(text, str, f"{source}: `turns` {index}") for index, text in enumerate(items)]
        first, *later = (
            Prompt(f"{name}#{turn}" if turn > 1 else name, domain, text, ({"role": "user", "content": text},))
            for turn, text in enumerate(texts, 1)
        )
        return replace(first, completion=completion, later=tuple(later))
    for index, message in enumerate(items):
        where = f"{source}: `messages` {index}"
        _inner(message, dict, where)
        for part in ("role", "content"):
            _inner(message.get(part), str, f"{where}: `{part}`")
    return Prompt(name, domain, items[-1]["content"], tuple(items), completion)


def _name(row: dict[str, Any], key: str, source: str) -> str:
    """An id or a domain; "" where there is none."""
    value = field(row, key, (str, int, type(None)), source)
    return "" if value is None else check_text(str(value), f"{source}: `{key}`")


def _inner(value: Any, kind: type, name: str) -> Any:
    """A value inside a list, which must be of this kind; `name` says where it is."""
    if type(value) is not kind:
        raise ValueError(f"{name} should be {KINDS[kind]}, got {describe(value)}; correct it, or leave the line out")
    return check_text(value, name) if kind is str else value


def check_text(text: str, name: str) -> str:
    """The text, checked that a tokenizer can take it; `name` says for the error what it is.

    Raises:
        ValueError: half a surrogate pair, which no UTF-8 text holds, or more characters than any context takes.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{name} has {len(text):,} characters; expected at most {MOST_CHARACTERS:,}; shorten it")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} has half a surrogate pair at character {error.start}; correct it") from None
    return text


def cut() -> Iterator[Prompt]:
    """PER_DOMAIN prompts of each domain from the held-out modules, at most PER_MODULE of a domain from each module."""
    prompts: dict[str, list[Prompt]] = {domain: [] for domain in DOMAINS}
    for module, source in stdlib.modules("valid"):
        for domain, ends in _cut_lines(source).items():
            for line in sorted(ends, key=lambda line: _hash(f"{module}:{line}"))[:PER_MODULE]:
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
