"""Rounds in one shape: what a graph will hold, run as it is on the CPU, with the kernels' twins in their places."""

import pytest
import torch
from interpreted import INTERPRETED
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import tiny

from draftsmith.inference import decoder as decoders
from draftsmith.inference import grow, kernels
from draftsmith.inference import verify as verification
from draftsmith.inference.attention import tree_attention
from draftsmith.inference.captured import Captured, refusal
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import Plain
from draftsmith.inference.governor import Governor
from draftsmith.inference.grow import Beam
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import Topology
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

pytest.importorskip("triton")
PROMPTS = [[5, 6, 7], [9, 3], [1, 2, 3, 4, 5, 6], [8], [4, 4, 4, 2]]


@pytest.fixture
def twins(monkeypatch):
    """Kernels are on, and each is its plain form: Triton's interpreter is slow, and has its own tests."""
    from draftsmith.inference.kernels import attention, commit, verify

    monkeypatch.setattr(attention, "tree_attention", attention.tree_attention_reference)
    monkeypatch.setattr(commit, "commit", lambda groups, *rest: [commit.commit_reference(group.buffers, *rest) for group in groups])
    monkeypatch.setattr(verify, "verify", verification.verify)
    monkeypatch.setattr(grow, "active", lambda: False)
    monkeypatch.setattr(decoders, "missing", lambda device: "")
    monkeypatch.setattr(Decoder, "refusal", lambda self, sampling, processed=False: "")


class Told:
    """Knows the answers, and hides them from round to round at other ranks, or not at all: on the device alone."""

    capturable, taps, max_depth = True, (), 3
    shape = Topology.from_paths([(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 1), (1,), (1, 1), (1, 1, 1)])
    max_nodes = shape.num_nodes

    def __init__(self, prompts, answers):
        whole = [prompt + answer.tokens + [0] * 8 for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, whole))
        self.known = torch.tensor([ids + [0] * (width - len(ids)) for ids in whole])

    def bind(self, target, rows, context):
        self.vocab = target.vocab_size

    def propose(self, ask):
        place = ask.position[:, None] + 1 + torch.arange(3)
        right = self.known[ask.request].gather(1, place.clamp(max=self.known.shape[1] - 1))  # [B,K]
        children = torch.stack(((right + 1) % self.vocab, (right + 2) % self.vocab), -1)  # [B,K,R]
        rank = (place // 3 + ask.request[:, None]) % 3  # 2: nowhere
        children = torch.where(torch.arange(2) == rank[..., None], right[..., None], children)
        return self.shape.cut(ask.depth).tree(ask.root, children)

    def start(self, *_):
        pass

    accept = drop = start


def drafter_of(kind, target):
    if kind == "plain":
        return Plain()
    if kind == "medusa":
        drafter = new_drafter("medusa", target, num_heads=3)
        drafter.shape = Topology.from_paths([(0,), (0, 0), (1,), (0, 1), (0, 0, 0)])
    else:
        drafter = new_drafter("eagle", target, version=int(kind[-1]), **({"taps": [0, 1]} if kind[-1] == "3" else {}), steps=4)
        drafter.shape = Beam(3, 2, 6) if kind[-1] == "3" else Topology.from_paths([(0,), (0, 0), (1,), (0, 0, 0)])
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in drafter.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return drafter.eval()


KINDS = ("plain", "medusa", "eagle1", "eagle3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0, rule="one-draw"), Sampling(0.8, top_k=5, seed=3)], ids=["greedy", "t1", "cut"]
)
def test_late_rounds_give_the_same_answers(twins, kind, sampling):
    target = Target.wrap(tiny("llama"))
    stop = Decoder(target, rows=5, kernels=False).generate(PROMPTS, sampling, 8)[2].tokens[5]
    expected = Decoder(target, rows=5, kernels=False).generate(PROMPTS, sampling, 10, {stop})
    assert {one.reason for one in expected} == {"stop", "length"}
    decoder = Decoder(target, drafter_of(kind, target), rows=2, kernels=True)
    for _ in range(2):  # the second time in the same cache
        got = decoder.generate(PROMPTS, sampling, 10, {stop})
        assert [(one.tokens, one.reason) for one in got] == [(one.tokens, one.reason) for one in expected]
        assert all(sum(round.length for round in one.rounds) == len(one.tokens) for one in got)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, rule="one-draw")], ids=["greedy", "t1"])
def test_late_rounds_that_accept_much(twins, monkeypatch, sampling):
    """Paths of every length, also such as have to be moved, in rows that come and go."""
    from draftsmith.inference.kernels import commit

    real, moved = commit.commit, []
    monkeypatch.setattr(
        commit, "commit", lambda groups, rows, start, slots, first: (moved.append(slots), real(groups, rows, start, slots, first))
    )
    target = Target.wrap(tiny("llama"))
    prompts = PROMPTS * 3
    expected = Decoder(target, rows=5, kernels=False).generate(prompts, sampling, 17)
    got = Decoder(target, Told(prompts, expected), rows=3, kernels=True).generate(prompts, sampling, 17)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert {round.accepted for one in got for round in one.rounds} == {1, 2, 3, 4}
    paths = torch.cat(moved)
    assert ((paths > 0) & (paths != torch.arange(1, 4))).any()
    assert sum(len(one.rounds) for one in got) < 0.7 * sum(len(one.tokens) for one in got)


def test_with_a_governor_depths_vary(twins):
    target = Target.wrap(tiny("llama"))
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=20)
    got = Decoder(target, drafter_of("medusa", target), rows=2, governor=Governor(), kernels=True).generate(PROMPTS, max_new_tokens=20)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert len({round.size for one in got for round in one.rounds}) > 1


def test_a_consumer_may_stop_early(twins):
    target = Target.wrap(tiny("llama"))
    decoder = Decoder(target, drafter_of("medusa", target), rows=2, kernels=True)
    stream = decoder.stream(PROMPTS, max_new_tokens=10)
    next(stream)
    stream.close()
    expected = Decoder(target, kernels=False).generate(PROMPTS, max_new_tokens=10)
    assert [one.tokens for one in decoder.generate(PROMPTS, max_new_tokens=10)] == [one.tokens for one in expected]


class Ops(TorchDispatchMode):
    """Every operation with the shapes of its tensors; those that read the device are refused."""

    READING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")

    def __init__(self, first):
        super().__init__()
        self.seen, self.first = [], first

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function)
        assert self.first or not any(word in name for word in self.READING), f"{name} waits for the device"
        out = function(*arguments, **(keywords or {}))
        shapes = [tuple(leaf.shape) for leaf in tree_leaves((arguments, keywords, out)) if isinstance(leaf, torch.Tensor)]
        self.seen.append((name, shapes))
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "coupled"])
def test_rounds_ask_nothing_and_have_one_shape(twins, monkeypatch, kind, sampling):
    """What a capture needs: the same operations on the same shapes in every round, none that waits, no tensor made from host numbers."""
    target = Target.wrap(tiny("llama"))
    rounds = []
    real = Captured.round

    def watched(self, depth):
        with Ops(first=not rounds) as ops, monkeypatch.context() as patched:
            if rounds:  # the first may make what is kept

                def refused(*_, **__):
                    raise AssertionError("a tensor was made from numbers of the host")

                patched.setattr(torch, "tensor", refused)
            told = real(self, depth)
        rounds.append(ops.seen)
        return told

    monkeypatch.setattr(Captured, "round", watched)
    Decoder(target, drafter_of(kind, target), rows=2, kernels=True).generate(PROMPTS[:2], sampling, 16)
    assert len(rounds) > 4 and len(rounds[-1]) > 50
    assert all(one == rounds[2] for one in rounds[2:])


@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        ("llama", Beam(2, 2, 5), Sampling()),
        ("gemma3", Topology.chain(2), Sampling(1.0, rule="one-draw")),
        ("gpt_oss", Topology.from_paths([(0,), (1,), (0, 0)]), Sampling(0.9, top_p=0.9)),
    ],
)
@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is off")
def test_with_the_kernels_themselves(name, shape, sampling):
    """Token for token plain decoding's, by Triton's interpreter: windows, sinks, soft-capping, both kinds of trees."""
    target, draft = (Target.wrap(tiny(name, seed)) for seed in (0, 0))
    prompts = PROMPTS[:2]
    expected = Decoder(target, rows=2, kernels=False).generate(prompts, sampling, 5)
    got = Decoder(target, DraftModel(draft, shape), rows=2, kernels=True).generate(prompts, sampling, 5)
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert max(round.accepted for one in got for round in one.rounds) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, rule="one-draw")], ids=["greedy", "t1"])
def test_graphs_give_the_same_answers(kind, sampling):
    target = Target.wrap(tiny("llama").cuda())
    expected = Decoder(target, rows=2).generate(PROMPTS, sampling, 14)
    decoder = Decoder(target, drafter_of(kind, target), rows=2, kernels=True)
    assert decoder.refusal(sampling) == ""
    for _ in range(2):  # the second time in the same cache
        assert [one.tokens for one in decoder.generate(PROMPTS, sampling, 14)] == [one.tokens for one in expected]


def test_reasons():
    target = Target.wrap(tiny("llama"))
    assert refusal(target, Plain(), Sampling(), False) == "kernels are off"
    with kernels.use(True):
        assert "CUDA" in refusal(target, Plain(), Sampling(), False)
        fake = type("On", (), {"device": torch.device("cuda"), "model": target.model})()
        assert "needs the host to draft" in refusal(fake, Ngram(), Sampling(), False)
        assert "processors" in refusal(fake, Plain(), Sampling(), True)
        assert "rejection" in refusal(fake, Plain(), Sampling(1.0, rule="rejection"), False)
        assert refusal(fake, Plain(), Sampling(), False) == ""
    with tree_attention(target.model):
        assert Decoder(target, kernels=False).refusal(Sampling()) == "kernels are off"
