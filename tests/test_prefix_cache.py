"""KV kept for the next turn of a conversation: answers, rounds and proposals are those without, and only new tokens are prefilled."""

import itertools
import random

import pytest
import torch
from decoding_cases import SAMPLED, relative, texts
from languages import PIECES, STOP, Enumerated, spell
from other_tokenizers import KINDS, TEXTS, model_of, vocabulary
from zoo import VOCAB

from draftsmith.inference import draft_window
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.drafter import Plain, ResumableDrafter
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookahead import Lookahead
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.prefix_cache import PrefixCache
from draftsmith.inference.recycling import Recycling
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.self_speculation import early_exit
from draftsmith.inference.shared_tokens import SharedTokens
from draftsmith.inference.string_matching import StringMatching
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

CONTEXT, NEW, TURNS = 120, 12, 3
TREE = StaticTree.cartesian([2, 2, 1])


def heads(target, method, **settings):
    torch.manual_seed(0)
    drafter = new_drafter(method, target, **settings)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return drafter.eval()


ATTENTION = {"num_heads": 4, "num_kv_heads": 2}
DRAFTERS = {
    "plain": lambda target: Plain(),
    "draft model": lambda target: DraftModel(relative("llama", 0.005), TREE, chunk=5),
    "medusa": lambda target: heads(target, "medusa", num_heads=3),
    "hydra": lambda target: heads(target, "hydra", num_heads=3, prefix=True, attention_heads=4, kv_heads=2),
    "eagle": lambda target: heads(target, "eagle", taps=[0, 1], num_layers=2, **ATTENTION),
    "eagle 1": lambda target: heads(target, "eagle", version=1, **ATTENTION),
    "peagle": lambda target: heads(target, "peagle", taps=[0, 1], steps=4, **ATTENTION),
    "dflash": lambda target: heads(target, "dflash", taps=[0, 1]),
    "dspark": lambda target: heads(target, "dspark", taps=[0, 1]),
    "mlp": lambda target: heads(target, "mlp", num_heads=3, inner_size=24),
    "kangaroo": lambda target: heads(target, "kangaroo", exit_layer=1, num_heads=16, num_kv_heads=4, head_dim=64),
    "ngram": lambda target: Ngram(),
    "suffix": lambda target: Suffix(),
    "suffix with memory": lambda target: Suffix(memory=60),
    "lookahead": lambda target: Lookahead(),
    "recycling": lambda target: Recycling(),
    "early exit": lambda target: early_exit(target, 1),
    "hybrid": lambda target: Hybrid(heads(target, "eagle", taps=[0, 1], **ATTENTION), Ngram()),
}


RELATED = {"hydra", "eagle 1", "peagle", "dspark", "mlp", "suffix", "lookahead", "recycling", "early exit"}  # to others, in what they cache


def other_tokenizer(way, target, model):
    ours, theirs = vocabulary(model), vocabulary(target)
    if way == "strings":
        return StringMatching(model, ours, theirs, StaticTree.chain(3), chunk=7)
    return SharedTokens(model, ours, theirs, target.vocab_size, TREE, chunk=7)


class Recorded:
    """A decoder, what its drafter proposes, and how many positions of each prompt were used again."""

    def __init__(self, target, drafter, **options):
        self.proposals, self.kept = [], []
        propose = drafter.propose
        drafter.propose = lambda round: self.proposals.append(propose(round)) or self.proposals[-1]
        if isinstance(drafter, ResumableDrafter):
            resume = drafter.resume
            drafter.resume = lambda slots, prompts, kept, out: (self.kept.extend(kept), resume(slots, prompts, kept, out))[1]
        self.decoder = Decoder(target, drafter, context=CONTEXT, chunk=7, **options)

    def answers(self, prompts, sampling, stops):
        out = self.decoder.generate(prompts, sampling, NEW, stops)
        rounds = [[(each.size, each.accepted, each.length, each.position) for each in answer.rounds] for answer in out]
        trees = [(tree.tokens.tolist(), tree.parents.tolist(), tree.size.tolist()) for tree in self.proposals]
        self.proposals.clear()
        return texts(out), rounds, trees


def first_turns(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(size)] for size in (14, 2, 9)]


def next_turn(rng: random.Random, number: int, turn: int, prompt: list[int], answer: list[int]) -> list[int]:
    """After the answer, after a part of it, or instead of a part of the prompt; then new tokens."""
    before = [prompt + answer, prompt + answer[:-2], prompt[:-1]][(number + turn) % 3] if turn else prompt + answer
    return before + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in RELATED)) for name in DRAFTERS])
def test_turns_are_those_without_the_cache(target, name):
    for how, slots, stops in ((Sampling(), 1, ()), (SAMPLED, 3, ()), (Sampling(), 3, (5, 11, 17, 23))):
        if slots > 1 and name == "recycling":
            continue  # its table depends on the order of the slots
        kept, fresh = (Recorded(target, DRAFTERS[name](target), slots=slots, keep=keep) for keep in (True, False))
        rng = random.Random(4)
        conversations = first_turns(rng)
        for turn in range(TURNS):
            results = [decoder.answers(conversations[:slots], how, stops) for decoder in (kept, fresh)]
            assert results[0] == results[1], (how, slots, turn)
            pairs = zip(conversations[:slots], results[0][0], strict=True)
            conversations = [next_turn(rng, number, turn, *pair) for number, pair in enumerate(pairs)]
        reused = len([count for count in kept.kept if count])
        assert (reused == 0) if name == "recycling" else reused >= (TURNS - 1 if slots == 1 else 4), kept.kept
        assert not fresh.kept
        if name != "recycling":
            assert kept.decoder.counters.prefill_chunks < fresh.decoder.counters.prefill_chunks or slots == 3


@pytest.mark.parametrize("way", ["strings", "tli"])
def test_draft_models_of_other_tokenizers_read_the_text_again(way):
    """The target reads new tokens alone; what is drafted is the same."""
    target, model = model_of(KINDS["bpe"]()), model_of(KINDS["sentencepiece"](), 1, 1)
    kept, fresh = (Recorded(target, other_tokenizer(way, target, model), slots=2, keep=keep) for keep in (True, False))
    rng = random.Random(3)
    conversations = [target.tokenizer.encode(text)[:20] for text in TEXTS[1:3]]
    for _ in range(TURNS):
        results = [decoder.answers(conversations, Sampling(), ()) for decoder in (kept, fresh)]
        assert results[0] == results[1] and any(max(size) > 1 for _, _, size in results[0][2])
        pairs = zip(conversations, results[0][0], strict=True)
        conversations = [prompt + answer + [rng.randrange(target.vocab_size) for _ in range(3)] for prompt, answer in pairs]
    assert len([count for count in kept.kept if count]) == 2 * (TURNS - 1)


def test_a_constraint_begins_with_the_answer(target):
    """Each turn's answer is of the language by itself, whatever was answered before."""
    language = frozenset("".join(pieces) for pieces in itertools.product(PIECES[:3], repeat=3))
    how = Sampling(0.9, seed=2, constraint=Enumerated(language, VOCAB))
    for name in ("eagle", "draft model", "kangaroo", "suffix"):
        kept, fresh = (Recorded(target, DRAFTERS[name](target), slots=2, keep=keep) for keep in (True, False))
        conversations = [[1, 2, 3, 4, 5], [6, 7]]
        for _ in range(TURNS):
            results = [decoder.answers(conversations, how, [STOP]) for decoder in (kept, fresh)]
            assert results[0] == results[1] and all(spell(answer) in language for answer in results[0][0])
            conversations = [prompt + answer + [9, 8] for prompt, answer in zip(conversations, results[0][0], strict=True)]
        assert len([count for count in kept.kept if count]) == 2 * (TURNS - 1), name


def test_only_new_tokens_are_read(target):
    """The target reads one token of the old text again: drafters need its features."""
    widths = []
    forward = target.forward
    counting = Target.wrap(target.model, name="small")
    counting.forward = lambda ids, **kwargs: widths.append(ids.shape[1]) or forward(ids, **kwargs)
    decoder = Decoder(counting, None, context=CONTEXT, keep=True, chunk=100)
    prompt = list(range(20))
    answer = decoder.generate([prompt], max_new_tokens=6, stop_ids=())[0].tokens
    assert widths == [19, *[1] * 6]
    widths.clear()
    decoder.generate([prompt + answer + [1, 2, 3]], max_new_tokens=2, stop_ids=())
    assert widths == [3, 1, 1]  # the last answer token, 1 and 2; then the rounds of 3 and of what follows it


class Usable(Plain):
    """Says that so many positions can be used at most."""

    most = 100

    def resumable(self, slot, count):
        return min(count, self.most)


def test_one_slot_after_the_other():
    """A prompt goes to the slot that has most of it; without one to an empty slot, then to the one that was used least recently."""
    drafter, cache = Usable(), TreeCache(3, 10)
    kept = PrefixCache(drafter)
    kept.keep({0: [1, 2, 3, 4, 5], 2: [1, 2, 9, 9, 9, 9]}, cache)
    assert kept.take([7, 7, 7], [0, 1, 2]) == (1, 0)
    assert kept.take([1, 2, 3, 4, 8, 8], [0, 1, 2]) == (0, 3)
    assert kept.slots == [2]
    kept.keep({0: [1, 2, 3]}, cache)
    assert kept.take([7, 7, 7], [0, 2]) == (2, 0)
    assert kept.take([1, 2, 3], [0]) == (0, 1), "the last two tokens are encoded anew"
    kept.keep({0: [1, 2, 3]}, cache)
    drafter.most = 0
    assert kept.take([1, 2, 3, 4], [0]) == (0, 0)
    kept.keep({0: [5]}, cache)
    assert kept.take([5], [0]) == (0, 0) and kept.take([5], [0]) == (0, 0)


def test_texts_in_host_memory():
    """The text that another one replaces goes there, and the longest one comes back; the oldest goes first; a text that goes on stays."""
    kept, cache = PrefixCache(Usable(), conversations=2), TreeCache(1, 10)

    def turn(text):
        reused = kept.take(text, [0])[1]
        kept.keep({0: text}, cache)
        return reused

    first, second, third, fourth = ([number] * 6 for number in (1, 2, 3, 4))
    assert [turn(text) for text in (first, second, third)] == [0, 0, 0]
    assert turn([*first, 7]) == 5 and turn([*first, 7, 8]) == 6, "of two that begin so, the slot's own"
    assert turn([*second, 7]) == 5 and turn([*third, 7]) == 5
    assert turn(fourth) == 0 and turn([*first, 7, 9]) == 0, "the oldest of three"
    kept.forget()
    assert turn([*second, 7, 7]) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    "name",
    ["plain", "draft model", "eagle", "kangaroo", "dflash", "medusa", "ngram", "suffix with memory", "lookahead", "hybrid", "early exit"],
)
def test_conversations_take_turns_in_one_slot(target, name, window, monkeypatch):
    """Each comes back from host memory, in its own slot or another's; answers, rounds and drafts are those of a full prefill."""
    monkeypatch.setattr(draft_window, "SPARE", 3)
    drafters = [DRAFTERS[name](target) for _ in range(2)]
    if window and not hasattr(drafters[0], "window"):
        return
    for drafter in drafters if window else ():
        drafter.window = window
    kept, fresh = Recorded(target, drafters[0], keep=True, conversations=3, slots=2), Recorded(target, drafters[1], slots=2)
    rng = random.Random(6)
    conversations = [[rng.randrange(VOCAB) for _ in range(size)] for size in (14, 6, 9, 11)]
    for turn in range(TURNS):
        for pair in ((0, 1), (2, 3)) if turn % 2 else ((2, 0), (1, 3)):
            prompts = [conversations[number] for number in pair]
            results = [decoder.answers(prompts, SAMPLED, ()) for decoder in (kept, fresh)]
            assert results[0][0] == results[1][0], (turn, pair)
            drafts = [[sorted(zip(*tree, strict=True)) for tree in trees] for _, _, trees in results]  # slots may be others
            assert window or (results[0][1] == results[1][1] and drafts[0] == drafts[1]), (turn, pair)
            for number, answer in zip(pair, results[0][0], strict=True):
                conversations[number] += answer + [rng.randrange(VOCAB) for _ in range(3)]
    assert len([count for count in kept.kept if count]) >= (4 if window else 4 * (TURNS - 1)), kept.kept


@pytest.mark.parametrize("name", ["draft model", "eagle", "medusa"])
def test_what_changes_the_state_is_noticed(target, name):
    """Another decoder on the same drafter, a stream that was left, another tree: the next turn is a full prefill, and right."""
    drafter, prompt = DRAFTERS[name](target), list(range(3, 15))
    kept = Recorded(target, drafter, slots=1, keep=True)
    plain = Decoder(target, context=CONTEXT)

    def turn(prompt, hits):
        expected = texts(plain.generate([prompt], max_new_tokens=NEW, stop_ids=()))
        assert kept.answers([prompt], Sampling(), ())[0] == expected
        assert bool(kept.kept) == hits
        kept.kept.clear()
        return prompt + expected[0] + [1, 4]

    prompt = turn(prompt, False)
    prompt = turn(prompt, True)
    other = Decoder(target, drafter, context=CONTEXT)
    other.generate([[9] * 30], max_new_tokens=NEW, stop_ids=())
    prompt = turn(prompt, False)
    stream = kept.decoder.stream([prompt + [3]], max_new_tokens=NEW, stop_ids=())
    next(stream)
    stream.close()
    kept.kept.clear()
    prompt = turn(prompt[:30], False)
    drafter.tree_spec = StaticTree.chain(2)
    prompt = turn(prompt, False)
    turn(prompt, True)


@pytest.mark.parametrize("added", [1, 12])
@pytest.mark.parametrize("name", ["draft model", "eagle", "peagle"])
def test_a_window_beside_it_is_lossless(target, name, added, monkeypatch):
    """Drafts of several layers may differ then: the window of a full prefill begins later. Texts that the window has lost are encoded anew."""
    monkeypatch.setattr(draft_window, "SPARE", 3)
    drafter = DRAFTERS[name](target)
    drafter.window = 9
    kept, plain = Recorded(target, drafter, slots=2, keep=True), Decoder(target, context=CONTEXT, slots=2)
    rng = random.Random(1)
    conversations = [[rng.randrange(VOCAB) for _ in range(size)] for size in (30, 6)]
    for turn in range(4):
        answers = kept.answers(conversations, Sampling(), ())[0]
        assert answers == texts(plain.generate(conversations, max_new_tokens=NEW, stop_ids=()))
        pairs = zip(conversations, answers, strict=True)
        more = [rng.randrange(VOCAB) for _ in range(added)]
        conversations = [prompt[:8] if turn == 2 else prompt + answer + more for prompt, answer in pairs]
    assert len(kept.kept) >= 3


def test_a_drafter_that_cannot_resume(target):
    """Alone or in a hybrid: every turn is prefilled anew, and right."""
    for hybrid in (False, True):
        trained = DRAFTERS["eagle"](target)
        trained.__class__ = type("Fixed", (type(trained),), {"resume": None})
        drafter = Hybrid(trained, Ngram()) if hybrid else trained
        assert not isinstance(trained, ResumableDrafter) and isinstance(drafter, ResumableDrafter) == hybrid
        decoder = Decoder(target, drafter, context=CONTEXT, slots=2, keep=True, conversations=1)
        prompts = [[1, 2, 3, 4], [5, 6]]
        for _ in range(TURNS):
            answers = texts(decoder.generate(prompts, Sampling(), NEW, ()))
            assert answers == texts(Decoder(target, context=CONTEXT).generate(prompts, Sampling(), NEW, ()))
            prompts = [prompt + answer + [7] for prompt, answer in zip(prompts, answers, strict=True)]


def test_refusals(target):
    for options in ({}, {"context": 60, "exact": 4}):
        with pytest.raises(ValueError, match="keep: got context .*; expected a context and no exact rounds"):
            Decoder(target, keep=True, **options)
    for options in ({"conversations": 2}, {"conversations": -1, "keep": True}):
        with pytest.raises(ValueError, match="conversations .*, keep .*; expected 0 or more, and keep where there are any"):
            Decoder(target, context=60, **options)
    decoder = Decoder(target, context=60, keep=True)
    assert decoder.refusal(Sampling()) == "slots that keep their KV need the host"
