"""Ablations: which runs, what is trained again, the table, and what is measured."""

import pytest
import torch

from draftsmith.eval.answers import decode_all
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.sampler import Sampling
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train import eagle, recipe
from draftsmith.train.benchmarks import ablation, paired
from draftsmith.train.sweep.trial import Result, Run

WORDS = ["medusa", "medusa-tiny", "--seeds", "0,1", "--change", "medusa.top_k=16"]


def counts(rounds):
    return {name: [[64] * 8, rounds] for name in ablation.MEASURES}


@pytest.fixture
def stubs(monkeypatch):
    """Trainings and measurements replaced -> the names of the runs that trained. The change has τ 2, and the recipe 1.6 and, with seed 1, 1.5."""
    trained = []

    def run_all(runs, devices, jobs, record, progress):
        for run in runs:
            trained.append(run.name)
            record(run, Result(None if "layers=2" in run.name else 1.0, 30.0, "out of memory"))

    def measure(run, limit):
        return counts([32] * 8 if "top_k" in run.name else [40 + 2 * int(run.name[-1])] * 8)

    monkeypatch.setattr(ablation.trial, "run_all", run_all)
    monkeypatch.setattr(ablation, "measure", measure)
    return trained


def test_every_run_has_the_tokens_and_its_change(tmp_path):
    changes = ("--change", "eagle.loss=0.9 kl +  0.1 tv  eagle.steps=5", "--change", "train.batch_size=4")
    words = ("eagle", "eagle3-tiny", "--tokens", "100000", "--seeds", "3,4", "eagle.decay=0.8", *changes)
    common, trained = ablation.runs_of(ablation.parser().parse_intermixed_args([str(tmp_path), *words]))
    assert (common["eagle.decay"], common["--tokens"], common["method"]) == (0.8, 100000, "eagle")
    assert [(each.change, each.seed, each.run.steps, each.run.tokens) for each in trained[:3]] == [
        ("the recipe", 3, 195, 99_840), ("eagle.loss=0.9 kl + 0.1 tv eagle.steps=5", 3, 195, 99_840), ("train.batch_size=4", 3, 97, 99_328)
    ]  # fmt: skip
    assert len({each.run.folder for each in trained}) == len(trained) == 6 and [each.seed for each in trained[3:]] == [4, 4, 4]
    for each in trained:
        read = recipe.load(eagle.EagleRecipe, "eagle3-tiny", list(each.run.words[2:]))
        assert read.train.steps == each.run.steps == read.train.eval_every and read.train.seed == each.seed
        assert read.train.warmup_steps == -(-60 * each.run.steps // 1400) and read.eagle.decay == 0.8
        assert (read.eagle.loss, read.eagle.steps) == (("0.9 kl +  0.1 tv", 5) if "kl" in each.change else ("0.5 kl + 0.5 tv", 4))


def test_finished_runs_are_not_trained_again(tmp_path, stubs, capsys):
    ablation.main([str(tmp_path), *WORDS])
    assert stubs == ["the-recipe-0", "medusa.top_k=16-0", "the-recipe-1", "medusa.top_k=16-1"]
    said = capsys.readouterr().out
    assert said == (tmp_path / "ablation.md").read_text()
    assert "| the recipe | 1.562 |  | 1.562 |  | 30 |" in said
    delta = 2 - (64 / 40 + 64 / 42) / 2
    half = 12.71 * (64 / 40 - 64 / 42) / 2  # Student's t with one degree of freedom: prompts do not differ here, seeds do
    assert f"| `medusa.top_k=16` | 2.000 | {delta:+.3f} ({delta - half:+.3f} – {delta + half:+.3f}) |" in said
    assert "τ is the mean of 2 seed(s) over 8 prompts; 95 % intervals are over prompts and seeds." in said
    ablation.main([str(tmp_path), *WORDS, "--change", "medusa.heads=3"])
    assert stubs[4:] == ["medusa.heads=3-0", "medusa.heads=3-1"]
    file = tmp_path / "results.json"  # of a version without the key
    file.write_text(file.read_text().replace('"data.loops": false, ', "", 1))
    assert "data.loops" not in file.read_text()
    ablation.main([str(tmp_path), *WORDS])
    assert len(stubs) == 6
    with pytest.raises(ValueError, match=r"was begun with train.lr 0.006, now 0.001; give the same, or another folder"):
        ablation.main([str(tmp_path), *WORDS, "train.lr=1e-3"])
    with pytest.raises(ValueError, match=r"medusa.layers=2-0 failed: out of memory; its log is .*medusa.layers=2-0.log"):
        ablation.main([str(tmp_path), *WORDS, "--change", "medusa.layers=2"])
    assert len(stubs) == 7
    text = tmp_path / "text.txt"
    text.write_text("x = 1\n")
    own = [str(tmp_path), *WORDS, "--change", f"data.train={text}"]
    ablation.main(own)
    text.write_text("x = 2\n")
    with pytest.raises(
        ValueError, match=r"has a run data\.train=.*text\.txt-[01] with contents of .*text\.txt .*, now .*; give another folder"
    ):
        ablation.main(own)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["medsa", "medusa-tiny", "--change", "medusa.top_k=1"], "no method 'medsa' trains a drafter; expected one of"),
        (["medusa", "medusa-tiny", "--change", "medusa.topk=1"], "topk"),
        (["eagle", "eagle3-tiny", "--change", "eagle.loss=0.9kl+0.1tv"], "eagle.loss"),
        (["medusa", "medusa-tiny", "--change", "medusa.start=a/b", "--change", "medusa.start=a-b"], "as those of another change"),
        (["medusa", "medusa-tiny", "--change", "train.lr=1e-3 train.steps=9"], "train.steps=9: every run has its own, by --tokens"),
        (["medusa", "medusa-tiny", "train.seed=9", "--change", "medusa.top_k=1"], "train.seed=9: every run has its own"),
        (["medusa", "medusa-tiny", "--change", "tree.width=2"], "tree.width=2: every run is measured with a chain of 4"),
        (["medusa", "medusa-tiny", "--change", "target.path=other"], "the target and the held-out data are those of every run"),
        (["medusa", "medusa-tiny", "--change", "medusa.top_k=1", "--seeds", "0,0"], "--seeds 0,0: expected distinct integers"),
        (["medusa", "medusa-tiny", "--change", "medusa.top_k=1", "--jobs", "0"], "--jobs 0: expected 1 to 512"),
    ],
)
def test_wrong_words_are_one_line(tmp_path, words, message, stubs, capsys):
    with pytest.raises(SystemExit):
        exit_on_error(ablation.main, [str(tmp_path / "out"), *words])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and not stubs


def test_the_prompts_are_decoded_with_the_runs_drafter(tmp_path):
    target = Target.load("tiny", dtype=torch.float32)
    new_drafter("medusa", target, num_heads=2, num_layers=1, share_head=True).save_pretrained(tmp_path / "artifact")
    run = Run("the-recipe-0", tmp_path, (), 1, 1, True, "")
    measured = ablation.measure(run, 1)
    prompts = paired.encoded_prompts(target, 1)
    for name, temperature in zip(ablation.MEASURES, (0, 1), strict=True):
        tokens, rounds = measured[name]
        plain = decode_all("plain", Decoder(target, slots=8), prompts, Sampling(temperature=temperature), 64)
        assert tokens == [len(answer.tokens) for answer in plain] and len(prompts) == 4
        assert (
            all(round(n / 3) <= r <= n for n, r in zip(tokens, rounds, strict=True)) and rounds != tokens
        )  # two heads: three tokens a round
