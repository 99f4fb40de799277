"""Medusa's objective: the formula, its memory, and a run that stops and goes on."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from watching import Largest
from zoo import tiny

from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train import medusa
from draftsmith.train.medusa import MedusaSection, objective
from draftsmith.train.objective import supervised_tokens

ROOT = Path(__file__).resolve().parents[1]
HEADS = 3


def fitted(target, **arch):
    drafter = new_drafter("medusa", target, num_heads=HEADS, **arch)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter


def batch(vocab, rows=2, length=21):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(vocab, (rows, length), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.6) & (torch.arange(length) > 0)
    positions = torch.arange(length).expand(rows, length)
    return {"input_ids": ids, "loss_mask": mask, "position_ids": positions, "document": torch.zeros_like(ids)}


def by_hand(drafter, target, data, section):
    """Σ over rows, positions and heads, one position at a time, straight from the formula: each head has its own mean in each row."""
    total, hits, count = 0.0, [0] * HEADS, [0] * HEADS
    for row, mask in zip(data["input_ids"], data["loss_mask"], strict=True):
        hidden = target.forward(row[None]).hidden[0]
        own = [int(mask[2 + k :].sum()) for k in range(HEADS)]
        for t in range(len(row)):
            for k in range(HEADS):
                if t + 2 + k >= len(row) or not mask[t + 2 + k]:
                    continue
                log_q = drafter.head_logits(hidden[t])[k].log_softmax(-1)
                p = target.logits(hidden[t + 1 + k]).softmax(-1)
                cross_entropy, kl = -log_q[row[t + 2 + k]], (p * (p.log() - log_q)).sum()
                loss = (1 - section.distill) * cross_entropy + section.distill * kl
                total = total + section.decay**k * loss * int(mask.sum()) / own[k]
                count[k] += 1
                hits[k] += int(log_q.argmax() == (row[t + 2 + k] if section.distill < 1 else p.argmax()))
    return total, [hit / many for hit, many in zip(hits, count, strict=True)]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("share_head", [False, True])
@pytest.mark.parametrize("distill", [0.0, 0.3, 1.0])
def test_the_objective_is_its_formula(name, share_head, distill):
    target = Target.wrap(tiny(name))
    section = MedusaSection(heads=HEADS, share_head=share_head, distill=distill)
    data = batch(target.vocab_size)
    grads = []
    for form in (objective, None):
        drafter = fitted(target, share_head=share_head)
        if form:
            loss = form(drafter, data, target=target, section=section)
            value, hits = loss.sum, [float(torch.div(*loss.metrics[f"top1_head{k + 1}"])) for k in range(HEADS)]
            assert loss.weight == data["loss_mask"].sum() == supervised_tokens(data)
        else:
            value, hits = by_hand(drafter, target, data, section)
        value.backward()
        grads.append((float(value.detach()), hits, {n: p.grad for n, p in drafter.named_parameters()}))
    (fast, fast_hits, fast_grads), (slow, slow_hits, slow_grads) = grads
    assert fast == pytest.approx(slow, rel=2e-5) and fast_hits == pytest.approx(slow_hits) and fast > 1
    for parameter, gradient in slow_grads.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(fast_grads[parameter], gradient, rtol=2e-4, atol=2e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("distill", [0.0, 0.5])
@pytest.mark.parametrize("share_head", [False, True])
def test_no_tensor_grows_with_positions_times_vocabulary(distill, share_head):
    vocab, length, hidden = 4096, 512, 8
    sizes = {"hidden_size": hidden, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = Target.wrap(LlamaForCausalLM(LlamaConfig(vocab_size=vocab, max_position_embeddings=length, **sizes)))
    drafter = new_drafter("medusa", target, num_heads=HEADS, share_head=share_head)
    data = batch(vocab, rows=1, length=length)
    section = MedusaSection(heads=HEADS, share_head=share_head, distill=distill)
    with Largest() as seen:
        objective(drafter, data, target=target, section=section).sum.backward()
    assert 0 < seen.elements < length * vocab / 8
    with Largest() as naive:
        logits = target.logits(target.forward(data["input_ids"]).hidden)
        F.cross_entropy(logits[0], data["input_ids"][0])
    assert naive.elements >= length * vocab  # the mode does see what it is there to see


def test_medusa_training_stops_and_goes_on_to_the_last_bit(tmp_path, target_folder, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    words = [str(ROOT / "recipes" / "medusa-tiny.yaml"), f"target.path={target_folder}", f"data.train={text}", f"data.cache={tmp_path}"]
    words += ["data.seq_len=32", "train.steps=5", "train.warmup_steps=1", "train.eval_batches=1", "medusa.heads=2"]
    medusa.main([*words, f"train.output={tmp_path / 'uninterrupted'}"])
    calls = 0

    def interrupted(drafter, data, **rest):
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return objective(drafter, data, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(medusa, "objective", partial(interrupted))
        with pytest.raises(SystemExit) as exit:
            medusa.main([*words, f"train.output={tmp_path / 'cut'}"])
    assert exit.value.code == 128 + signal.SIGINT and not (tmp_path / "cut" / "artifact").exists()
    medusa.main([*words, f"train.output={tmp_path / 'cut'}"])
    uninterrupted, cut = (load_file(tmp_path / name / "artifact" / "model.safetensors") for name in ("uninterrupted", "cut"))
    assert uninterrupted.keys() == cut.keys() and all(torch.equal(uninterrupted[name], cut[name]) for name in uninterrupted)
