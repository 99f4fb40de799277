"""Exact and near duplicates, and evaluation prompts, found in two steps: signing (in any number of processes), then sieving in order."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from draftsmith.data.conversations import Conversation

GRAM = 5  # words of a shingle; also the fewest of an evaluation prompt that is looked for inside other texts
RUN = 13  # words in a row that are taken for copied
PERMUTATIONS = 64  # values of a MinHash: it knows a Jaccard similarity of 0.8 to ±0.05
RECALL = 0.99  # of pairs that are just `near`: how often they must meet in the sieve
WAYS = 4  # rows that a slot of the sieve remembers
BOUNDARY = "\n"  # between messages; it is in no word, so no run of words crosses it
EQUAL, COPIED, HELD = "equals an evaluation prompt", "shares 13 words in a row with one", "holds a short one (5 to 12 words) whole"

_SPACES = {code: " " for code in range(128) if not chr(code).isalnum()}
_WORD = re.compile(r"[^\W_]+")
_CACHED_WORDS = 1 << 20
_START_BITS = 22
_RANDOM = np.random.Generator(np.random.PCG64(2024))  # fixed: signatures of different processes must agree
_PLACES = _RANDOM.integers(1 << 63, size=PERMUTATIONS, dtype=np.uint64) * 2 + 1
_SCALES = _RANDOM.integers(1 << 31, size=(PERMUTATIONS, 1), dtype=np.uint32) * 2 + 1
_SHIFTS = _RANDOM.integers(1 << 32, size=(PERMUTATIONS, 1), dtype=np.uint32)


class Signature(NamedTuple):
    """What the sieve needs of a row: `digest` of its words, `minhash` [PERMUTATIONS] uint32 of its shingles, and why it leaks."""

    digest: bytes
    minhash: np.ndarray
    leak: str


class MinHasher:
    """Signs rows against the evaluation prompts (each turn of one is a prompt of its own)."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._ids = _WordIds()
        self._prompts: set[str] = set()
        self._runs: set[str] = set()  # what must not be found inside a row
        self._lengths: dict[str, set[int]] = {}  # first GRAM words of a run -> lengths of the runs that begin so
        for prompt in prompts:
            found = words(prompt)
            if found:
                self._prompts.add(" ".join(found))
            size = min(len(found), RUN)
            for start in range(len(found) - size + 1 if size >= GRAM else 0):
                run = found[start : start + size]
                self._runs.add(" ".join(run))
                self._lengths.setdefault(" ".join(run[:GRAM]), set()).add(size)
        self._starts = np.zeros(1 << _START_BITS, dtype=bool)  # a quick no for nearly all shingles
        for start in self._lengths:
            self._starts[self._grams(start.split(" ")) >> (64 - _START_BITS)] = True

    def sign(self, conversation: Conversation) -> Signature:
        """The signature of a row: of its messages, or of its text where it has none. A leak is looked for in both."""
        parts = [words(part) for part in _parts(conversation)]
        joined = [" ".join(part) for part in parts]
        whole = [word for part in parts for word in (*part, BOUNDARY)][:-1]
        grams = self._grams(whole)
        leak = EQUAL if self._prompts.intersection(joined) else self._leak(whole, grams)
        if not leak and conversation.messages is not None and conversation.text:
            text = words(conversation.text)  # a prompt may run on across the messages
            leak = EQUAL if " ".join(text) in self._prompts else self._leak(text, self._grams(text))
        return Signature(hashlib.blake2b(BOUNDARY.join(joined).encode(), digest_size=16).digest(), _minhash(grams), leak)

    def _grams(self, found: list[str]) -> np.ndarray:
        """A 64-bit hash of each run of GRAM words, or of all words where there are fewer."""
        ids = np.fromiter(map(self._ids.__getitem__, found), np.uint64, len(found))
        size = min(GRAM, len(ids))
        if not size:
            return ids
        grams = sum(ids[place : len(ids) - size + place + 1] * _PLACES[place] for place in range(size))
        return _mixed(np.asarray(grams))

    def _leak(self, found: list[str], grams: np.ndarray) -> str:
        if len(found) < GRAM:
            return ""
        held = ""
        for start in np.flatnonzero(self._starts[grams >> (64 - _START_BITS)]).tolist():
            for size in self._lengths.get(" ".join(found[start : start + GRAM]), ()):
                if start + size <= len(found) and " ".join(found[start : start + size]) in self._runs:
                    if size == RUN:
                        return COPIED
                    held = HELD
        return held


class DedupFilter:
    """Keeps the first of each set of like rows. Call it in the rows' order: what it keeps depends on nothing else.

    Rows are near duplicates where their MinHashes agree in at least `near` of the places, which estimates the Jaccard similarity
    of their shingles. Rows meet by banding, in a table of WAYS rows to a slot: where very many rows share a text (a template), new
    ones push old ones out, instead of each meeting all the others.
    """

    def __init__(self, near: float = 0.8) -> None:
        if not 0 < near <= 1:
            raise ValueError(f"near is {near}, expected a similarity above 0 and at most 1")
        self.near = near
        self.kept = 0
        self.counts: Counter[str] = Counter()  # rows refused, by reason
        self._digests: set[bytes] = set()
        self._minhashes = np.empty((1 << 10, PERMUTATIONS), np.uint32)
        # The most rows of a band, so the fewest chance meetings, with which RECALL is reached.
        meets = [rows for rows in range(1, PERMUTATIONS + 1) if 1 - (1 - near**rows) ** (PERMUTATIONS // rows) >= RECALL]
        self._rows = max(meets, default=1)
        self._bands = np.arange(PERMUTATIONS // self._rows)
        self._table = np.full((len(self._bands), len(self._minhashes), WAYS), -1, np.int32)

    def keep(self, signature: Signature) -> str:
        """`""` to keep the row, else the reason against it: "exact duplicate", "near duplicate", or "evaluation prompt: ..."."""
        if self.kept == len(self._minhashes):
            self._grow()
        slots = self._slots(signature.minhash)
        reason = self._reason(signature, slots)
        if reason:
            self.counts[reason] += 1
            return reason
        self._digests.add(signature.digest)
        self._minhashes[self.kept] = signature.minhash
        self._place(self.kept, slots)
        self.kept += 1
        return ""

    def _reason(self, signature: Signature, slots: np.ndarray) -> str:
        if signature.leak:
            return f"evaluation prompt: {signature.leak}"
        if signature.digest in self._digests:
            return "exact duplicate"
        met = self._table[self._bands, slots]
        agree = (self._minhashes[met[met >= 0]] == signature.minhash).sum(1)
        return "near duplicate" if (agree >= self.near * PERMUTATIONS).any() else ""

    def _slots(self, minhash: np.ndarray) -> np.ndarray:
        """The slot of each band [bands], from the top bits of a hash of its rows."""
        bands = minhash[: len(self._bands) * self._rows].reshape(-1, self._rows).astype(np.uint64)
        hashed = _mixed((bands * _PLACES[: self._rows]).sum(1))
        return hashed >> (65 - len(self._minhashes).bit_length())

    def _place(self, row: int, slots: np.ndarray) -> None:
        free = self._table[self._bands, slots] < 0
        self._table[self._bands, slots, np.where(free.any(1), free.argmax(1), row % WAYS)] = row

    def _grow(self) -> None:
        self._minhashes = np.concatenate([self._minhashes, np.empty_like(self._minhashes)])
        self._table = np.full((len(self._bands), len(self._minhashes), WAYS), -1, np.int32)
        for row in range(self.kept):
            self._place(row, self._slots(self._minhashes[row]))


class _WordIds(dict[str, int]):
    """A 64-bit hash of each word, the same in every process, remembered for the common ones."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        self[word] = number = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
        return number


def words(text: str) -> list[str]:
    """The words by which texts are compared: letters and digits only, in lower case, under NFKC."""
    if text.isascii():
        return text.lower().translate(_SPACES).split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def _parts(conversation: Conversation) -> list[str]:
    if conversation.messages is None:
        return [conversation.text]
    parts = list[str]()
    for message in conversation.messages:
        parts.append(message["content"])
        # Tool calls stand where an assistant's content would: without them different calls would be one row.
        parts += [
            value if isinstance(value := message[key], str) else json.dumps(value)
            for key in ("reasoning_content", "tool_calls")
            if key in message
        ]
    return parts


def _minhash(grams: np.ndarray) -> np.ndarray:
    least = np.full(PERMUTATIONS, 0xFFFFFFFF, np.uint32)
    short = (grams >> 32).astype(np.uint32)
    for start in range(0, len(short), 4096):  # a long text's table of all permutations would not fit the cache
        np.minimum(least, (short[start : start + 4096] * _SCALES + _SHIFTS).min(1), out=least)
    return least


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """64-bit numbers whose high bits depend on all bits (the finaliser of MurmurHash3)."""
    numbers = (numbers ^ (numbers >> 33)) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> 33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> 33)
