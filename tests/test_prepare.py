"""Corpora: what is supervised, held out, dropped, cut and mixed, and the errors for data that cannot be trained on."""

import gzip
import json
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from conftest import byte_tokenizer
from safetensors.torch import save_file

from draftsmith.data import chat, encoding, prepare
from draftsmith.data.conversations import Source, read
from draftsmith.data.encoding import Encoder, encoded
from draftsmith.data.prepare import CorpusPlan, load, mix
from draftsmith.data.report import many_dropped
from draftsmith.models import vocab

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="module")
def tokenizer():
    fast = byte_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = CHATML
    return fast


def conversation(n, **keys) -> dict:
    answer = f"{n} and {n * 7919 % 1009} make {n + n * 7919 % 1009}, of course; the next is row{n * n}"
    return {"messages": [{"role": "user", "content": f"Add up row {n}?"}, {"role": "assistant", "content": answer}], **keys}


def write(path: Path, rows) -> Source:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return Source(path=str(path))


def test_conversations_become_samples_with_their_masks(tokenizer, tmp_path):
    rows = [conversation(n, category="even" if n % 2 == 0 else "odd") for n in range(40)]
    plan = CorpusPlan((write(tmp_path / "chats.jsonl.gz", rows),), seq_len=256)
    corpora = load(plan, tokenizer, tmp_path / "cache")
    assert (len(corpora["train"]), len(corpora["valid"])) == (38, 2)
    template = chat.Template(tokenizer)
    for part, numbers in (("train", [n for n in range(40) if n % 20 != 19]), ("valid", [19, 39])):
        for index, n in enumerate(numbers):
            ids, mask = corpora[part].sample(index)
            assert (ids.tolist(), mask.tolist()) == template.encode(rows[n]["messages"])
            assert corpora[part].domains[corpora[part].domain[index]] == rows[n]["category"]
    assert corpora["train"].supervised_tokens.sum() == corpora["train"].mask.sum()
    by_domain = corpora["train"].tokens_by_domain()
    assert sorted(by_domain) == ["even", "odd"] and sum(len(ids) for ids, _ in by_domain.values()) == len(corpora["train"].ids)


def test_corpora_are_cached_and_prepared_again_when_broken(tokenizer, tmp_path, monkeypatch):
    plan = CorpusPlan((write(tmp_path / "chats.jsonl", map(conversation, range(40))),), seq_len=256)
    corpora = load(plan, tokenizer, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "prepare_corpora", None)
        cached = load(plan, tokenizer, tmp_path / "cache")
    for part in corpora:
        assert cached[part].report == corpora[part].report and cached[part].domains == corpora[part].domains
        assert all(
            torch.equal(getattr(cached[part], name), getattr(corpora[part], name)) for name in ("ids", "mask", "offsets", "epoch_samples")
        )
    stored = sorted((tmp_path / "cache").iterdir())
    assert len(stored) == 2
    stored[0].write_bytes(stored[0].read_bytes()[:100])
    assert torch.equal(load(plan, tokenizer, tmp_path / "cache")["train"].ids, corpora["train"].ids)
    save_file({"words": torch.zeros(1)}, stored[1], {"corpus": json.dumps({"domains": []})})  # as another version might write it
    assert torch.equal(load(plan, tokenizer, tmp_path / "cache")["valid"].ids, corpora["valid"].ids)
    keys = {
        CorpusPlan(plan.train, seq_len=255).key(tokenizer),
        CorpusPlan(plan.train, seq_len=256, last_turn=True).key(tokenizer),
        plan.key(tokenizer),
    }
    assert len(keys) == 3
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write(json.dumps(conversation(99)) + "\n")
    assert plan.key(tokenizer) not in keys


def test_texts_are_cut_and_ended_and_lose_nothing(tokenizer, tmp_path):
    file = tmp_path / "book.txt"
    tales = [" ".join(f"tale{i}-{j}" for j in range(9)) for i in range(40)]
    file.write_text("<|endoftext|>".join(tales))
    corpora = load(CorpusPlan((Source(path=str(file)),), seq_len=16), tokenizer, tmp_path / "cache")
    text = {part: tokenizer.decode(corpus.ids) for part, corpus in corpora.items()}
    assert text["train"] == "".join(tale + "<|endoftext|>" for i, tale in enumerate(tales) if i % 20 != 19)
    assert text["valid"] == "".join(tale + "<|endoftext|>" for i, tale in enumerate(tales) if i % 20 == 19)
    assert corpora["train"].mask.all() and corpora["train"].lengths.max() == 16


def test_a_single_book_holds_out_its_end(tokenizer, tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {i}\n" for i in range(300)))
    corpora = load(CorpusPlan((Source(path=str(file)),), seq_len=16), tokenizer, tmp_path / "cache")
    joined = tokenizer.decode(corpora["train"].ids) + tokenizer.decode(corpora["valid"].ids)
    assert joined == file.read_text() + "<|endoftext|>"
    assert len(corpora["valid"]) == (len(corpora["train"]) + len(corpora["valid"])) // 20


def test_a_tokenizer_with_bos_gets_it_before_each_piece_and_once(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    (tmp_path / "t.txt").write_text("a text of some thirty characters")
    example = Encoder(tokenizer, 16, False, ())(next(iter(read(Source(path=str(tmp_path / "t.txt"))))))
    ids = [piece.tolist() for piece, _ in example.pieces]
    assert all(piece[0] == bos and bos not in piece[1:] and len(piece) <= 16 for piece in ids) and len(ids) == 3
    assert tokenizer.decode([i for piece in ids for i in piece[1:]]) == "a text of some thirty characters<|endoftext|>"
    assert [mask.tolist() for _, mask in example.pieces] == [[False] + [True] * (len(piece) - 1) for piece in ids]


def test_a_completion_is_learnt_and_its_prompt_is_not(tmp_path):
    tokenizer = byte_tokenizer()  # no template: the raw text
    source = write(tmp_path / "c.jsonl", [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}!"} for n in range(30)])
    corpora = load(CorpusPlan((source,), seq_len=64, near=1.0), tokenizer, tmp_path / "cache")
    ids, mask = corpora["train"].sample(7)
    assert tokenizer.decode(ids[mask]) == "14!<|endoftext|>" and tokenizer.decode(ids[~mask]) == "7+7="


def test_evaluation_prompts_and_duplicates_are_dropped_and_counted(tokenizer, tmp_path):
    prompt = "Please tell me in one short and friendly sentence why the sky above us looks so very blue today."
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": prompt, "domain": "x"}) + "\n")
    contaminated = {"messages": [{"role": "user", "content": "Hello! " + prompt}, {"role": "assistant", "content": "It scatters."}]}
    rows = [conversation(n) for n in range(60)] + [conversation(3), contaminated]
    plan = CorpusPlan((write(tmp_path / "chats.jsonl", rows),), seq_len=256, exclude=(str(tmp_path / "eval.jsonl"),))
    corpora = load(plan, tokenizer, tmp_path / "cache")
    dropped = corpora["train"].report["dropped"]
    assert sum(count for count, _ in dropped.values()) == 2 and corpora["train"].report["read"] == 62
    assert any("duplicate" in reason for reason in dropped) and any("evaluation prompt" in reason for reason in dropped)
    assert len(corpora["train"]) + len(corpora["valid"]) == 60


def test_later_turns_of_an_evaluation_prompt_and_those_before_it_are_excluded_too(tokenizer, tmp_path):
    turns = [" ".join(f"{letter}{n}" for n in range(14)) for letter in "abcd"]
    chat = [{"role": "user", "content": turns[2]}, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": turns[3]}]
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": turns[:2]}) + "\n" + json.dumps({"messages": chat}) + "\n")
    copies = [{"messages": [{"role": "user", "content": turn}, {"role": "assistant", "content": "No."}]} for turn in turns]
    source = write(tmp_path / "chats.jsonl", [*map(conversation, range(40)), *copies])
    corpora = load(CorpusPlan((source,), seq_len=256, exclude=(str(tmp_path / "eval.jsonl"),)), tokenizer, tmp_path / "cache")
    assert corpora["train"].report["dropped"] == {"evaluation prompt: equals an evaluation prompt": [4, ANY]}


def test_a_held_out_source_is_part_of_the_plan_even_where_it_is_the_usual_one(tokenizer):
    stdlib = Source(path="stdlib")
    assert CorpusPlan((stdlib,)).sources() == CorpusPlan((stdlib,), (stdlib,)).sources()
    assert CorpusPlan((stdlib,)).key(tokenizer) != CorpusPlan((stdlib,), (stdlib,)).key(tokenizer)


def test_a_text_may_have_a_beginning_that_is_given_and_an_end_that_is_none(tokenizer, tmp_path):
    """As regenerated texts have them. A target with a chat template reads them as texts too."""
    rows = [{"text": f"{n}+{n}={2 * n}, as {n} has it", "given": len(f"{n}+{n}=")} for n in range(30)]
    rows = [row | ({"finish_reason": "length"} if n % 2 else {}) for n, row in enumerate(rows)]
    corpora = load(CorpusPlan((write(tmp_path / "c.jsonl", rows),), seq_len=64, near=1.0), tokenizer, tmp_path / "cache")
    for n, end in ((6, "<|endoftext|>"), (7, "")):
        ids, mask = corpora["train"].sample(n)
        assert tokenizer.decode(ids[mask]) == f"{2 * n}, as {n} has it{end}" and tokenizer.decode(ids[~mask]) == f"{n}+{n}="
    with pytest.raises(ValueError, match="c.jsonl:1: `given` is 99, expected how many characters"):
        load(CorpusPlan((write(tmp_path / "c.jsonl", [rows[0] | {"given": 99}]),), seq_len=64), tokenizer, tmp_path / "cache")


def test_an_answer_that_was_cut_off_has_no_end(tokenizer, tmp_path):
    rows = [{"prompt": f"Row {n}?", "completion": f"It is {n * n}", "finish_reason": "length"} for n in range(30)]
    corpora = load(CorpusPlan((write(tmp_path / "c.jsonl", rows),), seq_len=64, near=1.0), tokenizer, tmp_path / "cache")
    ids, mask = corpora["train"].sample(5)
    assert tokenizer.decode(ids[mask]) == "It is 25" and tokenizer.decode(ids).startswith("<|im_start|>user\nRow 5?<|im_end|>")


def test_a_prompt_without_an_answer_has_nothing_to_learn(tmp_path):
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}!"} for n in range(300)] + [{"prompt": "8+9=", "completion": ""}]
    corpora = load(CorpusPlan((write(tmp_path / "c.jsonl", rows),), seq_len=64, near=1.0), byte_tokenizer(), tmp_path / "cache")
    assert sum(len(corpus) for corpus in corpora.values()) == 300
    assert corpora["train"].report["dropped"] == {"no answer": [1, ANY]}


def test_an_answer_that_repeats_itself_drops_its_conversation(tokenizer, tmp_path):
    """Half of the data may: they are counted among what was dropped, not among conversations without a loss mask."""
    loop = "the same words again, " * 8
    turns = [*conversation(90)["messages"], *conversation(91)["messages"]]
    rows = [
        *map(conversation, range(30)),
        *({"messages": [turns[0], {"role": "assistant", "content": f"{n} is {loop}"}]} for n in range(20)),
        {"messages": [turns[0], {"role": "assistant", "content": loop + "a"}, *turns[2:]]},
        {"messages": [{"role": "user", "content": loop}, turns[1]]},  # a question may
        {"prompt": "Say on: ", "completion": loop + "b"},
        {"text": loop + "c"},  # nobody's answer: no end-of-turn is missing
    ]
    source = write(tmp_path / "c.jsonl", rows)
    corpora = load(CorpusPlan((source,), seq_len=512), tokenizer, tmp_path / "cache")
    assert corpora["train"].report["dropped"] == {"an answer repeats itself": [22, ["c.jsonl:31", "c.jsonl:32", "c.jsonl:33"]]}
    assert sum(map(len, corpora.values())) == len(rows) - 22
    last = load(CorpusPlan((source,), seq_len=512, last_turn=True), tokenizer, tmp_path / "cache")
    assert last["train"].report["dropped"]["an answer repeats itself"][0] == 21, "the first of two answers is not trained on"
    every = load(CorpusPlan((source,), seq_len=512, near=1.0, loops=True), tokenizer, tmp_path / "cache")
    assert sum(map(len, every.values())) == len(rows)


def test_an_empty_text_is_counted_without_a_chat_template(tmp_path):
    rows = [{"text": f"{n} and {n} are {2 * n}"} for n in range(30)] + [
        {"text": ""},
        {"text": "8+9=", "given": 4},
    ]  # of conversations 1 % would stop the run
    corpora = load(CorpusPlan((write(tmp_path / "t.jsonl", rows),), seq_len=64, near=1.0), byte_tokenizer(), tmp_path / "cache")
    assert sum(len(corpus) for corpus in corpora.values()) == 30
    assert sum(number for number, _ in corpora["train"].report["dropped"].values()) == 2


def test_of_equal_examples_the_held_out_one_stays(tokenizer, tmp_path):
    train, valid = write(tmp_path / "a.jsonl", map(conversation, range(30))), write(tmp_path / "b.jsonl", map(conversation, range(25, 28)))
    corpora = load(CorpusPlan((train,), (valid,), seq_len=256), tokenizer, tmp_path / "cache")
    assert len(corpora["valid"]) == 3 and len(corpora["train"]) == 27


def test_of_several_small_sources_one_conversation_in_twenty_is_held_out(tokenizer, tmp_path):
    """None of them has twenty. A conversation is in one of the two corpora."""
    sources = tuple(write(tmp_path / f"{n}.jsonl", map(conversation, range(19 * n, 19 * n + 19))) for n in range(3))
    corpora = load(CorpusPlan(sources, seq_len=256, near=1.0), tokenizer, tmp_path / "cache")
    assert (len(corpora["train"]), len(corpora["valid"])) == (55, 2)
    texts = [tokenizer.decode(corpus.sample(n)[0]) for corpus in corpora.values() for n in range(len(corpus))]
    assert len(set(texts)) == 57


def test_special_tokens_that_a_template_writes_are_part_of_the_key(tmp_path):
    tokenizer, plan = byte_tokenizer(), CorpusPlan((write(tmp_path / "a.jsonl", map(conversation, range(40))),))
    before = plan.key(tokenizer)
    tokenizer.bos_token = "a"
    assert plan.key(tokenizer) != before


def test_an_end_of_text_that_stands_for_unknown_tokens_too_is_not_counted(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.unk_token = tokenizer.eos_token
    report = load(CorpusPlan((write(tmp_path / "a.jsonl", ({"text": f"text {n}"} for n in range(40))),)), tokenizer, tmp_path)[
        "train"
    ].report
    assert report["unknown tokens"] == 0


def test_sources_are_mixed_by_tokens(tokenizer, tmp_path):
    short = [conversation(n) for n in range(100)]
    long = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": " ".join(f"w{n * m}" for m in range(40))}]}
        for n in range(100, 150)
    ]
    a, b = write(tmp_path / "a.jsonl", short), write(tmp_path / "b.jsonl", long)
    sources = (a.model_copy(update={"weight": 3.0, "domain": "short"}), b.model_copy(update={"weight": 1.0, "domain": "long"}))
    corpus = load(CorpusPlan(sources, seq_len=512, near=1.0), tokenizer, tmp_path / "cache")["train"]
    entries = corpus.epoch_samples
    tokens = {name: int(corpus.lengths[entries[corpus.domain[entries] == n]].sum()) for n, name in enumerate(corpus.domains)}
    assert abs(tokens["short"] / sum(tokens.values()) - 0.75) < 0.01
    times = torch.bincount(entries, minlength=len(corpus))
    assert (times[corpus.domain == corpus.domains.index("long")] == 1).all()  # the source that lasts longest is taken once
    assert int(times.max() - times[corpus.domain == corpus.domains.index("short")].min()) <= 1
    ids, counted = (torch.cat(parts) for parts in zip(*corpus.tokens_by_domain().values(), strict=True))
    epoch = [(ids, mask & (torch.arange(len(ids)) > 0)) for ids, mask in map(corpus.sample, entries.tolist())]
    expected = torch.bincount(torch.cat([ids[supervised] for ids, supervised in epoch]), minlength=len(tokenizer))
    assert torch.equal(vocab.count(ids, counted, len(tokenizer)), expected)
    with pytest.raises(ValueError, match="1 of 2 sources have a weight"):
        mix(torch.tensor([1, 2]), [a, b], (sources[0], b))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "", "no examples to train on; the source is empty"),
        ("a.txt", "", "no examples to train on; the source is empty"),
        ("a.jsonl", "{broken\n", "a.jsonl:1: "),
        ("a.jsonl", '{"words": 3}\n', "words"),
        (
            "a.jsonl",
            json.dumps(conversation(1)) + "\n" + json.dumps(conversation(2)) + "\n",
            "conversations are too few to hold some out; name a held-out file",
        ),
        (
            "a.jsonl",
            "".join(json.dumps({"messages": conversation(n)["messages"][:1]}) + "\n" for n in range(20)),
            "20 of 20 conversations have no supervised token",
        ),
        ("a.jsonl", "".join(json.dumps(conversation(n)) + "\n" for n in range(99)) + json.dumps({"messages": []}) + "\n", None),
        (
            "a.jsonl",
            "".join(json.dumps(conversation(n)) + "\n" for n in range(97)) + (json.dumps({"messages": []}) + "\n") * 2,
            "2 of 99 conv",
        ),
        (None, None, "nothing.txt"),
    ],
)
def test_bad_data_is_one_clear_line_and_leaves_nothing(tokenizer, tmp_path, name, content, says):
    path = tmp_path / (name or "nothing.txt")
    if content is not None:
        path.write_text(content)
    plan = CorpusPlan((Source(path=str(path)),), seq_len=256)
    if says is None:
        assert load(plan, tokenizer, tmp_path / "cache")["train"].report["dropped"]
        return
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        load(plan, tokenizer, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*"))


def test_a_held_out_file_without_a_usable_example_is_not_replaced(tokenizer, tmp_path):
    train = write(tmp_path / "chats.jsonl", map(conversation, range(200)))
    messages = conversation(1000)["messages"]
    valid = write(tmp_path / "valid.jsonl", [{"messages": [{**messages[0], "content": "word " * 100}, messages[1]]}])
    with pytest.raises(ValueError, match=r"data.valid=.*valid.jsonl: no examples to evaluate on; 1 of 201 dropped \("):
        load(CorpusPlan((train,), (valid,), seq_len=256), tokenizer, tmp_path / "cache")


@pytest.mark.parametrize(("copies", "says"), [(10, False), (40, True)])
def test_a_training_says_that_many_examples_were_dropped(tokenizer, tmp_path, copies, says):
    rows = [*map(conversation, range(200)), *([conversation(1)] * copies)]
    corpora = load(CorpusPlan((write(tmp_path / "chats.jsonl", rows),), seq_len=256), tokenizer, tmp_path / "cache")
    assert many_dropped(corpora["train"]).startswith("40 of 240 examples were dropped: 40 exact duplicate; ") == says
    assert bool(many_dropped(corpora["train"])) == says


def test_masks_of_everything_stop_the_run(tokenizer, tmp_path, monkeypatch):
    plan = CorpusPlan((write(tmp_path / "chats.jsonl", map(conversation, range(200))),), seq_len=256)
    encode = chat.Template.encode

    def broken(self, messages, tools=None):
        ids, mask = encode(self, messages, tools)
        return ids, [True] * len(mask) if "row 7?" in messages[0]["content"] else mask

    monkeypatch.setattr(chat.Template, "encode", broken)
    with pytest.raises(ValueError, match=r"every token of 1 of 200 conversations is supervised, for example chats.jsonl:8"):
        load(plan, tokenizer, tmp_path / "cache")


def test_an_answer_beyond_the_length_is_cut_and_said(tokenizer, tmp_path):
    rows = [conversation(n) for n in range(150)]
    rows[4]["messages"][1]["content"] += "".join(f" {n * n}" for n in range(30_000))  # 268k tokens
    rows[5]["messages"][0]["content"] += " why" * 50_000
    corpus = load(CorpusPlan((write(tmp_path / "c.jsonl", rows),), seq_len=256), tokenizer, tmp_path / "cache")["train"]
    assert corpus.lengths.max() == 256 and corpus.report["cut examples"] == 1 and corpus.report["cut tokens"] > 200_000
    assert corpus.report["dropped"] == {"the answer begins past 256 tokens": [1, ["c.jsonl:6"]]}


class StartedPool(ProcessPoolExecutor):
    """Starts its processes before it is used, so that they get the tasks; counts the tasks that it gets."""

    submitted = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        super().submit(int).result()

    def submit(self, *arguments):
        StartedPool.submitted += 1
        future = super().submit(*arguments)
        if arguments[1] == []:
            future.result()
        return future


def test_processes_give_the_same_examples_in_the_same_order(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "SERIAL_EXAMPLES", 100)
    monkeypatch.setattr(encoding, "CHUNK", 64)
    monkeypatch.setattr(encoding, "ProcessPoolExecutor", StartedPool)
    StartedPool.submitted = 0
    source = write(tmp_path / "c.jsonl", map(conversation, range(700)))
    encoder = Encoder(tokenizer, 256, False, ())
    serial, parallel = (list(encoded(read(source), encoder, processes)) for processes in (1, 2))
    assert [example.id for example in serial] == [example.id for example in parallel] and len(serial) == 700
    assert StartedPool.submitted == 1 + 10
    for a, b in zip(serial, parallel, strict=True):
        assert all((x[0] == y[0]).all() and (x[1] == y[1]).all() for x, y in zip(a.pieces, b.pieces, strict=True))


def test_an_error_in_a_process_is_the_error(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "SERIAL_EXAMPLES", 10)
    monkeypatch.setattr(encoding, "CHUNK", 10)
    monkeypatch.setattr(encoding, "ProcessPoolExecutor", StartedPool)
    plain = byte_tokenizer()  # without a template
    with pytest.raises(chat.TemplateRefused, match="there is no template"):
        list(encoded(read(write(tmp_path / "c.jsonl", map(conversation, range(60)))), Encoder(plain, 64, False, ()), 2))
    rows = [{"text": f"number {n}"} for n in range(30)] + [conversation(n) for n in range(30)]
    with pytest.raises(chat.TemplateRefused, match="there is no template"):
        list(encoded(read(write(tmp_path / "d.jsonl", rows)), Encoder(plain, 64, False, ()), 2))


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")
def test_the_command_prepares_and_shows_real_conversations(tmp_path):
    common = ["recipes/medusa-tiny.yaml", f"data.train={SHARED}/chat/valid.jsonl.gz", "data.template=recipes/plain.jinja"]
    common += [f"data.exclude=[{SHARED}/eval/spec_tasks.jsonl.gz]", "data.seq_len=2048", f"data.cache={tmp_path}"]

    def run(*words):
        command = [sys.executable, "-m", "draftsmith.train.cli", "data", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)

    prepared = run("prepare", *common)
    assert prepared.returncode == 0, prepared.stderr
    assert "1,534 examples read" in prepared.stdout and "math_reasoning" in prepared.stdout and "τ at most" in prepared.stdout
    fill = float(re.search(r"sequences an epoch, ([\d.]+)% full", prepared.stdout)[1])
    assert fill >= 97
    shown = run("show", *common, "--domain", "qa", "--examples", "3")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("⟦") - 1 == shown.stdout.count("Assistant:⟦") == 3
    wrong = run("show", *common, "--domain", "nothing")
    assert wrong.returncode == 2 and "expected one of chat, code_python" in wrong.stderr
