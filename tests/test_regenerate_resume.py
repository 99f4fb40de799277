"""Whatever stops a regeneration, the file has each answer exactly once."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from regeneration import (
    CONVERSATIONS,
    NEW,
    SAMPLED,
    Disk,
    Stub,
    ask,
    asks,
    make_target,
    many,
    refused,
    rows_of,
    with_misfits,
    without_waits,
)

from draftsmith.data import regenerate, resumable
from draftsmith.data.regenerate import Settings, with_decoder, with_server
from draftsmith.models.target import Target


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def quick(monkeypatch):
    without_waits(monkeypatch)


def test_misfits_do_not_disturb_resumption(target, tmp_path):
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    first = with_decoder(with_misfits(), undisturbed, target, SAMPLED, group=3, show=False)
    reference = undisturbed.read_bytes()
    for end in [0, *(place + 1 for place, byte in enumerate(reference) if byte == 10)]:
        out.write_bytes(reference[:end])
        again = with_decoder(with_misfits(), out, target, SAMPLED, group=3, show=False)
        assert out.read_bytes() == reference
        assert again.skipped == first.skipped and again.rows == first.rows
    assert again.new == 0


def test_a_file_cut_at_any_byte_goes_on_to_the_same_bytes(target, tmp_path, monkeypatch):
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    few = CONVERSATIONS[:5]
    with_decoder(few, undisturbed, target, SAMPLED, group=2, show=False)
    reference = undisturbed.read_bytes()
    for end in [1, 3, 7, 8, *random.Random(0).sample(range(len(reference)), 6), len(reference) - 1]:
        out.write_bytes(reference[:end])
        with_decoder(few, out, target, SAMPLED, group=2, show=False)
        assert out.read_bytes() == reference
    decoded = []
    monkeypatch.setattr(regenerate._Text, "answer", lambda *_: decoded.append(1) or iter(()))
    with_decoder(few, out, target, SAMPLED, group=2, show=False)
    assert out.read_bytes() == reference and not decoded, "a complete file is not decoded again"


def test_a_fault_at_each_write_sync_and_rename_loses_and_doubles_nothing(target, tmp_path, monkeypatch):
    few = CONVERSATIONS[:5]

    def run(out):
        return with_decoder(few, out, target, SAMPLED, group=2, show=False)

    with monkeypatch.context() as patch:
        disk = Disk(patch)
        run(tmp_path / "undisturbed")
    reference = (tmp_path / "undisturbed").read_bytes()
    counts = Counter(disk.calls)
    assert counts["write"] == 3 and counts["fsync"] == 4 and sum(counts.values()) == 7, "three groups; no file takes another's name"
    lines = reference.splitlines(keepends=True)
    groups = [b"".join(lines[:end]) for end in (0, 2, 4, 5)]
    torn = 0
    for dead in (False, True):
        for fail in range(1, len(disk.calls) + 1):
            out = tmp_path / f"{fail}{dead}"
            with monkeypatch.context() as patch:
                Disk(patch, fail, dead)
                with pytest.raises(OSError, match="No space left.*same command again") as error:
                    run(out)
            assert str(out) in str(error.value) and "\n" not in str(error.value)
            left = out.read_bytes()
            assert left in groups if not dead else reference.startswith(left)
            if left not in groups:
                torn += 1
                with monkeypatch.context() as patch:
                    again = Disk(patch, 2)  # the first call syncs the folder, the second drops what is torn
                    with pytest.raises(OSError, match="No space left"):
                        run(out)
                assert again.calls == ["fsync", "ftruncate"]
            run(out)
            assert out.read_bytes() == reference
    assert torn == 3


def test_an_interrupt_says_that_the_same_command_goes_on(target, tmp_path, monkeypatch, capsys):
    with_decoder(CONVERSATIONS, tmp_path / "undisturbed", target, SAMPLED, group=3, show=False)
    real = resumable.Output.append

    def interrupted(output, rows):
        real(output, rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(resumable.Output, "append", interrupted)
    for rows in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            with_decoder(CONVERSATIONS, tmp_path / "out", target, SAMPLED, group=3, show=False)
        assert f"stopped with {rows} rows" in (stderr := capsys.readouterr().err) and "same command" in stderr
    monkeypatch.undo()
    with_decoder(CONVERSATIONS, tmp_path / "out", target, SAMPLED, group=3, show=False)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "undisturbed").read_bytes()


# Forks a child per run, kills it after a number of events (before, in the middle of and after a write, and after a sync), and
# prints how many were killed, and how often the file then ended in the middle of a line.
DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import regeneration as here
mode, out, undisturbed, address = sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
jobs = here.many()
run = here.decoding(jobs) if mode == "decoder" else here.asking(jobs, address)

def child(path, pipe=None):
    pid = os.fork()
    if pid:
        return pid
    write, sync = os.write, os.fsync
    def event():
        write(pipe, b".")
        time.sleep(0.02)
    def loud_write(file, data):
        event(); half = write(file, data[: len(data) // 2]); event(); rest = write(file, data[len(data) // 2 :]); event()
        return half + rest
    def loud_sync(file):
        sync(file); event()
    if pipe is not None:
        os.write, os.fsync = loud_write, loud_sync
    try:
        run(path)
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)

rng, killed, torn = random.Random(7), 0, 0
for _ in range(10):
    reading, writing = os.pipe()
    pid = child(out, writing)
    os.close(writing)
    for _ in range(rng.randrange(2, 9)):
        if not os.read(reading, 1):
            break
    os.kill(pid, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    torn += not out.read_bytes().endswith(b"\\n") and out.stat().st_size > 0
    os.close(reading)
for path in (out, undisturbed):
    assert os.waitpid(child(path), 0)[1] == 0
print("KILLED", killed, "TORN", torn)
"""


def kill_ten_times(tmp_path: Path, mode: str, address: str = "") -> None:
    command = [
        sys.executable,
        "-c",
        DRIVER,
        str(Path(__file__).parent),
        mode,
        str(tmp_path / "out"),
        str(tmp_path / "undisturbed"),
        address,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert int(words[words.index("KILLED") + 1]) == 10 and int(words[words.index("TORN") + 1]) >= 1, done.stdout


@pytest.mark.faults
def test_ten_kills_leave_the_bytes_of_a_run_without_them(tmp_path):
    kill_ten_times(tmp_path, "decoder")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "undisturbed").read_bytes()
    assert len(rows_of(tmp_path / "out")) == 40


@pytest.mark.faults
def test_ten_kills_while_a_server_answers_leave_each_id_once(tmp_path):
    with Stub() as stub:
        kill_ten_times(tmp_path, "server", stub.address)
    rows = rows_of(tmp_path / "out")
    assert sorted(row["id"] for row in rows) == sorted(source.id for source in many())
    assert sorted(map(json.dumps, rows)) == sorted(map(json.dumps, rows_of(tmp_path / "undisturbed")))


def test_an_output_of_something_else_is_refused_by_name_and_left_alone(target, tmp_path):
    out = tmp_path / "out"

    def run(settings=SAMPLED, conversations=CONVERSATIONS, made_by=target):
        return lambda: with_decoder(conversations, out, made_by, settings, group=3, show=False)

    run()()
    rows = out.read_bytes().splitlines(keepends=True)
    for settings, match in (
        (Settings(temperature=1.0, seed=6, max_new_tokens=NEW), "seed 5, now it is 6"),
        (Settings(temperature=0.5, seed=5, max_new_tokens=NEW), "temperature 1.0, now it is 0.5"),
        (Settings(temperature=1.0, seed=5, max_new_tokens=7), "max_new_tokens 12, now it is 7"),
    ):
        refused(out, match, run(settings))
    other = Target.wrap(target.model, target.tokenizer, "another")
    refused(out, "target 'tiny-chat', now it is 'another'", run(made_by=other))
    refused(out, "'z' is not in the input", run(conversations=CONVERSATIONS[:-1]))
    refused(out, "now it is 'http", lambda: with_server(CONVERSATIONS, out, "http://localhost:1/v1", "m", SAMPLED, show=False))
    for text, match in (
        (rows[:1] + rows[:1], "out:2: id 'b' is there twice"),
        (rows[1:2] + rows[:1], "not in the order"),
        (rows[:1] + rows[2:], "row of 'c10' is gone"),
        ([b'{"id": "b", "messages": []}\n'], "out:1: not a row"),
        ([b'{"id": "b", "messages": []}'], "out:1: not a row"),
        ([*rows[:1], b"nonsense\n", *rows[1:]], "out:2: not a row"),
        ([b"my own notes"], "out:1: not a row"),
    ):
        out.write_bytes(b"".join(text))
        refused(out, match, run())


def test_an_output_that_cannot_be_written_is_one_line_with_its_path(target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for out, match in ((tmp_path, "is a folder"), (tmp_path / "file" / "out", "file/out: .*(File exists|Not a directory)")):
        refused(out, match, lambda out=out: with_decoder(CONVERSATIONS, out, target, SAMPLED, show=False))
    out, real = tmp_path / "out", os.open

    def read_only(path, flags, *rest):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    refused(out, "out: Read-only file system; .*another output", lambda: with_decoder(CONVERSATIONS, out, target, SAMPLED, show=False))


def test_a_file_of_other_conversations_is_refused(target, tmp_path):
    out = tmp_path / "out"
    with_decoder(CONVERSATIONS, out, target, SAMPLED, show=False)
    answered = [replace(source, messages=[dict(turn) for turn in source.messages or []] or None) for source in CONVERSATIONS]
    answered[0].messages[2]["content"] = "another OLD answer"
    with_decoder(answered, out, target, SAMPLED, show=False)  # it is answered anew anyhow
    answered[0].messages[1]["content"] = "Another question?"
    refused(out, "'c9' was another conversation when this row was made", lambda: with_decoder(answered, out, target, SAMPLED, show=False))
    changed = [replace(source, text=source.text and source.text + "!") for source in CONVERSATIONS]
    refused(out, "'t1' was another conversation when this row", lambda: with_decoder(changed, out, target, SAMPLED, show=False))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    del rows[0]["generation"][resumable.GIVEN]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(out, "was another conversation when this row was made", lambda: with_decoder(CONVERSATIONS, out, target, SAMPLED, show=False))


def test_two_runs_do_not_write_one_file(target, tmp_path):
    out = tmp_path / "out"
    with_decoder(CONVERSATIONS[:1], out, target, SAMPLED, show=False)
    facts = {key: value for key, value in rows_of(out)[0]["generation"].items() if key != "finish_reasons"}
    with resumable.Output(out, facts, {"c9"}):
        refused(
            out, rf"process {os.getpid()} \(.*\) is writing it", lambda: with_decoder(CONVERSATIONS[:1], out, target, SAMPLED, show=False)
        )
    assert with_decoder(CONVERSATIONS[:1], out, target, SAMPLED, show=False).rows == 1


def test_lone_surrogates_survive_the_file(tmp_path):
    row = {"id": "\ud83d", "text": "\ud83d and ü and \U0001f600"}
    with resumable.Output(tmp_path / "out", {}, {"\ud83d"}) as output:
        output.append([row])
    assert rows_of(tmp_path / "out") == [row] and "ü".encode() in (tmp_path / "out").read_bytes()


def test_faults_of_the_disk_while_a_server_answers(tmp_path, quick, monkeypatch):
    jobs = asks(4)
    with Stub(hold=0) as stub:
        with monkeypatch.context() as patch:
            disk = Disk(patch)
            ask(stub, tmp_path / "undisturbed", jobs, concurrency=2)
        calls = Counter(disk.calls)
        assert calls["fsync"] == 5 and calls["write"] >= 4
        for dead in (False, True):
            for fail in range(1, 10):
                out = tmp_path / f"{fail}{dead}"
                with monkeypatch.context() as patch:
                    Faulty(patch, out, fail, dead)
                    with pytest.raises(OSError, match="No space left.*same command again"):
                        ask(stub, out, jobs, concurrency=2)
                ask(stub, out, jobs, concurrency=2)
                assert Counter(row["id"] for row in rows_of(out)) == Counter(source.id for source in jobs)


class Faulty(Disk):
    """Counts only the calls on one file and its folder: an event loop writes to pipes of its own."""

    def __init__(self, monkeypatch, path: Path, fail: int, dead: bool) -> None:
        self.path = path
        super().__init__(monkeypatch, fail, dead)

    def wrap(self, name, real):
        counted = super().wrap(name, real)

        def call(file, *rest):
            ours = os.path.realpath(f"/proc/self/fd/{file}") in (str(self.path), str(self.path.parent))
            return counted(file, *rest) if ours else real(file, *rest)

        return call


@pytest.mark.faults
def test_an_interrupt_while_a_server_answers(tmp_path):
    """A real SIGINT in a real process: exit by KeyboardInterrupt, one line, and the rest by the same command."""
    jobs, out = asks(30), tmp_path / "out"
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import regeneration as here
here.with_server(here.asks(30), Path({str(out)!r}), sys.argv[1], "m", here.SAMPLED, concurrency=2, show=False)
"""
    with Stub(hold=0.2) as stub:
        process = subprocess.Popen([sys.executable, "-c", code, stub.address], stderr=subprocess.PIPE, text=True)
        while not (out.is_file() and out.stat().st_size) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1]
        assert process.returncode == -signal.SIGINT and "same command continues" in stderr
        assert 0 < len(rows_of(out)) < 30
        stub.hold = 0.0
        with_server(jobs, out, stub.address, "m", SAMPLED, show=False)
    assert Counter(row["id"] for row in rows_of(out)) == Counter(source.id for source in jobs)
