"""How often 95 % intervals of τ contain the true τ: simulated prompts of several kinds, a fresh sample of them for each trial.

python -m draftsmith.eval.benchmarks.coverage [--trials 2000]

A prompt has an acceptance of its own, and a length; its rounds accept drafts of a chain of 4 independently. Beside the interval that the
reports print (eval/intervals.py) stand Student's t on log τ with the jackknife's standard error, and the percentile bootstrap over prompts.
The last column is of the reports' interval of a share: of the rounds that accept at least DEEP tokens. The true values are those of a million
prompts.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.eval.intervals import FEWEST, of_ratio, of_share, t_quantile

DEPTH, ROUNDS, DEEP = 4, 140, 2
PROMPTS = (6, 8, 12, 24, 48, 95)


def lengths(count: int) -> Tensor:
    return torch.randint(20, 120, (count,))


KINDS: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {  # P -> acceptance [P], tokens [P]
    "similar": lambda count: (torch.distributions.Beta(8.0, 8.0).sample((count,)), lengths(count)),
    "different": lambda count: (torch.distributions.Beta(1.5, 2.5).sample((count,)), (10 * (2.6 * torch.rand(count)).exp()).long()),
    "two kinds": lambda count: (torch.where(torch.rand(count) < 0.3, 0.85, 0.3), lengths(count)),
    "a rare kind": lambda count: (torch.where(torch.rand(count) < 0.03, 0.97, 0.3), lengths(count)),
}


def sample(kind: str, count: int) -> Tensor:
    """Tokens, rounds, and rounds that accept at least DEEP tokens, of prompts, [3,P]."""
    acceptance, tokens = KINDS[kind](count)
    accepted = (torch.rand(count, ROUNDS, DEPTH) < acceptance[:, None, None]).long().cumprod(2).sum(2)
    rounds = 1 + ((accepted + 1).cumsum(1) < tokens[:, None]).sum(1)
    deep = (accepted >= DEEP) & (torch.arange(ROUNDS) < rounds[:, None])
    return torch.stack((tokens, rounds, deep.sum(1))).double()


def true_values(kind: str, prompts: int = 1_000_000) -> tuple[float, float]:
    """τ, and the share of the rounds that accept at least DEEP tokens."""
    at_once = 50_000
    parts = [sample(kind, at_once).sum(1) for _ in range(prompts // at_once)]
    tokens, rounds, deep = torch.stack(parts).sum(0)
    return float(tokens / rounds), float(deep / rounds)


def percentile(tokens: Tensor, rounds: Tensor, _: Tensor) -> tuple[float, float]:
    drawn = torch.randint(len(tokens), (1000, len(tokens)))
    taus = tokens[drawn].sum(1) / rounds[drawn].sum(1)
    low, high = torch.quantile(taus, torch.tensor([0.025, 0.975], dtype=taus.dtype)).tolist()
    return low, high


def jackknife(tokens: Tensor, rounds: Tensor, _: Tensor) -> tuple[float, float]:
    without = ((tokens.sum() - tokens) / (rounds.sum() - rounds)).log()
    half = t_quantile(len(tokens) - 1) * ((len(tokens) - 1) * without.var(correction=0)).sqrt()
    log_tau = (tokens.sum() / rounds.sum()).log()
    return float((log_tau - half).exp()), float((log_tau + half).exp())


def bootstrap_t(tokens: Tensor, rounds: Tensor, _: Tensor) -> tuple[float, float]:
    return of_ratio(tokens, rounds)[1:]  # pyright: ignore[reportReturnType]


def bootstrap_t_of_share(_: Tensor, rounds: Tensor, deep: Tensor) -> tuple[float, float]:
    return of_share(deep, rounds)[1:]  # pyright: ignore[reportReturnType]


def coverage(kind: str, prompts: int, trials: int, value: float, method: Callable[[Tensor, Tensor, Tensor], tuple[float, float]]) -> float:
    """The share of `trials` samples whose interval contains the true value."""
    hits = 0
    for _ in range(trials):
        low, high = method(*sample(kind, prompts))
        hits += low <= value <= high
    return hits / trials


def main() -> None:
    described = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("--trials", type=int, default=2000, help="samples of prompts for each line (default 2000)")
    trials = described.parse_args().trials
    torch.manual_seed(0)
    print(
        "| prompts are | τ | prompts | bootstrap-t | Student's t, jackknife | percentile bootstrap | share, bootstrap-t |\n|---|---|---|---|---|---|---|"
    )
    for kind in KINDS:
        tau, share = true_values(kind)
        for prompts in PROMPTS:
            cells = [
                f"{coverage(kind, prompts, trials, value, method):.3f}"
                if prompts >= FEWEST or method in (jackknife, percentile)
                else "too few"
                for value, method in ((tau, bootstrap_t), (tau, jackknife), (tau, percentile), (share, bootstrap_t_of_share))
            ]
            print(f"| {kind} | {tau:.3f} | {prompts} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
