"""Conversations as token ids and a loss mask of what the assistant says, by the tokenizer's own chat template: exactly, or not at all.

What the assistant says in a turn is what the template writes from the end of the generation prompt to the end-of-turn token, that token
included. It is found in the rendered text, checked there, and only then mapped to tokens.
"""

import json
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that data give it; templates read the first two
SENTINEL = "\uf8f0said\uf8f1"  # stands for the assistant's words; private-use characters, which occur in no conversation
UNWRITTEN_CALLS = "the template does not write its tool calls"
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
PLAIN = [
    {"role": "user", "content": "Which Rivers meet in Koblenz?"},
    {"role": "assistant", "content": "The Moselle and the Rhine do, at a place\nthat is called the German Corner."},
    {"role": "user", "content": "And in Passau? Name All Three."},
    {"role": "assistant", "content": "The Danube, the Inn and the Ilz:\n\n1. The Inn is the greenest.\n2. The Ilz is the darkest of them."},
]


class TemplateRefused(ValueError):
    """The loss mask cannot be derived for this template."""

    def __init__(self, name: str, why: str, remedy: str) -> None:
        super().__init__(name, why, remedy)  # as they are, so that it comes whole out of another process
        self.reason = why

    def __str__(self) -> str:
        return "the chat template of {!r} gives no loss mask: {}; {}".format(*self.args)


class Unusable(ValueError):
    """This conversation cannot be used. `reason` is short, and the same for conversations with the same trouble."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the conversation cannot be used: {self.reason}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template writes: `end` ends a turn (`token`: with a special token), `after` follows each end, `closing` only the last."""

    end: str
    token: bool
    after: str
    closing: str


class Template:
    """The chat template of a tokenizer; with `last_turn`, only the last assistant turn bears loss.

    Raises TemplateRefused when there is no template, or the tokenizer does not say which characters a token covers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, last_turn: bool = False) -> None:
        self.tokenizer, self.last_turn = tokenizer, last_turn
        if not tokenizer.chat_template:
            raise TemplateRefused(
                _name(tokenizer), "there is no template, so `messages` cannot be rendered", "give rows with `text` instead"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateRefused(
                _name(tokenizer), "its tokens carry no character offsets", "use a fast tokenizer (one with a tokenizer.json)"
            )
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        # Some tokenizers add runs of blanks as tokens: those end no turn.
        self.specials = tuple(sorted({token for token in [*added, *tokenizer.all_special_tokens] if token.strip()}, key=len, reverse=True))
        self.special = re.compile("|".join(map(re.escape, self.specials)) or "(?!)")
        self.shapes: dict[str, Shape] = {}
        self.sound: bool | None = None

    def encode(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> tuple[list[int], list[bool]]:
        """(ids, mask) of one conversation, of the same length; the mask is True where a token is the assistant's.

        A turn with `finish_reason` "length" bears no loss for its end; an empty turn bears none at all.
        Raises Unusable for this conversation's faults, and TemplateRefused where even a plain conversation fails.
        """
        trouble: TemplateRefused | Unusable | None = None
        for plain in _variants(messages):
            try:
                return self._encode(plain, tools or None)
            except (TemplateRefused, Unusable) as error:
                if trouble is None or trouble.reason == UNWRITTEN_CALLS:
                    trouble = error
        if isinstance(trouble, TemplateRefused) and self._sound():
            raise Unusable(trouble.reason) from None
        raise trouble or Unusable("no messages")

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """The ids that ask the model for the next turn. Raises Unusable, and TemplateRefused where the template is not valid Jinja."""
        trouble: Unusable | None = None
        for plain in _variants(messages):
            try:
                text, _ = self._render(plain, tools := tools or None, prompt=True)
            except Unusable as error:
                trouble = trouble or error
                continue
            if self._writes_calls(plain, tools):
                return self._tokenise(text)[0]
        raise trouble or Unusable(UNWRITTEN_CALLS)

    def _encode(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[list[int], list[bool]]:
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Unusable("no assistant turn")
        text, marked = self._render(messages, tools)
        if not self._writes_calls(messages, tools):
            raise Unusable(UNWRITTEN_CALLS)
        known = dict(zip(turns, marked, strict=True)) if len(turns) == len(marked) else {}
        spans: list[tuple[int, int]] = []
        first, floor = 0, 0
        for turn in turns[-1:] if self.last_turn else turns:
            if not _speaks(messages[turn]):
                continue
            start, end = known.get(turn) or self._locate(messages, tools, turn, text, floor)
            cut_off = messages[turn].get("finish_reason") == "length"
            end = self._end(text, start, end, self._shape(tools), turn in known, cut_off)
            self._check(messages[first:turn], messages[turn], text[floor:start], text[start:end])
            spans.append((start, end))
            first, floor = turn + 1, end
        if not spans:
            raise Unusable("the assistant says nothing")
        ids, offsets = self._tokenise(text)
        return ids, self._mask(ids, offsets, text, spans)

    def _locate(self, messages: list[dict[str, Any]], tools: Any, turn: int, text: str, floor: int) -> tuple[int, int]:
        """Where turn `turn` begins and ends in `text`, by rendering the conversation up to it and up to its end."""
        try:
            before, _ = self._render(messages[:turn], tools, prompt=True)
        except Unusable as error:
            if turn:
                raise self._refusal(f"up to an assistant turn, {error.reason}") from None
            before = None  # templates that look at the first message cannot render none
        if before is not None and text.startswith(before):
            after = self._body(messages[: turn + 1], tools)
            if text.startswith(after) and len(after) > len(before):
                return len(before), len(after)
        elif turn == 0 or before is None:
            raise Unusable("it begins with the assistant, whom this template cannot ask first")
        return self._locate_by_sentinel(messages, tools, turn, text, before, floor)

    def _locate_by_sentinel(
        self, messages: list[dict[str, Any]], tools: Any, turn: int, text: str, before: str, floor: int
    ) -> tuple[int, int]:
        """The same where the template writes a turn differently once others follow: the turn's words are found by replacing them.

        What the template writes around them is compared with a rendering in which the turn is the last one.
        """
        stand_in, words = _sentinel(messages[turn])
        lead, found, rest = self._body([*messages[:turn], stand_in, *messages[turn + 1 :]], tools).partition(SENTINEL)
        last_lead, last_found, last_rest = self._body([*messages[:turn], stand_in], tools).partition(SENTINEL)
        # Some templates name the called function again beside its result.
        rest, body = rest.replace(SENTINEL, words), text.removesuffix(self._shape(tools).closing)
        if not (found and last_found and body.startswith(lead) and body.endswith(rest) and len(lead) + len(rest) <= len(body)):
            raise self._refusal("what the template writes elsewhere depends on what the assistant says")
        start = len(before)
        if not text.startswith(before):
            thought = (stand_in["content"] or "").removesuffix(SENTINEL).lstrip()  # may well quote the generation prompt
            start = self._beginning(messages[:turn], tools, lead.removesuffix(thought), before, last_lead, floor)
        length = self._shared(rest, last_rest)
        if not self.special.search(rest, 0, length):
            here, there = self.special.match(rest, length), self.special.match(last_rest, length)
            length = here.end() if here and there else length  # an end-of-turn token that depends on what follows
        return start, len(body) - len(rest) + length

    def _beginning(self, asked: list[dict[str, Any]], tools: Any, lead: str, before: str, last_lead: str, floor: int) -> int:
        """Where in `lead`, what the template writes before the words, the generation prompt ends that `before` ends with."""
        length = len(self._body(asked, tools))
        written = self._shared(before, last_lead)  # the generation prompt, less what it begins of the answer (`<think>`)
        heading = before[:written] if written >= length else before
        # The longest end of the heading that stands in the lead after the last turn, no special token cut in two.
        longest = bisect_left(range(1, len(heading) + 1), True, key=lambda n: lead.rfind(heading[-n:], floor) < 0)
        cut = len(heading) - longest
        cut = next((token.end() for token in self.special.finditer(heading) if token.start() < cut < token.end()), cut)
        matched, last = heading[cut:], (asked[-1]["content"] or "").strip()
        if len(matched) <= max(0, len(heading) - length) or last[-16:] not in matched:
            raise self._refusal("the generation prompt is not how the template begins the assistant's turns")
        return lead.rfind(matched, floor) + len(matched)

    def _end(self, text: str, start: int, end: int, shape: Shape, marked: bool, cut_off: bool) -> int:
        """The end of a turn's loss, given the end of its text: what follows the end-of-turn token is not the model's to say."""
        if shape.token:
            if marked and text.startswith(shape.end, end):
                end += len(shape.end)
            trimmed = end - len(shape.after)
            ended = text.endswith(shape.end, start, trimmed) or text.endswith(self.specials, start, trimmed)
            if ended and text.endswith(shape.after, start, end):
                end = trimmed
        if cut_off and shape.end and text.endswith(shape.end, start, end):
            return end - len(shape.end)
        if cut_off and text.endswith(self.specials, start, end):
            return end - next(len(token) for token in self.specials if text.endswith(token, start, end))
        return end

    def _check(self, asked: list[dict[str, Any]], message: dict[str, Any], gap: str, span: str) -> None:
        """`message` is said in `span`, and nothing of what was `asked` since the turn before: that stands in `gap`."""
        said = _visible(message)
        # Beside tool calls some templates leave out the words.
        if said not in span and _squeezed(said) not in _squeezed(span) and "tool_calls" not in message:
            raise self._refusal("the template does not write what the assistant says")
        for other in asked:
            words = other["content"].strip() if other["role"] in ("user", "tool") else ""
            if words and words not in gap and words in span:
                raise self._refusal("the template writes others' words within the assistant's turn")

    def _mask(self, ids: list[int], offsets: list[tuple[int, int]], text: str, spans: list[tuple[int, int]]) -> list[bool]:
        """True for each token that overlaps a span; that those tokens say what the spans say is checked."""
        starts, ends, reached = [], [], 0
        for start, end in offsets:
            # Some tokenizers leave the blanks before a word out of its offsets: a token reaches back to the one before.
            starts.append(min(start, reached))
            reached = max(reached, end)
            ends.append(reached)
        mask, covered = [False] * len(ids), []
        for start, end in spans:
            # Tokens of no characters, such as SentencePiece's dummy prefix, count as the model's where they follow its prompt.
            low, high = min(bisect_right(ends, start), bisect_left(starts, start)), bisect_left(starts, end)
            mask[low:high] = [True] * (high - low)
            covered.append(text[starts[low] : ends[high - 1]] if low < high else "")
        said = [i for i, keep in zip(ids, mask, strict=True) if keep]
        decoded, expected = self.tokenizer.decode(said, clean_up_tokenization_spaces=False), "".join(covered)
        if decoded != expected and _squeezed(str(decoded)) != _squeezed(expected):
            raise self._refusal("the tokens decode to other words than the assistant's")
        return mask

    def _tokenise(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Unusable("it is not valid Unicode (half of a surrogate pair)") from None
        # The template writes BOS itself where the model wants one: special tokens added here would double it.
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
        return cast(list[int], found["input_ids"]), cast(list[tuple[int, int]], found["offset_mapping"])

    def _render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text, and the spans [start, end) in it that the template itself marks."""
        template = self._template(tools)
        generation = GENERATION.search(template) is not None
        try:
            named: dict[str, Any] = {**self.tokenizer.special_tokens_map, "add_generation_prompt": prompt}
            found = render_jinja_template([messages], tools=tools, chat_template=template, return_assistant_tokens_mask=generation, **named)
        except TemplateSyntaxError as error:
            raise self._refusal(f"the template is not valid Jinja ({error.message})") from None
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:  # what Jinja code may raise
            reason = str(error).strip().split("\n")[0][:100] or type(error).__name__
            raise Unusable(f"the template refuses it: {reason}") from None
        texts, spans = cast(tuple[list[str], list[list[tuple[int, int]]]], found)
        return texts[0], spans[0] if generation else []

    def _writes_calls(self, messages: list[dict[str, Any]], tools: Any) -> bool:
        """Whether each turn with tool calls shows in the text: templates that know none write only its words, or nothing."""
        calling = sum("tool_calls" in message for message in messages)
        marked = [_sentinel(message)[0] if "tool_calls" in message else message for message in messages]
        return not calling or self._render(marked, tools)[0].count(SENTINEL) >= calling

    def _body(self, messages: list[dict[str, Any]], tools: Any) -> str:
        """The conversation's text, less what the template writes at the very end."""
        return self._render(messages, tools)[0].removesuffix(self._shape(tools).closing)

    def _shape(self, tools: Any) -> Shape:
        """What ends the turns of the template that `tools` select, from a turn that is last and the same with another after it."""
        template = self._template(tools)
        if template not in self.shapes:
            talk = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": SENTINEL}]
            try:
                last, inner = (self._render(turns, tools)[0].partition(SENTINEL)[2] for turns in (talk, [*talk, talk[0]]))
            except Unusable:
                last = inner = ""
            shared = self._shared(last, inner)
            found = re.search(f"(?:{self.special.pattern})+", last[:shared])
            end = found.end() if found else shared
            closing = last[shared:] if found else ""
            self.shapes[template] = Shape(last[:end], found is not None, last[end:shared], closing)
        return self.shapes[template]

    def _shared(self, one: str, other: str) -> int:
        """The length of the common beginning of two texts, no special token cut in two."""
        length = bisect_left(range(1, min(len(one), len(other)) + 1), True, key=lambda n: one[:n] != other[:n])
        for text in (one, other):
            for token in self.special.finditer(text, 0, length + 64):
                if token.start() < length < token.end():
                    length = token.start()
        return length

    def _template(self, tools: Any) -> str:
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise self._refusal("there are several templates and none is the default") from None

    def _sound(self) -> bool:
        """Whether a plain conversation succeeds, so that the fault of another is its own."""
        if self.sound is None:
            try:
                self.sound = any(self._encode(PLAIN, None)[1])
            except (TemplateRefused, Unusable):
                self.sound = False
        return self.sound

    def _refusal(self, why: str) -> TemplateRefused:
        return TemplateRefused(
            _name(self.tokenizer), why, "mark the assistant's turns in it with {% generation %}, or give rows with `text` instead"
        )


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or type(tokenizer).__name__


def _variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages as templates expect them; tool calls as transformers documents them, then as DeepSeek's templates take them."""
    if not isinstance(messages, list) or not messages:
        raise Unusable("no messages")
    yield (documented := [_plain(message) for message in messages])
    if any("tool_calls" in message for message in documented):
        yield [_plain(message, documented=False) for message in messages]


def _plain(message: Any, documented: bool = True) -> dict[str, Any]:
    """The message with a string as content, its reasoning under the usual names, and no key without a value."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unusable("a message is not an object with a role")
    found = {key: value for key, value in message.items() if value is not None and not (isinstance(value, list) and not value)}
    content = found.get("content", "" if found["role"] == "assistant" else None)
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Unusable(f"the content of a turn of role {found['role']!r} is not text")
    found["content"] = content
    reasoning = next((found[name] for name in REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    if "tool_calls" in found:
        calls = found["tool_calls"]
        found["tool_calls"] = [_call(call, documented) for call in (calls if isinstance(calls, list) else [calls])]
        found["content"] = content if documented else content or None
    return found


def _call(call: Any, documented: bool) -> dict[str, Any]:
    """A tool call with its arguments as an object, or else as JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("a tool call is not an object with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and documented:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # the model's own slip: it is written as it is
    elif not isinstance(arguments, str) and not documented:
        arguments = json.dumps(arguments, ensure_ascii=False)
    named = {"id": call["id"]} if "id" in call else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _sentinel(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with SENTINEL in place of its words, or of the function that it calls first; and those words."""
    if "tool_calls" in message:
        first, *others = message["tool_calls"]
        stand_in = {**first, "function": {**first["function"], "name": SENTINEL}}
        return {**message, "tool_calls": [stand_in, *others]}, first["function"]["name"]
    head, think, _ = message["content"].rpartition("</think>")
    return {**message, "content": head + think + SENTINEL}, _visible(message)


def _visible(message: dict[str, Any]) -> str:
    return (message["content"] or "").rpartition("</think>")[2].strip()


def _speaks(message: dict[str, Any]) -> bool:
    return bool((message["content"] or "").strip() or "tool_calls" in message or message.get("reasoning_content"))


def _squeezed(text: str) -> str:
    """The text without blanks, in the form that normalising tokenizers give it."""
    return "".join(unicodedata.normalize("NFKC", text).split())
