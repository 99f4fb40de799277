"""The attention of EAGLE-3's training-time test: causal over the first step's keys, and one key of each later step.

Step k's query at position p sees the keys of step 0 at positions r <= p of its document, and of each step 1..k only the key at position p.
Both parts go through one softmax, without a table of scores. Causal attention gives its output and log-sum-exp (models/span_attention.py). The
keys of later steps, the diagonals, are merged into it by that log-sum-exp.

With context parallelism (models/context_parallel.py) the queries are the last n of the C positions up to theirs; elsewhere n = C = S.

Letters: B rows of a batch · S positions · n queries · C positions of step 0's keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from draftsmith.models.span_attention import BUDGET, block_mask, on_spans


def attend(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    document: Tensor | None,
    *,
    scale: float | None = None,
    mask: BlockMask | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Step k's attention. Softmax and sums are in fp32, in fp64 for an fp64 query. Differentiable once, in query, keys and values.

    Args:
        query: [B,heads,n,dim].
        keys, values: k+1 each, step 0 first: [B,kv heads,C,dim], then [B,kv heads,n,dim]. heads is a multiple of kv heads.
        document: [B,C], the number of each position's document, a run of equal numbers (padding too). None: one document per row.
        scale: None for 1/√dim.
        mask: what `blocks` returns, to make it only once for all steps and layers.
        budget: scores in memory at a time, on the CPU.

    Returns:
        [B,heads,n,dim] in the query's dtype.

    Raises:
        ValueError: no keys, not as many values, or shapes that do not fit.
    """
    _check(query, keys, values, document)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    rows, _, queries, _ = query.shape
    before = keys[0].shape[2] - queries
    start, end = _causal(document_starts(document, rows, before + queries, query.device), before)
    # Autocast would compute the scores in bf16.
    with torch.autocast(query.device.type, enabled=False):
        out, lse = on_spans(query, keys[0], values[0], start, end, factor, mask, budget)
        if len(keys) == 1:
            return out.to(query.dtype)
        # Recomputed in the backward pass, so that only the steps' own tensors stay in memory.
        merge: Any = checkpoint(_merge, query, out, lse, keys[1:], values[1:], factor, use_reentrant=False, preserve_rng_state=False)
        return merge.to(query.dtype)


def blocks(document: Tensor | None, rows: int, positions: int, device: torch.device | str, before: int = 0) -> BlockMask | None:
    """The `mask` of `attend` on `device`: a table of 128-position blocks on a GPU, None elsewhere.

    Args:
        document: as in `attend`.
        rows, positions: B and C.
        before: the first positions, which have no query.
    """
    if torch.device(device).type != "cuda":
        return None
    return block_mask(*_causal(document_starts(document, rows, positions, device), before), positions)


def shift_left(rows: Tensor, count: int, document: Tensor | None = None) -> Tensor:
    """rows [B,S,...] moved `count` positions to the left: position p gets the value of position p + count.

    It gets 0 where p + count is past the end or in another document (document [B,S] as in `attend`).

    Raises:
        ValueError: a negative count.
    """
    if count < 0:
        raise ValueError(f"got count {count}; expected 0 or more positions")
    count = min(count, rows.shape[1])
    behind = rows.new_zeros(rows.shape[0], count, *rows.shape[2:])
    moved = torch.cat([rows[:, count:], behind], 1)
    if document is None or count == 0:
        return moved
    start = document_starts(document, rows.shape[0], rows.shape[1], rows.device)
    same = start[:, count:] <= torch.arange(rows.shape[1] - count, device=rows.device)
    crosses = F.pad(~same, (0, count))
    return moved.masked_fill(crosses.reshape(*crosses.shape, *[1] * (rows.ndim - 2)), 0)


def _check(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], document: Tensor | None) -> None:
    batch, heads, queries, dim = query.shape
    if not keys or len(keys) != len(values):
        raise ValueError(f"got {len(keys)} keys and {len(values)} values; expected one of each per step, step 0 first")
    for name, side in (("keys", keys), ("values", values)):
        for step, tensor in enumerate(side):
            count = queries if step else max(keys[0].shape[2], queries)
            if tensor.shape != (batch, keys[0].shape[1], count, dim) or heads % tensor.shape[1]:
                raise ValueError(
                    f"got {name} of {list(tensor.shape)} for queries of {list(query.shape)}; expected [B,kv heads,n,dim], step 0's "
                    "[B,kv heads,C,dim] with C >= n, and heads a multiple of kv heads"
                )
    if document is not None and document.shape != (batch, keys[0].shape[2]):
        raise ValueError(f"got document of {list(document.shape)}; expected [{batch},{keys[0].shape[2]}], a number for each position")


def document_starts(document: Tensor | None, rows: int, positions: int, device: torch.device | str) -> Tensor:
    """The first position of each position's document: [B,S] int64."""
    if document is None:
        return torch.zeros(rows, positions, dtype=torch.int64, device=device)
    at = torch.arange(positions, device=document.device)
    new = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    return torch.where(new, at, 0).cummax(1).values


def _causal(start: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """The spans [B,n] of the last n = C − `before` positions, from where each one's document begins, start [B,C], to itself."""
    end = torch.arange(before + 1, start.shape[1] + 1, device=start.device)
    return start[:, before:], end.expand(len(start), -1)


def _merge(query: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
    """Merge into causal attention's out [B,heads,n,dim], with its lse [B,heads,n], one key and value per position of each later step."""
    scaled = (query.to(lse.dtype) * scale).unflatten(1, (keys[0].shape[1], -1))  # [B,kv heads,group,n,dim]
    scores = [(scaled * key.to(lse.dtype)[:, :, None]).sum(-1).flatten(1, 2) for key in keys]
    first, *weights = torch.stack([lse, *scores]).softmax(0)[..., None].unbind()
    merged = out * first
    for weight, value in zip(weights, values, strict=True):
        merged = merged + (weight.unflatten(1, scaled.shape[1:3]) * value.to(lse.dtype)[:, :, None]).flatten(1, 2)
    return merged
