"""Answers that repeat themselves, and prompts that are templated already."""

from dataclasses import replace

import pytest
from conftest import byte_tokenizer
from records_by_hand import records, request

from draftsmith.data.prompts import Prompt
from draftsmith.eval import sanity
from draftsmith.eval.records import PromptRecord

LOOP = [*range(100, 140), *[7, 8, 9] * 12]


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        (LOOP, 3),
        ([5] * 32, 1),
        ([5] * 31, 0),
        (list(range(40)), 0),
        ([*LOOP, 1], 0),  # it ended otherwise
        ([*range(9)] * 4, 9),  # 36 tokens, four parts
        ([*range(9)] * 3 + [*range(8)], 0),  # three parts and a rest
        ([7, *[1, 2] * 15], 0),  # 30 tokens of it
    ],
)
def test_the_period_at_the_end_of_an_answer(tokens, length):
    assert sanity.period(tokens) == length


def test_what_repeats_itself():
    assert sanity.repeats_itself(request("a", [len(LOOP)], tokens=LOOP))
    assert sanity.repeats_itself(request("a", [len(LOOP) + 1], tokens=[*LOOP, 0], reason="stop"))
    assert not sanity.repeats_itself(request("a", [len(LOOP) + 1], tokens=[*LOOP, 0]))
    often = [token for start in range(0, 4) for token in (start + 50, *range(20))]  # 1. the same, 2. the same, ...
    assert sanity.period(often) == 0 and sanity.repeats_itself(request("a", [84], tokens=often))
    assert not sanity.repeats_itself(request("a", [63], tokens=often[:63]))  # too short to judge by its 8-grams
    assert not sanity.repeats_itself(request("a", [80], tokens=list(range(80))))


def test_tau_with_and_without_degenerate_answers():
    fine = [request(str(n), [2] * 10) for n in range(8)]
    loops = [request(f"loop{n}", [4] * 19, tokens=LOOP) for n in range(2)]
    made = records([*fine, *loops, request("only", [4] * 19, setting="1", tokens=LOOP), request("good", [2], setting="0.5")])
    first, last = (sanity.degenerate(made)[setting] for setting in ("0", "1"))
    assert set(sanity.degenerate(made)) == {"0", "1"}
    assert (first.prompts, first.answers, first.without) == (["loop0", "loop1"], 10, pytest.approx(2.0))
    assert first.tau == pytest.approx((8 * 20 + 2 * 76) / (8 * 10 + 2 * 19)) and first.low == pytest.approx(2) == first.high
    assert (last.prompts, last.without, last.low) == (["only"], None, None)
    one, other = sanity.lines(made)
    assert one == "T=0: 2 of 10 answers repeat themselves (loop0, loop1): τ 2.64 with them, 2.00 without"
    assert other.endswith("(only): τ 4.00 with them, and there are no others") and sanity.lines(records(fine)) == []


def chat(name, text, later=()):
    return Prompt(name, "d", text, ({"role": "user", "content": text},), later=tuple(later))


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}{{ m.role.upper() }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
STRICT = "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}[Q] {{ messages[0].content }} [/Q]"
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text", "mark"),
    [
        (CHATML, "<|im_start|>user\nhello<|im_end|>", "<|im_start|>"),
        (CHATML, "hello<|im_end|>", "<|im_end|>"),
        (CHATML, "what is <|im_begin|> and USER: for?", ""),
        (CHATML, "user\nassistant", ""),
        (PLAIN, "USER: hello\nASSISTANT:", "USER:"),
        (PLAIN, "hello\n  ASSISTANT: yes", "ASSISTANT:"),
        (PLAIN, "the word USER: is in the middle", ""),
        (STRICT, "[Q] hello", "[Q]"),
        (BARE, "hello", ""),
        ("{% broken", "hello <|im_start|>", ""),
        (None, "<|im_start|>user", ""),
    ],
)
def test_marks_of_a_template_in_a_prompt(template, text, mark):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    marked = sanity.templated(tokenizer, [chat("a", text), chat("b", "hello", [chat("b#2", text)])])
    assert marked == ({"a": mark, "b#2": mark} if mark else {})
    assert sanity.templated(tokenizer, [Prompt("raw", "d", text)]) == {}  # a text is taken as it is


def test_a_doubled_beginning_of_text():
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    text = Prompt("raw", "d", "<|begin|>hello")
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    assert sanity.templated(tokenizer, [text]) == {}  # this tokenizer writes none
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
    )
    assert tokenizer.encode(text.text)[:2] == [tokenizer.bos_token_id] * 2
    assert sanity.templated(tokenizer, [text, Prompt("fine", "d", "hello")]) == {"raw": "<|begin|>"}


def test_sentences_on_prompts():
    made = records([request("a", [2])])
    names = [f"p{n}" for n in range(7)]
    made.prompts = {name: PromptRecord(name, [1], templated="<|im_start|>") for name in names} | {"b": PromptRecord("b", [1])}
    (line,) = sanity.lines(made)
    assert line.startswith("7 prompts have a chat template's '<|im_start|>' in their words") and "(p0, p1, p2, p3, p4 and 2 more)" in line
    made.prompts = {"b": replace(made.prompts["b"], logged=True)}
    assert sanity.lines(made)[0].startswith("1 prompts come with a log's answer")
