"""EAGLE from the papers' words: the objective a position at a time."""

import pytest
import torch
import torch.nn.functional as F
from eagle_drafters import allowed, make
from packed_data import corpus_of
from zoo import tiny

from draftsmith.data.packing import PackedDataset
from draftsmith.models.eagle import EagleModel
from draftsmith.models.target import Target
from draftsmith.train import eagle as train
from draftsmith.train.eagle import EagleSection, objective1, objective3


def norm(x, weight, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x, position, theta):
    """x [heads,dim]: Su et al. 2021, in the halves that Llama has."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=x.dtype) * 2 / x.shape[-1])
    first, second = x[:, :half], x[:, half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


class ByHand:
    """The drafter from the papers' words: loops over steps, rows, layers; no batch, no mask, nothing of models/ but the weights."""

    def __init__(self, drafter: EagleModel) -> None:
        self.config, self.targets = drafter.config, allowed(drafter)
        self.weight = {name: p.detach().clone().requires_grad_() for name, p in drafter.named_parameters()}

    def feature(self, hidden, taps):
        """hidden [H], taps [T,H] of one position."""
        if self.config.version == 1:
            return hidden
        if self.config.fc_norm:
            taps = [norm(tap, self.weight[f"fc_norm.{i}.weight"], self.config.rms_norm_eps) for i, tap in enumerate(taps)]
        joined = torch.cat(list(taps))
        if self.config.norm_before_fc:
            joined = norm(joined, self.weight["input_norm.weight"], self.config.rms_norm_eps)
        return self.weight["fc.weight"] @ joined

    def pair(self, feature, embedding, position, place, seen, store):
        """One pair's output; its keys and values go to store[layer, place], and it attends to `seen` places of each layer."""
        config, weight, eps = self.config, self.weight, self.config.rms_norm_eps
        x = feature if config.version == 3 else weight["fc.weight"] @ torch.cat((embedding, feature))
        for n in range(config.num_layers):
            own = {name[len(f"layers.{n}.") :]: w for name, w in weight.items() if name.startswith(f"layers.{n}.")}
            read = x
            if n:
                read = norm(x, own["input_layernorm.weight"], eps)
            elif config.version == 3:
                read = torch.cat((norm(embedding, own["input_layernorm.weight"], eps), norm(x, own["hidden_norm.weight"], eps)))
                x = read[len(embedding) :] if config.norm_before_residual else x
            query, key, value = ((own[f"self_attn.{one}_proj.weight"] @ read).view(-1, config.head_dim) for one in "qkv")
            store[n, place] = rotate(key, position, config.rope_theta), value
            keys, values = (
                torch.stack([store[n, one][i] for one in seen]).repeat_interleave(config.num_heads // config.num_kv_heads, 1)
                for i in range(2)
            )
            scores = (keys * rotate(query, position, config.rope_theta)).sum(-1) / config.head_dim**0.5  # [seen,heads]
            x = x + own["self_attn.o_proj.weight"] @ (scores.softmax(0)[..., None] * values).sum(0).flatten()
            read = norm(x, own["post_attention_layernorm.weight"], eps)
            x = x + own["mlp.down_proj.weight"] @ (F.silu(own["mlp.gate_proj.weight"] @ read) * (own["mlp.up_proj.weight"] @ read))
        return x

    def training_time_test(self, features, embeddings, steps):
        """outputs[k][p]: row p at step k reads the embedding of token p + 1 + k at position p + k."""
        store, outputs = {}, []
        for k in range(steps):
            row = []
            for p in range(len(embeddings) - 1 - k):
                feature = features[p] if k == 0 else outputs[-1][p]
                if k and self.config.norm_output:
                    feature = norm(feature, self.weight["norm.weight"], self.config.rms_norm_eps)
                seen = [(0, r) for r in range(p + 1)] + [(i, p) for i in range(1, k + 1)]
                row.append(self.pair(feature, embeddings[p + 1 + k], p + k, (k, p), seen, store))
            outputs.append(row)
        return outputs

    def loss(
        self, target: Target, batch, steps: int, mix: dict[str, float], decay: float, classification: float = 0.0, regression: float = 0.0
    ):
        """Σ over documents, rows and steps -> (sum, 1 + Σ survival)."""
        total, reached, anchors = torch.zeros((), dtype=torch.float64), [0] * steps, 0
        for ids, mask in documents(batch):
            out = target.forward(ids[None], taps=tuple(self.config.taps or ()))
            taps = [None] * len(ids) if out.taps is None else out.taps[0]
            features = [self.feature(h, t) for h, t in zip(out.hidden[0], taps, strict=True)]
            outputs = self.training_time_test(features, target.embed(ids), steps)
            probabilities = target.logits(out.hidden[0]).softmax(-1)
            hit = {}
            for k in range(steps):
                for p in range(len(ids) - 2 - k):
                    if not mask[p + 2 + k]:
                        continue
                    read = outputs[k][p]
                    if self.config.version == 3:
                        read = norm(read, self.weight["norm.weight"], self.config.rms_norm_eps)
                    logits = self.weight["lm_head.weight"] @ read if self.config.version == 3 else target.logits(read)
                    log_q, p_all = logits.log_softmax(-1), probabilities[p + 1 + k]
                    value = torch.zeros(())
                    kept = p_all[self.targets]
                    known = int(p_all.argmax()) in self.targets.tolist()
                    covered = kept / kept.sum()
                    for name, share in mix.items():
                        if name == "tv":
                            value = value + share * (1 - torch.minimum(kept, log_q.exp()).sum())
                        elif known:
                            value = value - share * (covered * log_q).sum()
                            if name == "kl":
                                value = value + share * (covered * covered.log()).sum()
                    if self.config.version == 1 or regression:
                        gap = (read - out.hidden[0, p + 1 + k]).abs()
                        smooth = torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
                        value = classification * value + smooth if self.config.version == 1 else value + regression * smooth
                    total = total + decay**k * value
                    hit[k, p] = int(self.targets[log_q.argmax()]) == int(p_all.argmax())
            for p in range(len(ids)):
                if all((k, p) in hit for k in range(steps)):
                    anchors += 1
                    for k in range(steps):
                        reached[k] += all(hit[i, p] for i in range(k + 1))
        return total, 1 + sum(reached) / max(1, anchors)


def documents(batch):
    """(ids, mask) of every document of a batch."""
    for ids, mask, document in zip(batch["input_ids"], batch["loss_mask"], batch["document"], strict=True):
        for number in range(int(document.max()) + 1):
            here = document == number
            yield ids[here], mask[here]


SHORT = [5, 9, 13, 1, 7, 3, 2, 12]


def agrees(name: str, loss: str, steps: int, packed: bool = True, of: str = "llama", decay: float = 0.8, regression: float = 0.0) -> None:
    """That the objective, its gradients and its simulated τ are those of the slow form; in float64, but for norms and RoPE."""
    target = Target.wrap(tiny(of).double())
    drafter = make(target, name, dtype=torch.float64, steps=steps).train()
    rows = PackedDataset(corpus_of(SHORT, seq_len=16), 16, one_sample_each=not packed)
    batch = rows.batch(torch.arange(len(rows)))
    section = EagleSection(version=drafter.config.version, steps=steps, decay=decay, loss=loss, noise=0.0, regression=regression)
    hand = ByHand(drafter)
    if section.version == 3:
        result = objective3(drafter, batch, target=target, section=section)
        value, tau = hand.loss(target, batch, steps, train.mix(loss), decay, 0.0, regression)
    else:
        result = objective1(drafter, batch, target=target, section=section)
        value, tau = hand.loss(target, batch, 1, {"ce": 1.0}, 1.0, section.classification)
    assert result.weight == batch["loss_mask"].sum() == rows.weight(torch.arange(len(rows)))
    assert float(result.sum.detach()) == pytest.approx(float(value.detach()), rel=1e-5) and value > 1
    assert float(torch.div(*result.metrics["sim_tau"])) == pytest.approx(tau)
    result.sum.backward()
    value.backward()
    for path, parameter in drafter.named_parameters():
        wanted = hand.weight[path].grad
        assert parameter.grad is not None and wanted is not None and wanted.abs().max() > 1e-6, path
        torch.testing.assert_close(
            parameter.grad, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()), msg=lambda m, p=path: f"{p}: {m}"
        )
