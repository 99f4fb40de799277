"""Kangaroo: the adapter against loops in float64, drafts against transformers' own forward, where a draft ends, training from a store."""

import json
import math
from collections import Counter

import pytest
import torch
from decoding_cases import PROMPTS, SHAPES, DepthPattern, drafted_children, texts
from packed_data import documents, two_rows
from random_targets import random_model, randomise
from zoo import VOCAB, tiny

from draftsmith.eval import loading
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import NodeOutput
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models import kangaroo
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.kangaroo import KangarooConfig, SelfDraft
from draftsmith.models.target import Target
from draftsmith.train import kangaroo as train
from draftsmith.train.kangaroo import KangarooSection, objective

SIZES = {"exit_layer": 1, "num_heads": 4, "num_kv_heads": 2}


def make(target, dtype=torch.float32, **more):
    return randomise(new_drafter("kangaroo", target, dtype=dtype, **SIZES | more), 0.4).eval()


def often_right(name, **more):
    """A target whose last layer does little, and an adapter that does little: what is left is often the same."""
    model = tiny(name)
    with torch.no_grad():
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            model.get_submodule(f"model.layers.1.{part}").weight.mul_(0.3)
    target = Target.wrap(model)
    drafter = new_drafter("kangaroo", target, **SIZES | more)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return target, drafter.eval()


def by_loops(drafter, feature):
    """The adapter over the h_E [S,H] of one document, position by position and head by head, RoPE by complex numbers -> [S,H]."""
    config, weights = drafter.config, dict(drafter.named_parameters())
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads

    def norm(x, name):
        return weights[f"{name}.weight"] * x / (x.square().mean() + config.rms_norm_eps).sqrt()

    def head(x, name, number, position=None):
        part = weights[f"self_attn.{name}_proj.weight"][number * dim : (number + 1) * dim] @ x
        if position is None:
            return part
        turned = torch.complex(part[: dim // 2], part[dim // 2 :])
        for i in range(dim // 2):
            angle = torch.tensor(position * config.rope_theta ** (-2 * i / dim), dtype=torch.float64)
            turned = torch.cat((turned[:i], (turned[i] * torch.polar(torch.ones_like(angle), angle))[None], turned[i + 1 :]))
        return torch.cat((turned.real, turned.imag))

    normed, rows = [norm(row, "input_layernorm") for row in feature], []
    for t, row in enumerate(feature):
        outs = []
        for h in range(config.num_heads):
            query = head(normed[t], "q", h, t)
            scores = torch.stack([query @ head(normed[s], "k", h // group, s) / math.sqrt(dim) for s in range(t + 1)])
            outs.append(sum(share * head(normed[s], "v", h // group) for s, share in enumerate(scores.softmax(0))))
        rows.append(norm(row + weights["self_attn.o_proj.weight"] @ torch.cat(outs), "norm"))
    return torch.stack(rows)


@pytest.mark.parametrize("loss", ["ce", "0.3 tv + 0.7 nll"])
def test_the_objective_is_the_loops(loss):
    """Value and gradients; h_E by transformers' own forward of each document."""
    target = Target.wrap(random_model("llama").double())
    drafter, batch = make(target, torch.float64, exit_layer=2).train(), two_rows(67)
    batch["loss_mask"] = (batch["document"] >= 0) & (batch["position_ids"] > 0) & (batch["position_ids"] != 9)
    got = objective(drafter, batch, target=target, section=KangarooSection(exit_layer=2, loss=loss))
    total, right, counted = torch.zeros((), dtype=torch.float64), 0, 0
    for ids, mask in documents(batch):
        with torch.no_grad():
            out = target.model(ids[None], output_hidden_states=True)
        q = target.logits(by_loops(drafter, out.hidden_states[2][0])).log_softmax(-1)
        p = out.logits[0].softmax(-1)
        for t in (mask[1:]).nonzero().flatten().tolist():
            ce, tv, nll = -(p[t] * q[t]).sum(), 1 - torch.minimum(p[t], q[t].exp()).sum(), -q[t, ids[t + 1]]
            total = total + (ce if loss == "ce" else 0.3 * tv + 0.7 * nll)
        hits = (q.argmax(-1) == p.argmax(-1)).tolist()
        for t in range(len(ids) - 6):
            if mask[t + 1 : t + 7].all():
                right, counted = right + hits[t], counted + 1
    torch.testing.assert_close(got.sum, total, rtol=1e-6, atol=0)
    assert got.weight == batch["loss_mask"].sum() and counted >= 5
    assert float(torch.div(*got.metrics["survival_1"])) == pytest.approx(right / counted)
    parameters = list(drafter.parameters())
    for ours, theirs in zip(torch.autograd.grad(got.sum, parameters), torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def reference_logits(drafter, text):
    """After a text, with transformers' attention and without a cache -> logits [V]."""
    implementation = drafter.target.model.config._attn_implementation
    drafter.target.model.set_attn_implementation("eager")
    feature = drafter.target.model(torch.tensor([text]), output_hidden_states=True).hidden_states[drafter.config.exit_layer]
    drafter.target.model.set_attn_implementation(implementation)
    positions = torch.arange(len(text))[None]
    return drafter.target.logits(drafter.states_along(feature, positions, torch.zeros_like(positions)))[0, -1]


class Checked(SelfDraft):
    """Compares the children of every node, in every round, with `reference_logits`."""

    def start(self, slots, prompts, out):
        super().start(slots, prompts, out)
        self.texts = getattr(self, "texts", {}) | {slot: list(prompt) for slot, prompt in zip(slots, prompts, strict=True)}

    def propose(self, round):
        tree = super().propose(round)
        tree.validate()
        for b, slot in enumerate(round.slots):
            if len(self.texts[slot]) == 1:
                assert tree.size[b] == 1
                self.adapter.seen["one token"] += 1
            for path, proposed in drafted_children(tree, b):
                text = *self.texts[slot], *path
                if text not in self.adapter.orders:  # those of the other decoder too: its answers are the same
                    self.adapter.orders[text] = reference_logits(self.adapter, list(text)).argsort(descending=True).tolist()
                assert proposed == self.adapter.orders[text][: len(proposed)], (slot, path)
                self.adapter.seen["checked"] += 1
        return tree

    def accept(self, round, tree, verdict, out):
        super().accept(round, tree, verdict, out)
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            self.texts[slot] += result.tokens
            self.adapter.seen[f"accepted {result.length - 1}"] += 1
            self.adapter.seen["moved"] += not result.in_place


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_every_tree_equals_the_first_layers_and_the_adapter_over_its_paths(name, shape, monkeypatch):
    """Alone and in ragged batches, whatever was accepted, with rounds that draft less or nothing."""
    target, drafter = often_right(name)
    plain = texts(Decoder(target).generate(PROMPTS, max_new_tokens=16, stop_ids=()))
    monkeypatch.setattr(kangaroo, "SelfDraft", Checked)
    seen: Counter[str] = Counter()
    drafter.orders = {}
    for slots, adaptive in ((1, None), (3, DepthPattern())):
        drafter.tree_spec, drafter.seen = SHAPES[shape], seen
        out = Decoder(target, drafter, slots=slots, chunk=5, adaptive=adaptive).generate(PROMPTS, max_new_tokens=16, stop_ids=())
        assert texts(out) == plain
    assert seen["checked"] >= 100 and all(seen[f"accepted {count}"] >= 1 for count in range(3)), seen
    assert seen["one token"] >= 2 and (seen["moved"] >= 1 or shape == "chain"), seen


@torch.inference_mode()
def test_the_adapter_is_trained_on_what_it_drafts_from():
    """Along a text, training's forward and drafting's find the same distribution at each position, to rounding."""
    target = Target.wrap(tiny("llama"))
    drafter = make(target)
    text = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1))
    out = target.forward(text[None], taps=drafter.taps)
    along = drafter.position_features(text, out)
    drafter.tree_spec = StaticTree.chain(4)
    drafter.bind(target, 1, 40)
    drafter.start([0], [text[:12].tolist()], NodeOutput(out.hidden[:, :11], out.taps[:, :11]))
    draft = drafter._state
    for last in range(11, 15):
        hidden = draft._catch_up([0], leave=0)
        torch.testing.assert_close(hidden[0], along[last], atol=1e-5, rtol=1e-5)
        draft._state.pending[0].append(int(text[last + 1]))


@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0, seed=2, rule="target-sample"), Sampling(1.0, seed=3)])
def test_a_draft_ends_where_the_likeliest_token_is_unlikely(how):
    depths = {}
    for confidence in (0.0, 0.12, 0.16, 0.2, 0.999):
        target, drafter = often_right("llama", confidence=confidence)
        plain = texts(Decoder(target).generate(PROMPTS, how, 16, ()))
        drafter.tree_spec = StaticTree.chain(4)
        assert drafter.capturable == (confidence == 0)
        out = Decoder(target, drafter).generate(PROMPTS, how, 16, ())
        assert texts(out) == plain
        depths[confidence] = {round.size - 1 for answer in out for round in answer.rounds[1:]}
    assert depths[0.0] == {4} and depths[0.999] == {1} and len(depths[0.12] | depths[0.16] | depths[0.2]) > 2


def test_confidence_is_an_option_of_the_evaluation_and_is_saved(tmp_path):
    target = Target.wrap(tiny("llama"))
    make(target, confidence=0.25).save_pretrained(tmp_path)
    drafter = load_drafter(tmp_path, target)
    assert str(drafter.stop) == "confidence:0.25"
    loading.set_stop(drafter, "confidence:0.5")
    assert str(drafter.stop) == "confidence:0.5" and str(load_drafter(tmp_path, target).stop) == "confidence:0.25"


def test_another_bind_reuses_what_fits_and_follows_the_tree():
    target = Target.wrap(tiny("llama"))
    drafter = make(target)
    first = drafter.bind(target, 2, 32)
    assert drafter.bind(target, 2, 32) == first
    drafter.tree_spec = DynamicTree(3, 2, 6)
    assert drafter.bind(target, 2, 32) != first and drafter._state.tree_spec == DynamicTree(3, 2, 6)


@pytest.fixture
def words(tmp_path, target_folder):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    data = [f"data.{key}" for key in (f"train={text}", "valid=null", f"cache={tmp_path}", "seq_len=32", "num_proc=1", "template=null")]
    steps = [f"train.{key}" for key in ("steps=6", "batch_size=2", "warmup_steps=0", "eval_batches=2", "eval_every=3", "log_every=1")]
    return ["kangaroo-tiny", f"target.path={target_folder}", "data.near_duplicate=1.0", "kangaroo.exit_layer=1", *data, *steps]


def test_it_trains_from_a_store_as_with_the_target_and_starts_from_an_artifact(words, tmp_path):
    losses = {}
    for name, more in (
        ("cached", [f"features.store={tmp_path}/store", "features.precision=float32", "features.mode=cache"]),
        ("online", []),
        ("again", [f"kangaroo.start={tmp_path}/online/artifact", "kangaroo.confidence=0.2"]),
    ):
        train.main([*words, f"train.output={tmp_path / name}", *more])
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row.get("loss", row.get("valid_loss")) for row in rows]
    assert losses["cached"] == pytest.approx(losses["online"], rel=1e-5) and len(losses["online"]) >= 8
    assert losses["again"][0] < losses["online"][0]
    config = load_drafter(tmp_path / "online" / "artifact").config
    assert (config.exit_layer, config.confidence, config.tree) == (1, 0.6, [[0] * depth for depth in range(1, 7)])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["kangaroo.exit_layer=2"], "kangaroo.exit_layer=2: expected fewer than the target's 2 layers"),
        (["kangaroo.loss=klx"], "kangaroo.loss"),
        (["train.context_parallel=2"], "train.context_parallel=2 is for EAGLE"),
    ],
)
def test_wrong_words_are_refused(words, tmp_path, more, said):
    with pytest.raises(ValueError, match=said):
        train.main([*words, f"train.output={tmp_path / 'out'}", *more])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"exit_layer": 0}, "exit_layer 0"),
        ({"num_kv_heads": 3}, "num_kv_heads 3"),
        ({"head_dim": 5}, "heads of 5"),
        ({"confidence": 1.0}, "confidence 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        KangarooConfig(**{"hidden_size": 32, "vocab_size": VOCAB, "num_heads": 4} | settings)


def test_a_target_of_too_few_layers_is_refused():
    with pytest.raises(ValueError, match="runs 2 layers; expected fewer than the 2 of target"):
        make(Target.wrap(tiny("llama"), name="small"), exit_layer=2)
