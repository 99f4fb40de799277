"""What a person meets: training, evaluating and generating from the command line, and one clear line for every mistake."""

import importlib
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import failing
from safetensors.torch import load_file, save_file

from draftsmith.eval import acceptance, generate
from draftsmith.inference.errors import FOREIGN_WARNINGS, exit_on_error, quiet_libraries
from draftsmith.train import cli, medusa, recipe, target

ROOT = Path(__file__).resolve().parents[1]
TEXT = "def parse_line(line):\n    return [part.strip() for part in line.split(',') if part]\n\n\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, target_folder):
    """A folder with text to train on, prompts, and a short run's artifact."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "text.txt").write_text("<|endoftext|>".join(f"# {n}\n" + TEXT * n for n in range(1, 41)))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": TEXT[: 20 + i], "domain": "ab"[i % 2]}) + "\n" for i in range(8)))
    train(folder, target_folder)
    return folder


def arguments(folder, target_folder, *overrides):
    common = {
        "target.path": target_folder,
        "data.train": folder / "text.txt",
        "data.cache": folder / "cache",
        "data.seq_len": 32,
        "train.output": folder / "run",
        "train.steps": 4,
        "train.precision": "fp32",  # of all runs in this process: Accelerate keeps the first one's
        "train.warmup_steps": 1,
        "train.eval_batches": 2,
        "medusa.heads": 2,
    }
    return [str(ROOT / "recipes" / "medusa-tiny.yaml"), *(f"{key}={value}" for key, value in common.items()), *overrides]


def train(folder, target_folder, *overrides):
    exit_on_error(medusa.main, arguments(folder, target_folder, *overrides))


def test_the_artifact_can_be_published_as_it_stands(workspace):
    artifact = workspace / "run" / "artifact"
    names = {file.name for file in artifact.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "recipe.yaml", "run.json", "tokenizer.json"} <= names
    assert not {name for name in names if name.endswith((".bin", ".pt", ".pkl"))}
    assert set(load_file(artifact / "model.safetensors")) == {
        f"{k}.{tensor}" for k in range(2) for tensor in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    assert json.loads((artifact / "config.json").read_text())["target"]["config_hash"]


def test_a_recipe_may_say_the_tree(workspace, target_folder, tmp_path, capsys):
    for words, tree in (
        (("tree.depth=2", "tree.width=2", "tree.nodes=5"), {"depth": 2, "width": 2, "nodes": 5}),
        (("tree.width=1",), [[0], [0, 0]]),
    ):
        output = tmp_path / str(len(words))
        train(workspace, target_folder, f"train.output={output}", "train.steps=1", "train.warmup_steps=0", *words)
        assert json.loads((output / "artifact" / "config.json").read_text())["tree"] == tree
        capsys.readouterr()
        exit_on_error(generate.main, ["--drafter", str(output / "artifact"), "--show-accepted", "--max-new-tokens", "6", "def"])
        assert "τ" in capsys.readouterr().err
    words = arguments(workspace, target_folder, f"train.output={tmp_path / 'deep'}", "tree.depth=3")
    assert "3 deep; medusa looks 2 ahead" in failing(capsys, medusa.main, words)


def test_evaluation_writes_the_card_and_prints_json_alone(workspace, capsys):
    artifact = workspace / "run" / "artifact"
    words = [str(artifact), "--prompts", str(workspace / "prompts.jsonl"), "--max-new-tokens", "12", "--nodes", "8", "--json"]
    exit_on_error(acceptance.main, words)
    report = json.loads(capsys.readouterr().out)
    assert report["answers"] == 8 and not report["divergences"]  # four prompts at two temperatures
    assert report["like_transformers"] == report["compared"] == 4
    card = (artifact / "README.md").read_text()
    assert "| domain | T | τ |" in card and "Not measured yet" not in card
    assert (artifact / "survival.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (artifact / "records.jsonl").read_text().splitlines()]
    positions = [line for line in lines if line["kind"] == "positions"]
    rounds = [each for line in lines if line["kind"] == "request" and line["setting"] == "0" for each in line["rounds"]]
    assert len(positions) == 2 * 8 and all(len(row["ranks"]) == len(row["log_probs"]) > 0 for row in positions)
    assert sum(each[2] for each in rounds) == report["overall"]["0"]["tokens"]
    config = json.loads((artifact / "config.json").read_text())
    assert config["tree"] == report["tree"]
    chain = [word for word in words if word not in ("--nodes", "8")]
    exit_on_error(acceptance.main, [*chain, "--tree", "chain", "--probe", "2", "--out", str(workspace / "chain")])
    chained = json.loads(capsys.readouterr().out)
    assert len(chained["tree"]) == 2 and 1 in chained["load"]["by_batch"]["batches"] and chained["load"]["check"]["batch"] == 1
    exit_on_error(acceptance.main, ["--from", str(workspace / "chain"), "--json"])
    assert json.loads(capsys.readouterr().out) == chained
    assert json.loads((artifact / "config.json").read_text()) == config and (artifact / "README.md").read_text() == card


def test_a_targets_own_repetition_penalty_is_used_greedily_too(target_folder, tmp_path, capsys):
    shutil.copytree(target_folder, tmp_path / "target")
    file = tmp_path / "target" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.9, "temperature": 2.0, "top_k": 3}))

    def text(folder, *more):
        exit_on_error(generate.main, ["--target", str(folder), "--max-new-tokens", "24", *more, TEXT[:30]])
        return capsys.readouterr().out

    own = text(tmp_path / "target")
    assert own == text(target_folder, "--repetition-penalty", "1.9") != text(target_folder)
    assert text(tmp_path / "target", "--repetition-penalty", "1") == text(target_folder)


def test_generation_is_the_same_with_any_drafter_and_prints_nothing_else(workspace, target_folder, capsys):
    texts = []
    for temperature in ("0", "0.9"):
        artifact = ["--drafter", str(workspace / "run" / "artifact"), "--tree"]
        for drafter in ([], ["--drafter", "none"], [*artifact, "saved"], [*artifact, "chain"]):
            words = ["--target", str(target_folder), *drafter, "--temperature", temperature, "--seed", "5"]
            exit_on_error(generate.main, [*words, "--max-new-tokens", "24", TEXT[:30]])
            captured = capsys.readouterr()
            assert captured.err == ""
            texts.append((temperature, captured.out))
    assert len(set(texts)) == 2
    exit_on_error(generate.main, ["--target", str(target_folder), "--rule", "typical", "--temperature", "1", "--show-accepted", TEXT[:30]])
    assert "LOSSY" not in capsys.readouterr().err  # nothing is drafted
    exit_on_error(generate.main, ["--drafter", str(workspace / "run" / "artifact"), "--show-accepted", "--max-new-tokens", "8", TEXT[:30]])
    captured = capsys.readouterr()
    assert re.fullmatch(r"8 tokens in \d rounds: τ \d\.\d\d, \d+ tokens/s\n", captured.err)


def test_the_same_command_twice_reuses_the_run(workspace, target_folder, capsys):
    artifact = workspace / "run" / "artifact"
    before = {file.name: file.read_bytes() for file in artifact.iterdir()}
    train(workspace, target_folder)
    out = capsys.readouterr().out
    assert "resuming from" in out and "there already" in out
    assert {file.name: file.read_bytes() for file in artifact.iterdir()} == before  # measurements included


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.stepz=3", "unknown recipe key 'train.stepz'; the nearest is 'train.steps'"),
        ("data.train={workspace}/nothing.txt", "nothing.txt' not found"),
        ("data.train={workspace}/empty.jsonl", "the source is empty or too short"),
        ("data.train={workspace}/chats.jsonl", "there is no template, so `messages` cannot be rendered"),
        ("data.train={workspace}/roles.jsonl", "roles.jsonl:1: `messages` 1 has the role None"),
        ("train.betas=[0.9", "override train.betas=[0.9: not a YAML value"),
        ("train.seed=-1", "greater than or equal to 0"),
        ("data.seq_len=999", "data.seq_len=999 is longer than the target's context of 128"),
        ("target.path={workspace}/nowhere", "no folder"),
        ("target.path={workspace}/pickled", "pickle"),
        ("target.path={workspace}/mismatched", "has 258 entries, its model only 257 logits"),
        ("target.path={workspace}/cut", "damaged or cut off"),
    ],
)
def test_a_mistake_in_training_is_one_line_and_writes_nothing(workspace, target_folder, capsys, override, says):
    (workspace / "empty.jsonl").write_text("")
    (workspace / "chats.jsonl").write_text((json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n") * 20)
    (workspace / "roles.jsonl").write_text(json.dumps({"messages": [{"content": "x"}]}) + "\n")
    for name in ("pickled", "mismatched", "cut"):
        shutil.rmtree(workspace / name, ignore_errors=True)
        shutil.copytree(target_folder, workspace / name)
    (workspace / "pickled" / "model.safetensors").rename(workspace / "pickled" / "pytorch_model.bin")
    weights = (workspace / "cut" / "model.safetensors").read_bytes()
    (workspace / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    from conftest import byte_tokenizer

    larger = byte_tokenizer()
    larger.add_tokens(["extra"])
    larger.save_pretrained(workspace / "mismatched")
    fresh = workspace / "fresh"
    line = failing(capsys, medusa.main, arguments(workspace, target_folder, f"train.output={fresh}", override.format(workspace=workspace)))
    assert says in line
    assert not fresh.exists()


def test_mistakes_in_evaluating_and_generating(workspace, target_folder, capsys):
    artifact = workspace / "run" / "artifact"
    assert "no folder" in failing(capsys, acceptance.main, [workspace / "no" / "such"])
    assert "not found" in failing(capsys, acceptance.main, [artifact, "--prompts", workspace / "no.jsonl"])
    for name in ("medusa", "hybrid:hybrid:medusa", "hybrid:hybrid:some/medusa"):
        assert "the folder of a trained drafter" in failing(capsys, generate.main, ["--drafter", name, "x"])
    for option, value in (("--limit", "0"), ("--nodes", "1"), ("--temperature", "-1"), ("--max-new-tokens", "1")):
        assert f"{option} {value}" in failing(capsys, acceptance.main, [artifact, f"{option}={value}"]).replace(".0", "")
    long = workspace / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 500, "id": "endless"}) + "\n")
    assert "'endless' has 500 tokens" in failing(capsys, acceptance.main, [artifact, "--prompts", long])
    assert "expected fewer than the context of 128" in failing(capsys, generate.main, ["--target", target_folder, "x" * 500])
    assert "got no tokens" in failing(capsys, generate.main, ["--target", target_folder, ""])
    for words, says in (
        (["--load-aware", "--adaptive-depth"], "--load-aware drafts complete trees, --adaptive-depth chooses a depth"),
        (["--top-p", "0.5"], "--top-p: decoding is greedy here, and no token is filtered; give --temperature 1 too"),
    ):
        assert says in failing(capsys, generate.main, ["--target", target_folder, *words, "x"])
    exit_on_error(generate.main, ["--target", str(target_folder), "--max-new-tokens", "1000", "x" * 20])
    assert "the answer was cut at the target's 128 positions" in capsys.readouterr().err
    assert "--temperature -1.0" in failing(capsys, generate.main, ["--target", target_folder, "--temperature=-1", "x"])
    half = workspace / "half"
    shutil.copytree(artifact, half)
    (half / "model.safetensors").unlink()
    assert "no weights" in failing(capsys, acceptance.main, [half])
    tensors = load_file(artifact / "model.safetensors")
    del tensors["1.1.weight"]
    save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
    assert "1 missing tensors: 1.1.weight" in failing(capsys, acceptance.main, [half])
    other = workspace / "other"
    shutil.copytree(target_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    line = failing(capsys, acceptance.main, [artifact, "--target", other])
    assert str(other) in line and str(target_folder) in line


def test_other_data_or_a_target_in_another_precision_does_not_continue_a_run(workspace, target_folder, capsys):
    copy, text = workspace / "again", workspace / "copy.txt"
    shutil.copy(workspace / "text.txt", text)
    train(workspace, target_folder, f"train.output={copy}", f"data.train={text}", "train.steps=2")
    capsys.readouterr()
    changed = arguments(workspace, target_folder, f"train.output={copy}", f"data.train={text}", "target.dtype=bfloat16")
    line = failing(capsys, medusa.main, changed)
    assert "target's dtype=float32, this run has bfloat16; take target.dtype=float32, give another train.output" in line
    text.write_text(text.read_text() + "and more")
    capsys.readouterr()
    line = failing(capsys, medusa.main, arguments(workspace, target_folder, f"train.output={copy}", f"data.train={text}"))
    assert "was made with data=" in line and "give another train.output" in line


def test_a_resumed_run_keeps_the_precision_that_was_measured(workspace, target_folder, monkeypatch):
    """A busy CPU, or another one, would choose another."""
    output = f"train.output={workspace / 'measured'}"
    monkeypatch.setattr("draftsmith.train.setup.fastest_dtype", lambda stored, precision: torch.bfloat16)
    train(workspace, target_folder, output, "target.dtype=auto", "train.steps=2")
    monkeypatch.setattr("draftsmith.train.setup.fastest_dtype", lambda stored, precision: torch.float32)
    train(workspace, target_folder, output, "target.dtype=auto", "train.steps=3")
    assert json.loads((workspace / "measured" / "artifact" / "config.json").read_text())["target"]["dtype"] == "bfloat16"


def test_a_book_is_one_document_and_is_held_out_in_part(workspace, target_folder):
    (workspace / "book.txt").write_text("It was a dark and stormy night. " * 200)
    train(workspace, target_folder, f"train.output={workspace / 'book'}", f"data.train={workspace / 'book.txt'}")
    assert (workspace / "book" / "artifact" / "model.safetensors").is_file()


def test_a_broken_checkpoint_names_the_folder(workspace, target_folder, capsys):
    copy = workspace / "copy"
    shutil.copytree(workspace / "run", copy)
    state = next((copy / "checkpoints").glob("step-*")) / "state.json"
    state.write_text('{"step": ')
    line = failing(capsys, medusa.main, arguments(workspace, target_folder, f"train.output={copy}"))
    assert "step-00000004 cannot be read" in line and "to start again, or restore it" in line


# What a help page must not import, since each takes seconds or much of one.
HEAVY = {"torch", "transformers", "accelerate", "datasets", "matplotlib", "pandas", "numpy"}
SCRIPTS = tuple(cli.methods())
HELP_PAGES = [["--help"], ["train"], *(["train", name, "--help"] for name in SCRIPTS), *([name, "--help"] for name in cli.COMMANDS)]


def command(*words, **keywords):
    """Run `draftsmith` with these words in a process of its own."""
    return subprocess.run([sys.executable, "-m", "draftsmith.train.cli", *map(str, words)], capture_output=True, text=True, **keywords)


def imported_by_help(run, words):
    """(the page, heavy modules that were imported) of a process that executes `run` with these words as its arguments."""
    script = (
        f"import json, runpy, sys\nsys.argv = {words}\n"
        f"try: runpy.{run}\nexcept SystemExit: pass\n"
        f"print(json.dumps(sorted({HEAVY} & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    page, _, modules = done.stdout.rstrip("\n").rpartition("\n")
    return page, json.loads(modules)


@pytest.mark.parametrize("words", HELP_PAGES, ids=" ".join)
def test_help_imports_nothing_heavy(words):
    page, modules = imported_by_help("run_module('draftsmith.train.cli', run_name='__main__')", ["draftsmith", *words])
    assert "usage: draftsmith" in page and modules == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_answers_help_before_its_imports(name):
    page, modules = imported_by_help(f"run_path('{ROOT / 'train' / name}.py', run_name='__main__')", [f"train/{name}.py", "--help"])
    assert f"usage: draftsmith train {name}" in page and modules == []


def test_help_has_a_heading_for_each_section_and_a_text_for_each_key(tmp_path):
    assert {"medusa", "eagle", "distill"} <= set(SCRIPTS)
    for name, (schema, own) in {"medusa": (medusa.MedusaRecipe, "medusa"), "target": (target.TargetRecipe, "architecture")}.items():
        page = cli.usage(schema, name, "about")
        for section in ("target", "data", "features", "tree", "train", own):
            assert re.search(rf"^{section}: [a-z].+", page, re.MULTILINE)
        for key, field in recipe.keys(schema).items():
            assert field.description, f"{key} has no text"
            assert re.search(rf"^  {re.escape(key)} +\w", page.replace("`", "x"), re.MULTILINE)
    plain = " ".join(page.split())
    assert "{cosine, linear, constant, wsd} (default: cosine)" in plain and "optimizer steps of the run (required)" in plain
    for name in SCRIPTS:
        assert all(field.description for field in recipe.keys(schema_of(name)).values())


def schema_of(name):
    module = importlib.import_module(f"draftsmith.train.{name}")
    return next(kind for kind in vars(module).values() if isinstance(kind, type) and recipe.Recipe in kind.__bases__)


def test_a_new_method_appears_without_a_list(monkeypatch, tmp_path):
    (tmp_path / "hydra.py").write_text('"""Train Hydra heads."""\n\nclass HydraRecipe(Recipe):\n    pass\n')
    (tmp_path / "helper.py").write_text("class Helper:\n    pass\n")
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "cli.py"))
    assert list(cli.methods()) == ["hydra"]


@pytest.mark.slow
def test_wrong_words_are_one_line():
    for words, says in (
        (
            ("evaluate",),
            "error: no command 'evaluate'; expected one of train, eval, bench, serve-bench, compare, gate, data, plan, sweep, export, import, check, publish, skip, generate",
        ),
        (("evl",), "did you mean 'eval'?"),
        (
            ("train", "medsua"),
            f"error: no method 'medsua'; expected one of {', '.join(SCRIPTS)}; did you mean 'medusa'?",
        ),
        (
            ("train", "medusa"),
            "error: no recipe; give a YAML file or one of: medusa-llama3.1-8b, medusa-smollm2-135m, medusa-tiny, medusa2-llama3.1-8b, medusa2-smollm2-135m, medusa2-tiny (draftsmith train medusa --help lists the keys)",
        ),
        (
            ("train", "medusa", "meduza-tiny"),
            "error: recipe 'meduza-tiny' not found; give a YAML file, or one of: medusa-llama3.1-8b, medusa-smollm2-135m, medusa-tiny",
        ),
        (("train", "medusa", "medusa-tiny", "train.step=3"), "error: unknown recipe key 'train.step'; the nearest is 'train.steps'"),
    ):
        done = command(*words)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and says in done.stderr
    for words in ((), ("train",)):
        done = command(*words)
        assert done.returncode == 2 and done.stdout.count("usage: draftsmith") == 1 and done.stderr == ""


@pytest.mark.slow
def test_training_by_name_says_nothing_of_other_libraries(workspace, target_folder):
    """Whatever is installed beside: PEFT, DeepSpeed, torchao and bitsandbytes warn when Accelerate and transformers import them."""
    common = arguments(workspace, target_folder, f"train.output={workspace / 'named'}", "train.steps=1", "train.warmup_steps=0")[1:]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = command("train", "medusa", "medusa-tiny", *common, env=environment, cwd=workspace)
    assert done.returncode == 0, done.stderr
    assert all(re.match(r"(training|preparing) ", line) for line in done.stderr.splitlines()), done.stderr
    assert not re.search("warning|Failed", done.stdout, re.IGNORECASE)
    assert json.loads((workspace / "named" / "run.json").read_text())["argv"][:2] == ["medusa.py", "medusa-tiny"]
    done = command("generate", "--drafter", workspace / "named" / "artifact", "--max-new-tokens", "4", TEXT[:30], env=environment)
    assert done.returncode == 0 and done.stderr == ""


def test_only_the_named_warnings_are_left_out(caplog):
    quiet_libraries()
    quiet_libraries()
    for name, text in FOREIGN_WARNINGS.items():
        logger = logging.getLogger(name)
        logger.addHandler(caplog.handler)
        try:
            logger.warning("%s and more", text)
            logger.warning("something else of %s", name)
        finally:
            logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {f"something else of {name}" for name in FOREIGN_WARNINGS}


def test_importing_sets_up_nothing():
    modules = sorted(
        f"draftsmith.{folder}.{file.stem}"
        for folder in ("train", "models", "data", "eval", "inference")
        for file in (ROOT / folder).glob("*.py")
        if file.stem != "__init__"
    )
    assert len(modules) > 30
    # transformers imports Triton itself where it is installed.
    script = (
        "import importlib, sys\nimport accelerate, transformers.models.llama.modeling_llama\nbefore = set(sys.modules)\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "import torch\nassert not torch.distributed.is_initialized()\nnew = set(sys.modules) - before\n"
        "bad = {name for name in new if name.split('.')[0] in ('triton', 'wandb', 'deepspeed') or '.kernels.' in name and 'draftsmith' in name}\n"
        "bad -= {'draftsmith.inference.kernels.reference'}  # plain torch\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def test_a_small_target_from_scratch(tmp_path, capsys):
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    words = [f"architecture.{key}={value}" for key, value in sizes.items()] + ["architecture.compile=false"]
    words += [f"train.output={tmp_path}", f"data.cache={tmp_path}", f"data.train={tmp_path}/text.txt", "data.seq_len=32"]
    words += ["train.steps=2", "train.warmup_steps=0", "train.eval_batches=1"]
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(f"# {n}\n" + TEXT * n for n in range(1, 41)))
    exit_on_error(target.main, [str(ROOT / "recipes" / "target-tiny.yaml"), *words])
    assert re.search(r"2 steps, held out \d+\.\d+ bits per byte", capsys.readouterr().out)
    card = (tmp_path / "artifact" / "README.md").read_text()
    assert "bits per byte, all of its supervised tokens" in card and "text.txt`." in card and "PSF" not in card and "license" not in card
    tensors = load_file(tmp_path / "artifact" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())


def test_a_tokenizer_stays_from_the_first_checkpoint_on(tmp_path):
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(Path(__file__).read_text().split("\n\n")))

    def entries(size):
        words = [f"architecture.vocab_size={size}", f"train.output={tmp_path}", f"data.cache={tmp_path}", f"data.train={tmp_path}/text.txt"]
        return len(target.prepare_tokenizer(recipe.load(target.TargetRecipe, "target-tiny", words)))

    assert [entries(320), entries(310)] == [320, 310]
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "state.json").write_text('{"sha256": {}}')
    assert entries(320) == 310
    with pytest.raises(ValueError, match="architecture.vocab_size=300 is less than the 310 entries"):
        entries(300)


def test_bits_per_byte_are_of_the_supervised_text():
    tokenizer = target.train_tokenizer(300, [TEXT])
    ids = torch.tensor([tokenizer(TEXT).input_ids[:8]])
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = target.LlamaForCausalLM(target.LlamaConfig(vocab_size=300, **sizes))

    class Held:
        def __len__(self):
            return 1

        def batch(self, rows):
            return {"input_ids": ids, "loss_mask": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 0]])}

    nats = -model(ids).logits[0, 4:6].log_softmax(-1)[[0, 1], ids[0, 5:7]].sum().item()
    size = len(tokenizer.decode(ids[0, 5:7]).encode())
    assert target.bits_per_byte(model, Held(), tokenizer) == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.mark.slow
def test_prompts_are_split_over_ranks_that_agree_on_the_tree(workspace, target_folder):
    """Two processes time the same forwards differently; one tree, one report, every prompt once."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "-q", "--config_file", str(ROOT / "recipes" / "accelerate-cpu-2.yaml")]
    command += ["-m", "draftsmith.eval.acceptance", "--drafter", str(target_folder), "--target", str(target_folder)]
    command += ["--prompts", str(workspace / "prompts.jsonl"), "--max-new-tokens", "8", "--temperature", "0", "--nodes", "8", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=workspace)
    assert done.returncode == 0, done.stderr[:6000]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    report = json.loads(line)
    assert report["machine"]["ranks"] == 2 and report["settings"]["prompts"] == report["answers"] == report["compared"] == 4
    assert report["overall"]["0"]["prompts"] == 4 and report["overall"]["0"]["tokens"] == 4 * 8
    assert report["nodes"] == len(report["tree"]) + 1 and len(report["overall"]["0"]["survival"]) == max(
        map(len, report["tree"]), default=0
    )
