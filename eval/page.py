"""The report for people: one HTML file that needs nothing else, the same content as JSON (report.schema.json), and as Markdown for a card.

`page_content` computes all that is shown; the templates beside this file only render it, with one filter for numbers. Two pages of the same
records are equal, byte for byte.
"""

import functools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from draftsmith.eval import drift
from draftsmith.eval.failures import failures
from draftsmith.eval.intervals import FEWEST, Interval, conversations, of_share, prompts_for
from draftsmith.eval.output import literal
from draftsmith.eval.records import Records, RequestRecord
from draftsmith.eval.report import Report, as_json, drawn_rules, to_json
from draftsmith.eval.slices import calibration, entropy_edges, ranks_drawn, ranks_formed, slices
from draftsmith.inference.terminal import printable

FORMAT = 1  # of the JSON report
LEVEL = 0.95  # of the intervals, see eval/intervals.py
GOAL = 0.03  # precision of τ that the page advises on
TEXT = 300  # tokens of the text that is shown
DOMAINS, DIVERGENCES, NODES, FACTS = 200, 20, 64, 60  # rows of a table on the page; the JSON report has all
LONGEST = 120  # characters of a name from outside
FOLDER = Path(__file__).parent
MARK = b'<meta name="generator" content="draftsmith eval">'  # in the file, by which an evaluation knows its own page


def page_content(records: Records, report: Report) -> dict[str, Any]:
    """All that the page shows: the report as JSON has it, and under further keys what is computed from the records.

    Args:
        records: of the evaluation.
        report: of the same records.
    """
    setting = report.first_setting
    drawn = ranks_drawn(records, setting)
    domains = report.domains[setting]
    ordered = sorted(domains, key=lambda name: domains[name].tau)
    extra = {
        "format": FORMAT,
        "verdict": _verdict(report),
        "watermark": _watermark(report),
        "drift_lines": drift.lines(report.drift),
        "survival": _survival(records, setting),
        "best_domain": ordered[-1] if len(ordered) > 1 else None,
        "worst_domain": ordered[0] if len(ordered) > 1 else None,
        "draft_tree": _draft_tree(report.tree, drawn.accepted if drawn else None),
        "ranks_formed": _dict(ranks_formed(records, setting)),
        "ranks_drawn": _dict(drawn),
        "calibration": [asdict(each) for each in calibration(records, setting)],
        "slices": {name: [asdict(each) for each in cells] for name, cells in slices(records, setting).items()},
        "entropy_edges": entropy_edges(records, setting),
        "failures": asdict(failures(records, setting)),
        "text": _text(records, setting),
        "by_batch": report.load.get("by_batch"),
        "prompts": records.header.get("prompts", {}),
    }
    return json.loads(as_json(report)) | json.loads(to_json(extra))


def _dict(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


def _verdict(report: Report) -> dict[str, Any]:
    """The first lines: τ, speedup, and whether the output is the target's own."""
    tau, speed = report.overall[report.first_setting], report.speed
    bugs = sum(each.verdict == "bug" for each in report.divergences)
    if bugs:
        lossless = "not lossless"
    elif report.lossy:
        lossless = "lossy"
    elif report.divergences:
        lossless = "lossless up to rounding"
    elif report.answers:
        lossless = "lossless"
    else:
        lossless = "lossless in distribution" if drawn_rules(report) else "not checked"
    half = None if tau.low is None or tau.high is None else (tau.high - tau.low) / 2 / tau.tau
    return {
        "setting": report.first_setting,
        "tau": tau.tau,
        "tau_low": tau.low,
        "tau_high": tau.high,
        "tau_precision": half,
        "prompts": tau.prompts,
        "goal": GOAL,
        "prompts_for_goal": prompts_for(Interval(tau.tau, tau.low, tau.high), tau.prompts, GOAL),
        "level": LEVEL,
        "plain_tau": 1,
        "fewest_prompts": FEWEST,
        "speedup": speed.get("speedup"),
        "speedup_low": speed.get("speedup_low"),
        "speedup_high": speed.get("speedup_high"),
        "timed": speed.get("timed"),
        "lossless": lossless,
        "answers": report.answers,
        "equal": report.answers - len(report.divergences),
        "ties": len(report.divergences) - bugs,
        "bugs": bugs,
    }


def _watermark(report: Report) -> str:
    """What is written across the page; "" where nothing has to be."""
    if any(each.verdict == "bug" for each in report.divergences):
        return "NOT LOSSLESS"
    return "LOSSY" if report.lossy else ""


def _survival(records: Records, setting: str) -> list[dict[str, Any]]:
    """Survival by depth over all prompts, with its interval."""
    conversation = conversations(request.prompt for request in records.requests)
    prompts: dict[str, list[int]] = {}
    for request in records.requests:
        if request.setting == setting:
            prompts.setdefault(conversation[request.prompt], []).extend(each.accepted for each in request.rounds)
    accepted = [torch.tensor(each) for each in prompts.values() if each]
    count = torch.tensor([len(each) for each in accepted])
    points = []
    for depth in range(1, records.tree["depth"] + 1):
        share = of_share(torch.tensor([int((each >= depth).sum()) for each in accepted]), count)
        points.append({"depth": depth, "share": share.estimate, "low": share.low, "high": share.high})
    return points


def _draft_tree(tree: list[list[int]] | dict[str, int], accepted: list[float] | None) -> list[dict[str, Any]]:
    """The nodes of a static tree, with the share of rounds that accepted each; none of a dynamic tree, which differs from round to round."""
    if isinstance(tree, dict):
        return []
    return [{"path": path, "accepted": accepted[i] if accepted else None} for i, path in enumerate(tree)]


def _text(records: Records, setting: str) -> dict[str, Any] | None:
    """A typical answer: of those at least half as long as the longest that can be shown, the one of median τ; each token with the depth at
    which it was accepted, 0 for the target's own."""
    requests = [request for request in records.requests_at(setting) if request.rounds]
    if not requests:
        return None
    enough = min(TEXT, max(len(request.tokens) for request in requests)) / 2
    requests = sorted((request for request in requests if len(request.tokens) >= enough), key=_tau)
    request = requests[(len(requests) - 1) // 2]
    depths = [0] * len(request.tokens)
    for each in request.rounds:
        start = each.position - request.prompt_tokens + 1
        depths[start : start + each.accepted] = range(1, each.accepted + 1)
    return {
        "prompt": request.prompt,
        "domain": request.domain,
        "tau": _tau(request),
        "tokens": len(request.tokens),
        "shown": min(TEXT, len(request.tokens)),
        "pieces": [printable(piece) for piece in records.text(request.tokens[:TEXT])],
        "depths": depths[:TEXT],
        "by_depth": [depths[:TEXT].count(depth) for depth in range(max(depths[:TEXT], default=0) + 1)],
    }


def _tau(request: RequestRecord) -> float:
    return sum(each.committed for each in request.rounds) / len(request.rounds)


def html(content: dict[str, Any]) -> str:
    """The page, one self-contained file."""
    from draftsmith.eval import charts  # here, since matplotlib takes half a second

    rows = content["domains"][content["verdict"]["setting"]]
    ends = [row["high"] or row["tau"] for row in rows.values()]
    scale = max([content["verdict"]["tau_high"] or content["verdict"]["tau"], *ends, 1.5])
    svg = {name: Markup(chart) for name, chart in charts.charts(content).items()}
    limits = {"DOMAINS": DOMAINS, "DIVERGENCES": DIVERGENCES, "NODES": NODES}
    facts = {
        title: _leaves(content[key])[:FACTS]
        for title, key in (
            ("Target", "target"),
            ("Drafter", "drafter"),
            ("Settings", "settings"),
            ("Prompts", "prompts"),
            ("Machine", "machine"),
            ("Versions", "versions"),
            ("Skipped prompts", "skipped"),
        )
        if content[key]
    }
    return _template("page.html.jinja", True).render(c=content, svg=svg, facts=facts, scale=scale, **limits) + "\n"


def markdown(content: dict[str, Any]) -> str:
    """Survival, slices and failures as tables, for a model card."""
    return _template("page.md.jinja", False).render(c=content).strip() + "\n"


def content_json(content: dict[str, Any]) -> str:
    """The content as one line of JSON, of the form that report.schema.json describes."""
    return to_json(content) + "\n"


@functools.cache
def _template(name: str, autoescape: bool) -> Template:
    """A file of this folder, compiled."""
    environment = Environment(autoescape=autoescape, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    numbers = _shown if autoescape else _rounded
    environment.filters |= {"shown": numbers, "line": _line, "plain": _plain, "cell": _cell, "visible": _visible}
    environment.tests["numeric"] = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    return environment.from_string((FOLDER / name).read_text(encoding="utf-8"))


def _rounded(value: float | None, form: str = "") -> str:
    """The only place where numbers are rounded for people."""
    if value is None or not math.isfinite(value):
        return "–"
    return format(value, form or (",d" if isinstance(value, int) else ",.4g")).replace("-", "−")


def _shown(value: float | None, form: str = "") -> Markup:
    """A number, with the exact value of the JSON report beside it."""
    text = _rounded(value, form)
    return Markup("<span>–</span>") if text == "–" else Markup('<data value="{}">{}</data>').format(json.dumps(value), text)


def _line(text: Any) -> str:
    """A sentence in one line, however long it is."""
    return printable(str(text), keep="")


def _plain(text: Any) -> str:
    """A text from outside in one line of bounded length."""
    line = _line(text)
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


def _visible(text: str) -> str:
    """A token whose line breaks and tabs can be seen."""
    return text.replace("\n", "↵").replace("\t", "⇥")


def _cell(text: Any) -> str:
    """A text from outside in a Markdown table: no mark-up in it counts."""
    return literal(_plain(text))


def _leaves(entries: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The values of nested objects under names such as "tree depth"; a list is one value."""
    leaves: list[tuple[str, Any]] = []
    for name, value in entries.items():
        if isinstance(value, dict):
            leaves += _leaves(value, f"{prefix}{name} ")
        elif isinstance(value, list):
            leaves.append((prefix + name, ", ".join(map(str, value))))
        else:
            leaves.append((prefix + name, value))
    return leaves
