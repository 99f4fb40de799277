"""Draft models with other tokenizers: the output is plain decoding's, token for token, and a draft model that writes the target's own text has
every draft accepted.
"""

import copy
from collections import Counter

import pytest
import torch
from conftest import byte_tokenizer
from decoding_cases import SAMPLED, texts
from other_tokenizers import END, FAMILY, KINDS, TEXTS, model_of, vocabulary
from planted import seen_in
from transformers import PreTrainedTokenizerFast

from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Drafter
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.shared_tokens import SharedTokens
from draftsmith.inference.string_matching import StringMatching
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target

NEW = 14
TREES = {"chain": StaticTree.chain(3), "static": StaticTree.cartesian((3, 2, 1)), "dynamic": DynamicTree(3, 2, 10)}
HOWS = {
    "greedy": Sampling(),
    "sampled": SAMPLED,
    "shared-noise": Sampling(0.8, top_p=0.95, seed=5, rule="shared-noise"),
    "penalised": Sampling(0.9, repetition_penalty=1.3, seed=7),
}
PAIRS = [("bytes", "bpe"), ("bpe", "bytes"), ("bpe", "phrases"), ("sentencepiece", "bpe"), ("bpe", "legacy"), ("bpe", "unigram")]


def make(way: str, target: Target, model: Target, tree) -> StringMatching | SharedTokens:
    ours, theirs = vocabulary(model), vocabulary(target)
    if way == "strings":
        return StringMatching(model, ours, theirs, tree, chunk=7)
    return SharedTokens(model, ours, theirs, target.vocab_size, tree, chunk=7)


def prompts_of(target: Target) -> list[list[int]]:
    """Texts, one that ends within an emoji where tokens are bytes, and special tokens within."""
    tokenizer = target.tokenizer
    ids = [tokenizer.encode(text)[:24] for text in TEXTS[:4]]
    special = tokenizer.eos_token_id
    return [*ids[1:], [*tokenizer.encode(f"one {FAMILY}")[:-2], special, *tokenizer.encode(" two")], ids[1][:1]]


class Permuted:
    """The same function of the text as a model over bytes, with another tokenizer: the bytes in another order, and the end of the text."""

    def __init__(self) -> None:
        theirs = byte_tokenizer()
        self.target = model_of(theirs, positions=200, name="bytes")
        order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).tolist()
        symbol = {index: token for token, index in theirs.get_vocab().items() if index < 256}
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        backend = Tokenizer(models.BPE({symbol[old]: new for new, old in enumerate(order)}, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        self.model = model_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END), positions=200, name="permuted")
        rows = torch.tensor([*order, 256])
        self.model.model.load_state_dict(self.target.model.state_dict())
        with torch.no_grad():
            for weight in (self.model.model.model.embed_tokens.weight, self.model.model.lm_head.weight):
                weight.copy_(weight[rows].clone())

    def noisy(self) -> Target:
        """The draft model with noise: often right and often wrong."""
        model = copy.deepcopy(self.model.model)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
        return Target.wrap(model, self.model.tokenizer, "noisy")


@pytest.fixture(scope="module")
def permuted():
    return Permuted()


def check_lossless(way: str, target: Target, model: Target, cases: list[tuple[str, str, int]]) -> Counter:
    """Each case is a sampling, a tree and a number of slots -> what happened."""
    prompts, seen, plain = prompts_of(target), Counter(), dict[str, list[list[int]]]()
    for how, tree, slots in cases:
        if how not in plain:
            plain[how] = texts(Decoder(target, slots=4).generate(prompts, HOWS[how], NEW, ()))
        drafter = make(way, target, model, TREES[tree])
        assert isinstance(drafter, Drafter) and not drafter.capturable and drafter.method == way
        decoder = Decoder(target, drafter, slots=slots, chunk=7, adaptive=AdaptiveDepth() if (how, slots) == ("greedy", 3) else None)
        answers, counts = seen_in(decoder.stream(prompts, HOWS[how], NEW, ()), len(prompts))
        assert answers == plain[how], (how, tree, slots)
        seen += counts
    return seen


@pytest.mark.parametrize("way", ["strings", "tli"])
@pytest.mark.parametrize("theirs, ours", PAIRS)
def test_output_is_plain_decodings(theirs, ours, way):
    target, model = model_of(KINDS[theirs](), name=theirs), model_of(KINDS[ours](), 1, 1, name=ours)
    cases = [("greedy", "chain", 1), ("greedy", "static", 3), ("sampled", "dynamic", 3), ("shared-noise", "static", 2)]
    seen = check_lossless(way, target, model, cases)
    assert seen["replaced"] >= 2 and seen["drafted"] >= 30, seen


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("way", ["strings", "tli"])
def test_with_every_tree(permuted, way, tree):
    """The draft model's text is often the target's: every number of tokens is accepted."""
    noisy = permuted.noisy()
    seen = check_lossless(way, permuted.target, noisy, [(how, tree, slots) for how in HOWS for slots in (1, 3)])
    assert seen["replaced"] >= 2 and all(seen[accepted] >= 3 for accepted in range(4)), seen


@pytest.mark.parametrize("way", ["strings", "tli"])
@pytest.mark.parametrize("slots", [1, 3])
def test_every_draft_of_the_same_function_is_accepted(permuted, way, slots):
    """Greedy: the drafter writes what the target will. The text of a random model is mostly no UTF-8, so the bytes themselves must agree."""
    prompts = prompts_of(permuted.target)
    plain = Decoder(permuted.target).generate(prompts, None, 24, ())
    out = Decoder(permuted.target, make(way, permuted.target, permuted.model, StaticTree.chain(3)), slots=slots).generate(
        prompts, None, 24, ()
    )
    assert texts(out) == texts(plain)
    for answer in out:
        ended = 256 in answer.tokens  # the end of a text ends a draft too
        rounds = answer.rounds if way == "tli" else answer.rounds[: None if not ended else 0]
        assert [round.length for round in rounds] == [4] * len(rounds) and (not rounds or len(rounds) == 6)
    assert sum(256 not in answer.tokens for answer in out) >= 4


def test_shared_noise_draws_the_targets_own_tokens(permuted):
    """With the intersection the drafter adds the target's noise to its scores: a draft model that is the target is always right."""
    drafter = make("tli", permuted.target, permuted.model, StaticTree.chain(3))
    assert len(drafter.shared) == 257
    out = Decoder(permuted.target, drafter, slots=2).generate(prompts_of(permuted.target), HOWS["shared-noise"], 24, ())
    assert all(round.length == 4 for answer in out for round in answer.rounds)


def test_the_cache_is_kept(permuted):
    """After the prompt, each round encodes what was not encoded: the corrected token and each drafted token but the last."""
    calls = []
    forward = permuted.model.forward
    permuted.model.forward = lambda ids, **kwargs: calls.append(tuple(ids.shape)) or forward(ids, **kwargs)
    try:
        prompt = permuted.target.tokenizer.encode("The cat sat on the mat. " * 4)
        drafter = make("strings", permuted.target, permuted.model, StaticTree.chain(3))
        drafter.chunk = 256
        out = Decoder(permuted.target, drafter).generate([prompt], None, 16, ())
    finally:
        del permuted.model.forward
    assert [round.length for round in out[0].rounds] == [4] * 4
    assert calls[0] == (1, len(prompt) - 1) and sum(count for _, count in calls[1:]) <= 16 + 4 * 4
    assert max(count for _, count in calls[1:]) <= 2


def test_long_texts_are_read_from_their_last_half(permuted):
    """A draft model of fewer positions than the text."""
    short = model_of(permuted.model.tokenizer, 1, 1, positions=40, name="short")
    prompts = [permuted.target.tokenizer.encode(TEXTS[0] * 2), permuted.target.tokenizer.encode(TEXTS[1])]
    plain = texts(Decoder(permuted.target).generate(prompts, None, 60, ()))
    for way in ("strings", "tli"):
        drafter = make(way, permuted.target, short, StaticTree.chain(3))
        for _ in range(2):  # the second call uses the caches again
            out = Decoder(permuted.target, drafter, slots=2).generate(prompts, None, 60, ())
            assert texts(out) == plain and all(round.size > 1 for round in out[0].rounds[1:-1])
