"""The largest dynamic tree at each position of the target's own text, which says what every smaller one of its width accepts.

The target decodes plainly while the drafter drafts at each position and nothing of it is verified. Where the next tokens are in the drafted
tree, their order by likelihood is recorded; all else of the tree can be forgotten.

Letters: S positions · K draft depth · W width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.answers import EncodedPrompt, batches
from draftsmith.eval.noted import NotingDrafter
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.settings import label
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.models import ranks

MOST_NODES = 1024  # of a superset: the mask of a tree grows with their square
SLOTS, TOGETHER = 8, 32  # prompts that are decoded at a time; that are recorded together

Superset = list[tuple[list[int], list[int], list[int]]]  # at each position the nodes' tokens, parents and order


class _Watch(NotingDrafter):
    """A drafter whose trees are noted, as a `Superset` for each prompt, and not verified."""

    def propose(self, round: RoundContext) -> DraftTree:
        tree = self._drafter.propose(round)
        order = torch.zeros_like(tree.tokens) if tree.order is None else tree.order  # the root alone has no order
        rows = zip(round.slots, tree.tokens.tolist(), tree.parents.tolist(), order.tolist(), tree.size.tolist(), strict=True)
        for slot, tokens, parents, ordered, size in rows:
            self.notes[slot].append((tokens[:size], parents[:size], ordered[:size]))
        return DraftTree.root(round.last_tokens)


def largest(tree: DynamicTree) -> DynamicTree:
    """The tree of this depth and width that keeps all its candidates."""
    return replace(tree, nodes=tree.candidates)


def order_along(trees: Superset, answer: Sequence[int], depth: int) -> Tensor:
    """[S,K,K] int64: at [s,k−1,d−1] how the target's token at depth k ranks among the nodes of depth ≤ d, from 1; 0 where it was not drafted.

    Args:
        trees: the supersets along the answer.
        answer: S tokens.
        depth: K.
    """
    table = torch.zeros(len(answer), depth, depth, dtype=torch.int64)
    for position, (tokens, parents, order) in enumerate(trees[: len(answer)]):
        depths = [0] * len(tokens)
        for node in range(1, len(tokens)):
            depths[node] = depths[parents[node]] + 1
        child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        node = 0
        for k, token in enumerate(answer[position : position + depth], 1):
            node = child.get((node, token), -1)
            if node < 0:
                break
            for d in range(k, depth + 1):
                table[position, k - 1, d - 1] = sum(
                    each <= order[node] and 0 < level <= d for each, level in zip(order, depths, strict=True)
                )
    return table


def record_supersets(
    target: Any, drafter: Any, prompts: list[EncodedPrompt], sampling: Sampling, max_new_tokens: int, store: RecordStore
) -> None:
    """Record each prompt of this rank that has no record yet. The drafter has a dynamic tree, which it keeps."""
    setting, done, tree = label(sampling), store.recorded("superset"), drafter.tree_spec
    share, drafter.tree_spec = ranks.share(prompts), largest(tree)
    try:
        watch: Any = _Watch(drafter)
        decoder = Decoder(target, watch, slots=SLOTS, graphs=False)
        with Bar(f"drafts along the target's own answers at T={setting}", len(share)) as bar:
            for number, batch in enumerate(batches(share, TOGETHER)):
                if any((setting, prompt.prompt.id) not in done for prompt in batch):
                    ids, indices = [prompt.ids for prompt in batch], [prompt.index for prompt in batch]
                    answers = decoder.generate(ids, sampling, max_new_tokens, requests=indices)
                    tables = [
                        order_along(watch.notes_of(prompt), answer.tokens, tree.depth) for prompt, answer in zip(ids, answers, strict=True)
                    ]
                    store.append(
                        {"kind": "superset", "setting": setting, "prompt": prompt.prompt.id, "order": table.tolist()}
                        for prompt, table in zip(batch, tables, strict=True)
                    )
                bar.update(min(len(share), (number + 1) * TOGETHER))
    finally:
        drafter.tree_spec = tree
