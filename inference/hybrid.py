"""A trained drafter and a look-up beside it: each round takes the one of which more is expected, before the trained drafter has run.

Letters: B rows · K draft depth of the trained drafter.
"""

from typing import Any

from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Drafter, NodeOutput, ResumableDrafter, RoundContext, Target
from draftsmith.inference.drafts import HostDrafter, forget
from draftsmith.inference.expand import TreeSpec
from draftsmith.inference.lookup import Suffix
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict

__all__ = ["Hybrid"]

DECAY = 0.9  # of what earlier rounds accepted, per round
PRIOR = 1.0  # rounds that accepted one token, before any


class Hybrid:
    """Takes the look-up's trees where they are expected to be accepted further than the trained drafter's.

    A look-up's score is the expected number of its accepted nodes, by the frequencies of the text. Frequencies of few occurrences promise too
    much, so the score is multiplied by the share of it that recent look-ups kept. Of the trained drafter the mean of its recent accepted
    lengths is expected. A batch takes one of the two, the one of which more is expected over its rows.

    Args:
        trained: the trained drafter; `tree_spec` is its own.
        lookup: the other one.
    """

    method = "hybrid"
    remembers = True  # what recent drafts were worth
    capturable = False  # the host chooses

    def __init__(self, trained: Any, lookup: HostDrafter | None = None) -> None:
        self.trained: Drafter = trained
        self.lookup = Suffix() if lookup is None else lookup
        self._lookup_depth = self.lookup.max_depth
        self._chosen: list[float] | None = None  # scores of the look-up's drafts, where this round took them
        self._begin()

    def _begin(self) -> None:
        self._score, self._kept_score = 2 * PRIOR, PRIOR  # sums over recent look-ups: promised, accepted
        self._rounds, self._accepted = PRIOR, PRIOR  # sums over the trained drafter's recent trees, one for each row

    def forget(self) -> None:
        self._begin()
        forget(self.trained)
        self.lookup.forget()

    @property
    def tree_spec(self) -> TreeSpec:
        return self.trained.tree_spec  # type: ignore[attr-defined]

    @tree_spec.setter
    def tree_spec(self, tree_spec: TreeSpec) -> None:
        self.trained.tree_spec = tree_spec  # type: ignore[attr-defined]

    @property
    def stop(self) -> Stopping | None:
        """The rule that ends the trained drafter's drafts early."""
        return getattr(self.trained, "stop", None)

    @stop.setter
    def stop(self, stop: Stopping | None) -> None:
        self.trained.stop = stop  # type: ignore[attr-defined]

    @property
    def depth_limit(self) -> int:
        return self.trained.depth_limit  # type: ignore[attr-defined]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.trained.taps

    @property
    def max_nodes(self) -> int:
        return max(self.trained.max_nodes, self.lookup.max_nodes)

    @property
    def max_depth(self) -> int:
        return max(self.trained.max_depth, self.lookup.max_depth)

    def bind(self, target: Target, slots: int, context: int) -> Any:
        # A drafter has space for the context and K + 1 accepted tokens more; a look-up may be accepted further.
        positions = min(target.max_positions, getattr(self.trained, "max_positions", target.max_positions))
        extra = max(0, min(self.lookup.max_depth - self.trained.max_depth, positions - context))
        self._lookup_depth = min(self.lookup.max_depth, self.trained.max_depth + extra)
        self.lookup.bind(target, slots, context)
        self._chosen = None
        return self.trained.bind(target, slots, context + extra)

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        self.lookup.start(slots, prompts, out)
        self.trained.start(slots, prompts, out)

    def propose(self, round: RoundContext) -> DraftTree:
        drafts = [self.lookup.draft(slot, min(round.depth, self._lookup_depth)) for slot in round.slots]
        expected = sum(draft.score for draft in drafts) * self._kept_score / self._score
        if expected > len(drafts) * self._accepted / self._rounds:
            self._chosen = [draft.score for draft in drafts]
            return self.lookup.tree_of(round, drafts)
        return self.trained.propose(round)

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        for row, result in enumerate(verdict.on_host(tree)):
            if self._chosen is not None:
                self._score = DECAY * self._score + self._chosen[row]
                self._kept_score = DECAY * self._kept_score + result.length - 1
            elif result.size > 1:
                self._rounds = DECAY * self._rounds + 1
                self._accepted = DECAY * self._accepted + result.length - 1
        self._chosen = None
        self.lookup.accept(round, tree, verdict, out)
        self.trained.accept(round, tree, verdict, out)

    def drop(self, slots: list[int]) -> None:
        self.lookup.drop(slots)
        self.trained.drop(slots)

    def resumable(self, slot: int, count: int) -> int:
        if not isinstance(self.trained, ResumableDrafter) or not self.lookup.resumable(slot, count):
            return 0
        return self.trained.resumable(slot, count)

    def keep(self, slots: list[int]) -> TreeCache | None:
        self.lookup.keep(slots)
        if isinstance(self.trained, ResumableDrafter):
            return self.trained.keep(slots)
        self.trained.drop(slots)

    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        self.lookup.resume(slots, prompts, reused, out)
        self.trained.resume(slots, prompts, reused, out)  # type: ignore[attr-defined]
