"""What a command leaves behind when its files, its streams or its inputs fail: measurements first, one line, nobody else's file touched."""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from draftsmith.data import prompts
from draftsmith.eval import card, measurements, output, page, plot, record_store, table
from draftsmith.eval import report as reports
from draftsmith.eval.report import Acceptance, Report
from draftsmith.inference import durable, progress
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.expand import DynamicTree, parse_tree_spec
from draftsmith.inference.progress import Bar
from draftsmith.train import cli

HOSTILE = ("[/]", "[bold]x", ":smile:", "\x1b]0;gone\x07", "a\nb", "\x9b31m", "$\\frac{", "_under", "a | b <i>", "\u202e", "d" * 5000)


def report(*domains: str) -> Report:
    acceptance = Acceptance(2, 4, 6, 1.5, 1.2, 1.8, (0.5,), (0.5,))
    settings = {
        "prompts": 2,
        "max_new_tokens": 8,
        "dtype": "float32",
        "slots": 1,
        "adaptive_depth": False,
        "exact": None,
    }
    made_for = {"name": "somebody/target"}
    return Report(
        made_for,
        {"method": "medusa"},
        settings,
        [[0]],
        2,
        overall={"0": acceptance},
        domains={"0": dict.fromkeys(domains or ("d",), acceptance)},
    )


DERIVED = tuple(name for name in measurements.NAMES if name != record_store.RECORDS)


def write(artifact):
    """What an evaluation of one round writes, in the end."""
    (artifact / record_store.RECORDS).write_bytes(record_store.BEGINNING)
    content = {name: {} for name in measurements.KEYS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "html", lambda _: page.MARK.decode())
        patch.setattr(page, "markdown", lambda _: "details")
        return measurements.write(artifact, report(), content, artifact=True)


@pytest.fixture
def artifact(tmp_path):
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "tree": [[0], [0, 0]], "more": 5}))
    card.write(folder, "medusa", {"name": "somebody/target"}, {"steps": 3, "tokens": 4000, "positions": 64})
    return folder


def test_all_measurements_are_written_and_known_again(artifact):
    assert measurements.obstacle(artifact, measurements.CHECKED) == ""
    for _ in range(2):
        assert write(artifact) == []
        assert measurements.obstacle(artifact, measurements.CHECKED) == ""
    assert {file.name for file in artifact.iterdir()} == {"config.json", "README.md", *measurements.NAMES}
    assert json.loads((artifact / "config.json").read_text()) == {"model_type": "medusa", "tree": [[0]], "more": 5}


@pytest.mark.parametrize("name", [*DERIVED, "config.json", "README.md"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_file_that_cannot_be_written_does_not_keep_the_others_from_it(artifact, monkeypatch, name, number):
    replace, before = durable.replace, {file.name: file.read_bytes() for file in artifact.iterdir()}

    def failing(path, write):
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        replace(path, write)

    monkeypatch.setattr(durable, "replace", failing)
    assert write(artifact) == [f"{name} ({os.strerror(number)})"]
    after = {file.name: file.read_bytes() for file in artifact.iterdir()}
    assert after.get(name) == before.get(name)
    assert all(file in after and after[file] != before.get(file) for file in {*DERIVED, "config.json", "README.md"} - {name})


@pytest.mark.parametrize("name", measurements.CHECKED)
@pytest.mark.parametrize("content", ["mine\n", "{}\n", '{"tau": 3}\n', "[" * 100_000, "\x89PNG"])
def test_foreign_files_are_an_obstacle(artifact, name, content):
    write(artifact)
    (artifact / name).write_text(content)
    assert measurements.obstacle(artifact, measurements.CHECKED) == f"{name} is there already, and not of an evaluation"


def test_links_are_an_obstacle(artifact, tmp_path):
    names = ("config.json", "README.md", *measurements.CHECKED)
    for name in names:
        link = artifact / name
        before = link.read_bytes() if link.exists() else None
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "elsewhere")
        assert measurements.obstacle(artifact, names) == f"{name} is a link"
        link.unlink()
        if before is not None:
            link.write_bytes(before)
    (tmp_path / "link").symlink_to(artifact)
    assert "is a link" in measurements.obstacle(tmp_path / "link", names)
    snapshot = tmp_path / "models--owner--drafter" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    assert "in the Hub's cache" in measurements.obstacle(snapshot, names)


def test_a_planted_temporary_name_leads_nowhere(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".acceptance.json.{os.getpid()}.part").symlink_to(precious)
    durable.write_text(tmp_path / "acceptance.json", "measured")
    assert precious.read_text() == "mine" and not (tmp_path / "acceptance.json").is_symlink()


def test_the_card_is_written_between_its_marks(artifact):
    file = artifact / "README.md"
    file.write_text(file.read_text().replace("## Use", "## Mine\n\nby hand\n\n## Use"))
    assert "Not measured yet" in file.read_text()
    card.write_acceptance(artifact, "medusa", card.measured(report("sums"), "details"))
    text = file.read_text()
    assert "by hand" in text and "| sums | 0 | 1.50 |" in text and "Not measured yet" not in text
    card.write_acceptance(artifact, "medusa", card.measured(report("verbs"), "details"))
    assert file.read_text() == text.replace("| sums ", "| verbs ")
    file.unlink()
    assert card.is_marked(artifact)
    card.write_acceptance(artifact, "medusa", card.measured(report("sums"), "details"))
    assert "| sums | 0 | 1.50 |" in file.read_text() and card.is_marked(artifact)


@pytest.mark.parametrize("content", [b"# My notes\n", b"caf\xe9", f"only\n{card.BEGIN}\n".encode(), f"{card.BEGIN} {card.END}".encode()])
def test_a_card_without_marks_stays(artifact, content):
    (artifact / "README.md").write_bytes(content)
    assert not card.is_marked(artifact)
    card.write_acceptance(artifact, "medusa", card.measured(report(), "details"))
    assert (artifact / "README.md").read_bytes() == content


def test_text_from_data_is_text(capsys, tmp_path):
    hostile = report(*HOSTILE)
    table.print_report(hostile)
    printed = capsys.readouterr().out
    assert all(c in "\n\t" or c.isprintable() for c in printed)
    for text in ("[/]", "[bold]x", ":smile:", r"\x1b]0;gone\x07", r"a\nb", r"\x9b31m", "$\\frac{"):
        assert text in printed
    lines = table.markdown(hostile).splitlines()
    assert len(lines) == 2 + len(HOSTILE) + 1 and all(line.replace("\\|", "").count("|") == 7 for line in lines)
    assert "<i>" not in table.markdown(hostile)
    plot.survival(hostile, tmp_path / "picture.png")
    assert plot.MARK in (tmp_path / "picture.png").read_bytes()[:4096]


def test_a_table_shows_its_numbers_at_80_columns(capsys, monkeypatch):
    """However long names and settings are; LOSSY is not cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    setting = "0.7 top_k=40 top_p=0.95 min_p=0.05 repetition_penalty=1.1 seed=12345 rule=typical"
    long = report("d" * 200)
    long.overall, long.domains, long.lossy = {setting: long.overall["0"]}, {setting: long.domains["0"]}, {setting: "typical"}
    table._print_table(table.Console(), "", table.HEADER, table.rows(long))
    printed = capsys.readouterr().out
    assert printed.count("1.50") == 2 and printed.count("LOSSY") == 2 and printed.count("d" * 8) >= 1
    assert max(map(len, printed.splitlines())) <= 80


def test_sentences_from_data_are_no_markup_in_a_card():
    sample = report()
    sample.settings["positions"] = 64
    sample.warnings, sample.skipped = ["12 prompts have a template's '<s>' in `their` words"], {"[x](http://e)": 1}
    text = card.measured(sample, "")
    assert "'&lt;s>' in \\`their\\` words." in text and "\\[x\\]\\(http://e\\) 1" in text


def test_a_report_with_numbers_that_are_not_finite_is_json():
    broken = report()
    broken.speed = {"speedup": float("inf"), "tau": 1.5}
    broken.cost = {1: float("nan")}
    content = json.loads(reports.as_json(broken))
    assert content["speed"] == {"speedup": None, "tau": 1.5} and content["cost"] == {"1": None}


class Full:
    """A stream on a full disk."""

    encoding = "utf-8"

    def write(self, text=""):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


def test_a_report_goes_to_stderr_where_stdout_is_full(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space"):
        output.deliver(lambda: print("the report"))
    assert capsys.readouterr().err == "the report\n"


def test_progress_ends_no_work(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Full())
    with Bar("working", 2) as bar:
        bar.update(1, "half")
        bar.update(2, "all")


def test_progress_tells_the_time_left_by_what_is_new(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    clock = iter((0.0, 30.0, 60.0, 90.0))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with Bar("working", 10, done=4) as bar:
        bar.update(4, "no rate yet")
        bar.update(6, "two in a minute")
        bar.update(10, "all")
    assert capsys.readouterr().err.splitlines() == [
        "working 4/10  no rate yet",
        "working 6/10  two in a minute  2.0 min left",
        "working 10/10  all  0.0 min left",
    ]


OUT_OF_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes."
)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError(""), "error: ValueError\n"),
        (OSError(), "error: OSError\n"),
        (MemoryError(), "error: not enough memory\n"),
        (RecursionError("maximum recursion depth exceeded"), "error: nested too deep (maximum recursion depth exceeded)\n"),
        (OverflowError("int too large"), "error: int too large\n"),
        (UnicodeEncodeError("ascii", "τ", 0, 1, "ordinal not in range"), "error: 'ascii' codec can't encode character '\\u03c4'"),
        (RuntimeError(OUT_OF_MEMORY), "error: [enforce fail"),
        (ValueError("a\x1b[31mb\r\n c\u202e"), "error: a\\x1b[31mb c\\u202e\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "no\x1b"), "error: [Errno 2] No such file: 'no\\x1b'\n"),
    ],
)
def test_errors_are_one_line(capsys, error, says):
    def main(_):
        raise error

    with pytest.raises(SystemExit) as exit:
        exit_on_error(main, [])
    line = capsys.readouterr().err
    assert exit.value.code == 2 and line.startswith(says) and line.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), TypeError("a bug"), AssertionError("a bug")])
def test_bugs_are_not_hidden(error):
    def main(_):
        raise error

    with pytest.raises(type(error), match="a bug"):
        exit_on_error(main, [])


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_ctrl_c_while_a_command_is_imported(capsys, monkeypatch, name):
    original = importlib.import_module

    def interrupted(module, *more):
        if module == cli.COMMANDS[name][0]:
            raise KeyboardInterrupt
        return original(module, *more)

    monkeypatch.setattr(importlib, "import_module", interrupted)
    monkeypatch.setattr(sys, "argv", ["draftsmith", name, "x"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 130 and capsys.readouterr() == ("", "")


def test_sigterm_leaves_in_good_order():
    cleaned = []

    def main(_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(30)
        finally:
            cleaned.append(True)

    with pytest.raises(SystemExit) as exit:
        exit_on_error(main, [])
    assert exit.value.code == 143 and cleaned and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("ending", "status", "says"),
    [
        (">/dev/full", 2, "error: stdout: No space left on device\n"),
        (">&-", 2, "error: stdout: Bad file descriptor\n"),
        ("| sleep 0", 141, ""),  # gone before the imports are done
        ("2>&-", 0, ""),
        ("<&-", 0, ""),
        (">&- 2>&- <&-", 2, ""),
    ],
)
def test_streams_of_a_real_process(ending, status, says):
    line = f"{sys.executable} -m draftsmith.train.cli --help {ending}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert (done.returncode, done.stderr) == (status, says)


def test_ids_and_domains_of_a_prompts_file(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = ['{"prompt": "a", "id": null}', '{"prompt": "b", "id": 7, "category": 3}', '{"turns": ["c", "d"], "id": "x", "prompt": ""}']
    file.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(rows).encode() + b"\r\n")
    read = prompts.load(file, distinct=True)
    assert [(prompt.id, prompt.domain, prompt.text) for prompt in read] == [
        ("1", "no domain", "a"),
        ("7", "3", "b"),
        ("x", "no domain", "c"),
    ]
    file.write_text('{"prompt": "a", "id": 2}\n{"prompt": "b"}\n')
    assert len(prompts.load(file)) == 2  # texts to leave out of the training data may have any ids
    with pytest.raises(ValueError, match="p.jsonl:2: `id` '2' is that of line 1 too"):
        prompts.load(file, distinct=True)


def test_prompt_files_of_one_name_have_ids_by_their_folders(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "q.jsonl").write_text('{"prompt": "y"}\n')
    files = [tmp_path / "a" / "p.jsonl", tmp_path / "b" / "p.jsonl", tmp_path / "q.jsonl"]
    assert [prompt.id for prompt in prompts.load(files, distinct=True)] == [f"{files[0]}:1", f"{files[1]}:1", "q.jsonl:1"]


def test_prompts_without_a_domain_are_one_row():
    for domains, names in ((("all",), ["all"]), (("code",), ["code", "all"]), (("code", "maths"), ["code", "maths", "all"])):
        sample = report(*domains)
        assert [row[0] for row in table.rows(sample)] == names
        sample.speed = {"timed": 2, "speedup": 1.2, "speedup_low": None, "speedup_high": None}
        sample.speedups = dict.fromkeys(domains, sample.speed)
        assert [row[0] for row in table.speed_rows(sample)] == names
        entries = card.results(json.loads(reports.as_json(sample)))["model-index"][0]["results"]
        shown = [entry["dataset"]["name"].removeprefix("held-out prompts, ") for entry in entries]
        assert shown == names


def test_a_report_of_an_earlier_version_is_shown():
    sample = report()
    del sample.settings["exact"], sample.settings["adaptive_depth"]
    assert "2 nodes a round" in table.size(sample)


def test_trees_of_configs_have_bounds():
    assert parse_tree_spec({"depth": 64, "width": 64, "nodes": 256}) == DynamicTree(64, 64, 256)
    assert parse_tree_spec([[rank] for rank in range(1024)]).num_nodes == 1025
    assert parse_tree_spec(None).num_nodes == parse_tree_spec(()).num_nodes == 1
    for tree in ([[1024]], [[rank] for rank in range(1025)], [(0,) * 65], {"depth": 65, "width": 1, "nodes": 2}, [[True]], "00", 5, [0]):
        with pytest.raises(ValueError, match="^tree: "):
            parse_tree_spec(tree)
