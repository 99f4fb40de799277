"""Which texts are loops."""

import numpy as np
import pytest

from draftsmith.data.loops import DISTINCT, LEAST, LOOP, NGRAM, PERIOD, REPEATED, repeats


def slow(ids: list[int]) -> bool:
    """As it is defined: a run of tokens that comes four times in a row and has 32 tokens in all, or few distinct n-grams."""
    for period in range(1, PERIOD + 1):
        run = period
        for place in range(period, len(ids)):
            run = run + 1 if ids[place] == ids[place - period] else period
            if run >= max(LOOP, REPEATED * period):
                return True
    ngrams = [tuple(ids[start : start + NGRAM]) for start in range(len(ids) - NGRAM + 1)]
    return len(ids) >= LEAST and len(set(ngrams)) < DISTINCT * len(ngrams)


def test_loops_are_seen_and_lists_are_none():
    counting = [token for number in range(40) for token in (5, 6, 100 + number, 7, 200 + number * number, 8)]
    assert not repeats(list(range(500))) and not repeats(counting) and not repeats([]) and not repeats([4] * 31)
    assert repeats([4] * 32) and repeats([*range(300), *[1, 2, 3] * 11, *range(300, 600)])
    assert repeats([*range(50), *list(range(100, 200)) * 4]) and not repeats([*range(50), *list(range(100, 200)) * 2])
    lines = [*range(9)], [*range(20, 29)]  # two lines in no order
    assert repeats([token for bit in "0110100110010110" for token in lines[int(bit)]])


@pytest.mark.parametrize("seed", range(4))
def test_the_quick_form_is_the_slow_one(seed):
    random = np.random.default_rng(seed)
    verdicts = []
    for _ in range(150):
        period = int(random.integers(1, 40))
        before, after = random.integers(0, int(random.choice([3, 50, 60_000])), (2, 40))
        loop = np.resize(random.integers(0, 60_000, period), int(period * random.uniform(1, 5)) + int(random.integers(0, 34)))
        ids = [*before[: random.integers(41)], *loop, *after[: random.integers(41)]]
        verdicts.append(repeats(list(map(int, ids))))
        assert verdicts[-1] == slow(ids)
    assert 30 < sum(verdicts) < 120
