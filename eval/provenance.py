"""What drafters cost to make, and how their measurements differ: what a comparison must say beside τ."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.data.text_files import lines, parse
from draftsmith.inference.reading import read_json

SECTIONS = ("target", "settings", "machine", "versions", "prompts")  # of a header; `prompts` has the hash of the chat template
OF_THE_DRAFTER = ("tree", "max_nodes", "confidence", "stop")  # settings that say nothing of how it was measured
WEIGHTLESS = ("ngram", "suffix", "recycling", "lookahead")


def budget(artifact: Path | str | None) -> dict[str, Any]:
    """Training tokens, hours of training and bytes of weights, each None where it is not known.

    Args:
        artifact: the folder of an artifact, in the folder of its run; a drafter without weights by name; None where there is no folder.

    The hours are those of the steps in the run's metrics.jsonl: wall time without evaluating and saving.
    """
    if artifact in WEIGHTLESS:
        return {"training_tokens": 0, "hours": 0.0, "bytes": 0}
    folder = Path(artifact) if artifact is not None else None
    known: dict[str, Any] = {"training_tokens": None, "hours": None, "bytes": None}
    if folder is None:
        return known
    with suppress(OSError, ValueError):
        config = read_json(folder / "config.json")
        training = (config.get("draftsmith") or config).get("training") or {}
        tokens = training.get("tokens")
        known["training_tokens"] = tokens if type(tokens) is int else None
    known["bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
    with suppress(OSError, ValueError):
        known["hours"] = _hours(folder.parent / "metrics.jsonl")
    return known


def _hours(file: Path) -> float | None:
    if not file.is_file():
        return None
    seconds, before = 0.0, 0
    for number, line in lines(file):
        row = parse(line, f"{file}:{number}")
        if type(row) is dict and type(row.get("step")) is int and type(row.get("seconds")) in (int, float):
            seconds += (row["step"] - before) * row["seconds"]
            before = row["step"]
    return seconds / 3600 or None


def differences(headers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What differs between the headers of records, by name: entries `what`, as in settings.slots, and `values` by name."""
    rows = []
    for section in SECTIONS:
        parts = {name: header.get(section) or {} for name, header in headers.items()}
        for key in dict.fromkeys(key for part in parts.values() for key in part):
            values = {name: part.get(key) for name, part in parts.items()}
            distinct = {json.dumps(value, sort_keys=True) for value in values.values()}
            if len(distinct) > 1 and not (section == "settings" and key in OF_THE_DRAFTER):
                rows.append({"what": f"{section}.{key}", "values": values})
    return rows
