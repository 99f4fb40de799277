"""Targets whose decoder's linear layers are quantised while they are read; embedding and output head stay as they are.

Features of a quantised target differ from those of the same target unquantised: by about 1 % in int8, 2 in fp8, 8 in nf4 (norm of the
difference, the tiny target). Train a drafter on the target that will be served.
"""

import logging
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.configuration_utils import PretrainedConfig

__all__ = ["quantisation", "quantised_as"]

_TORCHAO = {"ao-int8": "Int8WeightOnlyConfig", "ao-fp8": "Float8WeightOnlyConfig"}


def quantisation(kind: str, dtype: torch.dtype | str | None) -> Any:
    """The quantization_config for `from_pretrained`.

    Args:
        kind: bnb-int8 (https://arxiv.org/abs/2208.07339), bnb-nf4 (https://arxiv.org/abs/2305.14314), ao-int8 or ao-fp8 (weights only).
        dtype: in which the layers multiply, if it is known.

    Raises:
        ValueError: an unknown kind, or a library that is not installed.
    """
    if kind not in ("bnb-int8", "bnb-nf4", *_TORCHAO):
        raise ValueError(f"target.quantise={kind}: expected one of bnb-int8, bnb-nf4, {', '.join(_TORCHAO)}")
    library = "torchao" if kind in _TORCHAO else "bitsandbytes"
    if find_spec(library) is None:
        raise ValueError(f"target.quantise={kind} needs {library}, which is not installed; pip install 'draftsmith[quantised]'")
    if kind in _TORCHAO:
        from torchao import quantization

        return TorchAoConfig(getattr(quantization, _TORCHAO[kind])())
    if kind == "bnb-nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    # It says at every layer of every forward that it computes in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    # A threshold takes out outlier columns that are chosen over all rows at once: a token's output would then depend on its neighbours, in a
    # draft tree on drafts that are rejected later.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def quantised_as(config: PretrainedConfig) -> str:
    """How a model's weights are quantised, in a word; "" if they are not.

    It is one of the kinds above, or the method that the config names with its bits: gptq-4bit, fp8, mxfp4.
    """
    settings: Any = getattr(config, "quantization_config", None)
    if not settings:
        return ""
    fields = settings if isinstance(settings, dict) else settings.to_dict()
    method = fields.get("quant_method") or "bitsandbytes"
    method = str(getattr(method, "value", method))
    if method == "bitsandbytes":
        return f"bnb-{fields.get('bnb_4bit_quant_type', 'fp4')}" if fields.get("load_in_4bit") else "bnb-int8"
    if method == "torchao":
        kind = fields.get("quant_type")
        if isinstance(kind, dict):  # earlier versions wrote a word
            kind = kind.get("default", {}).get("_type")
        return next((name for name, config_class in _TORCHAO.items() if config_class == kind), f"ao-{kind}")
    return f"{method}-{fields['bits']}bit" if fields.get("bits") else method
