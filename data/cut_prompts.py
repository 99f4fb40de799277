"""Cuts the Python prompts that ship from held-out modules of the standard library.

python -m draftsmith.data.cut_prompts data/prompts-tiny.jsonl     # (Python 3.11)
"""

import ast
import hashlib
import io
import json
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from draftsmith.data import stdlib
from draftsmith.data.prompts import Prompt

PER_DOMAIN = 24
PER_MODULE = 4
MAX_CHARACTERS = 400
DOMAINS = ("functions", "docstrings", "comments", "tables")


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
