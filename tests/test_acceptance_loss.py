"""The expected accepted length as a loss: its value and gradient are those of a product of overlaps, written out."""

from functools import partial

import pytest
import torch

from draftsmith.models.target import Target
from draftsmith.train import eagle, recipe
from draftsmith.train.losses.acceptance import acceptance_loss
from draftsmith.train.plan import report

K, M, H, V = 3, 40, 8, 23


def slow(states, head, target_hidden, target_head, counted, scale, ids):
    """Σ_t scale · (n − E) / K by autograd, one chain after the other."""
    total = torch.zeros((), dtype=torch.float64)
    for t in range(M):
        survival = 1.0
        for k in range(K):
            if not counted[k, t]:
                break
            p = (target_hidden[t + 1 + k] @ target_head.T).softmax(-1)
            q = (states[k][t] @ head.T).softmax(-1)
            survival = survival * torch.minimum(p if ids is None else p[ids], q).sum()
            total = total + scale[t] * (1 - survival) / K
    return total


@pytest.mark.parametrize("small", [True, False])
def test_value_and_gradient(small):
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    ids = torch.randperm(V, generator=generator)[:11] if small else None
    size = V if ids is None else len(ids)
    states, head = draw(K, M, H).requires_grad_(), draw(size, H).requires_grad_()
    target_hidden, target_head = draw(M, H), draw(V, H)
    counted = torch.rand(K, M, generator=generator) < 0.8
    for k in range(K):
        counted[k, M - 1 - k :] = False
    scale = torch.rand(M, generator=generator, dtype=torch.float64) * counted[0]
    expected = slow(states, head, target_hidden, target_head, counted, scale, ids)
    gradients = torch.autograd.grad(expected, [states, head])
    loss, hits = acceptance_loss(states, head, target_hidden, target_head, counted, scale, ids)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    for got, wanted in zip(torch.autograd.grad(loss, [states, head]), gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
    best = (target_hidden @ target_head.T).argmax(-1)
    for k in range(K):
        own = (states[k] @ head.T).argmax(-1)
        own = own if ids is None else ids[own]
        for t in range(M):
            assert bool(hits[k, t]) == bool(counted[: k + 1, t].all() and own[t] == best[t + 1 + k])
    assert hits.any() and not hits.all()


@pytest.fixture(scope="module")
def target():
    return Target.load("tiny", dtype=torch.float32)


def batch_of_two() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "input_ids": torch.randint(40, (2, 32)),
        "position_ids": (torch.arange(32) % 16).repeat(2, 1),
        "document": (torch.arange(32) // 16).repeat(2, 1),
        "sample_id": torch.zeros(2, 32, dtype=torch.int64),
        "loss_mask": torch.ones(2, 32, dtype=torch.bool),
    }


def test_eagle_trains_for_it(target):
    """A few steps on one batch lower the part of the chain that is not accepted, which is between 0 and 1 a token."""
    chosen = recipe.load(report.schema_of(eagle), "eagle3-tiny.yaml", ["eagle.end_to_end=true", "eagle.regression=0"])
    torch.manual_seed(0)
    model, objective = eagle.build_untrained(chosen, target)
    batch = batch_of_two()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    losses = []
    for _ in range(4):
        loss = objective(model, batch)
        losses.append(float(loss.sum.detach() / loss.weight))
        optimizer.zero_grad()
        loss.sum.backward()
        optimizer.step()
    assert 1 > losses[0] > losses[1] > losses[2] > losses[3] > 0, losses


def test_of_one_step_it_is_the_total_variation(target):
    results = []
    for keys in (["eagle.end_to_end=true"], ["eagle.loss=tv"]):
        chosen = recipe.load(
            report.schema_of(eagle), "eagle3-tiny.yaml", ["eagle.steps=1", "eagle.vocab_size=100", "eagle.regression=0", *keys]
        )
        torch.manual_seed(0)
        model, objective = eagle.build_untrained(chosen, target)
        loss = objective(model, batch_of_two())
        loss.sum.backward()
        results.append([loss.sum.detach(), *(each.grad for each in model.parameters() if each.grad is not None)])
    assert len(results[0]) > 5
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
