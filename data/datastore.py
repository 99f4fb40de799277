"""Builds a datastore for retrieval (inference/retrieval.py has its layout) from token sequences, with bounded memory.

Positions are sorted by their first MAX_MATCH tokens, most significant token first: they are distributed by one token into a spare file, and
runs of at most BLOCK positions are then sorted in memory. A run of one token that is longer is distributed by its next token. Each pass
reads and writes every position once, so the time is linear in the tokens but for the sorting in memory; prefix doubling would
sort all positions in each of its passes, for an order beyond MAX_MATCH tokens that no look-up reads.

Letters: S tokens of all sequences · M positions sorted at a time.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.data import conversations
from draftsmith.data.chat import Template, Unusable
from draftsmith.data.conversations import Source
from draftsmith.inference import durable
from draftsmith.inference.retrieval import FACTS, FORMAT, MAX_MATCH, SUFFIXES, TOKENS, checksum, formats
from draftsmith.models.identity import tokenizer_hash

__all__ = ["Built", "build", "read", "sort_suffixes"]

BLOCK = 1 << 21  # M: about 150 MB


@dataclass(slots=True)
class Built:
    """What was built.

    Attributes:
        sequences: how many.
        empty: how many were left out since they have no token.
        tokens: S, the ends of sequences included.
        bytes: of the folder.
        read_s: seconds of reading and tokenising.
        sort_s: seconds of sorting.
    """

    sequences: int = 0
    empty: int = 0
    tokens: int = 0
    bytes: int = 0
    read_s: float = 0.0
    sort_s: float = 0.0

    def report(self) -> str:
        empty = f" ({self.empty:,} empty ones left out)" if self.empty else ""
        return (
            f"{self.sequences:,} sequences{empty}, {self.tokens:,} tokens, {self.bytes / 1e6:,.1f} MB; "
            f"read and tokenised in {self.read_s:.1f} s, sorted in {self.sort_s:.1f} s"
        )


def read(path: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The token ids of the conversations or texts of a file, a folder or a Hub data set; [] for one that the chat template does not write.

    Raises:
        ValueError: as `conversations.read`; a conversation for a tokenizer without a chat template; one that is not valid Jinja or takes too
            much.
    """
    template = Template(tokenizer) if tokenizer.chat_template else None
    for example in conversations.read(Source(path=path)):
        if example.messages and template:
            try:
                yield template.tokens(example.messages, example.tools)
            except Unusable:
                yield []
        elif example.messages and not example.text:
            raise ValueError(f"{path}: {example.id!r} has messages, and this tokenizer no chat template; give texts, or a target with one")
        else:
            yield tokenizer(example.text, add_special_tokens=False, verbose=False)["input_ids"]


def build(folder: Path, sequences: Iterable[Sequence[int]], tokenizer: PreTrainedTokenizerBase, name: str, block: int = BLOCK) -> Built:
    """Write a datastore, which replaces an earlier one at once or not at all.

    Args:
        folder: where.
        sequences: token ids of each.
        tokenizer: that they are of.
        name: the tokenizer's, for people.
        block: M.

    Raises:
        ValueError: no token at all, a folder that is no datastore, or a link.
        OSError: too little space, or the folder cannot be written.
    """
    if folder.is_symlink() or (folder.exists() and not (folder / FACTS).is_file()):
        raise ValueError(f"{str(folder)!r} is there and is no datastore; give another folder")
    built = Built()

    def write(part: Path) -> None:
        began = time.perf_counter()
        vocab_size = len(tokenizer)
        kind = formats(vocab_size, 0)[0]
        with (part / TOKENS).open("wb") as file:
            for ids in sequences:
                if not len(ids):
                    built.empty += 1
                    continue
                if not 0 <= min(ids) <= max(ids) < vocab_size:
                    raise ValueError(f"got tokens {min(ids)} to {max(ids)}; expected ids below {vocab_size}, of the tokenizer of {name!r}")
                file.write((np.asarray([*ids, -1], dtype=np.int64) + 1).astype(f"<{kind}").tobytes())
                built.sequences, built.tokens = built.sequences + 1, built.tokens + len(ids) + 1
        if not built.tokens:
            raise ValueError("got no tokens for a datastore; give files with texts, conversations or records of eval")
        positions = np.dtype(f"<{formats(vocab_size, built.tokens)[1]}")
        needed, free = 2 * built.tokens * positions.itemsize, shutil.disk_usage(part).free
        if needed > free:
            raise OSError(f"{str(folder)!r} needs {needed / 1e9:,.1f} GB more, and {free / 1e9:,.1f} GB are free; give another disk")
        sorting = time.perf_counter()
        tokens = np.memmap(part / TOKENS, f"<{kind}", "r")
        suffixes, spare = (np.memmap(part / each, positions, "w+", shape=tokens.shape) for each in (SUFFIXES, "spare.bin"))
        sort_suffixes(np.asarray(tokens), suffixes, spare, vocab_size + 1, block)
        suffixes.flush()
        (part / "spare.bin").unlink()
        facts = {"format": FORMAT, "tokens": built.tokens, "sequences": built.sequences, "vocab_size": vocab_size, "tokenizer": name}
        facts |= {"tokenizer_hash": tokenizer_hash(tokenizer), "checksum": checksum(part)}
        (part / FACTS).write_text(json.dumps(facts) + "\n")
        built.bytes = sum(file.stat().st_size for file in part.iterdir())
        built.read_s, built.sort_s = sorting - began, time.perf_counter() - sorting

    durable.replace_folder(folder, write)
    return built


def sort_suffixes(tokens: np.ndarray, suffixes: np.ndarray, spare: np.ndarray, symbols: int, block: int = BLOCK) -> None:
    """Write the positions 0 … S−1 into `suffixes`, in the order of the MAX_MATCH tokens from each on; of equal ones the first comes first.

    Args:
        tokens: [S], each below `symbols`; past the end they count as 0.
        suffixes: [S], the result.
        spare: [S], overwritten.
        symbols: how many different tokens there may be.
        block: M.
    """

    def symbol(positions: np.ndarray, depth: int) -> np.ndarray:
        at = positions + depth
        return np.where(at < len(tokens), tokens[np.minimum(at, len(tokens) - 1)], 0)

    def chunks(low: int, high: int, depth: int) -> Iterator[np.ndarray]:
        for start in range(low, high, block):
            stop = min(start + block, high)
            yield suffixes[start:stop].astype(np.int64) if depth else np.arange(start, stop)

    def distribute(low: int, high: int, depth: int) -> np.ndarray:
        """Positions low … high − 1 of `suffixes` (at depth 0: all positions) -> into `spare` by their token at `depth`; the first of each."""
        counts = np.zeros(symbols, dtype=np.int64)
        for positions in chunks(low, high, depth):
            counts += np.bincount(symbol(positions, depth), minlength=symbols)
        firsts = low + np.concatenate(([0], counts.cumsum()))
        free = firsts[:-1].copy()
        for positions in chunks(low, high, depth):
            values = symbol(positions, depth)
            order = values.argsort(kind="stable")
            sizes = np.bincount(values, minlength=symbols)
            within = np.arange(len(values)) - np.repeat(sizes.cumsum() - sizes, sizes)
            spare[free[values[order]] + within] = positions[order]
            free += sizes
        return firsts

    todo = [(0, len(tokens), 0)]
    while todo:
        low, high, depth = todo.pop()
        firsts = distribute(low, high, depth)
        for start, stop in _runs(firsts, block):
            if stop - start <= block and depth + 1 < MAX_MATCH:
                positions = spare[start:stop].astype(np.int64)
                suffixes[start:stop] = positions[_order(positions, symbol, depth, symbols)]
            else:
                suffixes[start:stop] = spare[start:stop]
                if depth + 1 < MAX_MATCH:  # a run of one token
                    todo.append((start, stop, depth + 1))


def _runs(firsts: np.ndarray, block: int) -> Iterator[tuple[int, int]]:
    """Firsts [symbols + 1] of the runs of each token -> (start, stop) of runs of several tokens, of at most `block` where there are several."""
    at = 0
    while at < len(firsts) - 1:
        end = max(at + 1, int(np.searchsorted(firsts, firsts[at] + block, side="right")) - 1)
        if firsts[end] > firsts[at]:
            yield int(firsts[at]), int(firsts[end])
        at = end


def _order(positions: np.ndarray, symbol: Callable[[np.ndarray, int], np.ndarray], depth: int, symbols: int) -> np.ndarray:
    """The stable order of positions by their tokens at depth … MAX_MATCH − 1, several of which make one key."""
    bits = max(1, (symbols - 1).bit_length())
    keys = []
    for first in range(depth, MAX_MATCH, 63 // bits):
        key = np.zeros(len(positions), dtype=np.int64)
        for at in range(first, min(first + 63 // bits, MAX_MATCH)):
            key = key << bits | symbol(positions, at).astype(np.int64)
        keys.append(key)
    return np.lexsort(keys[::-1])
