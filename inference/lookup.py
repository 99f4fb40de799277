"""The drafters without weights, which read the continuation off text seen before: prompt lookup copies it, suffix decoding counts it.

A continuation is the tokens that followed an earlier occurrence.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from draftsmith.inference.drafter import NodeOutput, RoundContext, Target
from draftsmith.inference.drafts import Draft, HostDrafter, merge_continuations
from draftsmith.inference.expand import DynamicTree, TreeSpec
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict

__all__ = ["Ngram", "NgramIndex", "Suffix"]

END = -1  # after every closed sequence of an index; no token
CHAIN, TREE = StaticTree.chain(16), DynamicTree(depth=16, width=4, nodes=32)
MAX_MERGED = 8  # occurrences that Ngram merges into a tree
MAX_OCCURRENCES = 32  # occurrences that Suffix considers, in the slot's own text and again in memory
MAX_MATCH = 32  # tokens; a longer match says no more about what follows
ORDERS = (8, 4, 2, 1)  # n-grams by which Suffix finds its matches: rarer ones first, so that MAX_OCCURRENCES cuts off short matches


class NgramIndex:
    """Token sequences, and the positions of their n-grams of the given orders.

    A dict holds the last position of each n-gram, a list the position before each position, as in the hash chains of LZ77 coders. Per token
    and order there is at most one dict entry and one list entry. The position of an n-gram is that of the token after it, counted from the
    first token ever added. No n-gram spans two sequences.

    Attributes:
        tokens: the sequences, END after each closed one.
        first: position of tokens[0]; the tokens before have been dropped.
    """

    def __init__(self, orders: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.first = 0
        self._begin = 0  # of the last sequence, in tokens
        self._index: dict[int, tuple[dict[tuple[int, ...], int], list[int]]] = {order: ({}, []) for order in orders}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the last sequence."""
        text, known = self.tokens, len(self.tokens)
        text.extend(tokens)
        for order, (last, before) in self._index.items():
            for end in range(known + 1, len(text) + 1):
                if end - order >= self._begin:
                    ngram = tuple(text[end - order : end])
                    before.append(last.get(ngram, 0))
                    last[ngram] = self.first + end
                else:
                    before.append(0)

    def close(self) -> None:
        """End the last sequence; the next one begins."""
        self.tokens.append(END)
        self._begin = len(self.tokens)
        for _, before in self._index.values():
            before.append(0)

    def drop_oldest(self) -> None:
        """Drop the oldest sequence, which must be closed."""
        size = self.tokens.index(END) + 1
        for order, (last, before) in self._index.items():
            for end in range(order, size):
                ngram = tuple(self.tokens[end - order : end])
                if last.get(ngram, self.first + size) < self.first + size:
                    del last[ngram]
            del before[:size]
        del self.tokens[:size]
        self.first += size
        self._begin -= size

    def occurrences(self, text: Sequence[int], order: int) -> Iterator[int]:
        """The positions after earlier occurrences of the last `order` tokens of `text`, the most recent first; only where a token follows."""
        last, before = self._index[order]
        position = last.get(tuple(text[-order:]), 0)
        while position > self.first:
            at = position - self.first
            if at < len(self.tokens) and self.tokens[at] != END:
                yield position
            position = before[at - 1]

    def continuation(self, position: int, depth: int) -> list[int]:
        """At most `depth` tokens from `position` on. At the end of an open sequence the copy continues with its own tokens."""
        at = position - self.first
        copied = self.tokens[at : at + depth]
        if END in copied:
            return copied[: copied.index(END)]
        return copied if len(copied) == depth else (copied * (depth // len(copied) + 1))[:depth]

    def matches(self, text: Sequence[int], depth: int) -> list[tuple[int, list[int]]]:
        """(length of the match, continuation) of the earlier occurrences of the end of `text`, the most recent first.

        At most MAX_OCCURRENCES: first those that match the longest of the n-grams, then the more recent ones.
        """
        lengths: dict[int, int] = {}  # by position
        for order in self._index:
            for position in self.occurrences(text, order):
                if len(lengths) == MAX_OCCURRENCES:
                    break
                if position not in lengths:
                    lengths[position] = self.match_length(text, position, order)
        return [(lengths[position], self.continuation(position, depth)) for position in sorted(lengths, reverse=True)]

    def match_length(self, text: Sequence[int], position: int, known: int) -> int:
        """How many tokens before `position` equal the last ones of `text`, at most MAX_MATCH; `known` of them do."""
        at = position - self.first
        longest = min(MAX_MATCH, at, len(text))
        if self.tokens[at - longest : at] == text[-longest:]:
            return longest
        while self.tokens[at - 1 - known] == text[-1 - known]:
            known += 1
        return known


class _LookupDrafter(HostDrafter):
    """The common part of both drafters: an index of each slot's text so far."""

    def __init__(self, tree_spec: TreeSpec, orders: Sequence[int]) -> None:
        super().__init__(tree_spec)
        self._orders = orders
        self._indices: dict[int, NgramIndex] = {}  # by slot

    def bind(self, target: Target, slots: int, context: int) -> None:
        super().bind(target, slots, context)
        self._indices = {}

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        for slot, prompt in zip(slots, prompts, strict=True):
            self._indices[slot] = index = NgramIndex(self._orders)
            index.extend(prompt)
            self._texts[slot] = index.tokens

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            self.extend(slot, result.tokens)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """These tokens were committed in the slot."""
        self._indices[slot].extend(tokens)

    def drop(self, slots: list[int]) -> None:
        super().drop(slots)
        for slot in slots:
            self._indices.pop(slot, None)

    def replay(self, prompt: Sequence[int], answer: Sequence[int], depth: int | None = None) -> list[tuple[int, int]]:
        """(nodes with the root, committed tokens) of each round where the target answers `prompt` with `answer`.

        No model runs: drafts depend on the text alone. It is exact where a round accepts what the answer continues with: greedily, and with
        noise keyed by position. Nothing is remembered. depth: draft no deeper.
        """
        self._paths = frozenset(self.tree_spec.paths) if isinstance(self.tree_spec, StaticTree) else None
        text, rounds = NgramIndex(self._orders), list[tuple[int, int]]()
        text.extend(prompt)
        position = 0
        while position < len(answer):
            draft = self._draft_of(text, self.max_depth if depth is None else min(depth, self.max_depth))
            committed = min(draft.accepted(answer[position:]) + 1, len(answer) - position)
            rounds.append((1 + len(draft.tokens), committed))
            text.extend(answer[position : position + committed])
            position += committed
        return rounds

    def _draft(self, slot: int, depth: int) -> Draft:
        return self._draft_of(self._indices[slot], depth)

    def _draft_of(self, text: NgramIndex, depth: int) -> Draft:
        """The draft after a text, no deeper than `depth`."""
        raise NotImplementedError


class Ngram(_LookupDrafter):
    """Prompt lookup (Saxena 2023).

    The longest n-gram that ends the text and occurred before is looked up. A chain copies what followed its last occurrence, a tree merges
    what followed the last few occurrences.

    Args:
        tree_spec: of the trees.
        longest: tokens of the longest n-gram.
        shortest: tokens of the shortest n-gram.
        factor: tokens copied for each matching token before the last occurrence, of which at most MAX_MATCH count. The longer the match, the
            likelier the copy continues; an earlier occurrence of a single token says little of what follows.

    Raises:
        ValueError: lengths that are not 1 <= shortest <= longest, or a factor below 1.
    """

    method = "ngram"

    def __init__(self, tree_spec: TreeSpec = CHAIN, longest: int = 3, shortest: int = 1, factor: float = 2.0) -> None:
        if not 1 <= shortest <= longest or factor < 1:
            raise ValueError(
                f"got n-grams of {shortest} to {longest} tokens, factor {factor}; expected 1 <= shortest <= longest, 1 <= factor"
            )
        super().__init__(tree_spec, range(longest, shortest - 1, -1))
        self.factor = factor

    def _draft_of(self, text: NgramIndex, depth: int) -> Draft:
        for order in self._orders:
            occurrences = list(islice(text.occurrences(text.tokens, order), MAX_MERGED if self.tree_spec.width > 1 else 1))
            if occurrences:
                length = int(self.factor * text.match_length(text.tokens, occurrences[0], order))
                continuations = [text.continuation(position, min(depth, length)) for position in occurrences]
                return merge_continuations(continuations, self.tree_spec, self._paths, self.max_nodes - 1)
        return Draft()


class Suffix(_LookupDrafter):
    """Suffix decoding (Oliaro et al. 2024).

    For each length at which the end of the text occurred before, a draft is made: the trie of the continuations, cut to its likeliest nodes,
    at most min(nodes, factor · length + offset). The draft of the highest score is proposed; of equal scores that of the longer match, and
    the slot's own text before memory.

    Args:
        tree_spec: of the trees.
        memory: tokens to remember over all slots and calls, of finished answers and of what the target said past their ends where a last draft
            was accepted; 0 is none. The oldest answer is dropped first. An answer is remembered with the last MAX_MATCH tokens of its prompt.
        factor: nodes of a draft for each token of the match.
        offset: nodes in addition.
        min_probability: a less likely node is left out.

    Raises:
        ValueError: a negative memory or factor, or a min_probability outside (0, 1].
    """

    method = "suffix"

    def __init__(
        self, tree_spec: TreeSpec = TREE, memory: int = 0, factor: float = 2.0, offset: float = 2.0, min_probability: float = 0.1
    ) -> None:
        if memory < 0 or factor < 0 or not 0 < min_probability <= 1:
            raise ValueError(
                f"got memory {memory}, factor {factor}, min_probability {min_probability}; expected memory >= 0, "
                "factor >= 0 and 0 < min_probability <= 1; correct them"
            )
        super().__init__(tree_spec, ORDERS)
        self.memory, self.factor, self.offset, self.min_probability = memory, factor, offset, min_probability
        self.remembers = memory > 0
        self._vocab = -1
        self._finished = NgramIndex(ORDERS)
        self._remember_from: dict[int, int] = {}  # by slot: index of the first token to remember

    def bind(self, target: Target, slots: int, context: int) -> None:
        super().bind(target, slots, context)
        if target.vocab_size != self._vocab:  # the remembered tokens are those of another vocabulary
            self._vocab, self._finished = target.vocab_size, NgramIndex(ORDERS)

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        super().start(slots, prompts, out)
        for slot, prompt in zip(slots, prompts, strict=True):
            self._remember_from[slot] = max(0, len(prompt) - MAX_MATCH)

    def drop(self, slots: list[int]) -> None:
        """Remember the answers of these slots, and drop old ones to make space. END counts as a token too."""
        for slot in self._texts.keys() & slots if self.memory else ():
            tokens = self._texts[slot]
            tokens = tokens[max(self._remember_from[slot], len(tokens) - self.memory + 1) :]
            while len(self._finished.tokens) + len(tokens) + 1 > self.memory:
                self._finished.drop_oldest()
            self._finished.extend(tokens)
            self._finished.close()
        super().drop(slots)

    def forget(self) -> None:
        self._finished = NgramIndex(ORDERS)

    def _draft_of(self, text: NgramIndex, depth: int) -> Draft:
        best = Draft()
        for source in (text, self._finished):
            matches = source.matches(text.tokens, depth)
            for length in sorted({length for length, _ in matches}, reverse=True):
                budget = min(self.max_nodes - 1, int(self.factor * length + self.offset))
                if budget <= best.score:
                    break  # a score is at most the number of nodes, and shorter matches have no larger budget
                continuations = [continuation for matched, continuation in matches if matched >= length]
                draft = merge_continuations(continuations, self.tree_spec, self._paths, budget, self.min_probability)
                if draft.score > best.score:
                    best = draft
        return best
