"""Search the values of recipe keys by successive halving, at equal budget: short runs of all trials, longer ones of the best.

    draftsmith sweep eagle eagle1-tiny train.lr=1e-3,3e-3,1e-2 eagle.noise=0,0.2
    draftsmith sweep eagle eagle3-tiny train.lr=1e-3,3e-3 'eagle.taps=[1,3,5],[2,4,6]' train.steps=300 --seeds 0,1,2
    draftsmith sweep medusa medusa-tiny train.lr=2e-3,6e-3 train.tau_prompts=2

Values between commas are swept, every combination is a trial, and a key with a single value is an override as for `draftsmith train`. Each
rung is a training run of its own with its complete learning-rate schedule, and the warm-up in proportion; the last rung has the recipe's own
train.steps. Trials of a rung see equally many tokens: where train.batch_size or data.seq_len is swept, the steps are set so. They are ranked by
the τ of the last evaluation where train.tau_prompts is set, else by its simulated τ on held-out data. The same command goes on where an earlier
one stopped, and runs again only what failed.
"""

from typing import TYPE_CHECKING

from draftsmith.eval.options import new_parser

if TYPE_CHECKING:
    from argparse import ArgumentParser


def parser() -> "ArgumentParser":
    described = new_parser("sweep", __doc__)
    described.add_argument("method", help="a method of `draftsmith train` that trains a drafter")
    described.add_argument("recipe", help="YAML file, or the name of one that is shipped")
    described.add_argument("words", nargs="*", metavar="key=a,b,c", help="recipe keys and their values; a list is written [1,2]")
    described.add_argument("--output", metavar="FOLDER", help="folder of the sweep (default: runs/sweep-<recipe>)")
    described.add_argument("--jobs", type=int, help="runs at a time (default: one for each GPU, without GPUs one for each core)")
    described.add_argument("--seeds", metavar="0,1,2", help="run every trial with each of these; the mean ranks it (default: the recipe's)")
    described.add_argument("--eta", type=int, default=3, help="the best 1/ETA of a rung's trials go on, with ETA × the steps (default 3)")
    described.add_argument(
        "--rungs",
        metavar="STEPS,STEPS",
        help="train.steps of each rung, up to the recipe's own (default: …, S/ETA², S/ETA, S, as many as leave 2 to ETA trials for the last "
        "rung, four at most)",
    )
    return described


def main(arguments: list[str]) -> None:
    options = parser().parse_intermixed_args(arguments)
    from draftsmith.train.sweep.plan import make_plan  # late, so that --help is quick
    from draftsmith.train.sweep.run import run_sweep

    run_sweep(make_plan(options), options.jobs)
