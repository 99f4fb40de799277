"""Runs on several machines: Slurm's batch script with stubs for Slurm's programs, and two machines that are network namespaces."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fault_forks import LIMIT, Row, run, same, saved, weights
from fault_launch import RANK, ROOT, SLOW, Launch, launched

STUBS = {
    "scontrol": """#!/bin/bash
if [ "$1" = show ]; then echo node-a; echo node-b; else echo "$@" > "$STUBS/requeued"; fi
""",
    "squeue": """#!/bin/bash
[ -z "$END" ] || date -d "$END" +%Y-%m-%dT%H:%M:%S
""",
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=1 exec "$@"
""",
    "accelerate": """#!/bin/bash
printf '%s\\n' "$@" > "$STUBS/arguments"
grep SigIgn /proc/$$/status > "$STUBS/ignored"
exit $STATUS
""",
}
JOB = {
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "64",
}
ARGUMENTS = """launch --config_file recipes/accelerate-multi-node.yaml --num_machines 2 --num_processes 8 --machine_rank 1
--main_process_ip node-a --main_process_port 34567 train/eagle.py recipes/eagle3-tiny.yaml"""


def slurm(folder: Path) -> Iterator[Row]:
    """What recipes/slurm.sh starts on each machine, and when it queues itself again."""
    row = Row("recipes/slurm.sh, with programs in place of Slurm's")
    cases = [
        (0, "+1 hour", False),
        (0, "+1 minute", False),
        (1, "+1 hour", False),
        (1, "+1 minute", True),
        (1, "", False),
        (1, "-1 second", True),
    ]
    for number, (status, end, again) in enumerate(cases):
        stubs = folder / str(number)
        stubs.mkdir(parents=True)
        for name, text in STUBS.items():
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        environment = {**os.environ, **JOB, "PATH": f"{stubs}:{os.environ['PATH']}", "STUBS": str(stubs), "STATUS": str(status), "END": end}
        words = ["train/eagle.py", "recipes/eagle3-tiny.yaml", "data.train=two words.jsonl"]
        done = subprocess.run(
            ["bash", ROOT / "recipes" / "slurm.sh", *words], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        arguments = (stubs / "arguments").read_text().splitlines()
        ignored = int((stubs / "ignored").read_text().split()[1], 16)
        requeued = (stubs / "requeued").read_text().split() if (stubs / "requeued").is_file() else []
        row.trial(
            f"status {status}, time is up {end or 'nobody knows when'}",
            right_arguments=arguments == [*ARGUMENTS.split(), "data.train=two words.jsonl"],
            launcher_ignores_usr1=bool(ignored >> (signal.SIGUSR1 - 1) & 1),
            same_status=done.returncode == status,
            requeued_when_time_was_up=requeued == (["requeue", "1234567"] if again else []),
        )
    yield row


@contextmanager
def machines(names: tuple[str, str]) -> Iterator[str]:
    """Two network namespaces with a link between them, 10.213.7.1 and .2 -> "" or why there are none."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    with ExitStack() as stack:
        failed = ""
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth1", "netns", names[1])
            for number, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", f"veth{number}")
                for link in ("lo", f"veth{number}"):
                    ip("-n", name, "link", "set", link, "up")
        except FileNotFoundError:
            failed = "no program `ip` here"
        except subprocess.CalledProcessError as error:
            failed = error.stderr.strip()
        yield failed


class Pair:
    """The same run on two machines, each of which has its own disk at the same path."""

    def __init__(self, folder: Path, names: tuple[str, str], ends: ExitStack) -> None:
        self.folder, self.names, self.ends = folder, names, ends
        self.disks = [folder / name for name in names]
        for path in (*self.disks, folder / "disk"):
            path.mkdir(parents=True)

    def launch(self, *words: str, second: tuple[str, ...] = ()) -> list[Launch]:
        """Start it; `second` goes to the second machine alone."""
        started = []
        for number, name in enumerate(self.names):
            where = ("--num_machines", 2, "--machine_rank", number, "--main_process_ip", "10.213.7.1", "--main_process_port", 29577)
            command = launched("cpu-2", *where, RANK, self.folder / "disk" / "run", "none", *words, *(second if number else ()))
            own = ["bash", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', self.disks[number], self.folder / "disk"]
            environment = {"GLOO_SOCKET_IFNAME": f"veth{number}"}
            started.append(
                self.ends.enter_context(Launch(self.disks[number], ["ip", "netns", "exec", name, *own, *command], **environment))
            )
        return started


def two_machines(folder: Path) -> Iterator[Row]:
    """A run on two machines without a shared disk: only the first has checkpoints, and the second needs none to continue."""
    row = Row("two machines (network namespaces) without a shared disk")
    names = (f"draftsmith-{os.getpid()}-a", f"draftsmith-{os.getpid()}-b")
    with machines(names) as missing, ExitStack() as ends:
        if missing:
            row.skipped = missing
        else:
            _stopped_and_gone_on(row, Pair(folder / "stopped", names, ends))
            _second_lost(row, Pair(folder / "lost", names, ends))
    yield row


def _stopped_and_gone_on(row: Row, pair: Pair) -> None:
    first, second = pair.launch(*SLOW)
    first.reaches(2)
    os.kill(second.process.pid, signal.SIGTERM)
    codes = [launch.ends()[0] for launch in (first, second)]
    last = saved(pair.disks[0] / "run")
    row.trial(
        f"SIGTERM to the second's launcher: launchers {codes}, ranks {first.codes() + second.codes()}",
        both_launchers_ended_in_error=all(codes),
        both_ranks_ended_with_143=first.codes() + second.codes() == [143, 143],
        saved_on_the_first=last >= 2,
        nothing_saved_on_the_second=not list(pair.disks[1].glob("run/checkpoints/step-*")),
    )
    again = pair.launch(*SLOW, "slow=0")
    codes = [launch.ends(2 * LIMIT)[0] for launch in again]
    run(pair.folder / "undisturbed", steps=100, schedule="constant")
    row.trial(
        "gone on",
        ended_well=codes == [0, 0],
        from_what_was_saved=f"resuming from {pair.folder / 'disk' / 'run' / 'checkpoints' / f'step-{last:08d}'}" in again[0].said(),
        the_same_weights=same(pair.disks[0] / "run", weights(pair.folder / "undisturbed"), 1e-6),
    )


def _second_lost(row: Row, pair: Pair) -> None:
    first, second = pair.launch(*SLOW, "save_every=1")
    first.reaches(3)
    for pid in (second.process.pid, *second.ranks()):
        os.kill(pid, signal.SIGKILL)
    code, seconds = first.ends()
    row.trial(
        f"the second lost: the first's launcher {code} after {seconds:.0f} s",
        ended_in_error=bool(code),
        within_a_minute=seconds < LIMIT,
        said_why="another process of this run is gone" in first.said(),
        nothing_saved_lost=saved(pair.disks[0] / "run") >= 2,
    )
