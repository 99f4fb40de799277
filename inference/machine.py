"""What this machine is good at, found by trying: how many threads, and whether bf16 helps.

A table of processors would be wrong somewhere: a busy 2-core box with too many OpenMP threads ran the same work 40 × slower,
and bf16 is quick on CPUs with AMX and slow on most others.
"""

import functools
import os
import time
from typing import Literal

import torch


@functools.cache
def threads() -> int:
    """Set and return the number of threads that multiply small matrices soonest; OMP_NUM_THREADS decides where it is set."""
    if not os.environ.get("OMP_NUM_THREADS"):
        counts = sorted({1, 2, 4, 8, 16, torch.get_num_threads()} & set(range(1, (os.cpu_count() or 1) + 1)))
        left, right = torch.randn(64, 512), torch.randn(512, 2048)
        best = {count: _seconds(left, right, count) for count in counts}
        # A thread more must earn its place: what it gains on an idle machine it loses many times over on a busy one.
        chosen = counts[0]
        for count in counts[1:]:
            if best[count] < 0.8 * best[chosen]:
                chosen = count
        torch.set_num_threads(chosen)
    return torch.get_num_threads()


@functools.cache
def precision() -> Literal["fp32", "bf16"]:
    """bf16 where a GPU supports it, and on a CPU only where it multiplies at least 1.3 × as fast as fp32."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    left, right = torch.randn(256, 512), torch.randn(512, 1024)
    plain = _seconds(left, right, torch.get_num_threads())
    half = _seconds(left.bfloat16(), right.bfloat16(), torch.get_num_threads())
    return "bf16" if 1.3 * half < plain else "fp32"


def _seconds(left: torch.Tensor, right: torch.Tensor, count: int, budget: float = 0.08) -> float:
    """The shortest of the products that fit in `budget` seconds (at least three), with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    shortest, tried, until = float("inf"), 0, time.perf_counter() + budget
    while tried < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        left @ right
        shortest, tried = min(shortest, time.perf_counter() - start), tried + 1
    torch.set_num_threads(before)
    return shortest
