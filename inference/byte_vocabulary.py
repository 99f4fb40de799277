"""What two tokenizers have in common: the bytes that their tokens stand for, and the tokens of given bytes.

Byte-level tokenizers (GPT-2, Llama-3, Qwen) write each byte as a printable character; SentencePiece ones (Llama-2, Gemma) write a space as ▁
and, with byte fallback, a byte of a rare character as <0xE2>. A special token, such as the end of the text, stands for no bytes.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["ByteVocabulary", "complete_length", "counterparts", "mean_length"]

SPACE = "▁"
BYTE = re.compile("<0x([0-9A-F]{2})>")
# A text within a text is tokenised after one of these: the first with which a token begins where the text does.
BEFORE = ("", "\n", ".", "0", "a")
SAMPLE = 512  # tokens whose length is measured
INVALID = re.compile("([\udc80-\udcff]+)")  # bytes that are no UTF-8, as Python's surrogateescape writes them


@dataclass(eq=False, slots=True)
class ByteVocabulary:
    """A tokenizer as a map between tokens and bytes.

    Attributes:
        name: of the model, for messages.
        bytes_of: by id, the token's bytes; None for a special token and for an id without a token.
        id_of: the id of each token's bytes. Of a character and its byte fallback it is the character's.
        special_ids: the ids of the special tokens, by their text.
        end: the id of the end of the text, or None.
        begin: the ids that the tokenizer writes before every text.
        leading_space: whether it writes a space before every text, which decoding removes.
    """

    name: str
    bytes_of: list[bytes | None]
    id_of: dict[bytes, int]
    special_ids: dict[str, int]
    end: int | None
    begin: list[int]
    leading_space: bool
    _backend: Tokenizer

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None, name: str, size: int) -> "ByteVocabulary":
        """Read a model's tokenizer.

        Args:
            tokenizer: of the model.
            name: of the model.
            size: ids that the model has logits for; tokens beyond are none.

        Raises:
            ValueError: no tokenizer, or one that is neither byte-level nor of SentencePiece's kind: its tokens stand for no bytes.
        """
        if tokenizer is None or not tokenizer.is_fast:
            has = "no tokenizer" if tokenizer is None else "a tokenizer without tokenizer.json"
            raise ValueError(f"{name!r} has {has}, so that its tokens cannot be read as text; put tokenizer.json beside its weights")
        backend = Tokenizer.from_str(cast(PreTrainedTokenizerFast, tokenizer).backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        state = json.loads(backend.to_str())
        kinds = _kinds(state["decoder"])
        if not kinds & {"ByteLevel", "Metaspace", "Replace"}:
            raise ValueError(
                f"the tokenizer of {name!r} decodes by {', '.join(sorted(kinds)) or 'nothing'}; expected a byte-level or a SentencePiece "
                "tokenizer, whose tokens stand for bytes; give another draft model"
            )
        bytes_of = _bytes_of(tokenizer, "ByteLevel" in kinds, size)
        id_of: dict[bytes, int] = {}
        for index, piece in enumerate(bytes_of):
            if piece and (piece not in id_of or BYTE.fullmatch(str(tokenizer.convert_ids_to_tokens(id_of[piece])))):
                id_of[piece] = index
        added = cast(Any, tokenizer).added_tokens_decoder
        special_ids = {token.content: index for index, token in added.items() if index < size and bytes_of[index] is None}
        begin = _begin(backend, set(special_ids.values()))
        backend.encode_special_tokens = True  # a special token's text, where a model has spelled it out, is text
        first = backend.encode("a", add_special_tokens=False).ids[:1]
        leading_space = any(token < size and (bytes_of[token] or b"").startswith(b" ") for token in first)
        end = special_ids.get(str(tokenizer.eos_token))
        return cls(name, bytes_of, id_of, special_ids, end, begin, leading_space, backend)

    def text_of(self, token: int) -> bytes:
        """The bytes of a token, or the text of a special token; b"" for an id without a token."""
        piece = self.bytes_of[token] if token < len(self.bytes_of) else b""
        if piece is None:
            return next((text.encode() for text, index in self.special_ids.items() if index == token), b"")
        return piece

    def spell(self, tokens: Iterable[int]) -> bytes | None:
        """The bytes of these tokens; None if one of them has none."""
        pieces = [self.bytes_of[token] if token < len(self.bytes_of) else None for token in tokens]
        return None if None in pieces else b"".join(cast(list[bytes], pieces))

    def encode(self, data: bytes) -> list[int] | None:
        """Tokens within a text whose bytes are exactly `data`, as the tokenizer writes them; bytes that are no UTF-8 become a token each.

        None if the tokenizer has no such tokens.
        """
        tokens: list[int] = []
        for part in INVALID.split(data.decode("utf-8", "surrogateescape")):
            if INVALID.match(part):
                single = [self.id_of.get(bytes([byte])) for byte in part.encode("utf-8", "surrogateescape")]
                encoded = None if None in single else cast(list[int], single)
            else:
                encoded = next((ids for before in BEFORE if (ids := self._encode_after(before, part)) is not None), None)
            if encoded is None:
                return None
            tokens += encoded
        return tokens

    def encode_after(self, before: bytes, data: bytes) -> list[int] | None:
        """As `encode`, the way the tokenizer writes `data` after `before`; None where no token begins between the two."""
        try:
            return self._encode_after(before.decode(), data.decode())
        except UnicodeDecodeError:
            return None

    def read(self, data: bytes, first: bool) -> list[int] | None:
        """Tokens for a model that reads `data`: exact where the tokenizer has such tokens, else what it writes instead.

        Args:
            data: part of a text.
            first: whether the text begins with it.

        Returns:
            The tokens; None where `data` ends within a character that no tokens can spell so far.
        """
        text = data.decode("utf-8", "replace")
        exact = None if first and text.encode() == data else self.encode(data)
        if exact is not None or complete_length(data) < len(data):
            return exact
        return [token for token in self._backend.encode(text, add_special_tokens=False).ids if token < len(self.bytes_of)]

    def _encode_after(self, before: str, text: str) -> list[int] | None:
        """The tokens of `text` behind `before`, if a token begins there and all of them spell what was given."""
        tokens = self._backend.encode(before + text, add_special_tokens=False).ids
        spelled, end = self.spell(tokens), text.encode()
        if spelled is None or not spelled.endswith(end):
            return None
        start = len(spelled) - len(end)
        if spelled[:start] not in (before.encode(), b" " + before.encode()):
            return None
        position = 0
        for number, token in enumerate(tokens):
            if position == start:
                return tokens[number:]
            position += len(self.bytes_of[token] or b"")
        return [] if position == start else None


def complete_length(data: bytes) -> int:
    """The length of `data` without an incomplete character of UTF-8 at its end."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # the first byte of a character, or none
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 1
            return len(data) - back if length > back else len(data)
    return len(data)


def counterparts(ours: ByteVocabulary, theirs: ByteVocabulary) -> dict[int, int]:
    """Our special tokens -> theirs of the same text; the end of the text is theirs, whatever its text."""
    same = {index: theirs.special_ids[text] for text, index in ours.special_ids.items() if text in theirs.special_ids}
    if ours.end is not None and theirs.end is not None:
        same.setdefault(ours.end, theirs.end)
    return same


def mean_length(ours: ByteVocabulary, theirs: ByteVocabulary) -> float:
    """How many of our tokens spell one of theirs: the mean over some of their tokens, at least 1."""
    pieces = list(theirs.id_of)
    lengths = [len(tokens) for piece in pieces[:: 1 + len(pieces) // SAMPLE] if (tokens := ours.encode(piece))]
    return max(1.0, sum(lengths) / max(1, len(lengths)))


def _kinds(decoder: Any) -> set[str]:
    """The kinds of a decoder of tokenizer.json and of its parts."""
    if not decoder:
        return set()
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


def _bytes_of(tokenizer: PreTrainedTokenizerBase, byte_level: bool, size: int) -> list[bytes | None]:
    """By id below `size`, the bytes of each token; None for special tokens and for gaps."""
    added = cast(Any, tokenizer).added_tokens_decoder
    byte_of = _byte_of_symbol()
    vocab = {token: index for token, index in tokenizer.get_vocab().items() if index < size}
    pieces: list[bytes | None] = [None] * (1 + max(vocab.values(), default=-1))
    for token, index in vocab.items():
        byte = None if byte_level else BYTE.fullmatch(token)
        if byte:
            pieces[index] = bytes([int(byte[1], 16)])
        elif index in added:
            pieces[index] = None if added[index].special else token.encode()
        elif not byte_level:
            pieces[index] = token.replace(SPACE, " ").encode()
        elif all(symbol in byte_of for symbol in token):
            pieces[index] = bytes(byte_of[symbol] for symbol in token)
    return pieces


def _byte_of_symbol() -> dict[str, int]:
    """The byte that a character stands for in a byte-level vocabulary (Radford et al. 2019): printable ones for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _begin(backend: Tokenizer, special: set[int]) -> list[int]:
    """The special tokens that a tokenizer puts before a text."""
    begin = []
    for token in backend.encode("a").ids:
        if token not in special:
            break
        begin.append(token)
    return begin
