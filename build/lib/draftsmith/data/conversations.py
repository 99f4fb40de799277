"""Conversations and texts from files and from the Hub, in the shapes that people have them."""

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.data import stdlib

SEPARATOR = "<|endoftext|>"  # between the documents of a .txt file
KINDS = (".json", ".jsonl", ".txt", ".parquet", ".arrow")  # the first three also with .gz
CHUNK = 1 << 20  # characters of a .json file looked at together
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # what `save_to_disk` adds
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "system": "system",
}
SHAPES = (
    "`messages` [{role, content}], `conversations` [{from, value}], `turns` [text], `prompt` and `completion`, "
    "`instruction` and `output`, `prompt`, or `text`"
)
_DECODE = json.JSONDecoder().raw_decode
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Source(BaseModel):
    """Where rows come from, and how much of them is wanted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path: str = Field(description="`stdlib`; a .json, .jsonl, .txt (also .gz), .parquet or .arrow file; or a Hub data set")
    split: str = Field(default="train", description="split of a Hub data set")
    subset: str | None = Field(default=None, description="configuration of a Hub data set")
    domain: str | None = Field(default=None, description="domain of its rows; unset: each row's own `domain` or `category`, else `all`")
    weight: float | None = Field(default=None, gt=0, description="share of the mixture's tokens, beside the other sources' weights")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of data: `messages` (role, content, …; `tools` for the template), or else `text`.

    `prompt` is the length in characters of the part of `text` that is given and bears no loss (0: all of it is learnt).
    """

    id: str
    domain: str
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str = ""
    prompt: int = 0


class _Row(NamedTuple):
    where: str  # `path:line`, for errors
    name: str  # `file:number`, the id of a row that has none
    value: Any


def read(source: Source, split: str = "train") -> Iterator[Conversation]:
    """The rows of a source, in its order; `split` ("train" or "valid") is the standard library's own, files and the Hub have none.

    A row of `prompt` and `completion`, or of `instruction` and `output`, has `text` beside `messages`, for tokenizers without a chat
    template: the prompt and the answer joined by nothing, or by a blank line. `messages` is empty where the row's own list is.
    Raises ValueError at once for a source that is not there, and, when it comes to it, for a row that is not in one of SHAPES.
    """
    if source.path == "stdlib":
        return (Conversation(name, source.domain or "all", text=text) for name, text in stdlib.modules(split))
    files = _files(source.path)
    rows = _hub_rows(source) if files is None else chain.from_iterable(map(_file_rows, files))
    return (_conversation(row, source.domain) for row in rows)


def fingerprint(source: Source) -> str:
    """A hash that changes with the source's content: of names and bytes, or of a Hub data set's commit, subset and split.

    Raises ValueError for a source that is not there.
    """
    digest = hashlib.sha256()
    if source.path == "stdlib":
        for split in ("train", "valid"):
            for name, text in stdlib.modules(split):
                digest.update(f"{split} {name} {hashlib.sha256(text.encode()).hexdigest()}\n".encode())
        return digest.hexdigest()
    files = _files(source.path)
    if files is None:
        return hashlib.sha256(repr((source.path, _hub_commit(source), source.subset, source.split)).encode()).hexdigest()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(path: str) -> list[Path] | None:
    """The files of a local path, in order; None for what can only be a Hub id."""
    local = Path(path).expanduser()
    if local.is_dir():
        if found := sorted(file for file in local.iterdir() if file.is_file() and _is_data(file)):
            return found
        raise ValueError(f"folder {path!r} holds no {', '.join(KINDS)} file; give the folder that holds the files themselves")
    if local.is_file():
        if _kind(local):
            return [local]
        raise ValueError(f"data file {path!r}: expected {', '.join(KINDS)} (.json, .jsonl and .txt also .gz); convert it to one of these")
    looks_local = (
        path.startswith((".", "~", os.sep))
        or path.endswith((os.sep, ".gz", ".zst", ".csv", *KINDS))
        or path.count("/") > 1
        or os.path.isdir(os.path.dirname(path))
    )
    if looks_local:
        raise ValueError(f"data file {path!r} not found; give a {', '.join(KINDS)} file, a folder of them, `stdlib` or a Hub id")
    return None


def _kind(path: Path) -> str:
    kind = Path(path.name.removesuffix(".gz")).suffix
    return kind if kind in (KINDS[:3] if path.suffix == ".gz" else KINDS) else ""


def _is_data(path: Path) -> bool:
    # `datasets` leaves what it computed as cache-*.arrow beside the rows themselves: the same rows again.
    own = path.name in NOT_DATA or path.name.startswith(".") or (path.name.startswith("cache-") and path.suffix == ".arrow")
    return bool(_kind(path)) and not own


def _file_rows(path: Path) -> Iterator[_Row]:
    kind = _kind(path)
    if kind in (".parquet", ".arrow"):
        yield from _table_rows(path, kind)
    elif kind == ".json":
        yield from _list_rows(path)
    elif kind == ".txt":
        yield from _documents(path)
    else:
        for number, line in _lines(path):
            if line.strip():
                where = f"{path}:{number}"
                yield _Row(where, f"{path.name}:{number}", _parse(line, where))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file, decoded strictly, their end as `\\n`."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text[:-2] + "\n" if text.endswith("\r\n") else text
    except UnicodeDecodeError as error:
        bad = f"byte {error.start + 1} of the line, 0x{error.object[error.start]:02x}"
        raise ValueError(f"{path}:{number}: {bad}, is not UTF-8; save the file as UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number + 1}: the gzip stream is cut off or damaged ({error}); copy or download the file again") from None


def _documents(path: Path) -> Iterator[_Row]:
    number, parts = 0, list[str]()
    for _, line in chain(_lines(path), [(0, SEPARATOR)]):
        *ended, rest = line.split(SEPARATOR)
        for end in ended:
            text = "".join([*parts, end])
            parts = []
            if text.strip():
                number += 1
                yield _Row(str(path), f"{path.name}:{number}", {"text": text})
        parts.append(rest)


def _list_rows(path: Path) -> Iterator[_Row]:
    """Rows of a JSON list, of which only a chunk is held: such files run to gigabytes."""
    lines, number = _lines(path), 0
    text = _take(lines, CHUNK)
    at = _skip(text, 0)
    line = 1 + text.count("\n", 0, at)
    if text[at : at + 1] != "[":
        got = _short(text[at : at + 60])
        raise ValueError(f"{path}:{line}: expected a list of rows, got {got}; keep the list alone, or name a file of JSON lines .jsonl")
    at += 1
    after = _skip(text, at)
    mark, at = ("]", after + 1) if text[after : after + 1] == "]" else (",", at)
    while mark == ",":
        try:
            value, begin, end, mark = _scan(text, at)
        except ValueError as error:
            if more := _take(lines, max(CHUNK, len(text))):  # the row may go on there
                text, at = text[at:] + more, 0
                continue
            place = line + text.count("\n", at, getattr(error, "pos", at))
            raise ValueError(f"{path}:{place}: not JSON ({getattr(error, 'msg', error)}); mend the file") from None
        line, number = line + text.count("\n", at, begin), number + 1
        where = f"{path}:{line}"
        yield _Row(where, f"{path.name}:{number}", _encodable(value, text[begin:end], where))
        line, at = line + text.count("\n", begin, end), end + 1
    if (text[at:] + _take(lines, 1)).strip(" \t\r\n"):
        raise ValueError(f"{path}:{line}: text after the end of the list; mend the file, or name a file of JSON lines .jsonl")


def _take(lines: Iterator[tuple[int, str]], least: int) -> str:
    taken, length = list[str](), 0
    for _, line in lines:
        taken.append(line)
        length += len(line)
        if length >= least:
            break
    return "".join(taken)


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _scan(text: str, at: int) -> tuple[Any, int, int, str]:
    """(row, where it begins, where the mark after it stands, that mark: `,` or `]`)."""
    begin = _skip(text, at)
    value, end = _DECODE(text, begin)
    end = _skip(text, end)
    mark = text[end : end + 1]
    if mark not in (",", "]"):
        raise json.JSONDecodeError("expected `,` or `]` after a row", text, end)
    return value, begin, end, mark


def _parse(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}), got {_short(line)}; mend the line or leave it out") from None
    return _encodable(value, line, where)


def _encodable(value: Any, source: str, where: str) -> Any:
    """`value`, unless a string in it is no text: JSON can spell half of a surrogate pair, no tokenizer can read it."""
    if _SURROGATE.search(source):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where}: {half!r} is half of a surrogate pair, not a character; take it out") from None
    return value


def _table_rows(path: Path, kind: str) -> Iterator[_Row]:
    from datasets import IterableDataset

    try:
        with TemporaryDirectory() as cache:
            escaped = glob.escape(str(path))  # `datasets` would read it as a pattern
            rows = IterableDataset.from_file(str(path)) if kind == ".arrow" else IterableDataset.from_parquet(escaped, cache_dir=cache)
            for number, row in enumerate(rows, 1):
                yield _Row(f"{path}:{number}", f"{path.name}:{number}", _without_none(row))
    except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(
            f"{path}: not a whole {kind} file of the kind `datasets` writes ({' '.join(str(error).split())}); copy or download it again"
        ) from None


def _hub_rows(source: Source) -> Iterator[_Row]:
    import datasets

    try:
        rows = datasets.load_dataset(source.path, name=source.subset, split=source.split, streaming=True)
    except (ValueError, OSError, RuntimeError) as error:
        raise _hub_error(source, error) from None
    return (_Row(f"{source.path}:{n}", f"{source.path}:{n}", _without_none(row)) for n, row in enumerate(rows, 1))


def _hub_commit(source: Source) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # The root of the errors of the HTTP library that this version of the client is built on: httpx, httpx2, …
    transport = cast(type[Exception], HfHubHTTPError.__bases__[0])
    try:
        return str(HfApi().dataset_info(source.path).sha)
    except (ValueError, OSError, transport) as error:
        raise _hub_error(source, error) from None


def _hub_error(source: Source, error: BaseException) -> ValueError:
    asked = f"split {source.split!r}" + (f" of subset {source.subset!r}" if source.subset else "")
    got = " ".join(str(error).split())
    return ValueError(f"no file {source.path!r}, and no {asked} of a Hub data set of that name ({got}); check the names and the connection")


def _without_none(value: Any) -> Any:
    """A table's row as it was written: tables give every row every key that any row has."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _conversation(row: _Row, domain: str | None) -> Conversation:
    where, value = row.where, row.value
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {_short(value)}, expected an object with {SHAPES}")
    value = {key: item for key, item in value.items() if item is not None}
    name = next((str(value[key]) for key in ("id", "uuid", "conversation_id", "prompt_id") if value.get(key, "") != ""), row.name)
    messages, text, prompt = _content(value, where)
    system = value.get("system") or value.get("system_prompt")
    if messages and isinstance(system, str) and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    domain = domain or str(value.get("domain") or value.get("category") or "all")
    return Conversation(name, domain, messages, _tools(value.get("tools"), where), text, prompt)


def _content(row: dict[str, Any], where: str) -> tuple[list[dict[str, Any]] | None, str, int]:
    """(messages, text, prompt) of a row in any of SHAPES; the first that fits."""
    answer = next((key for key in ("completion", "output", "response") if key in row), None)
    for key in ("messages", "conversations", "conversation"):
        if key in row:
            return _messages(row[key], f"{where}: `{key}`"), "", 0
    if "prompt" in row and (answer or "text" not in row):
        return _pair(row, "prompt", answer, "", where)
    if "instruction" in row:
        extra = "input" if row.get("input") else "context"
        given = [_text(row, "instruction", where), _text(row, extra, where) if row.get(extra) else ""]
        return _pair({**row, "instruction": "\n\n".join(filter(None, given))}, "instruction", answer, "\n\n", where)
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{where}: `turns` is {_short(turns)}, expected a list of the user's texts; for both sides give `messages`")
        return [{"role": "user", "content": turn} for turn in turns], "", 0
    if "text" in row:
        return None, _text(row, "text", where), 0
    raise ValueError(f"{where}: got keys {sorted(map(str, row))}, expected {SHAPES}; rename them")


def _pair(row: dict[str, Any], asked: str, answer: str | None, between: str, where: str) -> tuple[list[dict[str, Any]], str, int]:
    sides = []
    for key, role in ((asked, "user"), (answer, "assistant")):
        if key and isinstance(row[key], list):
            sides.append(_messages(row[key], f"{where}: `{key}`"))
        elif key:
            sides.append([{"role": role, "content": _text(row, key, where)}])
    plain = [row[key] for key in (asked, answer) if key]
    if not all(isinstance(side, str) for side in plain):
        return list(chain(*sides)), "", 0
    return list(chain(*sides)), between.join(plain), len(plain[0]) + (len(between) if answer else 0)


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {_short(value)}, expected a list of messages")
    return [_message(turn, f"{where} {number}") for number, turn in enumerate(value, 1)]


def _message(turn: Any, where: str) -> dict[str, Any]:
    """A message as templates expect it; what else it carries is kept, what is null is dropped."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {_short(turn)}, expected an object with `role` and `content`, or `from` and `value`")
    turn = {key: item for key, item in turn.items() if item is not None}
    if "from" in turn and "role" not in turn:
        speaker = turn.pop("from")
        if str(speaker).lower() not in ROLES:
            raise ValueError(f"{where} is from {_short(speaker)}, expected one of {', '.join(ROLES)}; rename it or drop the row")
        turn = {"role": ROLES[str(speaker).lower()], "content": turn.pop("value", None), **turn}
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has the role {_short(role)}, expected a string such as user or assistant")
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    if content is None and turn.keys() & {"tool_calls", "function_call", "reasoning_content"}:
        content = ""  # null there by custom; templates differ in whether they can bear that, all can bear an empty string
    if not isinstance(content, str):
        raise ValueError(f"{where} has the content {_short(content)}, expected a string or a list of text parts")
    return {**turn, "role": role, "content": content}


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    tools = _parse(value, f"{where}: `tools`") if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: `tools` is {_short(value)}, expected a list of objects, or a string of JSON that is one")
    return tools


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(row[key], str):
        raise ValueError(f"{where}: `{key}` is {_short(row[key])}, expected a string")
    return row[key]


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
