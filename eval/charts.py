"""The charts of the report page: SVG for HTML, in colours that follow the page's style sheet.

Each function takes the page's content (eval/page.py) and gives an <svg> element, or "" where there is nothing to draw. No text from outside
gets into a chart: names are in the tables beside it.
"""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

WIDTH = 4.6  # inches: legible on a phone's width, where 1 inch is about 1 cm
# matplotlib needs colours of its own; the style sheet's take their place in the SVG.
INK, MUTED, ACCENT, HIGH, LOW = "#010101", "#010102", "#010103", "#010104", "#010105"
COLOURS = {INK: "currentColor", MUTED: "var(--muted)", ACCENT: "var(--accent)", HIGH: "var(--high)", LOW: "var(--low)"}
STYLE = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": MUTED,
    "grid.alpha": 0.25,
}
LINES = 40  # domains; of more only the best and the worst are drawn
LABELLED = 40  # leaves of a tree whose nodes get their ranks as text


def charts(content: dict[str, Any]) -> dict[str, str]:
    """All charts by name."""
    return {
        "survival": _survival(content),
        "calibration": _calibration(content),
        "load": _load(content),
        "tree": _tree(content),
    }


def _survival(content: dict[str, Any]) -> str:
    points = content["survival"]
    if not points:
        return ""

    def draw(axes: Axes) -> None:
        ends = {content["best_domain"]: HIGH, content["worst_domain"]: LOW}
        domains = content["domains"][content["verdict"]["setting"]]
        for name, domain in domains.items():
            if len(domains) > LINES and name not in ends:
                continue
            colour = ends.get(name, MUTED)
            style: dict[str, Any] = {"lw": 0.8, "alpha": 0.6} if colour == MUTED else {"lw": 1.6, "ls": "--" if colour == HIGH else ":"}
            axes.plot(range(len(points) + 1), [1.0, *domain["survival"]], color=colour, **style)
        known = [point for point in points if point["low"] is not None]
        axes.fill_between(
            [0, *(p["depth"] for p in known)],
            [1, *(p["low"] for p in known)],
            [1, *(p["high"] for p in known)],
            color=ACCENT,
            alpha=0.2,
            lw=0,
        )
        axes.plot(range(len(points) + 1), [1.0, *(point["share"] for point in points)], color=ACCENT, lw=2.4, marker="o", ms=4)
        axes.set(xlabel="draft depth", ylabel="share of rounds", ylim=(0, 1.02), xlim=(0, len(points) + 0.1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid()

    return _svg("survival", 2.9, draw)


def _calibration(content: dict[str, Any]) -> str:
    entries = content["calibration"]
    if not entries:
        return ""

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, lw=1, ls="--")
        shown = (entries[-1], entries[0]) if len(entries) > 1 else entries
        for entry in shown:
            first = entry is entries[0]
            x, y = ([point[key] for point in entry["bins"]] for key in ("confidence", "right"))
            axes.plot(x, y, color=ACCENT if first else LOW, marker="o" if first else "s", ms=4, lw=1.8, ls="-" if first else ":")
        axes.set(xlabel="confidence of the drafter", ylabel="share that was right", xlim=(0, 1), ylim=(0, 1.02))
        axes.grid()

    return _svg("calibration", 2.9, draw)


def _load(content: dict[str, Any]) -> str:
    load = content["by_batch"]
    if load is None:
        return ""

    def draw(axes: Axes) -> None:
        batches = load["batches"]
        axes.fill_between(batches, load["low"], load["high"], color=ACCENT, alpha=0.2, lw=0)
        axes.plot(batches, load["speedup"], color=ACCENT, lw=2.2, marker="o", ms=4)
        axes.axhline(1, color=INK, lw=1)
        if load["break_even"] is not None:
            axes.axvline(load["break_even"], color=LOW, lw=1.4, ls="--")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(batches))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set(xlabel="requests in the batch", ylabel="predicted speedup", ylim=(0, None))
        axes.grid()

    return _svg("load", 2.9, draw)


def _tree(content: dict[str, Any]) -> str:
    nodes = content["draft_tree"]
    if not nodes:
        return ""
    paths = [tuple(node["path"]) for node in nodes]
    inner = {path[:-1] for path in paths}
    leaves = sorted(path for path in paths if path not in inner)
    height: dict[tuple[int, ...], float] = {path: -float(i) for i, path in enumerate(leaves)}
    for path in sorted([*paths, ()], key=len, reverse=True):
        children = [height[child] for child in paths if child[:-1] == path]
        if children:
            height[path] = sum(children) / len(children)
    share = {tuple(node["path"]): node["accepted"] for node in nodes}

    def draw(axes: Axes) -> None:
        lines = [[(len(path) - 1, height[path[:-1]]), (len(path), height[path])] for path in paths]
        widths = [1.2 if share[path] is None else 0.6 + 5 * share[path] for path in paths]
        axes.add_collection(LineCollection(lines, colors=ACCENT, linewidths=widths, alpha=0.55, zorder=1))
        xs, ys = [len(path) for path in (*paths, ())], [height[path] for path in (*paths, ())]
        axes.scatter(xs, ys, s=90 if len(leaves) <= LABELLED else 12, color=ACCENT, zorder=2)
        if len(leaves) <= LABELLED:
            for path in paths:
                axes.annotate(str(path[-1]), (len(path), height[path]), ha="center", va="center", fontsize=7, color="white", zorder=3)
        axes.set(xlabel="draft depth", xlim=(-0.2, max(map(len, paths)) + 0.2), ylim=(-len(leaves) + 0.3, 0.7))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_visible(False)
        axes.spines["left"].set_visible(False)

    spacing = 0.19 if len(leaves) <= LABELLED else 0.07
    return _svg("tree", min(7.0, max(1.4, 0.7 + spacing * len(leaves))), draw)


def _svg(name: str, height: float, draw: Callable[[Axes], None]) -> str:
    """A figure as an <svg> element whose ids are its own and do not change from run to run."""
    style: dict[Any, Any] = {**STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for the complete page
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="', f' id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" class="chart" aria-hidden="true">', svg, count=1)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, variable)
    return svg.replace("font-family: 'DejaVu Sans', sans-serif; ", "").strip()
