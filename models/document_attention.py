"""Attention of packed documents on a CPU, plugged into transformers under the name "documents".

SDPA reads a dense mask of [S,S] pairs on a CPU, and multiplies all of them. Here a block of queries meets only the keys of its own document up
to the block's end, by plain matmuls: half of the pairs where a row is one document, an eighth where it is four.
Scores and softmax are in fp32; probabilities are rounded to the values' dtype before the second matmul, as in SDPA.

Letters: B rows of a batch · S positions.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

__all__ = ["attends_by_document", "attention_named", "document_attention", "document_attention_forward", "documents_of"]

NAME = "documents"
QUERIES = 64  # of one block: more waste work above the diagonal, fewer make small matmuls

Documents = list[tuple[int, int, int]]  # row, first position, position after the last


def attends_by_document(model: PreTrainedModel) -> bool:
    """Whether this attention computes what the model's own does: all layers see everything before them, through SDPA, on a CPU."""
    config: Any = model.config.get_text_config()
    full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    windows = not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None)
    return model.device.type == "cpu" and model.get_decoder().config._attn_implementation == "sdpa" and full and not windows


def documents_of(positions: Tensor) -> Documents:
    """The documents of position_ids [B,S], as transformers finds them: each begins where a position does not follow the one before it."""
    documents: Documents = []
    for row, steps in enumerate(positions.diff(dim=1)):
        edges = [0, *((steps != 1).nonzero().flatten() + 1).tolist(), positions.shape[1]]
        documents += [(row, start, end) for start, end in pairwise(edges)]
    return documents


def document_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Within it `model` runs with "documents" attention, and afterwards with the one that it had before."""
    return attention_named(model, NAME)


@contextmanager
def attention_named(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within it `model` runs with the attention that transformers has under this name, and afterwards with the one that it had before."""
    configs: list[Any] = [module.config for module in model.modules() if isinstance(getattr(module, "config", None), PretrainedConfig)]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def document_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer.

    Args:
        module: the layer's attention module.
        query: [B,heads,S,dim].
        key, value: [B,KV heads,S,dim] and [B,KV heads,S,dim'].
        attention_mask: None, since no mask is registered for this name.
        scaling: factor of the scores; dim^-½ by default.
        documents: what `documents_of` returns.

    Returns:
        ([B,S,heads,dim'], None).
    """
    assert documents is not None and attention_mask is None, "Target.forward gives the documents"
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[-1]
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled, keys = query.to(wide) * (dim**-0.5 if scaling is None else scaling), key.to(wide).mT.contiguous()
    later = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    out = value.new_empty(len(query), query.shape[2], heads, value.shape[-1])
    for row, start, end in documents:
        for first in range(start, end, QUERIES):
            last = min(first + QUERIES, end)
            count = last - first
            # The query heads of a KV head, one after the other: [KV heads, group · count, last − start].
            scores = scaled[row, :, first:last].reshape(kv_heads, -1, dim) @ keys[row, :, :, start:last]
            scores.view(heads, count, -1)[:, :, -count:].masked_fill_(later[:count, :count], -torch.inf)
            mixed = scores.softmax(-1).to(value.dtype) @ value[row, :, start:last]
            out[row, first:last] = mixed.view(heads, count, -1).transpose(0, 1)
    return out, None


AttentionInterface.register(NAME, document_attention_forward)
