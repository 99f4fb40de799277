"""A small training run: data, model, recipe and objective whose results are known."""

import torch
from torch import nn

from draftsmith.train import loop
from draftsmith.train.objective import Loss
from draftsmith.train.recipe import Recipe, TrainSection

STEPS = 7


class Numbers:
    """Sequences of random numbers with a ragged mask: micro-batches of unequal weight, for which a mean of means is wrong."""

    def __init__(self, rows: int = 22, length: int = 9, single: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, length, 3, generator=generator, dtype=torch.float64)
        self.x = self.x.float() if single else self.x
        self.mask = torch.rand(rows, length, generator=generator) < torch.linspace(0.1, 0.9, rows)[:, None]

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, rows):
        rows = rows % len(self)
        return {"x": self.x[rows], "loss_mask": self.mask[rows]}

    def weight(self, rows):
        return float(self.mask[rows % len(self), 1:].sum())

    def close(self):
        self.closed = True


def objective(model, batch):
    mask = batch["loss_mask"][:, 1:]
    losses = (model(batch["x"])[:, 1:, 0] - batch["x"][:, 1:].sum(-1)).square()
    return Loss((losses * mask).sum(), mask.sum(), {"small": ((losses < 1) & mask).sum()})


def crashing(at: int):
    """The objective, which raises RuntimeError in the `at`-th training step, from 1."""
    calls = 0

    def wrapped(model, batch):
        nonlocal calls
        calls += model.training
        if model.training and calls == at:
            raise RuntimeError("power cut")
        return objective(model, batch)

    return wrapped


def new_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def new_recipe(output, **train):
    settings = {"output": str(output), "steps": STEPS, "batch_size": 8, "lr": 0.05, "clip": 0.5, "warmup_steps": 2, "precision": "fp32"}
    return Recipe(train=TrainSection(**(settings | {"log_every": 1} | train)))


def run(output, objective=objective, **train):
    model = new_model()
    loop.fit(new_recipe(output, **train), model, objective, Numbers(), Numbers(), {"data": "numbers"})
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
