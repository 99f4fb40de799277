"""Token recycling (Luo et al. 2024): what the target thought likely after a token last time is drafted after that token again.

Letters: V target vocabulary · N tree nodes with the root · n nodes of all rows together.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from draftsmith.inference.drafter import NodeOutput, RoundContext, Target
from draftsmith.inference.drafts import Draft, HostDrafter, tree_of_successors
from draftsmith.inference.expand import TreeSpec, ranked
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict

__all__ = ["Recycling"]

# The paths whose ranks, counted from 1, have a sum of 5 at most: 32 nodes with the root. The better a token's rank, the more follows it.
TREE = StaticTree.from_paths([path for depth in range(1, 6) for path in product(range(5), repeat=depth) if sum(path) + depth <= 5])
AT_ONCE = 64  # prompt positions whose logits [64,V] exist at a time


class Recycling(HostDrafter):
    """Drafts from a table of each token's likely successors, which every verified node of every request updates, accepted or not.

    The table [V,k] outlives requests and calls; another vocabulary empties it. Prompts fill it too. The logits of the nodes are computed a
    second time for it, since the decoder gives drafters hidden states only.

    Args:
        tree_spec: of the trees.
        successors: k, tokens kept of each token.

    Raises:
        ValueError: fewer than one successor.
    """

    method = "recycling"
    remembers = True

    def __init__(self, tree_spec: TreeSpec = TREE, successors: int = 8) -> None:
        if successors < 1:
            raise ValueError(f"got {successors} successors of a token; expected 1 or more; correct it")
        super().__init__(tree_spec)
        self.successors = successors
        self._ids = torch.empty(0, successors, dtype=torch.int32)  # [V,k], −1 where nothing is known
        self._shares = torch.empty(0, successors)  # [V,k], of the probability of the k tokens together

    def bind(self, target: Target, slots: int, context: int) -> None:
        super().bind(target, slots, context)
        self._target = target
        if len(self._ids) != target.vocab_size:
            self._ids = torch.full((target.vocab_size, self.successors), -1, dtype=torch.int32)
            self._shares = torch.zeros(target.vocab_size, self.successors)

    def forget(self) -> None:
        self._ids.fill_(-1)

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        super().start(slots, prompts, out)
        for row, prompt in enumerate(prompts):
            for first in range(0, len(prompt) - 1, AT_ONCE):
                tokens = torch.tensor(prompt[first : min(first + AT_ONCE, len(prompt) - 1)])
                self._learn(tokens, out.hidden[row, first : first + len(tokens)])

    def resumable(self, slot: int, count: int) -> int:
        """0: it learns from all of a prompt."""
        return 0

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        super().accept(round, tree, verdict, out)
        nodes = tree.tokens.shape[1]
        sizes = [result.size for result in verdict.on_host(tree)]
        real = torch.tensor([row * nodes + node for row, size in enumerate(sizes) for node in range(size)])
        self._learn(tree.tokens.flatten().cpu()[real], out.hidden.flatten(0, 1)[real.to(out.hidden.device)])

    def _learn(self, tokens: Tensor, hidden: Tensor) -> None:
        """Store the successors of tokens [n] with the target's hidden states [n,H]; of equal tokens the last one counts."""
        logits = self._target.logits(hidden)[:, : len(self._ids)]
        best = ranked(logits, min(self.successors, logits.shape[1]))
        shares = logits.gather(1, best).float().softmax(-1)
        last = torch.tensor(list({token: index for index, token in enumerate(tokens.tolist())}.values()))
        rows, count = tokens[last], best.shape[1]
        self._ids[rows, :count], self._shares[rows, :count] = best.cpu()[last].int(), shares.cpu()[last]

    def _draft(self, slot: int, depth: int) -> Draft:
        return tree_of_successors(self._texts[slot][-1], self._successors, self.tree_spec, self._paths, self.max_nodes - 1, depth)

    def _successors(self, token: int) -> Sequence[tuple[int, float]]:
        pairs = zip(self._ids[token].tolist(), self._shares[token].tolist(), strict=True)
        return [pair for pair in pairs if pair[0] >= 0]
