"""The door: one table from `draftsmith <word>` to the function that answers it, imported when called."""

import importlib
import sys
from importlib.metadata import version

from draftsmith.inference.errors import exit_on_error

COMMANDS = {
    "eval": ("draftsmith.eval.acceptance", "measure a drafter's acceptance and speedup on held-out prompts"),
    "bench": ("draftsmith.eval.bench", "measure speed against transformers, the same prompts in turn"),
    "compare": ("draftsmith.eval.compare", "compare drafters: differences of τ on the same prompts"),
    "data": ("draftsmith.train.data_cli", "prepare conversations, look at them, let the target answer them, capture its features"),
    "plan": ("draftsmith.train.plan.report", "say what a recipe needs, memory and time, before anything is loaded"),
    "generate": ("draftsmith.eval.generate", "continue a prompt, with a drafter or without"),
}

USAGE = """Draftsmith trains the drafter that makes a large language model fast, and proves how fast before anyone deploys it.

usage: draftsmith <word> [options]      (draftsmith <word> --help says more)

{commands}

To train:  accelerate launch train/medusa.py recipes/medusa-tiny.yaml [section.key=value ...]
"""


def main() -> None:
    """The `draftsmith` command."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        listed = "\n".join(f"  {name:10} {about}" for name, (_, about) in COMMANDS.items())
        print(USAGE.format(commands=listed).strip())
        raise SystemExit(0 if words else 2)
    if words[0] == "--version":
        print(version("draftsmith"))
        return
    if words[0] not in COMMANDS:
        print(f"error: no command {words[0]!r}; expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    exit_on_error(importlib.import_module(COMMANDS[words[0]][0]).main, words[1:])


if __name__ == "__main__":
    main()
