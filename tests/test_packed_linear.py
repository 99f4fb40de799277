"""Packed linear layers: equal results, in use only where the caller asks for them."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import tiny

from draftsmith.inference import packed_linear as packing
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.packed_linear import pack, packed_weights
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target

DTYPES = (torch.float32, torch.bfloat16)


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


class Attention(nn.Module):
    """Three layers that read one input, and one that does not."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(48, 32, bias=bias), nn.Linear(48, 16, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(48, 16, bias=bias), nn.Linear(32, 48, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + torch.cat((self.v_proj(x), self.k_proj(x)), -1))


def skip_unless_packed(dtype):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bf16 matmul")


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_equal_plain_linear_layers(always, counted, dtype):
    skip_unless_packed(dtype)
    layers = nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 33, bias=False)).to(dtype)
    plain = copy.deepcopy(layers)
    assert pack(layers) == list(layers) and pack(layers) == [], "once"
    del counted[:]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for shape in ((1, 48), (3, 48), (2, 5, 48), (1, 1, 48), (1, 64, 48)):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad(), packed_weights():
            torch.testing.assert_close(layers(x), plain(x), rtol=tolerance, atol=tolerance)
    assert len(counted) == 10
    with torch.no_grad():
        layers(x)  # outside `packed_weights`
        with packed_weights():
            layers(torch.randn(1, packing.MAX_TOKENS + 1, 48, dtype=dtype))  # a prompt's chunk
    with packed_weights():
        layers(x).sum().backward()  # training
    assert len(counted) == 10 and layers[0].weight.grad is not None


@pytest.mark.parametrize(("one_token", "small_tree", "sizes"), ((2.0, 2.0, [1, 2]), (0.9, 2.0, [2]), (1.15, 2.0, [1, 2]), (2.0, 0.9, [])))
def test_one_token_uses_the_plain_weight_where_that_is_faster(always, counted, monkeypatch, one_token, small_tree, sizes):
    monkeypatch.setattr(packing, "MIN_GAIN", 1.15)
    gains = iter((one_token, small_tree))
    monkeypatch.setattr(packing, "gain", lambda slow, fast: next(gains))
    layer = nn.Linear(48, 80)
    assert pack(layer) == [layer] * bool(sizes)
    del counted[:]
    with torch.no_grad(), packed_weights():
        for tokens in (1, 2):
            x = torch.randn(tokens, 48)
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert [shape[0] for shape in counted] == sizes


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_with_one_input_are_one_product(always, counted, dtype, bias):
    skip_unless_packed(dtype)
    model = nn.ModuleList(Attention(bias).to(dtype) for _ in range(2))
    plain = copy.deepcopy(model)
    assert len(pack(model)) == 8
    del counted[:]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    inputs = [torch.randn(2, 3, 48, dtype=dtype), torch.randn(1, 1, 48, dtype=dtype)]
    with torch.no_grad(), packed_weights():
        for x in (*inputs, inputs[0]):
            for packed, expected in zip(model, plain, strict=True):
                torch.testing.assert_close(packed(x), expected(x), rtol=tolerance, atol=tolerance)
    assert len(counted) == 3 * 2 * 2, "q, k and v in one product, o in another"


def test_an_output_is_returned_once(always, counted):
    """An input that was overwritten in place is multiplied anew, although it is the same tensor."""
    model, x = Attention(), torch.randn(1, 48)
    pack(model)
    del counted[:]
    with torch.no_grad(), packed_weights():
        for _ in range(2):
            x.mul_(2.0)
            for layer in (model.k_proj, model.q_proj, model.v_proj):
                torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        x.mul_(2.0)
        torch.testing.assert_close(model.q_proj(x), F.linear(x, model.q_proj.weight, model.q_proj.bias))
    assert len(counted) == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_uses_it_and_others_do_not(always, counted, dtype):
    skip_unless_packed(dtype)
    model = tiny("llama").to(dtype)
    target = Target.wrap(model)
    prompt = [3, 1, 4, 1, 5]
    plain = Decoder(target).generate([prompt], None, 20, ())[0].tokens
    target.pack()
    layers = len(target.layers)
    del counted[:]
    answer = Decoder(target).generate([prompt], None, 20, ())[0].tokens
    assert answer == plain or dtype == torch.bfloat16  # rounded elsewhere
    assert len(counted) == 4 * layers + 20 * (4 * layers + 1), "the prompt without a head; then qkv, o, gate and up, down, and the head"
    del counted[:]
    model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
    assert counted == [], "transformers runs the model as it is"


@pytest.mark.parametrize("method", ("eagle", "medusa"))
def test_drafting_uses_it(always, counted, method):
    target = Target.wrap(tiny("llama"))
    settings = {"taps": [0, 1], "num_heads": 2} if method == "eagle" else {"num_heads": 2}
    drafter = new_drafter(method, target, **settings).eval()
    prompt = [3, 1, 4, 1, 5]
    expected = Decoder(target).generate([prompt], None, 12, ())[0].tokens
    packed = pack(drafter)
    assert {type(layer).__name__ for layer in packed} == ({"Linear"} if method == "eagle" else {"Linear", "Output"})
    assert len(packed) == sum(isinstance(module, nn.Linear) for module in drafter.modules())
    del counted[:]
    assert Decoder(target, drafter).generate([prompt], None, 12, ())[0].tokens == expected
    assert counted, "the target is not packed: these are the drafter's"


def test_what_is_not_packed(always, monkeypatch):
    layer = nn.Sequential(nn.Linear(32, 32))
    assert pack(copy.deepcopy(layer).half()) == []
    assert pack(copy.deepcopy(layer).to("meta")) == []
    with monkeypatch.context() as patched:
        patched.setattr(packing, "free_memory", lambda device: 4 * 32 * 32)
        assert pack(copy.deepcopy(layer)) == []
    with monkeypatch.context() as patched:
        patched.setattr(packing, "_multiply", lambda x, packed, bias: F.linear(x, layer[0].weight) * 1.01 + bias)
        assert pack(copy.deepcopy(layer)) == [], "a product that is not right"
    with monkeypatch.context() as patched:
        patched.setattr(packing, "gain", lambda plain, quick: 1.1)
        patched.setattr(packing, "MIN_GAIN", 1.15)
        assert pack(copy.deepcopy(layer)) == []
    assert len(pack(layer)) == 1


def test_each_shape_is_probed(always, monkeypatch):
    """What pays for one shape need not pay for another: here for the wide layers alone."""
    monkeypatch.setattr(packing, "MIN_GAIN", 1.15)
    monkeypatch.setattr(packing, "gain", lambda plain, quick: 2.0 if plain[0]()[0].shape[-1] == 80 else 0.5)
    layers = nn.Sequential(nn.Linear(48, 80), nn.Linear(80, 48), nn.Linear(48, 80))
    assert pack(layers) == [layers[0], layers[2]]


def test_the_shortest_time_of_each_piece_counts(monkeypatch):
    """Work that another process delays now and then is not taken for slow work."""
    now = [0.0]
    monkeypatch.setattr(packing.time, "perf_counter", lambda: now[0])

    def work(usual, late, calls):
        def run():
            calls.append(None)
            now[0] += late if len(calls) % 6 == turn else usual

        turn = len(calls) % 6
        return run

    slow = [work(3.0, 90.0, []), work(5.0, 1000.0, [None])]
    fast = [work(1.0, 500.0, []), work(1.0, 20.0, [None] * 4)]
    assert packing.gain(slow, fast) == 8.0 / 2.0


def test_a_changed_weight_is_used_as_it_is(always, counted):
    layer = nn.Sequential(nn.Linear(32, 40))
    pack(layer)
    x = torch.randn(3, 32)
    del counted[:]
    with torch.no_grad(), packed_weights():
        layer[0].bias[5] = 9.0
        torch.testing.assert_close(layer(x), F.linear(x, layer[0].weight, layer[0].bias))
        layer[0].weight[5] = 0.0
        torch.testing.assert_close(layer(x), F.linear(x, layer[0].weight, layer[0].bias))
        layer.load_state_dict(nn.Sequential(nn.Linear(32, 40)).state_dict())
        torch.testing.assert_close(layer(x), F.linear(x, layer[0].weight, layer[0].bias))
        layer.bfloat16()
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        layer[0].bias = None
        torch.testing.assert_close(layer(x.bfloat16()), F.linear(x.bfloat16(), layer[0].weight))
    assert counted == []


def test_copies_are_plain(always, counted):
    model, x = Attention(), torch.randn(3, 48)
    pack(model)
    again = copy.deepcopy(model)
    del counted[:]
    with torch.no_grad(), packed_weights():
        again.q_proj.weight.zero_()
        assert torch.equal(again.q_proj(x), again.q_proj.bias.expand(3, -1)) and not torch.equal(model.q_proj(x), again.q_proj(x))
    assert len(counted) == 1


def test_contexts_may_nest_and_threads_have_their_own(always, counted):
    layer, x = nn.Sequential(nn.Linear(32, 40)), torch.randn(3, 32)
    pack(layer)
    del counted[:]

    def run():
        with torch.no_grad():
            layer(x)

    with packed_weights():
        with packed_weights():
            pass
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert counted == []
        run()
    run()
    assert len(counted) == 1
