"""MLP speculators in the folders that IBM publishes and that vLLM and TGI read: model.safetensors and config.json, written and read by one layout.

Letters: V vocabulary · H the target's hidden size · I inner size · K heads.
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
from draftsmith.models.formats.layouts import speculator
from draftsmith.models.mlp import MlpConfig, MlpModel
from draftsmith.models.model_files import check_config
from draftsmith.models.target import Target
from draftsmith.models.weights import WEIGHTS

__all__ = ["ARCHITECTURE", "MODEL_TYPE", "PREFIX", "read_mlp", "write_mlp"]

ARCHITECTURE, MODEL_TYPE, PREFIX = "MLPSpeculatorPreTrainedModel", "mlp_speculator", "speculator."


def write_mlp(drafter: MlpModel, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and the weights; tied ones at every head's index, since TGI reads each.

    Args:
        drafter: attached to its target; no LSTM.
        folder: empty.
        dtype: of the weights.

    Raises:
        OSError: the disk.
    """
    config, heads = drafter.config, drafter.config.num_heads
    tied = config.tie_weights and heads > 1  # vLLM refuses to tie one head
    names = speculator(heads, config.tie_weights)
    tensors = {stored: tensor for name, tensor in drafter.state_dict().items() for stored in names.theirs(name)}
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "base_model_name_or_path": drafter.target.name,
        "vocab_size": config.vocab_size,
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_size,
        "n_predict": heads,
        "n_candidates": 5,
        "top_k_tokens_per_head": [1] * heads,
        "tie_weights": tied,
        "scale_input": config.scale_input,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    copies = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / WEIGHTS, {"format": "pt"})
    durable.write_text(folder / CONFIG, json.dumps(raw, indent=2) + "\n")


def read_mlp(folder: Path, tensors: dict[str, Tensor], target: Target) -> MlpModel:
    """The speculator of a published folder, attached to `target`, in the file's dtype, in eval mode.

    Args:
        folder: for its config.json, and for errors.
        tensors: of its safetensors, by their names there. Tied ones may stand at one index or at several.
        target: what it drafts for.

    Raises:
        ValueError: sizes of another target, an LSTM, tied tensors that differ, or tensors that are missing, unexpected or misshapen.
    """
    source = str(folder / CONFIG)
    raw = check_config(str(folder))
    if raw.get("method", "sum_rnn") != "sum_rnn":
        raise ValueError(f"{source}: `method` is {str(raw['method'])[:40]!r}; of published speculators only MLPs are read: train it here")
    heads = field(raw, "n_predict", int, source)
    if not 1 <= heads <= DEEPEST:
        raise ValueError(f"{source}: `n_predict` is {heads}; expected 1 to {DEEPEST}: correct it or restore the file")
    for key, size in (("emb_dim", target.hidden_size), ("vocab_size", target.vocab_size)):
        if field(raw, key, int, source) != size:
            raise ValueError(f"{source}: `{key}` is {raw[key]}, target {target.name!r} has {size}; load the target that it was made for")
    inner = field({"inner_dim": 0} | raw, "inner_dim", int, source)
    flags = {key: field({key: False} | raw, key, bool, source) for key in ("tie_weights", "scale_input")}
    if inner < 0:
        raise ValueError(f"{source}: `inner_dim` is {inner}; expected a size: correct it or restore the file")
    config = MlpConfig(
        num_heads=heads,
        inner_size=inner,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        target=target.identity.to_dict(),
        **flags,
    )
    return assembled(MlpModel, config, str(folder), _our_names(str(folder), tensors, heads, flags["tie_weights"]), target)


def _our_names(folder: str, tensors: dict[str, Tensor], heads: int, tied: bool) -> dict[str, Tensor]:
    """Tensors by our names. Raises ValueError where indices of tied weights differ."""
    layout = speculator(heads, tied)
    renamed: dict[str, Tensor] = {}
    first: dict[str, str] = {}
    for stored, tensor in sorted(tensors.items()):
        name = layout.ours(PREFIX + stored.removeprefix(PREFIX)) or stored
        if name in renamed and not torch.equal(renamed[name], tensor):
            raise ValueError(f"{folder}: `tie_weights` is true, and {stored} is not {first[name]}; correct config.json or restore the file")
        renamed.setdefault(name, tensor)
        first.setdefault(name, stored)
    return renamed
