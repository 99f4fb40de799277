"""The judgement of answers that diverge in half precision: planted bugs are called bugs, differences of rounding never are."""

import random
from dataclasses import replace

import pytest
import torch
from decoding_cases import texts
from planting import PlantingDrafter
from zoo import VOCAB, tiny

from draftsmith.eval import lossless
from draftsmith.eval.lossless import Recorded, decode_recorded, first_divergence
from draftsmith.inference.attention import TreeAttention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import DraftTree
from draftsmith.models.target import Target

NEW = 24
plain_visible, plain_positions, plain_commit = DraftTree.visible, TreeAttention.positions, TreeCache.commit


def earlier_nodes_visible(self):
    nodes = self.tokens.shape[1]
    return torch.ones(nodes, nodes).tril().bool().expand(len(self.tokens), -1, -1)


def positions_off_by_one(self):
    return plain_positions(self) + (self.depth > 0) if self.visible is not None else plain_positions(self)


def rows_not_moved(self, verdict, host_counts=None, in_place=False):
    return plain_commit(self, verdict, host_counts, True)


BUGS = {
    "a wrong mask": (DraftTree, "visible", earlier_nodes_visible),
    "an off-by-one position": (TreeAttention, "positions", positions_off_by_one),
    "a stale KV row": (TreeCache, "commit", rows_not_moved),
}


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(VOCAB) for _ in range(generator.randint(2, 20))] for _ in range(count)]


def drafted(target: Target, asked: list[list[int]], plain: list[Recorded], sampling: Sampling, seed: int) -> list[Recorded]:
    drafter = PlantingDrafter(asked, [answer.tokens for answer in plain], VOCAB, seed=seed)
    return decode_recorded(target, drafter, asked, list(range(len(asked))), sampling, NEW, slots=8)


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=3)], ids=["greedy", "sampled"])
def test_planted_bugs_are_called_bugs(monkeypatch, bug, sampling):
    target = Target.wrap(tiny("llama").bfloat16())
    called, diverged = 0, 0
    for seed in range(2):
        asked = prompts(16, seed)
        plain = decode_recorded(target, None, asked, list(range(16)), sampling, NEW, slots=8)
        sound = drafted(target, asked, plain, sampling, seed)
        with monkeypatch.context() as patch:
            patch.setattr(*BUGS[bug])
            faulty = drafted(target, asked, plain, sampling, seed)
            assert BUGS[bug][0].__dict__[BUGS[bug][1]] is BUGS[bug][2]
        for number, (expected, right, wrong) in enumerate(zip(plain, sound, faulty, strict=True)):
            if right.tokens == expected.tokens and wrong.tokens != expected.tokens:  # the bug alone did it
                pair = (expected, wrong)
                divergence = first_divergence(target, "p", asked[number], expected.tokens, wrong.tokens, sampling, number, pair)
                diverged += 1
                called += divergence.verdict == "bug"
    assert called == diverged >= 17  # six cases, more than a hundred in all


@pytest.mark.parametrize(
    "sampling", [Sampling(), pytest.param(Sampling(temperature=0.9, top_p=0.9, seed=3), marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_differences_of_rounding_are_ties(sampling):
    model = tiny("llama")
    with torch.no_grad():  # half of the tokens are nearly equal to another one, so that rounding often decides
        weight = model.get_output_embeddings().weight
        weight[VOCAB // 2 :] = weight[: VOCAB // 2] * (1 + 0.01 * torch.randn(VOCAB // 2, 1, generator=torch.Generator().manual_seed(0)))
    target = Target.wrap(model.bfloat16())
    verdicts, seed = [], 0
    while len(verdicts) < 12 and seed < 24:  # how many one seed gives depends on the CPU's arithmetic
        asked, seed = prompts(32, seed), seed + 1
        plain = decode_recorded(target, None, asked, list(range(32)), sampling, NEW, slots=8)
        for number, (expected, got) in enumerate(zip(plain, drafted(target, asked, plain, sampling, seed), strict=True)):
            for pair in (None, (expected, got)):  # with hidden states, and by the margin alone
                divergence = first_divergence(target, "p", asked[number], expected.tokens, got.tokens, sampling, number, pair)
                if divergence:
                    verdicts.append(divergence.verdict)
    assert len(verdicts) >= 12 and set(verdicts) == {"tie"}


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "min_p": 0.1}])
def test_no_smaller_change_takes_a_token_over_the_edge_of_the_kept_set(cut):
    generator, sampling = torch.Generator().manual_seed(1), Sampling(temperature=0.7, **cut)
    crossed, distances = 0, []
    for _ in range(6):
        logits = torch.randn(14, generator=generator)
        logits[7:] = logits[:7] + 0.01 * torch.randn(7, generator=generator)  # pairs that are nearly equal
        inside = lossless.warp(logits, sampling).isfinite()
        for token in range(14):
            distance = lossless._edge(logits, token, sampling)
            for size in (0.999, 4.0):
                noise = size * distance * sampling.temperature * (torch.rand(150, 14, generator=generator) - 0.5)
                moved = lossless.warp(logits + noise, sampling).isfinite()[:, token] != inside[token]
                assert size > 1 or not moved.any(), (token, distance)
                crossed += bool(moved.any())
            distances.append(distance)
    assert crossed > 20 and min(distances) < 0.1 and lossless._edge(logits, 0, Sampling()) == float("inf")


def test_a_token_that_its_own_hidden_state_does_not_give_is_a_bug():
    """The states are right, and what was taken from them is not: a bug after the forward."""
    target = Target.wrap(tiny("llama").bfloat16())
    (prompt,) = prompts(1, 5)
    plain = decode_recorded(target, None, [prompt], [0], Sampling(), NEW)[0]
    wrong = Recorded([*plain.tokens[:9], (plain.tokens[9] + 1) % VOCAB, *plain.tokens[10:]], plain.hidden)
    divergence = first_divergence(target, "p", prompt, plain.tokens, wrong.tokens, Sampling(), 0, (plain, wrong))
    assert divergence.index == 9 and divergence.excess < 3 and not divergence.own_best and divergence.verdict == "bug"


def test_a_tie_under_a_repetition_penalty_is_a_tie():
    target = Target.wrap(tiny("llama"))
    with torch.no_grad():  # tokens 7 and 8 always have equal logits
        target.head_weight[8] = target.head_weight[7]
        target.head_weight[7:9] *= 50
    sampling = Sampling(repetition_penalty=4.0)
    pairs = [[i, j] for i in range(9, 48) for j in range(9, 48)]
    both = (Decoder(target, slots=64).generate(pairs, how, 1, ()) for how in (sampling, Sampling()))
    # Token 7, where another one is best without the penalty.
    prompt = next(pair for pair, plain, other in zip(pairs, *map(texts, both), strict=True) if plain == [7] and other[0] in pair)
    (plain,) = lossless.decode_recorded(target, None, [prompt], [0], sampling, 1)
    assert plain.tokens == [7]
    tie = replace(plain, tokens=[8])
    assert first_divergence(target, "p", prompt, [7], [8], sampling, 0, (plain, tie)).verdict == "tie"
    assert first_divergence(target, "p", prompt, [7], [8], Sampling(), 0, (plain, tie)).verdict == "bug"


def test_answers_that_do_not_repeat_are_judged_by_the_margin():
    target = Target.wrap(tiny("llama"))
    (prompt,) = prompts(1, 5)
    plain = decode_recorded(target, None, [prompt], [0], Sampling(), NEW)[0]
    wrong = [*plain.tokens[:9], (plain.tokens[9] + 1) % VOCAB]
    divergence = first_divergence(target, "p", prompt, plain.tokens, wrong, Sampling(), 0, (plain, plain))
    assert divergence.excess is None and divergence.verdict == "bug"


def test_exact_rounds_have_no_ties():
    target = Target.wrap(tiny("llama"))
    divergence = first_divergence(target, "p", [1, 2], [3, 4], [3, 5], Sampling(), 0, exact=True)
    assert (divergence.index, divergence.verdict) == (1, "bug")


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_reference_forwards_agree(name):
    """In float32 all widths and batches give the states of the model's own attention, sliding windows and soft-capping included."""
    target = Target.wrap(tiny(name))
    texts = [prompt * 4 for prompt in prompts(lossless.TOGETHER + 1, 7)]  # shorter and longer than REGION, and one more than a batch
    lengths = [min(len(text), lossless.REGION) for text in texts]
    assert min(lengths) < lossless.REGION == max(lengths) < max(map(len, texts))
    for text, length, states in zip(texts, lengths, lossless.reference_states(target, texts), strict=True):
        assert states.shape == (2 + len(lossless.WIDTHS), length, target.hidden_size)
        own = target.forward(torch.tensor([text])).hidden[0, -length:]
        torch.testing.assert_close(states, own.expand_as(states), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_float32_logits_are_the_models_own(name):
    target = Target.wrap(tiny(name))
    hidden = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(target.float32_logits(hidden), target.logits(hidden), rtol=1e-5, atol=1e-5)
    half = Target.wrap(tiny(name).bfloat16())
    assert half.float32_logits(hidden.bfloat16()).dtype == torch.float32


def test_rounding_is_a_tie_where_all_reference_forwards_agree():
    """Their spread is zero then, and the answers' forwards, of other shapes, need not round as they do."""
    target = Target.wrap(tiny("llama").bfloat16())
    target.num_layers = 24  # as of a deep model
    (prompt,) = prompts(1, 5)
    plain = decode_recorded(target, None, [prompt], [0], Sampling(), NEW)[0]
    (states,) = lossless.reference_states(target, [prompt + plain.tokens[:9]])
    states = states[:1].expand_as(states)
    noise = torch.randn(plain.hidden.shape, generator=torch.Generator().manual_seed(0))
    wrong = [*plain.tokens[:9], (plain.tokens[9] + 1) % VOCAB]

    def excess(steps: float) -> float:
        moved = states[0, -10:].float() * (1 + steps * torch.finfo(torch.bfloat16).eps * noise[:10])
        pair = Recorded(plain.tokens, moved.bfloat16()), Recorded(wrong, moved.bfloat16())
        return first_divergence(target, "p", prompt, plain.tokens, wrong, Sampling(), 0, pair, states=states).excess

    assert 1 < excess(3) < 3 < excess(9)
