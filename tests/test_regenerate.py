"""Regenerated answers are the target's own, in process."""

import json

import pytest
import taped
from regeneration import (
    CONVERSATIONS,
    NEW,
    POSITIONS,
    ROLES,
    SAMPLED,
    alone,
    chat,
    halves,
    make_target,
    refused,
    render,
    rows_of,
    with_misfits,
)

from draftsmith.data import regenerate, shared_decoding
from draftsmith.data.conversation_state import ConversationState, given_hash
from draftsmith.data.conversations import Conversation
from draftsmith.data.regenerate import Settings, with_decoder, with_server
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.prefill import Prefill
from draftsmith.models.target import Target


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.mark.parametrize("settings", [Settings(max_new_tokens=NEW), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "ngram"])
def test_every_answer_is_the_one_the_target_gives_alone_after_the_new_answers(target, tmp_path, settings, drafter):
    out = tmp_path / "deep" / "out.jsonl"
    summary = with_decoder(CONVERSATIONS, out, target, settings, drafter=drafter, slots=3, group=5, show=False)
    rows = rows_of(out)
    assert [row["id"] for row in rows] == sorted(source.id for source in CONVERSATIONS)
    assert (summary.rows, summary.new, summary.status) == (len(rows), len(rows), 0) and not summary.skipped
    sources, reasons = {source.id: source for source in CONVERSATIONS}, []
    for row in rows:
        source = sources[row["id"]]
        ends = row["generation"]["finish_reasons"]
        reasons += ends
        assert row["domain"] == source.domain and row.get("tools") == source.tools
        if source.messages is None:
            prompt, completion = halves(row)
            assert source.text.startswith(prompt) and prompt
            assert [(completion, ends[0])] == [alone(target, settings, prompt, source.id, 0)]
            assert row.get("finish_reason", "stop") == ends[0]
            continue
        messages, turn = row["messages"], 0
        assert [message["role"] for message in messages] == ROLES[source.id]
        assert "OLD" not in json.dumps(messages)
        assert [m for m in messages if m["role"] != "assistant"] == [m for m in source.messages if m["role"] != "assistant"]
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and "tool_calls" not in message:
                expected = alone(target, settings, render(messages[:place], source.tools), source.id, turn)
                assert (message["content"], ends[turn]) == expected
                assert message.get("finish_reason") == ("length" if ends[turn] == "length" else None)
                turn += 1
        assert turn == len(ends) > 0
    assert {"stop", "length"} == set(reasons) and summary.cut == reasons.count("length")


def test_a_row_says_how_it_was_made(target, tmp_path):
    with_decoder(CONVERSATIONS[:1], tmp_path / "out", target, SAMPLED, show=False)
    made = rows_of(tmp_path / "out")[0]["generation"]
    made.pop("finish_reasons")
    assert made.pop("given") == given_hash(CONVERSATIONS[0])
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 5}
    assert made == {"by": "draftsmith", "target": "tiny-chat", "dtype": "float32", **how, "max_new_tokens": NEW, "prompt_tokens": 64}


def test_a_text_without_a_prompt_of_its_own_gives_its_first_tokens_and_never_half_a_character(target, tmp_path):
    for tokens, prompt in ((1, "Ü"), (2, "Ü"), (3, "Ün"), (500, "Ün more"), (4, "Ünï")):
        text = "Ün more" if tokens == 500 else "Ünïform"
        out = tmp_path / str(tokens)
        with_decoder([Conversation("a", "d", text=text)], out, target, Settings(max_new_tokens=2, prompt_tokens=tokens), show=False)
        assert halves(rows_of(out)[0])[0] == prompt


def test_what_was_continued_keeps_the_space_that_a_tokenizer_drops_in_front(target):
    """As sentencepiece does: a text's first space is not decoded."""

    class Dropping:
        def decode(self, ids, **_):
            return target.tokenizer.decode(ids).removeprefix(" ")

    before, new = ([target.tokenizer.encode(word)[0] for word in words] for words in ("go", " on"))
    assert regenerate.new_text(Dropping(), before, new, "length") == " on"  # type: ignore[arg-type]
    assert regenerate.new_text(Dropping(), [], new, "length") == "on"  # type: ignore[arg-type]


def test_special_tokens_of_an_answer_survive_and_only_the_stop_token_goes(target):
    ids = target.tokenizer.encode("<|im_start|>think<|im_end|>", add_special_tokens=False)
    assert regenerate.new_text(target.tokenizer, [], ids, "stop") == "<|im_start|>think"
    assert regenerate.new_text(target.tokenizer, [], ids, "length") == "<|im_start|>think<|im_end|>"


def test_what_does_not_fit_is_skipped_or_shortened_by_name_and_the_rest_is_as_without_it(target, tmp_path):
    out = tmp_path / "out"
    summary = with_decoder(with_misfits(), out, target, SAMPLED, group=3, show=False)
    assert set(summary.skipped) == {"a0", "c2x", "c11", "s", "u", "u2", "v", "w", "zz"}
    assert set(summary.shortened) == {"m", "edge"} and summary.status == 0
    assert "positions" in summary.skipped["a0"] and "no martians" in summary.skipped["c11"] and "no turn" in summary.skipped["s"]
    assert "begins" in summary.skipped["v"] and "Unicode" in summary.skipped["u"] and "surrogate" in summary.skipped["u2"]
    assert all(name in summary.report() for name in (*summary.skipped, *summary.shortened))
    rows = {row["id"]: row for row in rows_of(out)}
    assert [m["role"] for m in rows["m"]["messages"]] == ["user", "assistant"]
    edge = rows["edge"]["messages"]
    assert len(edge) == 2 and edge[1]["finish_reason"] == "length"  # the context ended it, before max_new_tokens did
    assert len(target.tokenizer.encode(render(edge[:1]), add_special_tokens=False)) == POSITIONS - 1
    with_decoder(CONVERSATIONS, tmp_path / "without", target, SAMPLED, show=False)
    assert [rows[row["id"]] for row in rows_of(tmp_path / "without")] == rows_of(tmp_path / "without")


def test_a_call_in_words_stays_before_the_result_that_it_got():
    """As ShareGPT's function_call is read."""
    source = chat("f", "user: Sum of 1 and 2?", 'assistant: {"name": "add"}', "tool: 3", "assistant: OLD", "user: And?", "assistant: OLD")
    state = ConversationState(source)
    assert [message["role"] for message in state.messages] == ["user", "assistant", "tool"] and state.messages == source.messages[:3]
    assert state.pending == [None, source.messages[4], None]


def test_a_call_without_a_result_is_answered_anew():
    """It would be the text of another model, supervised as the target's; of several calls before their results all stay."""
    call = {"role": "assistant", "content": "OLD", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    user, result = {"role": "user", "content": "Hi"}, {"role": "tool", "content": "3"}
    for messages, pending in (
        ([user, call], [None]),
        ([user, call, user, call], [None, user, None]),
        ([user, call, call, result, result, call], [None]),
        ([user, call, user, call, result], [None, user, call, result, None]),
    ):
        state = ConversationState(Conversation("c", "chat", messages))
        assert state.pending == pending and not state.stopped


@pytest.mark.parametrize("settings", [Settings(max_new_tokens=NEW), SAMPLED], ids=["greedy", "sampled"])
def test_captured_rounds_give_the_same_rows(target, tmp_path, monkeypatch, settings):
    """Four slots, which are prefilled together."""
    pytest.importorskip("triton")
    with_decoder(CONVERSATIONS, tmp_path / "without", target, settings, show=False)
    taped.install(monkeypatch, replayed=True)
    forwards, run = [], Prefill.run
    monkeypatch.setattr(Prefill, "run", lambda prefill, requests: forwards.append(len(requests)) or run(prefill, requests))
    with_decoder(CONVERSATIONS, tmp_path / "with", target, settings, slots=4, kernels=True, show=False)
    rows = rows_of(tmp_path / "with")
    assert rows == [row | {"generation": row["generation"] | {"kernels": True}} for row in rows_of(tmp_path / "without")]
    assert max(forwards) == 4
    monkeypatch.undo()
    with pytest.raises(ValueError, match="made with kernels "):
        with_decoder(CONVERSATIONS, tmp_path / "with", target, settings, show=False)
    assert rows_of(tmp_path / "with") == rows, "another rounding and another group: nothing is dropped"


def test_each_turn_of_a_group_has_a_decoder_of_its_own(target, tmp_path, monkeypatch):
    """What earlier answers leave behind (a larger cache) would change the rounding of the next, but not after a stop between them."""
    decoders, sizes = [], []

    class Counted(Decoder):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            decoders.append(self)

        def stream(self, prompts, *arguments, **more):
            sizes.append(len(prompts))
            return super().stream(prompts, *arguments, **more)

    monkeypatch.setattr(shared_decoding, "Decoder", Counted)
    with_decoder(CONVERSATIONS, tmp_path / "out", target, SAMPLED, group=3, show=False)
    # By id: b (2 answers), c10 (1), c2 (2); c9 (3), t1, t2 (1); tool (1), z (2).
    assert sizes == [3, 2, 3, 1, 1, 2, 1] and len(decoders) == len(sizes)


def test_what_cannot_be_done_is_said_before_anything_is_written(target, tmp_path):
    out = tmp_path / "out"
    twice = [*CONVERSATIONS, chat("c2", "user: again")]
    refused(out, "rows 3 and 9 both have id 'c2'", lambda: with_decoder(twice, out, target, SAMPLED, show=False))
    refused(out, "rows 3 and 9 both have id 'c2'", lambda: with_server(twice, out, "http://localhost:1/v1", "m", SAMPLED, show=False))
    refused(out, "no conversations", lambda: with_decoder([], out, target, SAMPLED, show=False))
    refused(out, "got group 0", lambda: with_decoder(CONVERSATIONS, out, target, SAMPLED, group=0, show=False))
    refused(
        out,
        "suffix drafter that remembers",
        lambda: with_decoder(CONVERSATIONS, out, target, SAMPLED, drafter=Suffix(memory=9), show=False),
    )
    refused(out, "no tokenizer", lambda: with_decoder(CONVERSATIONS, out, Target.wrap(target.model), SAMPLED, show=False))
    refused(out, "expected an address", lambda: with_server(CONVERSATIONS, out, "localhost:8000", "m", SAMPLED, show=False))
    refused(out, "got concurrency 0", lambda: with_server(CONVERSATIONS, out, "http://h/v1", "m", SAMPLED, concurrency=0, show=False))
    refused(out, "omit temperature", lambda: with_server(CONVERSATIONS, out, "http://h/v1", "m", SAMPLED, omit=["temperature"], show=False))
    refused(out, "omit seed", lambda: with_server(CONVERSATIONS, out, "http://h/v1", "m", SAMPLED, omit=["seed"], show=False))
    assert not out.exists()
    with pytest.raises(ValueError, match="got max_new_tokens 0"):
        Settings(max_new_tokens=0)
    with pytest.raises(ValueError, match="got top_p"):
        Settings(top_p=0.0)


def test_messages_need_a_chat_template_and_texts_do_not(target, tmp_path):
    bare, out = make_target(template=None), tmp_path / "out"
    both = chat("both", "user: Who?", "assistant: OLD", text="Who? OLD", prompt=5)
    texts = [both, *(source for source in CONVERSATIONS if source.messages is None)]
    with_decoder(texts, out, bare, SAMPLED, show=False)
    rows = rows_of(out)
    assert [halves(row)[0] for row in rows] == ["Who? ", "def parse_", texts[2].text[:62]]
    assert [halves(row)[1] for row in rows] == [alone(bare, SAMPLED, halves(row)[0], row["id"], 0)[0] for row in rows]
    refused(
        tmp_path / "no",
        "'b' has messages, target .* no chat template",
        lambda: with_decoder(CONVERSATIONS, tmp_path / "no", bare, SAMPLED, show=False),
    )
    with_decoder(texts, tmp_path / "chat", target, SAMPLED, show=False)
    assert [m["role"] for m in rows_of(tmp_path / "chat")[0]["messages"]] == ["user", "assistant"]
