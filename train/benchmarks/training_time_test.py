"""Memory and time of training-time test's attention beside dense forms: python -m draftsmith.train.benchmarks.training_time_test

Each measurement is a process of its own, forms alternating; peak is what it adds to the resident set, the inputs' gradients included.
unroll: models/training_time_test.py · masked: one SDPA a step under a dense [S, S·steps] mask · scores: the same with the scores laid out, as trainers
without a fused kernel have it.

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

FORMS = ("unroll", "masked", "scores")


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor], laid_out: bool) -> Tensor:
    """What `attend` computes, under a mask of every key of every step."""
    at = torch.arange(query.shape[2])
    own = at[:, None] == at
    mask = torch.cat([at[:, None] >= at, *[own] * (len(keys) - 1)], 1)
    key, value = torch.cat(keys, 2), torch.cat(values, 2)
    if laid_out:
        return (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ value
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def once(form: str, positions: int, steps: int, heads: int, dim: int) -> str:
    """Forward and backward of all steps -> "seconds MiB"."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        [torch.randn(1, heads, positions, dim, generator=generator).requires_grad_() for _ in range(steps)] for _ in range(3)
    )
    small = [torch.randn(1, heads, 64, dim, requires_grad=True) for _ in range(3)]
    attend(small[0], [small[1]] * 2, [small[2]] * 2, None).sum().backward()  # what is loaded on first use is not the attention's
    base, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    total = torch.zeros(())
    for k in range(steps):
        held = keys[: k + 1], values[: k + 1]
        out = attend(queries[k], *held, None) if form == "unroll" else dense(queries[k], *held, laid_out=form == "scores")
        total = total + out.square().sum()
    total.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{time.perf_counter() - began} {(peak - base) / 1024}"


def main(arguments: list[str]) -> None:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("positions", 2048), ("steps", 7), ("heads", 8), ("dim", 32), ("repeats", 3)):
        described.add_argument(f"--{name}", type=int, default=default)
    described.add_argument("--form", choices=FORMS, help="measure this one, here")
    options = described.parse_args(arguments)
    sizes = (options.positions, options.steps, options.heads, options.dim)
    if options.form:
        print(once(options.form, *sizes))
        return
    found: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
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
            found[form].append((seconds, mib))
    table = Table(title=f"training-time test, forward + backward, S = {sizes[0]}, {sizes[1]} steps, {sizes[2]} heads of {sizes[3]}")
    for name in ("form", "seconds", "MiB added", "of unroll's memory", "of its time"):
        table.add_column(name, justify="left" if name == "form" else "right")
    medians = {form: [statistics.median(column) for column in zip(*rows, strict=True)] for form, rows in found.items()}
    for form, (seconds, mib) in medians.items():
        first = medians[FORMS[0]]
        table.add_row(form, f"{seconds:.1f}", f"{mib:,.0f}", f"{mib / first[1]:.1f} x", f"{seconds / first[0]:.1f} x")
    Console().print(table)


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
