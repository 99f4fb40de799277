"""Loss masks by chat template: for each kind of template, exactly the text that this file spells out; for other templates, a refusal."""

import gzip
import json
from itertools import groupby
from pathlib import Path

import pytest
from chat_templates import CHAT_TEMPLATES, CHATML, DEEPSEEK, HARMONY, IM, QWEN3
from conftest import byte_tokenizer
from transformers import AutoTokenizer

from draftsmith.data.chat import Template, TemplateRefused, Unusable

ROOT = Path(__file__).resolve().parents[1]
CHATS = ROOT.parent / "shared" / "data" / "chat"


def turns(*contents, system=None):
    """The messages of a conversation that the user begins."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def conversations(chat):
    mark = chat.marker
    yield "single", turns("Two?", "2, of course.")
    yield "several", turns("Two?", "2, of course.", "And three?", "3", "And then?", "Four comes next;\n\nthen five.")
    yield "the user speaks last", turns("Two?", "2, of course.", "And three?")
    yield "blanks", turns(" Two? \n", "  2, of course. \n\n", "\n\nThree? ", "\n 3\t")
    yield "echo", turns("yes", "yes", "yes yes", "yes", "no", "yes")
    yield "tiny", turns("", ".", "?", "\n.\n", "", "<")
    yield "think", turns("Name a letter of <think>", "t", "Another", "<h>")
    yield "many bytes", turns("¿Qué 🤖?", "🦊🦊 – naïve 漢字 👩‍👩‍👧", "🦊", "🦊🦊🦊", "e\u0301", "\u200bא")
    yield "markers", turns(f"Write {mark} twice", f"{mark}{mark} is it", f"{mark}", f"I said {mark}is", f"is it {mark}", f"{mark} is it")
    yield "the end in the words", turns("What ends it?", f"{chat.says('It')} and more", "Really?", f"Really {chat.says('')}!")
    if chat.system:
        yield "system", turns("Two?", "2, of course.", "Three?", "3", system="Count well.")
        yield "the system says the same", turns("Two.", "Two.", "Two.", "Two.", system="Two.")
        yield "empty system", turns("Two?", "2", system="")


def tokenizer_with(kind, template, specials=(), name="its/name"):
    """A tokenizer with this template: `bytes` has a token for each byte, `bpe` merges them, also across a turn's ends."""
    tokenizer = byte_tokenizer() if kind == "bytes" else AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": [*specials]})
    tokenizer.chat_template, tokenizer.name_or_path = template, name
    return tokenizer


def supervised_runs(ids, mask):
    """The runs of supervised tokens."""
    pairs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in group] for keep, group in pairs if keep]


def supervised_texts(tokenizer, ids, mask):
    return tokenizer.batch_decode(supervised_runs(ids, mask), clean_up_tokenization_spaces=False)


def agree(tokenizer, runs, wanted):
    """Whether each run says what is wanted, and no longer does without its first or its last token."""
    texts = [tokenizer.batch_decode([run, run[1:], run[:-1]], clean_up_tokenization_spaces=False) for run in runs]
    tight = all(
        words in complete and words not in without_first and words not in without_last
        for (complete, without_first, without_last), words in zip(texts, wanted, strict=False)
    )
    exact = len(tokenizer) > 1000 or [complete for complete, _, _ in texts] == wanted  # a token of one byte crosses no end
    return len(runs) == len(wanted) and tight and exact


def expected(chat, messages):
    """The supervised text of each assistant turn."""
    assistant = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    words = {n: messages[n]["content"] if chat.blanks else messages[n]["content"].strip() for n in assistant}
    return [(chat.history or chat.says)(words[n]) if n + 1 < len(messages) else chat.says(words[n]) for n in assistant]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def kind(request):
    return request.param


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_what_the_assistant_says_is_supervised(kind, name):
    chat, seen = CHAT_TEMPLATES[name], 0
    tokenizer = tokenizer_with(kind, chat.template, chat.specials)
    template = Template(tokenizer)
    for case, messages in conversations(chat):
        ids, mask = template.encode(messages)
        text = tokenizer.apply_chat_template(messages, tokenize=False) + (chat.added if messages[-1]["role"] == "assistant" else "")
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text, case
        assert len(ids) == len(mask) and all(type(keep) is bool for keep in mask), case
        wanted = expected(chat, messages)
        assert agree(tokenizer, supervised_runs(ids, mask), wanted), (case, supervised_texts(tokenizer, ids, mask), wanted)
        seen += 1
    assert seen == (13 if chat.system else 10)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_prompt_is_what_precedes_the_supervised_text(name):
    chat = CHAT_TEMPLATES[name]
    template = Template(tokenizer_with("bytes", chat.template, chat.specials))
    messages = turns("Two?", "2", "Three?", "3")
    ids, mask = template.encode(messages)
    prompt, tokenizer = template.prompt(messages[:3]), template.tokenizer
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    if chat.template.startswith("{{ bos_token"):
        assert ids.count(tokenizer.bos_token_id) == prompt.count(tokenizer.bos_token_id) == 1
    size = len(prompt) - len(tokenizer.encode(chat.begun))
    assert tokenizer.decode(prompt[size:]) == chat.begun
    assert prompt[:size] == ids[:size] and (mask[size - 1], mask[size]) == (False, True)


def test_only_the_last_turn():
    for chat in CHAT_TEMPLATES.values():
        tokenizer = tokenizer_with("bytes", chat.template, chat.specials)
        for case, messages in conversations(chat):
            got = supervised_texts(tokenizer, *Template(tokenizer, last_turn=True).encode(messages))
            assert got == expected(chat, messages)[-1:], case


def test_a_turn_that_was_cut_off_has_no_end():
    for name, chat in CHAT_TEMPLATES.items():
        tokenizer = tokenizer_with("bytes", chat.template, chat.specials)
        messages = turns("Two?", "2, of", "Three?", "3", "Four?", "4 it")
        for turn in (1, 5):
            messages[turn]["finish_reason"] = "length"
        ids, mask = Template(tokenizer).encode(messages)
        wanted = expected(chat, messages)
        wanted[0] = wanted[0][: wanted[0].index("2, of") + 5]
        wanted[2] = wanted[2][: wanted[2].index("4 it") + 4]
        assert supervised_texts(tokenizer, ids, mask) == wanted, name
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False) + chat.added


FAULTS = {
    "shifted by one": lambda ids, mask, eot: (ids, [False, *mask[:-1]]),
    "shifted back by one": lambda ids, mask, eot: (ids, [*mask[1:], False]),
    "no end of turn": lambda ids, mask, eot: (ids, [keep and i != eot for i, keep in zip(ids, mask, strict=True)]),
    "all": lambda ids, mask, eot: (ids, [True] * len(mask)),
    "none": lambda ids, mask, eot: (ids, [False] * len(mask)),
    "the generation prompt too": lambda ids, mask, eot: (ids, [any(mask[n : n + 2]) for n in range(len(mask))]),
    "what follows the end": lambda ids, mask, eot: (ids, [any(mask[max(0, n - 1) : n + 1]) for n in range(len(mask))]),
    "the last turn missing": lambda ids, mask, eot: (ids, mask[: len(mask) // 2] + [False] * (len(mask) - len(mask) // 2)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_these_tests_see_a_wrong_mask(kind, fault):
    chat = CHAT_TEMPLATES["chatml"]
    tokenizer = tokenizer_with(kind, chat.template, chat.specials)
    messages = turns("Two?", "2, of course.", "Three?", "3")
    ids, mask = Template(tokenizer).encode(messages)
    assert agree(tokenizer, supervised_runs(ids, mask), expected(chat, messages))
    wrong = FAULTS[fault](ids, mask, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert not agree(tokenizer, supervised_runs(*wrong), expected(chat, messages))


@pytest.mark.parametrize("shift", [(-45, 0), (3, 0), (0, -17), (-45, 3)])
@pytest.mark.parametrize("turn", [1, 3])
def test_a_wrong_span_does_not_pass_the_checks(monkeypatch, turn, shift):
    locate = Template._locate

    def shifted(self, messages, tools, at, *rest):
        start, end = locate(self, messages, tools, at, *rest)
        return (start + shift[0], end + shift[1]) if at == turn else (start, end)

    template = Template(tokenizer_with("bytes", CHATML, IM))
    monkeypatch.setattr(Template, "_locate", shifted)
    with pytest.raises((TemplateRefused, Unusable), match="the template (writes others' words within|does not write what)"):
        template.encode(turns("Two?", "2, of course.", "Two?", "2, of course."))


def test_wrong_tokens_do_not_pass_the_checks(monkeypatch):
    tokenizer = tokenizer_with("bytes", CHATML, IM)
    template, tokenise = Template(tokenizer), Template._tokenise

    def shifted(self, text):
        ids, offsets = tokenise(self, text)
        return ids, [(start + 3, end + 3) for start, end in offsets]

    monkeypatch.setattr(Template, "_tokenise", shifted)
    with pytest.raises(TemplateRefused, match="decode to other words"):
        template.encode(turns("Two?", "2, of course."))


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
AS_TEXT = {"id": "abcdefgh9", "type": "function", "function": {"name": "mul", "arguments": '{"a": 2}'}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}} for name in ("add", "mul")]
CALLING = [
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "1 + ü, and twice that?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, AS_TEXT]},
    {"role": "tool", "name": "add", "content": "1ü", "tool_calls": None},
    {"role": "tool", "name": "mul", "content": "2"},
    {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]},
    {"role": "tool", "name": "add", "content": "0"},
    {"role": "assistant", "content": "It is 1ü and 2."},
    {"role": "user", "content": "Is it 0?"},
    {"role": "assistant", "content": "It is."},
]
HERMES = """{{ '<|im_start|>system\n' }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- if tools %}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls is defined %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}{{ '\n<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>tool\n<tool_response>\n' + m.content | tojson + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MISTRAL_TOOLS = """{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (system + '\n\n' if system and m == last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}
{{- call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"""
LLAMA_TOOLS = """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{%- if 'tool_calls' in m %}{% for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}{{ call.function.arguments | tojson }}{{ '}' }}{% endfor %}{{ '<|eom_id|>' }}
{%- else %}{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
TWO = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>\n<tool_call>\n{"name": "mul", "arguments": {"a": 2}}\n</tool_call>'
TOOL_TEMPLATES = {
    "qwen": (
        QWEN3,
        IM,
        [
            TWO + "<|im_end|>",
            '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>',
            "It is 1ü and 2.<|im_end|>",
            "<think>\n\n</think>\n\nIt is.<|im_end|>",
        ],
    ),
    "hermes": (
        HERMES,
        (*IM, "<tool_call>", "</tool_call>"),
        [
            TWO + "<|im_end|>",
            '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>',
            "It is 1ü and 2.<|im_end|>",
            "It is.<|im_end|>",
        ],
    ),
    "mistral": (
        MISTRAL_TOOLS,
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        [
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "ü"}}, {"name": "mul", "arguments": {"a": 2}}]</s>',
            '[TOOL_CALLS] [{"name": "add", "arguments": {}}]</s>',
            " It is 1ü and 2.</s>",
            " It is.</s>",
        ],
    ),
    "llama": (
        LLAMA_TOOLS,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        [
            '{"name": "add", "parameters": {"a": 1, "b": "ü"}}{"name": "mul", "parameters": {"a": 2}}<|eom_id|>',
            '{"name": "add", "parameters": {}}<|eom_id|>',
            "It is 1ü and 2.<|eot_id|>",
            "It is.<|eot_id|>",
        ],
    ),
    "deepseek": (
        DEEPSEEK,
        CHAT_TEMPLATES["deepseek r1, whose history has no reasoning"].specials,
        [
            '<|calls|><|call|>add\n{"a": 1, "b": "ü"}\n<|call|>mul\n{"a": 2}<|calls_end|><|eos|>',
            "<|calls|><|call|>add\n{}<|calls_end|><|eos|>",
            "It is 1ü and 2.<|eos|>",
            "It is.<|eos|>",
        ],
    ),
}


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_tool_calls_are_supervised_and_their_results_are_not(kind, name):
    text, specials, wanted = TOOL_TEMPLATES[name]
    tokenizer = tokenizer_with(kind, text, specials)
    before = json.dumps(CALLING)
    ids, mask = Template(tokenizer).encode(CALLING, TOOLS)
    assert agree(tokenizer, supervised_runs(ids, mask), wanted), supervised_texts(tokenizer, ids, mask)
    assert agree(tokenizer, supervised_runs(*Template(tokenizer, last_turn=True).encode(CALLING, TOOLS)), wanted[-1:])
    assert json.dumps(CALLING) == before
    assert Template(tokenizer).tokens(CALLING, TOOLS) == ids
    written = tokenizer.decode(ids)
    assert written.count("<s>") == ("bos_token" in text)
    if "tools" in text:
        assert json.dumps(TOOLS[1]["function"]["name"]) in written
    prompt = tokenizer.decode(Template(tokenizer).prompt(CALLING[:7], TOOLS))
    assert prompt.count("mul") >= 1 and "It is" not in prompt


def test_words_beside_a_call():
    messages = turns("Sum?", "I add.")
    messages[1]["tool_calls"] = [CALL]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call><|im_end|>'
    for text, wanted in (
        (HERMES, "I add.\n" + call),
        (MISTRAL_TOOLS, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "ü"}}]</s>'),
    ):
        tokenizer = tokenizer_with("bytes", text, (*IM, "[INST]", "[/INST]"))
        assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == [wanted]
    with pytest.raises(Unusable, match="does not write its tool calls"):
        Template(tokenizer_with("bytes", CHATML, IM)).encode(messages)
    with pytest.raises(Unusable, match="does not write its tool calls"):
        Template(tokenizer_with("bytes", CHATML, IM)).prompt(messages)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "content"])
def test_reasoning_is_supervised_where_the_template_writes_it(key):
    messages = turns("Two?", "2", "And three?", "3")
    for turn, thought in ((1, "one more"), (3, "3")):
        inline = f"<think>\n{thought}\n</think>\n\n{messages[turn]['content']}"
        messages[turn][key] = inline if key == "content" else thought
    tokenizer = tokenizer_with("bytes", QWEN3, IM)
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == ["2<|im_end|>", "<think>\n3\n</think>\n\n3<|im_end|>"]
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages[:2])) == ["<think>\none more\n</think>\n\n2<|im_end|>"]
    tokenizer = tokenizer_with("bytes", CHAT_TEMPLATES["chatml"].template, IM)
    contents = [turn["content"] + "<|im_end|>" for turn in messages[1::2]]
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == contents
    specials = CHAT_TEMPLATES["deepseek r1, whose history has no reasoning"].specials
    tokenizer = tokenizer_with("bytes", DEEPSEEK, specials)
    blank = "\n\n" if key == "content" else ""
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == [f"{blank}2<|eos|>", f"{blank}3<|eos|>"]
    if key != "content":
        tokenizer = tokenizer_with("bytes", HARMONY, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"))
        assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == [
            "<|channel|>final<|message|>2<|end|>",
            "<|channel|>analysis<|message|>3<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>",
        ]


def test_reasoning_that_the_prompt_begins_is_the_prompts():
    keeps_reasoning = DEEPSEEK.replace(".split('</think>')[-1]", "")
    tokenizer = tokenizer_with("bytes", keeps_reasoning, ("<|User|>", "<|Assistant|>", "<|eos|>"))
    messages = turns("Two?", "<think>\none more</think>2", "Three?", "3")
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == ["one more</think>2<|eos|>", "3<|eos|>"]


def test_a_turn_of_reasoning_alone():
    messages = [*turns("Two?"), {"role": "assistant", "content": "", "thinking": "one more"}, *turns("And?", "2")]
    tokenizer = tokenizer_with("bytes", QWEN3, IM)
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == ["<|im_end|>", "<think>\n\n</think>\n\n2<|im_end|>"]
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages[:2])) == ["<think>\none more\n</think>\n\n<|im_end|>"]


def test_reasoning_that_quotes_the_prompt():
    chat = CHAT_TEMPLATES["mistral, system only where the user is last"]
    tokenizer = tokenizer_with("bytes", chat.template, chat.specials)
    messages = turns("", "It was [/INST] that</think>ended it", "", "[/INST]", system="Be brief.")
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == expected(chat, messages)


def test_contents_in_parts_and_turns_in_odd_order():
    tokenizer = tokenizer_with("bytes", CHATML, IM)
    template = Template(tokenizer)
    parts = [{"type": "text", "text": "2, "}, {"type": "text", "text": "of course"}]
    messages = [*turns("Two?"), {"role": "assistant", "content": parts}, {"role": "system", "content": "2, of course"}, *turns("?", "3")]
    assert supervised_texts(tokenizer, *template.encode(messages)) == ["2, of course<|im_end|>", "3<|im_end|>"]
    messages = [{"role": "assistant", "content": "Hi"}, {"role": "assistant", "content": "Hi"}, *turns("Hi", "Hi")]
    assert supervised_texts(tokenizer, *template.encode(messages)) == ["Hi<|im_end|>"] * 3
    messages = [*turns("A", "", "B", "  \n", "C", "c", "D"), {"role": "assistant", "content": None}]
    assert supervised_texts(tokenizer, *template.encode(messages)) == ["c<|im_end|>"]  # empty turns are not supervised
    looks_at_the_first = tokenizer_with("bytes", CHAT_TEMPLATES["chatml with a default system prompt"].template, IM)
    for bad in (messages[:2], [{"role": "assistant", "content": ""}, *turns("A")]):
        with pytest.raises(Unusable, match="the assistant says nothing"):
            Template(looks_at_the_first).encode(bad)
    with pytest.raises(Unusable, match="it begins with the assistant"):
        Template(looks_at_the_first).encode([{"role": "assistant", "content": "Hi"}, *turns("Hi", "Hi")])
    only = Template(looks_at_the_first, last_turn=True)
    assert supervised_texts(looks_at_the_first, *only.encode([{"role": "assistant", "content": "Hi"}, *turns("Hi", "Ho")])) == [
        "Ho<|im_end|>"
    ]


HEADERS = "{% for m in messages %}{{ '<|start|>' + m.role + '<|header|>' + m.content + '<|end|>' }}{% endfor %}"
REFUSED_PROMPTS = {
    "alpaca, whose prompt follows the question at once": "{% for m in messages %}"
    "{{ '### ' + ('Response' if m.role == 'assistant' else 'Instruction') + ':\n' + m.content | trim }}{{ '\n\n' if not loop.last }}{% endfor %}"
    "{{ '### Response:\n' if add_generation_prompt }}",
    "inkbot, the same with tags": "<#chat#>\n{% for m in messages %}{{ '<#bot#>\n' if m.role == 'assistant' else '<#user#>\n' }}{{ m.content }}"
    "{{ '\n' if not loop.last }}{% endfor %}{{ '<#bot#>\n' if add_generation_prompt }}",
    "llama 4, a blank line before the prompt alone": HEADERS + "{{ '\n<|start|>assistant<|header|>' if add_generation_prompt }}",
    "deepseek 3.1, other blanks before the prompt": "{% for m in messages %}{{ ('   <|Assistant|> </think> ' if m.role == 'assistant' else '<|User|>') }}"
    "{{ m.content + ('<|end|>' if m.role == 'assistant' else '') }}{% endfor %}{{ ' <|Assistant|><think>' if add_generation_prompt }}",
    "command r plus, a system turn before the prompt": HEADERS
    + "{{ '<|start|>system<|header|>Call a tool.<|end|>' }}{{ '<|start|>assistant<|header|>' if add_generation_prompt }}",
    "another header in the prompt": HEADERS + "{{ '<|start|>assistant<|tail|>' if add_generation_prompt }}",
}


@pytest.mark.parametrize("name", REFUSED_PROMPTS)
def test_a_prompt_that_is_not_how_the_turns_begin_is_refused(name, kind):
    specials = ("<|start|>", "<|header|>", "<|end|>", "<|tail|>", "<|User|>", "<|Assistant|>")
    for messages in (turns("Two?", "2, of course.", "Three?", "3"), turns("Two?", "2"), turns("Two?", "2", "Three?", "3", system="Count.")):
        template = Template(tokenizer_with(kind, REFUSED_PROMPTS[name], specials))
        with pytest.raises(TemplateRefused, match="the generation prompt is not how the template begins the assistant's turns"):
            template.encode(messages)


BLIP = (
    "{% for m in messages %}{{ ('Answer: ' if m.role == 'assistant' else 'Question: ') + m.content + ' ' }}{% endfor %}"
    "{{ 'Answer:' if add_generation_prompt }}"
)
LLAVA = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' ' }}{% endgeneration %}"
    "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}{{ 'ASSISTANT:' if add_generation_prompt }}"
)


def merging_tokenizer(template):
    """Bytes, and the tokens ` Q`, ` U`, `eQ` and `:(`, which cross the edges of turns."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = tokenizer_with("bytes", template)
    merges = [("Ġ", "Q"), ("Ġ", "U"), ("e", "Q"), (":", "(")]
    symbols = [symbol for symbol in tokenizer.get_vocab() if len(symbol) == 1]
    vocab = {symbol: i for i, symbol in enumerate([*symbols, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        tokenizer.backend_tokenizer.decoder,
    )
    merged = type(tokenizer)(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    merged.chat_template = template
    return merged


@pytest.mark.parametrize(("text", "wanted"), [(BLIP, [" three", " five "]), (LLAVA, ["three", "five "])])
def test_a_blank_that_begins_the_next_header_is_not_the_assistants(text, wanted):
    tokenizer = merging_tokenizer(text)
    ids, mask = Template(tokenizer).encode(turns("Two?", "three", "Four?", "five"))
    assert {" Q", " U"} & {tokenizer.decode([token]) for token in ids}
    assert supervised_texts(tokenizer, ids, mask) == wanted


def test_a_token_across_words_of_two_turns_is_refused():
    without_blank = BLIP.replace("m.content + ' '", "m.content")
    messages = turns("Two?", "three", "Four?", "five")
    with pytest.raises(Unusable, match="a token reaches across the edge"):
        Template(merging_tokenizer(without_blank)).encode(messages)
    template = Template(merging_tokenizer(BLIP.replace("'Answer: '", "'Answer:'")))
    assert supervised_texts(template.tokenizer, *template.encode(messages)) == ["three", "five "]
    with pytest.raises(Unusable, match="a token reaches across the edge"):
        template.encode(turns("Two?", "(three)", "Four?", "five"))


def test_decoding_that_stops_at_the_beginning_of_a_turn_is_refused():
    text = CHATML.replace("{{ m.content }}", "{% if m.role == 'assistant' %}</s>{% endif %}{{ m.content }}")
    with pytest.raises(TemplateRefused, match="the assistant's turns begin with </s>, at which decoding stops"):
        Template(tokenizer_with("bytes", text, IM)).encode(turns("Two?", "2"))


def test_the_first_reason_is_kept():
    """The form of tool calls that is tried second fails in its own way, which says nothing to the user."""
    messages = [*turns("Sum?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    joined = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    template = Template(tokenizer_with("bytes", joined, IM))
    for call in (template.encode, template.prompt):
        with pytest.raises(Unusable) as caught:
            call(messages)
        assert caught.value.reason == "the template does not write its tool calls"
    refusing = Template(tokenizer_with("bytes", "{{ raise_exception('no tools: ' + (messages[1].content is none) | string) }}", IM))
    for call in (refusing.encode, refusing.prompt):
        with pytest.raises(Unusable, match="no tools: False"):
            call(messages)


REFUSED = {
    "uppercase": "{% for m in messages %}{{ '[' + m.role + ']' + m.content | upper + '\n' }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}",
    "hash": "{% for m in messages %}{{ '[' + m.role + ']' }}{{ m.content | length }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}",
    "no assistant": "{% for m in messages if m.role == 'user' %}{{ 'U: ' + m.content }}{% endfor %}{{ 'A: ' if add_generation_prompt }}",
    "reversed turns": "{% for m in messages | reverse %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}",
    "reversed words": "{% for m in messages %}{{ m.role + ': ' + m.content | reverse + '\n' }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}",
    "cut short": "{% for m in messages %}{{ m.role + ': ' + m.content[:20] + '\n' }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}",
    "turns counted": "{{ messages | length }}" + CHATML.replace("{{ m.content }}", "{{ messages | length }}"),
    "words twice": CHATML.replace("{{ m.content }}", "{{ m.content }}{{ messages | length }}") + "{{ messages[1].content }}",
    "marks the wrong turns": CHATML.replace("{{ m.content }}", "{% generation %}{{ messages[0].content }}{% endgeneration %}"),
    "not Jinja": "{% for m in messages %}{{ m.content }",
    "an unknown prompt": CHATML.replace("<|im_start|>assistant\n{% endif %}", "Now go on!{% endif %}").replace(
        "{{ m.content }}", "{{ messages|length }}{{ m.content }}"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_templates_are_refused_by_name(name):
    template = Template(tokenizer_with("bytes", REFUSED[name], IM, name="some/model"))
    with pytest.raises(TemplateRefused, match="the chat template of 'some/model' gives no loss mask: .*; ") as caught:
        template.encode(turns("Two?", "Two? The number after 1, of course.", "Three?", "Three? 3"))
    with pytest.raises(TemplateRefused):
        template.encode(turns("", "Two? The number after 1, of course.", "", "Three? 3"))
    assert "\n" not in str(caught.value)


def test_no_template_and_no_offsets():
    with pytest.raises(
        TemplateRefused, match="'its/name' gives no loss mask: there is no template.*; set data.template to a file"
    ) as caught:
        Template(tokenizer_with("bytes", None))
    assert "\n" not in str(caught.value)
    slow = tokenizer_with("bytes", CHATML)
    slow.__class__ = type("Slow", (type(slow),), {"is_fast": False})
    with pytest.raises(TemplateRefused, match="'its/name' gives no loss mask: its tokens carry no character offsets"):
        Template(slow)


def test_templates_by_name():
    tokenizer = tokenizer_with("bytes", {"default": CHATML, "tool_use": HERMES}, IM)
    template = Template(tokenizer)
    assert supervised_texts(tokenizer, *template.encode(turns("Two?", "2"))) == ["2<|im_end|>"]
    assert supervised_texts(tokenizer, *template.encode(CALLING, TOOLS))[-1] == "It is.<|im_end|>"
    with pytest.raises(Unusable, match="does not write its tool calls"):
        template.encode(CALLING)
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(TemplateRefused, match="several templates and none is the default"):
        Template(tokenizer).encode(turns("Two?", "2"))


@pytest.mark.parametrize("result", ["2", "", "a<|outputs_end|>b"])
def test_a_prompt_that_the_template_forgets_after_a_result(result):
    """DeepSeek's own template closes the results where it asks for a turn, but not where that turn calls again."""
    forgetful = DEEPSEEK.replace("'<|outputs_end|>' if tool else ", "")
    tokenizer = tokenizer_with("bytes", forgetful, CHAT_TEMPLATES["deepseek r1, whose history has no reasoning"].specials)
    messages = [*CALLING[:4], {**CALLING[4], "content": result}, *CALLING[5:]]
    with pytest.raises(Unusable, match="the generation prompt is not how the template begins"):
        Template(tokenizer).encode(messages)
    assert supervised_texts(tokenizer, *Template(tokenizer, last_turn=True).encode(messages)) == ["It is.<|eos|>"]


def test_a_function_that_is_named_again_beside_its_result():
    name = "(messages[loop.index0 - 1].tool_calls[0].function.name + ': ' if messages[loop.index0 - 1].tool_calls else '')"
    tokenizer = tokenizer_with("bytes", QWEN3.replace("<tool_response>\\n' + content", f"<tool_response>\\n' + {name} + content"), IM)
    ids, mask = Template(tokenizer).encode(CALLING, TOOLS)
    assert "<tool_response>\nadd: 1ü" in tokenizer.decode(ids)
    assert supervised_texts(tokenizer, ids, mask) == TOOL_TEMPLATES["qwen"][2]


UNUSABLE = {
    "no messages": [],
    "no assistant turn": turns("Two?"),
    "the assistant says nothing": turns("Two?", " "),
    "a message is not an object with a role": [*turns("Two?"), "2"],
    "a message is not an object with a role ": [*turns("Two?"), {"content": "2"}],
    "the content of a turn of role 'assistant' is not text": [*turns("Two?"), {"role": "assistant", "content": 2}],
    "the content of a turn of role 'user' is not text": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, *turns("", "2")],
    "the content of a turn of role 'user' is not text ": [{"role": "user", "content": None}, *turns("", "2")],
    "a tool call is not an object with a name": [*turns("Two?"), {"role": "assistant", "tool_calls": [{"function": "add"}]}],
    "it is not valid Unicode (half of a surrogate pair)": turns("Two?", "2 \ud83d"),
    "it is not valid Unicode (half of a surrogate pair) ": turns("Two \ud83d?", "2"),
    "the template refuses it: Conversation roles must alternate user/assistant/user/assistant/...": turns("Two?", "2")[::-1],
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_a_bad_conversation_gives_its_reason(reason):
    template = Template(tokenizer_with("bytes", CHAT_TEMPLATES["mistral without system"].template))
    with pytest.raises(Unusable) as caught:
        template.encode(UNUSABLE[reason])
    assert caught.value.reason == reason.strip() and "\n" not in str(caught.value)
    assert template.encode(turns("Two?", "2"))[1].count(True) == len(" 2</s>") - 3


def test_templates_that_fail_within_python():
    for broken in ("{{ messages[1].content + 1 }}", "{{ 1 / 0 }}", "{{ messages[7].content.strip() }}", "{{ messages.nothing() }}"):
        template = Template(tokenizer_with("bytes", broken + CHATML, IM))
        for call in (template.encode, template.prompt):
            with pytest.raises(Unusable, match="the template refuses it: "):
                call(turns("Two?", "2"))


def test_a_sound_template_is_not_blamed_for_one_conversation():
    odd = CHATML.replace("{{ m.content }}", "{{ m.content | replace('cat', 'dog') }}")
    template = Template(tokenizer_with("bytes", odd, IM))
    with pytest.raises(Unusable) as caught:
        template.encode(turns("Which?", "a cat"))
    assert caught.value.reason == "the template does not write what the assistant says"
    assert any(template.encode(turns("Which?", "a dog"))[1])


def sentencepiece():
    """A tokenizer that writes blanks as `▁`, puts one before each text between special tokens, and falls back to bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("▁", "T"), ("▁T", "w"), ("▁Tw", "o"), ("▁", "2"), ("▁", "▁"), ("y", "e"), ("▁", "ye"), ("▁ye", "s")]
    vocab = {symbol: i for i, symbol in enumerate([*symbols, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_tokens_in_the_manner_of_sentencepiece(name):
    chat, tokenizer = CHAT_TEMPLATES[name], sentencepiece()
    tokenizer.add_special_tokens({"additional_special_tokens": [*chat.specials]})
    tokenizer.chat_template = chat.template
    for case, messages in conversations(chat):
        got = supervised_texts(tokenizer, *Template(tokenizer).encode(messages))
        assert ["".join(text.split()) for text in got] == ["".join(text.split()) for text in expected(chat, messages)], case


def test_a_call_with_broken_arguments_is_written_as_it_is():
    messages = [*turns("Add"), {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": '}}]}]
    tokenizer = tokenizer_with("bytes", QWEN3, IM)
    wanted = '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": }\n</tool_call><|im_end|>'
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == [wanted]


@pytest.mark.parametrize("trim", [False, True])
def test_offsets_without_the_blanks_before_a_word(trim):
    from tokenizers import processors

    chat = CHAT_TEMPLATES["vicuna"]
    tokenizer = tokenizer_with("bpe", chat.template)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    messages = turns("Two?", " 2, of  course. \n\n", "Three?", "three")
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(messages)) == expected(chat, messages)


def test_blanks_that_end_the_prompt_are_not_the_assistants():
    from tokenizers import processors

    tokenizer = tokenizer_with(
        "bpe", "{% for m in messages %}[{{ m.role }}]  {{ m.content }}</s>{% endfor %}{{ '[assistant]  ' if add_generation_prompt }}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    ids, mask = Template(tokenizer).encode(turns("Two?", "\n2"))
    assert supervised_texts(tokenizer, ids, mask) == ["\n2</s>"]


def test_added_tokens_of_blanks_end_no_turn():
    tokenizer = tokenizer_with("bytes", CHATML, (*IM, "\n", "\n\n"))
    assert supervised_texts(tokenizer, *Template(tokenizer).encode(turns("Two?", "2\n\n", "Three?", "3"))) == [
        "2\n\n<|im_end|>",
        "3<|im_end|>",
    ]


def test_the_first_token_is_not_doubled():
    from tokenizers import processors

    chat = CHAT_TEMPLATES["llama 3"]
    tokenizer = tokenizer_with("bytes", chat.template, chat.specials)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert tokenizer("a")["input_ids"][0] == bos
    template = Template(tokenizer)
    for ids in (template.encode(turns("Two?", "2"))[0], template.prompt(turns("Two?"))):
        assert ids[0] == bos and ids.count(bos) == 1


def test_a_token_across_the_end_of_the_prompt_is_the_assistants():
    chat = CHAT_TEMPLATES["a generation prompt that ends in a blank"]
    tokenizer = tokenizer_with("bpe", chat.template)
    ids, mask = Template(tokenizer).encode(turns("Two?", "three", "Four?", "five"))
    assert supervised_texts(tokenizer, ids, mask) == [" three</s>", " five</s>"]


def test_each_prefix_is_rendered_once(monkeypatch):
    from draftsmith.data import chat

    calls, render = [], chat.render

    def counted(source, messages, *rest):
        calls.append(len(messages))
        return render(source, messages, *rest)

    monkeypatch.setattr(chat, "render", counted)
    template = Template(tokenizer_with("bytes", CHATML, IM))
    template.encode(turns("a", "b"))
    calls.clear()
    template.encode(turns(*"abcdefghijklmnopqrst"))
    assert sorted(calls) == sorted([20, *range(1, 21)])


@pytest.mark.parametrize("name", ["chatml", "qwen 3, an empty block for the last turn", "llama 2, system in the first user turn"])
def test_real_conversations(name):
    path = CHATS / "valid.jsonl.gz"
    if not path.is_file():
        pytest.skip("no shared data")
    chat = CHAT_TEMPLATES[name]
    tokenizer = tokenizer_with("bpe", chat.template, chat.specials)
    template, count = Template(tokenizer), 0
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in list(lines)[:400]:
            messages = json.loads(line)["messages"]
            ids, mask = template.encode(messages)
            assert agree(tokenizer, supervised_runs(ids, mask), expected(chat, messages))
            count += 1
    assert count == 400


@pytest.mark.parametrize("role", ["developer", "critic"])
def test_a_turn_that_the_template_leaves_out_is_not_answered(role):
    messages = [*turns("Two?", "2"), {"role": role, "content": "Speak in rhymes."}, *turns("Three?", "3")]
    with pytest.raises(Unusable, match=f"the template leaves out what the {role} says"):
        Template(tokenizer_with("bytes", QWEN3, IM)).encode(messages)
    ids, mask = Template(chatml := tokenizer_with("bytes", CHATML, IM)).encode(messages)
    assert "Speak in rhymes." in chatml.decode(ids) and sum(map(len, supervised_texts(chatml, ids, mask))) > 2
