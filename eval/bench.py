"""Measure speed from prompt to answer against transformers: the same models and prompts, in one process, interleaved, one prompt at a time.

    draftsmith bench                                                  # what ships here: target, draft model, drafters without weights
    draftsmith bench --drafter runs/target-tiny-draft/artifact --drafter ngram
    draftsmith bench --target Qwen/Qwen3-8B --drafter Qwen/Qwen3-0.6B --prompts my-prompts.jsonl --out speed.json
    draftsmith bench --sampling temperature=0.7,top_p=0.9             # as in production; greedy without it
    draftsmith bench --kernels                                        # on a GPU: the Triton kernels, and rounds with them

Every contender answers a prompt before the next prompt comes, and each prompt starts with the next contender.
"""

import argparse
import os
from pathlib import Path

from draftsmith.eval import options
from draftsmith.inference.reading import read_json

REPORTS = {"contenders", "limits"}  # keys of what bench writes, without and with --kernels
DRAFTERS = ("ngram", "suffix")  # by default; for the target that ships here its draft model too


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("bench", __doc__)
    default = f"{', '.join(DRAFTERS)}, and tiny-draft for tiny"
    parser.add_argument("--drafter", action="append", help=f"{options.DRAFTER_HELP}; may be given more than once (default: {default})")
    options.add_models(parser)
    options.add_prompts(parser, limit=3)
    parser.add_argument("--repeats", type=int, default=3, help="passes over the prompts (default 3)")
    options.add_sampling(parser)
    options.add_tree(parser, ["saved", "chain", "dynamic"])
    options.add_adaptive_depth(parser, True)
    parser.add_argument("--kernels", action="store_true", help="measure the Triton kernels and rounds with them instead, on a GPU")
    options.add_json(parser)
    parser.add_argument("--out", help="write the JSON to this file too; an earlier one of bench may be there")
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    options.check_numbers(chosen)
    defaults = parser().parse_args([])
    for name, value in vars(chosen).items():
        if chosen.kernels and name not in ("kernels", "out", "json") and value != getattr(defaults, name):
            raise ValueError(
                f"--kernels measures kernels and rounds of sizes of its own, got --{name.replace('_', '-')}; leave one of them out"
            )
    fields = options.samplings(None, [chosen.sampling] if chosen.sampling else None)[0]
    from draftsmith.eval import output

    out = output.checked_file("--out", Path(os.path.expanduser(chosen.out)), _own, "bench") if chosen.out is not None else None

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval import loading
    from draftsmith.eval.answers import encode_prompts
    from draftsmith.eval.benchmarks import rounds
    from draftsmith.eval.benchmarks import transformers as benchmark
    from draftsmith.eval.report import to_json
    from draftsmith.inference import durable
    from draftsmith.inference.sampler import Sampling
    from draftsmith.models import ranks

    sampling = Sampling(**fields)
    if ranks.count() > 1:
        raise ValueError(
            f"draftsmith bench in {ranks.count()} processes: they would disturb each other's clocks; expected one; run it alone"
        )
    if chosen.kernels:
        rounds.main(out, chosen.json)
        return
    given = prompt_files.load(chosen.prompts, chosen.limit, distinct=True)
    words: list[str] = list(dict.fromkeys(chosen.drafter or DRAFTERS))
    if not chosen.drafter and chosen.target in (None, "tiny"):
        words.append("tiny-draft")
    target, drafters = loading.open_named(chosen.target, words, chosen.dtype, chosen.trust_remote_code)
    prompts = given or loading.shipped_prompts(target, chosen.limit)
    for drafter in drafters.values():
        drafter.tree_spec = loading.tree_spec_from_options(chosen.tree or "saved", drafter, chosen.depth, chosen.width, chosen.nodes)
    encoded, skipped = encode_prompts(target, prompts, chosen.max_new_tokens)
    report = benchmark.benchmark(target, drafters, encoded, chosen.max_new_tokens, chosen.repeats, chosen.adaptive_depth, sampling)
    report["settings"] |= {"drafters": dict(zip(drafters, words, strict=True)), "positions": target.max_positions, "skipped": skipped}
    text, failure = to_json(report), ""
    if out:
        try:
            durable.write_text(out, text + "\n")
        except OSError as error:
            failure = f"--out {out}: not written ({error.strerror or error}); the report is printed"
    output.deliver(lambda: print(text) if chosen.json else benchmark.print_benchmark(report))
    if failure:
        raise ValueError(failure)
    if benchmark.not_lossless(report):
        raise SystemExit(1)


def _own(file: Path) -> bool:
    """Whether bench wrote the file; an empty one has nothing to lose."""
    try:
        return not file.stat().st_size or bool(REPORTS & read_json(file).keys())
    except ValueError:
        return False
