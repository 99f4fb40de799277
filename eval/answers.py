"""Prompts as token ids, and their answers, several at a time, with a progress bar."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from draftsmith.data.prompts import Prompt
from draftsmith.eval.loading import encode
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.progress import Bar
from draftsmith.inference.request import collect
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.terminal import printable
from draftsmith.models import ranks
from draftsmith.models.target import Target

SLOTS = 8  # for the target's own answers


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt with its token ids.

    Attributes:
        prompt: with its earlier turns, if it is a later one.
        ids: its token ids.
        index: its number among the turns of all prompts, and the noise key of its request.
        turn: its number in its conversation, from 1.
        continuation: token ids of the answer that a log has to it; none without one.
    """

    prompt: Prompt
    ids: list[int]
    index: int
    turn: int = 1
    continuation: tuple[int, ...] = ()

    @property
    def conversation(self) -> int:
        """The index of its conversation's first turn."""
        return self.index + 1 - self.turn


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and the target's own answer, both as token ids."""

    prompt: list[int]
    tokens: list[int]


def encode_prompts(target: Target, prompts: list[Prompt], max_new_tokens: int) -> tuple[list[EncodedPrompt], dict[str, int]]:
    """Tokenize the prompts. A later turn is asked after the target's own greedy answers to the turns before it, whatever is measured then.

    Returns:
        The prompts, each turn one of its own, in their order; by domain, how many were skipped since they do not fit the target's context
        together with the answer, or come after one that does not.

    Raises:
        ValueError: a prompt without tokens or with tokens that the target lacks, or none that fits.
    """
    encoded: list[EncodedPrompt] = []
    skipped: dict[str, int] = {}
    firsts = accumulate((1 + len(prompt.later) for prompt in prompts), initial=0)
    items = [_encoded(target, prompt, index) for prompt, index in zip(prompts, firsts, strict=False)]
    first = items[0]
    conversations, single = [item for item in items if item.prompt.later], [item for item in items if not item.prompt.later]
    to_answer, done, decoder = sum(len(item.prompt.later) for item in items), 0, None
    with Bar("the target's own answers", to_answer, show=bool(to_answer)) as bar:
        # As many conversations at a time as there are slots, so that each finds its last turn's KV.
        for turns in [single, *batches(conversations, SLOTS)]:
            while turns:
                fitting = list[EncodedPrompt]()
                for item in turns:
                    if len(item.ids) + max_new_tokens <= target.max_positions:
                        fitting.append(item)
                    else:
                        skipped[item.prompt.domain] = skipped.get(item.prompt.domain, 0) + 1 + len(item.prompt.later)
                        done += len(item.prompt.later)
                encoded += fitting
                answered, turns = [item for item in fitting if item.prompt.later], []
                if answered:  # all ranks ask after the first one's answers
                    ids = [item.ids for item in answered]
                    more = max(len(item.prompt.later) for item in answered) > 1
                    decoder = _with_space(target, decoder, max(map(len, ids)) + max_new_tokens, more)
                    texts = ranks.agreed([answer.tokens for answer in decoder.generate(ids, Sampling(), max_new_tokens)])
                    turns = [_next_turn(target, item, text) for item, text in zip(answered, texts, strict=True)]
                    done += len(answered)
                    bar.update(done)
    if not encoded:
        raise ValueError(
            f"prompt {first.prompt.id!r} has {len(first.ids)} tokens; with {max_new_tokens} new ones it does not fit the target's context of "
            f"{target.max_positions} (none of {len(prompts)} prompts does); shorten them or lower --max-new-tokens"
        )
    return sorted(encoded, key=lambda item: item.index), skipped


def _with_space(target: Target, decoder: Decoder | None, context: int, more: bool) -> Decoder:
    """The decoder, which keeps KV between turns, if its context suffices, else a larger one, which prefills everything again once.

    more: whether it will answer further turns, which are longer.
    """
    if decoder is not None and decoder.context is not None and decoder.context >= context:
        return decoder
    return Decoder(target, slots=SLOTS, context=min(4 * context if more else context, target.max_positions), keep=True)


def _encoded(target: Target, prompt: Prompt, index: int, turn: int = 1) -> EncodedPrompt:
    ids, continuation = encode(target, prompt), ()
    if prompt.continuation:
        both = encode(target, prompt, prompt.continuation)
        if both[: len(ids)] != ids:  # the tokenizer joins the end of the prompt with the answer, which decoding does not
            both = [*ids, *target.require_tokenizer().encode(prompt.continuation, add_special_tokens=False)]
        continuation = tuple(both[len(ids) :])
    item = EncodedPrompt(prompt, ids, index, turn, continuation)
    if not item.ids:
        raise ValueError(f"prompt {prompt.id!r} has no tokens; leave it out")
    if max(*item.ids, *continuation, 0) >= target.vocab_size:
        raise ValueError(
            f"prompt {prompt.id!r} has token {max(*item.ids, *continuation, 0)}, the target {target.vocab_size} logits; leave it out"
        )
    return item


def _next_turn(target: Target, item: EncodedPrompt, answer: list[int]) -> EncodedPrompt:
    """The next turn of a conversation, after this answer. For a target without a chat template, all is one text with blank lines between."""
    words = answer[:-1] if answer[-1] in target.stop_ids else answer
    text = str(target.require_tokenizer().decode(words, skip_special_tokens=True))
    before, (following, *later) = item.prompt, item.prompt.later
    prompt = replace(
        following,
        text=following.text if target.tokenizer.chat_template else "\n\n".join((before.completion or before.text, text, following.text)),
        messages=(*before.messages, {"role": "assistant", "content": text}, *following.messages),
        later=tuple(later),
    )
    return _encoded(target, prompt, item.index + 1, item.turn + 1)


def skipped_line(skipped: dict[str, int], positions: int) -> str:
    """One sentence on the prompts that `encode_prompts` skipped; "" where there are none."""
    counts = ", ".join(f"{printable(domain, keep='')} {count}" for domain, count in skipped.items())
    return f"skipped, since prompt and answer exceed the target's {positions:,} positions: {counts}" if skipped else ""


def batches(prompts: list[EncodedPrompt], size: int) -> list[list[EncodedPrompt]]:
    """The prompts in their order, `size` at a time."""
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def decode_all(label: str, decoder: Decoder, prompts: Sequence[list[int]], sampling: Sampling, max_new_tokens: int) -> list[Completion]:
    """Decode all prompts under a progress bar. The index of a prompt is its noise key.

    Raises:
        ValueError: a prompt that the decoder refuses.
    """
    completions, ended = [Completion() for _ in prompts], 0
    with Bar(f"{label} at T={sampling.temperature:g}", len(prompts)) as bar:
        for steps in decoder.stream(prompts, sampling, max_new_tokens):
            collect(steps, completions)
            ended += sum(bool(step.reason) for step in steps)
            bar.update(ended)
    return completions


def target_texts(target: Target, prompts: Sequence[list[int]], sampling: Sampling, max_new_tokens: int) -> list[TargetText]:
    """The target's own answers by plain decoding.

    Raises:
        ValueError: a prompt that the decoder refuses.
    """
    answers = decode_all("the target's own answers", Decoder(target, slots=SLOTS), prompts, sampling, max_new_tokens)
    return [TargetText(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
