"""Does an answer equal plain decoding's? Where it does not: is the difference a tie within measured noise, or a bug?

Two forwards of different width round differently, so that two nearly equal scores may change their order. Any other difference is a bug.

Letters: V target vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.eval.records import Divergence
from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.sampler import Sampling, gumbel, warp
from draftsmith.inference.tree import DraftTree
from draftsmith.models.target import Target


def first_divergence(
    target: Target, name: str, prompt: list[int], plain: list[int], answer: list[int], sampling: Sampling, request: int
) -> Divergence | None:
    """The first token where `answer` differs from `plain`, judged by two forwards of different width; None where they are equal.

    Args:
        target: the model of both answers.
        name: the prompt's id, for the result.
        prompt: token ids.
        plain: the answer of plain decoding, as token ids.
        answer: the answer to compare.
        sampling: how both were sampled.
        request: the noise key of both.
    """
    if plain == answer:
        return None
    index = next((i for i, (a, b) in enumerate(zip(plain, answer, strict=False)) if a != b), None)
    if index is None:  # one answer is a prefix of the other, which no tie explains
        return Divergence(name, min(len(plain), len(answer)), -1, -1, float("inf"), 0.0)
    wide, narrow = _logits(target, prompt + plain[:index])
    position = torch.tensor([len(prompt) + index], device=target.device)
    scores = [_scores(logits, sampling, request, position) for logits in (wide, narrow)]
    noise = (wide - narrow).abs().max().item() / (sampling.temperature or 1.0)
    gaps = [(score[plain[index]] - score[answer[index]]).abs() for score in scores]
    # A gap is infinite where only one of the tokens is in the kept set: then what counts is how far its logit is from the set's boundary.
    margin = min((gap.item() for gap in gaps if torch.isfinite(gap)), default=_boundary(wide, plain[index], answer[index], sampling))
    return Divergence(name, index, plain[index], answer[index], margin, noise)


def _scores(logits: Tensor, sampling: Sampling, request: int, position: Tensor) -> Tensor:
    if sampling.greedy:
        return logits
    noise = gumbel(sampling.seed, torch.tensor([request], device=logits.device), position, logits.shape[-1])[0]
    return warp(logits, sampling) + noise


def _boundary(logits: Tensor, first: int, second: int, sampling: Sampling) -> float:
    inside = torch.isfinite(warp(logits, sampling))
    lowest = logits[inside].min()
    highest = logits[~inside].max() if (~inside).any() else logits.min()
    return max(abs((logits[first] - lowest).item()), abs((logits[second] - highest).item()))


@torch.inference_mode()
def _logits(target: Target, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The next token's logits [V] in float32, twice: with the last token in one wide forward, and alone after a cached prefix."""
    ids = torch.tensor([tokens], device=target.device)
    with tree_attention(target.model):
        cache = TreeCache(1, len(tokens) + 1, target.device)
        chunk = TreeAttention.causal(cache, len(tokens))
        wide = target.forward(ids, position_ids=chunk.positions(), cache=cache, tree=chunk).hidden[0, -1]
        cache.advance([len(tokens) - 1])
        node = TreeAttention.tree(cache, DraftTree.root(ids[:, -1]))
        narrow = target.forward(ids[:, -1:], position_ids=node.positions(), cache=cache, tree=node).hidden[0, -1]
        return target.logits(wide).float(), target.logits(narrow).float()
