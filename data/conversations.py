"""Reads conversations and texts from files and from the Hub, with the keys that people use for them."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftsmith.data import stdlib, tables
from draftsmith.data.text_files import LINE, GivenTwice, check, check_regular, lines, object_of_pairs, parse, parts, short, too_deep

SEPARATOR = "<|endoftext|>"  # between the documents of a .txt file
KINDS = (".json", ".jsonl", ".txt", ".parquet", ".arrow")  # the first three also with .gz
CHUNK = 1 << 20  # bytes of a .json file that are read at a time
DOCUMENT = 1 << 28  # most bytes of a text in a .txt file
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # what `save_to_disk` adds
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "system": "system",
}
FORMATS = (
    "`messages` [{role, content}], `conversations` [{from, value}], `turns` [text], `prompt` and `completion`, "
    "`instruction` and `output`, `prompt`, or `text`"
)
REMEDY = "correct it or leave the example out"
_DECODE = json.JSONDecoder(object_pairs_hook=object_of_pairs).raw_decode


class Source(BaseModel):
    """Where examples come from, and how many of them are wanted. In a list a string stands for its path alone."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path: str = Field(description="`stdlib`; a .json, .jsonl, .txt (also .gz), .parquet or .arrow file; or a Hub data set")
    split: str = Field(default="train", description="split of a Hub data set")
    subset: str | None = Field(default=None, description="configuration of a Hub data set")
    domain: str | None = Field(
        default=None, description="domain of its examples; unset: each example's own `domain` or `category`, else `all`"
    )
    weight: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="share of the mixture's tokens, beside the other sources' weights"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Conversation:
    """One example: a conversation, or else a text.

    Attributes:
        id: unique within a source, unless the data repeat it.
        domain: by which results are reported.
        messages: turns of `role`, `content` and other keys of the data; None for a text, empty where the example's own list is.
        tools: descriptions of functions for the chat template.
        text: the text; beside `messages` the prompt and the answer joined, for tokenizers without a chat template.
        prompt: the first characters of `text` that are given and not supervised.
        cut: `text` stops at a limit: it does not end there.
    """

    id: str
    domain: str
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str = ""
    prompt: int = 0
    cut: bool = False


class _RawExample(NamedTuple):
    where: str  # `path:line`, for errors
    name: str  # `file:number`, the id of an example that has none
    value: Any


def read(source: Source, split: str = "train") -> Iterator[Conversation]:
    """The examples of a source, in its order. `finish_reason` "length" says that an example's answer or text stops at a limit.

    An example of `prompt` and `completion`, or of `instruction` and `output`, has both `messages` and `text`. The text joins the prompt and
    the answer directly, or by a blank line.

    Args:
        source: where to read.
        split: "train" or "valid", for the standard library; files and the Hub have no such parts.

    Raises:
        ValueError: at once for a source that does not exist, or a split or subset of files; when it is reached, for an example in none of
            FORMATS.
    """
    if source.path == "stdlib":
        return (Conversation(name, source.domain or "all", text=text) for name, text in stdlib.modules(split))
    files = _files(source.path)
    if files is not None and (source.subset or source.split != "train"):
        given = f"subset {source.subset!r}" if source.subset else f"split {source.split!r}"
        raise ValueError(
            f"got {given} for {source.path!r}, which is no data set of the Hub; name the files that are wanted, and leave it out"
        )
    if files is None:
        examples = (_RawExample(where, where, value) for where, value in hub_rows(source))
    else:
        examples = chain.from_iterable(map(_file_examples, files))
    return (_conversation(example, source.domain) for example in examples)


def fingerprint(source: Source) -> str:
    """A hash of a source's content: of names and bytes of files, or of a Hub data set's commit, subset and split.

    Raises:
        ValueError: a source that does not exist.
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
    """The files of a local path, in order; None where the path can only be a Hub id."""
    local = Path(os.path.expanduser(path))
    if local.is_dir():
        files = sorted(file for file in local.iterdir() if not file.is_dir() and _is_data(file))
        for file in files:
            check_regular(file, "data file")
        if files:
            return files
        raise ValueError(f"folder {path!r} holds no {', '.join(KINDS)} file; give the folder that holds such files")
    check_regular(local, "data file")
    if local.is_file():
        if _kind(local):
            return [local]
        raise ValueError(f"data file {path!r}: expected {', '.join(KINDS)} (.json, .jsonl and .txt also .gz); convert it to one of these")
    from draftsmith.models.model_files import looks_local  # late: it imports torch, which reading a recipe does not need

    if looks_local(path, (".gz", ".zst", ".csv", *KINDS)):
        raise ValueError(f"data file {path!r} not found; give a {', '.join(KINDS)} file, a folder of them, `stdlib` or a Hub id")
    return None


def _kind(path: Path) -> str:
    kind = Path(path.name.removesuffix(".gz")).suffix
    return kind if kind in (KINDS[:3] if path.suffix == ".gz" else KINDS) else ""


def _is_data(path: Path) -> bool:
    # `datasets` leaves copies of the examples as cache-*.arrow beside them.
    ignored = path.name in NOT_DATA or path.name.startswith(".") or (path.name.startswith("cache-") and path.suffix == ".arrow")
    return bool(_kind(path)) and not ignored


def _file_examples(path: Path) -> Iterator[_RawExample]:
    kind = _kind(path)
    if kind in (".parquet", ".arrow"):
        for number, value in tables.rows(path, kind):
            yield _RawExample(f"{path}:{number}", f"{path.name}:{number}", tables.as_json(value))
    elif kind == ".json":
        yield from _list_examples(path)
    elif kind == ".txt":
        yield from _documents(path)
    else:
        for number, line in lines(path):
            if line.strip():
                where = f"{path}:{number}"
                yield _RawExample(where, f"{path.name}:{number}", parse(line, where))


def _documents(path: Path) -> Iterator[_RawExample]:
    number, pieces, length = 0, list[str](), 0
    for at, line in chain(lines(path, DOCUMENT), [(0, SEPARATOR)]):
        *ended, rest = line.split(SEPARATOR)
        for end in ended:
            text = "".join([*pieces, end])
            pieces, length = [], 0
            if text.strip():
                number += 1
                yield _RawExample(str(path), f"{path.name}:{number}", {"text": text})
        pieces.append(rest)
        length += len(rest)
        if length > DOCUMENT:
            raise ValueError(f"{path}:{at}: a text of more than {DOCUMENT:,} characters; put {SEPARATOR} between texts, or cut it")


def _list_examples(path: Path) -> Iterator[_RawExample]:
    """The items of a JSON list. Only a chunk of it is in memory, since such files run to gigabytes."""
    more_parts, number = parts(path, CHUNK), 0
    text = _take(more_parts, CHUNK)
    at = _skip(text, 0)
    line = 1 + text.count("\n", 0, at)
    if text[at : at + 1] != "[":
        got = short(text[at : at + 60])
        raise ValueError(f"{path}:{line}: expected a list of examples, got {got}; leave only the list, or name a file of JSON lines .jsonl")
    at += 1
    after = _skip(text, at)
    mark, at = ("]", after + 1) if text[after : after + 1] == "]" else (",", at)
    while mark == ",":
        try:
            value, begin, end, mark = _scan(text, at)
        except RecursionError:
            raise too_deep(f"{path}:{line}") from None
        except GivenTwice as error:
            line += text.count("\n", at, _skip(text, at))
            raise ValueError(f"{path}:{line}: {error}; leave one out") from None
        except ValueError as error:
            if len(text) - at <= LINE and (more := _take(more_parts, max(CHUNK, len(text)))):  # the example may continue there
                text, at = text[at:] + more, 0
                continue
            if len(text) - at > LINE:
                raise ValueError(f"{path}:{line}: an example of more than {LINE:,} characters, or no JSON; mend the file") from None
            number_of_line = line + text.count("\n", at, getattr(error, "pos", at))
            raise ValueError(f"{path}:{number_of_line}: not JSON ({getattr(error, 'msg', error)}); mend the file") from None
        line, number = line + text.count("\n", at, begin), number + 1
        where = f"{path}:{line}"
        yield _RawExample(where, f"{path.name}:{number}", check(value, text[begin:end], where))
        line, at = line + text.count("\n", begin, end), end + 1
    if (text[at:] + _take(more_parts, 1)).strip(" \t\r\n"):
        raise ValueError(f"{path}:{line}: text after the end of the list; mend the file, or name a file of JSON lines .jsonl")


def _take(text_parts: Iterator[str], least: int) -> str:
    taken, length = list[str](), 0
    for part in text_parts:
        taken.append(part)
        length += len(part)
        if length >= least:
            break
    return "".join(taken)


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _scan(text: str, at: int) -> tuple[Any, int, int, str]:
    """(item of a list, its first index, the index of the mark after it, that mark: `,` or `]`)."""
    begin = _skip(text, at)
    value, end = _DECODE(text, begin)
    end = _skip(text, end)
    mark = text[end : end + 1]
    if mark not in (",", "]"):
        raise json.JSONDecodeError("expected `,` or `]` after an example", text, end)
    return value, begin, end, mark


def hub_rows(source: Source) -> Iterator[tuple[str, Any]]:
    """The rows of a Hub data set, streamed, each with where it is from.

    Raises:
        ValueError: no such data set, subset or split, or no connection.
    """
    import datasets

    try:
        examples = datasets.load_dataset(source.path, name=source.subset, split=source.split, streaming=True)
    except (ValueError, OSError, RuntimeError) as error:
        raise _hub_error(source, error) from None
    return ((f"{source.path}:{n}", tables.as_json(value)) for n, value in enumerate(examples, 1))


def _hub_commit(source: Source) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # The base class of the errors of the HTTP library that this version of the client uses: httpx, httpx2, …
    transport = cast(type[Exception], HfHubHTTPError.__bases__[0])
    try:
        return str(HfApi().dataset_info(source.path).sha)
    except (ValueError, OSError, transport) as error:
        raise _hub_error(source, error) from None


def _hub_error(source: Source, error: BaseException) -> ValueError:
    wanted = f"split {source.split!r}" + (f" of subset {source.subset!r}" if source.subset else "")
    got = " ".join(str(error).split())
    return ValueError(
        f"no file {source.path!r}, and no {wanted} of a Hub data set of that name ({got}); check the names and the connection"
    )


def _conversation(example: _RawExample, domain: str | None) -> Conversation:
    where, value = example.where, example.value
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {short(value)}, expected an object with {FORMATS}; {REMEDY}")
    value = {key: item for key, item in value.items() if item is not None}
    name = next((str(value[key]) for key in ("id", "uuid", "conversation_id", "prompt_id") if value.get(key, "") != ""), example.name)
    messages, text, prompt = _content(value, where)
    system = value.get("system") or value.get("system_prompt")
    if messages and isinstance(system, str) and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    domain = domain or str(value.get("domain") or value.get("category") or "all")
    cut = value.get("finish_reason") == "length"
    if cut and messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("finish_reason", "length")
    return Conversation(name, domain, messages, _tools(value.get("tools"), where), text, prompt, cut)


def _content(example: dict[str, Any], where: str) -> tuple[list[dict[str, Any]] | None, str, int]:
    """(messages, text, prompt) of an example, by the first of FORMATS that fits."""
    answer = next((key for key in ("completion", "output", "response") if key in example), None)
    for key in ("messages", "conversations", "conversation"):
        if key in example:
            return _messages(example[key], f"{where}: `{key}`"), "", 0
    if "prompt" in example and (answer or "text" not in example):
        return _pair(example, "prompt", answer, "", where)
    if "instruction" in example:
        extra = "input" if example.get("input") else "context"
        instruction = [_text(example, "instruction", where), _text(example, extra, where) if example.get(extra) else ""]
        return _pair({**example, "instruction": "\n\n".join(filter(None, instruction))}, "instruction", answer, "\n\n", where)
    if "turns" in example:
        turns = example["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{where}: `turns` is {short(turns)}, expected a list of the user's texts; for both sides give `messages`")
        return [{"role": "user", "content": turn} for turn in turns], "", 0
    if "text" in example:
        text, given = _text(example, "text", where), example.get("given", 0)
        if type(given) is not int or not 0 <= given <= len(text):
            raise ValueError(f"{where}: `given` is {short(given)}, expected how many characters of `text` are not supervised; {REMEDY}")
        return None, text, given
    raise ValueError(f"{where}: got keys {sorted(map(str, example))}, expected {FORMATS}; rename them")


def _pair(example: dict[str, Any], prompt: str, answer: str | None, separator: str, where: str) -> tuple[list[dict[str, Any]], str, int]:
    """(messages, text, prompt) of an example with a prompt and perhaps an answer under these keys, each a string or a list of messages."""
    sides = []
    for key, role in ((prompt, "user"), (answer, "assistant")):
        if key and isinstance(example[key], list):
            sides.append(_messages(example[key], f"{where}: `{key}`"))
        elif key:
            sides.append([{"role": role, "content": _text(example, key, where)}])
    values = [example[key] for key in (prompt, answer) if key]
    messages = list(chain(*sides))
    if not all(isinstance(value, str) for value in values):
        return messages, "", 0
    return messages, separator.join(values), len(values[0]) + (len(separator) if answer else 0)


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {short(value)}, expected a list of messages; {REMEDY}")
    return [_message(turn, f"{where} {number}") for number, turn in enumerate(value, 1)]


def _message(turn: Any, where: str) -> dict[str, Any]:
    """A message as templates expect it. Other keys stay, those that are null are dropped."""
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {short(turn)}, expected an object with `role` and `content`, or `from` and `value`; {REMEDY}")
    turn = {key: item for key, item in turn.items() if item is not None}
    if "from" in turn and "role" not in turn:
        speaker = turn.pop("from")
        if str(speaker).lower() not in ROLES:
            raise ValueError(f"{where} is from {short(speaker)}, expected one of {', '.join(ROLES)}; rename it or leave the example out")
        turn = {"role": ROLES[str(speaker).lower()], "content": turn.pop("value", None), **turn}
    role, content, call = turn.get("role"), turn.get("content"), turn.pop("function_call", None)
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has the role {short(role)}, expected a string such as user or assistant; {REMEDY}")
    role = ROLES.get(role.lower(), role)
    if call is not None and not isinstance(call, dict):
        raise ValueError(f"{where} has the function_call {short(call)}, expected an object; {REMEDY}")
    if call:  # OpenAI's older form
        turn.setdefault("tool_calls", [{"type": "function", "function": call}])
    content = joined_text(content)
    if content is None and turn.keys() & {"tool_calls", "reasoning_content"}:
        content = ""  # null by custom; not every template accepts that, all accept an empty string
    if not isinstance(content, str):
        raise ValueError(f"{where} has the content {short(content)}, expected a string or a list of text parts; {REMEDY}")
    calls = turn.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} has the tool_calls {short(calls)}, expected a list of objects; {REMEDY}")
    return {**turn, "role": role, "content": content}


def joined_text(content: Any) -> Any:
    """A message's list of text parts as one string; any other content as it is."""
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return content


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    tools = parse(value, f"{where}: `tools`") if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: `tools` is {short(value)}, expected a list of objects, or a string of JSON that is one; {REMEDY}")
    return tools


def _text(example: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(example[key], str):
        raise ValueError(f"{where}: `{key}` is {short(example[key])}, expected a string; {REMEDY}")
    return example[key]
