"""MLP and LSTM speculators: their recurrence by hand, what decoding reads against what training reads, the objective against loops in float64."""

import json
import math

import pytest
import torch
from decoding_cases import drafted_children
from head_cases import check_slow_form, gradients
from packed_data import packed
from planting import round_context
from random_targets import random_model, randomise

from draftsmith.inference import level_heads
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import NodeOutput
from draftsmith.inference.expand import DynamicTree, parse_tree_spec
from draftsmith.inference.sampler import Sampling
from draftsmith.models.drafter import new_drafter
from draftsmith.models.mlp import MlpConfig
from draftsmith.models.target import Target
from draftsmith.train import mlp as train
from draftsmith.train import recipe, setup
from draftsmith.train.losses import blocks
from draftsmith.train.mlp import MlpSection, objective
from draftsmith.train.plan import trace

VOCAB, WIDTH = 67, 32
SETTINGS = {
    "tied": {"num_heads": 3, "inner_size": 20},
    "own": {"num_heads": 3, "inner_size": 24, "tie_weights": False, "scale_input": False},
    "lstm": {"num_heads": 3, "inner_size": 20, "cell": "lstm"},
}


@pytest.fixture(scope="module")
def target():
    return Target.wrap(random_model("llama"))


def make(target, name="tied", dtype=torch.float32, **more):
    return randomise(new_drafter("mlp", target, dtype=dtype, **SETTINGS[name] | more), 0.4)


def by_hand(drafter, hidden, tokens):
    """The states of the first heads on hidden [H] and their tokens, from the tensors by name: each gate and each number written out."""
    tensors, config = dict(drafter.named_parameters()), drafter.config
    heads, inner, tied = config.num_heads, config.inner_size, config.tie_weights
    state_weight = 0.5 ** (1 / (2 * heads))
    token_weight = math.sqrt((1 - state_weight**2) * inner / 2)

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def norm(x, name):
        return tensors[f"{name}.weight"] * x / (x.pow(2).sum() / inner + 1e-6).sqrt() + tensors[f"{name}.bias"]

    s, c, states = hidden, torch.zeros(inner, dtype=hidden.dtype), []
    if config.scale_input:
        s = s / (s.pow(2).sum() / len(s) + 1e-6).sqrt() / math.sqrt(2)
    for k, token in enumerate(tokens):
        own, proj = (0, 0 if k == 0 else 1) if tied else (k, k)
        projected, embedded = tensors[f"proj.{proj}.weight"] @ s, tensors[f"emb.{own}.weight"][token]
        x = projected + (token_weight / state_weight) * embedded.repeat(len(projected) // inner)
        if config.cell == "mlp":
            s = gelu(norm(x, f"ln.{own}"))
        else:
            forget, write, read = (1 / (1 + torch.exp(-x[i * inner : (i + 1) * inner])) for i in range(3))
            c = forget * c + write * gelu(norm(x[3 * inner :], "cell_ln.0"))
            s = read * gelu(norm(c, "state_ln.0"))
        states.append(s)
    return states


def logits_by_hand(drafter, hidden, tokens):
    """The logits [V] of the last of as many heads as there are tokens."""
    state = by_hand(drafter, hidden, tokens)[-1]
    return drafter.get_parameter(f"head.{0 if drafter.config.tie_weights else len(tokens) - 1}.weight") @ state


@pytest.mark.parametrize("name", SETTINGS)
def test_the_recurrence_is_the_papers(target, name):
    drafter = make(target, name, torch.float64)
    random = torch.Generator().manual_seed(0)
    hidden, tokens = 3 * torch.randn(4, 5, WIDTH, generator=random).double(), torch.randint(VOCAB, (4, 5, 3), generator=random)
    logits, states = drafter(hidden, tokens), drafter.states_along(hidden, tokens)
    assert logits.shape == (4, 5, 3, VOCAB) and logits.abs().max() > 0.5
    for b in range(4):
        for t in range(5):
            expected = by_hand(drafter, hidden[b, t], tokens[b, t].tolist())
            for k in range(3):
                torch.testing.assert_close(states[k][b, t], expected[k], rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(logits[b, t, k], logits_by_hand(drafter, hidden[b, t], tokens[b, t, : k + 1].tolist()))


def test_fresh_weights_are_the_authors(target):
    """N(0, 1 / √min(shape)) of each matrix, of an LSTM's projection of each of its four, and norms that do nothing."""
    torch.manual_seed(0)
    wide = Target.wrap(random_model("llama"))
    for cell in ("mlp", "lstm"):
        drafter = new_drafter("mlp", wide, cell=cell, inner_size=16)
        deviations = {name: float(tensor.detach().std()) for name, tensor in drafter.named_parameters() if tensor.ndim > 1}
        assert deviations == pytest.approx(dict.fromkeys(deviations, 16**-0.5), rel=0.12) and len(deviations) == 4
        norms = {name: tensor for name, tensor in drafter.named_parameters() if "ln." in name}
        assert len(norms) == (4 if cell == "lstm" else 2)
        assert all(torch.equal(tensor, torch.full_like(tensor, name.endswith("weight"))) for name, tensor in norms.items())


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_shared_where_they_are_tied_and_nowhere_else(target, name):
    drafter = make(target, name)
    tensors = drafter.state_dict()
    assert len(tensors) == len({tensor.data_ptr() for tensor in tensors.values()}) == drafter.config.least_tensors
    assert len(tensors) == {"tied": 6, "own": 15, "lstm": 8}[name]
    hidden, tokens = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0)), torch.tensor([[4, 5, 6]])
    before = drafter(hidden, tokens)
    with torch.no_grad():
        drafter.emb[-1].weight[6] += 1  # the last head's token
    after = drafter(hidden, tokens)
    assert [torch.equal(before[0, k], after[0, k]) for k in range(3)] == [True, True, False]
    with torch.no_grad():
        drafter.head[-1].weight += 1
    again = drafter(hidden, tokens)
    assert [torch.equal(after[0, k], again[0, k]) for k in range(3)] == ([True, True, False] if name == "own" else [False] * 3)


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
        for node, path in enumerate(paths, 1):
            tokens = [prompt[-1], *(int(proposed.tokens[b, 1 + paths.index(path[:depth])]) for depth in range(1, len(path)))]
            logits = logits_by_hand(drafter, hidden[b, len(prompt) - 2], tokens)
            assert proposed.tokens[b, node] == logits.argsort(descending=True)[path[-1]]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tree", [[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]], DynamicTree(3, 2, 8)])
def test_decoding_reads_what_training_reads(target, name, tree, monkeypatch):
    """In every round, the logits that propose uses are those of the objective on the same tokens."""
    drafter, rounds, levels = make(target, name).eval(), [], []
    drafter.tree_spec = tree if isinstance(tree, DynamicTree) else parse_tree_spec(tree)
    plain_choose, plain_propose = level_heads.choose, drafter.propose
    monkeypatch.setattr(level_heads, "choose", lambda logits, *rest: levels.append(logits) or plain_choose(logits, *rest))

    def propose(round):
        levels.clear()
        proposed = plain_propose(round)
        rounds.append((round.positions.tolist(), list(levels), proposed))
        return proposed

    drafter.propose = propose
    prompt = [5, 6, 7, 9]
    answer = Decoder(target, drafter).generate([prompt], Sampling(), 30, ())[0]
    drafter.requires_grad_(False)
    text = torch.tensor(prompt + answer.tokens)
    hidden, seen = target.forward(text[None]).hidden[0], 0
    for (position,), logits, tree in rounds:
        assert tree.tokens[0, 0] == text[position]
        for path, _ in drafted_children(tree, 0):
            k = len(path)
            follow = torch.tensor([int(tree.tokens[0, 0]), *path] + [0] * (2 - k))
            given = drafter.head_parameters()
            x = drafter.states_along(hidden[position - 1], follow, given)[k]
            expected = drafter.outputs(given)[k if name == "own" else 0] @ x
            assert (logits[k][0] - expected).abs().amax(-1).min() < 1e-5 * float(expected.abs().max())
            seen += 1
    assert seen > 3 * len(rounds) > 20


@pytest.mark.parametrize(("name", "distill"), [("tied", 0.0), ("tied", 0.4), ("own", 0.0), ("own", 0.4), ("lstm", 1.0)])
def test_the_objective_is_the_slow_form(name, distill, monkeypatch):
    drafter = make(Target.wrap(random_model("llama").double()), name, torch.float64)
    section = MlpSection(heads=3, distill=distill, decay=0.7)
    check_slow_form(drafter, objective, section, lambda _, hidden: hidden, logits_by_hand, monkeypatch)


def test_metrics_count_what_each_head_hits(target):
    """Of the tokens that a head predicts, those that it ranks first: the text's, and with KL alone the target's own choice."""
    drafter, batch = make(target), packed(VOCAB)
    hidden, ids, mask, document = target.features(batch).hidden, batch["input_ids"], batch["loss_mask"], batch["document"]
    for distill in (0.0, 1.0):
        loss, hits = objective(drafter, batch, target=target, section=MlpSection(heads=3, distill=distill)), torch.zeros(3, 2)
        for b in range(len(ids)):
            for t in range(24):
                for k in range(3):
                    there = t + 2 + k
                    if there < 24 and mask[b, there] and document[b, there] == document[b, t]:
                        best = logits_by_hand(drafter, hidden[b, t], ids[b, t + 1 : there].tolist()).argmax()
                        right = target.logits(hidden[b, there - 1]).argmax() if distill else ids[b, there]
                        hits[k] += torch.tensor([best == right, True])
        assert hits[:, 0].sum() > 0
        for k in range(3):
            assert float(torch.div(*loss.metrics[f"top1_head{k + 1}"])) == pytest.approx(float(hits[k, 0] / hits[k, 1]))


@pytest.mark.parametrize("name", ["tied", "lstm"])
def test_prompts_and_other_documents_are_not_trained_on(target, name):
    """What the target says of a prompt's own tokens, hidden states from which only those are predicted, and unsupervised documents."""
    drafter, section, batch = make(target, name), MlpSection(heads=3, distill=0.5), packed(VOCAB)
    batch["loss_mask"] = (batch["position_ids"] >= 7) & (batch["document"] == 0)
    batch["hidden"] = target.features(batch).hidden.clone()
    before = objective(drafter, batch, target=target, section=section)
    slow = gradients(drafter, before.sum)
    # Token 7 is predicted by the heads at positions 3, 4 and 5, from tokens 4 on, and compared with the target at position 6.
    other = batch | {"hidden": batch["hidden"].clone(), "input_ids": batch["input_ids"].clone()}
    first = batch["document"] == 0
    other["hidden"][~first | (batch["position_ids"] < 3)] = 50.0
    other["input_ids"][~first | (batch["position_ids"] < 4)] = 3
    after = objective(drafter, other, target=target, section=section)
    assert torch.equal(before.sum, after.sum) and before.weight == after.weight > 10
    fast = gradients(drafter, after.sum)
    assert all((slow[key] - fast[key]).abs().max() <= 1e-6 * slow[key].abs().max() for key in slow)
    other["input_ids"][first & (batch["position_ids"] == 4)] = 3  # the root of the heads at position 3 is read
    assert not torch.equal(before.sum, objective(drafter, other, target=target, section=section).sum)


def beside_gradients(heads: int, *keys: str) -> int:
    """Peak bytes of a step, less the gradients, which exist twice while blocks add them up."""
    chosen = recipe.load(train.MlpRecipe, "mlp-tiny.yaml", [f"mlp.heads={heads}", *keys])
    without_values = trace.target_without_values(chosen.target, torch.float32)
    with trace.shapes_only():
        drafter, measure = train.build_untrained(chosen, without_values)
    traced = trace.Step(drafter, measure, without_values, False).run(1, 512, autocast=False, taps=())
    return traced.peak - 2 * sum(parameter.nbytes for parameter in drafter.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "keys"), [(6, ["mlp.distill=0.5"]), (4, ["mlp.cell=lstm"])])
def test_memory_is_flat_in_the_number_of_heads(heads, keys, monkeypatch):
    """Tied heads have one gradient, and blocks bound the states."""
    budget = 1 << 21  # numbers of four bytes
    monkeypatch.setattr(blocks, "BUDGET", budget)
    few, many = beside_gradients(heads // 2, *keys), beside_gradients(heads, *keys)
    assert max(few, many) < 1.25 * 4 * budget and many < 1.1 * few + 4e6
    monkeypatch.setattr(blocks, "BUDGET", 1 << 40)  # a single block
    assert beside_gradients(heads, *keys) > 2 * 4 * budget


def test_it_starts_from_other_heads(target, tmp_path):
    drafter, fresh = make(target, "lstm"), new_drafter("mlp", target, **SETTINGS["lstm"])
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["cell"] == "lstm"
    setup.start_from(fresh, str(tmp_path), target, "mlp.start")
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    with pytest.raises(ValueError, match=r"mlp\.start=.*: mlp differs in cell; give a drafter"):
        setup.start_from(new_drafter("mlp", target, **SETTINGS["tied"]), str(tmp_path), target, "mlp.start")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_heads": 2, "tree": [[0], [0, 0], [0, 0, 0]]}, "3 deep for 2 heads"),
        ({"num_heads": 0}, "num_heads 0; expected"),
        ({"cell": "gru"}, "cell 'gru'; expected one of mlp, lstm"),
        ({"cell": "lstm", "tie_weights": False}, "leave it out"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(target, settings, says):
    with pytest.raises(ValueError, match=says):
        new_drafter("mlp", target, **settings)


def test_keys_that_do_not_fit_are_refused():
    assert MlpConfig(hidden_size=8, vocab_size=9).inner_size == 8
    for keys, says in (
        (["mlp.cell=lstm", "mlp.tie_weights=false"], "mlp.tie_weights=false"),
        (["mlp.heads=40", "data.seq_len=32"], "mlp.heads=40"),
    ):
        with pytest.raises(ValueError, match=says):
            train.check(recipe.load(train.MlpRecipe, "mlp-tiny.yaml", keys))
