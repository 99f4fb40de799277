"""The picture of a run has the curves of its rows."""

import pytest
from logged import accelerator_of, logged_run, recipe_of

from draftsmith.inference import machine
from draftsmith.train.engine import curves
from draftsmith.train.engine.log import Log

EAGLE = {"loss": 3.0, "sim_tau": 1.5, "survival_1": 0.4, "survival_2": 0.1}
MACHINE = {"lr": 0.1, "tokens_per_s": 90.0, "seconds": 0.5, "mfu": 0.25, "target_ratio": 2.0, "left_out": 0}


@pytest.fixture(autouse=True)
def _matmul_rate(monkeypatch):
    monkeypatch.setattr(machine, "matmul_rate", lambda device, dtype: 1000.0)


def run_of(metrics, steps=3, held_out=True):
    rows = []
    for step in range(1, steps + 1):
        rows.append({"step": step, **MACHINE, "peak_gb": 2.0 - step / steps, **{name: value * step for name, value in metrics.items()}})
        if held_out:
            rows.append({"step": step, **{f"valid_{name}": -value * step for name, value in metrics.items()}, "valid_tau": 2.0})
    return rows


@pytest.mark.parametrize(
    ("metrics", "held_out", "titles"),
    [
        (EAGLE, True, {"loss": 2, "τ": 4, "survival": 4, "learning rate": 2, "tokens/s": 2}),
        (EAGLE, False, {"loss": 2, "sim tau": 2, "survival": 4, "learning rate": 2, "tokens/s": 2}),
        ({"loss": 9.0, "top1_head1": 0.3, "top1_head2": 0.2}, False, {"loss": 2, "top1 head": 4, "learning rate": 2, "tokens/s": 2}),
        (
            {"loss": 0.2, "acceptance": 0.5, "top1": 0.4, "grad_norm": 1.0},
            False,
            {"loss": 2, "acceptance": 2, "top1": 2, "grad norm": 2, "learning rate": 2, "tokens/s": 2},
        ),
    ],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_picture_has_the_curves_of_the_rows(metrics, held_out, titles, steps):
    rows = run_of(metrics, steps, held_out)
    figure = curves.figure(rows, "name")
    assert {axes.get_title(loc="left"): len(axes.lines) for axes in figure.axes} == titles  # of each metric, training and held out
    for axes in figure.axes:
        for line in axes.lines:
            assert list(line.get_xdata()) in ([], list(range(1, steps + 1)))
    by_title = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(by_title["loss"].lines[0].get_ydata()) == [metrics["loss"] * step for step in range(1, steps + 1)]
    last = f"{metrics['loss'] * steps:g}"
    if held_out:
        last += f", held out {-metrics['loss'] * steps:g}"
    assert by_title["loss"].get_title(loc="right") == last
    summary = (
        f"name: step {steps},  90 tokens/s,  25% of the measured matmul rate,  2.0 × the target's forward,  peak {2 - 1 / steps:.1f} GB"
    )
    assert figure.get_suptitle() == summary
    if "survival" in by_title:
        assert [text.get_text() for text in by_title["survival"].get_legend().get_texts()] == ["1", "2"]
        assert list(by_title["survival"].lines[2].get_ydata()) == [pytest.approx(0.1 * step) for step in range(1, steps + 1)]


def test_old_rows_and_rows_that_lack_a_metric_have_a_picture_too():
    rows = [
        {"step": 1, "lr": 1.0, "tokens_per_s": 5.0, "loss": float("nan")},
        {"step": 2, "lr": 1.0, "tokens_per_s": 5.0, "loss": 2.0, "tau": 3},
    ]
    figure = curves.figure(rows, "name")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "tau", "learning rate", "tokens/s"]
    assert figure.get_suptitle() == "name: step 2,  5 tokens/s"
    assert [axes.get_title(loc="left") for axes in curves.figure([{"step": 4, "valid_loss": 1.0}], "x").axes] == [
        "loss",
        "learning rate",
        "tokens/s",
    ]


def test_a_name_is_no_formula(tmp_path):
    curves.figure([{"step": 1, "loss": 1.0}], "a$^$").savefig(tmp_path / "a.png")


def test_closing_draws_the_curves_of_all_rows(tmp_path):
    recipe = recipe_of(tmp_path)
    Log(recipe, accelerator_of(recipe), 0, 0).close()
    assert list(tmp_path.iterdir()) == []
    logged_run(recipe, 0, range(1, 3))
    first = (tmp_path / "curves.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    logged_run(recipe, 2, range(3, 6))
    assert (tmp_path / "curves.png").read_bytes() != first
