"""Measure a drafter's acceptance before it is deployed.

    draftsmith eval runs/medusa-tiny/artifact
    draftsmith eval --drafter tiny-draft --target tiny        # or any causal LM with the target's tokens
    draftsmith eval --drafter suffix --prompts my-prompts.jsonl --json > report.json

Half of the prompts choose the draft tree; the report is on the other half. Every answer is compared with that of plain decoding, where the
verification rule promises the same tokens.
"""

import argparse
import sys
from pathlib import Path

from draftsmith.eval import options
from draftsmith.inference.rule_names import RULES

<<<<<<< HEAD
CHOSEN_TREES = ("best", "largest")
=======
from draftsmith.data import prompts as prompt_files
from draftsmith.data.prompts import Prompt
from draftsmith.eval import card, cost, interleaved, loading, plot, ranks, table, trees
from draftsmith.eval.interleaved import Case
from draftsmith.eval.lossless import compare
from draftsmith.eval.records import (
    Divergence,
    PositionRecord,
    Report,
    RoundRecord,
    as_json,
    distinct_ngrams,
    rank_of,
    write_positions,
    write_rounds,
)
from draftsmith.eval.summary import acceptance
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import tree_config
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import RULES, Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import DrafterModel
from draftsmith.models.target import Target

RANKS_KEPT = 32
KEYED = ("target-sample", "shared-noise")
PER_ROW = 4  # prompts of a batch for each row, so that rows are replaced while others run


def evaluate(
    target: Target,
    drafter: Any,
    prompts: list[Prompt],
    *,
    max_new_tokens: int,
    temperatures: list[float],
    most_nodes: int,
    choose: str = "best",
    rule: str = "target-sample",
    rows: int = 1,
    governed: bool = False,
    kernels: bool = False,
) -> tuple[Report, list[RoundRecord], list[PositionRecord]]:
    """The report of `drafter` on `prompts`, its round records and (where the tree was chosen) position records.

    choose: "" keeps the drafter's tree. Otherwise half of the prompts choose it, the other half is reported: the "best" by τ over
    the cost of a round, or the "largest", the best of `most_nodes` nodes. rows: prompts decoded at a time.
    """
    cases = interleaved.cases(target, prompts, max_new_tokens)
    choosing, reporting = _halves(cases) if choose else ([], cases)
    context = statistics.median_low([len(case.ids) for case in cases]) + max_new_tokens // 2
    if isinstance(drafter, DraftModel):
        drafter.check(max(len(case.ids) for case in cases) + max_new_tokens)
    seconds = ranks.agreed(cost.measure(target, context, max(most_nodes, drafter.max_nodes)))
    with _whole_trees(drafter):
        drafting = ranks.agreed(cost.measure_drafting(target, drafter, [case.ids[-context:] for case in reporting[:4]]))
    by_nodes: list[dict[str, float]] = []
    records: list[PositionRecord] = []
    if choose:
        records = positions(target, drafter, choosing + reporting, max_new_tokens)
        chosen_on, reported_on = records[: len(choosing)], records[len(choosing) :]
        price = cost.of_round(seconds, drafting)
        paths = trees.grow(chosen_on, most_nodes - 1) if choose == "largest" else trees.choose(chosen_on, price, most_nodes)
        by_nodes = _by_nodes(reported_on, trees.best_by_nodes(chosen_on, price, most_nodes), price)
        drafter.tree_spec = StaticTree.from_paths(paths)
    settings = {"max_new_tokens": max_new_tokens, "prompts": len(reporting), "dtype": str(target.dtype).removeprefix("torch.")}
    settings |= {"threads": torch.get_num_threads(), "rows": rows, "rule": rule, "governed": governed, "ranks": ranks.count()}
    settings |= {"confidence": drafter.confidence} if isinstance(drafter, DraftModel) else {}
    report = Report(
        target.identity.to_dict(), drafter.method, settings, tree_config(drafter.tree_spec), drafter.max_nodes, seconds, drafting, by_nodes
    )
    rounds: list[RoundRecord] = []
    for temperature in temperatures:
        sampling = Sampling(temperature=temperature, rule=rule)
        outcomes, seconds_by = _decode(target, drafter, reporting, max_new_tokens, sampling, rows, governed, kernels)
        found = [record for outcome in outcomes for record in outcome.rounds]
        rounds += found
        report.answers += sum(outcome.checked for outcome in outcomes)
        report.divergences += [outcome.parted for outcome in outcomes if outcome.parted]
        report.compared += sum(outcome.alike is not None for outcome in outcomes)
        report.like_transformers += sum(bool(outcome.alike) for outcome in outcomes)
        report.overall[f"{temperature:g}"] = acceptance(found, drafter.max_depth)
        report.lossy |= {} if sampling.lossless else {f"{temperature:g}": rule}
        if temperature == temperatures[0]:
            report.distinct = distinct_ngrams([outcome.tokens for outcome in outcomes])
            for domain in dict.fromkeys(case.prompt.domain for case in reporting):
                report.domains[domain] = acceptance([record for record in found if record.domain == domain], drafter.max_depth)
            report.speed = _speed(seconds_by, found, report.overall[f"{temperature:g}"].tau)
    return report, rounds, records


@contextmanager
def _whole_trees(drafter: Any) -> Iterator[None]:
    """Within it a draft model drafts all of its tree, however unsure: position records know no stops, so neither may the price."""
    if not isinstance(drafter, DraftModel):
        yield
        return
    before, drafter.confidence = drafter.confidence, 0.0
    try:
        yield
    finally:
        drafter.confidence = before


def positions(target: Target, drafter: Any, cases: list[Case], max_new_tokens: int) -> list[PositionRecord]:
    """Run the drafter along the target's own greedy answers, from every position at once. Prompts are split over the ranks."""
    mine = ranks.share(cases)
    answers = [Completion() for _ in mine]
    with Bar("the target's own answers", len(mine)) as bar:
        for steps in Decoder(target, slots=8).stream([case.ids for case in mine], Sampling(), max_new_tokens):
            for step in steps:
                answers[step.prompt_index].tokens += step.tokens
                answers[step.prompt_index].reason = step.reason
            bar.update(sum(bool(answer.reason) for answer in answers))
    found = {}
    for case, answer in zip(mine, answers, strict=True):
        ids = torch.tensor(case.ids + answer.tokens, device=target.device)
        with torch.inference_mode():
            features = drafter.position_features(ids, target.forward(ids[None], taps=drafter.taps))
            # A round whose root is at i drafts token i + d at depth d.
            roots = range(max(1, len(case.ids) - 1), len(ids) - 1)
            depth = drafter.depth_limit
            places = torch.full((len(roots), depth), -1)
            logs = torch.full((len(roots), depth), -torch.inf)
            for start in range(0, len(roots), 64):
                at = torch.arange(roots[start], min(roots[start] + 64, roots.stop), device=target.device)
                logits = drafter.position_logits(features, at)  # [64,K,V]
                for k in range(depth):
                    inside = at + k + 1 < len(ids)
                    here = (at[inside] - roots.start).cpu()
                    rank, log = rank_of(logits[inside, k], ids[at[inside] + k + 1], RANKS_KEPT)
                    places[here, k], logs[here, k] = rank.cpu(), log.cpu()
        found[case.key] = PositionRecord(case.prompt.id, case.prompt.domain, places, logs)
    gathered = ranks.gather(found)
    return [gathered[case.key] for case in cases]


def _by_nodes(records: list[PositionRecord], best: dict[int, list[trees.Path]], price: trees.Price) -> list[dict[str, float]]:
    rows = []
    for size, paths in best.items():
        tau, cost_of = trees.tau(records, paths), price(len(paths) + 1, max(map(len, paths)))
        rows.append({"nodes": size, "depth": max(map(len, paths)), "tau": tau, "price": cost_of, "tau_over_price": tau / cost_of})
    return rows


def _halves(cases: list[Case]) -> tuple[list[Case], list[Case]]:
    """Every other prompt of each domain to choose the tree on, the rest to report; a domain's only prompt is reported."""
    domains = {domain: [case for case in cases if case.prompt.domain == domain] for domain in dict.fromkeys(c.prompt.domain for c in cases)}
    choosing = [case for found in domains.values() if len(found) > 1 for case in found[0::2]]
    reporting = [case for found in domains.values() for case in (found[1::2] if len(found) > 1 else found)]
    if not choosing:
        raise ValueError("one prompt of a domain is too few: half of them choose the tree, the others are reported; give more, or --tree")
    return choosing, reporting


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one prompt: checked says whether the rule promises plain decoding's tokens, alike whether transformers gave them."""

    rounds: list[RoundRecord]
    tokens: list[int]
    checked: bool
    parted: Divergence | None
    alike: bool | None


def _decode(
    target: Target, drafter: Any, cases: list[Case], max_new_tokens: int, sampling: Sampling, rows: int, governed: bool, kernels: bool
) -> tuple[list[Outcome], dict[str, float]]:
    """Each prompt (or with several rows each few) plainly, drafted and (greedy, alone) by transformers, in turning order.

    Every rank takes its share of the prompts; the times, with c and the tokens that they were for, are this rank's."""
    mine = ranks.share(cases)
    context = max(len(case.ids) for case in cases) + max_new_tokens
    common: dict[str, Any] = {"slots": rows, "context": context, "timed": True, "kernels": kernels}
    decoders = {
        "plain": Decoder(target, **common),
        "drafted": Decoder(target, drafter, governor=AdaptiveDepth() if governed else None, **common),
    }
    runners = {name: interleaved.ours(decoder, sampling, max_new_tokens) for name, decoder in decoders.items()}
    if sampling.greedy and rows == 1:
        runners["transformers"] = interleaved.transformers(target, max_new_tokens)
    size = 1 if rows == 1 else PER_ROW * rows
    seconds = dict.fromkeys(runners, 0.0)
    verifying: dict[str, list[float]] = {name: [] for name in decoders}
    found: dict[int, Outcome] = {}
    with Bar(f"decoding at T={sampling.temperature:g}", len(mine)) as bar:
        for some, turns in interleaved.take_turns(runners, [mine[start : start + size] for start in range(0, len(mine), size)]):
            for name, turn in turns.items():
                seconds[name] += turn.seconds
            for name in decoders:
                verifying[name] += [round.verify_s for answer in turns[name].answers for round in answer.rounds]
            for place, case in enumerate(some):
                found[case.key] = _outcome(target, case, {name: turn.answers[place] for name, turn in turns.items()}, sampling)
            records = [record for outcome in found.values() for record in outcome.rounds]
            bar.update(len(found), f"tau {sum(r.committed for r in records) / len(records):.2f}")
    if rows == 1:  # in a batch, rounds of different numbers of rows would be compared
        # Rounds differ in size (a look-up finds something or not), so that only means say what they cost.
        seconds["c"] = statistics.fmean(verifying["drafted"]) / statistics.fmean(verifying["plain"])
    seconds["tokens"] = sum(len(outcome.tokens) for outcome in found.values())
    gathered = ranks.gather(found)
    return [gathered[case.key] for case in cases], seconds


def _outcome(target: Target, case: Case, answers: dict[str, Completion], sampling: Sampling) -> Outcome:
    plain, drafted = answers["plain"].tokens, answers["drafted"]
    # Only rules that draw y with the keyed noise promise plain decoding's very tokens; rejection is lossless in law.
    checked = sampling.greedy or sampling.rule in KEYED
    parted = compare(target, case.prompt.id, case.ids, plain, drafted.tokens, sampling, case.key) if checked else None
    alike = answers["transformers"].tokens == plain if "transformers" in answers else None
    return Outcome(_records(case, drafted, sampling), drafted.tokens, checked, parted, alike)


def _records(case: Case, completion: Completion, sampling: Sampling) -> list[RoundRecord]:
    return [
        RoundRecord(
            case.prompt.id,
            case.prompt.domain,
            sampling.temperature,
            sampling.rule,
            round.position,
            round.size,
            round.length,
            round.length - 1,
            round.draft_s,
            round.verify_s,
            round.other_s,
        )
        for round in completion.rounds
    ]


def _speed(seconds: dict[str, float], records: list[RoundRecord], tau: float) -> dict[str, float]:
    """Speedups are of total times over the same prompts; c is the verifying time of a round over a plain one's, drafting likewise; means."""
    speed = {
        "tau": tau,
        "nodes": sum(record.nodes for record in records) / len(records),
        "speedup": seconds["plain"] / seconds["drafted"],
        "plain_tokens_per_s": seconds["tokens"] / seconds["plain"],
        "drafted_tokens_per_s": seconds["tokens"] / seconds["drafted"],
    }
    if "c" in seconds:
        speed["c"] = seconds["c"]
        speed["drafting"] = sum(record.draft_s for record in records) / sum(record.verify_s for record in records) * seconds["c"]
        speed["tau_over_c"] = tau / seconds["c"]
        speed["share_of_limit"] = speed["speedup"] / speed["tau_over_c"]
    if "transformers" in seconds:
        speed["speedup_over_transformers"] = seconds["transformers"] / seconds["drafted"]
        speed["plain_over_transformers"] = seconds["transformers"] / seconds["plain"]
    return speed
>>>>>>> heads


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("eval", __doc__)
    parser.add_argument("folder", nargs="?", metavar="drafter", help="the same as --drafter")
    parser.add_argument("--drafter", help=options.DRAFTER_HELP)
    options.add_models(parser)
    options.add_prompts(parser)
    options.add_temperatures(parser)
    options.add_rule(parser, list(RULES), "target-sample, which is nearest to what serving engines do")
    options.add_tree(parser, [*CHOSEN_TREES, "saved", "chain", "dynamic"], "best, or saved where the drafter ranks no tokens")
    options.add_confidence(parser)
    options.add_slots(parser)
    options.add_adaptive_depth(parser, False)
    options.add_kernels(parser)
    options.add_json(parser)
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    temperatures = options.temperatures(chosen.temperature)
    options.check_numbers(chosen, min_new_tokens=2)
    if chosen.rule == "membership":
        raise ValueError(
            "--rule membership: expected a rule that needs no filters; draftsmith generate takes --top-k, --top-p and --min-p with it"
        )
    name = _drafter_name(chosen)

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval import loading, ranks
    from draftsmith.eval.evaluation import Settings, evaluate_drafter

    prompts = prompt_files.load(chosen.prompts, chosen.limit)
    target, (drafter,) = loading.open_models(chosen.target, [name], chosen.dtype, chosen.trust_remote_code)
    loading.set_confidence(drafter, chosen.confidence)
    ranked = hasattr(drafter, "position_logits")
<<<<<<< HEAD
    tree = chosen.tree or ("best" if ranked else "saved")
    if tree in CHOSEN_TREES:
        if not ranked:
            raise ValueError(
                f"--tree {tree}: {drafter.method} ranks no tokens, so no tree can be chosen for it; expected saved, chain or dynamic"
            )
        if chosen.depth or chosen.width:
            raise ValueError(f"--tree {tree} takes --nodes only, got --depth or --width; leave it out, or take --tree dynamic")
    else:
        drafter.tree_spec = loading.tree_spec_from_options(tree, drafter, chosen.depth, chosen.width, chosen.nodes)
    settings = Settings(
        max_new_tokens=chosen.max_new_tokens,
=======
    tree = options.tree or ("best" if ranked else "saved")
    if tree in ("best", "largest") and not ranked:
        raise ValueError(
            f"--tree {tree}: {drafter.method} ranks no tokens, so no tree can be chosen for it; expected saved, chain or dynamic"
        )
    if tree not in ("best", "largest"):
        drafter.tree_spec = loading.tree_spec_from_options(tree, drafter, options.depth, options.width, options.nodes)
    elif options.depth or options.width:
        raise ValueError(f"--tree {tree} takes --nodes only, got --depth or --width; leave it out, or take --tree dynamic")
    loading.check_rule(options.rule, drafter)
    report, rounds, records = evaluate(
        target,
        drafter,
        prompts,
        max_new_tokens=options.max_new_tokens,
>>>>>>> heads
        temperatures=temperatures,
        max_nodes=chosen.nodes or 64,
        choose=tree if tree in CHOSEN_TREES else "",
        rule=chosen.rule or "target-sample",
        slots=chosen.slots,
        adaptive_depth=chosen.adaptive_depth,
        kernels=chosen.kernels,
    )
    loading.check_rule(settings.rule, drafter)
    report, rounds, records = evaluate_drafter(target, drafter, prompts, settings)
    if ranks.state().is_main_process:
        from draftsmith.eval import card, table
        from draftsmith.eval.records import as_json
        from draftsmith.models.drafter import DrafterModel

        if chosen.json:
            print(as_json(report), flush=True)
        else:
            table.print_report(report)
        # The card is for what the artifact does by itself, losslessly.
        as_deployed = tree == "best" and chosen.slots == 1 and chosen.confidence is None and not chosen.adaptive_depth and not report.lossy
        ours = Path(name).is_dir() and (isinstance(drafter, DrafterModel) or loading.distilled(name) is not None)
        if as_deployed and ours:
            card.write_measurements(Path(name), report, rounds, records)
            if not chosen.json:
                files = "README.md (model card), config.json (the tree), acceptance.json, rounds.jsonl, positions.jsonl, survival.png"
                print(f"\nWritten to {name}: {files}")
                print(f'Try it:  {loading.command()} generate --drafter {name} --show-accepted "def parse_"')
    ranks.leave()
    if any(divergence.verdict == "bug" for divergence in report.divergences):
        raise SystemExit(1)


def _drafter_name(chosen: argparse.Namespace) -> str:
    """The one drafter that the arguments name."""
    if chosen.drafter and chosen.folder:
        raise ValueError(
            f"got two drafters, {chosen.folder!r} and --drafter {chosen.drafter!r}; expected one; leave one out, or take draftsmith compare"
        )
    name = chosen.drafter or chosen.folder
    if not name:
        raise ValueError(
            "got no drafter; expected one: the folder of a trained drafter, as in `draftsmith eval runs/medusa-tiny/artifact`, or one that "
            "needs no training, as in `draftsmith eval suffix`"
        )
    return name


if __name__ == "__main__":  # accelerate launch -m draftsmith.eval.acceptance
    from draftsmith.inference.errors import exit_on_error

    exit_on_error(main, sys.argv[1:])
