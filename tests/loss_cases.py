"""Mixes of losses, and cut targets, that the tests of losses share."""

import torch

from draftsmith.train.losses.draft import LOSSES

MIX = {"kl": 0.3, "tv": 0.2, "lk": 0.5}


EVERYTHING = {name: 0.1 * i for i, name in enumerate([*LOSSES, "jsd(0.1)"], 1)}


FINITE = {name: share for name, share in EVERYTHING.items() if name != "reverse_kl"}  # whatever top_k is


def likeliest(logits, count):
    """Logits [V], of all but the `count` likeliest tokens too small to count; 0: as they are."""
    if not count:
        return logits
    best = logits.topk(count)
    return torch.full_like(logits, -1e9).scatter(0, best.indices, best.values)
