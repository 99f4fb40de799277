"""Survival by depth, as a picture."""

from pathlib import Path
from typing import Any

from draftsmith.eval import table
from draftsmith.eval.records import Report


def survival(report: Report, path: Path) -> None:
    """S_k, the share of rounds in which at least k drafted tokens were accepted: a line for each domain, one for all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=150)
    first = next(iter(report.overall))
    lines: list[tuple[str, Any, dict[str, Any]]] = [
        (domain + " LOSSY" * (first in report.lossy), found, {"lw": 1.2, "alpha": 0.8}) for domain, found in report.domains.items()
    ]
    lines += [
        (f"all, T={table.labelled(report, temperature)}", found, {"lw": 2.4, "color": "black", "ls": "-" if temperature == first else "--"})
        for temperature, found in report.overall.items()
    ]
    for name, found, style in lines:
        axes.plot(range(len(found.survival) + 1), [1.0, *found.survival], marker="o", ms=3.5, label=f"{name}  (τ {found.tau:.2f})", **style)
    axes.set(xlabel="draft depth k", ylabel="survival: P(at least k accepted)", ylim=(0, 1.02), xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{report.method}, {table.size(report)}, {report.settings['prompts']} prompts", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
