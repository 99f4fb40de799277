"""EAGLE: a small decoder layer that reads the target's features and its own (Li et al. 2024, 2025).

EAGLE-1 and -2 (https://arxiv.org/abs/2401.15077, 2406.16858; version 1): fc[embedding; feature] without bias, which engines drop, one
layer, the target's own head; the feature is the target's last hidden state, then the layer's output. EAGLE-3 (https://arxiv.org/abs/
2503.01840; version 3): fc of the target's taps, a layer that reads [norm(embedding); norm(feature)], the residual being the feature itself,
a head of its own over a draft vocabulary. EAGLE-3.1: `fc_norm`, a norm of each tap before fc, and `norm_output`, the normed output recurs.

Pair i is (feature after token i, embedding of token i+1) at position i; it predicts token i+2. In decoding, accepted pairs are encoded
anew from the target's features, and what was drafted from predicted ones is forgotten.

Letters: B rows · S positions · F nodes of a level · N tree nodes · K draft steps · T taps · V vocabulary · D draft vocabulary · H the target's
hidden size · W the drafter's.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from draftsmith.inference.attention import TreeAttention, tree_attention_forward
from draftsmith.inference.cache import TreeCache, placed
from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput, tensor_addresses
from draftsmith.inference.expand import TreeSpec, choose, grow
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict
from draftsmith.models import vocab
from draftsmith.models.context_parallel import SINGLE_RANK, ContextParallel
from draftsmith.models.drafter import DrafterConfig, DrafterModel, default_paths, same_layout
from draftsmith.models.target import Target
from draftsmith.models.training_time_test import attend, blocks, shift_left

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, query [B,heads,n,dim], key, value [B,kv heads,n,dim] -> [B,heads,n,dim]


class EagleConfig(DrafterConfig):
    """version 1 or 3 · taps: decoder layers that version 3 reads (their outputs, counted from 0) · draft_size W, with the sizes of the
    layers · draft_vocab_size D · steps: K at most, how deep it was trained."""

    model_type = "eagle"
    version: int = 3
    taps: list | None = None
    draft_size: int = 0
    intermediate_size: int = 0
    num_layers: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 0
    draft_vocab_size: int = 0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    fc_norm: bool = False
    norm_output: bool = False
    steps: int = 7

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        self.draft_size = self.draft_size or self.hidden_size
        self.head_dim = self.head_dim or self.draft_size // self.num_heads
        self.intermediate_size = self.intermediate_size or 4 * self.draft_size
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        if self.tree is None:
            self.tree = default_paths(min(4, self.steps))
        if self.version not in (1, 3):
            raise ValueError(f"got EAGLE version {self.version}; expected 1 (EAGLE-1, EAGLE-2) or 3 (EAGLE-3, 3.1)")
        if self.version == 3 and not self.taps:
            raise ValueError("EAGLE-3 reads taps of the target; got none; name them, for example eagle.taps=[1,15,28]")
        if self.version == 1 and (self.draft_size != self.hidden_size or self.draft_vocab_size != self.vocab_size or self.taps):
            raise ValueError("EAGLE-1 uses the target's own head: its size and vocabulary are the target's, and it reads no taps")
        if self.version == 1 and (self.fc_norm or self.norm_output):
            raise ValueError("EAGLE-1 has no norm to put before fc or on what recurs; leave out fc_norm and norm_output, or take version 3")
        if self.taps and (sorted(set(self.taps)) != list(self.taps)):
            raise ValueError(f"got taps {list(self.taps)}; expected ascending ones, each once, as engines capture them")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"got a draft vocabulary of {self.draft_vocab_size}; expected at most the target's {self.vocab_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"got {self.num_heads} heads for {self.num_kv_heads} KV heads; expected a multiple")
        if self.head_dim % 2:
            raise ValueError(f"got heads of {self.head_dim} entries; RoPE turns pairs of them: expected an even number")

    def block(self) -> LlamaConfig:
        """The sizes of its layers, as transformers' Llama modules read them."""
        return LlamaConfig(
            hidden_size=self.draft_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
        )


class Attention(nn.Module):
    """Projections of a Llama attention whose input may be wider than its output."""

    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        self.dim = config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * self.dim, config.draft_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """x [B,n,·] -> [B,n,W]."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rope)
        return self.o_proj(attend(layer, query, key, value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A Llama layer; the first of version 3 reads the embedding beside the feature, that of version 1 does without its first norm."""

    def __init__(self, config: EagleConfig, number: int) -> None:
        super().__init__()
        size, block = config.draft_size, config.block()
        self.number, self.first = number, number == 0
        wide = self.first and config.version == 3
        if wide:
            self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        if wide or not self.first:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size if wide else size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size + size if wide else size)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.mlp = LlamaMLP(block)
        self.wide = wide

    def forward(self, feature: Tensor, embedding: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """feature [B,n,W], embedding [B,n,H] -> [B,n,W]."""
        x = feature
        if self.wide:
            x = torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), -1)
        elif not self.first:
            x = self.input_layernorm(feature)
        feature = feature + self.self_attn(x, rope, self.number, attend)
        return feature + self.mlp(self.post_attention_layernorm(feature))


@dataclass(slots=True, eq=False)
class Rows:
    """state [rows,W]: the output at the last pair of each row · ready: the rows that have one, begun [rows] bool the same for the device ·
    cache: KV of their pairs · shape: `given`, on the device."""

    state: Tensor
    ready: set[int]
    begun: Tensor
    cache: TreeCache
    shape: TreeSpec
    given: TreeSpec


class EagleModel(DrafterModel):
    """`feature_of` makes features of the target's output, `step` runs the layers on pairs, `logits_of` reads a step's output."""

    config_class = EagleConfig
    config: EagleConfig
    chunk = 256  # pairs of a prompt per forward

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, three = config.draft_size, config.version == 3
        width = config.hidden_size * (len(config.taps or ()) if three else 2)
        self.fc = nn.Linear(width, size, bias=False)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        if three:
            self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.taps or ())
            if config.draft_vocab_size < config.vocab_size:
                self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
                self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._vocabulary: vocab.DraftVocabulary | None = None
        self.post_init()

    @property
    def taps(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self.config.taps or ())

    @property
    def depth_limit(self) -> int:
        return self.config.steps

    @property
    def vocabulary(self) -> vocab.DraftVocabulary:
        """The draft vocabulary, checked. Raises ValueError for maps that are not of this target's tokens."""
        if self._vocabulary is None:
            if self.config.draft_vocab_size == self.config.vocab_size:
                self._vocabulary = vocab.full(self.config.vocab_size).to(self.device)
            else:
                d2t, t2d = self.get_buffer("d2t"), self.get_buffer("t2d")
                self._vocabulary = vocab.from_tensors(d2t, t2d, self.config.vocab_size, self.config.draft_vocab_size)
        return self._vocabulary

    def init_from_target(self, target: Target) -> None:
        """The own head starts as the target's, where the sizes agree; `take` gives it the rows of a smaller vocabulary."""
        if self.config.version == 3 and self.config.draft_vocab_size == self.config.vocab_size:
            self.take(vocab.full(self.config.vocab_size))

    @torch.no_grad()
    def take(self, vocabulary: vocab.DraftVocabulary) -> None:
        """Draft in `vocabulary`; the own head starts as the target's rows for its tokens."""
        if vocabulary.size < vocabulary.vocab_size:
            self.get_buffer("d2t").copy_(vocabulary.d2t)
            self.get_buffer("t2d").copy_(vocabulary.t2d)
        self._vocabulary = vocabulary.to(self.device)
        if self.config.version == 3 and self.config.draft_size == self.target.hidden_size:
            rows = self.target.head_weight[self._vocabulary.targets.to(self.target.head_weight.device)]
            self.lm_head.weight.copy_(rows.to(self.lm_head.weight.device)).mul_(self.target.head_scale)

    def attach(self, target: Target) -> "EagleModel":
        """As the base class, and every tap must be one of the target's layers."""
        wrong = [tap for tap in self.taps if not 0 <= tap < target.num_layers]
        if wrong:
            raise ValueError(
                f"this EAGLE drafter reads taps {list(self.taps)}; target {target.identity.name!r} has layers 0..{target.num_layers - 1}: "
                f"{wrong} are not of it"
            )
        return super().attach(target)

    # The network

    def feature_of(self, out: TargetOutput | NodeOutput) -> Tensor:
        """The target's output at n positions -> features [B,n,W] (version 3), or [B,n,H] (version 1)."""
        dtype = self.fc.weight.dtype
        if self.config.version == 1:
            return out.hidden.to(dtype)
        assert out.taps is not None, "the decoder and the objective ask for `taps`"
        taps = out.taps.to(dtype)
        if self.config.fc_norm:
            taps = torch.stack([norm(taps[:, :, number]) for number, norm in enumerate(self.fc_norm)], 2)
        return self.fc(taps.flatten(2))

    def step(self, feature: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Pairs of feature [B,n,·] and tokens [B,n] at positions [B,n] -> output [B,n,W], before the last norm."""
        embedding = self.target.embed(tokens).to(feature.dtype)
        x = self.fc(torch.cat((embedding, feature), -1)) if self.config.version == 1 else feature
        rope = self._rope(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, embedding, rope, attend)
        return x

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [B,n] -> cos and sin [B,n,dim]. Made each time in fp32: a buffer would be rounded with the weights."""
        dim = self.config.head_dim
        frequency = self.config.rope_theta ** -(torch.arange(0, dim, 2, device=positions.device) / dim)
        angle = (positions[..., None] * frequency).repeat(1, 1, 2)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def recurring(self, output: Tensor) -> Tensor:
        """What of a step's output [...,W] is the next step's feature."""
        return self.norm(output) if self.config.norm_output else output

    def before_head(self, output: Tensor) -> Tensor:
        """A step's output [...,W] -> what the head reads."""
        return self.norm(output) if self.config.version == 3 else output.to(self.target.dtype)

    def head(self) -> Tensor | Callable[[Tensor], Tensor]:
        """The head: own weight [D,W], or the target's `logits`."""
        return self.lm_head.weight if self.config.version == 3 else self.target.logits

    def logits_of(self, output: Tensor) -> Tensor:
        """A step's output [...,W] -> logits [...,D] over the draft vocabulary."""
        x = self.before_head(output)
        return self.lm_head(x) if self.config.version == 3 else self.target.logits(x)

    def unroll(
        self,
        feature: Tensor,
        ids: Tensor,
        positions: Tensor,
        document: Tensor,
        steps: int,
        checkpointing: bool = False,
        context: ContextParallel = SINGLE_RANK,
    ) -> list[Tensor]:
        """Training-time test (Li et al. 2025, §3.1): `steps` outputs [B,n,W] along the text itself, every position at once.

        Step k at row p reads token p+1+k and its own output of the step before (at first the target's feature, [B,n,·]), sees the target's
        features up to row p and its own of steps 1 … k at that row, and predicts token p+2+k. Rows whose tokens are of another document
        are not to be read. ids, positions and document are [B,S]; the n rows are those of `context`, elsewhere n = S.
        """
        here = context.part(ids.shape[1])
        keys: list[list[Tensor]] = [[] for _ in self.layers]
        values: list[list[Tensor]] = [[] for _ in self.layers]

        document = document[:, : here.stop]
        mask = blocks(document, len(ids), here.stop, document.device, here.start)
        outputs = []
        for k in range(steps):
            # Those of earlier steps are arguments, so that a checkpoint knows what flows back to them.
            held = [(list(one), list(other)) for one, other in zip(keys, values, strict=True)]

            def run(feature: Tensor, k: int = k, held: list[tuple[list[Tensor], list[Tensor]]] = held) -> tuple[Tensor, ...]:
                made: list[Tensor] = []

                def diagonal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                    if k == 0:  # of later steps a row sees its own alone
                        key, value = context.upto(key), context.upto(value)
                    made.extend((key, value))
                    return attend(query, [*held[layer][0], key], [*held[layer][1], value], document, mask=mask)

                return self.step(feature, shift_left(ids, k + 1)[:, here], (positions + k)[:, here], diagonal), *made

            output, *made = checkpoint(run, feature, use_reentrant=False) if checkpointing else run(feature)
            for number in range(len(self.layers)):
                keys[number].append(made[2 * number])
                values[number].append(made[2 * number + 1])
            outputs.append(output)
            feature = self.recurring(output)
        return outputs

    # Position records

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] and the target's output along them [1,S,·] -> the outputs of all steps [S,K,W]."""
        with torch.inference_mode():
            positions, document = torch.arange(len(ids), device=ids.device)[None], torch.zeros_like(ids)[None]
            return torch.cat(self.unroll(self.feature_of(out), ids[None], positions, document, self.depth_limit)).transpose(0, 1)

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,K,W], consecutive roots [R] -> [R,K,V], −inf outside the draft vocabulary: pair root − 1 is the last of known features."""
        with torch.inference_mode():
            return self._spread(self.logits_of(features[roots - 1]))

    def _spread(self, logits: Tensor) -> Tensor:
        return logits if self.vocabulary.size == self.config.vocab_size else self.vocabulary.spread(logits)

    # The Drafter protocol

    def bind(self, target: Target, rows: int, context: int) -> Any:
        """Attach the target and allocate KV for `context` pairs and a round's drafts in each row, where there is none that fits."""
        self.attach(target)
        trained = (self.config.training or {}).get("positions")
        if trained and context > trained:
            warnings.warn(
                f"decoding up to {context} positions with an EAGLE drafter trained on {trained}: beyond them it may accept little",
                stacklevel=2,
            )
        shape = self.tree_spec.to(target.device)
        drafted = sum(level.nodes for level in shape.levels()[1:]) if isinstance(shape, StaticTree) else (shape.depth - 1) * shape.width
        # A graph lets a row run a round past its end.
        capacity = context + shape.max_depth + 1 + max(drafted, shape.max_depth + 1)
        state = torch.zeros(rows, self.config.draft_size, dtype=self.fc.weight.dtype, device=target.device)
        held = self._state
        if held and held.given is self.tree_spec and held.cache.capacity >= capacity and same_layout(held.state, state):
            self.drop(list(range(rows)))
        else:
            begun = torch.zeros(rows, dtype=torch.bool, device=target.device)
            self._state = Rows(state, set(), begun, TreeCache(rows, capacity, target.device), shape, self.tree_spec)
        return self._state, tensor_addresses(self)

    @torch.no_grad()
    def start(self, rows: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """Encode the pairs of prompts [:-1] from the target's features, a chunk at a time."""
        state = self._state
        state.cache.fixed = False
        state.cache.reset(rows)
        state.ready.difference_update(rows)
        state.begun.index_fill_(0, placed(rows, state.begun.device), False)
        sizes = [len(prompt) - 1 for prompt in prompts]
        if not max(sizes):
            return
        feature = self.feature_of(out)
        tokens = pad_sequence([torch.tensor(prompt[1:], dtype=torch.int64) for prompt in prompts], batch_first=True).to(feature.device)
        for start in range(0, max(sizes), self.chunk):
            here = slice(start, start + self.chunk)
            counts = [min(max(size - start, 0), self.chunk) for size in sizes]
            self._encode(rows, feature[:, here][:, : max(counts)], tokens[:, here][:, : max(counts)], counts)

    @torch.no_grad()
    def propose(self, round: RoundContext) -> DraftTree:
        """A level of the tree per step; the root alone where a row has no pair yet."""
        state = self._state
        if state.shape.max_depth == 0:
            return DraftTree.root(round.last_tokens)
        state.cache.fixed = round.static_shape
        state.cache.select(round.slots)
        growth = grow(state.shape, round)
        output, index = state.state[round.slot_index][:, None], round.positions[:, None] + 1
        while True:
            places = index.expand(-1, output.shape[1])
            ids, scores, law = self._choose(self.logits_of(output), growth.count, round, places, growth.scored)
            frontier = growth.extend(ids, scores, law)
            if frontier is None:
                break
            feature = self.recurring(output).gather(1, frontier.above[:, :, None].expand(-1, -1, output.shape[2]))
            # The cache ends with the pair that predicts depth 1: a node of depth d is at length + d − 1.
            below = torch.full_like(frontier.tokens, frontier.depth - 1)
            key_depth = (frontier.key_depth - 1).expand(len(below), -1)
            attention = TreeAttention(state.cache, below, frontier.visible, key_depth, frontier.open)
            output = self.step(feature, frontier.tokens, attention.positions(), self._cached(attention))
            state.cache.draft(frontier.tokens.shape[1])
            index = index + 1
        tree, _ = growth.finish()
        if not round.static_shape and state.ready.issuperset(round.slots):
            return tree
        # In a graph the rows change without the host being asked.
        ready = (
            state.begun[round.slot_index]
            if round.static_shape
            else torch.tensor([row in state.ready for row in round.slots], device=tree.size.device)
        )
        return replace(tree, size=torch.where(ready, tree.size, 1), full=False, _deepest=None)

    def _choose(
        self, logits: Tensor, count: int, round: RoundContext, index: Tensor, scored: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `grow.choose`, in the target's ids. Noise is a function of those, so that drawn children need the whole vocabulary."""
        if round.sampling.children == "top":
            ids, scores, law = choose(logits, count, round, index, scored)
            return self.vocabulary.targets[ids], scores, law
        return choose(self._spread(logits), count, round, index, scored)

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
        """`_encode` in a fixed shape: counts [B] are the device's."""
        state, width = self._state, tokens.shape[1]
        state.cache.fixed = True  # prompts were encoded since, perhaps, and nothing proposed
        state.cache.select(round.slots)
        attention = TreeAttention.causal(state.cache, width)
        output = self.step(feature, tokens, attention.positions(), self._cached(attention))
        state.cache.keep(attention.depth, counts, in_place=True)
        last = output.gather(1, (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, output.shape[2]))[:, 0]
        state.state[round.slot_index] = torch.where(counts[:, None] > 0, last, state.state[round.slot_index])
        state.begun[round.slot_index] |= counts > 0

    def _encode(self, rows: list[int], feature: Tensor, tokens: Tensor, counts: list[int]) -> None:
        """Append counts[b] pairs to each of `rows`; of feature [R,n,·] and tokens [R,n] the rest is padding."""
        state = self._state
        state.cache.select(rows)
        attention = TreeAttention.causal(state.cache, tokens.shape[1])
        output = self.step(feature, tokens, attention.positions(), self._cached(attention))
        state.cache.advance(counts)
        some = [place for place, count in enumerate(counts) if count]
        index = torch.tensor([[place, counts[place] - 1, rows[place]] for place in some], device=output.device).T
        if some:
            state.state[index[2]] = output[index[0], index[1]]
            state.begun[index[2]] = True
            state.ready.update(rows[place] for place in some)

    def _cached(self, attention: TreeAttention) -> Attend:
        cache = self._state.cache

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, layer)
            out, _ = tree_attention_forward(self, query, keys, values, None, sliding_window=None, tree_attention=attention)
            return out.transpose(1, 2)

        return attend

    def drop(self, rows: list[int]) -> None:
        self._state.ready.difference_update(rows)
        self._state.begun.index_fill_(0, placed(rows, self._state.begun.device), False)
        self._state.cache.reset(rows)

    def forward(self, feature: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Any:
        """`step`."""
        return self.step(feature, tokens, positions, attend)


Config = EagleConfig
Model = EagleModel
