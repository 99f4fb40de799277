"""Several ways to answer the same prompts take turns in one process, so that whatever slows the machine slows all of them."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from transformers import GenerationConfig

from draftsmith.eval.answers import EncodedPrompt
from draftsmith.inference.decoder import Completion, Counters, Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

AnswerFunction = Callable[[list[EncodedPrompt]], list[Completion]]


@dataclass(frozen=True, slots=True)
class TimedAnswers:
    """The answers of one function to one batch of prompts.

    Attributes:
        seconds: wall time, without what capturing CUDA graphs took.
        answers: in the order of the prompts.
        prefill_s: of `seconds`, those of the prompts; None where the function has no counters.
    """

    seconds: float
    answers: list[Completion]
    prefill_s: float | None = None


def answer_with_decoder(decoder: Decoder, sampling: Sampling, max_new_tokens: int) -> AnswerFunction:
    """Our decoder, with the drafter that it has."""
    return lambda batch: decoder.generate(
        [prompt.ids for prompt in batch], sampling, max_new_tokens, requests=[prompt.index for prompt in batch]
    )


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The sampling as GenerationConfig has it."""
    fields: dict[str, Any] = {"do_sample": not sampling.greedy, "repetition_penalty": sampling.repetition_penalty}
    if not sampling.greedy:
        fields |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
    return fields


def answer_with_transformers(
    target: Target, max_new_tokens: int, assistant: Any = None, sampling: Sampling | None = None, **settings: Any
) -> AnswerFunction:
    """`generate` of transformers, one prompt at a time.

    Args:
        target: its generation_config does not matter.
        max_new_tokens: most tokens of an answer.
        assistant: a model for assisted generation.
        sampling: temperature, filters and penalty; None is greedy. The seed does not matter: transformers draws from torch's generator.
        settings: more fields of GenerationConfig.
    """
    stops = sorted(target.stop_ids)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        **_sampling_fields(sampling or Sampling()),
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
        use_cache=True,  # a target that was trained without one may say so in its config.json
        **settings,
    )
    extra, model = {} if assistant is None else {"assistant_model": assistant}, cast(Any, target.model)

    def answer(batch: list[EncodedPrompt]) -> list[Completion]:
        completions = []
        for prompt in batch:
            ids = torch.tensor([prompt.ids], device=target.device)
            own, model.generation_config = model.generation_config, GenerationConfig()  # generate takes from it what `config` leaves out
            try:
                with torch.inference_mode():
                    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **extra)
            finally:
                model.generation_config = own
            completions.append(Completion(output[0, len(prompt.ids) :].tolist()))
        return completions

    return answer


def interleave(
    functions: dict[str, AnswerFunction],
    batches: list[list[EncodedPrompt]],
    reset: Callable[[], None] = lambda: None,
    again: int = 0,
    counters: Mapping[str, Counters] = MappingProxyType({}),
) -> Iterator[tuple[list[EncodedPrompt], dict[str, TimedAnswers]]]:
    """Time every function on every batch; each batch starts with the next function. All are warmed up on the first prompt.

    Args:
        functions: by name.
        batches: of prompts.
        reset: gives drafters back what they knew before the warm-up; called after it.
        again: after so many batches the prompts come again, and `reset` is called; 0: never.
        counters: of the decoders among the functions, by name.

    Yields:
        A batch, and by the names of the functions their answers with times.
    """
    names = list(functions)
    for function in functions.values():
        function(batches[0][:1])
    for number, batch in enumerate(batches):
        if not number or again and number % again == 0:
            reset()
        timed = {}
        start = number % len(names)
        for name in names[start:] + names[:start]:
            timed[name] = _timed(functions[name], batch, counters.get(name))
        yield batch, timed


def _timed(function: AnswerFunction, batch: list[EncodedPrompt], counters: Counters | None) -> TimedAnswers:
    before = replace(counters) if counters else Counters()
    began = time.perf_counter()
    answers = function(batch)
    if torch.cuda.is_initialized():  # a round behind the last one that was read may still run
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if counters is None:
        return TimedAnswers(seconds, answers)
    return TimedAnswers(seconds - (counters.capture_s - before.capture_s), answers, counters.prefill_s - before.prefill_s)
