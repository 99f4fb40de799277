"""Predicted against measured: what the load model says of the very batches that were timed, beside their times."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch

from draftsmith.eval.intervals import conversations
from draftsmith.eval.load import CostModel, Tree, predict
from draftsmith.eval.records import RequestRecord
from draftsmith.eval.speed import speedups
from draftsmith.eval.trees import Rounds


def rounds_of(requests: Sequence[RequestRecord], depth: int) -> Rounds:
    """The rounds that requests took with the drafter, by prompt; for draft depth K = `depth`."""
    conversation = conversations(request.prompt for request in requests)
    prompts = list(dict.fromkeys(conversation.values()))
    tokens, rounds = torch.zeros(2, len(prompts), dtype=torch.float64)
    sizes: Counter[int] = Counter()
    for request in requests:
        row = prompts.index(conversation[request.prompt])
        tokens[row] += sum(each.committed for each in request.rounds)
        rounds[row] += len(request.rounds)
        sizes.update(each.nodes for each in request.rounds)
    return Rounds(tokens, rounds, dict(sizes), depth)


def occupancy(lengths: Sequence[int], slots: int) -> Counter[int]:
    """How many rounds run with so many slots in use, if requests of these lengths (in rounds) take the slots of those that end."""
    waiting, running, rounds = deque(lengths), list[int](), Counter[int]()
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.popleft())
        ended = min(running)
        rounds[len(running)] += ended
        running = [left - ended for left in running if left > ended]
    return rounds


def timed_batches(requests: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    """The requests that were timed together. The last of a batch has its times."""
    batches: list[list[RequestRecord]] = [[]]
    for request in requests:
        if request.timed:
            batches[-1].append(request)
            if request.batch:
                batches.append([])
    return [batch for batch in batches if batch and batch[-1].batch == len(batch)]


def check(
    model: CostModel, requests: Sequence[RequestRecord], slots: int, tree: Tree, depth: int, prefill: dict[str, float]
) -> dict[str, Any] | None:
    """Predicted against measured speedup of the requests that were timed; None where none was.

    The prediction is of the same work: prefill included, and with as many slots in use as there were requests left. τ is that of these
    requests, so that the row says how good the model of costs is; exact τ of a static tree needs no check. `steady` is τ over the relative
    cost of a round with all slots in use and without prefill.

    Args:
        model: what rounds cost.
        requests: of one setting.
        slots: prompts decoded at a time.
        tree: the draft tree, as a config has it.
        depth: its K.
        prefill: seconds per prompt token of "plain" and "drafted", for requests whose prefill was not timed alone.
    """
    batches = timed_batches(requests)
    if not batches or slots > model.batches[-1]:
        return None
    timed = [request for batch in batches for request in batch]
    rounds = rounds_of(timed, depth)
    mean = sum(request.prompt_tokens + request.plain_tokens / 2 for request in timed) / len(timed)
    context = min(mean, model.contexts[-1])
    cost = {running: model.of_rounds(rounds, running, context, tree) for running in range(1, slots + 1)}
    plain = drafted = plain_prefill = drafted_prefill = 0.0
    for batch in batches:
        for running, count in occupancy([request.plain_tokens for request in batch], slots).items():
            plain += count * model.plain_seconds(running, context)
        for running, count in occupancy([len(request.rounds) for request in batch], slots).items():
            drafted += count * model.plain_seconds(running, context) * cost[running]
        for request in batch:
            own = request.prefill_s
            plain_prefill += own if own is not None else request.prompt_tokens * prefill["plain"]
            drafted_prefill += own if own is not None else request.prompt_tokens * prefill["drafted"]
    plain_tokens, drafted_tokens = (sum(batch[-1].batch_tokens[name] for batch in batches) for name in ("plain", "drafted"))
    predicted = (plain + plain_prefill) / plain_tokens / ((drafted + drafted_prefill) / drafted_tokens)
    measured = speedups(timed)
    return {
        "batch": slots,
        "context": context,
        "tau": rounds.tau,
        "verifying": model.verifying(slots, sum(n * k for n, k in rounds.sizes.items()) / sum(rounds.sizes.values()), context),
        "relative_cost": cost[slots],
        "steady": predict(model, rounds, slots, int(context), tree).speedup,
        "predicted": predicted,
        "measured": measured["speedup"],
        "measured_low": measured["speedup_low"],
        "measured_high": measured["speedup_high"],
        "error": predicted / measured["speedup"] - 1,
    }
