"""The pictures of the README: `make pictures` draws them into eval/figures/.

The survival plot is that of an evaluated artifact; the pipeline is drawn here, from a conversation to a measured drafter.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from draftsmith.inference.errors import exit_on_error

FIGURES = Path(__file__).resolve().parent / "figures"
SUPERVISED, PLAIN, ACCEPTED = "#b7d7a8", "#eeeeee", "#6aa84f"

# What a row becomes: (token, whether it is supervised).
ROW = [
    ("<user>", 0),
    ("2", 0),
    ("+", 0),
    ("2", 0),
    ("?", 0),
    ("<assistant>", 0),
    ("2", 1),
    ("+", 1),
    ("2", 1),
    ("is", 1),
    ("4", 1),
    ("<end>", 1),
]
# Documents of two packed sequences: (length, supervised tokens at the end).
PACKED = [[(12, 6), (9, 4), (11, 8)], [(16, 10), (7, 3), (9, 5)]]
# A draft tree: (token, x, y, parent, accepted).
TREE = [("2", 0, 0, None, 1), ("+", 1, 0.6, 0, 1), ("=", 1, -0.6, 0, 0), ("2", 2, 0.9, 1, 1), ("3", 2, 0.3, 1, 0), ("4", 2, -0.6, 2, 0)]


def main(arguments: list[str]) -> None:
    """Draw both pictures. The argument is an artifact that `draftsmith eval` has measured.

    Raises:
        ValueError: no such artifact, or not evaluated yet.
    """
    if len(arguments) != 1:
        raise ValueError(
            f"got {len(arguments)} arguments; expected one: the folder of an evaluated artifact, such as runs/quickstart/artifact"
        )
    survival = Path(arguments[0]) / "survival.png"
    if not survival.is_file():
        raise ValueError(f"got {arguments[0]!r}, which has no survival.png; expected an evaluated artifact: draftsmith eval {arguments[0]}")
    FIGURES.mkdir(exist_ok=True)
    shutil.copyfile(survival, FIGURES / "survival.png")
    pipeline(FIGURES / "pipeline.png")
    print(f"{FIGURES / 'survival.png'}, {FIGURES / 'pipeline.png'}")


def pipeline(path: Path) -> None:
    """Draw five steps from left to right: row, loss mask, packed sequences, training, a verified round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 5, figsize=(15, 3.1), dpi=110, gridspec_kw={"width_ratios": [1.0, 1.15, 1.2, 1.35, 1.5]})
    steps = (
        ("1  a row of data", _row),
        ("2  tokens and loss mask", _tokens),
        ("3  packed sequences", _packed),
        ("4  training on the target's features", _training),
        ("5  one verified round", _round),
    )
    for axes, (title, draw) in zip(panels, steps, strict=True):
        axes.set_axis_off()
        axes.set_title(title, fontsize=10, loc="left")
        draw(axes)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.88, bottom=0.02, wspace=0.08)
    figure.savefig(path)
    pyplot.close(figure)


def _row(axes: Any) -> None:
    text = '{"messages": [\n  {"role": "user",\n   "content": "2 + 2?"},\n  {"role": "assistant",\n   "content": "2 + 2 is 4"}]}'
    axes.text(0.02, 0.72, text, family="monospace", fontsize=8, va="top", transform=axes.transAxes)
    axes.text(0.02, 0.1, "chats.jsonl", fontsize=8, color="gray", transform=axes.transAxes)


def _tokens(axes: Any) -> None:
    axes.set(xlim=(0, 4), ylim=(0, 4.2))
    for i, (token, supervised) in enumerate(ROW):
        _box(axes, i % 3 * 1.32, 3.3 - i // 3 * 0.8, 1.22, 0.6, token, SUPERVISED if supervised else PLAIN)
    axes.text(0, 0.05, "green: supervised", fontsize=8, color="gray")


def _packed(axes: Any) -> None:
    axes.set(xlim=(0, 34), ylim=(0, 4.2))
    for i, documents in enumerate(PACKED):
        start = 0
        for length, supervised in documents:
            _box(axes, start, 2.6 - i * 1.3, length - supervised, 0.8, "", PLAIN)
            _box(axes, start + length - supervised, 2.6 - i * 1.3, supervised, 0.8, "", SUPERVISED)
            start += length + 0.4
    axes.text(0, 0.35, "documents do not see each other", fontsize=8, color="gray")


def _training(axes: Any) -> None:
    axes.set(xlim=(0, 10), ylim=(0, 4.2))
    _box(axes, 0.2, 2.5, 4.2, 1.1, "frozen target\nhidden states, taps", "#cfe2f3")
    _box(axes, 0.2, 0.5, 4.2, 1.1, "feature store", "#fff2cc")
    _box(axes, 6.0, 2.5, 3.7, 1.1, "drafter\nloss, AdamW", "#f4cccc")
    _box(axes, 6.0, 0.5, 3.7, 1.1, "artifact\nsafetensors, card", "#d9d2e9")
    _arrow(axes, (4.4, 3.05), (6.0, 3.05))
    _arrow(axes, (2.3, 2.5), (2.3, 1.6))
    _arrow(axes, (4.4, 1.2), (6.0, 2.7))
    _arrow(axes, (7.85, 2.5), (7.85, 1.6))


def _round(axes: Any) -> None:
    axes.set(xlim=(-0.4, 3.6), ylim=(-1.5, 1.6))
    for token, x, y, parent, accepted in TREE:
        if parent is not None:
            _, from_x, from_y, _, _ = TREE[parent]
            axes.plot([from_x, x], [from_y, y], color=ACCEPTED if accepted else "lightgray", lw=2.2 if accepted else 1.2, zorder=0)
        _box(axes, x - 0.3, y - 0.19, 0.6, 0.38, token, ACCEPTED if accepted else PLAIN)
    axes.text(2.45, 0.83, "is  (bonus token)", fontsize=8, va="center")
    axes.text(-0.3, -1.35, "2 accepted + 1 bonus = 3 tokens of one forward", fontsize=8, color="gray")


def _box(axes: Any, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="gray", lw=0.7))
    axes.text(x + width / 2, y + height / 2, text, fontsize=8, ha="center", va="center")


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": "gray", "lw": 1.3})


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
