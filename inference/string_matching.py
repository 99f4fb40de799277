"""A draft model with another tokenizer, matched by text: universal assisted generation (transformers' AssistedCandidateGeneratorDifferentTokenizers)
and string-level exact match (Timor et al. 2025, https://arxiv.org/abs/2502.05202).

Each round the committed text is tokenised for the draft model, which continues it greedily in its own tokens; what it wrote is tokenised for
the target, behind the committed tokens. The draft is a function of the text, so the rules of chosen children verify it without loss.

Only the end of the text is tokenised again. The draft model's KV cache is kept as far as its tokens stay the same.

Letters: B rows · N tree nodes with the root · K draft depth · H hidden size of the draft model.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.byte_vocabulary import ByteVocabulary, complete_length, counterparts, mean_length
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.draft_model import encode_tokens
from draftsmith.inference.drafter import NodeOutput, RoundContext, Target
from draftsmith.inference.drafts import Draft, HostDrafter, merge_continuations
from draftsmith.inference.expand import TreeSpec
from draftsmith.inference.sampler import best_token
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict

__all__ = ["StringMatching"]

WINDOW = 64  # bytes at the end of a text that are tokenised again: longer than a word


@dataclass(slots=True)
class OwnText:
    """The text of a slot in the draft model's tokens.

    Attributes:
        fixed: tokens that stay as they are.
        tail: the bytes after them, whose tokens may change with what follows.
        first: whether the text begins with the tail.
        cached: the tokens whose KV is in the cache.
    """

    fixed: list[int]
    tail: bytes = b""
    first: bool = True
    cached: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Continuation:
    """What the draft model wrote after the text of a slot.

    Attributes:
        before: the bytes before it, of the target's last tokens.
        written: its bytes.
        special: the target's token for the special token that ended it, if any.
        ended: no more has to be written.
    """

    before: bytes
    written: bytes = b""
    special: int | None = None
    ended: bool = False


class StringMatching(HostDrafter):
    """A language model that drafts text for a target with any tokenizer.

    Where it may end differently for the target, the draft is a tree of two continuations: the tokens of the text behind the committed bytes,
    and those of the text alone.

    Args:
        model: the draft model.
        ours: its vocabulary.
        theirs: the target's.
        tree_spec: of the trees; a chain has the first continuation alone.
        chunk: tokens of a prompt per forward.
    """

    method = "strings"
    recurrent = True  # the draft model reads its last token before the next

    def __init__(
        self, model: Target, ours: ByteVocabulary, theirs: ByteVocabulary, tree_spec: TreeSpec | None = None, chunk: int = 256
    ) -> None:
        super().__init__(tree_spec or StaticTree.chain(4))
        self.model, self.ours, self.theirs, self.chunk = model, ours, theirs, chunk
        self._special_of_theirs, self._special_of_ours = counterparts(theirs, ours), counterparts(ours, theirs)
        self._mean_length = mean_length(ours, theirs)
        self._own: dict[int, OwnText] = {}  # by slot
        self._cache: TreeCache | None = None
        self._made_for: Any = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    def bind(self, target: Target, slots: int, context: int) -> None:
        super().bind(target, slots, context)
        # Enough to write one token of the target more than a draft has, also where they are longer than most: more text may change the last of them.
        self._steps = math.ceil(2 * self._mean_length * (self.max_depth + 1)) + 1
        self._most = max(1, min(math.ceil(context * self._mean_length) + len(self.ours.begin), self.model.max_positions - self._steps))
        capacity, made_for = self._most + self._steps, (self.model.dtype, self.device, slots)
        if self._cache is None or self._made_for != made_for or self._cache.capacity < capacity:
            self._cache = None  # frees the old one first
            self._cache, self._made_for = TreeCache(slots, capacity, self.device), made_for
        self._cache.reset()
        self._own = {}

    @torch.inference_mode()
    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        """Encode the prompts without their last tokens."""
        super().start(slots, prompts, out)
        for slot, prompt in zip(slots, prompts, strict=True):
            self._own[slot] = OwnText(list(self.ours.begin))
            self._extend(slot, prompt)
        readings = {slot: tokens[:-1] for slot in slots if (tokens := self._reading(slot)) and len(tokens) > 1}
        if readings:
            self._encode(readings)

    @torch.inference_mode()
    def propose(self, round: RoundContext) -> DraftTree:
        depth = min(round.depth, self.max_depth)
        continuations = self._continue(round.slots, depth)
        drafts = [self._draft_of(continuations[slot], depth) if slot in continuations else Draft() for slot in round.slots]
        return self.tree_of(round, drafts)

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        super().accept(round, tree, verdict, out)
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            self._extend(slot, result.tokens)

    def drop(self, slots: list[int]) -> None:
        super().drop(slots)
        for slot in slots:
            self._own.pop(slot, None)
        if self._cache is not None:
            self._cache.reset(slots)

    def _extend(self, slot: int, tokens: list[int]) -> None:
        """These tokens of the target were committed in the slot."""
        own = self._own[slot]
        for token in tokens:
            if own.first and not own.tail and token in self.theirs.begin:
                continue  # each tokenizer begins a text in its own way
            special = self._special_of_theirs.get(token)
            if special is None:
                piece = self.theirs.text_of(token)
                if own.first and not own.tail and self.theirs.leading_space:
                    piece = piece.removeprefix(b" ")
                own.tail += piece
                continue
            if own.tail:
                own.fixed += self.ours.read(own.tail, own.first) or []
                own.tail, own.first = b"", False
            if own.fixed != [special]:  # else both tokenizers begin a text with it
                own.fixed.append(special)
        if len(own.tail) > 2 * WINDOW:
            self._fix(own)

    def _fix(self, own: OwnText) -> None:
        """Leave about WINDOW bytes of the tail; a token that begins with white space, if there is any, is where tokenizers begin anew."""
        tokens = self.ours.read(own.tail, own.first)
        if tokens is None:
            return
        spelled, position, cut = self.ours.spell(tokens), 0, (len(tokens), len(own.tail))
        if spelled is not None and spelled.endswith(own.tail):
            position, cuts = len(own.tail) - len(spelled), list[tuple[int, int, bool]]()
            for number, token in enumerate(tokens):
                piece = self.ours.bytes_of[token] or b""
                if 0 < position <= len(own.tail) - WINDOW:
                    cuts.append((number, position, piece[:1].isspace()))
                position += len(piece)
            best = max(cuts, key=lambda each: (each[2], each[1]), default=None)
            if best is None:
                return
            cut = best[:2]
        own.fixed += tokens[: cut[0]]
        own.tail, own.first = own.tail[cut[1] :], False

    def _reading(self, slot: int) -> list[int]:
        """The text of a slot in the draft model's tokens; [] where it cannot read the text's end."""
        own = self._own[slot]
        tail = self.ours.read(own.tail, own.first)
        if tail is None:
            return []
        if len(own.fixed) + len(tail) > self._most:  # to half of that, so that it is seldom done
            own.fixed = own.fixed[len(own.fixed) - max(0, self._most // 2 - len(tail)) :]
        return (own.fixed + tail)[-self._most :]

    def _encode(self, readings: dict[int, list[int]]) -> Tensor:
        """Bring the cache to these tokens of each slot -> hidden [B,H] of the last of each."""
        cache = self._cache
        assert cache is not None, "bind comes first"
        texts = [self._own[slot] for slot in readings]
        common = [_common(own.cached, tokens) for own, tokens in zip(texts, readings.values(), strict=True)]
        cache.select(list(readings))
        cache.crop(common)
        new = [tokens[count:] for tokens, count in zip(readings.values(), common, strict=True)]
        hidden = encode_tokens(self.model, cache, new, self._forward, self.chunk)
        for own, tokens in zip(texts, readings.values(), strict=True):
            own.cached = tokens
        return torch.stack([each for each in hidden if each is not None])

    def _forward(self, ids: Tensor, attention: TreeAttention) -> Tensor:
        positions = attention.positions().clamp(max=self.model.max_positions - 1)
        return self.model.forward(ids, position_ids=positions, cache=self._cache, tree=attention).hidden

    def _continue(self, slots: list[int], depth: int) -> dict[int, Continuation]:
        """What the draft model writes after the text of each slot that it can read: one of its tokens per forward, all slots together."""
        readings = {slot: tokens for slot in slots if (tokens := self._reading(slot))}
        written = {slot: Continuation(self._before(slot)) for slot in readings}
        for _ in range(self._steps):
            if not readings:
                break
            logits = self.model.logits(self._encode(readings))[..., : len(self.ours.bytes_of)]
            for slot, token in zip(list(readings), best_token(logits).tolist(), strict=True):
                self._write(written[slot], token, depth)
                readings[slot] = readings[slot] + [token]
                if written[slot].ended:
                    del readings[slot]
        return written

    def _write(self, continuation: Continuation, token: int, depth: int) -> None:
        """The draft model wrote this token of its own."""
        piece = self.ours.bytes_of[token]
        if piece is None:
            continuation.special, continuation.ended = self._special_of_ours.get(token), True
            return
        continuation.written += piece
        known = continuation.written[: complete_length(continuation.written)]
        continuation.ended = len(next(self._tokens(continuation.before, known), [])) > depth

    def _before(self, slot: int) -> bytes:
        """The bytes of the last committed tokens, WINDOW of them if there are so many, from the beginning of a token on."""
        before = b""
        for token in reversed(self._texts[slot]):
            piece = self.theirs.bytes_of[token] if token < len(self.theirs.bytes_of) else None
            if piece is None or len(before) >= WINDOW:
                break
            before = piece + before
        return before

    def _tokens(self, before: bytes, written: bytes) -> Iterator[list[int]]:
        """The target's tokens for what was written: behind the committed bytes, then alone, if that differs."""
        end = complete_length(written)
        rest = self.theirs.encode(written[end:]) or []
        behind = self.theirs.encode_after(before, written[:end])
        if behind is not None:
            yield behind + rest
        alone = self.theirs.encode(written[:end])
        if alone is not None and alone != behind:
            yield alone + rest

    def _draft_of(self, continuation: Continuation, depth: int) -> Draft:
        special = [] if continuation.special is None else [continuation.special]
        tokens = [(tokens + special)[:depth] for tokens in self._tokens(continuation.before, continuation.written)]
        return merge_continuations(tokens, self.tree_spec, self._paths, self.max_nodes - 1) if tokens else Draft()


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens two texts have in common at their beginning; the last of the second is not counted, so that it is encoded."""
    longest = min(len(first), len(second) - 1)
    if first[:longest] == second[:longest]:
        return longest
    return bisect_left(range(longest), True, key=lambda count: first[: count + 1] != second[: count + 1])
