"""Names of the losses between the draft and the target distribution, and how a recipe mixes them. `draft` has their formulas."""

import re

NAMES = ("kl", "ce", "nll", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid")
EXPECTED = f"one of {', '.join(NAMES)}, jsd(β) with 0 < β < 1, or a mix such as `0.9 tv + 0.1 ce`"

ETA = 3.0  # how fast lk_hybrid moves from KL to acceptance (Samarin et al. 2026)
FLOOR = -1e4  # least log-probability: a token that is masked or cut has −inf, and 0 · inf is not a number


def mix(text: str, key: str = "loss") -> dict[str, float]:
    """Parse `kl` or `0.9 tv + 0.1 ce` or `0.5 jsd(0.1) + 0.5 tv` into the share of each loss.

    Raises:
        ValueError: the text is anything else. The message names `key`.
    """
    shares: dict[str, float] = {}
    for term in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d*\.?\d+)\s+)?(\S+)\s*", term)
        if not match or not is_loss(match[2]) or match[2] in shares or not float(match[1] or 1):
            raise ValueError(f"{key}={text!r}: expected {EXPECTED}")
        shares[match[2]] = float(match[1] or 1)
    return shares


def is_loss(name: str) -> bool:
    return name in NAMES or beta_of(name) is not None


def beta_of(name: str) -> float | None:
    """β of `jsd` and `jsd(0.1)`; None for any other loss."""
    match = re.fullmatch(r"jsd\((\d*\.?\d+)\)", "jsd(0.5)" if name == "jsd" else name)
    return float(match[1]) if match and 0 < float(match[1]) < 1 else None
