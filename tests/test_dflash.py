"""DFlash: attention of blocks and the objective against loops in float64, its anchors, its memory by counting, what decoding reads."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from decoding_cases import PROMPTS, check_depths
from packed_data import packed
from random_targets import random_model, randomise
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.tree import StaticTree
from draftsmith.models.block_attention import attend_blocks, blocks_at
from draftsmith.models.dflash import DflashConfig
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.target import Target
from draftsmith.train import data_cli, dspark
from draftsmith.train import dflash as train
from draftsmith.train.dflash import DflashSection, objective
from draftsmith.train.losses.acceptance import paced
from draftsmith.train.losses.anchors import draw_anchors, per_sequence, tokens_behind

VOCAB, WIDTH = 67, 32
SETTINGS = {
    "full": {"block_size": 5, "num_layers": 2},
    "causal": {"block_size": 4, "num_layers": 2, "causal": True},
    "token": {"block_size": 3, "num_layers": 1, "mask_token_id": 7},
}


@pytest.fixture(scope="module")
def target():
    return Target.wrap(random_model("llama"))


def make(target, name="full", dtype=torch.float32, **more):
    settings = {"taps": [0, 1], "num_heads": 4, "num_kv_heads": 2} | SETTINGS[name] | more
    return randomise(new_drafter("dflash", target, dtype=dtype, **settings), 0.4)


# Attention


def by_loop(query, context, own, anchors, document, causal, size):
    """Row by row: gather the keys, softmax, weighted sum."""
    rows, heads, count, dim = query.shape
    group, out = heads // context[0].shape[1], torch.zeros_like(query)
    for b in range(rows):
        for h in range(heads):
            for i in range(count):
                anchor, place = int(anchors[b, i // size]), i % size
                before = [r for r in range(anchor) if document[b, r] == document[b, anchor]]
                block = [i - place + j for j in range(size) if not causal or j <= place]
                keys, values = (torch.cat((c[b, h // group, before], o[b, h // group, block])) for c, o in zip(context, own, strict=True))
                out[b, h, i] = (keys @ query[b, h, i] * dim**-0.5).softmax(0) @ values
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_attention_of_blocks_is_the_loops(causal, kv):
    random = torch.Generator().manual_seed(kv)
    document = torch.tensor([[0] * 9 + [1] * 14, [0] * 4 + [1] * 11 + [-1] * 8])
    anchors = torch.tensor([[1, 5, 8, 10, 22], [1, 3, 7, 14, 14]])
    size = 3

    def made(heads, positions):
        return torch.randn(2, heads, positions, 6, generator=random, dtype=torch.float64, requires_grad=True)

    leaves = [made(4, 15), made(kv, 23), made(kv, 23), made(kv, 15), made(kv, 15)]
    weight = torch.randn(2, 4, 15, 6, generator=random, dtype=torch.float64)
    want = by_loop(leaves[0], leaves[1:3], leaves[3:], anchors, document, causal, size)
    expected = [want, *torch.autograd.grad((want * weight).sum(), leaves)]
    for budget in (1, 200, 1 << 22):
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            cast = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
            got = attend_blocks(cast[0], (cast[1], cast[2]), (cast[3], cast[4]), blocks_at(anchors, size, document), causal, budget)
            grads = torch.autograd.grad((got * weight.to(dtype)).sum(), cast)
            for ours, theirs in zip([got, *grads], expected, strict=True):
                assert (ours - theirs).abs().max() < tolerance * theirs.abs().max().clamp(min=1)


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operation returned."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return out


def largest(positions, anchors, size=8):
    heads, dim = 9, 16
    leaves = [
        torch.randn(1, n, m, dim, requires_grad=True)
        for n, m in ((heads, anchors * size), *[(3, positions)] * 2, *[(3, anchors * size)] * 2)
    ]
    at = torch.linspace(1, positions - 1, anchors).long()[None]
    with Largest() as mode:
        blocks = blocks_at(at, size, torch.zeros(1, positions, dtype=torch.int64))
        out = attend_blocks(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), blocks, False)
        out.sum().backward()
    return mode.bytes


def test_memory_is_linear_in_positions_and_a_fifth_of_a_dense_mask():
    size, positions, anchors = 8, 4096, 512
    few, many = largest(positions // 4, anchors // 4), largest(positions, anchors)
    rows = anchors * size
    assert many <= 4 * few
    assert 5 * many < rows * (positions + rows)  # bytes of one table of booleans for all heads, before any score


# Anchors


def test_anchors_are_drawn_from_all_that_fit_and_keyed_by_example():
    batch = packed(VOCAB)
    batch["loss_mask"] = batch["loss_mask"] | (batch["position_ids"] == 1)  # what a document's first token would predict is supervised
    fitting = {
        (b, a)
        for b in range(len(batch["input_ids"]))
        for a in range(1, 23)
        if batch["loss_mask"][b, a + 1] and batch["document"][b, a] == batch["document"][b, a + 1] == batch["document"][b, a - 1]
    }
    assert len(fitting) > 20
    drawn_from = set()
    for seed in range(40):
        anchors, drawn = draw_anchors(batch, 4, seed)
        assert anchors.shape == (len(batch["input_ids"]), 4) and (anchors.diff(dim=1) >= 0).all()
        for b in range(len(anchors)):
            each = anchors[b][drawn[b]].tolist()
            assert len(set(each)) == len(each) == min(4, sum(row == b for row, _ in fitting))
            drawn_from |= {(b, a) for a in each}
    assert drawn_from == fitting
    again = draw_anchors(batch, 4, 39)
    assert all(torch.equal(a, b) for a, b in zip(again, (anchors, drawn), strict=True))
    reversed_rows = draw_anchors({name: values.flip(0) for name, values in batch.items()}, 4, 39)
    assert torch.equal(reversed_rows[0].flip(0), anchors)  # whatever rows are beside it
    every = draw_anchors(batch, 1000, 0)
    assert {(b, int(a)) for b in range(len(anchors)) for a in every[0][b][every[1][b]]} == fitting
    assert not draw_anchors(batch | {"loss_mask": torch.zeros_like(batch["loss_mask"])}, 4, 0)[1].any()


def test_tokens_behind_an_anchor_end_with_its_answer():
    batch = packed(VOCAB)
    anchors, drawn = draw_anchors(batch, 6, 0)
    at, tokens, supervised = tokens_behind(batch, anchors, drawn, 5)
    counts = set()
    for b in range(len(anchors)):
        for i, anchor in enumerate(anchors[b].tolist()):
            run = 0
            while (
                run < 5
                and drawn[b, i]
                and anchor + 1 + run < 24
                and batch["loss_mask"][b, anchor + 1 + run]
                and batch["document"][b, anchor + 1 + run] == batch["document"][b, anchor]
            ):
                assert tokens[b, i, run] == batch["input_ids"][b, anchor + 1 + run] and at[b, i, run] == anchor + 1 + run
                run += 1
            assert supervised[b, i].tolist() == [True] * run + [False] * (5 - run)
            counts.add(run)
    assert counts >= {1, 2, 3, 5}


def test_paced_weights_are_the_sums_of_survival():
    accepted = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    supervised = torch.tensor([4, 0, 2, 1, 3, 4]).view(2, 3, 1) > torch.arange(4)
    weights = paced(accepted, supervised, 0.5)
    for b in range(2):
        for a in range(3):
            kept = int(supervised[b, a].sum())
            for j in range(4):
                want = sum(math.prod(0.5 * float(accepted[b, a, i]) + 0.5 for i in range(m + 1)) for m in range(j, kept)) if j < kept else 0
                assert float(weights[b, a, j]) == pytest.approx(want)


# The objective


def alone(drafter, target, ids, feature, anchor):
    """The logits [K,V] of one block, from a forward in which keys and values of context and block are one table."""
    config = drafter.config
    size, dim, heads, kv = config.block_size, config.head_dim, config.num_heads, config.num_kv_heads
    mask = target.embed(torch.tensor(config.mask_token_id)).double() if config.mask_token_id is not None else drafter.mask_embedding
    x = torch.stack([target.embed(ids[anchor]).double(), *[mask] * (size - 1)])
    context = feature[:anchor]

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def turned(x, positions):  # [n,heads,dim]
        angle = positions[:, None] * config.rope_theta ** (-torch.arange(0, dim, 2).double() / dim)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        left, right = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    at = torch.arange(anchor + size).double()
    for layer in drafter.layers:
        attention, normed = layer.self_attn, norm(x, layer.input_layernorm.weight)
        q = turned(norm((normed @ attention.q_proj.weight.T).view(size, heads, dim), attention.q_norm.weight), at[anchor:])
        both = torch.cat((context, normed))
        k = turned(norm((both @ attention.k_proj.weight.T).view(-1, kv, dim), attention.k_norm.weight), at)
        v = (both @ attention.v_proj.weight.T).view(-1, kv, dim)
        mixed = []
        for row in range(size):
            seen = anchor + (row + 1 if config.causal else size)
            each = [((k[:seen, h * kv // heads] @ q[row, h]) * dim**-0.5).softmax(0) @ v[:seen, h * kv // heads] for h in range(heads)]
            mixed.append(torch.cat(each))
        x = x + torch.stack(mixed) @ attention.o_proj.weight.T
        normed, parts = norm(x, layer.post_attention_layernorm.weight), layer.mlp
        x = x + (F.silu(normed @ parts.gate_proj.weight.T) * (normed @ parts.up_proj.weight.T)) @ parts.down_proj.weight.T
    return target.logits(norm(x, drafter.norm.weight)[1:])


def double_target():
    model = random_model("llama").double()
    return Target.wrap(model)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("weights, smoothing", [("decay", 0.5), ("pace", 0.5), ("pace", 0.2)])
def test_the_objective_is_the_loops(name, weights, smoothing):
    target = double_target()
    drafter = make(target, name, torch.float64).train()
    batch, section = (
        packed(VOCAB),
        DflashSection(loss="0.4 kl + 0.6 nll", weights=weights, smoothing=smoothing, anchors=4, gamma=2.5, block_size=5),
    )
    loss = objective(drafter, batch, target=target, section=section, seed=3)
    anchors, drawn = draw_anchors(batch, 4, 3)
    depth, total = drafter.config.depth, torch.zeros((), dtype=torch.float64)
    for b in range(len(anchors)):
        losses, factors = [], []
        for anchor in anchors[b][drawn[b]].tolist():
            number = batch["document"][b, anchor]
            span = (batch["document"][b] == number).nonzero().flatten()
            ids, first = batch["input_ids"][b, span], int(span[0])
            with torch.no_grad():
                out = target.forward(ids[None], taps=drafter.taps)
                p = target.logits(out.hidden[0]).log_softmax(-1)
            local = anchor - first
            logits = alone(drafter, target, ids, drafter.feature_of(TargetOutput(out.hidden, out.taps))[0], local)
            survival, own = 1.0, []
            for k in range(depth):
                at = local + 1 + k
                if at >= len(ids) or not batch["loss_mask"][b, first + at]:
                    break
                q = logits[k].log_softmax(-1)
                kl, nll = (p[at - 1].exp() * (p[at - 1] - q)).sum(), -q[ids[at]]
                losses.append(0.4 * kl + 0.6 * nll)
                survival *= smoothing + (1 - smoothing) * float(q[ids[at]].detach().exp())
                own.append(survival)
            factors += [math.exp(-k / 2.5) for k in range(len(own))] if weights == "decay" else [sum(own[k:]) for k in range(len(own))]
        if losses:
            share = torch.tensor(factors, dtype=torch.float64)
            total = total + batch["loss_mask"][b].sum() * (torch.stack(losses) * share).sum() / share.sum()
    assert total > 1 and float(loss.weight) == batch["loss_mask"].sum()
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    torch.testing.assert_close(loss.sum, total, rtol=1e-6, atol=0)  # RoPE is in float32
    for got, want in zip(torch.autograd.grad(loss.sum, trained), torch.autograd.grad(total, trained, materialize_grads=True), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_rows_add_up_however_they_are_split(target):
    drafter, batch, section = make(target).train(), packed(VOCAB), DflashSection(anchors=4)
    complete = objective(drafter, batch, target=target, section=section)
    rows = [
        objective(drafter, {name: values[b : b + 1] for name, values in batch.items()}, target=target, section=section) for b in range(2)
    ]
    rest = objective(drafter, {name: values[2:] for name, values in batch.items()}, target=target, section=section)
    torch.testing.assert_close(complete.sum, sum(part.sum for part in (*rows, rest)), rtol=1e-5, atol=1e-5)


def test_no_position_behind_the_anchor_reaches_a_block(target):
    drafter, batch = make(target), packed(VOCAB)
    ids, positions, document = (batch[name][:1] for name in ("input_ids", "position_ids", "document"))
    feature = torch.randn(1, 24, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    anchors = torch.tensor([[int((positions[0] > 2).nonzero()[0])]])
    (gradient,) = torch.autograd.grad(drafter.states_along(feature, ids, positions, document, anchors).sum(), feature)
    reached = set(gradient.abs().sum(-1)[0].nonzero().flatten().tolist())
    anchor = int(anchors)
    assert reached == {p for p in range(anchor) if document[0, p] == document[0, anchor]} and len(reached) == 3


# Training


@pytest.mark.parametrize("script", [train, dspark])
def test_it_trains_from_a_store_as_with_the_target(script, target_folder, tmp_path):
    method = script.__name__.split(".")[-1]
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    own = [f"{method}.{key}" for key in ("taps=[0,1]", "layers=1", "anchors=6", "block_size=4")]
    data = [f"data.{key}" for key in (f"train={text}", "valid=null", f"cache={tmp_path}", "seq_len=32", "num_proc=1", "template=null")]
    steps = [
        f"train.{key}" for key in ("steps=6", "batch_size=2", "warmup_steps=0", "eval_batches=2", "eval_every=3", "log_every=1", "lr=3e-3")
    ]
    words = [f"{method}-tiny", f"target.path={target_folder}", "data.near_duplicate=1.0", *own, *data, *steps]
    store = [f"features.store={tmp_path}/store", "features.precision=float32"]
    data_cli.main(["capture", *words, f"train.output={tmp_path}/captured", *store, "features.taps=[1,0]"])
    losses = {}
    for name, more in (("online", []), ("offline", [*store, "features.mode=offline"])):
        script.main([*words, f"train.output={tmp_path / name}", *more])
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row.get("loss", row.get("valid_loss")) for row in rows]
    assert losses["online"] == pytest.approx(losses["offline"], rel=1e-5) and len(losses["online"]) >= 8
    drafter = load_drafter(tmp_path / "online" / "artifact", Target.load(str(target_folder)))
    assert drafter.method == method and drafter.config.training["positions"] == 32
    fresh = new_drafter(
        method, drafter.target, **{name: getattr(drafter.config, name) for name in ("taps", "num_layers", "num_heads", "block_size")}
    )
    assert not torch.equal(fresh.mask_embedding, drafter.mask_embedding)


# Settings


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"block_size": 1}, "block_size 1"),
        ({"taps": []}, "expected layers of the target"),
        ({"taps": [1, 0]}, "ascending"),
        ({"num_heads": 3, "num_kv_heads": 2, "head_dim": 8}, "multiple of the KV heads"),
        ({"head_dim": 5}, "even number"),
        ({"mask_token_id": VOCAB}, "mask_token_id 67"),
        ({"tree": [[0] * 5, *([0] * k for k in range(1, 5))]}, "deeper|deep"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, said):
    sizes = {"hidden_size": 32, "vocab_size": VOCAB, "taps": [0, 1], "num_heads": 4, "block_size": 5}
    with pytest.raises(ValueError, match=said):
        DflashConfig(**sizes | settings)


def test_a_tap_that_the_target_lacks_is_refused(target):
    with pytest.raises(ValueError, match=r"\[99\] are not of it"):
        make(target, taps=[1, 99])


@pytest.mark.parametrize(
    "words, said",
    [
        (["dflash.block_size=64", "data.seq_len=32"], "dflash.block_size looks 64 positions ahead"),
        (["train.context_parallel=2"], "is for EAGLE"),
        (["dflash.loss=best"], "dflash.loss='best'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(words, said):
    with pytest.raises(ValueError, match=said):
        train.main(["dflash-tiny", *words])


def test_weights_of_a_sequence_add_up_to_its_tokens():
    batch = packed(VOCAB)
    weights = per_sequence(torch.rand(len(batch["input_ids"]), 3, 2), batch)
    torch.testing.assert_close(weights.sum((1, 2)), batch["loss_mask"].sum(1).float())
    assert not per_sequence(torch.zeros(len(batch["input_ids"]), 3, 2), batch).any()


@pytest.mark.parametrize("tree", [StaticTree.chain(3), DynamicTree(3, 2, 10)], ids=["chain", "dynamic"])
def test_no_draft_is_deeper_than_its_round(target, tree):
    drafter = make(target)
    drafter.tree_spec, flat = tree, drafter.head_logits
    drafter.head_logits = lambda states: 100 * flat(states)  # so that the likeliest nodes are a chain
    check_depths(target, drafter, PROMPTS)
