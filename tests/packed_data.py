"""Corpora of random tokens for tests of packing, features and training."""

import torch

from draftsmith.data.corpus import Corpus
from draftsmith.data.packing import PackedDataset


def corpus_of(lengths, vocab=48, seq_len=32, seed=0, epoch_samples=None) -> Corpus:
    generator = torch.Generator().manual_seed(seed)
    total, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(vocab, (total,), generator=generator, dtype=torch.int32)
    mask = torch.rand(total, generator=generator) < 0.7
    epoch_samples = torch.arange(len(lengths)) if epoch_samples is None else torch.tensor(epoch_samples)
    return Corpus(ids, mask, offsets, torch.zeros(len(lengths), dtype=torch.int16), epoch_samples, ("all",), 0, seq_len, "key", {})


LENGTHS = [5, 9, 32, 1, 14, 9, 9, 27, 3, 3, 3, 18, 2, 14, 9, 30, 21, 5]


def rows_of_24(vocab, copies=1) -> PackedDataset:
    """Documents of several lengths."""
    return PackedDataset(corpus_of([9, 12, 3, 2, 4, 11, 21, 7] * copies, seq_len=24, vocab=vocab), 24)


def packed(vocab, prompt=3, share=0.8):
    """All of `rows_of_24` as one batch. Of each document the first `prompt` tokens are not supervised; of the later ones a share is."""
    rows = rows_of_24(vocab)
    batch = rows.batch(torch.arange(len(rows)))
    drawn = torch.rand(batch["document"].shape, generator=torch.Generator().manual_seed(1)) < share
    batch["loss_mask"] = (batch["document"] >= 0) & (batch["position_ids"] >= prompt) & drawn
    return batch


def two_rows(vocab, length=24):
    """A packed batch [2,S]; the first row has two documents, the second padding."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(vocab, (2, length), generator=generator)
    mask = torch.rand(2, length, generator=generator) < 0.8
    document, positions = torch.zeros_like(ids), torch.arange(length).repeat(2, 1)
    document[0, 10:], positions[0, 10:] = 1, torch.arange(length - 10)
    document[1, 18:], positions[1, 18:], mask[1, 18:] = -1, torch.arange(length - 18), False
    mask[:, 0] = mask[0, 10] = False
    return {"input_ids": ids, "loss_mask": mask, "position_ids": positions, "document": document, "sample_id": document}


def documents(data):
    """(ids, loss mask) of each document of a batch."""
    for row in range(2):
        for number in range(2):
            positions = (data["document"][row] == number).nonzero().flatten()
            if len(positions):
                yield data["input_ids"][row][positions], data["loss_mask"][row][positions]
