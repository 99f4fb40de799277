"""What a command prints in the end: after its files are written, and not lost where stdout takes nothing."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress

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
    except OSError:
        with redirect_stdout(sys.stderr), suppress(OSError):
            show()
        raise


def cell(value: object) -> Text:
    """A text from outside for rich, in one line: no markup in it counts, and no control character reaches the terminal."""
    return Text(printable(str(value), keep=""))
