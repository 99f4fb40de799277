"""What a causal LM makes of hidden states: its logits, and nothing else of its forward.

Letters: V vocabulary · H hidden size.
"""

import copy
import weakref
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from draftsmith.models.model_files import UNEXPECTED, in_words, model_file
from draftsmith.models.parallel import not_partitioned
from draftsmith.models.quantised import quantised_as
from draftsmith.models.weights import Header, check_headers, check_loaded, read_tensors, stored_tensors

__all__ = ["Head", "check_fits", "end_modules", "load_ends", "without_memory"]

_ADVICE = "they do not belong together: copy the complete model folder"
_PACKED = 8  # most weights in one number of a quantised tensor
_UNSTORED = 1 << 24  # numbers that a model computes instead of storing them: rotary frequencies, position masks


CHUNK = 1 << 14  # rows of the head that are in float32 at a time


class Head:
    """A model's own logits [...,V] of hidden states [...,H], scaling and soft-capping after the output head included.

    Differentiable with respect to the hidden states and to whatever parameters require gradients. Where the model only applies its head,
    so does this, without the model's wrapper.

    Attributes:
        module: the output head alone.
        plain: whether the logits are the head's output, bit for bit.

    Raises:
        ValueError: a model without an output head, or without a base model apart from it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        module = model.get_output_embeddings()
        if not isinstance(module, nn.Module):
            raise ValueError(f"{type(model).__name__} has no output head; give a causal language model")
        self.module: nn.Module = module
        self._shell = _shell(model)
        self.plain = self._is_plain()

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Head":
        """The head of a model, one object per model: finding out what follows the head takes forwards."""
        return _HEADS.get(model) or _HEADS.setdefault(model, cls(model))

    @property
    def weight(self) -> Tensor:
        """[V,H]"""
        return self.module.get_parameter("weight")

    def __call__(self, hidden: Tensor) -> Tensor:
        moved = hidden.to(self.weight.device)  # stored features are on the CPU, the head of a model on several devices on any of them
        return (self.module(moved) if self.plain else self._full(moved)).to(hidden.device)

    @cached_property
    @torch.no_grad()
    def scale(self) -> float:
        """What the model multiplies its head's output by (Cohere, Granite), soft-capping aside; 1.0 for most models."""
        if self.plain:
            return 1.0
        hidden = self._probe(0.01)  # small: soft-capping is the identity near 0
        own, bare = self._full(hidden).double(), self.module(hidden).double()
        scale = float((own * bare).sum() / (bare * bare).sum())
        return 1.0 if abs(scale - 1) < 0.01 else scale  # soft-capping alone: 1, but for rounding

    @property
    def soft_cap(self) -> float | None:
        """c of the soft-capping c · tanh(x / c) of logits (Gemma 2); None for most models."""
        return getattr(self._shell.config.get_text_config(), "final_logit_softcapping", None)

    @torch.no_grad()
    def in_float32(self, hidden: Tensor) -> Tensor:
        """The logits [...,V] of hidden [...,H] in float32 whatever the weights' dtype, without the rounding of the head's own arithmetic."""
        hidden, bias = hidden.to(self.weight.device, torch.float32), getattr(self.module, "bias", None)
        logits = torch.cat([nn.functional.linear(hidden, rows.float()) for rows in self.weight.split(CHUNK)], -1)
        if bias is not None:
            logits += bias
        logits *= self.scale
        if cap := self.soft_cap:
            logits = cap * (logits / cap).tanh()
        return logits

    def _full(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(1, hidden.shape[:-1].numel(), hidden.shape[-1])
        # The class's forward, not the instance's: hooks on the model itself must see real forwards only.
        output: Any = type(self._shell).forward(self._shell, inputs_embeds=flat, use_cache=False, return_dict=True)
        return output.logits.view(*hidden.shape[:-1], len(self.weight))

    def _probe(self, size: float) -> Tensor:
        noise = torch.randn(1, 2, self.weight.shape[1], generator=torch.Generator().manual_seed(0))
        return (size * noise).to(self.weight.device, self.weight.dtype)

    @torch.no_grad()
    def _is_plain(self) -> bool:
        """Whether the model's logits are its head's output, bit for bit; at scale 100 soft-capping cannot hide."""
        return all(torch.equal(self._full(hidden), self.module(hidden)) for hidden in (self._probe(1.0), self._probe(100.0)))


_HEADS: "weakref.WeakKeyDictionary[PreTrainedModel, Head]" = weakref.WeakKeyDictionary()


class _BaseOutput:
    """What a base model returns, as far as a head reads it: the hidden states, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Passthrough(nn.Module):
    """Stands in for the base model: returns its input embeddings as the hidden states."""

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_kwargs: Any) -> _BaseOutput:
        return _BaseOutput(inputs_embeds)


def _shell(model: PreTrainedModel) -> PreTrainedModel:
    """A shallow copy of `model` that shares its head and whose base model only passes hidden states through."""
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no base model apart from its head; give a causal language model")
    shell = copy.copy(model)
    shell.__dict__.pop("forward", None)  # a forward patched onto the instance would run the real base model
    shell._modules = {**model._modules, model.base_model_prefix: _Passthrough()}
    return shell


def end_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The input embeddings, and the output head: every child module of the model that is not its base model."""
    return [model.get_input_embeddings(), *(child for name, child in model.named_children() if name != model.base_model_prefix)]


def without_memory(path: str, config: PretrainedConfig, dtype: torch.dtype | str | None, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a config on the meta device.

    Args:
        path: the model, for errors.
        config: the model's config.
        dtype: of the weights; None or "auto" takes the config's.
        trust_remote_code: run the model's own code from the Hub.

    Raises:
        ValueError: values from which transformers can build no model.
    """
    try:
        with not_partitioned(), torch.device("meta"):
            wanted = config.dtype if dtype in (None, "auto") else dtype
            return AutoModelForCausalLM.from_config(config, dtype=wanted, trust_remote_code=trust_remote_code)
    except (ValueError, RuntimeError, *UNEXPECTED) as error:
        raise ValueError(f"config.json of {path!r} describes no model: {in_words(error)}; correct it or restore the file") from None


def check_fits(path: str, config: PretrainedConfig, stored: dict[str, Header], trust_remote_code: bool) -> None:
    """Compare a config with the headers of its weights, before anything of its sizes is allocated.

    Of quantised weights, whose shapes are the quantiser's, only the number is compared.

    Args:
        path: the model, for errors.
        config: the model's config.
        stored: the headers of its tensors.
        trust_remote_code: run the model's own code from the Hub.

    Raises:
        ValueError: more layers than tensors, tensors of other shapes or that hold no floating-point numbers, or far fewer of them.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(stored):
        raise ValueError(
            f"config.json of {path!r} has `num_hidden_layers` {layers:,}, its safetensors have {len(stored):,} tensors; {_ADVICE}"
        )
    model = without_memory(path, config, None, trust_remote_code)
    names = {ours: stored[theirs] for ours, theirs in _stored_names(model, dict.fromkeys(stored, "")).items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    quantised = bool(quantised_as(config))
    if not quantised:
        check_headers(path, parameters, names, exact=False)
    wanted = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if wanted > sum(header.size for header in stored.values()) * (_PACKED if quantised else 1) + _UNSTORED:
        check_loaded(path, {"missing_keys": parameters.keys() - names.keys(), "unexpected_keys": (), "mismatched_keys": ()})
        raise ValueError(f"config.json of {path!r} describes {wanted:,} numbers, far more than its safetensors hold; {_ADVICE}")


def load_ends(
    source: str,
    config: PretrainedConfig,
    revision: str,
    *,
    dtype: torch.dtype | str | None,
    device: torch.device | str,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a model's input embeddings and output head; its decoder layers stay on the meta device, without memory.

    Args:
        source: folder or Hub id; of a Hub model only the files that store these tensors are downloaded.
        config: the model's config.
        revision: commit, tag or branch on the Hub.
        dtype: of the weights; None or "auto" keeps the checkpoint's own.
        device: where embeddings and head go.
        trust_remote_code: run the model's own code from the Hub.

    Returns:
        The model, and what could not be read in the form of transformers' loading info (`weights.check_loaded` refuses it).

    Raises:
        FileNotFoundError: no safetensors, or not all of the files that the index names.
    """
    files = stored_tensors(source, revision)
    model = without_memory(source, config, dtype, trust_remote_code)
    ends = {module for part in end_modules(model) for module in part.modules()}
    _fill_buffers(model, ends, device)
    stored = _stored_names(model, files)
    own = model.state_dict()
    names = [name for name in own if model.get_submodule(name.rpartition(".")[0]) in ends]
    tensors = read_tensors(source, revision, {stored[name]: files[stored[name]] for name in names if name in stored}, device)
    as_stored = dtype in (None, "auto") and config.dtype is None  # the checkpoint's own dtype, which its config does not name
    misshapen = [
        (name, tensors[stored[name]].shape, own[name].shape)
        for name in names
        if name in stored and tensors[stored[name]].shape != own[name].shape
    ]
    missing = own.keys() - {name for name in names if name in stored}
    if not misshapen:
        for name in set(names) - missing:
            tensor = tensors[stored[name]]
            _put(model, name, tensor if as_stored else tensor.to(own[name].dtype))
        model.tie_weights(missing_keys=missing, recompute_mapping=False)  # as from_pretrained ties weights
    if model_file(source, "generation_config.json", revision):
        model.generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    return model, {"missing_keys": missing & set(names), "unexpected_keys": (), "mismatched_keys": misshapen}


@torch.no_grad()
def _fill_buffers(model: PreTrainedModel, modules: set[nn.Module], device: torch.device | str) -> None:
    """Give these modules the buffers that no checkpoint stores, such as Gemma's √H. Their weights are still on the meta device."""
    for module in modules:
        if module._buffers:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
            model._init_weights(module)


def _stored_names(model: PreTrainedModel, files: dict[str, str]) -> dict[str, str]:
    """The model's name of a tensor -> its name in the checkpoint, by the renaming that transformers does when it loads the model."""
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    own = model.state_dict()
    names = {}
    for name in files:
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, own)  # by position: names differ between versions
        names[name if renamed not in own and name in own else renamed] = name
    return names


def _put(model: PreTrainedModel, name: str, tensor: Tensor) -> None:
    """Set a parameter or buffer of the model by its name."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if last in module._buffers:
        module._buffers[last] = tensor
    else:
        module._parameters[last] = nn.Parameter(tensor, requires_grad=False)
