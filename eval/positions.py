"""Position records: the drafter runs along the target's own answers, or along those that a log has, from every position at once.

Under greedy decoding and where noise is keyed by position the answer does not depend on the drafter, so that these records say what any tree
of top-ranked tokens accepts.

Letters: K draft depth · D draft vocabulary · V target vocabulary.
"""

from typing import Any

import torch

from draftsmith.eval.answers import EncodedPrompt, batches
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.records import PositionRecord, rank_of
from draftsmith.eval.settings import label
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling
from draftsmith.models import ranks
from draftsmith.models.target import Target

RANKS = 32  # ranks that are recorded
AT_ONCE = 64  # positions whose logits [64,K,D] exist at a time
SLOTS, TOGETHER = 8, 32  # prompts that are decoded at a time; that are recorded together


def record_positions(
    target: Target,
    drafter: Any,
    prompts: list[EncodedPrompt],
    choosing: set[int],
    sampling: Sampling,
    max_new_tokens: int,
    store: RecordStore,
) -> None:
    """Record each prompt of this rank that has no record yet. choosing: indices of the prompts that choose the tree."""
    setting, done = label(sampling), store.recorded("positions")
    missing = [prompt for prompt in ranks.share(prompts) if (setting, prompt.prompt.id) not in done]
    decoder = Decoder(target, slots=SLOTS)
    with Bar(f"the target's own answers at T={setting}", len(missing)) as bar:
        for number, batch in enumerate(batches(missing, TOGETHER)):
            unanswered = [prompt for prompt in batch if not prompt.continuation]
            ids, indices = [prompt.ids for prompt in unanswered], [prompt.index for prompt in unanswered]
            answers = decoder.generate(ids, sampling, max_new_tokens, requests=indices)
            texts = {prompt.index: answer.tokens for prompt, answer in zip(unanswered, answers, strict=True)}
            new = []
            for prompt in batch:
                text = texts.get(prompt.index) or list(prompt.continuation[:max_new_tokens])
                new.append(_record(target, drafter, prompt, text, setting, prompt.index in choosing))
            store.append_positions(new, target.tokenizer)
            bar.update(min(len(missing), (number + 1) * TOGETHER))


@torch.inference_mode()
def _record(target: Target, drafter: Any, prompt: EncodedPrompt, answer: list[int], setting: str, choosing: bool) -> PositionRecord:
    ids = torch.tensor(prompt.ids + answer, device=target.device)
    output = target.forward(ids[None], taps=drafter.taps)
    features = drafter.position_features(ids, output)
    # A draft tree with its root at position i drafts token i + d at depth d.
    roots = range(max(1, len(prompt.ids) - 1), len(ids) - 1)
    shape = (len(roots), drafter.depth_limit)
    token_ranks, drafted = torch.full(shape, -1), torch.full(shape, -1)
    log_probs, drafted_log_probs = torch.full(shape, -torch.inf), torch.full(shape, -torch.inf)
    entropy, target_log_probs = torch.zeros(len(roots)), torch.zeros(len(roots))
    for start in range(0, len(roots), AT_ONCE):
        positions = torch.arange(roots[start], min(roots[start] + AT_ONCE, roots.stop), device=target.device)
        rows = (positions - roots.start).cpu()
        log_p = target.float32_logits(output.hidden[0, positions]).log_softmax(-1)  # [64,V]
        entropy[rows] = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1).cpu()
        target_log_probs[rows] = log_p.gather(-1, ids[positions + 1, None])[:, 0].cpu()
        logits = drafter.position_logits(features, positions)  # [64,K,D]
        for k in range(drafter.depth_limit):
            inside = positions + k + 1 < len(ids)
            at = (positions[inside] - roots.start).cpu()
            rank, log_prob = rank_of(logits[inside, k], ids[positions[inside] + k + 1], RANKS)
            token_ranks[at, k], log_probs[at, k] = rank.cpu(), log_prob.cpu()
            scores = logits[inside, k].float()
            highest, token = scores.max(-1)
            drafted[at, k] = token.cpu()
            drafted_log_probs[at, k] = (highest - scores.logsumexp(-1)).cpu()
    return PositionRecord(
        prompt.prompt.id,
        prompt.prompt.domain,
        token_ranks,
        log_probs,
        setting,
        choosing,
        ids[roots.start + 1 : roots.stop + 1].cpu(),
        entropy,
        target_log_probs,
        drafted,
        drafted_log_probs,
    )
