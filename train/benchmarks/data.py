"""Speed of the data path: python -m draftsmith.train.benchmarks.data chats.jsonl.gz

1. Tokenising, masking and packing, with one process and with two in turn. One figure includes the time that processes take to start, the
   other does not.
2. Reading a feature store, beside a training step on what is read (forward and backward of Medusa heads on features). Training must never
   wait for reading.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.data import prepare
from draftsmith.data.capture import capture
from draftsmith.data.conversations import Source, read
from draftsmith.data.encoding import Encoder, encoded
from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.features import FeatureStore
from draftsmith.data.packing import PackedDataset, pack
from draftsmith.data.prepare import CorpusPlan
from draftsmith.inference.errors import exit_on_error
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train.medusa import MedusaSection, objective
from draftsmith.train.recipe import RECIPES

PROCESSES = (1, 2)
PRECISIONS = ("float32", "bfloat16", "fp8", "int8")


def tokenising(source: Source, target: Target, seq_len: int, copies: int) -> Table:
    """Conversations a second, by the number of processes; the file is read `copies` times over."""
    encoder = Encoder(target.require_tokenizer(), seq_len, False, ())
    table = Table(title=f"tokenise + mask + pack, {source.path} x {copies}")
    for name in ("processes", "conversations/s", "of one process", "once running", "of one process"):
        table.add_column(name, justify="right")
    speeds: dict[int, tuple[float, float]] = {}
    for processes in PROCESSES:
        examples = list(chain.from_iterable(read(source) for _ in range(copies)))
        start = time.perf_counter()
        lengths, times = [], []
        for example in encoded(examples, encoder, processes):
            lengths += [len(ids) for ids, _ in example.pieces]
            times.append(time.perf_counter())
        pack(lengths, seq_len)
        total = time.perf_counter() - start
        half = len(times) // 2
        speeds[processes] = len(examples) / total, (len(times) - half) / (times[-1] - times[half])
    single_total, single_running = speeds[PROCESSES[0]]
    for processes, (total, running) in speeds.items():
        table.add_row(
            str(processes), f"{total:,.0f}", f"{total / single_total:.2f} x", f"{running:,.0f}", f"{running / single_running:.2f} x"
        )
    return table


def reading(target: Target, packed: PackedDataset, batch: int, repeats: int, folder: Path) -> Table:
    """Tokens a second that a store gives, by its precision, and that a training step on them takes."""
    drafter: Any = new_drafter("medusa", target, num_heads=4, num_layers=1, share_head=False, training={})
    section = MedusaSection(distill=1.0)

    def step(features: dict[str, torch.Tensor]) -> None:
        objective(drafter, features, target=target, section=section).sum.backward()

    datasets = {}
    for precision in PRECISIONS:
        capture(target, [packed.corpus], folder / precision, precision)
        datasets[precision] = FeatureDataset(packed, FeatureStore(folder / precision, target))
    repeats = min(repeats, len(packed) // batch)  # complete batches
    if repeats < 2:
        raise ValueError(f"the data fill {len(packed)} sequences; expected two batches of {batch}: give more data, or a smaller batch")
    order = torch.randperm(len(packed), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in (*PRECISIONS, "step")}
    for start in range(0, batch * repeats, batch):
        rows = order[start : start + batch]
        for name, dataset in datasets.items():
            times[name].append(_seconds(partial(dataset.batch, rows)))
        times["step"].append(_seconds(partial(step, datasets["float32"].batch(rows))))
    tokens = batch * packed.seq_len
    seconds = {name: statistics.median(measured[1:]) for name, measured in times.items()}
    table = Table(
        title=f"features of {target.name}: read, and trained on ({torch.get_num_threads()} thread(s), batches of {tokens:,} tokens)"
    )
    for name in ("store", "bytes a token", "read, tokens/s", "trained, tokens/s", "read / trained"):
        table.add_column(name, justify="left" if name == "store" else "right")
    for name in PRECISIONS:
        size, ratio = datasets[name].store.index.bytes_per_token, seconds["step"] / seconds[name]
        table.add_row(name, f"{size:,}", f"{tokens / seconds[name]:,.0f}", f"{tokens / seconds['step']:,.0f}", f"{ratio:.1f}")
    return table


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(arguments: list[str]) -> None:
    """Measure both and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="conversations: a .jsonl file, also .gz")
    parser.add_argument("--target", default="tiny", help="whose tokenizer and template are used (default tiny)")
    parser.add_argument("--template", default=str(RECIPES / "plain.jinja"), help="chat template, where the target has none")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a sequence (default 512)")
    parser.add_argument("--copies", type=int, default=1, help="how often the file is tokenised, so that starting processes counts less")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--samples", type=int, default=500, help="samples in the store that is read")
    parser.add_argument("--repeats", type=int, default=20, help="batches")
    options = parser.parse_args(arguments)
    target = Target.load(options.target, dtype=torch.float32)
    tokenizer = target.require_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template or Path(options.template).read_text(encoding="utf-8")
    source, console = Source(path=options.source), Console()
    console.print(tokenising(source, target, options.seq_len, options.copies))
    plan = CorpusPlan((source,), seq_len=options.seq_len)
    prepare.MAX_UNSUPERVISED = 1.0  # answers may begin past a short sequence's end
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare.load(plan, tokenizer, folder)["train"]
        n = min(len(corpus), options.samples)
        first = replace(corpus, offsets=corpus.offsets[: n + 1], domain=corpus.domain[:n], epoch_samples=torch.arange(n))
        console.print(reading(target, PackedDataset(first, options.seq_len), options.batch, options.repeats, Path(folder)))


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
