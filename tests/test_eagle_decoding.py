"""EAGLE in decoding: it computes what training does, output is plain decoding's, τ agrees four ways."""

import warnings
from collections import Counter

import pytest
import torch
from decoding_cases import PROMPTS, check_reads, position_records, texts
from eagle_drafters import HOWS, NEW, TREES, VARIANTS, allowed, answers_of, fitted, lines_corpus, make, random_lines
from eagle_rounds import played
from zoo import CONFIGS, VOCAB, tiny

from draftsmith.data.packing import PackedDataset
from draftsmith.data.prompts import Prompt
from draftsmith.eval import trees
from draftsmith.eval.answers import EncodedPrompt
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import NodeOutput, RoundContext
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.eagle import EagleModel
from draftsmith.models.target import Target
from draftsmith.train.eagle import EagleSection, objective3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_computes_what_training_does(target, name, shape):
    drafter = make(target, name).eval()
    seen = Counter()
    for rows in (1, 3):
        seen += played(drafter, target, TREES[shape], random_lines(), rows, seed=rows)
    wanted = {"one token": 2, "left out": 3, "idle": 2, "started beside others": 2, "ragged start": 1, "compared": 60}
    assert not {what: seen[what] for what, least in wanted.items() if seen[what] < least}
    assert all(seen[accepted] >= 2 for accepted in range(4)), seen
    assert seen["moved"] == 0 if shape == "chain" else seen["moved"] >= 10


def test_a_long_prompt_is_encoded_in_chunks(target, monkeypatch):
    drafter = make(target, "3, small").eval()
    lines = random_lines(4, seed=8)
    runs = []
    for chunk in (256, 3):
        monkeypatch.setattr(EagleModel, "chunk", chunk)
        drafter.tree_spec = TREES["static"]
        drafter.bind(target, 4, 40)
        sizes = [14, 1, 9, 12]
        prompts = [line[:size] for line, size in zip(lines, sizes, strict=True)]
        ids = torch.tensor([prompt[:-1] + [0] * (max(sizes) - len(prompt)) for prompt in prompts])
        out = target.forward(ids, taps=drafter.taps)
        drafter.start([0, 1, 2, 3], prompts, NodeOutput(out.hidden, out.taps))
        rows = torch.arange(4)
        at = torch.tensor(sizes) - 1
        tree = drafter.propose(RoundContext([0, 1, 2, 3], rows, torch.tensor([prompt[-1] for prompt in prompts]), at, rows, Sampling(), 9))
        runs.append((tree.tokens, tree.size, drafter._state.last_output.clone()))
    assert torch.equal(runs[0][0][[0, 2, 3]], runs[1][0][[0, 2, 3]]) and torch.equal(runs[0][1], runs[1][1])
    torch.testing.assert_close(runs[0][2], runs[1][2], rtol=1e-4, atol=1e-5)
    assert runs[0][1].tolist() == [11, 1, 11, 11]


def check_lossless(target, drafter, answers, combinations) -> Counter:
    seen = Counter()
    for how, shape, rows in combinations:
        drafter.tree_spec = TREES[shape]
        decoder = Decoder(target, drafter, slots=rows, chunk=7, adaptive=AdaptiveDepth() if rows == 2 else None)
        out = decoder.generate(PROMPTS, HOWS[how], NEW, ())
        assert texts(out) == answers[how], (how, shape, rows)
        seen.update(one.accepted - 1 for answer in out for one in answer.rounds)
        assert decoder.counters.target_forwards == decoder.counters.rounds + decoder.counters.prefill_chunks
    return seen


@pytest.mark.parametrize("number, name", list(enumerate(sorted(CONFIGS))))
def test_output_is_plain_decodings(number, name):
    """Every shape for each architecture, samplings and batch sizes in turn; every sampling with every shape for Llama."""
    target = Target.wrap(tiny(name))
    answers = answers_of(target)
    combinations = [(list(HOWS)[(number + i) % 3], shape, (1, 3)[(number + i) % 2]) for i, shape in enumerate(TREES)]
    if name == "llama":
        combinations = [(how, shape, (1, 3)[(i + j) % 2]) for i, how in enumerate(HOWS) for j, shape in enumerate(TREES)]
    arch = {"draft_vocab_size": 30} if number % 2 else {"norm_output": True, "fc_norm": True}
    seen = check_lossless(target, fitted(target, answers, **arch), answers, combinations)
    assert all(seen[accepted] >= 2 for accepted in range(3)), seen


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_eagle_1_and_adaptive_depth_are_lossless_too(name):
    target = Target.wrap(tiny(name))
    answers = answers_of(target)
    check_lossless(target, make(target, "1").eval(), answers, [("greedy", "static", 3), ("shared-noise", "dynamic", 1)])
    adaptive = fitted(target, answers, draft_vocab_size=30)
    seen = check_lossless(target, adaptive, answers, [(how, shape, 2) for how, shape in zip(HOWS, TREES, strict=True)])
    assert seen[1] + seen[2] >= 3, seen


@pytest.mark.parametrize("rule", ["rejection", "rejection-replacement"])
def test_rejection_draws_from_the_draft_vocabulary(target, rule):
    answers = answers_of(target)
    drafter = fitted(target, answers, draft_vocab_size=30)
    inside, how = set(allowed(drafter).tolist()), Sampling(1.0, top_k=30, seed=3, rule=rule)
    drafted = []
    plain = drafter.propose
    drafter.propose = lambda round: drafted.append(plain(round)) or drafted[-1]
    for shape in ("chain", "static") if rule == "rejection" else ("static",):
        drafter.tree_spec = TREES[shape]
        alone, batch = (texts(Decoder(target, drafter, slots=rows).generate(PROMPTS, how, NEW, ())) for rows in (1, 4))
        assert alone == batch and all(len(answer) == NEW and 0 <= min(answer) <= max(answer) < VOCAB for answer in alone)
        assert not all(token in inside for answer in alone for token in answer)  # what is OOV is still said
    for tree in drafted:
        real = tree.size > 1
        assert set(tree.tokens[real, 1:].flatten().tolist()) <= inside
        q = tree.q_logits[real, 0].softmax(-1)
        assert q.shape[-1] == VOCAB and (q[:, [v for v in range(VOCAB) if v not in inside]] == 0).all()
    drafter.tree_spec = TREES["dynamic"]
    with pytest.raises(ValueError, match="with a dynamic tree"):
        Decoder(target, drafter).generate(PROMPTS[1:], how, NEW, ())


def test_beyond_the_trained_positions_it_warns_and_decodes(target):
    answers = answers_of(target)
    drafter = make(target, "3", training={"positions": 30})
    longest = max(map(len, PROMPTS))
    with pytest.warns(UserWarning, match="trained on 30"):
        assert texts(Decoder(target, drafter).generate(PROMPTS, None, NEW, ())) == answers["greedy"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder(target, drafter).generate(PROMPTS, None, 30 - longest, ())


@pytest.mark.parametrize("name", ["3", "3, small", "1"])
@pytest.mark.parametrize("shape, how", [("chain", "greedy"), ("static", "rejection"), ("dynamic", "shared-noise")])
def test_nothing_reads_the_device_within_a_round(target, name, shape, how, monkeypatch):
    drafter = make(target, name).eval()
    drafter.tree_spec = TREES[shape]
    sampling = Sampling(0.9, seed=1, rule=how) if how == "rejection" else HOWS[how]
    stream = Decoder(target, drafter, slots=3).stream([prompt[:3] * 2 for prompt in PROMPTS[1:4]], sampling, 30, ())
    check_reads(stream, 4, monkeypatch)


@pytest.mark.parametrize("name, arch", [("3", {}), ("3", {"draft_vocab_size": 30}), ("3.1", {})])
def test_tau_of_records_of_decoding_and_of_the_objective_agree(target, name, arch):
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    answers = {"greedy": texts(Decoder(target).generate(prompts, None, NEW, ()))}
    # Fitted to some of them only, so that it is wrong, too.
    drafter = fitted(target, {"greedy": answers["greedy"][:3]}, name, prompts[:3], **arch)
    cases = [EncodedPrompt(Prompt(str(n), "all", ""), prompt, n) for n, prompt in enumerate(prompts)]
    records = position_records(target, drafter, cases, Sampling(), NEW)
    taus = []
    for shape in (StaticTree.chain(1), StaticTree.chain(4), TREES["static"]):
        drafter.tree_spec = shape
        done = Decoder(target, drafter, slots=2).generate(prompts, None, NEW, ())
        tau = sum(len(one.tokens) for one in done) / sum(len(one.rounds) for one in done)
        assert trees.tau(records, shape.paths) == pytest.approx(tau, abs=1e-9), shape.paths
        taus.append(tau)
    assert 1.2 < taus[0] < taus[1] < 4

    lines = [prompt + answer for prompt, answer in zip(prompts, answers["greedy"], strict=True)]
    rows = PackedDataset(lines_corpus(lines, [len(prompt) for prompt in prompts], 64), 64)
    for steps in (1, 3, 4):
        section = EagleSection(steps=steps)
        loss = objective3(drafter, rows.batch(torch.arange(len(rows))), target=target, section=section)
        kept = [ranks[:steps] for record, line in zip(records, lines, strict=True) for ranks in complete_ranks(record, line, steps)]
        survival = [sum(all(rank == 0 for rank in ranks[: k + 1]) for ranks in kept) / len(kept) for k in range(steps)]
        assert float(torch.div(*loss.metrics["sim_tau"])) == pytest.approx(1 + sum(survival), abs=1e-6)
        for k in range(steps):
            assert float(torch.div(*loss.metrics[f"survival_{k + 1}"])) == pytest.approx(survival[k], abs=1e-6)
        assert 0 < survival[0] < 1


def complete_ranks(record, line: list[int], steps: int) -> list[list[int]]:
    """The ranks from every position with `steps` tokens after its root."""
    return record.ranks.tolist()[: len(record.ranks) + 1 - steps]
