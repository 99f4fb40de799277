"""A Llama and drafters with random weights, made on the device: nothing is downloaded and nothing is trained."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.eval.benchmarks.kernels import Sizes
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import Plain, RoundContext
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.tree import DraftTree, StaticTree, indices
from draftsmith.models import vocab
from draftsmith.models.drafter import DrafterModel, default_paths, new_drafter
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import usual_taps

PEAK = 10.0  # standard deviation of the EAGLE head's logits: peaked distributions, so that its dynamic trees get as deep as a trained one's
POSITIONS = 131072  # of Llama 3.1


def llama(sizes: Sizes, device: torch.device) -> Target:
    """A Llama of these sizes."""
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.heads * sizes.dim,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        max_position_embeddings=POSITIONS,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    torch.manual_seed(0)
    with device:  # on a CPU so many draws take minutes
        model = AutoModelForCausalLM.from_config(config, dtype=sizes.dtype)
    return Target.wrap(model, name="a Llama with random weights")


class BareTree(Plain):
    """A drafter without a network: its round costs only the verification of its tree."""

    def __init__(self, nodes: int, depth: int, device: torch.device) -> None:
        self.tree_spec = _static_tree(nodes, depth).to(device)
        self.max_nodes, self.max_depth = nodes, self.tree_spec.max_depth

    def propose(self, round: RoundContext) -> DraftTree:
        ranks = indices(self.tree_spec.width, round.last_tokens.device)  # small numbers, which are tokens of every vocabulary
        return self.tree_spec.tree(round.last_tokens, ranks.expand(len(round.last_tokens), self.max_depth, -1))


def _static_tree(nodes: int, depth: int) -> StaticTree:
    return StaticTree.from_paths(default_paths(min(depth, nodes - 1), nodes - 1))


def medusa(target: Target, sizes: Sizes) -> DrafterModel:
    """Four Medusa heads, each with an output layer of its own, and a static tree."""
    drafter = new_drafter("medusa", target, dtype=sizes.dtype, num_heads=4)
    drafter.tree_spec = _static_tree(sizes.nodes[-1], 4)
    return _randomise(drafter)


def eagle(target: Target, sizes: Sizes, depth: int = 0) -> DrafterModel:
    """EAGLE-3 with a quarter of the vocabulary and the published taps, and a dynamic tree of width 8. depth: 0 takes that of `sizes`."""
    layers, draft_vocab_size = target.num_layers, target.vocab_size // 4
    taps = sorted({min(max(tap, 0), layers - 1) for tap in usual_taps(layers)})
    drafter: Any = new_drafter(
        "eagle",
        target,
        dtype=sizes.dtype,
        version=3,
        taps=taps,
        steps=7,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        intermediate_size=sizes.mlp,
        draft_vocab_size=draft_vocab_size,
    )
    drafter.take(vocab.choose(torch.ones(target.vocab_size), draft_vocab_size))
    drafter.tree_spec = DynamicTree(depth or sizes.depth, 8, sizes.nodes[-1])
    return _randomise(drafter)


@torch.no_grad()
def _randomise(drafter: DrafterModel) -> DrafterModel:
    """Random weights under which activations keep their size."""
    for name, parameter in drafter.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5 * (PEAK if name == "lm_head.weight" else 1.0))
    return drafter.eval().requires_grad_(False)


def random_cache(target: Target, sizes: Sizes, context: int, extra: int) -> TreeCache:
    """A cache of one row with random keys and values of `context` tokens, written as a prefill writes them, and space for `extra` more."""
    cache, shape = TreeCache(1, context + extra, target.device), (1, sizes.kv_heads, context, sizes.dim)
    for layer in range(target.num_layers):
        keys, values = (torch.randn(shape, dtype=sizes.dtype, device=target.device) for _ in range(2))
        cache.update(keys, values, layer)
    cache.advance([context])
    return cache
