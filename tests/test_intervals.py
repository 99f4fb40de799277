"""Intervals over prompts: bootstrap-t against a slow form, what cancels, what is too little, and how often they are right."""

import math
import random
import statistics

import pytest
import torch

from draftsmith.eval import intervals
from draftsmith.eval.benchmarks import coverage
from draftsmith.eval.intervals import FEWEST, Interval, of_difference, of_ratio, of_ratio_of_ratios, of_share, prompts_for, shown
from draftsmith.eval.totals import columns, first_turns, tau


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(10, 60, (count,), generator=generator)
    return rounds + torch.randint(0, 60, (count,), generator=generator), rounds


def slow(tokens, rounds):
    """Bootstrap-t on log τ with loops, draws of Python's own, and the jackknife over a list."""

    def log_tau(chosen):
        return math.log(sum(tokens[i] for i in chosen) / sum(rounds[i] for i in chosen))

    def error(chosen):
        without = [log_tau([*chosen[:k], *chosen[k + 1 :]]) for k in range(len(chosen))]
        return math.sqrt((len(chosen) - 1) * statistics.pvariance(without))

    everything, draws = list(range(len(tokens))), random.Random(1)
    estimate = log_tau(everything)
    samples = [draws.choices(everything, k=len(tokens)) for _ in range(2000)]
    distances = sorted(abs(log_tau(chosen) - estimate) / max(error(chosen), 1e-12) for chosen in samples)
    half = distances[int(0.95 * len(distances))] * error(everything)
    return math.exp(estimate - half), math.exp(estimate + half)


@pytest.mark.parametrize("count", [FEWEST, 20])
def test_it_is_the_bootstrap_t_of_the_book(count):
    tokens, rounds = prompts(count)
    estimate, low, high = of_ratio(tokens, rounds)
    assert estimate == pytest.approx(float(tokens.sum() / rounds.sum()))
    assert low * high == pytest.approx(estimate**2), "symmetric in log τ"
    assert (low, high) == pytest.approx(slow(tokens.tolist(), rounds.tolist()), rel=0.03) and high / low > 1.1  # other draws


def test_a_difference_is_paired():
    tokens, rounds = prompts(40)
    same = of_difference(torch.stack((tokens, tokens)), torch.stack((rounds, rounds)))
    assert same == (0.0, 0.0, 0.0)
    faster = of_difference(torch.stack((tokens, 1.2 * tokens)), torch.stack((rounds, rounds)))
    alone = of_ratio(tokens, rounds)
    assert faster.estimate == pytest.approx(0.2 * alone.estimate)
    assert faster.high - faster.low < 0.4 * (alone.high - alone.low)


def test_a_speedup_is_of_seconds_per_token():
    tokens, seconds = torch.tensor([[6.0] * 10, [3.0] * 10]), torch.tensor([[1.0] * 10, [2.0] * 10])
    assert of_ratio_of_ratios(tokens, seconds) == pytest.approx((4.0, 4.0, 4.0))
    seconds[1, :5] = 1.0
    interval = of_ratio_of_ratios(tokens, seconds)
    assert interval.estimate == pytest.approx(6 / (30 / 15)) and interval.low < interval.estimate < interval.high


def test_too_few_prompts_give_no_interval():
    tokens, rounds = prompts(FEWEST)
    assert of_ratio(tokens, rounds).low is not None
    few = of_ratio(tokens[1:], rounds[1:])
    assert few.low is None and few.high is None and few.estimate > 1
    assert (
        shown(few.low, few.high) == "too few prompts" and shown(1.234, 2.0) == "1.23 – 2.00" and shown(-0.1, 0.2, "+.2f") == "-0.10 – +0.20"
    )
    assert prompts_for(few, 7) is None


def test_how_many_prompts_three_percent_take():
    assert prompts_for(Interval(2.0, 1.88, 2.12), 50) in (200, 201)  # ± 6 % with 50
    assert prompts_for(Interval(2.0, 1.99, 2.01), 50) == FEWEST


def test_the_same_numbers_give_the_same_interval():
    tokens, rounds = prompts(30)
    assert of_ratio(tokens, rounds) == of_ratio(tokens, rounds)


@pytest.mark.parametrize("kind, count", [("similar", 12), ("different", 24), ("two kinds", 24)])
@pytest.mark.parametrize("which, method", [(0, coverage.bootstrap_t), (1, coverage.bootstrap_t_of_share)])
def test_it_covers(kind, count, which, method, monkeypatch):
    monkeypatch.setattr(intervals, "SAMPLES", 400)
    torch.manual_seed(0)
    share = coverage.coverage(kind, count, 400, coverage.true_values(kind, 100_000)[which], method)
    assert 0.92 < share < 0.99  # of 400 trials, whose standard error is .011; of 1,000, these cells are .94 to .97


def test_a_share_that_was_never_or_always_seen_has_an_exact_bound():
    """Of prompts of which a share μ has all the hits, (1 − μ)^P have none: 0.05 at the bound."""
    never = of_share(torch.zeros(10), torch.full((10,), 20))
    assert never[:2] == (0.0, 0.0) and (1 - never.high) ** 10 == pytest.approx(0.05)
    always = of_share(torch.full((10,), 20), torch.full((10,), 20))
    assert always == pytest.approx((1.0, 1 - never.high, 1.0))
    assert of_share(torch.zeros(FEWEST - 1), torch.ones(FEWEST - 1)) == (0.0, None, None)


def test_samples_that_are_drawn_in_parts_are_the_same(monkeypatch):
    tokens, rounds = prompts(30)
    complete = of_ratio(tokens, rounds)
    monkeypatch.setattr(intervals, "MOST_DRAWN", 30 * 7)
    assert of_ratio(tokens, rounds) == pytest.approx(complete, rel=1e-12)
    monkeypatch.setattr(intervals, "MOST_DRAWN", 1)
    monkeypatch.setattr(intervals, "SAMPLES", 50)
    assert of_ratio(tokens, rounds).low < complete.estimate


def test_the_turns_of_a_conversation_are_drawn_together():
    counts = {"a": (8.0, 4.0), "b": (9.0, 3.0), "a#2": (6.0, 6.0), "c#2": (5.0, 1.0), "a#3": (1.0, 1.0), "b#x": (2.0, 1.0)}
    tokens, rounds = columns([counts], list(counts))
    assert first_turns(list(counts)) == ["a", "b", "c#2", "b#x"]  # c was not asked; b#x is no turn
    assert tokens.tolist() == [[15, 9, 5, 2]] and rounds.tolist() == [[11, 3, 1, 1]]
    tokens, rounds = prompts(40)
    turns = {f"{i // 2}{'#2' if i % 2 else ''}": (float(t), float(r)) for i, (t, r) in enumerate(zip(tokens, rounds, strict=True))}
    assert tau(turns) == of_ratio(tokens.view(-1, 2).sum(1), rounds.view(-1, 2).sum(1)) != of_ratio(tokens, rounds)


def test_prompts_that_are_nearly_equal_give_a_finite_interval():
    tokens, rounds = torch.full((FEWEST,), 60), torch.full((FEWEST,), 40)
    assert of_ratio(tokens, rounds) == pytest.approx((1.5, 1.5, 1.5))
    for odd in (39, 20):
        rounds[0] = odd
        interval = of_ratio(tokens, rounds)
        assert 1.2 < interval.low < 1.5 < interval.estimate < interval.high < 2.5
    rounds = torch.tensor([40, 20] + [40000, 40001] * 4)
    interval = of_ratio(torch.cat((tokens[:2], 1500 * tokens)), rounds)
    assert 1.4 < interval.low < interval.estimate < interval.high < 3.5


def test_one_prompt_that_has_everything_is_too_few():
    tokens = torch.zeros(2, 10).index_fill_(1, torch.tensor([3]), 5.0)
    assert of_ratio_of_ratios(tokens, tokens)[1:] == (None, None)


def test_a_single_short_answer_leaves_an_interval_of_the_differences_size():
    """Of samples without the odd prompt the error is next to nothing; their distances must not decide."""
    tokens = torch.tensor([12.0] * 11 + [1.0]).expand(2, 12)
    rounds = torch.tensor([[12.0] * 8 + [11.0] * 3 + [1.0], [1.0] * 12])
    interval = of_difference(tokens, rounds)
    assert interval.estimate == pytest.approx(10.06, abs=0.01) and interval.high - interval.low < 7


def test_students_quantiles_fall_to_the_normals():
    quantiles = [intervals.t_quantile(freedom) for freedom in range(1, 200)]
    assert quantiles == sorted(quantiles, reverse=True) and quantiles[-1] == pytest.approx(1.972, abs=0.005)
    assert intervals.t_quantile(11) == pytest.approx(2.201, abs=0.03) and intervals.t_quantile(29) == pytest.approx(2.045, abs=0.03)
