"""`draftsmith sweep`: who goes on, what runs, what is refused, and what a kill leaves. A stub stands in for the trainer but in one test."""

import importlib
import json
import multiprocessing
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import failing

from draftsmith.inference.claim import claim, is_claimed
from draftsmith.models.model_files import SHIPPED
from draftsmith.train import cli
from draftsmith.train import recipe as recipes
from draftsmith.train.eagle import EagleRecipe
from draftsmith.train.engine import output
from draftsmith.train.plan.report import schema_of
from draftsmith.train.sweep import command, search, trial
from draftsmith.train.sweep.plan import contents_of, make_plan
from draftsmith.train.sweep.run import FILES, KIND, run_sweep
from draftsmith.train.sweep.trial import Run, result_of

# A trainer that learns nothing: held-out τ rises with train.lr and with the steps. It says in `calls` that it ran, and ends as `faults` says.
STUB = """
import fcntl, json, os, signal, sys, time
from pathlib import Path
values = dict(word.partition("=")[::2] for word in sys.argv[3:])
folder, lr, steps = Path(values["train.output"]), float(values["train.lr"]), int(values["train.steps"])
stub = Path(__file__).parent
faults = json.loads((stub / "faults.json").read_text())
lr_and_seed = f"{values['train.lr']} seed {values.get('train.seed')}"
fault = faults.get(f"{values['train.lr']}@{steps}") or faults.get(lr_and_seed) or faults.get(values["train.lr"])
resumed = (folder / "checkpoints" / "state").exists()
with (stub / "calls").open("a") as calls:
    calls.write(f"{values['train.lr']}@{steps}{'+' if resumed else ''}{' seed ' + values['train.seed'] if 'train.seed' in values else ''}\\n")
if fault == "error":
    print("training ...\\nerror: the loss is | not finite\\n")
    raise SystemExit(2)
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
(folder / "artifact").mkdir(exist_ok=True)
mark = (folder / ".draftsmith.json").open("a+")
fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
mark.truncate(0)
mark.write('{"kind": "training run"}\\n')
mark.flush()
(folder / "run.json").write_text("{}")
if fault in ("wait", "stop") and not resumed:
    def save(number, frame):
        (folder / "checkpoints" / "state").write_text("")
        (stub / "saved").write_text("")
        os._exit(143)
    signal.signal(signal.SIGTERM, save)
    (stub / "waiting").write_text(str(os.getpid()))
    if fault == "stop":
        record = folder.parents[2] / "sweep.json"
        while not record.exists() or len(json.loads(record.read_text())["results"]) < 3:
            time.sleep(0.02)
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
    raise SystemExit(9)
tau = fault if isinstance(fault, float) else 1 + lr * steps + 0.5 * int(values.get("train.seed", 0))
rows = [{"step": 1, "seconds": 2.0}, {"step": steps, "seconds": 1.0}, {"step": steps, "valid_loss": 1.0, "valid_sim_tau": tau, "valid_tau": tau}]
if fault == "nan":
    rows[-1] = {"step": steps}
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """The folder of the stub; `calls` there lists its runs."""
    (tmp_path / "stub.py").write_text(STUB)
    (tmp_path / "faults.json").write_text("{}")
    monkeypatch.setattr(trial, "TRAIN", (sys.executable, str(tmp_path / "stub.py")))
    monkeypatch.setattr(trial, "POLL", 0.02)
    return tmp_path


def words(folder, *more):
    return ["eagle", "eagle1-tiny", "train.steps=90", "train.warmup_steps=9", "--output", str(folder / "sweep"), "--jobs", "2", *more]


def sweep(folder, *more):
    command.main(words(folder, *more))


def plan_of(folder, *more):
    return make_plan(command.parser().parse_intermixed_args(words(folder, *more)))


def calls(stub):
    """What the stub ran since the last question, sorted."""
    lines = (stub / "calls").read_text().splitlines() if (stub / "calls").exists() else []
    (stub / "calls").unlink(missing_ok=True)
    return sorted(lines)


FOUR = "train.lr=0.1,0.4,0.3,0.2"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("", [""]),
        ("1e-3,2e-3", ["1e-3", "2e-3"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3],4", ["[1,2]", "[3]", "4"]),
        ("[{path: a, weight: 1}],b", ["[{path: a, weight: 1}]", "b"]),
        ("\"a,b\",'c,d',e", ["a,b", "c,d", "e"]),
        ("['x]', 'y,z'],w", ["['x]', 'y,z']", "w"]),
        ("it's,yours", ["it's", "yours"]),
        ("[0.9,1", ["[0.9,1"]),
    ],
)
def test_values_are_split_at_commas_outside_brackets_and_quotes(text, values):
    assert search.split_values(text) == values


def test_a_grid_is_every_combination():
    grid = search.read_grid(["a.x=1,2", "a.y=[1,2],[3]"])
    assert [tuple(each.values()) for each in search.trials_of(grid)] == [("1", "[1,2]"), ("1", "[3]"), ("2", "[1,2]"), ("2", "[3]")]
    assert len(search.trials_of(search.read_grid([f"k{n}=1,2" for n in range(9)]))) == search.MOST_TRIALS


@pytest.mark.parametrize(
    ("steps", "trials", "eta", "rungs", "sizes"),
    [
        (700, 2, 3, [700], [2]),
        (700, 3, 3, [700], [3]),
        (700, 4, 3, [233, 700], [4, 2]),
        (700, 9, 3, [233, 700], [9, 3]),
        (700, 10, 3, [78, 233, 700], [10, 4, 2]),
        (700, 512, 3, [26, 78, 233, 700], [512, 171, 57, 19]),
        (700, 16, 2, [88, 175, 350, 700], [16, 8, 4, 2]),
        (2, 100, 3, [2], [100]),
        (4, 100, 3, [1, 4], [100, 34]),
    ],
)
def test_rungs(steps, trials, eta, rungs, sizes):
    assert search.rung_steps(steps, trials, eta) == rungs
    assert search.rung_sizes(trials, len(rungs), eta) == sizes


def test_the_best_third_survives_whatever_fails_or_ties():
    draws = random.Random(0)
    for _ in range(300):
        numbers = draws.sample(range(30), draws.randint(1, 12))
        measures = {number: draws.choice([None, float("nan"), float("inf"), 1.0, 1.5, 2.0, 2.5]) for number in numbers}
        valid = [number for number in numbers if measures[number] in (1.0, 1.5, 2.0, 2.5)]
        # A trial's place by counting those that beat it: a better measure, or an equal one that came earlier.
        beaten_by = {
            n: sum(measures[m] > measures[n] or (measures[m] == measures[n] and numbers.index(m) < numbers.index(n)) for m in valid)
            for n in valid
        }
        quota = (len(numbers) + 2) // 3
        assert search.survivors(measures, 3) == sorted(n for n in valid if beaten_by[n] < quota)
        ranking = search.ranked(measures)
        assert ranking[: len(valid)] == sorted(valid, key=beaten_by.get) and sorted(ranking) == sorted(numbers)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["train.lrr=1,2"], "unknown recipe key 'train.lrr'; the nearest is 'train.lr'"),
        (["train.lr=1e-3,fast"], "recipe key 'train.lr': input should be a valid number; got 'fast'"),
        (["eagle.loss=kl,kll"], "eagle.loss"),
        (["train.lr=1e-3,2"], "recipe key 'train.lr': input should be less than or equal to 1; got 2"),
        (["train.lr=1e-3,1e-3"], "has a value twice"),
        (["train.lr=1e-3,,2e-3"], "has an empty value"),
        (["train.lr=1e-3,2e-3", "train.lr=1e-2"], "'train.lr' is given twice"),
        (["train.lr"], "'train.lr' is not of the form key=value"),
        (["train.lr=1e-3"], "nothing to sweep"),
        ([f"k{n}=1,2,3,4" for n in range(5)], "the grid has 1,024 trials; expected at most 512"),
        ([FOUR, "train.output=x"], "the folder of the sweep is --output"),
        ([FOUR, "data.valid=a,b"], "data.valid must be equal for all trials"),
        ([FOUR, "data.loops=false,true"], "data.loops changes what simulated τ is measured with"),
        (["data.train=a,b"], "each trial would be measured on a part of its own data; give data.valid"),
        ([FOUR, "train.profile='20:40'"], "recipe key 'train.profile': step 40 is past train.steps=30"),
        (["train.profile=null,'2:40'", "--rungs", "30,90"], "(a run of the first rung has 30 steps; --rungs gives others)"),
        ([FOUR, "--seeds", "0,0"], "--seeds 0,0: expected distinct integers"),
        ([FOUR, "--seeds", "0,1", "train.seed=3"], "give one of them"),
        ([FOUR, "--rungs", "30,60"], "end with the recipe's train.steps=90"),
        ([FOUR, "--rungs", "60,30,90"], "expected rising steps"),
        ([FOUR, "--eta", "1"], "--eta 1: expected 2 to 512"),
        ([FOUR, "--jobs", "0"], "--jobs 0: expected 1 to 512"),
        ([FOUR, "features.mode=cache"], "features.mode=cache has one writer"),
        ([FOUR, "features.mode=online,cache"], "features.mode=cache has one writer"),
        ([FOUR, "--speed"], "--help` lists the options"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(stub, capsys, more, says):
    assert says in failing(capsys, command.main, words(stub, *more))
    assert not (stub / "sweep").exists() and not calls(stub)


def test_a_method_without_a_drafter_is_refused(stub, capsys):
    drafted = ", ".join(method for method in cli.methods() if method != "target")
    for method in ("target", "medusae"):
        assert f"expected one of {drafted}" in failing(capsys, command.main, [method, *words(stub, FOUR)[1:]])


def test_every_method_that_trains_a_drafter_can_be_swept(stub):
    methods = [name for name, source in cli.methods().items() if "\ndef build_untrained(" in source]
    assert len(methods) >= 12
    for method in methods:
        recipe = {"eagle": "eagle3-tiny"}.get(method, f"{method}-tiny")
        options = [method, recipe, "train.lr=1e-3,2e-3", "--output", str(stub / "sweep")]
        assert len(make_plan(command.parser().parse_intermixed_args(options)).recipes) == 2


def test_a_value_that_goes_with_every_swept_one_need_not_go_with_the_recipes_own(stub):
    """`student.layers` says nothing of the student that the recipe starts from."""
    options = ["distill", "distill-tiny", "student.start=pruned,random", "student.layers=2", "--output", str(stub / "sweep")]
    assert [each.student.start for each in make_plan(command.parser().parse_intermixed_args(options)).recipes] == ["pruned", "random"]


def test_a_rung_of_medusa_2_has_its_share_of_steps_of_the_heads_alone(stub):
    """60 of 120 steps, 10 of 20; a plan of the recipe that ships is not refused for its 60."""
    grid = ["joint.heads_steps=60", "train.steps=120", "train.lr=1e-3,2e-3", "--rungs", "20,120", "--output", str(stub / "sweep")]
    plan = make_plan(command.parser().parse_intermixed_args(["medusa", "medusa2-tiny", *grid]))
    assert [[word for word in plan.words(0, rung) if "heads_steps" in word] for rung in (0, 1)] == [
        ["joint.heads_steps=10"],
        ["joint.heads_steps=60"],
    ]
    four = ["medusa", "medusa2-tiny", "train.lr=1e-3,2e-3,3e-3,4e-3", "--output", str(stub / "sweep")]
    assert make_plan(command.parser().parse_intermixed_args(four)).rungs[0] < 60


def test_trials_of_a_rung_see_equally_many_tokens(stub):
    plan = plan_of(stub, "train.batch_size=4,8", "data.seq_len=64,128", "train.lr=0.1,0.2", "--rungs", "30,90")
    for rung, tokens in enumerate((30 * 4 * 256, 90 * 4 * 256)):  # the recipe's own batch and length
        runs = [run for number in range(8) for run in plan.runs(number, rung)]
        assert {run.tokens for run in runs} == {tokens}
        assert {run.steps for run in runs} == {tokens // batch // length for batch in (4, 8) for length in (64, 128)}
        for run in runs:  # a tenth of the steps is warm-up, as in the recipe
            assert f"train.steps={run.steps}" in run.words and f"train.warmup_steps={run.steps // 10}" in run.words
            schema = schema_of(importlib.import_module("draftsmith.train.eagle"))
            recipe = recipes.load(schema, run.words[1], list(run.words[2:]))
            held_out = recipe.train.eval_batches * recipe.train.batch_size * recipe.data.seq_len
            assert held_out == plan.base.train.eval_batches * 4 * 256
    assert len({run.folder for number in range(8) for rung in (0, 1) for run in plan.runs(number, rung)}) == 16


def test_the_best_go_on_and_the_same_command_runs_nothing_again(stub, capsys):
    sweep(stub, FOUR)
    folder = stub / "sweep"
    assert calls(stub) == ["0.1@30", "0.2@30", "0.3@30", "0.3@90", "0.4@30", "0.4@90"]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (folder / "table.md").read_text().splitlines() if line.startswith("| ")
    ]
    assert [row[:5] for row in rows] == [
        ["rank", "train.lr", "steps", "tokens", "simulated τ"],
        ["1", "0.4", "90", "92,160", "37.000"],
        ["2", "0.3", "90", "92,160", "28.000"],
        ["3", "0.2", "30", "30,720", "7.000"],
        ["4", "0.1", "30", "30,720", "4.000"],
    ]
    assert [row[5] for row in rows] == ["seconds", "91.0", "91.0", "31.0", "31.0"]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    last = captured.out.splitlines()[-1]
    assert last.endswith("draftsmith train eagle eagle1-tiny train.steps=90 train.warmup_steps=9 train.lr=0.4")
    assert "sweep 360/360" not in captured.out and re.search(r"^sweep 300/300 ", captured.err, re.M)
    assert [str(file.relative_to(folder)) for file in sorted(folder.rglob("artifact"))] == ["trials/001-lr=0.4/rung-2/artifact"]
    assert len(list(folder.rglob("metrics.jsonl"))) == 6
    sweep(stub, FOUR)
    assert not calls(stub) and capsys.readouterr().out.splitlines()[-1] == last
    assert "is of a sweep with --eta 3, now 2; give another --output" in failing(capsys, command.main, [*words(stub, FOUR), "--eta", "2"])
    (folder / "sweep.json").write_text("{")
    assert "sweep.json: not JSON" in failing(capsys, command.main, words(stub, FOUR))


def test_results_of_data_that_have_changed_do_not_count(stub, capsys):
    texts = [stub / name for name in ("a.txt", "b.txt", "valid.txt")]
    for file in texts:
        file.write_text("x = 1\n")
    texts += [stub / "template.jinja", stub / "prompts.jsonl"]
    texts[3].write_text("{{ messages }}\n")
    texts[4].write_text('{"prompt": "x"}\n')
    given = (f"data.train={texts[0]},{texts[1]}", f"data.valid={texts[2]}", "data.exclude=[chat]", "train.lr=0.1", "train.tau_prompts=1")
    given += (f"data.template={texts[3]}", f"train.tau_file={texts[4]}")
    sweep(stub, *given)
    sweep(stub, *given)
    for file in texts:
        before = file.read_text()
        file.write_text("x = 2\n")
        assert re.search(
            f"is of a sweep with contents of {file} .*, now .*; give another --output", failing(capsys, command.main, words(stub, *given))
        )
        file.write_text(before)
    texts[1].unlink()
    assert "b.txt" in failing(capsys, command.main, words(stub, *given))


def test_results_of_another_target_or_start_do_not_count(tmp_path):
    def contents(*keys):
        return contents_of([recipes.load(EagleRecipe, "eagle3-tiny", [f"target.path={tmp_path / 'target'}", *keys])])

    shutil.copytree(SHIPPED["tiny"], tmp_path / "target")
    shutil.copytree(SHIPPED["tiny-draft"], tmp_path / "start")
    before, started = contents(), contents(f"eagle.start={tmp_path / 'start'}")
    assert before == contents() and len(started) == len(before) + 1
    for folder in ("target", "start"):
        file = tmp_path / folder / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    changed = contents(f"eagle.start={tmp_path / 'start'}")
    assert {key for key in started if changed[key] != started[key]} == {f"contents of {tmp_path / name}" for name in ("target", "start")}
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    assert contents(f"target.path={tmp_path / 't.gguf'}", "eagle.start=name/on-the-hub").keys() == {
        "contents of stdlib train",
        f"contents of {tmp_path / 't.gguf'}",
    }


def test_failures_rank_last_with_their_reason_and_run_again(stub, capsys):
    (stub / "faults.json").write_text('{"0.4": "error", "0.3@90": "nan"}')
    sweep(stub, FOUR)
    calls(stub)
    table = (stub / "sweep" / "table.md").read_text()
    ranks = re.findall(r"^\| (\d) +\| (0\.\d)", table, re.M)
    assert ranks == [("1", "0.2"), ("2", "0.1"), ("3", "0.3"), ("4", "0.4")]
    assert re.search(r"0\.4 .*failed .*the loss is \\\| not finite", table) and re.search(
        r"0\.3 .*failed .*evaluation that is finite; see metrics", table
    )
    (stub / "faults.json").write_text("{}")
    sweep(stub, FOUR)
    assert calls(stub) == ["0.3@90", "0.4@30", "0.4@90"]  # 0.3 has lost its place in the last rung to none: 0.4 and it are the best
    assert capsys.readouterr().out.splitlines()[-1].endswith("train.lr=0.4")


def test_a_trial_that_failed_may_still_make_another_the_best(stub, capsys):
    """First 0.3 and 0.2 reach the last rung, where 0.2 is the better one. Then 0.4 takes its place, and is the worst there."""
    (stub / "faults.json").write_text('{"0.4": "error", "0.3@90": 3.0, "0.2@90": 9.0, "0.4@90": 1.0}')
    sweep(stub, FOUR, "--eta", "2")
    assert capsys.readouterr().out.splitlines()[-1].endswith("train.lr=0.2")
    (stub / "faults.json").write_text('{"0.4@90": 1.0}')
    sweep(stub, FOUR, "--eta", "2")
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith("train.lr=0.3") and (Path(said[-2].rpartition(" is ")[2]) / "artifact").is_dir()
    assert len(list((stub / "sweep").rglob("artifact"))) == 1


def test_where_all_fail_one_line_says_why(stub, capsys):
    (stub / "faults.json").write_text(json.dumps(dict.fromkeys(("0.1", "0.2", "0.3", "0.4"), "error")))
    line = failing(capsys, command.main, words(stub, FOUR))
    assert "all 4 trials of rung 1 of the sweep failed, the first with: the loss is | not finite (logs:" in line


def test_seeds_rank_by_their_mean(stub):
    (stub / "faults.json").write_text('{"0.4": "nan"}')
    sweep(stub, "train.lr=0.1,0.4,0.3", "--seeds", "0,2,5")
    assert calls(stub) == [f"{lr}@90 seed {seed}" for lr in ("0.1", "0.3", "0.4") for seed in (0, 2, 5)]
    table = (stub / "sweep" / "table.md").read_text()
    mean, spread = 1 + 27 + 7 / 6, torch.tensor([0.0, 1.0, 2.5]).std().item()
    assert re.search(rf"^\| 1 +\| 0.3 .*\| {mean:.3f} ± {spread:.3f} ", table, re.M) and re.search(r"^\| 3 +\| 0.4 .*failed", table, re.M)
    assert len(list((stub / "sweep").rglob("artifact"))) == 9  # a trial has failed, and the same command may change the order


def test_a_trial_with_a_seed_that_failed_keeps_the_weights_of_the_others(stub, capsys):
    (stub / "faults.json").write_text('{"0.4 seed 2": "nan"}')
    sweep(stub, "train.lr=0.1,0.4,0.3", "--seeds", "0,2")
    (stub / "faults.json").write_text("{}")
    sweep(stub, "train.lr=0.1,0.4,0.3", "--seeds", "0,2")
    best = capsys.readouterr().out.splitlines()[-2].rpartition(" is ")[2]
    assert "0.4" in best and (Path(best) / "artifact").is_dir() and len(list((stub / "sweep").rglob("artifact"))) == 2


def test_a_signal_stops_the_runs_which_save_and_the_same_command_goes_on(stub, capsys):
    (stub / "faults.json").write_text('{"0.3@30": "stop"}')
    with pytest.raises(SystemExit) as stopped:
        sweep(stub, FOUR)
    assert stopped.value.code == 128 + signal.SIGTERM and (stub / "saved").exists()
    assert "each saves a checkpoint" in capsys.readouterr().out
    assert calls(stub) == ["0.1@30", "0.2@30", "0.3@30", "0.4@30"]
    sweep(stub, FOUR)
    assert calls(stub) == ["0.3@30+", "0.3@90", "0.4@90"]


def test_kill_9_leaves_no_run_and_the_same_command_goes_on(stub):
    (stub / "faults.json").write_text('{"0.3@30": "wait"}')
    process = multiprocessing.get_context("fork").Process(target=sweep, args=(stub, FOUR))
    process.start()
    until = time.monotonic() + 60
    while not (stub / "waiting").exists() or len(json.loads(read(stub / "sweep" / "sweep.json"))["results"]) < 3:
        assert time.monotonic() < until and process.is_alive()
        time.sleep(0.05)
    with pytest.raises(ValueError, match="is writing there; wait for it"):
        sweep(stub, FOUR)
    process.kill()
    process.join()
    sweep(stub, FOUR)
    assert (stub / "saved").exists()  # Linux asked the run to stop when its sweep was gone
    assert calls(stub) == sorted(["0.1@30", "0.4@30", "0.3@30", "0.2@30", "0.3@30+", "0.3@90", "0.4@90"])


def read(file):
    return file.read_text() if file.exists() else '{"results": {}}'


def test_a_run_waits_while_its_folder_is_written(stub):
    plan = plan_of(stub, "train.lr=0.1,0.2")
    (run,) = plan.runs(0, 0)
    with claim(plan.folder, KIND, FILES, "--output"):
        pass

    def write():
        with claim(run.folder, output.KIND, (), "train.output"):
            while not (stub / "calls").exists():
                time.sleep(0.02)
            time.sleep(0.5)

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    while not is_claimed(run.folder):
        time.sleep(0.02)
    run_sweep(plan, 2)
    writer.join()
    assert not is_claimed(run.folder)
    assert (stub / "calls").read_text().splitlines() == ["0.2@90", "0.1@90"]  # without the wait: the other way round, or "0.1" fails


def test_the_first_run_prepares_the_data_alone(stub, monkeypatch):
    """Four at a time could start at once; the data are prepared when a run.json is there."""
    prepared, start = [], trial._start

    def started(run, *rest):
        prepared.append(any((stub / "sweep" / "trials").glob("*/*/run.json")))
        return start(run, *rest)

    monkeypatch.setattr(trial, "_start", started)
    run_sweep(plan_of(stub, FOUR), 4)
    assert prepared == [False] + [True] * 5


@pytest.mark.parametrize(
    ("rows", "tau", "measure"),
    [
        ([{"step": 5, "valid_tau": 1.9}, {"step": 9, "valid_tau": 1.5}], True, 1.5),
        ([{"step": 5, "valid_sim_tau": 1.9}, {"step": 9, "valid_sim_tau": 1.5}, {"step": 9, "loss": 1}], False, 1.5),
        ([{"step": 5, "valid_sim_tau": 1.9, "valid_loss": 1.0}, {"step": 9, "valid_top1": 1.5}], False, None),
        ([{"step": 5, "valid_sim_tau": float("inf"), "valid_loss": 1.0}], False, None),
        ([], True, None),
    ],
)
def test_the_measure_of_a_run(tmp_path, rows, tau, measure):
    run = Run("name", tmp_path / "run", ("medusa", "r"), 9, 9, tau, "")
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1')
    result = result_of(run, 0)
    assert result.measure == measure and bool(result.error) == (measure is None)


def test_a_method_without_a_measure_ends_the_sweep(tmp_path):
    run = Run("name", tmp_path, ("medusa", "r"), 9, 9, False, "")
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "valid_loss": 1.0, "valid_top1_head1": 0.5}\n')
    with pytest.raises(ValueError, match=r"medusa has no simulated τ on held-out data; measure τ itself: train.tau_prompts=4"):
        result_of(run, 0)


def test_simulated_chains_of_several_depths_are_not_compared(stub, capsys):
    (stub / "stub.py").write_text(
        STUB.replace('"valid_sim_tau": tau', '"valid_sim_tau": tau, **{f"valid_survival_{k}": 0 for k in range(steps // 10)}')
    )
    for _ in range(2):  # the second time it is read from what the first recorded
        assert "the depth of their simulated chains: 1, 3; measure τ itself" in failing(
            capsys, command.main, words(stub, FOUR, "--rungs", "10,30,90")
        )


def test_what_changes_simulated_tau_is_not_swept_by_it(stub):
    swept = ["distill", "distill-tiny", "distill.temperature=1,2", "--output", str(stub / "sweep")]
    with pytest.raises(ValueError, match=r"distill.temperature changes what simulated τ is measured with; .*train.tau_prompts=4"):
        make_plan(command.parser().parse_intermixed_args([*swept, "train.tau_prompts=0"]))
    assert len(make_plan(command.parser().parse_intermixed_args(swept)).trials) == 2  # the recipe measures τ


def test_a_key_that_is_newer_than_a_sweep_had_its_default(stub, capsys):
    sweep(stub, FOUR, "--rungs", "90")
    assert len(calls(stub)) == 4
    file = stub / "sweep" / "sweep.json"
    for value, same in (("false", True), ("true", False)):
        content = json.loads(file.read_text())
        content["settings"].pop("data.loops", None)
        content["settings"] |= {} if same else {"data.loops": True}
        file.write_text(json.dumps(content))
        if same:
            sweep(stub, FOUR, "--rungs", "90")
        else:
            assert "is of a sweep with data.loops true, now false" in failing(capsys, command.main, words(stub, FOUR, "--rungs", "90"))
        assert calls(stub) == [], value


def test_few_runs_share_all_cores(stub, monkeypatch):
    shares, ended = [], SimpleNamespace(returncode=0, poll=lambda: 0, terminate=int, wait=int, kill=int)
    monkeypatch.setattr(trial, "_start", lambda run, devices, slot, jobs: shares.append(jobs) or ended)
    monkeypatch.setattr(trial, "result_of", lambda run, status: trial.Result(1.0))
    plan = plan_of(stub, FOUR)
    for count, jobs in ((2, 16), (3, 2), (1, 1)):
        trial.run_all([plan.runs(number, 0)[0] for number in range(count)], [], jobs, lambda *_: None, lambda _: None)
        assert shares == [min(count, jobs)] * count
        shares.clear()


def test_gpus_are_shared_out(stub, monkeypatch):
    shown = []
    monkeypatch.setattr(
        trial.subprocess, "Popen", lambda *words, env, **more: shown.append((env.get("CUDA_VISIBLE_DEVICES"), env["OMP_NUM_THREADS"]))
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(trial.machine, "cores", lambda: 8)
    (run,) = plan_of(stub, FOUR).runs(0, 0)
    for jobs, slots in ((3, 3), (1, 1), (2, 2), (4, 4)):
        for slot in range(slots):
            trial._start(run, trial.gpus(), slot, jobs)
    trial._start(run, [], 0, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other work shares the cores
    trial._start(run, [], 0, 4)
    assert [devices for devices, _ in shown] == ["4", "6", "7", "4,6,7", "4,7", "6", "4", "6", "7", "4", "4,6,7", "4,6,7"]
    assert [threads for _, threads in shown] == ["5"] * 10 + ["2", "1"]


def test_a_link_is_not_written_through(stub, capsys):
    (stub / "elsewhere").mkdir()
    (stub / "sweep").mkdir()
    (stub / "sweep" / "trials").symlink_to(stub / "elsewhere")
    assert "is a link" in failing(capsys, command.main, words(stub, FOUR))
    assert not list((stub / "elsewhere").iterdir())


@pytest.mark.slow
def test_two_real_trials(tmp_path, target_folder, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = {"target.path": target_folder, "data.train": tmp_path / "text.txt", "data.cache": tmp_path, "data.near_duplicate": 1.0}
    sizes |= {"data.seq_len": 32, "train.steps": 3, "train.warmup_steps": 1, "train.batch_size": 2, "train.eval_batches": 1}
    sizes |= {"train.precision": "fp32", "eagle.steps": 2, "tree.depth": 2, "tree.width": 2, "tree.nodes": 4}
    more = [f"{key}={value}" for key, value in sizes.items()]
    command.main(["eagle", "eagle1-tiny", *more, "train.lr=1e-3,1e-2", "--output", str(tmp_path / "sweep")])
    results = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["results"]
    assert sorted(results) == ["000-lr=1e-3/rung-1", "001-lr=1e-2/rung-1"]
    for name, result in results.items():
        rows = [json.loads(line) for line in (tmp_path / "sweep" / "trials" / name / "metrics.jsonl").read_text().splitlines()]
        assert result["measure"] == rows[-1]["valid_sim_tau"] and result["seconds"] > 0
    best = Path(re.search(r"the best run is (\S+)", capsys.readouterr().out)[1])
    assert results[str(best.relative_to(tmp_path / "sweep" / "trials"))]["measure"] == max(result["measure"] for result in results.values())
    assert list((tmp_path / "sweep").rglob("model.safetensors")) and (best / "artifact" / "README.md").is_file()
    assert len(list((tmp_path / "sweep").rglob("artifact"))) == 1
