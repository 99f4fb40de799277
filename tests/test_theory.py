"""Theory of drafted chains: the published optimum table, and every claim that popular texts get wrong, by enumeration where that can be."""

import itertools

import pytest
import torch

from draftsmith.eval import theory

BEST = {  # (K, speedup, τ) by α and c
    (0.5, 0.02): (4, 1.79, 1.94),
    (0.5, 0.05): (3, 1.63, 1.88),
    (0.5, 0.10): (2, 1.46, 1.75),
    (0.5, 0.20): (1, 1.25, 1.50),
    (0.6, 0.02): (6, 2.17, 2.43),
    (0.6, 0.05): (4, 1.92, 2.31),
    (0.6, 0.10): (3, 1.67, 2.18),
    (0.6, 0.20): (2, 1.40, 1.96),
    (0.7, 0.02): (8, 2.76, 3.20),
    (0.7, 0.05): (6, 2.35, 3.06),
    (0.7, 0.10): (4, 1.98, 2.77),
    (0.7, 0.20): (3, 1.58, 2.53),
    (0.8, 0.02): (11, 3.82, 4.66),
    (0.8, 0.05): (8, 3.09, 4.33),
    (0.8, 0.10): (6, 2.47, 3.95),
    (0.8, 0.20): (4, 1.87, 3.36),
    (0.9, 0.02): (19, 6.37, 8.78),
    (0.9, 0.05): (13, 4.67, 7.71),
    (0.9, 0.10): (10, 3.43, 6.86),
    (0.9, 0.20): (7, 2.37, 5.70),
}


@pytest.mark.parametrize("acceptance, cost", BEST)
def test_the_best_length_is_that_of_a_search(acceptance, cost):
    length, speedup, tokens = BEST[acceptance, cost]
    assert theory.best_length(acceptance, cost) == length
    assert theory.chain_speedup(acceptance, length, cost) == max(theory.chain_speedup(acceptance, k, cost) for k in range(60))
    assert theory.chain_speedup(acceptance, length, cost) == pytest.approx(speedup, abs=0.006)
    assert theory.chain_tokens(acceptance, length) == pytest.approx(tokens, abs=0.006)


def test_the_expected_tokens_are_those_of_all_outcomes():
    acceptance, length = 0.7, 4
    expected = 0.0
    for outcome in itertools.product((True, False), repeat=length):
        chance = 1.0
        for accepted in outcome:
            chance *= acceptance if accepted else 1 - acceptance
        expected += chance * (1 + next((k for k, accepted in enumerate(outcome) if not accepted), length))
    assert theory.chain_tokens(acceptance, length) == pytest.approx(expected)


def test_speedup_is_finite_where_alpha_times_k_is_one():
    """Not 1 / (1 − αγ): that diverges at αγ = 1, and is no limit of this; the limit for long, free chains is 1 / (1 − α)."""
    assert theory.chain_speedup(0.5, 2, 0.1) == pytest.approx(1.75 / 1.2)
    assert theory.chain_speedup(0.8, 500, 0.0) == pytest.approx(1 / (1 - 0.8))


def test_the_bonus_token_counts():
    """α = .8 gives 3.36 tokens with K = 4, and 3.69 with K = 5; without the bonus token 1.687 × is what stands in place of 2.40 ×."""
    assert theory.chain_tokens(0.8, 4) == pytest.approx(3.36, abs=0.005)
    assert theory.chain_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert theory.chain_speedup(0.8, 4, 0.1) == pytest.approx(2.40, abs=0.005)
    without = (theory.chain_tokens(0.8, 4) - 1) / 1.4
    assert without == pytest.approx(1.687, abs=0.001)


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.31, 0.8])
@pytest.mark.parametrize("cost", [0.04, 0.3, 0.9])
def test_drafting_pays_where_acceptance_is_above_cost(acceptance, cost):
    """Not where γα > 1: at α = .3, c = .04 a chain of one pays, at α = .8, c = .9 a chain of any length does not."""
    best = max(theory.chain_speedup(acceptance, k, cost) for k in range(1, 60))
    assert theory.pays(acceptance, cost) == (best > 1 + 1e-12) == (theory.best_length(acceptance, cost) > 0)


def test_the_share_of_drafts_that_survive_is_not_alpha():
    """It is Σ α^k / K: .54 at α = .8, K = 5. It falls with K while survival and τ say the same drafter is the same."""
    assert theory.accepted_share(0.8, 5) == pytest.approx(0.54, abs=0.005)
    shares = [theory.accepted_share(0.8, k) for k in range(1, 8)]
    assert shares == sorted(shares, reverse=True) and shares[0] == pytest.approx(0.8) and len(set(shares)) == 7


def test_mean_accuracies_multiplied_are_not_tau():
    """Half the prompts accept always, half never: conditional acceptance from rounds gives τ = 2.5 at K = 3, the mean of .5 gives 1.875."""
    rounds = [3] * 10 + [0] * 10  # accepted tokens
    reached = [sum(accepted >= k for accepted in rounds) for k in range(4)]
    conditional = [deeper / shallower for shallower, deeper in itertools.pairwise(reached)]
    assert conditional == [0.5, 1.0, 1.0]
    assert theory.tau_of_survival(theory.survival_of_conditional(conditional)) == 2.5 == sum(1 + k for k in rounds) / 20
    assert theory.tau_of_survival(theory.survival_of_conditional([0.5] * 3)) == theory.chain_tokens(0.5, 3) == 1.875


def test_the_tokens_of_a_tree_are_a_sum_over_nodes():
    """Not the formula of chains with some α: two siblings of .5 and .3, and one grandchild of .4 under the first."""
    paths = {(0,): 0.5, (1,): 0.3, (0, 0): 0.5 * 0.4}
    survival = [sum(chance for path, chance in paths.items() if len(path) == depth) for depth in (1, 2)]
    assert theory.tau_of_survival(survival) == pytest.approx(1 + sum(paths.values())) == pytest.approx(2.0)


def test_a_slower_round_is_not_a_property_of_sampling():
    """Equal parts of a round give equal speedups, whatever the temperature: overhead is measured, not folded into c."""
    assert theory.speedup(2.0, 0.3, 1.2, 0.1, 1.0) == pytest.approx(2 / 1.6)
    assert theory.speedup(2.0, 3, 12, 1, 10) == theory.speedup(2.0, 0.3, 1.2, 0.1, 1.0)


def test_distance_at_temperature_one_is_not_greedy_acceptance():
    """p and q with equal best tokens: Σ min(p, q) is .6 at T = 1, and greedy decoding accepts every token."""
    p, q = torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.5])
    assert float(torch.minimum(p, q).sum()) == pytest.approx(0.6)
    assert p.argmax() == q.argmax()


@pytest.mark.parametrize("acceptance, cost", [(1.0, 0.1), (-0.1, 0.1), (0.5, 0.0)])
def test_what_has_no_best_length_is_refused(acceptance, cost):
    with pytest.raises(ValueError, match="expected 0 to below 1"):
        theory.best_length(acceptance, cost)
