"""Recipes: flat YAML a person can read, `key=value` overrides, and a schema that stops the run at the first wrong word.

Nothing heavy is imported here, so that the command line can print a recipe's keys at once.
"""

import ast
import difflib
import json
import os
import platform
import shutil
import subprocess
import sys
import unicodedata
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from draftsmith.data.conversations import Source
from draftsmith.data.text_files import check_regular, lines
from draftsmith.inference import durable
from draftsmith.inference.terminal import printable
from draftsmith.train.engine import recipe_file
from draftsmith.train.engine.redact import redacted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftsmith.data.prepare import CorpusPlan

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

T = TypeVar("T")
# A key that may differ between a checkpoint and the run that continues it: it changes no step already taken.
Changeable = Annotated[T, "changeable"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of a recipe. In a subclass, the docstring is the section's heading in --help and `description` the text of a key.

    Numbers are finite, and texts are neither blank nor hold control characters. A text that begins with ~ is a path below a home folder.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return value if isinstance(value, dict) else checked_text(value)  # a dictionary is a section, whose texts are its own


def checked_text(value: Any) -> Any:
    """The value with ~ expanded in its texts, those of lists and dictionaries included.

    Raises:
        ValueError: a text is blank, holds a control character, or names the home of a user that does not exist.
    """
    if isinstance(value, dict):
        return {key: checked_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(checked_text(item) for item in value)
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise ValueError("the text is blank; give one, or leave the key out")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise ValueError("the text holds a control character; leave it out")
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise ValueError(f"there is no user with the home folder {value.partition('/')[0]}; write ./ before it if it is a name")
    return expanded


class TargetSection(Section):
    """the frozen model to draft for"""

    path: str = Field(
        default="tiny",
        description="Hugging Face id, folder or GGUF file (also owner/repository:file.gguf) of the model; `tiny` is shipped with this package",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit on the Hub; unset: the default branch")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="precision of its weights; auto: float32 on a CPU, bfloat16 on a GPU"
    )
    parallel: Changeable[Literal["none", "layers", "shard", "tensor"]] = Field(
        default="none",
        description="how to split a target that is too large for one GPU. layers: layers over the GPUs of a single process. Under accelerate "
        "launch, shard: FSDP2, the weights are split over all processes and gathered layer by layer; tensor: each process multiplies "
        "by its part of each matrix",
    )
    quantise: Literal["bnb-int8", "bnb-nf4", "ao-int8", "ao-fp8"] | None = Field(
        default=None,
        description="quantise all linear layers but the output head while loading, with bitsandbytes (bnb) or torchao (ao); unset: no",
    )
    trust_remote_code: bool = Field(default=False, description="run model code from the Hub")


class DataSection(Section):
    """the conversations or texts to train on"""

    train: str | tuple[Source, ...] = Field(
        default="stdlib",
        description="`stdlib`; a .jsonl, .json, .txt (also .gz), .parquet or .arrow file; a folder of them; a Hub data set; or a list of "
        "{path, split, subset, domain, weight}",
    )
    valid: str | tuple[Source, ...] | None = Field(
        default=None, description="held-out data, in the same forms as `train`; unset: a fixed 1 in 20 of the examples of `train`"
    )
    seq_len: int = Field(default=256, ge=8, le=2**24, description="tokens of a training sequence")
    pack: bool = Field(default=True, description="put several examples into a sequence, isolated from each other; false: one each, padded")
    template: str | None = Field(default=None, description="Jinja file with a chat template; unset: the tokenizer's own")
    last_turn: bool = Field(default=False, description="supervise only the last assistant turn of a conversation")
    exclude: tuple[str, ...] = Field(default=(), description="files of evaluation prompts; examples that contain such a prompt are dropped")
    near_duplicate: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="drop one of two examples whose sets of five-word runs have at least this Jaccard similarity; 1: only equal ones",
    )
    num_proc: Changeable[int | None] = Field(default=None, ge=1, le=1024, description="processes that tokenise; unset: one for each core")
    cache: Changeable[str] = Field(default="runs/cache", description="folder for tokenised data")

    def give_template(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Put `template` into the tokenizer. Raises ValueError for a missing file."""
        if self.template is None:
            return
        file = Path(os.path.expanduser(self.template))
        check_regular(file, "data.template")
        if not file.is_file():
            raise ValueError(f"data.template {self.template!r} not found; give a file with a Jinja chat template")
        tokenizer.chat_template = "".join(line for _, line in lines(file))

    def plan(self) -> "CorpusPlan":
        """The corpora that this section asks `data/prepare.py` for."""
        from draftsmith.data.prepare import CorpusPlan  # late: it imports torch, which reading a recipe does not need

        return CorpusPlan(_sources(self.train), _sources(self.valid), self.seq_len, self.last_turn, self.exclude, self.near_duplicate)


def _sources(value: str | tuple[Source, ...] | None) -> tuple[Source, ...]:
    if isinstance(value, str):
        return (Source(path=value),)
    return value or ()


class FeaturesSection(Section):
    """the target's hidden states, which drafters are trained on"""

    mode: Literal["online", "offline", "cache"] = Field(
        default="online", description="online: run the target in each step; offline: read the store; cache: read it and add what it lacks"
    )
    store: str | None = Field(default=None, description="folder of the feature store; `draftsmith data capture` fills it; unset: none")
    precision: Literal["float32", "bfloat16", "fp8", "int8"] = Field(default="bfloat16", description="number format of a new store")
    taps: tuple[int, ...] = Field(
        default=(), description="decoder layers, counted from 0, whose outputs a new store holds besides the last hidden state"
    )
    batch_tokens: int = Field(default=8192, ge=1, le=2**24, description="tokens of one forward of the target while features are captured")
    allow_missing: bool = Field(default=False, description="leave out examples whose features are lost, instead of stopping")


class TreeSection(Section):
    """the draft tree stored with the drafter, until `draftsmith eval` chooses one for the machine"""

    depth: int | None = Field(default=None, ge=1, le=64, description="K, tokens drafted ahead; unset: the method's default")
    width: int | None = Field(
        default=None, ge=1, le=1024, description="children of a node; 1: a chain; more: a dynamic tree; unset: the method's default"
    )
    nodes: int | None = Field(
        default=None, ge=2, le=1024, description="nodes of a dynamic tree, with the root; unset: the method's default"
    )


class TrainSection(Section):
    """the training loop"""

    output: Changeable[str] = Field(description="folder for checkpoints, metrics and the trained drafter (`artifact`)")
    steps: Changeable[int] = Field(ge=1, le=10**9, description="optimizer steps of the run")
    batch_size: int = Field(ge=1, le=2**20, description="sequences of one optimizer step, over all ranks and accumulation")
    micro_batch_size: Changeable[int | None] = Field(
        default=None, ge=1, le=2**20, description="sequences of one forward on one rank; unset: all of the rank's share"
    )
    context_parallel: Changeable[int] = Field(
        default=1,
        ge=1,
        le=2**16,
        description="ranks that share each sequence by position (EAGLE only): divides the memory of the drafter's steps, not the target's",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: Muon for matrices, but for heads and embeddings, and AdamW for the rest, at the same learning rate",
    )
    lr: float = Field(gt=0, le=1, description="highest learning rate, reached after warmup_steps")
    schedule: Literal["cosine", "constant", "wsd"] = Field(
        default="cosine", description="learning rate after the warm-up; wsd: constant, then linear decay over the last quarter"
    )
    warmup_steps: int = Field(default=0, ge=0, le=10**9, description="steps of linear warm-up")
    min_lr: float = Field(default=0.0, ge=0, le=1, description="the last learning rate, as a fraction of lr")
    weight_decay: float = Field(default=0.0, ge=0, le=1000, description="AdamW's weight decay, of matrices only")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's decay rates of the gradient's mean and square")
    clip: float = Field(default=1.0, gt=0, le=1e6, description="norm to which gradients are clipped")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="precision of the forward pass; auto: bf16 where it proves faster on this machine"
    )
    compile: Changeable[bool] = Field(
        default=False, description="compile the target's layers: a minute at the start, faster steps, most on a GPU"
    )
    kernels: Changeable[bool] = Field(default=False, description="compute losses with Triton kernels; needs a GPU, untried on one so far")
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the initial weights, the order of examples and all random draws")
    eval_every: Changeable[int] = Field(
        default=0, ge=0, le=10**9, description="steps between evaluations on held-out data; 0: at the end only"
    )
    eval_batches: Changeable[int] = Field(default=8, ge=1, le=10**6, description="batches of an evaluation")
    save_every: Changeable[int] = Field(
        default=0, ge=0, le=10**9, description="steps between checkpoints; 0: at the end and on interruption only"
    )
    keep: Changeable[int] = Field(default=2, ge=1, le=10**6, description="how many of the newest checkpoints stay on disk")
    resume: Changeable[Literal["auto", "never"]] = Field(
        default="auto", description="auto: continue from the newest complete checkpoint in output; never: refuse a folder that has one"
    )
    watchdog_minutes: Changeable[float] = Field(
        default=60.0,
        ge=0,
        le=10**5,
        description="minutes without progress after which the run reports its threads and exits with 75; 0: never",
    )
    max_nonfinite_steps: Changeable[int] = Field(
        default=5, ge=1, le=10**6, description="stop after this many steps in a row were skipped because a loss or gradient was not finite"
    )
    log_every: Changeable[int] = Field(default=10, ge=1, le=10**9, description="steps between lines of metrics.jsonl")
    normalise: Literal["supervised", "all"] = Field(
        default="supervised", description="divide a step's loss by its supervised tokens, or by all its positions as EAGLE's code does"
    )
    tau_prompts: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="prompts of each domain that each evaluation decodes to measure τ, tokens per round; the weights with the best τ are "
        "published; 0: τ is not measured",
    )
    tau_file: str | None = Field(default=None, description="file with these prompts; unset: the shipped ones")
    tau_tokens: int = Field(default=48, ge=1, le=2**20, description="new tokens decoded for each of these prompts")
    tau_temperature: float = Field(default=0.0, ge=0, le=100, description="sampling temperature while τ is measured")
    patience: Changeable[int] = Field(
        default=0, ge=0, le=10**6, description="end the run after this many evaluations without a better τ; 0: do not end it early"
    )
    trackers: Changeable[tuple[Literal["tensorboard", "wandb", "trackio"], ...]] = Field(
        default=(), description="also send metrics to these; wandb stays offline without a key, trackio stays on this machine"
    )
    profile: Changeable[str | None] = Field(
        default=None,
        description="`10:15` traces steps 10 to 15, both included and numbered as in metrics.jsonl, into output; unset: no trace",
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

    @model_validator(mode="after")
    def _decay(self) -> "TrainSection":
        if self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"train.lr={self.lr} × train.weight_decay={self.weight_decay} takes away all of a weight in one step; "
                "make the product less than 1"
            )
        return self


class Recipe(Section):
    """The sections that all methods share. A method's script adds its own."""

    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    features: FeaturesSection = FeaturesSection()
    tree: TreeSection = TreeSection()
    train: TrainSection

    @property
    def needs_target_layers(self) -> bool:
        """Whether training runs or copies the target's decoder layers; otherwise its embeddings and output head are enough.

        A method that needs them in other cases overrides this.
        """
        return self.features.mode != "offline" or self.train.tau_prompts > 0


R = TypeVar("R", bound=Recipe)


def sections(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections of a recipe, by name."""
    kinds = {name: field.annotation for name, field in schema.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def keys(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every `section.key` of a recipe, with its field."""
    return {f"{name}.{key}": field for name, section in sections(schema).items() for key, field in section.model_fields.items()}


def changeable_keys(schema: type[BaseModel]) -> set[str]:
    """The keys whose field is `Changeable`: a run may be continued with another value of them."""
    return {key for key, field in keys(schema).items() if "changeable" in field.metadata}


def shipped(schema: type[Recipe] | None = None) -> list[str]:
    """Names of the recipes in this package; with a schema, of those whose keys all belong to it."""
    files = sorted(file for file in RECIPES.glob("*.yaml") if not file.stem.startswith("accelerate-"))
    return [file.stem for file in files if schema is None or recipe_file.read(file).keys() <= keys(schema).keys()]


def find(path: str | Path, schema: type[Recipe] | None = None) -> Path:
    """The file of a recipe: `path` itself, or the shipped recipe of that name, with or without `.yaml`.

    Raises:
        ValueError: there is neither. It lists the shipped recipes; with a schema, those that fit it.
    """
    file = Path(path)
    if file.exists() and not (file.is_dir() and file.name in shipped()):
        return file  # `read` says what is wrong with a folder or a pipe
    in_package = RECIPES / f"{file.name.removesuffix('.yaml')}.yaml"
    if in_package.is_file() and file.parent in (Path("."), Path("recipes")):
        return in_package
    raise ValueError(f"recipe {str(path)!r} not found; give a YAML file, or one of: {', '.join(shipped(schema))}")


def load(schema: type[R], path: str | Path, overrides: list[str], shared: bool = False) -> R:
    """Read a recipe and apply overrides.

    Args:
        schema: the recipe class of the method.
        path: a file, or the name of a shipped recipe (see `find`).
        overrides: `section.key=value` texts, later ones winning.
        shared: read only the sections in `schema`, and ignore those of methods; with `Recipe` those that all methods share.

    Raises:
        ValueError: in one line, for a missing file, an unknown key (naming the nearest) or a value of the wrong type.
    """
    values, known = recipe_file.read(find(path, None if shared else schema)), keys(schema)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r} is not of the form key=value, for example train.steps=20")
        values[key] = _value(key, text, known)
    of_methods = keys_of_methods() - known.keys() if shared else set()
    for key in values:
        if key not in known and key not in of_methods:
            near = difflib.get_close_matches(key, [*known, *of_methods], n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown recipe key {key!r}; the nearest is {near!r}")
    try:
        return schema.model_validate(_nest({key: value for key, value in values.items() if key in known}))
    except ValidationError as error:
        raise ValueError(_first_fault(error)) from None


def _first_fault(error: ValidationError) -> str:
    """One line on what is wrong with a recipe. Of a key that may be of several types, the line is on the type that goes deepest."""
    faults = error.errors()
    first = max((fault for fault in faults if fault["loc"][:2] == faults[0]["loc"][:2]), key=lambda fault: len(fault["loc"]))
    # Between key and place pydantic names the type that it tried: `tuple[Source, ...]`.
    key = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
    message = first["msg"].removeprefix("Value error, ")
    if not key:
        return message
    got = "nothing" if first["type"] == "missing" or first["input"] is None else redacted(repr(first["input"]))
    return f"recipe key {key!r}: {message[:1].lower()}{message[1:]}; got {got if len(got) <= 100 else got[:100] + '…'}"


def keys_of_methods() -> set[str]:
    """Every `section.key` that a method's script adds to the recipe, read off the scripts without importing them."""
    known = set()
    for file in Path(__file__).parent.glob("*.py"):
        classes = {node.name: node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}
        for node in classes.values():
            if [ast.unparse(base) for base in node.bases] == [Recipe.__name__]:
                for name, section in _fields(node).items():
                    known |= {f"{name}.{key}" for key in _fields(classes[section])}
    return known


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """The annotated fields of a class, and their types as text."""
    fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    return {ast.unparse(statement.target): ast.unparse(statement.annotation) for statement in fields}


def by_key(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe by `section.key`, as JSON, with secrets masked: what a run stores."""
    values = recipe.model_dump(mode="json")
    return redacted({f"{name}.{key}": value for name, section in values.items() for key, value in section.items()})


def save(recipe: Recipe, folder: Path) -> None:
    """Write the resolved recipe (`recipe.yaml`) and what it ran on (`run.json`: argv, git commit, versions, machine) into `folder`.

    Secrets among the values are masked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    durable.write_text(folder / "recipe.yaml", yaml.safe_dump(by_key(recipe), sort_keys=False))
    git = shutil.which("git")
    command = [git or "git", "-C", str(RECIPES), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if git else ""
    packages = ("draftsmith", "torch", "transformers", "accelerate", "safetensors")
    run = {
        "argv": redacted([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git": commit or None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "machine": platform.processor() or platform.machine(),
    }
    durable.write_text(folder / "run.json", json.dumps(run, indent=1) + "\n")


def _value(key: str, text: str, known: dict[str, FieldInfo]) -> Any:
    """The value that `text` stands for on the command line. Where the key takes text, it stays text."""
    field = known.get(key)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    if str in kinds and not text.startswith("["):
        return None if text in ("", "null") else text
    try:
        value = recipe_file.parse(text) if text else None
    except ValueError as error:
        shown = redacted(text if len(text) <= 60 else f"{text[:60]}…")
        raise ValueError(
            f"override {key}={printable(shown, '')}: not a YAML value ({printable(' '.join(str(error).split()), '')[:100]})"
        ) from None
    return tuple(value) if isinstance(value, list) else value


def _nest(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return nested
