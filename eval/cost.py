"""What a round takes over a plain one: c(N) for one target forward over N tree nodes, and what drafting K deep adds."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.models.target import Target

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def measure(target: Target, context: int, most: int, repeats: int = 25) -> dict[int, float]:
    """Median seconds of forward + head for N in SIZES up to `most`, one row at context length C, sizes in alternation."""
    sizes = [size for size in SIZES if size < most] + [most]
    context = min(context, target.max_positions - 1)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    with torch.inference_mode(), tree_attention(target.model):
        cache = TreeCache(1, context + most, target.device)
        chunk = TreeAttention.causal(cache, context)
        target.forward(_tokens(target, context), position_ids=chunk.positions(), cache=cache, tree=chunk)
        cache.advance([context])
        for repeat in range(repeats + 1):
            for size in sizes:
                seconds = _forward(target, cache, _chain(target, size))
                if repeat:  # the first round warms up
                    times[size].append(seconds)
    return {size: statistics.median(seconds) for size, seconds in times.items()}


def measure_drafting(target: Target, drafter: Any, prompts: list[list[int]]) -> dict[int, float]:
    """Median seconds that `drafter` takes for a chain, by its depth: of 1 and of 4, or as deep as it can look."""
    saved, found = drafter.tree_spec, {}
    try:
        for depth in sorted({1, min(4, drafter.depth_limit)}):
            drafter.tree_spec = StaticTree.chain(depth)
            done = Decoder(target, drafter, timed=True).generate(prompts, max_new_tokens=16, stop_ids=())
            rounds = [round.draft_s for answer in done for round in answer.rounds[1:] or answer.rounds]
            found[depth] = statistics.median(rounds)
    finally:
        drafter.tree_spec = saved
    return found


def of_round(seconds: dict[int, float], drafting: dict[int, float]) -> Callable[[int, int], float]:
    """The price of a round of N nodes and depth K: c(N), and drafting by a straight line through what was measured; 1 for the root alone."""
    c, depths = relative(seconds), sorted(drafting)
    low, high = depths[0], depths[-1]
    step = max(0.0, drafting[high] - drafting[low]) / (high - low) if high > low else 0.0

    def price(nodes: int, depth: int) -> float:
        return c(nodes) + ((drafting[low] + step * (depth - low)) / seconds[1] if depth else 0.0)

    return price


def relative(seconds: dict[int, float]) -> Callable[[int], float]:
    """c(N) between the measured sizes by straight lines, never falling with N; the largest size is the last that is known."""
    sizes = sorted(seconds)
    values = []
    for size in sizes:
        values.append(max(seconds[size] / seconds[1], values[-1] if values else 1.0))

    def cost(nodes: int) -> float:
        for (left, low), (right, high) in zip(zip(sizes, values, strict=True), zip(sizes[1:], values[1:], strict=True), strict=False):
            if nodes <= right:
                return low + (high - low) * (nodes - left) / (right - left)
        raise ValueError(f"c({nodes}) was not measured; expected at most {sizes[-1]} nodes")

    return cost


def _chain(target: Target, size: int) -> DraftTree:
    parents = torch.arange(-1, size - 1, device=target.device)[None]
    return DraftTree.build(_tokens(target, size), parents, torch.tensor([size], device=target.device))


def _forward(target: Target, cache: TreeCache, tree: DraftTree) -> float:
    _wait(target.device)
    start = time.perf_counter()
    attention = TreeAttention.tree(cache, tree)
    positions = attention.positions().clamp(max=target.max_positions - 1)
    output = target.forward(tree.tokens, position_ids=positions, cache=cache, tree=attention)
    target.logits(output.hidden)
    _wait(target.device)
    return time.perf_counter() - start


def _tokens(target: Target, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(target.vocab_size, (1, count), generator=generator).to(target.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
