"""Linear layers with a second copy of their weights, in the layout that the CPU multiplies fastest.

For the few tokens of a decoding round the plain matmul rearranges the complete weight in every call, which takes as long as the
multiplication itself. oneDNN takes a weight that was rearranged once (256 to 768, one AMD core: 103 → 45 us for 5 tokens, 52 → 33 for one).
"""

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PackedLinears"]

MAX_TOKENS = 64  # with more, as in a prompt's chunk, the rearranging is a small part
MIN_GAIN = 1.15  # speedup that is worth a second copy of the weights
MAX_MEMORY_SHARE = 0.25  # of the free memory, for the copy


class PackedLinears:
    """The packed weights of a model's linear layers. They are used only within `on()`, so that all other callers run the plain model.

    Nothing is packed on other devices, for other dtypes than float32, where the packed matmul is not at least MIN_GAIN times as fast, or where
    the copy would take more than MAX_MEMORY_SHARE of the free memory. A layer whose weight is changed or replaced afterwards uses the new
    weight, unpacked.
    """

    def __init__(self, model: nn.Module) -> None:
        self._depth = threading.local()
        layers = [module for module in model.modules() if type(module) is nn.Linear and module.weight.dtype == torch.float32]
        layers = [layer for layer in layers if layer.weight.device.type == "cpu" and "forward" not in layer.__dict__]
        size = sum(layer.weight.numel() * 4 for layer in layers)
        self.layers = layers if layers and size < MAX_MEMORY_SHARE * _free_memory() and _pays(layers) else []
        for layer in self.layers:
            layer.__dict__["forward"] = _Forward(layer, self)

    @property
    def active(self) -> bool:
        return getattr(self._depth, "count", 0) > 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Use the packed weights in this thread; may be nested."""
        self._depth.count = getattr(self._depth, "count", 0) + 1
        try:
            yield
        finally:
            self._depth.count -= 1


class _Forward:
    """The forward of one layer. A copy of the layer gets the plain forward: packed tensors can be neither copied nor pickled."""

    def __init__(self, layer: nn.Linear, packing: PackedLinears) -> None:
        self.layer, self.packing = layer, packing
        self.packed, self.packed_from = _pack(layer.weight), self._state()

    def _state(self) -> tuple[int, int, torch.dtype]:
        weight = self.layer.weight
        return weight.data_ptr(), weight._version, weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        usable = self.packing.active and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        if usable and x.dtype == torch.float32 and x.dim() > 1 and x.shape[:-1].numel() <= MAX_TOKENS and self._state() == self.packed_from:
            return _multiply(x, self.packed, layer.bias)
        return nn.functional.linear(x, layer.weight, layer.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[Tensor], Tensor]:
        return functools.partial(nn.Linear.forward, memo[id(self.layer)])

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (nn.Linear.forward, self.layer)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, 8)


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _pays(layers: list[nn.Linear]) -> bool:
    """Whether the packed matmul is available, correct and faster, on enough layers to leave the cache."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    sample = layers[:64]
    packed = [_pack(layer.weight) for layer in sample]
    inputs = [torch.randn(6, layer.in_features) for layer in sample]

    def plain() -> list[Tensor]:
        return [nn.functional.linear(x, layer.weight, layer.bias) for x, layer in zip(inputs, sample, strict=True)]

    def quick() -> list[Tensor]:
        return [_multiply(x, weight, layer.bias) for x, weight, layer in zip(inputs, packed, sample, strict=True)]

    with torch.no_grad():
        right = all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(plain(), quick(), strict=True))
        return right and _seconds(plain) > MIN_GAIN * _seconds(quick)


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _free_memory() -> int:
    """Bytes of free memory; 0, so that nothing is packed, where there is no /proc/meminfo."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except OSError:
        return 0
