"""Prompts of several files, tables, the Hub and logs."""

import json

import pytest

from draftsmith.data import cut_prompts
from draftsmith.data.prompts import load

QUESTION = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "because"}


def saved(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_several_files_of_several_kinds(tmp_path):
    first = saved(tmp_path / "a.jsonl", [{"prompt": "x", "domain": "d"}, {"prompt": "y", "domain": "d", "language": "de"}])
    second = as_parquet(
        tmp_path / "b.parquet", [{"turns": ["u", "v"], "id": "7", "prompt": None}, {"turns": None, "id": None, "prompt": "z"}]
    )
    read = load([first, second], distinct=True)
    assert [(each.id, each.domain, each.text, each.language) for each in read] == [
        ("a.jsonl:1", "d", "x", ""),
        ("a.jsonl:2", "d", "y", "de"),
        ("7", "no domain", "u", ""),
        ("b.parquet:2", "no domain", "z", ""),
    ]
    assert [turn.text for turn in read[2].later] == ["v"]
    assert [each.id for each in load([first])] == [each.id for each in load(first)] == ["1", "2"]  # as with one file ever since
    assert [each.text for each in load([first, second], limit=1)] == ["x", "u"]
    assert len(load([first, "chat"], distinct=True)) == 2 + len(load("chat"))


def test_an_id_of_two_files_is_refused_with_both_of_them(tmp_path):
    rows = [{"prompt": "x"}, {"prompt": "y", "id": "same"}]
    first, second = saved(tmp_path / "a.jsonl", rows), as_parquet(tmp_path / "b.parquet", [{"prompt": "z", "id": "same"}])
    with pytest.raises(ValueError, match=r"b.parquet:1: `id` 'same' is that of .*a.jsonl:2 too; give each prompt its own"):
        load([first, second], distinct=True)
    assert len(load([first, second])) == 3
    with pytest.raises(ValueError, match="a.jsonl' twice"):
        load([first, first])
    empty = saved(tmp_path / "empty.jsonl", [])
    with pytest.raises(ValueError, match="empty.jsonl: no prompts in it"):
        load([first, empty])


def test_a_damaged_table_is_refused(tmp_path):
    file = as_parquet(tmp_path / "a.parquet", [{"prompt": "x" * 100}])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="a.parquet: not a complete .parquet file"):
        load(file)
    with pytest.raises(ValueError, match=r"b.parquet:1: expected `prompt`, `turns` or `messages`, got keys \['question'\]"):
        load(as_parquet(tmp_path / "b.parquet", [{"question": "x"}]))


@pytest.mark.parametrize(
    ("row", "text", "messages", "continuation"),
    [
        ({"messages": [QUESTION, ANSWER]}, "why?", (QUESTION,), "because"),
        ({"messages": [QUESTION, ANSWER, QUESTION]}, "why?", (QUESTION, ANSWER, QUESTION), ""),
        ({"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}, "why?", (QUESTION, ANSWER, QUESTION), "because"),
        ({"prompt": "why?", "response": "because"}, "why?", (), "because"),
        ({"prompt": "why?", "response": None}, "why?", (), ""),
    ],
)
def test_the_answer_of_a_log_is_no_part_of_the_prompt(tmp_path, row, text, messages, continuation):
    (prompt,) = load(saved(tmp_path / "logs.jsonl", [row]))
    assert (prompt.text, prompt.messages, prompt.continuation, prompt.later) == (text, messages, continuation, ())


def test_logs_that_are_none(tmp_path):
    for row, says in (
        ({"messages": [ANSWER]}, "logs.jsonl:1: `messages` is an answer alone"),
        ({"prompt": "x", "response": 5}, "logs.jsonl:1: `response` should be text"),
        ({"prompt": "x", "language": ["de"]}, "logs.jsonl:1: `language` should be text"),
    ):
        with pytest.raises(ValueError, match=says):
            load(saved(tmp_path / "logs.jsonl", [row]))


def test_a_hub_data_set_is_asked_for_by_name_alone(monkeypatch, tmp_path):
    import datasets

    requests = []

    def streamed(path, **options):
        requests.append((path, options))
        return iter([{"prompt": "x", "id": None}, {"prompt": "y", "id": "named"}])

    monkeypatch.setattr(datasets, "load_dataset", streamed)
    read = load(["hf:owner/set-1.5", saved(tmp_path / "a.jsonl", [{"prompt": "z"}])], distinct=True)
    assert [each.id for each in read] == ["set-1.5:1", "named", "a.jsonl:1"]
    assert [each.id for each in load("hf:owner/set:test")] == ["1", "named"]
    assert [(path, options["split"]) for path, options in requests] == [("owner/set-1.5", "train"), ("owner/set", "test")]
    for name in ("hf:", "hf:set", "hf:a/b/c", "hf:a/b:", "hf:../b", "hf:a/b:c:d"):
        with pytest.raises(ValueError, match="expected hf:owner/name or hf:owner/name:split"):
            load(name)
    with pytest.raises(ValueError, match="prompt file 'owner/set' not found"):
        load("owner/set")
    assert len(requests) == 2


def test_offline_the_hub_is_refused_in_one_line(monkeypatch):
    import datasets

    def offline(path, **options):
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub\n(OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        ValueError, match=r"no split 'train' of a Hub data set .* \(Couldn't reach .*; check the names and the connection"
    ) as error:
        load("hf:owner/set")
    assert "\n" not in str(error.value)


def test_prompts_are_cut_a_third_into_each_construct(monkeypatch):
    body = "".join(f"    value_{n} = first + second * {n}\n" for n in range(12))
    source = f"def compute(first, second):\n{body}    return value_0\n\n\ndef short():\n    return 1\n"
    monkeypatch.setattr(cut_prompts.stdlib, "modules", lambda split: [("m.py", source)])
    (prompt,) = cut_prompts.cut()
    assert (prompt.id, prompt.domain) == ("m.py:6", "functions")
    assert prompt.text == "".join(source.splitlines(keepends=True)[:6])
