"""How often 95 % intervals of τ contain the true τ: simulated prompts of several kinds, a fresh sample of them for each trial.

python -m draftsmith.eval.benchmarks.coverage [--trials 2000]

A prompt has an acceptance of its own, and a length; its rounds accept drafts of a chain of 4 independently. Beside the interval that the
reports print (eval/intervals.py) stand Student's t on log τ with the jackknife's standard error, and the percentile bootstrap over prompts.
The true τ is that of a million prompts.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.eval.intervals import FEWEST, of_ratio

DEPTH, ROUNDS = 4, 140
T_QUANTILES = {6: 2.571, 8: 2.365, 12: 2.201, 24: 2.069, 48: 2.012, 95: 1.986}  # 97.5 % of Student's t with P − 1 degrees of freedom


def lengths(count: int) -> Tensor:
    return torch.randint(20, 120, (count,))


KINDS: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {  # P -> acceptance [P], tokens [P]
    "similar": lambda count: (torch.distributions.Beta(8.0, 8.0).sample((count,)), lengths(count)),
    "different": lambda count: (torch.distributions.Beta(1.5, 2.5).sample((count,)), (10 * (2.6 * torch.rand(count)).exp()).long()),
    "two kinds": lambda count: (torch.where(torch.rand(count) < 0.3, 0.85, 0.3), lengths(count)),
    "a rare kind": lambda count: (torch.where(torch.rand(count) < 0.03, 0.97, 0.3), lengths(count)),
}


def sample(kind: str, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and rounds of prompts, [P] each."""
    acceptance, tokens = KINDS[kind](count)
    accepted = (torch.rand(count, ROUNDS, DEPTH) < acceptance[:, None, None]).long().cumprod(2).sum(2)
    return tokens.double(), 1.0 + ((accepted + 1).cumsum(1) < tokens[:, None]).sum(1)


def true_tau(kind: str, prompts: int = 1_000_000, at_once: int = 50_000) -> float:
    parts = [torch.stack(sample(kind, at_once)).sum(1) for _ in range(prompts // at_once)]
    tokens, rounds = torch.stack(parts).sum(0)
    return float(tokens / rounds)


def percentile(tokens: Tensor, rounds: Tensor) -> tuple[float, float]:
    drawn = torch.randint(len(tokens), (1000, len(tokens)))
    taus = tokens[drawn].sum(1) / rounds[drawn].sum(1)
    low, high = torch.quantile(taus, torch.tensor([0.025, 0.975], dtype=taus.dtype)).tolist()
    return low, high


def jackknife(tokens: Tensor, rounds: Tensor) -> tuple[float, float]:
    without = ((tokens.sum() - tokens) / (rounds.sum() - rounds)).log()
    half = T_QUANTILES[len(tokens)] * ((len(tokens) - 1) * without.var(correction=0)).sqrt()
    log_tau = (tokens.sum() / rounds.sum()).log()
    return float((log_tau - half).exp()), float((log_tau + half).exp())


def bootstrap_t(tokens: Tensor, rounds: Tensor) -> tuple[float, float]:
    _, low, high = of_ratio(tokens, rounds)
    assert low is not None and high is not None
    return low, high


def coverage(kind: str, prompts: int, trials: int, tau: float, method: Callable[[Tensor, Tensor], tuple[float, float]]) -> float:
    """The share of `trials` samples whose interval contains τ."""
    hits = 0
    for _ in range(trials):
        low, high = method(*sample(kind, prompts))
        hits += low <= tau <= high
    return hits / trials


def main() -> None:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("--trials", type=int, default=2000)
    trials = described.parse_args().trials
    torch.manual_seed(0)
    print("| prompts are | τ | prompts | bootstrap-t | Student's t, jackknife | percentile bootstrap |\n|---|---|---|---|---|---|")
    for kind in KINDS:
        tau = true_tau(kind)
        for prompts in T_QUANTILES:
            methods = [method for method in (bootstrap_t, jackknife, percentile) if method is not bootstrap_t or prompts >= FEWEST]
            shares = [f"{coverage(kind, prompts, trials, tau, method):.3f}" for method in methods]
            shares = [*["too few"] * (3 - len(shares)), *shares]
            print(f"| {kind} | {tau:.3f} | {prompts} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
