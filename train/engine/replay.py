"""On-policy training: sequences that are sampled while a drafter is trained, mixed into those of the data from a buffer on disk.

GKD and DistillSpec (https://arxiv.org/abs/2306.13649, https://arxiv.org/abs/2310.08461) train on what the student samples, so that it sees
its own mistakes. There are two kinds of sampled sequences: `samples` are a student's text; `rejections` are the target's text, supervised
only where the target rejected a draft.

A generation is one set of such sequences. Generation g is made with the weights after g · refresh_every steps. Steps
g · refresh_every … (g+1) · refresh_every − 1 draw from generations g − keep_generations … g − 1 (the first steps from generation 0), so that
a generation is complete long before its sequences are fetched ahead. It is written in groups of prompts, each file complete or absent, next
to a digest of the weights and to what else it depends on: a run that was killed makes only what is missing.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.data.corpus import Corpus
from draftsmith.data.loops import repeats
from draftsmith.data.packing import PackedDataset
from draftsmith.inference import durable
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.progress import Bar
from draftsmith.inference.reading import read_json
from draftsmith.inference.sampler import Sampling, uniform
from draftsmith.inference.tree import StaticTree
from draftsmith.models.parallel import COLLECTIVE
from draftsmith.models.target import Target
from draftsmith.train.engine.order import order_positions
from draftsmith.train.engine.say import say
from draftsmith.train.recipe import Recipe

GROUP = 16  # prompts that are decoded together, and so the most that a kill can cost
SETTINGS = ("refresh_every", "keep_generations", "prompts", "new_tokens", "sample_temperature")  # keys that sampled sequences depend on

Sample = tuple[list[int], list[bool]]  # token ids, and which of them are supervised
Sampler = Callable[[list[list[int]], list[int], int], list[Sample]]  # prompts, noise keys, seed -> a sample of each


def check(recipe: Recipe, name: str, *kinds: str) -> None:
    """Check, before anything is loaded, that sequences can be sampled as a section of the recipe says.

    Args:
        recipe: of the run.
        name: of the section, which has the keys SETTINGS.
        kinds: its keys that are shares of the training sequences.

    Raises:
        ValueError: keys do not fit together; it names them.
    """
    section, target = getattr(recipe, name), recipe.target
    shares = {f"{name}.{kind}": getattr(section, kind) for kind in kinds if getattr(section, kind)}
    given = " and ".join(f"{key}={share}" for key, share in shares.items())
    if section.rejections and target.parallel in COLLECTIVE:
        raise ValueError(
            f"{name}.rejections={section.rejections} lets processes decode with the target apart, under target.parallel={target.parallel} all "
            "must run it at once; leave it out, or take target.parallel=none"
        )
    if sum(shares.values()) > 1:
        raise ValueError(f"{given} make more than all rows; lower one")
    if shares and recipe.features.mode != "online":
        raise ValueError(
            f"{given} with features.mode={recipe.features.mode}: the target has to read new text, of which no store has features; "
            "leave it out, or take features.mode=online"
        )
    if shares and section.new_tokens > recipe.data.seq_len // 2:
        raise ValueError(
            f"{name}.new_tokens={section.new_tokens} leaves few tokens for prompts in data.seq_len={recipe.data.seq_len}; "
            "make it half of that at most"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sampled, and when.

    Attributes:
        shares: share of the training sequences that is replaced by each kind of sample.
        refresh_every: steps between two generations; 4 at least, since rows are read ahead.
        keep_generations: newest generations that sequences are drawn from.
        prompts: prompts of a generation, for each kind.
        new_tokens: tokens sampled for each prompt, at most.
        batch_size: sequences of an optimizer step.
    """

    shares: dict[str, float]
    refresh_every: int
    keep_generations: int
    prompts: int
    new_tokens: int
    batch_size: int


def samples(student: Target, temperature: float, new_tokens: int) -> Sampler:
    """The student continues the prompts; all tokens of its answers are supervised. The student reads its last token where it lacks one."""
    last = student.vocab_size - 1

    def sample(prompts: list[list[int]], keys: list[int], seed: int) -> list[Sample]:
        read = [[min(token, last) for token in prompt] for prompt in prompts]
        answers = Decoder(student, slots=GROUP).generate(read, Sampling(temperature, seed=seed), new_tokens, requests=keys)
        return [
            (prompt + answer.tokens, [False] * len(prompt) + [True] * len(answer.tokens))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    return sample


def rejections(target: Target, drafter: DraftModel, temperature: float, new_tokens: int) -> Sampler:
    """The target continues the prompts with the help of a drafter, whose drafts are chains as deep as its trees; the tokens that replaced a
    rejected draft are supervised."""

    def sample(prompts: list[list[int]], keys: list[int], seed: int) -> list[Sample]:
        sampling = Sampling(temperature, seed=seed, rule="rejection")
        tree, drafter.tree_spec = drafter.tree_spec, StaticTree.chain(drafter.max_depth)
        try:
            answers = Decoder(target, drafter, slots=GROUP).generate(prompts, sampling, new_tokens, requests=keys)
        finally:
            drafter.tree_spec = tree
        return [
            (prompt + answer.tokens, [False] * len(prompt) + corrected(answer)) for prompt, answer in zip(prompts, answers, strict=True)
        ]

    return sample


def corrected(answer: Completion) -> list[bool]:
    """Mask of an answer's tokens with which the target corrected a rejected draft of a chain."""
    mask = []
    for round in answer.rounds:
        rejected = round.accepted < round.size  # a chain has size − 1 drafts, of which accepted − 1 passed
        mask += [False] * (round.length - 1) + [rejected and round.length == round.accepted]
    return mask


def mixed_in(
    recipe: Recipe,
    section: Any,
    base: PackedDataset,
    samplers: dict[str, tuple[float, Sampler]],
    model: nn.Module,
    target: Target,
) -> "Replay":
    """The training data `base` with sampled sequences among it, in train.output.

    Args:
        recipe: of the run.
        section: its section that says how much is sampled, and when.
        base: the training data.
        samplers: by kind, the share of the training sequences, and what samples them; a share of 0 samples none.
        model: as in `Replay`.
        target: of the run.
    """
    plan = Plan(
        shares={kind: share for kind, (share, _) in samplers.items() if share},
        refresh_every=section.refresh_every,
        keep_generations=section.keep_generations,
        prompts=section.prompts,
        new_tokens=section.new_tokens,
        batch_size=recipe.train.batch_size,
    )
    makers = {kind: sampler for kind, (_, sampler) in samplers.items()}
    identity = target.identity.to_dict() | {"name": ""}
    settings = {name: getattr(section, name) for name in SETTINGS}
    settings |= {"tree.depth": recipe.tree.depth} if "rejections" in plan.shares else {}  # rejections are of chains so deep
    settings |= {"shares": plan.shares, "data": base.key, "seed": base.seed, "target": identity}
    return Replay(base, Path(recipe.train.output) / "replay", plan, makers, model, target.vocab_size, settings)


class Replay:
    """The training data `base`, with a share of its sequences replaced by sampled ones. The number of a sequence decides which.

    Args:
        base: the training data.
        folder: of the buffer.
        plan: what is sampled, and when.
        samplers: one for each kind of `plan.shares`.
        model: the model whose weights a generation belongs to; while samples are made it is in evaluation mode.
        vocab_size: V; samples with other tokens are left out.
        settings: as JSON, what else samples depend on; those of other settings are made again.
    """

    def __init__(
        self,
        base: PackedDataset,
        folder: Path,
        plan: Plan,
        samplers: dict[str, Sampler],
        model: nn.Module,
        vocab_size: int,
        settings: dict[str, Any],
    ) -> None:
        self.base, self.folder, self.plan, self.samplers, self.model, self.vocab_size = base, folder, plan, samplers, model, vocab_size
        self.settings = settings
        self.corpus, self.key = base.corpus, base.key
        self.buffer: dict[tuple[str, int], PackedDataset | None] = {}  # None: no sample of this kind and generation is usable

    def __len__(self) -> int:
        return len(self.base)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The sequences of these numbers, in the format of `PackedDataset.batch`."""
        parts = [source.batch(torch.tensor([row])) for source, row in self._sources(rows)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def weight(self, rows: Tensor) -> float:
        """As that of `PackedDataset`."""
        return sum(source.weight(torch.tensor([row])) for source, row in self._sources(rows))

    def close(self) -> None:
        """Part of the interface of a data set; nothing is left to write."""

    def _sources(self, rows: Tensor) -> list[tuple[PackedDataset, int]]:
        """For the number of each sequence: the data set that it is taken from, and its number there."""
        steps = order_positions(rows, len(self.base), self.base.seed) // self.plan.batch_size
        draws = uniform(self.base.seed, rows, torch.zeros_like(rows), torch.arange(3)[:, None]).tolist()
        sources = []
        for row, step, kind_draw, age_draw, row_draw in zip(rows.tolist(), steps.tolist(), *draws, strict=True):
            source, number = self.base, row
            for kind, share in self.plan.shares.items():
                if 0 <= kind_draw < share:
                    generations = self._generations(step)
                    generation = generations[int(age_draw * len(generations))]
                    source = self.buffer.get((kind, generation)) or self.base
                    number = row if source is self.base else int(row_draw * len(source))
                kind_draw -= share
            sources.append((source, number))
        return sources

    def _generations(self, step: int) -> range:
        """The generations that a step draws from."""
        current = step // self.plan.refresh_every
        return range(max(0, current - self.plan.keep_generations), max(1, current))

    def refresh(
        self, step: int, stop_requested: Callable[[], bool], gathered: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Make the generation that is due after `step` steps, if one is, and load those that the next steps draw from.

        Args:
            step: number of steps taken.
            stop_requested: asked between two groups; once it is true, the generation is left incomplete until the run continues.
            gathered: a context within which `model` has its complete weights.

        Raises:
            ValueError: a generation that the run was trained on is missing or damaged.
        """
        number, rest = divmod(step, self.plan.refresh_every)
        if rest == 0:
            with gathered(), _evaluating(self.model):
                self._make(number, stop_requested)
            PartialState().wait_for_everyone()
            if any(len(self._files(kind, number)) < self._groups for kind in self.plan.shares):
                return  # a rank was asked to stop, so all are about to
        needed = {*self._generations(step), *self._generations(step + self.plan.refresh_every)}
        self.buffer = {name: sequences for name, sequences in self.buffer.items() if name[1] in needed}
        for kind in self.plan.shares:
            for generation in sorted(needed):
                if (kind, generation) not in self.buffer:
                    self.buffer[kind, generation] = self._load(kind, generation)

    def _make(self, number: int, stop_requested: Callable[[], bool]) -> None:
        """Write this rank's share of the groups of a generation."""
        state, folder = PartialState(), self._folder(number)
        made_with, record = {"sha256": digest(self.model), "settings": self.settings}, folder / "weights.json"
        if state.is_main_process and not (record.is_file() and read_json(record) == made_with):
            if folder.is_symlink() or (folder.exists() and not record.is_file() and any(folder.iterdir())):
                raise ValueError(f"{folder} holds no samples of Draftsmith (weights.json is missing); move it away")
            shutil.rmtree(folder, ignore_errors=True)  # of other weights or settings, or stopped before the record was written
            folder.mkdir(parents=True)
            durable.write_text(record, json.dumps(made_with))
        state.wait_for_everyone()
        prompts = self._prompts(number)
        groups = [(kind, start) for kind in self.plan.shares for start in range(0, len(prompts), GROUP)]
        own = groups[state.process_index :: state.num_processes]
        with Bar(f"samples after step {number * self.plan.refresh_every}", len(own), show=state.is_main_process) as bar:
            for done, (kind, start) in enumerate(own):
                file = folder / f"{kind}-{start:06d}.safetensors"
                if stop_requested():
                    return
                if not _readable(file):
                    group = prompts[start : start + GROUP]
                    keys = list(range(start, start + len(group)))
                    tensors = _tensors(self.samplers[kind](group, keys, self.base.seed + 1_000_003 * number))
                    durable.replace(file, lambda part, tensors=tensors: save_file(tensors, part))
                bar.update(done + 1)

    def _load(self, kind: str, number: int) -> PackedDataset | None:
        """The usable samples of a kind and generation as a data set; None where there are none."""
        files = self._files(kind, number)
        if len(files) < self._groups:
            raise ValueError(
                f"{self._folder(number)} lacks samples that this run was trained on; restore it, or delete {self.folder.parent} to start again"
            )
        try:
            everything = [sample for file in files for sample in _samples(load_file(file))]
        except SafetensorError as error:
            raise ValueError(f"samples in {self._folder(number)} cannot be read ({error}); restore them, or begin again") from None
        # A padded row of the student's head, or a prompt that ended at once, has nothing to teach.
        usable = [(ids, mask) for ids, mask in everything if mask.any() and int(ids.max()) < self.vocab_size]
        varied = [(ids, mask) for ids, mask in usable if not repeats(ids[mask].numpy())]
        if len(varied) < len(everything) and PartialState().is_main_process:
            say(self._report(kind, number, everything, usable, varied))
        if not varied:
            return None
        corpus = _corpus(varied, self.corpus)
        return PackedDataset(
            corpus, self.base.seq_len, one_sample_each=self.base.one_sample_each, count_all_tokens=self.base.count_all_tokens
        )

    def _report(self, kind: str, number: int, everything: Sequence, usable: Sequence, varied: Sequence) -> str:
        """One line on samples that are left out."""
        repetitive = len(usable) - len(varied)
        text = f"{kind} after step {number * self.plan.refresh_every}: {len(varied)} of {len(everything)} samples are of use, "
        text += f"{repetitive} repeat themselves"
        if repetitive > len(everything) // 2:
            text += "; the text degenerates: raise sample_temperature, or lower its share for the first steps"
        return text if varied else text + "; rows of the data take their place"

    @property
    def _groups(self) -> int:
        return -(-self.plan.prompts // GROUP)

    def _files(self, kind: str, number: int) -> list[Path]:
        return sorted(self._folder(number).glob(f"{kind}-*.safetensors"))

    def _folder(self, number: int) -> Path:
        return self.folder / f"step-{number * self.plan.refresh_every:08d}"

    def _prompts(self, number: int) -> list[list[int]]:
        """The prompts of a generation: random training examples, cut before an assistant's turn, or anywhere where they have no turns."""
        generator = torch.Generator().manual_seed(self.base.seed * 1_000_003 + number)
        samples = self.corpus.epoch_samples[torch.randint(len(self.corpus.epoch_samples), (self.plan.prompts,), generator=generator)]
        draws = torch.rand(len(samples), generator=generator).tolist()
        prompts = []
        for number, draw in zip(samples.tolist(), draws, strict=True):
            ids, mask = self.corpus.sample(number)
            longest = max(1, min(len(ids), self.base.seq_len - self.plan.new_tokens))
            turns = (mask[1:] & ~mask[:-1]).nonzero().flatten() + 1
            cuts = turns[(turns > 1) & (turns <= longest)]
            cut = int(cuts[int(draw * len(cuts))]) if len(cuts) else 1 + int(draw * (longest - 1))
            prompts.append(ids[:cut].tolist())
        return prompts


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _tensors(group: list[Sample]) -> dict[str, Tensor]:
    """Samples as they are stored: ids and mask of all of them, one after another, and their lengths."""
    lengths = torch.tensor([len(ids) for ids, _ in group])
    ids = torch.tensor([token for ids, _ in group for token in ids], dtype=torch.int32)
    return {"ids": ids, "mask": torch.tensor([supervised for _, mask in group for supervised in mask]), "lengths": lengths}


def _samples(tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `_tensors`: ids and mask of each sample."""
    lengths = tensors["lengths"].tolist()
    return list(zip(tensors["ids"].split(lengths), tensors["mask"].split(lengths), strict=True))


def _corpus(sampled: list[tuple[Tensor, Tensor]], like: Corpus) -> Corpus:
    """A corpus of these samples, with the padding and sequence length of `like`."""
    lengths = torch.tensor([len(ids) for ids, _ in sampled])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids, mask = (torch.cat(parts) for parts in zip(*sampled, strict=True))
    domain = torch.zeros(len(sampled), dtype=torch.int16)
    return Corpus(ids, mask, offsets, domain, torch.arange(len(sampled)), ("samples",), like.pad_id, like.seq_len, like.key, {})


def _readable(file: Path) -> bool:
    """Whether a group's file can be read. One that a failing disk has damaged is made again."""
    try:
        return file.is_file() and bool(load_file(file))
    except SafetensorError:
        return False


def digest(model: nn.Module, trained: bool = True) -> str:
    """SHA-256 of the weights that are trained, or of those that are not."""
    hash = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad == trained:
            hash.update(name.encode())
            hash.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return hash.hexdigest()
