"""Kernels compiled for a Hopper GPU where there is none, by the very launches that a GPU would get."""

import os
import subprocess
import sys
from pathlib import Path

BEFORE = """
import importlib
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0

class Compiled:
    def __init__(self, name):
        self.name, self.kernel = name, getattr(kernels, name)
    def __getitem__(self, grid):
        def launch(*given, **flags):
            kernel = self.kernel.warmup(*given, grid=grid, **natively(self.name, flags))
            built[kernel.hash] = self.name, kernel
        return launch

def natively(name, flags):
    return flags

driver.set_active(Hopper())
kernels, built = importlib.import_module({module!r}), {{}}
for name in {names!r}:
    setattr(kernels, name, Compiled(name))
"""
AFTER = """
for name, kernel in built.values():
    assert kernel.asm["cubin"] and kernel.metadata.shared <= {shared}, (name, kernel.metadata.shared)
print(*sorted(name for name, _ in built.values()))
"""


def compiled(module: str, names: tuple[str, ...], calls: str, folder: Path, shared: int = 48 * 1024) -> list[str]:
    """The names of the kernels that `calls` makes, as often as there are machine codes of them. `calls` sees the module as `kernels`, and
    may give another `natively`, which says what the launcher's flags would be on a GPU. shared: bytes of shared memory, at most."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    script = BEFORE.format(module=module, names=names) + calls + AFTER.format(shared=shared)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.split()
