"""Sampling: logits and a key -> a token.

The noise is a pure function of (seed, request, position, token), so that the same token is drawn whatever the drafter, the tree, the slot or
the batch.

Letters: V vocabulary. `...` is any batch shape, the same for all arguments.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.inference.constraints import Constraint
from draftsmith.inference.rule_names import DEFAULT_RULE, RULES, Rule

__all__ = [
    "DEFAULT_RULE",
    "RULES",
    "Rule",
    "Sampling",
    "best_token",
    "gumbel",
    "on_host",
    "penalise",
    "philox",
    "sample",
    "sample_on_host",
    "uniform",
    "warp",
]

_MASK = 0xFFFFFFFF
# Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.2.
_MULTIPLY_0, _MULTIPLY_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
AT_ONCE = 1 << 18  # numbers that a CPU makes together, in its cache: 32 rows of 49,152 take 43 ms so, and 86 in one piece
GROUP, LEAST_GROUPS = 256, 8  # of `best_token`: tokens of a group; fewer groups gain nothing
MOST_NOISE = 23.0  # above all Gumbel noise: a word x gives −log(−log u) = 33 log 2 = 22.87 at most; the rest is for rounding
WORTH_CHOOSING = 0.5  # share of the blocks of four tokens: 64 rows of 49,152 take 15, 63, 102 ms at .1, .5, .9, and 84 with all the noise

# The fourth counter word says what a number is for. Draws of the target must share no number with other uses.
PURPOSE_TOKEN, PURPOSE_DRAFT, PURPOSE_UNIFORM = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn and drafts verified. The filters apply in the order of the fields.

    Attributes:
        temperature: 0 is greedy decoding, where top_k, top_p, min_p and the rule do not matter.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        seed: 0 .. 2^64 − 1.
        repetition_penalty: 1 is off; applied before the temperature.
        rule: a name of RULES.
        epsilon: of typical acceptance (Cai et al. 2024, §2.3.1).
        delta: likewise.
        constraint: what answers must be, such as a `Grammar`; applied before all else; None is off.

    Raises:
        ValueError: a field outside its range, or rule membership without a filter.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    rule: str = DEFAULT_RULE
    epsilon: float = 0.09
    delta: float = 0.3
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature == 0 or 1e-30 <= self.temperature < float("inf"), "0 (greedy) or a number from 1e-30"),
            ("top_k", self.top_k >= 0, "0 (off) or a positive integer"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number in (0, 1]; 1 is off"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number in [0, 1]; 0 is off"),
            ("seed", 0 <= self.seed < 2**64, "an integer in 0 .. 2^64-1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "a positive number; 1 is off"),
            ("rule", self.rule in RULES, f"one of {', '.join(RULES)}"),
            ("epsilon", 0.0 <= self.epsilon <= 1.0, "a probability"),
            ("delta", 0.0 <= self.delta < float("inf"), "a number >= 0"),
        )
        for name, good, expected in checks:
            if not good:
                raise ValueError(f"got {name} {getattr(self, name)}; expected {expected}; correct it")
        if self.rule == "membership" and not self.filtered:
            raise ValueError("got rule membership without top_k, top_p or min_p; every token would be accepted; give one of them")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether top_k, top_p or min_p may drop tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def children(self) -> str:
        """How a drafter chooses the children of a node: as the rule says; greedy, always its best tokens."""
        return "top" if self.greedy else RULES[self.rule].children

    @property
    def lossless(self) -> bool:
        return self.greedy or RULES[self.rule].lossless


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """logits [...,V] with the repetition penalty on the tokens that are seen [...,V]: the rule of RepetitionPenaltyLogitsProcessor (Keskar et al.
    2019, §4.1)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, top-k, top-p and min-p: logits [...,V] -> float32 [...,V], −inf outside the kept set.

    Kept sets are those of transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, in this order.
    Ties: top-k keeps all logits that equal the k-th. Which of several equal logits top-p drops, transformers leaves to an unstable sort; here
    the lowest id is dropped first, so that the set is the same for every shape, device and kernel. At the
    limit of top-p, rounding may decide otherwise than there.
    """
    scores = logits.float()
    vocab = scores.shape[-1]
    if sampling.temperature not in (0.0, 1.0):
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < vocab:
        kth = torch.topk(scores, sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if sampling.top_p < 1.0:
        scores = scores.masked_fill(_least_likely(scores, sampling.top_p), -torch.inf)
    if sampling.min_p > 0.0:
        probability = scores.softmax(-1)
        top, best = probability.max(-1, keepdim=True)
        drop = (probability < sampling.min_p * top).scatter_(-1, best, False)
        scores = scores.masked_fill(drop, -torch.inf)
    return scores


def _least_likely(scores: Tensor, top_p: float) -> Tensor:
    """A mask [...,V] of the tokens that top-p drops: the least likely ones of scores [...,V], whose probabilities add up to at most 1 − p."""
    if not on_host(scores):
        ordered, index = torch.sort(scores, stable=True)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, _tail(ordered.softmax(-1).cumsum(-1), top_p))
    # A CPU takes 5 ms to sort 49,152 scores. Tokens below (1 − p) / V, which are most, have less than 1 − p together: they need no sorting.
    rows = scores.reshape(-1, scores.shape[-1])
    probability = rows.softmax(-1)
    drop = probability < 0.999 * (1 - top_p) / rows.shape[-1]
    rest = probability.masked_fill(~drop, 0.0).sum(-1, dtype=torch.float64)
    for row in range(len(rows)):
        likely = (~drop[row]).nonzero().squeeze(1)
        likely = likely[torch.sort(rows[row, likely], stable=True).indices]
        below = probability[row, likely].double().cumsum(0) + rest[row]
        drop[row, likely] = _tail(below.float(), top_p)
    return drop.view_as(scores)


def _tail(below: Tensor, top_p: float) -> Tensor:
    """Which of n tokens, least likely first, top-p drops; the last stays. below [...,n]: the probability of a token and those before it."""
    drop = below <= 1 - top_p
    drop[..., -1].fill_(False)
    return drop


def philox(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four counter words -> four words, all int64 tensors in [0, 2^32) that broadcast together.

    The key is (low word of seed, high word of seed), the layout of `triton.language.philox(seed, c0, c1, c2, c3)`.
    """
    key_0, key_1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    for _ in range(_ROUNDS):
        # int64 multiplication wraps, which keeps all 64 bits. Bits above the lowest 32 are masked before a word is multiplied or returned.
        # The operations work in place, which saves a CPU a quarter of the time.
        first, second = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        c0 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(key_0).bitwise_and_(_MASK)
        c2 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(key_1).bitwise_and_(_MASK)
        c1, c3 = second, first
        key_0, key_1 = (key_0 + _WEYL_0) & _MASK, (key_1 + _WEYL_1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel(seed: int, request: Tensor, position: Tensor, vocab: int, purpose: int = PURPOSE_TOKEN, copy: int | Tensor = 0) -> Tensor:
    """Standard Gumbel noise.

    Counter layout: (token // 4, position, request, purpose + 256 · copy), key = seed; token t takes output word t % 4. A word x gives the uniform
    u = (x + ½) / 2^32, in float64 never 0 and never 1, and the noise −log(−log u).

    Args:
        seed: 0 .. 2^64 − 1.
        request: [...] int64 in [0, 2^32), the noise key of the request.
        position: [...] int64 in [0, 2^32), absolute index in the sequence of the token that is drawn.
        vocab: V.
        purpose: one of PURPOSE_*.
        copy: number of an independent draw for one position, below 2^24; a tensor has the shape of `request`.

    Returns:
        float32 [...,V].
    """
    rows = max(1, AT_ONCE // vocab)
    if request.device.type == "cpu" and request.numel() > rows:
        keys = torch.broadcast_tensors(request, position, torch.as_tensor(copy))
        parts = zip(*(key.flatten().split(rows) for key in keys), strict=True)
        return torch.cat([gumbel(seed, own, at, vocab, purpose, number) for own, at, number in parts]).view(*request.shape, vocab)
    block = torch.arange((vocab + 3) // 4, device=request.device)
    use = torch.zeros_like(request) + (purpose + 256 * copy)
    return _noise(seed, block, position[..., None], request[..., None], use[..., None]).flatten(-2)[..., :vocab]


def _noise(seed: int, *counter: Tensor) -> Tensor:
    """The noise of four tokens for each counter (block, position, request, use), which broadcast to [...]: float32 [...,4]."""
    return _unit(torch.stack(philox(seed, counter), -1)).log_().neg_().log_().neg_().float()


def uniform(seed: int, request: Tensor, position: Tensor, number: Tensor) -> Tensor:
    """Uniform draws float64 [...] in (0, 1), for rejection; `number` [...] distinguishes the draws of one position."""
    return _unit(philox(seed, (number, position, request, torch.full_like(request, PURPOSE_UNIFORM)))[0])


def _unit(words: Tensor) -> Tensor:
    return words.double().add_(0.5).mul_(2.0**-32)


def sample(logits: Tensor, sampling: Sampling, request: Tensor, position: Tensor) -> Tensor:
    """Draw a token: logits [...,V], request [...], position [...] -> [...] int64.

    Greedy: the argmax, the lowest id on ties. Otherwise the argmax of the warped logits plus noise (Gumbel-max), whose distribution is the
    softmax of the warped logits.
    """
    if sampling.greedy:
        return best_token(logits)
    scores = warp(logits, sampling)
    if on_host(scores):
        return sample_on_host(scores, sampling.seed, request, position)
    return best_token(scores + gumbel(sampling.seed, request, position, logits.shape[-1]))


def sample_on_host(scores: Tensor, seed: int, request: Tensor, position: Tensor) -> Tensor:
    """`sample` from scores [...,V] that `warp` gave, with noise only for tokens that can be drawn. The host reads the scores.

    No noise exceeds MOST_NOISE. A token cannot be drawn if its score plus MOST_NOISE is below the score of the best token plus that token's
    noise.
    """
    *shape, vocab = scores.shape
    rows, request, position = scores.reshape(-1, vocab), request.reshape(-1), position.reshape(-1)
    best, token = rows.max(-1)
    reached = best + _noise_of(token // 4, seed, request, position).gather(-1, (token % 4)[:, None]).squeeze(-1)
    possible = (rows < (reached - MOST_NOISE)[:, None]).logical_not_()  # all tokens, where a score is NaN
    if vocab % 4:
        rows, possible = (nn.functional.pad(x, (0, -vocab % 4), value=low) for x, low in ((rows, -torch.inf), (possible, False)))
    row, block = possible.view(torch.int32).nonzero(as_tuple=True)  # where any of four tokens is possible
    if 4 * len(row) > WORTH_CHOOSING * possible.numel():
        return best_token(scores + gumbel(seed, request, position, vocab).view_as(scores))
    parts = zip(*(indices.split(AT_ONCE // 4) for indices in (row, block)), strict=True)
    sums = rows.view(len(rows), -1, 4)[row, block] + torch.cat([_noise_of(part, seed, request[of], position[of]) for of, part in parts])
    sizes = row.bincount(minlength=len(rows)).tolist()
    at = torch.stack([own.argmax() for own in sums.split(sizes)])
    first = block.new_tensor([0, *sizes[:-1]]).cumsum(0)
    return (4 * block[first + at // 4] + at % 4).view(shape)


def _noise_of(block: Tensor, seed: int, request: Tensor, position: Tensor) -> Tensor:
    """The noise of `gumbel` for the four tokens of each block [n]: float32 [n,4]."""
    return _noise(seed, block, position, request, torch.full_like(request, PURPOSE_TOKEN))


def best_token(logits: Tensor) -> Tensor:
    """The token of the highest logit, the lowest id on ties: logits [...,V] -> int64 [...].

    In float32 a CPU computes `amax` in a tenth of the time of `max`, which gives the index too. So the maxima of groups are compared first, and only
    the best group is searched: [10, 49152] takes 0.15 ms instead of 0.66, in bfloat16 0.3 instead of 0.8. (`argmax` takes 1.1 and 2.6.)
    """
    vocab = logits.shape[-1]
    if not on_host(logits):
        return logits.argmax(-1)
    if vocab < LEAST_GROUPS * GROUP:
        return logits.max(-1).indices
    groups = vocab // GROUP
    maxima = logits[..., : groups * GROUP].unflatten(-1, (groups, GROUP)).amax(-1)
    maxima = torch.cat((maxima, logits[..., -GROUP:].amax(-1, keepdim=True)), -1)  # the last group overlaps the one before
    first = (maxima.max(-1).indices * GROUP).clamp(max=vocab - GROUP)
    inside = first[..., None] + torch.arange(GROUP)
    return first + logits.gather(-1, inside).max(-1).indices


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is in the host's memory, so that reading its numbers waits for no device."""
    return tensor.device.type == "cpu"
