"""What a recipe needs, memory and time, before anything is loaded: of the target only its config is read.

    draftsmith plan recipes/eagle3-llama3.1-8b.yaml                              # one GPU of 80 GiB
    draftsmith plan recipes/eagle3-llama3.3-70b.yaml --gpus 4 --nodes 2 --gpu-memory 141 --hours 24
    draftsmith plan recipes/medusa-tiny.yaml --cpu

Recipe keys can follow as key=value. Memory is what PyTorch allocates in a step (train/plan/memory.py); 7 % of a GPU are left for CUDA, NCCL and gaps.
Times are predicted from the FLOPs counted in the objective, τ from runs of other lengths on small targets, where the method has them.
"""

import argparse
import json

from draftsmith.eval.options import new_parser

MOST = 10**9  # of any number that an option takes


def parser() -> argparse.ArgumentParser:
    described = new_parser("plan", __doc__)
    described.add_argument("recipe", help="YAML file, or the name of one that is shipped")
    described.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys")
    described.add_argument("--gpus", type=int, help="of each machine (default 1)")
    described.add_argument("--nodes", type=int, help="machines (default 1)")
    described.add_argument("--gpu-memory", type=float, metavar="GiB", help="of each GPU (default 80)")
    described.add_argument("--cpu", action="store_true", help="one process without a GPU")
    described.add_argument("--tflops", type=float, help="peak of one GPU, in 10^12 FLOP/s (default 989, an H100's in bf16)")
    described.add_argument("--hours", type=float, help="that the run may take: says the tokens/s that this needs")
    described.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else there")
    return described


def main(arguments: list[str]) -> None:
    options = parser().parse_intermixed_args(arguments)
    from draftsmith.train.plan.memory import GIB, Machine  # late, so that --help is quick
    from draftsmith.train.plan.report import report, show

    for name in ("gpus", "nodes", "gpu_memory", "tflops", "hours"):
        value = getattr(options, name)
        if value is not None and not 0 < value:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: expected a number above 0")
        if value is not None and not value <= MOST:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: expected a finite number, {MOST:,} at most")
        if value is not None and options.cpu and name in ("gpus", "nodes", "gpu_memory"):
            raise ValueError(f"--{name.replace('_', '-')} {value:g} with --cpu, which is one process without a GPU; leave out one of them")
    if options.cpu:
        machine = Machine(0, 1, 0, cpu=True)
    else:
        machine = Machine(options.gpus or 1, options.nodes or 1, (options.gpu_memory or 80) * GIB)
    tflops = options.tflops or (None if options.cpu else 989.0)
    plan = report(options.recipe, options.overrides, machine, tflops, options.hours)
    if options.json:
        print(json.dumps(plan))
    else:
        show(plan)
