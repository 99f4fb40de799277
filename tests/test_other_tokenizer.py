"""Draft models with other tokenizers: the output is plain decoding's, token for token, and a draft model that writes the target's own text has
every draft accepted.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from conftest import byte_tokenizer
from decoding_cases import SAMPLED, texts
from other_tokenizers import END, FAMILY, KINDS, TEXTS, byte_level, model_of, vocabulary
from planted import seen_in
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from draftsmith.eval.probe import _drafter_bytes
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import Drafter, TargetOutput
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.rules import acceptance_probability
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.shared_tokens import SharedTokens
from draftsmith.inference.string_matching import StringMatching
from draftsmith.inference.tree import DraftTree, StaticTree
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
        assert drafter.recurrent and _drafter_bytes(drafter) > 0  # what a prediction of its cost reads
        seen += counts
    return seen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["strings", "tli"])
@pytest.mark.parametrize("theirs, ours", PAIRS)
def test_output_is_plain_decodings(theirs, ours, way):
    target, model = model_of(KINDS[theirs](), name=theirs), model_of(KINDS[ours](), 1, 1, name=ours)
    cases = [("greedy", "chain", 1), ("greedy", "static", 3), ("sampled", "dynamic", 3), ("shared-noise", "static", 2)]
    seen = check_lossless(way, target, model, cases)
    assert seen["drafted"] >= 30, seen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("way", ["strings", "tli"])
def test_with_every_tree(permuted, way, tree):
    """The draft model's text is often the target's: every number of tokens is accepted."""
    noisy = permuted.noisy()
    seen = check_lossless(way, permuted.target, noisy, [(how, tree, slots) for how in HOWS for slots in (1, 3)])
    assert all(seen[accepted] >= 3 for accepted in range(4)), seen


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


def test_only_the_end_of_a_text_is_read_again():
    """64 bytes, from the beginning of a token on, and of what waits to be read in the draft model's tokens no more than twice that."""
    theirs, ours = KINDS["phrases"](), KINDS["bpe"]()
    target, model = model_of(theirs, positions=400), model_of(ours, positions=400)
    drafter = make("strings", target, model, StaticTree.chain(3))
    drafter.bind(target, 1, 400)
    ids = theirs.encode(TEXTS[0] * 8)
    pieces = [drafter.theirs.bytes_of[token] for token in ids]
    drafter.start([0], [ids], None)
    before, first = drafter._before(0), b""
    for piece in reversed(pieces):
        if len(first) >= 64:
            break
        first = piece + first
    assert before == first and 64 <= len(before) < len(b"".join(pieces))
    own = drafter._own[0]
    assert 64 <= len(own.tail) <= 128 and b"".join(pieces).endswith(own.tail)
    assert drafter._reading(0) == ours.encode(TEXTS[0] * 8)


def test_each_tokenizer_begins_a_text_in_its_own_way():
    """The target's <s> is nothing that a draft model reads, in decoding or in the fit of a confidence."""
    theirs, plain = KINDS["sentencepiece"](), KINDS["bpe"]()
    backend = byte_level(400, eos_token=END, bos_token="<|bot|>").backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<|bot|> $A", special_tokens=[("<|bot|>", backend.token_to_id("<|bot|>"))]
    )
    target, text = model_of(theirs), "The cat sat"
    ids = theirs.encode(text)
    for ours, begin in ((PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, bos_token="<|bot|>"), ["<|bot|>"]), (plain, [])):
        drafter = make("tli", target, model_of(ours), StaticTree.chain(3))
        drafter.bind(target, 1, 64)
        tokens = ours.convert_ids_to_tokens(drafter._read(ids, first=True))
        assert tokens[: len(begin)] == begin and "".join(tokens[len(begin) :]).replace("Ġ", " ") == f" {text}"
        assert drafter._read([1], first=True)  # a text of <s> alone is something
        hidden = drafter.position_features(torch.tensor(ids), None)
        assert hidden.shape[0] == len(ids)
        if begin:
            own = torch.tensor([drafter._read(ids, first=True)])
            assert torch.allclose(
                hidden[-1], drafter.model.forward(own, position_ids=torch.arange(own.shape[1])[None]).hidden[0, -1], atol=1e-5
            )


def text_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Target:
    """A model whose next-token distribution depends on the last token: fixed random logits."""
    model = model_of(tokenizer, seed, 1)
    table = 2 * torch.randn(len(tokenizer), len(tokenizer), generator=torch.Generator().manual_seed(seed))
    model.forward = lambda ids, **_: TargetOutput(table[ids])
    model.logits = lambda hidden: hidden
    return model


def few_tokens(tokens: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of these characters and no merges, without an end of the text."""
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("rule", ["rejection", "rejection-replacement"])
@pytest.mark.parametrize("tree", [StaticTree.chain(2), StaticTree.from_paths([(0,), (1,), (0, 0)])])
def test_joint_distribution_under_rejection(rule, tree):
    """Of all token pairs, by enumeration: every tree that can be drawn from q, weighed by q, and every verdict on it by its probability.

    The target has six tokens; the draft model shares four of them, in another order, and has two of its own.
    """
    target, model = text_model(few_tokens("abcdef"), 1), text_model(few_tokens("xdbyca"), 2)
    drafter = SharedTokens(model, vocabulary(model), vocabulary(target), 6, tree)
    assert drafter.shared == {0: 5, 1: 2, 2: 4, 3: 1}
    p, how = target.forward(torch.arange(6)).hidden.double().softmax(-1), Sampling(1.0, rule=rule)
    joint = torch.zeros(6, 6, dtype=torch.float64)
    for probability, drawn in drawn_trees(drafter, tree, how, root=0):
        logits = p.log()[drawn.tokens]
        q = drawn.q_logits.double().softmax(-1)
        accept, residual = acceptance_probability(drawn, logits.softmax(-1), q)
        joint += probability * pairs(drawn, accept[0], residual[0], p)
    torch.testing.assert_close(joint, p[0][:, None] * p, atol=1e-8, rtol=0)  # q is of logits in float32


def drawn_trees(drafter: SharedTokens, tree: StaticTree, how: Sampling, root: int) -> Iterator[tuple[float, DraftTree]]:
    """Every tree that the rule may draw, with its probability: q is the drafter's own, from its logits."""
    q_of = drafter.logits(drafter.model.forward(drafter._own_ids(torch.arange(6))).hidden)  # [6,6]
    q, order = q_of.double().softmax(-1), tree.paths
    for tokens in itertools.product(range(4), repeat=len(order)):
        node, probability = {(): root} | dict(zip(order, tokens, strict=True)), 1.0
        for path, token in zip(order, tokens, strict=True):
            distribution = q[node[path[:-1]]]
            siblings = [node[(*path[:-1], rank)] for rank in range(path[-1])]
            if how.rule == "rejection":  # without replacement
                distribution = distribution.clone()
                distribution[siblings] = 0
                distribution /= distribution.sum()
            probability *= float(distribution[token])
        if probability:
            ids = torch.tensor([[root, *tokens]])
            yield probability, tree.fill(ids, q_of[ids], replacement=how.rule == "rejection-replacement")


def pairs(tree: DraftTree, accept: torch.Tensor, residual: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """[6,6]: the probability of the next two tokens, given a tree, by walking it; p [6,6] is the target's after each token."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()

    def children(node: int) -> Iterator[tuple[float, int | None]]:
        """(probability, child accepted, or None where all are rejected)."""
        left = 1.0
        for child in (i for i, parent in enumerate(parents) if parent == node):
            yield left * float(accept[child]), child
            left *= 1 - float(accept[child])
        yield left, None

    joint = torch.zeros_like(p)
    for first, child in children(0):
        if child is None:
            joint += first * residual[0][:, None] * p
            continue
        for second, grandchild in children(child):
            after = residual[child] if grandchild is None else torch.nn.functional.one_hot(torch.tensor(tokens[grandchild]), 6)
            joint[tokens[child]] += first * second * after
    return joint


def test_rejection_is_the_same_alone_and_in_a_batch(permuted):
    """What is enumerated above is what the decoder does: a function of prompt, sampling and key alone, other tokens than plain sampling's."""
    how, prompts = Sampling(1.0, top_k=30, seed=3, rule="rejection"), prompts_of(permuted.target)
    noisy = permuted.noisy()
    for tree in ("chain", "static"):
        outputs = [
            Decoder(permuted.target, make("tli", permuted.target, noisy, TREES[tree]), slots=slots).generate(prompts, how, NEW, ())
            for slots in (1, 4)
        ]
        assert texts(outputs[0]) == texts(outputs[1]) != texts(Decoder(permuted.target).generate(prompts, how, NEW, ()))
        assert max(round.length for answer in outputs[0] for round in answer.rounds) > 2


def test_no_shared_token_is_refused():
    target, model = model_of(few_tokens("abc"), name="T"), model_of(few_tokens("xyz"), name="D")
    with pytest.raises(ValueError, match="draft model 'D' and target 'T' share no token.*strings:D") as error:
        make("tli", target, model, TREES["chain"])
    assert "\n" not in str(error.value)


def test_nothing_is_proposed_where_nothing_can_be_aligned():
    """The target cannot spell what the draft model writes."""
    target, model = model_of(few_tokens("abc"), name="T"), model_of(few_tokens("xyz"), name="D")
    plain = Decoder(target).generate([[0, 1]], None, NEW, ())
    out = Decoder(target, make("strings", target, model, TREES["chain"])).generate([[0, 1]], None, NEW, ())
    assert texts(out) == texts(plain) and all(round.size == 1 for round in out[0].rounds)


def test_text_of_another_tokenizer_is_accepted():
    """A draft model that writes the target's answer as text, in tokens of its own: each draft is right to the last of its tokens.

    The answer is as the target's tokenizer writes it. The exceptions are the ends of drafts: a token that goes on, or bytes of a character that a
    draft cuts off, as in the emoji of this text.
    """
    for theirs, ours in (("bpe", "bytes"), ("bpe", "sentencepiece"), ("sentencepiece", "bpe"), ("bytes", "bpe")):
        tokenizers = KINDS[theirs](), KINDS[ours]()
        text = "The cat sat on the mat, and the dog sat on the cat. " + TEXTS[3] + f" naïve café {FAMILY} numbers 100 €. " + TEXTS[0]
        target, model = table_of(tokenizers[0], text, theirs), reciting(tokenizers[1], text, ours)
        answer = tokenizers[0].encode(text)
        start = len(tokenizers[0].encode("The cat sat"))
        drafter = StringMatching(model, vocabulary(model), vocabulary(target), StaticTree.chain(4))
        decoder = Decoder(target, drafter, context=512)  # so that no text is too long to be read from its beginning
        (out,) = decoder.generate([answer[:start]], None, len(answer) - start - 6, ())
        assert out.tokens == answer[start : len(answer) - 6]
        lengths = [round.length for round in out.rounds[:-1]]
        assert sum(lengths) >= 0.6 * 5 * len(lengths), (theirs, ours, lengths)
        assert theirs != "bytes" or lengths == [5] * len(lengths)


def table_of(tokenizer: PreTrainedTokenizerFast, text: str, name: str) -> Target:
    """A model that gives the tokens of a text by their positions."""
    model, tokens = model_of(tokenizer, 0, 1, positions=512, name=name), tokenizer.encode(text)
    following = torch.zeros(512, len(tokenizer))
    following[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])] = 1.0
    model.forward = lambda ids, *, position_ids, **_: TargetOutput(following[position_ids.clamp(max=511)])
    model.logits = lambda hidden: hidden
    return model


def reciting(tokenizer: PreTrainedTokenizerFast, text: str, name: str) -> Target:
    """A model that continues every beginning of a text with the text, whatever tokens spell that beginning; for one slot."""
    model = model_of(tokenizer, 0, 1, positions=512, name=name)
    ours, data, read = vocabulary(model), text.encode(), dict[int, int]()

    def following(position: int) -> int:
        begin = len(ours.begin)
        spelled = ours.spell(read[index] for index in range(begin, position + 1)) or b""
        spelled = spelled.removeprefix(b" ") if ours.leading_space else spelled
        return (ours.encode(data[len(spelled) :]) or [0])[0] if data.startswith(spelled) else 0

    def forward(ids, *, position_ids, **_):
        read.update(zip(position_ids.flatten().tolist(), ids.flatten().tolist(), strict=True))
        tokens = [following(position) for position in position_ids.flatten().tolist()]
        return TargetOutput(torch.nn.functional.one_hot(torch.tensor([tokens]), len(tokenizer)).float())

    model.forward, model.logits = forward, lambda hidden: hidden
    return model
