"""Logits processors whose result depends on earlier tokens, exact at every node of a tree: the repetition penalty, and transformers'
`LogitsProcessor`s that the user gives.

The history of a node is all committed tokens of its slot, the root included, then the node's ancestors below the root and its own token. The
order is that of transformers' `generate`: first the penalty, then the processors as given, and only then temperature, top-k, top-p and min-p
(`draftsmith.inference.sampler.warp`). A constraint (`draftsmith.inference.constraints`), which keeps a state for each slot, comes before all.

Letters: B rows of a round · N tree nodes with the root · V vocabulary · S tokens of a history.
"""

import copy
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.inference.constraints import ConstraintState, mask_trees
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.sampler import Sampling, penalise
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict

__all__ = ["IMPURE", "History", "Processor"]

Processor = Callable[[Tensor, Tensor], Tensor]  # input_ids [n,S], scores [n,V] -> [n,V], as transformers' LogitsProcessor

_UNCONDITIONAL = "it needs the scores of a second, unconditional forward"
_BY_ROW = "it distinguishes rows by their index in the batch"
_REMEMBERS = "it remembers earlier calls"
# Those of transformers' own processors that are no function of (history, scores), row by row. All others are such functions, Bark's and
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
    """The committed tokens of each slot, and the processed logits of every node of its tree.

    The penalty stays on the device, without a host sync. A constraint and the user's processors need each path: the host reads the tree once
    more per round. A constraint makes one mask for each node that can be accepted. Processors need each history in full: each processor is called once for every row and depth, on the device of the tokens, as `generate` does. That is slow and
    exact. Processors see the histories of nodes that are not accepted, too.

    Args:
        sampling: its repetition_penalty and its constraint are used, nothing else.
        processors: applied in this order.
        slots: of the decoder.
        vocab: V.
        device: of the tokens.

    Raises:
        ValueError: two penalties, a processor that returns another shape, or a processor that is no pure function of (input_ids, scores), row by
            row. The last is known by class or from a few calls with random input, which miss what shows only with certain tokens.
    """

    def __init__(self, sampling: Sampling, processors: Sequence[Processor], slots: int, vocab: int, device: torch.device) -> None:
        self._penalty = sampling.repetition_penalty
        self._device = device
        self._processors: list[Processor] = []
        for processor in processors:
            if processor in self._processors:
                continue  # `generate` too applies a processor once that is given twice
            if type(processor).__name__ == _PENALTY and self._penalty != 1.0:
                raise ValueError(f"got {_PENALTY} and repetition_penalty {self._penalty}; expected one penalty; leave one of them out")
            _check(processor, vocab, self._device)
            self._processors.append(processor)
        self._tokens: dict[int, list[int]] = {}  # by slot; for processors only
        self._constraint = sampling.constraint
        self._states: dict[int, ConstraintState] = {}  # by slot, after its committed tokens
        self._seen = torch.zeros(slots, vocab, dtype=torch.bool, device=device) if self._penalty != 1.0 else None  # [slots,V]

    @staticmethod
    def needed(sampling: Sampling, processors: Sequence[Processor]) -> bool:
        """Whether the penalty, a constraint or a processor is in use."""
        return sampling.repetition_penalty != 1.0 or sampling.constraint is not None or len(processors) > 0

    def start(self, slots: list[int], prompts: list[list[int]]) -> None:
        """These slots begin with these complete prompts; a prompt's last token is the first root."""
        for slot, prompt in zip(slots, prompts, strict=True):
            if self._processors:
                self._tokens[slot] = list(prompt)
            if self._constraint:
                self._states[slot] = self._constraint.start()
            if self._seen is not None:
                self._seen[slot] = False
                self._seen[slot].index_fill_(0, torch.tensor(prompt, device=self._device), True)

    def apply(self, round: RoundContext, tree: DraftTree, logits: Tensor) -> Tensor:
        """Process the logits [B,N,V] of the tree's nodes -> float32 [B,N,V] on the same device; padding nodes stay as they are.

        Raises:
            ValueError: a processor that returns another shape.
        """
        scores = logits.to(torch.float32, copy=True)
        trees = _on_host(tree) if self._constraint or self._processors else []
        if self._constraint:
            mask_trees([self._states[slot] for slot in round.slots], trees, scores)
        if self._seen is not None:
            scores = self._penalise(self._seen.index_select(0, round.slot_index), tree, scores)
        if self._processors:
            self._process(round.slots, trees, scores)
        return scores

    def commit(self, round: RoundContext, tree: DraftTree, verdict: Verdict) -> None:
        """Add the accepted tokens and next_token to the histories of the round's slots.

        Raises:
            ValueError: the constraint does not allow what was drawn, since the processors left none of the tokens that it allows.
        """
        if self._seen is not None:
            accepted = tree.tokens.gather(
                1, verdict.path.clamp(min=0)
            )  # past the end of the path the root, which is in the history already
            old = self._seen.index_select(0, round.slot_index)
            new = old.scatter(1, torch.cat((accepted, verdict.next_token[:, None]), 1), True)
            self._seen.index_copy_(0, round.slot_index, torch.where(verdict.length[:, None] > 0, new, old))
        if self._processors:
            for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
                self._tokens[slot] += result.tokens if result.length else []
        if self._constraint:
            for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
                for token in result.tokens if result.length else []:
                    state = self._states[slot].after(token)
                    if state is None:
                        raise ValueError(
                            f"{self._constraint.name}: got token {token}, which it does not allow; expected processors that leave an allowed "
                            "token; leave them out"
                        )
                    self._states[slot] = state

    def drop(self, slots: list[int]) -> None:
        """These slots ended."""
        for slot in slots:
            self._tokens.pop(slot, None)
            self._states.pop(slot, None)

    def _penalise(self, seen: Tensor, tree: DraftTree, scores: Tensor) -> Tensor:
        """The tokens that each row has seen [B,V], scores [B,N,V] -> [B,N,V], penalised for these and for each node's ancestors."""
        # In place of a node that is no ancestor the root is marked, which every node has in its history.
        line = torch.where(tree.visible(), tree.tokens[:, None, :], tree.tokens[:, :1, None])  # [B,N,N]
        real = torch.arange(line.shape[1], device=line.device) < tree.size[:, None]
        seen, line, real = (tensor.to(scores.device) for tensor in (seen, line, real))
        marked = seen[:, None].expand_as(scores).scatter(2, line, True) & real[:, :, None]
        return penalise(scores, marked, self._penalty)

    def _process(self, slots: list[int], trees: list[tuple[list[int], list[int]]], scores: Tensor) -> None:
        """Run the processors on scores [B,N,V], in place: the nodes of one row and depth have histories of one length."""
        for b, (slot, (tokens, parents)) in enumerate(zip(slots, trees, strict=True)):
            assert not tokens or self._tokens[slot][-1] == tokens[0], "the root is the last token committed"
            paths: list[list[int]] = []  # tokens below the root, the node's own included
            levels: dict[int, list[int]] = {}
            for i, token in enumerate(tokens):
                paths.append([*paths[parents[i]], token] if i else [])
                levels.setdefault(len(paths[i]), []).append(i)
            committed = torch.tensor(self._tokens[slot], device=self._device)
            for level in levels.values():
                below = torch.tensor([paths[i] for i in level], dtype=torch.int64, device=self._device)
                history = torch.cat((committed.expand(len(level), -1), below), 1)
                index = torch.tensor(level, device=scores.device)
                part = scores[b, index].to(self._device)
                for processor in self._processors:
                    part = _call(processor, history, part)
                scores[b, index] = part.to(scores)


def _on_host(tree: DraftTree) -> list[tuple[list[int], list[int]]]:
    """The tokens and parents of each row's nodes, without padding. Waits for the device."""
    nodes = tree.tokens.shape[1]
    rows = torch.cat((tree.size[:, None], tree.tokens, tree.parents), 1).tolist()
    return [(rest[:size], rest[nodes : nodes + size]) for size, *rest in rows]


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
    """What is wrong with the processor, or "".

    It is called with random histories of two lengths, in both orders, with rows together, swapped and alone. The results must be equal up to
    rounding, and no attribute may change.
    """
    random = torch.Generator().manual_seed(0)
    cases = [(torch.randint(vocab, (2, size), generator=random), torch.randn(2, vocab, generator=random)) for size in (9, 6)]
    expected: dict[tuple[int, int], Tensor] = {}  # by length of the history and row
    memory = None
    for order in (cases, cases[::-1]):
        # A copy for each order: what the first call stores must not depend on its input. The lazy set-up of some processors
        # does not depend on it; the prompt length that others store does.
        fresh = copy.copy(processor)
        for history, scores in order * 2:
            for rows in ([0, 1], [1, 0], [0], [1], [1]):
                out = _call(fresh, history[rows].to(device), scores[rows].to(device))
                for row, result in zip(rows, out, strict=True):
                    if not torch.allclose(expected.setdefault((history.shape[1], row), result.clone()), result, equal_nan=True):
                        return "its result depends on other rows or on earlier calls"
                now = {name: value for name, value in getattr(fresh, "__dict__", {}).items() if isinstance(value, (int, float, str, bool))}
                memory = now if memory is None else memory
                if now != memory:
                    return "it changes its attributes when called"
    return ""
