"""A JSONL file that is appended to and resumed: whatever stops a run, the same command continues, and each row is written once."""

import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.data.text_files import LINE, short
from draftsmith.inference import durable
from draftsmith.inference.claim import lock

OURS = "draftsmith"  # the fact `by` of rows from our own decoder; otherwise it is the address of a server
INSTEAD = "give another output, or delete the file"
GIVEN = "given"  # in a row's `generation`: the hash of what it was made from
OWN = ("finish_reasons", "new_tokens", "so_far", GIVEN)  # what differs between the rows of a file
BEGINNING = '{"id": %s, "domain": '  # every row begins so


class Output:
    """The output file, open for appending and locked against a second run.

    A row begins with its id, which is one of `ids`; where these are a mapping, to the hash of what the row is made from. Its `generation` has
    the `facts`, which say how every row was generated, and what is the row's own (OWN).

    Attributes:
        rows: for each id, the byte at which its line ends.

    Raises (when it is opened):
        ValueError: a line is not such a row; the message has its number. An unfinished last line that began as a row is dropped.
        OSError: the file cannot be read and written, or another run writes it.
    """

    def __init__(self, path: Path, facts: dict[str, Any], ids: Collection[str]) -> None:
        self.path, self.facts, self.ids = path, facts, ids
        self.rows: dict[str, int] = {}

    def __enter__(self) -> "Output":
        self._check_kind()
        with self._errors_with_advice():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            self._lock()
            with self._errors_with_advice():
                durable.sync(self.path.parent)
            self._load()
        except BaseException:
            os.close(self.file)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.file)
        if kind is KeyboardInterrupt:
            print(f"stopped with {len(self.rows)} rows in {self.path}; the same command continues from there", file=sys.stderr)

    def _check_kind(self) -> None:
        """Raises OSError for what is no file of its own: nothing is written through a link."""
        if self.path.is_symlink():
            raise OSError(f"{self.path} is a link to {os.readlink(self.path)}; expected a file of its own; give the file that it leads to")
        if self.path.is_dir():
            raise OSError(f"{self.path} is a folder; expected the name of a .jsonl file; add one")
        if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
            raise OSError(f"{self.path} is no regular file; expected the name of a .jsonl file; give one")

    def _lock(self) -> None:
        if not lock(self.file):
            holder = _holder(os.fstat(self.file).st_ino)
            raise OSError(f"{self.path}: {holder} is writing it; wait for it, end it, or give another output")

    @contextmanager
    def _errors_with_advice(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "the rows in it are complete; make room or give another output, and run the same command again"
            raise OSError(f"{self.path}: {error.strerror or error}; {remedy}") from None

    @property
    def size(self) -> int:
        return next(reversed(self.rows.values()), 0)

    def _load(self) -> None:
        """Read the rows of earlier runs, and drop an unfinished last line."""
        with self._errors_with_advice(), self.path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE), b""), 1):
                row = _parse(line)
                # Only an unfinished row of this command is dropped.
                if not line.endswith(b"\n") and (row or (row is None and self._is_beginning(line))):
                    break
                if not row:
                    raise ValueError(f"{self.path}:{number}: not a row that this command wrote; {INSTEAD}")
                self._check(f"{self.path}:{number}", row["id"], row["generation"])
                self.rows[row["id"]] = self.size + len(line)
        self.cut(len(self.rows))

    def _is_beginning(self, line: bytes) -> bool:
        """Whether a row of this command that was cut off reads so."""
        beginnings = ((BEGINNING % json.dumps(name, ensure_ascii=False)).encode("utf-8", "backslashreplace") for name in self.ids)
        return any(line.startswith(beginning) or beginning.startswith(line) for beginning in beginnings)

    def _check(self, where: str, name: str, theirs: dict[str, Any]) -> None:
        if name not in self.ids or name in self.rows:
            raise ValueError(f"{where}: id {short(name)} is {'there twice' if name in self.rows else 'not in the input'}; {INSTEAD}")
        given = self.ids.get(name) if isinstance(self.ids, Mapping) else None
        if given is not None and theirs.get(GIVEN) != given:
            raise ValueError(f"{where}: id {short(name)} was another conversation when this row was made; {INSTEAD}")
        for fact in self.facts | theirs:
            then, now = theirs.get(fact), self.facts.get(fact)
            moved = fact == "by" and OURS not in (then, now)  # a server may have another address by now
            if then != now and fact not in OWN and not moved:
                raise ValueError(f"{where}: made with {fact} {short(then)}, now it is {short(now)}; {INSTEAD}")

    def cut(self, rows: int) -> None:
        """Truncate the file to its first `rows` rows."""
        self.rows = dict(list(self.rows.items())[:rows])
        with self._errors_with_advice():
            if os.fstat(self.file).st_size != self.size:
                os.ftruncate(self.file, self.size)
                os.fsync(self.file)

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Append all rows. They are on the disk when this returns; on an OSError (a full disk) none of them is."""
        ends, data = dict[str, int](), b""
        for row in rows:
            # UTF-8 cannot encode a lone surrogate; JSON has an escape for it.
            data += json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            ends[row["id"]] = self.size + len(data)
        if data:
            with self._errors_with_advice():
                self._write(data)
        self.rows |= ends

    def _write(self, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self.file, left) :]
            os.fsync(self.file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.file, self.size)
            raise


def _parse(line: bytes) -> dict[str, Any] | None:
    """The row of a line; {} for JSON that is not a row, None for text that is not JSON."""
    try:
        row = json.loads(line)
    except RecursionError:
        return {}
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("id"), str) and isinstance(row.get("generation"), dict) else {}


def begun_dtype(path: Path) -> str | None:
    """The target's dtype in the rows of an output, such as "bfloat16"; None without rows of our own decoder."""
    if not path.is_file():
        return None
    with path.open("rb") as lines:
        row = _parse(lines.readline(LINE))
    dtype = row["generation"].get("dtype") if row else None
    return dtype if isinstance(dtype, str) else None


def _holder(inode: int) -> str:
    """The process that has locked a file, where the system says which."""
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            if match := re.search(rf"FLOCK +ADVISORY +WRITE +(\d+) \w+:\w+:{inode} ", line):
                words = Path(f"/proc/{match[1]}/cmdline").read_text().split("\0")
                return f"process {match[1]} ({' '.join(Path(word).name for word in words[:2] if word)})"
    return "another run"
