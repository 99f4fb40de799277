"""Multi-token prediction: a decoder layer of the target's own kind, applied again for each draft step.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2) trains such a layer with the model; MiMo, GLM-4.5 and Qwen3-Next ship one too. FastMTP
(https://arxiv.org/abs/2509.18362) shares one layer among all K steps and fine-tunes it on the target's own answers.

A step reads fc[norm(embedding); norm(feature)] without bias: the embedding of the next token, and as the feature first the target's hidden state
after its final norm, then the layer's own output. The layer and its RoPE are those of transformers for the target's architecture, so that
biases, norms of heads, latent attention and experts are the target's. A final norm follows, and the target's head.

Layouts differ in two things beside names: MiMo has the feature before the embedding, and DeepSeek's output recurs without the final norm. Followed are
vLLM's mimo_mtp.py (0bb55d6), deepseek_mtp.py (03356f8), glm4_moe_mtp.py (028aedf) and qwen3_next_mtp.py (055e47c). vLLM puts zeros for the embedding
of the pair at position 0, models as they are trained do not, and nor does this one.

Letters: B rows · n positions of a step · K draft steps · V target vocabulary · H hidden size.
"""

import copy
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftsmith.inference.drafter import NodeOutput, TargetOutput
from draftsmith.models import vocab
from draftsmith.models.artifact import DEEPEST
from draftsmith.models.drafter import DrafterConfig, default_paths
from draftsmith.models.feature_drafter import Attend, FeatureDrafter
from draftsmith.models.model_files import UNEXPECTED, in_words
from draftsmith.models.parallel import decoder_layers

__all__ = ["KINDS", "LAYOUTS", "MtpConfig", "MtpModel", "Order", "layer_of"]

ATTENTION = "drafter"  # the name under which transformers calls `_attention`


class Order(NamedTuple):
    """What a layout says of the network.

    Attributes:
        hidden_first: fc reads [feature; embedding].
        norm_output: the output after the final norm is the feature of the next step.
    """

    hidden_first: bool
    norm_output: bool


LAYOUTS = {"mimo": Order(True, True), "deepseek": Order(False, False), "qwen3-next": Order(False, True)}
# The architectures whose layers were tried, and the layout of their checkpoints; that of those which ship none is MiMo's.
KINDS = {
    "llama": "mimo",
    "mistral": "mimo",
    "qwen2": "mimo",
    "qwen3": "mimo",
    "qwen3_moe": "mimo",
    "glm4_moe": "deepseek",
    "deepseek_v3": "deepseek",
    "qwen3_next": "qwen3-next",
}
SAME_LAYER = {"mimo": "qwen2"}
# Of a target's config: what is not of a layer, or is fixed for it.
_ELSEWHERE = (
    "vocab_size hidden_size num_hidden_layers layer_types sliding_window use_sliding_window max_window_layers pad_token_id bos_token_id "
    "eos_token_id tie_word_embeddings use_cache first_k_dense_replace mlp_only_layers decoder_sparse_step output_router_logits"
).split()


def layer_of(config: PretrainedConfig) -> dict[str, Any]:
    """The settings of a decoder layer of a target, as `MtpConfig.layer` has them.

    Raises:
        ValueError: an architecture whose layers were not tried, by name.
    """
    kind = getattr(config, "model_type", "")
    kind = SAME_LAYER.get(kind, kind)
    if kind not in KINDS:
        raise ValueError(
            f"an MTP layer is one of the target's own, and those of {kind!r} were not tried; expected one of {', '.join(KINDS)}; "
            "nearest: draftsmith train eagle with eagle.version=1"
        )
    config_class: Any = CONFIG_MAPPING[kind]
    known = {field.name for field in fields(config_class)} - {field.name for field in fields(PretrainedConfig)} - set(_ELSEWHERE)
    return {"model_type": kind} | {key: value for key, value in config.to_dict().items() if key in known}


class MtpConfig(DrafterConfig):
    """Sizes of the drafter.

    Attributes:
        layer: settings of the target's config that make a decoder layer, its `model_type` among them (`layer_of`).
        layout: a key of `LAYOUTS`: the order of what fc reads, what recurs, and the names of an export.
        steps: K at most, the steps that it was trained for.
    """

    model_type = "mtp"
    layer: dict | None = None
    layout: str = "mimo"
    steps: int = 3

    def __post_init__(self, **kwargs) -> None:
        super().__post_init__(**kwargs)
        kind = (self.layer or {}).get("model_type")
        if kind not in KINDS or self.layout not in LAYOUTS:
            raise ValueError(
                f"got a layer of {kind!r} and layout {self.layout!r}; expected one of {', '.join(KINDS)}, and of {', '.join(LAYOUTS)}"
            )
        if not 1 <= self.steps <= DEEPEST:
            raise ValueError(f"got {self.steps} steps; expected 1 to {DEEPEST}")
        if self.tree is None:
            self.tree = default_paths(self.steps)

    @property
    def draft_size(self) -> int:
        """W of a `PairDrafter`."""
        return self.hidden_size

    @property
    def least_tensors(self) -> int:
        return 12

    def layer_config(self) -> Any:
        """A transformers config of one layer. Raises ValueError for settings of which transformers makes none."""
        settings = dict(self.layer or {})
        kind = settings.pop("model_type")
        config_class: Any = CONFIG_MAPPING[kind]
        fixed = {"hidden_size": self.hidden_size, "num_hidden_layers": 1, "vocab_size": 1, "sliding_window": None}
        fixed |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        if kind in ("qwen2", "qwen3", "qwen3_next"):
            fixed["layer_types"] = ["full_attention"]
        if kind in ("glm4_moe", "deepseek_v3"):  # the first layers of these have no experts; an MTP layer does
            fixed["first_k_dense_replace"] = 0
        try:
            return config_class(**{**settings, **fixed})
        except (ValueError, *UNEXPECTED) as error:
            raise ValueError(f"`layer` describes no {kind} layer: {in_words(error)}; correct it or restore the file") from None

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        llama = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
        latent = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4}
        latent |= {"qk_nope_head_dim": 8, "v_head_dim": 6, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        latent |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "model_type": "deepseek_v3"}
        return {
            "default": {"layer": llama, "steps": 4},
            "latent attention, experts": {"layer": latent, "layout": "deepseek", "steps": 3},
        }


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, draft_attend: Attend, **settings: Any
) -> tuple[Tensor, None]:
    """What a layer of transformers calls: query [B,heads,n,dim], key, value [B,kv heads,n,·] -> ([B,n,heads,·], None), by `draft_attend`."""
    wide, narrow = query.shape[-1], value.shape[-1]
    factor = settings["scaling"] * wide**0.5
    query = query if abs(factor - 1) < 1e-6 else query * factor
    out = draft_attend(0, query, key, F.pad(value, (0, wide - narrow)) if narrow < wide else value)
    return out[..., :narrow].transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class MtpModel(FeatureDrafter):
    """The layer, and what stands before and after it."""

    config_class = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        layer_config = config.layer_config()
        try:
            model = AutoModel.from_config(layer_config)
        except (ValueError, *UNEXPECTED) as error:
            raise ValueError(f"`layer` describes no layer: {in_words(error)}; correct it or restore the file") from None
        self.layers = nn.ModuleList(decoder_layers(model))
        self.norm = model.norm
        self.embedding_norm, self.hidden_norm = copy.deepcopy(model.norm), copy.deepcopy(model.norm)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        model.config._attn_implementation = ATTENTION  # the layer reads it there
        # No module of ours: its buffers would be rounded with the weights, and come from the meta device without values.
        self._rotary_of: tuple[type[nn.Module], Any] = type(model.rotary_emb), model.config
        self._rotary: dict[torch.device, nn.Module] = {}
        self._vocabulary: vocab.DraftVocabulary | None = None
        self.post_init()

    @property
    def capturable(self) -> bool:
        """False also for a layer of experts, whose tokens the host may count."""
        return not self._has_experts and super().capturable

    @property
    def _has_experts(self) -> bool:
        return any(name.endswith("mlp.experts") for name, _ in self.named_modules())

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def depth_limit(self) -> int:
        return self.config.steps

    @property
    def vocabulary(self) -> vocab.DraftVocabulary:
        """All tokens of the target, on the drafter's device."""
        if self._vocabulary is None or self._vocabulary.targets.device != self.device:
            self._vocabulary = vocab.full(self.config.vocab_size).to(self.device)
        return self._vocabulary

    @property
    def order(self) -> Order:
        return LAYOUTS[self.config.layout]

    # The network

    def feature_of(self, out: TargetOutput | NodeOutput) -> Tensor:
        """The target's output at n positions -> features [B,n,H]."""
        return out.hidden.to(self.fc.weight.dtype)

    def step(self, feature: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Pairs of feature [B,n,H] and tokens [B,n] at positions [B,n] -> output [B,n,H], before the final norm."""
        read = (self.embedding_norm(self.target.embed(tokens).to(feature.dtype)), self.hidden_norm(feature))
        x = self.fc(torch.cat(read[::-1] if self.order.hidden_first else read, -1))
        out = self.layers[0](
            x,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self._rope(x, positions),
            draft_attend=attend,
        )
        return out[0] if isinstance(out, tuple) else out

    def _rope(self, x: Tensor, positions: Tensor) -> Any:
        """What the layer adds positions with, in x's dtype."""
        if x.device not in self._rotary:
            kind, config = self._rotary_of
            self._rotary[x.device] = kind(config).to(x.device)
        return self._rotary[x.device](x, positions)

    def recurring(self, output: Tensor) -> Tensor:
        """A step's output [...,H] -> the feature of the next step."""
        return self.norm(output) if self.order.norm_output else output

    def before_head(self, output: Tensor) -> Tensor:
        """A step's output [...,H] -> what the target's head reads."""
        return self.norm(output).to(self.target.dtype)

    def logits_of(self, output: Tensor) -> Tensor:
        """A step's output [...,H] -> logits [...,V]."""
        return self.target.logits(self.before_head(output))


Config = MtpConfig
Model = MtpModel
