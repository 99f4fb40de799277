"""Attention of packed documents on a CPU: as SDPA under a dense mask, and without work on pairs of other documents."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from zoo import CONFIGS, tiny

from draftsmith.models.document_attention import document_attention_forward, documents_of
from draftsmith.models.target import Target

LENGTHS = [[70, 1, 129], [200]]  # of the documents in each row; blocks have 64 queries


def positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """SDPA in float64 under a dense mask."""
    document = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])
    at = torch.arange(document.shape[1])
    mask = (document[:, :, None] == document[:, None]) & (at[:, None] >= at)
    wide = (tensor.double() for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*wide, mask[:, None], scale=scale, enable_gqa=True).transpose(1, 2)


def test_documents_begin_where_a_position_does_not_follow():
    assert documents_of(positions()) == [(0, 0, 70), (0, 70, 71), (0, 71, 200), (1, 0, 200)]
    assert documents_of(torch.tensor([[5, 6, 7, 0, 0, 1]])) == [(0, 0, 3), (0, 3, 4), (0, 4, 6)]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float64, 1e-12)])
def test_it_is_sdpa_under_a_dense_mask(dtype, rounding):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 200, dim).to(dtype) for heads, dim in ((6, 16), (2, 16), (2, 8)))
    out, _ = document_attention_forward(torch.nn.Module(), query, key, value, None, scaling=0.7, documents=documents_of(positions()))
    assert out.dtype == dtype and out.shape == (2, 200, 6, 8)
    assert (out.double() - dense(query, key, value, 0.7)).abs().max() < rounding


def masked(target: Target, batch: dict[str, torch.Tensor], monkeypatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.models.target.attends_by_document", lambda model: False)
        return target.features(batch, (0, 1)).taps


@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_those_under_a_mask(name, monkeypatch):
    target = Target.wrap(tiny(name))
    target.model.set_attn_implementation("sdpa" if name in ("llama", "qwen3", "deepseek_v3") else target.config._attn_implementation)
    positions = torch.stack([torch.cat([torch.arange(30), torch.arange(40)]), torch.arange(70)])
    batch = {"input_ids": torch.randint(target.vocab_size, (2, 70)), "position_ids": positions}
    expected, seen = masked(target, batch, monkeypatch), []
    monkeypatch.setattr("draftsmith.models.target.documents_of", lambda positions: seen.append(1) or documents_of(positions))
    got = target.features(batch, (0, 1)).taps
    assert bool(seen) == target.by_document == (name in ("llama", "qwen3", "deepseek_v3"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert target.config._attn_implementation != "documents", "the setting must not persist"


def test_short_documents_cost_less():
    query, key = torch.randn(1, 2, 512, 16), torch.randn(1, 1, 512, 16)
    flops = []
    for lengths in ([512], [64] * 8):
        at = torch.cat([torch.arange(length) for length in lengths])[None]
        with FlopCounterMode(display=False) as counter:
            document_attention_forward(torch.nn.Module(), query, key, key, None, documents=documents_of(at))
        flops.append(counter.get_total_flops())
    pairs = 2 * 2 * 2 * 16  # two matmuls of two heads
    assert flops == [pairs * 64 * sum(range(64, 513, 64)), pairs * 64 * 512]
