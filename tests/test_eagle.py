"""EAGLE's architecture and artifact: what is refused, the draft vocabulary, warm starts, round trips."""

import pytest
import torch
from decoding_cases import PROMPTS, texts
from eagle_by_hand import SHORT
from eagle_drafters import VARIANTS, allowed, make, random_lines, redraw, vocabulary
from packed_data import corpus_of
from random_targets import random_model
from safetensors.torch import load_file, save_file
from zoo import VOCAB, tiny

from draftsmith.data.packing import PackedDataset
from draftsmith.inference.decoder import Decoder
from draftsmith.models import vocab
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import default_taps
from draftsmith.train import eagle as train
from draftsmith.train.eagle import EagleSection, objective3


def test_wrong_taps_sizes_and_versions_are_refused(target):
    for taps, wrong in (([0, 2], r"layers 0\.\.1: \[2\]"), ([-1, 1], r"\[-1\]")):
        with pytest.raises(ValueError, match=wrong):
            new_drafter("eagle", target, taps=taps)
    refused = {
        "got none; name them": {},
        "got a draft vocabulary of 49; expected at most the target's 48": {"taps": [0], "draft_vocab_size": VOCAB + 1},
        "got 3 heads for 2 KV heads": {"taps": [0], "num_heads": 3, "num_kv_heads": 2, "head_dim": 8},
        "got EAGLE version 2": {"version": 2, "taps": [0]},
        "EAGLE-1 uses the target's own head": {"version": 1, "draft_vocab_size": 20},
        "EAGLE-1 uses the": {"version": 1, "taps": [0, 1]},
        "EAGLE-1 uses": {"version": 1, "draft_size": 24},
        "EAGLE-1 has no norm": {"version": 1, "norm_output": True},
        "EAGLE-1 has no": {"version": 1, "fc_norm": True},
        "heads of 3 entries": {"taps": [0], "draft_size": 12, "num_heads": 4},
    }
    for match, arch in refused.items():
        with pytest.raises(ValueError, match=match):
            new_drafter("eagle", target, **arch)


def test_a_draft_vocabulary_that_was_not_given_is_refused(target):
    drafter = new_drafter("eagle", target, taps=[0], draft_vocab_size=20)
    with pytest.raises(ValueError, match="d2t"):
        _ = drafter.vocabulary
    with pytest.raises(ValueError, match="d2t"):
        Decoder(target, drafter).generate(PROMPTS[1:2], None, 4, ())


@pytest.mark.parametrize("size", (VOCAB // 2, VOCAB))
def test_the_draft_vocabulary_is_where_the_drafter_is(target, tmp_path, size):
    """It is checked while the weights are read, on the CPU; they move afterwards."""
    drafter = new_drafter("eagle", target, version=3, taps=[0, 1], steps=2, num_heads=4, num_kv_heads=2, draft_vocab_size=size)
    if size < VOCAB:
        drafter.take(vocab.choose(torch.ones(VOCAB, dtype=torch.int64), size, frozenset()))
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, device="meta")
    assert loaded.vocabulary.targets.device == loaded.fc.weight.device == torch.device("meta")
    assert load_drafter(tmp_path, target).vocabulary.targets.equal(drafter.vocabulary.targets)


def test_damaged_maps_are_refused(target, tmp_path):
    make(target, "3, small").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    other = vocabulary(19, seed=8)
    far = d2t.clone()
    far[-1] = 100
    damages = {
        "holds target ids": {"d2t": d2t + torch.arange(19)},
        "of another model, or broken": {"d2t": far},
        "disagree on 2 tokens": {"t2d": t2d.clone().index_fill_(0, t2d.nonzero()[0], False).index_fill_(0, (~t2d).nonzero()[0], True)},
        "d2t and t2d disagree": {"d2t": other.d2t},
        "d2t and t2d": {"d2t": d2t - (d2t > 0).long()},
        "d2t and t2d disagree on": {"d2t": torch.zeros_like(d2t)},
        "1 different ones of 19": {"d2t": -torch.arange(19)},
    }
    for match, damage in damages.items():
        save_file(tensors | damage, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"(?s){tmp_path}.*{match}"):
            load_drafter(tmp_path, target)
    # Of another tokenizer: more tokens than this target has.
    save_file(tensors | {"t2d": torch.zeros(60, dtype=torch.bool)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"misshapen tensors: t2d \[60\]"):
        load_drafter(tmp_path, target)
    save_file({name: one for name, one in tensors.items() if name != "d2t"}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 missing tensors: d2t"):
        load_drafter(tmp_path, target)
    wider = Target.wrap(tiny("llama"), name="small")
    wider.vocab_size = VOCAB + 12
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="vocab_size 48"):
        load_drafter(tmp_path).attach(wider)


def test_default_taps_need_layers(target):
    with pytest.raises(
        ValueError, match=r"2 layers, too few for the usual taps \(1, 0, -2\); give the method's key taps: \[0, 1\], for example"
    ):
        default_taps(target)

    class Deep:
        name = "deep"
        num_layers = 0

    for layers, taps in ((8, (1, 3, 4)), (28, (1, 13, 24)), (36, (1, 17, 32))):
        Deep.num_layers = layers
        assert default_taps(Deep) == taps
    Deep.num_layers = 6
    with pytest.raises(ValueError, match="6 layers"):
        default_taps(Deep)


@pytest.mark.parametrize(
    "more, match",
    [
        ({"taps": (0,)}, "EAGLE-1 reads no taps"),
        ({"vocab_size": 9}, "EAGLE-1 reads no taps"),
        ({"norm_output": True}, "EAGLE-1 has no norm"),
    ],
)
def test_version_1_has_no_parts_of_version_3(target, more, match):
    with pytest.raises(ValueError, match=match):
        new_drafter("eagle", target, **train.architecture(EagleSection(version=1, **more), target))


def test_targets_without_such_settings_have_a_drafter_too():
    """GPT-2 says neither how wide its MLP is nor how many KV heads it has."""
    gpt2 = Target.wrap(random_model("gpt2"))
    sizes = train.architecture(EagleSection(taps=(0, 1)), gpt2)
    assert (sizes["intermediate_size"], sizes["num_kv_heads"], sizes["num_heads"]) == (128, 4, 4)
    drafter = redraw(new_drafter("eagle", gpt2, **sizes)).eval()
    assert texts(Decoder(gpt2, drafter).generate(PROMPTS[1:2], None, 8, ())) == texts(Decoder(gpt2).generate(PROMPTS[1:2], None, 8, ()))


def test_a_warm_start_takes_over_what_fits(target, tmp_path):
    old = make(target, "3, small", draft_vocab_size=25, seed=3)
    old.take(vocabulary(25, seed=9))
    redraw(old, seed=3)
    old.save_pretrained(tmp_path)
    new = make(target, "3, small", seed=4)
    before = new.lm_head.weight.detach().clone()
    train.begin_with(new, str(tmp_path), target, "eagle.start")
    rows, kept = new.vocabulary.targets.tolist(), 0
    there = {token: i for i, token in enumerate(old.vocabulary.targets.tolist())}
    for i, token in enumerate(rows):
        assert torch.equal(new.lm_head.weight[i], old.lm_head.weight[there[token]] if token in there else before[i])
        kept += token in there
    assert 5 <= kept < len(rows) == 19
    assert torch.equal(new.vocabulary.t2d, vocabulary(19).t2d) and torch.equal(new.get_buffer("d2t"), vocabulary(19).d2t)
    for path, parameter in new.named_parameters():
        assert path == "lm_head.weight" or torch.equal(parameter, old.get_parameter(path))
    for name, first in (("3", "draft_size"), ("3.1, deep", "taps, draft_size"), ("1", "version, taps")):
        with pytest.raises(ValueError, match=f"eagle.start=.*differs in {first}"):
            train.begin_with(make(target, name), str(tmp_path), target, "eagle.start")
    with pytest.raises(ValueError, match="differs in taps;"):
        train.begin_with(make(target, "3, small", taps=[0]), str(tmp_path), target, "eagle.start")
    for name, value in (
        ("norm_output", True),
        ("norm_before_residual", True),
        ("rope_theta", 5e5),
    ):  # the same tensors compute something else
        with pytest.raises(ValueError, match=f"differs in .*{name}"):
            train.begin_with(make(target, "3, small", **{name: value}), str(tmp_path), target, "eagle.start")
    new_drafter("medusa", target, num_heads=2).save_pretrained(tmp_path / "medusa")
    with pytest.raises(ValueError, match="medusa differs"):
        train.begin_with(new, str(tmp_path / "medusa"), target, "eagle.start")


def test_what_decoded_can_be_trained(target, tmp_path):
    """The maps are read within inference mode, when the first thing that a loaded drafter does is to decode."""
    make(target, "3, small").save_pretrained(tmp_path)
    batch = PackedDataset(corpus_of(SHORT, seq_len=16), 16).batch(torch.arange(2))
    gradients = []
    for first in (False, True):
        drafter = load_drafter(tmp_path, target)
        if first:
            Decoder(target, drafter).generate(PROMPTS[1:2], None, 6, ())
        objective3(drafter.train(), batch, target=target, section=EagleSection(steps=3)).sum.backward()
        gradients.append(drafter.fc.weight.grad)
    assert torch.equal(*gradients) and gradients[0].abs().max() > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_round_trip_changes_nothing(target, name, tmp_path):
    drafter = make(target, name, steps=4, rope_theta=500.0).eval()
    drafter.bind(target, 2, 64)
    drafter.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    maps = {"d2t", "t2d"} if drafter.config.draft_vocab_size < VOCAB else set()
    assert set(file) == {path for path, _ in drafter.named_parameters()} | maps
    assert not any("embed" in path or "inv_freq" in path or "target" in path for path in file)
    again = load_drafter(tmp_path, target)
    for path, buffer in drafter.named_buffers():
        assert torch.equal(again.get_buffer(path), buffer), path
    angle = 7 / 500.0 ** (torch.arange(0, drafter.config.head_dim, 2) / drafter.config.head_dim)
    torch.testing.assert_close(again._rope(torch.tensor([[7]]), torch.float32)[0][0, 0], angle.cos().repeat(2))
    ids = torch.tensor(random_lines(1)[0])
    out = target.forward(ids[None], taps=drafter.taps)
    roots = torch.arange(1, len(ids))
    first, second = (one.position_logits(one.position_features(ids, out), roots) for one in (drafter, again))
    assert torch.equal(first, second) and first.shape == (len(ids) - 1, 4, VOCAB)
    assert torch.equal(again.vocabulary.targets, allowed(drafter)) and again.taps == drafter.taps
    oov = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, allowed(drafter), False)
    assert torch.isneginf(first[..., oov]).all() and first[..., ~oov].isfinite().all()
    half = load_drafter(tmp_path, target, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.vocabulary.targets, allowed(drafter))
    far = torch.tensor([[30_000]])  # an angle whose frequency was rounded would be far off here
    for cast in (half, again.bfloat16()):
        assert torch.equal(cast._rope(far, torch.float32)[1], drafter._rope(far, torch.float32)[1])


def test_a_fresh_head_is_the_targets(target):
    drafter = new_drafter("eagle", target, taps=[0, 1])
    assert torch.equal(drafter.lm_head.weight, target.head_weight)
    drafter = new_drafter("eagle", target, taps=[0, 1], draft_vocab_size=20)
    drafter.take(vocabulary(20))
    assert torch.equal(drafter.lm_head.weight, target.head_weight[vocabulary(20).t2d])
