"""Production logs, sanity checks and references in a real evaluation of a tiny target."""

import json
from pathlib import Path

import pytest
from commands import failing
from conftest import save_byte_target

from draftsmith.data import prompts
from draftsmith.eval import acceptance, gate, record_store
from draftsmith.eval.answers import encode_prompts
from draftsmith.eval.report import report_of
from draftsmith.inference.errors import exit_on_error
from draftsmith.models.target import Target

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
ANSWER = "a logged answer of 32 characters"
ROWS = [
    {"id": "log", "domain": "logs", "messages": [{"role": "user", "content": "do"}, {"role": "assistant", "content": ANSWER}]},
    {"id": "text log", "domain": "logs", "prompt": "abc", "response": "def"},
    *({"id": f"own{n}", "domain": "own", "turns": [f"do {n} do"], "language": "en"} for n in range(3)),
    {"id": "twice", "domain": "own", "turns": ["[user] do"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat target over bytes, a draft model, prompts in two files, and two evaluations."""
    folder = tmp_path_factory.mktemp("logs")
    save_byte_target(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    for name, rows in (("a.jsonl", ROWS[:2]), ("b.jsonl", ROWS[2:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [word for name in ("a.jsonl", "b.jsonl") for word in ("--prompts", str(folder / name))]
    common = ["--target", str(folder / "target"), *both, "--max-new-tokens", "24", "--temperature", "0", "--timed", "1"]
    for name, more in (("target", ["--nodes", "4"]), ("suffix", [])):
        drafter = str(folder / "target") if name == "target" else name
        exit_on_error(acceptance.main, [drafter, *common, *more, "--out", str(folder / f"of {name}"), "--json"])
    return folder


def test_logged_answers_are_tokenized_after_their_prompts(folder):
    target = Target.load(str(folder / "target"))
    read = prompts.load([folder / "a.jsonl", folder / "b.jsonl"], distinct=True)
    log, text, own, *_ = encode_prompts(target, read, 24)[0]
    decoded = [target.tokenizer.decode(ids) for ids in (log.ids, log.continuation, text.ids, text.continuation)]
    assert decoded == ["[user] do\n[assistant] ", ANSWER, "abc", "def"] and own.continuation == ()


def test_positions_are_along_the_logs_answer(folder):
    records = record_store.read(folder / "of target")
    texts = {each.prompt: "".join(records.text(each.tokens.tolist())) for each in records.positions}
    assert len(texts) == 6 and texts["log"] == ANSWER[:24] and texts["text log"] == "def"
    plain = {each.prompt: each.tokens for each in records.requests}
    own = {
        each.prompt: each.tokens.tolist() for each in records.positions if each.prompt in plain and not records.prompts[each.prompt].logged
    }
    assert own and all(tokens == plain[name] for name, tokens in own.items())
    assert {name for name, prompt in records.prompts.items() if prompt.logged} == {"log", "text log"}
    assert {name: prompt.templated for name, prompt in records.prompts.items() if prompt.templated} == {"twice": "[user]"}
    assert {each.language for each in records.requests if each.domain == "own"} == {"en", ""} - ({""} if "twice" not in plain else set())


def test_the_report_says_so_and_shows_what_is_beside(folder, capsys):
    suffix = record_store.read(folder / "of suffix")
    report = report_of(record_store.read(folder / "of target"), {"of suffix": suffix})
    beside, replayed = (next(row for row in report.references if row.name == name) for name in ("of suffix", "suffix"))
    assert beside.prompts == replayed.prompts and beside.tau == replayed.tau and beside.kind == "beside"  # real decoding and its replay
    assert any("2 prompts come with a log's answer" in warning for warning in report.warnings)
    assert any("'[user]' in their words" in warning and "(twice)" in warning for warning in report.warnings)
    exit_on_error(
        acceptance.main, ["--from", str(folder / "of target"), "--beside", str(folder / "of suffix"), "--out", str(folder / "again")]
    )
    printed = capsys.readouterr().out
    assert "Ceilings and baselines" in printed and "perfect drafter" in printed and "of suffix" in printed and "a log's answer" in printed
    assert json.loads((folder / "again" / "acceptance.json").read_text())["references"][-1]["name"] == "of suffix"
    assert "no records.jsonl in" in failing(capsys, acceptance.main, ["--from", folder / "of target", "--beside", folder / "target"])
    other = folder / "other"
    other.mkdir()
    lines = (folder / "of suffix" / "records.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    header["settings"]["max_new_tokens"] = 99
    (other / "records.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    line = failing(capsys, acceptance.main, ["--from", folder / "of target", "--beside", other])
    assert "--beside: max_new_tokens is 24" in line and "99" in line


def test_the_gate_of_a_real_evaluation(folder, tmp_path, capsys):
    """Six prompts are too few, whatever the bound."""
    assert Path(folder / "of suffix" / "records.jsonl").is_file()
    for words in (["--min-tau", "0.1"], ["--min-speedup", "0.1"], ["--domain", "logs=0.1"]):
        with pytest.raises(SystemExit) as exit:
            exit_on_error(gate.main, [str(folder / "of suffix"), *words])
        assert exit.value.code == 2 and "too few for an interval" in capsys.readouterr().out
