"""The exact expected τ of a chain drafter under rejection sampling, along texts that the target itself sampled.

The output of rejection sampling is distributed as p whatever q is (Leviathan et al. 2023, appendix A.1). At each position the draft is
accepted and equals x with probability min(q(x), p(x)). Given that the text continues with x there, the draft was accepted with probability
a = min(1, q(x) / p(x)), independently of earlier positions. So a text gives the expected number of rounds, without decoding and without
random draws. For greedy decoding a is 1 where the drafter's best token is the text's and 0 elsewhere, and the sums are the exact rounds.

Letters: V target vocabulary · D draft vocabulary · K draft depth. n is the number of new tokens of a text.
"""

import torch
from torch import Tensor

from draftsmith.inference.sampler import Sampling, best_token, warp


def acceptance_probabilities(p_logits: Tensor, q_logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Probability that a draft is accepted, at each position of a text.

    As in decoding, a drafter proposes no token that the target lacks (ids from V on), and none that it lacks itself.

    Args:
        p_logits: [n,V] of the target, given the text before each token.
        q_logits: [n,D] of the drafter, likewise.
        tokens: [n], the text.
        sampling: p and q are the distributions after its temperature and filters.

    Returns:
        a [n] float64: min(1, q(x) / p(x)); greedy: 1 where x is the drafter's best token, else 0.
    """
    q_logits = q_logits[..., : p_logits.shape[-1]]
    if sampling.greedy:
        return (best_token(q_logits) == tokens).double()
    log_p, log_q = (warp(logits, sampling).double().log_softmax(-1) for logits in (p_logits, q_logits))
    p = log_p.gather(-1, tokens[..., None])[..., 0]
    q = log_q.gather(-1, tokens[..., None].clamp(max=log_q.shape[-1] - 1))[..., 0]
    known = (tokens < log_q.shape[-1]) & (q > -torch.inf)
    return torch.where(known, (q - p).clamp(max=0.0).exp(), 0.0)


def rounds_by_accepted(probabilities: Tensor, depth: int) -> Tensor:
    """Expected rounds of a text, by how many drafted tokens they accept at least.

    Rounds are counted as in round records: the first new token is drafted too, each round adds the target's own token, and a round that the
    end of the text cuts counts only what is inside. Hence n is the sum of all entries.

    Args:
        probabilities: a [n] of one text, see `acceptance_probabilities`.
        depth: K of the chain.

    Returns:
        [K+1] float64: expected rounds, then expected rounds that accept at least 1, 2, … K drafted tokens.
    """
    a, n = probabilities.tolist(), len(probabilities)
    begins = [1.0] + [0.0] * n  # probability that a round begins at this token
    counts = [0.0] * (depth + 1)
    for start in range(n):
        reached = begins[start]
        for k in range(min(depth + 1, n - start)):
            counts[k] += reached
            accepted = a[start + k] if k < depth else 0.0
            begins[start + k + 1] += reached * (1.0 - accepted)
            reached *= accepted
    return torch.tensor(counts, dtype=torch.float64)


def expected_rounds(probabilities: Tensor, depth: int) -> float:
    """E[rounds] of one text, from its a [n], for a chain of K = `depth`. τ of several texts is Σ n / Σ E[rounds].

    With R(t) the rounds from token t on: R(t) = 1 + Σ_k P(exactly k accepted from t) · R(t + k + 1), and R = 0 past the end.
    """
    return float(rounds_by_accepted(probabilities, depth)[0])
