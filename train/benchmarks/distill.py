"""Which divergence, on which text, makes the better drafter? Students of `tiny` see equally many tokens; differences are paired by prompt.

python -m draftsmith.train.benchmarks.distill train     # about an hour on one core; may run in two processes at once
python -m draftsmith.train.benchmarks.distill table
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from draftsmith.data import prompts, regenerate, stdlib
from draftsmith.data.conversations import Conversation
from draftsmith.eval.answers import target_texts
from draftsmith.eval.comparison import rounds_along_texts
from draftsmith.eval.intervals import of_difference, shown
from draftsmith.eval.loading import encode
from draftsmith.inference import machine
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target
from draftsmith.train import distill

LOSSES = ("nll", "kl", "reverse_kl", "jsd(0.5)", "tv")
SEEDS = (0, 1, 2)
DEPTH, NEW_TOKENS, TEXTS = 4, 64, 1300
FOLDER = Path("runs/bench-distill")
STUDENT = {"pruned": ("student.start=pruned", "student.layers=[0]"), "random": ("student.start=random", "student.layers=1")}


class Cell(NamedTuple):
    """A student of the comparison.

    Attributes:
        loss: the loss.
        data: what it is trained on: `text`, the corpus; `own`, the target's samples; `policy`, the corpus and the student's samples, half and half.
        start: `pruned` or `random`.
    """

    loss: str
    data: str
    start: str


def cells() -> list[Cell]:
    """All losses on all data, and two losses from a random start."""
    grid = [Cell(loss, data, "pruned") for loss in LOSSES for data in ("text", "own", "policy")]
    return grid + [Cell(loss, "text", "random") for loss in ("kl", "tv")]


def name_of(cell: Cell, seed: int) -> str:
    """The name of the folder in which a cell is trained."""
    loss = "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in cell.loss)
    return f"{loss}.{cell.data}.{cell.start}.{seed}"


def write_target_samples(target: Target) -> Path:
    """A file with at most TEXTS excerpts of training modules, each of more than 200 characters and continued by the target at T = 1. It has its name
    when it is complete."""
    part = FOLDER / "own.part.jsonl"
    modules = list(stdlib.modules("train"))
    generator = torch.Generator().manual_seed(0)

    def excerpts() -> Iterator[Conversation]:
        for number in range(TEXTS):
            module, source = modules[int(torch.randint(len(modules), (), generator=generator))]
            lines = source.splitlines(keepends=True)
            start = int(torch.randint(len(lines), (), generator=generator))
            text = "".join(lines[start : start + 40])
            if len(text) > 200:
                yield Conversation(f"{number:05d}:{module}:{start}", "code", text=text)

    settings = regenerate.Settings(temperature=1.0, max_new_tokens=190, prompt_tokens=64)
    print(regenerate.with_decoder(excerpts(), part, target, settings, slots=32).report())
    return part.rename(FOLDER / "own.jsonl")


def train(steps: int) -> None:
    """Train every cell and seed that no process has begun. To begin one again that was stopped, delete `begun` in its folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    own = FOLDER / "own.jsonl"
    if not own.is_file():
        write_target_samples(Target.load("tiny", dtype=torch.float32))
    for seed in SEEDS:
        for cell in cells():
            folder = FOLDER / name_of(cell, seed)
            folder.mkdir(exist_ok=True)
            try:
                (folder / "begun").touch(exist_ok=False)
            except FileExistsError:
                continue
            data = [f"data.train={own}"] if cell.data == "own" else []
            policy = ["distill.on_policy=0.5", "distill.new_tokens=96", "distill.refresh_every=25"] if cell.data == "policy" else []
            words = [f"train.output={folder}", f"train.seed={seed}", f"distill.loss={cell.loss}", *STUDENT[cell.start], *data, *policy]
            words += [f"train.steps={steps}", "train.save_every=0", "train.eval_every=0", "train.tau_prompts=0", "train.eval_batches=1"]
            distill.main(["recipes/distill-tiny.yaml", *words])


def table() -> None:
    """Print τ of each cell, seeds pooled, and its difference to `nll` on the corpus, greedy and at T = 1. Both are exact (`eval/expected.py`)."""
    machine.threads()
    target = Target.load("tiny", dtype=torch.float32)
    encoded = [encode(target, prompt) for prompt in prompts.load(prompts.TINY)]
    results: dict[Cell, list[tuple[float | None, ...]]] = {cell: [] for cell in cells()}
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, rule="rejection")
        own = target_texts(target, encoded, sampling, NEW_TOKENS)
        tokens = torch.tensor([float(len(text.tokens)) for text in own]) * len(SEEDS)  # [P]
        rounds: dict[Cell, torch.Tensor] = {}
        for cell in results:
            students = [Target.load(str(FOLDER / name_of(cell, seed) / "artifact"), dtype=torch.float32) for seed in SEEDS]
            drafters = [DraftModel(student, StaticTree.chain(DEPTH)) for student in students]
            rounds[cell] = rounds_along_texts(target, drafters, own, DEPTH, sampling)[1]  # [seeds,P]
        first = rounds[next(iter(results))].sum(0)
        for cell, taken in rounds.items():
            taus = tokens.sum() / len(SEEDS) / taken.sum(1)
            difference = of_difference(tokens.expand(2, -1), torch.stack((first, taken.sum(0))))
            results[cell].append((float(tokens.sum() / taken.sum()), float(taus.min()), float(taus.max()), *difference))
    (FOLDER / "table.json").write_text(json.dumps([[*cell, *values] for cell, values in results.items()]))
    print("| loss | rows | start | τ greedy (seeds) | Δτ, 95 % | τ at T = 1 (seeds) | Δτ, 95 % |\n|---|---|---|---|---|---|---|")
    for cell, both in results.items():
        columns = (
            f"{tau:.3f} ({least:.3f} to {most:.3f}) | {delta:+.3f} ({shown(low, high, '+.3f')})"
            for tau, least, most, delta, low, high in both
        )
        print(f"| {cell.loss} | {cell.data} | {cell.start} | {' | '.join(columns)} |")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "table"], help="train the students, or compare those that are trained")
    parser.add_argument("--steps", type=int, default=250, help="steps of 1,024 tokens for each student (default 250)")
    options = parser.parse_args(arguments)
    if options.action == "train":
        train(options.steps)
    else:
        table()


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
