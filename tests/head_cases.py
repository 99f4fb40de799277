"""What the tests of Hydra heads and of MLP speculators share: gradients, and their objective token by token."""

import torch
from loss_cases import likeliest
from packed_data import packed

from draftsmith.train.losses import blocks


def gradients(drafter, loss) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


def slow_objective(drafter, batch, section, root_states, logits_by_hand):
    """The loss token by token: in each document the mean of each head over the tokens that it predicts, times the document's supervised tokens."""
    target = drafter.target
    hidden = target.features(batch).hidden
    ids, mask, document = batch["input_ids"], batch["loss_mask"], batch["document"]
    total = torch.zeros((), dtype=torch.float64)
    for b in range(len(ids)):
        for d in range(int(document[b].max()) + 1):
            inside = (document[b] == d).nonzero().flatten().tolist()
            states = root_states(drafter, hidden[b, inside])
            for k in range(section.heads):
                losses = []
                for i, t in enumerate(inside):
                    there = t + 2 + k
                    if there in inside and mask[b, there]:
                        log_q = logits_by_hand(drafter, states[i], ids[b, t + 1 : t + 2 + k].tolist()).log_softmax(-1)
                        log_p = likeliest(target.logits(hidden[b, there - 1]), getattr(section, "top_k", 0)).log_softmax(-1)
                        divergence = (log_p.exp() * (log_p - log_q)).sum()
                        losses.append((1 - section.distill) * -log_q[ids[b, there]] + section.distill * divergence)
                if losses:
                    total = total + section.decay**k * torch.stack(losses).mean() * int(mask[b, inside].sum())
    return total


def check_slow_form(drafter, objective, section, root_states, logits_by_hand, monkeypatch):
    """Value and gradient in float64, in one block and in many, and row by row.

    Args:
        root_states: (drafter, hidden [S,H] of one document) -> what its heads read for them [S,H].
        logits_by_hand: (drafter, root state [H], the k + 1 tokens that head k reads) -> its logits [V].
    """
    target, batch = drafter.target, packed(drafter.config.vocab_size)
    wanted = slow_objective(drafter, batch, section, root_states, logits_by_hand)
    slow = gradients(drafter, wanted)
    for rows in (1000, 7):
        monkeypatch.setattr(blocks, "BUDGET", rows * drafter.activations)
        loss = objective(drafter, batch, target=target, section=section)
        fast = gradients(drafter, loss.sum)
        torch.testing.assert_close(loss.sum.detach(), wanted.detach(), rtol=1e-5, atol=0)
        assert loss.weight == batch["loss_mask"].sum() > 15
        for key, gradient in slow.items():
            torch.testing.assert_close(fast[key], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
            assert gradient.abs().max() > 0
    parts = [
        objective(drafter, {key: value[b : b + 1] for key, value in batch.items()}, target=target, section=section)
        for b in range(len(batch["document"]))
    ]  # micro-batches and ranks may share the sequences out in any way
    torch.testing.assert_close(sum(part.sum for part in parts), loss.sum)
