"""Replays against real decoding: look-ups at any depth, dynamic trees inside a superset, and trees by tensors against a slow reference."""

from dataclasses import replace

import pytest
import torch
from decoding_cases import relative
from eagle_drafters import fit, make
from records_by_hand import records, request

from draftsmith.data.prompts import Prompt
from draftsmith.eval import replay, trees
from draftsmith.eval.answers import EncodedPrompt
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.records import PositionRecord
from draftsmith.eval.supersets import record_supersets
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.self_speculation import early_exit
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter

COUNT = 28
SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.7, top_k=6, seed=3)}


class FixedDepth(AdaptiveDepth):
    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed

    def depth(self, slots):
        return self.fixed

    def learn(self, slots, results, seconds):
        pass


def repetitive(target, prompts=4):
    """Prompts that repeat themselves, so that look-ups match."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for length in range(6, 6 + prompts):
        part = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
        made.append(part + part[: length // 2] + part)
    return made


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [lambda: Ngram(StaticTree.chain(6)), lambda: Ngram(DynamicTree(5, 3, 12)), Suffix])
def test_look_ups_are_replayed_as_they_decode(target, setting, make):
    sampling, prompts = SETTINGS[setting], repetitive(target)
    plain = Decoder(target).generate(prompts, sampling, COUNT, ())
    texts = {str(i): (prompt, answer.tokens) for i, (prompt, answer) in enumerate(zip(prompts, plain, strict=True))}
    seen = set()
    for depth in (1, 5):
        out = Decoder(target, make(), adaptive=FixedDepth(depth)).generate(prompts, sampling, COUNT, ())
        replayed = replay.lookup_rounds(make(), texts.values(), depth)
        rounds = [each for answer in out for each in answer.rounds]
        assert replayed.rounds.tolist() == [len(answer.rounds) for answer in out]
        assert replayed.tokens.tolist() == [COUNT] * len(prompts) and replayed.depth == depth
        assert replayed.sizes == {size: sum(each.size == size for each in rounds) for size in {each.size for each in rounds}}
        seen |= {each.accepted for each in rounds}
    assert len(seen) >= 4 if setting == "greedy" else len(seen) >= 2


def test_every_second_conversation_chooses_with_all_of_its_turns():
    answers = {"a": [1, 2], "a#2": [1, 2, 1], "b": [3, 4, 3], "c": [5], "c#2": [6, 6], "d#2": [7, 8]}  # d's first turn was not asked
    requests = [request(name, [1] * len(tokens), tokens=tokens) for name, tokens in answers.items()]
    prompts = {name: [1, 2, 3, 1, 2, 3] for name in answers}
    kept = records(requests, depth=4, prompts=prompts, drafter={"method": "lookup", "name": "suffix", "bytes": 0})
    for each in replay.replayed(kept, "0"):
        assert each.choosing.tokens.tolist() == [5, 3] and each.reported.tokens.tolist() == [3, 2], each.tree
    alone = [each for each in requests if each.prompt.startswith("a")]
    assert len(replay.replayed(kept, "0")) > 1 and replay.replayed(replace(kept, requests=alone), "0") == []


@pytest.fixture(scope="module")
def heads(target):
    drafter = new_drafter("medusa", target, num_heads=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # heads that are right now and then
        for k in range(4):
            weight = drafter.output_weight(k)
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return drafter


@pytest.fixture(scope="module")
def eagle(target):
    prompts = repetitive(target, 3)
    answers = [answer.tokens for answer in Decoder(target).generate(prompts, Sampling(), COUNT, ())]
    lines = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return fit(make(target, draft_size=96, num_heads=4, head_dim=8), target, lines).eval()


SUPERSETS = [
    (4, 3, [DynamicTree(3, 3, 8), DynamicTree(4, 3, 12), DynamicTree(2, 3, 5), DynamicTree(4, 3, 40)]),
    (3, 1, [DynamicTree(2, 1, 3)]),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("depth, width, trees", SUPERSETS)
@pytest.mark.parametrize("method", ["medusa", "eagle3", "draft model", "early exit"])
def test_dynamic_trees_are_replayed_inside_their_superset(target, heads, eagle, method, depth, width, trees, setting):
    """As they decode: the same number of rounds for each prompt, for drafters that read their own drafts too."""
    drafters = {
        "medusa": heads,
        "eagle3": eagle,
        "early exit": early_exit(target, 1),
        "draft model": DraftModel(relative("llama"), StaticTree.chain(2)),
    }
    drafter = drafters[method]
    sampling = replace(SETTINGS[setting], rule="target-sample")
    prompts = [EncodedPrompt(Prompt(str(i), "d", ""), ids, i, i) for i, ids in enumerate(repetitive(target, 3))]
    drafter.tree_spec, store = DynamicTree(depth, width, 2), RecordStore()
    with store.opened({"target": {}, "drafter": {}, "settings": {}, "skipped": {}}):
        record_supersets(target, drafter, prompts, sampling, COUNT, store)
        tables = list(store.records().supersets.values())
    assert drafter.tree_spec == DynamicTree(depth, width, 2) and {table.shape for table in tables} == {(COUNT, depth, depth)}
    for tree in trees:
        replayed = replay.dynamic_rounds(tables, tree)
        drafter.tree_spec = tree
        out = Decoder(target, drafter).generate([prompt.ids for prompt in prompts], sampling, COUNT, requests=range(3))
        assert replayed.rounds.tolist() == [len(answer.rounds) for answer in out]
        assert set(replayed.sizes) == {tree.num_nodes}
    assert replayed.rounds.sum() < 3 * COUNT


def slow_rounds(record, paths):
    position, rounds, text = 0, 0, record.ranks.tolist()
    while position < len(text):
        position += 1 + max((len(path) for path in paths if tuple(text[position][: len(path)]) == path), default=0)
        rounds += 1
    return rounds


def test_rounds_by_tensors_are_those_one_by_one():
    generator = torch.Generator().manual_seed(0)
    records = []
    for number, length in enumerate((1, 30, 7, 19)):
        draw = torch.multinomial(torch.tensor([0.5, 0.2, 0.2, 0.1]), 3 * length, True, generator=generator).view(length, 3)
        draw = torch.where(draw == 3, -1, draw)
        records.append(PositionRecord(str(number % 3), "d", draw, draw.float()))  # two texts of one prompt
    table = trees.Positions(records)
    for paths in ([], [(0,)], [(1,), (1, 2)], table.order(12), table.order(30), trees.chain(3)):
        rounds = table.rounds(paths)
        slow = [slow_rounds(record, paths) for record in records]
        assert rounds.rounds.tolist() == [slow[0] + slow[3], slow[1], slow[2]] and rounds.tokens.tolist() == [20, 30, 7]
        assert rounds.sizes == {len(paths) + 1: sum(slow)} and rounds.tau == pytest.approx(57 / sum(slow))
    assert table.rounds(table.order(30)).depth == 3 and len(table.order(30)) > 12


def test_the_best_chain_is_the_best_of_all_lengths():
    generator = torch.Generator().manual_seed(4)
    draw = (torch.rand(300, 5, generator=generator) > 0.7).long()
    candidates = trees.Candidates([PositionRecord("p", "d", draw, draw.float())], 16)
    chosen = set()
    for level in (0.01, 0.3, 0.55, 2.0):
        cost = lambda nodes, depth, level=level: 1 + level * depth  # noqa: E731
        speedups = [candidates.positions.rounds(trees.chain(k)).tau / cost(k + 1, k) for k in range(6)]
        assert candidates.best_chain(cost) == speedups.index(max(speedups))
        chosen.add(candidates.best_chain(cost))
    assert {0, 5} < chosen
