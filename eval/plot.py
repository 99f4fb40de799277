"""A picture of survival by depth."""

from pathlib import Path
from typing import Any

from draftsmith.eval import table
from draftsmith.eval.report import Acceptance, Report
from draftsmith.inference.terminal import printable

SOFTWARE = "draftsmith eval"
MARK = b"Software\x00" + SOFTWARE.encode()  # in the file, by which an evaluation knows its own picture


def survival(report: Report, path: Path) -> None:
    """Write a picture of S_k, the fraction of rounds that accepted at least k drafted tokens: a line for each domain and setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=150)

    def line(name: str, acceptance: Acceptance, **style: Any) -> None:
        # A space: matplotlib leaves labels that begin with an underscore out of the legend.
        label = f" {printable(name[:60], keep='')}  (τ {acceptance.tau:.2f})"
        axes.plot(range(len(acceptance.survival) + 1), [1.0, *acceptance.survival], marker="o", ms=3.5, label=label, **style)

    lossy = " LOSSY" if report.first_setting in report.lossy else ""
    for domain, acceptance in report.domains[report.first_setting].items():
        line(domain + lossy, acceptance, lw=1.2, alpha=0.8)
    for setting, acceptance in report.overall.items():
        dashes = "-" if setting == report.first_setting else "--"
        line(f"all, T={table.labelled(report, setting)}", acceptance, lw=2.4, color="black", ls=dashes)
    axes.set(xlabel="draft depth k", ylabel="survival: P(at least k accepted)", ylim=(0, 1.02), xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{report.method}, {table.size(report)}, {report.settings['prompts']} prompts", fontsize=10)
    axes.grid(alpha=0.25)
    for text in axes.legend(fontsize=8, frameon=False).get_texts():
        text.set_parse_math(False)  # a domain is no formula
    figure.tight_layout()
    figure.savefig(path, format="png", metadata={"Software": SOFTWARE})
    pyplot.close(figure)
