"""Files that are complete or absent, whatever is killed, unplugged or full while they are written."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

SAMPLE = 1 << 14  # bytes


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, sync it, and only then rename it to `path`.

    Args:
        path: the file to create or replace. On an error it stays as it was.
        write: writes the content to the path that it is given.

    Raises:
        OSError: the disk is full, the folder is read-only, and so on. Whatever `write` raises passes through.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)  # a link of that name would lead elsewhere
    try:
        write(temporary)
        give_usual_mode(temporary)
        sync(temporary)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)  # the system names no file where a write fails
        raise
    sync(path.parent)


def replace_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Write a folder under a temporary name, sync its files, and only then rename it to `path`.

    Args:
        path: the folder to create or replace. Until its successor is complete it stays as it was.
        write: writes the content into the empty folder that it is given.

    Raises:
        OSError: the disk is full, the folder is read-only, and so on. Whatever `write` raises passes through.
    """
    temporary = path.with_name(f".{path.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        give_usual_mode(temporary)
        for inner in (*temporary.rglob("*"), temporary):
            sync(inner)
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, through `replace`."""
    replace(path, lambda part: part.write_text(text, encoding="utf-8"))


def give_usual_mode(path: Path) -> None:
    """Give a file, or the files of a folder that this process wrote, the mode that new files have by the umask. (safetensors gives 600.)"""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file() and not file.is_symlink():
            file.chmod(0o666 & ~umask)


def sampled_hash(files: Sequence[Path | str]) -> str:
    """SHA-256 of the sizes of files and of 64 evenly spaced blocks of 16 KiB of each: quick, whatever their size."""
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            size = os.path.getsize(file)
            digest.update(size.to_bytes(8))
            for block in range(64):
                content.seek(block * max(0, size - SAMPLE) // 63)
                digest.update(content.read(SAMPLE))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
