"""Every architecture in models/ is a drafter: lossless with every tree, in batches and slots, replayed as a graph, saved, planned.

Architectures come from `methods()`, their small settings from `Config.tiny_settings`, their recipes from recipes/. A new architecture
needs no line here.
"""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import taped
import torch
from decoding_cases import relative
from planted import Planted, seen_in
from transformers import AutoModel
from zoo import VOCAB

from draftsmith.inference import level_heads
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Drafter, NodeOutput, RoundContext
from draftsmith.inference.expand import DynamicTree, choose
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import DrafterModel, architecture, load_drafter, methods, new_drafter
from draftsmith.models.pard import ParallelDraftModel
from draftsmith.models.target import Target
from draftsmith.train.losses import chunked
from draftsmith.train.plan import report
from draftsmith.train.plan.memory import GIB, Machine

CASES = [(method, name) for method in methods() for name in architecture(method).Config.tiny_settings()]
LOSSLESS = [*CASES, ("draft model", "parallel")]  # a causal LM, and no architecture of models/
OF_EACH = list({method: (method, name) for method, name in LOSSLESS}.values())  # one architecture of each method
TREES = {
    "chain": StaticTree.chain(3),
    "static": StaticTree.from_paths([(0,), (0, 0), (1,), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 1)]),
    "dynamic": DynamicTree(3, 2, 8),
}
HOWS = {
    "greedy": Sampling(),
    "target-sample": Sampling(0.9, top_k=20, seed=11, rule="target-sample"),
    "shared-noise": Sampling(0.8, top_p=0.95, seed=5, rule="shared-noise"),
}
NEW = 18
CONTEXT = 20  # answers end after 12 to 18 tokens, so that slots are taken over beside running ones
PROMPTS = [[5, 6, 7], [9, 3], [1, 2, 3, 4, 5, 6, 11, 30], [8], [4, 4, 4, 2], [17, 40, 3, 3, 9]]


@pytest.fixture(scope="module")
def answers(target):
    return {name: [text.tokens for text in Decoder(target, context=CONTEXT).generate(PROMPTS, how, NEW, ())] for name, how in HOWS.items()}


def build(target: Target, method: str, name: str) -> Any:
    """Random weights, not far from what a fresh drafter has."""
    torch.manual_seed(0)
    if method == "draft model":
        return ParallelDraftModel(relative("llama", 0.1), TREES["static"], mask_token=7, depth_limit=4)
    drafter = new_drafter(method, target, **architecture(method).Config.tiny_settings()[name])
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return drafter.eval()


def test_architectures_are_there():
    assert {"medusa", "eagle"} <= set(methods()) and len(CASES) >= len(methods())


@pytest.mark.parametrize("method, name", CASES)
def test_it_is_a_drafter(target, method, name):
    drafter = build(target, method, name)
    assert isinstance(drafter, Drafter) and drafter.method == method == drafter.config.model_type
    # Before 5.24, transformers calls the class without arguments to save a config, unless this is set; some of ours cannot be made so.
    assert drafter.config.has_no_defaults_at_init or method == "draft model"
    assert 1 <= drafter.max_depth <= drafter.depth_limit and drafter.max_nodes > drafter.max_depth


@pytest.mark.one_in(5)
@pytest.mark.parametrize("way, tree", [*(("eager", tree) for tree in TREES), ("replayed", "static"), ("replayed", "dynamic")])
@pytest.mark.parametrize("method, name", LOSSLESS)
def test_output_is_plain_decodings(target, answers, method, name, way, tree, monkeypatch):
    """Alone and in batches with replaced slots, under each rule in one of these ways, greedily round by round in both; every accepted length; with
    adaptive depth; round by round, and as graphs."""
    if way == "replayed":
        pytest.importorskip("triton")
        taped.install(monkeypatch, replayed=True)
    if tree == "dynamic":  # sharp distributions have deep trees; of even ones the likeliest nodes are all children of the root
        monkeypatch.setattr(level_heads, "choose", lambda logits, *rest: choose(100 * logits, *rest))
    drafter = build(target, method, name)
    drafter.tree_spec = TREES[tree]
    propose, seen = drafter.propose, {1: Counter(), 3: Counter()}
    for how, sampling in HOWS.items():
        drafter.propose = Planted(propose, PROMPTS, answers[how], VOCAB)
        both = way == "eager" and sampling.greedy
        for slots in (1, 3) if both else (1,) if how == "target-sample" else (3,):
            depth = AdaptiveDepth() if slots == 3 and how == "greedy" else None
            decoder = Decoder(target, drafter, slots=slots, chunk=3, context=CONTEXT, kernels=way == "replayed", adaptive=depth)
            texts, counts = seen_in(decoder.stream(PROMPTS, sampling, NEW, ()), len(PROMPTS))
            assert texts == answers[how], (how, slots)
            seen[slots] += counts
    # Adaptive depth follows the clock, so that the counts of batches vary.
    for slots, lengths in ((1, 4), (3, 3)):
        assert seen[slots]["drafted"] >= 20 and all(seen[slots][length] >= 1 for length in range(lengths)), (slots, seen)
    assert seen[3]["replaced"] >= 1


@pytest.mark.parametrize("method, name", [pytest.param(*case, marks=[pytest.mark.slow] * (case not in OF_EACH)) for case in LOSSLESS])
def test_untrained_drafts_are_verified_too(target, answers, method, name):
    """Its own proposals, nothing planted, greedy and by each rule that draws children."""
    drafter = build(target, method, name)
    drafter.tree_spec = TREES["static"]
    for how, sampling in HOWS.items():
        texts = Decoder(target, drafter, slots=4, context=CONTEXT).generate(PROMPTS, sampling, NEW, ())
        assert [text.tokens for text in texts] == answers[how]
    for rule in ("rejection", "rejection-replacement"):
        sampling = Sampling(1.0, top_k=30, seed=3, rule=rule)
        alone, batch = (Decoder(target, drafter, slots=slots).generate(PROMPTS, sampling, NEW, ()) for slots in (1, 4))
        assert [text.tokens for text in alone] == [text.tokens for text in batch]


@pytest.mark.parametrize("method, name", OF_EACH)
def test_nothing_is_written_past_the_end_of_a_row(target, answers, method, name, monkeypatch):
    """As graphs, where rounds go on past the end, with all drafts accepted up to several ends: `taped` sees such a write."""
    pytest.importorskip("triton")
    taped.install(monkeypatch, replayed=True)
    drafter, prompt, answer = build(target, method, name), PROMPTS[1], answers["greedy"][1]
    drafter.tree_spec = StaticTree.chain(drafter.depth_limit)
    drafter.propose = Planted(drafter.propose, [prompt], [answer], VOCAB, always=True)
    for new in range(6, 11):
        (text,) = Decoder(target, drafter, slots=1, kernels=True).generate([prompt], None, new, ())
        assert text.tokens == answer[:new]
        assert max(round.accepted for round in text.rounds) > 1


def proposals(drafter: DrafterModel, target: Target, tree: str) -> list:
    """What it proposes after prompts of different lengths, one without a hidden state."""
    drafter.tree_spec = TREES[tree]
    drafter.bind(target, 4, 64)
    longest = max(map(len, PROMPTS[:4]))
    ids = torch.tensor([prompt[:-1] + [0] * (longest - len(prompt)) for prompt in PROMPTS[:4]])
    out = target.forward(ids, taps=drafter.taps)
    drafter.start([0, 1, 2, 3], PROMPTS[:4], NodeOutput(out.hidden, out.taps))
    last, positions = torch.tensor([prompt[-1] for prompt in PROMPTS[:4]]), torch.tensor([len(prompt) - 1 for prompt in PROMPTS[:4]])
    slots = torch.arange(4)
    proposed = drafter.propose(RoundContext([0, 1, 2, 3], slots, last, positions, slots, Sampling(), 9))
    proposed.validate()
    return [proposed.tokens.tolist(), proposed.parents.tolist(), proposed.size.tolist()]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method, name", CASES)
def test_a_saved_drafter_proposes_the_same(target, method, name, tree, tmp_path):
    drafter = build(target, method, name)
    expected = proposals(drafter, target, tree)
    assert expected[2][3] == 1 and min(expected[2][:3]) > 1  # a prompt of one token has no hidden state to draft from
    drafter.save_pretrained(tmp_path)
    again = load_drafter(tmp_path, target)
    assert type(again) is type(drafter) and again.config.tree == drafter.config.tree
    assert proposals(again, target, tree) == expected
    assert type(AutoModel.from_pretrained(tmp_path)) is type(drafter)


@pytest.mark.parametrize("method, name", CASES)
def test_position_records_rank_what_is_proposed(target, method, name):
    """The first candidate of `position_logits` is the first token of a chain after the same text."""
    drafter = build(target, method, name)
    text = torch.randint(VOCAB, (14,), generator=torch.Generator().manual_seed(2)).tolist()
    ids = torch.tensor(text)
    out = target.forward(ids[None], taps=drafter.taps)
    roots = torch.arange(1, len(text))
    logits = drafter.position_logits(drafter.position_features(ids, out), roots)
    assert logits.shape == (len(roots), drafter.depth_limit, VOCAB)
    drafter.tree_spec = TREES["chain"]
    drafter.bind(target, 1, 32)
    for root in (1, 4, 9):
        taps = None if out.taps is None else out.taps[:, :root]
        drafter.start([0], [text[: root + 1]], NodeOutput(out.hidden[:, :root], taps))
        zero = torch.zeros(1, dtype=torch.int64)
        tree = drafter.propose(RoundContext([0], zero, ids[root : root + 1], zero + root, zero, Sampling(), 9))
        assert tree.tokens[0, 1] == logits[root - 1, 0].argmax()


def tiny_recipes() -> dict[str, str]:
    """recipes/*-tiny.yaml -> the script that each is for."""
    recipes = sorted(Path(__file__).resolve().parents[1].glob("recipes/*-tiny.yaml"))
    scripts = {}
    for recipe in recipes:
        try:
            scripts[recipe.name] = report.method_of(str(recipe), []).__name__.rpartition(".")[2]
        except ValueError:  # of a script that trains no drafter
            continue
    return scripts


@pytest.mark.parametrize("method", [pytest.param(each, marks=[pytest.mark.slow] * (each in ("dspark", "peagle"))) for each in methods()])
def test_its_recipes_can_be_planned(method, monkeypatch):
    monkeypatch.setattr(chunked, "ROWS", 256)  # conftest's chunks of a row each are many operations
    recipes = [recipe for recipe, script in tiny_recipes().items() if script == method]
    assert recipes, f"recipes/ has no {method}*-tiny.yaml"
    for recipe in recipes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = report.report(recipe, [], Machine(1, 1, GIB, cpu=True))
        assert plan["drafter"]["trained"] > 0 and plan["work"]["flops_per_token"] > 0
        assert all(launcher["gradients"] > 0 and launcher["activations"] > 0 for launcher in plan["launchers"])
