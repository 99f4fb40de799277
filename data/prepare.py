"""Sources become corpora: read, encode, drop what must not be trained on, mix, report.

What is dropped or cut is counted by reason. Loss masks that select nothing or everything stop the run; the error names the examples.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.data import conversations, corpus, prompts
from draftsmith.data.conversations import Source
from draftsmith.data.corpus import Corpus
from draftsmith.data.dedup import DedupFilter
from draftsmith.data.encoding import ALL_SUPERVISED, LOOPS, EncodedExample, Encoder, encoded
from draftsmith.data.text_files import check_regular, short
from draftsmith.inference.progress import Bar
from draftsmith.inference.terminal import printable
from draftsmith.models.identity import tokenizer_hash

FORMAT = 6  # of a prepared corpus: raise it when the same plan would give other samples
HELD_OUT_IN = 20  # one example in twenty, where no held-out source is named
LONGEST = 1 << 24  # tokens of a sample
MOST_DOMAINS = 1000  # of a corpus: results are reported by domain
MOST_REPEATS = 10_000  # of a source in an epoch
MAX_UNSUPERVISED = 0.01  # share of conversations that may have no supervised token


@dataclass(frozen=True, slots=True)
class CorpusPlan:
    """What a corpus is made of.

    Attributes:
        train: sources to train on.
        valid: held-out sources. Without any, one in HELD_OUT_IN examples of `train` is held out.
        seq_len: S, the most tokens of a sample.
        last_turn: only the last assistant turn of a conversation is supervised.
        exclude: files of evaluation prompts, or "chat" for the shipped ones. Examples that contain one are dropped.
        near: the Jaccard similarity from which two examples are near duplicates.
        loops: examples with an answer that repeats itself stay.
    """

    train: tuple[Source, ...]
    valid: tuple[Source, ...] = ()
    seq_len: int = 256
    last_turn: bool = False
    exclude: tuple[str, ...] = ()
    near: float = 0.8
    loops: bool = False

    def key(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """A hash of everything that the samples depend on, the sources' content included."""
        sources = [(part, source.model_dump_json(), conversations.fingerprint(source)) for part, source in self.sources()]
        excluded = [hashlib.sha256(_excluded(path).read_bytes()).hexdigest() for path in self.exclude]
        settings = (FORMAT, sources, bool(self.valid), excluded, self.seq_len, self.last_turn, self.near, self.loops)
        tokens = (tokenizer_hash(tokenizer), tokenizer.chat_template, sorted(tokenizer.special_tokens_map.items()))
        return hashlib.sha256(repr((settings, tokens)).encode()).hexdigest()[:20]

    def contents(self) -> dict[str, str]:
        """A hash of the content of each source, and of each file of `exclude`, by name. Raises ValueError for a source that does not exist."""
        sources = {" ".join(filter(None, (each.path, each.subset, each.split))): each for _, each in self.sources()}
        return {name: conversations.fingerprint(source)[:20] for name, source in sources.items()} | {
            path: hashlib.sha256(_excluded(path).read_bytes()).hexdigest()[:20] for path in self.exclude
        }

    @property
    def names(self) -> str:
        """The paths of all sources, for messages."""
        return ", ".join(source.path for _, source in self.sources())

    def sources(self) -> list[tuple[str, Source]]:
        """(part, source), the held-out ones first, so that of two equal examples the held-out one stays."""
        valid = self.valid or tuple(source for source in self.train if source.path == "stdlib")
        return [("valid", source) for source in valid] + [("train", source) for source in self.train]


def _excluded(path: str) -> Path:
    """A file of `exclude`. Raises ValueError if it is not there: without it, evaluation prompts would be trained on."""
    file = prompts.shipped_or_given(path)
    check_regular(file, "data.exclude")
    if not file.is_file():
        raise ValueError(f"data.exclude {path!r} not found; correct the name, or leave it out")
    return file


def load(plan: CorpusPlan, tokenizer: PreTrainedTokenizerBase, cache: str | Path, num_proc: int | None = None) -> dict[str, Corpus]:
    """The corpora "train" and "valid" of a plan, from the cache or prepared and put there.

    Args:
        plan: what they are made of.
        tokenizer: the target's tokenizer, with its chat template.
        cache: folder of prepared corpora.
        num_proc: worker processes; None takes one for each core.

    Raises:
        ValueError: a missing, broken or empty source; a missing file of `exclude`; a chat template for which there is no loss mask; more than
            1 % of conversations without supervised tokens, or one with only such, with the examples' ids.
    """
    if plan.seq_len > LONGEST:
        raise ValueError(f"data.seq_len={plan.seq_len}: expected at most {LONGEST:,}; lower it")
    key, folder = plan.key(tokenizer), Path(os.path.expanduser(cache))
    paths = {part: folder / f"{part}-{key}.safetensors" for part in ("train", "valid")}
    cached = {part: corpus.read(path) for part, path in paths.items()}
    corpora = {part: cached_corpus for part, cached_corpus in cached.items() if cached_corpus is not None}
    if len(corpora) == len(paths):
        return corpora
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise OSError(f"data.cache={folder}: {existing} is no folder that can be written; give another one")
    corpora = prepare_corpora(plan, key, tokenizer, num_proc)
    for part, path in paths.items():
        corpora[part].save(path)
    return corpora


def training_texts(plan: CorpusPlan) -> Iterator[str]:
    """The texts of a plan's training examples, to train a tokenizer on."""
    for source in plan.train:
        for number, example in enumerate(conversations.read(source)):
            if not held_out(plan, source, number) and example.text:
                yield example.text


def held_out(plan: CorpusPlan, source: Source, number: int) -> bool:
    """Whether example `number` of a training source is held out: one in HELD_OUT_IN, where nothing else says which."""
    return not plan.valid and source.path != "stdlib" and number % HELD_OUT_IN == HELD_OUT_IN - 1


def prepare_corpora(plan: CorpusPlan, key: str, tokenizer: PreTrainedTokenizerBase, num_proc: int | None) -> dict[str, Corpus]:
    """As `load`, without the cache."""
    encoder = Encoder(tokenizer, plan.seq_len, plan.last_turn, prompts.user_texts(plan.exclude), plan.loops)
    duplicates, tally = DedupFilter(plan.near), Tally()
    builders = {"train": CorpusBuilder(), "valid": CorpusBuilder()}
    names = plan.names
    with Bar(f"preparing {names}", None) as bar:
        for part, source in plan.sources():
            for number, example in enumerate(encoded(conversations.read(source, part), encoder, num_proc)):
                tally.read += 1
                if tally.keep(example, duplicates):
                    builders["valid" if held_out(plan, source, number) else part].add(example, source)
                bar.update(tally.read, f"{tally.read:,} examples read")
    tally.check(names)
    _hold_out_if_none(builders["train"], builders["valid"], plan, tally)
    return {
        "train": builders["train"].corpus(plan, key, encoder.end, tally, plan.train),
        "valid": builders["valid"].corpus(plan, key, encoder.end, tally, ()),
    }


@dataclass(slots=True)
class Tally:
    """How many examples were read, and how many were dropped for which reason."""

    read: int = 0
    chats: int = 0
    cut_examples: int = 0
    cut_tokens: int = 0
    unknown: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_ids: dict[str, list[str]] = field(default_factory=dict)  # of the first three, by reason
    unsupervised: list[str] = field(default_factory=list)
    all_supervised: list[str] = field(default_factory=list)

    def keep(self, example: EncodedExample, duplicates: DedupFilter) -> bool:
        """Whether an example is kept; it is counted either way."""
        self.chats += example.chat
        if example.chat and example.problem and example.problem != LOOPS:
            conversations = self.all_supervised if example.problem == ALL_SUPERVISED else self.unsupervised
            conversations.append(f"{printable(example.id, '')} ({example.problem})")
        reason = example.problem or duplicates.keep(example.signature)
        if reason:
            self.dropped[reason] += 1
            ids = self.dropped_ids.setdefault(reason, [])
            if len(ids) < 3:
                ids.append(example.id)
            return False
        self.cut_examples += example.cut > 0
        self.cut_tokens += example.cut
        self.unknown += example.unknown
        return True

    def check(self, names: str) -> None:
        """Raises ValueError for loss masks that select nothing or everything."""
        if self.all_supervised:
            raise ValueError(
                f"{names}: every token of {len(self.all_supervised)} of {self.chats} conversations is supervised, for example "
                f"{'; '.join(self.all_supervised[:3])}; look at them with `draftsmith data show`: the prompt is missing, or the chat template "
                "does not tell turns apart"
            )
        if len(self.unsupervised) > MAX_UNSUPERVISED * self.chats:
            raise ValueError(
                f"{names}: {len(self.unsupervised)} of {self.chats} conversations have no supervised token, for example "
                f"{'; '.join(self.unsupervised[:3])}; drop them, or raise data.seq_len if their answers begin too late"
            )

    def report(self) -> dict[str, object]:
        """What a corpus records of its preparation."""
        return {
            "read": self.read,
            "dropped": {reason: [count, self.dropped_ids[reason]] for reason, count in sorted(self.dropped.items())},
            "cut examples": self.cut_examples,
            "cut tokens": self.cut_tokens,
            "unknown tokens": self.unknown,
        }


class Sample(NamedTuple):
    """One piece of an example, and where it comes from."""

    ids: np.ndarray
    mask: np.ndarray
    domain: str
    source: Source
    chat: bool


class CorpusBuilder:
    """Collects the samples of one corpus."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def add(self, example: EncodedExample, source: Source) -> None:
        self.samples += [Sample(ids, mask, example.domain, source, example.chat) for ids, mask in example.pieces]

    def corpus(self, plan: CorpusPlan, key: str, pad_id: int, tally: Tally, mixed: tuple[Source, ...]) -> Corpus:
        """The corpus of the samples so far; `mixed` are the sources whose weights count."""
        lengths = torch.tensor([len(sample.ids) for sample in self.samples])
        domains = tuple(sorted({sample.domain for sample in self.samples}))
        if len(domains) > MOST_DOMAINS:
            raise ValueError(
                f"{len(domains):,} domains, such as {short(domains[0])}; expected at most {MOST_DOMAINS:,}: give the source a `domain` in data.train"
            )
        number = {name: n for n, name in enumerate(domains)}
        return Corpus(
            torch.from_numpy(np.concatenate([sample.ids for sample in self.samples])),
            torch.from_numpy(np.concatenate([sample.mask for sample in self.samples])),
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            torch.tensor([number[sample.domain] for sample in self.samples], dtype=torch.int16),
            mix(lengths, [sample.source for sample in self.samples], mixed),
            domains,
            pad_id,
            plan.seq_len,
            key,
            tally.report(),
        )


def mix(lengths: Tensor, owners: list[Source], sources: tuple[Source, ...]) -> Tensor:
    """The samples of an epoch, chosen so that the sources share its tokens by their weights.

    The epoch is as long as the source that lasts longest at its share. That source is taken once; the others are repeated, the last time in
    part, by a fixed draw. Without weights each sample is taken once.

    Args:
        lengths: tokens of each sample, [samples].
        owners: the source of each sample.
        sources: the sources whose weights count.

    Returns:
        Indices of samples, [entries] int64.

    Raises:
        ValueError: some sources have a weight and others not.
    """
    weighted = [source for source in sources if source.weight is not None]
    if not weighted:
        return torch.arange(len(owners))
    if len(weighted) < len(sources):
        raise ValueError(f"{len(weighted)} of {len(sources)} sources have a weight; give one to each or to none")
    members = {source: torch.tensor([n for n, owner in enumerate(owners) if owner == source], dtype=torch.int64) for source in sources}
    tokens = {source: int(lengths[members[source]].sum()) for source in sources if len(members[source])}
    weights = {source: source.weight or 0.0 for source in tokens}
    epoch_tokens = max(tokens[source] / weights[source] for source in tokens)
    chosen = []
    for number, source in enumerate(tokens):
        if epoch_tokens * weights[source] > MOST_REPEATS * tokens[source]:
            raise ValueError(
                f"the weights repeat {source.path} more than {MOST_REPEATS:,} times in an epoch; give weights of one magnitude"
            )
        times, rest = divmod(round(epoch_tokens * weights[source]), tokens[source])
        order = members[source][torch.randperm(len(members[source]), generator=torch.Generator().manual_seed(number))]
        chosen += [members[source].repeat(times), order[lengths[order].cumsum(0) <= rest]]
    return torch.cat(chosen)


def _hold_out_if_none(train: CorpusBuilder, valid: CorpusBuilder, plan: CorpusPlan, tally: Tally) -> None:
    """Hold out examples where no source has enough to hold one out: of conversations one in twenty over all sources, of texts the last twentieth of
    their pieces, since a book is a single document."""
    count = len(train.samples)
    reasons = ", ".join(f"{count:,} of {tally.read:,} dropped ({reason})" for reason, count in tally.dropped.most_common())
    remedy = f"{reasons}, give other data" if reasons else "the source is empty or too short, give more text or a smaller data.seq_len"
    if not train.samples or (count < 2 and not valid.samples):
        raise ValueError(f"{plan.names}: no examples to train on; {remedy}")
    if valid.samples:
        return
    if plan.valid:
        raise ValueError(f"data.valid={', '.join(source.path for source in plan.valid)}: no examples to evaluate on; {remedy}")
    if count >= HELD_OUT_IN and all(sample.chat for sample in train.samples):
        valid.samples = train.samples[HELD_OUT_IN - 1 :: HELD_OUT_IN]
        del train.samples[HELD_OUT_IN - 1 :: HELD_OUT_IN]
        return
    if any(sample.chat for sample in train.samples):
        dropped = f" ({reasons})" if reasons else ""
        raise ValueError(f"{plan.names}: {count} conversations are too few to hold some out{dropped}; name a held-out file in data.valid")
    keep = count - max(1, count // HELD_OUT_IN)
    train.samples, valid.samples = train.samples[:keep], train.samples[keep:]
