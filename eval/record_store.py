"""Where records are kept while an evaluation runs: in memory, and in a file that outlives a kill.

The file is records.part.jsonl in the folder of the evaluation (records.part.1.jsonl of rank 1, and so on). Lines that belong together are
written at once and end with a line {"kind": "commit"}; what comes after the last such line was cut off and is dropped. The same evaluation
continues after them. In the end records.jsonl replaces them, in an order that no interruption changes.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.data.text_files import lines, parse
from draftsmith.eval.load import CostModel
from draftsmith.eval.records import (
    DRIFT,
    PositionRecord,
    PromptRecord,
    QualityRecord,
    Records,
    RequestRecord,
    position_line,
    position_of,
    prompt_line,
    prompt_of,
    quality_line,
    quality_of,
    request_line,
    request_of,
    superset_of,
)
from draftsmith.inference import durable
from draftsmith.inference.claim import lock
from draftsmith.inference.reading import field
from draftsmith.models import ranks

RECORDS, UNFINISHED = "records.jsonl", "records.part.jsonl"
FORMAT = 1
BEGINNING = b'{"kind": "header", "format": '  # of both files
COMMIT = {"kind": "commit"}
ORDER = ("header", "cost", "load", "drift", "pieces", "prompt", "positions", "tree", "superset", "request", "quality")
HEADER: dict[str, dict[str, Any]] = {  # keys that every report reads
    "target": {"name": str},
    "drafter": {"method": str},
    "settings": {"max_new_tokens": int, "dtype": str, "slots": int, "timed": (int, type(None))},
}
VOLATILE = ("machine", "versions")  # of a header: shown, and not compared where an evaluation continues


class RecordStore:
    """The lines of one evaluation.

    Attributes:
        folder: where they are kept; None keeps them in memory. It has been checked (eval/measurements.py).
        stem: of the files' names.
        lines: all so far, of this rank and of earlier runs.
    """

    def __init__(self, folder: Path | None = None, stem: str = "records.part") -> None:
        self.folder, self.stem = folder, stem
        self.lines: list[dict[str, Any]] = []
        self._pieces: dict[int, str] = {}
        self._file: int | None = None

    @contextmanager
    def opened(self, header: dict[str, Any]) -> Iterator["RecordStore"]:
        """Read what an earlier run of this evaluation left, and append to it from now on.

        Args:
            header: of `Records`.

        Raises:
            ValueError: the folder has unfinished records of another evaluation, or damaged ones.
            OSError: the file cannot be written, or another process writes it.
        """
        header = json.loads(json.dumps({"kind": "header", "format": FORMAT} | header))
        if self.folder is None:
            self.lines = [header]
            yield self
            return
        earlier = self._earlier(header)
        ranks.state().wait_for_everyone()  # nobody writes before all have read
        self._file = os.open(self._part(ranks.state().process_index), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            self._lock_and_cut()
            self.lines = [header, *earlier]
            for line in earlier:
                if line["kind"] == "pieces":
                    self._pieces |= {int(token): text for token, text in line["pieces"].items()}
            if not os.fstat(self._file).st_size:
                self._write([header])
            yield self
        finally:
            os.close(self._file)
            self._file = None

    def append(self, new: Iterable[dict[str, Any]], tokens: Iterable[int] = (), tokenizer: Any = None) -> None:
        """Keep lines that belong together; after a kill all of them are there, or none.

        Args:
            new: `request_line`, `position_line`, or lines of the kinds cost, load, drift, tree and superset.
            tokens: token ids in them, whose texts are kept too.
            tokenizer: decodes them.
        """
        unknown = sorted(set(tokens) - self._pieces.keys())
        pieces = {token: str(tokenizer.decode([token])) for token in unknown if token >= 0}
        self._pieces |= pieces
        batch = [{"kind": "pieces", "pieces": {str(token): text for token, text in pieces.items()}}] if pieces else []
        batch = json.loads(json.dumps([*batch, *new]))
        self.lines += batch
        if self._file is not None:
            self._write(batch)

    def append_prompts(self, prompts: list[PromptRecord]) -> None:
        """Keep the prompts, unless an earlier run kept them."""
        if not any(line["kind"] == "prompt" for line in self.lines):
            self.append(map(prompt_line, prompts))

    def append_requests(self, requests: list[RequestRecord], tokenizer: Any, qualities: Iterable[QualityRecord] = ()) -> None:
        """Keep the requests of a batch, and of a lossy rule what it costs them."""
        new = [*map(request_line, requests), *map(quality_line, qualities)]
        self.append(new, (token for each in requests for token in each.tokens), tokenizer)

    def append_positions(self, records: list[PositionRecord], tokenizer: Any) -> None:
        """Keep position records that were computed together."""
        tokens = (token for each in records for ids in (each.tokens, each.drafted) for token in ids.flatten().tolist())
        self.append(map(position_line, records), tokens, tokenizer)

    def recorded(self, kind: str) -> set[tuple[str, str]]:
        """(setting, prompt) of the lines of this kind, "positions", "superset" or "request"."""
        return {(line["setting"], line["prompt"]) for line in self.lines if line["kind"] == kind}

    def records(self) -> Records:
        """All records of this rank."""
        return _records(self.lines, str(self.folder or "records"))

    def gather(self) -> None:
        """Give every rank the lines of all ranks."""
        if ranks.count() > 1:
            merged = ranks.gather({ranks.state().process_index: self.lines})
            self.lines = list({json.dumps(line, sort_keys=True): line for part in merged.values() for line in part}.values())

    def finish(self, prompts: list[str], settings: list[str]) -> None:
        """Replace the unfinished files by records.jsonl. Only one rank calls it, when all have appended their last.

        Args:
            prompts: the order of the prompts' ids.
            settings: the order of the settings' labels.
        """
        if self.folder is None:
            return
        pieces = {"kind": "pieces", "pieces": {}}
        for line in self.lines:
            pieces["pieces"] |= line["pieces"] if line["kind"] == "pieces" else {}
        pieces["pieces"] = dict(sorted(pieces["pieces"].items(), key=lambda item: int(item[0])))
        rank = {prompt: number for number, prompt in enumerate(prompts)}

        def key(line: dict[str, Any]) -> tuple[int, int, int]:
            setting = settings.index(line["setting"]) if "setting" in line else 0
            # Requests stay as they were recorded: those that were timed together follow each other.
            number = rank[line["prompt"]] if "prompt" in line and line["kind"] != "request" else 0
            return ORDER.index(line["kind"]), setting, number

        ordered = sorted([pieces, *(line for line in self.lines if line["kind"] != "pieces")], key=key)
        ordered[0] = ordered[0] | {"lines": len(ordered)}
        durable.write_text(self.folder / RECORDS, "".join(_text(line) for line in ordered))
        for part in self._parts():
            part.unlink()

    def _earlier(self, header: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines that an earlier run of the same evaluation left, without its header."""
        assert self.folder is not None
        earlier = []
        for part in self._parts():
            committed = _committed(part)
            if not committed:
                continue
            first = committed[0]
            for key in header | first:  # in the header's order: what is said of a difference does not vary
                if key not in VOLATILE and first.get(key) != header.get(key):
                    raise ValueError(
                        f"{part}: an evaluation stopped there with another {_difference(key, first, header)}; give its options again to "
                        "finish it, delete the file, or give another --out"
                    )
            earlier += committed[1:]
        return earlier

    def _lock_and_cut(self) -> None:
        """Lock the file of this rank against other processes, and cut it after its last commit."""
        assert self._file is not None and self.folder is not None
        part = self._part(ranks.state().process_index)
        if not lock(self._file):
            raise OSError(f"{part}: another evaluation is writing it; wait for it, end it, or give another --out")
        content, mark = part.read_bytes(), _text(COMMIT).encode()
        end = content.rfind(b"\n" + mark)
        os.ftruncate(self._file, end + 1 + len(mark) if end >= 0 else 0)
        durable.sync(self.folder)

    def _write(self, batch: list[dict[str, Any]]) -> None:
        assert self._file is not None
        content = "".join(_text(line) for line in [*batch, COMMIT]).encode()
        try:
            while content:
                content = content[os.write(self._file, content) :]
            os.fsync(self._file)
        except OSError as error:
            part = self._part(ranks.state().process_index)
            advice = "what was recorded before is complete; make room, and give the same command again"
            raise OSError(f"{part}: {error.strerror}; {advice}") from None

    def _part(self, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / (f"{self.stem}.{rank}.jsonl" if rank else f"{self.stem}.jsonl")

    def _parts(self) -> list[Path]:
        assert self.folder is not None
        own = re.compile(rf"{re.escape(self.stem)}(\.[0-9]+)?\.jsonl")  # no copies that a person has made
        return sorted(path for path in self.folder.iterdir() if own.fullmatch(path.name) and path.is_file() and not path.is_symlink())


def begun_dtype(folder: Path) -> str | None:
    """The target's dtype in the unfinished records of a folder, such as "bfloat16"; None where there are none."""
    for part in RecordStore(folder)._parts() if folder.is_dir() else ():
        header = next(iter(_committed(part)), None)
        if isinstance(header, dict) and isinstance(header.get("target"), dict):  # else a file of other origin, which is left alone
            return str(header["target"].get("dtype"))
    return None


def read(folder: Path) -> Records:
    """The records of a finished evaluation.

    Raises:
        ValueError: none there, unfinished or damaged ones.
    """
    file = folder / RECORDS
    if not file.is_file():
        unfinished = (folder / UNFINISHED).is_file()
        advice = "its evaluation is unfinished: give its command again" if unfinished else "give a folder that draftsmith eval wrote into"
        raise ValueError(f"no {RECORDS} in {str(folder)!r}; {advice}")
    content = []
    for number, line in lines(file):
        row = parse(line, f"{file}:{number}")
        if type(row) is not dict or row.get("kind") not in ORDER or (number == 1) != (row["kind"] == "header"):
            raise ValueError(f"{file}:{number}: not a line that draftsmith eval wrote; run it again")
        content.append(row)
    if not content:
        raise ValueError(f"{file} is empty; run draftsmith eval again")
    if content[0].get("format") != FORMAT:
        raise ValueError(f"{file}: format {content[0].get('format')!r}, this Draftsmith reads {FORMAT}; run draftsmith eval again")
    # Earlier versions did not count them.
    if (count := field({"lines": len(content)} | content[0], "lines", int, f"{file}:1")) != len(content):
        raise ValueError(f"{file} has {len(content)} of {count} lines; it is cut off: restore it, or run draftsmith eval again")
    for part, kinds in HEADER.items():
        for name, kind in kinds.items():
            field(field(content[0], part, dict, f"{file}:1"), name, kind, f"{file}:1: `{part}`")
    for name in {"machine", "versions", "prompts"} & content[0].keys():
        field(content[0], name, dict, f"{file}:1")
    records = _records(content, str(file))
    if not records.tree:
        raise ValueError(f"{file} has no line of kind tree; restore the file, or run draftsmith eval again")
    return records


def _records(content: list[dict[str, Any]], source: str) -> Records:
    header = {key: value for key, value in content[0].items() if key not in ("kind", "format", "lines")}
    for name in ("target", "drafter", "settings", "skipped"):
        field(header, name, dict, source)
    records = Records(header)
    for number, line in enumerate(content[1:], 2):
        where = f"{source}:{number}"
        match line["kind"]:
            case "cost":
                for name in ("forward", "drafting"):
                    entries = field(line, name, dict, where)
                    setattr(records, name, {int(size): float(field(entries, size, float, f"{where}: `{name}`")) for size in entries})
            case "load":
                records.load = {name: value for name, value in line.items() if name != "kind"}
                try:
                    CostModel(records.load)
                except (TypeError, KeyError, AttributeError, ValueError) as error:
                    raise ValueError(f"{where}: no load that draftsmith eval measured ({error!r}); restore it, or run it again") from None
            case "drift":
                records.drift = {name: field(line, name, float, where) for name in DRIFT}
            case "tree":
                kinds = {"tree": (list, dict), "nodes": int, "depth": int}
                records.tree = {name: field(line, name, kind, where) for name, kind in kinds.items()}
            case "pieces":
                records.pieces |= {int(token): str(text) for token, text in field(line, "pieces", dict, where).items()}
            case "prompt":
                prompt = prompt_of(line, where)
                records.prompts[prompt.prompt] = prompt
            case "positions":
                records.positions.append(position_of(line, where))
            case "superset":
                records.supersets[field(line, "setting", str, where), field(line, "prompt", str, where)] = superset_of(line, where)
            case "request":
                records.requests.append(request_of(line, where))
            case "quality":
                records.qualities.append(quality_of(line, where))
    return records


def _committed(part: Path) -> list[dict[str, Any]]:
    """The lines before the last commit, without the commits."""
    committed: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []
    for line in part.read_bytes().split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row == COMMIT:
            committed, pending = committed + pending, []
        else:
            pending.append(row)
    return committed


def _difference(key: str, then: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs, for people: a key of a header, and inside an object the entry."""
    old, new = then.get(key), now.get(key)
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(name for name in old | new if old.get(name) != new.get(name))
        old, new = old.get(key), new.get(key)
    return f"{key} ({str(old)[:60]}, now {str(new)[:60]})"


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"
