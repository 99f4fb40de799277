"""What a lossy rule costs: numbers in texts by hand, KL by enumeration of all answers, and planted answers, right and wrong, in real decoding."""

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from decimal import Decimal

import pytest
import torch
from conftest import save_byte_target
from transformers import RepetitionPenaltyLogitsProcessor

from draftsmith.data.prompts import Prompt, load
from draftsmith.eval import quality, record_store
from draftsmith.eval.evaluation import evaluate_drafter
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.records import QualityRecord, quality_line, quality_of
from draftsmith.eval.report import as_json, report_of
from draftsmith.eval.settings import Settings
from draftsmith.inference.drafts import Draft
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.request import Limits, Request, RoundStats, finalise
from draftsmith.inference.sampler import Sampling, warp
from draftsmith.inference.tree import DraftTree, StaticTree
from draftsmith.inference.verify import HostResult, verify
from draftsmith.models.target import Target


@pytest.mark.parametrize(
    "text, number",
    [
        ("So it cost 600+400=$<<600+400=1000>>1000 in total.", "1000"),
        ("The answer is 42.", "42"),
        ("It is 3.50 dollars", "3.5"),
        ("$1,234,567.89 each", "1234567.89"),
        ("first 7, then 12,", "12"),
        ("a list: 1,2,3", "3"),
        ("1,0000", "0"),  # no group of three digits
        ("x = -5", "-5"),
        ("a loss of -$5", "-5"),
        ("10-5", "5"),
        ("f(2)-5", "5"),
        ("about .75 of it", "0.75"),
        ("50%", "50"),
        ("\\boxed{18}", "18"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number_of_an_answer(text, number):
    assert quality.final_number(text) == (None if number is None else Decimal(number))


def test_which_references_have_a_final_number():
    assert quality.reference_number(["He pays 200\nSo 600+400=1000\n#### 1,000"]) == 1000
    assert quality.reference_number(["#### 5 then\n#### -2.50"]) == Decimal("-2.5")
    for reference in ([], ["1000"], ["    return 5"], ["#### none"], ["#### 5", "#### 6"], ["James Ray", "1962"]):
        assert quality.reference_number(reference) is None, reference


def test_mcnemar_by_hand():
    assert quality.mcnemar(0, 0) == quality.mcnemar(3, 3) == quality.mcnemar(1, 0) == 1.0
    assert quality.mcnemar(0, 5) == quality.mcnemar(5, 0) == 2 / 32
    assert quality.mcnemar(1, 9) == 2 * (1 + 10) / 1024


def test_the_targets_own_draw_is_no_accepted_token():
    rounds = [
        RoundStats(5, 3, 3, 0, 0, 0, 0),
        RoundStats(5, 1, 1, 3, 0, 0, 0),
        RoundStats(5, 2, 4, 4, 0, 0, 0),
    ]  # the last one is cut short
    assert quality.accepted_tokens(rounds) == [True, True, False, False, True, True]


def table_of(text: tuple[int, ...], which: int) -> torch.Tensor:
    """Logits [V] that are a function of the text, of a target (even) or of a drafter (odd)."""
    return 1.5 * torch.randn(3, generator=torch.Generator().manual_seed(hash((which, *text)) % 2**31), dtype=torch.float64)


def enumerate_answers(sampling: Sampling, copy: int, seen: Counter) -> dict[tuple[int, ...], tuple[float, float]]:
    """By answer of at most 4 tokens, 2 ending it: its probability under the rule, and Σ −ln P over its accepted tokens.

    A chain of three drafted tokens goes through the rule itself and through the truncation of a round.
    """
    answers: dict[tuple[int, ...], tuple[float, float]] = {}

    def decode(text: tuple[int, ...], weight: float, cost: float) -> None:
        request, chain = Request(0, [0], 0, position=len(text) - 1, emitted=len(text) - 1), list(text[-1:])
        for _ in range(3):
            chain.append(int(table_of((*text, *chain[1:]), 2 * copy + 1).argmax()))
        logits = torch.stack([table_of((*text, *chain[1 : 1 + i]), 2 * copy) for i in range(4)])[None]
        tree = DraftTree.build(torch.tensor([chain]), torch.tensor([[-1, 0, 1, 2]]), torch.tensor([4]))
        verdict = verify(tree, logits, sampling, torch.tensor([0]), torch.tensor([len(text) - 1]))
        length = int(verdict.length)
        p = warp(logits[0], sampling).double().softmax(-1)
        for last in range(3):
            tokens = [*chain[1:length], last]
            if p[length - 1, last] > 0:
                result = HostResult(length, 4, 3, True, tokens)
                step = finalise(replace(request), result, Limits(99, 4, frozenset({2})))
                mask = quality.accepted_tokens([step.round])
                total = cost - sum(math.log(p[i, token]) for i, token in enumerate(step.tokens) if mask[i])
                chance = weight * float(p[length - 1, last])
                seen["cut short"] += step.round.length < step.round.accepted
                seen[f"accepted {length - 1}"] += 1
                if step.finished:
                    answer = text[1:] + tuple(step.tokens)
                    assert math.isclose(answers.get(answer, (0, total))[1], total), "an answer has one sequence of rounds"
                    answers[answer] = (answers.get(answer, (0.0, 0.0))[0] + chance, total)
                else:
                    decode(text + tuple(step.tokens), chance, total)

    decode((0,), 1.0, 0.0)
    return answers


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8, rule="typical", epsilon=0.2, delta=0.6),
        Sampling(1.3, rule="typical"),
        Sampling(1.0, top_k=2, rule="membership"),
        Sampling(0.7, top_p=0.8, rule="membership"),
    ],
)
def test_the_divergence_is_that_of_all_answers(sampling):
    seen, count, total_divergence = Counter(), 0, 0.0
    for copy in range(6):
        answers = enumerate_answers(sampling, copy, seen)
        target = {}
        for answer in answers:
            p = [warp(table_of((0, *answer[:i]), 2 * copy), sampling).double().softmax(-1)[token] for i, token in enumerate(answer)]
            target[answer] = math.prod(map(float, p))
        assert sum(chance for chance, _ in answers.values()) == pytest.approx(1, abs=1e-12)
        for answer, (chance, total) in answers.items():
            assert total == pytest.approx(math.log(chance / target[answer]), abs=1e-9)
        divergence = sum(chance * math.log(chance / target[answer]) for answer, (chance, _) in answers.items())
        assert sum(chance * total for chance, total in answers.values()) == pytest.approx(divergence, abs=1e-9)
        count, total_divergence = count + len(answers), total_divergence + divergence
    assert count >= 10 and total_divergence > 1, "the rule is lossy here"
    assert seen["cut short"] and sum(seen[f"accepted {n}"] > 0 for n in range(4)) >= 3, seen


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality") / "target"
    save_byte_target(folder)
    return Target.load(str(folder))


def test_log_probabilities_are_those_of_a_slow_loop(target):
    prompt, answer = list(range(40, 60)), [3, 3, 99, 200, 40, 7] * 15  # more than one part of 64
    how = Sampling(0.7, top_k=60, repetition_penalty=1.4, rule="typical")
    measured = quality.log_probs(target, prompt, answer, how)
    penalise = RepetitionPenaltyLogitsProcessor(1.4)
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    for i, token in enumerate(answer):
        scores = penalise(torch.tensor([prompt + answer[:i]]), logits[i : i + 1].clone())[0] / 0.7
        assert measured[0, i] == pytest.approx(float(scores.log_softmax(-1)[token]), abs=1e-4)
        best = scores.topk(60)
        inside = token in best.indices
        assert (measured[1, i] > -torch.inf) == inside
        if inside:
            assert measured[1, i] == pytest.approx(float(scores[token] - best.values.logsumexp(0)), abs=1e-4)
    assert 0 < int((measured[1] > -torch.inf).sum()) < len(answer)


@dataclass(frozen=True)
class Alternating:
    """Even tokens and odd ones in turn, an even one first."""

    name: str = "alternating"
    index: int = 0

    def start(self):
        return self

    def after(self, token):
        return Alternating(index=self.index + 1) if (token + self.index) % 2 == 0 else None

    def allowed(self):
        return bytes([0b10101010 if self.index % 2 else 0b01010101]) * 64


def test_log_probabilities_are_within_the_constraint(target):
    prompt, answer = list(range(40, 60)), [2, 3, 98, 201, 40, 7] * 15
    how = Sampling(0.7, top_k=90, rule="typical", constraint=Alternating())
    measured = quality.log_probs(target, prompt, answer, how)
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double() / 0.7
    for i, token in enumerate(answer):
        scores = logits[i, i % 2 :: 2]
        best = scores.topk(90).values
        assert measured[0, i] == pytest.approx(float(logits[i, token] - scores.logsumexp(0)), abs=1e-4)
        inside = float(logits[i, token] - best.logsumexp(0)) if logits[i, token] >= best[-1] else -math.inf
        assert measured[1, i] == pytest.approx(inside, abs=1e-4)
    assert 0 < int((measured[1] > -torch.inf).sum()) < len(answer)
    with pytest.raises(ValueError, match="alternating: got an answer that it does not allow"):
        quality.log_probs(target, prompt, [3, 3, 3], how)


LENGTH = 12
HOW = Sampling(0.7, top_k=257, rule="membership", seed=3)  # the filter keeps all of the 257 tokens, so that all drafts are accepted


class Knows(Ngram):
    """Drafts a complete answer to each prompt that it knows."""

    def __init__(self, answers):
        super().__init__(StaticTree.chain(LENGTH))
        self.answers = answers

    def _draft(self, slot, depth):
        tokens = self.answers.get(bytes(self._texts[slot]), [])[:depth]
        return Draft(tokens, list(range(len(tokens))))


def evaluate(target, prompts, texts, folder=None, how=HOW):
    """Records of an evaluation whose drafter plants these texts."""
    encode = target.tokenizer.encode
    answers = {bytes(encode(prompt.text)): encode(text) for prompt, text in zip(prompts, texts, strict=True)}
    drafter = Knows(answers)
    settings = Settings(LENGTH, [how], 1 + LENGTH, choose="", timed=3)
    return evaluate_drafter(target, drafter, prompts, settings, RecordStore(folder))


def padded(text):
    return text.rjust(LENGTH, "=")


@pytest.fixture(scope="module")
def planted(target):
    """Prompts with references, and what is planted: 6 of 10 right, of which plain decoding has 1 right too; 1 that it alone has right."""
    prompts = [Prompt(f"m{n}", "math", f"What is {n}? ") for n in range(60)]
    plain = {each.prompt: quality.final_number(each.plain_text) for each in evaluate(target, prompts, [padded("no")] * 60).qualities}
    numbers = [prompt for prompt in prompts if plain[prompt.id] is not None]
    both, plain_only = numbers[:2]
    others = [prompt for prompt in prompts if prompt not in (both, plain_only)][:8]

    def judged(prompt, number):
        return replace(prompt, reference=(f"Well, 7.\n#### {number}",))

    chosen = [judged(both, plain[both.id]), judged(plain_only, plain[plain_only.id])]
    chosen += [judged(prompt, f"1,{100 + n}.50") for n, prompt in enumerate(others)]
    texts = [padded(f"= {plain[both.id]}"), padded("is 31337"), *(padded(f"${1100 + n}.5") for n in range(5)), *[padded("no 31337")] * 3]
    code = Prompt("c0", "code", "def f(x): ", reference=("    return x + 1",))
    return [*chosen, code], [*texts, padded("return 31337")]


def test_a_planted_decoder_has_exactly_its_accuracy(target, planted, tmp_path):
    prompts, texts = planted
    records = evaluate(target, prompts, texts, tmp_path)
    report = report_of(records)
    assert [each.text for each in sorted(records.qualities, key=lambda each: [p.id for p in prompts].index(each.prompt))] == texts
    (measured,) = report.quality.values()
    accuracy = measured.accuracy
    assert (accuracy.prompts, accuracy.drafted, accuracy.plain) == (10, 0.6, 0.2)
    assert (accuracy.drafted_only, accuracy.plain_only, accuracy.p_value) == (5, 1, 2 * (1 + 6) / 64)
    assert accuracy.difference == pytest.approx(0.4) and accuracy.low < 0.4 < accuracy.high
    assert (measured.references, measured.answers, measured.tokens) == (11, 11, 11 * LENGTH)
    assert measured.tau == LENGTH and measured.outside == 0
    # All tokens are accepted, and nothing is filtered: the divergence is all of the answers' improbability.
    assert measured.kl == pytest.approx(-measured.log_prob) and measured.kl > 1 and measured.kl_low < measured.kl < measured.kl_high
    assert measured.log_prob_difference == pytest.approx(measured.log_prob - measured.plain_log_prob)
    assert measured.distinct < measured.plain_distinct, "what is planted is mostly padding"
    (line,) = quality.lines(report.quality, report.lossy)
    assert "LOSSY, τ 12.00: KL" in line and "right answers 60.0%, plain 20.0%, of 10 prompts" in line and "p = 0.22" in line
    assert as_json(report_of(record_store.read(tmp_path))) == as_json(report)


def test_records_that_were_cut_off_continue_to_the_same(target, planted, tmp_path, monkeypatch):
    complete = evaluate(target, *planted)
    (tmp_path / "cut").mkdir()
    append, calls = RecordStore.append_requests, []

    def stopping(store, *words):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        append(store, *words)

    monkeypatch.setattr(RecordStore, "append_requests", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate(target, *planted, tmp_path / "cut")
    monkeypatch.undo()
    part = (tmp_path / "cut" / record_store.UNFINISHED).read_text()
    assert part.count('"kind": "quality"') == part.count('"kind": "request"') == 2
    evaluate(target, *planted, tmp_path / "cut")
    again = record_store.read(tmp_path / "cut")
    order = [prompt.id for prompt in planted[0]]
    assert [each.prompt for each in again.qualities] == order and again.qualities == sorted(
        complete.qualities, key=lambda each: order.index(each.prompt)
    )


def test_a_lossless_rule_is_not_measured(target, planted, tmp_path):
    evaluate(target, *planted, tmp_path, replace(HOW, rule="target-sample"))
    content = (tmp_path / record_store.RECORDS).read_text()
    assert '"quality"' not in content and "####" not in content
    report = report_of(record_store.read(tmp_path))
    assert "quality" not in json.loads(as_json(report)) and quality.lines(report.quality, report.lossy) == []


def test_references_do_not_change_which_prompts_are_measured(target, planted):
    prompts, texts = planted
    without = [replace(prompt, reference=()) for prompt in prompts]
    first, second = (evaluate(target, each, texts) for each in (prompts, without))
    assert first.header == second.header and first.requests[0].tokens == second.requests[0].tokens
    (measured,) = report_of(second).quality.values()
    assert measured.accuracy is None and measured.references == 0
    (line,) = quality.lines(report_of(second).quality, report_of(second).lossy)
    assert "no reference that can be judged (0 of 11 prompts have one)" in line


def test_tokens_that_plain_decoding_never_draws_make_the_divergence_infinite(target, planted):
    prompts, texts = planted
    records = evaluate(target, prompts, texts, how=Sampling(0.7, top_k=1, rule="typical"))
    accepts_all = [replace(each, outside=2) for each in records.qualities[:1]] + records.qualities[1:]
    (measured,) = report_of(replace(records, qualities=accepts_all)).quality.values()
    outside = sum(each.outside for each in accepts_all)
    assert measured.outside == outside >= 2 and math.isinf(measured.kl) and measured.kl_low is None
    content = json.loads(as_json(report_of(replace(records, qualities=accepts_all))))
    assert content["quality"]["0.7 top_k=1 rule=typical"]["kl"] is None
    (line,) = quality.lines(report_of(replace(records, qualities=accepts_all)).quality, {"0.7 top_k=1 rule=typical": "typical"})
    assert f"KL infinite: {outside} accepted tokens that plain decoding never draws" in line


def test_lossy_records_of_an_earlier_version_say_so():
    (line,) = quality.lines({}, {"1 rule=typical": "typical"})
    assert line == f"T=1 rule=typical LOSSY: {quality.UNRECORDED}"


def test_a_damaged_line_is_refused():
    record = QualityRecord("p", "1 rule=typical", ["#### 5"], "5", "6", [1, 2], -1.5, -2.0, 0.5, 0)
    line = json.loads(json.dumps(quality_line(record)))
    assert quality_of(line, "f:1") == record
    for name, value, said in (("plain", "x", "a list"), ("kl", None, "a number"), ("outside", 0.5, "an integer"), ("text", 3, "text")):
        with pytest.raises(ValueError, match=f"f:1: `{name}` should be {said}"):
            quality_of(line | {name: value}, "f:1")


def test_references_are_read_from_prompt_files(tmp_path):
    rows = [
        {"prompt": "a", "reference": "#### 1"},
        {"turns": ["b"], "reference": ["x", "y"]},
        {"turns": ["c", "d"], "reference": ["first", "second"]},  # of which turn?
        {"messages": [{"role": "user", "content": "e"}], "reference": ["z", 5]},
        {"prompt": "f", "reference": {"answer": 1}},
        {"prompt": "g", "reference": None},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [each.reference for each in load(tmp_path / "p.jsonl")] == [("#### 1",), ("x", "y"), (), ("z",), (), ()]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "reference": ["\\ud800"]}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:1: `reference` has half a surrogate pair"):
        load(tmp_path / "bad.jsonl")
