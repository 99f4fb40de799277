"""A training step in shapes alone: the very objective that trains, forward and backward, on tensors without values. What its operations
allocate, free and multiply is counted on the way. No weight is read, and no GPU is needed to know what a GPU would hold.

It is PyTorch's fake tensors, on the CPU, that flow: their kernels for attention keep no scores, like those of a GPU. Where the losses go
through their heads in chunks, some chunks are run and not all: each finds the room that the one before it left.

Letters: B rows · S positions · T taps · V vocabulary · H hidden size.
"""

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
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from draftsmith.inference.support import check_supported
from draftsmith.models import training_time_test as unroll
from draftsmith.models.target import Target, resolve_path
from draftsmith.train.losses.chunked import chunk_rows
from draftsmith.train.recipe import TargetSection

__all__ = ["Step", "Traced", "outline", "shapes_only"]

CHUNKS = 3  # of each loop over the positions of a loss that are run
SHORT = 128  # positions of the step whose products are counted: all of its chunks are run

aten = torch.ops.aten
_FAKE = FakeTensorMode()  # one for all: what a drafter keeps of one step, the next must be able to read


def _unmasked(_module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **_settings: Any) -> tuple[Tensor, None]:
    """Allocates what FlexAttention does for a frozen model: query [B,heads,S,·] and value [B,·,S,dim] -> [B,S,heads,dim]."""
    out = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)[0]
    return out.transpose(1, 2)[..., : value.shape[-1]].contiguous(), None


# Without a mask of its own, attention has none made; FlexAttention's is a small table of blocks.
AttentionInterface.register("unmasked", _unmasked)


@dataclass(frozen=True, slots=True)
class Traced:
    """peak: bytes at the most of what a micro-batch makes, forward and backward, its gradients included · passing: the same where every
    gradient leaves as soon as it is whole, as under ZeRO · products: FLOPs of its matrix products, those of attention apart in `attention`,
    causal: half of S² (both without the chunks that were not run)."""

    peak: int
    passing: int
    products: int
    attention: int


@contextmanager
def shapes_only() -> Iterator[None]:
    """Within it modules are made without values, whatever their size."""
    with torch.device("meta"), _Count(fake=False):
        yield


def outline(section: TargetSection, dtype: torch.dtype) -> Target:
    """The target without values, from its config alone. Raises OSError and ValueError as `Target.load` does for a config."""
    source, trust = resolve_path(section.path), section.trust_remote_code
    config = AutoConfig.from_pretrained(source, revision=section.revision, trust_remote_code=trust)
    check_supported(config)
    with shapes_only():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust)
    with _Count(fake=False):  # its head is tried out with noise from the CPU
        target = Target.wrap(model, name=section.path)
        _ = target.head_scale, target.identity
    return target


class Step:
    """A model, its objective and its target, all without values, ready to be run in shapes.

    gpu: as on a GPU, where attention is FlexAttention's if the target can; else as on a CPU.
    """

    def __init__(self, model: nn.Module, objective: Callable[[Any, dict[str, Tensor]], Any], target: Target, gpu: bool) -> None:
        self.model, self.objective, self.target, self.gpu = model.train(), objective, target, gpu
        if gpu and target.model._supports_flex_attn:
            target.model.set_attn_implementation("unmasked")
        _fill(target.model)

    def run(self, rows: int, positions: int, *, autocast: bool, holding: bool, taps: tuple[int, ...] | None) -> Traced:
        """Forward and backward of rows [B,S].

        autocast: products in bf16 · holding: gradients of an earlier micro-batch are there, uncounted · taps: the batch brings the target's
        features, with these taps, from a store; None: the target runs.
        """
        return self._run(rows, positions, autocast, holding, taps, CHUNKS * chunk_rows(rows * positions, self.target.vocab_size))

    def products(self, positions: int, taps: tuple[int, ...] | None, parts: int = 1) -> tuple[float, float]:
        """FLOPs a token of the matrix products, and of attention in rows of `positions`. parts: ranks that share a row."""
        short = SHORT * parts
        found = self._run(1, short, False, False, taps, None)
        return found.products / short, found.attention / short**2 * positions

    def _run(self, rows: int, positions: int, autocast: bool, holding: bool, taps: tuple[int, ...] | None, visited: int | None) -> Traced:
        _fill(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if holding:
            with _FAKE:
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
        count = _Count(visited)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda parameter: count.leave(parameter.grad))
        with _kernels(self.gpu or visited is None), _FAKE, count, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = self.objective(self.model, self._batch(rows, positions, taps))
            count.summing = True
            loss.sum.backward()
        for parameter in trained:
            parameter.grad = None
        return Traced(count.peak, count.passing, count.products, count.attention)

    def _batch(self, rows: int, positions: int, taps: tuple[int, ...] | None) -> dict[str, Tensor]:
        """What `data/packing.py` gives, and `data/feature_dataset.py` where there is a store."""
        shape, dtype, size = (rows, positions), self.target.dtype, self.target.hidden_size
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "position_ids", "document", "sample_id")}
        batch["loss_mask"] = torch.ones(shape, dtype=torch.bool)
        if taps is not None:
            batch["hidden"] = torch.empty(*shape, size, dtype=dtype)
        if taps:
            batch["taps"] = torch.empty(*shape, len(taps), size, dtype=dtype)
        return batch


class _Count(TorchDispatchMode):
    """Sees every operation: what storages it makes, when they are freed, and what it multiplies. Answers what asks for values.

    visited: how many positions of a loss there are to visit; None: all · fake: what is not a fake tensor is made one.
    """

    def __init__(self, visited: int | None = None, fake: bool = True) -> None:
        super().__init__()
        self.visited, self.fake, self.summing = visited, fake, False
        self.live = self.left = self.peak = self.passing = self.products = self.attention = 0
        self.alive: dict[int, tuple[weakref.ref, Any]] = {}  # storage -> itself, and the operation that made it
        self.gone: set[int] = set()
        self.filled: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func](self, *args)
        if func is aten.add.Tensor and self.summing and not torch.is_grad_enabled() and _alike(*args):
            return args[0]  # where gradients meet, autograd adds in place; under a mode such as this one it does not
        given, before = self._given(args)
        named, more = self._given(kwargs or {})
        out = func(*given, **named)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive and storage._cdata not in before | more:
                    self._made(storage, func)
        if (packet := func._overloadpacket) in _PRODUCTS:
            self.products += _PRODUCTS[packet](*given, **named, out_val=out)
        elif packet in _ATTENTION:
            # The last n of C positions see C − n/2 on average, at 2·dim each for scores and as much for values; backward 2.5 × that.
            queries, keys = args[0], args[1] if len(args) < 6 else args[2]
            self.attention += _ATTENTION[packet] * queries.numel() * (2 * keys.shape[-2] - queries.shape[-2])
        return out

    def _given(self, args: Any) -> tuple[Any, set[int]]:
        """Arguments as fake tensors, those made as shapes alone included, and their storages."""
        if isinstance(args, Tensor):
            if self.fake and not isinstance(args, FakeTensor):
                args = self.filled.setdefault(id(args), (args, _like(args)))[1]
            return args, {args.untyped_storage()._cdata}
        if isinstance(args, dict):
            found = {name: self._given(value) for name, value in args.items()}
            return {name: value for name, (value, _) in found.items()}, set().union(*(seen for _, seen in found.values()))
        if isinstance(args, (tuple, list)):
            parts = [self._given(value) for value in args]
            return type(args)([value for value, _ in parts]), set().union(*(seen for _, seen in parts))
        return args, set()

    def _made(self, storage: Any, func: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self.live -= size
            self.left -= size * (key in self.gone)
            self.gone.discard(key)
            del self.alive[key]

        self.alive[key] = weakref.ref(storage, freed), func
        self.live += size
        self.peak = max(self.peak, self.live)
        self.passing = max(self.passing, self.live - self.left)

    def leave(self, gradient: Tensor) -> None:
        """A gradient is whole."""
        key = gradient.untyped_storage()._cdata
        if key in self.alive and key not in self.gone:
            self.gone.add(key)
            self.left += gradient.untyped_storage().nbytes()

    def _maker(self, tensor: Tensor) -> Any:
        return self.alive.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        """Tensors without values count as equal where the same operation made both: models/head.py asks whether a head is a product alone."""
        return self._maker(one) is self._maker(other) is not None

    def _nonzero(self, tensor: Tensor) -> Tensor:
        count = tensor.numel() if self.visited is None else min(tensor.numel(), self.visited)
        return self._new(torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64))[:count]

    def _grouped(self, one: Tensor, other: Tensor, offsets: Tensor | None = None, *_: Any) -> Tensor:
        """The product of mixtures of experts; PyTorch's own rule for shapes wants bf16 and sizes that a GPU likes."""
        rows, columns = one.shape[-2], other.shape[-1]
        groups = (
            (len(one),) if one.dim() == other.dim() == 3 else (offsets.numel(),) if one.dim() == other.dim() and offsets is not None else ()
        )
        self.products += 2 * one.numel() * columns
        return self._new(torch.empty(*groups, rows, columns, dtype=one.dtype))

    def _new(self, tensor: Tensor) -> Tensor:
        self._made(tensor.untyped_storage(), None)
        return tensor


_ANSWERS = {
    aten._local_scalar_dense.default: lambda _, tensor: 0.0 if tensor.is_floating_point() else 0,
    aten.equal.default: _Count._equal,
    aten.nonzero.default: _Count._nonzero,
    aten._grouped_mm.default: _Count._grouped,
}
_PRODUCTS = flop_registry | {aten.addmm_: flop_registry[aten.addmm], aten.baddbmm_: flop_registry[aten.baddbmm]}
_ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu: 2, aten._scaled_dot_product_flash_attention_for_cpu_backward: 5}


def _alike(one: Any, other: Any) -> bool:
    """Whether autograd would add the second to the first in place."""
    alike = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
    return alike and sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True)) + 1 == one.numel()  # dense


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _fill(module: nn.Module) -> None:
    """Put fake tensors in the place of a module's own; tied ones stay tied."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    with _FAKE:
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None and id(tensor) not in made:
                        new = _like(tensor)
                        made[id(tensor)] = tensor, nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
                    held[name] = tensor if tensor is None else made[id(tensor)][1]  # pyright: ignore[reportArgumentType]


@contextmanager
def _kernels(gpu: bool) -> Iterator[None]:
    """Within it training-time test's attention (models/training_time_test.py) allocates what FlexAttention does on a GPU: its output and log-sum-exp."""
    before = unroll._Causal

    def apply(query: Tensor, key: Tensor, value: Tensor, start: Tensor, scale: float, budget: int) -> tuple[Tensor, Tensor]:
        found = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
        return found[0], found[1]

    if gpu:
        unroll._Causal = SimpleNamespace(apply=apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        unroll._Causal = before
