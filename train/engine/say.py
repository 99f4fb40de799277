"""What a run says on stdout: never a reason to end it."""

import os
import sys

from draftsmith.inference.terminal import printable


def say(text: str) -> None:
    """Print a line at once. Where stdout is gone or full, this and all later lines go nowhere: the run's files have what matters."""
    try:
        print(printable(text), flush=True)
    except (OSError, ValueError):  # ValueError: it is closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
