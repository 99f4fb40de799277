"""The report of `draftsmith serve-bench` for people: tables and sentences."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.eval.intervals import shown
from draftsmith.eval.output import cell
from draftsmith.inference.terminal import printable

LISTED = 5  # kinds of errors of a server
ROWS = ("load", "server", "requests", "errors", "tokens/s", "running", "tokens/chunk", "τ")
TIMES = ("load", "server", "first token", "per token", "chunk gap", "request")
SPEEDUPS = ("load", "server", "decoding", "request", "prompts")


def print_report(report: dict[str, Any]) -> None:
    """Print the report."""
    console, settings = Console(), report["settings"]
    for number, server in enumerate(report["servers"]):
        engine = f" ({server['engine']})" if server["engine"] else ""
        print(printable(f"{_letter(number)}: {server['name']}, {server['model']}{engine}", keep=""))
    title = f"{report['prompts']['count']} prompts {settings['repeats']} times, up to {settings['max_new_tokens']} new tokens, T={settings['temperature']:g}"
    console.print(_table(title, ROWS, [_figures(row) for row in report["rows"]]))
    console.print(_table("p50/p90/p99 in ms; of requests in s", TIMES, [_times(row) for row in report["rows"]]))
    if report["speedups"]:
        console.print(_table("Speedups over A", SPEEDUPS, [_speedup(row) for row in report["speedups"]]))
        print(
            "In brackets: 95 % intervals over prompts, paired. decoding: time per output token; request: latency per token, all included."
        )
    lines = [line for row in report["speedups"] for line in (_equal(row), *_predicted(row, report["rows"])) if line]
    lines += [f"{_where(row)}: {_tau(row['tau'])}" for row in report["rows"] if row["tau"]]
    lines += _errors(report["errors"]) + [f"note: {note}" for note in report["notes"]]
    for line in lines:
        print(printable(line, keep=""))


def _letter(server: int) -> str:
    """A server's name in tables: A, B, …; numbers after Z."""
    return chr(ord("A") + server) if server < 26 else str(server + 1)


def _where(row: dict[str, Any]) -> str:
    return f"{_letter(row['server'])}, {row['load']}"


def _table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=cell(title), title_style="italic", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in header:
        table.add_column(name, justify="left" if name in ("load", "server") else "right", no_wrap=name == "load", overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    values = [f"{row[name]:.2f}" if row[name] is not None else "" for name in ("running", "tokens_per_chunk")]
    rate = f"{row['tokens_per_s']:.1f}" if row["tokens_per_s"] is not None else ""
    counts = (str(row["requests"]), str(row["errors"] or ""))
    return (row["load"], _letter(row["server"]), *counts, rate, *values, f"{row['tau']['tau']:.2f}" if row["tau"] else "")


def _times(row: dict[str, Any]) -> tuple[str, ...]:
    times = (_shares(row[name], 1e3, ".0f") for name in ("first_token_s", "token_s", "gap_s"))
    return (row["load"], _letter(row["server"]), *times, _shares(row["latency_s"], 1.0, ".1f"))


def _shares(values: dict[str, float] | None, unit: float, form: str) -> str:
    return "/".join(f"{unit * value:{form}}" for value in values.values()) if values else ""


def _speedup(row: dict[str, Any]) -> tuple[str, ...]:
    ratios = [
        f"{row[name]['estimate']:.2f} ({shown(row[name]['low'], row[name]['high'])})" if row[name] else ""
        for name in ("decoding", "request")
    ]
    return (row["load"], _letter(row["server"]), *ratios, str(row["prompts"]))


def _equal(row: dict[str, Any]) -> str:
    """How many answers are equal, and why there is no speedup."""
    equal = row["equal"]
    parts = [f"no speedup: {row['why_none']}"] if row["why_none"] else []
    if equal:
        own = f"; A's equal its own in {equal['own']} of {equal['own_compared']}" if equal["own_compared"] else ""
        parts.append(f"{equal['answers']} of {equal['compared']} answers equal A's{own}")
    return f"{_where(row)}: {'; '.join(parts)}" if parts else ""


def _predicted(row: dict[str, Any], figures: list[dict[str, Any]]) -> list[str]:
    """Predicted against measured; nothing where no evaluation was given."""
    if "predicted" not in row:
        return []
    values = row["predicted"]
    if values is None:
        return [f"{_where(row)}: no prediction: {row['unpredicted']}"]
    measured = next((each["tau"] for each in figures if _where(each) == _where(row)), None)
    tau = f"{measured['tau']:.2f} measured" if measured else "not measured"
    lines = [
        f"{_where(row)}: τ {values['tau']:.2f} ({shown(values['tau_low'], values['tau_high'])}) predicted at depth {values['depth']}, {tau}"
    ]
    if values["speedup"] is None:
        return [*lines, f"{_where(row)}: no predicted speedup: {values['why_none']}"]
    decoding = row["decoding"]
    against = f"{decoding['estimate']:.2f} ({shown(decoding['low'], decoding['high'])})" if decoding else "none"
    predicted = f"{values['speedup']:.2f} ({shown(values['low'], values['high'])})"
    return [
        *lines,
        f"{_where(row)}: speedup of decoding at batch {values['batch']}, predicted against measured: {predicted} against {against}",
    ]


def _tau(tau: dict[str, Any]) -> str:
    """τ of a server, and by whose count."""
    text = f"τ {tau['tau']:.2f}" + (f" ({shown(tau['low'], tau['high'])})" if tau["low"] is not None else "")
    if "drafted" in tau:
        text += f"; {tau['drafting']:.0%} of rounds drafted, {tau['drafted']:.2f} tokens each"
    if tau.get("survival"):
        text += f", accepted at least 1, 2, …: {', '.join(f'{share:.2f}' for share in tau['survival'])}"
    return f"{text} ({tau['source']})"


def _errors(errors: dict[str, dict[str, int]]) -> list[str]:
    lines = []
    for name, counts in errors.items():
        ordered = sorted(counts.items(), key=lambda item: -item[1])
        lines += [f"{name}: {count} × {reason}" for reason, count in ordered[:LISTED]]
        if len(ordered) > LISTED:
            lines.append(f"{name}: {len(ordered) - LISTED} other errors")
    return lines
