"""The exact expected τ of a chain drafter under rejection sampling, along texts that the target itself sampled.

The output of rejection sampling is distributed as p whatever q is (Leviathan et al. 2023, appendix A.1). A draft is accepted and is x
with probability min(q(x), p(x)), so that, given that the text goes on with x there, it was with probability min(1, q(x) / p(x)),
independently of what happened before. So a text tells how many rounds it takes on average; nothing is decoded, no coin is tossed.
With a = 1 where the drafter's best token is the text's, else 0, the same sums are exactly the rounds of greedy decoding.

Letters: n new tokens of a text · V vocabulary · U vocabulary of the drafter · K draft depth.
"""

import torch
from torch import Tensor

from draftsmith.inference.sampler import Sampling, warp

__all__ = ["accepted", "reached", "rounds"]


def accepted(p_logits: Tensor, q_logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """p_logits [n,V], q_logits [n,U] of target and drafter given the text before each of tokens [n] -> a [n] float64, the chances
    that a draft there is accepted: min(1, q(x) / p(x)) of the warped laws; greedy: whether x is the drafter's best.

    As in decoding, a drafter proposes none of the U − V tokens that the target lacks, and never one that it lacks itself."""
    q_logits = q_logits[..., : p_logits.shape[-1]]
    if sampling.greedy:
        return (q_logits.argmax(-1) == tokens).double()
    log_p, log_q = (warp(logits, sampling).double().log_softmax(-1) for logits in (p_logits, q_logits))
    p = log_p.gather(-1, tokens[..., None])[..., 0]
    q = log_q.gather(-1, tokens[..., None].clamp(max=log_q.shape[-1] - 1))[..., 0]
    known = (tokens < log_q.shape[-1]) & (q > -torch.inf)
    return torch.where(known, (q - p).clamp(max=0.0).exp(), 0.0)


def reached(chances: Tensor, depth: int) -> Tensor:
    """a [n] of one text -> [K+1] float64: how many rounds a chain of K = `depth` takes on average, then in how many of them at least
    1, 2, … K drafted tokens are accepted. Counted as records count: the first new token is drafted too, each round adds the target's
    own token, and of a round that the end of the text cuts only what is inside, so that n = Σ of all entries."""
    a, n = chances.tolist(), len(chances)
    begins = [1.0] + [0.0] * n  # the chance that some round begins at this token
    counts = [0.0] * (depth + 1)
    for start in range(n):
        chance = begins[start]
        for k in range(min(depth + 1, n - start)):
            counts[k] += chance
            further = a[start + k] if k < depth else 0.0
            begins[start + k + 1] += chance * (1.0 - further)
            chance *= further
    return torch.tensor(counts, dtype=torch.float64)


def rounds(chances: Tensor, depth: int) -> float:
    """E[rounds] of one text from a [n] for a chain of K = `depth`; τ of several texts is Σ n / Σ E[rounds].

    R(t) = 1 + Σ_k P(exactly k accepted from t) · R(t + k + 1), R = 0 past the end, summed from the front."""
    return float(reached(chances, depth)[0])
