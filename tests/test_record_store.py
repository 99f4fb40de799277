"""Records that outlive a kill: whatever was cut off, the same evaluation continues to the same records."""

import errno
import fcntl
import json
import math
import os
import re
import shutil
from dataclasses import replace

import pytest
from conftest import save_byte_target
from load_records import load_record

from draftsmith.data.prompts import Prompt
from draftsmith.eval import decoding, evaluation, record_store
from draftsmith.eval.evaluation import evaluate_drafter
from draftsmith.eval.load_check import timed_batches
from draftsmith.eval.record_store import RECORDS, UNFINISHED, RecordStore
from draftsmith.eval.records import Divergence, RequestRecord, Round, request_line, request_of
from draftsmith.eval.report import as_json, report_of
from draftsmith.eval.settings import Settings, label
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.rule_names import USUAL_RULE
from draftsmith.inference.sampler import Sampling
from draftsmith.models import ranks
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

PROMPTS = [Prompt(f"{domain}{n}", domain, f"{domain} {n} and {domain} {n} and") for domain in "ab" for n in range(3)]
SAMPLINGS = [Sampling(rule="target-sample"), Sampling(temperature=0.7, top_k=5, rule="target-sample")]
SETTINGS = Settings(8, SAMPLINGS, 8, timed=1)


class Stop(BaseException):
    """The end of a process."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records") / "target"
    save_byte_target(folder)
    return Target.load(str(folder))


def measure(target, folder, drafter=None, settings=SETTINGS):
    return evaluate_drafter(target, drafter or new_drafter("medusa", target, num_heads=2), PROMPTS, settings, RecordStore(folder))


def untimed(line):
    """A line without what differs between two runs: the seconds."""
    if line["kind"] == "request":
        line = line | {
            "rounds": [each[:3] for each in line["rounds"]],
            "seconds": sorted(line["seconds"]),
            "prefill_s": 0,
            "plain_verify_s": 0,
            "plain_other_s": 0,
        }
    return {} if line["kind"] in ("cost", "load") else line


def lines(folder):
    return [untimed(json.loads(line)) for line in (folder / RECORDS).read_text().splitlines()]


@pytest.fixture(scope="module")
def complete(target, tmp_path_factory):
    """The folder of an evaluation that nothing stopped, and its unfinished file as it was before the end."""
    folder = tmp_path_factory.mktemp("complete")
    kept = {}
    finish = RecordStore.finish

    def keeping(store, *words):
        kept["part"] = (folder / UNFINISHED).read_bytes()
        finish(store, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordStore, "finish", keeping)
        patch.setattr("draftsmith.eval.cost.measure_forward", lambda *_: {1: 1.0, 2: 1.01, 8: 1.05})
        patch.setattr("draftsmith.eval.cost.measure_drafting", lambda *_: {1: 0.01, 2: 0.02})
        measure(target, folder)
    return folder, kept["part"]


def test_what_is_read_is_what_was_measured(target, complete):
    folder, part = complete
    assert sorted(path.name for path in folder.iterdir()) == [RECORDS]
    kinds = [line.get("kind") for line in lines(folder)]
    assert kinds[0] == "header" and kinds.count("positions") == 2 * 6 and kinds.count("request") == 2 * 2 and "commit" not in kinds
    records = record_store.read(folder)
    report = report_of(records)
    assert set(report.overall) == {"0", "0.7 top_k=5"} == {label(each) for each in SAMPLINGS}
    assert all("".join(records.text(request.tokens)) == target.tokenizer.decode(request.tokens) for request in records.requests)
    for each in records.positions:
        assert each.tokens.shape == each.entropy.shape == each.target_log_probs.shape and each.ranks.shape == each.drafted.shape
        assert ((each.ranks[:, 0] == 0) == (each.drafted[:, 0] == each.tokens)).all() and (each.entropy >= 0).all()
    assert as_json(report_of(record_store.read(folder))) == as_json(report)


def test_labels_tell_settings_apart():
    assert label(Sampling(0.7, top_k=5, top_p=0.9, rule=USUAL_RULE)) == "0.7 top_k=5 top_p=0.9"
    labels = [label(Sampling(1.0, seed=seed, rule=USUAL_RULE)) for seed in (1234567, 1234568)]
    assert labels == ["1 seed=1234567", "1 seed=1234568"]


def test_it_continues_wherever_it_was_cut(target, complete, tmp_path, monkeypatch):
    """At each commit, in the middle of a line, and in the middle of lines that belong together."""
    folder, part = complete
    ends = [i + 1 for i in range(len(part)) if part[i : i + 1] == b"\n"]
    cuts = {*ends[:: max(1, len(ends) // 6)], *(end - 9 for end in ends[3 :: max(1, len(ends) // 5)]), 10, len(part)}
    assert len(cuts) >= 10
    measured = []
    monkeypatch.setattr("draftsmith.eval.cost.measure_forward", lambda *_: measured.append(1) or {1: 1.0, 2: 1.01, 8: 1.05})
    monkeypatch.setattr("draftsmith.eval.cost.measure_drafting", lambda *_: {1: 0.01, 2: 0.02})
    for cut in sorted(cuts):
        again = tmp_path / str(cut)
        again.mkdir()
        (again / UNFINISHED).write_bytes(part[:cut])
        measure(target, again)
        assert lines(again) == lines(folder), cut
        assert sorted(path.name for path in again.iterdir()) == [RECORDS]
        shutil.rmtree(again)
    assert len(measured) < len(cuts), "what was recorded is not measured again"


def test_a_process_that_ends_leaves_all_that_it_recorded(target, tmp_path, monkeypatch):
    append, count = RecordStore.append, 0

    def ending(store, *words):
        nonlocal count
        append(store, *words)
        count += 1
        if count == 6:
            raise Stop

    monkeypatch.setattr(RecordStore, "append", ending)
    with pytest.raises(Stop):
        measure(target, tmp_path)
    assert (tmp_path / UNFINISHED).read_text().count("commit") == 7  # the header's too
    with pytest.raises(ValueError, match="its evaluation is unfinished: give its command again"):
        record_store.read(tmp_path)
    with pytest.raises(ValueError, match=r"stopped there with another max_new_tokens \(8, now 9\); give its options again"):
        measure(target, tmp_path, settings=replace(SETTINGS, max_new_tokens=9))
    with pytest.raises(ValueError, match="stopped there with another method"):
        measure(target, tmp_path, Ngram(), replace(SETTINGS, choose=""))
    monkeypatch.setattr(RecordStore, "append", append)
    assert record_store.begun_dtype(tmp_path) == "float32" and record_store.begun_dtype(tmp_path / "none") is None
    with (tmp_path / UNFINISHED).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another evaluation is writing it"):
            measure(target, tmp_path)
    with monkeypatch.context() as network:  # a file system without locks
        network.setattr(fcntl, "flock", no_locks)
        measure(target, tmp_path)
    assert len(record_store.read(tmp_path).requests) == 4 and record_store.begun_dtype(tmp_path) is None


def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_probe_that_was_stopped_is_measured_by_the_next_run(target, tmp_path, monkeypatch):
    """The cost of a round is recorded before it, and stays."""
    settings, forwards = replace(SETTINGS, probe_s=1.0), []
    real = evaluation.cost.measure_forward
    monkeypatch.setattr(evaluation.cost, "measure_forward", lambda *words: forwards.append(1) or real(*words))
    monkeypatch.setattr(evaluation, "_load", lambda *words: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        measure(target, tmp_path, settings=settings)
    monkeypatch.setattr(evaluation, "_load", lambda *words: load_record())
    records = measure(target, tmp_path, settings=settings)
    assert records.load == load_record() and len(forwards) == 1


def test_no_prompt_is_recorded_twice_by_another_number_of_processes(target, tmp_path, monkeypatch):
    """The first of two processes is stopped; one process goes on."""
    finish = RecordStore.finish

    def ending(*_):
        raise Stop

    with monkeypatch.context() as first:
        first.setattr(ranks, "share", lambda items: items[::2])
        first.setattr(RecordStore, "finish", ending)
        with pytest.raises(Stop):
            measure(target, tmp_path)
    assert RecordStore.finish is finish
    measure(target, tmp_path)
    records = record_store.read(tmp_path)
    asked = [each.prompt for each in records.requests if each.setting == "0"]
    drafted = [each.prompt for each in records.positions if each.setting == "0"]
    assert sorted(asked) == sorted(set(asked)) and sorted(drafted) == [prompt.id for prompt in PROMPTS]


def test_requests_that_were_timed_together_stay_together(target, tmp_path, monkeypatch):
    """Batches of two, of prompts whose domains alternate."""
    monkeypatch.setattr(decoding, "PROMPTS_PER_SLOT", 1)
    prompts = [Prompt(f"{domain}{n}", domain, f"{domain} {n} and") for n in range(4) for domain in "ab"]
    settings = replace(SETTINGS, samplings=SAMPLINGS[:1], choose="", slots=2, timed=2)
    measured = evaluate_drafter(target, Ngram(), prompts, settings, RecordStore(tmp_path))

    def together(records):
        return [[each.prompt for each in batch] for batch in timed_batches(records.requests)]

    assert together(record_store.read(tmp_path)) == together(measured) == [["a0", "a2"], ["b0", "b2"]]


@pytest.mark.parametrize("kept", [1, 5])
def test_a_drafter_that_remembers_knows_after_a_stop_what_it_knew_before(target, tmp_path, monkeypatch, kept):
    prompts = [Prompt(f"{n}", "a", "to be or not to be") for n in range(6)]
    settings = replace(SETTINGS, samplings=SAMPLINGS[:1], choose="", timed=2)

    def rounds(folder):
        folder.mkdir(exist_ok=True)
        evaluate_drafter(target, Suffix(memory=1000), prompts, settings, RecordStore(folder))
        return {each.prompt: [each.committed for each in each.rounds] for each in record_store.read(folder).requests}

    complete = rounds(tmp_path / "complete")
    assert complete["0"] != complete["5"], "it remembers"
    append, count = RecordStore.append_requests, 0

    def ending(store, requests, *words):
        nonlocal count
        append(store, requests, *words)
        count += len(requests)
        if count >= kept:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(RecordStore, "append_requests", ending)
        with pytest.raises(Stop):
            rounds(tmp_path / "stopped")
    assert rounds(tmp_path / "stopped") == complete


@pytest.mark.parametrize(("more", "slots"), [({}, decoding.UNTIMED_SLOTS), ({"adaptive_depth": True}, 2)])
def test_where_drafts_depend_on_the_batch_all_prompts_run_as_those_that_are_timed(target, tmp_path, monkeypatch, more, slots):
    widths, decode = [], decoding._decode_untimed
    monkeypatch.setattr(decoding, "_decode_untimed", lambda *words: widths.append(words[5]) or decode(*words))
    settings = replace(SETTINGS, samplings=SAMPLINGS[:1], choose="", slots=2, **more)
    evaluate_drafter(target, Ngram(), PROMPTS, settings, RecordStore(tmp_path))
    assert widths == [slots]


def test_an_old_evaluation_stays_until_the_new_one_is_complete(target, complete, tmp_path, monkeypatch):
    shutil.copy(complete[0] / RECORDS, tmp_path)
    before = (tmp_path / RECORDS).read_bytes()

    def ending(*_):
        raise Stop

    monkeypatch.setattr("draftsmith.eval.evaluation.decode", ending)
    with pytest.raises(Stop):
        measure(target, tmp_path)
    assert (tmp_path / RECORDS).read_bytes() == before


def test_a_request_survives_its_line():
    divergence = Divergence("p", 3, 5, 6, math.inf, 0.0)
    rounds = [Round(4, 8, 3, 0.1, 0.2, 0.3), Round(7, 8, 1)]
    record = RequestRecord(
        "p", "d", "de", "0", 2, 5, [1, 2], "stop", rounds, 2, True, divergence, None, {"plain": 1.5}, {"plain": 2}, 1, 0.5, 2, 0.25
    )
    line = json.loads(json.dumps(request_line(record), allow_nan=False))
    assert request_of(line, "here") == record and record.divergence.verdict == "bug" and record.checked_tokens == 4
    for damage, says in (
        ({"rounds": 3}, "`rounds` should be a list"),
        ({"rounds": [[1]]}, "not a request"),
        ({"divergence": {"a": 1}}, "not a request"),
    ):
        with pytest.raises(ValueError, match=f"here: {says}"):
            request_of(line | damage, "here")


def test_a_header_that_lacks_what_reports_need_is_refused(complete, tmp_path):
    content = (complete[0] / RECORDS).read_bytes()
    for part, name in (("drafter", "method"), ("settings", "slots"), ("target", "name")):
        first, rest = content.split(b"\n", 1)
        header = json.loads(first)
        del header[part][name]
        (tmp_path / RECORDS).write_bytes(json.dumps(header).encode() + b"\n" + rest)
        with pytest.raises(ValueError, match=f"records.jsonl:1: `{part}`: `{name}` should be"):
            record_store.read(tmp_path)


def test_lines_of_somebody_else_are_refused(complete, tmp_path):
    good = (complete[0] / RECORDS).read_text().splitlines(keepends=True)
    for content, says in (
        (["\n"], ":1: not JSON"),
        ([good[0].replace('"format": 1', '"format": 2')], "format 2, this Draftsmith reads 1"),
        ([good[0], '{"kind": "other"}\n'], ":2: not a line that draftsmith eval wrote"),
        ([good[0], good[0]], ":2: not a line"),
        ([*good[:-1], good[-1][:40]], f":{len(good)}"),
        (good[:-1], f"has {len(good) - 1} of {len(good)} lines; it is cut off"),
        (
            [re.sub('"lines": [0-9]+', f'"lines": {len(good) - 1}', good[0]), *(line for line in good[1:] if '"kind": "tree"' not in line)],
            "no line of kind tree",
        ),
    ):
        (tmp_path / RECORDS).write_text("".join(content))
        with pytest.raises(ValueError, match=says):
            record_store.read(tmp_path)
