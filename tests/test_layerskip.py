"""LayerSkip: the objective is its formula, documents skip layers, and what a run leaves is a target that drafts for itself."""

import json
from pathlib import Path

import pytest
import torch
from packed_data import documents, two_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from zoo import tiny

from draftsmith.eval import loading
from draftsmith.eval.answers import decode_all
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.early_exits import check_exits, dropout_probabilities, exit_states, final_norm
from draftsmith.models.target import Target
from draftsmith.train import layerskip, setup
from draftsmith.train.benchmarks import ablation, paired
from draftsmith.train.layerskip import LayerskipSection, dropped_layers, objective
from draftsmith.train.sweep.trial import Run


def by_hand(model, data, section):
    """One document at a time by transformers' own forward; the exit is the model without its last layer."""
    total, overlap = 0.0, 0.0
    target = Target.wrap(model)  # it freezes the model, so gradients are asked for again
    model.requires_grad_(True)
    for ids, mask in documents(data):
        logits = model(ids[None]).logits[0]
        with target.without([1]):
            early = model(ids[None]).logits[0]
        for t in range(len(ids) - 1):
            if mask[t + 1]:
                p, q = logits[t].detach().softmax(-1), early[t].softmax(-1)
                exit_loss = -q[ids[t + 1]].log() if section.loss == "nll" else (p * (p.log() - q.log())).sum()
                total = total - (1 - section.weight) * logits[t].log_softmax(-1)[ids[t + 1]] + section.weight * exit_loss
                overlap += float(torch.minimum(p, q).sum().detach())
    return total, overlap


@pytest.mark.parametrize(("kind", "loss"), [("llama", "nll"), ("gemma3", "kl")])
def test_the_objective_is_its_formula(kind, loss):
    section, data, results = LayerskipSection(exits=(1,), weight=0.3, loss=loss, dropout=0), two_rows(48), []
    for fast in (True, False):
        model = tiny(kind).double().train()
        if fast:
            fast_loss = objective(model, data, section=section, seed=0)
            value, overlap = fast_loss.sum, float(fast_loss.metrics["acceptance_1"])
            assert fast_loss.weight == data["loss_mask"].sum()
        else:
            value, overlap = by_hand(model.eval(), data, section)
        value.backward()
        results.append((float(value.detach()), overlap, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (value, overlap, grads), (slow, slow_overlap, slow_grads) = results
    assert value == pytest.approx(slow, rel=1e-5) and overlap == pytest.approx(slow_overlap, rel=1e-5)
    for name, gradient in slow_grads.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_a_document_that_skips_a_layer_has_the_output_of_the_model_without_it():
    model, data = tiny("llama").train(), two_rows(48)
    dropped = torch.zeros(2, 2, 24, dtype=torch.bool)
    dropped[1, 0, :10] = True  # the first document of the first row skips layer 1
    complete, exits = exit_states(model, data, [1])
    partly, _ = exit_states(model, data, [1], dropped)
    with Target.wrap(model).without([1]):
        without, _ = exit_states(model, data, [1])
    torch.testing.assert_close(partly[0, :10], without[0, :10])
    torch.testing.assert_close(partly[0, 10:], complete[0, 10:])
    torch.testing.assert_close(partly[1], complete[1])
    torch.testing.assert_close(exits[0], without)
    assert not torch.allclose(partly[0, :10], complete[0, :10])


def test_layers_are_dropped_by_document_and_the_last_most_often():
    model = tiny("llama").train()
    assert dropout_probabilities(5, 0.2) == pytest.approx([0.2 * (2 ** (layer / 4) - 1) for layer in range(5)])
    sample = torch.arange(4000)[:, None].expand(-1, 3).reshape(40, 300)
    data = {"sample_id": sample, "document": sample}
    dropped = dropped_layers(model, data, 0.25, 7)
    assert dropped.shape == (2, 40, 300) and not dropped[0].any()
    assert torch.equal(dropped, dropped_layers(model, data, 0.25, 7)) and not torch.equal(dropped, dropped_layers(model, data, 0.25, 8))
    by_document = dropped[1].flatten().view(4000, 3)
    assert torch.equal(by_document.all(1), by_document.any(1)) and 0.22 < by_document.float().mean() < 0.28
    assert dropped_layers(model.eval(), data, 0.25, 7) is None and dropped_layers(model.train(), data, 0.0, 7) is None


@pytest.fixture
def words(tmp_path, target_folder):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join("for line in lines:\n    yield line.strip()\n" * 4 for _ in range(40)))
    shared = [f"target.path={target_folder}", f"data.train={text}", f"data.cache={tmp_path}", "data.seq_len=32", "layerskip.exits=[1]"]
    return [
        *shared,
        f"train.output={tmp_path / 'out'}",
        "train.steps=3",
        "train.warmup_steps=1",
        "train.eval_batches=1",
        "train.eval_every=0",
    ]


def run(words, *more):
    layerskip.main(["recipes/layerskip-tiny.yaml", *words, *more])
    return Path(next(word for word in words if word.startswith("train.output=")).partition("=")[2]) / "artifact"


def test_a_run_leaves_a_target_that_drafts_for_itself(tmp_path, words, target_folder, monkeypatch):
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": text, "domain": "all"}) + "\n" for text in ("for line in", "yield x")))
    folder = run(words, f"train.tau_file={asked}", "train.tau_prompts=2", "train.tau_tokens=8", "train.eval_every=1", "train.lr=0.01")
    before, after = load_file(Path(target_folder) / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys() and any(not torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {"valid_nll", "valid_acceptance_1", "valid_tau"} <= set(metrics[-1])
    # τ is against the model that is trained: the best would be that of a target whose upper layers do nothing.
    assert not list((tmp_path / "out" / "checkpoints").glob("best-*"))
    target, (drafter,) = loading.open_models(str(folder), ["early-exit:1"], "float32")
    prompts = [[70, 71, 72], [9, 10]]
    plain, drafted = (Decoder(target, each).generate(prompts, max_new_tokens=12, stop_ids=()) for each in (None, drafter))
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in drafted]
    assert "early-exit:1" in (folder / "README.md").read_text()
    monkeypatch.setattr(paired, "encoded_prompts", lambda target, limit: prompts)  # those that ship are too long for this target
    measured = ablation.measure(Run("the-recipe-0", folder.parent, ("layerskip", "layerskip-tiny"), 3, 1, True, ""), 1)
    tokens, rounds = measured["chain of 4, T = 0"]
    target, (drafter,) = loading.open_models(str(folder), ["early-exit:1"], "auto")
    drafter.tree_spec = StaticTree.chain(4)
    answers = decode_all("", Decoder(target, drafter, slots=8), prompts, Sampling(), paired.NEW_TOKENS)
    assert rounds == [len(answer.rounds) for answer in answers] and tokens == [len(answer.tokens) for answer in answers]


def test_tau_is_measured_with_the_recipes_tree(tmp_path, words, monkeypatch):
    (tmp_path / "asked.jsonl").write_text('{"prompt": "for line in", "domain": "all"}\n')
    trees, probe = [], setup.tau_probe
    monkeypatch.setattr(
        setup, "tau_probe", lambda recipe, target, drafter: trees.append(drafter.tree_spec) or probe(recipe, target, drafter)
    )
    run(words, "tree.width=2", "tree.nodes=5", f"train.tau_file={tmp_path / 'asked.jsonl'}", "train.tau_prompts=1", "train.tau_tokens=4")
    assert trees == [DynamicTree(2, 2, 5)]


def test_lora_trains_adapters_alone(tmp_path, words, target_folder):
    pytest.importorskip("peft")
    folder = run(words, "layerskip.lora=2", "train.lr=0.05")
    before, merged = load_file(Path(target_folder) / "model.safetensors"), load_file(folder / "model.safetensors")
    changed = [name for name in before if not torch.equal(merged[name], before[name].bfloat16())]
    assert changed and all("proj" in name for name in changed)
    assert all("lora" in name for name in load_file(folder / "adapter" / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["layerskip.exits=[2]"], r"got exits \[2\]; expected numbers of first layers, 1 to 1, in order"),
        (["layerskip.exits=[]"], r"got exits \[\]; expected"),
        (["layerskip.loss=klx"], "layerskip.loss"),
        (["features.mode=offline"], "features.mode=offline: LayerSkip trains the target itself"),
        (["target.quantise=bnb-int8"], "target.quantise=bnb-int8 is for a frozen target"),
        (["target.parallel=layers"], "target.parallel=layers is for a frozen target"),
        (["train.context_parallel=2"], "context_parallel=2 is for EAGLE"),
        (["train.tau_prompts=1", "train.patience=2"], "train.patience=2 does nothing with LayerSkip"),
        (["train.compile=true"], "train.compile=True does nothing with LayerSkip"),
        (["target.dtype=bfloat16"], "target.dtype=bfloat16 does nothing with LayerSkip"),
    ],
)
def test_wrong_words_are_refused(words, more, says):
    with pytest.raises(ValueError, match=says):
        run(words, *more)


def test_other_architectures_are_known_by_their_final_norm():
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=9, n_positions=8))
    assert final_norm(model) is model.transformer.ln_f
    check_exits(model, [1])
    model.transformer.second_norm = torch.nn.LayerNorm(8)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has 2 norms after its decoder layers"):
        check_exits(model, [1])
