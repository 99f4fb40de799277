"""P-EAGLE: EAGLE-3 whose later drafts come from the same forward (AWS 2026; names of tensors as in speculators and vLLM).

The network is EAGLE-3's. A pair that EAGLE-3 would draft with its own output and the token drafted before has a mask instead of both: the
embedding of `mask_token_id` for the token, and `mask_hidden`, learned, for the target's taps. K − 1 such pairs follow the last real one, each
at the next position, in one forward; a pair sees all real ones and the masks before it. So K tokens cost one forward of the network,
and no draft reads another.

Letters: B rows · S positions · n pairs of a forward · M masks of a text · K draft steps · T taps · V target
vocabulary · H the target's hidden size · W the drafter's.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import RoundContext, TargetOutput
from draftsmith.inference.expand import TreeSpec
from draftsmith.inference.level_heads import draft_marginals
from draftsmith.inference.tree import DraftTree
from draftsmith.models.eagle import EagleConfig, EagleModel
from draftsmith.models.feature_drafter import at_last
from draftsmith.models.mask_rows import MaskRows, attend_masks, mask_rows
from draftsmith.models.training_time_test import attend, blocks, shift_left


class PeagleConfig(EagleConfig):
    """Sizes of the drafter, those of EAGLE-3.

    Attributes:
        mask_token_id: token of the target whose embedding stands for a token that is not there yet.
    """

    model_type = "peagle"
    mask_token_id: int = 0

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        if self.version != 3 or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"got version {self.version} and mask_token_id {self.mask_token_id}; P-EAGLE is of version 3, its mask a token of the "
                f"target, 0 to {self.vocab_size - 1}"
            )

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        sizes = {"num_heads": 4, "num_kv_heads": 2, "steps": 4, "taps": [0, 1]}
        return {"default": sizes, "two layers": sizes | {"num_layers": 2, "fc_norm": True, "mask_token_id": 3, "taps": [1]}}


class PeagleModel(EagleModel):
    """EAGLE-3, and what stands for features that are not there yet."""

    can_stop = recurrent = False  # all levels come from one forward
    config_class = PeagleConfig
    config: PeagleConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: PeagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.taps or ()) * config.hidden_size))
        init.normal_(self.mask_hidden)  # as large as a feature: norms of nothing would have steep gradients
        self.post_init()

    def mask_pairs(self, rows: int, count: int) -> tuple[Tensor, Tensor]:
        """The feature [B,count,W] and the tokens [B,count] of masked pairs."""
        mask = self.get_parameter("mask_hidden")
        taps = mask.view(1, 1, len(self.taps), -1)
        feature = self.feature_of(TargetOutput(taps[:, :, 0], taps))
        tokens = torch.full((rows, count), self.config.mask_token_id, device=mask.device)
        return feature.expand(rows, count, -1), tokens

    def states_along(self, feature: Tensor, ids: Tensor, positions: Tensor, document: Tensor, rows: MaskRows) -> tuple[Tensor, Tensor]:
        """Draft along a text: step 0 at all positions, the others at masks behind some of them.

        Args:
            feature: the target's features [B,S,W].
            ids, positions, document: [B,S], the numbers of documents in runs.
            rows: the masks behind pairs, M of a sequence.

        Returns:
            Outputs [B,S,W] of the pairs, and [B,M,W] of the masks. The pair at p predicts token p + 2, its mask at level i token p + 2 + i.
        """
        keys: list[tuple[Tensor, Tensor]] = []
        mask = blocks(document, len(ids), ids.shape[1], document.device)

        def among_pairs(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append((key, value))
            return attend(query, [key], [value], document, mask=mask)

        first = self.step(feature, shift_left(ids, 1), positions, among_pairs)

        def among_masks(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend_masks(query, keys[layer], (key, value), rows).to(query.dtype)

        if not rows.levels:
            return first, first[:, :0]
        return first, self.step(*self.mask_pairs(*rows.level.shape), positions.gather(1, rows.anchor) + rows.level, among_masks)

    # Drafting

    def drafted_positions(self, tree_spec: TreeSpec) -> int:
        """Accepted pairs, the root's included, and masks are written in one forward, also behind a slot that ran past its end."""
        return tree_spec.max_depth + self.levels_at_once(tree_spec)

    def levels_at_once(self, tree_spec: TreeSpec) -> int:
        """All levels of the tree."""
        return max(1, min(tree_spec.max_depth, self.config.steps))

    def last_outputs(self, feature: Tensor, tokens: Tensor, counts: Tensor, complete: bool) -> Tensor:
        """As the base class: pairs, and masks behind each row's last one, in one forward. The masks' keys and values are overwritten."""
        (rows, width), masks = tokens.shape, self.levels_at_once(self._state.tree_spec) - 1
        if not masks:
            return super().last_outputs(feature, tokens, counts, complete)
        mask_feature, mask_tokens = self.mask_pairs(rows, masks)
        cache = self._state.cache
        attention = TreeAttention.causal(cache, width + masks) if complete else pairs_then_masks(cache, width, masks, counts)
        read = torch.cat((feature, mask_feature), 1), torch.cat((tokens, mask_tokens), 1)
        output = self.encode(*read, attention)
        return torch.cat((at_last(output, counts), output[:, width:]), 1)

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """All levels of the tree, from what the forward of the last pair gave; the root alone where a slot has no pair yet."""
        state, tree_spec = self._state, self._state.tree_spec
        depth = min(round.depth, tree_spec.max_depth)
        if depth == 0:
            return DraftTree.root(round.last_tokens)
        output = state.last_output[round.slot_index][:, :depth]
        return self._ready(draft_marginals(tree_spec, self.spread(self.logits_of(output)), round), round)

    # Position records

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] and the target's output along them [1,S,·] -> the outputs of all steps [S,K,W]."""
        with torch.inference_mode():
            every = torch.arange(len(ids), device=ids.device)[None]
            document, masks = torch.zeros_like(every), self.config.steps - 1
            rows = mask_rows(document, every, torch.full_like(every, masks), masks * len(ids), masks)
            first, later = self.states_along(self.feature_of(out), ids[None], every, document, rows)
            return torch.cat((first[0, :, None], later[0].view(len(ids), masks, -1)), 1)


def pairs_then_masks(cache: TreeCache, width: int, masks: int, counts: Tensor) -> TreeAttention:
    """Causal attention of n pairs, of which counts[b] are row b's, and of masks that follow the last of them: padding is between, unseen."""
    index = torch.arange(width + masks, device=counts.device)
    depth = torch.where(index < width, index, index - width + counts[:, None])  # [B,n+masks]
    seen = (index >= width) | (index < counts[:, None])  # of the masks
    visible = (index <= index[:, None]) & (seen[:, None, :] | (index < width)[:, None])
    return TreeAttention(cache, depth, visible)


Config = PeagleConfig
Model = PeagleModel
