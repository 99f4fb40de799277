"""Memory and time of training-time test's attention beside dense forms: python -m draftsmith.train.benchmarks.training_time_test

Each measurement runs in a process of its own, and forms alternate. The peak is what the process adds to its resident set, the gradients of
the inputs included. The forms are

  ours    models/training_time_test.py
  masked  one SDPA for each step, under a dense [S, S·steps] mask
  scores  the same with all scores in memory, as in trainers without a fused kernel

Letters: S positions.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftsmith.inference.errors import exit_on_error
from draftsmith.models.training_time_test import attend

FORMS = ("ours", "masked", "scores")


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor], scores: bool) -> Tensor:
    """The attention of `attend`, under a mask over every key of every step. scores: with all scores in memory."""
    positions = torch.arange(query.shape[2])
    own = positions[:, None] == positions
    mask = torch.cat([positions[:, None] >= positions, *(own for _ in keys[1:])], 1)
    key, value = torch.cat(keys, 2), torch.cat(values, 2)
    if scores:
        return (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ value
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def measure(form: str, positions: int, steps: int, heads: int, dim: int) -> str:
    """Forward and backward of all steps: "seconds MiB"."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        [torch.randn(1, heads, positions, dim, generator=generator).requires_grad_() for _ in range(steps)] for _ in range(3)
    )
    small = [torch.randn(1, heads, 64, dim, requires_grad=True) for _ in range(3)]
    attend(small[0], [small[1]] * 2, [small[2]] * 2, None).sum().backward()  # what is loaded on first use is not the attention's
    base, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    total = torch.zeros(())
    for k in range(steps):
        if form == "ours":
            out = attend(queries[k], keys[: k + 1], values[: k + 1], None)
        else:
            out = dense(queries[k], keys[: k + 1], values[: k + 1], scores=form == "scores")
        total = total + out.square().sum()
    total.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{time.perf_counter() - began} {(peak - base) / 1024}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, about in (
        ("positions", 2048, "tokens of a row"),
        ("steps", 7, "steps of the training-time test"),
        ("heads", 8, "attention heads"),
        ("dim", 32, "numbers of a head"),
        ("repeats", 3, "processes for each form; medians are printed"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{about} (default {default})")
    parser.add_argument("--form", choices=FORMS, help="measure this form, in this process")
    options = parser.parse_args(arguments)
    sizes = (options.positions, options.steps, options.heads, options.dim)
    if options.form:
        print(measure(options.form, *sizes))
        return
    runs: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    for _ in range(options.repeats):
        for form in FORMS:
            words = [f"--{name}={size}" for name, size in zip(("positions", "steps", "heads", "dim"), sizes, strict=True)]
            done = subprocess.run(
                [sys.executable, "-m", "draftsmith.train.benchmarks.training_time_test", f"--form={form}", *words],
                capture_output=True,
                text=True,
                check=True,
            )
            seconds, mib = map(float, done.stdout.split())
            runs[form].append((seconds, mib))
    table = Table(title=f"training-time test, forward + backward, S = {sizes[0]}, {sizes[1]} steps, {sizes[2]} heads of {sizes[3]}")
    for name in ("form", "seconds", "MiB added", "times our memory", "times our time"):
        table.add_column(name, justify="left" if name == "form" else "right")
    medians = {form: [statistics.median(column) for column in zip(*rows, strict=True)] for form, rows in runs.items()}
    for form, (seconds, mib) in medians.items():
        first = medians[FORMS[0]]
        table.add_row(form, f"{seconds:.1f}", f"{mib:,.0f}", f"{mib / first[1]:.1f} x", f"{seconds / first[0]:.1f} x")
    Console().print(table)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
