"""What theory says of a drafted chain, to compare measurements with (Leviathan et al. 2023, §3).

α is the chance that a drafted token is accepted, K the length of the chain (γ elsewhere), and c the cost of drafting one token in plain
rounds. These formulas take every token to be accepted with the same chance, independently: of real drafters that is not so, so that they
underestimate deep drafts. τ from survival is an identity, and needs no such assumption.
"""

from collections.abc import Sequence


def chain_tokens(acceptance: float, length: int) -> float:
    """Expected tokens of a round, the bonus token included: Σ_{k≤K} α^k = (1 − α^(K+1)) / (1 − α)."""
    return float(sum(acceptance**k for k in range(length + 1)))


def chain_speedup(acceptance: float, length: int, cost: float) -> float:
    """Expected speedup, with verifying as cheap as a plain round: tokens / (1 + K·c)."""
    return chain_tokens(acceptance, length) / (1 + length * cost)


def best_length(acceptance: float, cost: float) -> int:
    """The chain length with the highest expected speedup; 0 where drafting does not pay, that is for α ≤ c.

    Raises:
        ValueError: α outside [0, 1), or a cost that is not positive: the longer the better then.
    """
    if not 0 <= acceptance < 1 or cost <= 0:
        raise ValueError(f"got acceptance {acceptance}, cost {cost}; expected 0 to below 1 and a positive cost; correct them")
    length = 0
    # One more token brings α^(K+1) and costs c: it pays while α^(K+1) / c is above what a round yields so far.
    while acceptance ** (length + 1) * (1 + length * cost) > cost * chain_tokens(acceptance, length):
        length += 1
    return length


def pays(acceptance: float, cost: float) -> bool:
    """Whether any chain is faster than plain decoding."""
    return acceptance > cost


def accepted_share(acceptance: float, length: int) -> float:
    """Expected accepted over drafted tokens: Σ_{1≤k≤K} α^k / K. It falls with K, so that it compares nothing across lengths."""
    return (chain_tokens(acceptance, length) - 1) / length


def tau_of_survival(survival: Sequence[float]) -> float:
    """τ = 1 + Σ S_k, S_k the share of rounds that accept at least k tokens. Of a tree, S_k is the chance that depth k is on the accepted
    path, which is a sum over nodes."""
    return 1.0 + sum(survival)


def survival_of_conditional(conditional: Sequence[float]) -> list[float]:
    """S_k = Π_{j≤k} α_j, of the acceptance at each depth given the depth before."""
    survival, reached = [], 1.0
    for chance in conditional:
        reached *= chance
        survival.append(reached)
    return survival


def speedup(tau: float, drafting: float, verifying: float, rest: float, plain: float) -> float:
    """τ · plain round / (drafting + verifying + rest of the round), in any unit of time: no assumption."""
    return tau * plain / (drafting + verifying + rest)
