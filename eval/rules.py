"""Which verification rule accepts most at T > 0: the measured τ of each, on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.eval.intervals import of_difference, of_ratio
from draftsmith.eval.records import Records
from draftsmith.eval.settings import greedy, rule_of, without_rule
from draftsmith.eval.totals import by_setting, columns, totals
from draftsmith.inference.rule_names import RULES


@dataclass(frozen=True, slots=True)
class RuleRow:
    """τ of a rule with its 95 % interval, and its difference from that of the first rule given; None with too few prompts.

    Attributes:
        setting: label of the sampling, without the rule.
        rule: a name of RULES.
        lossless: whether the output is distributed as the target's own.
    """

    setting: str
    rule: str
    lossless: bool
    tau: float
    low: float | None
    high: float | None
    delta: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None


def compare_rules(records: Records) -> list[RuleRow]:
    """The rules of each setting that was measured under several, the highest τ first."""
    settings = {setting: totals(requests) for setting, requests in by_setting(records.requests).items() if not greedy(setting)}
    rows = []
    for base in dict.fromkeys(map(without_rule, settings)):
        labels = [setting for setting in settings if without_rule(setting) == base]
        measured = []
        for number, setting in enumerate(labels if len(labels) > 1 else ()):
            prompts = [prompt for prompt in settings[labels[0]] if prompt in settings[setting]]
            tokens, rounds = columns([settings[labels[0]], settings[setting]], prompts)
            rule, delta = rule_of(setting), of_difference(tokens, rounds) if number else ()
            measured.append(RuleRow(base, rule, RULES[rule].lossless, *of_ratio(tokens[1], rounds[1]), *delta))
        rows += sorted(measured, key=lambda row: -row.tau)
    return rows


def best_rules(rows: Sequence[RuleRow]) -> list[str]:
    """A sentence for each setting: the lossless rule with the highest τ."""
    best = {row.setting: row for row in reversed(rows) if row.lossless}
    return [f"T={setting}: of the lossless rules {row.rule} has the highest τ, {row.tau:.2f}" for setting, row in best.items()]
