"""Measure speed from prompt to answer against transformers: the same models and prompts, in one process, interleaved; greedy, batch 1.

    draftsmith bench                                                  # what ships here: target, draft model, drafters without weights
    draftsmith bench --drafter runs/target-tiny-draft/artifact --drafter ngram
    draftsmith bench --target Qwen/Qwen3-8B --drafter Qwen/Qwen3-0.6B --prompts my-prompts.jsonl --out speed.json
    draftsmith bench --kernels                                        # on a GPU: the Triton kernels, and rounds with them

Every contender answers a prompt before the next prompt comes, and each prompt starts with the next contender.
"""

import argparse
import json
from pathlib import Path

from draftsmith.eval import options

DRAFTERS = ("ngram", "suffix")  # by default; for the target that ships here its draft model too


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("bench", __doc__)
    default = f"{', '.join(DRAFTERS)}, and tiny-draft for tiny"
    parser.add_argument("--drafter", action="append", help=f"{options.DRAFTER_HELP}; may be given more than once (default: {default})")
    options.add_models(parser)
    options.add_prompts(parser, limit=3)
    parser.add_argument("--repeats", type=int, default=3, help="passes over the prompts (default 3)")
    options.add_tree(parser, ["saved", "chain", "dynamic"])
    options.add_adaptive_depth(parser, True)
    parser.add_argument("--kernels", action="store_true", help="measure the Triton kernels and rounds with them instead, on a GPU")
    options.add_json(parser)
    parser.add_argument("--out", type=Path, help="write the JSON to this file too")
    return parser


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    options.check_numbers(chosen)
    if chosen.out and (chosen.out.is_dir() or not chosen.out.absolute().parent.is_dir()):
        raise ValueError(f"--out {chosen.out}: expected a file in a folder that exists; make the folder first")

    from draftsmith.data import prompts as prompt_files
    from draftsmith.eval import loading, ranks
    from draftsmith.eval.answers import encode_prompts
    from draftsmith.eval.benchmarks import rounds
    from draftsmith.eval.benchmarks import transformers as benchmark
    from draftsmith.inference import durable

    if ranks.count() > 1:
        raise ValueError(
            f"draftsmith bench in {ranks.count()} processes: they would disturb each other's clocks; expected one; run it alone"
        )
    if chosen.kernels:
        rounds.main(chosen.out, chosen.json)
        return
    prompts = prompt_files.load(chosen.prompts, chosen.limit)
    words: list[str] = list(dict.fromkeys(chosen.drafter or DRAFTERS))
    if not chosen.drafter and chosen.target in (None, "tiny"):
        words.append("tiny-draft")
    target, drafters = loading.open_named(chosen.target, words, chosen.dtype, chosen.trust_remote_code)
    for drafter in drafters.values():
        drafter.tree_spec = loading.tree_spec_from_options(chosen.tree or "saved", drafter, chosen.depth, chosen.width, chosen.nodes)
    encoded = encode_prompts(target, prompts, chosen.max_new_tokens)
    report = benchmark.benchmark(target, drafters, encoded, chosen.max_new_tokens, chosen.repeats, chosen.adaptive_depth)
    report["settings"]["drafters"] = dict(zip(drafters, words, strict=True))
    text = json.dumps(report, allow_nan=False)
    if chosen.out:
        durable.write_text(chosen.out, text + "\n")
    if chosen.json:
        print(text, flush=True)
    else:
        benchmark.print_benchmark(report)
    if benchmark.not_lossless(report):
        raise SystemExit(1)
