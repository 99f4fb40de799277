"""Estimates for devices that are not at hand, by the roofline (Williams et al. 2009): never measured, and labelled so.

A forward over M tokens takes max(bytes / bandwidth, FLOPs / peak) + launch. Bytes are the weights and the KV of all slots, read once; FLOPs
are 2 · weights · M and attention's. Real kernels reach less of both, and their time has steps at tile sizes: a measurement beats this.

Letters: B slots · C context length · N nodes with the root.
"""

import math
from dataclasses import dataclass
from typing import Any

ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device.

    Attributes:
        name: of the device.
        peak: FLOP/s of dense matmuls in bf16.
        bandwidth: bytes/s of its memory.
        launch: seconds that a forward costs at least, whatever its size.
        source: of peak and bandwidth.
    """

    name: str
    peak: float
    bandwidth: float
    launch: float = 20e-6
    source: str = "given"


# Dense bf16 (without sparsity) and memory bandwidth, as the makers' data sheets have them.
KNOWN = {
    device.name: device
    for device in (
        Hardware("A100-80GB-SXM", 312e12, 2.039e12, source="NVIDIA A100 data sheet, 80 GB SXM"),
        Hardware("L40S", 362e12, 0.864e12, source="NVIDIA L40S data sheet, without sparsity"),
        Hardware("H100-SXM", 989e12, 3.35e12, source="NVIDIA H100 data sheet, SXM, half of the figure with sparsity"),
        Hardware("H200", 989e12, 4.8e12, source="NVIDIA H200 data sheet, SXM, half of the figure with sparsity"),
        Hardware("B200", 2250e12, 8.0e12, source="NVIDIA HGX B200 data sheet, per GPU, half of the figure with sparsity"),
        Hardware("RTX-4090", 165e12, 1.008e12, source="NVIDIA Ada architecture paper, bf16 with float32 accumulation"),
        Hardware("MI300X", 1307e12, 5.3e12, source="AMD Instinct MI300X data sheet"),
    )
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a forward of a model reads and computes.

    Attributes:
        weights: parameters that a token goes through, the head included. (Mixtures of experts: the active ones; a batch touches more.)
        bytes_per_weight: 2 in bf16.
        kv_bytes: of a token of context, over all layers.
        attention_flops: per token and position of context, over all layers: 4 · layers · query heads · head dim.
    """

    weights: float
    bytes_per_weight: float
    kv_bytes: float
    attention_flops: float = 0.0


def hardware(name: str) -> Hardware:
    """A known device by its name, or one that is described as NAME=FLOPS,BYTES, both per second.

    Raises:
        ValueError: an unknown one, or numbers that are none.
    """
    known, _, described = name.partition("=")
    if not described and known in KNOWN:
        return KNOWN[known]
    try:
        peak, bandwidth = (float(number) for number in described.split(","))
    except ValueError:
        peak = bandwidth = 0.0
    if not (0 < peak < math.inf and 0 < bandwidth < math.inf):
        raise ValueError(f"got device {name!r}; expected one of {', '.join(KNOWN)}, or its FLOP/s and bytes/s as in mine=989e12,3.35e12")
    return Hardware(known, peak, bandwidth)


def forward_seconds(device: Hardware, model: ModelSize, batch: int, nodes: int, context: int) -> float:
    """Seconds of verifying N nodes of each of B slots at a context of C. The N queries of a slot share its KV."""
    tokens = batch * nodes
    moved = model.weights * model.bytes_per_weight + batch * context * model.kv_bytes
    flops = tokens * (2 * model.weights + context * model.attention_flops)
    return max(moved / device.bandwidth, flops / device.peak) + device.launch


def ridge(device: Hardware, bytes_per_weight: float = 2.0) -> float:
    """Tokens of a forward from which weights are computed with for longer than they are read, without KV: peak · bytes / (2 · bandwidth)."""
    return device.peak * bytes_per_weight / (2 * device.bandwidth)


def estimate(
    device: Hardware,
    target: ModelSize,
    tau: float,
    nodes: int,
    batches: list[int],
    context: int,
    drafter: ModelSize | None = None,
    drafter_forwards: int = 0,
) -> dict[str, Any]:
    """The estimated speedup by batch.

    Args:
        device: where.
        target: the target's sizes.
        tau: tokens per round.
        nodes: N.
        batches: B.
        context: C.
        drafter: the drafter's sizes; None where drafting costs nothing on the device.
        drafter_forwards: of a round, one after the other, each of one token a slot.

    Returns:
        kind ("estimate"), device, source, ridge (see `ridge`), context, batches, speedup, ms_per_token and break_even: the least of the batches from
        which on plain decoding is as fast at each, or None.
    """
    speedups, latencies = [], []
    for batch in batches:
        plain = forward_seconds(device, target, batch, 1, context)
        drafting = drafter_forwards * forward_seconds(device, drafter, batch, 1, context) if drafter else 0.0
        took = forward_seconds(device, target, batch, nodes, context) + drafting
        speedups.append(tau * plain / took)
        latencies.append(1e3 * took / tau)
    return {
        "kind": ESTIMATE,
        "device": device.name,
        "source": device.source,
        "ridge": ridge(device, target.bytes_per_weight),
        "context": context,
        "batches": batches,
        "speedup": speedups,
        "ms_per_token": latencies,
        "break_even": next((batch for i, batch in enumerate(batches) if max(speedups[i:]) <= 1), None),
    }
