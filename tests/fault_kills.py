"""Runs that are killed at random, stopped by signals, and moved between numbers of ranks."""

import functools
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fault_forks import STEPS, Ended, Row, Run, at_step, run, same, saved, steps_told, training, weights

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Saves often and takes its time, so that kills land in saves, steps and between.
SLOW = {"steps": 24, "save_every": 1, "eval_every": 6, "schedule": "constant"}
TOLERANCE = {1: 0.0, 2: 1e-6}


def slow_run(output: Path, ranks: int) -> Run:
    slow = at_step(0, 0, lambda: None, slow=0.01)
    return Run(functools.partial(training, output, objective=slow, probe=True, **SLOW), output, ranks)


def killed_at_random(folder: Path, trials: int = 20) -> Iterator[Row]:
    """kill -9 at moments drawn uniformly over a run, of one rank or of all of them: each run is killed until one gets through."""
    draw = random.Random(7)
    for ranks, victims in ((1, "the only rank"), (2, "one of two ranks"), (2, "both ranks")):
        row = Row(f"kill -9 at random, {victims}")
        began = time.monotonic()
        whole = slow_run(folder / f"whole-{victims}", ranks).end()
        duration = time.monotonic() - began
        assert whole.codes == [0] * ranks, whole.err
        expected = weights(folder / f"whole-{victims}")
        for number in range(trials):
            moment, rank = draw.uniform(0, duration), draw.randrange(ranks)
            output = folder / f"{victims}-{number}"
            going = slow_run(output, ranks)
            time.sleep(moment)
            for victim in range(ranks) if victims == "both ranks" else (rank,):
                going.kill(victim)
            killed = going.end(agent=True)
            step = saved(output)
            again = slow_run(output, ranks).end()
            row.trial(
                f"killed after {moment:.2f} s, step {step}",
                nobody_left_to_wait=all(killed.codes) or killed.codes == [0] * ranks,
                gone_on=again.codes == [0] * ranks,
                the_same_weights=same(output, expected, TOLERANCE[ranks]),
                told_every_step_once=steps_told(output) == list(range(1, SLOW["steps"] + 1)),
            )
            shutil.rmtree(output)
        yield row


def stopped_at(output: Path, ranks: int, steps: int, number: int = signal.SIGTERM, rank: int | None = None, times: int = 1) -> Ended:
    """A run that takes `steps` more steps and is then stopped by signal `number`, sent to one rank (None: the last) `times` times."""

    def act() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return run(output, ranks, objective=at_step(steps, ranks - 1 if rank is None else rank, act))


def stopped_by_signals(folder: Path, worlds: Sequence[int] = (1, 2)) -> Iterator[Row]:
    """Each signal at each rank in each step: all ranks save after it and exit with 128 + signal; later ones change nothing."""
    for ranks in worlds:
        run(folder / f"whole-{ranks}", ranks)
        expected = weights(folder / f"whole-{ranks}")
        for number in SIGNALS:
            row = Row(f"{number.name} to each rank at each step, {ranks} rank(s)")
            for step, rank in itertools.product(range(1, STEPS + 1), range(ranks)):
                output = folder / f"{number.name}-{ranks}-{step}-{rank}"
                ended = stopped_at(output, ranks, step, number, rank, times=1 if number == signal.SIGINT else 3)
                row.trial(
                    f"step {step}, rank {rank}",
                    ended_with_128_plus_signal=ended.codes == [128 + number] * ranks,
                    saved_there=saved(output) == step,
                    said_so=f"stopped by signal {number.value} after step {step}" in ended.out[0],
                    gone_on=run(output, ranks).codes == [0] * ranks,
                    the_same_weights=same(output, expected, TOLERANCE[ranks]),
                )
                shutil.rmtree(output)
            yield row


def moved(folder: Path, worlds: Sequence[Sequence[int]] = ((1, 2, 1), (2, 1, 2)), every: bool = True) -> Iterator[Row]:
    """A run that is stopped and goes on with another number of ranks, twice, at any two steps (not `every`: one step after the other)."""
    run(folder / "whole")
    expected = weights(folder / "whole")
    for ranks in worlds:
        row = Row(f"{' → '.join(map(str, ranks))} ranks, at {'any two steps' if every else 'each step'}")
        for first, second in itertools.combinations(range(1, STEPS), 2):
            if not every and second != first + 1:
                continue
            output = folder / f"{'-'.join(map(str, ranks))}-{first}-{second}"
            one = stopped_at(output, ranks[0], first)
            there = saved(output)
            two = stopped_at(output, ranks[1], second - first)
            row.trial(
                f"steps {first} and {second}",
                stopped=one.codes == [143] * ranks[0] and two.codes == [143] * ranks[1],
                saved_there=(there, saved(output)) == (first, second),
                gone_on=run(output, ranks[2]).codes == [0] * ranks[2],
                the_same_weights=same(output, expected, 1e-6),
                told_every_step_once=steps_told(output) == list(range(1, STEPS + 1)),
            )
            shutil.rmtree(output)
        yield row
