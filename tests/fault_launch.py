"""The same faults under the real `accelerate launch`: what its launcher does, and what the ranks make of it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fault_forks import LIMIT, STEPS, Row, saved

ROOT = Path(__file__).resolve().parents[1]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
# The run takes half a minute where nothing happens to it, and saves at its end only.
SLOW = ("slow=0.25", "steps=100", 'schedule="constant"')


def launched(launcher: str, *words: object) -> list[str]:
    """The command of an `accelerate launch` of fault_rank.py, whose own arguments come after the launcher's options in `words`."""
    return [*ACCELERATE, "--config_file", str(ROOT / "recipes" / f"accelerate-{launcher}.yaml"), *map(str, words)]


RANK = ROOT / "tests" / "fault_rank.py"


class Launch:
    """A command under way in a session of its own; its output goes to `folder`/said, its ranks' numbers to `folder`/pid-<rank>."""

    def __init__(self, folder: Path, command: Sequence[object], **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.began = folder, time.monotonic()
        for old in (*folder.glob("pid-*"), *folder.glob("code-*")):
            old.unlink()
        path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        with (folder / "said").open("w") as said:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever is left of it is killed."""
        for pid in (self.process.pid, *self.ranks()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        return [int(file.read_text()) for file in sorted(self.folder.glob("pid-*")) if file.read_text()]

    def reaches(self, step: int, limit: float = 120.0) -> None:
        """Wait until the run below `folder`/run has taken `step` steps."""
        metrics = self.folder / "run" / "metrics.jsonl"
        if not until(lambda: metrics.is_file() and f'"step": {step},' in metrics.read_text(), limit) or self.process.poll() is not None:
            raise TimeoutError(f"{self.process.args} did not get to step {step}:\n{self.said()}")

    def ends(self, limit: float = LIMIT) -> tuple[int | None, float]:
        """(exit status of the launcher, seconds until it and all of its ranks were gone); None and `limit` where they were not."""
        began = time.monotonic()
        gone = until(lambda: self.process.poll() is not None and not any(alive(pid) for pid in self.ranks()), limit)
        return (self.process.returncode, time.monotonic() - began) if gone else (None, limit)

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def codes(self) -> list[int]:
        """Exit statuses of the ranks that ended by themselves."""
        return [int(file.read_text()) for file in sorted(self.folder.glob("code-*"))]


def until(true: Callable[[], bool], limit: float) -> bool:
    """Wait until something is true -> whether it became so."""
    end = time.monotonic() + limit
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def alive(pid: int) -> bool:
    """Whether a process runs (one that ended and was not asked for does not)."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def lost(folder: Path) -> Iterator[Row]:
    """One of two ranks is lost in step 4."""
    stalled = "made no progress for 0.1 minutes while in step 4"
    for fate, word in (("exit", "is gone"), ("kill", "is gone"), ("hang", stalled), ("stop", stalled)):
        row = Row(f"accelerate launch, one of two ranks: {fate}")
        place = folder / fate
        stall = ("watchdog_minutes=0.1",) if word == stalled else ()
        with Launch(place, launched("cpu-2", RANK, place / "run", fate, "save_every=1", *stall)) as launch:
            launch.reaches(3)
            code, seconds = launch.ends()
            row.trial(
                fate,
                launcher_ended_in_error=bool(code),
                all_gone_within_a_minute=seconds < LIMIT,
                said_why=word in launch.said(),
                nothing_saved_lost=saved(place / "run") in (2, 3),
            )
        yield row


def signalled(folder: Path) -> Iterator[Row]:
    """Signals to the launcher alone, or to it and all ranks: the ranks save before they go, and none is left."""
    to_all, to_launcher = (lambda one: [one.process.pid, *one.ranks()]), (lambda one: [one.process.pid])
    cases: list[tuple[str, int, int, Callable[[Launch], list[int]], str]] = [
        ("one", signal.SIGTERM, signal.SIGTERM, to_launcher, "SIGTERM to its launcher"),
        ("one", signal.SIGKILL, signal.SIGTERM, to_launcher, "SIGKILL to its launcher"),
        ("one", signal.SIGTERM, signal.SIGTERM, to_all, "SIGTERM to launcher and rank"),
        ("one", signal.SIGINT, signal.SIGINT, to_all, "SIGINT to launcher and rank (Ctrl-C)"),
        ("cpu-2", signal.SIGTERM, signal.SIGTERM, to_launcher, "SIGTERM to its launcher"),
        ("cpu-2", signal.SIGINT, signal.SIGINT, to_launcher, "SIGINT to its launcher (Ctrl-C)"),
        ("cpu-2", signal.SIGKILL, signal.SIGTERM, to_launcher, "SIGKILL to its launcher"),
        ("cpu-2", signal.SIGTERM, signal.SIGTERM, to_all, "SIGTERM to launcher and ranks"),
    ]
    for number, (launcher, sent, caught, to, what) in enumerate(cases):
        row = Row(f"accelerate launch ({launcher}), {what}")
        place = folder / str(number)
        with Launch(place, launched(launcher, RANK, place / "run", "none", *SLOW)) as launch:
            launch.reaches(2)
            for pid in to(launch):
                os.kill(pid, sent)
            code, seconds = launch.ends()
            row.trial(
                f"after {seconds:.0f} s: launcher {code}, ranks {launch.codes()}",
                launcher_ended_in_error=bool(code),
                none_left=seconds < LIMIT,
                every_rank_ended_with_128_plus_signal=launch.codes() == [128 + caught] * len(launch.ranks()),
                saved=saved(place / "run") >= 2,
            )
        yield row


def before_the_time_is_up(folder: Path) -> Iterator[Row]:
    """SIGUSR1 to launcher and ranks, where the launcher was told to ignore it, as recipes/slurm.sh does."""
    row = Row("accelerate launch (cpu-2), SIGUSR1 to all, ignored by the launcher")
    command = launched("cpu-2", RANK, folder / "run", "none", *SLOW)
    with Launch(folder, ["bash", "-c", 'trap "" USR1; exec "$@"', "launch", *command]) as launch:
        launch.reaches(2)
        for pid in (launch.process.pid, *launch.ranks()):
            os.kill(pid, signal.SIGUSR1)
        code, seconds = launch.ends()
        row.trial(
            f"after {seconds:.0f} s: launcher {code}, ranks {launch.codes()}",
            launcher_ended_in_error=bool(code),
            none_left=seconds < LIMIT,
            ranks_ended_with_138=launch.codes() == [138, 138],
            the_launcher_says_138=re.search(r"exitcode\s*:\s*138", launch.said()) is not None,
            saved=saved(folder / "run") >= 2,
        )
    yield row


def port_in_use(folder: Path) -> Iterator[Row]:
    """A fixed port that another program has: on one machine Accelerate takes another, on several it refuses. (The recipes give port 0.)"""
    row = Row("accelerate launch, its port in use")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = ("--main_process_port", taken.getsockname()[1])
        with Launch(folder / "one", launched("cpu-2", *port, RANK, folder / "one" / "run", "none")) as launch:
            code, _ = launch.ends(2 * LIMIT)
            row.trial("one machine", trained=code == 0 and saved(folder / "one" / "run") == STEPS)
        two = ("--num_machines", 2, "--machine_rank", 0, "--main_process_ip", "127.0.0.1")
        with Launch(folder / "two", launched("cpu-2", *two, *port, RANK, folder / "two" / "run", "none")) as launch:
            code, _ = launch.ends(2 * LIMIT)
            row.trial(
                "two machines",
                ended_in_error=bool(code),
                said_so="another process is utilizing it" in launch.said(),
                nothing_began=not launch.ranks(),
            )
    yield row
