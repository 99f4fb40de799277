"""Context parallelism: the ranks of a group share rows by position, for rows that do not fit in one GPU's memory.

Rank c of a group of G holds positions c·S/G … (c+1)·S/G − 1 of the group's rows, and everything that training-time test computes there. Of
other positions a query sees only step 0's keys and values (models/training_time_test.py). Those are gathered once per layer, and their
gradients are summed on the rank that made them, as in Llama 3 (https://arxiv.org/abs/2407.21783, §3.3.2). torch's `context_parallel` and
Accelerate's `cp_size` are for causal SDPA and refuse or drop masks, which packed documents need.

Token ids, masks and the target's features are not split, and the target runs on full rows in each rank of a group: for long rows,
capture its features first (features.mode=offline). In rows of one long document the last rank's queries see (2G − 1)/G times the mean
number of keys.

Letters: B rows · S positions · G ranks of a group · n = S/G positions of a rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """One rank of a group that shares its rows.

    Attributes:
        rank: c, its number in the group.
        size: G.
        group: the process group; None for a single rank, and for `draftsmith plan`, which only computes shapes.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def part(self, positions: int, more: int = 0) -> slice:
        """This rank's positions of S = `positions`, and up to `more` behind them. Raises ValueError where G does not divide S."""
        each, rest = divmod(positions, self.size)
        if rest:
            raise ValueError(f"got rows of {positions} positions for {self.size} ranks; expected a multiple of them")
        return slice(self.rank * each, min((self.rank + 1) * each + more, positions))

    def upto(self, part: Tensor) -> Tensor:
        """Keys or values of this rank's positions [B,heads,n,dim] -> those of all positions up to its last [B,heads,(rank+1)·n,dim].

        Differentiable. All ranks of the group call it, forward and backward, in the same order.
        """
        return part if self.size == 1 else _UpTo.apply(part, self)


SINGLE_RANK = ContextParallel()


class _UpTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(context.size)]
        if context.group is not None:
            dist.all_gather(parts, part.contiguous(), group=context.group)
        return torch.cat(parts[: context.rank + 1], 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        context: ContextParallel = ctx.context
        seen = [grad.contiguous() for grad in grads[0].chunk(context.rank + 1, 2)]
        later = [torch.zeros_like(seen[0])] * (context.size - len(seen))
        own = torch.empty_like(seen[0])
        if context.group is not None:
            dist.reduce_scatter(own, seen + later, group=context.group)
        return own, None
