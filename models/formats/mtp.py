"""MTP layers among the tensors of their target's checkpoint, which transformers leaves out: read, and written back by the same names.

The names are data (`layouts.mtp_layouts`). A checkpoint has each expert apart, transformers' layer all in one tensor.

Letters: E experts · I inner size of one · H hidden size.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.inference import durable
from draftsmith.models.drafter import CONFIG
from draftsmith.models.formats.assemble import assembled
from draftsmith.models.formats.layouts import Layout, mtp_layouts
from draftsmith.models.mtp import MtpConfig, MtpModel, layer_of
from draftsmith.models.target import Target, resolve_path
from draftsmith.models.weights import read_tensors, stored_tensors

__all__ = ["FILE", "read_mtp", "shipped_mtp", "write_mtp"]

FILE = "mtp.safetensors"
_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


def shipped_mtp(target: Target, steps: int = 3) -> MtpModel:
    """The MTP layer that the target's checkpoint has, attached to it, in the checkpoint's dtype, in eval mode. Of several layers, the first.

    Args:
        target: loaded from a folder or the Hub.
        steps: K at most.

    Raises:
        FileNotFoundError: a target that is in memory alone.
        ValueError: a checkpoint without such a layer, or with one that cannot be built here.
    """
    source = resolve_path(target.name)
    files = stored_tensors(source, target.revision)
    layout = _layout_in(files, target)
    if not layout:
        raise ValueError(
            f"the checkpoint of {target.name!r} has no MTP layer under a name that is known; expected MiMo's, DeepSeek's, GLM's or "
            "Qwen3-Next's names; train one: mtp.start=null"
        )
    names = mtp_layouts(target.num_layers)[layout]
    wanted = {name: file for name, file in files.items() if names.ours(name) or name in names.optional}
    if scales := sorted(name for name in wanted if "_scale" in name):
        raise ValueError(
            f"the MTP layer of {target.name!r} is quantised ({scales[0]}); expected floating-point weights; give a checkpoint that has them"
        )
    tensors = read_tensors(source, target.revision, wanted, target.device)
    return _assembled(target.name, tensors, target, layout, steps)


def read_mtp(folder: Path, tensors: dict[str, Tensor], target: Target) -> MtpModel:
    """The MTP layer of a folder that `write_mtp` wrote, attached to `target`, in the file's dtype, in eval mode.

    Args:
        folder: for errors.
        tensors: of its safetensors, by their names there.
        target: what it drafts for.

    Raises:
        ValueError: tensors that are missing, unexpected or misshapen, or an embedding or head that is not the target's.
    """
    layout = _layout_in(tensors, target)
    if not layout:
        raise ValueError(f"{folder} has no MTP layer of a target with {target.num_layers} layers; load the target that it was made for")
    return _assembled(str(folder), tensors, target, layout, 3)


def write_mtp(drafter: MtpModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the tensors as the target's checkpoint names them, and the target's config.

    Args:
        drafter: attached to its target.
        folder: empty.
        dtype: of the weights.

    Raises:
        OSError: the disk.
    """
    target = drafter.target
    names = mtp_layouts(target.num_layers)[drafter.config.layout]
    tensors = {stored: tensor for name, tensor in _apart(drafter.state_dict()).items() for stored in names.theirs(name)}
    for stored in names.optional:
        tensors[stored] = _ends(target, stored)
    # Routers' corrections are in float32 in checkpoints of any dtype.
    kinds = {name: torch.float32 if name.endswith("e_score_correction_bias") else dtype for name in tensors}
    copies = {name: tensor.detach().to("cpu", kinds[name], copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / FILE, {"format": "pt"})
    raw: dict[str, Any] = target.model.config.to_dict() | {"num_nextn_predict_layers": 1, "dtype": str(dtype).removeprefix("torch.")}
    durable.write_text(folder / CONFIG, json.dumps(raw, indent=2, default=str) + "\n")


def _layout_in(names: Mapping[str, Any], target: Target) -> str:
    """The key of the layout whose fc is among these names; "" where none is."""
    layouts = mtp_layouts(target.num_layers)
    return next((key for key, layout in layouts.items() if layout.theirs("fc.weight")[0] in names), "")


def _assembled(path: str, tensors: dict[str, Tensor], target: Target, layout: str, steps: int) -> MtpModel:
    names = mtp_layouts(target.num_layers)[layout]
    for stored in names.optional:
        own = tensors.pop(stored, None)
        if own is not None and not torch.equal(own.to(target.dtype), _ends(target, stored).to(own.device, target.dtype)):
            raise ValueError(
                f"{path}: {stored} is not the target's own, which this drafter shares; give a checkpoint whose layer shares it"
            )
    config = MtpConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target=target.identity.to_dict(),
        layer=layer_of(target.config),
        layout=layout,
        steps=steps,
    )
    return assembled(MtpModel, config, path, _together(_our_names(tensors, names)), target)


def _our_names(tensors: Mapping[str, Tensor], names: Layout) -> dict[str, Tensor]:
    return {names.ours(stored) or stored: tensor for stored, tensor in tensors.items()}


def _ends(target: Target, stored: str) -> Tensor:
    """The target's embedding or head, by which of the two a name ends with."""
    if stored.endswith("head.weight"):
        return target.head_weight
    return target.model.get_input_embeddings().get_parameter("weight")


def _together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of single experts -> gate_up_proj [E,2I,H] and down_proj [E,H,I] of all of them; others stay."""
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match["before"], {}).setdefault(int(match["number"]), {})[match["part"]] = tensor
        else:
            joined[name] = tensor
    for before, each in experts.items():
        if incomplete := [number for number, parts in each.items() if len(parts) < 3]:
            raise ValueError(f"{before}.{incomplete[0]} lacks one of gate_proj, up_proj and down_proj; copy the complete checkpoint")
        ordered = [each[number] for number in sorted(each)]
        joined[f"{before}.gate_up_proj"] = torch.stack([torch.cat((parts["gate"], parts["up"])) for parts in ordered])
        joined[f"{before}.down_proj"] = torch.stack([parts["down"] for parts in ordered])
    return joined


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_together`."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, _, part = name.rpartition(".")
        if not before.endswith(".experts"):
            split[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            pieces = zip(("gate", "up"), expert.chunk(2), strict=True) if part == "gate_up_proj" else (("down", expert),)
            split |= {f"{before}.{number}.{kind}_proj.weight": piece for kind, piece in pieces}
    return split
