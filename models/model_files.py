"""The files of a model, in a folder or on the Hub: where they are, whether they are complete, its config, and single tensors."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig

from draftsmith.inference.support import check_supported

__all__ = [
    "TOKENIZER_FILES",
    "cached_commit",
    "check_folder",
    "check_loaded",
    "looks_local",
    "model_file",
    "read_config",
    "read_tensors",
    "read_tokenizer",
    "resolve_path",
    "stored_tensors",
]

SHIPPED = {"tiny": Path(__file__).parent / "tiny", "tiny-draft": Path(__file__).parent / "tiny_draft"}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
_FILE_ENDINGS = (".yaml", ".yml", ".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def looks_local(path: str, endings: Iterable[str] = _FILE_ENDINGS) -> bool:
    """Whether a path that does not exist was meant as one, and not as a Hub id such as owner/model.

    Args:
        path: what a person wrote.
        endings: endings of file names that no Hub id has.
    """
    return (
        path.startswith((".", "~", os.sep))
        or path.endswith((os.sep, *endings))
        or path.count("/") > 1
        or (os.sep in path and os.path.isdir(os.path.dirname(path)))
    )


def resolve_path(path: str, key: str = "") -> str:
    """The folder in the package for "tiny" and "tiny-draft", a local folder as it is; anything else that can be one is a Hub id.

    Args:
        path: what a person wrote.
        key: the recipe key or option that it was written for; error messages name it.

    Raises:
        FileNotFoundError: a path that looks local and does not exist, so that it never becomes a request to the Hub.
        ValueError: a file where a folder is expected.
    """
    path, prefix = str(SHIPPED.get(path, path)), f"{key}: " if key else ""
    source = os.path.expanduser(path)
    if os.path.isdir(source):
        return source
    if os.path.isfile(source):
        raise ValueError(f"{prefix}{path!r} is a file; give the folder of the model, or a Hub id")
    if looks_local(path):
        raise FileNotFoundError(
            f"{prefix}no folder {path!r}; give a folder with config.json and safetensors, or a Hub id such as Qwen/Qwen3-0.6B"
        )
    return path


def cached_commit(repo: str, revision: str) -> str:
    """The commit that `revision` stands for, from the folder that config.json was just cached in: snapshots/<commit>/."""
    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(cached).parent.name if isinstance(cached, str) else revision


def check_folder(folder: str) -> None:
    """Check that a local model folder is complete: config.json, and safetensors whose headers and lengths agree.

    Raises:
        FileNotFoundError: no config.json or no weights.
        ValueError: only pickled weights, or a file that is cut off.
    """
    _check_config(folder)
    names = set(os.listdir(folder))
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if not weights and pickles:
        raise ValueError(f"{folder!r} holds only pickled weights ({pickles[0]}); save it again with safetensors, pickles are never loaded")
    if not weights:
        raise FileNotFoundError(f"no weights in {folder!r}: expected model.safetensors; copy the complete model folder")
    for name in weights:
        try:
            with safe_open(os.path.join(folder, name), framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{name} in {folder!r} is damaged or cut off ({error}); copy or save it again") from None


def _check_config(folder: str) -> None:
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no config.json in {folder!r}; give the folder that save_pretrained wrote")
    try:
        json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"config.json in {folder!r} is not JSON ({error}); it may be cut off: copy or save it again") from None


def check_loaded(path: str, info: dict[str, Any]) -> None:
    """Refuse a load that left tensors out; `info` is what transformers gives with output_loading_info=True.

    Raises:
        ValueError: naming the tensors that are missing, unexpected or of another shape (tied ones are none of these).
    """
    misshapen = [f"{name} {list(shape)} for {list(expected)}" for name, shape, expected in info["mismatched_keys"]]
    for word, names in (("missing", info["missing_keys"]), ("unexpected", info["unexpected_keys"]), ("misshapen", misshapen)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ValueError(f"{path!r} has {len(names)} {word} tensors: {shown}; its weights do not fit its config.json")


def read_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False, key: str = "") -> PretrainedConfig:
    """The config of a causal language model in a folder or on the Hub.

    Args:
        path: folder or Hub id.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run the model's own code.
        key: the recipe key or option that `path` was written for; error messages name it.

    Raises:
        FileNotFoundError: no such folder, nothing of that name on the Hub, or no access to it.
        ValueError: an architecture that transformers does not know, that cannot be tree-verified, or that is no causal language model.
    """
    source = resolve_path(path, key)
    common: dict[str, Any] = {"revision": revision or "main", "local_files_only": os.path.isdir(source)}
    if os.path.isdir(source):
        _check_config(source)
    prefix = f"{key}: " if key else ""
    try:
        with _hub_errors(path, revision, prefix):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **common)
    except ValueError:
        raw, _ = PretrainedConfig.get_config_dict(source, **common)
        reason = _unknown_reason(raw, trust_remote_code)
        if reason:
            raise ValueError(f"{prefix}{path!r} {reason}") from None
        raise
    check_supported(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        raise ValueError(f"{prefix}{path!r} is a {config.model_type!r} model, which is no causal language model; choose another model")
    return config


def read_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, key: str = ""
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model in a folder or on the Hub; None if a folder has none. Arguments as in `read_config`.

    Raises:
        FileNotFoundError: no such folder, nothing of that name on the Hub, or no access to it.
    """
    source = resolve_path(path, key)
    local = os.path.isdir(source)
    if local and not any(model_file(source, name, "") for name in TOKENIZER_FILES):
        return None
    with _hub_errors(path, revision, f"{key}: " if key else ""):
        return AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=trust_remote_code, local_files_only=local
        )


@contextmanager
def _hub_errors(path: str, revision: str | None, prefix: str) -> Iterator[None]:
    """Context in which failures of the Hub become one line that names what was wanted."""
    try:
        yield
    except OSError as error:
        if os.path.isdir(resolve_path(path)):
            raise
        cause = error.__cause__ or error.__context__ or error
        if isinstance(cause, GatedRepoError):
            reason = f"the Hub gives {path!r} only to those who accepted its licence; accept it there, then run `hf auth login`"
        elif isinstance(cause, RepositoryNotFoundError):
            reason = f"no folder {path!r} and no such model on the Hub; correct the name, or run `hf auth login` if the model is private"
        elif isinstance(cause, RevisionNotFoundError):
            reason = f"{path!r} has no revision {revision!r} on the Hub; give a branch, tag or commit that is there"
        elif isinstance(cause, LocalEntryNotFoundError):
            reason = (
                f"no folder {path!r}, no copy from the Hub here, and the Hub cannot be reached; correct the name, or connect to the network"
            )
        else:
            reason = f"no folder {path!r}, and the Hub gives no model for it ({' '.join(str(error).split())[:120]}); correct the name"
        raise FileNotFoundError(prefix + reason) from None


def _unknown_reason(raw: dict[str, Any], trust_remote_code: bool) -> str:
    """Why transformers could not tell what the config `raw` is of; "" where that is not what it refused."""
    kind = raw.get("model_type")
    if "AutoConfig" in raw.get("auto_map", {}) and not trust_remote_code:
        return "runs model code of its own; read it, then set target.trust_remote_code=true or --trust-remote-code"
    if not kind:
        return "has no model_type in its config.json; give the folder or Hub id of a transformers model"
    if kind not in CONFIG_MAPPING:
        return (
            f"is of architecture {kind!r}, which transformers {transformers.__version__} does not know; update it, or choose another model"
        )
    return ""


def model_file(source: str, name: str, revision: str) -> str | None:
    """The local path of a file of a model, downloaded if need be; None where the model has no such file.

    Args:
        source: a folder, or a Hub id.
        name: the file's name.
        revision: commit, tag or branch on the Hub; unused for a folder.
    """
    if os.path.isdir(source):
        file = os.path.join(source, name)
        return file if os.path.isfile(file) else None
    try:
        return hf_hub_download(source, name, revision=revision)
    except EntryNotFoundError:
        return None


def stored_tensors(source: str, revision: str) -> dict[str, str]:
    """Tensor name -> the safetensors file that stores it, for all tensors of a model. No tensor is read.

    Raises:
        FileNotFoundError: no safetensors of the names that transformers gives them.
    """
    single = model_file(source, _WEIGHTS, revision)
    if single is not None:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), _WEIGHTS)
    index = model_file(source, _INDEX, revision)
    if index is None:
        raise FileNotFoundError(f"no {_WEIGHTS} and no {_INDEX} in {source!r}; copy the complete model folder")
    return json.loads(Path(index).read_text())["weight_map"]


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
        path = model_file(source, name, revision)
        if path is None:
            raise FileNotFoundError(f"no {name} in {source!r}, which {_INDEX} names; copy the complete model folder")
        with safe_open(path, framework="pt") as file:
            # A copy: what safetensors gives is a view of the mapped file.
            tensors |= {tensor: file.get_tensor(tensor).to(device, copy=True) for tensor, stored in files.items() if stored == name}
    return tensors
