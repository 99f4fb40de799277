"""EAGLE from end to end: a short run by the command line."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from eagle_drafters import (
    allowed,
)
from safetensors.torch import load_file

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import load_drafter
from draftsmith.models.target import Target
from draftsmith.train import data_cli
from draftsmith.train import eagle as train

ROOT = Path(__file__).resolve().parents[1]


RECIPE = str(ROOT / "recipes" / "eagle3-tiny.yaml")


@pytest.fixture(scope="module")
def words(target_folder, tmp_path_factory):
    """The command line of a short run; what is given goes behind it."""
    place = tmp_path_factory.mktemp("run")
    text, asked = place / "text.txt", place / "asked.jsonl"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    prompts = ["for line in", "    yield", "def strip", "lines:\n"]
    asked.write_text("".join(json.dumps({"prompt": one, "domain": f"d{n % 2}"}) + "\n" for n, one in enumerate(prompts)))
    common = [
        RECIPE,
        f"target.path={target_folder}",
        "target.dtype=float32",
        f"data.train={text}",
        f"data.cache={place}",
        "data.near_duplicate=1.0",
    ]
    common += [
        "data.seq_len=32",
        "train.steps=4",
        "train.warmup_steps=1",
        "train.eval_batches=1",
        "train.eval_every=1",
        "train.batch_size=2",
    ]
    common += ["train.log_every=1", "train.precision=fp32", "train.lr=0.02", f"train.tau_file={asked}", "train.tau_tokens=10"]
    common += ["eagle.taps=[0,1]", "eagle.vocab_size=40", "eagle.steps=3", "train.tau_prompts=2", "tree.depth=3"]
    common += [
        "eagle.fc_norm=false",
        "eagle.norm_output=false",
        "eagle.norm_before_residual=false",
        "eagle.regression=0",
        "eagle.rise=0",
        "eagle.intermediate_size=null",
        "eagle.kv_heads=null",
        "train.optimizer=adamw",
    ]

    def line(output: Path, *more: str) -> list[str]:
        return [*common, f"train.output={output}", *more]

    return line


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "artifact" / "model.safetensors")


def scripted(monkeypatch, taus: list[float], kept: list) -> None:
    """In place of τ: `taus`, one an evaluation; the weights then are kept."""

    def probe(recipe, target, drafter, positions):
        left = iter(taus)
        return lambda _: kept.append({k: v.detach().clone() for k, v in drafter.state_dict().items()}) or next(left)

    monkeypatch.setattr(train.setup, "tau_probe", probe)


def test_a_run_ends_with_an_artifact_that_has_the_tau_it_measured(words, target_folder, tmp_path, capsys):
    train.main(words(tmp_path, "tree.width=1", "tree.nodes=null"))
    rows = metrics(tmp_path)
    taus = {row["step"]: row["valid_tau"] for row in rows if "valid_tau" in row}
    assert list(taus) == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert "draft vocabulary: 40 of 257 tokens" in said and f"best τ {max(taus.values()):.3f}" in said
    trained = [row for row in rows if "loss" in row]
    assert len(trained) == 4 and all(row["loss"] > 0 and 1 <= row["sim_tau"] <= 4 for row in trained)
    assert all(row["survival_1"] >= row["survival_2"] >= row["survival_3"] for row in trained)
    target = Target.load(str(target_folder))
    drafter = load_drafter(tmp_path / "artifact", target)
    best = max(taus, key=lambda step: taus[step])
    (data,) = drafter.config.training["data"]
    assert data["path"] == "text.txt" and len(data["sha256"]) == 64
    assert drafter.config.training == {"positions": 32, "steps": best, "tokens": best * 2 * 32, "data": [data]}
    assert drafter.tree_spec.paths == StaticTree.chain(3).paths
    asked = [target.tokenizer.encode(one) for one in ("for line in", "    yield", "def strip", "lines:\n")]
    done = Decoder(target, drafter, slots=2).generate(asked, max_new_tokens=10)
    assert sum(len(one.tokens) for one in done) / sum(len(one.rounds) for one in done) == pytest.approx(max(taus.values()), abs=1e-6)
    assert [one.tokens for one in done] == [one.tokens for one in Decoder(target).generate(asked, max_new_tokens=10)]
    assert target.stop_ids <= set(allowed(drafter).tolist())  # the tokens that stop are always in


def test_the_best_weights_are_restored_and_patience_ends_the_run(words, tmp_path, monkeypatch, capsys):
    kept: list = []
    scripted(monkeypatch, [1.5, 3.0, 2.0, 3.0], kept)
    train.main(words(tmp_path / "best"))
    saved = weights(tmp_path / "best")
    assert len(kept) == 4 and saved.keys() == kept[0].keys()
    same = [all(torch.equal(saved[name], one[name]) for name in saved) for one in kept]
    assert same == [False, True, False, False]  # of equal ones the earlier
    del kept[:]
    scripted(monkeypatch, [2.0, 1.9, 1.8, 9.0], kept)
    train.main(words(tmp_path / "patient", "train.patience=2"))
    assert len(kept) == 3 and max(row["step"] for row in metrics(tmp_path / "patient")) == 3
    assert "no better τ in 2 evaluations: ended after step 3 of 4; a higher train.patience goes on" in capsys.readouterr().out
    saved = weights(tmp_path / "patient")
    assert [all(torch.equal(saved[name], one[name]) for name in saved) for one in kept] == [True, False, False]


def test_checkpointing_changes_no_loss(words, tmp_path):
    train.main(words(tmp_path / "plain", "train.tau_prompts=0"))
    train.main(words(tmp_path / "again", "train.tau_prompts=0", "eagle.checkpointing=true"))
    plain, again = ([row.get("loss", row.get("valid_loss")) for row in metrics(tmp_path / name)] for name in ("plain", "again"))
    assert plain == pytest.approx(again, rel=1e-6) and len(plain) == 8 and len(set(plain)) == 8
    for name, one in weights(tmp_path / "plain").items():
        torch.testing.assert_close(one, weights(tmp_path / "again")[name], rtol=0, atol=1e-5)


MORE = {
    "3": ["eagle.fc_norm=true", "eagle.norm_output=true"],
    "3, by Muon": ["train.optimizer=muon", "eagle.rise=0.5", "eagle.train_head=false", "eagle.regression=0.5", "eagle.norm_before_fc=true"],
    "1": ["eagle.version=1", "eagle.taps=null", "eagle.vocab_size=null", "eagle.train_head=true", "eagle.loss=kl", "eagle.decay=0.8"],
}


@pytest.mark.parametrize("name", MORE)
def test_a_run_stops_and_goes_on_to_the_last_bit(words, tmp_path, monkeypatch, name):
    more, version = MORE[name], int(name[0])
    train.main(words(tmp_path / "uncut", *more))
    calls = 0
    name = f"objective{version}"
    plain = getattr(train, name)

    def interrupted(drafter, data, **rest):
        nonlocal calls
        calls += drafter.training
        if calls == 3 and drafter.training:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(drafter, data, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(train, name, interrupted)
        with pytest.raises(SystemExit) as exit:
            train.main(words(tmp_path / "cut", *more))
    assert exit.value.code == 128 + signal.SIGINT and not (tmp_path / "cut" / "artifact").exists()
    train.main(words(tmp_path / "cut", *more))
    uncut, cut = weights(tmp_path / "uncut"), weights(tmp_path / "cut")
    assert uncut.keys() == cut.keys() and all(torch.equal(uncut[one], cut[one]) for one in uncut)
    assert ("d2t" in uncut) == (version == 3)
    machine = {"tokens_per_s", "seconds", "mfu", "target_ratio", "peak_gb"}
    timeless = [[{k: v for k, v in row.items() if k not in machine} for row in metrics(tmp_path / one)] for one in ("uncut", "cut")]
    assert timeless[0] == timeless[1]


def test_the_regression_falls_in_a_run_and_is_no_part_of_the_held_out_loss(words, tmp_path):
    for weight in (0, 1000):
        train.main(words(tmp_path / str(weight), "train.tau_prompts=0", "train.lr=1e-9", f"eagle.regression={weight}"))
    plain, more = (metrics(tmp_path / weight) for weight in ("0", "1000"))
    added = [row["loss"] - before["loss"] for before, row in zip(plain, more, strict=True) if "loss" in row]
    assert len(added) == 4 and all(later < earlier for earlier, later in zip(added, added[1:], strict=False))
    assert added[3] == pytest.approx(added[0] / 4, rel=0.3) != pytest.approx(0.0, abs=1.0)
    held_out = [[row["valid_loss"] for row in rows if "valid_loss" in row] for rows in (plain, more)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4)


def test_a_head_that_is_not_trained_is_the_targets(words, tmp_path, target_folder):
    for kept in ("true", "false"):
        train.main(words(tmp_path / kept, f"eagle.train_head={kept}", "train.tau_prompts=0"))
    rows = Target.load(str(target_folder)).head_weight[weights(tmp_path / "false")["t2d"]]
    assert torch.equal(weights(tmp_path / "false")["lm_head.weight"], rows)
    assert not torch.equal(weights(tmp_path / "true")["lm_head.weight"], rows)
    with pytest.raises(ValueError, match=r"eagle.train_head=false keeps the target's head.*eagle.hidden_size=16"):
        train.main(words(tmp_path / "narrow", "eagle.train_head=false", "eagle.hidden_size=16", "eagle.heads=2"))


def test_training_from_a_store_and_one_with_other_taps(words, tmp_path):
    store = [f"features.store={tmp_path}/s", "features.precision=float32"]
    data_cli.main(["capture", *words(tmp_path / "c"), *store, "features.taps=[1,0]"])
    quiet = "train.tau_prompts=0"
    train.main(words(tmp_path / "online", quiet))
    train.main(words(tmp_path / "offline", quiet, *store, "features.mode=offline"))
    online, offline = ([row.get("loss", row.get("valid_loss")) for row in metrics(tmp_path / name)] for name in ("online", "offline"))
    assert online == pytest.approx(offline, rel=1e-5) and len(online) == 8
    other = [f"features.store={tmp_path}/t", "features.precision=float32"]
    data_cli.main(["capture", *words(tmp_path / "c"), *other, "features.taps=[0]"])
    with pytest.raises(ValueError, match=r"captured with taps \[0\], without \[1\]"):
        train.main(words(tmp_path / "bad", quiet, *other, "features.mode=offline"))


@pytest.mark.parametrize(
    "more, match",
    [
        (["eagle.loss=nonsense"], "eagle.loss"),
        (["eagle.taps=[0,7]"], r"\[7\]"),
        (["eagle.taps=null"], "too few for the usual taps"),
        (["eagle.vocab_size=300"], "at most the target's 257"),
        (["eagle.version=2"], "eagle.version': input should be 1 or 3; got 2"),
        (["eagle.heads=4", "eagle.kv_heads=3"], "got 4 heads for 3 KV heads"),
        (["tree.depth=4"], "3 ahead at most"),
        (["eagle.prompts=true"], "add train.normalise=all"),
        (["eagle.version=1"], r"eagle\.train_head=False does nothing with eagle\.version=1; leave it out"),
        (
            ["eagle.version=1", "eagle.train_head=true", "eagle.rise=0", "eagle.loss=kl", "eagle.decay=0.5"],
            r"eagle\.decay=0\.5 does nothing with eagle\.version=1",
        ),
        (["eagle.classification=1"], r"eagle\.classification=1\.0 does nothing with eagle\.version=3"),
        (
            ["train.tau_prompts=0", "train.patience=2"],
            r"^train\.patience=2 waits for a better τ, which train\.tau_prompts=0 does not measure; give train\.patience=0 too$",
        ),
        (["eagle.regression=1", "eagle.hidden_size=16", "eagle.heads=2"], "eagle.regression compares"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(words, tmp_path, more, match):
    with pytest.raises(ValueError, match=match):
        train.main(words(tmp_path, *more))
    assert not (tmp_path / "checkpoints").exists()
