"""The built-in corpus and evaluation prompts: what is held out, and the errors for bad files."""

import re

import pytest

from draftsmith.data import cut_prompts, prompts, stdlib


def test_the_built_in_corpus_holds_out_complete_modules():
    parts = {part: [name for name, _ in stdlib.modules(part)] for part in ("train", "valid")}
    assert len(parts["train"]) > 250 and len(parts["valid"]) > 15
    assert not set(parts["train"]) & set(parts["valid"])
    assert all(stdlib.held_out(name) for name in parts["valid"])
    assert not any(re.search(r"(^|/)(tests?|lib2to3|encodings|pydoc_data)/", name) for part in parts.values() for name in part)


def test_the_shipped_prompts_come_from_held_out_modules():
    shipped = prompts.load(prompts.TINY)
    counts = {domain: sum(prompt.domain == domain for prompt in shipped) for domain in cut_prompts.DOMAINS}
    assert len(shipped) >= 90 and min(counts.values()) >= 20
    assert all(stdlib.held_out(prompt.id.split(":")[0]) for prompt in shipped)
    assert [prompt.id for prompt in prompts.load(prompts.TINY, limit=2)] == [
        prompt.id for domain in cut_prompts.DOMAINS for prompt in [p for p in shipped if p.domain == domain][:2]
    ]


def test_prompt_files_with_other_keys(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["Hi", "More"], "category": "chat", "id": 7}\n{"messages": [{"role": "user", "content": "Yo"}]}\n')
    first, second = prompts.load(file)
    assert (first.domain, first.id, first.messages) == ("chat", "7", ({"role": "user", "content": "Hi"},))
    assert (second.domain, second.text) == ("no domain", "Yo")
    for content, says in (
        ("", "no prompts in it"),
        ('{"q": 1}\n', "expected `prompt`, `turns` or `messages`"),
        ("{\n", "not JSON"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=f"{says}.*; ") as caught:
            prompts.load(file)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="not found"):
        prompts.load(tmp_path / "none.jsonl")
