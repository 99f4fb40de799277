"""Prompts, samplings, trees and draft models that the tests of decoding share."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from taped import as_on_a_gpu
from torch import Tensor
from watching import Watch
from zoo import VOCAB, tiny

from draftsmith.eval.positions import record_positions
from draftsmith.eval.record_store import RecordStore
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.models.target import Target

LENGTHS = (1, 5, 19, 3, 11)


SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=11)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in LENGTHS]


PROMPTS = make_prompts()


def texts(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


SHAPES = {
    "chain": StaticTree.chain(4),
    "static": StaticTree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 0, 1)]),
    "dynamic": DynamicTree(4, 2, 14),
}


def relative(name: str, noise: float = 0.012, vocab: int = VOCAB) -> Target:
    """The target's weights with noise: a draft model that is often right and often wrong."""
    model = tiny(name)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    if vocab != VOCAB:
        model.resize_token_embeddings(vocab, mean_resizing=False)
    return Target.wrap(model)


def drafted_children(tree: DraftTree, b: int) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens behind the root up to it, its children's tokens) of every node of row b that has children."""
    tokens, parents, paths = tree.tokens[b].tolist(), tree.parents[b].tolist(), [[]]
    for i in range(1, int(tree.size[b])):
        paths.append([*paths[parents[i]], tokens[i]])
    for i, path in enumerate(paths):
        if children := [tokens[j] for j in range(1, len(paths)) if parents[j] == i]:
            yield path, children


class Checked(DraftModel):
    """Compares every tree with a slow reference: a forward over the complete path of every node.

    Args:
        orders: the references' answers by text, which drafters of one model may share; None starts with none.
    """

    def __init__(self, *args, orders=None, **options):
        super().__init__(*args, **options)
        self.orders = {} if orders is None else orders

    def order(self, ids: list[int]) -> list[int]:
        """The tokens after a text, the likeliest first."""
        if tuple(ids) not in self.orders:
            hidden = self.model.forward(torch.tensor([ids])).hidden[0, -1]
            self.orders[tuple(ids)] = self.model.logits(hidden).argsort(descending=True).tolist()
        return self.orders[tuple(ids)]

    def start(self, slots, prompts, out):
        super().start(slots, prompts, out)
        self.texts = getattr(self, "texts", {}) | {slot: list(prompt) for slot, prompt in zip(slots, prompts, strict=True)}
        self.seen = getattr(self, "seen", Counter())

    def propose(self, round):
        pending = [len(self._state.pending[slot]) for slot in round.slots]
        tree = super().propose(round)
        tree.validate()
        for b, slot in enumerate(round.slots):
            assert self.texts[slot][-1] == int(round.last_tokens[b]) and len(self.texts[slot]) == int(round.positions[b]) + 1
            self.seen[f"pending {min(pending[b], 3)}"] += 1
            for path, proposed in drafted_children(tree, b):
                assert proposed == self.order(self.texts[slot] + path)[: len(proposed)], (slot, path)
        return tree

    def accept(self, round, tree, verdict, out):
        super().accept(round, tree, verdict, out)
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            self.texts[slot] += result.tokens
            self.seen[f"accepted {result.length - 1}"] += 1
            self.seen["moved"] += not result.in_place
            self.seen["no draft"] += tree.tokens.shape[1] == 1
            # The cached and the pending tokens are always the complete text.
            assert int(self._state.cache.length[slot]) + len(self._state.pending[slot]) == len(self.texts[slot])


class DepthPattern:
    """In place of AdaptiveDepth: no draft in some rounds, shallower drafts in others."""

    def __init__(self):
        self.round = 0

    def bind(self, max_depth):
        self.max_depth = max_depth

    def drop(self, slots): ...

    def learn(self, slots, results, seconds): ...

    def depth(self, slots):
        self.round += 1
        return [0, self.max_depth, self.max_depth, 0, 0, 2, self.max_depth, 1][self.round % 8]


def check_reads(stream: Iterator, rounds: int, monkeypatch) -> None:
    """After the first round of a stream nothing reads the device but the one transfer of each round."""
    as_on_a_gpu(monkeypatch)
    next(stream)  # prefill and the first round, whose tables are made from host lists
    transfers, plain = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(tensor.shape) or plain(tensor))
    for _ in range(rounds):
        transfers.clear()
        with Watch() as watch:
            steps = next(stream)
        assert not any(step.finished for step in steps)
        assert watch.syncs == [] and len(transfers) == 1 and watch.calls > 50


GREEN, RED = 1e-4, 1e-6


def check_depths(target: Target, drafter: Any, prompts: list[list[int]]) -> None:
    """Check that in rounds of 0, 1, 2, … levels a drafter drafts no deeper, and as deep in some."""
    depths, propose = [], drafter.propose

    class Turns(AdaptiveDepth):
        rounds = 0

        def depth(self, slots: Sequence[int]) -> int:
            self.rounds += 1
            return self.rounds % (self.max_depth + 1)

    def watched(round: RoundContext) -> DraftTree:
        tree = propose(round)
        depths.append((round.depth, int(tree.deepest().max())))
        return tree

    drafter.propose = watched
    try:
        Decoder(target, drafter, slots=2, adaptive=Turns()).generate(prompts, max_new_tokens=30, stop_ids=())
    finally:
        drafter.propose = propose
    assert all(drafted <= asked for asked, drafted in depths), depths
    assert {asked for asked, drafted in depths if drafted == asked} >= {1, 2}, depths


def build_tree(tokens: Tensor, parents: list[int], size: int, replacement: bool) -> DraftTree:
    rows = len(tokens)
    tree = DraftTree.build(tokens, torch.tensor(parents).expand(rows, -1), torch.full((rows,), size))
    tree.replacement = replacement
    return tree


def p_value(observed: Tensor, distribution: Tensor) -> float:
    """Pearson's test of the cells observed [count] against distribution [cells]. Rare cells are merged. An impossible cell gives 0."""
    counts, expected = torch.bincount(observed, minlength=len(distribution)).double(), distribution.double() * len(observed)
    if counts[expected == 0].sum() > 0:
        return 0.0
    cells, rare = [], (0.0, 0.0)
    for cell in sorted(zip(expected.tolist(), counts.tolist(), strict=True)):
        rare = (rare[0] + cell[0], rare[1] + cell[1])
        if rare[0] >= 10:
            cells, rare = [*cells, rare], (0.0, 0.0)
    assert len(cells) >= 2 and len(observed) > 1000
    cells[-1] = (cells[-1][0] + rare[0], cells[-1][1] + rare[1])
    statistic = sum((count - mean) ** 2 / mean for mean, count in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class Spelling:
    """A tokenizer of which only the spelling of a token is asked."""

    chat_template = None

    def decode(self, ids):
        return " ".join(map(str, ids))


def position_records(target, drafter, encoded, sampling, new_tokens):
    """What an evaluation records of a target without a tokenizer."""
    target.tokenizer, store = Spelling(), RecordStore()
    try:
        with store.opened({"target": {}, "drafter": {}, "settings": {}, "skipped": {}}):
            record_positions(target, drafter, encoded, set(), sampling, new_tokens, store)
    finally:
        target.tokenizer = None
    return store.records().positions
