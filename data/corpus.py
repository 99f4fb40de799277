"""A prepared corpus: samples of token ids with a loss mask, tokenised once and kept on disk."""

import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.inference import durable

TENSORS = dict.fromkeys(("ids", "mask", "offsets", "domain", "epoch_samples"))
FACTS = ("domains", "pad_id", "seq_len", "key", "report")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Samples of token ids with a loss mask, stored one after the other.

    Attributes:
        ids: [tokens] int32. Sample n is `ids[offsets[n] : offsets[n + 1]]`, at most `seq_len` tokens.
        mask: [tokens] bool, the loss mask: True where a token is to be learnt.
        offsets: [samples + 1] int64.
        domain: [samples] int16, an index into `domains`.
        epoch_samples: [entries] int64, the samples of an epoch: each once, or as often as the mixture's weights ask for.
        domains: names of the domains.
        pad_id: the token that fills a sequence up.
        seq_len: S, the longest sample.
        key: a hash of the sources' content, the tokenizer and everything else that the samples depend on.
        report: how many examples were read, dropped and cut.
        lengths: [samples] int64, tokens of each sample.
        supervised_tokens: [samples] int64, supervised tokens of each sample (see `supervised`).
    """

    ids: Tensor
    mask: Tensor
    offsets: Tensor
    domain: Tensor
    epoch_samples: Tensor
    domains: tuple[str, ...]
    pad_id: int
    seq_len: int
    key: str
    report: dict[str, Any]
    lengths: Tensor = field(init=False)
    supervised_tokens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", self.offsets.diff())
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), self.supervised().cumsum(0)])
        object.__setattr__(self, "supervised_tokens", sums[self.offsets[1:]] - sums[self.offsets[:-1]])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        """ids [n] int32 and mask [n] bool of one sample."""
        span = slice(*self.offsets[number : number + 2].tolist())
        return self.ids[span], self.mask[span]

    def supervised(self) -> Tensor:
        """[tokens] bool: the tokens that count in the loss."""
        return without_first(self.mask, self.offsets[:-1])

    def tokens_by_domain(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(ids [tokens], times [tokens] int16) of all samples of each domain: how often an epoch supervises each token, 0 for a prompt's."""
        repeats = torch.bincount(self.epoch_samples, minlength=len(self)).short()
        times, owner = self.supervised() * repeats.repeat_interleave(self.lengths), self.domain.repeat_interleave(self.lengths)
        return {name: (self.ids[owner == number], times[owner == number]) for number, name in enumerate(self.domains)}

    def save(self, path: Path) -> None:
        """Write the complete corpus to `path`, or nothing."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        facts = json.dumps({name: getattr(self, name) for name in FACTS})
        metadata = {"corpus": facts, "sha256": _checksum(path, tensors, facts)}
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(path, lambda part: save_file(tensors, part, metadata))


def without_first(mask: Tensor, first: Tensor) -> Tensor:
    """A copy of a loss mask in which the first token of each document is not supervised, since nothing before it could predict it.

    Args:
        mask: the loss mask, of any shape.
        first: where documents begin: indices of a flat mask, or a bool tensor of the mask's shape.
    """
    mask = mask.clone()
    mask[first] = False
    return mask


def read(path: Path) -> Corpus | None:
    """The corpus that was saved at `path`, memory-mapped; None where there is none, or a broken one, which is said on stderr."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        metadata, tensors = {}, {}
    # With its checksum it is what `save` wrote, so that nothing else needs a check.
    if tensors.keys() != TENSORS.keys() or metadata.get("sha256") != _checksum(path, tensors, metadata.get("corpus", "")):
        print(f"note: {path} is damaged or without a checksum; the data are prepared again", file=sys.stderr)
        return None
    facts = json.loads(metadata["corpus"])
    return Corpus(**tensors, **(facts | {"domains": tuple(facts["domains"])}))


def _checksum(path: Path, tensors: dict[str, Tensor], facts: str) -> str:
    """Of content and name: the name holds the part and the key, so a file that was renamed is as good as a damaged one."""
    digest = hashlib.sha256(f"{path.stem} {facts}".encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
