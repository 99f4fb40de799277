"""`draftsmith data` as a person uses it: prepare, show, capture, train from the store, regenerate; one clear line for each mistake."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from regeneration import make_target
from safetensors.torch import load_file

from draftsmith.data import candidate
from draftsmith.data.regenerate import Settings
from draftsmith.eval import loading
from draftsmith.inference import machine
from draftsmith.inference.claim import MARK
from draftsmith.inference.errors import exit_on_error
from draftsmith.train import cli, data_cli, medusa

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "recipes" / "medusa-tiny.yaml")


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [
        {
            "id": f"c{n}",
            "domain": "sums" if n % 3 else "ends",
            "messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": f"{n + 1} is next to {n}"}],
        }
        for n in range(60)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(target_folder, chats, folder, *overrides) -> list[str]:
    template = f"data.template={ROOT}/recipes/plain.jinja"
    small = [
        "train.steps=4",
        "train.batch_size=2",
        "train.eval_every=2",
        "train.eval_batches=1",
        "train.log_every=1",
        "train.precision=fp32",
    ]
    rest = [
        f"data.cache={folder}/cache",
        f"train.output={folder}/run",
        "data.seq_len=96",
        "data.near_duplicate=1.0",
        "target.dtype=float32",
    ]
    return [RECIPE, f"target.path={target_folder}", f"data.train={chats}", template, *small, *rest, *overrides]


def losses(output: Path) -> list[float]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("valid_loss")) for row in rows]


def test_training_from_a_store_is_training_online(target_folder, chats, tmp_path, capsys):
    online = arguments(target_folder, chats, tmp_path / "online")
    exit_on_error(medusa.main, online)
    losses_of = {"online": losses(tmp_path / "online" / "run")}
    assert len(losses_of["online"]) >= 6
    for precision in ("float32", "fp8"):
        store = [f"features.store={tmp_path}/{precision}", f"features.precision={precision}"]
        exit_on_error(data_cli.main, ["capture", *arguments(target_folder, chats, tmp_path / "online"), *store])
        assert "GB free" in capsys.readouterr().err
        exit_on_error(medusa.main, [*arguments(target_folder, chats, tmp_path / precision), *store, "features.mode=offline"])
        losses_of[precision] = losses(tmp_path / precision / "run")
    assert losses_of["float32"] == pytest.approx(losses_of["online"], rel=1e-6)
    assert losses_of["fp8"] == pytest.approx(losses_of["online"], rel=2e-2) and losses_of["fp8"] != losses_of["online"]
    cached = [f"features.store={tmp_path}/cached", "features.precision=float32", "features.mode=cache"]
    exit_on_error(medusa.main, [*arguments(target_folder, chats, tmp_path / "cache"), *cached])
    assert losses(tmp_path / "cache" / "run") == pytest.approx(losses_of["online"], rel=1e-6)
    assert len(list((tmp_path / "cached").glob("*.safetensors"))) == 2  # of the training part and of the held-out one
    weights = [load_file(tmp_path / name / "run" / "artifact" / "model.safetensors") for name in ("online", "float32")]
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 2
    for name in weights[0]:
        assert (weights[0][name] - weights[1][name]).abs().max() < 1e-4


def test_the_precision_of_the_features_goes_into_the_artifact(target_folder, chats, tmp_path, capsys):
    store = f"features.store={tmp_path}/s"
    bfloat16 = arguments(target_folder, chats, tmp_path, "target.dtype=bfloat16", store)
    bfloat16.remove("target.dtype=float32")
    exit_on_error(data_cli.main, ["capture", *bfloat16])
    exit_on_error(medusa.main, [*arguments(target_folder, chats, tmp_path), store, "features.mode=offline"])
    assert "is in float32, this was made with it in bfloat16" in capsys.readouterr().err
    config = json.loads((tmp_path / "run" / "artifact" / "config.json").read_text())
    assert config["target"]["dtype"] == "bfloat16"


def launched(processes, *words):
    """Run a command of `draftsmith data` in one or two processes."""
    launch = ["-m", "accelerate.commands.launch", "-q", "--config_file", str(ROOT / "recipes" / "accelerate-cpu-2.yaml")]
    command = [sys.executable, *(launch if processes > 1 else []), "-m", "draftsmith.train.data_cli", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_two_processes_capture_what_one_does(target_folder, chats, tmp_path):
    contents = []
    for processes in (1, 2):
        store = tmp_path / f"store{processes}"
        launched(processes, "capture", *arguments(target_folder, chats, tmp_path), f"features.store={store}")
        contents.append({file.name: file.read_bytes() for file in store.iterdir() if file.name != MARK})
    assert len(contents[0]) >= 3 and contents[0] == contents[1]


def saved(target, folder):
    """The words that name a target of these weights."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return ["--target", str(folder)]


def test_a_file_goes_on_in_the_precision_that_it_was_begun_in(tmp_path, monkeypatch):
    """A processor that is measured again, beside other work, may be faster in another."""
    target = make_target()
    target.model.bfloat16()
    words = [*saved(target, tmp_path / "target"), "--temperature", "1", "--max-new-tokens", "5", "--conversations"]
    monkeypatch.setattr(loading, "CACHE", 0)
    for written, measured in (("bfloat16", "bf16"), ("float32", "fp32")):
        out = tmp_path / written
        monkeypatch.setattr(machine, "decoding_precision", lambda measured=measured: measured)
        data_cli.main(["synthesise", str(out), *words, "1"])
        monkeypatch.setattr(machine, "decoding_precision", lambda measured=measured: {"bf16": "fp32", "fp32": "bf16"}[measured])
        data_cli.main(["synthesise", str(out), *words, "2"])
        assert [json.loads(line)["generation"]["dtype"] for line in out.read_text().splitlines()] == [written] * 2


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path):
    """The answers to conversations, and conversations of the target's own."""
    chats = tmp_path / "chats.jsonl"
    target = saved(make_target(), tmp_path / "target")
    turns = [[{"role": "user", "content": f"What is {n}?"}] * (1 + n % 2) for n in range(5)]
    chats.write_text("".join(json.dumps({"id": str(n), "messages": messages}) + "\n" for n, messages in enumerate(turns)))
    how = [*target, "--temperature", "1", "--max-new-tokens", "9"]
    written = []
    for processes in (1, 2):
        answers, own = tmp_path / f"answers{processes}", tmp_path / f"own{processes}"
        said = launched(processes, "regenerate", str(chats), str(answers), *how)
        assert said.count("5 rows, 5 of them new") == 1
        said = launched(processes, "synthesise", str(own), *how, "--conversations", "3")
        assert said.count("3 conversations, 3 of them new") == 1
        written.append((answers.read_bytes(), own.read_bytes()))
    assert written[0] == written[1]


def test_prepare_and_show_say_what_is_in_the_data(target_folder, chats, tmp_path, capsys):
    exit_on_error(data_cli.main, ["prepare", *arguments(target_folder, chats, tmp_path)])
    out = capsys.readouterr().out
    for word in ("train: 57 samples", "valid: 3 samples", "ends", "sums", "D = 16", "τ at most", "60 examples read", "cut at 96 tokens"):
        assert word in out, word
    exit_on_error(data_cli.main, ["show", *arguments(target_folder, chats, tmp_path), "--examples", "2", "--domain", "sums"])
    out = capsys.readouterr().out
    samples = re.findall(r"User: (\d+)\+1\?\s+Assistant:⟦ (\d+) is next to (\d+)<\|endoftext\|>⟧", out)
    assert len(samples) == 2 and all(int(b) == int(a) + 1 and a == c and int(a) % 3 for a, b, c in samples)


def test_the_target_answers_anew(target_folder, chats, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"id": str(n), "text": f"Number {n} is what we count here."}) + "\n" for n in range(3)))
    command = ["regenerate", str(few), str(out), "--target", str(target_folder), "--max-new-tokens", "5", "--prompt-tokens", "9"]
    exit_on_error(data_cli.main, command)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["0", "1", "2"] and all(
        row["text"][: row["given"]] == "Number " + row["id"] + " " for row in rows
    )
    before = out.read_bytes()
    exit_on_error(data_cli.main, command)
    assert out.read_bytes() == before and "3 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "no command `data nothing`; expected one of prepare, show"),
        (["prepare"], "expected a recipe first"),
        (["capture", RECIPE], "needs features.store"),
        (["show", "--examples", "3"], "expected a recipe first"),
        (["prepare", RECIPE, "data.train=none.jsonl"], "none.jsonl"),
        (["prepare", RECIPE, "data.template=none.jinja"], "data.template 'none.jinja' not found"),
        (["prepare", RECIPE, "data.sequence=3"], "unknown recipe key 'data.sequence'"),
        (["prepare", RECIPE, "data.train=[{path: a.jsonl, wait: 3}]"], "data.train"),
        (["regenerate", "none.jsonl", "out.jsonl"], "none.jsonl"),
        (["synthesise", "out.jsonl", "--target", "tiny", "--conversations", "3"], "prompts no question: there is none"),
        (["synthesise", "out.jsonl", "--target", "tiny", "--conversations", "0"], "got conversations 0"),
        (
            ["synthesise", "out.jsonl", "--target", "tiny", "--conversations", "3", "--openings", "none.txt"],
            "openings 'none.txt' not found",
        ),
        (
            ["synthesise", "out.jsonl", "--target", "tiny", "--conversations", "3", "--question-top-p", "0"],
            "--question-top-p 0.0: expected",
        ),
        (
            ["synthesise", "out.jsonl", "--target", "tiny", "--conversations", "3", "--server", "http://localhost:1"],
            "--server needs --model",
        ),
        (["regenerate", RECIPE, "out.jsonl", "--server", "http://localhost:1", "--model", "m"], "medusa-tiny.yaml"),
        (["regenerate", "a.jsonl", "out.jsonl", "--model", "m"], "--model is for a server; give --server too"),
        (["regenerate", "a.jsonl", "out.jsonl", "--omit", "top_p"], "--omit is for a server"),
        (
            ["regenerate", "a.jsonl", "out.jsonl", "--server", "http://localhost:1", "--model", "m", "--drafter", "ngram"],
            "--drafter is for the target in this process; leave it out",
        ),
        (
            ["synthesise", "out.jsonl", "--target", "tiny", "--conversations", "3", "--timeout", "3"],
            "--timeout is for a server; give --server too",
        ),
    ],
)
def test_a_mistake_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        exit_on_error(data_cli.main, words)
    err = capsys.readouterr().err.strip()
    assert caught.value.code == 2 and says in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("*.jsonl"))


def test_conversations_without_a_template_name_the_key(target_folder, chats, tmp_path, capsys):
    words = [word for word in arguments(target_folder, chats, tmp_path) if not word.startswith("data.template")]
    with pytest.raises(SystemExit):
        exit_on_error(data_cli.main, ["prepare", *words])
    err = capsys.readouterr().err.strip()
    assert "there is no template" in err and "set data.template to a file" in err and len(err.splitlines()) == 1


def test_the_command_is_registered():
    assert cli.COMMANDS["data"][0] == data_cli.__name__
    with pytest.raises(SystemExit) as caught:
        data_cli.main([])
    assert caught.value.code == 2


@pytest.mark.parametrize("command", [None, *data_cli.COMMANDS])
def test_help_is_printed_before_torch_is_imported(command):
    words = [command, "--help"] if command else ["--help"]
    code = (
        f"import sys; from draftsmith.train import data_cli\ntry: data_cli.main({words})\n"
        "except SystemExit as end: print(end.code, {'torch', 'transformers'} & sys.modules.keys())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "0 set()" and f"draftsmith data {command or 'prepare'}" in printed
    assert command is None or (data_cli.COMMANDS[command].__doc__ or "no text") in " ".join(printed.split())


def test_the_options_of_regenerate_are_its_settings():
    defaults = {name: field.default for name, field in Settings.__dataclass_fields__.items()}
    assert {name: default for name, (default, _) in data_cli.SETTINGS.items()} == defaults
    assert data_cli.QUESTIONS.keys() == data_cli.ANSWERS.keys() == defaults.keys()


def test_the_target_writes_conversations(target_folder, tmp_path, capsys, monkeypatch):
    folder, out = tmp_path / "target", tmp_path / "out.jsonl"
    shutil.copytree(target_folder, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}<a>")

    def asks(unfinished, text, reason):
        unfinished.messages.append({"role": "user", "content": f"Question of {unfinished.id}"})

    monkeypatch.setattr(candidate.Candidate, "add_question", asks)
    monkeypatch.setattr(candidate.Candidate, "_repeats", lambda *_: False)
    command = ["synthesise", str(out), "--target", str(folder), "--conversations", "3", "--max-new-tokens", "2"]
    exit_on_error(data_cli.main, [*command, "--question-max-new-tokens", "5", "--openings", "none"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 and all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
    generation = rows[0]["generation"]
    assert (generation["temperature"], generation["max_new_tokens"]) == (0.7, 2)
    assert generation["questions"].items() >= {"temperature": 1.0, "min_p": 0.05, "max_new_tokens": 5}.items()
    printed = capsys.readouterr().out
    assert "3 conversations, 3 of them new" in printed and "candidates dropped" in printed and "tokens/s" in printed


def test_options_may_stand_among_the_keys(target_folder, chats, tmp_path, capsys):
    recipe, *keys = arguments(target_folder, chats, tmp_path)
    printed = []
    for words in ([recipe, *keys, "--examples", "1"], ["--examples", "1", recipe, *keys], [recipe, keys[0], "--examples=1", *keys[1:]]):
        exit_on_error(data_cli.main, ["show", *words])
        printed.append(capsys.readouterr().out)
    assert printed[0].count("sample ") == 1 and len(set(printed)) == 1


def test_modes_without_their_store_are_refused(target_folder, chats, tmp_path, capsys):
    for overrides, says in (
        (["features.mode=offline"], "features.mode=offline needs features.store"),
        (["features.mode=offline", f"features.store={tmp_path}/none"], "no feature store in"),
    ):
        with pytest.raises(SystemExit):
            exit_on_error(medusa.main, [*arguments(target_folder, chats, tmp_path), *overrides])
        assert says in capsys.readouterr().err
    half = tmp_path / "half.jsonl"
    half.write_text("".join(chats.read_text().splitlines(keepends=True)[:40]))
    exit_on_error(data_cli.main, ["capture", *arguments(target_folder, half, tmp_path), f"features.store={tmp_path}/s"])
    overrides = ["features.mode=offline", f"features.store={tmp_path}/s"]
    with pytest.raises(SystemExit):
        exit_on_error(medusa.main, [*arguments(target_folder, chats, tmp_path), *overrides])
    assert re.search(r"lacks \d+ of \d+ samples of this data; run `draftsmith data capture`", capsys.readouterr().err)
    exit_on_error(medusa.main, [*arguments(target_folder, chats, tmp_path), *overrides, "features.allow_missing=true"])
