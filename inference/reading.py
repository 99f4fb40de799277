"""Files that others wrote, read with errors that name the file, the key, and what was expected."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.inference.terminal import printable

KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
LIMIT = 1 << 28  # most bytes of a JSON file; a tokenizer of 256k entries has 3e7


def read_text(path: Path, most: int = 1 << 20) -> str:
    """The content of a text file.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        ValueError: not UTF-8, or larger.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"expected at most {most:,} bytes of text, got more; shorten it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start}); convert it") from None


def read_json(path: Path) -> Any:
    """The object in a JSON file.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deep, no object, or larger than 256 MiB. It names the file.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > LIMIT:
        raise ValueError(f"{path}: {path.stat().st_size:,} bytes of JSON; expected at most {LIMIT:,}")
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start}); write it anew or restore it") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON (line {error.lineno}: {error.msg}); write it anew or restore it") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{path}: {error}; write it anew or restore it") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deep to be read; write it anew or restore it") from None
    if type(value) is not dict:
        raise ValueError(f"{path}: expected {KINDS[dict]}, got {describe(value)}")
    return value


def field(content: dict[str, Any], key: str, kinds: type | tuple[type, ...], source: Path | str) -> Any:
    """`content[key]`, which must be of one of these kinds. An integer passes as a number; true and false pass as neither.

    Args:
        content: an object that was read from `source`.
        key: must be there, unless type(None) is among the kinds.
        kinds: the types that the value may have.
        source: the file, for errors.

    Raises:
        ValueError: the key is missing or has another kind. It names file and key.
    """
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    value = content.get(key)
    if type(value) in kinds or (float in kinds and type(value) is int):
        return value
    expected = " or ".join(KINDS[kind] for kind in kinds)
    got = describe(value) if key in content else "nothing"
    raise ValueError(f"{source}: `{key}` should be {expected}, got {got}; correct it or restore the file")


def require_same(before: dict[str, Any], now: dict[str, Any], what: str, advice: str, defaults: Mapping[str, Any] | None = None) -> None:
    """Compare settings with those that a file was begun with.

    Args:
        before: as they were read.
        now: their present values.
        what: the file and what it is of, for the error.
        advice: what to do, for the error.
        defaults: of settings that are newer than the file may be, which had these values.

    Raises:
        ValueError: a setting differs. It names the first.
    """
    now = json.loads(json.dumps(now))
    before = {key: value for key, value in (defaults or {}).items() if key in now} | before
    for key in sorted(now.keys() | before.keys()):
        if now.get(key) != before.get(key):
            was, given = (printable(json.dumps(values.get(key)), "")[:200] for values in (before, now))
            raise ValueError(f"{what} with {printable(key, '')} {was}, now {given}; {advice}")


def describe(value: object) -> str:
    """A value for an error line: its kind, and where it is short the value itself."""
    text = json.dumps(value, ensure_ascii=True, default=repr) if not isinstance(value, (dict, list)) else ""
    return f"{KINDS.get(type(value), type(value).__name__)}{f' ({text})' if 0 < len(text) <= 40 else ''}"
