"""What a causal LM makes of hidden states: its logits, and nothing else of its forward.

Letters: V vocabulary · H hidden size.
"""

import copy
import weakref
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["Head"]


class Head:
    """A model's own logits [...,V] of hidden states [...,H], scaling and soft-capping after the output head included.

    Differentiable with respect to the hidden states and to whatever parameters require gradients. Where the model only applies its head,
    so does this, without the model's wrapper.

    Attributes: module, the output head alone; plain, whether the logits are its output.

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
        """The model's head, made once: finding out what it does takes forwards."""
        return _MADE.get(model) or _MADE.setdefault(model, cls(model))

    @property
    def weight(self) -> Tensor:
        """[V,H]"""
        return self.module.get_parameter("weight")

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.module(hidden) if self.plain else self._full(hidden)
        return logits.to(hidden.device)  # of a model on several devices the head may be elsewhere

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


_MADE: "weakref.WeakKeyDictionary[PreTrainedModel, Head]" = weakref.WeakKeyDictionary()


class _Given:
    """What a base model returns, as far as a head reads it: the hidden states, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Passthrough(nn.Module):
    """Stands in for the base model: gives its input embeddings back as the hidden states."""

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_kwargs: Any) -> _Given:
        return _Given(inputs_embeds)


def _shell(model: PreTrainedModel) -> PreTrainedModel:
    """A shallow copy of `model` that shares its head and whose base model only passes hidden states through."""
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no base model apart from its head; give a causal language model")
    shell = copy.copy(model)
    shell.__dict__.pop("forward", None)  # a forward patched onto the instance would run the real base model
    shell._modules = {**model._modules, model.base_model_prefix: _Passthrough()}
    return shell
