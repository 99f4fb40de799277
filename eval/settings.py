"""How a drafter is evaluated, and the labels of sampling settings in a report."""

from dataclasses import dataclass, fields

from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.load_aware import LoadAware
from draftsmith.inference.policy import LoadPolicy, PolicyDepth
from draftsmith.inference.rule_names import USUAL_RULE
from draftsmith.inference.sampler import Sampling

FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
RULE = "rule="


@dataclass(frozen=True, slots=True)
class Settings:
    """How a drafter is evaluated.

    Attributes:
        max_new_tokens: most tokens of an answer.
        samplings: each is measured; the first gives the tables by domain and chooses the tree.
        max_nodes: most nodes of a chosen tree, the root included.
        choose: "best" chooses the tree with the highest τ over the relative cost of its round, "largest" the best tree of `max_nodes`
            nodes, each on half of the prompts; "" keeps the drafter's tree and reports all prompts.
        slots: prompts decoded at a time, of those that are timed.
        timed: how many prompts of each domain are timed; None is all. The others are decoded several at a time, for τ and losslessness.
        adaptive_depth: draft only as deep as pays.
        load_aware: verify only as many of the drafted nodes as pay.
        policy: says how deep to draft for the slots in use; None drafts as deep as the tree.
        kernels: decode with Triton kernels.
        probe_s: about how many seconds the probe of other loads may take (eval/probe.py); 0 leaves it out.
        exact: nodes of each forward, for rounds in which rounding cannot make answers diverge (`inference/exact.py`); None for ordinary rounds.
    """

    max_new_tokens: int
    samplings: list[Sampling]
    max_nodes: int
    choose: str = "best"
    slots: int = 1
    timed: int | None = None
    adaptive_depth: bool = False
    load_aware: bool = False
    policy: LoadPolicy | None = None
    kernels: bool = False
    probe_s: float = 0.0
    exact: int | None = None

    def adaptive(self) -> AdaptiveDepth | None:
        """What chooses the depth of each round, or what is verified of it; None drafts as deep as the tree, and verifies all."""
        if self.policy is not None:
            return PolicyDepth(self.policy)
        if self.load_aware:
            return LoadAware()
        return AdaptiveDepth() if self.adaptive_depth else None

    @property
    def labels(self) -> list[str]:
        """Of the sampling settings."""
        return [label(sampling) for sampling in self.samplings]


def label(sampling: Sampling) -> str:
    """A sampling setting in a report: its temperature, what else is not off, the constraint and the rule, as in `0.7 top_p=0.9 rule=rejection`."""
    defaults = {each.name: each.default for each in fields(Sampling)}
    values = {name: getattr(sampling, name) for name in FILTERS}
    # All digits of integers: seeds that differ in their last digit are two settings.
    others = [f"{name}={value if isinstance(value, int) else f'{value:g}'}" for name, value in values.items() if value != defaults[name]]
    rule = [] if sampling.greedy or sampling.rule == USUAL_RULE else [f"{RULE}{sampling.rule}"]
    constraint = [sampling.constraint.name] if sampling.constraint else []
    return " ".join((f"{sampling.temperature:g}", *others, *constraint, *rule))


def rule_of(setting: str) -> str:
    """How drafts are verified in the setting of this label; at T = 0 all rules accept the likeliest token."""
    last = setting.split()[-1]
    return last.removeprefix(RULE) if last.startswith(RULE) else USUAL_RULE


def without_rule(setting: str) -> str:
    """The label of the same sampling under the usual rule."""
    return " ".join(word for word in setting.split() if not word.startswith(RULE))


def greedy(setting: str) -> bool:
    """Whether the setting of this label is greedy decoding."""
    return float(setting.split()[0]) == 0
