"""The search for layers to leave out: its τ is that of decoding, and it keeps what scores best."""

import json

import pytest
import torch
from conftest import save_byte_target
from decoding_cases import PROMPTS
from zoo import tiny

from draftsmith.eval import skip
from draftsmith.eval.answers import target_texts
from draftsmith.eval.skip import Trial, report_of, rounds, scorer, search
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.self_speculation import SelfSpeculation
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target


def test_the_tau_of_a_trial_is_that_of_decoding():
    target = Target.wrap(tiny("llama"))
    target.stop_ids = frozenset()
    texts = target_texts(target, PROMPTS[2:], Sampling(), 16)
    score = scorer(target, texts, [1.1, 1.2, 1.5], 0.3)
    taus = set()
    for skipped in ([0], [1]):
        for depth in (1, 3):
            drafter = SelfSpeculation(target, skipped, "skip", StaticTree.chain(depth))
            answers = Decoder(target, drafter, slots=3).generate(PROMPTS[2:], max_new_tokens=16, stop_ids=())
            counts = sum(len(answer.rounds) for answer in answers)
            trial = score(frozenset(skipped), depth)
            assert trial.tau == pytest.approx(sum(len(answer.tokens) for answer in answers) / counts)
            assert trial.cost == pytest.approx([1.1, 1.2, 1.5][depth - 1] + depth * 0.7)
            taus.add(trial.tau)
        assert score(frozenset(skipped)).speedup == max(score(frozenset(skipped), depth).speedup for depth in (1, 2, 3))
    assert len(taus) >= 3 and max(taus) > 1.1


def test_rounds_step_over_what_was_accepted():
    assert rounds([3, 0, 0, 0, 0, 2, 0, 0], 3) == 3  # 4 tokens, 1, then 3
    assert rounds([3, 0, 0, 0, 0, 2, 0, 0], 1) == 6  # 2, 1, 1, 1, 2, 1
    assert rounds([0] * 5, 4) == 5


def test_the_search_finds_a_planted_set_and_stops():
    """Of 10 layers 2, 5 and 7 must stay; each of the others saves the same."""
    needed, asked = {2, 5, 7}, []

    def score(skipped):
        asked.append(skipped)
        return Trial(skipped, 1, 1.0 + 0.5 ** len(needed & skipped), 1 + 0.1 * (10 - len(skipped)))

    done = search(10, 60, score, 0)
    assert len(asked) == len(set(asked)) == len(done) <= 60
    assert max(done, key=lambda trial: trial.speedup).skipped == {0, 1, 3, 4, 6, 8, 9}
    assert [trial.skipped for trial in search(10, 7, score, 0)] == [frozenset(range(first, 10)) for first in range(9, 2, -1)]
    assert all(0 < len(trial.skipped) < 3 for trial in search(3, 100, score, 1)), "never none and never all"


def test_random_changes_improve_on_what_single_layers_say():
    """Two layers that only together do no harm: no single one says so."""

    def score(skipped):
        broken = bool({1, 4} & skipped) and not {1, 4} <= skipped
        return Trial(skipped, 1, 1.2 if broken else 2.0 - 0.02 * len(skipped), 1 + 0.1 * (6 - len(skipped)))

    best = max(search(6, 62, score, 0), key=lambda trial: trial.speedup)
    assert len(best.skipped) == 5 or {1, 4} <= best.skipped


def test_a_report_comes_from_the_other_half(target_folder, capsys, tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text(
        "".join(json.dumps({"prompt": text, "domain": "all"}) + "\n" for text in ("for line in", "yield x", "    y = 1", "if"))
    )
    words = ["--target", str(target_folder), "--prompts", str(asked), "--max-new-tokens", "12", "--depth", "2", "--trials", "3"]
    asked.write_text(asked.read_text() + json.dumps({"prompt": "x " * 5000, "domain": "all"}) + "\n")
    skip.main([*words, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["skipped"] == {"all": 1} and "skipped, since prompt and answer exceed" in skip.lines_of(report)[-1]
    assert report["trials"] == 2 and report["texts"] == [2, 2] and report["layers"] == 2
    assert report["best"]["early exit"]["drafter"] == "early-exit:1" and report["best"]["layers"]["drafter"] in ("skip:0", "skip:1")
    for entry in report["best"].values():
        assert 1 <= entry["held_out_tau"] <= entry["depth"] + 1 and entry["cost"] > 1
    target = Target.load(str(target_folder), dtype=torch.float32)
    texts = target_texts(target, [[70, 71], [72, 73, 74]], Sampling(), 8)
    same = report_of(target, [texts[:1], texts[:1]], 2, 2, 0)["best"]["layers"]
    assert same["held_out_tau"] == same["choosing_tau"]


def test_a_target_of_one_layer_is_refused(tmp_path):
    save_byte_target(tmp_path)
    model = Target.load(str(tmp_path), dtype=torch.float32).model
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has one decoder layer, and none can be left out"):
        skip.main(["--target", str(tmp_path)])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--depth", "9"], "--depth 9: expected 1 to 8"),
        (["--trials", "0"], "--trials 0: expected 1 to"),
        (["--limit", "0"], "--limit 0: expected 1 to"),
    ],
)
def test_wrong_words_are_one_line(words, says):
    with pytest.raises(ValueError, match=says):
        skip.main(words)
