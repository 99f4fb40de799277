"""The `draftsmith` command. A module is imported only when its command is called, so that help is printed at once."""

import ast
import difflib
import importlib
import os
import re
import runpy
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, get_args, get_origin

from draftsmith.inference.errors import exit_on_error, quiet_libraries

if TYPE_CHECKING:  # pydantic takes half a second, in which Ctrl-C would be a traceback
    from pydantic.fields import FieldInfo

    from draftsmith.train.recipe import Recipe

COMMANDS = {
    "eval": ("draftsmith.eval.acceptance", "measure a drafter's acceptance and speedup on held-out prompts"),
    "bench": ("draftsmith.eval.bench", "measure speed against transformers, the same prompts in turn"),
    "serve-bench": (
        "draftsmith.eval.servers.bench",
        "measure servers under load, with speculation and without: vLLM, SGLang, llama.cpp, TGI",
    ),
    "compare": ("draftsmith.eval.compare", "compare drafters: differences of τ on the same prompts"),
    "gate": ("draftsmith.eval.gate", "judge an evaluation before a rollout: bounds on τ and speedup, exit status 0, 1 or 2"),
    "data": ("draftsmith.train.data_cli", "prepare conversations, look at them, let the target answer them, capture its features"),
    "plan": ("draftsmith.train.plan.command", "say what a recipe needs, memory and time, before anything is loaded"),
    "sweep": ("draftsmith.train.sweep.command", "search recipe values by successive halving: short runs of all, long ones of the best"),
    "export": ("draftsmith.train.exchange.export", "write a drafter into the folder that a serving engine loads, checked"),
    "import": ("draftsmith.train.exchange.take_in", "make an artifact of a published drafter"),
    "check": ("draftsmith.train.exchange.check", "say what is wrong with a drafter's folder"),
    "publish": ("draftsmith.train.exchange.publish", "put a measured drafter on the Hugging Face Hub, with its model card"),
    "skip": ("draftsmith.eval.skip", "search the decoder layers that a target leaves out when it drafts for itself"),
    "generate": ("draftsmith.eval.generate", "continue a prompt, with a drafter or without"),
}
HELP = ("-h", "--help", "help")
WIDTH = 120  # columns of a help page

USAGE = """Draftsmith trains the drafter that makes a large language model fast, and proves how fast before anyone deploys it.

usage: draftsmith COMMAND ...      (draftsmith COMMAND --help says more)

{commands}

First steps: draftsmith train medusa medusa-tiny, then draftsmith eval runs/medusa-tiny/artifact
"""

TRAIN_USAGE = """usage: draftsmith train METHOD RECIPE [section.key=value ...]      (draftsmith train METHOD --help lists the keys)

{methods}

RECIPE is a YAML file or the name of one of these: {recipes}.
This trains in one process. For several GPUs or machines: accelerate launch [options] -m draftsmith.train.METHOD RECIPE ...
"""

SCRIPT_USAGE = """usage: draftsmith train {method} RECIPE [section.key=value ...]
       accelerate launch [options] -m draftsmith.train.{method} RECIPE [section.key=value ...]      (several GPUs or machines)

RECIPE is a YAML file or the name of one of these: {recipes}.
The keys that it may hold, and that may follow it as section.key=value:
"""


def main() -> None:
    """The `draftsmith` command."""
    exit_on_error(run, sys.argv[1:])  # imports included: they take seconds, in which people press Ctrl-C


def run(words: list[str]) -> None:
    """`draftsmith` followed by these words, in this process."""
    if not words or words[0] in HELP:
        rows = {"train": "train a drafter by a recipe", **{name: about for name, (_, about) in COMMANDS.items()}}
        print(USAGE.format(commands=_table(rows)).strip())
        raise SystemExit(0 if words else 2)
    if words[0] == "--version":
        print(version("draftsmith"))
    elif words[0] == "train":
        train(words[1:])
    elif words[0] in COMMANDS:
        importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])
    else:
        _refuse("command", words[0], ["train", *COMMANDS])


def train(words: list[str]) -> None:
    """`draftsmith train METHOD ...`: run train/METHOD.py as a script."""
    from draftsmith.train.recipe import shipped

    scripts = methods()
    if not words or words[0] in HELP:
        rows = {name: (ast.get_docstring(ast.parse(text)) or "").splitlines()[0] for name, text in scripts.items()}
        print(TRAIN_USAGE.format(methods=_table(rows), recipes=", ".join(shipped())).strip())
        raise SystemExit(0 if words else 2)
    if words[0] not in scripts:
        _refuse("method", words[0], list(scripts))
    sys.argv = [words[0], *words[1:]]
    runpy.run_module(f"draftsmith.train.{words[0]}", run_name="__main__", alter_sys=True)


def methods() -> dict[str, str]:
    """The source of each method's script, by name. A method is a file of this folder with a recipe class of its own."""
    sources = {file.stem: file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))}
    return {name: text for name, text in sources.items() if re.search(r"^class \w+\(Recipe\):", text, re.MULTILINE)}


def prepare_script(schema: "type[Recipe]", text: str | None) -> None:
    """What a method's script does before it imports torch: answer --help, refuse a missing recipe, quieten other libraries.

    Args:
        schema: the script's recipe class.
        text: the script's docstring.

    Raises:
        SystemExit: 0 after the help, 2 where no recipe is given.
    """
    from draftsmith.train.recipe import shipped

    sys.excepthook = _end_at_interrupt
    quiet_libraries()
    method, arguments = Path(sys.argv[0]).stem, sys.argv[1:]
    if not arguments:
        recipes = ", ".join(shipped(schema))
        print(f"error: no recipe; give a YAML file or one of: {recipes} (draftsmith train {method} --help lists the keys)", file=sys.stderr)
        raise SystemExit(2)
    if arguments[0] in HELP:
        print(usage(schema, method, text))
        raise SystemExit(0)


def _end_at_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook: Ctrl-C while libraries are imported ends the process with 130, without a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)
    sys.__excepthook__(kind, error, trace)


def usage(schema: "type[Recipe]", method: str, text: str | None) -> str:
    """The help page of a method: its docstring, and every key of its recipe under the heading of its section."""
    from draftsmith.train.recipe import sections, shipped

    head = SCRIPT_USAGE.format(method=method, recipes=", ".join(shipped(schema)))
    lines = [(text or "").strip(), "", *head.splitlines()]
    for name, section in sections(schema).items():
        lines += ["", f"{name}: {(section.__doc__ or '').strip()}"]
        for key, field in section.model_fields.items():
            lines += _key(f"{name}.{key}", field)
    return "\n".join(lines)


def _key(name: str, field: "FieldInfo") -> list[str]:
    """The lines of a key: its text, its choices, and its default."""
    choices = _choices(field.annotation)
    about = f"{field.description} {{{', '.join(map(str, choices))}}}" if choices else str(field.description)
    if field.is_required():
        about += " (required)"
    elif field.default is not None:  # of others the text says what happens while they are unset
        about += f" (default: {_shown(field.default)})"
    indent = " " * 32
    return textwrap.wrap(about, WIDTH, initial_indent=f"  {name:29} ", subsequent_indent=indent, break_on_hyphens=False)


def _choices(annotation: object) -> tuple[str, ...]:
    """The words that a key may hold, where these are listed in its type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if annotation is bool:
        return ("true", "false")
    return next((choices for part in get_args(annotation) if (choices := _choices(part))), ())


def _shown(value: object) -> str:
    """A default as a recipe would give it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def _table(rows: dict[str, str]) -> str:
    return "\n".join(f"  {name:11} {about}" for name, about in rows.items())


def _refuse(kind: str, word: str, known: list[str]) -> NoReturn:
    """Exit with one line on a word that is no command or method."""
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    print(f"error: no {kind} {word!r}; expected one of {', '.join(known)}{hint}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
