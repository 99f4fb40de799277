"""PARD: a draft model that drafts K tokens in one forward (An et al. 2025, https://arxiv.org/abs/2504.18583, version 4; AMD's checkpoints).

The draft model is an ordinary causal LM that was trained on mask tokens: K − 1 of them follow the committed tokens, and the logits at the
last committed token and at each mask draft the next K tokens. A mask reads neither a draft nor the target, so one drafter serves every
target with its tokens. The keys and values of masks are dropped after each round, and all accepted tokens are encoded in the next
forward, before its masks. Levels have one distribution each: chains, and trees over those distributions as for DFlash.

The folder is a causal LM's. Its config has `pard_token`, the mask token, under AMD's name, which vLLM reads too.

Letters: B rows · S positions · P pending tokens · K draft depth · N tree nodes with the root · V vocabulary of the target · D that of
the draft model · H hidden size of the draft model · R positions that are drafted from.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import index_tensor
from draftsmith.inference.draft_model import SHORT_CATCH_UP, DraftModel
from draftsmith.inference.drafter import RoundContext, Target, TargetOutput
from draftsmith.inference.expand import TreeSpec
from draftsmith.inference.level_heads import draft_marginals
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.artifact import MASK_TOKEN
from draftsmith.models.mask_rows import hidden_with_masks, mask_rows

__all__ = ["ParallelDraftModel"]


class ParallelDraftModel(DraftModel):
    """A language model that drafts a tree's levels all at once, behind mask tokens.

    Args:
        model: the draft model.
        tree_spec: of the trees.
        mask_token: what a mask reads.
        depth_limit: K that it was trained for; deeper trees are refused.
        chunk: tokens of a prompt per forward.

    Raises:
        ValueError: a mask token that the model lacks, or a tree that is deeper than K.
    """

    can_stop = recurrent = False  # all levels come from one forward

    def __init__(self, model: Target, tree_spec: TreeSpec, mask_token: int, depth_limit: int, chunk: int = 256) -> None:
        super().__init__(model, tree_spec, chunk)
        if not 0 <= mask_token < model.vocab_size:
            raise ValueError(
                f"got {MASK_TOKEN} {mask_token}; expected a token of the draft model, 0 to {model.vocab_size - 1}; correct its config"
            )
        if tree_spec.max_depth > depth_limit:
            raise ValueError(f"got a tree {tree_spec.max_depth} deep; this parallel draft model drafts {depth_limit} at most; cut the tree")
        self.mask_token, self.depth_limit = mask_token, depth_limit

    @property
    def pending_limit(self) -> int:
        """All that a round commits."""
        return self.max_depth + 1

    @property
    def encoded_nodes(self) -> int:
        """The masks; before them, pending tokens of one slot are padding of another."""
        return max(SHORT_CATCH_UP, self.pending_limit) + max(0, self.max_depth - 1)

    @torch.inference_mode()
    def propose(self, round: RoundContext) -> DraftTree:
        """One forward over the pending tokens and the masks, then all levels of the tree."""
        depth = min(round.depth, self.tree_spec.max_depth)
        if depth == 0:
            return DraftTree.root(round.last_tokens)
        self._state.cache.static_shape = round.static_shape
        with tree_attention(self.model.model):
            pending = self._pending_on_device(round) if round.active is not None else self._pending_of(round.slots)
            states = self._encode(*pending, depth - 1)
        self._encoded = True
        return draft_marginals(self.tree_spec, self.logits(states), round)

    def _pending_of(self, slots: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """The pending tokens of slots [B,P], padded, and how many there are [B], on the host too. Where there are many, all but one are encoded."""
        pending = self._state.pending
        behind = [slot for slot in slots if len(pending[slot]) > max(SHORT_CATCH_UP, self.pending_limit)]
        if behind:
            self._catch_up(behind, leave=1)
        self._state.cache.select(slots)
        counts = [len(pending[slot]) for slot in slots]
        rows = [pending[slot] + [0] * (max(counts) - count) for slot, count in zip(slots, counts, strict=True)]
        for slot in slots:
            pending[slot].clear()
        return torch.tensor(rows, device=self.device), index_tensor(counts, self.device), counts

    def _pending_on_device(self, round: RoundContext) -> tuple[Tensor, Tensor, None]:
        """As `_pending_of`, in one shape; inactive slots have none."""
        assert round.active is not None
        self._state.cache.select(round.slots)
        counts = torch.where(round.active, self._state.pending_count[round.slot_index], 0)
        return self._state.pending_tokens[round.slot_index], counts, None

    def _encode(self, tokens: Tensor, counts: Tensor, host_counts: list[int] | None, masks: int) -> Tensor:
        """Encode counts[b] of tokens [B,P] and masks behind them, and keep the KV of the tokens -> hidden [B,1+masks,H] from the last token on."""
        width = tokens.shape[1] + masks
        index = torch.arange(width, device=tokens.device).expand(len(tokens), -1)
        ids = torch.cat((self._own_ids(tokens), torch.full_like(index[:, :masks], self.mask_token)), 1)
        ids = torch.where(index < counts[:, None], ids, self.mask_token)
        attention = TreeAttention.causal(self._state.cache, width)
        hidden = self._forward(ids, attention)
        self._state.cache.keep(index[:, : tokens.shape[1]], counts, host_counts, in_place=True)
        drafting = (counts - 1).clamp(min=0)[:, None] + index[:, : 1 + masks]
        return hidden.gather(1, drafting[..., None].expand(-1, -1, hidden.shape[2]))

    @torch.inference_mode()
    def _accept_static_shape(self, round: RoundContext, tree: DraftTree, verdict: Verdict) -> None:
        """All committed tokens become pending: what was encoded of the drafts were masks."""
        state = self._state
        state.cache.static_shape = True  # prompts may have been encoded since the last proposal
        if not self._encoded:  # nothing was proposed in this round: pending tokens must not become more than there is space for
            with tree_attention(self.model.model):
                self._encode(*self._pending_on_device(round), 0)
        self._encoded = False
        path = verdict.path
        tokens = tree.tokens.gather(1, path.clamp(min=0))[:, 1:]
        tokens = torch.cat((tokens, verdict.next_token[:, None]), 1)
        last = torch.arange(path.shape[1], device=path.device) == (verdict.length - 1)[:, None]
        tokens = torch.where(last, verdict.next_token[:, None], tokens)
        before, moved = state.pending_tokens[round.slot_index], verdict.length > 0
        tokens = torch.cat((tokens, before[:, tokens.shape[1] :]), 1)
        state.pending_tokens[round.slot_index] = torch.where(moved[:, None], tokens, before)
        state.pending_count[round.slot_index] = torch.where(moved, verdict.length, state.pending_count[round.slot_index])

    def bind(self, target: Target, slots: int, context: int) -> Any:
        self._encoded = False
        return super().bind(target, slots, context)

    # Position records

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] -> hidden states [S,K,H]: of each position, and of the masks behind it. The target's `out` is not used."""
        with torch.inference_mode():
            every, masks = torch.arange(len(ids), device=self.device)[None], self.depth_limit - 1
            depths = torch.full_like(every, masks)
            rows = mask_rows(torch.zeros_like(every), every, depths, len(ids) * masks, max(masks, 1))
            hidden = hidden_with_masks(self.model.model, ids[None].to(self.device), every, rows, self.mask_token)[0]
            return torch.cat((hidden[: len(ids), None], hidden[len(ids) :].unflatten(0, (len(ids), masks))), 1)

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,K,H], roots [R] -> [R,K,D]: the masks behind the root."""
        with torch.inference_mode():
            return self.logits(features[roots])
