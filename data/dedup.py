"""Drops exact and near duplicates, and examples that contain evaluation prompts.

It takes two steps: `MinHasher` signs examples, in any number of processes; `DedupFilter` then decides on them in order.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from draftsmith.data.conversations import Conversation

SHINGLE = 5  # words (`words`) of a shingle; a shorter evaluation prompt is not looked for inside other texts
COPIED_RUN = 13  # words in a row that count as copied
PERMUTATIONS = 64  # values of a MinHash: its estimate of a Jaccard similarity of 0.8 is good to ±0.05
RECALL = 0.99  # probability that two examples of similarity exactly `near` are compared
BUCKET_SIZE = 4  # examples that a bucket of the hash table remembers
BOUNDARY = "\n"  # between messages; no word contains it, so no run of words crosses it
EQUAL, COPIED, CONTAINED = "equals an evaluation prompt", "shares 13 words in a row with one", "contains a short one (5 to 12 words)"

_SPACES = {code: " " for code in range(128) if not chr(code).isalnum()}
# Each character of scripts without blanks between words is a word: Thai, Lao, Burmese, Khmer, kana, ideographs.
_SINGLE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Vowel signs of Indic scripts, points of Hebrew and Arabic: no letters by themselves, but part of the word.
_MARK = "".join(character for character in map(chr, range(0x300, 0x1F000)) if unicodedata.category(character) in ("Mn", "Mc"))
_WORD = re.compile(rf"(?=\w)[{_SINGLE}][{_MARK}]*|[^\W_{_SINGLE}]+(?:[{_MARK}]+[^\W_{_SINGLE}]*)*")
_CACHED_WORDS = 1 << 20
_START_BITS = 22
_RANDOM = np.random.Generator(np.random.PCG64(2024))  # fixed: signatures of different processes must agree
_FACTORS = _RANDOM.integers(1 << 63, size=PERMUTATIONS, dtype=np.uint64) * 2 + 1  # for the positions in a shingle or a band
_SCALES = _RANDOM.integers(1 << 31, size=(PERMUTATIONS, 1), dtype=np.uint32) * 2 + 1
_SHIFTS = _RANDOM.integers(1 << 32, size=(PERMUTATIONS, 1), dtype=np.uint32)


class Signature(NamedTuple):
    """What DedupFilter needs to know of an example.

    Attributes:
        digest: hash of its words.
        minhash: MinHash of its shingles, [PERMUTATIONS] uint32.
        contamination: EQUAL, COPIED or CONTAINED where it contains an evaluation prompt, else "".
    """

    digest: bytes
    minhash: np.ndarray
    contamination: str


class MinHasher:
    """Signs examples, given the evaluation prompts. Each turn of a prompt is given as a prompt of its own.

    A system prompt says nothing of how similar two conversations are: many share a long one.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        self._ids = _WordIds()
        self._prompts: set[str] = set()
        self._runs: set[str] = set()  # an example must contain none of these
        self._lengths: dict[str, set[int]] = {}  # first SHINGLE words of a run -> lengths of the runs that begin with them
        for prompt in prompts:
            prompt_words = words(prompt)
            if prompt_words:
                self._prompts.add(" ".join(prompt_words))
            size = min(len(prompt_words), COPIED_RUN)
            for start in range(len(prompt_words) - size + 1 if size >= SHINGLE else 0):
                run = prompt_words[start : start + size]
                self._runs.add(" ".join(run))
                self._lengths.setdefault(" ".join(run[:SHINGLE]), set()).add(size)
        self._starts = np.zeros(1 << _START_BITS, dtype=bool)  # rules out nearly all shingles quickly
        for start in self._lengths:
            self._starts[self._shingles(start.split(" ")) >> (64 - _START_BITS)] = True

    def sign(self, conversation: Conversation) -> Signature:
        """The signature of an example's messages, or of its text where it has none. Contamination is looked for in both."""
        texts = _parts(conversation)
        parts = [words(text) for _, text in texts]
        if not any(parts):  # emoji, operators
            parts = [list("".join(unicodedata.normalize("NFKC", text).split())) for _, text in texts]
        joined = [" ".join(part) for part in parts]
        all_words = _with_boundaries(parts)
        shingles = self._shingles(all_words)
        said = [part for (role, _), part in zip(texts, parts, strict=True) if role != "system"]
        compared = self._shingles(_with_boundaries(said)) if any(said) and len(said) < len(parts) else shingles
        contamination = EQUAL if self._prompts.intersection(joined) else self._contamination(all_words, shingles)
        if not contamination and conversation.messages is not None and conversation.text:
            text = words(conversation.text)  # a prompt may cross the messages' boundaries
            contamination = EQUAL if " ".join(text) in self._prompts else self._contamination(text, self._shingles(text))
        return Signature(hashlib.blake2b(BOUNDARY.join(joined).encode(), digest_size=16).digest(), _minhash(compared), contamination)

    def _shingles(self, text: list[str]) -> np.ndarray:
        """A 64-bit hash of each run of SHINGLE words, or of all words where there are fewer."""
        ids = np.fromiter(map(self._ids.__getitem__, text), np.uint64, len(text))
        size = min(SHINGLE, len(ids))
        if not size:
            return ids
        hashes = sum(ids[offset : len(ids) - size + offset + 1] * _FACTORS[offset] for offset in range(size))
        return _mixed(np.asarray(hashes))

    def _contamination(self, text: list[str], shingles: np.ndarray) -> str:
        if len(text) < SHINGLE:
            return ""
        contamination = ""
        for start in np.flatnonzero(self._starts[shingles >> (64 - _START_BITS)]).tolist():
            for size in self._lengths.get(" ".join(text[start : start + SHINGLE]), ()):
                if start + size <= len(text) and " ".join(text[start : start + size]) in self._runs:
                    if size == COPIED_RUN:
                        return COPIED
                    contamination = CONTAINED
        return contamination


class DedupFilter:
    """Keeps the first example of each set of near duplicates. What is kept depends only on the order of the examples.

    Two examples are near duplicates where at least a share `near` of their MinHash values agree; that share estimates the Jaccard similarity of
    their shingles. Locality-sensitive hashing finds the examples to compare: those that agree in all values of a band share a bucket. A
    bucket holds BUCKET_SIZE examples. Where very many share a text (a template), new ones replace old ones, so that an example is not
    compared with all the others.

    Args:
        near: the least similarity of near duplicates.

    Attributes:
        kept_count: examples that were kept.
        counts: how many were dropped, by reason.

    Raises:
        ValueError: `near` outside (0, 1].
    """

    def __init__(self, near: float = 0.8) -> None:
        if not 0 < near <= 1:
            raise ValueError(f"near is {near}, expected a similarity above 0 and at most 1")
        self.near = near
        self.kept_count = 0
        self.counts: Counter[str] = Counter()
        self._digests: set[bytes] = set()
        self._minhashes = np.empty((1 << 10, PERMUTATIONS), np.uint32)
        # The widest band that reaches RECALL leads to the fewest needless comparisons.
        sizes = [size for size in range(1, PERMUTATIONS + 1) if 1 - (1 - near**size) ** (PERMUTATIONS // size) >= RECALL]
        self._band_size = max(sizes, default=1)
        self._bands = np.arange(PERMUTATIONS // self._band_size)
        self._table = self._empty_table()

    def keep(self, signature: Signature) -> str:
        """Decide on the next example: "" keeps it, else the reason to drop it.

        The reasons are "exact duplicate", "near duplicate" and "evaluation prompt: ...".
        """
        if self.kept_count == len(self._minhashes):
            self._double()
        buckets = self._buckets(signature.minhash)
        reason = self._reason(signature, buckets)
        if reason:
            self.counts[reason] += 1
            return reason
        self._digests.add(signature.digest)
        self._minhashes[self.kept_count] = signature.minhash
        self._insert(self.kept_count, buckets)
        self.kept_count += 1
        return ""

    def _reason(self, signature: Signature, buckets: np.ndarray) -> str:
        if signature.contamination:
            return f"evaluation prompt: {signature.contamination}"
        if signature.digest in self._digests:
            return "exact duplicate"
        if self.near == 1:  # equal MinHashes do not make equal texts: one word in a long one may differ
            return ""
        candidates = self._table[self._bands, buckets]
        agree = (self._minhashes[candidates[candidates >= 0]] == signature.minhash).sum(1)
        return "near duplicate" if (agree >= self.near * PERMUTATIONS).any() else ""

    def _buckets(self, minhash: np.ndarray) -> np.ndarray:
        """The bucket in each band [bands], from the top bits of a hash of the band's values."""
        bands = minhash[: len(self._bands) * self._band_size].reshape(-1, self._band_size).astype(np.uint64)
        hashed = _mixed((bands * _FACTORS[: self._band_size]).sum(1))
        return hashed >> (65 - len(self._minhashes).bit_length())

    def _insert(self, example: int, buckets: np.ndarray) -> None:
        free = self._table[self._bands, buckets] < 0
        self._table[self._bands, buckets, np.where(free.any(1), free.argmax(1), example % BUCKET_SIZE)] = example

    def _double(self) -> None:
        self._minhashes = np.concatenate([self._minhashes, np.empty_like(self._minhashes)])
        self._table = self._empty_table()
        for example in range(self.kept_count):
            self._insert(example, self._buckets(self._minhashes[example]))

    def _empty_table(self) -> np.ndarray:
        return np.full((len(self._bands), len(self._minhashes), BUCKET_SIZE), -1, np.int32)


class _WordIds(dict[str, int]):
    """A 64-bit hash of each word, the same in every process; those of frequent words are cached."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        self[word] = number = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
        return number


def words(text: str) -> list[str]:
    """The words by which texts are compared: letters and digits with their marks, in lower case, under NFKC; in scripts without blanks, the characters."""
    if text.isascii():
        return text.lower().translate(_SPACES).split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def _with_boundaries(parts: list[list[str]]) -> list[str]:
    return [word for part in parts for word in (*part, BOUNDARY)][:-1]


def _parts(conversation: Conversation) -> list[tuple[str, str]]:
    """(role, text) of all that a conversation says; the role of a text is ""."""
    if conversation.messages is None:
        return [("", conversation.text)]
    parts = list[tuple[str, str]]()
    for message in conversation.messages:
        parts.append((message["role"], message["content"]))
        # A turn of tool calls has no content: without the calls, all such turns would be equal.
        for key in ("reasoning_content", "tool_calls"):
            if key in message:
                value = message[key]
                parts.append((message["role"], value if isinstance(value, str) else json.dumps(value)))
    return parts


def _minhash(shingles: np.ndarray) -> np.ndarray:
    least = np.full(PERMUTATIONS, 0xFFFFFFFF, np.uint32)
    short = (shingles >> 32).astype(np.uint32)
    for start in range(0, len(short), 4096):  # all permutations of a long text at once would not fit the CPU's cache
        np.minimum(least, (short[start : start + 4096] * _SCALES + _SHIFTS).min(1), out=least)
    return least


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """64-bit numbers whose high bits depend on all bits (the finaliser of MurmurHash3)."""
    numbers = (numbers ^ (numbers >> 33)) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> 33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> 33)
