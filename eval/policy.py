"""The load policy: at each batch the draft tree that is predicted to pay most, chosen on half of the prompts and reported on the others.

Its file is described in inference/policy.py, which reads it.
"""

from collections.abc import Sequence
from typing import Any

from draftsmith.eval.load import CostModel, predict
from draftsmith.eval.records import PositionRecord
from draftsmith.eval.trees import Candidates, Path, Positions, Rounds
from draftsmith.inference.policy import FORMAT, KIND


def load_policy(
    model: CostModel, choosing: Sequence[PositionRecord], reported: Sequence[PositionRecord], context: int, max_nodes: int
) -> dict[str, Any]:
    """The policy for the batches 1 to the largest measured; the caller adds target, drafter and setting.

    Args:
        model: what rounds cost.
        choosing: position records of one setting that choose the trees.
        reported: others, for τ and the speedup.
        context: C.
        max_nodes: N at most.
    """
    candidates, positions = Candidates(choosing, min(max_nodes, model.max_nodes)), Positions(reported)
    chosen: dict[int, tuple[list[Path], int]] = {}
    for batch in range(1, model.batches[-1] + 1):
        cost = model.relative(max(batch, model.batches[0]), context)
        chosen[batch] = candidates.best(cost), candidates.best_chain(cost)
    entries = []
    for batch, (paths, chain) in chosen.items():
        if chosen.get(batch + 1) == (paths, chain):
            continue
        row = predict(model, positions.rounds(paths), max(batch, model.batches[0]), context)
        entries.append(
            {
                "from": entries[-1]["to"] + 1 if entries else 1,
                "to": batch,
                "tree": [list(path) for path in paths],
                "nodes": len(paths) + 1,
                "depth": max(map(len, paths), default=0),
                "num_speculative_tokens": chain,
                "tau": row.tau,
                "speedup": row.speedup,
                "low": row.low,
                "high": row.high,
            }
        )
    return {"format": FORMAT, "kind": KIND, "context": context, "entries": entries}


def lookup_policy(model: CostModel, by_depth: dict[int, Rounds], context: int) -> list[dict[str, Any]]:
    """The best depth of a drafter that looks its drafts up, by batch, from replays: entries of batch, depth (0 is off), tau and speedup."""
    rows = []
    for batch in model.batches:
        predictions = {depth: predict(model, rounds, batch, context) for depth, rounds in by_depth.items()}
        best = max(predictions, key=lambda depth: predictions[depth].speedup)
        row = predictions[best]
        off = row.speedup <= 1
        rows.append({"batch": batch, "depth": 0 if off else best, "tau": 1.0 if off else row.tau, "speedup": 1.0 if off else row.speedup})
    return rows
