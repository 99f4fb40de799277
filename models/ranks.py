"""The processes of a launch: they split work, and put results together."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

Item = TypeVar("Item")
Value = TypeVar("Value")


# One rank may tokenise, prune or decode for long while the others wait; torch's own limits are ten minutes with NCCL, thirty with gloo.
COLLECTIVE_TIMEOUT = timedelta(hours=6)


def state() -> PartialState:
    """The process's rank, its device and the number of processes, from Accelerate. The first call joins the group of a launch."""
    options = {"timeout": COLLECTIVE_TIMEOUT} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    return PartialState(cpu=not torch.cuda.is_available(), **options)


def count() -> int:
    """Number of processes."""
    return state().num_processes


def leave() -> None:
    """Wait until every rank is done, then leave the process group: a rank that ends early may abort the others."""
    if count() > 1:
        state().wait_for_everyone()
        state().destroy_process_group()


def share(items: Sequence[Item]) -> list[Item]:
    """The items of this rank: every `count()`-th, so that each rank gets some of each domain.

    Raises:
        ValueError: fewer items than ranks.
    """
    if len(items) < count():
        raise ValueError(
            f"got {len(items)} prompts for {count()} processes; expected one for each at least; launch fewer, or give more prompts"
        )
    return list(items[state().process_index :: count()])


def agreed(value: Value) -> Value:
    """The first rank's value, on every rank. Measured times differ between ranks; what is decided by them must not."""
    state()
    return broadcast_object_list([value])[0]


def gather(values: dict[int, Value]) -> dict[int, Value]:
    """The union of all ranks' dictionaries, on every rank."""
    state()
    merged: dict[int, Value] = {}
    for part in gather_object([values]):
        merged |= part
    return merged
