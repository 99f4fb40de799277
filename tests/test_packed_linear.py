"""Packed linear layers: equal results, in use only where the caller asks for them."""

import copy
import threading

import pytest
import torch
from torch import nn
from zoo import tiny

from draftsmith.inference import packed_linear as packing
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.packed_linear import PackedLinears
from draftsmith.models.target import Target


@pytest.fixture
def always(monkeypatch):
    """Pack whether it is faster here or not."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(packing, "MIN_GAIN", 0.0)


@pytest.fixture
def counted(monkeypatch):
    calls = []
    multiply = packing._multiply
    monkeypatch.setattr(packing, "_multiply", lambda x, packed, bias: calls.append(tuple(x.shape)) or multiply(x, packed, bias))
    return calls


def test_outputs_equal_plain_linear_layers(always, counted):
    layers = nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 33, bias=False))
    plain = copy.deepcopy(layers)
    packed = PackedLinears(layers)
    assert len(packed.layers) == 2
    del counted[:]
    for shape in ((1, 48), (3, 48), (2, 5, 48), (1, 1, 48), (1, 64, 48)):
        x = torch.randn(shape)
        with torch.no_grad(), packed.on():
            torch.testing.assert_close(layers(x), plain(x), rtol=1e-5, atol=1e-5)
    assert len(counted) == 10
    with torch.no_grad():
        layers(x)  # outside `on`
        with packed.on():
            layers(torch.randn(1, packing.MAX_TOKENS + 1, 48))  # a prompt's chunk
    with packed.on():
        layers(x).sum().backward()  # training
    assert len(counted) == 10 and layers[0].weight.grad is not None


def test_decoding_uses_it_and_others_do_not(always, counted):
    model = tiny("llama")
    target = Target.wrap(model)
    prompt = [3, 1, 4, 1, 5]
    plain = Decoder(target).generate([prompt], None, 20, ())[0].tokens
    target.pack()
    del counted[:]
    assert Decoder(target).generate([prompt], None, 20, ())[0].tokens == plain
    assert len(counted) >= 20 * 15
    del counted[:]
    model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
    assert counted == [], "transformers runs the model as it is"
    packing_of = target._packing
    target.pack()
    assert target._packing is packing_of, "once"


def test_what_is_not_packed(always, monkeypatch):
    layer = nn.Sequential(nn.Linear(32, 32))
    assert PackedLinears(copy.deepcopy(layer).bfloat16()).layers == []
    assert PackedLinears(copy.deepcopy(layer).to("meta")).layers == []
    monkeypatch.setattr(packing, "_free_memory", lambda: 4 * 32 * 32)
    assert PackedLinears(copy.deepcopy(layer)).layers == []
    monkeypatch.undo()
    monkeypatch.setattr(packing, "MIN_GAIN", 1e9)
    assert PackedLinears(layer).layers == []


def test_a_changed_weight_is_used_as_it_is(always, counted):
    layer = nn.Sequential(nn.Linear(32, 40))
    packed, x = PackedLinears(layer), torch.randn(3, 32)
    del counted[:]
    with torch.no_grad(), packed.on():
        layer[0].weight[5] = 0.0
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer[0].weight, layer[0].bias))
        layer.load_state_dict(nn.Sequential(nn.Linear(32, 40)).state_dict())
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer[0].weight, layer[0].bias))
        layer.bfloat16()
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert counted == []


def test_copies_are_plain(always, counted):
    layer = nn.Sequential(nn.Linear(32, 40))
    packed, x = PackedLinears(layer), torch.randn(3, 32)
    again = copy.deepcopy(layer)
    del counted[:]
    with torch.no_grad(), packed.on():
        again[0].weight.zero_()
        assert torch.equal(again(x), again[0].bias.expand(3, -1)) and not torch.equal(layer(x), again(x))
    assert len(counted) == 1


def test_contexts_may_nest_and_threads_have_their_own(always):
    packed = PackedLinears(nn.Sequential(nn.Linear(32, 40)))
    seen = []
    with packed.on():
        with packed.on():
            pass
        thread = threading.Thread(target=lambda: seen.append(packed.active))
        thread.start()
        thread.join()
        assert packed.active and seen == [False]
    assert not packed.active
