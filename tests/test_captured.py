"""Rounds in one shape: what a graph will hold, run as it is on the CPU, with the kernels' twins in their places."""

import time

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
from draftsmith.inference.graph_rounds import GraphRunner, refusal
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

pytest.importorskip("triton")
PROMPTS = [[5, 6, 7], [9, 3], [1, 2, 3, 4, 5, 6], [8], [4, 4, 4, 2]]


@pytest.fixture(params=["run", "replayed"])
def twins(request, monkeypatch):
    """Kernels are on, and each is its plain form: Triton's interpreter is slow, and has its own tests. Rounds run as they are, or replayed
    from what was recorded of the first of their kind."""
    taped.install(monkeypatch, replayed=request.param == "replayed")


class HostResult:
    """Knows the answers, and hides them from round to round at other ranks, or not at all: on the device alone."""

    capturable, taps, max_depth = True, (), 3
    tree_spec = StaticTree.from_paths([(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 1), (1,), (1, 1), (1, 1, 1)])
    max_nodes = tree_spec.num_nodes

    def __init__(self, prompts, answers):
        whole = [prompt + answer.tokens + [0] * 8 for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, whole))
        self.known = torch.tensor([ids + [0] * (width - len(ids)) for ids in whole])

    def bind(self, target, rows, context):
        self.vocab = target.vocab_size

    def propose(self, ask):
        place = ask.positions[:, None] + 1 + torch.arange(3)
        right = self.known[ask.noise_keys].gather(1, place.clamp(max=self.known.shape[1] - 1))  # [B,K]
        children = torch.stack(((right + 1) % self.vocab, (right + 2) % self.vocab), -1)  # [B,K,R]
        rank = (place // 3 + ask.noise_keys[:, None]) % 3  # 2: nowhere
        children = torch.where(torch.arange(2) == rank[..., None], right[..., None], children)
        return self.tree_spec.cut(ask.depth).tree(ask.last_tokens, children)

    def start(self, *_):
        pass

    accept = drop = start


def drafter_of(kind, target):
    if kind == "plain":
        return Plain()
    if kind == "ngram":
        return Ngram(StaticTree.from_paths([(0,), (0, 0), (1,), (0, 0, 0)]))
    if kind.startswith("student"):
        shape = {"tree": StaticTree.from_paths([(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]), "beam": DynamicTree(3, 2, 6)}
        confidence = 0.2 if kind.endswith("sure") else 0.0
        # Near the target, so that every length is accepted.
        return DraftModel(near(target), shape.get(kind[8:], StaticTree.chain(3)), confidence=confidence)
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


KINDS = ("plain", "medusa", "eagle1", "eagle3", "student", "student-tree", "student-beam")
HOST = ("student-sure", "ngram")


@pytest.mark.parametrize("kind", KINDS + HOST)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0, rule="target-sample"), Sampling(0.8, top_k=5, seed=3)], ids=["greedy", "t1", "cut"]
)
def test_late_rounds_give_the_same_answers(twins, kind, sampling):
    target = Target.wrap(tiny("llama"))
    stop = Decoder(target, slots=5, kernels=False).generate(PROMPTS, sampling, 8)[2].tokens[5]
    expected = Decoder(target, slots=5, kernels=False).generate(PROMPTS, sampling, 10, {stop})
    assert {one.reason for one in expected} == {"stop", "length"}
    decoder = Decoder(target, drafter_of(kind, target), slots=2, kernels=True)
    for _ in range(2):  # the second time in the same cache
        got = decoder.generate(PROMPTS, sampling, 10, {stop})
        assert [(one.tokens, one.reason) for one in got] == [(one.tokens, one.reason) for one in expected]
        assert all(sum(round.length for round in one.rounds) == len(one.tokens) for one in got)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, rule="target-sample")], ids=["greedy", "t1"])
def test_late_rounds_that_accept_much(twins, monkeypatch, sampling):
    """Paths of every length, also such as have to be moved, in rows that come and go."""
    real, seen = graph_rounds.unpacked, []
    monkeypatch.setattr(graph_rounds, "unpacked", lambda rows: seen.extend(real(rows)) or real(rows))
    target = Target.wrap(tiny("llama"))
    prompts = PROMPTS * 3
    expected = Decoder(target, slots=5, kernels=False).generate(prompts, sampling, 17)
    got = Decoder(target, HostResult(prompts, expected), slots=3, kernels=True).generate(prompts, sampling, 17)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert {round.accepted for one in got for round in one.rounds} == {1, 2, 3, 4}
    assert {told.in_place for told in seen} == {True, False}
    assert sum(len(one.rounds) for one in got) < 0.7 * sum(len(one.tokens) for one in got)


@pytest.mark.parametrize("kind", ["medusa", "student", "student-sure"])
def test_with_a_governor_depths_vary(twins, kind):
    target = Target.wrap(tiny("llama"))
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=20)
    got = Decoder(target, drafter_of(kind, target), slots=2, governor=AdaptiveDepth(), kernels=True).generate(PROMPTS, max_new_tokens=20)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert len({round.size for one in got for round in one.rounds}) > 1


class Cycle(AdaptiveDepth):
    """Every depth in turn, and none where a row has just begun."""

    def bind(self, max_depth):
        super().bind(max_depth)
        self.turn, self.changed = 0, False

    def depth(self, rows):
        self.turn, changed, self.changed = self.turn + 1, self.changed, False
        return 0 if changed else self.max_depth - self.turn % (self.max_depth + 1)

    def drop(self, rows):
        self.changed = True


@pytest.mark.parametrize("kind", KINDS[1:] + HOST)
def test_every_depth_in_turn(twins, kind):
    """Rows start after rounds that drafted and after such that did not; buffers are no larger than they need be."""
    target = Target.wrap(tiny("llama"))
    answers = [one.tokens for one in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=30, stop_ids=())]
    stops = {next(token for token in answer[12:] if token not in answer[:12]) for answer in answers[:2]}
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=30, stop_ids=stops)
    assert len({len(one.tokens) for one in expected}) > 2
    got = Decoder(target, drafter_of(kind, target), slots=2, governor=Cycle(), kernels=True).generate(PROMPTS, None, 30, stops)
    assert [one.tokens for one in got] == [one.tokens for one in expected]


@pytest.mark.parametrize("kind", KINDS + HOST)
def test_up_to_the_last_position(twins, kind, recwarn):
    """Of the target and of the student; rounds past it are nobody's."""
    target = Target.wrap(tiny("llama"))
    prompts = [[*PROMPTS[0] * 40], [3] * 117, [*PROMPTS[4] * 30]]
    expected = Decoder(target, kernels=False).generate(prompts, max_new_tokens=200, stop_ids=())
    assert {len(prompt) + len(one.tokens) for prompt, one in zip(prompts, expected, strict=True)} == {target.max_positions}
    got = Decoder(target, drafter_of(kind, target), slots=2, kernels=True).generate(prompts, max_new_tokens=200, stop_ids=())
    assert [(one.tokens, one.reason) for one in got] == [(one.tokens, "context") for one in expected]
    assert not recwarn.list


def test_what_graphs_were_made_of_is_compared(twins):
    target = Target.wrap(tiny("llama"))
    expected = [one.tokens for one in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=12)]
    decoder = Decoder(target, drafter_of("student", target), kernels=True)

    def sizes():
        got = decoder.generate(PROMPTS, max_new_tokens=12)
        assert [one.tokens for one in got] == expected
        return {round.size for one in got for round in one.rounds}

    assert sizes() == {4}
    decoder.drafter.confidence = 0.9
    assert 2 in sizes()
    decoder.drafter = drafter_of("ngram", target)
    sizes()
    decoder.drafter = drafter_of("student", target)
    assert sizes() == {4}
    decoder.drafter.model.model.double()  # its cache is of another dtype then
    assert sizes() == {4}


def test_times_are_of_rounds_alone(twins, monkeypatch):
    """Neither the governor nor the records are told what prefill and recording took."""
    target = Target.wrap(tiny("llama"))
    decoder = Decoder(target, drafter_of("medusa", target), slots=2, governor=AdaptiveDepth(), kernels=True)
    slow, told = decoder._prefill, []
    monkeypatch.setattr(decoder, "_prefill", lambda *given: time.sleep(0.5) or slow(*given))
    real = graph_rounds.record
    monkeypatch.setattr(graph_rounds, "record", lambda *given: time.sleep(0.5) or real(*given))
    monkeypatch.setattr(decoder.governor, "learn", lambda rows, rounds, seconds: told.append(seconds))
    got = decoder.generate(PROMPTS, max_new_tokens=8)
    assert told and max(told) < 0.5 and max(round.verify_s for one in got for round in one.rounds) < 0.5


@pytest.mark.parametrize("seed", range(6))
def test_random_rounds(seed, monkeypatch):
    """The first cases of `make test-rounds`."""
    soak_rounds.case(seed, monkeypatch)


def test_a_consumer_may_stop_early(twins):
    target = Target.wrap(tiny("llama"))
    decoder = Decoder(target, drafter_of("medusa", target), slots=2, kernels=True)
    stream = decoder.stream(PROMPTS, max_new_tokens=10)
    next(stream)
    stream.close()
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=10)
    assert [one.tokens for one in decoder.generate(PROMPTS, max_new_tokens=10)] == [one.tokens for one in expected]


@pytest.mark.parametrize("leftmost", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, rule="target-sample")], ids=["greedy", "t1"])
def test_trees_of_the_host(twins, leftmost, sampling):
    """Random trees with the answer in them, of sizes that differ from row to row: every round ends where the drafter knows it must."""
    target = Target.wrap(tiny("llama"))
    prompts = PROMPTS * 2 + [[7, 7]]
    prompts = [[*prompt, number] for number, prompt in enumerate(prompts)]
    expected = Decoder(target, slots=3, kernels=False).generate(prompts, sampling, 30, ())
    planting = PlantingDrafter(prompts, [one.tokens for one in expected], target.vocab_size, leftmost=leftmost, taps=(0,))
    got = Decoder(target, planting, slots=3, kernels=True).generate(prompts, sampling, 18, ())
    assert [one.tokens for one in got] == [one.tokens[:18] for one in expected]
    assert planting.mismatches == 0 and set(planting.accepted) == {0, 1, 2, 3, 4}
    assert planting.padded and (planting.moves if leftmost < 1 else planting.in_place)


def test_graphs_serve_again(twins, monkeypatch):
    """In later calls too, unless something that they read has moved; a drafter may serve other decoders meanwhile."""
    real, recorded = graph_rounds.record, []
    monkeypatch.setattr(graph_rounds, "record", lambda *given: recorded.append(1) or real(*given))
    target = Target.wrap(tiny("llama"))
    expected = [one.tokens for one in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=12)]
    drafter = drafter_of("eagle3", target)
    decoder, other = (Decoder(target, drafter, slots=rows, context=40, kernels=True) for rows in (1, 3))

    def records(by=decoder, **more):
        recorded.clear()
        assert [one.tokens for one in by.generate(PROMPTS, max_new_tokens=12, **more)] == expected
        return bool(recorded)

    assert [records(), records(), records()] == [True, False, False]
    assert [records(other), records(other), records(decoder), records(decoder)] == [True, False, True, False]
    drafter.tree_spec = DynamicTree(2, 2, 4)
    assert [records(), records()] == [True, False]
    drafter.lm_head.weight.data = drafter.lm_head.weight.data.clone()
    assert [records(), records()] == [True, False]
    with torch.no_grad():
        drafter.lm_head.weight.mul_(-1)  # trained on: the same place
    assert not records()
    assert [records(sampling=Sampling(0.0, seed=1)), records(sampling=Sampling(0.0, seed=1))] == [True, False]


def test_no_more_rows_than_are_in_use(twins, monkeypatch):
    """Five of five at first; then four, two or one, as the rows above end."""
    made = []
    monkeypatch.setattr(decoders, "GraphRunner", lambda *given: made.append(GraphRunner(*given)) or made[-1])
    target = Target.wrap(tiny("llama"))
    answers = [one.tokens for one in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=30, stop_ids=())]
    stops = {next(token for token in answer[12:] if token not in answer[:12]) for answer in answers[3:]}
    expected = [one.tokens for one in Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=30, stop_ids=stops)]
    got = Decoder(target, drafter_of("eagle3", target), slots=5, kernels=True).generate(PROMPTS, None, 30, stops)
    assert [one.tokens for one in got] == expected
    assert 5 in {rows for rows, *_ in made[0]._kinds} <= {1, 2, 4, 5} and len(made[0]._kinds) > 1


@pytest.mark.parametrize("kind", ["eagle3", "student", "ngram"])
def test_in_parts(twins, monkeypatch, kind):
    """Graphs of their own for the parts of a round, for their times: nothing else changes."""
    made = []
    monkeypatch.setattr(decoders, "GraphRunner", lambda *given: made.append(GraphRunner(*given[:-1], True)) or made[-1])
    target = Target.wrap(tiny("llama"))
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=14)
    got = Decoder(target, drafter_of(kind, target), slots=2, kernels=True).generate(PROMPTS, max_new_tokens=14)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert {len(parts) for _, parts in made[0]._kinds.values()} == {4}


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
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert max(round.accepted for one in got for round in one.rounds) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, rule="target-sample")], ids=["greedy", "t1"])
def test_graphs_give_the_same_answers(kind, sampling):
    target = Target.wrap(tiny("llama").cuda())
    expected = Decoder(target, slots=2).generate(PROMPTS, sampling, 14)
    decoder = Decoder(target, drafter_of(kind, target), slots=2, kernels=True)
    assert decoder.refusal(sampling) == ""
    for _ in range(2):  # the second time in the same cache
        assert [one.tokens for one in decoder.generate(PROMPTS, sampling, 14)] == [one.tokens for one in expected]


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
        assert refusal(fake, Plain(), Sampling(), False) == ""
    assert Decoder(target, kernels=False).refusal(Sampling()) == "kernels are off"


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")
def test_why_rounds_are_no_graphs_is_said():
    decoder = Decoder(Target.wrap(tiny("llama")), kernels=True)
    with pytest.warns(UserWarning, match="rounds are not CUDA graphs: a graph needs a CUDA device"):
        decoder.generate([[1]], max_new_tokens=1)
