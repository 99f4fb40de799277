"""Triton kernels, each with a plain-torch reference, and the switch that says whether they are in use. Importing this imports no Triton.

Code that has a kernel asks `active()`, and imports the kernel's module only if it is true, so that everything else works without Triton.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

__all__ = ["active", "missing", "use"]

_local = threading.local()  # decoders may run in threads of their own


def missing(device: torch.device) -> str:
    """Why kernels cannot run on tensors of this device, in one line; "" where they can."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install draftsmith[kernels]"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":  # for tests, which repair the interpreter
        return f"they need a CUDA device, a model is on the {device.type}"
    return ""


def active() -> bool:
    """Whether decoding in this thread uses the kernels at present."""
    return getattr(_local, "active", False)


@contextmanager
def use(on: bool) -> Iterator[None]:
    """Within it `active()` is `on` in this thread."""
    before, _local.active = active(), on
    try:
        yield
    finally:
        _local.active = before
