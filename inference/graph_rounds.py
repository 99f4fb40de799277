"""Rounds of static shape, so that a CUDA graph can hold a complete one: draft, verify, accept, commit, without the host in between.

A graph covers the first slots of a decoder, as many as are in use, rounded up to a power of two; slots without a request have trees of size 0.
The result of a round is copied to the host while the next round already runs. Stop conditions are therefore met one round late, and what that
round drafted for a request that had ended is dropped. A drafter that needs the host drafts outside the graph, and learns each round's result
before the next round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.attention import MAX_NODES, TreeAttention
from draftsmith.inference.cache import TreeCache, index_tensor
from draftsmith.inference.drafter import Drafter, NodeOutput, Plain, RoundContext, Target
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.kernels import active
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.support import has_experts
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import HostResult, Verdict, pack_results, unpack_results

__all__ = ["GraphRunner", "InFlightRound", "refusal"]

WARMUP = 3  # runs on a side stream before a capture: libraries allocate their workspaces then


def refusal(target: Target, drafter: Drafter, sampling: Sampling, processed: bool) -> str:
    """Why rounds cannot be captured, in one line; "" where they can. processed: penalties, processors or constraints are in use."""
    if not active():
        return "kernels are off"
    if target.device.type != "cuda":
        return "a graph needs a CUDA device"
    if len(set(getattr(target.model, "hf_device_map", {}).values())) > 1:
        return "the target is on several devices"
    if has_experts(target.model.config) and target.dtype != torch.bfloat16:
        return f"experts in {str(target.dtype).removeprefix('torch.')} are counted by the host; they are not in bfloat16"
    if drafter.capturable and getattr(drafter, "device", target.device) != target.device:
        return "the drafter is on another device"
    spec = getattr(drafter, "tree_spec", None)
    if isinstance(spec, DynamicTree) and (spec.depth - 1) * spec.width + getattr(drafter, "pending_limit", 0) > MAX_NODES:
        return f"a dynamic tree of depth {spec.depth} and width {spec.width} encodes more nodes than the kernels' {MAX_NODES}"
    if _finds_outliers(target.model.config):
        return "its bitsandbytes int8 layers look for outliers on the host"
    if processed:
        return "penalties, processors and constraints need the tokens before each node"
    from draftsmith.inference.kernels import verify as kernel

    return kernel.refusal(sampling)


def _finds_outliers(config: Any) -> bool:
    """Whether the checkpoint came in LLM.int8() with a threshold; one that is quantised here has none (models/quantised.py)."""
    settings: Any = getattr(config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else vars(settings)
    return bool(settings.get("load_in_8bit", settings.get("_load_in_8bit"))) and settings.get("llm_int8_threshold", 6.0) > 0


@dataclass(frozen=True, slots=True)
class CaptureMemory:
    """What graphs share that never run at the same time.

    Attributes:
        stream: libraries keep a workspace per stream.
        pool: the graphs' memory; a graph may read what the one before left there.
    """

    stream: torch.cuda.Stream
    pool: Any


def capture(work: Sequence[Callable[[], Any]], memory: CaptureMemory | None) -> list[Callable[[], Any]]:
    """Capture functions that follow each other as CUDA graphs -> their replays, for the same order. Without memory: the functions themselves."""
    if memory is None:
        return list(work)
    with torch.cuda.device(memory.stream.device):
        memory.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(memory.stream):
            for _ in range(WARMUP):
                for function in work:
                    function()
        torch.cuda.current_stream().wait_stream(memory.stream)
        graphs = []
        for function in work:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=memory.pool, stream=memory.stream):
                function()
    return [graph.replay for graph in graphs]


@dataclass(slots=True)
class InFlightRound:
    """A round that the device may still be running.

    Attributes:
        packed: `pack_results` of the round [B,·] on the host, valid once the last event has happened.
        events: CUDA events before the round and after each timed part; none on a CPU.
        host_learn_s: host seconds in which a drafter that needs the host learned the result.
    """

    packed: Tensor
    events: list[torch.cuda.Event]
    host_learn_s: float = 0.0

    def result(self) -> dict[int, HostResult]:
        """Wait for the round -> its result by slot."""
        if self.events:
            self.events[-1].synchronize()
        return dict(enumerate(unpack_results(self.packed.tolist())))

    def part_seconds(self) -> list[float]:
        """Seconds of drafting, verifying, learning and committing, once the round has ended; [] where they were not timed apart."""
        if len(self.events) < 3:
            return []
        return [start.elapsed_time(end) / 1e3 for start, end in zip(self.events, self.events[1:], strict=False)]

    def seconds(self, total: float) -> tuple[float, float, float]:
        """Seconds of drafting (learning included), of verifying and of all else, gaps on the device included. `total`, of the round,
        counts as verifying where parts were not timed."""
        parts = self.part_seconds()
        if not parts:
            return 0.0, total, 0.0
        draft_s, verify_s, learn_s, commit_s = parts
        draft_s += learn_s + self.host_learn_s
        return draft_s, verify_s, max(commit_s, total - draft_s - verify_s)


@dataclass(slots=True)
class _Shared:
    """What the parts of one captured round hand to each other. A graph reads `drafted` (a tree from the host) and writes `packed`."""

    round: RoundContext
    drafted: DraftTree | None = None
    tree: DraftTree | None = None
    out: NodeOutput | None = None
    verdict: Verdict | None = None
    packed: Tensor | None = None


class GraphRunner:
    """Runs rounds of a decoder's assigned slots as CUDA graphs; on a CPU the captured functions run as they are, for tests.

    Args:
        target, drafter: the models.
        cache: the target's KV cache, prefilled for assigned slots.
        sampling: how tokens are drawn.
        verify: (tree, logits, round) -> Verdict.
        time_parts: capture the four parts of a round as graphs of their own, and time them.

    Attributes:
        asynchronous: whether a round may be enqueued before the result of the last one is read.
        capture_s: host seconds of capturing.
    """

    overlaps_prefill = True  # the device may still be busy with a prefill when a round is enqueued
    clock = staticmethod(perf_counter)

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        cache: TreeCache,
        sampling: Sampling,
        verify: Callable[[DraftTree, Tensor, RoundContext], Verdict],
        time_parts: bool = False,
    ) -> None:
        self.target, self.drafter, self.cache, self.sampling, self.verify, self.time_parts = (
            target,
            drafter,
            cache,
            sampling,
            verify,
            time_parts,
        )
        self.asynchronous = drafter.capturable
        self.capture_s = 0.0
        # Of all slots, where graphs read and write them.
        self._last_tokens = torch.zeros(cache.rows, dtype=torch.int64, device=target.device)
        self._noise_keys = torch.zeros(cache.rows, dtype=torch.int64, device=target.device)
        self._active = torch.zeros(cache.rows, dtype=torch.bool, device=target.device)
        self._assigned: list[int] = []
        self._memory: CaptureMemory | None = None
        if target.device.type == "cuda":
            self._memory = CaptureMemory(torch.cuda.Stream(target.device), torch.cuda.graph_pool_handle())
        self._captured: dict[tuple[int, int, int], tuple[_Shared, list[Callable[[], Any]]]] = {}  # by slots, depth, nodes of the host

    def assign(self, slots: Sequence[int], last_tokens: Sequence[int], noise_keys: Sequence[int]) -> None:
        """These prefilled slots take part from the next round on."""
        device = self.target.device
        index = index_tensor(slots, device)
        self._last_tokens[index], self._noise_keys[index] = index_tensor(last_tokens, device), index_tensor(noise_keys, device)
        self._active.index_fill_(0, index, True)
        self._assigned = sorted({*self._assigned, *slots})

    def free(self, slots: Sequence[int] | None = None) -> None:
        """These slots (all by default) take part no more."""
        freed = self._assigned if slots is None else slots
        self._active.index_fill_(0, index_tensor(freed, self.target.device), False)
        self._assigned = [slot for slot in self._assigned if slot not in freed]

    def enqueue(self, depth: int) -> InFlightRound:
        """Queue a round that drafts at most `depth` levels; 0 is plain decoding."""
        events = self._event()
        round = drafted = None
        lengths = self.cache.length_bounds()
        if not self.asynchronous:
            round = self._host_context(depth)
            drafted = self.drafter.propose(round).to(self.target.device) if depth else DraftTree.root(round.last_tokens)
        key = self._key(depth, drafted)
        if key not in self._captured:
            began = perf_counter()
            self._captured[key] = self._capture(*key)
            self.capture_s += perf_counter() - began
            events = self._event()  # capturing is no part of a round
        shared, (*parts, last_part) = self._captured[key]
        if round is not None and drafted is not None and shared.drafted is not None:
            _write(drafted, shared.drafted, round.slot_index)
        for part in parts:
            part()
            events += self._event()
        last_part()
        assert shared.packed is not None
        pending = InFlightRound(_copy_to_host(shared.packed), events + self._event())
        if round is not None and drafted is not None:
            results = pending.result()
            # A replayed graph lengthens the cache's rows on the device alone. The host's next draft may be written behind them.
            for slot in round.slots:
                lengths[slot] += results[slot].length
            self.cache.set_length_bounds(lengths, exact=round.slots)
            began = perf_counter()
            self._accept_on_host(round, drafted, shared, results)
            pending.host_learn_s = perf_counter() - began
        return pending

    def _key(self, depth: int, drafted: DraftTree | None) -> tuple[int, int, int]:
        """Which captured round serves: its number of slots, its draft depth, and its number of nodes if the host drafted (else 0)."""
        slots = _bucket(self._assigned[-1] + 1, self.cache.rows)
        if drafted is None:
            return slots, depth, 0
        nodes = drafted.tokens.shape[1]
        return (slots, self.drafter.max_depth, _bucket(nodes, self.drafter.max_nodes)) if nodes > 1 else (slots, 0, 0)

    def _host_context(self, depth: int) -> RoundContext:
        """The context of the assigned slots, for a drafter that needs the host."""
        cache, slots = self.cache, list(self._assigned)
        cache.static_shape = False
        cache.select(slots)
        # Indexing copies: the round overwrites both.
        position, last_tokens = cache.length[cache.index], self._last_tokens[cache.index]
        return RoundContext(slots, cache.index, last_tokens, position, self._noise_keys[cache.index], self.sampling, depth, cache=cache)

    def _accept_on_host(self, round: RoundContext, drafted: DraftTree, shared: _Shared, results: dict[int, HostResult]) -> None:
        """Let a drafter that needs the host learn what was accepted of its trees."""
        verdict, out, index = shared.verdict, shared.out, round.slot_index
        assert verdict is not None and out is not None
        nodes = drafted.tokens.shape[1]
        out = NodeOutput(out.hidden[index, :nodes], None if out.taps is None else out.taps[index, :nodes])
        host_results = [results[slot] for slot in round.slots]
        self.drafter.accept(
            round, drafted, Verdict(verdict.path[index], verdict.length[index], verdict.next_token[index], host_results), out
        )

    def _event(self) -> list[torch.cuda.Event]:
        """An event recorded at this point of the device's work; none on a CPU."""
        if self.target.device.type != "cuda":
            return []
        event = torch.cuda.Event(enable_timing=self.time_parts)
        event.record(torch.cuda.current_stream(self.target.device))
        return [event]

    def _capture(self, slots: int, depth: int, nodes: int) -> tuple[_Shared, list[Callable[[], Any]]]:
        """Capture a round of the first `slots` slots that drafts `depth` levels, or gets `nodes` nodes from the host. No slot is active
        meanwhile, so that nothing is committed."""
        cache = self.cache
        before = self._active.clone(), cache.length_bounds(), cache.static_shape
        self._active.fill_(False)
        cache.static_shape = True
        cache.select(range(slots))
        views = self._last_tokens[:slots], cache.selected_length, self._noise_keys[:slots]
        shared = _Shared(RoundContext(cache.selected, cache.index, *views, self.sampling, depth, self._active[:slots], cache))
        if nodes:
            tokens = torch.zeros(slots, nodes, dtype=torch.int64, device=self.target.device)
            shared.drafted = DraftTree.build(tokens, tokens.clone(), tokens[:, 0].clone())
        parts = [partial(part, shared) for part in (self._draft, self._check, self._accept, self._commit)]
        captured = capture(parts if self.time_parts else [partial(_run_all, parts)], self._memory)
        # Captured rounds of other shapes may reuse this memory; the host keeps only what it still reads.
        shared.tree = None
        if self.asynchronous:
            shared.out = shared.verdict = None
        active_before, bounds_before, cache.static_shape = before
        cache.set_length_bounds(bounds_before)
        self._active.copy_(active_before)
        return shared, captured

    def _draft(self, shared: _Shared) -> None:
        """The trees; those of inactive slots are empty."""
        assert shared.round.active is not None
        self.cache.static_shape = True
        self.cache.select(shared.round.slots)
        if shared.drafted is not None:
            tree = DraftTree.build(shared.drafted.tokens, shared.drafted.parents, shared.drafted.size)
        elif shared.round.depth:
            tree = self.drafter.propose(shared.round)
        else:
            tree = Plain().propose(shared.round)
        shared.tree = replace(tree, size=torch.where(shared.round.active, tree.size, 0), full=False, _deepest=None)

    def _check(self, shared: _Shared) -> None:
        """The target on the trees, and the verdict."""
        tree = shared.tree
        assert tree is not None
        attention = TreeAttention.tree(self.cache, tree)
        # Nodes past the last position yield only tokens past the limit, but their index must exist.
        positions = attention.positions().clamp(max=self.target.max_positions - 1)
        out = self.target.forward(tree.tokens, position_ids=positions, cache=self.cache, tree=attention, taps=self.drafter.taps)
        shared.out = NodeOutput(out.hidden, out.taps)
        shared.verdict = self.verify(tree, self.target.logits(out.hidden), shared.round)

    def _accept(self, shared: _Shared) -> None:
        """The drafter learns what was accepted (one that needs the host does so later), and the last tokens advance."""
        round, verdict = shared.round, shared.verdict
        assert shared.tree is not None and verdict is not None and shared.out is not None and round.active is not None
        if self.asynchronous:
            self.drafter.accept(round, shared.tree, verdict, shared.out)
        round.last_tokens.copy_(torch.where(round.active, verdict.next_token, round.last_tokens))

    def _commit(self, shared: _Shared) -> None:
        """The cache keeps the accepted nodes, and the result is packed for the host."""
        assert shared.tree is not None and shared.verdict is not None
        self.cache.commit(shared.verdict)
        shared.packed = pack_results(shared.tree, shared.verdict)


def _run_all(parts: Sequence[Callable[[], Any]]) -> None:
    for part in parts:
        part()


def _bucket(count: int, limit: int) -> int:
    """The number of slots or nodes of a captured round that serves `count`: the next power of two, at most `limit`."""
    return min(1 << (count - 1).bit_length(), limit)


def _write(drafted: DraftTree, buffers: DraftTree, slot_index: Tensor) -> None:
    """Write the trees of these slots where a graph reads them. Other slots are inactive, and nodes past a tree's size are not read."""
    nodes = drafted.tokens.shape[1]
    buffers.tokens[slot_index, :nodes], buffers.parents[slot_index, :nodes] = drafted.tokens, drafted.parents
    buffers.size[slot_index] = drafted.size


def _copy_to_host(packed: Tensor) -> Tensor:
    """The same on the host, valid once the device has got there."""
    if packed.device.type != "cuda":
        return packed.clone()
    return torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
