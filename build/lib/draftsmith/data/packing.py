"""Samples packed into rows of S tokens, without one seeing another: fixed by the lengths, filled anew each epoch.

A row's documents are told apart by their position ids, which begin at 0 in each: from them transformers makes a block mask (SDPA), a
FlexAttention block mask or varlen bounds, as the target's attention wants it.

Letters: B rows of a batch · S positions of a row.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from draftsmith.data.corpus import Corpus
from draftsmith.models.target import Target


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Bins of at most `seq_len` tokens: best fit, longest first. Indices into `lengths`, each once; ties go by index.

    Raises ValueError for a length outside 1..seq_len.
    """
    if lengths and not 1 <= min(lengths) <= max(lengths) <= seq_len:
        raise ValueError(f"got samples of {min(lengths)} to {max(lengths)} tokens; expected 1 to {seq_len}; cut them first")
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}  # tokens left -> rows
    rooms = 0  # bit r: some row has r tokens left
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        fitting = rooms >> length
        left = length + (fitting & -fitting).bit_length() - 1 if fitting else seq_len  # the tightest room there is
        if fitting:
            row = room[left].pop()
            rows[row].append(index)
            if not room[left]:
                rooms ^= 1 << left
        else:
            row = len(rows)
            rows.append([index])
        if left > length:
            room.setdefault(left - length, []).append(row)
            rooms |= 1 << (left - length)
    return rows


class PackedDataset:
    """A corpus as rows of S tokens. Row number r stands for row r mod rows, in epoch r div rows (`order.sample_rows`).

    The places in the rows are fixed by the lengths alone; in each epoch samples of equal length change places, by (seed, epoch).
    one_each: a sample a row, padded, for targets that cannot keep documents apart · all_count: a row weighs all its S tokens.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int = 0, one_each: bool = False, all_count: bool = False) -> None:
        self.corpus, self.seq_len, self.seed, self.key, self.one_each, self.all_count = (
            corpus,
            seq_len,
            seed,
            corpus.key,
            one_each,
            all_count,
        )
        self.lengths = corpus.lengths[corpus.picks]  # [places]
        self.rows = [[place] for place in range(len(self.lengths))] if one_each else pack(self.lengths.tolist(), seq_len)
        # Places of equal length are neighbours in `order`; runs hold where each length begins and ends.
        self.order = torch.argsort(self.lengths, stable=True)
        edges = torch.nonzero(torch.diff(self.lengths[self.order], prepend=torch.tensor([-1]))).flatten().tolist()
        self.runs = list(pairwise([*edges, len(self.order)]))
        self._dealt: tuple[int, Tensor] = (-1, corpus.picks)  # one attribute: a thread that reads ahead may be in another epoch

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fill(self) -> float:
        """Share of the rows' tokens that are not padding."""
        return float(self.lengths.sum()) / max(1, len(self.rows) * self.seq_len)

    def samples(self, row: int) -> list[int]:
        """The corpus's samples in row number `row`, in their order there."""
        epoch, row = divmod(row, len(self.rows))
        picks = self.picks(epoch)
        return [int(picks[place]) for place in self.rows[row]]

    def picks(self, epoch: int) -> Tensor:
        """The sample of each place in `epoch`, [places]."""
        dealt_epoch, picks = self._dealt
        if epoch != dealt_epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            dealt = self.order.clone()
            for start, end in self.runs:
                dealt[start:end] = self.order[start:end][torch.randperm(end - start, generator=generator)]
            picks = torch.empty_like(self.corpus.picks)
            picks[self.order] = self.corpus.picks[dealt]
            self._dealt = epoch, picks
        return picks

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """input_ids, loss_mask, position_ids (from 0 in each document), document (number in its row) and sample_id (counted on from epoch to
        epoch, to key random draws by), all [B,S].

        Padding is a document of its own, number −1. A document's first token bears no loss: nothing there could predict it.
        """
        shape = (len(rows), self.seq_len)
        ids, mask = torch.full(shape, self.corpus.pad_id), torch.zeros(shape, dtype=torch.bool)
        positions, document, sample_id = (torch.full(shape, -1) for _ in range(3))
        for b, row in enumerate(rows.tolist()):
            at = 0
            for number, sample in enumerate(self.samples(row)):
                start, end = self.corpus.offsets[sample : sample + 2].tolist()
                here = slice(at, at := at + end - start)
                ids[b, here], mask[b, here] = self.corpus.ids[start:end].long(), self.corpus.mask[start:end]
                mask[b, here.start] = False
                positions[b, here] = torch.arange(end - start)
                document[b, here], sample_id[b, here] = number, row // len(self.rows) * len(self.corpus) + sample
            positions[b, at:] = torch.arange(self.seq_len - at)
        return {"input_ids": ids, "loss_mask": mask, "position_ids": positions, "document": document, "sample_id": sample_id}

    def weight(self, rows: Tensor) -> float:
        """Loss-bearing tokens of these rows; with `all_count` all tokens, padding too."""
        if self.all_count:
            return float(len(rows) * self.seq_len)
        samples = [sample for row in rows.tolist() for sample in self.samples(row)]
        return float(self.corpus.supervised_tokens[samples].sum())

    def close(self) -> None:
        """Nothing is held back."""


class TokenStream:
    """A corpus joined into one text and cut into rows of S, without regard to documents: what pre-training takes."""

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        self.key, self.seq_len = corpus.key, seq_len
        rows = len(corpus.ids) // seq_len
        if not rows:
            raise ValueError(f"got {len(corpus.ids)} tokens of text; expected at least a row of data.seq_len={seq_len}: give more text")
        self.ids, self.mask = (flat[: rows * seq_len].view(rows, seq_len) for flat in (corpus.ids, corpus.mask))

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """input_ids and loss_mask [B,S]."""
        rows = rows % len(self)
        mask = self.mask[rows]
        mask[:, 0] = False
        return {"input_ids": self.ids[rows].long(), "loss_mask": mask}

    def weight(self, rows: Tensor) -> float:
        """Loss-bearing tokens of these rows."""
        return float(self.mask[rows % len(self), 1:].sum())

    def close(self) -> None:
        """Nothing is held back."""


@torch.no_grad()
def keeps_apart(target: Target) -> bool:
    """Whether two packed documents give the hidden states of each alone, tried out: an architecture may ignore positions or masks."""
    n = max(2, min(24, target.max_positions // 2))
    ids = torch.randint(target.vocab_size, (2, n), generator=torch.Generator().manual_seed(0)).to(target.device)
    positions = torch.arange(2 * n, device=target.device)[None]

    def hidden(ids: Tensor, positions: Tensor) -> Tensor:
        return target.features({"input_ids": ids, "position_ids": positions}).hidden[0, -n:].double()

    alone = hidden(ids[1:], positions[:, :n])
    packed, joined = hidden(ids.view(1, -1), positions % n), hidden(ids.view(1, -1), positions)
    return bool((packed - alone).norm() < 0.1 * (joined - alone).norm())
