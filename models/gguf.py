"""GGUF files as targets: dequantised once through transformers into an ordinary model folder, which is kept in a cache.

People who serve llama.cpp train for the weights that they serve. The folder holds the config, the tokenizer with its chat template, and the
weights: as they are where the file has float32 or float16, in bfloat16 where they were quantised.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftsmith.inference import durable
from draftsmith.inference.claim import lock
from draftsmith.inference.support import check_supported
from draftsmith.models.saving import save_model

__all__ = ["ENDING", "SOURCE", "folder_of", "is_gguf"]

ENDING = ".gguf"
SOURCE = "gguf.json"  # in the folder: the file that it was made of, and its hash
CACHE = "DRAFTSMITH_CACHE"  # environment variable: where folders are kept, ~/.cache/draftsmith by default
_DTYPES = {0: torch.float32, 1: torch.float16}  # by `general.file_type`; all others are quantised or bfloat16
_MAGIC = b"GGUF"
# Of values in the header: kinds of numbers with their bytes, and two more kinds.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _LIST = 8, 9


def is_gguf(path: str) -> bool:
    """Whether a path means a GGUF file: `model.gguf`, or `owner/repository:file.gguf` on the Hub."""
    return path.endswith(ENDING)


def folder_of(path: str, key: str) -> str:
    """The model folder of a GGUF file, made now if it is not in the cache.

    Args:
        path: as `is_gguf`.
        key: the recipe key or option that it was written for; error messages name it.

    Raises:
        FileNotFoundError: no such file, here or on the Hub.
        ValueError: no GGUF file, one without all tensors, or one of an architecture or format that transformers cannot dequantise.
    """
    file, prefix = _file(path, key), f"{key}: " if key else ""
    with open(file, "rb") as content:
        if content.read(4) != _MAGIC:
            raise ValueError(f"{prefix}{path!r} is no GGUF file; give another, or download it again")
        length = _header(content, file.stat().st_size)
        if not length:
            raise ValueError(f"{prefix}{path!r} cannot be dequantised: its header says more than it holds; download it again")
        content.seek(0)
        header = hashlib.sha256(content.read(length)).digest()  # all of it: `sampled_hash` may miss an entry that was edited in place
    weights = durable.sampled_hash([file])
    identity = hashlib.sha256(header + bytes.fromhex(weights)).hexdigest()
    root = Path(os.path.expanduser(os.environ.get(CACHE) or "~/.cache/draftsmith")) / "gguf"
    folder = root / identity
    if folder.is_dir():
        return str(folder)
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{identity}.lock", "w") as locked:  # other processes wait, and find the folder
        lock(locked.fileno(), wait=True)
        if not folder.is_dir():
            needed, free = 6 * file.stat().st_size, shutil.disk_usage(root).free  # 16 bits for 4, and space to write them
            if needed > free:
                raise ValueError(f"{prefix}{path!r}: needs about {needed >> 20:,} MiB in {root}, {free >> 20:,} are free; set {CACHE}")
            print(f"{path}: dequantising into {folder}, once", file=sys.stderr, flush=True)
            durable.replace_folder(folder, lambda part: _convert(file, path, prefix, weights, part))
    return str(folder)


def _header(content: BinaryIO, size: int) -> int:
    """The length of the header up to the end of its entries, in bytes; 0 where entries that it announces are not within the file: the gguf
    package believes any count, and reads on for ever."""

    def number(kind: str) -> int:
        return struct.unpack(f"<{kind}", content.read(struct.calcsize(kind)))[0]

    def skip(count: int) -> None:
        if count > size - content.tell():
            raise struct.error("past the end")
        content.seek(count, os.SEEK_CUR)

    def skip_value(kind: int, inner: bool = False) -> None:
        if kind == _STRING:
            skip(number("Q"))
        elif kind == _LIST and not inner:
            kind, count = number("I"), number("Q")
            if kind in _WIDTHS:
                skip(_WIDTHS[kind] * count)
            for _ in range(0 if kind in _WIDTHS else count):  # a string has 8 bytes at least: the file ends before a wrong count does
                skip_value(kind, inner=True)
        else:
            skip(_WIDTHS[kind])

    try:
        number("I")  # version
        _, entries = number("Q"), number("Q")
        for _ in range(entries):
            skip(number("Q"))
            skip_value(number("I"))
    except (struct.error, KeyError):
        return 0
    return content.tell()


def _file(path: str, key: str) -> Path:
    """The local file, downloaded if it is on the Hub."""
    file, prefix = Path(os.path.expanduser(path)), f"{key}: " if key else ""
    if file.is_file():
        return file
    repository, _, name = path.partition(":")
    if not name or repository.count("/") != 1 or path.startswith((".", "~", os.sep)):
        raise FileNotFoundError(f"{prefix}no file {path!r}; give a GGUF file, or one on the Hub as owner/repository:file.gguf")
    try:
        return Path(hf_hub_download(repository, name))
    except (HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(f"{prefix}no GGUF file {name!r} of {repository!r} here or on the Hub: {str(error)[:120]}") from None


def _dequantised() -> dict[str, Any]:
    """The argument by which transformers unpacks all weights. Later versions would fetch kernels from the Hub that multiply packed ones."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _convert(file: Path, path: str, prefix: str, identity: str, folder: Path) -> None:
    """Write the model folder."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"{prefix}{path!r}: GGUF files need the package gguf; pip install 'draftsmith[gguf]'") from None
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        reader = GGUFReader(file)
        kind, parts = (reader.get_field(name) for name in ("general.file_type", "split.count"))
        count = int(parts.contents()) if parts else 1
        dtype = _DTYPES.get(int(kind.contents()), torch.bfloat16) if kind else torch.bfloat16
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model, loading = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **source, **_dequantised()
        )
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{prefix}{path!r} cannot be dequantised: {' '.join(str(error).split())[:200]}; give safetensors") from None
    config: Any = model.config
    config.__dict__.pop("quantization_config", None)  # the weights are plain tensors now
    check_supported(config)
    if missing := sorted(loading["missing_keys"]):  # transformers gives those random values
        advice = f"it is one of {count} files: join them with llama-gguf-split --merge" if count > 1 else "download it again"
        raise ValueError(f"{prefix}{path!r} has {len(missing)} missing tensors ({missing[0]}); {advice}, or give safetensors")
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)  # `save_pretrained` refuses the model that was quantised
    plain.load_state_dict({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, assign=True)
    plain.tie_weights()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    plain.generation_config = GenerationConfig(**ids)
    save_model(plain, folder)
    tokenizer.save_pretrained(folder)
    (folder / SOURCE).write_text(json.dumps({"file": file.name, "hash": identity}) + "\n")
