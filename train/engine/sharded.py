"""Complete weights and optimizer state by parameter name, however Accelerate wrapped the model: the same under DDP, FSDP2 and DeepSpeed.

A checkpoint therefore does not depend on the launcher: one process loads what ZeRO-3 saved.
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
from draftsmith.train.engine.checkpoint import STATE_KEYS


class ShardedModel:
    """A model as it is trained, perhaps in pieces, and the same model with complete weights.

    Under FSDP2 and DeepSpeed a copy is trained in pieces, and `model` waits on the CPU for `gather_weights`. Otherwise `model` itself is trained.

    Attributes:
        accelerator: Accelerate's view of the launch.
        model: the model with complete weights, as it was given.
        trained: the model whose parameters are trained: `model`, or the copy.
        module: what Accelerate made of the step module; call this one.
        optimizer: what Accelerate made of the optimizer.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        make_step: Callable[[nn.Module], nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        state_keys: dict[str, tuple[str, ...]],
    ) -> None:
        """Wrap `model`.

        Args:
            accelerator: made by `processes.accelerator`.
            model: the model to train, with the weights to begin with.
            make_step: gives the module whose forward computes one step's loss. FSDP2 gathers all parameters for that forward, since losses
                read output layers without calling them; ZeRO-3 notices such reads by itself.
            make_optimizer: gives the optimizer over the trained parameters.
            state_keys: the tensors that it keeps for each of them, by name.
        """
        self.accelerator, self.model, self.state_keys = accelerator, model, state_keys
        self.distributed_type = accelerator.distributed_type
        self.sharded = self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        self.trained = _copy_beside_target(model) if self.sharded else model
        self.trained.to(accelerator.device)
        step = make_step(self.trained)
        self.module, self.optimizer = accelerator.prepare(step, make_optimizer(self.trained))
        if self.sharded:
            model.to("cpu")

    def gather_weights(self) -> None:
        """Copy the trained weights into `model`. All ranks call it."""
        if not self.sharded:
            return
        complete = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self._parameters():
                complete[name].copy_(self._full(parameter))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it `model` has the trained weights and is on the device, ready to decode. All ranks enter it."""
        self.gather_weights()
        if self.sharded:
            self.model.to(self.accelerator.device)
        try:
            yield
        finally:
            if self.sharded:
                self.model.to("cpu")

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state on the CPU: "exp_avg.<parameter>", "exp_avg_sq.<parameter>" and "step.<parameter>".

        All ranks call it; the main process gets all tensors, the others only the step counts.
        """
        tensors = {}
        self._link_deepspeed_state()
        for name, parameter in self._parameters():
            state = self._state_of(parameter)
            if not state:
                continue
            tensors[f"step.{name}"] = torch.as_tensor(state["step"], dtype=torch.float32).cpu().clone()
            for key in self.state_keys[name]:
                value = self._full(parameter, key, state)
                if self.accelerator.is_main_process:
                    tensors[f"{key}.{name}"] = value.cpu().contiguous()
        return tensors

    def load_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        """Load what `optimizer_state` gave on the main process; the same tensors on all ranks.

        `model` must have had the checkpoint's weights before it was wrapped. DeepSpeed's fp32 master weights are set from it as well.
        """
        if self.distributed_type == DistributedType.DEEPSPEED:
            return self._load_deepspeed_state(tensors)
        for name, parameter in self._parameters():
            if f"step.{name}" not in tensors:
                continue
            state = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in self.state_keys[name]}
            if isinstance(parameter, DTensor):
                state = {key: distribute_tensor(full, parameter.device_mesh, parameter.placements) for key, full in state.items()}
            # The fused kernel wants its step count on the parameter's device.
            self.optimizer.state[parameter] = state | {"step": tensors[f"step.{name}"].to(parameter.device)}

    def may_step(self, gradient_norm: Any) -> bool:
        """Whether the optimizer may step: the gradient norm is finite. All ranks agree, since the norm is that of all. DeepSpeed has stepped."""
        if self.distributed_type == DistributedType.DEEPSPEED:
            return self.module.was_step_applied()
        if isinstance(gradient_norm, DTensor):
            gradient_norm = gradient_norm.full_tensor()
        return bool(torch.as_tensor(gradient_norm).isfinite())

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters, as the optimizer knows them."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):  # a forward without a backward leaves the outermost unit gathered
                unit.reshard()
        return [(name, parameter) for name, parameter in self.trained.named_parameters() if parameter.requires_grad]

    def _full(self, parameter: Tensor, key: str | None = None, state: dict[str, Tensor] | None = None) -> Tensor:
        """A complete parameter (or the optimizer state `key` of it), in the precision of its master weight. All ranks call it."""
        if self.distributed_type == DistributedType.DEEPSPEED:
            from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

            return cast(Tensor, safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter))
        value = parameter.detach() if key is None or state is None else state[key]
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        if self.distributed_type != DistributedType.DEEPSPEED:
            return self.optimizer.state.get(parameter, {})
        states = self._base_optimizer.state.values()  # one for each flat group; all count the same steps
        return next(iter(states), {})

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside DeepSpeed's."""
        return self.optimizer.optimizer.optimizer

    def _link_deepspeed_state(self) -> None:
        """Link parameters to their optimizer state anew.

        DeepSpeed 0.19 links them after the first group's first step, when the state of the other groups does not exist yet.
        """
        if self.distributed_type != DistributedType.DEEPSPEED:
            return
        zero = self.optimizer.optimizer
        if hasattr(zero, "_hp_optimizer_states_linked") and zero.state:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _load_deepspeed_state(self, tensors: dict[str, Tensor]) -> None:
        from deepspeed.utils import (
            safe_get_local_fp32_param,
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        zero, complete = self.optimizer.optimizer, dict(self.model.named_parameters())
        partitioned = hasattr(zero, "fp32_partitioned_groups_flat")
        steps = [int(value) for name, value in tensors.items() if name.startswith("step.")]
        if steps:
            for flat in zero.fp32_partitioned_groups_flat if partitioned else zero.single_partition_of_fp32_groups:
                count: Any = max(steps)
                if isinstance(self._base_optimizer, torch.optim.AdamW):
                    count = torch.tensor(float(count), device=flat.device)
                self._base_optimizer.state[flat] = {"step": count} | {key: torch.zeros_like(flat) for key in STATE_KEYS}
            self._link_deepspeed_state()
        for name, parameter in self._parameters():
            values: dict[str | None, Tensor] = {None: complete[name].detach()}  # None: the master weight
            values |= {key: tensors[f"{key}.{name}"] for key in STATE_KEYS if f"{key}.{name}" in tensors}
            for key, value in values.items():
                value = value.to(self.accelerator.device, torch.float32)
                if partitioned:  # safe_set_full… fails where the ranks do not divide the parameter
                    part = _rank_part(value, safe_get_local_fp32_param(parameter).numel(), self.accelerator.process_index)
                    safe_set_local_optimizer_state(parameter, part, key) if key else safe_set_local_fp32_param(parameter, part)
                else:
                    safe_set_full_optimizer_state(parameter, value, key) if key else safe_set_full_fp32_param(parameter, value)


def _copy_beside_target(model: nn.Module) -> nn.Module:
    """A copy of the model; a drafter's copy shares the target."""
    duplicate = copy.deepcopy(model)
    if isinstance(duplicate, DrafterModel):
        duplicate.attach(cast(DrafterModel, model).target)
    return duplicate


def _rank_part(value: Tensor, size: int, rank: int) -> Tensor:
    """The `rank`-th part of `size` elements of a flattened tensor, padded with zeros."""
    part = value.flatten()[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - len(part))])
