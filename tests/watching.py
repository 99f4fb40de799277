"""Dispatch modes that count what a computation does: the largest tensor, reads by the host."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Counts operations on tensors, and the most elements of any tensor that one returned."""

    def __init__(self):
        super().__init__()
        self.elements, self.seen = 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
                self.seen += 1
        return out


class Watch(TorchDispatchMode):
    """Counts what reads the device from the host, and shapes that depend on values."""

    SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal", "aten::unique")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.syncs = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        name = func._schema.name
        if name.startswith(self.SYNCS):
            self.syncs.append(name)
        return func(*args, **(kwargs or {}))
