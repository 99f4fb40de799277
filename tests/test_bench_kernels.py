"""The kernels' benchmark on sizes that the interpreter can run: every line is there, and nothing is timed."""

import pytest
import torch

from draftsmith.eval import bench, bench_kernels
from draftsmith.eval.bench_kernels import Sizes, measure, show

pytest.importorskip("triton")
SMALL = Sizes(1, 4, 2, 16, 64, (20, 40), (2, 5), 2, 2, torch.float32, 1024, 8)


def test_every_way_is_run_once(capsys):
    calls = []

    def once(call):
        calls.append(call())
        return 1e-3

    ceilings, lines = measure(SMALL, torch.device("cpu"), once)
    assert ceilings == {"copy_bytes_per_s": 2 * 1024 / 1e-3, "product_flop_per_s": 2 * 8**3 / 1e-3}
    assert len(calls) == len(lines) + 2 == 4 * 3 + 3 * 2 + 2 + 2 + 2
    assert {line.how for line in lines} == {"kernel", "twin", "SDPA, dense mask"}
    first = lines[0]
    read = 4 * (4 * 2 * 16 * 2 + 2 * 2 * 22 * 16)  # query and result, keys and values, float32
    assert first.what == "attention of 2 nodes after 20"
    assert first.floor == pytest.approx(max(read / (0.75 * 2048e3), 4 * 4 * 2 * 22 * 16 / (0.6 * 1024e3)))
    dense = [call for call, line in zip(calls[2:], lines, strict=True) if line.how == "SDPA, dense mask"]
    fused = [call for call, line in zip(calls[2:], lines, strict=True) if line.what.startswith("attention") and line.how == "kernel"]
    for one, other in zip(dense, fused, strict=True):
        torch.testing.assert_close(one.transpose(1, 2), other, rtol=1e-4, atol=1e-4)
    show(ceilings, lines, "here")
    assert capsys.readouterr().out.count("kernel") == sum(line.how == "kernel" for line in lines)


def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        bench.main(["--kernels"])
    assert bench_kernels.__doc__


@pytest.mark.gpu
def test_it_runs():
    _, lines = measure(Sizes(contexts=(2048,), nodes=(16,), copied=1 << 26, product=2048), torch.device("cuda"))
    assert all(line.seconds > 0 for line in lines)
