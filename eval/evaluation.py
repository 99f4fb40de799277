"""Measure one drafter: choose its draft tree on half of the prompts, decode the other half with it and plainly, and report."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.data.prompts import Prompt
from draftsmith.eval import cost, interleaved, lossless, ranks, trees
from draftsmith.eval.answers import EncodedPrompt, encode_prompts
from draftsmith.eval.positions import position_records
from draftsmith.eval.records import KEYED_RULES, Divergence, PositionRecord, Report, RoundRecord, distinct_ngrams
from draftsmith.eval.summary import acceptance
from draftsmith.inference import exact
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import tree_config
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target

PROMPTS_PER_SLOT = 4  # in a batch, so that prompts are replaced while others still run


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
        slots: prompts decoded at a time.
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
    adaptive_depth: bool = False
    kernels: bool = False
    exact: int | None = None


def evaluate_drafter(
    target: Target, drafter: Any, prompts: list[Prompt], settings: Settings
) -> tuple[Report, list[RoundRecord], list[PositionRecord]]:
    """Measure acceptance and speed. With `settings.choose` the drafter keeps the chosen tree.

    Returns:
        The report, the rounds of all temperatures, and the position records (none where no tree was chosen).

    Raises:
        ValueError: prompts that do not fit the context, or too few to choose a tree.
    """
    if settings.exact:
        exact.check(target, settings.exact, settings.max_nodes if settings.choose else drafter.max_nodes)
    encoded = encode_prompts(target, prompts, settings.max_new_tokens)
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
    outcomes, timing = _decode(target, drafter, prompts, sampling, settings)
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
        report.speed = _speed(timing, rounds, report.overall[label].tau)
    return rounds


def _settings(target: Target, drafter: Any, prompts: int, settings: Settings) -> dict[str, Any]:
    """What the report says of how it was made."""
    entries = {
        "max_new_tokens": settings.max_new_tokens,
        "prompts": prompts,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "slots": settings.slots,
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
    """Every second prompt of each domain is for choosing the tree, the rest for the report. A domain's only prompt is reported."""
    domains: dict[str, list[EncodedPrompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.prompt.domain, []).append(prompt)
    choosing, reported = [], []
    for members in domains.values():
        choosing += members[0::2] if len(members) > 1 else []
        reported += members[1::2] if len(members) > 1 else members
    if not choosing:
        raise ValueError("one prompt of a domain is too few: half of them choose the tree, the others are reported; give more, or --tree")
    return choosing, reported


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results for one prompt.

    Attributes:
        rounds: of decoding with the drafter.
        tokens: of the answer.
        checked: whether the rule promises plain decoding's tokens.
        checked_tokens: how many were compared, up to the first that differs.
        divergence: from plain decoding's answer, where that is checked.
        equals_transformers: whether plain decoding's answer equals that of transformers; None where transformers did not answer.
    """

    rounds: list[RoundRecord]
    tokens: list[int]
    checked: bool
    checked_tokens: int
    divergence: Divergence | None
    equals_transformers: bool | None


@dataclass(slots=True)
class Timing:
    """Totals over the prompts of this rank.

    Attributes:
        seconds: by "plain", "drafted" and, where they took part, "transformers" and, beside exact rounds, "ordinary" plain decoding.
        tokens: likewise.
        c: verifying seconds of a mean round over those of a mean plain round; None with several slots, where rounds of different batch
            sizes would be compared. Rounds differ in size (a look-up may propose nothing), so only means say what they cost.
    """

    seconds: dict[str, float]
    tokens: dict[str, int]
    c: float | None = None


def _decode(
    target: Target, drafter: Any, prompts: list[EncodedPrompt], sampling: Sampling, settings: Settings
) -> tuple[list[Outcome], Timing]:
    """Answer each prompt (or batch) plainly, with the drafter and, where greedy and alone, with transformers, interleaved."""
    share = ranks.share(prompts)
    context = max(len(prompt.ids) for prompt in prompts) + settings.max_new_tokens
    common: dict[str, Any] = {"slots": settings.slots, "context": context, "timed": True, "kernels": settings.kernels}
    adaptive, nodes = AdaptiveDepth() if settings.adaptive_depth else None, settings.exact
    decoders = {
        "plain": Decoder(target, exact=nodes, **common),
        "drafted": Decoder(target, drafter, adaptive=adaptive, exact=nodes, **common),
    }
    if nodes:
        decoders["ordinary"] = Decoder(target, **common)
    functions = {name: interleaved.answer_with_decoder(decoder, sampling, settings.max_new_tokens) for name, decoder in decoders.items()}
    if sampling.greedy and settings.slots == 1:
        functions["transformers"] = interleaved.answer_with_transformers(target, settings.max_new_tokens)
    size = 1 if settings.slots == 1 else PROMPTS_PER_SLOT * settings.slots
    batches = [share[start : start + size] for start in range(0, len(share), size)]
    timing = Timing(dict.fromkeys(functions, 0.0), dict.fromkeys(functions, 0))
    verifying: dict[str, list[float]] = {name: [] for name in decoders}
    outcomes: dict[int, Outcome] = {}
    committed = rounds = 0
    with Bar(f"decoding at T={sampling.temperature:g}", len(share)) as bar:
        for batch, timed in interleaved.interleave(functions, batches):
            for name, turn in timed.items():
                timing.seconds[name] += turn.seconds
                timing.tokens[name] += sum(len(answer.tokens) for answer in turn.answers)
            for name in decoders:
                verifying[name] += [round.verify_s for answer in timed[name].answers for round in answer.rounds]
            divergences = _divergences(target, drafter, batch, timed, sampling, settings, context)
            for number, prompt in enumerate(batch):
                answers = {name: turn.answers[number] for name, turn in timed.items()}
                outcomes[prompt.index] = outcome = _outcome(prompt, answers, sampling, divergences[number])
                committed += sum(record.committed for record in outcome.rounds)
                rounds += len(outcome.rounds)
            bar.update(len(outcomes), f"tau {committed / rounds:.2f}")
    if settings.slots == 1:
        timing.c = statistics.fmean(verifying["drafted"]) / statistics.fmean(verifying["plain"])
    gathered = ranks.gather(outcomes)
    return [gathered[prompt.index] for prompt in prompts], timing


def _divergences(
    target: Target,
    drafter: Any,
    batch: list[EncodedPrompt],
    timed: dict[str, interleaved.TimedAnswers],
    sampling: Sampling,
    settings: Settings,
    context: int,
) -> list[Divergence | None]:
    """Where each answer of a batch diverges from plain decoding's, None where it does not. A batch with a divergence is decoded again to judge it."""
    pairs = [(plain.tokens, drafted.tokens) for plain, drafted in zip(timed["plain"].answers, timed["drafted"].answers, strict=True)]
    if not _checked(sampling) or all(plain == drafted for plain, drafted in pairs):
        return [None] * len(batch)
    options: dict[str, Any] = {"slots": settings.slots, "context": context, "kernels": settings.kernels, "exact": settings.exact}
    prompts, requests = [prompt.ids for prompt in batch], [prompt.index for prompt in batch]
    again = [
        lossless.decode_again(target, each, prompts, requests, sampling, settings.max_new_tokens, **options) for each in (None, drafter)
    ]
    return [
        lossless.first_divergence(
            target, prompt.prompt.id, prompt.ids, plain, drafted, sampling, prompt.index, recorded, bool(settings.exact)
        )
        for prompt, (plain, drafted), recorded in zip(batch, pairs, zip(*again, strict=True), strict=True)
    ]


def _checked(sampling: Sampling) -> bool:
    """Whether the answers must be plain decoding's. Rejection is lossless too, but only in distribution."""
    return sampling.greedy or sampling.rule in KEYED_RULES


def _outcome(prompt: EncodedPrompt, answers: dict[str, Completion], sampling: Sampling, divergence: Divergence | None) -> Outcome:
    plain, drafted = answers["plain"].tokens, answers["drafted"]
    compared = divergence.index + 1 if divergence else len(plain)
    equals = answers["transformers"].tokens == plain if "transformers" in answers else None
    checked = _checked(sampling)
    rounds = _round_records(prompt.prompt, drafted, sampling)
    return Outcome(rounds, drafted.tokens, checked, compared if checked else 0, divergence, equals)


def _round_records(prompt: Prompt, completion: Completion, sampling: Sampling) -> list[RoundRecord]:
    return [
        RoundRecord(
            prompt=prompt.id,
            domain=prompt.domain,
            temperature=sampling.temperature,
            rule=sampling.rule,
            position=round.position,
            nodes=round.size,
            committed=round.length,
            accepted=round.length - 1,
            draft_s=round.draft_s,
            verify_s=round.verify_s,
            other_s=round.other_s,
        )
        for round in completion.rounds
    ]


def _speed(timing: Timing, records: list[RoundRecord], tau: float) -> dict[str, float]:
    """The report's `speed`. Speedups compare seconds per token, which are the total seconds where the answers are the same."""
    seconds, tokens = timing.seconds, timing.tokens
    rates = {name: tokens[name] / seconds[name] for name in seconds}
    speed = {
        "tau": tau,
        "nodes": sum(record.nodes for record in records) / len(records),
        "speedup": rates["drafted"] / rates["plain"],
        "plain_tokens_per_s": rates["plain"],
        "drafted_tokens_per_s": rates["drafted"],
    }
    if "ordinary" in seconds:
        speed["cost_of_exact"] = rates["ordinary"] / rates["plain"]
    if timing.c is not None:
        speed["c"] = timing.c
        speed["drafting"] = sum(record.draft_s for record in records) / sum(record.verify_s for record in records) * timing.c
        speed["predicted_speedup"] = tau / timing.c
        speed["realised_fraction"] = speed["speedup"] / speed["predicted_speedup"]
    if "transformers" in seconds:
        speed["speedup_over_transformers"] = rates["drafted"] / rates["transformers"]
        speed["plain_over_transformers"] = rates["plain"] / rates["transformers"]
    return speed
