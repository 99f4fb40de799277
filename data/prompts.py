"""Evaluation prompts, read from files and from the Hub. Two files ship: Python cut from held-out modules of the standard library
(cut_prompts.py), and chat by task (DATA.md)."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.data import tables
from draftsmith.data.text_files import check_regular, lines, parse, short
from draftsmith.inference.reading import KINDS, describe, field

TINY = Path(__file__).resolve().parent / "prompts-tiny.jsonl"
CHAT = TINY.with_name("prompts-chat.jsonl")
NO_DOMAIN = "no domain"
TABLES = (".parquet", ".arrow")
HUB = "hf:"  # before the name of a Hub data set, so that nothing else asks the network
MOST_CHARACTERS = 1 << 23  # of a prompt that is read; a context of a million tokens has half as many


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
        continuation: the answer that a log has to it; "" without one.
        reference: known answers, by which answers are judged where decoding is lossy (eval/quality.py); none without one.
    """

    id: str
    domain: str
    text: str
    messages: tuple[dict, ...] = ()
    completion: str = ""
    later: tuple["Prompt", ...] = ()
    language: str = ""
    continuation: str = ""
    reference: tuple[str, ...] = ()


def shipped_or_given(path: str | Path) -> Path:
    """The file of a name: "chat" for the shipped prompts by task, else a path."""
    return CHAT if path == "chat" else Path(os.path.expanduser(path))


def load(paths: str | Path | Sequence[str | Path], limit: int | None = None, distinct: bool = False) -> list[Prompt]:
    """Prompts of files and Hub data sets, in their order.

    Each row is an object with `prompt`, `turns` or `messages`, perhaps `domain` or `category`, `id`, `language`, `completion_prompt`, and
    `reference`, a text or a list of texts. Rows without a domain are of "all", or of NO_DOMAIN beside rows that have one. Turn 2 of a row has
    its id and "#2". A log has the answer as well: `messages` that end with the assistant's, or a `response` to the `prompt`.

    Args:
        paths: none, one or several, each a .jsonl file, also .gz, a .parquet or .arrow file, what `shipped_or_given` knows, or hf:owner/name[:split] on the Hub.
        limit: most rows of each domain.
        distinct: refuse two prompts of the same id.

    Raises:
        ValueError: a file that is missing, empty, too large or given twice, a row that is no prompt, or a data set that the Hub does not give.
    """
    sources = [paths] if isinstance(paths, str | Path) else list(paths)
    prompts, counts, seen = [], dict[str, int](), dict[str, tuple[str, int]]()
    last_parts = [Path(source).name for source in sources]
    for index, source in enumerate(sources):
        if source in sources[:index]:
            raise ValueError(f"got prompt file {str(source)!r} twice; leave one out")
        name, rows = _rows(source)
        short = Path(name).name if last_parts.count(last_parts[index]) == 1 else name
        empty = True
        for number, row in rows:
            empty, default = False, f"{short}:{number}" if len(sources) > 1 else str(number)
            prompt = _prompt(row, default, f"{name}:{number}")
            for turn in (prompt, *prompt.later):
                if distinct and turn.id in seen:
                    file, line = seen[turn.id]
                    at = f"line {line}" if file == name else f"{file}:{line}"
                    raise ValueError(f"{name}:{number}: `id` {turn.id!r} is that of {at} too; give each prompt its own")
                seen[turn.id] = (name, number)
            counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
            if limit is None or counts[prompt.domain] <= limit:
                prompts.append(prompt)
        if empty:
            raise ValueError(f"{name}: no prompts in it; expected an object with `prompt` and `domain` on each line")
    if len(counts) > 1:  # reports call the total "all"
        prompts = [_in_domain(prompt, NO_DOMAIN) if prompt.domain == "all" else prompt for prompt in prompts]
    return prompts


def _in_domain(prompt: Prompt, domain: str) -> Prompt:
    return replace(prompt, domain=domain, later=tuple(replace(turn, domain=domain) for turn in prompt.later))


def user_texts(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """What the user says in the prompts of files, each text once: the prompts, their later turns, and the turns before them in a chat.

    Raises:
        ValueError: as `load`.
    """
    turns = [turn for prompt in load(paths) for turn in (prompt, *prompt.later)]
    said = [message["content"] for turn in turns for message in turn.messages if message["role"] == "user"]
    return tuple(dict.fromkeys([*(turn.text for turn in turns), *said]))


def hash_of(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts, which say with the settings what is measured. References change nothing that is decoded, and do not count."""

    def content(prompt: Prompt) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(prompt).items() if name != "reference"}
        return fields | {"later": [content(turn) for turn in prompt.later]}

    return hashlib.sha256(json.dumps([content(prompt) for prompt in prompts], sort_keys=True).encode()).hexdigest()


def _rows(source: str | Path) -> tuple[str, Iterator[tuple[int, Any]]]:
    """The name of a source for errors, and its numbered rows, which are JSON but not checked."""
    if isinstance(source, str) and source.startswith(HUB):
        return source, enumerate(_hub_rows(source), 1)
    file = shipped_or_given(source)
    if source != "":
        check_regular(file, "prompt file")
    if source == "" or not file.is_file():
        raise ValueError(
            f"prompt file {str(source)!r} not found; give a .jsonl or .parquet file with `prompt` and `domain` on each line, chat, or "
            f"{HUB}owner/name"
        )
    if file.suffix in TABLES:
        return str(file), ((number, tables.as_json(row)) for number, row in tables.rows(file, file.suffix))
    # `check_text` says in which key half a surrogate pair is.
    return str(file), ((number, parse(line, f"{file}:{number}", surrogates=True)) for number, line in lines(file) if line.strip())


def _hub_rows(source: str) -> Iterator[Any]:
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?::(\w[\w.-]*))?", source.removeprefix(HUB))
    if match is None:
        raise ValueError(f"prompts {source!r}: expected {HUB}owner/name or {HUB}owner/name:split")
    from draftsmith.data.conversations import Source, hub_rows

    return (row for _, row in hub_rows(Source(path=match[1], split=match[2] or "train")))


def _prompt(row: Any, default: str, source: str) -> Prompt:
    """The prompt of a row; `default` is its id where the row has none."""
    if type(row) is not dict:
        raise ValueError(
            f"{source}: expected an object with `prompt`, `turns` or `messages`, got {short(row)}; mend the line or leave it out"
        )
    name, domain = _name(row, "id", source) or default, _name(row, "domain", source) or _name(row, "category", source) or "all"
    language = _name(row, "language", source)
    present = [key for key in ("prompt", "turns", "messages") if key in row]
    if not present:
        raise ValueError(f"{source}: expected `prompt`, `turns` or `messages`, got keys {sorted(row)}; rename them")
    key = next((key for key in present if row[key]), present[0])
    items = field(row, key, str if key == "prompt" else list, source)
    if not items:
        raise ValueError(f"{source}: `{key}` is empty; fill it, or leave the line out")
    completion, reference = _text(row, "completion_prompt", source), _reference(row, source)
    if key == "prompt":
        answer = _text(row, "response", source)
        return Prompt(name, domain, check_text(items, f"{source}: `prompt`"), language=language, continuation=answer, reference=reference)
    if key == "turns":
        texts = [_inner(text, str, f"{source}: `turns` {index}") for index, text in enumerate(items)]
        first, *later = (
            Prompt(f"{name}#{turn}" if turn > 1 else name, domain, text, ({"role": "user", "content": text},), language=language)
            for turn, text in enumerate(texts, 1)
        )
        # Which turn a reference answers is not known where there are several.
        return replace(first, completion=completion, later=tuple(later), reference=() if later else reference)
    for index, message in enumerate(items):
        where = f"{source}: `messages` {index}"
        _inner(message, dict, where)
        for part in ("role", "content"):
            _inner(message.get(part), str, f"{where}: `{part}`")
    answer = items[-1]["content"] if items[-1]["role"] == "assistant" else ""
    question = tuple(items[:-1] if items[-1]["role"] == "assistant" else items)
    if not question:
        raise ValueError(f"{source}: `messages` is an answer alone; expected what it answers before it; leave the line out")
    return Prompt(name, domain, question[-1]["content"], question, completion, (), language, answer, reference)


def _reference(row: dict[str, Any], source: str) -> tuple[str, ...]:
    """The known answers of a row. They are needed for nothing that is decoded, so that of other kinds than texts there are none."""
    value = row.get("reference")
    texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(check_text(text, f"{source}: `reference`") for text in texts if isinstance(text, str))


def _text(row: dict[str, Any], key: str, source: str) -> str:
    """A text; "" where there is none."""
    return check_text(field(row, key, (str, type(None)), source) or "", f"{source}: `{key}`")


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
