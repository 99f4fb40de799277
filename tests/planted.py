"""True tokens planted into the trees of any drafter, so that an untrained one is accepted at every length."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.tree import DraftTree


class Planted:
    """`propose` in the place of a drafter's own.

    In most rounds the ancestors of one node get the true next tokens. Which node depends on the position and the request, on the device
    alone, so that a graph can replay it.

    Args:
        propose: the drafter's method.
        prompts, answers: the prompts, and what follows them; a request's noise key is its index.
        vocab_size: V of the target.
        always: the ancestors of the last node get them in every round.
    """

    def __init__(self, propose: Any, prompts: list[list[int]], answers: list[list[int]], vocab_size: int, always: bool = False) -> None:
        self.propose, self.vocab_size, self.always = propose, vocab_size, always
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        longest = max(map(len, texts)) + 16
        self.truth = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        self.trees: list[DraftTree] = []

    def __call__(self, round: RoundContext) -> DraftTree:
        tree = self.propose(round)
        nodes = tree.tokens.shape[1]
        index = torch.arange(nodes)
        chosen = (
            (round.positions * 7 + round.noise_keys * 3) % nodes if not self.always else torch.full_like(round.positions, nodes - 1)
        )  # [B]
        on_path = tree.visible().gather(1, chosen[:, None, None].expand(-1, 1, nodes))[:, 0] & (index > 0)
        planted = on_path & ((round.positions % 5) != 0)[:, None] if not self.always else on_path
        position = (round.positions[:, None] + tree.depth).clamp(max=self.truth.shape[1] - 1)
        return replace(tree, tokens=torch.where(planted, self.truth[round.noise_keys].gather(1, position), tree.tokens))


def seen_in(steps_of_rounds: Any, count: int) -> tuple[list[list[int]], Counter]:
    """Decode a stream to its end -> the tokens of each of `count` prompts, and how often things happened."""
    texts: list[list[int]] = [[] for _ in range(count)]
    seen: Counter = Counter()
    before: set[int] = set()
    for steps in steps_of_rounds:
        now = {step.prompt_index for step in steps}
        seen["replaced"] += bool(before) and bool(now - before) and bool(now & before)
        before = now
        for step in steps:
            texts[step.prompt_index] += step.tokens
            seen["drafted"] += step.size > 1
            seen[step.accepted - 1] += 1
    return texts, seen
