"""When to stop drafting: rules for every drafter that drafts level by level.

A rule looks at the distributions q that the next level's children would be drawn from, before any of them is drawn. These depend only on
tokens drawn before, so every lossless rule of verification stays lossless: under rejection the draft's length must not depend on how the
token under test was drawn. The first level is always drafted. A batch stops when all its rows would: further levels of a padded batch are
free. Under rejection a row's tokens then depend on the rows beside it; their distribution does not.

| rule | the draft goes on after a node where | |
|---|---|---|
| confidence:P | max q ≥ P | as transformers' assistant_confidence_threshold |
| svip:H | √H(q) ≤ H | SVIP (Zhang et al. 2024, arXiv 2411.18462) |
| adaedl:L | 1 − √(γ · H(q)) ≥ L, γ = 0.2 | AdaEDL (Agrawal et al. 2024, arXiv 2410.18351), with a fixed L |
| survival:P | Π c_i ≥ P, the path down to the next level's tokens | by the drafter's fitted confidences c (`confidence.py`), as DSpark |
| gain | the level's expected tokens are worth its time | |

H(q) is the entropy in nats. `survival` multiplies the largest confidence of each level. `gain` estimates the tokens of a further level as the sum over rows of Π max q, over the levels of the
likeliest path, and their worth by the seconds that a token took so far; the seconds of a level are the slope of rounds' seconds over their
depth, and at least those of drafting one.

Letters: B rows of a round · F nodes of a level · D draft vocabulary.
"""

from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from draftsmith.inference.confidence import Confidence, entropy
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.sampler import warp

__all__ = ["StopCheck", "Stopping", "parse_stopping"]

GAMMA = 0.2  # of AdaEDL
DECAY = 0.98  # of what `gain` measured, by round
DEPTH_STRIDE = 2**24  # more than any index of a token
# By rule: the range of its threshold, the upper end excluded; None takes no threshold.
RULES: dict[str, tuple[float, float] | None] = {
    "confidence": (0.0, 1.0),
    "svip": (0.0, 10.0),
    "adaedl": (-10.0, 1.0),
    "survival": (0.0, 1.0),
    "gain": None,
}


@dataclass(slots=True)
class _Clock:
    """What rounds of `gain` took: decayed sums over rounds of 1, depth, seconds, depth², depth · seconds and tokens."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 6)
    level_s: float = 0.0  # of drafting a level, a decayed mean
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    began: float = 0.0
    depth: int = 0  # of the round since `began`

    def add(self, depth: int, seconds: float, tokens: int) -> None:
        """A round: its depth, its seconds and its tokens."""
        new = (1.0, depth, seconds, depth * depth, depth * seconds, tokens)
        self.sums = [DECAY * old + number for old, number in zip(self.sums, new, strict=True)]

    def level_in_tokens(self) -> float:
        """The seconds of a level over those of a token; 0 before two rounds are known."""
        count, depths, seconds, squares, mixed, tokens = self.sums
        if count < 1.5 or not tokens or not seconds:
            return 0.0
        spread = count * squares - depths * depths
        slope = (count * mixed - depths * seconds) / spread if spread > 1e-6 * count * count else 0.0
        return max(slope, self.level_s) * tokens / seconds


@dataclass(frozen=True, slots=True)
class Stopping:
    """A rule of RULES and its threshold.

    Attributes:
        confidence: the drafter's, which `survival` needs.

    Raises:
        ValueError: an unknown rule, or a threshold that it does not take.
    """

    rule: str
    threshold: float = 0.0
    clock: _Clock = field(default_factory=_Clock, compare=False, repr=False)
    confidence: Confidence | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"got rule {self.rule!r}; expected one of {', '.join(RULES)}; correct it")
        limits = RULES[self.rule]
        if limits is not None and not limits[0] <= self.threshold < limits[1]:
            raise ValueError(f"got {self.rule} {self.threshold:g}; expected {limits[0]:g} or more and less than {limits[1]:g}; correct it")

    def __str__(self) -> str:
        return self.rule if RULES[self.rule] is None else f"{self.rule}:{self.threshold:g}"

    def goes_on(self, logits: Tensor) -> Tensor:
        """logits [...,D] of the distribution that children would be drawn from -> bool [...]. Not for `survival` and `gain`, which need a round."""
        log_q = logits.float().log_softmax(-1)
        if self.rule == "confidence":
            return log_q.amax(-1).exp() >= self.threshold
        spread = entropy(log_q)
        return spread.sqrt() <= self.threshold if self.rule == "svip" else 1 - (GAMMA * spread).sqrt() >= self.threshold


def parse_stopping(text: str) -> Stopping | None:
    """A rule as the option --stop writes it, such as svip:0.6; none is None.

    Raises:
        ValueError: an unknown rule, a threshold that is missing, superfluous, no number or outside its range.
    """
    if text == "none":
        return None
    rule, colon, number = text.partition(":")
    wanted = ", ".join(name if limits is None else f"{name}:NUMBER" for name, limits in RULES.items())
    if rule not in RULES or bool(colon) != (RULES[rule] is not None):
        raise ValueError(f"got {text!r}; expected none, {wanted}; correct it")
    try:
        return Stopping(rule, float(number) if colon else 0.0)
    except ValueError as error:
        raise ValueError(f"{error}" if "expected" in str(error) else f"got {text!r}; expected {wanted}; correct it") from None


class StopCheck:
    """Asks a rule, in one round, whether the next level is drafted; without a rule every level is.

    Attributes:
        stride: what a level adds to the index that its draws are keyed by. Whether a token is drawn for an index may depend, through the
            rows beside, on what an earlier round drew in vain for that index. Drawn with the same noise again it would be no draw from q. So
            draws are keyed by depth too where drafts stop early or not all nodes are verified: no two rounds draw for one index at one depth.
    """

    def __init__(self, stopping: Stopping | None, round: RoundContext) -> None:
        self._stopping, self._sampling, self._depth = stopping, round.sampling, 0
        self._survival: Tensor | None = None
        drawn = (stopping is not None or round.scored) and round.sampling.children in ("drawn", "replaced")
        self.stride = DEPTH_STRIDE + 1 if drawn else 1
        if stopping is not None and stopping.rule == "gain":
            self._begin(stopping.clock, round)

    def _begin(self, clock: _Clock, round: RoundContext) -> None:
        now, positions = perf_counter(), round.positions.tolist()
        if clock.slots == round.slots and clock.began:
            grown = [new - old for new, old in zip(positions, clock.positions, strict=True)]
            if all(0 < tokens <= clock.depth + 1 for tokens in grown):  # else another request has come to a slot
                clock.add(clock.depth, now - clock.began, sum(grown))
        clock.slots, clock.positions, clock.began = list(round.slots), positions, now
        self._level_began = now

    def ends(self, logits: Tensor) -> bool:
        """Whether the level whose children logits [B,F,D] would give is not drafted. Asked once for each level; waits for the device."""
        stopping = self._stopping
        if stopping is None:
            return False
        self._depth += 1
        if stopping.rule == "gain":
            return self._gains_nothing(stopping.clock, logits)
        if stopping.rule == "survival":
            return self._hardly_survives(stopping, logits)
        if self._depth == 1:
            return False
        return not bool(stopping.goes_on(self._warped(logits)).any())

    def _warped(self, logits: Tensor) -> Tensor:
        return logits if self._sampling.greedy else warp(logits, self._sampling)

    def _down_to(self, best: Tensor) -> Tensor:
        """The survival [B] of the best path, of which `best` [B] is the share at this level."""
        self._survival = best if self._survival is None else self._survival * best
        return self._survival

    def _hardly_survives(self, stopping: Stopping, logits: Tensor) -> bool:
        if stopping.confidence is None:
            raise ValueError(f"{stopping} needs a drafter's fitted confidence; give Stopping one, or take confidence:P")
        children = "drawn" if self._sampling.children == "replaced" else self._sampling.children
        chance = stopping.confidence.chance(self._depth, self._warped(logits), "greedy" if self._sampling.greedy else children)
        survival = self._down_to(chance.amax(1))
        return self._depth > 1 and not bool((survival >= stopping.threshold).any())

    def _gains_nothing(self, clock: _Clock, logits: Tensor) -> bool:
        survival = self._down_to(self._warped(logits).float().softmax(-1).amax((1, 2)))
        gained, now = float(survival.sum()), perf_counter()
        if self._depth > 1:
            clock.level_s = 0.9 * clock.level_s + 0.1 * (now - self._level_began) if clock.level_s else now - self._level_began
            if gained < clock.level_in_tokens():
                return True
        clock.depth, self._level_began = self._depth, now
        return False
