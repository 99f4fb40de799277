"""Corpora of random tokens for tests of packing, features and training."""

import torch

from draftsmith.data.corpus import Corpus


def corpus_of(lengths, vocab=48, seq_len=32, seed=0, epoch_samples=None) -> Corpus:
    generator = torch.Generator().manual_seed(seed)
    total, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(vocab, (total,), generator=generator, dtype=torch.int32)
    mask = torch.rand(total, generator=generator) < 0.7
    epoch_samples = torch.arange(len(lengths)) if epoch_samples is None else torch.tensor(epoch_samples)
    return Corpus(ids, mask, offsets, torch.zeros(len(lengths), dtype=torch.int16), epoch_samples, ("all",), 0, seq_len, "key", {})


LENGTHS = [5, 9, 32, 1, 14, 9, 9, 27, 3, 3, 3, 18, 2, 14, 9, 30, 21, 5]
