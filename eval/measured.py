"""Compare drafters by the rounds that `draftsmith eval` wrote, paired by prompt. Nothing is decoded, and no model is loaded."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.text_files import lines, parse
from draftsmith.eval.comparison import by_domain, summarise
from draftsmith.eval.measurements import REPORT, ROUNDS
from draftsmith.inference.expand import parse_tree_spec
from draftsmith.inference.reading import field as entry
from draftsmith.inference.reading import read_json
from draftsmith.models.identity import TargetIdentity, check_same

SETTINGS = ("max_new_tokens", "dtype", "rule")  # must be equal for a comparison


@dataclass(slots=True)
class Measured:
    """What an evaluation wrote.

    Attributes:
        folder: where.
        target: of the drafter.
        settings: those of SETTINGS.
        tree: the draft tree, as a config has it.
        nodes: most nodes of a round.
        domains: of each prompt.
        totals: [tokens, rounds] of each prompt, by temperature.
    """

    folder: Path
    target: TargetIdentity
    settings: dict[str, Any]
    tree: Any
    nodes: int
    domains: dict[str, str] = field(default_factory=dict)
    totals: dict[float, dict[str, list[int]]] = field(default_factory=dict)


def read(folder: Path) -> Measured:
    """Read the measurements in a folder.

    Raises:
        ValueError: no measurements there, or damaged ones.
    """
    report_file, rounds_file = folder / REPORT, folder / ROUNDS
    for file in (report_file, rounds_file):
        if not file.is_file():
            raise ValueError(f"--measured: no {file.name} in {str(folder)!r}; give a folder that draftsmith eval wrote into, or eval --out")
    report = read_json(report_file)
    settings = entry(report, "settings", dict, report_file)
    kinds = {"max_new_tokens": int, "dtype": str, "rule": str}
    measured = Measured(
        folder,
        TargetIdentity.from_dict(entry(report, "target", dict, report_file)),
        {key: entry(settings, key, kinds[key], f"{report_file}: `settings`") for key in SETTINGS},
        entry(report, "tree", (list, dict), report_file),
        entry(report, "nodes", int, report_file),
    )
    for number, line in lines(rounds_file):
        source = f"{rounds_file}:{number}"
        row = parse(line, source)
        if type(row) is not dict:
            raise ValueError(f"{source}: expected a round as an object; run draftsmith eval again")
        prompt, committed = entry(row, "prompt", str, source), entry(row, "committed", int, source)
        measured.domains[prompt] = entry(row, "domain", str, source)
        totals = measured.totals.setdefault(float(entry(row, "temperature", float, source)), {}).setdefault(prompt, [0, 0])
        totals[0] += committed
        totals[1] += 1
    if not measured.totals:
        raise ValueError(f"{rounds_file}: no rounds in it; run draftsmith eval again")
    return measured


def compare(folders: Sequence[str]) -> dict[str, Any]:
    """The report of `draftsmith compare` on the prompts and at the temperatures that all folders have.

    Raises:
        ValueError: folders that cannot be read, or whose target, settings or prompts differ.
    """
    if len(set(folders)) < len(folders):
        raise ValueError(f"--measured: got a folder twice in {', '.join(folders)}; expected distinct ones; leave one out")
    paths = [Path(folder) for folder in folders]
    short = [(path.parent if path.name == "artifact" else path).name for path in paths]
    names = short if len(set(short)) == len(short) else folders
    measured = [read(Path(os.path.expanduser(folder))) for folder in folders]
    first = measured[0]
    for each in measured[1:]:
        check_same(first.target, each.target, weights=True)
        for key in SETTINGS:
            if first.settings[key] != each.settings[key]:
                raise ValueError(
                    f"--measured: {key} is {first.settings[key]} in {str(first.folder)!r} and {each.settings[key]} in "
                    f"{str(each.folder)!r}; expected the same; run draftsmith eval again with one of them"
                )
    rows: list[dict[str, Any]] = []
    domain_rows: list[dict[str, Any]] = []
    prompts = set[str]()
    for temperature in first.totals:
        totals = [each.totals.get(temperature, {}) for each in measured]
        common = [prompt for prompt in totals[0] if all(prompt in by_prompt for by_prompt in totals)]
        if not common:
            continue
        sums = torch.tensor([[by_prompt[prompt] for prompt in common] for by_prompt in totals], dtype=torch.float64)
        domains = [first.domains[prompt] for prompt in common]
        rows += summarise(names, temperature, sums[..., 0], sums[..., 1])
        domain_rows += by_domain(names, temperature, domains, sums[..., 0], sums[..., 1])
        prompts |= set(common)
    if not rows:
        raise ValueError(
            "--measured: no prompt and temperature is in all folders; expected the same prompts; run draftsmith eval on one file"
        )
    return {
        "target": first.target.to_dict(),
        "settings": {"prompts": len(prompts), **first.settings},
        "trees": {
            name: {"tree": each.tree, "nodes": each.nodes, "depth": parse_tree_spec(each.tree).max_depth}
            for name, each in zip(names, measured, strict=True)
        },
        "rows": rows,
        "domains": domain_rows,
        "same": {},
    }
