"""Packed feature rows: bounds on their error, what is refused, and the error report against float64 formulas."""

import math

import numpy as np
import pytest
import torch

from draftsmith.data import feature_codec
from draftsmith.data.feature_codec import FORMATS, Error, bytes_per_row, pack, unpack

SCALED = ["fp8", "int8"]


def features(*shape, dtype=torch.float32, seed=0):
    """Rows of very different size, with a few large values in each, as hidden states have."""
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=gen, dtype=torch.float64) ** 3
    return (rows * torch.logspace(-6, 6, math.prod(shape[:-1]), dtype=torch.float64).view(*shape[:-1], 1)).to(dtype)


def bound(rows, scale, name):
    """The largest error that each value may have, in float64; a hair for the product's own rounding in fp32."""
    scale = scale.double()[..., None]
    if name == "int8":
        return scale / 2 + 1e-6 * rows.abs()
    return torch.maximum(rows.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("shape", [(5, 33), (1, 1), (2, 3, 4, 257), (17,), (0, 8), (3, 0, 8), (700, 640)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_stay_within_their_bounds(name, shape, dtype):
    rows = features(*shape, dtype=dtype).clamp(-6e4, 6e4)
    packed = pack(rows, name)
    assert packed.values.shape == rows.shape and packed.values.dtype == FORMATS[name]
    assert packed.scale.shape == rows.shape[:-1] and packed.scale.dtype == torch.float32
    restored = unpack(*packed)
    assert restored.dtype == torch.float32
    assert ((restored.double() - rows.double()).abs() <= bound(rows.double(), packed.scale, name)).all()
    assert torch.equal(unpack(*packed, torch.bfloat16), restored.bfloat16()), "rounded once, at the end"


def within_bounds(rows, name, scale):
    return bool(((unpack(*pack(rows, name)).double() - rows.double()).abs() <= bound(rows.double(), scale, name)).all())


plain_scale, plain_half = feature_codec._scale, feature_codec._as_half
FAULTS = {
    "one scale for all rows": ("_scale", lambda highest, largest: plain_scale(highest, largest).mean().expand_as(highest), SCALED),
    "the largest value does not fit": ("_scale", lambda highest, largest: plain_scale(highest, largest) / 2, SCALED),
    "the largest value is half of what fits": ("_scale", lambda highest, largest: plain_scale(highest, largest) * 2, ["int8"]),
    "the sign is lost": ("_as_half", lambda values: plain_half(values).abs(), ["fp8"]),
    "the exponent is off by one": ("_as_half", lambda values: plain_half(values) * 2, ["fp8"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_break_the_bounds(fault, monkeypatch):
    rows = features(50, 64)
    attribute, function, names = FAULTS[fault]
    for name in names:
        scale = pack(rows, name).scale
        assert within_bounds(rows, name, scale), "red before a fault was planted"
        with monkeypatch.context() as patch:
            patch.setattr(feature_codec, attribute, function)
            assert not within_bounds(rows, name, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unscaled_formats_round_and_no_more(dtype):
    rows = features(6, 10)
    assert torch.equal(unpack(*pack(rows, "float32"), dtype), rows.to(dtype))
    packed = pack(rows, "bfloat16")
    assert packed.scale is None and torch.equal(unpack(*packed, dtype), rows.bfloat16().to(dtype))


def test_every_fp8_code_is_what_torch_says():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    number = ~codes.float().isnan()
    assert number.sum() == 254
    unpacked = unpack(codes[number][None], torch.tensor([3.0]))
    assert torch.equal(unpacked, codes[number].float()[None] * 3) and torch.equal(unpacked.signbit(), codes[number].float().signbit()[None])


@pytest.mark.parametrize("name", FORMATS)
def test_zero_rows_survive(name):
    rows = features(4, 12)
    rows[2] = 0
    for dtype in (torch.float32, torch.bfloat16):
        restored = unpack(*pack(rows, name), dtype)
        assert not restored[2].any() and restored.isfinite().all() and restored[3].any()


@pytest.mark.parametrize("name", SCALED)
def test_huge_and_minute_rows(name):
    top = torch.finfo(torch.float32).max
    rows = torch.tensor([[top, -top, top / 3], [1e-38, -3e-39, 0.0], [1e-44, 0.0, -1e-45], [1e30, 1.0, -1e-30]])
    packed = pack(rows, name)
    restored = unpack(*packed)
    assert restored.isfinite().all() and (packed.scale > 0).all() and packed.scale.isfinite().all()
    assert ((restored.double() - rows.double()).abs() <= bound(rows.double(), packed.scale, name)).all()
    largest = torch.finfo(torch.bfloat16).max
    assert unpack(*pack(torch.tensor([[largest, -largest]], dtype=torch.bfloat16), name), torch.bfloat16).tolist() == [[largest, -largest]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_with_inf_or_nan_is_named(name, bad, monkeypatch):
    monkeypatch.setattr(feature_codec, "BLOCK", {"cpu": 20})
    rows = features(3, 5, 10)
    rows[2, 1, 4] = rows[2, 3, 0] = bad
    with pytest.raises(ValueError, match=r"row \(2, 1\) of \[3, 5, 10\] has an inf or a NaN") as error:
        pack(rows, name)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="row 11 of"):
        pack(rows.view(15, 10), name)


@pytest.mark.parametrize("name", FORMATS)
def test_any_layout_in_memory(name):
    rows = features(6, 8, 10)
    for view in (rows.transpose(0, 1), rows[::2, :, ::3], rows.permute(2, 1, 0), rows[:1].expand(4, 8, 10)):
        packed, plain = pack(view, name), pack(view.contiguous(), name)
        assert torch.equal(unpack(*packed), unpack(*plain))
        turned = unpack(packed.values.transpose(0, 1), None if packed.scale is None else packed.scale.transpose(0, 1))
        assert torch.equal(turned, unpack(*packed).transpose(0, 1))


@pytest.mark.parametrize("name", FORMATS)
def test_values_from_a_memory_map(name, tmp_path):
    rows = features(40, 16)
    values, scale = pack(rows, name)
    raw = values.view(torch.uint8).numpy()
    raw.tofile(tmp_path / "values")
    mapped = torch.from_numpy(np.memmap(tmp_path / "values", np.uint8, "r+", shape=raw.shape)).view(FORMATS[name])
    assert torch.equal(unpack(mapped[3:30], None if scale is None else scale[3:30]), unpack(values, scale)[3:30])
    assert raw.nbytes + (0 if scale is None else 4 * len(scale)) == 40 * bytes_per_row(16, name)


def test_blocks_change_nothing(monkeypatch):
    rows = features(37, 24)
    complete = {name: (pack(rows, name), unpack(*pack(rows, name), torch.bfloat16)) for name in FORMATS}
    for block in (1, 50, 24 * 36):
        monkeypatch.setattr(feature_codec, "BLOCK", {"cpu": block})
        for name, (packed, restored) in complete.items():
            again = pack(rows, name)
            assert torch.equal(again.values.view(torch.uint8), packed.values.view(torch.uint8))
            assert torch.equal(unpack(*again, torch.bfloat16), restored)


@pytest.mark.parametrize("name", FORMATS)
def test_an_output_is_written_to(name):
    packed = pack(features(9, 24), name)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        out = torch.full((9, 24), 7.0, dtype=dtype)
        assert unpack(*packed, out=out) is out and torch.equal(out, unpack(*packed, dtype))
    for wrong in (torch.empty(9, 23), torch.empty(24, 9).T):
        with pytest.raises(ValueError, match=r"expected a contiguous \[9, 24\]"):
            unpack(*packed, out=wrong)


def test_bytes():
    assert [bytes_per_row(256, name) for name in ("float32", "bfloat16", "fp8", "int8")] == [1024, 512, 260, 260]
    assert bytes_per_row(256, "fp8") <= 0.51 * bytes_per_row(256, "bfloat16")
    assert bytes_per_row(256, "int8") <= 0.51 * bytes_per_row(256, "bfloat16")
    with pytest.raises(ValueError, match="got feature format 'fp4'; expected one of float32, bfloat16, fp8, int8"):
        bytes_per_row(256, "fp4")


def test_refusals():
    values, scale = pack(features(3, 4), "int8")
    for wrong in ((values, None), (values, scale[:2]), (values, scale[:, None]), (values.float(), scale), (values.long(), None)):
        with pytest.raises(ValueError, match="give both as `pack` returned them"):
            unpack(*wrong)
    for rows in (torch.ones(3, 4, dtype=torch.int64), torch.tensor(1.0), torch.zeros(3, 0)):
        with pytest.raises(ValueError, match="expected .* of a floating type"):
            pack(rows, "int8")


def formulas(rows, restored, head=None):
    """The report in float64, all at once."""
    a, b = (x.double().view(-1, x.shape[-1]) for x in (rows, restored))
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1, eps=0)
    expected = {"rows": len(a), "cosine_mean": cosine.mean(), "cosine_min": cosine.min(), "relative_rms": (a - b).norm() / a.norm()}
    if head is not None:
        p, q = ((x @ head.double()).log_softmax(-1) for x in (a, b))
        kl = (p.exp() * (p - q)).sum(-1)
        expected |= {"kl_mean": kl.mean(), "kl_max": kl.max()}
    return {name: float(value) for name, value in expected.items()}


@pytest.mark.parametrize("name", SCALED)
def test_the_report_is_what_the_formulas_say(name, monkeypatch):
    monkeypatch.setattr(feature_codec, "BUDGET", 500)
    rows, head = torch.randn(7, 30, 24), torch.randn(24, 101)
    restored = unpack(*pack(rows, name))
    asked = []

    def logits(hidden):
        asked.append(len(hidden) * 101)
        return hidden @ head

    error = Error()
    error.add(rows[:3], restored[:3], logits)
    error.add(rows[3:], restored[3:], logits)
    expected = formulas(rows, restored, head)
    assert error.summary() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert error.summary()["kl_mean"] > 0 and max(asked) <= 500 and len(asked) > 100
    exact = Error()
    exact.add(rows.double(), restored.double(), lambda hidden: hidden @ head.double())
    assert exact.summary() == pytest.approx(expected, rel=1e-9)


def test_reports_merge_as_though_added_to_one():
    rows, head = torch.randn(60, 24), torch.randn(24, 11)
    restored = unpack(*pack(rows, "int8"))
    one, parts = Error(), [Error() for _ in range(4)]  # the last rank saw nothing
    one.add(rows, restored, lambda hidden: hidden @ head)
    for part, at in zip(parts, (slice(0, 5), slice(5, 6), slice(6, 60)), strict=False):
        part.add(rows[at], restored[at], lambda hidden: hidden @ head)
    before = parts[0].summary()
    assert Error().merge(*parts).summary() == pytest.approx(one.summary(), rel=1e-6, abs=1e-6)
    assert parts[0].merge(*parts[1:]).summary() == pytest.approx(one.summary(), rel=1e-6, abs=1e-6) and parts[0].summary() == before


def test_the_report_of_zero_rows_and_of_equal_rows():
    rows = torch.randn(5, 8)
    rows[1] = 0
    same = Error()
    same.add(rows, rows.clone(), lambda hidden: hidden @ torch.randn(8, 9, generator=torch.Generator().manual_seed(0)))
    assert same.summary() == pytest.approx({"rows": 5, "cosine_mean": 1, "cosine_min": 1, "relative_rms": 0, "kl_mean": 0, "kl_max": 0})
    lost = Error()
    lost.add(torch.ones(2, 4), torch.tensor([[1.0] * 4, [0.0] * 4]))
    assert lost.summary() == {"rows": 2, "cosine_mean": 0.5, "cosine_min": 0.0, "relative_rms": math.sqrt(0.5)}
    empty = Error()
    empty.add(rows[:0], rows[:0], lambda hidden: hidden)
    with pytest.raises(ValueError, match="empty"):
        empty.summary()
    masked = Error()
    masked.add(rows, rows.clone(), lambda hidden: torch.cat([hidden, torch.full((len(hidden), 2), -math.inf)], -1))
    assert masked.summary()["kl_max"] == 0.0, "a token that both rule out takes no part"


def test_the_report_keeps_nothing_of_a_batch_with_nan():
    rows, error = torch.randn(5, 8), Error()
    error.add(rows, rows)
    before = error.summary()
    for bad, logits in ((rows * math.nan, None), (rows * math.inf, None), (rows, lambda hidden: hidden * math.nan)):
        with pytest.raises(ValueError, match="inf or a NaN"):
            error.add(rows, bad, logits)
    with pytest.raises(ValueError, match="expected equal shapes"):
        error.add(rows, rows[1:])
    assert error.summary() == before


def test_int8_and_fp8_are_close_enough_to_be_worth_it():
    rows = torch.randn(200, 256)
    for name, least, most in (("int8", 0.9999, 0.01), ("fp8", 0.999, 0.03)):
        error = Error()
        error.add(rows, unpack(*pack(rows, name)))
        assert error.summary()["cosine_min"] > least and error.summary()["relative_rms"] < most


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_packs_the_same(name):
    rows = features(300, 640)
    here, there = pack(rows, name), pack(rows.cuda(), name)
    assert torch.equal(there.values.view(torch.uint8).cpu(), here.values.view(torch.uint8))
    assert torch.equal(unpack(*there, torch.bfloat16).cpu(), unpack(*here, torch.bfloat16))
    error = Error()
    error.add(rows.cuda(), unpack(*there))
    other = Error()
    other.add(rows, unpack(*here))
    assert error.summary() == pytest.approx(other.summary(), rel=1e-6)
