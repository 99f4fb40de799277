"""τ, survival and conditional acceptance from round records, with intervals over prompts.

τ = Σ committed / Σ rounds over all rounds. A round that the end of the text cut short counts as if it had accepted one token less than it
committed, so that τ = 1 + Σ survival always holds. The intervals: eval/intervals.py.

Letters: K draft depth. P is the number of prompts.
"""

import torch

from draftsmith.eval import intervals
from draftsmith.eval.records import Acceptance, RoundRecord


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
    tau = intervals.of_ratio(sums[:, 0], sums[:, 1])
    survival = (total[2:] / total[1]).tolist()
    previous = [1.0, *survival][:depth]
    conditional = [deeper / shallower if shallower else 0.0 for deeper, shallower in zip(survival, previous, strict=True)]
    return Acceptance(len(prompts), int(total[1]), int(total[0]), tau.estimate, tau.low, tau.high, tuple(survival), tuple(conditional))
