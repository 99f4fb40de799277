"""The target drafts for itself with fewer of its decoder layers: early exit (LayerSkip, Elhoushi et al. 2024, https://arxiv.org/abs/2404.16710)
and layer skipping (Draft & Verify, Zhang et al. 2023, https://arxiv.org/abs/2309.08168).

A draft forward reads the target's own KV of the committed tokens in each layer that it runs, and writes that of drafted nodes into the
positions after them, which verification overwrites. So nothing is prefilled or kept for drafting.

Verification runs all layers over all nodes. LayerSkip runs the first E over the deepest nodes, which have been through none, and then the rest
over all; where reading weights takes the time that saves nothing (SmolLM2 on a CPU, E = 10, 3 and 5 nodes: 1.07 and 1.02 of the time of all
layers over all nodes). Nor do answers then depend on how drafting rounds (`inference/exact.py`).

Letters: B rows · N tree nodes with the root · F nodes of a level · V vocabulary · K draft depth · H hidden size · S positions · R positions
that are drafted from · M positions after the committed ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.drafter import NodeOutput, RoundContext, Target, TargetOutput
from draftsmith.inference.expand import CurrentLevel, DynamicTree, TreeSpec, choose, expand
from draftsmith.inference.stopping import StopCheck, Stopping
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict

__all__ = ["SelfSpeculation", "early_exit", "skip_layers"]


CHUNK = 256  # positions of a text per forward: attention's mask has their square
ROOTS = 16  # chains that are drafted at a time along a text


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """The target's KV of a text, for `position_logits`: ids [S], and a cache that holds it as earlier levels of a draft."""

    ids: Tensor
    cache: TreeCache


class SelfSpeculation:
    """Drafts with the target, some decoder layers left out: those hand their input on. Final norm and head are the target's.

    It has no state: the target's cache has the KV that it reads, whatever earlier rounds drafted.

    Args:
        target: the target.
        skipped: the decoder layers that are left out, counted from 0.
        method: its name.
        tree_spec: of the trees.

    Raises:
        ValueError: no layer is left out, or all are, or the target has no such layer.
    """

    depth_limit = 8  # of position records: how far ahead a tree may reach
    can_stop = recurrent = True
    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, skipped: Iterable[int], method: str, tree_spec: TreeSpec | None = None) -> None:
        self.target = target
        self.skipped = frozenset(skipped)
        self.method = method
        self.tree_spec: TreeSpec = tree_spec or StaticTree.chain(4)
        self.stop: Stopping | None = None
        if not 0 < len(self.skipped) < target.num_layers or not self.skipped <= set(range(target.num_layers)):
            raise ValueError(
                f"drafter {method!r}: got layers to skip {sorted(self.skipped)}; expected some, not all, of 0 to {target.num_layers - 1}, the "
                "target's decoder layers; correct them"
            )

    @property
    def capturable(self) -> bool:
        """False with a rule that stops drafts: the host decides."""
        return self.stop is None

    @property
    def max_nodes(self) -> int:
        """Of the tree, or of what is encoded while it is drafted if that is more: the target's cache has so many positions to spare."""
        spec = self.tree_spec
        return max(spec.num_nodes, 1 + (spec.depth - 1) * spec.width) if isinstance(spec, DynamicTree) else spec.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree_spec.max_depth

    @property
    def device(self) -> torch.device:
        return self.target.device

    def bind(self, target: Target, slots: int, context: int) -> Any:
        if target is not self.target:
            raise ValueError(f"drafter {self.method!r} is layers of one target, got another target to draft for; make it anew")
        self.tree_spec = self.tree_spec.to(self.device)
        return self.tree_spec

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        pass

    def resumable(self, slot: int, count: int) -> int:
        return count

    def keep(self, slots: list[int]) -> TreeCache | None:
        pass

    def resume(self, slots: list[int], prompts: list[list[int]], reused: list[int], out: NodeOutput) -> None:
        pass

    @torch.inference_mode()
    def propose(self, round: RoundContext) -> DraftTree:
        """One level of the tree per forward, the root first."""
        cache = round.cache
        assert cache is not None, "the decoder gives its cache"
        expansion, depth, check = expand(self.tree_spec, round), 0, StopCheck(self.stop, round)
        root = torch.zeros_like(round.last_tokens)[:, None]
        itself = torch.ones_like(root, dtype=torch.bool)[:, :, None]
        with tree_attention(self.target.model), self.target.without(self.skipped):
            hidden = self._encode(cache, round.last_tokens[:, None], TreeAttention(cache, root, itself))
            while True:
                logits = self.target.logits(hidden)
                if check.ends(logits):
                    break
                index = round.positions[:, None].expand(-1, hidden.shape[1]) + 1 + depth * check.stride
                level = expansion.add_level(*choose(logits, expansion.count, round, index, expansion.scored))
                if level is None:
                    break
                hidden, depth = self._encode(cache, level.tokens, _attention(cache, level)), level.depth
        cache.select(round.slots)  # nothing is drafted any more
        return expansion.finish()[0]

    def _encode(self, cache: TreeCache, tokens: Tensor, attention: TreeAttention) -> Tensor:
        """tokens [B,F] -> hidden [B,F,H]; their KV stays in the cache after what was drafted before."""
        positions = attention.positions().clamp(max=self.target.max_positions - 1)
        hidden = self.target.forward(tokens, position_ids=positions, cache=cache, tree=attention).hidden
        cache.draft(tokens.shape[1])
        return hidden

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        pass

    def drop(self, slots: list[int]) -> None:
        pass

    @torch.inference_mode()
    def position_features(self, ids: Tensor, out: TargetOutput) -> PrefixKV:
        """ids [S] -> the target's KV of them. The target's `out` is not used."""
        length = len(ids)
        cache = TreeCache(1, length + ROOTS * self.depth_limit, self.device)
        with tree_attention(self.target.model):
            for tokens in ids.split(CHUNK):
                chunk = TreeAttention.causal(cache, len(tokens))
                self.target.forward(tokens[None], position_ids=chunk.positions(), cache=cache, tree=chunk)
                cache.advance([len(tokens)])
        cache.reset()
        return PrefixKV(ids, cache)

    @torch.inference_mode()
    def position_logits(self, features: PrefixKV, roots: Tensor, depth: int = depth_limit) -> Tensor:
        """features of a text, roots [R] -> [R,K,V]: entry (r,k) ranks token roots[r]+k+1 after tokens roots[r] … roots[r]+k as drafted nodes."""
        return torch.cat([self._chains(features, part, depth) for part in roots.split(ROOTS)])

    def _chains(self, text: PrefixKV, roots: Tensor, depth: int) -> Tensor:
        """The logits [R,K,V] along the text from each root [R]: one forward of R·K nodes, of which those of a root see each other."""
        length, cache = len(text.ids), text.cache
        steps = torch.arange(depth, device=roots.device)
        root, step = roots.repeat_interleave(depth), steps.repeat(len(roots))  # [R·K] each
        positions, committed = root + step, torch.arange(length, device=roots.device)
        chain = (root[:, None] == root) & (step <= step[:, None])  # [R·K,R·K]
        visible = torch.cat((committed < root[:, None], chain), 1)
        cache.draft(length)
        attention = TreeAttention(cache, positions[None], visible[None], torch.cat((committed, positions))[None])
        with tree_attention(self.target.model), self.target.without(self.skipped):
            hidden = self._encode(cache, text.ids[positions.clamp(max=length - 1)][None], attention)
        cache.select([0])
        return self.target.logits(hidden).view(len(roots), depth, -1)


def _attention(cache: TreeCache, level: CurrentLevel) -> TreeAttention:
    """Of the nodes of a level, which all see the root, the first of what is drafted."""
    visible = torch.cat((torch.ones_like(level.visible[:, :, :1]), level.visible), 2)
    key_depth = torch.cat((torch.zeros_like(level.key_depth[:1]), level.key_depth)).expand(len(visible), -1)
    return TreeAttention(cache, torch.full_like(level.tokens, level.depth), visible, key_depth, level.all_visible)


def early_exit(target: Target, layers: int) -> SelfSpeculation:
    """The drafter that is the target's first `layers` decoder layers, its final norm and its head (LayerSkip).

    Raises:
        ValueError: fewer than one layer, or as many as the target has.
    """
    if not 0 < layers < target.num_layers:
        raise ValueError(f"drafter 'early-exit:{layers}': expected 1 to {target.num_layers - 1} of the target's {target.num_layers} layers")
    return SelfSpeculation(target, range(layers, target.num_layers), f"early-exit:{layers}")


def skip_layers(target: Target, layers: Iterable[int]) -> SelfSpeculation:
    """The drafter that is the target without these decoder layers (Draft & Verify). Raises ValueError as SelfSpeculation does."""
    numbers = sorted(set(layers))
    return SelfSpeculation(target, numbers, f"skip:{','.join(map(str, numbers))}")
