"""An independent language model as the drafter: chain, static tree or dynamic tree, with a KV cache of its own.

The cache keeps the KV of drafted nodes that were accepted and overwrites the rest. Some committed tokens have no KV yet: the deepest token of
a fully accepted path, which was never encoded, and the tokens of rounds without a draft. These pending tokens are encoded at the beginning of
the next round that drafts. (In a graph every round encodes them, so that there are at most two.)

Letters: B rows · N tree nodes with the root · F nodes of a level · V vocabulary of the target · D that of the draft model, at most V ·
K draft depth · H hidden size of the draft model · S positions · R positions that are drafted from.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache, index_tensor
from draftsmith.inference.draft_window import SINKS, WindowCache, drafter_cache, fits, left_out
from draftsmith.inference.drafter import NodeOutput, RoundContext, Target, TargetOutput, tensor_addresses
from draftsmith.inference.expand import CurrentLevel, TreeSpec, choose, expand
from draftsmith.inference.stopping import StopCheck, Stopping
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict

__all__ = ["DraftModel", "encode_tokens"]

SHORT_CATCH_UP = 8  # pending tokens; more of them are encoded in a forward of their own


@dataclass(slots=True, eq=False)
class DraftModelState:
    """The state of all slots.

    Attributes:
        cache: KV of the draft model.
        pending: by slot, the committed tokens that the cache lacks, the last committed token included. Not kept in a graph.
        pending_tokens: [slots,P] int64, the same for a graph; P is 2, or what the drafter needs.
        pending_count: [slots] int64, how many of `pending_tokens` count.
        made_for: what the cache was allocated for.
        resumable_slots: slots whose request has ended and may be resumed.
    """

    cache: TreeCache
    pending: dict[int, list[int]]
    pending_tokens: Tensor
    pending_count: Tensor
    made_for: tuple[Any, ...]
    resumable_slots: set[int] = field(default_factory=set)


class DraftModel:
    """A language model that drafts trees for a target with the same tokens. (`shared_tokens` has one for a target with other tokens.)

    Outside graphs the host knows how many tokens are pending from the round's one transfer, and the shapes follow it; after a tree (a chain
    apart) it reads how many nodes were kept. In a graph only the device knows both.

    Rows of the model's head beyond the target's vocabulary V are padding and are cut off. Tokens that its head lacks are never proposed.

    Args:
        model: the draft model.
        tree_spec: of the trees.
        chunk: tokens of a prompt per forward.
        stop: ends drafts early; None drafts the complete tree.
        window: the last positions that it sees, beside the first ones (`inference/draft_window.py`); None for all.
    """

    method = "draft model"
    can_stop = recurrent = True
    depth_limit = 8  # of position records: how far ahead a tree may reach
    taps: tuple[int, ...] = ()

    def __init__(
        self, model: Target, tree_spec: TreeSpec, chunk: int = 256, stop: Stopping | None = None, window: int | None = None
    ) -> None:
        self.model = model
        self.tree_spec = tree_spec
        self.chunk = chunk
        self.stop = stop
        self.window = window
        self._fewer_tokens = True
        self._vocab: int | None = None  # V, once bound
        self._bound_state: DraftModelState | None = None

    @property
    def capturable(self) -> bool:
        """False with a rule that stops drafts, or a window: the host decides whether to stop, and what to evict."""
        return self.stop is None and self.window is None

    @property
    def max_positions(self) -> int:
        return self.model.max_positions

    @property
    def max_nodes(self) -> int:
        return self.tree_spec.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree_spec.max_depth

    @property
    def pending_limit(self) -> int:
        """Pending tokens of a slot in a graph, at most."""
        return 2

    @property
    def encoded_nodes(self) -> int:
        """Positions that a round writes behind the pending tokens, at most."""
        if isinstance(self.tree_spec, StaticTree):
            return sum(level.nodes for level in self.tree_spec.levels()[1:])
        return (self.tree_spec.depth - 1) * self.tree_spec.width

    @property
    def device(self) -> torch.device:
        return self.model.device

    def check(self, context: int) -> None:
        """Check that it can draft at this context length.

        Raises:
            ValueError: the model has fewer positions than the context.
        """
        if context > self.model.max_positions:
            raise ValueError(
                f"got a context of {context} for a draft model of {self.model.max_positions} positions; expected no more; "
                "shorten prompt and answer, or give another draft model"
            )

    def bind(self, target: Target, slots: int, context: int) -> Any:
        self.check(context)
        self._fewer_tokens, self._vocab = self.model.vocab_size < target.vocab_size, target.vocab_size
        self.tree_spec = self.tree_spec.to(self.model.device)
        # In a graph a slot may run a round past its end.
        scratch = self.max_depth + 1 + max(self.encoded_nodes, 2)
        device, made_for = self.model.device, (self.model, self.model.dtype, self.model.device, slots, self.pending_limit)
        state = self._bound_state
        if state is None or state.made_for != made_for or not fits(state.cache, context, scratch, self.window):
            state = self._bound_state = None  # frees the old cache first
            count = torch.zeros(slots, dtype=torch.int64, device=device)
            cache = drafter_cache(slots, context, scratch, self.window, device)
            state = DraftModelState(cache, {}, count.new_zeros(slots, self.pending_limit), count, made_for)
            self._bound_state = state
        self.drop([slot for slot in range(slots) if slot not in state.resumable_slots])
        self._encoded_index: Tensor | None = None  # [B,N], of the last tree: see Expansion.finish
        self._encoded_levels = 0  # of the last tree
        self._chain = isinstance(self.tree_spec, StaticTree) and self.tree_spec.width <= 1
        return state, self.tree_spec, tensor_addresses(self.model.model)

    @property
    def _state(self) -> DraftModelState:
        assert self._bound_state is not None, "bind comes first"
        return self._bound_state

    @torch.inference_mode()
    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """Encode prompt[:-1]; with a window, no more of it than the root sees."""
        cache, pending = self._state.cache, self._state.pending
        cache.static_shape = False
        cache.reset(slots)
        self._state.resumable_slots.difference_update(slots)
        pending.update((slot, self._read(prompt, first=True)) for slot, prompt in zip(slots, prompts, strict=True))
        skipped = {slot: count for slot, count in zip(slots, left_out(cache, [len(pending[slot]) for slot in slots]), strict=True) if count}
        if isinstance(cache, WindowCache) and skipped:
            rest = {slot: pending[slot][SINKS + count :] for slot, count in skipped.items()}
            pending.update((slot, pending[slot][:SINKS]) for slot in skipped)
            self._catch_up(list(skipped), leave=0)
            cache.skip(list(skipped.values()))
            pending.update(rest)
        self._encode_prompts(slots, prompts)

    def _encode_prompts(self, slots: list[int], prompts: list[list[int]]) -> None:
        """Encode what is pending, all but prompt[-1]."""
        self._catch_up(slots, leave=1)
        index, last = index_tensor(slots, self.device), index_tensor([prompt[-1] for prompt in prompts], self.device)
        self._state.pending_tokens[index, 0] = last
        self._state.pending_count.index_fill_(0, index, 1)

    @torch.inference_mode()
    def propose(self, round: RoundContext) -> DraftTree:
        """Encode the pending tokens, then one level of the tree per forward, until the tree is full or the draft stops."""
        expansion, depth, check = expand(self.tree_spec, round), 0, StopCheck(self.stop, round)
        self._state.cache.static_shape = round.static_shape
        with tree_attention(self.model.model):
            hidden = (self._encode_pending(round) if round.active is not None else self._encode_up_to_roots(round.slots))[:, None]
            first = round.positions[:, None].to(self.model.device) + 1
            while True:
                logits = self.logits(hidden)
                if check.ends(logits):
                    break
                index = first.expand(-1, hidden.shape[1]) + depth * check.stride
                level = expansion.add_level(*choose(logits, expansion.count, round, index, expansion.scored))
                if level is None:
                    break
                hidden, depth = self._encode_level(level), level.depth
        tree, self._encoded_index = expansion.finish()
        self._encoded_levels = depth
        return tree

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [...,H] -> logits [...,D] of the target's first D tokens."""
        return self.model.logits(hidden)[..., : self._vocab]

    def _encode_up_to_roots(self, slots: list[int]) -> Tensor:
        """Encode all pending tokens -> hidden [B,H] at the last committed tokens."""
        behind = [slot for slot in slots if len(self._state.pending[slot]) > SHORT_CATCH_UP]
        if behind and len(slots) > 1:  # in a forward of their own, where the other slots would be padding
            self._catch_up(behind, leave=1)
        return self._catch_up(slots, leave=0)

    def _encode_pending(self, round: RoundContext) -> Tensor:
        """`_encode_up_to_roots` in one shape, for the active slots."""
        assert round.active is not None
        state, cache = self._state, self._state.cache
        cache.select(round.slots)
        tokens, counts = state.pending_tokens[round.slot_index], torch.where(round.active, state.pending_count[round.slot_index], 0)
        attention = TreeAttention.causal(cache, 2)
        hidden = self._forward(self._own_ids(tokens), attention)
        cache.keep(attention.depth, counts, in_place=True)
        last = (counts - 1).clamp(min=0)
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]

    def _catch_up(self, slots: list[int], leave: int) -> Tensor:
        """Encode the pending tokens of these slots except the last `leave` -> hidden [B,H] at the last token encoded; empty if leave > 0."""
        cache, pending = self._state.cache, self._state.pending
        cache.select(slots)
        to_encode = [pending[slot][: len(pending[slot]) - leave] for slot in slots]
        last = encode_tokens(self.model, cache, to_encode, self._forward, self.chunk)
        for slot, ids in zip(slots, to_encode, strict=True):
            del pending[slot][: len(ids)]
        return torch.stack([hidden for hidden in last if hidden is not None]) if leave == 0 else torch.empty(0)

    def _read(self, tokens: list[int], first: bool = False) -> list[int]:
        """The draft model's ids for committed tokens, on the host; first: the text begins with them."""
        return [min(token, self.model.vocab_size - 1) for token in tokens] if self._fewer_tokens else list(tokens)

    def _own_ids(self, ids: Tensor) -> Tensor:
        """A target may have ids, of padding or special tokens, that the draft model lacks; it reads its own last id there."""
        return ids.clamp(max=self.model.vocab_size - 1) if self._fewer_tokens else ids

    def _forward(self, ids: Tensor, attention: TreeAttention) -> Tensor:
        """Its own ids [B,N] after the cached tokens -> hidden [B,N,H]."""
        positions = attention.positions().clamp(max=self.model.max_positions - 1)
        return self.model.forward(ids, position_ids=positions, cache=self._state.cache, tree=attention).hidden

    def _encode_level(self, level: CurrentLevel) -> Tensor:
        """A level of the tree -> hidden [B,F,H]."""
        cache = self._state.cache
        # The cache ends with the root, so a node of depth d has position length + d − 1.
        depth = torch.full_like(level.tokens, level.depth - 1)
        key_depth = (level.key_depth - 1).expand(len(depth), -1)
        hidden = self._forward(self._own_ids(level.tokens), TreeAttention(cache, depth, level.visible, key_depth, level.all_visible))
        cache.draft(level.tokens.shape[1])
        return hidden

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] -> the draft model's hidden states [S,H] along them. The target's `out` is not used."""
        with torch.inference_mode():
            return self.model.forward(self._own_ids(ids[None]).to(self.model.device)).hidden[0]

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,H], consecutive positions roots [R] -> [R,K,D]: entry (r,k) ranks token roots[r]+k+1, given all tokens before it."""
        return logits_along(self.logits, features, roots, self.depth_limit)

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        """Keep the KV of accepted nodes; committed tokens without KV become pending."""
        if round.static_shape:
            self._accept_static_shape(round, tree, verdict)
            return
        results = verdict.on_host(tree)
        encoded_index, self._encoded_index = self._encoded_index, None
        counts = [0] * len(results)
        if encoded_index is not None:
            # No further than this tree was encoded: beside a look-up, verdicts are as wide as the look-up's trees.
            path = verdict.path[:, 1 : self._encoded_levels + 1].to(encoded_index.device)
            accepted, count = _encoded_path(encoded_index, path)
            counts = [min(result.length - 1, self._encoded_levels) for result in results] if self._chain else count.tolist()
            self._state.cache.keep(accepted, count, counts, in_place=self._chain)
        for slot, result, count in zip(round.slots, results, counts, strict=True):
            self._state.pending[slot] += self._read(result.tokens[count:])

    @torch.inference_mode()
    def _accept_static_shape(self, round: RoundContext, tree: DraftTree, verdict: Verdict) -> None:
        state, cache = self._state, self._state.cache
        encoded_index, self._encoded_index = self._encoded_index, None
        cache.static_shape = True  # prompts may have been encoded since the last proposal
        if encoded_index is None:  # nothing was proposed in this round: the pending tokens must not become more than two
            with tree_attention(self.model.model):
                self._encode_pending(round)
            encoded_index = torch.full_like(tree.tokens, -1)
        accepted, count = _encoded_path(encoded_index, verdict.path[:, 1:])
        if accepted.shape[1]:
            cache.keep(accepted, count, in_place=self._chain)
        deepest = tree.tokens.gather(1, verdict.path.amax(1, keepdim=True).clamp(min=0))[:, 0]
        behind = verdict.length - 1 - count  # 1 where the last accepted node was not encoded
        pending = torch.stack((torch.where(behind > 0, deepest, verdict.next_token), verdict.next_token), 1)
        moved = verdict.length > 0
        state.pending_tokens[round.slot_index] = torch.where(moved[:, None], pending, state.pending_tokens[round.slot_index])
        state.pending_count[round.slot_index] = torch.where(moved, behind + 1, state.pending_count[round.slot_index])

    def resumable(self, slot: int, count: int) -> int:
        return count

    def keep(self, slots: list[int]) -> TreeCache | None:
        self._state.resumable_slots.update(slots)
        return self._state.cache

    @torch.inference_mode()
    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        """Encode what the cache lacks of prompt[:-1]. With a window a prompt that is longer is encoded anew: no more than the window is."""
        state = self._state
        cache, bounds = state.cache, state.cache.length_bounds()
        cached = [min(count, bounds[slot]) for slot, count in zip(slots, reused, strict=True)]
        evicted = isinstance(cache, WindowCache) and not all(map(cache.reaches, slots, cached))
        if evicted or any(left_out(cache, [len(prompt) for prompt in prompts])) or not state.resumable_slots.issuperset(slots):
            self.start(slots, prompts, out)
            return
        state.resumable_slots.difference_update(slots)
        cache.static_shape = False
        cache.cut(slots, cached)
        state.pending.update((slot, self._read(prompt[count:])) for slot, prompt, count in zip(slots, prompts, cached, strict=True))
        self._encode_prompts(slots, prompts)

    def drop(self, slots: list[int]) -> None:
        self._state.resumable_slots.difference_update(slots)
        for slot in slots:
            self._state.pending.pop(slot, None)
        self._state.pending_count.index_fill_(0, index_tensor(slots, self.device), 0)
        self._state.cache.reset(slots)


def encode_tokens(
    model: Target, cache: TreeCache, tokens: list[list[int]], forward: Callable[[Tensor, TreeAttention], Tensor], chunk: int
) -> list[Tensor | None]:
    """Encode tokens of the B selected rows of a draft model's cache after the cached ones.

    Args:
        model: the draft model.
        cache: its cache.
        tokens: of each row; rows may have fewer than others, or none.
        forward: (ids [B,N], attention) -> hidden [B,N,H].
        chunk: most tokens of a row in one forward.

    Returns:
        Of each row the hidden state [H] of its last token, None where it has none.
    """
    last: list[Tensor | None] = [None] * len(tokens)
    start, longest = 0, max(len(ids) for ids in tokens)
    while start < longest:
        # A slot with few tokens may be near the end of its cache while another slot has many.
        width = min(longest - start, chunk, cache.capacity - cache.max_length)
        parts = [ids[start : start + width] for ids in tokens]
        ids = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=model.device)
        with tree_attention(model.model):
            hidden = forward(ids, TreeAttention.causal(cache, width))
        cache.advance([len(part) for part in parts])
        for row, part in enumerate(parts):
            if part:
                last[row] = hidden[row, len(part) - 1]
        start += width
    return last


@torch.inference_mode()
def logits_along(logits: Callable[[Tensor], Tensor], features: Tensor, roots: Tensor, depth: int) -> Tensor:
    """features [S,H] of a text, consecutive positions roots [R] -> [R,depth,D]: entry (r,k) is of position roots[r]+k, or of the last one."""
    at = (roots[:, None] + torch.arange(depth, device=roots.device)).clamp(max=len(features) - 1)
    first, last = int(at.min()), int(at.max())
    return logits(features[first : last + 1])[at - first]


def _encoded_path(encoded_index: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each node of path [B,K] among the encoded nodes [B,K], −1 where it was not encoded, and how many were encoded [B].

    A node with accepted children was encoded: only the last node of a path can lack its KV.
    """
    index = torch.where(path < 0, -1, encoded_index.gather(1, path.clamp(min=0)))
    return index, (index >= 0).sum(1)
