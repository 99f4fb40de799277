"""The comparison with other trainers: samples in the form that speculators reads, the Medusa authors' objective, resumption, the table.

SPECULATORS_PYTHON names the interpreter of an environment with speculators 0.9; without it the test with the real one is skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from datasets import load_from_disk
from packed_data import LENGTHS, corpus_of
from safetensors.torch import load_file, save_file

from draftsmith.data import capture
from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.features import FeatureStore
from draftsmith.data.packing import PackedDataset
from draftsmith.inference.drafter import TargetOutput
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.formats.eagle import read_eagle
from draftsmith.models.target import Target
from draftsmith.train import recipe
from draftsmith.train.benchmarks import paired, peers, peers_medusa, peers_samples
from draftsmith.train.eagle import EagleRecipe
from draftsmith.train.engine.optimizer import new_optimizer
from draftsmith.train.engine.order import sample_rows
from draftsmith.train.losses.calibration import fit_confidence
from draftsmith.train.recipe import TrainSection

PEER = os.environ.get("SPECULATORS_PYTHON", "")


def test_samples_are_chosen_at_random_and_once():
    corpus = corpus_of(LENGTHS, epoch_samples=[*range(len(LENGTHS)), 2, 2])
    for tokens in (1, 40, 90):
        part = peers_samples.choose(corpus, tokens)
        assert tokens <= len(part.ids) < tokens + max(LENGTHS) and part.lengths.sum() == len(part.ids)
        assert part.epoch_samples.tolist() == list(range(len(part)))
        rest = [tuple(corpus.sample(n)[0].tolist()) for n in range(len(corpus))]
        for n in range(len(part)):
            ids, mask = part.sample(n)
            number = rest.index(tuple(ids.tolist()))
            assert torch.equal(mask, corpus.sample(number)[1])
            rest[number] = ()
    assert sorted(peers_samples.choose(corpus, 10**6).lengths.tolist()) == sorted(LENGTHS)


def test_the_order_is_that_of_our_runs():
    corpus = corpus_of(LENGTHS, epoch_samples=[n for n in range(len(LENGTHS)) if n not in (0, 7)])
    steps = peers_samples.order(corpus, 32, 3, seed=5, steps=6)
    packed = PackedDataset(corpus, 32, 5)
    present = [n for n in range(len(LENGTHS)) if n not in (0, 7)]
    for step, samples in enumerate(steps):
        ids = packed.batch(sample_rows(len(packed), 5, 3 * step, 3))["sample_id"]
        expected = [n % len(corpus) for row in ids.tolist() for n in dict.fromkeys(row) if n >= 0]
        assert [present[index] for index in samples] == expected
    assert len(steps) == 6 and steps != peers_samples.order(corpus, 32, 3, seed=6, steps=6)


@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-5), ("int8", 0.05)])
def test_samples_as_speculators_reads_them(precision, tolerance, target, tmp_path):
    corpus = corpus_of(LENGTHS, epoch_samples=[n for n in range(len(LENGTHS)) if n != 4])
    capture.capture(target, [corpus], tmp_path / "store", precision, (0, 1))
    data = FeatureDataset(PackedDataset(corpus, 32), FeatureStore(tmp_path / "store", target, (0, 1)), (0, 1))
    (tmp_path / "samples").mkdir()
    peers_samples.convert(data, tmp_path / "samples")
    rows = load_from_disk(str(tmp_path / "samples"))
    written = peers_samples.in_epoch(corpus)
    assert len(rows) == len(written) == len(LENGTHS) - 1 and 4 not in written
    for index, number in enumerate(written):
        ids, mask = corpus.sample(number)
        stored = load_file(tmp_path / "samples" / "hidden_states" / f"hs_{index}.safetensors")
        assert torch.equal(stored["token_ids"], rows[index]["input_ids"]) and rows[index]["seq_len"] == len(ids)
        # speculators' ArrowDataset and shift_batch:
        states = stored["hidden_states"].float()
        read = {"tokens": stored["token_ids"][1:], "taps": states[:-1, :-1].flatten(1), "last": states[1:, -1]}
        read["supervised"] = rows[index]["loss_mask"][1:]
        with torch.no_grad():
            out = target.model(ids.long()[None], output_hidden_states=True)
            logits = target.model.lm_head(target.model.model.norm(read["last"]))
        assert torch.equal(read["tokens"], ids[1:].long()) and torch.equal(read["supervised"], mask[1:].long())
        assert torch.allclose(read["taps"], out.hidden_states[1][0, :-1], atol=tolerance)  # input of layer 1
        assert torch.allclose(logits, out.logits[0, 1:], atol=20 * tolerance)


def slow_medusa(drafter, target, rows):
    """The objective written out: for each head the mean over all pairs of a position and a supervised token of its document."""
    total = torch.zeros(())
    for k in range(peers_medusa.HEADS):
        losses = []
        for ids, mask in rows:
            hidden = target.forward(ids[None]).hidden[0]
            for t in range(len(ids) - 2 - k):
                if mask[t + 2 + k]:
                    losses.append(F.cross_entropy(drafter.logits_of(k, hidden[t]), ids[t + 2 + k].long()))
        total = total + 0.8**k * torch.stack(losses).mean()
    return total


def test_the_medusa_objective_is_the_slow_form(target):
    corpus = corpus_of(LENGTHS)
    packed = PackedDataset(corpus, 32)
    numbers = torch.arange(len(packed))[:5]
    heads = new_drafter("medusa", target, num_heads=peers_medusa.HEADS)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())), alpha=0.1)
    loss = peers_medusa.objective(heads, packed.batch(numbers), target=target)
    assert float(loss.weight) == packed.weight(numbers)
    rows = [corpus.sample(sample) for row in numbers.tolist() for sample in packed.samples(row)]
    assert any(len(ids) < 3 for ids, _ in rows) and max(len(packed.samples(row)) for row in numbers.tolist()) > 2
    (loss.sum / loss.weight).backward()
    gradients = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()
    slow = slow_medusa(heads, target, rows)
    slow.backward()
    assert torch.allclose((loss.sum / loss.weight).float(), slow, atol=1e-5)
    for fast, parameter in zip(gradients, heads.parameters(), strict=True):
        assert torch.allclose(fast, parameter.grad, atol=1e-5) and parameter.grad.any()


def test_medusa_is_divided_by_supervised_tokens_whatever_eagle_is():
    base = recipe.load(EagleRecipe, "eagle3-smollm2-135m", ["data.train=a.jsonl"])
    assert base.train.normalise == "all"
    chosen = peers_medusa.recipe_like(base, {"output": "x", "steps": 50, "seed": 3, "precision": "fp32"}).train
    assert (chosen.normalise, chosen.optimizer, chosen.warmup_steps, chosen.seed, chosen.batch_size) == ("supervised", "adamw", 5, 3, 1)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_is_timed_once(name):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = new_optimizer(model, TrainSection(output="x", steps=3, batch_size=1, lr=0.1, optimizer=name))
    with peers.step_times() as times:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        draws = torch.Generator().manual_seed(0)
        features, accepted = (torch.rand(*shape, generator=draws, dtype=torch.float64) for shape in ((8, 1, 3), (8, 1)))
        fit_confidence(features, accepted, torch.ones(8, 1, dtype=torch.bool))  # which a training ends with, is no step
    optimizer.step()
    assert len(times) == 3 and times == sorted(times)
    assert peers.mean_step([1.0, 2.0, 5.0, 5.5])["seconds"] == 1.5 and peers.mean_step([1.0])["seconds"] is None


# Stages


def counts(rounds, answer=1):
    result = {name: [[64, 64], rounds] for name in paired.MEASURES}
    return result | {"answers": {name: [answer, 2] for name in paired.MEASURES}}


@pytest.fixture
def stubs(monkeypatch):
    """The stages replaced by stubs -> what ran, and errors to raise by its number."""
    ran, failing = [], {}

    def stub(name, result):
        def work(plan, *rest):
            ran.append(" ".join([name, *(str(word) for word in rest if isinstance(word, (int, float)))]))
            if error := failing.pop(len(ran), None):
                raise error
            return result(rest) if callable(result) else result

        monkeypatch.setattr(peers, name, work)

    stub("capture", {"taps": [1, 3, 5], "last": 7, "precision": "fp32", "steps": 10, "step_tokens": 1024, "seconds": 5.0})
    stub("copy", {"seconds": 1.0, "vocab_size": None})
    stub("train_ours", {"seconds": 0.5})
    stub("train_speculators", {"seconds": 0.25})
    stub("train_medusa", {"seconds": None})
    stub("measure", lambda rest: counts([40, 40]) if rest[0].method == peers.PEER else counts([32, 32 - rest[0].seed]))
    return ran, failing


def test_it_continues_with_the_stage_that_stopped(tmp_path, stubs, capsys):
    ran, failing = stubs
    words = ["tiny", str(tmp_path), "--python", "python", "--seeds", "0,1", "--lr", "1e-3", "--steps", "3"]
    failing |= {4: ValueError("no space"), 9: KeyboardInterrupt()}
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            peers.main(words)
    peers.main(words)
    once = ["capture", "copy", "train_ours 0", "measure", "measure", "train_ours 1", "measure", "train_speculators 0 0.001 3", "measure"]
    assert ran == [*once, "measure", "train_speculators 1 0.001 3", "measure", "train_medusa 0", "measure", "train_medusa 1", "measure"]
    said = capsys.readouterr()
    assert said.out == (tmp_path / "peers.md").read_text() and "[3/14] EAGLE-3 of Draftsmith, eagle3-tiny, seed 0" in said.err
    lines = said.out.splitlines()
    assert "| EAGLE-3 of Draftsmith | eagle3-tiny | 2.016 | 2.016 | 2.016 | 2.016 | 0.5 + 0.5 | 10,240 |" in lines
    assert lines[3].startswith("| EAGLE-3 of speculators 0.9 | lr 0.001, 3 steps | 1.600; -0.416 (")
    assert lines[3].endswith(" | 0.25 + 0.6 | 10,240 |") and lines[4].endswith(" | ? + 0.5 | 10,240 |")
    assert "over the best of EAGLE-3 of speculators 0.9 in each measure: 1.260 (chain of 4, T = 0), 1.260" in said.out
    assert "8 of 8 answers are the same" in said.out
    del ran[:]
    peers.main([*words[:-1], "3,5"])
    assert ran == ["train_speculators 0 0.001 5", "measure", "train_speculators 1 0.001 5", "measure"]
    with pytest.raises(ValueError, match="was begun with tokens null, now 5; give the same, or another folder"):
        peers.main([*words, "--tokens", "5"])


def test_without_speculators(tmp_path, stubs, capsys):
    peers.main(["tiny", str(tmp_path), "--seeds", "0"])
    assert stubs[0] == ["capture", "train_ours 0", "measure", "train_medusa 0", "measure"]
    assert "speculators" not in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"'no/such' has no config.json; give `tiny` or the folder"):
        peers.main(["no/such", str(tmp_path)])


def test_differences_are_paired_by_prompt_and_seed():
    generator = torch.Generator().manual_seed(0)
    tokens, rounds = torch.full((3, 40), 64.0), torch.randint(16, 64, (3, 40), generator=generator).float()
    ours = torch.stack((tokens, rounds), 1)
    assert paired.difference(ours, ours) == (0, 0, 0)
    better = torch.stack((tokens, 0.8 * rounds), 1)  # τ is larger by a quarter of itself in each draw
    delta, low, high = paired.difference(ours, better)
    taus = tokens.sum(1) / rounds.sum(1)
    assert delta == pytest.approx(float(taus.mean()) / 4, rel=1e-5) and low < delta < high
    shuffled = torch.stack((tokens, 0.8 * rounds[:, torch.randperm(40, generator=generator)]), 1)
    assert high - low < 0.5 * (lambda _, low, high: high - low)(*paired.difference(ours, shuffled))
    seeds = torch.tensor([[[64.0] * 9, [64.0] * 9], [[64.0] * 9, [32.0] * 9]])  # τ 1 and 2: prompts do not differ, seeds do
    base = torch.tensor([[[64.0] * 9, [64.0] * 9]] * 2)
    half = 12.71 * 0.5**0.5 / 2**0.5  # Student's t with one degree of freedom times the standard error of two seeds
    assert paired.difference(base, seeds) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert paired.difference(base[:, :, :7], seeds[:, :, :7]) == (0.5, None, None)


# Runs


@pytest.fixture(scope="module")
def plan(target_folder, tmp_path_factory):
    """Texts of bytes for a random target of two layers, and a recipe for it."""
    folder = tmp_path_factory.mktemp("peers")
    words = [f"{n} and {n * n} make {n + n * n}, which is {'even' if n % 2 == 0 else 'odd'} at last." for n in range(100, 180)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    keys = {"eagle.taps": [0], "eagle.steps": 2, "eagle.vocab_size": 40, "data.seq_len": 64, "data.near_duplicate": 1.0}
    keys |= {
        "data.train": str(folder / "texts.jsonl"),
        "train.steps": 9,
        "train.batch_size": 2,
        "train.lr": 1e-3,
        "train.output": "unset",
        "train.precision": "fp32",
    }
    (folder / "recipe.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    recipe = str(folder / "recipe.yaml")
    plan = peers.Plan(folder / "run", str(target_folder), recipe, None, 512, None, PEER or None, (0,), (1e-3,), (2,))
    plan.folder.mkdir()
    return plan


@pytest.fixture(scope="module")
def captured(plan):
    return {peers.FEATURES: peers.capture(plan, {})}


@pytest.fixture(scope="module")
def trained(plan, captured):
    """The folders of a run of ours and of the Medusa authors' objective."""
    folders = {"eagle": plan.folder / "eagle", "medusa": plan.folder / "medusa"}
    for (method, folder), train in zip(folders.items(), (peers.train_ours, peers.train_medusa), strict=True):
        assert train(plan, folder, 0, captured)["seconds"] > 0, method
    return folders


def test_both_trainings_of_ours(plan, captured, trained):
    facts = captured[peers.FEATURES]
    assert (facts["taps"], facts["last"], facts["steps"], facts["step_tokens"]) == ([0], 1, 4, 128) and facts["seconds"] > 0
    given = Target.load(plan.target, dtype=torch.float32)
    for method, folder in trained.items():
        drafter = load_drafter(folder / "artifact", given)
        assert drafter.method == method and drafter.config.training["steps"] == 4
    assert not torch.equal(drafter.output_weight(0), given.head_weight)
    flags = " ".join(peers.speculators_flags(plan, plan.folder, 3, 3e-4, 5, captured | {peers.COPY: {"vocab_size": 40}}))
    for part in ("--target-layer-ids 1 ", "--total-seq-len 128 ", "--lr 0.0003 ", "--ttt-steps 5 ", "--seed 3 ", "--draft-vocab-size 40 "):
        assert part in flags


def test_a_failing_peer_is_said(plan, captured, tmp_path):
    broken = tmp_path / "python"
    broken.write_text(f"#!{sys.executable}\nprint('no such package')\nraise SystemExit(3)\n")
    broken.chmod(0o755)
    given = peers.Plan(**{name: getattr(plan, name) for name in plan.__slots__} | {"python": str(broken)})
    run = plan.folder / "broken"
    with pytest.raises(ValueError, match=r"speculators ended with status 3; the end of .*log.txt says why"):
        peers.train_speculators(given, run, 0, 1e-3, 2, captured | {peers.COPY: {"vocab_size": 40}})
    assert (run / "log.txt").read_text() == "no such package\n"
    assert [len(step) for step in json.loads((run / "job.json").read_text())["batches"]] == [2] * 4


# What speculators makes of our samples: its batches, by its own classes, and the logits of its model.
LOOK = """
import importlib.util, json, sys
import torch
from pathlib import Path
from hs_connectors import FileTransfer
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
driver, job, drafter, folder = sys.argv[1:]
spec = importlib.util.spec_from_file_location("driver", driver)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
job = json.loads(Path(job).read_text())
flags = dict(zip(job["flags"][1::2], job["flags"][2::2]))
data = Path(flags["--data-path"])
sizes = {"total_seq_len": int(flags["--total-seq-len"]), "hidden_size": 32, "num_target_layers": 1}
kinds = {"hidden_states_dtype": torch.float32, "transfer": FileTransfer(data / "hidden_states"), "preprocess": shift_batch}
loader, _ = module.loaders(job["batches"])(data_path=str(data), **sizes, **kinds)
for number, batch in enumerate(loader):
    save_file({k: v.contiguous() for k, v in batch.items() if isinstance(v, torch.Tensor)}, f"{folder}/{number}.safetensors")
config = Eagle3SpeculatorConfig.from_pretrained(drafter)
config.transformer_layer_config._attn_implementation = "sdpa"
model, logits = Eagle3DraftModel.from_pretrained(drafter, config=config).float().eval(), []
model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
given = load_file(f"{folder}/given.safetensors")
ids = given["ids"][:, 1:]
with torch.no_grad():
    model(given["taps"][:, :-1].flatten(2), ids, torch.zeros_like(ids), ttt_steps=3)
save_file({"logits": torch.cat(logits)}, f"{folder}/logits.safetensors")
"""


@pytest.mark.skipif(not PEER, reason="SPECULATORS_PYTHON does not name an interpreter with speculators 0.9")
def test_the_real_speculators(plan, captured, trained, tmp_path):
    results = captured | {peers.COPY: peers.copy(plan, captured)}
    run = plan.folder / "speculators"
    assert peers.train_speculators(plan, run, 0, 1e-3, 2, results)["seconds"] > 0
    given = Target.load(plan.target, dtype=torch.float32)
    drafter = read_eagle(run / "drafter", given)
    ours = load_drafter(trained["eagle"] / "artifact", given)
    assert torch.equal(drafter.get_buffer("d2t"), ours.get_buffer("d2t")) and ours.get_buffer("d2t").any()
    ids, taps = torch.randint(257, (1, 30)), 3 * torch.randn(1, 30, 1, 32)
    save_file({"ids": ids, "taps": taps}, tmp_path / "given.safetensors")
    words = [PEER, "-P", "-c", LOOK, str(peers.DRIVER), str(run / "job.json"), str(run / "drafter"), str(tmp_path)]
    subprocess.run(words, check=True, env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    with torch.no_grad():
        feature, positions = drafter.feature_of(TargetOutput(torch.zeros(1, 30, 32), taps)), torch.arange(30)[None]
        outputs = drafter.training_time_test(feature, ids, positions, torch.zeros_like(ids), 3)
        logits = load_file(tmp_path / "logits.safetensors")["logits"]
        for step, output in enumerate(outputs):
            valid = slice(0, 29 - step)
            assert torch.allclose(drafter.lm_head(drafter.before_head(output))[0, valid], logits[step, valid], atol=1e-4)
    _, data = peers_samples.open_samples(plan.load(), (0, 1))
    for step in range(4):
        theirs = load_file(tmp_path / f"{step}.safetensors")
        batch = data.batch(sample_rows(len(data), 0, 2 * step, 2))
        inner = (batch["position_ids"] > 0) & (batch["document"] >= 0)  # all but the first token of each document
        count = int(inner.sum())
        last = inner.flatten().nonzero()[:, 0]
        assert torch.equal(theirs["input_ids"][0, :count], batch["input_ids"][inner]) and (theirs["document_ids"][0, count:] == -1).all()
        assert torch.equal(theirs["loss_mask"][0, :count].bool(), batch["loss_mask"][inner])
        assert torch.equal(theirs["hidden_states"][0, :count], batch["taps"].flatten(0, 1)[last - 1, 0])
        assert torch.equal(theirs["verifier_last_hidden_states"][0, :count], batch["taps"].flatten(0, 1)[last, 1])


def test_the_driver_imports_nothing_of_ours():
    assert "draftsmith" not in Path(peers.DRIVER).read_text()
