"""FLOPs of PyTorch's operations: torch's own formulas (torch.utils.flop_counter), and those of operations that it leaves out.

Letters: B rows of a batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import addmm_flop, baddbmm_flop, flop_registry

__all__ = ["CPU_ATTENTION", "FORMULAS", "MATMULS", "causal_attention_flops"]

aten = torch.ops.aten


def _attention(queries: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> int:
    """Two matmuls. Queries are [B,heads,positions,dim]; keys and values may have fewer heads, which torch 2.11's own formula refuses."""
    return 2 * queries.shape[:-1].numel() * keys.shape[-2] * (queries.shape[-1] + values.shape[-1])


def _attention_backward(grad_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> int:
    """Five matmuls: the scores once more, and the gradients of scores, values, queries and keys."""
    return 2 * queries.shape[:-1].numel() * keys.shape[-2] * (3 * queries.shape[-1] + 2 * values.shape[-1])


GPU_ATTENTION: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(
        (
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_cudnn_attention,
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _attention_backward,
    ),
}
# train/losses/chunked.py makes gradients with the operations in place.
MATMULS: dict[Any, Callable[..., int]] = flop_registry | GPU_ATTENTION | {aten.addmm_: addmm_flop, aten.baddbmm_: baddbmm_flop}
CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
FORMULAS: dict[Any, Callable[..., int]] = MATMULS | CPU_ATTENTION  # attention in full, causal or not


def causal_attention_flops(operation: Any, args: tuple[Any, ...]) -> int:
    """FLOPs of a causal attention on the CPU, forward or backward, without the scores that the mask drops.

    The last n of C positions see C − n/2 positions on average; more queries than positions (blocks at anchors) see C/2. Each costs 2 · dim for the score and as much for the value; the backward pass
    costs 2.5 times as much.

    Args:
        operation: a key of `CPU_ATTENTION`.
        args: its arguments: queries, keys, … or, backward, the gradient of the output, queries, keys, …
    """
    backward = operation is aten._scaled_dot_product_flash_attention_for_cpu_backward
    queries: Tensor = args[1] if backward else args[0]
    keys: Tensor = args[2] if backward else args[1]
    factor = 5 if backward else 2
    return factor * queries.numel() * (2 * keys.shape[-2] - min(queries.shape[-2], keys.shape[-2]))
