"""P-EAGLE: the objective against one forward for each anchor with tables of scores in float64, what a mask sees, decoding against such forwards,
training from a store."""

import json
from collections import Counter

import pytest
import torch
from decoding_cases import PROMPTS, check_depths
from packed_data import packed
from planted import Planted
from random_targets import random_model, randomise

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafter import TargetOutput
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.tree import StaticTree
from draftsmith.models import vocab
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.mask_rows import mask_rows
from draftsmith.models.peagle import PeagleConfig
from draftsmith.models.target import Target
from draftsmith.train import peagle as train
from draftsmith.train.eagle import begin_with
from draftsmith.train.losses.anchors import draw_chains, retained
from draftsmith.train.peagle import PeagleSection, objective

VOCAB = 67
SIZES = {"taps": [0, 1], "num_heads": 4, "num_kv_heads": 2, "steps": 4, "num_layers": 2, "mask_token_id": 7}


def make(target, dtype=torch.float32, **more):
    drafter = new_drafter("peagle", target, dtype=dtype, **SIZES | more)
    if drafter.config.draft_vocab_size < VOCAB:
        drafter.take(vocab.choose(torch.arange(VOCAB) % 11 + 1, drafter.config.draft_vocab_size, []))
    return randomise(drafter, 0.4)


def dense(query, key, value, seen):
    """One table of scores; seen [queries, keys] bool."""
    key, value = (side.repeat_interleave(query.shape[1] // key.shape[1], 1) for side in (key, value))
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


def alone(drafter, ids, feature, pair):
    """The logits [K,D] of the pair at `pair` of one document and of the masks behind it, all as rows of one sequence."""
    count, masks = pair + 1, drafter.config.steps - 1
    masked, tokens = drafter.mask_pairs(1, masks)
    rows = torch.cat((feature[:, :count], masked), 1)
    read = torch.cat((ids[None, 1 : count + 1], tokens), 1)
    causal = torch.ones(count + masks, count + masks, dtype=torch.bool).tril()
    out = drafter.step(rows, read, torch.arange(count + masks)[None], lambda _, q, k, v: dense(q, k, v, causal))
    return drafter.logits_of(out)[0, pair:]


@pytest.mark.parametrize("size", [VOCAB, 30])
def test_the_objective_is_the_loops(size):
    target = Target.wrap(random_model("llama").double())
    drafter, batch = make(target, torch.float64, draft_vocab_size=size, fc_norm=True).train(), packed(VOCAB, share=1.0)
    section = PeagleSection(retention=0.7, least_retention=0.4, decay=0.7, loss="0.5 kl + 0.5 tv", steps=4)
    loss = objective(drafter, batch, target=target, section=section, seed=2)
    pairs, depths, drawn = draw_chains(batch, retained(0.7, 0.4, 3), 2, ahead=2)
    assert {int(depth) for depth in depths[drawn]} == {1, 2, 3}
    kept, total, counted = drafter.vocabulary.targets, torch.zeros((), dtype=torch.float64), 0

    def each(p, logits):
        q, part = logits.log_softmax(-1), p[kept] / p[kept].sum()
        known = bool((kept == p.argmax()).any())
        kl = (part * (part.log() - q)).sum() if known else 0.0
        return 0.5 * kl + 0.5 * (1 - torch.minimum(p[kept], q.exp()).sum())

    for b in range(len(pairs)):
        terms = []
        for number in range(int(batch["document"][b].max()) + 1):
            span = (batch["document"][b] == number).nonzero().flatten()
            ids, mask, first = batch["input_ids"][b, span], batch["loss_mask"][b, span], int(span[0])
            with torch.no_grad():
                out = target.forward(ids[None], taps=drafter.taps)
                p = target.logits(out.hidden[0]).softmax(-1)
            feature = drafter.feature_of(TargetOutput(out.hidden, out.taps))
            for pair in range(len(ids) - 2):
                if mask[pair + 2]:
                    total = total + each(p[pair + 1], alone(drafter, ids, feature, pair)[0])
            for at, depth in zip(pairs[b][drawn[b]].tolist(), depths[b][drawn[b]].tolist(), strict=True):
                if not first <= at < first + len(ids):
                    continue
                pair = at - first
                logits = alone(drafter, ids, feature, pair)
                for i in range(depth + 1):
                    if pair + 2 + i >= len(ids) or not mask[pair + 2 + i]:
                        break
                    if i:
                        terms.append(0.7**i * each(p[pair + 1 + i], logits[i]))
        counted += len(terms)
        if terms:
            total = total + sum(terms)
    assert counted > 15
    torch.testing.assert_close(loss.sum, total, rtol=1e-6, atol=0)
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    for got, want in zip(torch.autograd.grad(loss.sum, trained), torch.autograd.grad(total, trained, materialize_grads=True), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_mask_sees_its_pairs_and_the_masks_before_it():
    target = Target.wrap(random_model("llama"))
    drafter, batch = make(target), packed(VOCAB, share=1.0)
    ids, positions, document = (batch[name][:1] for name in ("input_ids", "position_ids", "document"))
    feature = torch.randn(1, 24, drafter.config.draft_size, generator=torch.Generator().manual_seed(0), requires_grad=True)
    pair = int((positions[0] > 2).nonzero()[0])
    rows = mask_rows(document, torch.tensor([[pair]]), torch.tensor([[3]]), 3, 3)
    _, later = drafter.states_along(feature, ids, positions, document, rows)
    (gradient,) = torch.autograd.grad(later.sum(), feature)
    reached = set(gradient.abs().sum(-1)[0].nonzero().flatten().tolist())
    assert reached == {p for p in range(pair + 1) if document[0, p] == document[0, pair]} and len(reached) == 4
    (gradient,) = torch.autograd.grad(drafter.states_along(feature, ids, positions, document, rows)[1][0, 0].sum(), drafter.mask_hidden)
    assert gradient.any()


@pytest.mark.parametrize("slots, depth", [(1, 4), (3, 4), (3, 2)])
def test_decoding_drafts_what_training_does(slots, depth):
    """Prompts in chunks, rows that accept different counts: each slot's outputs are those of one forward over its pairs and masks."""
    target = Target.wrap(random_model("llama"))
    drafter, prompts = make(target).eval(), [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 11, 30], [8, 3], [4] * 9, [60, 2, 2]]
    answers = [answer.tokens for answer in Decoder(target).generate(prompts, max_new_tokens=18, stop_ids=())]
    lines = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    features = [drafter.feature_of(target.forward(line[None], taps=drafter.taps)).detach() for line in lines]
    drafter.chunk, drafter.tree_spec = 3, StaticTree.chain(depth)
    start, propose, accept = drafter.start, drafter.propose, drafter.accept
    texts: dict[int, list[int]] = {}
    seen: Counter[object] = Counter()

    def note_start(chosen, given, out):
        texts.update({slot: list(prompt) for slot, prompt in zip(chosen, given, strict=True)})
        start(chosen, given, out)

    def compare(round):
        for slot in round.slots:
            ids = torch.tensor(texts[slot])
            if len(ids) > 1:
                feature = next(each for each, line in zip(features, lines, strict=True) if torch.equal(line[: len(ids)], ids))
                expected = alone(drafter, ids, feature, len(ids) - 2)[:depth]
                torch.testing.assert_close(drafter.logits_of(drafter._state.last_output[slot]), expected, rtol=1e-4, atol=1e-4)
                seen["compared"] += 1
        return propose(round)

    def note_accept(round, tree, verdict, out):
        counts = [len(result.tokens) for result in verdict.on_host(tree)]
        seen["ragged"] += len(set(counts)) > 1
        for slot, result in zip(round.slots, verdict.on_host(tree), strict=True):
            texts[slot] += result.tokens
        accept(round, tree, verdict, out)

    drafter.start, drafter.accept = note_start, note_accept
    drafter.propose = Planted(compare, prompts, answers, VOCAB)
    assert [answer.tokens for answer in Decoder(target, drafter, slots=slots).generate(prompts, max_new_tokens=18, stop_ids=())] == answers
    assert seen["compared"] >= 40 and (slots == 1 or seen["ragged"] >= 5), seen


def test_it_trains_from_a_store_as_with_the_target(target_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    own = [f"peagle.{key}" for key in ("taps=[0,1]", "layers=1", "steps=3", "vocab_size=64")]
    data = [f"data.{key}" for key in (f"train={text}", "valid=null", f"cache={tmp_path}", "seq_len=32", "num_proc=1", "template=null")]
    steps = [f"train.{key}" for key in ("steps=6", "batch_size=2", "warmup_steps=0", "eval_batches=2", "eval_every=3", "log_every=1")]
    words = ["peagle-tiny", f"target.path={target_folder}", "data.near_duplicate=1.0", *own, *data, *steps]
    losses = {}
    for name, more in (
        ("cached", [f"features.store={tmp_path}/store", "features.precision=float32", "features.mode=cache"]),
        ("online", []),
    ):
        train.main([*words, f"train.output={tmp_path / name}", *more])
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row.get("loss", row.get("valid_loss")) for row in rows]
    assert losses["cached"] == pytest.approx(losses["online"], rel=1e-5) and len(losses["online"]) >= 8


@pytest.mark.parametrize("settings, said", [({"version": 1, "taps": None}, "version 1"), ({"mask_token_id": VOCAB}, "mask_token_id 67")])
def test_sizes_that_do_not_fit_are_refused(settings, said):
    sizes = {"hidden_size": 32, "vocab_size": VOCAB, "taps": [0, 1], "num_heads": 4}
    with pytest.raises(ValueError, match=said):
        PeagleConfig(**sizes | settings)


def test_a_warm_start_is_re_indexed_to_the_new_draft_vocabulary(tmp_path):
    """Each token's row of the head comes from the same token's; what is saved drafts as what was trained."""
    target = Target.wrap(random_model("llama"))

    def drafter(seed: int):
        new = make(target, draft_vocab_size=20)
        new.take(vocab.choose(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed)) + 1, 20, []))
        return new

    old, new = randomise(drafter(0), 0.4), drafter(1)
    old.save_pretrained(tmp_path / "old")
    fresh = new.lm_head.weight.detach().clone()
    begin_with(new, str(tmp_path / "old"), target, "peagle.start")
    there = {token: row for row, token in enumerate(old.vocabulary.targets.tolist())}
    seen = Counter(token in there for token in new.vocabulary.targets.tolist())
    for row, token in enumerate(new.vocabulary.targets.tolist()):
        assert torch.equal(new.lm_head.weight[row], old.lm_head.weight[there[token]] if token in there else fresh[row])
    assert min(seen[True], seen[False]) >= 3 and torch.equal(new.mask_hidden, old.mask_hidden)
    with pytest.raises(ValueError, match="differs in mask_token_id"):
        begin_with(make(target, mask_token_id=8), str(tmp_path / "old"), target, "peagle.start")


def test_an_eagle_drafter_is_a_start_for_all_but_the_mask(tmp_path):
    target = Target.wrap(random_model("llama"))
    shape = {name: size for name, size in SIZES.items() if name not in ("steps", "mask_token_id")}
    old, new = randomise(new_drafter("eagle", target, version=3, **shape), 0.3), make(target)
    old.save_pretrained(tmp_path)
    mask = new.mask_hidden.detach().clone()
    begin_with(new, str(tmp_path), target, "peagle.start")
    assert torch.equal(new.mask_hidden, mask)
    same = [torch.equal(tensor, new.state_dict()[name]) for name, tensor in old.state_dict().items()]
    assert all(same) and len(same) > 10
    new.save_pretrained(tmp_path / "new")
    again, ids, roots = load_drafter(tmp_path / "new", target), torch.arange(12) * 5 % VOCAB, torch.arange(2, 9)
    out = target.forward(ids[None], taps=(0, 1))
    drafts = [each.eval().position_logits(each.position_features(ids, out), roots) for each in (new, again)]
    torch.testing.assert_close(*drafts)


@pytest.mark.parametrize("tree", [StaticTree.chain(3), DynamicTree(3, 2, 10)], ids=["chain", "dynamic"])
def test_no_draft_is_deeper_than_its_round(tree):
    target = Target.wrap(random_model("llama"))
    drafter = make(target).eval()
    drafter.tree_spec, flat = tree, drafter.logits_of
    drafter.logits_of = lambda states: 100 * flat(states)  # so that the likeliest nodes are a chain
    check_depths(target, drafter, PROMPTS)
