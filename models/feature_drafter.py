"""The bases of drafters that run a network with a KV cache on the target's features.

Pair i is (feature after token i, embedding of token i+1) at position i; it predicts token i+2. The cache keeps the pairs of accepted
tokens, made from the target's features. A `PairDrafter` drafts from the network's output at the last pair as it likes (Hydra). A
`FeatureDrafter` (EAGLE, MTP layers) goes on from its own outputs, one level of the tree per step; afterwards the KV of drafted pairs is
forgotten, and the accepted ones are encoded anew from the target's features.

A subclass adds its modules, `feature_of` and `step`; of a `FeatureDrafter` also `recurring`, `logits_of`, `vocabulary` and `num_layers`.

Letters: B rows of a round · R starting slots · S positions · n pairs of a forward · K draft steps · J levels that a pair's forward
drafts · N tree nodes · V target vocabulary · D draft vocabulary · H the target's hidden size · W the drafter's.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from draftsmith.inference.attention import TreeAttention, tree_attention_forward
from draftsmith.inference.cache import TreeCache, index_tensor
from draftsmith.inference.draft_window import SINKS, WindowCache, drafter_cache, fits, kept_positions, left_out
from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput, tensor_addresses
from draftsmith.inference.expand import TreeSpec, choose, expand
from draftsmith.inference.stopping import StopCheck
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.context_parallel import SINGLE_RANK, ContextParallel
from draftsmith.models.drafter import DrafterModel, same_layout
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import attend, blocks, shift_left
from draftsmith.models.vocab import DraftVocabulary

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, query [B,heads,n,dim], key, value [B,kv heads,n,dim] -> [B,heads,n,dim]


@dataclass(slots=True, eq=False)
class PairState:
    """What the drafter keeps between rounds.

    Attributes:
        last_output: the outputs at the last pair of each slot, [slots,J,W].
        ready_slots: the slots that have a pair, on the host.
        ready: the same on the device, [slots] bool.
        cache: keys and values of the pairs.
        tree_spec: the drafter's tree, its tensors on the target's device.
        bound_spec: the object that `tree_spec` was made from; another one needs another bind.
        resumable_slots: slots whose request has ended and may be resumed.
    """

    last_output: Tensor
    ready_slots: set[int]
    ready: Tensor
    cache: TreeCache
    tree_spec: TreeSpec
    bound_spec: TreeSpec
    resumable_slots: set[int] = field(default_factory=set)


def at_last(output: Tensor, counts: Tensor) -> Tensor:
    """output [B,n,W] -> [B,1,W] at position counts[b] − 1."""
    return output.gather(1, (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, output.shape[2]))


class PairDrafter(DrafterModel):
    """Keeps what `step` makes of the accepted pairs: all of the Drafter protocol but `propose`. The config has `draft_size` W."""

    chunk = 256  # pairs of a prompt per forward
    window: int | None = None  # the last pairs that are seen, beside the first ones (inference/draft_window.py); None for all

    @property
    def capturable(self) -> bool:
        """False with a window or with a rule that stops drafts: the host evicts, and decides."""
        return self.window is None and super().capturable

    def feature_of(self, out: TargetOutput | NodeOutput) -> Tensor:
        """The target's output at n positions -> the features [B,n,·] of their pairs."""
        raise NotImplementedError

    def step(self, feature: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layers on pairs: feature [B,n,·], tokens [B,n], positions [B,n] -> output [B,n,W]."""
        raise NotImplementedError

    def encode(self, feature: Tensor, tokens: Tensor, attention: TreeAttention) -> Tensor:
        """Write the keys and values of pairs into the cache, after the selected rows: feature [B,n,·], tokens [B,n] -> output [B,n,W]."""
        return self.step(feature, tokens, attention.positions(), self._cached(attention))

    def levels_at_once(self, tree_spec: TreeSpec) -> int:
        """J, the levels of a tree whose outputs come with the last pair: the first."""
        return 1

    def last_outputs(self, feature: Tensor, tokens: Tensor, counts: Tensor, complete: bool) -> Tensor:
        """Write the keys and values of pairs into the cache, as `encode`, for the outputs at the last pair of each row.

        Args:
            feature, tokens: [B,n,·] and [B,n], of which the first counts[b] are pairs of row b; the rest is padding.
            counts: [B]; of a row without a pair the outputs are meaningless.
            complete: the host knows that nothing is padding.

        Returns:
            [B,J,W].
        """
        return at_last(self.encode(feature, tokens, TreeAttention.causal(self._state.cache, tokens.shape[1])), counts)

    @property
    def reads_context(self) -> bool:
        """Whether `step` attends to earlier pairs. A drafter that does not is as good after texts longer than those it was trained on."""
        return True

    def drafted_positions(self, tree_spec: TreeSpec) -> int:
        """Positions of the cache that drafting with this tree takes after the accepted pairs."""
        if isinstance(tree_spec, StaticTree):
            return sum(level.nodes for level in tree_spec.levels()[1:])
        return (tree_spec.depth - 1) * tree_spec.width

    # The Drafter protocol, but for `propose`

    def bind(self, target: Target, slots: int, context: int) -> Any:
        """Attach the target and allocate KV for `context` pairs, or a window of them, and a round's drafts, unless an earlier bind's fit."""
        self.attach(target)
        trained = (self.config.training or {}).get("positions")
        if trained and context > trained and self.reads_context:
            name = self.method.upper()
            warnings.warn(
                f"decoding up to {context} positions with an {name} drafter trained on {trained}: beyond them it may accept little",
                stacklevel=2,
            )
        tree_spec = self.tree_spec.to(target.device)
        # A graph lets a slot run one round past its end.
        scratch = tree_spec.max_depth + 1 + max(self.drafted_positions(tree_spec), tree_spec.max_depth + 1)
        output = torch.zeros(slots, self.levels_at_once(tree_spec), self.config.draft_size, dtype=self.dtype, device=target.device)
        state = self._state
        fit = state and state.bound_spec is self.tree_spec and fits(state.cache, context, scratch, self.window)
        if fit and same_layout(state.last_output, output):
            self.drop([slot for slot in range(slots) if slot not in state.resumable_slots])
        else:
            ready = torch.zeros(slots, dtype=torch.bool, device=target.device)
            cache = drafter_cache(slots, context, scratch, self.window, target.device)
            self._state = PairState(output, set(), ready, cache, tree_spec, self.tree_spec)
        return self._state, tensor_addresses(self)

    @torch.no_grad()
    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """Encode the pairs of prompts [:-1] from the target's features, a chunk at a time; with a window, no more than the last one sees."""
        cache = self._state.cache
        cache.static_shape = False
        self.drop(slots)
        sizes = [len(prompt) - 1 for prompt in prompts]
        if not max(sizes):
            return
        tokens = pad_sequence([torch.tensor(prompt[1:], dtype=torch.int64) for prompt in prompts], batch_first=True).to(out.hidden.device)
        skipped, first = left_out(cache, sizes), 0
        if any(skipped):
            path = kept_positions(sizes, skipped).to(tokens.device)
            out, tokens = out.along(path), tokens.gather(1, path.clamp(min=0))
            sizes = [size - count for size, count in zip(sizes, skipped, strict=True)]
        feature = self.feature_of(out)
        if isinstance(cache, WindowCache) and any(skipped):
            self._encode(slots, feature[:, :SINKS], tokens[:, :SINKS], [min(size, SINKS) for size in sizes])
            cache.skip(skipped)
            first = SINKS
        self._encode_chunks(slots, feature, tokens, sizes, first)

    def _encode_chunks(self, slots: list[int], feature: Tensor, tokens: Tensor, sizes: list[int], first: int = 0) -> None:
        """Append sizes[r] − first pairs to each of the R slots, those from `first` on of feature [R,n,·] and tokens [R,n]."""
        cache, start = self._state.cache, first
        while start < max(sizes):
            # A resumed row of a windowed cache may be near its limit. Each chunk evicts what the window no longer sees. P-EAGLE adds J − 1 masks.
            space = cache.capacity - max(cache.length_bounds()[slot] for slot in slots) - (self._state.last_output.shape[1] - 1)
            width = max(1, min(self.chunk, space))
            counts = [min(max(size - start, 0), width) for size in sizes]
            self._encode(slots, feature[:, start : start + width], tokens[:, start : start + width], counts)
            start += width

    def resumable(self, slot: int, count: int) -> int:
        cache = self._state.cache
        enough = not isinstance(cache, WindowCache) or cache.reaches(slot, count)
        return count if enough and slot in self._state.resumable_slots else 0

    def keep(self, slots: list[int]) -> TreeCache | None:
        self._state.resumable_slots.update(slots)
        return self._state.cache

    @torch.no_grad()
    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        """Encode the pairs after the kept ones. Pair i reads token i + 1, so that reused[b] pairs read tokens that both texts have."""
        state = self._state
        state.resumable_slots.difference_update(slots)
        state.cache.static_shape = False
        state.cache.cut(slots, reused)
        rest = [torch.tensor(prompt[count + 1 :], dtype=torch.int64) for prompt, count in zip(prompts, reused, strict=True)]
        tokens = pad_sequence(rest, batch_first=True).to(out.hidden.device)
        self._encode_chunks(slots, self.feature_of(out), tokens, [len(each) for each in rest])

    @torch.no_grad()
    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        """Forget what was drafted; encode the pairs of the accepted nodes from the target's features."""
        counts = None if round.static_shape else [row.length for row in verdict.on_host(tree)]
        width = verdict.path.shape[1] if counts is None else max(counts)
        if not width:
            return
        path = verdict.path[:, :width]
        tokens = torch.cat((tree.tokens.gather(1, path.clamp(min=0))[:, 1:], verdict.next_token[:, None]), 1)
        last = torch.arange(width, device=tokens.device) == (verdict.length - 1)[:, None]
        tokens = torch.where(last, verdict.next_token[:, None], tokens)
        feature = self.feature_of(out.along(path))
        if counts is None:
            self._encode_all(round, feature, tokens, verdict.length)
        else:
            self._encode(round.slots, feature, tokens, counts)

    def _encode_all(self, round: RoundContext, feature: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """`_encode` in a static shape: counts [B] are on the device."""
        state = self._state
        state.cache.static_shape = True  # prompts may have been encoded since, and nothing proposed
        state.cache.select(round.slots)
        output = self.last_outputs(feature, tokens, counts, False)
        index = torch.arange(tokens.shape[1], device=counts.device).expand(tokens.shape)
        state.cache.keep(index, counts, in_place=True)
        state.last_output[round.slot_index] = torch.where(counts[:, None, None] > 0, output, state.last_output[round.slot_index])
        state.ready[round.slot_index] |= counts > 0

    def _encode(self, slots: list[int], feature: Tensor, tokens: Tensor, counts: list[int]) -> None:
        """Append counts[r] pairs to each of the R slots; the rest of feature [R,n,·] and tokens [R,n] is padding."""
        state = self._state
        state.cache.select(slots)
        output = self.last_outputs(feature, tokens, index_tensor(counts, tokens.device), min(counts) == tokens.shape[1])
        state.cache.advance(counts)
        rows = [row for row, count in enumerate(counts) if count]
        if rows:
            row, slot = torch.tensor([[row, slots[row]] for row in rows], device=output.device).T
            state.last_output[slot] = output[row]
            state.ready[slot] = True
            state.ready_slots.update(slots[row] for row in rows)

    def _cached(self, attention: TreeAttention) -> Attend:
        """Tree attention over this drafter's cache, as `step` calls it."""
        cache = self._state.cache

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, layer)
            out, _ = tree_attention_forward(self, query, keys, values, None, sliding_window=None, tree_attention=attention)
            return out.transpose(1, 2)

        return attend

    def _ready(self, tree: DraftTree, round: RoundContext) -> DraftTree:
        """The tree, cut to its root where a slot has no pair yet."""
        state = self._state
        if round.static_shape:  # slots change there without the host's knowledge
            return tree.only(state.ready[round.slot_index])
        if state.ready_slots.issuperset(round.slots):
            return tree
        return tree.only(torch.tensor([slot in state.ready_slots for slot in round.slots], device=tree.size.device))

    def drop(self, slots: list[int]) -> None:
        """Forget these slots."""
        self._state.resumable_slots.difference_update(slots)
        self._state.ready_slots.difference_update(slots)
        self._state.ready.index_fill_(0, index_tensor(slots, self._state.ready.device), False)
        self._state.cache.reset(slots)


class FeatureDrafter(PairDrafter):
    """Drafts from its own outputs, one step per level of the tree."""

    can_stop = True
    recurrent = True

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The draft vocabulary, on the drafter's device."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        """How many layers of `step` attend."""
        raise NotImplementedError

    def recurring(self, output: Tensor) -> Tensor:
        """A step's output [...,W] -> the feature of the next step."""
        raise NotImplementedError

    def logits_of(self, output: Tensor) -> Tensor:
        """A step's output [...,W] -> logits [...,D] over the draft vocabulary."""
        raise NotImplementedError

    def spread(self, logits: Tensor) -> Tensor:
        """logits [...,D] -> [...,V], −inf outside the draft vocabulary."""
        return logits if self.vocabulary.size == self.config.vocab_size else self.vocabulary.spread(logits)

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """One level of the tree per step; the root alone where a slot has no pair yet."""
        state = self._state
        if state.tree_spec.max_depth == 0:
            return DraftTree.root(round.last_tokens)
        state.cache.static_shape = round.static_shape
        state.cache.select(round.slots)
        expansion, check = expand(state.tree_spec, round), StopCheck(self.stop, round)
        output, index = state.last_output[round.slot_index], round.positions[:, None] + 1
        while True:
            token_index = index.expand(-1, output.shape[1])
            logits = self.logits_of(output)
            if check.ends(logits):
                break
            ids, scores, q_logits = self._choose(logits, expansion.count, round, token_index, expansion.scored)
            level = expansion.add_level(ids, scores, q_logits)
            if level is None:
                break
            feature = self.recurring(output).gather(1, level.parent_index[:, :, None].expand(-1, -1, output.shape[2]))
            # The cache ends with the pair that predicts depth 1, so that a node of depth d is at length + d − 1.
            pair_depth = torch.full_like(level.tokens, level.depth - 1)
            key_depth = (level.key_depth - 1).expand(len(pair_depth), -1)
            attention = TreeAttention(state.cache, pair_depth, level.visible, key_depth, level.all_visible)
            output = self.step(feature, level.tokens, attention.positions(), self._cached(attention))
            state.cache.draft(level.tokens.shape[1])
            index = index + check.stride
        tree, _ = expansion.finish()
        return self._ready(tree, round)

    def _choose(
        self, logits: Tensor, count: int, round: RoundContext, index: Tensor, scored: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `choose`, in the target's ids. Noise is a function of those, so that drawn children need the full vocabulary."""
        if round.sampling.children == "top":
            ids, scores, q_logits = choose(logits, count, round, index, scored)
            return self.vocabulary.targets[ids], scores, q_logits
        return choose(self.spread(logits), count, round, index, scored)

    # Training

    def training_time_test(
        self,
        feature: Tensor,
        ids: Tensor,
        positions: Tensor,
        document: Tensor,
        steps: int,
        checkpointing: bool = False,
        context: ContextParallel = SINGLE_RANK,
    ) -> list[Tensor]:
        """Draft along the text itself, from every position at once (Li et al. 2025, §3.1).

        Step k at position p reads token p+1+k and its own output of step k − 1, or at first the target's feature. It attends to the
        target's features up to position p, and to its own outputs of steps 1 … k at that position. It predicts token p+2+k. Outputs whose
        tokens belong to another document are meaningless.

        Args:
            feature: the target's features [B,n,·] at the n positions of `context`; n = S for a single rank.
            ids, positions, document: [B,S]; document numbers as `attend` takes them.
            steps: K.
            checkpointing: recompute each step in the backward pass.
            context: how positions are shared out over ranks.

        Returns:
            `steps` outputs [B,n,W].
        """
        own = context.part(ids.shape[1])
        keys: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        values: list[list[Tensor]] = [[] for _ in range(self.num_layers)]

        document = document[:, : own.stop]
        mask = blocks(document, len(ids), own.stop, document.device, own.start)
        outputs = []
        for k in range(steps):
            # Keys and values of earlier steps are arguments, so that a checkpoint knows what flows back to them.
            earlier = [(list(key), list(value)) for key, value in zip(keys, values, strict=True)]

            def run(feature: Tensor, k: int = k, earlier: list[tuple[list[Tensor], list[Tensor]]] = earlier) -> tuple[Tensor, ...]:
                new: list[Tensor] = []

                def attend_diagonal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                    if k == 0:  # of later steps a position sees its own key alone
                        key, value = context.upto(key), context.upto(value)
                    new.extend((key, value))
                    return attend(query, [*earlier[layer][0], key], [*earlier[layer][1], value], document, mask=mask)

                return self.step(feature, shift_left(ids, k + 1)[:, own], (positions + k)[:, own], attend_diagonal), *new

            output, *new = checkpoint(run, feature, use_reentrant=False) if checkpointing else run(feature)
            for number in range(self.num_layers):
                keys[number].append(new[2 * number])
                values[number].append(new[2 * number + 1])
            outputs.append(output)
            feature = self.recurring(output)
        return outputs

    # Position records

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] and the target's output along them [1,S,·] -> the outputs of all steps [S,K,W]."""
        with torch.inference_mode():
            positions, document = torch.arange(len(ids), device=ids.device)[None], torch.zeros_like(ids)[None]
            outputs = self.training_time_test(self.feature_of(out), ids[None], positions, document, self.depth_limit)
            return torch.cat(outputs).transpose(0, 1)

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,K,W], consecutive roots [R] -> [R,K,V], −inf outside the draft vocabulary. Drafting starts at pair root − 1."""
        with torch.inference_mode():
            return self.spread(self.logits_of(features[roots - 1]))

    def forward(self, feature: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As `step`."""
        return self.step(feature, tokens, positions, attend)
