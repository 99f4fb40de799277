"""Prefill: prompts go through the target, and the drafter and the history start on them."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Drafter, NodeOutput, ResumableDrafter, Target
from draftsmith.inference.processors import History
from draftsmith.inference.request import Counters, Request

__all__ = ["Prefill"]

# Of one forward on a CPU, padding included. Larger matmuls leave its caches: on a core of an EPYC (Zen 4), in bf16, 8,192 rows ran at half
# the rate of 256.
CPU_POSITIONS = 256


class Prefill:
    """Prefills admitted requests of one stream, `chunk` prompt tokens per forward of the target."""

    def __init__(self, target: Target, drafter: Drafter, cache: TreeCache, chunk: int, history: History | None, counters: Counters) -> None:
        self.target, self.drafter, self.cache, self.chunk, self.history, self.counters = target, drafter, cache, chunk, history, counters

    def run(self, requests: Sequence[Request]) -> None:
        """Prefill requests given in the order of their slots."""
        self.cache.static_shape = False
        # Slot less index is constant along neighbouring slots. Requests with KV from before go alone: their lengths differ.
        for _, group in groupby(enumerate(requests), key=lambda pair: (pair[1].slot - pair[0], pair[1].reused and pair[1].slot + 1)):
            for batch in self._batches([request for _, request in group]):
                self._run_batch(batch)

    def _batches(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Requests of neighbouring slots that go through the target together: all of them, but on a CPU no more than its caches hold."""
        batch: list[Request] = []
        for request in requests:
            longest = max(len(prefilled.prompt) for prefilled in [*batch, request])
            positions = min(longest, self.chunk) * (len(batch) + 1)
            if batch and self.target.device.type == "cpu" and positions > CPU_POSITIONS:
                yield batch
                batch = []
            batch.append(request)
        yield batch

    def _run_batch(self, requests: list[Request]) -> None:
        """Encode prompt[reused:-1] of each request, and start the drafter and the history."""
        slots, prompts = [request.slot for request in requests], [request.prompt for request in requests]
        self.cache.select(slots)
        reused = [request.reused for request in requests]
        hidden, taps = self._encode([prompt[count:] for prompt, count in zip(prompts, reused, strict=True)])
        target = self.target
        empty = torch.zeros((len(slots), 0, target.hidden_size), dtype=target.dtype, device=target.device)
        if self.drafter.taps and not taps:  # every prompt is one token long
            taps.append(empty[:, :, None].expand(-1, -1, len(self.drafter.taps), -1))
        out = NodeOutput(torch.cat(hidden, 1) if hidden else empty, torch.cat(taps, 1) if taps else None)
        if any(reused):
            cast(ResumableDrafter, self.drafter).resume(slots, prompts, reused, out)
        else:
            self.drafter.start(slots, prompts, out)
        if self.history:
            self.history.start(slots, prompts)

    def _encode(self, prompts: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Chunks of hidden [B,·,H] and of taps [B,·,T,H], the latter only if the drafter reads taps."""
        hidden: list[Tensor] = []
        taps: list[Tensor] = []
        lengths = [len(prompt) - 1 for prompt in prompts]
        for start in range(0, max(lengths), self.chunk):
            counts = [min(max(length - start, 0), self.chunk) for length in lengths]
            width = max(counts)
            ids = [prompt[start : start + count] + [0] * (width - count) for prompt, count in zip(prompts, counts, strict=True)]
            attention = TreeAttention.causal(self.cache, width)
            out = self.target.forward(
                torch.tensor(ids, device=self.target.device),
                position_ids=attention.positions(),
                cache=self.cache,
                tree=attention,
                taps=self.drafter.taps,
            )
            self.cache.advance(counts)
            self.counters.target_forwards += 1
            self.counters.prefill_chunks += 1
            hidden.append(out.hidden)
            if out.taps is not None:
                taps.append(out.taps)
        return hidden, taps
