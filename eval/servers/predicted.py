"""What an evaluation predicts of a server: τ of the chain that the server drafts, and the speedup of decoding at the server's batch."""

from typing import Any

from draftsmith.eval.load import CostModel, predict
from draftsmith.eval.load_check import rounds_of
from draftsmith.eval.records import Records
from draftsmith.eval.servers.records import Load
from draftsmith.eval.trees import Positions, Rounds, chain


def predicted(evaluation: Records, setting: str, load: Load, context: float, drafted: float | None) -> dict[str, Any]:
    """The prediction for steady decoding, without prefill: beside it belongs the speedup of the time per output token.

    Args:
        evaluation: records of `draftsmith eval`.
        setting: label of its sampling that is the server's.
        load: of the server. With a rate the batch is not known, so that τ alone is predicted.
        context: mean tokens of a request half way; within what was measured it is used as it is.
        drafted: tokens that the server drafts in a round; None where it does not say, and then the evaluated tree is taken.

    Returns:
        tau, tau_low, tau_high, depth (K), batch; speedup, low, high: None where there is none, and then why_none says why.

    Raises:
        ValueError: τ of this chain, or of this setting, is not in the records.
    """
    rounds = _rounds(evaluation, setting, drafted)
    tau = rounds.interval
    row: dict[str, Any] = {"tau": tau.estimate, "tau_low": tau.low, "tau_high": tau.high, "depth": rounds.depth}
    row |= {"batch": None, "context": None, "speedup": None, "low": None, "high": None, "why_none": ""}
    if load.kind == "rate":
        return row | {"why_none": "with a rate the servers have batches of their own; the prediction is of one batch: take --concurrency"}
    if not evaluation.load:
        return row | {"why_none": "the evaluation timed no loads; run draftsmith eval without --probe 0"}
    model = CostModel(evaluation.load)
    tree = evaluation.tree["tree"] if drafted is None else [list(path) for path in chain(rounds.depth)]
    length = round(min(max(context, model.contexts[0]), model.contexts[-1]))
    try:
        prediction = predict(model, rounds, int(load.value), length, tree)
    except ValueError as error:
        return row | {"why_none": str(error)}
    return row | {"batch": prediction.batch, "context": length} | {name: getattr(prediction, name) for name in ("speedup", "low", "high")}


def _rounds(evaluation: Records, setting: str, drafted: float | None) -> Rounds:
    """The rounds of a chain of so many tokens by position records, else of the evaluated tree."""
    requests = evaluation.requests_at(setting)
    if not requests:
        settings = ", ".join(dict.fromkeys(each.setting for each in evaluation.requests))
        raise ValueError(f"the evaluation has no sampling {setting}, only {settings}")
    if drafted is None:
        return rounds_of(requests, evaluation.tree["depth"])
    depth, tree = round(drafted), evaluation.tree["tree"]
    if abs(drafted - depth) > 0.01:
        raise ValueError(f"the server drafts {drafted:.2f} tokens a round on average; the prediction is of chains of one length")
    positions = evaluation.positions_at(setting, choosing=False)
    if positions and depth <= Positions(positions).depth:
        return Positions(positions).rounds(chain(depth))
    if tree == [list(path) for path in chain(depth)]:
        return rounds_of(requests, depth)
    raise ValueError(f"the evaluation recorded neither positions {depth} deep nor a chain of {depth}, which the server drafts")
