"""Answers in the target's own words, since a drafter learns the words that it is trained on.

`with_decoder` asks our own decoder, `with_server` any server that speaks OpenAI's protocol (vLLM, SGLang, TGI). Both write JSONL, a row per
conversation, and go on where an earlier run of the same command stopped, however it was stopped.

System, user and tool turns are kept. Every assistant turn is answered anew, in order, after the new answers before it; one with tool_calls
is kept as it is, for the tool turns after it refer to it. A conversation that ends with another turn gets an answer after it, one without
any assistant turn an answer after each user turn. A text is continued, and where the target has no chat template that of a row with both.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.data.chat import Template, Unusable
from draftsmith.data.conversations import Conversation
from draftsmith.data.resumable import INSTEAD, OURS, Output
from draftsmith.data.server import Failed, Message, Refused, Server, wire
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.drafter import Drafter
from draftsmith.inference.lookup import Suffix
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

__all__ = ["Settings", "Summary", "with_decoder", "with_server"]

DOWN = 20  # conversations that failed one after the other: the server is gone
LISTED = 20  # ids in a report
OMITTED = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")  # fields that not every server knows
CHARACTERS = 4  # a token's, where there is no tokenizer


@dataclass(frozen=True, slots=True)
class Settings:
    """How answers are drawn; fields as in Sampling, and max_new_tokens of an answer. prompt_tokens: how much of a text that has no prompt
    of its own is given. All of them stand in every row.

    Raises:
        ValueError: a field outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_new_tokens: int = 1024
    prompt_tokens: int = 64

    def __post_init__(self) -> None:
        self.sampling()
        _check_least(max_new_tokens=self.max_new_tokens, prompt_tokens=self.prompt_tokens)

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.repetition_penalty)


@dataclass(slots=True)
class Summary:
    """rows in the file, `new` of them by this run; `cut`: answers of these that a limit ended. By id, with the reason: skipped (never will
    have a row), shortened (later turns did not fit, and are left out), failed (the same command tries them again)."""

    rows: int = 0
    new: int = 0
    cut: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    shortened: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """What a command exits with."""
        return 1 if self.failed else 0

    def keep(self, talks: "list[_Talk]", output: Output) -> None:
        """Write the rows of these talks, and count them. What has no answer has no row."""
        rows = [talk.row(output.facts) for talk in talks if talk.reasons]
        output.append(rows)
        self.rows, self.new = len(output.rows), self.new + len(rows)
        for talk in talks:
            self.cut += talk.reasons.count("length")
            if talk.stopped:
                (self.shortened if talk.reasons else self.skipped)[talk.source.id] = talk.stopped

    def report(self) -> str:
        lines = [f"{self.rows} rows, {self.new} of them new; {self.cut} new answers cut at a limit"]
        for word, found in (("skipped", self.skipped), ("shortened", self.shortened), ("failed", self.failed)):
            if found:
                lines.append(f"{len(found)} conversations {word}" + "; the same command tries them again" * (word == "failed"))
                lines += [f"  {name}: {reason}" for name, reason in list(found.items())[:LISTED]]
                lines += [f"  and {len(found) - LISTED} more"] * (len(found) > LISTED)
        return "\n".join(lines)


class _Talk:
    """A conversation in work: what was `said`, and what lies `ahead`: given messages, and None where an answer is due."""

    def __init__(self, source: Conversation) -> None:
        self.source = source
        self.said: list[Message] = []
        self.ahead = [None] if source.messages is None else _plan(source.messages)
        self.prompt = ""  # of a text
        self.reasons: list[str] = []
        self.stopped = "" if None in self.ahead else "no turn in it to answer"
        self._answered = 0
        self._move()
        if source.messages and not self.said:
            self.stop("it begins with the assistant")

    def _move(self) -> None:
        while self.ahead and (given := self.ahead[0]) is not None:
            self.said.append(given)
            self.ahead.pop(0)

    def take(self, answer: Message, reason: str) -> None:
        self.said.append({"role": "assistant", **answer} | ({"finish_reason": "length"} if reason == "length" else {}))
        self.reasons.append(reason)
        self._answered = len(self.said)
        self.ahead.pop(0)
        self._move()

    def stop(self, reason: str) -> None:
        """It ends with its last answer; without any it is skipped."""
        self.stopped, self.ahead = reason, []
        del self.said[self._answered :]

    def row(self, facts: dict[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = {"id": self.source.id, "domain": self.source.domain}
        if self.source.messages is None:
            row |= {"prompt": self.prompt, "completion": self.said[0]["content"]}
        else:
            row |= {"messages": self.said} | ({"tools": self.source.tools} if self.source.tools else {})
        return row | {"generation": facts | {"finish_reasons": self.reasons}}


def _plan(messages: list[Message]) -> list[Message | None]:
    if not any(message["role"] == "assistant" for message in messages):
        return [turn for message in messages for turn in ((message, None) if message["role"] == "user" else (message,))]
    kept = [None if message["role"] == "assistant" and not message.get("tool_calls") else message for message in messages]
    return kept if messages[-1]["role"] == "assistant" else [*kept, None]


def with_decoder(
    conversations: Iterable[Conversation],
    out: Path,
    target: Target,
    settings: Settings,
    *,
    drafter: Drafter | None = None,
    rows: int = 8,
    group: int = 64,
    show: bool = True,
) -> Summary:
    """Answer with our own decoder, `rows` at a time; rows of the output are in the order of their ids, as strings.

    Conversations are decoded `group` at a time, and a group is appended as a whole: a run that is stopped loses at most one, and the file
    is byte for byte that of a run that was not. The noise of an answer is keyed by (id, its number in the conversation) and the seed. There
    is no governor: it decides by the clock, and with the trees the rounding would change. A prompt that leaves no position for an answer is
    skipped without a row; as a later turn it ends the conversation.

    Raises:
        ValueError: ids that occur twice, an output of other settings, another target or other conversations, or sizes below one.
        OSError: an output that cannot be written; what it held stays.
    """
    _check_least(rows=rows, group=group)
    if isinstance(drafter, Suffix) and drafter.memory:
        raise ValueError(f"got a suffix drafter with memory {drafter.memory}; expected 0, so that no draft depends on earlier runs; set it")
    sources = sorted(_unique(conversations), key=lambda source: source.id)
    words = _Words(target, settings)
    if not words.tokenizer.chat_template:
        sources = [replace(source, messages=None) if source.text else source for source in sources]
        if told := [source.id for source in sources if source.messages is not None]:
            raise ValueError(f"{told[0]!r} has messages, target {target.name!r} no chat template; expected texts; give rows with `text`")
    revision = {"revision": target.revision} if target.revision else {}
    facts = {"by": OURS, "target": target.name, **revision, "dtype": str(target.dtype).removeprefix("torch."), **asdict(settings)}
    with Output(out, facts, {source.id for source in sources}) as output:
        summary, first = _resume(output, sources, group, words)
        answers = [_Talk(source).ahead.count(None) for source in sources]
        done = sum(answers[:first])
        with Bar("regenerating", total := sum(answers), done, show) as bar:
            for start in range(first, len(sources), group):
                talks = [_Talk(source) for source in sources[start : start + group]]
                # A new decoder: a cache that an earlier group made larger would change the rounding.
                for finished in words.answer(Decoder(target, drafter, slots=rows), talks):
                    bar.update(min(done + finished, total - 1))  # the last one when it is written
                summary.keep(talks, output)
                done += sum(answers[start : start + group])
                bar.update(done)
        return summary


@contextmanager
def _ending(talk: _Talk) -> Iterator[None]:
    try:
        yield
    except Unusable as error:
        talk.stop(error.reason)
    except Refused as error:
        talk.stop(str(error))
    except UnicodeEncodeError:
        talk.stop("it is not valid Unicode (half of a surrogate pair)")


class _Words:
    """The target's tokens for what is asked, and the text of what it answers."""

    def __init__(self, target: Target, settings: Settings) -> None:
        if target.tokenizer is None:
            raise ValueError(f"target {target.name!r} has no tokenizer beside its weights; copy tokenizer.json there")
        self.target, self.tokenizer, self.settings = target, target.tokenizer, settings

    @cached_property
    def template(self) -> Template:
        return Template(self.tokenizer)

    def prompt(self, talk: _Talk) -> list[int]:
        """Token ids that ask for a talk's next answer; raises Unusable or UnicodeEncodeError for what cannot be asked."""
        source, most = talk.source, self.target.max_positions
        if source.messages is None:
            source.text.encode()
            talk.prompt = source.text[: source.prompt] or self._head(source.text)
            ids = self.tokenizer.encode(talk.prompt, verbose=False) if talk.prompt else []
        else:
            ids = self.template.prompt(talk.said, source.tools)
        if not 0 < len(ids) < most:
            raise Unusable(
                f"{len(ids)} tokens before answer {len(talk.reasons) + 1}; expected 1 to {most - 1}, as the target has positions"
            )
        return ids

    def _head(self, text: str) -> str:
        """The first tokens of a text, to the end of a character."""
        most = self.settings.prompt_tokens
        ids = self.tokenizer.encode(text[: 40 * most], add_special_tokens=False, verbose=False)[:most]
        return text[: len(self._decode(ids))]

    def _decode(self, ids: list[int]) -> str:
        # Special tokens of reasoning and of tools are part of an answer.
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text(self, before: list[int], new: list[int], reason: str) -> str:
        """Of new tokens, without the stop token. before: of a text that goes on; some tokenizers drop the space that a text begins with."""
        text = self._decode(before + (new[:-1] if reason == "stop" else new))[len(self._decode(before)) :]
        return text if reason == "stop" else text.rstrip("\ufffd")  # half of a character that the limit cut

    def answer(self, decoder: Decoder, talks: list[_Talk]) -> Iterator[int]:
        """Answer a group, all first turns together, then all second ones; yields how many answers there are so far."""
        finished = 0
        while any(talk.ahead for talk in talks):
            asked: list[tuple[_Talk, list[int]]] = []
            for talk in [talk for talk in talks if talk.ahead]:
                with _ending(talk):
                    asked.append((talk, self.prompt(talk)))
            prompts, keys = [ids for _, ids in asked], [_hash(talk.source.id, len(talk.reasons)) for talk, _ in asked]
            done = [Completion() for _ in asked]
            for steps in decoder.stream(prompts, self.settings.sampling(), self.settings.max_new_tokens, requests=keys):
                for step in steps:
                    done[step.prompt_index].tokens += step.tokens
                    done[step.prompt_index].reason = step.reason
                    finished += step.finished
                yield finished
            for (talk, ids), one in zip(asked, done, strict=True):
                before = ids if talk.source.messages is None else []
                talk.take({"content": self.text(before, one.tokens, one.reason)}, "stop" if one.reason == "stop" else "length")


def _resume(output: Output, sources: list[Conversation], group: int, words: _Words) -> tuple[Summary, int]:
    """What there is, and the index of the first conversation to answer; of a group that is not whole the rows are dropped."""
    place = {source.id: index for index, source in enumerate(sources)}
    rows = [place[name] for name in output.rows]
    if rows != sorted(rows):
        raise ValueError(f"{output.path}: its rows are not in the order of their ids; {INSTEAD}")
    start, skipped = rows[-1] // group * group if rows else 0, dict[str, str]()
    end = min(start + group, len(sources)) if rows else 0
    for index in sorted(set(range(end)).difference(rows)):
        talk = _Talk(sources[index])
        with _ending(talk):
            if talk.ahead:
                words.prompt(talk)
        if talk.stopped:
            skipped[talk.source.id] = talk.stopped
        elif index >= start:
            output.cut(sum(row < start for row in rows))
            end = start
            break
        else:
            raise ValueError(f"{output.path}: the row of {talk.source.id!r} is gone, later ones are there; {INSTEAD}")
    return Summary(len(output.rows), skipped=skipped), end


def with_server(
    conversations: Iterable[Conversation],
    out: Path,
    base_url: str,
    model: str,
    settings: Settings,
    *,
    concurrency: int = 16,
    timeout: float = 120.0,
    retries: int = 5,
    api_key_env: str = "OPENAI_API_KEY",
    omit: Collection[str] = (),
    show: bool = True,
) -> Summary:
    """Answer with the server at base_url (…/v1): POST chat/completions, and completions for texts.

    At most `concurrency` requests at a time, each of `timeout` seconds at most, tried again up to `retries` times with growing waits (429,
    5xx, no or broken answers; Retry-After is honoured). Rows are appended as they come. The key is read from the environment. All settings
    are sent, for servers fill in the model's own otherwise; `omit` names fields that this one refuses (TGI: top_p at 1). tools are sent
    with tool_choice "none", so that a call comes as text. A text without a prompt of its own is cut by characters, 4 a token.

    Raises:
        ValueError: as `with_decoder`; a request that the server refuses, in its own words; a server that answers nothing any more.
        OSError: an output that cannot be written; what it held stays.
    """
    _check_least(concurrency=concurrency)
    for name in omit:
        if name not in OMITTED or getattr(settings, name) != getattr(Settings(), name):
            raise ValueError(f"got omit {name}; expected one of {', '.join(OMITTED)}, and that at its default; leave it in, or set it back")
    sources = _unique(conversations)
    server = Server(base_url, timeout, retries, os.environ.get(api_key_env, "").strip())
    if not (server.key.isascii() and server.key.isprintable()):
        raise ValueError(f"the key in ${api_key_env} has characters that no HTTP header may hold; set it again")
    facts = {"by": server.place, "model": model, **asdict(settings)} | ({"omit": sorted(omit)} if omit else {})
    with Output(out, facts, {source.id for source in sources}) as output:
        summary, in_a_row = Summary(len(output.rows)), 0
        talks = [_Talk(source) for source in sources if source.id not in output.rows]
        with Bar("regenerating", len(sources), summary.rows, show) as bar:

            async def answer(talk: _Talk) -> None:
                nonlocal in_a_row
                try:
                    while talk.ahead:
                        with _ending(talk):
                            talk.take(*await server.post(*_request(talk, model, settings, omit)))
                    summary.keep([talk], output)
                    in_a_row = 0
                except Failed as error:
                    summary.failed[talk.source.id] = str(error)
                    in_a_row += 1
                    if in_a_row == DOWN:
                        told = f"{server.place}: {DOWN} conversations failed one after the other, the last with: {error}"
                        raise ValueError(f"{told}; see to the server, and run the same command again") from None
                done = summary.rows + len(summary.skipped) + len(summary.failed)
                bar.update(done, f"{len(summary.failed)} failed" if summary.failed else "")

            server.each(talks, answer, concurrency)
        return summary


def _request(talk: _Talk, model: str, how: Settings, omit: Collection[str]) -> tuple[str, str]:
    """Path and body of the request for a talk's next answer."""
    source = talk.source
    asked: dict[str, Any] = {"model": model, "max_tokens": how.max_new_tokens, "temperature": how.temperature, "top_p": how.top_p}
    asked |= {"top_k": how.top_k or -1, "min_p": how.min_p, "repetition_penalty": how.repetition_penalty}
    if how.temperature:
        asked["seed"] = _hash(source.id, len(talk.reasons), how.seed) >> 1  # 31 bits: some servers take no more
    if source.messages is None:
        most = CHARACTERS * how.prompt_tokens
        whole = len(source.text) <= most
        talk.prompt = source.text[: source.prompt] or (source.text if whole else re.sub(r"(?<=\S)\s+\S*$", "", source.text[:most]))
        if not talk.prompt:
            raise Unusable("no text in it")
        path, asked["prompt"] = "completions", talk.prompt
    else:
        path, asked["messages"] = "chat/completions", [wire(message) for message in talk.said]
        asked |= {"tools": source.tools, "tool_choice": "none"} if source.tools else {}
    return path, json.dumps({name: value for name, value in asked.items() if name not in omit})


def _unique(conversations: Iterable[Conversation]) -> list[Conversation]:
    sources, seen = list(conversations), dict[str, int]()
    if not sources:
        raise ValueError("got no conversations; expected at least one; give another source")
    for number, source in enumerate(sources, 1):
        if (first := seen.setdefault(source.id, number)) < number:
            raise ValueError(f"rows {first} and {number} both have id {source.id!r}; expected one each; rename one of them")
    return sources


def _hash(*parts: str | int) -> int:
    """32 bits."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:4], "big")


def _check_least(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"got {name} {value}; expected at least 1; raise it")
