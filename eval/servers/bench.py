"""Measure servers with OpenAI's API (vLLM, SGLang, llama.cpp, TGI) under load, with speculation and without.

    draftsmith serve-bench --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --prompts chat --out served
    draftsmith serve-bench --url … --url … --rate 0.5,2                # requests a second, arriving at random (Poisson)
    draftsmith serve-bench --url … --url … --predicted measured        # beside it what draftsmith eval predicted
    draftsmith serve-bench --from served                               # the same report again, from its records

The first server is the baseline. They are measured in turn, A, B, A, B, with the same prompts. What is measured is recorded at once: a
command that was stopped goes on when it is given again. A failed request is an error in the report and is not repeated. Only the addresses
given are contacted. Of a conversation the first turn is asked. A key is read from OPENAI_API_KEY.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.eval import options

if TYPE_CHECKING:  # --help imports no model library
    from draftsmith.eval.records import Records
    from draftsmith.eval.servers.records import Load, ServeRecords

REPORT = "serve-bench.json"
CONCURRENCY = "1,8"
DURATION_S, TIMEOUT_S = 1800.0, 120.0
LOADS = {"concurrency": (1, 4096), "rate": (1e-3, 10_000)}
ALLOWED_WITH_FROM = ("--from", "--json", "--predicted")


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("serve-bench", __doc__)
    parser.add_argument(
        "--url", action="append", metavar="ADDRESS", help="a server, such as http://127.0.0.1:8000; give two or more to compare"
    )
    parser.add_argument(
        "--model", action="append", help="the model's name there (default: the only one); one for all servers, or one for each"
    )
    parser.add_argument("--concurrency", metavar="N[,N…]", help=f"requests at a time, each a load of its own (default {CONCURRENCY})")
    parser.add_argument("--rate", metavar="R[,R…]", help="requests a second instead, whether earlier ones have ended or not")
    options.add_prompts(parser, limit=6, default="chat")
    parser.add_argument("--repeats", type=int, default=2, help="how often each prompt is asked of each server at each load (default 2)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, the order of prompts, and answers at T > 0 (default 0)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help=f"of a request (default {TIMEOUT_S:g})")
    about = f"send no request later than this; the same command goes on (default {DURATION_S:g})"
    parser.add_argument("--duration", type=float, default=DURATION_S, metavar="SECONDS", help=about)
    parser.add_argument(
        "--predicted", metavar="FOLDER", help="show beside it what draftsmith eval recorded there: predicted against measured"
    )
    options.add_json(parser)
    parser.add_argument("--out", metavar="FOLDER", help=f"folder for the records and {REPORT}; the same command continues there")
    parser.add_argument("--from", dest="source", metavar="FOLDER", help="report what is recorded in this folder; nothing is asked")
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    options.check_numbers(chosen)
    if chosen.source is not None:
        _report_again(chosen, arguments)
        return
    _check(chosen)
    loads = _loads(chosen)

    from contextlib import ExitStack

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval.servers.records import KIND, RECORDS
    from draftsmith.inference.claim import claim

    evaluation = _evaluation(chosen.predicted)
    prompts = prompt_files.load(chosen.prompts or "chat", chosen.limit, distinct=True)
    most = max(load.value for load in loads)
    if loads[0].kind == "concurrency" and most > len(prompts):
        raise ValueError(f"--concurrency {most:g}: got {len(prompts)} prompts; expected as many at least; give more, or raise --limit")
    with ExitStack() as stack:
        folder = Path(os.path.expanduser(chosen.out)) if chosen.out is not None else None
        if folder:
            stack.enter_context(claim(folder, KIND, (RECORDS, REPORT), "--out"))
        records = _measure(chosen, loads, prompts, folder)
        _deliver(records, evaluation, folder, chosen.json)


def _measure(chosen: argparse.Namespace, loads: "list[Load]", prompts: list[Any], folder: Path | None) -> "ServeRecords":
    """Measure what is missing."""
    import asyncio
    from importlib.metadata import version

    from draftsmith.data.prompts import hash_of
    from draftsmith.eval.record_store import RecordStore
    from draftsmith.eval.servers.records import STEM
    from draftsmith.eval.servers.requests import open_benchmarked
    from draftsmith.eval.servers.run import ServeRun, ServeSettings, header_of, models_of

    servers = [open_benchmarked(url, chosen.timeout) for url in chosen.url]
    names = chosen.model or [None]
    models = asyncio.run(models_of(servers, names if len(names) == len(servers) else names * len(servers)))
    settings = ServeSettings(tuple(loads), chosen.repeats, chosen.max_new_tokens, chosen.temperature, chosen.seed)
    versions = {name: version(name) for name in ("draftsmith", "httpx")}
    header = header_of(models, settings, len(prompts), hash_of(prompts), versions)
    with RecordStore(folder, STEM).opened(header) as store:
        return ServeRun(servers, prompts, settings, store, chosen.duration, True).measure()


def _check(chosen: argparse.Namespace) -> None:
    """Raises ValueError for options that are missing, contradict each other, or are out of range."""
    if not chosen.url:
        raise ValueError("got no server; expected --url, such as --url http://127.0.0.1:8000; give two to compare them")
    if chosen.model and len(chosen.model) not in (1, len(chosen.url)):
        raise ValueError(f"got {len(chosen.model)} --model for {len(chosen.url)} --url; expected one, or one for each; correct them")
    for name in ("timeout", "duration"):
        if not 0 < getattr(chosen, name) <= 1e6:
            raise ValueError(f"--{name} {getattr(chosen, name):g}: expected seconds, more than 0 and at most 1,000,000")


def _loads(chosen: argparse.Namespace) -> "list[Load]":
    """The loads that the options name.

    Raises:
        ValueError: both kinds, or no number in its range.
    """
    from draftsmith.eval.servers.records import Load

    if chosen.rate is not None and chosen.concurrency is not None:
        raise ValueError("--rate and --concurrency are two kinds of load; expected one of them; leave one out")
    kind = "concurrency" if chosen.rate is None else "rate"
    low, high = LOADS[kind]
    text = chosen.rate if chosen.rate is not None else chosen.concurrency if chosen.concurrency is not None else CONCURRENCY
    values = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or (kind == "concurrency" and value != int(value)):
            number = "integers" if kind == "concurrency" else "numbers"
            raise ValueError(f"--{kind} {text}: expected {number} of {low:g} to {high:,} with commas between them, got {part!r}")
        values.append(value)
    # Reports print six digits, so more do not count.
    return list({load.label: load for load in (Load(kind, value) for value in values)}.values())


def _evaluation(folder: str | None) -> "Records | None":
    """The records of --predicted."""
    if folder is None:
        return None
    from draftsmith.eval.measured import read

    return read(folder, "--predicted")


def _report_again(chosen: argparse.Namespace, arguments: list[str]) -> None:
    """--from: the report of records."""
    others = [word for word in arguments if word.startswith("-") and word.partition("=")[0] not in ALLOWED_WITH_FROM]
    if others:
        raise ValueError(f"--from takes --json and --predicted only, got {' '.join(others)}; leave it out")
    from draftsmith.eval.servers.records import read

    _deliver(read(Path(os.path.expanduser(chosen.source))), _evaluation(chosen.predicted), None, chosen.json)


def _deliver(records: "ServeRecords", evaluation: "Records | None", folder: Path | None, as_json: bool) -> None:
    """Write the report into the folder, and print it.

    Raises:
        ValueError: nothing was measured.
    """
    from draftsmith.eval import output
    from draftsmith.eval.report import to_json
    from draftsmith.eval.servers import table
    from draftsmith.eval.servers.report import report_of
    from draftsmith.inference import durable

    if not records.requests:
        raise ValueError("nothing was measured: no request ended in time; raise --duration")
    if all(each.error for each in records.requests):
        last = f"; the last error: {records.requests[-1].error}"
        raise ValueError(f"nothing was measured: none of {len(records.requests)} requests was answered{last}; see to the servers")
    report = report_of(records, evaluation)
    if folder:
        durable.write_text(folder / REPORT, to_json(report) + "\n")
    output.deliver(lambda: print(to_json(report)) if as_json else table.print_report(report))
