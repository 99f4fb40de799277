"""Measure a drafter's acceptance before it is deployed.

    draftsmith eval runs/medusa-tiny/artifact
    draftsmith eval --drafter tiny-draft --target tiny        # or any causal LM
    draftsmith eval --drafter suffix --prompts my-prompts.jsonl --json > report.json
    draftsmith eval runs/mine/artifact --prompts chat --timed 3       # τ of all prompts by task, times of 3 of each
    draftsmith eval runs/mine/artifact --sampling temperature=0.7,top_p=0.9 --out measured    # as in production
    draftsmith eval --from measured                                   # the same report again, from its records

An artifact gets its best tree, the measurements and a table in its model card. Files that no evaluation wrote are left as they are. What
is measured is recorded at once: a command that was stopped goes on when it is given again.

Half of the prompts choose the draft tree; the report is on the other half. A later turn is asked after the target's own answer to the turn
before it. Prompts that do not fit the target's context are skipped and counted. Every answer is compared with that of plain decoding, where the
verification rule promises the same tokens.
"""

import argparse
import os
import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.eval import options
from draftsmith.eval.roofline import KNOWN, hardware
from draftsmith.inference import durable
from draftsmith.inference.rule_names import RULES, USUAL_RULE
from draftsmith.inference.terminal import printable

if TYPE_CHECKING:  # --help imports no model library
    from draftsmith.eval.records import Records
    from draftsmith.eval.report import Report
    from draftsmith.eval.settings import Settings
    from draftsmith.inference.policy import LoadPolicy

CHOSEN_TREES = ("best", "largest")
PROBE_S = 30.0


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("eval", __doc__)
    parser.add_argument("folder", nargs="?", metavar="drafter", help="the same as --drafter")
    parser.add_argument("--drafter", help=options.DRAFTER_HELP)
    options.add_models(parser)
    options.add_prompts(parser)
    options.add_samplings(parser)
    options.add_constraint(parser)
    options.add_rule(parser, list(RULES), f"{USUAL_RULE}, which is nearest to what serving engines do", several=True)
    options.add_tree(parser, [*CHOSEN_TREES, "saved", "chain", "dynamic"], "best, or saved where the drafter ranks no tokens")
    options.add_stop(parser)
    options.add_draft_window(parser)
    options.add_slots(parser)
    parser.add_argument("--timed", type=int, help="time so many prompts of each domain, decode the others 8 at a time (default: time all)")
    options.add_adaptive_depth(parser, False)
    options.add_load_aware(parser)
    parser.add_argument("--policy", metavar="FILE", help="draft as deep as this policy.json of an evaluation says for the slots in use")
    options.add_kernels(parser)
    options.add_exact(parser)
    parser.add_argument(
        "--probe",
        type=float,
        default=PROBE_S,
        metavar="SECONDS",
        help=f"time rounds at several batches and contexts for about so long (default {PROBE_S:g}; 0: not)",
    )
    options.add_json(parser)
    parser.add_argument("--out", help="folder for the measurements, instead of the artifact; any drafter and any tree")
    parser.add_argument(
        "--beside",
        action="append",
        metavar="FOLDER",
        help="show what is recorded there, of an earlier artifact, beside this one; repeatable",
    )
    parser.add_argument(
        "--estimate",
        action="append",
        metavar="DEVICE",
        help="estimate the speedup on a device that is not at hand, from its data sheet and the measured τ (roofline): "
        f"{', '.join(KNOWN)}, or NAME=FLOPS,BYTES (per second); repeatable",
    )
    parser.add_argument("--from", dest="source", metavar="FOLDER", help="report what is recorded in this folder; nothing is decoded")
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    samplings = options.samplings(chosen.temperature, chosen.sampling)
    options.check_numbers(chosen, min_new_tokens=2)
    if chosen.source is not None:
        _report_again(chosen, arguments)
        return
    # The usual rule first: the target's text, which the tree is chosen by, is recorded under it.
    rules = sorted(dict.fromkeys(chosen.rule or [USUAL_RULE]), key=lambda rule: rule != USUAL_RULE)
    if "membership" in rules and not chosen.sampling:
        raise ValueError("--rule membership needs a filter; give one, such as --sampling temperature=0.7,top_p=0.9")
    name = _drafter_name(chosen)

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval import load_report, loading, measurements, record_store
    from draftsmith.eval.evaluation import evaluate_drafter
    from draftsmith.eval.report import report_of
    from draftsmith.eval.settings import Settings
    from draftsmith.inference.kernels import missing
    from draftsmith.inference.sampler import Sampling
    from draftsmith.models import ranks

    out = Path(os.path.expanduser(chosen.out)) if chosen.out is not None else None
    main_process = ranks.state().is_main_process
    if out and main_process:
        measurements.check_folder(out)
    beside = _read_beside(chosen.beside or [])
    devices = [hardware(name) for name in chosen.estimate or ()]
    if devices and not chosen.probe:
        raise ValueError("--estimate needs what the probe records; expected it; leave --probe 0 out")
    if chosen.policy is not None and chosen.adaptive_depth:
        raise ValueError("--policy and --adaptive-depth both choose the depth; expected one; leave one out")
    if chosen.load_aware and (chosen.policy is not None or chosen.adaptive_depth):
        raise ValueError(
            "--load-aware drafts complete trees, --policy and --adaptive-depth choose a depth; expected one; leave the others out"
        )
    if chosen.exact and (chosen.slots > 1 or chosen.kernels):
        raise ValueError("--exact is for one slot and without kernels; got --slots or --kernels; leave them out")
    if chosen.load_aware and chosen.kernels:
        raise ValueError("--load-aware verifies trees of several sizes, --kernels of one; expected one; leave one out")
    policy = _policy(chosen.policy) if chosen.policy is not None else None
    given = prompt_files.load(chosen.prompts, chosen.limit, distinct=True)
    dtype = loading.chosen_dtype(chosen.dtype, lambda: record_store.begun_dtype(out or Path(os.path.expanduser(name))))
    target, (drafter,) = loading.open_models(chosen.target, [name], dtype, chosen.trust_remote_code)
    prompts = given or loading.shipped_prompts(target, chosen.limit)
    if chosen.kernels and (reason := missing(target.device)):
        raise ValueError(f"--kernels: {reason}; leave it out")
    if devices:
        load_report.check_estimable(drafter)
    loading.set_stop(drafter, chosen.stop)
    loading.set_draft_window(drafter, chosen.draft_window)
    if chosen.load_aware:
        loading.check_load_aware(drafter)
    ranked = hasattr(drafter, "position_logits")
    tree = chosen.tree or ("best" if ranked and chosen.draft_window is None else "saved")
    if tree in CHOSEN_TREES:
        if chosen.draft_window is not None:
            raise ValueError(
                f"--tree {tree} is chosen by what the drafter says with all positions in sight; leave --draft-window out, or --tree"
            )
        if not ranked:
            raise ValueError(
                f"--tree {tree}: {drafter.method} ranks no tokens, so no tree can be chosen for it; expected saved, chain or dynamic"
            )
        if chosen.depth or chosen.width:
            raise ValueError(f"--tree {tree} takes --nodes only, got --depth or --width; leave it out, or take --tree dynamic")
    else:
        drafter.tree_spec = loading.tree_spec_from_options(tree, drafter, chosen.depth, chosen.width, chosen.nodes)
    constraint = loading.constraint_of(chosen, target)
    settings = Settings(
        max_new_tokens=chosen.max_new_tokens,
        samplings=[
            Sampling(rule=rule, constraint=constraint, **fields)
            for fields in samplings
            for rule in rules[: None if fields.get("temperature") else 1]
        ],
        max_nodes=chosen.nodes or chosen.exact or 64,
        choose=tree if tree in CHOSEN_TREES else "",
        slots=chosen.slots,
        timed=chosen.timed,
        adaptive_depth=chosen.adaptive_depth,
        load_aware=chosen.load_aware,
        policy=policy,
        kernels=chosen.kernels,
        probe_s=chosen.probe,
        exact=chosen.exact,
    )
    for rule in dict.fromkeys(sampling.rule for sampling in settings.samplings if not sampling.greedy):
        loading.check_rule(rule, drafter)
    named = loading.provenance(name)
    if policy is not None:
        _check_policy(policy, {"method": drafter.method, **named}, chosen.slots)
    folder = out or (_artifact(name, drafter) if _as_deployed(chosen, settings) else None)
    original = partial(loading.without_adapters, target, chosen.trust_remote_code)
    records = evaluate_drafter(target, drafter, prompts, settings, record_store.RecordStore(folder), named, original)
    compared, refusal = {}, None
    try:
        compared = _checked_beside(name, records, beside)
    except ValueError as error:  # only the comparison is lost
        refusal = error
    report = report_of(records, compared, devices)
    if main_process:
        _deliver(records, report, folder, not out, chosen.json)
    ranks.leave()
    if refusal:
        raise refusal
    if any(divergence.verdict == "bug" for divergence in report.divergences):
        raise SystemExit(1)


def _report_again(chosen: argparse.Namespace, arguments: list[str]) -> None:
    """--from: the report of records, whose files are written again beside them, or into --out."""
    others = [
        word
        for word in arguments
        if word.startswith("-") and word.partition("=")[0] not in ("--from", "--out", "--json", "--beside", "--estimate")
    ]
    if others or chosen.folder:
        raise ValueError(f"--from takes --json, --out, --beside and --estimate only, got {' '.join(others) or chosen.folder}; leave it out")

    from draftsmith.eval import measurements, record_store
    from draftsmith.eval.report import report_of

    source = Path(os.path.expanduser(chosen.source))
    records = record_store.read(source)
    devices = [hardware(name) for name in chosen.estimate or ()]
    report = report_of(records, _checked_beside(chosen.source, records, _read_beside(chosen.beside or [])), devices)
    folder = Path(os.path.expanduser(chosen.out)) if chosen.out is not None else source
    measurements.check_folder(folder)
    if folder.resolve() != source.resolve():
        durable.replace(folder / record_store.RECORDS, lambda part: shutil.copyfile(source / record_store.RECORDS, part))
    _deliver(records, report, folder, False, chosen.json)


def _policy(file: str) -> "LoadPolicy":
    """The policy of --policy. Raises ValueError where there is none."""
    from draftsmith.inference.policy import LoadPolicy

    path = Path(os.path.expanduser(file))
    if not path.is_file():
        raise ValueError(f"--policy {file}: there is no such file; give the policy.json of an evaluation")
    return LoadPolicy.read(path)


def _check_policy(policy: "LoadPolicy", drafter: dict[str, str], slots: int) -> None:
    """Check that the policy is this drafter's, given as method, name and hash; warn where the slots are more than the policy covers.

    Raises:
        ValueError: the policy of another drafter.
    """
    differing = [
        name for name in ("method", "hash") if policy.drafter.get(name) and drafter[name] and policy.drafter[name] != drafter[name]
    ]
    if differing:
        whose = f"{policy.drafter.get('name', '?')!r} ({policy.drafter.get('method', '?')})"
        raise ValueError(
            f"--policy is for the drafter {whose}, got {drafter['name']!r} ({drafter['method']}): another {differing[0]}; "
            "give the policy that an evaluation of this drafter wrote"
        )
    largest = policy.entries[-1].largest if policy.entries else 0
    if slots > largest:
        print(f"--policy covers batches up to {largest}: with more of the {slots} slots in use nothing is drafted", file=sys.stderr)


def _read_beside(folders: list[str]) -> "dict[str, tuple[str, Records]]":
    """The folders of --beside and their records, by name."""
    from draftsmith.eval import measured

    distinct = list(dict.fromkeys(folders))
    names = measured.names_of(distinct)
    return {name: (folder, measured.read(folder, "--beside")) for name, folder in zip(names, distinct, strict=True)}


def _checked_beside(name: str, records: "Records", beside: "dict[str, tuple[str, Records]]") -> "dict[str, Records]":
    """The records of --beside, checked that they may be compared with those of the drafter of this name."""
    from draftsmith.eval.measured import check_comparable

    own = {(request.setting, request.prompt) for request in records.requests}
    for folder, others in beside.values():
        check_comparable("--beside", (name, records), (folder, others))
        if own.isdisjoint((request.setting, request.prompt) for request in others.requests):
            raise ValueError(
                f"--beside {folder}: no prompt and setting is in both; expected the same prompts; run draftsmith eval on one file"
            )
    return {name: records for name, (_, records) in beside.items()}


def _deliver(records: "Records", report: "Report", folder: Path | None, artifact: bool, as_json: bool) -> None:
    """Write the files of a report into the folder, and print it. artifact: the folder is one, whose card and tree are written too.

    Raises:
        ValueError: a file that cannot be written; the report is printed before.
    """
    from draftsmith.eval import measurements, output, page, table

    content = page.page_content(records, report)
    failures = measurements.write(folder, report, content, artifact) if folder else []
    output.deliver(lambda: print(page.content_json(content), end="") if as_json else table.print_report(report))
    if folder and not failures and not as_json:
        output.deliver(lambda: _say_written(folder, artifact, bool(report.load.get("policy"))))
    if failures:
        raise ValueError(f"not written into {folder}: {', '.join(failures)}; the other files are there, and the report is printed")


def _as_deployed(chosen: argparse.Namespace, settings: "Settings") -> bool:
    """Whether the measurements are of what the artifact does by itself, losslessly: only these belong into it."""
    lossless = all(sampling.lossless and not sampling.constraint for sampling in settings.samplings)
    return (
        settings.choose == "best"
        and settings.slots == 1
        and not settings.exact
        and chosen.stop is None
        and chosen.draft_window is None
        and not settings.adaptive_depth
        and not settings.load_aware
        and settings.policy is None
        and lossless
    )


def _artifact(name: str, drafter: Any) -> Path | None:
    """The folder of an artifact of Draftsmith, into which the measurements go; None for other drafters, or where that is said not to be."""
    from draftsmith.eval import card, loading, measurements
    from draftsmith.models import ranks
    from draftsmith.models.drafter import DrafterModel
    from draftsmith.models.target import SHIPPED

    folder = Path(os.path.expanduser(name))
    if name in SHIPPED or not folder.is_dir() or not (isinstance(drafter, DrafterModel) or loading.student_entry(name) is not None):
        return None
    reason = measurements.obstacle(folder, ("config.json", "README.md", *measurements.CHECKED))
    if reason:
        note = f"nothing is written into {folder}: {reason}; --out FOLDER keeps the measurements"
    elif not card.is_marked(folder):
        note = f"README.md in {folder} is left as it is: the lines {card.BEGIN} and {card.END} are not in it"
    else:
        return folder
    if ranks.state().is_main_process:
        with suppress(OSError):
            print(printable(note, keep=""), file=sys.stderr)
    return None if reason else folder


def _say_written(folder: Path, artifact: bool, policy: bool) -> None:
    from draftsmith.eval import loading, measurements

    names = ", ".join((*measurements.NAMES, *([measurements.POLICY] if policy else [])))
    if artifact:
        names = f"README.md (model card), config.json (the tree), {names}"
    print(f"\nWritten to {printable(str(folder), keep='')}: {names}")
    if artifact:
        print(f'Try it:  {loading.command()} generate --drafter {printable(str(folder), keep="")} --show-accepted "def parse_"')


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
