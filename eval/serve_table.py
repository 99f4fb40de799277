"""The report of `draftsmith serve-bench` for people: tables and sentences."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.eval.intervals import shown
from draftsmith.eval.output import cell
from draftsmith.inference.terminal import printable

LISTED = 5  # kinds of errors of a server
ROWS = ("load", "server", "requests", "errors", "tokens/s", "first token, ms", "per token, ms", "chunk gap, ms", "request, s", "τ")
SPEEDUPS = ("load", "server", "decoding", "request", "prompts")


def print_report(report: dict[str, Any]) -> None:
    """Print the report."""
    console, settings = Console(), report["settings"]
    title = f"{report['prompts']['count']} prompts {settings['repeats']} times, up to {settings['max_new_tokens']} new tokens"
    console.print(_table(f"{title}, T={settings['temperature']:g}; p50 / p90 / p99", ROWS, [_figures(row) for row in report["rows"]]))
    if report["speedups"]:
        console.print(_table("Speedups over the first server", SPEEDUPS, [_speedup(row) for row in report["speedups"]]))
        print(
            "In brackets: 95 % intervals over prompts, paired. decoding: time per output token; request: latency per token, all included."
        )
    lines = [line for row in report["speedups"] for line in (_equal(row), *_predicted(row, report["rows"])) if line]
    lines += [f"{row['name']}, {row['load']}: {_tau(row['tau'])}" for row in report["rows"] if row["tau"]]
    lines += _errors(report["errors"]) + [f"note: {note}" for note in report["notes"]]
    for line in lines:
        print(printable(line, keep=""))


def _table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=cell(title), title_style="italic", box=box.SIMPLE_HEAD)
    for name in header:
        text = name in ("load", "server")
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    tau = f"{row['tau']['tau']:.2f}" if row["tau"] else ""
    times = (_shares(row[name], 1e3, ".0f") for name in ("first_token_s", "token_s", "gap_s"))
    rate = f"{row['tokens_per_s']:.1f}" if row["tokens_per_s"] is not None else ""
    counts = (str(row["requests"]), str(row["errors"] or ""))
    return (row["load"], row["name"], *counts, rate, *times, _shares(row["latency_s"], 1.0, ".2f"), tau)


def _shares(values: dict[str, float] | None, unit: float, form: str) -> str:
    return " / ".join(f"{unit * value:{form}}" for value in values.values()) if values else ""


def _speedup(row: dict[str, Any]) -> tuple[str, ...]:
    ratios = [
        f"{row[name]['estimate']:.2f} ({shown(row[name]['low'], row[name]['high'])})" if row[name] else ""
        for name in ("decoding", "request")
    ]
    return (row["load"], row["name"], *ratios, str(row["prompts"]))


def _equal(row: dict[str, Any]) -> str:
    """How many answers are equal, and why there is no speedup."""
    equal, where = row["equal"], f"{row['name']}, {row['load']}"
    parts = [f"no speedup: {row['why_none']}"] if row["why_none"] else []
    if equal:
        own = f"; the first server's equal its own in {equal['own']} of {equal['own_compared']}" if equal["own_compared"] else ""
        parts.append(f"{equal['answers']} of {equal['compared']} answers equal the first server's{own}")
    return f"{where}: {'; '.join(parts)}" if parts else ""


def _predicted(row: dict[str, Any], figures: list[dict[str, Any]]) -> list[str]:
    """Predicted against measured; nothing where no evaluation was given."""
    if "predicted" not in row:
        return []
    where, values = f"{row['name']}, {row['load']}", row["predicted"]
    if values is None:
        return [f"{where}: no prediction: {row['unpredicted']}"]
    measured = next((each["tau"] for each in figures if (each["load"], each["server"]) == (row["load"], row["server"])), None)
    tau = f"{measured['tau']:.2f} measured" if measured else "not measured"
    lines = [f"{where}: τ {values['tau']:.2f} ({shown(values['tau_low'], values['tau_high'])}) predicted at depth {values['depth']}, {tau}"]
    if values["speedup"] is None:
        return [*lines, f"{where}: no predicted speedup: {values['why_none']}"]
    decoding = row["decoding"]
    against = f"{decoding['estimate']:.2f} ({shown(decoding['low'], decoding['high'])})" if decoding else "none"
    predicted = f"{values['speedup']:.2f} ({shown(values['low'], values['high'])})"
    lines.append(f"{where}: speedup of decoding at batch {values['batch']}, predicted against measured: {predicted} against {against}")
    return lines


def _tau(tau: dict[str, Any]) -> str:
    """τ of a server, and by whose count."""
    interval = f" ({shown(tau['low'], tau['high'])})" if tau["low"] is not None else ""
    survival = ", ".join(f"{share:.2f}" for share in tau.get("survival", []))
    depths = f"; accepted at least 1, 2, …: {survival}" if survival else ""
    drafted = f"; {tau['drafted']:.2f} tokens drafted a round" if "drafted" in tau else ""
    return f"τ {tau['tau']:.2f}{interval}{drafted}{depths} ({tau['source']})"


def _errors(errors: dict[str, dict[str, int]]) -> list[str]:
    lines = []
    for name, counts in errors.items():
        ordered = sorted(counts.items(), key=lambda item: -item[1])
        lines += [f"{name}: {count} × {reason}" for reason, count in ordered[:LISTED]]
        if len(ordered) > LISTED:
            lines.append(f"{name}: {len(ordered) - LISTED} other errors")
    return lines
