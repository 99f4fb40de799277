"""Rows of a corpus with the target's features from a store: all of them (offline), or computed and stored on a miss (cache).

Letters: B rows of a batch · S positions · T taps · H hidden size.
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
    """The corpus with those samples only that the store has. Raises ValueError where it lacks some and none may miss."""
    have = torch.tensor([sample_key(corpus.sample(n)[0]) in store for n in range(len(corpus))], dtype=torch.bool)
    lacking = int((~have).sum())
    if lacking and not (allow_missing and have.any()):
        raise ValueError(
            f"feature store {store.folder}: lacks {lacking:,} of {len(corpus):,} samples of this data; run `draftsmith data capture` with this "
            "recipe, or take features.mode=cache, or features.allow_missing=true to leave them out"
        )
    return replace(corpus, epoch_samples=corpus.epoch_samples[have[corpus.epoch_samples]]) if lacking else corpus


class FeatureDataset:
    """Packed rows whose batches carry `hidden` [B,S,H] and, where taps are wanted, `taps` [B,S,T,H], in the target's dtype.

    computing: what the store lacks is computed, and stored once SHARD_BYTES of it have come together (`close` stores the rest).
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
        """Loss-bearing tokens of these rows."""
        return self.packed.weight(rows)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """What `Packed.batch` gives, and the features; zero where there is padding."""
        samples = [self.packed.samples(row) for row in rows.tolist()]
        if self.computing:
            self._compute({self.keys[sample]: sample for row in samples for sample in row}, int(rows.max()) // len(self))
        raw: dict[str, Tensor] = {}
        for b, row in enumerate(samples):
            at = 0
            for sample in row:
                stored = self._stored(self.keys[sample])
                for name, values in stored.items():
                    if name not in raw:
                        raw[name] = torch.zeros(len(rows), self.packed.seq_len, *values.shape[1:], dtype=values.dtype)
                    raw[name][b, at : at + len(values)] = values
                at += int(self.packed.corpus.lengths[sample])
        dtype = self.store.target.dtype
        batch = self.packed.batch(rows) | {"hidden": feature_codec.unpack(raw["hidden"], raw.get("hidden_scale"), dtype)}
        if self.taps:
            batch["taps"] = feature_codec.unpack(raw["taps"], raw.get("taps_scale"), dtype)
        return batch

    def close(self) -> None:
        """Store what was computed and is not stored yet."""
        if self.fresh:
            rows = [(key, *found) for key, found in self.fresh.items()]
            features.write_shard(self.store.folder / capture.shard_name(self.fresh), rows, self.store.index, self.store.target.logits)
            self.fresh = {}
            self.store.refresh()

    def _stored(self, key: str) -> dict[str, Tensor]:
        """A sample's rows as the store has them, or would have them: an epoch that computes them must see what the next one reads."""
        index = self.store.index
        if key in self.fresh:
            _, hidden, taps = self.fresh[key]
            found = {}
            for name, values in (("hidden", hidden), ("taps", taps)):
                if values is not None:
                    packed = feature_codec.pack(values, index.precision)
                    found[name] = packed.values
                    if packed.scale is not None:
                        found[f"{name}_scale"] = packed.scale
        else:
            found = self.store.stored(key)
        chosen = self.store.taps
        return {
            name: values[:, chosen] if name.startswith("taps") else values
            for name, values in found.items()
            if self.taps or not name.startswith("taps")
        }

    def _compute(self, wanted: dict[str, int], epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.store.refresh()  # other ranks' shards
        missing = {
            key: self.packed.corpus.sample(sample)[0] for key, sample in wanted.items() if key not in self.store and key not in self.fresh
        }
        if not missing:
            return
        tokens = sum(len(ids) for ids, *_ in self.fresh.values())
        if tokens * self.store.index.bytes_per_token > features.SHARD_BYTES:
            self.close()
        for key, (hidden, taps) in capture.compute(self.store.target, missing, self.store.index.taps):
            self.fresh[key] = (missing[key], hidden, taps)
