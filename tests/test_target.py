"""The frozen target: its logits are the model's own, its taps are the layers' outputs, and it refuses what it cannot vouch for."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from random_targets import CONFIGS, SIZES, random_model, small_tokenizer

from draftsmith.models.identity import TargetIdentity, check_same, config_hash, tokenizer_hash
from draftsmith.models.target import Target, resolve_path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_model("llama").save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_taps_are_the_models_own(name):
    model = random_model(name).eval()
    names = [n for n, _ in model.named_modules()]
    ids = torch.randint(3, 67, (2, 11))
    with torch.no_grad():
        own = model(ids, output_hidden_states=True)
    target = Target.wrap(model)
    out = target.forward(ids, taps=(1, 0))
    logits = target.logits(out.hidden)
    assert torch.equal(logits, own.logits)
    assert logits.std() > 1e-3
    assert torch.equal(out.taps, torch.stack([own.hidden_states[2], own.hidden_states[1]], dim=2))
    assert target.forward(ids).taps is None
    # The last layer's tap is before the final norm, the hidden state after it.
    last = target.forward(ids, taps=(2,))
    assert not torch.equal(last.taps[:, :, 0], last.hidden)
    # Any leading shape, and gradients to the hidden states.
    assert target.logits(out.hidden[0, 0]).shape == (67,) and target.logits(out.hidden[:0]).shape == (0, 11, 67)
    hidden = out.hidden.clone().requires_grad_()
    target.logits(hidden).square().sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert [n for n, _ in model.named_modules()] == names
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


@pytest.mark.parametrize("name,plain", [("llama", True), ("gemma2", False), ("cohere", False), ("granite", False)])
def test_what_follows_the_head_is_noticed(name, plain):
    model = random_model(name)
    target = Target.wrap(model)
    hidden = torch.randn(3, 32)
    bare = hidden @ target.head_weight.T
    assert torch.equal(bare, target.logits(hidden)) is plain
    scale = {"cohere": 0.0625, "granite": 1 / 6}.get(name, 1.0)
    assert target.head_scale == pytest.approx(scale, rel=1e-4)


def test_taps_out_of_range_and_missing():
    target = Target.wrap(random_model("llama"))
    ids = torch.tensor([[3, 4]])
    for tap in (3, -1):
        with pytest.raises(ValueError, match=r"tap -?\d .*0\.\.2"):
            target.forward(ids, taps=(tap,))
    target.watch([1])
    target.layers[1]._forward_hooks.clear()  # as a layer compiled before it was tapped
    with pytest.raises(RuntimeError, match=r"taps \[1\].*did not arrive"):
        target.forward(ids, taps=(0, 1))
    assert target.forward(ids, taps=(0,)).taps.shape == (1, 2, 1, 32)


def test_load_round_trip(saved):
    target = Target.load(str(saved))
    assert all(torch.equal(a, b) for a, b in zip(target.model.parameters(), random_model("llama").parameters(), strict=True))
    assert (target.vocab_size, target.hidden_size, target.num_layers, target.max_positions) == (67, 32, 3, 64)
    assert target.stop_ids == {1, 2}
    assert target.embed(torch.tensor([3])).shape == (1, 32)
    assert Target.load(str(saved), dtype="bfloat16").dtype == torch.bfloat16


def test_tied_weights_are_not_missing(tmp_path):
    random_model("qwen3").save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    assert target.tokenizer is None and target.identity.tokenizer_hash == ""
    assert target.head_weight is target.model.get_input_embeddings().weight


def test_identity_tells_a_model_from_its_fine_tunes(tmp_path):
    model = random_model("llama")
    targets = []
    for name in ("base", "copy", "tuned"):
        with torch.no_grad():
            if name == "tuned":
                model.model.layers[-1].mlp.down_proj.weight.mul_(1.01)
        model.save_pretrained(tmp_path / name)
        targets.append(Target.load(str(tmp_path / name)).identity)
    base, copied, tuned = targets
    assert base.weights_hash == copied.weights_hash and check_same(base, copied, weights=True) == ""
    assert "other weights" in check_same(base, tuned)
    with pytest.raises(ValueError, match="weights .*made for .*base.*, got .*tuned"):
        check_same(base, tuned, weights=True)
    assert check_same(replace(base, weights_hash=""), tuned, weights=True) == "", "an older record does not know"
    here, there = (replace(base, name=f"org/{name}", revision=name * 40, weights_hash="") for name in "ab")  # on the Hub
    assert check_same(here, here, weights=True) == check_same(here, base, weights=True) == "" and "other weights" in check_same(here, there)
    with pytest.raises(ValueError, match="revision .aaaaaaaaaaaa / bbbbbbbbbbbb.: made for 'org/a', got 'org/b'"):
        check_same(here, there, weights=True)


def test_identity_is_stable_and_tells_targets_apart(saved):
    target = Target.load(str(saved))
    again = Target.load(str(saved), dtype=torch.bfloat16)
    other = Target.wrap(random_model("qwen3"), small_tokenizer(), name="other")
    assert target.identity.config_hash == again.identity.config_hash
    assert config_hash(CONFIGS["llama"]) == target.identity.config_hash
    assert TargetIdentity.from_dict(json.loads(json.dumps(target.identity.to_dict()))) == target.identity
    assert check_same(target.identity, target.identity) == ""
    assert "float32" in check_same(target.identity, again.identity) and "bfloat16" in check_same(target.identity, again.identity)
    with pytest.raises(ValueError, match=r"config.*made for .*target.*got 'other'"):
        check_same(target.identity, other.identity)


def test_tokenizer_hash():
    tokenizer = small_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before
    assert tokenizer_hash(small_tokenizer("acb")) != before
    target = Target.wrap(random_model("llama"), tokenizer, name="a")
    swapped = Target.wrap(target.model, small_tokenizer("acb"), name="b")
    with pytest.raises(ValueError, match="differs in its tokenizer"):
        check_same(target.identity, swapped.identity)


def test_pickles_are_refused(saved, tmp_path):
    shutil.copy(saved / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only pickled weights.*pytorch_model.bin"):
        Target.load(str(tmp_path))


def test_broken_folders(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        Target.load(str(tmp_path))
    shutil.copy(saved / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="no weights"):
        Target.load(str(tmp_path))
    complete = (saved / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(complete[: len(complete) // 2])
    with pytest.raises(ValueError, match="model.safetensors.*cut off"):
        Target.load(str(tmp_path))


@pytest.mark.parametrize("change,word", [({"num_hidden_layers": 4}, "missing"), ({"num_hidden_layers": 2}, "unexpected"), ({"vocab_size": 68}, "misshapen")])  # fmt: skip
def test_weights_that_do_not_fit_are_named(saved, tmp_path, change, word):
    shutil.copytree(saved, tmp_path / "m")
    config = json.loads((saved / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=rf"{word} tensors: .*(model\.layers|embed_tokens|lm_head)"):
        Target.load(str(tmp_path / "m"))


@pytest.mark.parametrize("path", ["./none", "~/none", "/none/here", "a/b/c", "recipe.yaml", "none/"])
def test_a_local_path_never_becomes_a_request(path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        Target.load(path)


def test_resolve_path(tmp_path, monkeypatch):
    assert resolve_path("owner/model") == "owner/model" and resolve_path("gpt2") == "gpt2"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    with pytest.raises(FileNotFoundError):
        resolve_path("owner/model")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        resolve_path("file")


def test_compiled_layers_are_one_graph_and_give_the_same_features(monkeypatch):
    """Taps arrive, a layer can be left out, and decoding runs what it ran before."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target = Target.wrap(random_model("llama"))
    ids = torch.randint(SIZES["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(10), torch.arange(14)]).expand(2, 24)}
    plain, short = target.features(batch, (0, 1)), None
    with target.without([1]):
        short = target.forward(ids).hidden
    torch._dynamo.utils.counters.clear()
    target.compile()
    compiled = target.features(batch, (0, 1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "one for all layers"
    torch.testing.assert_close(compiled.hidden, plain.hidden, rtol=0, atol=1e-5)
    torch.testing.assert_close(compiled.taps, plain.taps, rtol=0, atol=1e-5)
    with target.without([1]):
        assert torch.equal(target.forward(ids).hidden, short)
    assert all("forward" not in layer.__dict__ for layer in target.layers)
