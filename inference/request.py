"""What is asked of the decoder and what it says of its work: requests, their limits, rounds, steps, completions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftsmith.inference.verify import HostResult

__all__ = ["Completion", "Limits", "Request", "RoundStats", "Step", "collect", "finalise", "make_requests"]


@dataclass(slots=True)
class RoundStats:
    """One row's share of a round: nodes verified, tokens committed (after truncation), verdict length (before), position of
    the root, and the seconds of the whole batch's round: drafting, verifying, all else."""

    size: int
    length: int
    accepted: int
    position: int
    draft_s: float
    verify_s: float
    other_s: float


@dataclass(slots=True)
class Step:
    """What a round committed for one row; tokens end at the stop token (included) or at the limit. reason: "" while the row
    runs, then "stop", "length" (max_new_tokens) or "context"."""

    row: int
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
class Request:
    """A prompt in work: row is −1 until it has one; position is the absolute index of its last token."""

    index: int
    prompt: list[int]
    key: int
    row: int = -1
    last: int = 0
    position: int = 0
    emitted: int = 0
    ended: bool = False


@dataclass(slots=True)
class Limits:
    """Where answers end: context, prompt included, max_new_tokens, and stop tokens."""

    context: int
    max_new_tokens: int
    stops: frozenset[int]


def make_requests(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, requests: Sequence[int] | None, context: int, vocab_size: int
) -> list[Request]:
    """What `Decoder.stream` was given, checked: prompts shorter than `context`, their tokens below vocab_size.

    Raises:
        ValueError: naming the prompt.
    """
    if max_new_tokens < 1:
        raise ValueError(f"got max_new_tokens {max_new_tokens}; expected at least 1; raise it")
    keys = list(range(len(prompts))) if requests is None else list(requests)
    if len(keys) != len(prompts):
        raise ValueError(f"got {len(keys)} requests for {len(prompts)} prompts; expected one key per prompt; match them")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i}: got no tokens; expected at least one; add the beginning-of-text token")
        if len(prompt) >= context:
            raise ValueError(f"prompt {i}: got {len(prompt)} tokens; expected fewer than the context of {context}; shorten it")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"prompt {i}: got token id {bad}; expected 0..{vocab_size - 1}; use the target's own tokenizer")
        if not 0 <= keys[i] < 2**32:
            raise ValueError(f"prompt {i}: got request {keys[i]}; expected 0..2^32-1; use a smaller key")
    return [Request(i, [int(token) for token in prompt], key) for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True))]


def finalise(request: Request, told: HostResult, limits: Limits) -> Step:
    """Cut the tokens at the limits and at the first stop token, and move the request on."""
    left, space = limits.max_new_tokens - request.emitted, limits.context - 1 - request.position
    if told.length == 0:
        raise ValueError("the drafter proposed an empty tree for a row that is decoding; expected size 1 at least: the root alone")
    tokens, reason = told.tokens[: min(left, space)], ""
    stop = next((i for i, token in enumerate(tokens) if token in limits.stops), None)
    if stop is not None:
        tokens, reason = tokens[: stop + 1], "stop"
    elif len(tokens) == left:
        reason = "length"
    elif len(tokens) == space:
        reason = "context"
    record = RoundStats(told.size, len(tokens), told.length, request.position, 0.0, 0.0, 0.0)
    request.emitted += len(tokens)
    request.position += len(tokens)
    request.last, request.ended = tokens[-1], bool(reason)
    return Step(request.row, request.index, tokens, told.length, told.size, bool(reason), reason, record)


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
