"""The verify rule: the walk against a plain descent, exact distributions by enumeration, planted faults, and no host sync."""

import random
from collections import defaultdict
from itertools import product

import pytest
import torch
from decoding_cases import check_reads
from planting import PlantingDrafter
from watching import Watch
from zoo import VOCAB, tiny

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import NodeOutput, RoundContext
from draftsmith.inference.rules import match
from draftsmith.inference.sampler import Sampling, sample
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import Verdict, judge, verify, walk
from draftsmith.models.target import Target


def by_target_sample(tree: DraftTree, y: torch.Tensor) -> Verdict:
    return judge(tree, match(tree, y), y)


def descend(tokens: list[int], parents: list[int], size: int, y: list[int]) -> list[int]:
    """The rule in words: at a node look for the first child that carries y of the node."""
    path, node = ([0], 0) if size else ([], -1)
    while node >= 0:
        node = next((i for i in range(1, size) if parents[i] == node and tokens[i] == y[node]), -1)
        path += [node] if node >= 0 else []
    return path


def random_tree(rng: random.Random, nodes: int, vocab: int) -> tuple[list[int], list[int], int]:
    """Few tokens, so that siblings are often equal; padding that would match if it were read."""
    size = rng.choice((0, 1, nodes, nodes, rng.randint(0, nodes)))
    parents = [-1] + [rng.randint(max(0, i - 3), i - 1) if i < size else rng.choice((0, 0, -1)) for i in range(1, nodes)]
    return [rng.randrange(vocab) for _ in range(nodes)], parents, size


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 16, 65])
def test_walk_equals_descent(nodes):
    rng = random.Random(nodes)
    rows = 400
    tokens, parents, sizes = (list(column) for column in zip(*(random_tree(rng, nodes, 2) for _ in range(rows)), strict=True))
    y = [[rng.randrange(2) for _ in range(nodes)] for _ in range(rows)]
    tree = DraftTree.build(torch.tensor(tokens), torch.tensor(parents), torch.tensor(sizes))
    path, length = walk(tree, match(tree, torch.tensor(y)))
    verdict = by_target_sample(tree, torch.tensor(y))
    assert path.shape == (rows, nodes)
    lengths = set()
    for b in range(rows):
        expected = descend(tokens[b], parents[b], sizes[b], y[b])
        lengths.add(len(expected))
        assert path[b].tolist() == expected + [-1] * (nodes - len(expected)), (tokens[b], parents[b], sizes[b], y[b])
        assert length[b] == len(expected)
        assert not expected or verdict.next_token[b] == y[b][expected[-1]]
    assert lengths >= set(range(min(nodes, 5) + 1))
    deepest = int(tree.depth.max())
    narrow, _ = walk(tree, match(tree, torch.tensor(y)), deepest)
    assert narrow.shape == (rows, min(deepest + 1, nodes)) and torch.equal(narrow, path[:, : narrow.shape[1]])


def distribution(rng: random.Random, vocab: int) -> dict[tuple[int, ...], torch.Tensor]:
    """A target on a tiny vocabulary: p(next | tokens so far), some entries zero."""
    table = {}
    for depth in range(4):
        for context in product(range(vocab), repeat=depth):
            p = torch.tensor([rng.choice((0.0, 1.0, rng.random(), rng.random())) for _ in range(vocab)], dtype=torch.float64)
            p[rng.randrange(vocab)] += 0.1
            table[context] = p / p.sum()
    return table


TREES = [
    [-1],
    [-1, 0],
    [-1, 0, 1, 2],
    [-1, 0, 0, 0],
    [-1, 0, 0, 1, 1, 2],
    [-1, 0, 1, 0, 3, 4],
    [-1, 0, 0, 0, 2, 2],
    [-1, 0, 1, 1, 3, 3],
]


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_joint_distribution_by_enumeration(vocab):
    """All draws y of all nodes, V^N of them, each with its probability: every emitted sequence has the target's probability.

    Float64, no sampling. What is emitted is prefix-free, so this is the joint distribution of all tokens of the round.
    """
    rng = random.Random(vocab)
    duplicates = longest = 0
    for parents in TREES:
        for _ in range(4):
            nodes = len(parents)
            tokens = [rng.randrange(vocab) for _ in range(nodes)]
            duplicates += len(set(zip(parents, tokens, strict=True))) < nodes
            target = distribution(rng, vocab)
            contexts: list[tuple[int, ...]] = [()]
            for i in range(1, nodes):
                contexts.append((*contexts[parents[i]], tokens[i]))
            draws = torch.tensor(list(product(range(vocab), repeat=nodes)))
            weight = torch.ones(len(draws), dtype=torch.float64)
            for i in range(nodes):
                weight = weight * target[contexts[i]][draws[:, i]]
            count = len(draws)
            tree = DraftTree.build(
                torch.tensor(tokens).expand(count, -1), torch.tensor(parents).expand(count, -1), torch.full((count,), nodes)
            )
            verdict = by_target_sample(tree, draws)
            emitted: dict[tuple[int, ...], float] = defaultdict(float)
            for path, length, last, chance in zip(
                verdict.path.tolist(), verdict.length.tolist(), verdict.next_token.tolist(), weight.tolist(), strict=True
            ):
                emitted[tuple(tokens[node] for node in path[1:length]) + (last,)] += chance
            for sequence, chance in emitted.items():
                expected = 1.0
                for k, token in enumerate(sequence):
                    expected *= float(target[sequence[:k]][token])
                assert abs(chance - expected) < 1e-12, (parents, tokens, sequence)
                longest = max(longest, len(sequence))
            assert abs(sum(emitted.values()) - 1) < 1e-12
    assert duplicates >= 3 and longest == 4


def test_verify_draws_by_position():
    """y of a node is what plain sampling draws at its position; siblings share noise; a width of 3 words works as one."""
    rng, rows, nodes, vocab = random.Random(1), 3, 70, 9
    tokens, parents, _ = (list(column) for column in zip(*(random_tree(rng, nodes, vocab) for _ in range(rows)), strict=True))
    parents = [[-1] + [max(0, parent) for parent in row[1:]] for row in parents]
    tree = DraftTree.build(torch.tensor(tokens), torch.tensor(parents), torch.full((rows,), nodes))
    logits = torch.randn(rows, nodes, vocab, generator=torch.Generator().manual_seed(0))
    request, position = torch.tensor([4, 0, 9]), torch.tensor([100, 0, 7])
    for how in (Sampling(), Sampling(0.8, top_k=5, seed=3)):
        y = [[int(sample(logits[b, i], how, request[b], position[b] + tree.depth[b, i] + 1)) for i in range(nodes)] for b in range(rows)]
        verdict, expected = verify(tree, logits, how, request, position), by_target_sample(tree, torch.tensor(y))
        for name in ("path", "length", "next_token"):
            assert torch.equal(getattr(verdict, name), getattr(expected, name))
        assert torch.equal(verify(tree, logits, how, request, position, int(tree.depth.max())).length, expected.length)


class Guesser:
    """A drafter that stays on the device: a fixed tree of fixed tokens."""

    capturable = True
    taps: tuple[int, ...] = ()

    def __init__(self, top: StaticTree) -> None:
        self.top, self.max_nodes, self.max_depth = top, top.num_nodes, top.max_depth

    def bind(self, target: Target, slots: int, context: int) -> None:
        self.children = torch.arange(slots * self.max_depth * 3).view(slots, self.max_depth, 3) % VOCAB

    def start(self, slots: list[int], prompts: list[list[int]], out: NodeOutput) -> None: ...

    def propose(self, round: RoundContext) -> DraftTree:
        return self.top.tree(round.last_tokens, self.children.index_select(0, round.slot_index))

    def accept(self, round: RoundContext, tree: DraftTree, verdict: Verdict, out: NodeOutput) -> None: ...

    def drop(self, slots: list[int]) -> None: ...


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("how", [Sampling(), Sampling(0.8, top_k=9, top_p=0.9, min_p=0.01)], ids=["greedy", "sampled"])
def test_one_transfer_per_round(rows, how, monkeypatch):
    """Nothing reads the device in a round but the one transfer, whose call is counted."""
    prompts = [[1, 2, 3, 4][: 2 + i] for i in range(rows)]
    decoder = Decoder(Target.wrap(tiny("mistral")), Guesser(StaticTree.cartesian([3, 2, 2])), slots=rows)
    check_reads(decoder.stream(prompts, how, 12, ()), 6, monkeypatch)
    with Watch() as watch:
        torch.ones(3)[0].item(), torch.ones(3).nonzero()
    assert watch.syncs == ["aten::_local_scalar_dense", "aten::nonzero"], "the watch sees what it looks for"


def test_idle_rows_are_left_alone():
    tree = StaticTree.chain(2).tree(torch.tensor([1, 2]), torch.tensor([[[3], [4]], [[3], [4]]]))
    tree = DraftTree.build(tree.tokens, tree.parents, torch.tensor([3, 0]))
    verdict = by_target_sample(tree, torch.tensor([[3, 4, 5], [3, 4, 5]]))
    assert verdict.length.tolist() == [3, 0] and verdict.path.tolist() == [[0, 1, 2], [-1, -1, -1]]
    assert PlantingDrafter([[1]], [[2]], VOCAB).max_nodes == 12
