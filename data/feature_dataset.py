"""Packed sequences with the target's features from a store: all of them (offline), or computed and stored on a miss (cache).

Letters: B rows of a batch, S positions, T taps, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.data import capture, feature_codec, features
from draftsmith.data.corpus import Corpus
from draftsmith.data.features import FeatureStore, sample_key
from draftsmith.data.packing import PackedDataset


def available(corpus: Corpus, store: FeatureStore, allow_missing: bool) -> Corpus:
    """The corpus without the samples that the store lacks.

    Raises:
        ValueError: the store lacks samples and allow_missing is False, or it has none of them.
    """
    stored = torch.tensor([sample_key(corpus.sample(n)[0]) in store for n in range(len(corpus))], dtype=torch.bool)
    lacking = int((~stored).sum())
    if lacking and not (allow_missing and stored.any()):
        raise ValueError(
            f"feature store {store.folder}: lacks {lacking:,} of {len(corpus):,} samples of this data; run `draftsmith data capture` with this "
            "recipe, or take features.mode=cache, or features.allow_missing=true to leave them out"
        )
    return replace(corpus, epoch_samples=corpus.epoch_samples[stored[corpus.epoch_samples]]) if lacking else corpus


class FeatureDataset:
    """Packed sequences whose batches have `hidden` [B,S,H] and, if taps are read, `taps` [B,S,T,H], in the target's dtype.

    Args:
        packed: the sequences without features.
        store: the features.
        taps: the target layers that the drafter reads.
        computing: compute what the store lacks, and write a shard for each SHARD_BYTES of it; `close` writes the rest.
    """

    def __init__(self, packed: PackedDataset, store: FeatureStore, taps: Sequence[int] = (), computing: bool = False) -> None:
        self.packed, self.store, self.taps, self.computing, self.key = packed, store, tuple(taps), computing, packed.key
        self.keys = [sample_key(packed.corpus.sample(n)[0]) for n in range(len(packed.corpus))]
        self.fresh: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        self.epoch = 0

    @property
    def corpus(self) -> Corpus:
        return self.packed.corpus

    def __len__(self) -> int:
        return len(self.packed)

    def weight(self, rows: Tensor) -> float:
        """As that of `PackedDataset`."""
        return self.packed.weight(rows)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """The batch of `PackedDataset`, with features; zero at padding."""
        samples = [self.packed.samples(row) for row in rows.tolist()]
        if (epoch := int(rows.max()) // len(self)) != self.epoch:
            self.epoch = epoch
            self.store.refresh()  # shards that other ranks added, or that somebody changed
        if self.computing:
            self._compute({self.keys[sample]: sample for row in samples for sample in row})
        raw: dict[str, Tensor] = {}
        for b, row in enumerate(samples):
            start = 0
            for sample in row:
                stored = self._stored(self.keys[sample])
                for name, values in stored.items():
                    if name not in raw:
                        raw[name] = torch.zeros(len(rows), self.packed.seq_len, *values.shape[1:], dtype=values.dtype)
                    raw[name][b, start : start + len(values)] = values
                start += int(self.packed.corpus.lengths[sample])
        self._check_finite(raw)
        dtype = self.store.target.dtype
        batch = self.packed.batch(rows) | {"hidden": feature_codec.unpack(raw["hidden"], raw.get("hidden_scale"), dtype)}
        if self.taps:
            batch["taps"] = feature_codec.unpack(raw["taps"], raw.get("taps_scale"), dtype)
        return batch

    def _check_finite(self, raw: dict[str, Tensor]) -> None:
        """Raises ValueError for an inf or a NaN, which `pack` never writes, in values or scales."""
        for name, values in raw.items():
            # torch has no isfinite for fp8, whose NaN has all bits but the sign.
            finite = (values.view(torch.uint8) & 0x7F) != 0x7F if values.dtype == torch.float8_e4m3fn else values.isfinite()
            if not finite.all():
                raise ValueError(f"feature store {self.store.folder}: `{name}` has an inf or a NaN; delete the store and capture it again")

    def close(self) -> None:
        """Write a shard of what was computed and is not stored yet."""
        if self.fresh:
            rows = [(key, *sample) for key, sample in self.fresh.items()]
            features.write_shard(self.store.folder / capture.shard_name(self.fresh), rows, self.store.index, self.store.target.logits)
            self.fresh = {}
            self.store.refresh()

    def _stored(self, key: str) -> dict[str, Tensor]:
        """A sample's features as the store encodes them, also when they were just computed: every epoch then sees the same values."""
        index = self.store.index
        if key in self.fresh:
            _, hidden, taps = self.fresh[key]
            encoded = {}
            for name, values in (("hidden", hidden), ("taps", taps)):
                if values is not None:
                    rows = feature_codec.pack(values, index.precision)
                    encoded[name] = rows.values
                    if rows.scale is not None:
                        encoded[f"{name}_scale"] = rows.scale
        else:
            encoded = self.store.stored(key)
        columns = self.store.taps
        return {
            name: values[:, columns] if name.startswith("taps") else values
            for name, values in encoded.items()
            if self.taps or not name.startswith("taps")
        }

    def _compute(self, wanted: dict[str, int]) -> None:
        missing = {
            key: self.packed.corpus.sample(sample)[0] for key, sample in wanted.items() if key not in self.store and key not in self.fresh
        }
        if not missing:
            return
        tokens = sum(len(ids) for ids, *_ in self.fresh.values())
        if tokens * self.store.index.bytes_per_token > features.SHARD_BYTES:
            self.close()
        target = self.store.target
        with torch.autocast(target.device.type, enabled=False):  # or the store would keep what an evaluation computed in bf16
            for key, (hidden, taps) in capture.compute(target, missing, self.store.index.taps):
                self.fresh[key] = (missing[key], hidden, taps)
