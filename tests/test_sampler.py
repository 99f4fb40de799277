"""The sampler: kept sets equal to transformers' processors, noise from the published generator, the distribution by a fixed-seed chi-square."""

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.inference import sampler
from draftsmith.inference.sampler import Sampling, gumbel, philox, sample, warp

# Upper 0.1 % points of chi-square, by degrees of freedom (Abramowitz & Stegun, table 26.8).
CHI2 = {2: 13.816, 4: 18.467, 24: 51.179}


def processors(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The filters of transformers' sampling on logits [·,V], in its order; float32."""
    scores, ids = logits.float(), torch.zeros(logits.shape[0], 1, dtype=torch.int64)
    if how.temperature != 1.0:
        scores = TemperatureLogitsWarper(how.temperature)(ids, scores)
    if how.top_k:
        scores = TopKLogitsWarper(how.top_k)(ids, scores)
    if how.top_p < 1.0:
        scores = TopPLogitsWarper(how.top_p)(ids, scores)
    if how.min_p:
        scores = MinPLogitsWarper(how.min_p)(ids, scores)
    return scores


@pytest.mark.parametrize("vocab", [1, 5, 64, 501, 5003])
def test_warp_equals_transformers(vocab, monkeypatch):
    """Bit for bit. transformers leaves open which of several equal logits top-p drops: its sort is not stable and depends on the processor. A
    stable sort drops the lowest id first. Without it the kept values and their number are the same.
    """
    unstable = torch.sort
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.randn(20, vocab, generator=generator) * 3
    ties = torch.randint(0, 3, (20, vocab), generator=generator).float()
    flat = torch.zeros(2, vocab)
    cut = several_remain = 0
    for logits in (wide, ties, flat, wide.to(torch.bfloat16)):
        for temperature in (0.3, 1.0):
            for top_k in (0, 1, 7, 1000):
                for top_p in (1.0, 0.9, 0.3, 1e-6):
                    for min_p in (0.0, 0.05, 1.0):
                        how = Sampling(temperature, top_k, top_p, min_p)
                        got, loose = warp(logits, how), processors(logits, how)
                        with monkeypatch.context() as patch:
                            patch.setattr(torch, "sort", lambda scores, descending: unstable(scores, stable=True, descending=descending))
                            expected = processors(logits, how)
                        assert torch.equal(got, expected), how
                        assert logits is not wide or torch.equal(got, loose), how
                        assert torch.equal(got.sort().values, loose.sort().values), how
                        cut += int(got.isinf().sum())
                        several_remain += int((got.isfinite().sum(-1) > 1).sum())
    assert vocab == 1 or (cut > 1000 and several_remain > 1000)
    assert torch.equal(warp(wide.view(4, 5, vocab), how), warp(wide, how).view(4, 5, vocab)), "any batch shape"


@pytest.mark.parametrize("vocab", [3, 1008, 1009])
@pytest.mark.parametrize("spread", [0.5, 12.0], ids=["flat", "peaked"])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 2000}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}]
)
def test_on_the_host_the_same_tokens_are_drawn_with_less_noise(monkeypatch, vocab, spread, filters):
    """Noise for all tokens is the plain form. Peaked logits leave most of it out."""
    how = Sampling(0.9, seed=2**40 + 1, **filters)
    logits = spread * torch.randn(2, 7, vocab, generator=torch.Generator().manual_seed(1))
    request, position = torch.tensor([[4], [2**32 - 1]]).expand(2, 7), torch.arange(100, 114).view(2, 7)
    expected = (warp(logits, how) + gumbel(how.seed, request, position, vocab)).argmax(-1)
    assert vocab == 3 or (expected != logits.argmax(-1)).any()
    sizes, noise = [], sampler._noise_of
    monkeypatch.setattr(sampler, "_noise_of", lambda block, *keys: sizes.append(len(block)) or noise(block, *keys))
    for share in (0.0, 0.5, 1.0):
        monkeypatch.setattr(sampler, "WORTH_CHOOSING", share)
        assert torch.equal(sample(logits, how, request, position), expected), share
    if vocab > 3 and spread > 1:
        assert 14 <= sizes[-1] < 14 * vocab / 8, "blocks of four tokens in 14 rows"


def test_no_noise_exceeds_its_bound():
    most, least = (sampler._unit(torch.tensor([word])).log().neg().log().neg().float().item() for word in (2**32 - 1, 0))
    assert 22.8 < most < sampler.MOST_NOISE - 0.1 and least > -4
    words = torch.randint(0, 2**32, (4, 10_000), generator=torch.Generator().manual_seed(1))
    assert sampler._noise(0, *words).max() <= most


def test_a_token_with_the_most_noise_is_drawn(monkeypatch):
    """The other tokens have no noise; the greatest noise lifts one token just above the best logit."""
    most = 22.8
    logits = torch.zeros(1, 4096)
    logits[0, 7], logits[0, 3000] = 40.0, 40.0 - most + 0.1
    noise = torch.zeros(4096 // 4, 4)
    noise[3000 // 4, 3000 % 4] = most
    monkeypatch.setattr(sampler, "_noise_of", lambda block, *keys: noise[block])
    key = torch.zeros(1, dtype=torch.int64)
    assert sampler.sample_on_host(logits, 0, key, key).tolist() == [3000]


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}])
def test_a_row_with_nan_is_drawn_as_with_all_the_noise(filters):
    how = Sampling(0.9, **filters)
    logits = torch.randn(3, 1008, generator=torch.Generator().manual_seed(1))
    logits[1, [5, 700]] = torch.nan
    keys = torch.arange(3), torch.arange(3)
    assert sample(logits, how, *keys).tolist() == (warp(logits, how) + gumbel(0, *keys, 1008)).argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(49_152,), (3, 2048), (2, 3, 8193), (7, 4351), (5, 1009), (2, 3, 33), (300, 1)])
def test_the_best_token_is_the_first_of_equal_ones(dtype, shape):
    for values in (1, 3, 1000, 50_000):
        logits = torch.randint(0, values, shape, generator=torch.Generator().manual_seed(values)).to(dtype)
        logits = logits.masked_fill(torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5, -torch.inf)
        ids = torch.arange(shape[-1]).expand(shape)
        first = ids.masked_fill(logits < logits.amax(-1, keepdim=True), shape[-1]).amin(-1)
        assert torch.equal(sampler.best_token(logits), first)
        logits[..., [-1, shape[-1] // 3]] = torch.nan  # the best of all, as for `max`
        assert torch.equal(sampler.best_token(logits), torch.full(shape[:-1], shape[-1] // 3))


def test_the_best_token_of_a_slice_of_many_groups():
    logits = torch.randn(6, 5000, 2, generator=torch.Generator().manual_seed(0))[::2, 7:, 0]
    assert torch.equal(sampler.best_token(logits), logits.contiguous().argmax(-1))


@pytest.mark.parametrize("vocab", [2148, 4351, 8193])
def test_the_best_token_may_be_after_the_last_complete_group(vocab):
    logits = torch.zeros(3, vocab)
    for row, token in enumerate((vocab - 1, vocab - vocab % 256, vocab - vocab % 256 - 1)):
        logits[row, token] = 1.0
    assert torch.equal(sampler.best_token(logits), logits.argmax(-1))


def test_philox_known_answers():
    """Known answers of Random123 (kat_vectors, philox4x32 10)."""
    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = philox(key[0] | key[1] << 32, tuple(torch.tensor([word]) for word in counter))
        assert tuple(int(word) for word in words) == expected


def python_philox(seed: int, counter: list[int]) -> list[int]:
    k0, k1 = seed % 2**32, seed >> 32
    c = counter
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [high >> 32 ^ c[1] ^ k0, high % 2**32, low >> 32 ^ c[3] ^ k1, low % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def test_counter_layout():
    """Noise of a token = word token % 4 of Philox at (token // 4, position, request, 0) under the seed: the kernel's contract."""
    seed = 2**63 + 12345
    request, position = torch.tensor([[3], [2**32 - 1]]), torch.tensor([[0, 17, 2**31]]).expand(2, 3)
    noise = gumbel(seed, request.expand(2, 3), position, 11)
    assert noise.shape == (2, 3, 11) and noise.dtype == torch.float32
    for r in range(2):
        for p in range(3):
            for token in range(11):
                word = python_philox(seed, [token // 4, int(position[r, p]), int(request[r, 0]), 0])[token % 4]
                expected = -math.log(-math.log((word + 0.5) / 2**32))
                assert noise[r, p, token].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert torch.equal(gumbel(seed, request[:, 0], position[:, 1], 11), noise[:, 1]), "a function of the key, not of the shape"
    assert torch.equal(gumbel(seed, request[:, 0], position[:, 1], 5), noise[:, 1, :5]), "nor of the vocabulary"


def test_noise_in_pieces_is_the_same(monkeypatch):
    request, position = torch.tensor([[3], [2**32 - 1]]).expand(2, 3), torch.tensor([0, 17, 2**31]).expand(2, 3)
    copies = torch.arange(6).view(2, 3)
    together = [gumbel(5, request, position, 11), gumbel(5, request, position, 11, sampler.PURPOSE_DRAFT, copies)]
    for size in (1, 22, 40):  # a row, two and three at once
        monkeypatch.setattr(sampler, "AT_ONCE", size)
        apart = [gumbel(5, request, position, 11), gumbel(5, request, position, 11, sampler.PURPOSE_DRAFT, copies)]
        assert all(map(torch.equal, together, apart))


def test_noise_is_finite_at_both_ends(monkeypatch):
    ends = torch.tensor([[0, 2**32 - 1, 2**31, 1]])
    monkeypatch.setattr(sampler, "philox", lambda seed, counter: tuple(ends[:, i].expand(1, 1) for i in range(4)))
    noise = gumbel(0, torch.tensor([0]), torch.tensor([0]), 4)[0]
    assert noise.isfinite().all()
    assert noise[0] == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6) and noise[1] == pytest.approx(33 * math.log(2), rel=1e-6)


def chi_square(counts: torch.Tensor, probability: torch.Tensor) -> float:
    expected = probability.double() * counts.sum()
    assert expected.min() >= 5
    return float(((counts - expected) ** 2 / expected).sum())


def test_distribution_of_plain_sampling():
    """One draw against its distribution, two consecutive draws against the product, and nothing outside the kept set."""
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.4])
    draws = 40_000
    position, request = torch.arange(draws), torch.full((draws,), 6)
    for how, freedom in (
        (Sampling(1.0, seed=3), 4),
        (Sampling(0.7, seed=4), 4),
        (Sampling(1.5, top_k=3, seed=5), 2),
        (Sampling(1.0, top_p=0.75, seed=6), 2),
    ):
        y = sample(logits.expand(draws, 5), how, request, position)
        probability = processors(logits[None], how)[0].softmax(-1)
        counts = torch.bincount(y, minlength=5).double()
        in_set = probability > 0
        assert in_set.sum() == freedom + 1
        assert counts[~in_set].sum() == 0
        assert chi_square(counts[in_set], probability[in_set]) < CHI2[freedom], how
    how = Sampling(1.0, seed=7)
    probability = logits.softmax(-1)
    pair = probability[:, None] * probability
    for key in ((request[::2], position[::2], request[1::2], position[1::2]), (position[::2], request[::2], position[1::2], request[1::2])):
        first, second = (sample(logits.expand(draws // 2, 5), how, *key[i : i + 2]) for i in (0, 2))
        counts = torch.bincount(first * 5 + second, minlength=25).double()
        assert chi_square(counts, pair.flatten()) < CHI2[24]
    other_seed = sample(logits.expand(draws, 5), Sampling(1.0, seed=8), request, position)
    same_seed = sample(logits.expand(draws, 5), how, request, position)
    assert chi_square(torch.bincount(same_seed * 5 + other_seed, minlength=25).double(), pair.flatten()) < CHI2[24]


def test_greedy_takes_the_lowest_of_ties():
    logits = torch.zeros(3, 500)
    logits[0, [4, 9, 400]] = 2.0
    logits[1, [499, 17]] = 1.0
    zeros = torch.zeros(3, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert sample(logits.to(dtype), Sampling(top_k=1, seed=9), zeros, zeros).tolist() == [4, 17, 0]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": 1e-39}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
     {"min_p": -0.1}, {"min_p": 1.1}, {"seed": -1}, {"seed": 2**64}],
    ids=str,
)  # fmt: skip
def test_sampling_names_the_wrong_field(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"got {name} {value}; expected"):
        Sampling(**wrong)
