"""The report of an evaluation, from its records alone.

τ = Σ committed / Σ rounds over all rounds, so that τ = 1 + Σ survival always holds. The intervals: eval/intervals.py.

Letters: K draft depth · N tree nodes with the root. P is the number of prompts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from draftsmith.eval import cost, intervals, trees
from draftsmith.eval.baselines import Reference, references
from draftsmith.eval.load import CostModel
from draftsmith.eval.load_report import estimate, load_report
from draftsmith.eval.quality import Quality, lossy_settings, qualities
from draftsmith.eval.records import Divergence, Records, RequestRecord, distinct_ngrams
from draftsmith.eval.roofline import Hardware
from draftsmith.eval.rules import RuleRow, compare_rules
from draftsmith.eval.sanity import Degenerate, degenerate, lines, shown
from draftsmith.eval.service import service
from draftsmith.eval.settings import greedy, rule_of
from draftsmith.eval.speed import speed, speedups
from draftsmith.inference.rule_names import RULES


@dataclass(frozen=True, slots=True)
class Acceptance:
    """τ over some requests, with its 95 % interval [low, high], None with too few prompts.

    survival[k] is P(at least k + 1 drafted tokens accepted); conditional[k] is survival[k] / survival[k − 1].
    """

    prompts: int
    rounds: int
    tokens: int
    tau: float
    low: float | None
    high: float | None
    survival: tuple[float, ...]
    conditional: tuple[float, ...]


@dataclass(slots=True)
class Report:
    """All results of `draftsmith eval`.

    Attributes:
        target: a `TargetIdentity` as a dict.
        drafter: method, name, hash and bytes.
        settings: what the numbers depend on.
        machine: what they were measured on.
        versions: of the libraries.
        tree: the draft tree, as a config has it.
        nodes: most nodes of a round.
        cost: seconds of a target forward over N nodes, by N.
        drafting: seconds of drafting a chain, by its depth K.
        by_nodes: for some N, the best tree of N nodes: its depth, its exact τ on the reported half of the prompts, the relative cost of
            its round, and τ over it.
        overall: by setting, over all reported prompts.
        domains: by setting and domain.
        distinct: distinct 8-grams over all 8-grams of the answers at the first setting.
        divergences: answers that differ from plain decoding's, where the rule promises the same tokens.
        answers: how many answers were compared with plain decoding's.
        checked_tokens: how many tokens of them, up to the first that differs.
        like_transformers: how many greedy answers of plain decoding equal those of transformers' generate.
        compared: how many were compared with those of transformers.
        speed: measured at the first setting, on the prompts that were timed.
        speedups: the same by domain, where prompts were timed one at a time.
        skipped: by domain, prompts that do not fit the target's context.
        lossy: by setting, the rule, where it changes the distribution of the output.
        quality: by lossy setting, what the rule costs.
        rules: verification rules at the settings that were measured under several.
        drift: of an adapted target from the target without adapters, see `drift.measure`; {} for other targets.
        references: the drafter beside ceilings and baselines, at each setting.
        degenerate: by setting, answers that repeat themselves, and τ without them.
        warnings: sentences on prompts and answers of which the numbers say too much.
        load: predictions for other loads, see `load_report`; {} without a probe.
        estimates: for devices that are not at hand, see `roofline.estimate`.
        service: what a service would see, see `service.service`.
    """

    target: dict[str, str]
    drafter: dict[str, Any]
    settings: dict[str, Any]
    tree: list[list[int]] | dict[str, int]
    nodes: int
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    cost: dict[int, float] = field(default_factory=dict)
    drafting: dict[int, float] = field(default_factory=dict)
    by_nodes: list[dict[str, float]] = field(default_factory=list)
    overall: dict[str, Acceptance] = field(default_factory=dict)
    domains: dict[str, dict[str, Acceptance]] = field(default_factory=dict)
    distinct: float = 1.0
    divergences: list[Divergence] = field(default_factory=list)
    answers: int = 0
    checked_tokens: int = 0
    like_transformers: int = 0
    compared: int = 0
    speed: dict[str, float] = field(default_factory=dict)
    speedups: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    lossy: dict[str, str] = field(default_factory=dict)
    quality: dict[str, Quality] = field(default_factory=dict)
    rules: list[RuleRow] = field(default_factory=list)
    drift: dict[str, float] = field(default_factory=dict)
    references: list[Reference] = field(default_factory=list)
    degenerate: dict[str, Degenerate] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    load: dict[str, Any] = field(default_factory=dict)
    estimates: list[dict[str, Any]] = field(default_factory=list)
    service: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The drafter's."""
        return self.drafter["method"]

    @property
    def divergences_per_1000(self) -> float:
        """Answers that diverge from plain decoding's, per 1,000 tokens compared."""
        return 1000 * len(self.divergences) / max(1, self.checked_tokens)

    @property
    def first_setting(self) -> str:
        """The setting of the first table by domain, of `distinct` and of `speed`."""
        return next(iter(self.overall))


def report_of(records: Records, beside: Mapping[str, Records] | None = None, devices: Sequence[Hardware] = ()) -> Report:
    """The report of a finished evaluation.

    Args:
        records: all that it recorded.
        beside: other evaluations by name, for `baselines.references`.
        devices: that are not at hand, for estimates.

    Raises:
        ValueError: devices for records without a probe; answers without tokens, or no answers.
    """
    header, requests = records.header, records.requests
    failed = [each.prompt for each in requests if not each.rounds or not each.tokens]
    if failed or not requests:
        raise ValueError(f"{len(failed)} of {len(requests)} answers have no tokens ({shown(failed)}); run draftsmith eval again")
    reported = {request.prompt for request in requests}
    report = Report(
        target=header["target"],
        drafter=header["drafter"],
        settings=header["settings"] | {"prompts": len(reported)},
        machine=header.get("machine", {}),
        versions=header.get("versions", {}),
        tree=records.tree["tree"],
        nodes=records.tree["nodes"],
        cost=records.forward,
        drafting=records.drafting,
        skipped=header["skipped"],
        drift=records.drift,
    )
    labels = list(dict.fromkeys(request.setting for request in requests))
    for setting in labels:
        chosen = [request for request in requests if request.setting == setting]
        report.overall[setting] = acceptance(chosen, records.tree["depth"])
        report.domains[setting] = {
            domain: acceptance([request for request in chosen if request.domain == domain], records.tree["depth"])
            for domain in dict.fromkeys(request.domain for request in chosen)
        }
    report.lossy, report.quality = lossy_settings(labels), qualities(records)
    first = [request for request in requests if request.setting == labels[0]]
    report.distinct = distinct_ngrams([request.tokens for request in first])
    report.answers = sum(request.checked for request in requests)
    report.checked_tokens = sum(request.checked_tokens for request in requests)
    report.divergences = [request.divergence for request in requests if request.divergence]
    report.compared = sum(request.equals_transformers is not None for request in requests)
    report.like_transformers = sum(bool(request.equals_transformers) for request in requests)
    report.speed = speed(first)
    if report.settings["slots"] == 1:
        for domain in dict.fromkeys(request.domain for request in first if request.timed):
            report.speedups[domain] = speedups([request for request in first if request.domain == domain])
    report.by_nodes = _by_nodes(records, labels[0])
    report.rules, report.references = compare_rules(records), references(records, beside)
    report.degenerate, report.warnings = degenerate(records), lines(records)
    report.load, report.service = load_report(records), service(records, labels[0])
    report.estimates = [estimate(records, device) for device in devices]
    return report


def acceptance(requests: Sequence[RequestRecord], depth: int) -> Acceptance:
    """Statistics of at least one request, for draft depth K = `depth`."""
    conversation = intervals.conversations(request.prompt for request in requests)
    index = {name: i for i, name in enumerate(sorted(set(conversation.values())))}
    sums = torch.zeros(len(index), 2 + depth, dtype=torch.float64)  # committed, rounds, rounds that accepted at least 1 … K
    for request in requests:
        row = sums[index[conversation[request.prompt]]]
        for each in request.rounds:
            row[0] += each.committed
            row[1] += 1
            row[2 : 2 + min(each.accepted, depth)] += 1
    total = sums.sum(0)
    tau = intervals.of_ratio(sums[:, 0], sums[:, 1])
    survival = (total[2:] / total[1]).tolist()
    previous = [1.0, *survival][:depth]
    conditional = [deeper / shallower if shallower else 0.0 for deeper, shallower in zip(survival, previous, strict=True)]
    return Acceptance(len(index), int(total[1]), int(total[0]), tau.estimate, tau.low, tau.high, tuple(survival), tuple(conditional))


def _by_nodes(records: Records, setting: str) -> list[dict[str, float]]:
    choosing, reported = (records.positions_at(setting, half) for half in (True, False))
    if not choosing or not reported:
        return []
    relative, most = round_cost(records)
    rows = []
    for nodes, paths in trees.best_tree_by_nodes(choosing, relative, most).items():
        depth = max(map(len, paths))
        tau, relative_cost = trees.tau(reported, paths), relative(len(paths) + 1, depth)
        rows.append({"nodes": nodes, "depth": depth, "tau": tau, "relative_cost": relative_cost, "tau_over_cost": tau / relative_cost})
    return rows


def round_cost(records: Records) -> tuple[cost.RoundCost, int]:
    """The relative cost of a round at the evaluation's own load, and up to how many nodes it is known. Without a probe it is that of one slot."""
    if not records.load:
        return cost.relative_round(records.forward, records.drafting), max(records.forward)
    model = CostModel(records.load)
    return model.relative(model.nearest(records.header["settings"]["slots"]), model.contexts[0]), model.max_nodes


def drawn_rules(report: Report) -> list[str]:
    """The measured rules whose answers are the target's in distribution only: they draw the children."""
    rules = dict.fromkeys(rule_of(setting) for setting in report.overall if not greedy(setting))
    return [rule for rule in rules if RULES[rule].children in ("drawn", "replaced")]


def as_json(report: Report) -> str:
    """The report as one line of JSON. Divergences get their verdict; `quality` is there under lossy rules only."""
    fields: dict[str, Any] = asdict(report) | {"method": report.method, "divergences_per_1000": report.divergences_per_1000}
    for row, divergence in zip(fields["divergences"], report.divergences, strict=True):
        row["verdict"] = divergence.verdict
    if not report.quality:
        del fields["quality"]
    return to_json(fields)


def to_json(content: dict[str, Any]) -> str:
    """Measurements as one line of JSON. Numbers that are not finite are null: a report is not lost to one of them."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(content), allow_nan=False)
