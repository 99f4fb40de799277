"""Linear layers with a second copy of their weights, in the layout that the CPU multiplies fastest.

For the few tokens of a decoding round the plain matmul rearranges the complete weight in every call, which takes as long as the
multiplication itself. oneDNN takes a weight that was rearranged once. A call of it takes 15 us before it multiplies, so layers that read the
same input become one product. SmolLM2-135M, all matmuls of a forward, one core of an EPYC (Zen 4), ms at 1 / 8 / 64 tokens: float32
63 / 101 / 326, packed 61 / 64 / 227; bfloat16 58 / 59 / 144, packed 35 / 36 / 121; joining layers then saves
3.3 at 1 token and 3.8 at 8. On another EPYC, with AVX2 alone, one token is slower packed than plain, and 2 to 64 are faster: its complete
forward takes 96 / 167 ms in float32 at 1 / 8 tokens, with 61 of 211 layers packed 96 / 149.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.memory import free_memory

__all__ = ["gain", "pack", "packed_weights"]

MAX_TOKENS = 64  # with more, as in a prompt's chunk, the rearranging is a small part
MIN_GAIN = 1.15  # speedup that is worth a second copy of the weights
MAX_MEMORY_SHARE = 0.25  # of the free memory, for the copy
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # modules of one parent that read one input
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of a product, relative to its largest entry
_PROBED = 128 << 20  # bytes of weights: more than a cache holds
_local = threading.local()


def pack(model: nn.Module) -> list[nn.Linear]:
    """Pack the linear layers of a model -> those that were packed. Only callers within `packed_weights` use them; all others run the plain model.

    Nothing is packed on other devices, for other dtypes than float32 and bfloat16, where the copy would take more than MAX_MEMORY_SHARE of
    the free memory, nor, shape by shape, where the packed product is not right or, for a small tree, not at least MIN_GAIN times as fast. Where
    it is not for one token, which memory bounds, one token uses the plain weight. A layer whose weight or bias is changed or replaced
    afterwards uses the new one, unpacked.
    """
    joined = _joined(model)
    size = sum(layer.weight.numel() * layer.weight.itemsize for layers in joined for layer in layers)
    if not torch.backends.mkldnn.is_available() or size >= MAX_MEMORY_SHARE * free_memory(torch.device("cpu")):
        return []
    by_shape: dict[Any, list[tuple[nn.Linear, ...]]] = defaultdict(list)
    for layers in joined:
        by_shape[layers[0].weight.dtype, *(layer.weight.shape for layer in layers)].append(layers)
    packed: list[nn.Linear] = []
    for group in by_shape.values():
        least = _least_tokens(group)
        for layers in group if least else ():
            product = _Product(layers)
            for number, layer in enumerate(layers):
                layer.__dict__["forward"] = _Forward(layer, product, number, least)
            packed += layers
    return packed


@contextmanager
def packed_weights() -> Iterator[None]:
    """Use packed weights in this thread; may be nested."""
    before = getattr(_local, "active", False)
    _local.active = True
    try:
        yield
    finally:
        _local.active = before


def gain(slow: Sequence[Callable[[], object]], fast: Sequence[Callable[[], object]]) -> float:
    """How many times as fast `fast` is as `slow`, lists of short work. They take turns, and of each piece the shortest time of six counts, since
    other processes disturb all of them.
    """
    shortest = {id(works): [float("inf")] * len(works) for works in (slow, fast)}
    for _ in range(6):
        for works in (slow, fast):
            for number, work in enumerate(works):
                start = time.perf_counter()
                work()
                shortest[id(works)][number] = min(shortest[id(works)][number], time.perf_counter() - start)
    return sum(shortest[id(slow)]) / sum(shortest[id(fast)])


def _joined(model: nn.Module) -> list[tuple[nn.Linear, ...]]:
    """The layers that can be packed, those that read the same input together."""
    joined: dict[nn.Linear, tuple[nn.Linear, ...]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and _can_pack(module):
            joined.setdefault(module, (module,))
        for names in SIBLINGS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(isinstance(layer, nn.Linear) and _can_pack(layer) for layer in layers):
                kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
                if len(kinds) == 1 and len(set(layers)) == len(layers):
                    joined |= dict.fromkeys(layers, tuple(layers))
    return list(dict.fromkeys(joined.values()))


def _can_pack(layer: nn.Linear) -> bool:
    weight, own = layer.weight, type(layer).forward is nn.Linear.forward and "forward" not in layer.__dict__
    if not own or type(weight) is not nn.Parameter or weight.device.type != "cpu":
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Product:
    """The weights of layers that read the same input, as one packed matrix."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.dtype = layers[0].weight.dtype
        self.sizes = [layer.out_features for layer in layers]
        self._parameters = [(layer._parameters, name) for layer in layers for name in ("weight", "bias")]
        with torch.no_grad():
            weights: list[Tensor] = [layer.weight for layer in layers]
            biases: list[Any] = [layer.bias for layer in layers]
            self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights) if len(layers) > 1 else weights[0], 8)
            self.bias = None if biases[0] is None else torch.cat(biases)
        self._packed_from = self._state()
        # The last input, and what the layers that have not run on it yet will return: none is returned twice.
        self._waiting: tuple[Tensor | None, list[Tensor | None]] = None, []

    def _state(self) -> list[tuple[int, int, torch.dtype] | None]:
        tensors = [parameters[name] for parameters, name in self._parameters]
        return [None if tensor is None else (tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in tensors]

    @property
    def current(self) -> bool:
        """Whether weights and biases are still those that were packed."""
        return self._state() == self._packed_from

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [...,in] -> [...,out] of each layer."""
        out = _multiply(x, self.packed, self.bias)
        return (out,) if len(self.sizes) == 1 else out.split(self.sizes, -1)

    def output(self, number: int, x: Tensor) -> Tensor | None:
        """x [...,in] -> [...,out] of one layer; None if the weights have changed."""
        source, waiting = self._waiting
        if source is x and (out := waiting[number]) is not None:
            waiting[number] = None
            return out
        if not self.current:
            return None
        outputs: list[Any] = list(self.outputs(x))
        out, outputs[number] = outputs[number], None
        self._waiting = (x, outputs) if len(outputs) > 1 else (None, [])
        return out


class _Forward:
    """The forward of one layer. A copy of the layer gets the plain forward: packed tensors can be neither copied nor pickled."""

    def __init__(self, layer: nn.Linear, product: _Product, number: int, least: int) -> None:
        self.layer, self.product, self.number, self.least = layer, product, number, least

    def __call__(self, x: Tensor) -> Tensor:
        usable = getattr(_local, "active", False) and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        if usable and x.dtype == self.product.dtype and x.dim() > 1 and self.least <= x.shape[:-1].numel() <= MAX_TOKENS:
            out = self.product.output(self.number, x)
            if out is not None:
                return out
        return nn.functional.linear(x, self.layer.weight, self.layer.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[Tensor], Tensor]:
        return partial(nn.Linear.forward, memo[id(self.layer)])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (nn.Linear.forward, self.layer)


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _least_tokens(group: Sequence[tuple[nn.Linear, ...]]) -> int:
    """The fewest tokens, 1 or 2, for which the packed product of layers of one shape is used; 0 if it is not right, or does not pay."""
    size = sum(layer.weight.numel() * layer.weight.itemsize for layer in group[0])
    sample = [(layers, _Product(layers)) for layers in group[: min(64, 1 + _PROBED // size)]]
    gains = []
    with torch.no_grad():
        for tokens in (1, 8):
            x = torch.randn(tokens, group[0][0].in_features, dtype=group[0][0].weight.dtype)

            plain = [partial(_separately, x, layers) for layers, _ in sample]
            quick = [partial(_joint, x, product) for _, product in sample]
            expected, got = ([output for work in works for output in work()] for works in (plain, quick))
            if not all(map(_close, expected, got)):
                return 0
            gains.append(gain(plain, quick))
    return 0 if gains[1] < MIN_GAIN else 1 if gains[0] >= MIN_GAIN else 2


def _separately(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    return [nn.functional.linear(x, layer.weight, layer.bias) for layer in layers]


def _joint(x: Tensor, product: _Product) -> list[Any]:
    return [product.output(number, x) for number in range(len(product.sizes))]


def _close(expected: Tensor, got: Tensor) -> bool:
    return bool((expected - got).abs().max() <= TOLERANCE[expected.dtype] * expected.abs().max())
