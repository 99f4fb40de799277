"""Evaluation of chat models: later turns, prompts that are too long, a timed sample, prompts that ship, comparison of measurements."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import failing
from conftest import save_byte_target
from hand_records import by_chance

from draftsmith.data import prompts
from draftsmith.eval import acceptance, card, compare, decoding, loading, lossless, record_store, speed, table
from draftsmith.eval.answers import EncodedPrompt, encode_prompts
from draftsmith.eval.evaluation import _halves, evaluate_drafter
from draftsmith.eval.intervals import of_difference
from draftsmith.eval.records import RequestRecord
from draftsmith.eval.report import report_of
from draftsmith.eval.settings import Settings
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.prefix_cache import PrefixCache
from draftsmith.inference.sampler import Sampling
from draftsmith.models.target import Target

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "eval" / "spec_tasks.jsonl.gz"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
NEW = 10
ROWS = [
    {"id": "two", "category": "chat", "turns": ["abab", "cdcd", "efef"]},
    {"id": "long", "category": "chat", "turns": ["x" * 200, "never asked"]},
    {"id": "history", "category": "chat", "turns": ["abc", "y" * 110]},
    *({"id": f"code{n}", "category": "code", "turns": [f"do {n} do {n}"], "completion_prompt": f"def f{n}"} for n in range(4)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_byte_target(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return Target.load(str(folder / "target"))


def test_turns_are_prompts_of_their_own(folder, tmp_path):
    two, long, *_ = read = prompts.load(folder / "prompts.jsonl", distinct=True)
    assert [turn.id for turn in (two, *two.later)] == ["two", "two#2", "two#3"] and len(long.later) == 1
    assert two.later[1].messages == ({"role": "user", "content": "efef"},) and read[-1].completion == "def f3"
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "turns": ["x", "y"]}\n{"id": "b", "prompt": "x"}\n{"id": "a#2", "prompt": "z"}\n')
    with pytest.raises(ValueError, match="p.jsonl:3: `id` 'a#2' is that of line 1 too"):
        prompts.load(file, distinct=True)


def test_a_later_turn_is_asked_after_the_targets_own_answers(folder, target):
    encoded, skipped = encode_prompts(target, prompts.load(folder / "prompts.jsonl"), NEW)
    assert [(item.prompt.id, item.index, item.turn) for item in encoded] == [
        ("two", 0, 1),
        ("two#2", 1, 2),
        ("two#3", 2, 3),
        ("history", 5, 1),
        *((f"code{n}", 7 + n, 1) for n in range(4)),
    ]
    assert skipped == {"chat": 3}, "the long one with its later turn, and the later turn that is too long with its history"
    messages = []
    for item, text in zip(encoded[:3], ("abab", "cdcd", "efef"), strict=True):
        messages.append({"role": "user", "content": text})
        ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert item.ids == ids
        (answer,) = Decoder(target).generate([ids], Sampling(), NEW)
        words = [token for token in answer.tokens if token not in target.stop_ids]
        messages.append({"role": "assistant", "content": target.tokenizer.decode(words)})
    assert {item.conversation for item in encoded[:3]} == {0}


def test_later_turns_find_the_kv_of_earlier_ones(folder, target, monkeypatch):
    reused, take = [], PrefixCache.take
    monkeypatch.setattr(PrefixCache, "take", lambda *given: reused.append(take(*given)[1]) or (0, reused[-1]))
    read = [prompt for prompt in prompts.load(folder / "prompts.jsonl") if prompt.id == "two"]
    encoded, _ = encode_prompts(target, read, NEW)
    # The third turn needs an answer to the second, whose prompt begins with the first and the answer to it. Both fit one decoder's context.
    assert len(reused) == 2 and reused[0] == 0
    assert len(encoded[0].ids) < reused[1] <= len(encoded[1].ids) - 2


def test_a_target_without_a_template_continues_completions(folder, target, monkeypatch):
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    encoded, _ = encode_prompts(target, prompts.load(folder / "prompts.jsonl"), NEW)
    texts = {item.prompt.id: target.tokenizer.decode(item.ids) for item in encoded}
    assert texts["code2"] == "def f2" and texts["two"] == "abab"
    assert texts["two#2"].startswith("abab\n\n") and texts["two#2"].endswith("\n\ncdcd") and texts["two#3"].startswith(texts["two#2"])


def test_nothing_left_is_an_error_and_halves_keep_conversations_together(target):
    with pytest.raises(ValueError, match=r"'a' has 200 tokens; .* context of 128 \(none of 2 prompts does\)"):
        encode_prompts(target, [prompts.Prompt(name, "d", "x" * 200) for name in "ab"], NEW)
    turns = [EncodedPrompt(prompts.Prompt(f"{c}#{t}", "d", ""), [1], 2 * c + t - 1, t) for c in range(4) for t in (1, 2)]
    choosing, reported = _halves(turns)
    assert [item.prompt.id for item in choosing] == ["0#1", "0#2", "2#1", "2#2"] and len(reported) == 4


GREEDY = Sampling(rule="target-sample")


def measure(target, folder, **changes):
    settings = Settings(NEW, [GREEDY, Sampling(temperature=1.0, rule="target-sample")], 8, choose="")
    records = evaluate_drafter(target, Ngram(), prompts.load(folder / "prompts.jsonl"), replace(settings, **changes))
    return report_of(records), records.requests


def test_untimed_prompts_have_the_rounds_of_timed_ones(target, folder, capsys):
    report, requests = measure(target, folder)
    sample, sampled = measure(target, folder, timed=1)

    def rounds(requests):
        return {(each.setting, each.prompt): [(r.position, r.nodes, r.committed) for r in each.rounds] for each in requests}

    assert rounds(requests) == rounds(sampled) and len(requests) == len(sampled) == 16
    assert report.overall == sample.overall and report.domains == sample.domains and report.distinct == sample.distinct
    assert sample.answers == report.answers == 16 and not sample.divergences
    assert (report.compared, sample.compared, sample.like_transformers) == (8, 2, 2)
    assert {each.prompt for each in sampled if each.timed} == {"two", "code0"} and all(each.timed for each in requests)
    assert {domain: row["timed"] for domain, row in sample.speedups.items()} == {"chat": 1, "code": 1} and sample.speed["timed"] == 2
    assert report.speedups["code"]["timed"] == 4
    assert report.speed["speedup_low"] is None and sample.speed["speedup_low"] is None  # of six conversations, and of two
    assert sample.skipped == {"chat": 3}
    table.print_report(sample)
    printed = capsys.readouterr().out
    assert "skipped, since prompt and answer exceed the target's 128 positions: chat 3" in printed and "(2 timed prompts)" in printed
    assert table.speed_markdown(sample).count("\n") == 4 and "| chat | 1 |" in card.measured(sample, "")


def test_a_wrong_untimed_answer_is_a_bug(target, folder, monkeypatch):
    plain_decode = lossless.decode_recorded

    def wrong(target, drafter, ids, requests, *more, **options):
        answers = plain_decode(target, drafter, ids, requests, *more, **options)
        for answer, request in zip(answers, requests, strict=True):
            if drafter is not None and request == 8:
                answer.tokens[4] = (answer.tokens[4] + 1) % 256
        return answers

    monkeypatch.setattr(lossless, "decode_recorded", wrong)
    report, _ = measure(target, folder, timed=1, samplings=[GREEDY])
    assert [(each.prompt, each.index, each.verdict) for each in report.divergences] == [("code1", 4, "bug")]


def test_what_depends_on_its_batch_is_decoded_alone(target, folder, monkeypatch):
    seen = []
    original = lossless.decode_recorded
    monkeypatch.setattr(lossless, "decode_recorded", lambda *a, **options: seen.append(options["slots"]) or original(*a, **options))
    for changes in ({}, {"adaptive_depth": True}, {"exact": 17}):
        measure(target, folder, timed=1, samplings=[GREEDY], **changes)
    assert Counter(seen) == {decoding.UNTIMED_SLOTS: 2, 1: 2 * 2 * 2}  # plain and drafted; six prompts are two batches of four


def test_speedups_are_of_seconds_per_token():
    requests = [
        RequestRecord(
            str(number),
            domain,
            "",
            "0",
            1,
            3,
            [],
            "length",
            [],
            4,
            True,
            batch=1,
            seconds=seconds,
            batch_tokens={"plain": 4, "drafted": 8, "transformers": 4},
        )
        for number, (domain, *times) in enumerate((("a", 4.0, 2.0, 8.0), ("b", 3.0, 3.0, 3.0), ("a", 2.0, 2.0, 4.0)))
        for seconds in (dict(zip(("plain", "drafted", "transformers"), times, strict=True)),)
    ]
    of_a = speed.speedups([request for request in requests if request.domain == "a"])
    keys = ("timed", "speedup", "speedup_over_transformers", "plain_over_transformers")
    assert [of_a[key] for key in keys] == pytest.approx([2, 3.0, 6.0, 2.0])
    assert of_a["speedup_low"] is None and of_a["speedup_high"] is None
    assert speed.speedups(requests)["speedup"] == pytest.approx(2 * 9 / 7)


@pytest.mark.slow
def test_measurements_are_compared_by_prompt_and_domain(folder, capsys):
    common = [
        "--target",
        str(folder / "target"),
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--max-new-tokens",
        "40",
        "--temperature",
        "0",
    ]
    folders = [str(folder / name) for name in ("ngram", "suffix")]
    for name in folders:
        exit_on_error(acceptance.main, [Path(name).name, *common, "--timed", "1", "--out", name])
    capsys.readouterr()
    exit_on_error(compare.main, ["--measured", *folders, "--json"])
    measured = json.loads(capsys.readouterr().out)
    exit_on_error(compare.main, ["ngram", "suffix", *common, "--json"])
    decoded = json.loads(capsys.readouterr().out)
    assert measured["rows"] == decoded["rows"] and measured["domains"] == decoded["domains"] and decoded["settings"]["skipped"]
    assert [row["domain"] for row in decoded["domains"]] == ["chat"] * 2 + ["code"] * 2
    counts = []
    for name in folders:
        requests = [each for each in record_store.read(Path(name)).requests if each.domain == "code"]
        counts.append({each.prompt: len(each.rounds) for each in requests})
        tokens = {each.prompt: len(each.tokens) for each in requests}
    names = sorted(counts[0])
    rounds = torch.tensor([[count[name] for name in names] for count in counts])
    expected = of_difference(torch.tensor([tokens[name] for name in names]).expand(2, -1), rounds)
    assert [decoded["domains"][3][key] for key in ("delta", "delta_low", "delta_high")] == pytest.approx(expected) and expected[0] != 0
    exit_on_error(compare.main, ["--measured", *folders])
    printed = capsys.readouterr().out
    assert (
        printed.count("code") == 3
        and "suffix: up to 32 nodes a round, 16 deep; no training" in printed
        and "answers are the same" not in printed
    )
    sampled = [str(folder / f"{name}-sampled") for name in ("ngram", "suffix")]
    for name in sampled:
        words = (*common[:-1], "1", "--limit", "2", "--probe", "0", "--out", name)
        exit_on_error(acceptance.main, [Path(name).name.removesuffix("-sampled"), *words])
    capsys.readouterr()
    exit_on_error(compare.main, ["--measured", *sampled])
    assert "new tokens, measured" in capsys.readouterr().out
    for words, says in (
        ([folders[0], str(folder / "target")], "no records.jsonl in"),
        ([folders[0], folders[0]], "got a folder twice"),
        ([folders[0], folders[0] + "/"], "got a folder twice"),
        ([*folders, "--limit", "2"], "got --limit"),
    ):
        assert says in failing(capsys, compare.main, ["--measured", *words])


def test_folders_that_have_nothing_in_common_are_named(tmp_path, capsys):
    first, second = by_chance(prompts=12, tokens=8), by_chance(prompts=12, tokens=8)
    second.requests = [replace(each, prompt=f"other {each.prompt}") for each in second.requests]
    with pytest.raises(ValueError, match="--beside x: no prompt and setting is in both"):
        acceptance._checked_beside("own", first, {"x": ("x", second)})
    second.header["target"] |= {"config_hash": "another"}
    with pytest.raises(ValueError, match="--beside: 'own' and 'x': the target differs in its config .*expected evaluations of one target"):
        acceptance._checked_beside("own", first, {"x": ("x", second)})


def test_without_prompts_a_chat_model_is_asked_by_task_and_another_continues_source(folder, monkeypatch):
    def domains(template):
        model, seen = Target.load(str(folder / "target")), []
        model.tokenizer.chat_template = template
        monkeypatch.setattr(loading, "open_named", lambda *_: (model, dict.fromkeys(["suffix", "ngram"], Ngram())))
        monkeypatch.setattr("draftsmith.eval.answers.encode_prompts", lambda _, asked, __: seen.extend(asked) or ([], {}))
        monkeypatch.setattr("draftsmith.eval.comparison.compare_drafters", lambda *_: {})
        monkeypatch.setattr(compare, "_print", lambda *_: None)
        compare.main(["suffix", "ngram", "--limit", "1"])
        return [prompt.domain for prompt in seen]

    assert domains(TEMPLATE) == [prompt.domain for prompt in prompts.load("chat", 1)]
    assert domains(None) == [prompt.domain for prompt in prompts.load(prompts.TINY, 1)]
    with pytest.raises(ValueError, match="nowhere.jsonl' not found"):
        compare.main(["suffix", "ngram", "--prompts", "nowhere.jsonl"])


def test_the_shipped_chat_prompts():
    rows = [json.loads(line) for line in prompts.CHAT.read_text(encoding="utf-8").splitlines()]
    assert all(row.keys() == {"id", "domain", "turns", "source", "license"} and row["source"] and row["license"] for row in rows)
    assert all(len(text) < 1500 for row in rows for text in row["turns"])
    shipped = prompts.load("chat", distinct=True)
    tasks = ["multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag", "code"]
    assert Counter(prompt.domain for prompt in shipped) == dict.fromkeys(tasks, 6)
    assert {len(prompt.later) for prompt in shipped if prompt.domain == "multi_turn"} == {1}
    about = (prompts.CHAT.parent / "DATA.md").read_text(encoding="utf-8")
    for row in rows:
        assert row["source"].split()[0] in about and row["license"] in about, row["id"]


@pytest.mark.skipif(not SHARED.exists(), reason="the 644 prompts are not here")
def test_the_644_prompts_are_read_and_none_of_them_ships():
    public = prompts.load(SHARED, distinct=True)
    assert len(public) == 644 and sum(len(prompt.later) for prompt in public) == 80
    assert all(prompt.completion for prompt in public if prompt.domain == "code")
    theirs = {turn.text for prompt in public for turn in (prompt, *prompt.later)}
    assert not theirs & {turn.text for prompt in prompts.load("chat") for turn in (prompt, *prompt.later)}
