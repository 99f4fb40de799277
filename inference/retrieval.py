"""Drafts from a datastore of texts on disk: REST (He et al. 2024).

A datastore is a folder. `tokens.bin` has its sequences, each token as its id + 1 and 0 after each sequence. `suffixes.bin` has all positions
of tokens.bin, in the order of the MAX_MATCH tokens from there on, those past the end counting as 0: a suffix array as deep as matches
are looked for. `datastore.json` has the facts, a checksum and the hash of the tokenizer, and is written last. Both arrays are memory-mapped, so
that a datastore may be larger than memory. data/datastore.py builds one.
"""

import mmap
import struct
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftsmith.inference.drafter import Target
from draftsmith.inference.drafts import Draft, HostDrafter, merge_continuations
from draftsmith.inference.durable import sampled_hash
from draftsmith.inference.expand import DynamicTree, TreeSpec
from draftsmith.inference.reading import field, read_json

__all__ = ["FACTS", "FORMAT", "MAX_MATCH", "SUFFIXES", "TOKENS", "Datastore", "Rest", "checksum", "formats"]

FORMAT = 1
FACTS, TOKENS, SUFFIXES = "datastore.json", "tokens.bin", "suffixes.bin"
MAX_MATCH = 16  # tokens
MIN_MATCH = 2
MOST_OCCURRENCES = 64  # that a draft is made of
NODES_A_TOKEN, NODES_MORE = 2, 2  # nodes of a draft for each token of the match, and in addition
MIN_PROBABILITY = 0.1  # a less likely node is left out
Letter = Literal["H", "I", "Q"]
TREE = DynamicTree(depth=10, width=4, nodes=32)


def formats(vocab_size: int, tokens: int) -> tuple[Letter, Letter]:
    """How a datastore's tokens and their positions are written, little-endian: letters of the struct module, which numpy knows too."""
    return "H" if vocab_size < 1 << 16 else "I", "I" if tokens < 1 << 32 else "Q"


def checksum(folder: Path) -> str:
    """Of the sizes and of 64 blocks of both arrays. Damage elsewhere costs acceptance and cannot change an answer: drafts are verified."""
    return sampled_hash([folder / TOKENS, folder / SUFFIXES])


@dataclass(frozen=True, slots=True)
class Datastore:
    """A datastore, open for look-ups.

    Attributes:
        tokens: [S] ids + 1, 0 after each sequence.
        suffixes: [S] positions.
        vocab_size: every id is below.
    """

    tokens: memoryview
    suffixes: memoryview
    vocab_size: int

    @classmethod
    def open(cls, folder: Path, tokenizer_hash: str) -> "Datastore":
        """Map the arrays of a datastore.

        Raises:
            ValueError: no datastore, a damaged one, or one of another tokenizer.
        """
        if not (folder / FACTS).is_file():
            raise ValueError(f"no datastore in {str(folder)!r}: it has no {FACTS}; `draftsmith data datastore` makes one")
        facts, source = read_json(folder / FACTS), folder / FACTS
        if facts.get("format") != FORMAT:
            raise ValueError(f"{source}: format {facts.get('format')!r}, this Draftsmith reads {FORMAT}; build it again")
        count, vocab_size = field(facts, "tokens", int, source), field(facts, "vocab_size", int, source)
        if vocab_size < 1:
            raise ValueError(f"{source}: `vocab_size` is {vocab_size}; expected 1 or more; build it again")
        named, expected = field(facts, "tokenizer", str, source), field(facts, "tokenizer_hash", str, source)
        if expected != tokenizer_hash:
            raise ValueError(
                f"datastore {str(folder)!r} has tokens of another tokenizer, that of {named!r}; build it with --target of this one"
            )
        kinds = formats(vocab_size, count)
        for name, kind in zip((TOKENS, SUFFIXES), kinds, strict=True):
            size, expected = (folder / name).stat().st_size if (folder / name).is_file() else 0, count * struct.calcsize(kind)
            if size != expected or not size:
                raise ValueError(f"datastore {str(folder)!r}: {name} has {size:,} bytes, expected {expected:,}; build it again")
        if checksum(folder) != field(facts, "checksum", str, source):
            raise ValueError(f"datastore {str(folder)!r} is damaged: its checksum differs; build it again, or copy it again")
        return cls(_mapped(folder / TOKENS, kinds[0]), _mapped(folder / SUFFIXES, kinds[1]), vocab_size)

    def matches(self, text: list[int]) -> tuple[int, int, int]:
        """The longest end of `text` that occurs, at most MAX_MATCH tokens: its length, and the range of suffixes that begin with it.

        Binary search, for the length too, since an end of what occurs occurs: about 5 · log2(S) comparisons.
        """
        ids = [token + 1 for token in text[-MAX_MATCH:]]
        length = bisect_left(range(1, len(ids) + 1), True, key=lambda size: not self._occurs(ids[-size:]))
        if not length:
            return 0, 0, 0
        pattern = ids[-length:]
        low = self._first(pattern)
        return length, low, bisect_right(self.suffixes, pattern, low, key=lambda position: self._at(position, length))

    def continuations(self, length: int, low: int, high: int, depth: int) -> list[list[int]]:
        """At most `depth` tokens after the match in suffixes low … high − 1: of MOST_OCCURRENCES, evenly spaced, where there are more.

        Suffixes are in the order of what follows, so that each continuation keeps its share.
        """
        count = min(high - low, MOST_OCCURRENCES)
        out = []
        for number in range(count):
            start = self.suffixes[low + (high - low) * number // count] + length
            ids = self.tokens[start : start + depth].tolist()
            stop = next((index for index, token in enumerate(ids) if not 0 < token <= self.vocab_size), len(ids))
            out.append([token - 1 for token in ids[:stop]])
        return out

    def _at(self, position: int, length: int) -> list[int]:
        return self.tokens[position : position + length].tolist()

    def _first(self, pattern: list[int]) -> int:
        return bisect_left(self.suffixes, pattern, key=lambda position: self._at(position, len(pattern)))

    def _occurs(self, pattern: list[int]) -> bool:
        low = self._first(pattern)
        return low < len(self.suffixes) and self._at(self.suffixes[low], len(pattern)) == pattern


def _mapped(path: Path, kind: Letter) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast(kind)


class Rest(HostDrafter):
    """Retrieval: what followed the longest end of the text that a datastore has, as a tree of its likeliest continuations.

    Args:
        store: the datastore.
        tree_spec: of the trees.
    """

    method = "rest"

    def __init__(self, store: Datastore, tree_spec: TreeSpec = TREE) -> None:
        super().__init__(tree_spec)
        self.store = store

    def bind(self, target: Target, slots: int, context: int) -> None:
        super().bind(target, slots, context)
        if self.store.vocab_size > target.vocab_size:
            raise ValueError(
                f"got a datastore of {self.store.vocab_size} tokens for a target of {target.vocab_size}; expected no more; build it for this target"
            )

    def _draft(self, slot: int, depth: int) -> Draft:
        length, low, high = self.store.matches(self._texts[slot])
        if length < MIN_MATCH:
            return Draft()
        continuations = self.store.continuations(length, low, high, depth)
        budget = min(self.max_nodes - 1, NODES_A_TOKEN * length + NODES_MORE)
        return merge_continuations(continuations, self.tree_spec, self._paths, budget, MIN_PROBABILITY)
