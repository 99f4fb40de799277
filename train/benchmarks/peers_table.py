"""What train/benchmarks/peers.py measures of its drafters, and the table that it makes of it.

Letters: P is the number of prompts, M that of seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval import intervals
from draftsmith.inference.packed_linear import pack
from draftsmith.models.drafter import load_drafter
from draftsmith.models.formats.eagle import read_eagle
from draftsmith.train.benchmarks import paired
from draftsmith.train.benchmarks.paired import MEASURES


@dataclass(frozen=True, slots=True)
class Measured:
    """A drafter with what was measured of it.

    Attributes:
        method, setting: of its training, for the table.
        seed: of its training.
        seconds: CPU seconds of a training step; None where none was timed.
        counts: what `measure` returned.
    """

    method: str
    setting: str
    seed: int
    seconds: float | None
    counts: dict[str, Any]


def measure(name: str, folder: Path, foreign: bool, path: str, limit: int | None) -> dict[str, Any]:
    """Decode all prompts with a drafter, in each of MEASURES, as `paired.decode` says.

    Args:
        name: for the progress bar.
        folder: of the drafter.
        foreign: in the layout of engines, not in ours.
        path, limit: as in `paired.open_target`.
    """
    target, encoded = paired.open_target(path, limit)
    drafter: Any = read_eagle(folder, target) if foreign else load_drafter(folder, target)
    torch.nn.Module.to(drafter, target.dtype)
    pack(drafter)
    return paired.decode(name, target, drafter, encoded)


def table(measured: Sequence[Measured], features: dict[str, float], tokens: int) -> str:
    """The results as Markdown.

    Args:
        measured: of all drafters, those of our method first. All methods have the same seeds.
        features: by method, CPU seconds a step of making its features.
        tokens: of a training.
    """
    groups: dict[tuple[str, str], list[Measured]] = {}
    for each in measured:
        groups.setdefault((each.method, each.setting), []).append(each)
    counts = {name: {group: _counts(name, runs) for group, runs in groups.items()} for name in MEASURES}
    ours, *others = groups
    header = ("method", "setting", *(f"τ, {name}" for name in MEASURES), "CPU s a step", "tokens")
    lines = [_line(header), "|---" * len(header) + "|"]
    for group, runs in groups.items():
        cells = [f"{paired.mean_tau(counts[name][group]):.3f}" for name in MEASURES]
        if group != ours:
            deltas = (paired.difference(counts[name][ours], counts[name][group]) for name in MEASURES)
            cells = [
                f"{cell}; {delta:+.3f} ({intervals.shown(low, high, '+.3f')})"
                for cell, (delta, low, high) in zip(cells, deltas, strict=True)
            ]
        seconds = [run.seconds for run in runs if run.seconds]
        step = f"{sum(seconds) / len(seconds):.3g}" if seconds else "?"
        lines.append(_line((*group, *cells, f"{step} + {features[group[0]]:.3g}", f"{tokens:,}")))
    answers = [run.counts["answers"] for run in measured]
    same = [len(set(column)) == 1 for name in MEASURES for column in zip(*(by_name[name] for by_name in answers), strict=True)]
    notes = [
        f"τ is the mean over {len(groups[ours])} seeds of {len(same) // len(MEASURES)} prompts. Differences to the first row, with 95 % intervals, are"
    ]
    notes += ["paired by prompt and seed. CPU seconds: of a training step, and of making the features that it reads."]
    for method in dict.fromkeys(method for method, _ in others):
        best = {name: max(paired.mean_tau(counts[name][group]) for group in others if group[0] == method) for name in MEASURES}
        ratios = (f"{paired.mean_tau(counts[name][ours]) / best[name]:.3f} ({name})" for name in MEASURES)
        notes.append(f"{ours[0]} over the best of {method} in each measure: {', '.join(ratios)}.")
    notes.append(f"{sum(same)} of {len(same)} answers are the same with every drafter.")
    return "\n".join((*lines, "", *notes, ""))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _counts(measure: str, runs: Sequence[Measured]) -> Tensor:
    """Tokens and rounds [M,2,P] of the runs of a method."""
    return paired.counts(measure, [run.counts for run in sorted(runs, key=lambda run: run.seed)])
