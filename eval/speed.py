"""The measured speed, from requests that were answered plainly, with the drafter and by transformers' `generate`, by turns in one process."""

from collections.abc import Sequence
from typing import Any

from draftsmith.eval.intervals import Interval, of_ratio_of_ratios
from draftsmith.eval.records import RequestRecord
from draftsmith.eval.totals import columns


def speedups(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Speedups with 95 % intervals over batches (prompts, where they are timed alone).

    They compare seconds per token: total seconds where the answers are the same. Requests that were not timed do not count.
    """
    batches = [request for request in requests if request.seconds]

    def ratio(name: str, base: str) -> Interval:
        sums = [{each.prompt: (each.batch_tokens[which], each.seconds[which]) for each in batches} for which in (name, base)]
        return of_ratio_of_ratios(*columns(sums, list(sums[0])))

    entries: dict[str, Any] = {"timed": sum(each.batch for each in batches)}
    for key, name in (("speedup", "plain"), ("speedup_over_transformers", "transformers")):
        if name in batches[0].seconds:
            entries[key], entries[f"{key}_low"], entries[f"{key}_high"] = ratio("drafted", name)
    if "transformers" in batches[0].seconds:
        entries["plain_over_transformers"] = ratio("plain", "transformers").estimate
    return entries


def speed(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """The report's `speed`.

    Where prompts were timed alone, c, drafting and rest are the parts of a mean round over a mean plain round: rounds differ in size (a look-up
    may propose nothing), so only means say what they cost. predicted_speedup is τ over their sum; what it lacks is prefill.
    """
    batches = [request for request in requests if request.seconds]
    rounds = [each for request in requests if request.timed for each in request.rounds]
    rates = {
        name: sum(each.batch_tokens[name] for each in batches) / sum(each.seconds[name] for each in batches) for name in batches[0].seconds
    }
    tau = sum(each.committed for each in rounds) / len(rounds)
    entries = speedups(requests) | {
        "tau": tau,
        "nodes": sum(each.nodes for each in rounds) / len(rounds),
        "plain_tokens_per_s": rates["plain"],
        "drafted_tokens_per_s": rates["drafted"],
    }
    if "ordinary" in rates:
        entries["cost_of_exact"] = rates["ordinary"] / rates["plain"]
    if all(each.batch == 1 for each in batches):
        plain = sum(each.plain_verify_s + each.plain_other_s for each in batches) / sum(each.plain_rounds for each in batches)
        for name, part in (("c", "verify_s"), ("drafting", "draft_s"), ("rest", "other_s")):
            entries[name] = sum(getattr(each, part) for each in rounds) / len(rounds) / plain
        entries["predicted_speedup"] = tau / (entries["c"] + entries["drafting"] + entries["rest"])
        entries["realised_fraction"] = entries["speedup"] / entries["predicted_speedup"]
    return entries
