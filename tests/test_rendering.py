"""Chat templates in their own process: the texts are transformers' own, nothing takes for ever, and a bad template spoils no other command."""

import json
import multiprocessing
import os
import pickle
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from chat_templates import CHAT_TEMPLATES, CHATML, IM
from commands import failing
from conftest import byte_tokenizer, save_byte_target
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.data.chat import Template, TemplateRefused, Unusable
from draftsmith.data.prompts import Prompt
from draftsmith.eval import generate, loading
from draftsmith.inference.errors import exit_on_error
from draftsmith.models import rendering
from draftsmith.models.rendering import RenderingFailed, render
from draftsmith.models.target import Target
from draftsmith.models.turn_end import stop_token

QUESTION = [{"role": "user", "content": "Two?"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDLESS = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
}
HUGE = {
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a power": "{{ 10 ** 10 ** 9 }}{{ 7 ** (10 ** 9) }}",
    "a list": "{% set l = [0] * 10 ** 9 %}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
    "doubling in a block": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}{% endfor %}",
    "a filter": "{{ 'x' | center(10 ** 10) }}",
    "a method": "{{ 'x'.ljust(10 ** 10) }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "replacing": "{% set s = ('x' * 10 ** 5).replace('x', 'x' * 10 ** 5) %}{{ s | length }}",
    "a long text": "{{ 'x' * 3000000 }}",
}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_texts_are_those_of_transformers(name):
    chat = CHAT_TEMPLATES[name]
    messages = [*QUESTION, {"role": "assistant", "content": "<think>\n1 + 1\n</think>\n\n2 {{ it }} 🦊"}, *QUESTION]
    for prompt in (False, True):
        for turns in (messages[:1], messages[:2], messages):
            marks = "generation" in chat.template
            options = {"chat_template": chat.template, "return_assistant_tokens_mask": marks, "add_generation_prompt": prompt, **TOKENS}
            texts, spans = render_jinja_template([turns], **options)
            assert render(chat.template, turns, TOKENS, prompt=prompt) == (texts[0], spans[0] if marks else [])


def test_what_templates_use_is_there():
    text = """{% set ns = namespace(self=1, n=0) %}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}
{%- endfor %}{{ ns.n }}{{ dict(a=1) | tojson }}{{ {'b': 'ü<'} | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}{{ m is defined }}
{{- dict.fromkeys(['k']) }}{{ strftime_now('%Y') | length }}{{ messages[0] | dictsort }}{{ bos_token }}
   {% generation %}marked{% endgeneration %}
"""
    messages = [{**QUESTION[0], "thinking": "deep"}] * 2
    texts, spans = render_jinja_template([messages], chat_template=text, return_assistant_tokens_mask=True, **TOKENS)
    if "reasoning_content" in texts[0]:  # transformers 5.23 gives it to templates, 5.17 did not
        assert render(text, messages, TOKENS) == (texts[0], spans[0])
    rendered, marked = render(text, messages, TOKENS)
    assert "('reasoning_content', 'deep')" in rendered and [rendered[slice(*span)] for span in marked] == ["marked"]


def test_today_is_the_same_every_day():
    """What a drafter learns from, and what an evaluation goes on with, would else be other text tomorrow."""
    assert render("{{ strftime_now('%d %b %Y') }}", QUESTION, {})[0] == "26 Jul 2024"


def test_values_that_are_no_json_and_halves_of_characters():
    messages = [{"role": "user", "content": "\ud83d", "when": object(), "pair": (1, 2), "raw": b"x"}]
    assert render("{{ messages[0].content }}{{ messages[0].when }}{{ messages[0].pair }}{{ messages[0].raw }}", messages, {})[0] == (
        "\ud83d<object>[1, 2]<bytes>"
    )
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RenderingFailed, match="nested too deeply"):
        render(CHATML, [{"role": "user", "content": "", "deep": deep}], {})
    while deep:  # freed step by step: a long chain would use up the stack
        deep = deep.pop()


@pytest.mark.parametrize("name", HUGE)
def test_no_template_takes_all_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RenderingFailed) as caught:
        render(HUGE[name], QUESTION, {})
    assert caught.value.kind in ("limits", "refused") and "\n" not in str(caught.value) and str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB; the memory was another process's
    assert render("{{ messages[0].content }}", QUESTION, {}) == ("Two?", [])


@pytest.mark.parametrize("name", ENDLESS)
def test_no_template_takes_for_ever(name, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ENDLESS[name] + CHATML
    template = Template(tokenizer)
    with pytest.raises(TemplateRefused, match="rendering takes more than 2 s, or 0.1 s each time; take another template"):
        template.encode([*QUESTION, {"role": "assistant", "content": "2"}])
    ended = rendering._renderer.process
    for call in (template.encode, template.prompt):
        with pytest.raises(TemplateRefused, match="rendering takes more than 2 s"):
            call([*QUESTION, {"role": "assistant", "content": "2"}])
    assert rendering._renderer.process is ended  # it was not tried again


def test_many_slow_renderings_end_as_well():
    slow = "{% for i in range(1000) %}{% for j in range(1000) %}{% if i == j %}{% endif %}{% endfor %}{% endfor %}"
    count = 0
    with pytest.raises(RenderingFailed, match="or 0.1 s each time"):
        for _ in range(40):
            render(slow * 8, QUESTION, {})
            count += 1
    assert count > 1


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch mark') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.fromkeys.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ [].append(1) }}",
        "{{ messages.clear() }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10 ** 9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_the_sandbox_holds(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        assert render(text, QUESTION, {})[0] == ""  # Jinja prints an attribute that it hides as nothing
    except RenderingFailed as error:
        assert error.kind == "refused"
    assert not list(tmp_path.iterdir())


def test_threads_and_forks_do_not_mix_their_texts():
    texts = [f"conversation {i} " * 50 for i in range(200)]

    def rendered(text):
        return render("{{ messages[0].content }}", [{"role": "user", "content": text}], {})[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(rendered, texts)) == texts
    process = rendering._renderer.process
    if "fork" in multiprocessing.get_all_start_methods():
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, str(rendering._renderer.process is None and rendered("child") == "child").encode())
            rendering._renderer.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 10) == b"True"
        os.close(reading), os.close(writing)
    assert rendered("parent") == "parent" and rendering._renderer.process is process


def test_an_interrupted_thread_leaves_no_answer_behind(monkeypatch):
    def interrupted(process, request):
        process.stdin.write(request)
        process.stdin.flush()
        raise KeyboardInterrupt

    render("old", QUESTION, {})
    with monkeypatch.context() as patch:
        patch.setattr(rendering._renderer, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render("old", QUESTION, {})
    assert render("new", QUESTION, {})[0] == "new" and not rendering._renderer.lock.locked()


def test_a_template_travels_to_a_worker():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    messages = [*QUESTION, {"role": "assistant", "content": "2"}]
    template = Template(tokenizer)
    assert pickle.loads(pickle.dumps(template)).encode(messages) == template.encode(messages)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(template.encode(messages)))
    thread.start()
    thread.join()
    assert answers == [template.encode(messages)]


STOPS = {
    "chatml": "<|im_end|>",
    "the end is left out of a last turn": "<|im_end|>",
    "apertus, whose roles have tokens of their own and whose last turn no end": "<|assistant_end|>",
    "kimi k3, whose tags are three tokens": "<|end_of_msg|>",
    "command r7b, whose generation prompt is always there": "<|END_OF_TURN_TOKEN|>",
    "toolace, llama 3 whose generation prompt is always there": "<|eot_id|>",
    "phi 4 mini, where the closing follows at once": "<|end|>",
    "harmony, whose last turn ends otherwise": "<|return|>",
    "metharme, where only the last turn has an end": "</s>",
    "glm, where the next role ends a turn": None,
    "plain text": None,
}


@pytest.mark.parametrize("name", STOPS)
def test_decoding_stops_at_the_last_token_of_a_turn(name):
    chat, tokenizer = CHAT_TEMPLATES[name], byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": [*chat.specials]})
    tokenizer.chat_template = chat.template
    stop = stop_token(tokenizer)
    assert (None if stop is None else tokenizer.convert_ids_to_tokens(stop)) == STOPS[name]


def test_a_token_that_turns_begin_with_stops_nothing():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|close|>", "<|sep|>"]})
    tokenizer.chat_template = CHATML.replace("{{ m.content }}<|im_end|>", "<|close|>think<|sep|>{{ m.content }}<|close|>text<|sep|>")
    assert stop_token(tokenizer) is None


BROKEN = {
    "TypeError": "{{ messages[0].content + 1 }}",
    "UndefinedError": "{{ messages[7].content.strip() }}",
    "ZeroDivisionError": "{{ 1 / 0 }}",
    "KeyError": "{{ '%(x)s' % {} }}",
    "ValueError": "{{ '{'.format() }}",
    "RecursionError": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "OverflowError": "{{ range(10 ** 9) }}",
    "TemplateError": "{{ raise_exception('never') }}",
    "TemplateSyntaxError": "{% for",
    "SyntaxError": "{% if 1 %}" * 120 + "{% endif %}" * 120,
    "memory": "{{ 'x' * 10 ** 10 }}",
    "named": {"rag": CHATML},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    save_byte_target(folder)
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_no_matter_where_none_is_asked_for(name, target, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = BROKEN[name]
    tokenizer.save_pretrained(target)
    assert stop_token(tokenizer) is None
    exit_on_error(generate.main, ["--target", str(target), "--max-new-tokens", "2", "def"])
    assert "error" not in capsys.readouterr().err
    line = failing(capsys, generate.main, ["--target", target, "--chat", "--max-new-tokens", "2", "def"])
    assert "prompt 'prompt': the chat template of" in line and "does not write it (" in line and len(line) < 500


def test_prompts_with_and_without_messages(target):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*IM]})
    tokenizer.chat_template = BROKEN["TypeError"]
    model = SimpleNamespace(require_tokenizer=lambda: tokenizer, name="its/name")
    assert loading.encode(model, Prompt("1", "all", "def")) == tokenizer.encode("def")
    with pytest.raises(ValueError, match="prompt '2': the chat template of 'its/name' does not write it .*can only concatenate str"):
        loading.encode(model, Prompt("2", "all", "Two?", tuple(QUESTION)))
    tokenizer.chat_template = CHATML
    wanted = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(loading.encode(model, Prompt("2", "all", "Two?", tuple(QUESTION)))) == wanted
    with pytest.raises(Unusable):
        Template(tokenizer).prompt([])


def test_the_end_of_turn_of_a_target(tmp_path):
    save_byte_target(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*IM]})
    tokenizer.chat_template = CHAT_TEMPLATES["the end is left out of a last turn"].template
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"]}))
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in Target.load(str(tmp_path)).stop_ids
