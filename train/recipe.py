"""Recipes: flat YAML a person can read, `key=value` overrides, and a schema that stops the run at the first wrong word."""

import difflib
import json
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from transformers import PreTrainedTokenizerBase

from draftsmith.data.conversations import Source
from draftsmith.data.prepare import CorpusPlan

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


T = TypeVar("T")
# A key that may differ between a checkpoint and the run that continues it: it changes no step already taken.
Changeable = Annotated[T, "changeable"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TargetSection(Section):
    path: str = Field(default="tiny", description="Hugging Face id or folder of the frozen target; `tiny` is the one shipped here")
    revision: str | None = Field(default=None, description="branch, tag or commit on the Hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: float32 on a CPU, bfloat16 on a GPU"
    )
    parallel: Changeable[Literal["none", "layers", "shard", "tensor"]] = Field(
        default="none",
        description="for a target that no one GPU holds: layers over the GPUs of a single process; shard (FSDP2: weights cut over all "
        "processes, gathered layer by layer) or tensor (each multiplies by its part) under accelerate launch",
    )
    quantise: Literal["bnb-int8", "bnb-nf4", "ao-int8", "ao-fp8"] | None = Field(
        default=None, description="quantise its linear layers as they are read (bitsandbytes, torchao), all but the output head"
    )
    trust_remote_code: bool = Field(default=False, description="run model code from the Hub; off unless you ask for it")


class DataSection(Section):
    train: str | tuple[Source, ...] = Field(
        default="stdlib",
        description="`stdlib`, a .jsonl, .json, .txt (also .gz), .parquet or .arrow file, a folder of them or a Hub data set; or a list of "
        "{path, split, subset, domain, weight}",
    )
    valid: str | tuple[Source, ...] | None = Field(
        default=None, description="held-out data, as `train`; when absent, a fixed 1 in 20 of the rows of `train`"
    )
    seq_len: int = Field(default=256, ge=8, description="tokens of a training sequence")
    pack: bool = Field(default=True, description="several samples in a sequence, none seeing another; false: one each, padded")
    template: str | None = Field(
        default=None, description="Jinja file with a chat template, in place of the tokenizer's own or where it has none"
    )
    last_turn: bool = Field(default=False, description="only the last assistant turn of a conversation bears loss")
    exclude: tuple[str, ...] = Field(default=(), description="files of evaluation prompts: rows that contain one are dropped")
    near: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="of two rows whose runs of five words overlap by this (Jaccard) one is dropped; 1: only the same",
    )
    num_proc: Changeable[int | None] = Field(default=None, ge=1, description="processes that tokenise; when absent, one for each core")
    cache: Changeable[str] = Field(default="runs/cache", description="folder for tokenised data")

    def give_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Put `template` into the tokenizer. Raises ValueError for a missing file."""
        if self.template is None:
            return
        file = Path(self.template)
        if not file.is_file():
            raise ValueError(f"data.template {self.template!r} not found; give a file with a Jinja chat template")
        tokenizer.chat_template = file.read_text(encoding="utf-8")

    def plan(self) -> CorpusPlan:
        """What `data/prepare.py` makes of it."""
        train, valid = ((Source(path=one),) if isinstance(one, str) else one or () for one in (self.train, self.valid))
        return CorpusPlan(train, valid, self.seq_len, self.last_turn, self.exclude, self.near)


class FeaturesSection(Section):
    """Where the target's features come from."""

    mode: Literal["online", "offline", "cache"] = Field(
        default="online", description="online: run the target; offline: read the store; cache: read it, and store what it lacks"
    )
    store: str | None = Field(default=None, description="folder of the feature store, for `draftsmith data capture` and the other modes")
    precision: Literal["float32", "bfloat16", "fp8", "int8"] = Field(default="bfloat16", description="of a new store")
    taps: tuple[int, ...] = Field(
        default=(), description="decoder layers, from 0, whose outputs a new store keeps beside the last hidden state"
    )
    batch_tokens: int = Field(default=8192, ge=1, description="tokens of one forward of the target while capturing")
    allow_missing: bool = Field(default=False, description="leave out samples whose features are lost, rather than stop")


class TreeSection(Section):
    """The artifact's draft tree until `draftsmith eval` chooses one for the machine; nothing said: the method's own."""

    depth: int | None = Field(
        default=None, ge=1, description="K of the artifact's draft tree, until eval chooses one; unset: the method's tree"
    )
    width: int | None = Field(default=None, ge=1, description="children of a node; 1 is a chain, more a dynamic tree")
    nodes: int | None = Field(default=None, ge=2, description="nodes of a dynamic tree, the root included")


class TrainSection(Section):
    output: Changeable[str] = Field(description="folder for checkpoints, metrics and the artifact")
    steps: Changeable[int] = Field(ge=1)
    batch_size: int = Field(ge=1, description="sequences of one optimizer step, over all ranks and accumulation")
    micro_batch_size: Changeable[int | None] = Field(
        default=None, ge=1, description="sequences of one forward on one rank; when absent, all that fall to it"
    )
    context_parallel: Changeable[int] = Field(
        default=1,
        ge=1,
        description="G: ranks that share each row, by position (EAGLE): what its steps hold is divided by G, the target's forward is not",
    )
    lr: float = Field(gt=0)
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr: float = Field(default=0.0, ge=0, description="the last learning rate, as a fraction of lr")
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(default=1.0, gt=0, description="norm that gradients are clipped to")
    precision: Literal["auto", "fp32", "bf16"] = Field(default="auto", description="auto: bf16 where a probe finds it faster")
    compile: Changeable[bool] = Field(
        default=False, description="compile the target's layers: a minute at the start, less in each step, most on a GPU"
    )
    kernels: Changeable[bool] = Field(default=False, description="losses by Triton's kernels; no GPU has run them yet")
    seed: int = Field(default=0, ge=0, lt=2**31)
    eval_every: Changeable[int] = Field(default=0, ge=0, description="steps between evaluations on held-out data; 0: at the end only")
    eval_batches: Changeable[int] = Field(default=8, ge=1)
    save_every: Changeable[int] = Field(default=0, ge=0, description="steps between checkpoints; 0: at the end and when interrupted only")
    keep: Changeable[int] = Field(default=2, ge=1, description="newest checkpoints that are kept")
    resume: Changeable[Literal["auto", "never"]] = Field(
        default="auto", description="auto: go on from the newest whole checkpoint in output; never: refuse a folder that holds one"
    )
    watchdog_minutes: Changeable[float] = Field(
        default=60.0, ge=0, description="without progress before the run ends with status 75, saying where it stood; 0: never"
    )
    max_nonfinite_steps: Changeable[int] = Field(
        default=5, ge=1, description="steps on end left out, since their loss or gradient was not finite, before the run stops"
    )
    log_every: Changeable[int] = Field(default=10, ge=1)
    normalise: Literal["valid", "all"] = Field(
        default="valid", description="divide a step's loss by its loss-bearing tokens, or by all its positions as EAGLE's code does"
    )
    tau_prompts: int = Field(
        default=0,
        ge=0,
        description="prompts of each domain decoded at each evaluation, for τ itself; the artifact has the weights best by it",
    )
    tau_file: str | None = Field(default=None, description="prompts for it; unset: the shipped ones")
    tau_tokens: int = Field(default=48, ge=1, description="new tokens of each")
    tau_temperature: float = Field(default=0.0, ge=0, description="at which they are decoded")
    patience: Changeable[int] = Field(
        default=0, ge=0, description="evaluations without a better τ before the run ends; 0: it does not end early"
    )
    trackers: Changeable[tuple[Literal["tensorboard", "wandb", "trackio"], ...]] = Field(
        default=(), description="where metrics.jsonl goes as well; wandb stays offline without a key, trackio on this machine"
    )
    profile: Changeable[str | None] = Field(
        default=None, description="`10:15`: trace steps 10 to 15, both included, as metrics.jsonl numbers them, into output"
    )

    @field_validator("profile", mode="before")
    @classmethod
    def _steps(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return value
        if isinstance(value, int):
            raise ValueError("expected text: YAML reads 10:15 as a number; write '10:15'")
        first, _, last = str(value).partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError("expected first:last, steps from 1, such as 10:15")
        if int(last) > info.data.get("steps", int(last)):
            raise ValueError(f"step {last} is past train.steps={info.data['steps']}")
        return value


class Recipe(Section):
    """The sections that every method shares; a method's script adds its own."""

    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    features: FeaturesSection = FeaturesSection()
    tree: TreeSection = TreeSection()
    train: TrainSection

    @property
    def needs_target_layers(self) -> bool:
        """Whether training runs or copies the target's decoder layers; else its input embeddings and output head are enough.

        A method that asks for them in other cases overrides it.
        """
        return self.features.mode != "offline" or self.train.tau_prompts > 0


R = TypeVar("R", bound=Recipe)


def keys(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every `section.key` of a recipe, with what is known of it."""
    found = {}
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= {f"{name}.{key}": inner for key, inner in keys(field.annotation).items()}
        else:
            found[name] = field
    return found


def changeable_keys(schema: type[BaseModel]) -> set[str]:
    """The keys whose field is `Changeable`: a run may be continued with another value of them."""
    return {key for key, field in keys(schema).items() if "changeable" in field.metadata}


def usage(schema: type[Recipe], text: str | None) -> str:
    """A script's --help: its docstring and every key of its recipe."""
    lines = []
    for key, field in keys(schema).items():
        default = "required" if field.is_required() else f"default {field.default}"
        lines.append(f"  {key:28} {field.description + '; ' if field.description else ''}{default}")
    return "\n".join([(text or "").strip(), "", "Keys of the recipe, each of which can follow it as key=value:", *lines])


def load(schema: type[R], path: str | Path, overrides: list[str], shared: bool = False) -> R:
    """The recipe at `path` (a file, or the name of one that is shipped) with `key=value` overrides applied.

    shared: take what all methods share, and leave other sections, the method's own, unread.

    Raises ValueError, in one line, for a missing file, an unknown key (naming the nearest) and a value of the wrong type.
    """
    file = Path(path)
    if not file.is_file() and (RECIPES / file.name).is_file() and file.parent in (Path("."), Path("recipes")):
        file = RECIPES / file.name
    if not file.is_file():
        shipped = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.yaml") if not recipe.stem.startswith("accelerate-")))
        raise ValueError(f"recipe {str(path)!r} not found; give a YAML file, or one of: {shipped}")
    values, known = _flatten(_parse(file)), keys(schema)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r} is not of the form key=value, for example train.steps=20")
        values[key] = _value(key, text, known)
    if shared:
        values = {key: value for key, value in values.items() if key.split(".")[0] in schema.model_fields}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown recipe key {key!r}; the nearest is {near!r}")
    try:
        return schema.model_validate(_nest(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        got = "nothing" if first["type"] == "missing" else repr(first["input"])
        raise ValueError(f"recipe key {key!r}: {first['msg'].lower()}; got {got}") from None


def save(recipe: Recipe, folder: Path) -> None:
    """Write the resolved recipe and what it ran on: `recipe.yaml`, `run.json` (argv, git commit, versions)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(_flatten(recipe.model_dump(mode="json")), sort_keys=False))
    git = shutil.which("git")
    command = [git or "git", "-C", str(RECIPES), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if git else ""
    packages = ("draftsmith", "torch", "transformers", "accelerate", "safetensors")
    run = {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": commit or None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "machine": platform.processor() or platform.machine(),
    }
    (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")


def _value(key: str, text: str, known: dict[str, FieldInfo]) -> Any:
    """What `text` means on the command line: text stays text where the key wants text."""
    field = known.get(key)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    if str in kinds and not text.startswith("["):
        return None if text in ("", "null") else text
    try:
        value = yaml.load(text, Loader=_Loader) if text else None
    except yaml.YAMLError:
        raise ValueError(f"override {key}={text}: not a YAML value") from None
    return tuple(value) if isinstance(value, list) else value


def _parse(file: Path) -> dict[str, Any]:
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a YAML recipe: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected `key: value` lines, got {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """YAML as a recipe means it: 2e-3 is a number, 2025-11-21 is text, and a key that is given twice is an error."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = [self.construct_object(key, deep) for key, _ in node.value]
        for key in seen:
            if seen.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} is given twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d{1,3}$"), list("-+0123456789"))


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, dict) else {name: tuple(value) if isinstance(value, list) else value}
    return flat


def _nest(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return nested
