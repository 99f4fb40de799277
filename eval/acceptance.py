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

CHOSEN_TREES = ("best", "largest")


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
    options.add_exact(parser)
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
        temperatures=temperatures,
        max_nodes=chosen.nodes or chosen.exact or 64,
        choose=tree if tree in CHOSEN_TREES else "",
        rule=chosen.rule or "target-sample",
        slots=chosen.slots,
        adaptive_depth=chosen.adaptive_depth,
        kernels=chosen.kernels,
        exact=chosen.exact,
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
        as_deployed = (
            tree == "best"
            and chosen.slots == 1
            and not chosen.exact
            and chosen.confidence is None
            and not chosen.adaptive_depth
            and not report.lossy
        )
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
