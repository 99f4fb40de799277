"""Free memory of a device, within the limits of a container and of the process."""

import resource
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["free_memory"]

CGROUP = Path("/sys/fs/cgroup")  # of a container
CGROUPS = (  # limit, use and statistics in versions 2 and 1
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def free_memory(device: torch.device) -> float:
    """Bytes that this process may still allocate on the device; infinity where the system does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    limits = [float("inf")]
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    for names in CGROUPS:
        with suppress(OSError, ValueError, KeyError):  # ValueError: "max", no limit
            limit, used = (int((CGROUP / name).read_text()) for name in names[:2])
            limits.append(float(limit - used + _file_cache(CGROUP / names[2])))
    with suppress(OSError, ValueError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(float(limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()))
    return max(0.0, min(limits))


def _file_cache(statistics: Path) -> int:
    """Bytes of files that count as used, such as weights that were read, and that the kernel gives up for an allocation."""
    lines = dict(line.split() for line in statistics.read_text().splitlines())
    return int(lines["active_file"]) + int(lines["inactive_file"])
