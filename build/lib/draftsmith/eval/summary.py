"""τ, survival and conditional acceptance from round records, with intervals over prompts.

τ = Σ committed / Σ rounds, pooled; a round that the end of the text cut has accepted one token less than it committed, so that
τ = 1 + Σ survival holds without exception. Rounds of one prompt are correlated, so the bootstrap draws prompts, not rounds.
"""

import torch

from draftsmith.eval.records import Acceptance, RoundRecord

RESAMPLES = 2000


def acceptance(records: list[RoundRecord], depth: int) -> Acceptance:
    """Statistics of `records` (at least one) for draft depth K = `depth`; a round that the end of the text cut counts what it committed."""
    prompts = sorted({record.prompt for record in records})
    index = {prompt: i for i, prompt in enumerate(prompts)}
    sums = torch.zeros(len(prompts), 2 + depth, dtype=torch.float64)  # committed, rounds, survived depth 1 … K
    for record in records:
        row = sums[index[record.prompt]]
        row[0] += record.committed
        row[1] += 1
        row[2 : 2 + min(record.accepted, depth)] += 1
    total = sums.sum(0)
    generator = torch.Generator().manual_seed(0)
    drawn = sums[torch.randint(len(prompts), (RESAMPLES, len(prompts)), generator=generator)].sum(1)
    low, high = torch.quantile(drawn[:, 0] / drawn[:, 1], torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    survival = (total[2:] / total[1]).tolist()
    before = [1.0, *survival][:depth]
    conditional = [now / then if then else 0.0 for now, then in zip(survival, before, strict=True)]
    return Acceptance(
        len(prompts), int(total[1]), int(total[0]), float(total[0] / total[1]), low, high, tuple(survival), tuple(conditional)
    )
