"""Datastores: their order against a plain sort, look-ups against a search of the text, damage by one line, and the commands that use them."""

import copy
import gzip
import json
import os
import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from zoo import VOCAB, tiny

from draftsmith.data import datastore
from draftsmith.data.datastore import build, sort_suffixes
from draftsmith.eval import generate, loading
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.records import RequestRecord, Round
from draftsmith.inference.retrieval import FACTS, MAX_MATCH, MOST_OCCURRENCES, SUFFIXES, TOKENS, Datastore, Rest, formats
from draftsmith.inference.tree import StaticTree
from draftsmith.models.identity import tokenizer_hash
from draftsmith.models.model_files import read_tokenizer
from draftsmith.models.target import Target
from draftsmith.train import data_cli


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer("tiny")


@pytest.fixture
def store(tmp_path, tokenizer):
    """A datastore of a few sequences, built in blocks of 64 positions."""
    build(tmp_path / "store", make_sequences(3, 40), tokenizer, "tiny", block=64)
    return tmp_path / "store"


def make_sequences(letters: int, count: int) -> list[list[int]]:
    rng = random.Random(letters)
    return [[rng.randrange(letters) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def sorted_positions(tokens: list[int]) -> list[int]:
    padded = tokens + [0] * MAX_MATCH
    return sorted(range(len(tokens)), key=lambda position: (padded[position : position + MAX_MATCH], position))


@pytest.mark.parametrize("symbols", [2, 3, 10, 70_000])
def test_suffixes_are_sorted_in_blocks_of_any_size(symbols, monkeypatch):
    sizes: list[int] = []
    lexsort = np.lexsort
    monkeypatch.setattr(np, "lexsort", lambda keys: sizes.append(len(keys[0])) or lexsort(keys))
    rng = random.Random(symbols)
    for trial in range(8):
        tokens = [rng.randrange(symbols) for _ in range(rng.randint(1, 200))]
        if trial % 2:
            tokens = (tokens[:7] * 40)[:150]  # long repetitions: runs of one token are distributed again and again
        array, expected = np.array([*tokens, 0], dtype="<u2" if symbols < 1 << 16 else "<u4"), sorted_positions([*tokens, 0])
        for block in (1, 7, 1000):
            suffixes, spare = np.empty((2, len(array)), dtype="<u4")
            sizes.clear()
            sort_suffixes(array, suffixes, spare, symbols, block)
            assert suffixes.tolist() == expected and max(sizes, default=0) <= block


def test_a_store_in_blocks_is_the_same_to_the_byte(tmp_path, tokenizer):
    for name, block in (("blocks", 16), ("once", 1 << 20)):
        built = build(tmp_path / name, make_sequences(4, 60), tokenizer, "tiny", block=block)
    for file in (FACTS, TOKENS, SUFFIXES):
        assert (tmp_path / "blocks" / file).read_bytes() == (tmp_path / "once" / file).read_bytes()
    assert built.sequences == 60 and built.tokens == sum(len(ids) + 1 for ids in make_sequences(4, 60))
    assert (
        built.bytes == sum(file.stat().st_size for file in (tmp_path / "once").iterdir()) and len(list((tmp_path / "once").iterdir())) == 3
    )
    assert "60 sequences" in built.report()


def follow(sequences: list[list[int]], text: list[int]) -> tuple[int, list[list[int]]]:
    """The longest end of `text` in the sequences, by a search of all of them, and what follows each occurrence."""
    for size in range(min(MAX_MATCH, len(text)), 0, -1):
        after = [ids[end:] for ids in sequences for end in range(size, len(ids) + 1) if ids[end - size : end] == text[-size:]]
        if after:
            return size, after
    return 0, []


@pytest.mark.parametrize("letters", [2, 5, 300])
def test_lookups_give_the_longest_match_and_its_continuations(tmp_path, tokenizer, letters):
    sequences, rng, seen = make_sequences(letters, 50), random.Random(1), Counter()
    build(tmp_path / "store", sequences, tokenizer, "tiny")
    store = Datastore.open(tmp_path / "store", tokenizer_hash(tokenizer))
    for trial in range(150):
        ids = rng.choice(sequences)
        text = (
            [rng.randrange(letters) for _ in range(rng.randint(0, 4))] + ids[: rng.randint(0, len(ids))] + [letters + 5] * (trial % 10 == 0)
        )
        size, after = follow(sequences, text)
        length, low, high = store.matches(text)
        assert (length, high - low) == (size, len(after)), trial
        got, depth = store.continuations(length, low, high, 3), rng.randint(1, 3)
        if len(after) <= MOST_OCCURRENCES:
            assert sorted(got) == sorted(run[:3] for run in after)
        else:  # evenly spaced in their order
            order = sorted(range(len(after)), key=lambda index: after[index][: MAX_MATCH - size])
            shares, sampled = Counter(after[index][0] for index in order if after[index]), Counter(run[0] for run in got if run)
            assert len(got) == MOST_OCCURRENCES
            assert all(abs(sampled[token] / len(got) - shares[token] / len(after)) <= 2 / len(got) for token in shares)
        assert all(len(run) <= depth for run in store.continuations(length, low, high, depth))
        seen["nothing" if not size else "sampled" if len(after) > MOST_OCCURRENCES else "longest" if size == MAX_MATCH else "some"] += 1
    assert seen["nothing"] >= 10 and seen["some"] >= 20 and seen["longest"] >= 5 and (seen["sampled"] >= 5 or letters > 2)


def test_vocabularies_at_the_edge_of_a_format():
    """Tokens are stored as id + 1, so that 65,535 of 65,536 would not fit into 16 bits."""
    assert formats((1 << 16) - 1, 1)[0] == "H" and formats(1 << 16, 1)[0] == "I"
    assert formats(9, (1 << 32) - 1)[1] == "I" and formats(9, 1 << 32)[1] == "Q"


def test_a_store_of_more_tokens_than_the_target_is_refused():
    target = Target.wrap(tiny("llama"))
    for vocab, refused in ((VOCAB, False), (VOCAB + 1, True)):
        drafter = Rest(Datastore(np.array([1, 2, 0], dtype=np.uint16), np.array([2, 0, 1], dtype=np.uint32), vocab))
        with pytest.raises(ValueError, match=f"datastore of {vocab} tokens for a target of {VOCAB}") if refused else nullcontext():
            drafter.bind(target, 1, 32)


def test_it_drafts_what_followed(tmp_path, tokenizer):
    build(tmp_path / "store", [[1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 7], [8, 2, 3, 4, 7]], tokenizer, "tiny")
    drafter = Rest(Datastore.open(tmp_path / "store", tokenizer_hash(tokenizer)), StaticTree.cartesian((2, 2)))
    drafter.bind(SimpleNamespace(vocab_size=len(tokenizer)), 1, 100)
    for text, tokens, parents in (([0, 2, 3, 4], [7, 5, 6], [0, 0, 2]), ([1, 2, 3], [4, 5], [0, 1]), ([0, 4], [], []), ([0, 0], [], [])):
        drafter.start([0], [text], None)
        draft = drafter._draft(0, 9)
        assert (draft.tokens, draft.parents) == (tokens, parents)
    with pytest.raises(ValueError, match=f"{len(tokenizer)} tokens for a target of 100"):
        drafter.bind(SimpleNamespace(vocab_size=100), 1, 100)


def test_a_longer_match_is_worth_more_nodes(tmp_path, tokenizer):
    """Two for each of its tokens and two more, the root's not counted: four continuations, each of five tokens that no two share."""
    texts = [[50 + number, 1, 2, 3, *range(10 * number, 10 * number + 5)] for number in range(1, 5)]
    build(tmp_path / "store", texts, tokenizer, "tiny")
    drafter = Rest(Datastore.open(tmp_path / "store", tokenizer_hash(tokenizer)), StaticTree.cartesian((4, 1, 1, 1, 1)))
    drafter.bind(SimpleNamespace(vocab_size=len(tokenizer)), 1, 100)
    for text, nodes in (([0, 2, 3], 6), ([0, 1, 2, 3], 8)):
        drafter.start([0], [text], None)
        assert len(drafter._draft(0, 9).tokens) == nodes


def spoil(store: Path, how: str) -> None:
    content = json.loads((store / FACTS).read_text())
    if how == "flipped":
        data = bytearray((store / SUFFIXES).read_bytes())
        data[len(data) // 2] ^= 1
        (store / SUFFIXES).write_bytes(data)
    elif how == "truncated":
        os.truncate(store / TOKENS, 100)
    elif how == "lost":
        (store / SUFFIXES).unlink()
    elif how == "no facts":
        (store / FACTS).unlink()
    elif how == "no JSON":
        (store / FACTS).write_text("{")
    else:
        key, value = how.split("=")
        (store / FACTS).write_text(json.dumps(content | {key: json.loads(value)}))


DAMAGE = {
    "flipped": "is damaged: its checksum differs",
    "truncated": "tokens.bin has 100 bytes, expected",
    "lost": "suffixes.bin has 0 bytes, expected",
    "no facts": "`draftsmith data datastore` makes one",
    "no JSON": "not JSON",
    "format=2": "format 2, this Draftsmith reads 1",
    "tokens=-4": "bytes, expected",
    "tokens=0": "bytes, expected 0",
    'tokenizer_hash="0"': "has tokens of another tokenizer, that of 'tiny'",
    'vocab_size="many"': "`vocab_size` should be an integer",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_one_line(store, tokenizer, how):
    Datastore.open(store, tokenizer_hash(tokenizer))
    spoil(store, how)
    with pytest.raises(ValueError, match=DAMAGE[how]) as error:
        Datastore.open(store, tokenizer_hash(tokenizer))
    assert "\n" not in str(error.value) and str(store) in str(error.value)


def test_wrong_positions_and_tokens_that_no_checksum_saw_do_no_harm(tokenizer):
    """In a store of gigabytes, where not every block is summed."""
    tokens, rng = np.array([2, 3, 4, 0, 60_000, 0] * 9, dtype="<u2"), np.random.default_rng(0)
    for _ in range(40):
        store = Datastore(tokens, rng.integers(0, 1 << 32, len(tokens)).astype("<u4"), 10)
        length, low, high = store.matches([1, 2, 3])
        assert all(0 <= token < 10 for run in store.continuations(length, low, high, 5) for token in run)
    assert Datastore(tokens, np.arange(54, dtype="<u4"), 10).continuations(1, 2, 5, 3) == [[], [], []]


def test_a_build_that_fails_leaves_what_was_there(tmp_path, store, tokenizer, monkeypatch):
    before = {file.name: file.read_bytes() for file in store.iterdir()}

    def broken():
        yield [1, 2]
        raise OSError("the disk is gone")

    cases = [
        (broken(), "the disk is gone"),
        ([[1], [len(tokenizer)]], f"ids below {len(tokenizer)}"),
        ([[-1]], "got tokens -1"),
        ([[]], "no tokens"),
    ]
    for sequences, message in cases:
        with pytest.raises((OSError, ValueError), match=message):
            build(store, sequences, tokenizer, "tiny")
        assert {file.name: file.read_bytes() for file in store.iterdir()} == before
    monkeypatch.setattr(datastore.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(OSError, match="GB more"):
        build(store, [[1, 2, 3]], tokenizer, "tiny")
    assert {file.name for file in tmp_path.iterdir()} == {"store"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(store)
    for name in ("mine", "link"):
        with pytest.raises(ValueError, match="is there and is no datastore"):
            build(tmp_path / name, [[1]], tokenizer, "tiny")


HEADER = {"drafter": {"method": "suffix"}, "settings": {"max_new_tokens": 8, "dtype": "float32", "slots": 1, "timed": None}, "skipped": {}}
TREE = {"kind": "tree", "tree": [[0]], "nodes": 2, "depth": 1}


def request(tokens: list[int]) -> RequestRecord:
    return RequestRecord("p", "all", "", "0", 1, 4, tokens, "length", [Round(3, 1, 1)] * len(tokens), len(tokens), True)


def test_conversations_need_a_chat_template(tmp_path, tokenizer):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": "q"}]}) + "\n")
    with pytest.raises(ValueError, match="'a' has messages, and this tokenizer no chat template; give texts, or a target with one"):
        list(datastore.read(str(tmp_path / "chats.jsonl"), tokenizer))


def test_one_command_builds_it_and_another_drafts_from_it(tmp_path, tokenizer, capsys):
    text = "def parse_line(line):\n    return line.strip().split()\n"
    (tmp_path / "code.txt").write_text(text)
    with gzip.open(tmp_path / "chats.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": ""}) + "\n" + json.dumps({"prompt": "a = ", "completion": "1"}) + "\n")
    (tmp_path / "measured").mkdir()
    records = RecordStore(tmp_path / "measured")
    header = HEADER | {"target": {"name": "tiny", "tokenizer_hash": tokenizer_hash(tokenizer)}}
    with records.opened(header):
        records.append([TREE])
        records.append_requests([request([11, 12, 13])], tokenizer)
        records.finish(["p"], ["0"])
    files = [str(tmp_path / name) for name in ("code.txt", "chats.jsonl.gz", "measured")]
    data_cli.main(["datastore", str(tmp_path / "store"), *files])
    printed = capsys.readouterr().out
    assert "3 sequences (1 empty ones left out)" in printed and f"--drafter rest:{tmp_path / 'store'}" in printed
    store = Datastore.open(tmp_path / "store", tokenizer_hash(tokenizer))
    expected = [
        *tokenizer(text, add_special_tokens=False).input_ids,
        -1,
        *tokenizer("a = 1", add_special_tokens=False).input_ids,
        -1,
        11,
        12,
        13,
        -1,
    ]
    assert [token - 1 for token in store.tokens.tolist()] == expected
    generate.main(
        ["--drafter", f"rest:{tmp_path / 'store'}", "--max-new-tokens", "6", "--temperature", "0", "def parse_line(line):\n    return"]
    )
    drafted = capsys.readouterr().out
    generate.main(["--max-new-tokens", "6", "--temperature", "0", "def parse_line(line):\n    return"])
    assert drafted == capsys.readouterr().out
    before = loading.provenance(f"rest:{tmp_path / 'store'}")
    assert before["name"] == f"rest:{tmp_path / 'store'}" and len(before["hash"]) == 64
    facts = json.loads((tmp_path / "store" / FACTS).read_text())
    (tmp_path / "store" / FACTS).write_text(json.dumps(facts | {"checksum": "0" * 64}))
    assert loading.provenance(f"rest:{tmp_path / 'store'}")["hash"] not in ("", before["hash"])


def test_tool_calls_are_read_as_for_training(tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}({% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %})"
        "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (tmp_path / "calls.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (ids,) = datastore.read(str(tmp_path / "calls.jsonl"), tokenizer)
    assert tokenizer.decode(ids) == "<|user|>q<|end|><|assistant|>add(a=2)<|end|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}"
    with pytest.raises(ValueError, match="not valid Jinja"):
        list(datastore.read(str(tmp_path / "calls.jsonl"), tokenizer))


def test_answers_of_another_tokenizer_and_missing_files_are_refused(tmp_path):
    records = RecordStore(tmp_path)
    with records.opened(HEADER | {"target": {"name": "big", "tokenizer_hash": "0"}}):
        records.append([TREE])
        records.finish([], [])
    for name, message in ((str(tmp_path), "answers of 'big', which has another tokenizer"), (str(tmp_path / "none.txt"), "not found")):
        with pytest.raises(ValueError, match=message):
            data_cli.main(["datastore", str(tmp_path / "store"), name])
    with pytest.raises(ValueError, match="no datastore in"):
        loading.open_models("tiny", [f"rest:{tmp_path}"], "float32")
