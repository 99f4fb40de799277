"""Synthesis: the target writes questions and answers itself, so that no data are needed (Magpie, arXiv 2406.08464).

The chat template's text up to the user's words prompts a question; its text after them ends it. The answer is prompted as `regenerate` does.
`with_decoder` runs our own decoder, shared by the processes of a launch; `with_server` asks a server for both. Rows are what `prepare` and
`regenerate` read.

Candidates are numbered, and written in groups. What is degenerate, a duplicate or an evaluation prompt is dropped and counted. The last row
of a group says how many candidates there were up to there and what became of them; the same command continues after it, and ends with
the same bytes.
"""

import json
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.data.candidate import Candidate
from draftsmith.data.chat import Template, Unusable
from draftsmith.data.question_prompt import NoQuestionPrompt, QuestionTemplate
from draftsmith.data.regenerate import DOWN, check_least, check_omitted, facts_of, given_up, new_text, noise_key
from draftsmith.data.resumable import Output
from draftsmith.data.selection import NAME, PATIENCE, USABLE, Names, Plan, Selection, Summary, resume, too_few
from draftsmith.data.server import Failed, Message, Refused, Server, to_api
from draftsmith.data.shared_decoding import GROUP, Prompts, Report, SharedDecoder, group_size
from draftsmith.data.text_files import short
from draftsmith.inference.decoder import Completion
from draftsmith.inference.progress import Bar
from draftsmith.models.target import Target

__all__ = ["Plan", "Summary", "with_decoder", "with_server"]

MOST_AT_ONCE = 4096  # for a server of many requests
SPARE = 1.25  # candidates for each row that is still wanted
STOP_IDS = "stop_token_ids"  # vLLM and SGLang leave special tokens out of the text in which they look for `stop`
PARTS = ("question", "answer")


def with_decoder(plan: Plan, out: Path, target: Target, *, slots: int = 32, kernels: bool = False, show: bool = True) -> Summary:
    """Write with our own decoder.

    In a launch the first process calls this, and the others `SharedDecoder.help`. The noise of a text is keyed by (id, its number in the conversation, question or answer) and the seed. A group of conversations is appended
    at once: a run that is stopped loses at most one.

    Args:
        plan: what to write.
        out: the JSONL file.
        target: the model that writes.
        slots: sequences that a process decodes at once.
        kernels: as for `regenerate.with_decoder`.
        show: show a progress bar.

    Raises:
        ValueError: a chat template that prompts no question, an output of another plan or target, sizes below one, or a target almost all of
            whose conversations are dropped.
        OSError: the output cannot be written; its content stays.
    """
    with SharedDecoder(target, slots=slots, kernels=kernels) as decoder:
        check_least(slots=slots)
        template = _check_template(plan, target.require_tokenizer())
        for opening in plan.openings:
            size = len(template.encode(Candidate("", opening, 1, template).ask()))
            if size + 1 >= target.max_positions:
                raise ValueError(f"opening {short(opening.text)}: {size} tokens; expected fewer than {target.max_positions}; shorten it")
        writer = _InProcess(decoder, template, plan)
        return _write(plan, out, facts_of(target, kernels), template, writer.write, group_size(kernels), show)


def with_server(
    plan: Plan,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    base_url: str,
    model: str,
    *,
    concurrency: int = 16,
    timeout: float = 120.0,
    retries: int = 5,
    omit: Collection[str] = (),
    show: bool = True,
) -> Summary:
    """Write with the server at base_url (…/v1): POST completions for questions, chat/completions for answers.

    Args:
        plan, out, show: as for `with_decoder`.
        tokenizer: the target's, for its chat template.
        base_url, model, concurrency, timeout, retries, omit: as for `regenerate.with_server`; stop_token_ids may be left out too.

    Raises:
        ValueError: as `with_decoder`; a request that the server refuses, in its own words; a server that no longer answers.
        OSError: the output cannot be written; its content stays.
    """
    check_least(concurrency=concurrency)
    for settings in plan.parts:
        check_omitted([name for name in omit if name != STOP_IDS], settings)
    template = _check_template(plan, tokenizer)
    server = Server(base_url, timeout, retries)
    facts: dict[str, Any] = {"by": server.name, "model": model} | ({"omit": sorted(omit)} if omit else {})
    writer = _AtServer(server, model, template, plan, concurrency, omit)
    return _write(plan, out, facts, template, writer.write, min(max(GROUP, 4 * concurrency), MOST_AT_ONCE), show)


class _InProcess:
    """Writes candidates with our own decoder."""

    def __init__(self, decoder: SharedDecoder, template: QuestionTemplate, plan: Plan) -> None:
        self.decoder, self.target, self.template, self.plan = decoder, decoder.target, template, plan
        self.answers = Template(template.tokenizer)

    def write(self, candidates: list[Candidate], report: Report) -> None:
        for _ in range(self.plan.turns):
            self._questions([candidate for candidate in candidates if not candidate.ended], report)
            self._answers([candidate for candidate in candidates if not candidate.ended], report)

    def _questions(self, candidates: list[Candidate], report: Report) -> None:
        prompted = self._prompted(candidates, lambda candidate: self.template.encode(candidate.ask()))
        stops = self.target.stop_ids | {end for candidate, _ in prompted if (end := candidate.prompt.end_id) is not None}
        completions = self._decode(prompted, 0, stops, lambda tokens, _: report(tokens, 0))
        for (candidate, ids), new in zip(prompted, completions, strict=True):
            candidate.add_question(new_text(self.template.tokenizer, ids, new.tokens, new.reason), new.reason)

    def _answers(self, candidates: list[Candidate], report: Report) -> None:
        prompted = self._prompted(candidates, lambda candidate: self.answers.prompt(candidate.messages))
        for (candidate, _), new in zip(prompted, self._decode(prompted, 1, self.target.stop_ids, report), strict=True):
            content = new_text(self.template.tokenizer, [], new.tokens, new.reason)
            candidate.add_answer({"content": content}, "stop" if new.reason == "stop" else "length")

    def _prompted(self, candidates: list[Candidate], prompt: Callable[[Candidate], list[int]]) -> list[tuple[Candidate, list[int]]]:
        """The candidates that can be prompted, with their prompts."""
        prompted = []
        for candidate in candidates:
            try:
                ids = prompt(candidate)
            except (NoQuestionPrompt, Unusable) as error:
                candidate.stop(error.reason)
                continue
            if len(ids) + 1 >= self.target.max_positions:
                candidate.stop("no positions left")
            else:
                prompted.append((candidate, ids))
        return prompted

    def _decode(self, prompted: list[tuple[Candidate, list[int]]], part: int, stops: frozenset[int], report: Report) -> list[Completion]:
        """part: 0 for questions, 1 for answers."""
        settings = self.plan.parts[part]
        keys = [noise_key(candidate.id, candidate.turn, PARTS[part]) for candidate, _ in prompted]
        work = Prompts([ids for _, ids in prompted], keys, settings.sampling(), settings.max_new_tokens, stops)
        completions = self.decoder.completions(work, report)
        for (candidate, _), completion in zip(prompted, completions, strict=True):
            candidate.new_tokens.append(len(completion.tokens))
        return completions


class _AtServer:
    """Lets a server write candidates."""

    def __init__(self, server: Server, model: str, template: QuestionTemplate, plan: Plan, concurrency: int, omit: Collection[str]) -> None:
        self.server, self.model, self.template, self.plan = server, model, template, plan
        self.concurrency, self.omit = concurrency, omit
        self.failures = 0  # in a row

    def write(self, candidates: list[Candidate], report: Report) -> None:
        async def complete(candidate: Candidate) -> None:
            try:
                while not candidate.ended:
                    await self._question(candidate, report)
                    if not candidate.ended:
                        await self._answer(candidate, report)
                self.failures = 0
            except (NoQuestionPrompt, Unusable) as error:
                candidate.stop(error.reason)
            except Refused:
                candidate.stop("refused by the server")
            except Failed as error:
                candidate.stop("failed at the server")
                self.failures += 1
                if self.failures == DOWN:
                    raise given_up(self.server, error) from None

        self.server.each(candidates, complete, self.concurrency)

    async def _question(self, candidate: Candidate, report: Report) -> None:
        prompt = self.template.for_server(candidate.ask())
        request = self._request(candidate, 0) | {"prompt": prompt, "stop": [candidate.prompt.end]}
        if candidate.prompt.end_id is not None and STOP_IDS not in self.omit:
            request[STOP_IDS] = [candidate.prompt.end_id]
        message, reason = await self.server.post("completions", json.dumps(request))
        self._count(candidate, message, 0, report)
        candidate.add_question(message["content"], reason)

    async def _answer(self, candidate: Candidate, report: Report) -> None:
        request = self._request(candidate, 1) | {"messages": [to_api(message) for message in candidate.messages]}
        message, reason = await self.server.post("chat/completions", json.dumps(request))
        self._count(candidate, message, 1, report)
        candidate.add_answer(message, reason)

    def _request(self, candidate: Candidate, part: int) -> dict[str, Any]:
        fields = self.plan.parts[part].request(self.model, candidate.id, candidate.turn, PARTS[part])
        return {name: value for name, value in fields.items() if name not in self.omit}

    def _count(self, candidate: Candidate, message: Message, part: int, report: Report) -> None:
        tokens = sum(len(self.template.encode(text)) for text in message.values())
        candidate.new_tokens.append(tokens)
        report(tokens, part)


def _write(
    plan: Plan,
    out: Path,
    facts: dict[str, Any],
    template: QuestionTemplate,
    write: Callable[[list[Candidate], Report], None],
    group: int,
    show: bool,
) -> Summary:
    """Let `write` complete groups of candidates until the file has its rows."""
    selection = Selection(plan)
    with Output(out, facts | plan.facts(), Names()) as output:
        summary = resume(output, plan, selection)
        began, first = time.perf_counter(), summary.rows
        with Bar("synthesising", plan.conversations, first, show) as bar:
            while summary.rows < plan.conversations:
                if summary.candidates >= PATIENCE + USABLE * summary.rows:
                    raise ValueError(too_few(summary))
                wanted = plan.conversations - summary.rows
                size = min(group, math.ceil(SPARE * wanted) + 1)
                numbers = range(summary.candidates, summary.candidates + size)
                candidates = [Candidate(NAME.format(number), plan.opening(number), plan.turns, template) for number in numbers]
                ended = 0

                def report(tokens: int, more: int) -> None:
                    nonlocal ended
                    ended += more
                    summary.tokens, summary.seconds = summary.tokens + tokens, time.perf_counter() - began
                    rate = f"{summary.tokens / summary.seconds:.0f} tokens/s, {summary.dropped.total()} dropped"
                    bar.update(min(summary.rows + ended // plan.turns, plan.conversations - 1), rate)

                write(candidates, report)
                selection.append(candidates, summary, output)
            bar.update(summary.rows)
        summary.new = summary.rows - first
        return summary


def _check_template(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> QuestionTemplate:
    """The template. Raises ValueError if it takes no question, no answer, or a system prompt of the openings not."""
    template = QuestionTemplate(tokenizer)
    for opening in plan.openings:
        try:
            written = template.after([{"role": "system", "content": opening.system}] if opening.system else [])
        except NoQuestionPrompt as error:
            raise ValueError(f"opening with system prompt {short(opening.system)}: {error.reason}; leave `system` out") from None
        if opening.system and opening.system.split()[0] not in written.before:
            raise ValueError(f"opening with system prompt {short(opening.system)}: the template does not write it; leave `system` out")
    Template(tokenizer).prompt([{"role": "user", "content": "Who?"}])
    return template
