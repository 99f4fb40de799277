"""FLOPs of PyTorch's operations: torch's own formulas (torch.utils.flop_counter), and those of operations that it leaves out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import addmm_flop, baddbmm_flop, flop_registry, sdpa_backward_flop, sdpa_flop

__all__ = ["CPU_ATTENTION", "FORMULAS", "MATMULS", "causal_attention_flops"]

aten = torch.ops.aten
# train/losses/chunked.py makes gradients with the operations in place.
MATMULS: dict[Any, Callable[..., int]] = flop_registry | {aten.addmm_: addmm_flop, aten.baddbmm_: baddbmm_flop}
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
FORMULAS: dict[Any, Callable[..., int]] = MATMULS | CPU_ATTENTION  # attention in full, causal or not


def causal_attention_flops(operation: Any, args: tuple[Any, ...]) -> int:
    """FLOPs of a causal attention on the CPU, forward or backward, without the scores that the mask drops.

    The last n of C positions see C − n/2 positions on average. Each costs 2 · dim for the score and as much for the value; the backward pass
    costs 2.5 times as much.

    Args:
        operation: a key of `CPU_ATTENTION`.
        args: its arguments: queries, keys, … or, backward, the gradient of the output, queries, keys, …
    """
    backward = operation is aten._scaled_dot_product_flash_attention_for_cpu_backward
    queries: Tensor = args[1] if backward else args[0]
    keys: Tensor = args[2] if backward else args[1]
    factor = 5 if backward else 2
    return factor * queries.numel() * (2 * keys.shape[-2] - queries.shape[-2])
