"""Drafters in other people's folders and on the Hub, read into our own models: EAGLE-1 and -3, Medusa, Hydra, MLP speculators, DFlash,
DSpark, MTP layers.

Only safetensors are read. A folder that `draftsmith export` wrote brings its tree and its target's identity along, in draftsmith.json.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from draftsmith.inference.expand import parse_tree_spec
from draftsmith.inference.reading import field
from draftsmith.models.artifact import raw_config
from draftsmith.models.artifact_files import TERMS
from draftsmith.models.drafter import DrafterModel, methods
from draftsmith.models.dspark import DsparkConfig
from draftsmith.models.formats import hydra
from draftsmith.models.formats.dflash import ARCHITECTURES, INNER, read_dflash
from draftsmith.models.formats.eagle import VERSIONS, read_eagle
from draftsmith.models.formats.medusa import BLOCKS, HEADS, read_medusa
from draftsmith.models.formats.mlp import MODEL_TYPE, read_mlp
from draftsmith.models.formats.mtp import FILE, read_mtp
from draftsmith.models.formats.note import NOTE, read_note
from draftsmith.models.model_files import model_file
from draftsmith.models.target import Target, TargetIdentity, check_same, resolve_path
from draftsmith.models.weights import WEIGHTS, headers

__all__ = ["check_files", "format_of", "folder_of", "open_tensors", "read_published", "target_of"]

KINDS = "EAGLE, Medusa, Hydra, an MLP speculator, DFlash, DSpark or an exported MTP layer"
PICKLES = (".bin", ".pt", ".pth")
_OF_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja")
WANTED = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", *_OF_TOKENIZERS, "README.md", *TERMS, NOTE]
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; s.save_file({{k: v.contiguous().clone() for k, v in '
    "torch.load('{0}', map_location='cpu', weights_only=True).items()}}, '{1}', {{'format': 'pt'}})\""
)


def format_of(path: str) -> str:
    """eagle, medusa, hydra, mlp, dflash, dspark or mtp for a published folder or Hub id; "" for anything else: an artifact of ours, a causal LM, nothing at all.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: a damaged config.
    """
    source = resolve_path(path)
    raw, _ = raw_config(source)
    listed = raw.get("architectures") or []
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if hydra.HEADS in raw:
        return "hydra"
    if os.path.isdir(source) and (Path(source) / FILE).is_file() and not (Path(source) / WEIGHTS).exists():
        return "mtp"
    if raw.get("model_type") == MODEL_TYPE or "n_predict" in raw:
        return "mlp"
    for kind, name in ARCHITECTURES.items():
        if name in names:
            return kind
    if INNER in raw:
        return "dflash"
    if raw.get("speculators_model_type") or any(VERSIONS.get(name) for name in names):
        return "eagle"
    ours = {"target", "tree", "share_head"} & raw.keys()
    medusa = raw.get("model_type") == "medusa" or "MedusaModel" in names or any(key in raw for key in HEADS[:2])
    if medusa and (not ours or any(key in raw for key in (*HEADS[:2], *BLOCKS[:2]))):
        return "medusa"
    # SafeAILab's own trainer calls its heads Llamas, others call them anything. They have an fc, and no model around it. Of a Hub id the weights are
    # downloaded here; whoever asks reads them next.
    if raw.get("model_type") in methods() or model_file(source, WEIGHTS, "main") is None:
        return ""
    return "eagle" if "fc.weight" in headers(source, "main") else ""


def target_of(path: str) -> dict[str, Any]:
    """What a published folder says of its target: a `TargetIdentity` as a dict, or its name alone; {} where it says nothing."""
    source = resolve_path(path)
    note = read_note(Path(source)) if os.path.isdir(source) else {}
    if note.get("target"):
        return note["target"]
    raw, file = raw_config(source)
    inner = field(raw, "speculators_config", (dict, type(None)), file) or {}
    verifier = field(inner, "verifier", (dict, type(None)), file) or {}
    name = raw.get("base_model_name_or_path") or verifier.get("name_or_path")
    return {"name": name} if isinstance(name, str) and name else {}


def folder_of(path: str, wanted: Sequence[str] = WANTED) -> Path:
    """The local folder. Of a Hub id only the files that `wanted` names are downloaded (by default what engines read, the card and the terms), and those
    of its note."""
    source = resolve_path(path)
    if os.path.isdir(source):
        return Path(source)
    folder = Path(snapshot_download(source, allow_patterns=[*wanted]))
    exported = [name for name in read_note(folder).get("files", {}) if not (folder / name).exists()]
    # A stranger's note may name anything.
    pickles = [f"*{ending}" for ending in PICKLES]
    return Path(snapshot_download(source, allow_patterns=[*wanted, *exported], ignore_patterns=pickles)) if exported else folder


def check_files(folder: Path) -> None:
    """Check that a folder has complete safetensors of its own.

    Raises:
        ValueError: pickles alone, with the command that converts them; a link that leads out of the folder; a file that is cut off; or two files
            that have other values for a tensor, of which engines would read either.
        FileNotFoundError: no weights at all.
    """
    files, first = sorted(folder.glob("*.safetensors")), dict[str, Path]()
    root = folder.resolve()
    inside = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]  # the Hub's cache links into blobs
    for file in files:
        if not any(file.resolve().is_relative_to(parent) for parent in inside):
            raise ValueError(f"{file} is a link out of its folder; copy the file there")
        try:
            with safe_open(file, "pt") as reader:  # reads the header, and holds the file's size to it
                names = list(reader.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or cut off ({error}); copy the complete folder") from None
        for name in names:
            if name in first and not _same(name, first[name], file):
                raise ValueError(f"{folder}: {name} in {file.name} is not that in {first[name].name}; delete the file that is not meant")
            first[name] = file
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if not files and pickles:
        name = "medusa_lm_head.safetensors" if "medusa" in pickles[0] else WEIGHTS
        raise ValueError(
            f"{folder} holds only pickled weights ({pickles[0]}), which are never loaded; where you trust them convert them: "
            + _CONVERT.format(folder / pickles[0], folder / name)
        )
    if not files:
        raise FileNotFoundError(f"no safetensors in {folder}; copy the complete folder")


def _same(name: str, *files: Path) -> bool:
    """Whether a tensor has the same values in two files."""
    tensors = []
    for file in files:
        with safe_open(file, "pt") as reader:
            tensors.append(reader.get_tensor(name))
    return torch.equal(*tensors)


def open_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors. Raises as `check_files`."""
    check_files(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def read_published(path: str, target: Target, dtype: torch.dtype | None = None) -> DrafterModel:
    """A published drafter as a model of ours, attached to `target`, in eval mode.

    Args:
        path: folder or Hub id, for which `format_of` names a format.
        target: what it drafts for.
        dtype: of the weights; None keeps the file's.

    Raises:
        FileNotFoundError, ValueError: as the readers of formats; or a folder that draftsmith.json says is for another target.
    """
    kind, folder = format_of(path), folder_of(path)
    if not kind:
        raise ValueError(f"{path!r} is no published drafter ({KINDS}); expected one of the layouts in models/FORMATS.md")
    note = read_note(folder)
    if note.get("target") and (warning := check_same(TargetIdentity.from_dict(note["target"]), target.identity)):
        warnings.warn(warning, stacklevel=2)
    check_files(folder)
    readers = {
        "medusa": read_medusa,
        "hydra": hydra.read_hydra,
        "mlp": read_mlp,
        "mtp": read_mtp,
        "dflash": read_dflash,
        "dspark": read_dflash,
    }
    try:
        drafter: DrafterModel = read_eagle(folder, target) if kind == "eagle" else readers[kind](folder, open_tensors(folder), target)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(
            f"{folder}: config.json has a value of another kind than expected ({error}); correct it, or copy the complete folder"
        ) from None
    if kind in ("eagle", "mtp") and note.get("depth"):
        drafter.config.steps = note["depth"]
    if note.get("tree") is not None:
        if parse_tree_spec(note["tree"]).max_depth > drafter.depth_limit:
            raise ValueError(f"{folder / NOTE}: `tree` is deeper than the {drafter.depth_limit} steps of the drafter; correct it")
        drafter.config.tree = note["tree"]
    if note.get("target"):
        drafter.config.target = note["target"]
    drafter.config.training, drafter.config.confidence_weights = note.get("training"), note.get("confidence_weights")
    if isinstance(drafter.config, DsparkConfig):
        drafter.config.confidence, drafter.config.temperatures = note.get("confidence", 0.0), note.get("temperatures")
        drafter.config.check_confidence()
    if dtype is not None:
        drafter.to(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return drafter
