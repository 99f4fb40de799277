"""Judge an evaluation before a rollout: does the drafter reach what you need, at the lower end of its 95 % interval?

    draftsmith gate runs/mine/artifact --min-tau 2.2 --domain code=2.5
    draftsmith gate measured/mine --min-speedup 1.3 --setting "0.7 top_p=0.9" --junit gate.xml
    draftsmith gate measured/mine --min-speedup 1.3 --at-batch 8 --json

The folder is one that draftsmith eval wrote into. Exit status: 0 all bounds are reached, 1 one is not, 2 one cannot be judged: a domain or setting
that is not there, too few prompts for an interval, answers that failed or are not lossless, nothing timed. What cannot be judged never passes.
"""

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.eval import options

if TYPE_CHECKING:  # --help imports no model library
    from draftsmith.eval.bounds import Bound

STATUS = {"pass": 0, "fail": 1, "error": 2}
HIGHEST = 1e6
MARK = b'name="draftsmith gate"'  # in a JUnit file of ours


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("gate", __doc__)
    parser.add_argument("folder", help="a folder that draftsmith eval wrote into")
    parser.add_argument("--min-tau", type=float, action="append", metavar="TAU", help="least τ over all prompts")
    parser.add_argument(
        "--domain", action="append", metavar="NAME=TAU", help="least τ over the prompts of a domain; may be given more than once"
    )
    parser.add_argument("--min-speedup", type=float, action="append", metavar="X", help="least speedup over plain decoding")
    parser.add_argument(
        "--at-batch", type=int, action="append", metavar="B", help="take the speedup at B prompts at a time, predicted if not measured so"
    )
    parser.add_argument("--setting", action="append", help="label of the sampling to judge, as the report has it (default: its first)")
    parser.add_argument("--junit", help="write JUnit XML to this file; an earlier one of gate may be there")
    options.add_json(parser)
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    bounds = _bounds(chosen)
    setting = _single(chosen, "setting")

    from draftsmith.eval import gate_output, output

    junit = output.checked_file("--junit", Path(os.path.expanduser(chosen.junit)), _own, "gate") if chosen.junit is not None else None

    from draftsmith.eval.bounds import judge, unreadable
    from draftsmith.eval.record_store import read
    from draftsmith.inference import durable

    folder, failure = Path(os.path.expanduser(chosen.folder)), ""
    try:
        verdict = judge(read(folder), bounds, setting)
    except (ValueError, OSError) as error:  # a file of CI must say so too
        failure = str(error)
        verdict = unreadable(bounds, setting, failure)
    if junit:
        text = gate_output.junit(verdict, chosen.folder)
        durable.write_text(junit, text)
    if chosen.json:
        output.deliver(lambda: print(gate_output.as_json(verdict, chosen.folder)))
    elif not failure:  # which is the last line anyway
        output.deliver(lambda: gate_output.print_verdict(verdict))
    if failure:
        raise ValueError(failure)
    if status := STATUS[verdict.outcome]:
        raise SystemExit(status)


def _bounds(chosen: argparse.Namespace) -> "list[Bound]":
    """The bounds that the options name.

    Raises:
        ValueError: none, one that is no positive number, a domain twice, or a batch without a speedup.
    """
    tau, speedup, batch = (_single(chosen, name) for name in ("min_tau", "min_speedup", "at_batch"))
    bounds = [("tau", "", _positive(tau, "--min-tau"), None)] if tau is not None else []
    domains: dict[str, float] = {}
    for text in chosen.domain or []:
        name, _, number = text.rpartition("=")
        if not name:
            raise ValueError(f"--domain {text}: expected NAME=TAU, as in code=2.5")
        if name in domains:
            raise ValueError(f"--domain {name}: got it twice; leave one out")
        try:
            domains[name] = _positive(float(number), f"--domain {name}")
        except ValueError as error:
            raise ValueError(str(error) if "expected" in str(error) else f"--domain {text}: expected a number after the last =") from None
    bounds += [("tau", name, least, None) for name, least in domains.items()]
    if batch is not None and (speedup is None or not 1 <= batch <= 1 << 12):
        raise ValueError(
            "--at-batch says at which batch --min-speedup is meant; give --min-speedup too, or leave it out"
            if speedup is None
            else f"--at-batch {batch}: expected 1 to {1 << 12}"
        )
    if speedup is not None:
        bounds.append(("speedup", "", _positive(speedup, "--min-speedup"), batch))
    if not bounds:
        raise ValueError("got no bound; expected --min-tau, --min-speedup or --domain NAME=TAU; `draftsmith gate --help` says more")
    from draftsmith.eval.bounds import Bound

    return [Bound(*each) for each in bounds]


def _single(chosen: argparse.Namespace, name: str) -> Any:
    """The value of an option that may be given once; None where it is not given."""
    values = getattr(chosen, name) or [None]
    if len(values) > 1:
        raise ValueError(f"--{name.replace('_', '-')}: got it twice ({values[0]} and {values[1]}); leave one out")
    return values[0]


def _positive(value: float, name: str) -> float:
    if not (math.isfinite(value) and 0 < value <= HIGHEST):
        raise ValueError(f"{name} {value:g}: expected a number more than 0, at most {HIGHEST:g}")
    return value


def _own(file: Path) -> bool:
    """Whether gate wrote the file; an empty one has nothing to lose."""
    with file.open("rb") as stream:
        start = stream.read(4096)
    return not start or MARK in start
