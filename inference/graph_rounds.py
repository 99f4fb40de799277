"""Rounds of one fixed shape, so that a CUDA graph can hold a whole one: draft, target, verdict, commit, without the host in between.

A graph covers the first rows of a decoder, as many as are in use (a power of two); one without a request has trees of size 0. What a round
committed is copied to the host while the next one runs already, so that stop conditions are met a round late: what that round drafted for
a row that had ended is dropped. A drafter that needs the host drafts outside of the graph, and is told of each round before the next.

Letters: B rows of a graph · N tree nodes · P = K+1 path entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.cache import TreeCache, index_tensor
from draftsmith.inference.drafter import Drafter, NodeOutput, Plain, RoundContext, Target
from draftsmith.inference.kernels import active
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import HostResult, Verdict, pack_results, unpack_results

__all__ = ["GraphRunner", "InFlightRound", "refusal"]

WARM = 3  # rounds on a side stream before a capture: libraries allocate their workspaces then


def refusal(target: Target, drafter: Drafter, sampling: Sampling, processed: bool) -> str:
    """Why rounds cannot be captured, in one line; "" where they can."""
    if not active():
        return "kernels are off"
    if target.device.type != "cuda":
        return "a graph needs a CUDA device"
    if len(set(getattr(target.model, "hf_device_map", {}).values())) > 1:
        return "the target lies on several devices"
    if _has_experts(target.model.config) and target.dtype != torch.bfloat16:
        return f"experts in {str(target.dtype).removeprefix('torch.')} are counted by the host; they are not in bfloat16"
    if drafter.capturable and getattr(drafter, "device", target.device) != target.device:
        return "the drafter lies on another device"
    if processed:
        return "penalties and processors need the tokens before each node"
    from draftsmith.inference.kernels.verify import supported

    return supported(sampling)


def _has_experts(config: Any) -> bool:
    config = config.get_text_config()
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


@dataclass(frozen=True, slots=True)
class CaptureMemory:
    """Where graphs are recorded of which no two run at a time. stream: libraries keep their workspaces by stream · pool: their memory; what
    one leaves there the next may read."""

    stream: torch.cuda.Stream
    pool: Any


def capture(work: Sequence[Callable[[], Any]], on: CaptureMemory | None) -> list[Callable[[], Any]]:
    """CUDA graphs of pieces of work that follow each other, to be replayed in this order; without a place the pieces themselves."""
    if on is None:
        return list(work)
    with torch.cuda.device(on.stream.device):
        on.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(on.stream):
            for _ in range(WARM):
                for piece in work:
                    piece()
        torch.cuda.current_stream().wait_stream(on.stream)
        graphs = []
        for piece in work:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=on.pool, stream=on.stream):
                piece()
    return [graph.replay for graph in graphs]


@dataclass(slots=True)
class InFlightRound:
    """A round under way: told [B,·] on the host once the last of `marks` has happened (none: it has). marks: events of a GPU, the first of
    them before the round, the others each after a part of it."""

    told: Tensor
    marks: list[torch.cuda.Event]

    def result(self) -> list[HostResult]:
        """Wait for it; what it told of each row."""
        if self.marks:
            self.marks[-1].synchronize()
        return unpack_results(self.told.tolist())

    def part_seconds(self) -> list[float]:
        """Seconds of each part, once it has landed: drafting, verifying, learning, committing; [] where they were not told apart."""
        if len(self.marks) < 3:
            return []
        return [start.elapsed_time(end) / 1e3 for start, end in zip(self.marks, self.marks[1:], strict=False)]


@dataclass(slots=True)
class _Pass:
    """What the parts of one kind of round hand on to each other, and what the host drafted [B,N]; told lies where the graph writes it."""

    round: RoundContext
    drafted: DraftTree | None = None
    tree: DraftTree | None = None
    out: NodeOutput | None = None
    verdict: Verdict | None = None
    told: Tensor | None = None


class GraphRunner:
    """Launches rounds of a decoder's rows. Rows may be seated and leave between two rounds, and be prefilled.

    verify: (tree, logits, ask) -> Verdict · time_parts: the parts of a round are graphs of their own, and timed.
    """

    def __init__(
        self, target: Target, drafter: Drafter, cache: TreeCache, sampling: Sampling, verify: Callable, time_parts: bool = False
    ) -> None:
        self.target, self.drafter, self.cache, self.sampling, self.verify, self.time_parts = (
            target,
            drafter,
            cache,
            sampling,
            verify,
            time_parts,
        )
        self.root, self.request = (torch.zeros(cache.rows, dtype=torch.int64, device=target.device) for _ in range(2))
        self.live = torch.zeros(cache.rows, dtype=torch.bool, device=target.device)
        self.asynchronous = drafter.capturable  # whether a round may be launched before the last one has landed
        self.capture_s = 0.0  # host seconds
        self._seated: list[int] = []
        self._on = CaptureMemory(torch.cuda.Stream(target.device), torch.cuda.graph_pool_handle()) if target.device.type == "cuda" else None
        self._kinds: dict[tuple[int, int, int], tuple[_Pass, list[Callable[[], Any]]]] = {}

    def assign(self, rows: list[int], roots: list[int], requests: list[int]) -> None:
        """These rows, just prefilled, take part from the next round on."""
        there, last, keys = (index_tensor(numbers, self.live.device) for numbers in (rows, roots, requests))
        self.root[there], self.request[there] = last, keys
        self.live.index_fill_(0, there, True)
        self._seated = sorted({*self._seated, *rows})

    def free(self, rows: Sequence[int] | None = None) -> None:
        """These rows (all of them by default) take part no more."""
        gone = self._seated if rows is None else rows
        self.live.index_fill_(0, index_tensor(gone, self.live.device), False)
        self._seated = [row for row in self._seated if row not in gone]

    def enqueue(self, depth: int) -> InFlightRound:
        """A round that drafts `depth` deep at most (0: the roots alone), queued on the device."""
        marks = self._mark()
        asked = drafted = None
        if not self.asynchronous:
            asked = self._asked(depth)
            drafted = self.drafter.propose(asked).to(self.target.device) if depth else DraftTree.root(asked.last_tokens)
        rows = _bucket(self._seated[-1] + 1, self.cache.rows)
        kind = (rows, depth, 0)
        if drafted is not None:
            nodes = drafted.tokens.shape[1]
            kind = (rows, self.drafter.max_depth, _bucket(nodes, self.drafter.max_nodes)) if nodes > 1 else (rows, 0, 0)
        if kind not in self._kinds:
            began = perf_counter()
            self._kinds[kind] = self._recorded(*kind)
            self.capture_s += perf_counter() - began
            marks = self._mark()  # recording is no part of a round
        this, (*parts, last) = self._kinds[kind]
        if asked is not None and drafted is not None and this.drafted is not None:
            _write(drafted, this.drafted, asked.slot_index)
        for part in parts:
            part()
            marks += self._mark()
        last()
        assert this.told is not None
        flight = InFlightRound(_copied(this.told), marks + self._mark())
        if asked is not None and drafted is not None:
            self._learn(asked, drafted, this, flight.result())
        return flight

    def _asked(self, depth: int) -> RoundContext:
        """For a drafter that needs the host: of the seated rows."""
        cache, rows = self.cache, list(self._seated)
        cache.static_shape = False
        cache.select(rows)
        # Copies: a round moves both on.
        position, root = self.cache.length[cache.index], self.root[cache.index]
        return RoundContext(rows, cache.index, root, position, self.request[cache.index], self.sampling, depth)

    def _learn(self, asked: RoundContext, drafted: DraftTree, this: "_Pass", told: list[HostResult]) -> None:
        """Tell a drafter that needs the host what became of its trees."""
        assert this.verdict is not None and this.out is not None
        path, length, token = (one[asked.slot_index] for one in (this.verdict.path, this.verdict.length, this.verdict.next_token))
        nodes, out = drafted.tokens.shape[1], this.out
        out = NodeOutput(out.hidden[asked.slot_index, :nodes], None if out.taps is None else out.taps[asked.slot_index, :nodes])
        self.drafter.accept(asked, drafted, Verdict(path, length, token, [told[row] for row in asked.slots]), out)

    def _mark(self) -> list[torch.cuda.Event]:
        """An event where the device is now; none on a CPU."""
        if self.target.device.type != "cuda":
            return []
        event = torch.cuda.Event(enable_timing=self.time_parts)
        event.record(torch.cuda.current_stream(self.target.device))
        return [event]

    def _recorded(self, rows: int, depth: int, nodes: int) -> tuple[_Pass, list[Callable[[], Any]]]:
        """A round of so many rows and of this depth, or of this many nodes that the host drafted. Recording it leaves the rows where they
        are: nobody is live meanwhile."""
        cache = self.cache
        live, bounds, fixed = self.live.clone(), cache.length_bounds(), cache.static_shape
        self.live.fill_(False)
        cache.static_shape = True
        cache.select(range(rows))
        root, request, taking = self.root[:rows], self.request[:rows], self.live[:rows]
        this = _Pass(RoundContext(cache.selected, cache.index, root, cache.selected_length, request, self.sampling, depth, taking))
        if nodes:
            tokens = torch.zeros(rows, nodes, dtype=torch.int64, device=self.target.device)
            this.drafted = DraftTree.build(tokens, tokens.clone(), tokens[:, 0].clone())
        parts = [partial(part, this) for part in (self._draft, self._check, self._accept, self._commit)]
        recorded = capture(parts if self.time_parts else [partial(_one_by_one, parts)], self._on)
        # Of what a kind of round leaves, other kinds may have the memory; the host reads no more than this.
        this.tree = None
        if self.asynchronous:
            this.out = this.verdict = None
        cache.length_bounds(bounds)
        cache.static_shape = fixed
        self.live.copy_(live)
        return this, recorded

    def _draft(self, this: _Pass) -> None:
        """The trees; those of rows that do not take part are empty."""
        assert this.round.active is not None
        self.cache.static_shape = True
        self.cache.select(this.round.slots)
        if this.drafted is not None:
            tree = DraftTree.build(this.drafted.tokens, this.drafted.parents, this.drafted.size)
        else:
            tree = (self.drafter if this.round.depth else Plain()).propose(this.round)
        this.tree = replace(tree, size=torch.where(this.round.active, tree.size, 0), full=False, _deepest=None)

    def _check(self, this: _Pass) -> None:
        """The target on the trees, and the verdict."""
        tree = this.tree
        assert tree is not None
        attention = TreeAttention.tree(self.cache, tree)
        # Nodes past the last position yield only tokens past the limit, but their index must exist.
        positions = attention.positions().clamp(max=self.target.max_positions - 1)
        out = self.target.forward(tree.tokens, position_ids=positions, cache=self.cache, tree=attention, taps=self.drafter.taps)
        this.out = NodeOutput(out.hidden, out.taps)
        this.verdict = self.verify(tree, self.target.logits(out.hidden), this.round)

    def _accept(self, this: _Pass) -> None:
        """The drafter learns what was kept (one that needs the host does so later), and the roots move on."""
        assert this.tree is not None and this.verdict is not None and this.out is not None
        if self.asynchronous:
            self.drafter.accept(this.round, this.tree, this.verdict, this.out)
        assert this.round.active is not None
        this.round.last_tokens.copy_(torch.where(this.round.active, this.verdict.next_token, this.round.last_tokens))

    def _commit(self, this: _Pass) -> None:
        """The cache moves on, and the host is to be told [B,·]."""
        assert this.tree is not None and this.verdict is not None
        self.cache.commit(this.verdict)
        this.told = pack_results(this.tree, this.verdict)


def _one_by_one(parts: Sequence[Callable[[], Any]]) -> None:
    for part in parts:
        part()


def _bucket(count: int, most: int) -> int:
    """A number of rows or nodes that graphs are made for, no less than `count`: a power of two, or the most there can be."""
    return min(1 << (count - 1).bit_length(), most)


def _write(drafted: DraftTree, held: DraftTree, rows: Tensor) -> None:
    """Put the trees of these rows where a graph reads them. What else is there is of rows that do not take part, or past a tree's size."""
    nodes = drafted.tokens.shape[1]
    held.tokens[rows, :nodes], held.parents[rows, :nodes], held.size[rows] = drafted.tokens, drafted.parents, drafted.size


def _copied(told: Tensor) -> Tensor:
    """On the host, once the device is there."""
    if told.device.type != "cuda":
        return told.clone()
    return torch.empty(told.shape, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
