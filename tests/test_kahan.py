"""bf16 weights: Kahan summation loses no small update, a run resumes to the last bit, and what cannot work is refused."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training_cases import Numbers, new_model, new_recipe, objective

from draftsmith.inference import machine
from draftsmith.train import loop, setup
from draftsmith.train.engine import checkpoint, optimizer, processes

pytestmark = pytest.mark.usefixtures("own_precision")
HALF = {"weights": "bfloat16", "precision": "bf16"}
LONG = 300  # steps
UNIT = 2.0**-8  # of the last place in bf16, from 0.5 to 1


class Layers(nn.Module):
    """A matrix, a vector and a number, of entries whose unit of the last place in bf16 is 2^-8."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in (("matrix", (24, 17)), ("vector", (9,)), ("number", ())):
            sign = torch.rand(shape, generator=generator).sub(0.5).sign()
            values = (sign * (0.55 + 0.4 * torch.rand(shape, generator=generator))).bfloat16()
            self.register_parameter(name, nn.Parameter(values.to(dtype)))


def trained(make, dtype, section, steps=LONG):
    """Layers after steps with gradients that are numbers of bf16, and their optimizer."""
    model, generator = Layers(dtype), torch.Generator().manual_seed(6)
    made = make(model)
    for _ in range(steps):
        for group in made.param_groups:
            group["lr"] = section.lr
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (0.5 + 0.5 * noise).bfloat16().to(dtype)
        made.step()
    return model, made


def in_fp64(section, dtype=torch.float64):
    """What torch's own AdamW makes of them."""

    def make(model):
        groups = [{"params": [model.matrix], "weight_decay": section.weight_decay}]
        groups += [{"params": [model.vector, model.number], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas)

    return trained(make, dtype, section)[0]


def total(weight, state):
    """A bf16 weight and its compensation as the fp32 weight that they are."""
    return (weight.float().view(torch.int32) + state["compensation"]).view(torch.float32)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [optimizer.CHUNK, 40])
def test_small_updates_add_up_as_in_fp64(tmp_path, monkeypatch, decay, betas, chunk):
    monkeypatch.setattr(optimizer, "CHUNK", chunk)  # 40 entries: the matrix is cut into rows
    section = new_recipe(tmp_path, **HALF, lr=5e-5, weight_decay=decay, betas=betas).train
    exact, plain = in_fp64(section), in_fp64(section, torch.bfloat16)
    model, made = trained(lambda model: optimizer.new_optimizer(model, section), torch.bfloat16, section)
    start = dict(Layers(torch.float64).named_parameters())
    for (name, weight), expected, stuck in zip(model.named_parameters(), exact.parameters(), plain.parameters(), strict=True):
        assert weight.dtype == torch.bfloat16
        assert bool(((weight.double() - expected).abs() <= 2 * UNIT).all()), name
        assert bool(((total(weight, made.state[weight]) - expected).abs() <= 2.0**-14 * expected.abs()).all()), name
        # Without compensation no update, less than half a unit, ever arrives; the exact weights move by one to four units.
        assert torch.equal(stuck.double(), start[name]) and bool(((expected - start[name]).abs() > UNIT).all()), name


def test_muon_s_small_updates_add_up(tmp_path):
    section = new_recipe(tmp_path, lr=4e-4, optimizer="muon", weight_decay=0.1).train
    half = new_recipe(tmp_path, **HALF, lr=4e-4, optimizer="muon", weight_decay=0.1).train
    exact, _ = trained(lambda model: optimizer.new_optimizer(model, section), torch.float32, section)
    model, made = trained(lambda model: optimizer.new_optimizer(model, half), torch.bfloat16, half)
    start = Layers(torch.float32).matrix
    moved = (exact.matrix - start).abs().mean()
    difference = (total(model.matrix, made.state[model.matrix]) - exact.matrix).abs().mean()
    assert moved > UNIT and difference < 0.02 * moved  # Newton and Schulz iterate in bf16
    assert {key: made.state[model.matrix][key].dtype for key in ("exp_avg", "compensation")} == {
        "exp_avg": torch.bfloat16,
        "compensation": torch.int16,
    }
    assert set(made.state[model.matrix]) == {"step", "exp_avg", "compensation"}


def run(output, objective=objective, **train):
    """A run of the loop -> its model."""
    model = new_model().float()
    data = Numbers(single=True)
    loop.fit(new_recipe(output, **HALF | train), model, objective, data, data, {"data": "numbers"})
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [0, 3])
def test_a_stopped_run_resumes_to_the_last_bit(tmp_path, stop, kind):
    expected = run(tmp_path / "uninterrupted", optimizer=kind, steps=8, lr=1e-3)
    calls = 0

    def interrupted(model, batch):
        nonlocal calls
        calls += model.training
        if model.training and calls == stop + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return objective(model, batch)

    with pytest.raises(SystemExit):
        run(tmp_path / "cut", interrupted, optimizer=kind, steps=8, lr=1e-3)
    resumed = run(tmp_path / "cut", optimizer=kind, steps=8, lr=1e-3)
    for actual, other in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(actual, other)
    for file in checkpoint.FILES:
        complete, cut = (load_file(tmp_path / name / "checkpoints" / "step-00000008" / file) for name in ("uninterrupted", "cut"))
        assert complete.keys() == cut.keys() and all(torch.equal(complete[name], cut[name]) for name in complete)
    assert not any(torch.equal(first, last) for first, last in zip(new_model().parameters(), expected.parameters(), strict=True))


def test_a_checkpoint_has_bf16_weights_and_their_compensation_and_the_model_ends_in_fp32(tmp_path):
    model = run(tmp_path, steps=5)
    folder = tmp_path / "checkpoints" / "step-00000005"
    weights, state = (load_file(folder / file) for file in checkpoint.FILES)
    names = {name for name, _ in model.named_parameters()}
    assert weights.keys() == names and {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert {key: state[key].dtype for key in state} == {
        f"{key}.{name}": dtype for name in names for key, dtype in (optimizer.STATE_DTYPES | {"step": torch.float32}).items()
    }
    assert all(bool(state[f"compensation.{name}"].any()) for name in names)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, weights[name].float())
    assert json.loads((folder / "state.json").read_text())["precision"] == "bf16"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda state: state.pop("compensation.0.bias"), "`compensation.0.bias` is missing"),
        (lambda state: state.update({"compensation.0.bias": torch.zeros(8)}), "is of float32, expected int16"),
        (lambda state: state.update({"exp_avg.0.bias": torch.zeros(8, dtype=torch.int16)}), "expected numbers with a fraction"),
    ],
)
def test_a_checkpoint_without_its_compensation_is_refused(tmp_path, damage, says):
    model = new_model().float()
    section = new_recipe(tmp_path, **HALF).train
    keys = optimizer.state_keys(model, section)
    state = {f"{key}.0.bias": torch.zeros(8, dtype=dtype) for key, dtype in optimizer.STATE_DTYPES.items()} | {
        "step.0.bias": torch.zeros(())
    }
    checkpoint.check_optimizer_state(state, model, keys, tmp_path)
    damage(state)
    with pytest.raises(ValueError, match=says) as error:
        checkpoint.check_optimizer_state(state, model, keys, tmp_path)
    assert "\n" not in str(error.value)


def test_weights_do_not_change_their_dtype_when_a_run_goes_on(tmp_path):
    run(tmp_path, steps=2)
    with pytest.raises(ValueError, match="made with train.weights=bfloat16, this run has float32"):
        run(tmp_path, steps=3, weights="float32")


@pytest.mark.parametrize("launcher", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharded_launchers_are_refused(tmp_path, monkeypatch, launcher):
    monkeypatch.setattr(processes, "join", lambda: None)
    monkeypatch.setenv(launcher, "true")
    for call in (setup.load_target_and_data, lambda recipe: run(recipe.train.output)):
        with pytest.raises(
            ValueError, match=r"train\.weights=bfloat16 is for one process or DDP.*train\.weights=float32.*accelerate-ddp"
        ) as error:
            call(new_recipe(tmp_path, **HALF))
        assert "\n" not in str(error.value)
    processes.check_weights(new_recipe(tmp_path).train)


@pytest.mark.parametrize(
    ("keys", "says"),
    [({"precision": "fp32"}, "got train.precision=fp32"), ({"betas": (0.99, 0.999)}, "train.betas\\[0\\]=0.99 .* at most 0.95")],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path, keys, says):
    with pytest.raises(ValueError, match=says):
        new_recipe(tmp_path, **HALF | keys)
    new_recipe(tmp_path, **keys)


def test_precision_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "precision", lambda: pytest.fail("measured"))
    run(tmp_path, steps=1, precision="auto")
    assert json.loads((tmp_path / "checkpoints" / "step-00000001" / "state.json").read_text())["precision"] == "bf16"
