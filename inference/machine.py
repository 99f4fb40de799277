"""What this machine is good at, by measurement: how many threads help, whether bf16 helps, and how fast it multiplies matrices.

A table of processors would be wrong somewhere: a busy 2-core box with too many OpenMP threads ran the same work 40 × slower,
and bf16 is quick on CPUs with AMX and slow on most others.
"""

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from draftsmith.inference.packed_linear import gain, pack, packed_weights


def threads(work: Callable[[], object] | None = None) -> int:
    """Set and return the number of threads that does `work` fastest; by default a matmul of the size of training.

    OMP_NUM_THREADS decides where a person has set it. (`accelerate launch` sets it itself where nobody has; see `_set_by_launcher`.)
    """
    # Saturated softmaxes underflow to denormals, which CPUs multiply in microcode: backward passes up to 1.8 × slower, measured.
    # Before the first parallel work, so that every thread of the pool inherits it.
    torch.set_flush_denormal(True)
    if torch.cuda.is_available() or (os.environ.get("OMP_NUM_THREADS") and not _set_by_launcher()):
        return torch.get_num_threads()
    if work is None:
        left, right = torch.randn(512, 256), torch.randn(256, 1024)
        work = functools.partial(torch.matmul, left, right)
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= cores()]
    chosen, shortest = 1, float("inf")
    for count in counts:
        torch.set_num_threads(count)
        seconds = _median(work)
        # More threads must gain clearly: what they gain on an idle machine they lose many times over on a busy one.
        if seconds < 0.85 * shortest:
            chosen, shortest = count, seconds
    torch.set_num_threads(chosen)
    return chosen


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set_by_launcher() -> bool:
    """Whether it is `accelerate launch` that has set OMP_NUM_THREADS, and not a person or a scheduler: the launcher, which is the parent of a
    worker, began without it. Several workers share the cores by the launcher's number. An argument of the launcher counts as a person's word.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        return False
    parent = Path("/proc", str(os.getppid()))
    try:
        environment, words = ((parent / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
    except OSError:  # another system, or another user's process
        return os.environ["OMP_NUM_THREADS"] == "1"
    named = any(word.replace(b"-", b"_").startswith(b"__num_cpu_threads_per_process") for word in words)
    return not named and not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in environment)


def processor() -> str:
    """The name of this machine's processor, as Linux gives it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def precision() -> Literal["fp32", "bf16"]:
    """bf16 where a GPU supports it, and on a CPU only where it multiplies at least 1.3 × as fast as fp32."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    left, right = torch.randn(256, 512), torch.randn(512, 1024)
    half_left, half_right = left.bfloat16(), right.bfloat16()
    return "bf16" if 1.3 * _median(lambda: half_left @ half_right) < _median(lambda: left @ right) else "fp32"


@functools.cache
def decoding_precision() -> Literal["fp32", "bf16"]:
    """bf16 where this CPU runs the linear layers of decoding rounds at least 1.15 × as fast in it as in fp32, each packed where that pays.

    A CPU without bf16 instructions is slower in bf16. On an idle Xeon with AMX eight new processes measured 1.34 to 2.00; other work lowers that.
    """

    def works(dtype: torch.dtype) -> list[Callable[[], object]]:
        """A plain round and a small tree, through 64 MB of bf16 weights or 128 MB of fp32, so that they leave the cache."""
        layers = torch.nn.ModuleList(torch.nn.utils.skip_init(torch.nn.Linear, 1024, 1024, bias=False, dtype=dtype) for _ in range(32))
        for parameter in layers.requires_grad_(False).parameters():
            parameter.fill_(0.01)
        pack(layers)
        inputs = [torch.ones(tokens, 1024, dtype=dtype) for tokens in (1, 8)]
        return [functools.partial(layer, x) for x in inputs for layer in layers]

    with torch.no_grad(), packed_weights():
        return "bf16" if gain(works(torch.float32), works(torch.bfloat16)) >= 1.15 else "fp32"


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large matmuls of this dtype on this device: the best of 0.1 seconds, since other processes disturb it."""
    gpu = device.type == "cuda"
    rows, size, repeats = (4096, 4096, 4) if gpu else (256, 1024, 1)
    left, right = (torch.ones(shape, dtype=dtype, device=device) for shape in ((rows, size), (size, size)))

    def work() -> None:
        for _ in range(repeats):
            torch.matmul(left, right)
        if gpu:
            torch.cuda.synchronize(device)

    return repeats * 2 * rows * size * size / min(_times(work, 0.1))


def _median(work: Callable[[], object]) -> float:
    return statistics.median(_times(work, 0.15))


def _times(work: Callable[[], object], budget: float) -> list[float]:
    """Seconds of each call of `work`, repeated for `budget` seconds and at least twice, after one call to warm up."""
    times: list[float] = []
    until = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times[1:]
