"""A frozen target that one GPU does not hold: the weights of its decoder layers laid out over GPUs or over the ranks of a run.

- layers: complete layers on the GPUs that one process sees, one GPU after another.
- shard: every weight cut over all ranks. A layer's weights are gathered for its forward and dropped after it (FSDP2,
  https://arxiv.org/abs/2304.11277). Each rank runs rows of its own.
- tensor: each rank multiplies by its part of the weights (https://arxiv.org/abs/1909.08053, by transformers' plan for the architecture). All
  ranks run the same rows.

Embedding, final norm and output head are complete on every rank: drafters read them, and logits wait for no other rank. Under shard and tensor
every forward of the decoder involves all ranks: a rank that runs one more, or one fewer, waits for ever.

Letters: B rows · S positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations import deepspeed

__all__ = ["COLLECTIVE", "check_parallel", "decoder_layers", "in_turn", "lay_out", "not_partitioned"]

COLLECTIVE = ("shard", "tensor")

Result = TypeVar("Result")
Read = Callable[..., Any]  # from_pretrained with all arguments but the device -> (model, transformers' loading info)


def check_parallel(how: str, name: str, quantised: str) -> None:
    """Check that this run can lay out a target.

    Args:
        how: none, or a layout of this file.
        name: the target's, for the message.
        quantised: how its weights are quantised; "" if they are not.

    Raises:
        ValueError: the run has too many or too few processes, or the weights are quantised; in one line.
    """
    if how == "none":
        return
    processes = PartialState().num_processes
    if how == "layers" and processes > 1:
        raise ValueError(
            f"target.parallel=layers spreads the target over the GPUs of one process, this run has {processes}; "
            "take target.parallel=shard, or accelerate launch --num_processes 1"
        )
    if how in COLLECTIVE and processes == 1:
        raise ValueError(
            f"target.parallel={how} lays the target out over the processes of a run, this one has one; "
            "accelerate launch --num_processes N, or take target.parallel=layers"
        )
    if how in COLLECTIVE and quantised:
        raise ValueError(
            f"target.parallel={how} cuts weights that are not quantised, those of {name!r} are {quantised}; "
            "take target.parallel=none or layers, or leave target.quantise out"
        )


def lay_out(read: Read, how: str, device: torch.device | str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a model so that each process holds its part.

    Args:
        read: reads the model to a device.
        how: none, or a layout of this file.
        device: this process's.

    Returns:
        The model, and transformers' loading info.

    Raises:
        ValueError: tensor parallelism of an architecture without a plan, or with heads that the ranks do not divide.
    """
    with not_partitioned():
        if how == "shard":
            return _sharded(read, torch.device(device))
        if how == "tensor":
            return _tensor_parallel(read)
        return read(device_map="auto" if how == "layers" else {"": str(device)})


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a model's decoder layers.

    Raises:
        ValueError: the decoder does not have exactly one such list.
    """
    decoder, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        raise ValueError(
            f"{type(decoder).__name__}: expected one list of {count} decoder layers, got {len(lists)}; this architecture cannot be tapped"
        )
    return lists[0]


def in_turn(run: Callable[[dict[str, Tensor]], Result], rows: dict[str, Tensor]) -> Result:
    """Run each rank's rows on all ranks, one rank's after another's. No rank holds more than one rank's rows.

    Args:
        run: the forward, which all ranks run at once.
        rows: this rank's tensors, all [B,S] of one dtype; other ranks' may have other B and S.

    Returns:
        The result of `run` for this rank's rows.
    """
    state = PartialState()
    own = torch.stack(list(rows.values()))
    shapes = [torch.empty(own.dim(), dtype=torch.int64, device=own.device) for _ in range(state.num_processes)]
    dist.all_gather(shapes, torch.tensor(own.shape, device=own.device))
    results: list[Result] = []
    for rank, shape in enumerate(shapes):
        mine = rank == state.process_index
        part = own if mine else own.new_empty(shape.tolist())
        dist.broadcast(part, rank)
        result = run(dict(zip(rows, part, strict=True)))
        if mine:
            results.append(result)
    return results[0]


def _sharded(read: Read, device: torch.device) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Rank 0 alone reads the weights, into its host's memory, and sends them to the others one tensor at a time."""
    state = PartialState()
    model, info = read(device_map="meta")
    complete: PreTrainedModel | None = read(device_map="cpu")[0] if state.is_main_process else None
    model.requires_grad_(False)
    decoder, mesh = model.get_decoder(), init_device_mesh(device.type, (state.num_processes,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    unsharded = {parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=unsharded)  # under one root, layers are gathered ahead, while the one before computes
    # Weights without memory are put beside those that have some; if they had their own, they would be there twice.
    model.get_input_embeddings().to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, complete.state_dict() if complete else {}, options=options)
    model.tie_weights()
    for name, buffer in model.named_buffers():  # also those that no checkpoint stores, such as rotary frequencies
        owner, _, last = name.rpartition(".")
        value = complete.get_buffer(name).to(device) if complete else torch.empty_like(buffer, device=device)
        dist.broadcast(value, 0)
        model.get_submodule(owner)._buffers[last] = value
    with (
        torch.no_grad()
    ):  # the first forward allocates the gathered weights, which could not be filled again if inference mode allocated them
        decoder(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    return model, info


def _tensor_parallel(read: Read) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Each rank reads its parts, by transformers' plan for the architecture; embedding and output head stay complete."""
    empty: PreTrainedModel = read(device_map="meta")[0]
    ends = (empty.get_input_embeddings(), empty.get_output_embeddings())
    complete = [name for name, module in empty.named_modules() if module in ends]
    plan = {name: style for name, style in (empty.tp_plan or {}).items() if name not in complete}
    kind = empty.config.model_type
    if not plan:
        raise ValueError(
            f"transformers {transformers.__version__} has no plan for tensor parallelism of architecture {kind!r}; take target.parallel=shard"
        )
    processes = PartialState().num_processes
    _check_heads(empty.config.get_text_config(), kind, plan, processes)
    # Newer transformers keep their rule for modules that are not named. This rule cuts nothing, and sums gradients, of which there are none.
    plan |= dict.fromkeys(complete, "replicated_with_grad_allreduce")
    model, info = read(distributed_config=DistributedConfig(tp_size=processes, tp_plan=plan))
    for name in complete:
        vars(model.get_submodule(name)).pop("forward", None)  # the forward that the rule gave it
    return model, info


def _check_heads(config: PretrainedConfig, kind: str, plan: dict[str, str], processes: int) -> None:
    if not any(style == "colwise" and "att" in name for name, style in plan.items()):
        return  # the plan does not cut attention
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads % processes or groups % processes:
        raise ValueError(
            f"target.parallel=tensor shares attention heads out over {processes} processes, architecture {kind!r} has {heads} here, {groups} for "
            f"keys and values; launch as many processes as divide both, or take target.parallel=shard"
        )


@contextmanager
def not_partitioned() -> Iterator[None]:
    """Context in which transformers builds complete models. If a drafter is trained by ZeRO-3, transformers would else partition the target too,
    for DeepSpeed's engine."""
    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before
