"""Packed sequences: nothing is lost, no document sees another, the loss is that of unpacked samples, and (seed, epoch) fix the order."""

import random

import pytest
import torch
from packed_data import LENGTHS, corpus_of
from zoo import CONFIGS, tiny

from draftsmith.data.packing import PackedDataset, TokenStream, keeps_apart, pack
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train.engine.order import sample_rows
from draftsmith.train.medusa import MedusaSection, objective


def naive(lengths, seq_len):
    """Best fit, longest first, by looking at every bin."""
    bins: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fitting = [number for number in range(len(bins)) if left[number] >= lengths[index]]
        if fitting:
            number = min(fitting, key=lambda number: left[number])
            bins[number].append(index)
            left[number] -= lengths[index]
        else:
            bins.append([index])
            left.append(seq_len - lengths[index])
    return bins


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_best_fit_and_loses_nothing(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 64) for _ in range(300)]
    bins = pack(lengths, 64)
    assert sorted(index for members in bins for index in members) == list(range(300))
    # Of several bins with equal space left, the two forms may fill different ones; the bins' totals are the same.
    totals, naive_totals = (sorted(sum(lengths[i] for i in members) for members in form) for form in (bins, naive(lengths, 64)))
    assert totals == naive_totals and max(totals) <= 64
    assert pack(lengths, 64) == bins


def test_lengths_that_do_not_fit_are_refused():
    for lengths in ([3, 65], [0, 4]):
        with pytest.raises(ValueError, match="expected 1 to 64"):
            pack(lengths, 64)
    assert pack([], 64) == []


def test_conversation_lengths_fill_the_sequences():
    rng = random.Random(1)
    lengths = [min(2048, int(rng.lognormvariate(5, 1)) + 8) for _ in range(5000)]
    packed = PackedDataset(corpus_of(lengths, seq_len=2048), 2048)
    assert packed.fill >= 0.97


def test_a_batch_holds_the_complete_samples_and_says_where_they_are():
    corpus = corpus_of(LENGTHS)
    packed = PackedDataset(corpus, 32)
    batch = packed.batch(torch.arange(len(packed)))
    seen = []
    for b in range(len(packed)):
        document, positions, sample = batch["document"][b], batch["position_ids"][b], batch["sample_id"][b]
        for number in range(int(document.max()) + 1):
            own = document == number
            n = int(sample[own][0])
            ids, mask = corpus.sample(n)
            assert batch["input_ids"][b, own].tolist() == ids.tolist()
            assert positions[own].tolist() == list(range(len(ids)))
            assert batch["loss_mask"][b, own].tolist() == [False, *mask[1:].tolist()]
            seen.append(n)
        padding = document == -1
        assert not batch["loss_mask"][b, padding].any() and (sample[padding] == -1).all()
        assert positions[padding].tolist() == list(range(int(padding.sum())))
    assert sorted(seen) == list(range(len(corpus)))
    assert packed.weight(torch.arange(len(packed))) == int(batch["loss_mask"].sum()) == int(corpus.supervised_tokens.sum())


def test_an_epoch_is_fixed_by_seed_and_number_and_differs_from_the_next():
    corpus = corpus_of(LENGTHS * 6, epoch_samples=[*range(len(LENGTHS) * 6), 4, 4])
    packed, same_seed, other_seed = (PackedDataset(corpus, 32, seed=seed) for seed in (1, 1, 2))
    rows = range(len(packed))

    def epoch(dataset, number):
        return [dataset.samples(number * len(dataset) + row) for row in rows]

    assert epoch(packed, 0) == epoch(same_seed, 0) and epoch(packed, 3) == epoch(same_seed, 3)
    assert epoch(packed, 0) != epoch(packed, 1) and epoch(packed, 0) != epoch(other_seed, 0)
    for number in (0, 1):
        assert sorted(n for samples in epoch(packed, number) for n in samples) == sorted(corpus.epoch_samples.tolist())
        assert all(sum(int(corpus.lengths[n]) for n in samples) <= 32 for samples in epoch(packed, number))
    # The loop's order has each sequence of an epoch once; the numbers go on from epoch to epoch.
    order = sample_rows(len(packed), 0, len(packed) - 3, len(packed) + 3)
    assert sorted(order[3:].tolist()) == [len(packed) + row for row in rows] and (order[:3] < len(packed)).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_do_not_see_each_other(name):
    target = Target.wrap(tiny(name))
    packed = PackedDataset(corpus_of(LENGTHS), 32)
    assert keeps_apart(target)
    batch = packed.batch(torch.arange(len(packed)))
    features = target.features(batch, taps=(0, 1))
    hidden = features.hidden
    checked = 0
    for b in range(len(packed)):
        for number in range(int(batch["document"][b].max()) + 1):
            own = batch["document"][b] == number
            alone = target.forward(batch["input_ids"][b, own][None], taps=(0, 1))
            torch.testing.assert_close(hidden[b, own], alone.hidden[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(features.taps[b, own], alone.taps[0], rtol=1e-4, atol=1e-5)
            checked += 1
    assert checked == len(LENGTHS)


@pytest.mark.slow
def test_flex_attention_masks_the_same_blocks():
    target = Target.wrap(tiny("llama"))
    batch = PackedDataset(corpus_of(LENGTHS), 32).batch(torch.arange(2))
    dense = target.features(batch).hidden
    target.model.set_attn_implementation("flex_attention")
    real = batch["document"] >= 0
    torch.testing.assert_close(target.features(batch).hidden[real], dense[real], rtol=1e-4, atol=1e-5)


def test_a_target_that_ignores_the_positions_is_detected(monkeypatch):
    target = Target.wrap(tiny("llama"))
    real = target.forward
    monkeypatch.setattr(target, "forward", lambda ids, position_ids=None, attention_mask=None, **more: real(ids, **more))
    assert not keeps_apart(target)
    monkeypatch.setattr(target, "forward", lambda ids, attention_mask=None, **more: real(ids, attention_mask=torch.ones_like(ids), **more))
    assert not keeps_apart(target)


@pytest.mark.parametrize("distill", [0.0, 0.5, 1.0])
def test_the_loss_and_its_gradient_are_those_of_unpacked_samples(distill):
    target = Target.wrap(tiny("llama"))
    corpus = corpus_of(LENGTHS)
    section = MedusaSection(heads=3, distill=distill)
    losses, gradients = {}, {}
    for one_sample_each in (False, True):
        torch.manual_seed(0)
        drafter = new_drafter("medusa", target, num_heads=3, num_layers=1, share_head=False, training={})
        packed = PackedDataset(corpus, 32, one_sample_each=one_sample_each)
        loss = objective(drafter, packed.batch(torch.arange(len(packed))), target=target, section=section)
        loss.sum.backward()
        losses[one_sample_each] = loss
        gradients[one_sample_each] = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
    assert len(PackedDataset(corpus, 32)) < len(PackedDataset(corpus, 32, one_sample_each=True)) == len(LENGTHS)
    assert losses[True].weight == losses[False].weight > 0
    torch.testing.assert_close(losses[False].sum, losses[True].sum, rtol=1e-6, atol=0)
    assert len(gradients[True]) > 0
    for packed_gradient, unpacked_gradient in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(packed_gradient, unpacked_gradient, rtol=1e-4, atol=1e-6)


def test_a_stream_joins_everything_and_counts_what_it_can_predict():
    corpus = corpus_of([40, 7, 60], seq_len=64)
    mask = corpus.mask.clone()
    stream = TokenStream(corpus, 16)
    assert len(stream) == 107 // 16
    rows = torch.arange(len(stream)) + len(stream)  # the second epoch has the same sequences
    batch = stream.batch(rows)
    assert batch["input_ids"].flatten().tolist() == corpus.ids[: len(stream) * 16].tolist()
    assert not batch["loss_mask"][:, 0].any() and stream.weight(rows) == int(batch["loss_mask"].sum())
    assert [stream.weight(row[None]) for row in rows] == batch["loss_mask"].sum(1).tolist()
    expected = mask[: len(stream) * 16].view(-1, 16)
    assert torch.equal(batch["loss_mask"][:, 1:], expected[:, 1:]) and expected[:, 0].any()
    assert torch.equal(corpus.mask, mask)  # the corpus is left as it is
