"""Drafters whose linear layers have 8-bit weights, in the formats that engines read; what multiplies with them stays in 16 or 32 bits.

The layers are q, k, v, o, gate, up and down of every decoder layer; embeddings, heads, fc and norms stay as they are. vLLM reads compressed-tensors: a
scale for each output channel, int8 packed by four into int32, or float8_e4m3fn. llama.cpp reads Q8_0: a scale for each 32 inputs.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.inference import durable

__all__ = ["KEY", "KINDS", "LINEAR", "check_blocks", "check_kind", "pack_folder", "round_weights", "unpacked"]

KINDS = ("int8", "fp8")
LINEAR = re.compile(r"(?:.*\.)?(?:layers\.\d+|midlayer)\.(?:self_attn|mlp)\.\w+_proj\.weight")
FAMILIES = ("eagle1", "eagle3", "peagle", "student")
BLOCK = 32  # inputs of one scale in Q8_0
KEY = "quantization_config"
_FORMATS = {"int8": ("pack-quantized", "int"), "fp8": ("float-quantized", "float")}
_FP8 = torch.float8_e4m3fn


def check_kind(kind: str, family: str, engine: str) -> None:
    """Check that an engine reads such weights of such a drafter.

    Raises:
        ValueError: it does not, with what does.
    """
    if engine not in ("vllm", "gguf") or family not in FAMILIES:
        where = "--to vllm, or int8 with --to gguf" if family in FAMILIES else "none for this drafter"
        raise ValueError(f"--quantise {kind}: not written of this drafter for {engine}; nearest: {where}")
    if engine == "gguf" and kind != "int8":
        raise ValueError(f"--quantise {kind}: llama.cpp has no fp8; nearest: --quantise int8")


def check_blocks(model: nn.Module) -> None:
    """Check that Q8_0 holds a drafter's linear layers. Raises ValueError for one whose inputs are no multiple of 32."""
    for name, weight in model.named_parameters():
        if LINEAR.fullmatch(name) and weight.shape[1] % BLOCK:
            raise ValueError(f"--quantise int8: {name} has {weight.shape[1]} inputs; llama.cpp's Q8_0 needs a multiple of {BLOCK}")


@torch.no_grad()
def round_weights(model: nn.Module, kind: str, engine: str, dtype: torch.dtype) -> None:
    """Round a drafter's linear layers, in place, to what the export of this kind stores of weights in `dtype`."""
    for name, weight in model.named_parameters():
        if not LINEAR.fullmatch(name):
            continue
        if engine == "gguf":
            blocks = weight.to(dtype).float().unflatten(1, (-1, BLOCK))
            exact = blocks.abs().amax(-1, keepdim=True) / 127  # the stored scale is its rounding to float16
            steps = blocks * torch.where(exact > 0, 1 / exact, 0.0)
            steps = steps.sign() * (steps.abs() + 0.5).floor()  # llama.cpp rounds halves away from zero
            weight.copy_((steps * exact.half().float()).flatten(1))
        else:
            steps, scale = _by_channel(weight.to(dtype), kind)
            weight.copy_(steps.float() * scale.float())


def pack_folder(folder: Path, kind: str) -> None:
    """Quantise the weights of a folder with config.json and model.safetensors, as compressed-tensors stores them. Raises ValueError where they are in several files."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ValueError("--quantise: the weights are in several files, which is not written; a drafter of less than 5 GB has one")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if not LINEAR.fullmatch(name):
            tensors[name] = tensor
            continue
        steps, scale = _by_channel(tensor, kind)
        base = name.removesuffix(".weight")
        if kind == "int8":
            tensors[f"{base}.weight_packed"] = _packed(steps)
            tensors[f"{base}.weight_shape"] = torch.tensor(steps.shape)
        else:
            tensors[name] = steps
        tensors[f"{base}.weight_scale"] = scale
    durable.replace(file, lambda part: save_file(tensors, part, {"format": "pt"}))
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    durable.write_text(folder / "config.json", json.dumps(raw | {KEY: _settings(kind)}, indent=2) + "\n")


def unpacked(raw: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder with weights of 8 bits multiplied out, in float32; others are as they are.

    Args:
        raw: config.json.
        tensors: of the file.

    Raises:
        ValueError: a quantisation of another kind.
    """
    settings = raw.get(KEY)
    if not settings:
        return tensors
    if settings not in [_settings(kind) for kind in KINDS]:
        raise ValueError(
            f"config.json has a {KEY} other than `draftsmith export --quantise` writes; expected weights that are not quantised"
        )
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith((".weight_packed", ".weight_scale", ".weight_shape"))}
    for name, scale in tensors.items():
        if name.endswith(".weight_scale"):
            base = name.removesuffix("_scale")
            packed = tensors.get(f"{base}_packed")
            if packed is None and base not in tensors:
                raise ValueError(f"{base} is missing beside {name}: copy the complete folder")
            columns = int(tensors.get(f"{base}_shape", torch.tensor([0]))[-1]) or None
            steps = tensors[base] if packed is None else packed.view(torch.uint8)[:, :columns].float() - 128
            plain[base] = steps.float() * scale.float()
    return plain


def _by_channel(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """weight [O,I] -> steps [O,I] in int8 or float8, and scales [O,1]: int8's in the weight's dtype, fp8's in float32."""
    largest = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12)
    if kind == "fp8":
        scale = largest / torch.finfo(_FP8).max
        return (weight.float() / scale).to(_FP8), scale
    scale = (largest / 127).to(weight.dtype)
    return (weight.float() / scale.float()).round().clamp(-128, 127).to(torch.int8), scale


def _packed(steps: Tensor) -> Tensor:
    """[O,I] in int8 -> [O,⌈I/4⌉] in int32: each step plus 128, the first one in the lowest byte."""
    unsigned = (steps.int() + 128).to(torch.uint8)
    return nn.functional.pad(unsigned, (0, -steps.shape[1] % 4)).contiguous().view(torch.int32)


def _settings(kind: str) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors for weights alone, by channel."""
    form, number = _FORMATS[kind]
    weights = {"num_bits": 8, "type": number, "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    settings = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return settings | {"config_groups": {"group_0": group}, "ignore": ["re:.*lm_head$", "re:.*fc$"]}
