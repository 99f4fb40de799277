"""What Accelerate lacks: ranks that wait for each other within limits, one Accelerator for all launchers, results shared by rank 0.

Who a process is, `accelerate.PartialState` says, in all modules of the project.
"""

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs, broadcast, broadcast_object_list
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.models.context_parallel import SINGLE_RANK, ContextParallel
from draftsmith.models.ranks import COLLECTIVE_TIMEOUT
from draftsmith.train.engine.section import TrainSection

Value = TypeVar("Value")

# Ranks start together, so one that is missing at the start has most likely ended.
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)


def deepspeed() -> bool:
    """Whether this process was launched for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def sharded() -> bool:
    """Whether this process was launched for DeepSpeed or FSDP, under which each rank holds a part of what is trained."""
    return deepspeed() or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_weights(section: TrainSection) -> None:
    """Raises ValueError, naming the key, where the launcher cuts what is trained, and its weights are to be bf16."""
    if section.weights == "bfloat16" and sharded():
        raise ValueError(
            "train.weights=bfloat16 is for one process or DDP, got FSDP or DeepSpeed, which cut what they train; take train.weights=float32, or "
            "launch with recipes/accelerate-ddp.yaml"
        )


def join() -> PartialState:
    """Join the processes of this launch; later calls return the same state.

    Raises:
        ValueError: launch settings under which ranks would hold other weights, or none.
        ConnectionError: some ranks did not come; the message names them.
    """
    if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() == "true" and _world_size() > 1:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading is on, which leaves the target of every rank but the first without weights; "
            "set it to false in the launcher's file (target.parallel=shard is the way to load a large target once)"
        )
    cpu = not torch.cuda.is_available()
    # DeepSpeed calls collectives by names that torch 2.13 deprecates, and says so in every step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if deepspeed() and cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _end_with_launcher()
    options: dict[str, Any] = {}
    if _world_size() > 1:
        options["timeout"] = COLLECTIVE_TIMEOUT
        if not torch.distributed.is_initialized():
            _wait_for_all_ranks()
    # Accelerate starts DeepSpeed only where the option cpu is off, and then finds no backend by itself.
    if deepspeed() and cpu:
        options["backend"] = "gloo"
    return PartialState(cpu=cpu and not deepspeed(), **options)


def accelerator(precision: str, micro_batch: int, accumulation: int, clip: float, **trackers: Any) -> Accelerator:
    """The Accelerator of a run whose processes have joined.

    Args:
        precision: "bf16" or "fp32".
        micro_batch: sequences of one forward on one rank.
        accumulation: micro-batches of one optimizer step.
        clip: the gradient norm to clip to, which DeepSpeed does itself.
        trackers: Accelerate's `log_with` and `project_dir`, as `trackers.options` gives them.
    """
    cpu = not torch.cuda.is_available()
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo", timeout=COLLECTIVE_TIMEOUT)] if cpu and deepspeed() else []
    result = Accelerator(
        cpu=cpu and not deepspeed(),
        mixed_precision="bf16" if precision == "bf16" and not deepspeed() else "no",
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=handlers,
        **trackers,
    )
    result.gradient_accumulation_steps = accumulation  # a launcher's file may have given another number
    if result.is_fsdp2:
        cast(Any, result.state.fsdp_plugin).mixed_precision_policy = None  # autocast decides, as under other launchers; weights stay fp32
    if result.state.deepspeed_plugin is not None:
        config = result.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = micro_batch
        config["gradient_accumulation_steps"] = accumulation
        config["gradient_clipping"] = clip
        config["train_batch_size"] = micro_batch * accumulation * result.num_processes
        # As under other launchers weights stay fp32 and autocast decides; DeepSpeed's own bf16 mode holds bf16 weights beside fp32 masters.
        config["torch_autocast"] = {"enabled": precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": []}
        unset_hf_deepspeed_config()  # else transformers would partition every model that it loads from now on, the next run's target too
    return result


def in_bf16(accelerator: Accelerator) -> bool:
    """Whether forwards run in bf16."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin.deepspeed_config["torch_autocast"]["enabled"] if plugin else accelerator.mixed_precision == "bf16"


def data_parallel_size(ranks: int, context_parallel: int) -> int:
    """How many groups of `context_parallel` ranks there are; each group reads sequences of its own. Raises ValueError for ranks left over."""
    if ranks % context_parallel:
        raise ValueError(
            f"train.context_parallel={context_parallel} does not divide {ranks} process(es); launch a multiple of it, or leave it out"
        )
    return ranks // context_parallel


def data_parallel(context_parallel: int) -> tuple[int, int]:
    """(number of context-parallel groups, number of this rank's group)."""
    state = join()
    return data_parallel_size(state.num_processes, context_parallel), state.process_index // context_parallel


def context_group(size: int) -> ContextParallel:
    """This rank's context-parallel group: ranks 0 … size − 1 share sequences, and so on. All ranks call it.

    Raises:
        ValueError: the number of processes is no multiple of `size`.
    """
    state = join()
    data_parallel_size(state.num_processes, size)
    if size == 1:
        return SINGLE_RANK
    group, _ = torch.distributed.new_subgroups(size, timeout=COLLECTIVE_TIMEOUT)
    return ContextParallel(state.process_index % size, size, group)


def split_batch(section: TrainSection, ranks: int) -> tuple[int, int]:
    """Cut an optimizer step's sequences into micro-batches.

    Args:
        section: the recipe's batch_size, micro_batch_size and context_parallel.
        ranks: processes of the run.

    Returns:
        (sequences of one forward on one rank, accumulation steps).

    Raises:
        ValueError: the batch cannot be cut evenly.
    """
    groups = data_parallel_size(ranks, section.context_parallel)
    micro_batch = section.micro_batch_size or max(1, section.batch_size // groups)
    accumulation, remainder = divmod(section.batch_size, micro_batch * groups)
    if remainder or not accumulation:
        parts = "rank(s)" if groups == ranks else f"group(s) of {section.context_parallel} ranks"
        raise ValueError(
            f"train.batch_size={section.batch_size} cannot be cut into {groups} {parts} × micro-batches of {micro_batch}; "
            f"make it a multiple of {groups} × train.micro_batch_size"
        )
    return micro_batch, accumulation


def on_main(work: Callable[[], Value]) -> Value:
    """Call `work` on the main process and return its result on all processes, since another machine may not see the same disk.

    Args:
        work: gives any value that can be pickled. Tensors in its tuples and dictionaries are sent one by one and arrive on the CPU.

    Raises:
        OSError, ValueError, FloatingPointError: on the main process, as `work` raised it; the other processes end with status 2.
    """
    state = join()
    if state.num_processes == 1:
        return work()
    value, error = None, None
    if state.is_main_process:
        try:
            value = work()
        except (OSError, ValueError, FloatingPointError) as raised:
            error = raised
    message: list[Any] = broadcast_object_list([error is not None, _map_tensors(value, lambda tensor: tensor.to("meta"))])
    if error is not None:
        raise error
    failed, outline = message
    if failed:
        raise SystemExit(2)
    sources = iter(_tensors_of(value))

    def receive(meta: Tensor) -> Tensor:
        tensor = next(sources) if state.is_main_process else torch.empty_like(meta, device="cpu")
        sent = torch.int32 if meta.dtype == torch.int16 else meta.dtype  # neither NCCL nor gloo sends int16
        return cast(Tensor, broadcast(tensor.to(state.device, sent))).cpu().to(meta.dtype)

    return _map_tensors(outline, receive)


def main_first(work: Callable[[], Value]) -> Value:
    """Call `work` on the main process, then on the others, which read what it wrote.

    Raises:
        OSError, ValueError, FloatingPointError: as `on_main`.
    """
    values: list[Value] = []
    on_main(lambda: values.append(work()))
    return values[0] if values else work()


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in its tuples and dictionaries changed, in order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _map_tensors(item, change) for name, item in value.items()}
    return value


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors of `value` in the order of `_map_tensors`."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _map_tensors(value, collect)
    return tensors


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _wait_for_all_ranks() -> None:
    """Wait until all ranks of the launch have come. On one machine the launcher ends all ranks when one ends; on several it does not."""
    store, rank, ranks = next(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
    store.set(f"rank-{rank}", "")
    try:
        store.wait([f"rank-{number}" for number in range(ranks)], RENDEZVOUS_TIMEOUT)
    except torch.distributed.DistStoreError:
        missing = ", ".join(str(number) for number in range(ranks) if not store.check([f"rank-{number}"]))
        raise ConnectionError(
            f"rank(s) {missing} of {ranks} did not come within {RENDEZVOUS_TIMEOUT.total_seconds() / 60:g} minutes; see what their "
            "machines say, and that they reach the first one; then run the same command again on all"
        ) from None


def _end_with_launcher() -> None:
    """Have the system send SIGTERM to this process when its launcher dies, so that it saves and ends instead of training on unseen."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or not sys.platform.startswith("linux"):
        return
    end_with_parent()


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent ends, however it ends, so that kill -9 of it leaves no run behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
