"""Several ways to answer the same prompts, one after the other in turning order, in one process: the only fair clock there is."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import GenerationConfig

from draftsmith.data.prompts import Prompt
from draftsmith.eval import loading
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with its ids; `key` is the noise key of its request."""

    prompt: Prompt
    ids: list[int]
    key: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one way made of some cases: the wall time, and an answer for each."""

    seconds: float
    answers: list[Completion]


Runner = Callable[[list[Case]], list[Completion]]


def cases(target: Target, prompts: list[Prompt], max_new_tokens: int) -> list[Case]:
    """Prompts as ids.

    Raises:
        ValueError: a prompt that does not fit the target's context with its answer.
    """
    found = [Case(prompt, loading.encode(target, prompt), key) for key, prompt in enumerate(prompts)]
    for case in found:
        if len(case.ids) + max_new_tokens > target.max_positions:
            raise ValueError(
                f"prompt {case.prompt.id!r} has {len(case.ids)} tokens; with {max_new_tokens} new ones it does not fit the target's "
                f"context of {target.max_positions}; shorten it or lower --max-new-tokens"
            )
    return found


def ours(decoder: Decoder, sampling: Sampling, max_new_tokens: int) -> Runner:
    """Our decoder, with whatever drafter it has."""
    return lambda some: decoder.generate([case.ids for case in some], sampling, max_new_tokens, requests=[case.key for case in some])


def transformers(target: Target, max_new_tokens: int, assistant: Any = None, **settings: Any) -> Runner:
    """transformers' own greedy `generate`, one prompt at a time, whatever else the target's generation_config asks for.

    assistant: a model for assisted generation. settings: of GenerationConfig.
    """
    stops = sorted(target.stop_ids)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
        # What is not said here generate takes from the target's own generation_config.
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_length=0,
        **settings,
    )
    extra = {} if assistant is None else {"assistant_model": assistant}

    def run(some: list[Case]) -> list[Completion]:
        answers = []
        for case in some:
            prompt = torch.tensor([case.ids], device=target.device)
            with torch.inference_mode():
                answer = cast(Any, target.model).generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config, **extra)
            answers.append(Completion(answer[0, len(case.ids) :].tolist()))
        return answers

    return run


def take_turns(runners: dict[str, Runner], units: list[list[Case]]) -> Iterator[tuple[list[Case], dict[str, Turn]]]:
    """Every runner on every unit of cases, the first of a unit another one each time; all are warmed up on a case first."""
    names = list(runners)
    for run in runners.values():
        run(units[0][:1])
    for number, some in enumerate(units):
        turns = {}
        start = number % len(names)
        for name in names[start:] + names[:start]:
            began = time.perf_counter()
            answers = runners[name](some)
            turns[name] = Turn(time.perf_counter() - began, answers)
        yield some, turns
