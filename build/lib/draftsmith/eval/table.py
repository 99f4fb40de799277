"""The report as tables: for a terminal, and as Markdown for a model card."""

from rich.console import Console
from rich.table import Table

from draftsmith.eval.records import Report

DEPTHS = 4  # shown; the JSON report has all
HEADER = ("domain", "T", "τ", "95 % interval", "rounds", "accepted at depth 1, 2, …")


def rows(report: Report) -> list[tuple[str, ...]]:
    """One row for each domain (greedy), then one for each temperature over all prompts."""
    first = next(iter(report.overall))
    named = [(domain, labelled(report, first), found) for domain, found in report.domains.items()]
    named += [("all", labelled(report, temperature), found) for temperature, found in report.overall.items()]
    return [
        (
            domain,
            temperature,
            f"{found.tau:.2f}",
            f"{found.low:.2f} – {found.high:.2f}",
            str(found.rounds),
            "  ".join(f"{chance:.2f}" for chance in found.conditional[:DEPTHS]) + "  …" * (len(found.conditional) > DEPTHS),
        )
        for domain, temperature, found in named
    ]


def labelled(report: Report, temperature: str) -> str:
    """The temperature, marked where the rule changed the output's law: its numbers must not be taken for lossless ones."""
    return f"{temperature} LOSSY" if temperature in report.lossy else temperature


def lossless(report: Report) -> str:
    """One sentence on whether the answers are plain decoding's."""
    bugs = [parted for parted in report.divergences if parted.verdict == "bug"]
    same, rule = report.answers - len(report.divergences), report.settings["rule"]
    text = (
        f"{same} of {report.answers} answers equal plain decoding's, token for token"
        if report.answers
        else "no answer was compared with plain decoding's"
    )
    if report.lossy:
        text += f"; LOSSY at T = {', '.join(report.lossy)}: rule {rule} changes the law of the output"
    elif rule.startswith("rejection"):
        text += f"; at T > 0 rule {rule} is lossless in law, which no single answer shows"
    if report.divergences:
        text += f"; {len(report.divergences) - len(bugs)} part at a tie within measured noise, {len(bugs)} for no such reason"
    text += " (NOT LOSSLESS)" if bugs else ""
    return text + (f"; {report.like_transformers} of {report.compared} equal transformers' generate" if report.compared else "")


def speed(report: Report) -> list[str]:
    """The measured speed, line by line."""
    if not report.speed:
        return []
    s, lossy = report.speed, " LOSSY" * (next(iter(report.overall)) in report.lossy)
    first = f"τ {s['tau']:.2f}   speedup {s['speedup']:.2f} × plain decoding{lossy}   {s['nodes']:.1f} nodes a round on average"
    if "c" in s:
        first += f"\nc {s['c']:.2f}, drafting {s['drafting']:.2f} (in plain rounds)   τ/c {s['tau_over_c']:.2f}, of which {s['share_of_limit']:.2f} came true"
    second = f"{s['drafted_tokens_per_s']:.0f} tokens/s drafted, {s['plain_tokens_per_s']:.0f} plain"
    if "speedup_over_transformers" in s:
        second += (
            f"; {s['speedup_over_transformers']:.2f} × transformers' generate (our plain decoding: {s['plain_over_transformers']:.2f} ×)"
        )
    return [*first.split("\n"), second]


def by_nodes(report: Report) -> str:
    """τ of the best tree of each size, its price, and what is left of it: one line of text for each."""
    lines = ["best tree of N nodes (exact, from position records):     N  depth     τ  price  τ/price"]
    for row in report.by_nodes:
        lines.append(
            f"{'':54}{row['nodes']:4.0f}  {row['depth']:5.0f}  {row['tau']:.2f}   {row['price']:.2f}     {row['tau_over_price']:.2f}"
        )
    lines.append("price: what a round takes, drafting included, over a plain one")
    return "\n".join(lines)


def size(report: Report) -> str:
    """Of the trees, and what else the numbers depend on: rule, batch, governor."""
    settings = report.settings
    rule = f", rule {settings['rule']}" * any(temperature != "0" for temperature in report.overall)
    batch = f", {settings['rows']} prompts at a time" * (settings["rows"] > 1)
    return f"{'up to ' * isinstance(report.tree, dict)}{report.nodes} nodes a round{rule}{batch}{', governed' * settings['governed']}"


def show(report: Report) -> None:
    """Print the report for a person."""
    console = Console()
    table = Table(title=f"Acceptance of {report.method} on held-out prompts, {size(report)}")
    shown = rows(report)
    for column, name in enumerate(HEADER):
        # Only the last column may be cut short: a temperature carries its label.
        width = max(len(name), *(len(row[column]) for row in shown)) if column < len(HEADER) - 1 else None
        table.add_column(name, justify="left" if name == "domain" else "right", no_wrap=True, min_width=width)
    for row in shown:
        table.add_row(*row, style="bold" if row[0] == "all" else None)
    console.print(table)
    if report.by_nodes:
        print(by_nodes(report))
    if report.nodes == 1:
        print("No draft tree pays on this machine with this drafter: every τ/price is below 1, so nothing is drafted.")
    for line in speed(report):
        print(line)
    print(lossless(report) + f".  Distinct 8-grams in the answers at T={next(iter(report.overall))}: {report.distinct:.0%}.")


def markdown(report: Report) -> str:
    """The same for a model card."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows(report)]
    return "\n".join(lines)
