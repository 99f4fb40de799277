"""Folders that engines load: held to the published rules by a checker and a plain drafter that know nothing of ours, and read back."""

import json
import os
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from planting import round_context
from random_targets import random_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.inference.drafter import NodeOutput
from draftsmith.inference.tree import DraftTree
from draftsmith.inference.verify import Verdict
from draftsmith.models import vocab
from draftsmith.models.drafter import new_drafter
from draftsmith.models.formats.eagle import read_eagle, write_eagle
from draftsmith.models.formats.engines import limits_of
from draftsmith.models.target import Target

V, D, H, L, K = 61, 40, 32, 8, 4
CHAIN = [[0] * k for k in range(1, K + 1)]
USUAL = [1, L // 2 - 1, L - 4]
IDS = "eagle_aux_hidden_state_layer_ids"

CASES = {
    "eagle3": {},
    "full vocabulary": {"draft_vocab_size": V},
    "two taps": {"taps": [0, 6]},
    "one key head": {"num_kv_heads": 1, "rope_theta": 500.0},
    "wide heads": {"head_dim": 16},
    "two layers": {"num_layers": 2},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "draft_vocab_size": V},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "speculators' norms": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "eagle1": {"version": 1},
    "eagle1 of two layers": {"version": 1, "num_layers": 2},
}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    sizes = {"hidden_size": H, "intermediate_size": 48, "num_hidden_layers": L, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=64, bos_token_id=1, eos_token_id=[2, 3], **sizes))
    return Target.wrap(wide(model), name="small-llama")


def wide(model, std=0.18):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std) if parameter.ndim > 1 else parameter.normal_(mean=1.0, std=0.3)
    return model


def build(target, **changes):
    three = changes.get("version", 3) == 3
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 44, "steps": K, "tree": CHAIN}
    fields |= {"taps": USUAL, "draft_vocab_size": D} if three else {}
    torch.manual_seed(1)
    drafter = new_drafter("eagle", target, **fields | changes)
    if three and drafter.config.draft_vocab_size < V:
        drafter.take(vocab.choose(torch.randint(1, 100, (V,)), D))
    return wide(drafter).eval()


@pytest.fixture(scope="module", params=CASES)
def pair(request, target, tmp_path_factory):
    drafter = build(target, **CASES[request.param])
    folder = tmp_path_factory.mktemp("export") / "folder"
    write_eagle(drafter, folder)
    return drafter, folder


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "folder"
    assert write_eagle(build(target), folder) == []  # what every engine serves
    return folder


def edited(folder, place, change):
    """A copy of the folder in which change(config, tensors) had its way."""
    copy = shutil.copytree(folder, place / "copy")
    config, tensors = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")
    change(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "model.safetensors")
    return copy


# The rules, written out once more: names and shapes, keys and values.

LAYER = {f"self_attn.{x}_proj.weight": shape for x, shape in (("q", "q X"), ("k", "kv X"), ("v", "kv X"), ("o", "H q"))}
LAYER |= {"mlp.gate_proj.weight": "I H", "mlp.up_proj.weight": "I H", "mlp.down_proj.weight": "H I", "post_attention_layernorm.weight": "H"}


def check(folder, drafter, target, dtype=torch.float32):
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    ours, three = drafter.config, drafter.config.version == 3
    taps, size, several = list(ours.taps or []), ours.draft_vocab_size, ours.num_layers > 1
    letters = {"H": H, "I": ours.intermediate_size, "V": V, "D": size, "TH": len(taps) * H, "2H": 2 * H}
    letters |= {"q": ours.num_heads * ours.head_dim, "kv": ours.num_kv_heads * ours.head_dim}
    names = {"fc.weight": "H TH" if three else "H 2H", "embed_tokens.weight": "V H"}
    for number in range(ours.num_layers):
        prefix = "midlayer." if three and not several else f"layers.{number}."
        names |= {prefix + name: shape.replace("X", "2H" if three and not number else "H") for name, shape in LAYER.items()}
        norms = ["input_layernorm", "hidden_norm"] if three else ["input_layernorm"] if number else []
        names |= {f"{prefix}{norm}.weight": "H" for norm in norms}
    if three:
        names |= {"norm.weight": "H", "lm_head.weight": "D H"} | ({"d2t": "D", "t2d": "V"} if size < V else {})
        names |= {f"fc_norm.{number}.weight": "H" for number in range(len(taps) if ours.fc_norm else 0)}
        names |= {"input_norm.weight": "TH"} if ours.norm_before_fc else {}
    else:
        names["fc.bias"] = "H"
        assert not tensors["fc.bias"].any()
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        name: [letters[letter] for letter in shape.split()] for name, shape in names.items()
    }
    dtypes = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(tensor.dtype == dtypes.get(name, dtype) for name, tensor in tensors.items())
    assert torch.equal(tensors["embed_tokens.weight"], target.model.model.embed_tokens.weight.to(dtype))
    if size < V:
        ids = torch.arange(size) + tensors["d2t"]
        assert (ids.diff() > 0).all() and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)

    expected = {
        "architectures": ["LlamaForCausalLMEagle3"] if three else ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
        "model_type": "llama", "hidden_size": H, "intermediate_size": 44, "num_hidden_layers": ours.num_layers, "num_attention_heads": 4,
        "num_key_value_heads": ours.num_kv_heads, "head_dim": ours.head_dim, "hidden_act": "silu", "rms_norm_eps": ours.rms_norm_eps,
        "max_position_embeddings": 64, "vocab_size": V, "rope_theta": ours.rope_theta, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_theta}, "bias": False, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": str(dtype)[6:], "bos_token_id": 1, "eos_token_id": [2, 3],
        "pad_token_id": 0,
    }  # fmt: skip
    if three:
        expected |= {"draft_vocab_size": size, IDS: [tap + 1 for tap in taps]}
        expected |= {norm: getattr(ours, norm) for norm in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")}
        expected |= {"eagle_config": {"use_aux_hidden_state": True, IDS: taps}} | ({"num_aux_hidden_states": 2} if len(taps) == 2 else {})
    assert config == expected and sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_the_folder_follows_the_rules(pair, target):
    check(pair[1], pair[0], target)


# A plain drafter after the published meaning of these folders.


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Plain:
    """Loads a folder, and drafts with no cache: every step runs all pairs from the first."""

    def __init__(self, folder, model):
        self.model = model
        self.config, self.tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        self.three = "LlamaForCausalLMEagle3" in self.config["architectures"]

    def weight(self, name):
        return self.tensors[name + ".weight"]

    def norm(self, x, name):
        return rms(x, self.weight(name), self.config["rms_norm_eps"])

    @torch.no_grad()
    def features(self, text):
        out = self.model.model(torch.tensor([text]), output_hidden_states=True)
        if not self.three:
            return out.last_hidden_state[0]
        states = [out.hidden_states[index][0] for index in sorted(set(self.config[IDS]))]  # entry i is the input of layer i
        if self.config["fc_norm"]:
            states = [self.norm(state, f"fc_norm.{number}") for number, state in enumerate(states)]
        joined = torch.cat(states, -1)
        return (self.norm(joined, "input_norm") if self.config["norm_before_fc"] else joined) @ self.weight("fc").T

    def attention(self, x, prefix):
        heads, groups, dim = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        query, key, value = (
            (x @ self.weight(f"{prefix}self_attn.{letter}_proj").T).view(len(x), -1, dim).transpose(0, 1) for letter in "qkv"
        )
        angles = torch.arange(len(x))[:, None] * self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        query, key = (one * cos + torch.cat((-one[..., dim // 2 :], one[..., : dim // 2]), -1) * sin for one in (query, key))
        key, value = key.repeat_interleave(heads // groups, 0), value.repeat_interleave(heads // groups, 0)
        scores = query @ key.transpose(1, 2) / dim**0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
        return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1) @ self.weight(f"{prefix}self_attn.o_proj").T

    def run(self, features, tokens):
        """Pairs of a feature and the token after it -> outputs before the last norm."""
        embedding = self.weight("embed_tokens")[torch.tensor(tokens)]
        x = features if self.three else torch.cat((embedding, features), -1) @ self.weight("fc").T + self.tensors["fc.bias"]
        for number in range(self.config["num_hidden_layers"]):
            prefix = "midlayer." if "midlayer.self_attn.q_proj.weight" in self.tensors else f"layers.{number}."
            y = x
            if self.three and number == 0:
                normed = self.norm(x, prefix + "hidden_norm")
                y = torch.cat((self.norm(embedding, prefix + "input_layernorm"), normed), -1)
                x = normed if self.config["norm_before_residual"] else x
            elif number:
                y = self.norm(x, prefix + "input_layernorm")
            x = x + self.attention(y, prefix)
            y = self.norm(x, prefix + "post_attention_layernorm")
            gate, up = (y @ self.weight(f"{prefix}mlp.{name}_proj").T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self.weight(f"{prefix}mlp.down_proj").T
        return x

    @torch.no_grad()
    def propose(self, text, root, features, forced=False):
        """K tokens after the root, whose index in the text is given; `forced`: the text is read in place of what was drafted."""
        features, tokens, proposed = features[:root], text[1 : root + 1], []
        for _ in range(K):
            output = self.run(features, tokens)[-1]
            normed = self.norm(output, "norm") if self.three else output
            draft = int((self.weight("lm_head") @ normed if self.three else self.model.lm_head(normed)).argmax())
            proposed.append(draft + int(self.tensors["d2t"][draft]) if "d2t" in self.tensors else draft)
            features = torch.cat((features, (normed if self.three and self.config["norm_output"] else output)[None]))
            after = len(tokens) + 1
            tokens = [*tokens, (text[after] if after < len(text) else 0) if forced else proposed[-1]]
        return proposed


def texts(count, length=26):
    return torch.randint(V, (count, length), generator=torch.Generator().manual_seed(5)).tolist()


def test_a_plain_drafter_ranks_the_same_tokens_along_a_text(pair, target):
    drafter, folder = pair
    plain, text = Plain(folder, target.model), texts(1)[0]
    ids, features = torch.tensor(text), plain.features(text)
    roots = torch.arange(1, len(text))
    logits = drafter.position_logits(drafter.position_features(ids, target.forward(ids[None], taps=drafter.taps)), roots)
    seen = set()
    for root in roots.tolist():
        known = min(K, len(text) - root)  # the text ends
        tokens = logits[root - 1].argmax(-1).tolist()[:known]
        assert tokens == plain.propose(text, root, features, forced=True)[:known]
        seen.update(tokens)
    assert len(seen) > 8


def proposals(drafter, target, pieces):
    """Two rows of real drafting along texts, 1 to K+1 tokens kept a round: [(row, root, tokens)]."""
    drafter.bind(target, 3, 64)
    outs = [target.forward(torch.tensor([piece]), taps=drafter.taps) for piece in pieces]
    rows, places, proposed, rounds = [2, 0], [2, 5], [], 0

    def part(start, stop):
        hidden = [out.hidden[0, begin:end] for out, begin, end in zip(outs, start, stop, strict=True)]
        taps = [out.taps[0, begin:end] for out, begin, end in zip(outs, start, stop, strict=True)] if drafter.taps else None
        pad = torch.nn.utils.rnn.pad_sequence
        return NodeOutput(pad(hidden, batch_first=True), pad(taps, batch_first=True) if taps else None)

    drafter.start(rows, [piece[: place + 1] for piece, place in zip(pieces, places, strict=True)], part([0, 0], places))
    while max(places) + K + 1 < len(pieces[0]):
        request = round_context(rows, [piece[place] for piece, place in zip(pieces, places, strict=True)])
        tree = drafter.propose(request)
        assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]] * 2
        proposed += [(row, place, tree.tokens[row, 1:].tolist()) for row, place in enumerate(places)]
        # What the target would have kept, had the text been drafted.
        kept = [1 + (rounds + row * 2) % (K + 1) for row in range(2)]
        nodes = torch.tensor([piece[place : place + K + 1] for piece, place in zip(pieces, places, strict=True)])
        path = torch.tensor([[node if node < count else -1 for node in range(K + 1)] for count in kept])
        after = torch.tensor([piece[place + count] for piece, place, count in zip(pieces, places, kept, strict=True)])
        out = part(places, [place + K + 1 for place in places])
        drafted = DraftTree.build(nodes, tree.parents, tree.size)
        drafter.accept(request, drafted, Verdict(path=path, length=torch.tensor(kept), next_token=after), out)
        places, rounds = [place + count for place, count in zip(places, kept, strict=True)], rounds + 1
    return proposed


def agree(folder, target, pieces, proposed):
    plain = Plain(folder, target.model)
    features = [plain.features(piece) for piece in pieces]
    try:
        return all(plain.propose(pieces[row], root, features[row]) == tokens for row, root, tokens in proposed)
    except IndexError:  # a token that is none
        return False


def test_a_plain_drafter_proposes_the_same_chains(pair, target):
    drafter, folder = pair
    pieces = texts(2, 40)
    proposed = proposals(drafter, target, pieces)
    assert len(proposed) > 10 and len({tuple(tokens) for _, _, tokens in proposed}) > 5
    assert agree(folder, target, pieces, proposed)


def swap_halves(config, tensors):
    for letter in "qkv":
        name = f"midlayer.self_attn.{letter}_proj.weight"
        tensors[name] = tensors[name].roll(H, 1)


def swap_norms(config, tensors):
    first, second = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


FAULTS = {
    "hidden before embedding": swap_halves,
    "norms of embedding and hidden swapped": swap_norms,
    "taps one too high": lambda config, tensors: config.update({IDS: [tap + 1 for tap in config[IDS]]}),
    "taps one too low": lambda config, tensors: config.update({IDS: config["eagle_config"][IDS]}),
    "absolute d2t": lambda config, tensors: tensors.update(d2t=tensors["d2t"] + torch.arange(D)),
    "d2t off by one": lambda config, tensors: tensors.update(d2t=tensors["d2t"] - 1),
    "normed output recurs": lambda config, tensors: config.update(norm_output=True),
    "another base of RoPE": lambda config, tensors: config.update(rope_theta=100.0),
    "heads of key and value in another order": lambda config, tensors: tensors.update(
        {f"midlayer.self_attn.{x}_proj.weight": tensors[f"midlayer.self_attn.{x}_proj.weight"].roll(8, 0) for x in "kv"}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault, folder, target, tmp_path):
    pieces = texts(2, 40)
    proposed = proposals(build(target), target, pieces)
    assert agree(folder, target, pieces, proposed)
    assert not agree(edited(folder, tmp_path, FAULTS[fault]), target, pieces, proposed)


# Reading


def same(first, second, target):
    one, other = first.state_dict(), second.state_dict()
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    ids = torch.tensor(texts(1)[0])
    out = target.forward(ids[None], taps=first.taps)
    roots = torch.arange(1, len(ids))
    logits = [drafter.position_logits(drafter.position_features(ids, out)[:, :K], roots) for drafter in (first, second)]
    assert torch.equal(*logits)


def test_round_trip(pair, target, tmp_path):
    drafter, folder = pair
    again = read_eagle(folder, target)
    same(drafter, again, target)
    ignored = ("steps", "tree", "training", "transformers_version")
    ours, theirs = ({key: value for key, value in one.config.to_dict().items() if key not in ignored} for one in (drafter, again))
    assert ours == theirs and not again.training
    write_eagle(again, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_bf16(target, tmp_path):
    drafter = build(target, version=1)
    write_eagle(drafter, tmp_path / "one", torch.bfloat16)
    check(tmp_path / "one", drafter, target, torch.bfloat16)
    again = read_eagle(tmp_path / "one", target)
    assert again.dtype == torch.bfloat16 and again.config.dtype == torch.bfloat16
    assert torch.equal(again.fc.weight, drafter.fc.weight.bfloat16())
    far = torch.tensor([[30_000]])
    assert torch.equal(again._rope(far, torch.float32)[0], drafter._rope(far, torch.float32)[0])  # not rounded


def speculators_names(config, tensors):
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)


def speculators(config, tensors):
    speculators_names(config, tensors)
    keep = ("draft_vocab_size", IDS, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings")
    inner = {key: config.pop(key) for key in list(config) if key not in keep}
    unsaid = ("architectures", "eagle_config", "rope_theta", "rope_scaling", "bias", "torch_dtype")
    inner = {key: value for key, value in inner.items() if key not in unsaid}
    config |= {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0"}
    config |= {"target_hidden_size": None, "embed_requires_grad": False, "transformer_layer_config": inner}
    config |= {"speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": ["LlamaForCausalLM"]}}}


def safeailab(config, tensors):
    """As its own trainer leaves it: no taps, no flags, no embedding, no word of the version."""
    for key in [key for key in config if key.startswith(("eagle", "norm_", "fc_", "rope_"))] + ["bias", "head_dim", "attention_bias"]:
        del config[key]
    config["architectures"] = ["LlamaForCausalLM"]
    del tensors["embed_tokens.weight"]


# config.json as `speculators train` of version 0.9.0 wrote it, with this file's sizes.
WRITTEN_BY_SPECULATORS = """{
  "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "draft_vocab_size": 40, "dtype": "float32",
  "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "embed_requires_grad": false, "fc_norm": false, "norm_before_fc": true,
  "norm_before_residual": true, "norm_output": true,
  "speculators_config": {
    "algorithm": "eagle3", "default_proposal_method": "greedy",
    "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
    "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"}
  },
  "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "target_hidden_size": null, "tie_word_embeddings": false,
  "transformer_layer_config": {
    "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 44, "layer_types": ["full_attention"],
    "max_position_embeddings": 64, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1,
    "num_key_value_heads": 2, "pad_token_id": null, "pretraining_tp": 1, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "sliding_window": 2048, "tie_word_embeddings": false,
    "use_cache": true, "use_sliding_window": false, "vocab_size": 61
  },
  "transformers_version": "5.19.0"
}"""


def written_by_speculators(config, tensors):
    speculators_names(config, tensors)
    config.clear()
    config.update(json.loads(WRITTEN_BY_SPECULATORS))


def test_a_config_that_speculators_wrote(target, tmp_path):
    drafter = build(target, norm_before_fc=True, norm_before_residual=True, norm_output=True)
    write_eagle(drafter, tmp_path / "one")
    same(drafter, read_eagle(edited(tmp_path / "one", tmp_path, written_by_speculators), target), target)


def without_a_word_on_layers(config, tensors):
    config |= {"sliding_window": 2048, "use_sliding_window": False}


def layers_that_see_everything(config, tensors):
    config |= {"sliding_window": 2048, "layer_types": ["full_attention"]}


@pytest.mark.parametrize("change", [speculators_names, speculators, safeailab, without_a_word_on_layers, layers_that_see_everything])
def test_other_peoples_folders(change, folder, target, tmp_path):
    same(build(target), read_eagle(edited(folder, tmp_path, change), target), target)


@pytest.mark.parametrize("left", ["input_layernorm", "hidden_norm"])
def test_the_norm_of_a_further_layer_may_stand_once(left, target, tmp_path):
    drafter = build(target, num_layers=2)
    write_eagle(drafter, tmp_path / "one")
    second = {"input_layernorm": "hidden_norm", "hidden_norm": "input_layernorm"}[left]
    same(drafter, read_eagle(edited(tmp_path / "one", tmp_path, lambda _, t: t.pop(f"layers.1.{second}.weight")), target), target)
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(ValueError, match="layers.1.* differ"):
        read_eagle(edited(tmp_path / "one", tmp_path, lambda _, t: t[f"layers.1.{second}.weight"].add_(1)), target)
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(ValueError, match="1 missing tensors: layers.1.input_layernorm.weight"):
        read_eagle(edited(tmp_path / "one", tmp_path, lacking("layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight")), target)


def having(**changes):
    return lambda config, tensors: config.update(changes)


def lacking(*names):
    return lambda config, tensors: [(config if name in config else tensors).pop(name) for name in names]


def tensor(name, made):
    return lambda config, tensors: tensors.update({name: made(tensors)})


REFUSED = {
    "no fc": (lacking("fc.weight"), "1 missing tensors: fc.weight"),
    "no norm": (lacking("midlayer.hidden_norm.weight"), "1 missing tensors: midlayer.hidden_norm.weight"),
    "no map": (lacking("d2t"), "missing tensors: d2t"),
    "another tensor": (tensor("input_norm.weight", lambda t: torch.ones(3 * H)), "1 unexpected tensors: input_norm.weight"),
    "both namings": (tensor("layers.0.hidden_norm.weight", lambda t: torch.ones(H)), "unexpected tensors: layers.0.hidden_norm.weight"),
    "a bias": (tensor("fc.bias", lambda t: torch.zeros(H)), "unexpected tensors: fc.bias"),
    "a map where D = V": (having(draft_vocab_size=V), "unexpected tensors: d2t, t2d"),
    "misshapen": (tensor("norm.weight", lambda t: torch.ones(H + 1)), r"misshapen tensors: norm.weight \[33\] for \[32\]"),
    "another D": (having(draft_vocab_size=D - 1), "misshapen tensors: d2t"),
    "absolute d2t": (tensor("d2t", lambda t: t["d2t"] + torch.arange(D)), "d2t holds target ids"),
    "another run's t2d": (tensor("t2d", lambda t: t["t2d"].roll(1)), "d2t and t2d disagree"),
    "another embedding": (tensor("embed_tokens.weight", lambda t: t["embed_tokens.weight"] * 1.1), "is not the embedding of target"),
    "unknown key": (having(mask_token_id=3), "keys unknown to EAGLE-3 here: mask_token_id"),
    "no size": (lacking("num_hidden_layers"), "lacks num_hidden_layers"),
    "two norms of the taps": (having(norm_before_fc=True, fc_norm=True), "fc_norm and norm_before_fc"),
    "bias": (having(bias=True), "bias = True; expected False"),
    "attention_bias": (having(attention_bias=True), "attention_bias = True"),
    "another activation": (having(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "another model": (having(model_type="qwen3"), "model_type = 'qwen3'"),
    "a sliding window": (having(sliding_window=2048), "sliding_window = 2048; expected none, or layer_types or use_sliding_window"),
    "a window in use": (having(sliding_window=2048, use_sliding_window=True, layer_types=["full_attention"]), "use_sliding_window = True"),
    "a layer with a window": (having(layer_types=["sliding_attention"]), r"layer_types = \['sliding_attention'\]; expected full_attention"),
    "types of two layers": (having(layer_types=["full_attention"] * 2), "expected full_attention for each of 1"),
    "a word for layer types": (having(layer_types="full_attention"), "layer_types = 'full_attention'"),
    "a number for layer types": (having(layer_types=1), "another kind"),
    "scaled RoPE": (having(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "scales its RoPE"),
    "two bases of RoPE": (having(rope_theta=500.0), r"2 values of rope_theta, \[500.0, 10000.0\]"),
    "and in its scaling": (having(rope_scaling={"rope_type": "default", "rope_theta": 3.0}), "2 values of rope_theta"),
    "taps one off": (having(**{IDS: USUAL}), r"\[1, 3, 4\] \(inputs\) and, in eagle_config, \[1, 3, 4\] \(outputs\)"),
    "the embedding as a tap": (lambda c, t: (c.update({IDS: [0, 4, 5]}), c.pop("eagle_config")), r"outputs \[-1, 3, 4\]"),
    "no such layer": (lambda c, t: (c.update({IDS: [2, 4, 9]}), c.pop("eagle_config")), r"outputs \[1, 3, 8\].*0\.\.7"),
    "descending taps": (lambda c, t: (c.update({IDS: [5, 4, 2]}), c.pop("eagle_config")), "expected ascending"),
    "another count of taps": (having(num_aux_hidden_states=4), "num_aux_hidden_states = 4 and 3 taps"),
    "other features": (having(eagle_config={"use_aux_hidden_state": False}), "eagle_config.use_aux_hidden_state = False"),
    "another hidden size": (having(target_hidden_size=64), r"hidden size and vocabulary \(64, 61\); 'small-llama' has \(32, 61\)"),
    "another vocabulary": (having(vocab_size=V + 1), r"\(32, 62\)"),
    "a word for a size": (having(num_hidden_layers="1"), "num_hidden_layers = '1'; expected a positive number"),
    "a number for a flag": (having(fc_norm=1), "fc_norm = 1; expected true or false"),
    "a word for taps": (lambda c, t: (c.update({IDS: "2,4,5"}), c.pop("eagle_config")), "another kind"),
    "unknown architecture": (having(architectures=["DFlashDraftModel"]), "architectures"),
    "EAGLE-1 by name": (having(architectures=["LlamaForCausalLMEagle"]), "keys unknown to EAGLE-1 here: draft_vocab_size"),
    "speculators without residual": (
        lambda c, t: (speculators(c, t), c.pop("norm_before_residual")),
        "lacks norm_before_residual: without it vLLM takes true",
    ),
    "two values": (
        lambda c, t: c.update(transformer_layer_config={"hidden_size": 64}),
        "hidden_size = 32 and, in transformer_layer_config",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, folder, target, tmp_path):
    change, words = REFUSED[case]
    copy = edited(folder, tmp_path, change)
    with pytest.raises(ValueError, match=words) as caught:
        read_eagle(copy, target)
    assert str(copy) in str(caught.value) and "\n" not in str(caught.value)


def test_every_tensor_is_needed(pair, target, tmp_path):
    for name in load_file(pair[1] / "model.safetensors"):
        if name in ("embed_tokens.weight", "fc.bias") or name.startswith("layers.1.") and "_layernorm" not in name and "norm" in name:
            continue
        if pair[0].config.num_layers > 1 and name == "layers.1.input_layernorm.weight" and pair[0].config.version == 3:
            continue  # under another name too
        with pytest.raises(ValueError, match=f"missing tensors: {name}"):
            read_eagle(edited(pair[1], tmp_path, lacking(name)), target)
        shutil.rmtree(tmp_path / "copy")


def test_eagle1_with_a_bias(target, tmp_path):
    drafter = build(target, version=1)
    write_eagle(drafter, tmp_path / "one")
    same(drafter, read_eagle(edited(tmp_path / "one", tmp_path, lacking("fc.bias", "embed_tokens.weight", "bias")), target), target)
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(ValueError, match="fc.bias is not zero"):
        read_eagle(edited(tmp_path / "one", tmp_path, lambda _, t: t["fc.bias"].add_(0.1)), target)
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(ValueError, match="unexpected tensors: layers.0.input_layernorm.weight"):
        read_eagle(edited(tmp_path / "one", tmp_path, tensor("layers.0.input_layernorm.weight", lambda t: torch.ones(H))), target)


def test_pickles_and_broken_folders(folder, target, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match="one file"):
        read_eagle(copy, target)
    (copy / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="pickle"):
        read_eagle(copy, target)
    (copy / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        read_eagle(copy, target)


# Writing


LINES = {
    "full vocabulary": ({"draft_vocab_size": V}, []),
    "other taps": ({"taps": [0, 3, 6]}, [r"TensorRT-LLM: needs eagle3_layers_to_capture: \[0, 3, 6\]", "SafeAILab: reads the outputs"]),
    "two taps": ({"taps": [0, 6]}, ["TensorRT-LLM: needs", "SafeAILab: reads the outputs", "llama.cpp: reads three taps, not 2"]),
    "one tap": ({"taps": [6]}, ["SGLang: leaves fc", "TensorRT-LLM: needs .*; leaves fc", "SafeAILab", "llama.cpp"]),
    "two layers": ({"num_layers": 2}, ["SafeAILab: has one layer, not 2", "llama.cpp: has one layer"]),
    "head_dim": ({"head_dim": 16}, ["SafeAILab: has no head_dim, here 16"]),
    "speculators' norms": (
        {"norm_before_fc": True, "norm_before_residual": True},
        [
            "SGLang: has no norm_before_fc; has no norm_before_residual",
            "TensorRT-LLM: has no norm_before_fc; has no norm_before_residual",
            "SafeAILab: has no norm_before_fc; has no norm_before_residual",
            "llama.cpp: has no norm_before_fc",
        ],
    ),
    "3.1": ({"fc_norm": True, "norm_output": True}, ["SafeAILab: has neither fc_norm nor", "llama.cpp: has neither"]),
    "narrow": (
        {"draft_size": 16},
        [f"{engine}: reads an embedding" for engine in ("vLLM", "SGLang", "TensorRT-LLM", "SafeAILab", "llama.cpp")],
    ),
    "eagle1": ({"version": 1}, ["TensorRT-LLM: loads no EAGLE-1", "llama.cpp: loads no EAGLE-1"]),
}


@pytest.mark.parametrize("case", LINES)
def test_engines_that_fall_away_are_named(case, target, tmp_path):
    changes, expected = LINES[case]
    lines = write_eagle(build(target, **changes), tmp_path / "one")
    assert len(lines) == len(expected) and all("\n" not in line for line in lines)
    for line, words in zip(lines, expected, strict=True):
        assert re.match(words, line)


@pytest.mark.parametrize("name, words", [("gemma2", "its soft-capping"), ("cohere", "its scale 0.0625"), ("granite", "its scale 0.1667")])
def test_a_head_that_is_not_plain_is_said(name, words, tmp_path):
    given = Target.wrap(random_model(name))
    lines = write_eagle(new_drafter("eagle", given, version=1, num_heads=4, num_kv_heads=2), tmp_path / "one")
    assert lines[0] == f"vLLM: applies the target's head without {words}: equal first choices, other probabilities"
    assert any("without its scaling" in line for line in lines) == (name == "gemma2")
    three = new_drafter("eagle", given, taps=[0, 1, 2], num_heads=4, num_kv_heads=2)
    assert not any("head without" in line for line in write_eagle(three, tmp_path / "three"))
    read_eagle(tmp_path / "three", given)


def test_a_scale_changes_the_sum_of_two_heads():
    """A scaled head ranks as the head does; DSpark adds its Markov head to it."""
    given = Target.wrap(random_model("cohere"))
    for method, refused in (("dflash", False), ("dspark", True)):
        drafter = new_drafter(method, given, taps=[0, 1], num_heads=4, num_kv_heads=2, mask_token_id=3)
        limits = [limit for limit in limits_of(drafter, given) if "without its scale" in limit.why and limit.engine == "vLLM"]
        assert [limit.refused for limit in limits] == [refused]


def test_a_scaled_embedding_is_written_as_it_is_read(tmp_path):
    given = Target.wrap(random_model("gemma2"))
    write_eagle(new_drafter("eagle", given, version=1, num_heads=4), tmp_path / "one")
    stored = load_file(tmp_path / "one" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(stored, given.embed(torch.arange(67))) and not torch.equal(stored, given.model.model.embed_tokens.weight)
    with pytest.raises(ValueError, match="embed_tokens.weight is missing, and target 'in-memory' scales"):
        read_eagle(edited(tmp_path / "one", tmp_path, lacking("embed_tokens.weight")), given)


def test_a_narrow_drafter_comes_back(target, tmp_path):
    drafter = build(target, draft_size=16)
    write_eagle(drafter, tmp_path / "one")
    assert json.loads((tmp_path / "one" / "config.json").read_text())["target_hidden_size"] == H
    same(drafter, read_eagle(tmp_path / "one", target), target)


def test_what_cannot_be_written(target, tmp_path):
    with pytest.raises(ValueError, match=r"taps \[6, 3, 1\]"):
        write_eagle(build(target, taps=[6, 3, 1]), tmp_path)
    fresh = new_drafter("eagle", target, taps=USUAL, num_heads=4, draft_vocab_size=D)
    with pytest.raises(ValueError, match="d2t"):
        write_eagle(fresh, tmp_path)
    build(target).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="another format"):
        write_eagle(build(target), tmp_path / "ours")
    assert os.listdir(tmp_path) == ["ours"]


@pytest.mark.parametrize("broken", ["models.formats.eagle.save_file", "inference.durable.os.fsync", "inference.durable.Path.replace"])
def test_a_failed_write_leaves_what_was_there(broken, folder, target, tmp_path, monkeypatch):
    copy = shutil.copytree(folder, tmp_path / "copy")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(f"draftsmith.{broken}", full)
    with pytest.raises(OSError):
        write_eagle(build(target, draft_vocab_size=V), copy)
    monkeypatch.undo()
    assert sorted(os.listdir(copy)) == ["config.json", "model.safetensors"]
    same(build(target), read_eagle(copy, target), target)
