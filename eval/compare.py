"""Compare drafters: the same target, prompts and texts for all, and differences of τ paired by prompt.

    draftsmith compare tiny-draft runs/student/artifact                          # decoded with their own trees, at T = 0 and 1
    draftsmith compare runs/medusa-tiny/artifact runs/eagle3-tiny/artifact suffix --tree chain --depth 3
    draftsmith compare tiny-draft runs/student/artifact --expected               # draft models as chains, without decoding a draft
    draftsmith compare --measured measured/suffix runs/mine/artifact             # folders that eval wrote into; nothing is decoded

Differences are to the first drafter, by domain and over all prompts, with a sign-flip test. --measured takes the prompts that all folders have. --expected takes
the target's own texts and computes the τ that a chain has on them: exactly for greedy decoding, as an expectation under rejection sampling
at T > 0 (draftsmith/eval/expected.py). Random draws then add no noise, and a text costs one forward of each model.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from draftsmith.eval import options
from draftsmith.eval.provenance import WEIGHTLESS, budget
from draftsmith.inference.rule_names import RULES


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("compare", __doc__)
    parser.add_argument("drafters", nargs="+", metavar="drafter", help=f"{options.DRAFTER_HELP}; two at least")
    options.add_models(parser)
    options.add_prompts(parser)
    options.add_samplings(parser)
    options.add_rule(parser, [name for name, rule in RULES.items() if rule.lossless], "target-sample; rejection with --expected")
    parser.add_argument("--expected", action="store_true", help="compute the τ of chains of draft models instead of decoding")
    parser.add_argument("--measured", action="store_true", help="compare what eval wrote into these folders, without decoding")
    options.add_tree(parser, ["saved", "chain", "dynamic"], "saved; chain with --expected")
    options.add_stop(parser)
    options.add_draft_window(parser)
    options.add_slots(parser)
    options.add_json(parser)
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    options.check_numbers(chosen)
    samplings = options.samplings(chosen.temperature, chosen.sampling)
    _check(chosen)

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval import loading, measured
    from draftsmith.eval.answers import encode_prompts
    from draftsmith.eval.comparison import Settings, compare_drafters
    from draftsmith.inference.draft_model import DraftModel
    from draftsmith.inference.sampler import Sampling
    from draftsmith.models import ranks
    from draftsmith.models.pard import ParallelDraftModel

    if ranks.count() > 1:
        raise ValueError(f"draftsmith compare in {ranks.count()} processes: expected one; run it alone")
    if chosen.measured:
        _print(measured.compare(chosen.drafters), chosen.json)
        return
    rule = chosen.rule or ("rejection" if chosen.expected else "target-sample")
    given = prompt_files.load(chosen.prompts, chosen.limit, distinct=True)
    target, drafters = loading.open_named(chosen.target, chosen.drafters, chosen.dtype, chosen.trust_remote_code)
    prompts = given or loading.shipped_prompts(target, chosen.limit)
    for name, drafter in drafters.items():
        if chosen.expected and (not isinstance(drafter, DraftModel) or isinstance(drafter, ParallelDraftModel)):
            raise ValueError(
                f"--expected: {name} is no draft model that drafts token by token; expected one; leave --expected out to decode with it"
            )
        loading.set_stop(drafter, chosen.stop)
        loading.set_draft_window(drafter, chosen.draft_window)
        tree = chosen.tree or ("chain" if chosen.expected else "saved")
        drafter.tree_spec = loading.tree_spec_from_options(tree, drafter, chosen.depth, chosen.width, chosen.nodes)
        loading.check_rule(rule, drafter)
    encoded, skipped = encode_prompts(target, prompts, chosen.max_new_tokens)
    longest = max((len(prompt.ids) for prompt in encoded), default=0) + chosen.max_new_tokens
    for drafter in drafters.values():
        if isinstance(drafter, DraftModel) and not chosen.expected:  # --expected checks the texts themselves
            drafter.check(longest)
    settings = Settings(chosen.max_new_tokens, [Sampling(rule=rule, **each) for each in samplings], chosen.slots, chosen.expected)
    report = compare_drafters(target, drafters, encoded, skipped, settings)
    report["budgets"] = {name: budget(_artifact(word)) for name, word in zip(drafters, chosen.drafters, strict=True)}
    _print(report, chosen.json)


def _artifact(word: str) -> Path | str | None:
    """Where a drafter's budget is known: its folder, or the name of one without weights."""
    folder = Path(os.path.expanduser(word))
    return word if word in WEIGHTLESS else folder if folder.is_dir() else None


def _print(report: dict[str, Any], as_json: bool) -> None:
    from draftsmith.eval import output
    from draftsmith.eval.comparison import print_comparison
    from draftsmith.eval.report import to_json

    output.deliver(lambda: print(to_json(report)) if as_json else print_comparison(report))


def _check(chosen: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other."""
    if len(chosen.drafters) < 2:
        raise ValueError(f"got one drafter, {chosen.drafters[0]!r}; expected two at least; draftsmith eval measures one")
    defaults = parser().parse_args(chosen.drafters)
    for name, value in vars(chosen).items():
        if chosen.measured and name not in ("measured", "drafters", "json") and value != getattr(defaults, name):
            option = name.replace("_", "-")
            raise ValueError(f"--measured takes the rounds as eval wrote them, got --{option}; leave it out, or leave --measured out")
    if chosen.expected and (chosen.rule or "rejection") != "rejection":
        raise ValueError(f"--expected with --rule {chosen.rule}: what can be computed is rule rejection; leave --rule out")
    if chosen.expected and ((chosen.tree or "chain") != "chain" or chosen.stop is not None):
        raise ValueError("--expected is of complete chains, got another --tree or a --stop; leave it out, or leave --expected out")
    if chosen.expected and (chosen.draft_window is not None or chosen.slots != defaults.slots):
        raise ValueError(
            "--expected reads complete texts in one forward, got --draft-window or --slots; leave it out, or leave --expected out"
        )
    penalised = any("repetition_penalty" in sampling for sampling in chosen.sampling or ())
    if chosen.expected and penalised:
        raise ValueError("--expected computes without a repetition penalty, got one in --sampling; leave it out, or leave --expected out")
