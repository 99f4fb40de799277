"""Corpora and prompts: what bears loss, what is held out, and what is said about bad files."""

import gzip
import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.data import chat, corpus, prompts, stdlib

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = CHATML
    return fast


TURNS = [
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2, of course"},
    {"role": "user", "content": "And of course three?"},
    {"role": "assistant", "content": "3"},
]


def test_the_masked_text_is_what_the_assistant_wrote(tokenizer):
    ids, mask = chat.encode(TURNS, tokenizer)
    masked = tokenizer.decode([i for i, keep in zip(ids, mask, strict=True) if keep])
    assert masked == "2, of course<|im_end|>\n3<|im_end|>\n"
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_a_template_that_rewrites_history_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    try:
        with pytest.raises(ValueError, match="the loss mask cannot be derived"):
            chat.encode(TURNS, tokenizer)
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="has no chat template"):
            chat.encode(TURNS, tokenizer)
    finally:
        tokenizer.chat_template = CHATML


def test_plain_text_is_joined_and_cut_without_loss(tokenizer, tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("<|endoftext|>".join(f"tale {i}. " * 9 for i in range(40)))
    parts = {part: corpus.load(str(file), None, part, tokenizer, 16, tmp_path / "cache") for part in ("train", "valid")}
    text = {part: tokenizer.decode(found.ids.flatten()) for part, found in parts.items()}
    for i in range(39):
        part, other = ("valid", "train") if i % 20 == 19 else ("train", "valid")
        assert f"tale {i}. " in text[part] and f"tale {i}. " not in text[other]
    assert parts["train"].mask.all()
    batch = parts["train"].batch(torch.tensor([3, 1]))
    assert batch["input_ids"].shape == (2, 16) and batch["input_ids"].dtype == torch.int64


def test_conversations_are_rows_of_their_own_and_are_kept_on_disk(tokenizer, tmp_path):
    file = tmp_path / "chats.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps({"messages": TURNS}) + "\n" for _ in range(25))
    found = corpus.load(str(file), None, "train", tokenizer, 128, tmp_path / "cache")
    ids, mask = chat.encode(TURNS, tokenizer)
    assert len(found) == 24
    assert found.ids[5, : len(ids)].tolist() == ids and found.mask[5, : len(ids)].tolist() == mask
    assert not found.mask[:, len(ids) :].any()
    stored = sorted((tmp_path / "cache").iterdir())
    assert len(stored) == 1
    stored[0].write_bytes(stored[0].read_bytes()[:100])  # a kill in the middle of an older version
    again = corpus.load(str(file), None, "train", tokenizer, 128, tmp_path / "cache")
    assert torch.equal(again.ids, found.ids) and torch.equal(again.mask, found.mask)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "", "no train rows of 64 tokens; the source is empty or too short"),
        ("a.txt", "", "the source is empty or too short"),
        ("a.jsonl", "{broken\n", "a.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"words": 3}\n', "a.jsonl:1: expected a JSON object with `messages` or `text`"),
        ("a.jsonl", (json.dumps({"messages": TURNS[:1]}) + "\n") * 20, "19 of 19 train rows bear no loss"),
        ("a.jsonl", json.dumps({"messages": TURNS}) + "\n", "1 conversations are too few to hold some out; name a held-out file"),
        ("a.csv", "x", "expected .txt or .jsonl"),
        (None, None, "not found; give a .txt or .jsonl file"),
    ],
)
def test_a_bad_source_is_one_clear_line(tokenizer, tmp_path, name, content, says):
    path = tmp_path / (name or "nothing.txt")
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        corpus.load(str(path), None, "train", tokenizer, 64, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*"))


def test_the_built_in_corpus_holds_out_whole_modules():
    parts = {part: [name for name, _ in stdlib.modules(part)] for part in ("train", "valid")}
    assert len(parts["train"]) > 250 and len(parts["valid"]) > 15
    assert not set(parts["train"]) & set(parts["valid"])
    assert all(stdlib.held_out(name) for name in parts["valid"])
    assert not any(re.search(r"(^|/)(tests?|lib2to3|encodings|pydoc_data)/", name) for part in parts.values() for name in part)


def test_the_shipped_prompts_come_from_held_out_modules():
    shipped = prompts.load(None)
    counts = {domain: sum(prompt.domain == domain for prompt in shipped) for domain in prompts.DOMAINS}
    assert len(shipped) >= 90 and min(counts.values()) >= 20
    assert all(stdlib.held_out(prompt.id.split(":")[0]) for prompt in shipped)
    assert [prompt.id for prompt in prompts.load(None, limit=2)] == [
        prompt.id for domain in prompts.DOMAINS for prompt in [p for p in shipped if p.domain == domain][:2]
    ]


def test_prompt_files_of_other_shapes(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["Hi", "More"], "category": "chat", "id": 7}\n{"messages": [{"role": "user", "content": "Yo"}]}\n')
    first, second = prompts.load(file)
    assert (first.domain, first.id, first.messages) == ("chat", "7", ({"role": "user", "content": "Hi"},))
    assert (second.domain, second.text) == ("all", "Yo")
    for content, says in (
        ("", "no prompts in it"),
        ('{"q": 1}\n', "expected `prompt`, `turns` or `messages`"),
        ("{\n", "not a JSON object"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=says):
            prompts.load(file)
    with pytest.raises(ValueError, match="not found"):
        prompts.load(tmp_path / "none.jsonl")
