"""Continue a prompt, and see what the drafter contributed.

draftsmith generate "def parse_"
draftsmith generate --drafter runs/medusa-tiny/artifact --show-accepted "def parse_"
draftsmith generate --target tiny --drafter ngram "def parse_"
"""

import argparse
import sys
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from draftsmith.data.prompts import Prompt
from draftsmith.eval import loading
from draftsmith.inference.adaptive import AdaptiveDepth
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import DEFAULT_RULE, RULES, Sampling
from draftsmith.models.target import Target

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def parser() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser("draftsmith generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    described.add_argument("prompt", help="text to continue; `-` reads it from stdin")
    described.add_argument("--target", help="folder or Hub id; by default the one the drafter was trained for, else `tiny`")
    described.add_argument(
        "--drafter",
        default="none",
        help="none, ngram, suffix, or folder or Hub id of a trained drafter or of a causal LM with the target's tokens",
    )
    described.add_argument("--chat", action="store_true", help="ask the prompt as a user's message, in the target's chat template")
    described.add_argument("--temperature", type=float, help="0 is greedy (default: the target's generation_config, else 0)")
    described.add_argument("--top-k", type=int, help="0 is off")
    described.add_argument("--top-p", type=float, help="1 is off")
    described.add_argument("--min-p", type=float, help="0 is off")
    described.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same text, with any drafter or none (rules coupled, target-sample)"
    )
    described.add_argument("--max-new-tokens", type=int, default=200)
    described.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    described.add_argument("--repetition-penalty", type=float, help="1 is off")
    described.add_argument(
        "--rule", choices=list(RULES), default=DEFAULT_RULE, help="how drafts are verified at T > 0 (see draftsmith eval --help)"
    )
    described.add_argument(
        "--tree", choices=["saved", "chain", "dynamic"], default="saved", help="the drafter's own draft tree, or another"
    )
    described.add_argument("--depth", type=int, help="draft no deeper than this")
    described.add_argument("--width", type=int, help="of a dynamic tree (default 4)")
    described.add_argument("--nodes", type=int, help="of a dynamic tree, the root included (default 16)")
    described.add_argument("--confidence", type=float, help="draft models: draft on where the best next token is at least this likely")
    described.add_argument("--kernels", action="store_true", help="Triton's kernels and one CUDA graph a round; no GPU has run them yet")
    described.add_argument("--no-governor", action="store_true", help="draft in every round, whether it pays or not")
    described.add_argument("--trust-remote-code", action="store_true", help="run the target's model code from the Hub")
    described.add_argument("--show-accepted", action="store_true", help="colour the tokens that the drafter guessed; a summary on stderr")
    return described


def sampling_of(options: argparse.Namespace, target: Target) -> Sampling:
    """What the options say; for the rest what the target's generation_config says, where it samples by default."""
    config = target.model.generation_config
    default = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    if config is not None and config.do_sample:
        # transformers' own defaults where the config says nothing: temperature 1, top-k 50.
        unset = default | {"temperature": 1.0, "top_k": 50}
        default = {name: value if getattr(config, name) is None else getattr(config, name) for name, value in unset.items()}
    chosen = {name: getattr(options, name) if getattr(options, name) is not None else value for name, value in default.items()}
    return Sampling(seed=options.seed, rule=options.rule, **chosen)


def text_pieces(target: Target, ids: Iterator[tuple[int, bool]]) -> Iterator[tuple[str, bool]]:
    """(token, drafted) -> (text, drafted): as soon as the bytes so far are whole characters."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    pending: list[int] = []
    for token, drafted in ids:
        pending.append(token)
        text = str(tokenizer.decode(pending, skip_special_tokens=True))
        if text and not text.endswith("�"):
            # A leading space is lost when a token is decoded alone; a neighbour in front keeps it.
            yield _after(tokenizer, pending), drafted
            pending = []
    if pending:
        yield str(tokenizer.decode(pending, skip_special_tokens=True)), False


def _after(tokenizer: PreTrainedTokenizerBase, pending: list[int]) -> str:
    anchor = tokenizer.encode("a", add_special_tokens=False)
    whole, head = (str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (anchor + pending, anchor))
    return whole[len(head) :]


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    named = [] if options.drafter == "none" else [options.drafter]
    loading.check_numbers(options)
    target, drafters = loading.open_models(options.target, named, options.dtype, options.trust_remote_code)
    drafter = drafters[0] if drafters else None
    loading.set_confidence(drafter, options.confidence)
    if drafter is not None:
        drafter.tree_spec = loading.tree_spec_from_options(options.tree, drafter, options.depth, options.width, options.nodes)
        loading.check_rule(options.rule, drafter)
    sampling = sampling_of(options, target)
    if not sampling.lossless:
        print(f"rule {sampling.rule} is LOSSY: the text is not distributed as the target's own", file=sys.stderr)
    governor = None if options.no_governor else AdaptiveDepth()
    messages = ({"role": "user", "content": text},) if options.chat else ()
    if options.chat and not (target.tokenizer and target.tokenizer.chat_template):
        raise ValueError(f"target {target.name!r} has no chat template; leave --chat out")
    ids = loading.encode(target, Prompt("prompt", "all", text, messages))
    counts = {"tokens": 0, "rounds": 0, "seconds": 0.0}

    def stream() -> Iterator[tuple[int, bool]]:
        for steps in Decoder(target, drafter, governor=governor, kernels=options.kernels).stream([ids], sampling, options.max_new_tokens):
            step = steps[0]
            counts["rounds"] += 1
            counts["tokens"] += len(step.tokens)
            counts["seconds"] += step.round.draft_s + step.round.verify_s + step.round.other_s
            # The last token of a whole round is the target's own; all before it were drafted.
            yield from ((token, index < step.accepted - 1) for index, token in enumerate(step.tokens))

    for piece, drafted in text_pieces(target, stream()):
        sys.stdout.write(f"{GREEN}{piece}{PLAIN}" if options.show_accepted and drafted else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if options.show_accepted:
        speed = counts["tokens"] / max(counts["seconds"], 1e-9)
        print(
            f"{'LOSSY: ' * (not sampling.lossless)}{counts['tokens']} tokens in {counts['rounds']} rounds: τ {counts['tokens'] / counts['rounds']:.2f}, {speed:.0f} tokens/s",
            file=sys.stderr,
        )
