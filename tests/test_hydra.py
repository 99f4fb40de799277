"""Hydra heads: their arithmetic by hand, what decoding reads against what training reads, the objective against loops in float64."""

import pytest
import torch
from decoding_cases import drafted_children
from head_cases import check_slow_form, gradients
from packed_data import packed
from planting import round_context
from random_targets import random_model, randomise
from transformers import LlamaConfig, LlamaModel

from draftsmith.inference import level_heads
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import NodeOutput
from draftsmith.inference.expand import DynamicTree, parse_tree_spec
from draftsmith.inference.sampler import Sampling
from draftsmith.models import hydra
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train import hydra as train
from draftsmith.train import recipe, setup
from draftsmith.train.hydra import HydraSection, objective
from draftsmith.train.losses import blocks
from draftsmith.train.medusa import MedusaSection
from draftsmith.train.medusa import objective as medusa_objective
from draftsmith.train.plan import trace

VOCAB, WIDTH = 67, 32
PREFIX = {"prefix": True, "attention_heads": 4, "kv_heads": 2, "intermediate_size": 40, "rope_theta": 5000.0}
SETTINGS = {
    "own": {"num_heads": 3},
    "shared": {"num_heads": 3, "num_layers": 3, "share_head": True},
    "++": {"num_heads": 3, "num_layers": 2, "head_bias": True} | PREFIX,
}


@pytest.fixture(scope="module")
def target():
    return Target.wrap(random_model("llama"))


def make(target, name="own", dtype=torch.float32, **more):
    return randomise(new_drafter("hydra", target, dtype=dtype, **SETTINGS[name] | more))


def prefix_by_transformers(drafter) -> LlamaModel:
    """transformers' own model of one layer, with the very parameters of the drafter's prefix layer."""
    config = drafter.config
    sizes = {"num_hidden_layers": 1, "num_attention_heads": config.attention_heads, "num_key_value_heads": config.kv_heads}
    sizes |= {"hidden_size": WIDTH, "intermediate_size": config.intermediate_size, "vocab_size": 1, "rms_norm_eps": config.rms_norm_eps}
    model = LlamaModel(LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}))
    for name, parameter in drafter.prefix_embeding_layer.named_parameters():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._parameters[last] = parameter
    return model.to(drafter.dtype)


def root_states(drafter, hidden):
    """hidden [S,H] of one document -> what its heads read for them [S,H]."""
    return prefix_by_transformers(drafter)(inputs_embeds=hidden[None]).last_hidden_state[0] if drafter.config.prefix else hidden


def logits_by_hand(drafter, root, tokens):
    """Head k's logits [V] from the root state [H] and its k + 1 tokens, from the tensors by name."""
    state, config, k = dict(drafter.named_parameters()), drafter.config, len(tokens) - 1
    x = torch.cat([root, *(drafter.target.embed(torch.tensor(token)) for token in tokens)])
    for j in range(config.num_layers):
        block = f"hydra_mlp.{k}.{j}"
        z = state[f"{block}.linear.weight"] @ x + state[f"{block}.linear.bias"]
        residual = x if j else state[f"{block}.res_connection.weight"] @ x + state[f"{block}.res_connection.bias"]
        x = residual + z * z.sigmoid()
    if config.share_head:
        return drafter.target.logits(x)
    logits = state[f"hydra_lm_head.{k}.weight"] @ x
    return logits + state[f"hydra_lm_head.{k}.bias"] if config.head_bias else logits


def test_every_block_has_weights_of_its_own(target):
    drafter = make(target, "shared")
    linears = [module.linear.weight for module in drafter.modules() if isinstance(module, hydra.ResBlock)]
    assert len(linears) == 9 == len({weight.data_ptr() for weight in linears})
    assert len(drafter.state_dict()) == len(list(drafter.parameters())) == 3 * (4 + 2 * 2)
    embeddings = target.embed(torch.tensor([[4, 5, 6]]))
    root = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    before = drafter.hidden_along(root, embeddings)
    for k in range(3):
        for j in range(3):
            with torch.no_grad():
                drafter.hydra_mlp[k][j].linear.bias += 1
            after = drafter.hidden_along(root, embeddings)
            assert [torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [head != k for head in range(3)]
            before = after


def test_untrained_heads_say_what_the_target_says(target):
    """And so the objective is that of Medusa's untrained heads, whose arithmetic is other code."""
    batch, medusa = packed(VOCAB), new_drafter("medusa", target, num_heads=3)
    of_medusa = medusa_objective(medusa, batch, target=target, section=MedusaSection(heads=3, distill=0.6))
    for name in ("own", "shared"):
        drafter = new_drafter("hydra", target, **SETTINGS[name])
        loss = objective(drafter, batch, target=target, section=HydraSection(heads=3, distill=0.6))
        torch.testing.assert_close(loss.sum, of_medusa.sum, rtol=1e-5, atol=0)
        assert loss.metrics.keys() == of_medusa.metrics.keys() and loss.weight == of_medusa.weight
        for metric, value in loss.metrics.items():
            torch.testing.assert_close(value.double(), of_medusa.metrics[metric].double())
    plus = new_drafter("hydra", target, **SETTINGS["++"])
    hidden = target.forward(batch["input_ids"][:1]).hidden
    expected = hidden * (hidden.square().mean(-1, keepdim=True) + plus.config.rms_norm_eps).rsqrt()
    torch.testing.assert_close(plus.root_states(hidden, batch["position_ids"][:1], batch["document"][:1]), expected)


def test_the_prefix_layer_is_llamas(target):
    drafter, batch = make(target, "++"), packed(VOCAB)
    hidden = target.features(batch).hidden
    states = drafter.root_states(hidden, batch["position_ids"], batch["document"])
    seen = 0
    for b in range(len(hidden)):
        for d in range(int(batch["document"][b].max()) + 1):
            inside = batch["document"][b] == d
            torch.testing.assert_close(states[b, inside], root_states(drafter, hidden[b, inside]), rtol=1e-4, atol=1e-4)
            seen += 1
    assert seen == 8


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tree", [[[0]], [[0], [2], [0, 0], [0, 1], [2, 3], [2, 3, 1], [0, 1, 0]], []])
def test_propose_equals_a_slow_loop(target, name, tree):
    drafter = make(target, name, tree=tree)
    drafter.bind(target, 3, 64)
    slots, prompts = [1, 2], [[4, 5, 6], [7, 8, 9, 10]]
    hidden = target.forward(torch.tensor([[4, 5, 0], [7, 8, 9]])).hidden
    drafter.start(slots, prompts, NodeOutput(hidden))
    proposed = drafter.propose(round_context(slots, [6, 10]))
    proposed.validate()
    paths = drafter.tree_spec.paths
    assert proposed.tokens.shape == (2, len(paths) + 1) == (2, drafter.max_nodes)
    for b, prompt in enumerate(prompts):
        root = root_states(drafter, hidden[b, : len(prompt) - 1])[-1]
        for node, path in enumerate(paths, 1):
            tokens = [prompt[-1]]
            for depth in range(1, len(path)):
                tokens.append(int(proposed.tokens[b, 1 + paths.index(path[:depth])]))
            assert proposed.tokens[b, node] == logits_by_hand(drafter, root, tokens).argsort(descending=True)[path[-1]]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tree", [[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]], DynamicTree(3, 2, 8)])
def test_decoding_reads_what_training_reads(target, name, tree, monkeypatch):
    """In every round, the logits that propose uses are those of the objective on the same tokens."""
    drafter, rounds, levels = make(target, name).eval(), [], []
    drafter.tree_spec = tree if isinstance(tree, DynamicTree) else parse_tree_spec(tree)
    plain_choose, plain_propose, plain_embed = level_heads.choose, drafter.propose, target.embed
    monkeypatch.setattr(level_heads, "choose", lambda logits, *rest: levels.append(logits) or plain_choose(logits, *rest))
    monkeypatch.setattr(target, "embed", lambda ids: inputs.append(ids) or plain_embed(ids))
    inputs = []

    def propose(round):
        levels.clear(), inputs.clear()
        proposed = plain_propose(round)
        rounds.append((round.positions.tolist(), list(levels), list(inputs), proposed))
        return proposed

    drafter.propose = propose
    prompt = [5, 6, 7, 9]
    answer = Decoder(target, drafter).generate([prompt], Sampling(), 30, ())[0]
    drafter.requires_grad_(False)
    monkeypatch.undo()
    text = torch.tensor(prompt + answer.tokens)
    hidden = target.forward(text[None]).hidden
    seen = 0
    for (position,), logits, (root, *_), tree in rounds:
        assert root.tolist() == [text[position]]
        states = drafter.root_states(hidden[:, :position], torch.arange(position)[None], torch.zeros(1, position, dtype=torch.int64))[0]
        for path, _ in drafted_children(tree, 0):
            k = len(path)
            follow = torch.tensor([int(tree.tokens[0, 0]), *path] + [0] * (2 - k))
            x = drafter.hidden_along(states[-1:], target.embed(follow)[None], drafter.head_parameters())[k]
            output = drafter.output(k, drafter.head_parameters())
            expected = output(x) if callable(output) else x @ output.T
            assert (logits[k][0] - expected).abs().amax(-1).min() < 1e-5 * float(expected.abs().max())
            seen += 1
    assert seen > 3 * len(rounds) > 20


@pytest.mark.parametrize(
    ("name", "distill", "top_k"), [("own", 0.0, 0), ("own", 0.4, 0), ("shared", 1.0, 0), ("shared", 1.0, 3), ("++", 0.4, 5), ("++", 1.0, 0)]
)
def test_the_objective_is_the_slow_form(name, distill, top_k, monkeypatch):
    drafter = make(Target.wrap(random_model("llama").double()), name, torch.float64)
    section = HydraSection(heads=3, distill=distill, top_k=top_k, decay=0.7)
    check_slow_form(drafter, objective, section, root_states, logits_by_hand, monkeypatch)


def features_of(target, batch):
    return batch | {"hidden": target.features(batch).hidden.clone()}


@pytest.mark.parametrize("name", ["own", "++"])
def test_prompts_are_not_trained_on(target, name):
    """What the target says of a prompt's own tokens, and hidden states from which only a prompt's tokens are predicted, change nothing."""
    drafter, section = make(target, name), HydraSection(heads=3, distill=0.5)
    batch = features_of(target, packed(VOCAB) | {"loss_mask": packed(VOCAB)["position_ids"] >= 7})
    before = objective(drafter, batch, target=target, section=section)
    slow = gradients(drafter, before.sum)
    # Token 7 is predicted by the heads at positions 3, 4 and 5, from tokens 4 on, and compared with the target at position 6.
    other = batch | {"hidden": batch["hidden"].clone(), "input_ids": batch["input_ids"].clone()}
    inside = (batch["document"] >= 0) & (batch["position_ids"] < (3 if name == "own" else 0))
    other["hidden"][inside] = 50.0
    other["input_ids"][(batch["document"] >= 0) & (batch["position_ids"] < 4)] = 3
    after = objective(drafter, other, target=target, section=section)
    assert torch.equal(before.sum, after.sum) and before.weight == after.weight > 20
    fast = gradients(drafter, after.sum)
    assert all(torch.equal(slow[key], fast[key]) for key in slow)
    other["input_ids"][(batch["document"] >= 0) & (batch["position_ids"] == 4)] = 3  # the root of head 0 … at position 3 is read
    assert not torch.equal(before.sum, objective(drafter, other, target=target, section=section).sum)


@pytest.mark.parametrize("name", ["own", "++"])
def test_documents_never_mix(target, name):
    """The second document of a row, not supervised, may be anything."""
    drafter, section = make(target, name), HydraSection(heads=3, distill=0.5)
    batch = packed(VOCAB)
    batch["loss_mask"] = batch["loss_mask"] & (batch["document"] == 0)
    batch = features_of(target, batch)
    before = objective(drafter, batch, target=target, section=section)
    slow = gradients(drafter, before.sum)
    other = batch | {"hidden": batch["hidden"].clone(), "input_ids": batch["input_ids"].clone()}
    behind = batch["document"] != 0
    assert behind.sum() > 20
    other["hidden"][behind] = torch.randn(int(behind.sum()), WIDTH)
    other["input_ids"][behind] = 3
    after = objective(drafter, other, target=target, section=section)
    fast = gradients(drafter, after.sum)
    torch.testing.assert_close(before.sum, after.sum, rtol=1e-6, atol=0)
    assert all((slow[key] - fast[key]).abs().max() <= 1e-6 * slow[key].abs().max() for key in slow)
    other["hidden"][~behind] = 1.0
    assert not torch.allclose(before.sum, objective(drafter, other, target=target, section=section).sum)


def beside_gradients(heads: int) -> int:
    """Peak bytes of a step of Hydra, less the gradients, which exist twice while blocks add them up."""
    keys = [f"hydra.heads={heads}", "hydra.share_head=true"]
    chosen = recipe.load(train.HydraRecipe, "hydra-tiny.yaml", keys)
    without_values = trace.target_without_values(chosen.target, torch.float32)
    with trace.shapes_only():
        drafter, measure = train.build_untrained(chosen, without_values)
    traced = trace.Step(drafter, measure, without_values, False).run(1, 1024, autocast=False, taps=())
    return traced.peak - 2 * sum(parameter.nbytes for parameter in drafter.parameters())


@pytest.mark.slow
def test_memory_is_flat_in_the_number_of_heads(monkeypatch):
    budget = 1 << 21
    monkeypatch.setattr(blocks, "BUDGET", budget)
    assert max(beside_gradients(3), beside_gradients(6)) < 4 * budget
    monkeypatch.setattr(blocks, "BUDGET", 1 << 40)  # a single block
    assert beside_gradients(6) > 8 * budget


def test_it_starts_from_other_heads(target, tmp_path):
    drafter, fresh = make(target, "++"), new_drafter("hydra", target, **SETTINGS["++"])
    drafter.save_pretrained(tmp_path)
    setup.start_from(fresh, str(tmp_path), target, "hydra.start")
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    other = new_drafter("hydra", target, **SETTINGS["++"] | {"num_layers": 1, "head_bias": False})
    with pytest.raises(ValueError, match=r"hydra\.start=.*: hydra differs in head_bias, num_layers; give a drafter"):
        setup.start_from(other, str(tmp_path), target, "hydra.start")
    with pytest.raises(ValueError, match="differs in .*model_type"):
        setup.start_from(new_drafter("medusa", target, num_heads=3), str(tmp_path), target, "medusa.start")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_heads": 2, "tree": [[0], [0, 0], [0, 0, 0]]}, "3 deep for 2 heads"),
        ({"num_layers": 0}, "num_layers 0; expected"),
        ({"share_head": True, "head_bias": True}, "leave out one of them"),
        ({"prefix": True, "attention_heads": 4, "kv_heads": 3}, "4 attention heads of 8 entries for 3 KV heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(target, settings, says):
    with pytest.raises(ValueError, match=says):
        new_drafter("hydra", target, **settings)
