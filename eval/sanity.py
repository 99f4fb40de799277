"""What makes a measurement say more than it should: answers that repeat themselves, and prompts to which the chat template was applied before."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.data.prompts import Prompt
from draftsmith.eval.records import Records, RequestRecord, distinct_ngrams
from draftsmith.eval.totals import by_setting, tau, totals
from draftsmith.models.rendering import render

PERIODS, LEAST = 4, 32  # an answer repeats itself where its end is so many equal parts, and at least so many tokens
DISTINCT, LONG = 0.5, 64  # or where fewer of its 8-grams are distinct, and it has at least so many tokens
SHOWN, LONGEST = 5, 60  # ids in a sentence, and characters of each
QUESTION, ANSWER = "Draftsmith's question", "Draftsmith's answer"


@dataclass(frozen=True, slots=True)
class Degenerate:
    """The answers at one setting that repeat themselves. Every drafter predicts them well, and no user wants them.

    Attributes:
        prompts: ids of their prompts.
        answers: how many answers there are at this setting.
        tau: with them.
        without: τ over the others; None where there are no others.
        low: of the interval of `without`, None with too few prompts.
        high: likewise.
    """

    prompts: list[str]
    answers: int
    tau: float
    without: float | None
    low: float | None
    high: float | None


def repeats_itself(request: RequestRecord) -> bool:
    """Whether an answer is degenerate: its end is one part again and again, or most of its 8-grams occurred before."""
    tokens = request.tokens[:-1] if request.reason == "stop" else request.tokens
    return period(tokens) > 0 or (len(tokens) >= LONG and distinct_ngrams([tokens]) < DISTINCT)


def period(tokens: Sequence[int]) -> int:
    """Length of the shortest part of which the last PERIODS parts, and the last LEAST tokens, are repetitions; 0 where there is none."""
    for length in range(1, len(tokens) // PERIODS + 1):
        span = max(LEAST, PERIODS * length)
        if span <= len(tokens) and tokens[len(tokens) - span + length :] == tokens[len(tokens) - span : len(tokens) - length]:
            return length
    return 0


def degenerate(records: Records) -> dict[str, Degenerate]:
    """By setting, where there are degenerate answers."""
    by_label = {}
    for setting, requests in by_setting(records.requests).items():
        counts = totals(requests)
        repeating = [request.prompt for request in requests if repeats_itself(request)]
        others = {prompt: count for prompt, count in counts.items() if prompt not in repeating}
        if repeating:
            without = tau(others) if others else (None, None, None)
            by_label[setting] = Degenerate(repeating, len(requests), tau(counts).estimate, *without)
    return by_label


def marks(tokenizer: Any) -> tuple[list[str], list[str]]:
    """What a chat template writes around messages: special tokens, and words that begin a line, such as `USER:`. None without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return [], []
    conversation = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": QUESTION}]
    for messages in (conversation, conversation[:1]):
        try:
            text, _ = render(tokenizer.get_chat_template(), messages, tokenizer.special_tokens_map, prompt=True)
        except ValueError:  # a template that takes no such conversation
            continue
        special = [token for token in tokenizer.all_special_tokens if token in text]
        around = text.replace(ANSWER, QUESTION).split(QUESTION)
        lines = [part.strip().split("\n")[-1].strip() for part in around]
        roles = [line for line in dict.fromkeys(lines) if len(line) > 2 and not line.replace(" ", "").isalnum()]
        return special, [line for line in roles if not any(token in line for token in special)]
    return [], []


def templated(tokenizer: Any, prompts: Iterable[Prompt]) -> dict[str, str]:
    """By prompt, later turns included, the mark of a chat template in its words.

    A conversation with such a mark gets the template twice. A text is taken as it is, marks included, so there only a beginning-of-text token
    counts that the tokenizer writes again.
    """
    special, roles = marks(tokenizer)
    marked = {}
    for prompt in (turn for first in prompts for turn in (first, *first.later)):
        mark = ""
        for message in prompt.messages:
            text = message["content"]
            mark = mark or next((token for token in special if token in text), "")
            mark = mark or next((role for role in roles if any(line.strip().startswith(role) for line in text.split("\n"))), "")
        bos = getattr(tokenizer, "bos_token", None)
        if not prompt.messages and bos and prompt.text.startswith(bos) and tokenizer.encode("x")[:1] == [tokenizer.bos_token_id]:
            mark = bos
        if mark:
            marked[prompt.id] = mark
    return marked


def lines(records: Records) -> list[str]:
    """Sentences for people; none where nothing is wrong."""
    sentences = []
    for setting, each in degenerate(records).items():
        text = f"T={setting}: {len(each.prompts)} of {each.answers} answers repeat themselves ({shown(each.prompts)}): τ {each.tau:.2f} with them"
        sentences.append(text + (f", {each.without:.2f} without" if each.without is not None else ", and there are no others"))
    marked = {name: prompt.templated for name, prompt in records.prompts.items() if prompt.templated}
    if marked:
        sentences.append(
            f"{len(marked)} prompts have a chat template's {next(iter(marked.values()))!r} in their words, which the template is applied to "
            f"again ({shown(list(marked))}): give them as messages without it"
        )
    logged = [name for name, prompt in records.prompts.items() if prompt.logged]
    if logged:
        sentences.append(f"{len(logged)} prompts come with a log's answer: their positions are along it, not along the target's own answer")
    return sentences


def shown(names: Sequence[str]) -> str:
    """The first few ids."""
    short = (name if len(name) <= LONGEST else f"{name[:LONGEST]}…" for name in names[:SHOWN])
    return ", ".join(short) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
