"""Medusa heads as a drafter: the right tokens at the right offsets, and the state of each slot."""

from contextlib import nullcontext

import pytest
import torch
from loss_cases import likeliest
from packed_data import corpus_of
from planting import round_context
from random_targets import random_model, randomise

from draftsmith.data.packing import PackedDataset
from draftsmith.inference.drafter import NodeOutput
from draftsmith.inference.verify import Verdict
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train.engine.log import sums_of
from draftsmith.train.medusa import MedusaRecipe, MedusaSection, check, objective

VOCAB, WIDTH = 67, 32


@pytest.fixture(scope="module")
def target():
    return Target.wrap(random_model("llama"))


def prefill(target, prompts):
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([prompt[:-1] + [0] * (longest - len(prompt)) for prompt in prompts])
    return NodeOutput(target.forward(ids).hidden if longest > 1 else torch.zeros(len(prompts), 0, WIDTH))


def planted(target, text):
    """Heads whose output layers are fitted so that head k at position t of `text` says text[t+2+k]."""
    drafter = new_drafter("medusa", target, num_heads=3)
    hidden = target.forward(torch.tensor([text])).hidden[0]
    for k in range(3):
        rows = len(text) - 2 - k
        wanted = torch.full((rows, VOCAB), -1.0)
        wanted[torch.arange(rows), torch.tensor(text[2 + k :])] = 1.0
        solution = torch.linalg.lstsq(hidden[:rows].double(), wanted.double()).solution  # [H,V]
        drafter.output_weight(k).data.copy_(solution.T)
    return drafter


def test_planted_heads_propose_the_tokens_that_follow(target):
    text = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    drafter = planted(target, text)
    drafter.bind(target, 3, 64)
    prompts = [text[:n] for n in (2, 9, 17)]
    slots = [0, 1, 2]
    drafter.start(slots, prompts, prefill(target, prompts))
    tree = drafter.propose(round_context(slots, [prompt[-1] for prompt in prompts]))
    assert tree.tokens[:, 0].tolist() == [text[1], text[8], text[16]]
    assert tree.tokens[:, 1:4].tolist() == [text[n : n + 3] for n in (2, 9, 17)]  # the leftmost chain comes first
    logits = drafter.position_logits(target.forward(torch.tensor([text])).hidden[0], torch.arange(1, 24))
    assert logits.shape == (23, 3, VOCAB)
    for k in range(3):
        assert logits[: 22 - k, k].argmax(-1).tolist() == text[2 + k :]


def test_acceptance_moves_to_the_last_accepted_node(target):
    text = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    drafter = planted(target, text)
    drafter.bind(target, 4, 64)
    hidden = target.forward(torch.tensor([text])).hidden[0]
    slots = [2, 0, 3]
    prompts = [text[:4], text[:6], text[:8]]
    drafter.start(slots, prompts, prefill(target, prompts))
    tree = drafter.propose(round_context(slots, [text[3], text[5], text[7]]))
    # Nodes 0..3 are text[p-1..p+2]; row 0 keeps the root, row 1 the root and two, row 2 is idle.
    nodes = torch.zeros(3, tree.tokens.shape[1], WIDTH)
    for b, length in enumerate((4, 6, 8)):
        nodes[b, :4] = hidden[length - 1 : length + 3]
    path = torch.tensor([[0, -1, -1, -1], [0, 1, 2, -1], [-1, -1, -1, -1]])
    verdict = Verdict(path=path, length=torch.tensor([1, 3, 0]), next_token=torch.tensor([text[4], text[8], 0]))
    drafter.accept(round_context(slots, [text[3], text[5], text[7]]), tree, verdict, NodeOutput(nodes))
    again = drafter.propose(round_context(slots, [text[4], text[8], text[7]]))
    assert again.tokens[:, 1:4].tolist() == [text[5:8], text[9:12], text[8:11]]
    drafter.drop(slots[:1])
    assert drafter.propose(round_context(slots, [1, 2, 3])).size.tolist() == [1, tree.tokens.shape[1], tree.tokens.shape[1]]


def test_a_prompt_of_one_token_has_nothing_to_go_by(target):
    drafter = randomise(new_drafter("medusa", target, num_heads=2))
    drafter.bind(target, 2, 64)
    slots = [0, 1]
    drafter.start(slots, [[5], [5]], prefill(target, [[5], [5]]))
    tree = drafter.propose(round_context(slots, [5, 5]))
    assert tree.size.tolist() == [1, 1]
    tree.validate()
    drafter.start(slots, [[5], [5, 6]], prefill(target, [[5], [5, 6]]))
    assert drafter.propose(round_context(slots, [5, 6])).size.tolist() == [1, tree.tokens.shape[1]]
    verdict = Verdict(path=torch.tensor([[0, -1, -1]]), length=torch.tensor([1]), next_token=torch.tensor([7]))
    drafter.accept(round_context([0], [5]), tree, verdict, NodeOutput(torch.randn(1, tree.tokens.shape[1], WIDTH)))
    assert drafter.propose(round_context([0], [7])).size.tolist() == [tree.tokens.shape[1]]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("tree", [None, [[0]], [[0], [2], [0, 0], [0, 1], [2, 3]], []])
def test_propose_equals_a_slow_loop(target, share, tree):
    drafter = randomise(new_drafter("medusa", target, num_heads=3, num_layers=2, share_head=share, tree=tree))
    drafter.bind(target, 3, 64)
    slots = [1, 2]
    prompts = [[4, 5, 6], [7, 8, 9, 10]]
    out = prefill(target, prompts)
    drafter.start(slots, prompts, out)
    proposed = drafter.propose(round_context(slots, [6, 10]))
    proposed.validate()
    paths = drafter.tree_spec.paths
    assert proposed.tokens.shape == (2, len(paths) + 1) == (2, drafter.max_nodes)
    for b, last in enumerate((1, 2)):
        for node, path in enumerate(paths, 1):
            x = out.hidden[b, last]
            state = drafter.state_dict()
            for j in range(2):
                block = f"{len(path) - 1}.{j}.linear"
                z = state[f"{block}.weight"] @ x + state[f"{block}.bias"]
                x = x + z * z.sigmoid()
            weight = target.head_weight if share else state[f"{len(path) - 1}.2.weight"]
            assert proposed.tokens[b, node] == (weight @ x).argsort(descending=True)[path[-1]]


def test_a_tree_deeper_than_the_heads_is_refused(target):
    with pytest.raises(ValueError, match="3 deep for 2 heads"):
        new_drafter("medusa", target, num_heads=2, tree=[[0], [0, 0], [0, 0, 0]])


def test_heads_look_no_further_than_a_sequence():
    """The last of k heads predicts the token k + 1 after its position."""
    train = {"output": "unused", "steps": 1, "batch_size": 1, "lr": 0.1}
    for heads in (62, 63):
        recipe = MedusaRecipe.model_validate({"train": train, "data": {"seq_len": 64}, "medusa": {"heads": heads}})
        with pytest.raises(ValueError, match="63 look further ahead than data.seq_len=64") if heads == 63 else nullcontext():
            check(recipe)


def slow_objective(drafter, target, batch, section):
    """The loss token by token: in each document the mean of each head over the tokens that it predicts, times the document's supervised tokens."""
    hidden = target.features(batch).hidden
    ids, mask, document = batch["input_ids"], batch["loss_mask"], batch["document"]
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for b in range(len(ids)):
        tokens += int(mask[b].sum())
        for d in range(int(document[b].max()) + 1):
            inside = (document[b] == d).nonzero().flatten().tolist()
            supervised = int(mask[b, inside].sum())
            for k in range(section.heads):
                losses = []
                for t in inside:
                    there = t + 2 + k
                    if there in inside and mask[b, there]:
                        log_q = drafter.logits_of(k, hidden[b, t]).double().log_softmax(-1)
                        log_p = likeliest(target.logits(hidden[b, there - 1]), section.top_k).double().log_softmax(-1)
                        divergence = (log_p.exp() * (log_p - log_q)).sum()
                        losses.append((1 - section.distill) * -log_q[ids[b, there]] + section.distill * divergence)
                if losses:
                    total = total + section.decay**k * torch.stack(losses).mean() * supervised
    return total, tokens


@pytest.mark.parametrize(("distill", "top_k"), [(0.0, 0), (0.4, 0), (0.4, 3), (1.0, 0), (1.0, 5)])
def test_each_head_is_divided_by_its_own_count(target, distill, top_k):
    drafter = randomise(new_drafter("medusa", target, num_heads=3))
    section = MedusaSection(heads=3, distill=distill, top_k=top_k)
    rows = PackedDataset(corpus_of([9, 12, 3, 2, 4, 11, 21], seq_len=24, vocab=VOCAB), 24)
    batch = rows.batch(torch.arange(len(rows)))
    batch["loss_mask"] = batch["loss_mask"] & (torch.rand(batch["loss_mask"].shape, generator=torch.Generator().manual_seed(1)) < 0.8)
    batch["loss_mask"][0] &= batch["position_ids"][0] == 2  # a sequence of which the later heads predict nothing
    wanted, tokens = slow_objective(drafter, target, batch, section)
    drafter.zero_grad()
    loss = objective(drafter, batch, target=target, section=section)
    loss.sum.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    torch.testing.assert_close(loss.sum.detach().double(), wanted.detach(), rtol=1e-5, atol=0)
    assert int(loss.weight) == tokens == int(batch["loss_mask"].sum()) > 15
    drafter.zero_grad()
    wanted.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max()))
    # Micro-batches and ranks may share the sequences out in any way.
    parts = [
        objective(drafter, {name: tensor[b : b + 1] for name, tensor in batch.items()}, target=target, section=section)
        for b in range(len(rows))
    ]
    torch.testing.assert_close(sum(part.sum for part in parts), loss.sum)
    assert sum(part.weight for part in parts) == loss.weight and len(parts) >= 3
    for name, sums in sums_of(loss).items():  # what is logged
        torch.testing.assert_close(sum(sums_of(part)[name] for part in parts), sums)


def test_simulated_tau_counts_chains_of_the_targets_best_tokens(target):
    drafter = new_drafter("medusa", target, num_heads=2)  # its heads say what the target says of the position before
    rows = PackedDataset(corpus_of([9, 12, 3, 2, 4, 11, 21], seq_len=24, vocab=VOCAB), 24)
    batch = rows.batch(torch.arange(len(rows)))
    loss = objective(drafter, batch, target=target, section=MedusaSection(heads=2, distill=1.0))
    best = target.logits(target.features(batch).hidden).argmax(-1)
    anchors, accepted = 0, [0, 0]
    for b, row in enumerate(batch["document"].tolist()):
        for t in range(len(row) - 3):
            if row[t] == row[t + 3] >= 0 and all(batch["loss_mask"][b, t + k + 2] for k in range(2)):
                hits = [bool(best[b, t] == best[b, t + k + 1]) for k in range(2)]
                anchors += 1
                accepted[0] += hits[0]
                accepted[1] += hits[0] and hits[1]
    assert 0 < accepted[1] < accepted[0] < anchors
    survival = [float(torch.div(*loss.metrics[f"survival_{k}"])) for k in (1, 2)]
    assert survival == pytest.approx([count / anchors for count in accepted])
    assert float(torch.div(*loss.metrics["sim_tau"])) == pytest.approx(1 + sum(survival))
    with torch.no_grad():  # held out, whatever the loss
        for share in (0.0, 0.5):
            other = objective(drafter, batch, target=target, section=MedusaSection(heads=2, distill=share))
            assert torch.equal(other.metrics["sim_tau"], loss.metrics["sim_tau"])
    on_text = objective(drafter, batch, target=target, section=MedusaSection(heads=2, distill=0.0))
    assert not torch.equal(on_text.metrics["sim_tau"], loss.metrics["sim_tau"])
