"""Mask tokens behind many positions of a text in one forward: how drafters of one forward are trained (PARD, P-EAGLE).

A sequence has S rows of text and M mask rows. A mask row belongs to an anchor, a position a of the text; the row at level i, from 1, is at
position a + i and predicts token a + 1 + i. It sees the text of its document up to a and the rows of its anchor up to its own level,
so it computes what drafting computes after a. Rows of text see the text before them alone. All parts go through one softmax: spans of
the text (models/span_attention.py), into which a row's few mask keys are merged. There is no table of all rows by all rows.

For language models the attention is plugged into transformers under the name "mask-rows".

Letters: B sequences · S positions of text · M mask rows · A anchors · K − 1 levels · V vocabulary · W hidden size.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from draftsmith.inference.support import check_supported
from draftsmith.models.adapter import plain
from draftsmith.models.document_attention import attention_named
from draftsmith.models.span_attention import block_mask, on_spans
from draftsmith.models.training_time_test import document_starts

__all__ = ["MaskRows", "attend_masks", "check_attention", "hidden_with_masks", "mask_rows", "mask_rows_forward"]

NAME = "mask-rows"


class MaskRows(NamedTuple):
    """Where the mask rows of a batch stand: by anchor, and by level within an anchor.

    Attributes:
        anchor_index: [B,M] int64, which of the A anchors a row belongs to.
        anchor: [B,M] int64, that anchor's position in the sequence.
        level: [B,M] int64, from 1.
        levels: K − 1, the most of an anchor.
        text_spans, mask_spans: start and end of the text that each row sees, [B,S] and [B,M].
        blocks: both spans for FlexAttention on a GPU; None on a CPU.
    """

    anchor_index: Tensor
    anchor: Tensor
    level: Tensor
    levels: int
    text_spans: tuple[Tensor, Tensor]
    mask_spans: tuple[Tensor, Tensor]
    blocks: tuple[BlockMask, BlockMask] | None


def mask_rows(document: Tensor, anchors: Tensor, depths: Tensor, count: int, levels: int) -> MaskRows:
    """The rows of levels 1 … depths[b,j] of each anchor.

    Args:
        document: [B,S], the numbers of documents in runs.
        anchors: [B,A] positions in order; a position may come twice.
        depths: [B,A], at least 0; those of a sequence add up to `count`.
        count: M.
        levels: K − 1, at least every depth.
    """
    sequences, positions = document.shape
    ends = depths.cumsum(1)
    row = torch.arange(count, device=document.device).expand(sequences, -1)
    index = torch.searchsorted(ends, row.contiguous(), right=True).clamp(max=max(anchors.shape[1] - 1, 0))
    anchor, level = anchors.gather(1, index), row - (ends - depths).gather(1, index) + 1
    starts = document_starts(document, sequences, positions, document.device)
    text = starts, torch.arange(1, positions + 1, device=document.device).expand(sequences, -1).contiguous()
    masks = starts.gather(1, anchor), anchor + 1
    blocks = (block_mask(*text, positions), block_mask(*masks, positions)) if document.is_cuda and count else None
    return MaskRows(index, anchor, level, levels, text, masks, blocks)


def check_attention(model: PreTrainedModel, name: str) -> None:
    """Check that this attention computes what the model's own does.

    Raises:
        ValueError: an architecture with windows, soft-capped scores or sinks, or one that takes no attention from outside.
    """
    check_supported(model.config, model)
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windows = not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None)
    sinks = any(path.endswith("sinks") for path, _ in model.named_parameters())
    if kinds or windows or sinks or getattr(config, "attn_logit_softcapping", None):
        raise ValueError(
            f"{name}: {config.model_type!r} has windows, sinks or soft-capped scores; expected a model whose layers all attend to everything "
            "before them, such as Llama, Qwen2 or Qwen3; give another"
        )


def hidden_with_masks(model: nn.Module, ids: Tensor, positions: Tensor, rows: MaskRows, mask_token: int) -> Tensor:
    """One forward over the text and its mask rows, with gradients.

    Args:
        model: a causal LM, maybe with adapters.
        ids, positions: [B,S]; positions begin at 0 in each document.
        rows: as `mask_rows` returns them.
        mask_token: the token that all mask rows read.

    Returns:
        The last hidden states [B,S+M,W]. A token that the model lacks is read as its last one.
    """
    base = plain(model)
    ids = ids.clamp(max=len(base.get_input_embeddings().get_parameter("weight")) - 1)
    read = torch.cat((ids, torch.full_like(rows.anchor, mask_token)), 1)
    last = base.config.get_text_config().max_position_embeddings - 1  # only rows past the end of a text reach it
    at = torch.cat((positions, positions.gather(1, rows.anchor) + rows.level), 1).clamp(max=last)
    with attention_named(base, NAME):
        return base.get_decoder()(input_ids=read, position_ids=at, use_cache=False, mask_rows=rows).last_hidden_state


def mask_rows_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    mask_rows: MaskRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer. Softmax and sums are in fp32, in fp64 for an fp64 query.

    Args:
        module: the layer's attention module.
        query: [B,heads,S+M,dim].
        key, value: [B,KV heads,S+M,dim].
        attention_mask: None, since no mask is registered for this name.
        scaling: factor of the scores; dim^-½ by default.
        mask_rows: the data of this forward.

    Returns:
        ([B,S+M,heads,dim], None).
    """
    assert mask_rows is not None and attention_mask is None, "hidden_with_masks gives the rows"
    scale, text = query.shape[-1] ** -0.5 if scaling is None else scaling, mask_rows.text_spans[0].shape[1]
    blocks = mask_rows.blocks or (None, None)
    with torch.autocast(query.device.type, enabled=False):  # it would compute the scores in bf16
        context = key[:, :, :text], value[:, :, :text]
        out, _ = on_spans(query[:, :, :text], *context, *mask_rows.text_spans, scale, blocks[0])
        if query.shape[2] > text:
            own = key[:, :, text:], value[:, :, text:]
            out = torch.cat((out, attend_masks(query[:, :, text:], context, own, mask_rows, scale)), 2)
    return out.transpose(1, 2).to(value.dtype), None


def attend_masks(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], rows: MaskRows, scale: float | None = None
) -> Tensor:
    """Attention of the mask rows. Softmax and sums are in fp32, in fp64 for an fp64 query.

    Args:
        query: [B,heads,M,dim].
        context: key and value [B,kv heads,S,dim] of the text; heads is a multiple of kv heads.
        own: key and value [B,kv heads,M,dim] of the mask rows.
        rows: as `mask_rows` returns them.
        scale: factor of the scores; dim^-½ by default.

    Returns:
        [B,heads,M,dim], in the dtype of the sums.
    """
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):  # it would compute the scores in bf16
        partly, lse = on_spans(query, *context, *rows.mask_spans, factor, (rows.blocks or (None, None))[1])
        # Recomputed in the backward pass, so that the keys of each row's chain are not stored.
        merge: Any = checkpoint(
            _merge, query, *own, partly, lse, rows.level, rows.levels, factor, use_reentrant=False, preserve_rng_state=False
        )
    return merge


def _merge(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, level: Tensor, levels: int, scale: float) -> Tensor:
    """Merge each row's own key and those of its anchor before it into the text's out [B,heads,M,dim], with its lse [B,heads,M].

    Rows of an anchor follow one another, so that a row at level i sees the last i rows up to itself.
    """
    heads = key.shape[1]

    def by_row(rows: Tensor) -> Tensor:
        """[B,heads,M,·] -> [B,kv heads,M,group,·]."""
        return rows.to(lse.dtype).unflatten(1, (heads, -1)).transpose(2, 3)

    def last_rows(rows: Tensor) -> Tensor:
        """[B,kv heads,M,dim] -> [B,kv heads,M,dim,K−1], the row itself at the end."""
        return F.pad(rows.to(lse.dtype), (0, 0, levels - 1, 0)).unfold(2, levels, 1)

    hidden = torch.arange(levels, device=level.device) < levels - level[..., None]  # [B,M,K−1]
    scores = (by_row(query) * scale @ last_rows(key)).masked_fill(hidden[:, None, :, None], -torch.inf)
    weights = torch.cat((by_row(lse[..., None]), scores), -1).softmax(-1)
    merged = by_row(out) * weights[..., :1] + weights[..., 1:] @ last_rows(value).mT
    return merged.transpose(2, 3).flatten(1, 2)


AttentionInterface.register(NAME, mask_rows_forward)
