"""What a sweep found: a table and a picture."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.inference import durable
from draftsmith.inference.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST = 40  # characters of a value


@dataclass(slots=True)
class Point:
    """A trial in a rung: τ with each seed, none where a run failed; its budget; the mean seconds of its training steps; why it failed."""

    steps: int
    tokens: int
    measures: list[float]
    seconds: float
    error: str = ""

    @property
    def mean(self) -> float | None:
        """None for a trial that failed."""
        return statistics.fmean(self.measures) if self.measures else None

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds, 0 with a single one."""
        return statistics.stdev(self.measures) if len(self.measures) > 1 else 0.0


@dataclass(slots=True)
class Standing:
    """A trial: its number, its values of the keys that are swept, as texts, and its points by rung."""

    number: int
    values: dict[str, str]
    points: list[Point] = field(default_factory=list)


def table(standings: Sequence[Standing], measure: str) -> str:
    """The trials as a Markdown table, in the order given; each with its last rung.

    Args:
        standings: the best first, those that failed last.
        measure: heading of the column with the measure. After ± is its standard deviation over seeds.
    """
    rows = [["rank", *standings[0].values, "steps", "tokens", measure, "seconds", ""]]
    for rank, standing in enumerate(standings, 1):
        point = standing.points[-1]
        shown = "failed" if point.mean is None else f"{point.mean:.3f}" + (f" ± {point.spread:.3f}" if len(point.measures) > 1 else "")
        cells = [str(rank), *map(_short, standing.values.values()), f"{point.steps:,}", f"{point.tokens:,}"]
        rows.append([*cells, shown, f"{point.seconds:,.1f}", point.error])
    rows = [[printable(cell, "").replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)] + [0]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def draw(standings: Sequence[Standing], measure: str, title: str, picture: Path) -> None:
    """Write `picture`, a .png file: for each key that is swept, what each of its values brought in each rung. `measure` labels the axes."""
    from matplotlib.figure import Figure

    keys, rungs = list(standings[0].values), max(len(standing.points) for standing in standings)
    columns = min(3, len(keys))
    lines = -(-len(keys) // columns)
    figure = Figure(figsize=(4.6 * columns, 0.8 + 3.4 * lines), dpi=130, layout="constrained")
    figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=10)
    for number, key in enumerate(keys, 1):
        axes = figure.add_subplot(lines, columns, number)
        _draw_key(axes, key, standings, rungs)
        axes.set_ylabel(measure, fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    durable.replace(picture, lambda part: figure.savefig(part, format="png"))


def _draw_key(axes: "Axes", key: str, standings: Sequence[Standing], rungs: int) -> None:
    """A dot for each trial and rung over the value of `key`, and a line through the means of the first rung, in which all trials ran."""
    from matplotlib import colormaps

    values = list(dict.fromkeys(standing.values[key] for standing in sorted(standings, key=lambda standing: standing.number)))
    for rung in range(rungs):
        color = colormaps["viridis"](0.85 * (1 - (rung + 1) / rungs))
        drawn = [(values.index(s.values[key]), s.points[rung]) for s in standings if len(s.points) > rung and s.points[rung].measures]
        offset = 0.12 * (rung - (rungs - 1) / 2)
        dots, means = [x + offset for x, _ in drawn], [statistics.fmean(point.measures) for _, point in drawn]
        label = f"{drawn[0][1].tokens:,} tokens" if drawn else None
        axes.plot(dots, means, "o", color=color, ms=5, alpha=0.8, label=label)
        if rung == 0:
            groups = [[mean for x, mean in zip(dots, means, strict=True) if x == at] for at in sorted(set(dots))]
            axes.plot(sorted(set(dots)), [statistics.fmean(group) for group in groups], color=color, lw=1)
    axes.set_xticks(range(len(values)), [_plain(_short(value)) for value in values], rotation=20 if len(values) > 4 else 0)
    axes.set_title(_plain(key), loc="left", fontsize=10, fontweight="bold")
    axes.legend(fontsize=8, frameon=False)


def _short(value: str) -> str:
    return value if len(value) <= LONGEST else "…" + value[1 - LONGEST :]


def _plain(text: str) -> str:
    """The text as matplotlib shows it unchanged: a dollar sign would begin a formula."""
    return printable(text, "").replace("$", r"\$")
