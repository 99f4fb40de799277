"""Hydra heads in the folder of their authors (zankner/Hydra): config.json and the tensors of hydra_lm_head.pt, read and written by one layout.

The authors' code loads a pickle, which is neither read nor written here: `PICKLE` makes one of the safetensors. No serving engine loads either.

Letters: V vocabulary · H hidden size.
"""

import json
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
from draftsmith.models.formats.layouts import hydra_heads
from draftsmith.models.hydra import HydraConfig, HydraModel
from draftsmith.models.model_files import check_config
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import attention_sizes

__all__ = ["HEADS", "HYDRA_FILE", "PICKLE", "read_hydra", "write_hydra"]

HEADS, HYDRA_FILE = "hydra_num_heads", "hydra_lm_head.safetensors"
PICKLE = (
    "python -c \"import torch, safetensors.torch as s; torch.save(s.load_file('{0}/hydra_lm_head.safetensors'), '{0}/hydra_lm_head.pt')\""
)
FIXED = {"grounded_heads": True, "hidden_state_offset": 0}
PREFIX = {"mlp": False, "prefix-mlp": True}  # hydra_head_arch -> whether a decoder layer comes first


def write_hydra(drafter: HydraModel, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and the weights. Heads get a copy of the target's output layer where they share it, and a bias of 0 where neither
    has one.

    Args:
        drafter: attached to its target.
        folder: empty.
        dtype: of the weights.

    Raises:
        ValueError: the blocks after a head's first differ, where the authors' code repeats one.
        OSError: the disk.
    """
    config, target, state = drafter.config, drafter.target, drafter.state_dict()
    later = [
        (f"hydra_mlp.{k}", j, part) for k in range(config.num_heads) for j in range(2, config.num_layers) for part in ("weight", "bias")
    ]
    if not all(torch.equal(state[f"{head}.{j}.linear.{part}"], state[f"{head}.1.linear.{part}"]) for head, j, part in later):
        raise ValueError(
            f"--to hydra: got heads of {config.num_layers} blocks that differ; the authors' code repeats one block after the first: train with "
            "hydra.layers=2 at most"
        )
    for k in range(config.num_heads):
        if config.share_head:
            state[f"hydra_lm_head.{k}.weight"] = target.head_weight * target.head_scale
        if not config.head_bias:
            bias = getattr(target.head, "bias", None) if config.share_head else None
            zeros = torch.zeros(config.vocab_size, device=target.device)
            state[f"hydra_lm_head.{k}.bias"] = zeros if bias is None else bias * target.head_scale
    names = hydra_heads(config.num_layers, config.prefix)
    tensors = {
        stored: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in state.items() for stored in names.theirs(name)
    }
    raw: dict[str, Any] = {
        HEADS: config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": "prefix-mlp" if config.prefix else "mlp",
        **FIXED,
        "base_model_name_or_path": target.name,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    save_file(tensors, folder / HYDRA_FILE, {"format": "pt"})
    durable.write_text(folder / CONFIG, json.dumps(raw, indent=2) + "\n")


def read_hydra(folder: Path, tensors: dict[str, Tensor], target: Target) -> HydraModel:
    """The heads of a published folder, attached to `target`, in the file's dtype, in eval mode. Its copies of the target's embedding are left out.

    Args:
        folder: for its config.json, and for errors.
        tensors: of its safetensors, by their names there.
        target: what they draft for.

    Raises:
        ValueError: heads of another architecture, or tensors that are missing, unexpected or misshapen.
    """
    source = str(folder / CONFIG)
    raw = check_config(str(folder))
    kind = raw.get("hydra_head_arch", "mlp")
    if kind not in PREFIX:
        raise ValueError(f"{source}: `hydra_head_arch` is {str(kind)[:40]!r}; only {' and '.join(PREFIX)} are computed here")
    for key, value in FIXED.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{source}: `{key}` is {raw[key]!r}; only {value!r} is computed here")
    heads, blocks = (field({key: 1} | raw, key, int, source) for key in (HEADS, "hydra_num_layers"))
    if not 1 <= heads <= DEEPEST or not 1 <= blocks <= DEEPEST:
        raise ValueError(f"{source}: got {heads} heads of {blocks} blocks; expected 1 to {DEEPEST} of each: correct it or restore the file")
    names, renamed = hydra_heads(blocks, PREFIX[kind]), {}
    for stored, tensor in tensors.items():
        if stored not in names.optional:
            renamed[names.ours(stored) or stored] = tensor
    config = HydraConfig(
        num_heads=heads,
        num_layers=blocks,
        head_bias=any(name.startswith("hydra_lm_head.") and name.endswith(".bias") for name in renamed),
        prefix=PREFIX[kind],
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target=target.identity.to_dict(),
        **(attention_sizes(target) if PREFIX[kind] else {}),
    )
    return assembled(HydraModel, config, str(folder), renamed, target)
