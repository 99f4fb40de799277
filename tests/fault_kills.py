"""Runs that are killed at random, stopped by signals, and continued on another number of ranks."""

import functools
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fault_forks import STEPS, Ended, Row, Run, at_step, run, same, saved, steps_logged, training, weights

from draftsmith.train.engine import curves

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Saves often and runs slowly, so that kills hit saves, steps and the time between.
SLOW = {"steps": 24, "save_every": 1, "eval_every": 6, "schedule": "constant"}
TOLERANCE = {1: 0.0, 2: 1e-6}


def slow_run(output: Path, ranks: int) -> Run:
    slow = at_step(0, 0, lambda: None, slow=0.01)
    return Run(functools.partial(training, output, objective=slow, probe=True, **SLOW), output, ranks)


def killed_at_random(folder: Path, ranks: int, all_of_them: bool = True, trials: int = 20) -> Iterator[Row]:
    """kill -9 at a time drawn uniformly over a run, of one rank or of all of them."""
    draw = random.Random(7)
    row = Row(f"kill -9 at random, {'all' if all_of_them else 'one'} of {ranks} rank(s)")
    undisturbed = slow_run(folder / "undisturbed", ranks).end()
    assert undisturbed.codes == [0] * ranks, undisturbed.err
    expected = weights(folder / "undisturbed")
    for number in range(trials):
        moment, victim = draw.uniform(0, undisturbed.seconds), draw.randrange(ranks)
        output = folder / str(number)
        going = slow_run(output, ranks)
        time.sleep(moment)
        for rank in range(ranks) if all_of_them else (victim,):
            going.kill(rank)
        killed = going.end(agent=True)
        step = saved(output)
        again = slow_run(output, ranks).end()
        row.trial(
            f"killed after {moment:.2f} s, step {step}",
            no_success_feigned=all(killed.codes) or step == SLOW["steps"],
            gone_on=again.codes == [0] * ranks,
            the_same_weights=same(output, expected, TOLERANCE[ranks]),
            logged_every_step_once=steps_logged(output) == list(range(1, SLOW["steps"] + 1)),
        )
        shutil.rmtree(output)
    yield row


def stopped_at(output: Path, ranks: int, steps: int, number: int = signal.SIGTERM, rank: int | None = None, times: int = 1) -> Ended:
    """A run that takes `steps` more steps and then stops, since one rank (None: the last) gets signal `number`, `times` times."""

    def act() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return run(output, ranks, objective=at_step(steps, ranks - 1 if rank is None else rank, act))


def stopped_by_signals(folder: Path, worlds: Sequence[int] = (1, 2), steps: Sequence[int] = range(1, STEPS + 1)) -> Iterator[Row]:
    """Each signal to each rank in each of `steps`: all ranks save after that step and exit with 128 + signal; repeated signals change nothing."""
    for ranks in worlds:
        run(folder / f"undisturbed-{ranks}", ranks)
        expected = weights(folder / f"undisturbed-{ranks}")
        for number in SIGNALS:
            row = Row(f"{number.name} to each of {ranks} rank(s), in step {', '.join(map(str, steps))}")
            for step, rank in itertools.product(steps, range(ranks)):
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


def passed_on_late(folder: Path) -> Iterator[Row]:
    """The launcher passes a signal on, or dies of it, after its ranks have saved and while one draws the curves: they still end with 143."""
    row = Row("a signal that the launcher passes on while ranks end")

    def work(rank: int, output: Path, late: int) -> None:
        def act() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

        curves.draw = lambda *_: time.sleep(1)
        training(output, rank, objective=at_step(3, late, act))

    for late in (0, 1):
        ended = Run(functools.partial(work, output=folder / str(late), late=late), folder / str(late), 2).end()
        row.trial(f"rank {late}", all_ended_with_143=ended.codes == [143, 143], saved_there=saved(folder / str(late)) == 3)
    yield row


def moved(folder: Path, ranks: Sequence[int] = (1, 2, 1), any_two: bool = True) -> Iterator[Row]:
    """A run that is stopped and continued with another number of ranks, twice, at any two steps or at each step and the next."""
    run(folder / "undisturbed")
    expected = weights(folder / "undisturbed")
    row = Row(f"{' → '.join(map(str, ranks))} ranks, at {'any two steps' if any_two else 'each step and the next'}")
    for first, second in itertools.combinations(range(1, STEPS), 2):
        if any_two or second == first + 1:
            output = folder / f"{'-'.join(map(str, ranks))}-{first}-{second}"
            first_run = stopped_at(output, ranks[0], first)
            first_saved = saved(output)
            second_run = stopped_at(output, ranks[1], second - first)
            row.trial(
                f"steps {first} and {second}",
                stopped=first_run.codes == [143] * ranks[0] and second_run.codes == [143] * ranks[1],
                saved_there=(first_saved, saved(output)) == (first, second),
                gone_on=run(output, ranks[2]).codes == [0] * ranks[2],
                the_same_weights=same(output, expected, 1e-6),
                logged_every_step_once=steps_logged(output) == list(range(1, STEPS + 1)),
            )
            shutil.rmtree(output)
    yield row
