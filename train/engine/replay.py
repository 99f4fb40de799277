"""Rows that the student makes itself while it is trained, among those of the data: a replay buffer on disk.

GKD and DistillSpec (https://arxiv.org/abs/2306.13649, https://arxiv.org/abs/2310.08461) train on what the student samples, so that it sees
its own mistakes; rows of `rejections` are the target's text, with loss only where the target rejected a draft.

A generation is made with the weights after `every` steps, and again each so many; steps g·every … (g+1)·every − 1 read generations g−keep …
g−1 (the first steps generation 0), all made long before they are read ahead. A generation is written group by group, each whole or not at all,
under a digest of the weights: a run that is killed makes what is missing, and only that.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.data.corpus import Corpus
from draftsmith.data.packing import PackedDataset
from draftsmith.inference import durable
from draftsmith.inference.decoder import Completion, Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.progress import Bar
from draftsmith.inference.sampler import Sampling, uniform
from draftsmith.models.target import Target
from draftsmith.train.engine.order import order_positions

GROUP = 16  # prompts decoded together: what a kill may cost
RUN = 4  # tokens of the runs that tell whether a sample repeats itself
LEAST = 0.5  # distinct runs of a sample that does not

Sample = tuple[list[int], list[bool]]  # token ids, and which of them bear loss
Maker = Callable[[list[list[int]], list[int], int], list[Sample]]  # prompts, noise keys, seed -> a sample of each


@dataclass(frozen=True, slots=True)
class Plan:
    """shares: of each kind among the rows · every: steps between generations · keep: generations that are read · prompts of each kind and
    generation · new_tokens: at most, after each · batch_size: rows of an optimizer step."""

    shares: dict[str, float]
    every: int
    keep: int
    prompts: int
    new_tokens: int
    batch_size: int


def samples(student: Target, temperature: float, new_tokens: int) -> Maker:
    """The student continues the prompts; all that it says bears loss."""

    def make(prompts: list[list[int]], keys: list[int], seed: int) -> list[Sample]:
        student.model.eval()
        answers = Decoder(student, slots=GROUP).generate(prompts, Sampling(temperature, seed=seed), new_tokens, requests=keys)
        return [
            (prompt + answer.tokens, [False] * len(prompt) + [True] * len(answer.tokens))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    return make


def rejections(target: Target, drafter: DraftModel, temperature: float, new_tokens: int) -> Maker:
    """The target continues them, with the student drafting; the tokens that corrected a draft bear loss."""

    def make(prompts: list[list[int]], keys: list[int], seed: int) -> list[Sample]:
        drafter.model.model.eval()
        sampling = Sampling(temperature, seed=seed, rule="rejection")
        answers = Decoder(target, drafter, slots=GROUP).generate(prompts, sampling, new_tokens, requests=keys)
        return [
            (prompt + answer.tokens, [False] * len(prompt) + corrected(answer)) for prompt, answer in zip(prompts, answers, strict=True)
        ]

    return make


def corrected(answer: Completion) -> list[bool]:
    """Of the tokens of an answer that a chain drafted for, which the target put in a draft's place."""
    found = []
    for round in answer.rounds:
        rejected = round.accepted < round.size  # of a chain of size − 1 drafts all but accepted − 1 failed
        found += [False] * (round.length - 1) + [rejected and round.length == round.accepted]
    return found


class Replay:
    """Rows of the data (`base`), a share of them replaced by rows of the buffer in `folder`; which, the row's number decides.

    makers: one for each kind of Plan.shares · model: whose weights a generation belongs to.

    Raises:
        ValueError: generations so close that their rows would be read ahead of them.
    """

    def __init__(self, base: PackedDataset, folder: Path, plan: Plan, makers: dict[str, Maker], model: nn.Module, vocab_size: int) -> None:
        if plan.every < 4:
            raise ValueError(f"distill.every={plan.every}: expected 4 steps between generations at least, since rows are read ahead")
        self.base, self.folder, self.plan, self.makers, self.model, self.vocab_size = base, folder, plan, makers, model, vocab_size
        self.corpus, self.key = base.corpus, base.key
        self.buffer: dict[tuple[str, int], PackedDataset | None] = {}  # None: nothing of it is of use

    def __len__(self) -> int:
        return len(self.base)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """As the data's own (`data/packing.py`)."""
        parts = [source.batch(torch.tensor([row])) for source, row in self._sources(rows)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def weight(self, rows: Tensor) -> float:
        """Loss-bearing tokens of these rows."""
        return sum(source.weight(torch.tensor([row])) for source, row in self._sources(rows))

    def close(self) -> None:
        """Nothing is held back."""

    def _sources(self, rows: Tensor) -> list[tuple[PackedDataset, int]]:
        """For each row the rows that it is taken from, and its number there."""
        steps = order_positions(rows, len(self.base), self.base.seed) // self.plan.batch_size
        coins = uniform(self.base.seed, rows, torch.zeros_like(rows), torch.arange(3)[:, None]).tolist()
        found = []
        for row, step, kind_coin, age_coin, row_coin in zip(rows.tolist(), steps.tolist(), *coins, strict=True):
            source, number = self.base, row
            for kind, share in self.plan.shares.items():
                if 0 <= kind_coin < share:
                    choice = self._generations(step)
                    source = self.buffer.get((kind, choice[int(age_coin * len(choice))])) or self.base
                    number = row if source is self.base else int(row_coin * len(source))
                kind_coin -= share
            found.append((source, number))
        return found

    def _generations(self, step: int) -> range:
        now = step // self.plan.every
        return range(max(0, now - self.plan.keep), max(1, now))

    def renew(self, step: int, hurry: Callable[[], bool], whole: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """After `step` steps: make the generation that is due, unless `hurry()` turns true between two groups, and read what rows need now.

        whole: within it `model` has its weights.
        """
        number, due = divmod(step, self.plan.every)
        if due == 0:
            with whole():
                self._make(number, hurry)
            PartialState().wait_for_everyone()
            if any(len(self._files(kind, number)) < self._groups for kind in self.plan.shares):
                return  # a rank was in haste: all are about to stop
        wanted = {*self._generations(step), *self._generations(step + self.plan.every)}
        self.buffer = {name: rows for name, rows in self.buffer.items() if name[1] in wanted}
        for kind in self.plan.shares:
            for one in sorted(wanted):
                if (kind, one) not in self.buffer:
                    self._read(kind, one)

    def _make(self, number: int, hurry: Callable[[], bool]) -> None:
        """Generation `number`, this rank's share of its groups."""
        state, folder = PartialState(), self._folder(number)
        made_by = digest(self.model)
        said = folder / "weights.json"
        if state.is_main_process and not (said.is_file() and json.loads(said.read_text())["sha256"] == made_by):
            shutil.rmtree(folder, ignore_errors=True)  # of other weights, or begun and not named yet
            folder.mkdir(parents=True)
            durable.replace(said, lambda part: part.write_text(json.dumps({"sha256": made_by})))
        state.wait_for_everyone()
        prompts = self._prompts(number)
        groups = [(kind, start) for kind in self.plan.shares for start in range(0, len(prompts), GROUP)]
        mine = groups[state.process_index :: state.num_processes]
        with Bar(f"samples after step {number * self.plan.every}", len(mine), show=state.is_main_process) as bar:
            for done, (kind, start) in enumerate(mine):
                file = folder / f"{kind}-{start:06d}.safetensors"
                if hurry():
                    return
                if not _whole(file):
                    some = prompts[start : start + GROUP]
                    keys = list(range(start, start + len(some)))
                    made = self.makers[kind](some, keys, self.base.seed + 1_000_003 * number)
                    durable.replace(file, lambda part, made=made: save_file(_tensors(made), part))
                bar.update(done + 1)

    def _read(self, kind: str, number: int) -> None:
        files = self._files(kind, number)
        if len(files) < self._groups:
            raise ValueError(
                f"{self._folder(number)} lacks samples that this run was trained on; restore it, or delete {self.folder.parent} to start again"
            )
        try:
            read = [sample for file in files for sample in _samples(load_file(file))]
        except SafetensorError as error:
            raise ValueError(f"samples in {self._folder(number)} cannot be read ({error}); restore them, or begin again") from None
        # A padded row of the student's head, or a prompt that ended at once, has nothing to teach.
        usable = [(ids, mask) for ids, mask in read if mask.any() and int(ids.max()) < self.vocab_size]
        varied = [(ids, mask) for ids, mask in usable if distinct(ids[-self.plan.new_tokens :]) >= LEAST]
        if len(varied) < len(read) and PartialState().is_main_process:
            print(self._said(kind, number, read, usable, varied), flush=True)
        found = None
        if varied:
            found = PackedDataset(
                _corpus(varied, self.corpus),
                self.base.seq_len,
                one_sample_each=self.base.one_sample_each,
                count_all_tokens=self.base.count_all_tokens,
            )
        self.buffer[kind, number] = found

    def _said(self, kind: str, number: int, read: Sequence, usable: Sequence, varied: Sequence) -> str:
        repeating = len(usable) - len(varied)
        text = (
            f"{kind} after step {number * self.plan.every}: {len(varied)} of {len(read)} samples are of use, {repeating} repeat themselves"
        )
        if repeating > len(read) // 2:
            text += "; the student degenerates: raise distill.sample_temperature, or lower its share for the first steps"
        return text if varied else text + "; rows of the data take their place"

    @property
    def _groups(self) -> int:
        return -(-self.plan.prompts // GROUP)

    def _files(self, kind: str, number: int) -> list[Path]:
        return sorted(self._folder(number).glob(f"{kind}-*.safetensors"))

    def _folder(self, number: int) -> Path:
        return self.folder / f"step-{number * self.plan.every:08d}"

    def _prompts(self, number: int) -> list[list[int]]:
        """Beginnings of the data's samples: up to an assistant's turn, or anywhere in a text."""
        generator = torch.Generator().manual_seed(self.base.seed * 1_000_003 + number)
        picks = self.corpus.epoch_samples[torch.randint(len(self.corpus.epoch_samples), (self.plan.prompts,), generator=generator)]
        found = []
        for pick, coin in zip(picks.tolist(), torch.rand(len(picks), generator=generator).tolist(), strict=True):
            ids, mask = self.corpus.sample(pick)
            room = max(1, min(len(ids), self.base.seq_len - self.plan.new_tokens))
            turns = (mask[1:] & ~mask[:-1]).nonzero().flatten() + 1
            cuts = turns[(turns > 1) & (turns <= room)]
            cut = int(cuts[int(coin * len(cuts))]) if len(cuts) else 1 + int(coin * (room - 1))
            found.append(ids[:cut].tolist())
        return found


def distinct(ids: Tensor) -> float:
    """Share of distinct runs of RUN tokens among those of ids [n]; 1 where there are few."""
    if len(ids) < 4 * RUN:
        return 1.0
    runs = ids.unfold(0, RUN, 1)
    return len(runs.unique(dim=0)) / len(runs)


def _tensors(made: list[Sample]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(ids) for ids, _ in made])
    ids = torch.tensor([token for ids, _ in made for token in ids], dtype=torch.int32)
    return {"ids": ids, "mask": torch.tensor([bears for _, mask in made for bears in mask]), "lengths": lengths}


def _samples(tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    lengths = tensors["lengths"].tolist()
    return list(zip(tensors["ids"].split(lengths), tensors["mask"].split(lengths), strict=True))


def _corpus(made: list[tuple[Tensor, Tensor]], like: Corpus) -> Corpus:
    lengths = torch.tensor([len(ids) for ids, _ in made])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids, mask = (torch.cat(parts) for parts in zip(*made, strict=True))
    domain = torch.zeros(len(made), dtype=torch.int16)
    return Corpus(ids, mask, offsets, domain, torch.arange(len(made)), ("samples",), like.pad_id, like.seq_len, like.key, {})


def _whole(file: Path) -> bool:
    """Whether this file of a generation can be read; one that a dying disk spoilt is made again."""
    try:
        return file.is_file() and bool(load_file(file))
    except SafetensorError:
        return False


def digest(model: nn.Module, trained: bool = True) -> str:
    """SHA-256 of what is trained, or of what is not."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad == trained:
            found.update(name.encode())
            found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
