"""Evaluation: τ by its definition, trees from records against real decoding, and the judgement of divergences."""

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from decoding_cases import position_records, relative
from hand_records import by_chance
from matplotlib import pyplot
from zoo import tiny

from draftsmith.data.prompts import Prompt
from draftsmith.eval import cost, evaluation, lossless, plot, table, trees
from draftsmith.eval.answers import EncodedPrompt
from draftsmith.eval.evaluation import evaluate_drafter
from draftsmith.eval.records import PositionRecord, RequestRecord, Round, distinct_ngrams, rank_of
from draftsmith.eval.report import acceptance, as_json, report_of
from draftsmith.eval.settings import Settings
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target


def request(prompt, committed):
    """A request whose rounds committed so many tokens each."""
    rounds = [Round(0, 8, count) for count in committed]
    return RequestRecord(prompt, "d", "", "0", 1, 3, [], "length", rounds, sum(committed), True)


def test_tau_survival_and_conditional_by_hand():
    result = acceptance([request("a", [3, 1]), request("b", [4, 2])], 3)  # the last round was cut by the end
    assert (result.prompts, result.rounds, result.tokens, result.tau) == (2, 4, 10, 2.5)
    assert result.survival == (0.75, 0.5, 0.25) and result.tau == 1 + sum(result.survival)
    assert result.conditional == (0.75, pytest.approx(2 / 3), 0.5)
    assert result.low is None and result.high is None  # two prompts give no interval


def test_the_interval_is_over_prompts_not_rounds():
    # 40 prompts whose rounds all agree within the prompt: as many as 40 independent numbers, not 4,000.
    result = acceptance([request(str(p), [1 + p % 2] * 100) for p in range(40)], 1)
    assert result.high - result.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(40), rel=0.15)


def test_distinct_ngrams_and_ranks():
    assert distinct_ngrams([[1, 2, 3] * 6], 3) == 3 / 16
    assert distinct_ngrams([[1]], 8) == 1.0
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]] * 4)
    rank, log_prob = rank_of(logits, torch.tensor([0, 1, 2, 3]), 3)
    assert rank.tolist() == [-1, 0, 1, 2]  # equal logits rank by id; beyond `keep` is −1
    torch.testing.assert_close(log_prob, logits[0].log_softmax(-1))


def random_records(seed, ranks=3, depth=3):
    generator = torch.Generator().manual_seed(seed)
    chance = torch.tensor([0.5, 0.25, 0.15, 0.1])[: ranks + 1]
    draws = [torch.multinomial(chance, 30 * depth, True, generator=generator).view(30, depth) for _ in range(4)]
    return [PositionRecord(str(i), "d", torch.where(draw == ranks, -1, draw), draw.float()) for i, draw in enumerate(draws)]


def mean_tau(records, tree):
    """Mean over all positions of 1 + accepted, which best-first order maximises."""
    values = [1 + max((len(p) for p in tree if list(p) == row[: len(p)]), default=0) for r in records for row in r.ranks.tolist()]
    return sum(values) / len(values)


def test_best_first_order_is_optimal_for_every_size():
    paths = [path for depth in (1, 2) for path in itertools.product(range(3), repeat=depth)]
    for seed in range(3):
        records = random_records(seed, depth=2)
        order = trees.best_first_paths(records, 6)
        for size in range(1, 5):
            every = [t for t in itertools.combinations(paths, size) if all(len(p) == 1 or p[:1] in t for p in t)]
            assert len(every) > 2
            best = max(mean_tau(records, tree) for tree in every)
            assert mean_tau(records, order[:size]) == pytest.approx(best, abs=1e-12)
            assert all(len(p) == 1 or p[:-1] in order[:i] for i, p in enumerate(order))


def test_the_chosen_tree_follows_the_cost_of_nodes():
    records = random_records(7)
    assert trees.best_tree(records, lambda nodes, depth: float(nodes), 16) == []
    order = trees.best_first_paths(records, 15)
    taus = {size: trees.tau(records, order[: size - 1]) for size in trees.candidate_sizes(16)}
    assert taus[1] == 1.0 and sorted(taus.values()) == list(taus.values()) and len(taus) == 12  # more nodes never accept less
    assert taus[len(trees.best_tree(records, lambda nodes, depth: 1.0, 16)) + 1] == max(taus.values())


def test_cost_interpolates_and_never_falls():
    c = cost.relative_forward({1: 2.0, 2: 3.0, 4: 2.5, 8: 6.0})
    assert [c(n) for n in (1, 2, 3, 4, 6, 8)] == [1.0, 1.5, 1.5, 1.5, 2.25, 3.0]
    with pytest.raises(ValueError, match="was not measured"):
        c(9)


@pytest.fixture(scope="module")
def pair():
    target = Target.wrap(tiny("llama"))
    drafter = new_drafter("medusa", target, num_heads=3)
    with torch.no_grad():  # heads that are right now and then
        torch.manual_seed(0)
        for k in range(3):
            drafter.output_weight(k).add_(0.05 * torch.randn_like(drafter.output_weight(k)))
    return target, drafter


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.3, seed=3, rule="target-sample")], ids=["greedy", "sampled"])
def test_tau_from_position_records_is_the_tau_of_real_decoding(pair, sampling):
    target, drafter = pair
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(target.vocab_size, (length,), generator=generator).tolist() for length in (3, 9, 5, 2)]
    encoded = [EncodedPrompt(Prompt(str(i), "d", ""), ids, i) for i, ids in enumerate(prompts)]
    records = position_records(target, drafter, encoded, sampling, 24)
    accepted = set()
    for tree in ([(0,)], [(0,), (1,), (0, 0)], trees.best_first_paths(records, 12)):
        drafter.config.tree = [list(path) for path in tree]
        decoder = Decoder(target, drafter)
        rounds = [r for answer in decoder.generate(prompts, sampling, 24) for r in answer.rounds]
        accepted |= {r.accepted for r in rounds}
        assert trees.tau(records, tree) == pytest.approx(sum(r.length for r in rounds) / len(rounds), abs=1e-12)
    assert len(accepted) >= 3


def test_equal_answers_and_bugs_are_distinguished(pair):
    target, _ = pair
    prompt = [5, 6, 7]
    plain = Decoder(target).generate([prompt], Sampling(), 8)[0].tokens
    assert lossless.first_divergence(target, "p", prompt, plain, list(plain), Sampling(), 0) is None
    wrong = [*plain[:4], (plain[4] + 1) % target.vocab_size, *plain[5:]]
    divergence = lossless.first_divergence(target, "p", prompt, plain, wrong, Sampling(), 0)
    assert (divergence.index, divergence.expected, divergence.got, divergence.verdict) == (4, plain[4], wrong[4], "bug")
    assert lossless.first_divergence(target, "p", prompt, plain, plain[:-1], Sampling(), 0).verdict == "bug"
    sampling = Sampling(temperature=0.8, top_k=5, seed=3)
    drawn = Decoder(target).generate([prompt], sampling, 8, requests=[4])[0].tokens
    other = [*drawn[:2], (drawn[2] + 1) % target.vocab_size, *drawn[3:]]
    assert lossless.first_divergence(target, "p", prompt, drawn, other, sampling, 4).verdict == "bug"


def test_a_tie_is_a_tie():
    target = Target.wrap(tiny("llama"))
    with torch.no_grad():  # tokens 7 and 8 always have equal logits
        target.head_weight[8] = target.head_weight[7]
        target.head_weight[7:9] *= 50
    prompt = next([i, j] for i in range(9, 48) for j in range(9, 48) if Decoder(target).generate([[i, j]], Sampling(), 1)[0].tokens == [7])
    assert lossless.first_divergence(target, "p", prompt, [7], [8], Sampling(), 0).verdict == "tie"


@pytest.mark.parametrize("node_cost", [0.0, 5.0])  # all trees pay, or none does
def test_a_report_from_end_to_end(pair, capsys, monkeypatch, node_cost):
    target, drafter = pair
    monkeypatch.setattr(evaluation.cost, "measure_forward", lambda *_: {size: 1 + node_cost * (size - 1) for size in (1, 2, 4, 8)})

    class Tokenizer:
        chat_template = None

        def encode(self, text):
            return [ord(c) % target.vocab_size for c in text]

        def decode(self, ids):
            return chr(ids[0])

    target.tokenizer = Tokenizer()
    try:
        prompts = [Prompt(f"{d}{i}", d, f"{d} number {i}") for d in ("x", "y") for i in range(4)] + [Prompt("z", "z", "alone")]
        measured = evaluate_drafter(target, drafter, prompts, Settings(10, settings(0, 1), 8))
    finally:
        target.tokenizer = None
    report, records = report_of(measured), measured.positions
    rounds = [each for request in measured.requests if request.setting == "0" for each in request.rounds]
    assert set(report.domains["0"]) == {"x", "y", "z"} and set(report.overall) == set(report.domains) == {"0", "1 rule=shared-noise"}
    assert report.answers == 10 and not report.divergences and report.like_transformers == report.compared == 5
    assert report.overall["0"].rounds == len(rounds)
    assert all(r.committed >= 1 and r.nodes == report.nodes for r in rounds if r.position > 0)
    assert report.speed["tau"] == report.overall["0"].tau and report.speed["plain_over_transformers"] > 0
    assert len(records) == 2 * 9 and all(record.ranks.shape == (10, 3) for record in records)
    assert [row["nodes"] for row in report.by_nodes] == [2, 4, 8]
    table.print_report(report)
    printed = capsys.readouterr().out
    assert (report.nodes > 1) == (node_cost == 0.0) == ("Nothing is drafted" not in printed)
    assert "10 of 10 answers equal plain decoding's" in printed and "plain decoding of the same tokens" in printed
    assert table.markdown(report).count("\n") == 9


class Bytes:
    chat_template, is_fast = None, False

    def get_vocab(self):
        return {str(i): i for i in range(48)}

    def encode(self, text):
        return [ord(c) % 48 for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return chr(ids[0])


def settings(*temperatures, rule="shared-noise"):
    return [Sampling(temperature=float(temperature), rule=rule) for temperature in temperatures]


@pytest.fixture
def readable():
    target = Target.wrap(tiny("llama"))
    target.tokenizer = Bytes()
    return target


PROMPTS = [Prompt(f"{d}{i}", d, f"{d} number {i}, {d} number {i}, {d}") for d in ("x", "y") for i in range(3)]


def kinds():
    yield "draft model", DraftModel(relative("llama", 0.005), StaticTree.chain(3)), "best"
    yield "draft model", DraftModel(relative("llama", 0.005), DynamicTree(3, 2, 8)), ""
    yield "ngram", Ngram(), ""
    yield "suffix", Suffix(memory=200), ""


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("slots", [1, 2])
def test_any_drafter_is_evaluated(readable, number, slots, capsys):
    method, drafter, choose = list(kinds())[number]
    measured = evaluate_drafter(readable, drafter, PROMPTS, Settings(16, settings(0, 1), 8, choose=choose, slots=slots))
    report, records = report_of(measured), measured.positions
    reported = len({request.prompt for request in measured.requests})
    assert report.method == method and report.answers == 2 * reported and not report.divergences and not report.lossy
    assert report.compared == report.like_transformers == (reported if slots == 1 else 0)
    assert bool(records) == bool(report.by_nodes) == bool(choose) and reported == (2 if choose else 6)
    assert set(report.drafting) == {1, 4} and all(seconds > 0 for seconds in report.drafting.values())
    if choose:  # the records say what real decoding accepted
        paths = [tuple(path) for path in report.tree]
        own = [record for record in records if not record.choosing and record.setting == "0"]
        assert len(own) == reported and trees.tau(own, paths) == pytest.approx(report.overall["0"].tau)
    table.print_report(report)
    printed = capsys.readouterr().out
    assert f"{report.answers} of {report.answers} answers equal plain decoding's" in printed and "LOSSY" not in printed


@pytest.mark.parametrize("rule", ["typical", "rejection"])
def test_the_report_says_what_a_rule_does_to_the_output(readable, rule, capsys, tmp_path):
    drafter = DraftModel(relative("llama", 0.005), StaticTree.chain(3))
    report = report_of(evaluate_drafter(readable, drafter, PROMPTS[:2], Settings(12, settings(1, 0, rule=rule), 8, choose="")))
    assert report.lossy == ({"1 rule=typical": "typical"} if rule == "typical" else {})
    assert report.answers == 2, "at T = 0 every rule is greedy"
    table.print_report(report)
    printed = capsys.readouterr().out
    if rule == "typical":
        assert printed.count("LOSSY") >= 4
    else:
        assert "LOSSY" not in printed and "lossless in distribution" in printed
    assert f"plain decoding per token, of other tokens (rule {rule}" in printed and "of the same tokens" not in printed
    assert ("1 rule=typical LOSSY" in table.markdown(report)) == (rule == "typical")
    assert (json.loads(as_json(report))["lossy"] == {"1 rule=typical": "typical"}) == (rule == "typical")
    plot.survival(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_picture_has_a_line_for_the_extremes_of_many_domains(tmp_path, monkeypatch):
    made = by_chance(prompts=48, tokens=16, domains=tuple(f"domain {n}" for n in range(12)), settings=("0", "1 rule=typical"))
    report, figures = report_of(made), []
    monkeypatch.setattr(pyplot, "close", figures.append)
    plot.survival(report, tmp_path / "picture.png")
    labels = [line.get_label() for line in figures[0].axes[0].lines]
    taus = sorted(report.domains["0"], key=lambda name: -report.domains["0"][name].tau)
    assert [label.split("  (")[0].strip() for label in labels[:10]] == [*taus[:5], *taus[-5:]]
    assert " all, T=1 rule=typical LOSSY" in labels[-1] and len({line.get_linestyle() for line in figures[0].axes[0].lines}) == 2
    figures[0].clear()


def test_answers_without_tokens_have_no_report():
    made = by_chance(prompts=12, tokens=8)
    made.requests[0] = replace(made.requests[0], rounds=[])
    with pytest.raises(ValueError, match="1 of 6 answers have no tokens"):
        report_of(made)


def test_the_relative_cost_of_a_round():
    round_cost = cost.relative_round({1: 1.0, 4: 1.3, 8: 1.5}, {1: 0.4, 4: 1.0})
    assert round_cost(1, 0) == 1.0 and round_cost(4, 1) == pytest.approx(1.7) and round_cost(8, 6) == pytest.approx(1.5 + 1.4)
    constant = cost.relative_round({1: 2.0, 8: 2.0}, {1: 0.5})
    assert constant(8, 9) == pytest.approx(1.25)


def test_the_best_tree_weighs_depth_against_width():
    records = [PositionRecord("p", "d", torch.tensor([[0, -1, -1]] * 40 + [[1, 0, 0]] * 20), torch.zeros(60, 3))]
    for level, deepest in ((0.01, 3), (0.4, 1)):
        chosen = trees.best_tree(records, lambda nodes, depth, level=level: 1 + 0.02 * nodes + level * depth, 8)
        assert max(map(len, chosen)) == deepest


def test_best_first_order_equals_dynamic_programming():
    """Sequoia's knapsack over subtrees, on joint counts, gives the same trees of every size and depth."""
    generator = torch.Generator().manual_seed(4)
    ranks = (torch.rand(300, 4, generator=generator) ** 2 * 4).long()
    records = [PositionRecord("p", "d", ranks, torch.zeros(300, 4))]
    counts = Counter(tuple(row[: k + 1]) for row in ranks.tolist() for k in range(4))

    def best(path, most, depth):
        """[0 … most]: the largest sum of counts of m nodes in the subtree under `path`, itself included."""
        below = [0] + [-math.inf] * (most - 1)
        if depth > 0:
            for rank in range(4):
                if (*path, rank) in counts:
                    child = best((*path, rank), most - 1, depth - 1)
                    below = [max(below[m - n] + child[n] for n in range(m + 1)) for m in range(most)]
        return [0] + [below[m - 1] + counts[path] for m in range(1, most + 1)]

    for depth in (1, 2, 4):
        order = trees.Positions(records).order(12, depth)
        optimum = best((), 13, depth)
        for size in range(1, len(order) + 1):
            assert sum(counts[path] for path in order[:size]) == optimum[size + 1]
        assert len(order) == min(12, sum(len(path) <= depth for path in counts))


def test_a_token_that_the_drafter_does_not_have_is_a_miss():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    rank, log = rank_of(logits, torch.tensor([2, 7]), 32)
    assert rank.tolist() == [1, -1] and log[0] > -3 and log[1] == -torch.inf


@pytest.mark.parametrize("command", ["acceptance", "bench", "compare", "generate"])
def test_help_imports_no_model_library(command):
    """So that it is there at once."""
    script = (
        f"import sys\nfrom draftsmith.eval import {command}\n"
        f"try: {command}.main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'accelerate'} & sys.modules.keys()"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    assert "usage: draftsmith" in completed.stdout and "(default" in completed.stdout
