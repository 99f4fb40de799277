"""Conversations to features: prepare, look, regenerate, capture.

draftsmith data prepare recipes/medusa-tiny.yaml data.train=chats.jsonl            # tokenise, mask, clean, mix; a report
draftsmith data show recipes/medusa-tiny.yaml data.train=chats.jsonl               # some samples, what bears loss coloured
draftsmith data regenerate chats.jsonl answers.jsonl --target tiny                 # the same prompts, answered by the target
draftsmith data regenerate chats.jsonl answers.jsonl --server http://localhost:8000/v1 --model Qwen/Qwen3-8B
draftsmith data capture recipes/medusa-tiny.yaml features.store=runs/features      # run the target once, keep what it computed

A recipe is any method's; each key can follow it as key=value. Several processes capture with
`accelerate launch -m draftsmith.train.data_cli capture ...`.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.data import capture, conversations, regenerate
from draftsmith.data.conversations import Source
from draftsmith.data.corpus import Corpus
from draftsmith.data.packing import PackedDataset
from draftsmith.data.prepare import load as load_corpora
from draftsmith.eval import loading
from draftsmith.inference.errors import exit_on_error
from draftsmith.models import vocab
from draftsmith.models.model_files import read_tokenizer
from draftsmith.models.parallel import COLLECTIVE
from draftsmith.train import recipe, setup
from draftsmith.train.recipe import Recipe

DEPTH = 4  # K of the ceiling that a draft vocabulary puts on τ


def prepare(arguments: list[str]) -> None:
    """Make the corpora and print what is in them."""
    _, tokenizer, corpora = _corpora(arguments)
    console = Console()
    for part, corpus in corpora.items():
        console.print(_contents(part, corpus))
    console.print(_vocabularies(corpora["train"], len(tokenizer)))
    for line in _report(corpora["train"]):
        console.print(line, highlight=False)


def show(arguments: list[str]) -> None:
    """Print samples, the tokens that bear loss coloured."""
    options = argparse.ArgumentParser("draftsmith data show", add_help=False)
    options.add_argument("--rows", type=int, default=4)
    options.add_argument("--domain")
    options.add_argument("--part", choices=["train", "valid"], default="train")
    chosen, rest = options.parse_known_args(arguments)
    _, tokenizer, corpora = _corpora(rest)
    corpus = corpora[chosen.part]
    if chosen.domain is not None and chosen.domain not in corpus.domains:
        raise ValueError(f"--domain {chosen.domain}: expected one of {', '.join(corpus.domains)}")
    order = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(0)).tolist()
    wanted = [n for n in order if chosen.domain in (None, corpus.domains[int(corpus.domain[n])])][: chosen.rows]
    console = Console()
    for number in wanted:
        ids, mask = corpus.sample(number)
        domain = corpus.domains[int(corpus.domain[number])]
        console.rule(f"sample {number} of {len(corpus)}, {domain}: {len(ids)} tokens, {int(mask.sum())} bear loss")
        console.print(_coloured(ids.tolist(), mask.tolist(), tokenizer, console.is_terminal), highlight=False)
    console.rule()
    console.print("green tokens bear loss" if console.is_terminal else "tokens between ⟦ and ⟧ bear loss")


def run_capture(arguments: list[str]) -> None:
    """Keep the target's features of the recipe's data in features.store."""
    chosen = recipe.load(Recipe, *_split(arguments), shared=True)
    section = chosen.features
    if section.store is None:
        raise ValueError("draftsmith data capture needs features.store=<folder>: where the features are to lie")
    if chosen.target.parallel in COLLECTIVE:
        raise ValueError(
            f"target.parallel={chosen.target.parallel} makes each forward one of all ranks, and a capture gives each its own; "
            "take target.parallel=layers in one process, or target.quantise"
        )
    target, corpora = setup.load_target_and_data(chosen, layers=True)
    state = PartialState()
    capture.capture(
        target,
        corpora.values(),
        Path(section.store),
        section.precision,
        section.taps,
        section.batch_tokens,
        state.process_index,
        state.num_processes,
        state.wait_for_everyone,
    )


def run_regenerate(arguments: list[str]) -> None:
    """Answer conversations anew, by the target or a server of it."""
    options = _regeneration().parse_args(arguments)
    loading.check_numbers(options)
    settings = regenerate.Settings(
        **{name: getattr(options, name) for name in regenerate.Settings.__dataclass_fields__ if getattr(options, name, None) is not None}
    )
    source = Source(path=options.source, split=options.split, subset=options.subset)
    rows, out = conversations.read(source), Path(options.out)
    if options.server:
        if not options.model:
            raise ValueError("--server needs --model, the name by which the server knows it")
        summary = regenerate.with_server(
            rows,
            out,
            options.server,
            options.model,
            settings,
            concurrency=options.concurrency,
            timeout=options.timeout,
            omit=tuple(options.omit),
        )
    else:
        named = [] if options.drafter == "none" else [options.drafter]
        target, drafters = loading.open_models(options.target, named, options.dtype, options.trust_remote_code)
        summary = regenerate.with_decoder(rows, out, target, settings, drafter=drafters[0] if drafters else None, rows=options.rows)
    print(f"{out}: {summary.report()}")
    if summary.status:
        raise SystemExit(summary.status)


def _regeneration() -> argparse.ArgumentParser:
    described = argparse.ArgumentParser("draftsmith data regenerate", description=run_regenerate.__doc__)
    described.add_argument("source", help="conversations or texts: a file, a folder or a Hub data set")
    described.add_argument("out", help="JSONL to write; the same command goes on where it stopped")
    described.add_argument("--split", default="train", help="of a Hub data set")
    described.add_argument("--subset", help="of a Hub data set")
    described.add_argument("--target", default="tiny", help="folder or Hub id of the target that answers, in this process")
    described.add_argument("--drafter", default="none", help="drafts for it, as for `draftsmith generate`; the answers stay the target's")
    described.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    described.add_argument("--trust-remote-code", action="store_true", help="run the target's model code from the Hub")
    described.add_argument("--rows", type=int, default=8, help="conversations in flight")
    described.add_argument(
        "--server", help="base address of an OpenAI-compatible server that answers instead, such as http://localhost:8000/v1"
    )
    described.add_argument("--model", help="the model's name on the server; its key is taken from OPENAI_API_KEY")
    described.add_argument("--concurrency", type=int, default=16, help="requests to the server at once")
    described.add_argument(
        "--omit", nargs="*", default=[], help="settings not to send where they are at their default: TGI refuses top_p=1"
    )
    described.add_argument("--timeout", type=float, default=120.0, help="seconds that a request may take")
    for name, default in regenerate.Settings.__dataclass_fields__.items():
        kind = type(default.default)
        described.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"default {default.default}")
    return described


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    if not arguments or arguments[0].startswith("-"):
        raise ValueError("expected a recipe first, for example recipes/medusa-tiny.yaml")
    return arguments[0], arguments[1:]


def _corpora(arguments: list[str]) -> tuple[Recipe, PreTrainedTokenizerBase, dict[str, Corpus]]:
    """The recipe's corpora; of the target only the tokenizer is read."""
    chosen = recipe.load(Recipe, *_split(arguments), shared=True)
    section = chosen.target
    tokenizer = read_tokenizer(section.path, revision=section.revision, trust_remote_code=section.trust_remote_code, key="target.path")
    if tokenizer is None:
        raise ValueError(f"target {section.path!r} has no tokenizer beside its weights; copy tokenizer.json there")
    chosen.data.give_template(tokenizer)
    return chosen, tokenizer, load_corpora(chosen.data.plan(), tokenizer, chosen.data.cache, chosen.data.num_proc)


def _contents(part: str, corpus: Corpus) -> Table:
    table = Table(title=f"{part}: {len(corpus):,} samples")
    for name in ("domain", "samples", "tokens", "mean length", "bear loss", "share of an epoch"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    taken = corpus.lengths[corpus.picks].sum()
    for number, name in [*enumerate(corpus.domains), (None, "all")]:
        own = torch.ones(len(corpus), dtype=torch.bool) if number is None else corpus.domain == number
        tokens, loss = int(corpus.lengths[own].sum()), int(corpus.supervised_tokens[own].sum())
        share = corpus.lengths[corpus.picks[own[corpus.picks]]].sum() / taken
        table.add_row(
            name,
            f"{int(own.sum()):,}",
            f"{tokens:,}",
            f"{tokens / max(1, int(own.sum())):.0f}",
            f"{loss / max(1, tokens):.0%}",
            f"{share:.0%}",
        )
    packed = PackedDataset(corpus, corpus.seq_len)
    table.caption = f"packed to {corpus.seq_len}: {len(packed):,} sequences an epoch, {packed.fill:.1%} full"
    return table


def _vocabularies(corpus: Corpus, vocab_size: int) -> Table:
    """What a draft vocabulary of each size would cover, and the τ beyond which no drafter of that vocabulary comes."""
    pieces = corpus.tokens_by_domain()
    counts = {name: vocab.count(ids, mask, vocab_size) for name, (ids, mask) in pieces.items()}
    pooled = torch.stack(list(counts.values())).sum(0)
    sizes = [size for size in (vocab_size >> shift for shift in (4, 3, 2, 1)) if size]
    mask = corpus.mask.clone()
    mask[corpus.offsets[:-1]] = False
    owner = torch.arange(len(corpus)).repeat_interleave(corpus.lengths)
    found = vocab.sweep(counts, sizes)
    most = [vocab.ceiling(corpus.ids, mask, vocab.choose(pooled, size), DEPTH, owner).tau for size in sizes]
    table = Table(title=f"loss-bearing tokens in a draft vocabulary of D of the {vocab_size:,} tokens", show_footer=True)
    table.add_column("domain", footer=f"τ at most (K = {DEPTH})")
    for size, tau in zip(sizes, most, strict=True):
        table.add_column(f"D = {size:,}", footer=f"{tau:.2f}", justify="right")
    for name in counts:
        table.add_row(name, *(f"{one.domains[name]:.1%}" for one in found))
    table.add_row("all", *(f"{one.overall:.1%}" for one in found))
    table.caption = "the rest is out of vocabulary: never drafted, a miss wherever the target says it"
    return table


def _report(corpus: Corpus) -> list[str]:
    found = corpus.report
    lines = [f"{found['read']:,} rows read"]
    for reason, (count, examples) in found["dropped"].items():
        lines.append(f"  {count:,} dropped: {reason} (for example {', '.join(examples)})")
    cut, read = found["cut rows"], max(1, found["read"])
    lines.append(f"  {cut:,} cut at {corpus.seq_len} tokens ({cut / read:.1%}), {found['cut tokens']:,} tokens lost with that")
    lines.append(f"  {found['unknown tokens']:,} tokens unknown to the tokenizer")
    return lines


def _coloured(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase, colours: bool) -> Text:
    text, start = Text(), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            piece = str(tokenizer.decode(ids[start:end]))
            text.append(piece if colours or not mask[start] else f"⟦{piece}⟧", style="green" if mask[start] else "dim")
            start = end
    return text


WORDS: dict[str, Callable[[list[str]], None]] = {
    "prepare": prepare,
    "show": show,
    "regenerate": run_regenerate,
    "capture": run_capture,
}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        raise SystemExit(0 if arguments else 2)
    if arguments[0] not in WORDS:
        raise ValueError(f"no command `data {arguments[0]}`; expected one of {', '.join(WORDS)}")
    WORDS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    exit_on_error(main, sys.argv[1:])
