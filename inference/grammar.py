"""Grammars: answers that match a JSON schema, a context-free grammar or a regular expression, by the library llguidance.

Where only one text can follow, the library allows the tokens of its usual spelling alone. It is imported when the first grammar is compiled; `pip install 'draftsmith[grammar]'` has it.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.inference.constraints import ConstraintState

__all__ = ["KINDS", "Grammar", "Kind", "compile_grammar"]

# The word for reports, by the name that llguidance has for the kind of text.
Kind = Literal["json_schema", "grammar", "regex"]
KINDS: dict[Kind, str] = {"json_schema": "json-schema", "grammar": "grammar", "regex": "regex"}


@dataclass(frozen=True, slots=True)
class _MatcherState:
    """A matcher, which is copied before it reads a token (a copy takes a microsecond), and the stop tokens."""

    matcher: Any
    stops: frozenset[int]

    def after(self, token: int) -> ConstraintState | None:
        if self.matcher.is_stopped():
            return self if token in self.stops else None
        copy = self.matcher.deep_copy()
        consumed = copy.try_consume_tokens([token])
        _check_matcher(copy)
        return _MatcherState(copy, self.stops) if consumed == 1 else None

    def allowed(self) -> bytes:
        mask = self.matcher.compute_bitmask()
        _check_matcher(self.matcher)
        return mask


def _check_matcher(matcher: Any) -> None:
    """Raises ValueError where the library gives up on the grammar."""
    if matcher.is_error():
        raise ValueError(f"the grammar cannot go on: {_line(matcher.get_error())}; simplify it")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, a `Constraint`.

    Attributes:
        name: its kind and a hash of its text.
        matcher: in the state before the first token.
        stops: the stop tokens.
    """

    name: str
    matcher: Any
    stops: frozenset[int]

    def start(self) -> ConstraintState:
        return _MatcherState(self.matcher, self.stops)


def compile_grammar(kind: Kind, text: str, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int]) -> Grammar:
    """Compile what answers must match.

    Args:
        kind: a key of KINDS. "grammar" is EBNF as Lark or llama.cpp's GBNF writes it, whose first rule is `start` or `root`.
        text: the schema, the grammar or the expression.
        tokenizer: a fast tokenizer of transformers.
        vocab_size: V of the target; ids that the tokenizer lacks are never allowed.
        stop_ids: the target's; they are allowed where the answer may end.

    Raises:
        ValueError: llguidance is missing, the text is malformed (with the library's message), the tokenizer is of another kind or has more
            tokens than V, or there is no stop token.
    """
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        raise ValueError("grammars need the package llguidance, which is missing; pip install 'draftsmith[grammar]'") from None
    stops = sorted(stop_ids)
    if not stops:
        raise ValueError(
            "got a target without stop tokens; a grammar needs one to end an answer; set eos_token_id in its generation_config"
        )
    try:
        tokens = llguidance.hf.from_tokenizer(tokenizer, vocab_size, stops)
    except ValueError as error:
        raise ValueError(f"grammars cannot use the target's tokenizer: {_line(str(error))}; give a target with a fast tokenizer") from None
    try:
        grammar = llguidance.grammar_from(kind, text)
    except ValueError as error:
        raise ValueError(f"{_line(str(error))}; correct it") from None
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokens)
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    if failed or matcher.is_error():
        raise ValueError(f"{_line(messages[0] if failed else matcher.get_error())}; correct it")
    return Grammar(f"{KINDS[kind]}={hashlib.sha256(text.encode()).hexdigest()[:8]}", matcher, frozenset(stops))


def _line(message: str) -> str:
    """A message of the library as one line; what follows its first paragraph is the matcher's state."""
    return " ".join(message.split("<state>")[0].split())[:300]
