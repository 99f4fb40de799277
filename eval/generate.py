"""Continue a prompt, and see what the drafter contributed.

draftsmith generate "def parse_"
draftsmith generate --drafter runs/medusa-tiny/artifact --show-accepted "def parse_"
draftsmith generate --target tiny --drafter ngram "def parse_"
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.eval import options
from draftsmith.inference.reading import field
from draftsmith.inference.rule_names import DEFAULT_RULE, RULES
from draftsmith.inference.terminal import printable

if TYPE_CHECKING:  # --help imports no model library
    from transformers import PreTrainedTokenizerBase

    from draftsmith.inference.constraints import Constraint
    from draftsmith.inference.decoder import Decoder
    from draftsmith.inference.sampler import Sampling
    from draftsmith.models.target import Target

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
SHOWN = (
    "\n\t\u200c\u200d"  # of the control and format characters that a model writes: lines, tabs, and joiners, which scripts and emoji need
)
MOST_BYTES = 1 << 25  # of a prompt on stdin


def parser() -> argparse.ArgumentParser:
    parser = options.new_parser("generate", __doc__)
    parser.add_argument("prompt", help="text to continue; `-` reads it from stdin")
    parser.add_argument("--drafter", default="none", help=f"none (default), {options.DRAFTER_HELP}")
    options.add_models(parser)
    parser.add_argument("--chat", action="store_true", help="ask the prompt as a user's message, in the target's chat template")
    options.add_max_new_tokens(parser, 200)
    default = "default: the target's generation_config, else off"
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the target's generation_config, else 0)")
    parser.add_argument("--top-k", type=int, help=f"0 is off ({default})")
    parser.add_argument("--top-p", type=float, help=f"1 is off ({default})")
    parser.add_argument("--min-p", type=float, help=f"0 is off ({default})")
    parser.add_argument("--repetition-penalty", type=float, help=f"1 is off ({default})")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the same seed gives the same text, with any drafter or none, under rules shared-noise and target-sample (default 0)",
    )
    options.add_constraint(parser)
    options.add_rule(parser, list(RULES), DEFAULT_RULE)
    options.add_tree(parser, ["saved", "chain", "dynamic"])
    options.add_stop(parser)
    options.add_draft_window(parser)
    options.add_adaptive_depth(parser, True)
    parser.set_defaults(adaptive_depth=None)  # None: on without --load-aware
    options.add_load_aware(parser)
    options.add_kernels(parser)
    options.add_exact(parser)
    parser.add_argument("--show-accepted", action="store_true", help="colour the tokens that the drafter guessed; a summary on stderr")
    return parser


def sampling_from_options(chosen: argparse.Namespace, target: "Target", constraint: "Constraint | None" = None) -> "Sampling":
    """The sampling that the options name, with the constraint; what they leave out is from the target's generation_config."""
    from draftsmith.inference.sampler import Sampling

    config = target.model.generation_config
    settings: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    if config is not None:
        if config.do_sample:  # transformers' own defaults where the config says nothing: temperature 1, top-k 50
            settings |= {"temperature": 1.0, "top_k": 50}
        read = settings if config.do_sample else ["repetition_penalty"]  # which transformers applies to greedy decoding too
        given = {name: getattr(config, name) for name in read if getattr(config, name) is not None}
        source = f"generation_config.json of {target.name!r}"
        for name in given:
            options.check_sampling(name, field(given, name, int if name == "top_k" else float, source), f"{source}: `{name}`")
        settings |= given
    settings |= {name: getattr(chosen, name) for name in settings if getattr(chosen, name) is not None}
    given = [name for name in sorted(options.FILTERS) if getattr(chosen, name) is not None]
    if given and chosen.temperature is None and not settings["temperature"]:
        raise ValueError(f"--{given[0].replace('_', '-')}: decoding is greedy here, and no token is filtered; give --temperature 1 too")
    return Sampling(seed=chosen.seed, rule=chosen.rule or DEFAULT_RULE, constraint=constraint, **settings)


def text_pieces(target: "Target", ids: Iterator[tuple[int, bool]]) -> Iterator[tuple[str, bool]]:
    """(token, drafted) -> (text, drafted), as soon as the tokens so far are complete characters."""
    tokenizer = target.require_tokenizer()
    pending: list[int] = []
    for token, drafted in ids:
        pending.append(token)
        text = str(tokenizer.decode(pending, skip_special_tokens=True))
        if text and not text.endswith("�"):
            yield _decode_after_text(tokenizer, pending), drafted
            pending = []
    if pending:
        yield str(tokenizer.decode(pending, skip_special_tokens=True)), False


def _decode_after_text(tokenizer: "PreTrainedTokenizerBase", pending: list[int]) -> str:
    """The text of some tokens after other text: decoded alone, they would lose a leading space."""
    anchor = tokenizer.encode("a", add_special_tokens=False)
    text = str(tokenizer.decode(anchor + pending, skip_special_tokens=True))
    return text[len(str(tokenizer.decode(anchor, skip_special_tokens=True))) :]


@dataclass(slots=True)
class Totals:
    """Counts of one answer."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    reason: str = ""  # why the answer ended; "" before its end


def stream_tokens(
    decoder: "Decoder", ids: list[int], sampling: "Sampling", max_new_tokens: int, totals: Totals
) -> Iterator[tuple[int, bool]]:
    """The new tokens of one prompt, and for each whether it was drafted; `totals` is kept up to date."""
    for steps in decoder.stream([ids], sampling, max_new_tokens):
        step = steps[0]
        totals.rounds += 1
        totals.tokens += len(step.tokens)
        totals.reason = step.reason
        totals.seconds += step.round.draft_s + step.round.verify_s + step.round.other_s
        # The last token of a round that was not cut is the target's own; all before it were drafted.
        yield from ((token, index < step.accepted - 1) for index, token in enumerate(step.tokens))


def _standard_input() -> str:
    """The prompt on stdin.

    Raises:
        ValueError: it is closed, cannot be read, is too long, or not UTF-8.
    """
    if sys.stdin is None:
        raise ValueError("stdin is closed; give the prompt as an argument, or on stdin")
    try:
        content = sys.stdin.buffer.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"stdin: {error.strerror}; give the prompt as an argument") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"stdin: expected at most {MOST_BYTES:,} bytes of a prompt; shorten it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"stdin: not UTF-8 text (line {line}); convert it") from None


def _argument(word: str) -> str:
    """The prompt as an argument.

    Raises:
        ValueError: its bytes were no text in the terminal's encoding.
    """
    if any("\udc80" <= character <= "\udcff" for character in word):
        raise ValueError("the prompt is not UTF-8 text; convert it")
    return word


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    options.check_numbers(chosen)
    from draftsmith.data.prompts import Prompt, check_text

    for name in ("tree", "depth", "width", "nodes"):
        if chosen.drafter == "none" and getattr(chosen, name) is not None:
            raise ValueError(f"--{name} is of a drafter's draft tree; give --drafter, or leave it out")
    if chosen.load_aware and chosen.adaptive_depth:
        raise ValueError("--load-aware drafts complete trees, --adaptive-depth chooses a depth; expected one; leave one out")
    text = check_text(_standard_input() if chosen.prompt == "-" else _argument(chosen.prompt), "the prompt")

    from draftsmith.eval import drift, loading
    from draftsmith.inference.adaptive import AdaptiveDepth
    from draftsmith.inference.decoder import Decoder
    from draftsmith.inference.load_aware import LoadAware

    names = [] if chosen.drafter == "none" else [chosen.drafter]
    target, drafters = loading.open_models(chosen.target, names, chosen.dtype, chosen.trust_remote_code, learn=True)
    drafter = drafters[0] if drafters else None
    loading.set_stop(drafter, chosen.stop)
    loading.set_draft_window(drafter, chosen.draft_window)
    if chosen.load_aware:
        loading.check_load_aware(drafter)
    sampling = sampling_from_options(chosen, target, loading.constraint_of(chosen, target))
    if drafter is not None:
        drafter.tree_spec = loading.tree_spec_from_options(chosen.tree or "saved", drafter, chosen.depth, chosen.width, chosen.nodes)
        if not sampling.greedy:
            loading.check_rule(sampling.rule, drafter)
    if target.identity.adapter_hash:
        print(f"target {target.name!r} with the adapters of {chosen.drafter}: the text is {drift.ADAPTED}", file=sys.stderr)
    lossy = drafter is not None and not sampling.lossless  # plain decoding verifies nothing
    if lossy:
        print(f"rule {sampling.rule} is LOSSY: the text is not distributed as the target's own", file=sys.stderr)
    if chosen.chat and not (target.tokenizer and target.tokenizer.chat_template):
        raise ValueError(f"target {target.name!r} has no chat template; leave --chat out")
    messages = ({"role": "user", "content": text},) if chosen.chat else ()
    ids = loading.encode(target, Prompt("prompt", "all", text, messages))
    if not ids:
        raise ValueError("the prompt is empty: got no tokens; give some text")
    adaptive = LoadAware() if chosen.load_aware else None if chosen.adaptive_depth is False else AdaptiveDepth()
    decoder = Decoder(target, drafter, adaptive=adaptive, kernels=chosen.kernels, exact=chosen.exact)
    totals = Totals()
    for piece, drafted in text_pieces(target, stream_tokens(decoder, ids, sampling, chosen.max_new_tokens, totals)):
        piece = printable(piece, keep=SHOWN)
        sys.stdout.write(f"{GREEN}{piece}{PLAIN}" if chosen.show_accepted and drafted else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if totals.reason == "context":
        print(f"the answer was cut at the target's {target.max_positions:,} positions", file=sys.stderr)
    elif totals.reason == "length" and sampling.constraint:
        print("the answer was cut before it was complete; a higher --max-new-tokens lets it end", file=sys.stderr)
    if chosen.show_accepted:
        label = "LOSSY: " if lossy else ""
        tau, speed = totals.tokens / totals.rounds, totals.tokens / max(totals.seconds, 1e-9)
        print(f"{label}{totals.tokens} tokens in {totals.rounds} rounds: τ {tau:.2f}, {speed:.0f} tokens/s", file=sys.stderr)
