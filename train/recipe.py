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
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from draftsmith.data.conversations import Source
from draftsmith.data.text_files import check_regular, lines
from draftsmith.inference import durable
from draftsmith.inference.terminal import printable
from draftsmith.train.engine import recipe_file
from draftsmith.train.engine.redact import redacted
from draftsmith.train.engine.section import Changeable, Section, TrainSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftsmith.data.prepare import CorpusPlan

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


class TargetSection(Section):
    """the model to draft for; only LayerSkip and Medusa-2 change it"""

    path: str = Field(
        default="tiny",
        description="Hugging Face id, folder or GGUF file (also owner/repository:file.gguf) of the model; `tiny` is shipped with this package",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit on the Hub; unset: the default branch")
    dtype: Changeable[Literal["auto", "float32", "bfloat16", "float16"]] = Field(
        default="auto",
        description="precision of its weights; auto: bfloat16 on a GPU, and on a CPU where the checkpoint is in half precision and bf16 proves faster; "
        "else float32",
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
        "such sources, each as its path or as {path, split, subset, domain, weight}",
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
    loops: bool = Field(
        default=False, description="train on answers that repeat themselves too; false: their conversations are dropped and counted"
    )
    num_proc: Changeable[int | None] = Field(default=None, ge=1, le=1024, description="processes that tokenise; unset: one for each core")
    cache: Changeable[str] = Field(default="runs/cache", description="folder for tokenised data and the layers of pruned students")

    @model_validator(mode="after")
    def _weights(self) -> "DataSection":
        if any(source.weight is not None for source in _sources(self.valid)):
            raise ValueError("a weight in data.valid does nothing: held-out data are read as they are; leave it out")
        return self

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

        train, valid = _sources(self.train), _sources(self.valid)
        return CorpusPlan(train, valid, self.seq_len, self.last_turn, self.exclude, self.near_duplicate, self.loops)


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
    batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**24,
        description="tokens of one forward of the target while features are captured; unset: 1,024 on a CPU, 8,192 on a GPU",
    )
    allow_missing: bool = Field(default=False, description="leave out examples whose features are lost, instead of stopping")


class TreeSection(Section):
    """the draft tree stored with the drafter, until `draftsmith eval` chooses one for the machine"""

    depth: int | None = Field(default=None, ge=1, le=64, description="K, tokens drafted ahead; unset: the method's default")
    width: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="children of a node; 1 is a chain, more is a dynamic tree. Unset beside depth or nodes: 4; a draft model drafts a chain",
    )
    nodes: int | None = Field(
        default=None, ge=2, le=1024, description="nodes of a dynamic tree, with the root; unset: the method's default"
    )

    @model_validator(mode="after")
    def _chain(self) -> "TreeSection":
        if self.width == 1 and self.nodes:
            raise ValueError(f"tree.width=1 is a chain, of which tree.nodes={self.nodes} says nothing; leave out one of them")
        return self


class Recipe(Section):
    """The sections that all methods share. A method's script adds its own."""

    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    features: FeaturesSection = FeaturesSection()
    tree: TreeSection = TreeSection()
    train: TrainSection

    @model_validator(mode="after")
    def _compile(self) -> "Recipe":
        if self.features.mode != "online":
            self.train.refuse_unread("train", ["compile"], f"features.mode={self.features.mode}, where steps read features from the store")
        return self

    @property
    def needs_target_layers(self) -> bool:
        """Whether training runs or copies the target's decoder layers; otherwise its embeddings and output head are enough.

        A method that needs them in other cases overrides this.
        """
        return self.features.mode != "offline" or self.train.tau_prompts > 0


R = TypeVar("R", bound=Recipe)
NEAR = 0.5  # similarity, of 0 … 1, at which a known key may be what was meant


def sections(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections of a recipe, by name."""
    kinds = {name: field.annotation for name, field in schema.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def keys(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every `section.key` of a recipe, with its field."""
    return {f"{name}.{key}": field for name, section in sections(schema).items() for key, field in section.model_fields.items()}


def defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """What keys are that need not be given, as JSON: a record that is older than such a key was made with it."""
    return json.loads(json.dumps({key: field.get_default() for key, field in keys(schema).items() if not field.is_required()}))


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


def check_complete_sequences(recipe: Recipe) -> None:
    """Check that each rank has complete sequences: only EAGLE shares them out. Raises ValueError, naming the keys."""
    if recipe.train.context_parallel > 1:
        raise ValueError(
            f"train.context_parallel={recipe.train.context_parallel} is for EAGLE; leave it out, and lower train.micro_batch_size or "
            "data.seq_len instead"
        )


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
    of_methods = keys_of_methods() - known.keys() if shared else frozenset()
    for key in values:
        if key not in known and key not in of_methods:
            near = difflib.get_close_matches(key, [*known, *of_methods], n=1, cutoff=NEAR)
            raise ValueError(f"unknown recipe key {key!r}; {f'the nearest is {near[0]!r}' if near else '--help lists all keys'}")
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
    message = "expected a list, such as [a,b]" if first["type"] == "tuple_type" else first["msg"].removeprefix("Value error, ")
    if not key or (first["type"] == "value_error" and isinstance(first["input"], dict)):  # what a section's own check says names its keys
        return message
    got = "nothing" if first["type"] == "missing" or first["input"] is None else redacted(repr(first["input"]))
    return f"recipe key {key!r}: {message[:1].lower()}{message[1:]}; got {got if len(got) <= 100 else got[:100] + '…'}"


@cache
def keys_of_methods() -> frozenset[str]:
    """Every `section.key` that a method's script adds to the recipe, read off the scripts without importing them."""
    nodes = [node for file in Path(__file__).parent.glob("*.py") for node in ast.parse(file.read_text(encoding="utf-8")).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    fields = {name: _fields(node) for name, node in classes.items()}
    known = set()
    for node in classes.values():
        if _bases(node) == [Recipe.__name__]:
            for name, section in fields[node.name].items():
                known |= {f"{name}.{key}" for part in (section, *_bases(classes[section])) for key in fields.get(part, {})}
    return frozenset(known)


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


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
    packages = ("draftsmith", "torch", "transformers", "accelerate", "safetensors")
    run = {
        "argv": redacted([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git": _commit(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "machine": platform.processor() or platform.machine(),
    }
    durable.write_text(folder / "run.json", json.dumps(run, indent=1) + "\n")


def _commit() -> str | None:
    """The commit of this package's work tree, with `-dirty` where files differ from it; None outside of one, as of an installed package."""
    git = shutil.which("git")
    if not git:
        return None

    def said(*words: str) -> str:
        return subprocess.run([git, "-C", str(RECIPES), *words], capture_output=True, text=True, check=False).stdout.strip()

    if said("rev-parse", "--show-toplevel") != str(RECIPES.parent):
        return None
    return said("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


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
