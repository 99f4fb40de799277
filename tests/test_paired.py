"""The sign-flip test against enumeration in fractions; wins; budgets and differences of what is compared."""

import itertools
import json
from fractions import Fraction

import pytest
import torch

from draftsmith.eval import intervals, paired
from draftsmith.eval.intervals import of_difference, of_ratio
from draftsmith.eval.paired import sign_flip, wins
from draftsmith.eval.provenance import budget, differences


def enumerated(tokens, rounds):
    """The p-value, in exact arithmetic."""

    def difference(exchange):
        sides = [[0, 0], [0, 0]]
        for prompt, swapped in enumerate(exchange):
            for drafter in (0, 1):
                side = sides[drafter ^ swapped]
                side[0] += tokens[drafter][prompt]
                side[1] += rounds[drafter][prompt]
        return abs(Fraction(*sides[1]) - Fraction(*sides[0]))

    count = len(tokens[0])
    measured = difference([0] * count)
    assignments = [difference(exchange) >= measured for exchange in itertools.product((0, 1), repeat=count)]
    return Fraction(sum(assignments), len(assignments))


def as_tensors(*columns):
    return [torch.tensor(each, dtype=torch.float64) for each in columns]


@pytest.mark.parametrize("seed", range(6))
def test_p_equals_an_enumeration(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(20, 60, (2, 7), generator=generator)
    if seed % 2:
        tokens[1] = tokens[0]  # the same answers: lossless drafters
    rounds = torch.randint(8, 20, (2, 7), generator=generator)
    rounds[:, 3] = rounds[0, 3]
    if seed == 4:
        rounds[1] = rounds[0] - 3
    expected = enumerated(tokens.tolist(), rounds.tolist())
    assert sign_flip(tokens.double(), rounds.double()) == pytest.approx(float(expected), abs=1e-12)


def test_extreme_p_values():
    tokens, rounds = as_tensors([[60] * 9] * 2, [[30] * 9, [20] * 9])
    assert sign_flip(tokens, rounds) == 2 / 2**9  # all prompts better, or all worse
    assert sign_flip(tokens, rounds[[0, 0]]) == 1.0
    assert sign_flip(*as_tensors([[60], [60]], [[30], [20]])) == 1.0  # one prompt says nothing
    rounds[1, 4:] = 30
    assert sign_flip(tokens, rounds) == 2 / 2**4  # prompts that are equal say nothing


def test_many_prompts_are_sampled_with_a_fixed_seed(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rounds = torch.randint(20, 31, (2, 14), generator=generator).double()
    rounds[0] += 3
    tokens = torch.full((2, 14), 60.0, dtype=torch.float64)
    exact = sign_flip(tokens, rounds)
    assert 0.005 < exact < 0.5
    monkeypatch.setattr(paired, "EXACT", 5)
    sampled = sign_flip(tokens, rounds)
    assert sampled != exact and abs(sampled - exact) < 4 * (exact * (1 - exact) / paired.SAMPLES) ** 0.5
    monkeypatch.setattr(intervals, "MOST_DRAWN", 14 * 1000)
    assert sign_flip(tokens, rounds) == sampled, "in blocks"
    apart = torch.stack((rounds[0] + 100, rounds[0]))
    assert sign_flip(tokens, apart) >= 1 / (paired.SAMPLES + 1) and sign_flip(tokens, apart) < 0.002


def test_under_the_null_p_is_uniform():
    """P(p <= x) <= x for an exact test, and nearly x."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.full((2, 8), 60.0, dtype=torch.float64)
    values = [sign_flip(tokens, torch.randint(10, 60, (2, 8), generator=generator).double()) for _ in range(400)]
    for x in (0.05, 0.2, 0.5):
        share = sum(value <= x for value in values) / len(values)
        assert x - 0.08 < share < x + 0.05, x


def test_intervals_do_not_depend_on_the_order_of_prompts():
    generator = torch.Generator().manual_seed(2)
    tokens, rounds = torch.randint(20, 60, (2, 30), generator=generator), torch.randint(8, 20, (2, 30), generator=generator)
    order = torch.randperm(30, generator=generator)
    assert of_ratio(tokens[0], rounds[0]) == of_ratio(tokens[0, order], rounds[0, order])
    assert of_difference(tokens, rounds) == of_difference(tokens[:, order], rounds[:, order])


def test_wins_are_counted_by_prompt():
    tokens, rounds = as_tensors([[60, 60, 30, 10], [60, 60, 60, 10]], [[30, 20, 15, 7], [20, 30, 30, 6]])
    assert wins(tokens, rounds) == (2, 1, 1)
    assert wins(tokens.flip(0), rounds.flip(0)) == (1, 1, 2)


def test_budgets_of_artifacts(tmp_path):
    run = tmp_path / "run"
    artifact = run / "artifact"
    artifact.mkdir(parents=True)
    assert budget(artifact) == {"training_tokens": None, "hours": None, "bytes": None}
    (artifact / "config.json").write_text(json.dumps({"training": {"tokens": 4096, "steps": 4}}))
    (artifact / "model.safetensors").write_bytes(bytes(100))
    (artifact / "more.safetensors").write_bytes(bytes(20))
    rows = [{"step": 2, "seconds": 900.0}, {"step": 2, "valid_loss": 1.0}, {"step": 5, "seconds": 600.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert budget(artifact) == {"training_tokens": 4096, "hours": pytest.approx(2 * 0.25 + 3 / 6), "bytes": 120}
    (artifact / "config.json").write_text(json.dumps({"draftsmith": {"training": {"tokens": 7}}, "training": {"tokens": 9}}))
    assert budget(artifact)["training_tokens"] == 7
    (artifact / "config.json").write_text('{"training": {"tokens": "many"}}')
    (run / "metrics.jsonl").write_text("no json\n")
    assert budget(artifact) == {"training_tokens": None, "hours": None, "bytes": 120}
    assert budget(None) == {"training_tokens": None, "hours": None, "bytes": None}
    assert budget("suffix") == {"training_tokens": 0, "hours": 0.0, "bytes": 0}


def test_differences_of_headers():
    a = {
        "settings": {"slots": 1, "tree": "best"},
        "machine": {"device": "CPU"},
        "versions": {"torch": "2.11"},
        "drafter": {"method": "m"},
    }
    b = {
        "settings": {"slots": 4, "tree": "saved"},
        "machine": {"device": "CPU"},
        "versions": {"torch": "2.12"},
        "prompts": {"count": 3},
    }
    assert differences({"a": a, "b": b}) == [
        {"what": "settings.slots", "values": {"a": 1, "b": 4}},
        {"what": "versions.torch", "values": {"a": "2.11", "b": "2.12"}},
        {"what": "prompts.count", "values": {"a": None, "b": 3}},
    ]
    assert differences({"a": a, "b": a}) == []


def test_rounding_is_no_win():
    """Expected rounds are sums of probabilities, which two runs of one drafter round differently."""
    tokens, rounds = as_tensors([20, 30, 40], [20, 30, 40]), as_tensors([10.0, 15.0, 16.0], [10.0 + 1e-7, 15.0 - 2e-7, 12.0])
    tokens, rounds = torch.stack(tokens), torch.stack(rounds)
    assert wins(tokens, rounds) == (1, 2, 0) and sign_flip(tokens, rounds) == 1.0
    assert wins(tokens[:, :2], rounds[:, :2]) == (0, 2, 0) and sign_flip(tokens[:, :2], rounds[:, :2]) == 1.0
