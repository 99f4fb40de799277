"""An independent language model as the drafter: chain, static tree or dynamic tree, with a KV cache of its own.

Its KV are kept by length: what was drafted and accepted stays, the rest is overwritten. The deepest token of a whole tree was never
run through it, nor was any token of a round that it did not draft for; these are encoded first in the next round that it drafts. (In a
graph every round encodes: what waits is then two tokens at most.)

Letters: B rows · N tree nodes with the root · F nodes of a level · V vocabulary of the target · P tokens to catch up with · K draft depth.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache, placed
from draftsmith.inference.drafter import NodeOutput, RoundContext, Target, TargetOutput, tensor_addresses
from draftsmith.inference.expand import CurrentLevel, TreeSpec, choose, grow
from draftsmith.inference.sampler import Sampling, warp
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict

__all__ = ["DraftModel"]

FEW = 8  # tokens to catch up with that are worth no forward of their own
APART = 2**24  # more than any index


@dataclass(slots=True, eq=False)
class Rows:
    """What it keeps of its rows. cache: its KV · missing: by row, the tokens that the cache lacks, up to the root · waiting [rows,2], lacking
    [rows]: in a graph, those tokens and how many they are · of: what the cache was made for."""

    cache: TreeCache
    missing: dict[int, list[int]]
    waiting: Tensor
    lacking: Tensor
    of: tuple[Any, ...]


class DraftModel:
    """`model` drafts trees of `shape` for a target with the same tokens. How many tokens it lags behind is host knowledge from the
    round's one transfer; its shapes follow it, and a tree (a chain apart) reads how many nodes were kept. In a graph both are the device's.

    Rows of its head past the target's vocabulary V are padding and cut off; where it has fewer, it never proposes what it lacks.

    chunk: tokens of a prompt per forward · confidence: a level below the first is drafted only where the best token of some node above it
    is at least this likely by the law that its children would be drawn from (0: always). That law depends on tokens drawn before alone,
    so that every lossless rule stays so. A batch stops together, once all its rows would: what is drafted along costs nothing in a
    padded batch. Under rejection a row's tokens then depend on the rows beside it; their law does not.

    Raises:
        ValueError: a confidence that is no probability.
    """

    method = "draft model"
    depth_limit = 8  # of position records: how far ahead a tree may look
    taps: tuple[int, ...] = ()

    def __init__(self, model: Target, shape: TreeSpec, chunk: int = 256, confidence: float = 0.0) -> None:
        if not 0.0 <= confidence <= 1.0:
            raise ValueError(f"got confidence {confidence}; expected a probability; 0 is off")
        self.model = model
        self.tree_spec = shape
        self.chunk = chunk
        self.confidence = confidence
        self._fewer = True
        self._vocab: int | None = None  # V, once bound
        self._state: Rows | None = None

    @property
    def capturable(self) -> bool:
        """Stopping where nobody is confident needs the host."""
        return not self.confidence

    @property
    def max_nodes(self) -> int:
        return self.tree_spec.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree_spec.max_depth

    @property
    def device(self) -> torch.device:
        return self.model.device

    def check(self, context: int) -> None:
        """Whether it can draft at this length.

        Raises:
            ValueError: fewer positions than the context.
        """
        if context > self.model.max_positions:
            raise ValueError(
                f"got a context of {context} for a draft model of {self.model.max_positions} positions; expected no more; "
                "shorten prompt and answer, or give another draft model"
            )

    def bind(self, target: Target, rows: int, context: int) -> Any:
        self.check(context)
        self._fewer, self._vocab = self.model.vocab_size < target.vocab_size, target.vocab_size
        self.tree_spec = self.tree_spec.to(self.model.device)
        if isinstance(self.tree_spec, StaticTree):
            encoded = sum(level.nodes for level in self.tree_spec.levels()[1:])
        else:
            encoded = (self.tree_spec.depth - 1) * self.tree_spec.width
        # A graph lets a row run a round past its end.
        capacity = context + self.max_depth + 1 + max(encoded, 2)
        device, of = self.model.device, (self.model, self.model.dtype, self.model.device, rows)
        if self._state is None or self._state.of != of or self._state.cache.capacity < capacity:
            self._state = None  # free the old one first
            lacking = torch.zeros(rows, dtype=torch.int64, device=device)
            self._state = Rows(TreeCache(rows, capacity, device), {}, lacking.new_zeros(rows, 2), lacking, of)
        self._state.cache.reset()
        self._state.missing.clear()
        self._slots: Tensor | None = None  # [B,N] where each node of the last tree was encoded
        self._encoded = 0  # levels of it that were
        self._chain = isinstance(self.tree_spec, StaticTree) and self.tree_spec.width <= 1
        return self._state, self.tree_spec, tensor_addresses(self.model.model)

    @property
    def _rows(self) -> Rows:
        assert self._state is not None, "bind comes first"
        return self._state

    @torch.inference_mode()
    def start(self, rows: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """Encode prompt[:-1]."""
        cache = self._rows.cache
        cache.fixed = False
        cache.reset(rows)
        for row, prompt in zip(rows, prompts, strict=True):
            self._rows.missing[row] = list(prompt)
        self._catch_up(rows, leave=1)
        there, last = placed(rows, self.device), placed([prompt[-1] for prompt in prompts], self.device)
        self._rows.waiting[there, 0] = last
        self._rows.lacking.index_fill_(0, there, 1)

    @torch.inference_mode()
    def propose(self, round: RoundContext) -> DraftTree:
        """Catch up to the root, then a level of the tree per forward, until the shape is full or nobody is confident."""
        growth, depth = grow(self.tree_spec, round), 0
        self._rows.cache.fixed = round.static_shape
        with tree_attention(self.model.model):
            hidden = (self._encode_waiting(round) if round.active is not None else self._reach_roots(round.slots))[:, None]
            index = round.positions[:, None].to(self.model.device) + 1
            # Whether an index is drafted for may hang, through the rows beside, on what an earlier round drew for it in vain: drawn with
            # the same noise again it would not be a draw from q. So here draws are keyed by depth too, which no two rounds share.
            drawn = self.confidence and round.sampling.children in ("drawn", "replaced")
            step = APART + 1 if drawn else 1
            while True:
                logits = self.model.logits(hidden)[..., : self._vocab]
                if depth and self.confidence and not self._confident(logits, round.sampling):
                    break
                level = index.expand(-1, hidden.shape[1]) + depth * step
                frontier = growth.extend(*choose(logits, growth.count, round, level, growth.scored))
                if frontier is None:
                    break
                hidden, depth = self._encode(frontier), frontier.depth
        tree, self._slots = growth.finish()
        self._encoded = depth
        return tree

    def _confident(self, logits: Tensor, sampling: Sampling) -> bool:
        """logits [B,F,V] -> whether some node's best token is likely enough; reads the device."""
        law = logits if sampling.greedy else warp(logits, sampling)
        return bool((law.float().softmax(-1).amax(-1) >= self.confidence).any())

    def _reach_roots(self, rows: list[int]) -> Tensor:
        """Encode what each row lacks -> hidden [B,H] at the roots."""
        behind = [row for row in rows if len(self._rows.missing[row]) > FEW]
        if behind and len(rows) > 1:  # by themselves: the others would be padding
            self._catch_up(behind, leave=1)
        return self._catch_up(rows, leave=0)

    def _encode_waiting(self, round: RoundContext) -> Tensor:
        """The same in one shape, for rows that take part."""
        assert round.active is not None
        cache = self._rows.cache
        cache.select(round.slots)
        tokens, counts = self._rows.waiting[round.slot_index], torch.where(round.active, self._rows.lacking[round.slot_index], 0)
        attention = TreeAttention.causal(cache, 2)
        hidden = self._forward(tokens, attention)
        cache.keep(attention.depth, counts, in_place=True)
        last = (counts - 1).clamp(min=0)
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]

    def _catch_up(self, rows: list[int], leave: int) -> Tensor:
        """Encode what each row lacks, but for its last `leave` tokens -> hidden [B,H] at the last token encoded."""
        cache = self._rows.cache
        cache.select(rows)
        waiting = [self._rows.missing[row][: len(self._rows.missing[row]) - leave] for row in rows]
        last: list[Tensor | None] = [None] * len(rows)
        start, longest = 0, max(len(ids) for ids in waiting)
        while start < longest:
            # A row that lacks little may be near the end of its slots while another lacks much.
            width = min(longest - start, self.chunk, cache.capacity - cache.reach)
            parts = [ids[start : start + width] for ids in waiting]
            ids = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=self.model.device)
            with tree_attention(self.model.model):
                hidden = self._forward(ids, TreeAttention.causal(cache, width))
            cache.advance([len(part) for part in parts])
            for place, part in enumerate(parts):
                if part:
                    last[place] = hidden[place, len(part) - 1]
            start += width
        for row, ids in zip(rows, waiting, strict=True):
            del self._rows.missing[row][: len(ids)]
        return torch.stack([one for one in last if one is not None]) if leave == 0 else torch.empty(0)

    def _known(self, ids: Tensor) -> Tensor:
        """A target may have rows, for padding or special tokens, that the draft model lacks; it reads its own last one there."""
        return ids.clamp(max=self.model.vocab_size - 1) if self._fewer else ids

    def _forward(self, ids: Tensor, attention: TreeAttention) -> Tensor:
        """ids [B,N] after what the cache holds -> hidden [B,N,H]."""
        positions = attention.positions().clamp(max=self.model.max_positions - 1)
        return self.model.forward(self._known(ids), position_ids=positions, cache=self._rows.cache, tree=attention).hidden

    def _encode(self, frontier: CurrentLevel) -> Tensor:
        """A level of the tree -> hidden [B,F,H]."""
        cache = self._rows.cache
        # The cache ends with the root, so a node of depth d is at length + d − 1.
        depth = torch.full_like(frontier.tokens, frontier.depth - 1)
        key_depth = (frontier.key_depth - 1).expand(len(depth), -1)
        hidden = self._forward(frontier.tokens, TreeAttention(cache, depth, frontier.visible, key_depth, frontier.open))
        cache.draft(frontier.tokens.shape[1])
        return hidden

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] -> its own hidden states [S,H] along them; the target's are of no concern."""
        with torch.inference_mode():
            return self.model.forward(self._known(ids[None]).to(self.model.device)).hidden[0]

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,H], consecutive roots [R] -> [R,K,D], D = V or fewer: entry (r,k) ranks token roots[r]+k+1, given all tokens before it."""
        at = (roots[:, None] + torch.arange(self.depth_limit, device=roots.device)).clamp(max=len(features) - 1)
        first, last = int(at.min()), int(at.max())
        with torch.inference_mode():
            return self.model.logits(features[first : last + 1])[..., : self._vocab][at - first]

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        """Keep the KV of accepted nodes; the tokens that have none yet wait for the next round."""
        if round.static_shape:
            self._accept_fixed(round, tree, verdict)
            return
        told = verdict.on_host(tree)
        slots, self._slots = self._slots, None
        kept = [0] * len(told)
        if slots is not None:
            places, counts = _places(slots, verdict.path[:, 1:].to(slots.device))
            kept = [min(one.length - 1, self._encoded) for one in told] if self._chain else counts.tolist()
            self._rows.cache.keep(places, counts, kept, in_place=self._chain)
        for row, one, count in zip(round.slots, told, kept, strict=True):
            self._rows.missing[row] += one.tokens[count:]

    @torch.inference_mode()
    def _accept_fixed(self, round: RoundContext, tree: DraftTree, verdict: Verdict) -> None:
        slots, self._slots = self._slots, None
        self._rows.cache.fixed = True  # prompts were encoded since, perhaps, and nothing proposed
        if slots is None:  # it was not asked: no more tokens may wait
            with tree_attention(self.model.model):
                self._encode_waiting(round)
            slots = torch.full_like(tree.tokens, -1)
        places, kept = _places(slots, verdict.path[:, 1:])
        if places.shape[1]:
            self._rows.cache.keep(places, kept, in_place=self._chain)
        deepest = tree.tokens.gather(1, verdict.path.amax(1, keepdim=True).clamp(min=0))[:, 0]
        behind = verdict.length - 1 - kept  # 1 where the last accepted node was not encoded
        waiting = torch.stack((torch.where(behind > 0, deepest, verdict.next_token), verdict.next_token), 1)
        moved = verdict.length > 0
        state = self._rows
        state.waiting[round.slot_index] = torch.where(moved[:, None], waiting, state.waiting[round.slot_index])
        state.lacking[round.slot_index] = torch.where(moved, behind + 1, state.lacking[round.slot_index])

    def drop(self, rows: list[int]) -> None:
        for row in rows:
            self._rows.missing.pop(row, None)
        self._rows.lacking.index_fill_(0, placed(rows, self.device), 0)
        self._rows.cache.reset(rows)


def _places(slots: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """Where the nodes of a path [B,K] were encoded [B,K], −1 where they were not, and how many were [B].

    Whatever has accepted children was encoded: of a path only the last node can lack its KV."""
    places = torch.where(path < 0, -1, slots.gather(1, path.clamp(min=0)))
    return places, (places >= 0).sum(1)
