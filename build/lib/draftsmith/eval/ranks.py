"""Prompts split over the ranks of a launch, and what they found put together. With one process all of it is the identity."""

import os
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

Item = TypeVar("Item")
Value = TypeVar("Value")


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@cache
def _state() -> PartialState:
    return PartialState(cpu=not torch.cuda.is_available())


def first() -> bool:
    """Whether this is the process that speaks and writes."""
    return count() == 1 or _state().is_main_process


def leave() -> None:
    """Every rank has said its word: part in order, else a rank may be aborted by the others' going."""
    if count() > 1:
        _state().wait_for_everyone()
        _state().destroy_process_group()


def device() -> str:
    """The device of this process."""
    if count() > 1:
        return str(_state().device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def share(items: Sequence[Item]) -> list[Item]:
    """This rank's items: every count-th, so that all have some of each domain.

    Raises:
        ValueError: fewer items than ranks.
    """
    if len(items) < count():
        raise ValueError(
            f"got {len(items)} prompts for {count()} processes; expected one for each at least; launch fewer, or give more prompts"
        )
    return list(items[_state().process_index :: count()]) if count() > 1 else list(items)


def agreed(value: Value) -> Value:
    """The first rank's value, on every rank: what was timed differs, what follows from it must not."""
    if count() == 1:
        return value
    return broadcast_object_list([value])[0]


def gather(found: dict[int, Value]) -> dict[int, Value]:
    """The dictionaries of all ranks as one, on every rank."""
    if count() == 1:
        return found
    merged: dict[int, Value] = {}
    for part in gather_object([found]):
        merged |= part
    return merged
