"""The relative cost of a round: its time over that of a plain round.

c(N) is the relative cost of a target forward over N tree nodes; drafting adds to it.

Letters: N tree nodes with the root · K draft depth · C context length.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafts import forget
from draftsmith.inference.packed_linear import packed_weights
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.models.target import Target

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)

RoundCost = Callable[[int, int], float]  # (nodes with the root, depth) -> relative cost


def measure_forward(target: Target, context: int, max_nodes: int, repeats: int = 25) -> dict[int, float]:
    """Time a target forward over N nodes, head included, for one row after C = `context` tokens. The sizes take turns.

    Returns:
        Median seconds by N: each of SIZES below `max_nodes`, and `max_nodes`.
    """
    sizes = [size for size in SIZES if size < max_nodes] + [max_nodes]
    context = min(context, target.max_positions - 1)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    with torch.inference_mode(), tree_attention(target.model), packed_weights():
        cache = TreeCache(1, context + max_nodes, target.device)
        cache.advance([context])  # keys and values of zeros take as long as those of a text
        for repeat in range(repeats + 1):
            for size in sizes:
                seconds = _time_forward(target, cache, _chain(target, size))
                if repeat:  # the first pass warms up
                    times[size].append(seconds)
    return {size: statistics.median(seconds) for size, seconds in times.items()}


def measure_drafting(target: Target, drafter: Any, prompts: list[list[int]]) -> dict[int, float]:
    """Median seconds that the drafter takes to draft a chain, by its depth: 1, and 4 or the drafter's limit."""
    saved, seconds = drafter.tree_spec, {}
    try:
        for depth in sorted({1, min(4, drafter.depth_limit)}):
            drafter.tree_spec = StaticTree.chain(depth)
            answers = Decoder(target, drafter, timed=True).generate(prompts, max_new_tokens=16, stop_ids=())
            rounds = [round.draft_s for answer in answers for round in answer.rounds[1:] or answer.rounds]
            seconds[depth] = statistics.median(rounds)
    finally:
        drafter.tree_spec = saved
        forget(drafter)
    return seconds


def relative_round(forward: dict[int, float], drafting: dict[int, float]) -> RoundCost:
    """The relative cost of a round by nodes and depth: c(N) and, for a depth above 0, drafting over a plain forward.

    Args:
        forward: seconds by N, see `measure_forward`.
        drafting: seconds by K, see `measure_drafting`; other depths lie on the straight line through them.
    """
    c, depths = relative_forward(forward), sorted(drafting)
    low, high = depths[0], depths[-1]
    step = max(0.0, drafting[high] - drafting[low]) / (high - low) if high > low else 0.0

    def cost(nodes: int, depth: int) -> float:
        return c(nodes) + ((drafting[low] + step * (depth - low)) / forward[1] if depth else 0.0)

    return cost


def relative_forward(forward: dict[int, float]) -> Callable[[int], float]:
    """c(N), interpolated linearly between the measured sizes, and never less for more nodes.

    The returned function raises ValueError for more nodes than were measured.
    """
    sizes = sorted(forward)
    values = []
    for size in sizes:
        values.append(max(forward[size] / forward[1], values[-1] if values else 1.0))

    def c(nodes: int) -> float:
        for (left, low), (right, high) in zip(zip(sizes, values, strict=True), zip(sizes[1:], values[1:], strict=True), strict=False):
            if nodes <= right:
                return low + (high - low) * (nodes - left) / (right - left)
        raise ValueError(f"c({nodes}) was not measured; expected at most {sizes[-1]} nodes")

    return c


def _chain(target: Target, size: int) -> DraftTree:
    parents = torch.arange(-1, size - 1, device=target.device)[None]
    return DraftTree.build(_tokens(target, size), parents, torch.tensor([size], device=target.device))


def _time_forward(target: Target, cache: TreeCache, tree: DraftTree) -> float:
    _synchronise(target.device)
    start = time.perf_counter()
    attention = TreeAttention.tree(cache, tree)
    positions = attention.positions().clamp(max=target.max_positions - 1)
    output = target.forward(tree.tokens, position_ids=positions, cache=cache, tree=attention)
    target.logits(output.hidden)
    _synchronise(target.device)
    return time.perf_counter() - start


def _tokens(target: Target, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(target.vocab_size, (1, count), generator=generator).to(target.device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
