"""The drafters without weights: what follows is read off text seen before. Prompt lookup copies it, suffix decoding counts it.

Letters: B rows · N tree nodes with the root · K draft depth. A run is the tokens that followed an earlier occurrence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

import torch

from draftsmith.inference.drafter import NodeOutput, RoundContext, Target
from draftsmith.inference.expand import DynamicTree, TreeSpec
from draftsmith.inference.tree import DraftTree, Path, StaticTree
from draftsmith.inference.verify import Verdict

__all__ = ["Corpus", "Draft", "Ngram", "Suffix", "merge"]

END = -1  # after every closed sequence of a corpus; no token
CHAIN, TREE = StaticTree.chain(16), DynamicTree(depth=16, width=4, nodes=32)
FEW = 8  # occurrences that Ngram merges into a tree
MOST = 32  # occurrences that Suffix looks at, in the row's own text and again in memory
LONGEST = 32  # a longer match says no more about what follows
ORDERS = (8, 4, 2, 1)  # n-grams that Suffix finds its matches by: the rarer ones first, so that MOST cuts off short matches


class Corpus:
    """Token sequences, and where their n-grams of the given orders occurred: a dict holds the last place of each n-gram, a list the
    place before each place, as the hash chains of LZ77 coders do. Per token and order one dict entry at most and one list entry.

    A place is that of the token after the n-gram, counted from the first token ever seen. No n-gram spans two sequences.
    """

    def __init__(self, orders: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.first = 0  # place of tokens[0]: those before are forgotten
        self._begin = 0  # of the last sequence, in tokens
        self._index: dict[int, tuple[dict[tuple[int, ...], int], list[int]]] = {order: ({}, []) for order in orders}

    def extend(self, tokens: Sequence[int]) -> None:
        """The last sequence goes on."""
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
        """The last sequence ends, the next one begins."""
        self.tokens.append(END)
        self._begin = len(self.tokens)
        for _, before in self._index.values():
            before.append(0)

    def forget(self) -> None:
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

    def places(self, text: Sequence[int], order: int) -> Iterator[int]:
        """Where the last `order` tokens of `text` occurred and something followed, the most recent place first."""
        last, before = self._index[order]
        place = last.get(tuple(text[-order:]), 0)
        while place > self.first:
            at = place - self.first
            if at < len(self.tokens) and self.tokens[at] != END:
                yield place
            place = before[at - 1]

    def run(self, place: int, depth: int) -> list[int]:
        """At most `depth` tokens from `place` on. At the end of an open sequence the copy goes on with what it copied itself."""
        at = place - self.first
        run = self.tokens[at : at + depth]
        if END in run:
            return run[: run.index(END)]
        return run if len(run) == depth else (run * (depth // len(run) + 1))[:depth]

    def matches(self, text: Sequence[int], depth: int) -> list[tuple[int, list[int]]]:
        """(length of the match, run) wherever the end of `text` occurred, the most recent first; of too many those that share more of
        the n-grams' orders, then the more recent ones."""
        found: dict[int, int] = {}
        for order in self._index:
            for place in self.places(text, order):
                if len(found) == MOST:
                    break
                if place not in found:
                    found[place] = self.shared(text, place, order)
        return [(found[place], self.run(place, depth)) for place in sorted(found, reverse=True)]

    def shared(self, text: Sequence[int], place: int, known: int) -> int:
        """How many tokens before `place` are the last ones of `text`, LONGEST at most; `known` of them are."""
        at = place - self.first
        most = min(LONGEST, at, len(text))
        if self.tokens[at - most : at] == text[-most:]:
            return most
        while self.tokens[at - 1 - known] == text[-1 - known]:
            known += 1
        return known


@dataclass(slots=True)
class Draft:
    """The nodes of one row's tree after the root, the leftmost chain first: tokens, parents (0 is the root), and the score: the sum of
    their probabilities, which is how many of them are expected to be accepted."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0


def merge(runs: list[list[int]], shape: TreeSpec, paths: frozenset[Path] | None, budget: int, least: float = 0.0) -> Draft:
    """The trie of the runs, the most recent run first, cut to the ranks of the shape and to `budget` nodes after the root.

    A node's probability is the share of runs that pass through it, which is the product of count / count of the parent down its path.
    The likeliest nodes are kept, of equals those met first; none below `least`. Siblings are ranked by count, of equals the more
    recent first. paths: those of a static tree.
    """
    total, score, serial = len(runs), 0, 0
    heap: list[tuple[int, int, int, Path, int, list[list[int]]]] = []
    kept: list[tuple[int, int, bool]] = []  # token, parent, whether off the leftmost chain
    path: Path = ()
    while True:
        level, node = len(path), len(kept)
        groups: dict[int, list[list[int]]] = {}
        for run in runs:
            if level < len(run):
                groups.setdefault(run[level], []).append(run)
        ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
        for rank, (token, group) in enumerate(ranked[: shape.width]):
            child = (*path, rank)
            if len(group) / total >= least and (paths is None or child in paths):
                heappush(heap, (-len(group), serial, node, child, token, group))
                serial += 1
        if not heap or len(kept) == budget:
            break
        _, _, parent, path, token, runs = heappop(heap)
        kept.append((token, parent, any(path)))
        score += len(runs)
    order = sorted(range(1, len(kept) + 1), key=lambda node: kept[node - 1][2])
    place = {0: 0} | {node: new for new, node in enumerate(order, 1)}
    return Draft([kept[node - 1][0] for node in order], [place[kept[node - 1][1]] for node in order], score / total)


class _Lookup:
    """What both share: a corpus per row, its text so far, and the tree from the rows' drafts. Both are on the host: not capturable.

    method, depth_limit: for those who choose a shape; another one counts from the next `bind` on.
    """

    method = ""
    depth_limit = 64
    capturable = False
    taps: tuple[int, ...] = ()

    def __init__(self, shape: TreeSpec, orders: Sequence[int]) -> None:
        self.tree_spec = shape
        self._orders = orders
        self._rows: dict[int, Corpus] = {}
        self._paths: frozenset[Path] | None = None

    @property
    def max_nodes(self) -> int:
        return self.tree_spec.num_nodes

    @property
    def max_depth(self) -> int:
        return self.tree_spec.max_depth

    def bind(self, target: Target, rows: int, context: int) -> None:
        self._rows = {}
        self._paths = frozenset(self.tree_spec.paths) if isinstance(self.tree_spec, StaticTree) else None

    def start(self, rows: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        for row, prompt in zip(rows, prompts, strict=True):
            self._rows[row] = Corpus(self._orders)
            self._rows[row].extend(prompt)

    def propose(self, round: RoundContext) -> DraftTree:
        """N is the size of the round's largest tree; where no row found anything, the root alone."""
        texts = [self._rows[row] for row in round.slots]
        depth = min(round.depth, self.max_depth)
        drafts = [self._draft(text, depth) for text in texts]
        sizes = [1 + len(draft.tokens) for draft in drafts]
        nodes = max(sizes)
        if nodes == 1:
            return DraftTree.root(round.last_tokens)
        if len(drafts) == 1:
            return DraftTree.listed([texts[0].tokens[-1], *drafts[0].tokens], (-1, *drafts[0].parents), round.last_tokens.device)
        tokens: list[int] = []
        parents: list[int] = []
        for text, draft, size in zip(texts, drafts, sizes, strict=True):
            padding = [0] * (nodes - size)
            tokens += [text.tokens[-1], *draft.tokens, *padding]
            parents += [-1, *draft.parents, *padding]
        # One transfer to the device for all three.
        packed, cells = torch.tensor(tokens + parents + sizes, device=round.last_tokens.device), len(tokens)
        return DraftTree.build(packed[:cells].view(-1, nodes), packed[cells : 2 * cells].view(-1, nodes), packed[2 * cells :])

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        for row, told in zip(round.slots, verdict.on_host(tree), strict=True):
            self._rows[row].extend(told.tokens)

    def drop(self, rows: list[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def _draft(self, text: Corpus, depth: int) -> Draft:
        raise NotImplementedError


class Ngram(_Lookup):
    """Prompt lookup (Saxena 2023): the longest n-gram, of `longest` down to `shortest` tokens, that ends the text and occurred before;
    a chain copies what followed its last occurrence, a tree merges what followed the last few.

    factor: tokens copied for each token that the text shares with what came before the last occurrence, LONGEST at most. The longer
    the match the likelier the copy goes on; a single token that occurred before says little of what follows.

    Raises:
        ValueError: lengths that are not 1 <= shortest <= longest, or a factor below 1.
    """

    method = "ngram"

    def __init__(self, shape: TreeSpec = CHAIN, longest: int = 3, shortest: int = 1, factor: float = 2.0) -> None:
        if not 1 <= shortest <= longest or factor < 1:
            raise ValueError(
                f"got n-grams of {shortest} to {longest} tokens, factor {factor}; expected 1 <= shortest <= longest, 1 <= factor"
            )
        super().__init__(shape, range(longest, shortest - 1, -1))
        self.factor = factor

    def _draft(self, text: Corpus, depth: int) -> Draft:
        for order in self._orders:
            places = list(islice(text.places(text.tokens, order), FEW if self.tree_spec.width > 1 else 1))
            if places:
                length = int(self.factor * text.shared(text.tokens, places[0], order))
                runs = [text.run(place, min(depth, length)) for place in places]
                return merge(runs, self.tree_spec, self._paths, self.max_nodes - 1)
        return Draft()


class Suffix(_Lookup):
    """Suffix decoding (Oliaro et al. 2024): for every length at which the end of the text occurred before, the trie of what followed,
    its likeliest nodes kept, as many as min(nodes, factor · length + offset); the draft of the highest score is proposed.

    least: no node of a smaller probability · memory: how many tokens of finished answers to remember, over all rows and calls, the
    oldest answer forgotten first; 0 is none. An answer is remembered with so much of its prompt as a match can reach back. Of equal
    drafts the longer match wins, and the row's own text before memory.

    Raises:
        ValueError: a negative memory or factor, or `least` outside (0, 1].
    """

    method = "suffix"

    def __init__(self, shape: TreeSpec = TREE, memory: int = 0, factor: float = 2.0, offset: float = 2.0, least: float = 0.1) -> None:
        if memory < 0 or factor < 0 or not 0 < least <= 1:
            raise ValueError(
                f"got memory {memory}, factor {factor}, least {least}; expected 0 or more tokens, 0 or more, a probability above 0; correct it"
            )
        super().__init__(shape, ORDERS)
        self.memory, self.factor, self.offset, self.least = memory, factor, offset, least
        self._vocab = -1
        self._finished = Corpus(ORDERS)
        self._answers: dict[int, int] = {}  # by row: where what is remembered begins

    def bind(self, target: Target, rows: int, context: int) -> None:
        super().bind(target, rows, context)
        if target.vocab_size != self._vocab:  # the tokens would mean something else, or nothing
            self._vocab, self._finished = target.vocab_size, Corpus(ORDERS)

    def start(self, rows: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        super().start(rows, prompts, out)
        for row, prompt in zip(rows, prompts, strict=True):
            self._answers[row] = max(0, len(prompt) - LONGEST)

    def drop(self, rows: list[int]) -> None:
        """Remember their answers, and forget old ones to make room. END counts as a token too."""
        for row in rows if self.memory else ():
            tokens = self._rows[row].tokens
            tokens = tokens[max(self._answers[row], len(tokens) - self.memory + 1) :]
            while len(self._finished.tokens) + len(tokens) + 1 > self.memory:
                self._finished.forget()
            self._finished.extend(tokens)
            self._finished.close()
        super().drop(rows)

    def _draft(self, text: Corpus, depth: int) -> Draft:
        best = Draft()
        for source in (text, self._finished):
            found = source.matches(text.tokens, depth)
            for length in sorted({length for length, _ in found}, reverse=True):
                budget = min(self.max_nodes - 1, int(self.factor * length + self.offset))
                if budget <= best.score:
                    break  # a score is at most the number of nodes, and shorter matches have no larger budget
                runs = [run for shared, run in found if shared >= length]
                draft = merge(runs, self.tree_spec, self._paths, budget, self.least)
                if draft.score > best.score:
                    best = draft
        return best
