"""Bounds on τ and on the speedup, judged from records by the lower end of a 95 % interval.

What cannot be judged is an error, never a pass: nothing measured, too few prompts, answers that failed or that are not plain decoding's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.eval import sanity
from draftsmith.eval.intervals import FEWEST, Interval, prompts_for, shown
from draftsmith.eval.load import CostModel, predict
from draftsmith.eval.load_check import rounds_of
from draftsmith.eval.records import Records, RequestRecord
from draftsmith.eval.settings import greedy, rule_of
from draftsmith.eval.speed import speedups
from draftsmith.eval.totals import by_setting, first_turns, tau, totals
from draftsmith.inference.reading import field as entry
from draftsmith.inference.rule_names import RULES


@dataclass(frozen=True, slots=True)
class Bound:
    """A least value.

    Attributes:
        quantity: "tau" or "speedup".
        domain: of the prompts; "" is all of them.
        least: the value.
        batch: prompts decoded at a time, of a speedup; None as they were measured.
    """

    quantity: str
    domain: str
    least: float
    batch: int | None = None

    @property
    def name(self) -> str:
        """For people."""
        words = ["τ" if self.quantity == "tau" else "speedup", f"of {self.domain}" if self.domain else ""]
        words.append(f"at batch {self.batch}" if self.batch else "")
        return " ".join([*filter(None, words), f"≥ {self.least:g}"])


@dataclass(frozen=True, slots=True)
class Check:
    """A bound and what was measured. outcome: "pass", "fail" or "error"; reason: one sentence, "" where it passes.

    estimate and interval are None where nothing was measured; predicted: the estimate is one of the load model.
    """

    bound: Bound
    outcome: str
    reason: str = ""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    prompts: int = 0
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The checks of one evaluation. outcome: "error" if one cannot be judged, else "fail" if one fails, else "pass"."""

    setting: str
    checks: list[Check]
    header: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        outcomes = [check.outcome for check in self.checks]
        return next((outcome for outcome in ("error", "fail") if outcome in outcomes), "pass" if outcomes else "error")


def judge(records: Records, bounds: Sequence[Bound], setting: str | None = None) -> Verdict:
    """Judge bounds at one setting; None is the first of the evaluation."""
    settings = by_setting(records.requests)
    label = setting if setting is not None else next(iter(settings), "")
    reason = _obstacle(records, settings, label)
    requests = settings.get(label, [])
    checks = []
    for bound in bounds:
        check = _judged(records, requests, label, bound)
        checks.append(Check(bound, "error", reason, *_measured_part(check)) if reason else check)
    warnings = sanity.lines(records)
    if records.header["skipped"]:
        count = sum(records.header["skipped"].values())
        warnings.append(f"{count} prompts were skipped, since they do not fit the target's context: nothing here is about them")
    return Verdict(label, checks, records.header, warnings)


def unreadable(bounds: Sequence[Bound], setting: str | None, reason: str) -> Verdict:
    """The verdict on records that cannot be read."""
    return Verdict(setting or "", [Check(bound, "error", reason) for bound in bounds])


def _obstacle(records: Records, settings: dict[str, list[RequestRecord]], label: str) -> str:
    """Why nothing can be judged at this setting; "" where it can."""
    if not settings:
        return "no prompt was answered; run draftsmith eval again"
    if label not in settings:
        return f"no setting {label!r} was measured; expected one of {', '.join(map(repr, settings))}"
    failed = [each.prompt for each in settings[label] if not each.rounds or not each.tokens]
    if failed:
        return f"{len(failed)} of {len(settings[label])} answers failed: they have no tokens ({sanity.shown(failed)}); run draftsmith eval again"
    bugs = [each.prompt for each in records.requests if each.divergence and each.divergence.verdict == "bug"]
    if bugs:
        return f"NOT LOSSLESS: {len(bugs)} answers are not plain decoding's, and rounding is not the reason ({sanity.shown(bugs)})"
    rule = rule_of(label)
    if rule not in RULES:
        return f"rule {rule!r} is not one that this Draftsmith knows; run draftsmith eval again"
    if not RULES[rule].lossless and not greedy(label):
        return f"rule {rule} is LOSSY at this setting: it changes the distribution of the output; measure with a lossless rule"
    return ""


def _judged(records: Records, requests: list[RequestRecord], setting: str, bound: Bound) -> Check:
    chosen = [each for each in requests if each.rounds and bound.domain in ("", each.domain)]
    if not chosen:
        domains = ", ".join(dict.fromkeys(repr(each.domain) for each in requests)) or "none"
        return Check(bound, "error", f"no prompt of domain {bound.domain!r} was answered at this setting; its domains are {domains}")
    if bound.quantity == "tau":
        counts = totals(chosen)
        return _compared(bound, tau(counts), len(first_turns(list(counts))))
    if bound.batch in (None, entry(records.header["settings"], "slots", int, "records: `settings`")):
        timed = [each for each in chosen if each.seconds]
        if not timed:
            return Check(bound, "error", f"nothing was timed at T={setting}; run draftsmith eval again, without --timed")
        measured = speedups(timed)
        return _compared(
            bound,
            Interval(measured["speedup"], measured["speedup_low"], measured["speedup_high"]),
            len(first_turns([each.prompt for each in timed])),
        )
    return _predicted(records, chosen, bound)


def _predicted(records: Records, requests: list[RequestRecord], bound: Bound) -> Check:
    """A speedup at another batch than the measured one, by the load model: of decoding with all slots in use, without prefill."""
    assert bound.batch is not None
    if not records.load:
        return Check(
            bound, "error", "a speedup at another batch than the measured one needs the load model, which these records do not have"
        )
    varying = [name for name in ("adaptive_depth", "load_aware", "policy") if records.header["settings"].get(name)]
    if varying:
        reason = f"the load model knows rounds of one tree, and {varying[0]} chose it anew in each; measure without it"
        return Check(bound, "error", reason)
    model, rounds, tree = CostModel(records.load), rounds_of(requests, records.tree["depth"]), records.tree["tree"]
    if max(rounds.sizes) > model.max_nodes:
        return Check(bound, "error", f"rounds have {max(rounds.sizes)} nodes, and the load was probed up to {model.max_nodes}")
    try:
        predicted = predict(model, rounds, bound.batch, model.contexts[0], tree)
    except ValueError as error:  # a batch beyond those that were probed
        return Check(bound, "error", str(error))
    return _compared(bound, Interval(predicted.speedup, predicted.low, predicted.high), len(rounds.tokens), True)


def _compared(bound: Bound, interval: Interval, prompts: int, predicted: bool = False) -> Check:
    """prompts: over how many the interval is, a conversation counts once; batches, where several were timed at a time."""
    measured = {"estimate": interval.estimate, "low": interval.low, "high": interval.high, "prompts": prompts, "predicted": predicted}
    if interval.low is None or interval.high is None:
        return Check(bound, "error", f"{prompts} prompts are too few for an interval; expected at least {FEWEST}; measure more", **measured)
    if interval.low >= bound.least:
        return Check(bound, "pass", "", **measured)
    reason = f"the lower end of {shown(interval.low, interval.high, '.3f')} is below {bound.least:g}"
    if interval.estimate > bound.least:
        needed = prompts_for(interval, prompts, 1 - bound.least / interval.estimate)
        reason += f"; about {needed:,} prompts of the same kinds would pass, if it stays at {interval.estimate:.3f}"
    return Check(bound, "fail", reason, **measured)


def _measured_part(check: Check) -> tuple[Any, ...]:
    return check.estimate, check.low, check.high, check.prompts, check.predicted
