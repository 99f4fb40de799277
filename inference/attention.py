"""Attention of tree nodes over a ragged cache, plugged into transformers under the name "tree".

No mask is registered for that name, so transformers gives every layer None as its mask, and the tree's data arrive in **kwargs as
`tree_attention`. Here M is the number of cache positions after the committed ones (N, and what was drafted before), and G the number of
query heads per KV head. Layers read max_length + M keys.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import repeat
from threading import RLock
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

__all__ = ["MAX_NODES", "TreeAttention", "check_supported", "own_attention", "running", "tree_attention", "tree_attention_forward"]

NAME = "tree"
MAX_NODES = 256  # the kernel's limit, for queries and for keys after the committed ones


class TreeAttention:
    """What the attention of one forward needs to know. Masks are made once and shared by the layers.

    A node sees the committed positions of its row. Of the M positions after them it sees its ancestors and itself (tree), or those up to its
    own (causal chunk). Sliding windows compare positions of tokens, length + depth, never positions in the cache.

    Args:
        cache: the cache, with the rows of the forward selected.
        depth: int64 [B,N]; 0 … N−1 for a causal chunk.
        visible: bool [B,N,M], which of the M positions each node sees; None for a causal chunk.
        key_depth: int64 [B,M], the depth of the M positions; `depth` by default.
        all_visible: the host knows that `visible` is true everywhere.
        words: `visible` packed, if it is there already.
    """

    def __init__(
        self,
        cache: TreeCache,
        depth: Tensor,
        visible: Tensor | None,
        key_depth: Tensor | None = None,
        all_visible: bool = False,
        words: Tensor | None = None,
    ) -> None:
        self.rows = cache.index  # [B]
        self.length = cache.selected_length  # [B]
        self.max_length = cache.max_length
        self.equal_lengths = cache.equal_lengths
        self.static_shape = cache.static_shape
        self.window, self.sinks, self.dropped = cache.window, cache.sinks, cache.selected_dropped  # of a drafter's cache
        self.depth = depth
        self.visible = visible
        self.key_depth = depth if key_depth is None else key_depth
        self.nodes = depth.shape[1]
        self.span = self.key_depth.shape[1]  # M
        self.all_visible = all_visible or self.span == 1
        self._masks: dict[Any, Tensor | None] = {}
        self._words = words
        self.by_position: Any = None  # `exact.KeysByPosition` in exact rounds
        # The kernel reads complete buffers, and the cache returns those in the forward that this is made for.
        self.use_kernel = cache.full_buffers = (
            visible is not None and active() and max(self.nodes, self.span) <= MAX_NODES and self.window is None
        )

    @classmethod
    def tree(cls, cache: TreeCache, tree: DraftTree) -> "TreeAttention":
        """The nodes of a tree, after the selected rows of the cache."""
        return cls(cache, tree.depth, tree.visible(), words=tree.ancestors)

    @classmethod
    def causal(cls, cache: TreeCache, count: int) -> "TreeAttention":
        """A chunk of `count` tokens, query j of a row at position length + j; queries past a row's own tokens are padding.

        In a static-shape round the chunk is a tree: the kernel reads the lengths from the device.
        """
        rows, index = len(cache.selected), torch.arange(count, device=cache.length.device)
        visible = (index[:, None] >= index).expand(rows, -1, -1) if cache.static_shape else None
        return cls(cache, index.expand(rows, count), visible)

    def words(self) -> Tensor:
        """`visible` as int64 words [B,N,⌈M/64⌉], packed once."""
        if self._words is None:
            assert self.visible is not None, "a causal chunk has no words"
            self._words = pack(self.visible)
        return self._words

    def positions(self) -> Tensor:
        """position_ids [B,N] = length + depth, and what a drafter's window dropped."""
        positions = self.length[:, None] + self.depth
        return positions if self.dropped is None else positions + self.dropped[:, None]

    def mask(self, window: int | None, copies: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Additive mask [B,1,copies·N,max_length+M], 0 or −inf; None where every query sees every key.

        window: query and key are less than `window` positions apart; None for no limit. A drafter's window counts where it is shorter;
            its sinks are seen from everywhere.
        """
        sinks = 0
        if self.window is not None and (window is None or window > self.window):
            window, sinks = self.window, self.sinks
        if window is not None and self.max_length + self.span <= window:
            window = None
        if window is None and self.equal_lengths and self.all_visible:
            return None
        key = (window, sinks, copies, dtype, device)
        if key not in self._masks:
            mask = torch.where(self._allowed(window, sinks), 0.0, -torch.inf).to(device, dtype)[:, None]
            self._masks[key] = mask.repeat(1, 1, copies, 1) if copies > 1 else mask
        return self._masks[key]

    def _allowed(self, window: int | None, sinks: int) -> Tensor:
        """bool [B,N,max_length+M]: which keys each query sees."""
        if self.equal_lengths and window is None and self.visible is not None:
            prefix = self.visible.new_ones(*self.depth.shape, self.max_length)
            return torch.cat((prefix, self.visible), -1)
        relative = torch.arange(self.max_length + self.span, device=self.length.device) - self.length[:, None]  # node j is at j
        if self.visible is None:
            key_depth = relative
            allowed = relative[:, None, :] <= self.depth[:, :, None]
        else:
            prefix, node = relative < 0, relative.clamp(0, self.span - 1)
            key_depth = torch.where(prefix, relative, self.key_depth.gather(1, node))
            seen = self.visible.gather(2, node[:, None, :].expand(-1, self.nodes, -1)) & (relative < self.span)[:, None, :]
            allowed = prefix[:, None, :] | seen
        if window is not None:
            near = self.depth[:, :, None] - key_depth[:, None, :] < window
            if self.dropped is not None:  # what was dropped is between the sinks and the other keys
                distance = (self.depth + self.dropped[:, None])[:, :, None] - key_depth[:, None, : self.sinks]
                near[:, :, : self.sinks] = (distance < window) | bool(sinks)
            allowed = allowed & near
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
    sliding_window: int | None = _UNSET,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree_attention: TreeAttention | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer, without kernels by SDPA. (`kernels.attention` has an independent reference.)

    Args:
        module: the layer's attention module.
        query: [B,heads,N,dim].
        key: [B,KV heads,keys,dim], what the cache's `update` returned.
        value: [B,KV heads,keys,dim'].
        attention_mask, position_bias: None.
        scaling: factor of the scores; dim^-½ by default.
        sliding_window: query and key are less than this many positions apart; read from the layer's config if the model does not pass it.
        softcap: scores become softcap · tanh(scores / softcap), before the mask (Gemma-2).
        s_aux: [heads], a sink logit per head that takes part in the softmax and has no value (gpt-oss).
        tree_attention: the data of this forward.

    Returns:
        ([B,N,heads,dim'], None).

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
    if tree_attention.use_kernel:
        return _by_kernel(tree_attention, query, key, value, scaling, sliding_window, softcap, s_aux), None
    assert key.shape[2] == tree_attention.max_length + tree_attention.span, "keys must come from the TreeCache of the same forward"
    manual = softcap is not None or s_aux is not None
    if tree_attention.by_position is not None:
        scored = partial(_scored, scaling=scaling, softcap=softcap, sinks=s_aux, nodes=1) if manual else None
        return tree_attention.by_position.attend(query, key, value, scaling, sliding_window, scored), None
    packed = groups > 1 and (manual or query.is_cuda or _packing_pays(nodes, groups, query.dtype))
    mask = tree_attention.mask(sliding_window, groups if packed else 1, query.dtype, query.device)
    if packed:
        query = query.reshape(batch, key.shape[1], groups * nodes, -1)
    if manual:
        out = _scored(query, key, value, mask, scaling, softcap, s_aux, nodes)
    else:
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=groups > 1 and not packed)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2), None


def _packing_pays(nodes: int, groups: int, dtype: torch.dtype) -> bool:
    """Whether a CPU is faster with the `groups` heads of a KV head as further queries of one head, for which the mask is repeated.

    One core, packed against SDPA's own handling: in float32 on an EPYC (8 heads, 2 KV heads, 600 keys) 90 against 150 us for one query, 440
    against 400 for 16; in bfloat16 on a Xeon with AMX 1.3 to 7.5 ms against 1.8 to 18 for 8 queries (six shapes, 16 layers, 300 keys), 3.0 to 15
    against 4.0 to 19 for 32, about the same for 64. For one query in bfloat16 two or three heads are faster apart (145 against 108 ms for 64 requests).
    """
    if dtype == torch.bfloat16:
        return nodes <= 32 and (nodes > 1 or groups > 3)
    return nodes <= 8


def _by_kernel(
    tree: TreeAttention,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The kernel, on the complete buffers of the cache."""
    from draftsmith.inference.kernels.attention import tree_attention

    data = (tensor.to(keys.device) for tensor in (tree.rows, tree.length, tree.depth, tree.words(), tree.key_depth))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    max_length = None if tree.static_shape else tree.max_length
    return tree_attention(query, keys, values, *data, scale=scale, window=window, softcap=softcap, sinks=sinks, max_length=max_length)


def _window(module: nn.Module) -> int | None:
    """The window of a layer whose model does not pass it on (Qwen2-MoE, Phi-MoE): the one that its mask would have used."""
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
    """query [B,KV heads,G·N,dim] -> [B,KV heads,G·N,dim'], with the softmax in float32, for soft-capping and sinks, which SDPA lacks."""
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

# Per model: the configs that its modules read, collected once. Walking the modules takes longer than a small model's forward.
_CONFIGS: "weakref.WeakKeyDictionary[PreTrainedModel, list[Any]]" = weakref.WeakKeyDictionary()
# Per model: how many contexts are open, and the setting of each config before the first. Decoders on one target may overlap.
_OPEN: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, list[Any]]]" = weakref.WeakKeyDictionary()
_RUNNING: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


@contextmanager
def tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it `model` runs with "tree" attention, and afterwards with its own. Contexts may be nested and may overlap.

    Raises:
        ValueError: naming the architecture, if it ignores the setting.
    """
    if model not in _CONFIGS:
        _CONFIGS[model] = _configs_of(model)
    configs = _CONFIGS[model]
    with running(model):
        if model not in _OPEN:
            _OPEN[model] = (0, [config._attn_implementation for config in configs])
            _set(configs, repeat(NAME))
        count, before = _OPEN[model]
        _OPEN[model] = (count + 1, before)
    try:
        yield
    finally:
        with running(model):
            count, before = _OPEN[model]
            if count > 1:
                _OPEN[model] = (count - 1, before)
            else:
                del _OPEN[model]
                _set(configs, before)


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it `model` runs with its own attention, also while another thread decodes with it; that thread's rounds wait."""
    with running(model):
        configs, own = (_CONFIGS[model], _OPEN[model][1]) if model in _OPEN else ([], [])
        current = [config._attn_implementation for config in configs]
        _set(configs, own)
        try:
            yield
        finally:
            _set(configs, current)


def running(model: nn.Module) -> AbstractContextManager[Any]:
    """The lock of a model: its forwards run one at a time, and its attention changes between them."""
    return _RUNNING.setdefault(model, RLock())


def _set(configs: list[Any], implementations: Iterable[Any]) -> None:
    for config, implementation in zip(configs, implementations, strict=False):
        config._attn_implementation = implementation


def _configs_of(model: PreTrainedModel) -> list[Any]:
    """The configs of the model's modules, outer before inner, after a check that the model heeds the setting."""
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
