"""Static-shape rounds: what a CUDA graph holds, run as it is on the CPU, with the reference implementations in place of the kernels."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import soak_rounds
import taped
import torch
from interpreted import INTERPRETED
from planting import PlantingDrafter
from zoo import tiny

from draftsmith.inference import decoder as decoders
from draftsmith.inference import graph_rounds, kernels
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import Plain
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.graph_rounds import GraphRunner, InFlightRound, refusal
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookahead import Lookahead
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.prefill import Prefill
from draftsmith.inference.recycling import Recycling
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.self_speculation import early_exit
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

pytest.importorskip("triton")
PROMPTS = [[5, 6, 7], [9, 3], [1, 2, 3, 4, 5, 6], [8], [4, 4, 4, 2]]


@pytest.fixture(params=["run", "replayed"])
def references(request, monkeypatch):
    """Kernels are on, and each is its reference: Triton's interpreter is slow, and has tests of its own. Rounds run as they are, or are
    replayed from what was recorded of the first of their shape."""
    taped.install(monkeypatch, replayed=request.param == "replayed")


class ScriptedDrafter:
    """Knows the answers, and puts them at second ranks in each round, or nowhere. It runs on the device alone."""

    capturable, taps, max_depth = True, (), 3
    shape = StaticTree.from_paths([(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 1), (1,), (1, 1), (1, 1, 1)])
    max_nodes = shape.num_nodes

    def __init__(self, prompts, answers):
        sequences = [prompt + answer.tokens + [0] * 8 for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, sequences))
        self.known = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences])

    def bind(self, target, slots, context):
        self.vocab = target.vocab_size

    def propose(self, round):
        position = round.positions[:, None] + 1 + torch.arange(3)
        right = self.known[round.noise_keys].gather(1, position.clamp(max=self.known.shape[1] - 1))  # [B,K]
        children = torch.stack(((right + 1) % self.vocab, (right + 2) % self.vocab), -1)  # [B,K,R]
        rank = (position // 3 + round.noise_keys[:, None]) % 3  # 2: nowhere
        children = torch.where(torch.arange(2) == rank[..., None], right[..., None], children)
        return self.shape.cut(round.depth).tree(round.last_tokens, children)

    def start(self, *_):
        pass

    accept = drop = start


def drafter_of(kind, target):
    torch.manual_seed(0)
    if kind == "plain":
        return Plain()
    if kind == "ngram":
        return Ngram(StaticTree.from_paths([(0,), (0, 0), (1,), (0, 0, 0)]))
    if kind == "recycling":
        return Recycling(StaticTree.cartesian((2, 1)))
    if kind == "early-exit":
        drafter = early_exit(target, 1)
        drafter.tree_spec = DynamicTree(3, 2, 6)
        return drafter
    if kind == "early-exit-sure":
        drafter = early_exit(target, 1)
        drafter.tree_spec, drafter.stop = StaticTree.chain(3), Stopping("confidence", 0.0)
        return drafter
    if kind == "hybrid":
        return Hybrid(drafter_of("early-exit", target), Suffix())
    if kind == "lookahead":
        return Lookahead(DynamicTree(2, 2, 5), window=3)
    if kind.startswith("student"):
        shape = {"tree": StaticTree.from_paths([(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]), "dynamic": DynamicTree(3, 2, 6)}
        confidence = 0.2 if kind.endswith("sure") else 0.0
        # Near the target, so that every length is accepted.
        return DraftModel(
            near(target), shape.get(kind[8:], StaticTree.chain(3)), stop=Stopping("confidence", confidence) if confidence else None
        )
    if kind == "medusa":
        drafter = new_drafter("medusa", target, num_heads=3)
        drafter.tree_spec = StaticTree.from_paths([(0,), (0, 0), (1,), (0, 1), (0, 0, 0)])
    else:
        drafter = new_drafter("eagle", target, version=int(kind[-1]), **({"taps": [0, 1]} if kind[-1] == "3" else {}), steps=4)
        drafter.tree_spec = DynamicTree(3, 2, 6) if kind[-1] == "3" else StaticTree.from_paths([(0,), (0, 0), (1,), (0, 0, 0)])
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in drafter.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return drafter.eval()


def near(target):
    model = tiny("llama")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return Target.wrap(model.to(target.device))


KINDS = ("plain", "medusa", "eagle1", "eagle3", "student", "student-tree", "student-dynamic", "early-exit")
HOST = ("student-sure", "ngram", "recycling", "lookahead", "early-exit-sure", "hybrid")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0, rule="target-sample"), Sampling(0.8, top_k=5, seed=3)], ids=["greedy", "t1", "cut"]
)
@pytest.mark.parametrize("kind", KINDS + HOST)
def test_asynchronous_rounds_give_the_same_answers(references, kind, sampling):
    target = Target.wrap(tiny("llama"))
    stop = Decoder(target, slots=5, kernels=False).generate(PROMPTS, sampling, 8)[2].tokens[5]
    expected = Decoder(target, slots=5, kernels=False).generate(PROMPTS, sampling, 10, {stop})
    assert {answer.reason for answer in expected} == {"stop", "length"}
    decoder = Decoder(target, drafter_of(kind, target), slots=2, kernels=True)
    for _ in range(2):  # the second time in the same cache
        got = decoder.generate(PROMPTS, sampling, 10, {stop})
        assert [(answer.tokens, answer.reason) for answer in got] == [(answer.tokens, answer.reason) for answer in expected]
        assert all(sum(round.length for round in answer.rounds) == len(answer.tokens) for answer in got)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, rule="target-sample")], ids=["greedy", "t1"])
def test_asynchronous_rounds_that_accept_much(references, monkeypatch, sampling):
    """Paths of every length, some of which have to be moved, in slots whose requests come and go."""
    real, seen = graph_rounds.unpack_results, []
    monkeypatch.setattr(graph_rounds, "unpack_results", lambda rows: seen.extend(real(rows)) or real(rows))
    target = Target.wrap(tiny("llama"))
    prompts = PROMPTS * 3
    expected = Decoder(target, slots=5, kernels=False).generate(prompts, sampling, 17)
    got = Decoder(target, ScriptedDrafter(prompts, expected), slots=3, kernels=True).generate(prompts, sampling, 17)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    assert {round.accepted for answer in got for round in answer.rounds} == {1, 2, 3, 4}
    assert {result.in_place for result in seen} == {True, False}
    assert sum(len(answer.rounds) for answer in got) < 0.7 * sum(len(answer.tokens) for answer in got)


@pytest.mark.parametrize("kind", ["medusa", "student", "student-sure"])
def test_adaptive_depths_vary(references, kind):
    target = Target.wrap(tiny("llama"))
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=20)
    got = Decoder(target, drafter_of(kind, target), slots=2, adaptive=AdaptiveDepth(), kernels=True).generate(PROMPTS, max_new_tokens=20)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    assert len({round.size for answer in got for round in answer.rounds}) > 1


class Cycle(AdaptiveDepth):
    """Every depth in turn, and 0 when a request has just begun."""

    def bind(self, max_depth):
        super().bind(max_depth)
        self.turn, self.changed = 0, False

    def depth(self, rows):
        self.turn, changed, self.changed = self.turn + 1, self.changed, False
        return 0 if changed else self.max_depth - self.turn % (self.max_depth + 1)

    def drop(self, rows):
        self.changed = True


@pytest.mark.parametrize("kind", KINDS[1:] + HOST)
def test_every_depth_in_turn(references, kind):
    """Requests start after rounds that drafted and after rounds that did not; buffers are no larger than necessary."""
    target = Target.wrap(tiny("llama"))
    answers = [answer.tokens for answer in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=30, stop_ids=())]
    stops = {next(token for token in answer[12:] if token not in answer[:12]) for answer in answers[:2]}
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=30, stop_ids=stops)
    assert len({len(answer.tokens) for answer in expected}) > 2
    got = Decoder(target, drafter_of(kind, target), slots=2, adaptive=Cycle(), kernels=True).generate(PROMPTS, None, 30, stops)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]


@pytest.mark.parametrize("kind", KINDS + HOST)
def test_up_to_the_last_position(references, kind, recwarn):
    """The last position of the target and of the draft model; rounds past it belong to no request."""
    target = Target.wrap(tiny("llama"))
    prompts = [[*PROMPTS[0] * 40], [3] * 117, [*PROMPTS[4] * 30]]
    expected = Decoder(target, kernels=False).generate(prompts, max_new_tokens=200, stop_ids=())
    assert {len(prompt) + len(answer.tokens) for prompt, answer in zip(prompts, expected, strict=True)} == {target.max_positions}
    got = Decoder(target, drafter_of(kind, target), slots=2, kernels=True).generate(prompts, max_new_tokens=200, stop_ids=())
    assert [(answer.tokens, answer.reason) for answer in got] == [(answer.tokens, "context") for answer in expected]
    assert not recwarn.list


def test_graphs_are_captured_again_when_something_changed(references):
    target = Target.wrap(tiny("llama"))
    expected = [answer.tokens for answer in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=12)]
    decoder = Decoder(target, drafter_of("student", target), kernels=True)

    def sizes():
        got = decoder.generate(PROMPTS, max_new_tokens=12)
        assert [answer.tokens for answer in got] == expected
        return {round.size for answer in got for round in answer.rounds}

    assert sizes() == {4}
    decoder.drafter.stop = Stopping("confidence", 0.9)
    assert 2 in sizes()
    decoder.drafter = drafter_of("ngram", target)
    sizes()
    decoder.drafter = drafter_of("student", target)
    assert sizes() == {4}
    decoder.drafter.model.model.double()  # its cache is of another dtype then
    assert sizes() == {4}


def test_times_are_of_rounds_alone(references, monkeypatch):
    """Neither AdaptiveDepth nor the records see the time of prefill and capture."""
    target = Target.wrap(tiny("llama"))
    decoder = Decoder(target, drafter_of("medusa", target), slots=2, adaptive=AdaptiveDepth(), kernels=True)
    run, learned = Prefill.run, []
    monkeypatch.setattr(Prefill, "run", lambda self, requests: time.sleep(0.5) or run(self, requests))
    real = graph_rounds.capture
    monkeypatch.setattr(graph_rounds, "capture", lambda *given: time.sleep(0.5) or real(*given))
    monkeypatch.setattr(decoder.adaptive, "learn", lambda rows, rounds, seconds: learned.append(seconds))
    got = decoder.generate(PROMPTS, max_new_tokens=8)
    assert learned and max(learned) < 0.5 and max(round.verify_s for answer in got for round in answer.rounds) < 0.5


@pytest.mark.parametrize("seed", range(6))
def test_random_rounds(seed, monkeypatch):
    """The first cases of `make test-rounds`."""
    soak_rounds.case(seed, monkeypatch)


def test_a_consumer_may_stop_early(references):
    target = Target.wrap(tiny("llama"))
    decoder = Decoder(target, drafter_of("medusa", target), slots=2, kernels=True)
    stream = decoder.stream(PROMPTS, max_new_tokens=10)
    next(stream)
    stream.close()
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=10)
    assert [answer.tokens for answer in decoder.generate(PROMPTS, max_new_tokens=10)] == [answer.tokens for answer in expected]


@pytest.mark.parametrize("leftmost", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, rule="target-sample")], ids=["greedy", "t1"])
def test_trees_of_the_host(references, leftmost, sampling):
    """Random trees from the host that contain the answer, of different sizes: every round ends where the drafter knows it must."""
    target = Target.wrap(tiny("llama"))
    prompts = PROMPTS * 2 + [[7, 7]]
    prompts = [[*prompt, number] for number, prompt in enumerate(prompts)]
    expected = Decoder(target, slots=3, kernels=False).generate(prompts, sampling, 30, ())
    planting = PlantingDrafter(prompts, [answer.tokens for answer in expected], target.vocab_size, leftmost=leftmost, taps=(0,))
    got = Decoder(target, planting, slots=3, kernels=True).generate(prompts, sampling, 18, ())
    assert [answer.tokens for answer in got] == [answer.tokens[:18] for answer in expected]
    assert planting.mismatches == 0 and set(planting.accepted) == {0, 1, 2, 3, 4}
    assert planting.padded and (planting.moves if leftmost < 1 else planting.in_place)


def test_graphs_serve_again(references, monkeypatch):
    """Later calls use the graphs again, unless something that they read has moved; a drafter may serve another decoder meanwhile."""
    real, recorded = graph_rounds.capture, []
    monkeypatch.setattr(graph_rounds, "capture", lambda *given: recorded.append(1) or real(*given))
    target = Target.wrap(tiny("llama"))
    expected = [answer.tokens for answer in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=12)]
    drafter = drafter_of("eagle3", target)
    decoder, second = (Decoder(target, drafter, slots=rows, context=40, kernels=True) for rows in (1, 3))

    def records(by=decoder, **more):
        recorded.clear()
        assert [answer.tokens for answer in by.generate(PROMPTS, max_new_tokens=12, **more)] == expected
        return bool(recorded)

    assert [records(), records(), records()] == [True, False, False]
    assert [records(second), records(second), records(decoder), records(decoder)] == [True, False, True, False]
    drafter.tree_spec = DynamicTree(2, 2, 4)
    assert [records(), records()] == [True, False]
    drafter.lm_head.weight.data = drafter.lm_head.weight.data.clone()
    assert [records(), records()] == [True, False]
    with torch.no_grad():
        drafter.lm_head.weight.mul_(-1)  # trained on: the same place
    assert not records()
    assert [records(sampling=Sampling(0.0, seed=1)), records(sampling=Sampling(0.0, seed=1))] == [True, False]


def test_no_more_slots_than_are_in_use(references, monkeypatch):
    """Five of five at first; then four, two or one, as the slots above end."""
    runners = []
    monkeypatch.setattr(decoders, "GraphRunner", lambda *given: runners.append(GraphRunner(*given)) or runners[-1])
    target = Target.wrap(tiny("llama"))
    answers = [answer.tokens for answer in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=30, stop_ids=())]
    stops = {next(token for token in answer[12:] if token not in answer[:12]) for answer in answers[3:]}
    expected = [answer.tokens for answer in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=30, stop_ids=stops)]
    got = Decoder(target, drafter_of("eagle3", target), slots=5, kernels=True).generate(PROMPTS, None, 30, stops)
    assert [answer.tokens for answer in got] == expected
    assert 5 in {rows for rows, *_ in runners[0]._captured} <= {1, 2, 4, 5} and len(runners[0]._captured) > 1


@pytest.mark.parametrize("kind", ["eagle3", "student", "ngram"])
def test_in_parts(references, monkeypatch, kind):
    """The parts of a round are graphs of their own, so that they are timed: nothing else changes."""
    runners = []
    monkeypatch.setattr(decoders, "GraphRunner", lambda *given: runners.append(GraphRunner(*given[:-1], True)) or runners[-1])
    target = Target.wrap(tiny("llama"))
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=14)
    got = Decoder(target, drafter_of(kind, target), slots=2, kernels=True).generate(PROMPTS, max_new_tokens=14)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    assert {len(parts) for _, parts in runners[0]._captured.values()} == {4}


def test_the_seconds_of_a_round_are_divided_completely():
    """A host drafter's learning is drafting, and gaps on the device are of all else."""
    stamps = [0.0, 1000.0, 1500.0, 1750.0, 2000.0]  # ms

    def event(at):
        return SimpleNamespace(at=at, elapsed_time=lambda end: end.at - at)

    parts: Any = InFlightRound(torch.zeros(1), [event(at) for at in stamps], host_learn_s=0.5)
    assert parts.seconds(4.0) == (1.75, 0.5, 1.75)
    assert parts.seconds(2.0) == (1.75, 0.5, 0.25), "no less than the commit took"
    assert InFlightRound(torch.zeros(1), []).seconds(4.0) == (0.0, 4.0, 0.0)


def test_what_capturing_took_is_counted(references):
    target = Target.wrap(tiny("llama"))
    decoder = Decoder(target, drafter_of("eagle3", target), kernels=True, context=40)
    decoder.generate(PROMPTS[:1], max_new_tokens=4)
    captured_s = decoder.counters.capture_s
    decoder.generate(PROMPTS[:1], max_new_tokens=4)
    assert decoder.counters.capture_s == captured_s > 0


@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        ("llama", DynamicTree(2, 2, 5), Sampling()),
        ("gemma3", StaticTree.chain(2), Sampling(1.0, rule="target-sample")),
        ("gpt_oss", StaticTree.from_paths([(0,), (1,), (0, 0)]), Sampling(0.9, top_p=0.9)),
    ],
)
@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")
def test_with_the_kernels_themselves(name, shape, sampling):
    """Token for token plain decoding's, by Triton's interpreter: windows, sinks, soft-capping, both kinds of trees."""
    target, draft = (Target.wrap(tiny(name, seed)) for seed in (0, 0))
    prompts = PROMPTS[:2]
    expected = Decoder(target, slots=2, kernels=False).generate(prompts, sampling, 5)
    got = Decoder(target, DraftModel(draft, shape), slots=2, kernels=True).generate(prompts, sampling, 5)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    assert max(round.accepted for answer in got for round in answer.rounds) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, rule="target-sample")], ids=["greedy", "t1"])
def test_graphs_give_the_same_answers(kind, sampling):
    target = Target.wrap(tiny("llama").cuda())
    expected = Decoder(target, slots=2).generate(PROMPTS, sampling, 14)
    decoder = Decoder(target, drafter_of(kind, target), slots=2, kernels=True)
    assert decoder.refusal(sampling) == ""
    for _ in range(2):  # the second time in the same cache
        assert [answer.tokens for answer in decoder.generate(PROMPTS, sampling, 14)] == [answer.tokens for answer in expected]


def test_a_decoder_that_began_in_inference_mode_goes_on_outside(monkeypatch):
    taped.install(monkeypatch, replayed=False)
    target = Target.wrap(tiny("llama"))
    decoder = Decoder(target, slots=2, context=40, kernels=True)
    with torch.inference_mode():
        (first,) = decoder.generate(PROMPTS[:1], None, 4)
    assert decoder.generate(PROMPTS[:1], None, 4)[0].tokens == first.tokens


def test_kernels_need_the_drafters_device_too(monkeypatch):
    monkeypatch.setattr(decoders, "missing", lambda device: "no kernels there" if device.type == "meta" else "")
    away = type("Away", (Plain,), {"device": torch.device("meta")})()
    Decoder(Target.wrap(tiny("llama")), Plain(), kernels=True)
    with pytest.raises(ValueError, match="kernels: no kernels there"):
        Decoder(Target.wrap(tiny("llama")), away, kernels=True)


def test_reasons():
    target = Target.wrap(tiny("llama"))
    assert refusal(target, Plain(), Sampling(), False) == "kernels are off"
    with kernels.use(True):
        assert "CUDA" in refusal(target, Plain(), Sampling(), False)
        fake = type("On", (), {"device": torch.device("cuda"), "model": target.model})()
        away = type("Away", (), {"capturable": True, "device": torch.device("cpu")})()
        assert "another device" in refusal(fake, away, Sampling(), False)
        assert "processors" in refusal(fake, Plain(), Sampling(), True)
        assert "rejection" in refusal(fake, Plain(), Sampling(1.0, rule="rejection"), False)
        wide = type("Wide", (), {"capturable": True, "device": fake.device, "tree_spec": DynamicTree(40, 8, 64)})()
        assert "encodes more nodes than the kernels' 256" in refusal(fake, wide, Sampling(), False)
        wide.tree_spec = DynamicTree(32, 8, 64)
        assert refusal(fake, wide, Sampling(), False) == refusal(fake, Plain(), Sampling(), False) == ""
        for threshold, says in ((6.0, "outliers"), (0.0, "")):
            fake.model.config.quantization_config = {"load_in_8bit": True, "llm_int8_threshold": threshold}
            assert says in refusal(fake, Plain(), Sampling(), False)
        del fake.model.config.quantization_config
    assert Decoder(target, kernels=False).refusal(Sampling()) == "kernels are off"


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")
def test_why_rounds_are_no_graphs_is_said():
    decoder = Decoder(Target.wrap(tiny("llama")), kernels=True)
    with pytest.warns(UserWarning, match="rounds are not CUDA graphs: a graph needs a CUDA device"):
        decoder.generate([[1]], max_new_tokens=1)


def test_kernels_are_on_in_the_thread_that_uses_them_alone():
    """Two decoders overlap: the first to leave neither ends the second's nor leaves its own on."""
    entered, leave, seen = threading.Event(), threading.Event(), []

    def second():
        with kernels.use(True):
            entered.set()
            leave.wait(30)
            seen.append(kernels.active())
        seen.append(kernels.active())

    thread = threading.Thread(target=second)
    with kernels.use(True):
        thread.start()
        assert entered.wait(30) and kernels.active()
    assert not kernels.active()
    leave.set()
    thread.join(30)
    assert seen == [True, False] and not kernels.active()
