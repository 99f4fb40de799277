"""A CUDA graph of tensor operations, on a CPU: they are recorded once, with the tensors they met, and from then on replayed without the Python
that made them. What a graph would get wrong, this gets wrong: a number that was the host's, a tensor that has moved, a branch not taken.

Operations only: what a Triton kernel does is not seen, so each kernel must be its reference.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These read the device, or (the last) copy the host's numbers to it from memory that a graph may not copy from.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "lift_fresh")


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Runs what it records, as warming up does; `replay` does it again, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert not any(word in str(function) for word in WAITING), f"{function} is not possible in a graph"
        out = function(*arguments, **(keywords or {}))
        self.calls.append((function, arguments, keywords or {}, out))
        return out

    def replay(self) -> None:
        with torch.inference_mode():
            for function, arguments, keywords, results in self.computing:
                again = function(*arguments, **keywords)
                for before, fresh in zip(results, [again] if isinstance(again, torch.Tensor) else tensors(again), strict=True):
                    # A tensor that was written to is where it was.
                    if before.data_ptr() != fresh.data_ptr():
                        before.copy_(fresh)

    @cached_property
    def computing(self) -> list[tuple[Any, tuple, dict, list[torch.Tensor]]]:
        """The calls without those that only make views, and their results: a view stays where it is, and shows what is written there."""

        def only_views(function: Any, given: tuple[tuple, dict], out: Any) -> bool:
            results, inputs = ({*map(storage, tensors(each))} for each in (out, given))
            return not function._schema.is_mutable and bool(results) and results <= inputs  # a check gives nothing

        return [(*call, tensors(out)) for *call, out in self.calls if not only_views(call[0], call[1:], out)]


def orphans(tapes: list[Tape]) -> list[Any]:
    """Drop tapes that follow each other -> their operations that read memory from before them which nothing else keeps: a graph would find
    something else there."""
    given: dict[int, tuple[Any, StorageWeakRef]] = {}
    own: set[int] = set()
    for function, arguments, keywords, out in (call for tape in tapes for call in tape.calls):
        for tensor in tensors((arguments, keywords)):
            if storage(tensor) not in own:
                given.setdefault(storage(tensor), (function, StorageWeakRef(tensor.untyped_storage())))
        own |= {storage(tensor) for tensor in tensors(out)} - given.keys()
    del tensor, arguments, keywords, out
    for tape in tapes:
        tape.calls.clear()
    return [function for function, reference in given.values() if reference.expired()]


def record(work: Sequence[Callable[[], Any]], on: Any) -> list[Callable[[], Any]]:
    """In place of `graph_rounds.capture`: warm up, record, and leave nothing but replays."""
    for piece in work:
        piece()
    lost = orphans([recorded(piece) for piece in work])
    assert not lost, lost
    return [recorded(piece).replay for piece in work]


def recorded(piece: Callable[[], Any]) -> Tape:
    with Tape() as tape:
        piece()
    assert tape.calls, "an empty graph"
    return tape


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling takes no short cut that reads numbers, which on a CPU costs nothing."""
    from draftsmith.inference import rules, sampler

    for module in (rules, sampler):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)


def install(monkeypatch: pytest.MonkeyPatch, replayed: bool) -> None:
    """Decoders with kernels use the references, which are quick and consist of operations, and run rounds as for a graph: each as it is, or
    replayed from what was recorded of the first of its shape."""
    from draftsmith.inference import cache, decoder, expand, graph_rounds
    from draftsmith.inference import verify as verification
    from draftsmith.inference.kernels import attention, commit, verify

    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(attention, "tree_attention", attention.tree_attention_reference)
    monkeypatch.setattr(commit, "commit", lambda groups, *rest: [commit.commit_reference(group.buffers, *rest) for group in groups])
    monkeypatch.setattr(commit, "take", commit.take_reference)
    monkeypatch.setattr(verify, "verify", verification.verify)
    monkeypatch.setattr(expand, "active", lambda: False)
    monkeypatch.setattr(decoder, "missing", lambda device: "")
    real = decoder.refusal

    def refusal(target, drafter, sampling, processed):
        on_gpu = SimpleNamespace(device=torch.device("cuda"), model=target.model, dtype=torch.bfloat16)
        return real(on_gpu, SimpleNamespace(capturable=drafter.capturable), sampling, processed)

    monkeypatch.setattr(decoder, "refusal", refusal)
    write = cache.TreeCache._write

    def write_inside(self, buffer, states):
        """What a row writes past its end is another row's, and past the last row an error of the device alone."""
        if self.static_shape:
            ends = self.selected_length + self.drafted + states.shape[2]
            torch._assert_async((ends <= self.capacity).all(), "written past the end of a row")
        write(self, buffer, states)

    monkeypatch.setattr(cache.TreeCache, "_write", write_inside)
    if replayed:
        monkeypatch.setattr(graph_rounds, "capture", record)
