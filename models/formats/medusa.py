"""Medusa heads in the folders that engines load: medusa_lm_head.safetensors and config.json, written and read by the same names.

One folder serves vLLM, TGI and TensorRT-LLM where each head has its own output layer. Where all share the target's, vLLM wants it once in the file,
TensorRT-LLM a copy for each head, and TGI none (or copies, where a head has more than one block).

Letters: V vocabulary · H hidden size · K heads.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.inference import durable
from draftsmith.inference.reading import field
from draftsmith.models.artifact import DEEPEST
from draftsmith.models.drafter import CONFIG
from draftsmith.models.formats.assemble import assembled
from draftsmith.models.formats.layouts import MEDUSA, medusa_blocks
from draftsmith.models.medusa import MedusaConfig, MedusaModel
from draftsmith.models.model_files import check_config
from draftsmith.models.target import Target

__all__ = ["HEADS", "SHARED", "WEIGHTS", "heads_and_blocks", "read_medusa", "write_medusa"]

WEIGHTS = "medusa_lm_head.safetensors"  # TGI and TensorRT-LLM read no other file
SHARED, SHARED_KEY = "lm_head.weight", "original_lm_head"
HEADS = ("medusa_num_heads", "num_medusa_heads", "num_heads")
BLOCKS = ("medusa_num_layers", "num_hidden_layers", "num_layers")
_PREFIX = "medusa_heads."


def write_medusa(drafter: MedusaModel, folder: Path, engine: str, dtype: torch.dtype) -> None:
    """Write config.json and the weights for an engine (`engines.ENGINES`).

    Args:
        drafter: attached to its target.
        folder: empty.
        engine: vllm, tgi or tensorrt-llm.
        dtype: of the weights.

    Raises:
        ValueError: heads that share a head with a bias, which no engine adds.
        OSError: the disk.
    """
    config, target = drafter.config, drafter.target
    tensors = {stored: tensor for name, tensor in drafter.state_dict().items() for stored in MEDUSA.theirs(name)}
    raw: dict[str, Any] = {
        "model_type": "medusa",
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "version": "2",
        "base_model_name_or_path": target.name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_fc_bias": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if engine == "tensorrt-llm":
        raw["num_medusa_heads"] = config.num_heads
    if config.share_head:
        if getattr(target.head, "bias", None) is not None:
            raise ValueError(
                f"the heads share the head of {target.name!r}, which has a bias; engines add none: train with medusa.share_head=false"
            )
        head = target.head_weight * target.head_scale  # a soft-capping, which is left out, never changes a ranking
        if engine == "vllm":
            raw[SHARED_KEY], tensors[SHARED] = True, head
        elif engine == "tensorrt-llm" or config.num_layers > 1:
            tensors |= {f"{k}.{config.num_layers}.weight": head for k in range(config.num_heads)}
    tensors = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    durable.write_text(folder / CONFIG, json.dumps(raw, indent=2) + "\n")


def heads_and_blocks(raw: dict[str, Any], source: str) -> tuple[int, int]:
    """K, and the blocks of a head, as a config.json says.

    Raises:
        ValueError: no number of heads, numbers that disagree, or that no drafter has.
    """
    numbers = []
    for keys, usual in ((HEADS, None), (BLOCKS, 1)):
        values = {field(raw, key, int, source) for key in keys if key in raw} or {usual}
        if len(values) > 1 or not 1 <= (next(iter(values)) or 0) <= DEEPEST:
            given = {key: raw[key] for key in keys if key in raw}
            raise ValueError(f"{source}: got {given or 'none'} of {', '.join(keys)}; expected one number from 1 to {DEEPEST}: correct it")
        numbers.append(values.pop())
    return numbers[0], numbers[1]


def read_medusa(folder: Path, tensors: dict[str, Tensor], target: Target) -> MedusaModel:
    """The heads of a published folder, attached to `target`, in the file's dtype, in eval mode.

    Heads without output layers of their own share the target's, or the one in the file where that is another. Blocks without biases get
    zeros.

    Args:
        folder: for its config.json, and for errors.
        tensors: of its safetensors, by their names there.
        target: what they draft for.

    Raises:
        ValueError: sizes of another target, tensors that are missing, unexpected or misshapen, or a key whose meaning is not known.
    """
    source = str(folder / CONFIG)
    raw = check_config(str(folder))
    heads, blocks = heads_and_blocks(raw, source)
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if raw.get(key, size) != size:
            raise ValueError(f"{source}: `{key}` is {raw[key]}, target {target.name!r} has {size}; load the target that it was made for")
    if unknown := [key for key in ("truncated_vocab_size", "token_map") if raw.get(key) is not None]:
        raise ValueError(f"{source}: `{unknown[0]}` is set; a smaller vocabulary of Medusa heads is not computed here")
    tensors = _our_names(tensors, blocks)
    shared = tensors.pop(SHARED, None)
    own = any(re.fullmatch(rf"\d+\.{blocks}\.weight", name) for name in tensors)
    if shared is not None and not own:
        ours = (target.head_weight * target.head_scale).float().cpu()
        if shared.shape != ours.shape or not torch.allclose(shared.float(), ours, rtol=2**-7, atol=1e-6):
            tensors |= {f"{k}.{blocks}.weight": shared.clone() for k in range(heads)}
            own = True
    for name in [name for name in tensors if name.endswith("linear.weight")]:
        tensors.setdefault(name.removesuffix("weight") + "bias", torch.zeros(len(tensors[name]), dtype=tensors[name].dtype))
    config = MedusaConfig(
        num_heads=heads,
        num_layers=blocks,
        share_head=not own,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target=target.identity.to_dict(),
    )
    return assembled(MedusaModel, config, str(folder), tensors, target)


def _our_names(tensors: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """Tensors by our names, from Medusa's own or from vLLM's, with or without the prefix that vLLM takes."""
    renamed, theirs = {}, medusa_blocks(blocks)
    for name, tensor in tensors.items():
        plain = name.removeprefix(_PREFIX)
        plain = SHARED if plain == "lm_heads.0.weight" and len([each for each in tensors if "lm_heads." in each]) == 1 else plain
        renamed[theirs.ours(plain) or plain] = tensor
    return renamed
