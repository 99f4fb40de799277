"""The report of `draftsmith eval` as tables and sentences: for a terminal, and as Markdown for a model card."""

from rich.console import Console
from rich.table import Table

from draftsmith.eval import drift, load_report, quality
from draftsmith.eval.answers import skipped_line
from draftsmith.eval.baselines import Reference
from draftsmith.eval.intervals import FEWEST, Interval, prompts_for, shown
from draftsmith.eval.output import cell, literal
from draftsmith.eval.records import KEYED_RULES
from draftsmith.eval.report import Acceptance, Report, drawn_rules
from draftsmith.eval.rules import RuleRow, best_rules
from draftsmith.eval.settings import greedy, rule_of
from draftsmith.inference.terminal import printable

NAMES = ("domain", "drafter", "rule")  # columns of names
LONGEST = 80  # characters of a name on a terminal
DEPTHS = 4  # shown; the JSON report has all
HEADER = ("domain", "T", "τ", "95 % interval", "rounds", "accepted at depth 1, 2, …")
REFERENCE_HEADER = ("drafter", "T", "τ", "95 % interval", "Δτ")
RULES_HEADER = ("rule", "T", "τ", "95 % interval", "Δτ")
SPEED_HEADER = ("domain", "timed", "speedup", "95 % interval", "over transformers")


def rows(report: Report) -> list[tuple[str, ...]]:
    """A row for each domain that prompts name at each setting, then one for each setting over all prompts; columns as in HEADER."""
    lines: list[tuple[str, str, Acceptance]] = []
    for setting, domains in report.domains.items():
        lines += [(printable(domain, keep=""), setting, acceptance) for domain, acceptance in domains.items() if domain != "all"]
    lines += [("all", setting, acceptance) for setting, acceptance in report.overall.items()]
    cells = []
    for domain, setting, acceptance in lines:
        conditional = [f"{chance:.2f}" for chance in acceptance.conditional[:DEPTHS]]
        if len(acceptance.conditional) > DEPTHS:
            conditional.append("…")
        interval = shown(acceptance.low, acceptance.high)
        cells.append((domain, labelled(report, setting), f"{acceptance.tau:.2f}", interval, str(acceptance.rounds), "  ".join(conditional)))
    return cells


def speed_rows(report: Report) -> list[tuple[str, ...]]:
    """A row for each domain that prompts name and one for all, at the first setting; columns as in SPEED_HEADER. None with several slots."""
    if not report.speedups:
        return []
    cells = []
    for domain, s in (report.speedups | {"all": report.speed}).items():
        interval = shown(s["speedup_low"], s["speedup_high"])
        over = f"{s['speedup_over_transformers']:.2f}" if "speedup_over_transformers" in s else ""
        cells.append((printable(domain, keep=""), f"{s['timed']:.0f}", f"{s['speedup']:.2f}", interval, over))
    return cells


def reference_rows(report: Report) -> list[tuple[str, ...]]:
    """The drafter, perfect drafters, drafters without weights and earlier artifacts; columns as in REFERENCE_HEADER."""
    cells = []
    for each in report.references:
        cells.append(
            (printable(each.name, keep=""), labelled(report, each.setting), f"{each.tau:.2f}", shown(each.low, each.high), _delta(each))
        )
    return cells


def rule_rows(report: Report) -> list[tuple[str, ...]]:
    """The verification rules at each setting that was measured under several; columns as in RULES_HEADER."""
    cells = []
    for each in report.rules:
        name = each.rule if each.lossless else f"{each.rule} LOSSY"
        cells.append((name, each.setting, f"{each.tau:.2f}", shown(each.low, each.high), _delta(each)))
    return cells


def _delta(row: Reference | RuleRow) -> str:
    """The difference with its interval; "" where a row has none."""
    return "" if row.delta is None else f"{row.delta:+.2f} ({shown(row.delta_low, row.delta_high, '+.2f')})"


def labelled(report: Report, setting: str) -> str:
    """The setting, marked LOSSY where the rule changes the output's distribution."""
    return f"{setting} LOSSY" if setting in report.lossy else setting


def lossless(report: Report) -> str:
    """One sentence on whether the answers equal plain decoding's, and for an adapted target that it is the one meant."""
    bugs = [divergence for divergence in report.divergences if divergence.verdict == "bug"]
    same = report.answers - len(report.divergences)
    if report.answers:
        text = f"{same} of {report.answers} answers equal plain decoding's, token for token"
    else:
        text = "no answer was compared with plain decoding's"
    if report.lossy:
        text += f"; LOSSY at T = {', '.join(report.lossy)}: the rule changes the distribution of the output"
    if drawn := drawn_rules(report):
        text += f"; rule {', '.join(drawn)} is lossless in distribution, which no single answer shows"
    if report.divergences:
        ties = len(report.divergences) - len(bugs)
        text += (
            f"; {ties} diverge where rounding decides, {len(bugs)} for no such reason: "
            f"{report.divergences_per_1000:.1f} divergences per 1,000 tokens"
        )
    if bugs:
        text += " (NOT LOSSLESS)"
    if report.compared:
        text += f"; {report.like_transformers} of {report.compared} equal transformers' generate"
    if report.target.get("adapter_hash"):
        text += f"; {drift.ADAPTED}"
    return text


def speed(report: Report) -> list[str]:
    """The measured speed, line by line."""
    if not report.speed:
        return []
    s = report.speed
    lines = [
        f"τ {s['tau']:.2f}   speedup {s['speedup']:.2f} × plain decoding {_same_tokens(report)}   {s['nodes']:.1f} nodes a round on average"
    ]
    if report.settings["timed"]:
        lines[0] += f"   ({s['timed']:.0f} timed prompts)"
    if "c" in s:
        lines.append(f"a round, in plain rounds: verifying c = {s['c']:.2f}, drafting {s['drafting']:.2f}, rest {s['rest']:.2f}")
        lines.append(
            f"predicted speedup τ / (c + drafting + rest) {s['predicted_speedup']:.2f}; measured {s['speedup']:.2f}, {s['realised_fraction']:.0%} of it"
        )
    rates = f"{s['drafted_tokens_per_s']:.0f} tokens/s with the drafter, {s['plain_tokens_per_s']:.0f} without"
    if "cost_of_exact" in s:
        lines.append(f"exact rounds: plain decoding takes {s['cost_of_exact']:.2f} × the time of ordinary plain decoding")
    if "speedup_over_transformers" in s:
        rates += (
            f"; {s['speedup_over_transformers']:.2f} × transformers' generate (our plain decoding: {s['plain_over_transformers']:.2f} ×)"
        )
    return [*lines, rates]


def _same_tokens(report: Report) -> str:
    """What the speedup compares: rejection and lossy rules give other tokens than plain decoding."""
    setting, rule = report.first_setting, rule_of(report.first_setting)
    if greedy(setting) or rule in KEYED_RULES:
        return "of the same tokens"
    if setting in report.lossy:
        return f"per token, of other tokens (rule {rule}, LOSSY)"
    return f"per token, of other tokens (rule {rule})"


def by_nodes(report: Report) -> str:
    """The best tree of each size: τ, the relative cost of its round, and τ over cost. One line of text each."""
    lines = ["best tree of N nodes (exact, from position records):     N  depth     τ  cost   τ/cost"]
    for row in report.by_nodes:
        lines.append(
            f"{'':54}{row['nodes']:4.0f}  {row['depth']:5.0f}  {row['tau']:.2f}  {row['relative_cost']:.2f}     {row['tau_over_cost']:.2f}"
        )
    lines.append("cost: time of a round, drafting included, over that of a plain round; τ/cost: predicted speedup")
    return "\n".join(lines)


def size(report: Report) -> str:
    """The size of the trees, and what else the numbers depend on: rule, batch, adaptive depth."""
    settings = report.settings
    text = f"{report.nodes} nodes a round"
    if isinstance(report.tree, dict):
        text = f"up to {text}"
    rules = dict.fromkeys(rule_of(setting) for setting in report.overall if not greedy(setting))
    if rules:
        text += f", rule {', '.join(rules)}"
    if settings["slots"] > 1:
        text += f", {settings['slots']} prompts at a time"
    if settings.get("exact"):
        text += ", exact"
    if settings.get("adaptive_depth"):
        text += ", adaptive depth"
    if settings.get("load_aware"):
        text += ", load-aware verification"
    if settings.get("policy"):
        text += ", depth by a load policy"
    return text


def precision(report: Report) -> str:
    """How well τ is known over all prompts, and what ± 3 % would take, for people."""
    tau = report.overall[report.first_setting]
    needed = prompts_for(Interval(tau.tau, tau.low, tau.high), tau.prompts)
    if needed is None or tau.low is None or tau.high is None:
        return f"{tau.prompts} prompts are too few for an interval; {FEWEST} give a first one"
    half = (tau.high - tau.low) / 2 / tau.tau
    advice = f"; ± 3 % would take about {needed:,} prompts of the same kinds" if half > 0.03 else ""
    return f"τ over {tau.prompts} prompts is known to ± {half:.0%}{advice}"


def print_report(report: Report) -> None:
    """Print the report for a person."""
    console = Console()
    title = f"Acceptance of {report.method} on held-out prompts, {size(report)}"
    _print_table(console, title, HEADER, rows(report))
    if report.skipped:
        print(skipped_line(report.skipped, report.settings["positions"]))
    if report.speedups:
        _print_table(console, f"Speedup at T={report.first_setting}", SPEED_HEADER, speed_rows(report))
    if report.references:
        _print_table(console, "Ceilings and baselines", REFERENCE_HEADER, reference_rows(report))
    if report.rules:
        _print_table(console, "Verification rules", RULES_HEADER, rule_rows(report))
        for sentence in best_rules(report.rules):
            print(f"{sentence}.")
    for line in quality.lines(report.quality, report.lossy):
        print(f"{line}.")
    if report.by_nodes:
        print(by_nodes(report))
    if report.nodes == 1:
        print("Nothing is drafted: where the draft tree was chosen, none was predicted to pay with this drafter.")
    for line in speed(report):
        print(line)
    for line in (
        *load_report.lines(report.load),
        *load_report.estimate_lines(report.estimates),
        *load_report.service_lines(report.service),
    ):
        print(line)
    print(f"{precision(report)}.")
    for line in drift.lines(report.drift):
        print(f"{line}.")
    for warning in report.warnings:
        print(f"{printable(warning, keep='')}.")
    print(f"{lossless(report)}.  Distinct 8-grams in the answers at T={report.first_setting}: {report.distinct:.0%}.")


def _print_table(console: Console, title: str, header: tuple[str, ...], cells: list[tuple[str, ...]]) -> None:
    table = Table(title=title)
    for name in header:
        # Where the terminal is narrow, names and settings are folded, numbers are not.
        folded = name in (*NAMES, "T", header[-1])
        table.add_column(name, justify="left" if name in NAMES else "right", no_wrap=not folded, overflow="fold")
    for name, *numbers in cells:
        short = name if len(name) <= LONGEST else f"{name[:LONGEST]}…"
        table.add_row(*map(cell, (short, *numbers)), style="bold" if name == "all" else None)
    console.print(table)


def markdown(report: Report) -> str:
    """The table for a model card."""
    return _markdown(HEADER, rows(report))


def speed_markdown(report: Report) -> str:
    """The table of speedups for a model card; "" where there is none."""
    return _markdown(SPEED_HEADER, speed_rows(report)) if report.speedups else ""


def _markdown(header: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in cells:
        lines.append("| " + " | ".join((literal(row[0]), *row[1:])) + " |")
    return "\n".join(lines)
