"""Replay for heads: what is supervised is what the target rejected, a stopped run is the same run, and keys that do not fit are refused."""

import json
import os
import signal

import pytest
import torch
from random_targets import random_model, randomise
from safetensors.torch import load_file
from torch import nn

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train import eagle, hydra, medusa, mlp, mtp
from draftsmith.train.engine import replay
from draftsmith.train.engine.replay import corrected
from draftsmith.train.plan import command

DEPTH, NEW = 3, 12
METHODS = {"medusa": medusa, "hydra": hydra, "mlp": mlp, "mtp": mtp, "eagle": eagle}
RECIPES = {name: "eagle3-tiny" if name == "eagle" else f"{name}-tiny" for name in METHODS}
SIZES = {name: [f"{name}.heads={DEPTH}"] for name in METHODS} | {
    "mtp": [f"mtp.steps={DEPTH}", "tree.width=2"],
    "eagle": ["eagle.taps=[0,1]", f"eagle.steps={DEPTH}", f"tree.depth={DEPTH}"],
}


@pytest.fixture
def words(tmp_path, target_folder):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    shared = [f"target.path={target_folder}", f"data.train={text}", f"data.cache={tmp_path / 'cache'}", "data.seq_len=32"]
    shared += [
        "train.steps=10",
        "train.batch_size=4",
        "train.warmup_steps=1",
        "train.eval_batches=1",
        "train.eval_every=0",
        "train.save_every=3",
    ]
    return [*shared, "replay.refresh_every=4", "replay.prompts=20", f"replay.new_tokens={NEW}", "replay.rejections=1.0"]


def train(name, words, output, *more):
    METHODS[name].main([f"recipes/{RECIPES[name]}.yaml", *words, *SIZES[name], f"train.output={output}", *more])
    return load_file(output / "artifact" / "model.safetensors")


def watched(monkeypatch, before=lambda drafter: None, after=lambda target, drafter, prompts, samples: None):
    """Call `before` and `after` around each group of samples."""
    real = replay.rejections

    def wrapped(target, drafter, temperature, new_tokens):
        sample = real(target, drafter, temperature, new_tokens)

        def watching(prompts, keys, seed):
            before(drafter)
            samples = sample(prompts, keys, seed)
            after(target, drafter, prompts, samples)
            return samples

        return watching

    monkeypatch.setattr(replay, "rejections", wrapped)


def rounds_by_hand(drafter, target, ids, prompt):
    """Greedy chains along a text that the target wrote after `prompt` tokens -> the mask of its corrections, and how many drafts each round
    got right. The drafts come of one forward along the text, not of decoding."""
    with torch.inference_mode():
        text = torch.tensor(ids)
        features = drafter.position_features(text, target.forward(text[None], taps=drafter.taps))
        drafts = drafter.position_logits(features, torch.arange(1, len(ids))).argmax(-1).tolist()  # entry i − 1: those after token i
    mask, hits, last = [False] * len(ids), [], prompt - 1
    if not last:  # no hidden state to draft from
        last = 1
    while last + 1 < len(ids):
        rest = ids[last + 1 : last + 1 + DEPTH]
        right = next((k for k, (draft, token) in enumerate(zip(drafts[last - 1], rest, strict=False)) if draft != token), len(rest))
        if right < len(rest):
            mask[last + 1 + right] = True
        hits.append(right)
        last += 1 + right
    return mask, hits


def examples(batch):
    """(ids, mask) of each example of a batch."""
    for row, document in enumerate(batch["document"]):
        for number in range(int(document.max()) + 1):
            yield batch["input_ids"][row][document == number], batch["loss_mask"][row][document == number]


@pytest.mark.parametrize("name", METHODS)
def test_what_is_supervised_is_what_the_target_rejected(name, tmp_path, words, monkeypatch):
    """Of each generation, with the weights of its step; and training reads these texts with these masks, nothing else."""
    seen, batches, hits, weights = set(), [], [], set()

    def compare(target, drafter, prompts, samples):
        assert not drafter.training and isinstance(drafter.tree_spec, DynamicTree)
        for prompt, (ids, mask) in zip(prompts, samples, strict=True):
            assert ids[: len(prompt)] == prompt and len(prompt) < len(ids) <= len(prompt) + NEW
            expected, right = rounds_by_hand(drafter, target, ids, len(prompt))
            assert mask == expected
            hits.extend(right)
            seen.add((tuple(ids), tuple(mask)))
        weights.add(replay.digest(drafter))

    objective = "objective3" if name == "eagle" else "objective"
    real = getattr(METHODS[name], objective)

    def recording(drafter, batch, **options):
        if drafter.training:
            batches.append(batch)
        return real(drafter, batch, **options)

    watched(monkeypatch, after=compare)
    monkeypatch.setattr(METHODS[name], objective, recording)
    train(name, words, tmp_path / "out", "replay.sample_temperature=0", f"tree.depth={DEPTH}")
    records = [json.loads(file.read_text())["sha256"] for file in (tmp_path / "out" / "replay").glob("step-*/weights.json")]
    assert len(records) == 3 and set(records) == weights
    assert {0, 1} <= set(hits)
    read = [(tuple(ids.tolist()), tuple(mask.tolist())) for batch in batches for ids, mask in examples(batch)]
    assert len(batches) == 10 and len(read) > 40 and set(read) <= seen
    assert len({row for row in read if any(row[1])}) > 10


@pytest.mark.parametrize("name", ["medusa", "hydra", "mlp"])
@pytest.mark.parametrize("tree", [None, DynamicTree(2, 3, 6)])
def test_chains_are_drafted_whatever_the_tree(name, tree):
    """Sampled, by a drafter with a tree of its own, which it has again after; the oracle is a decoder with the chain."""
    target = Target.wrap(random_model("llama"))
    drafter = randomise(new_drafter(name, target, num_heads=DEPTH), 0.2)
    if tree:
        drafter.tree_spec = tree
    before, depth = drafter.config.tree, drafter.max_depth
    prompts, sampling = [[5, 6, 7], [9], [3, 4, 5, 8]], Sampling(1.0, seed=4, rule="rejection")
    samples = replay.rejections(target, drafter, 1.0, 30)(prompts, [0, 1, 2], 4)
    assert drafter.config.tree == before and drafter.max_depth == depth
    drafter.tree_spec = StaticTree.chain(depth)
    answers = Decoder(target, drafter, slots=3).generate(prompts, sampling, 30)
    for prompt, answer, (ids, mask) in zip(prompts, answers, samples, strict=True):
        assert ids == prompt + answer.tokens and mask == [False] * len(prompt) + corrected(answer)
        assert {round.size for round in answer.rounds[1:]} <= {1 + depth}
    assert {flag for _, mask in samples for flag in mask} == {False, True}


@pytest.mark.parametrize("fails", [False, True])
def test_the_tree_and_the_mode_are_as_before(fails, tmp_path):
    """Also where decoding fails."""
    target = Target.wrap(random_model("llama"))
    drafter = new_drafter("medusa", target, num_heads=2).train()
    tree = drafter.config.tree
    if fails:
        with pytest.raises(ValueError, match="got token id 999"):
            replay.rejections(target, drafter, 1.0, 4)([[1, 999]], [0], 1)
    with replay._evaluating(drafter):
        assert not any(module.training for module in drafter.modules())
    assert drafter.config.tree == tree and all(module.training for module in drafter.modules() if not isinstance(module, nn.Identity))


@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_a_run_that_is_stopped_while_it_samples_ends_with_the_same_bits(name, tmp_path, words, monkeypatch):
    words = [word.replace("rejections=1.0", "rejections=0.6") for word in words]
    uninterrupted = train(name, words, tmp_path / "uninterrupted")
    calls = []

    def stop(drafter):
        calls.append(drafter)
        if len(calls) == 3:  # the first group of the second generation
            os.kill(os.getpid(), signal.SIGTERM)

    watched(monkeypatch, stop)
    with pytest.raises(SystemExit) as exit:
        train(name, words, tmp_path / "cut")
    assert exit.value.code == 128 + signal.SIGTERM
    assert len(list((tmp_path / "cut" / "replay" / "step-00000004").glob("*.safetensors"))) == 1  # of two
    cut = train(name, words, tmp_path / "cut")
    assert len(calls) == 6  # three generations of two groups: none twice
    assert uninterrupted.keys() == cut.keys() and all(torch.equal(uninterrupted[key], cut[key]) for key in cut)
    files = [sorted((tmp_path / run / "replay").rglob("*.safetensors")) for run in ("uninterrupted", "cut")]
    assert len(files[0]) == 6 and [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_another_share_is_another_run(tmp_path, words):
    train("mlp", words, tmp_path / "out")
    with pytest.raises(ValueError, match=r"made with replay\.rejections=1\.0, this run has 0\.5"):
        train("mlp", words, tmp_path / "out", "replay.rejections=0.5")


REFUSED = [
    (
        ["features.mode=offline", "features.store=store"],
        r"replay\.rejections=1\.0 with features\.mode=offline: .* take features\.mode=online",
    ),
    (["features.mode=cache", "features.store=store"], r"replay\.rejections=1\.0 with features\.mode=cache: "),
    (["replay.new_tokens=20"], r"replay\.new_tokens=20 leaves few tokens for prompts in data\.seq_len=32"),
    (["target.parallel=tensor"], r"replay\.rejections=1\.0 lets processes decode with the target apart, under target\.parallel=tensor all"),
    (["{name}.end_to_end=true"], r"{name}\.end_to_end=true needs several supervised tokens in a row, replay\.rejections=1\.0"),
    (["replay.rejections=1.5"], r"replay\.rejections"),
    (["replay.refresh_every=3"], r"replay\.refresh_every"),
]


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [(name, [word.replace("{name}", name) for word in more], says.replace("{name}", name)) for name in METHODS for more, says in REFUSED]
    + [
        ("medusa", ["joint.rank=2"], r"replay\.rejections=1\.0: Medusa-2 changes the target.* joint\.rank=0"),
        ("eagle", ["eagle.prompts=true", "train.normalise=all"], r"eagle\.prompts=true does not go with replay\.rejections=1\.0"),
        ("eagle", ["train.context_parallel=2"], r"train\.context_parallel=2 does not go with replay\.rejections=1\.0"),
    ],
)
def test_keys_that_do_not_fit_are_refused_before_anything_is_loaded(name, more, says, tmp_path, words, monkeypatch):
    def loaded(*arguments, **options):
        raise AssertionError("loaded")

    monkeypatch.setattr(Target, "load", loaded)
    with pytest.raises(ValueError, match=says) as error:
        train(name, words, tmp_path / "out", *more)
    assert "\n" not in str(error.value)
    with pytest.raises(AssertionError, match="loaded"):  # the same keys without replay are no fault of its own
        train(name, words, tmp_path / "out")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("hydra", "mtp"))) for name in METHODS])
def test_a_plan_is_made_of_a_recipe_with_replay(name, capsys, words):
    """Of the same method and memory as without: several methods have the section, so that it says nothing of the script."""
    plans = []
    for more in (words, [word for word in words if "replay" not in word]):
        command.main([f"recipes/{RECIPES[name]}.yaml", "--cpu", "--json", *more, *SIZES[name]])
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0].pop("overrides") != plans[1].pop("overrides")
    assert plans[0]["script"] == f"train/{name}.py" and plans[0] == plans[1]
