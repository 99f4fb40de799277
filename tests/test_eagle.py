"""EAGLE: training-time test against a slow form of it, decoding against training, lossless output, τ four ways, and a run from end to end."""

import json
import os
import random
import signal
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_data_packing import LENGTHS, corpus_of
from test_lossless import PROMPTS, texts
from test_target import random_model
from test_training import Largest
from test_verify import Watch
from zoo import CONFIGS, VOCAB, tiny

from draftsmith.data.corpus import Corpus
from draftsmith.data.packing import PackedDataset
from draftsmith.data.prompts import Prompt
from draftsmith.eval import acceptance, trees
from draftsmith.eval.interleaved import Case
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import NodeOutput, RoundContext, TargetOutput
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.inference.verify import Verdict
from draftsmith.models import eagle, vocab
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.eagle import EagleModel
from draftsmith.models.target import Target
from draftsmith.train import data_cli
from draftsmith.train import eagle as train
from draftsmith.train.eagle import EagleSection, objective1, objective3

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "recipes" / "eagle3-tiny.yaml")
# GQA, one and two layers, a size of its own, a draft vocabulary, 3.1's norms: each both with and without.
VARIANTS = {
    "3": {"taps": [0, 1], "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 40},
    "3, small": {"taps": [0, 1], "draft_size": 24, "num_layers": 2, "num_heads": 3, "head_dim": 6, "draft_vocab_size": 19},
    "3.1": {"taps": [0, 1], "fc_norm": True, "norm_output": True, "draft_size": 40, "num_heads": 4, "num_kv_heads": 4},
    "3.1, deep": {"taps": [1], "fc_norm": True, "norm_output": True, "num_layers": 2, "num_heads": 2, "draft_vocab_size": 31},
    "1": {"version": 1, "num_heads": 4, "num_kv_heads": 2},
    "1, deep": {"version": 1, "num_layers": 2, "num_heads": 4},
}
SHAPES = {
    "chain": StaticTree.chain(3),
    "static": StaticTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 2), (1, 1), (2, 0), (0, 0, 0), (1, 1, 1), (1, 1, 0)]),
    "dynamic": DynamicTree(3, 3, 14),
}


@pytest.fixture(scope="module")
def target():
    return Target.wrap(tiny("llama"), name="small")


def vocabulary(size: int, seed: int = 7) -> vocab.DraftVocabulary:
    return vocab.choose(torch.randint(1, 99, (VOCAB,), generator=torch.Generator().manual_seed(seed)), size)


def redraw(drafter: EagleModel, std: float = 0.18, seed: int = 1) -> EagleModel:
    """Wide weights, norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * std if parameter.ndim > 1 else 1 + 0.3 * drawn)
    return drafter


def make(target: Target, name: str = "3", seed: int = 1, **arch) -> EagleModel:
    arch = VARIANTS[name] | arch
    dtype = arch.pop("dtype", torch.float32)
    drafter = new_drafter("eagle", target, dtype=dtype, **arch)
    assert isinstance(drafter, EagleModel)
    if drafter.config.draft_vocab_size < VOCAB:
        drafter.take(vocabulary(drafter.config.draft_vocab_size))
    return redraw(drafter, seed=seed)


def allowed(drafter: EagleModel) -> torch.Tensor:
    """Target ids in the order of the draft ids, from t2d alone."""
    buffers = dict(drafter.named_buffers())
    return buffers["t2d"].nonzero()[:, 0] if "t2d" in buffers else torch.arange(drafter.config.vocab_size)


# Training-time test, a position at a time


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
        return self.weight["fc.weight"] @ torch.cat(list(taps))

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

    def unroll(self, features, embeddings, steps):
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

    def loss(self, target: Target, batch, steps: int, mix: dict[str, float], decay: float, classification: float = 0.0):
        """Σ over documents, rows and steps -> (sum, 1 + Σ survival)."""
        total, reached, anchors = torch.zeros((), dtype=torch.float64), [0] * steps, 0
        for ids, mask in documents(batch):
            out = target.forward(ids[None], taps=tuple(self.config.taps or ()))
            taps = [None] * len(ids) if out.taps is None else out.taps[0]
            features = [self.feature(h, t) for h, t in zip(out.hidden[0], taps, strict=True)]
            outputs = self.unroll(features, target.embed(ids), steps)
            law = target.logits(out.hidden[0]).softmax(-1)
            hit = {}
            for k in range(steps):
                for p in range(len(ids) - 2 - k):
                    if not mask[p + 2 + k]:
                        continue
                    if self.config.version == 3:
                        logits = self.weight["lm_head.weight"] @ norm(outputs[k][p], self.weight["norm.weight"], self.config.rms_norm_eps)
                    else:
                        logits = target.logits(outputs[k][p])
                    log_q, p_all = logits.log_softmax(-1), law[p + 1 + k]
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
                    if self.config.version == 1:
                        gap = (outputs[0][p] - out.hidden[0, p + 1]).abs()
                        value = classification * value + torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
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


def agrees(name: str, loss: str, steps: int, packed: bool = True, of: str = "llama", decay: float = 0.8) -> None:
    """That the objective, its gradients and its simulated τ are those of the slow form; in float64, but for norms and RoPE."""
    target = Target.wrap(tiny(of).double())
    drafter = make(target, name, dtype=torch.float64, steps=steps).train()
    rows = PackedDataset(corpus_of(SHORT, seq_len=16), 16, one_each=not packed)
    batch = rows.batch(torch.arange(len(rows)))
    section = EagleSection(version=drafter.config.version, steps=steps, decay=decay, loss=loss, noise=0.0)
    hand = ByHand(drafter)
    if section.version == 3:
        found = objective3(drafter, batch, target=target, section=section)
        value, tau = hand.loss(target, batch, steps, train.mix(loss), decay)
    else:
        found = objective1(drafter, batch, target=target, section=section)
        value, tau = hand.loss(target, batch, 1, {"ce": 1.0}, 1.0, section.classification)
    assert found.weight == batch["loss_mask"].sum() == rows.weight(torch.arange(len(rows)))
    assert float(found.sum.detach()) == pytest.approx(float(value.detach()), rel=1e-5) and value > 1
    assert float(found.metrics["sim_tau"] / found.weight) == pytest.approx(tau)
    found.sum.backward()
    value.backward()
    for path, parameter in drafter.named_parameters():
        wanted = hand.weight[path].grad
        assert parameter.grad is not None and wanted is not None and wanted.abs().max() > 1e-6, path
        torch.testing.assert_close(
            parameter.grad, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()), msg=lambda m, p=path: f"{p}: {m}"
        )


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "alone"])
@pytest.mark.parametrize(
    "name, loss, steps, of",
    [
        ("3", "kl", 3, "llama"),
        ("3", "kl", 1, "qwen3"),
        ("3, small", "0.9 tv + 0.1 ce", 4, "llama"),
        ("3, small", "kl", 2, "gemma2"),
        ("3.1", "0.7 kl + 0.3 tv", 3, "gemma2"),
        ("3.1, deep", "kl", 4, "llama"),
        ("1", "kl", 1, "llama"),
        ("1, deep", "kl", 1, "gemma2"),
    ],
)
def test_the_objective_is_the_slow_form(name, loss, steps, of, packed):
    agrees(name, loss, steps, packed, of)


def test_every_loss_and_decay_reaches_the_objective():
    agrees("3, small", "tv", 3, decay=1.0)
    agrees("3.1", "ce", 2, decay=0.5)


# Feature noise of EAGLE-1


def noise_of(target, drafter, batch, section, monkeypatch) -> tuple[torch.Tensor, torch.Tensor]:
    """What objective1 adds to the features, [B,S,H], and its sum."""
    got = []
    plain = EagleModel.unroll
    with monkeypatch.context() as patch:
        patch.setattr(EagleModel, "unroll", lambda self, feature, *rest: got.append(feature) or plain(self, feature, *rest))
        loss = objective1(drafter, batch, target=target, section=section)
    return got[0] - target.features(batch).hidden, loss.sum


def by_sample(batch, noise) -> dict[tuple[int, int], torch.Tensor]:
    real = batch["document"] >= 0
    keys = zip(batch["sample_id"][real].tolist(), batch["position_ids"][real].tolist(), strict=True)
    return dict(zip(keys, noise[real], strict=True))


def test_noise_is_a_function_of_sample_and_position(target, monkeypatch):
    drafter, section = make(target, "1").train(), EagleSection(version=1, noise=0.2)
    corpus = corpus_of(LENGTHS)
    found, sums = {}, {}
    for one_each in (False, True):
        rows = PackedDataset(corpus, 32, one_each=one_each)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(int(one_each)))
        batch = rows.batch(order)
        noise, sums[one_each] = noise_of(target, drafter, batch, section, monkeypatch)
        found[one_each] = by_sample(batch, noise)
        later = rows.batch(order + len(rows))
        found[one_each, "later"] = by_sample(later, noise_of(target, drafter, later, section, monkeypatch)[0])
    assert found[False].keys() == found[True].keys() and len(found[True]) == sum(LENGTHS)
    assert all((found[False][key] - found[True][key]).abs().max() < 1e-5 for key in found[True])
    torch.testing.assert_close(sums[False], sums[True], rtol=1e-5, atol=0)
    every = torch.stack(list(found[False].values()))
    width = 0.2 * 512 / 32
    assert every.abs().max() <= width / 2 + 1e-4 and every.abs().max() > 0.49 * width and every.mean().abs() < 0.02 * width
    assert every.std() == pytest.approx(width / 12**0.5, rel=0.02)
    assert len((every * 1e3).round().unique(dim=0)) == len(every) and every.std(1).min() > 0  # each position and entry its own
    again = torch.stack(list(found[False, "later"].values()))
    assert {key[0] for key in found[False]} & {key[0] for key in found[False, "later"]} == set()  # samples are counted on
    assert (torch.cdist(every, again).min(1).values > 0.1).all()
    drafter.eval()
    assert noise_of(target, drafter, batch, section, monkeypatch)[0].abs().max() == 0


# What is supervised


def lines_corpus(lines: list[list[int]], starts: list[int], seq_len: int) -> Corpus:
    """Samples whose answer begins at index starts[n]."""
    mask = torch.cat([torch.arange(len(line)) >= start for line, start in zip(lines, starts, strict=True)])
    ids, offsets = torch.tensor(sum(lines, []), dtype=torch.int32), torch.tensor([0, *map(len, lines)]).cumsum(0)
    picks, domain = torch.arange(len(lines)), torch.zeros(len(lines), dtype=torch.int16)
    return Corpus(ids, mask, offsets, domain, picks, ("all",), 0, seq_len, "key", {})


def supervision(target, drafter, batch, section, monkeypatch) -> torch.Tensor:
    """The weights that objective3 asks for, [K,B,S]."""
    got = []
    plain = train.chunked_draft_loss
    with monkeypatch.context() as patch:
        patch.setattr(train, "chunked_draft_loss", lambda *rest, **more: got.append(rest) or plain(*rest, **more))
        objective3(drafter, batch, target=target, section=section)
    assert list(got[0][5]) == list(range(1, section.steps + 1))  # step j's law is held against the target's after token t + 1 + j
    return got[0][4].view(section.steps, *batch["input_ids"].shape)


def test_an_answers_first_token_is_supervised(target, monkeypatch):
    drafter, section = make(target), EagleSection(steps=3)
    starts, generator = [2, 2, 5, 1, 8, 3, 2], random.Random(3)
    lines = [[generator.randrange(VOCAB) for _ in range(length)] for length in (6, 9, 11, 4, 10, 4, 3)]
    rows = PackedDataset(lines_corpus(lines, starts, 32), 32)
    batch = rows.batch(torch.arange(len(rows)))
    weights = supervision(target, drafter, batch, section, monkeypatch)
    assert int(batch["document"].max()) >= 2
    firsts, total = 0, 0
    for b in range(len(rows)):
        for t in range(32):
            number = batch["document"][b, t]
            for j in range(3):
                there = t + 2 + j
                wanted = number >= 0 and there < 32 and batch["document"][b, there] == number and batch["loss_mask"][b, there]
                assert weights[j, b, t] == float(wanted), (b, t, j)
                total += bool(wanted)
            if number >= 0:
                sample, place = int(batch["sample_id"][b, t]), int(batch["position_ids"][b, t])
                if place == starts[sample] - 2:
                    assert weights[0, b, t] == 1
                    firsts += 1
    assert firsts == sum(start >= 2 for start in starts) and total > 50


def stored(generator: torch.Generator, corpus: Corpus) -> dict[str, torch.Tensor]:
    """A packed batch that carries features of its own."""
    rows = PackedDataset(corpus, 32)
    batch = rows.batch(torch.arange(len(rows)))
    shape = batch["input_ids"].shape
    return batch | {"hidden": torch.randn(*shape, 32, generator=generator), "taps": torch.randn(*shape, 2, 32, generator=generator)}


@pytest.mark.parametrize("name", ["3", "3, small", "1"])
def test_nothing_crosses_from_one_document_into_another(target, name):
    section = EagleSection(version=VARIANTS[name].get("version", 3), steps=3)
    drafter = make(target, name, steps=3)
    generator = torch.Generator().manual_seed(0)
    batch = stored(generator, corpus_of([9, 12, 11, 4], seq_len=32))
    objective = objective3 if section.version == 3 else objective1
    for number in range(int(batch["document"][0].max()) + 1):
        own = (batch["document"] == number) & (torch.arange(len(batch["document"])) == 0)[:, None]
        batch["loss_mask"] = own & (batch["position_ids"] > 0)
        found = []
        for change in (None, "others", "own"):
            data = dict(batch)
            if change:
                here = own if change == "own" else ~own
                for one in ("hidden", "taps"):
                    noise = torch.randn(data[one].shape, generator=generator)
                    data[one] = torch.where(here.view(*here.shape, *[1] * (noise.ndim - 2)), noise, data[one])
                if change == "others":
                    data["input_ids"] = torch.where(own, data["input_ids"], (data["input_ids"] + 5) % VOCAB)
            drafter.zero_grad()
            loss = objective(drafter, data, target=target, section=section)
            loss.sum.backward()
            found.append((float(loss.sum.detach()), drafter.fc.weight.grad.clone(), loss.metrics["sim_tau"]))
        (plain, gradient, tau), (others, their_gradient, their_tau), (changed, *_) = found
        assert plain == pytest.approx(others, rel=1e-6) and tau == their_tau and plain > 1
        torch.testing.assert_close(their_gradient, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
        assert abs(changed - plain) > 1e-4 * plain


# Decoding is what was trained


class Watched:
    """A growth that notes the paths of the nodes whose candidates are wanted next: paths[b][f], tokens after the root."""

    def __init__(self, growth, rows: int) -> None:
        self.growth, self.paths = growth, [[[]] for _ in range(rows)]

    def __getattr__(self, name):
        return getattr(self.growth, name)

    def extend(self, *given):
        frontier = self.growth.extend(*given)
        if frontier is not None:
            nodes = zip(self.paths, frontier.above.tolist(), frontier.tokens.tolist(), strict=True)
            self.paths = [[paths[up] + [token] for up, token in zip(above, tokens, strict=True)] for paths, above, tokens in nodes]
        return frontier


def along(drafter: EagleModel, out: TargetOutput, line: list[int], root: int, paths: list[list[int]]) -> torch.Tensor:
    """By training-time test: the logits [nodes,D] after the root and each of `paths`."""
    depth = max(map(len, paths))
    ids = torch.tensor([line[: root + 1] + path + [0] * (depth - len(path)) for path in paths])
    taps = None if out.taps is None else out.taps[:, :root]
    feature = drafter.feature_of(TargetOutput(out.hidden[:, :root], taps))
    feature = F.pad(feature, (0, 0, 0, depth + 1)).expand(len(paths), -1, -1)
    positions = torch.arange(root + 1 + depth).expand_as(ids)
    outputs = drafter.unroll(feature, ids, positions, torch.zeros_like(ids), depth + 1)
    return drafter.logits_of(torch.stack([outputs[len(path)][n, root - 1] for n, path in enumerate(paths)]))


@torch.no_grad()
def played(drafter: EagleModel, target: Target, shape, lines: list[list[int]], rows: int, seed: int = 0) -> Counter:
    """Decode `lines` by the protocol alone, truth hidden at random in real trees; every node's logits are training-time test's.

    Rows start together and apart, are left out of rounds, idle within them, and end early; prompts of one token are among them;
    features of nodes that were not accepted are noise. Counts what happened.
    """
    rng, noise, seen = random.Random(seed), torch.Generator().manual_seed(seed), Counter()
    drafter.shape = shape
    drafter.bind(target, rows, max(map(len, lines)))
    known = [target.forward(torch.tensor([line]), taps=drafter.taps) for line in lines]
    order = allowed(drafter)
    waiting, live = list(range(len(lines))), {}
    one_tap = (len(drafter.taps), target.hidden_size)

    def output(places, width: int) -> NodeOutput:
        """places: of each row (line, index of every node, −1 for noise)."""
        hidden = 3 * torch.randn(len(places), width, target.hidden_size, generator=noise)
        taps = 3 * torch.randn(len(places), width, *one_tap, generator=noise) if drafter.taps else None
        for b, (line, nodes) in enumerate(places):
            for node, index in enumerate(nodes):
                if index >= 0:
                    hidden[b, node] = known[line].hidden[0, index]
                    if taps is not None:
                        taps[b, node] = known[line].taps[0, index]
        return NodeOutput(hidden, taps)

    while waiting or live:
        free = [row for row in range(rows) if row not in live]
        if waiting and free and (not live or rng.random() < 0.5):
            fresh = [(row, waiting.pop(0)) for row in free[: rng.randint(1, len(waiting))]]
            sizes = [rng.choice((1, 2, 3, 5, 8)) if line else 1 for _, line in fresh]
            prompts = [lines[line][:size] for (_, line), size in zip(fresh, sizes, strict=True)]
            places = [(line, range(size - 1)) for (_, line), size in zip(fresh, sizes, strict=True)]
            seen["started beside others"] += bool(live)
            seen["ragged start"] += len(set(sizes)) > 1
            seen["one token"] += 1 in sizes
            drafter.start([row for row, _ in fresh], prompts, output(places, max(sizes) - 1))
            live |= {row: (line, size - 1) for (row, line), size in zip(fresh, sizes, strict=True)}
        asked = sorted(row for row in live if rng.random() < 0.75) or sorted(live)
        if rng.random() < 0.1:
            rng.shuffle(asked)
        seen["left out"] += len(asked) < len(live)
        now = [live[row] for row in asked]
        root = torch.tensor([lines[line][at] for line, at in now])
        depth = rng.choice((99, 99, 1, 2))
        round = RoundContext(asked, torch.tensor(asked), root, torch.tensor([at for _, at in now]), torch.tensor(asked), Sampling(), depth)
        tree, levels = propose(drafter, round, now, lines, order, rng)
        tree.validate()
        for b, (line, at) in enumerate(now):
            if not at:
                assert tree.size[b] == 1
                continue
            assert tree.size[b] > 1 and len(levels) == min(depth, drafter.max_depth)
            found = torch.cat([logits[b] for logits, _ in levels])
            wanted = along(drafter, known[line], lines[line], at, [path for _, paths in levels for path in paths[b]])
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            seen["compared"] += len(found)
        places, path, length, following = [], [], [], []
        width = min(depth, drafter.max_depth) + 1
        for b, (line, at) in enumerate(now):
            kept = descend(tree, b, lines[line][at + 1 :])
            most = min(len(kept), len(lines[line]) - 1 - at)
            kept = kept[: most if rng.random() < 0.6 else rng.randint(1, most)]
            if rng.random() < 0.08:
                kept = []
                seen["idle"] += 1
            seen["moved"] += kept != list(range(len(kept)))
            seen[len(kept) - 1] += 1
            nodes = [at + kept.index(node) if node in kept else -1 for node in range(tree.tokens.shape[1])]
            places.append((line, nodes))
            path.append(kept + [-1] * (width - len(kept)))
            length.append(len(kept))
            following.append(lines[line][at + len(kept)] if kept else 0)
            live[asked[b]] = (line, at + len(kept))
        verdict = Verdict(torch.tensor(path), torch.tensor(length), torch.tensor(following))
        drafter.accept(round, tree, verdict, output(places, tree.tokens.shape[1]))
        gone = [row for row, (line, at) in live.items() if at == len(lines[line]) - 1 or rng.random() < 0.02]
        if gone:
            drafter.drop(gone)
            live = {row: place for row, place in live.items() if row not in gone}
    return seen


def propose(drafter: EagleModel, round: RoundContext, now, lines, order, rng):
    """A real proposal, but that the true next token is put among the candidates -> the tree, and (logits, paths) of its levels."""
    levels, watched = [], []

    def choose(logits, count, round, index, scored):
        ids, scores, law = EagleModel._choose(drafter, logits, count, round, index, scored)
        ready = torch.tensor([at > 0 for _, at in now])  # without a pair there is nothing to rank by
        assert torch.equal(ids[ready], order[logits[ready].topk(ids.shape[-1], -1).indices]) and law is None
        paths = watched[0].paths
        levels.append((logits.clone(), paths))
        ids = ids.clone()
        for b, (line, at) in enumerate(now):
            truth = lines[line][at + 1 :]
            for f, path in enumerate(paths[b]):
                assert index[b, f] == at + 1 + len(path)
                if path == truth[: len(path)] and len(truth) > len(path) and truth[len(path)] not in ids[b, f] and rng.random() < 0.95:
                    ids[b, f, rng.randrange(rng.choice((1, 2, 99))) % ids.shape[2]] = truth[len(path)]
        return ids, scores, law

    with pytest.MonkeyPatch.context() as patch:
        plain = eagle.grow
        patch.setattr(eagle, "grow", lambda *given: watched.append(Watched(plain(*given), len(now))) or watched[0])
        patch.setattr(drafter, "_choose", choose, raising=False)
        return drafter.propose(round), levels


def descend(tree, b: int, truth: list[int]) -> list[int]:
    """The nodes of row b that carry the truth, the root first."""
    kept, tokens, parents = [0], tree.tokens[b].tolist(), tree.parents[b].tolist()
    for token in truth:
        child = [node for node in range(1, int(tree.size[b])) if parents[node] == kept[-1] and tokens[node] == token]
        if not child:
            break
        kept.append(child[0])
    return kept


def random_lines(count: int = 6, seed: int = 2) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(12, 24))] for _ in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_computes_what_training_does(target, name, shape):
    drafter = make(target, name).eval()
    seen = Counter()
    for rows in (1, 3):
        seen += played(drafter, target, SHAPES[shape], random_lines(), rows, seed=rows)
    wanted = {"one token": 2, "left out": 3, "idle": 2, "started beside others": 2, "ragged start": 1, "compared": 60}
    assert not {what: seen[what] for what, least in wanted.items() if seen[what] < least}
    assert all(seen[accepted] >= 2 for accepted in range(4)), seen
    assert seen["moved"] == 0 if shape == "chain" else seen["moved"] >= 10


def test_a_long_prompt_is_encoded_in_chunks(target, monkeypatch):
    drafter = make(target, "3, small").eval()
    lines = random_lines(4, seed=8)
    whole = []
    for chunk in (256, 3):
        monkeypatch.setattr(EagleModel, "chunk", chunk)
        drafter.shape = SHAPES["static"]
        drafter.bind(target, 4, 40)
        sizes = [14, 1, 9, 12]
        prompts = [line[:size] for line, size in zip(lines, sizes, strict=True)]
        ids = torch.tensor([prompt[:-1] + [0] * (max(sizes) - len(prompt)) for prompt in prompts])
        out = target.forward(ids, taps=drafter.taps)
        drafter.start([0, 1, 2, 3], prompts, NodeOutput(out.hidden, out.taps))
        rows = torch.arange(4)
        at = torch.tensor(sizes) - 1
        tree = drafter.propose(RoundContext([0, 1, 2, 3], rows, torch.tensor([prompt[-1] for prompt in prompts]), at, rows, Sampling(), 9))
        whole.append((tree.tokens, tree.size, drafter._state.state.clone()))
    assert torch.equal(whole[0][0][[0, 2, 3]], whole[1][0][[0, 2, 3]]) and torch.equal(whole[0][1], whole[1][1])
    torch.testing.assert_close(whole[0][2], whole[1][2], rtol=1e-4, atol=1e-5)
    assert whole[0][1].tolist() == [11, 1, 11, 11]


# Output is plain decoding's

NEW = 14
HOWS = {
    "greedy": Sampling(),
    "target-sample": Sampling(0.9, top_k=20, top_p=0.95, seed=11, rule="target-sample"),
    "shared-noise": Sampling(0.8, top_p=0.95, seed=5, rule="shared-noise"),
}


def fit(drafter: EagleModel, target: Target, lines: list[list[int]], depth: int = 3) -> EagleModel:
    """An own head that says the next tokens of `lines`, as well as one matrix can: right often, wrong often."""
    place = {token: i for i, token in enumerate(allowed(drafter).tolist())}
    inputs, wanted = [], []
    with torch.no_grad():
        for line in lines:
            ids = torch.tensor([line])
            feature = drafter.feature_of(target.forward(ids, taps=drafter.taps))
            outputs = drafter.unroll(feature, ids, torch.arange(len(line))[None], torch.zeros_like(ids), depth)
            for k, output in enumerate(outputs):
                for row in range(len(line) - 2 - k):
                    inputs.append(drafter.before_head(output)[0, row].double())
                    label = torch.zeros(drafter.config.draft_vocab_size, dtype=torch.float64)
                    if line[row + 2 + k] in place:
                        label[place[line[row + 2 + k]]] = 8.0
                    wanted.append(label)
        x = torch.stack(inputs)
        gram = x.T @ x + 1e-3 * torch.eye(x.shape[1], dtype=torch.float64)
        drafter.lm_head.weight.copy_(torch.linalg.solve(gram, x.T @ torch.stack(wanted)).T)
    return drafter


def answers_of(target: Target, prompts: list[list[int]] = PROMPTS, new: int = NEW) -> dict[str, list[list[int]]]:
    return {name: texts(Decoder(target, slots=3).generate(prompts, how, new, ())) for name, how in HOWS.items()}


def fitted(target: Target, answers, name: str = "3", prompts: list[list[int]] = PROMPTS, **arch) -> EagleModel:
    lines = [prompt + answer for one in answers.values() for prompt, answer in zip(prompts, one, strict=True)]
    return fit(make(target, name, draft_size=96, num_heads=4, head_dim=8, steps=4, **arch), target, lines).eval()


def check_lossless(target, drafter, answers, combinations) -> Counter:
    seen = Counter()
    for how, shape, rows in combinations:
        drafter.shape = SHAPES[shape]
        decoder = Decoder(target, drafter, slots=rows, chunk=7, governor=AdaptiveDepth() if rows == 2 else None)
        out = decoder.generate(PROMPTS, HOWS[how], NEW, ())
        assert texts(out) == answers[how], (how, shape, rows)
        seen.update(one.accepted - 1 for answer in out for one in answer.rounds)
        assert decoder.target_forwards == decoder.rounds + decoder.prefill_chunks
    return seen


@pytest.mark.parametrize("number, name", list(enumerate(sorted(CONFIGS))))
def test_output_is_plain_decodings(number, name):
    """Every shape for each architecture, samplings and batch sizes in turn; every sampling with every shape for Llama."""
    target = Target.wrap(tiny(name))
    answers = answers_of(target)
    combinations = [(list(HOWS)[(number + i) % 3], shape, (1, 3)[(number + i) % 2]) for i, shape in enumerate(SHAPES)]
    if name == "llama":
        combinations = [(how, shape, (1, 3)[(i + j) % 2]) for i, how in enumerate(HOWS) for j, shape in enumerate(SHAPES)]
    arch = {"draft_vocab_size": 30} if number % 2 else {"norm_output": True, "fc_norm": True}
    seen = check_lossless(target, fitted(target, answers, **arch), answers, combinations)
    assert all(seen[accepted] >= 2 for accepted in range(3)), seen


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_eagle_1_and_a_governed_one_are_lossless_too(name):
    target = Target.wrap(tiny(name))
    answers = answers_of(target)
    check_lossless(target, make(target, "1").eval(), answers, [("greedy", "static", 3), ("shared-noise", "dynamic", 1)])
    governed = fitted(target, answers, draft_vocab_size=30)
    seen = check_lossless(target, governed, answers, [(how, shape, 2) for how, shape in zip(HOWS, SHAPES, strict=True)])
    assert seen[1] + seen[2] >= 3, seen


@pytest.mark.parametrize("rule", ["rejection", "rejection-replacement"])
def test_rejection_draws_from_the_draft_vocabulary(target, rule):
    answers = answers_of(target)
    drafter = fitted(target, answers, draft_vocab_size=30)
    inside, how = set(allowed(drafter).tolist()), Sampling(1.0, top_k=30, seed=3, rule=rule)
    drafted = []
    plain = drafter.propose
    drafter.propose = lambda round: drafted.append(plain(round)) or drafted[-1]
    for shape in ("chain", "static") if rule == "rejection" else ("static",):
        drafter.shape = SHAPES[shape]
        alone, batch = (texts(Decoder(target, drafter, slots=rows).generate(PROMPTS, how, NEW, ())) for rows in (1, 4))
        assert alone == batch and all(len(answer) == NEW and 0 <= min(answer) <= max(answer) < VOCAB for answer in alone)
        assert not all(token in inside for answer in alone for token in answer)  # what is OOV is still said
    for tree in drafted:
        real = tree.size > 1
        assert set(tree.tokens[real, 1:].flatten().tolist()) <= inside
        q = tree.q_logits[real, 0].softmax(-1)
        assert q.shape[-1] == VOCAB and (q[:, [v for v in range(VOCAB) if v not in inside]] == 0).all()
    drafter.shape = SHAPES["dynamic"]
    with pytest.raises(ValueError, match="with a dynamic tree"):
        Decoder(target, drafter).generate(PROMPTS[1:], how, NEW, ())


def test_beyond_the_trained_positions_it_warns_and_decodes(target):
    answers = answers_of(target)
    drafter = make(target, "3", training={"positions": 30})
    longest = max(map(len, PROMPTS))
    with pytest.warns(UserWarning, match="trained on 30"):
        assert texts(Decoder(target, drafter).generate(PROMPTS, None, NEW, ())) == answers["greedy"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder(target, drafter).generate(PROMPTS, None, 30 - longest, ())


@pytest.mark.parametrize("name", ["3", "3, small", "1"])
@pytest.mark.parametrize("shape, how", [("chain", "greedy"), ("static", "rejection"), ("dynamic", "shared-noise")])
def test_nothing_reads_the_device_within_a_round(target, name, shape, how, monkeypatch):
    drafter = make(target, name).eval()
    drafter.shape = SHAPES[shape]
    sampling = Sampling(0.9, seed=1, rule=how) if how == "rejection" else HOWS[how]
    stream = Decoder(target, drafter, slots=3).stream([prompt[:3] * 2 for prompt in PROMPTS[1:4]], sampling, 30, ())
    next(stream)
    transfers = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(tensor.shape) or plain(tensor))
    for _ in range(4):
        del transfers[:]
        with Watch() as watch:
            steps = next(stream)
        assert not any(step.finished for step in steps)
        assert watch.syncs == [] and len(transfers) == 1 and watch.calls > 50


# τ, four ways


@pytest.mark.parametrize("name, arch", [("3", {}), ("3", {"draft_vocab_size": 30}), ("3.1", {})])
def test_tau_of_records_of_decoding_and_of_the_objective_agree(target, name, arch):
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    answers = {"greedy": texts(Decoder(target).generate(prompts, None, NEW, ()))}
    # Fitted to some of them only, so that it is wrong, too.
    drafter = fitted(target, {"greedy": answers["greedy"][:3]}, name, prompts[:3], **arch)
    cases = [Case(Prompt(str(n), "all", ""), prompt, n) for n, prompt in enumerate(prompts)]
    records = acceptance.positions(target, drafter, cases, NEW)
    taus = []
    for shape in (StaticTree.chain(1), StaticTree.chain(4), SHAPES["static"]):
        drafter.shape = shape
        done = Decoder(target, drafter, slots=2).generate(prompts, None, NEW, ())
        tau = sum(len(one.tokens) for one in done) / sum(len(one.rounds) for one in done)
        assert trees.tau(records, shape.paths) == pytest.approx(tau, abs=1e-9), shape.paths
        taus.append(tau)
    assert 1.2 < taus[0] < taus[1] < 4

    lines = [prompt + answer for prompt, answer in zip(prompts, answers["greedy"], strict=True)]
    rows = PackedDataset(lines_corpus(lines, [len(prompt) for prompt in prompts], 64), 64)
    for steps in (1, 3, 4):
        section = EagleSection(steps=steps)
        loss = objective3(drafter, rows.batch(torch.arange(len(rows))), target=target, section=section)
        kept = [ranks[:steps] for record, line in zip(records, lines, strict=True) for ranks in whole(record, line, steps)]
        survival = [sum(all(rank == 0 for rank in ranks[: k + 1]) for ranks in kept) / len(kept) for k in range(steps)]
        assert float(loss.metrics["sim_tau"] / loss.weight) == pytest.approx(1 + sum(survival), abs=1e-6)
        for k in range(steps):
            assert float(loss.metrics[f"survival_{k + 1}"] / loss.weight) == pytest.approx(survival[k], abs=1e-6)
        assert 0 < survival[0] < 1


def whole(record, line: list[int], steps: int) -> list[list[int]]:
    """The ranks from every position with `steps` tokens after its root."""
    return record.ranks.tolist()[: len(record.ranks) + 1 - steps]


# Errors


def test_wrong_taps_sizes_and_versions_are_refused(target):
    for taps, wrong in (([0, 2], r"layers 0\.\.1: \[2\]"), ([-1, 1], r"\[-1\]")):
        with pytest.raises(ValueError, match=wrong):
            new_drafter("eagle", target, taps=taps)
    refused = {
        "got none; name them": {},
        "got a draft vocabulary of 49; expected at most the target's 48": {"taps": [0], "draft_vocab_size": VOCAB + 1},
        "got 3 heads for 2 KV heads": {"taps": [0], "num_heads": 3, "num_kv_heads": 2, "head_dim": 8},
        "got EAGLE version 2": {"version": 2, "taps": [0]},
        "EAGLE-1 uses the target's own head": {"version": 1, "draft_vocab_size": 20},
        "EAGLE-1 uses the": {"version": 1, "taps": [0, 1]},
        "EAGLE-1 uses": {"version": 1, "draft_size": 24},
        "EAGLE-1 has no norm": {"version": 1, "norm_output": True},
        "EAGLE-1 has no": {"version": 1, "fc_norm": True},
        "heads of 3 entries": {"taps": [0], "draft_size": 12, "num_heads": 4},
    }
    for match, arch in refused.items():
        with pytest.raises(ValueError, match=match):
            new_drafter("eagle", target, **arch)


def test_a_draft_vocabulary_that_was_not_given_is_refused(target):
    drafter = new_drafter("eagle", target, taps=[0], draft_vocab_size=20)
    with pytest.raises(ValueError, match="d2t"):
        _ = drafter.vocabulary
    with pytest.raises(ValueError, match="d2t"):
        Decoder(target, drafter).generate(PROMPTS[1:2], None, 4, ())


def test_damaged_maps_are_refused(target, tmp_path):
    make(target, "3, small").save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    d2t, t2d = whole["d2t"], whole["t2d"]
    other = vocabulary(19, seed=8)
    far = d2t.clone()
    far[-1] = 100
    damages = {
        "holds target ids": {"d2t": d2t + torch.arange(19)},
        "of another model, or broken": {"d2t": far},
        "disagree on 2 tokens": {"t2d": t2d.clone().index_fill_(0, t2d.nonzero()[0], False).index_fill_(0, (~t2d).nonzero()[0], True)},
        "d2t and t2d disagree": {"d2t": other.d2t},
        "d2t and t2d": {"d2t": d2t - (d2t > 0).long()},
    }
    for match, damage in damages.items():
        save_file(whole | damage, tmp_path / "model.safetensors", metadata={"format": "pt"})
        drafter = load_drafter(tmp_path, target)
        with pytest.raises(ValueError, match=match):
            Decoder(target, drafter).generate(PROMPTS[1:2], None, 4, ())
    # Of another tokenizer: more tokens than this target has.
    save_file(whole | {"t2d": torch.zeros(60, dtype=torch.bool)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"misshapen tensors: t2d \[60\]"):
        load_drafter(tmp_path, target)
    save_file({name: one for name, one in whole.items() if name != "d2t"}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 missing tensors: d2t"):
        load_drafter(tmp_path, target)
    wider = Target.wrap(tiny("llama"), name="small")
    wider.vocab_size = VOCAB + 12
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="vocab_size 48"):
        load_drafter(tmp_path).attach(wider)


def test_default_taps_need_layers(target):
    with pytest.raises(ValueError, match=r"2 layers, too few for the usual taps \(1, 0, -2\)"):
        train.default_taps(target)

    class Deep:
        name = "deep"
        num_layers = 0

    for layers, taps in ((8, (1, 3, 4)), (28, (1, 13, 24)), (36, (1, 17, 32))):
        Deep.num_layers = layers
        assert train.default_taps(Deep) == taps
    Deep.num_layers = 6
    with pytest.raises(ValueError, match="6 layers"):
        train.default_taps(Deep)


def test_targets_without_such_settings_have_a_drafter_too():
    """GPT-2 says neither how wide its MLP is nor how many KV heads it has."""
    gpt2 = Target.wrap(random_model("gpt2"))
    sizes = train.architecture(EagleSection(taps=(0, 1)), gpt2)
    assert (sizes["intermediate_size"], sizes["num_kv_heads"], sizes["num_heads"]) == (128, 4, 4)
    drafter = redraw(new_drafter("eagle", gpt2, **sizes)).eval()
    assert texts(Decoder(gpt2, drafter).generate(PROMPTS[1:2], None, 8, ())) == texts(Decoder(gpt2).generate(PROMPTS[1:2], None, 8, ()))


@pytest.mark.parametrize("text", ["", "kl +", "0.5kl", "kl kl", "-1 kl", "kl, tv", "nonsense", "0.9 tv + 0.1 nonsense", "0 kl", "kl + kl"])
def test_a_loss_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="eagle.loss"):
        train.mix(text, "eagle.loss")


def test_a_mix_of_losses():
    assert train.mix("kl") == {"kl": 1.0}
    assert train.mix(" 0.9 tv + .1 ce") == {"tv": 0.9, "ce": 0.1}
    assert train.mix("2 lk_hybrid+kl") == {"lk_hybrid": 2.0, "kl": 1.0}


def test_a_warm_start_takes_over_what_fits(target, tmp_path):
    old = make(target, "3, small", draft_vocab_size=25, seed=3)
    old.take(vocabulary(25, seed=9))
    redraw(old, seed=3)
    old.save_pretrained(tmp_path)
    new = make(target, "3, small", seed=4)
    before = new.lm_head.weight.detach().clone()
    train.begin_with(new, str(tmp_path), target)
    rows, kept = new.vocabulary.targets.tolist(), 0
    there = {token: i for i, token in enumerate(old.vocabulary.targets.tolist())}
    for i, token in enumerate(rows):
        assert torch.equal(new.lm_head.weight[i], old.lm_head.weight[there[token]] if token in there else before[i])
        kept += token in there
    assert 5 <= kept < len(rows) == 19
    assert torch.equal(new.vocabulary.t2d, vocabulary(19).t2d) and torch.equal(new.get_buffer("d2t"), vocabulary(19).d2t)
    for path, parameter in new.named_parameters():
        assert path == "lm_head.weight" or torch.equal(parameter, old.get_parameter(path))
    for name, first in (("3", "draft_size"), ("3.1, deep", "taps, draft_size"), ("1", "version, taps")):
        with pytest.raises(ValueError, match=f"eagle.start=.*differs in {first}"):
            train.begin_with(make(target, name), str(tmp_path), target)
    with pytest.raises(ValueError, match="differs in taps;"):
        train.begin_with(make(target, "3, small", taps=[0]), str(tmp_path), target)
    new_drafter("medusa", target, num_heads=2).save_pretrained(tmp_path / "medusa")
    with pytest.raises(ValueError, match="medusa differs"):
        train.begin_with(new, str(tmp_path / "medusa"), target)


# The artifact


def test_what_decoded_can_be_trained(target, tmp_path):
    """The maps are read within inference mode, when the first thing that a loaded drafter does is to decode."""
    make(target, "3, small").save_pretrained(tmp_path)
    batch = PackedDataset(corpus_of(SHORT, seq_len=16), 16).batch(torch.arange(2))
    gradients = []
    for first in (False, True):
        drafter = load_drafter(tmp_path, target)
        if first:
            Decoder(target, drafter).generate(PROMPTS[1:2], None, 6, ())
        objective3(drafter.train(), batch, target=target, section=EagleSection(steps=3)).sum.backward()
        gradients.append(drafter.fc.weight.grad)
    assert torch.equal(*gradients) and gradients[0].abs().max() > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_round_trip_changes_nothing(target, name, tmp_path):
    drafter = make(target, name, steps=4, rope_theta=500.0).eval()
    drafter.bind(target, 2, 64)
    drafter.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    maps = {"d2t", "t2d"} if drafter.config.draft_vocab_size < VOCAB else set()
    assert set(file) == {path for path, _ in drafter.named_parameters()} | maps
    assert not any("embed" in path or "inv_freq" in path or "target" in path for path in file)
    again = load_drafter(tmp_path, target)
    for path, buffer in drafter.named_buffers():
        assert torch.equal(again.get_buffer(path), buffer), path
    angle = 7 / 500.0 ** (torch.arange(0, drafter.config.head_dim, 2) / drafter.config.head_dim)
    torch.testing.assert_close(again._rope(torch.tensor([[7]]), torch.float32)[0][0, 0], angle.cos().repeat(2))
    ids = torch.tensor(random_lines(1)[0])
    out = target.forward(ids[None], taps=drafter.taps)
    roots = torch.arange(1, len(ids))
    first, second = (one.position_logits(one.position_features(ids, out), roots) for one in (drafter, again))
    assert torch.equal(first, second) and first.shape == (len(ids) - 1, 4, VOCAB)
    assert torch.equal(again.vocabulary.targets, allowed(drafter)) and again.taps == drafter.taps
    oov = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, allowed(drafter), False)
    assert torch.isneginf(first[..., oov]).all() and first[..., ~oov].isfinite().all()
    half = load_drafter(tmp_path, target, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.vocabulary.targets, allowed(drafter))
    far = torch.tensor([[30_000]])  # an angle whose frequency was rounded would be far off here
    for cast in (half, again.bfloat16()):
        assert torch.equal(cast._rope(far, torch.float32)[1], drafter._rope(far, torch.float32)[1])


def test_a_fresh_head_is_the_targets(target):
    drafter = new_drafter("eagle", target, taps=[0, 1])
    assert torch.equal(drafter.lm_head.weight, target.head_weight)
    drafter = new_drafter("eagle", target, taps=[0, 1], draft_vocab_size=20)
    drafter.take(vocabulary(20))
    assert torch.equal(drafter.lm_head.weight, target.head_weight[vocabulary(20).t2d])


# Memory


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lengths", [[512], [200, 290]])
def test_no_tensor_is_quadratic_in_positions_nor_holds_all_logits(lengths, checkpointing):
    from transformers import LlamaConfig, LlamaForCausalLM

    size, length, width = 4096, 512, 8
    sizes = {"hidden_size": width, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = Target.wrap(LlamaForCausalLM(LlamaConfig(vocab_size=size, max_position_embeddings=length, **sizes)))
    drafter = new_drafter("eagle", target, taps=[0], num_heads=2, num_kv_heads=1, draft_vocab_size=2048)
    drafter.take(vocab.choose(torch.randint(1, 99, (size,), generator=torch.Generator().manual_seed(0)), 2048))
    data = PackedDataset(corpus_of(lengths, vocab=size, seq_len=length), length).batch(torch.arange(1))
    # As from a store: the target's own forward is transformers' affair.
    data |= {"hidden": torch.randn(1, length, width), "taps": torch.randn(1, length, 1, width)}
    section = EagleSection(steps=3, checkpointing=checkpointing, loss="0.9 tv + 0.1 kl")
    bound = min(length * length, length * size // 8)
    with Largest() as seen:
        loss = objective3(drafter, data, target=target, section=section)
        loss.sum.backward()
    assert 0 < seen.elements < bound and drafter.fc.weight.grad.abs().max() > 0
    with Largest() as naive:
        scores = torch.randn(2, length, width) @ torch.randn(2, width, length)
        target.logits(data["hidden"])
    assert naive.elements >= length * size and scores.numel() > bound


# From end to end


@pytest.fixture(scope="module")
def words(target_folder, tmp_path_factory):
    """The command line of a short run; what is given goes behind it."""
    place = tmp_path_factory.mktemp("run")
    text, asked = place / "text.txt", place / "asked.jsonl"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    prompts = ["for line in", "    yield", "def strip", "lines:\n"]
    asked.write_text("".join(json.dumps({"prompt": one, "domain": f"d{n % 2}"}) + "\n" for n, one in enumerate(prompts)))
    common = [
        RECIPE,
        f"target.path={target_folder}",
        "target.dtype=float32",
        f"data.train={text}",
        f"data.cache={place}",
        "data.near_duplicate=1.0",
    ]
    common += [
        "data.seq_len=32",
        "train.steps=4",
        "train.warmup_steps=1",
        "train.eval_batches=1",
        "train.eval_every=1",
        "train.batch_size=2",
    ]
    common += ["train.log_every=1", "train.precision=fp32", "train.lr=0.02", f"train.tau_file={asked}", "train.tau_tokens=10"]
    common += ["eagle.taps=[0,1]", "eagle.vocab_size=40", "eagle.steps=3", "train.tau_prompts=2", "tree.depth=3"]

    def line(output: Path, *more: str) -> list[str]:
        return [*common, f"train.output={output}", *more]

    return line


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "artifact" / "model.safetensors")


def scripted(monkeypatch, taus: list[float], kept: list) -> None:
    """In place of τ: `taus`, one an evaluation; the weights then are kept."""

    def probe(recipe, target, drafter, positions):
        left = iter(taus)
        return lambda: kept.append({k: v.detach().clone() for k, v in drafter.state_dict().items()}) or next(left)

    monkeypatch.setattr(train.setup, "tau_probe", probe)


def test_a_run_ends_with_an_artifact_that_has_the_tau_it_measured(words, target_folder, tmp_path, capsys):
    train.main(words(tmp_path, "tree.width=1", "tree.nodes=null"))
    rows = metrics(tmp_path)
    taus = {row["step"]: row["valid_tau"] for row in rows if "valid_tau" in row}
    assert list(taus) == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert "draft vocabulary: 40 of 257 tokens" in said and f"best τ {max(taus.values()):.3f}" in said
    trained = [row for row in rows if "loss" in row]
    assert len(trained) == 4 and all(row["loss"] > 0 and 1 <= row["sim_tau"] <= 4 for row in trained)
    assert all(row["survival_1"] >= row["survival_2"] >= row["survival_3"] for row in trained)
    target = Target.load(str(target_folder))
    drafter = load_drafter(tmp_path / "artifact", target)
    best = max(taus, key=lambda step: taus[step])
    assert (
        drafter.config.training == {"positions": 32, "steps": best, "tokens": best * 2 * 32}
        and drafter.shape.paths == StaticTree.chain(3).paths
    )
    asked = [target.tokenizer.encode(one) for one in ("for line in", "    yield", "def strip", "lines:\n")]
    done = Decoder(target, drafter, slots=2).generate(asked, max_new_tokens=10)
    assert sum(len(one.tokens) for one in done) / sum(len(one.rounds) for one in done) == pytest.approx(max(taus.values()), abs=1e-6)
    assert [one.tokens for one in done] == [one.tokens for one in Decoder(target).generate(asked, max_new_tokens=10)]
    assert target.stop_ids <= set(allowed(drafter).tolist())  # the tokens that stop are always in


def test_the_best_weights_are_restored_and_patience_ends_the_run(words, tmp_path, monkeypatch):
    kept: list = []
    scripted(monkeypatch, [1.5, 3.0, 2.0, 3.0], kept)
    train.main(words(tmp_path / "best"))
    found = weights(tmp_path / "best")
    assert len(kept) == 4 and found.keys() == kept[0].keys()
    same = [all(torch.equal(found[name], one[name]) for name in found) for one in kept]
    assert same == [False, True, False, False]  # of equal ones the earlier
    del kept[:]
    scripted(monkeypatch, [2.0, 1.9, 1.8, 9.0], kept)
    train.main(words(tmp_path / "patient", "train.patience=2"))
    assert len(kept) == 3 and max(row["step"] for row in metrics(tmp_path / "patient")) == 3
    found = weights(tmp_path / "patient")
    assert [all(torch.equal(found[name], one[name]) for name in found) for one in kept] == [True, False, False]


def test_checkpointing_changes_no_loss(words, tmp_path):
    train.main(words(tmp_path / "plain", "train.tau_prompts=0"))
    train.main(words(tmp_path / "again", "train.tau_prompts=0", "eagle.checkpointing=true"))
    plain, again = ([row.get("loss", row.get("valid_loss")) for row in metrics(tmp_path / name)] for name in ("plain", "again"))
    assert plain == pytest.approx(again, rel=1e-6) and len(plain) == 8 and len(set(plain)) == 8
    for name, one in weights(tmp_path / "plain").items():
        torch.testing.assert_close(one, weights(tmp_path / "again")[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", [3, 1])
def test_a_run_stops_and_goes_on_to_the_last_bit(words, tmp_path, monkeypatch, version):
    more = [] if version == 3 else ["eagle.version=1", "eagle.taps=null", "eagle.vocab_size=null"]
    train.main(words(tmp_path / "whole", *more))
    calls = 0
    name = f"objective{version}"
    plain = getattr(train, name)

    def interrupted(drafter, data, **rest):
        nonlocal calls
        calls += drafter.training
        if calls == 3 and drafter.training:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(drafter, data, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(train, name, interrupted)
        with pytest.raises(SystemExit) as exit:
            train.main(words(tmp_path / "cut", *more))
    assert exit.value.code == 128 + signal.SIGINT and not (tmp_path / "cut" / "artifact").exists()
    train.main(words(tmp_path / "cut", *more))
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[one], cut[one]) for one in whole)
    assert ("d2t" in whole) == (version == 3)
    machine = {"tokens_per_s", "seconds", "mfu", "target_ratio", "peak_gb"}
    timeless = [[{k: v for k, v in row.items() if k not in machine} for row in metrics(tmp_path / one)] for one in ("whole", "cut")]
    assert timeless[0] == timeless[1]


def test_training_from_a_store_and_one_with_other_taps(words, tmp_path):
    store = [f"features.store={tmp_path}/s", "features.precision=float32"]
    data_cli.main(["capture", *words(tmp_path / "c"), *store, "features.taps=[1,0]"])
    quiet = "train.tau_prompts=0"
    train.main(words(tmp_path / "online", quiet))
    train.main(words(tmp_path / "offline", quiet, *store, "features.mode=offline"))
    online, offline = ([row.get("loss", row.get("valid_loss")) for row in metrics(tmp_path / name)] for name in ("online", "offline"))
    assert online == pytest.approx(offline, rel=1e-5) and len(online) == 8
    other = [f"features.store={tmp_path}/t", "features.precision=float32"]
    data_cli.main(["capture", *words(tmp_path / "c"), *other, "features.taps=[0]"])
    with pytest.raises(ValueError, match=r"captured with taps \[0\], without \[1\]"):
        train.main(words(tmp_path / "bad", quiet, *other, "features.mode=offline"))


@pytest.mark.parametrize(
    "more, match",
    [
        (["eagle.loss=nonsense"], "eagle.loss"),
        (["eagle.taps=[0,7]"], r"\[7\]"),
        (["eagle.taps=null"], "too few for the usual taps"),
        (["eagle.vocab_size=300"], "at most the target's 257"),
        (["eagle.version=2"], "version 2"),
        (["eagle.version=1", "eagle.taps=null"], "EAGLE-1"),
        (["eagle.version=1", "eagle.vocab_size=null"], "EAGLE-1"),
        (["eagle.version=1", "eagle.taps=null", "eagle.vocab_size=null", "eagle.norm_output=true"], "EAGLE-1 has no norm"),
        (["eagle.heads=4", "eagle.kv_heads=3"], "got 4 heads for 3 KV heads"),
        (["tree.depth=4"], "3 ahead at most"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(words, tmp_path, more, match):
    with pytest.raises(ValueError, match=match):
        train.main(words(tmp_path, *more))
    assert not (tmp_path / "checkpoints").exists()


# Planted faults

plain_ahead, plain_unroll, plain_step = eagle.shift_left, EagleModel.unroll, EagleModel.step
plain_accept, plain_encode, plain_loss = EagleModel.accept, EagleModel._encode, train.chunked_draft_loss
plain_recurring, plain_attend, plain_start = EagleModel.recurring, eagle.attend, EagleModel.start
plain_positions = eagle.TreeAttention.positions


def token_shift(rows, count, *rest):
    return plain_ahead(rows, count + 1, *rest)


def target_shift(*given, **more):
    return plain_loss(*given[:5], [shift + 1 for shift in given[5]], *given[6:], **more)


class Stuck:
    """Positions to which nothing can be added."""

    def __init__(self, positions) -> None:
        self.positions = positions

    def __add__(self, _):
        return self.positions


def rope_without_step(self, feature, ids, positions, *rest):
    return plain_unroll(self, feature, ids, Stuck(positions), *rest)


def nodes_at_one_position(self):
    return plain_positions(self) if self.visible is None else self.length[:, None].expand_as(self.depth)


def keep_drafts(self, round, tree, verdict, out):
    cache = self._state.cache
    if cache.drafted:
        cache.advance([cache.drafted if int(at) else 0 for at in round.positions])
    plain_accept(self, round, tree, verdict, out)


def first_nodes(self, round, tree, verdict, out):
    straight = torch.arange(verdict.path.shape[1]).expand_as(verdict.path)
    told = Verdict(torch.where(verdict.path < 0, -1, straight), verdict.length, verdict.next_token)
    plain_accept(self, round, tree, told, out)


def forget_the_bonus(self, round, tree, verdict, out):
    plain_accept(self, round, tree, Verdict(verdict.path, verdict.length, tree.tokens[:, 0]), out)


def swapped(self, output):
    return output if self.config.norm_output else self.norm(output)


def maps_off_by_one(self):
    return (torch.arange(self.size) + self.d2t + 1) % self.vocab_size


def no_earlier_drafts(query, keys, values, *rest, **named):
    return plain_attend(query, [keys[0], *keys[1:][-1:]], [values[0], *values[1:][-1:]], *rest, **named)


def prompt_not_shifted(self, rows, prompts, out):
    plain_start(self, rows, [[prompt[0], *prompt[:-1]] for prompt in prompts], out)


def padding_counts(self, rows, feature, tokens, counts):
    plain_encode(self, rows, feature, tokens, [max(counts)] * len(counts))


def oracle(name: str, loss: str = "kl") -> bool:
    """Whether the objective is the slow form."""
    try:
        agrees(name, loss, 3)
    except (AssertionError, ValueError, RuntimeError):
        return False
    return True


def parity(name: str, shape: str = "static") -> bool:
    """Whether decoding computes what training does. A crash counts as red."""
    target = Target.wrap(tiny("llama"))
    try:
        played(make(target, name).eval(), target, SHAPES[shape], random_lines(3), 2)
    except (AssertionError, ValueError, RuntimeError, IndexError):
        return False
    return True


FAULTS = {
    "token shift off by one": (eagle, "shift_left", token_shift, oracle, "3"),
    "token shift off by one, in decoding's eyes": (eagle, "shift_left", token_shift, parity, "3"),
    "target shift off by one": (train, "chunked_draft_loss", target_shift, oracle, "3"),
    "RoPE without + k": (EagleModel, "unroll", rope_without_step, oracle, "3"),
    "RoPE without + k, in decoding's eyes": (EagleModel, "unroll", rope_without_step, parity, "1"),
    "nodes of all depths at one position": (eagle.TreeAttention, "positions", nodes_at_one_position, parity, "3"),
    "drafted KV not dropped": (EagleModel, "accept", keep_drafts, parity, "3"),
    "features of rejected nodes": (EagleModel, "accept", first_nodes, parity, "3"),
    "the bonus token is forgotten": (EagleModel, "accept", forget_the_bonus, parity, "1"),
    "recurring normed": (EagleModel, "recurring", swapped, oracle, "3"),
    "recurring not normed": (EagleModel, "recurring", swapped, oracle, "3.1"),
    "d2t off by one, in training": (vocab.DraftVocabulary, "targets", property(maps_off_by_one), oracle, "3, small"),
    "d2t off by one, in decoding": (vocab.DraftVocabulary, "targets", property(maps_off_by_one), parity, "3, small"),
    "own drafts forgotten": (eagle, "attend", no_earlier_drafts, oracle, "3"),
    "the prompt is not shifted": (EagleModel, "start", prompt_not_shifted, parity, "3"),
    "padding is encoded": (EagleModel, "_encode", padding_counts, parity, "3"),
}


def test_every_fault_is_seen(monkeypatch):
    checks = {(check, name) for _, _, _, check, name in FAULTS.values()}
    assert all(check(name) for check, name in checks), "red before a fault was planted"
    missed = []
    for what, (owner, attribute, fault, check, name) in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fault)
            if check(name):
                missed.append(what)
    assert missed == []
    assert oracle("3") and parity("3"), "every fault was taken out again"
