"""Prompts as token ids, and their answers, several at a time, with a progress bar."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.data.prompts import Prompt
from draftsmith.eval.loading import encode
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.progress import Bar
from draftsmith.inference.request import collect
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt with its token ids. `index` is its number in the list of prompts, and the noise key of its request."""

    prompt: Prompt
    ids: list[int]
    index: int


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and the target's own answer, both as token ids."""

    prompt: list[int]
    tokens: list[int]


def encode_prompts(target: Target, prompts: list[Prompt], max_new_tokens: int) -> list[EncodedPrompt]:
    """Tokenize the prompts.

    Raises:
        ValueError: a prompt without tokens, with tokens that the target lacks, or too long for its context together with the answer.
    """
    encoded = [EncodedPrompt(prompt, encode(target, prompt), index) for index, prompt in enumerate(prompts)]
    for item in encoded:
        if not item.ids:
            raise ValueError(f"prompt {item.prompt.id!r} has no tokens; leave it out")
        if max(item.ids) >= target.vocab_size:
            raise ValueError(f"prompt {item.prompt.id!r} has token {max(item.ids)}, the target {target.vocab_size} logits; leave it out")
    long = [item for item in encoded if len(item.ids) + max_new_tokens > target.max_positions]
    if long:
        name, size = long[0].prompt.id, len(long[0].ids)
        raise ValueError(
            f"prompt {name!r} has {size} tokens; with {max_new_tokens} new ones it does not fit the target's context of "
            f"{target.max_positions} ({len(long)} of {len(encoded)} prompts do not); shorten them or lower --max-new-tokens"
        )
    return encoded


def decode_all(label: str, decoder: Decoder, prompts: Sequence[list[int]], sampling: Sampling, max_new_tokens: int) -> list[Completion]:
    """Decode all prompts under a progress bar. The index of a prompt is its noise key.

    Raises:
        ValueError: a prompt that the decoder refuses.
    """
    completions = [Completion() for _ in prompts]
    with Bar(f"{label} at T={sampling.temperature:g}", len(prompts)) as bar:
        for steps in decoder.stream(prompts, sampling, max_new_tokens):
            collect(steps, completions)
            bar.update(sum(bool(completion.reason) for completion in completions))
    return completions


def target_texts(target: Target, prompts: Sequence[list[int]], sampling: Sampling, max_new_tokens: int, slots: int = 8) -> list[TargetText]:
    """The target's own answers by plain decoding, `slots` prompts at a time.

    Raises:
        ValueError: a prompt that the decoder refuses.
    """
    answers = decode_all("the target's own answers", Decoder(target, slots=slots), prompts, sampling, max_new_tokens)
    return [TargetText(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
