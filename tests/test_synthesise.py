"""Synthetic conversations are what the target writes alone, whatever stops the run; what is no conversation is dropped and counted."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from chat_templates import CHAT_TEMPLATES, CHATML
from conftest import byte_tokenizer
from regeneration import Disk, Stub, make_target, refused, rows_of, without_waits

from draftsmith.data import openings, selection, shared_decoding, synthesise
from draftsmith.data.candidate import Candidate
from draftsmith.data.conversations import Source, read
from draftsmith.data.openings import Opening
from draftsmith.data.question_prompt import NoQuestionPrompt, QuestionTemplate
from draftsmith.data.regenerate import Settings, noise_key
from draftsmith.data.selection import Plan, Selection, Summary
from draftsmith.data.synthesise import with_decoder, with_server
from draftsmith.inference.decoder import Decoder
from draftsmith.models.target import Target

OPENINGS = (Opening("Why is the", domain="why"), Opening(system="Be brief.", domain="brief"), Opening("Write about", "Rhyme.", "verse"))
QUESTIONS = Settings(temperature=1.0, seed=3, max_new_tokens=24)
PLAN = Plan(8, OPENINGS, QUESTIONS, Settings(temperature=0.8, seed=3, max_new_tokens=12))


@pytest.fixture(scope="module")
def target():
    """Most of its questions end within 24 tokens."""
    target = make_target()
    with torch.no_grad():
        target.model.lm_head.weight[target.tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 1.6
    return target


@pytest.fixture
def small_groups(monkeypatch):
    for module in (synthesise, shared_decoding):  # in order: a server, our own decoder
        monkeypatch.setattr(module, "GROUP", 5)


def with_template(template, *specials):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": [*specials]})
    tokenizer.chat_template, tokenizer.name_or_path = template, "its/name"
    return tokenizer


# What stands before the first words and after them; the last is "" where the end is text.
AROUND = {
    "chatml with a default system prompt": ("<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n", "<|im_end|>", True),
    "llama 3": ("<s><|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>", True),
    "mistral without system": ("<s>[INST]", "[/INST]", False),
    "mistral, system in the last user turn": ("<s>[INST]", "[/INST]", True),
    "gemma": ("<s><start_of_turn>user\n", "<end_of_turn>", True),
    "qwen 3, an empty block for the last turn": ("<|im_start|>user\n", "<|im_end|>", True),
    "zephyr": ("<|user|>\n", "</s>", True),
    "glm, where the next role ends a turn": ("<|user|>\n", "<|assistant|>", True),
    "deepseek r1, whose history has no reasoning": ("<s><|User|>", "<|Assistant|>", True),
    "plain text": ("### Instruction:\n", "### Response:", False),
    "vicuna": ("A chat. USER:", "ASSISTANT:", False),
}


@pytest.mark.parametrize("name", AROUND)
def test_the_text_around_the_users_words_is_read_from_the_template(name):
    chat = CHAT_TEMPLATES[name]
    template = QuestionTemplate(with_template(chat.template, *chat.specials))
    before, end, special = AROUND[name]
    assert (template.prompt.before, template.prompt.end) == (before, end)
    assert template.prompt.end_id == (template.tokenizer.convert_tokens_to_ids(end) if special else None)
    assert end in template.turn_tokens


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_every_template_prompts_first_and_later_questions_as_it_writes_them(name):
    chat = CHAT_TEMPLATES[name]
    tokenizer = with_template(chat.template, *chat.specials)
    template = QuestionTemplate(tokenizer)
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    for messages in ([], earlier, *([[{"role": "system", "content": "Count."}]] if chat.system else [])):
        asked = template.after(messages)
        turns = [*messages, {"role": "user", "content": "What is it?"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        rest = text.removeprefix(asked.before)
        assert rest != text and rest.lstrip().startswith("What is it?")
        assert rest.partition("What is it?")[2].lstrip().startswith(asked.end)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "there is none"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "nowhere"),
        ("{% for m in messages %}{{ m.content | upper | replace('ASK', 'x') }}{% endfor %}", "nowhere, or alters them"),
        ("{% for m in messages %}{{ m.content }} {{ m.content }}!{% endfor %}", "twice"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "nothing after the user's words"),
        ("{{ raise_exception('not today') }}", "not today"),
        ("{% for m in messages %}", "end of template"),
    ],
)
def test_a_template_that_prompts_no_question_is_refused_by_name(template, says, target, tmp_path):
    with pytest.raises(NoQuestionPrompt, match=f"'its/name' prompts no question: .*{says}.*; take another target") as error:
        QuestionTemplate(with_template(template))
    assert "\n" not in str(error.value)
    if template:
        other = Target.wrap(target.model, with_template(template), "other")
        refused(tmp_path / "out", says, lambda: with_decoder(PLAN, tmp_path / "out", other, show=False))
        assert not (tmp_path / "out").exists()


def test_a_system_prompt_that_the_template_refuses_or_drops_is_an_error(target, tmp_path):
    for name, says in (("gemma", "System role not supported"), ("mistral without system", "roles must alternate")):
        other = Target.wrap(target.model, with_template(CHAT_TEMPLATES[name].template), "other")
        with pytest.raises(ValueError, match=f"'Be brief.': .*{says}.*leave `system` out"):
            with_decoder(PLAN, tmp_path / "out", other, show=False)
    drops = "{% for m in messages if m.role != 'system' %}<q>{{ m.content }}<a>{% endfor %}"
    other = Target.wrap(target.model, with_template(drops), "other")
    refused(tmp_path / "out", "does not write it; leave `system` out", lambda: with_decoder(PLAN, tmp_path / "out", other, show=False))


def by_hand(target, plan: Plan, number: int) -> Candidate:
    """A candidate, each of its texts decoded alone, after prompts that are written out here."""
    opening = plan.openings[number % len(plan.openings)]
    candidate = Candidate(f"synthetic-{number:07}", opening, plan.turns, QuestionTemplate(target.tokenizer))
    tokenizer, decoder = target.tokenizer, Decoder(target)
    while not candidate.ended:
        shown = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in candidate.messages)
        for part, settings in (("question", plan.questions), ("answer", plan.answers)):
            if candidate.ended:
                break
            if part == "question":
                prompt = shown + "<|im_start|>user\n" + ("" if candidate.turn else opening.text)
                candidate.ask()
            else:
                prompt = shown + f"<|im_start|>user\n{candidate.messages[-1]['content']}<|im_end|>\n<|im_start|>assistant\n"
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            key = noise_key(candidate.id, candidate.turn, part)
            new = decoder.generate([ids], settings.sampling(), settings.max_new_tokens, requests=[key])[0]
            text = tokenizer.decode(new.tokens[:-1] if new.reason == "stop" else new.tokens).rstrip("�" if new.reason != "stop" else "")
            candidate.new_tokens.append(len(new.tokens))
            if part == "question":
                candidate.add_question(text, new.reason)
            else:
                candidate.add_answer({"content": text}, "stop" if new.reason == "stop" else "length")
    return candidate


@pytest.mark.parametrize("turns", [1, 2])
def test_every_row_is_what_the_target_writes_alone(target, tmp_path, turns, small_groups):
    plan, out = replace(PLAN, turns=turns), tmp_path / "deep" / "out.jsonl"
    summary = with_decoder(plan, out, target, slots=3, show=False)
    rows = rows_of(out)
    assert len(rows) == summary.rows == summary.new == 8
    expected = [by_hand(target, plan, number) for number in range(summary.candidates)]
    usable = [candidate for candidate in expected if candidate.turn]
    assert [row["id"] for row in rows] == [candidate.id for candidate in usable]
    assert [row["messages"] for row in rows] == [candidate.messages for candidate in usable]
    assert [row["domain"] for row in rows] == [candidate.opening.domain for candidate in usable]
    for row, candidate in zip(rows, usable, strict=True):
        assert row["generation"]["finish_reasons"] == candidate.finish_reasons
        assert row["generation"]["new_tokens"] == candidate.new_tokens[: 2 * candidate.turn]
    assert summary.dropped == Counter(candidate.fault for candidate in expected if not candidate.turn)
    assert summary.shortened == Counter(candidate.fault for candidate in usable if candidate.fault)
    assert summary.dropped.total() >= 2 and (turns == 1 or summary.shortened)
    assert {domain: counts["candidates"] for domain, counts in summary.domains.items()} == Counter(c.opening.domain for c in expected)
    assert max(len(row["generation"]["finish_reasons"]) for row in rows) == turns
    roles = [message["role"] for message in rows[-1]["messages"] if message["role"] != "system"]
    assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_rows_begin_with_their_openings_in_turn_and_are_read_as_data(target, tmp_path):
    out = tmp_path / "out.jsonl"
    with_decoder(PLAN, out, target, show=False)
    for row, conversation in zip(rows_of(out), read(Source(path=str(out))), strict=True):
        opening = OPENINGS[int(row["id"].removeprefix("synthetic-")) % 3]
        messages = row["messages"]
        assert (messages[0] == {"role": "system", "content": opening.system}) == bool(opening.system)
        question = next(message["content"] for message in messages if message["role"] == "user")
        assert question.startswith(opening.text) and len(question) > len(opening.text)
        assert (conversation.id, conversation.domain, conversation.messages) == (row["id"], opening.domain, messages)
    made = rows_of(out)[0]["generation"]
    assert (made["by"], made["target"], made["temperature"], made["questions"]["temperature"]) == ("draftsmith", "tiny-chat", 0.8, 1.0)


def test_neither_slots_nor_where_a_run_was_cut_change_the_file(target, tmp_path, small_groups):
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    first = with_decoder(PLAN, undisturbed, target, slots=1, show=False)
    reference = undisturbed.read_bytes()
    marks = [number for number, row in enumerate(rows_of(undisturbed)) if "so_far" in row["generation"]]
    assert len(marks) >= 2 and marks[-1] == 7
    ends = [place + 1 for place, byte in enumerate(reference) if byte == 10]
    for end in [5, ends[1], ends[marks[0]], ends[marks[0]] + 300, ends[-2], len(reference) - 1]:
        out.write_bytes(reference[:end])
        again = with_decoder(PLAN, out, target, slots=8, show=False)
        assert out.read_bytes() == reference, end
        for name in ("candidates", "dropped", "shortened", "domains"):
            assert getattr(again, name) == getattr(first, name), (end, name)
    out.write_bytes(reference)
    again = with_decoder(PLAN, out, target, show=False)
    assert out.read_bytes() == reference and (again.new, again.tokens) == (0, 0)


def test_a_fault_of_the_disk_at_each_write_and_sync_loses_nothing(target, tmp_path, monkeypatch, small_groups):
    plan = replace(PLAN, conversations=6)
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        with_decoder(plan, tmp_path / "undisturbed", target, show=False)
    assert Counter(disk.calls)["write"] >= 2
    for fail in range(1, len(disk.calls) + 1):
        out = tmp_path / str(fail)
        with monkeypatch.context() as patch:
            Disk(patch, fail, dead=True)
            with pytest.raises(OSError, match="No space left.*same command again"):
                with_decoder(plan, out, target, show=False)
        with_decoder(plan, out, target, show=False)
        assert out.read_bytes() == (tmp_path / "undisturbed").read_bytes()


def test_a_file_is_continued_with_more_conversations_and_left_alone_with_fewer(target, tmp_path):
    out = tmp_path / "out"
    with_decoder(replace(PLAN, conversations=3), out, target, show=False)
    few = out.read_bytes()
    summary = with_decoder(PLAN, out, target, show=False)
    assert out.read_bytes().startswith(few) and (summary.rows, summary.new) == (8, 5)
    with_decoder(PLAN, tmp_path / "at once", target, show=False)
    assert [row["messages"] for row in rows_of(out)] == [row["messages"] for row in rows_of(tmp_path / "at once")]
    assert with_decoder(replace(PLAN, conversations=2), out, target, show=False).rows == 8


def test_an_output_of_another_plan_or_a_changed_one_is_refused(target, tmp_path, small_groups):
    out = tmp_path / "out"
    with_decoder(PLAN, out, target, show=False)
    for plan, says in (
        (replace(PLAN, turns=2), "turns 1, now it is 2"),
        (replace(PLAN, questions=replace(QUESTIONS, min_p=0.1)), "made with questions"),
        (replace(PLAN, openings=OPENINGS[:1]), "made with openings"),
    ):
        refused(out, says, lambda plan=plan: with_decoder(plan, out, target, show=False))
    lines = out.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[-1])

    def changed(**generation):
        return json.dumps(row | {"generation": row["generation"] | generation}).encode() + b"\n"

    for text in (
        lines[1:],
        [*lines[:-2], lines[-1]],
        [*lines[:-1], changed(so_far={"candidates": 10**30, "dropped": {"x": 10**30 - 8}, "shortened": {}})],
        [*lines[:-1], changed(so_far={"candidates": "many", "dropped": {}, "shortened": {}})],
        [*lines[:-1], changed(so_far=3)],
        [*lines[:-1], changed(new_tokens="ab")],
        [*lines[:-1], json.dumps(row | {"domain": "mine"}).encode() + b"\n"],
        [*lines[:-1], json.dumps(row | {"messages": [{"role": "user"}]}).encode() + b"\n"],
    ):
        out.write_bytes(b"".join(text))
        refused(out, "is gone or was changed; give another output", lambda: with_decoder(PLAN, out, target, show=False))


def test_a_target_that_writes_nothing_usable_ends_the_run(target, tmp_path, monkeypatch):
    monkeypatch.setattr(synthesise, "PATIENCE", 9)
    plan = replace(PLAN, questions=replace(QUESTIONS, max_new_tokens=1))
    out = tmp_path / "out"
    refused(
        out, r"only 0 of \d+ candidates can be used \(question cut at its limit: \d+", lambda: with_decoder(plan, out, target, show=False)
    )
    long = replace(PLAN, openings=(Opening("x" * 300),))
    refused(out, "opening 'xxx.*tokens; expected fewer than 256; shorten it", lambda: with_decoder(long, out, target, show=False))


@pytest.mark.parametrize(
    ("opening", "text", "reason", "fault"),
    [
        ("", "  What is a chair?\n", "stop", ""),
        ("What", " is a chair?", "stop", ""),
        ("", "What is a", "length", "question cut at its limit"),
        ("", " \n", "stop", "empty question"),
        ("", "Why?", "stop", "question too short"),
        ("What is the name of", " ", "stop", "question too short"),
        ("", "What is it?<|im_start|>assistant", "stop", "question with turns in it"),
        ("", "What is it?\n\nassistant\nIt is a chair.", "stop", "question with turns in it"),
        ("", "What is it?\nUser: A chair", "stop", "question with turns in it"),
        ("", "What is it?\n**Assistant:**\nIt is a chair.", "stop", "question with turns in it"),
        ("", "What is it?\n[USER]\nA chair", "stop", "question with turns in it"),
        ("", "What is it?\n<|system|>\nBe brief.", "stop", "question with turns in it"),
        ("", "The assistant of the user is human. Why?", "stop", ""),
        ("", 'What is in {\n "user": {\n  "human": 1\n }\n}?', "stop", ""),
        ("", "What has\n<user>\n - System\n| User |\n## System\n  user:\n    name?", "stop", ""),
        ("", "Why is it a chair? " * 9, "length", "question repeats itself"),
    ],
)
def test_degenerate_questions_are_named(opening, text, reason, fault):
    candidate = Candidate("a", Opening(opening), 1, QuestionTemplate(with_template(CHATML, "<|im_start|>", "<|im_end|>")))
    candidate.ask()
    candidate.add_question(text, reason)
    assert candidate.fault == fault and bool(candidate.messages) == (not fault)
    if not fault:
        assert candidate.messages == [{"role": "user", "content": (opening + text).strip()}]


def test_the_end_of_a_question_may_be_text(target):
    template = QuestionTemplate(with_template(CHAT_TEMPLATES["mistral without system"].template))
    for text, fault in (
        ("Why is it so? [/INST] Because", ""),
        ("Why is it so", "question cut at its limit"),
        ("Why [INST] so?[/INST]", "question with turns in it"),
    ):
        candidate = Candidate("a", Opening(), 1, template)
        candidate.ask()
        candidate.add_question(text, "length")
        assert candidate.fault == fault
    assert template.for_server(template.prompt.before) == "<s>[INST]", "this tokenizer adds no BOS, so the text has it"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("It is a chair.", ""),
        (" \n", "empty answer"),
        ("It is.\nHuman: So?", "answer with turns in it"),
        ("a chair, " * 30, "answer repeats itself"),
    ],
)
def test_degenerate_answers_are_named_and_cut_ones_stay(content, fault):
    template = QuestionTemplate(with_template(CHATML, "<|im_start|>", "<|im_end|>"))
    for reason, turns in (("stop", 1), ("length", 1), ("length", 2)):
        candidate = Candidate("a", Opening(), turns, template)
        candidate.ask()
        candidate.add_question("What is this?", "stop")
        candidate.add_answer({"content": content}, reason)
        assert candidate.fault == (fault or ("answer cut at its limit" if turns == 2 else ""))
        assert [message["role"] for message in candidate.messages] == ([] if fault else ["user", "assistant"])
        if not fault:
            assert candidate.messages[-1].get("finish_reason") == ("length" if reason == "length" else None)


def test_duplicates_and_evaluation_prompts_are_dropped_by_their_questions(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "How many eggs does the old duck lay in a week?"}) + "\n")
    chosen = Selection(replace(PLAN, exclude=(str(file),)))

    def reason(question, answer):
        return chosen.reason([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])

    long = "Tell me how a bridge of steel is built over a wide river, and what it costs each year to keep it safe for cars and trains"
    assert reason(long, "So.") == reason("Who was the first king of Spain?", "One.") == ""
    assert reason("who was the first king of SPAIN", "Another answer.") == "exact duplicate"
    assert reason(long + ", please", "Thus.") == "near duplicate"
    assert reason("How many eggs does the old duck lay in a week?", "Six") == "evaluation prompt: equals an evaluation prompt"
    assert reason("What do you ask?", "Well: how many eggs does the old duck lay in a week?").startswith("evaluation prompt: ")


def test_duplicates_are_dropped_in_order_also_after_a_stop(target, tmp_path, small_groups, monkeypatch):
    """Each question comes three times in a row."""

    def asks(candidate, text, reason):
        number = int(candidate.id.removeprefix("synthetic-")) // 3
        candidate.messages.append({"role": "user", "content": f"Why is {number} not equal to the number {number * number}?"})

    monkeypatch.setattr(Candidate, "add_question", asks)
    monkeypatch.setattr(Candidate, "_repeats", lambda self, text: False)
    monkeypatch.setattr(Candidate, "_has_turns", lambda self, text: False)
    plan, out = replace(PLAN, conversations=5), tmp_path / "out"
    answered = replace(plan, answers=Settings(max_new_tokens=3), openings=(Opening("x"),))
    summary = with_decoder(answered, out, target, show=False)
    reference, numbers = out.read_bytes(), [int(row["id"].removeprefix("synthetic-")) for row in rows_of(out)]
    assert [number // 3 for number in numbers] == [0, 1, 2, 3, 4] and summary.dropped["exact duplicate"] >= 7
    for rows in (1, 2, 3, 4):
        out.write_bytes(b"".join(reference.splitlines(keepends=True)[:rows]))
        assert with_decoder(answered, out, target, show=False).dropped == summary.dropped and out.read_bytes() == reference
    monkeypatch.setattr(synthesise, "USABLE", 1)
    monkeypatch.setattr(synthesise, "PATIENCE", 4)
    few = r"only [1-4] of \d+ candidates can be used \(exact duplicate: \d+.*give openings"
    for _ in range(2):  # what is there stays, and the same command ends in the same way
        refused(tmp_path / "few", few, lambda: with_decoder(answered, tmp_path / "few", target, show=False))


class Writer(Stub):
    """Writes questions where it is prompted for them, each with its seed."""

    def reply(self, path, body, key):
        status, answer, headers, slow = super().reply(path, body, key)
        if "prompt" in body and answer.startswith(b'{"choices"'):
            text = {0: "Hm?", 1: "What is so hot<|im_end|>"}.get(body["seed"] % 5, f" What is the number {body['seed']}?")
            answer = json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]}).encode()
        return status, answer, headers, slow


def test_a_server_writes_questions_and_answers(target, tmp_path, monkeypatch):
    without_waits(monkeypatch)
    plan, out = replace(PLAN, turns=2), tmp_path / "out"
    with Writer(hold=0.0) as stub:

        def run(plan=plan):
            return with_server(plan, out, target.tokenizer, stub.address, "m", concurrency=3, show=False)

        summary = run()
        rows = rows_of(out)
        assert len(rows) == 8 and summary.dropped["question too short"] and summary.dropped["question with turns in it"]
        for row in rows:
            messages = [message["content"] for message in row["messages"] if message["role"] != "system"]
            assert messages[1] == f"answer {len(row['messages']) - len(messages) + 1} to {messages[0]}"
        asked = [body for path, body, _ in stub.asked if path == "/v1/completions"]
        end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert all(body["stop"] == ["<|im_end|>"] and body["stop_token_ids"] == [end] and body["temperature"] == 1.0 for body in asked)
        first = next(body for body in asked if body["seed"] == noise_key("synthetic-0000000", 0, "question", 3) >> 1)
        assert first["prompt"] == "<|im_start|>user\nWhy is the" and first["max_tokens"] == 24
        assert {body["prompt"].count("<|im_start|>user") for body in asked} == {1, 2}
        answers = [body for path, body, _ in stub.asked if path == "/v1/chat/completions"]
        assert all(body["max_tokens"] == 12 and body["temperature"] == 0.8 for body in answers)
        before_it = len(stub.asked)
        with_server(PLAN, tmp_path / "plain", target.tokenizer, stub.address, "m", omit=["stop_token_ids"], show=False)
        assert not any("stop_token_ids" in body for _, body, _ in stub.asked[before_it:]) and len(stub.asked) > before_it
        count = len(stub.asked)
        before = out.read_bytes()
        again = run()
        assert out.read_bytes() == before and len(stub.asked) == count and again.dropped == summary.dropped


def test_a_server_that_fails_costs_candidates_and_one_that_is_gone_ends_the_run(target, tmp_path, monkeypatch):
    without_waits(monkeypatch)
    monkeypatch.setattr(synthesise, "PATIENCE", 40)
    out = tmp_path / "out"

    def run(stub):
        return with_server(replace(PLAN, conversations=5), out, target.tokenizer, stub.address, "m", retries=1, show=False)

    with Stub({"<|im_start|>user\nWhy is the": ["always", "500"]}, hold=0.0) as stub:
        refused(out, "20 conversations failed one after the other|only 0 of", lambda: run(stub))
    with Writer({"<|im_start|>user\nWhy is the": ["500", "500", "long"]}, hold=0.0) as stub:
        summary = run(stub)
    assert summary.rows == 5
    assert summary.dropped["failed at the server"] + summary.dropped["refused by the server"] >= 1


def test_the_openings_that_ship_are_shared_equally_by_the_seven_tasks(tmp_path):
    shipped = openings.load("tasks")
    tasks = ("multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag", "code")
    assert Counter(opening.domain for opening in shipped) == dict.fromkeys(tasks, len(shipped) // 7) and 70 <= len(shipped) <= 140
    assert [opening.domain for opening in shipped[:14]] == [*tasks, *tasks], "a few conversations have all of the tasks"
    assert len({opening.text for opening in shipped}) == len(shipped) and not any(opening.system for opening in shipped)


def test_openings_are_read_from_text_and_from_jsonl(tmp_path):
    (tmp_path / "a.txt").write_text('Why is the\n\n  {"opening": 3}\n')
    assert openings.load(str(tmp_path / "a.txt")) == [Opening("Why is the"), Opening('{"opening": 3}')]
    (tmp_path / "a.jsonl").write_text('"Why is"\n{"system": "Be brief.", "domain": "x"}\n{"opening": "Who "}\n')
    assert openings.load(str(tmp_path / "a.jsonl")) == [Opening("Why is"), Opening("", "Be brief.", "x"), Opening("Who")]
    assert openings.load("none") == [Opening()]


def test_a_summary_is_counted_by_domain():
    summary = Summary()
    summary.add_candidates(PLAN, 2)
    summary.add_candidates(PLAN, 5)
    assert {name: counts["candidates"] for name, counts in summary.domains.items()} == {"why": 3, "brief": 2, "verse": 2}
    assert [selection.NAME.format(3) in selection.Names(), "synthetic-3" in selection.Names(), 3 in selection.Names()] == [
        True,
        False,
        False,
    ]
