"""Attention of tree nodes over a ragged cache, plugged into transformers under the name "tree".

No mask is registered for that name, so transformers hands every layer None and the data come through **kwargs as
`tree_attention`. Letters: B rows · N queries · M slots after the committed ones (N, and what was drafted before) · R = reach + M keys ·
G query heads per KV head.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from draftsmith.inference.cache import TreeCache
from draftsmith.inference.kernels import active
from draftsmith.inference.support import check_supported
from draftsmith.inference.tree import DraftTree, pack

__all__ = ["TreeAttention", "check_supported", "tree_attention", "tree_attention_forward"]

NAME = "tree"
MOST_NODES = 256  # that the kernel takes, on either side of the scores
# Up to this many queries the heads of a group go through one KV head as extra queries; beyond, the G-fold mask costs more
# than SDPA's own handling (8 query heads, 2 KV heads, 600 keys, one core: 90 against 150 us at N = 1, 440 against 400 at 16).
_PACK_BELOW = 9


class TreeAttention:
    """What one forward needs to know; its masks are made once and shared by the layers.

    A node sees the committed slots of its row and, of the M slots after them, its ancestors and itself (tree) or those up to its
    own (causal chunk). Sliding windows compare positions, length + depth, never slots.
    """

    def __init__(
        self,
        cache: TreeCache,
        depth: Tensor,
        visible: Tensor | None,
        key_depth: Tensor | None = None,
        open: bool = False,
        words: Tensor | None = None,
    ) -> None:
        """depth [B,N] int64; visible [B,N,M] bool, or None for a causal chunk, where depth is 0 … N−1; key_depth [B,M], depth by default;
        open: the host knows that visible is true everywhere; words: visible, packed, where it is known."""
        self.length = cache.selected_length  # [B]
        self.max_length = cache.max_length
        self.equal_lengths = cache.equal_lengths
        self.depth = depth
        self.visible = visible
        self.key_depth = depth if key_depth is None else key_depth
        self.nodes = depth.shape[1]
        self.span = self.key_depth.shape[1]
        self.open = open or self.span == 1
        self._masks: dict[Any, Tensor | None] = {}
        self.rows, self.max_length_bound = cache.index, None if cache.static_shape else cache.max_length
        # The kernel reads whole buffers: the cache hands them over as they are in the forward that this is made for.
        self.fused = cache.full_buffers = visible is not None and active() and max(self.nodes, self.span) <= MOST_NODES
        self._words = words

    @classmethod
    def tree(cls, cache: TreeCache, tree: DraftTree) -> "TreeAttention":
        """The nodes of a tree, after the selected rows of the cache."""
        return cls(cache, tree.depth, tree.visible(), words=tree.ancestors)

    @classmethod
    def causal(cls, cache: TreeCache, count: int) -> "TreeAttention":
        """A chunk of tokens, query j of a row at position length + j; queries past a row's own tokens are not to be read. In a graph a tree:
        kernels know the lengths from the device."""
        rows, index = len(cache.selected), torch.arange(count, device=cache.length.device)
        visible = (index[:, None] >= index).expand(rows, -1, -1) if cache.static_shape else None
        return cls(cache, index.expand(rows, count), visible)

    def words(self) -> Tensor:
        """What each node sees of the M slots, as int64 words [B,N,⌈M/64⌉]. Packed once and kept."""
        if self._words is None:
            assert self.visible is not None, "a causal chunk has no words"
            self._words = pack(self.visible)
        return self._words

    def positions(self) -> Tensor:
        """position_ids [B,N] = length + depth."""
        return self.length[:, None] + self.depth

    def mask(self, window: int | None, copies: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Additive mask [B,1,copies·N,R], 0 or −inf; None where every query sees every key.

        window: query and key less than `window` positions apart; None for no limit.
        """
        if window is not None and self.max_length + self.span <= window:
            window = None
        if window is None and self.equal_lengths and self.open:
            return None
        key = (window, copies, dtype, device)
        if key not in self._masks:
            mask = torch.where(self._allowed(window), 0.0, -torch.inf).to(device, dtype)[:, None]
            self._masks[key] = mask.repeat(1, 1, copies, 1) if copies > 1 else mask
        return self._masks[key]

    def _allowed(self, window: int | None) -> Tensor:
        """bool [B,N,R]."""
        if self.equal_lengths and window is None and self.visible is not None:
            prefix = self.visible.new_ones(*self.depth.shape, self.max_length)
            return torch.cat((prefix, self.visible), -1)
        relative = torch.arange(self.max_length + self.span, device=self.length.device) - self.length[:, None]  # [B,R]; node j is at j
        if self.visible is None:
            key_depth = relative
            allowed = relative[:, None, :] <= self.depth[:, :, None]
        else:
            prefix, node = relative < 0, relative.clamp(0, self.span - 1)
            key_depth = torch.where(prefix, relative, self.key_depth.gather(1, node))
            seen = self.visible.gather(2, node[:, None, :].expand(-1, self.nodes, -1)) & (relative < self.span)[:, None, :]
            allowed = prefix[:, None, :] | seen
        if window is not None:
            allowed = allowed & (self.depth[:, :, None] - key_depth[:, None, :] < window)
        return allowed


_UNSET: Any = object()
_WINDOWS: "weakref.WeakKeyDictionary[nn.Module, int | None]" = weakref.WeakKeyDictionary()


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = _UNSET,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree_attention: TreeAttention | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B,heads,N,dim], key [B,kv heads,R,dim], value [B,kv heads,R,dim'] -> ([B,N,heads,dim'], None).

    softcap: scores become softcap · tanh(scores / softcap), before the mask (Gemma-2). s_aux [heads]: a sink logit per head that takes
    part in the softmax and has no value (gpt-oss).

    Raises:
        ValueError: called without tree data, or with a mask or bias of the model's own.
    """
    if tree_attention is None:
        raise ValueError(
            "got no tree data for tree attention; expected target.forward(..., tree=TreeAttention); pass it, or leave the context"
        )
    if attention_mask is not None or position_bias is not None:
        name = type(module).__name__
        raise ValueError(f"got a mask or position bias from {name}; expected none; this architecture cannot be tree-verified")
    batch, heads, nodes, _ = query.shape
    groups = heads // key.shape[1]
    if sliding_window is _UNSET:
        if module not in _WINDOWS:
            _WINDOWS[module] = _window(module)  # once: reading a config is slow
        sliding_window = _WINDOWS[module]
    if tree_attention.fused:
        return _fused(tree_attention, query, key, value, scaling, sliding_window, softcap, s_aux), None
    assert key.shape[2] == tree_attention.max_length + tree_attention.span, "keys must come from the TreeCache of the same forward"
    window = sliding_window
    manual = softcap is not None or s_aux is not None
    packed = groups > 1 and (manual or nodes < _PACK_BELOW or query.is_cuda)
    mask = tree_attention.mask(window, groups if packed else 1, query.dtype, query.device)
    if packed:
        query = query.reshape(batch, key.shape[1], groups * nodes, -1)
    if manual:
        out = _scored(query, key, value, mask, scaling, softcap, s_aux, nodes)
    else:
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=groups > 1 and not packed)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2), None


def _fused(
    tree: TreeAttention,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The kernel, on the whole buffers of the cache."""
    from draftsmith.inference.kernels.attention import tree_attention

    on = keys.device
    data = (one.to(on) for one in (tree.rows, tree.length, tree.depth, tree.words(), tree.key_depth))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_attention(
        query, keys, values, *data, scale=scale, window=window, softcap=softcap, sinks=sinks, max_length=tree.max_length_bound
    )


def _window(module: nn.Module) -> int | None:
    """The window of a layer whose model does not pass it on (Qwen2-MoE, Phi-MoE): what its mask would have used."""
    config: Any = module.config
    types = getattr(config, "layer_types", None)
    if types is not None and types[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None  # 0 is how some configs say none


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    nodes: int,
) -> Tensor:
    """query [B,kv heads,G·N,dim] -> [B,kv heads,G·N,dim'], the softmax in float32, for what SDPA has no argument for."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        column = sinks.float().view(1, key.shape[1], -1, 1, 1).expand(scores.shape[0], -1, -1, nodes, -1).flatten(2, 3)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1].to(value.dtype) @ value
    return scores.softmax(-1).to(value.dtype) @ value


AttentionInterface.register(NAME, tree_attention_forward)

# Per model: the configs its modules read, found once. Walking the modules of a model takes longer than a small model's forward.
_CONFIGS: "weakref.WeakKeyDictionary[PreTrainedModel, list[Any]]" = weakref.WeakKeyDictionary()
# Per model: how many contexts hold it, and what each config had before the first: decoders on one target may overlap.
_HELD: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, list[Any]]]" = weakref.WeakKeyDictionary()


@contextmanager
def tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it `model` runs with "tree" attention; afterwards with what it had. May be nested and may overlap.

    Raises:
        ValueError: naming the architecture, if it ignores the setting.
    """
    if model not in _CONFIGS:
        _CONFIGS[model] = _find_configs(model)
    configs = _CONFIGS[model]
    if model not in _HELD:
        _HELD[model] = (0, [config._attn_implementation for config in configs])
        for config in configs:
            config._attn_implementation = NAME
    count, before = _HELD[model]
    _HELD[model] = (count + 1, before)
    try:
        yield
    finally:
        count, before = _HELD[model]
        if count > 1:
            _HELD[model] = (count - 1, before)
        else:
            del _HELD[model]
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation = implementation


def _find_configs(model: PreTrainedModel) -> list[Any]:
    """The configs of the model's modules, outer before inner, once it is known that the model heeds the setting."""
    decoder = model.get_decoder()
    before: Any = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    heeded = decoder.config._attn_implementation
    model.set_attn_implementation(before)
    if heeded != NAME:
        raise ValueError(
            f"{type(model).__name__} ignores the attention setting (it runs {heeded!r}); expected a model that uses transformers' "
            "attention interface; choose another target"
        )
    configs = {
        id(module.config): module.config for module in model.modules() if isinstance(getattr(module, "config", None), PretrainedConfig)
    }
    return list(configs.values())
