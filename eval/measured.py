"""Compare drafters by the records that `draftsmith eval` wrote, paired by prompt. Nothing is decoded, and no model is loaded."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.eval import record_store
from draftsmith.eval.comparison import by_domain, summarise
from draftsmith.eval.records import Records
from draftsmith.inference.expand import parse_tree_spec
from draftsmith.models.identity import TargetIdentity, check_same

SETTINGS = ("max_new_tokens", "dtype", "rule")  # must be equal for a comparison


def read(folder: str) -> Records:
    """The records in a folder.

    Raises:
        ValueError: none there, or damaged ones.
    """
    try:
        records = record_store.read(Path(os.path.expanduser(folder)))
    except ValueError as error:
        raise ValueError(f"--measured: {error}") from None
    if not records.requests:
        raise ValueError(f"--measured: no requests in {folder!r}; run draftsmith eval again")
    return records


def compare(folders: Sequence[str]) -> dict[str, Any]:
    """The report of `draftsmith compare` on the prompts and at the settings that all folders have.

    Raises:
        ValueError: folders that cannot be read, or whose target, settings or prompts differ.
    """
    if len(set(folders)) < len(folders):
        raise ValueError(f"--measured: got a folder twice in {', '.join(folders)}; expected distinct ones; leave one out")
    paths = [Path(folder) for folder in folders]
    short = [(path.parent if path.name == "artifact" else path).name for path in paths]
    names = short if len(set(short)) == len(short) else folders
    measured = [read(folder) for folder in folders]
    first = measured[0]
    target = TargetIdentity.from_dict(first.header["target"])
    for folder, each in zip(folders, measured, strict=True):
        check_same(target, TargetIdentity.from_dict(each.header["target"]), weights=True)
        for key in SETTINGS:
            ours, theirs = first.header["settings"].get(key), each.header["settings"].get(key)
            if ours != theirs:
                raise ValueError(
                    f"--measured: {key} is {ours} in {folders[0]!r} and {theirs} in {folder!r}; expected the same; run draftsmith eval "
                    "again with one of them"
                )
    rows: list[dict[str, Any]] = []
    domain_rows: list[dict[str, Any]] = []
    prompts = set[str]()
    for setting in dict.fromkeys(request.setting for request in first.requests):
        requests = [{each.prompt: each for each in records.requests if each.setting == setting} for records in measured]
        common = [prompt for prompt in requests[0] if all(prompt in by_prompt for by_prompt in requests)]
        if not common:
            continue
        tokens, rounds = (
            torch.tensor([[count(by_prompt[prompt]) for prompt in common] for by_prompt in requests], dtype=torch.float64)
            for count in (lambda each: sum(round.committed for round in each.rounds), lambda each: len(each.rounds))
        )
        rows += summarise(names, setting, tokens, rounds)
        domain_rows += by_domain(names, setting, [requests[0][prompt].domain for prompt in common], tokens, rounds)
        prompts |= set(common)
    if not rows:
        raise ValueError("--measured: no prompt and setting is in all folders; expected the same prompts; run draftsmith eval on one file")
    return {
        "target": target.to_dict(),
        "settings": {"prompts": len(prompts), **{key: first.header["settings"].get(key) for key in SETTINGS}},
        "trees": {
            name: {"tree": each.tree["tree"], "nodes": each.tree["nodes"], "depth": parse_tree_spec(each.tree["tree"]).max_depth}
            for name, each in zip(names, measured, strict=True)
        },
        "rows": rows,
        "domains": domain_rows,
        "same": {},
    }
