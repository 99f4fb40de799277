"""How fast conversations become rows, and features are read: python -m draftsmith.train.benchmarks.data chats.jsonl.gz

1. Tokenising, masking and packing, with one and two processes in turn, start-up of the processes included and not.
2. Reading a feature store beside what a drafter's training step consumes (forward and backward of Medusa heads on features): reading must
   never be what is waited for.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.data import prepare
from draftsmith.data.capture import capture
from draftsmith.data.conversations import Source, read
from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.features import FeatureStore
from draftsmith.data.packing import PackedDataset, pack
from draftsmith.data.prepare import Encoder, Plan, encoded
from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train.medusa import MedusaSection, objective
from draftsmith.train.recipe import RECIPES

PROCESSES = (1, 2)
STORED = ("float32", "bfloat16", "fp8", "int8")


def tokenising(source: Source, target: Target, seq_len: int, copies: int) -> Table:
    """Conversations a second, by the number of processes; the file is read `copies` times over."""
    assert target.tokenizer is not None
    encoder = Encoder(target.tokenizer, seq_len, False, ())
    table = Table(title=f"tokenise + mask + pack, {source.path} x {copies}")
    for name in ("processes", "conversations/s", "of one process", "once running", "of one process"):
        table.add_column(name, justify="right")
    speeds: dict[int, tuple[float, float]] = {}
    for processes in PROCESSES:
        rows = list(chain.from_iterable(read(source) for _ in range(copies)))
        began = time.perf_counter()
        lengths, times = [], []
        for row in encoded(rows, encoder, processes):
            lengths += [len(ids) for ids, _ in row.pieces]
            times.append(time.perf_counter())
        pack(lengths, seq_len)
        total = time.perf_counter() - began
        half = len(times) // 2
        speeds[processes] = len(rows) / total, (len(times) - half) / (times[-1] - times[half])
    for processes, (whole, running) in speeds.items():
        one = speeds[PROCESSES[0]]
        table.add_row(str(processes), f"{whole:,.0f}", f"{whole / one[0]:.2f} x", f"{running:,.0f}", f"{running / one[1]:.2f} x")
    return table


def reading(target: Target, packed: PackedDataset, batch: int, repeats: int, folder: Path) -> Table:
    """Tokens a second that a store gives, and that a training step on them takes."""
    drafter: Any = new_drafter("medusa", target, num_heads=4, num_layers=1, share_head=False, training={})
    section = MedusaSection(distill=1.0)

    def step(rows: dict[str, torch.Tensor]) -> None:
        objective(drafter, rows, target=target, section=section).sum.backward()

    featured = {}
    for precision in STORED:
        capture(target, [packed.corpus], folder / precision, precision)
        featured[precision] = FeatureDataset(packed, FeatureStore(folder / precision, target))
    order = torch.randperm(len(packed), generator=torch.Generator().manual_seed(0))
    parts = [order[start : start + batch] for start in range(0, batch * repeats, batch)]
    times: dict[str, list[float]] = {name: [] for name in (*STORED, "step")}
    for part in parts:
        for name, rows in featured.items():
            times[name].append(_seconds(lambda rows=rows, part=part: rows.batch(part)))
        given = featured["float32"].batch(part)
        times["step"].append(_seconds(lambda given=given: step(given)))
    tokens = batch * packed.seq_len
    took = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    table = Table(
        title=f"features of {target.name}: read, and trained on ({torch.get_num_threads()} thread(s), batches of {tokens:,} tokens)"
    )
    for name in ("store", "bytes a token", "read, tokens/s", "trained, tokens/s", "read / trained"):
        table.add_column(name, justify="left" if name == "store" else "right")
    for name in STORED:
        size = featured[name].store.index.bytes_per_token
        table.add_row(name, f"{size:,}", f"{tokens / took[name]:,.0f}", f"{tokens / took['step']:,.0f}", f"{took['step'] / took[name]:.1f}")
    return table


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(arguments: list[str]) -> None:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("source", help="conversations: a .jsonl file, also .gz")
    described.add_argument("--target", default="tiny")
    described.add_argument("--template", default=str(RECIPES / "plain.jinja"), help="chat template, where the target has none")
    described.add_argument("--seq-len", type=int, default=512)
    described.add_argument("--copies", type=int, default=1, help="how often the file is tokenised, so that starting processes counts less")
    described.add_argument("--batch", type=int, default=4)
    described.add_argument("--samples", type=int, default=500, help="of the store that is read")
    described.add_argument("--repeats", type=int, default=20)
    options = described.parse_args(arguments)
    target = Target.load(options.target, dtype=torch.float32)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = target.tokenizer.chat_template or Path(options.template).read_text(encoding="utf-8")
    source, console = Source(path=options.source), Console()
    console.print(tokenising(source, target, options.seq_len, options.copies))
    plan = Plan((source,), seq_len=options.seq_len)
    prepare.MOST_SILENT = 1.0  # answers may begin past a short sequence's end
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare.load(plan, target.tokenizer, folder)["train"]
        n = min(len(corpus), options.samples)
        some = replace(corpus, offsets=corpus.offsets[: n + 1], domain=corpus.domain[:n], epoch_samples=torch.arange(n))
        console.print(reading(target, PackedDataset(some, options.seq_len), options.batch, options.repeats, Path(folder)))


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
