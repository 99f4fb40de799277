"""What can only be shown on a GPU: the same answers, losses and resumed weights as on the CPU."""

import pytest
import torch
from zoo import CONFIGS, VOCAB, tiny

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.tree import Topology
from draftsmith.models.drafter import new_drafter
from draftsmith.models.target import Target
from draftsmith.train.losses import chunked_cross_entropy

DEVICE = "cuda"
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_medusa_equals_plain(name):
    target = Target.wrap(tiny(name).to(DEVICE))
    drafter = new_drafter("medusa", target, num_heads=3, tree=[list(path) for path in Topology.cartesian((4, 2, 2)).paths])
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in (1, 9, 4, 17, 6)]
    for sampling in (Sampling(), Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=3)):
        plain = [answer.tokens for answer in Decoder(target, rows=2).generate(prompts, sampling, 20, ())]
        for rows in (1, 4):
            out = Decoder(target, drafter, rows=rows, timed=True).generate(prompts, sampling, 20, ())
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
    found = []
    for device in ("cpu", DEVICE):
        leaves = [tensor.to(device).requires_grad_() for tensor in (hidden, head)]
        loss = chunked_cross_entropy(*leaves, targets.to(device), weight.to(device))
        loss.sum.backward()
        found.append([loss.sum.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-4)
