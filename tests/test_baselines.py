"""Ceilings and baselines: by hand, and the replayed drafters against real decoding."""

from dataclasses import replace

import pytest
import torch
from records_by_hand import positions, records, request

from draftsmith.eval import baselines
from draftsmith.eval.baselines import perfect, references, replayed, rounds_within, vocabulary_ceiling
from draftsmith.eval.records import PromptRecord
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree

PROMPTS = [[5, 6, 7, 5, 6], [3, 9, 27, 1], list(range(2, 14)) * 2, [40, 41, 2], [11, 7, 7, 7, 30], [1]]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "make",
    [Ngram, Suffix, lambda: Ngram(DynamicTree(depth=4, width=3, nodes=9)), lambda: Suffix(StaticTree.from_paths([(0,), (1,), (0, 0)]))],
    ids=["ngram", "suffix", "ngram tree", "suffix static"],
)
def test_replayed_rounds_are_those_of_real_decoding(target, make, sampling):
    answers = Decoder(target, make(), slots=2).generate(PROMPTS, sampling, 60, stop_ids=(13,))
    accepted = {round.length for answer in answers for round in answer.rounds}
    assert len(accepted) > 1, "something must have been accepted"
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert [committed for _, committed in make().replay(prompt, answer.tokens)] == [round.length for round in answer.rounds]


def test_a_replay_changes_nothing_in_a_drafter_that_decodes(target):
    def rounds(replay):
        drafter, committed = Suffix(memory=500), []
        for _ in range(2):  # the second time it remembers the first
            answers = Decoder(target, drafter).generate(PROMPTS[:3], Sampling(), 30)
            committed.append([[round.length for round in answer.rounds] for answer in answers])
            if replay:
                drafter.replay(PROMPTS[3], list(range(20)))
        return committed

    assert rounds(True) == rounds(False) and rounds(False)[0] != rounds(False)[1]


def test_a_perfect_drafter_is_cut_by_the_ends_of_texts():
    requests = [request("a", [1] * 9), request("b", [1] * 4), request("c", [1])]
    assert perfect(requests, 3) == {"a": (9, 3), "b": (4, 1), "c": (1, 1)}
    assert perfect(requests, 0) == {"a": (9, 9), "b": (4, 4), "c": (1, 1)}


def test_the_draft_vocabulary_bounds_tau():
    for known, depth, rounds in (
        ([True] * 8, 3, 2),
        ([False] * 5, 3, 5),
        ([True, False, True, True, True, False], 3, 2),  # two tokens, then four: three drafted and the target's own, which may be outside
        ([True, True, True, True, False], 3, 2),
        ([True, False, False, True], 3, 3),
        ([True, True], 0, 2),
    ):
        assert rounds_within(known, depth) == rounds, (known, depth)
    made = records([request("a", [1] * 6), request("b", [1] * 2)])
    made.positions = [
        positions("a", [True, False, True, True, True, False]),
        positions("b", [True, True]),
        positions("other setting", [False], "1"),
        positions("chooses the tree", [False], choosing=True),
    ]
    assert vocabulary_ceiling(made, "0") == (6 / 8, {"a": (6, 2), "b": (2, 1)})
    made.prompts["a"] = PromptRecord("a", [1], logged=True)  # a log's answer is not the target's
    assert vocabulary_ceiling(made, "0") == (1.0, {"b": (2, 1)})
    assert vocabulary_ceiling(records([request("a", [2])]), "0") == (None, {})


def test_the_table_of_references():
    text = [1, 2, 3, 4] * 6
    requests = [request(str(n), [2] * 12, setting=setting, tokens=text) for setting in ("0", "1") for n in range(9)]
    made = records(requests, prompts={str(n): [1, 2, 3, 4, 1] for n in range(9)})
    other = records([request(str(n), [3] * 8, tokens=text) for n in range(1, 12)])
    rows = references(made, {"before": other})
    assert [(row.kind, row.name, row.setting, row.prompts) for row in rows] == [
        ("drafter", "medusa", "0", 9),
        ("ceiling", "perfect drafter, 3 deep", "0", 9),
        ("baseline", "ngram", "0", 9),
        ("baseline", "suffix", "0", 9),
        ("beside", "before", "0", 8),
        ("drafter", "medusa", "1", 9),
        ("ceiling", "perfect drafter, 3 deep", "1", 9),
        ("baseline", "ngram", "1", 9),
        ("baseline", "suffix", "1", 9),
    ]
    by_name = {row.name: row for row in rows[:5]}
    assert (by_name["medusa"].tau, by_name["medusa"].delta) == (2.0, None)
    assert by_name["perfect drafter, 3 deep"].tau == pytest.approx(4) and by_name["before"].delta == pytest.approx(1)
    assert by_name["before"].low == pytest.approx(3) == by_name["before"].high and by_name["before"].delta_low == pytest.approx(1)
    committed = [each for _, each in Ngram().replay([1, 2, 3, 4, 1], text)]
    assert by_name["ngram"].tau == pytest.approx(24 / len(committed)) and sum(committed) == 24 and by_name["ngram"].tau > 4

    lossy = replace(made, requests=[replace(each, setting=each.setting.replace("1", "1 rule=typical")) for each in made.requests])
    assert [row.name for row in references(lossy) if row.kind == "baseline"] == ["ngram", "suffix"]  # greedy answers only
    assert {row.setting for row in references(lossy) if row.kind == "baseline"} == {"0"}
    own = replace(made, header=made.header | {"drafter": {"method": "suffix"}})
    assert [row.name for row in references(own)[:3]] == ["suffix", "perfect drafter, 3 deep", "ngram"]
    assert replayed(Ngram(), records(requests), requests) == {}  # without the prompts' tokens
    made.positions = [positions(str(n), [True, False] * 12) for n in range(9)]
    row = next(row for row in references(made) if "vocabulary" in row.name)
    assert row.name == "the same, within the draft vocabulary (50.0% of the tokens)" and row.tau == pytest.approx(2)
    assert baselines.in_vocabulary(made.positions[0])[:2] == [True, False] and torch.isinf(made.positions[0].log_probs[1, 0])
