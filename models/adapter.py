"""LoRA adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685), through peft: of a student, and of the target of Medusa-2.

The adapters of a target are stored in the folder `adapter` of the drafter's artifact, in peft's own format. Such a drafter belongs to the adapted
target: its output is lossless with respect to the adapted model only, and the target's identity carries the adapter's hash.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.inference.durable import sampled_hash
from draftsmith.models.identity import TargetIdentity, check_same
from draftsmith.models.model_files import model_file, resolve_path
from draftsmith.models.saving import save_model
from draftsmith.models.target import Target
from draftsmith.models.weights import ADAPTER, ADAPTER_CONFIG, check_adapter

if TYPE_CHECKING:
    from peft import PeftModel

FOLDER = "adapter"  # of an artifact


def with_lora(model: PreTrainedModel, rank: int, alpha: int | None = None, seed: int = 0, dropout: float = 0.0) -> "PeftModel":
    """`model` with low-rank adapters in all linear layers but the head.

    Only the adapters are trained. `model` itself is changed.

    Args:
        model: of transformers.
        rank: of the adapters.
        alpha: their output is multiplied by alpha / rank; None is 2·rank.
        seed: their weights depend on it alone. They change nothing before they are trained.
        dropout: share of an adapter's inputs that are left out in training.

    Raises:
        ValueError: peft is not installed.
    """
    peft = _peft()
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with seeded(seed):
        return peft.get_peft_model(model, config)


def merged(model: nn.Module) -> PreTrainedModel:
    """A plain copy with the adapters merged into its weights; the model itself where it has none."""
    return copy.deepcopy(cast(Any, model)).merge_and_unload() if plain(model) is not model else cast(PreTrainedModel, model)


def plain(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PeftModel, with its adapters; any other model as it is."""
    return cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else cast(PreTrainedModel, model)


def save(model: "PeftModel", folder: Path, base: str) -> str:
    """Write the adapters in peft's format, and return their hash.

    Args:
        model: whose adapters are written.
        folder: where to.
        base: folder or Hub id of the model without them, which the config names.
    """
    config: Any = model.peft_config["default"]
    before, config.base_model_name_or_path = config.base_model_name_or_path, base
    try:
        # By default peft asks the Hub whether embeddings were resized.
        save_model(model, folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # a form that peft leaves to be filled in
    finally:
        config.base_model_name_or_path = before
    return _hash(folder)


def adapt(target: Target, path: str | Path, made_for: dict[str, str] | None = None) -> Target:
    """Merge the adapters of an artifact into the target, in place: for the other drafters of this target load it anew.

    Args:
        target: without adapters.
        path: folder or Hub id of the artifact.
        made_for: the `TargetIdentity` of its config as a dict, to which target and adapters are held; None holds them to nothing.

    Returns:
        `target`, whose identity carries the adapter's hash.

    Raises:
        FileNotFoundError: the artifact has no adapters.
        ValueError: peft is not installed, damaged adapters, or adapters of another target.
    """
    folder = _folder_of(str(path))
    check_adapter(str(folder))
    adapted = replace(target.identity, adapter_hash=_hash(folder))
    if made_for:
        check_same(TargetIdentity.from_dict(made_for), adapted)
    loaded = _peft().PeftModel.from_pretrained(target.model, str(folder), local_files_only=True)
    loaded.merge_and_unload(safe_merge=True)  # in `target.model` itself
    target.model.eval().requires_grad_(False)
    target.identity = adapted
    return target


def check(path: str | Path, expected_hash: str) -> None:
    """Check that an artifact has the adapters with this hash.

    Raises:
        FileNotFoundError: the artifact has no adapters.
        ValueError: damaged adapters, or others.
    """
    folder = _folder_of(str(path))
    check_adapter(str(folder))
    if (actual := _hash(folder)) != expected_hash:
        raise ValueError(
            f"{folder} holds other adapters ({actual[:12]}) than the heads were trained with ({expected_hash[:12]}); restore that folder"
        )


def _folder_of(path: str) -> Path:
    source = resolve_path(path)
    files = [model_file(source, f"{FOLDER}/{name}", "main") for name in (ADAPTER_CONFIG, ADAPTER)]
    if None in files:
        raise FileNotFoundError(
            f"no {FOLDER}/{(ADAPTER_CONFIG, ADAPTER)[files.index(None)]} in {path!r}, whose heads belong to an adapted target; copy it completely"
        )
    return Path(cast(str, files[0])).parent


def _hash(folder: Path) -> str:
    return sampled_hash([os.path.join(folder, ADAPTER)])


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ValueError("LoRA needs peft, which is not installed: pip install draftsmith[peft]") from None
    return peft


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the CPU's random numbers start at `seed`; afterwards the generator is as it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
