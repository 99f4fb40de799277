"""How a drafter is evaluated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """How a drafter is evaluated.

    Attributes:
        max_new_tokens: most tokens of an answer.
        temperatures: each is measured; the first gives the table by domain and the speed.
        max_nodes: most nodes of a chosen tree, the root included.
        choose: "best" chooses the tree with the highest τ over the relative cost of its round, "largest" the best tree of `max_nodes`
            nodes, each on half of the prompts; "" keeps the drafter's tree and reports all prompts.
        rule: how drafts are verified at T > 0.
        slots: prompts decoded at a time, of those that are timed.
        timed: how many prompts of each domain are timed; None is all. The others are decoded several at a time, for τ and losslessness.
        adaptive_depth: draft only as deep as pays.
        kernels: decode with Triton kernels.
        exact: nodes of each forward, for rounds in which rounding cannot make answers diverge (`inference/exact.py`); None for ordinary rounds.
    """

    max_new_tokens: int
    temperatures: list[float]
    max_nodes: int
    choose: str = "best"
    rule: str = "target-sample"
    slots: int = 1
    timed: int | None = None
    adaptive_depth: bool = False
    kernels: bool = False
    exact: int | None = None
