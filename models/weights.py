"""The safetensors of a model, in a folder or on the Hub: which files they are, what their headers say, and single tensors.

A folder may come from anybody. Only safetensors are opened, only within the folder, and nothing is allocated for a config before it has been
compared with the headers.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from draftsmith.inference.durable import sampled_hash
from draftsmith.inference.reading import field, read_json
from draftsmith.models import gguf
from draftsmith.models.model_files import check_config, model_file

__all__ = [
    "ADAPTER",
    "ADAPTER_CONFIG",
    "Header",
    "assign",
    "check_adapter",
    "check_finite",
    "check_folder",
    "check_headers",
    "check_loaded",
    "headers",
    "read_tensors",
    "stored_tensors",
    "weights_hash",
    "without_mtp",
]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
# Of an MTP layer, in the layouts of MiMo, Qwen3-Next and DeepSeek: what its tensors' names begin with.
_MTP = re.compile(r"(model\.mtp_layers\.|mtp\.|model\.layers\.\d+\.(?=eh_proj\.))")
_CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ADVICE = "copy or save it again"


class Header(NamedTuple):
    """What a file says of a tensor: its file, its dtype in safetensors' words (F32, BF16, I64, …), and its shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


def check_folder(folder: str) -> None:
    """Check a local model folder: a config.json that can be meant, complete safetensors within the folder, and an adapter, if it has one.

    Raises:
        FileNotFoundError: no config.json, no weights, or not all of the files that the index names.
        ValueError: pickled weights, weights elsewhere, a file that is cut off, or a file of another kind than expected.
    """
    check_config(folder)
    headers(folder)
    if os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
        check_adapter(folder)


def stored_tensors(source: str, revision: str = "") -> dict[str, str]:
    """Tensor name -> the safetensors file that stores it, for all tensors of a model. No tensor is read.

    Args:
        source: a folder, or a Hub id.
        revision: commit, tag or branch on the Hub.

    Raises:
        FileNotFoundError: no safetensors of the names that transformers gives them.
        ValueError: an index that names nothing, or anything but safetensors within the folder.
    """
    single = model_file(source, WEIGHTS, revision)
    if single is not None:
        return dict.fromkeys(_read_header(source, WEIGHTS, revision), WEIGHTS)
    index = model_file(source, INDEX, revision)
    if index is None:
        raise _no_weights(source)
    content = read_json(Path(index))
    field(content, "metadata", dict, index)  # transformers reads it
    files = field(content, "weight_map", dict, index)
    if not files:
        raise ValueError(
            f"{index}: its safetensors have 0 tensors, since `weight_map` is empty; restore the file, or copy the complete folder"
        )
    for tensor in files:
        _check_name(field(files, tensor, str, index), index)
    return files


def headers(source: str, revision: str = "") -> dict[str, Header]:
    """Tensor name -> what its file's header says, for all tensors of a model. Arguments and errors as in `stored_tensors`."""
    files = stored_tensors(source, revision)
    if not os.path.isdir(source):  # several files at a time
        snapshot_download(source, revision=revision, allow_patterns=sorted(set(files.values())))
    read: dict[str, Header] = {}
    for name in sorted(set(files.values())):
        read |= _read_header(source, name, revision)
    if missing := sorted(files.keys() - read.keys()):
        raise ValueError(f"{files[missing[0]]} of {source!r} lacks {missing[0]}, which {INDEX} names; copy the complete model folder")
    return read


def weights_hash(folder: str) -> str:
    """The `sampled_hash` of a folder's files of weights: enough to tell a model from its fine-tunes.

    An adapter's own file stands for it, and a GGUF file for the folder that was made of it. Errors as in `stored_tensors`.
    """
    if os.path.isfile(made_of := os.path.join(folder, gguf.SOURCE)):
        return field(read_json(Path(made_of)), "hash", str, made_of)
    adapter = model_file(folder, ADAPTER, "")
    names = [] if adapter else sorted(set(stored_tensors(folder).values()))
    files = [adapter] if adapter else [_weight_file(folder, name, "") for name in names]
    return sampled_hash(files)


def read_tensors(source: str, revision: str, files: dict[str, str], device: torch.device | str) -> dict[str, Tensor]:
    """Read tensors by name, and nothing else of their files.

    Args:
        source: a folder, or a Hub id; of a Hub model only the files that are named are downloaded.
        revision: commit, tag or branch on the Hub.
        files: tensor name -> file, as `stored_tensors` gives them.
        device: where the tensors go.
    """
    tensors = {}
    for name in sorted(set(files.values())):
        with safe_open(_weight_file(source, name, revision), framework="pt") as file:
            # A copy: what safetensors gives is a view of the mapped file.
            tensors |= {tensor: file.get_tensor(tensor).to(device, copy=True) for tensor, stored in files.items() if stored == name}
    return tensors


def check_headers(path: str, expected: Mapping[str, Tensor], stored: Mapping[str, Header], exact: bool) -> None:
    """Compare the tensors that a config makes with those that the files have, before any of them is allocated.

    Args:
        path: the model, for errors.
        expected: tensors by name, on the meta device.
        stored: headers by the same names.
        exact: whether the names must be the same; otherwise only those in both are compared.

    Raises:
        ValueError: naming tensors of another shape or kind of number, and, where `exact`, those that are missing or unexpected.
    """
    both = [name for name in stored if name in expected]
    misshapen = [(name, stored[name].shape, expected[name].shape) for name in both if stored[name].shape != tuple(expected[name].shape)]
    missing, unexpected = (expected.keys() - stored.keys(), stored.keys() - expected.keys()) if exact else ((), ())
    check_loaded(path, {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": misshapen})
    for name in both:
        kind = "floating point" if expected[name].is_floating_point() else "bool" if expected[name].dtype == torch.bool else "integers"
        if kind != _kind(stored[name].dtype):
            raise ValueError(
                f"{path!r}: {stored[name].file} has {name} in {stored[name].dtype}; expected {kind}: these are no weights of this model; "
                f"{_ADVICE}"
            )


def check_loaded(path: str, info: dict[str, Any]) -> None:
    """Refuse a load that left tensors out; `info` is what transformers gives with output_loading_info=True.

    Raises:
        ValueError: naming the tensors that are missing, unexpected or of another shape (tied ones are none of these).
    """
    misshapen = [f"{name} {list(shape)} for {list(expected)}" for name, shape, expected in info["mismatched_keys"]]
    for word, names in (("missing", info["missing_keys"]), ("unexpected", info["unexpected_keys"]), ("misshapen", misshapen)):
        if names:
            raise ValueError(f"{path!r} has {len(names)} {word} tensors: {few_of(names)}; its weights do not fit its config.json")


def few_of(names: Collection[str]) -> str:
    """The first four names, and how many more there are, for an error."""
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def without_mtp(info: dict[str, Any]) -> dict[str, Any]:
    """What a load of a target says, without unexpected tensors of MTP layers: drafters read these apart (models/formats/mtp.py)."""
    names = info["unexpected_keys"]
    prefixes = {match[1] for name in names if (match := _MTP.match(name))}
    return info | {"unexpected_keys": {name for name in names if not name.startswith(tuple(prefixes))}}


def assign(path: str, model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Give a model on the meta device its weights, on `device`; they keep their dtypes.

    Raises:
        ValueError: naming tensors that are missing, unexpected, misshapen, integers in place of floats, or not finite.
    """
    expected = model.state_dict()
    both = tensors.keys() & expected.keys()
    misshapen = [(name, tensors[name].shape, expected[name].shape) for name in both if tensors[name].shape != expected[name].shape]
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    check_loaded(path, {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": misshapen})
    for name in sorted(both):
        if tensors[name].is_floating_point() != expected[name].is_floating_point():
            raise ValueError(f"{path!r} has {name} in {tensors[name].dtype}; expected {expected[name].dtype} or the like; convert it again")
    model.load_state_dict(tensors, strict=True, assign=True)
    nn.Module.to(model, device)
    check_finite(path, model)


@torch.no_grad()
def check_finite(path: str, model: nn.Module) -> None:
    """Refuse weights that are NaN or infinite. Quantised ones, and those that are not in memory, are left out.

    It reads each weight once, without a copy (0.06 s/GB on one core, where reading from the disk's cache takes 0.7).

    Raises:
        ValueError: naming the first such tensor.
    """
    finite: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        data = data.to_local() if isinstance(data, DTensor) else data
        if type(data) is Tensor and data.dtype in _CHECKED and not data.is_meta and data.numel():
            finite[name] = torch.stack(torch.aminmax(data)).isfinite().all()
    wrong = [name for name, holds in finite.items() if not bool(holds)]
    if wrong:
        more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        raise ValueError(f"{path!r} has NaN or infinite weights in {wrong[0]}{more}; save it again from a training that did not diverge")


def _kind(dtype: str) -> str:
    """What kind of number a dtype of safetensors' is."""
    return "bool" if dtype == "BOOL" else {"I": "integers", "U": "integers", "C": "complex"}.get(dtype[0], "floating point")


def _no_weights(source: str) -> Exception:
    """The error for a model without safetensors, by what it has instead."""
    names = sorted(os.listdir(source)) if os.path.isdir(source) else []
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if pickles:
        return ValueError(f"{source!r} holds only pickled weights ({pickles[0]}); save it again with safetensors, pickles are never loaded")
    if ggufs:
        return ValueError(f"{source!r} holds only GGUF weights; name the file: {os.path.join(source, ggufs[0])}")
    return FileNotFoundError(f"no weights in {source!r}: expected {WEIGHTS} or {INDEX}; copy the complete model folder")


def _check_name(name: str, index: str) -> None:
    """Raises ValueError unless the index names a safetensors file within its folder."""
    if name.endswith((".bin", ".pt", ".pth")):
        raise ValueError(f"{index} names pickled weights ({name!r}); save it again with safetensors, pickles are never loaded")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"{index} names {name!r}, which is outside its folder; expected files beside it: {_ADVICE}")
    if not name.endswith(".safetensors"):
        raise ValueError(f"{index} names {name!r}; expected a safetensors file beside it: {_ADVICE}")


def _weight_file(source: str, name: str, revision: str) -> str:
    """The local path of a weight file, downloaded if need be.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a link that leads out of a folder, except to the Hub cache's own files, which are stored beside its snapshots.
    """
    path = model_file(source, name, revision)
    if path is None:
        raise FileNotFoundError(f"no {name} in {source!r}, which {INDEX} names; copy the complete model folder")
    if os.path.isdir(source):
        folder, actual = Path(source).resolve(), Path(path).resolve()
        blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
        if not any(actual.is_relative_to(inside) for inside in (folder, *blobs)):
            raise ValueError(f"{name} in {source!r} is a link to {str(actual)!r}, outside the folder; copy the file there")
    return path


def _read_header(source: str, name: str, revision: str) -> dict[str, Header]:
    try:
        with safe_open(_weight_file(source, name, revision), framework="pt") as file:
            slices = ((tensor, file.get_slice(tensor)) for tensor in file.keys())  # noqa: SIM118
            return {tensor: Header(name, part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices}
    except SafetensorError as error:
        raise ValueError(f"{name} in {source!r} is damaged or cut off ({error}); {_ADVICE}") from None


def check_adapter(folder: str) -> None:
    """Check the LoRA adapter in a folder. Raises ValueError and FileNotFoundError as `check_folder`."""
    path = os.path.join(folder, ADAPTER_CONFIG)
    config = read_json(Path(path))
    kind = field(config, "peft_type", str, path)
    if kind != "LORA":
        raise ValueError(f"{path}: an adapter of `peft_type` {kind}; only LORA can be read: merge it into the model's weights")
    for key in ("megatron_config", "auto_mapping", "runtime_config"):  # they import modules by name
        if config.get(key):
            raise ValueError(f"{path}: `{key}` is set, which is not supported; merge the adapter into the model's weights")
    if not os.path.isfile(os.path.join(folder, ADAPTER)):
        raise FileNotFoundError(
            f"no {ADAPTER} in {folder!r}, which {ADAPTER_CONFIG} is for; pickles are never loaded: save it as safetensors"
        )
    shapes = {name: header.shape for name, header in _read_header(folder, ADAPTER, "").items()}
    ranks = {shape[0] for name, shape in shapes.items() if ("lora_A" in name or "lora_embedding_A" in name) and shape}
    pattern = field(config, "rank_pattern", (dict, type(None)), path) or {}
    wrong = [rank for rank in (field(config, "r", int, path), *pattern.values()) if rank not in ranks]
    if wrong:
        raise ValueError(f"{path}: a rank of {wrong[0]!r}; the matrices in {ADAPTER} have {sorted(ranks)}: {_ADVICE}")
