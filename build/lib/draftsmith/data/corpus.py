"""A prepared corpus: samples of token ids with a loss mask, tokenised once and kept on disk."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.inference import durable


@dataclass(frozen=True, slots=True)
class Corpus:
    """Samples, one after the other.

    `ids` [tokens] int32 and `mask` [tokens] bool, True where a token bears loss (as something to predict); sample n is
    offsets[n]:offsets[n+1] of them, at most `seq_len` tokens. `domain` [samples] int16 numbers `domains`. `picks` [places] int64 are the
    samples of an epoch: each once, or as often as the mixture's weights want it. `key` changes with the sources' content, the tokenizer
    and whatever else the samples depend on. `report` says what was read, dropped and cut.
    """

    ids: Tensor
    mask: Tensor
    offsets: Tensor
    domain: Tensor
    picks: Tensor
    domains: tuple[str, ...]
    pad_id: int
    seq_len: int
    key: str
    report: dict[str, Any]
    lengths: Tensor = field(init=False)  # [samples]
    supervised_tokens: Tensor = field(init=False)  # [samples]: those that something before them could predict

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", self.offsets.diff())
        starts = self.offsets[:-1]
        counted = torch.cat([torch.zeros(1, dtype=torch.int64), self.mask.cumsum(0)])
        loss = counted[self.offsets[1:]] - counted[starts] - self.mask[starts].long()
        object.__setattr__(self, "supervised_tokens", loss)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        """ids [n] int32 and mask [n] bool of one sample."""
        here = slice(*self.offsets[number : number + 2].tolist())
        return self.ids[here], self.mask[here]

    def tokens_by_domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(ids, mask) of all samples of each domain, a document's first token without loss."""
        mask = self.mask.clone()
        mask[self.offsets[:-1]] = False
        owner = self.domain.repeat_interleave(self.lengths)
        return {name: (self.ids[owner == number], mask[owner == number]) for number, name in enumerate(self.domains)}

    def save(self, path: Path) -> None:
        """Write it to `path`, whole or not at all."""
        tensors = {"ids": self.ids, "mask": self.mask, "offsets": self.offsets, "domain": self.domain, "picks": self.picks}
        facts = {name: getattr(self, name) for name in ("domains", "pad_id", "seq_len", "key", "report")}
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(path, lambda part: save_file(tensors, part, {"corpus": json.dumps(facts)}))


def read(path: Path) -> Corpus | None:
    """The corpus that was saved at `path`, memory-mapped; None where there is none, or only a broken one, which is deleted."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["corpus"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError, KeyError):
        path.unlink()  # it costs only the tokenising to write it again
        return None
    return Corpus(**tensors, **facts | {"domains": tuple(facts["domains"])})
