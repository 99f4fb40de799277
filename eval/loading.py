"""The target and the drafter that a command works with, and a person's prompt as token ids."""

import argparse
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig

from draftsmith.data.prompts import Prompt
from draftsmith.eval import ranks
from draftsmith.inference import expand as grow
from draftsmith.inference import machine
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import TreeSpec, parse_tree_spec
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import DrafterModel, default_paths, is_drafter, load_config, load_drafter
from draftsmith.models.target import Target, TargetIdentity, check_same, resolve_path
from draftsmith.models.tokenizer_check import check_pair

WEIGHTLESS = {"ngram": Ngram, "suffix": Suffix}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a recipe or an option names; "auto" is float32 on a CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
    return DTYPES[name]


def command() -> str:
    """How the `draftsmith` command is called here: by name where it is on the PATH, else by its path beside this Python."""
    if shutil.which("draftsmith"):
        return "draftsmith"
    beside = Path(sys.executable).with_name("draftsmith")
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


AnyDrafter = DrafterModel | DraftModel | Ngram | Suffix


def distilled(path: str) -> dict[str, Any] | None:
    """What the config of a draft model that Draftsmith distilled says under `draftsmith`: target (a `TargetIdentity` as a dict), tree,
    confidence, training. None for any other model."""
    raw, _ = PretrainedConfig.get_config_dict(resolve_path(path))
    return raw.get("draftsmith")


def open_models(
    target: str | None, drafters: Sequence[str], dtype: str, trust_remote_code: bool = False
) -> tuple[Target, list[AnyDrafter]]:
    """Load a target, and drafters for it: each a kind without weights, the folder or Hub id of a trained drafter, or that of any causal
    LM with the target's tokens. Without a target's name, it is the one that the first trained drafter or distilled draft model was
    made for. A distilled draft model starts with its own tree and confidence.

    Raises:
        ValueError: a drafter of another target, naming both, one with other tokens, or a target without a tokenizer. What configs and
            tokenizers can tell is told before any weights are read.
    """
    named = [word for word in drafters if word not in WEIGHTLESS]
    for word in named:
        if not word or ("/" not in word and not Path(resolve_path(word)).is_dir()):
            raise ValueError(
                f"drafter {word!r}: expected {', '.join(WEIGHTLESS)}, the folder of a trained drafter or draft model, "
                "or a Hub id such as name/drafter"
            )
    trained = {word for word in named if is_drafter(word)}
    entries = {word: distilled(word) for word in named if word not in trained}
    made = (load_config(word).target if word in trained else (entries[word] or {}).get("target") for word in named)
    made_for = next(filter(None, made), None) or {}
    name = target or made_for.get("name") or "tiny"
    revision = made_for.get("revision") or None if name == made_for.get("name") and not Path(name).exists() and name != "tiny" else None
    for word in named:
        if word not in trained:
            check_pair(name, word, revision=revision, trust_remote_code=trust_remote_code)
    common: dict[str, Any] = {"dtype": dtype_of(dtype), "device": ranks.device(), "trust_remote_code": trust_remote_code}
    loaded = Target.load(name, revision=revision, **common)
    if loaded.tokenizer is None:
        raise ValueError(f"target {name!r} has no tokenizer beside its weights; copy tokenizer.json there")
    some = torch.arange(8, device=loaded.device)[None] % loaded.vocab_size
    machine.threads(lambda: loaded.forward(some))
    loaded.pack()
    found: list[AnyDrafter] = []
    for word in drafters:
        if word in WEIGHTLESS:
            found.append(WEIGHTLESS[word]())
        elif word in trained:
            found.append(load_drafter(word, loaded, dtype=loaded.dtype))
        else:
            found.append(_draft_model(word, entries[word], loaded, common))
    return loaded, found


def _draft_model(word: str, entry: dict[str, Any] | None, target: Target, common: dict[str, Any]) -> DraftModel:
    entry = {"target": None, "tree": default_paths(3, 7), "confidence": 0.0} | (entry or {})
    if entry["target"]:
        warning = check_same(TargetIdentity.from_dict(entry["target"]), target.identity)
        if warning:
            warnings.warn(warning, stacklevel=3)
    model = Target.load(word, **common)
    model.pack()
    return DraftModel(model, parse_tree_spec(entry["tree"]), confidence=entry["confidence"])


def set_confidence(drafter: AnyDrafter | None, confidence: float | None) -> None:
    """Draft on only where the best next token is at least this likely; None leaves the drafter's own.

    Raises:
        ValueError: a drafter that is no draft model.
    """
    if confidence is None:
        return
    if not isinstance(drafter, DraftModel):
        raise ValueError(
            f"--confidence {confidence:g}: {drafter.method if drafter else 'none'} is no draft model; expected one; leave it out"
        )
    drafter.confidence = confidence


def temperatures(given: Sequence[float] | None) -> list[float]:
    """The temperatures to measure at, each once; 0 and 1 where none is given. Raises ValueError for one that is none."""
    chosen = list(dict.fromkeys(given or [0.0, 1.0]))
    for temperature in chosen:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"--temperature {temperature}: expected 0 or more")
    return chosen


def check_numbers(options: argparse.Namespace, least_tokens: int = 1) -> None:
    """Raises ValueError for a number outside its range, by the name of its option."""
    ranges = {
        "nodes": (2, 256),
        "depth": (1, 64),
        "width": (1, 64),
        "rows": (1, 1 << 12),
        "max_new_tokens": (least_tokens, 1 << 20),
        "limit": (1, 1 << 20),
        "repeats": (1, 1 << 12),
    }
    for name, (low, high) in ranges.items():
        value = getattr(options, name, None)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected {low} to {high}")
    confidence = getattr(options, "confidence", None)
    if confidence is not None and not 0 <= confidence < 1:
        raise ValueError(f"--confidence {confidence:g}: expected a probability, 0 or more and less than 1")


def check_rule(rule: str, drafter: Any) -> None:
    """Raises ValueError where the drafter's tree or the drafter itself has nothing for the rule to do."""
    grow.check_rule(rule, drafter.tree_spec)
    if rule.startswith("rejection") and drafter.method in WEIGHTLESS:
        raise ValueError(
            f"--rule {rule}: {drafter.method} draws no children from a law; expected another rule: target-sample does the same for it"
        )


def tree_spec_from_options(tree: str, drafter: Any, depth: int | None, width: int | None, nodes: int | None) -> TreeSpec:
    """The draft tree that options ask for: saved (the drafter's own), chain, or dynamic.

    Raises:
        ValueError: numbers that such a tree has not, or a tree deeper than the drafter can look.
    """
    if tree != "dynamic" and (width or nodes):
        raise ValueError(f"--tree {tree} takes --depth only, got --width or --nodes; leave it out, or take --tree dynamic")
    if tree == "chain":
        shape: TreeSpec = StaticTree.chain(depth or min(4, drafter.depth_limit))
    elif tree == "dynamic":
        shape = grow.DynamicTree(depth or min(4, drafter.depth_limit), width or 4, nodes or 16)
    else:
        shape = drafter.tree_spec.cut(depth or drafter.tree_spec.max_depth)
    if shape.max_depth > drafter.depth_limit:
        raise ValueError(f"got a tree {shape.max_depth} deep; {drafter.method} looks {drafter.depth_limit} ahead at most; lower --depth")
    return shape


def encode(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; a conversation goes through the target's chat template, which writes its own special tokens."""
    tokenizer = target.tokenizer
    assert tokenizer is not None, "open_models refuses a target without one"
    if prompt.messages and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(str(text), add_special_tokens=False)
    return tokenizer.encode(prompt.text)
