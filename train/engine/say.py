"""What a run says on stdout: never a reason to end it."""

import os
import sys
from contextlib import suppress

from draftsmith.inference.terminal import printable


def say(text: str) -> None:
    """Print a line at once. Where stdout is gone or full, this and all later lines go nowhere: the run's files have what matters."""
    try:
        print(printable(text), flush=True)
    except (OSError, ValueError):  # ValueError: it is closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def open_streams() -> None:
    """Open stdin, stdout and stderr where a person has closed them, or the next file that is opened would get their place and their text.

    What a terminal cannot show is written as an escape such as \\u03c4.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if descriptor else "r"
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest place that is free
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
        stream = getattr(sys, name)
        if stream is None or stream.closed:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False))
        elif descriptor and hasattr(stream, "reconfigure"):
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
