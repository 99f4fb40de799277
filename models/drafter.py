"""What all trained drafters share: the artifact (config, strict loading, identity of the target) and its place in the Drafter protocol.

An architecture is a file in this folder. It gives two names: `Config`, a `DrafterConfig` whose `model_type` is the file's
name, and `Model`, a `DrafterModel`. Nothing else lists it: config.json's `model_type` leads to the file.

Letters: S positions · V target vocabulary · H hidden size · K draft depth.
"""

import copy
import dataclasses
import heapq
import importlib
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput
from draftsmith.inference.expand import TreeSpec, parse_tree_spec, tree_config
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.target import Target, TargetIdentity, check_folder, check_loaded, check_same, resolve_path


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor may take another's place: shape, dtype and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


class DrafterConfig(PretrainedConfig):
    """Config of an artifact. `target` is a `TargetIdentity` as a dict, `training` free notes. `tree` is the default draft tree: a list
    of rank paths, or {depth, width, nodes} for a dynamic one."""

    model_type = "drafter"
    hidden_size: int = 0
    vocab_size: int = 0
    target: dict | None = None
    tree: list | dict | None = None
    training: dict | None = None


class DrafterModel(PreTrainedModel):
    """Base of every trained drafter. `save_pretrained`, `from_pretrained` and `push_to_hub` are transformers' own, made strict.

    A subclass builds its modules, calls `post_init()`, gives `_init_weights` where it wants zeros, copies from the target in
    `init_from_target`, and implements the Drafter protocol of `draftsmith.inference.drafter`.
    """

    config_class = DrafterConfig
    config: Any  # a DrafterConfig; subclasses name theirs
    base_model_prefix = ""
    capturable = True
    taps: tuple[int, ...] = ()

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        # A Target is no nn.Module, so it enters neither the modules nor the state dict.
        self._target: Target | None = None
        self._state: Any = None
        self._tree_spec: tuple[Any, TreeSpec] | None = None

    @property
    def target(self) -> Target:
        """The target that `attach` or `bind` gave."""
        if self._target is None:
            raise RuntimeError(
                f"this {self.config.model_type} drafter has no target yet; call attach(target) or bind(target, rows, context)"
            )
        return self._target

    def attach(self, target: Target) -> Self:
        """Keep a reference to the target, after checking that it is the one this drafter was made for.

        Raises:
            ValueError: another target, or other sizes.
        """
        made_for = self.config.target
        if made_for:
            warning = check_same(TargetIdentity.from_dict(made_for), target.identity)
            if warning:
                warnings.warn(warning, stacklevel=2)
        for name in ("hidden_size", "vocab_size"):
            mine, theirs = getattr(self.config, name), getattr(target, name)
            if mine != theirs:
                raise ValueError(
                    f"this drafter has {name} {mine}, target {target.identity.name!r} has {theirs}; load the target it was made for"
                )
        self._target = target
        return self

    def init_from_target(self, target: Target) -> None:
        """Copy what starts as the target's. Apart from __init__, since transformers initialises modules after it."""

    @property
    def method(self) -> str:
        return self.config.model_type

    @property
    def tree_spec(self) -> TreeSpec:
        """The tree of the config; subclasses see to it that there is one. Made once for each."""
        if self._tree_spec is None or self._tree_spec[0] != self.config.tree:
            self._tree_spec = (copy.deepcopy(self.config.tree), parse_tree_spec(self.config.tree))
        return self._tree_spec[1]

    @tree_spec.setter
    def tree_spec(self, tree_spec: TreeSpec) -> None:
        self.config.tree = tree_config(tree_spec)

    @property
    def depth_limit(self) -> int:
        """K at most, whatever the tree: how far ahead this drafter can look."""
        raise NotImplementedError

    def position_features(self, ids: Tensor, out: TargetOutput) -> Tensor:
        """ids [S] of a text and the target's output along it (hidden [1,S,H], taps) -> what `position_logits` reads of them, [S,·]."""
        return out.hidden[0]

    def position_logits(self, features: Tensor, roots: Tensor) -> Tensor:
        """features [S,·], consecutive roots [R] -> [R,K,V]: entry (r,k) ranks token roots[r]+k+1. For position records."""
        raise NotImplementedError

    @property
    def max_nodes(self) -> int:
        return self.tree_spec.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree_spec.max_depth

    # The Drafter protocol, which a subclass implements; shapes are said there.

    def bind(self, target: Target, rows: int, context: int) -> Any:
        raise NotImplementedError

    def start(self, rows: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        raise NotImplementedError

    def propose(self, round: RoundContext) -> DraftTree:
        raise NotImplementedError

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        raise NotImplementedError

    def drop(self, rows: list[int]) -> None:
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, but only safetensors are read and every tensor must be there, no more and no less.

        Raises:
            FileNotFoundError: no folder, no config.json or no weights.
            ValueError: pickled weights, a damaged file, or tensors missing, left over or misshapen, by name.
        """
        path = str(pretrained_model_name_or_path)
        source = _whole(path)
        with_info = kwargs.pop("output_loading_info", False)
        strict = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = cast(Any, super()).from_pretrained(source, *args, **{**kwargs, **strict})
        check_loaded(path, info)
        return (model, info) if with_info else model

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a drafter leave the target and the rows being decoded behind.
        return {**self.__dict__, "_target": None, "_state": None}


def methods() -> list[str]:
    """The architectures there are: files of this folder that define `Config` and `Model`."""
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
    """A fresh drafter for `target`, on its device, with what starts as the target's copied. `arch`: fields of its Config.

    Raises:
        ValueError: an unknown method or field.
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
    """Whether the folder or Hub id is a drafter of ours, by the model_type of its config; else it is for transformers to say."""
    raw, _ = DrafterConfig.get_config_dict(_whole(path))
    return raw.get("model_type", "") in methods()


def _whole(path: str) -> str:
    source = resolve_path(path)
    if Path(source).is_dir():
        check_folder(source)
    return source


def load_config(path: str | Path, revision: str | None = None) -> DrafterConfig:
    """The config alone of a drafter in a folder or on the Hub, without its weights.

    Raises:
        FileNotFoundError, ValueError: a folder that is not whole, or an unknown architecture.
    """
    raw, _ = DrafterConfig.get_config_dict(_whole(str(path)), revision=revision or "main")
    method = raw.get("model_type", "")
    if method not in methods():
        raise ValueError(f"{str(path)!r} has model_type {method!r}, expected one of {', '.join(methods())}; is it a drafter?")
    return architecture(method).Config.from_dict(raw)


def load_drafter(
    path: str | Path,
    target: Target | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> DrafterModel:
    """Load a drafter from a folder or the Hub, by its config's `model_type`; with a target, check and attach it.

    `dtype=None` keeps the artifact's own; `device=None` is the target's, or the CPU.

    Raises:
        FileNotFoundError, ValueError: an artifact that is not whole, an unknown architecture, or another target.
    """
    config = load_config(path, revision)
    model = architecture(config.model_type).Model
    drafter: DrafterModel = model.from_pretrained(str(path), config=config, dtype=dtype or "auto", revision=revision or "main")
    torch.nn.Module.to(drafter, device if device is not None else target.device if target is not None else "cpu")
    if target is not None:
        drafter.attach(target)
    return drafter.eval()


def default_paths(depth: int, nodes: int = 15) -> list[list[int]]:
    """Rank paths of a small tree, root not counted: the chain of `depth` and the likeliest of the rest, up to `nodes`.

    Likelihoods are a rule of thumb for heads (rank r at depth k: 0.6, .15, .08, … times 0.85^k); measure, then set config.tree.
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
