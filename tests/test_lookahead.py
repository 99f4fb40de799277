"""Lookahead decoding: the window's mask and positions are the paper's, its guesses the target's own, its pool bounded."""

from collections import Counter

import pytest
import torch
from zoo import tiny

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.drafts import Draft
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.lookahead import MOST_KEYS, Lookahead, NgramPool, _add_window
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.models.target import Target

PROMPTS = [[5, 6, 7, 5], [9, 3], [1, 2, 3, 4, 5, 6, 11, 30], [8]]


@pytest.mark.parametrize("window, length", [(1, 1), (4, 3), (7, 4), (2, 6)])
def test_the_window_has_the_papers_mask_and_positions(window, length):
    """Token l of column j sees the root, the first tokens of columns 0 … j, and its own column up to itself; it is l + j + 1 positions on."""
    columns = [[100 * column + level + 1 for level in range(length)] for column in range(window)]
    draft = Draft([7], [0])  # a node of the verification branch, which sees and is seen by none of them
    ends = _add_window(draft, columns, window + length)
    tree = DraftTree.build(torch.tensor([[0, *draft.tokens]]), torch.tensor([[-1, *draft.parents]]), torch.tensor([2 + window * length]))
    tree.validate()
    visible, depth = tree.visible()[0], tree.depth[0].tolist()
    node = {token: index + 1 for index, token in enumerate(draft.tokens)}
    for column in range(window):
        for level in range(length):
            at = node[columns[column][level]]
            seen = (
                {0}
                | {node[columns[other][0]] for other in range(column + 1)}
                | {node[columns[column][other]] for other in range(level + 1)}
            )
            assert set(visible[at].nonzero()[:, 0].tolist()) == seen and depth[at] == level + column + 1
        assert ends[column] == node[columns[column][-1]]
    assert visible[1].tolist() == [True, True] + [False] * (window * length)


def test_equal_paths_are_the_same_nodes_and_a_window_is_cut_at_the_depth():
    draft = Draft([1, 2, 9], [0, 1, 0])
    ends = _add_window(draft, [[1, 2], [2, 5], [4, 4]], 3)
    assert draft.tokens == [1, 2, 9, 4, 5] and draft.parents == [0, 1, 0, 2, 2]
    assert ends == {0: 2, 1: 5}  # the third column ends at depth 4


class Checked(Lookahead):
    """Compares each new guess with a forward over the path that the column stands for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.reference, self.seen = Target.wrap(tiny("llama")), Counter()

    def propose(self, round):
        tree = super().propose(round)
        tree.validate()
        assert tree.tokens.shape[1] <= self.max_nodes and int(tree.depth.max()) <= min(round.depth, self.max_depth)
        rows = list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.size.tolist(), strict=True))
        for tokens, parents, size in rows:
            assert len(set(zip(parents[1:size], tokens[1:size], strict=True))) == size - 1, "siblings carry different tokens"
        return tree

    def accept(self, round, tree, verdict, out):
        before = {slot: (list(self._texts[slot]), [list(column) for column in self._columns[slot]]) for slot in round.slots}
        ends = {slot: dict(self._ends.get(slot, {})) for slot in round.slots}
        super().accept(round, tree, verdict, out)
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            text, columns = before[slot]
            assert self._texts[slot] == text + result.tokens
            passed = (len(result.tokens) - 1) % self.window
            now = self._columns[slot][self.window - passed :] + self._columns[slot][: self.window - passed]
            for number, column in enumerate(columns):
                if number not in ends[slot]:
                    assert now[number] == column
                    self.seen["cut"] += 1
                    continue
                path = text + [other[0] for other in columns[:number]] + column
                best = self.reference.logits(self.reference.forward(torch.tensor([path])).hidden)[0, -1].argmax()
                assert now[number] == [*column[1:], int(best)]
                assert now[number] in self._pools[slot].after(column[0]) or len(self._pools[slot].after(column[0])) == self.guesses
                self.seen["guessed"] += 1
            self.seen[result.length - 1] += 1


@pytest.mark.parametrize(
    "tree, window, depth", [(DynamicTree(3, 3, 10), 4, None), (StaticTree.chain(2), 3, 3), (StaticTree.cartesian((2, 1)), 1, None)]
)
def test_its_guesses_are_the_targets_best_tokens(tree, window, depth):
    target = Target.wrap(tiny("llama"))
    plain = [answer.tokens for answer in Decoder(target).generate(PROMPTS, max_new_tokens=16, stop_ids=())]
    for slots in (1, 3):
        drafter = Checked(tree, window)
        decoder = Decoder(target, drafter, slots=slots, chunk=3)
        if depth:
            decoder.adaptive = Fixed(depth)
        assert [answer.tokens for answer in decoder.generate(PROMPTS, max_new_tokens=16, stop_ids=())] == plain
        assert drafter.seen["guessed"] >= 30 and drafter.seen[0] >= 3 and sum(drafter.seen[count] for count in range(1, 9)) >= 5
        assert bool(drafter.seen["cut"]) == bool(depth)
        assert drafter._texts == drafter._pools == drafter._columns == {}


class Fixed:
    """An adaptive depth that is plain decoding in every fourth round, and one depth in the others."""

    def __init__(self, depth):
        self.chosen, self.rounds = depth, 0

    def bind(self, max_depth):
        pass

    def depth(self, slots):
        self.rounds += 1
        return self.chosen if self.rounds % 4 else 0

    def learn(self, slots, results, seconds):
        pass

    def drop(self, slots):
        pass


def test_what_is_accepted_depends_on_the_request_alone():
    target = Target.wrap(tiny("llama"))
    for sampling in (Sampling(), Sampling(0.8, seed=4)):
        alone, batch = (Decoder(target, Lookahead(), slots=slots).generate(PROMPTS, sampling, 20, ()) for slots in (1, 4))
        assert [[round.accepted for round in answer.rounds] for answer in alone] == [
            [round.accepted for round in answer.rounds] for answer in batch
        ]


def test_a_pool_keeps_the_last_ngrams():
    pool = NgramPool(2)
    for tail in ([1, 1], [2, 2], [1, 1], [3, 3]):
        pool.add([9, *tail])
    assert pool.after(9) == [[3, 3], [1, 1]] and pool.after(8) == []
    for first in range(10, 10 + MOST_KEYS):
        pool.add([first, 0, 0])
    assert pool.after(9) == [] and pool.after(10) == [[0, 0]] and len(pool._tails) == MOST_KEYS


def test_a_key_that_comes_again_is_the_last_to_go():
    pool = NgramPool(2)
    for first in (*range(MOST_KEYS), 0, MOST_KEYS):
        pool.add([first, 5, 5])
    assert pool.after(0) == [[5, 5]] and pool.after(1) == [] and len(pool._tails) == MOST_KEYS


@pytest.mark.parametrize("length", [3, 9, 40])
def test_windows_begin_evenly_spaced_along_the_prompt(length):
    target, prompt = Target.wrap(tiny("llama")), list(range(1, length + 1))
    drafter = Lookahead(window=4)
    drafter.bind(target, 1, 64)
    drafter.start([0], [prompt], TargetOutput(torch.zeros(1, length, 32)))
    assert [column[0] for column in drafter._columns[0]] == [1 + length * column // 4 for column in range(4)]


def test_arguments_are_checked():
    for window, guesses in ((0, 7), (7, 0)):
        with pytest.raises(ValueError, match=f"window of {window} and {guesses} guesses"):
            Lookahead(window=window, guesses=guesses)
