"""Requests, their limits, and the records of what was decoded for them: rounds, steps, completions, counters."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftsmith.inference.verify import HostResult

__all__ = ["Completion", "Counters", "Limits", "Request", "RoundStats", "Step", "collect", "finalise", "make_requests"]


@dataclass(slots=True)
class RoundStats:
    """One request's share of a round.

    Attributes:
        size: tree nodes that were verified, the root included.
        length: tokens committed, after truncation at stop tokens and limits.
        accepted: the verdict's length, before truncation.
        position: absolute position of the last committed token before the round.
        draft_s, verify_s, other_s: seconds of the batch's round: drafting, verifying, all else.
    """

    size: int
    length: int
    accepted: int
    position: int
    draft_s: float
    verify_s: float
    other_s: float


@dataclass(slots=True)
class Step:
    """What a round committed for one request.

    Attributes:
        slot: the request's slot.
        prompt_index: the index of its prompt.
        tokens: the committed tokens; they end at the stop token (included) or at the limit.
        accepted: the verdict's length, before truncation.
        size: tree nodes that were verified.
        finished: whether the request has ended.
        reason: "" while it runs, then "stop", "length" (max_new_tokens) or "context".
        round: statistics of the round.
    """

    slot: int
    prompt_index: int
    tokens: list[int]
    accepted: int
    size: int
    finished: bool
    reason: str
    round: RoundStats


@dataclass(slots=True)
class Completion:
    """The answer to one prompt: new tokens only, why it ended, and its rounds."""

    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    rounds: list[RoundStats] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Work of a decoder since it was made.

    Attributes:
        target_forwards: forwards of the target, prefill included.
        prefill_chunks: forwards of the target for prefill.
        rounds: rounds whose result was read.
        prefill_s: host seconds of prefill.
        capture_s: host seconds of capturing CUDA graphs.
    """

    target_forwards: int = 0
    prefill_chunks: int = 0
    rounds: int = 0
    prefill_s: float = 0.0
    capture_s: float = 0.0


@dataclass(slots=True)
class Request:
    """A prompt and its progress.

    Attributes:
        index: the index of the prompt.
        prompt: token ids.
        noise_key: names the random numbers of its draws.
        slot: −1 until it has one.
        position: absolute position of the last committed token.
        emitted: new tokens so far.
        answer: these tokens.
        reused: positions of the prompt whose KV its slot has already.
        ended: whether it is finished.
    """

    index: int
    prompt: list[int]
    noise_key: int
    slot: int = -1
    position: int = 0
    emitted: int = 0
    answer: list[int] = field(default_factory=list)
    reused: int = 0
    ended: bool = False


@dataclass(slots=True)
class Limits:
    """Where answers end: after `context` tokens (prompt included), after max_new_tokens, or at a stop token."""

    context: int
    max_new_tokens: int
    stops: frozenset[int]


def make_requests(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, requests: Sequence[int] | None, context: int, vocab_size: int
) -> list[Request]:
    """Check the arguments of `Decoder.stream` -> one request per prompt.

    Raises:
        ValueError: max_new_tokens below 1; a prompt that is empty, fills the context, or has a token that is no integer or outside the
            vocabulary; noise keys that are not one for each prompt, or outside 0 … 2^32 − 1.
    """
    if max_new_tokens < 1:
        raise ValueError(f"got max_new_tokens {max_new_tokens}; expected at least 1; raise it")
    keys = list(range(len(prompts))) if requests is None else list(requests)
    if len(keys) != len(prompts):
        raise ValueError(f"got {len(keys)} requests for {len(prompts)} prompts; expected one key per prompt; match them")
    for i, prompt in enumerate(prompts):
        try:
            for number in (*prompt, keys[i]):
                operator.index(number)
        except TypeError as error:
            raise ValueError(f"prompt {i}: expected integers for its tokens and its request ({error}); convert them") from None
        if not len(prompt):
            raise ValueError(f"prompt {i}: got no tokens; expected at least one; add the beginning-of-text token")
        if len(prompt) >= context:
            raise ValueError(f"prompt {i}: got {len(prompt)} tokens; expected fewer than the context of {context}; shorten it")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"prompt {i}: got token id {bad}; expected 0..{vocab_size - 1}; use the target's own tokenizer")
        if not 0 <= keys[i] < 2**32:
            raise ValueError(f"prompt {i}: got request {keys[i]}; expected 0..2^32-1; use a smaller key")
    return [
        Request(i, [int(token) for token in prompt], int(key), position=len(prompt) - 1)
        for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
    ]


def finalise(request: Request, result: HostResult, limits: Limits) -> Step:
    """Cut the round's tokens at the limits and at the first stop token, and advance the request.

    Raises:
        ValueError: the drafter proposed an empty tree.
    """
    left, space = limits.max_new_tokens - request.emitted, limits.context - 1 - request.position
    if result.length == 0:
        raise ValueError("the drafter proposed an empty tree for a slot that is decoding; expected size 1 at least: the root alone")
    tokens, reason = result.tokens[: min(left, space)], ""
    stop = next((i for i, token in enumerate(tokens) if token in limits.stops), None)
    if stop is not None:
        tokens, reason = tokens[: stop + 1], "stop"
    elif len(tokens) == left:
        reason = "length"
    elif len(tokens) == space:
        reason = "context"
    stats = RoundStats(result.size, len(tokens), result.length, request.position, 0.0, 0.0, 0.0)
    request.emitted += len(tokens)
    request.answer += tokens
    request.position += len(tokens)
    request.ended = bool(reason)
    return Step(request.slot, request.index, tokens, result.length, result.size, request.ended, reason, stats)


def collect(steps: Iterable[Step], completions: Sequence[Completion]) -> None:
    """Append what a round committed to the completions of its prompts.

    Args:
        steps: the steps of one round, as `Decoder.stream` yields them.
        completions: one for each prompt, in the order of the prompts.
    """
    for step in steps:
        completion = completions[step.prompt_index]
        completion.tokens += step.tokens
        completion.reason = step.reason
        completion.rounds.append(step.round)
