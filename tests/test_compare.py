"""Expected rounds against an enumeration and against real decoding; paired comparison of drafters; distilled draft models."""

import itertools
import json
import re
import shutil
from collections import Counter

import pytest
import torch
import yaml
from commands import failing
from decoding_cases import relative

from draftsmith.eval import acceptance, card, compare, comparison, expected, generate, loading
from draftsmith.eval.answers import TargetText, target_texts
from draftsmith.eval.comparison import rounds_along_texts, summarise
from draftsmith.eval.intervals import of_difference, of_ratio
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.expand import DynamicTree, tree_config
from draftsmith.inference.sampler import Sampling, warp
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import SHIPPED, Target

ONE = Sampling(temperature=1.0, rule="rejection")


def every_round(p, q, last, depth):
    """(tokens, probability) of everything that a round of speculative sampling can emit after `last`: each draft, accepted or corrected."""
    outcomes, open_paths = [], [((), 1.0)]
    for _ in range(depth):
        longer = []
        for path, chance in open_paths:
            before = path[-1] if path else last
            rest = (p[before] - q[before]).clamp(min=0)
            for x in range(len(p)):
                ratio = min(1.0, float(p[before, x] / q[before, x]))
                longer.append(((*path, x), chance * float(q[before, x]) * ratio))
                if ratio < 1:
                    missed = chance * float(q[before, x]) * (1 - ratio)
                    outcomes += [((*path, y), missed * float(rest[y] / rest.sum())) for y in range(len(p))]
        open_paths = longer
    return outcomes + [((*path, y), chance * float(p[path[-1], y])) for path, chance in open_paths for y in range(len(p))]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_expected_rounds_equal_an_enumeration_of_all_draws(depth):
    size, length, root = 3, 4, 0
    sampling = Sampling(temperature=0.8, rule="rejection")
    generator = torch.Generator().manual_seed(depth)
    p_logits, q_logits = (torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = (warp(logits, sampling).double().softmax(-1) for logits in (p_logits, q_logits))
    unfinished, finished = Counter({((), ()): 1.0}), Counter()  # by the text so far and the tokens of each round so far
    while unfinished:
        following = Counter()
        for (text, taken), chance in unfinished.items():
            for tokens, share in every_round(p, q, text[-1] if text else root, depth):
                inside = tokens[: length - len(text)]
                state = (text + inside, (*taken, len(inside)))
                target = finished if len(state[0]) == length else following
                target[state] += chance * share
        unfinished = following
    assert sum(finished.values()) == pytest.approx(1, abs=1e-12)
    for text in itertools.product(range(size), repeat=length):
        before = torch.tensor([root, *text[:-1]])
        text_probability = p[before, torch.tensor(text)].prod()  # whatever q is
        rounds = {taken: chance for (end, taken), chance in finished.items() if end == text}
        assert sum(rounds.values()) == pytest.approx(float(text_probability), abs=1e-12)
        a = expected.acceptance_probabilities(p_logits[before], q_logits[before], torch.tensor(text), sampling)
        wanted = [sum(chance * sum(count > k for count in taken) for taken, chance in rounds.items()) for k in range(depth + 1)]
        got = text_probability * expected.rounds_by_accepted(a, depth)
        torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), atol=1e-12, rtol=0)
        assert expected.expected_rounds(a, depth) == pytest.approx(wanted[0] / float(text_probability), abs=1e-11)


def test_probabilities_are_of_the_warped_distributions():
    p, q = torch.tensor([[0.5, 0.3, 0.2]] * 3).log(), torch.tensor([[0.2, 0.2, 0.6]] * 3).log()
    tokens = torch.tensor([0, 1, 2])
    torch.testing.assert_close(expected.acceptance_probabilities(p, q, tokens, ONE), torch.tensor([0.4, 2 / 3, 1.0], dtype=torch.float64))
    two = expected.acceptance_probabilities(
        p, q, tokens, Sampling(temperature=1.0, top_k=2)
    )  # of p 0 and 1 are left, of q (0 and 1 being equal) all
    torch.testing.assert_close(two[:2], torch.tensor([0.2 / 0.625, 0.2 / 0.375], dtype=torch.float64))
    hot = expected.acceptance_probabilities(p, q, tokens, Sampling(temperature=2.0))
    hot_p, hot_q = (x.sqrt() / x.sqrt().sum() for x in (p[0].exp(), q[0].exp()))
    torch.testing.assert_close(hot, (hot_q / hot_p).clamp(max=1).double())
    assert expected.acceptance_probabilities(p, q, tokens, Sampling()).tolist() == [0, 0, 1]
    # Rows past the target's are padding, whatever they say; a token that the drafter lacks is never drafted.
    more = torch.cat((q, torch.full((3, 2), 9.0)), 1)
    assert expected.acceptance_probabilities(p, more, tokens, ONE).tolist() == expected.acceptance_probabilities(p, q, tokens, ONE).tolist()
    assert expected.acceptance_probabilities(p, more, tokens, Sampling()).tolist() == [0, 0, 1]
    torch.testing.assert_close(
        expected.acceptance_probabilities(p, q[:, :2], tokens, ONE), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    )


PROMPTS = [[5], [3, 9, 27, 1], list(range(2, 14)), [40, 41, 2], [11, 7, 7, 7, 30]]


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_greedy_rounds_are_those_of_real_decoding(target, depth, monkeypatch):
    monkeypatch.setattr(comparison, "AT_ONCE", 8)
    drafters = [DraftModel(relative("llama", noise), StaticTree.chain(depth)) for noise in (0.005, 0.02)]
    drafters.append(DraftModel(relative("llama", 0.005, vocab=44), StaticTree.chain(depth)))  # lacks four tokens
    texts = target_texts(target, PROMPTS, Sampling(), 23)
    tokens, rounds = rounds_along_texts(target, drafters, texts, depth, Sampling())
    assert any(token >= 44 for text in texts for token in text.tokens)
    for number, drafter in enumerate(drafters):
        answers = Decoder(target, drafter).generate(PROMPTS, Sampling(), 23)
        assert [answer.tokens for answer in answers] == [text.tokens for text in texts]
        assert rounds[number].tolist() == [len(answer.rounds) for answer in answers] and tokens.tolist() == [23] * 5
    assert len({float(row.sum()) for row in rounds}) == 3


def test_expected_rounds_are_the_mean_of_real_decoding(target):
    """400 requests of two prompts: along their own texts, which are distributed as the target's, and along as many plain texts."""
    depth, count, length = 3, 400, 12
    prompts = [PROMPTS[i % 2] for i in range(count)]
    drafter = DraftModel(relative("llama", 0.03), StaticTree.chain(depth))
    answers = Decoder(target, drafter, slots=100).generate(prompts, ONE, length, stop_ids=(7,))
    real = torch.tensor([len(answer.rounds) for answer in answers], dtype=torch.float64)
    own_texts = [TargetText(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    tokens, (mean,) = rounds_along_texts(target, [drafter], own_texts, depth, ONE)
    assert 0 < sum(tokens < length) and 1.3 < tokens.sum() / real.sum() < 3
    difference = real - mean
    assert difference.abs().max() > 0.5
    assert abs(float(difference.mean())) < 4 * float(difference.std()) / count**0.5
    plain = Decoder(target, slots=100).generate(prompts, ONE, length, stop_ids=(7,), requests=range(1000, 1000 + count))
    texts = [TargetText(prompt, answer.tokens) for prompt, answer in zip(prompts, plain, strict=True)]
    _, (plain_mean,) = rounds_along_texts(target, [drafter], texts, depth, ONE)
    error = ((real.var() + plain_mean.var()) / count) ** 0.5
    assert abs(float(real.mean() - plain_mean.mean())) < 4 * float(error)


def test_differences_are_paired_by_prompt():
    generator = torch.Generator().manual_seed(0)
    tokens, rounds = torch.full((200,), 60.0), torch.randint(15, 60, (200,), generator=generator).double()
    assert of_difference(tokens.expand(2, -1), rounds.expand(2, -1)) == (0.0, 0.0, 0.0)
    better = rounds - torch.randint(0, 6, (200,), generator=generator)
    delta, low, high = of_difference(tokens.expand(2, -1), torch.stack((rounds, better)))
    assert delta == pytest.approx(60 * 200 / float(better.sum()) - 60 * 200 / float(rounds.sum())) and 0 < low < delta < high
    widths = [(tau.high - tau.low) ** 2 for tau in (of_ratio(tokens, counts) for counts in (rounds, better))]
    assert high - low < 0.4 * sum(widths) ** 0.5  # prompts differ far more than the two drafters on one prompt
    (a, b) = summarise(["a", "b"], "1", tokens.expand(2, -1), torch.stack((rounds, better)))
    assert (b["delta"], b["delta_low"], b["delta_high"]) == (delta, low, high) and "delta" not in a
    counts = int((better < rounds).sum()), int((better == rounds).sum()), 0
    assert b["p"] < 0.001 and (b["wins"], b["ties"], b["losses"]) == counts and "p" not in a
    assert a["low"] < a["tau"] == 60 * 200 / float(rounds.sum()) < a["high"]
    shorter = torch.stack((tokens, tokens / 2))  # half the tokens in half the rounds is the same τ
    assert of_difference(shorter, torch.stack((rounds, rounds / 2))) == (0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A random Llama with the tokens of `tiny`, and the entry that distilling writes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("student") / "artifact"
    config = AutoConfig.from_pretrained(SHIPPED["tiny"])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    for name, value in (sizes | {"head_dim": 16}).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.draftsmith = {
        "target": Target.load("tiny", dtype=torch.float32).identity.to_dict(),
        "tree": [[0], [0, 0], [1]],
        "confidence": 0.25,
        "training": {"steps": 12, "tokens": 3456, "positions": 64},
    }
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED["tiny"] / name, folder)
    prompts = [{"prompt": f"def parse_{i}(line", "domain": "ab"[i % 2], "id": str(i)} for i in range(4)]
    (folder.parent / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_distilled_draft_model_brings_its_target_tree_and_confidence(student, tmp_path):
    target, (drafter,) = loading.open_models(None, [str(student)], "float32")
    assert target.name == "tiny" and tree_config(drafter.tree_spec) == [[0], [0, 0], [1]] and str(drafter.stop) == "confidence:0.25"
    config = json.loads((student / "config.json").read_text())
    dynamic = tmp_path / "dynamic"
    shutil.copytree(student, dynamic)
    config["draftsmith"] |= {"tree": {"depth": 3, "width": 2, "nodes": 6}}
    (dynamic / "config.json").write_text(json.dumps(config))
    _, (drafter, other) = loading.open_models("tiny", [str(dynamic), "tiny-draft"], "float32")
    assert drafter.tree_spec == DynamicTree(3, 2, 6) and len(other.tree_spec.paths) == 7 and other.stop is None
    loading.set_stop(drafter, None)
    assert str(drafter.stop) == "confidence:0.25"
    loading.set_stop(drafter, "none")
    assert drafter.stop is None
    config["draftsmith"]["target"]["config_hash"] = "0" * 64
    config["draftsmith"]["target"]["name"] = "org/elsewhere"
    (dynamic / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="made for 'org/elsewhere', got 'tiny'"):
        loading.open_models("tiny", [str(dynamic)], "float32")
    with pytest.warns(UserWarning, match="in bfloat16, this was made with it in float32"):
        loading.open_models("tiny", [str(student)], "bfloat16")


@pytest.mark.slow
def test_measurements_are_written_into_a_distilled_draft_model_only(student, tmp_path, capsys):
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    shutil.copytree(student, own)
    shutil.copytree(student, foreign)
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "draftsmith"}))
    words = f"--prompts {student.parent}/prompts.jsonl --max-new-tokens 8 --temperature 0 --nodes 4 --json --dtype float32".split()
    before = contents(foreign), contents(own)
    exit_on_error(acceptance.main, [str(foreign), *words])
    exit_on_error(acceptance.main, [str(own), *words, "--stop", "confidence:0.5"])
    exit_on_error(acceptance.main, [str(own), *words, "--tree", "largest"])
    assert (contents(foreign), contents(own)) == before
    capsys.readouterr()
    exit_on_error(acceptance.main, [str(own), *words])
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["stop"] == "confidence:0.25"
    written = json.loads((own / "config.json").read_text())
    assert written["draftsmith"]["tree"] == report["tree"]
    assert written | {"draftsmith": written["draftsmith"] | {"tree": [[0], [0, 0], [1]]}} == config
    new = contents(own).keys() - before[1].keys()
    assert new == {"README.md", "acceptance.json", "records.jsonl", "report.html", "survival.png"}
    assert json.loads((own / "acceptance.json").read_text()) == report
    text = (own / "README.md").read_text()
    fields, body = yaml.safe_load(text.split("---\n")[1]), text.split("---\n", 2)[2]
    assert fields["library_name"] == "transformers" and fields["tags"] == ["speculative-decoding", "draftsmith", "draft-model"]
    assert body.startswith("\n# Draft model for tiny\n") and "model-index" in fields
    assert "12 steps, 3,456 tokens" in text and "| domain | T | τ |" in text and "Not measured yet" not in text


def test_the_snippet_of_the_card_runs(student, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(SHIPPED["tiny"].parents[1])
    entry = json.loads((student / "config.json").read_text())["draftsmith"]
    card.write(tmp_path, DraftModel.method, entry["target"], entry["training"])
    text = (tmp_path / "README.md").read_text()
    assert "Not measured yet" in text
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    assert code.count("\n") == 5
    exec(code.replace("<this folder>", str(student)).replace("max_new_tokens=100", "max_new_tokens=8"), {})
    assert capsys.readouterr().out.startswith("def parse_")
    card.write(tmp_path, "medusa", entry["target"], None)
    text = (tmp_path / "README.md").read_text()
    assert "library_name: draftsmith\n" in text and "# medusa drafter for tiny" in text and "python" not in text


def test_drafters_side_by_side(student, capsys):
    prompts = str(student.parent / "prompts.jsonl")
    words = ["tiny-draft", str(student), "ngram", "--prompts", prompts, "--max-new-tokens", "10", "--dtype", "float32"]
    exit_on_error(compare.main, [*words, "--json", "--slots", "4"])
    report = json.loads(capsys.readouterr().out)
    names = ["draft model tiny-draft", f"draft model {student.parent.name}", "ngram"]
    assert [(row["drafter"], row["setting"]) for row in report["rows"]] == [(name, t) for t in ("0", "1") for name in names]
    assert report["same"] == {"0": 4, "1": 4} and report["target"]["name"] == "tiny" and report["settings"]["rule"] == "target-sample"
    assert report["trees"][names[1]] == {"tree": [[0], [0, 0], [1]], "nodes": 4, "depth": 2}
    for row in report["rows"]:
        assert row["tokens"] == 40 and row["tau"] == 40 / row["rounds"] and ("delta" in row) == (row["drafter"] != names[0])
    exit_on_error(compare.main, [*words[:2], *words[3:], "--expected", "--depth", "2", "--json"])
    computed = json.loads(capsys.readouterr().out)
    exit_on_error(
        compare.main, [*words[:2], *words[3:], "--tree", "chain", "--depth", "2", "--json", "--temperature", "0", "--stop", "none"]
    )
    real = json.loads(capsys.readouterr().out)
    assert computed["rows"][:2] == real["rows"] and computed["trees"] == real["trees"]  # to the last bit: exact at T = 0
    assert computed["settings"]["rule"] == "rejection" and not computed["same"] and real["same"] == {"0": 4}
    assert computed["rows"][2]["setting"] == "1 rule=rejection" and computed["rows"][2]["rounds"] % 1
    exit_on_error(compare.main, [*words, "--temperature", "1"])
    printed = capsys.readouterr().out
    assert "Δτ" in printed and "T = 1: 4 of 4 answers are the same with every drafter" in printed


def test_mistakes_in_comparing(student, capsys):
    pair = ["tiny-draft", str(student)]
    for words, says in (
        (["tiny-draft"], "got one drafter, 'tiny-draft'; expected two at least"),
        ([*pair, "ngram", "--expected"], "--expected: ngram is no draft model"),
        ([*pair, "ngram", "--stop", "svip:0.5"], "--stop svip:0.5: ngram does not draft level by level"),
        ([*pair, "--stop", "confidence:1"], "--stop: got confidence 1; expected 0 or more and less than 1"),
        ([*pair, "--expected", "--rule", "target-sample"], "what can be computed is rule rejection"),
        ([*pair, "--expected", "--tree", "dynamic"], "--expected is of complete chains"),
        ([*pair, "--expected", "--stop", "svip:0.1"], "--expected is of complete chains"),
        ([*pair, "--expected", "--draft-window", "4"], "--expected reads complete texts in one forward"),
        ([*pair, "--expected", "--slots", "2"], "--expected reads complete texts in one forward"),
        ([*pair, "--expected", "--sampling", "temperature=1,repetition_penalty=2"], "--expected computes without a repetition penalty"),
        (["a", "b", "--measured", "--sampling", "temperature=1"], "--measured takes the rounds as eval wrote them, got --sampling"),
        (["a", "b", "--measured", "--max-new-tokens", "7"], "got --max-new-tokens"),
        ([*pair, "--expected", "--depth", "9"], "got a tree 9 deep; draft model looks 8 ahead"),
        ([*pair, "--temperature", "-1"], "--temperature -1.0: expected 0 or 0.0001 to 10,000"),
        ([*pair, "--max-new-tokens", "600"], "does not fit the target's context"),
        ([*pair, "ngram", "--rule", "rejection"], "ngram has no distribution to sample children from"),
    ):
        assert says in failing(capsys, compare.main, words), words
    for drafter in ("ngram", "none"):
        assert f"{drafter} does not draft level" in failing(capsys, generate.main, ["--drafter", drafter, "--stop", "gain", "x"])
    assert "--depth is of a drafter's draft tree" in failing(capsys, generate.main, ["--depth", "3", "x"])
    assert "suffix does not draft level" in failing(capsys, acceptance.main, ["suffix", "--stop", "gain"])
