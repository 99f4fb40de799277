"""What trackers received, read back from their own files; nothing leaves the machine unasked."""

import json
import re
import socket
import struct
import sys

import pytest
import yaml
from logged import accelerator_of, logged_run, loss_of, recipe_of

from draftsmith.inference import machine
from draftsmith.train import distill, eagle, medusa
from draftsmith.train import recipe as recipes
from draftsmith.train.engine import trackers
from draftsmith.train.engine.log import Log

CI_NEEDS = "is not installed here"


@pytest.fixture(autouse=True)
def _matmul_rate(monkeypatch):
    monkeypatch.setattr(machine, "matmul_rate", lambda device, dtype: 1000.0)


def resumed(recipe):
    """Steps 1 to 5, of which a crash loses 4 and 5, then 4 to 7; and a second crash before 7, which loses 7."""
    logged_run(recipe, 0, range(1, 6), crash=True)
    logged_run(recipe, 3, range(4, 5), crash=True)
    logged_run(recipe, 3, range(4, 8))


def test_tensorboard_has_every_step_once(tmp_path):
    pytest.importorskip("tensorboard", reason=CI_NEEDS)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_of(tmp_path / "run", trackers=("tensorboard",))
    (tmp_path / "run").mkdir()
    resumed(recipe)

    def scalars(name):
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "draftsmith"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert scalars("loss") == [(step, 10.0 * step) for step in range(1, 8)]
    assert scalars("valid_loss") == [(step, 100.0 * step) for step in range(1, 8)]
    assert scalars("lr")[0] == (1, 0.5) and scalars("top1")[-1] == (7, 0.5)
    (hparams,) = (tmp_path / "run" / "tensorboard" / "draftsmith").glob("*/hparams.yml")
    assert yaml.safe_load(hparams.read_text()) == trackers.flat(recipe)
    logged_run(recipe, 0, range(1, 3))  # from the beginning, in the same folder
    assert scalars("loss") == [(1, 10.0), (2, 20.0)]


def test_an_evaluation_that_did_not_end_reaches_the_trackers_when_it_is_made_again(tmp_path):
    """Once: when the steps after it are taken a second time they have it already."""
    pytest.importorskip("tensorboard", reason=CI_NEEDS)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_of(tmp_path / "run", trackers=("tensorboard",))
    (tmp_path / "run").mkdir()
    report = Log(recipe, accelerator_of(recipe), 0, 0)
    for step in (1, 2, 3):
        report.add(loss_of(step, 1))
        report.write_training(step, 0.5)
    for done, evaluated in ((3, 0), (2, 0)):
        report = Log(recipe, accelerator_of(recipe), done, evaluated)
        report.write_evaluation(3, {"loss": 7.0})
    report.add(loss_of(4, 1))
    report.write_training(4, 0.5)
    report.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "draftsmith"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [(event.step, event.value) for event in events.Scalars("valid_loss")] == [(3, 7.0)]


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

    def refuse(self, address):
        if self.family != socket.AF_UNIX:
            tried.append(address)
            raise OSError("no network here")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: tried.append(address))
    return tried


def wandb_rows(file):
    """(step, values) of a .wandb file: after 7 bytes blocks of records, each with a checksum, a length and a type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, rows, content = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        assert kind in (1, 2, 3, 4) and at // 32768 == (at + 6) // 32768
        content, at = content + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record = Record.FromString(content)
            content = b""
            if record.WhichOneof("record_type") == "history":
                values = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                rows.append((values.pop("_step"), values))
    return rows


def test_wandb_without_a_key_stays_here_and_goes_on_with_its_run(tmp_path, local_only, capsys):
    wandb = pytest.importorskip("wandb", reason=CI_NEEDS)
    recipe = recipe_of(tmp_path / "run", trackers=("wandb",))
    (tmp_path / "run").mkdir()
    wandb.teardown()  # what it read of the environment before
    try:
        logged_run(recipe, 0, range(1, 6), crash=True).accelerator.trackers[0].finish()
        logged_run(recipe, 3, range(4, 8))
    finally:
        wandb.teardown()
    assert local_only == []
    run = json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]
    first, second = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run}*"))  # a second one in the same second gets a number
    assert f"wandb is offline, since it has no key: the run stays in {first}; `wandb sync {first}` sends it" in capsys.readouterr().out
    rows = [row for folder in (first, second) for row in wandb_rows(folder / f"run-{run}.wandb")]
    assert [(step, values["loss"], values["valid_loss"]) for step, values in rows] == [(n, 10.0 * n, 100.0 * n) for n in range(1, 8)]
    assert '"disable-analytics":true' in (first / "logs" / "debug-core.log").read_text()


def test_a_key_that_is_none_is_said_in_one_line(tmp_path, local_only, monkeypatch):
    wandb = pytest.importorskip("wandb", reason=CI_NEEDS)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    recipe = recipe_of(tmp_path, trackers=("wandb",))
    wandb.teardown()
    with pytest.raises(ValueError, match="wandb: WANDB_API_KEY invalid.*; set WANDB_MODE=offline to keep the run here, or leave") as caught:
        Log(recipe, accelerator_of(recipe), 0, 0)
    wandb.teardown()
    assert "\n" not in str(caught.value) and local_only == []


def test_trackio_writes_here_and_has_every_step_once(tmp_path, local_only, monkeypatch):
    pytest.importorskip("trackio", reason=CI_NEEDS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads TRACKIO_DIR when it is imported
    from trackio.sqlite_storage import SQLiteStorage

    recipe = recipe_of(tmp_path / "run", trackers=("trackio",))
    (tmp_path / "run").mkdir()
    resumed(recipe)
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
    assert trackers.options(recipe_of("x").train) == {}
    with pytest.raises(
        ValueError, match=re.escape("train.trackers has trackio, which is not installed; pip install 'draftsmith[trackio]'")
    ):
        trackers.options(recipe_of("x", trackers=("trackio",)).train)


def test_what_trackers_get_of_a_recipe():
    recipe = medusa.MedusaRecipe(
        target={"path": "https://me:hf_secret@host/model"},
        data={"train": ({"path": "//me:hf_secret@host/a", "weight": 2.0},)},
        train=recipe_of("x").train,
    )
    flat = trackers.flat(recipe)
    assert flat.keys() == recipes.keys(medusa.MedusaRecipe).keys()
    assert {type(value) for value in flat.values()} == {bool, int, float, str}
    assert (flat["train.betas"], flat["data.valid"], flat["data.pack"], flat["train.lr"]) == ("[0.9, 0.95]", "null", True, 0.5)
    assert flat["target.path"] == "https://host/model" and "hf_secret" not in str(flat) and "host/a" in flat["data.train"]


def test_no_key_of_a_recipe_is_for_a_secret():
    names = {name for kind in (medusa.MedusaRecipe, eagle.EagleRecipe, distill.DistillRecipe) for name in recipes.keys(kind)}
    assert len(names) > 80
    assert not [name for name in names if re.search(r"secret|password|credential|api_?key|_key$|token$|auth", name)]
