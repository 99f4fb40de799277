"""AdaptiveDepth on a clock of its own: what it chooses, what disabled drafting costs, and that a drafter gets another chance."""

import random

import pytest
from decoding_cases import PROMPTS, SHAPES, relative, texts
from zoo import tiny

from draftsmith.inference import adaptive as module
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.verify import HostResult
from draftsmith.models.target import Target


def play(adaptive, rounds, chance, cost, rng, rows=1, slow=()):
    """Rounds with a drafter that is right with `chance` at each depth -> (tokens, seconds, depths); cost(k): seconds of depth k."""
    tokens, seconds, depths = 0, 0.0, []
    for number in range(rounds):
        depth = adaptive.depth(list(range(rows)))
        results = []
        for _ in range(rows):
            accepted = 0
            while accepted < depth and rng.random() < chance:
                accepted += 1
            results.append(HostResult(1 + accepted, 1 + depth, depth, True, [0] * (1 + accepted)))
        took = cost(depth) * (1 + 0.2 * rng.random()) * (20 if number in slow else 1)
        adaptive.learn(list(range(rows)), results, took)
        tokens += sum(result.length for result in results)
        seconds += cost(depth)
        depths.append(depth)
    return tokens, seconds, depths


def fresh(max_depth):
    adaptive = AdaptiveDepth()
    adaptive.bind(max_depth)
    return adaptive


def value(chance, depth, cost):
    return sum(chance**k for k in range(depth + 1)) / cost(depth)


@pytest.mark.parametrize("cost", [lambda k: 1 + 0.15 * k, lambda k: 1 + 0.6 * k, lambda k: 1 + (k > 0) * 0.8])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_useless_drafter_costs_little(cost, rows):
    for seed in range(5):
        adaptive = fresh(8)
        tokens, seconds, depths = play(adaptive, 600, 0.0, cost, random.Random(seed), rows)
        assert tokens == 600 * rows and seconds < 1.03 * 600
        assert 4 <= sum(depth > 0 for depth in depths) <= 100, "it re-tests, and not often"


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("level", [0.05, 0.2, 0.5])
def test_the_depth_that_pays_most_is_found(chance, level):
    cost = lambda k: 1 + level * k + 0.1 * (k > 0)  # noqa: E731
    best = max(range(9), key=lambda k: value(chance, k, cost))
    gained = []
    for seed in range(6):
        tokens, seconds, _ = play(fresh(8), 800, chance, cost, random.Random(seed), slow=(5, 9, 30, 200))
        gained.append(tokens / seconds)
    assert sum(gained) / 6 > 0.93 * value(chance, best, cost)


def test_a_slow_spell_bars_no_depth_for_good():
    cost = lambda k: 1 + 0.05 * k  # noqa: E731
    _, _, depths = play(fresh(6), 600, 0.9, cost, random.Random(1), slow=range(2, 12))
    assert sum(depth >= 5 for depth in depths[module.MAX_AGE + 20 :]) > 0.9 * (600 - module.MAX_AGE - 20)


def test_a_drafter_gets_another_chance():
    adaptive, cost = fresh(4), lambda k: 1 + 0.2 * k
    play(adaptive, 400, 0.0, cost, random.Random(0))
    adaptive.drop([0])
    _, _, depths = play(adaptive, 300, 0.95, cost, random.Random(1))
    assert min(number for number, depth in enumerate(depths) if depth >= 3) <= module.LONGEST_WAIT + 40
    assert sum(depth >= 3 for depth in depths[180:]) > 100


def test_plain_rounds_are_timed_anew():
    _, _, depths = play(fresh(4), 400, 0.9, lambda k: 1 + 0.01 * k, random.Random(0))
    rests = [number for number, depth in enumerate(depths) if depth == 0]
    assert rests[:2] == [0, 1] and len(rests) >= 3
    assert max(after - before for before, after in zip(rests, rests[1:], strict=False)) <= module.REFRESH + 1


def test_a_slot_drops_to_size_one_while_drafting_does_not_pay():
    class Timed(AdaptiveDepth):
        def learn(self, rows, results, seconds):
            super().learn(rows, results, 1 + 0.3 * max(result.depth for result in results))

    target = Target.wrap(tiny("llama"))
    plain = texts(Decoder(target).generate(PROMPTS, None, 60, ()))
    sizes = {}
    for name, noise in (("useless", 1.0), ("good", 0.002)):
        drafter = DraftModel(relative("llama", noise), SHAPES["chain"])
        out = Decoder(target, drafter, adaptive=Timed()).generate(PROMPTS, None, 60, ())
        assert texts(out) == plain
        sizes[name] = [result.size for answer in out for result in answer.rounds]
    assert sum(size == 1 for size in sizes["useless"]) > 0.85 * len(sizes["useless"]) and max(sizes["useless"]) > 1
    assert sum(size > 1 for size in sizes["good"]) > 0.85 * len(sizes["good"])


def test_a_row_may_end_before_anything_was_timed():
    """Then the two plain rounds at the start have different numbers of rows."""
    target = Target.wrap(tiny("llama"))
    plain = texts(Decoder(target).generate(PROMPTS[:2], None, 30, ()))
    out = Decoder(target, DraftModel(relative("llama", 0.005), SHAPES["chain"]), slots=2, adaptive=AdaptiveDepth()).generate(
        PROMPTS[:2], None, 30, [plain[0][0]]
    )
    assert out[0].tokens == plain[0][:1] and out[1].tokens[:1] == plain[1][:1]


def test_the_time_of_a_plain_round_is_that_of_the_present_context():
    adaptive = fresh(4)
    for seconds in (9.0, 1.0, 1.1):  # the first one sets things up
        adaptive.measure(1, 0, seconds)
    assert adaptive.plain_seconds(1) == 1.0
    for _ in range(module.MAX_PLAIN_AGE - 1):
        adaptive.measure(1, 2, 4.0)
    assert adaptive.plain_seconds(1) == 1.1, "the last one, where all are old"
    assert adaptive.costs(1, 2)[0] == 1.0, "in rounds of the present context too"
    for _ in range(4):
        adaptive.measure(1, 3, 2.5)
    costs = adaptive.costs(1, 3)
    assert costs[2] == costs[3] == 2.5 / 1.1, "deeper is never cheaper: one slow round bars no depth"
    adaptive.measure(1, 0, 3.0)
    assert adaptive.plain_seconds(1) == 3.0
