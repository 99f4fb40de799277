"""The optimizers of a run: AdamW, or Muon for matrices and AdamW for the rest (Jordan 2024, https://kellerjordan.github.io/posts/muon/)."""

import math

import torch
from torch import Tensor, nn

from draftsmith.train.recipe import TrainSection

# The quintic of Jordan's post. It drives all singular values of a matrix towards 1, to between about 0.7 and 1.2.
QUINTIC, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
RMS = 0.2  # of an entry of an update at rate 1, as AdamW's (Liu et al. 2025, https://arxiv.org/abs/2502.16982): both take one learning rate
READS_TOKENS = ("lm_head", "embed")  # matrices with a row for each token; Muon is not for them


def make(model: nn.Module, section: TrainSection) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters; norms and biases have no weight decay."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in trained if _by_muon(name, parameter, section)]
    chosen = set(matrices)
    rest = [parameter for _, parameter in trained if parameter not in chosen]
    groups = [
        {"params": [parameter for parameter in rest if parameter.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [parameter for parameter in rest if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"lr": section.lr, "betas": section.betas, "fused": True}
    if section.optimizer == "adamw":
        return torch.optim.AdamW(groups, **options)
    return Muon(
        groups + [{"params": [matrix], "weight_decay": section.weight_decay, "shape": matrix.shape} for matrix in matrices], **options
    )


def _by_muon(name: str, parameter: Tensor, section: TrainSection) -> bool:
    return section.optimizer == "muon" and parameter.ndim == 2 and not any(part in name for part in READS_TOKENS)


class Muon(torch.optim.AdamW):
    """AdamW, but for groups of one matrix that have its "shape": their update is the momentum made orthogonal, with betas[0] as its decay."""

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if "shape" not in group]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if "shape" in group:
                self._step_matrix(group)
        return loss

    def _step_matrix(self, group: dict) -> None:
        (matrix,) = group["params"]
        if matrix.grad is None:
            return
        state, decay = self.state[matrix], group["betas"][0]
        if not state:
            state |= {"step": torch.zeros((), device=matrix.device), "exp_avg": torch.zeros_like(matrix)}
        state["step"] += 1
        momentum = state["exp_avg"].lerp_(matrix.grad, 1 - decay)
        update = orthogonal(matrix.grad.lerp(momentum, decay))  # Nesterov's
        matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * RMS * math.sqrt(max(group["shape"])))


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix [m,n] with singular values near 1, by Newton and Schulz's iteration, in bfloat16."""
    a, b, c = QUINTIC
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
