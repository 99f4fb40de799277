"""The files of a model, in a folder or on the Hub: where they are, whether they are complete, its config, and single tensors."""

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from draftsmith.inference.reading import describe, field, read_json
from draftsmith.inference.support import check_supported
from draftsmith.models import gguf, mimo

__all__ = [
    "TOKENIZER_FILES",
    "cached_commit",
    "UNEXPECTED",
    "check_config",
    "check_generation",
    "check_stops",
    "folder_at_hand",
    "in_words",
    "looks_local",
    "model_file",
    "path_for_engines",
    "read_config",
    "read_tokenizer",
    "resolve_path",
]

mimo.register()

SHIPPED = {"tiny": Path(__file__).parent / "tiny", "tiny-draft": Path(__file__).parent / "tiny_draft"}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
_FILE_ENDINGS = (".yaml", ".yml", ".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Keys that say how many modules or labels transformers makes, and the most that any model may have.
_COUNTED, _MOST = re.compile(r"(^|_)(layers?|heads?|experts|labels|blocks)$"), 10_000
_SIZES = re.compile(r"(vocab|hidden|intermediate)_size|head_dim|num_(hidden_layers|(attention|key_value)_heads)|max_position_embeddings")
_KINDS = {"model_type": str, "auto_map": dict, "architectures": list, "quantization_config": dict}  # or null
_OWN_CODE = "runs model code of its own; read it, then set target.trust_remote_code=true or --trust-remote-code"
_DEEPEST = 32  # objects within objects
# What transformers and tokenizers raise for values of a kind that they do not expect.
UNEXPECTED = (TypeError, AttributeError, KeyError, IndexError, ArithmeticError, AssertionError, RecursionError, StrictDataclassError)


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
    if not path.strip() or "\0" in path:
        raise ValueError(f"{prefix}got {path!r}; give a folder with config.json and safetensors, or a Hub id such as Qwen/Qwen3-0.6B")
    source = os.path.expanduser(path)
    if os.path.isdir(source):
        return source
    if gguf.is_gguf(path):
        return gguf.folder_of(path, key)
    if os.path.isfile(source):
        raise ValueError(f"{prefix}{path!r} is a file; give the folder of the model, or a Hub id")
    if looks_local(path):
        raise FileNotFoundError(
            f"{prefix}no folder {path!r}; give a folder with config.json and safetensors, or a Hub id such as Qwen/Qwen3-0.6B"
        )
    return path


def folder_at_hand(name: str) -> Path | None:
    """The folder of a model with its card and terms: a local one, or the Hub's cache where a card is in it. None without; asks no network."""
    folder = Path(SHIPPED.get(name, name)).expanduser()
    if folder.is_dir():
        return folder
    with suppress(HFValidationError):
        card = try_to_load_from_cache(name, "README.md")
        return Path(card).parent if isinstance(card, str) else None
    return None


def path_for_engines(name: str) -> str:
    """What other programs load a target by: of one that ships here, its folder in this repository."""
    return f"models/{SHIPPED[name].name}" if name in SHIPPED else name


def cached_commit(repo: str, revision: str) -> str:
    """The commit that `revision` stands for, from the folder that config.json was just cached in: snapshots/<commit>/."""
    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(cached).parent.name if isinstance(cached, str) else revision


def check_config(folder: str) -> dict[str, Any]:
    """The content of a folder's config.json, checked as far as transformers' own reading of it could do harm.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: no JSON object, counts of layers, heads or labels that no model has, NaN, or weights or code that it names.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no config.json in {folder!r}; give the folder that save_pretrained wrote")
    content = read_json(file)
    for key, kind in _KINDS.items():
        field(content, key, (kind, type(None)), file)
    quantised = content.get("quantization_config")
    method = quantised and quantised.get("quant_method", "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & quantised.keys() else None)
    if quantised is not None and method != "bitsandbytes" and method not in [*AUTO_QUANTIZATION_CONFIG_MAPPING]:
        raise ValueError(
            f"{file}: `quantization_config` has `quant_method` {method!r}, unknown to transformers {transformers.__version__}; update it, or "
            "correct the file"
        )
    _check_raw(content, str(file))
    return content


def _check_raw(content: Any, source: str, key: str = "", depth: int = 0) -> None:
    """Look through a config and the objects in it. Raises ValueError as `check_config`."""
    if depth > _DEEPEST:
        raise ValueError(f"{source}: nested more than {_DEEPEST} deep; no config is: restore the file")
    if isinstance(content, float) and math.isnan(content):
        raise ValueError(f"{source}: `{key}` is NaN; expected a number: correct it or restore the file")
    if isinstance(content, list):
        for value in content:
            _check_raw(value, source, key, depth + 1)
    if isinstance(content, dict):
        for name, value in content.items():
            if type(value) is int and _COUNTED.search(name) and value > _MOST:
                raise ValueError(f"{source}: `{name}` is {value:,}; expected at most {_MOST:,}: correct it or restore the file")
            if type(value) is int and _SIZES.fullmatch(name) and value < 1:
                raise ValueError(f"{source}: `{name}` is {value}; expected at least 1: correct it or restore the file")
            if name == "rope_theta" and type(value) in (int, float) and value <= 0:
                raise ValueError(f"{source}: `{name}` is {value}; expected a number above 0: correct it or restore the file")
            if name == "transformers_weights" and value is not None:
                raise ValueError(
                    f"{source}: `{name}` names weights; expected them in {_WEIGHTS} or {_INDEX}: rename them, leave the key out"
                )
            if name.endswith(("attn_implementation", "experts_implementation")) and isinstance(value, str) and "/" in value:
                raise ValueError(f"{source}: `{name}` names code on the Hub ({value!r}), which is never run; leave the key out")
            _check_raw(value, source, name, depth + 1)


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
        check_config(source)
    prefix = f"{key}: " if key else ""
    try:
        with _hub_errors(path, revision, prefix):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **common)
    except (ValueError, *UNEXPECTED) as error:
        raw, _ = PretrainedConfig.get_config_dict(source, **common)
        if reason := _unknown_reason(raw, trust_remote_code):
            raise ValueError(f"{prefix}{path!r} {reason}") from None
        raise ValueError(f"{prefix}config.json of {path!r}: {in_words(error)}; correct it or restore the file") from None
    check_supported(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        raise ValueError(f"{prefix}{path!r} is a {config.model_type!r} model, which is no causal language model; choose another model")
    return config


def require_tokenizer(tokenizer: PreTrainedTokenizerBase | None, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the target `name`. Raises ValueError where it is None."""
    if tokenizer is None:
        raise ValueError(f"target {name!r} has no tokenizer beside its weights; copy tokenizer.json there")
    return tokenizer


def read_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, key: str = ""
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model in a folder or on the Hub; None if a folder has none. Arguments as in `read_config`.

    Raises:
        FileNotFoundError: no such folder, nothing of that name on the Hub, or no access to it.
        ValueError: files that are damaged, or code of its own.
    """
    source = resolve_path(path, key)
    local = os.path.isdir(source)
    if local and not any(model_file(source, name, "") for name in TOKENIZER_FILES):
        return None
    prefix = f"{key}: " if key else ""
    try:
        with _hub_errors(path, revision, prefix):
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=revision or "main", trust_remote_code=trust_remote_code, local_files_only=local
            )
            tokenizer("a")  # some faults show when it is used
            return tokenizer
    except Exception as error:
        # The tokenizers library raises Exception itself, and no class of its own.
        if type(error) is not Exception and not isinstance(error, (ValueError, *UNEXPECTED)):
            raise
        if "trust_remote_code" in str(error):
            raise ValueError(f"{prefix}the tokenizer of {path!r} {_OWN_CODE}") from None
        _check_tokenizer_files(source if local else "", prefix)
        raise ValueError(f"{prefix}the tokenizer of {path!r} ({_first(source)}): {in_words(error)}; restore its files") from None


def _check_tokenizer_files(folder: str, prefix: str) -> None:
    """Raises ValueError for the first of a tokenizer's files that is not JSON of the expected kind, once it is known that one is wrong."""
    for name in TOKENIZER_FILES if folder else ():
        file = Path(folder) / name
        if name.endswith(".json") and file.is_file():
            try:
                _check_raw(read_json(file), str(file))
            except ValueError as error:
                raise ValueError(f"{prefix}{error}") from None


def _first(source: str) -> str:
    """The file that most of a tokenizer is in."""
    return next((name for name in TOKENIZER_FILES if model_file(source, name, "main")), TOKENIZER_FILES[0])


def check_generation(source: str, revision: str) -> None:
    """Check a model's generation_config.json, where it has one, as far as decoding reads it. Arguments as in `model_file`.

    Raises:
        ValueError: no JSON object, or values of another kind, naming the file and the key.
    """
    path = model_file(source, "generation_config.json", revision)
    if path is None:
        return
    content = read_json(Path(path))
    _check_raw(content, path)
    for key in ("temperature", "top_p", "min_p", "repetition_penalty"):
        field(content, key, (float, type(None)), path)
    for key, kind in (("top_k", int), ("do_sample", bool), ("max_length", int), ("max_new_tokens", int)):
        field(content, key, (kind, type(None)), path)
    check_stops(field(content, "eos_token_id", (int, list, type(None)), path), path)
    try:
        GenerationConfig.from_dict(content).validate()
    except (ValueError, *UNEXPECTED) as error:
        raise ValueError(f"{path}: {in_words(error)}; correct it or restore the file") from None


def check_stops(ids: Any, source: str, vocab_size: int | None = None) -> None:
    """Check `eos_token_id`: a token or a list of tokens, within the vocabulary where its size is given; or null.

    Raises:
        ValueError: naming `source`.
    """
    for token in ids if isinstance(ids, list) else [ids]:
        if token is not None and (type(token) is not int or not 0 <= token < (vocab_size or token + 1)):
            expected = "token ids" if vocab_size is None else f"0..{vocab_size - 1}"
            raise ValueError(f"{source}: `eos_token_id` is {describe(token)}; expected {expected}: correct it or restore the file")


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


def in_words(error: BaseException) -> str:
    """What a library says of a value, on one line: the last cause, by its type where its text is only a name."""
    error = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
    text = " ".join(str(error).split())[:240]
    return f"{type(error).__name__} {text}".strip() if isinstance(error, UNEXPECTED) and " " not in text else text


def _unknown_reason(raw: dict[str, Any], trust_remote_code: bool) -> str:
    """Why transformers could not tell what the config `raw` is of; "" where that is not what it refused."""
    kind = raw.get("model_type")
    if "AutoConfig" in (raw.get("auto_map") or {}) and not trust_remote_code:
        return _OWN_CODE
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
