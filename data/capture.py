"""Capture: run the frozen target over a corpus once and write its features into a store.

Letters: n tokens of a sample, T taps, H hidden size.
"""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.data import feature_codec, features
from draftsmith.data.corpus import Corpus
from draftsmith.data.features import SHARD, Index, sample_key, sidecars
from draftsmith.inference import durable
from draftsmith.inference.claim import claim
from draftsmith.inference.progress import Bar
from draftsmith.models.target import Target

KIND = "feature store"
_REMAINS = re.compile(r"\.(index|[0-9a-f]{16})\.(json|safetensors)\.\d+\.part")
_claims: dict[Path, ExitStack] = {}  # the stores that this process writes


def capture(
    target: Target,
    corpora: Iterable[Corpus],
    folder: Path,
    precision: str = "bfloat16",
    taps: tuple[int, ...] = (),
    batch_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
    wait: Callable[[], object] = lambda: None,
) -> None:
    """Run `target` over every sample of `corpora` that the store lacks, longest first, and store its features.

    A kill leaves complete shards; the same call continues from there, and the result is the same to the last byte at any world size.

    Args:
        target, corpora: what is run over what.
        folder: the store.
        precision: a name of `feature_codec.FORMATS`.
        taps: the layers that are stored beside the last hidden state.
        batch_tokens: tokens of one forward, padding included; None: 1,024 on a CPU, since more leave its caches, and 8,192 elsewhere.
        rank, world: this process captures every world-th shard.
        wait: a barrier between ranks.

    Raises:
        ValueError: a store, or shards in it, of another target, other taps or another precision.
        OSError: too little room, said before the first byte is written; a folder that cannot be written.
    """
    if len(set(taps)) < len(taps):
        raise ValueError(f"features.taps={list(taps)} names a layer twice; name each once")
    target.watch(taps)  # raises for layers that are not there
    batch_tokens = batch_tokens or (1024 if target.device.type == "cpu" else 8192)
    index = Index.of(target, taps, precision)
    samples = {sample_key(ids): ids for corpus in corpora for ids in (corpus.sample(n)[0] for n in range(len(corpus)))}
    try:
        if rank == 0:
            begin(folder, index, target)
        wait()
        index = Index.read(folder) or index  # the store's own: it may know the same target by another path
        _capture_missing(target, samples, folder, index, batch_tokens, rank, world, wait)
    finally:
        if rank == 0:
            end(folder)


def _capture_missing(
    target: Target,
    samples: dict[str, Tensor],
    folder: Path,
    index: Index,
    batch_tokens: int,
    rank: int,
    world: int,
    wait: Callable[[], object],
) -> None:
    """Capture the samples that the store lacks or has damaged."""
    plan = shards(samples, index)
    facts = sidecars(folder) if rank == 0 else {}
    for name, problem in features.damaged(folder, facts, index).items():
        others = [key for key in facts[name]["keys"] if key not in samples]
        if others and problem == features.FOREIGN:
            raise ValueError(
                f"{folder}: shard {name}.safetensors {problem}, and is of other data too; move it away, or give another features.store"
            )
        but = f", but for {len(others)} samples of other data: capture that again too" if others else ""
        print(f"note: {folder}: shard {name}.safetensors {problem}; it is captured again{but}", file=sys.stderr)
        (folder / f"{name}.json").unlink()
        (folder / f"{name}.safetensors").unlink(missing_ok=True)
    wait()
    stored = {key for facts in sidecars(folder).values() for key in facts["keys"]}
    missing = [[key for key in keys if key not in stored] for keys in plan]
    tokens = sum(len(samples[key]) for keys in missing for key in keys)
    if rank == 0:
        _check_free_disk(folder, index, tokens, len(samples))
    wait()  # every rank has read the shards before any rank adds one
    own = [(shard_name(keys), keys) for keys in missing[rank::world] if keys]
    total = sum(len(samples[key]) for _, keys in own for key in keys)
    seen = 0
    with Bar("capturing", total, show=rank == 0) as bar:
        for name, keys in own:
            computed = {}
            for batch in _batches({key: samples[key] for key in keys}, batch_tokens):
                computed |= compute(target, {key: samples[key] for key in batch}, index.taps)
                seen += sum(len(samples[key]) for key in batch)
                bar.update(seen, f"tokens  shard {name}")
            features.write_shard(folder / name, [(key, samples[key], *computed[key]) for key in keys], index, target.logits)
    wait()
    if rank == 0:
        _report(folder, index)


def shards(samples: dict[str, Tensor], index: Index) -> list[list[str]]:
    """The sample keys of each shard of an empty store: longest samples first, about SHARD_BYTES each."""
    most = max(1, features.SHARD_BYTES // index.bytes_per_token)
    order = sorted(samples, key=lambda key: (-len(samples[key]), key))
    ends = list(accumulate(len(samples[key]) for key in order))
    groups: dict[int, list[str]] = {}
    for key, end in zip(order, ends, strict=True):
        groups.setdefault((end - 1) // most, []).append(key)
    return list(groups.values())


def shard_name(keys: Iterable[str]) -> str:
    """A shard is named by a hash of its keys."""
    return hashlib.blake2b("".join(keys).encode(), digest_size=8).hexdigest()


def begin(folder: Path, index: Index, target: Target) -> None:
    """Claim a store for this process, until `end` or the process ends. It is created, empty, if it does not exist.

    Raises:
        ValueError: it is of another target, other taps or another precision; files of somebody else have its names; another process writes it.
    """
    if folder.resolve() not in _claims:
        names = sorted({"index.json", *(file.name for file in folder.glob("*") if SHARD.fullmatch(file.stem))})
        claims = ExitStack()
        claims.enter_context(claim(folder, KIND, () if _is_store(folder) else tuple(names), "features.store"))
        _claims[folder.resolve()] = claims
    try:
        _create_or_check(folder, index, target)
    except BaseException:
        end(folder)
        raise


def _is_store(folder: Path) -> bool:
    """Whether the index says so: a store of an earlier version has no mark."""
    try:
        return Index.read(folder) is not None
    except ValueError:
        return False


def end(folder: Path) -> None:
    """Give up the claim of `begin`."""
    claims = _claims.pop(folder.resolve(), None)
    if claims:
        claims.close()


def _create_or_check(folder: Path, index: Index, target: Target) -> None:
    before = Index.read(folder)
    if before is None:
        if strange := [name for name, facts in sidecars(folder).items() if facts.get("store") != index.hash]:
            raise ValueError(
                f"feature store {folder} has no index.json, and {len(strange)} shards that this run would not write; restore index.json, or give "
                "another features.store"
            )
        text = json.dumps(asdict(index), indent=1) + "\n"
        durable.replace(folder / "index.json", lambda part: part.write_text(text))
        return
    before.check(folder, target, index.taps)
    if (before.precision, before.taps, before.target.dtype) != (index.precision, index.taps, index.target.dtype):
        raise ValueError(
            f"feature store {folder} is of precision {before.precision}, taps {list(before.taps)} and a {before.target.dtype} target; this run "
            f"would add {index.precision}, taps {list(index.taps)}, {index.target.dtype}; give another features.store, or delete that one"
        )
    for remains in folder.glob(".*.part"):
        if _REMAINS.fullmatch(remains.name):  # of a killed process
            remains.unlink()


def _check_free_disk(folder: Path, index: Index, tokens: int, samples: int) -> None:
    needed, free = tokens * index.bytes_per_token, shutil.disk_usage(folder).free
    print(
        f"{folder}: {samples:,} samples, {tokens:,} tokens to capture × {index.bytes_per_token:,} bytes ({index.precision}, hidden + {len(index.taps)} "
        f"taps) = {needed / 1e9:.2f} GB; {free / 1e9:.1f} GB free",
        file=sys.stderr,
        flush=True,
    )
    if needed + features.SHARD_BYTES > free:
        raise OSError(
            f"{folder}: {free / 1e9:.2f} GB free, the features need {(needed + features.SHARD_BYTES) / 1e9:.2f}; make room, take features.precision=fp8, "
            "or train with features.mode=online"
        )


def _batches(samples: dict[str, Tensor], batch_tokens: int) -> Iterator[list[str]]:
    """Batches of keys in order, each as large as `batch_tokens` allows, with padding to its longest sample."""
    keys: list[str] = []
    longest = 0
    for key, ids in samples.items():
        longest = max(longest, len(ids))
        if keys and longest * (len(keys) + 1) > batch_tokens:
            yield keys
            keys, longest = [], len(ids)
        keys.append(key)
    yield keys


def compute(target: Target, samples: dict[str, Tensor], taps: tuple[int, ...]) -> Iterator[tuple[str, tuple[Tensor, Tensor | None]]]:
    """(key, (hidden [n,H], taps [n,T,H] or None)) of each sample, from one forward.

    Samples are packed into one row if the target attends by document. Else they are padded, and none sees the padding after it.
    """
    lengths = [len(ids) for ids in samples.values()]
    if target.by_document:
        ids = torch.cat(list(samples.values())).long()[None]
        out = target.features({"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}, taps)
        spans = [(0, slice(end - n, end)) for n, end in zip(lengths, accumulate(lengths), strict=True)]
    else:
        ids = pad_sequence([ids.long() for ids in samples.values()], batch_first=True).to(target.device)
        out = target.forward(ids, taps=taps)
        spans = [(row, slice(0, n)) for row, n in enumerate(lengths)]
    for key, span in zip(samples, spans, strict=True):
        yield key, (out.hidden[span].cpu(), None if out.taps is None else out.taps[span].cpu())


def _report(folder: Path, index: Index) -> None:
    shards = sidecars(folder).values()
    error = feature_codec.Error().merge(*(feature_codec.Error(**facts["error"]) for facts in shards if facts["error"]))
    size = sum(facts["bytes"] for facts in shards)
    text = f"{folder}: {len(shards)} shards, {size / 1e9:.2f} GB, {index.precision}"
    if index.precision != index.target.dtype and error.rows:
        text += f"; error of storing: {', '.join(f'{name} {value:.3g}' for name, value in error.summary().items())}"
    print(text, flush=True)
