"""Exact decoding in half precision: plain and drafted rounds have the same shapes, so that rounding cannot make their answers diverge.

Otherwise three things differ between them, and each changes last bits: how many rows a matmul has, how many keys a query has, and in which
order the keys are (a node's ancestors lie among its siblings). Here every round verifies the same number of nodes, padding after its
tree, and every node attends over the same number of keys, each at the place of its position. Row n of a matmul and of a batched attention
then depends on its own input alone, which `check` tries out. It costs the arithmetic of the padding and a copy of the keys for each node.

Letters: N nodes of a round · C context length · G query heads of a KV head.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Target
from draftsmith.inference.support import has_experts
from draftsmith.inference.tree import DraftTree

__all__ = ["KeysByPosition", "check", "padded"]


def check(target: Target, nodes: int, tree_nodes: int) -> None:
    """Check that rounds of `nodes` nodes can be exact, for trees of `tree_nodes` nodes.

    Raises:
        ValueError: larger trees, experts (whose matmuls depend on the other rows), or a machine on which equal rows of a forward give
            unequal results.
    """
    if tree_nodes > nodes:
        raise ValueError(f"exact={nodes}: got trees of {tree_nodes} nodes; expected {nodes} at most; cut the tree, or give a larger number")
    if has_experts(target.config):
        raise ValueError("exact: the rows that an expert multiplies depend on the other tokens; expected a target without experts")
    device = target.device
    cache = TreeCache(1, nodes, device)
    tokens, alone = torch.full((1, nodes), 1, device=device), torch.eye(nodes, dtype=torch.bool, device=device)[None]
    with torch.inference_mode(), tree_attention(target.model):
        attention = TreeAttention(cache, torch.zeros_like(tokens), alone)
        attention.by_position = KeysByPosition(attention, nodes)
        hidden = target.forward(tokens, position_ids=attention.positions(), cache=cache, tree=attention).hidden
        logits = target.logits(hidden)
    if not (torch.equal(hidden, hidden[:, :1].expand_as(hidden)) and torch.equal(logits, logits[:, :1].expand_as(logits))):
        raise ValueError(
            f"exact: equal rows of a forward of {nodes} nodes differ on this machine; expected equal ones; take another number"
        )


def padded(tree: DraftTree, nodes: int) -> DraftTree:
    """The tree [1,·] with padding up to `nodes` nodes."""
    missing = nodes - tree.tokens.shape[1]
    return DraftTree.build(F.pad(tree.tokens, (0, missing)), F.pad(tree.parents, (0, missing)), tree.size) if missing else tree


@dataclass(slots=True)
class KeysByPosition:
    """Where each node of a tree [1,N] finds the keys of positions 0 … C−1, and the attention over them.

    Attributes:
        tree: the tree's attention; its cache has one row.
        context: C.
    """

    tree: TreeAttention
    context: int
    _slots: Tensor | None = None
    _masks: dict[Any, Tensor] = field(default_factory=dict)

    def slots(self) -> Tensor:
        """int64 [N,C]: the cache position of each node's key at each position; 0, which is masked, past the node's own."""
        if self._slots is None:
            visible, depth = self.tree.visible, self.tree.depth
            assert visible is not None and len(visible) == 1, "a tree of one row"
            nodes = torch.arange(self.tree.nodes, device=depth.device)
            ancestors = torch.zeros(self.tree.nodes, self.tree.nodes, dtype=torch.int64, device=depth.device)  # by node and depth
            ancestors.scatter_(1, depth.expand(self.tree.nodes, -1).where(visible[0], 0), nodes.expand_as(ancestors).where(visible[0], 0))
            positions = torch.arange(self.context, device=depth.device)
            below = (positions - self.tree.max_length).clamp(0, self.tree.nodes - 1)
            slots = torch.where(positions < self.tree.max_length, positions, self.tree.max_length + ancestors[:, below])
            self._slots = slots.where(positions <= self.tree.max_length + depth[0, :, None], 0)
        return self._slots

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, scored: Any) -> Tensor:
        """query [1,heads,N,dim], key and value [1,KV heads,·,dim] -> [1,N,heads,dim'], each node by itself over C keys.

        scored: the attention to take instead of SDPA, of (query, key, value, mask).
        """
        heads, nodes, dim = query.shape[1:]
        kv_heads = key.shape[1]
        slots = self.slots().flatten().to(key.device)
        keys, values = (each[0].index_select(1, slots).unflatten(1, (nodes, self.context)).transpose(0, 1) for each in (key, value))
        queries = query[0].transpose(0, 1).reshape(nodes, kv_heads, heads // kv_heads, dim)  # [N,KV heads,G,dim]
        mask = self._mask(window, query.dtype, query.device)
        out = scored(queries, keys, values, mask) if scored else F.scaled_dot_product_attention(queries, keys, values, mask, scale=scaling)
        return out.reshape(1, nodes, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Additive mask [N,1,1,C]."""
        key = (window, dtype, device)
        if key not in self._masks:
            own = self.tree.max_length + self.tree.depth[0, :, None]  # [N,1]
            positions = torch.arange(self.context, device=own.device)
            allowed = (positions <= own) & (own - positions < (window or self.context + 1))
            self._masks[key] = torch.where(allowed, 0.0, -torch.inf).to(device, dtype)[:, None, None]
        return self._masks[key]
