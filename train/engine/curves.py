"""A run as a picture: what it learned, and how fast."""

import json
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, float]]

# Columns of a training row that are not means of the objective's metrics.
MACHINE = ("step", "lr", "tokens_per_s", "seconds", "mfu", "target_ratio", "peak_gb", "left_out")
SUMMARY = {
    "tokens_per_s": "{:,.0f} tokens/s",
    "mfu": "{:.0%} of the measured matmul rate",
    "target_ratio": "{:.1f} × the target's forward",
    "peak_gb": "peak {:.1f} GB",
}
COLUMNS, BLUE, ORANGE = 3, "#1f5fa8", "#d1600f"


def draw(file: Path, picture: Path) -> None:
    """Write `picture`, the curves of a metrics.jsonl; nothing where the file has no rows."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if rows:
        figure(rows, file.absolute().parent.name).savefig(picture)


def panels(rows: Rows) -> dict[str, list[str]]:
    """The panels of a run by title, each with the metrics that it shows.

    There is a panel for the loss, for τ, for each other metric of the objective (metrics whose names differ by a number share one), for the
    learning rate and for the speed.
    """
    by_title: dict[str, list[str]] = {"loss": ["loss"], "τ": []}
    for name in dict.fromkeys(name.removeprefix("valid_") for row in rows for name in row):
        if name not in (*MACHINE, "loss"):
            by_title.setdefault(_title(name), []).append(name)
    by_title |= {"learning rate": ["lr"], "tokens/s": ["tokens_per_s"]}
    return {names[0] if title == "τ" and len(names) == 1 else title: names for title, names in by_title.items() if names}


def _title(metric: str) -> str:
    if metric in ("tau", "sim_tau"):
        return "τ"
    return re.sub(r"_?\d+$", "", metric) if re.search(r"_\D*\d+$", metric) else metric


def figure(rows: Rows, name: str) -> "Figure":
    """One axes for each of `panels`: lines are training, dots are held-out data."""
    from matplotlib.figure import Figure

    by_title = panels(rows)
    columns = 2 if len(by_title) in (2, 4) else min(COLUMNS, len(by_title))
    lines = -(-len(by_title) // columns)
    result = Figure(figsize=(4.6 * columns, 0.8 + 2.9 * lines), dpi=130, layout="constrained")
    result.suptitle(f"{name}: {_summary(rows)}", x=0.01, ha="left", fontsize=11, parse_math=False)
    for number, (title, names) in enumerate(by_title.items(), 1):
        _draw_panel(result.add_subplot(lines, columns, number), title, names, rows)
    result.supxlabel("step    (lines: training, dots: held out)", fontsize=8)
    return result


def _draw_panel(axes: "Axes", title: str, names: list[str], rows: Rows) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    for number, metric in enumerate(names):
        color: Any = BLUE if len(names) == 1 else colormaps["viridis"](0.85 * number / (len(names) - 1))
        (steps, trained), (valid_steps, valid) = _points(rows, metric), _points(rows, f"valid_{metric}")
        label = re.sub(r"^.*?(?=\d+$)", "", metric)
        axes.plot(steps, trained, color=color, lw=1.4, marker="o" if len(steps) == 1 else "", ms=4, label=label)
        axes.plot(valid_steps, valid, color=ORANGE if len(names) == 1 else color, lw=0.9, ls=":", marker="o", ms=4, mec="white", mew=0.6)
        if len(names) == 1 and metric not in MACHINE:
            last = [f"{word}{values[-1]:.4g}" for word, values in (("", trained), ("held out ", valid)) if values]
            axes.set_title(", ".join(last), loc="right", fontsize=8, color="0.35")
    axes.set_title(title.replace("_", " "), loc="left", fontsize=10, fontweight="bold")
    axes.set_xlim(0, 1.02 * rows[-1]["step"])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if names[0] in MACHINE:
        axes.set_ylim(bottom=0)
    if len(names) > 1:
        axes.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=6, handlelength=1.0, columnspacing=1.0)


def _points(rows: Rows, metric: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that have the metric."""
    having = [row for row in rows if metric in row]
    return [row["step"] for row in having], [row[metric] for row in having]


def _summary(rows: Rows) -> str:
    """What the machine did, by the median over the rows, and its peak of memory."""
    parts = [f"step {rows[-1]['step']:,}"]
    for name, text in SUMMARY.items():
        values = _points(rows, name)[1]
        if values:
            parts.append(text.format(max(values) if name == "peak_gb" else statistics.median(values)))
    return ",  ".join(parts)
