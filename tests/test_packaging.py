"""The wheel holds every module, recipe and file of the embedded target."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("train", "models", "data", "recipes", "eval", "inference")
NESTED = (
    "train/losses",
    "train/engine",
    "train/plan",
    "train/sweep",
    "train/benchmarks",
    "train/exchange",
    "models/formats",
    "eval/benchmarks",
    "eval/servers",
    "inference/kernels",
)
PACKAGES = tuple(sorted((*FOLDERS, *NESTED), key=lambda folder: (FOLDERS.index(folder.split("/")[0]), (*FOLDERS, *NESTED).index(folder))))


def test_every_folder_with_code_is_a_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {f"draftsmith.{folder.replace('/', '.')}": folder for folder in PACKAGES}
    assert listed["packages"] == list(names) and listed["package-dir"] == names
    for folder in FOLDERS:
        nested = {file.parent for file in (ROOT / folder).rglob("*.py")} - {ROOT / package for package in PACKAGES}
        assert not nested, f"{nested}: list it in pyproject.toml, or it is missing from the wheel"
    assert all((ROOT / folder / "__init__.py").is_file() for folder in PACKAGES)


def test_analysers_see_the_folders():
    for folder in FOLDERS:
        link = ROOT / ".typing" / "draftsmith" / folder
        assert link.is_symlink() and link.resolve() == ROOT / folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: a `build` folder in the repository would hand files of earlier versions to the next wheel."""
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", ".typing", "build", "runs", "tests", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(out)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (file,) = out.glob("*.whl")
    return file


def run_from_wheel(wheel, folder, script, *arguments):
    """Run a script in `folder` with the wheel's content as the only draftsmith that can be imported."""
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    start = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "from draftsmith.inference import errors\nassert errors.__file__.startswith(sys.path[0]), errors.__file__\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", start + script, str(site), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_the_wheel_is_complete_and_resolves_the_target_offline(wheel, tmp_path):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"draftsmith/{file.relative_to(ROOT)}" for package in PACKAGES for file in (ROOT / package).glob("*.py")}
    wanted |= {f"draftsmith/eval/{name}" for name in ("page.html.jinja", "page.md.jinja", "report.schema.json")}
    wanted |= {f"draftsmith/recipes/{file.name}" for ending in ("*.yaml", "*.jinja") for file in (ROOT / "recipes").glob(ending)}
    wanted |= {
        f"draftsmith/models/{folder}/{file.name}" for folder in ("tiny", "tiny_draft") for file in (ROOT / "models" / folder).iterdir()
    } | {"draftsmith/data/openings.jsonl", "draftsmith/data/prompts-chat.jsonl", "draftsmith/data/prompts-tiny.jsonl"}
    assert len(wanted) > 40 and wanted <= names, sorted(wanted - names)
    assert not [name for name in names if "/tests/" in name or name.startswith("tests")]
    script = (
        "from draftsmith.models import target\nloaded = target.Target.load('tiny')\n"
        "print(loaded.vocab_size, loaded.tokenizer.decode(loaded.tokenizer('def f').input_ids))"
    )
    run = run_from_wheel(wheel, tmp_path, script)
    assert run.stdout.split(maxsplit=1)[-1].strip() == "def f", run.stderr


@pytest.mark.slow
def test_a_drafter_is_trained_from_the_wheel_alone(wheel, tmp_path):
    """No folder of the repository is there: methods and recipes are found in the package, by name."""
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(f"# {n}\nfor line in lines:\n    yield line\n" * n for n in range(1, 41)))
    command = "from draftsmith.train.cli import main\nmain()"
    page = run_from_wheel(wheel, tmp_path, command, "train", "eagle", "--help").stdout
    assert "eagle.taps" in page and "one of these: eagle1-smollm2-135m" in page
    words = ["data.train=text.txt", "data.seq_len=32", "train.steps=1", "train.warmup_steps=0", "train.eval_batches=1", "train.output=out"]
    run = run_from_wheel(wheel, tmp_path, command, "train", "medusa", "medusa-tiny", *words)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "out" / "artifact" / "model.safetensors").is_file()


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


@pytest.mark.slow
def test_kernels_are_needed_by_nobody_and_compiled_by_no_import(tmp_path):
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    modules = {
        f"{package}.{file.stem}" for package, folder in folders.items() for file in (ROOT / folder).glob("*.py") if file.stem != "__init__"
    }
    assert KERNELS < modules and len(modules) > 100
    assert "Triton is not installed: pip install draftsmith[kernels]" in imports(True, modules - KERNELS, tmp_path)
    pytest.importorskip("triton")
    imports(False, KERNELS, tmp_path)
