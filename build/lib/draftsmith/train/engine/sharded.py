"""What Accelerate wrapped, seen whole: weights and moments by parameter name, the same under DDP, FSDP2 and DeepSpeed.

So a checkpoint knows no launcher: what ZeRO-3 saved, one process loads.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from draftsmith.models.drafter import DrafterModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedModel:
    """`model` as it is trained (`module`, to be called, and `optimizer`) and as it is whole.

    Under FSDP2 and DeepSpeed a copy is trained in pieces and `model` waits on the CPU until `gather`; otherwise it is trained itself.

    unit: what makes of the model to be trained the module whose forward is one step's. FSDP2 gathers its parameters for the whole of it, since
    losses read heads without calling them; ZeRO-3 finds such reads by itself.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        unit: Callable[[nn.Module], nn.Module],
        optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    ) -> None:
        self.accelerator, self.model = accelerator, model
        self.kind = accelerator.distributed_type
        self.sharded = self.kind in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        self.trained = _twin(model) if self.sharded else model
        self.trained.to(accelerator.device)
        step = unit(self.trained)
        self.module, self.optimizer = accelerator.prepare(step, optimizer_of(self.trained))
        if self.sharded:
            model.to("cpu")

    def gather(self) -> None:
        """Give `model` the weights that are being trained. All ranks call it."""
        if not self.sharded:
            return
        plain = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self._parameters():
                plain[name].copy_(self._full(parameter))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it `model` has the weights that are being trained and is on the device, to be decoded with. All ranks enter it."""
        self.gather()
        if self.sharded:
            self.model.to(self.accelerator.device)
        try:
            yield
        finally:
            if self.sharded:
                self.model.to("cpu")

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state by "moment.parameter" and "step.parameter", on the CPU. All ranks call it; the first one's is whole."""
        found = {}
        self._link()
        for name, parameter in self._parameters():
            state = self._state_of(parameter)
            if not state:
                continue
            found[f"step.{name}"] = torch.as_tensor(state["step"], dtype=torch.float32).cpu().clone()
            for key in MOMENTS:
                value = self._full(parameter, key, state)
                if self.accelerator.is_main_process:
                    found[f"{key}.{name}"] = value.cpu().contiguous()
        return found

    def restore(self, moments: dict[str, Tensor]) -> None:
        """Take up what `moments` gave on the first rank, whose word counts; and `model`'s weights as the masters of reduced precision.

        `model` had its weights before it was wrapped.
        """
        if self.kind == DistributedType.DEEPSPEED:
            return self._restore_deepspeed(moments)
        for name, parameter in self._parameters():
            if f"step.{name}" not in moments:
                continue
            state = {key: moments[f"{key}.{name}"].to(parameter.device) for key in MOMENTS}
            if isinstance(parameter, DTensor):
                state = {key: distribute_tensor(full, parameter.device_mesh, parameter.placements) for key, full in state.items()}
            # The fused kernel wants its count beside the parameter.
            self.optimizer.state[parameter] = state | {"step": moments[f"step.{name}"].to(parameter.device)}

    def applied(self, norm: Any) -> bool:
        """Whether gradients of this norm may be (DeepSpeed: were) stepped on: it is finite, the same on all ranks."""
        if self.kind == DistributedType.DEEPSPEED:
            return self.module.was_step_applied()
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return bool(torch.as_tensor(norm).isfinite())

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, as the optimizer knows it."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):  # a forward without a backward leaves the outermost gathered
                unit.reshard()
        return [(name, parameter) for name, parameter in self.trained.named_parameters() if parameter.requires_grad]

    def _full(self, parameter: Tensor, key: str | None = None, state: dict[str, Tensor] | None = None) -> Tensor:
        """A trained parameter (or one of its moments) whole, in the precision of its master. All ranks call it."""
        if self.kind == DistributedType.DEEPSPEED:
            from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

            return cast(Tensor, safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter))
        value = parameter.detach() if key is None or state is None else state[key]
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        if self.kind != DistributedType.DEEPSPEED:
            return self.optimizer.state.get(parameter, {})
        flat = self._base.state.values()  # one entry for each flat group; all count the same steps
        return next(iter(flat), {})

    @property
    def _base(self) -> torch.optim.Optimizer:
        """The optimizer inside DeepSpeed's."""
        return self.optimizer.optimizer.optimizer

    def _link(self) -> None:
        """DeepSpeed 0.19 links parameters to their moments after the first group's first step, when those of other groups are not there yet."""
        if (
            self.kind == DistributedType.DEEPSPEED
            and hasattr(zero := self.optimizer.optimizer, "_hp_optimizer_states_linked")
            and zero.state
        ):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _restore_deepspeed(self, moments: dict[str, Tensor]) -> None:
        from deepspeed.utils import (
            safe_get_local_fp32_param,
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        zero, plain = self.optimizer.optimizer, dict(self.model.named_parameters())
        partitioned = hasattr(zero, "fp32_partitioned_groups_flat")
        steps = [int(value) for name, value in moments.items() if name.startswith("step.")]
        if steps:
            for flat in zero.fp32_partitioned_groups_flat if partitioned else zero.single_partition_of_fp32_groups:
                count: Any = max(steps)
                if isinstance(self._base, torch.optim.AdamW):
                    count = torch.tensor(float(count), device=flat.device)
                self._base.state[flat] = {"step": count} | {key: torch.zeros_like(flat) for key in MOMENTS}
            self._link()
        for name, parameter in self._parameters():
            values = {None: plain[name].detach()} | {key: moments[f"{key}.{name}"] for key in MOMENTS if f"{key}.{name}" in moments}
            for key, value in values.items():
                value = value.to(self.accelerator.device, torch.float32)
                if partitioned:  # set_full fails where ranks do not divide the parameter
                    part = _slice(value, safe_get_local_fp32_param(parameter).numel(), self.accelerator.process_index)
                    safe_set_local_optimizer_state(parameter, part, key) if key else safe_set_local_fp32_param(parameter, part)
                else:
                    safe_set_full_optimizer_state(parameter, value, key) if key else safe_set_full_fp32_param(parameter, value)


def _twin(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    if isinstance(twin, DrafterModel):
        twin.attach(cast(DrafterModel, model).target)
    return twin


def _slice(value: Tensor, size: int, rank: int) -> Tensor:
    """Rank's part of `size` elements of a tensor laid end to end, zeros past its end."""
    part = value.flatten()[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - len(part))])
