"""PARD: the objective against a forward for each anchor with dense masks in float64, what is retained, drafts as in training, and refusals."""

import json

import pytest
import torch
from decoding_cases import relative
from packed_data import packed
from random_targets import random_model
from transformers import AutoModelForCausalLM
from zoo import VOCAB, tiny

from draftsmith.eval import loading
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.tree import StaticTree
from draftsmith.models.mask_rows import check_attention, hidden_with_masks, mask_rows
from draftsmith.models.pard import ParallelDraftModel
from draftsmith.models.target import Target
from draftsmith.train import pard as train
from draftsmith.train.losses.anchors import chain_rows, draw_chains, retained
from draftsmith.train.pard import PardSection, objective

K, MASK = 4, 7


def alone(model, ids, masks):
    """Logits [1 + masks,V] of the last of ids [n] and of masks behind it, by transformers' own attention over them all."""
    tokens = torch.cat((ids, torch.full((masks,), MASK)))
    return model(input_ids=tokens[None]).logits[0, len(ids) - 1 :]


@pytest.mark.parametrize(("name", "vocab"), [("llama", 67), ("qwen3", 67), ("llama", 60)])
def test_the_objective_is_the_loops(name, vocab):
    """Value and gradient, with retention that drops most masks. Of 67 tokens a draft model may have 60: the others have no term."""
    model, batch = random_model(name).double().train(), packed(67, prompt=2, share=1.0)
    section = PardSection(steps=K, retention=0.6, least_retention=0.3)
    loss = objective(model, batch, vocab_size=vocab, section=section, mask_token=MASK, seed=2)
    anchors, depths, drawn = draw_chains(batch, retained(0.6, 0.3, K - 1), 2)
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for b in range(len(anchors)):
        terms = []
        chains = [(a, d) for a, d, ok in zip(anchors[b].tolist(), depths[b].tolist(), drawn[b].tolist(), strict=True) if ok]
        assert len({a for a, _ in chains}) == len(chains)
        for number in range(int(batch["document"][b].max()) + 1):
            span = (batch["document"][b] == number).nonzero().flatten()
            ids, mask, first = batch["input_ids"][b, span], batch["loss_mask"][b, span], int(span[0])
            logits = model(input_ids=ids[None]).logits[0, :, :vocab].log_softmax(-1)
            terms += [-logits[t, ids[t + 1]] for t in range(len(ids) - 1) if mask[t + 1] and ids[t + 1] < vocab]
            for anchor, depth in chains:
                root = anchor - first
                if not 0 <= root < len(ids):
                    continue
                drafts = alone(model, ids[: root + 1], depth)[:, :vocab].log_softmax(-1)
                for i in range(1, depth + 1):
                    if root + 1 + i >= len(ids) or not mask[root + 1 : root + 2 + i].all():
                        break
                    if ids[root + 1 + i] < vocab:
                        terms.append(-drafts[i, ids[root + 1 + i]])
                        counted += 1
        total = total + batch["loss_mask"][b].sum() * sum(terms) / len(terms)
    assert counted > 40
    torch.testing.assert_close(loss.sum, total, rtol=1e-7, atol=0)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(value, parameters, materialize_grads=True) for value in (loss.sum, total)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_what_is_retained():
    """Each level has its share of the positions that can have it; draws follow the sample, not its place in a batch; rows are padded."""
    batch = packed(67, prompt=2, share=1.0)
    shares = retained(0.5, 0.2, 4)
    assert shares == [0.5, 0.25, 0.2, 0.2] and retained(1.0, 0.2, 2) == [1.0, 1.0]
    anchors, depths, drawn = draw_chains(batch, shares, 0)
    mask, document = batch["loss_mask"], batch["document"]
    for b in range(len(mask)):
        fitting = sum(bool(mask[b, t + 1] and mask[b, t + 2] and document[b, t + 2] == document[b, t]) for t in range(22))
        for level, share in enumerate(shares, 1):
            assert int(((depths >= level) & drawn)[b].sum()) == min(fitting, max(1, int(fitting * share)))
    assert (depths.sum(1) == 12 + 6 + 4 + 4).all() and chain_rows(shares, 24) == 26 and int(depths.max()) <= 4
    assert (anchors.diff(dim=1) >= 0).all() and drawn.any() and not drawn.all() and (depths[drawn] > 0).all()
    for b, a in drawn.nonzero().tolist():
        at = int(anchors[b, a])
        assert mask[b, at + 1] and mask[b, at + 2] and document[b, at + 2] == document[b, at]
    turned = {name: values.flip(0) for name, values in batch.items()}
    for got, want in zip(draw_chains(turned, shares, 0), (anchors, depths, drawn), strict=True):
        assert torch.equal(got.flip(0), want)
    assert not torch.equal(draw_chains(batch, shares, 1)[0], anchors)


def test_drafts_are_those_of_training():
    """The logits that decoding drafts from equal training's at the same positions, after prompts and after rounds of every accepted length."""
    target, draft = Target.wrap(tiny("llama")), relative("llama", 0.05)
    drafter = ParallelDraftModel(draft, StaticTree.chain(K), MASK, K, chunk=5)
    ids = torch.tensor(Decoder(target).generate([[5, 6, 7, 1, 9]], max_new_tokens=40, stop_ids=())[0].tokens)
    ids = torch.cat((torch.tensor([5, 6, 7, 1, 9]), ids))
    every = torch.arange(len(ids))[None]
    rows = mask_rows(torch.zeros_like(every), every, torch.full_like(every, K - 1), len(ids) * (K - 1), K - 1)
    states = hidden_with_masks(draft.model, ids[None], every, rows, MASK)[0]
    logits = draft.logits(torch.cat((states[: len(ids), None], states[len(ids) :].unflatten(0, (len(ids), K - 1))), 1))
    seen, proposed = set(), drafter.logits

    def checked(hidden):
        seen.add(drafter.at)
        torch.testing.assert_close(proposed(hidden)[0], logits[drafter.at], rtol=1e-4, atol=1e-4)
        return proposed(hidden)

    class Fixed(ParallelDraftModel):
        def propose(self, round):
            drafter.at = int(round.positions[0])
            tree = super().propose(round)
            right = len(seen) % (K + 1)  # so many drafts are those of the text, at least
            for depth in range(1, right + 1):
                tree.tokens[0, depth] = ids[min(drafter.at + depth, len(ids) - 1)]
            return tree

    drafter = Fixed(draft, StaticTree.chain(K), MASK, K, chunk=5)
    proposed, drafter.logits = drafter.logits, checked
    out = Decoder(target, drafter).generate([[5, 6, 7, 1, 9]], max_new_tokens=40, stop_ids=())[0]
    assert out.tokens == ids[5:].tolist() and len(seen) >= 10 and {round.accepted for round in out.rounds} >= {1, 2, 3, 4, 5}
    features = drafter.position_features(ids, None)
    drafter.logits = proposed
    torch.testing.assert_close(drafter.position_logits(features, torch.arange(3, 9)), logits[3:9], rtol=1e-4, atol=1e-4)


def test_it_drafts_beside_a_lookup_and_with_a_window():
    target = Target.wrap(tiny("llama"))
    prompts = [[5, 6, 7] * 9, [9, 3]]
    plain = [text.tokens for text in Decoder(target).generate(prompts, max_new_tokens=30, stop_ids=())]
    for tree in (StaticTree.chain(3), DynamicTree(3, 2, 8)):
        drafter = ParallelDraftModel(relative("llama", 0.01), tree, MASK, K)
        assert [
            text.tokens for text in Decoder(target, Hybrid(drafter), slots=2).generate(prompts, max_new_tokens=30, stop_ids=())
        ] == plain
        loading.set_draft_window(drafter, 6)
        windowed = Decoder(target, drafter, slots=2).generate(prompts, max_new_tokens=30, stop_ids=())
        assert [text.tokens for text in windowed] == plain and any(round.accepted > 1 for text in windowed for round in text.rounds)


@pytest.fixture
def words(tmp_path, target_folder):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    data = [f"data.{key}" for key in (f"train={text}", "valid=null", f"cache={tmp_path}", "seq_len=32", "num_proc=1", "template=null")]
    steps = [f"train.{key}" for key in ("steps=8", "batch_size=2", "warmup_steps=0", "eval_batches=2", "eval_every=4", "log_every=1")]
    own = [f"pard.start={target_folder}", "pard.steps=4", "pard.mask_token=255", "tree.depth=3"]
    return ["pard-tiny", f"target.path={target_folder}", "data.near_duplicate=1.0", *own, *data, *steps]


def test_it_trains_saves_and_drafts_for_a_family(words, tmp_path, target_folder):
    train.main([*words, f"train.output={tmp_path / 'run'}"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] and "valid_sim_tau" in str(rows)
    folder = tmp_path / "run" / "artifact"
    config = json.loads((folder / "config.json").read_text())
    assert config["pard_token"] == 255 and config["draftsmith"]["parallel"] == 4 and config["model_type"] == "llama"
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "LlamaForCausalLM"
    config["draftsmith"]["target"]["config_hash"] = "another target of the family"
    (folder / "config.json").write_text(json.dumps(config))
    target, (drafter,) = loading.open_models(str(target_folder), [str(folder)], "float32")
    assert isinstance(drafter, ParallelDraftModel) and (drafter.mask_token, drafter.max_depth, drafter.depth_limit) == (255, 3, 4)
    with pytest.raises(ValueError, match="looks 4 ahead at most; lower the depth"):
        loading.tree_spec_from_options("chain", drafter, 5, None, None)
    out = Decoder(target, drafter).generate([[3, 4, 5]], max_new_tokens=8, stop_ids=())
    assert out[0].tokens == Decoder(target).generate([[3, 4, 5]], max_new_tokens=8, stop_ids=())[0].tokens
    again = tmp_path / "again"
    train.main(
        [
            *[word for word in words if not word.startswith(("pard.start", "pard.mask"))],
            f"pard.start={folder}",
            "pard.mask_token=null",
            f"train.output={again}",
        ]
    )
    assert json.loads((again / "artifact" / "config.json").read_text())["pard_token"] == 255  # the model's own


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["pard.mask_token=null"], "pard.mask_token: the tokenizer has all .* ids of .*; name a token that texts do not have"),
        (["pard.mask_token=9999"], "pard.mask_token=9999: .* has the tokens 0 to"),
        (["features.mode=offline"], "features.mode=offline: PARD trains on the text alone"),
        (["train.compile=true"], "train.compile=True does nothing with PARD"),
        (["train.context_parallel=2"], "train.context_parallel=2 is for EAGLE"),
        (["pard.steps=40"], "pard.steps looks 41 positions ahead, data.seq_len=32"),
        (["tree.nodes=5"], "a chain tree takes a depth alone, got a width or nodes"),
        (["tree.depth=5"], "looks 4 ahead at most; lower the depth"),
    ],
)
def test_wrong_words_are_refused(words, tmp_path, more, said):
    with pytest.raises(ValueError, match=said) as error:
        train.main([*words, f"train.output={tmp_path / 'out'}", *more])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_models_with_windows_caps_or_sinks_are_refused(name):
    with pytest.raises(ValueError, match="x: .* has windows, sinks or soft-capped scores; expected a model whose layers all attend"):
        check_attention(tiny(name), "x")
    if name == "gpt_oss":  # its windows alone are reason enough
        model = tiny(name)
        model.config.layer_types, model.config.sliding_window = ["full_attention"] * model.config.num_hidden_layers, None
        with pytest.raises(ValueError, match="sinks"):
            check_attention(model, "x")


def test_a_drafter_that_cannot_be_is_refused():
    draft = relative("llama")
    with pytest.raises(ValueError, match=f"got pard_token {VOCAB}; expected a token of the draft model, 0 to {VOCAB - 1}"):
        ParallelDraftModel(draft, StaticTree.chain(2), VOCAB, K)
    with pytest.raises(ValueError, match="got a tree 5 deep; this parallel draft model drafts 4 at most"):
        ParallelDraftModel(draft, StaticTree.chain(5), MASK, K)
    drafter = ParallelDraftModel(draft, StaticTree.chain(2), MASK, K)
    with pytest.raises(ValueError, match="does not draft level by level"):
        loading.set_stop(drafter, "confidence:0.5")
