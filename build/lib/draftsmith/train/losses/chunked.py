"""Losses over the vocabulary that never hold [M,V]: positions go through the head in chunks, gradients are made on the way.

A loss that is a sum over positions needs each chunk's logits once: its gradient follows in the same breath, so nothing is
recomputed and nothing is kept but the gradients themselves (as in Liger kernels, https://arxiv.org/abs/2410.10989). Where kernels are in
use (`draftsmith.inference.kernels`), `loss_kernels` makes both; the steps here are its twins.

Letters: M positions (rows and sequence flattened) · V vocabulary · H hidden size · K heads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from draftsmith.inference.expand import ranked
from draftsmith.inference.kernels import active

Head = Tensor | Callable[[Tensor], Tensor]  # a weight [V,H], or hidden [m,H] -> logits [m,V]

# Elements of one chunk of logits: 32 MiB in fp32, small beside any model and large enough for full speed.
BUDGET = 1 << 23


class ChunkedLoss(NamedTuple):
    """sum: Σ weight · loss, a scalar to call backward on (once) · hits [M] bool: weight > 0 and the head's best token is the right one."""

    sum: Tensor
    hits: Tensor


def chunked_cross_entropy(hidden: Tensor, head: Head, targets: Tensor, weight: Tensor, *, budget: int = BUDGET) -> ChunkedLoss:
    """Σ weight · −log softmax(head(hidden))[targets], as F.cross_entropy gives it on all logits at once.

    hidden [M,H], targets [M] int64 (any value where weight is 0), weight [M]. Gradients go to hidden and to the head's
    weight, or to whatever leaves a callable head uses. Softmax and sums are in fp32 (fp64 for fp64 inputs).
    On the CPU positions of weight 0 are skipped.
    """
    part = ChunkedHead(hidden, head)
    weight = weight.to(part.sum_dtype)
    at = rows_to_visit(weight > 0)
    targets = torch.where(weight > 0, targets, 0)
    hits = torch.zeros_like(targets, dtype=torch.bool)
    rows = chunk_rows(targets.numel(), part.vocab_size, budget)

    def fused(index: Tensor) -> Tensor:
        right, scale = targets[index], weight[index]
        values, hits[index] = _fused(part, index, None, right, scale, scale, "nll")
        return (values * scale).sum()

    def step(index: Tensor) -> Tensor:
        right, scale = targets[index][:, None], weight[index][:, None]
        counts = scale > 0
        logits = part.logits(index, counts.squeeze(1))
        hits[index] = ((ranked(logits, 1) == right) & counts).squeeze(1)
        logp = logits.log_softmax(-1)
        # where, not a product: a head may say −inf.
        loss = -torch.where(counts, logp.gather(1, right) * scale, 0).sum()
        if part.wanted:
            part.backward(index, logp.exp_().mul_(scale).scatter_add_(1, right, -scale))
        return loss

    return ChunkedLoss(summed_in_chunks([part], at, rows, fused if part.fused else step)[0], hits)


def chunked_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    weight: Tensor,
    temperature: float = 1.0,
    *,
    budget: int = BUDGET,
) -> ChunkedLoss:
    """Σ weight · T² · KL(teacher ‖ student), both softened by T; the T² keeps the gradient's size (Hinton et al. 2015).

    student_hidden, teacher_hidden [M,·], weight [M]. Gradients go to the student alone. A hit is agreement on the best token.
    """
    return chunked_kl_heads([student_hidden], [student_head], teacher_hidden, teacher_head, [weight], [0], temperature, budget=budget)[0]


def chunked_kl_heads(
    student_hidden: Sequence[Tensor],
    student_heads: Sequence[Head],
    teacher_hidden: Tensor,
    teacher_head: Head,
    weights: Sequence[Tensor],
    shifts: Sequence[int],
    temperature: float = 1.0,
    *,
    budget: int = BUDGET,
) -> list[ChunkedLoss]:
    """`chunked_kl` for K heads that share one teacher pass: head k's row t is held against the teacher's row t + shifts[k].

    student_hidden and weights: K of [M,H] and [M]. A pair past the last row is dropped, and one that crosses from one
    document into another must have weight 0. Medusa's head k, from 0, predicts token t+2+k: its shift is k+1.
    The K sums share one graph node: add them up before backward.

    Raises:
        ValueError: a negative shift, or lists of different lengths.
    """
    if not len(student_hidden) == len(student_heads) == len(weights) == len(shifts) or min(shifts, default=0) < 0:
        raise ValueError(
            f"got {len(student_hidden)} hidden states, {len(student_heads)} heads, {len(weights)} weights and shifts {list(shifts)}; "
            "expected one of each per head and shifts >= 0"
        )
    parts = [ChunkedHead(hidden, head) for hidden, head in zip(student_hidden, student_heads, strict=True)]
    with torch.no_grad():
        teacher = ChunkedHead(teacher_hidden.detach(), teacher_head)
    rows, weight = aligned(torch.stack([weight.to(parts[0].sum_dtype) for weight in weights]), shifts)
    counts = weight > 0
    hits = torch.zeros_like(counts)

    def fused(index: Tensor) -> Tensor:
        from draftsmith.train.losses.kernels import law

        with torch.no_grad():
            raw = teacher.raw(index, counts[:, index].any(0))
        shared, sums = law(raw, weight[:, index], temperature=temperature), []
        for k, part in enumerate(parts):
            scale = weight[k, index]
            values, hits[k, index] = _fused(part, rows[k, index], shared, None, scale, scale * temperature, "kl")
            sums.append((values * scale).sum() * temperature**2)
        return torch.stack(sums)

    def step(index: Tensor) -> Tensor:
        with torch.no_grad():
            raw = teacher.logits(index, counts[:, index].any(0))
            best = ranked(raw, 1)
            teacher_logp = softened(raw, temperature)
            teacher_p = teacher_logp.exp()
        sums = []
        for k, part in enumerate(parts):
            row, scale, used = rows[k, index], weight[k, index][:, None], counts[k, index][:, None]
            logits = part.logits(row, used.squeeze(1))
            hits[k, index] = ((ranked(logits, 1) == best) & used).squeeze(1)
            logp = softened(logits, temperature)
            gap = torch.where(teacher_p > 0, teacher_p * (teacher_logp - logp), 0).sum(-1, keepdim=True)
            sums.append(torch.where(used, gap * scale, 0).sum() * temperature**2)
            if part.wanted:
                part.backward(row, logp.exp_().sub_(teacher_p).mul_(scale * temperature))
        return torch.stack(sums)

    size = chunk_rows(len(teacher_hidden), teacher.vocab_size, budget)
    total = summed_in_chunks(parts, rows_to_visit(counts.any(0)), size, fused if all(part.fused for part in parts) else step)
    return [ChunkedLoss(one, hit) for one, hit in zip(total.unbind(), by_row(hits, shifts).unbind(), strict=True)]


def _fused(
    part: "ChunkedHead", row: Tensor, teacher: Any, text: Tensor | None, weight: Tensor, pull: Tensor, loss: str
) -> tuple[Tensor, Tensor]:
    """One head's losses and hits [m] at a chunk of its rows, by `loss_kernels`; its gradients are left with it."""
    from draftsmith.train.losses.kernels import with_gradients

    logits = part.raw(row, weight > 0)
    found = with_gradients(logits[None], teacher, text, weight[None], pull[None], {loss: 1.0}, part.wanted)
    if part.wanted:
        part.backward(row, logits)
    return found.loss[0], found.hits[0]


def chunk_rows(positions: int, vocab_size: int, budget: int = BUDGET) -> int:
    """Rows of one chunk: at most `budget` logits and a sixteenth of all positions, so that no tensor comes near M·V."""
    return max(1, min(budget // vocab_size, positions // 16))


class ChunkedHead:
    """One head on its hidden states [M,H], and the gradients that its chunks leave behind."""

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
        self.inputs = [hidden, *self.leaves]
        self.wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)
        self.grads = [
            torch.zeros(t.shape, dtype=self.sum_dtype, device=t.device) if self.wanted and t.requires_grad else None for t in self.inputs
        ]
        self._chunk: tuple[Tensor, Tensor] | None = None

    def logits(self, index: Tensor, counts: Tensor) -> Tensor:
        """`raw` in the dtype of the sums."""
        return self.raw(index, counts).to(self.sum_dtype)

    def raw(self, index: Tensor, counts: Tensor) -> Tensor:
        """Positions index [m] -> logits [m,V] as the head made them, cut from any graph; those of 0 where counts [m] is False."""
        # Padding may hold inf or NaN, which times 0 would spoil the gradient of the head.
        x = torch.where(counts[:, None], self.hidden[index], 0)
        if self.weight is not None:
            with torch.autocast(x.device.type, enabled=False):
                raw = x @ self.weight.T
        else:
            with torch.set_grad_enabled(self.wanted):
                x.requires_grad_(self.wanted)
                assert self.function is not None
                raw = self.function(x)
        self._chunk = (x, raw)
        if self.fused and self.function is not None and self.wanted:
            # Kernels write gradients over logits, which the backward of a callable may need.
            return raw.detach().clone(memory_format=torch.contiguous_format)
        return raw.detach()

    def backward(self, index: Tensor, dlogits: Tensor) -> None:
        """Add the gradients of the chunk last asked for, given dlogits [m,V]."""
        assert self._chunk is not None
        (x, raw), self._chunk = self._chunk, None
        dlogits = dlogits.to(raw.dtype)
        if self.weight is None:
            inputs = [x, *self.leaves]
            chosen = [i for i, grad in enumerate(self.grads) if grad is not None]
            found = torch.autograd.grad(raw, [inputs[i] for i in chosen], dlogits)
            for i, grad in zip(chosen, found, strict=True):
                self._add(i, index, grad)
            return
        with torch.autocast(x.device.type, enabled=False):
            if self.grads[0] is not None:
                self._add(0, index, dlogits @ self.weight)
            if self.grads[1] is not None and raw.dtype == self.sum_dtype:
                self.grads[1].addmm_(dlogits.T, x)
            elif self.grads[1] is not None:
                self._add(1, index, dlogits.T @ x)

    def _add(self, i: int, index: Tensor, grad: Tensor) -> None:
        total = self.grads[i]
        assert total is not None
        if i == 0:
            total.index_add_(0, index, grad.to(total.dtype))
        else:
            total.add_(grad)


class _InForward(torch.autograd.Function):
    """Sums [P] of P parts whose gradients were made together with them; backward only scales."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, parts: list[ChunkedHead], *inputs: Tensor) -> Tensor:
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


def summed_in_chunks(parts: list[ChunkedHead], at: Tensor, rows: int, step: Callable[[Tensor], Tensor]) -> Tensor:
    """Run `step` over chunks of positions `at`, `rows` at a time, and join its sums [P] to the graph of the P parts' inputs."""
    with torch.no_grad():
        sums = torch.zeros(len(parts), dtype=parts[0].sum_dtype, device=at.device)
        for index in at.split(rows):
            if len(index):
                sums += step(index)
    if not any(part.wanted for part in parts):
        return sums
    return _InForward.apply(sums, parts, *(tensor for part in parts for tensor in part.inputs))


def rows_to_visit(counts: Tensor) -> Tensor:
    """Positions to visit: on the CPU those that count; on a device all, since finding them would wait for it."""
    return counts.nonzero().squeeze(1) if counts.device.type == "cpu" else torch.arange(len(counts), device=counts.device)


def aligned(weights: Tensor, shifts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """For each head and teacher row: the row of hidden that is held against it [K,M], and its weight [K,M], 0 where there is none.

    weights [K,M] by row of hidden; row t of head k is held against the teacher's row t + shifts[k].
    """
    row = torch.arange(weights.shape[1], device=weights.device) - torch.tensor(shifts, device=weights.device)[:, None]
    return row.clamp(min=0), weights.gather(1, row.clamp(min=0)).masked_fill(row < 0, 0)


def by_row(noted: Tensor, shifts: Sequence[int]) -> Tensor:
    """What was noted by teacher row [K,M], by row of hidden; 0 (or False) where the teacher has none."""
    positions = noted.shape[1]
    row = torch.arange(positions, device=noted.device) + torch.tensor(shifts, device=noted.device)[:, None]
    return noted.gather(1, row.clamp(max=positions - 1)).masked_fill(row >= positions, 0)


def softened(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)."""
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def _leaves(head: Callable[[Tensor], Tensor], row: Tensor) -> tuple[list[Tensor], int]:
    """The leaves that require a gradient behind a callable head, and V; found in the graph of one row."""
    with torch.enable_grad():
        row = row.detach().requires_grad_()
        logits = head(row)
    found: list[Tensor] = []
    seen, queue = set(), [cast(Any, logits.grad_fn)]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = node.variable if "AccumulateGrad" in node.name() else None
        if leaf is not None and leaf is not row:
            found.append(leaf)
        queue.extend(parent for parent, _ in node.next_functions)
    return found, logits.shape[-1]
