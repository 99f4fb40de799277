"""Whether a drafter's folder is right: the rules of its engines, and the logits of a second reading beside those of our own model.

Letters: S positions · V target vocabulary · L target layers · K draft steps.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.drafter import TargetOutput
from draftsmith.models.artifact import raw_config
from draftsmith.models.drafter import methods
from draftsmith.models.formats import plain, quantise, rules
from draftsmith.models.formats.eagle import MASK
from draftsmith.models.formats.engines import ENGINES, FAMILIES, NAMES, ROWS, limits_of
from draftsmith.models.formats.gguf_file import FILE
from draftsmith.models.formats.medusa import SHARED
from draftsmith.models.formats.note import NOTE, changed_files, read_note
from draftsmith.models.formats.published import check_files, format_of, read_published
from draftsmith.models.target import Target
from draftsmith.models.weights import few_of

__all__ = ["EXACT", "differences", "family_in", "faults", "tolerance_of"]

EXACT, ROUNDED = 1e-4, 3e-2  # of the largest logit: sums in another order, and weights rounded to half precision
UNEXPECTED = (TypeError, AttributeError, LookupError, RuntimeError, ArithmeticError)  # of a config with values of other kinds
LENGTH, STEPS = 9, 3  # of the random text, and draft steps at most


def faults(folder: Path, target: Target, engines: list[str] | None = None, called: Path | None = None) -> list[str]:
    """One line for each thing that is wrong with a folder, "engines: what"; none where nothing is.

    Args:
        folder: of a published drafter, a draft model, or a GGUF file called model.gguf.
        target: what it drafts for; its decoder layers are not needed.
        engines: keys of `ENGINES`; None is the one that draftsmith.json names, else all that serve such a drafter.
        called: the path by which engines get it; None is its own.

    Raises:
        FileNotFoundError, ValueError: nothing can be said of the folder: no config.json, a damaged file, a family or an engine that is unknown here.
    """
    note = read_note(folder)
    if note and note["engine"] not in ENGINES | NAMES:
        raise ValueError(f"{folder / NOTE}: `engine` is {note['engine']!r}; expected one of {', '.join(ENGINES | NAMES)}; restore the file")
    lines = [f"all: {name} is not what was exported: another file, or a copy cut off" for name in changed_files(folder, note)]
    if (folder / FILE).is_file():
        lines += _not_serving(engines, ["gguf"], "a GGUF file")
        return lines + (_gguf(folder, target) if not engines or "gguf" in engines else [])
    kind = format_of(str(folder))
    raw, _ = raw_config(str(folder))
    if not kind and raw.get("model_type") in methods():
        raise ValueError(
            f"{folder} is an artifact of Draftsmith's own, which it loads as it is; for engines: draftsmith export {folder} --to …"
        )
    try:
        check_files(folder)
        return lines + _faults(folder, target, engines, kind, raw, note, called or folder.resolve())
    except (ValueError, FileNotFoundError) as error:
        return [*lines, f"all: {error}"]
    except UNEXPECTED as error:
        return [*lines, f"all: config.json has a value of another kind than expected ({' '.join(str(error).split())})"]


def _faults(
    folder: Path, target: Target, engines: list[str] | None, kind: str, raw: dict[str, Any], note: dict[str, Any], called: Path
) -> list[str]:
    """`faults` of a folder whose files can be read. kind, raw, note: of `format_of`, its config and `read_note`."""
    lines = list[str]()
    if kind in NAMES.values():  # no engine reads them
        return lines + _not_serving(engines, [], FAMILIES[kind]) + _unreadable(folder, target)
    _, tensors = plain.read_folder(folder)
    family = family_in(folder)
    serving = [engine for own, engine in ROWS if own == family and engine != "gguf"]  # llama.cpp reads model.gguf alone
    lines += _not_serving(engines, serving, f"{FAMILIES[family]} in safetensors")
    wanted = [engine for engine in engines if engine in serving] if engines else [note["engine"]] if note else serving
    lines += _said(rules.path_faults(family, called), wanted)
    if family == "student":
        return lines + _said(rules.student_faults(raw, tensors, target, folder), wanted) + _unloadable(folder, raw)
    if faults_of := rules.FAULTS.get(family):
        lines += _said(faults_of(raw, tensors, target, folder), wanted)
    else:
        lines += _said(rules.eagle_faults(family, raw, tensors, target, folder), wanted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drafter = read_published(str(folder), target)
    except ValueError as error:
        return [*lines, f"all: {error}"]
    named = {ENGINES[engine] for engine in wanted}
    lines += [f"{limit.engine}: it {limit.why}" for limit in limits_of(drafter, target) if limit.refused and limit.engine in named]
    faulty = {name for line in lines for name in line.partition(": ")[0].split(", ")}
    sound = [engine for engine in wanted if ENGINES[engine] not in faulty]
    # 8-bit weights are read in float32, beside others that were rounded.
    tolerance, drafter = ROUNDED if quantise.KEY in raw else tolerance_of(target, drafter.dtype), drafter.float()
    return lines + _said(
        ((engine, what) for engine in sound for what in differences(folder, engine, family, drafter, target, tolerance)), sound
    )


def _not_serving(engines: list[str] | None, serving: list[str], what: str) -> list[str]:
    """A line for each of the engines that does not serve such a folder."""
    return [f"{ENGINES[engine]}: it does not serve {what}" for engine in engines or () if engine not in serving]


def _unreadable(folder: Path, target: Target) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_published(str(folder), target)
    except ValueError as error:
        return [f"all: {error}"]
    return []


def _unloadable(folder: Path, raw: dict[str, Any]) -> list[str]:
    """A line where transformers cannot load a draft model, or where weights are missing, misshapen or not finite; none for 8-bit weights."""
    if quantise.KEY in raw:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Target.load(str(folder), dtype=torch.float32)
    except (ValueError, OSError) as error:
        return [f"all: {error}"]
    return []


def family_in(folder: Path) -> str:
    """The family, as in `engines.ROWS`, of a folder in an engine's layout, or "GGUF". Raises as `format_of`."""
    if (folder / FILE).is_file():
        return "GGUF"
    kind = format_of(str(folder))
    if kind != "eagle":
        return kind or "student"
    raw, tensors = plain.read_folder(folder)
    return "peagle" if MASK in tensors else f"eagle{_version(raw, tensors)}"


def tolerance_of(target: Target, dtype: torch.dtype) -> float:
    """How far logits may differ for a folder in `dtype`: by more where the target's own weights, in float32 here, are rounded in it."""
    weight = target.head_weight
    return EXACT if torch.equal(weight.to(dtype).float(), weight.float()) else ROUNDED


def differences(folder: Path, engine: str, family: str, ours: Any, target: Target, tolerance: float) -> list[str]:
    """Where the second reading of a folder gives other logits than our model on random inputs; [] where it gives the same.

    Args:
        folder: of the export.
        engine, family: of `ROWS`; engines read other taps.
        ours: the drafter in float32, attached to `target`; for a draft model the transformers model.
        target: in float32.
        tolerance: of the largest logit.
    """
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        min(target.vocab_size, len(_rows(ours)) if family == "student" else target.vocab_size), (LENGTH,), generator=random
    )
    if family == "student":
        with torch.no_grad():
            expected = ours(tokens[None]).logits[0].float()
        return _compare("position", {0: expected}, {0: _student(folder, engine, tokens)}, tolerance)
    hidden = torch.randn(LENGTH, target.hidden_size, generator=random)
    states = torch.randn(target.num_layers + 1, LENGTH, target.hidden_size, generator=random)
    taps = torch.stack([states[tap + 1] for tap in ours.taps], 1)[None] if ours.taps else None
    features = ours.position_features(tokens, TargetOutput(hidden[None], taps))
    logits = ours.position_logits(features, torch.arange(1, LENGTH))
    config, tensors = plain.gguf_content(folder / FILE) if engine == "gguf" else plain.read_folder(folder)
    inputs = _inputs(target, tokens, states, hidden)
    if family == "medusa":
        rows = plain.medusa_logits(config, tensors, inputs)
        if target.soft_cap and ours.config.share_head and tensors.keys() & {SHARED, f"0.{ours.config.num_layers}.weight"}:
            rows = target.soft_cap * (rows / target.soft_cap).tanh()  # engines leave the soft-capping out, which changes no ranking
        return _compare("root", dict(enumerate(logits)), {root: rows[root] for root in range(LENGTH - 1)}, tolerance)
    if family == "mlp":
        second = plain.mlp_logits(config, tensors, inputs)
    elif family in ("dflash", "dspark"):
        second = plain.dflash_logits(config, tensors, inputs)
    else:
        read = plain.tapped(engine, config, folder, target.num_layers) if family != "eagle1" else []
        second = plain.eagle_logits(config, tensors, inputs, read, min(STEPS, logits.shape[1]), gguf=engine == "gguf")
    return _compare("root, step", {at: logits[at[0] - 1, at[1]] for at in second}, second, tolerance)


def _compare(word: str, expected: dict[Any, Tensor], got: dict[Any, Tensor], tolerance: float) -> list[str]:
    for at, row in got.items():
        ours = expected[at].detach().float()
        if ours.shape != row.shape or not torch.equal(ours.isfinite(), row.isfinite()):
            return [f"it drafts among other tokens than our model reads from it, at {word} {at}"]
        left, right = ours[ours.isfinite()], row[row.isfinite()]
        gap, size = float((left - right).abs().max()), float(left.abs().max())
        if gap > tolerance * max(size, 1e-6):
            return [f"its logits differ from our model's by {gap:.2g} of {size:.2g}, at {word} {at}"]
    return []


def _student(folder: Path, engine: str, tokens: Tensor) -> Tensor:
    """The logits [S,V] of a draft model as written: of a Llama in plain torch, of others by transformers, read from the disk anew."""
    if engine == "gguf":
        return plain.llama_logits(*plain.gguf_content(folder / FILE), tokens, True)
    config, tensors = plain.read_folder(folder)
    simple = config["model_type"] == "llama" and (config.get("rope_parameters") or {}).get("rope_type", "default") == "default"
    if simple and config.get("hidden_act", "silu") == "silu" and not (config.get("attention_bias") or config.get("mlp_bias")):
        return plain.llama_logits(config, tensors, tokens, False)
    model = Target.load(str(folder), dtype=torch.float32).model
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def _rows(model: Any) -> Tensor:
    return model.get_input_embeddings().weight


def _version(raw: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """1 or 3, where the names of architectures do not say it by the tensors."""
    text = json.dumps(raw.get("architectures")).lower()
    return 3 if "eagle3" in text or "lm_head.weight" in tensors or "norm.weight" in tensors else 1


def _said(listed: Iterator[rules.Fault], engines: list[str]) -> list[str]:
    """Lines for those of the engines that a fault concerns."""
    lines = []
    for names, what in listed:
        if hit := [ENGINES[engine] for engine in names.split() if engine in engines]:
            lines.append(f"{', '.join(hit)}: {what}")
    return lines


def _inputs(target: Target, tokens: Tensor, states: Tensor, hidden: Tensor) -> plain.Inputs:
    return plain.Inputs(tokens, states, hidden, target.embed(torch.arange(target.vocab_size)).float(), lambda x: target.logits(x).float())


def _gguf(folder: Path, target: Target) -> list[str]:
    """A line for each rule that a GGUF file breaks, and for tensors that are missing, misshapen or not finite."""
    entries, tensors = plain.gguf_content(folder / FILE)
    lines = _said(rules.gguf_faults(entries, tensors, target), ["gguf"])
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        return [*lines, f"all: NaN or infinite weights in {few_of(broken)}"]
    if lines:
        return lines
    tokens = torch.zeros(LENGTH, dtype=torch.int64)
    try:
        if entries["general.architecture"] == "eagle3":
            states = torch.ones(target.num_layers + 1, LENGTH, target.hidden_size)
            read = plain.tapped("gguf", entries, folder, target.num_layers)
            plain.eagle_logits(entries, tensors, _inputs(target, tokens, states, states[0]), read, 1, gguf=True)
        else:
            plain.llama_logits(entries, tensors, tokens, True)
    except (LookupError, RuntimeError) as error:
        return [f"all: a tensor or an entry is missing, or of another size ({' '.join(str(error).split())}); copy the file again"]
    return []
