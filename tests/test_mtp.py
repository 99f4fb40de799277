"""MTP layers: network and loss against loops in float64, decoding against training, checkpoints of other people in and out, a run."""

import json
import math

import pytest
import torch
from commands import failing
from mtp_checkpoints import CONFIGS, COPIES, SHAPES, L, V, add, by_transformers, edit, layer_tensors, save_checkpoint
from packed_data import documents, two_rows
from random_targets import random_model, randomise
from safetensors.torch import load_file, save_file
from zoo import VOCAB, tiny

from draftsmith.eval import loading
from draftsmith.eval.loading import open_models
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import NodeOutput, RoundContext
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.formats.mtp import FILE, read_mtp, shipped_mtp, write_mtp
from draftsmith.models.formats.verify import faults
from draftsmith.models.mtp import KINDS, MtpConfig, layer_of
from draftsmith.models.target import Target
from draftsmith.train import mtp as train
from draftsmith.train.exchange import export, take_in
from draftsmith.train.mtp import MtpSection, objective

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
LAYERS = {  # biases, norms of heads, a head that is not H / heads, and both orders of what fc reads
    "mimo": {"layer": {"model_type": "qwen2", **HEADS}, "layout": "mimo"},
    "deepseek": {"layer": {"model_type": "qwen3", "head_dim": 16, **HEADS}, "layout": "deepseek"},
    "qwen3-next": {"layer": {"model_type": "llama", **HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, "layout": "qwen3-next"},
}  # fmt: skip


def make(target, name="mimo", dtype=torch.float32, **more):
    return randomise(new_drafter("mtp", target, dtype=dtype, **LAYERS[name] | more), 0.3).eval()


class ByLoops:
    """The network over one document, a head and a position at a time, RoPE by complex numbers, every draft from the beginning."""

    def __init__(self, drafter, hidden, ids, hidden_first, norm_output):
        self.weights, self.config = dict(drafter.named_parameters()), drafter.config.layer_config()
        self.embedding = drafter.target.model.get_input_embeddings().weight
        self.hidden, self.ids, self.hidden_first, self.norm_output = hidden, ids, hidden_first, norm_output

    def norm(self, x, name):
        return self.weights[f"{name}.weight"] * x / (x.square().mean() + self.config.rms_norm_eps).sqrt()

    def linear(self, x, name, rows=slice(None)):
        bias = self.weights.get(f"{name}.bias")
        return self.weights[f"{name}.weight"][rows] @ x + (0 if bias is None else bias[rows])

    def head(self, x, name, number, position=None):
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        part = self.linear(x, f"layers.0.self_attn.{name}_proj", slice(number * dim, (number + 1) * dim))
        if f"layers.0.self_attn.{name}_norm.weight" in self.weights:
            part = self.norm(part, f"layers.0.self_attn.{name}_norm")
        if position is None:
            return part
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.tensor([position * theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
        turned = torch.complex(part[: dim // 2], part[dim // 2 :]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag))

    def read(self, feature, token):
        pair = [self.norm(self.embedding[token], "embedding_norm"), self.norm(feature, "hidden_norm")]
        return self.linear(torch.cat(pair[::-1] if self.hidden_first else pair), "fc")

    def last(self, rows):
        """The layer's output at the last of rows [n,H] at positions 0 … n − 1."""
        heads, position = self.config.num_attention_heads, len(rows) - 1
        normed, outs = [self.norm(row, "layers.0.input_layernorm") for row in rows], []
        for h in range(heads):
            kv = h // (heads // self.config.num_key_value_heads)
            query = self.head(normed[-1], "q", h, position)
            scores = torch.stack([query @ self.head(row, "k", kv, s) for s, row in enumerate(normed)]) / math.sqrt(len(query))
            outs.append(sum(share * self.head(row, "v", kv) for share, row in zip(scores.softmax(0), normed, strict=True)))
        x = rows[-1] + self.linear(torch.cat(outs), "layers.0.self_attn.o_proj")
        y = self.norm(x, "layers.0.post_attention_layernorm")
        gate = self.linear(y, "layers.0.mlp.gate_proj")
        return x + self.linear(gate * gate.sigmoid() * self.linear(y, "layers.0.mlp.up_proj"), "layers.0.mlp.down_proj")

    def draft(self, t, steps):
        """What the head reads in each step from the pair at t, along the text: a list of [H]."""
        rows, states = [self.read(self.hidden[i], self.ids[i + 1]) for i in range(t + 1)], []
        for k in range(steps):
            output = self.last(rows)
            states.append(self.norm(output, "norm"))
            if t + 2 + k < len(self.ids):
                rows.append(self.read(states[-1] if self.norm_output else output, self.ids[t + 2 + k]))
        return states


ORDERS = {"mimo": (True, True), "deepseek": (False, False), "qwen3-next": (False, True)}


@pytest.mark.parametrize("name, loss", [("mimo", "nll"), ("deepseek", "nll"), ("qwen3-next", "0.5 kl + 0.5 nll")])
def test_the_objective_is_the_loops(name, loss):
    """Value and gradients, over packed documents whose first tokens, a prompt, are not supervised."""
    target = Target.wrap(random_model("llama").double())
    drafter, batch, steps, beta = make(target, name, torch.float64).train(), two_rows(67, 18), 3, 0.6
    batch["loss_mask"] = (batch["document"] >= 0) & (batch["position_ids"] > 3) & (batch["position_ids"] != 9)
    got = objective(drafter, batch, target=target, section=MtpSection(steps=steps, beta=beta, loss=loss))
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for ids, mask in documents(batch):
        with torch.no_grad():
            out = target.model(ids[None], output_hidden_states=True)
        loops, p = ByLoops(drafter, out.hidden_states[-1][0], ids, *ORDERS[name]), out.logits[0].softmax(-1)
        for t in range(len(ids) - 2):
            for k, state in enumerate(loops.draft(t, min(steps, len(ids) - 2 - t))):
                if not mask[t + 2 + k]:
                    continue
                q, counted = target.logits(state).log_softmax(-1), counted + 1
                nll, kl = -q[ids[t + 2 + k]], (p[t + 1 + k] * (p[t + 1 + k].log() - q)).sum()
                total = total + beta**k / (1 + beta + beta**2) * (nll if loss == "nll" else 0.5 * kl + 0.5 * nll)
    assert counted > 60 and got.weight == batch["loss_mask"].sum()
    torch.testing.assert_close(got.sum, total, rtol=1e-5, atol=0)
    parameters = list(drafter.parameters())
    for ours, theirs in zip(torch.autograd.grad(got.sum, parameters), torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_prompt_and_other_documents_weigh_nothing():
    target = Target.wrap(random_model("llama"))
    drafter, batch = make(target), two_rows(67)
    batch["loss_mask"][:] = False
    nothing = objective(drafter, batch, target=target, section=MtpSection())
    assert nothing.sum == 0 and nothing.weight == 0
    batch["loss_mask"] = (batch["document"] == 1) & (batch["position_ids"] > 4)
    batch["input_ids"][0, :10] = 5  # the first document, of which no token is supervised
    before = objective(drafter, batch, target=target, section=MtpSection()).sum
    batch["input_ids"][0, :9] = 6
    assert objective(drafter, batch, target=target, section=MtpSection()).sum == before


def test_the_weights_are_the_papers():
    """.51, .31 and .18 for three steps. The third token of a document is predicted by step 0 alone, from the first pair."""
    target = Target.wrap(random_model("llama"))
    drafter, batch = make(target), two_rows(67)
    batch["loss_mask"][:] = False
    batch["loss_mask"][1, 2] = True
    alone, weighted = (objective(drafter, batch, target=target, section=MtpSection(beta=beta)).sum.item() for beta in (1e-9, 0.6))
    assert weighted / alone == pytest.approx(0.51, abs=0.005)


@torch.inference_mode()
@pytest.mark.parametrize("name", LAYERS)
def test_drafting_follows_the_forward_that_training_runs(name):
    """A chain's logits at every depth, from a prompt that was encoded in chunks, are those along the text of prompt and chain."""
    target = Target.wrap(tiny("llama"))
    drafter = make(target, name, steps=4)
    prompt = torch.randint(VOCAB, (13,), generator=torch.Generator().manual_seed(1))
    drafter.chunk, drafter.tree_spec, seen = 5, StaticTree.chain(4), []
    logits_of = drafter.logits_of
    drafter.logits_of = lambda output: seen.append(logits_of(output)[0, 0]) or logits_of(output)
    drafter.bind(target, 1, 32)
    drafter.start([0], [prompt.tolist()], NodeOutput(target.forward(prompt[None, :-1]).hidden, None))
    zero = torch.zeros(1, dtype=torch.int64)
    tree = drafter.propose(RoundContext([0], zero, prompt[-1:], zero + 12, zero, Sampling(), 9))
    drafter.logits_of = logits_of
    text = torch.cat((prompt, tree.tokens[0, 1:]))
    along = drafter.position_logits(drafter.position_features(text, target.forward(text[None])), torch.tensor([12]))[0]
    assert len(seen) == 4
    torch.testing.assert_close(torch.stack(seen), along, atol=1e-5, rtol=1e-5)


# Checkpoints


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3-next"])
def test_a_checkpoints_layer_drafts_is_exported_and_imported_by_its_names(name, tmp_path, capsys):
    """Read from the target's checkpoint; losslessly decoded; an artifact of it exported under the very names, and taken in again."""
    layer = save_checkpoint(name, tmp_path / "target")
    target = Target.load(str(tmp_path / "target"))
    shipped = shipped_mtp(target)
    prompts = [[256, 5, 9, 30], [77, 12, 256, 8]]
    plain = [answer.tokens for answer in Decoder(target).generate(prompts, Sampling(), 12, ())]
    assert [answer.tokens for answer in Decoder(target, shipped, slots=2).generate(prompts, Sampling(), 12, ())] == plain
    shipped.save_pretrained(tmp_path / "artifact")
    said = ["--to", "checkpoint", "--output", str(tmp_path / "out"), "--target", str(tmp_path / "target")]
    export.main([str(tmp_path / "artifact"), *said])
    assert "checked by reading it" in capsys.readouterr().out
    stored = load_file(tmp_path / "out" / FILE)
    assert stored.keys() == layer.keys() and all(torch.equal(stored[key], layer[key]) for key in layer)
    assert faults(tmp_path / "out", target) == []
    take_in.main([str(tmp_path / "out"), "--output", str(tmp_path / "again"), "--target", str(tmp_path / "target")])
    again = load_drafter(tmp_path / "again", target)
    assert again.config.layout == shipped.config.layout and again.config.steps == 3 and again.config.tree == shipped.config.tree
    for key, tensor in shipped.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_qwen3_nexts_names_go_both_ways(tmp_path):
    """Such a target is refused for its layers of linear attention; its MTP layer has none."""
    folder = tmp_path / "target"
    layer = save_checkpoint("qwen3-next", folder)
    with pytest.raises(ValueError, match="architecture 'qwen3_next' keeps a recurrent state"):
        Target.load(str(folder))
    target = Target.wrap(tiny("qwen3-next", config=CONFIGS["qwen3-next"]()))
    drafter = read_mtp(folder, dict(layer), target)
    assert drafter.config.layout == "qwen3-next" and drafter.layers[0].block_type == "full_attention"
    (tmp_path / "out").mkdir()
    write_mtp(drafter, tmp_path / "out", torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16", (
        "of the tensors, whatever the target was opened in"
    )
    write_mtp(drafter, tmp_path / "out", torch.float32)
    stored = load_file(tmp_path / "out" / FILE)
    assert stored.keys() == layer.keys() and all(torch.equal(stored[key], layer[key]) for key in layer)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["glm", "deepseek"])
def test_the_first_step_is_that_of_transformers_own_mtp_model(name, tmp_path):
    """Newer versions of transformers have one, which reads the checkpoint by itself."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers has no MtpModel")
    save_checkpoint(name, tmp_path)
    model = by_transformers(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
    theirs = layers.MtpModel.from_pretrained(model).eval()
    target = Target.load(str(tmp_path))
    drafter = shipped_mtp(target)
    ids = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(3))
    hidden, positions = target.forward(ids).hidden, torch.arange(11)[None]
    expected = theirs.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
    features = drafter.position_features(ids[0], target.forward(ids))[:-1, 0]
    torch.testing.assert_close(drafter.before_head(features), expected[0], atol=1e-5, rtol=1e-5)


def mimo_layer(target, tensors, ids):
    """MiMo's own layer over the pairs of a text, written from the description of its modules: [S−1,H] after its final norm."""
    from torch.nn.functional import linear, rms_norm, silu

    part = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in tensors.items()}

    def norm(x, name):
        return rms_norm(x, x.shape[-1:], part[f"{name}.weight"], 1e-6)

    hidden, embedding = target.forward(ids[None]).hidden[0, :-1], target.embed(ids[1:])
    x = linear(torch.cat((norm(hidden, "hidden_layernorm"), norm(embedding, "token_layernorm")), -1), part["input_proj.weight"])
    y, count = norm(x, "input_layernorm"), len(x)
    query, key, value = (
        linear(y, part[f"self_attn.{name}_proj.weight"], part[f"self_attn.{name}_proj.bias"]).view(count, -1, 8).transpose(0, 1)
        for name in "qkv"
    )
    angle = torch.arange(count)[:, None] * 10000 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rope(part):
        turned = torch.complex(part[..., :4], part[..., 4:]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    scores = rope(query) @ rope(key).repeat_interleave(2, 0).transpose(1, 2) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
    out = (scores.softmax(-1) @ value.repeat_interleave(2, 0)).transpose(0, 1).flatten(1)
    x = x + linear(out, part["self_attn.o_proj.weight"])
    y = norm(x, "post_attention_layernorm")
    y = silu(linear(y, part["mlp.gate_proj.weight"])) * linear(y, part["mlp.up_proj.weight"])
    return norm(x + linear(y, part["mlp.down_proj.weight"]), "final_layernorm")


@torch.inference_mode()
def test_mimos_layer_is_read_as_mimo_runs_it(tmp_path):
    """Beside a second implementation by MiMo's own names; the target is loaded without code of its own, as config.json asks for it."""
    layer = save_checkpoint("mimo", tmp_path)
    edit(tmp_path, auto_map={"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"})
    target = Target.load(str(tmp_path))
    drafter = shipped_mtp(target)
    ids = torch.randint(V, (15,), generator=torch.Generator().manual_seed(3))
    features = drafter.position_features(ids, target.forward(ids[None]))[:-1, 0]
    torch.testing.assert_close(drafter.before_head(features), mimo_layer(target, layer, ids), atol=2e-5, rtol=1e-4)


def test_the_command_line_names_the_checkpoints_layer(tmp_path, capsys):
    save_checkpoint("mimo", tmp_path / "with")
    target, (drafter,) = open_models(str(tmp_path / "with"), ["mtp"], "float32")
    assert drafter.method == "mtp" and drafter.depth_limit == 3 and loading.provenance("mtp") == {"name": "mtp", "hash": ""}
    expected = shipped_mtp(target).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in drafter.state_dict().items())
    save_checkpoint("llama", tmp_path / "without", shipped=False)
    with pytest.raises(ValueError, match="has no MTP layer under a name that is known.*mtp.start=null"):
        open_models(str(tmp_path / "without"), ["mtp"], "float32")


def test_other_unexpected_tensors_of_a_target_are_still_refused(tmp_path):
    save_checkpoint("mimo", tmp_path)
    add(tmp_path, {"model.extra.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match="1 unexpected tensors: model.extra.weight"):
        Target.load(str(tmp_path))


def change(name, folder, how):
    """A checkpoint whose MTP tensors `how` has changed."""
    save_checkpoint(name, folder)
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Target.load(str(folder))


FC, EXPERT = "model.mtp_layers.0.input_proj.weight", "model.layers.2.mlp.experts.1.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("mimo", lambda x: x.pop("model.mtp_layers.0.final_layernorm.weight"), "1 missing tensors: norm.weight"),
        ("mimo", lambda x: x.update({FC: torch.zeros(3, 4)}), "1 misshapen tensors: fc.weight"),
        ("mimo", lambda x: x.update({FC: x[FC] * math.nan}), "NaN or infinite weights in fc.weight"),
        ("mimo", lambda x: x.update({"model.mtp_layers.0.conv.weight": torch.zeros(3)}), "1 unexpected tensors: layers.0.conv.weight"),
        ("glm", lambda x: x.pop(EXPERT), r"layers.0.mlp.experts.1 lacks one of gate_proj, up_proj and down_proj"),
        ("glm", lambda x: x.update({EXPERT + "_scale_inv": torch.ones(1)}), "is quantised .*expected floating-point weights"),
        ("deepseek", lambda x: x[next(iter(COPIES))].add_(1), "embed_tokens.weight is not the target's own"),
    ],
)
def test_layers_that_cannot_be_read_are_refused_in_a_line(name, how, said, tmp_path):
    target = change(name, tmp_path, how)
    with pytest.raises(ValueError, match=said) as error:
        shipped_mtp(target)
    assert "\n" not in str(error.value)


def test_targets_whose_layers_were_not_tried_are_refused_with_what_works():
    for name in ("gemma2", "gpt_oss"):
        with pytest.raises(ValueError, match=f"those of '{name}' were not tried; .*nearest: draftsmith train eagle with eagle.version=1"):
            layer_of(tiny(name).config)
    assert {layer_of(tiny(name).config)["model_type"] for name in ("llama", "qwen3", "mistral", "deepseek_v3")} <= KINDS.keys()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layer": None}, "got a layer of None"),
        ({"layer": {"model_type": "gpt2"}}, "got a layer of 'gpt2'"),
        ({"layout": "eagle"}, "layout 'eagle'"),
        ({"steps": 0}, "got 0 steps"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        MtpConfig(**{"hidden_size": 32, "vocab_size": VOCAB, **LAYERS["mimo"], **settings})


def test_a_layer_of_other_settings_is_refused_by_the_file(tmp_path):
    make(Target.wrap(tiny("llama"))).save_pretrained(tmp_path)
    edit(tmp_path, layer={"model_type": "qwen2", "num_attention_heads": "four"})
    with pytest.raises(ValueError, match="`layer` describes no qwen2 layer") as error:
        load_drafter(tmp_path)
    assert "\n" not in str(error.value)


def test_engines_are_refused_with_the_checkpoint(tmp_path, capsys):
    save_checkpoint("mimo", tmp_path / "target")
    shipped_mtp(Target.load(str(tmp_path / "target"))).save_pretrained(tmp_path / "artifact")
    words = [tmp_path / "artifact", "--output", tmp_path / "out", "--target", tmp_path / "target"]
    line = failing(capsys, export.main, [*words, "--to", "vllm"])
    assert "vLLM does not serve an MTP layer (it reads one in the target's checkpoint); nearest: --to checkpoint" in line
    line = failing(capsys, export.main, [*words, "--to", "checkpoint", "--quantise", "int8"])
    assert "--quantise int8 is for engines" in line and not (tmp_path / "out").exists()


# Training


@pytest.fixture
def words(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    data = [f"data.{key}" for key in (f"train={text}", "valid=null", f"cache={tmp_path}", "seq_len=32", "num_proc=1", "template=null")]
    steps = [f"train.{key}" for key in ("steps=6", "batch_size=2", "warmup_steps=0", "eval_batches=2", "eval_every=3", "log_every=1")]
    return ["mtp-tiny", f"target.path={tmp_path / 'target'}", "data.near_duplicate=1.0", *data, *steps, "train.lr=1.0e-4"]


def losses_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("valid_loss")) for row in rows]


@pytest.mark.slow
def test_a_run_starts_from_the_checkpoint_or_an_artifact_and_trains_from_a_store(words, tmp_path):
    layer = save_checkpoint("mimo", tmp_path / "target")
    store = [f"features.store={tmp_path}/store", "features.precision=float32", "features.mode=cache", "mtp.start=target"]
    for name, more in (
        ("cached", store),
        ("online", ["mtp.start=target"]),
        ("again", [f"mtp.start={tmp_path}/online/artifact"]),
        ("fresh", []),
    ):
        train.main([*words, f"train.output={tmp_path / name}", *more])
    online, again = losses_of(tmp_path / "online"), losses_of(tmp_path / "again")
    assert losses_of(tmp_path / "cached") == pytest.approx(online, rel=1e-5) and len(online) >= 8
    assert again[0] < online[0] and losses_of(tmp_path / "fresh")[0] != online[0]
    drafter = load_drafter(tmp_path / "online" / "artifact")
    assert (drafter.config.steps, drafter.config.tree, drafter.config.layout) == (3, [[0], [0, 0], [0, 0, 0]], "mimo")
    moved = (drafter.fc.weight - layer["model.mtp_layers.0.input_proj.weight"]).abs().max()
    assert 0 < moved < 0.01  # six steps of 1e-4 away from the checkpoint's


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["mtp.loss=klx"], "mtp.loss"),
        (["mtp.start=target"], "mtp.start=target: the checkpoint of .* has no MTP layer"),
        (["train.context_parallel=2"], "train.context_parallel=2 is for EAGLE"),
    ],
)
def test_wrong_words_are_refused(words, tmp_path, more, said):
    save_checkpoint("llama", tmp_path / "target", shipped=False)
    with pytest.raises(ValueError, match=said):
        train.main([*words, f"train.output={tmp_path / 'out'}", *more])


def test_the_names_of_the_tests_are_complete():
    """Each layout has its checkpoint, and each checkpoint the tensors that are written by hand."""
    assert SHAPES.keys() == CONFIGS.keys() and L == 2
    assert all(len(layer_tensors(name, tiny(name, config=CONFIGS[name]()))) >= 13 for name in CONFIGS)
