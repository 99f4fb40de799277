"""A conversation that the target writes alone, question by question and answer by answer, and what makes it unusable."""

import re
from typing import Any

from draftsmith.data.loops import repeats
from draftsmith.data.openings import Opening
from draftsmith.data.question_prompt import QuestionPrompt, QuestionTemplate
from draftsmith.data.server import Message

SHORTEST = 8  # characters of a question
# A line that is a role alone, perhaps as a heading or between marks of a template, or one that a role begins. In JSON, XML, lists, tables and where
# YAML is indented, a role is a word like others; "system" is one in headings too.
HEADER = re.compile(
    r"^(?:[#*]+ *|<\||\[)?(?:user|assistant|human)(?:\|>|\])?[*: ]*$|^(?:<\||\[)?system(?:\|>|\])?:?$|^(?:user|assistant|human) *:",
    re.IGNORECASE | re.MULTILINE,
)


class Candidate:
    """A conversation that is being written.

    Attributes:
        id: names it, and the random numbers of its texts.
        opening: how it begins.
        messages: the turns so far.
        prompt: what prompts the question, and ends it.
        finish_reasons: "stop" or "length" of each answer.
        new_tokens: tokens that the target wrote for each question and answer.
        fault: why it ended early; "" if it did not. Without an answer it has no row.
    """

    def __init__(self, name: str, opening: Opening, turns: int, template: QuestionTemplate) -> None:
        self.id, self.opening, self._turns, self._template = name, opening, turns, template
        self.messages: list[Message] = [{"role": "system", "content": opening.system}] if opening.system else []
        self.prompt: QuestionPrompt = template.prompt
        self.finish_reasons: list[str] = []
        self.new_tokens: list[int] = []
        self.fault = ""

    @property
    def turn(self) -> int:
        """The number of the question or answer to come."""
        return len(self.finish_reasons)

    @property
    def ended(self) -> bool:
        return bool(self.fault) or self.turn == self._turns

    def ask(self) -> str:
        """The text that prompts the next question, the opening included. Raises NoQuestionPrompt if the template has none here."""
        self.prompt = self._template.after(self.messages)
        return self.prompt.before + self._opening()

    def _opening(self) -> str:
        return "" if self.turn else self.opening.text

    def add_question(self, text: str, reason: str) -> None:
        """text: what the target wrote after the prompt."""
        if self.prompt.end_id is None and self.prompt.end in text:
            text, reason = text.partition(self.prompt.end)[0], "stop"
        text = text.rstrip()
        question = (self._opening() + text).strip()
        if self._repeats(text):
            self.stop("question repeats itself")
        elif reason != "stop":
            self.stop("question cut at its limit")
        elif not question:
            self.stop("empty question")
        elif len(question) < SHORTEST or not text.strip():
            self.stop("question too short")
        elif self._has_turns(question):
            self.stop("question with turns in it")
        else:
            self.messages.append({"role": "user", "content": question})

    def add_answer(self, answer: Message, reason: str) -> None:
        """answer: `content`, perhaps `reasoning_content`. One that is cut stays, as in a regenerated data set, but nothing is asked after it."""
        text = answer["content"]
        if not text.strip():
            self.stop("empty answer")
        elif self._repeats(text):
            self.stop("answer repeats itself")
        elif self._has_turns(text):
            self.stop("answer with turns in it")
        else:
            self.messages.append({"role": "assistant", **answer} | ({"finish_reason": "length"} if reason == "length" else {}))
            self.finish_reasons.append(reason)
            if reason == "length" and not self.ended:
                self.stop("answer cut at its limit")

    def stop(self, fault: str) -> None:
        """End it with its last answer."""
        self.fault = fault
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def row(self, generation: dict[str, Any]) -> dict[str, Any]:
        own = {"finish_reasons": self.finish_reasons, "new_tokens": self.new_tokens[: 2 * self.turn]}
        return {"id": self.id, "domain": self.opening.domain, "messages": self.messages, "generation": generation | own}

    def _has_turns(self, text: str) -> bool:
        return any(token in text for token in self._template.turn_tokens) or bool(HEADER.search(text))

    def _repeats(self, text: str) -> bool:
        return repeats(self._template.encode(text))
