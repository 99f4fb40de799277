"""Rounds run by the host, one operation after the other. `graph_rounds` has the same interface, with rounds captured as CUDA graphs.

A runner keeps the slots that take part in rounds: `assign` adds slots, `free` takes them out, `enqueue` starts a round of all assigned
slots, and the result of that round is one host result per slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Drafter, NodeOutput, RoundContext, Target
from draftsmith.inference.exact import KeysByPosition, padded
from draftsmith.inference.kernels import active
from draftsmith.inference.load_aware import LoadAware
from draftsmith.inference.processors import History
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import HostResult, Verdict, verify

__all__ = ["EagerRound", "EagerRunner", "verify_round"]


@dataclass(slots=True)
class EagerRound:
    """A round that has run: its result by slot, and the host's seconds of drafting (learning included) and of verifying."""

    results: dict[int, HostResult]
    draft_s: float
    verify_s: float

    def result(self) -> dict[int, HostResult]:
        return self.results

    def seconds(self, total: float) -> tuple[float, float, float]:
        """Seconds of drafting, of verifying and of all else, of `total` seconds."""
        return self.draft_s, self.verify_s, total - self.draft_s - self.verify_s


class EagerRunner:
    """Runs rounds with one host transfer each, the verdict's.

    Args:
        target, drafter: the models.
        cache: the target's KV cache, prefilled for assigned slots.
        sampling: how tokens are drawn.
        history: committed tokens, if penalties or processors need them.
        clock: seconds; it synchronises the device if the parts of a round are to be timed.
        exact: the nodes of each forward and the keys of each node, where rounds are exact (`inference/exact.py`).
        load_aware: chooses the drafted nodes that are verified; None verifies all.
    """

    asynchronous = False  # a round has ended when `enqueue` returns
    overlaps_prefill = False
    capture_s = 0.0

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        cache: TreeCache,
        sampling: Sampling,
        history: History | None,
        clock: Callable[[], float],
        exact: tuple[int, int] | None = None,
        load_aware: LoadAware | None = None,
    ) -> None:
        self.target, self.drafter, self.cache, self.sampling, self.history, self.clock = target, drafter, cache, sampling, history, clock
        self.exact, self.load_aware = exact, load_aware
        self._assigned: dict[int, tuple[int, int]] = {}  # slot -> last committed token, noise key
        self._batch: _Batch | None = None
        self._root_tree: DraftTree | None = None

    def assign(self, slots: Sequence[int], last_tokens: Sequence[int], noise_keys: Sequence[int]) -> None:
        """These prefilled slots take part from the next round on."""
        self._assigned.update(zip(slots, zip(last_tokens, noise_keys, strict=True), strict=True))
        self._batch = None

    def free(self, slots: Sequence[int]) -> None:
        """These slots take part no more."""
        for slot in slots:
            self._assigned.pop(slot, None)
        if self.history:
            self.history.drop(list(slots))
        self._batch = None

    def enqueue(self, depth: int) -> EagerRound:
        """Run a round that drafts at most `depth` levels; 0 is plain decoding."""
        if self._batch is None:
            self._batch = self._select()
        started = self.clock()
        cache, batch = self.cache, self._batch
        round = RoundContext(
            cache.selected, batch.slot_index, batch.last_tokens, cache.selected_length, batch.noise_keys, self.sampling, depth, cache=cache
        )
        round.scored = self.load_aware is not None
        drafted = self.drafter.propose(round) if depth else self._last_tokens_alone(batch.last_tokens)
        proposed = self.clock()
        admitted = self.load_aware.admit(drafted, proposed - started) if self.load_aware else None
        tree = admitted.tree if admitted else drafted
        out, verdict = self._verify(round, tree)
        results = verdict.on_host(tree)
        if self.history:
            self.history.commit(round, tree, verdict)
        verified = self.clock()
        self.drafter.accept(round, drafted, *(admitted.for_drafter(verdict, out) if admitted else (verdict, out)))
        accepted = self.clock()
        cache.commit(verdict, [result.length for result in results], all(result.in_place for result in results))
        batch.last_tokens = verdict.next_token
        by_slot = dict(zip(round.slots, results, strict=True))
        for slot, result in by_slot.items():
            self._assigned[slot] = result.tokens[-1], self._assigned[slot][1]
        return EagerRound(by_slot, proposed - started + accepted - verified, verified - proposed)

    def _select(self) -> "_Batch":
        """Select the assigned slots in the cache, and put what rounds need of them on the device."""
        slots = sorted(self._assigned)
        self.cache.select(slots)
        last_tokens, noise_keys = zip(*(self._assigned[slot] for slot in slots), strict=True)
        return _Batch(*torch.tensor([slots, last_tokens, noise_keys], device=self.target.device).unbind())

    def _last_tokens_alone(self, last_tokens: Tensor) -> DraftTree:
        """Trees of one node. What does not depend on the tokens is made once."""
        if self._root_tree is None or self._root_tree.tokens.shape[0] != last_tokens.shape[0]:
            self._root_tree = DraftTree.root(last_tokens)
        return replace(self._root_tree, tokens=last_tokens[:, None])

    def _verify(self, round: RoundContext, tree: DraftTree) -> tuple[NodeOutput, Verdict]:
        nodes = tree.tokens.shape[1]
        wide = padded(tree, self.exact[0]) if self.exact else tree
        attention = TreeAttention.tree(self.cache, wide)
        if self.exact:
            attention.by_position = KeysByPosition(attention, self.exact[1])
        positions = attention.positions()
        if self.cache.max_length + round.depth >= self.target.max_positions:
            # Nodes past the last position yield only tokens past the limit, but their index must exist.
            positions = positions.clamp(max=self.target.max_positions - 1)
        out = self.target.forward(wide.tokens, position_ids=positions, cache=self.cache, tree=attention, taps=self.drafter.taps)
        logits = self.target.logits(out.hidden)[:, :nodes]
        if self.history:
            logits = self.history.apply(round, tree, logits)
        taps = None if out.taps is None else out.taps[:, :nodes]
        return NodeOutput(out.hidden[:, :nodes], taps), verify_round(tree, logits, round, self.history is not None)


@dataclass(slots=True)
class _Batch:
    """The slots of a round, their last committed tokens and their noise keys, all [B] on the device."""

    slot_index: Tensor
    last_tokens: Tensor
    noise_keys: Tensor


def verify_round(tree: DraftTree, logits: Tensor, round: RoundContext, processed: bool = False) -> Verdict:
    """`verify` on the device of the logits, which need not be that of the first layer; the kernel where it is in use and can.

    Args:
        tree: the trees of the round.
        logits: target logits [B,N,V] of the nodes.
        round: the round's context.
        processed: whether the logits carry the penalties already.
    """
    sampling = replace(round.sampling, repetition_penalty=1.0) if processed else round.sampling
    function = verify
    if active():
        from draftsmith.inference.kernels import verify as kernel

        if not kernel.refusal(sampling):
            function = kernel.verify
    device = logits.device
    verdict = function(tree.to(device), logits, sampling, round.noise_keys.to(device), round.positions.to(device), round.depth)
    first = round.last_tokens.device
    return verdict if device == first else Verdict(verdict.path.to(first), verdict.length.to(first), verdict.next_token.to(first))
