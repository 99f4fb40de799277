"""The fit of τ over training, against weighted draws and simulated runs; and the runs that it is fitted to."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from draftsmith.train import eagle, medusa, recipe
from draftsmith.train.benchmarks import scaling as benchmark
from draftsmith.train.plan import scaling
from draftsmith.train.plan.memory import GIB, Machine
from draftsmith.train.plan.report import report, schema_of
from draftsmith.train.plan.scaling import Point
from draftsmith.train.sweep.plan import module_of
from draftsmith.train.sweep.trial import Result


def tau_of(tokens, start=0.1, ceiling=2.5, exponent=1.0, middle=3e5):
    """τ after a training, by the formula of scaling.py."""
    return 1 + start + (ceiling - start) / (1 + (middle / tokens) ** exponent)


def test_predictions_are_those_of_weighted_draws_from_the_prior():
    """B, A, β, ln h and ln σ drawn, and weighted by their prior and by the likelihood of the runs: another way to the same distribution."""
    tokens, taus, further = [5e4, 1e5, 2e5, 4e5, 1e6, 2e6], [1.3, 1.5, 1.7, 2.3, 2.6, 3.0], 6e6
    generator, count = np.random.default_rng(0), 4_000_000
    ends = np.sort(generator.uniform(0, 4, (2, count)), axis=0)
    exponent = generator.uniform(0.2, 2.5, count)
    middle = generator.uniform(np.log(5e4 / 30), np.log(2e6 * 30), count)
    spread = np.exp(generator.uniform(np.log(0.02), np.log(3), count))
    rise = lambda n: ends[0] + (ends[1] - ends[0]) / (1 + np.exp(exponent * (middle - np.log(n))))  # noqa: E731
    squares = sum((tau - 1 - rise(n)) ** 2 / (tau - 1) + scaling.LEAST_ERROR**2 for n, tau in zip(tokens, taus, strict=True))
    weight = np.exp(-squares / 2 / spread**2) / spread ** len(tokens)
    varied = np.diff([1 / (1 + np.exp(exponent * (middle - np.log(n)))) for n in (tokens[0], tokens[-1])], axis=0)[0]
    weight *= varied  # from flat in B and A to flat in τ at the first and the last run
    predicted = rise(further)
    measured = predicted + spread * np.sqrt(np.maximum(predicted, 0.05)) * generator.normal(0, 1, count)

    def quantile(values, share):
        order = np.argsort(values)
        return 1 + values[order][np.searchsorted(np.cumsum(weight[order]), share * weight.sum())]

    curves = scaling.fit(tokens, taus)
    tau = scaling.predict(curves, further)
    assert tau.estimate == pytest.approx(quantile(predicted, 0.5), abs=0.05)
    assert (tau.low, tau.high) == (pytest.approx(quantile(measured, 0.025), abs=0.08), pytest.approx(quantile(measured, 0.975), abs=0.08))
    assert scaling.ceiling(curves).estimate == pytest.approx(quantile(ends[1], 0.5), abs=0.05)


def test_exact_runs_give_their_curve():
    tokens = np.geomspace(2e4, 5e6, 12).tolist()
    curves = scaling.fit(tokens, [tau_of(n) for n in tokens])
    for n in (1e4, 3e5, 2e7):
        assert scaling.predict(curves, n).estimate == pytest.approx(tau_of(n), abs=0.02)
    assert scaling.ceiling(curves).estimate == pytest.approx(3.5, abs=0.02)


def test_intervals_contain_a_further_run():
    generator, inside, widths, tokens = np.random.default_rng(1), 0, [], np.geomspace(50_000, 3_000_000, 6)
    for _ in range(120):
        start, ceiling = np.sort(generator.uniform(0, 4, 2))
        exponent, middle = generator.uniform(0.2, 2.5), np.exp(generator.uniform(np.log(5e4), np.log(1e7)))

        def measured(amounts, curve=(start, ceiling, exponent, middle)):
            rise = tau_of(amounts, *curve) - 1
            return np.clip(1 + rise + 0.05 * np.sqrt(rise) * generator.normal(0, 1, np.shape(amounts)), 1, 5)

        tau = scaling.predict(scaling.fit(tokens.tolist(), measured(tokens).tolist()), 2e7)
        inside += tau.low <= measured(np.array(2e7)) <= tau.high
        widths.append(tau.high - tau.low)
    assert 0.9 < inside / 120 <= 1  # the standard error is 0.02
    assert np.median(widths) < 1.2  # of 4


def test_what_has_no_curve():
    with pytest.raises(ValueError, match="three lengths at least; got 2"):
        scaling.fit([1e5, 1e5, 2e5], [1.2, 1.4, 1.5])
    with pytest.raises(ValueError, match="no curve between τ = 1 and 5 rises through runs from τ 3 to 1.5; add runs of other lengths"):
        scaling.fit(np.geomspace(1e5, 1e6, 12).tolist(), np.linspace(3, 1.5, 12).tolist())
    assert scaling.predict(scaling.fit([1e5, 4e5, 1e6], [1.0, 1.0, 1.0]), 2e6).low == 1.0  # no draft accepted
    assert scaling.predict(scaling.fit([1e5, 4e5, 1e6], [5.0, 5.0, 5.0]), 2e6).high == 5.0  # all


def curves_of(tokens=(5e4, 1e5, 2e5, 4e5, 8e5, 1.6e6), **curve):
    return scaling.fit(tokens, [tau_of(n, **curve) for n in tokens])


def test_where_one_overtakes_another():
    steep, flat = curves_of(exponent=2.0), curves_of(exponent=1.0)  # both are half-way at 300,000
    assert scaling.overtaken(flat, steep) == pytest.approx(3e5, rel=0.15) and scaling.overtaken(steep, flat) is None
    assert scaling.overtaken(steep, steep) is None
    higher = curves_of(start=0.5, ceiling=3.0)  # ahead from the start
    assert scaling.overtaken(flat, higher) is None and scaling.overtaken(higher, flat) is None


def points(middles):
    return [
        Point(method, "tiny", tokens, tokens / 1000, tau_of(tokens, middle=middle, exponent=2.0 if method == "eagle-3" else 1.0))
        for method, middle in middles.items()
        for tokens in (50_000, 100_000, 200_000, 400_000, 800_000)
    ]


def test_the_table_and_the_picture(tmp_path):
    measured = points({"eagle-1": 3e5, "eagle-3": 3e5})
    text = benchmark.table(measured)
    assert "| 100,000 tokens | 1.70 (100 s) | 1.34 (100 s) |" in text
    interval = r"[34]\.\d\d \([23]\.\d\d – [34]\.\d\d\)"
    assert re.search(rf"\| predicted, 8,000,000 tokens \| {interval} \| {interval} \|\n\| ceiling \| {interval} \| {interval} \|\n", text)
    overtakes = re.findall(r"- By ([a-z ]+), (\S+) overtakes (\S+) at about ([\d,]+)\.", text)
    assert [each[:3] for each in overtakes] == [("training tokens", "eagle-3", "eagle-1"), ("seconds of training", "eagle-3", "eagle-1")]
    assert [int(each[3].replace(",", "")) for each in overtakes] == [pytest.approx(3e5, rel=0.15), pytest.approx(300, rel=0.15)]
    falling = [Point("medusa", "tiny", tokens, tokens / 1000, 3 - tokens / 2e6) for tokens in range(50_000, 800_001, 50_000)]
    text = benchmark.table([*measured, *falling])
    assert (
        " | – |\n| ceiling" in text
        and "- medusa, by seconds of training: no curve between τ = 1 and 5 rises" in text
        and "overtakes" in text
    )
    benchmark.draw([*measured, *falling], tmp_path / "scaling.png")
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
    benchmark.main([str(tmp_path / "out"), "medusa:medusa-tiny", "--tokens", "50000,100000,200000"])
    assert "| 199,680 tokens | 1.20 (49 s) |" in capsys.readouterr().out and len(asked) == 3
    written = [Point(**entry) for entry in json.loads((tmp_path / "out" / "scaling.json").read_text())]
    assert [asdict(point) for point in written] == [
        {"method": "medusa", "target": "tiny", "tokens": tokens, "seconds": tokens / 4096, "tau": 1 + tokens / 1e6}
        for tokens in (49_152, 99_328, 199_680)
    ]
    with pytest.raises(ValueError, match="eagle1-tiny-49152-0 failed: out of memory"):
        benchmark.main([str(tmp_path / "out"), "medusa:medusa-tiny", "eagle:eagle1-tiny", "--tokens", "50000,100000,200000"])
    assert asked[3:] == ["eagle1-tiny-49152-0"]
    with pytest.raises(ValueError, match=r"has runs of medusa-tiny with train.lr 0.006, now 0.001; give the same, or another folder"):
        benchmark.main([str(tmp_path / "out"), "medusa:medusa-tiny", "--tokens", "50000,100000,200000", "train.lr=1e-3"])
    assert len(asked) == 4
    text = tmp_path / "text.txt"
    text.write_text("x = 1\n")
    own = [str(tmp_path / "own"), "medusa:medusa-tiny", "--tokens", "50000,100000,200000", f"data.train={text}"]
    benchmark.main(own)
    text.write_text("x = 2\n")
    with pytest.raises(
        ValueError, match=r"has runs of medusa-tiny with contents of .*text\.txt .*, now .*; give the same, or another folder"
    ):
        benchmark.main(own)


def test_recipes_of_one_method_have_curves_of_their_own(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text((Path(recipe.__file__).parents[1] / "recipes" / "medusa-tiny.yaml").read_text())
    trained = benchmark.runs_of(tmp_path, ["medusa:medusa-tiny", f"medusa:{own}", "eagle:eagle3-tiny"], [], [50_000], [0])
    assert {each.method for each in trained} == {"medusa, medusa-tiny", "medusa, own", "eagle-3"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eagle3-tiny"], "'eagle3-tiny' is not of the form script:recipe"),
        (["eagle:eagle3-tiny", "--tokens", "50000,100000"], "expected three lengths at least"),
        (
            ["eagle:eagle3-tiny", "--tokens", "50000,52000,100000"],
            "lengths of 49,664 and 51,712 tokens in steps of 512 are too close for a curve",
        ),
        (["eagle:eagle3-tiny", "--tokens", "50000,5e5"], "--tokens 50000,5e5: expected distinct integers"),
        (["eagle:eagle3-tiny", "--seeds", "0,0"], "--seeds 0,0: expected distinct integers"),
        (["eagle:eagle3-tiny", "--jobs", "-1"], "--jobs -1: expected 1 to 512"),
        (["eagle:eagle3-tiny", "eagle:eagle3-tiny"], "recipes eagle3-tiny, eagle3-tiny: the runs of two would share a name"),
        (["eagle:eagle3-tiny", "eagle.stpes=3"], "stpes"),
        (["eagle:eagle3-tiny", "train.seed=6"], "train.seed=6: every run has its own, by --tokens, --seeds and the folder; leave it out"),
        (["eagle:eagle3-tiny", "tree.depth=6"], "tree.depth=6: every run is measured with a chain of 4; leave it out"),
    ],
)
def test_what_is_refused(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        benchmark.main([str(tmp_path / "out"), *words])
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize(
    ("script", "name", "keys", "method"),
    [
        ("eagle", "eagle1-tiny", [], "eagle-1"),
        ("eagle", "eagle3-tiny", [], "eagle-3"),
        ("medusa", "medusa-tiny", [], "medusa"),
        ("medusa", "medusa2-tiny", [], "medusa-2"),
        ("distill", "distill-tiny", [], "distill"),
        ("distill", "distill-pruned-smollm2-135m", [], "distill-pruned"),
        ("distill", "distill-tiny", ["student.start=random", "student.layers=2"], "distill-random"),
        ("hydra", "hydra-tiny", [], "hydra"),
    ],
)
def test_what_starts_otherwise_has_a_curve_of_its_own(script, name, keys, method):
    assert scaling.method_name(script, recipe.load(schema_of(module_of(script)), name, keys)) == method


def test_a_plan_predicts_from_the_shipped_runs(monkeypatch, tmp_path):
    file = tmp_path / "scaling.json"
    measured = [
        *points({"eagle-3": 3e5, "eagle-1": 1e5}),
        *(Point("eagle-3", "large", tokens, 1.0, 2.0 + tokens / 4000) for tokens in (1000, 2000, 4000)),
    ]
    file.write_text(json.dumps([asdict(point) for point in measured]))
    monkeypatch.setattr(scaling, "SHIPPED", file)
    plan = report("eagle3-tiny", ["train.steps=800"], Machine(1, 1, 80 * GIB, cpu=True))
    assert list(plan["tau"]) == ["tiny"]  # 409,600 tokens are more than 30 times those of `large`
    assert plan["tau"]["tiny"]["estimate"] == pytest.approx(tau_of(409_600, exponent=2.0), abs=0.05)
    assert report("medusa-tiny", [], Machine(1, 1, 80 * GIB, cpu=True))["tau"] == {}


def test_the_shipped_runs_are_as_those_before_them_predict():
    """Each run but the first three of a method and a target is predicted from the shorter ones: 95 of 100 lie in their intervals."""
    shipped = scaling.read(scaling.SHIPPED)
    assert all(point.tokens > 0 and point.seconds > 0 and 1 <= point.tau <= 5 for point in shipped)
    inside = []
    for name in {(point.method, point.target) for point in shipped}:
        own = sorted((point.tokens, point.tau) for point in shipped if (point.method, point.target) == name)
        for count in range(3, len(own)):
            tau = scaling.predict(scaling.fit(*map(list, zip(*own[:count], strict=True))), own[count][0])
            inside.append(tau.low <= own[count][1] <= tau.high)
    assert len(inside) >= 12 and sum(inside) >= 0.85 * len(inside)
