"""`draftsmith check --serve`: an engine played by a slow loop, whose answers, proposals and hidden states are known, or spoilt."""

import pytest
import torch
from commands import failing
from export_cases import save_drafter, save_target

from draftsmith.inference.drafter import TargetOutput
from draftsmith.models.formats.published import read_published
from draftsmith.models.target import Target
from draftsmith.train.exchange import check, export, serving

PROMPTS, NEW, K = [[1, 2, 3, 4], [9, 8, 7], [100, 101, 102, 103, 104]] * 4, 12, 3


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("serving")
    target = Target.load(str(save_target(root / "target")), dtype=torch.float32)
    save_drafter("medusa", target, root / "medusa")
    arguments = [str(root / "medusa"), "--to", "vllm", "--output", str(root / "heads"), "--target", str(root / "target")]
    export.main([*arguments, "--dtype", "float32"])
    (root / "prompts.jsonl").write_text('{"prompt": "abc", "domain": "d"}\n')
    return root


@pytest.fixture(scope="module")
def target(served_folder):
    return Target.load(str(served_folder / "target"), dtype=torch.float32)


@pytest.fixture
def drafter(served_folder, target):
    return read_published(str(served_folder / "heads"), target)


def engine(target, drafter, prompts):
    """The reply of an engine that decodes greedily without a cache, and drafts by the heads' logits along the text."""
    answers, features = [], {}
    for number, prompt in enumerate(prompts):
        text, proposals = list(prompt), []
        while len(text) < len(prompt) + NEW + K:
            with torch.no_grad():
                hidden = target.forward(torch.tensor([text])).hidden[0]
                text.append(int(target.logits(hidden[-1]).argmax()))
                root = torch.tensor([len(text) - 1])
                logits = drafter.position_logits(drafter.position_features(torch.tensor(text[:-1]), TargetOutput(hidden[None], None)), root)
            if len(text) == len(prompt) + 1:
                features[number] = hidden[-1:].clone()
            proposals.append((len(text) - 1, logits[-1].argmax(-1).tolist()))
        tokens, at, placed, used = text[len(prompt) :], len(prompt), dict(proposals), []
        while at < len(prompt) + NEW - 1:  # a round at each position that is left after acceptance
            used.append(placed[at])
            at += 1 + next((i for i in range(K) if placed[at][i] != text[at + 1 + i]), K)
        answers.append({"tokens": tokens[:NEW], "proposals": used})
    drafts = sum(len(answer["proposals"]) for answer in answers)
    counters = {"vllm:spec_decode_num_drafts": float(drafts), "vllm:spec_decode_num_accepted_tokens": 5.0}
    return {"version": "0", "seconds": 2.0, "counters": counters, "answers": answers}, features


def serve(monkeypatch, target, drafter, reply, features, timed=False):
    monkeypatch.setattr(
        serving, "run_vllm", lambda _python, request, _folder: (reply if request["speculative"] else {"seconds": 5.0}, features)
    )
    return serving.serve(target, drafter, PROMPTS, NEW, K, "python", {"speculative": {"method": "medusa"}}, timed)


def test_equal_proposals_give_equal_rounds(monkeypatch, target, drafter):
    reply, features = engine(target, drafter, PROMPTS)
    served = serve(monkeypatch, target, drafter, reply, features, timed=True)
    rounds = sum(len(answer["proposals"]) for answer in reply["answers"])
    assert (served.prompts, served.texts, served.rounds, served.differences) == (12, 12, rounds, []) and served.same
    assert served.tau == served.tau_here and served.tau.estimate == pytest.approx(12 * (NEW - 1) / rounds)
    assert served.counted == 1 + 5 / rounds and served.speedup == 2.5 and served.speedup_here > 0
    (error,) = served.features
    assert error.layer == -1 and error.largest < 1e-5


@pytest.mark.slow
def test_other_proposals_and_states_are_seen(monkeypatch, target, drafter):
    reply, features = engine(target, drafter, PROMPTS)
    first = reply["answers"][1]["proposals"]
    right, first[0] = first[0], [(token + 1) % 256 for token in first[0]]
    assert serve(monkeypatch, target, drafter, reply, features).same, "one of 132 may be a near tie"
    first[1] = first[0]
    features[0] *= 1.5
    served = serve(monkeypatch, target, drafter, reply, features)
    difference = served.differences[0]
    assert (difference.prompt, difference.position, difference.theirs, difference.ours) == (1, 3, first[0], right) and not served.same
    assert served.features[0].largest == pytest.approx(0.5, rel=1e-3) and served.speedup is None
    lines = check.served_lines(served)
    assert "WRONG: another drafter is served" in lines[1] and "prompt 1, position 3" in lines[2] and "last hidden state" in lines[-1]


def test_an_engine_that_drafts_nothing_is_not_the_same(monkeypatch, target, drafter):
    reply, _ = engine(target, drafter, PROMPTS)
    for answer in reply["answers"]:
        answer["proposals"] = []
    served = serve(monkeypatch, target, drafter, reply | {"counters": {}}, {})
    assert served.rounds == 0 and not served.same and served.counted == 1.0 and served.tau.estimate == 1.0


def test_rounds_are_placed_by_what_they_commit():
    placed = serving.by_position(10, [5, 6, 7, 8, 9], [[6, 7, 1], [9, 9, 9], [3]])
    assert placed == {10: [6, 7, 1], 13: [9, 9, 9]}  # 5 came with the prompt; 6, 7, 8 in the first round, 9 in the second
    assert serving.rounds_of([[0] * 10], [[5, 6, 7, 8, 9]], [placed]) == [2]
    assert serving.rounds_of([[0] * 10], [[5, 6, 7]], [{}]) == [2] and serving.rounds_of([[0]], [[5]], [{}]) == [0]


SCRIPTS = [
    ("raise ImportError('no vllm')", "vLLM stopped with 1: ImportError: no vllm"),
    ("import sys; sys.exit(3)", "vLLM stopped with 3: no word"),
    ("", "vLLM stopped with 0: no word"),
]


def words(folder, *more):
    prompts = ["--prompts", folder / "prompts.jsonl", "--max-new-tokens", 8]
    return [folder / "heads", "--target", folder / "target", "--serve", "vllm", *prompts, *more]


@pytest.mark.parametrize("script, line", SCRIPTS)
def test_an_engine_that_stops_is_one_line(served_folder, monkeypatch, capsys, tmp_path, script, line):
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(serving, "SCRIPT", tmp_path / "script.py")
    said = failing(capsys, check.main, words(served_folder))
    assert f"--serve vllm: {line}" in said and "--python names an environment that has vLLM" in said


def test_no_python_and_too_deep_chains(served_folder, capsys):
    assert "could not be started (No such file or directory)" in failing(capsys, check.main, words(served_folder, "--python", "/no/python"))
    assert "--max-new-tokens 2: expected 3 to" in failing(capsys, check.main, words(served_folder, "--max-new-tokens", 2))
    plain = ["--target", served_folder / "target", "--dtype", "bfloat16"]
    assert "--dtype is of a run in an engine" in failing(capsys, check.main, [served_folder / "heads", *plain])
    assert "medusa looks 3 ahead at most; lower it" in failing(capsys, check.main, words(served_folder, "--depth", 4))


def test_a_difference_is_status_one(served_folder, target, drafter, monkeypatch, capsys):
    prompt = target.tokenizer("abc")["input_ids"]
    reply, features = engine(target, drafter, [prompt])
    monkeypatch.setattr(serving, "run_vllm", lambda *_: (reply, features))
    check.main([str(word) for word in words(served_folder, "--max-new-tokens", NEW)])
    assert "1 of 1 answers are those of plain greedy decoding here" in capsys.readouterr().out
    reply["answers"][0]["proposals"][0][0] += 1
    with pytest.raises(SystemExit) as status:
        check.main([str(word) for word in words(served_folder, "--max-new-tokens", NEW)])
    assert status.value.code == 1 and "WRONG" in capsys.readouterr().out
