"""Write a drafter into the folder that an engine loads: complete and checked, or not at all."""

import copy
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import PreTrainedModel

from draftsmith.inference import durable
from draftsmith.models.artifact_files import TERMS
from draftsmith.models.dspark import DsparkConfig
from draftsmith.models.formats import gguf_file, quantise
from draftsmith.models.formats.dflash import write_dflash
from draftsmith.models.formats.eagle import write_eagle
from draftsmith.models.formats.engines import ENGINES, FAMILIES, NAMES, Limit, Row, check_row, family_of, limits_of, serving
from draftsmith.models.formats.hydra import HYDRA_FILE, PICKLE, write_hydra
from draftsmith.models.formats.medusa import write_medusa
from draftsmith.models.formats.mlp import write_mlp
from draftsmith.models.formats.mtp import FILE as MTP_FILE
from draftsmith.models.formats.mtp import write_mtp
from draftsmith.models.formats.note import NOTE, licence_of, without_serve, write_note
from draftsmith.models.formats.published import read_published
from draftsmith.models.formats.rules import path_faults
from draftsmith.models.formats.student import fitted, rounded, write_student
from draftsmith.models.formats.verify import differences, faults, tolerance_of
from draftsmith.models.model_files import folder_at_hand
from draftsmith.models.target import Target

__all__ = ["Exported", "Source", "check_output", "export", "export_names"]

MEASURED = ("acceptance.json", "report.html", "survival.png")  # of an artifact: what was measured of its weights
KEPT = ("recipe.yaml", "run.json", *MEASURED)  # and how it was trained


class Source(NamedTuple):
    """What is exported.

    Attributes:
        drafter: a drafter in float32, attached to `target`; for a draft model the transformers model.
        target: in float32; its decoder layers are not needed.
        folder: of the artifact, None for one on the Hub.
        made_for: the `TargetIdentity` as a dict.
        tree: the draft tree as in a config.
        depth: tokens of a chain, which the serving command names.
        steps: the deepest that it can draft.
        training: notes on the training.
        confidence: of a draft model.
    """

    drafter: Any
    target: Target
    folder: Path | None
    made_for: dict[str, Any] | None
    tree: Any
    depth: int
    steps: int
    training: dict[str, Any] | None
    confidence: float = 0.0


class Exported(NamedTuple):
    """A complete folder, what the engine does a little otherwise, and how to start it."""

    folder: Path
    notes: list[str]
    serve: str


def check_output(folder: Path) -> None:
    """Check that a folder may be written.

    Raises:
        ValueError: a link, a file, or a folder with content that no export wrote.
    """
    if folder.is_symlink():
        raise ValueError(f"--output {folder} is a link; nothing is written through links: name the folder itself")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; name a folder")
    if folder.is_dir() and os.listdir(folder) and not (folder / NOTE).is_file():
        raise ValueError(f"--output {folder} has content that no export wrote; name another folder, or empty it")


def export(source: Source, engine: str, folder: Path, dtype: torch.dtype, kind: str = "", called: str = "") -> Exported:
    """Write, check, and only then put in its place.

    Args:
        source: what to export.
        engine: a key of `ENGINES`.
        folder: as `check_output`; an earlier export is replaced.
        dtype: of the weights.
        kind: of `quantise.KINDS`, for linear layers of 8 bits; "" leaves them in `dtype`.
        called: the path by which files of the folder and the serving command name it; "" is its own.

    Raises:
        ValueError: a drafter that the engine does not serve, with those that do; a path that vLLM misreads; a weight that float16 does not
            hold; or a folder that did not pass its own check, which is then not there.
        OSError: the disk; what was there stays.
    """
    family, target = family_of(source.drafter), source.target
    limits = limits_of(source.drafter, target)
    row = check_row(family, engine, limits)
    folder = folder.absolute()
    check_output(folder)
    if kind:
        quantise.check_kind(kind, family, engine)
    called = called or str(folder)
    if engine == "vllm" and (wrong := [what for _, what in path_faults(family, Path(called))]):
        raise ValueError(f"--output {called}: {wrong[0]}")
    if engine == "gguf":
        gguf_file.check_tokenizer(target.tokenizer)
    if dtype == torch.float16:
        _check_range(source.drafter)

    def write(part: Path) -> None:
        ours = _write_format(source, family, engine, part, called, dtype, kind)
        _write_beside(source, engine, family, part, _card(source, family, engine, row, kind), MEASURED if kind else ())
        said = faults(part, target, [engine], Path(called)) or differences(part, engine, family, ours, target, tolerance_of(target, dtype))
        if said:
            listed = "; ".join(said).replace(str(part), str(folder))
            raise ValueError(f"the export failed its own check, and was not written: {listed}")

    folder.parent.mkdir(parents=True, exist_ok=True)
    durable.replace_folder(folder, write)
    return Exported(folder, _notes(limits, engine), serving(row, target.name, called, source.depth))


def export_names(source: Source, kind: str, folder: Path, dtype: torch.dtype) -> Path:
    """Write a drafter under other people's names of its tensors, for no engine, and only then put it in its place.

    Args:
        source: what to export.
        kind: checkpoint, for an MTP layer in its target's checkpoint, or hydra, for Hydra heads in their authors' folder.
        folder: as `check_output`; an earlier export is replaced.
        dtype: of the weights.

    Returns:
        The file with the tensors.

    Raises:
        ValueError: a drafter of another family, or a folder that does not give it back.
        OSError: the disk; what was there stays.
    """
    family, wanted = family_of(source.drafter), NAMES[kind]
    if family != wanted:
        raise ValueError(f"--to {kind} is for {FAMILIES[wanted]}; got {FAMILIES[family]}; name an engine")
    folder = folder.absolute()
    check_output(folder)
    text = (
        f"`{MTP_FILE}` has the names of the target's checkpoint."
        if kind == "checkpoint"
        else f"For the authors' code:\n\n```\n{PICKLE.format('.')}\n```"
    )

    def write(part: Path) -> None:
        (write_mtp if kind == "checkpoint" else write_hydra)(source.drafter, part, dtype)
        again = read_published(str(part), source.target).state_dict()
        if wrong := [
            name for name, tensor in source.drafter.state_dict().items() if not torch.equal(tensor.to(again[name].dtype), again[name])
        ]:
            raise ValueError(f"the export failed its own check, and was not written: {wrong[0]} is read as other numbers")
        _write_beside(source, kind, family, part, f"{_card_before(source, family)}\n\n{text}\n")

    folder.parent.mkdir(parents=True, exist_ok=True)
    durable.replace_folder(folder, write)
    return folder / (MTP_FILE if kind == "checkpoint" else HYDRA_FILE)


@torch.no_grad()
def _check_range(drafter: torch.nn.Module) -> None:
    """Raises ValueError for a weight that float16 does not hold."""
    most = torch.finfo(torch.float16).max
    for name, tensor in drafter.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) > most:
            raise ValueError(
                f"--dtype float16 holds numbers up to {most:,.0f}, {name} has {float(tensor.abs().max()):.3g}; give bfloat16 or float32"
            )


def _notes(limits: list[Limit], engine: str) -> list[str]:
    return [f"{limit.engine} {limit.why}" for limit in limits if limit.engine == ENGINES[engine] and not limit.refused]


def _write_format(source: Source, family: str, engine: str, part: Path, called: str, dtype: torch.dtype, kind: str) -> Any:
    """Write weights and config; returns the drafter with its weights rounded as they are stored, in float32."""
    if not kind:
        return _write_weights(source, family, engine, part, called, dtype)
    if family == "student":
        gguf_file.check_student(source.drafter, f"--quantise {kind}", "leave --quantise out")  # for others there is no second reading
    if engine == "gguf":
        quantise.check_blocks(source.drafter)
    ours = _write_weights(source, family, engine, part, called, dtype, eight_bits=engine == "gguf")
    quantise.round_weights(ours, kind, engine, dtype)
    if engine != "gguf":
        quantise.pack_folder(part, kind)
    return ours


def _write_weights(source: Source, family: str, engine: str, part: Path, called: str, dtype: torch.dtype, eight_bits: bool = False) -> Any:
    """Write weights and config in `dtype`, those of a GGUF in eight bits on request; returns the drafter rounded to `dtype`, in float32."""
    target = source.target
    if family == "student":
        model: PreTrainedModel = source.drafter
        tokenizer = target.require_tokenizer()
        if engine == "gguf":
            written = copy.deepcopy(fitted(model, target.vocab_size)).to(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
            gguf_file.write_llama(written, tokenizer, part, dtype, eight_bits)
        else:
            entry = {"target": source.made_for, "tree": source.tree, "confidence": source.confidence, "training": source.training}
            write_student(model, tokenizer, part, target.vocab_size, entry, source.depth, dtype)
        if engine == "tensorrt-llm":
            _write_yaml(part, {"decoding_type": "Draft_Target", "max_draft_len": source.depth, "speculative_model": called})
        return rounded(model, target.vocab_size, dtype)
    drafter = source.drafter
    if family in ("dflash", "dspark"):
        write_dflash(drafter, part, dtype)
    elif family in ("medusa", "mlp"):
        write_medusa(drafter, part, engine, dtype) if family == "medusa" else write_mlp(drafter, part, dtype)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(part)
    elif engine == "gguf":
        gguf_file.write_eagle3(drafter, part, dtype, eight_bits)
    else:
        write_eagle(drafter, part, dtype, library=engine == "speculators")
    if engine == "tensorrt-llm" and family == "eagle3":
        settings = {"decoding_type": "Eagle3", "max_draft_len": source.depth, "speculative_model": called}
        _write_yaml(part, settings | {"eagle3_layers_to_capture": list(drafter.taps)})
    read = copy.deepcopy(drafter).to(dtype).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading the drafter has warned already
        return read.attach(target)


def _write_yaml(part: Path, settings: dict[str, Any]) -> None:
    """TensorRT-LLM's settings, which its folder has no place for."""
    durable.write_text(part / "tensorrt-llm.yaml", yaml.safe_dump({"speculative_config": settings}, sort_keys=False))


def _write_beside(source: Source, engine: str, family: str, part: Path, card: str, left_out: Sequence[str] = ()) -> None:
    """The model card, what KEPT names but for `left_out`, licences, and the note with hashes of all of them."""
    for name in KEPT if source.folder else ():
        assert source.folder is not None
        if name not in left_out and (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, part / name)
    folders = {"target": folder_at_hand(source.target.name), "drafter": source.folder}
    licences = {name: licence_of(folder) if folder else "" for name, folder in folders.items()}
    for origin, prefix in ((folders["target"], "target-"), (source.folder, "")):
        for file in [file for pattern in TERMS for file in origin.glob(pattern)] if origin else []:
            if file.is_file():
                shutil.copyfile(file, part / (prefix + file.name.removeprefix(prefix)))
    durable.write_text(part / "README.md", card)
    drafter = {"target": source.made_for, "tree": source.tree, "training": source.training}
    config = getattr(source.drafter, "config", None)
    weights = getattr(config, "confidence_weights", None)
    drafter |= {"confidence": source.confidence} if family == "student" else {"depth": source.steps, "confidence_weights": weights}
    if isinstance(config, DsparkConfig):
        drafter |= {"confidence": config.confidence, "temperatures": config.temperatures}
    write_note(part, engine, family, drafter, source.folder, licences)


def _card_before(source: Source, family: str) -> str:
    """The artifact's card without its section Serve; where there is none, a heading."""
    card = source.folder / "README.md" if source.folder else None
    text = without_serve(card.read_text(encoding="utf-8")) if card and card.is_file() else f"# {family} drafter for {source.target.name}"
    return text.rstrip()


def _card(source: Source, family: str, engine: str, row: Row, kind: str) -> str:
    """The artifact's card, and how to serve this folder; with a `kind` of quantisation, that its weights were not measured."""
    serve = serving(row, source.target.name, "<this folder>", source.depth)
    checked = "was run with folders like this one" if row.proof == "run" else "was not run: the folder follows the rules in its source"
    before = _card_before(source, family)
    if kind:
        before += f"\n\n**The linear layers here are in {kind}.** What is measured above is of the weights that they were rounded from."
    return f"{before}\n\n## Serve\n\nWritten for {ENGINES[engine]}, which {checked}.\n\n```\n{serve}\n```\n"
