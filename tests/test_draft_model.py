"""A draft model proposes what a forward over each complete path gives, in every state of its cache; and its refusals."""

import json
import shutil
from collections import Counter

import pytest
import torch
from conftest import byte_tokenizer
from decoding_cases import PROMPTS, SHAPES, Checked, DepthPattern, relative, texts
from zoo import VOCAB, tiny

from draftsmith.eval import loading
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models import tokenizer_check
from draftsmith.models.drafter import default_paths
from draftsmith.models.target import Target


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=[pytest.mark.slow] * (shape == "chain")) for shape in SHAPES])
def test_every_tree_equals_forwards_over_complete_paths(shape):
    seen: Counter[str] = Counter()
    for name, noise in (("llama", 0.005), ("mistral", 0.012), ("gemma2", 0.004)):
        target = Target.wrap(tiny(name))
        plain = texts(Decoder(target).generate(PROMPTS, max_new_tokens=26, stop_ids=()))
        orders = {}
        for slots, adaptive in ((1, None), (3, None), (2, DepthPattern()), (5, DepthPattern())):
            drafter = Checked(relative(name, noise), SHAPES[shape], chunk=5, orders=orders)
            out = Decoder(target, drafter, slots=slots, adaptive=adaptive).generate(PROMPTS, max_new_tokens=26, stop_ids=())
            assert texts(out) == plain
            seen += drafter.seen
    depth = SHAPES[shape].max_depth
    assert all(seen[f"accepted {k}"] >= 2 for k in range(depth + 1)), seen
    assert all(seen[f"pending {count}"] >= 2 for count in (1, 2, 3)) and seen["no draft"] >= 10
    assert seen["moved"] >= 3 or shape == "chain"


def test_a_draft_model_with_a_smaller_vocabulary():
    """The draft model never proposes the tokens that it lacks, and reads another token in their place."""
    target = Target.wrap(tiny("llama"))
    drafter = DraftModel(relative("llama", vocab=VOCAB - 9), StaticTree.cartesian([3, 2]))
    for how in (Sampling(), Sampling(1.0, seed=2), Sampling(1.0, rule="shared-noise")):
        plain = texts(Decoder(target).generate(PROMPTS, how, 20, ()))
        assert any(token >= VOCAB - 9 for answer in plain for token in answer)
        assert texts(Decoder(target, drafter, slots=2).generate(PROMPTS, how, 20, ())) == plain
    drawn = Decoder(target, drafter, slots=2).generate(PROMPTS, Sampling(1.0, rule="rejection"), 20, ())
    assert any(token >= VOCAB - 9 for answer in texts(drawn) for token in answer), "the residual reaches what q does not"


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_past_the_targets_vocabulary_is_cut_off(shape):
    """A head with more rows drafts as it would without them, however likely they are: equal trees, distributions and records."""
    target, text = Target.wrap(tiny("llama")), torch.tensor(PROMPTS[2])
    padded = relative("llama", 0.005, vocab=VOCAB + 16)
    with torch.no_grad():
        padded.head_weight[VOCAB:] = torch.cat((torch.eye(8, 32), -torch.eye(8, 32))) * 40
    assert (padded.logits(padded.forward(text[None]).hidden).argmax(-1) >= VOCAB).all()
    drafter, bare = DraftModel(padded, SHAPES[shape], chunk=5), DraftModel(relative("llama", 0.005), SHAPES[shape], chunk=5)
    rules = (
        ("shared-noise", "target-sample") if shape == "dynamic" else ("shared-noise", "target-sample", "rejection", "rejection-replacement")
    )
    for how in (Sampling(), *(Sampling(1.0, seed=2, rule=rule) for rule in rules)):
        outputs = [Decoder(target, model, slots=2).generate(PROMPTS, how, 20, ()) for model in (drafter, bare)]
        assert texts(outputs[0]) == texts(outputs[1])
        lengths = [[[(round.size, round.accepted) for round in answer.rounds] for answer in out] for out in outputs]
        assert lengths[0] == lengths[1] and max(length for answer in lengths[0] for _, length in answer) > 1
        assert how.rule.startswith("rejection") or texts(outputs[0]) == texts(Decoder(target).generate(PROMPTS, how, 20, ()))
    roots = torch.arange(3, 9)
    logits = [model.position_logits(model.position_features(text, target.forward(text[None])), roots) for model in (drafter, bare)]
    assert logits[0].shape == (6, DraftModel.depth_limit, VOCAB)
    torch.testing.assert_close(*logits)


def test_plain_rounds_cost_the_draft_model_nothing():
    """After the prompt it encodes nothing until the first draft, and then all pending tokens at once."""
    target, model = Target.wrap(tiny("llama")), relative("llama")
    calls = []
    forward = model.forward
    model.forward = lambda ids, **kwargs: calls.append(ids.shape[1]) or forward(ids, **kwargs)

    class OneDraft(DepthPattern):
        def depth(self, slots):
            self.round += 1
            return self.max_depth if self.round == 12 else 0

    Decoder(target, DraftModel(model, StaticTree.chain(2)), adaptive=OneDraft()).generate([[1, 2, 3]], max_new_tokens=16, stop_ids=())
    assert calls == [2, 12, 1]


def test_refused_when_bound():
    target = Target.wrap(tiny("llama"))
    short = relative("llama")
    short.max_positions = 20
    with pytest.raises(ValueError, match="context of 40 for a draft model of 20 positions"):
        Decoder(target, DraftModel(short, StaticTree.chain(2)), context=40).generate([[1]], max_new_tokens=9)


@pytest.fixture
def loads(monkeypatch):
    """Fails when weights are read."""

    def never(*args, **kwargs):
        raise AssertionError("weights were read before the pair was checked")

    monkeypatch.setattr(Target, "load", never)


def copy_of(folder, to, **config):
    shutil.copytree(folder, to)
    path = to / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return to


def test_pairs_are_checked_before_weights_are_read(target_folder, tmp_path, loads):
    folder = copy_of(target_folder, tmp_path / "other")
    text = (folder / "tokenizer.json").read_text()
    raw = json.loads(text)
    vocab = raw["model"]["vocab"]
    by_id = {index: token for token, index in vocab.items()}
    vocab[by_id[40]], vocab[by_id[41]] = 41, 40
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="another tokenizer.*at token 40 the target has") as error:
        tokenizer_check.check_pair(str(target_folder), str(folder))
    assert repr(by_id[40]) in str(error.value) and repr(by_id[41]) in str(error.value) and "\n" not in str(error.value)
    assert f"strings:{folder}" in str(error.value)
    assert not tokenizer_check.have_same_tokens(str(target_folder), str(folder))
    assert tokenizer_check.have_same_tokens(str(target_folder), str(target_folder))
    padded = copy_of(target_folder, tmp_path / "padded", vocab_size=300)
    for pair in ((target_folder, padded), (padded, target_folder)):
        tokenizer_check.check_pair(*map(str, pair))
    bare = copy_of(target_folder, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="no tokenizer beside its weights"):
        loading.open_models(str(target_folder), [str(bare)], "float32")
    for kind, name in (("mamba", "linear_attention"), ("t5", "encoder-decoder")):
        odd = copy_of(target_folder, tmp_path / kind, model_type=kind, is_encoder_decoder=kind == "t5")
        with pytest.raises(ValueError, match=f"'{kind}' .*{name}"):
            loading.open_models(str(target_folder), [str(odd)], "float32")
        with pytest.raises(ValueError, match=f"'{kind}' .*{name}"):
            loading.open_models(str(odd), [str(target_folder)], "float32")


def test_tokens_that_the_draft_model_may_lack():
    theirs, ours = byte_tokenizer(), byte_tokenizer()
    tokenizer_check.check_tokens("t", theirs, "d", ours)
    theirs.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer_check.check_tokens("t", theirs, "d", ours)
    with pytest.raises(ValueError, match=r"at token 257 the target has none, the draft model has '<tool>'"):
        tokenizer_check.check_tokens("t", ours, "d", theirs)
    theirs.add_tokens(["word"])
    ours.add_special_tokens({"additional_special_tokens": ["<other>"]})
    with pytest.raises(ValueError, match=r"at token 257 the target has '<tool>', the draft model has '<other>'"):
        tokenizer_check.check_tokens("t", theirs, "d", ours)


def test_a_decoder_serves_in_inference_mode_and_then_outside():
    """What the first call allocates is used again by the second, of another decoder too."""
    target, drafter = Target.wrap(tiny("llama")), DraftModel(relative("llama"), StaticTree.chain(3))
    plain = texts(Decoder(target).generate(PROMPTS, Sampling(), 12, ()))
    with torch.inference_mode():
        inside = texts(Decoder(target, drafter, slots=2).generate(PROMPTS, Sampling(), 12, ()))
    assert inside == texts(Decoder(target, drafter, slots=2).generate(PROMPTS, Sampling(), 12, ())) == plain


@pytest.mark.parametrize("tree", [StaticTree.from_paths(default_paths(2, 15)), DynamicTree(2, 4, 16)], ids=["static", "dynamic"])
def test_beside_a_lookup_it_decodes_to_the_end_of_the_context(tree):
    """A look-up drafts deeper, and verdicts are as wide as its trees; the draft model has no space for that near its last position."""
    target, model = Target.wrap(tiny("llama")), Target.wrap(tiny("llama", seed=1))
    drafter, generator = Hybrid(DraftModel(model, tree)), torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (120,), generator=generator).tolist() for _ in range(3)]
    for prompt in prompts:
        plain, drafted = (Decoder(target, each, slots=1).generate([prompt], max_new_tokens=40, stop_ids=()) for each in (None, drafter))
        assert drafted[0].tokens == plain[0].tokens and drafted[0].reason == "context"
