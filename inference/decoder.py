"""The decoding loop: propose, verify, commit, for ragged batches whose finished rows are replaced.

Plain decoding is this loop with the drafter `Plain`; no other loop exists. Letters: B live rows · N nodes · K draft depth.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.attention import MOST_NODES, TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Drafter, NodeOutput, Plain, RoundContext, Target, TargetOutput, tensor_addresses
from draftsmith.inference.graph_rounds import GraphRunner, InFlightRound, refusal
from draftsmith.inference.kernels import active, missing, use
from draftsmith.inference.processors import History, Processor
from draftsmith.inference.request import Completion, Limits, Request, RoundStats, Step, finalise, make_requests
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.support import check_supported
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict, verify

__all__ = ["Completion", "Decoder", "RoundStats", "Step"]

_DRAFTING: "weakref.WeakSet[Any]" = weakref.WeakSet()  # drafters whose rows are some stream's


class Decoder:
    """Decodes with a target and a drafter (None: plain).

    rows: sequences in flight · context: prompt and answer together, at most; None takes what the prompts and max_new_tokens
    of each call need, and then graphs are seldom of use again · chunk: prompt tokens per prefill forward · timed: on a GPU, synchronise
    around the parts of a round so that their times are true (the loop itself reads the device once per round) · governor: decides how deep
    to draft; without one every round drafts as deep as the drafter can · kernels: attend, draft, verify and commit with Triton's (no GPU has
    run them yet) · graphs: with them, run each round as one CUDA graph (four, if timed) where that can be: `refusal` says why not. Calls with the same
    sampling, seed included, use the graphs again.

    Counters: target_forwards (prefill included), prefill_chunks, rounds, prefill_s (seconds).

    Raises:
        ValueError: an architecture that cannot be tree-verified, or sizes below one.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        slots: int = 1,
        context: int | None = None,
        chunk: int = 256,
        timed: bool = False,
        adaptive: AdaptiveDepth | None = None,
        kernels: bool = False,
        graphs: bool = True,
    ) -> None:
        for name, value in (("slots", slots), ("context", context), ("chunk", chunk)):
            if value is not None and value < 1:
                raise ValueError(f"got {name} {value}; expected at least 1; correct it")
        if context is not None and context > target.max_positions:
            raise ValueError(f"got context {context}; expected at most the target's {target.max_positions} positions; lower it")
        check_supported(target.model.config, target.model)
        self.target = target
        self.drafter: Drafter = Plain() if drafter is None else drafter
        self.slots = slots
        self.context = context
        self.chunk = chunk
        self.timed = timed and target.device.type == "cuda"
        self.adaptive = adaptive
        if kernels and (reason := missing(target.device)):
            raise ValueError(f"kernels: {reason}")
        if kernels and self.drafter.max_nodes > MOST_NODES:
            raise ValueError(f"kernels: got trees of {self.drafter.max_nodes} nodes; expected {MOST_NODES} at most; cut the tree")
        self.kernels, self.graphs = kernels, graphs
        self.target_forwards = self.prefill_chunks = self.rounds = 0
        self.prefill_s = 0.0
        self._cache: TreeCache | None = None
        self._of: Any = None  # what it was made for
        self._rounds: tuple[Any, GraphRunner] | None = None  # of the last call with graphs, and what has to be as it was
        self._bare: DraftTree | None = None
        self._depth = 0  # K of the drafter, as bound
        self._history: History | None = None
        self._busy = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        max_new_tokens: int = 128,
        stop_ids: Sequence[int] | frozenset[int] | None = None,
        requests: Sequence[int] | None = None,
        processors: Sequence[Processor] = (),
    ) -> list[Completion]:
        """Token ids per prompt -> completions in prompt order; arguments as for `stream`."""
        done = [Completion() for _ in prompts]
        stream = self.stream(prompts, sampling, max_new_tokens, stop_ids, requests, processors)
        with tree_attention(self.target.model):  # nobody else runs between these rounds: set once
            for steps in stream:
                for step in steps:
                    done[step.prompt_index].tokens += step.tokens
                    done[step.prompt_index].reason = step.reason
                    done[step.prompt_index].rounds.append(step.round)
        return done

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        max_new_tokens: int = 128,
        stop_ids: Sequence[int] | frozenset[int] | None = None,
        requests: Sequence[int] | None = None,
        processors: Sequence[Processor] = (),
    ) -> Iterator[list[Step]]:
        """Yield after every round one Step per row that was live.

        stop_ids: None takes the target's. requests: the noise key of each prompt, its index by default; the output depends on prompt,
        sampling and key alone, never on row or batch (under rejection a DraftModel with confidence keeps the law alone). processors:
        transformers LogitsProcessors, applied to every node with the tokens before it (see `draftsmith.inference.processors`).

        Raises:
            ValueError: before anything runs: an empty prompt, a token outside the vocabulary, a prompt that fills the context, a
                processor that cannot be verified exactly.
        """
        waiting = make_requests(prompts, max_new_tokens, requests, self.context or self.target.max_positions, self.target.vocab_size)
        stops = frozenset(self.target.stop_ids if stop_ids is None else stop_ids)
        sampling = sampling or Sampling()
        history = None
        if History.needed(sampling, processors):
            history = History(sampling, processors, self.slots, self.target.vocab_size, self.target.device)
        return self._run(waiting, sampling, history, Limits(0, max_new_tokens, stops))

    def _run(self, waiting: list[Request], sampling: Sampling, history: History | None, limits: Limits) -> Iterator[list[Step]]:
        if not waiting:
            return
        if self._busy:
            raise ValueError("got a second stream on a decoder that is decoding; expected one at a time; make another Decoder")
        if self.drafter in _DRAFTING:
            raise ValueError("got a second stream with a drafter that is drafting; expected one at a time; make another drafter")
        self._busy = True
        _DRAFTING.add(self.drafter)
        live: list[Request] = []
        longest = max(len(request.prompt) for request in waiting)
        limits.context = self.context or min(longest + limits.max_new_tokens, self.target.max_positions)
        self._history = history
        why = self.refusal(sampling, history is not None)
        graphs = self.graphs and not why
        if self.kernels and self.graphs and why:
            warnings.warn(f"rounds are not CUDA graphs: {why}", stacklevel=2)
        try:
            cache, bound = self._bind(limits.context, graphs)
            if graphs:
                yield from self._flights(self._captured(cache, bound, sampling), waiting, live, limits)
                return
            batch: _Batch | None = None
            while waiting or live:
                # The modes are entered per round: a consumer may do its own torch work between two rounds.
                with torch.inference_mode(), tree_attention(self.target.model), use(self.kernels):
                    if waiting and len(live) < self.slots:
                        self._admit(cache, waiting, live)
                        batch = None
                    if batch is None:
                        batch = self._batch(cache, live)
                    steps = self._round(cache, batch, sampling, limits)
                    gone = [step.row for step in steps if step.finished]
                    if gone:
                        self._release(cache, gone)
                        live = [request for request in live if request.row not in gone]
                        batch = None
                yield steps
        finally:
            self._busy = False
            _DRAFTING.discard(self.drafter)
            if live and self._cache is not None:
                with torch.inference_mode():
                    self._release(self._cache, [request.row for request in live])
            self._history = None

    def refusal(self, sampling: Sampling, processed: bool = False) -> str:
        """Why a round is not one graph, in one line; "" where it is."""
        with use(self.kernels):
            return refusal(self.target, self.drafter, sampling, processed)

    def _captured(self, cache: TreeCache, bound: Any, sampling: Sampling) -> GraphRunner:
        """Those of the last call, if all that their graphs read is where it was."""
        same = cache, self.drafter, self.drafter.capturable, bound, tensor_addresses(self.target.model), sampling
        if self._rounds is None or self._rounds[0] != same:
            self._rounds = None  # free the old ones first
            self._rounds = same, GraphRunner(self.target, self.drafter, cache, sampling, partial(_verify, processed=False), self.timed)
        self._rounds[1].free()
        return self._rounds[1]

    def _flights(self, rounds: GraphRunner, waiting: list[Request], live: list[Request], limits: Limits) -> Iterator[list[Step]]:
        """`_run` with rounds that are one graph each: what one committed is looked at while the next is under way."""
        cache = rounds.cache
        flights: deque[tuple[InFlightRound, list[Request]]] = deque()
        began = perf_counter()
        while waiting or live:
            fresh: list[Request] = []
            aside = self.prefill_s + rounds.capture_s
            with torch.inference_mode(), tree_attention(self.target.model), use(self.kernels):
                if waiting and len(live) < self.slots:
                    fresh = self._admit(cache, waiting, live)
                    rounds.assign([one.row for one in fresh], [one.last for one in fresh], [one.key for one in fresh])
                rows = [request.row for request in live]
                depth = min(self._depth, self.adaptive.depth(rows)) if self.adaptive else self._depth
                flights.append((rounds.enqueue(depth), list(live)))
                self.target_forwards += 1
                began += self.prefill_s + rounds.capture_s - aside  # which are no part of a round
                if len(flights) <= rounds.asynchronous:
                    continue
                flight, flown = flights.popleft()
                told = flight.result()
                # Of a row that had ended before the round began there is nothing to learn.
                known = [request for request in flown if not request.ended]
                steps = [finalise(request, told[request.row], limits) for request in known]
                now = perf_counter()
                total, began = now - began, now
                self.rounds += 1
                draft_s, verify_s, learn_s, other_s = flight.part_seconds() or (0.0, total, 0.0, 0.0)
                for step in steps:
                    step.round.draft_s, step.round.verify_s, step.round.other_s = draft_s + learn_s, verify_s, other_s
                if self.adaptive and known and not fresh:  # a prefill was under way beside it
                    self.adaptive.learn([request.row for request in known], [told[request.row] for request in known], total)
                gone = [step.row for step in steps if step.finished]
                if gone:
                    rounds.free(gone)
                    self._release(cache, gone)
                    live[:] = [request for request in live if request.row not in gone]
            if steps:
                yield steps

    def _bind(self, limit: int, late: bool = False) -> tuple[TreeCache, Any]:
        """A cache and drafter state for `limit` positions, those of an earlier call if they are large enough, and what the drafter says of
        its own. late: a row may run a round past its end."""
        capacity = limit + (self.drafter.max_depth + 1) * late + self.drafter.max_nodes
        of = self.target.dtype, self.target.device
        if self._cache is None or self._cache.capacity < capacity or self._of != of:
            self._cache = self._rounds = None  # free the old one first
            self._cache, self._of = TreeCache(self.slots, capacity, self.target.device), of
        self._cache.reset()  # a prefill that failed leaves its slots behind
        # Each time: another decoder may have bound the same drafter meanwhile.
        bound = self.drafter.bind(self.target, self.slots, limit)
        self._depth = self.drafter.max_depth
        if self.adaptive:
            self.adaptive.bind(self._depth)
        return self._cache, bound

    def _admit(self, cache: TreeCache, waiting: list[Request], live: list[Request]) -> list[Request]:
        """Give free rows to waiting prompts, lowest first, and prefill each run of neighbouring rows in one go; the requests that got one."""
        cache.static_shape = False
        began = self._clock()
        used = {request.row for request in live}
        fresh: list[Request] = []
        for row in range(self.slots):
            if waiting and row not in used:
                request = waiting.pop(0)
                request.row, request.last, request.position = row, request.prompt[-1], len(request.prompt) - 1
                fresh.append(request)
        start = 0
        for end in range(1, len(fresh) + 1):
            if end == len(fresh) or fresh[end].row != fresh[end - 1].row + 1:
                self._prefill(cache, fresh[start:end])
                start = end
        live.extend(fresh)
        live.sort(key=lambda request: request.row)
        self.prefill_s += self._clock() - began
        return fresh

    def _prefill(self, cache: TreeCache, fresh: list[Request]) -> None:
        """Run prompt[:-1] of neighbouring rows through the target, a chunk at a time, and start the drafter on them."""
        rows = [request.row for request in fresh]
        cache.select(rows)
        prompts = [request.prompt for request in fresh]
        sizes = [len(prompt) - 1 for prompt in prompts]
        hidden: list[Tensor] = []
        taps: list[Tensor] = []
        for start in range(0, max(sizes), self.chunk):
            counts = [min(max(size - start, 0), self.chunk) for size in sizes]
            width = max(counts)
            ids = [prompt[start : start + count] + [0] * (width - count) for prompt, count in zip(prompts, counts, strict=True)]
            attention = TreeAttention.causal(cache, width)
            out = self._forward(torch.tensor(ids, device=self.target.device), attention.positions(), cache, attention)
            cache.advance(counts)
            self.prefill_chunks += 1
            hidden.append(out.hidden)
            if out.taps is not None:
                taps.append(out.taps)
        shape = (len(rows), 0, self.target.hidden_size)
        empty = torch.zeros(shape, dtype=self.target.dtype, device=self.target.device)
        features = torch.cat(hidden, 1) if hidden else empty
        if self.drafter.taps and not taps:
            taps.append(empty[:, :, None].expand(-1, -1, len(self.drafter.taps), -1))
        out = NodeOutput(features, torch.cat(taps, 1) if taps else None)
        self.drafter.start(rows, prompts, out)
        if self._history:
            self._history.start(rows, prompts)

    def _batch(self, cache: TreeCache, live: list[Request]) -> "_Batch":
        """Put the live rows on the device and select them in the cache."""
        rows = [request.row for request in live]
        cache.select(rows)
        columns = torch.tensor([rows, [request.key for request in live], [request.last for request in live]], device=self.target.device)
        return _Batch(live, *columns.unbind())

    def _forward(self, ids: Tensor, positions: Tensor, cache: TreeCache, attention: TreeAttention) -> TargetOutput:
        self.target_forwards += 1
        return self.target.forward(ids, position_ids=positions, cache=cache, tree=attention, taps=self.drafter.taps)

    def _round(self, cache: TreeCache, batch: "_Batch", sampling: Sampling, limits: Limits) -> list[Step]:
        drafter, governor = self.drafter, self.adaptive
        rows = cache.selected
        begin = self._clock()
        depth = min(self._depth, governor.depth(rows)) if governor else self._depth
        round = RoundContext(rows, batch.rows, batch.root, cache.selected_length, batch.request, sampling, depth)
        tree = drafter.propose(round) if depth else self._root_alone(batch.root)
        proposed = self._clock()
        attention = TreeAttention.tree(cache, tree)
        positions = attention.positions()
        if cache.max_length + depth >= self.target.max_positions:
            # Nodes past the last position yield only tokens past the limit, but their index must exist.
            positions = positions.clamp(max=self.target.max_positions - 1)
        out = self._forward(tree.tokens, positions, cache, attention)
        logits = self.target.logits(out.hidden)
        verdict = _verify(tree, self._history.apply(round, tree, logits) if self._history else logits, round, self._history is not None)
        told = verdict.on_host(tree)
        if self._history:
            self._history.commit(round, tree, verdict)
        verified = self._clock()
        drafter.accept(round, tree, verdict, NodeOutput(out.hidden, out.taps))
        accepted = self._clock()
        cache.commit(verdict, [row.length for row in told], all(row.in_place for row in told))
        batch.root = verdict.next_token
        steps = [finalise(request, row, limits) for request, row in zip(batch.live, told, strict=True)]
        self.rounds += 1
        draft_s, verify_s = proposed - begin + accepted - verified, verified - proposed
        total = self._clock() - begin
        for step in steps:
            step.round.draft_s, step.round.verify_s, step.round.other_s = draft_s, verify_s, total - draft_s - verify_s
        if governor:
            governor.learn(rows, told, total)
        return steps

    def _root_alone(self, root: Tensor) -> DraftTree:
        if self._bare is None or self._bare.tokens.shape[0] != root.shape[0]:
            self._bare = DraftTree.root(root)
        return replace(self._bare, tokens=root[:, None])

    def _release(self, cache: TreeCache, rows: list[int]) -> None:
        self.drafter.drop(rows)
        if self._history:
            self._history.drop(rows)
        if self.adaptive:
            self.adaptive.drop(rows)
        cache.reset(rows)

    def _clock(self) -> float:
        if self.timed:
            torch.cuda.synchronize(self.target.device)
        return perf_counter()


@dataclass(slots=True)
class _Batch:
    """The live requests and, on the device, their rows, noise keys and last tokens, all [B]."""

    live: list[Request]
    rows: Tensor
    request: Tensor
    root: Tensor


def _verify(tree: DraftTree, logits: Tensor, round: RoundContext, processed: bool) -> Verdict:
    """On the device of the head, which need not be that of the first layer. processed: the logits carry penalties already."""
    there, here = logits.device, round.last_tokens.device
    sampling = replace(round.sampling, repetition_penalty=1.0) if processed else round.sampling
    by = verify
    if active():
        from draftsmith.inference.kernels import verify as kernel

        by = verify if kernel.supported(sampling) else kernel.verify
    verdict = by(tree.to(there), logits, sampling, round.noise_keys.to(there), round.positions.to(there), round.depth)
    return verdict if there == here else Verdict(verdict.path.to(here), verdict.length.to(here), verdict.next_token.to(here))
