"""Students: what a fresh, a pruned or an existing one is, against references that share nothing with the code that makes them."""

import copy
import json
import shutil
import sys

import pytest
import torch
from random_targets import CONFIGS as SIZED
from random_targets import small_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Olmo2Config, Phi3Config, Qwen2Config
from zoo import _COMMON, CONFIGS, VOCAB, tiny

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.tree import StaticTree
from draftsmith.models import adapter, student, tokenizer_check
from draftsmith.models.head import Head
from draftsmith.models.target import Target, check_loaded
from draftsmith.train.losses.chunked import chunked_cross_entropy

DENSE = ["llama", "qwen3", "mistral", "gemma2", "gemma3"]
LENGTHS = [[10, 9], [23]]  # documents of two rows of 24; the rest is padding
MORE = {
    "biased": lambda: LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "tied": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "olmo2": lambda: Olmo2Config(**_COMMON),
    "phi3": lambda: Phi3Config(**_COMMON),
}


@pytest.fixture
def wide(monkeypatch):
    """name, layers -> a tiny random model like those of the zoo, with so many layers and a tiny epsilon; biases are random too."""

    def make(name, layers=2):
        def config():
            made = (CONFIGS | MORE)[name]()
            if getattr(made, "layer_types", None):
                made.layer_types = (made.layer_types * layers)[:layers]
            made.num_hidden_layers, made.rms_norm_eps = layers, 1e-10
            return made

        monkeypatch.setitem(CONFIGS, "wide", config)
        model = tiny("wide", seed=layers)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if path.endswith(".bias") or "norm" in path:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(path))) * 0.15)
        return model

    return make


def sized():
    """A Llama of 67 tokens, whose config is its own."""
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(SIZED["llama"])).eval()


def batch(seed=0):
    """Two packed rows as `PackedDataset.batch` gives them; about half of the tokens are supervised."""
    generator = torch.Generator().manual_seed(seed)
    rows = {"input_ids": torch.randint(VOCAB, (2, 24), generator=generator), "loss_mask": torch.rand(2, 24, generator=generator) < 0.5}
    rows |= {name: torch.full((2, 24), -1) for name in ("position_ids", "document")}
    for b, (lengths, at) in enumerate(zip(LENGTHS, (0, 0), strict=True)):
        for number, length in enumerate(lengths):
            rows["document"][b, at : at + length], rows["position_ids"][b, at : at + length] = number, torch.arange(length)
            rows["loss_mask"][b, at] = False
            at += length
        rows["position_ids"][b, at:], rows["loss_mask"][b, at:] = torch.arange(24 - at), False
    return rows


def documents(rows):
    """The texts in a batch: (row, places in it, ids [1,n])."""
    for b, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            yield b, slice(at, at + length), rows["input_ids"][b : b + 1, at : at + length]
            at += length


def only(model, layers):
    """The model with these layers alone, by taking the others out of its list."""
    cut = copy.deepcopy(model)
    cut.model.layers = nn.ModuleList(cut.model.layers[layer] for layer in layers)
    cut.config.num_hidden_layers = len(layers)
    if getattr(cut.config, "layer_types", None):
        cut.config.layer_types = [model.config.layer_types[layer] for layer in layers]
    return cut


def adapted(model, rank, **how):
    pytest.importorskip("peft")
    return adapter.with_lora(model, rank, **how)


def reloaded(model, folder):
    model.save_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation=model.config._attn_implementation
    )
    check_loaded("student", info)
    return model


def logits(model, ids=None):
    with torch.no_grad():
        return model(torch.arange(40)[None] % VOCAB if ids is None else ids, use_cache=False).logits


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_fresh_student(tmp_path):
    model = sized()
    model.config.rope_parameters["rope_theta"] = 5e4
    model.config.rms_norm_eps = 1e-4
    target = Target.wrap(model)
    shape = {"layers": 3, "hidden_size": 16, "heads": 4, "kv_heads": 2}
    before = torch.get_rng_state()
    made = student.fresh(target, **shape, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert same(made, student.fresh(target, **shape, seed=5)) and not same(made, student.fresh(target, **shape, seed=6))
    config = made.config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (67, 1, 2, 0)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (64, 1e-4, 5e4)
    assert made.generation_config.eos_token_id == 2 and config.intermediate_size == 48
    assert made.lm_head.weight is made.model.embed_tokens.weight and all(p.requires_grad for p in made.parameters())
    torch.manual_seed(5)
    plain = LlamaForCausalLM(config).state_dict()
    small = [name for name in plain if "o_proj" in name or "down_proj" in name]
    assert len(small) == 6
    for name, weight in made.state_dict().items():
        torch.testing.assert_close(weight, plain[name] / (6**0.5 if name in small else 1), rtol=1e-6, atol=0)
    assert torch.equal(logits(reloaded(made, tmp_path)), logits(made))
    ids = torch.tensor([[3, 4, 5]])
    answers = [model.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=one) for one in (None, made)]
    assert torch.equal(*answers)
    assert student.fresh(Target.wrap(tiny("gemma3")), **shape).config.rope_parameters["rope_theta"] == 1e6  # full attention's, not 1e4
    for wrong in ({"heads": 3}, {"heads": 16}, {"kv_heads": 3}):
        with pytest.raises(ValueError, match=r"got hidden_size 16, \d+ heads, \d KV heads; expected"):
            student.fresh(target, **shape | wrong)


@pytest.mark.parametrize("name", [*CONFIGS, *MORE])
def test_nothing_pruned_is_the_target(wide, name, tmp_path):
    model = wide(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    target = Target.wrap(model)
    before = copy.deepcopy(target.model.state_dict())
    state = torch.get_rng_state()
    made = student.pruned(target, layers=range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert made.dtype == torch.float32 and made.config._attn_implementation == "eager" and type(made) is type(target.model)
    assert all(p.requires_grad for p in made.parameters()) and not any(p.requires_grad for p in target.model.parameters())
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) is (name == "tied")
    assert torch.equal(logits(made), logits(copy.deepcopy(model).float()))
    assert torch.equal(logits(reloaded(made, tmp_path)), logits(made))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[path]) for path, tensor in target.model.state_dict().items())


@pytest.mark.parametrize("name", [*DENSE, "gpt_oss", "qwen2"])
@pytest.mark.parametrize("layers", [[0, 3], [1, 2], [2]])
def test_named_layers(wide, name, layers, tmp_path):
    target = Target.wrap(wide(name, 4))
    made = student.pruned(target, layers=layers)
    want = logits(only(target.model, layers))
    assert torch.equal(logits(made), want) and not torch.equal(want, logits(only(target.model, [layer - 1 for layer in layers])))
    assert torch.equal(logits(reloaded(made, tmp_path)), want)
    assert made.num_parameters() < target.model.num_parameters()


def planted(model, channels, neurons, groups):
    """Silence these channels of the stream, these neurons of every MLP, and in layer l all that groups[l] hands on; readers stay random."""
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight if model.config.tie_word_embeddings else torch.zeros(0, 0)):
            weight[:, channels[: weight.shape[1]]] = 0
        for layer, group in zip(model.model.layers, groups, strict=True):
            size = layer.self_attn.head_dim
            for module, rows in (
                (layer.self_attn.o_proj, channels),
                (layer.mlp.down_proj, channels),
                (layer.mlp.up_proj, neurons),
                (layer.self_attn.v_proj, list(range(group * size, group * size + size))),
            ):
                module.weight[rows] = 0
                if module.bias is not None:
                    module.bias[rows] = 0


@pytest.mark.parametrize("name", [*DENSE, "qwen2", "biased", "tied", "olmo2"])
def test_channels_of_zero_go_first(wide, name, tmp_path):
    """A narrower student gives the target's logits where all that went was zero: the ranking and the slices are right."""
    model = wide(name)
    heads = 4 if name == "olmo2" else 2  # whose norm of the queries is one of all heads
    planted(model, [1, 2, 7, 11, 18, 25, 30, 31], [0, 5, 6, 20, 33, 40, 46, 47], [1, 0])
    target, ids = Target.wrap(copy.deepcopy(model)), torch.randint(VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
    if name.startswith("gemma"):  # multiplies its embeddings by the root of H
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_((24 / 32) ** 0.5)
    want = logits(model, ids)
    assert want.std() > 0.1
    made = student.pruned(target, layers=[0, 1], hidden_size=24, heads=heads, intermediate_size=40, rows=batch())
    assert (made.config.hidden_size, made.config.num_key_value_heads, made.config.head_dim) == (
        24,
        heads // 2,
        target.layers[0].self_attn.head_dim,
    )
    torch.testing.assert_close(logits(made, ids), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(reloaded(made, tmp_path), ids), logits(made, ids))
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) is (name == "tied")
    # One more of each is missed.
    for less in ({"hidden_size": 20}, {"intermediate_size": 39}):
        fewer = student.pruned(target, layers=[0, 1], **{"hidden_size": 24, "intermediate_size": 40} | less, rows=batch())
        assert (logits(fewer, ids) - want).abs().max() > 1e-3


@pytest.mark.parametrize("size", ["hidden_size", "heads", "intermediate_size"])
def test_padding_measures_nothing(wide, size):
    target, rows, other = Target.wrap(wide("llama")), batch(), batch()
    other["input_ids"] = torch.where(rows["document"] < 0, 0, rows["input_ids"])
    assert not torch.equal(other["input_ids"], rows["input_ids"])
    sums = [student._importance(target, [0, 1], student._without_features(target, one)) for one in (rows, other)]
    assert sums[0].keys() == sums[1].keys() and len(sums[0]) == 5
    assert all(torch.equal(sums[0][at], sums[1][at]) for at in sums[0])
    less = {"hidden_size": 16, "heads": 2, "intermediate_size": 9}[size]
    assert same(*(student.pruned(target, layers=[0, 1], **{size: less}, rows=one) for one in (rows, other)))


def slow_acceptance(model, cut, rows):
    """The mean of 1 − TV over supervised tokens, each document by itself."""
    overlaps = []
    for b, places, ids in documents(rows):
        p, q = (logits(one, ids)[0, :-1].double().softmax(-1) for one in (model, cut))
        overlaps += (1 - (p - q).abs().sum(-1) / 2)[rows["loss_mask"][b, places][1:]].tolist()
    return sum(overlaps) / len(overlaps)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_layers_go_as_a_slow_search_has_it(wide, name, monkeypatch, capsys):
    model, rows = wide(name, 4), batch(1)
    target = Target.wrap(copy.deepcopy(model))
    seen = []
    monkeypatch.setattr(student, "CHUNK", 3 * VOCAB)
    monkeypatch.setattr(target, "logits", lambda hidden: (seen.append(len(hidden)), Target.logits(target, hidden))[1])
    gone, left = {}, [0, 1, 2, 3]
    while len(left) > 1:
        trials = {layer: slow_acceptance(model, only(model, [one for one in left if one != layer]), rows) for layer in left}
        best = max(trials, key=trials.get)
        gone[best] = trials[best]
        left.remove(best)
        assert sorted(trials.values())[-1] - sorted(trials.values())[-2] > 1e-4, "a tie would prove nothing"
    removed = student.removals(target, rows, 3)
    assert list(removed) == list(gone) and removed == pytest.approx(gone, abs=1e-5)
    assert max(seen) == 3 and len(seen) > 20
    made = student.pruned(target, layers=2, rows=rows)
    staying = sorted({0, 1, 2, 3} - set(list(gone)[:2]))
    assert torch.equal(logits(made), logits(only(model, staying)))
    assert f"layers {staying[0]}, {staying[1]} of 4 stay" in capsys.readouterr().out
    assert torch.equal(logits(target.model), logits(model))


def test_a_layer_that_does_nothing_goes_first(wide):
    model, rows = wide("qwen3", 4), batch()
    with torch.no_grad():
        for module in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
            module.weight.zero_()
    target = Target.wrap(model)
    assert student.removals(target, rows, 2).items() >= {2: pytest.approx(1.0)}.items()
    made = student.pruned(target, layers=3, intermediate_size=47, rows=rows)
    assert not torch.equal(made.model.layers[2].self_attn.q_proj.weight, model.model.layers[2].self_attn.q_proj.weight)
    assert torch.equal(made.model.layers[2].self_attn.q_proj.weight, model.model.layers[3].self_attn.q_proj.weight)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_widths_are_measured_with_the_layers_that_stay(wide, name):
    model, rows = wide(name, 3), batch()
    sizes = {"hidden_size": 20, "heads": 2, "intermediate_size": 7, "rows": rows}
    made = student.pruned(Target.wrap(model), layers=[0, 2], **sizes)
    alone = student.pruned(Target.wrap(only(model, [0, 2])), layers=[0, 1], **sizes)
    assert same(made, alone) and made.config.to_dict() == alone.config.to_dict()
    target = Target.wrap(model)
    sums = [
        student._importance(target, layers, student._without_features(target, rows))["neuron", "model.layers.2.mlp"]
        for layers in ([0, 2], [0, 1, 2])
    ]
    assert not torch.equal(sums[0].topk(7).indices, sums[1].topk(7).indices)


@pytest.mark.parametrize(
    "name,tensor",
    [("gpt_oss", "self_attn.sinks"), ("phi3", "o_proj.weight|qkv_proj.weight"), ("deepseek_v3", r"q_a_proj.weight|q_b_proj.weight")],
)
def test_widths_without_a_rule_are_refused_by_name(wide, name, tensor):
    target = Target.wrap(wide(name))
    with pytest.raises(ValueError, match=rf"{type(target.model).__name__} has no rule for the width of model\.layers\.0.*({tensor})"):
        student.pruned(target, layers=2, hidden_size=24, rows=batch())


@pytest.mark.parametrize(
    "request_,words",
    [
        ({"layers": 1, "rows": None}, "no rows to measure on"),
        ({"layers": [0], "heads": 2, "rows": None}, "no rows to measure on"),
        ({"layers": []}, r"got layers=\[\]; expected 1 to 2"),
        ({"layers": 3}, "got layers=3; expected 1 to 2"),
        ({"layers": [1, 0]}, "in order"),
        ({"layers": [0, 0]}, "in order"),
        ({"layers": [-1, 0]}, "in order"),
        ({"layers": 1, "heads": 3}, "num_attention_heads 3; .* has 4: expected no more, in steps of 2"),
        ({"layers": 1, "intermediate_size": 49}, "intermediate_size 49; .* has 48"),
        ({"layers": 1, "hidden_size": 0}, "hidden_size 0; .* has 32"),
        ({"layers": 1, "hidden_size": 30}, "'llama' cannot have .*30.*not a multiple of the number of attention heads"),
    ],
)
def test_what_cannot_be_pruned_is_refused_before_anything_is_measured(wide, request_, words, monkeypatch):
    target = Target.wrap(wide("llama"))
    monkeypatch.setattr(student, "removals", None)
    with pytest.raises(ValueError, match=words):
        student.pruned(target, **{"rows": batch()} | request_)


def test_other_refusals(wide):
    deepseek = Target.wrap(wide("deepseek_v3"))
    with pytest.raises(
        ValueError, match=r"DeepseekV3ForCausalLM cannot be cut so: its config makes model\.layers\.0\.mlp\.\S+ \[.*left with none"
    ):
        student.pruned(deepseek, layers=[1])  # its config counts dense layers from the first
    target, rows = Target.wrap(wide("llama")), batch()
    with pytest.raises(ValueError, match="without supervised tokens"):
        student.pruned(target, layers=1, rows=rows | {"loss_mask": torch.zeros(2, 24, dtype=torch.bool)})
    layer = target.layers[0]
    layer.forward = forward = lambda *args, **kwargs: (type(layer).forward(layer, *args, **kwargs),)
    with pytest.raises(ValueError, match="a layer of LlamaForCausalLM gives more than a tensor"):
        student.pruned(target, layers=1, rows=rows)
    with pytest.raises(RuntimeError, match="stop"), target.without([0, 1]):
        ids = torch.tensor([[3, 4]])
        assert torch.equal(target.forward(ids).hidden, target.decoder.norm(target.embed(ids)))
        raise RuntimeError("stop")
    assert layer.forward is forward and "forward" not in target.layers[1].__dict__ and not layer._forward_hooks


@pytest.mark.parametrize("name", [*DENSE, "gpt_oss"])
@pytest.mark.parametrize("lora", [False, True])
def test_hidden_keeps_documents_apart_and_has_gradients(wide, name, lora):
    rows, model = batch(), wide(name)
    model = adapted(model, 4) if lora else model
    states = student.hidden(model, rows)
    for b, places, ids in documents(rows):
        alone = model.model.model(ids) if lora else model.model(ids)
        torch.testing.assert_close(states[b, places], alone.last_hidden_state[0], rtol=1e-4, atol=1e-5)
    states.square().sum().backward()
    trained = {path: parameter.grad for path, parameter in model.named_parameters() if parameter.requires_grad and "lm_head" not in path}
    assert len(trained) > 8 and all(grad is not None for grad in trained.values())


def test_tokens_that_a_student_lacks_are_read_as_its_last(wide):
    model, rows = wide("llama"), batch()
    model.resize_token_embeddings(40, mean_resizing=False)
    assert (rows["input_ids"] >= 40).any()
    clamped = rows | {"input_ids": rows["input_ids"].clamp(max=39)}
    assert torch.equal(student.hidden(model, rows), student.hidden(model, clamped))


@pytest.mark.parametrize("name", ["llama", "tied", "gemma2", "bias"])
@pytest.mark.parametrize("vocab_size", [VOCAB, 40, 60])
def test_the_head_for_the_losses(wide, name, vocab_size):
    model = wide("llama" if name == "bias" else name)
    if name == "bias":
        model.lm_head = nn.Linear(32, VOCAB)
    head, rows = student.head(model, vocab_size), min(vocab_size, VOCAB)
    assert isinstance(head, torch.Tensor) is (name in ("llama", "tied"))
    ids, index = torch.arange(20)[None], torch.arange(20) % rows
    states = student.hidden(model, {"input_ids": ids, "position_ids": ids}).flatten(0, 1)
    chunked_cross_entropy(states, head, index, torch.ones(20), budget=5 * VOCAB).sum.backward()
    grads = {path: parameter.grad.clone() for path, parameter in model.named_parameters()}
    model.zero_grad()
    own = model(ids).logits[0, :, :rows]
    nn.functional.cross_entropy(own, index, reduction="sum").backward()
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(grads[path], parameter.grad, rtol=1e-4, atol=1e-4)
    assert Head.of(model) is Head.of(model) and Head.of(copy.deepcopy(model)) is not Head.of(model)


@pytest.mark.parametrize("lora", [False, True])
def test_a_student_decodes_while_it_is_trained(wide, lora):
    target, model = Target.wrap(wide("llama", 3)), student.pruned(Target.wrap(wide("llama", 3)), layers=[0, 2])
    model = adapted(model, 4) if lora else model
    flags = [parameter.requires_grad for parameter in model.parameters()]
    drafts = student.frozen(model, None)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags and any(flags) and not drafts.model.training
    prompts = [[3, 4, 5], [7]]
    plain = [answer.tokens for answer in Decoder(target).generate(prompts, max_new_tokens=16, stop_ids=())]
    rounds = []
    for _ in range(2):
        done = Decoder(target, DraftModel(drafts, StaticTree.chain(3)), slots=2).generate(prompts, max_new_tokens=16, stop_ids=())
        assert [answer.tokens for answer in done] == plain
        rounds.append([len(answer.rounds) for answer in done])
        ids = torch.tensor([[3, 4, 5]])
        assert torch.equal(drafts.logits(drafts.forward(ids).hidden), logits(model, ids))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * parameter.requires_grad)
    assert rounds[0] != rounds[1]


@pytest.mark.parametrize("name", ["llama", "gemma2", "tied"])
def test_adapters(wide, name, tmp_path):
    base = wide(name)
    before, state = copy.deepcopy(base), torch.get_rng_state()
    model = adapted(base, 3, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(model), logits(before)), "adapters begin as nothing"
    trained = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all(".lora_" in path and "lm_head" not in path for path in trained)
    others = [adapter.with_lora(copy.deepcopy(before), 3, seed=seed) for seed in (1, 2)]
    assert same(model, others[0]) and not same(model, others[1])
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_" in path:
                parameter.normal_(0, 0.15, generator=torch.Generator().manual_seed(len(path)))
    want, kept = logits(model), copy.deepcopy(model)
    assert (want - logits(before)).abs().max() > 0.1
    made = adapter.merged(model)
    torch.testing.assert_close(logits(made), want, rtol=1e-5, atol=1e-5)
    assert type(made) is type(before) and same(model, kept) and torch.equal(logits(model), want)
    assert made.state_dict().keys() == before.state_dict().keys()
    assert torch.equal(logits(reloaded(made, tmp_path)), logits(made))
    layer, path = model.model.model.layers[0].mlp.up_proj, before.model.layers[0].mlp.up_proj
    step = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight  # alpha is twice the rank
    torch.testing.assert_close(made.model.layers[0].mlp.up_proj.weight, path.weight + step, rtol=1e-5, atol=1e-6)
    assert adapter.merged(before) is before


def test_adapters_without_peft(wide, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install draftsmith\[peft\]"):
        adapter.with_lora(wide("llama"), 4)


@pytest.fixture
def saved(tmp_path):
    """rows of the logits, tokenizer -> the folder of a Llama with them, in bf16."""

    def save(rows, tokenizer):
        model = sized()
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.bfloat16().save_pretrained(tmp_path / "m")
        tokenizer.save_pretrained(tmp_path / "m")
        return str(tmp_path / "m")

    return save


@pytest.mark.parametrize("rows", [60, 67, 72])
def test_an_existing_student_may_have_other_padding(saved, rows):
    target = Target.wrap(sized(), small_tokenizer())
    path = saved(rows, small_tokenizer())
    made = student.existing(path, target)
    assert made.dtype == torch.float32 and all(parameter.requires_grad for parameter in made.parameters())
    assert len(made.lm_head.weight) == rows and len(student.head(made, target.vocab_size)) == min(rows, 67)
    want = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(logits(made, torch.tensor([[3, 4, 5]])), logits(want, torch.tensor([[3, 4, 5]])))


def test_an_existing_student_must_have_the_targets_tokens(saved, monkeypatch):
    model = sized()
    target = Target.wrap(model, small_tokenizer())
    reads = []
    monkeypatch.setattr(Target, "load", lambda *args, **kwargs: reads.append(args))
    with pytest.raises(ValueError, match="at token 4 the target has 'b', the draft model has 'c'"):
        student.existing(saved(67, small_tokenizer("acb")), target)
    path = saved(67, small_tokenizer())
    with pytest.raises(ValueError, match="target 'in-memory' has no tokenizer"):
        student.existing(path, Target.wrap(model))
    model.resize_token_embeddings(7, mean_resizing=False)
    with pytest.raises(ValueError, match="token 7 'Question', target 'in-memory' only 7 logits"):
        student.existing(path, Target.wrap(model, small_tokenizer()))
    assert not reads
    tokenizer_check.check_draft(target, path)


def test_rows_for_no_token_are_no_obstacle(target_folder, tmp_path):
    """What the draft model has no logits for it never proposes; what the target has none for it could never accept."""
    folders = {size: shutil.copytree(target_folder, tmp_path / str(size)) for size in (256, 320)}
    for size, folder in folders.items():
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    full, cut, padded = map(str, (target_folder, folders[256], folders[320]))
    for pair in ((full, padded), (padded, full), (full, cut)):
        tokenizer_check.check_pair(*pair)
    with pytest.raises(ValueError, match=r"token 256 '<\|endoftext\|>', target .*256' only 256 logits"):
        tokenizer_check.check_pair(cut, full)
