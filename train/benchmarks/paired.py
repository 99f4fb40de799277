"""τ of several drafters on the same prompts, and differences of it that are paired by prompt and by the seed of their training.

Letters: P is the number of prompts, M that of seeds.
"""

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval import intervals, loading
from draftsmith.eval.answers import decode_all, encode_prompts
from draftsmith.eval.intervals import Interval
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

CHAIN, TREE = ("chain", 4, None, None), ("dynamic", 4, 4, 16)  # kind, depth, width and nodes
MEASURES = {
    f"{name}, T = {temperature}": (tree, temperature)
    for name, tree in (("chain of 4", CHAIN), ("tree of 16", TREE))
    for temperature in (0, 1)
}
NEW_TOKENS = 64


@lru_cache(maxsize=1)
def open_target(path: str, limit: int | None) -> tuple[Target, list[list[int]]]:
    """The target, and its prompts as `encoded_prompts` gives them."""
    target, _ = loading.open_models(path, [], "auto")
    return target, encoded_prompts(target, limit)


def encoded_prompts(target: Target, limit: int | None) -> list[list[int]]:
    """Token ids of the prompts that ship for the target, at most `limit` of each domain."""
    encoded, _ = encode_prompts(target, loading.shipped_prompts(target, limit), NEW_TOKENS)
    return [prompt.ids for prompt in encoded]


def decode(
    name: str, target: Target, drafter: Any, encoded: list[list[int]], measures: Collection[str] = tuple(MEASURES)
) -> dict[str, Any]:
    """Decode all prompts with a drafter.

    Args:
        name: for the progress bar.
        target, drafter: as loaded.
        encoded: token ids of the P prompts.
        measures: names of those of MEASURES that are wanted. A drafter that looks less than 4 ahead gets shallower trees.

    Returns:
        By measure, the tokens [P] and the rounds [P] of each prompt; `answers`: by measure, a hash of each answer.
    """
    result: dict[str, Any] = {"answers": {}}
    for measure in measures:
        (kind, depth, width, nodes), temperature = MEASURES[measure]
        drafter.tree_spec = loading.tree_spec_from_options(kind, drafter, min(depth, drafter.depth_limit), width, nodes)
        decoder, sampling = Decoder(target, drafter, slots=8), Sampling(temperature=temperature)
        answers = decode_all(f"{name}: {measure}", decoder, encoded, sampling, NEW_TOKENS)
        result[measure] = [[len(answer.tokens) for answer in answers], [len(answer.rounds) for answer in answers]]
        result["answers"][measure] = [hash(tuple(answer.tokens)) for answer in answers]
    return result


def counts(measure: str, runs: Sequence[dict[str, Any]]) -> Tensor:
    """Tokens and rounds [M,2,P] of a method's M runs, from what `decode` returned for each."""
    return torch.tensor([run[measure] for run in runs], dtype=torch.float64)


def taus(counts: Tensor) -> Tensor:
    """τ [...] of tokens and rounds, counts [...,2,P]."""
    return counts[..., 0, :].sum(-1) / counts[..., 1, :].sum(-1)


def mean_tau(counts: Tensor) -> float:
    """Mean over seeds of τ, of counts [M,2,P]."""
    return float(taus(counts).mean())


def difference(first: Tensor, second: Tensor) -> Interval:
    """Mean over seeds of second's τ less first's, with its 95 % interval: over prompts, and over seeds where there are several.

    Both parts are paired: the runs of a seed trained on the same samples, and all decoded the same prompts.

    Args:
        first, second: tokens and rounds [M,2,P] of two methods with the same seeds.
    """
    both = torch.stack((first, second)).double()
    deltas = taus(both[1]) - taus(both[0])  # [M]
    over_prompts, delta = intervals.of_difference(both.sum(1)[:, 0], both.sum(1)[:, 1]), float(deltas.mean())
    if over_prompts.low is None:
        return Interval(delta, None, None)
    half = over_prompts.estimate - over_prompts.low
    if len(deltas) > 1:
        half = math.hypot(half, intervals.t_quantile(len(deltas) - 1) * float(deltas.std()) / len(deltas) ** 0.5)
    return Interval(delta, delta - half, delta + half)
