"""What a recipe asks of each GPU and of the host's memory, by launcher: the drafter's weights, gradients and moments as the launchers of
recipes/ lay them out, the target as `target.parallel` does, and the activations of one micro-batch of the objective itself, traced in shapes
(train/plan/trace.py), the chunks of its losses included. Numbers are of PyTorch's allocations.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from draftsmith.data.features import Index
from draftsmith.models.parallel import COLLECTIVE
from draftsmith.models.quantised import quantised_as
from draftsmith.train import loop, setup
from draftsmith.train.plan import trace
from draftsmith.train.recipe import Recipe

GIB = 2**30
FILLED = 0.93  # of a GPU's memory: the rest is for CUDA's context, NCCL's buffers and gaps between blocks
FP32 = 4  # bytes of a weight, whatever the launcher: autocast alone makes products bf16
BUCKET = 500_000_000  # gradients of a buffer of DeepSpeed, its reduce_bucket_size; it is there however small the model

# Launchers of recipes/, the fastest first.
SEVERAL = ("ddp", "fsdp2", "zero2", "zero3", "zero2-offload", "zero3-offload")
SINGLE_RANK = ("one", "zero2-offload", "zero3-offload")


@dataclass(frozen=True, slots=True)
class Machine:
    """gpus of each of `nodes` machines, of `memory` bytes each · cpu: one process without a GPU."""

    gpus: int = 8
    nodes: int = 1
    memory: float = 80 * GIB
    cpu: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a launcher asks of each GPU, and of the memory of each machine (host)."""

    launcher: str
    target: float
    weights: float
    gradients: float
    moments: float
    activations: float
    buffers: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.target + self.weights + self.gradients + self.moments + self.activations + self.buffers


Traces = dict[tuple[int, bool], trace.Traced]  # by micro-batch, and whether gradients of an earlier one are held


class Case:
    """A recipe on a machine, in shapes. `method` is its script, a module with `build_untrained`; traces: those of a case that differs in the layout of
    its target alone, to be used again.

    Attributes: ranks × micro × accumulation, the rows of a step · held: parameters of the target · trained, frozen: of the drafter.

    Raises:
        OSError, ValueError: what the run itself would refuse of its target, its student or its keys.
    """

    def __init__(self, recipe: Recipe, method: ModuleType, machine: Machine, traces: Traces | None = None) -> None:
        self.recipe, self.machine, self.layout = recipe, machine, recipe.target.parallel
        setup._check_layout(recipe)
        # A target in layers over GPUs is one process's.
        self.ranks = 1 if machine.cpu or self.layout == "layers" else machine.gpus * machine.nodes
        if self.layout in COLLECTIVE and self.ranks == 1:
            raise ValueError(f"target.parallel={self.layout} lays the target out over processes, this is one; take layers, or more --gpus")
        if self.layout in COLLECTIVE and recipe.target.quantise:
            raise ValueError(
                f"target.parallel={self.layout} and target.quantise={recipe.target.quantise} do not go together; leave one out"
            )
        try:
            self.micro, self.accumulation = loop._split(recipe.train, self.ranks)
        except ValueError as error:
            raise ValueError(f"{error}, or give another number of --gpus") from None
        dtypes = {"auto": torch.float32 if machine.cpu else torch.bfloat16}
        self.target = trace.outline(recipe.target, dtypes.get(recipe.target.dtype) or getattr(torch, recipe.target.dtype))
        if recipe.data.seq_len > self.target.max_positions:
            raise ValueError(
                f"data.seq_len={recipe.data.seq_len} is longer than the target's context of {self.target.max_positions}; lower it"
            )
        with trace.shapes_only():
            model, objective = method.build_untrained(recipe, self.target)
        self.held = sum(one.numel() for one in self.target.model.parameters())
        self.trained, self.frozen = (
            sum(one.numel() for one in model.parameters() if one.requires_grad == trained) for trained in (True, False)
        )
        self.reads = tuple(getattr(model, "taps", ()))
        self.step = trace.Step(model, objective, self.target, gpu=not machine.cpu)
        precision = recipe.train.precision
        self.traces: Traces = {} if traces is None else traces
        self.half = precision == "bf16" or (precision == "auto" and not machine.cpu)

    def needs(self) -> list[Need]:
        """What each launcher for so many processes asks, the fastest first."""
        names = ("one",) if self.machine.cpu or self.layout == "layers" else SINGLE_RANK if self.ranks == 1 else SEVERAL
        return [self._whole(name) if name in ("one", "ddp") else self._cut(name) for name in names]

    def products(self) -> float:
        """FLOPs a token of the objective, forward and backward."""
        parts = self.recipe.train.context_parallel
        return parts * sum(self.step.products(self.recipe.data.seq_len, self._stored, parts))

    def bytes_per_token(self) -> int:
        """In the feature store; 0 where there is none."""
        features = self.recipe.features
        return 0 if features.mode == "online" else Index.of(self.target, features.taps or self.reads, features.precision).bytes_per_token

    @property
    def _stored(self) -> tuple[int, ...] | None:
        return self.reads if self.recipe.features.mode == "offline" else None

    def _trace(self, holding: bool) -> trace.Traced:
        key = self.micro, holding
        if key not in self.traces:
            length = self.recipe.data.seq_len
            self.traces[key] = self.step.run(self.micro, length, autocast=self.half, holding=holding, taps=self._stored)
        return self.traces[key]

    def _whole(self, name: str) -> Need:
        """All on each GPU; under DDP gradients are copied into the buckets that are reduced."""
        gradients, holding = FP32 * self.trained, self.accumulation > 1
        peak = self._trace(holding).peak
        moving = peak if holding else max(0.0, peak - gradients)
        buckets = gradients * (name == "ddp")
        return Need(name, self.on_each, FP32 * (self.trained + self.frozen), gradients, 2 * gradients, moving, buckets)

    def _cut(self, name: str) -> Need:
        """In pieces over the ranks; what a step reads of the weights is whole for all of it."""
        read, gradients, ranks = FP32 * (self.trained + self.frozen), FP32 * self.trained, self.ranks
        piece = gradients / ranks
        # Where pieces are trained, each process keeps the model whole in the host's memory (train/engine/sharded.py).
        host = read * min(self.machine.gpus, ranks)
        if name == "fsdp2":
            holding = self.accumulation > 1  # no gradient is reduced before the last micro-batch
            # At the end of the backward pass the gradients are there, and once more as what is reduced.
            moving = max(self._trace(holding).peak, gradients * (1 if holding else 2))
            return Need(name, self.on_each, read + read / ranks, piece + gradients * holding, 2 * piece, moving, 0.0, host)
        weights = read + piece + (read / ranks if name.startswith("zero3") else 0)  # with masters, though weights are in fp32
        cut, moments = piece, 2 * piece
        if name.endswith("offload"):
            host += 5 * gradients / self.machine.nodes  # masters, moments, gradients, and what goes back
            host += read / self.machine.nodes * name.startswith("zero3")
            weights, cut, moments = read, 0.0, 0.0
        # One buffer for gradients that are reduced in fp32, and where products are in bf16 one for those of linear layers.
        buffers = BUCKET * (FP32 + self.half * (FP32 if name.startswith("zero2") else FP32 / 2))
        return Need(name, self.on_each, weights, cut, moments, self._trace(False).passing, buffers, host)

    @property
    def on_each(self) -> float:
        """Bytes of the target on each GPU. With its layers laid out the rest of it is whole on all; shard gathers a layer, and the next."""
        layers = [self._bytes(layer) for layer in self.target.layers]
        whole = self._bytes(self.target.model)
        if self.layout == "none":
            return whole
        spread = self.machine.gpus if self.layout == "layers" else self.ranks
        return whole - sum(layers) * (1 - 1 / spread) + 2 * max(layers) * (self.layout == "shard")

    @property
    def loading(self) -> float:
        """Bytes of the first machine's memory while the target is read."""
        return self._bytes(self.target.model) if self.layout == "shard" else 0.0

    def _bytes(self, module: nn.Module) -> float:
        kind = self.recipe.target.quantise or quantised_as(self.target.model.config)
        linear = {id(part.weight) for part in self.target.decoder.modules() if isinstance(part, nn.Linear)} if kind else set()
        tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
        return sum(one.numel() * (bytes_per_weight(kind) if place in linear else one.element_size()) for place, one in tensors.items())


def bytes_per_weight(kind: str) -> float:
    """Of a quantisation by its name (models/quantised.py), by the bits that it ends in; 4 bits have a scale of fp32 for 64 weights beside them."""
    found = re.search(r"(\d+)(bit)?$", kind)
    bits = int(found[1]) if found else 16
    return bits / 8 + (4 / 64 if bits == 4 else 0)


def fitting(needs: Sequence[Need], machine: Machine) -> Need | None:
    """The fastest that fits."""
    return next((need for need in needs if machine.cpu or need.total <= FILLED * machine.memory), None)
