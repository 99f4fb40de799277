"""Progress for people: a live bar on a terminal, a line every few seconds in a log."""

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftsmith.inference.terminal import printable

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class Bar:
    """A progress bar on stderr: `with Bar("training", total) as bar: bar.update(done, "loss 3.1")`.

    A stderr that is full or gone ends no work.

    Args:
        label: text before the bar.
        total: amount of work; None where it is not known.
        done: work that was done before.
        show: False writes nothing.
    """

    def __init__(self, label: str, total: int | None, done: int = 0, show: bool = True) -> None:
        self.label, self.total, self.first, self.show = label, total, done, show
        self.console = Console(file=sys.stderr)
        self.started = self.printed = time.perf_counter()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        self.live = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not show or not self.console.is_terminal)
        self.task = self.live.add_task(printable(label, keep=""), total=total, completed=done, text="")

    def __enter__(self) -> Self:
        with suppress(OSError):
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):
            self.live.stop()

    def update(self, done: int, text: str = "") -> None:
        with suppress(OSError):
            self.live.update(self.task, completed=done, text=printable(text, keep=""))
        now = time.perf_counter()
        if not self.show or self.console.is_terminal or (now - self.printed < LINE_EVERY and (self.total is None or done < self.total)):
            return
        self.printed = now
        if self.total is None:
            self._print(f"{self.label}  {text}")
            return
        new = done - self.first
        left = f"  {(now - self.started) / new * (self.total - done) / 60:.1f} min left" if new else ""  # no rate before the first
        self._print(f"{self.label} {done}/{self.total}  {text}{left}")

    def _print(self, line: str) -> None:
        with suppress(OSError):
            print(printable(line, keep=""), file=sys.stderr, flush=True)
