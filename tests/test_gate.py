"""The gate: what passes, fails and cannot be judged, and what it writes."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from commands import failing
from records_by_hand import SETTINGS, records, request, timed

from draftsmith.eval import bounds, gate, gate_output
from draftsmith.eval.bounds import Bound, judge
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.records import Divergence, prompt_line, request_line
from draftsmith.inference.errors import exit_on_error

TAU = [2, 3, 2, 3, 2, 3, 2, 3, 2, 3]  # tokens of every round of a prompt


def evaluation(**header):
    """Ten prompts of two domains at two settings: τ 2.5 at T = 0, 2 at T = 1; speedup 2 at T = 0."""
    first = [timed(f"p{n}", [count] * 6, 2.0 + n / 10, 1.0 + n / 20, domain="code" if n < 9 else "chat") for n, count in enumerate(TAU)]
    second = [request(f"p{n}", [2] * 9, setting="1", domain="code" if n < 9 else "chat") for n in range(10)]
    return records([*first, *second], **header)


def saved(made, folder):
    folder.mkdir(exist_ok=True)
    store = RecordStore(folder)
    with store.opened(made.header):
        store.append([{"kind": "cost", "forward": made.forward, "drafting": made.drafting}, {"kind": "tree", **made.tree}])
        store.append(map(prompt_line, made.prompts.values()))
        store.append(map(request_line, made.requests))
        names, settings = (list(dict.fromkeys(getattr(each, name) for each in made.requests)) for name in ("prompt", "setting"))
        store.finish(names, settings)
    return folder


def outcome(made, *bounds, setting=None):
    verdict = judge(made, bounds, setting)
    (check,) = verdict.checks
    return check.outcome, check.reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(evaluation(), tmp_path_factory.mktemp("gate") / "measured")


def test_the_lower_end_decides():
    made = evaluation()
    (check,) = judge(made, [Bound("tau", "", 2.0)]).checks
    assert check.outcome == "pass" and check.prompts == 10 and check.estimate == pytest.approx(2.5)
    assert 2.0 < check.low < 2.5 < check.high
    assert outcome(made, Bound("tau", "", check.low))[0] == "pass"
    least = math.nextafter(check.low, 9)
    assert outcome(made, Bound("tau", "", least))[0] == "fail"
    failed, reason = outcome(made, Bound("tau", "", 2.4))
    assert failed == "fail" and "is below 2.4; about" in reason and "if it stays at 2.500" in reason
    assert outcome(made, Bound("tau", "", 2.6))[1].endswith("is below 2.6")
    assert outcome(made, Bound("tau", "", 2.0), setting="1") == ("pass", "")  # all prompts equal: no width
    assert outcome(made, Bound("tau", "", 2.01), setting="1")[0] == "fail"


def test_speedups_are_of_the_prompts_that_were_timed():
    made = evaluation()
    (check,) = judge(made, [Bound("speedup", "", 1.9)]).checks
    assert (check.outcome, check.prompts, check.predicted) == ("pass", 10, False) and check.estimate == pytest.approx(2)
    assert outcome(made, Bound("speedup", "", 2.1))[0] == "fail"
    assert outcome(made, Bound("speedup", "", 1.9, batch=1)) == ("pass", "")
    assert outcome(made, Bound("speedup", "", 0.1), setting="1")[1].startswith("nothing was timed at T=1")
    some = replace(made, requests=[*made.requests[:7], *(replace(each, seconds={}, batch=0) for each in made.requests[7:])])
    assert outcome(some, Bound("speedup", "", 0.1)) == ("error", "7 prompts are too few for an interval; expected at least 8; measure more")
    assert "needs the load model" in outcome(made, Bound("speedup", "", 0.1, batch=8))[1]
    four = evaluation(settings=SETTINGS | {"slots": 8})
    assert outcome(four, Bound("speedup", "", 1.9, batch=8)) == ("pass", "")  # measured so


def test_a_conversation_counts_once():
    """Its turns depend on each other: an interval is over conversations."""
    made = evaluation()
    made.requests = [replace(each, prompt=f"p{n // 2}{'#2' if n % 2 else ''}") for n, each in enumerate(made.requests[:10])]
    for quantity in ("tau", "speedup"):
        assert outcome(made, Bound(quantity, "", 0.1)) == (
            "error",
            "5 prompts are too few for an interval; expected at least 8; measure more",
        )


def test_a_speedup_at_another_batch_is_that_of_the_load_model(monkeypatch):
    made = replace(evaluation(), load={"verify": []})
    loads = []

    def predicted(model, rounds, batch, context, tree):
        if batch > 8:
            raise ValueError("got batch 16; expected 1 to 8, which were measured")
        loads.append((rounds.tau, batch, context, tree))
        return SimpleNamespace(speedup=1.5, low=1.4, high=1.6) if batch > 2 else SimpleNamespace(speedup=1.5, low=None, high=None)

    monkeypatch.setattr(bounds, "CostModel", lambda load: SimpleNamespace(max_nodes=4, contexts=[64, 256]))
    monkeypatch.setattr(bounds, "predict", predicted)
    (check,) = judge(made, [Bound("speedup", "", 1.4, batch=8)]).checks
    assert (check.outcome, check.predicted, check.estimate, check.low, check.prompts) == ("pass", True, 1.5, 1.4, 10)
    assert loads == [(pytest.approx(2.5), 8, 64, made.tree["tree"])]
    assert outcome(made, Bound("speedup", "", 1.45, batch=8))[0] == "fail"
    assert outcome(made, Bound("speedup", "", 0.1, batch=2))[1].endswith("too few for an interval; expected at least 8; measure more")
    assert outcome(made, Bound("speedup", "", 0.1, batch=16)) == ("error", "got batch 16; expected 1 to 8, which were measured")
    monkeypatch.setattr(bounds, "CostModel", lambda load: SimpleNamespace(max_nodes=3, contexts=[64]))
    assert outcome(made, Bound("speedup", "", 0.1, batch=8)) == ("error", "rounds have 4 nodes, and the load was probed up to 3")


@pytest.mark.parametrize("setting, value", [("adaptive_depth", True), ("load_aware", True), ("policy", "latency")])
def test_a_tree_that_varies_is_not_predicted_at_another_batch(setting, value):
    made = replace(evaluation(settings=SETTINGS | {setting: value}), load={"verify": []})
    judged, reason = outcome(made, Bound("speedup", "", 0.1, batch=8))
    assert judged == "error" and f"{setting} chose it anew in each" in reason
    assert outcome(made, Bound("speedup", "", 1.9, batch=1)) == ("pass", "")  # measured so


def test_what_cannot_be_judged_is_an_error():
    made = evaluation()
    easy = Bound("tau", "", 0.5)
    assert outcome(made, Bound("tau", "code", 1.0)) == ("pass", "")
    assert outcome(made, Bound("tau", "chat", 1.0)) == ("error", "1 prompts are too few for an interval; expected at least 8; measure more")
    missing, reason = outcome(made, Bound("tau", "maths", 1.0))
    assert missing == "error" and reason.endswith("its domains are 'code', 'chat'")
    assert outcome(made, easy, setting="0.7") == ("error", "no setting '0.7' was measured; expected one of '0', '1'")
    assert outcome(records([]), easy) == ("error", "no prompt was answered; run draftsmith eval again")
    for broken in ({"rounds": []}, {"tokens": []}):
        failed = replace(made, requests=[replace(made.requests[0], **broken), *made.requests[1:]])
        assert outcome(failed, easy)[1].startswith("1 of 10 answers failed: they have no tokens (p0)"), broken
    failed = replace(made, requests=[replace(each, rounds=[], tokens=[]) for each in made.requests])
    assert outcome(failed, easy)[1].startswith("10 of 10 answers failed")

    def diverged(**fields):
        return replace(made, requests=[*made.requests[:-1], replace(made.requests[-1], divergence=Divergence("p9", 3, 1, 2, **fields))])

    assert outcome(diverged(margin=0.1, noise=0.1), easy)[0] == "pass"  # a tie
    assert (
        outcome(diverged(margin=5.0, noise=0.1), easy)[1].startswith("NOT LOSSLESS: 1 answers")
        and "(p9)" in outcome(diverged(margin=5.0, noise=0.1), easy)[1]
    )
    for rule, reason in (("typical", "rule typical is LOSSY"), ("hope", "is not one that this Draftsmith knows")):
        label = f"1 rule={rule}"
        requests = [replace(each, setting=label if each.setting == "1" else each.setting) for each in made.requests]
        judged = replace(made, requests=requests)
        assert outcome(judged, easy) == ("pass", "") and reason in outcome(judged, easy, setting=label)[1]
    assert judge(made, [], None).outcome == "error"


def test_one_error_outweighs_all_else():
    made = evaluation()
    passing, failed, error = Bound("tau", "", 1.0), Bound("tau", "", 9.0), Bound("tau", "none", 1.0)
    assert judge(made, [passing]).outcome == "pass" and judge(made, [passing, failed]).outcome == "fail"
    assert judge(made, [error, failed, passing]).outcome == "error"


def run(words):
    """The exit status."""
    try:
        exit_on_error(gate.main, [str(word) for word in words])
    except SystemExit as exit:
        return exit.code
    return 0


def test_the_command(folder, tmp_path, capsys):
    assert run([folder, "--min-tau", 2, "--min-speedup", 1.9, "--domain", "code=1.5"]) == 0
    printed = capsys.readouterr().out
    assert "Gate of medusa runs/mine at T=0" in printed and printed.count("pass") == 3 and "2.500" in printed
    junit = tmp_path / "gate.xml"
    assert run([folder, "--min-tau", 9, "--domain", "code=2.0", "--junit", junit]) == 1
    suite = ElementTree.parse(junit).getroot()[0]
    assert {key: suite.get(key) for key in ("name", "tests", "failures", "errors")} == {
        "name": "draftsmith gate",
        "tests": "2",
        "failures": "1",
        "errors": "0",
    }
    cases = {case.get("name"): [each.tag for each in case] for case in suite.iter("testcase")}
    assert cases == {"τ ≥ 9": ["failure"], "τ of code ≥ 2": ["system-out"]}
    assert {each.get("name"): each.get("value") for each in suite.iter("property")}["target"] == "tiny"
    capsys.readouterr()
    assert run([folder, "--domain", "a=b=2.0", "--min-tau", 2, "--setting", "1", "--json", "--junit", junit]) == 2  # its own file again
    report = json.loads(capsys.readouterr().out)
    assert report["outcome"] == "error" and report["setting"] == "1" and report["drafter"]["method"] == "medusa"
    assert [(check["bound"]["name"], check["outcome"]) for check in report["checks"]] == [("τ ≥ 2", "pass"), ("τ of a=b ≥ 2", "error")]
    assert report["checks"][1]["estimate"] is None and report["checks"][0]["low"] == pytest.approx(2)
    assert [each.tag for each in ElementTree.parse(junit).getroot()[0].iter() if each.tag in ("error", "failure")] == ["error"]


def test_records_that_cannot_be_read_fail_in_ci_too(tmp_path, capsys):
    junit = tmp_path / "gate.xml"
    assert "no records.jsonl in" in failing(capsys, gate.main, [tmp_path, "--min-tau", "2", "--junit", junit])
    assert capsys.readouterr().out == ""
    assert "no records.jsonl in" in ElementTree.parse(junit).getroot()[0].find("testcase/error").get("message")
    (tmp_path / "records.jsonl").write_text("")
    assert "is empty" in failing(capsys, gate.main, [tmp_path, "--min-tau", "2", "--json"])


def test_mistakes_on_the_command_line(folder, tmp_path, capsys):
    (tmp_path / "mine.xml").write_text("<mine/>")
    (tmp_path / "link.xml").symlink_to(tmp_path / "mine.xml")
    for words, says in (
        ([], "got no bound; expected --min-tau, --min-speedup or --domain"),
        (["--min-tau", "nan"], "--min-tau nan: expected a number more than 0"),
        (["--min-tau", "inf"], "--min-tau inf: expected a number more than 0"),
        (["--min-tau", "-1"], "--min-tau -1: expected a number more than 0"),
        (["--min-tau", "0"], "--min-tau 0: expected a number more than 0"),
        (["--min-speedup", "1e9"], "--min-speedup 1e+09: expected a number more than 0, at most 1e+06"),
        (["--min-tau", "two"], "invalid float value"),
        (["--min-tau", "2", "--min-tau", "1"], "--min-tau: got it twice (2.0 and 1.0)"),
        (["--domain", "code"], "--domain code: expected NAME=TAU"),
        (["--domain", "=2"], "--domain =2: expected NAME=TAU"),
        (["--domain", "code=x"], "--domain code=x: expected a number after the last ="),
        (["--domain", "code=nan"], "--domain code nan: expected a number more than 0"),
        (["--domain", "code=2", "--domain", "code=3"], "--domain code: got it twice"),
        (["--min-tau", "2", "--at-batch", "8"], "--at-batch says at which batch --min-speedup is meant"),
        (["--min-speedup", "2", "--at-batch", "0"], "--at-batch 0: expected 1 to 4096"),
        (["--min-tau", "2", "--max-tau", "3"], "unrecognized arguments: --max-tau 3"),
        (["--min-tau", "2", "--junit", tmp_path], "expected a file in a folder that exists"),
        (["--min-tau", "2", "--junit", tmp_path / "no" / "g.xml"], "expected a file in a folder that exists"),
        (["--min-tau", "2", "--junit", tmp_path / "mine.xml"], "is there already, and not of gate"),
        (["--min-tau", "2", "--junit", tmp_path / "link.xml"], "it is a link"),
    ):
        assert says in failing(capsys, gate.main, [folder, *words]), words
    assert (tmp_path / "mine.xml").read_text() == "<mine/>"


def test_what_others_wrote_breaks_neither_xml_nor_the_terminal(capsys):
    nasty = 'a\x1b[2J<&">\x00\uffff\ud800[/]'
    made = evaluation(drafter={"method": nasty, "name": nasty})
    made.requests = [replace(each, domain=nasty) for each in made.requests]
    verdict = judge(made, [Bound("tau", nasty, 2.4), Bound("tau", "x" + nasty, 2.0)])
    root = ElementTree.fromstring(gate_output.junit(verdict, nasty).encode())
    assert [case.get("name")[:10] for case in root.iter("testcase")] == ["τ of a\\x1b", "τ of xa\\x1"]
    gate_output.print_verdict(verdict)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed.replace("\x1b[3m", "").replace("\x1b[0m", "") and "\\x1b[2J" in printed and "[/]" in printed
    assert json.loads(gate_output.as_json(verdict, nasty))["outcome"] == "error"


def test_warnings_stand_beside_the_verdict():
    made = evaluation(skipped={"code": 2, "chat": 1})
    loop = replace(made.requests[0], tokens=[1, 2] * 30)
    verdict = judge(replace(made, requests=[loop, *made.requests[1:]]), [Bound("tau", "", 2.0)])
    assert verdict.outcome == "pass" and len(verdict.warnings) == 2
    assert "1 of 10 answers repeat themselves (p0)" in verdict.warnings[0] and verdict.warnings[1].startswith("3 prompts were skipped")
    assert "repeat themselves" in gate_output.junit(verdict, "f") and "repeat themselves" in gate_output.as_json(verdict, "f")
