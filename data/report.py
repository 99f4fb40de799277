"""What `draftsmith data prepare` and `draftsmith data show` print about a corpus. Text of the data is no markup, and reaches no terminal raw."""

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftsmith.data.corpus import Corpus
from draftsmith.data.packing import PackedDataset
from draftsmith.inference.terminal import printable
from draftsmith.models import vocab

MOST_DROPPED = 0.1  # share of the examples that a training drops without a word
DEPTH = 4  # K of the bound that a draft vocabulary sets on τ


def console() -> Console:
    """A console that takes nothing for markup: a domain may be called `[/]` or `:smile:`."""
    return Console(markup=False, emoji=False, highlight=False)


def contents(part: str, corpus: Corpus) -> Table:
    """Samples and tokens of each domain, and how full the packed sequences are."""
    table = Table(title=f"{part}: {len(corpus):,} samples")
    for name in ("domain", "samples", "tokens", "mean length", "supervised", "share of an epoch"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    entries = corpus.epoch_samples
    epoch_tokens = corpus.lengths[entries].sum()
    for number, name in [*enumerate(corpus.domains), (None, "all")]:
        own = torch.ones(len(corpus), dtype=torch.bool) if number is None else corpus.domain == number
        samples, tokens, supervised = int(own.sum()), int(corpus.lengths[own].sum()), int(corpus.supervised_tokens[own].sum())
        mean, share = tokens / max(1, samples), corpus.lengths[entries[own[entries]]].sum() / epoch_tokens
        table.add_row(
            printable(name, ""), f"{samples:,}", f"{tokens:,}", f"{mean:.0f}", f"{supervised / max(1, tokens):.0%}", f"{share:.0%}"
        )
    packed = PackedDataset(corpus, corpus.seq_len)
    table.caption = f"packed to {corpus.seq_len}: {len(packed):,} sequences an epoch, {packed.fill:.1%} full"
    return table


def draft_vocabularies(corpus: Corpus, vocab_size: int) -> Table:
    """What draft vocabularies of V/16 to V/2 tokens cover, and the τ that no drafter with them can exceed."""
    tokens_by_domain = corpus.tokens_by_domain()
    counts = {name: vocab.count(ids, times, vocab_size) for name, (ids, times) in tokens_by_domain.items()}
    pooled = torch.stack(list(counts.values())).sum(0)
    sizes = [size for size in (vocab_size >> shift for shift in (4, 3, 2, 1)) if size]
    coverages = vocab.sweep(counts, sizes)
    supervised, owner = corpus.supervised(), torch.arange(len(corpus)).repeat_interleave(corpus.lengths)
    bounds = [vocab.ceiling(corpus.ids, supervised, vocab.choose(pooled, size), DEPTH, owner).tau for size in sizes]
    table = Table(title=f"supervised tokens in a draft vocabulary of D of the {vocab_size:,} tokens", show_footer=True)
    table.add_column("domain", footer=f"τ at most (K = {DEPTH})")
    for size, tau in zip(sizes, bounds, strict=True):
        table.add_column(f"D = {size:,}", footer=f"{tau:.2f}", justify="right")
    for name in counts:
        table.add_row(printable(name, ""), *(f"{coverage.domains[name]:.1%}" for coverage in coverages))
    table.add_row("all", *(f"{coverage.overall:.1%}" for coverage in coverages))
    table.caption = "the rest is out of vocabulary: never drafted, a miss wherever the target says it"
    return table


def preparation(corpus: Corpus) -> list[str]:
    """Lines on what was read, dropped and cut."""
    report = corpus.report
    lines = [f"{report['read']:,} examples read"]
    for reason, (count, ids) in report["dropped"].items():
        lines.append(f"  {count:,} dropped: {reason} (for example {printable(', '.join(ids), '')})")
    cut, share = report["cut examples"], report["cut examples"] / max(1, report["read"])
    lines.append(f"  {cut:,} cut at {corpus.seq_len} tokens ({share:.1%}), {report['cut tokens']:,} tokens lost with that")
    lines.append(f"  {report['unknown tokens']:,} tokens unknown to the tokenizer")
    return lines


def many_dropped(corpus: Corpus) -> str:
    """A line for a training: how many examples were dropped and why, where it is more than MOST_DROPPED of them; else ""."""
    read, dropped = corpus.report["read"], corpus.report["dropped"]
    total = sum(count for count, _ in dropped.values())
    if total <= MOST_DROPPED * read:
        return ""
    reasons = "; ".join(f"{count:,} {reason}" for reason, (count, _) in dropped.items())
    return f"{total:,} of {read:,} examples were dropped: {reasons}; `draftsmith data prepare` names some of each"


def marked_text(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase, colours: bool) -> Text:
    """The text of a sample: supervised tokens are green, or between ⟦ and ⟧ where there are no colours."""
    text, start = Text(), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            piece = printable(str(tokenizer.decode(ids[start:end])))
            text.append(piece if colours or not mask[start] else f"⟦{piece}⟧", style="green" if mask[start] else "dim")
            start = end
    return text
