"""Sources -> corpora: read, encode in worker processes, drop what must not be trained on, mix, report.

What was dropped and cut is counted by reason; masks that select nothing or everything stop the run with the rows that have them.
"""

import hashlib
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.data import conversations, corpus, prompts
from draftsmith.data.chat import Template, Unusable
from draftsmith.data.conversations import Conversation, Source
from draftsmith.data.corpus import Corpus
from draftsmith.data.dedup import DedupFilter, MinHasher, Signature
from draftsmith.inference.progress import Bar
from draftsmith.models.identity import tokenizer_hash

FORMAT = 1  # of a prepared corpus: raise it when the same plan would give other samples
HELD_OUT_IN = 20  # one row in twenty, where no held-out source is named
CHUNK = 256  # rows of one task of a worker
SINGLE_RANK = 2048  # rows that are encoded here before workers are worth starting
MOST_SILENT = 0.01  # share of conversations that may bear no loss


@dataclass(frozen=True, slots=True)
class Plan:
    """What a corpus is made of. `exclude`: files of evaluation prompts; `near`: the Jaccard similarity of duplicates."""

    train: tuple[Source, ...]
    valid: tuple[Source, ...] = ()
    seq_len: int = 256
    last_turn: bool = False
    exclude: tuple[str, ...] = ()
    near: float = 0.8

    def key(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """A hash of all that the samples depend on, the sources' content included."""
        sources = [(part, source.model_dump_json(), conversations.fingerprint(source)) for part, source in self.sources()]
        excluded = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in self.exclude if Path(path).is_file()]
        words = (FORMAT, sources, excluded, self.seq_len, self.last_turn, self.near)
        tokens = (tokenizer_hash(tokenizer), tokenizer.chat_template, tokenizer.eos_token_id)
        return hashlib.sha256(repr((words, tokens)).encode()).hexdigest()[:20]

    def sources(self) -> list[tuple[str, Source]]:
        """(part, source), held-out ones first: of two equal rows the held-out one stays."""
        valid = self.valid or tuple(source for source in self.train if source.path == "stdlib")
        return [("valid", source) for source in valid] + [("train", source) for source in self.train]


def load(plan: Plan, tokenizer: PreTrainedTokenizerBase, cache: str | Path, num_proc: int | None = None) -> dict[str, Corpus]:
    """The corpora "train" and "valid" of a plan: from `cache` if they were made before, else made and kept there.

    num_proc: worker processes; None takes one for each core.

    Raises:
        ValueError: a missing, broken or empty source; a chat template whose mask cannot be derived; more than 1 % of conversations without
            loss, or one with nothing but loss, with the rows' ids.
    """
    key = plan.key(tokenizer)
    paths = {part: Path(cache) / f"{part}-{key}.safetensors" for part in ("train", "valid")}
    found = {part: corpus.read(path) for part, path in paths.items()}
    if all(found.values()):
        return {part: one for part, one in found.items() if one is not None}
    made = prepare(plan, key, tokenizer, num_proc)
    for part, path in paths.items():
        made[part].save(path)
    return made


def training_texts(plan: Plan) -> Iterator[str]:
    """The texts of a plan's training rows, for a tokenizer."""
    for source in plan.train:
        for number, row in enumerate(conversations.read(source)):
            if not held_out(plan, source, number) and row.text:
                yield row.text


def held_out(plan: Plan, source: Source, number: int) -> bool:
    """Whether row `number` of a training source is held out: one in HELD_OUT_IN, where nothing else says what is."""
    return not plan.valid and source.path != "stdlib" and number % HELD_OUT_IN == HELD_OUT_IN - 1


def prepare(plan: Plan, key: str, tokenizer: PreTrainedTokenizerBase, num_proc: int | None) -> dict[str, Corpus]:
    """As `load`, without the cache."""
    encoder = Encoder(tokenizer, plan.seq_len, plan.last_turn, tuple(prompt.text for path in plan.exclude for prompt in prompts.load(path)))
    sieve, tally, parts = DedupFilter(plan.near), Tally(), {"train": Part(), "valid": Part()}
    names = ", ".join(source.path for _, source in plan.sources())
    with Bar(f"preparing {names}", None) as bar:
        for part, source in plan.sources():
            for number, row in enumerate(encoded(conversations.read(source, part), encoder, num_proc)):
                tally.read += 1
                if tally.keep(row, sieve):
                    parts["valid" if held_out(plan, source, number) else part].add(row, source)
                bar.update(tally.read, f"{tally.read:,} rows read")
    tally.check(names)
    _hold_out_a_tail(parts, names)
    weighed = {"train": plan.train, "valid": ()}
    return {name: part.corpus(plan, key, encoder.end, tally, weighed[name]) for name, part in parts.items()}


class Row(NamedTuple):
    """A conversation or text, encoded: `pieces` of (ids int32, mask bool), each at most S tokens; or the `problem` with it."""

    id: str
    domain: str
    chat: bool
    pieces: list[tuple[np.ndarray, np.ndarray]]
    problem: str
    cut: int  # tokens that did not fit
    unknown: int  # tokens that the tokenizer has no entry for
    signature: Signature | None


class Encoder:
    """A conversation or a text -> Row. Pickled to the workers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seq_len: int, last_turn: bool, prompts: tuple[str, ...]) -> None:
        self.tokenizer, self.seq_len = tokenizer, seq_len
        self.template = Template(tokenizer, last_turn) if tokenizer.chat_template else None
        self.signer = MinHasher(prompts)
        if not isinstance(tokenizer.eos_token_id, int):
            raise ValueError("the target's tokenizer has no end-of-text token, which ends a text; set its eos_token")
        self.end = tokenizer.eos_token_id
        # What the tokenizer puts before any text: mostly nothing, or BOS, without which some models' features are of no use.
        self.prefix = [token for token in tokenizer.encode("") if token != self.end or token == tokenizer.bos_token_id][:1]

    def __call__(self, row: Conversation) -> Row:
        signature = self.signer.sign(row)
        try:
            ids, mask = self._tokens(row)
        except Unusable as error:
            return Row(row.id, row.domain, True, [], error.reason, 0, 0, signature)
        chat = row.messages is not None
        size = self.seq_len
        whole = len(ids) <= size
        if chat or row.prompt:
            cuts, cut = [slice(0, size)], max(0, len(ids) - size)
        else:
            cuts, cut = [slice(start, start + size) for start in range(0, len(ids), size)], 0
        pieces = [(np.array(ids[c], dtype=np.int32), np.array(mask[c], dtype=bool)) for c in cuts]
        problem = ""
        if not any(mask[1:]):
            problem = "no token bears loss"
        elif not any(piece[1:].any() for _, piece in pieces):
            problem = f"the answer begins past {size} tokens"
        elif chat and whole and all(mask[1:]):
            problem = ALL_ONE
        unknown = self.tokenizer.unk_token_id
        unknowns = ids.count(unknown) if isinstance(unknown, int) else 0
        return Row(row.id, row.domain, chat, pieces, problem, cut, unknowns, signature)

    def _tokens(self, row: Conversation) -> tuple[list[int], list[bool]]:
        if row.messages is not None and self.template:
            return self.template.encode(row.messages, row.tools)
        if not row.text:
            Template(self.tokenizer)  # raises: there is none
        try:
            found = self.tokenizer(row.text, add_special_tokens=False, return_offsets_mapping=bool(row.prompt), verbose=False)
        except (UnicodeEncodeError, TypeError):
            raise Unusable("text that is no valid Unicode") from None
        ids = list(found["input_ids"])
        mask = [end > row.prompt for _, end in found["offset_mapping"]] if row.prompt else [True] * len(ids)
        room, before = self.seq_len - len(self.prefix), len(self.prefix)
        ids, mask = [*ids, self.end], [*mask, True]
        if not before:
            return ids, mask
        pieces = range(0, len(ids), room)
        return (
            list(chain.from_iterable(self.prefix + ids[start : start + room] for start in pieces)),
            list(chain.from_iterable([False] * before + mask[start : start + room] for start in pieces)),
        )


ALL_ONE = "every token bears loss"


@dataclass(slots=True)
class Tally:
    """What was read, and what was dropped why."""

    read: int = 0
    chats: int = 0
    cut_rows: int = 0
    cut_tokens: int = 0
    unknown: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    all_one: list[str] = field(default_factory=list)

    def keep(self, row: Row, sieve: DedupFilter) -> bool:
        """Whether a row is kept; it is counted either way."""
        self.chats += row.chat
        if row.chat and row.problem:
            (self.all_one if row.problem == ALL_ONE else self.silent).append(f"{row.id} ({row.problem})")
        reason = row.problem or (sieve.keep(row.signature) if row.signature else "")
        if reason:
            self.dropped[reason] += 1
            self.examples.setdefault(reason, []).append(row.id)
            del self.examples[reason][3:]
            return False
        self.cut_rows += row.cut > 0
        self.cut_tokens += row.cut
        self.unknown += row.unknown
        return True

    def check(self, names: str) -> None:
        """Raises ValueError for masks that select nothing or everything."""
        if self.all_one:
            raise ValueError(
                f"{names}: every token of {len(self.all_one)} of {self.chats} conversations bears loss, for example {'; '.join(self.all_one[:3])}; "
                "look at them with `draftsmith data show`: the prompt is missing, or the chat template does not tell turns apart"
            )
        if len(self.silent) > MOST_SILENT * self.chats:
            raise ValueError(
                f"{names}: {len(self.silent)} of {self.chats} conversations bear no loss, for example {'; '.join(self.silent[:3])}; "
                "drop them, or raise data.seq_len if their answers begin too late"
            )


class Part:
    """The samples of one split as they come."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.mask: list[np.ndarray] = []
        self.domain: list[str] = []
        self.source: list[Source] = []
        self.chat: list[bool] = []

    def add(self, row: Row, source: Source) -> None:
        for ids, mask in row.pieces:
            self.ids.append(ids)
            self.mask.append(mask)
            self.domain.append(row.domain)
            self.source.append(source)
            self.chat.append(row.chat)

    def corpus(self, plan: Plan, key: str, pad_id: int, tally: Tally, weigh: tuple[Source, ...]) -> Corpus:
        lengths = torch.tensor([len(ids) for ids in self.ids])
        domains = tuple(sorted(set(self.domain)))
        number = {name: n for n, name in enumerate(domains)}
        report = {
            "read": tally.read,
            "dropped": {reason: [count, tally.examples[reason]] for reason, count in sorted(tally.dropped.items())},
            "cut rows": tally.cut_rows,
            "cut tokens": tally.cut_tokens,
            "unknown tokens": tally.unknown,
        }
        return Corpus(
            torch.from_numpy(np.concatenate(self.ids)),
            torch.from_numpy(np.concatenate(self.mask)),
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            torch.tensor([number[name] for name in self.domain], dtype=torch.int16),
            mix(lengths, self.source, weigh),
            domains,
            pad_id,
            plan.seq_len,
            key,
            report,
        )


def mix(lengths: Tensor, source: list[Source], sources: tuple[Source, ...]) -> Tensor:
    """The samples of an epoch, so that sources share its tokens by their weights.

    The source that its share makes last longest is taken once, whole; the others are repeated, the last time in part, by a fixed draw.
    Without weights each sample is taken once. Raises ValueError where some sources have a weight and others not.
    """
    weighted = [one for one in sources if one.weight is not None]
    if not weighted:
        return torch.arange(len(source))
    if len(weighted) < len(sources):
        raise ValueError(f"{len(weighted)} of {len(sources)} sources have a weight; give one to each or to none")
    members = {one: torch.tensor([n for n, owner in enumerate(source) if owner == one], dtype=torch.int64) for one in sources}
    tokens = {one: int(lengths[members[one]].sum()) for one in sources if len(members[one])}
    weights = {one: one.weight or 0.0 for one in tokens}
    epoch = max(tokens[one] / weights[one] for one in tokens)
    picks = []
    for number, one in enumerate(tokens):
        times, rest = divmod(round(epoch * weights[one]), tokens[one])
        order = members[one][torch.randperm(len(members[one]), generator=torch.Generator().manual_seed(number))]
        part = order[lengths[order].cumsum(0) <= rest]
        picks += [members[one].repeat(times), part]
    return torch.cat(picks)


def encoded(rows: Iterable[Conversation], encoder: Encoder, num_proc: int | None) -> Iterator[Row]:
    """Each row, encoded, in order: here for a few, in `num_proc` processes for many."""
    rows = iter(rows)
    yield from map(encoder, islice(rows, SINGLE_RANK))
    chunks = iter(lambda: list(islice(rows, CHUNK)), [])
    first = next(chunks, None)
    if first is None:
        return
    num_proc = num_proc or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    if num_proc == 1:
        for chunk in chain([first], chunks):
            yield from map(encoder, chunk)
        return
    # Not fork: a child of a process whose tokenizer or torch has threads hangs. The fork server has none and imports once.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__])
    ahead: deque = deque()
    with ProcessPoolExecutor(num_proc, context, _begin, (encoder,)) as pool:
        try:
            begun = pool.submit(_encode, [])
            for chunk in chain([first], chunks):
                if not begun.done():  # importing takes seconds, in which much can be encoded here
                    yield from map(encoder, chunk)
                    continue
                ahead.append(pool.submit(_encode, chunk))
                if len(ahead) > 2 * num_proc:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        except BrokenProcessPool:
            raise OSError("a worker process died while it tokenised (out of memory?); lower data.num_proc and run it again") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_encoder: list[Encoder] = []  # a worker's own


def _begin(encoder: Encoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    _encoder[:] = [encoder]


def _encode(rows: list[Conversation]) -> list[Row]:
    return list(map(_encoder[0], rows))


def _hold_out_a_tail(parts: dict[str, Part], names: str) -> None:
    """Where too few rows were read to hold some out, the last twentieth of a text's pieces is: a book is one document."""
    train, valid = parts["train"], parts["valid"]
    if valid.ids or len(train.ids) < 2:
        if not valid.ids or not train.ids:
            raise ValueError(f"{names}: no rows to train on; the source is empty or too short, give more text or a smaller data.seq_len")
        return
    if any(train.chat):
        raise ValueError(f"{names}: {len(train.ids)} conversations are too few to hold some out; name a held-out file in data.valid")
    keep = len(train.ids) - max(1, len(train.ids) // HELD_OUT_IN)
    for name in ("ids", "mask", "domain", "source", "chat"):
        samples = getattr(train, name)
        setattr(valid, name, samples[keep:])
        setattr(train, name, samples[:keep])
