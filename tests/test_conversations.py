"""Examples from files and the Hub: all their keys, every kind of file, and the errors for broken ones."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.data import conversations, stdlib
from draftsmith.data.conversations import SEPARATOR, Conversation, Source, fingerprint, read

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
QUESTION, ANSWER = {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"}
CHAT = [QUESTION, ANSWER]


def examples_of(path, **fields) -> list[Conversation]:
    return list(read(Source(path=str(path), **fields)))


def example_of(tmp_path, row) -> Conversation:
    """The only example of a .jsonl file with this row."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (example,) = examples_of(file)
    return example


@pytest.fixture
def no_hub(monkeypatch):
    """Any request to the Hub fails the test."""
    import datasets
    import huggingface_hub

    def refuse(*args, **kwargs):
        pytest.fail(f"asked the Hub for {args}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)


SHARE = [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"}]
ALPACA = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
KEYS = {
    "messages": ({"messages": CHAT}, CHAT, "", 0),
    "sharegpt": ({"conversations": SHARE}, CHAT, "", 0),
    "sharegpt-roles": ({"conversations": CHAT}, CHAT, "", 0),
    "lmsys": ({"conversation": CHAT}, CHAT, "", 0),
    "sharegpt-system": ({"conversations": SHARE, "system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *CHAT], "", 0),
    "sharegpt-no-system": ({"conversations": SHARE, "system": ""}, CHAT, "", 0),
    "turns": ({"turns": ["Two?", "Three?"]}, [QUESTION, {"role": "user", "content": "Three?"}], "", 0),
    "completion": ({"prompt": "Two?", "completion": "2"}, CHAT, "Two?2", 4),
    "response": ({"prompt": "Two?", "response": "2"}, CHAT, "Two?2", 4),
    "completion-messages": ({"prompt": [QUESTION], "completion": [ANSWER]}, CHAT, "", 0),
    "completion-mixed": ({"prompt": [QUESTION], "completion": "2"}, CHAT, "", 0),
    "prompt": ({"prompt": "Two?"}, [QUESTION], "Two?", 4),
    "prompt-messages": ({"prompt": [QUESTION]}, [QUESTION], "", 0),
    "unanswered": ({"prompt": "Two?", "completion": None}, [QUESTION], "Two?", 4),
    "alpaca": (
        ALPACA,
        [{"role": "user", "content": "Add.\n\n1 and 1"}, ANSWER],
        "Add.\n\n1 and 1\n\n2",
        len("Add.\n\n1 and 1\n\n"),
    ),
    "alpaca-no-input": ({**ALPACA, "input": "", "instruction": "Two?"}, CHAT, "Two?\n\n2", 6),
    "alpaca-with-text": ({**ALPACA, "input": "", "instruction": "Two?", "text": "Below is"}, CHAT, "Two?\n\n2", 6),
    "dolly": ({"instruction": "Two?", "context": "", "response": "2"}, CHAT, "Two?\n\n2", 6),
    "text": ({"text": "A tale."}, None, "A tale.", 0),
    "text-beside-its-prompt": ({"prompt": "Tell one.", "text": "A tale."}, None, "A tale.", 0),
    "ultrachat": ({"prompt": "Two?", "messages": CHAT}, CHAT, "", 0),
    "empty": ({"conversations": []}, [], "", 0),
    "text-parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Two?"}]}, ANSWER]}, CHAT, "", 0),
}


@pytest.mark.parametrize("name", KEYS)
def test_all_keys_of_examples(name, tmp_path):
    row, messages, text, prompt = KEYS[name]
    assert example_of(tmp_path, row) == Conversation("rows.jsonl:1", "all", messages, None, text, prompt)


@pytest.mark.parametrize(
    ("speaker", "role"),
    [("Human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"), ("chatgpt", "assistant"), ("bard", "assistant")]
    + [("bing", "assistant"), ("function_call", "assistant"), ("system", "system"), ("tool", "tool"), ("function", "tool")]
    + [("observation", "tool")],
)
def test_speakers_become_roles_and_other_keys_stay(speaker, role, tmp_path):
    row = {"conversations": [{"from": speaker, "value": "x", "weight": 0.5}]}
    assert example_of(tmp_path, row).messages == [{"role": role, "content": "x", "weight": 0.5}]
    row = {"messages": [{"role": speaker.title(), "content": "x"}]}
    assert example_of(tmp_path, row).messages == [{"role": role, "content": "x"}]


def test_keys_of_a_message_are_kept_but_null_ones(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    row = {
        "messages": [
            {**QUESTION, "name": "ann", "tool_calls": None},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call], "finish_reason": "tool_calls"},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    example = example_of(tmp_path, row)
    assert example.messages == [{**QUESTION, "name": "ann"}, {**row["messages"][1], "content": ""}]
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}, "a null the caller wrote is an argument"
    assert example.tools == row["tools"] == example_of(tmp_path, {**row, "tools": json.dumps(row["tools"])}).tools
    assert example_of(tmp_path, {**row, "tools": ""}).tools is None and example_of(tmp_path, {**row, "tools": "[]"}).tools is None


def test_openais_older_calls_are_calls_of_tools(tmp_path):
    call = {"name": "add", "arguments": "{}"}
    older = [QUESTION, {"role": "assistant", "content": None, "function_call": call}, {"role": "function", "name": "add", "content": "3"}]
    newer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    assert example_of(tmp_path, {"messages": older}).messages == [QUESTION, newer, {"role": "tool", "name": "add", "content": "3"}]
    with pytest.raises(ValueError, match="has the function_call 'add', expected an object"):
        example_of(tmp_path, {"messages": [QUESTION, {"role": "assistant", "content": "", "function_call": "add"}]})


def test_ids_and_domains(tmp_path):
    for key in ("id", "uuid", "conversation_id", "prompt_id"):
        assert example_of(tmp_path, {key: 0, "text": "x"}).id == "0"
        assert example_of(tmp_path, {key: "", "text": "x"}).id == "rows.jsonl:1"
    assert example_of(tmp_path, {"uuid": "b", "id": "a", "text": "x"}).id == "a"
    assert example_of(tmp_path, {"text": "x", "category": "code"}).domain == "code"
    assert example_of(tmp_path, {"text": "x", "category": "code", "domain": "sql"}).domain == "sql"
    assert [example.domain for example in examples_of(tmp_path / "rows.jsonl", domain="mine")] == ["mine"]


REFUSED = {
    "not JSON": ('{"text": "a"', "not JSON (Expecting ',' delimiter"),
    "a number": ("3", "got 3, expected an object with `messages`"),
    "keys": ('{"question": "a", "answer": "b"}', "got keys ['answer', 'question'], expected `messages` [{role, content}], `conversations`"),
    "surrogate": (r'{"text": "a \ud83d b"}', r"'\ud83d' is half of a surrogate pair"),
    "text": ('{"text": 3}', "`text` is 3, expected a string"),
    "prompt": ('{"prompt": {"a": 1}}', "`prompt` is {'a': 1}, expected a string"),
    "completion": ('{"prompt": "a", "completion": 3}', "`completion` is 3, expected a string"),
    "output": ('{"instruction": "a", "output": ["b"]}', "`output` 1 is 'b', expected an object with `role` and `content`"),
    "turns": ('{"turns": ["a", {"role": "user"}]}', "`turns` is ['a', {'role': 'user'}], expected a list of the user's texts"),
    "messages": ('{"messages": "hello"}', "`messages` is 'hello', expected a list of messages"),
    "message": ('{"messages": [{"role": "user", "content": "a"}, "b"]}', "`messages` 2 is 'b', expected an object with `role`"),
    "no role": ('{"messages": [{"content": "a"}]}', "`messages` 1 has the role None, expected a string"),
    "content": ('{"messages": [{"role": "user", "content": 5}]}', "`messages` 1 has the content 5, expected a string"),
    "no content": ('{"messages": [{"role": "assistant"}]}', "`messages` 1 has the content None"),
    "image": (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        "has the content [{'type': 'image'}], expected a string or",
    ),
    "speaker": ('{"conversations": [{"from": "alien", "value": "a"}]}', "1 is from 'alien', expected one of human, user, gpt"),
    "value": ('{"conversations": [{"from": "human"}]}', "`conversations` 1 has the content None"),
    "tools": ('{"text": "a", "tools": {"name": "add"}}', "`tools` is {'name': 'add'}, expected a list of objects"),
    "tools text": ('{"text": "a", "tools": "add"}', "`tools`: not JSON"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_example_that_is_refused_is_named(kind, tmp_path):
    line, message = REFUSED[kind]
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    examples = read(Source(path=str(file)))
    assert next(examples).text == "fine", "the examples before it are read"
    with pytest.raises(ValueError, match=re.escape(f"{file}:3: ") + ".*" + re.escape(message)) as caught:
        next(examples)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_placed(tmp_path):
    for name, good in (("a.jsonl", b'{"text": "fine"}\n'), ("a.txt", b"fine\n"), ("a.json", b"[\n")):
        file = tmp_path / name
        file.write_bytes(good + b'{"text": "\xc3\xa4 \xff"}')
        with pytest.raises(ValueError, match=re.escape(f"{file}:2: byte 14 of the line, 0xff, is not UTF-8")):
            examples_of(file)
    file.write_bytes("[]".encode("utf-16"))
    with pytest.raises(ValueError, match="a.json:1: byte 1 of the line, 0xff"):
        examples_of(file)


def test_a_gzip_that_is_cut_off_or_none_is_named(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    complete = gzip.compress(b"".join(b'{"text": "%d"}\n' % n for n in range(50)))
    file.write_bytes(complete[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:\d+: the gzip stream is cut off or damaged"):
        examples_of(file)
    file.write_bytes(complete[:20] + b"\x00\x00\x00\x00" + complete[24:])
    with pytest.raises(ValueError, match="the gzip stream is cut off or damaged"):
        examples_of(file)
    file.write_bytes(b'{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:1: the gzip stream is cut off or damaged"):
        examples_of(file)


TALES = ["Ein Märchen\nüber 2\u2028 Zeilen", "<|endoftext", "🙂 long " * 60_000]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".json.gz", ".txt", ".txt.gz", ".parquet", ".arrow"])
def test_texts_survive_every_kind_of_file(ending, tmp_path, no_hub, monkeypatch):
    monkeypatch.setattr(conversations, "CHUNK", 50)  # so that examples of .json span chunks
    folder = tmp_path / "odd [x]* name"
    folder.mkdir()
    file = folder / f"tales{ending}"
    table = [{"text": text} for text in TALES]
    if ending in (".parquet", ".arrow"):
        from datasets import Dataset

        data = Dataset.from_list(table)
        data.to_parquet(tmp_path / "t.parquet") if ending == ".parquet" else data.save_to_disk(tmp_path / "saved")
        (tmp_path / "t.parquet" if ending == ".parquet" else tmp_path / "saved" / "data-00000-of-00001.arrow").rename(file)
    else:
        plain = {
            ".txt": SEPARATOR.join(["", " \n", *TALES]),
            ".jsonl": "\n\n".join(json.dumps(row, ensure_ascii=len(row["text"]) < 20) for row in table),
            ".json": json.dumps(table, indent=2),
        }[ending.removesuffix(".gz")].encode()
        file.write_bytes(gzip.compress(plain) if ending.endswith(".gz") else b"\xef\xbb\xbf" + plain)
    examples = examples_of(file)
    assert [example.text for example in examples] == TALES
    numbers = (1, 3, 5) if ".jsonl" in ending else (1, 2, 3)
    assert [example.id for example in examples] == [f"tales{ending}:{n}" for n in numbers]
    assert sorted(os.listdir(folder)) == [file.name], "nothing is left beside the file"


def test_tables_leave_no_cache_and_lose_their_nulls(tmp_path):
    from datasets import Dataset

    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    second_call = {"function": {"name": "say", "arguments": {"text": "x"}}}
    table = [
        {"id": "a", "messages": [QUESTION, {**ANSWER, "tool_calls": [call]}], "text": None},
        {"id": None, "messages": [QUESTION, {**ANSWER, "tool_calls": [second_call]}], "text": None},
        {"id": None, "messages": None, "text": "A tale."},
    ]
    Dataset.from_list(table).to_parquet(tmp_path / "t.parquet")
    code = (
        "import sys; from draftsmith.data.conversations import *; assert 'datasets' not in sys.modules;"
        "print([(r.id, r.messages, r.text) for r in read(Source(path=sys.argv[1]))])"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t.parquet")], env=environment, capture_output=True, text=True, check=True
    )
    first, second = ([QUESTION, {**ANSWER, "tool_calls": [each]}] for each in (call, second_call))
    assert eval(run.stdout) == [("a", first, ""), ("t.parquet:2", second, ""), ("t.parquet:3", None, "A tale.")]
    left = [path for folder in ("home", "tmp") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert left == []


def test_damaged_tables_are_named(tmp_path, no_hub):
    from datasets import Dataset

    Dataset.from_list([{"text": "a" * 999}]).to_parquet(tmp_path / "t.parquet")
    Dataset.from_list([{"text": "a" * 999}]).save_to_disk(tmp_path / "saved")
    for file in (tmp_path / "t.parquet", tmp_path / "saved" / "data-00000-of-00001.arrow"):
        assert len(examples_of(file)) == 1
        file.write_bytes(file.read_bytes()[:300])
        with pytest.raises(
            ValueError, match=re.escape(f"{file}: not a complete {file.suffix} file of the kind `datasets` writes (")
        ) as caught:
            examples_of(file)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ('{"data": [{"text": "a"}]}', 1, "expected a list of examples, got"),
        ("", 1, "expected a list of examples, got ''"),
        ('[{"text": "a"},\n{"text": "b"}', 2, "not JSON (expected `,` or `]` after an example)"),
        ('[{"text": "a"},\n{"text": "b"\n', 3, "not JSON (Expecting ',' delimiter)"),
        ('[{"text": "a"},\n\n{"text": b},\n{"text": "c"}]', 3, "not JSON (Expecting value)"),
        ('[{"text": "a"}\n{"text": "b"}]', 2, "not JSON (expected `,` or `]` after an example)"),
        ('[{"text": "a"},\n]', 2, "not JSON (Expecting value)"),
        ('[{"text": "a"}]\n[{"text": "b"}]', 1, "text after the end of the list"),
        ('[{"text": "a"},\n{"words": "b"}]', 2, "got keys ['words']"),
        ('[{"text":\n"a"\n},\n{"words": "b"}]', 4, "got keys ['words']"),
        ('[\n{"text": "a"},\n"b"]', 3, "got 'b', expected an object"),
        ('[{"text": "a"},\n{"text": "a", "text": "b"}]', 2, "key 'text' is given twice"),
    ],
)
@pytest.mark.parametrize("chunk", [4, 1 << 20])
def test_a_broken_list_is_placed(content, line, message, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "CHUNK", chunk)
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{file}:{line}: ") + ".*" + re.escape(message)):
        examples_of(file)


def test_an_empty_list_has_no_examples(tmp_path):
    (tmp_path / "a.json").write_text(" [ \n ] \n")
    assert examples_of(tmp_path / "a.json") == []


def test_a_long_list_is_read_item_by_item(tmp_path):
    (tmp_path / "a.json").write_text("[" + ",\n".join(json.dumps({"text": f"{n} " * 50}) for n in range(40_000)) + ', {"broken"]')
    examples = read(Source(path=str(tmp_path / "a.json")))
    assert [next(examples).text.split()[0] for _ in range(40_000)] == [str(n) for n in range(40_000)]
    with pytest.raises(ValueError, match=r"a\.json:40000: not JSON"):
        next(examples)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path, no_hub):
    from datasets import Dataset

    Dataset.from_list([{"text": "arrow"}]).save_to_disk(tmp_path)  # with its own .json files
    (tmp_path / "cache-1234.arrow").write_bytes((tmp_path / "data-00000-of-00001.arrow").read_bytes())
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "README.md").write_text("not data")
    examples = examples_of(tmp_path)
    assert [(example.id, example.text) for example in examples] == [
        ("a.txt:1", "a"),
        ("b.jsonl:1", "b"),
        ("data-00000-of-00001.arrow:1", "arrow"),
    ]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"folder .* holds no \.json"):
        read(Source(path=str(tmp_path / "none")))


@pytest.mark.parametrize(
    "path",
    ["./a", "~/no-such/b", "/no/such", "rows.jsonl", "a/rows.json.gz", "a.parquet", "x/y/z", "existing/rows", "folder/", "a/b.csv"],
)
@pytest.mark.parametrize("start", [read, fingerprint])
def test_what_looks_local_never_asks_the_hub(path, start, tmp_path, no_hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "existing").mkdir()
    with pytest.raises(ValueError, match=re.escape(f"data file {path!r} not found")):
        start(Source(path=path))  # before the first example is read


def test_a_file_of_another_kind_is_refused(tmp_path, no_hub):
    for name in ("a.csv", "a.parquet.gz", "jsonl"):
        (tmp_path / name).write_text("a,b\n")
        with pytest.raises(ValueError, match=r"expected \.json, \.jsonl.*convert it"):
            read(Source(path=str(tmp_path / name)))


def test_a_hub_data_set_is_streamed(monkeypatch, tmp_path):
    import datasets

    requests = []

    def load(path, **options):
        requests.append((path, options))
        return iter([{"messages": [{**QUESTION, "name": None}], "text": None}, {"messages": None, "text": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    examples = examples_of("owner/chat-v1.5", split="train_sft", subset="en", domain="chat")
    assert requests == [("owner/chat-v1.5", {"name": "en", "split": "train_sft", "streaming": True})]
    assert examples == [Conversation("owner/chat-v1.5:1", "chat", [QUESTION]), Conversation("owner/chat-v1.5:2", "chat", text="x")]


def test_what_the_hub_refuses_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets
    import huggingface_hub

    def load(*args, **kwargs):
        raise ValueError("Unknown split\n'train'.")

    def info(*args, **kwargs):
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    message = r"no file 'owner/chat', and no split 'test' of subset 'en' of a Hub data set of that name \({}\); check the names and the connection"
    source = Source(path="owner/chat", split="test", subset="en")
    with pytest.raises(ValueError, match=message.format("Unknown split 'train'.")):
        read(source)
    with pytest.raises(ValueError, match=message.format("offline mode")):
        fingerprint(source)


def test_fingerprints_change_with_what_is_read(tmp_path, monkeypatch, no_hub):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    seen = [fingerprint(Source(path=str(file))), fingerprint(Source(path=str(tmp_path)))]
    assert seen[0] == fingerprint(Source(path=str(file), weight=2.0)) == seen[1], "a folder of one file is that file"
    file.write_text('{"text": "b"}\n')
    seen += [fingerprint(Source(path=str(file)))]
    (tmp_path / "c.txt").write_text("c")
    seen += [fingerprint(Source(path=str(tmp_path)))]
    (tmp_path / "c.txt").rename(tmp_path / "d.txt")
    seen += [fingerprint(Source(path=str(tmp_path)))]
    assert len(set(seen)) == 4

    monkeypatch.setattr(conversations, "_hub_commit", lambda source: "abc")
    hub = {fingerprint(Source(path="owner/chat", **fields)) for fields in ({}, {"split": "test"}, {"subset": "en"})}
    monkeypatch.setattr(conversations, "_hub_commit", lambda source: "def")
    assert len(hub | {fingerprint(Source(path="owner/chat"))}) == 4


def test_the_standard_library_keeps_its_own_held_out_part(no_hub):
    train, valid = list(read(Source(path="stdlib"))), list(read(Source(path="stdlib", domain="code"), split="valid"))
    assert [(example.id, example.text) for example in train] == list(stdlib.modules("train"))
    assert {example.domain for example in train} == {"all"} and {example.domain for example in valid} == {"code"}
    assert valid and all(stdlib.held_out(example.id) for example in valid) and not any(stdlib.held_out(example.id) for example in train)


def test_the_standard_library_has_a_fingerprint(monkeypatch):
    seen = []
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 1")):
        monkeypatch.setattr(stdlib, "modules", lambda split, name=name, text=text: [(name, text)])
        assert fingerprint(Source(path="stdlib")) == fingerprint(Source(path="stdlib"))
        seen.append(fingerprint(Source(path="stdlib")))
    assert len(set(seen)) == 3


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")
def test_real_examples():
    chat = examples_of(SHARED / "chat" / "valid.jsonl.gz")
    assert len(chat) == 1534 and len({example.id for example in chat}) == 1534 and len({example.domain for example in chat}) > 8
    assert all(
        example.messages and example.messages[0]["role"] == "user" and example.messages[-1]["role"] == "assistant" for example in chat
    )
    tasks = examples_of(SHARED / "eval" / "spec_tasks.jsonl.gz")
    assert len(tasks) == 644 and sum(len(example.messages or ()) for example in tasks) == 724


@pytest.mark.parametrize("wanted", [{"split": "test"}, {"subset": "en"}])
def test_files_have_no_splits(wanted, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="which is no data set of the Hub; name the files that are wanted"):
        read(Source(path=str(tmp_path), **wanted))


def test_times_and_decimals_of_tables_are_text(tmp_path):
    import datetime
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    call = {"name": "at", "arguments": {"when": datetime.datetime(2026, 11, 26, 7), "sum": decimal.Decimal("1.50")}}
    messages = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "rows.parquet")
    (example,) = read(Source(path=str(tmp_path / "rows.parquet")))
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"when": "2026-11-26 07:00:00", "sum": "1.50"}
