"""Published folders, read here: the drafter that they hold decodes as our own artifact does, bit for bit, and imports back into one."""

import json
import shutil
from fnmatch import fnmatch

import pytest
import torch
from commands import failing
from conftest import byte_tokenizer
from export_cases import DRAFTERS, L, edited, family, save_drafter, save_target
from safetensors.torch import load_file, save_file

from draftsmith.eval import loading
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.models.drafter import load_drafter
from draftsmith.models.formats import published, verify
from draftsmith.models.target import Target
from draftsmith.models.weights import WEIGHTS
from draftsmith.train.exchange import export, take_in

PUBLISHED = [
    *(
        (name, "vllm")
        for name in DRAFTERS
        if family(name) != "student" and name not in ("mlp with an LSTM", "dspark with its own mask", "hydra", "kangaroo", "mtp")
    ),
    ("eagle3", "speculators"),
    ("eagle3 of speculators", "speculators"),
    ("medusa that shares the head", "tgi"),
    ("medusa that shares, two blocks", "tensorrt-llm"),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    root = tmp_path_factory.mktemp("workshop")
    target = Target.load(str(save_target(root / "target")))
    for name, engine in PUBLISHED:
        if not (root / name).exists():
            save_drafter(name, target, root / name)
        output = root / "out" / f"{name} for {engine}"
        export.main([str(root / name), "--to", engine, "--output", str(output), "--target", str(root / "target")])
    return root


@pytest.fixture(scope="module")
def target(workshop):
    return Target.load(str(workshop / "target"))


def rounds(target, drafter, temperature):
    """Tokens and rounds of real decoding, and the logits of position records."""
    prompts = [[256, 5, 9, 30], [77, 12, 256, 8, 200, 41, 3]]
    answers = list(Decoder(target, drafter, slots=2).generate(prompts, Sampling(temperature=temperature, seed=3), max_new_tokens=24))
    text = torch.arange(40) * 7 % 257
    features = drafter.position_features(text, target.forward(text[None], taps=drafter.taps))
    logits = drafter.position_logits(features, torch.arange(1, 30))
    return [(answer.tokens, answer.stats.rounds) if hasattr(answer, "stats") else answer.tokens for answer in answers], logits


@pytest.mark.parametrize("name, engine", [pytest.param(*case, marks=[pytest.mark.slow] * (n % 2)) for n, case in enumerate(PUBLISHED)])
def test_a_published_folder_drafts_as_our_artifact_does(workshop, target, name, engine):
    folder = workshop / "out" / f"{name} for {engine}"
    ours, theirs = load_drafter(workshop / name, target), published.read_published(str(folder), target)
    if engine == "tensorrt-llm":  # it has a copy of the target's head for each of ours
        assert not theirs.config.share_head and ours.config.share_head
    else:
        left, right = ours.state_dict(), theirs.state_dict()
        assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    assert theirs.config.tree == ours.config.tree and theirs.depth_limit == ours.depth_limit
    assert theirs.config.target == ours.config.target and not theirs.training
    for temperature in (0.0, 1.0):
        mine, other = rounds(target, ours, temperature), rounds(target, theirs, temperature)
        assert mine[0] == other[0] and torch.equal(mine[1], other[1])


@pytest.mark.parametrize("name, engine", [("eagle3", "vllm"), ("medusa", "vllm"), ("eagle3", "speculators")])
def test_commands_take_the_folder_as_it_is(workshop, name, engine):
    folder = workshop / "out" / f"{name} for {engine}"
    target, (mine, theirs) = loading.open_models(None, [str(workshop / name), str(folder)], "float32")
    assert target.name == str(workshop / "target") and theirs.dtype == torch.float32
    left, right = rounds(target, mine, 0.0), rounds(target, theirs, 0.0)
    assert left[0] == right[0] and torch.equal(left[1], right[1])
    named = loading.open_named(None, [str(folder)], "float32")[1]
    assert list(named) == [mine.method]


def test_generate_takes_it(workshop, capsys):
    from draftsmith.eval import generate

    folder = workshop / "out" / "eagle1 for vllm"
    words = ["--target", str(workshop / "target"), "--dtype", "float32", "--temperature", "0", "--max-new-tokens", "12"]
    texts = []
    for drafter in (str(workshop / "eagle1"), str(folder), "none"):
        generate.main(["abc", "--drafter", drafter, *words])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and texts[0]


@pytest.mark.parametrize("name, engine", [("medusa", "vllm"), ("eagle1", "vllm"), ("eagle3", "speculators")])
def test_import_makes_the_artifact_again(workshop, target, name, engine, tmp_path, capsys):
    folder, output = workshop / "out" / f"{name} for {engine}", tmp_path / "artifact"
    take_in.main([str(folder), "--output", str(output)])  # the folder names its target
    assert f"eval {output}" in capsys.readouterr().out and (output / "README.md").is_file() and (output / "tokenizer.json").is_file()
    ours, theirs = load_drafter(workshop / name, target).state_dict(), load_drafter(output, target).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert "expected a new or an empty folder" in failing(capsys, take_in.main, [folder, "--output", output])
    assert "is no published" in failing(capsys, take_in.main, [workshop / name, "--output", tmp_path / "again"])


def test_a_tree_in_which_no_draft_pays_comes_back(workshop, target, tmp_path):
    artifact = shutil.copytree(workshop / "medusa", tmp_path / "medusa")
    config = json.loads((artifact / "config.json").read_text())
    (artifact / "config.json").write_text(json.dumps(config | {"tree": []}))
    export.main([str(artifact), "--to", "vllm", "--output", str(tmp_path / "out"), "--target", str(workshop / "target")])
    assert published.read_published(str(tmp_path / "out"), target).config.tree == [] == load_drafter(artifact, target).config.tree


def test_terms_and_measurements_of_an_artifact_of_the_hub_go_along(workshop, tmp_path, monkeypatch):
    repo = tmp_path / "cache" / "models--someone--head"
    snapshot = shutil.copytree(workshop / "medusa", repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (snapshot / "README.md").write_text("---\nlicense: mit\n---\n# Theirs\n")
    for name in ("LICENSE", "acceptance.json", "recipe.yaml"):
        (snapshot / name).write_text(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    export.main(["someone/head", "--to", "vllm", "--output", str(tmp_path / "out"), "--target", str(workshop / "target")])
    assert all((tmp_path / "out" / name).read_text() == name for name in ("LICENSE", "acceptance.json", "recipe.yaml"))
    assert "# Theirs" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "draftsmith.json").read_text())["licences"]["drafter"] == "mit"


def test_terms_of_an_imported_drafter_are_its_authors(workshop, tmp_path):
    theirs = edited(workshop / "out" / "medusa for vllm", tmp_path / "theirs", lambda config, tensors: None)
    for file in theirs.glob("*LICENSE*"):
        file.unlink()
    words = [str(theirs), "--target", str(workshop / "target"), "--output"]
    (theirs / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# Theirs\n")
    (theirs / "NOTICE.txt").write_text("Name us.\n")
    (theirs / "target-LICENSE").write_text("of the target\n")
    take_in.main([*words, str(tmp_path / "a")])
    text = (tmp_path / "a" / "README.md").read_text()
    assert "license: cc-by-nc-4.0\n" in text and "Its authors trained it; Draftsmith took it in from `theirs`." in text
    assert "was trained with Draftsmith" not in text and "recipe.yaml" not in text and "Not recorded here" in text
    assert (tmp_path / "a" / "target-LICENSE").read_text() == "of the target\n"
    assert (tmp_path / "a" / "NOTICE.txt").read_text() == "Name us.\n" and not (tmp_path / "a" / "LICENSE").exists()
    (theirs / "README.md").unlink()
    take_in.main([*words, str(tmp_path / "b")])
    assert "license" not in (tmp_path / "b" / "README.md").read_text(), "not the target's"


def without_our_words(config, tensors):
    """As the authors' own trainer leaves it."""
    for key in ("medusa_fc_bias", "hidden_size", "vocab_size", "model_type", "torch_dtype"):
        config.pop(key, None)


def vllm_names(config, tensors):
    heads, layers = config.pop("medusa_num_heads"), config.pop("medusa_num_layers")
    config |= {"num_heads": heads, "num_hidden_layers": layers}
    for name in list(tensors):
        head, block, *rest = name.split(".")
        theirs = f"lm_heads.{head}.weight" if rest == ["weight"] else f"blocks.{head}.layers.{block}.{rest[-1]}"
        tensors[f"medusa_heads.{theirs}"] = tensors.pop(name)


@pytest.mark.parametrize("change", [without_our_words, vllm_names])
def test_medusa_as_others_write_it(workshop, target, change, tmp_path):
    ours = load_drafter(workshop / "medusa of two blocks", target)
    copy = edited(workshop / "out" / "medusa of two blocks for vllm", tmp_path / "copy", change)
    theirs = published.read_published(str(copy), target)
    left, right = ours.state_dict(), theirs.state_dict()
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_one_head_that_is_not_the_targets_is_every_heads_own(workshop, target, tmp_path):
    copy = edited(workshop / "out" / "medusa that shares the head for vllm", tmp_path / "copy", lambda c, t: t["lm_head.weight"].neg_())
    theirs = published.read_published(str(copy), target)
    assert not theirs.config.share_head and torch.equal(theirs.output_weight(2), -target.head_weight)


def test_blocks_without_biases_get_zeros(workshop, target, tmp_path):
    change = lambda c, t: [t.pop(name) for name in list(t) if name.endswith("bias")]  # noqa: E731
    copy = edited(workshop / "out" / "medusa for vllm", tmp_path / "copy", change)
    theirs = published.read_published(str(copy), target)
    assert not theirs.state_dict()["1.0.linear.bias"].any()


REFUSED = {
    "another hidden size": (lambda c, t: c.update(hidden_size=64), "`hidden_size` is 64, target .* has 32"),
    "another vocabulary": (lambda c, t: c.update(vocab_size=99), "`vocab_size` is 99"),
    "two counts": (lambda c, t: c.update(num_heads=2), "expected one number"),
    "no count": (lambda c, t: c.pop("medusa_num_heads"), "expected one number"),
    "a word for a count": (lambda c, t: c.update(medusa_num_heads="3"), "`medusa_num_heads` should be an integer"),
    "too many heads": (lambda c, t: c.update(medusa_num_heads=9), "missing tensors: 3.0.linear"),
    "a token map": (lambda c, t: c.update(token_map="x"), "a smaller vocabulary of Medusa heads"),
    "another tensor": (lambda c, t: t.update(x=torch.ones(1)), "unexpected tensors: x"),
    "misshapen": (lambda c, t: t.update({"0.0.linear.bias": torch.ones(31)}), "misshapen tensors: 0.0.linear.bias"),
    "not finite": (lambda c, t: t["0.0.linear.bias"].fill_(torch.nan), "NaN or infinite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_medusa_folders_that_are_refused(workshop, target, case, tmp_path):
    change, words = REFUSED[case]
    copy = edited(workshop / "out" / "medusa for vllm", tmp_path / "copy", change)
    with pytest.raises(ValueError, match=words) as caught:
        published.read_published(str(copy), target)
    assert "\n" not in str(caught.value)


def test_the_note_beside_a_folder_is_not_believed(workshop, target, tmp_path):
    import shutil

    for key, value, words in (
        ("tree", [[0] * k for k in range(1, 9)], "deeper than the 4 steps"),
        ("tree", "x", "`tree`"),
        ("depth", 0, "`depth` is 0"),
        ("depth", 10**9, "`depth` is 1000000000"),
        ("target", {"name": 3}, "`name`"),
        ("files", [], "`files` should be an object"),
    ):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        copy = shutil.copytree(workshop / "out" / "eagle3 for vllm", tmp_path / "copy")
        note = json.loads((copy / "draftsmith.json").read_text())
        (copy / "draftsmith.json").write_text(json.dumps(note | {key: value}))
        with pytest.raises(ValueError, match=words):
            published.read_published(str(copy), target)


def test_another_target_is_refused_by_both_names(workshop, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": L, "num_attention_heads": 4}
    other = Target.wrap(LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)), name="another")
    with pytest.raises(ValueError, match="made for '.*target', got 'another'"):
        published.read_published(str(workshop / "out" / "medusa for vllm"), other)
    copy = edited(workshop / "out" / "eagle3 for vllm", tmp_path / "copy", lambda c, t: None)
    with pytest.raises(ValueError, match="is not the embedding of target 'another'"):
        published.read_published(str(copy), other)


def test_pickles_and_links_are_not_opened(workshop, target, tmp_path):
    copy = edited(workshop / "out" / "medusa for vllm", tmp_path / "copy", lambda c, t: None)
    file = copy / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    file.unlink()
    torch.save(tensors, copy / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="only pickled weights .*weights_only=True"):
        published.read_published(str(copy), target)
    save_file(tensors, tmp_path / "elsewhere.safetensors")
    file.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ValueError, match="is a link out of its folder"):
        published.read_published(str(copy), target)


def test_what_is_and_what_is_no_published_folder(workshop, tmp_path):
    kinds = {f"{name} for {engine}": family(name).rstrip("13").removeprefix("p") for name, engine in PUBLISHED}
    assert {folder: published.format_of(str(workshop / "out" / folder)) for folder in kinds} == kinds
    for name in ("medusa", "eagle3"):
        assert published.format_of(str(workshop / name)) == ""
    for path in ("tiny", "tiny-draft", str(workshop / "target")):
        assert published.format_of(path) == ""


def test_eagle_heads_that_call_themselves_llamas_are_seen_on_the_hub_too(tmp_path, monkeypatch, target, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    save_file({"fc.weight": torch.zeros(4, 8)}, tmp_path / WEIGHTS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(published, "raw_config", lambda source: (json.loads((tmp_path / "config.json").read_text()), "config.json"))
    monkeypatch.setattr(published, "model_file", lambda source, name, revision: str(tmp_path / name) if source == "x/eagle1" else None)
    monkeypatch.setattr(published, "headers", lambda source, revision: {"x/eagle1": {"fc.weight": None}}[source])
    assert published.format_of("x/eagle1") == "eagle" and published.format_of("x/no-weights") == ""
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    assert "holds only pickled weights" in failing(capsys, take_in.main, [tmp_path, "--output", tmp_path / "out"])


def test_of_a_hub_id_what_was_exported_is_downloaded_and_no_pickle(workshop, target, tmp_path, monkeypatch):
    """So that `check` finds nothing wrong with it; of heads for TensorRT-LLM a file of the engine's own too."""
    exported, here = tmp_path / "there", tmp_path / "here"
    shutil.copytree(workshop / "out" / "medusa that shares, two blocks for tensorrt-llm", exported)
    (exported / "pytorch_model.bin").write_bytes(b"")

    def snapshot(source, allow_patterns, ignore_patterns=()):
        assert source == "someone/eagle3-head"
        for file in exported.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns) and not any(
                fnmatch(file.name, pattern) for pattern in ignore_patterns
            ):
                here.mkdir(exist_ok=True)
                shutil.copy(file, here)
        return str(here)

    monkeypatch.setattr(published, "snapshot_download", snapshot)
    folder = published.folder_of("someone/eagle3-head")
    assert {file.name for file in exported.iterdir()} - {file.name for file in folder.iterdir()} == {"pytorch_model.bin"}
    assert verify.faults(folder, target) == []
    note = json.loads((exported / "draftsmith.json").read_text())
    note["files"] |= dict.fromkeys(("*", "pytorch_model.bin"), "0" * 64)  # a stranger's
    (exported / "draftsmith.json").write_text(json.dumps(note))
    assert not (published.folder_of("someone/eagle3-head") / "pytorch_model.bin").exists()


def test_an_imported_drafter_is_for_the_target_as_it_is_stored(workshop, tmp_path):
    """Without a note of ours: the target is opened in float32."""
    folder = tmp_path / "theirs"
    shutil.copytree(workshop / "out" / "eagle1 for vllm", folder)
    (folder / "draftsmith.json").unlink()
    Target.load(str(workshop / "target"), dtype=torch.bfloat16).model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    take_in.main([str(folder), "--target", str(tmp_path / "target"), "--output", str(tmp_path / "artifact")])
    assert json.loads((tmp_path / "artifact" / "config.json").read_text())["target"]["dtype"] == "bfloat16"
