"""A target that is quantised as it is read: it says so, decodes as transformers does with the same weights, and a drafter trains on it."""

import dataclasses
import importlib.util
import json

import pytest
import torch
from commands import metrics, short
from planting import PlantingDrafter
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import VOCAB, reference, tiny

from draftsmith.data.features import Index
from draftsmith.inference import packed_linear as packing
from draftsmith.inference.decoder import Decoder
from draftsmith.models import quantised
from draftsmith.models.identity import check_same
from draftsmith.models.target import Target
from draftsmith.train import medusa

KINDS = ("bnb-int8", "bnb-nf4", "ao-int8", "ao-fp8")
LIBRARY = {"bnb": "bitsandbytes", "ao": "torchao"}
# Of the norm of the tiny target's features: what a kind may change, and what rounding alone does not.
ERROR = {"bnb-int8": (4e-3, 0.04), "bnb-nf4": (0.03, 0.2), "ao-int8": (2e-3, 0.02), "ao-fp8": (0.01, 0.06)}
PROMPTS = [torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist() for count in (6, 1, 11)]


@pytest.fixture(params=KINDS)
def kind(request):
    pytest.importorskip(LIBRARY[request.param.split("-")[0]])
    return request.param


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """As in the zoo, but as wide as blocks of 64 weights, which bitsandbytes wants on a CPU."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes)
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return str(folder)


def rows():
    ids = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "position_ids": torch.arange(20).expand(2, 20)}


def distance(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def test_features_differ_by_what_the_kind_costs_and_the_ends_stay_complete(kind):
    plain, target = (Target.load("tiny", dtype=torch.float32, quantise=quantise) for quantise in (None, kind))
    out, expected = target.features(rows(), (0,)), plain.features(rows(), (0,))
    least, most = ERROR[kind]
    assert least < distance(out.hidden, expected.hidden) < most
    assert 0 < distance(out.taps, expected.taps) < most
    assert torch.equal(target.embed(rows()["input_ids"]), plain.embed(rows()["input_ids"]))
    assert torch.equal(target.logits(expected.hidden), plain.logits(expected.hidden))
    linear = [layer for layer in target.layers.modules() if isinstance(layer, nn.Linear)]
    assert len(linear) == 7 * target.num_layers and not any(type(layer.weight) is nn.Parameter for layer in linear)
    assert type(target.head_weight) is nn.Parameter and target.head_weight.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_each_weight_is_as_near_as_its_format_says(kind, llama):
    """int8: 127 steps of a row's largest to each side; e4m3: 3 bits of fraction; NF4: its widest gap is 0.304 of a block's largest."""
    plain, target = (Target.load(llama, quantise=quantise).layers[1].mlp.down_proj for quantise in (None, kind))
    weight = plain.weight
    with torch.no_grad():
        stored = target(torch.eye(weight.shape[1])).T
    largest = weight.abs().amax(1, keepdim=True)
    bound = {
        "bnb-int8": largest / 254,
        "ao-int8": largest / 254,
        "ao-fp8": torch.maximum(weight.abs() / 16, largest / 448 / 1024),
        "bnb-nf4": 0.152 * weight.unflatten(1, (-1, 64)).abs().amax(2).repeat_interleave(64, 1),
    }[kind]
    error = (stored - weight).abs()
    half = stored.abs() * 2**-8 if kind.startswith("bnb") else 0  # bitsandbytes multiplies in half precision on a CPU
    assert (error <= bound * 1.02 + 1e-6 + half).all()
    assert error.max() > 0.3 * bound.max()


def test_a_token_s_features_do_not_depend_on_its_neighbours(kind, llama):
    """Tree verification and packing rely on it: rejected drafts, other rows and later documents change nothing."""
    target, ids = Target.load(llama, quantise=kind), rows()["input_ids"]
    hidden = target.forward(ids).hidden
    assert distance(target.forward(ids[:1, :7]).hidden, hidden[:1, :7]) < 1e-5


def test_identity_names_the_kind_and_stores_of_the_unquantised_target_are_accepted(kind, llama, capsys):
    plain, target = Target.load(llama), Target.load(llama, quantise=kind)
    assert target.identity == dataclasses.replace(plain.identity, dtype=f"float32+{kind}")
    said = check_same(plain.identity, target.identity)
    assert f"is in float32+{kind}, this was made with it in float32" in said
    assert check_same(target.identity, Target.load(llama, quantise=kind).identity) == ""
    half = Target.load(llama, dtype=torch.bfloat16, quantise=kind)
    assert half.identity.dtype == f"bfloat16+{kind}" and half.head_weight.dtype == torch.bfloat16
    assert half.features(rows()).hidden.dtype == torch.bfloat16
    Index.of(plain, (), "float32").check("store", target, ())
    assert said in capsys.readouterr().err


def test_decoding_is_transformers_own_greedy_with_the_same_weights(kind, llama, monkeypatch):
    monkeypatch.setattr(packing, "_least_tokens", lambda group: 1)  # whatever this machine is good at
    target = Target.load(llama, quantise=kind)
    target.pack()
    answers = [reference(target.model, prompt, 20) for prompt in PROMPTS]
    drafter = PlantingDrafter(PROMPTS, answers, VOCAB, seed=2)
    done = Decoder(target, drafter, slots=2).generate(PROMPTS, max_new_tokens=14, stop_ids=())
    assert [answer.tokens for answer in done] == [answer[:14] for answer in answers]
    assert drafter.mismatches == 0 and drafter.moves > 0


def test_a_saved_quantised_model_is_read_as_it_is(kind, llama, tmp_path):
    target = Target.load(llama, quantise=kind)
    target.model.save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors"))
    again = Target.load(str(tmp_path))
    assert again.identity == dataclasses.replace(target.identity, name=str(tmp_path), weights_hash=again.identity.weights_hash)
    assert "other weights" in check_same(target.identity, again.identity, weights=True), "the same model, of other files"
    assert torch.equal(again.features(rows()).hidden, target.features(rows()).hidden)
    ends = Target.load(str(tmp_path), layers=False)
    assert ends.identity == again.identity and torch.equal(ends.head_weight, again.head_weight) and not ends.has_layers
    with pytest.raises(ValueError, match=rf"is quantised already \({kind}\), got target.quantise=ao-int8; leave it out"):
        Target.load(str(tmp_path), quantise="ao-int8")


def test_a_drafter_trains_on_it(kind, tmp_path):
    for quantise in (kind, "null"):
        medusa.main(short("tiny", tmp_path, tmp_path / quantise, f"target.quantise={quantise}", "train.steps=2"))
    rows, plain = (metrics(tmp_path / quantise) for quantise in (kind, "null"))
    assert len(rows) == len(plain) == 3
    for row, expected in zip(rows, plain, strict=True):
        assert all(0 < abs(row[key] - expected[key]) < 0.2 * expected[key] for key in row if "loss" in key)
    config = json.loads((tmp_path / kind / "artifact" / "config.json").read_text())
    assert config["target"]["dtype"] == f"float32+{kind}"
    assert f"float32+{kind}" in (tmp_path / kind / "artifact" / "README.md").read_text()


def test_what_cannot_be_is_said_in_a_line(llama, monkeypatch):
    with pytest.raises(ValueError, match="target.quantise=int3: expected one of bnb-int8, bnb-nf4, ao-int8, ao-fp8"):
        Target.load(llama, quantise="int3")
    find = importlib.util.find_spec
    monkeypatch.setattr(quantised, "find_spec", lambda name: None if name in LIBRARY.values() else find(name))
    for kind in KINDS:
        library = LIBRARY[kind.split("-")[0]]
        with pytest.raises(
            ValueError, match=rf"target.quantise={kind} needs {library}, which is not installed; pip install 'draftsmith\[quantised\]'"
        ):
            Target.load(llama, quantise=kind)


def test_how_a_checkpoint_is_quantised_is_read_from_its_config(llama):
    config = Target.load(llama).model.config
    assert quantised.quantised_as(config) == ""
    for settings, word in (
        ({"quant_method": "gptq", "bits": 4}, "gptq-4bit"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bnb-fp4"),
        ({"load_in_8bit": True}, "bnb-int8"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "ao-Int4WeightOnlyConfig"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "ao-int8_weight_only"),
    ):
        config.quantization_config = settings
        assert quantised.quantised_as(config) == word


def test_a_checkpoint_whose_library_is_missing_is_refused_in_a_line(llama, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ValueError, match="cannot be read as gptq-4bit: .*GPTQ.*pip install"):
        Target.load(str(tmp_path))
