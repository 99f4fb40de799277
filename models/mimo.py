"""MiMo-7B (https://arxiv.org/abs/2505.07608) without code from the Hub: a Qwen2 whose checkpoint ships an MTP layer beside the decoder's."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Model

__all__ = ["MimoConfig", "MimoForCausalLM", "register"]


class MimoConfig(Qwen2Config):
    """Qwen2's.

    Attributes:
        num_nextn_predict_layers: MTP layers of the checkpoint.
    """

    model_type = "mimo"
    num_nextn_predict_layers: int = 1


class MimoModel(Qwen2Model):
    """The decoder, without MTP layers."""

    config_class = MimoConfig


class MimoForCausalLM(Qwen2ForCausalLM):
    """The decoder and its head."""

    config_class = MimoConfig


def register() -> None:
    """Let transformers' AutoConfig, AutoModel and AutoModelForCausalLM load `mimo` checkpoints."""
    AutoConfig.register("mimo", MimoConfig, exist_ok=True)
    AutoModel.register(MimoConfig, MimoModel, exist_ok=True)
    AutoModelForCausalLM.register(MimoConfig, MimoForCausalLM, exist_ok=True)
