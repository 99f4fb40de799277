"""The processes of a run: how they find each other, and the Accelerator that they share, whatever `accelerate launch` was told."""

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

Value = TypeVar("Value")

# One rank may tokenise, prune or decode for long while the others wait; a rank that dies or hangs is noticed sooner (train/engine/watchdog.py).
PATIENCE = timedelta(hours=6)
# Ranks begin together: one that ended before it came is not waited for like one that works.
MEETING = timedelta(minutes=10)


def deepspeed() -> bool:
    """Whether this process was launched for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def join() -> PartialState:
    """This process among those of the launch; the first call finds the others, later ones give what it found.

    Raises:
        ValueError: launch settings under which ranks would hold other weights, or none.
        ConnectionError: some ranks did not come, naming them.
    """
    if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() == "true" and _count() > 1:
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
    group: dict[str, Any] = {"timeout": PATIENCE} if _count() > 1 else {}
    if _count() > 1 and not torch.distributed.is_initialized():
        _meet()
    # Accelerate starts DeepSpeed only where it was not told of a CPU, and finds no backend there by itself.
    return PartialState(cpu=cpu and not deepspeed(), **({"backend": "gloo"} | group if deepspeed() and cpu else group))


def accelerator(precision: str, micro_batch: int, accumulation: int, clip: float, **trackers: Any) -> Accelerator:
    """The Accelerator of a run that joined. precision: "bf16" or "fp32" · micro_batch: rows of one forward · clip: gradient norm."""
    cpu = not torch.cuda.is_available()
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo", timeout=PATIENCE)] if cpu and deepspeed() else []
    found = Accelerator(
        cpu=cpu and not deepspeed(),
        mixed_precision="bf16" if precision == "bf16" and not deepspeed() else "no",
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=handlers,
        **trackers,
    )
    found.gradient_accumulation_steps = accumulation  # a launcher's file may have said another number
    if found.is_fsdp2:
        cast(Any, found.state.fsdp_plugin).mixed_precision_policy = None  # autocast decides, as under other launchers; weights stay fp32
    if found.state.deepspeed_plugin is not None:
        config = found.state.deepspeed_plugin.deepspeed_config
        config |= {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation, "gradient_clipping": clip}
        config["train_batch_size"] = micro_batch * accumulation * found.num_processes
        # As under other launchers weights stay fp32 and autocast decides; its own bf16 mode holds bf16 weights beside fp32 masters.
        config["torch_autocast"] = {"enabled": precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": []}
        unset_hf_deepspeed_config()  # else transformers would partition whatever it loads from here on, the next run's target too
    return found


def in_bf16(accelerator: Accelerator) -> bool:
    """Whether forwards run in bf16."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin.deepspeed_config["torch_autocast"]["enabled"] if plugin else accelerator.mixed_precision == "bf16"


def group_count(ranks: int, size: int) -> int:
    """How many groups of `size` ranks there are. Raises ValueError where ranks would be left over."""
    if ranks % size:
        raise ValueError(f"train.context_parallel={size} does not divide {ranks} process(es); launch a multiple of it, or leave it out")
    return ranks // size


def groups(size: int) -> tuple[int, int]:
    """How many groups of `size` ranks share out the rows among them, and which of them is this rank's."""
    state = join()
    return group_count(state.num_processes, size), state.process_index // size


def context(size: int) -> ContextParallel:
    """This rank in its group: ranks 0 … size − 1 have the same rows, and so on. All ranks call it.

    Raises:
        ValueError: processes that are no multiple of `size`.
    """
    state = join()
    group_count(state.num_processes, size)
    if size == 1:
        return SINGLE_RANK
    group, _ = torch.distributed.new_subgroups(size, timeout=PATIENCE)
    return ContextParallel(state.process_index % size, size, group)


def on_first(work: Callable[[], Value]) -> Value:
    """What `work` gives on the first rank, on all of them: another machine may not see its disk. Tensors go one by one and arrive on the CPU.

    Where `work` raises OSError or ValueError there, all ranks end: the first says why, the others with status 2.
    """
    state = join()
    if state.num_processes == 1:
        return work()
    value, failed = None, None
    if state.is_main_process:
        try:
            value = work()
        except (OSError, ValueError) as error:
            failed = error
    told: list[Any] = broadcast_object_list([failed is not None, _each(value, lambda tensor: tensor.to("meta"))])
    if failed is not None:
        raise failed
    if told[0]:
        raise SystemExit(2)
    sources = iter(_tensors(value))

    def arrive(meta: Tensor) -> Tensor:
        tensor = next(sources) if state.is_main_process else torch.empty_like(meta, device="cpu")
        return cast(Tensor, broadcast(tensor.to(state.device))).cpu()

    return _each(told[1], arrive)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in its tuples and dictionaries changed, in order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_each(one, change) for one in value)
    return {name: _each(one, change) for name, one in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _each(value, lambda tensor: found.append(tensor) or tensor)
    return found


def _count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _meet() -> None:
    """Wait until all ranks of the launch are here. On one machine the launcher ends them all where one ends; on several it does not."""
    store, rank, ranks = next(rendezvous("env://", timeout=MEETING))
    store.set(f"here-{rank}", "")
    try:
        store.wait([f"here-{one}" for one in range(ranks)], MEETING)
    except torch.distributed.DistStoreError:
        missing = ", ".join(str(one) for one in range(ranks) if not store.check([f"here-{one}"]))
        raise ConnectionError(
            f"rank(s) {missing} of {ranks} did not come within {MEETING.total_seconds() / 60:g} minutes; see what their machines say, "
            "and that they reach the first one; then run the same command again on all"
        ) from None


def _end_with_launcher() -> None:
    """Have the system send SIGTERM to this process when its launcher is gone, so that it saves and ends rather than train on unseen."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
