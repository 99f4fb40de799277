"""A training step in shapes: the objective that trains, forward and backward, on tensors without values. Every operation is counted: the
memory that it allocates and frees, and its FLOPs. No weight is read, and no GPU is needed to know what a GPU would hold.

The tensors are PyTorch's fake tensors on the CPU: attention kernels there keep no scores, like those of a GPU. Where a loss runs in chunks, a few
of the chunks are run: each one reuses the memory of the one before.

Letters: B rows · S positions · T taps · V vocabulary · H hidden size.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM

from draftsmith.models import span_attention
from draftsmith.models.model_files import read_config
from draftsmith.models.target import KEY, Target
from draftsmith.train.engine.flops import CPU_ATTENTION, MATMULS, causal_attention_flops
from draftsmith.train.losses import chunked
from draftsmith.train.recipe import TargetSection

__all__ = ["Step", "Trace", "shapes_only", "target_without_values"]

CHUNKS = 3  # chunks of each loss that are run

aten = torch.ops.aten
_FAKE = FakeTensorMode()  # shared by all steps: a drafter keeps tensors of a step, and the next step must be able to read them


def _unmasked(_module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **_settings: Any) -> tuple[Tensor, None]:
    """Allocates what FlexAttention does for a frozen model: query [B,heads,S,·] and value [B,·,S,dim] -> [B,S,heads,dim]."""
    out = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)[0]
    return out.transpose(1, 2)[..., : value.shape[-1]].contiguous(), None


# transformers makes no mask for an attention that registers none; FlexAttention's is a small table of blocks.
AttentionInterface.register("unmasked", _unmasked)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one micro-batch allocates and computes.

    Attributes:
        peak: most bytes allocated at once in forward and backward, gradients included.
        released_peak: the same if each gradient is released as soon as it is complete, as under ZeRO, or added to that of an earlier micro-batch.
        flops: of the matmuls in the chunks that were run.
        attention_flops: of attention in these chunks; causal, so half of S².
    """

    peak: int
    released_peak: int
    flops: int
    attention_flops: int


@contextmanager
def shapes_only() -> Iterator[None]:
    """Context in which modules are built without values, whatever their size."""
    with torch.device("meta"), _Counter(fake=False):
        yield


def target_without_values(section: TargetSection, dtype: torch.dtype) -> Target:
    """The target without values, from its config alone.

    Raises:
        OSError, ValueError: as `Target.load` does for a config.
    """
    config = read_config(section.path, revision=section.revision, trust_remote_code=section.trust_remote_code, key=KEY)
    with shapes_only():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=section.trust_remote_code)
    with _Counter(fake=False):  # noise from the CPU goes through the head to find out what follows it
        target = Target.wrap(model, name=section.path)
        _ = target.head_scale, target.identity
    return target


class Step:
    """A model, its objective and its target, all without values.

    Args:
        model: the drafter.
        objective: its objective.
        target: as `target_without_values` returns it.
        gpu: count as on a GPU, with FlexAttention if the target supports it; else as on a CPU.
    """

    def __init__(self, model: nn.Module, objective: Callable[[Any, dict[str, Tensor]], Any], target: Target, gpu: bool) -> None:
        self.model, self.objective, self.target, self.gpu = model.train(), objective, target, gpu
        if gpu and target.model._supports_flex_attn:
            target.model.set_attn_implementation("unmasked")
        _make_fake(target.model)

    def run(self, rows: int, positions: int, *, autocast: bool, taps: tuple[int, ...] | None) -> Trace:
        """Forward and backward of a micro-batch [B,S].

        Args:
            rows: B.
            positions: S.
            autocast: matmuls are in bf16.
            taps: the batch brings the target's features with these taps from a store; None: the target runs.
        """
        return self._run(
            rows, positions, autocast, taps, CHUNKS * chunked.chunk_rows(rows * positions, self.target.vocab_size, not self.gpu)
        )

    def flops_per_token(self, positions: int, taps: tuple[int, ...] | None) -> tuple[float, float]:
        """FLOPs a token of the matmuls, and of attention, in rows of `positions`. All chunks are run."""
        trace = self._run(1, positions, False, taps, None)
        return trace.flops / positions, trace.attention_flops / positions

    def _run(self, rows: int, positions: int, autocast: bool, taps: tuple[int, ...] | None, visited: int | None) -> Trace:
        _make_fake(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        counter = _Counter(visited)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda parameter: counter.release(parameter.grad))
        with (
            _attention(self.gpu or visited is None),
            _chunks(self.gpu or visited is None),
            _FAKE,
            counter,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = self.objective(self.model, self._batch(rows, positions, taps))
            counter.accumulating = True
            loss.sum.backward()
        for parameter in trained:
            parameter.grad = None
        return Trace(counter.peak, counter.released_peak, counter.flops, counter.attention_flops)

    def _batch(self, rows: int, positions: int, taps: tuple[int, ...] | None) -> dict[str, Tensor]:
        """A batch of `data/packing.py`; with taps, one of `data/feature_dataset.py`."""
        shape, dtype, size = (rows, positions), self.target.dtype, self.target.hidden_size
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "position_ids", "document", "sample_id")}
        batch["loss_mask"] = torch.ones(shape, dtype=torch.bool)
        if taps is not None:
            batch["hidden"] = torch.empty(*shape, size, dtype=dtype)
        if taps:
            batch["taps"] = torch.empty(*shape, len(taps), size, dtype=dtype)
        return batch


@contextmanager
def _chunks(gpu: bool) -> Iterator[None]:
    """Within it losses have the chunks of a GPU if `gpu`, and take all rows of each at a time, though the tensors are a CPU's."""
    before = chunked.PIECE, chunked.BUDGET, chunked.ROWS
    if gpu:
        chunked.PIECE, chunked.BUDGET, chunked.ROWS = sys.maxsize, chunked.GPU_BUDGET, chunked.GPU_ROWS
    try:
        yield
    finally:
        chunked.PIECE, chunked.BUDGET, chunked.ROWS = before


class _Counter(TorchDispatchMode):
    """Sees every operation: the storages that it allocates, when they are freed, and its FLOPs. It answers operations that ask for values.

    Args:
        visited: how many positions of a loss are supervised; None: all.
        fake: turn tensors that are not fake into fake ones.
    """

    def __init__(self, visited: int | None = None, fake: bool = True) -> None:
        super().__init__()
        self.visited, self.fake, self.accumulating = visited, fake, False
        self.live = self.released = self.peak = self.released_peak = self.flops = self.attention_flops = 0
        self.alive: dict[int, tuple[weakref.ref, Any]] = {}  # storage -> a reference to it, and the operation that allocated it
        self.released_storages: set[int] = set()
        self.faked: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func](self, *args)
        if func is aten.add.Tensor and self.accumulating and not torch.is_grad_enabled() and _adds_in_place(*args):
            return args[0]  # where gradients are summed, autograd adds in place; under a dispatch mode it does not
        positional, storages = self._as_fake(args)
        named, more = self._as_fake(kwargs or {})
        out = func(*positional, **named)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive and storage._cdata not in storages | more:
                    self._allocated(storage, func)
        operation = func._overloadpacket
        if operation in MATMULS:
            self.flops += MATMULS[operation](*positional, **named, out_val=out)
        elif operation in CPU_ATTENTION:
            self.attention_flops += causal_attention_flops(operation, args)
        return out

    def _as_fake(self, args: Any) -> tuple[Any, set[int]]:
        """Arguments as fake tensors, also those that were built as shapes, and their storages."""
        if isinstance(args, Tensor):
            if self.fake and not isinstance(args, FakeTensor):
                args = self.faked.setdefault(id(args), (args, _empty_copy(args)))[1]
            return args, {args.untyped_storage()._cdata}
        if isinstance(args, dict):
            parts = {name: self._as_fake(value) for name, value in args.items()}
            return {name: value for name, (value, _) in parts.items()}, set().union(*(storages for _, storages in parts.values()))
        if isinstance(args, (tuple, list)):
            parts = [self._as_fake(value) for value in args]
            return type(args)([value for value, _ in parts]), set().union(*(storages for _, storages in parts))
        return args, set()

    def _allocated(self, storage: Any, func: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self.live -= size
            if key in self.released_storages:
                self.released_storages.discard(key)
                self.released -= size
            del self.alive[key]

        self.alive[key] = weakref.ref(storage, freed), func
        self.live += size
        self.peak = max(self.peak, self.live)
        self.released_peak = max(self.released_peak, self.live - self.released)

    def release(self, gradient: Tensor) -> None:
        """A gradient is complete: from now on `released_peak` does not count it."""
        key = gradient.untyped_storage()._cdata
        if key in self.alive and key not in self.released_storages:
            self.released_storages.add(key)
            self.released += gradient.untyped_storage().nbytes()

    def _source(self, tensor: Tensor) -> Any:
        """The operation that allocated a tensor."""
        return self.alive.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def _equal(self, left: Tensor, right: Tensor) -> bool:
        """Tensors without values count as equal if one operation allocated both: models/head.py asks whether a head is a matmul alone."""
        return self._source(left) is self._source(right) is not None

    def _nonzero(self, tensor: Tensor) -> Tensor:
        count = tensor.numel() if self.visited is None else min(tensor.numel(), self.visited)
        return self._new(torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64))[:count]

    def _grouped(self, left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any) -> Tensor:
        """The grouped product of mixtures of experts; PyTorch's own rule for shapes accepts only bf16 and sizes that suit a GPU."""
        rows, columns = left.shape[-2], right.shape[-1]
        groups = ()
        if left.dim() == right.dim() == 3:
            groups = (len(left),)
        elif left.dim() == right.dim() and offsets is not None:
            groups = (offsets.numel(),)
        self.flops += 2 * left.numel() * columns
        return self._new(torch.empty(*groups, rows, columns, dtype=left.dtype))

    def _new(self, tensor: Tensor) -> Tensor:
        self._allocated(tensor.untyped_storage(), None)
        return tensor


_ANSWERS = {
    aten._local_scalar_dense.default: lambda _, tensor: 0.0 if tensor.is_floating_point() else 0,
    aten.equal.default: _Counter._equal,
    aten.nonzero.default: _Counter._nonzero,
    aten._grouped_mm.default: _Counter._grouped,
}


def _adds_in_place(total: Any, gradient: Any) -> bool:
    """Whether autograd would add `gradient` to `total` in place."""
    same = isinstance(gradient, Tensor) and total.shape == gradient.shape and total.dtype == gradient.dtype
    dense = sum((size - 1) * stride for size, stride in zip(total.shape, total.stride(), strict=True)) + 1 == total.numel()
    return same and dense


def _empty_copy(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _make_fake(module: nn.Module) -> None:
    """Replace a module's tensors by fake ones; tied ones stay tied."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    with _FAKE:
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in replaced:
                        new = _empty_copy(tensor)
                        replaced[id(tensor)] = tensor, nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
                    tensors[name] = replaced[id(tensor)][1]  # pyright: ignore[reportArgumentType]


@contextmanager
def _attention(gpu: bool) -> Iterator[None]:
    """Context in which models/span_attention.py needs no values.

    On a GPU it allocates as FlexAttention does: its output and log-sum-exp. On a CPU its spans end evenly, as causal ones do.
    """
    spans, numbers = span_attention.Spans, span_attention._numbers

    def apply(query: Tensor, key: Tensor, value: Tensor, start: Tensor, end: Tensor, scale: float, budget: int) -> tuple[Tensor, Tensor]:
        out = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
        return out[0], out[1]

    def even(start: Tensor, end: Tensor, keys: int) -> list[tuple[list[int], list[int]]]:
        rows, queries = start.shape
        return [([0] * queries, [max(1, keys * query // queries) for query in range(1, queries + 1)])] * rows

    if gpu:
        span_attention.Spans = SimpleNamespace(apply=apply)  # pyright: ignore[reportAttributeAccessIssue]
    span_attention._numbers = even
    try:
        yield
    finally:
        span_attention.Spans, span_attention._numbers = spans, numbers
