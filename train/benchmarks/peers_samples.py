"""The samples on which train/benchmarks/peers.py trains: chosen and captured once, in the order of our runs, and in the form of speculators 0.9.

Letters: n tokens of a sample · T taps · L target layers · H hidden size.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file

from draftsmith.data import capture, feature_codec
from draftsmith.data.corpus import Corpus
from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.packing import PackedDataset
from draftsmith.models.target import Target
from draftsmith.models.target_defaults import default_taps
from draftsmith.train import setup
from draftsmith.train.eagle import EagleRecipe
from draftsmith.train.engine.order import sample_rows


def capture_features(recipe: EagleRecipe, tokens: int) -> tuple[list[int], int, float]:
    """Choose samples with about so many tokens, and store their features and those of a few held-out ones.

    Returns:
        The taps that the drafter reads; L − 1, for the last layer's output is stored too, since speculators applies the final norm itself; and
        the CPU seconds of it.
    """
    target, corpora = setup.load_target_and_data(recipe, training=False)
    taps, last, section = recipe.eagle.taps or default_taps(target), target.num_layers - 1, recipe.features
    parts = [choose(corpora["train"], tokens), choose(corpora["valid"], recipe.train.batch_size * recipe.data.seq_len)]
    assert section.store, "the comparison's own folder"
    began = time.process_time()
    capture.capture(target, parts, Path(section.store), section.precision, tuple(sorted({*taps, last})), section.batch_tokens)
    return list(taps), last, time.process_time() - began


def choose(corpus: Corpus, tokens: int) -> Corpus:
    """Samples of the corpus in a random order, just so many that they have `tokens` tokens together, or all; each once."""
    samples = corpus.epoch_samples.unique()
    samples = samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))]
    ends = corpus.lengths[samples].cumsum(0)
    samples = samples[ends - corpus.lengths[samples] < tokens]
    ids, masks = zip(*(corpus.sample(number) for number in samples.tolist()), strict=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends[: len(samples)]])
    each = torch.arange(len(samples))
    return replace(corpus, ids=torch.cat(ids), mask=torch.cat(masks), offsets=offsets, domain=corpus.domain[samples], epoch_samples=each)


def open_samples(recipe: EagleRecipe, taps: Sequence[int]) -> tuple[Target, FeatureDataset]:
    """The target's embeddings and head, and the chosen training samples with these taps."""
    target, corpora = setup.load_target_and_data(recipe)
    store = setup.open_store(recipe, target, tuple(taps))
    return target, setup.feature_data(recipe, target, corpora["train"], store, tuple(taps))


def in_epoch(corpus: Corpus) -> list[int]:
    """The numbers of the samples that an epoch has, ascending: the order in which `convert` writes them."""
    return corpus.epoch_samples.unique().tolist()


def order(corpus: Corpus, seq_len: int, size: int, seed: int, steps: int) -> list[list[int]]:
    """For each step of a run of ours with this seed, the samples of its batch, as indices into `in_epoch`."""
    index = {number: index for index, number in enumerate(in_epoch(corpus))}
    packed = PackedDataset(corpus, seq_len, seed)
    rows = (sample_rows(len(packed), seed, step * size, size).tolist() for step in range(steps))
    return [[index[sample] for row in batch for sample in packed.samples(row)] for batch in rows]


def convert(data: FeatureDataset, folder: Path) -> None:
    """Write the samples into an empty folder: ids and masks as a data set of `datasets`, hidden states in a file for each sample.

    `hidden_states` [n,T,H] has data.taps, of which the last one is the output of the last layer. speculators does the shifting: at position t
    it reads the other taps of t and token t+1, and learns the distribution after token t+1 where that token is supervised.
    """
    columns: dict[str, list] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    (folder / "hidden_states").mkdir()
    dtype = torch.float32 if data.store.index.precision == "float32" else torch.bfloat16
    for index, number in enumerate(in_epoch(data.corpus)):
        ids, mask = data.corpus.sample(number)
        stored = data.store.stored(data.keys[number])
        scale = stored["taps_scale"][:, data.store.taps] if "taps_scale" in stored else None
        states = feature_codec.unpack(stored["taps"][:, data.store.taps], scale, dtype)
        save_file({"hidden_states": states.contiguous(), "token_ids": ids.long()}, folder / "hidden_states" / f"hs_{index}.safetensors")
        for name, values in zip(columns, (ids.tolist(), mask.long().tolist(), len(ids)), strict=True):
            columns[name].append(values)
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
