"""What a command prints in the end: after its files are written, and not lost where stdout takes nothing."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

from rich.text import Text

from draftsmith.inference.terminal import printable


def deliver(show: Callable[[], object]) -> None:
    """Call `show`, which prints a report. Where stdout is full or closed, it prints to stderr instead.

    Raises:
        OSError: of stdout, after that. A reader that is gone (BrokenPipeError) has seen what it wanted: nothing goes to stderr.
    """
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with redirect_stdout(sys.stderr), suppress(OSError):
            show()
        raise OSError(f"stdout: {error.strerror or error}") from None


def cell(value: object) -> Text:
    """A text from outside for rich, in one line: no markup in it counts, and no control character reaches the terminal."""
    return Text(printable(str(value), keep=""))


def literal(text: str) -> str:
    """A text from outside in Markdown: no mark-up in it counts, and it is one line."""
    line = printable(text, keep="").replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{character}" if character in "\\`*_{}[]()#+!|~$" else character for character in line)


def checked_file(option: str, file: Path, own: Callable[[Path], bool], command: str) -> Path:
    """The file that an option names, if nothing but an earlier one of the same command is there.

    Args:
        option: for the error.
        file: the file.
        own: whether the command wrote a file.
        command: its name, for the error.

    Raises:
        ValueError: a folder, no folder for it, a link, no regular file, or somebody else's file.
    """
    if file.is_symlink():
        raise ValueError(f"{option} {file}: expected a file of its own, it is a link; give another name")
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: expected a file in a folder that exists; make the folder first")
    if file.exists():
        if not file.is_file():
            raise ValueError(f"{option} {file}: expected a file, it is a device or FIFO; give another name")
        if not own(file):
            raise ValueError(f"{option} {file} is there already, and not of {command}; give another name")
    return file
