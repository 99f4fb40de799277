"""A picture of survival by depth."""

import itertools
import textwrap
import warnings
from pathlib import Path
from typing import Any

from draftsmith.eval import table
from draftsmith.eval.report import Acceptance, Report
from draftsmith.inference.terminal import printable

SOFTWARE = "draftsmith eval"
EXTREMES = 5  # domains of highest and of lowest τ that have a line, where there are many
LONGEST = 48  # characters of a name
MARK = b"Software\x00" + SOFTWARE.encode()  # in the file, by which an evaluation knows its own picture


def survival(report: Report, path: Path) -> None:
    """Write a picture of S_k, the fraction of rounds that accepted at least k drafted tokens: a line for each domain and setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=150)

    def line(name: str, mark: str, acceptance: Acceptance, **style: Any) -> None:
        short = name if len(name) <= LONGEST else f"{name[:LONGEST]}…"
        # A space: matplotlib leaves labels that begin with an underscore out of the legend.
        label = f" {printable(short, keep='')}{mark}  (τ {acceptance.tau:.2f})"
        axes.plot(range(len(acceptance.survival) + 1), [1.0, *acceptance.survival], marker="o", ms=3.5, label=label, **style)

    marks = {setting: " LOSSY" if setting in report.lossy else "" for setting in report.overall}
    domains = report.domains[report.first_setting]
    names, title = list(domains), f"{report.method}, {table.size(report)}, {report.overall[report.first_setting].prompts} prompts"
    if len(names) > 2 * EXTREMES:
        ordered = sorted(names, key=lambda name: -domains[name].tau)
        names, title = [*ordered[:EXTREMES], *ordered[-EXTREMES:]], f"{title}; the domains of highest and of lowest τ"
    for name in names:
        line(name, marks[report.first_setting], domains[name], lw=1.2, alpha=0.8)
    for (setting, acceptance), dashes in zip(report.overall.items(), itertools.cycle(("-", "--", ":", "-.")), strict=False):
        line(f"all, T={setting}", marks[setting], acceptance, lw=2.4, color="black", ls=dashes)
    axes.set(xlabel="draft depth k", ylabel="survival: P(at least k accepted)", ylim=(0, 1.02), xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("\n".join(textwrap.wrap(title, 70)), fontsize=10)
    axes.grid(alpha=0.25)
    # Many lines leave no room for their names among them.
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if len(axes.lines) > 6 else {}
    for text in axes.legend(fontsize=8, frameon=False, **beside).get_texts():
        text.set_parse_math(False)  # a domain is no formula
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # of a domain's name: a box stands for it
        figure.savefig(path, format="png", bbox_inches="tight", metadata={"Software": SOFTWARE})
    pyplot.close(figure)
