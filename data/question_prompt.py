"""Where a chat template puts the user's words: its text before them prompts a question, its text after them ends it (Magpie, 2406.08464)."""

from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from draftsmith.models.rendering import RenderingFailed, render
from draftsmith.models.turn_end import QUESTION, Specials


class NoQuestionPrompt(ValueError):
    """This template says of these messages neither how a question begins nor how it ends. `reason` is short."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the chat template of {name!r} prompts no question: {reason}; take another target, or give conversations")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class QuestionPrompt:
    """What a template writes around the user's words.

    Attributes:
        before: the text up to them, without blanks at its end: the blank belongs to the first word's token.
        end: the special token or the text that ends them.
        end_id: the special token's id, None where `end` is text.
    """

    before: str
    end: str
    end_id: int | None


class QuestionTemplate:
    """The chat template of a tokenizer, as it asks for the user's words.

    Attributes:
        tokenizer: the tokenizer.
        prompt: for a conversation's first words, without a system prompt.
        turn_tokens: what stands around a turn's words. A text that has it within has turns of its own.

    Raises:
        NoQuestionPrompt: no template, or one that does not say where the user's words are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise NoQuestionPrompt(self._name, "there is none")
        self._specials = Specials(tokenizer)
        self._cached: dict[str, QuestionPrompt] = {}  # by system prompt
        self.prompt = self.after([])
        self.turn_tokens = {*self._specials.pattern.findall(self.prompt.before), self.prompt.end}
        heading = self._specials.pattern.sub("\n", self.prompt.before).strip().split("\n")[-1]
        if heading and self.prompt.end_id is None:  # beside a special token, a heading is a word such as `user`
            self.turn_tokens.add(heading)

    def after(self, messages: list[dict[str, Any]]) -> QuestionPrompt:
        """What prompts the user's next words after these messages: none, a system prompt, or turns up to an answer."""
        if len(messages) > 1:
            return self._read(messages)
        system = messages[0]["content"] if messages else ""
        if system not in self._cached:
            self._cached[system] = self._read(messages)
        return self._cached[system]

    def _read(self, messages: list[dict[str, Any]]) -> QuestionPrompt:
        before, mark, rest = self._render(messages).partition(QUESTION)
        if not mark or QUESTION in rest:
            raise NoQuestionPrompt(self._name, f"it writes the user's words {'twice' if mark else 'nowhere, or alters them'}")
        special = self._specials.pattern.search(rest)
        text = rest[: special.start()].strip() if special else rest.strip()
        if text:
            return QuestionPrompt(before.rstrip(" "), text, None)
        if not special:
            raise NoQuestionPrompt(self._name, "it writes nothing after the user's words, so that they have no end")
        return QuestionPrompt(before.rstrip(" "), special[0], cast(int, self.tokenizer.convert_tokens_to_ids(special[0])))

    def encode(self, text: str) -> list[int]:
        """Token ids; the template has written the special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def for_server(self, text: str) -> str:
        """The prompt as a server is to get it, which adds the tokenizer's own special tokens: without a BOS that would then stand there twice."""
        start = self._specials.start
        added = self.tokenizer.encode("a", verbose=False)[:1] == [self.tokenizer.bos_token_id]
        return text.removeprefix(start) if start and added else text

    def _render(self, messages: list[dict[str, Any]]) -> str:
        conversation = [*messages, {"role": "user", "content": QUESTION}]
        try:
            template = self.tokenizer.get_chat_template()
            return render(template, conversation, self.tokenizer.special_tokens_map, prompt=True)[0]
        except RenderingFailed as error:
            raise NoQuestionPrompt(self._name, error.reason) from None
        except ValueError:  # from get_chat_template
            raise NoQuestionPrompt(self._name, "there are several templates and none is the default") from None
