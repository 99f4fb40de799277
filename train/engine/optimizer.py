"""The optimizers of a run: AdamW, or Muon for matrices and AdamW for the rest (Jordan 2024, https://kellerjordan.github.io/posts/muon/)."""

import math
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from draftsmith.models.drafter import Output
from draftsmith.train.engine.checkpoint import COMPENSATION, STATE_KEYS
from draftsmith.train.engine.section import TrainSection

# The quintic of Jordan's post. It drives all singular values of a matrix towards 1, to between about 0.7 and 1.2.
QUINTIC, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
KINDS = ("matrix", "table", "vector", "muon")  # in the order of the optimizer's groups
# Of the state of bf16 weights. In bf16 the mean square would stop falling: at betas[1] = 0.999 a step takes less than half a unit of it away.
STATE_DTYPES = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, COMPENSATION: torch.int16}
CHUNK = 1 << 22  # entries of a parameter whose update is in fp32 at a time
EPSILON = 1e-8  # of torch's AdamW
RMS = 0.2  # of an entry of an update at rate 1, as AdamW's (Liu et al. 2025, https://arxiv.org/abs/2502.16982): both take one learning rate


def new_optimizer(model: nn.Module, section: TrainSection) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters. Norms and biases have no weight decay. A group's "factor" multiplies the learning rate.

    A model may have `learning_rates`: the highest learning rate of a part of it, by the part's name. Raises ValueError for train.head_lr
    where no table of tokens is trained.
    """
    rates: dict[str, float] = getattr(model, "learning_rates", {})
    tables = section.lr if section.head_lr is None else section.head_lr
    if section.head_lr is not None and "table" not in {kind for _, kind in _kinds(model, section).values()}:
        raise ValueError(f"train.head_lr={section.head_lr} does nothing: no embedding and no output layer is trained; leave it out")
    by_kind: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, (parameter, kind) in _kinds(model, section).items():
        rate = rates.get(name.partition(".")[0], tables if kind == "table" else section.lr)
        by_kind.setdefault((kind, rate / section.lr), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for kind, factor in sorted(by_kind, key=lambda key: KINDS.index(key[0])):
        group = {"weight_decay": 0.0 if kind == "vector" else section.weight_decay, "factor": factor}
        parameters = by_kind[kind, factor]
        if kind == "muon":
            groups += [{"params": [matrix], **group, "shape": matrix.shape} for matrix in parameters]
        else:
            groups.append({"params": parameters, **group})
    if section.weights == "bfloat16":
        return Kahan(groups, section.lr, section.betas)
    make = Muon if section.optimizer == "muon" else torch.optim.AdamW
    return make(groups, lr=section.lr, betas=section.betas, fused=True)


def cast_trained(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the trained parameters another dtype, in place; tied ones stay tied."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def state_keys(model: nn.Module, section: TrainSection) -> dict[str, tuple[str, ...]]:
    """The tensors that the optimizer keeps for each trained parameter, by its name, beside its step count."""
    more = (COMPENSATION,) if section.weights == "bfloat16" else ()
    return {name: (STATE_KEYS[:1] if kind == "muon" else STATE_KEYS) + more for name, (_, kind) in _kinds(model, section).items()}


def state_bytes(model: nn.Module, section: TrainSection) -> int:
    """Bytes of what the optimizer keeps, beside its step counts."""
    keys, dtypes = state_keys(model, section), STATE_DTYPES if section.weights == "bfloat16" else {}
    sizes = {name: sum(dtypes.get(key, torch.float32).itemsize for key in own) for name, own in keys.items()}
    return sum(parameter.numel() * sizes[name] for name, parameter in model.named_parameters() if name in sizes)


def _kinds(model: nn.Module, section: TrainSection) -> dict[str, tuple[nn.Parameter, str]]:
    """Each trained parameter by name, and its kind, one of KINDS; a table has a row for each token."""
    tables = {
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | Output) or (isinstance(module, nn.Linear) and name.endswith("lm_head"))
    }

    def kind(parameter: nn.Parameter) -> str:
        if parameter.ndim < 2:
            return "vector"
        if parameter in tables:
            return "table"
        return "muon" if section.optimizer == "muon" and parameter.ndim == 2 else "matrix"

    return {name: (parameter, kind(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad}


class Muon(torch.optim.AdamW):
    """AdamW, but for groups of one matrix that have its "shape": their update is the momentum made orthogonal, with betas[0] as its decay.

    Each rank makes the complete update of a matrix from its gathered momentum, and takes its own part, so that every launcher trains the
    same weights. FSDP2 cuts a matrix by rows; DeepSpeed gives the optimizer a part of the flattened matrix.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if "shape" not in group]
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            for matrix in group["params"] if "shape" in group else ():  # ZeRO-3 steps one group at a time, the others being empty
                if matrix.grad is not None:
                    self._step_matrix(matrix, group)
        return loss

    def _step_matrix(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state, decay, gradient = self.state[matrix], group["betas"][0], cast(Tensor, matrix.grad)
        if not state:
            state |= {"step": torch.zeros((), device=matrix.device), "exp_avg": torch.zeros_like(matrix)}
        state["step"] += 1
        momentum = state["exp_avg"].lerp_(gradient, 1 - decay)
        update = _orthogonal_part(gradient.lerp(momentum, decay), group["shape"])  # Nesterov's
        matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * RMS * math.sqrt(max(group["shape"])))


class Kahan(torch.optim.Optimizer):
    """AdamW, and Muon for groups that have a "shape", for bf16 parameters in one process or under DDP, with Kahan's compensated summation.

    A step adds the compensation to a parameter and computes the update, all in fp32. The parameter becomes the sum rounded to bf16, and the
    compensation what the rounding takes away. In bf16 itself, as https://github.com/warner-benjamin/optimi has it, the compensation would lose
    updates below 2^-17 of a weight. Counted in units of fp32's last place it loses none, in as many bytes: the two are an fp32 weight.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient, muon = self.state[parameter], cast(Tensor, parameter.grad), "shape" in group
        names = [name for name in STATE_DTYPES if not (muon and name == "exp_avg_sq")]
        if not state:
            state |= {name: torch.zeros_like(parameter, dtype=STATE_DTYPES[name]) for name in names}
            state["step"] = torch.zeros((), device=parameter.device)
        state["step"] += 1
        tensors = [torch.atleast_1d(tensor) for tensor in (parameter, gradient, *(state[name] for name in names))]
        rows = len(tensors[0]) if muon else max(1, CHUNK * len(tensors[0]) // max(1, parameter.numel()))
        for weight, slope, *own in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            parts = dict(zip(names, own, strict=True))
            slope = slope.float()
            mean = parts["exp_avg"].float().lerp_(slope, 1 - group["betas"][0])
            parts["exp_avg"].copy_(mean)
            if muon:
                update, rate = orthogonal(slope.lerp_(mean, group["betas"][0])), RMS * math.sqrt(max(group["shape"]))
            else:
                update, rate = _adamw_update(slope, mean, parts["exp_avg_sq"], state["step"], group["betas"]), 1.0
            exact = _bits(weight).add_(parts[COMPENSATION]).view(torch.float32).mul_(1 - group["lr"] * group["weight_decay"])
            weight.copy_(exact.add_(update, alpha=-group["lr"] * rate))
            # Half a unit of bf16 more than the weight is one too many for 16 bits.
            parts[COMPENSATION].copy_(exact.view(torch.int32).sub_(_bits(weight)).clamp_(-(1 << 15), (1 << 15) - 1))


def _bits(weight: Tensor) -> Tensor:
    """A bf16 tensor as fp32, its bits read as int32: 1 is a unit in fp32's last digit, 2^16 one in bf16's."""
    return weight.float().view(torch.int32)


def _adamw_update(slope: Tensor, mean: Tensor, square: Tensor, step: Tensor, betas: tuple[float, float]) -> Tensor:
    """AdamW's update at rate 1, in `mean`; `slope` is overwritten, and `square` brought up to date."""
    square.lerp_(slope.square_(), 1 - betas[1])
    root = torch.div(square, 1 - betas[1] ** step, out=slope).sqrt_()
    return mean.div_(1 - betas[0] ** step).div_(root.add_(EPSILON))


def _orthogonal_part(update: Tensor, shape: torch.Size) -> Tensor:
    """`orthogonal` of a complete matrix [m,n], of which each rank holds `update`, a part: the same part of it."""
    if isinstance(update, DTensor):
        return distribute_tensor(orthogonal(update.full_tensor()), update.device_mesh, update.placements)
    if update.shape == shape:
        return orthogonal(update)
    parts = [torch.empty_like(update) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, update)
    complete = torch.cat(parts)  # the flattened matrix, padded at its end
    complete[: shape.numel()] = orthogonal(complete[: shape.numel()].view(shape)).flatten()
    return complete.view(len(parts), -1)[dist.get_rank()]


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix [m,n] with singular values near 1, by Newton and Schulz's iteration, in bfloat16 where the device multiplies that."""
    a, b, c = QUINTIC
    x = matrix.to(_iteration_dtype(matrix.device.type))
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    if x.dtype == torch.float32:
        x = _factor(x @ x.T) @ x
    else:
        for _ in range(ITERATIONS):
            square = x @ x.T
            x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _factor(square: Tensor) -> Tensor:
    """What the iteration multiplies x [m,n] by, from x·xᵀ [m,m] alone: a third of the work where n is 12 m. In bfloat16 its rounding is too coarse."""
    a, b, c = QUINTIC
    factor = torch.eye(len(square), device=square.device)
    for _ in range(ITERATIONS):
        step = torch.addmm(square, square, square, beta=b, alpha=c)
        step.diagonal().add_(a)
        factor, square = step @ factor, step @ square @ step
    return factor


@cache
def _iteration_dtype(device: str) -> torch.dtype:
    """Float32 for a CPU without AVX-512: torch multiplies bfloat16 there by a plain loop, in 24 times the time for a matrix [3072,256]."""
    slow = device == "cpu" and not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.float32 if slow else torch.bfloat16
