"""The memory that a recipe needs on each GPU and on the host, for each launcher.

It is the sum of the drafter's weights, gradients and optimizer state, laid out as the launchers of recipes/ do; of the target, laid out by
`target.parallel`; and of the activations of a micro-batch, which the objective itself allocates in shapes (train/plan/trace.py), the chunks of its
losses included. Numbers are of PyTorch's allocations.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from draftsmith.data.features import Index
from draftsmith.models.head import end_modules
from draftsmith.models.parallel import COLLECTIVE
from draftsmith.models.quantised import quantised_as
from draftsmith.train import setup
from draftsmith.train.engine import optimizer, processes
from draftsmith.train.plan import trace
from draftsmith.train.recipe import Recipe

GIB = 2**30
USABLE = 0.93  # of a GPU's memory: the rest is for CUDA's context, NCCL's buffers and gaps between blocks
FP32 = 4  # bytes of a weight, whatever the launcher: weights stay fp32 and autocast alone computes in bf16, but for train.weights=bfloat16
BUCKET = 500_000_000  # gradients in a buffer of DeepSpeed, its reduce_bucket_size; allocated however small the model

# Launchers of recipes/, the fastest first.
SEVERAL = ("ddp", "fsdp2", "zero2", "zero3", "zero2-offload", "zero3-offload")
SINGLE_RANK = ("one", "zero2-offload", "zero3-offload")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a recipe is to run.

    Attributes:
        gpus: GPUs of each machine.
        nodes: machines.
        memory: bytes of each GPU.
        cpu: one process without a GPU.
    """

    gpus: int = 1
    nodes: int = 1
    memory: float = 80 * GIB
    cpu: bool = False


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that a launcher needs on each GPU; `host`: in the memory of each machine."""

    launcher: str
    target: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.target + self.weights + self.gradients + self.optimizer + self.activations + self.buffers


Traces = dict[int, trace.Trace]  # by micro-batch size


class PlannedRun:
    """A recipe on a machine, in shapes.

    Args:
        recipe: of the method.
        method: the method's script, a module with `build_untrained`.
        machine: where it is to run.
        traces: those of a planned run that differs in the target's layout alone; they are used again.

    Attributes:
        ranks, micro, accumulation: their product is the number of rows of a step.
        layout: target.parallel.
        has_layers: whether the target's decoder layers are loaded, or its input embeddings and output head alone.
        target_parameters: of the complete target.
        trained, frozen: parameters of the drafter.
        bytes_each: of a trained weight, and of its gradient.
        adapts: whether the target's own adapters are trained, which sharded launchers cannot do.

    Raises:
        OSError, ValueError: what the run itself would refuse in its target, its student or its keys.
    """

    def __init__(self, recipe: Recipe, method: ModuleType, machine: Machine, traces: Traces | None = None) -> None:
        self.recipe, self.machine, self.layout = recipe, machine, recipe.target.parallel
        self.has_layers = recipe.needs_target_layers
        setup.check_layout(recipe)
        # target.parallel=layers spreads the target over the GPUs of one process.
        self.ranks = 1 if machine.cpu or self.layout == "layers" else machine.gpus * machine.nodes
        if self.layout in COLLECTIVE and self.ranks == 1:
            raise ValueError(f"target.parallel={self.layout} lays the target out over processes, this is one; take layers, or more --gpus")
        if self.layout in COLLECTIVE and recipe.target.quantise:
            raise ValueError(
                f"target.parallel={self.layout} and target.quantise={recipe.target.quantise} do not go together; leave one out"
            )
        try:
            self.micro, self.accumulation = processes.split_batch(recipe.train, self.ranks)
        except ValueError as error:
            raise ValueError(f"{error}, or give another number of --gpus") from None
        dtypes = {"auto": torch.float32 if machine.cpu else torch.bfloat16}
        dtype = dtypes.get(recipe.target.dtype) or getattr(torch, recipe.target.dtype)
        self.target = trace.target_without_values(recipe.target, dtype)
        if recipe.data.seq_len > self.target.max_positions:
            raise ValueError(
                f"data.seq_len={recipe.data.seq_len} is longer than the target's context of {self.target.max_positions}; lower it"
            )
        with trace.shapes_only():
            model, objective = method.build_untrained(recipe, self.target)
        # What is trained of the target, its adapters, counts as the drafter's; what the drafter shares with it, as the target's.
        own = {id(parameter): parameter.numel() for parameter in self.target.model.parameters() if not parameter.requires_grad}
        self.target_parameters = sum(own.values())
        self.trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.optimizer_state = optimizer.state_bytes(model, recipe.train)
        half = recipe.train.weights == "bfloat16"
        if half:
            optimizer.cast_trained(model, torch.bfloat16)
        self.bytes_each = 2 if half else FP32
        self.frozen = sum(parameter.numel() for parameter in model.parameters() if not (parameter.requires_grad or id(parameter) in own))
        self.adapts = any(id(parameter) in own for parameter in model.parameters())
        self.reads = tuple(getattr(model, "taps", ()))
        self.step = trace.Step(model, objective, self.target, gpu=not machine.cpu)
        precision = recipe.train.precision
        self.traces: Traces = {} if traces is None else traces
        self.bf16 = half or precision == "bf16" or (precision == "auto" and not machine.cpu)

    def estimates(self) -> list[MemoryEstimate]:
        """The memory that each launcher for so many processes needs, the fastest launcher first."""
        if self.machine.cpu or self.layout == "layers":
            names: tuple[str, ...] = ("one",)
        elif self.adapts or self.bytes_each != FP32:
            names = ("one",) if self.ranks == 1 else ("ddp",)
        else:
            names = SINGLE_RANK if self.ranks == 1 else SEVERAL
        return [self._replicated(name) if name in ("one", "ddp") else self._sharded(name) for name in names]

    def flops_per_token(self) -> float:
        """FLOPs of the objective, forward and backward."""
        ranks = self.recipe.train.context_parallel
        return ranks * sum(self.step.flops_per_token(self.recipe.data.seq_len, self._stored_taps))

    def bytes_per_token(self) -> int:
        """Bytes of a token in the feature store; 0 without a store."""
        features = self.recipe.features
        return 0 if features.mode == "online" else Index.of(self.target, features.taps or self.reads, features.precision).bytes_per_token

    @property
    def _stored_taps(self) -> tuple[int, ...] | None:
        return self.reads if self.recipe.features.mode == "offline" else None

    @property
    def _trace(self) -> trace.Trace:
        if self.micro not in self.traces:
            self.traces[self.micro] = self.step.run(self.micro, self.recipe.data.seq_len, autocast=self.bf16, taps=self._stored_taps)
        return self.traces[self.micro]

    def _replicated(self, name: str) -> MemoryEstimate:
        """Everything on each GPU. DDP copies gradients into the buckets that it reduces."""
        gradients, holding = self.bytes_each * self.trained, self.accumulation > 1
        activations = self._trace.released_peak if holding else max(0.0, self._trace.peak - gradients)
        buckets = gradients if name == "ddp" else 0.0
        weights = self.bytes_each * self.trained + FP32 * self.frozen
        return MemoryEstimate(name, self.target_bytes, weights, gradients, self.optimizer_state, activations, buckets)

    def _sharded(self, name: str) -> MemoryEstimate:
        """Optimizer state, gradients or weights cut over the ranks. The weights that a step reads are gathered for the complete step."""
        read, gradients, ranks = FP32 * (self.trained + self.frozen), FP32 * self.trained, self.ranks
        shard = gradients / ranks
        # A sharded run keeps the complete model of each process in the host's memory (train/engine/sharded.py).
        host = read * min(self.machine.gpus, ranks)
        if name == "fsdp2":
            holding = self.accumulation > 1  # no gradient is reduced before the last micro-batch
            # At the end of the backward pass the gradients are there, and a copy of them that is reduced.
            activations = max(self._trace.released_peak, gradients) if holding else max(self._trace.peak, 2 * gradients)
            unreduced = gradients if holding else 0
            return MemoryEstimate(
                name, self.target_bytes, read + read / ranks, shard + unreduced, self.optimizer_state / ranks, activations, 0.0, host
            )
        weights = read + shard + (read / ranks if name.startswith("zero3") else 0)  # with master weights, though weights are in fp32
        reduced, state = shard, self.optimizer_state / ranks
        if name.endswith("offload"):
            # Master weights, gradients, the updated weights and optimizer state.
            host += (3 * gradients + self.optimizer_state) / self.machine.nodes
            if name.startswith("zero3"):
                host += read / self.machine.nodes
            weights, reduced, state = read, 0.0, 0.0
        # A buffer for gradients that are reduced in fp32; in bf16 runs also one for those of linear layers.
        second = (FP32 if name.startswith("zero2") else FP32 / 2) if self.bf16 else 0
        buffers = BUCKET * (FP32 + second)
        activations = self._trace.released_peak
        return MemoryEstimate(name, self.target_bytes, weights, reduced, state, activations, buffers, host)

    @property
    def target_bytes(self) -> float:
        """Bytes of the target on each GPU: embeddings and head complete, the layers as `layout` spreads them.

        `shard` gathers a layer for its forward, and the next one ahead of it.
        """
        if not self.has_layers:
            return self._bytes(*end_modules(self.target.model))
        layers = [self._bytes(layer) for layer in self.target.layers]
        complete = self._bytes(self.target.model)
        if self.layout == "none":
            return complete
        spread = self.ranks if self.layout != "layers" else 1 if self.machine.cpu else self.machine.gpus
        gathered = 2 * max(layers) if self.layout == "shard" else 0
        return complete - sum(layers) * (1 - 1 / spread) + gathered

    @property
    def loading_bytes(self) -> float:
        """Bytes of the first machine's memory while the target is read."""
        return self._bytes(self.target.model) if self.layout == "shard" and self.has_layers else 0.0

    def _bytes(self, *modules: nn.Module) -> float:
        kind = self.recipe.target.quantise or quantised_as(self.target.model.config)
        linear = {id(part.weight) for part in self.target.decoder.modules() if isinstance(part, nn.Linear)} if kind else set()
        tensors = {
            id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers()) if not tensor.requires_grad
        }
        return sum(tensor.numel() * (bytes_per_weight(kind) if key in linear else tensor.element_size()) for key, tensor in tensors.items())


def bytes_per_weight(kind: str) -> float:
    """Bytes of a weight in a quantisation (models/quantised.py), by the bits at the end of its name; 4 bits: with an fp32 scale for 64 weights."""
    match = re.search(r"(\d+)(bit)?$", kind)
    bits = int(match[1]) if match else 16
    return bits / 8 + (4 / 64 if bits == 4 else 0)


def fitting(estimates: Sequence[MemoryEstimate], machine: Machine) -> MemoryEstimate | None:
    """The fastest launcher that fits; None if none does."""
    return next((estimate for estimate in estimates if machine.cpu or estimate.total <= USABLE * machine.memory), None)
