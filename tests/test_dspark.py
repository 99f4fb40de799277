"""DSpark: the objective against loops in float64, its Markov head, and chains that end where the confidence falls."""

import math

import pytest
import torch
from packed_data import packed, rows_of_24
from random_targets import random_model, randomise
from safetensors.torch import load_file

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.dspark import MARKOV, DsparkConfig
from draftsmith.models.formats.dflash import read_dflash, write_dflash
from draftsmith.models.target import Target
from draftsmith.train import dspark as train
from draftsmith.train import setup
from draftsmith.train.dspark import DsparkSection, calibrate, objective
from draftsmith.train.losses.anchors import draw_anchors, tokens_behind
from draftsmith.train.losses.calibration import fit_temperatures, survival_errors
from draftsmith.train.recipe import load

VOCAB = 67
PROMPTS = [[5, 6, 7], [9, 3], [1, 2, 3, 4, 5, 6, 11, 30], [8], [4, 4, 4, 2]]


@pytest.fixture(scope="module")
def target():
    return Target.wrap(random_model("llama"))


def make(target, dtype=torch.float32, **more):
    settings = {"taps": [0, 1], "num_heads": 4, "num_kv_heads": 2, "block_size": 4, "markov_rank": 6, "num_layers": 1} | more
    return randomise(new_drafter("dspark", target, dtype=dtype, **settings), 0.4)


def test_fresh_heads_say_nothing(target):
    """Until they are trained the Markov head adds nothing, and the confidence is one half."""
    drafter = new_drafter("dspark", target, taps=[0, 1], num_heads=4, block_size=4)
    states, previous = torch.randn(5, drafter.config.hidden_size), torch.arange(5)
    read = drafter.before_head(states, previous)
    assert torch.equal(drafter.head_logits(read), target.logits(states)) and not drafter.confidence_logits(read).any()


def test_the_markov_head_reads_the_token_before(target):
    drafter = make(target)
    states, previous = torch.randn(5, drafter.config.hidden_size), torch.tensor([3, 3, 60, 8, 0])
    own = drafter.head_logits(drafter.before_head(states, previous)) - target.logits(states)
    parts = drafter.markov_head
    for row, token in zip(own, previous.tolist(), strict=True):
        torch.testing.assert_close(row, parts.markov_w2.weight @ parts.markov_w1.weight[token], rtol=1e-4, atol=1e-4)
    assert own.abs().max() > 0.5


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def biases(drafter, states, tokens):
    """The Markov head's logits [K,V] along a block, entry by entry, and W1 of the tokens [K,r]: states [K,H], the K tokens before."""
    head, rank, rows = drafter.markov_head, drafter.config.markov_rank, []
    memory, before = torch.zeros(rank, dtype=states.dtype), head.markov_w1.weight[tokens]
    for state, vector in zip(states, before, strict=True):
        if drafter.config.markov == "gated":
            both = torch.cat((state, vector))
            vector = torch.stack(
                [x * sigmoid(w @ both + b) for w, b, x in zip(head.gate_proj.weight, head.gate_proj.bias, vector, strict=True)]
            )
        elif drafter.config.markov == "rnn":
            mixed = head.joint_proj.weight @ torch.cat((memory, vector, state)) + head.joint_proj.bias
            share, candidate, vector = sigmoid(mixed[:rank]), mixed[rank : 2 * rank].tanh(), mixed[2 * rank :].tanh()
            memory = share * memory + (1 - share) * candidate
        rows.append(head.markov_w2.weight @ vector)
    return torch.stack(rows), before


@pytest.mark.parametrize("markov", MARKOV)
def test_the_objective_is_the_loops(markov):
    target = Target.wrap(random_model("llama").double())
    drafter, batch = make(target, torch.float64, markov=markov).train(), packed(VOCAB, share=1.0)
    section = DsparkSection(anchors=3, gamma=2.0, loss="0.3 nll + 0.7 tv", confidence_loss=0.6)
    loss = objective(drafter, batch, target=target, section=section, seed=1)
    anchors, drawn = draw_anchors(batch, 3, 1)
    _, tokens, supervised = tokens_behind(batch, anchors, drawn, 4)
    out = target.features(batch, drafter.taps)
    states = drafter.states_along(
        drafter.feature_of(TargetOutput(out.hidden, out.taps)), batch["input_ids"], batch["position_ids"], batch["document"], anchors
    )
    weight, offset = drafter.confidence_head.proj.weight[0], drafter.confidence_head.proj.bias[0]
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for b in range(len(anchors)):
        terms, factors = [], []
        for i, anchor in enumerate(anchors[b].tolist()):
            read = [min(anchor + k, batch["input_ids"].shape[1] - 1) for k in range(4)]
            additions, vectors = biases(drafter, states[b, i], batch["input_ids"][b, read])
            for k in range(4):
                if not supervised[b, i, k]:
                    continue
                log_q = (target.logits(states[b, i, k]) + additions[k]).log_softmax(-1)
                p = target.logits(out.hidden[b, anchor + k]).softmax(-1).detach()
                alpha = torch.minimum(p, log_q.exp()).sum()
                c = torch.sigmoid(weight @ torch.cat((states[b, i, k], vectors[k])) + offset)
                doubt = -(alpha.detach() * c.log() + (1 - alpha.detach()) * (1 - c).log())
                terms.append(0.3 * -log_q[tokens[b, i, k]] + 0.7 * (1 - alpha) + 0.6 * doubt)
                factors.append(math.exp(-k / 2.0))
                counted += 1
        if terms:
            total = total + batch["loss_mask"][b].sum() * sum(t * f for t, f in zip(terms, factors, strict=True)) / sum(factors)
    assert counted > 20
    torch.testing.assert_close(loss.sum, total, rtol=1e-6, atol=0)
    trained = list(drafter.parameters())
    for got, want in zip(torch.autograd.grad(loss.sum, trained), torch.autograd.grad(total, trained, materialize_grads=True), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("paths", [[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], [(0,), (1,), (2,), (0, 0), (2, 0), (2, 1), (2, 1, 0)]])
def test_the_memory_follows_the_path_of_each_node(target, paths):
    """Children are the best tokens after their own path, as if the path were a chain from the anchor."""
    drafter = make(target, markov="rnn")
    drafter.tree_spec = StaticTree.from_paths(paths)
    propose, checked = drafter.propose, []

    def compared(round):
        tree = propose(round)
        states = drafter.draft_states(round)[0]
        nodes = {(): (int(round.last_tokens[0]),)}  # the tokens of each path, from the anchor on
        for path, token in zip(drafter.tree_spec.paths, tree.tokens[0, 1:].tolist(), strict=True):
            before = torch.tensor(nodes[path[:-1]])
            read = drafter.before_head(states[: len(before)], before)
            assert token == int(drafter.head_logits(read)[-1].topk(path[-1] + 1).indices[-1])
            nodes[path] = (*nodes[path[:-1]], token)
            checked.append(path)
        return tree

    drafter.propose = compared
    list(Decoder(target, drafter).generate([[5, 6, 7, 11]], Sampling(), 8, ()))
    assert len(checked) >= 2 * len(paths)


@pytest.mark.parametrize("markov", MARKOV)
def test_a_published_folder_is_read_as_it_was_written(target, tmp_path, markov):
    drafter = make(target, markov=markov, mask_token_id=3)
    write_dflash(drafter, tmp_path, torch.float32)
    again = read_dflash(tmp_path, load_file(tmp_path / "model.safetensors"), target)
    assert again.config.markov == markov
    states, previous = torch.randn(2, 4, 32), torch.randint(0, VOCAB, (2, 4))
    assert torch.equal(*(each.head_logits(each.before_head(states, previous)) for each in (drafter, again)))


def test_a_warm_start_takes_a_calibrated_drafter_of_other_settings(target, tmp_path):
    """When drafts end, and how long they are, is no size; the rank of the Markov head is one."""
    old = make(target, confidence=0.1)
    calibrate(old, rows_of_24(VOCAB, copies=3), 4, target, DsparkSection(anchors=6))
    assert old.config.temperatures
    old.save_pretrained(tmp_path)
    new = make(target, block_size=3)
    setup.start_from(new, str(tmp_path), target, "dspark.start")
    assert all(torch.equal(weight, new.state_dict()[name]) for name, weight in old.state_dict().items())
    with pytest.raises(ValueError, match="dspark.start=.*differs in markov_rank;"):
        setup.start_from(make(target, markov_rank=8), str(tmp_path), target, "dspark.start")


def test_ends_in_a_folder_are_the_targets_or_refused(target, tmp_path):
    """Engines load them; here the target's are read, so that others would draft something else."""
    drafter = make(target, mask_token_id=3)
    write_dflash(drafter, tmp_path, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    ends = {"embed_tokens.weight": target.model.get_input_embeddings().weight.detach(), "lm_head.weight": target.head_weight.detach()}
    rounded = {name: end.bfloat16() for name, end in ends.items()}
    states, previous = torch.randn(2, 4, 32), torch.randint(0, VOCAB, (2, 4))
    again = read_dflash(tmp_path, tensors | rounded, target)
    assert torch.equal(*(each.head_logits(each.before_head(states, previous)) for each in (drafter, again)))
    for name, end in ends.items():
        for other in (end + 0.1, end[:-1]):
            with pytest.raises(ValueError, match=f"{name} is not that of target"):
                read_dflash(tmp_path, tensors | {name: other}, target)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=3, rule="target-sample"), Sampling(0.9, seed=3, rule="shared-noise")])
def test_doubtful_chains_end_early_and_change_nothing(target, sampling):
    plain = [answer.tokens for answer in Decoder(target).generate(PROMPTS, sampling, 20, ())]
    sizes = {}
    for confidence in (0.0, 0.3):
        drafter = make(target, confidence=confidence)
        drafter.tree_spec = StaticTree.chain(4)
        propose, sizes[confidence] = drafter.propose, []

        def noted(round, propose=propose, seen=sizes[confidence]):
            tree = propose(round)
            tree.validate()
            seen.extend(tree.size.tolist())
            return tree

        drafter.propose = noted
        assert [answer.tokens for answer in Decoder(target, drafter, slots=2).generate(PROMPTS, sampling, 20, ())] == plain
    assert set(sizes[0.0]) <= {1, 5} and len(set(sizes[0.3])) >= 3 and max(sizes[0.3]) <= 5


def test_a_chain_ends_before_the_token_that_its_confidences_do_not_carry(target):
    drafter = make(target, confidence=0.25)
    drafter.tree_spec = StaticTree.chain(4)
    drafter.confidence_head.proj.weight.data.zero_()
    prompt = [5, 6, 7, 11]
    for probability, kept in ((0.1, 0), (0.3, 1), (0.55, 2), (0.65, 3), (0.9, 4)):
        drafter.confidence_head.proj.bias.data.fill_(math.log(probability / (1 - probability)))
        sizes, propose = [], drafter.propose
        drafter.propose = lambda round, propose=propose, sizes=sizes: sizes.append(propose(round)) or sizes[-1]
        list(Decoder(target, drafter).generate([prompt], Sampling(), 8, ()))
        drafter.propose = propose
        assert {int(tree.size[0]) for tree in sizes[:-1]} == {1 + kept}, probability


def test_a_tree_is_never_cut(target):
    """Confidences are those of one path; a tree has others."""
    drafter = make(target, confidence=0.99)
    drafter.tree_spec = StaticTree.from_paths([(0,), (1,), (0, 0)])
    propose, sizes = drafter.propose, set()
    drafter.propose = lambda round: (tree := propose(round), sizes.update(tree.size.tolist()))[0]
    list(Decoder(target, drafter).generate([[5, 6, 7]], Sampling(), 8, ()))
    assert sizes == {4}


def test_temperatures_undo_what_confidences_exaggerate():
    """Each depth's temperature by itself, whatever came before; a depth that no chain reaches keeps 1."""
    random = torch.Generator().manual_seed(0)
    accepted = torch.rand(4000, 4, generator=random, dtype=torch.float64).clamp(0.02, 0.98)
    counted = torch.arange(4) < torch.randint(1, 4, (4000, 1), generator=random)
    true = torch.tensor([2.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    odds = accepted.logit() * true
    temperatures = fit_temperatures(odds, accepted, counted)
    assert temperatures[:3] == pytest.approx(true[:3].tolist(), rel=0.05) and temperatures[3] == 1.0
    before, after = (survival_errors(odds, accepted, counted, each) for each in ([1.0] * 4, temperatures))
    assert before[0] > 0.05 and max(after) < 0.005 and after[3] == 0


def test_a_certain_confidence_has_a_bin_and_equal_temperatures_give_one():
    certain = torch.tensor([[40.0]]), torch.tensor([[1.0]]), torch.tensor([[True]])
    assert survival_errors(*certain, [0.25]) == [0.0] and fit_temperatures(*certain) == [pytest.approx(1.0)]
    undecided = torch.zeros(6, 1), torch.full((6, 1), 0.5), torch.ones(6, 1, dtype=torch.bool)  # any temperature fits as well
    assert fit_temperatures(*undecided) == [pytest.approx(1.0)]


def test_training_ends_with_temperatures(target, capsys):
    drafter, rows = make(target), rows_of_24(VOCAB, copies=3)
    calibrate(drafter, rows, 4, target, DsparkSection(anchors=6))
    assert len(drafter.config.temperatures) == 4 and drafter.config.temperatures != [1.0] * 4
    assert capsys.readouterr().out.count("→") == 5


def test_the_error_is_the_sum_over_bins():
    random = torch.Generator().manual_seed(1)
    odds, accepted = torch.randn(300, 2, generator=random).double(), torch.rand(300, 2, generator=random).double()
    counted = torch.rand(300, 2, generator=random) < 0.7
    for k, error in enumerate(survival_errors(odds, accepted, counted, [0.8, 1.7])):
        bins = {}
        for row in range(300):
            if counted[row, k]:
                predicted = math.prod(1 / (1 + math.exp(-float(odds[row, j]) / (0.8, 1.7)[j])) for j in range(k + 1))
                actual = math.prod(float(accepted[row, j]) for j in range(k + 1))
                bins.setdefault(int(predicted * 15), []).append(predicted - actual)
        assert error == pytest.approx(sum(abs(sum(gaps)) for gaps in bins.values()) / int(counted[:, k].sum())) and error > 0


def test_temperatures_move_where_a_chain_ends(target):
    prompt, odds = [5, 6, 7, 11], math.log(0.8 / 0.2)
    for temperatures, kept in ((None, 4), ([1.0, 1.0, 0.25, 1.0], 4), ([1.0, 50.0, 1.0, 1.0], 3), ([50.0, 50.0, 1.0, 1.0], 1)):
        drafter = make(target, confidence=0.3, temperatures=temperatures)
        drafter.tree_spec = StaticTree.chain(4)
        drafter.confidence_head.proj.weight.data.zero_()
        drafter.confidence_head.proj.bias.data.fill_(odds)
        sizes, propose = [], drafter.propose
        drafter.propose = lambda round, propose=propose, sizes=sizes: sizes.append(propose(round)) or sizes[-1]
        list(Decoder(target, drafter).generate([prompt], Sampling(), 8, ()))
        assert {int(tree.size[0]) for tree in sizes[:-1]} == {1 + kept}, temperatures


@pytest.mark.parametrize(
    "settings",
    [
        {"temperatures": [1.0]},
        {"temperatures": [1.0, 1.0, 0.0, 1.0, 1.0]},
        {"markov_rank": 0},
        {"confidence": 1.0},
        {"confidence": -0.1},
        {"block_size": 0},
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings):
    sizes = {"hidden_size": 32, "vocab_size": VOCAB, "taps": [0, 1], "num_heads": 4, "block_size": 5}
    with pytest.raises(ValueError, match="expected at least"):
        DsparkConfig(**sizes | settings)


def test_a_confidence_without_a_chain_is_refused():
    recipe = load(train.DsparkRecipe, "dspark-tiny", ["dspark.confidence=0.3"])
    with pytest.raises(ValueError, match=r"dspark.confidence=0.3 ends chains, and the draft tree is none; add tree.width=1"):
        train.check(recipe)
    train.check(load(train.DsparkRecipe, "dspark-tiny", ["dspark.confidence=0.3", "tree.width=1"]))
