"""A folder that a command writes into: the mark that says whose it is, and the lock that keeps a second run out.

The rule for every command: it deletes and overwrites only what carries its own mark, and never writes through a link.
"""

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.inference.durable import sync
from draftsmith.inference.reading import read_json

MARK = ".draftsmith.json"
LENGTH = 2048  # bytes of a mark


@contextmanager
def claim(folder: Path, kind: str, names: tuple[str, ...], key: str) -> Iterator[None]:
    """Hold `folder` for this process: create and mark it, or check its mark. Within the context no other process can claim it.

    Only one process of a run calls this. The lock ends with the process, however that ends.

    Args:
        folder: is created if it does not exist. It may be a link to a folder.
        kind: what the folder is to hold, such as "training run".
        names: files and folders that the command will replace in it. A folder without a mark may hold other things, but none of these.
        key: the recipe's key or the option that named the folder, for errors.

    Raises:
        ValueError: the folder is of another kind, holds files of somebody else under these names, or another process has claimed it.
        OSError: it cannot be created or written.
    """
    check_own(folder, kind, names, key)
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / MARK
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        if not lock(descriptor):
            holder = (_read(mark) or {}).get("holder", "another process")
            raise ValueError(f"{key}={folder}: {holder} is writing there; wait for it, end it, or give another folder")
        check_own(folder, kind, names, key)  # now that nobody else can change it
        # In place, since a lock belongs to the file that was opened; at one length, so that a kill leaves the old mark or the new one.
        os.pwrite(descriptor, f"{json.dumps({'kind': kind, 'holder': _this_process()}):<{LENGTH - 1}}\n".encode(), 0)
        os.fsync(descriptor)
        sync(folder)
        yield
    finally:
        os.close(descriptor)


def check_own(folder: Path, kind: str, names: tuple[str, ...], key: str) -> None:
    """Raises ValueError if `claim` would refuse the folder for what it is or holds; writes nothing."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{key}={folder} is a file; give a folder")
    mark = _read(folder / MARK)
    if mark is not None:
        if mark.get("kind") != kind:
            raise ValueError(f"{key}={folder} holds {_with_article(str(mark.get('kind')))}, not {_with_article(kind)}; give another folder")
        return
    foreign = sorted(name for name in names if os.path.lexists(folder / name))
    if foreign:
        raise ValueError(
            f"{key}={folder} holds {', '.join(foreign)}, which no {kind} of Draftsmith wrote ({MARK} is missing); give another folder"
        )


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[:1] in "aeiou" else f"a {kind}"


def is_own(folder: Path, kind: str) -> bool:
    """Whether the folder carries the mark of this kind."""
    return (_read(folder / MARK) or {}).get("kind") == kind


def is_claimed(folder: Path) -> bool:
    """Whether a process holds the folder now."""
    try:
        descriptor = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not lock(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file for this process until it is closed. False if another process has locked it; with `wait` this one waits.

    Some network file systems have no locks: there nothing keeps a second process out.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


def _read(mark: Path) -> dict[str, Any] | None:
    """The mark's content; None where there is none (a kill may leave an empty one), {} where it is damaged."""
    if not mark.is_file() or mark.is_symlink() or not mark.stat().st_size:
        return None
    try:
        return read_json(mark)
    except ValueError:
        return {}


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} ({Path(sys.argv[0]).name[:80]})"
