"""The part of a report on load and service, from the records alone: as JSON, and as text for people."""

from collections.abc import Sequence
from typing import Any

from draftsmith.eval import roofline, service
from draftsmith.eval.intervals import shown
from draftsmith.eval.load import CostModel, by_batch, predict
from draftsmith.eval.load_check import check, rounds_of
from draftsmith.eval.policy import best_replayed, best_static, load_policy
from draftsmith.eval.records import PositionRecord, Records
from draftsmith.eval.replay import Replayed, replayed
from draftsmith.eval.trees import Candidates, Path, Positions, Rounds, chain, gap
from draftsmith.inference.expand import tree_config
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.self_speculation import SelfSpeculation

BATCHES = [1 << power for power in range(10)]  # of an estimate


def load_report(records: Records) -> dict[str, Any]:
    """Predictions and service figures at the first setting.

    Returns:
        {} without a probe of the load, else context (C of the predictions), kernels, graphs, left_out; by_batch: see `load.by_batch`, for the
        evaluated tree; by_context: entries of context, batch, speedup; chains: of each K the τ and the predicted speedup at each batch;
        trees: the best tree of each domain (and of "all") at the least and the largest batch; gap: see `trees.gap`; replayed: of each tree
        that can be replayed (eval/replay.py) its τ and the predicted speedup at each batch; policy: see inference/policy.py; check: see
        `load_check.check`. What needs position records is None without them, and so is the policy where nothing can be replayed either.
    """
    if not records.load:
        return {}
    setting = records.requests[0].setting
    requests = records.requests_at(setting)
    choosing, reported = (records.positions_at(setting, half) for half in (True, False))
    model, tree = CostModel(records.load), records.tree["tree"]
    settings = records.header["settings"]
    context, slots = model.contexts[0], settings["slots"]
    rounds = rounds_of(requests, records.tree["depth"])
    small = max(rounds.sizes) <= model.max_nodes
    halves = bool(choosing and reported)
    report: dict[str, Any] = {name: records.load[name] for name in ("kernels", "graphs", "left_out")} | {"context": context}
    one_depth = small and not (settings.get("adaptive_depth") or settings.get("policy"))  # else most rounds draft less than the tree
    report["by_batch"] = by_batch(model, rounds, context, tree) if one_depth else None
    report["by_context"] = _by_context(model, rounds, tree) if one_depth else None
    report["chains"] = _chains(model, reported, context) if halves else None
    report["trees"] = _trees(model, choosing, reported, context) if halves else None
    report["gap"] = gap(choosing, reported, model.relative(model.nearest(slots), context), model.max_nodes)._asdict() if halves else None
    drafts = [each for each in replayed(records, setting) if max(each.reported.sizes) <= model.max_nodes]
    report["replayed"] = [_replayed_row(model, each, context) for each in drafts] or None
    report["policy"] = None
    if halves or drafts:
        best = best_static(model, choosing, reported, context, model.max_nodes) if halves else best_replayed(model, drafts, context)
        named = {"target": records.header["target"], "drafter": records.header["drafter"], "setting": setting}
        report["policy"] = load_policy(model, best, context) | named
    fixed = one_depth and not (settings.get("load_aware") or settings.get("exact"))
    prefill = records.load["prefill_s_per_token"]
    report["check"] = check(model, requests, slots, tree, records.tree["depth"], prefill) if fixed else None
    return report


PART_OF_TARGET = "an estimate needs the size of the drafter, and this one runs a part of the target; leave out --estimate"


def check_estimable(drafter: Any) -> None:
    """Check, before anything is decoded, that `estimate` is possible. Raises ValueError for a drafter that is a part of the target."""
    drafting = drafter.trained if isinstance(drafter, Hybrid) else drafter
    if isinstance(drafting, SelfSpeculation) or drafting.method == "kangaroo":
        raise ValueError(PART_OF_TARGET)


def estimate(records: Records, device: roofline.Hardware) -> dict[str, Any]:
    """The roofline estimate of the evaluated tree for a device that is not at hand, see `roofline.estimate`; τ is the measured one.

    Raises:
        ValueError: no probe recorded the sizes of the models, or the drafter is a part of the target.
    """
    if not records.load:
        raise ValueError("an estimate needs what the probe records, and these records have none; run draftsmith eval without --probe 0")
    target, drafter = roofline.ModelSize(**records.load["size"]), None
    depth, kv = records.tree["depth"], records.load["kv_bytes"]["drafter"]
    recurrent, weights = records.load.get("recurrent", bool(kv)), records.header["drafter"].get("bytes")
    if recurrent and not weights or records.header["drafter"].get("method") == "kangaroo":
        raise ValueError(PART_OF_TARGET)
    if weights:
        drafter = roofline.ModelSize(weights / target.bytes_per_weight, target.bytes_per_weight, kv)
    setting = records.requests[0].setting
    rounds = rounds_of(records.requests_at(setting), depth)
    nodes = max(rounds.sizes)
    context, forwards = CostModel(records.load).contexts[0], depth if recurrent else min(depth, 1)
    return roofline.estimate(device, target, rounds.tau, nodes, BATCHES, context, drafter, forwards)


def _by_context(model: CostModel, rounds: Rounds, tree: Any) -> list[dict[str, float]]:
    return [
        {"context": context, "batch": batch, "speedup": predict(model, rounds, batch, context, tree).speedup}
        for context in model.contexts
        for batch in model.batches
    ]


def _chains(model: CostModel, reported: Sequence[PositionRecord], context: int) -> list[dict[str, Any]]:
    """Of each chain length K: τ, and the predicted speedup by batch."""
    positions, rows = Positions(reported), []
    for length in range(1, min(positions.depth, model.max_nodes - 1) + 1):
        rounds = positions.rounds(chain(length))
        speedups = [predict(model, rounds, batch, context).speedup for batch in model.batches]
        rows.append({"length": length, "tau": rounds.tau, "batches": model.batches, "speedup": speedups})
    return rows


def _replayed_row(model: CostModel, draft: Replayed, context: int) -> dict[str, Any]:
    """Of a replayed tree, on the prompts that do not choose: τ, and the predicted speedup by batch."""
    rounds, interval = draft.reported, draft.reported.interval
    speedups = [predict(model, rounds, batch, context).speedup for batch in model.batches]
    return {"tree": tree_config(draft.tree), "nodes": draft.tree.num_nodes, "depth": draft.tree.max_depth} | {
        "tau": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "batches": model.batches,
        "speedup": speedups,
    }


def _trees(model: CostModel, choosing: Sequence[PositionRecord], reported: Sequence[PositionRecord], context: int) -> list[dict[str, Any]]:
    """By domain and batch, the best tree and chain by the choosing half, and what they give on the other."""
    domains = dict.fromkeys(record.domain for record in reported)
    rows = []
    for domain in [None, *domains] if len(domains) > 1 else [None]:
        halves = [[each for each in half if domain in (None, each.domain)] for half in (choosing, reported)]
        if not all(halves):
            continue
        candidates, positions = Candidates(halves[0], model.max_nodes), Positions(halves[1])
        for batch in dict.fromkeys((model.batches[0], model.batches[-1])):
            paths: list[Path] = candidates.best(model.relative(batch, context))
            row = predict(model, positions.rounds(paths), batch, context)
            length = candidates.best_chain(model.relative(batch, context))
            rows.append(
                {"domain": domain or "all", "batch": batch, "tree": [list(path) for path in paths], "num_speculative_tokens": length}
                | {name: getattr(row, name) for name in ("tau", "speedup", "low", "high")}
            )
    return rows


def lines(report: dict[str, Any]) -> list[str]:
    """The load for people."""
    if not report:
        return []
    text = []
    if report["by_batch"]:
        curve = report["by_batch"]
        pairs = [f"{batch}: {speedup:.2f}" for batch, speedup in zip(curve["batches"], curve["speedup"], strict=True)]
        if curve["break_even"]:
            end = f"as fast as plain decoding from batch {curve['break_even']} on"
        else:
            end = "faster at each of them" if min(curve["speedup"]) > 1 else "faster at the largest of them"
        text.append(f"predicted speedup by batch, at a context of {report['context']}: {'  '.join(pairs)}   ({end})")
    for entry in (report["policy"] or {}).get("entries", ()):
        what = f"{entry['nodes']} nodes, depth {entry['depth']}" if entry["tree"] else "off"
        span = f"{entry['from']} – {entry['to']}" if entry["to"] > entry["from"] else f"{entry['to']}"
        interval = f" ({shown(entry['low'], entry['high'])})" if entry["tree"] else ""
        chains = entry["num_speculative_tokens"]
        engine = f"chains: num_speculative_tokens {chains}; " if chains is not None else ""
        text.append(f"batch {span}: {what}; {engine}predicted {entry['speedup']:.2f}{interval}")
    if report["gap"]:
        values = report["gap"]
        text.append(
            f"τ of the best tree on the prompts that chose it {values['chosen_on']:.2f}, on the others {values['reported_on']:.2f}: "
            f"optimism {values['optimism']:+.2f}, {values['crossed']:+.2f} without the difference of the halves"
        )
    if report["check"]:
        row = report["check"]
        text.append(
            f"predicted against measured at batch {row['batch']}: {row['predicted']:.2f} against {row['measured']:.2f} ({row['error']:+.0%}); "
            f"τ {row['tau']:.2f} over a round of {row['relative_cost']:.2f} plain rounds is {row['steady']:.2f} without prefill"
        )
    return text


def estimate_lines(estimates: Sequence[dict[str, Any]]) -> list[str]:
    """The estimates for people."""
    text = []
    for each in estimates:
        speedups = dict(zip(each["batches"], each["speedup"], strict=True))
        pays = [batch for batch, speedup in speedups.items() if speedup > 1]
        where = f"pays from batch {pays[0]} to {pays[-1]}" if pays else "pays at none of them"
        pairs = "  ".join(f"{batch}: {speedup:.2f}" for batch, speedup in speedups.items())
        text.append(f"ESTIMATED, not measured: speedup by batch on {each['device']} ({each['source']}; roofline): {pairs}   ({where})")
    return text


def service_lines(figures: dict[str, Any]) -> list[str]:
    """The figures of `service.service` for people."""
    if not figures:
        return []
    text = []
    for name, key in (("time to first token", "first_token_s"), ("between tokens", "gap_s")):
        if figures[key]:
            values = ", ".join(f"p{share} {1e3 * figures[key][f'p{share}']:.1f}" for share in service.SHARES)
            text.append(f"{name}, ms: {values}")
    if figures["token_s"] is not None and figures["plain_token_s"] is not None:
        text.append(f"ms per token: {1e3 * figures['token_s']:.1f}; plain decoding {1e3 * figures['plain_token_s']:.1f}")
    if figures["cost"]:
        cost = figures["cost"]
        text.append(f"cost of a request, in plain decoding's: {cost['all']:.2f} (p50 {cost['p50']:.2f}, p95 {cost['p95']:.2f})")
    if figures["kv_bytes"]:
        kv = figures["kv_bytes"]
        text.append(
            f"bytes: drafter {figures['drafter_bytes'] or 0:,}; KV of a token {kv['target']:,} + {kv['drafter']:,} of the drafter's"
        )
    return text
