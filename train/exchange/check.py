"""Say what is wrong with a drafter's folder, one line for each thing; exit 1 where something is.

draftsmith check served/llama-drafter --target meta-llama/Llama-3.1-8B-Instruct
draftsmith check someone/their-drafter --target meta-llama/Llama-3.1-8B-Instruct --engine vllm

The rules are those of the engines' loaders (models/FORMATS.md). Then a second reading, in plain torch, is held to what our model reads from
the folder: logits on random inputs.
"""

import argparse
from typing import Any

from draftsmith.eval import options
from draftsmith.train.exchange.export import ENGINES


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("check", __doc__)
    parser.add_argument("folder", help="folder or Hub id of a drafter, ours or anyone's")
    parser.add_argument("--target", required=True, help="folder or Hub id of the target that it drafts for")
    parser.add_argument(
        "--engine",
        action="append",
        choices=ENGINES,
        help="hold it to this engine's rules; may be repeated (default: the engine it was exported for, else all that serve such a drafter)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the target's own code from the Hub")
    return parser


def main(arguments: list[str]) -> None:
    chosen: Any = parser().parse_args(arguments)

    from draftsmith.inference.terminal import printable
    from draftsmith.models.formats.published import folder_of
    from draftsmith.models.formats.verify import faults
    from draftsmith.train.exchange.export import open_target

    folder = folder_of(chosen.folder)
    target, _ = open_target(chosen.target, trust_remote_code=chosen.trust_remote_code)
    lines = faults(folder, target, chosen.engine)
    for line in lines:
        print(printable(line))
    if lines:
        raise SystemExit(1)
    print(f"{chosen.folder}: nothing wrong was seen")
