"""The verdict of `draftsmith gate`: a table for people, JUnit XML for CI, and JSON."""

import re
from dataclasses import asdict
from xml.etree import ElementTree

from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.eval.bounds import Check, Verdict
from draftsmith.eval.intervals import shown
from draftsmith.eval.output import cell
from draftsmith.eval.report import to_json
from draftsmith.inference.terminal import printable

WORDS = {"pass": "pass", "fail": "FAIL", "error": "CANNOT BE JUDGED"}
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def print_verdict(verdict: Verdict) -> None:
    """Print it for a person."""
    table = Table(title=cell(f"Gate of {_drafter(verdict)} at T={verdict.setting}"), title_style="italic", box=box.SIMPLE_HEAD)
    for name in ("bound", "measured", "95 % interval", "prompts", "verdict"):
        table.add_column(name, justify="left" if name in ("bound", "verdict") else "right")
    for check in verdict.checks:
        measured = "" if check.estimate is None else f"{check.estimate:.3f}{' predicted' if check.predicted else ''}"
        interval = "" if check.estimate is None else shown(check.low, check.high, ".3f")
        table.add_row(cell(check.bound.name), measured, interval, str(check.prompts or ""), WORDS[check.outcome])
    Console().print(table)
    for check in verdict.checks:
        if check.reason:
            print(printable(f"{check.bound.name}: {check.reason}", keep=""))
    for warning in verdict.warnings:
        print(printable(f"note: {warning}", keep=""))


def as_json(verdict: Verdict, folder: str) -> str:
    """One line of JSON: outcome, folder, setting, target, drafter, checks and warnings."""
    checks = [asdict(check) | {"bound": asdict(check.bound) | {"name": check.bound.name}} for check in verdict.checks]
    content = {"outcome": verdict.outcome, "folder": folder, "setting": verdict.setting}
    content |= {key: verdict.header.get(key) for key in ("target", "drafter")}
    return to_json(content | {"checks": checks, "warnings": verdict.warnings})


def junit(verdict: Verdict, folder: str) -> str:
    """JUnit XML of one test case a bound."""
    outcomes = [check.outcome for check in verdict.checks]
    counts = {"tests": len(outcomes), "failures": outcomes.count("fail"), "errors": outcomes.count("error"), "skipped": 0}
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "draftsmith gate", **{key: str(count) for key, count in counts.items()}})
    properties = ElementTree.SubElement(suite, "properties")
    target = verdict.header.get("target", {}).get("name", "")
    for name, value in (("folder", folder), ("drafter", _drafter(verdict)), ("target", target), ("setting", verdict.setting)):
        ElementTree.SubElement(properties, "property", {"name": name, "value": _xml(value)})
    for check in verdict.checks:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "draftsmith.gate", "name": _xml(check.bound.name)})
        if check.outcome != "pass":
            kind = "failure" if check.outcome == "fail" else "error"
            ElementTree.SubElement(case, kind, {"message": _xml(check.reason), "type": check.outcome}).text = _xml(_measured(check))
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(_measured(check))
    if verdict.warnings:
        ElementTree.SubElement(suite, "system-err").text = _xml("\n".join(verdict.warnings))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=False) + "\n"


def _measured(check: Check) -> str:
    if check.estimate is None:
        return "nothing measured"
    how = "predicted" if check.predicted else "measured"
    return f"{how} {check.estimate:.4f}, 95 % interval {shown(check.low, check.high, '.4f')}, {check.prompts} prompts"


def _drafter(verdict: Verdict) -> str:
    drafter = verdict.header.get("drafter", {})
    return f"{drafter.get('method', 'a drafter')} {drafter.get('name', '')}".strip()


def _xml(text: str) -> str:
    """A text with what XML cannot hold as escapes."""
    return _NOT_XML.sub(lambda match: f"\\u{ord(match[0]):04x}", printable(text, keep="\n\t"))
