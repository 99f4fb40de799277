"""Rules that stop drafts: against a slow form in floats, the same tokens as plain decoding with every level drafter, options."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
import torch
from decoding_cases import GREEN, PROMPTS, SAMPLED, p_value, relative, texts
from planting import round_context

from draftsmith.eval.loading import set_stop
from draftsmith.inference import stopping
from draftsmith.inference.confidence import CHILDREN, Confidence
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.self_speculation import early_exit
from draftsmith.inference.stopping import StopCheck, Stopping, parse_stopping
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

NEW = 16
STOPS = ("confidence:0.1", "svip:1.7", "adaedl:0.2", "survival:0.4", "gain")
CONFIDENCE = Confidence({name: [[1.0 - i / 6, -0.03 * i, 3.0]] * 3 for i, name in enumerate(CHILDREN)})
TREES = {"chain": StaticTree.chain(3), "static": StaticTree.cartesian((3, 2, 1)), "dynamic": DynamicTree(3, 2, 10)}
KINDS = ("draft model", "early-exit", "eagle", "hydra", "medusa", "mlp", "mtp")
HOWS = {"greedy": Sampling(), "sampled": SAMPLED, "shared-noise": Sampling(0.8, top_p=0.95, seed=5, rule="shared-noise")}


def goes_on_slowly(rule: str, threshold: float, logits: list[float]) -> bool:
    most = max(logits)
    weights = [math.exp(number - most) for number in logits]
    q = [weight / sum(weights) for weight in weights]
    entropy = sum(-each * math.log(each) for each in q if each > 0)
    if rule == "confidence":
        return max(q) >= threshold
    return math.sqrt(entropy) <= threshold if rule == "svip" else 1 - math.sqrt(0.2 * entropy) >= threshold


@pytest.mark.parametrize("rule", ["confidence", "svip", "adaedl"])
def test_rules_are_their_formulas(rule):
    """Of every node; with filtered tokens; of a level: the draft goes on where any node of any row does, and always after the root."""
    rng, seen = random.Random(0), Counter()
    for _ in range(300):
        threshold = rng.uniform(0.05, 0.95)
        logits = [[[rng.gauss(0, rng.choice((0.3, 2, 6))) for _ in range(7)] for _ in range(2)] for _ in range(2)]
        logits[0][0][3] = -math.inf
        expected = [[goes_on_slowly(rule, threshold, node) for node in row] for row in logits]
        tensor, stop = torch.tensor(logits, dtype=torch.float64).float(), Stopping(rule, threshold)
        assert stop.goes_on(tensor).tolist() == expected
        check = StopCheck(stop, round_context([0, 1], [1, 2]))
        assert not check.ends(tensor)
        ends = check.ends(tensor)
        assert ends == (not any(any(row) for row in expected))
        seen[ends] += 1
    assert seen[True] > 5 and seen[False] > 5
    assert not StopCheck(None, round_context([0], [1])).ends(tensor)


def test_survival_multiplies_the_best_confidences_of_the_levels():
    """Of a level the best node of each row counts; each way to choose drafts has weights of its own; beyond the last row it stays."""
    confidence, rng, seen = (
        Confidence({name: [[0.9 - i / 5, -0.2, 0.3], [0.4, 0.1 * i, -0.5]] for i, name in enumerate(CHILDREN)}),
        random.Random(1),
        Counter(),
    )
    rules = {
        "shared-noise": "shared-noise",
        "target-sample": "top",
        "typical": "top",
        "rejection": "drawn",
        "rejection-replacement": "drawn",
    }
    for sampling, weights in (
        (Sampling(), confidence.rows["greedy"]),
        *((Sampling(1.0, rule=rule), confidence.rows[how]) for rule, how in rules.items()),
    ):
        for _ in range(60):
            stop, survival = Stopping("survival", rng.uniform(0.1, 0.9), confidence=confidence), [1.0, 1.0]
            check = StopCheck(stop, round_context([0, 1], [1, 2], sampling=sampling))
            for depth in range(4):
                logits = [[[rng.gauss(0, 3) for _ in range(6)] for _ in range(1 + depth)] for _ in range(2)]
                logits[1][0][2] = -math.inf
                for row in range(2):
                    survival[row] *= max(chance_slowly(weights[min(depth, 1)], node) for node in logits[row])
                ends = check.ends(torch.tensor(logits))
                assert ends == (depth > 0 and max(survival) < stop.threshold), (depth, survival, stop)
                seen[ends] += 1
    assert seen[True] > 50 and seen[False] > 100
    with pytest.raises(ValueError, match="needs a drafter's fitted confidence"):
        StopCheck(Stopping("survival", 0.5), round_context([0], [1])).ends(torch.zeros(1, 1, 5))


def chance_slowly(weights: list[float], logits: list[float]) -> float:
    most = max(logits)
    q = [math.exp(number - most) for number in logits]
    q = [each / sum(q) for each in q]
    entropy, top = sum(-each * math.log(each) for each in q if each > 0), max(q)
    return 1 / (1 + math.exp(-(weights[0] * math.log(top / (1 - top)) + weights[1] * entropy + weights[2])))


def test_gain_weighs_a_level_by_what_a_token_took():
    """Three levels cost 1, 2 and 3 seconds more than a round of 4; a round commits 2 tokens: the least squares by hand."""
    clock = Stopping("gain").clock
    assert clock.level_in_tokens() == 0.0
    single = Stopping("gain").clock
    single.level_s = 1.0
    single.add(3, 1.0, 2)
    assert single.level_in_tokens() == 0.0, "one round says nothing of what a level takes"
    rounds = [(1, 5.0, 2), (2, 6.0, 2), (3, 7.0, 3), (1, 5.0, 1)]
    for each in rounds:
        clock.add(*each)
    weights = [stopping.DECAY**age for age in (3, 2, 1, 0)]
    seconds, tokens = (sum(w * each[i] for w, each in zip(weights, rounds, strict=True)) for i in (1, 2))
    assert clock.level_in_tokens() == pytest.approx(1.0 * tokens / seconds)
    clock.level_s = 1.5
    assert clock.level_in_tokens() == pytest.approx(1.5 * tokens / seconds)
    for level_s, ends in ((0.0, False), (1e6, True)):
        stop = Stopping("gain")
        check = StopCheck(stop, round_context([0], [1]))
        stop.clock.add(1, 1.0, 2)
        stop.clock.add(1, 1.0, 2)
        logits = torch.tensor([[[0.0, 0.0, -9.0]]])
        assert not check.ends(logits), "the first level is always drafted"
        stop.clock.level_s = level_s or 1e-12
        assert check.ends(logits) == ends


def test_gain_counts_no_other_requests_tokens(monkeypatch):
    """Only rounds in which every slot grew by what a round can commit."""
    seconds = count(1)
    monkeypatch.setattr(stopping, "perf_counter", lambda: float(next(seconds)))
    stop, logits = Stopping("gain"), torch.tensor([[[0.0, 0.0, -9.0]]] * 2)
    for positions in ([5, 9], [7, 10], [7, 60], [8, 61], [3, 63], [4, 66]):  # the third and the fifth have a new request, the last 3 of 2
        check = StopCheck(stop, replace(round_context([0, 1], [1, 2]), positions=torch.tensor(positions)))
        assert not check.ends(logits)
    assert stop.clock.sums[5] == pytest.approx(3 * stopping.DECAY + 2)


@pytest.mark.parametrize("rule", ["confidence:0.3", "none"])
def test_a_hybrid_stops_as_its_trained_drafter(target, rule):
    drafter = Hybrid(make("draft model", StaticTree.chain(6), target))
    set_stop(drafter, rule)
    assert drafter.stop is drafter.trained.stop and (str(drafter.stop) == rule or rule == "none" and drafter.stop is None)
    plain = texts(Decoder(target).generate(PROMPTS, None, NEW, ()))
    assert texts(Decoder(target, drafter).generate(PROMPTS, None, NEW, ())) == plain
    with pytest.raises(ValueError, match="--stop gain: ngram does not draft level by level"):
        set_stop(Ngram(), "gain")


def make(kind: str, tree, target: Target):
    if kind == "draft model":
        return DraftModel(relative("llama", 0.005), tree)
    settings = {
        "eagle": {"taps": [0, 1]},
        "hydra": {"num_heads": 3},
        "medusa": {"num_heads": 3},
        "mlp": {"num_heads": 3},
        "mtp": {"layer": {"model_type": "llama", "num_attention_heads": 4}},
    }
    drafter = early_exit(target, 1) if kind == "early-exit" else new_drafter(kind, target, **settings[kind])
    drafter.tree_spec = tree
    return drafter


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_plain_decodings(target, kind, tree):
    """With every rule, sampled with every third one; drafts are never deeper than the tree, and drafts that stop are shallower."""
    sizes: dict[str, set[int]] = {}
    for i, (name, how) in enumerate(HOWS.items()):
        plain = texts(Decoder(target, slots=5).generate(PROMPTS, how, NEW, ()))
        for j, stop in enumerate((*STOPS, "svip:0", "svip:9")):
            if i and (i + j + KINDS.index(kind)) % 3:
                continue
            slots = 1 + 2 * ((i + j) // 2 % 2)
            drafter = make(kind, TREES[tree], target)
            drafter.stop = replace(parse_stopping(stop), confidence=CONFIDENCE)
            assert drafter.can_stop and not drafter.capturable
            out = Decoder(target, drafter, slots=slots).generate(PROMPTS, how, NEW, ())
            assert texts(out) == plain, (kind, tree, name, stop, slots)
            sizes.setdefault(stop, set()).update(round.size for answer in out for round in answer.rounds)
    assert max(max(each) for each in sizes.values()) <= TREES[tree].num_nodes
    level = 1 + (TREES[tree].width if tree == "dynamic" else TREES[tree].cut(1).num_nodes - 1)
    assert sizes["svip:0"] - {1} == {level} and TREES[tree].num_nodes in sizes["svip:9"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stop"), [("draft model", "adaedl:0.25"), ("early-exit", "svip:1.6"), ("early-exit", "adaedl:0.3")])
def test_distribution_under_rejection(target, kind, stop):
    """The first two tokens of answers from batches, by a chi-square test; both lengths of drafts occur."""
    how, prompt, count = Sampling(0.5, seed=3, rule="rejection"), [3, 5, 1], 1001
    drafter = make(kind, StaticTree.chain(3), target)
    drafter.stop = parse_stopping(stop)
    out = Decoder(target, drafter, slots=3).generate([prompt] * count, how, 2, ())
    heads = torch.tensor([[*prompt, token] for token in range(48)])
    logits = target.logits(target.forward(heads).hidden[:, 2:]).double() / how.temperature
    p = logits.softmax(-1)
    tokens = torch.tensor(texts(out))
    assert p_value(tokens[:, 0], p[0, 0]) > GREEN
    assert p_value(tokens[:, 1], (p[0, 0][:, None] * p[:, 1]).sum(0)) > GREEN
    sizes = Counter(answer.rounds[0].size for answer in out)
    assert len(sizes) > 1, sizes


def test_what_the_option_takes():
    assert parse_stopping("none") is None and str(parse_stopping("svip:0.60")) == "svip:0.6" and str(parse_stopping("gain")) == "gain"
    for text in (
        "",
        "svip",
        "gain:1",
        "entropy:2",
        "svip:x",
        "confidence:1",
        "svip:-1",
        "adaedl:nan",
        "svip:inf",
        "survival",
        "survival:1",
    ):
        with pytest.raises(ValueError, match="expected .*; correct it$"):
            parse_stopping(text)
