"""Measure one drafter: choose its draft tree on half of the prompts, decode the other half with it and plainly, and report."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from draftsmith.data.prompts import Prompt
from draftsmith.eval import cost, ranks, trees
from draftsmith.eval.answers import EncodedPrompt, encode_prompts
from draftsmith.eval.decoding import decode
from draftsmith.eval.positions import position_records
from draftsmith.eval.records import PositionRecord, Report, RoundRecord, distinct_ngrams
from draftsmith.eval.settings import Settings
from draftsmith.eval.speed import speed, speedups
from draftsmith.eval.summary import acceptance
from draftsmith.inference import exact
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import tree_config
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target


def evaluate_drafter(
    target: Target, drafter: Any, prompts: list[Prompt], settings: Settings
) -> tuple[Report, list[RoundRecord], list[PositionRecord]]:
    """Measure acceptance and speed. With `settings.choose` the drafter keeps the chosen tree.

    Returns:
        The report, the rounds of all temperatures, and the position records (none where no tree was chosen).

    Raises:
        ValueError: no prompt that fits the context, or too few to choose a tree.
    """
    if settings.exact:
        exact.check(target, settings.exact, settings.max_nodes if settings.choose else drafter.max_nodes)
    encoded, skipped = encode_prompts(target, prompts, settings.max_new_tokens)
    choosing, reported = _halves(encoded) if settings.choose else ([], encoded)
    context = statistics.median_low([len(prompt.ids) for prompt in encoded]) + settings.max_new_tokens // 2
    if isinstance(drafter, DraftModel):
        drafter.check(max(len(prompt.ids) for prompt in encoded) + settings.max_new_tokens)
    forward_seconds = ranks.agreed(cost.measure_forward(target, context, max(settings.max_nodes, drafter.max_nodes)))
    with _complete_trees(drafter):
        drafting_seconds = ranks.agreed(cost.measure_drafting(target, drafter, [prompt.ids[-context:] for prompt in reported[:4]]))
    by_nodes: list[dict[str, float]] = []
    records: list[PositionRecord] = []
    if settings.choose:
        records = position_records(target, drafter, choosing + reported, settings.max_new_tokens)
        round_cost = cost.relative_round(forward_seconds, drafting_seconds)
        chosen_on = records[: len(choosing)]
        if settings.choose == "largest":
            paths = trees.best_first_paths(chosen_on, settings.max_nodes - 1)
        else:
            paths = trees.best_tree(chosen_on, round_cost, settings.max_nodes)
        drafter.tree_spec = StaticTree.from_paths(paths)
        best = trees.best_tree_by_nodes(chosen_on, round_cost, settings.max_nodes)
        by_nodes = _by_nodes(records[len(choosing) :], best, round_cost)
    report = Report(
        target=target.identity.to_dict(),
        method=drafter.method,
        settings=_settings(target, drafter, len(reported), settings),
        tree=tree_config(drafter.tree_spec),
        nodes=drafter.max_nodes,
        cost=forward_seconds,
        drafting=drafting_seconds,
        by_nodes=by_nodes,
        skipped=skipped,
    )
    rounds: list[RoundRecord] = []
    for temperature in settings.temperatures:
        rounds += _measure(report, target, drafter, reported, settings, temperature)
    return report, rounds, records


def _measure(
    report: Report, target: Target, drafter: Any, prompts: list[EncodedPrompt], settings: Settings, temperature: float
) -> list[RoundRecord]:
    """Decode at one temperature and enter the results into the report."""
    sampling = Sampling(temperature=temperature, rule=settings.rule)
    outcomes, timing = decode(target, drafter, prompts, sampling, settings)
    rounds = [record for outcome in outcomes for record in outcome.rounds]
    label = f"{temperature:g}"
    report.overall[label] = acceptance(rounds, drafter.max_depth)
    report.answers += sum(outcome.checked for outcome in outcomes)
    report.checked_tokens += sum(outcome.checked_tokens for outcome in outcomes)
    report.divergences += [outcome.divergence for outcome in outcomes if outcome.divergence]
    report.compared += sum(outcome.equals_transformers is not None for outcome in outcomes)
    report.like_transformers += sum(bool(outcome.equals_transformers) for outcome in outcomes)
    if not sampling.lossless:
        report.lossy[label] = settings.rule
    if label == report.first_temperature:
        report.distinct = distinct_ngrams([outcome.tokens for outcome in outcomes])
        for domain in dict.fromkeys(prompt.prompt.domain for prompt in prompts):
            report.domains[domain] = acceptance([record for record in rounds if record.domain == domain], drafter.max_depth)
            if domain in timing.domains:
                report.speedups[domain] = speedups(timing.of(domain))
        report.speed = speed(timing, [record for record in rounds if record.verify_s is not None])
    return rounds


def _settings(target: Target, drafter: Any, prompts: int, settings: Settings) -> dict[str, Any]:
    """What the report says of how it was made."""
    entries = {
        "max_new_tokens": settings.max_new_tokens,
        "prompts": prompts,
        "positions": target.max_positions,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "slots": settings.slots,
        "timed": settings.timed,
        "rule": settings.rule,
        "adaptive_depth": settings.adaptive_depth,
        "exact": settings.exact,
        "ranks": ranks.count(),
    }
    if isinstance(drafter, DraftModel):
        entries["confidence"] = drafter.confidence
    return entries


@contextmanager
def _complete_trees(drafter: Any) -> Iterator[None]:
    """Within it a draft model drafts its complete tree, whatever its confidence: position records stop nowhere, so their cost must not."""
    if not isinstance(drafter, DraftModel):
        yield
        return
    confidence, drafter.confidence = drafter.confidence, 0.0
    try:
        yield
    finally:
        drafter.confidence = confidence


def _by_nodes(records: list[PositionRecord], best: dict[int, list[trees.Path]], round_cost: cost.RoundCost) -> list[dict[str, float]]:
    rows = []
    for nodes, paths in best.items():
        depth = max(map(len, paths))
        tau, relative_cost = trees.tau(records, paths), round_cost(len(paths) + 1, depth)
        rows.append({"nodes": nodes, "depth": depth, "tau": tau, "relative_cost": relative_cost, "tau_over_cost": tau / relative_cost})
    return rows


def _halves(prompts: list[EncodedPrompt]) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """Every second conversation of each domain is for choosing the tree, the rest for the report. A domain's only one is reported."""
    domains: dict[str, dict[int, list[EncodedPrompt]]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.prompt.domain, {}).setdefault(prompt.conversation, []).append(prompt)
    choosing, reported = [], []
    for conversations in domains.values():
        for number, turns in enumerate(conversations.values()):
            (reported if number % 2 or len(conversations) == 1 else choosing).extend(turns)
    if not choosing:
        raise ValueError("one prompt of a domain is too few: half of them choose the tree, the others are reported; give more, or --tree")
    return choosing, reported
