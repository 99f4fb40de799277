"""How a chat template ends an assistant's turn, read from what it writes; and the tokens at which decoding stops."""

import os
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.rendering import render

SENTINEL = "\uf8f0said\uf8f1"  # stands for the assistant's words; private-use characters, which occur in no conversation
QUESTION = "\uf8f0ask\uf8f1"


class Specials:
    """The special tokens of a tokenizer, as text.

    Attributes:
        texts: longest first.
        pattern: matches one.
        start: the token that begins a text, "" if there is none.
        end: the token that ends it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        # Some tokenizers add runs of blanks as tokens: those end no turn.
        texts = {token for token in [*added, *tokenizer.all_special_tokens] if token.strip()}
        self.texts = tuple(sorted(texts, key=len, reverse=True))
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self.end = str(tokenizer.eos_token or "")
        self.start = str(tokenizer.bos_token or "")

    def common_length(self, a: str, b: str) -> int:
        """The length of the common beginning of two texts, no special token cut in two."""
        length = bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda n: a[:n] != b[:n])
        for text in (a, b):
            for token in self.pattern.finditer(text, 0, length + 64):
                if token.start() < length < token.end():
                    length = token.start()
        return length

    def first(self, text: str) -> str:
        """The first special token in a text, "" if there is none."""
        token = self.pattern.search(text)
        return token[0] if token else ""

    def through_end(self, text: str) -> str:
        """The text up to the end-of-text token or else the last special token, and those beside it; "" if there is none.

        A token that is repeated counts where it comes first.
        """
        tokens = list(self.pattern.finditer(text))
        texts = [token[0] for token in tokens]
        if not tokens:
            return ""
        index = texts.index(self.end if self.end in texts else texts[-1])
        while index + 1 < len(tokens) and tokens[index].end() == tokens[index + 1].start():
            index += 1
        return text[: tokens[index].end()]


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What a template writes after the assistant's words.

    Attributes:
        text: ends each turn.
        special: whether `text` ends with a special token.
        after: follows `text` in each turn.
        closing: follows the last turn only.
        missing: what a last turn lacks of `text`. Templates that leave it out of a last turn let a model continue it; where the turn is
            complete it has to be there.
        inner: ends a turn that others follow, where that differs from how a last turn ends.
        opening: what the assistant says before its words: reasoning, a channel.
        stop: the special token at which decoding of a turn can stop, "" if there is none.
    """

    text: str = ""
    special: bool = False
    after: str = ""
    closing: str = ""
    missing: str = ""
    inner: str = ""
    opening: str = ""
    stop: str = ""


Render = Callable[[list[dict[str, Any]], bool], str]


def find_turn_end(write: Render, specials: Specials) -> TurnEnd:
    """How a template ends a turn: a turn that is last is compared with the same turn before another question.

    Args:
        write: gives the text of messages, and whether to ask for the next turn.

    Raises:
        ValueError: whatever `write` raises.
    """
    question, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": SENTINEL}
    before, _, last = write([question, answer], False).partition(SENTINEL)
    inner = write([question, answer, question], False).partition(SENTINEL)[2]
    if not inner:
        return TurnEnd()
    asking, plain = write([question], True), write([question], False)
    generation = asking[len(plain) :] if asking.startswith(plain) else ""
    until_next, until_first = inner.partition(QUESTION)[0], before.partition(QUESTION)[0]
    header = _header_start(until_next, until_first, generation, specials)
    shared = specials.common_length(asking, before)
    opening = before[shared:] if QUESTION in before[:shared] else ""
    common = specials.common_length(last, inner if header is None else inner[:header])
    text = specials.through_end(last[:common])
    if text:
        return TurnEnd(text, True, last[len(text) : common], last[common:], opening=opening, stop=_stop(text, opening, specials))
    if header is None:
        header = _own_header_start(until_next, until_first, specials)
    inner_end = specials.through_end(until_next[:header])
    if inner_end and inner_end.startswith(last):
        return TurnEnd(inner_end, True, missing=inner_end[len(last) :], opening=opening, stop=_stop(inner_end, opening, specials))
    token = specials.pattern.match(last.lstrip())
    return TurnEnd(last[:common], inner=inner_end, opening=opening, stop=_stop(token[0] if token else "", opening, specials))


def _header_start(until_next: str, until_first: str, generation: str, specials: Specials) -> int | None:
    """Where the next message's header begins: with the special token that begins the conversation, or else the generation prompt."""
    for heads in ({specials.start, specials.first(until_first.removeprefix(specials.start))}, {specials.first(generation)}):
        starts = [until_next.find(head) for head in heads - {"", specials.end} if head in until_next]
        if starts:
            return min(starts)
    return None


def _own_header_start(until_next: str, until_first: str, specials: Specials) -> int:
    """The same, where each role has a token of its own: what precedes both the first question and the next one is the header."""
    start = len(until_next) - len(os.path.commonprefix([until_next[::-1], until_first[::-1]]))
    return next((token.end() for token in specials.pattern.finditer(until_next) if token.start() < start < token.end()), start)


def _stop(text: str, opening: str, specials: Specials) -> str:
    """The last special token of a turn's end, unless a turn also has it before its words."""
    tokens = specials.pattern.findall(text)
    return tokens[-1] if tokens and tokens[-1] not in opening else ""


def stop_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the special token that ends an assistant's turn. None: the template has none, or it cannot be rendered."""
    if not tokenizer.chat_template:
        return None

    def write(messages: list[dict[str, Any]], prompt: bool) -> str:
        return render(tokenizer.get_chat_template(), messages, tokenizer.special_tokens_map, prompt=prompt)[0]

    try:
        stop = find_turn_end(write, Specials(tokenizer)).stop
    except ValueError:  # a template's fault matters only where somebody asks for the template
        return None
    return cast(dict[str, int], tokenizer.added_tokens_encoder).get(stop)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The tokens at which an answer ends: those that the generation config and the tokenizer name, and the chat template's end of turn."""
    generation = model.generation_config
    ids: Any = generation.eos_token_id if generation is not None else None
    stops: set[Any] = set(ids) if isinstance(ids, (list, tuple)) else {ids}
    if tokenizer is not None:
        stops.update((tokenizer.eos_token_id, stop_token(tokenizer)))
    return frozenset(int(stop) for stop in stops if stop is not None)
