"""`draftsmith eval` with several rules, a load policy, dynamic trees and estimates: from the command to the files that it writes."""

import json

import pytest
from conftest import save_byte_target

from draftsmith.eval import acceptance, evaluation, record_store
from draftsmith.eval.rules import compare_rules
from draftsmith.inference.policy import LoadPolicy

WORDS = ["--max-new-tokens", "12", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    save_byte_target(folder / "target")
    rows = [{"prompt": f"{d} {n} and {d} {n} and {d} {n}", "domain": d, "id": f"{d}{n}"} for d in "ab" for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluate(folder, out, *words):
    target, prompts = str(folder / "target"), str(folder / "prompts.jsonl")
    acceptance.main([*words, "--target", target, "--prompts", prompts, *WORDS, "--out", str(folder / out)])
    return json.loads((folder / out / "acceptance.json").read_text())


@pytest.mark.slow
def test_rules_side_by_side(folder, capsys):
    rules = ["target-sample", "shared-noise", "rejection", "typical"]
    words = [word for rule in rules for word in ("--rule", rule)]
    report = evaluate(folder, "rules", str(folder / "target"), "--tree", "chain", "--temperature", "0", "--temperature", "0.8", *words)
    assert set(report["overall"]) == {"0", "0.8", "0.8 rule=shared-noise", "0.8 rule=rejection", "0.8 rule=typical"}
    assert {row["rule"] for row in report["rules"]} == set(rules) and {row["setting"] for row in report["rules"]} == {"0.8"}
    taus = [row["tau"] for row in report["rules"]]
    assert taus == sorted(taus, reverse=True) and [row["lossless"] for row in report["rules"]].count(False) == 1
    for row in report["rules"]:
        setting = "0.8" if row["rule"] == "target-sample" else f"0.8 rule={row['rule']}"
        assert row["tau"] == pytest.approx(report["overall"][setting]["tau"])
        assert (row["delta"] is None) == (row["rule"] == "target-sample")
    assert report["lossy"] == {"0.8 rule=typical": "typical"} and report["answers"] == 3 * 16  # greedy and two keyed rules are compared
    printed = capsys.readouterr().out
    best = next(row["rule"] for row in report["rules"] if row["lossless"])
    assert f"T=0.8: of the lossless rules {best} has the highest τ" in printed and "typical LOSSY" in printed
    assert "Verification rules" in (folder / "rules" / "report.html").read_text()


@pytest.mark.slow
def test_the_order_of_rules_does_not_change_the_tree(folder):
    common = [str(folder / "target"), "--tree", "largest", "--nodes", "5", "--temperature", "0.8", "--probe", "0"]
    orders = [("rejection", "target-sample"), ("target-sample", "rejection")]
    reports = [
        evaluate(folder, f"order {first}", *common, *(word for rule in (first, second) for word in ("--rule", rule)))
        for first, second in orders
    ]
    assert reports[0]["tree"] == reports[1]["tree"] and len(reports[0]["tree"]) == 4
    taus = [{setting: row["tau"] for setting, row in report["overall"].items()} for report in reports]
    assert taus[0] == taus[1] and len(taus[0]) == 2


def test_a_window_is_not_what_an_artifact_does_by_itself(folder):
    words = [str(folder / "target"), "--draft-window", "8", "--temperature", "0", "--probe", "0"]
    assert evaluate(folder, "window", *words, "--tree", "chain")["overall"]["0"]["tau"] > 1
    for tree in ("best", "largest"):
        with pytest.raises(
            ValueError, match=f"--tree {tree} is chosen by what the drafter says with all positions in sight; leave --draft-window out"
        ):
            evaluate(folder, "none", *words, "--tree", tree)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--exact", "8", "--slots", "2"], "--exact is for one slot and without kernels"),
        (["--load-aware", "--kernels"], "--load-aware verifies trees of several sizes"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(folder, words, message):
    with pytest.raises(ValueError, match=message):
        evaluate(folder, "refused", str(folder / "target"), "--temperature", "0", *words)
    assert not list((folder / "refused").glob("records*"))


def test_an_estimate_that_is_impossible_is_refused_before_anything_is_decoded(folder):
    for drafter in ("early-exit:1", "hybrid:early-exit:1"):
        with pytest.raises(ValueError, match="this one runs a part of the target; leave out --estimate"):
            evaluate(folder, "part", drafter, "--temperature", "0", "--probe", "1", "--estimate", "H200")
    assert not list((folder / "part").glob("records*"))


def test_a_rule_that_is_not_used_is_not_refused(folder):
    words = (str(folder / "target"), "--tree", "dynamic", "--rule", "rejection", "--probe", "0")
    assert set(evaluate(folder, "greedy rejection", *words, "--temperature", "0")["overall"]) == {"0"}
    with pytest.raises(ValueError, match="got rule rejection with a dynamic tree"):
        evaluate(folder, "sampled rejection", *words, "--temperature", "1")


def test_a_report_is_written_though_it_cannot_be_compared(folder, capsys):
    evaluate(folder, "twelve", "suffix", "--temperature", "0", "--probe", "0")
    words = ("ngram", "--temperature", "0", "--probe", "0", "--max-new-tokens", "9", "--target", str(folder / "target"))
    with pytest.raises(ValueError, match="--beside: max_new_tokens is 9 in 'ngram' and 12 in"):
        acceptance.main([*words, "--prompts", str(folder / "prompts.jsonl"), "--json", "--beside", str(folder / "twelve")])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["overall"]["0"]["tau"] > 1


def test_trees_of_too_many_candidates_have_no_superset(folder, monkeypatch):
    words = (str(folder / "target"), "--tree", "dynamic", "--depth", "2", "--width", "3", "--temperature", "0", "--probe", "0")
    for most, expected in ((13, True), (12, False)):  # 1 + 3 + 9 candidates
        monkeypatch.setattr(evaluation, "MOST_NODES", most)
        evaluate(folder, f"at most {most}", *words)
        assert bool(record_store.read(folder / f"at most {most}").supersets) == expected


def test_one_rule_is_compared_with_nothing(folder):
    evaluate(folder, "single", "ngram", "--temperature", "0.8", "--rule", "shared-noise")
    assert compare_rules(record_store.read(folder / "single")) == []


@pytest.mark.parametrize("drafter", [pytest.param("suffix", marks=pytest.mark.slow), "target"])
def test_a_policy_is_written_and_followed(folder, drafter, capsys):
    name = drafter if drafter == "suffix" else str(folder / "target")
    tree = [] if drafter == "suffix" else ["--tree", "dynamic", "--depth", "2", "--width", "2", "--nodes", "6"]
    report = evaluate(folder, f"load {drafter}", name, *tree, "--temperature", "0", "--probe", "2", "--timed", "1", "--estimate", "H200")
    policy = LoadPolicy.read(folder / f"load {drafter}" / "policy.json")
    assert "policy.json" in capsys.readouterr().out and len(policy.entries) >= 1
    assert report["load"]["policy"] == json.loads((folder / f"load {drafter}" / "policy.json").read_text())
    replayed = report["load"]["replayed"]
    deepest = max(row["depth"] for row in replayed)
    assert deepest == (2 if drafter == "target" else 16) and len({row["tau"] for row in replayed}) > 1
    (estimate,) = report["estimates"]
    assert (estimate["kind"], estimate["device"]) == ("estimate", "H200")
    page = (folder / f"load {drafter}" / "report.html").read_text()
    assert "Estimated, not measured" in page and "predicted to pay most at each batch" in page

    # The policy says for one slot to draft nothing, or as deep as the tree.
    entries = [{"from": 1, "to": 1, "tree": [], "num_speculative_tokens": 0}]
    (folder / "off.json").write_text(json.dumps({"kind": "load policy", "format": 1, "entries": entries}))
    off = evaluate(folder, f"off {drafter}", name, *tree, "--temperature", "0", "--policy", str(folder / "off.json"))
    assert off["overall"]["0"]["tau"] == 1.0 < report["overall"]["0"]["tau"] and off["settings"]["policy"] == [[1, 0]]
    with pytest.raises(ValueError, match=r"--policy is for the drafter .*, got 'ngram' \(ngram\): another method"):
        evaluate(folder, "other", "ngram", "--temperature", "0", "--policy", str(folder / f"load {drafter}" / "policy.json"))
    evaluate(folder, f"two slots {drafter}", name, *tree, "--temperature", "0", "--policy", str(folder / "off.json"), "--slots", "2")
    assert "--policy covers batches up to 1: with more of the 2 slots in use nothing is drafted" in capsys.readouterr().err
    again = evaluate(folder, f"off {drafter}", name, *tree, "--temperature", "0")
    assert again["settings"]["policy"] is None and again["overall"]["0"]["tau"] == report["overall"]["0"]["tau"]


def test_a_policy_without_a_successor_is_removed(folder):
    evaluate(folder, "removed", "suffix", "--temperature", "0", "--probe", "1", "--timed", "1")
    assert (folder / "removed" / "policy.json").is_file()
    evaluate(folder, "removed", "suffix", "--temperature", "0")
    assert not (folder / "removed" / "policy.json").exists()
    (folder / "removed" / "policy.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=r"policy\.json is there already, and not of an evaluation"):
        evaluate(folder, "removed", "suffix", "--temperature", "0")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--estimate", "H1000"), "got device 'H1000'; expected one of A100"),
        (("--estimate", "H200", "--probe", "0"), "--estimate needs what the probe records"),
        (("--policy", "nowhere.json"), "--policy nowhere.json: there is no such file; give the policy.json of an evaluation"),
        (("--policy", "prompts.jsonl", "--adaptive-depth"), "both choose the depth"),
        (("--rule", "target-sample", "--rule", "rejection"), "suffix has no distribution to sample children from"),
        (("--sampling", "top_p=0.9"), "without a temperature decoding is greedy, and no token is filtered; add temperature=1"),
        (("--rule", "target-sample", "--rule", "membership"), "--rule membership needs a filter"),
    ],
)
def test_mistakes(folder, words, says):
    with pytest.raises((ValueError, OSError)) as caught:
        evaluate(folder, "mistakes", "suffix", *words)
    assert says in str(caught.value)
