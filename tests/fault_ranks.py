"""Ranks that die, hang, raise or disagree, and folders that vanish: the other ranks end soon, say why, and lose nothing that was saved."""

import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from fault_forks import LIMIT, STEPS, Row, Run, at_step, run, same, saved, training, weights
from training_cases import Numbers

from draftsmith.train.engine import curves, processes
from draftsmith.train.engine.watchdog import EXIT_NO_PROGRESS

GONE = ("another process of this run is gone", "the same command goes on from the newest checkpoint in")


def wrong_data() -> None:
    raise ValueError("row 17 has no tokens; see data.train")


def wrong_code() -> None:
    raise RuntimeError("shapes cannot be multiplied")


# What a rank does, and the status that it ends with.
FATES: dict[str, tuple[Callable[[], object], int]] = {
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "exits with status 1": (lambda: os._exit(1), 1),
    "raises an error of the user's": (wrong_data, 2),
    "raises an error of the program's": (wrong_code, 1),
    "hangs": (lambda: time.sleep(2 * LIMIT), EXIT_NO_PROGRESS),
}


def lost(folder: Path, fates: Iterable[str] = FATES) -> Iterator[Row]:
    """One of two ranks is lost in step 4. The next run begins with the checkpoint of step 3, or of step 2 if step 3 was being saved."""
    run(folder / "undisturbed", 2, save_every=1)
    expected = weights(folder / "undisturbed")
    for fate in fates:
        act, code = FATES[fate]
        row = Row(f"one of two ranks {fate}")
        for rank in (0, 1):
            output = folder / f"{fate}-{rank}"
            patience = {"watchdog_minutes": 0.05} if fate == "hangs" else {}
            ended = run(output, 2, objective=at_step(4, rank, act), save_every=1, **patience)
            other = 1 - rank
            last = saved(output)
            row.trial(
                f"rank {rank}",
                ended_within_a_minute=ended.seconds < LIMIT,
                that_rank_ended_so=ended.codes[rank] == code,
                the_other_ended_in_error=ended.codes[other] == (EXIT_NO_PROGRESS if fate == "hangs" else 2),
                the_other_said_why=fate == "hangs" or ended.said(*GONE, rank=other),
                hanging_ranks_said_where=fate != "hangs"
                or all("made no progress for 0.05 minutes while in step 4" in error for error in ended.err),
                nothing_saved_lost=last in (2, 3),
                gone_on=run(output, 2, save_every=1).codes == [0, 0],
                the_same_weights=same(output, expected, 1e-6),
            )
        yield row


def never_came(folder: Path) -> Iterator[Row]:
    """A rank on another machine ends before the ranks have met; its launcher does not tell the first machine."""
    row = Row("a rank that ends before the ranks have met")

    def work(rank: int) -> None:
        processes.RENDEZVOUS_TIMEOUT = timedelta(seconds=2)
        if rank == 1:
            os._exit(1)
        training(folder / "run", rank)

    ended = Run(work, folder / "run", 2).end()
    row.trial("rank 1", the_first_ended_with_2=ended.codes == [2, 1], said_so=ended.said("rank(s) 1 of 2 did not come within"))
    yield row


class OtherRows(Numbers):
    """On the second rank a value of the first batch differs, as if its machine had other data."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("RANK") == "1":
            self.x = self.x + 1e-9


class FewerRows(Numbers):
    def __init__(self) -> None:
        super().__init__(rows=22 - int(os.environ.get("RANK", "0")))


def disagreeing(folder: Path) -> Iterator[Row]:
    """Ranks that would train on different data or with different recipes are refused before the first step."""
    row = Row("ranks that disagree")

    def other_fingerprint(rank: int) -> None:
        training(folder / "fingerprint", rank, fingerprint={"data": rank})

    def other_recipe(rank: int) -> None:
        training(folder / "recipe", rank, lr=0.05 + 0.01 * rank)

    ways: dict[str, Callable[[int], None]] = {
        "fingerprint": other_fingerprint,
        "recipe": other_recipe,
        "batch": functools.partial(training, folder / "batch", rows=OtherRows),
        "rows": functools.partial(training, folder / "rows", rows=FewerRows),
    }
    for way, work in ways.items():
        ended = Run(work, folder / way, 2).end()
        row.trial(
            f"on {way}",
            both_ended_with_2=ended.codes == [2, 2],
            the_first_names_the_other=ended.said("rank(s) 1 read other data"),
            nothing_trained=saved(folder / way) == 0,
        )
    yield row


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[str]:
    """A small file system at `folder` -> "" or why there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True, check=False)
    try:
        yield mount.stderr.strip()
    finally:
        if mount.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def folders(folder: Path) -> Iterator[Row]:
    """The folder of a run is deleted, is another run's, may not be written, or its disk is full."""
    run(folder / "undisturbed", save_every=2)
    expected = weights(folder / "undisturbed")
    for ranks in (1, 2):
        row = Row(f"checkpoint folder deleted while running, {ranks} rank(s)")
        for step in range(2, STEPS):
            output = folder / f"deleted-{ranks}-{step}"
            delete = at_step(step, 0, lambda output=output: shutil.rmtree(output / "checkpoints", ignore_errors=True))
            ended = run(output, ranks, objective=delete, save_every=2)
            row.trial(
                f"in step {step}",
                gone_on=ended.codes == [0] * ranks,
                saved_at_the_end=saved(output) == STEPS,
                the_same_weights=same(output, expected, 1e-6),
            )
        yield row
    yield _refused(folder)
    yield _full(folder / "full")
    yield _full_for_others(folder / "full-for-others")
    yield _damaged_metrics(folder, expected)
    yield _read_only(folder / "read-only")


def _refused(folder: Path) -> Row:
    """A run refuses what it finds in its folder before it begins."""
    row = Row("a folder of another recipe, other data, or no folder")
    for ranks in (1, 2):
        output = folder / f"other-{ranks}"
        run(output, ranks, fingerprint={"data": "a"})

        def refuse(what: str, *words: str, ranks: int = ranks, output: Path = output, **options) -> None:
            ended = run(output, ranks, **options)
            row.trial(
                f"{what}, {ranks} rank(s)",
                ended_with_2=ended.codes == [2] * ranks,
                said_so=ended.said(*words),
                nothing_lost=saved(output) in (0, STEPS),
            )

        refuse("lr", "was made with train.lr=0.05, this run has 0.1; give another train.output", fingerprint={"data": "a"}, lr=0.1)
        refuse("data", "was made with data=a, this run has b", fingerprint={"data": "b"})
        refuse("never", "holds checkpoints and train.resume=never", fingerprint={"data": "a"}, resume="never")
        file = folder / f"file-{ranks}"
        file.mkdir()
        (file / "checkpoints").write_text("")
        refuse("a file in its place", "checkpoints cannot be made (File exists); give another train.output", output=file)
    return row


def fill(filler: Path) -> None:
    with suppress(OSError), filler.open("wb") as stream:
        while True:
            stream.write(b"0" * 4096)
            stream.flush()


def _full(folder: Path) -> Row:
    """A real disk that is full."""
    row = Row("a disk that fills up while running (tmpfs)")
    for ranks in (1, 2):
        with mounted(folder / str(ranks), "size=256k") as missing:
            if missing:
                row.skipped = missing
                return row
            output, filler = folder / str(ranks) / "run", folder / str(ranks) / "filler"

            for probe in (False, True):
                ended = run(
                    output,
                    ranks,
                    objective=at_step(4, 0, functools.partial(fill, filler)),
                    save_every=2,
                    log_every=20,
                    eval_every=4 if probe else 0,
                    probe=probe,
                )
                last = saved(output)
                filler.unlink()
                again = run(output, ranks, save_every=2, log_every=20, eval_every=4 if probe else 0, probe=probe)
                row.trial(
                    f"{ranks} rank(s){', with a probe' if probe else ''}",
                    all_ended_with_2=ended.codes == [2] * ranks,
                    said_so=ended.said("could not be written", "No space left on device", "is complete; free disk space there"),
                    the_one_before_kept=last == 2,
                    gone_on=again.codes == [0] * ranks,
                )
                shutil.rmtree(output)
    return row


def _full_for_others(folder: Path) -> Row:
    """The disk is full when metrics.jsonl grows, or when curves.png is drawn after a save has failed: the error names the file or its folder."""
    row = Row("a disk that fills up before metrics or curves are written (tmpfs)")

    def work(rank: int, draw: Callable, **options) -> None:
        curves.draw = draw
        training(folder / "run", rank, **options)

    with mounted(folder, "size=256k") as missing:
        if missing:
            row.skipped = missing
            return row
        for what, every in (("metrics", 1), ("curves", 3)):
            act = at_step(4, 0, functools.partial(fill, folder / "filler"))
            ended = Run(functools.partial(work, draw=curves.draw, objective=act, save_every=2, log_every=every), folder / "run").end()
            row.trial(
                what,
                ended_with_2=ended.codes == [2],
                said_so=ended.said("No space left on device", str(folder / "run")),
                the_one_before_kept=saved(folder / "run") == 2,
            )
            (folder / "filler").unlink()
            shutil.rmtree(folder / "run")
    return row


def _damaged_metrics(folder: Path, expected: dict) -> Row:
    """metrics.jsonl is not synced: a power cut may leave anything in it, and the run continues all the same."""
    row = Row("metrics.jsonl damaged by a power cut")
    damages: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda text: b"",
        "cut": lambda text: text[:-9],
        "zeros at its end": lambda text: text[:-20] + 20 * b"\0",
        "zeros within": lambda text: text[:-40] + 20 * b"\0" + text[-20:],
        "noise": lambda text: text[:-40] + b"\xff\xfe\n{}\n[]\n" + text[-20:],
    }
    for what, change in damages.items():
        output = folder / what
        run(output, objective=at_step(4, 0, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        metrics = output / "metrics.jsonl"
        metrics.write_bytes(change(metrics.read_bytes()))
        row.trial(what, gone_on=run(output).codes == [0], the_same_weights=same(output, expected))
    return row


def _read_only(folder: Path) -> Row:
    """A file system that is, or becomes, read-only."""
    row = Row("a disk that may not be written (tmpfs)")
    with mounted(folder, "size=1m") as missing:
        if missing:
            row.skipped = missing
            return row

        def remount(how: str) -> None:
            subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True, capture_output=True)

        for ranks in (1, 2):
            output = folder / f"run-{ranks}"
            ended = run(output, ranks, objective=at_step(4, 0, lambda: remount("ro")), save_every=2, log_every=20)
            last = saved(output)
            refused = run(output, ranks, save_every=2)
            remount("rw")
            row.trial(
                f"{ranks} rank(s)",
                all_ended_with_2=ended.codes == [2] * ranks,
                said_so=ended.said("could not be written", "is complete; free disk space there, or see that the folder may be written"),
                the_one_before_kept=last == 2,
                refused_at_once=refused.codes == [2] * ranks and refused.said("checkpoints may not be written"),
                gone_on=run(output, ranks, save_every=2).codes == [0] * ranks,
            )
    return row
