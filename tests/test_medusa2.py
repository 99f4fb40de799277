"""Medusa-2: its objective is its formula, the adapters are peft's own, and what the artifact drafts for is the adapted target, in so many words."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from watching import Largest
from zoo import tiny

from draftsmith.data.prompts import Prompt
from draftsmith.eval import acceptance, drift, generate, loading
from draftsmith.eval.answers import encode_prompts
from draftsmith.models import adapter
from draftsmith.models.drafter import load_drafter, new_drafter
from draftsmith.models.target import Target
from draftsmith.train import data_cli, medusa
from draftsmith.train.engine import optimizer
from draftsmith.train.exchange.export import open_source
from draftsmith.train.medusa import JointModel, MedusaRecipe, heads_weight, joint_objective
from draftsmith.train.objective import Progress, supervised_tokens

peft = pytest.importorskip("peft")


def recipe_of(*, train=(), medusa=(), **joint):
    settings = {"output": "unused", "steps": 20, "batch_size": 2, "lr": 0.02} | dict(train)
    heads = {"heads": 2, "distill": 0.4} | dict(medusa)
    fixed = {"rank": 3, "alpha": 6, "dropout": 0.0, "heads_steps": 10, "weight": 0.3, "lr": 0.002}
    return MedusaRecipe.model_validate({"train": settings, "medusa": heads, "joint": fixed | joint})


def joint_model(target, recipe, progress):
    """Random heads and random adapters, in the target's precision."""
    heads = new_drafter("medusa", target, num_heads=recipe.medusa.heads, share_head=recipe.medusa.share_head)
    model, objective = medusa.with_adapters(recipe, heads, target, progress)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(target.dtype).train(), objective


def batch(vocab, length=20):
    """Two rows; the first has two documents, the second padding."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(vocab, (2, length), generator=generator)
    mask = torch.rand(2, length, generator=generator) < 0.8
    document, positions = torch.zeros_like(ids), torch.arange(length).repeat(2, 1)
    document[0, 9:], positions[0, 9:] = 1, torch.arange(length - 9)
    document[1, 16:], positions[1, 16:], mask[1, 16:] = -1, torch.arange(length - 16), False
    mask[:, 0] = mask[0, 9] = False
    return {"input_ids": ids, "loss_mask": mask, "position_ids": positions, "document": document, "sample_id": document}


def by_hand(model, target, original, data, recipe):
    """(base, the heads' loss): one document at a time, one position at a time, by transformers' and peft's own forward."""
    section, base, heads = recipe.medusa, 0.0, 0.0
    for row in range(2):
        for number in range(2):
            inside = data["document"][row] == number
            ids, mask = data["input_ids"][row][inside], data["loss_mask"][row][inside]
            if not len(ids):
                continue
            out = model.adapted(ids[None], output_hidden_states=True)
            hidden, adapted = out.hidden_states[-1][0], out.logits[0].log_softmax(-1)
            before = original(ids[None]).logits[0].log_softmax(-1)
            for t in range(len(ids) - 1):
                if mask[t + 1]:
                    kl = (before[t].exp() * (before[t] - adapted[t])).sum()
                    base = base + (kl if recipe.joint.base == "kl" else -adapted[t, ids[t + 1]])
            for k in range(section.heads):
                losses = []
                for t in range(len(ids) - 2 - k):
                    if mask[t + 2 + k]:
                        log_q, log_p = model.heads.logits_of(k, hidden[t]).log_softmax(-1), adapted[t + 1 + k].detach()
                        divergence = (log_p.exp() * (log_p - log_q)).sum()
                        losses.append((1 - section.distill) * -log_q[ids[t + 2 + k]] + section.distill * divergence)
                if losses:
                    heads = heads + section.decay**k * torch.stack(losses).mean() * mask.sum()
    return base, heads


@pytest.mark.parametrize(("base", "share"), [("kl", False), ("ce", False), ("kl", True)])
def test_the_joint_objective_is_its_formula(base, share):
    target, original = Target.wrap(tiny("llama").double()), tiny("llama").double()
    recipe = recipe_of(base=base, medusa={"share_head": share})
    model, objective = joint_model(target, recipe, Progress(14))
    data = batch(target.vocab_size)
    λ = 0.3 * math.sin(math.pi / 2 * 5 / 10)
    loss = objective(model, data)
    loss.sum.backward()
    slow, heads = by_hand(model, target, original, data, recipe)
    assert float(loss.sum) == pytest.approx(float(slow + heads), rel=1e-6) and float(loss.metrics["base"]) == pytest.approx(float(slow))
    assert loss.weight == supervised_tokens(data) > 10 and float(slow) > 1
    adapters, own = model.adapters(), list(model.heads.parameters())
    assert len(adapters) == 2 * 2 * 7 and len(adapters) + len(own) == sum(each.requires_grad for each in model.parameters())
    wanted = torch.autograd.grad(slow + λ * heads, adapters, retain_graph=True) + torch.autograd.grad(heads, own)
    for parameter, gradient in zip([*adapters, *own], wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
        assert gradient.abs().max() > 0


def test_at_first_the_heads_are_trained_alone():
    target = Target.wrap(tiny("llama"))
    recipe, progress = recipe_of(), Progress()
    heads = new_drafter("medusa", target, num_heads=2)
    plain = medusa.objective(heads, batch(48), target=target, section=recipe.medusa)
    model, objective = medusa.with_adapters(recipe, heads, target, progress)
    loss = objective(model.train(), batch(48))
    assert torch.equal(loss.sum, plain.sum) and loss.metrics["base"] == 0
    loss.sum.backward()
    assert all((parameter.grad == 0).all() for parameter in model.adapters())
    assert all(parameter.grad.abs().max() > 0 for name, parameter in heads.named_parameters() if not name.endswith("bias"))
    assert progress.stage == 0
    progress.steps = 10
    assert objective(model, batch(48)).sum.isfinite() and progress.stage == 1  # FLOPs are counted again
    assert all(parameter.grad is not None for parameter in model.adapters())


def test_the_weight_rises_as_a_quarter_of_a_sine_wave():
    recipe = recipe_of()
    weights = [heads_weight(recipe.joint, done, 20) for done in range(20)]
    assert weights[:10] == [0.0] * 10 and weights[19] == pytest.approx(0.3)
    assert weights[10:] == pytest.approx([0.3 * math.sin(math.pi / 2 * (i + 1) / 10) for i in range(10)])
    assert [heads_weight(recipe_of(schedule="constant").joint, done, 20) for done in (9, 10, 19)] == [0.0, 0.3, 0.3]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_heads_and_adapters_have_learning_rates_of_their_own(kind):
    recipe = recipe_of(train={"optimizer": kind, "head_lr": 0.01})
    model, _ = medusa.with_adapters(
        recipe, new_drafter("medusa", Target.wrap(tiny("llama")), num_heads=2), Target.wrap(tiny("llama")), Progress()
    )
    rates = {
        id(each): group["factor"] * recipe.train.lr
        for group in optimizer.new_optimizer(model, recipe.train).param_groups
        for each in group["params"]
    }
    tables = {id(model.heads.output_weight(k)) for k in range(2)}
    for each in model.heads.parameters():
        assert rates[id(each)] == pytest.approx(0.01 if id(each) in tables else 0.02)
    assert {round(rates[id(each)], 9) for each in model.adapters()} == {0.002} and len(rates) == 6 + 28


def test_only_the_adapters_dropout_is_turned_on():
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.5
    )
    target = Target.wrap(LlamaForCausalLM(config))
    model, _ = medusa.with_adapters(recipe_of(dropout=0.5), new_drafter("medusa", target, num_heads=2), target, Progress())
    model.train()
    on = [name for name, module in model.adapted.named_modules() if module.training]
    assert on and all("lora_dropout" in name for name in on) and model.heads.training
    assert not any(module.training for module in model.eval().modules())


def largest(heads, base):
    vocab, length = 4096, 512
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = Target.wrap(LlamaForCausalLM(LlamaConfig(vocab_size=vocab, max_position_embeddings=length, **sizes)))
    recipe = recipe_of(base=base, medusa={"heads": heads, "share_head": True})
    model, objective = joint_model(target, recipe, Progress(14))
    data = {name: one[:1].repeat(1, 26)[:, :length] for name, one in batch(vocab).items()}
    data["document"], data["position_ids"] = torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None]
    with Largest() as seen:
        objective(model, data).sum.backward()
    return seen.elements, length * vocab


@pytest.mark.parametrize("base", ["kl", "ce"])
def test_logits_exist_in_chunks_whatever_the_number_of_heads(base):
    sizes = {heads: largest(heads, base) for heads in (2, 6)}
    assert 0 < sizes[2][0] == sizes[6][0] < sizes[2][1] / 4  # the square of the length is an eighth


@pytest.fixture(scope="module")
def words(tmp_path_factory, target_folder):
    folder = tmp_path_factory.mktemp("medusa2")
    (folder / "text.txt").write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    (folder / "valid.txt").write_text(
        "<|endoftext|>".join(f"def area_{n}(a, b):\n    return a * b + {n}\n\n\nprint(area_{n}({n}, 2))\n" for n in range(8))
    )
    keys = {"target.path": target_folder, "data.train": folder / "text.txt", "data.valid": folder / "valid.txt", "data.cache": folder}
    keys |= {"data.seq_len": 32, "train.steps": 6}
    keys |= {"joint.heads_steps": 2, "joint.rank": 4, "joint.lr": 0.02, "joint.schedule": "sine", "joint.dropout": 0.2}
    keys |= {"train.warmup_steps": 0, "train.eval_every": 0, "train.eval_batches": 1, "train.save_every": 0, "train.precision": "fp32"}
    return [f"{key}={value}" for key, value in keys.items()]


def run(words, output, *more):
    medusa.main(["recipes/medusa2-tiny.yaml", *words, f"train.output={output}", *more])
    return output / "artifact"


@pytest.fixture(scope="module")
def artifact(words, tmp_path_factory):
    return run(words, tmp_path_factory.mktemp("run") / "out")


def tensors(folder):
    return {(file.name, name): each for file in sorted(folder.rglob("*.safetensors")) for name, each in load_file(file).items()}


@pytest.mark.parametrize("stop", [1, 4])
def test_stopped_in_either_stage_it_resumes_to_the_last_bit(words, artifact, stop, tmp_path, monkeypatch):
    calls = 0

    def interrupted(model, data, **settings):
        nonlocal calls
        calls += model.training
        if model.training and calls == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return joint_objective(model, data, **settings)

    monkeypatch.setattr(medusa, "joint_objective", interrupted)
    with pytest.raises(SystemExit) as exit:
        run(words, tmp_path / "out")
    assert exit.value.code == 128 + signal.SIGTERM and calls == stop
    monkeypatch.undo()
    resumed, expected = tensors(run(words, tmp_path / "out")), tensors(artifact)
    assert resumed.keys() == expected.keys() and len({file for file, _ in expected}) == 2
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert any(each.abs().max() > 0 for (_, name), each in expected.items() if "lora_B" in name)


def test_the_command_of_a_finished_training_writes_the_same_artifact_again(words, artifact):
    """The confidence is fitted again: without the adapters' dropout, as the first time."""
    before = {file.name: file.read_bytes() for file in artifact.iterdir() if file.suffix in (".json", ".safetensors")}
    assert json.loads(before["config.json"])["confidence_weights"]
    shutil.rmtree(artifact)
    run(words, artifact.parent)
    assert {name: (artifact / name).read_bytes() for name in before} == before


def test_it_does_not_go_on_with_another_target(words, target_folder, tmp_path):
    shutil.copytree(target_folder, tmp_path / "target")
    (tmp_path / "asked.jsonl").write_text('{"prompt": "for line in", "domain": "all"}\n')
    keys = [
        *words,
        f"target.path={tmp_path / 'target'}",
        f"train.tau_file={tmp_path / 'asked.jsonl'}",
        "train.tau_prompts=1",
        "train.tau_tokens=4",
    ]
    run(keys, tmp_path / "out")
    assert not list((tmp_path / "out" / "checkpoints").glob("best-*")), "the target changes too: the last weights are published"
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    model.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="target's files"):
        run(keys, tmp_path / "out", "train.steps=7")


def test_the_adapters_are_pefts_own(artifact, target_folder):
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(target_folder)(ids).logits
        active = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(target_folder), str(artifact), subfolder="adapter"
        ).eval()
        logits = active(ids).logits
        assert (logits - original).abs().max() > 1e-2, "training has changed nothing"
        with active.disable_adapter():
            assert torch.equal(active(ids).logits, original)
        target = adapter.adapt(Target.load(str(target_folder)), artifact)  # merged
        torch.testing.assert_close(target.logits(target.forward(ids).hidden), logits, rtol=0, atol=1e-5)
        assert not any("lora" in name for name, _ in target.model.named_parameters())
    assert json.loads((artifact / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(target_folder)


def test_it_belongs_to_the_adapted_target_alone(artifact, target_folder, tmp_path):
    target = Target.load(str(target_folder))
    with pytest.raises(
        ValueError, match=r"made for '.*' with adapters \(.*\), got '.*' without adapters: .* lossless with respect to the model"
    ):
        load_drafter(artifact, target)
    plain = new_drafter("medusa", target, num_heads=2)
    plain.save_pretrained(tmp_path / "plain")
    adapted, (drafter,) = loading.open_models(None, [str(artifact)], "float32")
    assert drafter.target is adapted and adapted.identity.adapter_hash == drafter.config.target["adapter_hash"]
    with pytest.raises(ValueError, match=r"made for '.*' without adapters, got '.*' with adapters"):
        load_drafter(tmp_path / "plain", adapted)
    shutil.copytree(artifact, tmp_path / "cut")
    (tmp_path / "cut" / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no adapter/adapter_model.safetensors .* adapted target; copy it completely"):
        loading.open_models(None, [str(tmp_path / "cut")], "float32")
    shutil.copytree(artifact, tmp_path / "swapped")
    file = tmp_path / "swapped" / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ValueError, match="with adapters .* with adapters"):
        loading.open_models(None, [str(tmp_path / "swapped")], "float32")


def test_answers_of_the_target_are_not_written_by_the_adapted_one(artifact, target_folder, tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "for line in lines"}\n')
    with pytest.raises(ValueError, match="--drafter .* adapts .*, so that the answers would not be its own"):
        data_cli.run_regenerate([str(source), str(tmp_path / "out.jsonl"), "--target", str(target_folder), "--drafter", str(artifact)])
    assert not (tmp_path / "out.jsonl").exists()


def test_the_drift_is_what_transformers_and_peft_say(artifact, target_folder):
    base = AutoModelForCausalLM.from_pretrained(target_folder)
    active = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(target_folder), str(artifact), subfolder="adapter").eval()
    adapted, _ = loading.open_models(None, [str(artifact)], "float32")
    texts = ("for line in", "    yield x", "y = 1; z", "def f(")
    prompts, _ = encode_prompts(adapted, [Prompt(text, "all", text, ()) for text in texts], 10)
    measured = drift.measure(loading.without_adapters(adapted), adapted, prompts, 10)
    kl, tokens, changed, losses, length = 0.0, 0, 0, [0.0, 0.0], 0
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        texts = [model.generate(input_ids=ids, do_sample=False, max_new_tokens=10, pad_token_id=0) for model in (base, active)]
        changed += texts[0].tolist() != texts[1].tolist()
        with torch.no_grad():
            p, q = (model(texts[0]).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1) for model in (base, active))
            kl, tokens = kl + float((p.exp() * (p - q)).sum()), tokens + len(p)
            each = [float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for model in (base, active)]
        losses, length = [a + b for a, b in zip(losses, each, strict=True)], length + ids.shape[1] - 1
    assert (measured["prompts"], measured["answer_tokens"], measured["text_tokens"]) == (4, tokens, length)
    assert measured["kl"] == pytest.approx(kl / tokens, rel=1e-3) and measured["kl"] > 1e-3
    assert measured["changed"] == changed / 4
    perplexities = [math.exp(loss / length) for loss in losses]
    assert [measured["perplexity"], measured["adapted_perplexity"]] == pytest.approx(perplexities, rel=1e-4)
    assert abs(perplexities[0] - perplexities[1]) > 0.01


def test_report_and_card_say_what_is_lossless(artifact, target_folder, tmp_path, capsys):
    said = "lossless with respect to the adapted model only"
    assert said in " ".join((artifact / "README.md").read_text().split())
    asked = tmp_path / "asked.jsonl"
    asked.write_text(
        "".join(json.dumps({"prompt": text, "domain": "all"}) + "\n" for text in ("for line in", "yield x", "    y = 1", "def f"))
    )
    folder = tmp_path / "artifact"
    shutil.copytree(artifact, folder)
    acceptance.main([str(folder), "--prompts", str(asked), "--max-new-tokens", "8", "--temperature", "0"])
    card, printed = (folder / "README.md").read_text(), capsys.readouterr().out
    for text in (printed, card, (folder / "report.html").read_text()):
        assert said in text and "drift from the target without adapters: KL" in text
    assert "answers equal plain decoding's" in printed and '"<this folder>", subfolder="adapter"' in card
    report = json.loads((folder / "acceptance.json").read_text())
    assert report["drift"]["prompts"] == 4 and report["target"]["adapter_hash"] and len(report["drift_lines"]) == 2
    acceptance.main(["--from", str(folder), "--out", str(tmp_path / "again"), "--json"])
    assert json.loads(capsys.readouterr().out) == report
    generate.main(["--drafter", str(folder), "--max-new-tokens", "6", "for line"])
    assert said in capsys.readouterr().err


def test_the_adapters_go_along_to_the_hub_and_to_no_engine(artifact, tmp_path, monkeypatch):
    drafter = load_drafter(artifact)
    drafter.save_pretrained(tmp_path)
    monkeypatch.setattr(
        PreTrainedModel, "_upload_modified_files", lambda self, folder: sorted(path.name for path in (folder / "adapter").iterdir())
    )
    assert drafter._upload_modified_files(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(ValueError, match="with the adapters in its folder `adapter`, and no engine's format has a place for them"):
        open_source(str(artifact), None)


def refusals():
    return [
        (["features.mode=offline"], "features.mode=offline: Medusa-2 needs gradients through the target, and a store has none"),
        (["features.mode=cache"], "features.mode=cache: Medusa-2 needs gradients"),
        (["joint.heads_steps=6"], "joint.heads_steps=6 leaves no step with adapters of train.steps=6"),
        (["target.parallel=layers"], "target.parallel=layers: Medusa-2 trains adapters of a target that is complete"),
        (["target.quantise=bnb-nf4"], "target.quantise=bnb-nf4: Medusa-2 trains adapters"),
        (["joint.rank=-1"], "joint.rank"),
        (["train.tau_prompts=1", "train.patience=2"], "train.patience=2 does nothing with joint.rank="),
        (["joint.base=mse"], "'kl' or 'ce'"),
    ]


@pytest.mark.parametrize(("more", "says"), refusals())
def test_wrong_words_are_refused(words, tmp_path, more, says):
    with pytest.raises(ValueError) as error:
        run(words, tmp_path / "out", *more)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("launcher", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_launchers_that_cut_what_is_trained_are_refused(words, tmp_path, launcher, monkeypatch):
    monkeypatch.setenv(launcher, "true")
    with pytest.raises(ValueError, match="FSDP and DeepSpeed cut what they train"):
        run(words, tmp_path / "out")


def test_without_peft_it_says_so(words, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install draftsmith\[peft\]"):
        run(words, tmp_path / "out")
    assert not (Path(tmp_path) / "out" / "artifact").exists()


def test_a_model_of_its_own_is_a_joint_model():
    target = Target.wrap(tiny("llama"))
    model, _ = medusa.build_untrained(recipe_of(), target)
    assert (
        isinstance(model, JointModel)
        and type(medusa.build_untrained(recipe_of(rank=0), Target.wrap(tiny("llama")))[0]).__name__ == "MedusaModel"
    )
