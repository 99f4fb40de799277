"""A conversation whose assistant turns are being answered anew, turn by turn."""

import hashlib
import json
from typing import Any

from draftsmith.data.conversations import Conversation
from draftsmith.data.server import Message


class ConversationState:
    """A conversation that is being answered.

    Attributes:
        messages: the turns so far.
        pending: the turns to come: messages of the source, and None for each answer.
        prompt: of a text.
        reasons: finish reason of each answer.
        stopped: why the conversation ended early; "" if it did not.
    """

    def __init__(self, source: Conversation) -> None:
        self.source = source
        self.messages: list[Message] = []
        self.pending = [None] if source.messages is None else _plan(source.messages)
        self.prompt = ""
        self.reasons: list[str] = []
        self.stopped = "" if None in self.pending else "no turn in it to answer"
        self._answered = 0
        self._add_given()
        if source.messages and not self.messages:
            self.stop("it begins with the assistant")

    def _add_given(self) -> None:
        while self.pending and (given := self.pending[0]) is not None:
            self.messages.append(given)
            self.pending.pop(0)

    def add_answer(self, answer: Message, reason: str) -> None:
        message = {"role": "assistant", **answer}
        if reason == "length":
            message["finish_reason"] = "length"
        self.messages.append(message)
        self.reasons.append(reason)
        self._answered = len(self.messages)
        self.pending.pop(0)
        self._add_given()

    def stop(self, reason: str) -> None:
        """End the conversation with its last answer; without an answer it is skipped."""
        self.stopped, self.pending = reason, []
        del self.messages[self._answered :]

    def row(self, facts: dict[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = {"id": self.source.id, "domain": self.source.domain}
        if self.source.messages is None:
            row |= {"text": self.prompt + self.messages[0]["content"], "given": len(self.prompt)}
            row |= {"finish_reason": "length"} if self.reasons[0] == "length" else {}
        else:
            row["messages"] = self.messages
            if self.source.tools:
                row["tools"] = self.source.tools
        return row | {"generation": facts | {"given": given_hash(self.source), "finish_reasons": self.reasons}}


def given_hash(source: Conversation) -> str:
    """A hash of what stays of a conversation: of all but the turns that are answered anew."""
    given = [source.text, source.prompt] if source.messages is None else _plan(source.messages)
    return hashlib.sha256(json.dumps([given, source.tools], sort_keys=True).encode()).hexdigest()[:16]


def _plan(messages: list[Message]) -> list[Message | None]:
    if not any(message["role"] == "assistant" for message in messages):
        return [turn for message in messages for turn in ((message, None) if message["role"] == "user" else (message,))]
    # A call stays, since its result does: one in `tool_calls`, or in words (ShareGPT's function_call). Several may come before their results.
    turns = list[Message | None]()
    result, call = False, False  # whether the message after is a tool's result, or a call
    for message in reversed(messages):
        call = message["role"] == "assistant" and (result or (call and bool(message.get("tool_calls"))))
        result = message["role"] == "tool"
        turns.insert(0, None if message["role"] == "assistant" and not call else message)
    return turns if messages[-1]["role"] == "assistant" else [*turns, None]
