"""What a run says: rows exact under a clock of our own, what trackers received read back from their own files, traces, pictures."""

import gzip
import json
import re
import socket
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import VOCAB, tiny

from draftsmith.inference import machine
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train import distill, eagle, medusa, recipe
from draftsmith.train.engine import curves, log, trackers
from draftsmith.train.engine.log import Flops, Log
from draftsmith.train.engine.profiler import Profile
from draftsmith.train.medusa import MedusaSection
from draftsmith.train.objective import Loss
from draftsmith.train.recipe import Recipe, TrainSection

CI_NEEDS = "is not installed here"


class Clock:
    """perf_counter that only goes on when told to."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(log, "time", made)
    return made


@pytest.fixture(autouse=True)
def _rate(monkeypatch):
    monkeypatch.setattr(machine, "matmul_rate", lambda device, dtype: 1000.0)


def settings(output, **train):
    return Recipe(train=TrainSection(**({"output": str(output), "steps": 40, "batch_size": 4, "lr": 0.5} | train)))


def accelerator_of(made, accumulation=1):
    accelerator = Accelerator(cpu=True, **trackers.options(made.train))
    accelerator.gradient_accumulation_steps = accumulation
    return accelerator


def loss_of(total, weight, **metrics):
    scalars = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in metrics.items()}
    return Loss(torch.tensor(float(total), requires_grad=True), torch.tensor(weight), scalars)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_row_is_what_a_hand_computes(tmp_path, clock, monkeypatch, capsys):
    monkeypatch.setattr(log.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2_500_000))
    monkeypatch.setattr(sys, "platform", "linux")
    took = iter([9.0, 1.0, 3.0, 2.0])

    def reference(found):
        assert found == "batch" and not torch.is_grad_enabled()
        clock.now += next(took)

    made = settings(tmp_path)
    said = Log(made, accelerator_of(made, accumulation=2), 0, reference)
    left, right = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    for number in range(4):  # two steps of two micro-batches
        with said.measuring("batch"):
            (left @ right).sum().backward()  # 2 · (2·3·4) FLOPs forward, as many for the gradient of the right one
            clock.now += 0.5
        said.add(loss_of(6, 4, hits=1) if number % 2 else loss_of(1, 12, hits=7))
    with said.paused():
        clock.now += 1000
    text = said.write_training(2, 0.25, left_out=0)
    assert rows_of(tmp_path) == [
        {
            "step": 2,
            "lr": 0.25,
            "tokens_per_s": 16.0,  # 32 in 2 s
            "seconds": 1.0,
            "mfu": 0.192,  # 2 · 96 FLOPs in 1 s, of 1000
            "target_ratio": 0.25,  # 1 s, 2 · median(1, 3, 2) s
            "peak_gb": 2.56,
            "loss": 14 / 32,  # not (6/4 + 1/12) / 2
            "hits": 16 / 32,
            "left_out": 0,
        }
    ]
    assert text == "loss 0.438  hits 0.500  16 tok/s"
    assert "a step is 1.92e-10 TFLOP a rank, and this device does 1e-09 TFLOP/s (measured); the target's forward alone takes 4 s of it" in (
        capsys.readouterr().out
    )
    said.write_evaluation(2, {"loss": 0.5})
    clock.now += 3
    said.add(loss_of(2, 2, hits=1))
    assert said.write_training(5, 0.25) == "loss 1.000  hits 0.500  1 tok/s  held out: loss 0.500"
    assert rows_of(tmp_path)[1] == {"step": 2, "valid_loss": 0.5}
    assert {"seconds": 1.0, "tokens_per_s": 0.7, "mfu": 0.192, "loss": 1.0}.items() <= rows_of(tmp_path)[2].items()


def test_without_a_reference_there_is_no_ratio_and_without_weight_no_division_by_zero(tmp_path, clock):
    made = settings(tmp_path)
    said = Log(made, accelerator_of(made), 0)
    said.add(loss_of(0, 0))
    clock.now += 1
    said.write_training(1, 0.1)
    assert (
        rows_of(tmp_path)[0].keys() == {"step", "lr", "tokens_per_s", "seconds", "peak_gb", "loss"} and rows_of(tmp_path)[0]["loss"] == 0.0
    )


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_adding_waits_for_no_device(tmp_path):
    made = settings(tmp_path)
    said = Log(made, accelerator_of(made), 0)
    with Waits() as waits:
        with said.measuring({}):
            said.add(loss_of(1, 2, hits=1))
        assert waits.count == 0
        assert said.sums["loss"].item() == 1 and waits.count == 1
    said.write_training(1, 0.1)
    assert rows_of(tmp_path)[0]["loss"] == 0.5


@pytest.mark.parametrize("tail", ['{"step": 4', '{"step": 4}'])
def test_rows_after_the_checkpoint_and_a_row_cut_off_are_dropped(tmp_path, tail):
    lines = [f'{{"step": {step}, "loss": {step}}}\n' for step in (10, 20, 20, 30)] + [tail]
    file, made = tmp_path / "metrics.jsonl", settings(tmp_path)
    for done, kept in ((30, 4), (25, 3), (20, 3), (19, 1), (0, 0)):
        file.write_text("".join(lines))
        said = Log(made, accelerator_of(made), done)
        assert file.read_text() == "".join(lines[:kept])
        said.add(loss_of(1, 1))
        said.write_training(done + 1, 0.1)
        assert [row["step"] for row in rows_of(tmp_path)][kept:] == [done + 1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_leaves_the_rows(tmp_path, monkeypatch):
    file, made = tmp_path / "metrics.jsonl", settings(tmp_path)
    file.write_text('{"step": 1}\n{"step": 2}\n')
    write_bytes = Path.write_bytes

    def full(path, content):
        write_bytes(path, content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        Log(made, accelerator_of(made), 1)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n' and len(list(tmp_path.iterdir())) == 1


def packed(rows=2, length=21):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.6) & (torch.arange(length) > 0)
    positions = torch.arange(length).expand(rows, length)
    return {"input_ids": ids, "loss_mask": mask, "position_ids": positions, "document": torch.zeros_like(ids)}


def test_flops_of_a_training_step_are_those_of_a_hand():
    heads, data, target = 3, packed(), Target.wrap(tiny("llama"))
    drafter, section = new_drafter("medusa", target, num_heads=heads), MedusaSection(heads=heads)
    with Flops() as flops:
        medusa.objective(drafter, data, target=target, section=section).sum.backward()
    tokens, hidden, layers, query_heads, key_heads, dim, inner, length = 42, 32, 2, 4, 2, 8, 48, 21
    linear = 2 * tokens * (2 * hidden * query_heads * dim + 2 * hidden * key_heads * dim + 3 * hidden * inner)
    attention = 2 * (2 * 2 * query_heads * length * length * dim)  # two rows; scores, and values weighted by them
    forward = layers * (linear + attention)
    # The target's features need no gradient: of a head's block there is forward and the weight's gradient, of its output layer also the input's.
    blocks = heads * 2 * (2 * tokens * hidden * hidden)
    counted = sum(int(data["loss_mask"][:, k + 2 :].sum()) for k in range(heads))
    outputs = 3 * (2 * counted * hidden * VOCAB)
    assert flops.count == forward + blocks + outputs and min(forward, blocks, outputs) > 0


def test_counting_changes_no_bit_and_leaves_compiled_code_compiled():
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(5, 8)
    step = torch.compile(lambda: layers(x).square().sum(), backend="aot_eager")
    hand = 2 * 5 * (2 * 8 * 16 + 3 * 16 * 4)

    def gradients(work, mode):
        layers.zero_grad()
        with mode:
            work().backward()
        return torch.cat([parameter.grad.flatten() for parameter in layers.parameters()])

    counters.clear()
    compiled, eager = Flops(), Flops()
    found = [gradients(step, compiled), gradients(step, torch.enable_grad()), gradients(lambda: layers(x).square().sum(), eager)]
    assert compiled.count == eager.count == hand
    assert counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_flops_of_products_in_place_and_of_attention():
    with Flops() as flops:
        torch.zeros(3, 5).addmm_(torch.ones(3, 2), torch.ones(2, 5))
    assert flops.count == 2 * 3 * 2 * 5
    query, key, value = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    one = 2 * (2 * 4 * 6 * 6 * 8)
    with Flops() as flops:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert flops.count == 2 * one  # in full, though half would do
    with Flops() as flops:
        out.sum().backward()
    assert flops.count == 5 * one  # the scores once more, and the gradients of them, the queries, the keys and the values


def test_the_rate_of_products_is_the_best_of_several(monkeypatch):
    monkeypatch.undo()
    spent = iter([5.0, 0.04, 0.01, 0.06])
    now = [0.0]

    def product(left, right):
        now[0] += next(spent)
        assert (left.shape, right.shape, left.dtype) == ((256, 1024), (1024, 1024), torch.bfloat16)

    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch, "matmul", product)
    # 5 s to warm up are past the budget already: two more all the same.
    assert machine.matmul_rate(torch.device("cpu"), torch.bfloat16) == pytest.approx(2 * 256 * 1024**2 / 0.01)


# Trackers


def told(made, done, steps, crash=False):
    """A run of these steps whose loss is 10 · step and held-out loss is 100 · step."""
    said = Log(made, accelerator_of(made), done)
    for step in steps:
        said.add(loss_of(20 * step, 2, top1=1))
        said.write_training(step, 0.5)
        said.write_evaluation(step, {"loss": 100.0 * step})
    if not crash:
        said.close()
        assert said.accelerator.trackers == []
    return said


def resumed(made):
    """Steps 1 to 5, of which a crash loses 4 and 5, then 4 to 7; and a second crash before 7, which loses 7."""
    told(made, 0, range(1, 6), crash=True)
    told(made, 3, range(4, 5), crash=True)
    told(made, 3, range(4, 8))


def test_tensorboard_has_every_step_once(tmp_path):
    pytest.importorskip("tensorboard", reason=CI_NEEDS)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = settings(tmp_path / "run", trackers=("tensorboard",))
    (tmp_path / "run").mkdir()
    resumed(made)

    def scalars(name):
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "draftsmith"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert scalars("loss") == [(step, 10.0 * step) for step in range(1, 8)]
    assert scalars("valid_loss") == [(step, 100.0 * step) for step in range(1, 8)]
    assert scalars("lr")[0] == (1, 0.5) and scalars("top1")[-1] == (7, 0.5)
    (hparams,) = (tmp_path / "run" / "tensorboard" / "draftsmith").glob("*/hparams.yml")
    assert yaml.safe_load(hparams.read_text()) == trackers.flat(made)
    told(made, 0, range(1, 3))  # from the beginning, in the same folder
    assert scalars("loss") == [(1, 10.0), (2, 20.0)]


@pytest.fixture
def local_only(monkeypatch, tmp_path):
    """No key of anyone, and no way out but to processes of this machine."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_ERROR_REPORTING", "WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"):
        monkeypatch.setenv(name, "1")  # given back at the end
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_TOKEN", "hf_notatoken")
    home.mkdir()
    tried, connect = [], socket.socket.connect

    def guarded(self, address):
        if self.family != socket.AF_UNIX:
            tried.append(address)
            raise OSError("no network here")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: tried.append(address))
    return tried


def wandb_rows(file):
    """(step, values) of a .wandb file: after 7 bytes blocks of records, each with a checksum, a length and a type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, whole = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        assert kind in (1, 2, 3, 4) and at // 32768 == (at + 6) // 32768
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record = Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                values = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                found.append((values.pop("_step"), values))
    return found


def test_wandb_without_a_key_stays_here_and_goes_on_with_its_run(tmp_path, local_only, capsys):
    wandb = pytest.importorskip("wandb", reason=CI_NEEDS)
    made = settings(tmp_path / "run", trackers=("wandb",))
    (tmp_path / "run").mkdir()
    wandb.teardown()  # what it read of the environment before
    try:
        told(made, 0, range(1, 6), crash=True).accelerator.trackers[0].finish()
        told(made, 3, range(4, 8))
    finally:
        wandb.teardown()
    assert local_only == []
    run = json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]
    first, second = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run}*"))  # a second one in the same second gets a number
    assert f"wandb is offline, since it has no key: the run stays in {first}; `wandb sync {first}` sends it" in capsys.readouterr().out
    rows = [row for place in (first, second) for row in wandb_rows(place / f"run-{run}.wandb")]
    assert [(step, values["loss"], values["valid_loss"]) for step, values in rows] == [(n, 10.0 * n, 100.0 * n) for n in range(1, 8)]
    assert '"disable-analytics":true' in (first / "logs" / "debug-core.log").read_text()


def test_a_key_that_is_none_is_said_in_one_line(tmp_path, local_only, monkeypatch):
    wandb = pytest.importorskip("wandb", reason=CI_NEEDS)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    made = settings(tmp_path, trackers=("wandb",))
    wandb.teardown()
    with pytest.raises(ValueError, match="wandb: WANDB_API_KEY invalid.*; set WANDB_MODE=offline to keep the run here, or leave") as caught:
        Log(made, accelerator_of(made), 0)
    wandb.teardown()
    assert "\n" not in str(caught.value) and local_only == []


def test_trackio_writes_here_and_has_every_step_once(tmp_path, local_only, monkeypatch):
    pytest.importorskip("trackio", reason=CI_NEEDS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads TRACKIO_DIR when it is imported
    from trackio.sqlite_storage import SQLiteStorage

    made = settings(tmp_path / "run", trackers=("trackio",))
    (tmp_path / "run").mkdir()
    resumed(made)
    (name,) = SQLiteStorage.get_runs("draftsmith")
    assert name == f"run-{json.loads((tmp_path / 'run' / 'trackers.json').read_text())['id']}"
    rows = SQLiteStorage.get_logs("draftsmith", name)
    for key, factor in (("loss", 10.0), ("valid_loss", 100.0)):
        assert [(row["step"], row[key]) for row in rows if key in row] == [(n, factor * n) for n in range(1, 8)]
    assert list((tmp_path / "trackio").glob("draftsmith*.db")) and local_only == []


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    def version(name):
        raise trackers.PackageNotFoundError(name)

    monkeypatch.setattr(trackers, "version", version)
    assert trackers.options(settings("x").train) == {}
    with pytest.raises(
        ValueError, match=re.escape("train.trackers has trackio, which is not installed; pip install 'draftsmith[trackio]'")
    ):
        trackers.options(settings("x", trackers=("trackio",)).train)


def test_what_trackers_are_told_of_a_recipe():
    made = medusa.MedusaRecipe(
        target={"path": "https://me:hf_secret@host/model"},
        data={"train": ({"path": "//me:hf_secret@host/a", "weight": 2.0},)},
        train=settings("x").train,
    )
    flat = trackers.flat(made)
    assert flat.keys() == recipe.keys(medusa.MedusaRecipe).keys()
    assert {type(value) for value in flat.values()} == {bool, int, float, str}
    assert (flat["train.betas"], flat["data.valid"], flat["data.pack"], flat["train.lr"]) == ("[0.9, 0.95]", "null", True, 0.5)
    assert flat["target.path"] == "https://host/model" and "hf_secret" not in str(flat) and "host/a" in flat["data.train"]


def test_no_key_of_a_recipe_is_for_a_secret():
    names = {name for kind in (medusa.MedusaRecipe, eagle.EagleRecipe, distill.DistillRecipe) for name in recipe.keys(kind)}
    assert len(names) > 80
    assert not [name for name in names if re.search(r"secret|password|credential|api_?key|_key$|token$|auth", name)]


# Profile


def trained(folder, profile, done=0, steps=6, stop=None):
    """Steps done + 1 … of a linear layer under a profile -> its weights."""
    made = settings(folder, profile=profile)
    accelerator = accelerator_of(made)
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    said = Log(made, accelerator, done)
    with Profile(made.train, accelerator, done, said.paused) as profiled:
        for step in range(done, steps):
            layer(torch.full((step + 1, 8), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiled.step()
            if stop == step + 1:
                break
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])


def steps_of(trace):
    """Steps of a trace, and in each the products with as many rows as the step's own number."""
    events = json.loads(gzip.open(trace).read())["traceEvents"]
    steps = {int(event["name"].split("#")[1]): event for event in events if event.get("name", "").startswith("ProfilerStep#")}
    products = [(event["ts"], event["args"]["Input Dims"][1][0]) for event in events if event.get("name") == "aten::addmm"]
    return {
        number: sum(rows == number and step["ts"] <= at <= step["ts"] + step["dur"] for at, rows in products)
        for number, step in sorted(steps.items())
    }


def test_a_profile_has_the_steps_that_were_asked_for_and_disturbs_nothing(tmp_path, capsys):
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
    found = {path.name.split("rank0-")[1].removesuffix(".json.gz"): steps_of(path) for path in tmp_path.glob("trace*")}
    assert {name: {step: count for step, count in steps.items() if count} for name, steps in found.items()} == traces


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
        recipe.load(medusa.MedusaRecipe, "medusa-tiny.yaml", [value])


def test_a_profile_in_yaml_needs_quotes(tmp_path):
    text = "train.output: x\ntrain.steps: 20\ntrain.batch_size: 2\ntrain.lr: 0.1\ntrain.trackers: [wandb]\n"
    file = tmp_path / "r.yaml"
    file.write_text(text + "train.profile: 10:15\n")
    with pytest.raises(ValueError, match="yaml reads 10:15 as a number; write '10:15'"):
        recipe.load(Recipe, file, [])
    file.write_text(text + "train.profile: '10:15'\n")
    loaded = recipe.load(Recipe, file, [])
    assert (loaded.train.profile, loaded.train.trackers) == ("10:15", ("wandb",))
    recipe.save(loaded, tmp_path)
    assert recipe.load(Recipe, tmp_path / "recipe.yaml", []) == loaded


# Curves

EAGLE = {"loss": 3.0, "sim_tau": 1.5, "survival_1": 0.4, "survival_2": 0.1}
MACHINE = {"lr": 0.1, "tokens_per_s": 90.0, "seconds": 0.5, "mfu": 0.25, "target_ratio": 2.0, "left_out": 0}


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
    made = curves.figure(rows, "name")
    assert {axes.get_title(loc="left"): len(axes.lines) for axes in made.axes} == titles  # of each metric, training and held out
    for axes in made.axes:
        for line in axes.lines:
            assert list(line.get_xdata()) in ([], list(range(1, steps + 1)))
    found = {axes.get_title(loc="left"): axes for axes in made.axes}
    assert list(found["loss"].lines[0].get_ydata()) == [metrics["loss"] * step for step in range(1, steps + 1)]
    assert found["loss"].get_title(loc="right") == f"{metrics['loss'] * steps:g}" + held_out * f", held out {-metrics['loss'] * steps:g}"
    summary = (
        f"name: step {steps},  90 tokens/s,  25% of the measured matmul rate,  2.0 × the target's forward,  peak {2 - 1 / steps:.1f} GB"
    )
    assert made.get_suptitle() == summary
    if "survival" in found:
        assert [text.get_text() for text in found["survival"].get_legend().get_texts()] == ["1", "2"]
        assert list(found["survival"].lines[2].get_ydata()) == [pytest.approx(0.1 * step) for step in range(1, steps + 1)]


def test_old_rows_and_rows_that_lack_a_metric_have_a_picture_too():
    rows = [
        {"step": 1, "lr": 1.0, "tokens_per_s": 5.0, "loss": float("nan")},
        {"step": 2, "lr": 1.0, "tokens_per_s": 5.0, "loss": 2.0, "tau": 3},
    ]
    made = curves.figure(rows, "name")
    assert [axes.get_title(loc="left") for axes in made.axes] == ["loss", "tau", "learning rate", "tokens/s"]
    assert made.get_suptitle() == "name: step 2,  5 tokens/s"
    assert [axes.get_title(loc="left") for axes in curves.figure([{"step": 4, "valid_loss": 1.0}], "x").axes] == [
        "loss",
        "learning rate",
        "tokens/s",
    ]


def test_closing_draws_the_curves_of_all_rows(tmp_path):
    made = settings(tmp_path)
    Log(made, accelerator_of(made), 0).close()
    assert list(tmp_path.iterdir()) == []
    told(made, 0, range(1, 3))
    first = (tmp_path / "curves.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    told(made, 2, range(3, 6))
    assert (tmp_path / "curves.png").read_bytes() != first


def test_what_a_power_cut_left_of_rows_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    row = b'{"step": %d, "loss": 1.0}\n'
    file.write_bytes(row % 1 + b"\0" * 40 + b"\n" + b'{"step": "\xff\n' + row % 2 + b"[1]\n" + row % 3 + b'{"step": 4')
    assert log._cut(file, 2) == 3
    assert file.read_bytes() == row % 1 + row % 2


def test_a_full_disk_under_the_metrics_names_the_file(tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    made = SimpleNamespace(file=tmp_path / "metrics.jsonl", main=True)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="metrics.jsonl could not be written .*No space left.*make room there"):
        log.Log._write(made, {"step": 1})
