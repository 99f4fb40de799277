"""The feature store: the loss of training online, the same bytes however often it was killed, and a name for whatever is broken."""

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer
from packed_data import LENGTHS, corpus_of
from zoo import tiny

from draftsmith.data import capture as capturing
from draftsmith.data import feature_codec, feature_dataset, features
from draftsmith.data.capture import capture
from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.features import FeatureStore, sample_key
from draftsmith.data.packing import PackedDataset
from draftsmith.inference import durable
from draftsmith.inference.claim import MARK
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train import setup
from draftsmith.train.engine.order import prefetched
from draftsmith.train.medusa import MedusaSection, objective
from draftsmith.train.recipe import FeaturesSection

TAPS = (1, 0)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", 6000)


@pytest.fixture(scope="module")
def corpus():
    return corpus_of(LENGTHS)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != MARK}


def rows_of(target, corpus, folder, taps=TAPS, **how) -> FeatureDataset:
    return FeatureDataset(PackedDataset(corpus, 32), FeatureStore(folder, target, taps), taps, **how)


@pytest.mark.parametrize("precision", feature_codec.FORMATS)
def test_training_from_the_store_is_training_online(target, corpus, tmp_path, precision):
    capture(target, [corpus], tmp_path / "s", precision, TAPS, batch_tokens=64)
    rows, section = rows_of(target, corpus, tmp_path / "s"), MedusaSection(heads=3, distill=0.5)
    every = torch.arange(len(rows))
    results = {}
    for name, batch in (("online", rows.packed.batch(every)), ("store", rows.batch(every))):
        torch.manual_seed(0)
        drafter = new_drafter("medusa", target, num_heads=3, num_layers=1, share_head=False, training={})
        out, real = target.features(batch, TAPS), batch["document"] >= 0
        loss = objective(drafter, batch, target=target, section=section)
        results[name] = (loss.sum / loss.weight).item(), out.hidden[real], out.taps[real]
    assert results["store"][1].shape[0] == sum(LENGTHS) and results["store"][2].shape[1:] == (2, target.hidden_size)
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "fp8": 2**-4, "int8": 1 / 127}[precision]
    for stored, online in zip(results["store"][1:], results["online"][1:], strict=True):
        largest = online.abs().amax(-1, keepdim=True)
        assert ((stored - online).abs() / largest).max() <= (1e-5 if precision == "float32" else tolerance)
    assert abs(results["store"][0] - results["online"][0]) <= {"float32": 1e-6}.get(precision, 0.05) * results["online"][0]
    sizes = [facts["bytes"] for facts in features.sidecars(tmp_path / "s").values()]
    assert len(sizes) >= 3 and sum(sizes) < sum(LENGTHS) * rows.store.index.bytes_per_token + 700 * len(sizes)


def test_fp8_and_int8_halve_the_bytes_and_say_what_they_cost(target, corpus, tmp_path, capsys):
    at = {}
    for precision in ("bfloat16", "fp8", "int8"):
        capture(target, [corpus], tmp_path / precision, precision)
        out = capsys.readouterr()
        at[precision] = features.Index.of(target, (), precision).bytes_per_token
        assert "GB free" in out.err and "error of storing: " in out.out and "KL" in out.out.upper()
    assert at["fp8"] == at["int8"] == target.hidden_size + 4 + 4 and at["bfloat16"] == 2 * target.hidden_size + 4


def test_offline_the_target_is_not_run(target, corpus, tmp_path, monkeypatch):
    capture(target, [corpus], tmp_path / "s", taps=TAPS)
    rows = rows_of(target, corpus, tmp_path / "s")
    monkeypatch.setattr(target, "forward", None)
    drafter = new_drafter("medusa", target, num_heads=2, num_layers=1, share_head=False, training={})
    assert objective(drafter, rows.batch(torch.tensor([1, 0])), target=target, section=MedusaSection(heads=2)).sum > 0


def test_the_same_target_by_another_path_adds_to_a_store(target, corpus, tmp_path, capsys):
    capture(target, [corpus], tmp_path / "s")
    before = {file.name: file.read_bytes() for file in (tmp_path / "s").iterdir() if file.name != MARK}
    first = next(iter(FeatureStore(tmp_path / "s", target, ()).locations))
    more = replace(corpus, ids=(corpus.ids + 1) % target.vocab_size)
    moved = Target.wrap(target.model, target.tokenizer, name="elsewhere")
    capture(moved, [more], tmp_path / "s")
    assert "captured again" not in capsys.readouterr().err
    assert all((tmp_path / "s" / name).read_bytes() == content for name, content in before.items()) and len(before) >= 3
    store = FeatureStore(tmp_path / "s", target, ())
    assert first in store and sample_key(more.sample(0)[0]) in store


def test_any_world_size_captures_and_reads_the_same(target, corpus, tmp_path):
    capture(target, [corpus], tmp_path / "one", taps=TAPS)
    for rank in (1, 0, 2):
        (tmp_path / "three").mkdir(exist_ok=True)
        if not (tmp_path / "three" / "index.json").exists():
            shutil.copy(tmp_path / "one" / "index.json", tmp_path / "three")
        capture(target, [corpus], tmp_path / "three", taps=TAPS, rank=rank, world=3)
    assert content(tmp_path / "one") == content(tmp_path / "three")
    rows = rows_of(target, corpus, tmp_path / "three")
    complete = rows.batch(torch.arange(len(rows)))
    for rank in range(3):
        own = torch.arange(len(rows))[rank::3]
        part = rows.batch(own)
        assert all(torch.equal(part[name], complete[name][own]) for name in complete)


def test_more_data_needs_only_what_is_new_and_other_masks_nothing(target, corpus, tmp_path):
    capture(target, [corpus], tmp_path / "s")
    before = content(tmp_path / "s")
    capture(target, [replace(corpus, mask=~corpus.mask)], tmp_path / "s")
    assert content(tmp_path / "s") == before
    larger = corpus_of(LENGTHS + [11, 23])  # the same ids to begin with, two samples more
    assert torch.equal(larger.ids[: len(corpus.ids)], corpus.ids)
    capture(target, [larger], tmp_path / "s")
    after = content(tmp_path / "s")
    assert {name: after[name] for name in before} == before
    added = [key for name, facts in features.sidecars(tmp_path / "s").items() if f"{name}.json" not in before for key in facts["keys"]]
    assert sorted(added) == sorted(sample_key(larger.sample(n)[0]) for n in (len(LENGTHS), len(LENGTHS) + 1))
    rows_of(target, larger, tmp_path / "s", taps=()).batch(torch.arange(3))


def test_what_a_damaged_shard_of_an_earlier_corpus_held_is_captured_again(target, corpus, tmp_path):
    """Also where a shard of the plan is there without it, since that sample was stored elsewhere."""
    first = corpus_of(LENGTHS[:1])
    capture(target, [first], tmp_path / "s")
    (early,) = features.sidecars(tmp_path / "s")
    capture(target, [corpus], tmp_path / "s")
    (tmp_path / "s" / f"{early}.safetensors").write_bytes(b"")
    capture(target, [corpus], tmp_path / "s")
    stored = [key for facts in features.sidecars(tmp_path / "s").values() for key in facts["keys"]]
    assert sorted(stored) == sorted(sample_key(corpus.sample(n)[0]) for n in range(len(corpus)))
    rows_of(target, corpus, tmp_path / "s", taps=()).batch(torch.arange(3))


# --- faults ----------------------------------------------------------------------------------------------------------


class Faults:
    """Counts writes, fsyncs and renames below a folder, and lets the n-th fail as a full disk does."""

    def __init__(self, monkeypatch, folder: Path) -> None:
        self.count, self.at = 0, -1
        for owner, name in ((Path, "write_bytes"), (Path, "write_text"), (os, "fsync"), (Path, "replace")):
            real = getattr(owner, name)

            def faulty(first, *rest, real=real, name=name, **options):
                if name == "fsync" or str(first).startswith(str(folder)):
                    self.count += 1
                    if self.count == self.at:
                        if name.startswith("write"):
                            real(first, rest[0][: len(rest[0]) // 2], **options)
                        raise OSError(28, "No space left on device")
                return real(first, *rest, **options)

            monkeypatch.setattr(owner, name, faulty)


def test_a_fault_at_each_write_fsync_and_rename_loses_nothing(target, tmp_path, monkeypatch, capsys):
    corpus = corpus_of([9, 30, 12, 4, 21])
    capture(target, [corpus], tmp_path / "complete", taps=TAPS)
    expected = content(tmp_path / "complete")
    faults = Faults(monkeypatch, tmp_path / "counted")
    capture(target, [corpus], tmp_path / "counted", taps=TAPS)
    total, shards = faults.count, len(features.sidecars(tmp_path / "complete"))
    assert shards >= 3 and total >= 4 * (1 + 2 * shards)  # a write, two fsyncs and a rename of each file
    for n in range(1, total + 1):
        folder = tmp_path / f"fault{n}"
        faults.count, faults.at = 0, n
        faults.__init__(monkeypatch, folder)
        faults.at = n
        with pytest.raises(OSError, match="No space left on device"):
            capture(target, [corpus], folder, taps=TAPS)
        faults.at = -1
        for name in features.sidecars(folder):
            assert content(folder)[f"{name}.safetensors"] == expected[f"{name}.safetensors"]
        capture(target, [corpus], folder, taps=TAPS)
        assert content(folder) == expected, f"fault {n}"
        monkeypatch.undo()
        monkeypatch.setattr(features, "SHARD_BYTES", 6000)


KILLED = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from packed_data import corpus_of
from zoo import tiny
from draftsmith.data import features
from draftsmith.inference import durable
from draftsmith.inference.claim import MARK
from draftsmith.data.capture import capture
from draftsmith.models.target import Target

features.SHARD_BYTES = 6000
target, corpus, rng = Target.wrap(tiny("llama"), name="small"), corpus_of([7, 30, 12, 4, 21] * 12), random.Random(0)
capture(target, [corpus], Path(sys.argv[2]), taps=(1, 0))
real = durable.sync
durable.sync = lambda path: (time.sleep(0.004), real(path))
kills = 0
while kills < 10:
    child = os.fork()
    if child == 0:
        capture(target, [corpus], Path(sys.argv[3]), taps=(1, 0))
        os._exit(0)
    time.sleep(rng.uniform(0.02, 0.12))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kills += 1
    else:
        print("finished before it was killed", kills)
        break
capture(target, [corpus], Path(sys.argv[3]), taps=(1, 0))
print("kills", kills)
"""


@pytest.mark.faults
def test_ten_kills_leave_the_same_bytes(tmp_path):
    arguments = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path / "complete"), str(tmp_path / "killed")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "kills 10" in done.stdout
    assert len(content(tmp_path / "complete")) > 20 and content(tmp_path / "complete") == content(tmp_path / "killed")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda file: file.write_bytes(b""), "has 0 bytes where"),
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), "bytes where"),
        (flip, "is damaged"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_broken_shard_is_named_and_left_out_only_when_asked(target, corpus, tmp_path, capsys, harm, says):
    capture(target, [corpus], tmp_path / "s")
    expected = content(tmp_path / "s")
    FeatureStore(tmp_path / "s", target)  # passed once: that record must not hide what comes after
    name, facts = list(features.sidecars(tmp_path / "s").items())[1]
    harm(tmp_path / "s" / f"{name}.safetensors")
    with pytest.raises(ValueError, match=rf"shard {name}\.safetensors .*{says}.*features.allow_missing=true"):
        FeatureStore(tmp_path / "s", target)
    store = FeatureStore(tmp_path / "s", target, allow_missing=True)
    assert name in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"lacks {len(facts['keys'])} of {len(corpus)} samples"):
        feature_dataset.available(corpus, store, allow_missing=False)
    rest = feature_dataset.available(corpus, store, allow_missing=True)
    assert len(rest.epoch_samples) == len(corpus) - len(facts["keys"])
    rows = FeatureDataset(PackedDataset(rest, 32), store)
    assert rows.batch(torch.arange(len(rows)))["hidden"].abs().sum() > 0
    capture(target, [corpus], tmp_path / "s")
    assert "captured again" in capsys.readouterr().err and content(tmp_path / "s") == expected


def test_shards_without_their_index_are_not_deleted(target, corpus, tmp_path):
    capture(target, [corpus], tmp_path / "s", taps=(1,))
    (tmp_path / "s" / "index.json").unlink()
    before = content(tmp_path / "s")
    for precision, taps in (("bfloat16", (0,)), ("fp8", (1,))):
        with pytest.raises(ValueError, match="has no index.json, and .* shards that this run would not write; restore index.json"):
            capture(target, [corpus], tmp_path / "s", precision, taps)
    assert content(tmp_path / "s") == before
    capture(target, [corpus], tmp_path / "s", taps=(1,))  # as it was written
    assert {name: text for name, text in content(tmp_path / "s").items() if name != "index.json"} == before


def test_shards_of_another_store_stay_where_they_hold_other_data(target, corpus, tmp_path, capsys):
    capture(target, [corpus_of([9, 8, 7])], tmp_path / "other", "fp8")
    capture(target, [corpus], tmp_path / "s")
    for name in features.sidecars(tmp_path / "other"):
        for file in (tmp_path / "other").glob(f"{name}.*"):
            (tmp_path / "s" / file.name).write_bytes(file.read_bytes())
    before = content(tmp_path / "s")
    with pytest.raises(ValueError, match="belongs to another store .* and is of other data too; move it away"):
        capture(target, [corpus], tmp_path / "s")
    assert content(tmp_path / "s") == before
    (tmp_path / "s" / f"{name}.safetensors").write_bytes(b"")
    capture(target, [corpus], tmp_path / "s")
    assert "captured again, but for 3 samples of other data: capture that again too" in capsys.readouterr().err


def test_a_store_takes_no_features_of_another_dtype(target, corpus, tmp_path):
    """Not from training with features.mode=cache either."""
    capture(target, [corpus], tmp_path / "s", "fp8", TAPS)
    half = Target.wrap(tiny("llama").bfloat16(), name="small")
    with pytest.raises(ValueError, match="of precision fp8, .* float32 target; this run would add fp8, .* bfloat16"):
        setup.open_store(SimpleNamespace(features=FeaturesSection(mode="cache", store=str(tmp_path / "s"))), half, TAPS)


def test_an_evaluations_autocast_is_not_in_the_store(target, corpus, tmp_path):
    capturing.begin(tmp_path / "s", features.Index.of(target, (), "float32"), target)
    data = rows_of(target, corpus, tmp_path / "s", (), computing=True)
    with torch.autocast("cpu", torch.bfloat16):
        batch = data.batch(torch.arange(len(data)))
    capture(target, [corpus], tmp_path / "captured", "float32")
    stored = rows_of(target, corpus, tmp_path / "captured", ()).batch(torch.arange(len(data)))
    torch.testing.assert_close(batch["hidden"], stored["hidden"], rtol=0, atol=1e-5)  # other batches; bf16 would be 1e-2 away


def test_a_full_disk_is_said_before_the_first_byte(target, corpus, tmp_path, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(capturing.shutil, "disk_usage", lambda folder: Usage(10, 9, 9000))
    with pytest.raises(OSError, match="0.00 GB free, the features need .* features.mode=online"):
        capture(target, [corpus], tmp_path / "s")
    assert {file.name for file in (tmp_path / "s").iterdir()} == {"index.json", MARK}


def test_a_store_of_something_else_is_refused_or_said(target, corpus, tmp_path, capsys):
    folder = tmp_path / "s"
    with pytest.raises(ValueError, match="no feature store in"):
        FeatureStore(folder, target)
    capture(target, [corpus], folder, taps=(1,))
    with pytest.raises(ValueError, match=r"captured with taps \[1\], without \[0\]"):
        FeatureStore(folder, target, (0, 1))
    with pytest.raises(ValueError, match="give another features.store"):
        capture(target, [corpus], folder, "fp8", taps=(1,))
    with pytest.raises(ValueError, match="made for 'small', got 'other'"):
        FeatureStore(folder, Target.wrap(tiny("qwen3"), name="other"))
    stderr = Target.wrap(tiny("llama"), byte_tokenizer(), name="stderr")
    capture(stderr, [corpus], tmp_path / "t")
    other = byte_tokenizer()
    other.add_tokens(["one more"])
    with pytest.raises(ValueError, match="differs in its tokenizer"):
        FeatureStore(tmp_path / "t", Target.wrap(tiny("llama"), other, name="stderr"))
    capsys.readouterr()
    FeatureStore(folder, Target.wrap(tiny("llama").bfloat16(), name="half"))
    assert "is in bfloat16, this was made with it in float32" in capsys.readouterr().err
    (folder / "index.json").write_text("{")
    with pytest.raises(ValueError, match="index.json is broken"):
        FeatureStore(folder, target)


def test_what_the_cache_lacks_is_computed_and_stored(target, corpus, tmp_path, monkeypatch):
    folder = tmp_path / "s"
    half = replace(corpus, offsets=corpus.offsets[:8], domain=corpus.domain[:7], epoch_samples=torch.arange(7))
    capture(target, [half], folder, "fp8", TAPS)
    rows = rows_of(target, corpus, folder, computing=True)
    ran = []
    real = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: ran.append(1) or real(*a, **k))
    size = len(rows)
    first = {int(n): rows.batch(torch.tensor([n])) for n in range(size)}
    assert ran
    rows.close()
    ran.clear()
    again = {n: rows.batch(torch.tensor([n])) for n in range(size)}
    assert not ran and all(torch.equal(first[n][name], again[n][name]) for n in again for name in first[n])
    rows.batch(torch.arange(size) + size)  # another epoch, others beside each other
    assert not ran
    feature_dataset.available(corpus, FeatureStore(folder, target, TAPS), allow_missing=False)


def test_shards_of_other_ranks_are_read_from_the_next_epoch_on(target, corpus, tmp_path, monkeypatch):
    folder = tmp_path / "s"
    half = replace(corpus, offsets=corpus.offsets[:8], domain=corpus.domain[:7], epoch_samples=torch.arange(7))
    capture(target, [half], folder, "fp8", TAPS)
    own, other = (rows_of(target, corpus, folder, computing=True) for _ in range(2))
    own.batch(torch.tensor([0]))
    other.batch(torch.arange(len(other)))
    other.close()

    def forward(*arguments, **options):
        raise AssertionError("another rank has computed it")

    monkeypatch.setattr(target, "forward", forward)
    own.batch(torch.arange(len(own)) + len(own))


def test_reading_ahead_keeps_the_order_and_the_errors():
    assert list(prefetched(lambda rows: {"x": rows}, [torch.tensor([n]) for n in range(9)])) == [{"x": torch.tensor([n])} for n in range(9)]

    def fetch(rows):
        if rows == 4:
            raise ValueError("row 4 is broken")
        return {"x": rows}

    stream = prefetched(fetch, [torch.tensor(n) for n in range(9)])
    assert [int(next(stream)["x"]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="row 4 is broken"):
        next(stream)


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    file = tmp_path / "f"
    durable.replace(file, lambda part: part.write_text("old"))
    with pytest.raises(KeyError):
        durable.replace(file, lambda part: (part.write_text("ne"), {}["w"]))
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
