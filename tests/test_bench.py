"""`draftsmith bench`: its figures follow from the reported raw times; all answers are equal; contenders do what their names say."""

import contextlib
import io
import json
import shutil
import statistics
from types import SimpleNamespace

import numpy
import pytest
import torch
from commands import failing
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from draftsmith.data import prompts as prompt_files
from draftsmith.eval import bench, interleaved, loading
from draftsmith.eval.answers import encode_prompts
from draftsmith.eval.benchmarks import transformers as benchmarks
from draftsmith.inference.decoder import Counters
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.errors import exit_on_error
from draftsmith.inference.expand import DynamicTree, parse_tree_spec, tree_config
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import default_paths, new_drafter
from draftsmith.models.target import Target

TEXTS = ("def parse(line):", "for key in keys: print(key)", "import os\nimport os", "return x")
OURS = ["plain", "ngram", "draft model noisy", "suffix", "medusa"]
THEIRS = ["transformers", "transformers, prompt_lookup", "transformers, assistant noisy"]
NEW = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target_folder):
    """Prompts, a draft model (the target with noise on its weights) and an untrained drafter of the target."""
    folder = tmp_path_factory.mktemp("bench")
    rows = ({"prompt": text, "id": text[:6], "domain": "ab"[number % 2]} for number, text in enumerate(TEXTS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(target_folder, folder / "noisy")
    tensors = load_file(folder / "noisy" / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    noisy = {name: tensor + 0.005 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(noisy, folder / "noisy" / "model.safetensors", metadata={"format": "pt"})
    medusa = new_drafter("medusa", Target.load(str(target_folder)), num_heads=2, tree=[[0], [0, 0], [1]])
    medusa.save_pretrained(folder / "medusa" / "artifact")
    return folder


def words(folder, *more):
    return ["--prompts", str(folder / "prompts.jsonl"), f"--max-new-tokens={NEW}", *(str(word) for word in more)]


@pytest.fixture(scope="module")
def printed(folder):
    """What one run prints; the target is the one that the last drafter was made for. No adaptive depth, which depends on the clock."""
    drafters = ("ngram", folder / "noisy", "suffix", folder / "medusa" / "artifact")
    named = [word for drafter in drafters for word in ("--drafter", drafter)]
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(torch.cuda, "is_available", lambda: False)
        exit_on_error(bench.main, words(folder, *named, "--no-adaptive-depth", "--repeats=2", "--json", "--out", folder / "report.json"))
    return output.getvalue()


@pytest.fixture(scope="module")
def report(printed):
    return json.loads(printed)


def test_the_json_is_all_that_is_printed_and_the_file_is_the_same(folder, printed, report, target_folder):
    assert (folder / "report.json").read_text() == printed and not list(folder.glob("*.part"))
    assert list(report["contenders"]) == OURS + THEIRS
    assert report["target"]["name"] == str(target_folder) and report["settings"]["dtype"] == "float32"
    assert report["settings"]["trees"]["medusa"] == [[0], [0, 0], [1]] and report["settings"]["adaptive_depth"] is False
    assert report["settings"]["drafters"]["draft model noisy"] == str(folder / "noisy")
    assert [prompt["tokens"] for prompt in report["prompts"]] == [len(text) for text in TEXTS]
    assert report["machine"].keys() == {"device", "cores", "threads", "torch", "transformers"} and not report["left_out"]
    assert list(report["cost"]["c"]) == ["1", "2", "4", "8", "12", "16", "24", "32", "48", "64"]
    assert report["cost"]["c"]["1"] == 1 and report["cost"]["context"] == sorted(map(len, TEXTS))[1] + NEW // 2


def test_every_answer_is_plain_decodings(report):
    for name, way in report["contenders"].items():
        assert way["same"] == way["answers"] == 2 * len(TEXTS), name
        assert way["tokens"] == report["contenders"]["plain"]["tokens"]
    taus = {name: way["tau"] for name, way in report["contenders"].items()}
    assert taus["plain"] == 1 and all(taus[name] is None for name in THEIRS)
    assert 1 < taus["draft model noisy"] <= NEW and all(taus[name] >= 1 for name in OURS)


def test_all_ratios_follow_from_the_raw_times(report):
    ways = report["contenders"]

    def check(ratio, ours, theirs):
        a, b = ([statistics.median(times) for times in zip(*ways[name]["seconds"], strict=True)] for name in (ours, theirs))
        ratios = numpy.array(b) / numpy.array(a)
        wanted = [*numpy.percentile(ratios, [50, 10, 90]), sum(ways[theirs]["total_s"]) / sum(ways[ours]["total_s"])]
        assert [ratio[key] for key in ("median", "p10", "p90", "total")] == pytest.approx(wanted)

    for name, way in ways.items():
        assert len(way["seconds"]) == 2 and all(len(repeat) == len(TEXTS) and min(repeat) > 0 for repeat in way["seconds"])
        assert way["total_s"] == pytest.approx([sum(repeat) for repeat in way["seconds"]])
        assert way["tokens_per_s"] == pytest.approx(sum(map(sum, way["tokens"])) / sum(way["total_s"]))
        check(way["over_plain"], name, "plain")
        check(way["over_transformers"], name, "transformers")
    rivals = {"plain": 0, "ngram": 1, "draft model noisy": 2, "suffix": 1}
    assert [(pair["ours"], pair["theirs"]) for pair in report["pairs"]] == [(ours, THEIRS[rival]) for ours, rival in rivals.items()]
    for pair in report["pairs"]:
        check(pair, pair["ours"], pair["theirs"])


def test_times_are_compared_by_token_where_the_answers_differ():
    short = {"seconds": [[1.0, 2.0], [3.0, 2.0]], "tokens": [[5, 10], [5, 10]], "tokens_per_s": 3.75}
    complete = {"seconds": [[4.0, 4.0], [4.0, 4.0]], "tokens": [[10, 10], [10, 10]], "tokens_per_s": 2.5}
    ratio = benchmarks.speedup(short, complete)  # 0.4 over 0.4, 0.4 over 0.2
    assert ratio == pytest.approx({"median": 1.5, "p10": 1.1, "p90": 1.9, "total": 1.5})


def test_the_table_has_all_contenders_in_a_hundred_columns(report, capsys):
    benchmarks.print_benchmark(report)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for name in OURS + THEIRS:
        assert all(part in text for part in name.rsplit(" ", 1))
    assert text.count(f"{2 * len(TEXTS)}/{2 * len(TEXTS)}") == len(OURS + THEIRS)
    for pair in report["pairs"]:
        assert f"{pair['ours']}  /  {pair['theirs']}" in text
    assert "c(N) at" in text and "LOSSLESS" not in text


@pytest.fixture(scope="module")
def opened(folder, target_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        target, drafters = loading.open_named(str(target_folder), [str(folder / "noisy"), "ngram"], "auto", False)
        prompts = prompt_files.load(folder / "prompts.jsonl")
        return target, drafters, encode_prompts(target, prompts, 48)[0]


def test_prompt_lookup_and_the_assistant_spare_the_target_forwards(opened):
    target, drafters, prompts = opened
    functions, _, _ = benchmarks.contenders(target, drafters, prompts[0], 48, adaptive_depth=True)
    calls = {"target": 0, "assistant": 0}

    def counting(name):
        def hook(*_):
            calls[name] += 1

        return hook

    models = {"target": target.model, "assistant": drafters["draft model noisy"].model.model}
    handles = [model.register_forward_hook(counting(name)) for name, model in models.items()]
    try:
        spent = {}
        for name in THEIRS:
            calls.update(target=0, assistant=0)
            answers = functions[name](prompts)
            spent[name] = (calls["target"], calls["assistant"], sum(len(answer.tokens) for answer in answers))
    finally:
        for handle in handles:
            handle.remove()
    forwards, drafted, tokens = spent["transformers"]
    assert forwards == tokens and drafted == 0
    forwards, drafted, tokens = spent["transformers, prompt_lookup"]
    assert forwards < tokens and drafted == 0
    forwards, drafted, tokens = spent["transformers, assistant noisy"]
    assert forwards < tokens and drafted > 0


def test_each_drafter_adapts_its_depth_on_its_own_or_not_at_all(opened, monkeypatch):
    target, drafters, prompts = opened
    decoders = []
    monkeypatch.setattr(benchmarks, "Decoder", lambda target, drafter, adaptive: decoders.append((drafter, adaptive)))
    benchmarks.contenders(target, drafters, prompts[0], NEW, adaptive_depth=True)
    assert [drafter for drafter, _ in decoders] == [None, *drafters.values()]
    assert decoders[0][1] is None and None not in [adaptive for _, adaptive in decoders[1:]]
    assert len({id(adaptive) for _, adaptive in decoders[1:]}) == 2
    decoders.clear()
    benchmarks.contenders(target, drafters, prompts[0], NEW, adaptive_depth=False)
    assert len(decoders) == 3 and all(adaptive is None for _, adaptive in decoders)


def test_settings_of_the_target_do_not_slow_or_change_transformers(opened, monkeypatch):
    """A target's own configs may leave the cache out, ask for sampling, forbid tokens or set limits."""
    target, _, prompts = opened
    expected = [answer.tokens for answer in interleaved.answer_with_transformers(target, NEW)(prompts)]
    own = GenerationConfig(
        use_cache=False, do_sample=True, min_new_tokens=4, max_time=1e-3, suppress_tokens=[expected[0][0]], bad_words_ids=[[expected[0][1]]]
    )
    monkeypatch.setattr(target.model, "generation_config", own)
    monkeypatch.setattr(target.model.config, "use_cache", False)
    widths, forward = [], target.model.forward
    monkeypatch.setattr(
        target.model, "forward", lambda *given, **named: widths.append(named["input_ids"].shape) or forward(*given, **named)
    )
    assert [answer.tokens for answer in interleaved.answer_with_transformers(target, NEW)(prompts)] == expected
    assert target.model.generation_config is own and widths.count((1, 1)) == sum(map(len, expected)) - len(prompts)


def test_where_generate_compiles_a_static_cache_is_a_contender_or_says_why_not(opened, monkeypatch):
    target, drafters, prompts = opened
    name = "transformers, static cache compiled"
    assert name not in benchmarks.contenders(target, drafters, prompts[0], NEW, adaptive_depth=True)[0]
    monkeypatch.setattr(benchmarks, "_compiles", lambda target: True)
    functions, _, left_out = benchmarks.contenders(target, drafters, prompts[0], NEW, adaptive_depth=True)
    assert [answer.tokens for answer in functions[name](prompts)] == [answer.tokens for answer in functions["plain"](prompts)]
    assert not left_out
    original = interleaved.answer_with_transformers

    def without_compiler(target, count, assistant=None, **settings):
        if "cache_implementation" not in settings:
            return original(target, count, assistant, **settings)
        return lambda batch: (_ for _ in ()).throw(RuntimeError("no C\ncompiler"))

    monkeypatch.setattr(interleaved, "answer_with_transformers", without_compiler)
    functions, _, left_out = benchmarks.contenders(target, drafters, prompts[0], NEW, adaptive_depth=True)
    assert name not in functions and left_out == {name: "no C compiler"}


def test_a_draft_model_that_transformers_cannot_take_is_left_out_there(opened):
    target, _, prompts = opened
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=250, max_position_embeddings=128, **sizes))
    drafters = {"draft model small": DraftModel(Target.wrap(model), StaticTree.chain(2))}
    functions, counterparts, left_out = benchmarks.contenders(target, drafters, prompts[0], NEW, adaptive_depth=False)
    assert "draft model small" in functions and "draft model small" not in counterparts
    assert left_out == {"transformers, assistant small": "250 logits, the target has 257"}


def test_models_are_loaded_once_under_distinct_names(folder, target_folder, monkeypatch):
    loaded = []
    load = Target.load
    monkeypatch.setattr(Target, "load", lambda path, **settings: loaded.append(str(path)) or load(path, **settings))
    shutil.copytree(folder / "noisy", folder / "other" / "noisy" / "artifact")
    paths = [folder / "noisy", "ngram", folder / "other/noisy/artifact", folder / "medusa/artifact"]
    paths = [*map(str, paths), f"{folder}/./noisy", f"{folder}/./medusa/artifact"]
    _, drafters = loading.open_named(None, paths, "auto", False)
    assert list(drafters) == ["draft model noisy", "ngram", "draft model noisy (2)", "medusa", "draft model noisy (3)", "medusa medusa"]
    assert loaded == [str(target_folder), paths[0], paths[2], paths[4]]


def test_prompts_that_do_not_fit_are_left_out(folder, target_folder, capsys):
    exit_on_error(
        bench.main, words(folder, "--target", target_folder, "--drafter=ngram", "--repeats=1", "--max-new-tokens=110", "--tree=saved")
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "skipped, since prompt and answer exceed the target's 128 positions: " in printed and "NOT LOSSLESS" not in printed


def test_an_answer_that_is_not_plain_decodings_is_reported_and_fails(folder, target_folder, capsys, monkeypatch):
    original = interleaved.answer_with_decoder

    def wrong(decoder, sampling, count):
        def run(batch):
            answers = original(decoder, sampling, count)(batch)
            for answer in answers if isinstance(decoder.drafter, Ngram) else []:
                answer.tokens[3] = (answer.tokens[3] + 1) % 256
            return answers

        return run

    monkeypatch.setattr(interleaved, "answer_with_decoder", wrong)
    with pytest.raises(SystemExit) as exit:
        exit_on_error(
            bench.main, words(folder, "--target", target_folder, "--drafter=ngram", "--drafter=suffix", "--repeats=1", "--limit=1")
        )
    printed = " ".join(capsys.readouterr().out.split())
    assert exit.value.code == 1 and "0/2" in printed and printed.count("NOT LOSSLESS") == 1
    assert "ngram: 0 answers differ from plain's at a tie within measured noise, 2 for no such reason (NOT LOSSLESS)" in printed


def test_capturing_graphs_is_not_timed(monkeypatch):
    """The clock advances by 10 s for a capture, by 2 for prefill and by 1 for rounds."""
    counters, now = Counters(), [0.0]
    monkeypatch.setattr(interleaved, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def answer(batch):
        counters.capture_s, counters.prefill_s, now[0] = counters.capture_s + 10, counters.prefill_s + 2, now[0] + 13
        return []

    functions = {"drafted": answer, "transformers": answer}
    for _, timed in interleaved.interleave(functions, [[], []], counters={"drafted": counters}):
        assert (timed["drafted"].seconds, timed["drafted"].prefill_s) == (3, 2)
        assert (timed["transformers"].seconds, timed["transformers"].prefill_s) == (13, None)


def test_interrupting_leaves_no_traceback_and_no_file(folder, target_folder, monkeypatch):
    seen = []

    def interrupted(functions, batches, *_):
        seen.append((list(functions), len(batches), len(batches[0][0].ids), logging.get_verbosity()))
        raise KeyboardInterrupt

    monkeypatch.setattr(interleaved, "interleave", interrupted)
    before = logging.get_verbosity()
    with pytest.raises(SystemExit) as exit:
        exit_on_error(bench.main, words(folder, "--target", target_folder, "--limit=1", "--out", folder / "never.json"))
    assert exit.value.code == 130 and not (folder / "never.json").exists()
    names = ["plain", "ngram", "suffix", "transformers", "transformers, prompt_lookup"]
    assert seen == [(names, 6, max(map(len, TEXTS[:2])), logging.ERROR)]  # the warm-up is on the first, the longest
    assert logging.get_verbosity() == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--repeats=0",), "--repeats 0: expected 1 to"),
        (("--limit=0",), "--limit 0: expected 1 to"),
        (("--max-new-tokens=0",), "--max-new-tokens 0: expected 1 to"),
        (("--nodes=1",), "--nodes 1: expected 2 to"),
        (
            ("--drafter=ngram", "--drafter=medusa"),
            "drafter 'medusa': expected ngram, suffix, recycling, lookahead, mtp, suffix:FILE, rest:FOLDER, early-exit:LAYERS,",
        ),
        (("--drafter=ngram", "--drafter={folder}/nowhere"), "no folder '{folder}/nowhere'"),
        (("--drafter={folder}/noisy", "--tree=chain", "--depth=9"), "got a tree 9 deep; draft model looks 8 ahead at most"),
        (("--prompts={folder}/no.jsonl",), "no.jsonl' not found"),
        (("--max-new-tokens=127",), "'def pa' has 16 tokens; with 127 new ones it does not fit the target's context of 128"),
        (("--out={folder}/no/report.json",), "--out {folder}/no/report.json: expected a file in a folder that exists"),
        (("--out={folder}",), "expected a file in a folder that exists"),
    ],
)
def test_a_mistake_is_one_line(folder, target_folder, capsys, more, says):
    more = [word.format(folder=folder) for word in more]
    assert says.format(folder=folder) in failing(capsys, bench.main, words(folder, "--target", target_folder, *more))


@pytest.mark.parametrize(
    ("more", "shapes"),
    [
        ((), None),
        (("--no-adaptive-depth",), None),
        (("--tree=chain", "--depth=2"), [StaticTree.chain(2), StaticTree.chain(2)]),
        (("--tree=dynamic", "--width=2", "--nodes=5"), [DynamicTree(4, 2, 5), DynamicTree(4, 2, 5)]),
    ],
)
def test_all_drafters_get_the_requested_tree_and_adaptive_depth(folder, target_folder, monkeypatch, more, shapes):
    benchmarked = []

    def benchmark(target, drafters, prompts, max_new_tokens, repeats, adaptive_depth, sampling):
        assert adaptive_depth is not (more == ("--no-adaptive-depth",))
        benchmarked.extend(drafters.values())
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmarks, "benchmark", benchmark)
    with pytest.raises(SystemExit):
        exit_on_error(bench.main, words(folder, "--target", target_folder, "--drafter", folder / "noisy", "--drafter=ngram", *more))
    wanted = shapes or [parse_tree_spec(default_paths(3, 7)), Ngram().tree_spec]
    assert [tree_config(drafter.tree_spec) for drafter in benchmarked] == [tree_config(shape) for shape in wanted]
