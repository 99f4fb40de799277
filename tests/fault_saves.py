"""Faults at each operation of a save: a kill, a disk that is full or fails, a loss of power.

An operation changes the disk: it makes a folder or a file, writes half a file, syncs, renames or deletes. They are counted in an undisturbed
save; then, for each operation and for the end, a run is disturbed there and continued.
"""

import errno
import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fault_forks import STEPS, Ended, Row, Run, run, same, saved, steps_logged, training, weights
from safetensors import SafetensorError

from draftsmith.train.engine import checkpoint

# The second save deletes what the first one wrote, and the best weights change before it.
SETTINGS = {"save_every": 2, "keep": 1, "eval_every": 2}
HARMLESS = ("unlink", "rmdir", "the end")  # to a checkpoint that is being written
Strike = Callable[["Disk", str], None]


class Disk:
    """Watches the disk operations of a process and calls `strike` before operation `at` (from 0) of the second save."""

    def __init__(self, folder: Path, at: int, strike: Strike) -> None:
        self.folder, self.at, self.strike = folder, at, strike
        self.operations: list[str] = []
        self.saves, self.watching, self.within = 0, False, False
        self.synced: set[int] = set()  # inodes whose content has been synced
        self.unsynced: list[tuple[Path, Path, Path | None]] = []  # renames not synced: from, to, copy of the file replaced
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
            setattr(os, name, functools.partial(self._system, name, getattr(os, name)))
        Path.write_text = self._half_written(Path.write_text)
        checkpoint.save_file = self._half_serialised(checkpoint.save_file)
        checkpoint.save = self._saving(checkpoint.save, 1)
        checkpoint.save_weights = self._saving(checkpoint.save_weights, 0)
        checkpoint.save_state = self._saving(checkpoint.save_state, 0)

    def _saving(self, plain: Callable, counts: int) -> Callable:
        def save(*arguments, **options):
            self.watching = self.saves == 1
            try:
                saved = plain(*arguments, **options)
                if counts and self.watching:
                    self.before("the end")
            finally:
                self.watching = False
            self.saves += counts
            return saved

        return save

    def before(self, operation: str) -> None:
        """An operation is about to happen."""
        if self.watching and not self.within:
            self.operations.append(operation)
            if len(self.operations) > self.at:
                self.within = True
                try:
                    self.strike(self, operation)
                finally:
                    self.within = False

    def _system(self, name: str, plain: Callable, *arguments, **options):
        self.before(name)
        if name == "fsync":
            inode = os.fstat(arguments[0]).st_ino
            self.synced.add(inode)
            self.unsynced = [item for item in self.unsynced if item[1].parent.exists() and item[1].parent.stat().st_ino != inode]
        if name == "unlink":  # another file will get its inode
            self.synced.discard(os.stat(*arguments, **options, follow_symlinks=False).st_ino)
        if name in ("rename", "replace"):
            source, to = map(Path, arguments)
            replaced = None
            if to.is_file():
                self.synced.discard(to.stat().st_ino)
                replaced = self.folder.parent / f"{self.folder.name}-replaced-{len(self.unsynced)}"
                shutil.copy2(to, replaced)
            self.unsynced.append((source, to, replaced))
        return plain(*arguments, **options)

    def _half_written(self, plain: Callable) -> Callable:
        def write_text(path: Path, text: str, *arguments, **options):
            self.before("write")
            plain(path, text[: len(text) // 2], *arguments, **options)
            self.before("half written")
            return plain(path, text, *arguments, **options)

        return write_text

    def _half_serialised(self, plain: Callable) -> Callable:
        """safetensors writes under a name of its own in the same folder and renames that file; a kill leaves it behind."""

        def save_file(tensors, path: Path, *metadata):
            self.before("save_file")
            self.within, within = True, self.within
            plain(tensors, path, *metadata)
            half, content = path.with_name(".tmpHalf"), path.read_bytes()
            path.unlink()
            half.write_bytes(content[: len(content) // 2])
            self.within = within
            self.before("half serialised")
            self.within = True
            half.unlink()
            plain(tensors, path, *metadata)
            self.within = within

        return save_file

    def lose_power(self, names: bool) -> None:
        """Lose what was not synced: the content of files and, if `names`, renames in folders that were not synced, the last rename first."""
        for source, to, replaced in reversed(self.unsynced) if names else ():
            if to.exists():
                to.rename(source)
            if replaced:
                self.synced.add(replaced.rename(to).stat().st_ino)
        for file in self.folder.rglob("*"):
            if file.is_file() and file.stat().st_ino not in self.synced:
                os.truncate(file, 0)


def kill(disk: Disk, _: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def power_lost(disk: Disk, operation: str, names: bool) -> None:
    disk.lose_power(names)
    kill(disk, operation)


def full(_: Disk, operation: str) -> None:
    """The disk is full from this operation on; deleting still works."""
    if operation not in HARMLESS:
        raise _error(operation, errno.ENOSPC)


def failing(disk: Disk, operation: str) -> None:
    """This operation alone fails."""
    if len(disk.operations) == disk.at + 1 and operation != "the end":
        raise _error(operation, errno.EIO)


def _error(operation: str, number: int) -> Exception:
    text = os.strerror(number)
    if operation in ("save_file", "half serialised"):
        return SafetensorError(f"Error while serializing: I/O error: {text} (os error {number})")
    return OSError(number, text)


ERRORS: dict[str, Strike] = {"disk full from then on": full, "an input/output error": failing}
FAULTS: dict[str, Strike] = ERRORS | {
    "kill -9": kill,
    "power lost, and content that was not synced": functools.partial(power_lost, names=False),
    "power lost, and content and names that were not synced": functools.partial(power_lost, names=True),
}


def _disturbed(output: Path, rank: int, at: int, strike: Strike, probe: bool) -> None:
    if rank:  # only the main process saves
        return training(output, rank, probe=probe, **SETTINGS)
    disk = Disk(output, at, strike)
    training(output, rank, probe=probe, **SETTINGS)
    (output / "operations").write_text("\n".join(disk.operations))


def _run(output: Path, at: int, strike: Strike, probe: bool, ranks: int) -> Ended:
    return Run(functools.partial(_disturbed, output, at=at, strike=strike, probe=probe), output, ranks).end()


def at_each_operation(folder: Path, fault: str, probes: tuple[bool, ...] = (False, True), ranks: int = 1) -> Iterator[Row]:
    """A trial for each operation of a save, without and (with a probe) after a save of the best weights."""
    row = Row(f"{fault}, at each operation of a save of {ranks} rank(s)")
    ended_by_it = 0
    for probe in probes:
        quiet = folder / f"quiet-{probe}"
        assert _run(quiet, sys.maxsize, kill, probe, ranks).codes == [0] * ranks
        expected, operations = weights(quiet), (quiet / "operations").read_text().splitlines()
        for at, operation in enumerate(operations):
            ended = _run(folder / str(at), at, FAULTS[fault], probe, ranks)
            ended_by_it += any(ended.codes)
            where = f"operation {at} ({operation}) of a save{' with a probe' if probe else ''}"
            _judge(row, where, folder / str(at), fault, ended, probe, expected)
    if ended_by_it < row.trials // 2:
        row.failures.append(f"only {ended_by_it} of {row.trials} runs noticed")
    yield row


def _judge(row: Row, where: str, output: Path, fault: str, ended: Ended, probe: bool, expected: dict) -> None:
    """Whether a disturbed run ended as it should, and continues."""
    ranks = len(ended.codes)
    if fault in ERRORS:
        in_error = ended.codes == [2] * ranks and ended.said("could not be written", "free disk space there")
        as_it_should = in_error or ended.codes == [0] * ranks  # what could not be deleted does no harm
    else:
        as_it_should = ended.codes == [-signal.SIGKILL, *[2] * (ranks - 1)]
    last = saved(output)
    again = run(output, ranks, probe=probe, **SETTINGS)
    row.trial(
        where,
        ended_as_it_should=as_it_should,
        complete_afterwards=last >= 2,
        gone_on=again.codes == [0] * ranks,
        the_same_weights=same(output, expected, 0.0 if ranks == 1 else 1e-6),
        logged_every_step_once="power" in fault or steps_logged(output) == list(range(1, STEPS + 1)),
        tidy=not list((output / "checkpoints").glob(".*")),
    )
    shutil.rmtree(output)
