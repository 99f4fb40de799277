"""Traces have the steps that the recipe names, and change nothing."""

import gzip
import json
import re

import pytest
import torch
from logged import accelerator_of, recipe_of
from torch import nn

from draftsmith.inference import machine
from draftsmith.train import medusa
from draftsmith.train import recipe as recipes
from draftsmith.train.engine.log import Log
from draftsmith.train.engine.profiler import Profile
from draftsmith.train.recipe import Recipe


@pytest.fixture(autouse=True)
def _matmul_rate(monkeypatch):
    monkeypatch.setattr(machine, "matmul_rate", lambda device, dtype: 1000.0)


def trained(folder, profile, done=0, steps=6, stop=None):
    """Steps done + 1 … of a linear layer under a profile -> its weights."""
    recipe = recipe_of(folder, profile=profile)
    accelerator = accelerator_of(recipe)
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    report = Log(recipe, accelerator, done, done)
    with Profile(recipe.train, accelerator, done, report.paused) as profiled:
        for step in range(done, steps):
            layer(torch.full((step + 1, 8), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiled.step()
            if stop == step + 1:
                break
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])


def steps_of(trace):
    """Steps of a trace, and in each the number of matmuls with as many rows as the step's own number."""
    events = json.loads(gzip.open(trace).read())["traceEvents"]
    steps = {int(event["name"].split("#")[1]): event for event in events if event.get("name", "").startswith("ProfilerStep#")}
    matmuls = [(event["ts"], event["args"]["Input Dims"][1][0]) for event in events if event.get("name") == "aten::addmm"]
    return {
        number: sum(rows == number and step["ts"] <= at <= step["ts"] + step["dur"] for at, rows in matmuls)
        for number, step in sorted(steps.items())
    }


def test_a_profile_has_the_steps_that_the_recipe_names_and_changes_nothing(tmp_path, capsys):
    plain = trained(tmp_path, None)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
    assert torch.equal(trained(tmp_path, "3:4"), plain)
    (trace,) = tmp_path.glob("trace*")
    assert trace.name == "trace-rank0-steps3-4.json.gz" and steps_of(trace) == {3: 1, 4: 1}
    *table, last = capsys.readouterr().out.splitlines()
    assert last == f"trace of steps 3 to 4: {trace}"
    assert len(table) == 10 and all(re.fullmatch(r" *[\d.]+% +[\d.]+ ms +[\d,]+ × \S.*", line) for line in table)
    shares = [float(line.split("%")[0]) for line in table]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 100.1 and any(" 2 × aten::addmm" in line for line in table)


@pytest.mark.parametrize(
    ("profile", "done", "stop", "traces"),
    [
        ("1:2", 0, None, {"steps1-2": {1: 1, 2: 1}}),
        ("2:4", 2, None, {"steps3-4": {3: 1, 4: 1}}),  # the run goes on within these steps
        ("3:6", 0, None, {"steps3-6": {3: 1, 4: 1, 5: 1, 6: 1}}),  # it ends with them
        ("3:6", 0, 4, {"steps3-4": {3: 1, 4: 1}}),  # a signal ends it within
        ("3:6", 0, 2, {}),
        ("3:4", 4, None, {}),
    ],
)
def test_a_profile_of_a_run_that_goes_on_or_ends_early(tmp_path, profile, done, stop, traces):
    trained(tmp_path, profile, done, stop=stop)
    written = {path.name.split("rank0-")[1].removesuffix(".json.gz"): steps_of(path) for path in tmp_path.glob("trace*")}
    assert {name: {step: count for step, count in steps.items() if count} for name, steps in written.items()} == traces


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("train.profile=10", "expected first:last, steps from 1, such as 10:15; got '10'"),
        ("train.profile=9:3", "expected first:last"),
        ("train.profile=0:3", "expected first:last"),
        ("train.profile=3:900", "step 900 is past train.steps=700; got '3:900'"),
        ("train.trackers=[tensorboard, weights]", "'tensorboard', 'wandb' or 'trackio'; got 'weights'"),
    ],
)
def test_profiles_and_trackers_that_are_not(value, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        recipes.load(medusa.MedusaRecipe, "medusa-tiny.yaml", [value])


def test_a_profile_in_yaml_needs_no_quotes(tmp_path):
    text = "train.output: x\ntrain.steps: 20\ntrain.batch_size: 2\ntrain.lr: 0.1\ntrain.trackers: [wandb]\n"
    file = tmp_path / "r.yaml"
    for profile in ("10:15", "'10:15'"):
        file.write_text(text + f"train.profile: {profile}\n")
        loaded = recipes.load(Recipe, file, [])
        assert (loaded.train.profile, loaded.train.trackers) == ("10:15", ("wandb",))
    recipes.save(loaded, tmp_path)
    assert recipes.load(Recipe, tmp_path / "recipe.yaml", []) == loaded
