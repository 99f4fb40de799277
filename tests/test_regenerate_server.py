"""Regeneration by a server: what is sent, what is tried again, what is refused."""

import json
import time
from collections import Counter

import pytest
from regeneration import CALL, CONVERSATIONS, NEW, ROLES, SAMPLED, TOOLS, Stub, ask, asks, chat, halves, refused, rows_of, without_waits

from draftsmith.data import regenerate, server
from draftsmith.data.conversations import Conversation
from draftsmith.data.regenerate import Settings, with_server


@pytest.fixture
def quick(monkeypatch):
    without_waits(monkeypatch)


def test_a_server_is_asked_turn_by_turn_after_its_own_answers(tmp_path, quick):
    with Stub() as stub:
        summary = ask(stub, tmp_path / "out", CONVERSATIONS)
    assert (summary.rows, summary.new, summary.cut, summary.status) == (8, 8, 0, 0)
    rows = {row["id"]: row for row in rows_of(tmp_path / "out")}
    assert {name: [m["role"] for m in row["messages"]] for name, row in rows.items() if "messages" in row} == ROLES
    assert [m["content"] for m in rows["c9"]["messages"][2::2]] == ["answer 2 to One?", "answer 4 to Two?", "answer 6 to Three?"]
    assert halves(rows["t1"]) == ("def parse_", "answer 0 to def parse_")
    assert "OLD" not in json.dumps([body for _, body, _ in stub.asked])
    last = max((body for _, body, _ in stub.asked if "messages" in body), key=lambda body: len(body["messages"]))
    assert [m["content"] for m in last["messages"]] == [m["content"] for m in rows["c9"]["messages"][:6]]
    assert {path for path, body, _ in stub.asked if "prompt" in body} == {"/v1/completions"}
    assert {path for path, body, _ in stub.asked if "messages" in body} == {"/v1/chat/completions"}
    how = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": NEW, "model": "model"}
    assert all(body.items() >= how.items() for _, body, _ in stub.asked)
    seeds = [body["seed"] for _, body, _ in stub.asked]
    assert len(set(seeds)) == len(seeds) == 13 and all(0 <= seed < 2**31 for seed in seeds)
    tool = next(body for _, body, _ in stub.asked if "tools" in body)
    assert tool["tools"] == TOOLS and tool["tool_choice"] == "none"
    assert tool["messages"][1]["tool_calls"] == [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    assert rows["tool"]["messages"][1] == CALL
    made = rows["b"]["generation"]
    assert made["by"] == stub.address and made["model"] == "model" and made["finish_reasons"] == ["stop", "stop"]


def test_a_text_without_a_prompt_is_cut_at_a_word_for_a_server(tmp_path, quick):
    texts = [Conversation("a", "d", text="one two three"), Conversation("b", "d", text="短い文章です"), Conversation("c", "d", text="  ")]
    with Stub() as stub:
        ask(stub, tmp_path / "out", texts, Settings(prompt_tokens=1))
        ask(stub, tmp_path / "undisturbed", texts, Settings(prompt_tokens=9))
    assert [halves(row)[0] for row in sorted(rows_of(tmp_path / "out"), key=lambda row: row["id"])] == ["one", "短い文章", "  "]
    assert [halves(row)[0] for row in sorted(rows_of(tmp_path / "undisturbed"), key=lambda row: row["id"])] == [text.text for text in texts]
    assert all("seed" not in body for _, body, _ in stub.asked), "a greedy answer has no seed"


def test_fields_that_a_server_refuses_can_be_left_out(tmp_path, quick):
    with Stub() as stub:
        ask(stub, tmp_path / "out", asks(2), Settings(), omit=("top_p", "top_k"))
        assert all(body.keys().isdisjoint({"top_p", "top_k"}) and body["min_p"] == 0.0 for _, body, _ in stub.asked)
        refused(tmp_path / "out", "made with omit", lambda: ask(stub, tmp_path / "out", asks(2), Settings()))


def test_a_flaky_server_gives_each_answer_once_and_never_more_requests_at_a_time(tmp_path, quick):
    faults = {f"Question {n}": [kind] for n, kind in enumerate(("500", "429", "slow", "reset", "broken", "empty", "abort"))}
    faults["Question 8"] = ["500", "reset", "slow", "broken"]
    with Stub(faults, hold=0.03) as stub:
        summary = ask(stub, tmp_path / "out", asks(40), concurrency=4)
    rows = rows_of(tmp_path / "out")
    assert sorted(row["id"] for row in rows) == sorted(source.id for source in asks(40))
    assert all(row["messages"][1]["content"] == f"answer 1 to Question {row['id'][1:]}" for row in rows)
    assert summary.rows == 40 and summary.status == 0
    assert stub.most == 4, "the bound is reached, and kept"
    assert {words: len(times) for words, times in stub.times.items() if len(times) > 1} == {
        **{f"Question {n}": 2 for n in range(7)},
        "Question 8": 5,
    }
    first, second = stub.times["Question 1"]
    assert second - first >= 1.0, "Retry-After counts seconds"


def test_waits_get_longer_and_vary_and_retry_after_is_read_both_ways(quick, monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(server, "FIRST_WAIT", 1.0)
    monkeypatch.setattr(server.asyncio, "sleep", sleep)

    async def run(asked):
        async with asked.connected(1):
            with pytest.raises(server.Failed, match=r"500 engine died \(9 times\)"):
                await asked.post("chat/completions", json.dumps({"messages": [{"content": "x"}]}))

    with Stub({"x": ["always", "500"]}, hold=0) as stub:
        server.asyncio.run(run(server.Server(stub.address, 5.0, 8)))
    tops = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert len(waits) == 8 and all(top / 2 <= wait <= top for wait, top in zip(waits, tops, strict=True))
    assert len({wait / top for wait, top in zip(waits, tops, strict=True)}) == 8, "they shake"
    assert server.seconds_asked("7") == 7.0 and server.seconds_asked("1e9") == 600.0
    assert [server.seconds_asked(value) for value in ("", "soon", "-3", "nan")] == [0.0] * 4
    from email.utils import formatdate

    assert 20 < server.seconds_asked(formatdate(time.time() + 30, usegmt=True)) <= 30


def test_what_failed_for_good_is_reported_and_tried_again_by_the_next_run(tmp_path, quick):
    out = tmp_path / "out"
    with Stub({"Question 2": ["500"] * 3, "Question 4": ["always", "reset"]}) as stub:
        summary = ask(stub, out, asks(6), retries=2, concurrency=2)
        assert set(summary.failed) == {"q2", "q4"} and summary.status == 1 and summary.rows == 4
        assert (
            "500 engine died (3 times)" in summary.failed["q2"]
            and "q4" in summary.report()
            and "2 conversations failed" in summary.report()
        )
        del stub.faults["Question 4"]
        asked = len(stub.asked)
        summary = ask(stub, out, asks(6), retries=2)
        assert (summary.rows, summary.new, summary.status) == (6, 2, 0) and len(stub.asked) == asked + 2
    assert Counter(row["id"] for row in rows_of(out)) == Counter(f"q{n}" for n in range(6))


def test_a_refused_request_stops_with_the_servers_words_and_without_the_key(tmp_path, quick, monkeypatch, capfd):
    secret, out = "sk-very-secret-7", tmp_path / "out"
    monkeypatch.setenv("OPENAI_API_KEY", secret + "\n")
    conversations = asks(30)
    with Stub({"Question 20": ["always", "400"]}) as stub:
        with pytest.raises(ValueError, match=r"chat/completions: 400 no such field: Bearer \*\*\*; correct") as error:
            ask(stub, out, conversations, concurrency=3, show=True)
        assert "\n" not in str(error.value) and secret not in str(error.value)
        assert len(stub.times["Question 20"]) == 1, "it is not repeated"
        assert {key for _, _, key in stub.asked} == {f"Bearer {secret}"}
        assert 10 < len(rows_of(out)) < 30
        stub.faults.clear()
        ask(stub, out, conversations, show=True)
    assert Counter(row["id"] for row in rows_of(out)) == Counter(source.id for source in conversations)
    said = capfd.readouterr()
    assert "regenerating" in said.err and secret not in said.out + said.err and secret.encode() not in out.read_bytes()


def test_a_key_that_no_header_may_hold_is_refused_unread(tmp_path, monkeypatch):
    for key in ("sk-ä", "sk-\u2028a", "sk-a\nb"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ValueError, match=r"the key in \$OPENAI_API_KEY") as error:
            with_server(asks(1), tmp_path / "out", "http://localhost:1/v1", "m", SAMPLED)
        assert key not in str(error.value)


def test_an_address_is_written_without_what_is_secret_in_it(tmp_path, quick):
    with Stub() as stub:
        address = stub.address.replace("http://", "http://user:hidden@")
        with_server(asks(1), tmp_path / "out", address + "/", "m", SAMPLED, show=False)
        assert stub.asked[0][2].startswith("Basic ")
    assert rows_of(tmp_path / "out")[0]["generation"]["by"] == stub.address and b"hidden" not in (tmp_path / "out").read_bytes()


def test_a_server_may_move_but_not_its_model_or_its_settings(tmp_path, quick):
    out = tmp_path / "out"
    with Stub() as stub:
        ask(stub, out, asks(3))
    with Stub() as stub:
        assert ask(stub, out, asks(3)).new == 0 and not stub.asked
        refused(out, "id 'q2' is not in the input", lambda: ask(stub, out, asks(2)))
        refused(out, "seed 5, now it is 0", lambda: ask(stub, out, asks(3), Settings(temperature=1.0, max_new_tokens=NEW)))
        refused(out, "model 'model', now it is 'm2'", lambda: with_server(asks(3), out, stub.address, "m2", SAMPLED, show=False))
        assert ask(stub, out, asks(5)).new == 2, "more conversations are welcome"


def test_a_server_that_is_gone_stops_the_run(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(regenerate, "DOWN", 4)
    with Stub() as stub:
        pass
    refused(
        tmp_path / "out",
        "4 conversations failed one after the other.*ConnectError",
        lambda: ask(stub, tmp_path / "out", asks(50), retries=1),
    )


def test_what_is_too_long_for_the_server_is_skipped_or_shortened(tmp_path, quick):
    long = chat("long", "user: Long", "assistant: OLD")
    later = chat("later", "user: Short", "assistant: OLD", "user: Long", "assistant: OLD")
    first, odd = chat("first", "assistant: OLD", "user: Hi", "assistant: OLD"), chat("odd", "user: Odd", "user: Odd")
    with Stub({"Long": ["always", "long"], "Odd": ["always", "odd"]}) as stub:
        summary = ask(stub, tmp_path / "out", [long, later, *asks(2), first, odd, chat("s", "system: Alone")])
    assert set(summary.skipped) == {"long", "s", "first", "odd"} and "maximum context length is 9" in summary.skipped["long"]
    assert set(summary.shortened) == {"later"} and summary.rows == 3 and summary.status == 0
    rows = {row["id"]: row for row in rows_of(tmp_path / "out")}
    assert [m["content"] for m in rows["later"]["messages"]] == ["Short", "answer 1 to Short"]


def test_answers_cut_at_the_limit_and_thoughts_apart_are_kept_as_such(tmp_path, quick):
    with Stub() as stub:
        summary = ask(stub, tmp_path / "out", [chat("a", "user: cut me")])
    row = rows_of(tmp_path / "out")[0]
    assert row["messages"][1] == {"role": "assistant", "content": "answer 1 to cut me", "finish_reason": "length"}
    assert summary.cut == 1 and row["generation"]["finish_reasons"] == ["length"]

    def read(message, reason="stop"):
        return server._read(json.dumps({"choices": [{"message": message, "finish_reason": reason}]}))

    assert read({"content": None, "reasoning_content": "hm"}, "length") == ({"content": "", "reasoning_content": "hm"}, "length")
    assert read({"content": "a", "reasoning": "hm"}) == ({"content": "a", "reasoning_content": "hm"}, "stop")
    assert read({"content": "a"}, "eos_token") == ({"content": "a"}, "stop")
    assert read({"content": None}) is None and read({"content": "a"}, "content_filter") is None and read({"content": "a"}, None) is None
