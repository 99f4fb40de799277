"""What all trained drafters share: the artifact (config, strict loading, identity of the target) and the Drafter protocol's signatures.

An architecture is a file in this folder that defines two names: `Config`, a `DrafterConfig` whose `model_type` is the file's name, and
`Model`, a `DrafterModel`. Nothing else lists it: config.json's `model_type` leads to the file.

Letters: S positions · V target vocabulary · H hidden size · K draft depth.
"""

import copy
import dataclasses
import heapq
import importlib
import json
import re
import shutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput
from draftsmith.inference.durable import give_usual_mode
from draftsmith.inference.expand import TreeSpec, parse_tree_spec, tree_config
from draftsmith.inference.reading import read_json
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.artifact import check_settings, raw_config
from draftsmith.models.artifact_files import FILES, WEIGHT_FILES, without_texts
from draftsmith.models.target import Target, TargetIdentity, check_folder, check_loaded, check_same, resolve_path
from draftsmith.models.weights import WEIGHTS, check_finite, check_headers, headers

CONFIG = "config.json"


def same_layout(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and device."""
    return (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)


class Output(nn.Linear):
    """A linear layer with an output for each token, which the optimizer takes for a head."""


class DrafterConfig(PretrainedConfig):
    """Config of an artifact.

    Attributes:
        hidden_size, vocab_size: the target's H and V.
        target: the `TargetIdentity` of the target, as a dict.
        tree: the default draft tree, a list of rank paths, or {depth, width, nodes} for a dynamic one.
        training: notes on the training run.
        confidence_weights: of `inference/confidence.py`, for the rule `survival`; None where none were fitted.
    """

    model_type = "drafter"
    has_no_defaults_at_init = True  # before 5.24, transformers makes a config without settings whenever it saves one: EAGLE-3 refuses that
    hidden_size: int = 0
    vocab_size: int = 0
    target: dict | None = None
    tree: list | dict | None = None
    training: dict | None = None
    confidence_weights: dict | None = None

    @property
    def least_tensors(self) -> int:
        """How many tensors its weights have at least, so that a false number of layers is seen before they are built."""
        return 0

    @classmethod
    def tiny_settings(cls) -> dict[str, dict]:
        """By name, settings of small drafters for a target of two layers: each is a case of tests/test_conformance.py."""
        return {"default": {}}


class DrafterModel(PreTrainedModel):
    """Base of every trained drafter. `save_pretrained`, `from_pretrained` and `push_to_hub` are transformers' own, made strict.

    A subclass builds its modules, calls `post_init()`, overrides `_init_weights` where it wants zeros, copies from the target in
    `init_from_target`, and implements the Drafter protocol of `draftsmith.inference.drafter`. A subclass that names its `config_class`
    is registered with transformers: once its module is imported, AutoConfig and AutoModel load its artifacts.
    """

    config_class = DrafterConfig
    config: Any  # a DrafterConfig; subclasses name theirs
    base_model_prefix = ""
    can_stop = False  # whether it drafts level by level, and asks `stop` before each of them
    stop: Stopping | None = None
    recurrent = False  # whether its weights are read once for each level, instead of once a round
    taps: tuple[int, ...] = ()

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        # A Target is no nn.Module, so it enters neither the modules nor the state dict.
        self._target: Target | None = None
        self._state: Any = None
        self._tree_spec: tuple[Any, TreeSpec] | None = None
        self._folder: Path | None = None  # the local folder that it was loaded from

    @property
    def capturable(self) -> bool:
        """False with a rule that stops drafts: the host decides."""
        return self.stop is None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "config_class" in vars(cls):
            config_class: Any = cls.config_class
            AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
            AutoModel.register(config_class, cls, exist_ok=True)

    @property
    def target(self) -> Target:
        """The target that `attach` or `bind` gave."""
        if self._target is None:
            raise RuntimeError(
                f"this {self.config.model_type} drafter has no target yet; call attach(target) or bind(target, slots, context)"
            )
        return self._target

    def attach(self, target: Target) -> Self:
        """Keep a reference to the target, after checking that this drafter was made for it.

        Raises:
            ValueError: another target, a target of other sizes, or one without a layer that a tap reads.
        """
        if self.config.target:
            warning = check_same(TargetIdentity.from_dict(self.config.target), target.identity)
            if warning:
                warnings.warn(warning, stacklevel=2)
        for name in ("hidden_size", "vocab_size"):
            mine, theirs = getattr(self.config, name), getattr(target, name)
            if mine != theirs:
                raise ValueError(
                    f"this drafter has {name} {mine}, target {target.identity.name!r} has {theirs}; load the target it was made for"
                )
        if wrong := [tap for tap in self.taps if not 0 <= tap < target.num_layers]:
            raise ValueError(
                f"this {self.method} drafter reads taps {list(self.taps)}; target {target.identity.name!r} has layers 0..{target.num_layers - 1}: "
                f"{wrong} are not of it"
            )
        self._target = target
        return self

    def init_from_target(self, target: Target) -> None:
        """Copy the weights that start as the target's. Not part of __init__, since transformers initialises modules after it."""

    @property
    def method(self) -> str:
        """The architecture's name, by which `architecture` finds its module."""
        return self.config.model_type

    @property
    def tree_spec(self) -> TreeSpec:
        """The draft tree of the config, which a subclass's config fills in. The same object as long as config.tree stays the same."""
        if self._tree_spec is None or self._tree_spec[0] != self.config.tree:
            self._tree_spec = (copy.deepcopy(self.config.tree), parse_tree_spec(self.config.tree))
        return self._tree_spec[1]

    @tree_spec.setter
    def tree_spec(self, tree_spec: TreeSpec) -> None:
        self.config.tree = tree_config(tree_spec)

    @property
    def depth_limit(self) -> int:
        """The largest K that this drafter can draft, whatever the tree."""
        raise NotImplementedError

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] of a text and the target's output along it (hidden [1,S,H], taps) -> features [S,·] for `position_logits`."""
        return out.hidden[0]

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,·], R consecutive roots [R] -> logits [R,K,V] for position records: entry (r,k) ranks token roots[r]+k+1."""
        raise NotImplementedError

    @property
    def max_nodes(self) -> int:
        return self.tree_spec.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree_spec.max_depth

    # The Drafter protocol, which a subclass implements; its docstrings give the shapes.

    def bind(self, target: Target, slots: int, context: int) -> Any:
        raise NotImplementedError

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        raise NotImplementedError

    def propose(self, round: RoundContext) -> DraftTree:
        raise NotImplementedError

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        raise NotImplementedError

    def drop(self, slots: list[int]) -> None:
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, but it reads safetensors only, and the tensors must be exactly those of the architecture.

        Raises:
            FileNotFoundError: no folder, no config.json or no weights.
            ValueError: pickled weights, a damaged file, tensors missing, left over, misshapen or of another kind, NaN or infinite ones, by
                name; or a draft vocabulary that is none.
        """
        path = str(pretrained_model_name_or_path)
        source = _checked_folder(path)
        config = kwargs.get("config")
        cls._check_headers(
            path, source, config or _read_config(cast(Any, cls.config_class), source, kwargs.get("revision")), kwargs.get("revision")
        )
        with_info = kwargs.pop("output_loading_info", False)
        strict = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = cast(Any, super()).from_pretrained(source, *args, **{**kwargs, **strict})
        check_loaded(path, info)
        check_finite(path, model)
        try:
            model.check_content()
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
        model._folder = Path(source) if Path(source).is_dir() else None
        return (model, info) if with_info else model

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As transformers' own; the weights are readable as other files are."""
        cast(Any, super()).save_pretrained(save_directory, *args, **kwargs)
        for file in Path(save_directory).glob("*.safetensors"):
            give_usual_mode(file)

    @classmethod
    def _check_headers(cls, path: str, source: str, config: Any, revision: str | None) -> None:
        """Compare a config with the headers of its weights before anything is allocated. Raises ValueError as `from_pretrained`."""
        stored = headers(source, revision or "main")
        if config.least_tensors > len(stored):
            raise ValueError(
                f"{CONFIG} of {path!r} describes {config.least_tensors:,} tensors or more, {WEIGHTS} has {len(stored):,}; "
                "they do not belong together: copy or save it again"
            )
        with torch.device("meta"):
            check_headers(path, cls(config).state_dict(), stored, exact=True)

    def check_content(self) -> None:
        """Raises ValueError where tensors that fit the architecture cannot be meant; a subclass knows what to look at."""

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """The last step of push_to_hub: the FILES beside the loaded weights (model card, measurements, recipe) go along, without texts of prompts."""
        if self._folder:
            if (self._folder / "adapter").is_dir():  # the target's, of Medusa-2
                shutil.copytree(self._folder / "adapter", Path(working_dir) / "adapter")
            if _same_weights(self._folder, Path(working_dir)):
                beside = [pattern for pattern in FILES if pattern not in (*WEIGHT_FILES, CONFIG)]
                for file in (file for pattern in beside for file in self._folder.glob(pattern) if file.parent == self._folder):
                    shutil.copy(file, working_dir)
                report = Path(working_dir) / "acceptance.json"
                if report.is_file():
                    report.write_text(json.dumps(without_texts(read_json(report))) + "\n", encoding="utf-8")
            else:
                warnings.warn(
                    f"the weights are no longer those of {self._folder}, so that its model card and measurements are not uploaded; "
                    "save the drafter, measure it with `draftsmith eval`, and upload the folder with `draftsmith publish`",
                    stacklevel=3,
                )
        return cast(Any, super())._upload_modified_files(working_dir, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a drafter leave behind the target and the state of decoding.
        return {**self.__dict__, "_target": None, "_state": None}


def _same_weights(*folders: Path) -> bool:
    """Whether two folders hold the same tensors, in any number of files."""
    left, right = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()} for folder in folders
    )
    return left.keys() == right.keys() and all(
        same_layout(left[name], right[name]) and torch.equal(left[name], right[name]) for name in left
    )


def methods() -> list[str]:
    """The names of all architectures: the files of this folder that define `Config` and `Model`."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("*.py")}
    return sorted(name for name, text in texts.items() if re.search(r"^Config\b", text, re.M) and re.search(r"^Model\b", text, re.M))


def architecture(method: str) -> ModuleType:
    """The module draftsmith.models.<method>, with `Config` and `Model`.

    Raises:
        ValueError: no such architecture.
    """
    known = methods()
    if method not in known:
        raise ValueError(f"no drafter architecture {method!r}; expected one of {', '.join(known)} (a file in models/)")
    return importlib.import_module(f"draftsmith.models.{method}")


def new_drafter(method: str, target: Target, *, dtype: torch.dtype = torch.float32, **arch: Any) -> DrafterModel:
    """A fresh drafter for `target`, on its device.

    Args:
        method: the architecture's name.
        target: the model that it will draft for; `init_from_target` copies from it.
        dtype: of the drafter's weights.
        arch: fields of the architecture's Config.

    Raises:
        ValueError: an unknown method or field, or values that its Config refuses.
    """
    module = architecture(method)
    fields = {field.name for field in dataclasses.fields(module.Config)} - {field.name for field in dataclasses.fields(PretrainedConfig)}
    fields = (fields | {"tree"}) - {"target", "hidden_size", "vocab_size"}
    unknown = sorted(set(arch) - fields)
    if unknown:
        raise ValueError(f"{method} has no setting {unknown[0]!r}; expected one of {', '.join(sorted(fields))}")
    config = module.Config(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, target=target.identity.to_dict(), dtype=dtype, **arch
    )
    drafter: DrafterModel = module.Model(config).to(device=target.device, dtype=dtype)
    drafter.attach(target)
    drafter.init_from_target(target)
    return drafter


def is_drafter(path: str) -> bool:
    """Whether the folder or Hub id holds one of these architectures, by the model_type of its config."""
    raw, _ = raw_config(_checked_folder(path))
    return raw.get("model_type", "") in methods()


def _checked_folder(path: str) -> str:
    """The folder, checked to be complete, or the Hub id that `path` stands for."""
    source = resolve_path(path)
    if Path(source).is_dir():
        check_folder(source)
    return source


def load_config(path: str | Path, revision: str | None = None) -> DrafterConfig:
    """The config of a drafter in a folder or on the Hub; its weights are not read.

    Raises:
        FileNotFoundError, ValueError: an incomplete folder, or an unknown architecture.
    """
    source = _checked_folder(str(path))
    method = raw_config(source, revision or "main")[0].get("model_type", "")
    if method not in methods():
        raise ValueError(f"{str(path)!r} has model_type {method!r}, expected one of {', '.join(methods())}; is it a drafter?")
    return _read_config(architecture(method).Config, source, revision)


def _read_config(config_class: type[DrafterConfig], source: str, revision: str | None) -> Any:
    """The config of an architecture, from a folder or the Hub. Raises ValueError for values that it cannot have, naming the file."""
    raw, file = raw_config(source, revision or "main")
    check_settings(raw, config_class, file)
    try:
        return config_class.from_dict(raw)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def load_drafter(
    path: str | Path,
    target: Target | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> DrafterModel:
    """Load a drafter, in eval mode.

    Args:
        path: a folder, or an id on the Hub.
        target: attached to the drafter, after a check that the drafter was made for it.
        dtype: of the weights; None keeps the artifact's.
        device: None is the target's device, or the CPU without a target.
        revision: on the Hub.

    Raises:
        FileNotFoundError, ValueError: an incomplete artifact, an unknown architecture, or another target.
    """
    config = load_config(path, revision)
    model = architecture(config.model_type).Model
    drafter: DrafterModel = model.from_pretrained(str(path), config=config, dtype=dtype or "auto", revision=revision or "main")
    torch.nn.Module.to(drafter, device if device is not None else target.device if target is not None else "cpu")
    if target is not None:
        drafter.attach(target)
    return drafter.eval()


def default_paths(depth: int, nodes: int = 15) -> list[list[int]]:
    """Rank paths of a small tree: the chain of `depth` nodes and the likeliest other paths, up to `nodes` without the root.

    Likelihoods are a rule of thumb for heads: rank r at depth k has 0.6, .15, .08, … times 0.85^k. Measure, then set config.tree.
    """
    ranks = [0.6, 0.15, 0.08, 0.05, 0.03, 0.02]
    chosen = {(0,) * k for k in range(1, depth + 1)}
    queue: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while queue and len(chosen) < nodes:
        weight, path = heapq.heappop(queue)
        if path:
            chosen.add(path)
        if len(path) < depth:
            for rank, chance in enumerate(ranks):
                heapq.heappush(queue, (weight * chance * 0.85 ** len(path), (*path, rank)))
    return [list(path) for path in sorted(chosen, key=lambda path: (len(path), path))]


def fill_tree(config: DrafterConfig, heads: int) -> None:
    """Give the config of K heads its default tree, one level for each head. Raises ValueError for a tree deeper than that."""
    if config.tree is None:
        config.tree = default_paths(heads)
    deepest = parse_tree_spec(config.tree).max_depth
    if deepest > heads:
        raise ValueError(f"got a tree {deepest} deep for {heads} heads; expected at most one level per head; cut the tree")
