"""The load policy: at each batch the draft that is predicted to pay most, chosen on half of the prompts and reported on the others.

Its file is described in inference/policy.py, which reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.load import CostModel, predict
from draftsmith.eval.records import PositionRecord
from draftsmith.eval.replay import Replayed
from draftsmith.eval.trees import Candidates, Positions, Rounds
from draftsmith.inference.expand import TreeSpec, tree_config
from draftsmith.inference.policy import FORMAT, KIND
from draftsmith.inference.tree import StaticTree

OFF = StaticTree(())


@dataclass(frozen=True, slots=True)
class Choice:
    """What is drafted at a batch.

    Attributes:
        tree: the draft tree; `OFF` is plain decoding.
        chain: the chain length K that pays most, for engines that draft chains; 0 is off, None not known.
        rounds: of the tree, on the prompts that did not choose it.
    """

    tree: TreeSpec
    chain: int | None
    rounds: Rounds


def load_policy(model: CostModel, choice_at: Callable[[int], Choice], context: int) -> dict[str, Any]:
    """The policy for the batches 1 to the largest measured; the caller adds target, drafter and setting.

    Args:
        model: what rounds cost.
        choice_at: a batch -> what to draft.
        context: C.
    """
    chosen = {batch: choice_at(max(batch, model.batches[0])) for batch in range(1, model.batches[-1] + 1)}
    entries: list[dict[str, Any]] = []
    for batch, choice in chosen.items():
        following = chosen.get(batch + 1)
        if following and (tree_config(following.tree), following.chain) == (tree_config(choice.tree), choice.chain):
            continue
        row = predict(model, choice.rounds, max(batch, model.batches[0]), context)
        entries.append(
            {
                "from": entries[-1]["to"] + 1 if entries else 1,
                "to": batch,
                "tree": tree_config(choice.tree),
                "nodes": choice.tree.num_nodes,
                "depth": choice.tree.max_depth,
                "num_speculative_tokens": choice.chain,
                "tau": row.tau,
                "speedup": row.speedup,
                "low": row.low,
                "high": row.high,
            }
        )
    return {"format": FORMAT, "kind": KIND, "context": context, "entries": entries}


def best_static(
    model: CostModel, choosing: Sequence[PositionRecord], reported: Sequence[PositionRecord], context: int, max_nodes: int
) -> Callable[[int], Choice]:
    """The best static tree and chain at a batch, by position records. max_nodes: N at most."""
    candidates, positions = Candidates(choosing, min(max_nodes, model.max_nodes)), Positions(reported)

    def choice_at(batch: int) -> Choice:
        cost = model.relative(batch, context)
        paths = candidates.best(cost)
        return Choice(StaticTree.from_paths(paths), candidates.best_chain(cost), positions.rounds(paths))

    return choice_at


def best_replayed(model: CostModel, drafts: Sequence[Replayed], context: int) -> Callable[[int], Choice]:
    """The best of some replayed trees at a batch. K is known where all of them are chains: others are not replayed."""
    tokens = drafts[0].reported.tokens
    plain = Rounds(tokens, tokens, {1: int(tokens.sum())}, 0)
    chains = all(each.tree.num_nodes == each.tree.max_depth + 1 for each in drafts)

    def choice_at(batch: int) -> Choice:
        speedups = [each.choosing.tau / model.of_rounds(each.choosing, batch, context) for each in drafts]
        best = drafts[speedups.index(max(speedups))]
        if max(speedups) <= 1:
            return Choice(OFF, 0, plain)
        return Choice(best.tree, best.tree.max_depth if chains else None, best.reported)

    return choice_at
