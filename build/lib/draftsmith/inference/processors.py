"""Logits processors whose result depends on the tokens before, exact at every node of a tree: the repetition penalty, and
transformers `LogitsProcessor`s of the user's.

The history of a node is what its row has committed, the root included, then the node's ancestors below the root and its own token.
Order, as in transformers' `generate`: the penalty, the processors as given, and only then temperature, top-k, top-p and min-p
(`draftsmith.inference.sampler.warp`).

Letters: B rows of a round · N tree nodes with the root · V vocabulary · S tokens of a history · P path entries.
"""

import copy
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict

__all__ = ["IMPURE", "History", "Processor"]

Processor = Callable[[Tensor, Tensor], Tensor]  # input_ids [n,S], scores [n,V] -> [n,V], as transformers' LogitsProcessor

_UNCONDITIONAL = "it needs the scores of a second, unconditional forward"
_BY_ROW = "it tells rows apart by their place in the batch"
_REMEMBERS = "it remembers earlier calls"
# Of transformers' own processors those that are no function of (history, scores), row by row. The other ones are, Bark's and
# Whisper's timestamps included.
IMPURE = {
    "ClassifierFreeGuidanceLogitsProcessor": _UNCONDITIONAL,
    "DiaClassifierFreeGuidanceLogitsProcessor": _UNCONDITIONAL,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _UNCONDITIONAL,
    "EncoderNoRepeatNGramLogitsProcessor": _BY_ROW,
    "EncoderRepetitionPenaltyLogitsProcessor": _BY_ROW,
    "PrefixConstrainedLogitsProcessor": _BY_ROW,
    "DiaEOSChannelFilterLogitsProcessor": "it takes neighbouring rows for channels of one",
    "DiaEOSDelayPatternLogitsProcessor": _REMEMBERS,
    "HiggsAudioV2DelayPatternLogitsProcessor": _REMEMBERS,
    "SynthIDTextWatermarkLogitsProcessor": _REMEMBERS,
    "WhisperNoSpeechDetection": _REMEMBERS,
}
_PENALTY = "RepetitionPenaltyLogitsProcessor"


class History:
    """What each row has committed, and the processed logits of every node of its tree.

    The penalty stays on the device, without a host sync. The user's processors want each history in full: the tree is read by the
    host once more per round, and each is called once for every row and depth, on the device of the tokens, as by `generate`. That is
    slow, and exact. They see the histories of nodes that are then not accepted, too.

    sampling: its repetition_penalty; the rest is not for here · rows: of the decoder · vocab: V · device: of the tokens.

    Raises:
        ValueError: a processor that is no pure function of (input_ids, scores), row by row, by class or as found by calling it a few
            times with random input (what shows only with certain tokens is not found), or that returns another shape; two penalties.
    """

    def __init__(self, sampling: Sampling, processors: Sequence[Processor], rows: int, vocab: int, device: torch.device) -> None:
        self._penalty = sampling.repetition_penalty
        self._device = device
        self._processors: list[Processor] = []
        for processor in processors:
            if processor in self._processors:
                continue  # `generate` too applies once what is given twice
            if type(processor).__name__ == _PENALTY and self._penalty != 1.0:
                raise ValueError(f"got {_PENALTY} and repetition_penalty {self._penalty}; expected one penalty; leave one of them out")
            _check(processor, vocab, self._device)
            self._processors.append(processor)
        self._tokens: dict[int, list[int]] = {}  # kept for processors only
        self._seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device) if self._penalty != 1.0 else None  # [rows,V]

    @staticmethod
    def needed(sampling: Sampling, processors: Sequence[Processor]) -> bool:
        """Whether anything asked for depends on the tokens before."""
        return sampling.repetition_penalty != 1.0 or len(processors) > 0

    def start(self, rows: list[int], prompts: list[list[int]]) -> None:
        """These rows begin with these prompts, all tokens of them; the last is the first root."""
        for row, prompt in zip(rows, prompts, strict=True):
            if self._processors:
                self._tokens[row] = list(prompt)
            if self._seen is not None:
                self._seen[row] = False
                self._seen[row].index_fill_(0, torch.tensor(prompt, device=self._device), True)

    def apply(self, round: RoundContext, tree: DraftTree, logits: Tensor) -> Tensor:
        """logits [B,N,V], on any device -> float32 [B,N,V] there; padding as it was.

        Raises:
            ValueError: a processor that returns another shape.
        """
        scores = logits.to(torch.float32, copy=True)
        if self._seen is not None:
            scores = self._penalise(self._seen.index_select(0, round.slot_index), tree, scores)
        if self._processors:
            self._process(round.slots, tree, scores)
        return scores

    def commit(self, round: RoundContext, tree: DraftTree, verdict: Verdict) -> None:
        """The accepted tokens and next_token join the histories of the rows asked for."""
        if self._seen is not None:
            kept = tree.tokens.gather(1, verdict.path.clamp(min=0))  # where the path has ended the root, which is there already
            old = self._seen.index_select(0, round.slot_index)
            new = old.scatter(1, torch.cat((kept, verdict.next_token[:, None]), 1), True)
            self._seen.index_copy_(0, round.slot_index, torch.where(verdict.length[:, None] > 0, new, old))
        if self._processors:
            for row, told in zip(round.slots, verdict.on_host(tree), strict=True):
                self._tokens[row] += told.tokens if told.length else []

    def drop(self, rows: list[int]) -> None:
        """These rows ended."""
        for row in rows:
            self._tokens.pop(row, None)

    def _penalise(self, seen: Tensor, tree: DraftTree, scores: Tensor) -> Tensor:
        """seen [B,V], scores [B,N,V] -> [B,N,V], the rule of RepetitionPenaltyLogitsProcessor (Keskar et al. 2019, §4.1)."""
        # Who is no ancestor stands for the root, whose token each node has seen.
        line = torch.where(tree.visible(), tree.tokens[:, None, :], tree.tokens[:, :1, None])  # [B,N,N]
        real = torch.arange(line.shape[1], device=line.device) < tree.size[:, None]
        seen, line, real = (tensor.to(scores.device) for tensor in (seen, line, real))
        marked = seen[:, None].expand_as(scores).scatter(2, line, True) & real[:, :, None]
        return torch.where(marked, torch.where(scores < 0, scores * self._penalty, scores / self._penalty), scores)

    def _process(self, rows: list[int], tree: DraftTree, scores: Tensor) -> None:
        """Run the processors on scores [B,N,V], in place: nodes of one row and depth have histories of one length."""
        nodes = tree.tokens.shape[1]
        told = torch.cat((tree.size[:, None], tree.parents, tree.tokens), 1).tolist()
        for place, (row, (size, *rest)) in enumerate(zip(rows, told, strict=True)):
            parents, tokens = rest[:nodes], rest[nodes:]
            assert not size or self._tokens[row][-1] == tokens[0], "the root is the last token committed"
            lines: list[list[int]] = []
            levels: dict[int, list[int]] = {}
            for i in range(size):
                lines.append([*lines[parents[i]], tokens[i]] if i else [])
                levels.setdefault(len(lines[i]), []).append(i)
            committed = torch.tensor(self._tokens[row], device=self._device)
            for level in levels.values():
                below = torch.tensor([lines[i] for i in level], dtype=torch.int64, device=self._device)
                history = torch.cat((committed.expand(len(level), -1), below), 1)
                index = torch.tensor(level, device=scores.device)
                part = scores[place, index].to(self._device)
                for processor in self._processors:
                    part = _call(processor, history, part)
                scores[place, index] = part.to(scores)


def _name(processor: Processor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _call(processor: Processor, history: Tensor, scores: Tensor) -> Tensor:
    out, shape = processor(history, scores), list(scores.shape)
    if not isinstance(out, Tensor) or list(out.shape) != shape:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"{_name(processor)}: got {got} back; expected scores {shape}; return a row for each row given")
    return out


def _check(processor: Processor, vocab: int, device: torch.device) -> None:
    known = [IMPURE[kind.__name__] for kind in inspect.getmro(type(processor)) if kind.__name__ in IMPURE]
    trouble = known[0] if known else _probe(processor, vocab, device)
    if trouble:
        wanted = "expected a pure function of (input_ids, scores), row by row, as the nodes of a tree are scored out of order"
        raise ValueError(f"got {_name(processor)}: {trouble}; {wanted}; leave it out")


def _probe(processor: Processor, vocab: int, device: torch.device) -> str:
    """What is wrong, if anything: random histories of two lengths, in both orders, their rows together, swapped and alone must give the
    same, up to rounding, and leave no trace."""
    random = torch.Generator().manual_seed(0)
    cases = [(torch.randint(vocab, (2, size), generator=random), torch.randn(2, vocab, generator=random)) for size in (9, 6)]
    first: dict[tuple[int, int], Tensor] = {}
    memory = None
    for order in (cases, cases[::-1]):
        # A copy for each order: what the first call leaves behind must not depend on its input. The lazy set-up of some processors
        # does not; the prompt length that others keep does.
        fresh = copy.copy(processor)
        for history, scores in order * 2:
            for rows in ([0, 1], [1, 0], [0], [1], [1]):
                out = _call(fresh, history[rows].to(device), scores[rows].to(device))
                for row, one in zip(rows, out, strict=True):
                    if not torch.allclose(first.setdefault((history.shape[1], row), one.clone()), one, equal_nan=True):
                        return "its result depends on other rows or on earlier calls"
                now = {name: value for name, value in getattr(fresh, "__dict__", {}).items() if isinstance(value, (int, float, str, bool))}
                memory = now if memory is None else memory
                if now != memory:
                    return "it changes its attributes when called"
    return ""
