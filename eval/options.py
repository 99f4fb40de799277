"""The options that several commands share, with checks of their values. No model library is imported, so that --help is quick."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from draftsmith.inference.rule_names import RULES
from draftsmith.inference.tree_limits import LIMITS

DRAFTER_HELP = (
    "ngram, suffix, suffix:FILE (with a memory that lasts), recycling, lookahead, rest:FOLDER (a datastore), mtp (the MTP layer in the "
    "target's checkpoint), early-exit:E (the target's own first E layers), skip:LAYERS (the target without these, such as skip:3,5), or the "
    "folder or Hub id of a trained drafter or of a causal LM; before a causal LM with other tokens than the target's strings: (default) "
    "drafts by text, tli: drafts the tokens that both have; hybrid: before a name puts a look-up beside it"
)
TREES = {
    "best": "the tree with the highest τ over the cost of its round, which is also written to the artifact",
    "largest": "the best tree of --nodes nodes",
    "saved": "the drafter's own tree",
    "chain": "one token at each depth",
    "dynamic": "in each round the likeliest tokens",
}
RANGES = LIMITS | {
    "slots": (1, 1 << 12),
    "draft_window": (1, 1 << 24),
    "exact": (2, 256),
    "max_new_tokens": (1, 1 << 20),
    "limit": (1, 1 << 20),
    "timed": (1, 1 << 20),
    "probe": (0, 3600),
    "repeats": (1, 1 << 12),
}
FILTERS = {"top_k", "top_p", "min_p"}  # of the tokens that are sampled
# Of the numbers that say how tokens are sampled: a value that is off, then the range of the others. float32 can compute with all of them.
SAMPLING = {
    "temperature": (0, 1e-4, 10_000),
    "top_k": (0, 1, (1 << 31) - 1),
    "top_p": (1, 1e-6, 1),
    "min_p": (0, 0, 1),
    "repetition_penalty": (1, 1e-3, 1_000),
    "seed": (0, 0, (1 << 64) - 1),
}


class Parser(argparse.ArgumentParser):
    """argparse, with errors that are one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message[:1000]}; `{self.prog} --help` lists the options")


def new_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """An empty parser for `draftsmith <command>`. The description keeps its line breaks.

    Its `parse_args` raises ValueError for words that it does not take.
    """
    return Parser(f"draftsmith {command}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_models(parser: argparse.ArgumentParser) -> None:
    """--target, --dtype, --trust-remote-code."""
    parser.add_argument(
        "--target",
        help="folder, Hub id or GGUF file of the target (default: the target of the drafter, where one is named, else `tiny`)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="precision of the weights (default auto: bfloat16 on a GPU that supports it, and on a CPU that decodes a checkpoint in half "
        "precision faster so; else float32)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the models' own code from the Hub")


def add_prompts(
    parser: argparse.ArgumentParser, limit: int | None = None, default: str = "chat, or Python source for a target without a chat template"
) -> None:
    """--prompts, --limit, --max-new-tokens, for commands that measure. limit: the default of --limit; None is all prompts. `default` only
    describes in --help what the command takes without --prompts."""
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        help=".jsonl or .parquet file with `turns` or `messages`, which go through the chat template, or a `prompt` to be continued as it is, and "
        "`domain`, with answers if it is a log; chat: 42 prompts of seven "
        f"tasks; or hf:owner/name[:split] on the Hub; may be given more than once (default: {default})",
    )
    parser.add_argument("--limit", type=int, default=limit, help=f"prompts of each domain (default {limit or 'all'})")
    add_max_new_tokens(parser, 96)


def add_max_new_tokens(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=default, help=f"most tokens of an answer (default {default})")


def add_tree(parser: argparse.ArgumentParser, choices: Sequence[str], default: str = "saved") -> None:
    """--tree, --depth, --width, --nodes. `default` only describes in --help what the command does without --tree."""
    about = "; ".join(f"{name}: {TREES[name]}" for name in choices)
    parser.add_argument("--tree", choices=choices, help=f"the draft tree (default {default}). {about}")
    parser.add_argument("--depth", type=int, help="draft no deeper than this (default: 4 for a chain or a dynamic tree)")
    parser.add_argument("--width", type=int, help="of a dynamic tree: children of a node, and nodes of a level that get some (default 4)")
    chosen = ", 64 for a best or largest one" if "best" in choices else ""
    parser.add_argument("--nodes", type=int, help=f"most nodes, the root included (default: 16 for a dynamic tree{chosen})")


def add_stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop",
        metavar="RULE",
        help="when a drafter that drafts level by level stops: confidence:P (the best next token is less likely than P), svip:H (the square "
        "root of the entropy is above H), adaedl:L (the lower bound of acceptance is below L), survival:P (the fitted probability that the draft is accepted so far is below P), gain (a level costs more than it is worth), or "
        "none (default: what the artifact says)",
    )


def add_draft_window(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-window",
        type=int,
        metavar="N",
        help="the drafter keeps KV of the first 4 and the last N positions only, so that drafting costs the same after long texts",
    )


def add_adaptive_depth(parser: argparse.ArgumentParser, default: bool) -> None:
    """--adaptive-depth and --no-adaptive-depth."""
    parser.add_argument(
        "--adaptive-depth",
        action=argparse.BooleanOptionalAction,
        help=f"draft only as deep as pays, judged by acceptance and time of earlier rounds (default {'on' if default else 'off'})",
    )
    parser.set_defaults(adaptive_depth=default)  # given above, argparse would append it to the help as well


def add_load_aware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load-aware",
        action="store_true",
        help="draft the complete tree and verify its likeliest nodes, as many as pay at the measured cost of a round, instead of adapting the depth",
    )


def add_slots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=1, help="prompts decoded at a time (default 1)")


def add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernels", action="store_true", help="decode with Triton kernels and one CUDA graph a round, on a GPU")


def add_exact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exact",
        type=int,
        metavar="NODES",
        help="verify in forwards of exactly this many nodes, plain decoding too, so that no answer diverges in half precision; slower",
    )


def add_rule(parser: argparse.ArgumentParser, choices: Sequence[str], default: str, several: bool = False) -> None:
    """--rule, None where it is not given. `default` only describes in --help which rule the command then takes.

    several: the option may be repeated, and gives a list.
    """
    about = "; ".join(f"{name}{'' if RULES[name].lossless else ' (LOSSY)'}: {RULES[name].about}" for name in choices)
    more = "; may be given more than once, to see which accepts most" if several else ""
    parser.add_argument(
        "--rule",
        choices=choices,
        action="append" if several else "store",
        help=f"how drafts are verified at T > 0 (default {default}{more}). {about}".replace("%", "%%"),
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """--sampling, of which there is one."""
    parser.add_argument(
        "--sampling",
        metavar="NAME=VALUE,…",
        help=f"sampling as in production, such as temperature=0.7,top_p=0.9; of {', '.join(SAMPLING)} (default: greedy)",
    )


def add_samplings(parser: argparse.ArgumentParser) -> None:
    """--temperature and --sampling, which may be repeated."""
    parser.add_argument("--temperature", type=float, action="append", help="0 is greedy; may be given more than once (default: 0 and 1)")
    parser.add_argument(
        "--sampling",
        action="append",
        metavar="NAME=VALUE,…",
        help=f"sampling as in production, such as temperature=0.7,top_p=0.9; of {', '.join(SAMPLING)}; may be given more than once",
    )


def add_constraint(parser: argparse.ArgumentParser) -> None:
    """--json-schema, --grammar, --regex, of which one may be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", metavar="FILE", help="answers are JSON of this schema (needs the package llguidance, as the next two)"
    )
    group.add_argument("--grammar", metavar="FILE", help="answers match this grammar, EBNF as Lark or llama.cpp's GBNF writes it")
    group.add_argument("--regex", metavar="PATTERN", help="answers match this regular expression")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else there")


def samplings(temperatures: Sequence[float] | None, settings: Sequence[str] | None) -> list[dict[str, Any]]:
    """The distinct sampling settings to measure at, as fields of `Sampling`: of --temperature first, then of --sampling; temperatures 0 and 1
    where neither is given. Reports print six digits, so more do not count.

    Raises:
        ValueError: a setting that names nothing, or a number that is negative, infinite, or too small or large to compute with.
    """
    chosen: list[dict[str, Any]] = []
    for temperature in temperatures or ([] if settings else [0.0, 1.0]):
        check_sampling("temperature", temperature, "--temperature")
        chosen.append({"temperature": float(f"{abs(temperature):g}")})
    for setting in settings or ():
        fields: dict[str, Any] = {}
        for part in setting.split(","):
            name, _, text = part.partition("=")
            source = f"--sampling {setting}: {name}"
            if name not in SAMPLING or name in fields:
                raise ValueError(f"--sampling {setting}: expected {', '.join(SAMPLING)} as NAME=VALUE, each once, got {part!r}; correct it")
            try:
                value = int(text) if name in ("top_k", "seed") else float(f"{float(text):g}")
            except ValueError:
                raise ValueError(f"{source}: expected a number, got {text!r}; correct it") from None
            check_sampling(name, value, source)
            fields[name] = abs(value)
        if "temperature" not in fields and fields.keys() & FILTERS:
            raise ValueError(f"--sampling {setting}: without a temperature decoding is greedy, and no token is filtered; add temperature=1")
        chosen.append(fields)
    return [dict(items) for items in dict.fromkeys(tuple(sorted(fields.items())) for fields in chosen)]


def check_sampling(name: str, value: float, source: str) -> None:
    """Check a number that says how tokens are sampled.

    Args:
        name: a key of SAMPLING.
        value: the number.
        source: where it is from, for the error.

    Raises:
        ValueError: outside its range.
    """
    off, low, high = SAMPLING[name]
    if value != off and not low <= value <= high:
        apart = "" if low <= off <= high else f"{off} or "
        raise ValueError(f"{source} {value}: expected {apart}{low:,} to {high:,}")


def check_numbers(options: Any, min_new_tokens: int = 1) -> None:
    """Check the numbers among parsed options.

    Raises:
        ValueError: a number outside its range; the message names the option.
    """
    ranges = RANGES | {"max_new_tokens": (min_new_tokens, RANGES["max_new_tokens"][1])}
    for name, (low, high) in ranges.items():
        value = getattr(options, name, None)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected {low} to {high}")
    for name in SAMPLING:
        value = getattr(options, name, None)
        if isinstance(value, int | float):
            check_sampling(name, value, f"--{name.replace('_', '-')}")
