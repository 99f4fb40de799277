"""The wheel holds every module, recipe and file of the embedded target."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("train", "models", "data", "recipes", "eval", "inference")
NESTED = ("train/losses", "train/engine", "train/plan", "train/benchmarks", "eval/benchmarks", "inference/kernels")
PACKAGES = tuple(sorted((*ROOMS, *NESTED), key=lambda folder: (ROOMS.index(folder.split("/")[0]), (*ROOMS, *NESTED).index(folder))))


def test_every_folder_with_code_is_a_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {f"draftsmith.{folder.replace('/', '.')}": folder for folder in PACKAGES}
    assert listed["packages"] == list(names) and listed["package-dir"] == names
    for room in ROOMS:
        nested = {file.parent for file in (ROOT / room).rglob("*.py")} - {ROOT / folder for folder in PACKAGES}
        assert not nested, f"{nested}: list it in pyproject.toml, or it is missing from the wheel"
    assert all((ROOT / folder / "__init__.py").is_file() for folder in PACKAGES)


def test_analysers_see_the_rooms():
    for room in ROOMS:
        link = ROOT / ".typing" / "draftsmith" / room
        assert link.is_symlink() and link.resolve() == ROOT / room


@pytest.mark.slow
def test_the_wheel_is_complete_and_resolves_the_target_offline(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"draftsmith/{file.relative_to(ROOT)}" for room in PACKAGES for file in (ROOT / room).glob("*.py")}
    wanted |= {f"draftsmith/recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")}
    wanted |= {
        f"draftsmith/models/{folder}/{file.name}" for folder in ("tiny", "tiny_draft") for file in (ROOT / "models" / folder).iterdir()
    } | {"draftsmith/data/prompts-tiny.jsonl"}
    assert len(wanted) > 40 and wanted <= names, sorted(wanted - names)
    assert not [name for name in names if "/tests/" in name or name.startswith("tests")]
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "from draftsmith.models import target\nassert target.__file__.startswith(sys.argv[1]), target.__file__\n"
        "loaded = target.Target.load('tiny')\nprint(loaded.vocab_size, loaded.tokenizer.decode(loaded.tokenizer('def f').input_ids))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "site")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.stdout.split(maxsplit=1)[-1].strip() == "def f", run.stderr


KERNELS = {"draftsmith.inference.kernels." + name for name in ("attention", "commit", "expand", "verify")} | {
    "draftsmith.train.losses.kernels"
}
IMPORTS = """
import importlib, json, sys
without, modules = json.loads(sys.argv[1])
if without:
    sys.modules["triton"] = None  # as where it is not installed: an ImportError
for name in modules:
    importlib.import_module(name)
if without:
    import torch
    from draftsmith.inference.decoder import Decoder
    from draftsmith.inference.draft_model import DraftModel
    from draftsmith.inference.expand import DynamicTree
    from draftsmith.models.target import Target
    target = Target.load("tiny")
    drafter = DraftModel(Target.load("tiny-draft"), DynamicTree(2, 2, 4))
    plain, drafted = (Decoder(target, one).generate([[1, 2, 3]], max_new_tokens=8)[0].tokens for one in (None, drafter))
    assert plain == drafted
    try:
        Decoder(target, kernels=True)
    except ValueError as error:
        print(error)
"""


def imports(without, modules, folder):
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    environment = {**os.environ, "TRITON_INTERPRET": "0", **caches}
    given = json.dumps([without, sorted(modules)])
    run = subprocess.run([sys.executable, "-c", IMPORTS, given], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    assert not [file for file in folder.rglob("*") if file.is_file()], "importing compiled something"
    return run.stdout.strip()


def test_kernels_are_needed_by_nobody_and_compiled_by_no_import(tmp_path):
    rooms = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    modules = {
        f"{package}.{file.stem}" for package, room in rooms.items() for file in (ROOT / room).glob("*.py") if file.stem != "__init__"
    }
    assert KERNELS < modules and len(modules) > 100
    assert "Triton is not installed: pip install draftsmith[kernels]" in imports(True, modules - KERNELS, tmp_path)
    pytest.importorskip("triton")
    imports(False, KERNELS, tmp_path)
