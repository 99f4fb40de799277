"""A draft model that stops where it is unsure: plain decoding's tokens where draws are keyed, the target's law under rejection."""

import itertools
from collections import Counter

import pytest
import torch
from test_draft_model import SHAPES, Checked, Now, relative
from test_lossless import PROMPTS, texts
from test_rules import GREEN, built, p_value
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import tiny

from draftsmith.inference import draft_model, rules
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.sampler import Sampling, warp
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target

NEW = 16
SURE = 0.1  # of 48 tokens: reached now and then
HOWS = {
    "greedy": Sampling(top_k=3),  # filters that have nothing to decide
    "target-sample": Sampling(1.0, seed=2, rule="target-sample"),
    "shared-noise": Sampling(1.0, seed=3),
    "cut": Sampling(1.3, top_p=0.8, seed=4),
}


class Watched(Checked):
    """Counts depths, and sees whether each stop is what whole forwards say of the nodes above it."""

    def propose(self, round):
        # Drawn children are not the best ones that Checked looks for.
        tree = super().propose(round) if round.sampling.children == "top" else DraftModel.propose(self, round)
        depth = int(tree.depth.max())
        self.seen[f"depth {depth}"] += 1
        if isinstance(self.tree_spec, StaticTree):
            asked = self.tree_spec.cut(round.depth)
            best = self.best(round, tree, asked)
            assert all(best[d] >= self.confidence for d in range(1, depth))
            assert depth == asked.max_depth or best[depth] < self.confidence
            assert tree.tokens.shape[1] == asked.cut(depth).num_nodes
        return tree

    def best(self, round, tree, asked) -> list[float]:
        """By depth: the best probability after any node, of any row, that may have children."""
        inner = {path[:-1] for path in asked.paths}
        found = [0.0] * (asked.max_depth + 1)
        for b, row in enumerate(round.slots):
            for i, path in enumerate(asked.cut(int(tree.depth.max())).paths, 1):
                line = tree.tokens[b][tree.visible()[b, i]].tolist()[1:]  # by index, which on a path is by depth
                if path in inner:
                    logits = self.model.logits(self.model.forward(torch.tensor([self.texts[row] + line])).hidden[0, -1])
                    law = logits if round.sampling.greedy else warp(logits, round.sampling)
                    found[len(path)] = max(found[len(path)], float(law.softmax(-1).max()))
        return found

    def accept(self, round, tree, verdict, out):
        super().accept(round, tree, verdict, out)
        assert all(told.depth == int(tree.depth.max()) for told in verdict.on_host(tree)), "what a governor learns is how deep it was"


@pytest.fixture(scope="module")
def target():
    return Target.wrap(tiny("llama"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", HOWS)
def test_output_is_plain_decodings(target, how, shape):
    plain, seen = texts(Decoder(target).generate(PROMPTS, HOWS[how], NEW, ())), Counter()
    for rows, governor in ((1, None), (5, None), (3, Now())):
        drafter = Watched(relative("llama", 0.005), SHAPES[shape], chunk=5, confidence=SURE)
        out = Decoder(target, drafter, slots=rows, governor=governor).generate(PROMPTS, HOWS[how], NEW, ())
        assert texts(out) == plain, rows
        seen += drafter.seen
    deepest = SHAPES[shape].max_depth
    assert all(seen[f"depth {depth}"] >= 2 for depth in range(1, deepest + 1)), seen
    assert all(seen[f"accepted {count}"] >= 2 for count in range(2 if how == "target-sample" else 3)), seen


@pytest.mark.parametrize("shape", SHAPES)
def test_without_confidence_and_with_too_much(target, shape, monkeypatch):
    def rounds(confidence, how, rows=5):
        drafter = DraftModel(relative("llama", 0.005), SHAPES[shape], confidence=confidence)
        out = Decoder(target, drafter, slots=rows).generate(PROMPTS, how, NEW, ())
        return texts(out), [[(one.size, one.accepted) for one in answer.rounds] for answer in out]

    rejection = Sampling(1.0, seed=4, rule="rejection")
    # One that is always reached changes nothing but what draws are keyed by.
    assert all(rounds(0.0, how) == rounds(1e-9, how) for how in HOWS.values())
    if shape != "dynamic":
        assert rounds(0.0, rejection) != rounds(1e-9, rejection)
        monkeypatch.setattr(draft_model, "APART", 0)
        assert rounds(0.0, rejection) == rounds(1e-9, rejection)
        monkeypatch.undo()
    level = 1 + len([path for path in SHAPES[shape].paths if len(path) == 1]) if shape != "dynamic" else 1 + SHAPES[shape].width
    for how in (*HOWS.values(), *([rejection] if shape != "dynamic" else [])):
        assert {size for answer in rounds(1 - 1e-6, how)[1] for size, _ in answer} == {level}
    monkeypatch.setattr(DraftModel, "_confident", None)
    for how in HOWS.values():
        sizes = {size for answer in rounds(0.0, how)[1] for size, _ in answer}
        assert sizes == {SHAPES[shape].num_nodes}, "confidence 0 never asks"


def test_a_confidence_is_a_probability(target):
    for wrong in (-0.1, 40.0):
        with pytest.raises(ValueError, match=f"confidence {wrong}; expected a probability"):
            DraftModel(target, StaticTree.chain(2), confidence=wrong)


def law_of_a_round(p: list[Tensor], q: list[Tensor], drafts) -> Tensor:
    """The joint law [V,V,V] of the first three tokens of a round of chains, those that it leaves open being the target's own.

    p: the target's laws of each, [V], [V,V], [V,V,V] · q likewise · drafts: (tokens drafted, the probability of that)."""
    out = torch.zeros_like(p[2])
    for tokens, weight in drafts:
        laws = [torch.stack([law[k][tuple(tokens[:k])] for k in range(len(tokens) + 1)])[None] for law in (p, [*q, p[2]])]
        tree = built(torch.tensor([[0, *tokens]]), [-1, 0, 1][: len(tokens) + 1], len(tokens) + 1, False)
        chance, rest = rules.odds(tree, *laws)
        for kept in range(len(tokens) + 1):
            last = rest[0, kept] * (weight * (1 - chance[0, kept + 1]) if kept < len(tokens) else weight)
            for law in p[kept + 1 :]:
                last = last[..., None] * law[tuple(tokens[:kept])]
            out[tuple(tokens[:kept])] += last
            weight = weight * chance[0, kept + 1] if kept < len(tokens) else 0
    return out


def stopped(rule: str, q: list[Tensor], sure: float, seen: Counter):
    """All chains of two that a drafter may draw, with their probabilities, where it stops by `rule`."""
    for x in range(len(q[0])):
        first = float(q[0][x])
        if rule == "a token that is unlikely is not tried" and first < sure:
            yield (), first
        elif (q[1][x].max() if rule == "by the law of the next token" else first) < sure:
            seen["stopped"] += 1
            yield (x,), first
        else:
            seen["drafted"] += 1
            for y, second in enumerate(q[1][x].tolist()):
                yield ((x,) if second < sure and rule == "a token that is unlikely is not tried" else (x, y)), first * second


def test_law_of_a_chain_that_may_stop():
    """Which stops are lossless under rejection. By the next token's law: ours. By the probability of the token just drawn, which is tried
    all the same: transformers' assistant_confidence_threshold, lossless too, since it says nothing of how that token was drawn once it is
    known. Leaving out the token for its probability is not: it is tried only where it was drawn likely."""
    generator, errors, seen = torch.Generator().manual_seed(0), {}, Counter()
    for vocab, sure, _ in itertools.product((2, 3, 4), (0.3, 0.5, 0.7), range(8)):
        p, q = ([(2 * torch.randn((vocab,) * k, generator=generator).double()).softmax(-1) for k in (1, 2, 3)] for _ in "pq")
        truth = p[0][:, None, None] * p[1][:, :, None] * p[2]
        for rule in ("by the law of the next token", "by the token just drawn", "a token that is unlikely is not tried"):
            found = law_of_a_round(p, q[:2], stopped(rule, q, sure, seen))
            errors.setdefault(rule, []).append(float((found - truth).abs().max()))
    assert max(errors["by the law of the next token"]) < 1e-12 and max(errors["by the token just drawn"]) < 1e-12
    lost = torch.tensor(errors["a token that is unlikely is not tried"])
    assert lost.median() > 0.01 and lost.max() > 0.1
    assert seen["stopped"] > 100 and seen["drafted"] > 100


def small(vocab: int, noise: float) -> Target:
    """A random model of 8 tokens, the last ones left out where `vocab` is less; `noise` makes a relative of it."""
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


@pytest.mark.parametrize(("vocab", "rule"), [(8, "rejection"), (6, "rejection-replacement")])
def test_law_under_rejection(vocab, rule):
    """Of whole decodings in batches that stop early, with a draft model that has the target's tokens or fewer."""
    target, how, prompt, count = small(8, 0.0), Sampling(1.0, seed=vocab, rule=rule), [3, 5, 1], 2000
    lines = torch.tensor([[*prompt, *more] for more in itertools.product(range(8), repeat=2)])
    laws = target.logits(target.forward(lines).hidden).double().softmax(-1).view(8, 8, len(prompt) + 2, 8)
    truth = laws[0, 0, 2][:, None, None] * laws[:, 0, 3][:, :, None] * laws[:, :, 4]
    drafter = DraftModel(small(vocab, 0.15), StaticTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)]), confidence=0.4)
    out = Decoder(target, drafter, slots=8).generate([prompt] * count, how, 3, ())
    tokens = torch.tensor(texts(out))
    assert p_value(tokens @ torch.tensor([64, 8, 1]), truth.flatten()) > GREEN
    assert p_value(tokens[:, 2], truth.sum((0, 1))) > GREEN
    sizes = Counter(answer.rounds[0].size for answer in out)
    lengths = Counter(answer.rounds[0].accepted for answer in out)
    assert all(sizes[size] > 80 for size in (3, 4, 5)), sizes
    assert all(lengths[length] > 20 for length in (1, 2, 3)), lengths


def planted(laws: dict[tuple[int, int], dict[int, float]]) -> Target:
    """A model whose law after a token hangs on it and its position alone: laws[position, token], even where nothing is said."""
    table = torch.full((16, 8, 8), 1 / 8)
    for at, law in laws.items():
        table[at] = 0.0
        for token, chance in law.items():
            table[(*at, token)] = chance
    model = Target.wrap(tiny("llama"))
    model.vocab_size = 8
    model.forward = lambda ids, *, position_ids, **_: TargetOutput(table.log()[position_ids, ids])
    model.logits = lambda hidden: hidden
    return model


def twos(count: int = 120) -> int:
    """Two rows, a chain of four. In its first round row 0 drafts 1, 1, then 2 or 3, all in vain. After a 2 it is sure, and row 1 gets its
    fourth token and one round later is where it is sure itself, so that row 0 drafts for the index of that 2 or 3 again: of each, as
    likely, or else the target draws one. How often the answer has a 2 there."""
    even, sure = {2: 0.5, 3: 0.5}, (0, 1, 2, 6)
    beside = {(at, token): {4: 1.0} if at in sure else {4: 0.5, 5: 0.5} for at in range(16) for token in (4, 5)}
    both = beside | {(1, 0): {0: 1.0}, (2, 0): even}
    vain = {(0, 0): {1: 1.0}, (1, 1): {1: 1.0}, (2, 1): even, (3, 2): {2: 1.0}, (3, 3): even}
    drafter = DraftModel(planted(both | vain), StaticTree.chain(4), confidence=0.9)
    decoder, found = Decoder(planted(both | {(0, 0): {0: 1.0}}), drafter, slots=2), Counter()
    for i in range(count):
        answer = decoder.generate([[0], [4]], Sampling(1.0, rule="rejection"), 6, (), requests=[2 * i, 2 * i + 1])[0].tokens
        assert answer[:2] == [0, 0]
        found[answer[2]] += 1
    assert found[2] + found[3] == count
    return found[2]


def test_what_was_drawn_in_vain_is_not_drawn_again(monkeypatch):
    """120 coins: 60 ± 5.5. Drawn with the noise of the index alone, a 2 that was drawn in vain would come again: three in four."""
    assert 38 < twos() < 82
    monkeypatch.setattr(draft_model, "APART", 0)
    assert twos() > 82
