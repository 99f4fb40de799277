"""EAGLE: a small decoder layer that reads the target's features and its own outputs (Li et al. 2024, 2025).

Version 1 is EAGLE-1 and -2 (https://arxiv.org/abs/2401.15077, 2406.16858): fc[embedding; feature] without bias, which engines drop, one
layer, and the target's own head. The feature is the target's last hidden state, then the layer's output.

Version 3 is EAGLE-3 (https://arxiv.org/abs/2503.01840): fc of the target's taps, a layer that reads [norm(embedding); norm(feature)] with
the feature itself as the residual, and a head of its own over a draft vocabulary. EAGLE-3.1 adds `fc_norm`, a norm of each tap before fc,
and `norm_output`: the normed output recurs. speculators' variants add `norm_before_fc`, one norm of all taps together, and
`norm_before_residual`: the first layer's residual is the normed feature.

How pairs of feature and token are decoded stands in models/feature_drafter.py.

Letters: B rows · S positions · K draft steps · T taps · V target vocabulary · D draft vocabulary · H the target's hidden size · W the
drafter's · n positions of a step.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.inference.drafter import NodeOutput, TargetOutput
from draftsmith.models import vocab
from draftsmith.models.artifact import DEEPEST
from draftsmith.models.decoder_layer import Attention, mlp, rotary
from draftsmith.models.drafter import DrafterConfig, default_paths
from draftsmith.models.feature_drafter import Attend, FeatureDrafter
from draftsmith.models.target import Target

NORMS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")  # settings of version 3


class EagleConfig(DrafterConfig):
    """Sizes of the drafter. Where a size is 0, `__post_init__` takes it from the others.

    Attributes:
        version: 1 or 3.
        taps: decoder layers of the target whose outputs version 3 reads, counted from 0.
        draft_size: W.
        intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes of the layers, as in Llama.
        draft_vocab_size: D.
        rope_theta, rms_norm_eps: as in Llama.
        fc_norm, norm_output: EAGLE-3.1.
        norm_before_fc, norm_before_residual: speculators' variants of EAGLE-3.
        steps: K at most, the steps that it was trained for.
    """

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
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    steps: int = 7

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        least = min(self.num_layers, self.num_heads, self.num_kv_heads, self.steps)
        if least < 1 or self.steps > DEEPEST:
            got = f"num_layers {self.num_layers}, num_heads {self.num_heads}, num_kv_heads {self.num_kv_heads}, steps {self.steps}"
            raise ValueError(f"got {got}; expected at least 1 of each, and at most {DEEPEST} steps")
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
        norms = [name for name in NORMS if getattr(self, name)]
        if self.version == 1 and norms:
            raise ValueError(f"EAGLE-1 has no norm of EAGLE-3 or its variants; leave out {', '.join(norms)}, or take version 3")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("got fc_norm and norm_before_fc, which norm the same taps; leave out one of them")
        if self.taps and (sorted(set(self.taps)) != list(self.taps)):
            raise ValueError(f"got taps {list(self.taps)}; expected ascending ones, each once, as engines capture them")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"got a draft vocabulary of {self.draft_vocab_size}; expected at most the target's {self.vocab_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"got {self.num_heads} heads for {self.num_kv_heads} KV heads; expected a multiple")
        if self.head_dim % 2:
            raise ValueError(f"got heads of {self.head_dim} entries; RoPE turns pairs of them: expected an even number")

    @property
    def least_tensors(self) -> int:
        return 8 * self.num_layers

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        attention = {"num_heads": 4, "num_kv_heads": 2, "steps": 4}
        three = attention | {"taps": [0, 1]}
        return {
            "1": attention | {"version": 1},
            "3": three,
            "3.1": attention | {"taps": [1], "norm_output": True},
            "3 of speculators": three | dict.fromkeys(("norm_output", "norm_before_fc", "norm_before_residual"), True),
        }


class Layer(nn.Module):
    """A Llama layer. The first of version 3 reads the embedding beside the feature; the first of version 1 has no input norm."""

    def __init__(self, config: EagleConfig, number: int) -> None:
        super().__init__()
        size = config.draft_size
        self.number, self.first = number, number == 0
        self.wide = self.first and config.version == 3
        if self.wide:
            self.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
            self.norm_before_residual = config.norm_before_residual
        if self.wide or not self.first:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size if self.wide else size, config.rms_norm_eps)
        width = config.hidden_size + size if self.wide else size
        self.self_attn = Attention(width, size, config.num_heads, config.num_kv_heads, config.head_dim)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.mlp = mlp(size, config.intermediate_size)

    def forward(self, feature: Tensor, embedding: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """feature [B,n,W], embedding [B,n,H] -> [B,n,W]."""
        x = feature
        if self.wide:
            normed = self.hidden_norm(feature)
            x = torch.cat((self.input_layernorm(embedding), normed), -1)
            feature = normed if self.norm_before_residual else feature
        elif not self.first:
            x = self.input_layernorm(feature)
        feature = feature + self.self_attn(x, rope, self.number, attend)
        return feature + self.mlp(self.post_attention_layernorm(feature))


class EagleModel(FeatureDrafter):
    """The network."""

    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, three = config.draft_size, config.version == 3
        inputs = len(config.taps or ()) if three else 2
        self.fc = nn.Linear(inputs * config.hidden_size, size, bias=False)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        if three:
            self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.taps or ())
            if config.norm_before_fc:
                self.input_norm = LlamaRMSNorm(inputs * config.hidden_size, config.rms_norm_eps)
            if config.draft_vocab_size < config.vocab_size:
                self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
                self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._vocabulary: vocab.DraftVocabulary | None = None
        self.post_init()

    @property
    def taps(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self.config.taps or ())

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def depth_limit(self) -> int:
        return self.config.steps

    @property
    def vocabulary(self) -> vocab.DraftVocabulary:
        """The draft vocabulary, checked. Raises ValueError where d2t and t2d do not map to this target's tokens."""
        if self._vocabulary is None:
            if self.config.draft_vocab_size == self.config.vocab_size:
                self._vocabulary = vocab.full(self.config.vocab_size).to(self.device)
            else:
                d2t, t2d = self.get_buffer("d2t"), self.get_buffer("t2d")
                self._vocabulary = vocab.from_tensors(d2t, t2d, self.config.vocab_size, self.config.draft_vocab_size)
        return self._vocabulary

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EagleModel":
        """nn.Module moves its tensors with this method; the draft vocabulary moves too."""
        super()._apply(fn, recurse)
        if self._vocabulary is not None:
            self._vocabulary = self._vocabulary.to(self.device)
        return self

    def check_content(self) -> None:
        _ = self.vocabulary  # raises where d2t is no map

    def init_from_target(self, target: Target) -> None:
        """Start the own head as the target's, where V = D; `take` does it for a smaller vocabulary."""
        if self.config.version == 3 and self.config.draft_vocab_size == self.config.vocab_size:
            self.take(vocab.full(self.config.vocab_size))

    @torch.no_grad()
    def take(self, vocabulary: vocab.DraftVocabulary) -> None:
        """Draft in `vocabulary`, and start the own head as the target's rows for its tokens where the hidden sizes agree."""
        if vocabulary.size < vocabulary.vocab_size:
            self.get_buffer("d2t").copy_(vocabulary.d2t)
            self.get_buffer("t2d").copy_(vocabulary.t2d)
        self._vocabulary = vocabulary.to(self.device)
        if self.config.version == 3 and self.config.draft_size == self.target.hidden_size:
            rows = self.target.head_weight[self._vocabulary.targets.to(self.target.head_weight.device)]
            self.lm_head.weight.copy_(rows.to(self.lm_head.weight.device)).mul_(self.target.head_scale)

    # The network

    def feature_of(self, out: TargetOutput | NodeOutput) -> Tensor:
        """The target's output at n positions -> features [B,n,W] in version 3, [B,n,H] in version 1."""
        dtype = self.fc.weight.dtype
        if self.config.version == 1:
            return out.hidden.to(dtype)
        assert out.taps is not None, "the decoder and the objective ask for `taps`"
        taps = out.taps.to(dtype)
        if self.config.fc_norm:
            taps = torch.stack([norm(taps[:, :, number]) for number, norm in enumerate(self.fc_norm)], 2)
        joined = taps.flatten(2)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def step(self, feature: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Pairs of feature [B,n,·] and tokens [B,n] at positions [B,n] -> output [B,n,W], before the final norm."""
        embedding = self.target.embed(tokens).to(feature.dtype)
        x = self.fc(torch.cat((embedding, feature), -1)) if self.config.version == 1 else feature
        rope = self._rope(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, embedding, rope, attend)
        return x

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def recurring(self, output: Tensor) -> Tensor:
        """A step's output [...,W] -> the feature of the next step."""
        return self.norm(output) if self.config.norm_output else output

    def before_head(self, output: Tensor) -> Tensor:
        """A step's output [...,W] -> what the head reads."""
        return self.norm(output) if self.config.version == 3 else output.to(self.target.dtype)

    def head(self) -> Tensor | Callable[[Tensor], Tensor]:
        """The head for the chunked losses: its own weight [D,W], or the target's `logits`."""
        return self.lm_head.weight if self.config.version == 3 else self.target.logits

    def logits_of(self, output: Tensor) -> Tensor:
        """A step's output [...,W] -> logits [...,D] over the draft vocabulary."""
        x = self.before_head(output)
        return self.lm_head(x) if self.config.version == 3 else self.target.logits(x)


Config = EagleConfig
Model = EagleModel
