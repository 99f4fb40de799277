"""The decoding loop: a scheduler gives slots to requests, and a runner drafts, verifies and commits a round of all running slots.

Plain decoding is this loop with the drafter `Plain`. Rounds run eagerly (`rounds`) or as CUDA graphs (`graph_rounds`); the loop is the same.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.attention import MAX_NODES, tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Drafter, Plain, ResumableDrafter, Target, tensor_addresses
from draftsmith.inference.exact import check as check_exact
from draftsmith.inference.graph_rounds import GraphRunner, InFlightRound, refusal
from draftsmith.inference.kernels import missing, use
from draftsmith.inference.load_aware import LoadAware
from draftsmith.inference.packed_linear import packed_weights
from draftsmith.inference.prefill import Prefill
from draftsmith.inference.prefix_cache import PrefixCache
from draftsmith.inference.processors import History, Processor
from draftsmith.inference.request import Completion, Counters, Limits, Request, RoundStats, Step, collect, finalise, make_requests
from draftsmith.inference.rounds import EagerRound, EagerRunner, verify_round
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.scheduler import Scheduler
from draftsmith.inference.support import check_supported

__all__ = ["Completion", "Counters", "Decoder", "RoundStats", "Step"]

_DRAFTING: "weakref.WeakSet[Any]" = weakref.WeakSet()  # drafters that serve a stream
_LAST_USER: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()  # by drafter, the counters of the decoder that used it last


class Decoder:
    """Decodes with a target and a drafter.

    `counters` counts its work (see `Counters`).

    Args:
        target: the target model.
        drafter: proposes trees; None is plain decoding.
        slots: sequences that decode at the same time; waiting prompts take the slots of those that end.
        together: prompts wait until so many slots are free, and are then prefilled in as few forwards as possible; better for throughput where
            a round of many slots takes less time than a prefill.
        context: tokens of prompt and answer together, at most. None takes what the prompts and max_new_tokens of each call need; CUDA graphs
            can then seldom be used again.
        chunk: prompt tokens per forward of the prefill.
        timed: synchronise a GPU around the parts of a round, so that their times are true. (The loop itself reads the device once per round.)
        adaptive: chooses the draft depth of each round, or (`LoadAware`, not with kernels) how many drafted nodes are verified; without it
            every round drafts as deep as the drafter can.
        kernels: use the Triton kernels for attention, drafting, verification and commit.
        graphs: with kernels, run each round as one CUDA graph (four, if timed) where that is possible; `refusal` says why not. Calls with
            the same sampling, seed included, use the graphs again.
        exact: the nodes of every forward of a round, plain decoding's too. Decoders of the same `exact`, `context` and `chunk` give the
            same answers in any dtype, whatever their drafters, one slot at a time (`inference/exact.py`).
        keep: a slot keeps the KV of its last request, target's and drafter's, for a later prompt that begins with the same tokens: the
            next turn of a conversation, of this call or another (`inference/prefix_cache.py`). Needs `context`. Answers and drafts are those
            without it, up to rounding: KV of an answer comes from rounds, not from a prefill. Weights must not change meanwhile.
        conversations: with `keep`, so many texts whose slots others took stay in host memory, with the KV of target and drafter. A prompt
            that begins with one brings it back.

    Raises:
        ValueError: an architecture that cannot be tree-verified, sizes below one, rounds that cannot be exact, `keep` without a context or
            with `exact`, `conversations` without `keep`, a context beyond
            the target's positions, or kernels that this device, tree or `adaptive` does not go with.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        slots: int = 1,
        together: int = 1,
        context: int | None = None,
        chunk: int = 256,
        timed: bool = False,
        adaptive: AdaptiveDepth | None = None,
        kernels: bool = False,
        graphs: bool = True,
        exact: int | None = None,
        keep: bool = False,
        conversations: int = 0,
    ) -> None:
        for name, value in (("slots", slots), ("together", together), ("context", context), ("chunk", chunk), ("exact", exact)):
            if value is not None and value < 1:
                raise ValueError(f"got {name} {value}; expected at least 1; correct it")
        if context is not None and context > target.max_positions:
            raise ValueError(f"got context {context}; expected at most the target's {target.max_positions} positions; lower it")
        if together > slots:
            raise ValueError(f"got together {together}; expected at most the {slots} slots; lower it")
        check_supported(target.model.config, target.model)
        self.target = target
        self.drafter: Drafter = Plain() if drafter is None else drafter
        for device in (target.device, getattr(self.drafter, "device", target.device)) if kernels else ():
            if reason := missing(device):
                raise ValueError(f"kernels: {reason}")
        if kernels and self.drafter.max_nodes > MAX_NODES:
            raise ValueError(f"kernels: got trees of {self.drafter.max_nodes} nodes; expected {MAX_NODES} at most; cut the tree")
        if kernels and isinstance(adaptive, LoadAware):
            raise ValueError("kernels: load-aware verification chooses shapes on the host; expected one of them; leave the other out")
        if exact is not None:
            self._check_exact(exact, slots, kernels)
        if keep and (context is None or exact is not None):
            raise ValueError(
                f"keep: got context {context}, exact {exact}; expected a context and no exact rounds; correct them, or leave it out"
            )
        if conversations < 0 or (conversations and not keep):
            raise ValueError(
                f"got conversations {conversations}, keep {keep}; expected 0 or more, and keep where there are any; correct them"
            )
        self.slots, self.together, self.context, self.chunk, self.exact = slots, together, context, chunk, exact
        self.timed = timed and target.device.type == "cuda"
        self.adaptive = adaptive
        self.kernels, self.graphs = kernels, graphs
        self.counters = Counters()
        self._reusable = _Reusable()
        self._prefixes = PrefixCache(self.drafter, conversations) if keep and isinstance(self.drafter, ResumableDrafter) else None
        self._busy = False

    def _check_exact(self, nodes: int, slots: int, kernels: bool) -> None:
        if slots > 1 or kernels:
            raise ValueError(
                f"exact={nodes}: got {'kernels' if kernels else f'{slots} slots'}; expected one slot and no kernels; leave it out"
            )
        check_exact(self.target, nodes, self.drafter.max_nodes)

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
        completions = [Completion() for _ in prompts]
        stream = self.stream(prompts, sampling, max_new_tokens, stop_ids, requests, processors)
        with tree_attention(self.target.model):  # nobody else runs between these rounds: set once
            for steps in stream:
                collect(steps, completions)
        return completions

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        max_new_tokens: int = 128,
        stop_ids: Sequence[int] | frozenset[int] | None = None,
        requests: Sequence[int] | None = None,
        processors: Sequence[Processor] = (),
    ) -> Iterator[list[Step]]:
        """Yield after every round one Step per request that was running.

        Args:
            prompts: token ids of each prompt.
            sampling: how tokens are drawn; greedy by default.
            max_new_tokens: the most new tokens of an answer.
            stop_ids: tokens that end an answer; None takes the target's.
            requests: the noise key of each prompt, its index by default. The output depends on prompt, sampling and key alone, never on slot
                or batch. (Under rejection a drafter that stops early preserves only the distribution.)
            processors: transformers LogitsProcessors, applied to every node with the tokens before it (see `draftsmith.inference.processors`).

        Raises:
            ValueError: before anything runs: an empty prompt, a token outside the vocabulary, a prompt that fills the context, a
                processor that cannot be verified exactly. When it is iterated: a decoder or drafter that is decoding already.
        """
        checked = make_requests(prompts, max_new_tokens, requests, self.context or self.target.max_positions, self.target.vocab_size)
        stops = frozenset(self.target.stop_ids if stop_ids is None else stop_ids)
        sampling = sampling or Sampling()
        history = None
        if History.needed(sampling, processors):
            history = History(sampling, processors, self.slots, self.target.vocab_size, self.target.device)
        longest = max((len(request.prompt) for request in checked), default=0)
        context = self.context or min(longest + max_new_tokens, self.target.max_positions)
        scheduler = Scheduler(checked, self.slots, self._prefixes and self._prefixes.take)
        return self._run(scheduler, sampling, history, Limits(context, max_new_tokens, stops))

    def refusal(self, sampling: Sampling, processed: bool = False) -> str:
        """Why rounds cannot be CUDA graphs, in one line; "" where they can. processed: penalties, processors or constraints are in use."""
        if self._prefixes is not None:
            return "slots that keep their KV need the host"
        with use(self.kernels):
            return refusal(self.target, self.drafter, sampling, processed)

    def _run(self, scheduler: Scheduler, sampling: Sampling, history: History | None, limits: Limits) -> Iterator[list[Step]]:
        """Reserve decoder and drafter, decode all requests, and release what is still running."""
        if not scheduler.unfinished:
            return
        if self._busy:
            raise ValueError("got a second stream on a decoder that is decoding; expected one at a time; make another Decoder")
        if self.drafter in _DRAFTING:
            raise ValueError("got a second stream with a drafter that is drafting; expected one at a time; make another drafter")
        self._busy = True
        _DRAFTING.add(self.drafter)
        runner: GraphRunner | EagerRunner | None = None
        reason = self.refusal(sampling, history is not None)
        if self.kernels and self.graphs and reason:
            warnings.warn(f"rounds are not CUDA graphs: {reason}", stacklevel=2)
        try:
            graphs = self.graphs and not reason
            cache, addresses = self._bind(limits.context, graphs)
            if graphs:
                runner = self._graph_runner(cache, addresses, sampling)
            else:
                exact = (self.exact, limits.context) if self.exact else None
                load_aware = self.adaptive if isinstance(self.adaptive, LoadAware) else None
                runner = EagerRunner(self.target, self.drafter, cache, sampling, history, self._clock, exact, load_aware)
            prefill = Prefill(self.target, self.drafter, cache, self.chunk, history, self.counters)
            yield from self._decode(scheduler, prefill, runner, limits)
        finally:
            self._busy = False
            _DRAFTING.discard(self.drafter)
            if runner is not None and scheduler.running:
                with torch.inference_mode():
                    self._release(scheduler, runner, scheduler.running)

    def _decode(self, scheduler: Scheduler, prefill: Prefill, runner: GraphRunner | EagerRunner, limits: Limits) -> Iterator[list[Step]]:
        """The loop: admit, start a round, finish the oldest pending round. An asynchronous runner is one round ahead of the host."""
        pending: deque[_Started] = deque()
        max_depth = self.drafter.max_depth
        last_result_s = -torch.inf
        while scheduler.unfinished:
            # The modes are entered per round: a consumer may do its own torch work between two rounds.
            with torch.inference_mode(), tree_attention(self.target.model), use(self.kernels), packed_weights():
                admitted = self._admit(scheduler, prefill, runner)
                started_s = self._decoding_s(runner)
                slots = [request.slot for request in scheduler.running]
                depth = min(max_depth, self.adaptive.depth(slots)) if self.adaptive else max_depth
                captured_s = runner.capture_s
                pending.append(_Started(runner.enqueue(depth), scheduler.running, started_s))
                self.counters.capture_s += runner.capture_s - captured_s
                self.counters.target_forwards += 1
                if runner.asynchronous and len(pending) == 1:
                    continue
                oldest = pending.popleft()
                results = oldest.round.result()
                # A round that began after a request had ended says nothing about it.
                requests = [request for request in oldest.requests if not request.ended]
                steps = [finalise(request, results[request.slot], limits) for request in requests]
                self.counters.rounds += 1
                now_s = self._decoding_s(runner)
                total_s, last_result_s = now_s - max(oldest.started_s, last_result_s), now_s
                draft_s, verify_s, other_s = oldest.round.seconds(total_s)
                for step in steps:
                    step.round.draft_s, step.round.verify_s, step.round.other_s = draft_s, verify_s, other_s
                if self.adaptive and requests and not (admitted and runner.overlaps_prefill):
                    self.adaptive.learn([step.slot for step in steps], [results[step.slot] for step in steps], total_s)
                finished = [request for request in requests if request.ended]
                if finished:
                    self._release(scheduler, runner, finished)
            if steps:
                yield steps

    def _admit(self, scheduler: Scheduler, prefill: Prefill, runner: GraphRunner | EagerRunner) -> list[Request]:
        """Give free slots to waiting requests and prefill them -> those requests."""
        if not scheduler.waiting or len(scheduler.free_slots) < self.together:
            return []
        began = self._clock()
        admitted = scheduler.admit()
        if self._prefixes is not None:
            prefill.cache.cut([request.slot for request in admitted], [request.reused for request in admitted])
        prefill.run(admitted)
        scheduler.start(admitted)
        self.counters.prefill_s += self._clock() - began
        slots, last_tokens = [request.slot for request in admitted], [request.prompt[-1] for request in admitted]
        runner.assign(slots, last_tokens, [request.noise_key for request in admitted])
        return admitted

    def _release(self, scheduler: Scheduler, runner: GraphRunner | EagerRunner, requests: Sequence[Request]) -> None:
        """Free the slots of these requests everywhere. Those that have ended keep their KV, if the decoder does."""
        slots = [request.slot for request in requests]
        runner.free(slots)
        scheduler.release(slots)
        if self.adaptive:
            self.adaptive.drop(slots)
        ended = {request.slot: request.prompt + request.answer for request in requests if request.ended and self._prefixes is not None}
        if self._prefixes is not None:
            self._prefixes.keep(ended, runner.cache)
        dropped = [slot for slot in slots if slot not in ended]
        if dropped:
            self.drafter.drop(dropped)
            runner.cache.reset(dropped)

    @torch.inference_mode(False)  # what is allocated here outlives a caller's inference mode
    def _bind(self, context: int, graphs: bool) -> tuple[TreeCache, Any]:
        """Bind the drafter -> a cache of `context` positions, an earlier call's if it is large enough, and what the drafter says a graph reads."""
        reusable, drafter = self._reusable, self.drafter
        capacity = context + (self.exact or drafter.max_nodes)
        if graphs:
            capacity += drafter.max_depth + 1  # a slot may run one round past its end
        key = self.target.dtype, self.target.device
        if reusable.cache is None or reusable.cache.capacity < capacity or reusable.cache_key != key:
            reusable.cache = reusable.runner = None  # free the old ones first
            reusable.cache, reusable.cache_key = TreeCache(self.slots, capacity, self.target.device), key
        # Each time: another decoder may have bound the same drafter meanwhile.
        addresses = drafter.bind(self.target, self.slots, context)
        used_by, _LAST_USER[drafter] = _LAST_USER.get(drafter), self.counters
        if self._prefixes is not None and (self._prefixes.made_for != (reusable.cache, addresses) or used_by is not self.counters):
            self._prefixes.forget()
            self._prefixes.made_for = reusable.cache, addresses
        filled = [] if self._prefixes is None else self._prefixes.slots
        # A prefill that failed leaves its positions behind.
        reusable.cache.reset([slot for slot in range(self.slots) if slot not in filled])
        if self.adaptive:
            self.adaptive.bind(drafter.max_depth)
        return reusable.cache, addresses

    @torch.inference_mode(False)  # as `_bind`
    def _graph_runner(self, cache: TreeCache, addresses: Any, sampling: Sampling) -> GraphRunner:
        """The last call's runner, if everything that its graphs read is still where it was."""
        reusable = self._reusable
        key = cache, self.drafter, self.drafter.capturable, addresses, tensor_addresses(self.target.model), sampling
        if reusable.runner is None or reusable.runner_key != key:
            reusable.runner = None  # free the old graphs first
            reusable.runner, reusable.runner_key = GraphRunner(self.target, self.drafter, cache, sampling, verify_round, self.timed), key
        reusable.runner.free()
        return reusable.runner

    def _decoding_s(self, runner: GraphRunner | EagerRunner) -> float:
        """Seconds of the runner's clock without prefill and graph capture."""
        return runner.clock() - self.counters.prefill_s - self.counters.capture_s

    def _clock(self) -> float:
        if self.timed:
            torch.cuda.synchronize(self.target.device)
        return perf_counter()


@dataclass(slots=True)
class _Started:
    """A pending round, the requests that ran when it began, and that time."""

    round: InFlightRound | EagerRound
    requests: list[Request]
    started_s: float


@dataclass(slots=True)
class _Reusable:
    """What later calls of a decoder may use again, each with what it was made for."""

    cache: TreeCache | None = None
    cache_key: Any = None
    runner: GraphRunner | None = None
    runner_key: Any = None
