"""Recipes: every shipped one loads, every key has a reader, and a wrong word stops the run."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.data.conversations import Source
from draftsmith.train import recipe, target
from draftsmith.train.medusa import MedusaRecipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml") if not file.stem.startswith("accelerate-"))


def schema_of(name):
    """The recipe class of the script that a recipe's name begins with."""
    module = importlib.import_module(f"draftsmith.train.{name.split('-')[0].rstrip('0123456789')}")
    return next(
        kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, recipe.Recipe) and kind is not recipe.Recipe
    )


def test_every_shipped_recipe_loads():
    assert len(RECIPES) >= 9
    checked = 0
    for name in RECIPES:
        loaded = recipe.load(schema_of(name), name + ".yaml", [])
        if check := getattr(sys.modules[schema_of(name).__module__], "check", None):
            check(loaded)
            checked += 1
        lines = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
        assert 5 < len(lines) <= 45
        assert loaded.train.steps == lines["train.steps"]
    assert checked > 30


def test_every_key_is_read_somewhere():
    source = "".join(file.read_text() for folder in ("train", "data", "eval") for file in (ROOT / folder).rglob("*.py"))
    seen = 0
    for name in RECIPES:
        for key in recipe.keys(schema_of(name)):
            section, field = key.split(".")
            reader = rf"\b(?:section|sizes|self|recipe\.{section}|{section})\.{field}\b"
            assert re.search(reader, source), f"no code reads {key}"
            seen += 1
    assert seen > 50
    assert not re.search(r"\b(?:section|train)\.stepz\b", source)


def test_overrides_numbers_and_order(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("train.output: out\ntrain.steps: 3\ntrain.batch_size: 2\ntrain.lr: 2e-3\ntrain.betas: [0.8, 0.9]\n")
    loaded = recipe.load(MedusaRecipe, file, ["train.steps=20", "target.path=org/model", "train.lr=1e-4", "train.weight_decay=1"])
    assert (loaded.train.steps, loaded.target.path, loaded.train.lr, loaded.train.betas) == (20, "org/model", 1e-4, (0.8, 0.9))
    assert loaded.train.weight_decay == 1.0
    odd = ["target.revision=7e12345", "train.output=2025-11-21", "data.valid=null", "train.lr=3E-4"]
    loaded = recipe.load(MedusaRecipe, file, odd)
    assert (loaded.target.revision, loaded.train.output, loaded.data.valid, loaded.train.lr) == ("7e12345", "2025-11-21", None, 3e-4)
    loaded = recipe.load(MedusaRecipe, file, ["train.steps=1_000", "train.lr=.5", "target.revision=0100", "target.path=1:30"])
    assert (loaded.train.steps, loaded.train.lr, loaded.target.revision, loaded.target.path) == (1000, 0.5, "0100", "1:30")


def test_a_source_of_a_list_may_be_its_path_alone(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("train.output: out\ntrain.steps: 3\ntrain.batch_size: 2\ntrain.lr: 2e-3\n")
    data = recipe.load(MedusaRecipe, file, ["data.train=[a.jsonl, {path: b.parquet, domain: code}]", "data.valid=[c.txt]"]).data
    assert data.train == (Source(path="a.jsonl"), Source(path="b.parquet", domain="code")) and data.valid == (Source(path="c.txt"),)
    with pytest.raises(ValueError, match=r"'data.train.0'.*got 3"):
        recipe.load(MedusaRecipe, file, ["data.train=[3]"])


def test_a_chain_has_no_number_of_nodes():
    with pytest.raises(ValueError, match=r"^tree.width=1 is a chain, of which tree.nodes=8 says nothing; leave out one of them$"):
        recipe.load(MedusaRecipe, "medusa-tiny.yaml", ["tree.width=1", "tree.nodes=8"])


def test_train_target_refuses_weights():
    with pytest.raises(ValueError, match="`train target` reads each text once in an epoch, whatever the weights in data.train"):
        target.check(recipe.load(target.TargetRecipe, "target-tiny", ["data.train=[{path: a.txt, weight: 2}]"]))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.stepz=3", "unknown recipe key 'train.stepz'; the nearest is 'train.steps'"),
        ("medusa.head=3", "the nearest is 'medusa.heads'"),
        ("5=3", "unknown recipe key '5'; --help lists all keys"),
        ("train.steps=0100", "recipe key 'train.steps'"),
        ("train.steps=1:30", "recipe key 'train.steps'"),
        ("train.lr=1:30.5", "recipe key 'train.lr'"),
        ("train.steps=many", "recipe key 'train.steps'"),
        ("train.steps=2.5", "recipe key 'train.steps'"),
        ("train.lr=-1", "greater than 0"),
        ("train.schedule=step", "'cosine', 'linear', 'constant' or 'wsd'"),
        ("train.steps", "not of the form key=value"),
        ("medusa.share_head=1", "recipe key 'medusa.share_head'"),
        ("data.exclude=chat", "recipe key 'data.exclude': expected a list, such as [a,b]; got 'chat'"),
        ("data.valid=[{path: a.jsonl, weight: 2}]", "a weight in data.valid does nothing"),
    ],
)
def test_a_wrong_word_stops_the_run(override, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        recipe.load(MedusaRecipe, "medusa-tiny.yaml", [override])
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="'nothing.yaml' not found; give a YAML file, or one of: .*medusa-tiny"):
        recipe.load(MedusaRecipe, "nothing.yaml", [])
    twice = tmp_path / "twice.yaml"
    twice.write_text("train.steps: 3\ntrain.steps: 4\n")
    with pytest.raises(ValueError, match="'train.steps' is given twice"):
        recipe.load(MedusaRecipe, twice, [])
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\n")
    with pytest.raises(ValueError, match="not a YAML recipe"):
        recipe.load(MedusaRecipe, broken, [])


def test_what_ran_is_saved_and_can_be_run_again(tmp_path):
    loaded = recipe.load(MedusaRecipe, "medusa-tiny.yaml", ["train.steps=7"])
    recipe.save(loaded, tmp_path)
    assert recipe.load(MedusaRecipe, tmp_path / "recipe.yaml", []) == loaded
    assert {"argv", "git", "versions"} <= yaml.safe_load((tmp_path / "run.json").read_text()).keys()


def test_the_commit_is_that_of_this_package_alone(tmp_path, monkeypatch):
    """An installed package may lie in the work tree of another project."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "a.yaml").write_text("a: 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(recipe, "RECIPES", tmp_path / "recipes")
    assert recipe._commit() == head
    (tmp_path / "recipes" / "a.yaml").write_text("a: 2\n")
    assert recipe._commit() == f"{head}-dirty"
    (tmp_path / "site" / "recipes").mkdir(parents=True)
    monkeypatch.setattr(recipe, "RECIPES", tmp_path / "site" / "recipes")
    assert recipe._commit() is None


def test_scripts_shadow_no_module():
    names = {file.stem for folder in ("train", "eval") for file in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert len(names) > 10
    for name in names:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


@pytest.mark.parametrize(
    ("method", "keys", "says"),
    [
        ("medusa", ["distill=0", "top_k=8"], "medusa.top_k=8 does nothing with medusa.distill=0"),
        ("hydra", ["distill=0", "top_k=8"], "hydra.top_k=8 does nothing with hydra.distill=0"),
        ("dflash", ["weights=pace", "gamma=5"], "dflash.gamma=5.0 does nothing with dflash.weights=pace"),
        ("dflash", ["weights=decay", "smoothing=0.2"], "dflash.smoothing=0.2 does nothing with dflash.weights=decay"),
    ],
)
def test_a_key_that_does_nothing_is_refused(method, keys, says):
    module = importlib.import_module(f"draftsmith.train.{method}")
    with pytest.raises(ValueError, match=re.escape(says)):
        module.check(recipe.load(schema_of(f"{method}-tiny"), f"{method}-tiny.yaml", [f"{method}.{key}" for key in keys]))


def test_layers_that_do_not_run_are_not_compiled():
    with pytest.raises(ValueError, match="train.compile=True does nothing with features.mode=offline"):
        recipe.load(schema_of("medusa-tiny"), "medusa-tiny.yaml", ["features.mode=offline", "features.store=x", "train.compile=true"])
