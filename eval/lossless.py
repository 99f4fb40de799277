"""Does an answer equal plain decoding's? Where it does not: is that rounding, or a bug?

Forwards of different width and batch round differently, so that two nearly equal scores may change their order; in half precision this
happens about once in a hundred tokens. The margin of the two scores alone cannot tell: a bug, too, shows first where the scores are close.
So answers that diverge are decoded again, and the hidden states that each token was drawn from are compared with those of independent
forwards over the same text. Rounding leaves them within the spread of these forwards; a wrong mask, position or KV row does not.

Letters: V target vocabulary · H hidden size · S positions · R reference forwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.noted import NotingDrafter
from draftsmith.eval.records import Divergence
from draftsmith.inference.attention import TreeAttention, tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.constraints import constrain
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import NodeOutput, Plain, RoundContext
from draftsmith.inference.prefix_cache import common_prefix
from draftsmith.inference.request import RoundStats
from draftsmith.inference.sampler import Sampling, gumbel, penalise, warp
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.target import Target

REGION = 48  # positions before the divergence that are compared: enough for a median, few enough for narrow forwards
# Matmuls of some shapes round in the same way, to the last bit. So the reference forwards of a batch of texts have the widths of plain decoding, of a
# draft tree and of a prefill; besides them, one is of a text alone and one uses the model's own attention.
WIDTHS = (1, 5, 16)
ALONE = 3  # width of the forward of a text alone
PREFILL = 256  # positions of the forwards before: attention's mask has their square
TOGETHER = 8  # texts in a batch of reference forwards: narrow ones cost nearly as much for one


class Recorder(NotingDrafter):
    """A drafter that notes the target's hidden state of each committed token."""

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        states = out.along(verdict.path).hidden
        for slot, row, length in zip(round.slots, states, verdict.length.tolist(), strict=True):
            self.notes[slot].append(row[:length].clone())
        self._drafter.accept(round, tree, verdict, out)

    def take(self, prompt: Sequence[int]) -> Tensor:
        """[S,H]: row i is the state that token i of the answer to `prompt` was drawn from. Equal prompts are taken in their order."""
        return torch.cat(self.notes_of(prompt))


@dataclass(frozen=True, slots=True)
class Recorded:
    """An answer, the hidden state [S,H] that each of its tokens was drawn from, its rounds, and why it ended."""

    tokens: list[int]
    hidden: Tensor
    rounds: list[RoundStats] = field(default_factory=list)
    reason: str = ""


def decode_recorded(
    target: Target, drafter: Any, prompts: list[list[int]], requests: list[int], sampling: Sampling, max_new_tokens: int, **options: Any
) -> list[Recorded]:
    """The answers to a batch of prompts, with their hidden states. drafter: None is plain decoding; options: of the `Decoder`."""
    recorder: Any = Recorder(Plain() if drafter is None else drafter)
    answers = Decoder(target, recorder, graphs=False, **options).generate(prompts, sampling, max_new_tokens, requests=requests)
    return [
        Recorded(answer.tokens, recorder.take(prompt)[: len(answer.tokens)], answer.rounds, answer.reason)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def first_difference(plain: list[int], answer: list[int]) -> int | None:
    """Index of the first token that differs, the shorter length where one is the beginning of the other, None where they are equal."""
    return None if plain == answer else common_prefix(plain, answer)


def first_divergence(
    target: Target,
    name: str,
    prompt: list[int],
    plain: list[int],
    answer: list[int],
    sampling: Sampling,
    request: int,
    recorded: tuple[Recorded, Recorded] | None = None,
    exact: bool = False,
    states: Tensor | None = None,
) -> Divergence | None:
    """The first token where `answer` differs from `plain`, with what tells a tie from a bug; None where they are equal.

    Args:
        target: the model of both answers.
        name: the prompt's id, for the result.
        prompt: token ids.
        plain: the answer of plain decoding, as token ids.
        answer: the answer to compare.
        sampling: how both were sampled.
        request: the noise key of both.
        recorded: both answers with their hidden states. They count only where they repeat the given ones up to the divergence.
        exact: both ran in exact rounds, in which rounding explains nothing.
        states: the `reference_states` of the text before the divergence; None computes them.
    """
    index = first_difference(plain, answer)
    if index is None:
        return None
    if index == min(len(plain), len(answer)):  # no rounding cuts an answer short
        return Divergence(name, index, -1, -1, float("inf"), 0.0)
    if exact:
        return Divergence(name, index, plain[index], answer[index], float("inf"), 0.0)
    text = prompt + plain[:index]
    if states is None:
        (states,) = reference_states(target, [text])
    position = torch.tensor([len(text)], device=target.device)
    tokens = plain[index], answer[index]
    logits = _logits(target, states[:, -1], prompt, plain[:index], sampling)
    margin, noise = _margin(target, logits, *tokens, sampling, request, position)
    spread = _spread(states, target)
    pairs = zip(recorded or (), (plain, answer), tokens, strict=False)
    repeated = [(again, token) for again, given, token in pairs if again.tokens[: index + 1] == given[: index + 1]]
    if len(repeated) < 2:
        return Divergence(name, index, *tokens, margin, noise)
    excess, own_best = 0.0, True
    centre = states.float().mean(0)
    for again, token in repeated:
        own = again.hidden[: index + 1][-len(centre) :].float().to(centre.device)
        excess = max(excess, (_distance(own, centre[-len(own) :]) / spread[-len(own) :]).max().item())
        logits = _logits(target, again.hidden[index], prompt, plain[:index], sampling)
        own_best &= _is_best(target, logits, token, sampling, request, position)
    return Divergence(name, index, *tokens, margin, noise, excess, own_best)


@torch.inference_mode()
def reference_states(target: Target, texts: list[list[int]]) -> list[Tensor]:
    """Hidden states [R,S,H] of the last positions, REGION at most, of each text, by forwards of other widths and batches and one of the
    model's own attention."""
    references = []
    for start in range(0, len(texts), TOGETHER):
        group = texts[start : start + TOGETHER]
        own = [target.forward(torch.tensor([text], device=target.device)).hidden[0, -REGION:] for text in group]
        with tree_attention(target.model):
            together = _in_chunks(target, group, WIDTHS)
            alone = [_in_chunks(target, [text], (ALONE,))[0] for text in group]
        for each in zip(own, together, alone, strict=True):
            references.append(torch.cat((each[0][None], *(states.to(each[0].device) for states in each[1:]))))
    return references


def _in_chunks(target: Target, texts: list[list[int]], widths: Sequence[int]) -> list[Tensor]:
    """Hidden states [len(widths),S,H] of the last positions of each text: all texts in one batch, in chunks of each width in turn, after all
    tokens before in chunks of a prefill's width."""
    cache = TreeCache(len(texts), max(map(len, texts)) + max(widths), target.device)
    firsts = [max(0, len(text) - REGION) for text in texts]
    for start in range(0, max(firsts), PREFILL):
        _forward(target, cache, [text[start : min(start + PREFILL, first)] for text, first in zip(texts, firsts, strict=True)])
    states: list[list[Tensor]] = [[] for _ in texts]
    for width in widths:
        cache.reset()
        cache.advance(firsts)  # the keys and values of the tokens before are still there
        parts: list[list[Tensor]] = [[] for _ in texts]
        for offset in range(0, REGION, width):
            chunks = [text[first + offset : min(first + offset + width, first + REGION)] for text, first in zip(texts, firsts, strict=True)]
            if any(chunks):
                for part, row in zip(parts, _forward(target, cache, chunks), strict=True):
                    part.append(row)
        for rows, part in zip(states, parts, strict=True):
            rows.append(torch.cat(part))
    return [torch.stack(rows) for rows in states]


def _forward(target: Target, cache: TreeCache, chunks: list[list[int]]) -> list[Tensor]:
    """Hidden states [·,H] of each row's chunk, which the cache then has. Shorter chunks are padded."""
    width = max(map(len, chunks))
    ids = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks], device=target.device)
    attention = TreeAttention.causal(cache, width)
    positions = attention.positions().clamp(max=target.max_positions - 1)
    hidden = target.forward(ids, position_ids=positions, cache=cache, tree=attention).hidden
    cache.advance([len(chunk) for chunk in chunks])
    return [row[: len(chunk)] for row, chunk in zip(hidden, chunks, strict=True)]


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """[...]: the relative distance of states a from b [...,H]."""
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def _spread(states: Tensor, target: Target) -> Tensor:
    """[S]: the largest relative distance between two of the reference states [R,S,H], at least its median over S.

    Where all references agree it is what rounding must move a state by: each of L layers adds to the state twice, each sum is off by
    eps/√12 in the root mean square, and the errors add up to eps·√(2L/12) where they are independent.
    """
    states = states.float()
    pairs = torch.stack([_distance(a, b) for i, a in enumerate(states) for b in states[:i]]).amax(0)
    least = torch.finfo(target.dtype).eps * max(1.0, math.sqrt(target.num_layers / 6))
    return pairs.clamp(min=max(pairs.median().item(), least))


def _logits(target: Target, states: Tensor, prompt: list[int], answer: list[int], sampling: Sampling) -> Tensor:
    """[...,V] float32: the logits of states [...,H] after the beginning of an answer, with its constraint and repetition penalty."""
    logits = target.float32_logits(states)
    if sampling.constraint:
        logits = constrain(logits, sampling.constraint, answer)
    if sampling.repetition_penalty == 1.0:
        return logits
    seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    seen[prompt + answer] = True
    return penalise(logits, seen, sampling.repetition_penalty)


def _margin(
    target: Target, logits: Tensor, plain: int, answer: int, sampling: Sampling, request: int, position: Tensor
) -> tuple[float, float]:
    """`_distance_to` the other token by the mean of the references' logits [R,V], in float32, and how much rounding may change it."""
    gap = _distance_to(logits.mean(0), plain, answer, sampling, request, position)
    gaps = logits[:, plain] - logits[:, answer]
    moved = (gaps - gaps.mean()).abs().max().item()
    return gap, (moved + _rounding(logits[:, [plain, answer]], target.dtype)) / (sampling.temperature or 1.0)


def _rounding(logits: Tensor, dtype: torch.dtype) -> float:
    """One step of `dtype` at the magnitude of these logits: what rounding both of two logits may move their difference by."""
    return torch.finfo(dtype).eps * 2.0 ** logits.abs().max().log2().floor().item()


def _is_best(target: Target, logits: Tensor, token: int, sampling: Sampling, request: int, position: Tensor) -> bool:
    """Whether `token` is what sampling draws from its own logits [V], up to their rounding."""
    scores = _scores(logits, sampling, request, position)
    best = int(scores.argmax())
    allowed = 2 * _rounding(logits[[best, token]], target.dtype) / (sampling.temperature or 1.0)
    return _distance_to(logits, best, token, sampling, request, position) <= allowed


def _scores(logits: Tensor, sampling: Sampling, request: int, position: Tensor) -> Tensor:
    if sampling.greedy:
        return logits
    noise = gumbel(sampling.seed, torch.tensor([request], device=position.device), position, logits.shape[-1])[0]
    return warp(logits, sampling) + noise.to(logits.device)


def _distance_to(logits: Tensor, first: int, second: int, sampling: Sampling, request: int, position: Tensor) -> float:
    """By how much differences of scores must change for sampling to draw the other one of two tokens by logits [V]: the two change their order,
    or one of them enters or leaves the kept set."""
    scores = _scores(logits, sampling, request, position)
    gap = (scores[first] - scores[second]).abs().item()
    if not math.isfinite(gap):
        return max(_edge(logits, token, sampling) for token in (first, second) if not scores[token].isfinite())
    return min(gap, _edge(logits, first if scores[first] >= scores[second] else second, sampling))


def _edge(logits: Tensor, token: int, sampling: Sampling) -> float:
    """By how much differences of scores must change for a token to enter the kept set of `warp`, or to leave it; infinite where nothing is cut."""
    if sampling.greedy:
        return math.inf
    least, remaining = math.inf, warp(logits, replace(sampling, top_k=0, top_p=1.0, min_p=0.0))
    if 0 < sampling.top_k < len(remaining):
        kth, below = remaining.topk(sampling.top_k + 1).values[-2:].tolist()
        own, remaining = remaining[token].item(), warp(logits, replace(sampling, top_p=1.0, min_p=0.0))
        if not remaining[token].isfinite():
            return kth - own
        least = own - below
    if sampling.top_p < 1.0:
        before, remaining = remaining, warp(logits, replace(sampling, min_p=0.0))
        distance = _nucleus_edge(before, token, sampling.top_p, bool(remaining[token].isfinite()))
        if not remaining[token].isfinite():
            return distance
        least = min(least, distance)
    if sampling.min_p > 0.0:
        distance = (remaining[token] - remaining.max()).item() - math.log(sampling.min_p)
        return min(least, distance) if distance >= 0 else -distance
    return least


def _nucleus_edge(scores: Tensor, token: int, top_p: float, inside: bool) -> float:
    """`_edge` of top-p, which drops a token where it and all below have a probability of 1 − p at most, of scores [V].

    Where differences change by d, tokens that are less than d apart change their order, and the log-odds of those below change by d at most.
    """
    ordered, index = scores.double().sort(stable=True)
    probability, own = ordered.softmax(-1), int((index == token).nonzero())
    below, cut = probability.cumsum(-1), math.log((1 - top_p) / top_p)
    if inside:  # those from j on pass it by, for some j
        apart, mass = ordered[own] - ordered[: own + 1], below[: own + 1] - probability[: own + 1] + probability[own]
        return torch.maximum(apart, mass.clamp(max=1).logit() - cut).min().item()
    return torch.maximum(ordered[own:] - ordered[own], cut - below[own:].clamp(max=1).logit()).min().item()
