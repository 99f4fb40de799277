"""Compare drafters by the records that `draftsmith eval` wrote, paired by prompt. Nothing is decoded, and no model is loaded."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.eval import record_store
from draftsmith.eval.comparison import by_domain, summarise
from draftsmith.eval.provenance import WEIGHTLESS, budget, differences
from draftsmith.eval.records import Records
from draftsmith.eval.totals import by_setting, columns, first_turns, totals
from draftsmith.inference.expand import parse_tree_spec
from draftsmith.models.identity import TargetIdentity, check_same
from draftsmith.models.weights import weights_hash

SETTINGS = ("max_new_tokens", "dtype")  # must be equal for a comparison


def read(folder: str, option: str = "--measured") -> Records:
    """The records in a folder that an option names.

    Raises:
        ValueError: none there, or damaged ones.
    """
    try:
        records = record_store.read(Path(os.path.expanduser(folder)))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    if not records.requests:
        raise ValueError(f"{option}: no requests in {folder!r}; run draftsmith eval again")
    return records


def names_of(folders: Sequence[str]) -> list[str]:
    """A name for each of these distinct folders: its last part, that of the run for an artifact, where these differ."""
    paths = [Path(folder) for folder in folders]
    short = [(path.parent if path.name == "artifact" else path).name for path in paths]
    return short if len(set(short)) == len(short) else list(folders)


def compare(folders: Sequence[str]) -> dict[str, Any]:
    """The report of `draftsmith compare` on the prompts and at the settings that all folders have.

    Raises:
        ValueError: folders that cannot be read, or whose target, settings or prompts differ.
    """
    if len({os.path.realpath(os.path.expanduser(folder)) for folder in folders}) < len(folders):
        raise ValueError(f"--measured: got a folder twice in {', '.join(folders)}; expected distinct ones; leave one out")
    names = names_of(folders)
    measured = [read(folder) for folder in folders]
    first = measured[0]
    for folder, each in zip(folders[1:], measured[1:], strict=True):
        check_comparable("--measured", (folders[0], first), (folder, each))
    rows: list[dict[str, Any]] = []
    domain_rows: list[dict[str, Any]] = []
    prompts = set[str]()
    for setting in dict.fromkeys(request.setting for request in first.requests):
        requests = [by_setting(records.requests).get(setting, []) for records in measured]
        domains = {request.prompt: request.domain for request in requests[0]}
        counts = [totals(each) for each in requests]
        common = [prompt for prompt in domains if all(prompt in each for each in counts)]
        if not common:
            continue
        tokens, rounds = columns(counts, common)
        rows += summarise(names, setting, tokens, rounds)
        domain_rows += by_domain(names, setting, [domains[prompt] for prompt in first_turns(common)], tokens, rounds)
        prompts |= set(common)
    if not rows:
        raise ValueError("--measured: no prompt and setting is in all folders; expected the same prompts; run draftsmith eval on one file")
    return {
        "target": first.header["target"],
        "settings": {"prompts": len(prompts), **{key: first.header["settings"].get(key) for key in SETTINGS}},
        "trees": {
            name: {"tree": each.tree["tree"], "nodes": each.tree["nodes"], "depth": parse_tree_spec(each.tree["tree"]).max_depth}
            for name, each in zip(names, measured, strict=True)
        },
        "rows": rows,
        "domains": domain_rows,
        "same": {},
        "budgets": {name: _budget(folder, records) for name, folder, records in zip(names, folders, measured, strict=True)},
        "differences": differences({name: records.header for name, records in zip(names, measured, strict=True)}),
    }


def check_comparable(option: str, first: tuple[str, Records], second: tuple[str, Records]) -> None:
    """Check that τ of two folders may be compared.

    Args:
        option: that named the folders, for the error.
        first: a folder and its records.
        second: another one.

    Raises:
        ValueError: another target, another of SETTINGS, or other prompts of the same ids.
    """
    (folder, records), (other_folder, others) = first, second
    try:
        check_same(*(TargetIdentity.from_dict(each.header["target"]) for each in (records, others)), weights=True)
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise ValueError(
            f"{option}: {folder!r} and {other_folder!r}: {reason}; expected evaluations of one target; leave one out"
        ) from None
    for key in SETTINGS:
        ours, theirs = records.header["settings"].get(key), others.header["settings"].get(key)
        if ours != theirs:
            raise ValueError(
                f"{option}: {key} is {ours} in {folder!r} and {theirs} in {other_folder!r}; expected the same; run draftsmith eval again with "
                "one of them"
            )
    both = records.prompts.keys() & others.prompts.keys()
    # Later turns follow the target's own answer, which rounding may change between machines.
    for prompt in sorted(both.intersection(first_turns(records.prompts))):
        if records.prompts[prompt].ids != others.prompts[prompt].ids:
            raise ValueError(
                f"{option}: prompt {prompt!r} is another text in {folder!r} than in {other_folder!r}; expected the same prompts, or an `id` of "
                "its own for each; run draftsmith eval on one file"
            )


def _budget(folder: str, records: Records) -> dict[str, Any]:
    """Of the artifact that the folder is, or else of the one that its records name, if that still has the same weights."""
    drafter, path = records.header["drafter"], Path(os.path.expanduser(folder))
    name = str(drafter.get("name", ""))
    if not (path / "config.json").is_file():
        named = Path(os.path.expanduser(name))
        same = bool(drafter.get("hash")) and named.is_dir() and weights_hash(str(named)) == drafter["hash"]
        path = name if name in WEIGHTLESS else named if same else None
    known = budget(path)
    return known | {"bytes": known["bytes"] if known["bytes"] is not None else drafter.get("bytes")}
