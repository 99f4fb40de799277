"""What `draftsmith serve-bench` records, one JSON line each: a header, requests, and the servers' counters.

All tables are made from these lines alone (eval/servers/report.py). The file is requests.jsonl; `RecordStore` writes and continues it.

A *measurement* is all prompts asked of one server under one load, in one repeat. What a run measures of it without interruption is a
*segment*; times of requests count from its start.
"""

from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.data.text_files import lines, parse
from draftsmith.eval.record_store import COMMIT, FORMAT
from draftsmith.inference.reading import field as entry

STEM = "requests"
RECORDS = f"{STEM}.jsonl"
KIND = "serving benchmark"


class Load(NamedTuple):
    """A load: so many requests at a time, or requests a second that arrive by a Poisson process.

    kind is "concurrency" or "rate".
    """

    kind: str
    value: float

    @property
    def label(self) -> str:
        """For people, and in records."""
        return f"concurrency {self.value:g}" if self.kind == "concurrency" else f"{self.value:g} requests/s"


class Measurement(NamedTuple):
    """All prompts asked of one server under one load; `server` is its number, `load` a label."""

    load: str
    repeat: int
    server: int


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request. All times are seconds from the start of the segment.

    Attributes:
        load: label of the load.
        repeat: of the prompts, from 0.
        server: its number, from 0.
        segment: of the measurement, from 0.
        prompt: id.
        due_s: when it was to be sent; with closed loops, when its slot became free.
        sent_s: when it was sent.
        end_s: the end of the answer or the error.
        chunks_s: each chunk with text.
        text: the answer.
        reason: why it ended: "stop", "length" or as the server has it.
        prompt_tokens: by the server's usage; None where it sends none.
        tokens: of the answer, likewise.
        drafting: of llama.cpp: predicted_n, draft_n and draft_n_accepted; {} elsewhere.
        error: why there is no answer; "" where there is one.
    """

    load: str
    repeat: int
    server: int
    segment: int
    prompt: str
    due_s: float
    sent_s: float
    end_s: float
    chunks_s: list[float] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None
    drafting: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def measurement(self) -> Measurement:
        return Measurement(self.load, self.repeat, self.server)

    @property
    def count(self) -> int:
        """Tokens of the answer; without usage its chunks, of which each has one token at least."""
        return len(self.chunks_s) if self.tokens is None else self.tokens

    @property
    def latency_s(self) -> float:
        """Seconds from when it was to be sent to the end of the answer."""
        return self.end_s - self.due_s

    @property
    def decoding_s(self) -> float:
        """Seconds from the first chunk to the last; 0 without two of them."""
        return self.chunks_s[-1] - self.chunks_s[0] if self.chunks_s else 0.0


@dataclass(frozen=True, slots=True)
class CountersRecord:
    """A server's counters before and after a segment, see `counters.read_counters`."""

    load: str
    repeat: int
    server: int
    segment: int
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass(slots=True)
class ServeRecords:
    """All that a benchmark recorded.

    Attributes:
        header: servers (name, model, engine, root of each), settings, prompts (count, hash), versions.
        requests: in the order in which they ended.
        counters: of the segments that were not interrupted.
    """

    header: dict[str, Any]
    requests: list[ServedRequest] = field(default_factory=list)
    counters: list[CountersRecord] = field(default_factory=list)

    @property
    def loads(self) -> list[Load]:
        return [Load(kind, value) for kind, value in self.header["settings"]["loads"]]

    @property
    def planned(self) -> int:
        """Requests of the complete benchmark."""
        settings = self.header["settings"]
        return len(settings["loads"]) * settings["repeats"] * len(self.header["servers"]) * self.header["prompts"]["count"]


def request_line(record: ServedRequest) -> dict[str, Any]:
    """The request as JSON; times to microseconds."""
    times = {name: round(getattr(record, name), 6) for name in ("due_s", "sent_s", "end_s")}
    return {"kind": "request"} | asdict(record) | times | {"chunks_s": [round(each, 6) for each in record.chunks_s]}


def counters_line(record: CountersRecord) -> dict[str, Any]:
    """The counters as JSON."""
    return {"kind": "counters"} | asdict(record)


def read(folder: Path) -> ServeRecords:
    """The records in a folder, complete or not.

    Raises:
        ValueError: none there, or damaged ones.
    """
    file = folder / RECORDS
    if not file.is_file():
        raise ValueError(f"no {RECORDS} in {str(folder)!r}; give a folder that draftsmith serve-bench wrote into")
    rows, pending = [], []
    complete = file.read_bytes().count(b"\n")  # what follows the last end of a line was cut off by a kill
    for number, line in islice(lines(file), complete):
        row = parse(line, f"{file}:{number}", surrogates=True)
        pending.append((f"{file}:{number}", row))
        if row == COMMIT:
            rows, pending = rows + pending[:-1], []
    return records_of(rows, str(file))


def records_of(rows: list[tuple[str, Any]], source: str) -> ServeRecords:
    """The records of JSON lines, each with where it stands.

    Raises:
        ValueError: no header of this format first, or a line that serve-bench did not write.
    """
    header = rows[0][1] if rows else None
    if not isinstance(header, dict) or header.get("kind") != "header" or header.get("format") != FORMAT or "servers" not in header:
        raise ValueError(f"{source}: no header that this draftsmith serve-bench wrote; give another folder, or run it again")
    for name, kind in (("servers", list), ("settings", dict), ("prompts", dict)):
        entry(header, name, kind, source)
    records = ServeRecords({name: value for name, value in header.items() if name not in ("kind", "format")})
    for where, row in rows[1:]:
        kind = row.get("kind") if isinstance(row, dict) else None
        if kind == "request":
            records.requests.append(_request_of(row, where))
        elif kind == "counters":
            numbers = {name: entry(row, name, int, where) for name in ("repeat", "server", "segment")}
            readings = {name: entry(row, name, dict, where) for name in ("before", "after")}
            records.counters.append(CountersRecord(load=entry(row, "load", str, where), **numbers, **readings))
        else:
            raise ValueError(f"{where}: not a line that draftsmith serve-bench wrote; run it again")
    return records


def _request_of(row: dict[str, Any], where: str) -> ServedRequest:
    kinds: dict[str, Any] = dict.fromkeys(("load", "prompt", "text", "reason", "error"), str)
    kinds |= dict.fromkeys(("repeat", "server", "segment"), int) | dict.fromkeys(("due_s", "sent_s", "end_s"), float)
    kinds |= {"chunks_s": list, "drafting": dict} | dict.fromkeys(("prompt_tokens", "tokens"), (int, type(None)))
    return ServedRequest(**{name: entry(row, name, kind, where) for name, kind in kinds.items()})
