"""Load-aware verification: how many of the drafted nodes are verified, by their chance to survive and by what a round costs (DSpark, Algorithm 1).

A drafter drafts its complete tree. Of each row's nodes the likeliest to survive are verified, as many as raise the expected tokens of a
second: Σ over rows of 1 + Σ survival, over the seconds of drafting and of a forward over N nodes a row, c(N), as measured. This decoder's
forwards are padded to the widest tree of the batch, so that N rises for all rows at once; DSpark's are ragged, and admit one node of one
request at a time. With one request both are the same, and where a node costs c₁ of seconds more they are the width rule of CAST
(https://arxiv.org/abs/2610.00321): add the next node while its survival is at least c₁ · tokens / seconds of the nodes before it.

The first N that gains nothing ends it, although a larger one might gain again. This keeps decoding lossless under rules that draw children
(rejection): whether a drawn token is tested must not depend on the token. Survival does not: it is the product of what the distributions
say before tokens are drawn from them (`choose`), or DSpark's confidences. Each node is decided from the survival of nodes that are no
less likely, which its own descendants never are. The best of all N would depend on the descendants' survival, and so on the token
(DSpark, appendix A; `tests/test_load_aware.py` enumerates it). Under the other rules the tokens are plain decoding's, whatever is verified.

Letters: B rows of a round · N nodes of a tree with the root · W nodes that are verified.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.drafter import NodeOutput
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import HostResult, Verdict

__all__ = ["Admitted", "LoadAware", "nodes_that_pay"]


def nodes_that_pay(survival: Tensor, seconds: Sequence[float]) -> int:
    """How many nodes to verify of each row, the root included: more as long as the expected tokens of a second rise.

    Args:
        survival: [B,N], the root's is 1, and 0 stands for padding.
        seconds: of a round that verifies 1 … N nodes a row.
    """
    columns = survival.double().sort(dim=1, descending=True).values.sum(0).cumsum(0).tolist()
    best = 1
    while best < len(columns) and columns[best] / seconds[best] > columns[best - 1] / seconds[best - 1]:
        best += 1
    return best


class Admitted:
    """The nodes of a round's trees that are verified.

    Args:
        drafted: the complete trees.
        nodes: W of each row; those that are likeliest to survive. Among equals the earlier node is taken, a parent before its children.

    Attributes:
        tree: the trees of these nodes, in their order.
    """

    def __init__(self, drafted: DraftTree, nodes: int) -> None:
        assert drafted.survival is not None
        self.drafted, count = drafted, drafted.tokens.shape[1]
        likeliest = _real(drafted).sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        self.index = likeliest.sort(1).values  # [B,W]
        new_index = torch.zeros_like(drafted.tokens).scatter_(
            1, self.index, torch.arange(nodes, device=likeliest.device).expand_as(likeliest)
        )
        parents = drafted.parents.expand(-1, count).gather(1, self.index)
        parents = torch.where(parents < 0, -1, new_index.gather(1, parents.clamp(min=0)))
        q_logits = drafted.q_logits
        if q_logits is not None:
            q_logits = q_logits.gather(1, self.index[:, :, None].expand(-1, -1, q_logits.shape[2]))
        tree = DraftTree.build(drafted.tokens.gather(1, self.index), parents, drafted.size.clamp(max=nodes), q_logits)
        self.tree = replace(tree, replacement=drafted.replacement, width=min(drafted.width, max(nodes - 1, 0)))

    def for_drafter(self, verdict: Verdict, out: NodeOutput) -> tuple[Verdict, NodeOutput]:
        """Verdict and features of these trees as of the drafted ones. The features of nodes that were not verified are 0."""
        path = torch.where(verdict.path < 0, -1, self.index.gather(1, verdict.path.clamp(min=0)))

        def spread(features: Tensor) -> Tensor:
            """[B,W,…] -> [B,N,…]."""
            wide = features.new_zeros(*self.drafted.tokens.shape, *features.shape[2:])
            return wide.scatter_(1, self.index.view(*self.index.shape, *[1] * (features.dim() - 2)).expand_as(features), features)

        results = verdict.on_host(self.tree)
        return Verdict(path, verdict.length, verdict.next_token, results), NodeOutput(
            spread(out.hidden), None if out.taps is None else spread(out.taps)
        )


def _real(tree: DraftTree) -> Tensor:
    """Survival [B,N], 0 where a node is padding."""
    assert tree.survival is not None
    return torch.where(torch.arange(tree.tokens.shape[1], device=tree.size.device) < tree.size[:, None], tree.survival, 0.0)


class LoadAware(AdaptiveDepth):
    """Chooses how many drafted nodes are verified: `Decoder(…, adaptive=LoadAware())`. Every round drafts as deep as the drafter can.

    c(N) is measured as `AdaptiveDepth` measures depths: by number of slots, the least of the last times, plain rounds now and then.
    """

    _drafted_s = 0.0  # of this round

    def depth(self, slots: Sequence[int]) -> int:
        """All levels, or 0 where a plain round is to be timed."""
        return 0 if self.needs_plain_round else self.max_depth

    def admit(self, tree: DraftTree, drafted_s: float) -> Admitted | None:
        """The nodes to verify of the trees of a round that took `drafted_s` to draft; None for all of them.

        Raises:
            ValueError: the drafter says nothing of survival.
        """
        nodes, self._drafted_s = tree.tokens.shape[1], drafted_s
        if nodes == 1:
            return None
        if tree.survival is None:
            raise ValueError(
                "load-aware verification: got trees without probabilities, as a look-up's are; expected a drafter with weights alone, without "
                "kernels; leave it out"
            )
        plain = self.plain_seconds(len(tree.tokens))
        seconds = [drafted_s + plain * cost for cost in self.costs(len(tree.tokens), nodes - 1)]
        admitted = nodes_that_pay(_real(tree), seconds)
        return Admitted(tree, admitted) if admitted < nodes else None

    def learn(self, slots: Sequence[int], results: Sequence[HostResult], seconds: float) -> None:
        """Learn the time of a round without its drafting, by how many nodes the widest tree had beside the root."""
        self.measure(len(slots), max(result.size for result in results) - 1, seconds - self._drafted_s)
        self._drafted_s = 0.0
