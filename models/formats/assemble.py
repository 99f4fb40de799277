"""A drafter from the tensors of somebody's folder, once the reader of the format has made its config and our names of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.target import Target
from draftsmith.models.weights import assign

__all__ = ["assembled"]


def assembled(make: Callable[[Any], Any], config: Any, path: str, tensors: Mapping[str, Tensor], target: Target) -> Any:
    """The drafter, attached to its target, in the weights' dtype, in eval mode.

    Args:
        make: the drafter's class, which takes `config`.
        config: of the drafter; its dtype becomes that of the first tensor.
        path: for errors.
        tensors: by our names.
        target: what the drafter drafts for.

    Raises:
        ValueError: as `assign`.
    """
    with torch.device("meta"):
        drafter = make(config)
    assign(path, drafter, tensors, target.device)
    config.dtype = next(iter(tensors.values())).dtype
    return drafter.attach(target).eval()
