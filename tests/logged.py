"""A log written without training: recipes, losses and rows that tests of logs, trackers, profiles and curves share."""

import json

import torch
from accelerate import Accelerator

from draftsmith.train.engine import trackers
from draftsmith.train.engine.log import Log
from draftsmith.train.objective import Loss
from draftsmith.train.recipe import Recipe, TrainSection


def recipe_of(output, **train):
    """A recipe of 40 steps without a method's section."""
    return Recipe(train=TrainSection(**({"output": str(output), "steps": 40, "batch_size": 4, "lr": 0.5} | train)))


def accelerator_of(recipe, accumulation=1):
    accelerator = Accelerator(cpu=True, **trackers.options(recipe.train))
    accelerator.gradient_accumulation_steps = accumulation
    return accelerator


def loss_of(total, weight, **metrics):
    """A loss of given sums, with a gradient."""
    scalars = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in metrics.items()}
    return Loss(torch.tensor(float(total), requires_grad=True), torch.tensor(weight), scalars)


def rows_of(folder):
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged_run(recipe, done, steps, crash=False):
    """A run of these steps whose loss is 10 · step and held-out loss is 100 · step."""
    report = Log(recipe, accelerator_of(recipe), done, done)
    for step in steps:
        report.add(loss_of(20 * step, 2, top1=1))
        report.write_training(step, 0.5)
        report.write_evaluation(step, {"loss": 100.0 * step})
    if not crash:
        report.close()
        assert report.accelerator.trackers == []
    return report
