"""A drafter's confidence: its formula, its fit from known weights, the chains that it is fitted on against loops, what options and files say."""

import json
import math

import pytest
import torch
from packed_data import corpus_of, rows_of_24
from random_targets import random_model, randomise

from draftsmith.data.packing import PackedDataset
from draftsmith.eval.loading import set_stop
from draftsmith.inference.confidence import CHILDREN, Confidence, features
from draftsmith.inference.sampler import gumbel
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.target import Target
from draftsmith.train.engine import confidence
from draftsmith.train.losses.calibration import fit_confidence

VOCAB = 67
KINDS = {
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3, "prefix": True, "attention_heads": 4},
    "mlp": {"num_heads": 3, "inner_size": 20},
    "eagle": {"taps": [0, 1], "num_heads": 4, "steps": 3},
    "mtp": {"layer": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}, "steps": 3},
    "kangaroo": {"exit_layer": 1, "num_heads": 4},
}
WEIGHTS = {name: [[1.0 + i, 0.5, -2.0], [0.3, -0.1 * i, 0.0]] for i, name in enumerate(CHILDREN)}
ONES = {name: [[1.0, 1.0, 1.0]] for name in CHILDREN}


@pytest.fixture(scope="module")
def target():
    return Target.wrap(random_model("llama"))


def make(target, kind):
    return randomise(new_drafter(kind, target, **KINDS[kind]), 0.4)


def test_chance_is_its_formula():
    """With −inf outside a draft vocabulary, with a certain and with an even distribution; deeper than the weights the last row counts."""
    own = Confidence.parse(WEIGHTS)
    rows = [[0.3, -1.0, 2.5, 0.0], [1.0, -math.inf, 0.0, -math.inf], [0.0] * 4, [60.0, 0.0, 0.0, 0.0]]
    for depth, children, row in ((1, "greedy", 0), (2, "drawn", 1), (1, "top", 0), (2, "shared-noise", 1), (7, "greedy", 1)):
        weights = WEIGHTS[children][row]
        for logits, chance in zip(rows, own.chance(depth, torch.tensor(rows), children).tolist(), strict=True):
            q = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
            most = min(max(q), math.exp(-1e-6))
            z = weights[0] * math.log(most / (1 - most)) - weights[1] * sum(p * math.log(p) for p in q if p > 0) + weights[2]
            assert chance == pytest.approx(1 / (1 + math.exp(-z)), rel=1e-4)


def test_fit_gives_back_the_weights_that_made_the_chances():
    """Each depth by itself; depths that no chain reaches get zeros, and where all drafts are accepted the weights are finite."""
    random = torch.Generator().manual_seed(0)
    x = features(torch.randn(3000, 4, 20, generator=random) * torch.rand(3000, 4, 1, generator=random) * 4).double()
    true = torch.tensor([[1.0, 0.3, -0.5], [0.4, -0.2, 0.7], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    counted = torch.arange(4) < torch.tensor([3, 2, 3])[torch.randint(3, (3000,), generator=random), None]
    accepted = (x * true).sum(-1).sigmoid()
    accepted[:, 2] = 1.0
    weights = fit_confidence(x, accepted, counted)
    assert torch.allclose(weights[:2], true[:2], atol=0.02) and weights[3].tolist() == [0, 0, 0]
    assert weights[2].isfinite().all() and float((x[:, 2] @ weights[2]).sigmoid().min()) > 0.95


def test_weights_of_drafts_that_are_all_accepted_end_where_their_ridge_balances_them():
    """σ(−w) = 2·10⁻⁶ w: the derivative of log(1 + exp(−w)) + 10⁻⁶ w² is 0 there."""
    x = torch.tensor([[[0.0, 0.0, 1.0]]] * 8, dtype=torch.float64)
    weights = fit_confidence(x, torch.ones(8, 1), torch.ones(8, 1, dtype=torch.bool))
    low, high = 1.0, 30.0
    while high - low > 1e-6:
        w = (low + high) / 2
        low, high = (w, high) if 1 / (1 + math.exp(w)) > 2e-6 * w else (low, w)
    assert weights.tolist() == [[0, 0, pytest.approx(low, rel=0.02)]]


@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_each_document(target, kind, monkeypatch):
    """α and agreement from the target's and the drafter's distributions of each document alone; a token that is no answer's ends the count."""
    monkeypatch.setattr(confidence, "AT_ONCE", 5)
    drafter, rows = make(target, kind), rows_of_24(VOCAB)
    depth, seen = drafter.depth_limit, 0
    for number in range(len(rows)):
        batch = rows.batch(torch.tensor([number]))
        actual = iter(list(confidence._chains(drafter, target, batch)))
        for document in range(int(batch["document"].max()) + 1):
            at = batch["document"][0] == document
            ids, mask = batch["input_ids"][0, at], batch["loss_mask"][0, at]
            if len(ids) < depth + 2:
                continue
            out = target.forward(ids[None], taps=drafter.taps)
            own, p = drafter.position_features(ids, out), target.logits(out.hidden[0]).double().softmax(-1)
            kept = [root for root in range(1, len(ids) - depth)]
            blocks = [kept[i : i + 5] for i in range(0, len(kept), 5)]
            kept = [root for block in blocks if any(mask[root + 1] for root in block) for root in block]
            if not kept:
                continue
            chains = next(actual)
            assert len(chains) == len(kept)
            for i, root in enumerate(kept):
                q, counted = drafter.position_logits(own, torch.tensor([root]))[0].detach().double().softmax(-1), 1
                for k in range(depth):
                    counted *= int(mask[root + k + 1])
                    overlap = sum(min(float(a), float(b)) for a, b in zip(p[root + k], q[k], strict=True))
                    agree, best = int(p[root + k].argmax() == q[k].argmax()), float(p[root + k, q[k].argmax()])
                    noise = gumbel(0, torch.tensor(0), torch.tensor(root + k), VOCAB).double()
                    same = int((p[root + k].log() + noise).argmax() == (q[k].log() + noise).argmax())
                    assert chains.accepted[i, k].tolist() == pytest.approx([agree, best, same, overlap], abs=1e-5)
                    assert int(chains.counted[i, k]) == counted
                    assert chains.features[i, k, 0].sigmoid().item() == pytest.approx(q[k].max().item(), abs=1e-5)
                    seen += counted
        assert next(actual, None) is None
    assert seen > 40


@pytest.mark.parametrize("kind", KINDS)
def test_training_ends_with_weights_that_stay_in_the_artifact(target, kind, tmp_path, capsys):
    drafter, rows = make(target, kind), PackedDataset(corpus_of([9, 12, 24, 11, 21, 17] * 4, seq_len=24, vocab=VOCAB), 24)
    with pytest.raises(
        ValueError,
        match="no `confidence_weights` in its config; training fits them for Medusa,",
    ):
        set_stop(drafter, "survival:0.3")
    confidence.fit(drafter, target, rows)
    assert f"confidence: expected calibration error of survival at depth 1 … {drafter.depth_limit}: greedy 0." in capsys.readouterr().out
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target)
    weights = loaded.config.confidence_weights
    assert (
        weights == drafter.config.confidence_weights
        and len(weights["greedy"]) == drafter.depth_limit
        and len({str(rows) for rows in weights.values()}) == 4
    )
    set_stop(loaded, "survival:0.3")
    assert loaded.stop.confidence == Confidence.parse(weights) and str(loaded.stop) == "survival:0.3"


@pytest.mark.parametrize(
    "weights",
    [
        {"greedy": [[1.0, 1.0, 1.0]]},
        ONES | {"drawn": [[1.0, 1.0]]},
        ONES | {"drawn": []},
        dict.fromkeys(CHILDREN, []),
        {},
        ONES | {"top": [[1.0, 1.0, "1"]]},
        ONES | {"top": [[1.0, 1.0, math.inf]]},
        ONES | {"other": [[1.0, 1.0, 1.0]]},
        ONES | {"greedy": 1},
        [1],
    ],
)
def test_damaged_weights_are_refused(target, weights, tmp_path):
    make(target, "medusa").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"confidence_weights": weights}))
    with pytest.raises(ValueError, match="config.json.*`confidence_weights`.*correct it or restore the file"):
        load_drafter(tmp_path, target)
