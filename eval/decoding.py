"""Decode prompts plainly and with the drafter: a sample of them timed, the others several at a time, for τ and losslessness alone."""

from collections.abc import Callable
from typing import Any

from draftsmith.eval import interleaved, lossless, quality
from draftsmith.eval.answers import EncodedPrompt, batches
from draftsmith.eval.lossless import Recorded
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.records import KEYED_RULES, Divergence, RequestRecord, Round
from draftsmith.eval.settings import Settings, label
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafts import forget
from draftsmith.inference.progress import Bar
from draftsmith.inference.request import RoundStats
from draftsmith.inference.sampler import Sampling
from draftsmith.models import ranks
from draftsmith.models.target import Target

PROMPTS_PER_SLOT = 4  # in a batch, so that prompts are replaced while others still run
UNTIMED_SLOTS = 8


class _Tally(Bar):
    """A progress bar with the τ so far. The batches that an earlier run recorded count as done."""

    committed = rounds = done = 0

    def count(self, requests: list[RequestRecord]) -> None:
        self.done += len(requests)
        self.committed += sum(round.committed for request in requests for round in request.rounds)
        self.rounds += sum(len(request.rounds) for request in requests)
        self.update(self.done, f"tau {self.committed / self.rounds:.2f}")


def decode(target: Target, drafter: Any, prompts: list[EncodedPrompt], sampling: Sampling, settings: Settings, store: RecordStore) -> None:
    """Answer each prompt of this rank plainly and with the drafter, unless it is recorded already, and record it."""
    share = ranks.share(prompts)
    sample = _sample(share, settings.timed)
    indices = {prompt.index for prompt in sample}
    others = sorted((prompt for prompt in share if prompt.index not in indices), key=lambda prompt: len(prompt.ids))
    done = {prompt for setting, prompt in store.recorded("request") if setting == label(sampling)}

    def missing(size: int, prompts: list[EncodedPrompt]) -> list[list[EncodedPrompt]]:
        return batches([prompt for prompt in prompts if prompt.prompt.id not in done], size)

    remembers = getattr(drafter, "remembers", False)

    def reset() -> None:
        forget(drafter)
        if remembers:
            _teach_again(target, drafter, [prompt for prompt in [*sample, *others] if prompt.prompt.id in done], sampling, settings)

    timed = missing(1 if settings.slots == 1 else PROMPTS_PER_SLOT * settings.slots, sample)
    if timed:
        _decode_timed(target, drafter, timed, sampling, settings, store, reset)
    else:
        reset()
    # Where a draft depends on what else is in the batch, or was before, untimed prompts take as many slots as timed ones.
    dependent = settings.exact or settings.adaptive() or getattr(drafter, "stop", None) or remembers
    slots = settings.slots if dependent else UNTIMED_SLOTS
    untimed = missing(PROMPTS_PER_SLOT * slots, others)
    if untimed:
        _decode_untimed(target, drafter, untimed, sampling, settings, slots, store)


def _teach_again(target: Target, drafter: Any, prompts: list[EncodedPrompt], sampling: Sampling, settings: Settings) -> None:
    """Answer recorded prompts once more, so that the drafter remembers what it did when the evaluation was stopped."""
    decoder = Decoder(target, drafter, slots=settings.slots, adaptive=settings.adaptive(), kernels=settings.kernels, exact=settings.exact)
    answer = interleaved.answer_with_decoder(decoder, sampling, settings.max_new_tokens)
    with Bar(f"what the drafter remembers at T={label(sampling)}", len(prompts), show=bool(prompts)) as bar:
        for number, batch in enumerate(batches(prompts, settings.slots), 1):
            answer(batch)
            bar.update(min(len(prompts), number * settings.slots))


def _sample(prompts: list[EncodedPrompt], count: int | None) -> list[EncodedPrompt]:
    """`count` prompts of each domain, evenly spread over it; None is all."""
    if count is None:
        return prompts
    domains: dict[str, list[EncodedPrompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.prompt.domain, []).append(prompt)
    return [members[i * len(members) // size] for members in domains.values() for size in (min(count, len(members)),) for i in range(size)]


def _decode_timed(
    target: Target,
    drafter: Any,
    batches: list[list[EncodedPrompt]],
    sampling: Sampling,
    settings: Settings,
    store: RecordStore,
    reset: Callable[[], None],
) -> None:
    """Answer each batch plainly, with the drafter and, where greedy and alone, with transformers, interleaved. `reset` follows the warm-up."""
    context = max(len(prompt.ids) for batch in batches for prompt in batch) + settings.max_new_tokens
    common: dict[str, Any] = {"slots": settings.slots, "context": context, "timed": True, "kernels": settings.kernels}
    adaptive, nodes = settings.adaptive(), settings.exact
    decoders = {
        "plain": Decoder(target, exact=nodes, **common),
        "drafted": Decoder(target, drafter, adaptive=adaptive, exact=nodes, **common),
    }
    if nodes:
        decoders["ordinary"] = Decoder(target, **common)
    functions = {name: interleaved.answer_with_decoder(decoder, sampling, settings.max_new_tokens) for name, decoder in decoders.items()}
    if sampling.greedy and sampling.repetition_penalty == 1.0 and not sampling.constraint and settings.slots == 1:
        functions["transformers"] = interleaved.answer_with_transformers(target, settings.max_new_tokens)
    with _Tally(f"decoding at T={label(sampling)}", sum(map(len, batches))) as bar:
        counters = {name: decoder.counters for name, decoder in decoders.items()}
        for batch, timed in interleaved.interleave(functions, batches, reset, counters=counters):
            divergences = _timed_divergences(target, drafter, batch, timed, sampling, settings, context)
            requests = []
            for number, (prompt, divergence) in enumerate(zip(batch, divergences, strict=True)):
                plain, drafted = (timed[name].answers[number] for name in ("plain", "drafted"))
                measured: dict[str, Any] = {
                    "plain_rounds": len(plain.rounds),
                    "plain_verify_s": sum(round.verify_s for round in plain.rounds),
                    "plain_other_s": sum(round.other_s for round in plain.rounds),
                }
                if "transformers" in timed:
                    measured["equals_transformers"] = timed["transformers"].answers[number].tokens == plain.tokens
                if number == len(batch) - 1:
                    measured |= _times(timed, len(batch))
                requests.append(
                    _request(prompt, sampling, drafted.tokens, drafted.reason, drafted.rounds, plain.tokens, divergence, **measured)
                )
            costs = quality.measure(target, batch, timed["plain"].answers, timed["drafted"].answers, sampling)
            store.append_requests(requests, target.tokenizer, costs)
            bar.count(requests)


def _times(timed: dict[str, interleaved.TimedAnswers], size: int) -> dict[str, Any]:
    """The seconds and tokens of a batch of `size` requests, by contender."""
    times: dict[str, Any] = {
        "seconds": {name: turn.seconds for name, turn in timed.items()},
        "batch_tokens": {name: sum(len(answer.tokens) for answer in turn.answers) for name, turn in timed.items()},
        "batch": size,
    }
    if size == 1:
        times["prefill_s"] = timed["drafted"].prefill_s
    return times


def _decode_untimed(
    target: Target, drafter: Any, batches: list[list[EncodedPrompt]], sampling: Sampling, settings: Settings, slots: int, store: RecordStore
) -> None:
    """Answer the prompts plainly and with the drafter, `slots` at a time.

    The hidden states are recorded at once, so that an answer that diverges need not be decoded again.
    """
    options: dict[str, Any] = {"slots": slots, "kernels": settings.kernels, "exact": settings.exact}
    with _Tally(f"{slots} at a time, untimed, at T={label(sampling)}", sum(map(len, batches))) as bar:
        for batch in batches:
            ids, indices = [prompt.ids for prompt in batch], [prompt.index for prompt in batch]
            context = max(map(len, ids)) + settings.max_new_tokens
            adaptive = settings.adaptive()
            plain, drafted = (
                lossless.decode_recorded(target, each, ids, indices, sampling, settings.max_new_tokens, context=context, **options, **more)
                for each, more in ((None, {}), (drafter, {"adaptive": adaptive}))
            )
            pairs = [(a.tokens, b.tokens) for a, b in zip(plain, drafted, strict=True)]
            divergences = _judged(target, batch, pairs, list(zip(plain, drafted, strict=True)), sampling, settings)
            requests = [
                _request(prompt, sampling, b.tokens, b.reason, b.rounds, a.tokens, divergence, timed=False)
                for prompt, a, b, divergence in zip(batch, plain, drafted, divergences, strict=True)
            ]
            store.append_requests(requests, target.tokenizer, quality.measure(target, batch, plain, drafted, sampling))
            bar.count(requests)


def _timed_divergences(
    target: Target,
    drafter: Any,
    batch: list[EncodedPrompt],
    timed: dict[str, interleaved.TimedAnswers],
    sampling: Sampling,
    settings: Settings,
    context: int,
) -> list[Divergence | None]:
    """Where each answer of a batch diverges from plain decoding's, None where it does not.

    A batch with a divergence is decoded again to judge it: a single answer up to the divergence, several answers to their ends, so that their
    rounds have the same shapes as before.
    """
    pairs = [(plain.tokens, drafted.tokens) for plain, drafted in zip(timed["plain"].answers, timed["drafted"].answers, strict=True)]
    differences = [index for pair in pairs if (index := lossless.first_difference(*pair)) is not None]
    if not _checked(sampling) or not differences:
        return [None] * len(batch)
    most = differences[0] + 1 if len(batch) == 1 else settings.max_new_tokens
    options: dict[str, Any] = {"slots": settings.slots, "context": context, "kernels": settings.kernels, "exact": settings.exact}
    prompts, requests = [prompt.ids for prompt in batch], [prompt.index for prompt in batch]
    again = [lossless.decode_recorded(target, each, prompts, requests, sampling, most, **options) for each in (None, drafter)]
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


def _request(
    prompt: EncodedPrompt,
    sampling: Sampling,
    tokens: list[int],
    reason: str,
    rounds: list[RoundStats],
    plain: list[int],
    divergence: Divergence | None,
    timed: bool = True,
    **measured: Any,
) -> RequestRecord:
    """The record of a prompt that was answered with `tokens`, and plainly with `plain`."""
    return RequestRecord(
        prompt=prompt.prompt.id,
        domain=prompt.prompt.domain,
        language=prompt.prompt.language,
        setting=label(sampling),
        turn=prompt.turn,
        prompt_tokens=len(prompt.ids),
        tokens=tokens,
        reason=reason,
        rounds=[
            Round(each.position, each.size, each.length, *((each.draft_s, each.verify_s, each.other_s) if timed else ())) for each in rounds
        ],
        plain_tokens=len(plain),
        checked=_checked(sampling),
        divergence=divergence,
        **measured,
    )
