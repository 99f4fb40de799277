"""Regeneration: the target's own answers in place of a data set's, since a drafter learns the text that it is trained on.

`with_decoder` runs our own decoder, shared by the processes of a launch; `with_server` calls any server with OpenAI's API (vLLM, SGLang, TGI). Both
write JSONL, one row per conversation, and continue where an earlier run of the same command stopped, however it was stopped.

System, user and tool turns stay. Every assistant turn is regenerated, in order, after the new answers before it; an assistant turn with
tool_calls stays too, since the tool turns after it refer to it. A conversation that ends with another role gets an answer after it; one
without assistant turns gets an answer after each user turn. A text is continued. So is a row with both text and messages if the target
has no chat template.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import Template, Unusable
from draftsmith.data.conversation_state import ConversationState, given_hash
from draftsmith.data.conversations import Conversation
from draftsmith.data.resumable import INSTEAD, OURS, Output
from draftsmith.data.server import Failed, Refused, Server, to_api
from draftsmith.data.shared_decoding import Prompts, Report, SharedDecoder, group_size
from draftsmith.inference.drafter import Drafter
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.terminal import printable
from draftsmith.models.target import Target

__all__ = [
    "Settings",
    "Summary",
    "check_least",
    "check_omitted",
    "facts_of",
    "new_text",
    "noise_key",
    "with_decoder",
    "with_server",
]

DOWN = 20  # conversations that failed in a row: the server is gone
LISTED = 20  # ids in a report
OMITTED = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")  # fields that some servers do not know
CHARACTERS = 4  # per token, where there is no tokenizer


@dataclass(frozen=True, slots=True)
class Settings:
    """How answers are drawn. Every row of the output records all settings.

    Attributes:
        temperature, top_k, top_p, min_p, repetition_penalty, seed: as in `Sampling`.
        max_new_tokens: of one answer.
        prompt_tokens: tokens of a text that serve as its prompt, if the row has no prompt.

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
        check_least(max_new_tokens=self.max_new_tokens, prompt_tokens=self.prompt_tokens)

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.repetition_penalty)

    def request(self, model: str, *key: str | int) -> dict[str, Any]:
        """The fields of a request to a server; `key` names the answer, for its seed."""
        fields: dict[str, Any] = {"model": model, "max_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p}
        fields |= {"top_k": self.top_k or -1, "min_p": self.min_p, "repetition_penalty": self.repetition_penalty}
        if self.temperature:
            fields["seed"] = noise_key(*key, self.seed) >> 1  # 31 bits: some servers take no more
        return fields


@dataclass(slots=True)
class Summary:
    """What a run did.

    Attributes:
        rows: rows in the file.
        new: rows that this run wrote.
        cut: answers of the new rows that reached a limit.
        skipped: reason by id, for conversations that can have no row.
        shortened: reason by id, for conversations without their later turns, which did not fit.
        failed: reason by id, for conversations that the same command tries again.
    """

    rows: int = 0
    new: int = 0
    cut: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    shortened: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """Exit status of the command."""
        return 1 if self.failed else 0

    def write(self, states: "list[ConversationState]", output: Output) -> None:
        """Write the rows of these conversations, and count them. A conversation without an answer has no row."""
        rows = [state.row(output.facts) for state in states if state.reasons]
        output.append(rows)
        self.rows, self.new = len(output.rows), self.new + len(rows)
        for state in states:
            self.cut += state.reasons.count("length")
            if state.stopped:
                reasons = self.shortened if state.reasons else self.skipped
                reasons[state.source.id] = state.stopped

    def report(self) -> str:
        lines = [f"{self.rows} rows, {self.new} of them new; {self.cut} new answers cut at a limit"]
        for word, reasons in (("skipped", self.skipped), ("shortened", self.shortened), ("failed", self.failed)):
            if reasons:
                advice = "; the same command tries them again" if word == "failed" else ""
                lines.append(f"{len(reasons)} conversations {word}{advice}")
                lines += [printable(f"  {name}: {reason}", "") for name, reason in list(reasons.items())[:LISTED]]
            if len(reasons) > LISTED:
                lines.append(f"  and {len(reasons) - LISTED} more")
        return "\n".join(lines)


def with_decoder(
    conversations: Iterable[Conversation],
    out: Path,
    target: Target,
    settings: Settings,
    *,
    drafter: Drafter | None = None,
    slots: int = 32,
    group: int | None = None,
    kernels: bool = False,
    show: bool = True,
) -> Summary:
    """Answer with our own decoder. In a launch the first process calls this, and the others `SharedDecoder.help`. Rows of the output are in the
    order of their ids, as strings.

    A group of conversations is appended at once: a run that is stopped loses at most one group, and its file is byte for byte that of a run
    that was not stopped. The noise of an answer is keyed by (id, its number in the conversation) and the seed. The draft length is not
    adaptive: that depends on the clock, and with the trees the rounding would change. A prompt that leaves no position for an answer
    is skipped without a row; as a later turn it ends the conversation.

    Args:
        conversations: what to answer.
        out: the JSONL file.
        target: the model that answers.
        settings: how answers are drawn.
        drafter: None decodes plainly; the output is the same.
        slots: sequences that a process decodes at once.
        group: conversations that are appended at once; None: 128, with kernels 1,024, times the number of processes.
        kernels: decode with the Triton kernels, and with CUDA graphs where that is possible; the rounding is another.
        show: show a progress bar.

    Raises:
        ValueError: ids that occur twice, an output of other settings, another target or other conversations, or sizes below one.
        OSError: the output cannot be written; its content stays.
    """
    with SharedDecoder(target, drafter, slots=slots, kernels=kernels) as decoder:
        group = group_size(kernels) if group is None else group
        check_least(slots=slots, group=group)
        if drafter is not None and getattr(drafter, "remembers", False):
            name = getattr(drafter, "method", "look-up")
            raise ValueError(f"got a {name} drafter that remembers earlier requests; expected none, so that no row depends on others")
        text = _Text(decoder, settings)
        sources = text.usable(sorted(_unique(conversations), key=lambda source: source.id))
        facts = {**facts_of(target, kernels), **asdict(settings)}
        with Output(out, facts, {source.id: given_hash(source) for source in sources}) as output:
            return _answer_groups(sources, group, text, output, show)


def _answer_groups(sources: list[Conversation], group: int, text: "_Text", output: Output, show: bool) -> Summary:
    summary, first = _resume(output, sources, group, text)
    answers = [ConversationState(source).pending.count(None) for source in sources]
    done, total = sum(answers[:first]), sum(answers)
    with Bar("regenerating", total, done, show) as bar:
        for start in range(first, len(sources), group):
            states = [ConversationState(source) for source in sources[start : start + group]]
            finished = done

            def report(_tokens: int, more: int) -> None:
                nonlocal finished
                finished += more
                bar.update(min(finished, total - 1))  # the last answer counts once it is written

            text.answer(states, report)
            summary.write(states, output)
            done += sum(answers[start : start + group])
            bar.update(done)
    return summary


@contextmanager
def _ending(state: ConversationState) -> Iterator[None]:
    try:
        yield
    except Unusable as error:
        state.stop(error.reason)
    except Refused as error:
        state.stop(str(error))
    except UnicodeEncodeError:
        state.stop("it is not valid Unicode (half of a surrogate pair)")


class _Text:
    """Prompts as the target's tokens, and its answers as text."""

    def __init__(self, decoder: SharedDecoder, settings: Settings) -> None:
        self.decoder, self.target, self.settings = decoder, decoder.target, settings
        self.tokenizer = self.target.require_tokenizer()

    def usable(self, sources: list[Conversation]) -> list[Conversation]:
        """The conversations as this target can answer them. Raises ValueError for messages without a chat template."""
        if self.tokenizer.chat_template:
            return sources
        texts = [replace(source, messages=None) if source.text else source for source in sources]
        without_text = [source.id for source in texts if source.messages is not None]
        if without_text:
            raise ValueError(
                f"{without_text[0]!r} has messages, target {self.target.name!r} no chat template; expected texts; give rows with `text`"
            )
        return texts

    @cached_property
    def template(self) -> Template:
        return Template(self.tokenizer)

    def prompt(self, state: ConversationState) -> list[int]:
        """Token ids that prompt the next answer. Raises Unusable or UnicodeEncodeError if it cannot be prompted."""
        source, positions = state.source, self.target.max_positions
        if source.messages is None:
            source.text.encode()
            state.prompt = source.text[: source.prompt] or self._head(source.text)
            ids = self.tokenizer.encode(state.prompt, verbose=False) if state.prompt else []
        else:
            ids = self.template.prompt(state.messages, source.tools)
        if not 0 < len(ids) < positions:
            raise Unusable(
                f"{len(ids)} tokens before answer {len(state.reasons) + 1}; expected 1 to {positions - 1}, as the target has positions"
            )
        return ids

    def _head(self, text: str) -> str:
        """The first `prompt_tokens` tokens of a text, up to the end of a character."""
        count = self.settings.prompt_tokens
        ids = self.tokenizer.encode(text[: 40 * count], add_special_tokens=False, verbose=False)[:count]
        return text[: len(_decode(self.tokenizer, ids))]

    def answer(self, states: list[ConversationState], report: Report) -> None:
        """Answer a group, all first turns together, then all second turns."""
        settings = self.settings
        while any(state.pending for state in states):
            prompted: list[tuple[ConversationState, list[int]]] = []
            for state in [state for state in states if state.pending]:
                with _ending(state):
                    prompted.append((state, self.prompt(state)))
            keys = [noise_key(state.source.id, len(state.reasons)) for state, _ in prompted]
            prompts = Prompts([ids for _, ids in prompted], keys, settings.sampling(), settings.max_new_tokens, self.target.stop_ids)
            for (state, ids), completion in zip(prompted, self.decoder.completions(prompts, report), strict=True):
                before = ids if state.source.messages is None else []
                content = new_text(self.tokenizer, before, completion.tokens, completion.reason)
                state.add_answer({"content": content}, "stop" if completion.reason == "stop" else "length")


def new_text(tokenizer: PreTrainedTokenizerBase, before: list[int], new: list[int], reason: str) -> str:
    """Text of new tokens without the stop token.

    before: the prompt, if a text is continued; some tokenizers drop the space at the beginning of a text.
    """
    text = _decode(tokenizer, before + (new[:-1] if reason == "stop" else new))[len(_decode(tokenizer, before)) :]
    return text if reason == "stop" else text.rstrip("\ufffd")  # half of a character, cut by the limit


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    # Special tokens of reasoning and of tools are part of an answer.
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _resume(output: Output, sources: list[Conversation], group: int, text: _Text) -> tuple[Summary, int]:
    """The work of earlier runs, and the index of the first conversation to answer. Rows of an incomplete group are dropped."""
    index_of = {source.id: index for index, source in enumerate(sources)}
    rows = [index_of[name] for name in output.rows]
    if rows != sorted(rows):
        raise ValueError(f"{output.path}: its rows are not in the order of their ids; {INSTEAD}")
    start, skipped = rows[-1] // group * group if rows else 0, dict[str, str]()
    end = min(start + group, len(sources)) if rows else 0
    for index in sorted(set(range(end)).difference(rows)):
        state = ConversationState(sources[index])
        with _ending(state):
            if state.pending:
                text.prompt(state)
        if state.stopped:
            skipped[state.source.id] = state.stopped
        elif index >= start:
            output.cut(sum(row < start for row in rows))
            end = start
            break
        else:
            raise ValueError(f"{output.path}: the row of {state.source.id!r} is gone, later ones are there; {INSTEAD}")
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
    omit: Collection[str] = (),
    show: bool = True,
) -> Summary:
    """Answer with the server at base_url (…/v1): POST chat/completions, and completions for texts.

    Rows are appended as they arrive. All settings are sent, since servers otherwise take the model's own. Tools are sent with tool_choice
    "none", so that a call comes as text. A text without a prompt is cut by characters, 4 per token.

    Args:
        conversations, out, settings, show: as for `with_decoder`.
        base_url: address of the API.
        model: the server's name of the target.
        concurrency: requests under way, at most.
        timeout: seconds of one request, at most.
        retries: how often a request is repeated, with longer waits each time (429, 5xx, no or broken answers; Retry-After is honoured).
        omit: fields that this server refuses (TGI: top_p at 1).

    Raises:
        ValueError: as `with_decoder`; a request that the server refuses, in its own words; a server that no longer answers.
        OSError: the output cannot be written; its content stays.
    """
    check_least(concurrency=concurrency)
    check_omitted(omit, settings)
    sources = _unique(conversations)
    server = Server(base_url, timeout, retries)
    facts: dict[str, Any] = {"by": server.name, "model": model, **asdict(settings)}
    if omit:
        facts["omit"] = sorted(omit)
    with Output(out, facts, {source.id: given_hash(source) for source in sources}) as output:
        summary, in_a_row = Summary(len(output.rows)), 0
        states = [ConversationState(source) for source in sources if source.id not in output.rows]
        with Bar("regenerating", len(sources), summary.rows, show) as bar:

            async def answer(state: ConversationState) -> None:
                nonlocal in_a_row
                try:
                    while state.pending:
                        with _ending(state):
                            state.add_answer(*await server.post(*_request(state, model, settings, omit)))
                    summary.write([state], output)
                    in_a_row = 0
                except Failed as error:
                    summary.failed[state.source.id] = str(error)
                    in_a_row += 1
                    if in_a_row == DOWN:
                        raise given_up(server, error) from None
                done = summary.rows + len(summary.skipped) + len(summary.failed)
                bar.update(done, f"{len(summary.failed)} failed" if summary.failed else "")

            server.each(states, answer, concurrency)
        return summary


def given_up(server: Server, error: Failed) -> ValueError:
    """The error that ends a run after DOWN failures in a row."""
    return ValueError(
        f"{server.name}: {DOWN} conversations failed one after the other, the last with: {error}; see to the server, "
        "and run the same command again"
    )


def _request(state: ConversationState, model: str, how: Settings, omit: Collection[str]) -> tuple[str, str]:
    """Path and body of the request for the next answer."""
    source = state.source
    request = how.request(model, source.id, len(state.reasons))
    if source.messages is None:
        limit = CHARACTERS * how.prompt_tokens
        beginning = source.text
        if len(source.text) > limit:
            beginning = re.sub(r"(?<=\S)\s+\S*$", "", source.text[:limit])  # to the end of a word
        state.prompt = source.text[: source.prompt] or beginning
        if not state.prompt:
            raise Unusable("no text in it")
        path, request["prompt"] = "completions", state.prompt
    else:
        path, request["messages"] = "chat/completions", [to_api(message) for message in state.messages]
        if source.tools:
            request |= {"tools": source.tools, "tool_choice": "none"}
    return path, json.dumps({name: value for name, value in request.items() if name not in omit})


def facts_of(target: Target, kernels: bool) -> dict[str, Any]:
    """What a row says of the target that wrote it in this process, and whether with kernels, which round in their own way."""
    facts = {"revision": target.revision, "weights": target.identity.weights_hash, "kernels": kernels}
    known = {name: value for name, value in facts.items() if value}
    return {"by": OURS, "target": target.name, **known, "dtype": str(target.dtype).removeprefix("torch.")}


def check_omitted(omit: Collection[str], settings: Settings) -> None:
    """Raises ValueError for fields that may not be left out of a request: without them, the server would take a value of its own."""
    for name in omit:
        if name not in OMITTED or getattr(settings, name) != getattr(Settings(), name):
            raise ValueError(f"got omit {name}; expected one of {', '.join(OMITTED)}, and that at its default; leave it in, or set it back")


def _unique(conversations: Iterable[Conversation]) -> list[Conversation]:
    sources, seen = list(conversations), dict[str, int]()
    if not sources:
        raise ValueError("got no conversations; expected at least one; give another source")
    for number, source in enumerate(sources, 1):
        first = seen.setdefault(source.id, number)
        if first < number:
            raise ValueError(f"rows {first} and {number} both have id {source.id!r}; expected one each; rename one of them")
    return sources


def noise_key(*parts: str | int) -> int:
    """32 bits that name the random numbers of an answer."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:4], "big")


def check_least(**sizes: int) -> None:
    """Raises ValueError for a size below one."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"got {name} {value}; expected at least 1; raise it")
