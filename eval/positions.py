"""Position records: the drafter runs along the target's own greedy answers, from every position at once.

Letters: K draft depth · D draft vocabulary.
"""

from typing import Any

import torch

from draftsmith.eval import ranks
from draftsmith.eval.answers import EncodedPrompt, target_texts
from draftsmith.eval.records import PositionRecord, rank_of
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

RANKS = 32  # ranks that are recorded
AT_ONCE = 64  # positions whose logits [64,K,D] exist at a time


def position_records(target: Target, drafter: Any, prompts: list[EncodedPrompt], max_new_tokens: int) -> list[PositionRecord]:
    """One record for each prompt. The prompts are split over the ranks of a launch; every rank gets all records."""
    share = ranks.share(prompts)
    texts = target_texts(target, [prompt.ids for prompt in share], Sampling(), max_new_tokens)
    records = {}
    for prompt, text in zip(share, texts, strict=True):
        records[prompt.index] = _record(target, drafter, prompt, text.tokens)
    gathered = ranks.gather(records)
    return [gathered[prompt.index] for prompt in prompts]


@torch.inference_mode()
def _record(target: Target, drafter: Any, prompt: EncodedPrompt, answer: list[int]) -> PositionRecord:
    ids = torch.tensor(prompt.ids + answer, device=target.device)
    features = drafter.position_features(ids, target.forward(ids[None], taps=drafter.taps))
    # A draft tree with its root at position i drafts token i + d at depth d.
    roots = range(max(1, len(prompt.ids) - 1), len(ids) - 1)
    token_ranks = torch.full((len(roots), drafter.depth_limit), -1)
    log_probs = torch.full((len(roots), drafter.depth_limit), -torch.inf)
    for start in range(0, len(roots), AT_ONCE):
        positions = torch.arange(roots[start], min(roots[start] + AT_ONCE, roots.stop), device=target.device)
        logits = drafter.position_logits(features, positions)  # [64,K,D]
        for k in range(drafter.depth_limit):
            inside = positions + k + 1 < len(ids)
            rows = (positions[inside] - roots.start).cpu()
            rank, log_prob = rank_of(logits[inside, k], ids[positions[inside] + k + 1], RANKS)
            token_ranks[rows, k], log_probs[rows, k] = rank.cpu(), log_prob.cpu()
    return PositionRecord(prompt.prompt.id, prompt.prompt.domain, token_ranks, log_probs)
