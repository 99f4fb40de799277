"""A loss over positions, block by block: the gradient of a block is computed before the next one begins, so that one block's activations
are in memory at a time.

Letters: M positions (batch and sequence flattened), m of them in a block · H hidden size · K heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.train.losses.chunked import joined

__all__ = ["BUDGET", "in_blocks"]

BUDGET = 1 << 25  # elements of one block's activations: 128 MiB in fp32


@dataclass(eq=False)
class _Blocks:
    inputs: list[Tensor]
    grads: list[Tensor | None]


def in_blocks(
    loss_of: Callable[[Tensor, dict[str, Tensor], slice, slice], tuple[Tensor, Tensor]],
    hidden: Tensor,
    parameters: Mapping[str, Tensor],
    rows: int,
    ahead: int,
) -> tuple[Tensor, Tensor]:
    """Σ over blocks of loss_of, joined to the graph of `hidden` and `parameters`.

    Args:
        loss_of: (hidden [m,H] of the positions to read, the parameters, these positions, the block's own positions) -> the loss of the
            block's own positions, a scalar, and hits [...,·] of any kinds. It may have hits for the positions behind them too.
        hidden: [M,H].
        parameters: what the loss depends on besides, by name. `loss_of` gets leaves of its own in their place, complete under every launcher.
        rows: positions of a block.
        ahead: how many positions behind its own a block reads.

    Returns:
        The sum, a scalar to call backward on, once; hits [...,M].
    """
    reads_gradient = torch.is_grad_enabled() and hidden.requires_grad
    leaves = {name: tensor.detach().requires_grad_(torch.is_grad_enabled() and tensor.requires_grad) for name, tensor in parameters.items()}
    trained = [name for name, leaf in leaves.items() if leaf.requires_grad]
    needs_grad = reads_gradient or bool(trained)
    of_hidden, of_parameters = torch.zeros_like(hidden) if reads_gradient else None, []
    total, hits = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device), []
    for first in range(0, len(hidden), rows):
        own = slice(first, min(first + rows, len(hidden)))
        read = slice(first, min(own.stop + ahead, len(hidden)))
        part = hidden[read].detach().requires_grad_(reads_gradient)
        with torch.set_grad_enabled(needs_grad):
            loss, hit = loss_of(part, leaves, read, own)
        total += loss.detach()
        hits.append(hit[..., : own.stop - own.start])
        if needs_grad:
            inputs = [leaves[name] for name in trained] + [part] * reads_gradient
            grads = list(torch.autograd.grad(loss, inputs))
            if of_hidden is not None:
                of_hidden[read] += grads.pop()
            of_parameters = [before.add_(grad) for before, grad in zip(of_parameters, grads, strict=True)] if of_parameters else grads
            del grads  # before the next block's are made
    if needs_grad:
        total = joined(total[None], [_Blocks([hidden, *(parameters[name] for name in trained)], [of_hidden, *of_parameters])])[0]
    return total, torch.cat(hits, -1)
