"""Decode prompts plainly and with the drafter: a sample of them timed, the others several at a time, for τ and losslessness alone."""

import statistics
from dataclasses import dataclass
from typing import Any

from draftsmith.data.prompts import Prompt
from draftsmith.eval import interleaved, lossless, ranks
from draftsmith.eval.answers import EncodedPrompt
from draftsmith.eval.lossless import Recorded
from draftsmith.eval.records import KEYED_RULES, Divergence, RoundRecord
from draftsmith.eval.settings import Settings
from draftsmith.eval.speed import Timing
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.progress import Bar
from draftsmith.inference.request import RoundStats
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

PROMPTS_PER_SLOT = 4  # in a batch, so that prompts are replaced while others still run
UNTIMED_SLOTS = 8


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


class _Tally(Bar):
    """A progress bar with the τ so far."""

    committed = rounds = 0

    def count(self, outcomes: dict[int, Outcome], number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        self.committed += sum(record.committed for record in outcome.rounds)
        self.rounds += len(outcome.rounds)
        self.update(len(outcomes), f"tau {self.committed / self.rounds:.2f}")


def decode(
    target: Target, drafter: Any, prompts: list[EncodedPrompt], sampling: Sampling, settings: Settings
) -> tuple[list[Outcome], Timing]:
    """Answer each prompt plainly and with the drafter.

    Returns:
        The outcomes of all prompts, and the times of those that this rank timed.
    """
    share = ranks.share(prompts)
    sample = _sample(share, settings.timed)
    indices = {prompt.index for prompt in sample}
    outcomes, timing = _decode_timed(target, drafter, sample, sampling, settings)
    others = [prompt for prompt in share if prompt.index not in indices]
    gathered = ranks.gather(outcomes | _decode_untimed(target, drafter, others, sampling, settings))
    return [gathered[prompt.index] for prompt in prompts], timing


def _sample(prompts: list[EncodedPrompt], count: int | None) -> list[EncodedPrompt]:
    """`count` prompts of each domain, evenly spread over it; None is all."""
    if count is None:
        return prompts
    domains: dict[str, list[EncodedPrompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.prompt.domain, []).append(prompt)
    return [members[i * len(members) // size] for members in domains.values() for size in (min(count, len(members)),) for i in range(size)]


def _decode_timed(
    target: Target, drafter: Any, prompts: list[EncodedPrompt], sampling: Sampling, settings: Settings
) -> tuple[dict[int, Outcome], Timing]:
    """Answer each prompt (or batch) plainly, with the drafter and, where greedy and alone, with transformers, interleaved."""
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
    timing = Timing([], [], {name: [] for name in functions}, {name: [] for name in functions})
    verifying: dict[str, list[float]] = {name: [] for name in decoders}
    outcomes: dict[int, Outcome] = {}
    with _Tally(f"decoding at T={sampling.temperature:g}", len(prompts)) as bar:
        for batch, timed in interleaved.interleave(functions, _batches(prompts, size)):
            timing.add(batch[0].prompt.domain if size == 1 else "", timed)
            for name in decoders:
                verifying[name] += [round.verify_s for answer in timed[name].answers for round in answer.rounds]
            divergences = _timed_divergences(target, drafter, batch, timed, sampling, settings, context)
            for number, (prompt, divergence) in enumerate(zip(batch, divergences, strict=True)):
                plain, drafted = (timed[name].answers[number] for name in ("plain", "drafted"))
                equals = timed["transformers"].answers[number].tokens == plain.tokens if "transformers" in timed else None
                rounds = _round_records(prompt.prompt, drafted.rounds, sampling)
                bar.count(outcomes, prompt.index, _outcome(rounds, plain.tokens, drafted.tokens, sampling, divergence, equals))
    if settings.slots == 1:
        timing.c = statistics.fmean(verifying["drafted"]) / statistics.fmean(verifying["plain"])
    return outcomes, timing


def _decode_untimed(
    target: Target, drafter: Any, prompts: list[EncodedPrompt], sampling: Sampling, settings: Settings
) -> dict[int, Outcome]:
    """Answer the prompts plainly and with the drafter, several at a time.

    The hidden states are recorded at once, so that an answer that diverges need not be decoded again. Where the depth of a draft depends
    on what else is in the batch, there is one prompt at a time.
    """
    alone = settings.exact or settings.adaptive_depth or getattr(drafter, "confidence", 0.0)
    slots, outcomes = 1 if alone else UNTIMED_SLOTS, dict[int, Outcome]()
    options: dict[str, Any] = {"slots": slots, "kernels": settings.kernels, "exact": settings.exact}
    with _Tally(f"{slots} at a time, untimed, at T={sampling.temperature:g}", len(prompts), show=bool(prompts)) as bar:
        for batch in _batches(sorted(prompts, key=lambda prompt: len(prompt.ids)), PROMPTS_PER_SLOT * slots):
            ids, indices = [prompt.ids for prompt in batch], [prompt.index for prompt in batch]
            context = max(map(len, ids)) + settings.max_new_tokens
            adaptive = AdaptiveDepth() if settings.adaptive_depth else None
            plain, drafted = (
                lossless.decode_recorded(target, each, ids, indices, sampling, settings.max_new_tokens, context=context, **options, **more)
                for each, more in ((None, {}), (drafter, {"adaptive": adaptive}))
            )
            pairs = [(a.tokens, b.tokens) for a, b in zip(plain, drafted, strict=True)]
            recorded = list(zip(plain, drafted, strict=True))
            for number, divergence in enumerate(_judged(target, batch, pairs, recorded, sampling, settings)):
                rounds = _round_records(batch[number].prompt, drafted[number].rounds, sampling, timed=False)
                bar.count(outcomes, batch[number].index, _outcome(rounds, *pairs[number], sampling, divergence, None))
    return outcomes


def _batches(prompts: list[EncodedPrompt], size: int) -> list[list[EncodedPrompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _timed_divergences(
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
        lossless.decode_recorded(target, each, prompts, requests, sampling, settings.max_new_tokens, **options) for each in (None, drafter)
    ]
    return _judged(target, batch, pairs, list(zip(*again, strict=True)), sampling, settings)


def _judged(
    target: Target,
    batch: list[EncodedPrompt],
    pairs: list[tuple[list[int], list[int]]],
    recorded: list[tuple[Recorded, Recorded]],
    sampling: Sampling,
    settings: Settings,
) -> list[Divergence | None]:
    """Where each drafted answer diverges from the plain one, None where it does not.

    Args:
        target: of the answers.
        batch: the prompts.
        pairs: the plain and the drafted answer to each.
        recorded: both with their hidden states.
        sampling: how they were sampled.
        settings: say whether rounds were exact.
    """
    if not _checked(sampling):
        return [None] * len(batch)
    texts = {}
    for number, (prompt, (plain, drafted)) in enumerate(zip(batch, pairs, strict=True)):
        index = lossless.first_difference(plain, drafted)
        if index is not None and index < min(len(plain), len(drafted)) and not settings.exact:
            texts[number] = prompt.ids + plain[:index]
    states = dict(zip(texts, lossless.reference_states(target, list(texts.values())), strict=True))
    return [
        lossless.first_divergence(
            target,
            prompt.prompt.id,
            prompt.ids,
            *pairs[number],
            sampling,
            prompt.index,
            recorded[number],
            bool(settings.exact),
            states.get(number),
        )
        for number, prompt in enumerate(batch)
    ]


def _checked(sampling: Sampling) -> bool:
    """Whether the answers must be plain decoding's. Rejection is lossless too, but only in distribution."""
    return sampling.greedy or sampling.rule in KEYED_RULES


def _outcome(
    rounds: list[RoundRecord], plain: list[int], drafted: list[int], sampling: Sampling, divergence: Divergence | None, equals: bool | None
) -> Outcome:
    checked, compared = _checked(sampling), divergence.index + 1 if divergence else len(plain)
    return Outcome(rounds, drafted, checked, compared if checked else 0, divergence, equals)


def _round_records(prompt: Prompt, rounds: list[RoundStats], sampling: Sampling, timed: bool = True) -> list[RoundRecord]:
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
            draft_s=round.draft_s if timed else None,
            verify_s=round.verify_s if timed else None,
            other_s=round.other_s if timed else None,
        )
        for round in rounds
    ]
