"""Tokens and rounds of each prompt: what τ, its interval and every difference of two τ are made of."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from draftsmith.eval.intervals import Interval, conversations, of_ratio
from draftsmith.eval.records import RequestRecord

Totals = dict[str, tuple[int, int]]  # (tokens, rounds) by prompt id


def totals(requests: Iterable[RequestRecord]) -> Totals:
    """Of the requests of one setting."""
    return {each.prompt: (sum(round.committed for round in each.rounds), len(each.rounds)) for each in requests}


def by_setting(requests: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """The requests of each setting, in their order."""
    settings: dict[str, list[RequestRecord]] = {}
    for request in requests:
        settings.setdefault(request.setting, []).append(request)
    return settings


def columns(counts: Sequence[Mapping[str, tuple[float, float]]], prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens [M,P] and rounds [M,P] of M drafters on prompts that all of them have, float64. The turns of a conversation are one of the P."""
    conversation = conversations(prompts)
    column = {name: number for number, name in enumerate(first_turns(prompts))}
    sums = torch.zeros(2, len(counts), len(column), dtype=torch.float64)
    for row, each in enumerate(counts):
        for prompt in prompts:
            sums[:, row, column[conversation[prompt]]] += torch.tensor(each[prompt], dtype=torch.float64)
    return sums[0], sums[1]


def first_turns(prompts: Sequence[str]) -> list[str]:
    """The first turns of the conversations, in the order of `columns`."""
    return list(dict.fromkeys(conversations(prompts).values()))


def tau(counts: Totals) -> Interval:
    """τ over at least one prompt, with its interval."""
    tokens, rounds = columns([counts], list(counts))
    return of_ratio(tokens[0], rounds[0])
