"""What a service would see, from the records of the requests that were timed: time to first token, gaps between tokens, memory, cost."""

import math
from collections.abc import Sequence
from typing import Any

from draftsmith.eval.records import Records, RequestRecord, Round

SHARES = (50, 95, 99)


def service(records: Records, setting: str) -> dict[str, Any]:
    """The service figures at one setting; {} where no request was timed.

    The tokens of a round arrive together: the first of them after the round's seconds, the others after none. So the median gap may be 0, and
    the mean (time per output token) is the fairer figure beside plain decoding. Where several requests run at a time, gaps are without the
    prefills of others between two rounds.

    Returns:
        requests: how many were timed.
        first_token_s: p50, p95, p99 of prefill and the first round, over requests whose prefill was timed alone; None without any.
        gap_s: p50, p95, p99 of the time between two tokens, over all tokens but the first of each request.
        token_s, plain_token_s: seconds per token after the first round; the plain ones are of mean plain rounds.
        drafter_bytes: of the drafter's weights.
        kv_bytes: of a token, in the caches of target and drafter; None where that was not measured.
        cost: seconds of a request over those of plain decoding, per token: p50, p95 and p99 over batches, and of all together.
    """
    timed = [request for request in records.requests_at(setting) if request.timed]
    if not timed:
        return {}
    first = [request.prefill_s + _seconds(request.rounds[0]) for request in timed if request.prefill_s is not None]
    gaps = [gap for request in timed for gap in token_gaps(request)]
    later = [each for request in timed for each in request.rounds[1:]]
    batches = [request for request in timed if request.seconds]
    plain_rounds = sum(request.plain_rounds for request in timed)
    return {
        "requests": len(timed),
        "first_token_s": percentiles(first) if first else None,
        "gap_s": percentiles(gaps) if gaps else None,
        "token_s": sum(map(_seconds, later)) / sum(each.committed for each in later) if later else None,
        "plain_token_s": sum(each.plain_verify_s + each.plain_other_s for each in timed) / plain_rounds if plain_rounds else None,
        "drafter_bytes": records.header["drafter"].get("bytes"),
        "kv_bytes": records.load.get("kv_bytes"),
        "cost": percentiles([_cost([each]) for each in batches]) | {"all": _cost(batches)} if batches else None,
    }


def token_gaps(request: RequestRecord) -> list[float]:
    """Seconds between each token of the answer and the one before it."""
    gaps = [0.0] * (request.rounds[0].committed - 1)
    for each in request.rounds[1:]:
        gaps += [_seconds(each), *[0.0] * (each.committed - 1)]
    return gaps


def percentiles(values: Sequence[float], shares: Sequence[int] = SHARES) -> dict[str, float]:
    """p50, p95 and p99 (or others) by nearest rank: the smallest value that so many per cent of all do not exceed."""
    ordered = sorted(values)
    return {f"p{share}": ordered[max(1, math.ceil(share / 100 * len(ordered))) - 1] for share in shares}


def _seconds(each: Round) -> float:
    assert each.draft_s is not None and each.verify_s is not None and each.other_s is not None
    return each.draft_s + each.verify_s + each.other_s


def _cost(batches: Sequence[RequestRecord]) -> float:
    drafted, plain = (
        sum(each.seconds[name] for each in batches) / sum(each.batch_tokens[name] for each in batches) for name in ("drafted", "plain")
    )
    return drafted / plain
