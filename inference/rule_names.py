"""The verification rules by name. Nothing heavy is imported, so that commands can list the rules in their --help."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["DEFAULT_RULE", "RULES", "USUAL_RULE", "Rule"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How drafted tokens are verified at a temperature above 0.

    Attributes:
        children: how a drafter chooses the children of a node. "top": its best tokens. "shared-noise": its best tokens after the target's
            own sampling noise is added, so that both agree more often. "drawn": samples of its distribution q without replacement.
            "replaced": samples of q with replacement.
        lossless: whether the output is distributed as the target's own.
        about: one line for --help.
    """

    children: Literal["top", "shared-noise", "drawn", "replaced"]
    lossless: bool
    about: str


RULES = {
    "shared-noise": Rule(
        "shared-noise", True, "y ~ p at each visited node; descend where a child is y, else emit y; the drafter has the same noise"
    ),
    "target-sample": Rule("top", True, "the same with the drafter's best tokens for children"),
    "rejection": Rule("drawn", True, "children drawn from q without replacement, accepted with p/q, then from the residual"),
    "rejection-replacement": Rule("replaced", True, "the same with replacement"),
    "typical": Rule("top", False, "accept where p(x) > min(ε, δ·exp(−H(p))), by default 0.09 and 0.3, the longest path"),
    "membership": Rule("top", False, "accept what top_k, top_p and min_p keep, the longest path"),
}
# The output equals that of "target-sample", since y does not depend on the children, and more drafts are accepted: at T = 1 on the tiny
# target, tau 1.36 -> 1.69 with Medusa heads, 1.56 -> 2.12 with a draft model.
DEFAULT_RULE = "shared-noise"
USUAL_RULE = "target-sample"  # of an evaluation: it is nearest to what serving engines do
