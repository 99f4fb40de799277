"""A tiny byte-level BPE tokenizer, and constraints by enumeration: the slow form that grammars are compared with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

STOP = 0
# Tokens of one to four characters; some are beginnings, ends and joints of others, so that a string has several spellings.
PIECES = [
    "a",
    "b",
    "c",
    "0",
    "1",
    "2",
    '"',
    "{",
    "}",
    ":",
    ",",
    "[",
    "]",
    "ab",
    "ba",
    "abc",
    "01",
    "12",
    '{"',
    '":',
    '","',
    '"}',
    "x",
    "y",
    "xy",
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """<stop>, then PIECES: 26 tokens. Words are merged by their first two characters, then the next."""
    vocab = {"<stop>": STOP} | {piece: i for i, piece in enumerate(PIECES, 1)}
    merges = [(piece[:-1], piece[-1]) for piece in PIECES if len(piece) > 1 and piece[:-1] in vocab]
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<stop>")


def spell(tokens: Sequence[int]) -> str:
    """The text of an answer, without stop tokens."""
    return "".join(PIECES[token - 1] for token in tokens if token != STOP)


@dataclass
class Counts:
    """Masks that were made, by all states of a constraint."""

    masks: int = 0


@dataclass(frozen=True)
class Prefix:
    """The state after these tokens, which spell a prefix of some strings of a language."""

    language: frozenset[str]
    vocab: int
    counts: Counts
    path: tuple[int, ...] = ()

    def after(self, token: int) -> "Prefix | None":
        if not self.tokens()[token]:
            return None
        return Prefix(self.language, self.vocab, self.counts, (*self.path, token))

    @property
    def ended(self) -> bool:
        return STOP in self.path

    def tokens(self) -> list[bool]:
        """Which of V tokens are allowed, by looking at every string of the language."""
        if self.ended:
            return [token == STOP for token in range(self.vocab)]
        prefix = spell(self.path)
        texts = [prefix + piece for piece in PIECES]
        allowed = [any(string.startswith(text) for string in self.language) for text in texts]
        return [prefix in self.language, *allowed, *[False] * self.vocab][: self.vocab]

    def allowed(self) -> bytes:
        self.counts.masks += 1
        bits = sum(1 << token for token, allowed in enumerate(self.tokens()) if allowed)
        return bits.to_bytes((self.vocab + 7) // 8, "little")


@dataclass(frozen=True)
class Enumerated:
    """A constraint: the answer is one of these strings."""

    language: frozenset[str]
    vocab: int
    counts: Counts = field(default_factory=Counts)
    name: str = "enumerated"

    def start(self) -> Prefix:
        return Prefix(self.language, self.vocab, self.counts)
