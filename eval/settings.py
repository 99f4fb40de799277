"""How a drafter is evaluated, and the labels of sampling settings in a report."""

from dataclasses import dataclass, fields

from draftsmith.inference.sampler import Sampling

FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a drafter is evaluated.

    Attributes:
        max_new_tokens: most tokens of an answer.
        samplings: each is measured, by one rule; the first gives the tables by domain and chooses the tree.
        max_nodes: most nodes of a chosen tree, the root included.
        choose: "best" chooses the tree with the highest τ over the relative cost of its round, "largest" the best tree of `max_nodes`
            nodes, each on half of the prompts; "" keeps the drafter's tree and reports all prompts.
        slots: prompts decoded at a time, of those that are timed.
        timed: how many prompts of each domain are timed; None is all. The others are decoded several at a time, for τ and losslessness.
        adaptive_depth: draft only as deep as pays.
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
    kernels: bool = False
    probe_s: float = 0.0
    exact: int | None = None

    @property
    def rule(self) -> str:
        """How drafts are verified at T > 0."""
        return self.samplings[0].rule

    @property
    def labels(self) -> list[str]:
        """Of the sampling settings."""
        return [label(sampling) for sampling in self.samplings]


def label(sampling: Sampling) -> str:
    """A sampling setting in a report: its temperature, then what else is not off, as in `0.7 top_p=0.9`."""
    defaults = {each.name: each.default for each in fields(Sampling)}
    others = [f"{name}={getattr(sampling, name):g}" for name in FILTERS if getattr(sampling, name) != defaults[name]]
    return " ".join((f"{sampling.temperature:g}", *others))


def greedy(setting: str) -> bool:
    """Whether the setting of this label is greedy decoding."""
    return float(setting.split()[0]) == 0
