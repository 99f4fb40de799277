"""The benchmark of kernels on sizes that Triton's interpreter can run: every line is there, and nothing is timed."""

import sys
import types

import numpy
import pytest
import torch

from draftsmith.eval import bench
from draftsmith.eval.benchmarks import kernels as bench_kernels
from draftsmith.eval.benchmarks.kernels import FLASHINFER, RunningReport, Sizes, measure_kernels, measure_limits, print_kernels, run

pytest.importorskip("triton")
SMALL = Sizes(1, 4, 2, 16, 64, (20, 40), (2, 5), 2, 2, torch.float32, 1024, 8)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_rival(monkeypatch):
    """FlashInfer is not installed, even where it is."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)


def measured(left_out):
    """Limits, lines, and the results of the timed calls, without those of the limits."""
    calls = []

    def once(call):
        calls.append(call())
        return 1e-3

    limits = measure_limits(SMALL, CPU, once)
    assert len(calls) == 2
    calls.clear()
    lines = [line for part in measure_kernels(SMALL, CPU, limits, left_out, once) for line in part]
    assert len(calls) == len(lines)
    return limits, lines, calls


def test_every_way_is_run_once(capsys):
    left_out = {}
    limits, lines, calls = measured(left_out)
    assert limits == {"copy_bytes_per_s": 2 * 1024 / 1e-3, "matmul_flop_per_s": 2 * 8**3 / 1e-3}
    assert len(lines) == 4 * 3 + 3 * 2 + 2 + 2
    assert {line.how for line in lines} == {"kernel", "reference", "SDPA, dense mask"}
    assert list(left_out) == [FLASHINFER] and "pip install flashinfer-python" in left_out[FLASHINFER]
    first = lines[0]
    read = 4 * (4 * 2 * 16 * 2 + 2 * 2 * 22 * 16)  # query and result, keys and values, float32
    assert first.what == "attention of 2 nodes after 20"
    assert first.floor == pytest.approx(max(read / (0.75 * 2048e3), 4 * 4 * 2 * 22 * 16 / (0.6 * 1024e3)))
    dense = [call for call, line in zip(calls, lines, strict=True) if line.how == "SDPA, dense mask"]
    fused = [call for call, line in zip(calls, lines, strict=True) if line.what.startswith("attention") and line.how == "kernel"]
    for expected, got in zip(dense, fused, strict=True):
        torch.testing.assert_close(got, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)
    print_kernels(limits, lines, "here")
    assert capsys.readouterr().out.count("kernel") == sum(line.how == "kernel" for line in lines)


def test_trees_are_no_deeper_than_what_they_are_verified_to():
    tree = bench_kernels._tree(8, 64, Sizes(), torch.device("cpu"))
    assert tree.depth.amax() == Sizes().depth and tree.tokens.amax() < Sizes().vocab


def flashinfer(attend):
    """The functions of FlashInfer 0.7 that are used; `attend` stands for its GPU kernel."""

    def packbits(x, bitorder="big"):
        assert x.ndim == 1 and x.dtype == torch.bool
        return torch.from_numpy(numpy.packbits(x.numpy(), bitorder=bitorder))

    def single_prefill_with_kv_cache(
        q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None,
        causal=False, kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
        logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None,
        k_scale=None, v_scale=None,
    ):  # fmt: skip
        k, v = (x if kv_layout == "NHD" else x.transpose(0, 1) for x in (k, v))  # [keys,kv heads,dim]
        assert q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2] and not causal and packed_custom_mask.dtype == torch.uint8
        bit = torch.arange(len(q) * len(k))  # query by query: bit % 8 of byte bit // 8
        mask = (packed_custom_mask[bit // 8] >> (bit % 8)) & 1
        return attend(q, k, v, mask.view(len(q), len(k)).bool(), sm_scale)

    module = types.ModuleType("flashinfer")
    module.packbits, module.single_prefill_with_kv_cache = packbits, single_prefill_with_kv_cache
    return module


def exact(q, k, v, mask, scale):
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def test_flashinfer_is_given_the_same_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(exact))
    left_out = {}
    _, lines, calls = measured(left_out)
    assert not left_out
    of = {(line.what, line.how): call for line, call in zip(lines, calls, strict=True)}
    theirs = [(call, of[what, "kernel"]) for (what, how), call in of.items() if how == FLASHINFER]
    assert len(theirs) == 4
    for got, expected in theirs:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_flashinfer_that_fails_is_left_out(monkeypatch):
    def broken(*_):
        raise RuntimeError("no nvcc\n  on this machine")

    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(broken))
    left_out = {}
    _, lines, _ = measured(left_out)
    assert "no nvcc on this machine" in left_out[FLASHINFER] and FLASHINFER not in {line.how for line in lines}

    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(lambda q, k, v, mask, scale: exact(q, k, v, None, scale)))
    left_out = {}
    _, lines, _ = measured(left_out)
    assert "its result differs" in left_out[FLASHINFER]
    assert all(line.what == "attention of 2 nodes after 20" for line in lines if line.how == FLASHINFER)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    from draftsmith.inference.kernels import attention

    monkeypatch.setattr(
        attention, "tree_attention", lambda *inputs, **settings: 1.1 * attention.tree_attention_reference(*inputs, **settings)
    )
    with pytest.raises(ValueError, match="attention of 2 nodes after 20: the kernel's result differs from its reference's"):
        measured({})


def test_the_report_is_written_part_by_part(tmp_path, capsys):
    written = []

    class Watched(RunningReport):
        def write(self):
            super().write()
            written.append(len(self.results["lines"]))

    report = Watched(tmp_path / "out.json", False, {"device": "here"})
    run(report, SMALL, CPU, lambda call: (call(), 1e-3)[1])
    assert written == [6, 12, 18, 22]
    assert (tmp_path / "out.json").read_text() == report.text() + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    out = capsys.readouterr().out
    assert out.count("here: copies") == 4 and "left out: FlashInfer" in out


def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        bench.main(["--kernels"])
    with pytest.raises(ValueError, match="sizes of its own, got --repeats; leave one of them out"):
        bench.main(["--kernels", "--repeats", "9"])
    assert bench_kernels.__doc__


@pytest.mark.gpu
def test_it_runs():
    device, sizes = torch.device("cuda"), Sizes(contexts=(2048,), nodes=(16,), copy_bytes=1 << 26, matmul=2048)
    report = RunningReport(None, True, {"device": "a GPU"})
    run(report, sizes, device)
    assert all(line["seconds"] > 0 for line in report.results["lines"])
