"""The report of `draftsmith serve-bench`, from its records alone.

- *time to first token*: from when a request was to be sent to its first chunk.
- *time per output token*: (last chunk − first chunk) / (n − 1) of a request with n tokens. Under speculation a chunk holds the tokens of a
  round, so that gaps between chunks are gaps between rounds.
- *speedup*: the baseline's seconds per token over those of a server, paired: the same prompt, in the same repeat, answered by both.
  `decoding` is of the time per output token, `request` of the latency with prefill and waiting.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from draftsmith.eval.intervals import Interval, of_ratio, of_ratio_of_ratios, of_share
from draftsmith.eval.records import Records
from draftsmith.eval.servers.counters import Counters, difference
from draftsmith.eval.servers.predicted import predicted
from draftsmith.eval.servers.records import CountersRecord, Load, ServedRequest, ServeRecords
from draftsmith.eval.service import percentiles

SHARES = (50, 90, 99)
LATE_S = 0.01  # a client that sends later than this disturbs what it measures
OTHERS = 1.05  # tokens that a server generated over those of this benchmark: beyond it somebody else used it
NO_USAGE = "a server sends no usage, so that its tokens are not known"

Pair = tuple[ServedRequest, ServedRequest]


def report_of(records: ServeRecords, evaluation: Records | None = None) -> dict[str, Any]:
    """The report as it is written to JSON.

    Args:
        records: of a benchmark, complete or not.
        evaluation: whose prediction stands beside what was measured.

    Returns:
        servers, settings, prompts, versions: of the header; requests and planned: how many; rows: see `_row`, one for each load and server;
        speedups: see `_speedup`, one for each load and server after the first; errors: by server, how often each was got; notes: sentences.
    """
    header, count = records.header, len(records.header["servers"])
    rows, speedups, notes = [], [], []
    for load in records.loads:
        figures = [_row(records, load, server) for server in range(count)]
        rows += [row for row in figures if row]
        for server in range(1, count):
            pairs = _pairs(records.requests, load.label, server)
            if pairs:
                tau = next((row["tau"] for row in figures if row and row["server"] == server), None)
                speedups.append(_speedup(records, load, server, pairs) | _prediction(records, evaluation, load, pairs, tau))
    errors: dict[str, Counter[str]] = defaultdict(Counter)
    for each in records.requests:
        if each.error:
            errors[header["servers"][each.server]["name"]][each.error] += 1
    notes += _notes(records, rows)
    if evaluation and evaluation.header.get("prompts", {}).get("hash") != header["prompts"]["hash"]:
        notes.append("the evaluation of --predicted has other prompts than this benchmark")
    return {name: header.get(name, {}) for name in ("servers", "settings", "prompts", "versions")} | {
        "requests": len(records.requests),
        "planned": records.planned,
        "rows": rows,
        "speedups": speedups,
        "errors": {name: dict(counts) for name, counts in errors.items()},
        "notes": notes,
    }


def _row(records: ServeRecords, load: Load, server: int) -> dict[str, Any] | None:
    """One server under one load; None where no request was measured.

    Returns:
        load, server, name; requests and errors; tokens of the answers and counted ("usage" or "chunks"); seconds of all segments, and
        tokens_per_s and requests_per_s over them; running: the mean number of requests under way; first_token_s, token_s, gap_s and
        latency_s: p50, p90, p99, None without values; tokens_per_chunk; tau: see `_tau`.
    """
    requests = [each for each in records.requests if (each.load, each.server) == (load.label, server)]
    if not requests:
        return None
    answered = [each for each in requests if not each.error]
    seconds = sum(max(each.end_s for each in segment) for segment in _segments(requests))
    several = [each for each in answered if each.count > 1 and each.decoding_s > 0]
    gaps = [after - before for each in answered for before, after in zip(each.chunks_s, each.chunks_s[1:], strict=False)]
    tokens, chunks = sum(each.count for each in answered), sum(len(each.chunks_s) for each in answered)
    return {
        "load": load.label,
        "server": server,
        "name": records.header["servers"][server]["name"],
        "requests": len(requests),
        "errors": len(requests) - len(answered),
        "tokens": tokens,
        "counted": "chunks" if any(each.tokens is None for each in answered) else "usage",
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        "requests_per_s": len(answered) / seconds if seconds else None,
        "running": sum(each.latency_s for each in requests) / seconds if seconds else None,
        "first_token_s": _shares(each.chunks_s[0] - each.due_s for each in answered if each.chunks_s),
        "token_s": _shares(each.decoding_s / (each.count - 1) for each in several),
        "gap_s": _shares(gaps),
        "latency_s": _shares(each.latency_s for each in answered),
        "tokens_per_chunk": tokens / chunks if chunks else None,
        "tau": _tau(records, load, server, answered),
    }


def _shares(values: Iterable[float]) -> dict[str, float] | None:
    values = list(values)
    return percentiles(values, SHARES) if values else None


def _segments(requests: Iterable[ServedRequest]) -> list[list[ServedRequest]]:
    segments: dict[Any, list[ServedRequest]] = defaultdict(list)
    for each in requests:
        segments[each.measurement, each.segment].append(each)
    return list(segments.values())


def _tau(records: ServeRecords, load: Load, server: int, answered: Sequence[ServedRequest]) -> dict[str, Any] | None:
    """Tokens per round by the server's own counts; None where it has none, or drafts nothing.

    Returns:
        tau, low, high (None without an interval), source; from vLLM: drafting, the share of rounds that drafted; of these the mean drafted
        tokens and survival by depth.
    """
    counters = [each for each in records.counters if (each.load, each.server) == (load.label, server)]
    # A segment without a draft has rounds too.
    counted = [(each, values) for each in counters if "drafts" in (values := difference(each.before, each.after))]
    if any(values["drafts"] for _, values in counted):
        drafts, drafted, accepted = (sum(values.get(name, 0.0) for _, values in counted) for name in ("drafts", "drafted", "accepted"))
        survivals = [
            sum(column) for column in zip(*(values.get("survivals", []) for _, values in counted if values["drafts"]), strict=False)
        ]
        rounds = sum(_rounds(each, values, records.requests) for each, values in counted)
        tau = {"tau": 1 + accepted / rounds, "low": None, "high": None, "source": "counters of vLLM"}
        return tau | {"drafted": drafted / drafts, "drafting": drafts / rounds, "survival": [depth / drafts for depth in survivals]}
    drafting = [each for each in answered if each.drafting.get("predicted_n", 0) > 1]
    drafting = drafting if any(each.drafting.get("draft_n") for each in drafting) else []
    if drafting:
        # Of each answer the first token comes from prefill, and each later round commits one token more than it accepts.
        later = [(each.prompt, each.drafting["predicted_n"] - 1, each.drafting.get("draft_n_accepted", 0)) for each in drafting]
        tokens = _sums((prompt, count) for prompt, count, _ in later)
        rounds = _sums((prompt, count - accepted) for prompt, count, accepted in later)
        return _interval("tau", of_ratio(tokens, rounds)) | {"source": "timings of llama.cpp"}
    lengths = [each.after["accept_length"] for each in counters if "accept_length" in each.after]
    if lengths:
        source = "server_info of SGLang: the mean since the server started"
        return {"tau": lengths[-1], "low": None, "high": None, "source": source}
    return None


def _rounds(counters: CountersRecord, values: Counters, requests: Iterable[ServedRequest]) -> float:
    """The rounds of a segment after the first tokens of its answers, those without drafts included, which vLLM does not count.

    Each round generates one token more than it accepts. That needs a segment of complete answers, of which nobody else had any. Accepted
    tokens past the ends of answers make it too few, and never fewer than the rounds that drafted.
    """
    answers = [
        each
        for each in requests
        if (*each.measurement, each.segment) == (counters.load, counters.repeat, counters.server, counters.segment)
    ]
    ours = sum(each.count for each in answers)
    exact = not any(each.error or each.tokens is None for each in answers) and values.get("generated") == ours
    return max(values["drafts"], ours - len(answers) - values["accepted"]) if exact else values["drafts"]


def _sums(values: Iterable[tuple[str, float]]) -> torch.Tensor:
    """The sums [P] of the values of each prompt, by its id."""
    sums: dict[str, float] = defaultdict(float)
    for prompt, value in values:
        sums[prompt] += value
    return torch.tensor([sums[prompt] for prompt in sorted(sums)], dtype=torch.float64)


def _pairs(requests: Sequence[ServedRequest], load: str, server: int) -> list[Pair]:
    """The answers of the baseline and of a server to the same prompt in the same repeat."""
    baseline, answers = (
        {(each.repeat, each.prompt): each for each in requests if (each.load, each.server, each.error) == (load, number, "")}
        for number in (0, server)
    )
    return [(each, answers[key]) for key, each in baseline.items() if key in answers]


def _speedup(records: ServeRecords, load: Load, server: int, pairs: list[Pair]) -> dict[str, Any]:
    """A server beside the baseline under one load.

    Returns:
        load, server, name, prompts; decoding and request: estimate, low, high of the speedups, None where they cannot be had, and why_none;
        equal: at T = 0 the share of equal answers with its interval, how many, and the baseline's own share over its repeats.
    """
    counted = all(each.tokens is not None for pair in pairs for each in pair)
    several = [pair for pair in pairs if all(each.count > 1 and each.decoding_s > 0 for each in pair)]
    row: dict[str, Any] = {"load": load.label, "server": server, "name": records.header["servers"][server]["name"]}
    row |= {"prompts": len({baseline.prompt for baseline, _ in pairs}), "decoding": None, "request": None, "why_none": ""}
    if not counted:
        row["why_none"] = NO_USAGE
    else:
        if several:
            row["decoding"] = _ratio(several, lambda each: each.count - 1, lambda each: each.decoding_s)
        if any(baseline.count for baseline, _ in pairs) and any(each.count for _, each in pairs):
            row["request"] = _ratio(pairs, lambda each: each.count, lambda each: each.latency_s)
    row["equal"] = _equal(records, load, pairs) if not records.header["settings"]["temperature"] else None
    return row


def _ratio(pairs: list[Pair], tokens: Callable[[ServedRequest], float], seconds: Callable[[ServedRequest], float]) -> dict[str, Any]:
    """Tokens per second of a server over those of the baseline, paired by prompt."""
    columns = [
        torch.stack([_sums((pair[server].prompt, value(pair[server])) for pair in pairs) for server in (1, 0)])  # [2,P]
        for value in (tokens, seconds)
    ]
    return _interval("estimate", of_ratio_of_ratios(*columns))


def _interval(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.estimate, "low": interval.low, "high": interval.high}


def _equal(records: ServeRecords, load: Load, pairs: list[Pair]) -> dict[str, Any]:
    """How many answers of the servers are equal, and of the baseline with its own in the next repeat: rounding depends on the batch."""
    equal = [(baseline.prompt, float(each.text == baseline.text)) for baseline, each in pairs]
    share = of_share(_sums(equal), _sums((prompt, 1.0) for prompt, _ in equal))
    texts = {
        (each.repeat, each.prompt): each.text for each in records.requests if (each.load, each.server, each.error) == (load.label, 0, "")
    }
    own = [texts[repeat + 1, prompt] == text for (repeat, prompt), text in texts.items() if (repeat + 1, prompt) in texts]
    counts = {"answers": int(sum(same for _, same in equal)), "compared": len(equal), "own": sum(own), "own_compared": len(own)}
    return _interval("share", share) | counts


def _prediction(
    records: ServeRecords, evaluation: Records | None, load: Load, pairs: list[Pair], tau: dict[str, Any] | None
) -> dict[str, Any]:
    """`predicted` of this load and None, or None and `unpredicted`, the reason; {} where no evaluation is given."""
    if evaluation is None:
        return {}
    temperature = records.header["settings"]["temperature"]
    lengths = [each.prompt_tokens + each.count / 2 for each, _ in pairs if each.prompt_tokens is not None]
    context = sum(lengths) / len(lengths) if lengths else 0.0
    try:
        return {"predicted": predicted(evaluation, f"{temperature:g}", load, context, (tau or {}).get("drafted")), "unpredicted": ""}
    except ValueError as error:
        return {"predicted": None, "unpredicted": str(error)}


def _notes(records: ServeRecords, rows: list[dict[str, Any]]) -> list[str]:
    """What makes the numbers less than they seem."""
    notes = []
    if len(records.requests) < records.planned:
        notes.append(f"{len(records.requests)} of {records.planned} requests were measured; the same command measures the others")
    for name in dict.fromkeys(row["name"] for row in rows if row["counted"] == "chunks"):
        notes.append(f"{name} sends no usage: its tokens are counted by chunk, of which each may hold several")
    late = [each.sent_s - each.due_s for each in records.requests]
    if late and (p99 := percentiles(late, SHARES)["p99"]) > LATE_S:
        notes.append(f"this client sent requests late (p99 {1e3 * p99:.0f} ms), so that latencies are partly its own")
    for row in rows:
        if (
            row["load"].startswith("concurrency")
            and row["requests"]
            and row["running"]
            and row["running"] < 0.8 * float(row["load"].split()[1])
        ):
            notes.append(
                f"{row['name']}, {row['load']}: {row['running']:.1f} requests were under way on average; more prompts would fill it"
            )
    notes += _shared(records)
    return list(dict.fromkeys(notes))


def _shared(records: ServeRecords) -> list[str]:
    """Servers that somebody else used meanwhile, as far as their counters say so."""
    notes = []
    for each in records.counters:
        values = difference(each.before, each.after)
        requests = [
            request
            for request in records.requests
            if (*request.measurement, request.segment) == (each.load, each.repeat, each.server, each.segment)
        ]
        ours = sum(request.count for request in requests)
        if all(request.tokens is not None for request in requests) and values.get("generated", 0) > OTHERS * ours + 1:
            name = records.header["servers"][each.server]["name"]
            notes.append(f"{name}, {each.load}: it generated {values['generated']:.0f} tokens, {ours} of them here; others used it too")
    return notes
