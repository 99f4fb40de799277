"""What can only be shown on a GPU: the same answers, losses and resumed weights as on the CPU."""

import copy
import json
from dataclasses import replace

import pytest
import regeneration
import torch
from packed_data import LENGTHS, corpus_of
from zoo import CONFIGS, VOCAB, tiny, with_heads_of_16

from draftsmith.data import regenerate, synthesise
from draftsmith.data.capture import capture
from draftsmith.data.feature_dataset import FeatureDataset
from draftsmith.data.features import FeatureStore
from draftsmith.data.openings import Opening
from draftsmith.data.packing import PackedDataset, keeps_apart
from draftsmith.data.selection import Plan
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.lookup import Suffix
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import StaticTree
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train.losses.chunked import chunked_cross_entropy

DEVICE = "cuda"
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_medusa_equals_plain(name):
    target = Target.wrap(tiny(name).to(DEVICE))
    drafter = new_drafter("medusa", target, num_heads=3, tree=[list(path) for path in StaticTree.cartesian((4, 2, 2)).paths])
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in (1, 9, 4, 17, 6)]
    for sampling in (Sampling(), Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=3)):
        plain = [answer.tokens for answer in Decoder(target, slots=2).generate(prompts, sampling, 20, ())]
        for rows in (1, 4):
            out = Decoder(target, drafter, slots=rows, timed=True).generate(prompts, sampling, 20, ())
            assert [answer.tokens for answer in out] == plain
            assert {round.accepted for answer in out for round in answer.rounds} >= {1, 2}


def test_the_noise_of_a_draw_is_the_cpus():
    from draftsmith.inference.sampler import gumbel

    request, position = torch.tensor([0, 7, 2**31]), torch.tensor([5, 0, 99])
    here = gumbel(11, request.to(DEVICE), position.to(DEVICE), 1001).cpu()
    torch.testing.assert_close(here, gumbel(11, request, position, 1001), rtol=1e-6, atol=1e-6)


def test_losses_and_gradients_are_the_cpus():
    torch.manual_seed(0)
    hidden, head = torch.randn(96, 32), torch.randn(500, 32)
    targets, weight = torch.randint(500, (96,)), (torch.rand(96) < 0.7).float()
    results = []
    for device in ("cpu", DEVICE):
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in (hidden, head)]
        loss = chunked_cross_entropy(*leaves, targets.to(device), weight.to(device))
        loss.sum.backward()
        results.append([loss.sum.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [regeneration.SAMPLED, regenerate.Settings(max_new_tokens=regeneration.NEW)], ids=["sampled", "greedy"]
)
def test_data_written_by_captured_rounds_is_that_of_the_host(settings, tmp_path):
    """Answers, questions and their order; prompts wait until two of the slots are free."""
    target = regeneration.make_target()
    target.model.to(DEVICE)
    conversations = [replace(given, id=f"{given.id}{copy}") for given in regeneration.CONVERSATIONS for copy in range(3)]
    plan = Plan(20, (Opening("Why is the"), Opening("Write about")), replace(regeneration.SAMPLED, max_new_tokens=16), settings)
    for kernels in (False, True):
        to, options = tmp_path / str(kernels), {"slots": 16, "kernels": kernels, "show": False}
        to.mkdir()
        regenerate.with_decoder(conversations, to / "answers", target, settings, **options)
        synthesise.with_decoder(plan, to / "conversations", target, **options)
    for name in ("answers", "conversations"):
        with_kernels, without = (
            json.loads(f"[{','.join((tmp_path / kind / name).read_text().splitlines())}]") for kind in ("True", "False")
        )
        assert all(row["generation"].pop("kernels") for row in with_kernels) and with_kernels == without and len(without) > 16


@pytest.mark.parametrize("kind", ["draft model", "suffix"])
def test_a_target_on_two_devices_equals_one_on_one(kind):
    """The second layer, the norm and the head stay on the CPU, the draft model is on the GPU: trees and logits lie apart."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny("llama")
    prompts = [[1, 2, 3, 1, 2, 3, 1], [7], [9, 8, 9, 8, 9]]
    plain = {
        how: [a.tokens for a in Decoder(Target.wrap(model)).generate(prompts, how, 20, ())] for how in (Sampling(), Sampling(0.9, seed=1))
    }
    model.model.embed_tokens.to(DEVICE), model.model.layers[0].to(DEVICE), model.model.rotary_emb.to(DEVICE)
    for module, device in (
        (model.model.embed_tokens, DEVICE),
        (model.model.rotary_emb, DEVICE),
        (model.model.layers[0], DEVICE),
        (model.model.layers[1], "cpu"),
        (model.model.norm, "cpu"),
        (model.lm_head, "cpu"),
    ):
        add_hook_to_module(module, AlignDevicesHook(execution_device=device))
    target = Target.wrap(model)
    assert target.device.type == DEVICE
    for how, answers in plain.items():
        drafter = Suffix() if kind == "suffix" else DraftModel(Target.wrap(tiny("llama", 1).to(DEVICE)), StaticTree.cartesian((3, 2)))
        out = Decoder(target, drafter, slots=2).generate(prompts, how, 20, ())
        assert [answer.tokens for answer in out] == answers


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_a_draft_model_equals_plain(shape):
    from decoding_cases import SHAPES, relative

    target, draft = Target.wrap(tiny("llama").to(DEVICE)), relative("llama", 0.005)
    draft = Target.wrap(draft.model.to(DEVICE))
    prompts = [[1, 2, 3, 1, 2, 3, 1], [7], [9, 8, 9, 8, 9]]
    for how in (Sampling(), Sampling(0.9, seed=1), Sampling(0.9, seed=1, rule="shared-noise")):
        plain = [answer.tokens for answer in Decoder(target).generate(prompts, how, 24, ())]
        for rows in (1, 3):
            out = Decoder(target, DraftModel(draft, SHAPES[shape]), slots=rows).generate(prompts, how, 24, ())
            assert [answer.tokens for answer in out] == plain
            assert len({round.accepted for answer in out for round in answer.rounds}) >= 3


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_packed_rows_and_stored_features_are_the_cpus(name, tmp_path):
    """FlexAttention's block masks, and a capture on the GPU, against SDPA's on the CPU."""
    corpus = corpus_of(LENGTHS)
    packed, model = PackedDataset(corpus, 32), tiny(name, config=with_heads_of_16(name))
    cpu, gpu = Target.wrap(model), Target.wrap(copy.deepcopy(model).to(DEVICE))
    gpu.mask_blocks()
    assert keeps_apart(gpu)
    batch = packed.batch(torch.arange(len(packed)))
    expected = cpu.features(batch, (0, 1))
    features = gpu.features({key: value.to(DEVICE) for key, value in batch.items()}, (0, 1))
    capture(gpu, [corpus], tmp_path / "store", "float32", (0, 1))
    stored = FeatureDataset(packed, FeatureStore(tmp_path / "store", gpu, (0, 1)), (0, 1)).batch(torch.arange(len(packed)))
    real = batch["document"] >= 0
    for hidden, taps in ((features.hidden.cpu(), features.taps.cpu()), (stored["hidden"], stored["taps"])):
        torch.testing.assert_close(hidden[real], expected.hidden[real], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(taps[real], expected.taps[real], rtol=1e-3, atol=1e-4)
