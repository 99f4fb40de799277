"""Losses over the vocabulary that never hold [M,V]: positions go through the head in chunks.

A loss that is a sum over positions needs each chunk's logits once. Its gradient is computed with it, in the forward; nothing is
recomputed, and only the gradients are stored (as in Liger kernels, https://arxiv.org/abs/2410.10989). Where kernels are on
(`draftsmith.inference.kernels`), `losses.kernels` computes both; the steps here are its reference implementation.

Letters: M positions (batch and sequence flattened), m of them in a chunk, V vocabulary, H hidden size, K heads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from draftsmith.inference.expand import ranked
from draftsmith.inference.kernels import active
from draftsmith.inference.sampler import best_token, on_host
from draftsmith.train.losses.mixture import FLOOR

Head = Tensor | Callable[[Tensor], Tensor]  # a weight [V,H], or hidden [m,H] -> logits [m,V]

# Elements of one chunk of logits, on a CPU and on a GPU: 32 and 128 MiB in fp32, small beside any model. A GPU waits for the host where
# operations are smaller.
BUDGET, GPU_BUDGET = 1 << 23, 1 << 25

# Rows of a chunk, however few positions there are: a product of fewer with the head [V,H] is bound by reading the head. On the toy (V 2,048, 512
# tokens a step) EAGLE-3's forward and loss take 98 ms with 32 rows, 79 with 256, 99 with 512. At V 49,152 and H 576, on one thread, a bf16 product
# of 64 rows runs at 0.36 TFLOP/s, of 128 at 0.42, of 256 at 0.46; Medusa's loss takes 2.78 s with 64 rows and 2.56 with 170, the most in BUDGET.
ROWS, GPU_ROWS = 256, 1024

# Elements of a tensor in a pass over a chunk on a CPU: beyond some MiB each operation waits for memory, and fresh memory for the system.
PIECE = 1 << 18


class ChunkedLoss(NamedTuple):
    """A loss and how often the head was right.

    Attributes:
        sum: Σ weight · loss, a scalar to call backward on, once.
        hits: [M] bool, True where weight > 0 and the head's best token is the label.
    """

    sum: Tensor
    hits: Tensor


def chunked_cross_entropy(hidden: Tensor, head: Head, labels: Tensor, weight: Tensor, *, budget: int | None = None) -> ChunkedLoss:
    """Σ weight · −log softmax(head(hidden))[labels], as F.cross_entropy gives it on all logits at once.

    Gradients go to `hidden` and to the head's weight, or to the leaf tensors that a callable head uses. Softmax and sums are in fp32
    (fp64 for fp64 inputs). On the CPU, positions of weight 0 are skipped.

    Args:
        hidden: [M,H].
        head: weight [V,H], or a callable from [m,H] to logits [m,V].
        labels: [M] int64, any value where the weight is 0.
        weight: [M].
        budget: logits in one chunk, at most; None: what suits the device.
    """
    part = ChunkedHead(hidden, head)
    weight = weight.to(part.sum_dtype)
    positions = rows_to_visit(weight > 0)
    labels = torch.where(weight > 0, labels, 0)
    hits = torch.zeros_like(labels, dtype=torch.bool)
    rows = chunk_rows(labels.numel(), part.vocab_size, on_host(labels), budget)

    def fused(index: Tensor) -> Tensor:
        right, scale = labels[index], weight[index]
        values, hits[index] = _fused(part, index, None, right, scale, "nll")
        return (values * scale).sum()

    def step(index: Tensor) -> Tensor:
        right, scale = labels[index][:, None], weight[index][:, None]
        used = scale > 0
        raw = part.raw(index, used.squeeze(1))
        gradient, best = torch.empty_like(raw), torch.empty_like(right)
        loss = scale.new_zeros(len(index), 1)
        for rows in pieces(raw):
            logits = raw[rows].to(part.sum_dtype)
            best[rows] = best_token(logits)[:, None]
            logp = logits.log_softmax(-1)
            # where, not a multiplication: a head may give −inf.
            loss[rows] = -torch.where(used[rows], logp.gather(1, right[rows]) * scale[rows], 0)
            if part.needs_grad:
                gradient[rows] = logp.exp_().mul_(scale[rows]).scatter_add_(1, right[rows], -scale[rows])
        hits[index] = ((best == right) & used).squeeze(1)
        if part.needs_grad:
            part.backward(index, gradient)
        return loss.sum()

    return ChunkedLoss(summed_in_chunks([part], positions, rows, fused if part.fused else step)[0], hits)


def chunked_kl(
    draft_hidden: Tensor,
    draft_head: Head,
    target_hidden: Tensor,
    target_head: Head,
    weight: Tensor,
    *,
    budget: int | None = None,
) -> ChunkedLoss:
    """Σ weight · KL(target ‖ draft).

    Gradients go to the drafter alone. A hit is agreement on the best token.

    Args:
        draft_hidden: [M,·], with `draft_head`.
        target_hidden: [M,·], with `target_head`.
        weight: [M].
        budget: logits in one chunk, at most; None: what suits the device.
    """
    return chunked_kl_heads([draft_hidden], [draft_head], target_hidden, target_head, [weight], [0], budget=budget)[0]


def chunked_kl_heads(
    draft_hidden: Sequence[Tensor],
    draft_heads: Sequence[Head],
    target_hidden: Tensor,
    target_head: Head,
    weights: Sequence[Tensor],
    shifts: Sequence[int],
    *,
    top_k: int = 0,
    budget: int | None = None,
) -> list[ChunkedLoss]:
    """`chunked_kl` for K heads that share one pass of the target's head.

    Row t of head k is compared with the target's row t + shifts[k]. Medusa's head k, from 0, predicts token t+2+k: its shift is k+1.
    A pair past the last row is dropped; a pair that crosses from one document into another must have weight 0.
    The K sums share one graph node: add them up before backward.

    Args:
        draft_hidden, weights: K tensors [M,H] with K `draft_heads`, and K tensors [M].
        draft_heads: K heads, or one that serves all: then a single loss is returned, with hits [K·M], and the head has one gradient.
        target_hidden: [M,·], with `target_head`.
        shifts: K numbers ≥ 0.
        top_k: cut the target's distribution to its k likeliest tokens, and renormalise it; 0: all.

    Raises:
        ValueError: a negative shift, or lists of different lengths.
    """
    heads, tied = len(draft_hidden), len(draft_heads) == 1
    _check_heads(heads, len(draft_heads), len(weights), shifts)
    distinct = [ChunkedHead(hidden, head) for hidden, head in zip(_stacked(draft_hidden, tied), draft_heads, strict=True)]
    parts = distinct * heads if tied else distinct
    with torch.no_grad():
        target = ChunkedHead(target_hidden.detach(), target_head)
    rows, weight = aligned(torch.stack([weight.to(parts[0].sum_dtype) for weight in weights]), shifts)
    if tied:
        rows = rows + len(target_hidden) * torch.arange(heads, device=rows.device)[:, None]
    used = weight > 0
    hits = torch.zeros_like(used)

    def fused(index: Tensor) -> Tensor:
        from draftsmith.train.losses.kernels import target_distribution

        raw = target.raw(index, used[:, index].any(0))
        least = least_of(raw, top_k).squeeze(1) if top_k else None
        shared, sums = target_distribution(raw, weight[:, index], least=least), []
        for k, part in enumerate(parts):
            scale = weight[k, index]
            values, hits[k, index] = _fused(part, rows[k, index], shared, None, scale, "kl")
            sums.append((values * scale).sum())
        return by_part(sums)

    def step(index: Tensor) -> Tensor:
        target_rows, sums = _TargetRows(target.raw(index, used[:, index].any(0)), top_k, parts[0].sum_dtype), []
        for k, part in enumerate(parts):
            row, scale, supervised = rows[k, index], weight[k, index], used[k, index]
            raw = part.raw(row, supervised)
            values, agreed, gradient = target_rows.kl(raw, scale, part.needs_grad)
            hits[k, index] = agreed & supervised
            sums.append(torch.where(supervised, values * scale, 0).sum())
            if gradient is not None:
                part.backward(row, gradient)
        return by_part(sums)

    def by_part(sums: list[Tensor]) -> Tensor:
        return torch.stack(sums).sum(0, keepdim=True) if tied else torch.stack(sums)

    size = chunk_rows(len(target_hidden), target.vocab_size, on_host(target_hidden), budget)
    way = fused if all(part.fused for part in parts) else step
    total = summed_in_chunks(distinct, rows_to_visit(used.any(0)), size, way)
    return [ChunkedLoss(loss, hit) for loss, hit in zip(total.unbind(), _stacked(by_row(hits, shifts).unbind(), tied), strict=True)]


class _TargetRows:
    """The target's distributions at the m rows of a chunk, cut to top_k, from its logits raw [m,V]."""

    def __init__(self, raw: Tensor, top_k: int, dtype: torch.dtype) -> None:
        self.raw, self.top_k, self.dtype = raw, top_k, dtype
        self.best = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
        self.log_sum = torch.empty(len(raw), 1, dtype=dtype, device=raw.device)
        for rows in pieces(raw):
            logits = self._logits(rows)
            self.best[rows], self.log_sum[rows] = best_token(logits), logits.logsumexp(-1, keepdim=True)

    def _logits(self, rows: slice) -> Tensor:
        return cut(self.raw[rows].to(self.dtype), self.top_k)

    def kl(self, raw: Tensor, weight: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """KL(target ‖ draft) [m], whether both have the same best token [m], and weight · the gradient, from draft logits [m,V]."""
        values, agreed = torch.empty_like(weight), torch.empty_like(weight, dtype=torch.bool)
        gradient = torch.empty_like(raw) if needs_grad else None
        for rows in pieces(raw, 4):
            target_logp, logits = (self._logits(rows) - self.log_sum[rows]).clamp_(min=FLOOR), raw[rows].to(self.dtype)
            target_p, logp = target_logp.exp(), logits.log_softmax(-1).clamp_(min=FLOOR)
            agreed[rows] = best_token(logits) == self.best[rows]
            values[rows] = target_logp.sub_(logp).mul_(target_p).sum(-1)
            if gradient is not None:
                gradient[rows] = logp.exp_().sub_(target_p).mul_(weight[rows, None])
        return values, agreed, gradient


def _check_heads(hidden: int, heads: int, weights: int, shifts: Sequence[int]) -> None:
    if not hidden == weights == len(shifts) or heads not in (1, hidden) or min(shifts, default=0) < 0:
        raise ValueError(
            f"got {hidden} hidden states, {heads} heads, {weights} weights and shifts {list(shifts)}; "
            "expected one of each per head and shifts >= 0"
        )


def _stacked(tensors: Sequence[Tensor], tied: bool) -> Sequence[Tensor]:
    """The tensors, or where heads are tied all of them joined into one."""
    return [torch.cat(tuple(tensors))] if tied and len(tensors) > 1 else tensors


def _fused(part: "ChunkedHead", row: Tensor, target: Any, text: Tensor | None, weight: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Losses and hits [m] of one head at a chunk of its rows, by `losses.kernels`; the gradients are added to `part`."""
    from draftsmith.train.losses.kernels import with_gradients

    logits = part.raw(row, weight > 0)
    result = with_gradients(logits[None], target, text, weight[None], weight[None], {loss: 1.0}, part.needs_grad)
    if part.needs_grad:
        part.backward(row, logits)
    return result.loss[0], result.hits[0]


def chunk_rows(positions: int, vocab_size: int, host: bool, budget: int | None = None) -> int:
    """Rows of one chunk: at most `budget` logits (BUDGET or GPU_BUDGET), and ROWS (GPU_ROWS) or a sixteenth of all positions, so that no
    tensor comes near M·V where that is large."""
    most, rows = (BUDGET, ROWS) if host else (GPU_BUDGET, GPU_ROWS)
    return max(1, min((most if budget is None else budget) // vocab_size, max(positions // 16, rows)))


def pieces(rows: Tensor, copies: int = 1) -> list[slice]:
    """Slices of `rows` [m,n] that stay in a CPU's cache, at most PIECE / copies elements each; on a GPU all rows at once."""
    count = max(1, PIECE // (copies * rows.shape[1])) if rows.device.type == "cpu" else len(rows)
    return [slice(first, first + count) for first in range(0, len(rows), max(1, count))]


class ChunkedHead:
    """One head on its hidden states [M,H], with the gradients that its chunks add up."""

    def __init__(self, hidden: Tensor, head: Head) -> None:
        self.weight: Tensor | None = None
        self.function: Callable[[Tensor], Tensor] | None = None
        if isinstance(head, Tensor):
            # Autocast would cast the weight anew for every chunk.
            autocast = torch.is_autocast_enabled(hidden.device.type)
            dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else head.dtype
            self.weight, self.leaves, self.vocab_size = head.detach().to(dtype), [head], head.shape[0]
            self.hidden = hidden.detach().to(dtype)
        else:
            self.hidden, self.function = hidden.detach(), head
            self.leaves, self.vocab_size = _leaves(head, self.hidden[:1])
        self.sum_dtype = torch.float64 if self.hidden.dtype == torch.float64 else torch.float32
        self.fused = active() and self.sum_dtype == torch.float32
        self.inputs: list[Tensor] = [hidden, *self.leaves]
        self.needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)
        self.grads: list[Tensor | None] = [
            torch.zeros(t.shape, dtype=self.sum_dtype, device=t.device) if self.needs_grad and t.requires_grad else None
            for t in self.inputs
        ]
        self._chunk: tuple[Tensor, Tensor] | None = None

    def raw(self, index: Tensor, used: Tensor) -> Tensor:
        """Logits [m,V] of positions index [m] in the head's dtype, without a graph; hidden states count as 0 where used [m] is False."""
        # Padding may hold inf or NaN; either times 0 is NaN in the head's gradient.
        x = torch.where(used[:, None], self.hidden[index], 0)
        if self.weight is not None:
            with torch.autocast(x.device.type, enabled=False):
                raw = x @ self.weight.T
        else:
            with torch.set_grad_enabled(self.needs_grad):
                x.requires_grad_(self.needs_grad)
                assert self.function is not None
                raw = self.function(x)
        self._chunk = (x, raw)
        if self.fused and self.needs_grad and self.function is not None:
            # Kernels write gradients over logits, and the backward of a callable may need the logits.
            return raw.detach().clone(memory_format=torch.contiguous_format)
        return raw.detach().contiguous() if self.fused else raw.detach()

    def backward(self, index: Tensor, dlogits: Tensor) -> None:
        """Add the gradients of the chunk that `raw` computed last, given dlogits [m,V]."""
        assert self._chunk is not None
        (x, raw), self._chunk = self._chunk, None
        dlogits = dlogits.to(raw.dtype)
        if self.weight is None:
            inputs = [x, *self.leaves]
            chosen = [i for i, grad in enumerate(self.grads) if grad is not None]
            grads = torch.autograd.grad(raw, [inputs[i] for i in chosen], dlogits)
            for i, grad in zip(chosen, grads, strict=True):
                self._add(i, index, grad)
            return
        with torch.autocast(x.device.type, enabled=False):
            if self.grads[0] is not None:
                self._add(0, index, dlogits @ self.weight)
            if self.grads[1] is not None and raw.dtype == self.sum_dtype:
                self.grads[1].addmm_(dlogits.T, x)
            elif self.grads[1] is not None:
                for tokens in pieces(self.weight):
                    self.grads[1][tokens].add_(dlogits[:, tokens].T @ x)

    def _add(self, i: int, index: Tensor, grad: Tensor) -> None:
        total = self.grads[i]
        assert total is not None
        if i == 0:
            total.index_add_(0, index, grad.to(total.dtype))
        else:
            total.add_(grad)


class Differentiated(Protocol):
    """Something whose gradients were computed in the forward: of each input, or None."""

    inputs: list[Tensor]
    grads: list[Tensor | None]


class _InForward(torch.autograd.Function):
    """Sums [P] of P parts whose gradients were computed in the forward; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, parts: Sequence[Differentiated], *inputs: Tensor) -> Tensor:
        ctx.parts = parts
        return sums.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        if ctx.parts is None:
            raise RuntimeError("a chunked loss was differentiated twice; expected one backward; compute the loss again")
        parts, ctx.parts = ctx.parts, None
        grads: list[Tensor | None] = []
        for part, scale in zip(parts, grad_outputs[0].unbind(), strict=True):
            for tensor, grad in zip(part.inputs, part.grads, strict=True):
                grads.append(None if grad is None else grad.mul_(scale).to(tensor.dtype))
            part.grads = []
        return None, None, *grads


def summed_in_chunks(parts: list[ChunkedHead], positions: Tensor, rows: int, step: Callable[[Tensor], Tensor]) -> Tensor:
    """Run `step` over chunks of `positions`, `rows` at a time, and join its sums [P] to the graph of the P parts' inputs."""
    with torch.no_grad():
        sums = torch.zeros(len(parts), dtype=parts[0].sum_dtype, device=positions.device)
        for index in positions.split(rows):
            if len(index):
                sums += step(index)
    return joined(sums, parts) if any(part.needs_grad for part in parts) else sums


def joined(sums: Tensor, parts: Sequence["Differentiated"]) -> Tensor:
    """Sums [P] of P parts whose gradients are known, as part of the graph of their inputs."""
    return _InForward.apply(sums, parts, *(tensor for part in parts for tensor in part.inputs))


def rows_to_visit(used: Tensor) -> Tensor:
    """Positions to visit: on the CPU those that are used; on a GPU all of them, since `nonzero` would synchronise."""
    return used.nonzero().squeeze(1) if used.device.type == "cpu" else torch.arange(len(used), device=used.device)


def aligned(weights: Tensor, shifts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """For each head and each row of the target: the row of hidden compared with it [K,M], and its weight [K,M], 0 where there is none.

    Args:
        weights: [K,M] by row of hidden. Row t of head k is compared with the target's row t + shifts[k].
        shifts: K numbers ≥ 0.
    """
    row = torch.arange(weights.shape[1], device=weights.device) - torch.tensor(shifts, device=weights.device)[:, None]
    return row.clamp(min=0), weights.gather(1, row.clamp(min=0)).masked_fill(row < 0, 0)


def by_row(values: Tensor, shifts: Sequence[int]) -> Tensor:
    """Reorder values [K,M] from rows of the target to rows of hidden; 0 (or False) where the target has no row."""
    positions = values.shape[1]
    row = torch.arange(positions, device=values.device) + torch.tensor(shifts, device=values.device)[:, None]
    return values.gather(1, row.clamp(max=positions - 1)).masked_fill(row >= positions, 0)


def cut(logits: Tensor, top_k: int) -> Tensor:
    """logits [...,V], in a new tensor −∞ below the k-th best of each row, with all that tie with it; themselves where top_k is 0."""
    return logits.masked_fill(logits < least_of(logits, top_k), -torch.inf) if top_k else logits


def least_of(logits: Tensor, top_k: int) -> Tensor:
    """The k-th best logit of each row [...,1], the least that a cut leaves."""
    return logits.gather(-1, ranked(logits, min(top_k, logits.shape[-1]))[..., -1:])


def _leaves(head: Callable[[Tensor], Tensor], row: Tensor) -> tuple[list[Tensor], int]:
    """Leaf tensors that require a gradient behind a callable head, and V, both from the graph of one row."""
    with torch.enable_grad():
        row = row.detach().requires_grad_()
        logits = head(row)
    leaves: list[Tensor] = []
    seen, queue = set(), [cast(Any, logits.grad_fn)]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = node.variable if "AccumulateGrad" in node.name() else None
        if leaf is not None and leaf is not row:
            leaves.append(leaf)
        queue.extend(parent for parent, _ in node.next_functions)
    return leaves, logits.shape[-1]
