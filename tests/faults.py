"""Tries every fault that a run must survive, and inputs of careless users and attackers: `make test-faults`, or `python tests/faults.py`.

It prints a row for each fault: the number of trials, and of those survived. A run survives if it ends as it should (killed, or in error with
one line that says what to do), loses nothing that was saved, and continues to the weights of an undisturbed run. The exit status is 1 if a
trial was not survived.
"""

import os

# Before torch: forked processes cannot share a GPU.
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DRAFTSMITH_CACHE": "cache"}

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import bad_inputs
import fault_cluster
import fault_eval
import fault_kills
import fault_launch
import fault_ranks
import fault_saves
import torch
from fault_forks import Row

Group = Callable[[Path], Iterator[Row]]

ALL: dict[str, Group] = {
    **{f"bad {group}": partial(bad_inputs.refused, group) for group in bad_inputs.GROUPS},
    "launched, signals": fault_launch.signalled,  # the longest first
    "kills in a save of 2": partial(fault_saves.at_each_operation, fault="kill -9", ranks=2),
    **{fault: partial(fault_saves.at_each_operation, fault=fault) for fault in fault_saves.FAULTS},
    "worlds 1 2 1": fault_kills.moved,
    "worlds 2 1 2": partial(fault_kills.moved, ranks=(2, 1, 2)),
    "launched, lost ranks": fault_launch.lost,
    "cluster": fault_cluster.two_machines,
    "random kills of evaluations": fault_eval.killed_at_random,
    "random kills 1": partial(fault_kills.killed_at_random, ranks=1),
    "random kills 2": partial(fault_kills.killed_at_random, ranks=2),
    "random kills of one": partial(fault_kills.killed_at_random, ranks=2, all_of_them=False),
    "signals": fault_kills.stopped_by_signals,
    "signals passed on": fault_kills.passed_on_late,
    "launched, time is up": fault_launch.before_the_time_is_up,
    "launched, port": fault_launch.port_in_use,
    "lost ranks": fault_ranks.lost,
    "late ranks": fault_ranks.never_came,
    "disagreeing ranks": fault_ranks.disagreeing,
    "folders": fault_ranks.folders,
    "slurm": fault_cluster.slurm,
}


def done(name: str, group: Group, folder: Path) -> list[Row]:
    """The rows of a group; where the group could not go on (a run did not end at all), the last row says so."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    try:
        rows.extend(group(folder))
    except (OSError, AssertionError) as error:
        rows.append(Row(name, 1, [repr(error)]))
    return rows


def main(groups: dict[str, Group]) -> bool:
    """Whether all trials were survived. Two groups run at a time, since they mostly wait."""
    rows: list[Row] = []
    began = time.monotonic()
    print(f"{'trials':>6} {'survived':>8}  fault", flush=True)
    bad_inputs.imported()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        under_way = [pool.submit(done, name, group, Path(folder) / str(number)) for number, (name, group) in enumerate(groups.items())]
        for finished in as_completed(under_way):
            for row in finished.result():
                rows.append(row)
                survived = "skipped" if row.skipped else row.trials - len(row.failures)
                print(f"{row.trials:6} {survived:>8}  {row.fault}{' (' + row.skipped + ')' if row.skipped else ''}", flush=True)
                for failure in row.failures:
                    print(f"{'':17}NOT SURVIVED: {failure}", flush=True)
    trials, failures = sum(row.trials for row in rows), sum(len(row.failures) for row in rows)
    print(f"{trials:6} {trials - failures:8}  in all, {time.monotonic() - began:.0f} s", flush=True)
    return not failures


if __name__ == "__main__":
    raise SystemExit(0 if main(ALL) else 1)
