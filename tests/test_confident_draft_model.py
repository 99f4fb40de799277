"""A draft model that stops early by its confidence: plain decoding's tokens with keyed noise, the target's distribution under rejection."""

import itertools
from collections import Counter

import pytest
import torch
from decoding_cases import GREEN, PROMPTS, SHAPES, Checked, DepthPattern, build_tree, p_value, relative, texts
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import tiny

from draftsmith.inference import rules, stopping
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.sampler import Sampling, warp
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target

NEW = 16
CONFIDENCE = 0.1  # of 48 tokens: reached now and then
HOWS = {
    "greedy": Sampling(top_k=3),  # greedy decoding does not use the filters
    "target-sample": Sampling(1.0, seed=2, rule="target-sample"),
    "shared-noise": Sampling(1.0, seed=3),
    "filtered": Sampling(1.3, top_p=0.8, seed=4),
}


class Watched(Checked):
    """Counts depths, and compares each stop with forwards over the complete paths of the nodes above it."""

    def propose(self, round):
        # Checked expects the best tokens, which drawn children are not.
        tree = super().propose(round) if round.sampling.children == "top" else DraftModel.propose(self, round)
        depth = int(tree.depth.max())
        self.seen[f"depth {depth}"] += 1
        if isinstance(self.tree_spec, StaticTree):
            spec = self.tree_spec.cut(round.depth)
            best = self.best(round, tree, spec)
            assert all(best[d] >= self.stop.threshold for d in range(1, depth))
            assert depth == spec.max_depth or best[depth] < self.stop.threshold
            assert tree.tokens.shape[1] == spec.cut(depth).num_nodes
        return tree

    def best(self, round, tree, spec) -> list[float]:
        """By depth: the best probability after any node, of any row, that may have children."""
        inner = {path[:-1] for path in spec.paths}
        best = [0.0] * (spec.max_depth + 1)
        for b, slot in enumerate(round.slots):
            for i, path in enumerate(spec.cut(int(tree.depth.max())).paths, 1):
                tokens = tree.tokens[b][tree.visible()[b, i]].tolist()[1:]  # by index, which on a path is by depth
                if path in inner:
                    logits = self.model.logits(self.model.forward(torch.tensor([self.texts[slot] + tokens])).hidden[0, -1])
                    warped = logits if round.sampling.greedy else warp(logits, round.sampling)
                    best[len(path)] = max(best[len(path)], float(warped.softmax(-1).max()))
        return best

    def accept(self, round, tree, verdict, out):
        super().accept(round, tree, verdict, out)
        depth = int(tree.depth.max())
        assert all(result.depth == depth for result in verdict.on_host(tree)), "AdaptiveDepth learns the depth of the draft"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", HOWS)
def test_output_is_that_of_plain_decoding(target, how, shape):
    plain, seen = texts(Decoder(target).generate(PROMPTS, HOWS[how], NEW, ())), Counter()
    for slots, adaptive in ((1, None), (5, None), (3, DepthPattern())):
        drafter = Watched(relative("llama", 0.005), SHAPES[shape], chunk=5, stop=Stopping("confidence", CONFIDENCE))
        out = Decoder(target, drafter, slots=slots, adaptive=adaptive).generate(PROMPTS, HOWS[how], NEW, ())
        assert texts(out) == plain, slots
        seen += drafter.seen
    deepest = SHAPES[shape].max_depth
    assert all(seen[f"depth {depth}"] >= 2 for depth in range(1, deepest + 1)), seen
    assert all(seen[f"accepted {count}"] >= 2 for count in range(2 if how == "target-sample" else 3)), seen


@pytest.mark.parametrize("shape", SHAPES)
def test_confidences_of_nearly_zero_and_nearly_one(target, shape, monkeypatch):
    def rounds(confidence, how, slots=5):
        drafter = DraftModel(relative("llama", 0.005), SHAPES[shape], stop=Stopping("confidence", confidence) if confidence else None)
        out = Decoder(target, drafter, slots=slots).generate(PROMPTS, how, NEW, ())
        return texts(out), [[(round.size, round.accepted) for round in answer.rounds] for answer in out]

    rejection = Sampling(1.0, seed=4, rule="rejection")
    # A confidence that is always reached changes only the keys of draws.
    assert all(rounds(0.0, how) == rounds(1e-9, how) for how in HOWS.values())
    if shape != "dynamic":
        assert rounds(0.0, rejection) != rounds(1e-9, rejection)
        monkeypatch.setattr(stopping, "DEPTH_STRIDE", 0)
        assert rounds(0.0, rejection) == rounds(1e-9, rejection)
        monkeypatch.undo()
    level = 1 + len([path for path in SHAPES[shape].paths if len(path) == 1]) if shape != "dynamic" else 1 + SHAPES[shape].width
    for how in (*HOWS.values(), *([rejection] if shape != "dynamic" else [])):
        assert {size for answer in rounds(1 - 1e-6, how)[1] for size, _ in answer} == {level}
    monkeypatch.setattr(Stopping, "goes_on", None)
    for how in HOWS.values():
        sizes = {size for answer in rounds(0.0, how)[1] for size, _ in answer}
        assert sizes == {SHAPES[shape].num_nodes}, "confidence 0 never stops"


def test_a_confidence_is_a_probability():
    for wrong in (-0.1, 40.0):
        with pytest.raises(ValueError, match=f"got confidence {wrong:g}; expected 0 or more and less than 1"):
            Stopping("confidence", wrong)


def distribution_of_a_round(p: list[Tensor], q: list[Tensor], drafts) -> Tensor:
    """The joint distribution [V,V,V] of the first three tokens of a round of chains. Tokens that the round does not reach are the target's own.

    Args:
        p: the target's distributions of the three tokens, [V], [V,V], [V,V,V].
        q: the drafter's of the first two.
        drafts: (drafted tokens, their probability).
    """
    joint = torch.zeros_like(p[2])
    for tokens, weight in drafts:
        pq = [torch.stack([tables[k][tuple(tokens[:k])] for k in range(len(tokens) + 1)])[None] for tables in (p, [*q, p[2]])]
        tree = build_tree(torch.tensor([[0, *tokens]]), [-1, 0, 1][: len(tokens) + 1], len(tokens) + 1, False)
        probability, residual = rules.acceptance_probability(tree, *pq)
        for count in range(len(tokens) + 1):
            last = residual[0, count] * (weight * (1 - probability[0, count + 1]) if count < len(tokens) else weight)
            for table in p[count + 1 :]:
                last = last[..., None] * table[tuple(tokens[:count])]
            joint[tuple(tokens[:count])] += last
            weight = weight * probability[0, count + 1] if count < len(tokens) else 0
    return joint


def drafts_that_stop(rule: str, q: list[Tensor], confidence: float, seen: Counter):
    """All chains of at most two tokens that a drafter may draw, with their probabilities, where it stops by `rule`."""
    for x in range(len(q[0])):
        first = float(q[0][x])
        if rule == "an unlikely token is left out" and first < confidence:
            yield (), first
        elif (q[1][x].max() if rule == "by the distribution of the next token" else first) < confidence:
            seen["stopped"] += 1
            yield (x,), first
        else:
            seen["drafted"] += 1
            for y, second in enumerate(q[1][x].tolist()):
                yield ((x,) if second < confidence and rule == "an unlikely token is left out" else (x, y)), first * second


def test_distribution_of_a_chain_that_may_stop():
    """Which stops are lossless under rejection.

    By the distribution of the next token: ours. By the probability of the token just drawn, which is verified nevertheless (transformers'
    assistant_confidence_threshold): lossless too, since the stop does not depend on how that token was drawn once it is known. Leaving out the
    token for its probability is not lossless: it is verified only where it was drawn likely.
    """
    generator, errors, seen = torch.Generator().manual_seed(0), {}, Counter()
    for vocab, confidence, _ in itertools.product((2, 3, 4), (0.3, 0.5, 0.7), range(8)):
        p, q = ([(2 * torch.randn((vocab,) * k, generator=generator).double()).softmax(-1) for k in (1, 2, 3)] for _ in "pq")
        expected = p[0][:, None, None] * p[1][:, :, None] * p[2]
        for rule in ("by the distribution of the next token", "by the token just drawn", "an unlikely token is left out"):
            joint = distribution_of_a_round(p, q[:2], drafts_that_stop(rule, q, confidence, seen))
            errors.setdefault(rule, []).append(float((joint - expected).abs().max()))
    assert max(errors["by the distribution of the next token"]) < 1e-12 and max(errors["by the token just drawn"]) < 1e-12
    lost = torch.tensor(errors["an unlikely token is left out"])
    assert lost.median() > 0.01 and lost.max() > 0.1
    assert seen["stopped"] > 100 and seen["drafted"] > 100


def small(vocab: int, noise: float) -> Target:
    """A random model of the first `vocab` of 8 tokens; `noise` perturbs its weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, max_position_embeddings=32, bos_token_id=None, eos_token_id=None, **sizes)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3, generator=generator)
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    if vocab < 8:
        model.resize_token_embeddings(vocab)
    return Target.wrap(model)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "rule"), [(8, "rejection"), (6, "rejection-replacement")])
def test_distribution_under_rejection(vocab, rule):
    """Of complete answers from batches that stop early, with a draft model that has the target's tokens or fewer."""
    target, how, prompt, count = small(8, 0.0), Sampling(1.0, seed=vocab, rule=rule), [3, 5, 1], 2000
    sequences = torch.tensor([[*prompt, *more] for more in itertools.product(range(8), repeat=2)])
    p = target.logits(target.forward(sequences).hidden).double().softmax(-1).view(8, 8, len(prompt) + 2, 8)
    expected = p[0, 0, 2][:, None, None] * p[:, 0, 3][:, :, None] * p[:, :, 4]
    drafter = DraftModel(small(vocab, 0.15), StaticTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)]), stop=Stopping("confidence", 0.4))
    out = Decoder(target, drafter, slots=8).generate([prompt] * count, how, 3, ())
    tokens = torch.tensor(texts(out))
    assert p_value(tokens @ torch.tensor([64, 8, 1]), expected.flatten()) > GREEN
    assert p_value(tokens[:, 2], expected.sum((0, 1))) > GREEN
    sizes = Counter(answer.rounds[0].size for answer in out)
    lengths = Counter(answer.rounds[0].accepted for answer in out)
    assert all(sizes[size] > 80 for size in (3, 4, 5)), sizes
    assert all(lengths[length] > 20 for length in (1, 2, 3)), lengths


def planted(distributions: dict[tuple[int, int], dict[int, float]]) -> Target:
    """A model whose next-token distribution depends only on the token and its position.

    Args:
        distributions: by (position, token); uniform where nothing is given.
    """
    table = torch.full((16, 8, 8), 1 / 8)
    for at, distribution in distributions.items():
        table[at] = 0.0
        for token, probability in distribution.items():
            table[(*at, token)] = probability
    model = Target.wrap(tiny("llama"))
    model.vocab_size = 8
    model.forward = lambda ids, *, position_ids, **_: TargetOutput(table.log()[position_ids, ids])
    model.logits = lambda hidden: hidden
    return model


def count_twos(count: int = 120) -> int:
    """How often the third token of an answer is a 2, where a 2 and a 3 are equally likely.

    There are two rows and a chain of four. In its first round row 0 drafts 1, 1, then 2 or 3, all in vain. After a 2 it is confident, so row 1
    gets its fourth token; one round later row 1 is confident itself. So row 0 drafts for the index of that 2 or 3 again, as often after a 2 as
    after a 3. If the draw repeated the noise of the first one, a 2 would come too often.
    """
    even, confident = {2: 0.5, 3: 0.5}, (0, 1, 2, 6)
    beside = {(at, token): {4: 1.0} if at in confident else {4: 0.5, 5: 0.5} for at in range(16) for token in (4, 5)}
    both = beside | {(1, 0): {0: 1.0}, (2, 0): even}
    vain = {(0, 0): {1: 1.0}, (1, 1): {1: 1.0}, (2, 1): even, (3, 2): {2: 1.0}, (3, 3): even}
    drafter = DraftModel(planted(both | vain), StaticTree.chain(4), stop=Stopping("confidence", 0.9))
    decoder, thirds = Decoder(planted(both | {(0, 0): {0: 1.0}}), drafter, slots=2), Counter()
    for i in range(count):
        answer = decoder.generate([[0], [4]], Sampling(1.0, rule="rejection"), 6, (), requests=[2 * i, 2 * i + 1])[0].tokens
        assert answer[:2] == [0, 0]
        thirds[answer[2]] += 1
    assert thirds[2] + thirds[3] == count
    return thirds[2]


@pytest.mark.slow
def test_a_token_drawn_in_vain_is_not_drawn_again(monkeypatch):
    """120 even draws: 60 ± 5.5. With the noise of the index alone, a 2 that was drawn in vain would be drawn again: three in four."""
    assert 38 < count_twos() < 82
    monkeypatch.setattr(stopping, "DEPTH_STRIDE", 0)
    assert count_twos() > 82
