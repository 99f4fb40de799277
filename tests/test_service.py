"""Service figures of hand-made requests, roofline estimates by hand."""

import json

import pytest
from load_records import load_record, records, request

from draftsmith.eval import load_report, roofline
from draftsmith.eval.load import CostModel
from draftsmith.eval.service import percentiles, service, token_gaps


def test_the_tokens_of_a_round_arrive_together():
    gaps = token_gaps(request("a", [3, 1, 2]))
    assert gaps == [0.0, 0.0, 3.5, 3.5, 0.0]  # no gap before the first token


def test_figures_by_hand():
    made = [request("a", [2, 2]), request("b", [1, 1, 1, 1]), request("c", [4], prefill_s=None, domain="e")]
    figures = service(records(made, load_record()), "0")
    assert figures["requests"] == 3
    assert figures["first_token_s"] == {"p50": 7.5, "p95": 7.5, "p99": 7.5}  # prefill of 4 s and a round
    assert figures["gap_s"] == {"p50": 0.0, "p95": 3.5, "p99": 3.5}  # nine tokens after the first ones, four of them after a round
    assert figures["token_s"] == pytest.approx(4 * 3.5 / 5) and figures["plain_token_s"] == pytest.approx(3.5)
    assert (figures["drafter_bytes"], figures["kv_bytes"]) == (1000, {"target": 100, "drafter": 10})
    seconds = [(4 + 3.5 * 2) / 16, (4 + 3.5 * 4) / 16, (4 + 3.5) / 16]
    assert figures["cost"] == pytest.approx({"p50": seconds[0], "p95": seconds[1], "p99": seconds[1], "all": sum(seconds) / 3})
    shown = "\n".join(load_report.service_lines(json.loads(json.dumps(figures))))
    assert "time to first token, ms: p50 7500.0" in shown and "cost of a request" in shown and "KV of a token 100 + 10" in shown


def test_what_was_not_timed_is_not_claimed():
    assert service(records([request("a", [1], setting="0.7")]), "0") == {} and load_report.service_lines({}) == []
    untimed = request("a", [2, 2])
    untimed.rounds[:] = [type(each)(each.position, each.nodes, each.committed) for each in untimed.rounds]
    assert service(records([untimed]), "0") == {}
    figures = service(records([request("a", [2], seconds={}, batch=0, prefill_s=None)]), "0")
    assert figures["first_token_s"] is figures["cost"] is figures["kv_bytes"] is figures["token_s"] is None
    assert load_report.service_lines(figures)


def test_percentiles_are_values_that_occurred():
    assert percentiles([float(i) for i in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}


LLAMA = roofline.ModelSize(weights=8e9, bytes_per_weight=2, kv_bytes=2 * 32 * 8 * 128 * 2, attention_flops=4 * 32 * 32 * 128)


def test_the_ridge_of_known_devices():
    assert roofline.ridge(roofline.hardware("H100-SXM")) == pytest.approx(295, abs=1)
    assert roofline.ridge(roofline.hardware("H200")) == pytest.approx(206, abs=1)
    assert all(
        device.peak > 1e13 and device.bandwidth > 1e11 and "sheet" in device.source or "paper" in device.source
        for device in roofline.KNOWN.values()
    )
    with pytest.raises(ValueError, match="got device 'H1000'; expected one of A100"):
        roofline.hardware("H1000")
    mine = roofline.hardware("mine=1e12,2e11")
    assert (mine.name, mine.peak, mine.bandwidth) == ("mine", 1e12, 2e11)
    for wrong in ("mine=", "mine=1", "mine=1,2,3", "mine=1e12,-1", "mine=nan,1", "mine=inf,1", "H200=x,y"):
        with pytest.raises(ValueError, match="as in mine="):
            roofline.hardware(wrong)


def test_a_forward_is_bound_by_memory_and_then_by_arithmetic():
    device = roofline.Hardware("d", 1e15, 1e12, launch=0.0)
    seconds = [roofline.forward_seconds(device, LLAMA, 1, nodes, 0) for nodes in (1, 1000, 1001, 2000)]
    assert seconds[0] == seconds[1] == pytest.approx(16e-3)  # ridge: 1,000 tokens
    assert seconds[2] > seconds[1] and seconds[3] == pytest.approx(32e-3)
    # The nodes of a slot share its KV; slots do not.
    long = roofline.forward_seconds(device, LLAMA, 1, 8, 100_000)
    assert long == roofline.forward_seconds(device, LLAMA, 1, 1, 100_000) == pytest.approx(16e-3 + 100_000 * LLAMA.kv_bytes / 1e12)
    assert roofline.forward_seconds(device, LLAMA, 2, 1, 100_000) == pytest.approx(16e-3 + 200_000 * LLAMA.kv_bytes / 1e12)


def test_an_estimate_is_called_one_and_breaks_even_past_the_ridge():
    device = roofline.hardware("H100-SXM")
    result = roofline.estimate(device, LLAMA, 2.5, 8, [1, 8, 32, 64, 128, 256], 0)
    assert result["kind"] == "estimate" and "data sheet" in result["source"]
    assert result["speedup"][0] == pytest.approx(2.5, rel=0.01)
    # 8 nodes of 37 slots reach the ridge; at τ = 2.5 the round may take 2.5 plain rounds.
    assert result["break_even"] == 128 and result["speedup"][3] > 1 > result["speedup"][4]
    small = roofline.ModelSize(1e9, 2, 0)
    drafted = roofline.estimate(device, LLAMA, 2.5, 8, [1], 0, small, drafter_forwards=4)
    ratio = 4 * roofline.forward_seconds(device, small, 1, 1, 0) / roofline.forward_seconds(device, LLAMA, 1, 1, 0)
    assert drafted["speedup"][0] == pytest.approx(
        2.5 / (result["ms_per_token"][0] * 2.5e-3 / roofline.forward_seconds(device, LLAMA, 1, 1, 0) + ratio)
    )


def test_the_estimate_of_records_is_that_of_their_sizes():
    made = records([request("a", [3, 1, 2])], load_record(), (), [(0,), (0, 0)])
    device = roofline.hardware("H200")
    result = load_report.estimate(made, device)
    drafter = roofline.ModelSize(500, 2, 10)  # 1,000 bytes; with a KV cache, so that it runs twice
    target = roofline.ModelSize(8e9, 2, 100)
    context = CostModel(made.load).contexts[0]
    assert result == roofline.estimate(device, target, 2.0, 3, load_report.BATCHES, context, drafter, 2)
    assert (result["device"], result["context"]) == ("H200", context)
    made.load["recurrent"] = False  # all levels from one forward
    assert load_report.estimate(made, device) == roofline.estimate(device, target, 2.0, 3, load_report.BATCHES, context, drafter, 1)
    made.load["recurrent"], made.header["drafter"]["bytes"] = True, 0
    with pytest.raises(ValueError, match="part of the target; leave out --estimate"):
        load_report.estimate(made, device)
    with pytest.raises(ValueError, match="what the probe records"):
        load_report.estimate(records([request("a", [3])]), device)
