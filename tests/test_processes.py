"""What the main process does before the others, on two processes of gloo."""

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
from draftsmith.inference.errors import exit_on_error
from draftsmith.train.engine import processes

def main(words):
    file, own = Path(words[0]), Path(words[1])

    def work():
        before = file.read_text() if file.is_file() else "nothing"
        own.write_text(before)
        if before == "damaged":
            raise ValueError("the cache is damaged")
        file.write_text("ready")
        return before

    print(processes.main_first(work))

exit_on_error(main, sys.argv[1:])
"""


def on_two_processes(folder):
    """-> exit status, standard output and standard error of both."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, folder / "cache", folder / f"read-{rank}"],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(started, said, strict=True)]


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ready")
    return folder, on_two_processes(folder)


def test_the_others_find_what_the_main_process_wrote(ready):
    folder, ((first, out, _), (second, other_out, _)) = ready
    assert (first, second) == (0, 0) and out.endswith("nothing\n") and other_out.endswith("ready\n")
    assert [(folder / f"read-{rank}").read_text() for rank in (0, 1)] == ["nothing", "ready"]


@pytest.mark.slow
def test_an_error_of_the_main_process_ends_the_others_before_they_work(tmp_path):
    (tmp_path / "cache").write_text("damaged")
    (first, _, err), (second, _, other_err) = on_two_processes(tmp_path)
    assert (first, second) == (2, 2) and err.endswith("error: the cache is damaged\n") and "damaged" not in other_err
    assert (tmp_path / "read-0").is_file() and not (tmp_path / "read-1").exists()
