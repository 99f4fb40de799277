"""The replay buffer: which rows are whose, what a stop costs, and samples that repeat themselves."""

import os
import signal

import pytest
import torch
from random_targets import random_model
from safetensors.torch import load_file
from torch import nn
from zoo import tiny

from draftsmith.data.corpus import Corpus
from draftsmith.data.packing import PackedDataset
from draftsmith.inference import durable
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target
from draftsmith.train import distill, recipe
from draftsmith.train.engine import replay
from draftsmith.train.engine.order import order_positions, sample_rows
from draftsmith.train.engine.replay import GROUP, Plan, Replay, corrected

V, S, BATCH, EVERY = 1000, 48, 4, 5


def corpus(samples=60, turns=False):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(20, S + 1, (samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(100, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
    mask = torch.ones(len(ids), dtype=torch.bool)
    if turns:  # the second half of every sample is an answer
        for start, length in zip(offsets.tolist(), lengths.tolist(), strict=False):
            mask[start : start + length // 2] = False
    domain = torch.zeros(samples, dtype=torch.int16)
    return Corpus(ids, mask, offsets, domain, torch.arange(samples), ("all",), 0, S, "key", {})


def maker(generation_of, calls=None, repeats=lambda key: False):
    """Samples whose new tokens say which generation they are of: 200 + generation, then what differs."""

    def make(prompts, keys, seed):
        group = []
        for prompt, key in zip(prompts, keys, strict=True):
            if calls is not None:
                calls.append((seed, key))
            new = [300] * 38 if repeats(key) else [200 + generation_of(), *range(300, 310)]
            group.append((prompt[:10] + new, [False] * len(prompt[:10]) + [True] * len(new)))
        return group

    return make


def buffer(folder, plan=None, samplers=None, model=None, turns=False, settings=None):
    base = PackedDataset(corpus(turns=turns), S, seed=7)
    plan = plan or Plan({"samples": 0.5}, refresh_every=EVERY, keep_generations=2, prompts=40, new_tokens=12, batch_size=BATCH)
    model = model or nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    replayed = Replay(base, folder, plan, samplers or {}, model, V, settings or {})
    if not samplers:
        replayed.samplers = {kind: maker(lambda: latest_generation(replayed)) for kind in plan.shares}
    return replayed


def latest_generation(replayed):
    return max(int(path.name.removeprefix("step-")) for path in replayed.folder.glob("step-*")) // EVERY


def run(replayed, first, last):
    """As the loop does: rows are fetched two steps ahead of the one whose weights are being made."""
    fetched = {}
    replayed.refresh(first, lambda: False)
    for step in range(first, last):
        for ahead in range(step, min(step + 3, last)):
            if ahead not in fetched:
                fetched[ahead] = replayed.batch(sample_rows(len(replayed), 7, ahead * BATCH, BATCH))
        rows = sample_rows(len(replayed), 7, step * BATCH, BATCH)
        assert replayed.weight(rows) == fetched[step]["loss_mask"].sum()
        replayed.refresh(step + 1, lambda: False)
    return fetched


def test_places_are_the_inverse_of_the_order():
    rows = sample_rows(13, 5, 20, 40)
    assert torch.equal(order_positions(rows, 13, 5), torch.arange(20, 60))
    assert not torch.equal(order_positions(rows, 13, 6), torch.arange(20, 60))


def test_rows_come_from_generations_of_earlier_steps_only(tmp_path):
    fetched = run(buffer(tmp_path / "a"), 0, 24)
    seen = set()
    for step, batch in fetched.items():
        now = step // EVERY
        for ids in batch["input_ids"]:
            generations = {int(token) - 200 for token in ids if 200 <= token < 300}
            seen |= {now - generation for generation in generations}
            assert generations <= (set(range(max(0, now - 2), now)) if now else {0})
            assert len(generations) <= 1
    assert seen == {0, 1, 2}  # 0 only in the first steps
    # From any step again, in any batches: the same rows.
    again = run(buffer(tmp_path / "a"), 12, 24)
    assert all(torch.equal(again[step][name], fetched[step][name]) for step in again for name in again[step])


class Named:
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 3


def test_shares_are_what_the_plan_says(tmp_path):
    plan = Plan(
        {"samples": 0.5, "rejections": 0.2}, refresh_every=EVERY, keep_generations=2, prompts=GROUP, new_tokens=12, batch_size=BATCH
    )
    replayed = buffer(tmp_path, plan)
    replayed.refresh(0, lambda: False)
    sources = [source for source, _ in replayed._sources(sample_rows(len(replayed), 7, 0, 20))]
    assert len(set(map(id, sources))) == 3
    many = Replay(replayed.base, tmp_path, plan, {}, nn.Linear(1, 1), V, {})
    many.buffer = {(kind, 0): Named(kind) for kind in plan.shares}
    many._generations = lambda step: range(1)
    kinds = [getattr(source, "name", "data") for source, _ in many._sources(sample_rows(len(replayed), 7, 0, 4000))]
    assert abs(kinds.count("samples") / 4000 - 0.5) < 0.03 and abs(kinds.count("rejections") / 4000 - 0.2) < 0.02


def test_prompts_end_before_an_answer_or_anywhere_in_a_text(tmp_path):
    chats = buffer(tmp_path, turns=True)
    starts = {len(ids): None for ids in chats._prompts(0)}
    beginnings = {tuple(chats.corpus.sample(n)[0][: int(length) // 2].tolist()) for n, length in enumerate(chats.corpus.lengths)}
    fitting = [tuple(prompt) for prompt in chats._prompts(0)]
    assert len(starts) > 3 and sum(prompt in beginnings for prompt in fitting) > 30
    texts = buffer(tmp_path)._prompts(0)
    assert len({len(prompt) for prompt in texts}) > 8 and max(map(len, texts)) <= S - 12 and min(map(len, texts)) >= 1
    assert buffer(tmp_path)._prompts(1) != texts


def test_a_stop_between_groups_costs_nothing(tmp_path):
    uninterrupted = buffer(tmp_path / "uninterrupted")
    uninterrupted.refresh(0, lambda: False)
    calls = []
    cut = buffer(tmp_path / "cut")
    cut.samplers = {"samples": maker(lambda: 0, calls)}
    answers = iter([False, True])
    cut.refresh(0, lambda: next(answers, True))
    assert [key for _, key in calls] == list(range(GROUP)) and not cut.buffer
    cut.refresh(0, lambda: False)
    assert [key for _, key in calls] == list(range(40))
    files = [sorted((tmp_path / name / "step-00000000").iterdir()) for name in ("uninterrupted", "cut")]
    assert [file.name for file in files[0]] == [file.name for file in files[1]] and len(files[0]) == 4
    assert [file.read_bytes() for file in files[0]][:3] == [file.read_bytes() for file in files[1]][:3]
    cut.refresh(0, lambda: False)
    assert len(calls) == 40


def test_other_weights_make_a_generation_anew(tmp_path):
    calls, model = [], nn.Linear(2, 2)
    replayed = buffer(tmp_path, model=model, samplers={"samples": maker(lambda: 0, calls)})
    replayed.refresh(0, lambda: False)
    with torch.no_grad():
        model.weight.add_(1)
    replayed.refresh(0, lambda: False)
    assert len(calls) == 80


def test_rejections_depend_on_the_depth_of_the_chains(tmp_path):
    settings = []
    for depth in (2, 3):
        words = ["distill.rejections=0.5", f"tree.depth={depth}", f"train.output={tmp_path}"]
        run = recipe.load(distill.DistillRecipe, "distill-tiny", words)
        base, samplers = PackedDataset(corpus(), S, seed=7), {"rejections": (0.5, maker(lambda: 0))}
        settings.append(replay.mixed_in(run, run.distill, base, samplers, nn.Linear(2, 2), Target.wrap(tiny("llama"))).settings)
    assert settings[0] != settings[1]


def test_other_settings_make_a_generation_anew(tmp_path):
    samplers = {"samples": maker(lambda: 0, calls := [])}
    for temperature, samples in ((1.0, 40), (1.0, 40), (0.5, 80)):
        buffer(tmp_path, samplers=samplers, settings={"sample_temperature": temperature}).refresh(0, lambda: False)
        assert len(calls) == samples


@pytest.mark.parametrize("when", range(1, 5))
def test_a_fault_at_each_write_leaves_complete_files(tmp_path, monkeypatch, when):
    """Of the four files of a generation: what was written before is used again, nothing is half there."""
    calls, real, count = [], durable.sync, 0
    replayed = buffer(tmp_path, samplers={"samples": maker(lambda: 0, calls)})

    def failing(path):
        nonlocal count
        count += path.is_file()
        if count == when and path.is_file():
            raise OSError("no space left on device")
        real(path)

    with monkeypatch.context() as patched:
        patched.setattr(durable, "sync", failing)
        with pytest.raises(OSError, match="no space"):
            replayed.refresh(0, lambda: False)
    assert not list(tmp_path.rglob("*.part"))
    replayed.refresh(0, lambda: False)
    assert len(calls) == 40 + (min(GROUP, 40 - GROUP * (when - 2)) if when > 1 else 0)
    (tmp_path / "step-00000000" / f"samples-{GROUP:06d}.safetensors").write_bytes(b"spoilt")
    replayed.refresh(0, lambda: False)
    assert load_file(tmp_path / "step-00000000" / f"samples-{GROUP:06d}.safetensors")


def test_what_a_run_was_trained_on_must_be_there(tmp_path):
    run(buffer(tmp_path), 0, 12)
    (tmp_path / "step-00000005" / "samples-000000.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks samples that this run was trained on; restore it"):
        buffer(tmp_path).refresh(12, lambda: False)


def test_samples_that_repeat_themselves_are_left_out_and_said(tmp_path, capsys):
    plan = Plan({"samples": 0.5}, refresh_every=EVERY, keep_generations=2, prompts=40, new_tokens=38, batch_size=BATCH)
    third = buffer(tmp_path / "a", plan, samplers={"samples": maker(lambda: 0, repeats=lambda key: key % 3 == 0)})
    third.refresh(0, lambda: False)
    report = capsys.readouterr().out
    assert "samples after step 0: 26 of 40 samples are of use, 14 repeat themselves" in report and "degenerates" not in report
    corpus_of_third = third.buffer["samples", 0].corpus
    assert len(corpus_of_third) == 26 and 300 in corpus_of_third.ids and not (corpus_of_third.ids.unfold(0, 2, 1) == 300).all(1).any()
    all_repeat = buffer(tmp_path / "b", plan, samplers={"samples": maker(lambda: 0, repeats=lambda key: True)})
    all_repeat.refresh(0, lambda: False)
    report = capsys.readouterr().out
    assert "40 repeat themselves; the text degenerates" in report and "rows of the data take their place" in report
    rows = sample_rows(len(all_repeat), 7, 0, 40)
    assert all(torch.equal(all_repeat.batch(rows)[name], all_repeat.base.batch(rows)[name]) for name in ("input_ids", "loss_mask"))
    all_repeat.refresh(1, lambda: False)
    assert not capsys.readouterr().out  # it is said once
    fine = buffer(tmp_path / "c")
    fine.refresh(0, lambda: False)
    assert not capsys.readouterr().out


def test_tokens_that_the_target_lacks_are_no_samples(tmp_path):
    replayed = buffer(tmp_path)
    replayed.vocab_size = 300  # the student's head has rows of padding past it
    replayed.refresh(0, lambda: False)
    assert replayed.buffer == {("samples", 0): None}


def test_rows_of_one_sample_each_stay_so(tmp_path):
    """A target that cannot keep packed documents apart must not be given any."""
    replayed = buffer(tmp_path)
    replayed.base = PackedDataset(corpus(), S, seed=7, one_sample_each=True)
    replayed.refresh(0, lambda: False)
    assert replayed.buffer["samples", 0].one_sample_each
    assert replayed.batch(sample_rows(len(replayed), 7, 0, 60))["document"].max() == 0


def test_a_damaged_file_is_named(tmp_path):
    run(buffer(tmp_path), 0, 12)
    (tmp_path / "step-00000005" / "samples-000000.safetensors").write_bytes(b"spoilt")
    with pytest.raises(ValueError, match="step-00000005 cannot be read"):
        buffer(tmp_path).refresh(12, lambda: False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_corrections_are_where_the_target_spoke_against_a_draft(temperature):
    target, student = (Target.wrap(tiny("llama", seed)) for seed in (0, 1))
    with torch.no_grad():  # a drafter that is right now and then
        for parameter, other_parameter in zip(student.model.parameters(), target.model.parameters(), strict=True):
            parameter.copy_(other_parameter + 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    drafter = DraftModel(student, StaticTree.chain(3))
    prompts = [[5, 6, 7], [9, 3], [1, 2, 3, 4]]
    sampling = Sampling(temperature, seed=4, rule="rejection")
    answers = Decoder(target, drafter, slots=3).generate(prompts, sampling, 30)
    sampled = replay.rejections(target, drafter, temperature, 30)(prompts, [0, 1, 2], 4)
    kinds = set()
    for prompt, answer, (ids, mask) in zip(prompts, answers, sampled, strict=True):
        assert ids == prompt + answer.tokens and mask[len(prompt) :] == corrected(answer) and not any(mask[: len(prompt)])
        position = len(prompt)
        for step in answer.rounds:
            for offset in range(step.length):
                supervised = mask[position + offset]
                drafted = step.size > 1 and offset == step.accepted - 1 < step.size - 1
                assert supervised == drafted
                kinds.add((supervised, offset))
                if supervised and not temperature:  # what the drafter would have said there is another token
                    prefix = torch.tensor([ids[: position + offset]])
                    assert int(student.logits(student.forward(prefix).hidden[0, -1]).argmax()) != ids[position + offset]
                elif offset < step.accepted - 1 and not temperature:
                    prefix = torch.tensor([ids[: position + offset]])
                    assert int(student.logits(student.forward(prefix).hidden[0, -1]).argmax()) == ids[position + offset]
            position += step.length
    assert {supervised for supervised, _ in kinds} == {True, False} and len(kinds) > 3


def test_a_student_of_fewer_tokens_reads_its_last_one_and_the_sample_has_the_targets_own():
    student = Target.wrap(random_model("llama"))
    prompts = [[3, 5, student.vocab_size + 4, 7], [student.vocab_size, 2]]
    (first, mask), (second, _) = replay.samples(student, 0.0, 6)(prompts, [0, 1], 0)
    assert first[:4] == prompts[0] and second[:2] == prompts[1] and mask == [False] * 4 + [True] * 6
    read = [[min(token, student.vocab_size - 1) for token in prompt] for prompt in prompts]
    assert [first[4:], second[2:]] == [answer.tokens for answer in Decoder(student).generate(read, None, 6)]


def test_a_run_that_is_stopped_while_it_samples_ends_with_the_same_bits(tmp_path, target_folder, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    words = ["recipes/distill-tiny.yaml", f"target.path={target_folder}", f"data.train={text}", f"data.cache={tmp_path}", "data.seq_len=32"]
    words += [
        "train.steps=10",
        "train.warmup_steps=1",
        "train.eval_batches=1",
        "train.tau_prompts=0",
        "train.save_every=3",
        "train.eval_every=0",
    ]
    words += [
        "student.start=pruned",
        "student.layers=1",
        "distill.on_policy=0.5",
        "distill.rejections=0.2",
        "distill.refresh_every=4",
        "distill.prompts=20",
        "distill.new_tokens=12",
    ]
    distill.main([*words, f"train.output={tmp_path / 'uninterrupted'}"])
    real, calls = replay.samples, []

    def interrupted(student, temperature, new_tokens):
        make = real(student, temperature, new_tokens)

        def counting(prompts, keys, seed):
            calls.append(seed)
            if len(calls) == 3:  # the first group of the second generation
                os.kill(os.getpid(), signal.SIGTERM)
            return make(prompts, keys, seed)

        return counting

    monkeypatch.setattr(replay, "samples", interrupted)
    with pytest.raises(SystemExit) as exit:
        distill.main([*words, f"train.output={tmp_path / 'cut'}"])
    assert exit.value.code == 128 + signal.SIGTERM
    assert len(list((tmp_path / "cut" / "replay" / "step-00000004").glob("*.safetensors"))) == 1  # of four
    distill.main([*words, f"train.output={tmp_path / 'cut'}"])
    assert len(calls) == 6  # three generations of two groups: none twice
    uninterrupted, cut = (load_file(tmp_path / name / "artifact" / "model.safetensors") for name in ("uninterrupted", "cut"))
    assert uninterrupted.keys() == cut.keys() and all(torch.equal(uninterrupted[name], cut[name]) for name in uninterrupted)
