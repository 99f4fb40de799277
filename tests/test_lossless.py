"""Speculative output equals plain output token for token: greedy against transformers' generate, sampled against plain sampling.

Each time round by round, and with rounds replayed as graphs are; with `--kernels` by the Triton kernels instead, and on a GPU by graphs.
"""

import pytest
import taped
from decoding_cases import PROMPTS, SAMPLED, texts
from planting import PlantingDrafter
from zoo import CONFIGS, VOCAB, reference, tiny

from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.drafter import Drafter, Plain
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

NEW = 26


def pytest_generate_tests(metafunc):
    metafunc.parametrize("way", ["kernels"] if metafunc.config.option.kernels else ["eager", "replayed"], indirect=True)


@pytest.fixture(autouse=True)
def way(request, monkeypatch):
    if request.param == "replayed":
        pytest.importorskip("triton")
        taped.install(monkeypatch, replayed=True)
    if request.param != "eager":
        monkeypatch.setitem(Decoder.__init__.__kwdefaults__, "kernels", True)
    return request.param


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_speculative_equals_plain(name):
    model = tiny(name)
    target = Target.wrap(model)
    greedy = [reference(model, prompt, NEW + 6) for prompt in PROMPTS]
    assert sum(len(set(answer)) for answer in greedy) >= 4 * len(PROMPTS), "the model loops: it would hide errors"
    before = model.config._attn_implementation
    sampled = texts(Decoder(target, slots=2).generate(PROMPTS, SAMPLED, NEW + 6, ()))
    assert sampled != greedy
    assert texts(Decoder(target, slots=1, chunk=4).generate(PROMPTS[:3], max_new_tokens=NEW, stop_ids=())) == [a[:NEW] for a in greedy[:3]]
    for sampling, answers in ((Sampling(), greedy), (SAMPLED, sampled)):
        for rows in (1, 4):
            drafter = PlantingDrafter(PROMPTS, answers, VOCAB, duplicates=rows == 4, seed=rows, taps=(0, 1) if rows == 4 else ())
            decoder = Decoder(target, drafter, slots=rows, together=1 + rows // 2, chunk=8)
            out = decoder.generate(PROMPTS, sampling, NEW, ())
            assert texts(out) == [answer[:NEW] for answer in answers], f"{name}, {rows} rows, {sampling}"
            check_exercised(drafter, rows)
            check_records(decoder, out, PROMPTS)
    assert model.config._attn_implementation == before


def check_exercised(drafter: PlantingDrafter, rows: int) -> None:
    """Each thing that the planting drafter is there for did happen, and every verdict was the planted one."""
    assert drafter.mismatches == 0
    assert set(drafter.accepted) >= set(range(drafter.max_depth + 1))
    assert drafter.moves >= 5 and drafter.in_place >= 5
    assert drafter.starts == len(PROMPTS) and drafter.short_starts == 1
    assert drafter.sizes[1] >= 1 and len(drafter.sizes) >= 6
    if rows > 1:
        # All start together but one, which replaces a finished row while the others run.
        assert drafter.starts_beside >= len(PROMPTS) - 1 and drafter.padded >= 5 and drafter.duplicates >= 5


def check_records(decoder: Decoder, out: list[Completion], prompts: list[list[int]]) -> None:
    for prompt, completion in zip(prompts, out, strict=True):
        position = len(prompt) - 1
        for one in completion.rounds:
            assert one.position == position and 1 <= one.length <= one.accepted <= one.size
            position += one.length
        assert position == len(prompt) - 1 + len(completion.tokens)
        assert all(one.length == one.accepted for one in completion.rounds[:-1])
        assert min(min(one.draft_s, one.verify_s, one.other_s) for one in completion.rounds) >= 0
    assert decoder.counters.target_forwards == decoder.counters.rounds + decoder.counters.prefill_chunks
    assert decoder.counters.rounds <= sum(len(completion.rounds) for completion in out)


def test_rows_are_replaced_while_others_run():
    target = Target.wrap(tiny("llama"))
    limits = NEW
    answers = texts(Decoder(target).generate(PROMPTS, max_new_tokens=limits, stop_ids=()))
    drafter = PlantingDrafter(PROMPTS, answers, VOCAB)
    lively = [set() for _ in PROMPTS]
    for steps in Decoder(target, drafter, slots=2).stream(PROMPTS, max_new_tokens=limits, stop_ids=()):
        live = {step.prompt_index for step in steps}
        for index in live:
            lively[index] |= live
    # Some prompt ran beside two others, one after the other: its row outlived a replacement.
    assert any(len(companions) >= 3 for companions in lively)
    assert drafter.starts_beside >= 3


def test_output_depends_on_the_key_only():
    target = Target.wrap(tiny("qwen3"))
    plain = texts(Decoder(target, slots=3).generate(PROMPTS, SAMPLED, 12, ()))
    backwards = Decoder(target, slots=2).generate(PROMPTS[::-1], SAMPLED, 12, (), requests=[4, 3, 2, 1, 0])
    assert texts(backwards)[::-1] == plain
    other_keys = texts(Decoder(target, slots=3).generate(PROMPTS, SAMPLED, 12, (), requests=[5, 6, 7, 8, 9]))
    assert all(a != b for a, b in zip(plain, other_keys, strict=True))
    other_seed = Sampling(SAMPLED.temperature, SAMPLED.top_k, SAMPLED.top_p, SAMPLED.min_p, seed=12)
    assert texts(Decoder(target, slots=3).generate(PROMPTS, other_seed, 12, ())) != plain


def test_stop_token_inside_an_accepted_path():
    target = Target.wrap(tiny("llama"))
    answers = texts(Decoder(target).generate(PROMPTS, max_new_tokens=NEW, stop_ids=()))
    inside = ends = 0
    for seed in range(6):
        stops = {answers[seed % 5][7 + seed], answers[(seed + 1) % 5][4]}
        expected = []
        for answer in answers:
            end = next((i for i, token in enumerate(answer) if token in stops), NEW - 1)
            expected.append(answer[: end + 1])
        out = Decoder(target, PlantingDrafter(PROMPTS, answers, VOCAB, seed=seed), slots=3).generate(
            PROMPTS, max_new_tokens=NEW, stop_ids=frozenset(stops)
        )
        assert texts(out) == expected
        for completion in out:
            stopped = completion.tokens[-1] in stops
            assert completion.reason == ("stop" if stopped else "length")
            last = completion.rounds[-1]
            ends += stopped
            inside += stopped and last.length < last.accepted
    assert ends >= 10 and inside >= 5


def test_context_ends_a_row_exactly():
    """Up to the last position of the target, whatever the tree would have written past it."""
    target = Target.wrap(tiny("llama"))
    limit = target.max_positions
    prompts = [prompt * (110 // len(prompt)) for prompt in PROMPTS[1:4]]
    answers = texts(Decoder(target).generate(prompts, max_new_tokens=200, stop_ids=()))
    assert [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)] == [limit] * 3
    out = Decoder(target, PlantingDrafter(prompts, answers, VOCAB), slots=3).generate(prompts, max_new_tokens=200, stop_ids=())
    assert texts(out) == answers
    assert [completion.reason for completion in out] == ["context"] * 3
    small = Decoder(target, PlantingDrafter(prompts, answers, VOCAB), slots=2, context=120).generate(
        prompts, max_new_tokens=200, stop_ids=()
    )
    assert texts(small) == [answer[: 120 - len(prompt)] for prompt, answer in zip(prompts, answers, strict=True)]


def test_plain_is_a_drafter_and_a_stream_can_be_left():
    target = Target.wrap(tiny("llama"))
    assert isinstance(Plain(), Drafter) and isinstance(PlantingDrafter([[1]], [[2]], VOCAB), Drafter)
    decoder = Decoder(target, slots=2)
    stream = decoder.stream(PROMPTS, max_new_tokens=9, stop_ids=())
    first = next(stream)
    assert [step.prompt_index for step in first] == [0, 1] and all(step.length == 1 for step in (s.round for s in first))
    assert target.model.config._attn_implementation == "eager", "the setting must not persist between rounds"
    stream.close()
    again = decoder.generate(PROMPTS, max_new_tokens=9, stop_ids=())
    assert [completion.reason for completion in again] == ["length"] * 5
    assert texts(again) == [reference(target.model, prompt, 9) for prompt in PROMPTS]


def test_two_streams_on_one_target_may_overlap():
    target = Target.wrap(tiny("mistral"))
    answers = texts(Decoder(target).generate(PROMPTS, max_new_tokens=8, stop_ids=()))
    streams = [Decoder(target, slots=2).stream(PROMPTS, max_new_tokens=8, stop_ids=()) for _ in range(2)]
    got: list[dict[int, list[int]]] = [{}, {}]
    for pair in zip(*streams, strict=True):
        for tokens, steps in zip(got, pair, strict=True):
            for step in steps:
                tokens.setdefault(step.prompt_index, []).extend(step.tokens)
    assert [[tokens[i] for i in range(5)] for tokens in got] == [answers, answers]


def test_a_drafter_serves_one_stream_at_a_time():
    """Its rows are that stream's; afterwards it is free, whatever became of the stream."""
    target = Target.wrap(tiny("llama"))
    answers = texts(Decoder(target).generate(PROMPTS, max_new_tokens=NEW, stop_ids=()))
    drafter = PlantingDrafter(PROMPTS, answers, VOCAB)
    first, second = (Decoder(target, drafter, slots=2) for _ in range(2))
    stream = first.stream(PROMPTS, max_new_tokens=NEW, stop_ids=())
    next(stream)
    for decoder in (first, second):
        with pytest.raises(ValueError, match="got a second stream .* that is (de|dr)"):
            decoder.generate(PROMPTS, max_new_tokens=NEW, stop_ids=())
    drop, drafter.drop = drafter.drop, lambda rows: 1 / 0
    with pytest.raises(ZeroDivisionError):
        stream.close()
    drafter.drop = drop
    assert texts(second.generate(PROMPTS, max_new_tokens=NEW, stop_ids=())) == answers
    assert texts(first.generate(PROMPTS, max_new_tokens=NEW, stop_ids=())) == answers


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_medusa_equals_plain(name):
    target = Target.wrap(tiny(name))
    drafter = new_drafter("medusa", target, num_heads=3, tree=[list(path) for path in StaticTree.cartesian((4, 2, 2)).paths])
    greedy = [reference(target.model, prompt, NEW) for prompt in PROMPTS]
    sampled = texts(Decoder(target, slots=2).generate(PROMPTS, SAMPLED, NEW, ()))
    for sampling, answers in ((Sampling(), greedy), (SAMPLED, sampled)):
        for rows in (1, 4):
            out = Decoder(target, drafter, slots=rows, chunk=8).generate(PROMPTS, sampling, NEW, ())
            assert texts(out) == answers, f"{name}, {rows} rows, {sampling}"
            rounds = [round for answer in out for round in answer.rounds]
            assert {round.accepted for round in rounds} >= {1, 2} and {round.size for round in rounds} >= {1, 29}
