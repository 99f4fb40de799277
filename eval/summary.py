"""τ, survival and conditional acceptance from round records, with bootstrap intervals over prompts.

τ = Σ committed / Σ rounds over all rounds. A round that the end of the text cut short counts as if it had accepted one token less than it
committed, so that τ = 1 + Σ survival always holds. Rounds of one prompt are correlated; hence the bootstrap resamples prompts, not rounds.

Letters: K draft depth. P is the number of prompts.
"""

import torch
from torch import Tensor

from draftsmith.eval.records import Acceptance, RoundRecord

RESAMPLES = 2000


def acceptance(records: list[RoundRecord], depth: int) -> Acceptance:
    """Statistics of at least one record, for draft depth K = `depth`."""
    prompts = sorted({record.prompt for record in records})
    index = {prompt: i for i, prompt in enumerate(prompts)}
    sums = torch.zeros(len(prompts), 2 + depth, dtype=torch.float64)  # committed, rounds, rounds that accepted at least 1 … K
    for record in records:
        row = sums[index[record.prompt]]
        row[0] += record.committed
        row[1] += 1
        row[2 : 2 + min(record.accepted, depth)] += 1
    total = sums.sum(0)
    low, high = interval(bootstrap(sums[:, 0], sums[:, 1]))
    survival = (total[2:] / total[1]).tolist()
    previous = [1.0, *survival][:depth]
    conditional = [deeper / shallower if shallower else 0.0 for deeper, shallower in zip(survival, previous, strict=True)]
    return Acceptance(
        len(prompts), int(total[1]), int(total[0]), float(total[0] / total[1]), low, high, tuple(survival), tuple(conditional)
    )


def bootstrap(tokens: Tensor, rounds: Tensor) -> Tensor:
    """Bootstrap samples of τ.

    Args:
        tokens: [...,P], tokens committed for each prompt.
        rounds: [...,P], rounds of each prompt.

    Returns:
        [...,RESAMPLES] float64, each Σ tokens / Σ rounds over P prompts drawn with replacement, the same prompts for all leading dimensions.
    """
    count = rounds.shape[-1]
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    return tokens.double()[..., drawn].sum(-1) / rounds.double()[..., drawn].sum(-1)


def interval(samples: Tensor) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles of float64 samples [RESAMPLES]."""
    low, high = torch.quantile(samples, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
