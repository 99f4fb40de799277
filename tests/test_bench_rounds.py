"""The benchmark of rounds on tiny sizes, on the CPU, with the kernels' references: its counts are exact, and synthetic figures say so."""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import taped
import torch
from transformers.models.llama.modeling_llama import LlamaModel

from draftsmith.eval import interleaved
from draftsmith.eval.benchmarks import kernels as bench_kernels
from draftsmith.eval.benchmarks import random_models
from draftsmith.eval.benchmarks import rounds as bench_rounds
from draftsmith.eval.benchmarks.kernels import RunningReport, Sizes
from draftsmith.eval.benchmarks.rounds import Effort
from draftsmith.eval.benchmarks.synthetic import PROFILE, WATERMARK, accepted_mask, expected_tau, synthetic
from draftsmith.inference import decoder as decoders
from draftsmith.inference import expand, graph_rounds
from draftsmith.inference import verify as verification
from draftsmith.inference.attention import tree_attention
from draftsmith.inference.drafter import RoundContext
from draftsmith.inference.kernels import use
from draftsmith.inference.sampler import Sampling, uniform
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict, judge

pytest.importorskip("triton")
SMALL = Sizes(4, 4, 2, 16, 64, (20, 40), (2, 9), 2, 3, torch.float32, 1024, 8, 48)
EFFORT = Effort(blocks=2, rounds=3, prompt=10, new_tokens=12, repeats=2)
CPU = torch.device("cpu")
#        0
#    1       2       3        (of 0)
#  4 5 6     7                (of 1, of 2)
#  8                          (of 5)
PARENTS = [-1, 0, 0, 0, 1, 1, 1, 2, 5]
RANKS = (0.5, 0.2, 0.1)


def trees(count, parents=PARENTS):
    tokens = torch.arange(count * len(parents)).view(count, -1)
    return DraftTree.build(tokens, torch.tensor([parents]).expand(count, -1), torch.full((count,), len(parents)))


def drawn_path(parents, draws, ranks=RANKS):
    """The path that the draws (one for each depth) select, computed as the docstring of `accepted_mask` says."""
    path = [0]
    while children := [node for node, parent in enumerate(parents) if parent == path[-1]]:
        draw, total = draws[len(path) - 1], 0.0
        for node, chance in zip(children, ranks, strict=False):
            if total <= draw < total + chance:
                path.append(node)
                break
            total += chance
        else:
            break
    return path


def test_the_profile_is_exact():
    """Every combination of the intervals that draws can fall into, with its chance."""
    edges = [0.0, *itertools.accumulate(RANKS), 1.0]
    cells = [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)]
    combinations = torch.tensor(list(itertools.product(cells, repeat=3)), dtype=torch.float64)
    draws, weights = combinations[..., 0], combinations[..., 1].prod(1)
    tree = trees(len(draws))
    verdict = judge(tree, accepted_mask(tree, draws, torch.tensor(edges[:-1], dtype=torch.float64)), tree.tokens, 3)
    assert [path[:length] for path, length in zip(verdict.path.tolist(), verdict.length.tolist(), strict=True)] == [
        drawn_path(PARENTS, row) for row in draws.tolist()
    ]
    assert set(verdict.length.tolist()) == {1, 2, 3, 4}
    tau = 1 + (0.5 + 0.2 + 0.1) + 0.5 * (0.5 + 0.2 + 0.1) + 0.2 * 0.5 + 0.5 * 0.2 * 0.5
    assert expected_tau(PARENTS, RANKS) == pytest.approx(tau, abs=1e-12)
    assert float((weights * verdict.length).sum()) == pytest.approx(tau, abs=1e-12)
    assert expected_tau([-1, 0, 0, 0, 0], RANKS) == pytest.approx(1.8), "the fourth child has no chance"


def context_of(slots, depth=3):
    slots = torch.arange(slots)
    return RoundContext(slots.tolist(), slots, slots, 100 + 7 * slots, slots % 3, Sampling(), depth)


def test_the_verdict_is_computed_and_then_replaced():
    """The new path depends on request and position alone; the token is the computed one; idle rows stay idle."""
    round, tree, calls = context_of(2000), trees(2000), []
    tree.size[7] = 0
    tree.size[9] = 4
    computed = Verdict(torch.zeros(2000, 4, dtype=torch.int64), torch.ones(2000, dtype=torch.int64), torch.arange(2000) + 5)

    def verify(*arguments):
        calls.append(arguments)
        return computed

    replaced = synthetic(verify, RANKS, CPU)
    logits = torch.zeros(0)
    verdict, again = replaced(tree, logits, round), replaced(tree, logits, round)
    assert len(calls) == 2 and all(a is b for a, b in zip(calls[0], (tree, logits, round), strict=True))
    assert verdict.path.equal(again.path) and verdict.length.equal(again.length)
    assert verdict.next_token.equal(computed.next_token)
    position = round.positions[:, None] + torch.arange(1, 4)
    draws = uniform(0, round.noise_keys[:, None].expand_as(position), position, torch.zeros_like(position)).tolist()
    paths = [drawn_path(PARENTS, row) for row in draws]
    paths[7], paths[9] = [], drawn_path(PARENTS[:4], draws[9])
    assert [path[:length] for path, length in zip(verdict.path.tolist(), verdict.length.tolist(), strict=True)] == paths
    # Fixed draws: the mean of 2,000 of them comes this near.
    assert float(verdict.length.double().mean()) == pytest.approx(expected_tau(PARENTS, RANKS), abs=0.05)


def test_a_graph_can_hold_it():
    """Replayed without Python, it uses the positions that are in memory then."""
    round, tree = context_of(50), trees(50)
    replaced = synthetic(lambda tree, logits, round: judge(tree, tree.tokens < 0, tree.tokens, round.depth), RANKS, CPU)
    first = replaced(tree, None, round).path  # creates cached tensors
    verdicts = []
    tape = taped.recorded(lambda: verdicts.append(replaced(tree, None, round)))
    assert verdicts[0].path.equal(first)
    round.positions += 1000
    tape.replay()
    assert not verdicts[0].path.equal(first)
    assert verdicts[0].path.equal(replaced(tree, None, round).path)


@pytest.fixture
def references(monkeypatch):
    """Kernels are on, and each is replaced by its reference."""
    from draftsmith.inference.kernels import attention, commit, verify

    monkeypatch.setattr(attention, "tree_attention", attention.tree_attention_reference)
    monkeypatch.setattr(commit, "commit", lambda groups, *rest: [commit.commit_reference(group.buffers, *rest) for group in groups])
    monkeypatch.setattr(commit, "take", commit.take_reference)
    monkeypatch.setattr(verify, "verify", verification.verify)
    monkeypatch.setattr(expand, "active", lambda: False)
    monkeypatch.setattr(decoders, "missing", lambda device: "")
    monkeypatch.setattr(decoders.Decoder, "refusal", lambda *_: "")


@pytest.fixture
def clock(monkeypatch):
    """Time is the number of tokens that a Llama has read."""
    read = SimpleNamespace(tokens=0)
    real = LlamaModel.forward

    def forward(self, input_ids=None, **settings):
        read.tokens += input_ids.shape[1]
        return real(self, input_ids=input_ids, **settings)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    monkeypatch.setattr(bench_rounds, "perf_counter", lambda: read.tokens)
    monkeypatch.setattr(interleaved, "time", SimpleNamespace(perf_counter=lambda: read.tokens))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    return read


def measured(as_json=False):
    report = RunningReport(None, as_json, {"device": "here"})
    bench_rounds.run(report, SMALL, EFFORT, CPU, lambda call: (call(), 1e-3)[1])
    return report


@pytest.mark.usefixtures("references", "clock")
def test_every_line_is_there_and_counts_right(capsys):
    results = measured().results
    assert results["failed"] == {} and len(results["lines"]) == 2 * 2 * 3 + 6 + 4
    assert results["limits"]["copy_bytes_per_s"] == 2048e3

    # A round reads as many tokens as it has nodes, whichever was first.
    assert [(line["context"], line["nodes"], line["seconds"], line["over_plain"]) for line in results["rounds"]] == [
        (context, nodes, nodes, nodes) for context in (20, 40) for nodes in (1, 2, 9)
    ]
    weights = 4 * (64 * 64 + 64 + 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 48 * 64 + 2 * 64))  # head, last norm, layers: float32
    for line in results["rounds"]:
        assert line["floor"] == pytest.approx((weights + 4 * 2 * 4 * 2 * line["context"] * 16) / 2048e3)

    # transformers computes the first of 12 tokens in its prefill of 10.
    (plain,) = results["plain"]
    assert plain["theirs"] == pytest.approx(12 / 21) and 0.4 < plain["ours"] < 12 / 20
    assert plain["ratio"] == pytest.approx(plain["ours"] / plain["theirs"])

    for line in results["decoding"]:
        assert line["seconds"] == 9 and line["efficiency"] == pytest.approx(1 / 9)
        assert line["speedup"] == pytest.approx(line["tau"] / 9) and line["goal"] == 0.8 and line["parts"] == {}
    medusa, eagle, shallow = results["decoding"]
    assert "Medusa" in medusa["what"] and "EAGLE-3" in eagle["what"] and "three deep" in shallow["what"] and eagle["profile_tau"] is None

    # Every synthetic line and entry says so, and no other does.
    entries = results["rounds"] + results["decoding"]
    assert all((WATERMARK in entry["what"]) == (entry.get("nodes") != 1) for entry in entries) and len(entries) == 9
    out = capsys.readouterr()
    lines = [line for line in out.out.splitlines() if " nodes after" in line and "│" not in line]
    assert len(lines) == 4 + 3 and all(line.startswith(WATERMARK) for line in lines)
    assert results["synthetic_profile"] == PROFILE


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("record", [graph_rounds.capture, taped.record], ids=["run", "replayed"])
def test_tau_is_that_of_the_draws(monkeypatch, record):
    """The τ of the benchmark equals that of a slow walk from the end of the prefix, twice; also where graphs are replayed."""
    monkeypatch.setattr(graph_rounds, "capture", record)
    monkeypatch.setattr(bench_rounds, "perf_counter", itertools.count().__next__)
    target = random_models.llama(SMALL, CPU)
    drafter = random_models.medusa(target, SMALL)
    first, second = (bench_rounds.time_decoding(target, SMALL, EFFORT, "tau", drafter) for _ in range(2))
    assert (first.tau, first.profile_tau) == (second.tau, second.profile_tau)
    parents = drafter.tree_spec.parents.tolist()
    tokens, rounds, enqueued = 0, 0, 1
    while rounds < enqueued:
        enqueued += tokens < EFFORT.new_tokens
        position = 20 + tokens + torch.arange(1, drafter.max_depth + 1)
        draws = uniform(0, torch.zeros_like(position), position, torch.zeros_like(position)).tolist()
        tokens += len(drawn_path(parents, draws, PROFILE))
        rounds += 1
    assert rounds > 3 and first.tau == tokens / rounds > 1
    assert first.profile_tau == pytest.approx(expected_tau(parents, PROFILE))


@pytest.mark.usefixtures("references")
def test_rounds_with_a_dynamic_tree_can_be_replayed(monkeypatch):
    monkeypatch.setattr(bench_rounds, "perf_counter", itertools.count().__next__)
    taus = []
    for record in (graph_rounds.capture, taped.record):
        monkeypatch.setattr(graph_rounds, "capture", record)
        target = random_models.llama(SMALL, CPU)
        bench_rounds.time_rounds(target, SMALL, EFFORT, 20, 1.0)
        drafter = random_models.eagle(target, SMALL)
        taus.append(bench_rounds.time_decoding(target, SMALL, EFFORT, "tau", drafter).tau)
        # The drafter too went back to the prefix: after it are only the last three rounds.
        assert 20 + 3 <= int(drafter._state.cache.length) <= 20 + 3 * 4
    assert taus[0] == taus[1] > 1


def test_trees_of_an_8b_have_the_stated_nodes():
    sizes = Sizes()
    for nodes in sizes.nodes:
        bare = random_models.BareTree(nodes, sizes.depth, CPU)
        assert bare.tree_spec.num_nodes == bare.max_nodes == nodes and bare.max_depth == 5
    assert bench_rounds.COST_GOALS.keys() == {(sizes.nodes[-1], context) for context in sizes.contexts}


def test_turns():
    calls = []
    functions = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    results = bench_rounds._in_turn("turns", functions, 3)
    assert "".join(calls) == "abcbcacababc"
    assert results == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}


@pytest.mark.usefixtures("references")
def test_the_random_eagle_drafts_deep():
    target = random_models.llama(SMALL, CPU)
    drafter = random_models.eagle(target, SMALL)
    assert drafter.taps == (0, 1) and drafter.config.draft_vocab_size == 16 and drafter.vocabulary.targets.tolist() == list(range(16))
    drafter.bind(target, 1, 40)
    features = torch.randn(1, 5, 3, 64)
    drafter.start([0], [[1] * 6], SimpleNamespace(hidden=features[:, :, 0], taps=features[:, :, 1:]))
    with torch.inference_mode(), tree_attention(target.model), use(True):
        round = RoundContext([0], torch.tensor([0]), torch.tensor([1]), torch.tensor([5]), torch.tensor([0]), Sampling(), drafter.max_depth)
        tree = drafter.propose(round)
    assert tree.tokens.shape == (1, 9) and tree.size.tolist() == [9]
    assert tree.depth.max() == drafter.max_depth == 3


def test_taps_of_an_8b_are_the_published_ones():
    target = SimpleNamespace(num_layers=32, vocab_size=128256, device=CPU)
    architecture = {}

    def note(method, target, **settings):
        architecture.update(settings)
        raise ValueError("enough")

    with pytest.MonkeyPatch.context() as patched, pytest.raises(ValueError, match="enough"):
        patched.setattr(random_models, "new_drafter", note)
        random_models.eagle(target, Sizes())
    assert architecture["taps"] == [1, 15, 28] and architecture["draft_vocab_size"] == 32064


@pytest.mark.usefixtures("references", "clock")
def test_a_part_that_fails_leaves_one_line(monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n 4 GiB")

    monkeypatch.setattr(random_models, "eagle", full)
    monkeypatch.setattr(bench_kernels, "_moves", full)
    results = measured().results
    reason = "CUDA out of memory. Tried to allocate 4 GiB"
    assert results["failed"] == dict.fromkeys(("kernels", "EAGLE-3 with a dynamic tree", "EAGLE-3, three deep,"), reason)
    assert len(results["lines"]) == 18 and len(results["rounds"]) == 6 and len(results["plain"]) == 1 and len(results["decoding"]) == 1
    assert f"failed: EAGLE-3 with a dynamic tree: {reason}\n" in capsys.readouterr().out

    monkeypatch.setattr(random_models, "llama", full)
    results = measured().results
    assert results["failed"] == {"kernels": reason, "target": reason} and "rounds" not in results


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_run_leaves_its_results(monkeypatch, capsys, tmp_path, as_json):
    line = bench_rounds.RoundTime("plain step", 20, 1, 1.0, 1.0, None, 0.5)

    def interrupted(report, *_):
        report.add("rounds", [line])
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_kernels, "refusal", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "here")
    monkeypatch.setattr(bench_rounds, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_rounds.main(tmp_path / "out.json", as_json)
    known = json.loads((tmp_path / "out.json").read_text())
    assert [entry["what"] for entry in known["rounds"]] == ["plain step"] and known["device"] == "here"
    out = capsys.readouterr().out
    assert json.loads(out) == known if as_json else not out


def test_a_failed_part_shows_in_the_exit_code(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_kernels, "refusal", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "here")
    for failed in ({}, {"plain": "why"}):
        monkeypatch.setattr(bench_rounds, "run", lambda report, *_, failed=failed: report.results.update(failed=failed))
        if failed:
            with pytest.raises(SystemExit, match="1"):
                bench_rounds.main(None, True)
        else:
            bench_rounds.main(None, True)


def test_lines_for_people():
    line = bench_rounds.RoundTime("SYNTHETIC round of 64 nodes after 2,048", 2048, 64, 5.5e-3, 1.1, 1.2, 4.4e-3)
    text = "SYNTHETIC round of 64 nodes after 2,048: 5.500 ms, 1.100 x plain (goal: at most 1.20); "
    assert str(line) == text + "4.400 ms to copy weights and KV cache, 0.80 of it"
    parts = {"drafting": 1e-3, "verifying": 3e-3}
    assert str(bench_rounds.DecodingTime("SYNTHETIC x", 3.0, 3.1, 4e-3, 2.4, 0.8, 0.8, parts)) == (
        "SYNTHETIC x: tau 3.00 (of the profile: 3.10), round 4.000 ms, speedup 2.40 over plain, efficiency 0.80 (goal: at least 0.80); "
        "drafting 25%, verifying 75%"
    )


@pytest.mark.gpu
def test_on_a_gpu():
    sizes = Sizes(4, 32, 8, 128, 4096, (2048,), (8, 64), 2, 5, torch.bfloat16, 1 << 26, 2048, 1024)
    report = RunningReport(None, True, {"device": "a GPU"})
    bench_rounds.run(report, sizes, EFFORT, torch.device("cuda"))
    assert report.results["failed"] == {}
    assert len(report.results["rounds"]) == 3 and len(report.results["plain"]) == 1 and len(report.results["decoding"]) == 3
    assert all(len(line["parts"]) == 4 and line["tau"] > 1 for line in report.results["decoding"])
