"""Prefill: prompts go through the target, and the drafter and the history start on them."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Drafter, NodeOutput, ResumableDrafter, Target
from draftsmith.inference.processors import History
from draftsmith.inference.request import Counters, Request

__all__ = ["Prefill"]

# Of one forward on a CPU, padding included. A smaller matmul spends much of its time on rearranging the weights, a larger one leaves the caches.
# SmolLM2-135M in bf16, one core: on a Xeon with AMX 64 positions run at 620 tokens/s, 256 at 1,100, 1,024 at 1,200 to 1,800, 2,048 at 1,500; on an
# EPYC (Zen 4) 8,192 rows of a matmul at half the rate of 256.
CPU_POSITIONS = 1024
CPU_CHUNK = 64  # a CPU takes as long for fewer positions
# Hidden states, taps included, of the prompts that start together on a GPU. All are in memory at once, twice while chunks are concatenated: with
# 4,096 entries in 16 bits that is 2 GB.
GPU_STATES = 1 << 17


class Prefill:
    """Prefills admitted requests of one stream, `chunk` prompt tokens per forward of the target."""

    def __init__(self, target: Target, drafter: Drafter, cache: TreeCache, chunk: int, history: History | None, counters: Counters) -> None:
        self.target, self.drafter, self.cache, self.chunk, self.history, self.counters = target, drafter, cache, chunk, history, counters

    def run(self, requests: Sequence[Request]) -> None:
        """Prefill requests that have just got their slots."""
        self.cache.static_shape = False
        for batch in self._batches(requests):
            self._run_batch(sorted(batch, key=lambda request: request.slot))

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Requests that go through the target together. No prompt is more than twice as long as another, unless both fit into a chunk. On a CPU a
        forward has no more positions than its caches hold; on a GPU all prompts together have at most GPU_STATES hidden states. Requests with KV
        from before go alone: their lengths differ."""
        yield from ([request] for request in requests if request.reused)
        cpu = self.target.device.type == "cpu"
        most, chunk = (CPU_POSITIONS, CPU_CHUNK) if cpu else (GPU_STATES // (1 + len(self.drafter.taps)), self.chunk)
        batch: list[Request] = []
        for request in sorted((request for request in requests if not request.reused), key=lambda request: len(request.prompt)):
            size = len(request.prompt)
            positions = (min(size, self.chunk) if cpu else size) * (len(batch) + 1)
            if batch and (positions > most or size > max(chunk, 2 * len(batch[0].prompt))):
                yield batch
                batch = []
            batch.append(request)
        if batch:
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
