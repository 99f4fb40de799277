"""How much memory look-ups take, and how long they take, as what they search grows: suffix memories and datastores.

python -m draftsmith.eval.benchmarks.lookup [100000 1000000 10000000]

The text is made of phrases of 4 to 12 tokens that come again as often as words do (Zipf's distribution), in sequences of 500 tokens. Memory of the suffix
memory is what the process grows by; a datastore's is its files, which are mapped. A look-up drafts after the last tokens of a sequence.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from draftsmith.data.datastore import build
from draftsmith.inference.lookup import MAX_MATCH, ORDERS, NgramIndex
from draftsmith.inference.retrieval import Datastore
from draftsmith.models.identity import tokenizer_hash
from draftsmith.models.model_files import read_tokenizer
from draftsmith.models.target import resolve_path

SEQUENCE, DEPTH, LOOK_UPS = 500, 16, 200


def text(tokens: int, vocab: int, seed: int = 0) -> Iterator[list[int]]:
    """Sequences of `tokens` tokens in all."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(vocab) for _ in range(rng.randint(4, 12))] for _ in range(max(1000, tokens // 50))]
    for _ in range(tokens // SEQUENCE):
        sequence: list[int] = []
        while len(sequence) < SEQUENCE:
            sequence += phrases[min(int(rng.paretovariate(0.6)), len(phrases)) - 1]
        yield sequence[:SEQUENCE]


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def median_ms(look_up: Callable[[list[int]], object], texts: list[list[int]]) -> float:
    seconds = []
    for each in texts:
        began = time.perf_counter()
        look_up(each)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000], help="sizes")
    tokenizer = read_tokenizer(resolve_path("tiny"))
    assert tokenizer is not None
    vocab = len(tokenizer)
    print(
        f"{'tokens':>12} {'suffix memory':>14} {'bytes a token':>14} {'s':>6} {'ms':>7}   {'datastore':>10} {'bytes a token':>14} {'s':>6} {'ms':>7}"
    )
    for size in parser.parse_args().tokens:
        ends = [sequence[: SEQUENCE // 2] for sequence in islice(text(size, vocab), LOOK_UPS)]
        before, began = resident(), time.perf_counter()
        index = NgramIndex(ORDERS)
        for sequence in text(size, vocab):
            index.extend(sequence)
            index.close()
        seconds, grown = time.perf_counter() - began, resident() - before
        ms = median_ms(partial(index.matches, depth=DEPTH), ends)
        print(f"{size:>12,} {grown / 2**20:>10,.0f} MiB {grown / size:>14.0f} {seconds:>6.1f} {ms:>7.3f}", end="   ", flush=True)
        del index
        with tempfile.TemporaryDirectory() as folder:
            store, began = Path(folder) / "store", time.perf_counter()
            build(store, text(size, vocab), tokenizer, "tiny")
            seconds, held = time.perf_counter() - began, sum(file.stat().st_size for file in store.iterdir())
            opened = Datastore.open(store, tokenizer_hash(tokenizer))
            ms = median_ms(lambda tokens, opened=opened: opened.continuations(*opened.matches(tokens[-MAX_MATCH:]), DEPTH), ends)
            print(f"{held / 2**20:>6,.0f} MiB {held / size:>14.1f} {seconds:>6.1f} {ms:>7.3f}", flush=True)
            del opened


if __name__ == "__main__":
    main()
