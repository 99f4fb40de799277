"""Mixes of losses that the tests of losses share."""

from draftsmith.train.losses.draft import LOSSES

MIX = {"kl": 0.3, "tv": 0.2, "lk": 0.5}


EVERYTHING = {name: 0.1 * i for i, name in enumerate([*LOSSES, "jsd(0.1)"], 1)}


FINITE = {name: share for name, share in EVERYTHING.items() if name != "reverse_kl"}  # whatever top_k is
