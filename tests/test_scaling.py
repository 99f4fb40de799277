"""The fit of τ over training, against numpy's least squares and simulated runs; and the runs that it is fitted to."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from draftsmith.eval.intervals import t_quantile
from draftsmith.train import eagle, medusa, recipe
from draftsmith.train.benchmarks import scaling as benchmark
from draftsmith.train.plan import scaling
from draftsmith.train.plan.memory import GIB, Machine
from draftsmith.train.plan.report import report
from draftsmith.train.plan.scaling import Point
from draftsmith.train.sweep.trial import Result


def tau_of(odds):
    """τ of a chain of 4 where the accepted share of it has these odds."""
    return 1 + 4 * odds / (1 + odds)


def test_the_line_is_numpys_least_squares():
    generator = np.random.default_rng(0)
    tokens = generator.integers(10_000, 10_000_000, 9).tolist()
    odds = 0.01 * np.array(tokens) ** 0.27 * np.exp(generator.normal(0, 0.1, 9))
    taus = tau_of(odds).tolist()
    line = scaling.fit(tokens, taus)
    (slope, offset), covariance = np.polyfit(np.log(tokens), np.log(odds), 1, cov=True)
    assert line.exponent == pytest.approx(slope, abs=1e-9) and line.level - line.exponent * line.center == pytest.approx(offset, abs=1e-9)
    assert line.spread is not None and line.spread**2 / line.width == pytest.approx(covariance[0, 0], rel=1e-9)
    assert scaling.predict(line, 5e6).estimate == pytest.approx(tau_of(math.exp(slope * math.log(5e6) + offset)))
    assert 4.8 < scaling.predict(line, 1e12).estimate < 5


@pytest.mark.parametrize("runs", [3, 5, 14])
def test_intervals_contain_a_further_run(runs):
    generator, inside = np.random.default_rng(1), 0
    tokens = np.geomspace(50_000, 800_000, runs)

    def taus(amounts):
        return tau_of(0.02 * amounts**0.25 * np.exp(generator.normal(0, 0.05, np.shape(amounts))))

    for _ in range(2000):
        tau = scaling.predict(scaling.fit(tokens.tolist(), taus(tokens).tolist()), 2e6)
        inside += tau.low < taus(np.array(2e6)) < tau.high
    assert 0.93 < inside / 2000 < 0.97  # the standard error is 0.005


def test_two_runs_have_no_interval_and_one_has_no_line():
    assert scaling.predict(scaling.fit([1e5, 4e5], [tau_of(0.1), tau_of(0.2)]), 1.6e6) == (pytest.approx(tau_of(0.4)), None, None)
    with pytest.raises(ValueError, match="two lengths at least; got 1"):
        scaling.fit([1e5, 1e5], [1.2, 1.4])
    scaling.fit([1e5, 4e5], [1.0, 1.4])  # no draft accepted
    scaling.fit([1e5, 4e5], [1.4, 5.0])  # all


def test_students_quantiles_fall_to_the_normals():
    quantiles = [t_quantile(freedom) for freedom in range(1, 200)]
    assert quantiles == sorted(quantiles, reverse=True) and quantiles[-1] == pytest.approx(1.972, abs=0.005)
    assert t_quantile(11) == pytest.approx(2.201, abs=0.03) and t_quantile(29) == pytest.approx(2.045, abs=0.03)


def test_where_one_overtakes_another():
    steep, flat = scaling.fit([1e5, 1e6], [1.1, 1.4]), scaling.fit([1e5, 1e6], [1.2, 1.4])
    assert scaling.crossing(steep, flat) == pytest.approx(1e6) and scaling.crossing(flat, steep) == pytest.approx(1e6)
    assert scaling.crossing(steep, steep) is None
    assert scaling.crossing(scaling.fit([1e5, 1e6], [1.100, 1.41]), scaling.fit([1e5, 1e6], [1.5, 3.0])) is None  # far beyond both


def points(slopes):
    return [
        Point(method, "tiny", tokens, tokens / 1000, tau_of(0.1 * (tokens / 1e5) ** slope))
        for method, slope in slopes.items()
        for tokens in (50_000, 100_000, 200_000)
    ]


def test_the_table_and_the_picture(tmp_path):
    measured = points({"eagle-1": 0.3, "eagle-3": 0.5})
    text = benchmark.table(measured)
    assert "| 100,000 tokens | 1.36 (100 s) | 1.36 (100 s) |" in text and "| (τ − 1) / (5 − τ) rises as | n^0.30 | n^0.50 |" in text
    assert (
        "- By training tokens, eagle-3 overtakes eagle-1 at about 100,000.\n- By seconds of training, eagle-3 overtakes eagle-1 at about 100.\n"
        in text
    )
    benchmark.draw(measured, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_the_runs_have_the_tokens_and_their_own_schedules(tmp_path):
    trained = benchmark.runs_of(tmp_path, ["medusa:medusa-tiny", "eagle:eagle1-tiny"], ["train.tau_tokens=8"], [200_000, 50_000], [0, 1])
    assert [(each.method, each.target, each.run.tokens) for each in trained] == [
        *[("medusa", "tiny", 49_152)] * 2, *[("eagle-1", "tiny", 49_152)] * 2, *[("medusa", "tiny", 199_680)] * 2, *[("eagle-1", "tiny", 199_680)] * 2
    ]  # fmt: skip
    for each in trained:
        script, name, *words = each.run.words
        module = {"medusa": medusa.MedusaRecipe, "eagle": eagle.EagleRecipe}[script]
        read = recipe.load(module, name, words)
        assert read.train.steps == each.run.steps == read.train.eval_every == each.run.tokens // 1024
        assert read.train.warmup_steps == -(-{"medusa": 20, "eagle": 30}[script] * each.run.steps // 700)
        assert (read.tree.width, read.tree.depth, read.train.tau_prompts, read.train.tau_tokens) == (1, 4, 4, 8)
    assert len({each.run.folder for each in trained}) == 8


def test_finished_runs_are_not_trained_again(tmp_path, monkeypatch, capsys):
    asked = []

    def run_all(runs, devices, jobs, record, progress):
        for run in runs:
            asked.append(run.name)
            record(run, Result(1 + run.tokens / 1e6, run.steps / 4) if "eagle" not in run.name else Result(None, 0.0, "out of memory"))

    monkeypatch.setattr(benchmark.trial, "run_all", run_all)
    benchmark.main([str(tmp_path / "out"), "medusa:medusa-tiny", "--tokens", "50000,100000"])
    assert "| (τ − 1) / (5 − τ) rises as | n^1.02 |" in capsys.readouterr().out and len(asked) == 2
    written = [Point(**entry) for entry in json.loads((tmp_path / "out" / "scaling.json").read_text())]
    assert [asdict(point) for point in written] == [
        {"method": "medusa", "target": "tiny", "tokens": tokens, "seconds": tokens / 4096, "tau": 1 + tokens / 1e6}
        for tokens in (49_152, 99_328)
    ]
    with pytest.raises(ValueError, match="eagle1-tiny-49152-0 failed: out of memory"):
        benchmark.main([str(tmp_path / "out"), "medusa:medusa-tiny", "eagle:eagle1-tiny", "--tokens", "50000,100000"])
    assert asked[2:] == ["eagle1-tiny-49152-0"]
    with pytest.raises(ValueError, match=r"has runs of medusa-tiny with train.lr 0.006, now 0.001; give the same, or another folder"):
        benchmark.main([str(tmp_path / "out"), "medusa:medusa-tiny", "--tokens", "50000,100000", "train.lr=1e-3"])
    assert len(asked) == 3
    text = tmp_path / "text.txt"
    text.write_text("x = 1\n")
    own = [str(tmp_path / "own"), "medusa:medusa-tiny", "--tokens", "50000,100000", f"data.train={text}"]
    benchmark.main(own)
    text.write_text("x = 2\n")
    with pytest.raises(
        ValueError, match=r"has runs of medusa-tiny with contents of .*text\.txt .*, now .*; give the same, or another folder"
    ):
        benchmark.main(own)


def test_recipes_of_one_method_have_lines_of_their_own(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text((Path(recipe.__file__).parents[1] / "recipes" / "medusa-tiny.yaml").read_text())
    trained = benchmark.runs_of(tmp_path, ["medusa:medusa-tiny", f"medusa:{own}", "eagle:eagle3-tiny"], [], [50_000], [0])
    assert {each.method for each in trained} == {"medusa, medusa-tiny", "medusa, own", "eagle-3"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eagle3-tiny"], "'eagle3-tiny' is not of the form script:recipe"),
        (["eagle:eagle3-tiny", "--tokens", "50000"], "expected two lengths at least"),
        (["eagle:eagle3-tiny", "--tokens", "50000,52000"], "50,000 and 52,000 tokens are too close for a line"),
        (["eagle:eagle3-tiny", "--tokens", "50000,5e5"], "--tokens 50000,5e5: expected distinct integers"),
        (["eagle:eagle3-tiny", "--seeds", "0,0"], "--seeds 0,0: expected distinct integers"),
        (["eagle:eagle3-tiny", "--jobs", "-1"], "--jobs -1: expected 1 to 512"),
        (["eagle:eagle3-tiny", "eagle:eagle3-tiny"], "recipes eagle3-tiny, eagle3-tiny: the runs of two would share a name"),
        (["eagle:eagle3-tiny", "eagle.stpes=3"], "stpes"),
    ],
)
def test_what_is_refused(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        benchmark.main([str(tmp_path / "out"), *words])
    assert not (tmp_path / "out" / "runs").exists()


def test_a_plan_predicts_from_the_shipped_runs(monkeypatch, tmp_path):
    file = tmp_path / "scaling.json"
    measured = [
        *points({"eagle-3": 0.5, "eagle-1": 0.1}),
        Point("eagle-3", "large", 1000, 1.0, 2.0),
        Point("eagle-3", "large", 4000, 1.0, 3.0),
    ]
    file.write_text(json.dumps([asdict(point) for point in measured]))
    monkeypatch.setattr(scaling, "SHIPPED", file)
    plan = report("eagle3-tiny", ["train.steps=800"], Machine(1, 1, 80 * GIB, cpu=True))
    assert list(plan["tau"]) == ["tiny"]  # 409,600 tokens are more than 30 times those of `large`
    assert plan["tau"]["tiny"]["estimate"] == pytest.approx(tau_of(0.1 * 4.096**0.5))
    assert report("medusa-tiny", [], Machine(1, 1, 80 * GIB, cpu=True))["tau"] == {}


def test_the_shipped_runs_are_runs():
    shipped = scaling.read(scaling.SHIPPED)
    assert len(shipped) >= 8 and all(point.tokens > 0 and point.seconds > 0 and 1 <= point.tau <= 5 for point in shipped)
    for name in {(point.method, point.target) for point in shipped}:
        own = [point for point in shipped if (point.method, point.target) == name]
        assert scaling.fit([point.tokens for point in own], [point.tau for point in own]).exponent > 0
