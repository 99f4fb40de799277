"""What is read from others: text files and tables in bounds, excluded prompts each time, stores and caches by their content."""

import gzip
import json
import os
import re

import pytest
import torch
from bad_data import CASES, exchanged
from conftest import byte_tokenizer
from packed_data import LENGTHS, corpus_of
from zoo import tiny

from draftsmith.data import capture, features, prepare, text_files
from draftsmith.data.conversations import Source, read
from draftsmith.data.corpus import read as read_corpus
from draftsmith.data.features import FeatureStore
from draftsmith.data.prepare import CorpusPlan, load
from draftsmith.data.resumable import Output
from draftsmith.inference.claim import MARK
from draftsmith.models.target import Target
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe import load as load_recipe


def test_the_corpus_of_bad_data_is_large_and_its_names_differ():
    assert len(CASES) > 200 and len({case.name for case in CASES}) == len(CASES)
    assert all(re.compile(case.says) and case.says for case in CASES)


def test_parts_are_the_text_at_every_length(tmp_path):
    file = tmp_path / "a.json"
    text = "[\n Märchen 🙂\r\n ünd \u2028 mehr ]"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    for length in range(1, 40):
        assert "".join(text_files.parts(file, length)) == text
    assert "".join(line for _, line in text_files.lines(file)) == text.replace("\r\n", "\n")


@pytest.mark.parametrize("length", range(1, 12))
def test_parts_place_a_byte_that_is_not_utf8(tmp_path, length):
    (tmp_path / "a.json").write_bytes("[\nä".encode() + b"\xff]")
    with pytest.raises(ValueError, match=r"a\.json:2: byte 3 of the line, 0xff"):
        list(text_files.parts(tmp_path / "a.json", length))


def test_a_list_of_one_line_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.data.conversations.CHUNK", 64)
    monkeypatch.setattr(text_files, "LINE", 64)  # the bound of lines is none of a list
    rows = [{"text": f"tale {n} " + "ä" * n} for n in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False))
    assert [example.text for example in read(Source(path=str(tmp_path / "a.json")))] == [row["text"] for row in rows]


def test_compressed_files_may_expand_as_text_does(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "SMALL", 1000)
    for times, refused in ((100, False), (100_000, True)):
        file = tmp_path / "a.jsonl.gz"
        file.write_bytes(gzip.compress(b'{"text": "a"}\n' * times, mtime=0))
        if refused:
            with pytest.raises(ValueError, match="expands to more than 200 times"):
                next(text_files.lines(file))
        else:
            assert len(list(text_files.lines(file))) == times


def test_json_is_bounded_in_depth():
    for levels, refused in ((100, False), (101, True)):
        text = "[" * levels + "]" * levels
        if refused:
            with pytest.raises(ValueError, match="a.jsonl:3: JSON of more than 100 levels"):
                text_files.parse(text, "a.jsonl:3")
        else:
            text_files.parse(text, "a.jsonl:3")


@pytest.fixture
def plan(tmp_path):
    chats = [{"text": f"Number {n} of {n * n} tales, each with {n + 7} words."} for n in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": chats[7]["text"]}) + "\n")
    return CorpusPlan((Source(path=str(tmp_path / "t.jsonl")),), seq_len=64, exclude=(str(tmp_path / "p.jsonl"),))


def test_excluded_prompts_are_read_each_time(plan, tmp_path):
    tokenizer, cache, prompts = byte_tokenizer(), tmp_path / "cache", tmp_path / "p.jsonl"
    reasons = load(plan, tokenizer, cache)["train"].report["dropped"]
    assert reasons == {"evaluation prompt: equals an evaluation prompt": [1, ["t.jsonl:8"]]}
    prompts.write_text('{"prompt": "another one"}\n')
    assert load(plan, tokenizer, cache)["train"].report["dropped"] == {}
    prompts.unlink()
    with pytest.raises(ValueError, match=r"data\.exclude .*p\.jsonl' not found"):
        load(plan, tokenizer, cache)


def test_a_cached_corpus_is_believed_by_its_checksum_alone(plan, tmp_path, monkeypatch, capsys):
    tokenizer, cache = byte_tokenizer(), tmp_path / "cache"
    corpora = load(plan, tokenizer, cache)
    file = next(cache.glob("train-*"))
    content, size = file.read_bytes(), file.stat().st_size
    assert read_corpus(file) is not None and not capsys.readouterr().err
    for at in range(size // 2, size, size // 40):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert read_corpus(file) is None and "is damaged or without a checksum" in capsys.readouterr().err
    file.write_bytes(content)
    renamed = file.rename(file.with_name(file.name.replace("train", "valid")))
    assert read_corpus(renamed) is None
    monkeypatch.setattr(prepare, "MOST_DOMAINS", 0)
    with pytest.raises(ValueError, match="1 domains, such as 'all'"):
        load(plan, tokenizer, cache)
    assert corpora["train"].domains == ("all",)


def test_a_section_of_no_method_is_refused(tmp_path):
    load_recipe(Recipe, "medusa-tiny.yaml", ["student.layers=3"], shared=True)
    with pytest.raises(ValueError, match=r"unknown recipe key 'dta\.train'"):
        load_recipe(Recipe, "medusa-tiny.yaml", ["dta.train=x"], shared=True)


def test_a_store_of_an_earlier_version_still_works(target, tmp_path, capsys):
    corpus = corpus_of(LENGTHS)
    capture.capture(target, [corpus], tmp_path)
    (tmp_path / MARK).unlink()
    for file in tmp_path.glob("*.json"):
        if file.name != "index.json":
            facts = json.loads(file.read_text())
            file.write_text(json.dumps({key: facts[key] for key in ("sha256", "bytes", "keys", "lengths", "error")}))
    assert len(FeatureStore(tmp_path, target).locations) == len(corpus)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    capture.capture(target, [corpus], tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before and (tmp_path / MARK).exists()
    assert "captured again" not in capsys.readouterr().err


def test_a_shard_that_changes_is_verified_again(target, tmp_path):
    corpus = corpus_of(LENGTHS)
    capture.capture(target, [corpus], tmp_path)
    store = FeatureStore(tmp_path, target)
    key, (name, *_) = next(iter(store.locations.items()))
    file = tmp_path / f"{name}.safetensors"
    content, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged"):
        store.stored(key)
    os.utime(file, ns=times)  # the next run reads it, whatever its time says
    with pytest.raises(ValueError, match="is damaged"):
        FeatureStore(tmp_path, target)
    file.write_bytes(content)
    side = tmp_path / f"{name}.json"
    if len(set(json.loads(side.read_text())["lengths"])) < len(json.loads(side.read_text())["lengths"]):
        exchanged(side)
        with pytest.raises(ValueError, match="token ids of other samples"):
            FeatureStore(tmp_path, target)


def test_a_shard_of_another_target_is_not_read(target, tmp_path):
    corpus = corpus_of(LENGTHS)
    capture.capture(target, [corpus], tmp_path / "a")
    capture.capture(Target.wrap(tiny("llama"), name="fine-tuned"), [corpus], tmp_path / "b")
    name = next(iter(features.sidecars(tmp_path / "a")))
    for ending in (".json", ".safetensors"):
        (tmp_path / "a" / f"{name}{ending}").write_bytes((tmp_path / "b" / f"{name}{ending}").read_bytes())
    with pytest.raises(ValueError, match="belongs to another store"):
        FeatureStore(tmp_path / "a", target)


def test_numbers_that_are_not_finite_are_noticed_in_every_format(target, tmp_path):
    from draftsmith.data.feature_dataset import FeatureDataset
    from draftsmith.data.packing import PackedDataset

    corpus = corpus_of(LENGTHS)
    for precision, name, value in (
        ("bfloat16", "hidden", float("nan")),
        ("fp8", "hidden", float("nan")),
        ("int8", "hidden_scale", float("inf")),
    ):
        capture.capture(target, [corpus], tmp_path / precision, precision)
        data = FeatureDataset(PackedDataset(corpus, 32), FeatureStore(tmp_path / precision, target))
        stored = data.store.stored

        def damaged(key, stored=stored, name=name, value=value):
            return {k: v.float().fill_(value).to(v.dtype) if k == name else v for k, v in stored(key).items()}

        data.batch(torch.tensor([0]))
        data.store.stored = damaged
        with pytest.raises(ValueError, match=f"`{name}` has an inf or a NaN"):
            data.batch(torch.tensor([0]))


def test_only_an_unfinished_row_of_our_own_is_dropped(tmp_path):
    out = tmp_path / "out.jsonl"
    row = json.dumps({"id": "ä", "domain": "all", "prompt": "a", "generation": {}}, ensure_ascii=False)
    for length in range(1, len(row.encode())):
        out.write_bytes(row.encode()[:length])
        with Output(out, {}, {"ä"}) as output:
            assert not output.rows and out.read_bytes() == b""
    for foreign in ('{"id": "b", "domain": "a', '{"id": 3, "', '{"name": "ä", ', "# notes"):
        out.write_text(foreign)
        with pytest.raises(ValueError, match="not a row that this command wrote"), Output(out, {}, {"ä"}):
            pass
        assert out.read_text() == foreign
