"""Muon: torch's own for matrices, AdamW for the rest, in one optimizer."""

import pytest
import torch
from torch import nn
from training_cases import new_recipe
from zoo import tiny

from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train.engine import optimizer
from draftsmith.train.engine.checkpoint import STATE_KEYS


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.wide, self.tall = nn.Linear(12, 5), nn.Linear(5, 9, bias=False)
        self.lm_head = nn.Linear(9, 20, bias=False)
        self.norm = nn.LayerNorm(9)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_a_rate_of_tables_needs_a_table(tmp_path):
    model = Small()
    model.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"train\.head_lr=0\.005 does nothing: no embedding and no output layer is trained; leave it out"):
        optimizer.new_optimizer(model, new_recipe(tmp_path, head_lr=0.005).train)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_each_parameter_gets_the_update_of_torchs_optimizer(decay, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer, "_iteration_dtype", lambda device: torch.bfloat16)  # torch's, on every processor
    section = new_recipe(tmp_path, optimizer="muon", lr=0.02, head_lr=0.005, betas=(0.9, 0.98), weight_decay=decay).train
    ours, theirs = Small(), Small()
    made = optimizer.new_optimizer(ours, section)
    matrices = [theirs.wide.weight, theirs.tall.weight]
    rest = [{"params": [theirs.lm_head.weight], "weight_decay": decay, "lr": 0.005}]
    rest += [{"params": [theirs.wide.bias, theirs.norm.weight, theirs.norm.bias], "weight_decay": 0.0}]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.98), fused=True)
    for group in made.param_groups:
        group["lr"] = section.lr * group["factor"]  # as the loop does in each step
    for step in range(6):
        for model in (ours, theirs):
            gradients(model, step)
        for one in (made, muon, adamw):
            one.step()
    before = Small()
    changed = 0
    for (name, actual), expected, first in zip(ours.named_parameters(), theirs.parameters(), before.parameters(), strict=True):
        assert torch.equal(actual, expected), name
        changed += not torch.equal(actual, first)
    assert changed == 6


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_update_has_singular_values_near_one(monkeypatch, dtype):
    monkeypatch.setattr(optimizer, "_iteration_dtype", lambda device: dtype)
    for shape in ((7, 30), (30, 7), (16, 16)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        update = optimizer.orthogonal(matrix)
        values = torch.linalg.svdvals(left.T @ update.float() @ right.T)
        assert update.dtype == dtype and values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("values", ["equal", "down to 1e-6", "three", "one large"])
def test_float32_gives_the_iteration_on_the_matrix_itself(monkeypatch, values):
    """In float64 the iteration on x; in float32 the one on x·xᵀ, whose square of the condition number must not be felt."""
    monkeypatch.setattr(optimizer, "_iteration_dtype", lambda device: torch.float32)
    spectra = {
        "equal": torch.ones(24),
        "down to 1e-6": torch.logspace(0, -6, 24),
        "three": (torch.arange(24) < 3).float(),
        "one large": torch.where(torch.arange(24) < 1, 1.0, 1e-5),
    }
    for shape in ((24, 90), (90, 24), (24, 24)):
        left, _, right = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(2)).double(), full_matrices=False)
        matrix = (left * spectra[values].double()) @ right
        exact = matrix / matrix.norm()
        for _ in range(optimizer.ITERATIONS):
            a, b, c = optimizer.QUINTIC
            square = exact @ exact.T
            exact = a * exact + (b * square + c * square @ square) @ exact
        assert (optimizer.orthogonal(matrix.float()) - exact).norm() < 1e-3 * exact.norm()
    assert not optimizer.orthogonal(torch.zeros(4, 6)).any()


def test_a_processor_without_bf16_matmuls_iterates_in_float32(monkeypatch):
    dtype = optimizer._iteration_dtype.__wrapped__
    assert dtype("cuda") == torch.bfloat16
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert dtype("cpu") == torch.float32 and dtype("cuda") == torch.bfloat16


def test_state_is_named_for_trained_parameters_only(tmp_path):
    model = Small()
    keys = optimizer.state_keys(model, new_recipe(tmp_path, optimizer="muon").train)
    by_adamw = ["wide.bias", "lm_head.weight", "norm.weight", "norm.bias"]
    assert keys == {"wide.weight": ("exp_avg",), "tall.weight": ("exp_avg",)} | dict.fromkeys(by_adamw, STATE_KEYS)
    assert set(optimizer.state_keys(model, new_recipe(tmp_path).train).values()) == {STATE_KEYS}
    made = optimizer.new_optimizer(model, new_recipe(tmp_path, optimizer="muon").train)
    gradients(model, 0)
    made.step()
    assert len(made.state) == 6 and frozenset(made.state[model.wide.weight]) == {"step", "exp_avg"}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("medusa", {"num_heads": 2}),
        ("hydra", {"num_heads": 2}),
        ("mlp", {"num_heads": 2, "inner_size": 24, "tie_weights": False}),
        ("dspark", {"taps": [0, 1], "num_heads": 4, "markov_rank": 6}),
        ("eagle", {"taps": [0, 1], "num_heads": 4}),
    ],
)
def test_matrices_with_a_row_for_each_token_are_heads(method, settings, tmp_path):
    """As their shapes say: no other matrix of the tiny drafters has V rows."""
    target = Target.wrap(tiny("llama"))
    drafter = new_drafter(method, target, **settings)
    keys = optimizer.state_keys(drafter, new_recipe(tmp_path, optimizer="muon").train)
    matrices = {name: parameter for name, parameter in drafter.named_parameters() if name in keys and parameter.ndim == 2}
    by_muon = {name for name, own in keys.items() if own == ("exp_avg",)}
    assert by_muon == {name for name, matrix in matrices.items() if len(matrix) != target.vocab_size}
    assert len(by_muon) > 1 and len(matrices) > len(by_muon)
