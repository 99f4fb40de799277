"""EAGLE's objectives: equal to the slow form, noise, what is supervised, memory."""

import random

import pytest
import torch
from eagle_by_hand import agrees
from eagle_drafters import VARIANTS, lines_corpus, make
from packed_data import LENGTHS, corpus_of
from watching import Largest
from zoo import VOCAB

from draftsmith.data.corpus import Corpus
from draftsmith.data.packing import PackedDataset
from draftsmith.models import vocab
from draftsmith.models.drafter import new_drafter
from draftsmith.models.eagle import EagleModel
from draftsmith.models.target import Target
from draftsmith.train import eagle as train
from draftsmith.train.eagle import EagleSection, objective1, objective3
from draftsmith.train.losses.noise import document_lengths
from draftsmith.train.objective import Progress


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "alone"])
@pytest.mark.parametrize(
    "name, loss, steps, of",
    [
        ("3", "kl", 3, "llama"),
        ("3", "kl", 1, "qwen3"),
        ("3, small", "0.9 tv + 0.1 ce", 4, "llama"),
        ("3, small", "kl", 2, "gemma2"),
        ("3, norms of speculators", "kl", 3, "llama"),
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


def test_prompts_are_supervised_in_training_alone(target):
    drafter = make(target).train()
    rows = PackedDataset(corpus_of(LENGTHS), 32)
    batch = rows.batch(torch.arange(len(rows)))
    batch["loss_mask"] = batch["loss_mask"] & (batch["position_ids"] % 3 > 0)
    everything = batch | {"loss_mask": batch["document"] >= 0}
    assert batch["loss_mask"].sum() < everything["loss_mask"].sum()

    def total_and_means(data, prompts):
        loss = objective3(drafter, data, target=target, section=EagleSection(steps=3, prompts=prompts))
        assert loss.weight == (everything if prompts and drafter.training else data)["loss_mask"].sum()
        return float(loss.sum.detach()), {name: float(value[0] / value[1].clamp(min=1)) for name, value in loss.metrics.items()}

    total, means = total_and_means(batch, True)
    answers_total, answers_means = total_and_means(batch, False)
    all_total, all_means = total_and_means(everything, False)
    assert total == all_total > 1.2 * answers_total
    assert means == pytest.approx(answers_means) != pytest.approx(all_means)  # of answers alone, as held out
    drafter.eval()
    assert total_and_means(batch, True) == total_and_means(batch, False)


def test_the_regression_reaches_the_objective():
    agrees("3", "kl", 3, decay=0.7, regression=0.4)
    agrees("3, norms of speculators", "tv", 2, packed=False, regression=2.0)


def test_the_regression_falls_to_zero_over_the_run(target):
    drafter = make(target)
    rows = PackedDataset(corpus_of(LENGTHS), 32)
    batch = rows.batch(torch.arange(len(rows)))

    def total(regression, steps):
        section, progress = EagleSection(steps=2, regression=regression), Progress(steps, 8)
        return float(objective3(drafter, batch, target=target, section=section, progress=progress).sum.detach())

    assert total(4.0, 2) == pytest.approx(total(3.0, 0)) != pytest.approx(total(4.0, 0))
    assert total(4.0, 8) == total(0.0, 0)


def test_the_trained_steps_rise_to_all_of_them(target):
    drafter = make(target)
    rows = PackedDataset(corpus_of(LENGTHS), 32)
    batch = rows.batch(torch.arange(len(rows)))

    def loss_of(section, progress=None):
        return objective3(drafter, batch, target=target, section=section, progress=progress)

    rising, stages = EagleSection(steps=3, rise=0.5), []
    for done in range(12):
        progress = Progress(done, 12)
        loss = loss_of(rising, progress)
        expected = loss_of(EagleSection(steps=progress.stage))
        assert loss.sum == expected.sum and loss.metrics.keys() == expected.metrics.keys()
        stages.append(progress.stage)
    assert stages == [1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert loss_of(rising).sum == loss_of(EagleSection(steps=3)).sum
    drafter.eval()
    assert loss_of(rising, Progress(0, 12)).sum == loss_of(EagleSection(steps=3)).sum


def noise_of(target, drafter, batch, section, monkeypatch) -> tuple[torch.Tensor, torch.Tensor]:
    """What objective1 adds to the features, [B,S,H], and its sum."""
    got = []
    plain = EagleModel.training_time_test
    with monkeypatch.context() as patch:
        patch.setattr(EagleModel, "training_time_test", lambda self, feature, *rest: got.append(feature) or plain(self, feature, *rest))
        loss = objective1(drafter, batch, target=target, section=section)
    return got[0] - target.features(batch).hidden, loss.sum


def by_sample(batch, noise) -> dict[tuple[int, int], torch.Tensor]:
    real = batch["document"] >= 0
    keys = zip(batch["sample_id"][real].tolist(), batch["position_ids"][real].tolist(), strict=True)
    return dict(zip(keys, noise[real], strict=True))


def test_noise_is_a_function_of_sample_and_position(target, monkeypatch):
    drafter, section = make(target, "1").train(), EagleSection(version=1, noise=0.2)
    corpus = corpus_of(LENGTHS)
    noises, sums = {}, {}
    for one_sample_each in (False, True):
        rows = PackedDataset(corpus, 32, one_sample_each=one_sample_each)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(int(one_sample_each)))
        batch = rows.batch(order)
        noise, sums[one_sample_each] = noise_of(target, drafter, batch, section, monkeypatch)
        noises[one_sample_each] = by_sample(batch, noise)
        later = rows.batch(order + len(rows))
        noises[one_sample_each, "later"] = by_sample(later, noise_of(target, drafter, later, section, monkeypatch)[0])
    assert noises[False].keys() == noises[True].keys() and len(noises[True]) == sum(LENGTHS)
    assert all((noises[False][key] - noises[True][key]).abs().max() < 1e-5 for key in noises[True])
    torch.testing.assert_close(sums[False], sums[True], rtol=1e-5, atol=0)
    # Each document's noise has the width of its own length, whatever row it is packed into.
    width = torch.tensor([0.2 * 512 / LENGTHS[sample] for sample, _ in noises[False]])[:, None]
    every = torch.stack(list(noises[False].values())) / width
    assert every.abs().max() <= 0.5 + 1e-4 and every.abs().max() > 0.49 and every.mean().abs() < 0.02
    assert every.std() == pytest.approx(1 / 12**0.5, rel=0.02)
    for length in set(LENGTHS):
        own = every[(width == 0.2 * 512 / length)[:, 0]]
        assert len(own) < 4 or own.abs().max() > 0.45
    assert len((every * 1e3).round().unique(dim=0)) == len(every) and every.std(1).min() > 0  # each position and entry its own
    again = torch.stack(list(noises[False, "later"].values())) / torch.tensor(
        [0.2 * 512 / LENGTHS[sample % len(LENGTHS)] for sample, _ in noises[False, "later"]]
    ).view(-1, 1)
    assert {key[0] for key in noises[False]} & {key[0] for key in noises[False, "later"]} == set()  # samples are counted on
    assert (torch.cdist(every, again).min(1).values > 0.01).all()
    drafter.eval()
    assert noise_of(target, drafter, batch, section, monkeypatch)[0].abs().max() == 0


def test_the_length_of_a_document_is_its_own():
    document = torch.tensor(
        [[0, 0, 0, 1, 2, 2, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0], [-1, -1, -1, -1, -1, -1, -1, -1], [3, 3, 1, 0, 0, 0, 0, -1]]
    )
    slow = torch.tensor([[(row == number).sum() for number in row] for row in document])
    assert torch.equal(document_lengths(document), slow)


def supervision(target, drafter, batch, section, monkeypatch) -> torch.Tensor:
    """The weights that objective3 asks for, [K,B,S]."""
    got = []
    plain = train.chunked_draft_loss
    with monkeypatch.context() as patch:
        patch.setattr(train, "chunked_draft_loss", lambda *rest, **more: got.append(rest) or plain(*rest, **more))
        objective3(drafter, batch, target=target, section=section)
    assert list(got[0][5]) == list(range(1, section.steps + 1))  # step j's distribution is compared with the target's after token t + 1 + j
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
        results = []
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
            results.append((float(loss.sum.detach()), drafter.fc.weight.grad.clone(), loss.metrics["sim_tau"]))
        (plain, gradient, tau), (others, their_gradient, their_tau), (changed, *_) = results
        assert plain == pytest.approx(others, rel=1e-6) and torch.equal(tau, their_tau) and plain > 1
        torch.testing.assert_close(their_gradient, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
        assert abs(changed - plain) > 1e-4 * plain


@pytest.mark.parametrize("text", ["", "kl +", "0.5kl", "kl kl", "-1 kl", "kl, tv", "nonsense", "0.9 tv + 0.1 nonsense", "0 kl", "kl + kl"])
def test_a_loss_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="eagle.loss"):
        train.mix(text, "eagle.loss")


def test_a_mix_of_losses():
    assert train.mix("kl") == {"kl": 1.0}
    assert train.mix(" 0.9 tv + .1 ce") == {"tv": 0.9, "ce": 0.1}
    assert train.mix("2 lk_hybrid+kl") == {"lk_hybrid": 2.0, "kl": 1.0}


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
