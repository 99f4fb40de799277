"""Token recycling: its table against the target's own logits, its trees against all paths of the table."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from zoo import VOCAB, tiny

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafts import tree_of_successors
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.recycling import TREE, Recycling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target

PROMPTS = [[5, 6, 7, 5], [9, 3], [1, 2, 3, 4, 5, 6, 11, 30], [8]]


class Checked(Recycling):
    """Compares what it learns of each committed token with a forward over its complete text."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.reference, self.checked = Target.wrap(tiny("llama")), 0

    def accept(self, round, tree, verdict, out):
        before = {slot: list(self._texts[slot]) for slot in round.slots}
        super().accept(round, tree, verdict, out)
        nodes = tree.tokens[:, : int(tree.size.max())].tolist()
        for row, slot in enumerate(round.slots):
            path = [node for node in verdict.path[row].tolist() if node >= 0]
            text = before[slot] + [nodes[row][node] for node in path[1:]]
            last = max((row, node) for row in range(len(nodes)) for node in range(int(tree.size[row])) if nodes[row][node] == text[-1])
            if last == (row, path[-1]):  # no later node of the round has the same token
                logits = self.reference.logits(self.reference.forward(torch.tensor([text])).hidden)[0, -1]
                assert [token for token, _ in self._successors(text[-1])] == logits.topk(self.successors).indices.tolist()
                shares = torch.tensor([share for _, share in self._successors(text[-1])])
                assert torch.allclose(shares, logits.topk(self.successors).values.softmax(-1), atol=1e-4)
                self.checked += 1


@pytest.mark.parametrize("slots", [1, 3])
def test_its_table_has_the_targets_likeliest_tokens(target, slots):
    drafter = Checked(StaticTree.cartesian((2, 2)), successors=4)
    out = Decoder(target, drafter, slots=slots, chunk=3).generate(PROMPTS, max_new_tokens=12, stop_ids=())
    assert drafter.checked >= 12 and sum(len(answer.tokens) for answer in out) == 48
    assert sum(round.size > 1 for answer in out for round in answer.rounds) >= 8


def test_prompts_fill_the_table_and_the_last_occurrence_counts(target):
    drafter = Recycling(successors=3)
    drafter.bind(target, 1, 50)
    prompt = PROMPTS[0] + PROMPTS[2]
    out = target.forward(torch.tensor([prompt[:-1]]))
    drafter.start([0], [prompt], out)
    best = target.logits(out.hidden)[0].topk(3).indices.tolist()
    for token in range(VOCAB):
        where = [index for index, other in enumerate(prompt[:-1]) if other == token]
        assert [successor for successor, _ in drafter._successors(token)] == (best[where[-1]] if where else [])


def test_the_table_outlives_requests_but_not_the_vocabulary(target):
    drafter = Recycling(successors=2)
    decoder = Decoder(target, drafter)
    rounds = [len(decoder.generate(PROMPTS[:1], max_new_tokens=30, stop_ids=())[0].rounds) for _ in range(2)]
    assert rounds[1] < rounds[0]
    assert drafter._ids.shape == drafter._shares.shape == (VOCAB, 2)
    drafter.bind(SimpleNamespace(vocab_size=VOCAB + 8), 1, 50)
    assert drafter._ids.shape == (VOCAB + 8, 2) and int(drafter._ids.max()) == -1


@pytest.mark.parametrize("tree", [TREE, StaticTree.chain(3), StaticTree.from_paths([(1,), (1, 0), (1, 0, 1)]), DynamicTree(3, 2, 7)])
def test_a_tree_of_successors_has_the_likeliest_paths(tree):
    generator = torch.Generator().manual_seed(2)
    shares = torch.rand(6, 3, generator=generator).softmax(-1).sort(-1, descending=True).values.tolist()
    table = {token: list(zip([(token + step) % 6 for step in (1, 2, 3)], shares[token], strict=True)) for token in range(5)}
    table[5] = []  # nothing is known of it
    paths = None if isinstance(tree, DynamicTree) else frozenset(tree.paths)
    for depth, budget in product((1, 2, 5), (2, 5, tree.num_nodes - 1)):
        expected = {}  # tokens of the path -> its probability
        todo = [((), (0,), 1.0)]
        while todo:
            ranks, tokens, probability = todo.pop()
            for rank, (token, share) in enumerate(table[tokens[-1]][: tree.width] if len(ranks) < min(depth, tree.max_depth) else []):
                if paths is None or (*ranks, rank) in paths:
                    expected[(*tokens[1:], token)] = probability * share
                    todo.append(((*ranks, rank), (*tokens, token), probability * share))
        draft = tree_of_successors(0, lambda token: table[token], tree, paths, budget, min(depth, tree.max_depth))
        nodes = [()]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            nodes.append((*nodes[parent], token))
        likeliest = sorted(expected.values(), reverse=True)[:budget]
        assert len(set(nodes)) == len(nodes) and sorted((expected[node] for node in nodes[1:]), reverse=True) == pytest.approx(likeliest)
        assert draft.score == pytest.approx(sum(likeliest))


def test_the_default_tree_and_arguments():
    assert TREE.num_nodes == 32 and (TREE.max_depth, TREE.width) == (5, 5)
    with pytest.raises(ValueError, match="got 0 successors"):
        Recycling(successors=0)
