"""Every kind of drafter, every tree, greedy and sampled, alone and in ragged batches: the output is plain decoding's, token for token."""

from collections import Counter

import numpy as np
import pytest
import torch
from decoding_cases import PROMPTS, SAMPLED, check_depths, check_reads, relative, texts
from planted import seen_in
from planting import PlantingDrafter
from zoo import VOCAB, tiny

from draftsmith.data.datastore import sort_suffixes
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookahead import Lookahead
from draftsmith.inference.lookup import Ngram, Suffix
from draftsmith.inference.recycling import Recycling
from draftsmith.inference.retrieval import Datastore, Rest
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.self_speculation import early_exit, skip_layers
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

NEW = 24
TREES = {"chain": StaticTree.chain(3), "static": StaticTree.cartesian((3, 2, 1)), "dynamic": DynamicTree(3, 2, 10)}
HOWS = {
    "greedy": Sampling(),
    "sampled": SAMPLED,
    "shared-noise": Sampling(0.8, top_p=0.95, seed=5, rule="shared-noise"),
    "penalised": Sampling(0.9, repetition_penalty=1.3, seed=7),
}
# Prompts that repeat themselves, so that there is something to look up.
REPEATED = [prompt * 3 for prompt in PROMPTS]


@pytest.fixture(scope="module")
def answers(target):
    """By sampling: plain decoding's answers, one prompt after the other."""
    return {name: texts(Decoder(target).generate(REPEATED, how, NEW, ())) for name, how in HOWS.items()}


@pytest.fixture(scope="module")
def heads(target, answers):
    """Medusa heads fitted to the greedy answers: right often, wrong often."""
    drafter = new_drafter("medusa", target, num_heads=3)
    lines = [prompt + answer for prompt, answer in zip(REPEATED, answers["greedy"], strict=True)]
    hidden = [target.forward(torch.tensor([line])).hidden[0] for line in lines]
    for k in range(3):
        inputs = torch.cat([h[: -2 - k] for h in hidden]).double()
        tokens = torch.tensor([token for line in lines for token in line[2 + k :]])
        wanted = torch.nn.functional.one_hot(tokens, VOCAB).double() * 8
        drafter.output_weight(k).data.copy_(torch.linalg.lstsq(inputs, wanted).solution.T)
    return drafter


@pytest.fixture(scope="module")
def store(answers):
    """A datastore of the answers to every second prompt under all samplings, and of as many other tokens."""
    sequences = [prompt + answer for texts_of in answers.values() for prompt, answer in list(zip(REPEATED, texts_of, strict=True))[::2]]
    noise = torch.randint(VOCAB, (sum(map(len, sequences)),), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = np.array([token + 1 for ids in [*sequences, noise] for token in [*ids, -1]], dtype=np.uint16)
    suffixes, spare = np.empty((2, len(tokens)), dtype=np.uint32)
    sort_suffixes(tokens, suffixes, spare, VOCAB + 1)
    return Datastore(tokens, suffixes, VOCAB)


def make(kind, tree, heads, answers, store=None, target=None):
    if kind.startswith("hybrid "):
        return Hybrid(make(kind.removeprefix("hybrid "), tree, heads, answers), Suffix(memory=500))
    if kind == "medusa":
        heads.tree_spec = tree
        return heads
    if kind == "draft model":
        return DraftModel(relative("llama", 0.005), tree)
    if kind == "planting":
        return PlantingDrafter(REPEATED, answers, VOCAB, duplicates=True)
    makers = {
        "ngram": Ngram,
        "suffix": lambda: Suffix(memory=500),
        "recycling": Recycling,
        "lookahead": lambda: Lookahead(window=4),
        "rest": lambda: Rest(store),
        "early-exit": lambda: early_exit(target, 1),
        "skip": lambda: skip_layers(target, [0]),
    }
    drafter = makers[kind]()
    drafter.tree_spec = tree
    return drafter


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "kind",
    [
        *("medusa", "draft model", "ngram", "suffix", "recycling", "lookahead", "rest", "early-exit", "skip"),
        *("hybrid medusa", "hybrid draft model", "planting"),
    ],
)
def test_output_is_plain_decodings(target, answers, heads, store, kind, tree):
    """Greedily alone and in batches of both sizes; sampled in one of these ways, which differs by tree."""
    seen: Counter[object] = Counter()
    for number, (name, how) in enumerate(HOWS.items(), list(TREES).index(tree)):
        for rows in (1, 5, 3) if how.greedy else ((1, 5, 3)[number % 3],):
            drafter = make(kind, TREES[tree], heads, answers[name], store, target)
            decoder = Decoder(target, drafter, slots=rows, chunk=7, adaptive=AdaptiveDepth() if rows == 3 and kind != "planting" else None)
            stream = decoder.stream(REPEATED, how, NEW, ())
            texts_by_prompt, counts = seen_in(stream, len(REPEATED))
            seen += counts
            assert texts_by_prompt == answers[name], (kind, tree, name, rows)
            assert decoder.counters.target_forwards == decoder.counters.rounds + decoder.counters.prefill_chunks
    assert seen["replaced"] >= 1 and seen["drafted"] >= 60
    if kind in ("draft model", "planting"):
        assert all(seen[accepted] >= 2 for accepted in range(4)), seen
    else:
        assert all(seen[accepted] >= 1 for accepted in range(3)), seen


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["medusa", "draft model", "recycling", "early-exit", "hybrid medusa"])
def test_no_draft_is_deeper_than_its_round(target, answers, heads, kind, tree):
    check_depths(target, make(kind, TREES[tree], heads, answers["greedy"], None, target), REPEATED)


def test_rejection_gives_other_tokens_and_the_same_for_the_same_key(target, heads):
    """Lossless in distribution (test_rules), not in tokens; still a function of prompt, sampling and key alone, not of the batch."""
    how = Sampling(1.0, top_k=30, seed=3, rule="rejection")
    plain = texts(Decoder(target).generate(PROMPTS, how, NEW, ()))
    for kind in ("medusa", "draft model", "early-exit"):
        for tree in ("chain", "static"):
            drafters = [make(kind, TREES[tree], heads, [], target=target) for _ in "ab"]
            alone, batch = (
                texts(Decoder(target, drafter, slots=slots).generate(PROMPTS, how, NEW, ()))
                for drafter, slots in zip(drafters, (1, 4), strict=True)
            )
            assert alone == batch != plain
        with pytest.raises(ValueError, match="with a dynamic tree"):
            Decoder(target, make(kind, TREES["dynamic"], heads, [], target=target)).generate(PROMPTS[1:], how, NEW, ())


def test_a_stop_token_inside_an_accepted_path(target, answers, heads):
    inside = 0
    for kind in ("medusa", "draft model", "suffix"):
        for stop in {answer[k] for answer in answers["greedy"] for k in (5, 9, 14)}:
            expected = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in answers["greedy"]]
            out = Decoder(target, make(kind, TREES["chain"], heads, []), slots=3).generate(REPEATED, None, NEW, frozenset([stop]))
            assert texts(out) == expected
            inside += sum(one.reason == "stop" and one.rounds[-1].length < one.rounds[-1].accepted for one in out)
    assert inside >= 5


def test_plain_decoding_takes_a_round_for_each_token(target, answers):
    decoder = Decoder(target, chunk=7)
    (one,) = decoder.generate(REPEATED[1:2], None, NEW, ())
    assert len(one.rounds) == NEW == decoder.counters.rounds and decoder.counters.prefill_chunks == 2


@pytest.mark.parametrize("how", ["greedy", "shared-noise", "penalised", "rejection"])
@pytest.mark.parametrize("kind", ["medusa chain", "medusa static", "medusa dynamic", "draft model chain", "early-exit chain"])
def test_nothing_reads_the_device_within_a_round(target, heads, kind, how, monkeypatch):
    if kind == "medusa dynamic" and how == "rejection":
        pytest.skip("refused: see test_rejection_gives_other_tokens_and_the_same_for_the_same_key")
    drafter = make(kind.rsplit(" ", 1)[0], TREES[kind.rsplit(" ", 1)[1]], heads, [], target=target)
    sampling = Sampling(0.9, seed=1, rule="rejection") if how == "rejection" else HOWS[how]
    stream = Decoder(target, drafter, slots=3).stream([prompt[:3] * 2 for prompt in PROMPTS[1:4]], sampling, 40, ())
    check_reads(stream, 5, monkeypatch)


def test_a_target_in_pieces_decodes(target, answers, heads, tmp_path):
    """As `device_map` spreads it: here a layer is stored on disk and loaded when it is needed (several devices: tests/test_gpu.py)."""
    from accelerate import dispatch_model

    model = tiny("llama")
    places = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
    }
    spread = Target.wrap(dispatch_model(model, places | {"lm_head": "cpu"}, main_device="cpu", offload_dir=tmp_path))
    assert spread.model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    for kind in ("draft model", "suffix"):
        out = Decoder(spread, make(kind, TREES["static"], heads, []), slots=3).generate(REPEATED, HOWS["sampled"], NEW, ())
        assert texts(out) == answers["sampled"]
