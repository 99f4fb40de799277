"""The precision that decoding takes by itself: bf16 where the checkpoint is in half precision, large, and faster so on this machine."""

import json

import pytest
import torch
from commands import short
from zoo import tiny

from draftsmith.eval import acceptance, loading
from draftsmith.eval.record_store import COMMIT, UNFINISHED
from draftsmith.inference import machine
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.models.weights import Header
from draftsmith.train import medusa, recipe, setup

LARGE, SMALL = (1 << 14, 1 << 12), (64, 64)


@pytest.fixture
def cpu_is(monkeypatch):
    """Let this be a CPU that is fastest in the precision given."""

    def set_to(precision: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(machine, "decoding_precision", lambda: precision)

    return set_to


@pytest.mark.parametrize(
    ("precision", "stored", "expected"),
    [
        ("bf16", [("BF16", LARGE)], torch.bfloat16),
        ("bf16", [("F16", LARGE), ("BF16", SMALL)], torch.bfloat16),
        ("fp32", [("BF16", LARGE)], torch.float32),
        ("bf16", [("F32", LARGE)], torch.float32),
        ("bf16", [("BF16", LARGE), ("F32", SMALL)], torch.float32),
        ("bf16", [("I8", LARGE)], torch.float32),
        ("bf16", [("BF16", SMALL)], torch.float32),
        ("bf16", [], torch.float32),
    ],
)
def test_dtype_of_a_checkpoint(cpu_is, precision, stored, expected):
    cpu_is(precision)
    headers = {str(number): Header("model.safetensors", dtype, shape) for number, (dtype, shape) in enumerate(stored)}
    assert loading.decoding_dtype(headers) == expected


@pytest.mark.parametrize(
    ("precision", "dtype", "stored", "expected"),
    [
        ("bf16", "auto", torch.bfloat16, torch.bfloat16),
        ("fp32", "auto", torch.bfloat16, torch.float32),
        ("bf16", "auto", torch.float32, torch.float32),
        ("fp32", "bfloat16", torch.bfloat16, torch.bfloat16),
        ("bf16", "float32", torch.bfloat16, torch.float32),
    ],
)
def test_a_target_that_trains_a_drafter_is_in_the_precision_that_is_fastest_here(
    precision, dtype, stored, expected, target_folder, monkeypatch, tmp_path
):
    monkeypatch.setattr(machine, "precision", lambda: precision)
    copy = Target.load(target_folder, dtype=stored)
    for part in (copy.model, copy.require_tokenizer()):
        part.save_pretrained(tmp_path / "target")
    file, *overrides = short(tmp_path / "target", tmp_path, tmp_path / "run", f"target.dtype={dtype}")
    opened, _ = setup.load_target_and_data(recipe.load(medusa.MedusaRecipe, file, overrides))
    assert opened.dtype == expected


def test_target_and_drafters_take_the_same(cpu_is, monkeypatch, tmp_path):
    cpu_is("bf16")
    target = Target.load("tiny", dtype=torch.float32)
    new_drafter("medusa", target, num_heads=1).save_pretrained(tmp_path / "heads")
    names = [str(tmp_path / "heads"), "tiny-draft"]
    assert loading.open_models("tiny", ["ngram"], "auto")[0].dtype == torch.float32, "small enough for a cache"
    monkeypatch.setattr(loading, "CACHE", 0)
    with pytest.warns(UserWarning, match="is in bfloat16, this was made with it in float32"):
        opened, (heads, draft_model) = loading.open_models("tiny", names, "auto")
    assert {opened.dtype, heads.dtype, draft_model.model.dtype} == {torch.bfloat16}
    assert loading.open_models("tiny", ["ngram"], "float32")[0].dtype == torch.float32, "as asked"


@pytest.mark.parametrize(("ratio", "expected"), [(1.14, "fp32"), (1.16, "bf16")])
def test_the_probe_compares_both_precisions(monkeypatch, ratio, expected):
    compared = []

    def gain(slow, quick):
        compared.append((slow[0]().dtype, quick[0]().dtype))
        return ratio

    monkeypatch.setattr(machine, "gain", gain)
    monkeypatch.setattr(machine, "pack", lambda model: [])
    assert machine.decoding_precision.__wrapped__() == expected
    assert compared == [(torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    "recorded, asked, expected",
    [("bfloat16", (), "bfloat16"), ("bfloat16", ("--dtype", "float32"), "float32"), ("no", (), "auto"), (["float32"], (), "auto")],
)
def test_a_stopped_evaluation_goes_on_in_its_precision(tmp_path, monkeypatch, recorded, asked, expected):
    class Opened(Exception):
        pass

    def open_models(target, names, dtype, *_):
        raise Opened(dtype)

    lines = [{"kind": "header", "format": 1, "target": {"dtype": recorded}}, COMMIT]
    (tmp_path / UNFINISHED).write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(loading, "open_models", open_models)
    with pytest.raises(Opened, match=f"^{expected}$"):
        acceptance.main(["suffix", "--out", str(tmp_path), *asked])


def test_a_target_shows_the_headers_to_the_function_that_chooses(tmp_path):
    tiny("llama").bfloat16().save_pretrained(tmp_path)
    seen = []
    target = Target.load(str(tmp_path), dtype=lambda stored: seen.append({header.dtype for header in stored.values()}) or torch.float16)
    assert seen == [{"BF16"}] and target.dtype == torch.float16
