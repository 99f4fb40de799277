"""Free memory of a device, within the limits of a container and of the process."""

import resource
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["free_memory"]


def free_memory(device: torch.device) -> float:
    """Bytes that this process may still allocate on the device; infinity where the system does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    limits = [float("inf")]
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with suppress(OSError, ValueError):  # of a container; ValueError: "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        limits.append(float(limit - used))
    with suppress(OSError, ValueError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(float(limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()))
    return max(0.0, min(limits))
