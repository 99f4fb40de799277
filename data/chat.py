"""Conversations as token ids and a loss mask of what the assistant says, by the tokenizer's own chat template: exactly, or not at all.

What the assistant says in a turn is what the template writes from the end of the generation prompt to the end-of-turn token, that token
included. This span is located in the rendered text and checked there; only then is it mapped to tokens.
"""

import json
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from draftsmith.data.conversations import joined_text
from draftsmith.inference.terminal import printable
from draftsmith.models.rendering import RenderingFailed, render, with_reasoning
from draftsmith.models.turn_end import SENTINEL, Specials, TurnEnd, find_turn_end

WRITTEN_OTHERWISE = ("system", "assistant", "tool")
UNWRITTEN_CALLS = "the template does not write its tool calls"
REFUSES = "the template refuses it: "
THINKING = re.compile(r"[<\[][^<>\[\]]*(think|[>\]]thought)", re.IGNORECASE)
OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
PLAIN = [
    {"role": "user", "content": "Which Rivers meet in Koblenz?"},
    {"role": "assistant", "content": "The Moselle and the Rhine do, at a place\nthat is called the German Corner."},
    {"role": "user", "content": "And in Passau? Name All Three."},
    {"role": "assistant", "content": "The Danube, the Inn and the Ilz:\n\n1. The Inn is the greenest.\n2. The Ilz is the darkest of them."},
]


class TemplateRefused(ValueError):
    """The loss mask cannot be derived for this template."""

    def __init__(self, name: str, why: str, remedy: str) -> None:
        super().__init__(name, why, remedy)  # unformatted, so that the error can be pickled in a worker process
        self.reason = why

    def __str__(self) -> str:
        return "the chat template of {!r} gives no loss mask: {}; {}".format(*self.args)


class Unusable(ValueError):
    """This conversation cannot be used. `reason` is short, and the same for all conversations with the same fault."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the conversation cannot be used: {self.reason}"


class Template:
    """The chat template of a tokenizer.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        last_turn: only the last assistant turn is supervised.

    Raises:
        TemplateRefused: no template, or a tokenizer that does not say which characters a token covers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, last_turn: bool = False) -> None:
        self.tokenizer, self.last_turn = tokenizer, last_turn
        if not tokenizer.chat_template:
            raise TemplateRefused(
                _name(tokenizer),
                "there is no template, so `messages` cannot be rendered",
                "set data.template to a file with a Jinja chat template, or give examples with `text` instead",
            )
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateRefused(
                _name(tokenizer), "its tokens carry no character offsets", "use a fast tokenizer (one with a tokenizer.json)"
            )
        self.specials = Specials(tokenizer)
        self.too_much: TemplateRefused | None = None
        self.turn_ends: dict[str, TurnEnd] = {}
        self.plain_encodes: bool | None = None

    def encode(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> tuple[list[int], list[bool]]:
        """Token ids and loss mask of a conversation, of the same length. The mask is True where a token is the assistant's.

        Args:
            messages: turns with `role` and `content`. A turn with `finish_reason` "length" is supervised without its end, an empty one not at all.
            tools: descriptions of functions, for the template.

        Raises:
            Unusable: the fault is this conversation's.
            TemplateRefused: even a plain conversation fails.
        """
        first_error: TemplateRefused | Unusable | None = None
        for variant in _variants(messages):
            try:
                return self._encode(variant, tools or None)
            except (TemplateRefused, Unusable) as error:
                if first_error is None or (first_error.reason == UNWRITTEN_CALLS and not error.reason.startswith(REFUSES)):
                    first_error = error  # the first, or the one of the form of calls that the template does write
        if isinstance(first_error, TemplateRefused) and self._plain_encodes():
            raise Unusable(first_error.reason) from None
        raise first_error or Unusable("no messages")

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids that ask the model for the next turn. Raises as `tokens`."""
        return self._tokens(messages, tools, lambda variant, tools: self._render(variant, tools, prompt=True))

    def tokens(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation, as `encode` gives them, for templates without a loss mask too.

        Raises:
            Unusable: the template cannot write the conversation.
            TemplateRefused: the template is not valid Jinja, or takes too much.
        """
        return self._tokens(messages, tools, self._written)

    def _tokens(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, write: Callable[[Any, Any], Any]) -> list[int]:
        tools, first_error = tools or None, None
        for variant in _variants(messages):
            try:
                text, _ = write(variant, tools)
            except Unusable as error:
                first_error = first_error or error
                continue
            if self._writes_calls(variant, tools):
                return self._tokenise(text)[0]
            first_error = first_error or Unusable(UNWRITTEN_CALLS)
        raise first_error or Unusable("no messages")

    def _encode(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[list[int], list[bool]]:
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Unusable("no assistant turn")
        text, marked = self._written(messages, tools)
        if not self._writes_calls(messages, tools):
            raise Unusable(UNWRITTEN_CALLS)
        if self.specials.end and self.specials.end in self._turn_end(tools).opening:
            raise self._refusal(f"the assistant's turns begin with {self.specials.end}, at which decoding stops")
        marked_turns = dict(zip(turns, marked, strict=True)) if len(turns) == len(marked) else {}
        spans: list[tuple[int, int]] = []
        next_message, previous_end = 0, 0
        for turn in turns[-1:] if self.last_turn else turns:
            if not _speaks(messages[turn]):
                continue
            start, end = marked_turns.get(turn) or self._locate(messages, tools, turn, text, previous_end)
            cut_off = messages[turn].get("finish_reason") == "length"
            end = self._end(text, start, end, self._turn_end(tools), turn in marked_turns, cut_off)
            self._check(messages[next_message:turn], messages[turn], text[previous_end:start], text[start:end])
            spans.append((start, end))
            next_message, previous_end = turn + 1, end
        if not spans:
            raise Unusable("the assistant says nothing")
        ids, offsets = self._tokenise(text)
        return ids, self._mask(ids, offsets, text, spans)

    def _locate(self, messages: list[dict[str, Any]], tools: Any, turn: int, text: str, previous_end: int) -> tuple[int, int]:
        """The span of a turn in `text`, by rendering the conversation up to the turn and up to its end."""
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
        return self._locate_by_sentinel(messages, tools, turn, text, before, previous_end)

    def _locate_by_sentinel(
        self, messages: list[dict[str, Any]], tools: Any, turn: int, text: str, before: str, previous_end: int
    ) -> tuple[int, int]:
        """The span of a turn that the template writes differently once others follow: SENTINEL replaces the turn's words.

        What the template writes around them is compared with a rendering in which the turn is the last one.
        """
        stand_in, words = _sentinel(messages[turn])
        lead, mark, rest = self._body([*messages[:turn], stand_in, *messages[turn + 1 :]], tools).partition(SENTINEL)
        last_lead, last_mark, last_rest = self._body([*messages[:turn], stand_in], tools).partition(SENTINEL)
        # Some templates name the called function again beside its result.
        rest, body = rest.replace(SENTINEL, words), text.removesuffix(self._turn_end(tools).closing)
        if not (mark and last_mark and body.startswith(lead) and body.endswith(rest) and len(lead) + len(rest) <= len(body)):
            raise self._refusal("what the template writes elsewhere depends on what the assistant says")
        start = len(before)
        if not text.startswith(before):
            reasoning = (stand_in["content"] or "").removesuffix(SENTINEL).lstrip()  # it may quote the generation prompt
            lead, earlier = lead.removesuffix(reasoning), messages[:turn]
            headings = self._headings(self._body(earlier, tools), before, last_lead, reasoning or stand_in.get("reasoning_content", ""))
            start = self._start(list(headings), earlier[-1], lead, previous_end)
        length, turn_end = self.specials.common_length(rest, last_rest), self._turn_end(tools)
        if turn_end.special and rest.startswith(turn_end.text, length) and last_rest[length:].lstrip().startswith(turn_end.text.lstrip()):
            length += len(turn_end.text)  # only the blanks before it differ
        if turn_end.inner and not self.specials.pattern.search(rest, 0, length):
            end_token, last_end_token = self.specials.pattern.match(rest, length), self.specials.pattern.match(last_rest, length)
            if end_token and last_end_token:  # an end-of-turn token that depends on what follows
                length = end_token.end()
        return start, len(body) - len(rest) + length

    def _start(self, headings: list[tuple[str, int]], previous: dict[str, Any], lead: str, previous_end: int) -> int:
        """Index in `lead` (the text before the assistant's words) just after the first of the headings that is there."""
        last = (previous["content"] or "").strip()
        for heading, _ in headings:
            if lead.startswith(heading):
                return len(heading)
        for heading, length in headings:
            # The longest end of the heading that occurs in the lead after the last turn, no special token cut in two.
            longest = bisect_left(range(1, len(heading) + 1), True, key=lambda n: lead.rfind(heading[-n:], previous_end) < 0)
            cut = len(heading) - longest
            cut = next((token.end() for token in self.specials.pattern.finditer(heading) if token.start() < cut < token.end()), cut)
            matched = heading[cut:]
            if len(matched) > length and last[-16:] in matched:
                return lead.rfind(matched, previous_end) + len(matched)
        raise self._refusal("the generation prompt is not how the template begins the assistant's turns")

    def _headings(self, body: str, before: str, last_lead: str, reasoning: str) -> Iterator[tuple[str, int]]:
        """What may stand before the assistant's words, and the length of the generation prompt in it.

        This is `before`, without what the generation prompt begins of the answer: a last turn, or a tag such as `<think>`, shows what that is.
        """
        written = self.specials.common_length(before, last_lead)
        if written >= len(body):
            tag = OPEN_TAG.search(before, len(body), written)
            written = tag.start() if tag else written
            begun, said = before[written:].lstrip(), last_lead[written:].lstrip()
            if not begun or not said or THINKING.match(begun) or (reasoning and said.startswith(reasoning.strip())):
                yield before[:written], written - len(body)
        else:
            yield before, max(0, len(before) - len(body))
        generation = before[len(body) :] if before.startswith(body) else ""
        for tag in reversed(list(THINKING.finditer(generation))):
            role = generation[: tag.start()]
            yield from ((body + words, len(words)) for words in (role, role.rstrip()) if words.strip())

    def _end(self, text: str, start: int, end: int, turn_end: TurnEnd, marked: bool, cut_off: bool) -> int:
        """The end of a turn's supervised text, given the end of its text: what follows the end-of-turn token is not the model's to say."""
        if turn_end.special:
            if marked and text.startswith(turn_end.text, end):
                end += len(turn_end.text)
            trimmed = end - len(turn_end.after)
            ended = text.endswith(turn_end.text, start, trimmed) or text.endswith(self.specials.texts, start, trimmed)
            if ended and text.endswith(turn_end.after, start, end):
                end = trimmed
            elif text[start:end].rstrip().endswith(self.specials.texts):
                end = start + len(text[start:end].rstrip())
        if cut_off and turn_end.text and text.endswith(turn_end.text, start, end):
            return end - len(turn_end.text)
        if cut_off and text.endswith(self.specials.texts, start, end):
            return end - next(len(token) for token in self.specials.texts if text.endswith(token, start, end))
        return end

    def _check(self, earlier: list[dict[str, Any]], message: dict[str, Any], gap: str, span: str) -> None:
        """Check that `message` is said in `span`, and that the `earlier` messages since the last turn are in the `gap` before it.

        System messages and results of tools may be elsewhere, or written in another form.
        """
        words = _visible(message)
        # Beside tool calls some templates leave out the words.
        if words not in span and _normalised(words) not in _normalised(span) and "tool_calls" not in message:
            raise self._refusal("the template does not write what the assistant says")
        for previous in earlier:
            words = previous["content"].strip() if previous["role"] in ("user", "tool") else ""
            if words and words not in gap and words in span:
                raise self._refusal("the template writes others' words within the assistant's turn")
            if previous["role"] not in WRITTEN_OTHERWISE and _normalised(previous["content"]) not in _normalised(gap):
                raise Unusable(f"the template leaves out what the {printable(previous['role'], '')} says")

    def _mask(self, ids: list[int], offsets: list[tuple[int, int]], text: str, spans: list[tuple[int, int]]) -> list[bool]:
        """True for each token that overlaps a span, once it is checked that these tokens decode to the spans' text."""
        starts, ends, reached = [], [], 0
        for start, end in offsets:
            # Some tokenizers leave the blanks before a word out of its offsets: a token begins where the one before it ended.
            starts.append(min(start, reached))
            reached = max(reached, end)
            ends.append(reached)
        mask, covered = [False] * len(ids), []
        for start, end in spans:
            # Tokens of no characters, such as SentencePiece's dummy prefix, count as the model's where they follow its prompt.
            low, high = min(bisect_right(ends, start), bisect_left(starts, start)), bisect_left(starts, end)
            if low < high and text[end : ends[high - 1]].strip() and not text[max(start, starts[high - 1]) : end].strip():
                high -= 1  # the blank that begins a word of others
            if low < high and (text[starts[low] : start] + text[end : ends[high - 1]]).strip():
                raise self._refusal("a token reaches across the edge of what the assistant says")
            mask[low:high] = [True] * (high - low)
            covered.append(text[starts[low] : ends[high - 1]] if low < high else "")
        supervised = [token for token, keep in zip(ids, mask, strict=True) if keep]
        decoded, expected = self.tokenizer.decode(supervised, clean_up_tokenization_spaces=False), "".join(covered)
        if decoded != expected and _normalised(str(decoded)) != _normalised(expected):
            raise self._refusal("the tokens decode to other words than the assistant's")
        return mask

    def _tokenise(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Unusable("it is not valid Unicode (half of a surrogate pair)") from None
        # The template writes BOS itself where the model wants one: special tokens added now would double it.
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
        return cast(list[int], tokens["input_ids"]), cast(list[tuple[int, int]], tokens["offset_mapping"])

    def _render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text, and the spans [start, end) in it that the template itself marks."""
        if self.too_much:
            raise self.too_much
        try:
            return render(self._template(tools), messages, self.tokenizer.special_tokens_map, tools, prompt)
        except RenderingFailed as error:
            if error.kind == "refused":
                raise Unusable(f"{REFUSES}{error.reason}") from None
            if error.kind == "syntax":
                raise self._refusal(f"the template is not valid Jinja ({error.reason})") from None
            self.too_much = TemplateRefused(
                _name(self.tokenizer), error.reason, "take another template, or give examples with `text` instead"
            )
            raise self.too_much from None

    def _written(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The same with the end of a last turn, where the template leaves it out."""
        text, marked = self._render(messages, tools)
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            text += self._turn_end(tools).missing
        return text, marked

    def _writes_calls(self, messages: list[dict[str, Any]], tools: Any) -> bool:
        """Whether the text shows each turn's tool calls: templates that know none write only the turn's words, or nothing."""
        calling = sum("tool_calls" in message for message in messages)
        marked = [_sentinel(message)[0] if "tool_calls" in message else message for message in messages]
        return not calling or self._render(marked, tools)[0].count(SENTINEL) >= calling

    def _body(self, messages: list[dict[str, Any]], tools: Any) -> str:
        """The conversation's text, without what the template writes at the very end."""
        text = self._written(messages, tools)[0] if messages else self._render(messages, tools)[0]
        return text.removesuffix(self._turn_end(tools).closing)

    def _turn_end(self, tools: Any) -> TurnEnd:
        """How the template that `tools` select ends a turn."""
        template = self._template(tools)
        if template not in self.turn_ends:
            try:
                turn_end = find_turn_end(lambda messages, prompt: self._render(messages, tools, prompt)[0], self.specials)
            except Unusable:
                turn_end = TurnEnd()
            self.turn_ends[template] = turn_end
        return self.turn_ends[template]

    def _template(self, tools: Any) -> str:
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise self._refusal("there are several templates and none is the default") from None

    def _plain_encodes(self) -> bool:
        """Whether a plain conversation can be encoded, so that another one's fault is its own."""
        if self.plain_encodes is None:
            try:
                self.plain_encodes = any(self._encode(PLAIN, None)[1])
            except (TemplateRefused, Unusable):
                self.plain_encodes = False
        return self.plain_encodes

    def _refusal(self, why: str) -> TemplateRefused:
        remedy = "mark the assistant's turns in it with {% generation %}, or give examples with `text` instead"
        return TemplateRefused(_name(self.tokenizer), why, remedy)


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or type(tokenizer).__name__


def _variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages as templates expect them: with tool calls as transformers documents them, then as DeepSeek's templates take them."""
    if not isinstance(messages, list) or not messages:
        raise Unusable("no messages")
    documented = [_plain(message) for message in messages]
    yield documented
    if any("tool_calls" in message for message in documented):
        yield [_plain(message, documented=False) for message in messages]


def _plain(message: Any, documented: bool = True) -> dict[str, Any]:
    """The message with a string as content, its reasoning under the usual keys, and no key without a value."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unusable("a message is not an object with a role")
    plain = {key: value for key, value in message.items() if value is not None and not (isinstance(value, list) and not value)}
    content = joined_text(plain.get("content", "" if plain["role"] == "assistant" else None))
    if not isinstance(content, str):
        raise Unusable(f"the content of a turn of role {plain['role']!r} is not text")
    plain["content"] = content
    plain = with_reasoning(plain)
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        plain["tool_calls"] = [_call(call, documented) for call in (calls if isinstance(calls, list) else [calls])]
        plain["content"] = content if documented else content or None
    return plain


def _call(call: Any, documented: bool) -> dict[str, Any]:
    """A tool call whose arguments are an object, or JSON text where not `documented`."""
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
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _sentinel(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message with SENTINEL in place of its words, or of the first function that it calls; and what SENTINEL replaces."""
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


def _normalised(text: str) -> str:
    """The text without blanks, in the form that normalising tokenizers give it."""
    return "".join(unicodedata.normalize("NFKC", text).split())
