"""Lookahead decoding (Fu et al. 2024): the target guesses n-grams in parallel by Jacobi iteration, in the forward that verifies earlier ones.

The two branches of the paper are one draft tree. The window has W columns of N−1 tokens; token l of column j is a guess for the position
l + j + 1 after the root. In the paper's mask it sees the first tokens of columns 0 … j and the tokens before it in its own column. Those are
its ancestors if the first tokens are a chain under the root and each column hangs from its first token, and its depth there is l + j + 1:
position_ids and mask of the paper are those of a tree.

    root ─ a0 ─ b0 ─ c0 ─ d0         columns a, b, c, d, and N−1 = 4; the target's best token after a3, b3, c3, d3
           │    │    │    │          ends an n-gram of N tokens, which is added to the pool
           a1   b1   c1   d1
           a2   b2   c2   d2
           a3   b3   c3   d3

The n-grams of the pool that begin with the root's token are the verification branch: a trie under the same root. Equal paths of the two
branches are the same nodes. Verification treats all nodes equally, so a token of the window is accepted where it happens to be the target's.
That is the only difference from the paper, and it cannot change the output.

Letters: B rows · N tokens of an n-gram · W columns of the window · G n-grams of the pool with the same first token.
"""

from collections.abc import Sequence

import torch

from draftsmith.inference.drafter import NodeOutput, RoundContext, Target
from draftsmith.inference.drafts import Draft, HostDrafter, merge_continuations
from draftsmith.inference.expand import DynamicTree, TreeSpec
from draftsmith.inference.sampler import best_token
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict

__all__ = ["Lookahead", "NgramPool"]

TREE = DynamicTree(depth=4, width=7, nodes=29)  # N = 5, and all of G = 7 n-grams
MOST_KEYS = 1 << 14  # first tokens of a pool


class NgramPool:
    """The last G n-grams of each first token, for the MOST_KEYS first tokens that were added last.

    Args:
        size: G.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # ordered: the last one added comes last

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or make it the last one added."""
        first, tail = ngram[0], tuple(ngram[1:])
        tails = self._tails.pop(first, {})
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.size:
            del tails[next(iter(tails))]
        self._tails[first] = tails
        if len(self._tails) > MOST_KEYS:
            del self._tails[next(iter(self._tails))]

    def after(self, token: int) -> list[list[int]]:
        """The other tokens of the n-grams that begin with `token`, the last one added first."""
        return [list(tail) for tail in reversed(self._tails.get(token, {}))]


class Lookahead(HostDrafter):
    """Drafts the n-grams of a pool, and lets the target guess new ones in the same forward.

    Pool and window are a request's own, so that what is accepted does not depend on other requests. The prompt's and the answer's own
    n-grams are in the pool too. The window begins with pieces of the prompt.

    Args:
        tree_spec: of the verification branch; N is one more than its depth. The window comes on top of it.
        window: W.
        guesses: G.

    Raises:
        ValueError: a window or a pool of less than one.
    """

    method = "lookahead"
    depth_limit = 32

    def __init__(self, tree_spec: TreeSpec = TREE, window: int = 7, guesses: int = 7) -> None:
        if window < 1 or guesses < 1:
            raise ValueError(f"got a window of {window} and {guesses} guesses; expected 1 or more of each; correct it")
        super().__init__(tree_spec)
        self.window, self.guesses = window, guesses
        self._pools: dict[int, NgramPool] = {}  # by slot, as the others
        self._columns: dict[int, list[list[int]]] = {}
        self._ends: dict[int, dict[int, int]] = {}  # of the proposed tree: the node of the last token of each column that is in it
        self._drafted_ends: dict[int, dict[int, int]] = {}  # the same of the last draft, which a hybrid may not propose

    @property
    def max_nodes(self) -> int:
        return self.tree_spec.num_nodes + self.window * self.tree_spec.max_depth

    @property
    def max_depth(self) -> int:
        return self.window - 1 + self.tree_spec.max_depth

    def bind(self, target: Target, slots: int, context: int) -> None:
        super().bind(target, slots, context)
        self._target = target
        self._pools, self._columns, self._ends, self._drafted_ends = {}, {}, {}, {}

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None:
        super().start(slots, prompts, out)
        length = self.tree_spec.max_depth
        for slot, prompt in zip(slots, prompts, strict=True):
            self._pools[slot] = NgramPool(self.guesses)
            self._add_text(slot, 0)
            firsts = [len(prompt) * column // self.window for column in range(self.window)]
            self._columns[slot] = [[prompt[(first + index) % len(prompt)] for index in range(length)] for first in firsts]

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None:
        """Add the new n-grams to the pools, and move the windows on."""
        new = self._new_tokens(round.slots, out)
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            columns, known = self._columns[slot], len(self._texts[slot])
            for column, token in new.get(slot, {}).items():
                self._pools[slot].add([*columns[column], token])
                columns[column] = [*columns[column][1:], token]
            self._texts[slot] += result.tokens
            self._add_text(slot, known)
            # Each column lost its first token, so it is right for the next position. Of more positions the first columns have passed.
            passed = (len(result.tokens) - 1) % self.window
            self._columns[slot] = columns[passed:] + columns[:passed]
        self._ends = {}

    def _new_tokens(self, slots: list[int], out: NodeOutput) -> dict[int, dict[int, int]]:
        """The target's best token after each column of the round's trees, by slot and column."""
        cells = [(row, slot, column, node) for row, slot in enumerate(slots) for column, node in self._ends.get(slot, {}).items()]
        if not cells:
            return {}
        rows, nodes = (torch.tensor(values, device=out.hidden.device) for values in ([c[0] for c in cells], [c[3] for c in cells]))
        best = best_token(self._target.logits(out.hidden[rows, nodes])).tolist()
        new: dict[int, dict[int, int]] = {}
        for (_, slot, column, _), token in zip(cells, best, strict=True):
            new.setdefault(slot, {})[column] = token
        return new

    def _add_text(self, slot: int, known: int) -> None:
        """Add the n-grams of the slot's text that end after its first `known` tokens."""
        text, size = self._texts[slot], self.tree_spec.max_depth + 1
        for end in range(max(known + 1, size), len(text) + 1):
            self._pools[slot].add(text[end - size : end])

    def drop(self, slots: list[int]) -> None:
        super().drop(slots)
        for slot in slots:
            for state in (self._pools, self._columns, self._ends, self._drafted_ends):
                state.pop(slot, None)

    def _draft(self, slot: int, depth: int) -> Draft:
        tails = [tail[:depth] for tail in self._pools[slot].after(self._texts[slot][-1])]
        draft = merge_continuations(tails, self.tree_spec, self._paths, self.tree_spec.num_nodes - 1) if tails else Draft()
        self._drafted_ends[slot] = _add_window(draft, self._columns[slot], depth)
        return draft

    def tree_of(self, round: RoundContext, drafts: list[Draft]) -> DraftTree:
        self._ends = {slot: self._drafted_ends[slot] for slot in round.slots}
        return super().tree_of(round, drafts)


def _add_window(draft: Draft, columns: list[list[int]], depth: int) -> dict[int, int]:
    """Add the window to a draft, down to `depth` -> by column the node of its last token, for the columns that are complete."""
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True), 1)}

    def add(parent: int, token: int) -> int:
        if (parent, token) not in children:
            draft.tokens.append(token)
            draft.parents.append(parent)
            children[parent, token] = len(draft.tokens)
        return children[parent, token]

    nodes, ends = [0], dict[int, int]()
    for column in columns[:depth]:
        nodes.append(add(nodes[-1], column[0]))
    for number, (column, node) in enumerate(zip(columns, nodes[1:], strict=False)):
        for token in column[1 : depth - number]:
            node = add(node, token)
        if number + len(column) <= depth:
            ends[number] = node
    return ends
