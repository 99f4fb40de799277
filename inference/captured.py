"""Rounds of one fixed shape, so that a CUDA graph can hold a whole one: draft, target, verdict, commit, without the host in between.

The graph covers all rows of a decoder; a row without a request has trees of size 0. What a round committed is copied to the host while the
next one runs already, so that stop conditions are met a round late: what that round drafted for a row that had ended is dropped.

Letters: B rows of the decoder · P = K+1 path entries.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Ask, Drafter, NodeOutput, Plain, Target
from draftsmith.inference.kernels import active
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.verify import Told, packed, unpacked

__all__ = ["Captured", "Flight", "refusal"]

WARM = 3  # rounds on a side stream before a capture: libraries allocate their workspaces then


def refusal(target: Target, drafter: Drafter, sampling: Sampling, processed: bool) -> str:
    """Why rounds cannot be captured, in one line; "" where they can."""
    if not active():
        return "kernels are off"
    if target.device.type != "cuda":
        return "a graph needs a CUDA device"
    if not drafter.capturable:
        return f"{getattr(drafter, 'method', type(drafter).__name__)} needs the host to draft"
    if len(set(getattr(target.model, "hf_device_map", {}).values())) > 1:
        return "the target lies on several devices"
    if processed:
        return "penalties and processors need the tokens before each node"
    from draftsmith.inference.kernels.verify import supported

    return supported(sampling)


@dataclass(slots=True)
class Flight:
    """A round under way: told [B,·] on the host when `done` has happened (None: it has)."""

    told: Tensor
    done: torch.cuda.Event | None

    def land(self) -> list[Told]:
        """Wait for it; what it told of each row."""
        if self.done is not None:
            self.done.synchronize()
        return unpacked(self.told.tolist())


class Captured:
    """Launches rounds of a decoder's rows. `live`, `root` and `request` [B] may be changed between two rounds, and rows prefilled.

    verify: (tree, logits, ask) -> Verdict · capture: False runs each round as it is, for tests on a CPU.
    """

    def __init__(
        self, target: Target, drafter: Drafter, cache: TreeCache, sampling: Sampling, verify: Callable, capture: bool = True
    ) -> None:
        self.target, self.drafter, self.cache, self.sampling, self.verify, self.capture = target, drafter, cache, sampling, verify, capture
        self.root, self.request = (torch.zeros(cache.rows, dtype=torch.int64, device=target.device) for _ in range(2))
        self.live = torch.zeros(cache.rows, dtype=torch.bool, device=target.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def seat(self, rows: list[int], roots: list[int], requests: list[int]) -> None:
        """These rows, just prefilled, take part from the next round on."""
        columns = torch.tensor([rows, roots, requests]).to(self.live.device, non_blocking=True)
        self.root[columns[0]], self.request[columns[0]] = columns[1], columns[2]
        self.live[columns[0]] = True

    def leave(self, rows: list[int]) -> None:
        """These rows take part no more."""
        self.live[rows] = False

    def launch(self, depth: int) -> Flight:
        """A round that drafts `depth` deep at most (0: the roots alone), queued on the device."""
        if not self.capture:
            return Flight(self.round(depth).clone(), None)
        if depth not in self._graphs:
            self._graphs[depth] = self._captured(depth)
        graph, told = self._graphs[depth]
        graph.replay()
        host = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        host.copy_(told, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Flight(host, done)

    def round(self, depth: int) -> Tensor:
        """The round itself -> what the host is to be told, [B,·]. No shape follows what was accepted; nothing is asked of the host."""
        cache, drafter = self.cache, self.drafter
        cache.fixed = True
        cache.select(range(cache.rows))
        ask = Ask(cache.selected, cache.index, self.root, cache.current, self.request, self.sampling, depth, fixed=True)
        drafting = drafter if depth else Plain()
        proposed = drafting.propose(ask)
        tree = replace(proposed, size=torch.where(self.live, proposed.size, 0), full=False, _deepest=None)
        attention = TreeAttention.tree(cache, tree)
        # Nodes past the last position yield only tokens past the limit, but their index must exist.
        positions = attention.positions().clamp(max=self.target.max_positions - 1)
        out = self.target.forward(tree.tokens, position_ids=positions, cache=cache, tree=attention, taps=drafter.taps)
        verdict = self.verify(tree, self.target.logits(out.hidden), ask)
        drafter.accept(ask, tree, verdict, NodeOutput(out.hidden, out.taps))
        cache.commit(verdict)
        self.root.copy_(torch.where(self.live, verdict.next_token, self.root))
        return packed(tree, verdict)

    def _captured(self, depth: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a round. Warming up and capturing leave rows where they were: nobody is live meanwhile."""
        live, bounds = self.live.clone(), self.cache.bounds()
        self.live.fill_(False)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.round(depth)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            told = self.round(depth)
        self.cache.bounds(bounds)
        self.live.copy_(live)
        return graph, told
