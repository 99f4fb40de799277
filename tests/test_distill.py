"""Distillation: the objective is its formula, and what a run leaves is an ordinary checkpoint that drafts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from packed_data import documents, two_rows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from watching import Largest
from zoo import tiny

from draftsmith.eval import acceptance
from draftsmith.models import student as students
from draftsmith.models.target import Target
from draftsmith.train import data_cli, distill
from draftsmith.train.distill import DistillSection, objective
from draftsmith.train.losses.survival import along_chains, chain
from draftsmith.train.objective import supervised_tokens

DEPTH = 3


DIVERGENCES = {
    "tv": lambda p, q, token: 1 - torch.minimum(p, q).sum(),
    "kl": lambda p, q, token: (p * (p.log() - q.log())).sum(),
    "reverse_kl": lambda p, q, token: (q * (q.log() - p.log())).sum(),
    "nll": lambda p, q, token: -q[token].log(),
    "0.3 nll + 0.7 tv": lambda p, q, token: -0.3 * q[token].log() + 0.7 * (1 - torch.minimum(p, q).sum()),
}


def by_hand(model, target, data, formula, temperature):
    """One document at a time, one position at a time, through transformers' own forward."""
    total, alphas, hits = 0.0, 0.0, 0
    for ids, mask in documents(data):
        q_logits, p_logits = model(ids[None]).logits[0], target.model(ids[None]).logits[0]
        q_logits = q_logits[:, : p_logits.shape[1]]
        for t in range(len(ids) - 1):
            if mask[t + 1]:
                p, q = (p_logits[t] / temperature).softmax(-1), (q_logits[t] / temperature).softmax(-1)
                total = total + formula(p, q, ids[t + 1])
                alphas += float(torch.minimum(p, q).sum().detach())
                hits += int(p.argmax() == q.argmax())
    return total, alphas, hits


@pytest.mark.parametrize("loss", DIVERGENCES)
@pytest.mark.parametrize(("kind", "temperature"), [("llama", 1.0), ("gemma2", 0.7)])
def test_the_objective_is_its_formula(loss, kind, temperature):
    target = Target.wrap(tiny(kind).double())
    data = two_rows(target.vocab_size)
    section = DistillSection(loss=loss, temperature=temperature)
    results = []
    for fast in (True, False):
        model = tiny(kind, seed=1).double().train()
        if fast:
            loss_of_batch = objective(model, data, target=target, section=section, depth=DEPTH)
            value, alphas, hits = loss_of_batch.sum, float(loss_of_batch.metrics["acceptance"]), int(loss_of_batch.metrics["top1"])
            assert loss_of_batch.weight == data["loss_mask"].sum() == supervised_tokens(data)
        else:
            value, alphas, hits = by_hand(model, target, data, DIVERGENCES[loss], temperature)
        value.backward()
        results.append((float(value.detach()), alphas, hits, {name: p.grad for name, p in model.named_parameters()}))
    (value, alphas, hits, grads), (slow, slow_alphas, slow_hits, slow_grads) = results
    assert (
        value == pytest.approx(slow, rel=1e-6) and alphas == pytest.approx(slow_alphas, rel=1e-6) and hits == slow_hits
    )  # norms and RoPE are in float32
    assert value > 1
    for name, gradient in slow_grads.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
        assert gradient.abs().max() > 0


def test_survival_is_counted_over_complete_chains():
    data = two_rows(50)
    document = data["document"]
    weight = torch.zeros_like(document, dtype=torch.bool)
    weight[:, :-1] = data["loss_mask"][:, 1:] & (document[:, 1:] == document[:, :-1])
    overlap = torch.rand(2, 24, generator=torch.Generator().manual_seed(0)) * weight
    survivals = []
    for row in range(2):
        for t in range(24 - DEPTH + 1):
            if weight[row, t : t + DEPTH].all() and len(document[row, t : t + DEPTH].unique()) == 1:
                survivals.append(overlap[row, t : t + DEPTH].cumprod(0))
    assert len(survivals) > 5
    acceptance, weights = (along_chains(values.flatten(), document, DEPTH) for values in (overlap, weight))
    accepted, anchors = chain(acceptance, weights)
    assert anchors == len(survivals)
    torch.testing.assert_close(accepted / anchors, torch.stack(survivals).mean(0))
    accepted, anchors = chain(acceptance, torch.zeros_like(weights))
    assert anchors == 0 and accepted.sum() == 0


@pytest.mark.parametrize("rows", [40, 64])
def test_padding_of_either_vocabulary_is_left_out(rows):
    """A student whose head has fewer or more rows than the target's 50: what one of them lacks is padding, which no text holds."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    target, model = (LlamaForCausalLM(LlamaConfig(vocab_size=size, max_position_embeddings=64, **sizes)).double() for size in (50, rows))
    data = two_rows(40)
    target = Target.wrap(target)
    loss_of_batch = objective(model, data, target=target, section=DistillSection(loss="tv"), depth=DEPTH)
    slow = 0.0
    for ids, mask in documents(data):
        p, q = target.model(ids[None]).logits[0].softmax(-1), model(ids[None]).logits[0][:, :50].softmax(-1)
        both = min(50, rows)
        alpha = torch.minimum(p[:, :both], q[:, :both]).sum(-1)
        slow += float((1 - alpha)[:-1][mask[1:]].sum().detach())
    assert float(loss_of_batch.sum.detach()) == pytest.approx(slow, rel=1e-6)
    data["input_ids"][0, 3] = 49  # a special token that the smaller one has no row for
    assert objective(model, data, target=target, section=DistillSection(loss="tv"), depth=DEPTH).sum.isfinite()


@pytest.mark.parametrize("loss", ["tv", "jsd(0.5)", "0.5 kl + 0.5 nll"])
def test_no_tensor_grows_with_positions_times_vocabulary(loss):
    vocab, length = 4096, 512
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    target, model = (LlamaForCausalLM(LlamaConfig(vocab_size=vocab, max_position_embeddings=length, **sizes)) for _ in range(2))
    target = Target.wrap(target)
    data = {name: torch.cat([one[:1].repeat(1, 22)[:, :length]]) for name, one in two_rows(vocab).items()}
    data["document"], data["position_ids"] = torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None]
    with Largest() as seen:
        objective(model, data, target=target, section=DistillSection(loss=loss), depth=DEPTH).sum.backward()
    assert 0 < seen.elements < length * vocab / 8
    with Largest() as naive:
        model(data["input_ids"])
    assert naive.elements >= length * vocab


@pytest.fixture
def words(tmp_path, target_folder):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    shared = [
        f"target.path={target_folder}",
        f"data.train={text}",
        f"data.cache={tmp_path}",
        "data.seq_len=32",
        f"train.output={tmp_path / 'out'}",
    ]
    shared += ["student.start=pruned", "student.layers=1", "distill.confidence=0"]
    return [*shared, "train.steps=3", "train.warmup_steps=1", "train.eval_batches=1", "train.tau_prompts=0", "train.eval_every=0"]


def run(words, *more):
    distill.main(["recipes/distill-tiny.yaml", *words, *more])
    return Path(next(word for word in [*words, *more][::-1] if word.startswith("train.output=")).partition("=")[2]) / "artifact"


def test_the_artifact_is_an_ordinary_checkpoint(tmp_path, words, target_folder):
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": text, "domain": "all"}) + "\n" for text in ("for line in", "yield x", "    y = 1")))
    words += [f"train.tau_file={asked}", "train.tau_prompts=3", "train.tau_tokens=8", "train.eval_every=1"]
    folder = run(words)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.num_hidden_layers == 1
    entry = json.loads((folder / "config.json").read_text())["draftsmith"]
    assert entry["target"]["name"] == str(target_folder) and entry["tree"] == [[0] * k for k in range(1, 5)]
    assert entry["training"]["tokens"] == entry["training"]["steps"] * 4 * 32 and entry["confidence"] == 0.0
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {"valid_acceptance", "valid_top1", "valid_sim_tau", "valid_tau"} <= set(metrics[-1])
    # It assists transformers' own generation, which stays what it is.
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    prompt = torch.tensor([[70, 71, 72, 73]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=20)
    assert torch.equal(target.generate(prompt, do_sample=False, max_new_tokens=20, assistant_model=model.float()), plain)
    # And it drafts here, as what it was made for.
    acceptance.main([str(folder), "--prompts", str(asked), "--max-new-tokens", "8", "--temperature", "0"])
    assert (folder / "acceptance.json").is_file()
    run(words)  # there already: measurements stay
    assert (folder / "acceptance.json").is_file()


@pytest.mark.parametrize(
    "start", [["student.start=random", "student.layers=2"], ["student.layers=[1]"], ["student.layers=1", "student.intermediate_size=16"]]
)
def test_starts(words, start):
    folder = run(words, *start)
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == (2 if "student.layers=2" in start else 1)


def test_another_run_for_the_same_target_and_text_does_not_search_for_layers_again(tmp_path, words, monkeypatch, capsys):
    words += ["train.steps=1", f"data.cache={tmp_path / 'cache'}"]
    first = load_file(run(words, f"train.output={tmp_path / 'a'}").parent / "start" / "model.safetensors")
    (file,) = (tmp_path / "cache").glob("layers-*.json")
    searched, search = [], students.removals
    monkeypatch.setattr(students, "removals", lambda *arguments: searched.append(arguments[2]) or search(*arguments))
    again = load_file(run(words, f"train.output={tmp_path / 'b'}", "train.lr=0.01").parent / "start" / "model.safetensors")
    assert not searched and f"stay, as {file} has it" in capsys.readouterr().out
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    run(words, f"train.output={tmp_path / 'c'}", "student.layers=2")
    run(words, f"train.output={tmp_path / 'd'}", "data.seq_len=24")  # other sequences
    assert len(searched) == 2 and len(list(file.parent.glob("layers-*.json"))) == 3
    with pytest.raises(ValueError, match=r"student.layers.* got layers=900"):
        run(words, f"train.output={tmp_path / 'f'}", "student.layers=900")
    file.write_text('{"layers": ["a"]}')
    with pytest.raises(ValueError, match=r"got layers \['a'\]; expected 1 numbers; delete the file"):
        run(words, f"train.output={tmp_path / 'g'}")
    file.unlink()
    searches = len(searched)
    with pytest.raises(ValueError, match="student"):  # before the search
        run(words, f"train.output={tmp_path / 'h'}", "student.hidden_size=65536")
    assert len(searched) == searches
    file.write_text('{"layers": 3}')
    with pytest.raises(ValueError, match=f"{file.name}: `layers` should be a list, got an integer"):
        run(words, f"train.output={tmp_path / 'e'}")


def test_lora_of_a_sibling(tmp_path, words, target_folder):
    before = load_file(Path(target_folder) / "model.safetensors")
    lora = [f"student.start={tmp_path / 'sibling'}", "student.layers=null", "student.lora=2", "train.lr=0.05"]
    shutil.copytree(target_folder, tmp_path / "sibling")
    folder = run(words, *lora)
    merged = load_file(folder / "model.safetensors")
    changed = [name for name in before if not torch.equal(merged[name].float(), before[name].bfloat16().float())]
    assert changed and all("proj" in name for name in changed)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert adapter and all("lora" in name for name in adapter)
    checkpoint = load_file(next((tmp_path / "out" / "checkpoints").glob("step-*")) / "model.safetensors")
    assert len(checkpoint) == len(adapter)
    AutoModelForCausalLM.from_pretrained(folder)
    # Adapters go on with the base that they were made on, or not at all.
    save_file({name: tensor * 0.9 for name, tensor in before.items()}, tmp_path / "sibling" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="student's weights"):
        run(words, *lora, "train.steps=4")


def test_stored_features_teach_the_same(tmp_path, words):
    online = run(words, f"train.output={tmp_path / 'online'}")
    store = [f"features.store={tmp_path / 'store'}", "features.precision=float32"]
    data_cli.main(["capture", "recipes/distill-tiny.yaml", *words, *store])
    offline = run(words, f"train.output={tmp_path / 'offline'}", *store, "features.mode=offline")
    one, other = (load_file(folder / "model.safetensors") for folder in (online, offline))
    start = load_file(tmp_path / "online" / "start" / "model.safetensors")
    assert all(torch.allclose(one[name].float(), other[name].float(), atol=1e-2) for name in one)
    assert any(not torch.equal(one[name].float(), start[name].bfloat16().float()) for name in one)
    lines = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["valid_loss"] for name in ("online", "offline")]
    assert lines[0] == pytest.approx(lines[1], rel=1e-5)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["student.layers=null"], "student.start=pruned needs student.layers"),
        (["student.start=random", "student.layers=[0]"], "student.layers=[0]: a random student has a number"),
        (["distill.loss=tvv"], "distill.loss"),
        (["distill.loss=reverse_kl", "distill.top_k=5"], "reverse_kl"),
        (["distill.on_policy=0.7", "distill.rejections=0.5"], "make more than all rows"),
        (["student.start=tiny-draft", "student.layers=null"], "has another tokenizer than target"),
        (["student.start=./nowhere", "student.layers=null"], "no folder './nowhere'"),
        (["student.start=tiny-draft"], "student.layers=1 says nothing about student.start=tiny-draft"),
        (["student.kv_heads=1"], "student.kv_heads=1 says nothing"),
        (["tree.nodes=5"], "tree.nodes=5 is for a dynamic tree"),
        (["tree.depth=12"], "looks 8 ahead at most"),
        (["distill.on_policy=0.5", "distill.new_tokens=20"], "leaves few tokens for prompts in data.seq_len=32"),
        (["train.tau_prompts=1"], "lower it, or give shorter prompts: train.tau_file"),
    ],
)
def test_wrong_words_are_refused(words, more, says):
    with pytest.raises((ValueError, OSError)) as error:
        run(words, *more)
    assert says in str(error.value)


def test_samples_need_the_target_online(tmp_path, words):
    store = [f"features.store={tmp_path / 'store'}", "features.precision=float32"]
    data_cli.main(["capture", "recipes/distill-tiny.yaml", *words, *store])
    with pytest.raises(ValueError, match="take features.mode=online"):
        run(words, *store, "features.mode=offline", "distill.on_policy=0.5")


def test_the_start_is_made_once(words, monkeypatch):
    """A run that goes on, on whatever rank, begins with what was made first: importance may be measured otherwise there."""
    first = run(words)

    def again(*_, **__):
        raise AssertionError("made again")

    monkeypatch.setattr(students, "pruned", again)
    merged = load_file(first / "model.safetensors")
    more = load_file(run(words, "train.steps=4") / "model.safetensors")
    assert any(not torch.equal(merged[name], more[name]) for name in merged)
    run(words, "train.steps=5", "student.checkpointing=true")  # as where memory ran out
    with pytest.raises(ValueError, match="holds the start of another student"):
        run(words, "train.steps=6", "student.layers=[1]")
    shutil.rmtree(first.parent / "checkpoints")
    with pytest.raises(AssertionError, match="made again"):  # nothing was trained on the old one
        run(words, "train.steps=5", "student.layers=[1]")
