"""A causal LM as LayerSkip trains it (Elhoushi et al. 2024, https://arxiv.org/abs/2404.16710): hidden states of early exits, and layer dropout.

Letters: B rows · S positions · H hidden size · L decoder layers · E exits.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.parallel import decoder_layers
from draftsmith.models.student import hidden

__all__ = ["check_exits", "dropout_probabilities", "exit_states", "final_norm"]


def check_exits(model: PreTrainedModel, exits: Sequence[int]) -> None:
    """Raises ValueError unless the exits are numbers of first layers that leave some out, in order, and the model has one final norm."""
    final_norm(model)
    count = len(decoder_layers(model))
    if not exits or list(exits) != sorted(set(exits)) or not 0 < exits[0] <= exits[-1] < count:
        raise ValueError(f"got exits {list(exits)}; expected numbers of first layers, 1 to {count - 1}, in order; correct them")


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last decoder layer and the head. Raises ValueError for an architecture that has none, or several."""
    norms = [child for child in model.get_decoder().children() if "norm" in type(child).__name__.lower()]
    if len(norms) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(norms)} norms after its decoder layers; early exits need one; take another target"
        )
    return norms[0]


def dropout_probabilities(layers: int, most: float) -> list[float]:
    """The probability with which each of L layers is dropped: most · (2^(l / (L − 1)) − 1), from 0 for the first to `most` (section 4.1)."""
    return [most * (math.exp(number * math.log(2) / max(1, layers - 1)) - 1) for number in range(layers)]


def exit_states(model: nn.Module, batch: dict[str, Tensor], exits: Sequence[int], dropped: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The hidden states that the head reads, of the complete model and of its exits, with gradients.

    Args:
        model: a transformers causal LM, also with LoRA adapters.
        batch: packed, as `data/packing.py` makes it.
        exits: the number of first layers of each exit.
        dropped: bool [L,B,S], layers that hand on their input at a position; equal for all positions of a document. None drops nothing.

    Returns:
        [B,S,H] and [E,B,S,H], both after the final norm.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    layers, outputs = decoder_layers(base), {}

    def after(_module: nn.Module, args: tuple[Any, ...], output: Any, number: int) -> Any:
        if dropped is not None and number:  # the first layer is never dropped
            output = torch.where(dropped[number][..., None], args[0], output)
        outputs[number] = output
        return output

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_hook(partial(after, number=number)))
        last = hidden(model, batch)
    norm = final_norm(base)
    return last, torch.stack([norm(outputs[count - 1]) for count in exits])
