"""Text files of others: strict UTF-8, lines and gzip streams of bounded size, JSON of bounded depth; errors name file and line."""

import codecs
import gzip
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

LINE = 1 << 26  # most bytes of a line or of an example
SMALL, EXPANSION = 1 << 26, 200  # a compressed file may expand to SMALL bytes, or to EXPANSION times its size; text reaches 20 times
BLOCK = 1 << 20
DEPTH = 100  # most levels of JSON
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def check_regular(path: Path, name: str) -> None:
    """Raises ValueError if `path` is there and is no file (a FIFO, a device), or is a link to nothing; `name` is what it was given for."""
    try:
        mode = path.stat().st_mode
    except OSError:
        if path.is_symlink():
            raise ValueError(f"{name} {str(path)!r} is a link that leads to no file; mend the link, or give another file") from None
        return
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise ValueError(f"{name} {str(path)!r} is {kinds.get(stat.S_IFMT(mode), 'a device')}, expected a file; give a file")


def lines(path: Path, limit: int = LINE) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file, also .gz, decoded strictly, with `\\n` at their ends and without a byte order mark.

    Raises:
        ValueError: no regular file; bytes that are no UTF-8, or 0; a line of more than `limit` bytes; a damaged gzip stream, or one that
            expands without bound.
        OSError: it cannot be read.
    """
    number = 0
    with _opened(path, lambda: number + 1) as file:
        while line := file.readline(limit + 1):
            number += 1
            if len(line) > limit:
                raise ValueError(f"{path}:{number}: a line of more than {limit:,} bytes; expected shorter ones, cut it")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error.start + 1, error.object[error.start]) from None
            if "\0" in text:
                raise ValueError(f"{path}:{number}: byte {line.index(0) + 1} of the line is 0, so this is no UTF-8 text; save it as UTF-8")
            yield number, text[:-2] + "\n" if text.endswith("\r\n") else text


def parts(path: Path, length: int) -> Iterator[str]:
    """The text of a file in parts of about `length` bytes, whatever the length of its lines. Otherwise as `lines`."""
    rest, number, behind = b"", 1, 0  # behind: bytes of the line before `data`
    beginning = True
    with _opened(path, lambda: number) as file:
        while block := file.read(length):
            data = rest + block
            text, rest = _decoded(path, data, number, behind)
            decoded = data[: len(data) - len(rest)]
            number += decoded.count(b"\n")
            behind = len(decoded) - 1 - decoded.rfind(b"\n") if b"\n" in decoded else behind + len(decoded)
            yield text.removeprefix("\ufeff") if beginning else text
            beginning = beginning and not text
        if rest:
            raise _not_utf8(path, number, behind + 1, rest[0])


def _decoded(path: Path, data: bytes, number: int, behind: int) -> tuple[str, bytes]:
    """The text of `data`, and the bytes at its end that begin a character."""
    try:
        text, length = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        byte = error.start - start + 1 if start else behind + error.start + 1
        raise _not_utf8(path, number + data.count(b"\n", 0, error.start), byte, data[error.start]) from None
    return text, data[length:]


def _not_utf8(path: Path, number: int, byte: int, value: int) -> ValueError:
    return ValueError(f"{path}:{number}: byte {byte} of the line, 0x{value:02x}, is not UTF-8; save the file as UTF-8")


@contextmanager
def _opened(path: Path, number: Callable[[], int]) -> Iterator[BinaryIO]:
    check_regular(path, "data file")
    if path.suffix == ".gz":
        with suppress(EOFError, gzip.BadGzipFile, zlib.error):  # damage is reported where it is reached
            _check_expansion(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number()}: the gzip stream is cut off or damaged ({error}); copy or download the file again") from None


class Size:
    """Counts what a file expands to. `add` raises ValueError if that is more than any text would."""

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.most = path, 0, max(SMALL, EXPANSION * path.stat().st_size)

    def add(self, size: int) -> None:
        self.read += size
        if self.read > self.most:
            raise ValueError(
                f"{self.path}: expands to more than {EXPANSION} times its size, as no text does; decompress it yourself if it is yours"
            )


def _check_expansion(path: Path) -> None:
    """Decompress a file once, before anything is made of its content: that is quick beside the tokenizer, which a bomb would keep busy."""
    size = Size(path)
    with gzip.open(path, "rb") as file:
        while block := file.read(BLOCK):
            size.add(len(block))


def parse(line: str, where: str, surrogates: bool = False) -> Any:
    """The JSON of a line; `surrogates`: halves of surrogate pairs may be in it.

    Raises:
        ValueError: as `check`, no JSON, or a key that is given twice, of which Python would drop the first. It begins with `where`.
    """
    try:
        value = json.loads(line, object_pairs_hook=object_of_pairs)
    except RecursionError:
        raise too_deep(where) from None
    except GivenTwice as error:
        raise ValueError(f"{where}: {error}; leave one out") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}), got {short(line)}; mend the line or leave it out") from None
    return check(value, line, where, surrogates)


class GivenTwice(ValueError):
    """A key that an object has twice."""


def object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object by its keys and values. Raises GivenTwice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise GivenTwice(f"key {short(next(key for key in keys if keys.count(key) > 1))} is given twice")
    return value


def check(value: Any, source: str, where: str, surrogates: bool = False) -> Any:
    """`value`, which was read from `source`.

    Raises:
        ValueError: more than DEPTH levels; unless `surrogates`, half of a surrogate pair, which JSON can spell and no tokenizer can read.
    """
    if source.count("[") + source.count("{") > DEPTH and _deeper(value):
        raise too_deep(where)
    if not surrogates and _SURROGATE.search(source):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where}: {half!r} is half of a surrogate pair, not a character; take it out") from None
    return value


def _deeper(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())]
    return any(isinstance(item, (dict, list)) for item in level)


def too_deep(where: str) -> ValueError:
    """The error for JSON of too many levels."""
    return ValueError(f"{where}: JSON of more than {DEPTH} levels; expected a shallow object, leave it out")


def short(value: Any) -> str:
    """A value for an error line, in at most 60 characters that may be printed."""
    shown = repr(value[:60]) if isinstance(value, str) else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
