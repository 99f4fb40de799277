"""Slices, ranks, calibration and failures, from records made by hand."""

import math
from collections import Counter

import pytest
import torch
from hand_records import PATHS, by_chance, header, position_record, request

from draftsmith.eval import trees
from draftsmith.eval.failures import COPIED, EXAMPLES, IDENTIFIER, NAME, NUMBER, OOV, PUNCTUATION, REST, WHITESPACE, failures, kind_of_text
from draftsmith.eval.intervals import of_difference, of_share
from draftsmith.eval.records import Records
from draftsmith.eval.report import report_of
from draftsmith.eval.round_rows import round_rows
from draftsmith.eval.slices import calibration, ranks_drawn, ranks_formed, slices


def records_of(requests, positions=(), tree=PATHS, depth=2):
    tree = {"tree": tree, "nodes": len(tree) + 1, "depth": depth}
    return Records(header(), tree=tree, requests=list(requests), positions=list(positions), pieces={i: f" w{i}" for i in range(100)})


def by_name(cells):
    return {cell.name: cell for cell in cells}


def test_slices_by_hand():
    # Roots after 60 … 80 tokens: 64 is the first of the second slice. Output positions 0, 3, 4, 6, …
    first = request("a", list(range(12)), [3, 1, 2, 3, 3], language="de", prompt_tokens=61)
    second = request("b", list(range(8)), [1, 3, 1, 3], language="en", prompt_tokens=2000, nodes=3)
    sliced = slices(records_of([first, second]), "0")
    context = by_name(sliced["context"])
    assert list(context) == ["0 – 63", "64 – 127", "1024 – 2047"]
    early = context["0 – 63"]  # roots at 60 and 63; the next is at 64
    assert (early.prompts, early.rounds, early.committed, early.drafted, early.accepted) == (1, 2, 4, 8, 2)
    assert early.tau == 2 and early.accepted_per_drafted == 0.25 and early.low is None
    assert [cell.rounds for cell in sliced["output"]] == [9] and sliced["output"][0].name == "0 – 15"
    assert by_name(sliced["language"])["en"].tau == 2.0 and by_name(sliced["language"])["de"].tau == 12 / 5
    assert sliced["entropy"] == []


def test_slices_add_up_to_the_report():
    records = by_chance(prompts=40)
    total = report_of(records).overall["0"]
    for cells in slices(records, "0").values():
        assert len(cells) > 1
        assert sum(cell.rounds for cell in cells) == total.rounds and sum(cell.committed for cell in cells) == total.tokens
        assert all(cell.low < cell.tau < cell.high for cell in cells if cell.prompts >= 8)


def test_entropy_tiers_are_quarters_of_the_positions_and_need_the_same_text():
    text = list(range(8))
    positions = position_record("a", text, [[0, 0]] * 8, entropy=torch.tensor([0.0, 5, 1, 6, 2, 7, 3, 8]))
    records = records_of([request("a", text, [1, 1, 1, 1, 2, 2])], [positions])
    tiers = {cell.name: cell.rounds for cell in slices(records, "0")["entropy"]}
    assert tiers == {"lowest quarter": 2, "second quarter": 2, "third quarter": 2}  # 0 1 | 2 3 | 5 6
    other = text[:5] + [50, 51, 52]
    rows = list(round_rows(records_of([request("a", other, [1, 1, 1, 1, 2, 2])], [positions]), "0"))
    assert [row.row if row.record else None for row in rows] == [0, 1, 2, 3, None, None]


def test_a_prompt_of_one_token_has_no_row_for_its_first_root():
    text = [5, 6, 7, 8]
    positions = position_record("a", text[1:], [[0, 0]] * 3)
    rows = list(round_rows(records_of([request("a", text, [1, 1, 2], prompt_tokens=1)], [positions]), "0"))
    assert [(row.start, row.row if row.record else None) for row in rows] == [(0, None), (1, 0), (2, 1)]


def test_ranks_formed_count_every_token_of_the_text_once_a_depth():
    ranks = [[0, 1], [3, 0], [9, -1], [-1, 0]]  # the last row's second token is past the end
    record = position_record("a", [1, 2, 3, 4], ranks)
    record.log_probs[2, 1] = -torch.inf  # outside the draft vocabulary
    matrix = ranks_formed(records_of([], [record]), "0")
    assert matrix.count == [4, 3]
    first, second = ({name: share for name, share in zip(matrix.columns, row, strict=True) if share} for row in matrix.share)
    assert first == {"0": 0.25, "3": 0.25, "8 or later": 0.25, "not recorded": 0.25}
    assert second == pytest.approx({"0": 1 / 3, "1": 1 / 3, "OOV": 1 / 3})
    assert ranks_formed(records_of([]), "0") is None
    assert ranks_formed(records_of([], [position_record("a", [1], [[0, 0]], choosing=True)]), "0") is None


def test_ranks_drawn_are_those_of_real_rounds():
    records = by_chance()
    drawn, report = ranks_drawn(records, "0"), report_of(records)
    assert drawn.unknown == 0 and drawn.rounds == report.overall["0"].rounds
    reported = [record for record in records.positions if not record.choosing]
    assert trees.tau(reported, [tuple(path) for path in PATHS]) == pytest.approx(report.overall["0"].tau)
    for depth, survival in enumerate(report.overall["0"].survival, 1):
        reached = sum(share for path, share in zip(PATHS, drawn.accepted, strict=True) if len(path) == depth)
        assert reached == pytest.approx(survival)
    first, second = drawn.matrix.share
    cut = sum(request.rounds[-1].committed == 1 for request in records.requests) / drawn.rounds  # by the end of the text, at most
    assert first[0] == pytest.approx(drawn.accepted[0], abs=cut) and first[1] == pytest.approx(drawn.accepted[2], abs=cut)
    assert sum(first) == pytest.approx(1) and sum(second) == pytest.approx(1)
    assert second[-1] > 0 and first[-1] == 0 and first[-2] > 0  # below rank 1 there are no children


def test_ranks_drawn_are_unknown_where_they_cannot_be_known():
    noisy = "1 rule=shared-noise"  # whose children are not the likeliest tokens
    records = by_chance(settings=("1", noisy))
    assert ranks_drawn(records, "1") is not None and ranks_drawn(records, noisy) is None
    records = by_chance()
    records.tree["tree"] = {"depth": 2, "width": 2, "nodes": 5}
    assert ranks_drawn(records, "0") is None
    records = by_chance()
    records.positions = records.positions[:2]
    assert ranks_drawn(records, "0").unknown == sum(len(request.rounds) for request in records.requests[1:]) > 0


def test_calibration_by_hand():
    text = list(range(40))
    right = [[0 if s % 2 else 1] for s in range(40)]

    def entry(confidence):
        log_probs = torch.tensor([[math.log(confidence[s % 2])] for s in range(40)])
        (result,) = calibration(records_of([], [position_record("a", text, right, drafted_log_probs=log_probs)]), "0")
        return result

    constant = entry((0.9, 0.9))
    assert (constant.positions, constant.right) == (40, 0.5) and constant.confidence == pytest.approx(0.9)
    assert constant.error == pytest.approx(0.4) == constant.excess and constant.low is None
    perfect = entry((1e-9, 1.0))
    assert perfect.error == pytest.approx(0, abs=1e-6) and [point.right for point in perfect.bins] == [0] * 5 + [1] * 5
    assert [point.positions for point in perfect.bins] == [4] * 10
    reverse = entry((1.0, 1e-9))
    assert reverse.error == pytest.approx(1, abs=1e-6) and reverse.excess == pytest.approx(0, abs=1e-6)


def test_calibration_of_many_prompts_has_an_interval_and_no_row_past_the_end():
    entries = calibration(by_chance(), "0")
    assert [entry.positions for entry in entries] == [12 * 40, 12 * 39, 12 * 38]
    assert all(entry.low < entry.excess < entry.high for entry in entries)
    assert entries[0].right == ranks_formed(by_chance(), "0").share[0][0]


def test_turns_of_a_conversation_are_one_prompt_to_the_calibration():
    text, right = list(range(40)), [[s % 3 > 0] for s in range(40)]
    log_probs = torch.full((40, 1), math.log(0.6))

    def low(names):
        records = [position_record(name, text, right, drafted_log_probs=log_probs) for name in names]
        (entry,) = calibration(records_of([], records), "0")
        assert entry.positions == 40 * len(names)
        return entry.low

    assert low([f"c{n}" for n in range(8)]) is not None
    assert low([name for n in range(4) for name in (f"c{n}", f"c{n}#2")]) is None  # four conversations are too few


def test_a_share_has_the_interval_of_a_difference_from_nothing():
    count = torch.tensor([20, 30, 25, 40, 10, 35, 22, 28, 31])
    hits = torch.tensor([10, 9, 12, 20, 7, 14, 9, 15, 12])
    expected = of_difference(torch.stack((0 * hits, hits)), torch.stack((count, count)))
    assert of_share(hits, count) == pytest.approx(expected)
    assert of_share(0 * hits, count) == pytest.approx((0, 0, 1 - 0.05 ** (1 / 9))), "no spread: the bound by probability"
    few = of_share(torch.tensor([0] * 8 + [1]), count)
    assert few.low == 0 and 0 < few.estimate < few.high < 0.2


KINDS = [
    ("\n\n", "a", "b", WHITESPACE),
    ("),", "f(x", " y", PUNCTUATION),
    (" 42", "is", ".", NUMBER),
    ("7", "3.1", " m", NUMBER),
    ("th", "the 19", " century", REST),
    ("name", "self.", " = 1", IDENTIFIER),
    ("_of", "rank", "_x", IDENTIFIER),
    ("Width", "max", " = 3", IDENTIFIER),
    (" print", "\n", "(x)", IDENTIFIER),
    (" numpy", "import", ".linalg", IDENTIFIER),
    (" Ada", "by", " wrote", NAME),
    ("a", "by Ad", " wrote", NAME),
    (" Ünal", "von", ".", NAME),
    (" The", "It ended.", " end", REST),
    ("The", "", " end", REST),
    (" I", "and", " went", REST),
    (" went", "and", ". Next", REST),
    ("ing", "walk", " on", REST),
]


@pytest.mark.parametrize("token, before, after, kind", KINDS)
def test_kinds_of_tokens(token, before, after, kind):
    assert kind_of_text(token, before, after) == kind


def test_lost_tokens_by_hand():
    # Rounds at 0, 1, 4, 5: the first lost 2 of depth 2, the second none, the third 2, the last is cut to the one token that is left.
    text = [10, 11, 12, 13, 14, 15]
    ranks = [[2, 0], [0, 0], [0, 0], [0, 0], [-1, 0], [0, 0]]
    record = position_record("a", text, ranks)
    record.log_probs[4, 0] = -torch.inf  # outside the draft vocabulary
    result = failures(records_of([request("a", text, [1, 3, 1, 1])], [record]), "0")
    assert (result.depth, result.rounds, result.lost) == (2, 2, 3)  # of the third, one token more was left
    kinds = by_name(result.kinds)
    assert {name: (kind.rounds, kind.lost, kind.share) for name, kind in kinds.items()} == {REST: (1, 2, 2 / 3), OOV: (1, 1, 1 / 3)}
    (example,) = kinds[REST].examples
    assert (example.token, example.rank, example.drafted, example.depth, example.lost) == (" w10", 2, " w11", 1, 2)
    assert example.before == "" and example.after == " w11 w12 w13 w14"
    (example,) = kinds[OOV].examples
    assert (example.token, example.rank, example.before) == (" w14", -1, " w10 w11 w12 w13")


def test_a_token_that_repeats_what_stands_in_the_text_is_a_long_copy():
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 7]
    result = failures(records_of([request("a", text, [1] * 12)], depth=1), "0")
    kinds = by_name(result.kinds)
    assert kinds[COPIED].rounds == 1 and kinds[COPIED].examples[0].token == " w5" and kinds[COPIED].examples[0].rank is None
    assert result.rounds == 11  # after the last token a perfect drafter would have added nothing


def test_examples_are_few_and_of_different_prompts():
    records = by_chance()
    result = failures(records, "0")
    assert sum(kind.lost for kind in result.kinds) == result.lost and sum(kind.share for kind in result.kinds) == pytest.approx(1)
    assert [kind.lost for kind in result.kinds] == sorted((kind.lost for kind in result.kinds), reverse=True)
    for kind in result.kinds:
        assert 0 < len(kind.examples) <= EXAMPLES and kind.low <= kind.share <= kind.high
        again = Counter(example.prompt for example in kind.examples)
        assert max(again.values()) == 1 or kind.rounds < 40
        assert kind.examples[0].lost == max(example.lost for example in kind.examples)
    expected = sum(
        min(2, 40 - sum(r.committed for r in q.rounds[:i]) - 1) - r.accepted for q in records.requests for i, r in enumerate(q.rounds)
    )
    assert result.lost == expected
