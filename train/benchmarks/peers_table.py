"""What train/benchmarks/peers.py measures of its drafters, and the table that it makes of it.

Letters: P is the number of prompts, M that of seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data import prompts
from draftsmith.eval import intervals, loading
from draftsmith.eval.answers import decode_all, encode_prompts
from draftsmith.eval.intervals import Interval
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.packed_linear import pack
from draftsmith.inference.sampler import Sampling
from draftsmith.models.drafter import load_drafter
from draftsmith.models.formats.eagle import read_eagle
from draftsmith.models.target import Target

CHAIN, TREE = ("chain", 4, None, None), ("dynamic", 4, 4, 16)  # kind, depth, width and nodes
MEASURES = {
    f"{name}, T = {temperature}": (tree, temperature)
    for name, tree in (("chain of 4", CHAIN), ("tree of 16", TREE))
    for temperature in (0, 1)
}
NEW_TOKENS = 64


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


@lru_cache(maxsize=1)
def open_target(path: str, limit: int | None) -> tuple[Target, list[list[int]]]:
    """The target, and token ids of the prompts that ship for it, at most `limit` of each domain."""
    target, _ = loading.open_models(path, [], "auto")
    encoded, _ = encode_prompts(target, prompts.load(None if path == "tiny" else "chat", limit), NEW_TOKENS)
    return target, [prompt.ids for prompt in encoded]


def measure(name: str, folder: Path, foreign: bool, path: str, limit: int | None) -> dict[str, Any]:
    """Decode all prompts with a drafter, in each of MEASURES.

    Args:
        name: for the progress bar.
        folder: of the drafter.
        foreign: in the layout of engines, not in ours.
        path, limit: as in `open_target`.

    Returns:
        By measure, the tokens [P] and the rounds [P] of each prompt; `answers`: by measure, a hash of each answer.
    """
    target, ids = open_target(path, limit)
    drafter: Any = read_eagle(folder, target) if foreign else load_drafter(folder, target)
    torch.nn.Module.to(drafter, target.dtype)
    pack(drafter)
    result: dict[str, Any] = {"answers": {}}
    for measure, ((kind, depth, width, nodes), temperature) in MEASURES.items():
        drafter.tree_spec = loading.tree_spec_from_options(kind, drafter, depth, width, nodes)
        decoder, sampling = Decoder(target, drafter, slots=8), Sampling(temperature=temperature)
        answers = decode_all(f"{name}: {measure}", decoder, ids, sampling, NEW_TOKENS)
        result[measure] = [[len(answer.tokens) for answer in answers], [len(answer.rounds) for answer in answers]]
        result["answers"][measure] = [hash(tuple(answer.tokens)) for answer in answers]
    return result


def taus(counts: Tensor) -> Tensor:
    """τ [...] of tokens and rounds, counts [...,2,P]."""
    return counts[..., 0, :].sum(-1) / counts[..., 1, :].sum(-1)


def difference(first: Tensor, second: Tensor) -> Interval:
    """Mean over seeds of second's τ less first's, with its 95 % interval: over prompts, and over seeds where there are several.

    Both parts are paired: the runs of a seed trained on the same samples, and all decoded the same prompts.

    Args:
        first, second: tokens and rounds [M,2,P] of two methods with the same seeds.
    """
    both = torch.stack((first, second)).double()
    deltas = taus(both[1]) - taus(both[0])  # [M]
    over_prompts, delta = intervals.of_difference(both.sum(1)[:, 0], both.sum(1)[:, 1]), float(deltas.mean())
    if over_prompts.low is None:
        return Interval(delta, None, None)
    half = over_prompts.estimate - over_prompts.low
    if len(deltas) > 1:
        half = math.hypot(half, intervals.t_quantile(len(deltas) - 1) * float(deltas.std()) / len(deltas) ** 0.5)
    return Interval(delta, delta - half, delta + half)


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
        cells = [f"{_mean(counts[name][group]):.3f}" for name in MEASURES]
        if group != ours:
            deltas = (difference(counts[name][ours], counts[name][group]) for name in MEASURES)
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
        best = {name: max(_mean(counts[name][group]) for group in others if group[0] == method) for name in MEASURES}
        ratios = (f"{_mean(counts[name][ours]) / best[name]:.3f} ({name})" for name in MEASURES)
        notes.append(f"{ours[0]} over the best of {method} in each measure: {', '.join(ratios)}.")
    notes.append(f"{sum(same)} of {len(same)} answers are the same with every drafter.")
    return "\n".join((*lines, "", *notes, ""))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _counts(measure: str, runs: Sequence[Measured]) -> Tensor:
    """Tokens and rounds [M,2,P] of the runs of a method."""
    return torch.tensor([run.counts[measure] for run in sorted(runs, key=lambda run: run.seed)], dtype=torch.float64)


def _mean(counts: Tensor) -> float:
    """Mean over seeds of τ, of counts [M,2,P]."""
    return float(taus(counts).mean())
