"""Samples packed into sequences of S tokens in which no document sees another; the lengths fix the layout, each epoch fills it anew.

The documents of a sequence are separated by their position ids, which begin at 0 in each. From them transformers makes a block mask (SDPA), a
FlexAttention block mask or varlen bounds, whichever the target's attention takes.

Letters: B rows of a batch · S positions of a sequence.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from draftsmith.data.corpus import Corpus, without_first
from draftsmith.models.target import Target


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Bins of at most `seq_len` tokens, by best fit, the longest sample first.

    Args:
        lengths: tokens of each sample, 1 to `seq_len`. Samples of equal length are packed in the order of their indices.
        seq_len: tokens of a bin.

    Returns:
        Indices into `lengths` for each bin; each index occurs once.

    Raises:
        ValueError: a length outside 1..seq_len.
    """
    if lengths and not 1 <= min(lengths) <= max(lengths) <= seq_len:
        raise ValueError(f"got samples of {min(lengths)} to {max(lengths)} tokens; expected 1 to {seq_len}; cut them first")
    bins: list[list[int]] = []
    bins_by_space: dict[int, list[int]] = {}  # tokens left -> bins
    spaces = 0  # bit r is set where a bin has r tokens left
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1  # the least that is enough
            number = bins_by_space[space].pop()
            bins[number].append(index)
            if not bins_by_space[space]:
                spaces ^= 1 << space
        else:
            space, number = seq_len, len(bins)
            bins.append([index])
        if space > length:
            bins_by_space.setdefault(space - length, []).append(number)
            spaces |= 1 << (space - length)
    return bins


class PackedDataset:
    """A corpus as sequences of S tokens. Row number r is sequence r mod len(self) in epoch r div len(self) (`order.sample_rows`).

    The lengths alone fix which entries of an epoch share a sequence. In each epoch the samples of equal length are exchanged among their
    entries, as (seed, epoch) say.

    Args:
        corpus: the samples.
        seq_len: S.
        seed: of the exchange.
        one_sample_each: a sequence is a single sample, padded, for targets that cannot keep documents apart.
        count_all_tokens: the weight of a sequence is S, padding included, instead of its supervised tokens.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int = 0, one_sample_each: bool = False, count_all_tokens: bool = False) -> None:
        self.corpus, self.seq_len, self.seed, self.key = corpus, seq_len, seed, corpus.key
        self.one_sample_each, self.count_all_tokens = one_sample_each, count_all_tokens
        self.lengths = corpus.lengths[corpus.epoch_samples]  # [entries]
        entries = range(len(self.lengths))
        self.sequences = [[entry] for entry in entries] if one_sample_each else pack(self.lengths.tolist(), seq_len)
        # Entries sorted by length; `runs` are the bounds of the entries of each length.
        self.by_length = torch.argsort(self.lengths, stable=True)
        edges = torch.nonzero(torch.diff(self.lengths[self.by_length], prepend=torch.tensor([-1]))).flatten().tolist()
        self.runs = list(pairwise([*edges, len(self.by_length)]))
        self._last_epoch: tuple[int, Tensor] = (
            -1,
            corpus.epoch_samples,
        )  # a single attribute: a prefetching thread may be in another epoch

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def fill(self) -> float:
        """Share of the sequences' tokens that are not padding."""
        return float(self.lengths.sum()) / max(1, len(self.sequences) * self.seq_len)

    def samples(self, row: int) -> list[int]:
        """The corpus's samples in row number `row`, in their order there."""
        epoch, number = divmod(row, len(self.sequences))
        samples = self.epoch_samples(epoch)
        return [int(samples[entry]) for entry in self.sequences[number]]

    def epoch_samples(self, epoch: int) -> Tensor:
        """The sample of each entry of `epoch`, [entries] int64."""
        last_epoch, samples = self._last_epoch
        if epoch != last_epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            exchanged = self.by_length.clone()
            for start, end in self.runs:
                exchanged[start:end] = self.by_length[start:end][torch.randperm(end - start, generator=generator)]
            samples = torch.empty_like(self.corpus.epoch_samples)
            samples[self.by_length] = self.corpus.epoch_samples[exchanged]
            self._last_epoch = epoch, samples
        return samples

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The sequences of these row numbers.

        Returns:
            All [B,S]: `input_ids`; `loss_mask`; `position_ids`, from 0 in each document; `document`, its number in the sequence, −1 for padding;
            `sample_id`, −1 for padding, counted on from epoch to epoch, so that random draws can be keyed by it.
        """
        shape = (len(rows), self.seq_len)
        ids, mask = torch.full(shape, self.corpus.pad_id), torch.zeros(shape, dtype=torch.bool)
        positions, document, sample_id = (torch.full(shape, -1) for _ in range(3))
        for b, row in enumerate(rows.tolist()):
            end = 0
            for number, sample in enumerate(self.samples(row)):
                sample_ids, sample_mask = self.corpus.sample(sample)
                start, end = end, end + len(sample_ids)
                span = slice(start, end)
                ids[b, span], mask[b, span] = sample_ids.long(), sample_mask
                positions[b, span] = torch.arange(end - start)
                document[b, span], sample_id[b, span] = number, row // len(self.sequences) * len(self.corpus) + sample
            positions[b, end:] = torch.arange(self.seq_len - end)
        loss_mask = without_first(mask, positions == 0)
        return {"input_ids": ids, "loss_mask": loss_mask, "position_ids": positions, "document": document, "sample_id": sample_id}

    def weight(self, rows: Tensor) -> float:
        """Supervised tokens of these rows; with `count_all_tokens` all tokens, padding too."""
        if self.count_all_tokens:
            return float(len(rows) * self.seq_len)
        samples = [sample for row in rows.tolist() for sample in self.samples(row)]
        return float(self.corpus.supervised_tokens[samples].sum())

    def close(self) -> None:
        """There is nothing to write."""


class TokenStream:
    """A corpus joined into one text and cut into sequences of S tokens, without regard to documents, as pre-training takes it.

    Raises:
        ValueError: fewer than S tokens.
    """

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        self.key, self.seq_len = corpus.key, seq_len
        tokens = len(corpus.ids) // seq_len * seq_len
        if not tokens:
            raise ValueError(
                f"got {len(corpus.ids)} tokens of text; expected at least one sequence of data.seq_len={seq_len}; give more text"
            )
        self.ids = corpus.ids[:tokens].view(-1, seq_len)
        self.loss_mask = without_first(corpus.mask[:tokens], torch.arange(0, tokens, seq_len)).view(-1, seq_len)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """input_ids and loss_mask of these row numbers, both [B,S]."""
        rows = rows % len(self)
        return {"input_ids": self.ids[rows].long(), "loss_mask": self.loss_mask[rows]}

    def weight(self, rows: Tensor) -> float:
        """Supervised tokens of these rows."""
        return float(self.loss_mask[rows % len(self)].sum())

    def close(self) -> None:
        """There is nothing to write."""


@torch.no_grad()
def keeps_apart(target: Target) -> bool:
    """Whether two packed documents give the hidden states of each alone. It is tried out, since an architecture may ignore positions or masks."""
    n = max(2, min(24, target.max_positions // 2))
    ids = torch.randint(target.vocab_size, (2, n), generator=torch.Generator().manual_seed(0)).to(target.device)
    positions = torch.arange(2 * n, device=target.device)[None]

    def hidden(ids: Tensor, positions: Tensor) -> Tensor:
        return target.features({"input_ids": ids, "position_ids": positions}).hidden[0, -n:].double()

    alone = hidden(ids[1:], positions[:, :n])
    packed, joined = hidden(ids.view(1, -1), positions % n), hidden(ids.view(1, -1), positions)
    return bool((packed - alone).norm() < 0.1 * (joined - alone).norm())
